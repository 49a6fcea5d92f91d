"""The noise covariance Σ (p, p) of one observation, from gpytorch likelihoods."""

from collections.abc import Mapping
from functools import singledispatch
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.along_tracks import NoisesOfGroups, along_tracks, slow_variance_of
from gp_orff.kernels.tree import terms

Noises = Mapping[str, Float[Tensor, "p p"]]  # Σ by the label of the group


@singledispatch
def noise_of(likelihood: Likelihood, num_outputs: int) -> Float[Tensor, "*b p p"]:
    """Σ, differentiable in the parameters of the likelihood; register other likelihoods here."""
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
    check_num_tasks(likelihood, num_outputs)
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


def check_num_tasks(likelihood: Likelihood, num_outputs: int) -> None:
    """Raise ValueError unless the likelihood has a task for each output of the kernel."""
    if likelihood.num_tasks != num_outputs:
        raise ValueError(
            f"expected a likelihood for the kernel's {num_outputs} outputs, got "
            f"num_tasks={likelihood.num_tasks}"
        )


class Noise(NamedTuple):
    """The noise covariance Σ of one observation, with its inverse and log-determinant."""

    covariance: Float[Tensor, "*b p p"]
    precision: Float[Tensor, "*b p p"]
    logdet: Float[Tensor, "*b"]

    @classmethod
    def of(cls, covariance: Float[Tensor, "*b p p"]) -> "Noise":
        """Σ with its inverse and log-determinant.

        Raises:
            ValueError: Σ is not positive definite.
        """
        covariance = covariance.double()
        factor, regular = _cholesky(covariance)
        if not regular:
            raise ValueError(
                "expected a positive definite noise covariance, got a singular one, "
                f"{covariance.detach().tolist()}; give the likelihood a global noise "
                "(has_global_noise=True) or a task noise of full rank"
            )
        logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
        return cls(covariance, torch.cholesky_inverse(factor), logdet)


def is_regular(covariance: Float[Tensor, "*b p p"]) -> bool:
    """Whether Σ is positive definite."""
    return _cholesky(covariance.detach().double())[1]


def _cholesky(covariance: Float[Tensor, "*b p p"]) -> tuple[Float[Tensor, "*b p p"], bool]:
    """The Cholesky factor, and whether the matrix is positive definite."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    conditional = factor.diagonal(dim1=-1, dim2=-2).square()
    least = 100 * torch.finfo(covariance.dtype).eps * covariance.diagonal(dim1=-1, dim2=-2)
    return factor, not info.any() and bool((conditional > least).all())


def noises_of(kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> Noises:
    """Σ of every likelihood, by its label, and the noise along tracks of those that have one."""
    num_outputs = terms(kernel)[0].num_outputs
    covariances = {label: noise_of(noise, num_outputs) for label, noise in likelihoods.items()}
    tracks = {label: along_tracks(likelihood) for label, likelihood in likelihoods.items()}
    known = {label: noise for label, noise in tracks.items() if noise is not None}
    slow = {label: slow_variance_of(likelihood) for label, likelihood in likelihoods.items()}
    slow = {label: variance for label, variance in slow.items() if variance is not None}
    return NoisesOfGroups(covariances, known, slow)


def independent(noise: Float[Tensor, "*b p p"], count: int) -> Float[Tensor, "*b n*p n*p"]:
    """I⊗Σ, the noise covariance of `count` points."""
    return same_point(torch.eye(count, dtype=noise.dtype, device=noise.device), noise)


def same_point(
    same: Float[Tensor, "n m"], noise: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b n*p m*p"]:
    """Blocks Σ wherever the row and the column belong to the same point."""
    blocks = torch.einsum("nm,...ij->...nimj", same, noise)
    return blocks.flatten(-4, -3).flatten(-2, -1)
