"""The shortest lengths over which scalar kernels vary: they set the nodes of quadrature."""

import math
from functools import singledispatch

from gpytorch.kernels import (
    CosineKernel,
    Kernel,
    PeriodicKernel,
    RQKernel,
    SpectralDeltaKernel,
    SpectralMixtureKernel,
)
from jaxtyping import Float
from torch import Tensor

_RBF_CUTOFF = 6.0  # cos(6τ/ℓ) is no harder to integrate than exp(−½τ²/ℓ²): its spectrum ends there


@singledispatch
def shortest_lengths(kernel: Kernel) -> Float[Tensor, "*b k"]:
    """Lengthscales of RBF kernels that vary as fast as `kernel`, one per input or one for all.

    For a kernel whose class is not registered it is the lengthscale, (*b, 1, k). Register a kernel
    of your own that has no lengthscale, or varies faster than an RBF kernel with its lengthscale.

    Args:
        kernel: a stationary scalar kernel.

    Raises:
        NotImplementedError: a kernel that is not registered and has no lengthscale.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> class Beats(gpytorch.kernels.Kernel):  # cos(100 τ), say
        ...     is_stationary = True
        >>> @gp_orff.lengths.shortest_lengths.register
        ... def _(kernel: Beats):
        ...     return torch.tensor([6 / 100])
        >>> gp_orff.lengths.shortest_lengths(Beats())
        tensor([0.0600])
    """
    if not kernel.has_lengthscale:
        raise NotImplementedError(
            f"no length is known over which {type(kernel).__name__} varies; register one with "
            "@gp_orff.lengths.shortest_lengths.register"
        )
    return kernel.lengthscale


@shortest_lengths.register
def _(kernel: RQKernel) -> Tensor:
    """The shorter of ℓ and ℓ√(2α): (1 + τ²/2αℓ²)^{−α} has singularities at τ = ±iℓ√(2α)."""
    return kernel.lengthscale * (2 * kernel.alpha.unsqueeze(-1)).sqrt().clamp_max(1.0)


@shortest_lengths.register
def _(kernel: PeriodicKernel) -> Tensor:
    """exp(−2 sin²(πτ/p)/λ) ≈ exp(−½(2πτ/p)²/λ) near τ = 0, and with period p."""
    rate = 2 * math.pi / kernel.period_length
    return 1 / (rate * (kernel.lengthscale.rsqrt() + 1 / _RBF_CUTOFF))


@shortest_lengths.register
def _(kernel: CosineKernel) -> Tensor:
    """The kernel is cos(πτ/p)."""
    return _RBF_CUTOFF * kernel.period_length / math.pi


@shortest_lengths.register
def _(kernel: SpectralMixtureKernel) -> Tensor:
    """Means and standard deviations are in cycles per unit; each input has a mixture of its own."""
    rate = 2 * math.pi * (kernel.mixture_scales + kernel.mixture_means.abs() / _RBF_CUTOFF)
    return 1 / rate.amax(dim=-3)


@shortest_lengths.register
def _(kernel: SpectralDeltaKernel) -> Tensor:
    """The kernel is a sum of cos(2π⟨Z, τ/ℓ⟩)."""
    return _RBF_CUTOFF * kernel.lengthscale / (2 * math.pi * kernel.Z.abs().amax(-2, keepdim=True))
