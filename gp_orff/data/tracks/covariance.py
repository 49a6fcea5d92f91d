"""The covariance of block means under noise along tracks.

With the times t_i of the n readings of a block, from t₁ to t_n, and the time τ,

    c = mean_i exp(−(t_n − t_i)/τ) , a = mean_i exp(−(t_i − t₁)/τ) ,
    Cov[r̄_b, r̄_b′] = σ_r² c_b exp(−(t₁′ − t_n)/τ) a_b′ for b before b′ ,

exactly, since exp(−(t − s)/τ) is a product. White noise adds σ²/n, what the readings of one block
share σ_e², and the offset σ_b² everywhere.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.along_tracks import TrackNoise


@dataclass(frozen=True)
class BlockTimes:
    """The times of the readings of T blocks, track by track."""

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
        """For every rank, the time since the reading before in the k blocks that have one; these
        are the first in `_order`."""
        sizes = self.count[self._order].long()
        steps = []
        for rank in range(1, int(sizes[0])):
            rows = self._start[self._order[sizes > rank]] + rank
            steps.append(self.clock[rows] - self.clock[rows - 1])
        return steps

    def averages(self, time: Float[Tensor, ""]) -> tuple[Tensor, Tensor, Tensor]:
        """c, a, and Var[r̄]/σ_r² = mean_ij exp(−|t_i − t_j|/τ), by recursions over the readings."""
        one = time.new_ones(len(self.count))
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
    given: Float[Tensor, "T"]  # the mean of the known noise variances of the readings of each

    @classmethod
    def of(
        cls,
        times: BlockTimes,
        noise: TrackNoise,
        white: Float[Tensor, ""] | float = 0.0,
        given: Float[Tensor, "T"] | float = 0.0,
    ) -> "BlockNoise":
        """The noise in float64; the features lack the variance `white`, and `given` is the mean of
        the known noise variances of the readings of each block."""
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
        """The covariances of blocks of tracks, and rows of a unit matrix in the place of −1."""
        c, a, variance = (part[rows] for part in self._parts)
        present = rows >= 0
        both = present.unsqueeze(-1) & present.unsqueeze(-2)
        gap = self.times.first[rows].unsqueeze(-2) - self.times.last[rows].unsqueeze(-1)
        later = torch.exp(-torch.where(both, gap, 0.0).triu(1) / self.noise.correlation_time)
        later = (c.unsqueeze(-1) * later * a.unsqueeze(-2)).triu(1)
        matrix = self.noise.correlated_variance * (later + later.mT)
        matrix = matrix + torch.diag_embed(variance) + self.noise.offset_variance
        return torch.where(both, matrix, torch.diag_embed((~present).to(matrix)))
