"""Gaussian and Student-t spectral densities, of RBF and Matérn kernels."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.special
import scipy.stats
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.scalar import GeneralMaternKernel, require_covariance_of
from gp_orff.kernels.spectra.base import GridSpectrum, Spectrum, spectrum


@dataclass(frozen=True)
class Radial(Spectrum):
    """A spectrum of ω = z / ℓ with isotropic z: a uniform direction times a radius ‖z‖.

    Base variables are the direction times a radius, and what else turns this into ‖z‖.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
    """

    lengthscale: Float[Tensor, "*b 1 d"]

    @property
    def isotropic_lengthscale(self) -> Float[Tensor, "*b 1 d"]:
        return self.lengthscale

    def inverse_lengthscale(self, num_dims: int) -> Float[Tensor, "*b 1 d"]:
        """1/ℓ of every input."""
        return self.lengthscale.reciprocal().expand(*self.lengthscale.shape[:-1], num_dims)

    @abstractmethod
    def radial_base(
        self, u: Float[np.ndarray, "D k"], num_dims: int, order: int
    ) -> Float[np.ndarray, "D c"]:
        """Base variables of ‖z‖ in `num_dims` dimensions, the first of which scales a direction.

        `u` are uniform numbers, k = `num_coordinates(num_dims)`; `order` is that of `base`.
        """

    def radii(self, radial: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """‖z‖ from base variables, differentiable in the hyperparameters."""
        return radial[:, 0]

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        radial = self.radial_base(u, directions.shape[-1], order)
        return np.concatenate([directions * radial[:, :1], radial[:, 1:]], axis=-1)

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """E ω_i², (*b, d); the coordinates are uncorrelated."""
        variance = self.moment(1, num_dims) / num_dims / self.lengthscale.square()
        return variance.expand(*variance.shape[:-1], num_dims).squeeze(-2)


@dataclass(frozen=True)
class Elliptical(Radial, GridSpectrum):
    """A radial spectrum whose density and tail are known."""

    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        lengthscale = self._lengthscales(np.min, omega.shape[-1])
        return np.linalg.norm(omega * lengthscale, axis=-1)  # ‖ℓω‖

    def correlation(self, lag: float, axis: int, order: int) -> float:
        return self._radial_correlation(lag / self._lengthscales(np.max, axis + 1)[axis], order)

    def _lengthscales(self, over_batch: Callable, num_dims: int) -> Float[np.ndarray, "d"]:
        """ℓ of every input, reduced over the batch."""
        lengthscale = self.lengthscale.detach().double().cpu().numpy()
        lengthscale = over_batch(lengthscale.reshape(-1, lengthscale.shape[-1]), axis=0)
        return np.broadcast_to(lengthscale, (num_dims,)) if len(lengthscale) == 1 else lengthscale

    def marginal(self, dims: Sequence[int], order: int = 0) -> "Elliptical | None":
        shared = self.lengthscale.shape[-1] == 1
        lengthscale = self.lengthscale if shared else self.lengthscale[..., list(dims)]
        return replace(self, lengthscale=lengthscale)._weighted_across(order)

    def _weighted_across(self, order: int) -> "Elliptical | None":
        """The spectrum of some coordinates, weighted by ω_a^{2t} of another one, t = `order`.

        As z = √s g with normal g, it is that of s weighted by s^t. None if it is not known here.
        """
        return None

    def num_coordinates(self, num_dims: int) -> int:
        return 1

    def radial_base(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        return np.sqrt(self._squared_radius(u[:, :1], num_dims, order))

    @abstractmethod
    def _squared_radius(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        """The u-quantile of the square of the radius that scales a direction."""

    def frequencies(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "*b D d"]:
        return base / self.lengthscale

    def importance(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "D"]:
        return self.moment(order, base.shape[-1]) / base.square().sum(-1) ** order

    def _scaled(self, omega: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor]:
        """‖ℓω‖² and log det ℓ of the change of variables."""
        d = omega.shape[-1]
        lengthscale = self.lengthscale.expand(*self.lengthscale.shape[:-1], d)
        return (omega * lengthscale).square().sum(-1), lengthscale.log().sum(-1)


@dataclass(frozen=True)
class ScaleMixture(Elliptical):
    """A radial spectrum of z = √s g, g ~ N(0, I), with a random scale s > 0.

    Weighted by ‖z‖^{2t}: s weighted by s^t, and ‖g‖² ~ χ²_{d+2t}. Base variables are g and the
    quantile level of s.

    Example:
        >>> import gp_orff, gpytorch
        >>> mixture = gp_orff.spectrum(gpytorch.kernels.RQKernel(ard_num_dims=2))
        >>> isinstance(mixture, gp_orff.spectra.ScaleMixture)
        True
        >>> nodes, weights = mixture.scales(least=1e-3)
        >>> abs(weights.sum().item() - 1) < 1e-6
        True
    """

    @abstractmethod
    def scales(self, least: float) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
        """Nodes s and weights (*b, n) of quadrature for E f(s), f constant below `least`."""

    @abstractmethod
    def scale(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """s of the base variables, whose last column is its level."""

    def num_coordinates(self, num_dims: int) -> int:
        return 2

    def radial_base(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        return np.concatenate([super().radial_base(u, num_dims, order), u[:, 1:2]], axis=-1)

    def _squared_radius(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        """The u-quantile of ‖g‖²."""
        return chi2_quantile(u, num_dims + 2 * order)

    def radii(self, radial: Float[Tensor, "D 2"], order: int) -> Float[Tensor, "*b D"]:
        return self.scale(radial, order).sqrt() * radial[:, 0]

    def frequencies(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D d"]:
        return self.scale(base, order).sqrt().unsqueeze(-1) * base[:, :-1] / self.lengthscale

    def importance(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        radius2 = self.scale(base, order) * base[:, :-1].square().sum(-1)
        return self.moment(order, base.shape[-1] - 1) / radius2**order


@dataclass(frozen=True)
class Gaussian(Elliptical):
    """Spectrum of the RBF kernel exp(−½‖τ/ℓ‖²): ω ~ N(0, diag ℓ⁻²), so that ‖z‖² ~ χ²_d.

    Weighted by ‖z‖^{2t}: ‖z‖² ~ χ²_{d+2t} (Rahimi & Recht 2007; with the weight, Minh
    2016, Example 4).

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.spectra.Gaussian(torch.ones(1, 1)).moment(order=1, num_dims=2)  # E‖z‖² = d
        2.0
    """

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        return log_det - 0.5 * (radius2 + omega.shape[-1] * math.log(2 * math.pi))

    def moment(self, order: float, num_dims: int) -> float:
        return chi2_moment(order, num_dims)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        return chi2_tail(scaled_radius**2, num_dims + 2 * order)

    def _weighted_across(self, order: int) -> "Gaussian":
        return self  # s = 1

    def _radial_correlation(self, r: float, order: int) -> float:
        """`correlation` from the scaled lag r on: max(1, r²)^t e^{−r²/2}."""
        return max(1.0, r * r) ** order * math.exp(-0.5 * r * r)

    def _squared_radius(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        """The u-quantile of ‖z‖²."""
        return chi2_quantile(u, num_dims + 2 * order)


@dataclass(frozen=True)
class StudentT(Elliptical):
    """Spectrum of the Matérn kernel: multivariate Student t, 2ν degrees of freedom, scale 1/ℓ.

    ‖z‖²/2ν ~ BetaPrime(d/2, ν). Weighted by ‖z‖^{2t}: BetaPrime(d/2 + t, ν − t), for ν > t only.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
        nu: ν > 0, the smoothness.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.spectra.StudentT(torch.ones(1, 1), nu=0.5).moment(order=1, num_dims=2)
        inf
    """

    nu: float

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        d, nu = omega.shape[-1], self.nu
        normaliser = (
            math.lgamma(nu + d / 2) - math.lgamma(nu) - 0.5 * d * math.log(2 * math.pi * nu)
        )
        return log_det + normaliser - (nu + d / 2) * torch.log1p(radius2 / (2 * nu))

    def moment(self, order: float, num_dims: int) -> float:
        if self.nu <= order:
            return math.inf
        # E‖z‖^{2t} = ν^t · E[χ²_d^t] · Γ(ν − t)/Γ(ν)
        log_ratio = math.lgamma(self.nu - order) - math.lgamma(self.nu)
        return self.nu**order * chi2_moment(order, num_dims) * math.exp(log_ratio)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        x = scaled_radius**2 / (2 * self.nu)
        # P(beta variable > x/(1 + x)) = P(its complement < 1/(1 + x))
        return float(scipy.special.betainc(self.nu - order, num_dims / 2 + order, 1 / (1 + x)))

    def _weighted_across(self, order: int) -> "StudentT":
        nu = self.nu - order  # 1/s ~ Gamma(ν, rate ν) becomes Gamma(ν − t, rate ν)
        return replace(self, lengthscale=self.lengthscale * math.sqrt(nu / self.nu), nu=nu)

    def _radial_correlation(self, r: float, order: int) -> float:
        """The larger of |M_{ν−t}(z)| and, for t = 1, |z M′_{ν−t}(z) + M_{ν−t}(z)|; z = √(2ν) r."""
        nu, z = self.nu - order, math.sqrt(2 * self.nu) * r
        if z < 1e-3:
            return 1.0
        scale = 2 ** (1 - nu) / scipy.special.gamma(nu) * z**nu
        across = scale * scipy.special.kv(nu, z)
        along = order * scale * z * scipy.special.kv(nu - 1, z) - across
        return float(max(abs(across), abs(along)))

    def _squared_radius(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        """The u-quantile of ‖z‖²."""
        a, b = num_dims / 2 + order, self.nu - order
        # quantile x/(1 − x) of a beta variable x; 1 − x by its own quantile keeps the tail exact
        x, complement = scipy.special.betaincinv(a, b, u), scipy.special.betaincinv(b, a, 1 - u)
        return 2 * self.nu * x / complement


def chi2_quantile(u: np.ndarray, degrees: int) -> np.ndarray:
    """The u-quantile of χ² with so many degrees of freedom."""
    return 2 * scipy.special.gammaincinv(degrees / 2, u)


def chi2_tail(x: np.ndarray | float, degrees: int) -> np.ndarray | float:
    """P(χ² > x), χ² with so many degrees of freedom."""
    return scipy.special.gammaincc(degrees / 2, x / 2)


def chi2_moment(order: float, degrees: int) -> float:
    """E[(χ²_d)^t], t = order, d = degrees of freedom."""
    return float(2.0**order * scipy.special.poch(degrees / 2, order))


@spectrum.register
def _(kernel: RBFKernel) -> Spectrum:
    require_covariance_of(RBFKernel, kernel)
    return Gaussian(kernel.lengthscale)


@spectrum.register
def _(kernel: MaternKernel) -> Spectrum:
    require_covariance_of(MaternKernel, kernel)
    return StudentT(kernel.lengthscale, kernel.nu)


@spectrum.register
def _(kernel: GeneralMaternKernel) -> Spectrum:
    return StudentT(kernel.lengthscale, kernel.nu)
