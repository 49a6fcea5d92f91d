"""Sums of points in a ball: spectra of powers of Bessel functions."""

import math
from dataclasses import dataclass

import numpy as np
import scipy.special
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.scalar import BesselKernel, require_covariance_of
from gp_orff.kernels.spectra.base import Spectrum, spectrum
from gp_orff.kernels.spectra.elliptical import Radial


@dataclass(frozen=True)
class BesselSpectrum(Radial):
    """Spectrum of `BesselKernel`: z is the sum of t points, uniform in the unit ball.

    Le et al. (2013, Section 4.4) draw ‖z‖ from these points. It follows without them from t radii
    ρ = u^{1/d} and the cosines c of the angles between each point and the sum S of those before it:
    ‖S + ξ‖² = ‖S‖² + ρ² + 2‖S‖ρc, where (c + 1)/2 ~ Beta((d − 1)/2, (d − 1)/2).

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
        power: t.
        num_dims: d, the number of inputs.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.spectra.BesselSpectrum(torch.ones(1, 1), 3, num_dims=4).moment(1, 4)  # td/(d+2)
        2.0
    """

    power: int
    num_dims: int

    def num_coordinates(self, num_dims: int) -> int:
        return 2 * self.power - 1

    def radial_base(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        self._check(num_dims)
        if order:
            raise NotImplementedError(
                f"expected frequencies of the density p of a BesselKernel, got ‖z‖^{2 * order} p, "
                'which is not known; use measure="base"'
            )
        radii, levels = u[:, : self.power] ** (1 / num_dims), u[:, self.power :]
        total = radii[:, 0]
        for radius, cosine in zip(radii.T[1:], _cosines(levels, num_dims).T, strict=True):
            square = total**2 + radius**2 + 2 * total * radius * cosine
            total = np.sqrt(np.maximum(square, 0.0))
        return total[:, None]

    def _check(self, num_dims: int) -> None:
        """Check the number of dimensions.

        Raises:
            ValueError: it is not that of the kernel.
        """
        if num_dims != self.num_dims:
            raise ValueError(
                f"expected frequencies in {self.num_dims} dimensions, those of "
                f"BesselKernel(num_dims={self.num_dims}), got {num_dims}; give the kernel its "
                "number of inputs as num_dims, and, if the rule pads them to a power of two, use "
                "gp_orff.QuasiMonteCarlo or gp_orff.Orthogonal, which do not"
            )

    def frequencies(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "*b D d"]:
        return base / self.lengthscale

    def importance(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "D"]:
        return torch.ones_like(base[:, 0])

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """Raise, for all `omega` (*b, m, d): the density has no simple form.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a kernel whose spectral density can be evaluated, got BesselKernel, whose "
            "frequencies can only be drawn; use a random rule with shared=False, or "
            "gp_orff.Fastfood for an LCMKernel"
        )

    def moment(self, order: float, num_dims: int) -> float:
        """E‖z‖^{2m}, m = `order`.

        From E cos⟨z, x⟩ = Σ (−1)^m E‖z‖^{2m} (‖x‖²/4)^m / (m! (d/2)_m), and the same series of each
        point.

        Raises:
            NotImplementedError: m is not a whole number, and t > 1.
        """
        d = self.num_dims
        if self.power == 1:
            return d / (d + 2 * order)
        if order != int(order):
            raise NotImplementedError(
                f"expected a moment E‖z‖^(2m) of whole order m of BesselKernel with power > 1, got "
                f"m={order}; bounds of its error need power=1"
            )
        m = int(order)
        j = np.arange(m + 1)
        point = 1 / (scipy.special.factorial(j) * scipy.special.poch(d / 2 + 1, j))
        coefficient = np.polynomial.polynomial.polypow(point, self.power)[m]
        return float(math.factorial(m) * scipy.special.poch(d / 2, m) * coefficient)

    def frequency_parameters(self, shortest, longest):
        # correlations end at about ℓ √((d + 2)/t)
        scale = math.sqrt(self.power / (self.num_dims + 2))
        return super().frequency_parameters(scale * shortest, scale * longest)


def _cosines(u: Float[np.ndarray, "D k"], num_dims: int) -> Float[np.ndarray, "D k"]:
    """The u-quantiles of one coordinate of a point on the unit sphere."""
    if num_dims == 1:
        return np.where(u < 0.5, -1.0, 1.0)
    half = (num_dims - 1) / 2
    return 2 * scipy.special.betaincinv(half, half, u) - 1


@spectrum.register
def _(kernel: BesselKernel) -> Spectrum:
    require_covariance_of(BesselKernel, kernel)
    return BesselSpectrum(kernel.lengthscale, kernel.power, kernel.num_dims)
