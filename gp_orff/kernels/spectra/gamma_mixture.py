"""Mixtures of normal densities over Gamma-distributed scales: rational quadratic kernels."""

import math
from dataclasses import dataclass

import numpy as np
import scipy.special
import scipy.stats
import torch
from gpytorch.kernels import RQKernel
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.scalar import require_covariance_of
from gp_orff.kernels.spectra.base import Range, Spectrum, spectrum
from gp_orff.kernels.spectra.elliptical import Elliptical, chi2_moment, chi2_quantile, chi2_tail
from gp_orff.kernels.spectra.scale_mixture import (
    gamma_nodes,
    gamma_range,
    log_integral,
    log_integral_alone,
    stirling_remainder,
    unit_legendre,
)

_ALPHA = 0.01, 1e3  # that is sought: correlations of logarithms, and like RBF


@dataclass(frozen=True)
class GammaMixture(Elliptical):
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

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        radius2 = chi2_quantile(u[:, :1], directions.shape[-1] + 2 * order)
        return np.concatenate([directions * np.sqrt(radius2), u[:, 1:2]], axis=-1)

    def _mixing(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        s = GammaQuantile.apply(self.alpha + order, base[:, -1]) / self.alpha
        return s.clamp_min(torch.finfo(s.dtype).tiny)  # whose root has a derivative

    def frequencies(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D d"]:
        return self._mixing(base, order).sqrt().unsqueeze(-1) * base[:, :-1] / self.lengthscale

    def importance(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        radius2 = self._mixing(base, order) * base[:, :-1].square().sum(-1)
        return self.moment(order, base.shape[-1] - 1) / radius2**order

    def moment(self, order: int, num_dims: int) -> float | Tensor:
        if order <= 1:  # E s = 1
            return chi2_moment(order, num_dims)
        rising = math.prod((self.alpha + i) / self.alpha for i in range(order))  # E s^t
        return rising * chi2_moment(order, num_dims)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        """E[P(s χ²_{d+2t} > W²)] over s ~ Gamma(α + t, rate α)."""
        alpha = self._alphas().min()
        square = scaled_radius**2 * alpha / (alpha + order)  # s = (α + t)/α times one of mean 1
        return _gamma_mixture_tail(square, alpha + order, num_dims + 2 * order)

    def _radial_correlation(self, r: float, order: int) -> float:
        alpha = self._alphas().min()
        base = r * r / (2 * alpha)
        along = (alpha + 1) / alpha * r * r / (1 + base) - 1
        return max(1.0, along) ** order * math.exp(-(alpha + order) * math.log1p(base))

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "d"]:
        """Of the shortest correlations: ℓ √(α / (α + 1))."""
        alpha = self._alphas().min()
        return self.scaled_radius(np.eye(num_dims)) * math.sqrt(alpha / (alpha + 1))

    def frequency_parameters(self, shortest, longest):
        """α too: frequencies reach as far as √((α + 1)/α) / ℓ."""
        stretch = min(2 * (1 + self._alphas().min().item()), 6.0)
        lengthscales = super().frequency_parameters(shortest, longest)
        return [*lengthscales, Range(self.alpha, *_ALPHA, stretch)]

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


def _gamma_mixture_tail(square: float, a: float, degrees: int) -> float:
    """P(s χ² > square), s ~ Gamma(a, rate a): where the integrand over log s is within 45 nats of
    its peak, found on a coarse grid."""

    def log_integrand(t: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            beyond = np.log(chi2_tail(square * np.exp(-t), degrees))
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


@spectrum.register
def _(kernel: RQKernel) -> Spectrum:
    require_covariance_of(RQKernel, kernel)
    return GammaMixture(kernel.lengthscale, kernel.alpha)
