"""Kernels with line spectra."""

import torch
from gpytorch.kernels import CosineKernel, PeriodicKernel, RBFKernel

import gp_orff


def periodic(period=1.3, lengthscale=0.8, **options):
    kernel = PeriodicKernel(**options).double()
    kernel.period_length = torch.tensor(period, dtype=torch.float64)
    kernel.lengthscale = torch.tensor(lengthscale, dtype=torch.float64)
    return kernel


def cosine(period_length=0.7, **options):
    kernel = CosineKernel(**options).double()
    kernel.period_length = torch.tensor(period_length, dtype=torch.float64)
    return kernel


def in_space():
    kernel = gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2, active_dims=(0, 1)).double()
    kernel.curl_free.outputscale, kernel.divergence_free.outputscale = 0.7, 1.2
    return kernel
