"""Scalar kernels and their derivatives in closed form; the covariance of a term at zero."""

import math
from collections.abc import Callable, Sequence
from functools import cache, singledispatch
from itertools import combinations_with_replacement

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.kernels.factors import Factor
from gp_orff.kernels.scalar import require_covariance_of
from gp_orff.kernels.spectra.base import spectrum
from gp_orff.kernels.tree import Term, leaf_dims


@singledispatch
def radial_derivatives(
    kernel: Kernel, s: Float[Tensor, "*m"]
) -> tuple[Float[Tensor, "*m"], Float[Tensor, "*m"]]:
    """κ′(s) and κ″(s) of a stationary kernel k(x, z) = κ(s), s = ‖(x − z)/ℓ‖².

    κ″ may diverge as s → 0 more slowly than 1/s; return anything finite at s = 0.

    Raises:
        NotImplementedError: for a kernel that is not registered.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> gp_orff.radial_derivatives(gpytorch.kernels.RBFKernel(), torch.zeros(1))
        (tensor([-0.5000]), tensor([0.2500]))

        A kernel of your own, with a `lengthscale`, here k = (1 + s)⁻¹:

        >>> class Cauchy(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.radial_derivatives.register
        ... def _(kernel: Cauchy, s):
        ...     return -(1 + s).pow(-2), 2 * (1 + s).pow(-3)
        >>> gp_orff.CurlFreeKernel(Cauchy(), num_dims=2)(torch.zeros(4, 2)).shape
        torch.Size([8, 8])
    """
    known = ", ".join(
        sorted(cls.__name__ for cls in radial_derivatives.registry if cls is not object)
    )
    raise NotImplementedError(
        f"no radial derivatives are known for {type(kernel).__name__}; known are {known}. "
        "Register yours with @gp_orff.radial_derivatives.register(YourKernel)."
    )


@radial_derivatives.register
def _(kernel: RBFKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    require_covariance_of(RBFKernel, kernel)
    k = torch.exp(-0.5 * s)  # κ(s)
    return -0.5 * k, 0.25 * k


@radial_derivatives.register
def _(kernel: MaternKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    require_covariance_of(MaternKernel, kernel)
    r = s.clamp_min(torch.finfo(s.dtype).tiny).sqrt()
    decay = torch.exp(-math.sqrt(2 * kernel.nu) * r)
    if kernel.nu == 1.5:  # κ = (1 + √3 r) exp(−√3 r)
        return -1.5 * decay, 0.75 * math.sqrt(3) * decay / r
    if kernel.nu == 2.5:  # κ = (1 + √5 r + 5/3 r²) exp(−√5 r)
        return -5 / 6 * (1 + math.sqrt(5) * r) * decay, 25 / 12 * decay
    raise NotImplementedError(
        f"no radial derivatives are known for MaternKernel with nu={kernel.nu}; use nu=1.5 or 2.5"
    )


@radial_derivatives.register
def _(kernel: RQKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    require_covariance_of(RQKernel, kernel)
    alpha = kernel.alpha.unsqueeze(-1)
    base = 1 + s / (2 * alpha)  # κ = base^{−α}
    return -0.5 * base.pow(-alpha - 1), (alpha + 1) / (4 * alpha) * base.pow(-alpha - 2)


def derivatives(kernel: Kernel, tau: Float[Tensor, "*b n m k"], order: int) -> Float[Tensor, "..."]:
    """All partial derivatives of one order (0 to 4) of k at displacements τ of its own inputs, an
    axis for each.

    With s = τᵀΛτ and u = Λτ: ∂_i = 2κ′u_i, ∂_ij = 2κ′Λ_ij + 4κ″u_iu_j, and so on: every pair of
    indices is in one Λ or in two u, with 2^{order − pairs} κ^{(order − pairs)} in front.

    Raises:
        NotImplementedError: a kernel without radial derivatives.
    """
    if not order:
        return at_lags(kernel, tau)
    if not kernel.has_lengthscale:
        radial_derivatives.dispatch(object)(kernel, None)  # raises, naming what is known
    lengthscale = kernel.lengthscale.unsqueeze(-2).to(tau)
    lengthscale = lengthscale.expand(*lengthscale.shape[:-1], tau.shape[-1])
    scaled = tau / lengthscale
    u, metric = scaled / lengthscale, torch.diag_embed(lengthscale.pow(-2))
    slopes = [
        2**j * own[(..., *[None] * order)]
        for j, own in enumerate(_radial(kernel, scaled.square().sum(-1), order), 1)
    ]
    found = [
        math.prod(
            [*(metric[at] for at in pairs), *(u[at] for at in alone)],
            start=slopes[order - len(pairs) - 1],
        )
        for pairs, alone in _products(order)
    ]
    return sum(found[1:], found[0])


def at_lags(kernel: Kernel, tau: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """k(τ) of its own inputs, from the kernel itself."""
    lags = tau.flatten(0, -2)
    return kernel.forward(lags, torch.zeros_like(lags), diag=True).reshape(tau.shape[:-1])


@cache
def _products(order: int) -> list[tuple[list[tuple], list[tuple]]]:
    """Every Λ and every u of each product, by the axes of the result that are its own."""

    def along(*axes: int) -> tuple:
        return (..., *(slice(None) if i in axes else None for i in range(order)))

    return [
        ([along(*pair) for pair in pairs], [along(i) for i in alone])
        for pairs, alone in _pairings(tuple(range(order)))
    ]


def _pairings(indices: tuple[int, ...]) -> list[tuple[tuple, tuple]]:
    """All ways to take pairs out of the indices: the pairs, and those that stay alone."""
    if not indices:
        return [((), ())]
    first, rest = indices[0], indices[1:]
    found = [(pairs, (first, *alone)) for pairs, alone in _pairings(rest)]
    for i, other in enumerate(rest):
        fewer = _pairings(rest[:i] + rest[i + 1 :])
        found += [(((first, other), *pairs), alone) for pairs, alone in fewer]
    return found


def _radial(kernel: Kernel, s: Float[Tensor, "*m"], order: int) -> Sequence[Float[Tensor, "*m"]]:
    """κ′, κ″, …, κ^{(order)} at s; the two that are known, for less."""
    if order <= 2:
        return radial_derivatives(kernel, s)
    followed = s.requires_grad
    with torch.enable_grad():
        s = s.clamp_min(1e-24) if followed else s.clamp_min(1e-24).requires_grad_()
        found = list(radial_derivatives(kernel, s))
        while len(found) < order:
            found.append(torch.autograd.grad(found[-1].sum(), s, create_graph=True)[0])
    return found if followed else [own.detach() for own in found]


def polynomial(
    function: Callable[[Float[Tensor, "m k"]], Complex[Tensor, "m q p"]], dims: int, degree: int
) -> dict[tuple[int, ...], Complex[Tensor, "q p"]]:
    """The coefficients of a homogeneous polynomial, by its monomials ω_i ω_j …

    Raises:
        NotImplementedError: a function that is none.
    """
    monomials = list(combinations_with_replacement(range(dims), degree))
    generator = torch.Generator().manual_seed(0)
    omega = torch.randn(4 * len(monomials) + 8, dims, generator=generator, dtype=torch.float64)
    values = function(omega).to(torch.complex128)
    columns = [omega[:, list(own)].prod(-1) for own in monomials]
    design = torch.stack(columns, dim=-1).to(torch.complex128)
    found = torch.linalg.lstsq(design, values.flatten(1)).solution
    if (design @ found - values.flatten(1)).abs().max() > 1e-9 * (1 + values.abs().max()):
        raise NotImplementedError("no polynomial in ω")
    return dict(zip(monomials, found.unflatten(-1, values.shape[1:]), strict=True))


def at_zero(term: Term) -> Float[Tensor, "*b p p"]:
    """K(0) of one term."""
    scale, factor = term.outputscale[..., None, None], term.factor
    if not factor.degree:
        return scale * factor.matrix @ factor.matrix.mT
    dims, density = leaf_dims(term, term.leaves[0], None), spectrum(term.leaves[0].kernel)
    return scale * field_block(factor, torch.diag_embed(density.second_moments(dims)))


def field_block(factor: Factor, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b p p"]:
    """B B* for the mean of ω ωᵀ, or minus a Hessian."""
    return factor.assemble(factor.embedded_outer(outer))
