"""Spectral densities of gpytorch's stationary scalar kernels.

Bochner's theorem writes a stationary kernel as the Fourier transform of a probability law,

    k(x, z) = E cos⟨ω, x − z⟩ ,      ω = z / ℓ ,

with `z` in *base units* (unit lengthscale) and ℓ the kernel's own lengthscales, one or one per
input dimension (ARD). `spectrum(kernel)` gives that law for one kernel.
"""

import math
from dataclasses import dataclass
from functools import singledispatch
from typing import Protocol

import numpy as np
import torch
from gpytorch.kernels import Kernel, Matern52KernelGrad, MaternKernel, RBFKernel, RBFKernelGrad
from jaxtyping import Float
from torch import Tensor


class Spectrum(Protocol):
    """The law of the frequencies of a scalar kernel with k(0) = 1.

    A *tilt* t stands for the law with density proportional to ‖z‖^{2t} p(z). Fields that are
    derivatives of a potential put their variance at higher frequencies; t = 1 is the law of
    that variance for curl-free and divergence-free kernels.
    """

    def frequencies(self, z: Float[Tensor, "D d"]) -> Float[Tensor, "*b D d"]:
        """ω = z / ℓ, differentiable with respect to the kernel's lengthscales."""

    def log_density(self, omega: Float[Tensor, "*m d"]) -> Float[Tensor, "*m"]:
        """log S(ω) with ∫ S(ω) dω = k(0) = 1, at the kernel's present lengthscales."""

    def moment(self, tilt: int, num_dims: int) -> float:
        """E ‖z‖^{2·tilt}; infinite where the kernel is not smooth enough."""

    def sample(self, num: int, num_dims: int, tilt: int, rng: np.random.Generator) -> np.ndarray:
        """`num` independent draws of z (num, d) from the law tilted by ‖z‖^{2·tilt}."""


def _isotropic(squared_radii: np.ndarray, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Points at the given squared radii in independent uniform directions."""
    directions = rng.standard_normal((len(squared_radii), num_dims))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    return np.sqrt(squared_radii)[:, None] * directions


@dataclass(frozen=True)
class _Elliptical:
    """What isotropic spectra share: in base units z has a radius and a uniform direction."""

    lengthscale: Float[Tensor, "*b 1 d"]

    def frequencies(self, z: Float[Tensor, "D d"]) -> Float[Tensor, "*b D d"]:
        return z / self.lengthscale

    def _scaled(
        self, omega: Float[Tensor, "*m d"]
    ) -> tuple[Float[Tensor, "*m"], Float[Tensor, ""]]:
        """‖ℓω‖² and log det ℓ of the change of variables."""
        lengthscale = self.lengthscale.squeeze(-2).expand(
            *self.lengthscale.shape[:-2], omega.shape[-1]
        )
        return (omega * lengthscale).square().sum(-1), lengthscale.log().sum(-1)


@dataclass(frozen=True)
class Gaussian(_Elliptical):
    """Spectrum of the RBF kernel exp(−½‖τ/ℓ‖²): ω ~ N(0, diag ℓ⁻²), so ‖z‖² ~ χ²_d.

    Tilted by ‖z‖^{2t}: ‖z‖² ~ χ²_{d+2t} (Rahimi & Recht 2007; Minh 2016 for the tilt).
    """

    def log_density(self, omega: Float[Tensor, "*m d"]) -> Float[Tensor, "*m"]:
        radius2, log_det = self._scaled(omega)
        return log_det - 0.5 * (radius2 + omega.shape[-1] * math.log(2 * math.pi))

    def moment(self, tilt: int, num_dims: int) -> float:
        return 2.0**tilt * math.gamma(num_dims / 2 + tilt) / math.gamma(num_dims / 2)

    def sample(self, num: int, num_dims: int, tilt: int, rng: np.random.Generator) -> np.ndarray:
        return _isotropic(2 * rng.standard_gamma(num_dims / 2 + tilt, num), num_dims, rng)


@dataclass(frozen=True)
class StudentT(_Elliptical):
    """Spectrum of the Matérn kernel: multivariate Student t, 2ν degrees of freedom, scale 1/ℓ.

    ‖z‖² = 2ν · Gamma(d/2) / Gamma(ν). Tilted by ‖z‖^{2t}: 2ν · Gamma(d/2 + t) / Gamma(ν − t),
    which exists for ν > t only.
    """

    nu: float

    def log_density(self, omega: Float[Tensor, "*m d"]) -> Float[Tensor, "*m"]:
        radius2, log_det = self._scaled(omega)
        d, nu = omega.shape[-1], self.nu
        normaliser = (
            math.lgamma(nu + d / 2) - math.lgamma(nu) - 0.5 * d * math.log(2 * math.pi * nu)
        )
        return log_det + normaliser - (nu + d / 2) * torch.log1p(radius2 / (2 * nu))

    def moment(self, tilt: int, num_dims: int) -> float:
        if self.nu <= tilt:
            return math.inf
        numerator = math.gamma(num_dims / 2 + tilt) * math.gamma(self.nu - tilt)
        return (2 * self.nu) ** tilt * numerator / (math.gamma(num_dims / 2) * math.gamma(self.nu))

    def sample(self, num: int, num_dims: int, tilt: int, rng: np.random.Generator) -> np.ndarray:
        radius2 = rng.standard_gamma(num_dims / 2 + tilt, num) / rng.standard_gamma(
            self.nu - tilt, num
        )
        return _isotropic(2 * self.nu * radius2, num_dims, rng)


@singledispatch
def spectrum(kernel: Kernel) -> Spectrum:
    """The spectral law of a stationary scalar kernel, at its present hyperparameters.

    Known: `RBFKernel`, `MaternKernel` (any ν it accepts), with one lengthscale or ARD.

    Raises:
        NotImplementedError: for every other kernel; register a `Spectrum` for your own with
            `gp_orff.spectrum.register(MyKernel)`.

    Example:
        >>> import gpytorch, gp_orff
        >>> law = gp_orff.spectrum(gpytorch.kernels.MaternKernel(nu=2.5))
        >>> law.moment(tilt=1, num_dims=2)          # E‖z‖² = d ν/(ν − 1)
        3.333333333333333
    """
    known = ", ".join(sorted(cls.__name__ for cls in spectrum.registry if cls not in _UNKNOWN))
    raise NotImplementedError(
        f"no spectral density is known for {type(kernel).__name__}; known are {known}. "
        "Register yours with @gp_orff.spectrum.register(YourKernel)."
    )


# gpytorch's derivative kernels inherit from RBFKernel and MaternKernel but are different kernels.
_UNKNOWN = (object, RBFKernelGrad, Matern52KernelGrad)
for _cls in _UNKNOWN[1:]:
    spectrum.register(_cls, spectrum.dispatch(object))


@spectrum.register
def _(kernel: RBFKernel) -> Spectrum:
    return Gaussian(kernel.lengthscale)


@spectrum.register
def _(kernel: MaternKernel) -> Spectrum:
    return StudentT(kernel.lengthscale, kernel.nu)
