"""The field plus the noise that readings of a track share, given block means of other readings.

With the block means ȳ = H f + n̄ of the tracks, R = Cov[n̄], and k = Cov[n, n̄] of what readings at
some times share with them, offset and correlated noise n,

    s = f(x) + n = f(x) − G H f + G ȳ + independent noise ,    G = k R⁻¹ ,

so that the posterior of s follows from that of the field, and Cov[n] − G kᵀ of the noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from gp_orff.data.noise.along_tracks import TrackNoise
from gp_orff.data.noise.covariances import Noises, independent, same_point
from gp_orff.data.tracks.blocks import Track
from gp_orff.data.tracks.covariance import BlockNoise
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.distributions import FieldDistribution, PlusWhite
from gp_orff.inference.weight_posterior import WeightPosterior

_CHUNK = 2**24  # numbers in memory
_READINGS = 256  # whose covariance is computed at once


@dataclass(frozen=True)
class Signal:
    """The posterior of s = f(x) + n at readings along tracks, mean included.

    Readings are given in blocks of one, of some tracks of a group.
    """

    distribution: FieldDistribution  # of the field without its mean, given all data
    constant: Float[Tensor, "p"]
    noises: Noises
    given: Mapping[str, Track]  # block means among these data, by the label of their track

    def mean(self, readings: TrackObservations) -> Float[Tensor, "n p"]:
        """E[s]."""
        known = self._given(readings)
        mean = self.distribution.mean(readings.x) + self.constant
        if not known.tracks:
            return mean
        seen = mean_over_blocks(self.distribution, known)
        return mean + self._sharing(readings)[1] @ (known.y - self.constant - seen)

    def variance(self, readings: TrackObservations) -> Float[Tensor, "n p"]:
        """Var[s] of every component."""
        if self._given(readings).tracks:
            return self.blocks(readings).diagonal(dim1=-1, dim2=-2)
        return self.distribution.variance(readings.x) + _slow(readings, self.noises)

    def blocks(self, readings: TrackObservations) -> Float[Tensor, "n p p"]:
        """Cov[s] of every reading alone."""
        rows = torch.arange(len(readings.y), device=readings.x.device).split(_READINGS)
        return torch.cat([self._diagonal(self.covariance(readings.take(part))) for part in rows])

    def covariance(self, readings: TrackObservations) -> Float[Tensor, "n*p n*p"]:
        """Cov[s]."""
        known, p = self._given(readings), len(self.constant)
        noise = parameters_of(readings, self.noises)
        prior = [slow_covariance(noise, track.clock, track.clock) for track in readings.tracks]
        prior = torch.block_diag(*prior)
        if not known.tracks:
            return self.distribution.covariance(readings.x) + in_components(prior, p)
        shared, gain = self._sharing(readings)
        field = joint_covariance(self.distribution, readings.x, known)
        unit = torch.eye(len(readings.y) * p).to(field)
        less = torch.cat([unit, -in_components(gain, p)], dim=-1)  # f(x) − G H f
        return less @ field @ less.mT + in_components(prior - gain @ shared.mT, p)

    def _diagonal(self, covariance: Float[Tensor, "n*p n*p"]) -> Float[Tensor, "n p p"]:
        p = len(self.constant)
        blocks = covariance.unflatten(0, (-1, p)).unflatten(2, (-1, p))
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def _given(self, readings: TrackObservations) -> TrackObservations:
        """The block means of the tracks of these readings."""
        labels = [track.label for track in readings.tracks]
        tracks = tuple(self.given[label] for label in labels if label in self.given)
        return replace(readings, tracks=tracks)

    def _sharing(
        self, readings: TrackObservations
    ) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
        """k and G."""
        noise, pairs = parameters_of(readings, self.noises), []
        for track in readings.tracks:
            known = self.given.get(track.label)
            if known is None:
                pairs.append((track.clock.new_zeros(len(track.clock), 0),) * 2)
                continue
            shared = covariance_with_block_means(noise, track.clock, known.clock, known.block)
            blocks = replace(readings, tracks=(known,))
            noise_of_track = noise_of_blocks(self.distribution, blocks, self.noises)
            pairs.append((shared, shared @ precision_of_track(noise_of_track)))
        shared, gains = zip(*pairs, strict=True)
        return torch.block_diag(*shared), torch.block_diag(*gains)


def noise_of_blocks(
    distribution: FieldDistribution, known: TrackObservations, noises: Noises
) -> BlockNoise:
    """The noise of block means, and what the features of the distribution lack."""
    white = distribution.split()[1]
    return known.noise(noises, 0.0 if white is None else white.diagonal().amax())


def precision_of_track(noise: BlockNoise) -> Float[Tensor, "t t"]:
    """R⁻¹ of the blocks of one track, in one component."""
    return torch.cholesky_inverse(torch.linalg.cholesky(noise.of_track(slice(None))))


def mean_over_blocks(
    distribution: FieldDistribution, part: TrackObservations
) -> Float[Tensor, "t p"]:
    """E[H f]."""
    means = part.apply(lambda symbol, space, x: distribution.mean(x).reshape(-1, 1))
    return means.reshape_as(part.y)


def in_components(matrix: Float[Tensor, "n m"], p: int) -> Float[Tensor, "n*p m*p"]:
    """The same covariance in p components that are independent of each other."""
    return same_point(matrix, torch.eye(p).to(matrix))


def parameters_of(readings: TrackObservations, noises: Noises) -> TrackNoise:
    return readings.noise(noises).noise


def _slow(readings: TrackObservations, noises: Noises) -> Float[Tensor, ""]:
    """Var[n]."""
    noise = parameters_of(readings, noises)
    return noise.offset_variance + noise.correlated_variance


def slow_covariance(
    noise: TrackNoise, clock: Float[Tensor, "n"], others: Float[Tensor, "m"]
) -> Float[Tensor, "n m"]:
    """The covariance of n at some times and at others of the same track, in one component."""
    lag = (clock.unsqueeze(-1) - others).abs()
    return noise.offset_variance + noise.correlated_variance * torch.exp(
        -lag / noise.correlation_time
    )


def covariance_with_block_means(
    noise: TrackNoise,
    clock: Float[Tensor, "n"],
    others: Float[Tensor, "m"],
    block: Int[Tensor, "m"],
) -> Float[Tensor, "n t"]:
    """The same for means over blocks of other times."""
    count, parts = torch.bincount(block).to(clock), []
    for part in clock.split(max(1, _CHUNK // len(others))):
        covariance = slow_covariance(noise, part, others)
        sums = covariance.new_zeros(len(part), len(count)).index_add(1, block, covariance)
        parts.append(sums / count)
    return torch.cat(parts)


@singledispatch
def joint_covariance(
    distribution: FieldDistribution, x: Float[Tensor, "n d"], known: TrackObservations
) -> Float[Tensor, "n*p+m n*p+m"]:
    """The covariance of f(x) and of the block means H f of `known`, in this order."""
    part = known.condensed
    points = torch.cat([x.double(), part.x if part.nodes is None else part.nodes[0]])
    rows = len(x) * distribution.num_outputs

    def half(matrix: Float[Tensor, "m k"]) -> Float[Tensor, "n*p+m k"]:
        return torch.cat([matrix[:rows], part.apply(lambda symbol, space, z: matrix[rows:])])

    return half(half(distribution.covariance(points)).mT)


@joint_covariance.register
def _(distribution: PlusWhite, x, known):
    field = joint_covariance(distribution.distribution, x, known)
    white = independent(distribution.added, len(x))
    return field + pad(white, (0, len(field) - len(white)) * 2)


@joint_covariance.register
def _(distribution: WeightPosterior, x, known):
    expansion = distribution.expansion
    width = expansion.num_features * expansion.num_outputs * known.times.count.mean().item()
    rows = torch.arange(len(known.y), device=x.device).split(max(1, int(_CHUNK / width)))
    seen = [known.take(r).apply(lambda symbol, space, z: expansion.features(z)) for r in rows]
    return distribution.covariance_of(torch.cat([expansion.features(x.double()), *seen]))
