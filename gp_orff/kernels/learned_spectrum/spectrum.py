"""Mixtures of Gaussian spectra of known widths: spectra of `LearnedSpectrumKernel`."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.learned_spectrum.ends import BEYOND
from gp_orff.kernels.learned_spectrum.kernel import LearnedSpectrumKernel
from gp_orff.kernels.spectra.base import GRID_INPUTS, Range, Spectrum, spectrum
from gp_orff.kernels.spectra.elliptical import ScaleMixture, chi2_moment, chi2_tail
from gp_orff.kernels.spectra.lengths import shortest_lengths

_LARGEST = 16.0  # coordinates of the weights, in standard deviations of their prior
_STRETCH = 6.0  # how much faster than the frequencies these may move, in a search
_SHARE = 0.01  # of the variance that shorter lengths may have


@dataclass(frozen=True)
class FiniteMixture(ScaleMixture):
    """Spectrum of `LearnedSpectrumKernel`: z = √s g, g ~ N(0, I), where s = s_j with weight π_j.

    Weighted by ‖z‖^{2t}: weights ∝ π_j s_j^t, and ‖g‖² ~ χ²_{d+2t}.

    Args:
        lengthscale: ℓ, (*b, 1, d), or (*b, 1, 1) for one lengthscale of all inputs.
        variances: s, (J,), positive.
        weights: π, (*b, J).
        beyond: of how many of the s, the first ones, a grid leaves out what it does not hold: those
            that continue a learned curve beyond its last knot. `tail` does not count them.

    Example:
        >>> import gp_orff, torch
        >>> variances, weights = torch.tensor([1.0, 4.0]), torch.tensor([0.75, 0.25])
        >>> mixture = gp_orff.spectra.FiniteMixture(torch.ones(1, 1), variances, weights)
        >>> mixture.moment(order=1, num_dims=2)  # d E s
        tensor([3.5000])
    """

    variances: Float[Tensor, "J"]
    weights: Float[Tensor, "*b J"]
    beyond: int = 0

    def scales(self, least: float) -> tuple[Float[Tensor, "*b J"], Float[Tensor, "*b J"]]:
        """s and weights, (*b, J); `least` is for scales without end."""
        weights = self.weights.double()
        return self.variances.double().clamp_min(least).expand_as(weights), weights

    def log_density(self, omega: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        radius2, log_det = self._scaled(omega)
        half = omega.shape[-1] / 2
        s, weights = self.variances.to(radius2), self.weights.to(radius2).unsqueeze(-2)
        terms = weights.log() - half * (2 * math.pi * s).log() - 0.5 * radius2.unsqueeze(-1) / s
        return log_det + terms.logsumexp(-1)

    def moment(self, order: float, num_dims: int) -> Float[Tensor, "*b 1"]:
        """E‖z‖^{2t} = E s^t E‖g‖^{2t}, t = `order`, in `num_dims` dimensions."""
        mean = (self.weights * self.variances**order).sum(-1, keepdim=True)
        return mean * chi2_moment(order, num_dims)

    def second_moments(self, num_dims: int) -> Float[Tensor, "*b d"]:
        """E ω_i², (*b, d), d = `num_dims`."""
        mean = (self.weights * self.variances).sum(-1, keepdim=True)
        variance = mean / self.lengthscale.square().squeeze(-2)
        return variance.expand(*variance.shape[:-1], num_dims)

    def tail(self, scaled_radius: float, order: int, num_dims: int) -> float:
        s, weights = self._of_curve(order)
        outside = chi2_tail(scaled_radius**2 / s, num_dims + 2 * order)
        return float((weights * outside).sum(-1).max())

    def other_lengths(self, num_dims: int) -> Float[np.ndarray, "d"]:
        return self.scaled_radius(np.eye(num_dims)) * self.shortest

    @property
    def shortest(self) -> float:
        """The length of the curve, over ℓ, below which it has a hundredth of the variance of a
        field."""
        s, weights = self._of_curve(1)
        below = np.cumsum(weights[:, np.argsort(-s)], axis=-1) > _SHARE
        return float(np.sort(1 / np.sqrt(s))[below.argmax(-1).min()])

    def frequency_parameters(self, shortest, longest):
        # the weights too: they decide which frequencies matter
        lengthscales = super().frequency_parameters(shortest, longest)
        return [*lengthscales, Range(self.weights, -_LARGEST, _LARGEST, _STRETCH)]

    def _weighted_across(self, order: int) -> "FiniteMixture":
        weights = self.weights * self.variances**order
        return replace(self, weights=weights / weights.sum(-1, keepdim=True))

    def _radial_correlation(self, r: float, order: int) -> float:
        """`correlation` from the scaled lag r on: the mean of max(1, s r²)^t e^{−s r²/2}."""
        s, weights = self._values(order)
        square = s * r * r
        return float((weights * np.maximum(1, square) ** order * np.exp(-square / 2)).sum(-1).max())

    def _of_curve(self, order: int) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        """Those of `_values` that are not beyond the curve."""
        s, weights = self._values(order)
        return s[self.beyond :], weights[:, self.beyond :]

    def _values(self, order: int) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        """s, and the weights ∝ π s^t of a batch, t = `order`."""
        s, weights = self._arrays
        weights = weights * s**order
        return s, weights / weights.sum(-1, keepdims=True)

    @cached_property
    def _arrays(self) -> tuple[Float[np.ndarray, "J"], Float[np.ndarray, "b J"]]:
        s = self.variances.detach().double().cpu().numpy()
        return s, self.weights.detach().double().cpu().numpy().reshape(-1, len(s))

    def scale(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        """s of the base variables.

        Raises:
            NotImplementedError: weights are trained, which the choice of a scale cannot follow.
        """
        if torch.is_grad_enabled() and self.weights.requires_grad:
            inputs = base.shape[-1] - 1
            remedy = "Grid or Auto" if inputs <= GRID_INPUTS else "the kernel without features"
            raise NotImplementedError(
                "expected a frequency grid while the weights of a LearnedSpectrumKernel are "
                f"trained, which serves up to {GRID_INPUTS} inputs, got random frequencies of "
                f"{inputs}, which cannot follow the weights; use {remedy}, or freeze the weights "
                "by kernel.shape.requires_grad_(False)"
            )
        weights = self.weights * self.variances**order
        levels = (weights / weights.sum(-1, keepdim=True)).cumsum(-1)[..., :-1]
        chosen = (base[:, -1, None] > levels.unsqueeze(-2)).sum(-1)  # (*b, D)
        return self.variances[chosen].to(base)


@spectrum.register
def _(kernel: LearnedSpectrumKernel) -> Spectrum:
    beyond = BEYOND if kernel.continued else 0
    return FiniteMixture(kernel.lengthscale, kernel.rates.detach(), kernel.weights, beyond)


@shortest_lengths.register
def _(kernel: LearnedSpectrumKernel) -> Tensor:
    """ℓ times the shortest of the lengths that matter."""
    return kernel.lengthscale * spectrum(kernel).shortest
