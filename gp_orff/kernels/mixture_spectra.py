"""Spectra that are scale mixtures of Gaussians."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import numpy as np
import scipy.special
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.base import require_covariance_of
from gp_orff.kernels.spectra import GridSpectrum, Range, Spectrum, spectrum

# Gaussian and Student-t spectral densities, of RBF and Matérn kernels.
#
# Both are radial: ω = r u/ℓ with a uniform direction u. In the density weighted by ‖z‖^{2t} the
# direction stays uniform, and the law of r² stays in its family with other parameters: χ²_d becomes
# χ²_{d+2t}, and the beta-prime law BetaPrime(d/2, ν) becomes BetaPrime(d/2 + t, ν − t). Quantiles,
# tails and moments of the trace measure are thus the same functions as those of the base measure.


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
        # A number as float64: by default it would become float32.
        moment = torch.as_tensor(self.moment(1, num_dims), dtype=torch.float64)
        moment = moment.to(self.lengthscale)
        variance = moment.unsqueeze(-1) / num_dims / self.lengthscale.square()
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

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.

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
        """The scales s (*b, D) of variables `base` (D, c), whose last column is the level of s.

        They are weighted by s^t, t = `order`.
        """

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
        # Near u = 1, 1 − x would lose all digits; the quantile of the complement has them.
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


# Integrals over Gamma-distributed scales, by quadrature that adapts to peak and width.
#
# The integrand is e^{−a φ(t) − b φ(−t)} with φ(t) = e^t − 1 − t. It is one at its peak t = 0. For
# large a + b it falls like a Gaussian of variance 1/(a + b), for small a + b first exponentially
# and then doubly exponentially. Gauss–Legendre nodes cover the interval on which it exceeds
# e^{−38}; they are dense at the ends, where it falls steeply.


_NODES = 72  # relative error 1e-11 for a b > 1e-16
_NATS = 38.0  # integrals end this far below the log of the peak
_LEAST = 1e-12  # a scale, below which no share of a tail lies
_SERIES_FROM = 20.0  # the least a for which Stirling's series is used


def log_integral(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log ∫ exp(−a φ(t) − b φ(−t)) dt = log[2(b/a)^{(a−b)/2} K_{a−b}(2√ab) e^{a+b}]."""
    with torch.no_grad():
        low, high = _edge(a, b), _edge(b, a)
    t, weights = _legendre(-low, high, _NODES)
    exponent = a.unsqueeze(-1) * (t.expm1() - t) + b.unsqueeze(-1) * ((-t).expm1() + t)
    return ((-exponent).exp() * weights).sum(-1).log()


def log_gamma_integral(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """`log_integral` for b = 0: log[Γ(a) e^a a^{−a}] = ½ log(2π/a) + R(a) (Stirling)."""
    return 0.5 * (2 * math.pi / a).log() + stirling_remainder(a)


def stirling_remainder(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """R(a) = log Γ(a) − (a − ½) log a + a − ½ log 2π, without cancellation for large a."""
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
    """Nodes s and weights of quadrature for E f(s), s ~ Gamma(a, rate a), f constant below `least`.

    The first node is `least`. Its weight, one minus the sum of the others, covers all smaller s.
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
    """`gamma_nodes` as arrays: a grid ends where a tail is small, which takes many of them."""
    nodes = gamma_nodes(torch.tensor(a, dtype=torch.float64), _LEAST)
    return tuple(values.numpy() for values in nodes)


def _edge(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """T > 0 with a φ(−T) + b φ(T) = 38, by Newton steps from above on a convex function."""
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
    """Nodes and weights of Gauss–Legendre quadrature from low to high."""
    nodes, weights = (torch.as_tensor(v).to(low) for v in _unit_legendre(number))
    half = 0.5 * (high - low).unsqueeze(-1)
    return low.unsqueeze(-1) + half * (1 + nodes), half * weights


@cache
def _unit_legendre(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss–Legendre quadrature from −1 to 1."""
    return np.polynomial.legendre.leggauss(number)


# Gaussian scale mixtures with Gamma-distributed scales: spectra of rational quadratic kernels.
#
# The density S(ω) is an integral over the scale s, in terms of a Bessel function K_{α−d/2} that
# overflows or loses digits for large α. It is computed around the peak of its integrand instead:
# the logarithm of the peak in closed form, in which the terms that grow with α cancel
# (`_log_peak`), and the logarithm of an integral that is one at its peak (`log_integral`). At ω = 0
# the integral is a Gamma function, and infinite for α ≤ d/2.


_ALPHA = 0.01, 1e3  # search interval of α: from nearly logarithmic correlations to nearly RBF


@dataclass(frozen=True)
class GammaMixture(ScaleMixture):
    """Spectrum of the rational quadratic kernel (1 + ‖τ/ℓ‖²/2α)^{−α}.

    A Gaussian scale mixture: z = √s g, g ~ N(0, I), s ~ Gamma(α, rate α). Weighted by ‖z‖^{2t}:
    s ~ Gamma(α + t, rate α), ‖g‖² ~ χ²_{d+2t}. Base variables are g and the quantile level of s,
    so that gradients reach α through the quantile function of s.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
        alpha: α, (*b, 1).

    Example:
        >>> import gp_orff, torch
        >>> spectrum = gp_orff.spectra.GammaMixture(torch.ones(1, 1), torch.ones(1))
        >>> spectrum.moment(order=1, num_dims=2)  # E‖z‖² = d
        2.0
    """

    alpha: Float[Tensor, "*b 1"]

    def scales(self, least: float) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
        """Nodes s and weights (*b, n) of quadrature for E f(s), f constant below `least`."""
        return gamma_nodes(self.alpha.squeeze(-1).double(), least)

    def scale(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        """The scales s (*b, D) of variables `base` (D, d+1), weighted by s^t, t = `order`."""
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
        """`correlation` from the scaled lag r on, across r or, for order 1, along r."""
        alpha = self._alphas().min()
        base = r * r / (2 * alpha)
        along = (alpha + 1) / alpha * r * r / (1 + base) - 1
        return max(1.0, along) ** order * math.exp(-(alpha + order) * math.log1p(base))

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "d"]:
        # of the shortest correlations: ℓ √(α / (α + 1))
        alpha = self._alphas().min()
        return self.scaled_radius(np.eye(num_dims)) * math.sqrt(alpha / (alpha + 1))

    def frequency_parameters(self, shortest, longest):
        # α too: the largest frequencies are near √((α + 1)/α) / ℓ
        stretch = min(2 * (1 + self._alphas().min().item()), 6.0)
        lengthscales = super().frequency_parameters(shortest, longest)
        return [*lengthscales, Range(self.alpha, *_ALPHA, stretch)]

    def _alphas(self) -> np.ndarray:
        return self.alpha.detach().double().cpu().numpy()

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """The density as log S(ω), (*b, m), at `omega` (*b, m, d); infinite at ω = 0 for α ≤ d/2.

        S has a relative error of 1e-10 for ‖ℓω‖ ≥ 1e-8 and at ω = 0. S is the integral over log s
        of Gamma(s; α, α) N(z; 0, s I), taken around its peak s*. With a = α s* and b = ‖z‖²/2s*,
        a − b = α − d/2, and the terms that grow with α cancel in closed form:

            log S = log det ℓ + ½ log(α/2π) − R(α) + α (log s* − s* + 1) − b − ½d log(2πs*)
                    + log ∫ exp(−a φ(t) − b φ(−t)) dt .
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
    """a, b > 0 with a − b = difference and a b = product."""
    # The larger root of the quadratic equation, and the smaller one from their product: no
    # cancellation.
    size = torch.where(difference > 0, difference, -difference)
    large = 0.5 * (size + (difference.square() + 4 * product).sqrt())
    small = product / large
    return torch.where(difference > 0, large, small), torch.where(difference > 0, small, large)


def _log_peak(
    alpha: Float[Tensor, "*b m"], a: Float[Tensor, "*b m"], b: Float[Tensor, "*b m"], half: float
) -> Float[Tensor, "*b m"]:
    """log of s Gamma(s; α, α) N(z; 0, s I) at its peak s = a/α; `half` is d/2."""
    rise = (b - half) / alpha  # a/α − 1
    # log1p for a/α near one, where α (log s − s + 1) is a difference of nearly equal numbers.
    near = rise.abs() < 0.5
    log_s = torch.where(near, torch.log1p(torch.where(near, rise, 0.0)), (a / alpha).log())
    normaliser = 0.5 * (alpha / (2 * math.pi)).log() - stirling_remainder(alpha)
    return normaliser + alpha * (log_s - rise) - b - half * (math.log(2 * math.pi) + log_s)


def _gamma_slope(a: np.ndarray, s: np.ndarray) -> np.ndarray:
    """−∂_a P(a, s) / p(s; a), by fourth-order differences of the smaller tail of P."""
    s = np.maximum(s, np.finfo(float).tiny)
    h = 1e-3 * np.minimum(a, np.sqrt(a))  # √a is the width of the density where a is large
    # The smaller tail: differences of the larger one, close to one, would be rounding.
    upper = scipy.special.gammainc(a, s) > 0.5

    def tail(b: np.ndarray) -> np.ndarray:
        return np.where(upper, -scipy.special.gammaincc(b, s), scipy.special.gammainc(b, s))

    slope = (8 * (tail(a + h) - tail(a - h)) - (tail(a + 2 * h) - tail(a - 2 * h))) / (12 * h)
    log_density = (a - 1) * np.log(s) - s - scipy.special.gammaln(a)
    return np.nan_to_num(-slope * np.exp(-log_density), posinf=0.0, neginf=0.0)


class GammaQuantile(Function):
    """s with P(a, s) = P(Gamma(a, 1) ≤ s) = u; at fixed u, ∂s/∂a = −∂_a P(a, s) / p(s; a)."""

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
