"""The noise that observations of a track share, and predictions of held-out observations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, singledispatch
from typing import NamedTuple

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from gp_orff.data.dataset import Dataset
from gp_orff.data.likelihoods import NUM_VALUES, TrackLikelihood
from gp_orff.data.noise import Noises, SlowVariance, TrackNoise, independent, same_point
from gp_orff.data.observations import Observations
from gp_orff.data.tracks import BlockNoise, Track, TrackObservations, observations_along
from gp_orff.inference.features import Inference
from gp_orff.inference.left_out import Block, LeaveOneOut, LeftOut, chi_squared
from gp_orff.inference.posteriors import FieldDistribution, PlusWhite, WeightPosterior, WithMean

# The signal s: the field plus the noise that observations of a track share.
#
# An observation at x has the noise n, which is the offset and the correlated noise of its track.
# The block means of the tracks are ȳ = H f + n̄. With R = Cov[n̄] and k = Cov[n, n̄], the signal is
#
#     s = h(x) + n = h(x) − G H f + G ȳ + independent noise ,    G = k R⁻¹ ,
#
# where h is f, or its component uᵀf along the direction of an observation. The posterior of s
# follows from the posterior of the field, and from the covariance Cov[n] − G kᵀ of the independent
# noise.
#
# 1. `_sharing` computes k and G for every track. Different tracks share no noise, so that both are
#    block diagonal. A track without known block means has no columns in them.
# 2. The mean of s is that of h(x), plus G times the residuals of the block means.
# 3. The variance of s is that of h(x) − G H f under the posterior of the field, plus that of the
#    independent noise. It includes the correlation between f at x and f along the track.
# 4. `joint_covariance` computes this variance for each kind of posterior. For features, it is that
#    of a combination of features. For the exact kernel, the covariance is computed at all positions
#    of the blocks, or at two nodes of each (`condensed`). Combinations of its rows and columns
#    follow.


class Seen(NamedTuple):
    """Block means, in the form that `joint_covariance` needs for a kind of posterior.

    It contains their observations or features, their number in all components, and the effect of
    the unknown constant mean on them.
    """

    blocks: TrackObservations | Float[Tensor, "m F"]
    count: int
    effect: Float[Tensor, "m p"] | None = None


Combination = Callable[[Float[Tensor, "n*p+m j"]], Float[Tensor, "k j"]]

_CHUNK = 2**24  # elements in memory
_READINGS = 256  # observations whose joint covariance is computed at a time


@dataclass(frozen=True)
class Signal:
    """The posterior of s = h(x) + n at observations along tracks.

    Each block of these observations contains one observation. Their tracks belong to one group.
    """

    distribution: FieldDistribution  # of the field, given all data
    noises: Noises
    given: Mapping[str, Track]  # the block means in these data, by the label of their track

    def mean(self, readings: TrackObservations) -> Float[Tensor, "n v"]:
        """E[s]."""
        known = self._given(readings)
        mean = readings.means.apply(self.distribution.mean(readings.x))
        if not known.tracks:
            return mean
        unexplained = residual_of_blocks(self.distribution, known)
        return mean + self._sharing(readings)[1] @ unexplained

    def variance(self, readings: TrackObservations) -> Float[Tensor, "n v"]:
        """Var[s] of every value."""
        if not self._given(readings).tracks:
            field = unexplained_variance(self.distribution, readings.means, None, None)
            return field + parameters_of(readings, self.noises).slow
        parts = []
        for track in readings.tracks:
            one = replace(readings, tracks=(track,))
            shared, gain = self._sharing(one)
            noise = parameters_of(one, self.noises).slow - (gain * shared).sum(-1)
            field = unexplained_variance(self.distribution, one.means, self._seen(one), gain)
            parts.append(field + noise.unsqueeze(-1))
        return torch.cat(parts)

    def covariance(self, readings: TrackObservations) -> Float[Tensor, "n*v n*v"]:
        """Cov[s]."""
        seen, part = self._seen(readings), readings.means
        v, noise = part.pattern.num_values, parameters_of(readings, self.noises)
        prior = [slow_covariance(noise, track.clock, track.clock) for track in readings.tracks]
        prior = torch.block_diag(*prior)
        if seen is None:
            field = part.apply_to_joint(self.distribution.covariance(part.x))
            return field + in_components(prior, v)
        shared, gain = self._sharing(readings)
        combined = less_explained(in_components(gain, v), part)
        field = joint_covariance(self.distribution, part.x, seen, combined)
        return field + in_components(prior - gain @ shared.mT, v)

    def _seen(self, readings: TrackObservations) -> Seen | None:
        """The block means of the tracks of these observations, for `joint_covariance`."""
        known = self._given(readings)
        return block_means_under(self.distribution, known) if known.tracks else None

    def _given(self, readings: TrackObservations) -> TrackObservations:
        """The block means of the tracks of these observations."""
        labels = [track.label for track in readings.tracks]
        tracks = tuple(self.given[label] for label in labels if label in self.given)
        return replace(readings, tracks=tracks)

    def _sharing(
        self, readings: TrackObservations
    ) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n t"]]:
        """The matrices k and G."""
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
    """The noise of block means, with the variance that the features of the field omit."""
    white = distribution.split()[1]
    return known.noise(noises, 0.0 if white is None else white.diagonal().amax())


def precision_of_track(noise: BlockNoise) -> Float[Tensor, "t t"]:
    """R⁻¹ for the blocks of one track, in one component."""
    return torch.cholesky_inverse(torch.linalg.cholesky(noise.of_track(slice(None))))


def residual_of_blocks(
    distribution: FieldDistribution, known: TrackObservations
) -> Float[Tensor, "t v"]:
    """ȳ − E[H f]."""
    means = known.rows(distribution.mean(known.points).reshape(-1, 1))
    return known.y - means.reshape_as(known.y)


def in_components(matrix: Float[Tensor, "n m"], v: int) -> Float[Tensor, "n*v m*v"]:
    """The covariance of v independent components, each with the covariance `matrix`."""
    return same_point(matrix, torch.eye(v).to(matrix))


def parameters_of(readings: TrackObservations, noises: Noises) -> TrackNoise:
    return readings.noise(noises).noise


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
    """The covariance of the noise at some times and of its means over blocks of other times."""
    count, parts = torch.bincount(block).to(clock), []
    for part in clock.split(max(1, _CHUNK // len(others))):
        covariance = slow_covariance(noise, part, others)
        sums = covariance.new_zeros(len(part), len(count)).index_add(1, block, covariance)
        parts.append(sums / count)
    return torch.cat(parts)


@singledispatch
def block_means_under(distribution: FieldDistribution, known: TrackObservations) -> Seen:
    """The block means H f in the form that `joint_covariance` needs, for any points."""
    return Seen(known.condensed, known.y.numel())


@block_means_under.register
def _(distribution: PlusWhite, known):
    return block_means_under(distribution.distribution, known)


@block_means_under.register
def _(distribution: WithMean, known):
    effect = known.rows(distribution.effect(known.points).flatten(0, 1))
    return block_means_under(distribution.distribution, known)._replace(effect=effect)


@block_means_under.register
def _(distribution: WeightPosterior, known):
    expansion = distribution.expansion
    width = expansion.num_features * expansion.num_outputs * known.times.count.mean().item()
    rows = torch.arange(len(known.y), device=known.x.device).split(max(1, int(_CHUNK / width)))
    parts = map(known.take, rows)
    features = torch.cat([part.rows(expansion.features(part.points)) for part in parts])
    return Seen(features, len(features))


@singledispatch
def joint_covariance(
    distribution: FieldDistribution, x: Float[Tensor, "n d"], seen: Seen, combined: Combination
) -> Float[Tensor, "k k"]:
    """The covariance of linear combinations of f(x), followed by block means H f."""
    points = torch.cat([x.double(), seen.blocks.points])
    rows = len(x) * distribution.num_outputs

    def half(matrix: Float[Tensor, "m j"]) -> Float[Tensor, "k j"]:
        return combined(torch.cat([matrix[:rows], seen.blocks.rows(matrix[rows:])]))

    return half(half(distribution.covariance(points)).mT)


@joint_covariance.register
def _(distribution: PlusWhite, x, seen, combined):
    field = joint_covariance(distribution.distribution, x, seen, combined)
    white = independent(distribution.added, len(x))
    return field + combined(combined(pad(white, (0, seen.count) * 2)).mT)


@joint_covariance.register
def _(distribution: WithMean, x, seen, combined):
    effect = combined(torch.cat([distribution.effect(x).flatten(0, 1), seen.effect]))
    return joint_covariance(distribution.distribution, x, seen, combined) + effect @ effect.mT


@joint_covariance.register
def _(distribution: WeightPosterior, x, seen, combined):
    return distribution.covariance_of(
        combined(torch.cat([distribution.expansion.features(x.double()), seen.blocks]))
    )


def covariance_of_blocks(
    distribution: FieldDistribution, part: TrackObservations
) -> Float[Tensor, "t*v t*v"]:
    """The covariance Cov[H f] of block means H f."""
    seen = block_means_under(distribution, part)
    return joint_covariance(distribution, part.x[:0], seen, lambda rows: rows)


def less_explained(gain: Float[Tensor, "n*v m"], part: Observations) -> Combination:
    """The combination h(x) − G H f."""
    count = len(part) * part.pattern.num_outputs

    def combined(rows: Float[Tensor, "n*p+m j"]) -> Float[Tensor, "n*v j"]:
        return part.rows(rows[:count]) - gain @ rows[count:]

    return combined


@singledispatch
def unexplained_variance(
    distribution: FieldDistribution,
    part: Observations,
    seen: Seen | None,
    gain: Float[Tensor, "n t"] | None,
) -> Float[Tensor, "n v"]:
    """Var[h(x) − G H f] of every value, for block means H f of one track.

    Without block means, it is Var[h(x)].
    """
    v, parts = part.pattern.num_values, []
    if seen is None:
        return distribution.latent_variance(part)
    for rows in torch.arange(len(part), device=part.x.device).split(_READINGS):
        some = part.take(rows)
        combined = less_explained(in_components(gain[rows], v), some)
        covariance = joint_covariance(distribution, some.x, seen, combined)
        parts.append(covariance.diagonal().unflatten(0, (-1, v)))
    return torch.cat(parts)


@unexplained_variance.register
def _(distribution: PlusWhite, part, seen, gain):
    added = part.apply_to_covariance(distribution.added.expand(len(part), -1, -1))
    field = unexplained_variance(distribution.distribution, part, seen, gain)
    return field + added.diagonal(dim1=-1, dim2=-2)


@unexplained_variance.register
def _(distribution: WithMean, part, seen, gain):
    inner, effect = distribution.distribution, distribution.effect(part.x)
    effect = part.pattern.rows(effect, part.direction)
    if seen is None:
        return unexplained_variance(inner, part, None, None) + effect.square().sum(-1)
    over_blocks = seen.effect.unflatten(0, (-1, part.pattern.num_values))
    effect = effect - torch.einsum("nt,tvk->nvk", gain, over_blocks)
    return unexplained_variance(inner, part, seen, gain) + effect.square().sum(-1)


@unexplained_variance.register
def _(distribution: WeightPosterior, part, seen, gain):
    if seen is None or part.direction is not None:
        return unexplained_variance.dispatch(object)(distribution, part, seen, gain)
    x, variance = part.x, distribution.variance(part.x)
    p, count = distribution.num_outputs, gain.shape[-1]
    solved = distribution.weight_covariance(seen.blocks.mT)  # Cov[θ, H f]
    columns = distribution.expansion.column_weights(solved)
    means = (seen.blocks @ solved).unflatten(0, (count, p)).unflatten(2, (count, p))
    means = means.diagonal(dim1=1, dim2=3)  # Cov[H f] in every component, (t, t, p)
    rows, parts = max(1, _CHUNK // columns.shape[-1]), []
    for points, weights in zip(x.split(rows), gain.split(rows), strict=True):
        cross = distribution.expansion.phi.apply(points, columns).unflatten(-1, (p, count, p))
        cross = cross.diagonal(dim1=1, dim2=3)  # Cov[f(x), H f], (n, t, p)
        # Var[f(x) − G H f] = Var[f(x)] − 2 G Cov[H f, f(x)] + G Cov[H f] Gᵀ, in every component.
        both = torch.einsum("nt,tsp->nsp", weights, means) - 2 * cross
        parts.append(torch.einsum("ns,nsp->np", weights, both))
    return variance + torch.cat(parts)


# Single observations along tracks, of which some can be held out.


@dataclass(frozen=True)
class TrackReadings:
    """The observations of a group along tracks, track after track, in the order of their times."""

    single: TrackObservations  # in blocks of one observation
    index: Int[Tensor, "N"]  # row of each observation in the x of the user
    span: float  # duration of the blocks that a model forms

    @classmethod
    def of(
        cls, part: Observations, track: object, time: object, count: int, span: float
    ) -> "TrackReadings":
        """The observations of `part`, with the arguments of `observations_along`."""
        values = part.y.shape[-1]
        # The index is sorted with the observations, as a further component of y.
        numbered = replace(part, y=torch.cat([part.y, part.index[:, None].to(part.y)], dim=-1))
        held = observations_along(numbered, track, time, count)
        index = held.y[:, values].long()
        tracks = tuple(
            replace(track, y=track.y[:, :values], squares=track.squares[:values])
            for track in held.tracks
        )
        return cls(replace(held, tracks=tracks), index, span)

    def take(self, rows: Bool[Tensor, "N"]) -> "TrackReadings":
        """Some observations."""
        kept = torch.nonzero(rows).squeeze(-1)
        return replace(self, single=self.single.take(kept), index=self.index[kept])

    def __len__(self) -> int:
        return len(self.index)

    @property
    def observations(self) -> Observations:
        """These observations at single points."""
        return replace(self.single.means, index=self.index)

    @property
    def in_blocks(self) -> TrackObservations:
        """Block means of the observations, on the clock of all of them."""
        return self.single.in_blocks(self.span)


# Held-out blocks of observations along tracks.
#
# If a whole track is held out, its observations are those of a new track. Otherwise its remaining
# observations have information on the offset and on the correlated noise.


@torch.no_grad()
def left_out_of_tracks(
    inference: Inference,
    readings: Sequence[TrackReadings],
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Block],
) -> Iterator[list[LeftOut]]:
    """Do what `left_out` does for observations along tracks, with conditioning for every block.

    Mean and variance are those of the field plus the noise that observations of a track share.
    """
    for block in blocks:
        rest = [part.take(~block.left_out[part.index]) for part in readings]
        rest = [part.in_blocks for part in rest if len(part)]
        posterior = inference.of(Dataset.in_memory(rest)).posterior(kernel, noises, mean)
        field = posterior.field(fixed=mean is not None)
        given = {part.key: {track.label: track for track in part.tracks} for part in rest}
        results = []
        for part in readings:
            tested = part.take(block.tested[part.index])
            if len(tested):
                signal = Signal(field, noises, given.get(part.single.key, {}))
                results.append(of_signal(signal, tested))
        yield results


@torch.no_grad()
def tracks_left_out(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    tested: Iterable[TrackObservations],
) -> Iterator[tuple[Float[Tensor, "m"], Float[Tensor, "m m"]]]:
    """Yield the differences between block means and their predictions from all other tracks, with
    the covariances of these differences.

    Args:
        inference: the inference from a `Dataset` with tracks.
        kernel: the prior.
        noises: the noise covariances, by the label of the group.
        mean: the constant mean; None for an unknown mean.
        tested: the blocks of some tracks of these data. These complete tracks are held out
            together.
    """
    for part in tested:
        names = {(part.key, track.label) for track in part.tracks}
        tracks = [
            replace(held, tracks=tuple(t for t in held.tracks if (held.key, t.label) not in names))
            for held in inference.data.tracks
        ]
        data = replace(inference.data, tracks=tuple(held for held in tracks if held.tracks))
        posterior = inference.of(data).posterior(kernel, noises, mean)
        field, white = posterior.field(fixed=mean is not None).split()
        truncated = None if white is None else (white, white)
        latent = covariance_of_blocks(field, part)
        covariance = latent + part.noise_covariance(noises, truncated)
        yield residual_of_blocks(field, part).flatten(), covariance


def of_signal(signal: Signal, readings: TrackReadings) -> LeftOut:
    """The observations, with mean and variance of their signal, and the variance of their noise."""
    single = readings.single
    parameters = parameters_of(single, signal.noises)
    white = (parameters.noise + parameters.block_variance).expand_as(single.y)
    white = white if single.given is None else white + single.given.unsqueeze(-1)
    joint = partial(signal.covariance, single)
    mean, variance = signal.mean(single), signal.variance(single)
    new = [single.y.new_full((len(t.y),), t.label not in signal.given) for t in single.tracks]
    return LeftOut(readings.observations, mean, variance, joint, white, torch.cat(new).bool())


# Leave-one-out residuals of observations along tracks, from one posterior.
#
# An observation y in a block of n observations has y | ȳ ~ N(m, V). m depends on the mean ȳ_b of
# its block by the matrix A. The block means ȳ have the density N(μ, K). With the mean z of the
# other observations of the block, ȳ_b = ((n − 1) z + y)/n. The product of both densities gives that
# of y given all others:
#
#     Λ = (I − A/n)ᵀ V⁻¹ (I − A/n) + [K⁻¹]_bb/n² ,
#     y − E[y | others] = Λ⁻¹ ((I − A/n)ᵀ V⁻¹ (y − m) + [K⁻¹(ȳ − μ)]_b/n) ,   Cov = Λ⁻¹ .
#
# For n = 1, only the last terms remain. With R = Cov[n̄] of a track and C = Cov[H f | ȳ],
# K⁻¹ = R⁻¹ − R⁻¹ C R⁻¹. All observations of a block have the same truncated part of the field.


@torch.no_grad()
def leave_one_out_of_tracks(
    inference: Inference,
    readings: Sequence[TrackReadings],
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    count: int,
) -> LeaveOneOut:
    """Predict each of `count` observations from all others, and return the residuals.

    If the constant mean is trained, its value is the one given all data.
    """
    posterior = inference.posterior(kernel, noises, mean)
    distribution = posterior.field(fixed=True)
    pattern = readings[0].single.key.pattern
    columns = torch.tensor(pattern.columns)
    result = LeaveOneOut.empty(count, pattern.num_columns)
    for part in readings:
        blocks, first = part.in_blocks, 0
        for single, track in zip(part.single.tracks, blocks.tracks, strict=True):
            known = replace(blocks, tracks=(track,))
            others = Others(distribution, noises, known)
            each = replace(part.single, tracks=(single,)).means
            rows = torch.arange(len(single.y), device=single.y.device)
            for some in rows.split(_READINGS):
                residual, covariance = others.residuals(each.take(some), some)
                index = part.index[first + some].cpu()
                one = torch.ones_like(residual[:, 0])
                result.record(index, columns, residual, covariance, one, chi_squared)
            first += len(rows)
    return result


@dataclass(frozen=True)
class Others:
    """The prediction of the observations of one track from all others."""

    distribution: FieldDistribution  # given all block means
    noises: Noises
    known: TrackObservations  # the blocks of the track

    @property
    def _track(self) -> Track:
        return self.known.tracks[0]

    @cached_property
    def _noise(self) -> BlockNoise:
        return noise_of_blocks(self.distribution, self.known, self.noises)

    @cached_property
    def _precision(self) -> Float[Tensor, "t t"]:
        """R⁻¹."""
        return precision_of_track(self._noise)

    @cached_property
    def _seen(self) -> Seen:
        return block_means_under(self.distribution, self.known)

    @cached_property
    def _residual(self) -> Float[Tensor, "t v"]:
        """ȳ − E[H f]."""
        return residual_of_blocks(self.distribution, self.known)

    def residuals(
        self, part: Observations, rows: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"]]:
        """The residuals of observations from their predictions given all others.

        `rows` are their rows in the track. Returns residuals and their covariances.
        """
        block, v = self._track.block[rows], part.pattern.num_values
        eye, precision = torch.eye(v).to(part.y), in_components(self._precision, v)
        shared = self._shared(rows)
        gain = shared @ self._precision  # G = k R⁻¹
        wide = in_components(gain, v)

        numbers, field = len(wide), self.distribution.split()[0]
        unexplained, vectors = less_explained(wide, part), part.pattern.num_outputs * len(part)

        def rows_of(both: Float[Tensor, "n*p+m j"]) -> Float[Tensor, "n*v+m j"]:
            return torch.cat([unexplained(both), both[vectors:]])

        latent = joint_covariance(field, part.x, self._seen, rows_of)  # of h(x) − G H f, and of H f
        explained = wide + latent[:numbers, numbers:] @ precision
        solved = precision - precision @ latent[numbers:, numbers:] @ precision  # K⁻¹
        variance = latent[:numbers, :numbers]

        each, n = torch.arange(len(rows)).to(rows), self._noise.times.count[block, None, None]
        own = self._noise.noise.total + self._noise.white + self._given(rows)
        own = own - (gain * shared).sum(-1)
        variance = _pick(variance, v, each, each) + own[:, None, None] * eye  # V
        less_own = eye - _pick(explained, v, each, block) / n  # I − A/n
        expected = part.apply(self.distribution.mean(part.x))
        residual = part.y - expected - gain @ self._residual
        of_block = (self._precision @ self._residual)[block].unsqueeze(-1) / n

        # A block of one observation has the observation as its mean, on which m and V are
        # conditioned. V is then singular, and m and V are not used.
        several = n.flatten() > 1
        information = _pick(solved, v, block, block) / n**2  # Λ
        weighted = torch.zeros_like(information)
        weighted[several] = torch.linalg.solve(variance[several], less_own[several]).mT
        information = information + weighted @ less_own
        covariance = torch.linalg.inv(information)
        return (covariance @ (weighted @ residual.unsqueeze(-1) + of_block)).squeeze(-1), covariance

    def _given(self, rows: Int[Tensor, "n"]) -> Float[Tensor, "n"] | float:
        """The known noise variances of observations, or 0 without known noise."""
        return 0.0 if self._track.given is None else self._track.given[rows]

    def _shared(self, rows: Int[Tensor, "n"]) -> Float[Tensor, "n t"]:
        """k, the covariance between the noise of observations and that of block means."""
        noise, block = self._noise.noise, self._track.block[rows]
        slow = self._track.clock[rows], self._track.clock, self._track.block
        shared = covariance_with_block_means(noise, *slow)
        white = (noise.noise + self._given(rows)) / self._noise.times.count[block]
        own = noise.block_variance + self._noise.white + white
        shared[torch.arange(len(rows)).to(rows), block] += own
        return shared


def _pick(
    matrix: Float[Tensor, "m*v k*v"], v: int, rows: Int[Tensor, "n"], columns: Int[Tensor, "n"]
) -> Float[Tensor, "n v v"]:
    """Select v×v blocks of a matrix by row and column numbers."""
    return matrix.unflatten(0, (-1, v)).unflatten(2, (-1, v))[rows, :, columns]


# The offsets of tracks, given all observations.
#
# A track has the block means ȳ = H f + n̄ with R = Cov[n̄]. With the gain g = σ_b² 1ᵀ R⁻¹, its
# offset b in one component is
#
#     b = g (ȳ − H f) + independent noise of variance σ_b² − σ_b² g 1 .
#
# The posterior of b thus follows from that of the block means H f of the field. The vector b of all
# offsets, with y = H f + B b + other noise, has
#
#     E[b] = σ_b² s ,   Cov[b] = σ_b² I − σ_b⁴ J ,   s = BᵀK⁻¹(y − μ) ,   J = BᵀPB .
#
# s and J also determine the restricted evidence of any other variance v of offsets, by the
# determinant lemma. With the eigenvalues j_i of J, the components s_i of s along its eigenvectors,
# Δ = v − σ_b² and d_i = 1 + Δ j_i,
#
#     log p(y | v) = ½ Σ_i (Δ s_i² / d_i − log d_i) + const. ,   I(v) = ½ Σ_i (j_i / d_i)² .
#
# By the posterior of the field, s = 1ᵀR⁻¹(ȳ − E[H f]) and J = 1ᵀR⁻¹1 − Cov[1ᵀR⁻¹ H f] for each
# track. Neither needs the covariance K of all data (`Offsets.of`).


_MOST = 400  # with more offsets, the uncertainty of their variance changes results by below 0.3 %
_ROUNDING = 1e-10  # rounding of J, over the information 1ᵀR⁻¹1 for a known field
_NEGLIGIBLE = 20.0  # −log of a negligible density, relative to its maximum
_WIDE, _STEP = 60.0, 0.1  # width and step of the range of log v before the tails are removed
_TINY = 1e-300  # a negligible variance


@dataclass(frozen=True)
class TrackOffsets:
    """The posterior of the offset of each track, given all observations.

    `VectorFieldGP.track_offsets` returns it. `offsets[label]` is the mean and the standard
    deviation of one track.

    Attributes:
        labels: the labels of the T tracks, as text.
        mean: the posterior means (T, p), in units of y; (T, 1) for observations along directions.
        sd: the posterior standard deviations, with the shape and units of `mean`. Differences of
            offsets are known better than their sum, because the constant mean of the field is
            common to all tracks.

    Example:
        >>> import gp_orff, torch
        >>> x = torch.rand(
        ...     60, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> track = torch.arange(60) // 20
        >>> y = torch.sin(3 * x) + track[:, None]  # offsets 0, 1 and 2
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> offsets = model.fit(x, y, track=track, progress=False).track_offsets()
        >>> offsets.labels, offsets.mean.shape
        (('0', '1', '2'), torch.Size([3, 2]))
    """

    labels: tuple[str, ...]
    mean: Float[Tensor, "T v"]
    sd: Float[Tensor, "T v"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, label: object) -> tuple[Float[Tensor, "v"], Float[Tensor, "v"]]:
        """Return the mean and the standard deviation of the offset of one track, each (p,).

        Raises:
            KeyError: if no track has this label.
        """
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
    """The offsets of the tracks of one group. `mean` is None if the constant mean is unknown."""
    field = inference.posterior(kernel, noises, mean).field(fixed=mean is not None)

    def offsets() -> Iterator[tuple[Float[Tensor, "v"], Float[Tensor, "v"]]]:
        for track in tracks.tracks:
            seen = Offsets.of(field, noises, replace(tracks, tracks=(track,)))
            prior = noises.tracks[tracks.key.label].offset_variance
            variance = prior - prior.square() * seen.information.diagonal()
            yield prior * seen.score, variance.clamp_min(0).sqrt()

    means, deviations = zip(*offsets(), strict=True)
    labels = tuple(track.label for track in tracks.tracks)
    return TrackOffsets(labels, torch.stack(means), torch.stack(deviations))


@dataclass(frozen=True)
class Offsets:
    """The information of the data on the offsets of tracks of one group, in all components."""

    score: Float[Tensor, "T*v"]  # s
    information: Float[Tensor, "T*v T*v"]  # J

    @classmethod
    def of(
        cls,
        field: FieldDistribution,
        noises: Noises,
        tracks: TrackObservations,
    ) -> "Offsets":
        """The information, from the posterior of the field."""
        weights, v = [], tracks.y.shape[-1]
        for track in tracks.tracks:
            noise = noise_of_blocks(field, replace(tracks, tracks=(track,)), noises)
            weights.append(precision_of_track(noise).sum(0))
        residual = residual_of_blocks(field, tracks)
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
def _(distribution: WithMean, tracks, weights):
    effect = tracks.rows(distribution.effect(tracks.points).flatten(0, 1))
    effect = _sums(tracks, weights) @ effect
    return covariance_of_sums(distribution.distribution, tracks, weights) + effect @ effect.mT


@covariance_of_sums.register
def _(distribution: WeightPosterior, tracks, weights):
    """Sum the features of one track at a time, since those of all blocks may not fit in memory."""
    rows = []
    for track, weight in zip(tracks.tracks, weights, strict=True):
        one = replace(tracks, tracks=(track,))
        rows.append(_sums(one, [weight]) @ block_means_under(distribution, one).blocks)
    return distribution.covariance_of(torch.cat(rows))


def _sums(
    tracks: TrackObservations, weights: Sequence[Float[Tensor, "t"]]
) -> Float[Tensor, "T*v m*v"]:
    return in_components(torch.block_diag(*weights), tracks.y.shape[-1])


@torch.no_grad()
def slow_variance(
    field: FieldDistribution,
    noises: Noises,
    tracks: TrackObservations,
    likelihood: TrackLikelihood,
) -> SlowVariance | None:
    """Return the posterior of the noise variance of new tracks, given the other hyperparameters.

    It is None if the variance of offsets is fixed, if the data contain no difference of offsets, or
    if they contain more than 400 offsets.

    1. The data cannot distinguish an offset from correlated noise whose correlation time τ is
       longer than the tracks. Over a duration D, σ_r² exp(−t/τ) − ℓ is a covariance for ℓ ≤ 2 τ
       σ_r² / (2 τ + D), the variance of the best estimate of a constant under this noise. The
       posterior is therefore that of V = σ_b² + ℓ > 0, with the duration D of the longest track.
       The remainder σ_r² − ℓ does not change.
    2. s and J of the present posterior determine log p(y | V).
    3. Bayes' theorem gives the density of log V. Its range without negligible tails is divided
       evenly.

    Args:
        field: the posterior of the field.
        noises: the noise of every group.
        tracks: the tracks of one group.
        likelihood: the likelihood of this group.
    """
    if tracks.y.shape[-1] * len(tracks.tracks) > _MOST:
        return None
    if not likelihood.raw_offset_variance.requires_grad:
        return None
    seen = Offsets.of(field, noises, tracks)
    j, axes = torch.linalg.eigh(seen.information)
    # An eigenvalue of zero is a combination of offsets that the data do not determine, such as
    # their sum, which is equivalent to the constant mean of the field.
    told = j > _ROUNDING * seen.information.diagonal().amax()
    if not told.any():
        return None
    j, squares = j[told], (axes.mT @ seen.score)[told].square()
    noise = noises.tracks[tracks.key.label]
    level = _level(noise, tracks) if _are_free(likelihood) else 0.0 * noise.slow
    present = (noise.offset_variance + level).clamp_min(_TINY)

    def log_density(u: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        """The log density of u = log V, up to a constant."""
        value = u.exp().unsqueeze(-1)
        change = value - present
        # 1 + (v − σ²) j is at least min(1, v/σ²), since σ² j ≤ 1. Rounding may violate this.
        d = torch.maximum(1 + change * j, (value / present).clamp_max(1.0))  # by rounding
        evidence = 0.5 * (change * squares / d - d.log()).sum(-1)
        jeffreys = 0.5 * (j / d).square().sum(-1).log()
        return evidence + u + _log_prior(likelihood, u.exp() - level, jeffreys)

    # 1/j is the variance of an offset plus that of its estimate, and gives the scale of V.
    centre = -j.log()
    u = torch.arange(centre.amin() - _WIDE, centre.amax() + _WIDE, _STEP).to(j)
    u, _ = torch.cat([u, present.log().reshape(1)]).sort()  # a prior or bounds may be narrow
    density = log_density(u)
    likely = u[density > density.amax() - _NEGLIGIBLE]
    u = likely[0] + (likely[-1] - likely[0]) * torch.linspace(0, 1, NUM_VALUES).to(j)
    weights = torch.softmax(log_density(u), 0)
    return SlowVariance(u.exp() + noise.correlated_variance - level, weights)


def _level(noise: TrackNoise, tracks: TrackObservations) -> Float[Tensor, ""]:
    """ℓ, the part of the correlated noise that acts like an offset."""
    durations = torch.stack([track.clock[-1] - track.clock[0] for track in tracks.tracks])
    twice = 2 * noise.correlation_time
    return noise.correlated_variance * twice / (twice + durations.amax())


def _are_free(likelihood: TrackLikelihood) -> bool:
    """Whether neither the offsets nor the correlated noise have a prior or a fixed value."""
    priors = {name for name, *_ in likelihood.named_priors()}
    bound = {"offset_variance_prior", "correlated_variance_prior", "correlation_time_prior"}
    learned = likelihood.raw_correlated_variance.requires_grad
    return learned and likelihood.raw_correlation_time.requires_grad and not priors & bound


def _log_prior(
    likelihood: TrackLikelihood, variance: Float[Tensor, "k"], jeffreys: Float[Tensor, "k"]
) -> Float[Tensor, "k"]:
    """The log prior density of the offset variance, −∞ outside the bounds of its constraint."""
    constraint = likelihood.raw_offset_variance_constraint
    lower, upper = constraint.lower_bound, constraint.upper_bound
    inside = (variance <= upper) & ((variance >= lower) | (lower == 0))
    prior = getattr(likelihood, "offset_variance_prior", None)
    if prior is None:
        return torch.where(inside, jeffreys, -torch.inf)
    inside = inside & prior.support.check(variance)
    some = torch.where(inside, variance, likelihood.offset_variance)
    return torch.where(inside, prior.log_prob(some), -torch.inf)
