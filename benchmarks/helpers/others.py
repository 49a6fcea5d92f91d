"""Methods for comparison: exact, dense and sparse Gaussian processes without features."""

from collections.abc import Callable

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from scipy.cluster.vq import kmeans2
from torch import Tensor
from tqdm import tqdm

import gp_orff
from helpers.fields import scores
from helpers.known_data import EXTENT, Problem
from helpers.measure import PeakMemory, seconds
from helpers.models import VectorGP, by_cholesky, one_noise

INDUCING, BATCH, GAIN = 250, 256, 2e-3


def start_kernel() -> gp_orff.HelmholtzKernel:
    """Return a kernel with starting values that a user might choose: lengthscales of a fifth of the
    extent, and the variance of the data."""
    kernel = gp_orff.HelmholtzKernel(num_dims=2).double()
    for part in (kernel.curl_free, kernel.divergence_free):
        part.base_kernel.base_kernel.lengthscale = EXTENT[2] / 5
        part.outputscale = 0.5 * (EXTENT[2] / 5) ** 2
    return kernel


def exact(points: int, dims: int, smoke: bool) -> dict[str, object]:
    problem = Problem.of(points, dims)
    model = VectorGP(*problem.in_memory(), start_kernel(), one_noise(2, 0.1))
    with by_cholesky():
        with PeakMemory() as memory:
            fit = seconds(lambda: model.learn(max_iter=2 if smoke else 25))
        with torch.no_grad():
            posterior = model.eval()(problem.xs)
            found = scores(posterior.mean, posterior.variance, problem.truth)
    return {"fit": fit, "MiB": memory.mib, **found}


def dense(points: int, dims: int, smoke: bool) -> dict[str, object]:
    evaluate_few = _dense_evaluation(min(points, 200))
    evaluate_few()
    evaluate = _dense_evaluation(points)
    with PeakMemory() as memory:
        taken = seconds(evaluate)
    return {"evaluation": taken, "MiB": memory.mib}


def _dense_evaluation(points: int) -> Callable[[], None]:
    """Return a function that evaluates the evidence of a Helmholtz kernel and its gradient by dense
    algebra. The five parameters are logarithms."""
    x, y = Problem.of(points, 2).in_memory()
    logs = torch.tensor([0.0, 0.4, -1.4, 0.0, -2.4], dtype=torch.float64, requires_grad=True)

    def evaluate() -> None:
        covariance = _covariance(x.mT.unsqueeze(-1) - x.mT.unsqueeze(-2), *logs.exp())
        factor = torch.linalg.cholesky(covariance)
        half = torch.linalg.solve_triangular(factor, y.mT.reshape(-1, 1), upper=False)
        evidence = -0.5 * half.square().sum() - factor.diagonal().log().sum()
        evidence.backward()

    return evaluate


def _covariance(
    difference: Float[Tensor, "2 N N"], first, second, weak, strong, noise
) -> Float[Tensor, "2*N 2*N"]:
    u, v = difference / first, difference / second
    k, m = torch.exp(-0.5 * u.square().sum(0)), torch.exp(-0.5 * v.square().sum(0))
    blocks = [
        [
            weak * k * ((i == j) * 1.0 - u[i] * u[j])
            + strong * m * ((i == j) * (1 - v.square().sum(0)) + v[i] * v[j])
            for j in range(2)
        ]
        for i in range(2)
    ]
    covariance = torch.cat([torch.cat(row, dim=1) for row in blocks])
    return covariance + noise * torch.eye(len(covariance))


class BothComponents(Kernel):
    """A vector kernel as a kernel of single components, which inducing variables need.

    The inputs are rows (x, 0), (x, 1), …, with the index of the component in the last column.
    """

    def __init__(self, kernel: Kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x1, x2, diag=False, **params):
        return self.kernel(x1[..., ::2, :2], x2[..., ::2, :2], diag=diag, **params)


def both(x: Float[Tensor, "N 2"]) -> Float[Tensor, "2*N 3"]:
    component = torch.arange(2, dtype=x.dtype).repeat(len(x)).unsqueeze(-1)
    return torch.cat([x.repeat_interleave(2, dim=0), component], dim=-1)


class SparseModel(gpytorch.models.ApproximateGP):
    def __init__(self, places: Float[Tensor, "m 2"], kernel: Kernel):
        inducing = both(places)
        distribution = gpytorch.variational.NaturalVariationalDistribution(len(inducing))
        strategy = gpytorch.variational.VariationalStrategy(
            self, inducing, distribution, learn_inducing_locations=False, jitter_val=1e-6
        )
        super().__init__(strategy)
        self.covar_module = BothComponents(kernel)
        self.double()

    def forward(self, x):
        mean = torch.zeros(len(x), dtype=x.dtype)
        return gpytorch.distributions.MultivariateNormal(mean, self.covar_module(x))

    def learn(self, x: Float[Tensor, "N 2"], y: Float[Tensor, "N 2"], window: int) -> list[float]:
        """Maximise the ELBO by stochastic gradients, and return its value at every step.

        The search ends when the mean over the last `window` steps is barely larger than the mean
        over the `window` steps before.
        """
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        likelihood.noise = 0.1
        count = y.numel()
        elbo = gpytorch.mlls.VariationalELBO(likelihood, self, num_data=count)
        hyperparameters = [*self.hyperparameters(), *likelihood.parameters()]
        optimizers = [
            gpytorch.optim.NGD(self.variational_parameters(), num_data=count, lr=0.1),
            torch.optim.Adam(hyperparameters, lr=0.05),
        ]
        history, bar = [], tqdm(desc="SVGP", unit=" steps", mininterval=5)
        while not _settled(history, window):
            rows = torch.randint(len(x), (BATCH,))
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = -elbo(self(both(x[rows])), y[rows].reshape(-1))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            history.append(-loss.item())
            bar.update()
        return history


def _settled(history: list[float], window: int) -> bool:
    if not history or len(history) % window:
        return False
    before = history[-2 * window : -window]
    return bool(before) and np.mean(history[-window:]) - np.mean(before) < GAIN


def svgp(points: int, dims: int, smoke: bool) -> dict[str, object]:
    problem, models, history = Problem.of(points, dims), [], []
    x, y = problem.in_memory()
    torch.manual_seed(0)

    def learn() -> None:
        places, _ = kmeans2(x[:20_000].numpy(), 20 if smoke else INDUCING, minit="++", seed=0)
        models.append(SparseModel(torch.from_numpy(places), start_kernel()))
        history.extend(models[0].learn(x, y, 2 if smoke else 200))

    with PeakMemory() as memory:
        fit = seconds(learn)
    with torch.no_grad():
        posterior = models[0].eval()(both(problem.xs))
        mean, variance = (t.view(-1, 2) for t in (posterior.mean, posterior.variance))
    found = scores(mean, variance, problem.truth)
    return {"fit": fit, "steps": len(history), "MiB": memory.mib, **found}
