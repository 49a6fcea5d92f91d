"""The primal algebra without its matrix, on frequency lattices of many features.

A = I + Σ C[c,c] ∘ (M P Mᵀ) is a sum of Toeplitz and Hankel matrices between diagonal ones: a
product with it takes two fast Fourier transforms for each output. A preconditioner with a dense
block for the features that the data determine best makes conjugate gradients fast; the Lanczos
process gives log|A| with a standard error, and A^{−½}z (`iterative_system`). From these follow the
evidence and the posterior, as the normal equations of `equations`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gp_orff.features.chunked import by_chunks, chunks
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.equations import (
    WeightEquations,
    mean_and_response,
)
from gp_orff.inference.iterative_system import Accuracy, System, WeightPrecision, precondition
from gp_orff.inference.posteriors import (
    FieldDistribution,
    GeneralPosterior,
    PrimalPosterior,
    SymbolPosterior,
)
from gp_orff.inference.quadratic import Evidence
from gp_orff.kernels.base import cholesky
from gp_orff.symbols.base import Symbol

# BᵀA⁻¹B and log|A| − log|P| with their derivatives, from solutions of A x = b alone.
#
# With U = A⁻¹B, and random z with E[z zᵀ] = P,
#
#     ∂ BᵀA⁻¹B = ∂Bᵀ U + Uᵀ ∂B − Uᵀ ∂A U ,
#     ∂ (log|A| − log|P|) = tr(A⁻¹∂A) − tr(P⁻¹∂P) = E[(A⁻¹z − P⁻¹z)ᵀ ∂A P⁻¹z] ,
#
# the last because A and P have the same block and diagonal, so that E[zᵀP⁻¹ ∂A P⁻¹z] = tr(P⁻¹∂P).
# The derivative of log|P| is exact.
#
# The difference A⁻¹z − P⁻¹z is small where P is good, so few probes give a gradient of small
# variance. Both functions return derivatives of bilinear forms uᵀAv only, which
# `WeightPrecision.derivatives` computes with images: neither A nor ∂A is formed. The gradient is
# that of the exact function; the value of the log-determinant is an estimate by other means
# (Lanczos), hence the two agree up to the random error only.


class InvQuad(Function):
    """BᵀA⁻¹B; arguments: the system, B (F, k), M (F, p), and each Q and N^{−½}Φ of A."""

    @staticmethod
    def forward(ctx, system: System, b: Float[Tensor, "F k"], *parts: Tensor):
        u = system.solve_mean(b.mT)
        ctx.system = system
        ctx.save_for_backward(u)
        residual = b - system.precision.product(u).mT
        return u @ b + u @ residual  # the error is quadratic in the residual

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        # BᵀA⁻¹B is symmetric, so only the symmetric part of its gradient acts.
        weighted = 0.5 * (grad + grad.mT) @ u
        return None, 2 * weighted.mT, *_derivatives(ctx.system, -weighted, u)


class LogdetRatio(Function):
    """log|A| − log|P|; arguments: the system, M (F, p), and each Q and N^{−½}Φ of A."""

    @staticmethod
    def forward(ctx, system: System, *parts: Tensor):
        ctx.system = system
        return system.logdet_ratio[0].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        preconditioned, solution = ctx.system.probes
        difference = grad / len(preconditioned) * (solution.x - preconditioned)
        return None, *_derivatives(ctx.system, difference, preconditioned)


def _derivatives(system: System, left: Tensor, right: Tensor) -> list[Tensor]:
    """The derivatives of Σ uᵀAv for rows u of `left` and v of `right`."""
    directions, bases, rows = system.precision.derivatives(left, right)
    return [directions, *bases, *rows]


class EstimatedEvidence(Evidence):
    """An evidence with the standard error of its log-determinant.

    Both are computed when they are needed first, unless the log-determinant is given with its
    derivatives.
    """

    system: System
    ratio: Float[Tensor, ""] | None

    @classmethod
    def of(
        cls,
        exact: Evidence,
        system: System,
        ratio: Float[Tensor, ""] | None = None,
    ) -> "EstimatedEvidence":
        """The evidence from one with |P| instead of |A|, and log|A| − log|P|."""
        evidence = cls(exact.quad, exact.logdet, exact.seen)
        evidence.system, evidence.ratio = system, ratio
        return evidence

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.quad, self.logdet, self.seen))

    @property
    def logdet(self) -> Float[Tensor, ""]:
        return self[1] + (self.system.logdet_ratio[0] if self.ratio is None else self.ratio)

    @property
    def logdet_error(self) -> float:
        return self.system.logdet_ratio[1]


# The posterior of the weights of lattice features, by iterations.
#
# 1. The mean is φ(x) θ with the solved weights θ, as for any features.
# 2. Up to 400 variances are solved for: one system for each.
# 3. Beyond, 64 draws of the weights give the variances at all points, with a relative standard
#    error of at most √(4/64) if they were used alone. They serve as a correction instead: the same
#    random numbers give draws under P, whose exact variance is known, and the ratio of the two mean
#    squares cancels most of the error.
# 4. The exact variance under P is the sum over the dense block, by its factor, and the rest, where
#    P is diagonal: that is one transform of the coefficients of cos² and sin², at twice the
#    frequency.
# 5. For several outputs, ratios become matrices: `_scaled` uses Cholesky factors, so that the
#    result is symmetric and positive semidefinite.


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
        lattice = self.expansion.phi.on_lattice
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
            return self.posterior.estimated_from(self.features(part), self.num_outputs).flatten(-2)

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
    # A potential is zero at its reference point: its block has no Cholesky factor there.
    at_reference = (traces <= _NOTHING * traces.max())[:, None, None]
    eye = torch.eye(known.shape[-1]).to(known)
    left, right = (
        cholesky(torch.where(at_reference, eye, block)) for block in (known, preconditioned)
    )
    ratio = torch.linalg.solve_triangular(right, left, upper=False, left=False)  # L K⁻¹
    return ratio @ posterior @ ratio.mT


# The normal equations of lattice features, solved by iterations.
#
# The evidence of a search solves for y and the constants to the accuracy of the mean. The posterior
# needs the best constant mean c before it knows the right-hand side y − Hc, hence the order:
#
# 1. Solve roughly for all columns of B; this gives c and its variance to second order.
# 2. Refine the combination b(y) − B c alone, to the accuracy of the mean, from the rough solution.
# 3. Put the refined solution into the column of y, so that all contrasts of the solutions contain
#    it.


@dataclass(frozen=True)
class Iterative(WeightEquations):
    """The primal algebra of features on a lattice, without A."""

    accuracy: Accuracy = field(default_factory=Accuracy)

    def evidence(self) -> Evidence:
        system, logdet = self._system
        quad = InvQuad.apply(system, self.b, *self._parts)
        ratio = LogdetRatio.apply(system, *self._parts)
        return EstimatedEvidence.of(self.evidence_of(quad, logdet), system, ratio)

    def posterior(self, mean):
        system, logdet = self._system
        b = self.b

        def evidence_of_solution(u: Tensor) -> EstimatedEvidence:
            quad = u @ (2 * b - system.precision.product(u).mT)  # quadratic in the residual
            exact = self.evidence_of(0.5 * (quad + quad.mT), logdet)
            return EstimatedEvidence.of(exact, system)

        u = system.solve_roughly(b.mT)
        contrast = evidence_of_solution(u).contrast(mean).mT  # y less its mean
        # The coefficient of y in the contrast is one: with this column, contrast @ u is what was
        # refined.
        u[:1] += system.refined(contrast @ b.mT, contrast @ u) - contrast @ u
        evidence = evidence_of_solution(u)
        theta = mean_and_response(u.mT @ evidence.contrasts(mean))
        return IterativePosterior(self.expansion, *theta, system), evidence

    @cached_property
    def _features(self) -> list[Float[Tensor, "M F"]]:
        return [features for features, *_ in self.whitened]

    @cached_property
    def _bases(self) -> list[Float[Tensor, "p p"]]:
        """P E of every weight of every group, for all p components."""
        bases = []
        for statistics, noise in self.groups:
            pattern = statistics.pattern
            precision = pattern.precision(noise.precision)
            for e in pattern.basis(precision):
                bases.append(pattern.embed(pattern.embed(precision @ e).mT))
        return bases

    @property
    def _parts(self) -> list[Tensor]:
        """The tensors that A depends on."""
        return [self.expansion.directions, *self._bases, *self._features]

    @cached_property
    def _system(self) -> tuple[System, Float[Tensor, ""]]:
        """A with its preconditioner P, and log|P|."""
        parts = self.expansion, self.groups
        preconditioner, logdet = precondition(*parts, self._features, self.accuracy.block)
        precision = WeightPrecision.of(*parts, self._bases, self._features)
        num_values = sum(statistics.num_values for statistics, _ in self.groups)
        num_values += sum(len(features) for features in self._features)
        return System(precision, preconditioner, self.accuracy, num_values), logdet
