"""The noise of groups of readings, and of few readings written out."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Readings
from gp_orff.data.patterns import GroupKey


@dataclass(frozen=True)
class Rows:
    """Few readings, number by number: M of them at N points."""

    readings: list[Readings]

    @cached_property
    def x(self) -> Float[Tensor, "N d"]:
        return torch.cat([own.x for own in self.readings])

    def see(self, values: Float[Tensor, "N*p k"]) -> Float[Tensor, "M k"]:
        """H of the vectors at the points."""
        vectors = values.unflatten(0, (len(self.x), -1))
        if len(self.readings) == 1 and self.readings[0].pattern.complete:
            return values
        parts = vectors.split([len(own) for own in self.readings])
        seen = [
            own.pattern.rows(part, own.direction).flatten(0, 1)
            for own, part in zip(self.readings, parts, strict=True)
        ]
        return torch.cat(seen)

    def columns(self, num_outputs: int) -> Float[Tensor, "M 1+p"]:
        """V = [y, H(1⊗I_p)]."""
        y = torch.cat([own.y.flatten() for own in self.readings])
        ones = torch.eye(num_outputs, dtype=y.dtype, device=y.device).repeat(len(self.x), 1)
        return torch.cat([y.unsqueeze(-1), self.see(ones)], dim=-1)

    def noise(self, noises: Noises, white: Tensor | None = None) -> Float[Tensor, "M M"]:
        """Of all numbers, with a white variance that has no weights."""
        blocks = [
            _block_diagonal(GroupNoise(group_noise(own.key, noises), white).of(own))
            for own in self.readings
        ]
        return blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)


def _block_diagonal(blocks: Float[Tensor, "n v v"]) -> Float[Tensor, "n*v n*v"]:
    matrix = torch.diag_embed(blocks.permute(1, 2, 0))  # (v, v, n, n)
    return matrix.permute(2, 0, 3, 1).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True)
class GroupNoise:
    """Of the readings of a group: Σ/w_n + H_n δ H_nᵀ."""

    weighted: Float[Tensor, "v v"]  # Σ, of a reading of weight one
    white: Float[Tensor, "p p"] | None = None  # δ, whatever the weight

    def of(self, part: Readings) -> Float[Tensor, "n v v"]:
        """For every reading."""
        own = self.weighted.expand(len(part), -1, -1)
        own = own if part.weight is None else own / part.weight[:, None, None]
        if self.white is None:
            return own
        return own + part.see_covariance(self.white.expand(len(part), -1, -1))


def group_noise(
    key: GroupKey,
    noises: Noises,
    white: Float[Tensor, "p p"] | None = None,
    masses: Float[Tensor, "k"] | None = None,
    count: float = 1,
) -> Float[Tensor, "v v"]:
    """The noise covariance of a reading of weight one, with its share of a white variance: as if
    that had weights too, the mean of those being one."""
    if key.label not in noises:
        known = sorted(noises)
        raise ValueError(f"expected readings of a known group, one of {known}, got {key.label!r}")
    covariance = key.pattern.noise(noises[key.label])
    return covariance if white is None else covariance + key.pattern.white(white, masses, count)
