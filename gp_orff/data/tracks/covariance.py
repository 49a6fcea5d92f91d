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
    def _steps(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """For every rank, the blocks that have a reading of it, and its time since the one before;
        blocks are sorted by their size, so that they are the first k."""
        order = self.count.argsort(descending=True)
        sizes = self.count[order].long()
        steps = []
        for rank in range(1, int(sizes[0])):
            rows = self._start[order[sizes > rank]] + rank
            steps.append((order[: len(rows)], self.clock[rows] - self.clock[rows - 1]))
        return steps

    def mean_from_first(self, time: Float[Tensor, ""]) -> Float[Tensor, "T"]:
        """a."""
        return self._mean(torch.exp((self.first[self.block] - self.clock) / time))

    def mean_to_last(self, time: Float[Tensor, ""]) -> Float[Tensor, "T"]:
        """c."""
        return self._mean(torch.exp((self.clock - self.last[self.block]) / time))

    def variance(self, time: Float[Tensor, ""]) -> Float[Tensor, "T"]:
        """Var[r̄]/σ_r² = mean_ij exp(−|t_i − t_j|/τ), by a recursion over the readings."""
        order = self.count.argsort(descending=True)
        before = time.new_zeros(len(self.count))  # Σ_{j<i} exp(−(t_i − t_j)/τ), in `order`
        total = torch.zeros_like(before)
        for blocks, step in self._steps:
            before = torch.exp(-step / time) * (before[: len(blocks)] + 1)
            total = total + torch.nn.functional.pad(before, (0, len(order) - len(blocks)))
        total = torch.zeros_like(total).index_copy(0, order, total)
        return (self.count + 2 * total) / self.count.square()

    def _mean(self, values: Float[Tensor, "N"]) -> Float[Tensor, "T"]:
        return values.new_zeros(len(self.count)).index_add(0, self.block, values) / self.count


@dataclass(frozen=True)
class BlockNoise:
    """The noise of T block means at given parameters, in any component."""

    times: BlockTimes
    noise: TrackNoise
    white: Float[Tensor, ""]  # further variance of every block mean

    @classmethod
    def of(
        cls, times: BlockTimes, noise: TrackNoise, white: Float[Tensor, ""] | float = 0.0
    ) -> "BlockNoise":
        """The noise in float64; the features lack the variance `white`."""
        noise = TrackNoise(*(value.double() for value in noise))
        return cls(times, noise, torch.as_tensor(white).to(noise.noise))

    @cached_property
    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        time = self.noise.correlation_time
        times = self.times
        variance = self.noise.correlated_variance * times.variance(time)
        variance = variance + self.noise.noise / times.count
        variance = variance + self.noise.block_variance + self.white
        return times.mean_to_last(time), times.mean_from_first(time), variance

    def of_track(self, blocks: slice) -> Float[Tensor, "t t"]:
        """The covariance of the blocks of one track."""
        c, a, variance = (part[blocks] for part in self._parts)
        gap = (self.times.first[blocks] - self.times.last[blocks].unsqueeze(-1)).triu(1)
        later = torch.exp(-gap / self.noise.correlation_time)
        later = (c.unsqueeze(-1) * later * a).triu(1)
        matrix = self.noise.correlated_variance * (later + later.mT)
        return matrix + torch.diag(variance) + self.noise.offset_variance
