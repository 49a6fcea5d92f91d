"""Gaussian scale mixtures with Gamma-distributed scales: spectra of rational quadratic kernels."""

import math
from dataclasses import dataclass, replace

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
from gp_orff.kernels.spectra.elliptical import (
    ScaleMixture,
    chi2_moment,
    chi2_tail,
)
from gp_orff.kernels.spectra.scale_mixture import (
    gamma_nodes,
    gamma_range,
    log_gamma_integral,
    log_integral,
    stirling_remainder,
    unit_legendre,
)

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
        """s of the base variables."""
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
        alpha = self._alphas().min()
        square = scaled_radius**2 * alpha / (alpha + order)  # s = (α + t)/α times one of mean 1
        return _gamma_mixture_tail(square, alpha + order, num_dims + 2 * order)

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
        """log S(ω), (*b, m), at `omega` (*b, m, d); infinite at ω = 0 for α ≤ d/2.

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
    size = torch.where(difference > 0, difference, -difference)
    large = 0.5 * (size + (difference.square() + 4 * product).sqrt())
    small = product / large
    return torch.where(difference > 0, large, small), torch.where(difference > 0, small, large)


def _log_peak(
    alpha: Float[Tensor, "*b m"], a: Float[Tensor, "*b m"], b: Float[Tensor, "*b m"], half: float
) -> Float[Tensor, "*b m"]:
    """log of s Gamma(s; α, α) N(z; 0, s I) at its peak s = a/α; `half` is d/2."""
    rise = (b - half) / alpha  # a/α − 1
    near = rise.abs() < 0.5
    log_s = torch.where(near, torch.log1p(torch.where(near, rise, 0.0)), (a / alpha).log())
    normaliser = 0.5 * (alpha / (2 * math.pi)).log() - stirling_remainder(alpha)
    return normaliser + alpha * (log_s - rise) - b - half * (math.log(2 * math.pi) + log_s)


def _gamma_mixture_tail(square: float, a: float, degrees: int) -> float:
    """P(s χ² > square), s ~ Gamma(a, rate a).

    The integral over log s is taken where its integrand is within 45 nats of its peak on a coarse
    grid.
    """

    def log_integrand(t: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            beyond = np.log(chi2_tail(square * np.exp(-t), degrees))
        return beyond - a * (np.expm1(t) - t)

    low, high = gamma_range(a, nats=90.0)
    low = max(low, math.log(max(square, 1e-300) / 1400))  # P(χ² > 1400) underflows
    if low >= high:
        return 0.0
    coarse = np.linspace(low, high, 401)
    values = log_integrand(coarse)
    (support,) = np.nonzero(values > values.max() - 45)
    low, high = coarse[max(support[0] - 1, 0)], coarse[min(support[-1] + 1, 400)]
    nodes, weights = unit_legendre(200)
    half = 0.5 * (high - low)
    mass = half * (weights * np.exp(log_integrand(low + half * (1 + nodes)))).sum()
    return float(mass * math.exp(-log_gamma_integral(torch.tensor(a)).item()))


def _gamma_slope(a: np.ndarray, s: np.ndarray) -> np.ndarray:
    """−∂_a P(a, s) / p(s; a), by fourth-order differences of the smaller tail of P."""
    s = np.maximum(s, np.finfo(float).tiny)
    h = 1e-3 * np.minimum(a, np.sqrt(a))  # √a is the width of the density where a is large
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
