"""One training step of an ExactGP: ORFFKernel against what a user would use instead.

    python benchmarks exactgp_step [--points 20000] [--frequencies 200] [--rounds 9] [--smoke]

A step is the evidence and its gradient for all hyperparameters, in float64, of a curl-free RBF
kernel in two dimensions with gpytorch's MultitaskGaussianLikelihood. All run in one process,
interleaved, after one step of each; the ratios are medians over rounds. Peak memory is measured in
a fresh process each, above what the data and the model hold, after a small warm-up (Linux only).

Contestants, fixed here:
    orff        ORFFKernel(CurlFreeKernel(RBF), MonteCarlo(D)) in ExactGP
    low_rank    the same features, written out as Φ (N·p × F) and given to gpytorch as its
                LowRankRootLinearOperator, in the same ExactGP
    bare        the work no method avoids: one cosine and one sine of every phase, φᵀφ and φ·G,
                over the same chunks, without autograd or gpytorch
    exact       the exact CurlFreeKernel on the first `--exact-points` (2000), Cholesky
"""

import statistics
import subprocess
from collections.abc import Callable, Sequence

import gpytorch
import torch
from helpers.command import RUN, Sizes
from helpers.measure import PeakMemory, interleaved, median_ratio
from helpers.models import VectorGP, by_cholesky
from helpers.results import save
from helpers.rows import Rows
from linear_operator.operators import LowRankRootLinearOperator

import gp_orff
from gp_orff.features import chunked
from gp_orff.features.phases import LinearPhases

CONTESTANTS = ("orff", "low_rank", "bare", "exact")


class WrittenOut(gpytorch.kernels.Kernel):
    """The features of an ORFFKernel as one dense Φ, the way gpytorch's RFFKernel holds them."""

    def __init__(self, orff):
        super().__init__()
        self.base_kernel, self.draw = orff.base_kernel, orff.frequencies[0]

    def num_outputs_per_input(self, x1, x2):
        return 2

    def forward(self, x1, x2, diag=False, **params):
        spectrum = gp_orff.spectrum(self.base_kernel.base_kernel)
        (omega,), weights = self.draw.nodes([spectrum])
        phase = x1 @ omega.mT
        phi = torch.cat([phase.cos(), phase.sin()], dim=-1)
        directions = omega * weights.sqrt().unsqueeze(-1)
        directions = torch.cat([directions, directions])  # (F, 2)
        features = (phi.unsqueeze(-2) * directions.mT).reshape(-1, phi.shape[-1])
        return LowRankRootLinearOperator(features)


def data(points):
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(points, 2, generator=generator, dtype=torch.float64)
    potential = torch.stack([x[:, 0].cos() * x[:, 1].sin(), x[:, 0].sin() * x[:, 1].cos()], dim=-1)
    return x, potential + 0.1 * torch.randn(points, 2, generator=generator, dtype=torch.float64)


def kernels(frequencies):
    exact = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2).double()
    orff = gp_orff.ORFFKernel(exact, gp_orff.MonteCarlo(frequencies, seed=0)).double()
    return {"orff": orff, "low_rank": WrittenOut(orff).double(), "exact": exact}


def bare_step(x, phases, g):
    gram = torch.zeros_like(g)
    for rows in chunked.chunks(x, g.shape[0]):
        phi = chunked.trig(x[rows], phases)
        gram += phi.mT @ phi
        phi @ g
    return gram


def step_of(name: str, points: int, frequencies: int) -> Callable[[], float]:
    """A function that runs one step, its data and model made beforehand."""
    x, y = data(points)
    if name == "bare":
        phases = LinearPhases(torch.randn(frequencies, 2, dtype=torch.float64))
        g = torch.randn(2 * frequencies, 2 * frequencies, dtype=torch.float64)
        return lambda: bare_step(x, phases, g)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    model = VectorGP.with_constants(x, y, kernels(frequencies)[name], likelihood).train()

    def exact_step() -> float:
        with by_cholesky():
            return model.step()

    return exact_step if name == "exact" else model.step


def points_of(name, arguments):
    return arguments.exact_points if name == "exact" else arguments.points


def memory_of(name: str, arguments) -> None:
    """MiB that one step adds at its peak; run in a process of its own."""
    points = points_of(name, arguments)
    step_of(name, min(points, 500), arguments.frequencies)()
    step = step_of(name, points, arguments.frequencies)
    with PeakMemory() as memory:
        step()
    print(memory.mib)


def in_a_process(name: str, arguments) -> float:
    command = [*RUN, "exactgp_step", "--memory-of", name]
    for size in ("points", "exact-points", "frequencies"):
        command += [f"--{size}", str(getattr(arguments, size.replace("-", "_")))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (20_000, 500), "exact_points": (2000, 50), "frequencies": (200, 20)}
    parser = Sizes(__file__, __doc__, **sizes, rounds=(9, 2))
    parser.add_argument("--memory-of", choices=CONTESTANTS, help="MiB of one alone")
    arguments = parser.parse_args(words)
    if arguments.memory_of:
        memory_of(arguments.memory_of, arguments)
        return

    steps = {
        name: step_of(name, points_of(name, arguments), arguments.frequencies)
        for name in CONTESTANTS
    }
    evidence, same = steps["orff"](), steps["low_rank"]()
    assert abs(evidence - same) < 1e-9 * abs(same), (evidence, same)
    times = dict(zip(steps, interleaved(list(steps.values()), arguments.rounds), strict=True))
    memory = {name: in_a_process(name, arguments) for name in CONTESTANTS}
    rows = Rows()
    for name in CONTESTANTS:
        rows.add(
            contestant=name,
            points=points_of(name, arguments),
            seconds=statistics.median(times[name]),
            ratio=median_ratio(times[name], times["orff"]),
            MiB=memory[name],
        )
    columns = 2 * arguments.frequencies
    save(arguments, {"rows": rows, "columns": columns, "threads": torch.get_num_threads()})
