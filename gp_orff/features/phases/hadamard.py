"""The fast Walsh–Hadamard transform, by products with small dense Hadamard matrices."""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

_LARGEST = 5  # log₂ of the largest dense block: larger ones compute more, smaller ones copy more


def hadamard(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    r"""H x for every vector x, H being the Walsh–Hadamard matrix (Le et al. 2013, Section 4.2).

    H_2d = [[H_d, H_d], [H_d, −H_d]], H_1 = 1. With d = d₁ ⋯ d_m, H is the Kronecker product of the
    matrices H_{d_i}. Each is applied along one axis of x, which costs d (d₁ + … + d_m)
    multiplications in m matrix products. H is symmetric, and H H = d I: the transform is its own
    transpose. The result is a transposed view where that saves a copy.

    Raises:
        ValueError: d is no power of two.
    """
    num_dims = x.shape[-1]
    if num_dims < 1 or num_dims & (num_dims - 1):
        raise ValueError(
            f"hadamard expects vectors whose length is a power of two, got {num_dims}; pad them "
            "with zeros"
        )
    shape = x.shape
    for size in _sizes(num_dims.bit_length() - 1):  # each product moves the last axis to the front
        x = _matrix(size, x.dtype, x.device) @ x.reshape(-1, size).mT
    return x.reshape(num_dims, -1).mT.reshape(shape)


@cache
def _sizes(log_dims: int) -> tuple[int, ...]:
    """The sizes of blocks, nearly equal, whose product is 2^log_dims."""
    number = -(-log_dims // _LARGEST)
    return tuple(2 ** ((log_dims + i) // number) for i in range(number))


@cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d d"]:
    """H, dense: its entries are −1 to the number of binary digits that row and column share."""
    with torch.inference_mode(False):  # it is kept, and used in training later
        index = torch.arange(size, device=device)
        common = index.unsqueeze(-1) & index
        parity = sum((common >> shift) & 1 for shift in range(size.bit_length())) & 1
        return (1 - 2 * parity).to(dtype)
