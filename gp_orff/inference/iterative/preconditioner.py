"""P ≈ A: a dense block for the features of which the data tell most, the diagonal of A beyond."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.features.expansion import FeatureExpansion
from gp_orff.inference.equations.base import Group
from gp_orff.inference.equations.primal import masked_parts
from gp_orff.inference.quadratic import InvQuadLogdet, log_determinant, masked_sum


@dataclass(frozen=True)
class Preconditioner:
    """P = R Rᵀ, where R is a Cholesky factor for some features, and diagonal for the others.

    Vectors are rows.
    """

    columns: Int[Tensor, "2*k"]  # of the block's features: the cosines of k frequencies, the sines
    block: Int[Tensor, "m"]  # the features of the block
    factor: Float[Tensor, "m m"]  # of A at these features
    diagonal: Float[Tensor, "F"]  # of A, and 1 at the features of the block

    def solve(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """P⁻¹v."""
        return self.inverse_root_transposed(self.inverse_root(v))

    def root(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R v."""
        out = v * self._scale
        out[:, self.block] = v[:, self.block] @ self.factor.mT
        return out

    def inverse_root(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R⁻¹v."""
        return self._triangular(v, self.factor, upper=False)

    def inverse_root_transposed(self, v: Float[Tensor, "k F"]) -> Float[Tensor, "k F"]:
        """R⁻ᵀv."""
        return self._triangular(v, self.factor.mT, upper=True)

    @cached_property
    def rest(self) -> Float[Tensor, "F"]:
        """The diagonal of P⁻¹, and 0 at the features of the block."""
        return (1 / self.diagonal).index_fill(0, self.block, 0.0)

    @cached_property
    def _scale(self) -> Float[Tensor, "F"]:
        return self.diagonal.sqrt()

    def _triangular(self, v: Tensor, factor: Tensor, upper: bool) -> Float[Tensor, "k F"]:
        out = v / self._scale
        block = torch.linalg.solve_triangular(factor, v[:, self.block].mT, upper=upper)
        out[:, self.block] = block.mT
        return out


def precondition(
    expansion: FeatureExpansion,
    groups: Sequence[Group],
    rows: Sequence[Float[Tensor, "M F"]],
    size: int,
) -> tuple[Preconditioner, Float[Tensor, ""]]:
    """P with a dense block of at most `size` features, and log|P|, which is differentiable.

    The block has the frequencies at which the diagonal of A is largest: those where the signal
    exceeds the noise most.
    """
    diagonal = _diagonal(expansion, groups, rows)
    columns = _leading_columns(expansion, diagonal.detach(), size)
    inside = torch.zeros(expansion.num_columns, dtype=torch.bool, device=columns.device)
    inside[columns] = True
    chosen = inside[expansion.columns]
    block = chosen.nonzero().squeeze(-1)
    part = expansion.select(columns, torch.ones_like(diagonal[: len(columns)]))
    parts = [Group(group.on(part.phi), noise) for group, noise in groups]
    a = masked_sum(masked_parts(part, parts))
    for features in rows:
        a = a + features[:, block].mT @ features[:, block]
    factor = psd_safe_cholesky(a.detach())
    logdet = log_determinant(factor)
    if a.requires_grad:
        _, logdet = InvQuadLogdet.apply(a, a.new_zeros(len(a), 1))
    fixed = torch.where(chosen, 1.0, diagonal.detach())
    return (
        Preconditioner(columns, block, factor, fixed),
        logdet + diagonal[~chosen].log().sum(),
    )


def _diagonal(
    expansion: FeatureExpansion, groups: Sequence[Group], rows: Sequence[Float[Tensor, "M F"]]
) -> Float[Tensor, "F"]:
    """The diagonal of A."""
    total = 1.0
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        for moments, e in zip(statistics.moments, pattern.basis(precision), strict=True):
            squares = expansion.phi.gram_diagonal(moments.gram)[expansion.columns]
            total = total + squares * ((m @ (precision @ e)) * m).sum(-1)
    return total + sum(features.square().sum(0) for features in rows)


def _leading_columns(
    expansion: FeatureExpansion, diagonal: Float[Tensor, "F"], size: int
) -> Int[Tensor, "2*k"]:
    """The columns of the frequencies of largest diagonal that have at most `size` features."""
    phi = expansion.phi
    count = len(phi.indices)
    frequency = expansion.columns % count
    features = torch.bincount(frequency, minlength=count)
    largest = torch.zeros(count, dtype=diagonal.dtype, device=diagonal.device)
    largest = largest.scatter_reduce(0, frequency, diagonal, "amax")
    order = largest.argsort(descending=True, stable=True)
    return torch.cat(phi.columns_of(order[features[order].cumsum(0) <= size]))
