"""Sums of a spectral density over all points of a lattice, for Gaussian scale mixtures.

Given the scale s, the spectrum is N(0, s diag ℓ⁻²). Its sum over a lattice of spacing h is a
product of theta functions, one for each axis,

    θ(τ) = Σ_k c e^{−(khℓ)²/2s} cos(khτ) = Σ_j e^{−s((τ + jP)/ℓ)²/2},   c = hℓ/√(2πs),  P = 2π/h,

a sum over frequencies kh and a sum over images of the kernel at distances jP. One of the two
converges within a few terms. The mean over the scale is a one-dimensional quadrature. It is exact
to rounding even where the sum of the images of the mixture converges slowly or not at all.
"""

import math
from functools import singledispatch

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.kernels.spectra import ScaleMixture, Spectrum

# Each theta function has two series: over waves, whose terms at τ = 0 are c e^{−πc²k²}, and over
# images, whose terms are e^{−πj²/c²}. For c > 1 the first converges quickly, else the second, so
# five terms on either side suffice for rounding. `_excess` and `_derivatives` compute both and
# select by c for each scale and axis, since a mixture has scales of either kind.
#
# Sums over k ≠ 0 are computed as Πc_i (Π(1 + ε_i) − 1) with ε = θ/c − 1: the term k = 0 may be so
# large, for small scales, that subtracting it from the whole sum would leave rounding only.


_TERMS = 5  # of a theta function, on either side of zero


@singledispatch
def weight_at_zero(spectrum: Spectrum, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """The weight of ω = 0 on a lattice, by default S(0) ∏h.

    With it, the sum over all lattice points is the periodised kernel Σ_j k(τ + jP).
    """
    density = spectrum.log_density(spacing.new_zeros(1, len(spacing))).exp()
    return spacing.prod() * density.squeeze(-1)


@weight_at_zero.register
def _(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """k(0) less the weights of all other lattice points.

        1 − Σ_{k≠0} S(ω_k) ∏h = S(0) ∏h − Σ_{j≠0} k(jP) = E_s[1 − Πθ_i(0) + Πc_i] .

    If correlations end within a period, this equals S(0) ∏h up to aliasing. If they fall like a
    power of the lag, S(0) and the sum of the images both diverge as α falls to d/2, but their
    difference does not. The kernel of the grid is exact at lag zero. At another lag τ its error is
    Σ_{j≠0} [k(τ + jP) − k(jP)], which converges for every α.
    """
    return (1 - nonzero_sum(spectrum, spacing)).clamp_min(0)


def lattice_weights(
    spectrum: Spectrum, omega: Float[Tensor, "D d"], spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b D"]:
    """The quadrature weights S(ω) ∏h, and another at ω = 0, where S may be infinite."""
    nonzero = omega.any(-1)
    if nonzero.all():
        return spacing.prod() * spectrum.log_density(omega).exp()
    finite = torch.where(nonzero.unsqueeze(-1), omega, spacing)  # any other frequency for ω = 0
    weights = spacing.prod() * spectrum.log_density(finite).exp()
    return torch.where(nonzero, weights, weight_at_zero(spectrum, spacing).unsqueeze(-1))


def nonzero_sum(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """Σ_{k≠0} S(ω_k) ∏h over the whole lattice: E_s[Πθ_i(0) − Πc_i]."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.nonzero_terms(torch.zeros_like(spacing)))


def second_moments(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b d d"]:
    """Σ_k S(ω_k) ω_k ω_kᵀ ∏h over the whole lattice."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.curvature(torch.zeros_like(spacing)))


@singledispatch
def moments_near_zero(
    spectrum: Spectrum, spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b d"] | None:
    """The second moments E ω_i² that a lattice lacks, as frequencies near zero have no weight.

    They are the mean of ω_i² less its sum over all lattice points. None, the default, where
    correlations end within a period, so that nothing is lacking.
    """
    return None


@moments_near_zero.register
def _(spectrum: ScaleMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b d"]:
    """Σ_{j≠0} ∂_i² k(jP), or zero where that is negative."""
    whole = spectrum.second_moments(len(spacing)).to(spacing)
    on_lattice = second_moments(spectrum, spacing).diagonal(dim1=-1, dim2=-2)
    return (whole - on_lattice).clamp_min(0)


def aliased(
    spectrum: ScaleMixture, spacing: Float[Tensor, "d"], lag: Float[Tensor, "d"]
) -> Float[Tensor, "*b"]:
    """The error of the kernel of a lattice at lag τ: Σ_{j≠0} [k(τ + jP) − k(jP)]."""
    scales = _Scales(spectrum, spacing)
    change = scales.nonzero_terms(lag) - scales.nonzero_terms(torch.zeros_like(spacing))
    return scales.mean(change - torch.expm1(-scales.exponent(lag)))


def aliased_curvature(
    spectrum: ScaleMixture, spacing: Float[Tensor, "d"], lag: Float[Tensor, "d"]
) -> Float[Tensor, "*b d d"]:
    """The error of minus the Hessian of the kernel of a lattice, at lag τ."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.curvature(lag) - scales.gaussian_curvature(lag))


def first_nonzero(points: Int[np.ndarray, "D d"]) -> Int[np.ndarray, "D"]:
    """The sign of the first coordinate that is not zero."""
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
        # Below this scale, the Gaussian is inside the cell around ω = 0.
        s, self.weights = spectrum.scales(1e-12 * self.width.detach().min().item() ** 2)
        self.s = s.unsqueeze(-1)  # (*b, n, 1)
        self.c = self.width / (2 * math.pi * self.s).sqrt()  # (*b, n, d)

    def mean(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The mean of values (*b, n) or (*b, n, d, d) over the scales."""
        extra = values.dim() - self.weights.dim()
        weights = self.weights.reshape(*self.weights.shape, *[1] * extra)
        return (weights * values).sum(-1 - extra)

    def exponent(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n"]:
        """½ s ‖τ/ℓ‖²."""
        return 0.5 * (self.s * (lag / self.lengthscale).square()).sum(-1)

    def nonzero_terms(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n"]:
        """The sum over k ≠ 0 at lag τ, Πθ_i(τ_i) − Πc_i.

        As Πc_i (Π(1 + ε_i) − 1) it is computed without cancellation for large c_i.
        """
        excess = 0.0
        for epsilon in self._excess(lag).unbind(-1):
            excess = excess + epsilon + excess * epsilon
        return self.c.prod(-1) * excess

    def curvature(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d d"]:
        """−∂_i ∂_j Πθ at lag τ."""
        return _negative_hessian(*self._derivatives(lag))

    def gaussian_curvature(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d d"]:
        """−∂_i ∂_j of the Gaussian exp(−½ s ‖τ/ℓ‖²), without images."""
        rate = self.s / self.lengthscale.square()
        theta = (-0.5 * rate * lag.square()).exp()
        slope, bend = rate * lag * theta, rate * (1 - rate * lag.square()) * theta
        return _negative_hessian(theta, slope, bend)

    def _excess(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d"]:
        """ε = θ/c − 1."""
        waves, fall = self._waves()
        by_waves = 2 * (fall * (waves * lag).cos())[1:].sum(0)
        _, images = self._images(lag)
        return torch.where(self.c > 1, by_waves, images.sum(0) / self.c - 1)

    def _derivatives(self, lag: Float[Tensor, "d"]) -> tuple[Tensor, Tensor, Tensor]:
        """θ, −θ′ and −θ″, (*b, n, d) each."""
        waves, fall = self._waves()
        phase, weights = waves * lag, 2 * self.c * fall  # of k and −k
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
        """kh and e^{−(khℓ)²/2s}, k = 0, 1, …, along the first axis."""
        k = self._leading(torch.arange(_TERMS + 1).to(self.spacing))
        return k * self.spacing, (-0.5 * (k * self.width).square() / self.s).exp()

    def _images(self, lag: Float[Tensor, "d"]) -> tuple[Tensor, Float[Tensor, "k *b n d"]]:
        """τ + jP and e^{−s((τ + jP)/ℓ)²/2}, j = …, 0, 1, …, along the first axis."""
        j = self._leading(torch.arange(-_TERMS, _TERMS + 1).to(self.spacing))
        shifts = lag + j * (2 * math.pi / self.spacing)
        return shifts, (-0.5 * self.s * (shifts / self.lengthscale).square()).exp()

    def _leading(self, terms: Float[Tensor, "k"]) -> Float[Tensor, "k *ones"]:
        """The terms along a first axis, before those of c."""
        return terms.reshape(-1, *[1] * self.c.dim())


def _negative_hessian(
    theta: Float[Tensor, "*b n d"], slope: Float[Tensor, "*b n d"], bend: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n d d"]:
    """−∂_i ∂_j Πθ_i(τ_i) from θ, −θ′ (`slope`) and −θ″ (`bend`) along every axis."""
    d, rows = theta.shape[-1], []
    for i in range(d):
        row = []
        for j in range(d):
            factors = [theta[..., axis] for axis in range(d) if axis not in (i, j)]
            factors += [bend[..., i]] if i == j else [-slope[..., i], slope[..., j]]
            row.append(math.prod(factors))
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)
