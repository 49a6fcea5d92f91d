"""What the covariances of this package share as LinearOperators."""

import torch
from jaxtyping import Float
from linear_operator.operators import (
    CatLinearOperator,
    ConstantDiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
    ZeroLinearOperator,
    to_linear_operator,
)
from torch import Tensor


class PointwiseOperator(LinearOperator):
    """A covariance between the p outputs of points; slices of whole points keep the structure."""

    num_outputs: int

    def _points(self, rows: slice, cols: slice) -> LinearOperator | None:
        """The covariance between some of the points, None where the structure would be lost."""
        raise NotImplementedError

    def _getitem(self, row_index, col_index, *batch_indices):
        rows, cols = (_point_slice(i, self.num_outputs) for i in (row_index, col_index))
        if rows is not None and cols is not None and all(i == slice(None) for i in batch_indices):
            restricted = self._points(rows, cols)
            if restricted is not None:
                return restricted
        return super()._getitem(row_index, col_index, *batch_indices)

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
        zero = ZeroLinearOperator(
            *root.shape[:-1], rows - columns, dtype=root.dtype, device=root.device
        )
        return RootLinearOperator(CatLinearOperator(to_linear_operator(root), zero, dim=-1))

    def zero_mean_mvn_samples(self, num_samples: int) -> Float[Tensor, "s *b n*p"]:
        root = self._root()
        shape = (*root.shape[:-2], root.shape[-1], num_samples)
        samples = root @ torch.randn(shape, dtype=root.dtype, device=root.device)
        return samples.movedim(-1, 0).to(self.dtype)


def _point_slice(index: slice | Tensor, p: int) -> slice | None:
    """The points of a slice of rows, None unless it takes whole points in order."""
    if not isinstance(index, slice) or index.step not in (None, 1):
        return None
    start, stop = index.start or 0, index.stop
    if start % p or (stop or 0) % p:
        return None
    return slice(start // p, None if stop is None else stop // p)
