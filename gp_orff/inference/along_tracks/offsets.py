"""The offsets of tracks, given all their readings.

With the block means ȳ = H f + n̄ of a track, R = Cov[n̄], and the gain g = σ_b² 1ᵀ R⁻¹ of its offset
b, in one component,

    b = g (ȳ − H f) + independent noise of variance σ_b² − σ_b² g 1 ,

so that the posterior of b follows from that of the block means H f of the field. With the offsets
of all tracks, b, and y = H f + B b + other noise,

    E[b] = σ_b² s ,   Cov[b] = σ_b² I − σ_b⁴ J ,   s = BᵀK⁻¹(y − μ) ,   J = BᵀPB ,

s and J also tell the restricted evidence of any other variance v of offsets, by the determinant
lemma: with the eigenvalues j_i of J, the components s_i of s along its eigenvectors, Δ = v − σ_b²
and d_i = 1 + Δ j_i,

    log p(y | v) = ½ Σ_i (Δ s_i² / d_i − log d_i) + const. ,   I(v) = ½ Σ_i (j_i / d_i)² .
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.along_tracks import SlowVariance, TrackNoise
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.noise.track_likelihood import NUM_VALUES, TrackLikelihood
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.along_tracks.signal import (
    block_means_under,
    in_components,
    joint_covariance,
    noise_of_blocks,
    precision_of_track,
    residual_of_blocks,
)
from gp_orff.inference.conditioning import Inference
from gp_orff.inference.distributions import FieldDistribution, UnknownMean
from gp_orff.inference.weight_posterior import WeightPosterior

_MOST = 400  # offsets: more tell their variance as well as predictions need it, to 0.3 %
_ROUNDING = 1e-10  # of J, over what a track would tell of its offset if the field were known
_NEGLIGIBLE = 20.0  # −log of a density, over its maximum
_WIDE, _STEP = 60.0, 0.1  # of the range in log v that contains the others
_TINY = 1e-300  # a variance that is none


@dataclass(frozen=True)
class TrackOffsets:
    """What all readings tell of the offset of each track.

    Attributes:
        labels: the labels of the T tracks, as text.
        mean: the posterior means, (T, p), in the unit of y; (T, 1) of readings along directions.
        sd: the posterior standard deviations, likewise. The constant mean of the field is common to
            all tracks, so that the sum of their offsets is known less well than differences.
    """

    labels: tuple[str, ...]
    mean: Float[Tensor, "T v"]
    sd: Float[Tensor, "T v"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, label: object) -> tuple[Float[Tensor, "v"], Float[Tensor, "v"]]:
        """Mean and standard deviation of the offset of one track; KeyError for others."""
        if str(label) not in self.labels:
            some = ", ".join(map(repr, self.labels[:5]))
            raise KeyError(f"expected the label of a track, such as {some}, got {str(label)!r}")
        row = self.labels.index(str(label))
        return self.mean[row], self.sd[row]


@torch.no_grad()
def track_offsets(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    tracks: TrackObservations,
) -> TrackOffsets:
    """The offsets of the tracks of a group of the data of `inference`; `mean` as for `left_out`."""
    posterior = inference.posterior(kernel, noises, mean)
    constant = posterior.evidence.best_mean() if mean is None else mean
    field = posterior.under(mean)

    def offsets() -> Iterator[tuple[Float[Tensor, "v"], Float[Tensor, "v"]]]:
        for track in tracks.tracks:
            seen = Offsets.of(field, constant, noises, replace(tracks, tracks=(track,)))
            prior = noises.tracks[tracks.key.label].offset_variance
            variance = prior - prior.square() * seen.information.diagonal()
            yield prior * seen.score, variance.clamp_min(0).sqrt()

    means, deviations = zip(*offsets(), strict=True)
    labels = tuple(track.label for track in tracks.tracks)
    return TrackOffsets(labels, torch.stack(means), torch.stack(deviations))


@dataclass(frozen=True)
class Offsets:
    """What the data tell of the offsets of some tracks of a group, in all components."""

    score: Float[Tensor, "T*v"]  # s
    information: Float[Tensor, "T*v T*v"]  # J

    @classmethod
    def of(
        cls,
        field: FieldDistribution,
        constant: Float[Tensor, "p"],
        noises: Noises,
        tracks: TrackObservations,
    ) -> "Offsets":
        """Given the posterior of the field, and its constant mean."""
        weights, v = [], tracks.y.shape[-1]
        for track in tracks.tracks:
            noise = noise_of_blocks(field, replace(tracks, tracks=(track,)), noises)
            weights.append(precision_of_track(noise).sum(0))
        residual = residual_of_blocks(field, constant, tracks)
        score = torch.block_diag(*weights) @ residual
        direct = torch.stack([weight.sum() for weight in weights]).repeat_interleave(v)
        explained = covariance_of_sums(field.split()[0], tracks, weights)
        return cls(score.flatten(), torch.diag(direct) - explained)


@singledispatch
def covariance_of_sums(
    distribution: FieldDistribution,
    tracks: TrackObservations,
    weights: Sequence[Float[Tensor, "t"]],
) -> Float[Tensor, "T*v T*v"]:
    """The covariance of Σ_b w_b H f over the blocks b of every track."""
    sums, seen = _sums(tracks, weights), block_means_under(distribution, tracks)
    return joint_covariance(distribution, tracks.x[:0], seen, lambda rows: sums @ rows)


@covariance_of_sums.register
def _(distribution: UnknownMean, tracks, weights):
    effect = tracks.apply(lambda symbol, space, z: distribution.effect(z).flatten(0, 1))
    effect = _sums(tracks, weights) @ effect
    return covariance_of_sums(distribution.distribution, tracks, weights) + effect @ effect.mT


@covariance_of_sums.register
def _(distribution: WeightPosterior, tracks, weights):
    """The features of one track at a time, since those of all blocks may not fit in memory."""
    rows = []
    for track, weight in zip(tracks.tracks, weights, strict=True):
        one = replace(tracks, tracks=(track,))
        rows.append(_sums(one, [weight]) @ block_means_under(distribution, one))
    return distribution.covariance_of(torch.cat(rows))


def _sums(
    tracks: TrackObservations, weights: Sequence[Float[Tensor, "t"]]
) -> Float[Tensor, "T*v m*v"]:
    return in_components(torch.block_diag(*weights), tracks.y.shape[-1])


@torch.no_grad()
def slow_variance(
    field: FieldDistribution,
    constant: Float[Tensor, "p"],
    noises: Noises,
    tracks: TrackObservations,
    likelihood: TrackLikelihood,
) -> SlowVariance | None:
    """The posterior of the variance of new tracks, given the other hyperparameters. None if that
    of offsets is frozen, if the data contain no difference of offsets, or more than 400 offsets.

    1. The data cannot distinguish an offset from correlated noise whose correlation time is longer
       than the tracks. Over a duration D, σ_r² exp(−t/τ) − ℓ is a covariance for ℓ ≤ 2 τ σ_r² /
       (2 τ + D), the variance of the best estimate of a constant under this noise. The variance
       that is integrated over is therefore V = σ_b² + ℓ > 0, with the duration D of the longest
       track, and σ_r² − ℓ does not change.
    2. s and J of the present posterior determine log p(y | V).
    3. The density of log V follows with the prior. Its range, without the tails in which the
       density is negligible, is divided evenly.

    Args:
        field, constant: the posterior of the field, and its constant mean.
        tracks: those of one group, with the parameters of `likelihood`.
    """
    if tracks.y.shape[-1] * len(tracks.tracks) > _MOST:
        return None
    if not likelihood.raw_offset_variance.requires_grad:
        return None
    seen = Offsets.of(field, constant, noises, tracks)
    j, axes = torch.linalg.eigh(seen.information)
    told = j > _ROUNDING * seen.information.diagonal().amax()
    if not told.any():
        return None
    j, squares = j[told], (axes.mT @ seen.score)[told].square()
    noise = noises.tracks[tracks.key.label]
    level = _level(noise, tracks) if _are_free(likelihood) else 0.0 * noise.slow
    present = (noise.offset_variance + level).clamp_min(_TINY)

    def log_density(u: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        """Of u = log V."""
        value = u.exp().unsqueeze(-1)
        change = value - present
        d = torch.maximum(1 + change * j, (value / present).clamp_max(1.0))  # by rounding
        evidence = 0.5 * (change * squares / d - d.log()).sum(-1)
        jeffreys = 0.5 * (j / d).square().sum(-1).log()
        return evidence + u + _log_prior(likelihood, u.exp() - level, jeffreys)

    centre = -j.log()
    u = torch.arange(centre.amin() - _WIDE, centre.amax() + _WIDE, _STEP).to(j)
    u, _ = torch.cat([u, present.log().reshape(1)]).sort()  # a prior or bounds may be narrow
    density = log_density(u)
    likely = u[density > density.amax() - _NEGLIGIBLE]
    u = likely[0] + (likely[-1] - likely[0]) * torch.linspace(0, 1, NUM_VALUES).to(j)
    weights = torch.softmax(log_density(u), 0)
    return SlowVariance(u.exp() + noise.correlated_variance - level, weights)


def _level(noise: TrackNoise, tracks: TrackObservations) -> Float[Tensor, ""]:
    """ℓ."""
    durations = torch.stack([track.clock[-1] - track.clock[0] for track in tracks.tracks])
    twice = 2 * noise.correlation_time
    return noise.correlated_variance * twice / (twice + durations.amax())


def _are_free(likelihood: TrackLikelihood) -> bool:
    """Whether neither the offsets nor correlated noise have a prior or a fixed value."""
    priors = {name for name, *_ in likelihood.named_priors()}
    bound = {"offset_variance_prior", "correlated_variance_prior", "correlation_time_prior"}
    learned = likelihood.raw_correlated_variance.requires_grad
    return learned and likelihood.raw_correlation_time.requires_grad and not priors & bound


def _log_prior(
    likelihood: TrackLikelihood, variance: Float[Tensor, "k"], jeffreys: Float[Tensor, "k"]
) -> Float[Tensor, "k"]:
    """log p of the offset variance, −∞ outside the bounds of its constraint."""
    constraint = likelihood.raw_offset_variance_constraint
    lower, upper = constraint.lower_bound, constraint.upper_bound
    inside = (variance <= upper) & ((variance >= lower) | (lower == 0))
    prior = getattr(likelihood, "offset_variance_prior", None)
    if prior is None:
        return torch.where(inside, jeffreys, -torch.inf)
    inside = inside & prior.support.check(variance)
    some = torch.where(inside, variance, likelihood.offset_variance)
    return torch.where(inside, prior.log_prob(some), -torch.inf)
