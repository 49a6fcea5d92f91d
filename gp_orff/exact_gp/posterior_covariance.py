"""The posterior covariance of an `ExactGP` with our kernels."""

import linear_operator.settings
import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator, to_linear_operator
from torch import Tensor

from gp_orff.exact_gp.operators import (
    DenseOutsidePoints,
    RootedOperator,
    WithWhiteNoise,
    noise_covariance,
)
from gp_orff.inference.distributions import FieldDistribution


class PosteriorCovariance(DenseOutsidePoints, RootedOperator):
    """Cov[f(x) | y], evaluated where it is needed."""

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
        """Cov[f(x) | y] `other`, by plain autograd: differentiable in x and the hyperparameters."""
        return self._matmul(other)


class NoisyPosteriorCovariance(DenseOutsidePoints, WithWhiteNoise):
    """Cov[f(x) + ε | y] of new observations; densities by Cholesky."""

    def __init__(self, latent: PosteriorCovariance, noise: Float[Tensor, "*b p p"]):
        super().__init__(latent, noise)
        self.latent, self.noise = latent, noise
        self.num_outputs = latent.num_outputs

    @classmethod
    def of(
        cls, latent: PosteriorCovariance, noise: Float[Tensor, "*b p p"]
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
    """Cov[f(x) | y], with the white noise of the distribution kept apart."""
    smooth, delta = distribution.split()
    latent = PosteriorCovariance(x, smooth)
    return latent if delta is None else NoisyPosteriorCovariance.of(latent, delta.to(x.dtype))
