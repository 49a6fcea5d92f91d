"""Noise covariances of an observation, of a group, and along tracks."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple, TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood, MultitaskGaussianLikelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.patterns import GroupKey
from gp_orff.kernels.tree import num_outputs

Kind = TypeVar("Kind", bound=Likelihood)


def of_kind(likelihoods: Mapping[str, Likelihood], kind: type[Kind]) -> dict[str, Kind]:
    """The likelihoods of one kind, by the label of their group."""
    return {label: noise for label, noise in likelihoods.items() if isinstance(noise, kind)}


# Quantiles of mixtures of normal distributions.


_STEPS = 60  # halvings of an interval, after which only rounding errors remain


def mixture_quantile(
    weights: Float[Tensor, "S"],
    means: Float[Tensor, "S *n"],
    sds: Float[Tensor, "S *n"],
    probability: float,
) -> Float[Tensor, "*n"]:
    """The quantile of a mixture of normal distributions: the z for which Σ_s w_s Φ((z − m_s) / σ_s)
    is the given probability. It is computed by bisection."""
    score = torch.special.ndtri(torch.tensor(probability, dtype=means.dtype))
    # The quantile of the mixture is between the smallest and the largest quantile of its members.
    # All members have at least the given probability below the largest one, and at most this
    # probability below the smallest one.
    quantiles = means + score.to(means) * sds
    low, high = quantiles.amin(0), quantiles.amax(0)
    shape = (-1, *[1] * (means.dim() - 1))
    for _ in range(_STEPS if len(weights) > 1 else 0):
        middle = 0.5 * (low + high)
        scores = (middle - means) / sds.clamp_min(torch.finfo(sds.dtype).tiny)
        below = (weights.reshape(shape) * torch.special.ndtr(scores)).sum(0) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)


# Noise along tracks: an offset, an Ornstein–Uhlenbeck process and white noise.


_LEVEL = 0.95
_CHUNK = 2**16  # number of quantiles that are computed at once


class TrackNoise(NamedTuple):
    """The variances of the noise of one component of an observation, and the correlation time."""

    noise: Float[Tensor, ""]  # the variance of white noise
    offset_variance: Float[Tensor, ""]  # of the offset that is common to a track
    correlated_variance: Float[Tensor, ""]
    correlation_time: Float[Tensor, ""]  # τ: the correlation at a lag t is exp(−t/τ)
    block_variance: Float[Tensor, ""]  # of the error that is common to one block

    @property
    def slow(self) -> Float[Tensor, ""]:
        """The variance of the offset and of the correlated noise of a new track."""
        return self.offset_variance + self.correlated_variance

    @property
    def total(self) -> Float[Tensor, ""]:
        """The variance of a new observation on a new track."""
        return self.noise + self.block_variance + self.slow


@singledispatch
def along_tracks(likelihood: Likelihood) -> TrackNoise | None:
    """The noise along tracks of a likelihood; None if observations are independent."""
    return None


@dataclass(frozen=True)
class SlowVariance:
    """The distribution of the variance v of the offset and the correlated noise of a new track.

    v has the value v_j with the probability w_j. If m is the mean of an observation on a new track,
    and s is the variance of all other errors, the observation has the distribution
    Σ_j w_j N(m, s + v_j).
    """

    values: Float[Tensor, "J"]
    weights: Float[Tensor, "J"]

    def sd(self, level: float) -> float:
        """The quantile of √v at a probability `level`."""
        # Each value represents the middle of its share of the probability.
        below = self.weights.cumsum(0) - 0.5 * self.weights
        place = int(torch.searchsorted(below, level).clamp_max(len(below) - 1))
        return self.values[place].sqrt().item()

    def quantile(self, level: float, variance: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """The quantile z of an observation minus its mean m, for each s in `variance`.

        The quantile solves Σ_j w_j Φ(z / √(s + v_j)) = level.
        """
        values, weights = self.values.to(variance), self.weights.to(variance)
        quantiles = []
        for part in variance.flatten().split(_CHUNK):
            sds = (part + values.unsqueeze(-1)).sqrt()
            quantiles.append(mixture_quantile(weights, torch.zeros_like(sds), sds, level))
        return torch.cat(quantiles).view_as(variance)

    def matched(self, variance: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the variance of the Gaussian whose central 95 % interval has the same width as
        that of an observation on a new track. `variance` is s, the variance of all other errors.

        The variance of the observation is not used, because it may be infinite. For example,
        Student's t distribution with two degrees of freedom has an infinite variance.
        """
        if len(self.values) == 1:
            return variance + self.values.to(variance)
        upper = 0.5 + 0.5 * _LEVEL
        z = torch.special.ndtri(torch.tensor(upper, dtype=variance.dtype)).to(variance)
        return (self.quantile(upper, variance) / z).square()


@singledispatch
def slow_variance_of(likelihood: Likelihood) -> SlowVariance | None:
    """The learned distribution of the variance of new tracks; None if it is a single value."""
    return None


class NoisesOfGroups(dict[str, Tensor]):
    """The noise covariance Σ of one observation of each group, by the label of the group.

    Attributes:
        tracks: the variances of the noise along tracks, for groups that have such noise.
        slow: the distribution of the variance on a new track, for groups that have one.
    """

    def __init__(
        self,
        covariances: Mapping[str, Tensor],
        tracks: Mapping[str, TrackNoise],
        slow: Mapping[str, SlowVariance],
    ):
        super().__init__(covariances)
        self.tracks, self.slow = tracks, slow


# The noise covariance Σ (p, p) of one observation, from gpytorch likelihoods.


Noises = Mapping[str, Float[Tensor, "p p"]]  # Σ by the label of the group


@singledispatch
def noise_of(likelihood: Likelihood, num_outputs: int) -> Float[Tensor, "*b p p"]:
    """Σ, differentiable with respect to the parameters of the likelihood. Register an
    implementation for other likelihoods."""
    raise NotImplementedError(
        f"no noise covariance is known for {type(likelihood).__name__}; use "
        "MultitaskGaussianLikelihood or GaussianLikelihood; if the noise of each observation is "
        "known, pass its variances to fit or condition as noise="
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
    """Raise a ValueError unless the likelihood has one task for each output of the kernel."""
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
    # L_ii² is the variance of component i given the components before it. If it is as small as
    # rounding errors of the variance of i, the matrix counts as singular.
    conditional = factor.diagonal(dim1=-1, dim2=-2).square()
    least = 100 * torch.finfo(covariance.dtype).eps * covariance.diagonal(dim1=-1, dim2=-2)
    return factor, not info.any() and bool((conditional > least).all())


def noises_of(kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> Noises:
    """Σ of each likelihood by its label, and the noise along tracks if a likelihood has it."""
    p = num_outputs(kernel)
    covariances = {label: noise_of(noise, p) for label, noise in likelihoods.items()}
    tracks, slow = (
        {key: noise for key, each in likelihoods.items() if (noise := kind(each)) is not None}
        for kind in (along_tracks, slow_variance_of)
    )
    return NoisesOfGroups(covariances, tracks, slow)


def independent(noise: Float[Tensor, "*b p p"], count: int) -> Float[Tensor, "*b n*p n*p"]:
    """I⊗Σ, the noise covariance of `count` points."""
    return same_point(torch.eye(count, dtype=noise.dtype, device=noise.device), noise)


def same_point(
    same: Float[Tensor, "n m"], noise: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b n*p m*p"]:
    """A matrix with blocks Σ for rows and columns that belong to the same point."""
    blocks = torch.einsum("nm,...ij->...nimj", same, noise)
    return blocks.flatten(-4, -3).flatten(-2, -1)


# The noise of the observations of a group.


@dataclass(frozen=True)
class GroupNoise:
    """The noise of the observations of a group: Σ/w_n + H_n δ H_nᵀ."""

    weighted: Float[Tensor, "v v"]  # Σ, for an observation with weight one
    delta: Float[Tensor, "p p"] | None = None  # δ, which does not depend on the weight


def group_noise(
    key: GroupKey,
    noises: Noises,
    delta: Float[Tensor, "p p"] | None = None,
    masses: Float[Tensor, "k"] | None = None,
    count: float = 1,
) -> Float[Tensor, "v v"]:
    """The noise covariance of an observation with weight one, plus the truncated variance δ.

    The caller divides the result by the weights w_n. Because the truncated variance does not depend
    on the weights, δ is multiplied by the mean weight here.
    """
    if key.label not in noises:
        raise ValueError(
            f"expected observations of a known group, one of {sorted(noises)}, got {key.label!r}; "
            "assign a likelihood to model.likelihoods[label], or fit data of this group"
        )
    covariance = key.pattern.noise(noises[key.label])
    return (
        covariance
        if delta is None
        else covariance + key.pattern.unweighted_noise(delta, masses, count)
    )
