"""Fields of a lattice's columns on a periodic grid of points: weights ↔ images, by FFT.

A field φ(x) w of columns cos⟨k, θ⟩ and sin⟨k, θ⟩ is a trigonometric polynomial. Its values at the
points θ_u = 2πu/n are its image. For sums T(q) = Σ_n a_n exp(i⟨q, θ_n⟩) and n > 4m,

    Σ_n a_n f(x_n) g(x_n) = Σ_u t(u) f(u) g(u) ,     t(u) = n⁻¹ Σ_q T(q) exp(−i⟨q, θ_u⟩) ,

for any two such fields: products with C = φᵀ diag(a) φ are products with t on the grid.
"""

from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Complex, Float, Int
from scipy.fft import next_fast_len
from torch import Tensor

from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns


@dataclass(frozen=True)
class Images:
    """Weights of features, one for each of F columns ↔ images on n_1 × … × n_d points.

    Fourier coefficients are in the layout of a real FFT, where the last index is not negative: of
    each pair ±k, the one with k_d ≥ 0.
    """

    modes: tuple[int, ...]  # m_i
    points: tuple[int, ...]  # n_i
    slots: Int[Tensor, "F"]  # of the real or imaginary part of a feature's coefficient
    scale: Float[Tensor, "F"]  # of a weight, as a part of the coefficient: ±½, or 1 at k = 0
    signs: Float[Tensor, "F"]  # of Σ_n a_n f(x_n) φ(x_n), as a part of the transform of t f
    plane: Int[Tensor, "k"]  # coefficients with k_d = 0 that are set
    mirrored: Int[Tensor, "k"]  # those at −k

    @classmethod
    def of(cls, expansion: FeatureExpansion) -> "Images":
        """The images of the features' columns, which are those of a lattice."""
        phi: LatticeColumns = expansion.phi
        points = tuple(next_fast_len(4 * m + 1, real=True) for m in phi.modes)
        extents = _half(points, phi.modes)
        frequency = expansion.columns % len(phi.indices)
        sine = expansion.columns >= len(phi.indices)
        k = phi.indices
        flipped = k[:, -1] < 0
        k = torch.where(flipped.unsqueeze(-1), -k, k)
        place = _places(k, points, extents)
        zero = ~k.any(-1)
        on_plane = (k[:, -1] == 0) & ~zero
        negative = (sine & ~flipped[frequency]).double()  # the coefficient is ½ (a − i b)
        scale = torch.where(zero, 1.0, 0.5).double()[frequency] * (1 - 2 * negative)
        return cls(
            phi.modes,
            points,
            2 * place[frequency] + sine,
            scale,
            1 - 2 * negative,  # Σ a f exp(iθ) is the conjugate of the transform
            place[on_plane],
            _places(-k[on_plane], points, extents),
        )

    @property
    def size(self) -> int:
        """The number of points of an image."""
        return prod(self.points)

    def of_weights(self, weights: Float[Tensor, "*b F"]) -> Float[Tensor, "*b n"]:
        """The values φ(θ_u) w on the grid, flat."""
        batch, extents = weights.shape[:-1], _half(self.points, self.modes)
        parts = weights.new_zeros(*batch, 2 * prod(extents))
        parts.scatter_add_(-1, self.slots.expand(*batch, -1), weights * self.scale)
        values = torch.view_as_complex(parts.unflatten(-1, (-1, 2)))
        values[..., self.mirrored] = values[..., self.plane].conj()
        return self._synthesis(values.unflatten(-1, extents)).flatten(len(batch))

    def adjoint(self, images: Float[Tensor, "*b n"]) -> Float[Tensor, "*b F"]:
        """Σ_u g(u) φ(θ_u) for the column of every feature."""
        axes = range(-len(self.points), -1)
        values = torch.fft.rfft(images.unflatten(-1, self.points))[..., : self.modes[-1] + 1]
        if len(self.points) > 1:
            values = torch.fft.fftn(values, dim=tuple(axes))
        parts = torch.view_as_real(values.contiguous()).flatten(images.dim() - 1)
        return parts[..., self.slots] * self.signs

    def of_sums(self, sums: Complex[Tensor, "q"]) -> Float[Tensor, "n"]:
        """t(u) from T, a flat array over |q_i| ≤ 2 m_i."""
        double = tuple(2 * m for m in self.modes)
        box = sums.reshape([2 * m + 1 for m in double])[..., double[-1] :].conj()
        for axis, (m, n) in enumerate(zip(double[:-1], self.points[:-1], strict=True)):
            q = torch.arange(-m, m + 1, device=box.device) % n
            shape = [*box.shape[:axis], n, *box.shape[axis + 1 :]]
            box = box.new_zeros(shape).index_copy_(axis, q, box)
        return self._synthesis(box).flatten() / self.size

    def _synthesis(self, values: Complex[Tensor, "*b h"]) -> Float[Tensor, "*b n"]:
        """Values of a field from its coefficients."""
        if len(self.points) > 1:
            axes = tuple(range(-len(self.points), -1))
            values = torch.fft.ifftn(values, dim=axes, norm="forward")
        return torch.fft.irfft(values, n=self.points[-1], norm="forward")


def _half(points: tuple[int, ...], modes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the coefficients, of which no last index exceeds m_d."""
    return (*points[:-1], modes[-1] + 1)


def _places(
    k: Int[Tensor, "D d"], points: tuple[int, ...], extents: tuple[int, ...]
) -> Int[Tensor, "D"]:
    """The positions of frequencies k in a flat array of coefficients."""
    place = torch.zeros_like(k[:, 0])
    for index, n, extent in zip(k.mT, points, extents, strict=True):
        place = place * extent + index % n
    return place
