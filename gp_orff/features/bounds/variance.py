"""The largest variance b = sup_δ ‖E cos²⟨ω, δ⟩ W² − K(δ)²‖₂ of one frequency of a term.

It is found by a search along one axis where the spectrum is isotropic and the kernel has a closed
form. Elsewhere b is bounded by ‖E W²‖₂.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.bounds.leaf_moments import Moments
from gp_orff.features.frequencies.rule import LeafSpectrum
from gp_orff.kernels.closed_form import derivatives, field_block, scalar_covariance
from gp_orff.kernels.factors import Factor
from gp_orff.kernels.tree import Leaf

_LAGS = 600  # lags of the search, from 1e-3 to 1e4 lengthscales
_REFINED = 200  # lags between the neighbours of the best one
_LARGEST_SIZE = 256  # derivatives at one lag: second ones up to d = 16, fourth ones up to d = 4


def scalar_variance(leaf: Leaf, spectrum: LeafSpectrum, moments: Moments) -> float:
    """sup_δ E v² cos²⟨ω, δ⟩ − k(δ)² of a scalar kernel, v the importance weights."""
    if spectrum.spectrum.isotropic_lengthscale is None or moments.largest != 1:
        return moments.mean_square

    def variance(lags: Float[Tensor, "n"], limit: bool) -> Float[Tensor, "n"]:
        at, double = (
            scalar_covariance(leaf.kernel, _along_axis(spectrum, r)) for r in (lags, 2 * lags)
        )
        return 0.5 * (1 + double) - (0 if limit else at.square())

    return _supremum(variance, moments.mean_square)


def field_variance(
    factor: Factor, leaf: Leaf, spectrum: LeafSpectrum, order: int, moments: Moments
) -> float:
    """b of a curl-free or divergence-free kernel without further leaves.

    Both have A² = ‖ω‖² A: E cos⟨ω, δ⟩ W² comes from the fourth derivatives of k (measure of order
    0), or is a multiple of K(δ) where the weights make ‖W‖ constant (order 1).
    """
    ceiling = square_bound(factor, moments)
    if math.isinf(moments.orlicz):  # no theorem needs it
        return ceiling
    lengthscale = spectrum.spectrum.isotropic_lengthscale
    if lengthscale is None or lengthscale.min() < lengthscale.max():
        return ceiling
    if order not in (0, factor.degree):
        return ceiling
    if spectrum.num_dims ** (2 if order else 4) > _LARGEST_SIZE:
        return ceiling

    def covariance(tau: Float[Tensor, "n k"]) -> Float[Tensor, "n p p"]:
        return field_block(factor, -derivatives(leaf.kernel, tau, 2))

    def square(tau: Float[Tensor, "n k"]) -> Float[Tensor, "n p p"]:
        """E cos⟨ω, τ⟩ W²."""
        if order:
            return moments.largest * covariance(tau)
        fourth = derivatives(leaf.kernel, tau, 4).diagonal(dim1=-1, dim2=-2).sum(-1)
        return field_block(factor, fourth)

    def variance(lags: Float[Tensor, "n"], limit: bool) -> Float[Tensor, "n"]:
        zero, at, double = (_along_axis(spectrum, r) for r in (0 * lags, lags, 2 * lags))
        matrices = 0.5 * (square(zero) + square(double))
        if not limit:
            matrices = matrices - covariance(at) @ covariance(at)
        return torch.linalg.eigvalsh(matrices)[..., -1].flatten()

    return _supremum(variance, ceiling)


def square_bound(factor: Factor, moments: Moments) -> float:
    """‖E W²‖₂ of a curl-free or divergence-free kernel."""
    if math.isinf(moments.mean_square):
        return math.inf
    outer = torch.tensor(moments.outer, dtype=torch.float64).diag()
    return float(torch.linalg.matrix_norm(field_block(factor, outer), 2))


def _along_axis(spectrum: LeafSpectrum, lags: Float[Tensor, "n"]) -> Float[Tensor, "n k"]:
    """Lags along the first axis, given in units of its lengthscale."""
    lengthscale = spectrum.spectrum.isotropic_lengthscale.flatten()[0]
    tau = lags.new_zeros(len(lags), spectrum.num_dims)
    tau[:, 0] = lags * lengthscale
    return tau


def _supremum(
    variance: Callable[[Float[Tensor, "n"], bool], Float[Tensor, "n"]], ceiling: float
) -> float:
    """The largest of `variance` over all lags; `ceiling` for a kernel without a closed form."""
    lags = torch.logspace(-3, 4, _LAGS, dtype=torch.float64)
    lags = torch.cat([lags.new_zeros(1), lags])
    try:
        values = variance(lags, False)
    except NotImplementedError:
        return ceiling
    best = int(values.argmax())
    low, high = lags[max(best - 1, 0)], lags[min(best + 1, _LAGS)]
    refined = variance(low + (high - low) * torch.linspace(0, 1, _REFINED).to(lags), False)
    beyond = variance(lags[-1:], True)  # of all longer lags, for a kernel that decreases
    return min(ceiling, float(torch.cat([values, refined, beyond]).max()))
