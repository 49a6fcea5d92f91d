"""Large frequency grids by iterations: accuracy of mean, sd and evidence; iterations and time.

    python benchmarks iterative [--features 65000] [--draws 3] [--most 1e6] [--cases 20] [--smoke]

`accuracy`: 800 vectors of a curl-free Matérn 5/2 field over 10 × 10 lengthscales, on a grid of
65 000 features, compared with the exact kernel at the same hyperparameters. Signals are 3 and 33
times the noise. `mean` is the root mean square difference of the posterior means at 400 points over
the exact sd, and `median` the median difference. `sd` is ‖difference‖/‖exact‖ of the sd at 20
points, and `largest sd` the largest relative difference. The variance δ that the grid omits acts as
white noise. Near a datum with the noise variance σ², the sd is therefore too large by up to δ/2σ²,
which is 9 % for a ratio of 33, and the means differ most. The scores of a draw depend on its few
points that are close to data. `nearest` is the smallest distance between a datum and one of the 20
points, in lengthscales. For this reason there are several draws.

`large`: 10⁵ and 10⁶ vectors on the same grid. The columns are the iterations for the mean; CPU
seconds of the statistics (one pass over the data), of the posterior mean after this pass, of the
variances at 5 points, and of log|A|; and the standard error of the evidence in nats.

`evidence`: cases with various kernels, signals and numbers of points, on grids of up to 3000
features, with a dense block of an eighth of the features. `z` is the evidence minus that of a
factorisation, in standard errors. `inside` is the number of cases with |z| below 2.
"""

import math
import time
from collections.abc import Sequence
from itertools import pairwise

import gpytorch
import torch
from gpytorch.kernels import Kernel, MaternKernel, RQKernel
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import draw, expand
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import FeatureInference, IterativeInference
from gp_orff.inference.iterative import Accuracy, solve

EXTENT = 10.0  # lengthscales
PERIOD = 16.0  # of the grid: correlations beyond 6 lengthscales are small
SIGNALS = (3.0, 33.0)  # standard deviations, over that of the noise
KERNELS = {
    "curl-free Matérn": (lambda: gp_orff.CurlFreeKernel(MaternKernel(2.5), num_dims=2), 2),
    "Helmholtz RQ": (lambda: gp_orff.HelmholtzKernel(RQKernel(), num_dims=2), 2),
    "divergence-free 3-D": (lambda: gp_orff.DivergenceFreeKernel(MaternKernel(2.5), num_dims=3), 3),
    "separable": (lambda: gpytorch.kernels.MultitaskKernel(MaternKernel(1.5), 2, rank=1), 2),
}


def kernel_of(name: str) -> Kernel:
    """Return a kernel whose lengthscales are one, without trained parameters."""
    torch.manual_seed(0)  # of the output covariance of gpytorch's kernel
    kernel = KERNELS[name][0]().double()
    for module in kernel.modules():
        if getattr(module, "has_lengthscale", False):
            module.lengthscale = 1.0
    return kernel.requires_grad_(False)


STRICT = Accuracy(mean_error=3e-4)  # a tenth of that of models


class Problem:
    """Noisy observations of a draw of the prior at N points, and points for predictions."""

    def __init__(self, name: str, points: int, signal: float, more: int = 0, seed: int = 0):
        self.kernel, dims = kernel_of(name), KERNELS[name][1]
        self.extent = EXTENT if dims == 2 else EXTENT / 2
        generator = torch.Generator().manual_seed(seed)
        x = self.extent * torch.rand(points + more, dims, generator=generator).double()
        prior = self.kernel(x[:1]).to_dense()
        noise = prior.diagonal().mean() / signal**2
        f = self.field(x, generator)
        p = f.shape[-1]
        y = f[:points] + noise.sqrt() * torch.randn(points, p, generator=generator).double()
        self.data = Dataset.in_memory(read(x[:points], y, p, Options()))
        self.noises = {"": noise * torch.eye(p).double()}
        self.mean, self.values = torch.zeros(p).double(), p * points
        self.places, self.xs = x[:points], x[points:]

    def field(self, x: Float[Tensor, "n d"], generator: torch.Generator) -> Float[Tensor, "n p"]:
        """Return an exact draw at few points, or a draw by random features at many points."""
        if len(x) <= 2000:
            covariance = self.kernel(x).to_dense()
            covariance.diagonal().add_(1e-8)
            white = torch.randn(len(covariance), generator=generator).double()
            return (torch.linalg.cholesky(covariance) @ white).reshape(len(x), -1)
        rule = gp_orff.QuasiMonteCarlo(2000, seed=1)
        expansion = expand(self.kernel, draw(self.kernel, rule, x.shape[-1]), x.shape[-1]).double()
        theta = torch.randn(expansion.num_features, 1, generator=generator).double()
        return expansion.phi.apply(x, expansion.column_weights(theta))

    def grid(self, features: int) -> list:
        """Return the frequencies of a grid with at most the given number of features."""
        dims = self.xs.shape[-1]
        grid = gp_orff.Grid(
            domain=((0.0, self.extent),) * dims,
            spacing=2 * math.pi / (PERIOD if dims == 2 else PERIOD - 6),
            tolerance=1e-9,
            max_features=features,
        )
        return draw(self.kernel, grid, dims)


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def accuracy(signal: float, features: int, seed: int, rows: Rows) -> None:
    problem = Problem("curl-free Matérn", 800, signal, more=400, seed=seed)
    inference = IterativeInference(problem.data, problem.grid(features), accuracy=STRICT)
    found, exact = (
        part.posterior(problem.kernel, problem.noises, problem.mean).distribution
        for part in (inference, ExactInference(problem.data))
    )
    xs, few = problem.xs, problem.xs[:20]
    sd = exact.variance(xs).sqrt()
    difference, sd = (found.mean(xs) - exact.mean(xs)) / sd, sd[: len(few)]
    error = found.variance(few).sqrt() - sd
    rows.add(
        draw=seed,
        signal=signal,
        features=inference.num_features(problem.kernel),
        mean=rms(difference),
        median=difference.abs().median().item(),
        sd=(error.norm() / sd.norm()).item(),
        **{"largest sd": (error / sd).abs().max().item()},
        nearest=torch.cdist(few, problem.places).min().item(),
    )


def large(points: int, signal: float, features: int, rows: Rows) -> None:
    problem = Problem("curl-free Matérn", points, signal, more=5)
    inference = IterativeInference(problem.data, problem.grid(features), accuracy=STRICT)
    clock = [time.process_time()]
    inference.prepare()
    clock.append(time.process_time())
    posterior = inference.posterior(problem.kernel, problem.noises, problem.mean)
    clock.append(time.process_time())
    posterior.distribution.variance(problem.xs)
    clock.append(time.process_time())
    error = posterior.evidence.standard_error
    clock.append(time.process_time())
    weights = posterior.distribution.split()[0]
    system = weights.system
    b = system.precision.product(weights.theta.mT)
    size = (b * system.preconditioner.solve(b)).sum().sqrt().item()
    relative = system.accuracy.mean_error * features**0.5 / size
    solution = solve(system.precision, system.preconditioner, b, relative, system.accuracy.most)
    seconds = [after - before for before, after in pairwise(clock)]
    names = ("statistics", "mean", "variances", "logdet")
    rows.add(
        points=points,
        signal=signal,
        features=inference.num_features(problem.kernel),
        iterations=solution.iterations.item(),
        **dict(zip(names, seconds, strict=True)),
        error=error,
    )


def evidence(case: int, features: int, rows: Rows) -> None:
    name = list(KERNELS)[case % len(KERNELS)]
    signal, points = SIGNALS[case // 2 % 2], (500, 5000)[case // 4 % 2]
    problem = Problem(name, points, signal, more=1, seed=case)
    draws = problem.grid(features)
    block = Accuracy(block=features // 8, seed=case)
    found, exact = (
        part.posterior(problem.kernel, problem.noises, problem.mean).evidence
        for part in (
            IterativeInference(problem.data, draws, accuracy=block),
            FeatureInference(problem.data, draws),
        )
    )
    nats, expected = (e.log_density(problem.mean, problem.values).item() for e in (found, exact))
    rows.add(
        case=case,
        signal=signal,
        points=points,
        nats=expected,
        difference=nats - expected,
        error=found.standard_error,
        z=(nats - expected) / found.standard_error,
        kernel=name,
    )


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"features": (65000, 2000), "draws": (3, 1), "most": (1e6, 2e3), "cases": (20, 2)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    tables = {name: Rows() for name in ("accuracy", "large", "evidence")}
    for signal in SIGNALS:
        for seed in range(arguments.draws):
            accuracy(signal, arguments.features, seed, tables["accuracy"])
    for points in (2000, 10**5, 10**6):
        if min(arguments.most, 10**5) <= points <= arguments.most:
            for signal in SIGNALS:
                large(points, signal, arguments.features, tables["large"])
    for case in range(arguments.cases):
        evidence(case, min(arguments.features, 3000), tables["evidence"])
    inside = sum(abs(row["z"]) < 2 for row in tables["evidence"])
    print(f"within two standard errors: {inside} of {arguments.cases}")
    save(arguments, {**tables, "inside": inside})
