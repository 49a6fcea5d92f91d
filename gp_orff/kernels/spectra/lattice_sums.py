"""Sums over all points of a lattice, for laws that are scale mixtures of Gaussians.

Given its scale s, a law is the Gaussian N(0, s diag ℓ⁻²). Its sum over a lattice of spacing h is a
product over the axes of theta functions,

    θ(τ) = Σ_k c e^{−(khℓ)²/2s} cos(khτ) = Σ_j e^{−s((τ + jP)/ℓ)²/2},   c = hℓ/√(2πs),  P = 2π/h,

one of which converges within a few terms. What remains is the mean over one scale, by quadrature:
sums of images that fall like a power of their distance, or do not converge at all, are known to
rounding.
"""

import math
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.spectra.base import Spectrum
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture

_TERMS = 5  # of a theta function, to either side
_LEAST = 1e-12  # of (hℓ)²: a scale below which a Gaussian is in its central cell


@singledispatch
def weight_at_zero(spectrum: Spectrum, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """The weight of ω = 0 on a lattice: S(0) ∏h, with which the sum over all points is the
    periodised kernel Σ_j k(τ + jP)."""
    density = spectrum.log_density(spacing.new_zeros(1, len(spacing))).exp()
    return spacing.prod() * density.squeeze(-1)


@weight_at_zero.register
def _(spectrum: GammaMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """k(0) less the weights of all other points,

        1 − Σ_{k≠0} S(ω_k) ∏h = S(0) ∏h − Σ_{j≠0} k(jP) = E_s[1 − Πθ_i(0) + Πc_i] .

    Where correlations end within a period that is S(0) ∏h within their aliasing. Where they fall
    like a power of the lag, S(0) and the sum of images both diverge as α falls to d/2 and their
    difference does not: the grid's kernel is right at lag zero, and at others it is off by
    Σ_{j≠0} [k(τ + jP) − k(jP)], which converges for every α.
    """
    return (1 - nonzero_sum(spectrum, spacing)).clamp_min(0)


def nonzero_sum(spectrum: GammaMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """Σ_{k≠0} S(ω_k) ∏h over the whole lattice: E_s[Πθ_i(0) − Πc_i]."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.varying(torch.zeros_like(spacing)))


def second_moments(spectrum: GammaMixture, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b d d"]:
    """Σ_k S(ω_k) ω_k ω_kᵀ ∏h over the whole lattice."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.curvature(torch.zeros_like(spacing)))


def aliased(
    spectrum: GammaMixture, spacing: Float[Tensor, "d"], lag: Float[Tensor, "d"]
) -> Float[Tensor, "*b"]:
    """What a lattice adds to k(τ): Σ_{j≠0} [k(τ + jP) − k(jP)]."""
    scales = _Scales(spectrum, spacing)
    origin = torch.zeros_like(spacing)
    return scales.mean(
        scales.varying(lag) - scales.varying(origin) - torch.expm1(-scales.exponent(lag))
    )


def aliased_curvature(
    spectrum: GammaMixture, spacing: Float[Tensor, "d"], lag: Float[Tensor, "d"]
) -> Float[Tensor, "*b d d"]:
    """What a lattice adds to minus the Hessian of k at τ."""
    scales = _Scales(spectrum, spacing)
    return scales.mean(scales.curvature(lag) - scales.own_curvature(lag))


class _Scales:
    """Functions of a lag for each scale s of a law; theta functions over the axes."""

    def __init__(self, spectrum: GammaMixture, spacing: Float[Tensor, "d"]):
        self.spacing = spacing
        self.lengthscale = spectrum.lengthscale.to(spacing)
        self.width = self.lengthscale * spacing
        s, self.weights = spectrum.scales(_LEAST * self.width.detach().min().item() ** 2)
        self.s = s.unsqueeze(-1)  # (*b, n, 1)
        self.at_zero = self.width / (2 * math.pi * self.s).sqrt()  # c, (*b, n, d)

    def mean(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Of (*b, n) or (*b, n, d, d) over the scales."""
        extra = values.dim() - self.weights.dim()
        weights = self.weights.reshape(*self.weights.shape, *[1] * extra)
        return (weights * values).sum(-1 - extra)

    def exponent(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n"]:
        return 0.5 * (self.s * (lag / self.lengthscale).square()).sum(-1)

    def varying(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n"]:
        """Πθ_i(τ_i) − Πc_i = Πc_i (Π(1 + ε_i) − 1), without the cancellation of large c_i."""
        excess = 0.0
        for own in self._excess(lag).unbind(-1):
            excess = excess + own + excess * own
        return self.at_zero.prod(-1) * excess

    def curvature(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d d"]:
        """−∂_i ∂_j Πθ."""
        theta, slope, bend = self._derivatives(lag)
        return _outer(theta, slope, bend)

    def own_curvature(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d d"]:
        """The same of the Gaussian itself, without images."""
        rate = self.s / self.lengthscale.square()
        theta = (-0.5 * rate * lag.square()).exp()
        return _outer(theta, rate * lag * theta, rate * (1 - rate * lag.square()) * theta)

    def _excess(self, lag: Float[Tensor, "d"]) -> Float[Tensor, "*b n d"]:
        """ε = θ/c − 1."""
        waves, fall = self._waves()
        dual = 2 * (fall * (waves * lag).cos())[1:].sum(0)
        _, images = self._images(lag)
        return torch.where(self.at_zero > 1, dual, images.sum(0) / self.at_zero - 1)

    def _derivatives(self, lag: Float[Tensor, "d"]) -> tuple[Tensor, Tensor, Tensor]:
        """θ, −θ′ and −θ″, (*b, n, d) each."""
        waves, fall = self._waves()
        phase, both = waves * lag, 2 * self.at_zero * fall
        both = torch.cat([0.5 * both[:1], both[1:]])
        dual = (both * phase.cos(), both * waves * phase.sin(), both * waves.square() * phase.cos())
        shifts, images = self._images(lag)
        rate = self.s / self.lengthscale.square()
        direct = images, rate * shifts * images, rate * (1 - rate * shifts.square()) * images
        few = self.at_zero > 1
        return tuple(
            torch.where(few, wave.sum(0), image.sum(0))
            for wave, image in zip(dual, direct, strict=True)
        )

    def _waves(self) -> tuple[Float[Tensor, "k *b 1 d"], Float[Tensor, "k *b n d"]]:
        """kh and e^{−(khℓ)²/2s}, k ≥ 0."""
        k = self._along(torch.arange(_TERMS + 1).to(self.spacing))
        return k * self.spacing, (-0.5 * (k * self.width).square() / self.s).exp()

    def _images(self, lag: Float[Tensor, "d"]) -> tuple[Tensor, Float[Tensor, "k *b n d"]]:
        """τ + jP and e^{−s((τ + jP)/ℓ)²/2}."""
        j = self._along(torch.arange(-_TERMS, _TERMS + 1).to(self.spacing))
        shifts = lag + j * (2 * math.pi / self.spacing)
        return shifts, (-0.5 * self.s * (shifts / self.lengthscale).square()).exp()

    def _along(self, terms: Float[Tensor, "k"]) -> Float[Tensor, "k *ones"]:
        return terms.reshape(-1, *[1] * self.at_zero.dim())


def _outer(
    theta: Float[Tensor, "*b n d"], slope: Float[Tensor, "*b n d"], bend: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n d d"]:
    """−∂_i ∂_j of a product of functions of one coordinate each."""
    d, rows = theta.shape[-1], []
    for i in range(d):
        row = []
        for j in range(d):
            parts = [theta[..., axis] for axis in range(d) if axis not in (i, j)]
            parts += [bend[..., i]] if i == j else [-slope[..., i], slope[..., j]]
            row.append(math.prod(parts))
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)
