"""Which algebra serves an expansion and observations."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noise, Noises, is_regular
from gp_orff.data.observations import Observations, PointObservations
from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import (
    Expansion,
    KroneckerExpansion,
)
from gp_orff.features.scaled_expansion import ScaledExpansion
from gp_orff.inference.equations.base import Group, NormalEquations
from gp_orff.inference.equations.dense import DenseRows, Dual, dual_of_vectors
from gp_orff.inference.equations.primal import Primal
from gp_orff.inference.equations.scaled import Scaled, is_diagonal
from gp_orff.inference.equations.separable import Kronecker, KroneckerDual
from gp_orff.inference.equations.track_rows import Rows


def prefers_dual(expansion: Expansion, num_points: float, whole: bool = True) -> bool:
    """Whether factorising K + I⊗Σ (N·p square) is cheaper than factorising A.

    `whole` tells whether the observations are whole vectors with one noise: those of a separable
    kernel have p blocks of size N.
    """
    if whole and has_blocks(expansion):
        return num_points**3 * expansion.num_outputs < expansion.cholesky_cost
    return (num_points * expansion.num_outputs) ** 3 < expansion.cholesky_cost


def has_blocks(expansion: Expansion) -> bool:
    """Whether K + I⊗Σ has blocks that are cheaper: one Cholesky factor of it takes (N p)³/3
    operations, the eigendecomposition of the blocks about 10 N³."""
    return isinstance(expansion, KroneckerExpansion) and expansion.num_outputs > 2


def normal_equations(
    expansion: Expansion, groups: Sequence[Group], dense_rows: Sequence[Rows] = ()
) -> NormalEquations:
    """The normal equations of groups and dense rows.

    The Kronecker form applies to whole vectors with one noise and without dense rows, that of fixed
    fields to noise that is independent between outputs.
    """
    one_noise = len(groups) == 1 and groups[0].statistics.pattern.complete and not dense_rows
    if one_noise and isinstance(expansion, KroneckerExpansion):
        return Kronecker(expansion, groups[0])
    independent = all(is_diagonal(group.noise) for group in groups) and not dense_rows
    if independent and isinstance(expansion, ScaledExpansion):
        return Scaled(expansion, groups)
    return Primal(expansion.general(), groups, dense_rows)


def whole_vectors(observations: Sequence[Observations]) -> bool:
    """Whether observations are whole vectors with one noise."""
    first, *others = observations
    return not others and first.pattern.complete and first.weight is None


def dual_equations(
    expansion: Expansion,
    observations: PointObservations,
    further: Sequence[DenseRows],
    noises: Noises,
    delta: Float[Tensor, "p p"] | None,
) -> NormalEquations:
    """The dual algebra of observations at points, with δ in their noise, and of further rows."""
    parts = observations.observations
    if not parts:
        return Dual(expansion, DenseRows.concatenate(further))
    if has_blocks(expansion) and whole_vectors(parts) and not further:
        (part,) = parts
        noise = noises[part.key.label] + (0 if delta is None else delta)
        if is_regular(noise):  # rows below need K + I⊗Σ to be positive definite only
            return KroneckerDual(expansion, part.x, part.y, Noise.of(noise))
    truncated = None if delta is None else (delta, torch.zeros_like(delta))
    rows = DenseRows.of(observations, expansion, noises, truncated)
    return Dual(expansion, DenseRows.concatenate([rows, *further]))


def equations_of_vectors(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> NormalEquations:
    """The normal equations of vectors y at x, in the cheaper of the two algebras."""
    expansion, y = expansion.double(), y.double()
    if not prefers_dual(expansion, x.shape[-2]):
        return normal_equations(expansion, [Group(Statistics.of(x, y, expansion.phi), noise)])
    if has_blocks(expansion):
        return KroneckerDual(expansion, x, y, noise)
    return dual_of_vectors(expansion, x, y, noise)
