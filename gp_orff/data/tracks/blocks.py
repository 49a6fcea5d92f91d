"""Blocks of consecutive readings of a track, and how long they should be."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

_FEW = 1000  # readings, up to which each is a block of its own
_BLOCKS = 500  # of more readings
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
        block = _divided(clock, span)
        count = torch.bincount(block).to(y)

        def mean(values: Float[Tensor, "n k"]) -> Float[Tensor, "t k"]:
            sums = values.new_zeros(len(count), values.shape[-1]).index_add(0, block, values)
            return sums / count.unsqueeze(-1)

        means, many = mean(y), count > 2
        time = clock.unsqueeze(-1) - mean(clock.unsqueeze(-1))[block]
        residual = y - means[block]
        square = mean(time.square())
        slope = mean(time * residual) / torch.where(square > 0, square, 1.0)
        residual = (residual - time * slope[block])[many[block]]
        degrees = int((count[many] - 2).sum().item())
        return cls(label, x, clock, block, means, residual.square().sum(0), degrees)

    def take(self, blocks: Int[Tensor, "m"]) -> "Track":
        """Some blocks, in increasing order, without the scatter."""
        place = torch.full((len(self.y),), -1, device=blocks.device)
        place[blocks] = torch.arange(len(blocks), device=blocks.device)
        block = place[self.block]
        rows = block >= 0
        parts = self.x[rows], self.clock[rows], block[rows], self.y[blocks]
        return Track(self.label, *parts, torch.zeros_like(self.squares), 0)

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
        )

    def to(self, device: torch.device) -> "Track":
        """The same track on another device."""
        parts = (self.x, self.clock, self.block, self.y, self.squares)
        return Track(self.label, *(part.to(device) for part in parts), self.degrees)


def _divided(clock: Float[Tensor, "n"], span: float) -> Int[Tensor, "n"]:
    """The block of each reading; a last block that is short belongs to the one before."""
    if not span > 0:
        return torch.arange(len(clock), device=clock.device)
    time = clock.cpu().numpy()
    part = np.floor((time - time[0]) / span * (1 + 1e-12)).astype(np.int64)
    starts = np.flatnonzero(np.r_[True, np.diff(part) > 0])
    rank = np.arange(len(part)) - np.repeat(starts, np.diff(np.r_[starts, len(part)]))
    new = np.r_[True, (np.diff(part) > 0) | (rank[1:] % _LARGEST == 0)]
    block = np.cumsum(new) - 1
    counts = np.bincount(block)
    if len(counts) > 1 and 2 * counts[-1] < np.median(counts):
        block[block == len(counts) - 1] -= 1
    return torch.from_numpy(block).to(clock.device)


def block_span(
    tracks: Sequence[tuple[Float[np.ndarray, "n p"], Float[np.ndarray, "n"]]],
) -> float:
    """The time of a block: that of 500 blocks of all readings, or shorter.

    It is 0, for blocks of one reading, where there are at most 1000. The means ȳ of neighbouring
    blocks of n readings should differ little,

        ½ E(ȳ_{b+1} − ȳ_b)² ≤ 0.1 Var(y) + ½ E(y_{i+1} − y_i)² / n ,

    where the last term is that of white noise. Noise that is correlated over many blocks is learned
    from these better than from all readings: the increments of few seconds tell little of it.

    Args:
        tracks: values (n, p) and clock (n,) of every track.
    """
    total = sum(len(y) for y, _ in tracks)
    steps = [np.diff(clock) for _, clock in tracks if len(clock) > 1]
    if total <= _FEW or not steps:
        return 0.0
    step = float(np.concatenate(steps).mean())
    variance = np.concatenate([y for y, _ in tracks]).var(0).mean()
    white = _change(tracks, 1)
    size, most = 1, max(1, round(total / _BLOCKS))
    while size < most:
        longer = min(most, size + max(1, size // 4))
        if _change(tracks, longer) > _SMOOTH * variance + white / longer:
            break
        size = longer
    return size * step if size > 1 else 0.0


def _change(tracks: Sequence[tuple[np.ndarray, np.ndarray]], size: int) -> float:
    """½ E(ȳ_{b+1} − ȳ_b)² of blocks of so many readings."""
    squares, count = 0.0, 0
    for y, _ in tracks:
        blocks = len(y) // size
        means = y[: blocks * size].reshape(blocks, size, -1).mean(1)
        difference = np.diff(means, axis=0)
        squares, count = squares + np.square(difference).sum(), count + difference.size
    return 0.5 * squares / max(count, 1)
