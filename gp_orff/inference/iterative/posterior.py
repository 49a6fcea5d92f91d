"""The posterior of the weights of lattice features, by iterations."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.chunked import chunks
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.inference.iterative.system import System
from gp_orff.inference.weight_posterior import GeneralPosterior, PrimalPosterior
from gp_orff.kernels.cholesky import cholesky
from gp_orff.symbols.base import Symbol

_SOLVED = 400  # values of a field whose variances are solved for


@dataclass(frozen=True)
class IterativePosterior(GeneralPosterior):
    """E[θ] = A⁻¹b, Cov[θ] = A⁻¹, where products with A⁻¹ are iterations.

    Covariances, and variances at up to 400 values n·p, are solutions. Variances at more values
    follow from those of the preconditioner P, whose inverse is known: with S draws s of the field
    under A⁻¹ and c under P⁻¹, of common random numbers, and their mean squares ⟨s²⟩ and ⟨c²⟩,

        Var f(x) ≈ φ(x) P⁻¹ φ(x)ᵀ ⟨s²⟩ / ⟨c²⟩ .

    The relative standard error of this variance is at most √(4/S), and √(4(1 − r)/S) if the
    squares s² and c² have the correlation r; that of the sd is half of it.
    """

    system: System

    def weight_covariance(self, v: Tensor) -> Tensor:
        return self.system.solve(v.mT).mT

    def weight_root(self, v: Tensor) -> Tensor:
        return self.system.draw(v.mT).mT

    def root_of(self, features: Tensor) -> Tensor:
        return cholesky(self.covariance_of(features))

    def covariance_of(self, features: Tensor) -> Tensor:
        covariance = features @ self.system.solve(features).mT
        return 0.5 * (covariance + covariance.mT)

    def variance_of(self, features: Tensor) -> Tensor:
        return (features * self.system.solve(features)).sum(-1)

    def blocks_of(self, features: Tensor, q: int) -> Tensor:
        solved = self.system.solve(features).unflatten(-2, (-1, q))
        blocks = features.unflatten(-2, (-1, q)) @ solved.mT
        return 0.5 * (blocks + blocks.mT)

    def covariance(self, x: Tensor) -> Tensor:
        x, expansion, columns = x.double(), self.expansion, []
        for rows in chunks(x, self._width):
            solved = self.system.solve(expansion.features(x[rows])).mT
            values = expansion.phi.apply(x, expansion.column_weights(solved))  # (n, p·k)
            columns.append(values.unflatten(-1, (self.num_outputs, -1)).flatten(0, 1))
        covariance = torch.cat(columns, dim=-1)
        return 0.5 * (covariance + covariance.mT)

    def root(self, x: Tensor) -> Tensor:
        return cholesky(self.covariance(x))

    def variance(self, x: Tensor) -> Tensor:
        if self._few(x):
            return super().variance(x)
        return self._estimated_blocks(x.double()).diagonal(dim1=-1, dim2=-2)

    def blocks(self, x: Tensor) -> Tensor:
        if self._few(x):
            return super().blocks(x)
        return self._estimated_blocks(x.double())

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        image = super().apply(symbol, space)
        plain = symbol.reference is None and not image.expansion.directions.is_complex()
        return replace(self, expansion=image.expansion) if plain else image

    def _few(self, x: Float[Tensor, "n d"]) -> bool:
        """Whether variances are solved for, as they are on columns that are no single lattice."""
        few = len(x) * self.num_outputs <= _SOLVED
        return few or not isinstance(self.expansion.phi, LatticeColumns)

    def _estimated_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """L K⁻¹ ⟨s sᵀ⟩ K⁻ᵀ Lᵀ, with the Cholesky factors L of the blocks under P⁻¹ and K of
        ⟨c cᵀ⟩; for one output, the equation above."""
        known = self._block_posterior.blocks(x) + self._rest_blocks(x)
        posterior, preconditioned = (self._mean_products(x, draws) for draws in self.system.draws)
        left, right = cholesky(known), cholesky(preconditioned)
        ratio = torch.linalg.solve_triangular(right, left, upper=False, left=False)  # L K⁻¹
        return ratio @ posterior @ ratio.mT

    @property
    def _block_posterior(self) -> PrimalPosterior:
        """The distribution of the features of the dense block, under P⁻¹."""
        p = self.system.preconditioner
        variance = torch.ones_like(p.diagonal[: len(p.columns)])
        part = self.expansion.select(p.columns, variance)
        return PrimalPosterior(part, self.theta[p.block], self.response[p.block], p.factor)

    def _rest_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Σ φ_f(x)² m_f m_fᵀ / A_ff over the other features; 2 cos² = 1 + cos of twice the phase,
        2 sin² = 1 − cos of it."""
        expansion: FeatureExpansion = self.expansion
        phi: LatticeColumns = expansion.phi
        weighted = expansion.directions * self.system.preconditioner.rest.unsqueeze(-1)
        outer = weighted.unsqueeze(-1) * expansion.directions.unsqueeze(-2)  # (F, p, p)
        cosines, sines = (0.5 * expansion.scatter(outer.flatten(1))).chunk(2)
        twice = LatticeColumns.of(2 * phi.indices, phi.spacing, phi.origin)
        weights = torch.cat([cosines - sines, torch.zeros_like(sines)])
        values = twice.apply(x, weights) + (cosines + sines).sum(0)
        return values.unflatten(-1, (self.num_outputs, -1))

    def _mean_products(
        self, x: Float[Tensor, "n d"], draws: Float[Tensor, "k F"]
    ) -> Float[Tensor, "n p p"]:
        """⟨f fᵀ⟩ of the fields of draws of the weights."""
        values = self.expansion.phi.apply(x, self.expansion.column_weights(draws.mT))
        values = values.unflatten(-1, (self.num_outputs, -1))
        return values @ values.mT / len(draws)
