"""Observations along tracks: blocks, their means as observations, and their correlated noise."""

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.autograd import Function

from gp_orff.data.noise import Noises, TrackNoise
from gp_orff.data.observations import LinearObservations, Observations, TruncatedVariance
from gp_orff.data.patterns import Components, GroupKey, LineOfSight, Pattern
from gp_orff.data.statistics import Moments, Statistics, Weights, added
from gp_orff.data.validation import are_missing, as_matrix, is_single, without_tensor
from gp_orff.features import chunked
from gp_orff.features.columns import Columns
from gp_orff.features.lattice import LatticeColumns
from gp_orff.kernels.base import map_tensors, plain_tensor

# The covariance of block means under noise along tracks.
#
# With the times t_i of the n observations of a block, from t₁ to t_n, and the time τ,
#
#     c = mean_i exp(−(t_n − t_i)/τ) , a = mean_i exp(−(t_i − t₁)/τ) ,
#     Cov[r̄_b, r̄_b′] = σ_r² c_b exp(−(t₁′ − t_n)/τ) a_b′ for b before b′ ,
#
# exactly, because exp(−(t − s)/τ) is a product. White noise adds σ²/n to the variance of a block,
# and the common error of a block adds σ_e². The offset adds σ_b² to all covariances.
#
# The recursion over the observations runs for all blocks of all tracks at once: step i processes
# the i-th observation of each block that has one. Blocks are sorted by their size, with the largest
# first, so that these blocks are a prefix. All exponents are differences of successive times. They
# are never positive, so that nothing overflows for long tracks.


@dataclass(frozen=True)
class BlockTimes:
    """The times of the observations of T blocks, track by track."""

    clock: Float[Tensor, "N"]
    block: Int[Tensor, "N"]  # increasing

    @cached_property
    def count(self) -> Float[Tensor, "T"]:
        """The number n of observations in each block."""
        return torch.bincount(self.block).to(self.clock)

    @cached_property
    def _start(self) -> Int[Tensor, "T"]:
        return (self.count.cumsum(0) - self.count).long()

    @cached_property
    def first(self) -> Float[Tensor, "T"]:
        """The first time t₁ of each block."""
        return self.clock[self._start]

    @cached_property
    def last(self) -> Float[Tensor, "T"]:
        """The last time t_n of each block."""
        return self.clock[self._start + self.count.long() - 1]

    @cached_property
    def _order(self) -> Int[Tensor, "T"]:
        """The indices of the blocks, the largest block first."""
        return self.count.argsort(descending=True)

    @cached_property
    def _steps(self) -> list[Float[Tensor, "k"]]:
        """Time steps between consecutive observations of a block, from which `averages` computes
        sums.

        Element i − 1 of the list contains the steps from observation i to observation i + 1, for
        the k blocks with more than i observations. These are the first k blocks in `_order`.
        """
        sizes = self.count[self._order].long()
        steps = []
        for rank in range(1, int(sizes[0])):
            rows = self._start[self._order[sizes > rank]] + rank
            steps.append(self.clock[rows] - self.clock[rows - 1])
        return steps

    def averages(self, time: Float[Tensor, ""]) -> tuple[Tensor, Tensor, Tensor]:
        """Return averages over each block of correlations with the correlation time τ = `time`.

        The correlation of the observations i and j is exp(−|t_i − t_j|/τ). The function returns
        three tensors (T,). The first one, c, is the mean correlation with the last observation of
        the block. The second one, a, is the mean correlation with the first observation. The third
        one is the mean over all pairs of observations, Var[r̄]/σ_r². They are computed by
        recursions over the observations.
        """
        one = time.new_ones(len(self.count))
        # `since` and `before` refer to the present observation. `first` and `pairs` are sums over
        # the observations.
        since, before = one, one  # exp(−(t_i − t₁)/τ), and Σ_{j≤i} exp(−(t_i − t_j)/τ)
        first, pairs, ended = one, one, []
        for step in self._steps:
            more = len(step)
            if more < len(since):
                ended.append((before[more:], first[more:], pairs[more:]))
            decay = torch.exp(-step / time)
            since, before = decay * since[:more], decay * before[:more]
            first, pairs = first[:more] + since, pairs[:more] + 1 + 2 * before
            before = before + 1
        ended.append((before, first, pairs))
        parts = (torch.cat(part[::-1]) for part in zip(*ended, strict=True))
        last, first, pairs = (torch.zeros_like(p).index_copy(0, self._order, p) for p in parts)
        return last / self.count, first / self.count, pairs / self.count.square()


@dataclass(frozen=True)
class BlockNoise:
    """The noise of T block means for given parameters, in any component."""

    times: BlockTimes
    noise: TrackNoise
    white: Float[Tensor, ""]  # additional white variance of each block mean
    given: Float[Tensor, "T"]  # the mean known noise variance of the observations of each block

    @classmethod
    def of(
        cls,
        times: BlockTimes,
        noise: TrackNoise,
        white: Float[Tensor, ""] | float = 0.0,
        given: Float[Tensor, "T"] | float = 0.0,
    ) -> "BlockNoise":
        """The noise in float64. `white` is the variance that the features omit, and `given` is the
        mean known noise variance of the observations of each block."""
        noise = TrackNoise(*(value.double() for value in noise))
        white, given = (torch.as_tensor(value).to(noise.noise) for value in (white, given))
        return cls(times, noise, white, given.expand(len(times.count)))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        last, first, correlated = self.times.averages(self.noise.correlation_time)
        variance = self.noise.correlated_variance * correlated
        variance = variance + (self.noise.noise + self.given) / self.times.count
        return last, first, variance + self.noise.block_variance + self.white

    def of_track(self, blocks: slice) -> Float[Tensor, "t t"]:
        """The covariance of the blocks of one track."""
        rows = torch.arange(len(self.times.count), device=self.times.clock.device)[blocks]
        return self.of_tracks(rows.unsqueeze(0)).squeeze(0)

    def of_tracks(self, rows: Int[Tensor, "b t"]) -> Float[Tensor, "b t t"]:
        """Return the covariances of the block means of several tracks.

        Each row of `rows` contains the indices of the blocks of one track, padded by −1. In the
        covariance, the padding has rows and columns of a unit matrix.
        """
        c, a, variance = (part[rows] for part in self._parts)
        present = rows >= 0
        both = present.unsqueeze(-1) & present.unsqueeze(-2)
        # Only entries above the diagonal are gaps between an earlier and a later block. The others
        # are set to zero before the exponential, because negative gaps would overflow, also in the
        # gradient.
        gap = self.times.first[rows].unsqueeze(-2) - self.times.last[rows].unsqueeze(-1)
        later = torch.exp(-torch.where(both, gap, 0.0).triu(1) / self.noise.correlation_time)
        later = (c.unsqueeze(-1) * later * a.unsqueeze(-2)).triu(1)
        matrix = self.noise.correlated_variance * (later + later.mT)
        matrix = matrix + torch.diag_embed(variance) + self.noise.offset_variance
        return torch.where(both, matrix, torch.diag_embed((~present).to(matrix)))


# Zᵀ R⁻¹ Z and log|R| of tracks, whose blocks have the noise covariance R.
#
# With W = R⁻¹Z and the derivative S of G = Zᵀ R⁻¹ Z, made symmetric,
#
#     ∂/∂R = −W S Wᵀ + g R⁻¹ ,    ∂/∂Z = 2 W S ,
#
# where g is the derivative of log|R|. R is a batch of small matrices, and Z has their rows. Except
# for the factorisations, all operations are products of large matrices.
#
# On fixed frequencies, Z = [φ̄, ȳ, 1] does not depend on hyperparameters, but R does. The sums over
# tracks are therefore computed in each evaluation of the evidence, from block means.


_WIDER = 1.3  # largest ratio of the numbers of blocks of tracks in one batch
_ROWS = 2**13  # approximate number of rows of a batch


def batches_of(sizes: Sequence[int], most: int = _ROWS) -> list[Int[Tensor, "b t"]]:
    """Return the indices of the blocks of all tracks, in batches of tracks with similar lengths.

    A batch is a matrix with one row for each track. Rows of shorter tracks are padded by −1. The
    function can also divide the observations of blocks into batches.

    Args:
        sizes: the number of blocks of each track. The blocks of tracks follow each other.
        most: the largest number of entries of a batch, unless a single track has more.
    """
    counts = torch.tensor(sizes)
    starts = counts.cumsum(0) - counts
    # Batches are classes of the logarithm of the number of blocks, so padding costs at most 30 %.
    batch = (counts.double().log() / math.log(_WIDER)).floor()
    batches = []
    for number in batch.unique():
        tracks = torch.nonzero(batch == number).squeeze(-1)
        longest = int(counts[tracks].max())
        for some in tracks.split(max(1, most // longest)):
            rank = torch.arange(longest)
            inside = rank < counts[some, None]
            batches.append(torch.where(inside, starts[some, None] + rank, -1))
    return batches


class WhitenedGram(Function):
    """G = Σ_b Z_bᵀ R_b⁻¹ Z_b and Σ_b log|R_b|; arguments: R (b, t, t) and Z (b, t, k)."""

    @staticmethod
    def forward(ctx, r: Float[Tensor, "b t t"], z: Float[Tensor, "b t k"]):
        factor = torch.linalg.cholesky(r)
        half = torch.linalg.solve_triangular(factor, z, upper=False)
        ctx.save_for_backward(r, z, factor, half)
        rows = half.flatten(0, 1)
        logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum()
        return rows.mT @ rows, logdet

    @staticmethod
    def backward(ctx, grad_gram, grad_logdet):
        r, z, factor, half = ctx.saved_tensors
        if torch.is_grad_enabled():  # with the graph of R and Z
            factor = torch.linalg.cholesky(r)
            half = torch.linalg.solve_triangular(factor, z, upper=False)
        w = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        symmetric = 0.5 * (grad_gram + grad_gram.mT)
        products = (w.flatten(0, 1) @ symmetric).unflatten(0, w.shape[:2])
        grad_r = grad_logdet * torch.cholesky_inverse(factor) - products @ w.mT
        return grad_r, 2 * products


# Columns φ averaged over blocks of observations, φ̄_b = mean_i φ(x_i).
#
# For general columns, φ(x) is computed in chunks and summed. On a lattice, exp(i⟨k, θ⟩) is a
# product over the axes of powers of d complex numbers, so the mean over a block is a product of two
# matrices:
#
# 1. `batches_of` collects blocks with about the same number n of observations, padded by weights of
#    zero.
# 2. `_powers` computes exp(ikθ_j) for each axis by repeated multiplication, without sines.
# 3. `_mean_waves` multiplies the powers of all axes except the last. It contracts the product with
#    the weighted powers of the last axis over the n observations. This sum is the mean.
# 4. The columns of the lattice are selected by index. A frequency with k_d < 0 is the conjugate.


_NUMBERS = 2**19  # numbers for the observations of some blocks and their waves, in memory at once


def block_means(
    values: Float[Tensor, "N k"], block: Int[Tensor, "N"], count: int
) -> Float[Tensor, "T k"]:
    """The means of values over blocks."""
    sums = values.new_zeros(count, values.shape[-1]).index_add(0, block, values)
    return sums / torch.bincount(block, minlength=count).to(values).unsqueeze(-1)


@singledispatch
def averaged(
    phi: Columns, x: Float[Tensor, "N d"], block: Int[Tensor, "N"], count: int
) -> Float[Tensor, "T M"]:
    """φ̄ for `count` blocks of observations at x. `block` is the index of the block of each
    observation, in increasing order."""
    return _means(phi, lambda rows: phi.values(x[rows]), x, phi.num_columns, block, count)


def _means(
    phi: Columns,
    values: Callable[[slice], Float[Tensor, "n k"]],
    x: Float[Tensor, "N d"],
    width: int,
    block: Int[Tensor, "N"],
    count: int,
) -> Float[Tensor, "T k"]:
    """Return the mean of row values over each of `count` blocks.

    The function `values` returns the values of a slice of rows, and `width` is their number of
    columns. Rows are computed in chunks, unless the columns have a gradient.
    """
    if any(tensor.requires_grad for tensor in phi.tensors):
        return block_means(values(slice(None)), block, count)
    total = x.new_zeros(count, width, dtype=torch.float64)
    for rows in chunked.chunks(x, width):
        total.index_add_(0, block[rows], values(rows))
    return total / torch.bincount(block, minlength=count).unsqueeze(-1)


@averaged.register
def _(
    phi: LatticeColumns, x: Float[Tensor, "N d"], block: Int[Tensor, "N"], count: int
) -> Float[Tensor, "T M"]:
    """Waves of a lattice are products over the axes: block means are products of matrices."""
    phases = ((x.double() - phi.origin) * phi.spacing).mT.contiguous()
    out = phases.new_empty(count, phi.num_columns)
    flipped = phi.indices[:, -1] < 0  # waves with k_d < 0 are conjugates of those with k_d > 0
    indices = torch.where(flipped.unsqueeze(-1), -phi.indices, phi.indices)
    offset = torch.tensor([*phi.modes[:-1], 0], device=x.device)
    sizes = [*(2 * m + 1 for m in phi.modes[:-1]), phi.modes[-1] + 1]
    strides = torch.tensor([prod(sizes[i + 1 :]) for i in range(len(sizes))], device=x.device)
    place = ((indices + offset) * strides).sum(-1)
    sign = 1.0 - 2.0 * flipped.to(phases)
    most = _NUMBERS // (sum(sizes) + prod(sizes[:-1]))
    for batch in batches_of(torch.bincount(block, minlength=count).tolist(), most):
        rows = batch.to(block.device)
        inside = (rows >= 0).double()
        weights = inside / inside.sum(-1, keepdim=True)
        waves = _mean_waves(phases[:, rows.clamp_min(0)], weights, phi.modes)
        cosines, sines = (
            part.contiguous().index_select(1, place) for part in (waves.real, waves.imag)
        )
        out[block[rows[:, 0]]] = torch.cat([cosines, sines.mul_(sign)], dim=-1)
    return out


def _mean_waves(
    phases: Float[Tensor, "d b n"], weights: Float[Tensor, "b n"], modes: tuple[int, ...]
) -> Complex[Tensor, "b q"]:
    """Σ_n w_n exp(i⟨k, θ_n⟩) for all |k_i| ≤ m_i, with 0 ≤ k_d in the last place."""
    product = torch.ones_like(weights).unsqueeze(0)
    for phase, most in zip(phases[:-1], modes[:-1], strict=True):
        half = _powers(phase, most, torch.ones_like(weights))
        powers = torch.cat([half[1:].flip(0).conj(), half])
        product = (product.unsqueeze(1) * powers).flatten(0, 1)
    last = _powers(phases[-1], modes[-1], weights)
    return (product.transpose(0, 1).to(last) @ last.permute(1, 2, 0)).flatten(1)


def _powers(
    phase: Float[Tensor, "b n"], most: int, weights: Float[Tensor, "b n"]
) -> Complex[Tensor, "m b n"]:
    """w exp(ikθ) for k = 0, …, `most`, each computed from the previous one."""
    wave = torch.polar(torch.ones_like(phase), phase)
    powers = wave.new_empty(most + 1, *wave.shape)
    powers[0] = weights
    for k in range(most):
        torch.mul(powers[k], wave, out=powers[k + 1])
    return powers


# Blocks of consecutive observations of tracks, and their length.
#
# A track may have 10⁵ observations with correlated noise, whose covariance cannot be factorised.
# Means over short blocks contain almost all information on the field and on slow noise. The scatter
# within blocks, about a line in time, contains the information on white noise. `block_span` chooses
# the length. There are 500 blocks in total. Blocks are shorter if the means of neighbours would
# differ by more than a tenth of the variance, in addition to white noise.


_FEW = 1000  # observations up to which each one is a separate block
_BLOCKS = 500  # number of blocks of more observations
_SHORTEST = 3  # fewest observations of a block: two are always on a line, without scatter
_SMOOTH = 0.1  # largest difference between the means of neighbouring blocks, over the variance
_LARGEST = 256  # most observations of a block


@dataclass(frozen=True)
class Track:
    """The observations of one track, divided into blocks.

    For each block, the class stores the mean ȳ. A straight line in time is fitted to each block,
    and the residuals about these lines determine the white noise.
    """

    label: str
    x: Float[Tensor, "n d"]
    clock: Float[Tensor, "n"]  # time or path length
    block: Int[Tensor, "n"]  # 0, 0, …, 1, …
    y: Float[Tensor, "t p"]  # the mean of each block
    squares: Float[Tensor, "p"]  # the sum of squares of all residuals about the lines
    degrees: int  # the degrees of freedom of the residuals of one component
    direction: Float[Tensor, "n p"] | None = None  # for observations along directions
    given: Float[Tensor, "n"] | None = None  # the known noise variance of each observation

    def take(self, blocks: Int[Tensor, "m"]) -> "Track":
        """Return this track with only some blocks, in increasing order.

        The sum of squared residuals is reduced in proportion to the degrees of freedom.
        """
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
        """The track with later observations appended. A path length continues from the last
        position.

        Raises:
            ValueError: The times of the appended observations are not later.
        """
        clock = later.clock
        if not timed:
            clock = clock - clock[0] + self.clock[-1] + (later.x[0] - self.x[-1]).norm()
        elif not clock[0] > self.clock[-1]:
            raise ValueError(
                f"expected observations of track {self.label!r} after time {self.clock[-1]:.6g}, "
                f"the last one in the model, got some from {clock[0]:.6g}; call fit or "
                "condition with all observations in order, or give the new ones another label"
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
        """This track on another device."""
        return map_tensors(self, lambda tensor: tensor.to(device))


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
    """Tracks in blocks of about `span` along the clock. If `span` is 0, each block has one
    observation.

    Args:
        labels: the labels of the tracks.
        sizes: the number of observations of each track.
        x, y, clock: positions, values and times of the observations, track after track.
        span: the duration of a block.
        direction: the directions of the observations, if they are components along directions.
        given: the known noise variance of each observation.
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
    # Times are centred within blocks, so slope and mean are independent least-squares estimates.
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
    """The block of each observation. If the last block of a track is less than half as long as the
    one before, both are merged."""
    index = torch.arange(len(clock), device=clock.device)
    if not span > 0:
        return index
    first = torch.searchsorted(of_track, of_track)  # the first observation of the track
    # The factor prevents that a time falls below a multiple of the span by rounding.
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
    # Merge with the block before if it belongs to the same track.
    before[1:] = count[:-1] * (track.diff() == 0)
    short = last & (2 * count < before)
    return block - short.cumsum(0)[block]


def block_span(
    y: Float[np.ndarray, "N p"], clock: Float[np.ndarray, "N"], of_track: Int[np.ndarray, "N"]
) -> float:
    """The duration of a block.

    For at most 1000 observations it is 0, and each block has one observation. Otherwise there are
    about 500 blocks, or more shorter ones. Blocks have at least three observations, whose scatter
    about lines determines the white noise. The duration is a median, so that pauses have no effect.
    The means ȳ of neighbouring blocks of n observations should differ little,

        ½ E(ȳ_{b+1} − ȳ_b)² ≤ 0.1 Var(y) + ½ E(y_{i+1} − y_i)² / n ,

    where the last term comes from white noise. Noise that is correlated over many blocks is learned
    better from block means than from all observations, because increments over a few seconds have
    little information on it.

    Args:
        y: the values, track by track.
        clock: the times, track by track.
        of_track: the index of the track of each observation: 0, 0, …, 1, …
    """
    steps = np.diff(clock)[np.diff(of_track) == 0]
    if len(y) <= _FEW or not len(steps):
        return 0.0
    variance = y.var(0).mean()
    white = _change(y, of_track, 1)
    size, most = 1, max(_SHORTEST, round(len(y) / _BLOCKS))
    while size < most:
        # Sizes increase by a quarter, up to the first one that fails.
        longer = min(most, size + max(1, size // 4))
        if _change(y, of_track, longer) > _SMOOTH * variance + white / longer:
            break
        size = longer
    if size < _SHORTEST:
        return 0.0
    lags = (clock[size:] - clock[:-size])[of_track[size:] == of_track[:-size]]
    return float(np.median(lags)) or size * float(steps.mean())


def _change(y: Float[np.ndarray, "N p"], of_track: Int[np.ndarray, "N"], size: int) -> float:
    """½ E(ȳ_{b+1} − ȳ_b)² for blocks of `size` observations. Infinite if no track has two
    blocks."""
    first = np.searchsorted(of_track, of_track)
    starts = np.flatnonzero((np.arange(len(y)) - first) % size == 0)
    whole = np.diff(starts, append=len(y)) == size
    means, track = np.add.reduceat(y, starts)[whole] / size, of_track[starts][whole]
    difference = np.diff(means, axis=0)[np.diff(track) == 0]
    return 0.5 * np.square(difference).mean() if difference.size else math.inf


# Patterns of block means of observations along tracks.


@dataclass(frozen=True)
class BlockMeans(Components):
    """A pattern for block means of complete vectors along a track."""


@dataclass(frozen=True)
class LineMeans(LineOfSight):
    """A pattern for block means of components along directions, where each observation of a track
    has a separate direction."""


MeansOfBlocks = BlockMeans | LineMeans


def means_of(pattern: Pattern) -> MeansOfBlocks:
    """Return the pattern of block means, given the pattern of the observations."""
    if pattern.along:
        return LineMeans(pattern.num_outputs)
    return BlockMeans(pattern.columns, pattern.num_outputs)


# Block means of observations along tracks: linear observations of a field with correlated noise.
#
# From labels and times to the evidence:
#
# 1. `observations_along` sorts the observations by track. Each observation is a separate block,
#    with its time or its path length as the clock.
# 2. `in_blocks` averages consecutive observations over a `span`. Means of observations along
#    directions are useful only if the directions change little within a block.
# 3. Under features, `averages` returns the means of the columns. `statistics` whitens them track by
#    track, and returns sums like those of observations at points with unit noise. The normal
#    equations therefore need no code for tracks.
# 4. Under the exact kernel, `rows` averages covariances over the positions of a block, or over two
#    positions with the same mean and the same variance along the block (`condensed`).
# 5. `scatter_terms` are the terms of the evidence from the scatter within blocks.


_STRETCH = 16  # consecutive blocks in a part of a sample
_TURN = 0.1  # largest deviation of a unit vector from the mean direction of its block
_FEW_NUMBERS = 8192  # values along directions that an exact kernel uses one by one
_MOST_NODES = 1000  # values at observations up to which the exact kernel averages over all


class Places(NamedTuple):
    """Positions with their blocks, and with directions if observations have them."""

    x: Float[Tensor, "n d"]
    block: Int[Tensor, "n"]
    direction: Float[Tensor, "n p"] | None


@dataclass(frozen=True)
class TrackObservations(LinearObservations):
    """Means over blocks of observations along the tracks of one group.

    The mean of block b is ȳ_b = mean_i f(x_i) + ε̄_b, over the observations i of the block. For
    components along directions u_i, f(x_i) is replaced by u_iᵀ f(x_i).
    """

    key: GroupKey
    tracks: tuple[Track, ...]
    timed: bool  # whether the clock is time; otherwise it is the length of the path
    span: float  # the duration of a block, along the clock
    nodes: Places | None = None  # positions that replace those of the observations
    on_tracks = True

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
        """The known noise variances of all observations; None if all noise is learned."""
        return self._of_all("given")

    def _of_all(self, name: str) -> Tensor | None:
        """The concatenated attribute of all tracks; None if they do not have it."""
        values = [getattr(track, name) for track in self.tracks]
        return None if values[0] is None else torch.cat(values)

    @property
    def values(self) -> Float[Tensor, "M"]:
        return self.y.flatten()

    @property
    def one_by_one(self) -> bool:
        """Whether each observation is a separate block."""
        return len(self.x) == len(self.y)

    @property
    def num_averaged(self) -> int:
        """The number of vector components that an exact kernel averages.

        It is 0, except for observations along directions in blocks of several observations.
        """
        if self.direction is None or self.one_by_one:
            return 0
        return len(self.condensed.points) * self.key.pattern.num_outputs

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The blocks of each track."""
        counts = [len(track.y) for track in self.tracks]
        pairs = zip(counts, accumulate(counts), strict=True)
        return tuple(slice(end - count, end) for count, end in pairs)

    @cached_property
    def times(self) -> BlockTimes:
        """The times of the observations of each block."""
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

    def in_blocks(self, span: float | None = None) -> "TrackObservations":
        """Average these single observations over blocks of about `span` along the clock.

        The clock is the time or the length of the path. By default, `block_span` chooses the span.
        In this case, observations along directions are not averaged if there are at most 8192, or
        if the directions within a block differ much.
        """
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
        """Whether some direction differs by more than 0.1 from the mean direction of its block, so
        that block means lose information."""
        if self.direction is None:
            return False
        away = self.direction - self.means.direction[self.times.block]
        return bool(away.norm(dim=-1).amax() > _TURN)

    def take(self, rows: Int[Tensor, "m"]) -> "TrackObservations":
        """Return these observations with only some blocks, in increasing order."""
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
        """Return these observations, followed by later observations of the same group."""
        if self.timed != new.timed:
            raise ValueError(
                "expected times for all tracks of a group or for none, got both; give time= for "
                "all, or put tracks without times into a separate group (group=)"
            )
        if (self.given is None) != (new.given is None):
            raise ValueError(
                "expected noise= for all tracks of a group or for none, got both; give noise= for "
                "all, or put tracks without noise into a separate group (group=)"
            )
        tracks = {track.label: track for track in self.tracks}
        for track in new.tracks:
            before = tracks.get(track.label)
            tracks[track.label] = track if before is None else before.followed_by(track, self.timed)
        return replace(self, tracks=tuple(tracks.values()), span=self.span or new.span)

    def sample(self, number: int) -> "TrackObservations":
        """Return a sample of about `number` blocks, in sequences of consecutive blocks from all
        tracks."""
        stretches = [
            piece
            for blocks in self.blocks
            for piece in torch.arange(blocks.start, blocks.stop).split(_STRETCH)
        ]
        share = number / len(self.y)
        # An even selection: a sequence is selected when the running share passes an integer.
        rows = [p for i, p in enumerate(stretches) if int(share * (i + 1)) > int(share * i)]
        return self.take(torch.cat(rows or stretches[:1]).to(self.y.device))

    def plain(self) -> dict[str, object]:
        """Return tensors and plain values for files."""
        tracks = [vars(map_tensors(track, plain_tensor)) for track in self.tracks]
        return {**self.key.plain(), "tracks": tracks, "timed": self.timed, "span": self.span}

    @classmethod
    def from_plain(cls, content: Mapping) -> "TrackObservations":
        """Return the block means of a group from the content that `plain` returned."""
        key = GroupKey.from_plain(content)
        key = GroupKey(key.label, means_of(key.pattern))
        tracks = tuple(Track(**track) for track in content["tracks"])
        return cls(key, tracks, content["timed"], content["span"])

    def check_repeated(self) -> None:
        """Raise a ValueError if each track has only one observation."""
        if all(len(track.x) == 1 for track in self.tracks):
            raise ValueError(
                f"expected tracks with several observations, got {len(self.tracks)} with one "
                "observation each, which do not determine noise along tracks; give the "
                "observations of one track the same label, or omit track="
            )

    def to(self, device: torch.device) -> "TrackObservations":
        """These observations on another device."""
        return replace(self, tracks=tuple(track.to(device) for track in self.tracks))

    @cached_property
    def condensed(self) -> "TrackObservations":
        """Return these observations with only two positions for each block, for an exact kernel.

        A block is a group of consecutive observations whose mean is used. An exact kernel averages
        covariances over the positions of a block, which is expensive if there are many. The two
        positions are the mean position ± one standard deviation along the direction of largest
        extent. Data with at most 1000 vector components, or with at most two observations per block
        on average, are returned unchanged.
        """
        count, width = len(self.y), self.key.pattern.num_outputs
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
        """The noise of the block means. `white` is the variance that the features omit."""
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
        """Yield the noise covariances of block means in one component, in batches of tracks.

        Each element contains the indices of the blocks (b, t), padded by −1, and the covariances
        (b, t, t). `truncated` is the variance that the features omit.
        """
        largest = 0.0 if truncated is None else truncated.diagonal().amax()
        noise = self.noise(noises, largest)
        return ((rows, noise.of_tracks(rows)) for rows in self._batches)

    def scatter_terms(self, noises: Noises) -> tuple[Float[Tensor, "p"], Float[Tensor, ""]]:
        """Return the terms of the log evidence that come from residuals within blocks.

        The residuals are taken about a straight line in each block. The first result is their
        contribution to yᵀK⁻¹y for each component (p,), the second is their contribution to log|K|,
        plus a constant.

        White noise contributes the variance σ², and known noise contributes its mean variance on
        the track. For a block of length u τ, the correlated noise r contributes a variance of about
        σ_r² 2u / (15 + 2u).
        """
        noise = TrackNoise(*(value.double() for value in self._parameters(noises)))
        # This u is twice that of the docstring. The formula is 2u/15 for short blocks and tends to
        # the whole variance for long ones.
        u = 2 * self.span / noise.correlation_time
        squares, degrees, given = self._about_lines
        variance = noise.noise + noise.correlated_variance * u / (15 + u) + given
        numbers = degrees * squares.shape[-1]
        terms = numbers * (variance.log() + math.log(2 * math.pi))
        return (squares / variance.unsqueeze(-1)).sum(0), terms.sum()

    @cached_property
    def _about_lines(self) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The sums of squared residuals about lines (k, p), their degrees of freedom (k,), and the
        mean known noise variance (k,).

        If some noise is known, they are given for each of k tracks. Otherwise, k = 1, and they are
        sums over all tracks.
        """
        squares = torch.stack([track.squares for track in self.tracks])
        degrees = squares.new_tensor([track.degrees for track in self.tracks])
        if self.given is None:
            return squares.sum(0, keepdim=True), degrees.sum(0, keepdim=True), degrees.new_zeros(1)
        return squares, degrees, torch.stack([track.given.mean() for track in self.tracks])

    @cached_property
    def _batches(self) -> list[Int[Tensor, "b t"]]:
        batches = batches_of([len(track.y) for track in self.tracks])
        return [rows.to(self.x.device) for rows in batches]

    def averages_along(self, phi: Columns) -> Float[Tensor, "k p*T"]:
        """Return mean_i φ(x_i) u_i over the observations of each block, for components along
        directions u."""
        x, direction = self.x, self.direction

        def products(rows: slice) -> Float[Tensor, "n p*M"]:
            return (direction[rows].unsqueeze(-1) * phi.values(x[rows]).unsqueeze(1)).flatten(1)

        width = direction.shape[-1] * phi.num_columns
        means = _means(phi, products, x, width, self.times.block, len(self.y))
        return means.unflatten(1, (-1, phi.num_columns)).permute(2, 1, 0).flatten(1)

    def averages(self, phi: Columns) -> list[Float[Tensor, "b t k"]]:
        """Return [φ̄, ȳ, 1] of the blocks of each track, in batches of tracks padded by zeros."""
        columns = averaged(phi, self.x, self.times.block, len(self.y))
        columns = torch.cat([columns, self.y, torch.ones_like(self.y[:, :1])], dim=-1)
        return [columns[rows] * (rows >= 0).unsqueeze(-1) for rows in self._batches]

    def statistics(
        self,
        phi: Columns,
        averages: Sequence[Float[Tensor, "b t k"]],
        noises: Noises,
        truncated: Float[Tensor, "p p"] | None,
    ) -> Statistics:
        """Return the statistics of the block means, whitened by their noise covariance.

        They are sums over tracks, such as Σ φ̄ᵀR⁻¹φ̄ and Σ φ̄ᵀR⁻¹ȳ. R is the noise covariance of
        the blocks of one track, in one component. The result has the form of statistics of
        observations with unit noise.
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
        # The noise is part of the sums, so its log-determinant must be part of the statistics:
        # `noise_terms` computes −v Σ log w for unit noise, which is v log|R| + scatter with this
        # value.
        weights = Weights(count, count, count, -logdet - scatter / width)
        moments = (Moments(c, s.squeeze(-1), mass.squeeze()),)
        second = second + torch.diag(squares)
        return Statistics(phi, self.key.pattern, moments, z, second, total.squeeze(-1), weights)

    def _parameters(self, noises: Noises) -> TrackNoise:
        tracks = getattr(noises, "tracks", {})
        if self.key.label not in tracks:
            raise ValueError(
                f"expected a TrackLikelihood for the tracks of group {self.key.label!r}, got "
                f"{'other noise' if self.key.label in noises else 'none'}; call fit with track="
            )
        return tracks[self.key.label]


def split(
    parts: Iterator[Observations | TrackObservations], tracks: list[TrackObservations]
) -> Iterator[Observations]:
    """The observations at single points. Observations along tracks are appended to the list."""
    for part in parts:
        if part.on_tracks:
            tracks.append(part)
        else:
            yield part


# Times along tracks, as numbers or as dates, in float64.


_EPOCH, _SECOND = np.datetime64(0, "s"), np.timedelta64(1, "s")


def as_times(time: object, count: int) -> Float[np.ndarray, "N"]:
    """Times (N,) as floats. Numbers do not change, dates become seconds since 1970, and durations
    become seconds.

    Raises:
        TypeError: Values are neither numbers nor dates nor durations.
        ValueError: The length is another one, or values are not finite.

    Example:
        >>> import numpy
        >>> from gp_orff.data.tracks import as_times
        >>> as_times(
        ...     numpy.array(
        ...         ["1970-01-01", "1970-01-02T00:00:00.5"], "datetime64[ms]"
        ...     ),
        ...     2,
        ... )
        array([    0. , 86400.5])
    """
    seconds = _seconds(np.asarray(without_tensor(time)))
    if seconds is not None:
        time = np.where(np.ma.getmask(time), np.nan, seconds)
    try:
        values = as_matrix(time, "times (N,)").detach().cpu().numpy()
    except TypeError as error:
        raise TypeError(
            f"expected times as numbers, dates or durations, got {type(time).__name__}; convert "
            f"them, as pandas.to_datetime or numpy.asarray(time, float) do ({error})"
        ) from error
    if values.shape != (count, 1):
        shape = values.shape[:1] if values.shape[-1] == 1 else values.shape
        raise ValueError(
            f"expected times of shape {(count,)}, got {shape}; give one time for each observation"
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"expected finite times, got {int((~np.isfinite(values)).sum())} NaN or "
            "infinite ones; drop these observations"
        )
    return values[:, 0]


def check_increasing(
    clock: Float[np.ndarray, "N"], of_track: Int[np.ndarray, "N"], names: list[str]
) -> None:
    """Raise a ValueError unless times increase along each track. `of_track` is the index of the
    track of each observation: 0, 0, …, 1, …"""
    steps, same = np.diff(clock), np.diff(of_track) == 0
    wrong = np.flatnonzero(same & (steps <= 0))
    if len(wrong):
        track = of_track[wrong[0]]
        of_this = steps[wrong[of_track[wrong] == track]]
        raise ValueError(
            f"expected times that increase along every track, got {(of_this == 0).sum()} that "
            f"repeat and {(of_this < 0).sum()} that run backwards on track {names[track]!r}, the "
            f"first after {clock[wrong[0]] + 0.0:.10g}; sort the observations by time, drop "
            "copies, give times in float64, or give each pass a separate label"
        )


def _seconds(values: np.ndarray) -> Float[np.ndarray, "N"] | None:
    """Dates or durations in seconds; None for anything else. Times without a zone are UTC."""
    if values.dtype.kind == "O" and values.ndim == 1 and len(values):
        if all(isinstance(value, datetime.datetime) for value in values):
            utc = [value.astimezone(datetime.UTC) if value.tzinfo else value for value in values]
            values = np.array([value.replace(tzinfo=None) for value in utc], "datetime64[us]")
        elif all(isinstance(value, datetime.timedelta) for value in values):
            values = values.astype("timedelta64[us]")
    if values.dtype.kind == "M":
        return (values - _EPOCH) / _SECOND
    return values / _SECOND if values.dtype.kind == "m" else None


# From track labels and times to block means, and those of several chunks together.


def observations_along(
    part: Observations, track: object, time: object, count: int
) -> TrackObservations:
    """Observations along tracks, each in a separate block: complete vectors, or components along
    directions.

    Args:
        part: observations of one group, with their rows `index` among the rows of the user.
        track: a label for each row, or one for all.
        time: times (N,), which increase along each track; None for the length of the path.
        count: the number N of rows.

    Raises:
        TypeError: Times are neither real numbers nor dates.
        ValueError: Labels or times have another length, labels are missing, times repeat or run
            backwards, vectors have NaN, or observations have weights.

    Example:
        >>> import torch
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.tracks import observations_along
        >>> x, y = torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)
        >>> (part,) = read(x, y, 2, Options())
        >>> means = observations_along(part, ["a", "b", "a", "b"], None, 4)
        >>> [track.label for track in means.tracks], means.times.clock.tolist()[:2]
        (['a', 'b'], [0.0, 5.656854249492381])
    """
    if not (part.weight is None or part.key.known):
        raise ValueError(
            "expected one white noise for all observations of tracks, got variances=, which are "
            "relative; omit them, or give the known variance of each observation as noise="
        )
    if not (part.pattern.complete or part.direction is not None):
        raise ValueError(
            f"expected complete vectors along tracks, got {len(part)} observations with components "
            "that are NaN; drop these observations, or give them as a separate chunk without "
            "track, in another group"
        )
    names, which = labels_of_tracks(track, count)
    rows = part.index.cpu().numpy()
    # A stable sort preserves the order of the observations of a track, which must be the order of
    # time.
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
    """The different labels as text, and the index of the label of each row.

    Raises:
        ValueError: The labels have another length, or labels are missing.
    """
    if is_single(track):
        track = np.full(count, str(track))
    labels = np.asarray(without_tensor(track))
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
    """The length of the path of each track up to each position."""
    steps = np.linalg.norm(np.diff(x, axis=0), axis=-1) * (np.diff(of_track) == 0)
    length = np.concatenate([[0.0], np.cumsum(steps)])
    return length - length[np.searchsorted(of_track, of_track)]


def joined(parts: Iterable[TrackObservations]) -> tuple[TrackObservations, ...]:
    """One piece for each group. Later observations of a track are appended to it.

    Raises:
        ValueError: A group has times and path lengths, or times run backwards.
    """
    groups: dict[GroupKey, TrackObservations] = {}
    for part in parts:
        groups = added(groups, {part.key: part})
    return tuple(groups.values())


def blocks_in_words(tracks: Sequence[TrackObservations]) -> str:
    """A note on observations along tracks that are averaged over blocks; empty without any."""
    observed, means = (sum(map(len, own)) for own in ([t.x for t in tracks], [t.y for t in tracks]))
    if observed == means:
        return ""
    along = sum(len(own.tracks) for own in tracks)
    track = f"track{'s' * (along > 1)}"
    return f"{observed} observations along {along} {track}, as {means} means of blocks"
