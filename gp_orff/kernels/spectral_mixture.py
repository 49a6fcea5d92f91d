"""Spectra of spectral mixture kernels."""

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from gpytorch.kernels import SpectralMixtureKernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.base import require_covariance_of
from gp_orff.kernels.spectra import GridSpectrum, Range, Spectrum, chi2_quantile, spectrum

# Mixtures of Gaussian densities away from zero: spectra of spectral mixture kernels.


@dataclass(frozen=True)
class SpectralMixture(GridSpectrum):
    """Spectrum of gpytorch's SpectralMixtureKernel Π_i Σ_q w_q exp(−2π²τ_i²σ_qi²) cos(2πτ_iμ_qi).

    The coordinates of ω are independent. Each is N(±2πμ_q, (2πσ_q)²) with probability w_q/Σw, both
    signs alike. Components are drawn with equal probabilities and have importance weights Q w_q/Σw,
    so that gradients reach w. There is no isotropic base measure, hence no order t > 0.

    Args:
        weights: w, (*b, Q).
        means: μ, (*b, Q, 1, d), in cycles per unit of the inputs.
        scales: σ, (*b, Q, 1, d), in cycles per unit of the inputs.

    Example:
        >>> import gp_orff, torch
        >>> w, one = torch.ones(2), torch.ones(2, 1, 1)
        >>> spectrum = gp_orff.spectra.SpectralMixture(w, means=0 * one, scales=one)
        >>> spectrum.second_moments(num_dims=1)  # (2π)²
        tensor([39.4784])
    """

    weights: Float[Tensor, "*b Q"]
    means: Float[Tensor, "*b Q 1 d"]
    scales: Float[Tensor, "*b Q 1 d"]
    is_weighted = False

    @property
    def _share(self) -> Float[Tensor, "*b Q"]:
        """w_q/Σw."""
        return self.weights / self.weights.sum(-1, keepdim=True)

    def num_coordinates(self, num_dims: int) -> int:
        return 1 + 2 * num_dims

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        """Base variables (D, 3·d): standard normal numbers, signs and components.

        Args:
            directions: (D, d), unit vectors.
            u: (D, 1 + 2·d), uniform numbers in (0, 1).
            order: 0.

        Raises:
            NotImplementedError: an order other than 0.
        """
        if order:
            raise NotImplementedError(
                'a field over SpectralMixtureKernel has no trace measure; use measure="base"'
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
        """The log density at `omega` of components with these probabilities."""
        centre, sd = 2 * math.pi * self.means, 2 * math.pi * self.scales
        exponents = [
            -0.5 * ((omega.unsqueeze(-3) - sign * centre) / sd).square() for sign in (1, -1)
        ]  # (*b, Q, m, d)
        log_density = torch.logaddexp(*exponents) - (2 * sd).log() - 0.5 * math.log(2 * math.pi)
        return torch.logsumexp(log_density + share[..., None, None].log(), dim=-3).sum(-1)

    def moment(self, order: float, num_dims: int) -> float:
        """1 for every `order` and `num_dims`: finite, but not in base units for order > 0."""
        return 1.0

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        squares = (2 * math.pi) ** 2 * (self.means.square() + self.scales.square()).squeeze(-2)
        return (self._share.unsqueeze(-1) * squares).sum(-2)

    def scaled_radius(self, omega: Float[np.ndarray, "D d"]) -> Float[np.ndarray, "D"]:
        # max_i |ω_i| / (largest mean + standard deviation along axis i): level sets are boxes
        _, means, scales = self._components()
        return np.max(np.abs(omega) / (means + scales).max(axis=(0, 1)), axis=-1)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        # one minus the share inside the box; for order 1, of E‖ω‖², coordinates independent
        share, means, scales = self._components()
        edge = scaled_radius * (means + scales).max(axis=(0, 1))  # (d,)
        low, high = (-edge - means) / scales, (edge - means) / scales
        cdf = scipy.special.ndtr
        mass = cdf(high) - cdf(low)
        outside = cdf(-high) + cdf(low)
        outside = (share[..., None] * outside).sum(-2)  # (batch, d)
        if not order:
            return float((1 - np.prod(1 - outside, axis=-1)).max())
        # E[ω²; |ω| ≤ edge] of one Gaussian by its truncated moments
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
        # of the longest correlations: those of the narrowest component along every axis
        _, _, scales = self._components()
        return 1 / scales.min(axis=(0, 1))

    def frequency_parameters(self, shortest, longest):
        low, high = (
            torch.from_numpy(1 / (2 * math.pi * length)).to(self.means)
            for length in (longest, shortest)
        )
        return [Range(self.scales, low, high), Range(self.means, 1e-2 * low, math.pi * high)]

    def _components(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Shares (batch, Q), means and standard deviations (batch, Q, d) of ω."""
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
