"""One training step and one prediction of a gpytorch model: `ORFFKernel` and other methods.

    python benchmarks exactgp_step [--points 50000] [--features 2000] [--rounds 3] [--smoke]

All methods have equal numbers of features. The data are vectors of a curl-free field of lengthscale
one in a square of nine, with noise of a tenth of its variance. All hyperparameters are those of the
field. A step is the evidence (or the ELBO) of all N vectors and its gradient by all
hyperparameters. A prediction is the mean and the variance at 2000 other places, of a model that has
not predicted before. All methods use float64 and one thread. N is 500, 5000 and 50 000 up to
`--points`, and F is 200, 1000 and 2000 up to `--features`.

Every method has a separate process. The processes run in turn, for `--rounds` rounds or until a
process has used five seconds of processor time. Times are medians of processor seconds, which
depend little on other work on the machine. MiB is the peak memory of the first step minus that of
the data and the model, after a small first step (Linux only).

The methods are
    orff        ORFFKernel(CurlFreeKernel(RBF), MonteCarlo(F/2)) in ExactGP
    grid        the same with Grid.for_data and at most F features, as many as its tolerance needs
    woodbury    the features of `orff` in plain torch: φᵀφ once, one Cholesky factor, and one
                autograd.Function with the whole gradient in closed form; φ remains in memory
    separable   ORFFKernel(MultitaskKernel(RBF, rank 1), MonteCarlo(F/4)) in ExactGP
    rff         MultitaskKernel(RFFKernel(F/4), rank 1) in ExactGP: the features of gpytorch, with
                500 vectors only, because it diagonalises their N × N covariance matrix
    svgp        VariationalStrategy of gpytorch for independent outputs, F/2 inducing points each; a
                step is a natural-gradient step of rate one, in batches, so that q is optimal
"""

import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache

import gpytorch
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, RFFKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.variational import (
    IndependentMultitaskVariationalStrategy,
    NaturalVariationalDistribution,
    VariationalStrategy,
)
from helpers.command import Sizes
from helpers.fields import curl_free, field_of, scores
from helpers.known_data import EXTENT
from helpers.measure import PeakMemory
from helpers.models import VectorGP
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

POINTS, FEATURES = (500, 5000, 50_000), (200, 1000, 2000)
PLACES, NOISE, BATCH = 2000, 0.1, 5000
ENOUGH = 5.0  # processor seconds after which no round begins
LARGEST = {"rff": 500}  # vectors
Moments = tuple[Float[Tensor, "n 2"], Float[Tensor, "n 2"]]


class Woodbury:
    """An `ExactGP` on random features of a curl-free kernel, written without the package."""

    def __init__(self, x: Float[Tensor, "N 2"], y: Float[Tensor, "N 2"], orff: gp_orff.ORFFKernel):
        self.x, self.y, self.base = x, y, orff.frequencies[0].bases[0]
        scale, potential = orff.base_kernel, orff.base_kernel.base_kernel.base_kernel
        dimensions = self.base.shape[-1]
        tilt = (dimensions / self.base.square().sum(-1)).sqrt()  # from the density of the trace
        self.start = tilt.unsqueeze(-1) / len(self.base) ** 0.5
        noise = torch.full((2,), NOISE, dtype=torch.float64)
        values = scale.outputscale, potential.lengthscale.squeeze(), *noise
        self.logs = torch.stack([v.detach().log() for v in values]).requires_grad_()
        self.mean = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance, lengthscale, *noise = self.logs.exp()
        omega, deviation = self.base / lengthscale, torch.stack(noise).sqrt()
        weights = variance.sqrt() * self.start * omega
        return omega, torch.cat([weights, weights]), deviation, (self.y - self.mean) / deviation

    def step(self) -> float:
        """Compute the evidence per value and its gradient, and return the evidence."""
        self.logs.grad = self.mean.grad = None
        omega, weights, deviation, residuals = self.parts()
        twice = ReducedTerms.apply(self.x, omega, weights / deviation, residuals)
        twice = twice + residuals.square().sum() + 2 * len(self.x) * deviation.log().sum()
        evidence = -0.5 * (twice / self.y.numel() + math.log(2 * math.pi))
        (-evidence).backward()
        return evidence.item()

    @torch.no_grad()
    def predict(self, xs: Float[Tensor, "n 2"]) -> Moments:
        omega, weights, deviation, residuals = self.parts()
        _, factor, solution, *_ = reduced(self.x, omega, weights / deviation, residuals)
        phi = columns(xs, omega)
        rows = [phi * own for own in weights.mT]
        halves = [torch.linalg.solve_triangular(factor, own.mT, upper=False) for own in rows]
        mean = torch.stack([own @ solution for own in rows], dim=-1) + self.mean
        return mean, torch.stack([half.square().sum(0) for half in halves], dim=-1)


def columns(x: Float[Tensor, "n 2"], omega: Float[Tensor, "D 2"]) -> Float[Tensor, "n 2*D"]:
    phases = x @ omega.mT
    return torch.cat([phases.cos(), phases.sin()], dim=-1)


def reduced(x, omega, weights, residuals) -> tuple[Tensor, ...]:
    """Return φ, the Cholesky factor of A = I + φᵀφ∘WWᵀ, A⁻¹b with b = Σ_p W_p∘φᵀr_p, φᵀφ and
    φᵀr."""
    phi = columns(x, omega)
    gram, moments = phi.mT @ phi, phi.mT @ residuals
    system = gram * (weights @ weights.mT)
    system.diagonal().add_(1.0)
    factor = torch.linalg.cholesky(system)
    right = (weights * moments).sum(-1, keepdim=True)
    return phi, factor, torch.cholesky_solve(right, factor).squeeze(-1), gram, moments


class ReducedTerms(torch.autograd.Function):
    """The autograd function of log|A| − bᵀA⁻¹b."""

    @staticmethod
    def forward(ctx, x, omega, weights, residuals):
        phi, factor, solution, gram, moments = reduced(x, omega, weights, residuals)
        ctx.save_for_backward(x, weights, residuals, phi, factor, solution, gram, moments)
        right = (weights * moments).sum(-1)
        return 2 * factor.diagonal().log().sum() - right @ solution

    @staticmethod
    def backward(ctx, slope):
        x, weights, residuals, phi, factor, solution, gram, moments = ctx.saved_tensors
        system = torch.cholesky_inverse(factor).addr_(solution, solution)
        right = -2 * solution.unsqueeze(-1)
        of_weights = 2 * (system * gram) @ weights + right * moments
        of_moments = right * weights
        of_phi = phi @ system.mul_(weights @ weights.mT).mul_(2.0)
        of_phi.addmm_(residuals, of_moments.mT)
        cosine, sine = phi.chunk(2, dim=-1)
        of_phases = of_phi.chunk(2, dim=-1)
        of_phases = cosine * of_phases[1] - sine * of_phases[0]
        grads = of_phases.mT @ x, of_weights, phi @ of_moments
        return None, *(slope * grad for grad in grads)


def noise_of_all() -> MultitaskGaussianLikelihood:
    likelihood = MultitaskGaussianLikelihood(2).double()
    half = torch.full((2,), 0.5 * NOISE, dtype=torch.float64)
    likelihood.noise, likelihood.task_noises = half[:1], half
    return likelihood


class Exact:
    """An `ExactGP` with a given kernel."""

    def __init__(self, x: Tensor, y: Tensor, kernel: gpytorch.kernels.Kernel):
        self.model = VectorGP.with_constants(x, y, kernel, noise_of_all())

    def step(self) -> float:
        return self.model.train().step()

    @torch.no_grad()
    def predict(self, xs: Tensor) -> Moments:
        posterior = self.model.train().eval()(xs)
        return posterior.mean, posterior.variance


class Inducing(gpytorch.models.ApproximateGP):
    def __init__(self, points: Float[Tensor, "M 2"]):
        both = torch.Size([2])
        distribution = NaturalVariationalDistribution(len(points), batch_shape=both)
        strategy = VariationalStrategy(self, points, distribution, learn_inducing_locations=True)
        super().__init__(IndependentMultitaskVariationalStrategy(strategy, num_tasks=2))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=both)
        kernel = RBFKernel(batch_shape=both)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=both)

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Variational:
    """SVGP with the optimal q, from one step of natural gradients with rate one on all data."""

    def __init__(self, x: Tensor, y: Tensor, number: int):
        self.x, self.y = x, y
        generator = torch.Generator().manual_seed(1)
        chosen = torch.randperm(len(x), generator=generator)[:number]
        self.model = Inducing(x[chosen].clone()).double()
        self.likelihood = noise_of_all()
        self.mll = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, len(x))
        natural = list(self.model.variational_parameters())
        self.natural = gpytorch.optim.NGD(natural, num_data=len(x), lr=1.0)

    def step(self) -> float:
        self.model.train()
        self.model.zero_grad(), self.likelihood.zero_grad()
        total = 0.0
        for x, y in zip(self.x.split(BATCH), self.y.split(BATCH), strict=True):
            loss = -self.mll(self.model(x), y) * len(x) / len(self.x)
            loss.backward()
            total -= loss.item()
        self.natural.step()
        return total

    @torch.no_grad()
    def predict(self, xs: Tensor) -> Moments:
        posterior = self.model.train().eval()(xs)
        return posterior.mean, posterior.variance


def features(kernel: gpytorch.kernels.Kernel, rule: object) -> gp_orff.ORFFKernel:
    return gp_orff.ORFFKernel(kernel, rule, num_dims=2).double()


def drawn(frequencies: int) -> gp_orff.ORFFKernel:
    return features(curl_free(1.0), gp_orff.MonteCarlo(frequencies, seed=0))


def on_a_grid(x: Tensor, number: int) -> gp_orff.ORFFKernel:
    return features(curl_free(1.0), gp_orff.Grid.for_data(x, max_features=number))


def tasks(scalar: gpytorch.kernels.Kernel) -> MultitaskKernel:
    """Return a kernel of two outputs with variance one. Their correlation is a parameter, which
    starts at zero."""
    kernel = MultitaskKernel(scalar, num_tasks=2, rank=1).double()
    kernel.task_covar_module.covar_factor.data.zero_()
    kernel.task_covar_module.var = torch.ones(2)
    scalar.lengthscale = 1.0
    return kernel


def separable(number: int) -> gp_orff.ORFFKernel:
    return features(tasks(RBFKernel()), gp_orff.MonteCarlo(number // 4, seed=0))


CONTESTANTS: dict[str, Callable[[Tensor, Tensor, int], Exact | Woodbury | Variational]] = {
    "orff": lambda x, y, number: Exact(x, y, drawn(number // 2)),
    "grid": lambda x, y, number: Exact(x, y, on_a_grid(x, number)),
    "woodbury": lambda x, y, number: Woodbury(x, y, drawn(number // 2)),
    "separable": lambda x, y, number: Exact(x, y, separable(number)),
    "rff": lambda x, y, number: Exact(x, y, tasks(RFFKernel(number // 4, num_dims=2).double())),
    "svgp": lambda x, y, number: Variational(x, y, number // 2),
}


@lru_cache(1)
def data(points: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return observed vectors, and the true field at further positions."""
    side = EXTENT[2]
    generator = torch.Generator().manual_seed(0)
    field = field_of(curl_free(1.0), ((0.0, side),) * 2)
    x, xs = (
        side * torch.rand(n, 2, generator=generator, dtype=torch.float64) for n in (points, PLACES)
    )
    noise = torch.randn(points, 2, generator=generator, dtype=torch.float64)
    return x, field(x) + NOISE**0.5 * noise, xs, field(xs)


def step_of(name: str, points: int, number: int) -> Callable[[], float]:
    """Return a function that runs one step. Its data and model are created before."""
    x, y, *_ = data(points)
    return CONTESTANTS[name](x, y, number).step


def prepare() -> None:
    """Set up the process of a contestant."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of many truncated features, and of the data used again


def measured(name: str, points: int, number: int, first: bool) -> dict[str, float]:
    """Return the processor seconds of a step and of a prediction. In the first round, return MiB
    and scores too."""
    if first:
        x, y, xs, _ = data(100)
        small = CONTESTANTS[name](x, y, 40)
        small.step(), small.predict(xs[:5])
    x, y, xs, truth = data(points)
    torch.manual_seed(0)  # of RFFKernel
    model = CONTESTANTS[name](x, y, number)
    with PeakMemory() as memory:
        began = time.process_time()
        evidence = model.step()
        between = time.process_time()
    moments = model.predict(xs)
    found = {"step": between - began, "prediction": time.process_time() - between}
    if first:
        own = scores(*moments, truth)
        kernel = model.model.covar_module if isinstance(model, Exact) else None
        count = getattr(kernel, "num_features", number)
        found |= {"MiB": memory.mib, "RMSE": own["error"], "inside": own["inside"]}
        found |= {"F": count, "evidence": evidence}
    return found


def compared(
    processes: dict[str, ProcessPoolExecutor], points: int, number: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the medians of the times of each contestant, and the results of the first round."""
    first: dict[str, dict[str, float]] = {}
    times: dict[str, list[tuple[float, float]]] = {
        name: [] for name in CONTESTANTS if points <= LARGEST.get(name, points)
    }
    for round_ in range(rounds):
        for name, own in times.items():
            if sum(map(sum, own)) > ENOUGH:
                continue
            found = processes[name].submit(measured, name, points, number, not round_).result()
            first.setdefault(name, found)
            own.append((found["step"], found["prediction"]))
    for name, found in first.items():
        found["step"], found["prediction"] = map(statistics.median, zip(*times[name], strict=True))
    return first


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (50_000, 500), "features": (2000, 200)}
    arguments = Sizes(__file__, __doc__, **sizes, rounds=(3, 1)).parse_args(words)
    context, rows = multiprocessing.get_context("spawn"), Rows()
    processes = {name: ProcessPoolExecutor(1, context, prepare) for name in CONTESTANTS}
    for points in (n for n in POINTS if n <= arguments.points):
        for number in (n for n in FEATURES if n <= arguments.features):
            found = compared(processes, points, number, arguments.rounds)
            own, same = (found[name]["evidence"] for name in ("orff", "woodbury"))
            assert abs(own - same) < 1e-9 * max(abs(own), 1.0), (own, same)
            for name, values in found.items():
                ratio = {
                    f"{key} / orff": values[key] / found["orff"][key]
                    for key in ("step", "prediction")
                }
                rows.add(contestant=name, points=points, features=number, **values, **ratio)
            save(arguments, {"rows": rows, "places": PLACES})  # what is there, if it is stopped
    for process in processes.values():
        process.shutdown()
