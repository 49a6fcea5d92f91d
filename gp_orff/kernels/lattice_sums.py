"""Sums of a spectral density over all points of a lattice, for Gaussian scale mixtures.

For a fixed scale s, the spectrum is N(0, s diag ℓ⁻²). Its sum over a lattice with the spacing h is
a product of theta functions, one for each axis:

    θ(τ) = Σ_k c e^{−(khℓ)²/2s} cos(khτ) = Σ_j e^{−s((τ + jP)/ℓ)²/2},   c = hℓ/√(2πs),  P = 2π/h .

The first sum is over frequencies kh. The second sum is over images of the kernel at distances jP.
One of them converges within a few terms. The mean over the scale is a one-dimensional quadrature.
It is exact to rounding, even if the sum of the images of the mixture converges slowly or diverges.
"""

import math
from functools import singledispatch

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.kernels.spectra import ScaleMixture, Spectrum

# Each theta function has two series. At τ = 0, the terms of the series over waves are c e^{−πc²k²},
# and the terms of the series over images are e^{−πj²/c²}. The first series converges quickly for
# c > 1, and the second one for c < 1. Five terms on each side are therefore exact to rounding.
# `_excess` and `_derivatives` compute both series and select one for each scale and axis.
#
# Sums over k ≠ 0 are computed as Πc_i (Π(1 + ε_i) − 1) with ε = θ/c − 1. For small scales, the term
# k = 0 may be so large that subtracting it from the whole sum would lose all digits.


_TERMS = 5  # the number of terms of a theta function on each side of zero


@singledispatch
def weight_at_zero(spectrum: Spectrum, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """Return the quadrature weight of the frequency ω = 0 on a lattice with spacing h.

    The weight is S(0) ∏h, with the spectral density S. With this weight, the sum over all lattice
    points is the periodic kernel Σ_j k(τ + jP) of period P = 2π/h. A `ScaleMixture` has another
    weight, because its density may be infinite at ω = 0.

    Args:
        spectrum: the spectral density S.
        spacing: h, (d,), in radians per unit of the inputs.
    """
    density = spectrum.log_density(spacing.new_zeros(1, len(spacing))).exp()
    return spacing.prod() * density.squeeze(-1)


@weight_at_zero.register
def _(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """Return k(0) minus the weights of all other lattice points, so that the variance is exact.

        1 − Σ_{k≠0} S(ω_k) ∏h = S(0) ∏h − Σ_{j≠0} k(jP) = E_s[1 − Πθ_i(0) + Πc_i] .

    If correlations vanish within a period, this equals S(0) ∏h up to aliasing. The correlations of
    rational quadratic kernels decrease as a power of the lag. For α → d/2, their S(0) and the sum
    of the k(jP) diverge, but the difference of both terms converges. The kernel of the grid is
    exact at lag zero. At another lag τ, its error is Σ_{j≠0} [k(τ + jP) − k(jP)], which converges
    for every α.
    """
    return (1 - nonzero_sum(spectrum, spacing)).clamp_min(0)


def lattice_weights(
    spectrum: Spectrum, omega: Float[Tensor, "D d"], spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b D"]:
    """Return the quadrature weights S(ω) ∏h, with `weight_at_zero` at ω = 0."""
    nonzero = omega.any(-1)
    if nonzero.all():
        return spacing.prod() * spectrum.log_density(omega).exp()
    finite = torch.where(nonzero.unsqueeze(-1), omega, spacing)  # replaces ω = 0 by any other ω
    weights = spacing.prod() * spectrum.log_density(finite).exp()
    return torch.where(nonzero, weights, weight_at_zero(spectrum, spacing).unsqueeze(-1))


def nonzero_sum(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """Return Σ_{k≠0} S(ω_k) ∏h over the whole lattice, which is E_s[Πθ_i(0) − Πc_i]."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.nonzero_terms(torch.zeros_like(spacing)))


def second_moments(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b d d"]:
    """Return Σ_k S(ω_k) ω_k ω_kᵀ ∏h over the whole lattice."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.curvature(torch.zeros_like(spacing)))


@singledispatch
def moments_near_zero(
    spectrum: Spectrum, spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b d"] | None:
    """Return the second moments E ω_i² that a lattice omits near ω = 0, or None for zero.

    They are the mean of ω_i² minus its sum over all lattice points. By default, correlations vanish
    within a period, and the result is None.
    """
    return None


@moments_near_zero.register
def _(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b d"]:
    """Return Σ_{j≠0} ∂_i² k(jP), or zero if it is negative."""
    whole = spectrum.second_moments(len(spacing)).to(spacing)
    on_lattice = second_moments(spectrum, spacing).diagonal(dim1=-1, dim2=-2)
    return (whole - on_lattice).clamp_min(0)


def aliased(
    spectrum: ScaleMixture, spacing: Float[Tensor, "d"], lag: Float[Tensor, "d"]
) -> Float[Tensor, "*b"]:
    """Return the error Σ_{j≠0} [k(τ + jP) − k(jP)] of the kernel of a lattice at the lag τ."""
    scales = _Scales(spectrum, spacing)
    change = scales.nonzero_terms(lag) - scales.nonzero_terms(torch.zeros_like(spacing))
    return scales.mean(change - torch.expm1(-scales.exponent(lag)))


def aliased_curvature(
    spectrum: ScaleMixture, spacing: Float[Tensor, "d"], lag: Float[Tensor, "d"]
) -> Float[Tensor, "*b d d"]:
    """Return the error of the negative Hessian of the kernel of a lattice at the lag τ."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.curvature(lag) - scales.gaussian_curvature(lag))


def first_nonzero(points: Int[np.ndarray, "D d"]) -> Int[np.ndarray, "D"]:
    """Return the sign of the first nonzero coordinate of each point, or 0 if there is none."""
    sign = np.zeros(len(points), dtype=int)
    for column in points.T:
        sign = np.where(sign == 0, np.sign(column), sign)
    return sign


class _Scales:
    """Theta functions of a lag along every axis, for each scale s of a spectrum."""

    def __init__(self, spectrum: ScaleMixture, spacing: Float[Tensor, "d"]):
        self.spacing = spacing
        self.lengthscale = spectrum.lengthscale.to(spacing)
        self.width = self.lengthscale * spacing
        # For smaller scales, the whole Gaussian is inside the cell around ω = 0.
        s, self.weights = spectrum.scales(1e-12 * self.width.detach().min().item() ** 2)
        self.s = s.unsqueeze(-1)  # (*b, n, 1)
        self.c = self.width / (2 * math.pi * self.s).sqrt()  # (*b, n, d)

    def mean(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return the mean of values (*b, n) or (*b, n, d, d) over the scales."""
        extra = values.dim() - self.weights.dim()
        weights = self.weights.reshape(*self.weights.shape, *[1] * extra)
        return (weights * values).sum(-1 - extra)

    def exponent(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n"]:
        """Return ½ s ‖τ/ℓ‖²."""
        return 0.5 * (self.s * (lag / self.lengthscale).square()).sum(-1)

    def nonzero_terms(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n"]:
        """Return the sum over k ≠ 0 at the lag τ, Πθ_i(τ_i) − Πc_i.

        It is computed as Πc_i (Π(1 + ε_i) − 1), without cancellation for large c_i.
        """
        excess = 0.0
        for epsilon in self._excess(lag).unbind(-1):
            excess = excess + epsilon + excess * epsilon
        return self.c.prod(-1) * excess

    def curvature(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d d"]:
        """Return −∂_i ∂_j Πθ at the lag τ."""
        return _negative_hessian(*self._derivatives(lag))

    def gaussian_curvature(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d d"]:
        """Return −∂_i ∂_j of the Gaussian exp(−½ s ‖τ/ℓ‖²), without images."""
        rate = self.s / self.lengthscale.square()
        theta = (-0.5 * rate * lag.square()).exp()
        slope, bend = rate * lag * theta, rate * (1 - rate * lag.square()) * theta
        return _negative_hessian(theta, slope, bend)

    def _excess(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d"]:
        """Return ε = θ/c − 1."""
        waves, fall = self._waves()
        by_waves = 2 * (fall * (waves * lag).cos())[1:].sum(0)
        _, images = self._images(lag)
        return torch.where(self.c > 1, by_waves, images.sum(0) / self.c - 1)

    def _derivatives(self, lag: Float[Tensor, "d"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return θ, −θ′ and −θ″, (*b, n, d) each."""
        waves, fall = self._waves()
        phase, weights = waves * lag, 2 * self.c * fall  # for k and −k together
        weights = torch.cat([0.5 * weights[:1], weights[1:]])
        slopes = weights * waves * phase.sin()
        by_waves = weights * phase.cos(), slopes, weights * waves.square() * phase.cos()
        shifts, images = self._images(lag)
        rate = self.s / self.lengthscale.square()
        by_images = images, rate * shifts * images, rate * (1 - rate * shifts.square()) * images
        waves_converge = self.c > 1
        return tuple(
            torch.where(waves_converge, wave.sum(0), image.sum(0))
            for wave, image in zip(by_waves, by_images, strict=True)
        )

    def _waves(self) -> tuple[Float[Tensor, "k *b 1 d"], Float[Tensor, "k *b n d"]]:
        """Return kh and e^{−(khℓ)²/2s} for k = 0, 1, … along the first axis."""
        k = self._leading(torch.arange(_TERMS + 1).to(self.spacing))
        return k * self.spacing, (-0.5 * (k * self.width).square() / self.s).exp()

    def _images(self, lag: Float[Tensor, "d"]) -> tuple[Tensor, Float[Tensor, "k *b n d"]]:
        """Return τ + jP and e^{−s((τ + jP)/ℓ)²/2} for j = …, 0, 1, … along the first axis."""
        j = self._leading(torch.arange(-_TERMS, _TERMS + 1).to(self.spacing))
        shifts = lag + j * (2 * math.pi / self.spacing)
        return shifts, (-0.5 * self.s * (shifts / self.lengthscale).square()).exp()

    def _leading(self, terms: Float[Tensor, "k"]) -> Float[Tensor, "k *ones"]:
        """Return the terms along a new first axis, before the axes of c."""
        return terms.reshape(-1, *[1] * self.c.dim())


def _negative_hessian(
    theta: Float[Tensor, "*b n d"], slope: Float[Tensor, "*b n d"], bend: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n d d"]:
    """Return −∂_i ∂_j Πθ_i(τ_i) from θ, −θ′ (`slope`) and −θ″ (`bend`) along every axis."""
    d, rows = theta.shape[-1], []
    for i in range(d):
        row = []
        for j in range(d):
            factors = [theta[..., axis] for axis in range(d) if axis not in (i, j)]
            factors += [bend[..., i]] if i == j else [-slope[..., i], slope[..., j]]
            row.append(math.prod(factors))
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)
