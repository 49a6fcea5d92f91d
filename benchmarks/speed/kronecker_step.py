"""One training step of a separable kernel: 20 outputs compared with one.

    python benchmarks kronecker_step [--points 20000] [--frequencies 200] [--rounds 9] [--smoke]

The step is evidence and gradient of ORFFKernel(MultitaskKernel(RBF)) in ExactGP in float64, with
all steps interleaved in one process. Another method has the same features without the Kronecker
algebra: every direction is a separate feature, and F = 2D·p. It has a single round, because its
cost is F³. Each method has one step before it is timed. The ratio is the median over rounds.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from helpers.command import Sizes
from helpers.measure import interleaved, median_ratio
from helpers.models import VectorGP
from helpers.results import save
from helpers.rows import Rows

import gp_orff


class Written(gp_orff.ORFFKernel):
    """A kernel with the same features, but without the Kronecker form."""

    def _expansion(self, num_inputs):
        return super()._expansion(num_inputs).general()


def step_of(
    outputs: int, points: int, frequencies: int, kind: type = gp_orff.ORFFKernel
) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(points, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(points, outputs, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)  # gpytorch starts task covariances at random
    kernel = MultitaskKernel(RBFKernel(), num_tasks=outputs, rank=1)
    rule = gp_orff.MonteCarlo(frequencies)
    kernel = kind(kernel, rule, num_dims=2)
    return VectorGP(x, y, kernel, MultitaskGaussianLikelihood(outputs)).train().step


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (20_000, 300), "frequencies": (200, 10), "rounds": (9, 2)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    size = (arguments.points, arguments.frequencies)
    steps = [step_of(p, *size) for p in (1, 20)]
    one, twenty = interleaved(steps, arguments.rounds)
    plain = step_of(20, *size, kind=Written)
    evidence, same = steps[1](), plain()
    assert abs(evidence - same) < 1e-9 * abs(same), (evidence, same)
    (written,) = interleaved([plain], 1)
    rows = Rows()
    rows.add(outputs=1, algebra="Kronecker", seconds=statistics.median(one))
    rows.add(outputs=20, algebra="Kronecker", seconds=statistics.median(twenty))
    rows.add(outputs=20, algebra="written out", seconds=written[0])
    found = {"points": arguments.points, "columns": 2 * arguments.frequencies, "rows": rows}
    found["ratio of 20 outputs to one"] = median_ratio(twenty, one)
    print(f"ratio of 20 outputs to one: {found['ratio of 20 outputs to one']:.2f}")
    save(arguments, found)
