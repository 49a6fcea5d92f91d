"""Blocks of consecutive readings of tracks, and how long they should be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.tracks.averages import block_means

_FEW = 1000  # readings, up to which each is a block of its own
_BLOCKS = 500  # of more readings
_SHORTEST = 3  # readings of a block: two are on a line, whose scatter tells no white noise
_SMOOTH = 0.1  # of the variance: what the means of neighbouring blocks may differ by
_LARGEST = 256  # readings of a block


@dataclass(frozen=True)
class Track:
    """The readings of one track in blocks: block means ȳ, and the scatter about lines in time."""

    label: str
    x: Float[Tensor, "n d"]
    clock: Float[Tensor, "n"]  # time or path length
    block: Int[Tensor, "n"]  # 0, 0, …, 1, …
    y: Float[Tensor, "t p"]  # the mean of every block
    squares: Float[Tensor, "p"]  # the sum of squares of all residuals about the lines
    degrees: int  # of freedom of the residuals of one component
    direction: Float[Tensor, "n p"] | None = None  # of every reading, where it is a number
    given: Float[Tensor, "n"] | None = None  # known noise variance of every reading

    @classmethod
    def of(
        cls,
        label: str,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n p"],
        clock: Float[Tensor, "n"],
        span: float,
    ) -> "Track":
        """The track in blocks of about `span` along the clock; of one reading each if it is 0."""
        (track,) = tracks_in_blocks([label], [len(x)], x, y, clock, span)
        return track

    def take(self, blocks: Int[Tensor, "m"]) -> "Track":
        """Some blocks, in increasing order, with the share of the scatter that falls to them."""
        place = torch.full((len(self.y),), -1, device=blocks.device)
        place[blocks] = torch.arange(len(blocks), device=blocks.device)
        block = place[self.block]
        rows = block >= 0
        parts = self.x[rows], self.clock[rows], block[rows], self.y[blocks]
        degrees = int((torch.bincount(block[rows]) - 2).clamp_min(0).sum())
        squares = self.squares * degrees / max(self.degrees, 1)
        direction, given = (
            None if values is None else values[rows] for values in (self.direction, self.given)
        )
        return Track(self.label, *parts, squares, degrees, direction, given)

    def followed_by(self, later: "Track", timed: bool) -> "Track":
        """The track and its later readings; a path length goes on from the last position.

        Raises:
            ValueError: the later readings are not later.
        """
        clock = later.clock
        if not timed:
            clock = clock - clock[0] + self.clock[-1] + (later.x[0] - self.x[-1]).norm()
        elif not clock[0] > self.clock[-1]:
            raise ValueError(
                f"expected readings of track {self.label!r} after time {self.clock[-1]:.6g}, where "
                f"those of the model end, got some from {clock[0]:.6g}; call fit or condition with "
                "all readings in order, or give the new ones another label"
            )
        return Track(
            self.label,
            torch.cat([self.x, later.x]),
            torch.cat([self.clock, clock]),
            torch.cat([self.block, later.block + len(self.y)]),
            torch.cat([self.y, later.y]),
            self.squares + later.squares,
            self.degrees + later.degrees,
            None if self.direction is None else torch.cat([self.direction, later.direction]),
            None if self.given is None else torch.cat([self.given, later.given]),
        )

    def to(self, device: torch.device) -> "Track":
        """The same track on another device."""
        parts = (self.x, self.clock, self.block, self.y, self.squares)
        direction, given = (
            None if values is None else values.to(device) for values in (self.direction, self.given)
        )
        parts = (part.to(device) for part in parts)
        return Track(self.label, *parts, self.degrees, direction, given)


def tracks_in_blocks(
    labels: Sequence[str],
    sizes: Sequence[int],
    x: Float[Tensor, "N d"],
    y: Float[Tensor, "N p"],
    clock: Float[Tensor, "N"],
    span: float,
    direction: Float[Tensor, "N p"] | None = None,
    given: Float[Tensor, "N"] | None = None,
) -> tuple[Track, ...]:
    """Tracks in blocks of about `span` along the clock; of one reading each if it is 0.

    Args:
        labels, sizes: of the tracks, whose readings follow each other in `x`, `y` and `clock`.
        direction: of each reading, where it is the component along one.
        given: the known noise variance of each reading.
    """
    of_track = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(x.device)
    block = _divided(clock, of_track, span)
    count = torch.bincount(block)
    track = torch.zeros_like(count).index_copy(0, block, of_track)
    starts = torch.searchsorted(track, torch.arange(len(sizes), device=x.device))
    means, many = block_means(y, block, len(count)), count > 2
    time = (clock - block_means(clock.unsqueeze(-1), block, len(count)).squeeze(-1)[block])[:, None]
    residual = y - means[block]
    square = block_means(time.square(), block, len(count))
    slope = block_means(time * residual, block, len(count)) / torch.where(square > 0, square, 1.0)
    squares = ((residual - time * slope[block]) * many[block, None]).square()
    squares = y.new_zeros(len(sizes), y.shape[-1]).index_add(0, of_track, squares)
    degrees = torch.zeros_like(starts).index_add(0, track, (count - 2).clamp_min(0)).tolist()
    blocks = torch.bincount(track, minlength=len(sizes)).tolist()
    parts = (
        labels,
        x.split(sizes),
        clock.split(sizes),
        (block - starts[of_track]).split(sizes),
        means.split(blocks),
        squares,
        degrees,
        *(
            [None] * len(sizes) if values is None else values.split(sizes)
            for values in (direction, given)
        ),
    )
    return tuple(Track(*every) for every in zip(*parts, strict=True))


def _divided(
    clock: Float[Tensor, "N"], of_track: Int[Tensor, "N"], span: float
) -> Int[Tensor, "N"]:
    """The block of each reading; a last one less than half as long as the one before belongs to
    that."""
    index = torch.arange(len(clock), device=clock.device)
    if not span > 0:
        return index
    first = torch.searchsorted(of_track, of_track)  # the first reading of the track
    part = torch.floor((clock - clock[first]) / span * (1 + 1e-12)).long()
    start = torch.ones_like(part, dtype=torch.bool)
    start[1:] = (part.diff() > 0) | (of_track.diff() > 0)
    rank = index - index[start][start.cumsum(0) - 1]
    start |= rank % _LARGEST == 0
    block = start.cumsum(0) - 1
    count, track = torch.bincount(block), of_track[start]
    last = torch.ones_like(track, dtype=torch.bool)
    last[:-1] = track.diff() > 0
    before = torch.zeros_like(count)
    before[1:] = count[:-1] * (track.diff() == 0)
    short = last & (2 * count < before)
    return block - short.cumsum(0)[block]


def block_span(
    y: Float[np.ndarray, "N p"], clock: Float[np.ndarray, "N"], of_track: Int[np.ndarray, "N"]
) -> float:
    """The time of a block: that of 500 blocks of all readings, or shorter. Pauses do not count: it
    is the median of the times that so many readings take.

    It is 0, for blocks of one reading, where there are at most 1000. Blocks have three readings at
    least, whose scatter about lines tells the white noise. The means ȳ of neighbouring blocks of n
    readings should differ little,

        ½ E(ȳ_{b+1} − ȳ_b)² ≤ 0.1 Var(y) + ½ E(y_{i+1} − y_i)² / n ,

    where the last term is that of white noise. Noise that is correlated over many blocks is learned
    from these better than from all readings: the increments of few seconds tell little of it.

    Args:
        y, clock: values and times, track by track.
        of_track: 0, 0, …, 1, …
    """
    steps = np.diff(clock)[np.diff(of_track) == 0]
    if len(y) <= _FEW or not len(steps):
        return 0.0
    variance = y.var(0).mean()
    white = _change(y, of_track, 1)
    size, most = 1, max(_SHORTEST, round(len(y) / _BLOCKS))
    while size < most:
        longer = min(most, size + max(1, size // 4))
        if _change(y, of_track, longer) > _SMOOTH * variance + white / longer:
            break
        size = longer
    if size < _SHORTEST:
        return 0.0
    lags = (clock[size:] - clock[:-size])[of_track[size:] == of_track[:-size]]
    return float(np.median(lags)) or size * float(steps.mean())


def _change(y: Float[np.ndarray, "N p"], of_track: Int[np.ndarray, "N"], size: int) -> float:
    """½ E(ȳ_{b+1} − ȳ_b)² of blocks of so many readings; infinite where no track has two."""
    first = np.searchsorted(of_track, of_track)
    starts = np.flatnonzero((np.arange(len(y)) - first) % size == 0)
    whole = np.diff(starts, append=len(y)) == size
    means, track = np.add.reduceat(y, starts)[whole] / size, of_track[starts][whole]
    difference = np.diff(means, axis=0)[np.diff(track) == 0]
    return 0.5 * np.square(difference).mean() if difference.size else math.inf
