"""Evidence of vector observations under an expansion.

With noise covariance Σ (p×p, shared by all points), columns c and directions M of the features,

    A = I_F + C[c,c] ∘ (M Σ⁻¹ Mᵀ) ,   b = Σ_j (Z[c] Σ⁻¹ ∘ M)[:, j] ,
    yᵀ(K + I⊗Σ)⁻¹y = tr(Σ⁻¹Y₂) − bᵀA⁻¹b ,   log|K + I⊗Σ| = log|A| + N log|Σ| .

The same holds for V = [y, 1⊗I_p] in the place of y, with B in the place of b. This gives the
evidence for every constant mean.

Groups of observations have statistics, patterns and noise of their own. Each adds its terms to A, B
and the rest: for every weight a_k of its pattern a C, with M restricted to the observed components.

For separable kernels A = I + S C S ⊗ LᵀΣ⁻¹L: one eigendecomposition of size r, then r Cholesky
factorisations of size 2D, or one eigendecomposition of that size (`separable`). With fewer values
than features, the dual algebra factorises K + I⊗Σ.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.nn.functional import pad

from gp_orff.data.noise.covariances import Noise, Noises, independent
from gp_orff.data.observations import (
    LinearObservations,
    TruncatedVariance,
    block_diagonal,
    less_reference,
)
from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import (
    Expansion,
    FeatureExpansion,
    KroneckerExpansion,
    apply_symbol,
)
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    MaskedInvQuadLogdet,
    log_determinant,
    masked_sum,
)
from gp_orff.inference.separable.posterior import KroneckerPosterior
from gp_orff.inference.separable.quadratic import KroneckerInvQuadLogdet, Solution
from gp_orff.inference.weight_posterior import DualPosterior, PrimalPosterior, WeightPosterior
from gp_orff.kernels.cholesky import cholesky, size_of
from gp_orff.symbols.base import Identity, Symbol


def prefers_dual(expansion: Expansion, num_points: float) -> bool:
    """Whether factorising K + I⊗Σ (N·p square) is cheaper than factorising A."""
    return (num_points * expansion.num_outputs) ** 3 < expansion.cholesky_cost


@dataclass(frozen=True)
class DenseRows:
    """Observations with a matrix row for each value: H Φ, V and the noise covariance."""

    features: Float[Tensor, "*b M F"]
    design: Float[Tensor, "*b M 1+p"]
    noise: Float[Tensor, "*b M M"]

    @classmethod
    def of(
        cls,
        observations: LinearObservations,
        expansion: Expansion,
        noises: Noises,
        truncated: TruncatedVariance,
    ) -> "DenseRows":
        """The matrices, differentiable in the expansion, which lacks the variance `truncated`."""

        def features(symbol: Symbol, space: Sequence[int], x: Float[Tensor, "n d"]) -> Tensor:
            if isinstance(symbol, Identity):
                return expansion.features(x)
            image = apply_symbol(symbol, expansion, space)
            return less_reference(image.features, x, symbol, space)

        noise = observations.noise_covariance(noises, truncated)
        return cls(observations.apply(features), observations.design(expansion.num_outputs), noise)

    @classmethod
    def concatenate(cls, parts: Sequence["DenseRows"]) -> "DenseRows":
        """The rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            torch.cat([part.features for part in parts]),
            torch.cat([part.design for part in parts]),
            block_diagonal([part.noise for part in parts]),
        )

    def whitened(self) -> tuple[Float[Tensor, "M F"], Float[Tensor, "M 1+p"], Float[Tensor, ""]]:
        """N^{−½}Φ, N^{−½}V and log|N|."""
        factor = torch.linalg.cholesky(self.noise)
        both = torch.cat([self.features, self.design], dim=-1)
        half = torch.linalg.solve_triangular(factor, both, upper=False)
        logdet = 2 * factor.diagonal().log().sum()
        return *half.split([self.features.shape[-1], self.design.shape[-1]], dim=-1), logdet


class Group(NamedTuple):
    """The statistics of observations that share a pattern and a noise."""

    statistics: Statistics
    noise: Noise  # of one observation


class NormalEquations(ABC):
    """A and B of the feature weights: E[θ] = A⁻¹B [1; −c] under a constant mean c."""

    @abstractmethod
    def evidence(self) -> Evidence:
        """The evidence: one factorisation, and one inverse for its gradient."""

    @abstractmethod
    def posterior(self, mean: Float[Tensor, "*b p"] | None) -> tuple[WeightPosterior, Evidence]:
        """The posterior of the weights and the evidence, from one factorisation.

        Without a `mean`, both are under the constant mean of largest evidence.
        """


def normal_equations(
    expansion: Expansion, groups: Sequence[Group], dense_rows: Sequence[DenseRows] = ()
) -> NormalEquations:
    """The normal equations of groups and dense rows.

    The Kronecker form applies to whole vectors with one noise and without dense rows.
    """
    one_noise = len(groups) == 1 and groups[0].statistics.pattern.complete and not dense_rows
    if one_noise and isinstance(expansion, KroneckerExpansion):
        return Kronecker(expansion, groups[0])
    return Primal(expansion.general(), groups, dense_rows)


def equations_of_vectors(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> NormalEquations:
    """The normal equations of vectors y at x, in the cheaper of the two algebras."""
    expansion, y = expansion.double(), y.double()
    if not prefers_dual(expansion, x.shape[-2]):
        return normal_equations(expansion, [Group(Statistics.of(x, y, expansion.phi), noise)])
    covariance = independent(noise.covariance, x.shape[-2])
    return Dual(expansion, DenseRows(expansion.features(x.double()), with_ones(y), covariance))


def with_ones(y: Float[Tensor, "*b N p"]) -> Float[Tensor, "*b N*p 1+p"]:
    """V = [y, 1⊗I_p] of vectors y."""
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    ones = eye.expand(*y.shape, y.shape[-1]).flatten(-3, -2)  # 1⊗I_p
    return torch.cat([y.flatten(-2).unsqueeze(-1), ones], dim=-1)


def dense_evidence(
    covariance: Float[Tensor, "*b M M"], design: Float[Tensor, "*b M 1+p"]
) -> Evidence:
    """The evidence of V under a dense covariance, noise included."""
    size = size_of(covariance)
    quad, logdet = InvQuadLogdet.apply(covariance / size, design)
    return Evidence(quad / size, logdet + covariance.shape[-1] * size.log()[..., 0, 0])


def dense_posterior(
    covariance: Float[Tensor, "*b M M"],
    design: Float[Tensor, "*b M 1+p"],
    mean: Float[Tensor, "*b p"] | None,
) -> tuple[Float[Tensor, "*b M M"], Float[Tensor, "*b M 1"], Evidence]:
    """The Cholesky factor L of the covariance, α = (L Lᵀ)⁻¹(y − c), and the evidence of V."""
    factor = cholesky(covariance)
    return factor, *_solve(factor, design, mean, Evidence)


def _solve(
    factor: Float[Tensor, "*b n n"],
    b: Float[Tensor, "*b n 1+p"],
    mean: Float[Tensor, "*b p"] | None,
    evidence_of: Callable[[Tensor, Tensor], Evidence],
) -> tuple[Float[Tensor, "*b n 1"], Evidence]:
    """A⁻¹B [1; −c] from the factor of A, and the evidence that follows from BᵀA⁻¹B and log|A|."""
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    evidence = evidence_of(half.mT @ half, log_determinant(factor))
    residual = half @ evidence.contrast(mean)
    return torch.linalg.solve_triangular(factor.mT, residual, upper=True), evidence


@dataclass(frozen=True)
class Dual(NormalEquations):
    """The dual algebra, for fewer values than features: it factorises their covariance."""

    expansion: Expansion
    rows: DenseRows

    @property
    def _covariance(self) -> Float[Tensor, "*b M M"]:
        return self.rows.features @ self.rows.features.mT + self.rows.noise

    def evidence(self) -> Evidence:
        return dense_evidence(self._covariance, self.rows.design)

    def posterior(self, mean):
        features = self.rows.features
        factor, alpha, evidence = dense_posterior(self._covariance, self.rows.design, mean)
        whitened = torch.linalg.solve_triangular(factor, features, upper=False)
        return DualPosterior(self.expansion, features.mT @ alpha, whitened), evidence


@dataclass(frozen=True)
class Primal(NormalEquations):
    """The primal algebra: A = I + Σ C[c,c] ∘ (M P Mᵀ) + Σ ΦᵀN⁻¹Φ, the last sum over dense rows."""

    expansion: FeatureExpansion
    groups: Sequence[Group]
    rows: Sequence[DenseRows] = ()

    @cached_property
    def _whitened(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [rows.whitened() for rows in self.rows]

    def evidence(self) -> Evidence:
        if self.rows:
            return self._evidence(*InvQuadLogdet.apply(*self._a_and_b()))
        b, parts = masked_equations(self.expansion, self.groups)
        return self._evidence(*MaskedInvQuadLogdet.apply(b, *parts))

    def posterior(self, mean):
        a, b = self._a_and_b()
        factor = psd_safe_cholesky(a)
        theta, evidence = _solve(factor, b, mean, self._evidence)
        return PrimalPosterior(self.expansion, theta, factor), evidence

    def _a_and_b(self) -> tuple[Float[Tensor, "*b F F"], Float[Tensor, "*b F 1+p"]]:
        b, parts = masked_equations(self.expansion, self.groups)
        a = masked_sum(parts)
        for features, design, _ in self._whitened:
            a, b = a + features.mT @ features, b + features.mT @ design
        return a, b

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        row_terms = [
            (design.mT @ design, noise_logdet) for _, design, noise_logdet in self._whitened
        ]
        return evidence_of([*map(_noise_terms, self.groups), *row_terms], explained, logdet)


@dataclass(frozen=True)
class Kronecker(NormalEquations):
    """The algebra of separable kernels: A = I + SCS ⊗ G, G = LᵀΣ⁻¹L."""

    expansion: KroneckerExpansion
    group: Group

    @cached_property
    def _equations(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return kronecker_equations(self.expansion, *self.group)

    def evidence(self) -> Evidence:
        *equations, outputs = self._equations
        quad, logdet = KroneckerInvQuadLogdet.apply(*equations)
        return self._evidence(outputs @ quad @ outputs.mT, logdet)

    def posterior(self, mean):
        *equations, outputs = self._equations
        if equations[1].requires_grad:  # eigenvectors of equal eigenvalues: no derivative
            return Primal(self.expansion.general(), [self.group]).posterior(mean)
        solution = Solution.of(*equations)
        explained = outputs @ solution.quad @ outputs.mT
        evidence = self._evidence(explained, solution.blocks.logdet())
        theta = solution.combine(outputs.mT @ evidence.contrast(mean))
        return KroneckerPosterior(self.expansion, theta, solution.u, solution.blocks), evidence

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        return evidence_of([_noise_terms(self.group)], explained, logdet)


def evidence_of(
    noise_terms: Sequence[tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]],
    explained: Float[Tensor, "*b 1+p 1+p"],
    logdet: Float[Tensor, "*b"],
) -> Evidence:
    """The evidence from BᵀA⁻¹B, log|A| and the terms VᵀN⁻¹V and log|N| of all noise N."""
    squares, logdets = zip(*noise_terms, strict=True)
    return Evidence(sum(squares) - explained, logdet + sum(logdets))


def _noise_terms(group: Group) -> tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]:
    """VᵀN⁻¹V and log|N| of the noise N of a group."""
    statistics, noise = group
    pattern = statistics.pattern
    precision = pattern.precision(noise.precision)
    square = (precision * statistics.second_moment).sum((-1, -2))[..., None, None]
    total = pattern.embed((precision @ statistics.total.unsqueeze(-1)).mT).mT
    ones = 0
    for moments, e in zip(statistics.moments, pattern.basis(precision), strict=True):
        ones = ones + moments.mass * pattern.embed(pattern.embed(precision @ e).mT)
    ones = ones.expand(*total.shape[:-2], -1, -1)
    quad = torch.cat(
        [torch.cat([square, total.mT], dim=-1), torch.cat([total, ones], dim=-1)], dim=-2
    )
    logdet = statistics.count * noise.logdet - pattern.num_values * statistics.weights.log
    return quad, logdet


def masked_equations(
    expansion: FeatureExpansion, groups: Sequence[Group]
) -> tuple[Float[Tensor, "*b F 1+p"], list[Tensor]]:
    """B, and C[c,c], M, P of every term of A = I + Σ C[c,c] ∘ (M P Mᵀ)."""
    b, ones, parts = 0, 0, []
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        b = b + (expansion.gather(statistics.cross @ precision) * m).sum(-1, keepdim=True)
        grams = statistics.feature_grams(expansion)
        for gram, moments, e in zip(
            grams, statistics.moments, pattern.basis(precision), strict=True
        ):
            weighted_basis = precision @ e
            sums = expansion.gather(moments.column_sum.unsqueeze(-1))
            ones = ones + sums * pattern.embed(m @ weighted_basis)
            parts += [gram, m, weighted_basis]
    return torch.cat([b, ones.expand(*b.shape[:-1], -1)], dim=-1), parts


def kronecker_equations(
    expansion: KroneckerExpansion, statistics: Statistics, noise: Noise
) -> tuple[
    Float[Tensor, "*b M M"],
    Float[Tensor, "*b r r"],
    Float[Tensor, "*b M r"],
    Float[Tensor, "*b M 1"],
    Float[Tensor, "*b 1+p 1+r"],
]:
    """S C S, G = LᵀΣ⁻¹L, Z, s and E, where A = I + SCS ⊗ G and B = [vec Z, s⊗I] Eᵀ."""
    scales, mixing = expansion.scales, expansion.mixing
    whitened = noise.precision @ mixing  # Σ⁻¹L
    gram = scales * statistics.gram * scales.mT
    cross = scales * (statistics.cross @ whitened)
    sums = scales * statistics.column_sum.unsqueeze(-1)
    outputs = pad(whitened, (1, 0, 1, 0))  # 1 ⊕ Σ⁻¹L
    outputs[..., 0, 0] = 1
    return gram, mixing.mT @ whitened, cross, sums, outputs
