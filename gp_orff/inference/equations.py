"""Evidence of vector observations under an expansion.

With noise covariance Σ (p×p, shared by all points), columns c and directions M of the features,

    A = I_F + C[c,c] ∘ (M Σ⁻¹ Mᵀ) ,   b = Σ_j (Z[c] Σ⁻¹ ∘ M)[:, j] ,
    yᵀ(K + I⊗Σ)⁻¹y = tr(Σ⁻¹Y₂) − bᵀA⁻¹b ,   log|K + I⊗Σ| = log|A| + N log|Σ| ,

and the same with a column of ones for each output in the place of y, so that the evidence is known
for every constant mean.

Groups of readings with statistics, patterns and noise of their own add their terms to A, b and the
rest: for each, C of every weight a_k of its pattern, with M restricted to what it sees.

For separable kernels A = I + S C S ⊗ LᵀΣ⁻¹L: r factorisations of size 2D after one of size r.
Where there are fewer numbers than features, the dual: K + I⊗Σ itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.data.noise.covariances import Noise, Noises, independent
from gp_orff.data.observations import LinearObservations, Missing, block_diagonal
from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import (
    Expansion,
    FeatureExpansion,
    KroneckerExpansion,
    seen_through,
)
from gp_orff.inference.quadratic import (
    InvQuadLogdet,
    KroneckerInvQuadLogdet,
    MaskedInvQuadLogdet,
    diagonalised,
    masked,
    unrotated,
)
from gp_orff.inference.weight_posterior import (
    DualPosterior,
    KroneckerPosterior,
    PrimalPosterior,
    WeightPosterior,
)
from gp_orff.kernels.cholesky import cholesky, size_of
from gp_orff.symbols.base import Identity, Symbol

_UNSEEN = 1e-10  # of the information on a mean, below which there is none


class Evidence(NamedTuple):
    """The terms of the Gaussian log density of y, for every constant mean c of the outputs.

    With V = [y, 1⊗I_p]: −½ ([1 −c] VᵀK⁻¹V [1 −c]ᵀ + log|K| + N p log 2π), noise being in K.
    """

    quad: Float[Tensor, "*b 1+p 1+p"]  # Vᵀ (K + I⊗Σ)⁻¹ V
    logdet: Float[Tensor, "*b"]  # log |K + I⊗Σ|

    @property
    def inv_quad(self) -> Float[Tensor, "*b"]:
        """yᵀ (K + I⊗Σ)⁻¹ y."""
        return self.quad[..., 0, 0]

    def best_mean(self) -> Float[Tensor, "*b p"]:
        """The constant mean of largest evidence (generalised least squares); the shortest one where
        the data do not tell it."""
        ones, y = self.quad[..., 1:, 1:], self.quad[..., 1:, :1]
        seen = ones.detach().diagonal(dim1=-1, dim2=-2).amax(-1)
        spread = torch.linalg.eigvalsh(ones.detach())[..., 0]
        if (spread > _UNSEEN * seen).all():
            return torch.linalg.solve(ones, y).squeeze(-1)
        return (torch.linalg.pinv(ones, rtol=_UNSEEN, hermitian=True) @ y).squeeze(-1)

    def log_density(self, mean: Float[Tensor, "*b p"], num_values: int) -> Float[Tensor, "*b"]:
        """log p(y), total, under a constant mean."""
        v = torch.cat([torch.ones_like(mean[..., :1]), -mean], dim=-1)
        quad = (v * (self.quad @ v.unsqueeze(-1)).squeeze(-1)).sum(-1)
        return -0.5 * (quad + self.logdet + num_values * math.log(2 * math.pi))


def prefers_dual(expansion: Expansion, num_points: float) -> bool:
    """Whether factorising K + I⊗Σ (N·p square) is cheaper than factorising A."""
    return (num_points * expansion.num_outputs) ** 3 < expansion.cholesky_cost


@dataclass(frozen=True)
class DenseRows:
    """Observations that are written out: H Φ, V and the covariance of their noise."""

    features: Float[Tensor, "M F"]
    design: Float[Tensor, "M 1+p"]
    noise: Float[Tensor, "M M"]

    @classmethod
    def of(
        cls, own: LinearObservations, expansion: Expansion, noises: Noises, missing: Missing
    ) -> "DenseRows":
        """Differentiable in the expansion, which leaves a variance of what is observed out."""

        def image(symbol: Symbol, space: Sequence[int], x: Float[Tensor, "n d"]) -> Tensor:
            if isinstance(symbol, Identity):
                return expansion.features(x)
            seen, referred = seen_through(symbol, expansion, space), symbol.referred(x, space)
            features = seen.features(x)
            return features if referred is None else features - seen.features(referred)

        noise = own.noise_covariance(noises, missing)
        return cls(own.see(image), own.design(expansion.num_outputs), noise)

    @classmethod
    def joined(cls, parts: Sequence["DenseRows"]) -> "DenseRows":
        """All of them."""
        return cls(
            torch.cat([own.features for own in parts]),
            torch.cat([own.design for own in parts]),
            block_diagonal([own.noise for own in parts]),
        )

    def whitened(self) -> tuple[Float[Tensor, "M F"], Float[Tensor, "M 1+p"], Float[Tensor, ""]]:
        """N^{−½}Φ, N^{−½}V and log|N|."""
        factor = torch.linalg.cholesky(self.noise)
        both = torch.cat([self.features, self.design], dim=-1)
        half = torch.linalg.solve_triangular(factor, both, upper=False)
        logdet = 2 * factor.diagonal().log().sum()
        return *half.split([self.features.shape[-1], self.design.shape[-1]], dim=-1), logdet


class Group(NamedTuple):
    """Readings that share a pattern and a noise."""

    statistics: Statistics
    noise: Noise  # of a reading


def evidence(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> Evidence:
    """Evidence of vectors y at x, by the cheaper of the two algebras."""
    if prefers_dual(expansion, x.shape[-2]):
        covariance = noisy_covariance(expansion.features(x.double()), noise.covariance)
        return dense_evidence(covariance, with_ones(y.double()))
    return statistics_evidence(expansion, [Group(Statistics.of(x, y, expansion.phi), noise)])


def with_ones(y: Float[Tensor, "*b N p"]) -> Float[Tensor, "*b N*p 1+p"]:
    """V = [y, 1⊗I_p] of vectors y."""
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    ones = eye.expand(*y.shape, y.shape[-1]).flatten(-3, -2)  # 1⊗I_p
    return torch.cat([y.flatten(-2).unsqueeze(-1), ones], dim=-1)


def dense_evidence(
    covariance: Float[Tensor, "*b M M"], columns: Float[Tensor, "*b M 1+p"]
) -> Evidence:
    """Evidence of V under a covariance that is written out, noise included."""
    size = size_of(covariance)
    quad, logdet = InvQuadLogdet.apply(covariance / size, columns)
    return Evidence(quad / size, logdet + covariance.shape[-1] * size.log()[..., 0, 0])


def noisy_covariance(
    features: Float[Tensor, "*b N*p F"], noise: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b N*p N*p"]:
    """ΦΦᵀ + I⊗Σ."""
    return features @ features.mT + independent(noise, features.shape[-2] // noise.shape[-1])


def statistics_evidence(
    expansion: Expansion, groups: Sequence[Group], rows: DenseRows | None = None
) -> Evidence:
    """Evidence from the statistics alone: one factorisation and one inverse with its gradient; and
    from further rows that are written out."""
    if rows is not None:
        a, b, white, logdet = with_rows(*normal_equations(expansion.general(), groups), rows)
        explained, own = InvQuadLogdet.apply(a, b)
        return evidence_of(groups, explained - white, own + logdet)
    expansion = structured(expansion, groups)
    if isinstance(expansion, KroneckerExpansion):
        equations = kronecker_equations(expansion, *groups[0])
        return evidence_of(groups, *KroneckerInvQuadLogdet.apply(*equations))
    b, parts = normal_equations(expansion, groups)
    return evidence_of(groups, *MaskedInvQuadLogdet.apply(b, *parts))


def with_rows(
    b: Float[Tensor, "F 1+p"], parts: Sequence[Tensor], rows: DenseRows
) -> tuple[
    Float[Tensor, "F F"], Float[Tensor, "F 1+p"], Float[Tensor, "1+p 1+p"], Float[Tensor, ""]
]:
    """A and B with the terms of further rows; VᵀN⁻¹V and log|N| of these."""
    features, columns, logdet = rows.whitened()
    a = masked(parts) + features.mT @ features
    return a, b + features.mT @ columns, columns.mT @ columns, logdet


def structured(expansion: Expansion, groups: Sequence[Group]) -> Expansion:
    """The expansion with all the structure that the readings leave it: Kronecker products need
    whole vectors with one noise."""
    whole = len(groups) == 1 and groups[0].statistics.pattern.complete
    return expansion if whole else expansion.general()


def evidence_of(
    groups: Sequence[Group], explained: Float[Tensor, "*b 1+p 1+p"], logdet: Float[Tensor, "*b"]
) -> Evidence:
    """From BᵀA⁻¹B and log|A|."""
    white, white_logdet = zip(*map(_white, groups), strict=True)
    return Evidence(sum(white) - explained, logdet + sum(white_logdet))


def _white(group: Group) -> tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]:
    """Vᵀ N⁻¹ V and log|N| of the noise N of all readings."""
    statistics, noise = group
    pattern = statistics.pattern
    precision = pattern.precision(noise.precision)
    square = (precision * statistics.second_moment).sum((-1, -2))[..., None, None]
    total = pattern.embed((precision @ statistics.total.unsqueeze(-1)).mT).mT
    ones = 0
    for own, e in zip(statistics.moments, pattern.basis(precision), strict=True):
        ones = ones + own.mass * pattern.embed(pattern.embed(precision @ e).mT)
    ones = ones.expand(*total.shape[:-2], -1, -1)
    white = torch.cat(
        [torch.cat([square, total.mT], dim=-1), torch.cat([total, ones], dim=-1)], dim=-2
    )
    logdet = statistics.count * noise.logdet - pattern.num_values * statistics.weights.log
    return white, logdet


def normal_equations(
    expansion: FeatureExpansion, groups: Sequence[Group]
) -> tuple[Float[Tensor, "*b F 1+p"], list[Tensor]]:
    """B, and C[c,c], M, P of every part of A = I + Σ C[c,c] ∘ (M P Mᵀ)."""
    b, ones, parts = 0, 0, []
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        b = b + (expansion.gather(statistics.cross @ precision) * m).sum(-1, keepdim=True)
        grams = statistics.gathered(expansion)
        for gram, own, e in zip(grams, statistics.moments, pattern.basis(precision), strict=True):
            seen = precision @ e
            sums = expansion.gather(own.column_sum.unsqueeze(-1))
            ones = ones + sums * pattern.embed(m @ seen)
            parts += [gram, m, seen]
    return torch.cat([b, ones.expand(*b.shape[:-1], -1)], dim=-1), parts


def kronecker_equations(
    expansion: KroneckerExpansion, statistics: Statistics, noise: Noise
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b r r"], Float[Tensor, "*b 1+p 2*D r"]]:
    """S C S, G = LᵀΣ⁻¹L and the B_i, with A = I + SCS ⊗ G and the columns of B being vec B_i."""
    scales, mixing = expansion.scales, expansion.mixing
    whitened = noise.precision @ mixing  # Σ⁻¹L
    gram = scales * statistics.gram * scales.mT
    cross = scales * (statistics.cross @ whitened)
    sums = scales * statistics.column_sum.unsqueeze(-1)  # (*b, 2D, 1)
    ones = sums.unsqueeze(-3) * whitened.unsqueeze(-2)  # (*b, p, 2D, r)
    cross = cross.unsqueeze(-3)
    batch = torch.broadcast_shapes(cross.shape[:-3], ones.shape[:-3])
    both = [t.expand(*batch, *t.shape[-3:]) for t in (cross, ones)]
    return gram, mixing.mT @ whitened, torch.cat(both, dim=-3)


def weight_posterior(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> WeightPosterior:
    """The posterior given vectors y of mean zero at x, by the cheaper of the two algebras."""
    expansion, y = expansion.double(), y.double()
    zero = torch.zeros_like(y[..., 0, :])
    if prefers_dual(expansion, x.shape[-2]):
        features = expansion.features(x.double())
        noisy = noisy_covariance(features, noise.covariance)
        return dual_posterior(expansion, features, noisy, with_ones(y), zero)[0]
    groups = [Group(Statistics.of(x, y, expansion.phi), noise)]
    return statistics_posterior(expansion, groups, zero)[0]


def dual_posterior(
    expansion: Expansion,
    features: Float[Tensor, "*b M F"],
    noisy: Float[Tensor, "*b M M"],
    columns: Float[Tensor, "*b M 1+p"],
    mean: Float[Tensor, "*b p"] | None,
) -> tuple[DualPosterior, Evidence]:
    """The posterior by way of K and noise of M numbers, V = [y, 1⊗I_p], all in float64; with the
    mean of largest evidence where none is given."""
    factor, alpha, evidence = conditioned(noisy, columns, mean)
    whitened = torch.linalg.solve_triangular(factor, features, upper=False)
    return DualPosterior(expansion, features.mT @ alpha, whitened), evidence


def conditioned(
    noisy: Float[Tensor, "*b M M"],
    columns: Float[Tensor, "*b M 1+p"],
    mean: Float[Tensor, "*b p"] | None,
) -> tuple[Float[Tensor, "*b M M"], Float[Tensor, "*b M 1"], Evidence]:
    """L with L Lᵀ the covariance of M numbers, α = (L Lᵀ)⁻¹(y − c), and the evidence of V."""
    factor = cholesky(noisy)
    half = torch.linalg.solve_triangular(factor, columns, upper=False)
    logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
    evidence = Evidence(half.mT @ half, logdet)
    alpha = torch.linalg.solve_triangular(factor.mT, half @ _residual(evidence, mean), upper=True)
    return factor, alpha, evidence


def _residual(evidence: Evidence, mean: Float[Tensor, "*b p"] | None) -> Float[Tensor, "*b 1+p 1"]:
    """[1; −c], with which V becomes y − c."""
    mean = evidence.best_mean() if mean is None else mean
    return torch.cat([torch.ones_like(mean[..., :1]), -mean], dim=-1).unsqueeze(-1)


def statistics_posterior(
    expansion: Expansion,
    groups: Sequence[Group],
    mean: Float[Tensor, "*b p"] | None,
    rows: DenseRows | None = None,
) -> tuple[WeightPosterior, Evidence]:
    """The posterior from the statistics alone, and the evidence from the same factorisation; with
    the mean of largest evidence where none is given; and from further rows, written out."""
    if rows is not None:
        expansion = expansion.general()
        a, b, white, logdet = with_rows(*normal_equations(expansion, groups), rows)
        return _primal(expansion, groups, mean, (a, b), (white, logdet))
    expansion = structured(expansion, groups)
    if isinstance(expansion, KroneckerExpansion):
        c, g, b = kronecker_equations(expansion, *groups[0])
        if not g.requires_grad:  # eigenvectors of equal eigenvalues have no derivative
            return _kronecker_posterior(expansion, groups, mean, (c, g, b))
        expansion = expansion.general()
    b, parts = normal_equations(expansion, groups)
    return _primal(expansion, groups, mean, (masked(parts), b))


def _primal(
    expansion: FeatureExpansion,
    groups: Sequence[Group],
    mean: Float[Tensor, "*b p"] | None,
    equations: tuple[Tensor, Tensor],
    further: tuple[Tensor, Tensor] = (0.0, 0.0),
) -> tuple[PrimalPosterior, Evidence]:
    a, b = equations
    factor = psd_safe_cholesky(a)
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
    evidence = evidence_of(groups, half.mT @ half - further[0], logdet + further[1])
    theta = torch.linalg.solve_triangular(factor.mT, half @ _residual(evidence, mean), upper=True)
    return PrimalPosterior(expansion, theta, factor), evidence


def _kronecker_posterior(
    expansion: KroneckerExpansion,
    groups: Sequence[Group],
    mean: Float[Tensor, "*b p"] | None,
    equations: tuple[Tensor, Tensor, Tensor],
) -> tuple[KroneckerPosterior, Evidence]:
    _, u, factor, rotated = diagonalised(*equations)
    solved = torch.cholesky_solve(rotated, factor)  # (*b, r, 2D, 1+p)
    explained = (rotated.mT @ solved).sum(-3)
    logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum((-1, -2))
    evidence = evidence_of(groups, explained, logdet)
    theta = unrotated(solved @ _residual(evidence, mean).unsqueeze(-3), u).flatten(-2)
    return KroneckerPosterior(expansion, theta.mT, u, factor), evidence
