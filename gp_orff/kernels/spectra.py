"""Spectral densities of stationary kernels: the protocol; radial kernels; uniform directions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import singledispatch
from typing import NamedTuple

import numpy as np
import scipy.special
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.base import require_covariance_of

# Spectral densities of gpytorch's stationary scalar kernels.
#
# By Bochner's theorem a stationary kernel with k(0) = 1 is the Fourier transform of a probability
# measure, its spectral measure:
#
#     k(x, z) = E cos⟨ω, x − z⟩ .
#
# A random ω is made in two steps. *Base variables* do not depend on hyperparameters and are drawn
# once. The present hyperparameters then turn them into frequencies, so that gradients flow to every
# hyperparameter. `spectrum(kernel)` returns the spectrum of a kernel.


GRID_INPUTS = 4  # the most inputs of a frequency grid by default: three of space, and time


class Range(NamedTuple):
    """A hyperparameter and the interval in which a search looks for it."""

    value: Tensor  # of the kernel itself: gradients flow to it
    low: float | Float[Tensor, "..."]
    high: float | Float[Tensor, "..."]
    stretch: float = 1.0  # relative change for a relative change of the frequencies


class Spectrum(ABC):
    """The spectral density of a stationary scalar kernel with k(0) = 1, as a probability measure.

    Frequencies ω are in radians per unit of the inputs. At unit lengthscales they are
    z = ℓω, with density p(z). Methods with an argument `order` = t use the density ∝ ‖z‖^{2t} p(z):
    t = 0 for scalar kernels, t = 1 for curl-free and divergence-free kernels, whose variance lies
    at higher frequencies because they are derivatives of k.

    Subclass this class for a kernel of your own, or `GridSpectrum`, for `Grid` as well. Define
    `num_coordinates`, `base`, `frequencies`, `importance`, `log_density` and `moment`; then
    register a function of the kernel with `gp_orff.spectrum.register`. Define
    `log_importance` too if `base` draws from another density than ∝ ‖z‖^{2t} p(z).

    Example:
        `gp_orff.spectrum` returns the spectrum of a kernel of gpytorch:

        >>> import gpytorch, gp_orff, torch
        >>> spectrum = gp_orff.spectrum(gpytorch.kernels.RBFKernel())
        >>> isinstance(spectrum, gp_orff.spectra.Spectrum)
        True
        >>> spectrum.log_density(torch.zeros(5, 2)).shape  # log S(ω) at 5 frequencies ω
        torch.Size([5])
        >>> spectrum.moment(order=1, num_dims=2)  # E‖z‖² of a standard normal z
        2.0
    """

    is_weighted = True  # whether `base` draws with weights ‖z‖^{2t}, t > 0, too

    @abstractmethod
    def num_coordinates(self, num_dims: int) -> int:
        """The number k of uniform coordinates u that `base` needs, for `num_dims` inputs."""

    @abstractmethod
    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Base variables (D, c) of the measure weighted to an order.

        Args:
            directions: (D, d), unit vectors.
            u: (D, k), uniform numbers in (0, 1), k = `num_coordinates(d)`.
            order: t, of the weight ‖z‖^{2t}.
        """

    @abstractmethod
    def frequencies(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D d"]:
        """ω (*b, D, d) from base variables `base` (D, c) of the measure weighted to `order`.

        It is differentiable in all hyperparameters of the kernel.
        """

    @abstractmethod
    def importance(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """Importance weights (*b, D) of `base` (D, c) drawn with weight ‖z‖^{2t}, t = `order`.

        The density of the measure over that of the weighted one: E‖z‖^{2t} / ‖z‖^{2t}.
        """

    @abstractmethod
    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """The density as log S(ω), (*b, m), at `omega` (*b, m, d), ∫ S(ω) dω = k(0) = 1."""

    def log_importance(self, omega: Float[Tensor, "*b m d"], order: int) -> Float[Tensor, "*b m"]:
        """The weights log S(ω)/ρ(ω), (*b, m), at any `omega` (*b, m, d).

        ρ is the density of `frequencies(base, order)`: S(ω) ‖z‖^{2t} / E‖z‖^{2t}, z = ℓω and
        t = `order`.

        Raises:
            NotImplementedError: t > 0, and no lengthscale ℓ is known.
        """
        if order == 0:
            return torch.zeros_like(omega[..., 0])
        if self.isotropic_lengthscale is None:
            raise NotImplementedError(
                f"expected a spectrum with an isotropic_lengthscale or a log_importance, got "
                f"{type(self).__name__}, which has neither; use shared=False"
            )
        squared_radius = (omega * self.isotropic_lengthscale).square().sum(-1)
        return (self.moment(order, omega.shape[-1]) / squared_radius**order).log()

    @abstractmethod
    def moment(self, order: float, num_dims: int) -> float:
        """E‖z‖^{2t}, t = `order`, for `num_dims` inputs; infinite if the kernel is too rough.

        t is a whole number or, for `gp_orff.bounds`, half of one.
        """

    @property
    def isotropic_lengthscale(self) -> Float[Tensor, "*b 1 d"] | None:
        """ℓ (*b, 1, d) with which the distribution of ℓω is isotropic; None where no ℓ is known."""
        return None

    def frequency_parameters(
        self, shortest: Float[np.ndarray, "k"], longest: Float[np.ndarray, "k"]
    ) -> list[Range]:
        """The hyperparameters that move the frequencies, and the intervals to search.

        Args:
            shortest: (k,), the shortest distances in the data along the k inputs of the kernel.
            longest: (k,), the longest distances.
        """
        lengthscale = self.isotropic_lengthscale
        if lengthscale is None:
            return []
        if lengthscale.shape[-1] == 1:
            return [Range(lengthscale, float(shortest.min()), float(longest.max()))]
        low, high = (torch.from_numpy(bound).to(lengthscale) for bound in (shortest, longest))
        return [Range(lengthscale, low, high)]


class GridSpectrum(Spectrum):
    """A spectrum for `Grid`, which also bounds the variance that a frequency grid leaves out.

    A `Grid` needs the share of the variance beyond its largest frequency (`tail`), and the size of
    the covariance at large lags (`correlation`). A subclass for a kernel of your own defines these
    two, `scaled_radius` and `second_moments`, besides the methods of `Spectrum`.

    Example:
        The share of the variance of an RBF kernel in two dimensions with ‖ℓω‖ > 2, which is e⁻²:

        >>> import gpytorch, gp_orff
        >>> spectrum = gp_orff.spectrum(gpytorch.kernels.RBFKernel())
        >>> round(float(spectrum.tail(scaled_radius=2.0, order=0, num_dims=2)), 6)
        0.135335
    """

    @abstractmethod
    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        """A norm (D,) of `omega` (D, d), even in every coordinate.

        Grids end at one of its level sets. For a batch of kernels it is the smallest norm of them.
        """

    @abstractmethod
    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        """The share of E‖z‖^{2t} outside a level set of `scaled_radius`, at which a grid ends.

        Args:
            scaled_radius: the level.
            order: t, of the weight ‖z‖^{2t}.
            num_dims: d, the number of inputs.
        """

    @abstractmethod
    def correlation(self, lag: float, axis: int, order: int) -> float:
        """A bound of |K(r)| / |K(0)| for all lags r ≥ `lag` along the input `axis`.

        K is the kernel whose spectral measure is this one, weighted by ‖z‖^{2t}, t = `order`.
        """

    @abstractmethod
    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """The second moments E ω_i², (*b, d), d = `num_dims`; the coordinates are uncorrelated."""

    def marginal(self, dims: Sequence[int], order: int = 0) -> "GridSpectrum | None":
        """The distribution of the coordinates `dims` of ω; None if it is not known here.

        With it, a grid sums over the frequencies along inputs that are constant.

        Args:
            dims: the coordinates, at least one and not all.
            order: t, of a weight ω_a^{2t}, where a is any other coordinate.
        """
        return None

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "m"]:
        """Further lengths (m,) along the `num_dims` inputs that a grid is built for.

        They come beside the lengths that `scaled_radius` gives; most spectra have none.
        """
        return np.zeros(0)


@singledispatch
def spectrum(kernel: Kernel) -> Spectrum:
    """The spectral density of a stationary scalar kernel, at its present hyperparameters.

    Known are `RBFKernel`, `MaternKernel`, `GeneralMaternKernel` (any ν > 0), `RQKernel` (α is
    trained too), `BesselKernel` and `SpectralMixtureKernel`, with one lengthscale or ARD. To use
    another kernel, register a function that returns its `gp_orff.spectra.Spectrum`; the package
    then accepts it. A curl-free or divergence-free kernel of it also needs
    `gp_orff.radial_derivatives` for the exact covariance.

    Dot-product kernels, `LinearKernel`, `PolynomialKernel` and `DotProductKernel`, are not
    stationary. What is registered for them are their eigenvalues, which is no `Spectrum`.

    Args:
        kernel: a stationary scalar kernel. Its variance k(0) does not matter.

    Returns:
        A `Spectrum`, the spectral density of k / k(0).

    Raises:
        NotImplementedError: the class of the kernel is not registered.

    Example:
        >>> import gpytorch, gp_orff
        >>> matern = gp_orff.spectrum(gpytorch.kernels.MaternKernel(nu=2.5))
        >>> round(matern.moment(order=1, num_dims=2), 6)  # E‖ℓω‖² = d ν/(ν − 1)
        3.333333

        A kernel of your own, here a Matérn 5/2 kernel under another name:

        >>> class MyKernel(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.spectrum.register
        ... def _(kernel: MyKernel):
        ...     return gp_orff.spectra.StudentT(kernel.lengthscale, nu=2.5)
        >>> gp_orff.ORFFKernel(MyKernel(ard_num_dims=3), gp_orff.MonteCarlo(64)).num_features
        128
    """
    raise NotImplementedError(
        f"no spectral density is known for {type(kernel).__name__}; known are "
        f"{registered(spectrum)}. "
        "Register yours with @gp_orff.spectrum.register (see its docstring)."
    )


def spectral_density(kernel: Kernel, owner: str) -> Spectrum:
    """The spectrum of a base kernel of `owner`, which has to be stationary.

    Raises:
        NotImplementedError: the class of the kernel is not registered, or has no spectral density.
    """
    density = spectrum(kernel)
    if not isinstance(density, Spectrum):
        raise NotImplementedError(
            f"{owner} expects a stationary base kernel, got {type(kernel).__name__}, a function of "
            "inner products, which has no spectral density; use RBFKernel, MaternKernel or "
            "RQKernel, or a separable kernel, such as MultitaskKernel, of this one"
        )
    return density


# Scalar kernels of the scaled distance.


class RadialKernel(Kernel):
    """A stationary scalar kernel k(x, z) = κ(s) of this package, s = ‖(x − z)/ℓ‖², κ(0) = 1.

    A subclass defines `correlation` and `spectrum`. Its covariance, the exact field kernels of it
    and its features follow. If its arguments are attributes of the same names, models with it can
    be saved.
    """

    spectrum: Spectrum  # at the present hyperparameters
    has_lengthscale = True
    highest_order = 2  # of the derivatives that `correlation` knows, at least 2

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """κ(s), or a derivative by s.

        Args:
            s: (*m), squared distances in units of the lengthscale.
            order: of the derivative, up to `highest_order`.
        """
        raise NotImplementedError

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        **params,
    ) -> Float[Tensor, "*b n m"]:
        """k(x1, x2), or its diagonal (*b, n) if `diag`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: return the diagonal only.
            params: further arguments of gpytorch's `covar_dist`.
        """
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            s = (x1 - x2).square().sum(-1, keepdim=True)
            return self.correlation(s).squeeze(-1)
        return self.correlation(self.covar_dist(x1, x2, square_dist=True, **params))


@spectrum.register
def _(kernel: RadialKernel) -> Spectrum:
    owner = next(cls for cls in type(kernel).__mro__ if "spectrum" in vars(cls))
    require_covariance_of(owner, kernel)
    return kernel.spectrum


def registered(function: Callable) -> str:
    """The kernels that a function is registered for, and those of this package, for messages."""
    classes = [cls for cls in function.registry if cls not in (object, RadialKernel)]
    return ", ".join(sorted(cls.__name__ for cls in classes + RadialKernel.__subclasses__()))


# Quadrature over the unit sphere.


_MANY_DIMS = 14  # log₂ of the number of quasi-random points for more than three dimensions


def unit_sphere(
    dims: int, device: torch.device, angles: int = 128
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Unit vectors and weights of a mean over the sphere; spectrally accurate for dims ≤ 3.

    `angles` points lie on a circle; a sphere has half as many circles.
    """
    if dims == 1:
        points = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    elif dims <= 3:
        angle = torch.arange(angles, dtype=torch.float64) * (2 * math.pi / angles)
        points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        from scipy.stats import qmc  # takes a second to import, and is rarely needed

        sequence = qmc.Sobol(dims, seed=0).random_base2(_MANY_DIMS)
        normal = torch.from_numpy(scipy.special.ndtri(sequence))
        points = normal / normal.norm(dim=-1, keepdim=True)
    points = points.to(device)
    if dims != 3:
        return points, points.new_full((len(points),), 1 / len(points))
    height, weight = (
        torch.from_numpy(v).to(device) for v in np.polynomial.legendre.leggauss(angles // 2)
    )
    flat = (1 - height.square()).sqrt()[:, None, None] * points  # (circles, angles, 2)
    heights = height[:, None, None].expand(*flat.shape[:2], 1)
    weights = (0.5 * weight / len(points)).repeat_interleave(len(points))
    return torch.cat([flat, heights], dim=-1).flatten(0, 1), weights
