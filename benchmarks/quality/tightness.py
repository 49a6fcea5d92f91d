"""The ratio of the bounds of random features to the errors of 200 draws, for each kernel.

    python benchmarks tightness [--frequencies 256] [--draws 200] [--smoke]

All theorems of `gp_orff.bounds` are evaluated at 95 % over the box [−1, 1]^d. They are compared
with the largest error of `MonteCarlo` at the lags of a lattice in [−2, 2]^d. Theorems for one pair
of points are compared with the error at the lag of the largest mean error. Lengthscales are 1. The
table has the median over draws of bound over error, and the number of draws above the bound.
"""

import math
from collections.abc import Callable, Sequence

import torch
from gpytorch.kernels import Kernel, MaternKernel, MultitaskKernel, RBFKernel
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff
from gp_orff import bounds

DELAY = 0.5
SPECTRAL = bounds.hoeffding, bounds.rahimi_recht, bounds.brault
ONE_PAIR = bounds.hoeffding, bounds.minh_pointwise


def unit(kernel: Kernel) -> Kernel:
    kernel.lengthscale = 1.0
    return kernel


def delayed(omega: Float[Tensor, "D 1"]) -> Float[Tensor, "D 2 1"]:
    shift = torch.exp(1j * DELAY * omega)
    return torch.stack([torch.ones_like(shift), shift], dim=1)


def turned(omega: Float[Tensor, "D 2"]) -> Float[Tensor, "D 2 1"]:
    """Return a bounded factor B(ω) with the direction of ω, rotated by half a radian."""
    c, s = math.cos(0.5), math.sin(0.5)
    along = omega @ torch.tensor([[c, s], [-s, c]], dtype=omega.dtype)
    return (along / (1 + omega.square().sum(-1, keepdim=True)).sqrt()).unsqueeze(-1)


def lagged(lag: Float[Tensor, "m 1"]) -> Float[Tensor, "m 2 2"]:
    shifts = torch.tensor([[0.0, DELAY], [-DELAY, 0.0]], dtype=lag.dtype)
    return torch.exp(-0.5 * (lag[..., None] + shifts).square())


def of_amplitude(amplitude: Callable, base: Kernel, num_dims: int) -> Kernel:
    return gp_orff.SpectralMatrixKernel(base, amplitude, num_outputs=2, num_dims=num_dims)


KERNELS: dict[str, tuple[Callable[[], Kernel], int, str]] = {
    "RBF": (lambda: unit(RBFKernel()), 2, "trace"),
    "Matérn 5/2": (lambda: unit(MaternKernel(nu=2.5)), 2, "trace"),
    "separable, RBF": (lambda: MultitaskKernel(unit(RBFKernel()), num_tasks=2), 2, "trace"),
    "curl-free, RBF": (lambda: gp_orff.CurlFreeKernel(unit(RBFKernel()), num_dims=2), 2, "trace"),
    "curl-free, RBF, base": (
        lambda: gp_orff.CurlFreeKernel(unit(RBFKernel()), num_dims=2),
        2,
        "base",
    ),
    "divergence-free, RBF": (
        lambda: gp_orff.DivergenceFreeKernel(unit(RBFKernel()), num_dims=2),
        2,
        "trace",
    ),
    "delay, RBF": (lambda: of_amplitude(delayed, unit(RBFKernel()), 1), 1, "trace"),
    "delay, Matérn 3/2": (lambda: of_amplitude(delayed, unit(MaternKernel(nu=1.5)), 1), 1, "trace"),
    "turned, RBF": (lambda: of_amplitude(turned, unit(RBFKernel()), 2), 2, "trace"),
    "delay, from its signature": (
        lambda: gp_orff.SpectralMatrixKernel.from_signature(lagged, [(-1.0, 1.0)]),
        1,
        "trace",
    ),
}


@torch.no_grad()
def errors(
    kernel: Kernel, num_dims: int, measure: str, number: int, draws: int
) -> Float[Tensor, "draws lags p p"]:
    axis = torch.linspace(-2, 2, 41 if num_dims == 1 else 13, dtype=torch.float64)
    lags = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    zero = torch.zeros_like(lags[:1])
    exact, found = kernel(lags, zero).to_dense(), []
    for seed in range(draws):
        rule = gp_orff.MonteCarlo(number, measure=measure, seed=seed)
        features = gp_orff.ORFFKernel(kernel, rule, num_dims=num_dims).features
        found.append(features(lags) @ features(zero).mT - exact)
    p = exact.shape[-1]
    return torch.stack(found).unflatten(1, (len(lags), p))


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, frequencies=(256, 32), draws=(200, 5))
    arguments = parser.parse_args(words)
    rows = Rows()
    for name, (build, num_dims, measure) in KERNELS.items():
        kernel = build().double()
        error = errors(kernel, num_dims, measure, arguments.frequencies, arguments.draws)
        for theorem in (*SPECTRAL, bounds.minh_pointwise, bounds.minh):
            try:
                bound = theorem(kernel, ((-1.0, 1.0),) * num_dims, measure=measure)
            except ValueError:  # it does not hold for this kernel
                continue
            order = 2 if theorem in SPECTRAL else "fro"
            norms = torch.linalg.matrix_norm(error, order)
            observed = norms[:, norms.mean(0).argmax()] if theorem in ONE_PAIR else norms.amax(-1)
            ceiling = bound.error(arguments.frequencies)
            rows.add(
                **{
                    "kernel": name,
                    "bound": theorem.__name__,
                    "error": observed.median().item(),
                    "at most": ceiling,
                    "ratio": (ceiling / observed).median().item(),
                    "above": (observed > ceiling).sum().item(),
                }
            )
    settings = {"frequencies": arguments.frequencies, "draws": arguments.draws}
    save(arguments, {**settings, "rows": rows})
