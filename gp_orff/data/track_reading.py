"""From track labels and times to block means with correlated noise, as observations."""

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise import Noises, TrackNoise
from gp_orff.data.observations import LinearObservations, Observations, TruncatedVariance
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Moments, Statistics, Weights, added
from gp_orff.data.tracks import (
    BlockNoise,
    BlockTimes,
    Track,
    WhitenedGram,
    averaged,
    averaged_along,
    batches_of,
    block_means,
    block_span,
    means_of,
    tracks_in_blocks,
)
from gp_orff.data.validation import are_missing, as_matrix, is_single
from gp_orff.features.columns import Columns

# Block means of observations along tracks: linear observations of a field with correlated noise.
#
# From labels and times to the evidence:
#
# 1. `readings_along` sorts the observations by track and puts each into a block of one, with its
#    time or its path length as the clock.
# 2. `in_blocks` averages consecutive ones over a `span`. Means of observations along directions
#    make sense only if the directions barely turn within a block.
# 3. Under features, `averages` gives the means of the columns. `statistics` whitens them track by
#    track and returns sums of the form that observations at points have, under unit noise, so that
#    the normal equations need not know of tracks.
# 4. Under the exact kernel, `rows` averages covariances over the positions of a block, or over two
#    positions that have the same mean and the same variance along the block (`condensed`).
# 5. `scatter_terms` completes the evidence by the scatter within blocks.


_STRETCH = 16  # blocks of a sample
_TURN = 0.1  # of a unit vector, from the mean direction of its block
_FEW_NUMBERS = 8192  # along directions, which an exact kernel takes one by one
_MOST_NODES = 1000  # values at observations, up to which the exact kernel averages over all


class Places(NamedTuple):
    """Positions with their blocks, and with directions if observations have them."""

    x: Float[Tensor, "n d"]
    block: Int[Tensor, "n"]
    direction: Float[Tensor, "n p"] | None


@dataclass(frozen=True)
class TrackObservations(LinearObservations):
    """Block means of the observations of a group along tracks: ȳ_b = mean_i f(x_i) + ε̄_b, or with
    uᵢᵀ f(x_i) along a direction u_i for each observation."""

    key: GroupKey
    tracks: tuple[Track, ...]
    timed: bool  # whether the clock is time, or the length of the path
    span: float  # of a block, along the clock
    nodes: Places | None = None  # instead of the observations

    @cached_property
    def x(self) -> Float[Tensor, "N d"]:
        """The positions of all observations."""
        return self._of_all("x")

    @cached_property
    def y(self) -> Float[Tensor, "T p"]:
        """The means of all blocks."""
        return self._of_all("y")

    @cached_property
    def direction(self) -> Float[Tensor, "N p"] | None:
        """The directions of all observations; None for observations of vectors."""
        return self._of_all("direction")

    @cached_property
    def given(self) -> Float[Tensor, "N"] | None:
        """The known noise variances of all observations; None where all noise is learned."""
        return self._of_all("given")

    def _of_all(self, name: str) -> Tensor | None:
        """What all tracks have, one after the other; None if they have none."""
        values = [getattr(track, name) for track in self.tracks]
        return None if values[0] is None else torch.cat(values)

    @property
    def values(self) -> Float[Tensor, "M"]:
        return self.y.flatten()

    @property
    def one_by_one(self) -> bool:
        """Whether every observation is a block of its own."""
        return len(self.x) == len(self.y)

    @property
    def num_averaged(self) -> int:
        """The numbers of vectors that an exact kernel averages, of observations along directions in
        blocks of several; 0 for others."""
        if self.direction is None or self.one_by_one:
            return 0
        return len(self.condensed.points) * self.key.pattern.num_outputs

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The blocks of every track."""
        spans, start = [], 0
        for track in self.tracks:
            spans.append(slice(start, start + len(track.y)))
            start += len(track.y)
        return tuple(spans)

    @cached_property
    def times(self) -> BlockTimes:
        """The times of the observations of every block."""
        pairs = zip(self.tracks, self.blocks, strict=True)
        block = torch.cat([track.block + span.start for track, span in pairs])
        return BlockTimes(self._of_all("clock"), block)

    @cached_property
    def means(self) -> Observations:
        """The block means, as observations at mean positions and along mean directions."""
        x, direction = self._mean(self.x), self.direction
        return Observations(
            self.key, x, self.y, direction=None if direction is None else self._mean(direction)
        )

    def _mean(self, values: Float[Tensor, "N k"]) -> Float[Tensor, "T k"]:
        return block_means(values, self.times.block, len(self.y))

    def in_blocks(self, span: float | None) -> "TrackObservations":
        """Observations, each in a block of its own, in blocks of about `span` along the clock; if
        None, of what `block_span` chooses. Up to 8192 observations along directions stay as they
        are, and more where directions turn within blocks."""
        clock, sizes, chosen = self.times.clock, [len(track.x) for track in self.tracks], span
        if span is None and self.direction is not None and len(self.x) <= _FEW_NUMBERS:
            return self
        if span is None:
            of_track = np.repeat(np.arange(len(sizes)), sizes)
            span = block_span(self.y.cpu().numpy(), clock.cpu().numpy(), of_track)
        if not span > 0:
            return self
        labels = [track.label for track in self.tracks]
        parts = self.x, self.y, clock, span, self.direction, self.given
        tracks = tracks_in_blocks(labels, sizes, *parts)
        blocks = replace(self, tracks=tracks, span=span)
        return self if chosen is None and blocks.turns else blocks

    @property
    def turns(self) -> bool:
        """Whether directions differ much within a block, so that its mean has little
        information."""
        if self.direction is None:
            return False
        away = self.direction - self.means.direction[self.times.block]
        return bool(away.norm(dim=-1).amax() > _TURN)

    def take(self, rows: Int[Tensor, "m"]) -> "TrackObservations":
        """Some blocks, in increasing order, with the share of the scatter that falls to them."""
        stops = torch.tensor([blocks.stop for blocks in self.blocks]).to(rows.device)
        present, counts = torch.searchsorted(stops, rows, right=True).unique_consecutive(
            return_counts=True
        )
        tracks = tuple(
            self.tracks[number].take(part - self.blocks[number].start)
            for number, part in zip(present.tolist(), rows.split(counts.tolist()), strict=True)
        )
        return replace(self, tracks=tracks)

    def __add__(self, new: "TrackObservations") -> "TrackObservations":
        """These observations and later ones of the group."""
        if self.timed != new.timed:
            raise ValueError(
                "expected times for all tracks of a group or for none, got both; give time=, or "
                "put the others into a separate group (group=)"
            )
        if (self.given is None) != (new.given is None):
            raise ValueError(
                "expected noise= for all tracks of a group or for none, got both; give noise=, or "
                "put the others into a separate group (group=)"
            )
        tracks = {track.label: track for track in self.tracks}
        for track in new.tracks:
            before = tracks.get(track.label)
            tracks[track.label] = track if before is None else before.followed_by(track, self.timed)
        return replace(self, tracks=tuple(tracks.values()), span=self.span or new.span)

    def sample(self, number: int) -> "TrackObservations":
        """About `number` blocks, in stretches of consecutive ones spread over all tracks."""
        stretches = [
            piece
            for blocks in self.blocks
            for piece in torch.arange(blocks.start, blocks.stop).split(_STRETCH)
        ]
        share = number / len(self.y)
        # An even selection: a stretch is taken when the running share passes an integer.
        kept = [int(share * (i + 1)) > int(share * i) for i in range(len(stretches))]
        rows = [piece for piece, keep in zip(stretches, kept, strict=True) if keep]
        return self.take(torch.cat(rows or stretches[:1]).to(self.y.device))

    def to(self, device: torch.device) -> "TrackObservations":
        """These observations on another device."""
        return replace(self, tracks=tuple(track.to(device) for track in self.tracks))

    @cached_property
    def condensed(self) -> "TrackObservations":
        """These observations for an exact kernel: two positions instead of many of a block.

        They are at one standard deviation of its positions on both sides of their mean, along the
        direction in which the positions extend most. Few observations stay as they are.
        """
        count, width = len(self.y), self.key.pattern.num_outputs  # of vectors at the observations
        if len(self.x) * width <= _MOST_NODES or len(self.x) <= 2 * count:
            return self
        block = self.times.block
        centre = self.means.x
        away = self.x - centre[block]
        squares = (away.unsqueeze(-1) * away.unsqueeze(-2)).flatten(1)
        second = self._mean(squares).unflatten(1, (away.shape[-1], -1))
        values, vectors = torch.linalg.eigh(second)
        # Two nodes at the centre ± one standard deviation along the principal axis have the mean of
        # the positions and, if these are on a line, their second moments: the average of a smooth
        # function is exact up to its second derivatives.
        step = vectors[..., -1] * values[..., -1:].clamp_min(0).sqrt()
        nodes = torch.stack([centre - step, centre + step], dim=1).flatten(0, 1)
        index = torch.arange(count, device=block.device).repeat_interleave(2)
        direction = self.means.direction
        if direction is not None:
            direction = direction.repeat_interleave(2, dim=0)
        return replace(self, nodes=Places(nodes, index, direction))

    @property
    def _places(self) -> Places:
        return self.nodes or Places(self.x, self.times.block, self.direction)

    @property
    def points(self) -> Float[Tensor, "K d"]:
        return self._places.x

    def rows(self, values: Float[Tensor, "K*p k"]) -> Float[Tensor, "M k"]:
        x, block, direction = self._places
        values = self.key.pattern.rows(values.unflatten(0, (len(x), -1)), direction)
        means = block_means(values.flatten(1), block, len(self.y))
        return means.unflatten(1, values.shape[1:]).flatten(0, 1)

    def noise(self, noises: Noises, white: Float[Tensor, ""] | float = 0.0) -> BlockNoise:
        """The noise of the block means; the features lack the variance `white`."""
        known = 0.0 if self.given is None else self._mean(self.given[:, None]).squeeze(-1)
        return BlockNoise.of(self.times, self._parameters(noises), white, known)

    def noise_covariance(self, noises: Noises, truncated: TruncatedVariance = None) -> Tensor:
        matrix = self.y.new_zeros(len(self.y), len(self.y), dtype=torch.float64)
        for rows, covariance in self.covariances(noises, truncated and truncated[0]):
            present = rows >= 0
            both = present.unsqueeze(-1) & present.unsqueeze(-2)
            places = (
                rows.unsqueeze(-1).expand_as(both)[both],
                rows.unsqueeze(-2).expand_as(both)[both],
            )
            matrix = matrix.index_put(places, covariance[both])
        return torch.kron(matrix, torch.eye(self.y.shape[-1]).to(matrix))

    def covariances(
        self, noises: Noises, truncated: Float[Tensor, "p p"] | None
    ) -> Iterator[tuple[Int[Tensor, "b t"], Float[Tensor, "b t t"]]]:
        """The blocks of tracks in batches, −1 instead of those that a track lacks, and the
        covariances of their noise in one component; the features lack the variance `truncated`."""
        largest = 0.0 if truncated is None else truncated.diagonal().amax()
        noise = self.noise(noises, largest)
        return ((rows, noise.of_tracks(rows)) for rows in self._batches)

    def scatter_terms(self, noises: Noises) -> tuple[Float[Tensor, "p"], Float[Tensor, ""]]:
        """What the scatter within blocks adds to yᵀK⁻¹y, by component, and to log|K|.

        About a line, white noise has the variance σ², known noise that of a mean observation of its
        track, and r, over a block of length u τ, about σ_r² 2u / (15 + 2u).
        """
        noise = TrackNoise(*(value.double() for value in self._parameters(noises)))
        # This u is twice that of the docstring. The formula is 2u/15 for short blocks and tends to
        # the whole variance for long ones.
        u = 2 * self.span / noise.correlation_time
        variance = noise.noise + noise.correlated_variance * u / (15 + u) + self._given_of_tracks
        squares, degrees = self._about_lines
        numbers = degrees * squares.shape[-1]
        terms = numbers * (variance.log() + math.log(2 * math.pi))
        return (squares / variance.unsqueeze(-1)).sum(0), terms.sum()

    @cached_property
    def _about_lines(self) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k"]]:
        """The sums of squares of all residuals about lines, and their degrees of freedom; of every
        track where noise is known, else of all together."""
        squares = torch.stack([track.squares for track in self.tracks])
        degrees = squares.new_tensor([track.degrees for track in self.tracks])
        if self.given is None:
            return squares.sum(0, keepdim=True), degrees.sum(0, keepdim=True)
        return squares, degrees

    @cached_property
    def _given_of_tracks(self) -> Float[Tensor, "k"]:
        """The mean of the known noise variances of each track; 0 where none are known."""
        if self.given is None:
            return self.y.new_zeros(1)
        return torch.stack([track.given.mean() for track in self.tracks])

    @cached_property
    def _batches(self) -> list[Int[Tensor, "b t"]]:
        batches = batches_of([len(track.y) for track in self.tracks])
        return [rows.to(self.x.device) for rows in batches]

    def averages_along(self, phi: Columns) -> Float[Tensor, "k p*T"]:
        """mean_i φ(x_i) u_i of every block, of observations along directions u."""
        return averaged_along(phi, self.x, self.direction, self.times.block, len(self.y))

    def averages(self, phi: Columns) -> list[Float[Tensor, "b t k"]]:
        """[φ̄, ȳ, 1] of batches of tracks, with zeros instead of blocks that a track lacks."""
        columns = averaged(phi, self.x, self.times.block, len(self.y))
        columns = torch.cat([columns, self.y, torch.ones_like(self.y[:, :1])], dim=-1)
        present = [(rows >= 0).unsqueeze(-1) for rows in self._batches]
        return [columns[r] * p for r, p in zip(self._batches, present, strict=True)]

    def statistics(
        self,
        phi: Columns,
        averages: Sequence[Float[Tensor, "b t k"]],
        noises: Noises,
        truncated: Float[Tensor, "p p"] | None,
    ) -> Statistics:
        """Σ over tracks of φ̄ᵀR⁻¹φ̄, φ̄ᵀR⁻¹ȳ and so on: statistics of unit noise.

        R is the noise covariance of the blocks of a track, in one component.
        """
        width, gram, logdet = self.y.shape[-1], 0, 0
        covariances = (covariance for _, covariance in self.covariances(noises, truncated))
        for covariance, columns in zip(covariances, averages, strict=True):
            products, change = WhitenedGram.apply(covariance, columns)
            gram, logdet = gram + products, logdet + change
        sizes = (phi.num_columns, width, 1)
        (c, z, s), (_, second, total), (_, _, mass) = (
            rows.split(sizes, dim=1) for rows in gram.split(sizes)
        )
        squares, scatter = self.scatter_terms(noises)
        count = len(self.y)
        # The noise is part of the sums, thus its log-determinant has to be a part of the
        # statistics: `noise_terms` computes −v Σ log w for unit noise, which is v log|R| + scatter
        # with this value.
        weights = Weights(count, count, count, -logdet - scatter / width)
        moments = (Moments(c, s.squeeze(-1), mass.squeeze()),)
        second = second + torch.diag(squares)
        return Statistics(phi, self.key.pattern, moments, z, second, total.squeeze(-1), weights)

    def _parameters(self, noises: Noises) -> TrackNoise:
        tracks = getattr(noises, "tracks", {})
        if self.key.label not in tracks:
            raise ValueError(
                f"expected a TrackLikelihood for the tracks of group {self.key.label!r}, got "
                f"{'other noise' if self.key.label in noises else 'none'}"
            )
        return tracks[self.key.label]


def split(
    parts: Iterator[Observations | TrackObservations], tracks: list[TrackObservations]
) -> Iterator[Observations]:
    """The observations at single points; those along tracks are appended to the list."""
    for part in parts:
        if isinstance(part, TrackObservations):
            tracks.append(part)
        else:
            yield part


def require_none(tracks: Sequence[TrackObservations]) -> None:
    """Raise NotImplementedError for tracks: they have no statistics."""
    if tracks:
        raise NotImplementedError(
            "expected observations without track= for statistics, got tracks, whose noise is "
            "correlated; keep the observations, or save the model"
        )


# Times along tracks, as numbers or as dates, in float64.


_EPOCH, _SECOND = np.datetime64(0, "s"), np.timedelta64(1, "s")


def as_times(time: object, count: int) -> Float[np.ndarray, "N"]:
    """Times (N,): numbers as they are, dates as seconds since 1970, durations as seconds.

    Raises:
        TypeError: values that are neither numbers nor dates nor durations.
        ValueError: another length, or values that are not finite.

    Example:
        >>> import numpy
        >>> from gp_orff.data.track_reading import as_times
        >>> as_times(
        ...     numpy.array(
        ...         ["1970-01-01", "1970-01-02T00:00:00.5"], "datetime64[ms]"
        ...     ),
        ...     2,
        ... )
        array([    0. , 86400.5])
    """
    seconds = None
    if not isinstance(time, Tensor):
        array = np.asarray(time)
        seconds = _seconds(array)
        if seconds is None and (array.dtype.kind in "SU" or not _are_numbers(array)):
            raise TypeError(
                f"expected times as numbers, dates or durations, got {type(time).__name__} of type "
                f"{array.dtype}; convert them, as pandas.to_datetime or numpy.asarray(time, float) "
                "do"
            )
    if seconds is not None and isinstance(time, np.ma.MaskedArray):
        seconds = np.where(time.mask, np.nan, seconds)
    values = as_matrix(time if seconds is None else seconds, "times (N,)").detach().cpu().numpy()
    if values.shape != (count, 1):
        shape = values.shape[:1] if values.shape[-1] == 1 else values.shape
        raise ValueError(
            f"expected times of shape {(count,)}, got {shape}; give one for each observation"
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"expected finite times, got {int((~np.isfinite(values)).sum())} others; drop these "
            "observations"
        )
    return values[:, 0]


def _are_numbers(array: np.ndarray) -> bool:
    """Whether objects are numbers, as in nullable columns."""
    if array.dtype.kind != "O":
        return True
    try:
        as_matrix(array, "times (N,)")
    except TypeError:
        return False
    return True


def check_increasing(
    clock: Float[np.ndarray, "N"], of_track: Int[np.ndarray, "N"], names: list[str]
) -> None:
    """Raise ValueError unless times increase along every track; `of_track`: 0, 0, …, 1, …"""
    steps, same = np.diff(clock), np.diff(of_track) == 0
    wrong = np.flatnonzero(same & (steps <= 0))
    if len(wrong):
        track = of_track[wrong[0]]
        of_this = steps[wrong[of_track[wrong] == track]]
        raise ValueError(
            f"expected times that increase along every track, got {(of_this == 0).sum()} that "
            f"repeat and {(of_this < 0).sum()} that run backwards on track {names[track]!r}, first "
            f"after {clock[wrong[0]] + 0.0:.10g}; sort the observations by time, drop copies, give "
            "times in float64, or give each pass its own label"
        )


def _seconds(values: np.ndarray) -> Float[np.ndarray, "N"] | None:
    """Dates or durations in seconds; None for anything else. Times without a zone are UTC."""
    if values.dtype.kind == "O" and values.ndim == 1 and len(values):
        if all(isinstance(value, datetime.datetime) for value in values.tolist()):
            values = np.array([_utc(value) for value in values.tolist()], "datetime64[us]")
        elif all(isinstance(value, datetime.timedelta) for value in values.tolist()):
            values = values.astype("timedelta64[us]")
    if values.dtype.kind == "M":
        return (values - _EPOCH) / _SECOND
    return values / _SECOND if values.dtype.kind == "m" else None


def _utc(value: datetime.datetime) -> datetime.datetime:
    """The time in UTC, without its zone."""
    if value.tzinfo is None:
        return value
    return value.astimezone(datetime.UTC).replace(tzinfo=None)


# From track labels and times to block means, and those of several chunks together.


def along_tracks(
    part: Observations,
    track: object,
    time: object,
    count: int,
    spans: Mapping[str, float],
) -> TrackObservations:
    """The block means of observations along tracks: whole vectors, or numbers along directions.

    Args:
        part, track, time, count: as for `readings_along`.
        spans: the time of a block, by the label of the group; chosen from the data without.

    Example:
        >>> import torch
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.track_reading import along_tracks
        >>> x, y = torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)
        >>> (part,) = read(x, y, 2, Options())
        >>> means = along_tracks(part, ["a", "b", "a", "b"], None, 4, {})
        >>> [track.label for track in means.tracks], means.times.clock.tolist()[:2]
        (['a', 'b'], [0.0, 5.656854249492381])
    """
    return readings_along(part, track, time, count).in_blocks(spans.get(part.key.label))


def readings_along(
    part: Observations, track: object, time: object, count: int
) -> TrackObservations:
    """Observations along tracks, each in a block of its own: whole vectors, or numbers along
    directions.

    Args:
        part: observations of one group, with their rows `index` among those that the user gave.
        track: a label for each row, or one for all.
        time: (N,), increasing along every track; None for the length of the path.
        count: N, the number of rows.

    Raises:
        TypeError: times that are neither real numbers nor dates.
        ValueError: labels or times of another length, missing labels, times that repeat or run
            backwards, vectors with gaps, observations with weights.
    """
    if not (part.weight is None or part.key.known):
        raise ValueError(
            "expected one white noise for all observations of tracks, got variances=, which are "
            "relative; leave them out, or give the known variance of each observation as noise="
        )
    if not (part.pattern.complete or part.direction is not None):
        raise ValueError(
            f"expected whole vectors along tracks, got {len(part)} observations with components "
            "that are NaN; drop these observations, or give them as a separate chunk without "
            "track, under another group"
        )
    names, which = labels_of_tracks(track, count)
    rows = part.index.cpu().numpy()
    # A stable sort keeps the observations of a track in the order of the data, which has to be that
    # of time.
    order = np.argsort(which[rows], kind="stable")
    present, of_track, sizes = np.unique(
        which[rows][order], return_inverse=True, return_counts=True
    )
    names = [names[number] for number in present]
    index = torch.from_numpy(order).to(part.x.device)
    x, y = part.x[index], part.y[index]
    direction = None if part.direction is None else part.direction[index]
    if time is None:
        # Without times the clock is the length of the path, so that the correlation time is a
        # length.
        clock = _path(x.cpu().numpy(), of_track)
    else:
        clock = as_times(time, count)[rows][order]
        check_increasing(clock, of_track, names)
    clock = torch.from_numpy(clock).to(x)
    given = None if part.weight is None else 1 / part.weight[index]
    tracks = tracks_in_blocks(names, sizes.tolist(), x, y, clock, 0.0, direction, given)
    key = GroupKey(part.key.label, means_of(part.pattern))
    return TrackObservations(key, tracks, time is not None, 0.0)


def labels_of_tracks(track: object, count: int) -> tuple[list[str], Int[np.ndarray, "N"]]:
    """The different labels as text, and the number of that of every row.

    Raises:
        ValueError: labels of another length, or missing ones.
    """
    if is_single(track):
        track = np.full(count, track, dtype=None if isinstance(track, str) else object)
    labels = np.asarray(track.cpu() if isinstance(track, Tensor) else track)
    if labels.shape != (count,):
        raise ValueError(
            f"expected a track label for each of the {count} observations, got shape "
            f"{labels.shape}; give one name or number for each, or one for all"
        )
    if labels.dtype.kind not in "biufU":
        labels = np.array([str(label) for label in labels.tolist()])
    names, which = np.unique(labels, return_inverse=True)
    names = [str(name) for name in names.tolist()]
    missing = are_missing(np.array(names)[which], track).sum()
    if missing:
        raise ValueError(
            f"expected a track label for each of the {count} observations, got {missing} missing "
            "ones; put observations without a track into separate chunks, with another group="
        )
    return names, which


def _path(x: Float[np.ndarray, "N d"], of_track: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """The length of the path of its track up to every position."""
    steps = np.linalg.norm(np.diff(x, axis=0), axis=-1) * (np.diff(of_track) == 0)
    length = np.concatenate([[0.0], np.cumsum(steps)])
    return length - length[np.searchsorted(of_track, of_track)]


def check_repeated(parts: tuple[TrackObservations, ...]) -> None:
    """Raise ValueError where every track of a group has one observation only."""
    for part in parts:
        if all(len(track.x) == 1 for track in part.tracks):
            raise ValueError(
                f"expected tracks of several observations, got {len(part.tracks)} of one "
                "observation each, which do not determine noise along tracks; give the "
                "observations of one track one label, or leave out track="
            )


def joined(parts: Iterable[TrackObservations]) -> tuple[TrackObservations, ...]:
    """One piece for each group; observations of a track that come later are appended to it.

    Raises:
        ValueError: times and path lengths in one group, or times that run backwards.
    """
    groups: dict[GroupKey, TrackObservations] = {}
    for part in parts:
        groups = added(groups, {part.key: part})
    return tuple(groups.values())


def blocks_in_words(tracks: Sequence[TrackObservations]) -> str:
    """A sentence on observations along tracks whose means are taken; empty if there are none."""
    readings, means = (sum(map(len, own)) for own in ([t.x for t in tracks], [t.y for t in tracks]))
    if readings == means:
        return ""
    along = sum(len(own.tracks) for own in tracks)
    track = f"track{'s' * (along > 1)}"
    return f"{readings} observations along {along} {track}, as {means} means of blocks"
