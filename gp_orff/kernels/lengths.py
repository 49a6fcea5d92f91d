"""The shortest lengths over which scalar kernels vary, which set the nodes of quadrature."""

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

_RBF_CUTOFF = 6.0  # the spectrum of exp(−½τ²/ℓ²) ends at about ω = 6/ℓ, the frequency of cos(6τ/ℓ)


@singledispatch
def shortest_lengths(kernel: Kernel) -> Float[Tensor, "*b k"]:
    """Return the lengthscales of an RBF kernel that varies as fast as `kernel`.

    The result has one lengthscale per input, or one for all inputs, in units of the inputs. If the
    class of `kernel` is not registered, the result is its lengthscale, (*b, 1, k). Register your
    own class of kernels if it has no lengthscale, or if it varies faster than an RBF kernel with
    the same lengthscale.

    Args:
        kernel: a stationary scalar kernel.

    Raises:
        NotImplementedError: the class of `kernel` is not registered and has no lengthscale.

    Example:
        A kernel cos(100 τ) varies as fast as an RBF kernel with lengthscale 6/100:

        >>> import gpytorch, gp_orff, torch
        >>> class Beats(gpytorch.kernels.Kernel):
        ...     is_stationary = True
        >>> @gp_orff.lengths.shortest_lengths.register
        ... def _(kernel: Beats):
        ...     return torch.tensor([6 / 100])
        >>> gp_orff.lengths.shortest_lengths(Beats())
        tensor([0.0600])
    """
    if not kernel.has_lengthscale:
        raise NotImplementedError(
            "expected a kernel with a lengthscale or a registered length, got "
            f"{type(kernel).__name__}; register the length over which it varies with "
            "@gp_orff.lengths.shortest_lengths.register"
        )
    return kernel.lengthscale


@shortest_lengths.register
def _(kernel: RQKernel) -> Tensor:
    """Return the shorter of ℓ and ℓ√(2α).

    The kernel (1 + τ²/2αℓ²)^{−α} has singularities at τ = ±iℓ√(2α).
    """
    return kernel.lengthscale * (2 * kernel.alpha.unsqueeze(-1)).sqrt().clamp_max(1.0)


@shortest_lengths.register
def _(kernel: PeriodicKernel) -> Tensor:
    """Use exp(−2 sin²(πτ/p)/λ) ≈ exp(−½(2πτ/p)²/λ) near τ = 0, and the period p."""
    rate = 2 * math.pi / kernel.period_length
    return 1 / (rate * (kernel.lengthscale.rsqrt() + 1 / _RBF_CUTOFF))


@shortest_lengths.register
def _(kernel: CosineKernel) -> Tensor:
    """Use the frequency π/p of the kernel cos(πτ/p)."""
    return _RBF_CUTOFF * kernel.period_length / math.pi


@shortest_lengths.register
def _(kernel: SpectralMixtureKernel) -> Tensor:
    """Use the largest frequency of each input. Means and scales are in cycles per unit of input."""
    rate = 2 * math.pi * (kernel.mixture_scales + kernel.mixture_means.abs() / _RBF_CUTOFF)
    return 1 / rate.amax(dim=-3)


@shortest_lengths.register
def _(kernel: SpectralDeltaKernel) -> Tensor:
    """Use the largest frequency of the sum of cos(2π⟨Z, τ/ℓ⟩)."""
    return _RBF_CUTOFF * kernel.lengthscale / (2 * math.pi * kernel.Z.abs().amax(-2, keepdim=True))
