"""The posterior of the weights of lattice features, by iterations."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.chunked import by_chunks, chunks
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.inference.iterative.system import System
from gp_orff.inference.weight_posterior import (
    GeneralPosterior,
    PrimalPosterior,
    SymbolPosterior,
)
from gp_orff.kernels.cholesky import cholesky
from gp_orff.symbols.base import Symbol

_NOTHING = 1e-20  # a share of the largest variance that is none to rounding
_SOLVED = 400  # values of a field whose variances are solved for


@dataclass(frozen=True)
class IterativePosterior(GeneralPosterior):
    """E[θ] = A⁻¹b, Cov[θ] = A⁻¹, where products with A⁻¹ are iterations.

    Covariances, and variances at up to 400 values n·p, or fewer if iterations are many or costly,
    are solutions. Variances at more values follow from those of the preconditioner P, whose inverse
    is known: with S draws s of the field under A⁻¹ and c under P⁻¹, of common random numbers, and
    their mean squares ⟨s²⟩ and ⟨c²⟩,

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
        if not self._estimates(x):
            return super().variance(x)
        return self._estimated_blocks(x.double()).diagonal(dim1=-1, dim2=-2)

    def blocks(self, x: Tensor) -> Tensor:
        return self._estimated_blocks(x.double()) if self._estimates(x) else super().blocks(x)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        image = super().apply(symbol, space)
        plain = symbol.reference is None and not image.expansion.directions.is_complex()
        if plain:
            return replace(self, expansion=image.expansion)
        return EstimatedSymbol(**{f.name: getattr(image, f.name) for f in fields(image)})

    def estimates(self, values: int) -> bool:
        """Whether variances of so many numbers are estimated, since solving for them is costly."""
        return values > _SOLVED or not self.system.affords(values)

    def estimated_from(self, features: Float[Tensor, "n*q F"], q: int) -> Float[Tensor, "n q q"]:
        """The blocks of Φ A⁻¹ Φᵀ, estimated as above for any features Φ of these weights."""

        def products(values: Float[Tensor, "n*q k"]) -> Float[Tensor, "n q q"]:
            values = values.unflatten(0, (-1, q))
            return values @ values.mT

        known = products(self.system.preconditioner.inverse_root(features))
        return _scaled(known, *(products(features @ draws.mT) for draws in self.system.draws))

    def _estimates(self, x: Float[Tensor, "n d"]) -> bool:
        """Never on columns that are no single lattice."""
        lattice = isinstance(self.expansion.phi, LatticeColumns)
        return lattice and self.estimates(len(x) * self.num_outputs)

    def _estimated_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        known = self._block_posterior.blocks(x) + self._rest_blocks(x)
        return _scaled(known, *(self._mean_products(x, draws) for draws in self.system.draws))

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


@dataclass(frozen=True)
class EstimatedSymbol(SymbolPosterior):
    """Q f under an `IterativePosterior`, whose variances at many points are estimated likewise."""

    posterior: IterativePosterior

    def variance(self, x: Tensor) -> Tensor:
        if not self.posterior.estimates(len(x) * self.num_outputs):
            return super().variance(x)
        return self._estimated_blocks(x).diagonal(dim1=-1, dim2=-2)

    def blocks(self, x: Tensor) -> Tensor:
        if not self.posterior.estimates(len(x) * self.num_outputs):
            return super().blocks(x)
        return self._estimated_blocks(x)

    def _estimated_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q q"]:
        def flat(part: Float[Tensor, "n d"]) -> Float[Tensor, "n q*q"]:
            return self.posterior.estimated_from(self._features(part), self.num_outputs).flatten(-2)

        blocks = by_chunks(flat, x.double(), self._width)
        return blocks.unflatten(-1, (self.num_outputs, self.num_outputs))


def _scaled(
    known: Float[Tensor, "n p p"],
    posterior: Float[Tensor, "n p p"],
    preconditioned: Float[Tensor, "n p p"],
) -> Float[Tensor, "n p p"]:
    """L K⁻¹ ⟨s sᵀ⟩ K⁻ᵀ Lᵀ, with the Cholesky factors L of the blocks under P⁻¹ and K of ⟨c cᵀ⟩; for
    one output, the equation of `IterativePosterior`. Zero at a reference."""
    traces = known.diagonal(dim1=-1, dim2=-2).sum(-1)
    at_reference = (traces <= _NOTHING * traces.max())[:, None, None]
    eye = torch.eye(known.shape[-1]).to(known)
    left, right = (
        cholesky(torch.where(at_reference, eye, block)) for block in (known, preconditioned)
    )
    ratio = torch.linalg.solve_triangular(right, left, upper=False, left=False)  # L K⁻¹
    return ratio @ posterior @ ratio.mT
