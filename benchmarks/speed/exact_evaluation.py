"""The exact evidence with its gradient, compared with one Cholesky factorisation and one inverse.

    python benchmarks exact_evaluation [--least 1000] [--most 8000] [--rounds 5] [--radials 3855]
        [--smoke]

The kernel is a `HelmholtzKernel` of an RBF potential, with one lengthscale or one for each input.
The inference is the exact inference of `VectorFieldGP`. The data are whole vectors, one number per
point along a direction, or vectors of which a quarter of the numbers is missing. Sizes are numbers
of observed values, doubled from `least` to `most`. All times have one thread and are interleaved in
one process, after one call of each. The ratio is the median over rounds. Then there are four
simulated radars: a Helmholtz field along the lines of sight, with one noise for each radar. The
columns are one evaluation, and the whole fit with its evaluations.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from gpytorch.kernels import RBFKernel
from helpers.command import Sizes
from helpers.measure import interleaved, median_ratio, seconds
from helpers.results import save
from helpers.rows import Rows
from helpers.unavoidable import factorisation

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.inference.exact import ExactInference

NOISE = 0.3


def inference_of(kind: str, numbers: int, num_dims: int) -> ExactInference:
    generator = torch.Generator().manual_seed(0)
    points = {"vectors": numbers // num_dims, "directions": numbers, "gaps": numbers * 4 // 3}
    points["gaps"] //= num_dims
    x = 10 * torch.rand(points[kind], num_dims, generator=generator).double()
    y, options = torch.randn(x.shape, generator=generator).double(), {}
    if kind == "directions":
        u = torch.nn.functional.normalize(torch.randn(x.shape, generator=generator).double())
        options, y = {"directions": u}, (u * y).sum(-1, keepdim=True)
    if kind == "gaps":
        missing = torch.randperm(y.numel(), generator=generator)[: y.numel() // 4]
        y.view(-1)[missing[missing % num_dims > 0]] = torch.nan
        options = {"missing": "mask"}
    return ExactInference(Dataset.in_memory(read(x, y, num_dims, Options(**options))))


def evaluation(inference: ExactInference, num_dims: int, ard: bool) -> Callable[[], object]:
    base = RBFKernel(ard_num_dims=num_dims if ard else None)
    kernel = gp_orff.HelmholtzKernel(base, num_dims=num_dims).double()
    raw = torch.tensor(NOISE, dtype=torch.float64, requires_grad=True)

    def once() -> None:
        noises = {"": raw * torch.eye(num_dims, dtype=torch.float64)}
        value = inference.evidence(kernel, noises).log_density(None, inference.num_values)
        torch.autograd.grad(value, [*kernel.parameters(), raw])

    return once


def radars(radials: int, seed: int = 0):
    """Return positions, radial velocities, directions and the radar of each observation, for a
    simulated current."""
    generator = torch.Generator().manual_seed(seed)
    sites = torch.tensor([[-5.0, 0.0], [-4.0, 5.0], [-5.0, 10.0], [5.0, -4.0]]).double()
    x = 10 * torch.rand(radials, 2, generator=generator).double()
    radar = torch.arange(radials) % 4
    u = torch.nn.functional.normalize(x - sites[radar])
    flow = torch.stack([torch.sin(0.9 * x[:, 1]) + 0.3 * x[:, 0].cos(), x[:, 0].sin()], dim=-1)
    noise = torch.tensor([0.1, 0.2, 0.15, 0.3]).double()[radar]
    y = (flow * u).sum(-1) + noise * torch.randn(radials, generator=generator).double()
    return x, y, u, [f"radar {i}" for i in radar.tolist()]


def whole_fit(radials: int) -> dict[str, float]:
    x, y, u, group = radars(radials)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
    taken = seconds(lambda: model.fit(x, y, directions=u, group=group, progress=False))
    stages = model.report.stages
    return {
        "radials": radials,
        "seconds": taken,
        "evaluations": sum(stage.evaluations for stage in stages),
        "method": model.report.method,
    }


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"least": (1000, 60), "most": (8000, 120), "rounds": (5, 2), "radials": (3855, 80)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows, numbers = Rows(), arguments.least
    while numbers <= arguments.most:
        for num_dims in (2, 3):
            for kind in ("vectors", "directions", "gaps"):
                inference = inference_of(kind, numbers, num_dims)
                steps = [evaluation(inference, num_dims, ard) for ard in (False, True)]
                bare = factorisation(int(inference.num_values))
                reference, one, ard = interleaved([bare, *steps], arguments.rounds)
                rows.add(
                    numbers=int(inference.num_values),
                    inputs=num_dims,
                    observed=kind,
                    bare=statistics.median(reference),
                    ratio=median_ratio(one, reference),
                    ARD=median_ratio(ard, reference),
                )
        numbers *= 2
    torch.set_num_threads(threads)
    found = {"rows": rows, "radars": whole_fit(arguments.radials)}
    print(found["radars"])
    save(arguments, found)
