"""Known fields that are drawn from priors, and the errors of posteriors of these fields."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from jaxtyping import Float
from torch import Tensor

import gp_orff

Field = Callable[[Float[Tensor, "N d"]], Float[Tensor, "N p"]]


def curl_free(lengthscale: float | None = None, num_dims: int = 2) -> ScaleKernel:
    """Return a curl-free kernel. If a lengthscale is given, the field has variance one."""
    return _of_variance_one(gp_orff.CurlFreeKernel, lengthscale, num_dims)


def divergence_free(lengthscale: float | None = None, num_dims: int = 2) -> ScaleKernel:
    """Return a divergence-free kernel. If a lengthscale is given, the field has variance one."""
    return _of_variance_one(gp_orff.DivergenceFreeKernel, lengthscale, num_dims)


def _of_variance_one(build, lengthscale: float | None, num_dims: int) -> ScaleKernel:
    potential = RBFKernel()
    kernel = ScaleKernel(build(potential, num_dims=num_dims)).double()
    if lengthscale is not None:
        potential.lengthscale = lengthscale
        kernel.outputscale = 1.0
        with torch.no_grad():
            origin = torch.zeros(1, num_dims, dtype=torch.float64)
            variance = kernel(origin).to_dense().diagonal().mean()
        kernel.outputscale = 1.0 / variance
    return kernel


def field_of(kernel, box: Sequence[tuple[float, float]], seed: int = 0) -> Field:
    """Return a draw from the prior as a function of points, by random weights on a fine grid."""
    grid = gp_orff.Grid(domain=box, tolerance=1e-9, lengthscale_range=(1, 1))
    expansion = gp_orff.ORFFKernel(kernel, grid)._expansion(len(box))
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(expansion.num_features, 1, generator=generator, dtype=torch.float64)
    weights = expansion.column_weights(theta).detach()
    return lambda x: expansion.phi.apply(x, weights)


def helmholtz_problem(
    seed: int, points: int
) -> tuple[Field, Float[Tensor, "N 2"], Float[Tensor, "N 2"], Float[Tensor, "1000 2"]]:
    """Return a draw of a random Helmholtz prior on the unit square, x, y, and 1000 held-out points.

    Lengthscales are between a tenth and a quarter of the extent, amplitudes between 0.3 and 1, and
    the noise between 0.1 and 1. All are uniform in the logarithm.
    """
    rng = np.random.default_rng(seed)
    lengthscales = np.exp(rng.uniform(math.log(0.1), math.log(0.25), 2))
    amplitudes = np.exp(rng.uniform(math.log(0.3), 0.0, 2))
    noise = float(np.exp(rng.uniform(math.log(0.1), 0.0)))
    parts = curl_free(lengthscales[0]), divergence_free(lengthscales[1])
    for part, amplitude in zip(parts, amplitudes, strict=True):
        part.outputscale = amplitude**2 * part.outputscale
    field = field_of(parts[0] + parts[1], ((0.0, 1.0),) * 2, seed)
    x = torch.from_numpy(rng.random((points + 1000, 2)))
    x, xs = x[:points], x[points:]
    return field, x, field(x) + noise * torch.from_numpy(rng.standard_normal((points, 2))), xs


def scores(
    mean: Float[Tensor, "n q"], variance: Float[Tensor, "n q"], truth: Float[Tensor, "n q"]
) -> dict[str, float]:
    """Return the RMSE of a value, the root mean posterior variance, and the coverage of 95 %
    intervals."""
    error = mean - truth
    inside = error.square() <= 1.96**2 * variance
    return {
        "error": error.square().mean().sqrt().item(),
        "sd": variance.mean().sqrt().item(),
        "inside": inside.double().mean().item(),
    }


def nlpd(error: Float[Tensor, "n q"], variance: Float[Tensor, "n q"] | Float[Tensor, "1"]) -> float:
    """Return the negative log predictive density of a value, in nats."""
    return 0.5 * (error.square() / variance + torch.log(2 * math.pi * variance)).mean().item()


def mean_and_standard_error(shares: Sequence[float]) -> dict[str, float]:
    return {
        "mean": float(np.mean(shares)),
        "standard_error": float(np.std(shares, ddof=1) / math.sqrt(len(shares))),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    shares = {"10 %": 0.1, "50 %": 0.5, "90 %": 0.9}
    return {name: float(np.quantile(values, share)) for name, share in shares.items()}
