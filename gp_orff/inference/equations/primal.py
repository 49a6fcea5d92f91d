"""The primal algebra, for any expansion and any groups of observations."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, combinations

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.features.expansion import FeatureExpansion
from gp_orff.inference.equations.base import Group, NormalEquations, evidence_of, noise_terms
from gp_orff.inference.equations.dense import mean_and_response, solve_with
from gp_orff.inference.equations.track_rows import Rows
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    MaskedInvQuadLogdet,
    masked_sum,
)
from gp_orff.inference.weight_posterior import PrimalPosterior


@dataclass(frozen=True)
class Primal(NormalEquations):
    """The primal algebra: A = I + Σ C[c,c] ∘ (M P Mᵀ) + Σ ΦᵀN⁻¹Φ, the last sum over dense rows."""

    expansion: FeatureExpansion
    groups: Sequence[Group]
    rows: Sequence[Rows] = ()

    @cached_property
    def _whitened(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [rows.whitened() for rows in self.rows]

    def evidence(self) -> Evidence:
        if self.rows or are_coupled(self.expansion.layers, self.groups):
            return self._evidence(*InvQuadLogdet.apply(*self._a_and_b()))
        b, parts = masked_equations(self.expansion, self.groups)
        return self._evidence(*MaskedInvQuadLogdet.apply(b, *parts))

    def posterior(self, mean):
        a, b = self._a_and_b()
        factor = psd_safe_cholesky(a)
        solved, evidence = solve_with(factor, b, mean, self._evidence)
        return PrimalPosterior(self.expansion, *mean_and_response(solved), factor), evidence

    def _a_and_b(self) -> tuple[Float[Tensor, "*b F F"], Float[Tensor, "*b F 1+p"]]:
        if self.groups:
            b = right_hand_sides(self.expansion, self.groups)
            a = information(self.expansion, self.groups)
        else:
            a, b = torch.eye(self.expansion.num_features).to(self._whitened[0][0]), 0
        for features, design, _ in self._whitened:
            a, b = a + features.mT @ features, b + features.mT @ design
        return a, b

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        row_terms = [
            (design.mT @ design, noise_logdet) for _, design, noise_logdet in self._whitened
        ]
        return evidence_of([*map(noise_terms, self.groups), *row_terms], explained, logdet)


def masked_equations(
    expansion: FeatureExpansion, groups: Sequence[Group]
) -> tuple[Float[Tensor, "*b F 1+p"], list[Tensor]]:
    """B, and C[c,c], M, P of every term of A = I + Σ C[c,c] ∘ (M P Mᵀ), of layers that are not
    coupled."""
    parts = (masked_parts(layer, groups) for layer in expansion.layers)
    return right_hand_sides(expansion, groups), [*chain.from_iterable(parts)]


def right_hand_sides(
    expansion: FeatureExpansion, groups: Sequence[Group]
) -> Float[Tensor, "*b F 1+p"]:
    """B."""
    return sum(_right_hand_side(layer, groups) for layer in expansion.layers)


def _right_hand_side(
    expansion: FeatureExpansion, groups: Sequence[Group]
) -> Float[Tensor, "*b F 1+p"]:
    """B of real directions."""
    b, ones = 0, 0
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        b = b + (expansion.gather(statistics.cross @ precision) * m).sum(-1, keepdim=True)
        for moments, e in zip(statistics.moments, pattern.basis(precision), strict=True):
            sums = expansion.gather(moments.column_sum.unsqueeze(-1))
            ones = ones + sums * pattern.embed(m @ (precision @ e))
    return torch.cat([b, ones.expand(*b.shape[:-1], -1)], dim=-1)


def masked_parts(expansion: FeatureExpansion, groups: Sequence[Group]) -> list[Tensor]:
    """C[c,c], M, P of every term of A = I + Σ C[c,c] ∘ (M P Mᵀ)."""
    parts = []
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        grams = statistics.feature_grams(expansion)
        for gram, e in zip(grams, pattern.basis(precision), strict=True):
            parts += [gram, m, precision @ e]
    return parts


def information(expansion: FeatureExpansion, groups: Sequence[Group]) -> Float[Tensor, "*b F F"]:
    """A = I + Σ C[c,c] ∘ (M P Mᵀ); for complex directions the sum over all pairs of layers."""
    layers = expansion.layers
    a = masked_sum([*chain.from_iterable(masked_parts(layer, groups) for layer in layers)])
    if are_coupled(layers, groups):
        for left, right in combinations(layers, 2):
            cross = _cross_information(left, right, groups)
            a = a + cross + cross.mT
    return a


@torch.no_grad()
def are_coupled(layers: Sequence[FeatureExpansion], groups: Sequence[Group]) -> bool:
    """Whether M P M′ᵀ is not zero between layers: the waves of a harmonic field have their
    horizontal components in one layer, and the vertical one in the other."""
    for left, right in combinations(layers, 2):
        for statistics, noise in groups:
            pattern = statistics.pattern
            used = [
                pattern.select(part.directions).abs().flatten(0, -2).amax(0)
                for part in (left, right)
            ]
            precision = pattern.precision(noise.precision)
            for e in pattern.basis(precision):
                if (used[0] @ (precision @ e).abs() * used[1]).any():
                    return True
    return False


def _cross_information(
    left: FeatureExpansion, right: FeatureExpansion, groups: Sequence[Group]
) -> Float[Tensor, "*b F F"]:
    """Σ C[c,c′] ∘ (M P M′ᵀ) of two layers of the same features."""
    total = 0
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, other = (pattern.select(layer.directions) for layer in (left, right))
        precision = pattern.precision(noise.precision)
        grams = statistics.feature_grams(left, right)
        for gram, e in zip(grams, pattern.basis(precision), strict=True):
            total = total + gram * (m @ (precision @ e) @ other.mT)
    return total
