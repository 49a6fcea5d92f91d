"""Cholesky factors of covariance matrices in any units."""

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor


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
