"""Zᵀ R⁻¹ Z and log|R| of tracks, whose blocks have the noise covariance R.

With W = R⁻¹Z and the derivative S of G = Zᵀ R⁻¹ Z, made symmetric,

    ∂/∂R = −W S Wᵀ + g R⁻¹ ,    ∂/∂Z = 2 W S ,

where g is the derivative of log|R|. R is a batch of small matrices, and Z that of their rows: all
but the factorisations are products of large matrices.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function

_WIDER = 1.3  # the most blocks of a track over the fewest, in one batch
_ROWS = 2**13  # of a batch, about


def batches_of(sizes: Sequence[int]) -> list[Int[Tensor, "b t"]]:
    """The blocks of tracks in batches of similar numbers of blocks: −1 in the place of those that
    shorter tracks do not have.

    Args:
        sizes: the number of blocks of every track; their blocks follow each other.
    """
    counts = torch.tensor(sizes)
    starts = counts.cumsum(0) - counts
    batch = (counts.double().log() / math.log(_WIDER)).floor()
    batches = []
    for number in batch.unique():
        tracks = torch.nonzero(batch == number).squeeze(-1)
        longest = int(counts[tracks].max())
        for some in tracks.split(max(1, _ROWS // longest)):
            rank = torch.arange(longest)
            inside = rank < counts[some, None]
            batches.append(torch.where(inside, starts[some, None] + rank, -1))
    return batches


class WhitenedGram(Function):
    """G = Σ_b Z_bᵀ R_b⁻¹ Z_b and Σ_b log|R_b|; arguments: R (b, t, t) and Z (b, t, k)."""

    @staticmethod
    def forward(ctx, r: Float[Tensor, "b t t"], z: Float[Tensor, "b t k"]):
        factor = torch.linalg.cholesky(r)
        half = torch.linalg.solve_triangular(factor, z, upper=False)
        ctx.save_for_backward(r, z, factor, half)
        rows = half.flatten(0, 1)
        logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum()
        return rows.mT @ rows, logdet

    @staticmethod
    def backward(ctx, grad_gram, grad_logdet):
        r, z, factor, half = ctx.saved_tensors
        if torch.is_grad_enabled():  # with the graph of R and Z
            factor = torch.linalg.cholesky(r)
            half = torch.linalg.solve_triangular(factor, z, upper=False)
        w = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        symmetric = 0.5 * (grad_gram + grad_gram.mT)
        products = (w.flatten(0, 1) @ symmetric).unflatten(0, w.shape[:2])
        grad_r = grad_logdet * torch.cholesky_inverse(factor) - products @ w.mT
        return grad_r, 2 * products
