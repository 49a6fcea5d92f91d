"""The normal equations of vectors whose noise covariances are known, one for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gp_orff.features.expansion import Expansion
from gp_orff.inference.equations import (
    DenseRows,
    Dual,
    NormalEquations,
    Whitened,
    evidence_of,
    mean_and_response,
    prefers_dual,
    with_ones,
)
from gp_orff.inference.posteriors import PrimalPosterior
from gp_orff.inference.quadratic import Evidence, InvQuadLogdet

# With the noise R_n = L_n L_nᵀ of vector n, the rows of [Φ, V] are whitened by L_n⁻¹, and
#
#     A = I + Σ_n Φ_nᵀR_n⁻¹Φ_n ,    B = Σ_n Φ_nᵀR_n⁻¹V_n .
#
# Precisions of p(p + 1)/2 numbers a vector do not factor into sums over the columns φ that all
# share, so the features themselves are computed: in chunks, and again in the backward pass.


_NUMBERS = 2**24  # of the features of a chunk


@dataclass(frozen=True)
class NoiseOfEach(NormalEquations):
    """The primal algebra of vectors y at x with the noise covariances R_n, differentiable in all
    of them."""

    expansion: Expansion
    x: Float[Tensor, "*b N d"]
    y: Float[Tensor, "*b N p"]
    noise: Float[Tensor, "*b N p p"]

    def evidence(self) -> Evidence:
        a, b, _ = self._sums
        return self._evidence(*InvQuadLogdet.apply(a, b))

    def posterior(self, mean):
        a, b, _ = self._sums
        weights = Whitened.of(psd_safe_cholesky(a), b, self._evidence)
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
    """The normal equations of vectors y at x with the noise covariance of each, in the cheaper of
    the two algebras.

    Raises:
        ValueError: a noise covariance that is not positive definite.
    """
    expansion, x, y, noise = expansion.double(), x.double(), y.double(), noise.double()
    singular = torch.linalg.cholesky_ex(noise.detach()).info != 0
    if singular.any():
        raise ValueError(
            f"expected positive definite noise covariances, got {int(singular.sum())} of "
            f"{singular.numel()} that are not; drop the observations of unknown noise"
        )
    if not prefers_dual(expansion, x.shape[-2], whole=False):
        return NoiseOfEach(expansion, x, y, noise)
    return Dual(expansion, DenseRows(expansion.features(x), with_ones(y), block_matrix(noise)))


def block_matrix(blocks: Float[Tensor, "*b N p p"]) -> Float[Tensor, "*b N*p N*p"]:
    """The block diagonal matrix of all blocks, one for each point."""
    eye = torch.eye(blocks.shape[-3], dtype=blocks.dtype, device=blocks.device)
    return torch.einsum("nm,...nij->...nimj", eye, blocks).flatten(-4, -3).flatten(-2, -1)
