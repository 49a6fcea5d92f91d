"""What the covariances of this package share as LinearOperators."""

import torch
from jaxtyping import Float
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
    to_linear_operator,
)
from torch import Tensor


class PointwiseOperator(LinearOperator):
    """A covariance between the p outputs of points; slices of whole points keep the structure."""

    num_outputs: int

    def _points(self, rows: slice, cols: slice) -> LinearOperator:
        """The covariance between some of the points and some others."""
        raise NotImplementedError

    def _getitem(self, row_index, col_index, *batch_indices):
        simple = all(isinstance(i, slice) and i.step in (None, 1) for i in (row_index, col_index))
        if not simple or any(i != slice(None) for i in batch_indices):
            return super()._getitem(row_index, col_index, *batch_indices)
        sizes, p = self.shape[-2:], self.num_outputs
        rows, cols = (i.indices(n)[:2] for i, n in zip((row_index, col_index), sizes, strict=True))
        points = [slice(start // p, -(-stop // p)) for start, stop in (rows, cols)]
        covariance = self._points(*points)
        inner = [
            slice(start - whole.start * p, stop - whole.start * p)
            for (start, stop), whole in zip((rows, cols), points, strict=True)
        ]
        if all(i == slice(0, n) for i, n in zip(inner, covariance.shape[-2:], strict=True)):
            return covariance
        return to_linear_operator(covariance.to_dense()[..., inner[0], inner[1]])

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        if diag.dim() and diag.shape[-1] != 1:
            return super().add_diagonal(diag)
        constant = diag.expand(*self.batch_shape, 1)
        return self + ConstantDiagLinearOperator(constant, diag_shape=self.shape[-1])


class RootedOperator(PointwiseOperator):
    """A covariance R Rᵀ, sampled through R: no factorisation of an n·p square matrix."""

    def _root(self) -> Float[Tensor, "*b n*p q"]:
        raise NotImplementedError

    def root_decomposition(self, method: str | None = None) -> RootLinearOperator:
        """A root of as many columns as rows, as `rsample(base_samples=...)` requires."""
        root = self._root().to(self.dtype)
        rows, columns = root.shape[-2:]
        if columns > rows:
            return RootLinearOperator(torch.linalg.qr(root.mT).R.mT)
        if columns == rows:
            return RootLinearOperator(root)
        return RootLinearOperator(PaddedRoot(root))

    def zero_mean_mvn_samples(self, num_samples: int) -> Float[Tensor, "s *b n*p"]:
        root = self._root()
        shape = (*root.shape[:-2], root.shape[-1], num_samples)
        samples = root @ torch.randn(shape, dtype=root.dtype, device=root.device)
        return samples.movedim(-1, 0).to(self.dtype)


class PaddedRoot(LinearOperator):
    """[R 0]: a tall root R with columns of zeros that make it square, never written out."""

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
