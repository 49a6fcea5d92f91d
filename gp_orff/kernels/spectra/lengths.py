"""Over which lengths scalar kernels vary: how fine they must be seen to be integrated."""

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

_ALIKE = 6.0  # cos(6τ/ℓ) is no harder to see than exp(−½τ²/ℓ²), whose frequencies end about there


@singledispatch
def shortest_lengths(kernel: Kernel) -> Float[Tensor, "*b k"]:
    """Lengthscales of squared exponentials that vary as fast, for each input or for all of them.

    Of a kernel that is not named here, its lengthscale. Register your own where it has none, or
    varies faster:

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
    """With α also those of (1 + τ²/2αℓ²)^{−α} next to zero, of singularities at ±i ℓ√(2α)."""
    return kernel.lengthscale * (2 * kernel.alpha.unsqueeze(-1)).sqrt().clamp_max(1.0)


@shortest_lengths.register
def _(kernel: PeriodicKernel) -> Tensor:
    """exp(−2 sin²(πτ/p)/λ) is exp(−½(2πτ/p)²/λ) next to zero, and again after every period."""
    rate = 2 * math.pi / kernel.period_length
    return 1 / (rate * (kernel.lengthscale.rsqrt() + 1 / _ALIKE))


@shortest_lengths.register
def _(kernel: CosineKernel) -> Tensor:
    """cos(πτ/p)."""
    return _ALIKE * kernel.period_length / math.pi


@shortest_lengths.register
def _(kernel: SpectralMixtureKernel) -> Tensor:
    """Means and spreads are of frequencies τ⁻¹, one mixture for each input."""
    rate = 2 * math.pi * (kernel.mixture_scales + kernel.mixture_means.abs() / _ALIKE)
    return 1 / rate.amax(dim=-3)


@shortest_lengths.register
def _(kernel: SpectralDeltaKernel) -> Tensor:
    """Sums of cos(2π⟨Z, τ/ℓ⟩)."""
    return _ALIKE * kernel.lengthscale / (2 * math.pi * kernel.Z.abs().amax(-2, keepdim=True))
