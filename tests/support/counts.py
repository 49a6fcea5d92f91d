"""Values without Gaussian noise: signs and counts, with kernels and means."""

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood
from gpytorch.means import MultitaskMean, ZeroMean


def rbf(lengthscale=0.4, outputscale=2.0):
    kernel = ScaleKernel(RBFKernel()).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = lengthscale, outputscale
    return kernel


def zero(p):
    return ZeroMean() if p == 1 else MultitaskMean(ZeroMean(), p)


def bernoulli(f):
    return torch.bernoulli(torch.special.ndtr(f), generator=torch.Generator().manual_seed(5))


def counts(f):
    rate = torch.nn.functional.softplus(f)
    return torch.poisson(rate, generator=torch.Generator().manual_seed(5))


def signal(x):
    return 2 * torch.sin(5 * x[:, 0] + 2 * x[:, 1])


def gaussian(p, noise):
    likelihood = MultitaskGaussianLikelihood(p, has_task_noise=False)
    likelihood = (likelihood if p > 1 else GaussianLikelihood()).double()
    likelihood.noise = noise
    return likelihood
