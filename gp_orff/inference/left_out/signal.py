"""The field plus the noise that readings of a track share, given block means of other readings.

With the block means ȳ = H f + n̄ of the tracks, R = Cov[n̄], and k = Cov[n, n̄] of what readings at
some times share with them, offset and correlated noise n,

    s = f(x) + n = f(x) − G H f + G ȳ + independent noise ,    G = k R⁻¹ ,

so that the posterior of s follows from that of the field, and Cov[n] − G kᵀ of the noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from gp_orff.data.noise.along_tracks import TrackNoise
from gp_orff.data.noise.covariances import Noises, independent, same_point
from gp_orff.data.tracks.blocks import Track
from gp_orff.data.tracks.covariance import BlockNoise
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.distributions import FieldDistribution, PlusWhite, UnknownMean
from gp_orff.inference.weight_posterior import WeightPosterior


class SeenWithMean(NamedTuple):
    """Block means, and the effect of the unknown constant mean on them."""

    seen: TrackObservations | Float[Tensor, "m F"]
    effect: Float[Tensor, "m p"]


Seen = TrackObservations | Float[Tensor, "m F"] | SeenWithMean | None
"""Block means: their readings, or their features; None without any."""
Combination = Callable[[Float[Tensor, "n*p+m j"]], Float[Tensor, "k j"]]

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
        if not self._given(readings).tracks:
            return self.distribution.variance(readings.x) + _slow(readings, self.noises)
        parts = []
        for track in readings.tracks:
            one = replace(readings, tracks=(track,))
            shared, gain = self._sharing(one)
            noise = _slow(one, self.noises) - (gain * shared).sum(-1)
            field = unexplained_variance(self.distribution, track.x, self._seen(one), gain)
            parts.append(field + noise.unsqueeze(-1))
        return torch.cat(parts)

    def covariance(self, readings: TrackObservations) -> Float[Tensor, "n*p n*p"]:
        """Cov[s]."""
        seen = self._seen(readings)
        p, noise = len(self.constant), parameters_of(readings, self.noises)
        prior = [slow_covariance(noise, track.clock, track.clock) for track in readings.tracks]
        prior = torch.block_diag(*prior)
        if seen is None:
            return self.distribution.covariance(readings.x) + in_components(prior, p)
        shared, gain = self._sharing(readings)
        wide = in_components(gain, p)
        field = joint_covariance(self.distribution, readings.x, seen, less_explained(wide))
        return field + in_components(prior - gain @ shared.mT, p)

    def _seen(self, readings: TrackObservations) -> Seen:
        """The block means of the tracks of these readings, for `joint_covariance`."""
        known = self._given(readings)
        return block_means_under(self.distribution, known) if known.tracks else None

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
def block_means_under(distribution: FieldDistribution, known: TrackObservations) -> Seen:
    """What of the block means H f serves `joint_covariance` at any points."""
    return known.condensed


@block_means_under.register
def _(distribution: PlusWhite, known):
    return block_means_under(distribution.distribution, known)


@block_means_under.register
def _(distribution: UnknownMean, known):
    seen = block_means_under(distribution.distribution, known)
    effect = known.apply(lambda symbol, space, z: distribution.effect(z).flatten(0, 1))
    return SeenWithMean(seen, effect)


@block_means_under.register
def _(distribution: WeightPosterior, known):
    expansion = distribution.expansion
    width = expansion.num_features * expansion.num_outputs * known.times.count.mean().item()
    rows = torch.arange(len(known.y), device=known.x.device).split(max(1, int(_CHUNK / width)))
    parts = [known.take(r).apply(lambda symbol, space, z: expansion.features(z)) for r in rows]
    return torch.cat(parts)


@singledispatch
def joint_covariance(
    distribution: FieldDistribution, x: Float[Tensor, "n d"], seen: Seen, combined: Combination
) -> Float[Tensor, "k k"]:
    """The covariance of linear combinations of f(x) and block means H f, in this order."""
    points = torch.cat([x.double(), seen.x if seen.nodes is None else seen.nodes[0]])
    rows = len(x) * distribution.num_outputs

    def half(matrix: Float[Tensor, "m j"]) -> Float[Tensor, "k j"]:
        means = seen.apply(lambda symbol, space, z: matrix[rows:])
        return combined(torch.cat([matrix[:rows], means]))

    return half(half(distribution.covariance(points)).mT)


@joint_covariance.register
def _(distribution: PlusWhite, x, seen, combined):
    field = joint_covariance(distribution.distribution, x, seen, combined)
    white = independent(distribution.added, len(x))
    count = _count(seen)
    return field + combined(combined(pad(white, (0, count) * 2)).mT)


@joint_covariance.register
def _(distribution: UnknownMean, x, seen, combined):
    effect = combined(torch.cat([distribution.effect(x).flatten(0, 1), seen.effect]))
    return joint_covariance(distribution.distribution, x, seen.seen, combined) + effect @ effect.mT


@joint_covariance.register
def _(distribution: WeightPosterior, x, seen, combined):
    return distribution.covariance_of(
        combined(torch.cat([distribution.expansion.features(x.double()), seen]))
    )


def _count(seen: Seen) -> int:
    """The number of block means, in all components."""
    if isinstance(seen, SeenWithMean):
        return len(seen.effect)
    return seen.shape[0] if isinstance(seen, Tensor) else seen.y.numel()


def less_explained(gain: Float[Tensor, "n*p m"]) -> Combination:
    """f(x) − G H f."""
    return lambda rows: rows[: len(gain)] - gain @ rows[len(gain) :]


@singledispatch
def unexplained_variance(
    distribution: FieldDistribution,
    x: Float[Tensor, "n d"],
    seen: Seen,
    gain: Float[Tensor, "n t"],
) -> Float[Tensor, "n p"]:
    """Var[f(x) − G H f] of every component, for block means H f of one track; its variance at x
    where there are none."""
    if seen is None:
        return distribution.variance(x)
    p, parts = distribution.num_outputs, []
    for points, weights in zip(x.split(_READINGS), gain.split(_READINGS), strict=True):
        combined = less_explained(in_components(weights, p))
        covariance = joint_covariance(distribution, points, seen, combined)
        parts.append(covariance.diagonal().unflatten(0, (-1, p)))
    return torch.cat(parts)


@unexplained_variance.register
def _(distribution: PlusWhite, x, seen, gain):
    field = unexplained_variance(distribution.distribution, x, seen, gain)
    return field + distribution.added.diagonal()


@unexplained_variance.register
def _(distribution: UnknownMean, x, seen, gain):
    if seen is None:
        return distribution.variance(x)
    field = unexplained_variance(distribution.distribution, x, seen.seen, gain)
    over_blocks = seen.effect.unflatten(0, (-1, distribution.num_outputs))
    effect = distribution.effect(x) - torch.einsum("nt,tpk->npk", gain, over_blocks)
    return field + effect.square().sum(-1)


@unexplained_variance.register
def _(distribution: WeightPosterior, x, seen, gain):
    variance = distribution.variance(x)
    if seen is None:
        return variance
    p, count = distribution.num_outputs, gain.shape[-1]
    solved = distribution.weight_covariance(seen.mT)  # Cov[θ, H f]
    columns = distribution.expansion.column_weights(solved)
    means = (seen @ solved).unflatten(0, (count, p)).unflatten(2, (count, p))
    means = means.diagonal(dim1=1, dim2=3)  # Cov[H f] in every component, (t, t, p)
    rows, parts = max(1, _CHUNK // columns.shape[-1]), []
    for points, weights in zip(x.split(rows), gain.split(rows), strict=True):
        cross = distribution.expansion.phi.apply(points, columns).unflatten(-1, (p, count, p))
        cross = cross.diagonal(dim1=1, dim2=3)  # Cov[f(x), H f], (n, t, p)
        both = torch.einsum("nt,tsp->nsp", weights, means) - 2 * cross
        parts.append(torch.einsum("ns,nsp->np", weights, both))
    return variance + torch.cat(parts)
