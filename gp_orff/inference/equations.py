"""The normal equations of feature weights: the evidence of observations of vectors.

With noise covariance Σ (p×p, shared by all points), columns c and directions M of the features,

    A = I_F + C[c,c] ∘ (M Σ⁻¹ Mᵀ) ,   b = Σ_j (Z[c] Σ⁻¹ ∘ M)[:, j] ,
    yᵀ(K + I⊗Σ)⁻¹y = tr(Σ⁻¹Y₂) − bᵀA⁻¹b ,   log|K + I⊗Σ| = log|A| + N log|Σ| .

The same equations with V = [y, 1⊗I_p] and B in place of y and b give the evidence for every
constant mean.

Each group of observations has its own statistics, pattern and noise, and adds its terms to A, B,
tr(Σ⁻¹Y₂) and N log|Σ|. For every weight a_k of its pattern it has a matrix C, with M restricted to
the observed components.

For separable kernels, A = I + S C S ⊗ LᵀΣ⁻¹L. This takes one eigendecomposition of size r. Then it
takes r Cholesky factorisations of size 2D, or one eigendecomposition of size 2D (`separable`). With
fewer values than features, the dual algebra factorises K + I⊗Σ. For a separable kernel, this
matrix has blocks of size N.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, combinations
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from gp_orff.data.noise import Noise, Noises, independent, is_regular
from gp_orff.data.observations import (
    LinearObservations,
    Observations,
    PointObservations,
    TruncatedVariance,
    block_diagonal,
    less_reference,
)
from gp_orff.data.statistics import Statistics
from gp_orff.data.tracks import TrackObservations
from gp_orff.features.expansion import (
    Expansion,
    FeatureExpansion,
    KroneckerExpansion,
    ScaledExpansion,
    apply_symbol,
)
from gp_orff.inference.posteriors import DualPosterior, PrimalPosterior, WeightPosterior
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    MaskedInvQuadLogdet,
    log_determinant,
    masked_sum,
    seen_by,
)
from gp_orff.inference.separable import (
    DualBlocks,
    EigenBlocks,
    KroneckerInvQuadLogdet,
    KroneckerPosterior,
    Response,
    Solution,
)
from gp_orff.kernels.base import cholesky, size_of

# The protocol of normal equations, and the evidence from their parts.
#
# Two functions choose the algebra:
#
# 1. `prefers_dual` chooses between the primal and the dual algebra. The primal algebra factorises
#    A, with one row for each feature. The dual algebra factorises K + N, with one row for each
#    observed value. The smaller cubic cost decides.
# 2. `normal_equations` chooses among the primal ones. `Kronecker` is for a separable kernel and
#    whole vectors with one noise, because eigenvectors of the outputs split A into blocks. `Primal`
#    is for all other data. For very many features of a lattice, iterations replace the
#    factorisation (`inference.iterative`).
#
# All of them treat the constant mean in the same way. V = [y, H(1⊗I_p)] has a column for the data
# and one for each constant. With E = VᵀK⁻¹V, the quadratic form of the data y − H c is that of E
# with the contrast (1, −c), for every mean c. Thus c need not be known before the factorisation.


class Group(NamedTuple):
    """The statistics of observations with the same pattern of components and the same noise."""

    statistics: Statistics
    noise: Noise  # of one observation


class NormalEquations(ABC):
    """The normal equations A E[θ] = B [1; −c] of the weights θ of features, for any constant mean
    c."""

    sums: "Primal | None" = None  # the equations, if A follows from statistics only

    @abstractmethod
    def evidence(self) -> Evidence:
        """Return the evidence. It takes one factorisation, and one inverse for its gradient."""

    @abstractmethod
    def posterior(self, mean: Float[Tensor, "*b p"] | None) -> tuple[WeightPosterior, Evidence]:
        """Return the posterior of the weights and the evidence, from one factorisation.

        Both are for the constant mean c = `mean`. By default, this is the mean with the largest
        evidence.
        """


def evidence_of(
    noise_terms: Sequence[tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]],
    explained: Float[Tensor, "*b 1+p 1+p"],
    logdet: Float[Tensor, "*b"],
) -> Evidence:
    """Return the evidence from VᵀN⁻¹V and log|N| of each part of the noise N, BᵀA⁻¹B and log|A|."""
    squares, logdets = zip(*noise_terms, strict=True)
    square = sum(squares)
    return Evidence(square - explained, logdet + sum(logdets), square[..., 1:, 1:].detach())


def noise_terms(group: Group) -> tuple[Float[Tensor, "*b 1+p 1+p"], Float[Tensor, "*b"]]:
    """Return VᵀN⁻¹V and log|N| for the noise covariance N of a group."""
    statistics, noise = group
    pattern = statistics.pattern
    precision = pattern.precision(noise.precision)
    square = (precision * statistics.second_moment).sum((-1, -2))[..., None, None]
    # `embed` puts the observed components in their places among all p. The others are zero.
    total = pattern.embed((precision @ statistics.total.unsqueeze(-1)).mT).mT
    ones = 0
    for moments, e in zip(statistics.moments, pattern.basis(precision), strict=True):
        ones = ones + moments.mass * pattern.embed(pattern.embed(precision @ e).mT)
    ones = ones.expand(*total.shape[:-2], -1, -1)
    quad = torch.cat(
        [torch.cat([square, total.mT], dim=-1), torch.cat([total, ones], dim=-1)], dim=-2
    )
    # A weight w divides the noise covariance of an observation: log|Σ/w| = log|Σ| − v log w.
    logdet = statistics.count * noise.logdet - pattern.num_values * statistics.weights.log
    return quad, logdet


# Observations with a matrix row for each value, and the dual algebra, which factorises K + I⊗Σ.
#
# 1. `DenseRows.of` computes H Φ, where H are the observations with their symbols and directions.
#    The variance that the features omit is part of the noise.
# 2. `Dual` forms HΦΦᵀHᵀ + N and factorises it. By the push-through identity, the weights have the
#    posterior mean ΦᵀHᵀ(HΦΦᵀHᵀ + N)⁻¹(y − Hc). This needs no matrix A of the features.
# 3. Observations without sums over the data, such as integrals, are rows in the primal algebra too.
#    After whitening, they add ΦᵀN⁻¹Φ to A.


@dataclass(frozen=True)
class DenseRows:
    """Observations with one matrix row for each value.

    Attributes:
        features: H Φ, the features in the linear maps of the observations, (M, F).
        design: V (M, 1 + p), the observed values and the effects of a constant mean.
        noise: the noise covariance (M, M).
    """

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
        """Return the rows of observations, with gradients of the hyperparameters of the expansion.

        The noise includes the variance `truncated` that the expansion omits.
        """
        points, symbol, space = observations.points, observations.symbol, observations.space
        is_field = symbol.is_identity
        image = expansion if is_field else apply_symbol(symbol, expansion, space)
        features = observations.rows(less_reference(image.features, points, symbol, space))
        noise = observations.noise_covariance(noises, truncated)
        return cls(features, observations.design(expansion.num_outputs), noise)

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


@dataclass(frozen=True)
class Dual(NormalEquations):
    """The dual equations, which factorise the covariance of all values. They are cheaper than the
    primal equations if there are fewer values than features."""

    expansion: Expansion
    rows: DenseRows

    @property
    def _covariance(self) -> Float[Tensor, "*b M M"]:
        return self.rows.features @ self.rows.features.mT + self.rows.noise

    def evidence(self) -> Evidence:
        return dense_evidence(self._covariance, self.rows.design)

    def solve(self, v: Float[Tensor, "*b M k"]) -> Float[Tensor, "*b M k"]:
        """Return the product of the inverse covariance of the observed values with v."""
        return torch.linalg.solve(self._covariance, v)

    def posterior(self, mean):
        features = self.rows.features
        factor, _, evidence = data = Whitened.of_covariance(self._covariance, self.rows.design)
        theta = mean_and_response(features.mT @ data.solved(mean))
        whitened = torch.linalg.solve_triangular(factor, features, upper=False)
        return DualPosterior(self.expansion, *theta, whitened), evidence


def dual_of_vectors(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> Dual:
    """The dual algebra of vectors y at x."""
    covariance = independent(noise.covariance, x.shape[-2])
    return Dual(expansion, DenseRows(expansion.features(x.double()), with_ones(y), covariance))


def with_ones(y: Float[Tensor, "*b N p"]) -> Float[Tensor, "*b N*p 1+p"]:
    """V = [y, 1⊗I_p] for vectors y."""
    eye = torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)
    ones = eye.expand(*y.shape, y.shape[-1]).flatten(-3, -2)  # 1⊗I_p
    return torch.cat([y.flatten(-2).unsqueeze(-1), ones], dim=-1)


def dense_evidence(
    covariance: Float[Tensor, "*b M M"], design: Float[Tensor, "*b M 1+p"]
) -> Evidence:
    """Return the evidence of V = `design` for the covariance matrix of all values with noise."""
    size = size_of(covariance)
    # A covariance in small units, such as 10⁻³⁰, would underflow in products of the gradient.
    quad, logdet = InvQuadLogdet.apply(covariance / size, design)
    logdet = logdet + covariance.shape[-1] * size.log()[..., 0, 0]
    return Evidence(quad / size, logdet, seen_by(design, covariance.diagonal(dim1=-1, dim2=-2)))


class Whitened(NamedTuple):
    """The Cholesky factor L of A, the product L⁻¹B, and the evidence."""

    factor: Float[Tensor, "*b n n"]
    half: Float[Tensor, "*b n 1+p"]
    evidence: Evidence

    @classmethod
    def of(
        cls,
        factor: Float[Tensor, "*b n n"],
        b: Float[Tensor, "*b n 1+p"],
        evidence_of: Callable[[Tensor, Tensor], Evidence],
    ) -> "Whitened":
        """Return L⁻¹B and the evidence, which `evidence_of` computes from BᵀA⁻¹B and log|A|."""
        half = torch.linalg.solve_triangular(factor, b, upper=False)
        return cls(factor, half, evidence_of(half.mT @ half, log_determinant(factor)))

    @classmethod
    def of_covariance(
        cls, covariance: Float[Tensor, "*b M M"], design: Float[Tensor, "*b M 1+p"]
    ) -> "Whitened":
        """Return L⁻¹B and the evidence for B = V and the covariance A = K + N of all values.

        Only the lower triangle of `covariance` is read.
        """
        seen = seen_by(design, covariance.diagonal(dim1=-1, dim2=-2))
        return cls.of(cholesky(covariance), design, partial(Evidence, seen=seen))

    def solved(self, mean: Float[Tensor, "*b p"] | None) -> Float[Tensor, "*b n 1+p"]:
        """Return A⁻¹B if V is replaced by [y − c, 1⊗I_p], with the constant mean c = `mean`."""
        residual = self.half @ self.evidence.contrasts(mean)
        return torch.linalg.solve_triangular(self.factor.mT, residual, upper=True)


def mean_and_response(
    solved: Float[Tensor, "*b n 1+p"],
) -> tuple[Float[Tensor, "*b n 1"], Float[Tensor, "*b n p"]]:
    """Split the result of `solved` into two parts: the solution for y − c, and the solutions for a
    unit constant in each output."""
    return solved[..., :1], solved[..., 1:]


# Block means of observations along directions as rows, whitened track by track.
#
# The noise is correlated along a track and independent between tracks. Tracks of similar lengths
# form a batch of covariances R. Shorter tracks are padded with rows of an identity and with zero
# values, which contribute nothing to products or to log|R|.


@dataclass(frozen=True)
class TrackRows:
    """Block means along tracks with one matrix row for each mean: H Φ, V, and the noise covariances
    R of the tracks."""

    features: Float[Tensor, "T F"]
    design: Float[Tensor, "T 1+p"]
    noise: Sequence[tuple[Int[Tensor, "b t"], Float[Tensor, "b t t"]]]  # rows, −1 for padding; R

    @classmethod
    def of(
        cls,
        part: TrackObservations,
        expansion: Expansion,
        averages: Float[Tensor, "M p*T"],
        noises: Noises,
        truncated: Float[Tensor, "p p"] | None,
    ) -> "TrackRows":
        """The rows. `averages` are the columns of the expansion, averaged by `averages_along`."""
        features = expansion.feature_values(averages).mT
        noise = tuple(part.covariances(noises, truncated))
        return cls(features, part.design(expansion.num_outputs), noise)

    def whitened(self) -> tuple[Float[Tensor, "m F"], Float[Tensor, "m 1+p"], Float[Tensor, ""]]:
        """R^{−½}Φ, R^{−½}V and log|R|, with zeros in the rows of the padding."""
        every, halves, logdet = torch.cat([self.features, self.design], dim=-1), [], 0
        for rows, covariance in self.noise:
            factor = torch.linalg.cholesky(covariance)
            values = every[rows] * (rows >= 0).unsqueeze(-1)
            half = torch.linalg.solve_triangular(factor, values, upper=False)
            halves.append(half.flatten(0, 1))
            logdet = logdet + 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum()
        sizes = self.features.shape[-1], self.design.shape[-1]
        return *torch.cat(halves).split(sizes, dim=-1), logdet


Rows = DenseRows | TrackRows


# The primal algebra, for any expansion and any groups of observations.
#
# 1. Every group adds to B the sums Z = φᵀy and s = φᵀ1. They are weighted by its noise precision,
#    and restricted to the components that its pattern observes (`_right_hand_side`).
# 2. Every group adds to A the elementwise product of the Gram matrix C of the columns and M P Mᵀ
#    (`masked_parts`). Components have one such term. Observations along directions u have one for
#    each product u_i u_j, which is the weight of a point in C.
# 3. An expansion with complex directions has two layers of real features. A has cross terms between
#    them only if the precision couples them (`are_coupled`). Harmonic waves are an example: their
#    horizontal and vertical components are in different layers.
# 4. Without cross terms and rows, `MaskedInvQuadLogdet` differentiates the evidence. It takes few
#    passes over F×F matrices, and needs no derivative by C for fixed frequencies.


@dataclass(frozen=True)
class WeightEquations(NormalEquations):
    """A = I + Σ C[c,c] ∘ (M P Mᵀ) + Σ ΦᵀN⁻¹Φ, with the last sum over dense rows, and B."""

    expansion: FeatureExpansion | ScaledExpansion
    groups: Sequence[Group]
    rows: Sequence[Rows] = ()

    @cached_property
    def general(self) -> FeatureExpansion:
        return self.expansion.general()

    @cached_property
    def whitened(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return N^{−½}Φ, N^{−½}V and log|N| of the rows."""
        return [rows.whitened() for rows in self.rows]

    @cached_property
    def b(self) -> Float[Tensor, "*b F 1+p"]:
        layers = self.general.layers if self.groups else ()
        of_rows = [features.mT @ design for features, design, _ in self.whitened]
        return sum([*(_right_hand_side(layer, self.groups) for layer in layers), *of_rows])

    def evidence_of(self, explained: Tensor, logdet: Tensor) -> Evidence:
        """The evidence from BᵀA⁻¹B and log|A|."""
        row_terms = [(design.mT @ design, logdet) for _, design, logdet in self.whitened]
        return evidence_of([*map(noise_terms, self.groups), *row_terms], explained, logdet)


@dataclass(frozen=True)
class Primal(WeightEquations):
    """The primal equations, which factorise the matrix A (F, F) of the features."""

    @property
    def sums(self) -> "Primal | None":
        return None if self.rows else self

    def evidence(self) -> Evidence:
        if self._products is None:
            return self.evidence_of(*InvQuadLogdet.apply(self._a, self.b))
        return self.evidence_of(*MaskedInvQuadLogdet.apply(self.b, *self._products))

    def posterior(self, mean):
        weights = Whitened.of(cholesky(self._a, unit=1.0), self.b, self.evidence_of)
        theta = mean_and_response(weights.solved(mean))
        return PrimalPosterior(self.general, *theta, weights.factor), weights.evidence

    @cached_property
    def _products(self) -> list[Tensor] | None:
        """C[c,c], M and P of all terms of A; None if A has other terms than C[c,c] ∘ (M P Mᵀ)."""
        if self.rows:
            return None
        independent = all(is_diagonal(group.noise) for group in self.groups)
        if independent and self.expansion.is_scaled:
            return _scaled_parts(self.expansion, self.groups)
        layers = self.general.layers
        if are_coupled(layers, self.groups):
            return None
        return [*chain.from_iterable(masked_parts(layer, self.groups) for layer in layers)]

    @property
    def _a(self) -> Float[Tensor, "*b F F"]:
        if self._products is not None:
            return masked_sum(self._products)
        of_rows = sum(features.mT @ features for features, *_ in self.whitened)
        if not self.groups:
            return of_rows + torch.eye(len(of_rows)).to(of_rows)
        return information(self.general, self.groups) + of_rows


def _right_hand_side(
    expansion: FeatureExpansion, groups: Sequence[Group]
) -> Float[Tensor, "*b F 1+p"]:
    """B for real directions."""
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
    """Return C[c,c], M and P of every term of A = I + Σ C[c,c] ∘ (M P Mᵀ), in one list."""
    parts = []
    for statistics, noise in groups:
        pattern = statistics.pattern
        m, precision = pattern.select(expansion.directions), pattern.precision(noise.precision)
        grams = statistics.feature_grams(expansion)
        for gram, e in zip(grams, pattern.basis(precision), strict=True):
            parts += [gram, m, precision @ e]
    return parts


def information(expansion: FeatureExpansion, groups: Sequence[Group]) -> Float[Tensor, "*b F F"]:
    """Return A = I + Σ C[c,c] ∘ (M P Mᵀ).

    For complex directions, M consists of layers. The sum then also includes all pairs of layers.
    """
    layers = expansion.layers
    a = masked_sum([*chain.from_iterable(masked_parts(layer, groups) for layer in layers)])
    if are_coupled(layers, groups):
        for left, right in combinations(layers, 2):
            cross = _cross_information(left, right, groups)
            a = a + cross + cross.mT
    return a


@torch.no_grad()
def are_coupled(layers: Sequence[FeatureExpansion], groups: Sequence[Group]) -> bool:
    """Return whether M P M′ᵀ is nonzero for some pair of layers.

    The waves of a harmonic field have their horizontal components in one layer, and the vertical
    component in the other. They are coupled by correlated noise and by observations along an
    oblique direction.
    """
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


# Fixed fields times scales: features s_f u_f(x), under noise that is independent between outputs.
#
# With w_i the precision of value i of an observation, and (H_n u_f)_i that value of the field,
#
#     A = I + Σ_i w_i G_i ∘ s sᵀ ,    (G_i)_ff′ = Σ_n (H_n u_f(x_n))_i (H_n u_f′(x_n))_i .
#
# Hyperparameters change only the amplitude s of a harmonic wave. The matrices G_i are then computed
# once for each grid, and are stored with the statistics. Every evaluation of the evidence
# multiplies them by scales and precisions.


def _scaled_parts(expansion: ScaledExpansion, groups: Sequence[Group]) -> list[Tensor]:
    """G, s and w for every value of the observations of every group."""
    parts, scales = [], expansion.scales.unsqueeze(-1)
    for statistics, noise in groups:
        key = expansion.units, expansion.columns
        grams = statistics.kept(lambda own: _grams(own, expansion.fixed), key)
        weights = noise.precision.diagonal(dim1=-1, dim2=-2)
        for gram, weight in zip(grams, weights.unbind(-1), strict=True):
            parts += [gram, scales, weight[..., None, None]]
    return parts


@torch.no_grad()
def _grams(statistics: Statistics, fields: FeatureExpansion) -> list[Float[Tensor, "F F"]]:
    """G_i for every value i of an observation."""
    grams = []
    for weights in torch.eye(statistics.pattern.num_values, dtype=torch.float64):
        # This precision selects value i, so that `information` minus the identity is G_i.
        unit = Noise(torch.diag(weights), torch.diag(weights), torch.zeros(()))
        gram = information(fields, [Group(statistics, unit)])
        gram.diagonal().sub_(1)
        grams.append(gram)
    return grams


def is_diagonal(noise: Noise) -> bool:
    """Whether the noise is independent between the values of an observation."""
    precision = noise.precision.detach()
    return torch.equal(precision, torch.diag_embed(precision.diagonal(dim1=-1, dim2=-2)))


# The algebra of separable kernels, primal and dual.
#
# The second factor of A = I + SCS ⊗ G is a small matrix of outputs. With G = U diag(λ) Uᵀ, A splits
# into r blocks I + λ_j SCS, whose size is the number of columns. In the dual algebra, a matrix T
# multiplies the vectors and makes the noise covariance an identity. It has the same form with ΨΨᵀ
# of the points in place of SCS.
#
# The eigenvectors U have no derivative if eigenvalues coincide, such as for a kernel with equal
# outputs. The evidence therefore has a special gradient (`KroneckerInvQuadLogdet`). A posterior
# that is differentiated uses the general algebra instead.


@dataclass(frozen=True)
class Kronecker(NormalEquations):
    """The algebra of separable kernels: A = I + SCS ⊗ G, G = LᵀΣ⁻¹L."""

    expansion: KroneckerExpansion
    group: Group

    @cached_property
    def _equations(
        self,
    ) -> tuple[
        Float[Tensor, "*b M M"],
        Float[Tensor, "*b r r"],
        Float[Tensor, "*b M r"],
        Float[Tensor, "*b M 1"],
        Float[Tensor, "*b 1+p 1+r"],
    ]:
        """S C S, G = LᵀΣ⁻¹L, Z, s and E, where A = I + SCS ⊗ G and B = [vec Z, s⊗I] Eᵀ."""
        statistics, noise = self.group
        scales, mixing = self.expansion.scales, self.expansion.mixing
        whitened = noise.precision @ mixing  # Σ⁻¹L
        gram = scales * statistics.gram * scales.mT
        cross = scales * (statistics.cross @ whitened)
        sums = scales * statistics.column_sum.unsqueeze(-1)
        outputs = pad(whitened, (1, 0, 1, 0))  # 1 ⊕ Σ⁻¹L
        outputs[..., 0, 0] = 1
        return gram, mixing.mT @ whitened, cross, sums, outputs

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
        response = Response(solution.p, solution.u, solution.u.mT @ outputs[..., 1:, 1:].mT)
        weights = self.expansion, theta, response
        return KroneckerPosterior(*weights, solution.u, solution.blocks), evidence

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        return evidence_of([noise_terms(self.group)], explained, logdet)


@dataclass(frozen=True)
class KroneckerDual(NormalEquations):
    """The dual equations of a separable kernel, for complete vectors at fewer points than columns.

    Let Ψ = φS, and let T whiten the noise, T⁻¹T⁻ᵀ = Σ. The vectors times T have the covariance I +
    ΨΨᵀ ⊗ G, where G = T L (T L)ᵀ.
    """

    expansion: KroneckerExpansion
    x: Float[Tensor, "*b N d"]
    y: Float[Tensor, "*b N p"]
    noise: Noise

    @cached_property
    def _rows(self) -> Float[Tensor, "*b N M"]:
        """Ψ."""
        return self.expansion.phi.values(self.x.double()) * self.expansion.scales.mT

    @cached_property
    def _whitening(self) -> Float[Tensor, "*b p p"]:
        """T."""
        factor = torch.linalg.cholesky(self.noise.covariance)
        eye = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
        return torch.linalg.solve_triangular(factor, eye, upper=False)

    @cached_property
    def _equations(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ΨΨᵀ, G, and Y Tᵀ and 1, where V has the columns [vec Y, 1⊗I]."""
        rows, mixing = self._rows, self._whitening @ self.expansion.mixing
        whitened = self.y @ self._whitening.mT
        return rows @ rows.mT, mixing @ mixing.mT, whitened, torch.ones_like(self.y[..., :1])

    def evidence(self) -> Evidence:
        return self._evidence(*KroneckerInvQuadLogdet.apply(*self._equations))

    @property
    def _differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self._equations)

    @property
    def _blocks(self) -> tuple[Float[Tensor, "*b p p"], EigenBlocks]:
        """The eigenvectors of G, and (I + λ_j ΨΨᵀ)⁻¹."""
        covariance, g, *_ = self._equations
        eigenvalues, u = torch.linalg.eigh(g)
        return u, EigenBlocks.of(covariance, eigenvalues.clamp_min(0))

    def solve(self, v: Float[Tensor, "*b N*p k"]) -> Float[Tensor, "*b N*p k"]:
        """Return the product of the inverse covariance of the observed values with v."""
        if self._differentiated:
            return self._written_out.solve(v)
        u, blocks = self._blocks
        outputs = self._whitening.mT @ u
        rows = torch.einsum("...npk,...pj->...jkn", v.unflatten(-2, self.y.shape[-2:]), outputs)
        return torch.einsum("...jkn,...pj->...npk", blocks.solve(rows), outputs).flatten(-3, -2)

    def posterior(self, mean):
        if self._differentiated:
            return self._written_out.posterior(mean)
        *_, whitened, ones = self._equations
        u, blocks = self._blocks
        solution = Solution.with_blocks(u, blocks, whitened, ones)
        evidence = self._evidence(solution.quad, blocks.logdet())
        alpha = solution.combine(self._outputs.mT @ evidence.contrast(mean))
        mixing = self._whitening @ self.expansion.mixing
        # The push-through identity gives θ = (Ψᵀ ⊗ (T L)ᵀ) α, from solutions α for the data.
        theta = self._rows.mT @ alpha.unflatten(-2, whitened.shape[-2:]).squeeze(-1) @ mixing
        constants = solution.p @ self._rows, mixing.mT @ u, u.mT @ self._whitening
        eigenvalues, u = torch.linalg.eigh(mixing.mT @ mixing)
        inverse = DualBlocks(eigenvalues.clamp_min(0), blocks.mu, self._rows.mT @ blocks.v)
        theta = theta.flatten(-2).unsqueeze(-1)
        return KroneckerPosterior(self.expansion, theta, Response(*constants), u, inverse), evidence

    def _evidence(self, quad: Tensor, logdet: Tensor) -> Evidence:
        quad = self._outputs @ quad @ self._outputs.mT
        return Evidence(quad, logdet + self.y.shape[-2] * self.noise.logdet)

    @property
    def _outputs(self) -> Float[Tensor, "*b 1+p 1+p"]:
        """1 ⊕ Tᵀ, which maps quantities for [vec Y Tᵀ, 1⊗I] to those for V."""
        outputs = pad(self._whitening.mT, (1, 0, 1, 0))
        outputs[..., 0, 0] = 1
        return outputs

    @property
    def _written_out(self) -> Dual:
        """These equations with one row for each value, which are differentiable."""
        return dual_of_vectors(self.expansion, self.x, self.y, self.noise)


# The choice of the algebra for an expansion and observations.


def prefers_dual(expansion: Expansion, num_points: float, whole: bool = True) -> bool:
    """Return whether factorising K + I⊗Σ, with N·p rows, is cheaper than factorising A.

    Args:
        expansion: the features.
        num_points: N.
        whole: whether all observations are complete vectors with the same noise. For a separable
            kernel, K + I⊗Σ then has p blocks of size N.
    """
    if whole and has_blocks(expansion):
        return num_points**3 * expansion.num_outputs < expansion.cholesky_cost
    return (num_points * expansion.num_outputs) ** 3 < expansion.cholesky_cost


def has_blocks(expansion: Expansion) -> bool:
    """Return whether factorising the blocks of K + I⊗Σ is cheaper than factorising the whole
    matrix.

    A Cholesky factor of the matrix takes (N p)³/3 operations. The eigendecomposition for the blocks
    takes about 10 N³.
    """
    return expansion.is_kronecker and expansion.num_outputs > 2


def normal_equations(
    expansion: Expansion, groups: Sequence[Group], dense_rows: Sequence[Rows] = ()
) -> NormalEquations:
    """Return the normal equations for the sums over groups of observations, and for dense rows.

    Kronecker algebra is used for a separable kernel if the data are one group of complete vectors
    with the same noise covariance, without dense rows. Otherwise, the result is a `Primal`.

    Args:
        expansion: the features.
        groups: the statistics and the noise of each group.
        dense_rows: further observations, with one row of features for each value.
    """
    one_noise = len(groups) == 1 and groups[0].statistics.pattern.complete and not dense_rows
    if one_noise and expansion.is_kronecker:
        return Kronecker(expansion, groups[0])
    return Primal(expansion, groups, dense_rows)


def whole_vectors(observations: Sequence[Observations]) -> bool:
    """Whether all observations are whole vectors with the same noise."""
    first, *others = observations
    return not others and first.pattern.complete and first.weight is None


def dual_equations(
    expansion: Expansion,
    observations: PointObservations,
    further: Sequence[DenseRows],
    noises: Noises,
    delta: Float[Tensor, "p p"] | None,
) -> NormalEquations:
    """Return the dual equations of observations at points and of further rows.

    The covariance `delta` (p, p) is added to the noise of the observations at points.
    """
    parts = observations.observations
    if not parts:
        return Dual(expansion, DenseRows.concatenate(further))
    if has_blocks(expansion) and whole_vectors(parts) and not further:
        (part,) = parts
        noise = noises[part.key.label] + (0 if delta is None else delta)
        # T exists only if Σ + δ is positive definite.
        if is_regular(noise):  # otherwise, the rows below need only a positive definite K + I⊗Σ
            return KroneckerDual(expansion, part.x, part.y, Noise.of(noise))
    truncated = None if delta is None else (delta, torch.zeros_like(delta))
    rows = DenseRows.of(observations, expansion, noises, truncated)
    return Dual(expansion, DenseRows.concatenate([rows, *further]))


def equations_of_vectors(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> NormalEquations:
    """Return the primal or the dual equations of vectors y at x, whichever are cheaper to solve."""
    expansion, y = expansion.double(), y.double()
    if not prefers_dual(expansion, x.shape[-2]):
        return normal_equations(expansion, [Group(Statistics.of(x, y, expansion.phi), noise)])
    if has_blocks(expansion):
        return KroneckerDual(expansion, x, y, noise)
    return dual_of_vectors(expansion, x, y, noise)


# With the noise R_n = L_n L_nᵀ of vector n, the rows of [Φ, V] are whitened by L_n⁻¹, and
#
#     A = I + Σ_n Φ_nᵀR_n⁻¹Φ_n ,    B = Σ_n Φ_nᵀR_n⁻¹V_n .
#
# If every vector has its own precision matrix, there are no sums over the columns φ that all
# vectors share. The features are therefore computed in chunks, and again in the backward pass.


_NUMBERS = 2**24  # elements of the features of a chunk


@dataclass(frozen=True)
class NoiseOfEach(NormalEquations):
    """The primal equations of vectors y at x with a noise covariance R_n for each vector.

    The evidence is differentiable with respect to all tensors.
    """

    expansion: Expansion
    x: Float[Tensor, "*b N d"]
    y: Float[Tensor, "*b N p"]
    noise: Float[Tensor, "*b N p p"]

    def evidence(self) -> Evidence:
        a, b, _ = self._sums
        return self._evidence(*InvQuadLogdet.apply(a, b))

    def posterior(self, mean):
        a, b, _ = self._sums
        weights = Whitened.of(cholesky(a, unit=1.0), b, self._evidence)
        theta = mean_and_response(weights.solved(mean))
        return PrimalPosterior(self.expansion, *theta, weights.factor), weights.evidence

    def _evidence(self, explained: Tensor, logdet: Tensor) -> Evidence:
        factor = torch.linalg.cholesky(self.noise)
        noise_logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum((-1, -2))
        return evidence_of([(self._sums[2], noise_logdet)], explained, logdet)

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, B and VᵀN⁻¹V."""
        features = self.expansion.num_features
        total = sum(
            checkpoint(_gram, self.expansion, *c, use_reentrant=False) for c in self._chunks
        )
        a, b = total[..., :features, :features], total[..., :features, features:]
        eye = torch.eye(features, dtype=a.dtype, device=a.device)
        return eye + a, b, total[..., features:, features:]

    @property
    def _chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size = max(1, _NUMBERS // (self.y.shape[-1] * self.expansion.num_features))
        yield from zip(
            self.x.split(size, -2), self.y.split(size, -2), self.noise.split(size, -3), strict=True
        )


def _gram(
    expansion: Expansion,
    x: Float[Tensor, "*b n d"],
    y: Float[Tensor, "*b n p"],
    noise: Float[Tensor, "*b n p p"],
) -> Float[Tensor, "*b F+1+p F+1+p"]:
    """[Φ, V]ᵀ N⁻¹ [Φ, V] of a chunk."""
    rows = torch.cat([expansion.features(x), with_ones(y)], dim=-1)
    rows = rows.unflatten(-2, (-1, y.shape[-1]))  # (*b, n, p, F+1+p)
    eye = torch.eye(y.shape[-1]).to(noise)
    whitening = torch.linalg.solve_triangular(torch.linalg.cholesky(noise), eye, upper=False)
    half = (whitening @ rows).flatten(-3, -2)
    return half.mT @ half


def equations_with_noise(
    expansion: Expansion,
    x: Float[Tensor, "*b N d"],
    y: Float[Tensor, "*b N p"],
    noise: Float[Tensor, "*b N p p"],
) -> NormalEquations:
    """Return the normal equations of vectors y at x with a noise covariance for each vector.

    They are primal or dual, whichever is cheaper to solve.

    Raises:
        ValueError: a noise covariance is not positive definite.
    """
    expansion, x, y, noise = expansion.double(), x.double(), y.double(), noise.double()
    singular = torch.linalg.cholesky_ex(noise.detach()).info != 0
    if singular.any():
        raise ValueError(
            f"expected positive definite noise covariances, got {int(singular.sum())} of "
            f"{singular.numel()} that are not; drop the observations with unknown noise"
        )
    if not prefers_dual(expansion, x.shape[-2], whole=False):
        return NoiseOfEach(expansion, x, y, noise)
    return Dual(expansion, DenseRows(expansion.features(x), with_ones(y), block_matrix(noise)))


def block_matrix(blocks: Float[Tensor, "*b N p p"]) -> Float[Tensor, "*b N*p N*p"]:
    """The block diagonal matrix of all blocks, one for each point."""
    eye = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("nm,...nij->...nimj", eye, blocks).flatten(-4, -3).flatten(-2, -1)
