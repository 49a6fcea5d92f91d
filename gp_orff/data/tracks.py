"""Blocks of observations along tracks, the averages over them, and their noise covariance."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from math import prod

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.autograd import Function

from gp_orff.data.noise import TrackNoise
from gp_orff.data.patterns import Components, LineOfSight, Pattern
from gp_orff.features import chunked
from gp_orff.features.columns import Columns
from gp_orff.features.lattice import LatticeColumns

# The covariance of block means under noise along tracks.
#
# With the times t_i of the n observations of a block, from t₁ to t_n, and the time τ,
#
#     c = mean_i exp(−(t_n − t_i)/τ) , a = mean_i exp(−(t_i − t₁)/τ) ,
#     Cov[r̄_b, r̄_b′] = σ_r² c_b exp(−(t₁′ − t_n)/τ) a_b′ for b before b′ ,
#
# exactly, since exp(−(t − s)/τ) is a product. White noise adds σ²/n, what the observations of one
# block share σ_e², and the offset σ_b² everywhere.
#
# The recursion over the observations runs for all blocks of all tracks at once: step i handles the
# i-th observation of every block that has one. Blocks are sorted by their size, the largest first,
# so that these are a prefix; those that end are put aside. All exponents are differences of
# successive times, hence never positive, and nothing overflows however long a track is.


@dataclass(frozen=True)
class BlockTimes:
    """The times of the observations of T blocks, track by track."""

    clock: Float[Tensor, "N"]
    block: Int[Tensor, "N"]  # increasing

    @cached_property
    def count(self) -> Float[Tensor, "T"]:
        """n."""
        return torch.bincount(self.block).to(self.clock)

    @cached_property
    def _start(self) -> Int[Tensor, "T"]:
        return (self.count.cumsum(0) - self.count).long()

    @cached_property
    def first(self) -> Float[Tensor, "T"]:
        """t₁."""
        return self.clock[self._start]

    @cached_property
    def last(self) -> Float[Tensor, "T"]:
        """t_n."""
        return self.clock[self._start + self.count.long() - 1]

    @cached_property
    def _order(self) -> Int[Tensor, "T"]:
        """The blocks by their size, the largest first."""
        return self.count.argsort(descending=True)

    @cached_property
    def _steps(self) -> list[Float[Tensor, "k"]]:
        """For every rank, the time since the observation before in the k blocks that have one;
        these are the first in `_order`."""
        sizes = self.count[self._order].long()
        steps = []
        for rank in range(1, int(sizes[0])):
            rows = self._start[self._order[sizes > rank]] + rank
            steps.append(self.clock[rows] - self.clock[rows - 1])
        return steps

    def averages(self, time: Float[Tensor, ""]) -> tuple[Tensor, Tensor, Tensor]:
        """c, a, and Var[r̄]/σ_r² = mean_ij exp(−|t_i − t_j|/τ), by recursions over the
        observations."""
        one = time.new_ones(len(self.count))
        # `since` and `before` refer to the present observation; `first` and `pairs` add up over the
        # observations.
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
    """The noise of T block means at given parameters, in any component."""

    times: BlockTimes
    noise: TrackNoise
    white: Float[Tensor, ""]  # further variance of every block mean
    given: Float[Tensor, "T"]  # the mean of the known noise variances of the observations of each

    @classmethod
    def of(
        cls,
        times: BlockTimes,
        noise: TrackNoise,
        white: Float[Tensor, ""] | float = 0.0,
        given: Float[Tensor, "T"] | float = 0.0,
    ) -> "BlockNoise":
        """The noise in float64; the features lack the variance `white`, and `given` is the mean of
        the known noise variances of the observations of each block."""
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
        """The covariances of blocks of tracks, and rows of a unit matrix instead of −1."""
        c, a, variance = (part[rows] for part in self._parts)
        present = rows >= 0
        both = present.unsqueeze(-1) & present.unsqueeze(-2)
        # Only the part above the diagonal is a gap between an earlier and a later block; the rest
        # is set to zero before the exponential, where negative gaps would overflow, also in the
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
# where g is the derivative of log|R|. R is a batch of small matrices, and Z that of their rows: all
# but the factorisations are products of large matrices.
#
# Z = [φ̄, ȳ, 1] does not depend on hyperparameters on fixed frequencies; R does. The sums over
# tracks are thus computed in every evaluation of the evidence, at the cost of block means instead
# of observations.


_WIDER = 1.3  # the most blocks of a track over the fewest, in one batch
_ROWS = 2**13  # of a batch, about


def batches_of(sizes: Sequence[int]) -> list[Int[Tensor, "b t"]]:
    """The blocks of tracks in batches of similar numbers of blocks: −1 instead of those that
    shorter tracks do not have.

    Args:
        sizes: the number of blocks of every track; their blocks follow each other.
    """
    counts = torch.tensor(sizes)
    starts = counts.cumsum(0) - counts
    # Classes of the logarithm of the number of blocks: within one, padding costs at most 30 %.
    batch = (counts.double().log() / math.log(_WIDER)).floor()
    batches = []
    for number in batch.unique():
        tracks = torch.nonzero(batch == number).squeeze(-1)
        longest = int(counts[tracks].max())
        for some in tracks.split(max(1, _ROWS // longest)):
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
# For general columns φ(x) is computed in chunks and added up. On a lattice exp(i⟨k, θ⟩) is a
# product over the axes of powers of d complex numbers, so the mean over a block is a product of two
# matrices:
#
# 1. `_batches` collects blocks of about the same number n of observations, padded by weights of
#    zero.
# 2. `_powers` computes exp(ikθ_j) of every axis by repeated multiplication, without sines.
# 3. `_mean_waves` multiplies the powers of all axes but the last, and contracts the product with
#    the weighted powers of the last axis over the n observations: this sum is the mean.
# 4. The columns of the lattice are read off by index; a frequency with k_d < 0 is the conjugate.


_NUMBERS = 2**19  # of the observations of some blocks and their waves, at once


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
    """φ̄ of `count` blocks of observations at x; `block`, that of each, increases."""
    return _means(phi, lambda rows: phi.values(x[rows]), x, phi.num_columns, block, count)


def averaged_along(
    phi: Columns,
    x: Float[Tensor, "N d"],
    direction: Float[Tensor, "N p"],
    block: Int[Tensor, "N"],
    count: int,
) -> Float[Tensor, "M p*T"]:
    """mean_i φ(x_i) u_i of `count` blocks of observations at x along directions u."""

    def products(rows: slice) -> Float[Tensor, "n p*M"]:
        return (direction[rows].unsqueeze(-1) * phi.values(x[rows]).unsqueeze(1)).flatten(1)

    width = direction.shape[-1] * phi.num_columns
    means = _means(phi, products, x, width, block, count)
    return means.unflatten(1, (-1, phi.num_columns)).permute(2, 1, 0).flatten(1)


def _means(
    phi: Columns,
    values: Callable[[slice], Float[Tensor, "n k"]],
    x: Float[Tensor, "N d"],
    width: int,
    block: Int[Tensor, "N"],
    count: int,
) -> Float[Tensor, "T k"]:
    """The means of `count` blocks, of what rows have; in chunks, unless columns have a gradient."""
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
    """Waves of a lattice are products over the axes: a block's mean is a product of matrices."""
    phases = ((x.double() - phi.origin) * phi.spacing).mT.contiguous()
    out = phases.new_empty(count, phi.num_columns)
    flipped = phi.indices[:, -1] < 0  # waves are those of k_d ≥ 0: the others are their conjugates
    indices = torch.where(flipped.unsqueeze(-1), -phi.indices, phi.indices)
    offset = torch.tensor([*phi.modes[:-1], 0], device=x.device)
    sizes = [*(2 * m + 1 for m in phi.modes[:-1]), phi.modes[-1] + 1]
    strides = torch.tensor([prod(sizes[i + 1 :]) for i in range(len(sizes))], device=x.device)
    place = ((indices + offset) * strides).sum(-1)
    sign = 1.0 - 2.0 * flipped.to(phases)
    for blocks, rows, inside in _batches(block, count, sum(sizes) + prod(sizes[:-1])):
        waves = _mean_waves(phases[:, rows], inside, phi.modes)
        cosines, sines = (
            part.contiguous().index_select(1, place) for part in (waves.real, waves.imag)
        )
        out[blocks] = torch.cat([cosines, sines.mul_(sign)], dim=-1)
    return out


def _batches(
    block: Int[Tensor, "N"], count: int, width: int
) -> Iterator[tuple[Int[Tensor, "b"], Int[Tensor, "b n"], Float[Tensor, "b n"]]]:
    """Blocks of about the same size, the rows of their observations, and 1/n, or 0 instead of
    observations that they do not have."""
    size = torch.bincount(block, minlength=count)
    start, order, done = size.cumsum(0) - size, size.argsort(descending=True), 0
    while done < count:
        many = max(1, _NUMBERS // (width * size[order[done]].item()))
        blocks = order[done : done + many]
        rank = torch.arange(size[blocks[0]].item(), device=block.device)
        present = rank < size[blocks, None]
        yield (
            blocks,
            torch.where(present, start[blocks, None] + rank, start[blocks, None]),
            present / size[blocks, None].double(),
        )
        done += len(blocks)


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
    """w exp(ikθ) for k = 0, …, `most`, each from the one before."""
    wave = torch.polar(torch.ones_like(phase), phase)
    powers = wave.new_empty(most + 1, *wave.shape)
    powers[0] = weights
    for k in range(most):
        torch.mul(powers[k], wave, out=powers[k + 1])
    return powers


# Blocks of consecutive observations of tracks, and how long they should be.
#
# A track may have 10⁵ observations with correlated noise, whose covariance cannot be factorised.
# Means over short blocks contain almost all that the observations say of the field and of slow
# noise; the scatter within blocks, about a line in time, contains what they say of white noise.
# `block_span` chooses the length: 500 blocks in all, or shorter blocks if the means of neighbours
# would differ by more than a tenth of the variance beyond what white noise explains.


_FEW = 1000  # observations, up to which each is a block of its own
_BLOCKS = 500  # of more observations
_SHORTEST = 3  # observations of a block: two are on a line, whose scatter has no white noise
_SMOOTH = 0.1  # of the variance: what the means of neighbouring blocks may differ by
_LARGEST = 256  # observations of a block


@dataclass(frozen=True)
class Track:
    """The observations of one track in blocks: block means ȳ, and the scatter about lines in
    time."""

    label: str
    x: Float[Tensor, "n d"]
    clock: Float[Tensor, "n"]  # time or path length
    block: Int[Tensor, "n"]  # 0, 0, …, 1, …
    y: Float[Tensor, "t p"]  # the mean of every block
    squares: Float[Tensor, "p"]  # the sum of squares of all residuals about the lines
    degrees: int  # of freedom of the residuals of one component
    direction: Float[Tensor, "n p"] | None = None  # of every observation, where it is a number
    given: Float[Tensor, "n"] | None = None  # known noise variance of every observation

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
        """The track and its later observations; a path length goes on from the last position.

        Raises:
            ValueError: the later observations are not later.
        """
        clock = later.clock
        if not timed:
            clock = clock - clock[0] + self.clock[-1] + (later.x[0] - self.x[-1]).norm()
        elif not clock[0] > self.clock[-1]:
            raise ValueError(
                f"expected observations of track {self.label!r} after time {self.clock[-1]:.6g}, "
                f"where those of the model end, got some from {clock[0]:.6g}; call fit or "
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
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})


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
    """Tracks in blocks of about `span` along the clock; of one observation each if it is 0.

    Args:
        labels, sizes: of the tracks, whose observations follow each other in `x`, `y` and `clock`.
        direction: of each observation, where it is the component along one.
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
    """The block of each observation; a last one less than half as long as the one before belongs to
    that."""
    index = torch.arange(len(clock), device=clock.device)
    if not span > 0:
        return index
    first = torch.searchsorted(of_track, of_track)  # the first observation of the track
    # The factor keeps a time that is a multiple of the span up to rounding from falling below it.
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
    # The block before, if it is of the same track; a track of one short block keeps it.
    before[1:] = count[:-1] * (track.diff() == 0)
    short = last & (2 * count < before)
    return block - short.cumsum(0)[block]


def block_span(
    y: Float[np.ndarray, "N p"], clock: Float[np.ndarray, "N"], of_track: Int[np.ndarray, "N"]
) -> float:
    """The time of a block: that of 500 blocks of all observations, or shorter. Pauses do not count:
    it is the median of the times that so many observations take.

    It is 0, for blocks of one observation, where there are at most 1000. Blocks have three
    observations at least, whose scatter about lines determines the white noise. The means ȳ of
    neighbouring blocks of n observations should differ little,

        ½ E(ȳ_{b+1} − ȳ_b)² ≤ 0.1 Var(y) + ½ E(y_{i+1} − y_i)² / n ,

    where the last term is that of white noise. Noise that is correlated over many blocks is learned
    from these better than from all observations: the increments of few seconds have little
    information on it.

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
        # Sizes grow by a quarter, up to the first one that fails.
        longer = min(most, size + max(1, size // 4))
        if _change(y, of_track, longer) > _SMOOTH * variance + white / longer:
            break
        size = longer
    if size < _SHORTEST:
        return 0.0
    lags = (clock[size:] - clock[:-size])[of_track[size:] == of_track[:-size]]
    return float(np.median(lags)) or size * float(steps.mean())


def _change(y: Float[np.ndarray, "N p"], of_track: Int[np.ndarray, "N"], size: int) -> float:
    """½ E(ȳ_{b+1} − ȳ_b)² of blocks of so many observations; infinite where no track has two."""
    first = np.searchsorted(of_track, of_track)
    starts = np.flatnonzero((np.arange(len(y)) - first) % size == 0)
    whole = np.diff(starts, append=len(y)) == size
    means, track = np.add.reduceat(y, starts)[whole] / size, of_track[starts][whole]
    difference = np.diff(means, axis=0)[np.diff(track) == 0]
    return 0.5 * np.square(difference).mean() if difference.size else math.inf


# Patterns of block means of observations along tracks.


@dataclass(frozen=True)
class BlockMeans(Components):
    """All components of a mean over a block of observations of one track."""


@dataclass(frozen=True)
class LineMeans(LineOfSight):
    """The mean over a block of observations of one track, each along a direction of its own."""


MeansOfBlocks = BlockMeans | LineMeans


def means_of(pattern: Pattern) -> MeansOfBlocks:
    """The pattern of block means of observations with this pattern."""
    if pattern.along:
        return LineMeans(pattern.num_outputs)
    return BlockMeans(pattern.columns, pattern.num_outputs)
