"""Prior and posterior covariances, and feature matrices, as LinearOperators."""

import warnings
from collections.abc import Callable
from functools import singledispatch

import linear_operator.settings
import torch
from jaxtyping import Float
from linear_operator.operators import (
    BlockDiagLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    RootLinearOperator,
    to_linear_operator,
)
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.warnings import PerformanceWarning
from torch import Tensor

from gp_orff.data.noise import Noise
from gp_orff.data.statistics import Statistics
from gp_orff.features.assemble import merge
from gp_orff.features.expansion import Expansion
from gp_orff.inference.equations import (
    Group,
    NormalEquations,
    block_matrix,
    equations_of_vectors,
    equations_with_noise,
    normal_equations,
    prefers_dual,
)
from gp_orff.inference.posteriors import FieldDistribution, WeightPosterior

# Base classes of the covariances of this package, as LinearOperators.
#
# gpytorch's `ExactGP` builds covariances of training and test points, adds noise, and slices
# blocks. It then computes products, solutions, determinants and samples. With a dense matrix, each
# of these operations is cubic in the number of points. The classes below preserve the structure:
#
#     FeatureCovariance   + I⊗Σ  →  NoisyFeatureCovariance     evidence, solutions, posterior
#     PosteriorCovariance + I⊗Σ  →  NoisyPosteriorCovariance   samples by parts, Cholesky densities
#
# I⊗Σ may be replaced by known noise with a block R_n for each point. The noise is stored as a stack
# of its blocks, (m·p, p), with m = 1 for I⊗Σ and m = N for known noise.
#
# - Slices of whole points are covariances of fewer points (`_points`). Other slices become dense.
# - A sum preserves the structure if the other summand is block-diagonal noise of a likelihood or
#   jitter (`noise_covariance`), or features at the same points. Otherwise, gpytorch's general
#   algebra is used, with a warning.
# - Computations use float64 for every dtype of the model, because normal equations of features lose
#   too many digits in float32. Results have the dtype of the operator.


def check_finite(y: Tensor) -> None:
    """Raise an error if observations contain NaN or infinity.

    Raises:
        ValueError: an observation is not finite.
    """
    invalid = int((~torch.isfinite(y)).sum())
    if invalid:
        raise ValueError(
            f"expected finite observations, got {invalid} NaN or infinite values among "
            f"{y.numel()}; drop those points, or train and predict under gpytorch.settings."
            'observation_nan_policy("mask"), at a cost cubic in the number of points'
        )


def with_one_batch(*matrices: Float[Tensor, "*_ m n"]) -> tuple[Float[Tensor, "*b m n"], ...]:
    """Return the matrices, expanded to one batch shape, as arguments of one operator."""
    batch = torch.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    return tuple(matrix.expand(*batch, *matrix.shape[-2:]) for matrix in matrices)


class PointwiseOperator(LinearOperator):
    """A covariance between p outputs of points; slices of whole points preserve its structure."""

    num_outputs: int

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        """Return the covariance between the points `rows` and the points `cols`."""
        raise NotImplementedError

    def _getitem(self, row_index, col_index, *batch_indices):
        simple = all(isinstance(i, slice) and i.step in (None, 1) for i in (row_index, col_index))
        if not simple or any(i != slice(None) for i in batch_indices):
            return self._general_getitem(row_index, col_index, *batch_indices)
        sizes, p = self.shape[-2:], self.num_outputs
        rows, cols = (i.indices(n)[:2] for i, n in zip((row_index, col_index), sizes, strict=True))
        points = [slice(start // p, -(-stop // p)) for start, stop in (rows, cols)]
        covariance = self._points(*points)
        offsets = [
            slice(start - block.start * p, stop - block.start * p)
            for (start, stop), block in zip((rows, cols), points, strict=True)
        ]
        if all(i == slice(0, n) for i, n in zip(offsets, covariance.shape[-2:], strict=True)):
            return covariance
        return to_linear_operator(covariance.to_dense()[..., offsets[0], offsets[1]])

    def _general_getitem(self, row_index, col_index, *batch_indices) -> LinearOperator:
        """Return gpytorch's result for indices that are not slices of rows and columns."""
        return super()._getitem(row_index, col_index, *batch_indices)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        if diag.dim() and diag.shape[-1] != 1:
            return super().add_diagonal(diag)
        constant = diag.expand(*self.batch_shape, 1)
        return self + ConstantDiagLinearOperator(constant, diag_shape=self.shape[-1])

    def _mul_matrix(self, other: LinearOperator) -> LinearOperator:
        if other.shape[-2:] == (1, 1):  # a batch of constants for one matrix
            return self._mul_constant(other.to_dense()[..., 0, 0])
        if self.is_square:
            _warn_lost_structure(f"{type(self).__name__} times {type(other).__name__} elementwise")
        return to_linear_operator(self.to_dense() * other.to_dense())


class RootedOperator(PointwiseOperator):
    """A covariance R Rᵀ that is sampled with R, so that no n·p square matrix is factorised."""

    def _root(self) -> Float[Tensor, "*b n*p q"]:
        """Return the root R."""
        raise NotImplementedError

    def root_decomposition(self, method: str | None = None) -> RootLinearOperator:
        """Return a root with as many columns as rows, as `rsample(base_samples=...)` requires."""
        root = self._root().to(self.dtype)
        rows, columns = root.shape[-2:]
        # gpytorch's base samples have the size of the output, so the root must be square. A wide
        # root M is reduced by Mᵀ = QR, because M Mᵀ = RᵀR. A tall root is padded with zeros.
        if columns > rows:
            root = torch.linalg.qr(root.mT).R.mT
        return RootLinearOperator(PaddedRoot(root) if columns < rows else root)

    def zero_mean_mvn_samples(self, num_samples: int) -> Float[Tensor, "s *b n*p"]:
        """Return samples R ε with ε ~ N(0, I)."""
        root = self._root()
        shape = (*root.shape[:-2], root.shape[-1], num_samples)
        samples = root @ torch.randn(shape, dtype=root.dtype, device=root.device)
        return samples.movedim(-1, 0).to(self.dtype)


class DenseOutsidePoints(PointwiseOperator):
    """An operator that becomes dense under scaling, batches and indices of parts of points."""

    def _dense(self) -> LinearOperator:
        return to_linear_operator(self.to_dense())

    def _general_getitem(self, row_index, col_index, *batch_indices) -> LinearOperator:
        return self._dense()._getitem(row_index, col_index, *batch_indices)

    def _expand_batch(self, batch_shape: torch.Size) -> LinearOperator:
        return self._dense()._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._dense()._unsqueeze_batch(dim)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        return self._dense()._mul_constant(other)


class WithWhiteNoise(PointwiseOperator):
    """A covariance R Rᵀ + I⊗Σ, or R Rᵀ plus a block of noise for each point.

    Its samples are sums of two independent parts.
    """

    latent: RootedOperator
    noise: Float[Tensor, "*b m*p p"]

    @property
    def _blocks(self) -> Float[Tensor, "*b m p p"]:
        """The block Σ, or the blocks R_n of all points."""
        return self.noise.unflatten(-2, (-1, self.num_outputs))

    @property
    def _is_shared(self) -> bool:
        """Whether all points have the same noise Σ."""
        return self.noise.shape[-2] == self.num_outputs

    def _size(self) -> torch.Size:
        return self.latent.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        white = (self._blocks @ rhs.unflatten(-2, (-1, self.num_outputs))).flatten(-3, -2)
        return self.latent._matmul(rhs) + white

    def _diagonal(self) -> Float[Tensor, "*b n*p"]:
        white = self._blocks.diagonal(dim1=-1, dim2=-2)
        return (self.latent._diagonal().unflatten(-1, (-1, self.num_outputs)) + white).flatten(-2)

    def to_dense(self) -> Float[Tensor, "*b n*p n*p"]:
        count = self.shape[-1] // self.num_outputs
        return self.latent.to_dense() + block_matrix(of_each(self._blocks, count))

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        latent = self.latent._points(rows, cols)
        if rows == cols:
            blocks = self._blocks if self._is_shared else self._blocks[..., rows, :, :]
            return self.of(latent, blocks.flatten(-3, -2))
        index = torch.arange(self.shape[-1] // self.num_outputs, device=self.device)
        same = (index[rows].unsqueeze(-1) == index[cols]).to(self.dtype)
        blocks = of_each(self._blocks, len(index))[..., rows, :, :]
        white = torch.einsum("nm,...nij->...nimj", same, blocks).flatten(-4, -3).flatten(-2, -1)
        return to_linear_operator(latent.to_dense() + white)

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if (other < 0).any():
            return super()._mul_constant(other)
        return self.of(self.latent._mul_constant(other), self.noise * other[..., None, None])

    def root_decomposition(self, method: str | None = None) -> RootLinearOperator:
        """Return the Cholesky factor, because samples of a low-rank root vary too little."""
        return RootLinearOperator(psd_safe_cholesky(self.to_dense()))

    def zero_mean_mvn_samples(self, num_samples: int) -> Float[Tensor, "s *b n*p"]:
        latent = self.latent.zero_mean_mvn_samples(num_samples)
        white = torch.randn_like(latent).unflatten(-1, (-1, self.num_outputs, 1))
        return latent + (psd_safe_cholesky(self._blocks) @ white).flatten(-3)


def of_each(blocks: Float[Tensor, "*b m p p"], count: int) -> Float[Tensor, "*b n p p"]:
    """Return the block of every point, if necessary by expanding a block that all points share."""
    return blocks.expand(*blocks.shape[:-3], count, -1, -1)


def noise_covariance(
    covariance: PointwiseOperator, other: object
) -> Float[Tensor, "*b m*p p"] | None:
    """Return the blocks of noise in `other`, or None if `other` is not noise.

    If `other` is I⊗Σ, as gpytorch's likelihoods and jitter write it, the result is Σ. If `other` is
    block diagonal, the result contains the blocks of all points.

    Raises:
        ValueError: the noise is for another number of points or outputs.
    """
    p = covariance.num_outputs
    noise = _noise_blocks(other, p)
    if noise is None:
        return None
    if noise.shape[-1] != p or other.shape[-1] != covariance.shape[-1]:
        raise ValueError(
            f"expected noise for {covariance.shape[-1]} values of {p} outputs of the kernel, got "
            f"noise for {other.shape[-1]} values; pass num_tasks={p} to MultitaskGaussianLikelihood"
        )
    batch = torch.broadcast_shapes(covariance.batch_shape, noise.shape[:-2])
    return noise.expand(*batch, -1, -1)


@singledispatch
def _noise_blocks(noise: object, p: int) -> Float[Tensor, "*b m*q q"] | None:
    return None


@_noise_blocks.register
def _(noise: DiagLinearOperator, p):
    if noise.shape[-1] % p:
        return None
    return torch.diag_embed(noise._diag.unflatten(-1, (-1, p))).flatten(-3, -2)


@_noise_blocks.register
def _(noise: ConstantDiagLinearOperator, p):
    return noise.diag_values.unsqueeze(-1) * torch.eye(p).to(noise.diag_values)


@_noise_blocks.register
def _(noise: BlockDiagLinearOperator, p):
    return noise.base_linear_op.to_dense().flatten(-3, -2)


@_noise_blocks.register(KroneckerProductLinearOperator)
@_noise_blocks.register(KroneckerProductDiagLinearOperator)
def _(noise, p):
    points, *outputs = noise.linear_ops
    if len(outputs) != 1 or not isinstance(points, ConstantDiagLinearOperator):
        return None
    return points.diag_values.unsqueeze(-1) * outputs[0].to_dense()


class PaddedRoot(LinearOperator):
    """A square root [R 0], where the zeros that extend a tall root R are not stored."""

    def __init__(self, root: Float[Tensor, "*b n q"]):
        super().__init__(root)
        self.root = root

    def _size(self) -> torch.Size:
        return torch.Size((*self.root.shape[:-1], self.root.shape[-2]))

    def _matmul(self, rhs: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n k"]:
        return self.root @ rhs[..., : self.root.shape[-1], :]

    def _t_matmul(self, rhs: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n k"]:
        top = self.root.mT @ rhs
        return torch.nn.functional.pad(top, (0, 0, 0, rhs.shape[-2] - top.shape[-2]))

    def _transpose_nonbatch(self) -> LinearOperator:
        return to_linear_operator(self.to_dense().mT)


# The matrix of features Φ(x) as a LinearOperator that is not stored.


class FeatureOperator(LinearOperator):
    """The feature matrix Φ(x) (N·p, F), with a row for each output of each point.

    `ORFFKernel.feature_operator` returns it. `phi @ theta` and `phi.mT @ y` do not store the rows
    of the matrix, and `phi.to_dense()` returns them.
    """

    def __init__(
        self, x: Float[Tensor, "*b N d"], *tensors: Tensor, rebuild: Callable[..., Expansion]
    ):
        super().__init__(x, *tensors, rebuild=rebuild)
        self.x = x
        self.expansion = rebuild(*tensors)

    @classmethod
    def of(cls, x: Float[Tensor, "*b N d"], expansion: Expansion) -> "FeatureOperator":
        return cls(*with_one_batch(x, *expansion.tensors), rebuild=expansion.rebuild)

    def _size(self) -> torch.Size:
        rows = self.x.shape[-2] * self.expansion.num_outputs
        return torch.Size((*self.x.shape[:-2], rows, self.expansion.num_features))

    def _transpose_nonbatch(self) -> "Transposed":
        return Transposed(self)

    def _matmul(self, rhs: Tensor) -> Tensor:
        """Return Φθ = φ(x)w, where w are the weights of the columns φ."""
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion = self.expansion.double()
        values = expansion.apply(self.x, rhs.double())
        return values.unflatten(-1, (expansion.num_outputs, -1)).flatten(-3, -2).to(self.dtype)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        """Return Φᵀv, from the products φ(x)ᵀv of the columns φ."""
        if rhs.dim() == 1:
            return self._t_matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion = self.expansion.double()
        values = rhs.double().unflatten(-2, (-1, expansion.num_outputs)).flatten(-2)  # (*b, N, p·k)
        return expansion.adjoint(self.x, values).to(self.dtype)

    def to_dense(self) -> Float[Tensor, "*b N*p F"]:
        return self.expansion.double().features(self.x.double()).to(self.dtype)


class Transposed(LinearOperator):
    """The transpose Mᵀ of an operator M that defines the product `_t_matmul` with Mᵀ."""

    def __init__(self, operator: LinearOperator):
        super().__init__(operator)
        self.operator = operator

    def _size(self) -> torch.Size:
        *batch, rows, columns = self.operator.shape
        return torch.Size((*batch, columns, rows))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self.operator

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.operator._t_matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.operator._matmul(rhs)

    def to_dense(self) -> Tensor:
        return self.operator.to_dense().mT


# Prior covariances of features, with and without noise.


class OfFeatures(PointwiseOperator):
    """A covariance of features, with white noise or without.

    Sums with other features at the same points also have this form, and sums with noise that is
    independent between points.

    Attributes:
        parts: the covariance without noise, and the noise or None.
    """

    parts: "tuple[FeatureCovariance, Float[Tensor, '*b m*p p'] | None]"

    def __add__(self, other: LinearOperator | Tensor) -> LinearOperator:
        latent, noise = self.parts
        if isinstance(other, OfFeatures):
            further, more = other.parts
            latent = latent.with_features(further)
        else:
            more = noise_covariance(self, other) if latent.symmetric else None
            latent = None if more is None else latent
        if latent is None:
            return _unstructured_sum(self, other, super().__add__)
        noises = [part for part in (noise, more) if part is not None]
        if not noises:
            return latent
        # Each of them may have one block for all points.
        blocks = sum(part.unflatten(-2, (-1, self.num_outputs)) for part in noises)
        return NoisyFeatureCovariance.of(latent, blocks.flatten(-3, -2))


class FeatureCovariance(OfFeatures, RootedOperator):
    """The covariance K(x₁, x₂) = Φ(x₁) Φ(x₂)ᵀ, which `FeatureCovariance.of` creates."""

    def __init__(self, x1: Tensor, x2: Tensor, *tensors: Tensor, rebuild: Callable[..., Expansion]):
        super().__init__(x1, x2, *tensors, rebuild=rebuild)
        self.x1, self.x2 = x1, x2
        self.expansion = rebuild(*tensors)
        self.num_outputs = self.expansion.num_outputs

    @classmethod
    def of(
        cls, x1: Float[Tensor, "*b n d"], x2: Float[Tensor, "*b m d"], expansion: Expansion
    ) -> "FeatureCovariance":
        first, second, *tensors = with_one_batch(x1, x2, *expansion.tensors)
        return cls(first, first if x1 is x2 else second, *tensors, rebuild=expansion.rebuild)

    @property
    def parts(self) -> tuple["FeatureCovariance", None]:
        return self, None

    @property
    def symmetric(self) -> bool:
        return _same(self.x1, self.x2)

    def with_features(self, other: "FeatureCovariance") -> "FeatureCovariance | None":
        """Return the sum with other features, or None if they are at other points."""
        if not (_same(self.x1, other.x1) and _same(self.x2, other.x2)):
            return None
        merged = merge([self.expansion, other.expansion])
        return FeatureCovariance.of(self.x1, self.x2, merged)

    def _size(self) -> torch.Size:
        p = self.num_outputs
        return torch.Size((*self.x1.shape[:-2], self.x1.shape[-2] * p, self.x2.shape[-2] * p))

    def _points(self, rows: slice, cols: slice) -> "FeatureCovariance":
        x1 = self.x1[..., rows, :]
        same = rows == cols and self.x1 is self.x2
        x2 = x1 if same else self.x2[..., cols, :]
        return FeatureCovariance(x1, x2, *self.expansion.tensors, rebuild=self.expansion.rebuild)

    def _transpose_nonbatch(self) -> "FeatureCovariance":
        return FeatureCovariance.of(self.x2, self.x1, self.expansion)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion, p = self.expansion.double(), self.num_outputs
        values = rhs.double().unflatten(-2, (-1, p)).flatten(-2)  # (*b, m, p·k)
        out = expansion.apply(self.x1, expansion.adjoint(self.x2, values))
        return out.unflatten(-1, (p, -1)).flatten(-3, -2).to(self.dtype)

    def to_dense(self) -> Float[Tensor, "*b n*p m*p"]:
        expansion = self.expansion.double()
        left = expansion.features(self.x1.double())
        right = left if self.x1 is self.x2 else expansion.features(self.x2.double())
        return (left @ right.mT).to(self.dtype)

    def _diagonal(self) -> Float[Tensor, "*b n*p"]:
        expansion = self.expansion.double()
        if self.symmetric:
            return expansion.variance(self.x1.double()).flatten(-2).to(self.dtype)
        product = expansion.features(self.x1.double()) * expansion.features(self.x2.double())
        return product.sum(-1).to(self.dtype)

    def _root(self) -> Tensor:
        return self.expansion.double().features(self.x1.double())

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if (other < 0).any():
            return super()._mul_constant(other)
        return FeatureCovariance.of(self.x1, self.x2, self.expansion.scaled(other))


class NoisyFeatureCovariance(OfFeatures, WithWhiteNoise):
    """The covariance K(x, x) + I⊗Σ, or K(x, x) plus known noise.

    It uses the normal equations of `gp_orff.inference`, and needs an N·p square matrix only if this
    is smaller.
    """

    def __init__(
        self,
        x: Float[Tensor, "*b N d"],
        noise: Float[Tensor, "*b m*p p"],
        *tensors: Tensor,
        rebuild: Callable[..., Expansion],
    ):
        super().__init__(x, noise, *tensors, rebuild=rebuild)
        self.latent = FeatureCovariance(x, x, *tensors, rebuild=rebuild)
        self.num_outputs = self.latent.num_outputs
        blocks = noise.unflatten(-2, (-1, self.num_outputs))
        # symmetric, so that every use has the same gradient
        self.noise = (0.5 * (blocks + blocks.mT)).flatten(-3, -2)

    @classmethod
    def of(
        cls, latent: FeatureCovariance, noise: Float[Tensor, "*b m*p p"]
    ) -> "NoisyFeatureCovariance":
        parts = with_one_batch(latent.x1, noise, *latent.expansion.tensors)
        return cls(*parts, rebuild=latent.expansion.rebuild)

    @property
    def parts(self) -> tuple[FeatureCovariance, Tensor]:
        return self.latent, self.noise

    @property
    def prefers_dual(self) -> bool:
        """Whether factorising K + I⊗Σ costs less than the normal equations of the features."""
        return prefers_dual(self.latent.expansion, self.latent.x1.shape[-2], self._is_shared)

    @property
    def has_sums(self) -> bool:
        """Whether the posterior is computed from sums over the data."""
        return self._is_shared and not self.prefers_dual

    def posterior(self, y: Float[Tensor, "*b N*p"], expansion: Expansion) -> WeightPosterior:
        """Return the posterior of the weights of an expansion, given y."""
        return self._equations(y, expansion).posterior(self._zero_mean)[0]

    def statistics(self, y: Float[Tensor, "*b N*p"]) -> Statistics:
        """Return the sufficient statistics of the residuals y."""
        expansion = self.latent.expansion.double()
        return Statistics.of(self.latent.x1, self._per_point(y), expansion.phi)

    def posterior_from(self, statistics: Statistics, expansion: Expansion) -> WeightPosterior:
        """Return the posterior of the weights of an expansion from statistics of its columns."""
        groups = [Group(statistics, Noise.of(self.noise))]
        return normal_equations(expansion, groups).posterior(self._zero_mean)[0]

    @property
    def _zero_mean(self) -> Float[Tensor, "p"]:
        return torch.zeros(self.num_outputs, dtype=torch.float64, device=self.device)

    def _equations(self, y: Float[Tensor, "*b N*p"], expansion: Expansion) -> NormalEquations:
        x, y = self.latent.x1, self._per_point(y)
        if not self._is_shared:
            return equations_with_noise(expansion, x, y, self._blocks)
        return equations_of_vectors(expansion, x, y, Noise.of(self.noise))

    def _per_point(self, y: Float[Tensor, "*b N*p"]) -> Float[Tensor, "*b N p"]:
        """Return y with one row for each point, or raise a ValueError if it is not finite."""
        check_finite(y)
        return y.unflatten(-1, (-1, self.num_outputs))

    def _zeros(self) -> Float[Tensor, "*b N*p"]:
        return torch.zeros(self.shape[:-1], dtype=torch.float64, device=self.device)

    def inv_quad_logdet(
        self,
        inv_quad_rhs: Tensor | None = None,
        logdet: bool | None = False,
        reduce_inv_quad: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        zero = torch.zeros([], dtype=self.dtype, device=self.device)
        if inv_quad_rhs is None:
            equations = self._equations(self._zeros(), self.latent.expansion)
            return zero.new_empty(0), equations.evidence().logdet.to(self.dtype) if logdet else zero
        rhs = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.dim() == 1 else inv_quad_rhs
        # gpytorch's marginal likelihood needs both results, which the evidence gives in one pass.
        if rhs.shape[-1] == 1 and logdet:
            evidence = self._equations(rhs.squeeze(-1), self.latent.expansion).evidence()
            quad, log_determinant = evidence.inv_quad, evidence.logdet
            quad = quad if reduce_inv_quad else quad.unsqueeze(-1)
            return quad.to(self.dtype), log_determinant.to(self.dtype)
        quad = (rhs * self.solve(rhs)).sum(-2)
        return quad.sum(-1) if reduce_inv_quad else quad, self.logdet() if logdet else zero

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        return self.inv_quad_logdet(inv_quad_rhs, False, reduce_inv_quad)[0]

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """Return (K + I⊗Σ)⁻¹v = Σ⁻¹v − Σ⁻¹Φ Cov[θ] ΦᵀΣ⁻¹v."""
        rhs = right_tensor.unsqueeze(-1) if right_tensor.dim() == 1 else right_tensor
        solution = self._solve(rhs).to(right_tensor.dtype)
        solution = solution.squeeze(-1) if right_tensor.dim() == 1 else solution
        return solution if left_tensor is None else left_tensor @ solution

    def _solve(self, rhs: Tensor, preconditioner=None, num_tridiag: int | None = 0) -> Tensor:
        if num_tridiag:
            return super()._solve(rhs, preconditioner, num_tridiag)
        rhs, latent, p = rhs.double(), self.latent, self.num_outputs
        # With fewer values than features, K + I⊗Σ is the smaller matrix. In the other case, the
        # Woodbury identity below is used.
        if self.prefers_dual:
            return self._equations(self._zeros(), latent.expansion).solve(rhs)
        precision = Noise.of(self._blocks).precision
        posterior = self.posterior(self._zeros(), latent.expansion)
        expansion = posterior.expansion

        def whiten(v: Tensor) -> Tensor:  # Σ⁻¹v
            return (precision @ v.unflatten(-2, (-1, p))).flatten(-3, -2)

        white = whiten(rhs)
        per_point = white.unflatten(-2, (-1, p)).flatten(-2)
        values = expansion.feature_values(expansion.phi.adjoint(latent.x1, per_point))
        weights = expansion.column_weights(posterior.weight_covariance(values))
        fitted = expansion.phi.apply(latent.x1, weights)
        return white - whiten(fitted.unflatten(-1, (p, -1)).flatten(-3, -2))


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal.

    Differentiable tensors must share their memory. They may be different objects, because gpytorch
    slices them.
    """
    if a is b:
        return True
    if a.shape != b.shape or a.requires_grad != b.requires_grad:
        return False
    if a.requires_grad:
        return a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return torch.equal(a, b)


def _unstructured_sum(
    covariance: LinearOperator, other: object, add: Callable[[object], LinearOperator]
) -> LinearOperator:
    """Return gpytorch's sum, with a warning that the structure is lost."""
    result = add(other)
    if result is not covariance and covariance.is_square:
        _warn_lost_structure(f"{type(covariance).__name__} + {type(other).__name__}")
    return result


def _warn_lost_structure(what: str) -> None:
    warnings.warn(
        f"{what} is not a covariance of features plus noise that is independent between points, so "
        "that gpytorch's general algebra is used, at a cost cubic in the number of points; use "
        "GaussianLikelihood, MultitaskGaussianLikelihood or gp_orff.KnownNoiseLikelihood, and put "
        "sums and products of kernels inside one ORFFKernel",
        PerformanceWarning,
        stacklevel=4,
    )


# The posterior covariance of an `ExactGP` with kernels of this package.


class PosteriorCovariance(DenseOutsidePoints, RootedOperator):
    """The covariance Cov[f(x) | y], whose blocks are computed when they are needed."""

    def __init__(self, x: Float[Tensor, "*b n d"], posterior: FieldDistribution):
        super().__init__(x, posterior=posterior)
        self.x, self.posterior = x, posterior
        self.num_outputs = posterior.num_outputs

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.x.shape[:-2], self.posterior.batch_shape)
        n = self.x.shape[-2] * self.num_outputs
        return torch.Size((*batch, n, n))

    def _transpose_nonbatch(self) -> "PosteriorCovariance":
        return self

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        if rows == cols:
            return PosteriorCovariance(self.x[..., rows, :], self.posterior)
        p = self.num_outputs
        blocks = [slice(points.start * p, points.stop * p) for points in (rows, cols)]
        return to_linear_operator(self.to_dense()[..., blocks[0], blocks[1]])

    def _root(self) -> Tensor:
        return self.posterior.root(self.x)

    def __add__(self, other: LinearOperator | Tensor) -> LinearOperator:
        noise = noise_covariance(self, other)
        return super().__add__(other) if noise is None else NoisyPosteriorCovariance.of(self, noise)

    def to_dense(self) -> Float[Tensor, "*b n*p n*p"]:
        return self.posterior.covariance(self.x).to(self.dtype)

    def _diagonal(self) -> Float[Tensor, "*b n*p"]:
        return self.posterior.variance(self.x).flatten(-2).to(self.dtype)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.to_dense() @ rhs

    def matmul(self, other: Tensor) -> Tensor:
        """Return Cov[f(x) | y] @ `other`, differentiable in x and in the hyperparameters."""
        return self._matmul(other)


class NoisyPosteriorCovariance(DenseOutsidePoints, WithWhiteNoise):
    """The covariance Cov[f(x) + ε | y] of new observations; densities need its Cholesky factor."""

    def __init__(self, latent: PosteriorCovariance, noise: Float[Tensor, "*b m*p p"]):
        super().__init__(latent, noise)
        self.latent, self.noise = latent, noise
        self.num_outputs = latent.num_outputs

    @classmethod
    def of(
        cls, latent: PosteriorCovariance, noise: Float[Tensor, "*b m*p p"]
    ) -> "NoisyPosteriorCovariance":
        return cls(latent, noise)

    def inv_quad_logdet(
        self,
        inv_quad_rhs: Tensor | None = None,
        logdet: bool | None = False,
        reduce_inv_quad: bool | None = True,
    ) -> tuple[Tensor, Tensor]:
        dense = to_linear_operator(self.to_dense())
        with linear_operator.settings.max_cholesky_size(dense.shape[-1]):
            return dense.inv_quad_logdet(inv_quad_rhs, logdet, reduce_inv_quad)


def posterior_covariance(
    x: Float[Tensor, "*b n d"], distribution: FieldDistribution
) -> PosteriorCovariance | NoisyPosteriorCovariance:
    """Return Cov[f(x) | y], where the white noise of the distribution is a separate part."""
    smooth, delta = distribution.split()
    latent = PosteriorCovariance(x, smooth)
    return latent if delta is None else NoisyPosteriorCovariance.of(latent, delta.to(x.dtype))
