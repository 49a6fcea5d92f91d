"""Coverage of 95 % intervals of the delay between two sensors of one signal.

    python benchmarks delays [--points 60] [--seeds 100] [--smoke]

The signal is an RBF draw of lengthscale 1 on [0, 8]. One sensor observes it at random times. A
second sensor observes it after a delay that is uniform on [0.2, 0.8]. The noise is a tenth of the
standard deviation of the signal. `SpectralMatrixKernel` with B = (1, e^{iωτ})ᵀ learns the delay τ
from zero, and also the variance, the lengthscale and the noise. The interval is that of the report,
τ ± 1.96 standard errors. `starts` repeats this from a delay with the wrong sign, and from delays
that are far too long.
"""

import warnings
from collections.abc import Sequence

import torch
from gpytorch.kernels import RBFKernel
from helpers.command import Sizes
from helpers.results import save
from jaxtyping import Float
from torch import Tensor

import gp_orff

LONGEST, DELAYS, NOISE = 8.0, (0.2, 0.8), 0.1


class Delayed(torch.nn.Module):
    """The factor B(ω) of the outputs f₁(x) = g(x) and f₂(x) = g(x − τ)."""

    def __init__(self):
        super().__init__()
        self.delay = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))

    def forward(self, omega: Float[Tensor, "D 1"]) -> Float[Tensor, "D 2 1"]:
        shift = torch.polar(torch.ones_like(omega), self.delay * omega)
        return torch.stack([torch.ones_like(shift), shift], dim=1)


def observed(points: int, seed: int) -> tuple[float, Float[Tensor, "N 1"], Float[Tensor, "N 2"]]:
    """Return the delay, and the times and values of both sensors.

    The second sensor has the values of the signal at N earlier times.
    """
    generator = torch.Generator().manual_seed(seed)
    low, high = DELAYS
    delay = low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64)
    x = LONGEST * torch.rand(points, 1, generator=generator, dtype=torch.float64)
    times = torch.cat([x, x - delay])
    covariance = torch.exp(-0.5 * torch.cdist(times, times).square())
    covariance = covariance + 1e-9 * torch.eye(2 * points, dtype=torch.float64)
    normal = torch.randn(2, 2 * points, generator=generator, dtype=torch.float64)
    values = torch.linalg.cholesky(covariance) @ normal[0] + NOISE * normal[1]
    return delay.item(), x, values.reshape(2, points).mT


def learned(
    x: Float[Tensor, "N 1"], y: Float[Tensor, "N 2"], first: float = 0.0
) -> tuple[float, float]:
    """Return the learned delay and its standard error, for a search that starts at the delay
    `first`."""
    kernel = gp_orff.SpectralMatrixKernel(RBFKernel(), Delayed(), num_outputs=2, num_dims=1)
    torch.nn.init.constant_(kernel.amplitude.delay, first)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.CalibrationWarning)
        model = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)
    estimate = model.report.hyperparameters["delay"]
    return float(estimate.value), float(estimate.standard_error)


def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, points=(60, 60), seeds=(100, 2))
    arguments = parser.parse_args(words)
    starts = {"zero": [], "wrong sign": [], "3": [], "-5": []}
    for seed in range(arguments.seeds):
        delay, x, y = observed(arguments.points, seed)
        for name, fits in starts.items():
            first = {"zero": 0.0, "wrong sign": -delay}.get(name)
            value, deviation = learned(x, y, float(name) if first is None else first)
            fits.append({"delay": delay, "learned": value, "standard error": deviation})
    results = {
        "points": arguments.points,
        "simulations": arguments.seeds,
        **summary(starts["zero"]),
        "starts": {name: summary(fits) for name, fits in starts.items()},
    }
    print(results)
    save(arguments, {**results, "fits": starts["zero"]})


def summary(fits: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return how many intervals contain the delay, and the median errors."""
    error = torch.tensor([abs(fit["learned"] - fit["delay"]) for fit in fits])
    deviation = torch.tensor([fit["standard error"] for fit in fits])
    return {
        "inside": (error <= 1.96 * deviation).sum().item(),
        "elsewhere": (error > 5 * deviation).sum().item(),  # another mode of the evidence
        "median error": error.median().item(),
        "standard error": deviation.median().item(),
    }
