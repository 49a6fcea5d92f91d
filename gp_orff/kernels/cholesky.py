"""Roots of covariance matrices in any units."""

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_SINGULAR = 1e-7  # a smaller pivot, relative to the standard deviation, is zero to rounding


def positive(variances: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """v, and the least positive number in the place of zero."""
    return variances.clamp_min(torch.finfo(variances.dtype).tiny)


def positive_root(variances: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """√v, with a derivative where v = 0."""
    return positive(variances).sqrt()


def cholesky(a: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b n n"]:
    """The Cholesky factor L of a covariance matrix a = L Lᵀ.

    If a is singular to rounding, a nugget of 10⁻⁸ to 10⁻⁶ of its largest variance is added to the
    diagonal. (`psd_safe_cholesky` alone adds a fixed number, whatever the units of a.)

    Example:
        >>> import torch
        >>> from gp_orff.kernels.cholesky import cholesky
        >>> a = torch.tensor([[4.0, 2.0], [2.0, 2.0]])
        >>> (1e10 * cholesky(1e-20 * a.double())).round(decimals=6)
        tensor([[2., 0.],
                [1., 1.]], dtype=torch.float64)
    """
    factor, info = torch.linalg.cholesky_ex(a)
    if not info.any():
        return factor
    size = size_of(a)
    return size.sqrt() * psd_safe_cholesky(a / size)


def size_of(a: Float[Tensor, "*b n n"]) -> Float[Tensor, "*b 1 1"]:
    """The largest variance of a covariance matrix, 1 where it is zero."""
    largest = a.detach().diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def reduced_root(root: Float[Tensor, "*b p r"]) -> Float[Tensor, "*b p q"]:
    """A root L of the covariance matrix `root` `root`ᵀ with at most p columns.

    It is the Cholesky factor where r > p. If the matrix is singular, no nugget is added: L is
    `root` times an orthonormal basis of its rows, and differentiable once.

    Example:
        Three columns along one line:

        >>> import torch
        >>> from gp_orff.kernels.cholesky import reduced_root
        >>> root = torch.tensor([[1.0, 2.0, 2.0], [2.0, 4.0, 4.0]]).double()
        >>> factor = reduced_root(root)
        >>> (factor @ factor.mT).round(decimals=12)
        tensor([[ 9., 18.],
                [18., 36.]], dtype=torch.float64)
    """
    p, r = root.shape[-2:]
    if r <= p:
        return root
    a = root @ root.mT
    factor, info = torch.linalg.cholesky_ex(a)
    pivots, variances = (t.detach().diagonal(dim1=-1, dim2=-2) for t in (factor, a))
    singular = info.any() or (pivots <= _SINGULAR * variances.sqrt()).any()
    return _RootOnRows.apply(root) if singular else factor


class _RootOnRows(Function):
    """L = C Q with an orthonormal basis Q of the rows of C, so that L Lᵀ = C Cᵀ.

    The derivative of C Cᵀ is that of L Lᵀ at constant Q, since Q Qᵀ Cᵀ = Cᵀ.
    """

    @staticmethod
    def forward(ctx, root: Float[Tensor, "*b p r"]) -> Float[Tensor, "*b p p"]:
        basis, _ = torch.linalg.qr(root.mT)
        ctx.save_for_backward(basis)
        return root @ basis

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b p r"]:
        (basis,) = ctx.saved_tensors
        return grad @ basis.mT
