"""The unmodified ExactGP of the gpytorch tutorials, and quantities that tests compute from it."""

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood

import gp_orff
from tests.support.fields import draw

NOISES = {  # arguments of the likelihood
    "global": {"has_task_noise": False},
    "rank_0": {"has_global_noise": False},
    "rank_0_and_global": {},
    "rank_1_and_global": {"rank": 1},
    "full_rank": {"rank": 2, "has_global_noise": False},
}
POINTS = {"primal": 150, "dual": 8}  # against 2·2·24 features or more


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
    """Return a float64 model whose noise parameters all have the value `noise`."""
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
    """Return log p(y) of all data."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    return mll(model(*model.train_inputs), model.train_targets) * model.train_targets.numel()


def orff_of(case, num_frequencies=24):
    rule = gp_orff.MonteCarlo(num_frequencies, seed=1)
    return gp_orff.ORFFKernel(case.kernel, rule, num_dims=case.num_dims).double()


def model_for(case, points, noise_arguments, kernel=None):
    x, y = draw(points, case.num_dims), draw(points, case.num_outputs, seed=1)
    kernel = orff_of(case) if kernel is None else kernel
    if case.num_outputs == 1:
        return scalar_gp(x, y.squeeze(-1), kernel, noise=0.1)
    torch.manual_seed(0)  # gpytorch draws the task noise factor of rank ≥ 1 from the global state
    if "rank" in noise_arguments:
        noise_arguments = {**noise_arguments, "rank": min(2, noise_arguments["rank"])}
    if noise_arguments.get("rank") == 2:
        noise_arguments = {**noise_arguments, "rank": case.num_outputs}
    return vector_gp(x, y, kernel, noise=0.1, **noise_arguments)


def dense_noise(model, points):
    """Return the dense matrix I⊗Σ from the parameters of the likelihood."""
    likelihood = model.likelihood
    if isinstance(model, ScalarGP):
        return likelihood.noise * torch.eye(points, dtype=torch.float64)
    p = likelihood.num_tasks
    sigma = torch.zeros(p, p, dtype=torch.float64)
    if likelihood.has_global_noise:
        sigma = sigma + likelihood.noise * torch.eye(p, dtype=torch.float64)
    if likelihood.has_task_noise and likelihood.rank == 0:
        sigma = sigma + torch.diag(likelihood.task_noises)
    if likelihood.has_task_noise and likelihood.rank > 0:
        sigma = sigma + likelihood.task_noise_covar
    return torch.kron(torch.eye(points, dtype=torch.float64), sigma)


def gradient(value, model):
    trained = [own for own in model.parameters() if own.requires_grad]
    found = torch.autograd.grad(value, trained, allow_unused=True)
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=torch.float64) if g is None else g.flatten()
            for g, p in zip(found, trained, strict=True)
        ]
    )


def centred_gp(kernel, x, y, noise):
    """Return a model with mean zero, which allows a very small noise."""
    constraint = gpytorch.constraints.GreaterThan(1e-12)
    model = vector_gp(x, y, kernel, noise, has_task_noise=False, noise_constraint=constraint)
    for parameter in model.mean_module.parameters():
        parameter.data.zero_()
    return model


def asked(kernel, x, y, xs, noise):
    """Return the evidence per point, and the posterior mean and standard deviation at `xs`."""
    model = centred_gp(kernel, x, y, noise)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**6):
        found = evidence(model).item() / len(x)
        posterior = model.eval()(xs)
        return found, posterior.mean, posterior.stddev


def errors(kernel, rules, problem):
    """Return the errors of each rule compared with the exact kernel.

    The errors are those of the mean, the standard deviation and the evidence per point. The last
    value is the increase of the negative log predictive density.
    """
    x, y, xs, truth, noise = problem
    ev, mean, sd = asked(kernel, x, y, xs, noise)
    found = []
    for rule in rules:
        own_ev, own_mean, own_sd = asked(gp_orff.ORFFKernel(kernel, rule), x, y, xs, noise)
        found.append(
            (
                ((own_mean - mean).norm() / mean.norm()).item(),
                ((own_sd - sd).abs() / sd).median().item(),
                abs(own_ev - ev),
                nlpd(truth, own_mean, own_sd) - nlpd(truth, mean, sd),
            )
        )
    return found


def nlpd(truth, mean, sd):
    return -torch.distributions.Normal(mean, sd).log_prob(truth).mean().item()
