"""The equations of the scalar problems of a design, and their solution for one α or for many."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.statistics import Statistics
from gp_orff.regression.solvers.design import Design

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Equations:
    """(σ_j² A + α) s_j = σ_j r_j with A = ΨᵀΨ and t_j = s_j, or A = ΨΨᵀ and t_j = Ψᵀ s_j."""

    matrix: Float[Tensor, "n n"]  # A
    right: Float[Tensor, "n k"]  # r
    scales: Float[Tensor, "k"]  # σ
    rows: Float[Tensor, "n m"] | None = None  # Ψ of the second form

    @classmethod
    def primal(cls, design: Design, statistics: Statistics) -> "Equations":
        """From sufficient statistics."""
        return cls(design.gram(statistics), design.right(statistics), design.scales)

    @classmethod
    def dual(cls, design: Design, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> "Equations":
        """From points that are fewer than the features."""
        rows = design.rows(x)
        return cls(rows @ rows.mT, design.targets(y), design.scales, rows)

    @classmethod
    def of(cls, design: Design, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> "Equations":
        """The smaller of both forms (Minh 2016, Equation 75)."""
        if design.num_rows(len(x)) < design.num_columns:
            return cls.dual(design, x, y)
        return cls.primal(design, design.statistics(x, y))

    def penalised(self, penalty: Float[Tensor, "n n"]) -> "Equations":
        """With σ_j² tᵀ`penalty`t added to every scalar problem."""
        return replace(self, matrix=self.matrix + penalty)

    def by_cholesky(self, alpha: float) -> Float[Tensor, "m k"]:
        """The t_j, by one Cholesky factor for each different σ_j; by eigenvectors where α is below
        the rounding error of the matrix."""
        solution = torch.zeros_like(self.right)
        for scale in _distinct(self.scales):
            a = scale.square() * self.matrix
            rounding = len(a) * _EPS * a.diagonal().max()
            a.diagonal().add_(alpha)
            factor, failed = torch.linalg.cholesky_ex(a)
            if failed or alpha < rounding:
                return self.by_eigenvectors(alpha)
            equal = (self.scales - scale).abs() <= _same(self.scales)
            solution[:, equal] = torch.cholesky_solve(scale * self.right[:, equal], factor)
        return self._weights(solution)

    def by_eigenvectors(self, alpha: float) -> Float[Tensor, "m k"]:
        """The t_j; of least norm where α = 0 leaves them undetermined."""
        return self._weights(self._vectors @ (self._inverse(alpha) * self._rotated))

    def residual_freedom(self, alpha: float, num_values: int) -> float:
        """tr(I − H) for the matrix H that maps `num_values` values y to their predictions."""
        inverse = self._inverse(alpha)
        share = torch.where(inverse > 0, alpha * inverse, 1.0)
        return num_values - share.numel() + share.sum().item()

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "n k"]:
        """Those of every σ_j² A, without rounding errors below zero."""
        return self._decomposed[0].clamp_min(0).unsqueeze(-1) * self.scales.square()

    def _inverse(self, alpha: float) -> Float[Tensor, "n k"]:
        """1/(λ + α) of every eigenvalue λ; zero where λ + α is below the rounding error of A."""
        rounding = len(self.matrix) * _EPS * self.eigenvalues[-1]
        denominators = self.eigenvalues + alpha
        return torch.where(denominators > rounding, 1 / denominators, 0.0)

    @cached_property
    def _decomposed(self) -> tuple[Float[Tensor, "n"], Float[Tensor, "n n"]]:
        return torch.linalg.eigh(self.matrix)

    @property
    def _vectors(self) -> Float[Tensor, "n n"]:
        return self._decomposed[1]

    @cached_property
    def _rotated(self) -> Float[Tensor, "n k"]:
        return self._vectors.mT @ (self.scales * self.right)

    def _weights(self, s: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        return s if self.rows is None else self.rows.mT @ s


def _same(scales: Float[Tensor, "k"]) -> Float[Tensor, ""]:
    """The difference below which two σ_j are equal but for rounding."""
    return 4 * _EPS * scales.max()


def _distinct(scales: Float[Tensor, "k"]) -> list[Float[Tensor, ""]]:
    """The different σ_j that are not zero."""
    found: list[Tensor] = []
    for scale in scales:
        if all((scale - other).abs() > _same(scales) for other in [0.0, *found]):
            found.append(scale)
    return found
