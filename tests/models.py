"""The ExactGP of gpytorch's own tutorials, unmodified."""

import gpytorch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood


class VectorGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(
            gpytorch.means.ConstantMean(), num_tasks=y.shape[-1]
        )
        self.covar_module = kernel

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


class ScalarGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def vector_gp(x, y, kernel, noise=None, **likelihood_arguments):
    """A float64 model and its likelihood with all noises set."""
    likelihood = MultitaskGaussianLikelihood(y.shape[-1], **likelihood_arguments)
    model = VectorGP(x, y, likelihood, kernel).to(x.dtype)
    if noise is not None and likelihood.has_global_noise:
        likelihood.noise = noise
    if noise is not None and likelihood.has_task_noise and likelihood.rank == 0:
        likelihood.task_noises = noise
    return model


def scalar_gp(x, y, kernel, noise):
    model = ScalarGP(x, y, GaussianLikelihood(), kernel).to(x.dtype)
    model.likelihood.noise = noise
    return model


def evidence(model):
    """log p(y), total."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    return mll(model(*model.train_inputs), model.train_targets) * model.train_targets.numel()
