"""One training step of a separable kernel with 64 inputs: 100 outputs compared with one.

    python benchmarks many_outputs [--points 20000] [--frequencies 1024] [--outputs 100]
        [--rounds 3] [--smoke]

The step is evidence and gradient of ORFFKernel(MultitaskKernel(RBF), QuasiMonteCarlo) in ExactGP in
float64. All steps are interleaved in one process, and each method has one step before it is timed.
The ratio is the median over rounds. The table also has the times of parts of the algebra: one
eigendecomposition of the Gram matrix, and one Cholesky factor with its inverse. Without the
eigendecomposition, every output would need a separate Cholesky factor.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from helpers.command import Sizes
from helpers.measure import PeakMemory, interleaved, median_ratio
from helpers.models import VectorGP
from helpers.results import save
from helpers.rows import Rows

import gp_orff

INPUTS = 64


def step_of(outputs: int, points: int, frequencies: int) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, INPUTS, generator=generator, dtype=torch.float64)
    y = torch.randn(points, outputs, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    scalar = RBFKernel()
    scalar.lengthscale = INPUTS**0.5
    kernel = MultitaskKernel(scalar, num_tasks=outputs, rank=1)
    kernel = gp_orff.ORFFKernel(kernel, gp_orff.QuasiMonteCarlo(frequencies), num_dims=INPUTS)
    return VectorGP(x, y, kernel, MultitaskGaussianLikelihood(outputs)).train().step


def algebra(size: int) -> Rows:
    """Return the seconds of one call of each computation, and the MiB of its result."""
    root = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0)).double()
    gram, rows, mib = root @ root.mT, Rows(), 8 * size**2 / 2**20

    def factor_and_inverse() -> None:
        torch.cholesky_inverse(torch.linalg.cholesky(gram))

    eigen, factor = interleaved([lambda: torch.linalg.eigh(gram), factor_and_inverse], 1)
    rows.add(step="eigendecomposition", seconds=eigen[0], MiB=mib)
    rows.add(step="factor and inverse", seconds=factor[0], MiB=2 * mib)
    return rows


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (20_000, 400), "frequencies": (1024, 20)}
    sizes |= {"outputs": (100, 8), "rounds": (3, 2)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    steps = [step_of(p, arguments.points, arguments.frequencies) for p in (1, arguments.outputs)]
    one, many = interleaved(steps, arguments.rounds)
    rows = Rows()
    for outputs, step, times in zip((1, arguments.outputs), steps, (one, many), strict=True):
        with PeakMemory() as memory:
            step()
        rows.add(outputs=outputs, seconds=statistics.median(times), MiB=memory.mib)
    found = {"points": arguments.points, "columns": 2 * arguments.frequencies, "inputs": INPUTS}
    found |= {"rows": rows, "algebra": algebra(2 * arguments.frequencies)}
    found["ratio"] = median_ratio(many, one)
    print(f"ratio of {arguments.outputs} outputs to one: {found['ratio']:.2f}")
    save(arguments, found)
