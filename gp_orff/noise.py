"""The noise covariance Σ of one observation, from gpytorch's likelihoods."""

from functools import singledispatch

import torch
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.coordinates import admissible


@singledispatch
def noise_of(likelihood: Likelihood, num_outputs: int) -> Float[Tensor, "*b p p"]:
    """Σ, differentiable in the likelihood's parameters. Register likelihoods of your own."""
    raise NotImplementedError(
        f"no noise covariance is known for {type(likelihood).__name__}; use "
        "MultitaskGaussianLikelihood or GaussianLikelihood"
    )


@noise_of.register
def _(likelihood: GaussianLikelihood, num_outputs: int) -> Tensor:
    noise = likelihood.noise.unsqueeze(-1)
    return noise * torch.eye(num_outputs, dtype=noise.dtype, device=noise.device)


@noise_of.register
def _(likelihood: MultitaskGaussianLikelihood, num_outputs: int) -> Tensor:
    if likelihood.num_tasks != num_outputs:
        raise ValueError(
            f"expected a likelihood for the kernel's {num_outputs} outputs, got "
            f"num_tasks={likelihood.num_tasks}"
        )
    parameter = next(likelihood.parameters())
    covariance = torch.zeros(num_outputs, num_outputs).to(parameter)
    if likelihood.has_task_noise and likelihood.rank:
        factor = likelihood.task_noise_covar_factor
        covariance = covariance + factor @ factor.mT
    elif likelihood.has_task_noise:
        covariance = covariance + torch.diag_embed(likelihood.task_noises)
    if likelihood.has_global_noise:
        eye = torch.eye(num_outputs).to(parameter)
        covariance = covariance + likelihood.noise.unsqueeze(-1) * eye
    return covariance


@singledispatch
def scale_noise(likelihood: Likelihood, factor: float) -> None:
    """Multiply the noise; likelihoods that are not known keep theirs."""


@scale_noise.register
def _(likelihood: GaussianLikelihood, factor: float) -> None:
    start_noise(likelihood, factor * likelihood.noise.mean().item())


@scale_noise.register
def _(likelihood: MultitaskGaussianLikelihood, factor: float) -> None:
    with torch.no_grad():
        if likelihood.has_global_noise and likelihood.raw_noise.requires_grad:
            wanted = factor * likelihood.noise
            likelihood.noise = admissible(likelihood.raw_noise_constraint, wanted)
        if likelihood.has_task_noise and likelihood.rank:
            if likelihood.task_noise_covar_factor.requires_grad:
                likelihood.task_noise_covar_factor.mul_(factor**0.5)
        elif likelihood.has_task_noise and likelihood.raw_task_noises.requires_grad:
            wanted = factor * likelihood.task_noises
            likelihood.task_noises = admissible(likelihood.raw_task_noises_constraint, wanted)


@singledispatch
def start_noise(likelihood: Likelihood, variance: float) -> None:
    """Set the noise variance before training; likelihoods that are not known keep theirs."""


@start_noise.register
def _(likelihood: GaussianLikelihood, variance: float) -> None:
    if likelihood.raw_noise.requires_grad:
        wanted = torch.full_like(likelihood.noise, variance)
        likelihood.noise = admissible(likelihood.noise_covar.raw_noise_constraint, wanted)


@start_noise.register
def _(likelihood: MultitaskGaussianLikelihood, variance: float) -> None:
    parts = likelihood.has_global_noise + likelihood.has_task_noise
    if likelihood.has_global_noise and likelihood.raw_noise.requires_grad:
        wanted = torch.full_like(likelihood.noise, variance / parts)
        likelihood.noise = admissible(likelihood.raw_noise_constraint, wanted)
    if not likelihood.has_task_noise:
        return
    if not likelihood.rank and likelihood.raw_task_noises.requires_grad:
        wanted = torch.full_like(likelihood.task_noises, variance / parts)
        likelihood.task_noises = admissible(likelihood.raw_task_noises_constraint, wanted)
    if likelihood.rank and likelihood.task_noise_covar_factor.requires_grad:
        factor = likelihood.task_noise_covar_factor.data
        size = factor.square().sum(-1).mean()
        factor.mul_((variance / parts / size).sqrt())
