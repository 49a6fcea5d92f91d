"""Random sources on horizontal planes, and the covariance of derivatives of their potential.

A potential with the spectrum a e^{−|k||z − p|} / (2π|k|) on each side of the plane z = p has, for
points x and x′ on one side,

    Cov[V(x), V(x′)] = a / R ,    R² = (x₁ − x′₁)² + (x₂ − x′₂)² + Z² ,    Z = |z − p| + |z′ − p| ,

because ∫ e^{i⟨k,r⟩ − |k|Z} d²k / (2π|k|) = 1/√(r² + Z²). It is the potential at x of a charge at
the mirror image of x′, harmonic in either argument.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sources:
    """Independent planes of sources, all below the points or all above them.

    Args:
        side: 1 for sources below the points, −1 for sources above them.
        planes: p_j, their heights.
        amplitudes: a_j, in units of potential² times length.
    """

    side: int
    planes: Float[Tensor, "*b J"]
    amplitudes: Float[Tensor, "*b J"]

    def distances(self, z: Float[Tensor, "*b n"]) -> Float[Tensor, "*b J n"]:
        """The distances of heights from the planes, negative on their other side."""
        return self.side * (z.unsqueeze(-2) - self.planes.unsqueeze(-1))

    def lags(
        self, x: Float[Tensor, "*b #n #m 3"], z: Float[Tensor, "*b #n #m 3"]
    ) -> Float[Tensor, "*b J n m 3"]:
        """x less the mirror images of z, seen from the side of the points."""
        across = (x - z)[..., :2].unsqueeze(-4)
        planes = self.planes[..., None, None]
        vertical = self.side * ((x + z)[..., 2].unsqueeze(-3) - 2 * planes)
        across = across.expand(*vertical.shape, 2)
        return torch.cat([across, vertical.unsqueeze(-1)], dim=-1)

    def covariance(
        self, x: Float[Tensor, "*b #n #m 3"], z: Float[Tensor, "*b #n #m 3"]
    ) -> Float[Tensor, "*b n m 3 3"]:
        """Cov[f(x), f(z)] of the field f = −∇V."""
        d = self.lags(x, z)
        inverse = d.square().sum(-1).rsqrt()
        cubed = self.amplitudes[..., None, None] * inverse**3
        near, far = cubed.sum(-3), 3 * cubed * inverse.square()
        hessian = torch.einsum("...jnm,...jnmp,...jnmq->...nmpq", far, d, d)
        hessian = hessian - torch.diag_embed(near.unsqueeze(-1).expand(*near.shape, 3))
        left, right = self.signs(d)
        return hessian * left.unsqueeze(-1) * right

    def signs(self, like: Tensor) -> tuple[Float[Tensor, "3"], Float[Tensor, "3"]]:
        """The derivatives of the lag by x and by the mirrored z along every axis: ±1."""
        return like.new_tensor([1.0, 1.0, self.side]), like.new_tensor([-1.0, -1.0, self.side])

    def variance(self, height: Float[Tensor, "*b"]) -> Float[Tensor, "*b 3 3"]:
        """Cov f at a height: Σ a_j diag(1, 1, 2) / (2|z − p_j|)³."""
        cubes = (2 * self.distances(height.unsqueeze(-1)).squeeze(-1)) ** 3
        share = (self.amplitudes / cubes).sum(-1)
        return torch.diag_embed(share.unsqueeze(-1) * share.new_tensor([1.0, 1.0, 2.0]))
