"""Spectral densities of stationary kernels: base classes, radial kernels, and Gaussian mixtures."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, singledispatch
from typing import NamedTuple

import numpy as np
import scipy
import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel, SpectralMixtureKernel
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import Function

from gp_orff.kernels.base import parts_of, require_covariance_of

# Spectral densities of gpytorch's stationary scalar kernels.
#
# By Bochner's theorem, a stationary kernel with k(0) = 1 is the Fourier transform of a probability
# measure of frequencies ω, its spectral measure:
#
#     k(x, z) = E cos⟨ω, x − z⟩ .
#
# A random ω is drawn in two steps. *Base variables* do not depend on hyperparameters, and are drawn
# once. The current hyperparameters then map base variables to frequencies, so that gradients flow
# to every hyperparameter. `spectrum(kernel)` returns the spectrum of a kernel.


GRID_INPUTS = 4  # the default maximum of inputs of a frequency grid: three of space, and time


class Range(NamedTuple):
    """A hyperparameter and the interval in which a fit searches for it.

    Attributes:
        value: the hyperparameter of the kernel itself, so that gradients flow to it.
        low: the lower end of the interval.
        high: the upper end of the interval.
        stretch: the relative change of the hyperparameter, divided by the relative change of the
            frequencies that it causes; 1 for a lengthscale.
    """

    value: Tensor
    low: float | Float[Tensor, "..."]
    high: float | Float[Tensor, "..."]
    stretch: float = 1.0


class KernelSpectrum:
    """The spectrum of a kernel: a `Spectrum`, or another class for kernels that are not stationary.

    Attributes:
        is_stationary: whether this is a `Spectrum`; False by default.
        is_line: whether this is a `LineSpectrum`, which has no density; False by default.
        for_grids: whether this is a `GridSpectrum`; False by default.
        is_radial: whether this is a `Radial` spectrum; False by default.
        is_gaussian: whether this is the spectrum of an RBF kernel; False by default.
    """

    is_stationary = False
    is_line = False
    for_grids = False
    is_radial = False
    is_gaussian = False

    def marginal(self, dims: Sequence[int], order: int = 0) -> "GridSpectrum | None":
        """Return the marginal distribution of some coordinates of ω, or None if it is unknown.

        A grid uses it to sum over the frequencies along inputs that are constant in the data.

        Args:
            dims: the coordinates, at least one and not all.
            order: t, the exponent of a weight ω_a^{2t}, where a is any coordinate not in `dims`.
        """
        return None


class Spectrum(KernelSpectrum, ABC):
    """The spectral density of a stationary scalar kernel k with k(0) = 1.

    The spectral density S(ω) is the probability density with k(x, z) = E cos⟨ω, x − z⟩. Frequencies
    ω are in radians per unit of the inputs. The scaled frequency z = ℓω, with the lengthscales ℓ,
    has the density p(z).

    Methods with an argument `order` = t use the weighted density ∝ ‖z‖^{2t} p(z). Scalar kernels
    use t = 0. Curl-free and divergence-free kernels use t = 1, because they are second derivatives
    of k, and their variance lies at higher frequencies.

    To define the spectral density of a new kernel, subclass this class and define
    `num_coordinates`, `base`, `frequencies`, `importance`, `log_density` and `moment`. If `base`
    draws from another density than ∝ ‖z‖^{2t} p(z), define `log_importance` too. Subclass
    `GridSpectrum` instead if `Grid` should support the kernel. Then register a function of the
    kernel with `gp_orff.spectrum.register`.

    Attributes:
        has_density: True, the default, for a density; False for a sum of spectral lines.
        is_weighted: whether `base` supports t > 0; True by default.

    Example:
        `gp_orff.spectrum` returns the spectrum of a gpytorch kernel:

        >>> import gpytorch, gp_orff, torch
        >>> spectrum = gp_orff.spectrum(gpytorch.kernels.RBFKernel())
        >>> isinstance(spectrum, gp_orff.spectra.Spectrum)
        True
        >>> omega = torch.zeros(5, 2)  # 5 frequencies of 2 inputs
        >>> spectrum.log_density(omega).shape
        torch.Size([5])
        >>> spectrum.moment(order=1, num_dims=2)  # E‖z‖² of a standard normal z
        2.0
    """

    is_stationary = True
    has_density = True
    is_weighted = True

    @abstractmethod
    def num_coordinates(self, num_dims: int) -> int:
        """Return k, the number of uniform coordinates that `base` needs for `num_dims` inputs."""

    @abstractmethod
    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Return c base variables (D, c) for each of D frequencies, without hyperparameters.

        Args:
            directions: (D, d), random unit vectors.
            u: (D, k), uniform random numbers in (0, 1), with k = `num_coordinates(d)`.
            order: t, the exponent of the weight ‖z‖^{2t} of the density of z.
        """

    @abstractmethod
    def frequencies(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D d"]:
        """Return the frequencies ω (*b, D, d), differentiable in all hyperparameters.

        Args:
            base: (D, c), base variables that the method `base` has drawn.
            order: t, as in the call of `base`.
        """

    @abstractmethod
    def importance(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """Return the importance weights E‖z‖^{2t} / ‖z‖^{2t}, (*b, D), of D frequencies.

        With these weights, frequencies from the density ∝ ‖z‖^{2t} p(z) give means over p(z).

        Args:
            base: (D, c), base variables that the method `base` has drawn.
            order: t, as in the call of `base`.
        """

    @abstractmethod
    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """Return log S(ω), (*b, m), at the frequencies `omega` (*b, m, d); ∫ S(ω) dω = 1."""

    def log_importance(self, omega: Float[Tensor, "*b m d"], order: int) -> Float[Tensor, "*b m"]:
        """Return log S(ω)/ρ(ω), (*b, m), at any frequencies.

        Here ρ(ω) = S(ω) ‖z‖^{2t} / E‖z‖^{2t}, with z = ℓω, is the density of
        `frequencies(base, order)`.

        Args:
            omega: (*b, m, d), m frequencies in radians per unit of the inputs.
            order: t.

        Raises:
            NotImplementedError: t > 0, and `isotropic_lengthscale` is None.
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
        """Return the moment E‖z‖^{2t}, which is infinite if the kernel is too rough.

        Args:
            order: t ≥ 0. It is an integer, or for `gp_orff.bounds` also half an integer.
            num_dims: the number of inputs.
        """

    @property
    def isotropic_lengthscale(self) -> Float[Tensor, "*b 1 d"] | None:
        """The lengthscales ℓ, (*b, 1, d), for which ℓω is isotropic; None if there are none."""
        return None

    def frequency_parameters(
        self, shortest: Float[np.ndarray, "k"], longest: Float[np.ndarray, "k"]
    ) -> list[Range]:
        """Return the hyperparameters that change the frequencies, with intervals to search.

        Args:
            shortest: (k,), the shortest distances between observations along the k inputs.
            longest: (k,), the longest distances between observations along the k inputs.
        """
        lengthscale = self.isotropic_lengthscale
        if lengthscale is None:
            return []
        if lengthscale.shape[-1] == 1:
            return [Range(lengthscale, float(shortest.min()), float(longest.max()))]
        low, high = (torch.from_numpy(bound).to(lengthscale) for bound in (shortest, longest))
        return [Range(lengthscale, low, high)]


class GridSpectrum(Spectrum):
    """A `Spectrum` that also computes the variance that a frequency grid truncates.

    A `Grid` needs the fraction of the variance beyond its largest frequency (`tail`), and the size
    of the covariance at large lags (`correlation`). To define the spectral density of a new kernel,
    define `tail`, `correlation`, `scaled_radius`, `second_moments` and the methods of `Spectrum`.

    Attributes:
        is_mixture: whether this is a `ScaleMixture`; False by default.

    Example:
        In two dimensions, frequencies with ‖ℓω‖ > 2 contribute the fraction e⁻² of the variance of
        an RBF kernel:

        >>> import gpytorch, gp_orff
        >>> spectrum = gp_orff.spectrum(gpytorch.kernels.RBFKernel())
        >>> round(float(spectrum.tail(scaled_radius=2.0, order=0, num_dims=2)), 6)
        0.135335
    """

    for_grids = True
    is_mixture = False

    @abstractmethod
    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        """Return a norm (D,) of the frequencies `omega` (D, d), for example ‖ℓω‖.

        The norm must not depend on the signs of the coordinates. A grid ends at a level set of the
        norm. For a batch of kernels, return the smallest norm in the batch.
        """

    @abstractmethod
    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        """Return the fraction of E‖z‖^{2t} that frequencies beyond a radius contribute.

        A grid that ends at the radius truncates this fraction of the variance.

        Args:
            scaled_radius: the radius, in units of the method `scaled_radius`.
            order: t, the exponent of the weight ‖z‖^{2t}, with z = ℓω.
            num_dims: d, the number of inputs.
        """

    @abstractmethod
    def correlation(self, lag: float, axis: int, order: int) -> float:
        """Return an upper bound of |K(r)| / |K(0)| for all lags r ≥ `lag`.

        K is the kernel with the spectral density ∝ ‖z‖^{2t} p(z).

        Args:
            lag: the shortest lag r, in units of the input.
            axis: the input along which the lag is taken.
            order: t.
        """

    @abstractmethod
    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """Return the second moments E ω_i², (*b, d), for d = `num_dims` uncorrelated inputs."""

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "m"]:
        """Return further lengths (m,) along the `num_dims` inputs that a grid must resolve.

        They are in addition to the lengths that follow from `scaled_radius`. By default, there are
        none.
        """
        return np.zeros(0)


@singledispatch
def spectrum(kernel: Kernel) -> Spectrum:
    """Return the spectral density of a stationary scalar kernel, at its current hyperparameters.

    The kernels `RBFKernel`, `MaternKernel`, `GeneralMaternKernel`, `RQKernel`, `BesselKernel`,
    `LearnedSpectrumKernel` and `SpectralMixtureKernel` are registered, with one lengthscale or ARD.
    `PeriodicKernel` and `CosineKernel` of one input have line spectra.

    To use another kernel, register a function that returns its `gp_orff.spectra.Spectrum`, as in
    the example. For exact curl-free or divergence-free kernels, also register its derivatives with
    `gp_orff.radial_derivatives`.

    The dot-product kernels `LinearKernel`, `PolynomialKernel` and `DotProductKernel` are not
    stationary. For these kernels, the function returns eigenvalues instead of a `Spectrum`.

    Args:
        kernel: a stationary scalar kernel.

    Returns:
        A `Spectrum`, the spectral density of k / k(0).

    Raises:
        NotImplementedError: the class of the kernel is not registered.

    Example:
        For a Matérn kernel, the mean of ‖ℓω‖² is d ν/(ν − 1):

        >>> import gpytorch, gp_orff
        >>> matern = gp_orff.spectrum(gpytorch.kernels.MaternKernel(nu=2.5))
        >>> round(matern.moment(order=1, num_dims=2), 6)
        3.333333

        Register a new kernel, here a Matérn 5/2 kernel under another name:

        >>> class MyKernel(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.spectrum.register
        ... def _(kernel: MyKernel):
        ...     return gp_orff.spectra.StudentT(kernel.lengthscale, nu=2.5)
        >>> kernel = MyKernel(ard_num_dims=3)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64)).num_features
        128
    """
    raise NotImplementedError(
        "expected a kernel with a registered spectral density, which is one of "
        f"{registered(spectrum)}, got {type(kernel).__name__}; use one of them, or register the "
        "spectral density with @gp_orff.spectrum.register (see its docstring)"
    )


class Law(KernelSpectrum):
    """A registered spectrum that is not a subclass of `Spectrum`.

    It has the methods and attributes that random rules need.
    """

    def __init__(self, registered: object):
        self.registered = registered

    def __getattr__(self, name: str) -> object:
        return getattr(object.__getattribute__(self, "registered"), name)


def law_of(kernel: Kernel) -> KernelSpectrum:
    """Return the spectrum of a kernel as a `KernelSpectrum`."""
    law = spectrum(kernel)
    return law if isinstance(law, KernelSpectrum) else Law(law)


def spectral_density(kernel: Kernel, owner: str) -> Spectrum:
    """Return the spectrum of a stationary base kernel.

    Args:
        kernel: the base kernel.
        owner: the class that has this base kernel, for the error.

    Raises:
        NotImplementedError: the class of the kernel is not registered, or has no spectral density.
    """
    density = law_of(kernel)
    if not density.is_stationary:
        raise NotImplementedError(
            f"{owner} expects a stationary base kernel, got {type(kernel).__name__}, a function of "
            "inner products, which has no spectral density; use RBFKernel, MaternKernel or "
            f"RQKernel, or replace {owner} by a separable kernel, such as MultitaskKernel"
        )
    if not density.has_density:
        raise NotImplementedError(
            f"{owner} expects a base kernel with a spectral density, got {type(kernel).__name__}, "
            "which has a spectrum of lines; multiply the field kernel by it instead, as a kernel "
            "of time"
        )
    return density


# Scalar kernels of the scaled distance.


class RadialKernel(Kernel):
    """A stationary scalar kernel k(x, z) = κ(s) with s = ‖(x − z)/ℓ‖² and κ(0) = 1.

    To define a new kernel, subclass this class and define `correlation` and `spectrum`. Its
    covariance, exact field kernels and features then work. Models with the kernel can be saved if
    each argument of its constructor is an attribute of the same name.

    Attributes:
        spectrum: the spectral density at the current hyperparameters.
        highest_order: the highest derivative that `correlation` returns, at least 2.
    """

    spectrum: Spectrum
    has_lengthscale = True
    highest_order = 2
    is_learned = False

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """Return κ(s), or a derivative of κ with respect to s.

        Args:
            s: (*m), squared distances divided by ℓ².
            order: the order of the derivative, from 0 to `highest_order`.
        """
        raise NotImplementedError

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        **params,
    ) -> Float[Tensor, "*b n m"]:
        """Return the covariance matrix (*b, n, m) between the points `x1` and `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n); it needs m = n.
            params: further arguments of gpytorch's `covar_dist`.
        """
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            s = (x1 - x2).square().sum(-1, keepdim=True)
            return self.correlation(s).squeeze(-1)
        return self.correlation(self.covar_dist(x1, x2, square_dist=True, **params))


def learned_spectra(kernel: nn.Module, trained: bool = False) -> list[RadialKernel]:
    """Return the learned spectra in a kernel tree, or only the trained ones if `trained`."""
    found = [part for part in parts_of(kernel, RadialKernel) if part.is_learned]
    return [part for part in found if part.shape.requires_grad or not trained]


@spectrum.register
def _(kernel: RadialKernel) -> Spectrum:
    owner = next(cls for cls in type(kernel).__mro__ if "spectrum" in vars(cls))
    require_covariance_of(owner, kernel)
    return kernel.spectrum


def registered(function: Callable) -> str:
    """Return the names of the kernels that a function supports, for messages."""
    classes = [cls for cls in function.registry if cls not in (object, RadialKernel)]
    return ", ".join(sorted(cls.__name__ for cls in classes + RadialKernel.__subclasses__()))


# Quadrature over the unit sphere.


def unit_sphere(
    dims: int, device: torch.device, angles: int = 128
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Return unit vectors (m, k) and weights (m,) of a mean over the unit sphere.

    The mean of a smooth function is spectrally accurate for `dims` ≤ 3.

    Args:
        dims: k, the number of dimensions.
        device: the device of the results.
        angles: the number of points on a circle. A sphere has half as many circles.
    """
    if dims == 1:
        points = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    elif dims <= 3:
        angle = torch.arange(angles, dtype=torch.float64) * (2 * math.pi / angles)
        points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        from scipy.stats import qmc  # takes a second to import, and is rarely needed

        sequence = qmc.Sobol(dims, seed=0).random_base2(14)
        normal = torch.from_numpy(scipy.special.ndtri(sequence))
        points = normal / normal.norm(dim=-1, keepdim=True)
    points = points.to(device)
    if dims != 3:
        return points, points.new_full((len(points),), 1 / len(points))
    height, weight = (torch.from_numpy(v).to(device) for v in gauss_legendre(angles // 2))
    flat = (1 - height.square()).sqrt()[:, None, None] * points  # (circles, angles, 2)
    heights = height[:, None, None].expand(*flat.shape[:2], 1)
    weights = (0.5 * weight / len(points)).repeat_interleave(len(points))
    return torch.cat([flat, heights], dim=-1).flatten(0, 1), weights


# Spectral densities of RBF kernels (Gaussian) and Matérn kernels (Student-t).
#
# Both are radial: ω = r u/ℓ with a uniform direction u. In the density weighted by ‖z‖^{2t}, the
# direction is still uniform, and the distribution of r² has other parameters. For RBF kernels, χ²_d
# becomes χ²_{d+2t}. For Matérn kernels, BetaPrime(d/2, ν) becomes BetaPrime(d/2 + t, ν − t). The
# same functions therefore give the quantiles, tails and moments for every t.


@dataclass(frozen=True)
class Radial(Spectrum):
    """The spectrum of frequencies ω = z/ℓ, where z is a uniform direction times a radius ‖z‖.

    The first d base variables are the direction times a radius without hyperparameters. Further
    base variables, if any, determine ‖z‖ from this radius.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.
    """

    lengthscale: Float[Tensor, "*b 1 d"]
    is_radial = True

    @property
    def isotropic_lengthscale(self) -> Float[Tensor, "*b 1 d"]:
        return self.lengthscale

    def inverse_lengthscale(self, num_dims: int) -> Float[Tensor, "*b 1 d"]:
        """Return 1/ℓ for each of `num_dims` inputs."""
        return self.lengthscale.reciprocal().expand(*self.lengthscale.shape[:-1], num_dims)

    @abstractmethod
    def radial_base(
        self, u: Float[np.ndarray, "D k"], num_dims: int, order: int
    ) -> Float[np.ndarray, "D c"]:
        """Return base variables (D, c) of the radius ‖z‖; the first one scales the direction.

        Args:
            u: (D, k), uniform numbers in (0, 1), with k = `num_coordinates(num_dims)`.
            num_dims: the number of inputs.
            order: t, the exponent of the weight ‖z‖^{2t}.
        """

    def radii(self, radial: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """Return ‖z‖ from base variables, differentiable in the hyperparameters."""
        return radial[:, 0]

    def frequencies(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "*b D d"]:
        return base / self.lengthscale

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        radial = self.radial_base(u, directions.shape[-1], order)
        return np.concatenate([directions * radial[:, :1], radial[:, 1:]], axis=-1)

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """Return E ω_i², (*b, d); the coordinates of ω are uncorrelated."""
        moment = torch.as_tensor(
            self.moment(1, num_dims), dtype=self.lengthscale.dtype, device=self.lengthscale.device
        )
        variance = moment.unsqueeze(-1) / num_dims / self.lengthscale.square()
        return variance.expand(*variance.shape[:-1], num_dims).squeeze(-2)


@dataclass(frozen=True)
class Elliptical(Radial, GridSpectrum):
    """A radial spectrum whose density and tail can be computed, so that `Grid` supports it."""

    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        lengthscale = self._lengthscales(np.min, omega.shape[-1])
        return np.linalg.norm(omega * lengthscale, axis=-1)  # ‖ℓω‖

    def correlation(self, lag: float, axis: int, order: int) -> float:
        longest = self._longest
        return self._radial_correlation(lag / longest[min(axis, len(longest) - 1)], order)

    @cached_property
    def _longest(self) -> Float[np.ndarray, "k"]:
        """The largest ℓ in the batch, for each input or for all inputs.

        It is cached, because grids compute correlations at hundreds of lags.
        """
        return self._lengthscales(np.max, self.lengthscale.shape[-1])

    def _lengthscales(self, over_batch: Callable, num_dims: int) -> Float[np.ndarray, "d"]:
        """Return ℓ of every input, after a reduction over the batch."""
        lengthscale = self.lengthscale.detach().double().cpu().numpy()
        lengthscale = over_batch(lengthscale.reshape(-1, lengthscale.shape[-1]), axis=0)
        return np.broadcast_to(lengthscale, (num_dims,)) if len(lengthscale) == 1 else lengthscale

    def marginal(self, dims: Sequence[int], order: int = 0) -> "Elliptical | None":
        shared = self.lengthscale.shape[-1] == 1
        lengthscale = self.lengthscale if shared else self.lengthscale[..., list(dims)]
        return replace(self, lengthscale=lengthscale)._weighted_across(order)

    def _weighted_across(self, order: int) -> "Elliptical | None":
        """Return the spectrum weighted by ω_a^{2t}, where ω_a is another coordinate, t = `order`.

        If z = √s g with a normal g, the weighted spectrum has the density of s weighted by s^t. The
        result is None if this distribution is unknown.
        """
        return None

    def num_coordinates(self, num_dims: int) -> int:
        return 1

    def radial_base(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        return np.sqrt(self._squared_radius(u[:, :1], num_dims, order))

    def _squared_radius(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        """Return the u-quantile of the squared radius of the direction, by default of ‖g‖².

        Here g is standard normal, with the density weighted by ‖g‖^{2t}, t = `order`.
        """
        return chi2_quantile(u, num_dims + 2 * order)

    def importance(self, base: Float[Tensor, "D d"], order: int) -> Float[Tensor, "D"]:
        return self.moment(order, base.shape[-1]) / base.square().sum(-1) ** order

    def _scaled(self, omega: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor]:
        """Return ‖ℓω‖² and log det diag ℓ, which a change of variables needs."""
        d = omega.shape[-1]
        lengthscale = self.lengthscale.expand(*self.lengthscale.shape[:-1], d)
        return (omega * lengthscale).square().sum(-1), lengthscale.log().sum(-1)


@dataclass(frozen=True)
class ScaleMixture(Elliptical):
    """The spectrum of z = ℓω = √s g with g ~ N(0, I) and an independent random scale s > 0.

    In the density weighted by ‖z‖^{2t} (see `Spectrum`), the density of s is weighted by s^t, and
    ‖g‖² ~ χ²_{d+2t}. The base variables of a frequency are g and the cumulative probability of s.

    This class is abstract. Subclasses are `GammaMixture` and `FiniteMixture`.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.

    Example:
        The quadrature weights of the scales of a rational quadratic kernel add up to one:

        >>> import gp_orff, gpytorch
        >>> mixture = gp_orff.spectrum(gpytorch.kernels.RQKernel(ard_num_dims=2))
        >>> isinstance(mixture, gp_orff.spectra.ScaleMixture)
        True
        >>> scales, weights = mixture.scales(least=1e-3)
        >>> abs(weights.sum().item() - 1) < 1e-6
        True
    """

    is_mixture = True

    @abstractmethod
    def scales(self, least: float) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
        """Return nodes s (*b, n) and weights (*b, n) of a quadrature for means E f(s).

        Args:
            least: the quadrature assumes that f(s) is constant for s < `least`.
        """

    @abstractmethod
    def scale(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """Return the random scale s of each of D frequencies, (*b, D).

        The density of s is the one of this mixture, multiplied by s^t and normalised.

        Args:
            base: (D, c), the base variables of the frequencies. The last column contains the
                probability at which the quantile function of s is evaluated.
            order: t.
        """

    def num_coordinates(self, num_dims: int) -> int:
        return 2

    def radial_base(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        return np.concatenate([super().radial_base(u, num_dims, order), u[:, 1:2]], axis=-1)

    def radii(self, radial: Float[Tensor, "D 2"], order: int) -> Float[Tensor, "*b D"]:
        return self.scale(radial, order).sqrt() * radial[:, 0]

    def frequencies(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D d"]:
        return self.scale(base, order).sqrt().unsqueeze(-1) * base[:, :-1] / self.lengthscale

    def importance(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        radius2 = self.scale(base, order) * base[:, :-1].square().sum(-1)
        return self.moment(order, base.shape[-1] - 1) / radius2**order


@dataclass(frozen=True)
class Gaussian(Elliptical):
    """The spectral density of the RBF kernel exp(−½‖τ/ℓ‖²) of the lag τ: ω ~ N(0, diag ℓ⁻²).

    The scaled frequency z = ℓω of d inputs is standard normal, so ‖z‖² ~ χ²_d (Rahimi & Recht
    2007). In the density weighted by ‖z‖^{2t} (see `Spectrum`), ‖z‖² ~ χ²_{d+2t} (Minh 2016,
    Example 4).

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.

    Example:
        The mean of ‖z‖² is d:

        >>> import gp_orff, torch
        >>> gp_orff.spectra.Gaussian(torch.ones(1, 1)).moment(order=1, num_dims=2)
        2.0
    """

    is_gaussian = True

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


@dataclass(frozen=True)
class StudentT(Elliptical):
    """The spectral density of a Matérn kernel, a multivariate Student-t density of ω.

    It has 2ν degrees of freedom and the scale 1/ℓ. The scaled frequency z = ℓω of d inputs has
    ‖z‖²/(2ν) ~ BetaPrime(d/2, ν). In the density weighted by ‖z‖^{2t} (see `Spectrum`), this
    becomes BetaPrime(d/2 + t, ν − t), which exists only for ν > t.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.
        nu: ν > 0, the smoothness.

    Example:
        A field with the kernel Matérn 1/2 has no derivative, so the mean of ‖z‖² is infinite:

        >>> import gp_orff, torch
        >>> gp_orff.spectra.StudentT(torch.ones(1, 1), nu=0.5).moment(
        ...     order=1, num_dims=2
        ... )
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
        """Return |M_{ν−t}(z)|, or |z M′_{ν−t}(z) + M_{ν−t}(z)| if it is larger and t = 1.

        Here M is the Matérn correlation at z = √(2ν) r.
        """
        nu, z = self.nu - order, math.sqrt(2 * self.nu) * r
        if z < 1e-3:
            return 1.0
        scale = 2 ** (1 - nu) / scipy.special.gamma(nu) * z**nu
        across = scale * scipy.special.kv(nu, z)
        along = order * scale * z * scipy.special.kv(nu - 1, z) - across
        return float(max(abs(across), abs(along)))

    def _squared_radius(self, u: np.ndarray, num_dims: int, order: int) -> np.ndarray:
        """Return the u-quantile of ‖z‖²."""
        a, b = num_dims / 2 + order, self.nu - order
        # The quantile is 2ν x/(1 − x) with a beta variable x. Near u = 1, the difference 1 − x
        # would lose all digits, so it is computed as a quantile of the complement.
        x, complement = scipy.special.betaincinv(a, b, u), scipy.special.betaincinv(b, a, 1 - u)
        return 2 * self.nu * x / complement


def chi2_quantile(u: np.ndarray, degrees: int) -> np.ndarray:
    """Return the u-quantile of a χ² variable with these degrees of freedom."""
    return 2 * scipy.special.gammaincinv(degrees / 2, u)


def chi2_tail(x: np.ndarray | float, degrees: int) -> np.ndarray | float:
    """Return P(χ² > x) for a χ² variable with these degrees of freedom."""
    return scipy.special.gammaincc(degrees / 2, x / 2)


def chi2_moment(order: float, degrees: int) -> float:
    """Return E[(χ²_d)^t] for t = `order` and d = `degrees` of freedom."""
    return float(2.0**order * scipy.special.poch(degrees / 2, order))


@spectrum.register
def _(kernel: RBFKernel) -> Spectrum:
    require_covariance_of(RBFKernel, kernel)
    return Gaussian(kernel.lengthscale)


@spectrum.register
def _(kernel: MaternKernel) -> Spectrum:
    require_covariance_of(MaternKernel, kernel)
    return StudentT(kernel.lengthscale, kernel.nu)


# Integrals over Gamma-distributed scales, by a quadrature that adapts to peak and width.
#
# The integrand is e^{−a φ(t) − b φ(−t)} with φ(t) = e^t − 1 − t. It is one at its peak t = 0. For
# large a + b, it falls like a Gaussian of variance 1/(a + b). For small a + b, it falls first
# exponentially and then doubly exponentially. Gauss–Legendre nodes cover the interval on which it
# exceeds e^{−38}. They are dense at the ends, where the integrand falls steeply.


_NODES = 72  # relative error 1e-11 for a b > 1e-16
_NATS = 38.0  # integrals end where the log of the integrand is this far below its peak
_SERIES_FROM = 20.0  # Stirling's series is used from this a on


def log_integral(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return log ∫ exp(−a φ(t) − b φ(−t)) dt = log[2(b/a)^{(a−b)/2} K_{a−b}(2√ab) e^{a+b}]."""
    with torch.no_grad():
        low, high = _edge(a, b), _edge(b, a)
    t, weights = _legendre(-low, high, _NODES)
    exponent = a.unsqueeze(-1) * (t.expm1() - t) + b.unsqueeze(-1) * ((-t).expm1() + t)
    return ((-exponent).exp() * weights).sum(-1).log()


def log_gamma_integral(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return `log_integral` for b = 0, log[Γ(a) e^a a^{−a}] = ½ log(2π/a) + R(a) (Stirling)."""
    return 0.5 * (2 * math.pi / a).log() + stirling_remainder(a)


def stirling_remainder(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Return R(a) = log Γ(a) − (a − ½) log a + a − ½ log 2π, without cancellation for large a."""
    large = a.clamp_min(_SERIES_FROM)
    inverse = large.reciprocal()
    square = inverse.square()
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    small = a.clamp_max(_SERIES_FROM)
    direct = torch.lgamma(small) - (small - 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(a < _SERIES_FROM, direct, series)


def gamma_nodes(
    a: Float[Tensor, "*b"], least: float
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return nodes s and weights of a quadrature for E f(s) with s ~ Gamma(a, rate a).

    The function f is constant below `least`, the first node. Its weight, which is one minus the sum
    of the others, includes all smaller s.
    """
    with torch.no_grad():
        high = _edge(torch.zeros_like(a), a)
        low = (-_edge(a, torch.zeros_like(a))).clamp_min(math.log(least)).minimum(high)
    t, weights = _legendre(low, high, 2 * _NODES)
    a = a.unsqueeze(-1)
    mass = weights * (-a * (t.expm1() - t) - log_gamma_integral(a)).exp()
    rest = 1 - mass.sum(-1, keepdim=True)
    return torch.cat([torch.full_like(rest, least), t.exp()], -1), torch.cat([rest, mass], -1)


@lru_cache(maxsize=8)
def _gamma_arrays(a: float) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Return `gamma_nodes` as cached arrays, because a grid computes many tails."""
    nodes = gamma_nodes(torch.tensor(a, dtype=torch.float64), 1e-12)  # no tail needs smaller scales
    return tuple(values.numpy() for values in nodes)


def _edge(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Solve a φ(−T) + b φ(T) = 38 for T > 0, by Newton steps from above on a convex function."""
    tiny = 1e-100
    c, d = _NATS / a.clamp_min(tiny), _NATS / b.clamp_min(tiny)
    edge = torch.minimum(c / 3 + (c.square() / 9 + 2 * c).sqrt(), torch.log1p(d + (2 * d).sqrt()))
    for _ in range(3):
        rise, fall = edge.clamp_max(700.0).expm1(), -(-edge).expm1()
        edge = edge - (a * (edge - fall) + b * (rise - edge) - _NATS) / (a * fall + b * rise)
    return edge


def _legendre(
    low: Float[Tensor, "*b"], high: Float[Tensor, "*b"], number: int
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Return nodes and weights of Gauss–Legendre quadrature from low to high."""
    nodes, weights = (torch.from_numpy(v).to(low) for v in gauss_legendre(number))
    half = 0.5 * (high - low).unsqueeze(-1)
    return low.unsqueeze(-1) + half * (1 + nodes), half * weights


gauss_legendre = cache(np.polynomial.legendre.leggauss)  # nodes and weights from −1 to 1


# Gaussian scale mixtures with Gamma-distributed scales: spectra of rational quadratic kernels.
#
# The density S(ω) is an integral over the scale s. Its closed form has a Bessel function K_{α−d/2},
# which overflows or loses digits for large α. Instead, log S is the sum of two parts. `_log_peak`
# is the logarithm of the peak of the integrand, in a form in which terms that grow with α cancel.
# `log_integral` is the logarithm of an integral whose integrand is one at its peak. At ω = 0, the
# integral is a Gamma function, and it is infinite for α ≤ d/2.


@dataclass(frozen=True)
class GammaMixture(ScaleMixture):
    """The spectral density of the rational quadratic kernel (1 + ‖τ/ℓ‖²/2α)^{−α} of the lag τ.

    It is a Gaussian scale mixture: z = ℓω = √s g with g ~ N(0, I) and s ~ Gamma(α, rate α). In the
    density weighted by ‖z‖^{2t} (see `Spectrum`), s ~ Gamma(α + t, rate α) and ‖g‖² ~ χ²_{d+2t}.
    The base variables of a frequency are g and the quantile level of s. Gradients reach α through
    the quantile function of s.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) if all inputs share one lengthscale.
        alpha: α > 0, (*b, 1), the exponent of the kernel.

    Example:
        The mean of ‖z‖² is d:

        >>> import gp_orff, torch
        >>> spectrum = gp_orff.spectra.GammaMixture(torch.ones(1, 1), torch.ones(1))
        >>> spectrum.moment(order=1, num_dims=2)
        2.0
    """

    alpha: Float[Tensor, "*b 1"]

    def scales(self, least: float) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
        """Return nodes s (*b, n) and weights (*b, n) of a quadrature for means E f(s).

        Args:
            least: the quadrature assumes that f(s) is constant for s < `least`.
        """
        return gamma_nodes(self.alpha.squeeze(-1).double(), least)

    def scale(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        """Return the random scale s of each of D frequencies, (*b, D).

        The density of s is Gamma(s; α, α), multiplied by s^t and normalised.

        Args:
            base: (D, d+1), the base variables of the frequencies. The last column contains the
                probability at which the quantile function of s is evaluated.
            order: t.
        """
        s = GammaQuantile.apply(self.alpha + order, base[:, -1]) / self.alpha
        return s.clamp_min(torch.finfo(s.dtype).tiny)  # so that √s has a derivative

    def moment(self, order: float, num_dims: int) -> float | Tensor:
        if order in (0, 1):  # E s = 1
            return chi2_moment(order, num_dims)
        whole = int(order)
        part, alpha = order - whole, self.alpha
        # E s^t = Γ(α + t) / (Γ(α) α^t)
        scale = math.prod((alpha + part + i) / alpha for i in range(whole))
        if part:
            fraction = torch.lgamma(alpha + part) - torch.lgamma(alpha) - part * alpha.log()
            scale = scale * fraction.exp()
        return scale * chi2_moment(order, num_dims)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        # E[P(s χ²_{d+2t} > W²)] over s ~ Gamma(α + t, rate α)
        alpha = float(self._alphas().min())
        s, weights = _gamma_arrays(alpha + order)  # (α + t)/α times these
        square = scaled_radius**2 * alpha / (alpha + order)
        return float(weights @ chi2_tail(square / s, num_dims + 2 * order))

    def _weighted_across(self, order: int) -> "GammaMixture":
        alpha = self.alpha + order  # s ~ Gamma(α, rate α) becomes Gamma(α + t, rate α)
        shrinkage = (self.alpha / alpha).sqrt().unsqueeze(-1)
        return replace(self, lengthscale=self.lengthscale * shrinkage, alpha=alpha)

    def _radial_correlation(self, r: float, order: int) -> float:
        """Bound the correlation from the scaled lag r on, across r and, for order 1, along r."""
        alpha = self._alphas().min()
        base = r * r / (2 * alpha)
        along = (alpha + 1) / alpha * r * r / (1 + base) - 1
        return max(1.0, along) ** order * math.exp(-(alpha + order) * math.log1p(base))

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "d"]:
        # the shortest correlation length, ℓ √(α / (α + 1))
        alpha = self._alphas().min()
        return self.scaled_radius(np.eye(num_dims)) * math.sqrt(alpha / (alpha + 1))

    def frequency_parameters(self, shortest, longest):
        # α also changes the largest frequencies, which are near √((α + 1)/α) / ℓ. Its interval is
        # from nearly logarithmic correlations to nearly an RBF kernel.
        stretch = min(2 * (1 + self._alphas().min().item()), 6.0)
        lengthscales = super().frequency_parameters(shortest, longest)
        return [*lengthscales, Range(self.alpha, 0.01, 1e3, stretch)]

    def _alphas(self) -> np.ndarray:
        return self.alpha.detach().double().cpu().numpy()

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """Return log S(ω), (*b, m), at the frequencies `omega` (*b, m, d).

        S is infinite at ω = 0 if α ≤ d/2. For ‖ℓω‖ ≥ 1e-8 and at ω = 0, S has a relative error of
        1e-10.

        S is the integral over log s of s Gamma(s; α, α) N(z; 0, s I) det diag ℓ. Let s* be the peak
        of the integrand, a = α s* and b = ‖z‖²/2s*, so that a − b = α − d/2. Then

            log S = log det diag ℓ + ½ log(α/2π) − R(α) + α (log s* − s* + 1) − b − ½d log(2πs*)
                    + log ∫ exp(−a φ(t) − b φ(−t)) dt ,

        with φ(t) = e^t − 1 − t and the remainder R of Stirling's formula.
        """
        radius2, log_det = self._scaled(omega)
        half = omega.shape[-1] / 2
        alpha, radius2 = torch.broadcast_tensors(self.alpha.to(radius2), radius2)
        difference, is_zero = alpha - half, radius2 == 0
        a, b = _peak(difference, alpha * torch.where(is_zero, 1.0, radius2) / 2)
        log_density = _log_peak(alpha, a, b, half) + log_integral(a, b)
        positive = difference.clamp_min(torch.finfo(difference.dtype).tiny)
        at_zero = _log_peak(alpha, positive, torch.zeros_like(b), half)
        at_zero = at_zero + log_gamma_integral(positive)
        at_zero = torch.where(difference > 0, at_zero, math.inf)
        return log_det + torch.where(is_zero, at_zero, log_density)


def _peak(
    difference: Float[Tensor, "*b m"], product: Float[Tensor, "*b m"]
) -> tuple[Float[Tensor, "*b m"], Float[Tensor, "*b m"]]:
    """Return a, b > 0 with a − b = `difference` and a b = `product`."""
    # The smaller root of the quadratic equation follows from the product, without cancellation.
    size = torch.where(difference > 0, difference, -difference)
    large = 0.5 * (size + (difference.square() + 4 * product).sqrt())
    small = product / large
    return torch.where(difference > 0, large, small), torch.where(difference > 0, small, large)


def _log_peak(
    alpha: Float[Tensor, "*b m"], a: Float[Tensor, "*b m"], b: Float[Tensor, "*b m"], half: float
) -> Float[Tensor, "*b m"]:
    """Return log(s Gamma(s; α, α) N(z; 0, s I)) at its peak s = a/α; `half` is d/2."""
    rise = (b - half) / alpha  # a/α − 1
    # If a/α is near one, α (log s − s + 1) is a difference of nearly equal numbers: use log1p.
    near = rise.abs() < 0.5
    log_s = torch.where(near, torch.log1p(torch.where(near, rise, 0.0)), (a / alpha).log())
    normaliser = 0.5 * (alpha / (2 * math.pi)).log() - stirling_remainder(alpha)
    return normaliser + alpha * (log_s - rise) - b - half * (math.log(2 * math.pi) + log_s)


def _gamma_slope(a: np.ndarray, s: np.ndarray) -> np.ndarray:
    """Return −∂_a P(a, s) / p(s; a), by fourth-order differences of the smaller tail of P."""
    s = np.maximum(s, np.finfo(float).tiny)
    h = 1e-3 * np.minimum(a, np.sqrt(a))  # √a is the width of the density for large a
    # The larger tail is close to one, so its differences would be rounding.
    upper = scipy.special.gammainc(a, s) > 0.5

    def tail(b: np.ndarray) -> np.ndarray:
        return np.where(upper, -scipy.special.gammaincc(b, s), scipy.special.gammainc(b, s))

    slope = (8 * (tail(a + h) - tail(a - h)) - (tail(a + 2 * h) - tail(a - 2 * h))) / (12 * h)
    log_density = (a - 1) * np.log(s) - s - scipy.special.gammaln(a)
    return np.nan_to_num(-slope * np.exp(-log_density), posinf=0.0, neginf=0.0)


class GammaQuantile(Function):
    """The u-quantile s of Gamma(a, 1), with P(a, s) = u and ∂s/∂a = −∂_a P(a, s) / p(s; a)."""

    @staticmethod
    def forward(ctx, a: Float[Tensor, "*b 1"], u: Float[Tensor, "D"]) -> Float[Tensor, "*b D"]:
        s = scipy.special.gammaincinv(a.double().cpu().numpy(), u.double().cpu().numpy())
        s = torch.as_tensor(s, dtype=torch.float64, device=a.device)
        ctx.save_for_backward(a, s)
        return s.to(a.dtype)

    @staticmethod
    def backward(ctx, grad):
        a, s = ctx.saved_tensors
        if torch.is_grad_enabled():  # accurate to 1e-3; raises if it is differentiated again
            slope = torch._standard_gamma_grad(a.double().expand_as(s).contiguous(), s)
        else:
            slope = torch.as_tensor(_gamma_slope(a.double().cpu().numpy(), s.cpu().numpy())).to(s)
        return (grad * slope).sum(-1, keepdim=True).to(a.dtype), None


@spectrum.register
def _(kernel: RQKernel) -> Spectrum:
    require_covariance_of(RQKernel, kernel)
    return GammaMixture(kernel.lengthscale, kernel.alpha)


# Mixtures of Gaussian densities away from zero: spectra of spectral mixture kernels.


@dataclass(frozen=True)
class SpectralMixture(GridSpectrum):
    """The spectral density of gpytorch's `SpectralMixtureKernel`.

    The kernel is Π_i Σ_q w_q exp(−2π²τ_i²σ_qi²) cos(2πτ_iμ_qi), with the lag τ_i along input i. The
    coordinates ω_i of a frequency are independent. With probability w_q/Σw, the coordinate ω_i has
    the distribution N(±2πμ_qi, (2πσ_qi)²), with a random sign.

    Random rules draw components with equal probabilities. Each coordinate has the importance weight
    Q w_q/Σw, so that gradients reach w. The weighted densities with t > 0 (see `Spectrum`) are not
    available.

    Args:
        weights: w, (*b, Q), the weights of Q components.
        means: μ, (*b, Q, 1, d), in cycles per unit of the inputs.
        scales: σ, (*b, Q, 1, d), standard deviations in cycles per unit of the inputs.

    Example:
        With the mean 0 and the scale 1, the second moment of ω is (2π)²:

        >>> import gp_orff, torch
        >>> w, one = torch.ones(2), torch.ones(2, 1, 1)
        >>> spectrum = gp_orff.spectra.SpectralMixture(w, means=0 * one, scales=one)
        >>> spectrum.second_moments(num_dims=1)
        tensor([39.4784])
    """

    weights: Float[Tensor, "*b Q"]
    means: Float[Tensor, "*b Q 1 d"]
    scales: Float[Tensor, "*b Q 1 d"]
    is_weighted = False

    @property
    def _share(self) -> Float[Tensor, "*b Q"]:
        """The probabilities w_q/Σw."""
        return self.weights / self.weights.sum(-1, keepdim=True)

    def num_coordinates(self, num_dims: int) -> int:
        return 1 + 2 * num_dims

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Return base variables (D, 3·d): d normal numbers, d signs and d numbers of components.

        Args:
            directions: (D, d), random unit vectors.
            u: (D, 1 + 2·d), uniform random numbers in (0, 1).
            order: must be 0.

        Raises:
            NotImplementedError: `order` is not 0.
        """
        if order:
            raise NotImplementedError(
                "expected a rule with the base measure for a SpectralMixtureKernel in a field "
                'kernel, got the trace measure; use measure="base"'
            )
        d, components = directions.shape[-1], self.weights.shape[-1]
        z = directions * np.sqrt(chi2_quantile(u[:, :1], d))
        signs, component = np.sign(u[:, 1 : d + 1] - 0.5), np.floor(components * u[:, d + 1 :])
        return np.concatenate([z, signs, component], axis=-1)

    def frequencies(self, base: Float[Tensor, "D 3*d"], order: int) -> Float[Tensor, "*b D d"]:
        z, signs, component = base.chunk(3, dim=-1)
        index = component.long().unsqueeze(-2).expand(*self.means.shape[:-3], -1, 1, -1)
        means = self.means.squeeze(-2).gather(-2, index.squeeze(-2))
        scales = self.scales.squeeze(-2).gather(-2, index.squeeze(-2))
        return 2 * math.pi * (signs * means + scales * z)

    def importance(self, base: Float[Tensor, "D 3*d"], order: int) -> Float[Tensor, "*b D"]:
        ratio = self.weights.shape[-1] * self._share
        return ratio[..., base.chunk(3, dim=-1)[2].long()].prod(-1)

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self._log_mixture(omega, self._share)

    def log_importance(self, omega: Float[Tensor, "*b m d"], order: int) -> Float[Tensor, "*b m"]:
        # components are drawn with equal probabilities
        equal = torch.full_like(self.weights, 1 / self.weights.shape[-1])
        return self.log_density(omega) - self._log_mixture(omega, equal)

    def _log_mixture(
        self, omega: Float[Tensor, "*b m d"], share: Float[Tensor, "*b Q"]
    ) -> Float[Tensor, "*b m"]:
        """Return the log density at `omega` if the components have the probabilities `share`."""
        centre, sd = 2 * math.pi * self.means, 2 * math.pi * self.scales
        exponents = [
            -0.5 * ((omega.unsqueeze(-3) - sign * centre) / sd).square() for sign in (1, -1)
        ]  # (*b, Q, m, d)
        log_density = torch.logaddexp(*exponents) - (2 * sd).log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(log_density + share[..., None, None].log(), dim=-3).sum(-1)

    def moment(self, order: float, num_dims: int) -> float:
        """Return 1 for every `order` and `num_dims`, because every moment is finite.

        For `order` > 0, the value is not the moment itself, which no method needs.
        """
        return 1.0

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        squares = (2 * math.pi) ** 2 * (self.means.square() + self.scales.square()).squeeze(-2)
        return (self._share.unsqueeze(-1) * squares).sum(-2)

    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        # max_i |ω_i| / (largest mean + standard deviation along axis i); its level sets are boxes
        _, means, scales = self._components()
        return np.max(np.abs(omega) / (means + scales).max(axis=(0, 1)), axis=-1)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        # one minus the fraction in the box; for order 1, the fraction of E‖ω‖²
        share, means, scales = self._components()
        edge = scaled_radius * (means + scales).max(axis=(0, 1))  # (d,)
        low, high = (-edge - means) / scales, (edge - means) / scales
        cdf = scipy.special.ndtr
        mass = cdf(high) - cdf(low)
        outside = cdf(-high) + cdf(low)
        outside = (share[..., None] * outside).sum(-2)  # (batch, d)
        if not order:
            return float((1 - np.prod(1 - outside, axis=-1)).max())
        # E[ω²; |ω| ≤ edge] of each Gaussian, by its truncated moments
        second = (means**2 + scales**2) * mass - scales * (
            (edge + means) * _normal_density(high) + (edge - means) * _normal_density(low)
        )
        second = (share[..., None] * second).sum(-2)
        total = (share[..., None] * (means**2 + scales**2)).sum(-2).sum(-1)
        others = np.prod(1 - outside, axis=-1, keepdims=True) / (1 - outside)  # inside the box
        return float((1 - (second * others).sum(-1) / total).max())

    def correlation(self, lag: float, axis: int, order: int) -> float:
        # the sum of the components without their cosines, an upper bound
        share, means, scales = self._components()
        mean, sd = means[..., axis], scales[..., axis]  # (batch, Q)
        envelope = np.exp(-0.5 * (sd * lag) ** 2)
        if not order:
            return float((share * envelope).sum(-1).max())
        polynomial = sd**2 * np.maximum(1, (sd * lag) ** 2) + 2 * mean * sd**2 * lag + mean**2
        total = (share * (mean**2 + sd**2)).sum(-1)
        return float(((share * envelope * polynomial).sum(-1) / total).max())

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "d"]:
        # the longest correlation lengths, of the narrowest component along every axis
        _, _, scales = self._components()
        return 1 / scales.min(axis=(0, 1))

    def frequency_parameters(self, shortest, longest):
        low, high = (
            torch.from_numpy(1 / (2 * math.pi * length)).to(self.means)
            for length in (longest, shortest)
        )
        return [Range(self.scales, low, high), Range(self.means, 1e-2 * low, math.pi * high)]

    def _components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return probabilities (batch, Q), means and standard deviations (batch, Q, d) of ω."""
        parts = self._share, self.means.squeeze(-2), self.scales.squeeze(-2)
        share, means, scales = (t.detach().double().cpu().numpy() for t in parts)
        components, d = means.shape[-2:]
        return (
            share.reshape(-1, components),
            2 * math.pi * means.reshape(-1, components, d),
            2 * math.pi * scales.reshape(-1, components, d),
        )


@spectrum.register
def _(kernel: SpectralMixtureKernel) -> Spectrum:
    require_covariance_of(SpectralMixtureKernel, kernel)
    return SpectralMixture(kernel.mixture_weights, kernel.mixture_means, kernel.mixture_scales)


def _normal_density(x: Float[np.ndarray, "*s"]) -> Float[np.ndarray, "*s"]:
    return np.exp(-0.5 * x**2) / math.sqrt(2 * math.pi)
