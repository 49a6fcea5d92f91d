"""Models for gpytorch's `ExactGP` that several benchmarks use."""

import gpytorch
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood, MultitaskGaussianLikelihood
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from jaxtyping import Float
from torch import Tensor


class VectorGP(gpytorch.models.ExactGP):
    """A float64 `ExactGP` of vectors y at x with a given kernel and likelihood."""

    def __init__(
        self,
        x: Float[Tensor, "N d"],
        y: Float[Tensor, "N p"],
        kernel: Kernel,
        likelihood: Likelihood,
        mean: Mean | None = None,
    ):
        super().__init__(x, y, likelihood)
        self.mean_module = MultitaskMean(mean or ZeroMean(), num_tasks=y.shape[-1])
        self.covar_module = kernel
        self.double()

    def forward(self, x: Float[Tensor, "n d"]) -> gpytorch.distributions.MultivariateNormal:
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)

    @classmethod
    def with_constants(cls, x, y, kernel: Kernel, likelihood: Likelihood) -> "VectorGP":
        """Return a model with a learned constant mean for each output."""
        return cls(x, y, kernel, likelihood, ConstantMean())

    def evidence(self) -> Float[Tensor, ""]:
        """Return the log marginal likelihood, in nats per value."""
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self)
        return mll(self(*self.train_inputs), self.train_targets)

    def step(self) -> float:
        """Compute the evidence and its gradient, and return the evidence."""
        self.zero_grad()
        evidence = self.evidence()
        (-evidence).backward()
        return evidence.item()

    def learn(self, max_iter: int) -> None:
        """Maximise the evidence by L-BFGS."""
        optimizer = torch.optim.LBFGS(
            self.parameters(), max_iter=max_iter, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = -self.evidence()
            loss.backward()
            return loss

        self.train()
        optimizer.step(closure)


def one_noise(num_outputs: int, variance: float, least: float = 1e-4) -> Likelihood:
    """Return a likelihood with the same noise variance in every output."""
    likelihood = MultitaskGaussianLikelihood(
        num_outputs,
        has_task_noise=False,
        noise_constraint=gpytorch.constraints.GreaterThan(least),
    ).double()
    likelihood.noise = variance
    return likelihood


def by_cholesky() -> gpytorch.settings.max_cholesky_size:
    """Return a setting under which gpytorch uses Cholesky factors for every size, not conjugate
    gradients."""
    return gpytorch.settings.max_cholesky_size(10**6)
