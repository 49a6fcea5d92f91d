"""Base classes of the covariances of this package, as LinearOperators."""

import torch
from jaxtyping import Float
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    KroneckerProductDiagLinearOperator,
    KroneckerProductLinearOperator,
    LinearOperator,
    RootLinearOperator,
    to_linear_operator,
)
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.data.noise.covariances import independent, same_point


def with_one_batch(*matrices: Float[Tensor, "*_ m n"]) -> tuple[Float[Tensor, "*b m n"], ...]:
    """The matrices expanded to one batch shape, as the arguments of one operator must be."""
    batch = torch.broadcast_shapes(*(matrix.shape[:-2] for matrix in matrices))
    return tuple(matrix.expand(*batch, *matrix.shape[-2:]) for matrix in matrices)


class PointwiseOperator(LinearOperator):
    """A covariance between the p outputs of points; slices of whole points keep its structure."""

    num_outputs: int

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        """The covariance between the points `rows` and the points `cols`."""
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
        """Indexing by anything but slices of rows and columns: gpytorch's own."""
        return super()._getitem(row_index, col_index, *batch_indices)

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        if diag.dim() and diag.shape[-1] != 1:
            return super().add_diagonal(diag)
        constant = diag.expand(*self.batch_shape, 1)
        return self + ConstantDiagLinearOperator(constant, diag_shape=self.shape[-1])


class RootedOperator(PointwiseOperator):
    """A covariance R Rᵀ, sampled through R: no n·p square matrix is factorised."""

    def _root(self) -> Float[Tensor, "*b n*p q"]:
        """R."""
        raise NotImplementedError

    def root_decomposition(self, method: str | None = None) -> RootLinearOperator:
        """A root with as many columns as rows, as `rsample(base_samples=...)` requires."""
        root = self._root().to(self.dtype)
        rows, columns = root.shape[-2:]
        if columns > rows:
            return RootLinearOperator(torch.linalg.qr(root.mT).R.mT)
        if columns == rows:
            return RootLinearOperator(root)
        return RootLinearOperator(PaddedRoot(root))

    def zero_mean_mvn_samples(self, num_samples: int) -> Float[Tensor, "s *b n*p"]:
        """R ε with ε ~ N(0, I)."""
        root = self._root()
        shape = (*root.shape[:-2], root.shape[-1], num_samples)
        samples = root @ torch.randn(shape, dtype=root.dtype, device=root.device)
        return samples.movedim(-1, 0).to(self.dtype)


class DenseOutsidePoints(PointwiseOperator):
    """An operator that becomes dense for scaling, batches and all indices but whole points."""

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
    """A covariance R Rᵀ + I⊗Σ, sampled as a sum of independent parts."""

    latent: RootedOperator
    noise: Float[Tensor, "*b p p"]

    def _size(self) -> torch.Size:
        return self.latent.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        blocks = rhs.unflatten(-2, (-1, self.num_outputs))
        white = (self.noise.unsqueeze(-3) @ blocks).flatten(-3, -2)
        return self.latent._matmul(rhs) + white

    def _diagonal(self) -> Float[Tensor, "*b n*p"]:
        white = self.noise.diagonal(dim1=-1, dim2=-2).unsqueeze(-2)
        return (self.latent._diagonal().unflatten(-1, (-1, self.num_outputs)) + white).flatten(-2)

    def to_dense(self) -> Float[Tensor, "*b n*p n*p"]:
        return self.latent.to_dense() + independent(self.noise, self.shape[-1] // self.num_outputs)

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        latent = self.latent._points(rows, cols)
        if rows == cols:
            return self.of(latent, self.noise)
        index = torch.arange(self.shape[-1] // self.num_outputs, device=self.device)
        same = (index[rows].unsqueeze(-1) == index[cols]).to(self.dtype)
        return to_linear_operator(latent.to_dense() + same_point(same, self.noise))

    def _mul_constant(self, other: Tensor) -> LinearOperator:
        if (other < 0).any():
            return super()._mul_constant(other)
        return self.of(self.latent * other, self.noise * other[..., None, None])

    def root_decomposition(self, method: str | None = None) -> RootLinearOperator:
        """The Cholesky factor at any size: a root of limited rank would narrow the samples."""
        return RootLinearOperator(psd_safe_cholesky(self.to_dense()))

    def zero_mean_mvn_samples(self, num_samples: int) -> Float[Tensor, "s *b n*p"]:
        latent = self.latent.zero_mean_mvn_samples(num_samples)
        white = torch.randn_like(latent).unflatten(-1, (-1, self.num_outputs))
        return latent + (white @ psd_safe_cholesky(self.noise).mT).flatten(-2)


def noise_covariance(covariance: PointwiseOperator, other: object) -> Tensor | None:
    """Σ if `other` is I⊗Σ as gpytorch's likelihoods and jitter write it, otherwise None.

    Raises:
        ValueError: noise for another number of points or outputs.
    """
    p = covariance.num_outputs
    if isinstance(other, ConstantDiagLinearOperator):
        noise = other.diag_values.unsqueeze(-1) * torch.eye(p).to(other.diag_values)
    elif isinstance(other, KroneckerProductLinearOperator | KroneckerProductDiagLinearOperator):
        points, *outputs = other.linear_ops
        if not isinstance(points, ConstantDiagLinearOperator) or len(outputs) != 1:
            return None
        noise = points.diag_values.unsqueeze(-1) * outputs[0].to_dense()
    else:
        return None
    if noise.shape[-1] != p or other.shape[-1] != covariance.shape[-1]:
        raise ValueError(
            f"the kernel has {p} outputs and {covariance.shape[-1]} values, got noise for "
            f"{other.shape[-1]} values; expected num_tasks={p} in MultitaskGaussianLikelihood"
        )
    batch = torch.broadcast_shapes(covariance.batch_shape, noise.shape[:-2])
    return noise.expand(*batch, p, p)


class PaddedRoot(LinearOperator):
    """[R 0]: a tall root R, made square by columns of zeros that are not stored."""

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
