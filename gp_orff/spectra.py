"""Spectral densities of gpytorch's stationary scalar kernels.

Bochner's theorem writes a stationary kernel as the Fourier transform of a probability law,

    k(x, z) = E cos⟨ω, x − z⟩ .

A random ω is made in two steps. *Base variables* are drawn once and hold no hyperparameters; the
live hyperparameters turn them into frequencies afterwards, so that gradients reach every one of
them. `spectrum(kernel)` gives the law of one kernel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Protocol

import numpy as np
import scipy.special
import scipy.stats
import torch
from gpytorch.kernels import (
    Kernel,
    MaternKernel,
    RBFKernel,
    RQKernel,
    SpectralMixtureKernel,
)
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.scalar_kernels import GeneralMaternKernel, require_covariance_of
from gp_orff.scale_mixture import (
    gamma_nodes,
    gamma_range,
    log_integral,
    log_integral_alone,
    stirling_remainder,
    unit_legendre,
)


class Spectrum(Protocol):
    """The law of the frequencies of a scalar kernel with k(0) = 1.

    In base units (unit lengthscales) ω is z. A *tilt* t stands for the law with density
    proportional to ‖z‖^{2t} p(z). Fields that are derivatives of a potential have their variance
    at higher frequencies; t = 1 is the law of that variance for curl- and divergence-free kernels.
    """

    def num_coordinates(self, num_dims: int) -> int:
        """How many uniform coordinates `base` needs beside a direction."""

    def base(self, directions: np.ndarray, u: np.ndarray, tilt: int) -> np.ndarray:
        """Base variables (D, c) of the tilted law from unit vectors (D, d) and u in (0, 1)."""

    def frequencies(self, base: Float[Tensor, "D c"], tilt: int) -> Float[Tensor, "*b D d"]:
        """ω at the kernel's present hyperparameters, differentiable in all of them."""

    def importance(self, base: Float[Tensor, "D c"], tilt: int) -> Float[Tensor, "*b D"]:
        """The density of the law over that of the tilted one: E‖z‖^{2t} / ‖z‖^{2t}."""

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """log S(ω) with ∫ S(ω) dω = k(0) = 1."""

    def moment(self, tilt: int, num_dims: int) -> float:
        """E ‖z‖^{2·tilt}; infinite where the kernel is not smooth enough."""


class GridSpectrum(Spectrum, Protocol):
    """What a frequency grid asks of a law besides: where it ends, and where its kernel ends."""

    def reach(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        """A norm of ω, even in every coordinate; grids end at one of its level sets.

        Over a batch of kernels, the smallest.
        """

    def tail(self, reach: float, tilt: int, num_dims: int) -> float:
        """The share of the tilted law beyond a reach."""

    def correlation(self, lag: float, axis: int, tilt: int) -> float:
        """A bound of |K(r)| / |K(0)| for the kernel of the tilted law, r ≥ lag along one axis."""

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """E ω_i², coordinates being uncorrelated."""


@dataclass(frozen=True)
class _Elliptical:
    """z = base, ω = z / ℓ: the radius of z has no hyperparameters."""

    lengthscale: Float[Tensor, "*b 1 d"]

    def reach(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        """‖ℓω‖."""
        return np.linalg.norm(omega * self._lengthscales(np.min, omega.shape[-1]), axis=-1)

    def correlation(self, lag: float, axis: int, tilt: int) -> float:
        return self._radial_correlation(lag / self._lengthscales(np.max, axis + 1)[axis], tilt)

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        variance = self.moment(1, num_dims) / num_dims / self.lengthscale.square()
        return variance.expand(*variance.shape[:-1], num_dims).squeeze(-2)

    def _lengthscales(self, over_batch: Callable, num_dims: int) -> Float[np.ndarray, "d"]:
        own = self.lengthscale.detach().double().cpu().numpy()
        own = over_batch(own.reshape(-1, own.shape[-1]), axis=0)
        return np.broadcast_to(own, (num_dims,)) if len(own) == 1 else own

    def num_coordinates(self, num_dims: int) -> int:
        return 1

    def base(self, directions: np.ndarray, u: np.ndarray, tilt: int) -> np.ndarray:
        return directions * np.sqrt(self._squared_radius(u[:, :1], directions.shape[-1], tilt))

    def frequencies(self, base: Float[Tensor, "D d"], tilt: int) -> Float[Tensor, "*b D d"]:
        return base / self.lengthscale

    def importance(self, base: Float[Tensor, "D d"], tilt: int) -> Float[Tensor, "D"]:
        return self.moment(tilt, base.shape[-1]) / base.square().sum(-1) ** tilt

    def _scaled(self, omega: Float[Tensor, "*b m d"]) -> tuple[Tensor, Tensor]:
        """‖ℓω‖² and log det ℓ of the change of variables."""
        d = omega.shape[-1]
        lengthscale = self.lengthscale.expand(*self.lengthscale.shape[:-1], d)
        return (omega * lengthscale).square().sum(-1), lengthscale.log().sum(-1)


@dataclass(frozen=True)
class Gaussian(_Elliptical):
    """Spectrum of the RBF kernel exp(−½‖τ/ℓ‖²): ω ~ N(0, diag ℓ⁻²), so ‖z‖² ~ χ²_d.

    Tilted by ‖z‖^{2t}: ‖z‖² ~ χ²_{d+2t} (Rahimi & Recht 2007; Minh 2016 for the tilt).
    """

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        return log_det - 0.5 * (radius2 + omega.shape[-1] * math.log(2 * math.pi))

    def moment(self, tilt: int, num_dims: int) -> float:
        return _chi2_moment(tilt, num_dims)

    def tail(self, reach: float, tilt: int, num_dims: int) -> float:
        return _chi2_tail(reach**2, num_dims + 2 * tilt)

    def _radial_correlation(self, r: float, tilt: int) -> float:
        return max(1.0, r * r) ** tilt * math.exp(-0.5 * r * r)

    def _squared_radius(self, u: np.ndarray, num_dims: int, tilt: int) -> np.ndarray:
        return _chi2_quantile(u, num_dims + 2 * tilt)


@dataclass(frozen=True)
class StudentT(_Elliptical):
    """Spectrum of the Matérn kernel: multivariate Student t, 2ν degrees of freedom, scale 1/ℓ.

    ‖z‖²/2ν ~ BetaPrime(d/2, ν). Tilted by ‖z‖^{2t}: BetaPrime(d/2 + t, ν − t), for ν > t only.
    """

    nu: float

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        d, nu = omega.shape[-1], self.nu
        normaliser = (
            math.lgamma(nu + d / 2) - math.lgamma(nu) - 0.5 * d * math.log(2 * math.pi * nu)
        )
        return log_det + normaliser - (nu + d / 2) * torch.log1p(radius2 / (2 * nu))

    def moment(self, tilt: int, num_dims: int) -> float:
        if self.nu <= tilt:
            return math.inf
        # E‖z‖^{2t} = ν^t · E[χ²_d^t] · Γ(ν − t)/Γ(ν)
        ratio = math.gamma(self.nu - tilt) / math.gamma(self.nu)
        return self.nu**tilt * _chi2_moment(tilt, num_dims) * ratio

    def tail(self, reach: float, tilt: int, num_dims: int) -> float:
        x = reach**2 / (2 * self.nu)
        # a beta variable is above x/(1 + x) where its complement is below 1/(1 + x)
        return float(scipy.special.betainc(self.nu - tilt, num_dims / 2 + tilt, 1 / (1 + x)))

    def _radial_correlation(self, r: float, tilt: int) -> float:
        """M_{ν−t}(z) and, for t = 1, its radial part z M_{ν−1}′(z), at z = √(2ν) r."""
        nu, z = self.nu - tilt, math.sqrt(2 * self.nu) * r
        if z < 1e-3:
            return 1.0
        scale = 2 ** (1 - nu) / scipy.special.gamma(nu) * z**nu
        across = scale * scipy.special.kv(nu, z)
        along = tilt * scale * z * scipy.special.kv(nu - 1, z) - across
        return float(max(abs(across), abs(along)))

    def _squared_radius(self, u: np.ndarray, num_dims: int, tilt: int) -> np.ndarray:
        a, b = num_dims / 2 + tilt, self.nu - tilt
        # quantile x/(1 − x) of a beta variable x; 1 − x from its own quantile keeps the tail exact
        x, rest = scipy.special.betaincinv(a, b, u), scipy.special.betaincinv(b, a, 1 - u)
        return 2 * self.nu * x / rest


@dataclass(frozen=True)
class GammaMixture(_Elliptical):
    """Spectrum of the rational quadratic kernel (1 + ‖τ/ℓ‖²/2α)^{−α}.

    A scale mixture of Gaussians: z = √s g, g ~ N(0, I), s ~ Gamma(α, rate α). Tilted by ‖z‖^{2t}:
    s ~ Gamma(α + t, rate α), ‖g‖² ~ χ²_{d+2t}. Base variables: g and the quantile of s, so that α
    is trained through the quantile function.
    """

    alpha: Float[Tensor, "*b 1"]

    def scales(self, least: float) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
        """Nodes s and weights of E f(s), for functions that are constant below `least`."""
        return gamma_nodes(self.alpha.squeeze(-1).double(), least)

    def num_coordinates(self, num_dims: int) -> int:
        return 2

    def base(self, directions: np.ndarray, u: np.ndarray, tilt: int) -> np.ndarray:
        radius2 = _chi2_quantile(u[:, :1], directions.shape[-1] + 2 * tilt)
        return np.concatenate([directions * np.sqrt(radius2), u[:, 1:2]], axis=-1)

    def _mixing(self, base: Float[Tensor, "D d+1"], tilt: int) -> Float[Tensor, "*b D"]:
        s = GammaQuantile.apply(self.alpha + tilt, base[:, -1]) / self.alpha
        return s.clamp_min(torch.finfo(s.dtype).tiny)  # whose root has a derivative

    def frequencies(self, base: Float[Tensor, "D d+1"], tilt: int) -> Float[Tensor, "*b D d"]:
        return self._mixing(base, tilt).sqrt().unsqueeze(-1) * base[:, :-1] / self.lengthscale

    def importance(self, base: Float[Tensor, "D d+1"], tilt: int) -> Float[Tensor, "*b D"]:
        radius2 = self._mixing(base, tilt) * base[:, :-1].square().sum(-1)
        return self.moment(tilt, base.shape[-1] - 1) / radius2**tilt

    def moment(self, tilt: int, num_dims: int) -> float | Tensor:
        if tilt <= 1:  # E s = 1
            return _chi2_moment(tilt, num_dims)
        rising = math.prod((self.alpha + i) / self.alpha for i in range(tilt))  # E s^t
        return rising * _chi2_moment(tilt, num_dims)

    def tail(self, reach: float, tilt: int, num_dims: int) -> float:
        """E[P(s χ²_{d+2t} > W²)] over s ~ Gamma(α + t, rate α)."""
        alpha = self._alphas().min()
        square = reach**2 * alpha / (alpha + tilt)  # s = (α + t)/α times one of mean 1
        return _gamma_mixture_tail(square, alpha + tilt, num_dims + 2 * tilt)

    def _radial_correlation(self, r: float, tilt: int) -> float:
        alpha = self._alphas().min()
        base = r * r / (2 * alpha)
        along = (alpha + 1) / alpha * r * r / (1 + base) - 1
        return max(1.0, along) ** tilt * math.exp(-(alpha + tilt) * math.log1p(base))

    def _alphas(self) -> np.ndarray:
        return self.alpha.detach().double().cpu().numpy()

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        """log S, S to a relative 1e-10 for ‖ℓω‖ ≥ 1e-8 and at ω = 0; +∞ there for α ≤ d/2.

        ∫ Gamma(s; α, α) N(z; 0, s I) ds over log s, around the peak s* of the integrand: there
        a = α s* and b = ‖z‖²/2s* with a − b = α − d/2, and what rises with α cancels in closed
        form,

            log S = log det ℓ + ½ log(α/2π) − R(α) + α (log s* − s* + 1) − b − ½d log(2πs*)
                    + log ∫ exp(−a φ(t) − b φ(−t)) dt .
        """
        radius2, log_det = self._scaled(omega)
        half = omega.shape[-1] / 2
        alpha, radius2 = torch.broadcast_tensors(self.alpha.to(radius2), radius2)
        order, centre = alpha - half, radius2 == 0
        a, b = _peak(order, alpha * torch.where(centre, 1.0, radius2) / 2)
        log_density = _log_gamma_mixture(alpha, a, b, half) + log_integral(a, b)
        finite = order.clamp_min(torch.finfo(order.dtype).tiny)
        at_zero = _log_gamma_mixture(alpha, finite, torch.zeros_like(b), half)
        at_zero = at_zero + log_integral_alone(finite)
        at_zero = torch.where(order > 0, at_zero, math.inf)
        return log_det + torch.where(centre, at_zero, log_density)


def _peak(
    order: Float[Tensor, "*b m"], product: Float[Tensor, "*b m"]
) -> tuple[Float[Tensor, "*b m"], Float[Tensor, "*b m"]]:
    """a, b > 0 with a − b = order and a b = product."""
    size = torch.where(order > 0, order, -order)
    large = 0.5 * (size + (order.square() + 4 * product).sqrt())
    small = product / large
    return torch.where(order > 0, large, small), torch.where(order > 0, small, large)


def _log_gamma_mixture(
    alpha: Float[Tensor, "*b m"], a: Float[Tensor, "*b m"], b: Float[Tensor, "*b m"], half: float
) -> Float[Tensor, "*b m"]:
    """log of s Gamma(s; α, α) N(z; 0, s I) at its peak s = a/α."""
    rise = (b - half) / alpha  # a/α − 1
    near = rise.abs() < 0.5
    log_s = torch.where(near, torch.log1p(torch.where(near, rise, 0.0)), (a / alpha).log())
    normaliser = 0.5 * (alpha / (2 * math.pi)).log() - stirling_remainder(alpha)
    return normaliser + alpha * (log_s - rise) - b - half * (math.log(2 * math.pi) + log_s)


@dataclass(frozen=True)
class SpectralMixture:
    """Spectrum of gpytorch's SpectralMixtureKernel Π_i Σ_q w_q exp(−2π²τ_i²σ_qi²) cos(2πτ_iμ_qi).

    Coordinates are independent; each is N(±2πμ_q, (2πσ_q)²) with either sign and probability
    w_q/Σw. Components are drawn evenly and weighted by Q w_q/Σw, so that w is trained too. There is
    no isotropic base law and so no tilt.
    """

    weights: Float[Tensor, "*b Q"]
    means: Float[Tensor, "*b Q 1 d"]
    scales: Float[Tensor, "*b Q 1 d"]

    def num_coordinates(self, num_dims: int) -> int:
        return 1 + 2 * num_dims

    def base(self, directions: np.ndarray, u: np.ndarray, tilt: int) -> np.ndarray:
        if tilt:
            raise NotImplementedError(
                'a field over SpectralMixtureKernel has no trace measure; use measure="base"'
            )
        d, components = directions.shape[-1], self.weights.shape[-1]
        z = directions * np.sqrt(_chi2_quantile(u[:, :1], d))
        signs, component = np.sign(u[:, 1 : d + 1] - 0.5), np.floor(components * u[:, d + 1 :])
        return np.concatenate([z, signs, component], axis=-1)

    def frequencies(self, base: Float[Tensor, "D 3*d"], tilt: int) -> Float[Tensor, "*b D d"]:
        z, signs, component = base.chunk(3, dim=-1)
        index = component.long().unsqueeze(-2).expand(*self.means.shape[:-3], -1, 1, -1)
        means = self.means.squeeze(-2).gather(-2, index.squeeze(-2))
        scales = self.scales.squeeze(-2).gather(-2, index.squeeze(-2))
        return 2 * math.pi * (signs * means + scales * z)

    def importance(self, base: Float[Tensor, "D 3*d"], tilt: int) -> Float[Tensor, "*b D"]:
        ratio = self.weights.shape[-1] * self.weights / self.weights.sum(-1, keepdim=True)
        return ratio[..., base.chunk(3, dim=-1)[2].long()].prod(-1)

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        centre, sd = 2 * math.pi * self.means, 2 * math.pi * self.scales
        share = (self.weights / self.weights.sum(-1, keepdim=True))[..., None, None]
        sides = [
            -0.5 * ((omega.unsqueeze(-3) - sign * centre) / sd).square() for sign in (1, -1)
        ]  # (*b, Q, m, d)
        density = torch.logaddexp(*sides) - (2 * sd).log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(density + share.log(), dim=-3).sum(-1)

    def moment(self, tilt: int, num_dims: int) -> float:
        """Finite for every tilt; its value in base units is only defined for tilt 0."""
        return 1.0

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        squares = (2 * math.pi) ** 2 * (self.means.square() + self.scales.square()).squeeze(-2)
        share = self.weights / self.weights.sum(-1, keepdim=True)
        return (share.unsqueeze(-1) * squares).sum(-2)

    def reach(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        """max_i |ω_i| / (largest mean + standard deviation along axis i): a box."""
        _, means, scales = self._components()
        return np.max(np.abs(omega) / (means + scales).max(axis=(0, 1)), axis=-1)

    def tail(self, reach: float, tilt: int, num_dims: int) -> float:
        """One minus the share inside the box; for tilt 1, of E‖ω‖², coordinates independent."""
        share, means, scales = self._components()
        edge = reach * (means + scales).max(axis=(0, 1))  # (d,)
        low, high = (-edge - means) / scales, (edge - means) / scales
        normal = scipy.stats.norm
        mass = normal.cdf(high) - normal.cdf(low)
        outside = normal.sf(high) + normal.cdf(low)
        lost = (share[..., None] * outside).sum(-2)  # (batch, d)
        if not tilt:
            return float((1 - np.prod(1 - lost, axis=-1)).max())
        # E[ω²; |ω| ≤ edge] of one Gaussian by its truncated moments
        second = (means**2 + scales**2) * mass - scales * (
            (edge + means) * normal.pdf(high) + (edge - means) * normal.pdf(low)
        )
        second = (share[..., None] * second).sum(-2)
        whole = (share[..., None] * (means**2 + scales**2)).sum(-2).sum(-1)
        rest = np.prod(1 - lost, axis=-1, keepdims=True) / (1 - lost)
        return float((1 - (second * rest).sum(-1) / whole).max())

    def correlation(self, lag: float, axis: int, tilt: int) -> float:
        """Without the cosine: the envelope of the component that decays most slowly."""
        share, means, scales = self._components()
        mean, sd = means[..., axis], scales[..., axis]  # (batch, Q)
        envelope = np.exp(-0.5 * (sd * lag) ** 2)
        if not tilt:
            return float((share * envelope).sum(-1).max())
        polynomial = sd**2 * np.maximum(1, (sd * lag) ** 2) + 2 * mean * sd**2 * lag + mean**2
        whole = (share * (mean**2 + sd**2)).sum(-1)
        return float(((share * envelope * polynomial).sum(-1) / whole).max())

    def _components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shares (batch, Q), means and standard deviations (batch, Q, d) of ω."""
        share = self.weights / self.weights.sum(-1, keepdim=True)
        parts = share, 2 * math.pi * self.means.squeeze(-2), 2 * math.pi * self.scales.squeeze(-2)
        share, means, scales = (t.detach().double().cpu().numpy() for t in parts)
        components, d = means.shape[-2:]
        return (
            share.reshape(-1, components),
            means.reshape(-1, components, d),
            scales.reshape(-1, components, d),
        )


def _chi2_quantile(u: np.ndarray, degrees: int) -> np.ndarray:
    return 2 * scipy.special.gammaincinv(degrees / 2, u)


def _chi2_tail(x: np.ndarray | float, degrees: int) -> np.ndarray | float:
    return scipy.special.gammaincc(degrees / 2, x / 2)


def _gamma_mixture_tail(square: float, a: float, degrees: int) -> float:
    """P(s χ² > square), s ~ Gamma(a, rate a): where the integrand over log s is within 45 nats of
    its peak, found on a coarse grid."""

    def log_integrand(t: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            beyond = np.log(_chi2_tail(square * np.exp(-t), degrees))
        return beyond - a * (np.expm1(t) - t)

    low, high = gamma_range(a, nats=90.0)
    low = max(low, math.log(max(square, 1e-300) / 1400))  # χ² beyond 1400 never comes
    if low >= high:
        return 0.0
    coarse = np.linspace(low, high, 401)
    values = log_integrand(coarse)
    (seen,) = np.nonzero(values > values.max() - 45)
    low, high = coarse[max(seen[0] - 1, 0)], coarse[min(seen[-1] + 1, 400)]
    nodes, weights = unit_legendre(200)
    half = 0.5 * (high - low)
    mass = half * (weights * np.exp(log_integrand(low + half * (1 + nodes)))).sum()
    return float(mass * math.exp(-log_integral_alone(torch.tensor(a)).item()))


def _chi2_moment(order: int, degrees: int) -> float:
    """E[(χ²_d)^t]."""
    return 2.0**order * math.gamma(degrees / 2 + order) / math.gamma(degrees / 2)


def _gamma_slope(a: np.ndarray, s: np.ndarray) -> np.ndarray:
    """−∂_a P(a, s) / p(s; a), P by differences of fourth order, in the smaller of its two tails."""
    s = np.maximum(s, np.finfo(float).tiny)
    h = 1e-3 * np.minimum(a, np.sqrt(a))  # of the width, where a is large
    upper = scipy.special.gammainc(a, s) > 0.5

    def tail(b: np.ndarray) -> np.ndarray:
        return np.where(upper, -scipy.special.gammaincc(b, s), scipy.special.gammainc(b, s))

    slope = (8 * (tail(a + h) - tail(a - h)) - (tail(a + 2 * h) - tail(a - 2 * h))) / (12 * h)
    log_density = (a - 1) * np.log(s) - s - scipy.special.gammaln(a)
    return np.nan_to_num(-slope * np.exp(-log_density), posinf=0.0, neginf=0.0)


class GammaQuantile(Function):
    """s with P(Gamma(a, 1) ≤ s) = u; ∂s/∂a at fixed u is −∂_a P(a, s) over the density at s."""

    @staticmethod
    def forward(ctx, a: Float[Tensor, "*b 1"], u: Float[Tensor, "D"]) -> Float[Tensor, "*b D"]:
        s = scipy.special.gammaincinv(a.double().cpu().numpy(), u.double().cpu().numpy())
        s = torch.as_tensor(s, dtype=torch.float64, device=a.device)
        ctx.save_for_backward(a, s)
        return s.to(a.dtype)

    @staticmethod
    def backward(ctx, grad):
        a, s = ctx.saved_tensors
        if torch.is_grad_enabled():  # good to 1e-3, and raises where it is differentiated again
            slope = torch._standard_gamma_grad(a.double().expand_as(s).contiguous(), s)
        else:
            slope = torch.as_tensor(_gamma_slope(a.double().cpu().numpy(), s.cpu().numpy())).to(s)
        return (grad * slope).sum(-1, keepdim=True).to(a.dtype), None


@singledispatch
def spectrum(kernel: Kernel) -> Spectrum:
    """The spectral law of a stationary scalar kernel, at its present hyperparameters.

    Known: `RBFKernel`, `MaternKernel`, `GeneralMaternKernel` (any ν > 0), `RQKernel` (α is trained
    too) and `SpectralMixtureKernel`, with one lengthscale or ARD.

    Raises:
        NotImplementedError: for every other kernel. Register a `Spectrum` for your own, and the
            whole package knows it.

    Example:
        >>> import gpytorch, gp_orff
        >>> law = gp_orff.spectrum(gpytorch.kernels.MaternKernel(nu=2.5))
        >>> round(law.moment(tilt=1, num_dims=2), 6)          # E‖z‖² = d ν/(ν − 1)
        3.333333

        A kernel of your own, here a Matérn 5/2 kernel by another name:

        >>> class MyKernel(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.spectrum.register
        ... def _(kernel: MyKernel):
        ...     return gp_orff.spectra.StudentT(kernel.lengthscale, nu=2.5)
        >>> gp_orff.ORFFKernel(MyKernel(ard_num_dims=3), gp_orff.MonteCarlo(64)).num_features
        128
    """
    known = ", ".join(sorted(cls.__name__ for cls in spectrum.registry if cls is not object))
    raise NotImplementedError(
        f"no spectral density is known for {type(kernel).__name__}; known are {known}. "
        "Register yours with @gp_orff.spectrum.register (see its docstring)."
    )


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


@spectrum.register
def _(kernel: RQKernel) -> Spectrum:
    require_covariance_of(RQKernel, kernel)
    return GammaMixture(kernel.lengthscale, kernel.alpha)


@spectrum.register
def _(kernel: SpectralMixtureKernel) -> Spectrum:
    require_covariance_of(SpectralMixtureKernel, kernel)
    return SpectralMixture(kernel.mixture_weights, kernel.mixture_means, kernel.mixture_scales)
