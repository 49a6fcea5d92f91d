"""Derivatives of scalar kernels in closed form; the covariance of a term at lag zero."""

import math
from collections.abc import Callable, Sequence
from functools import cache, singledispatch
from itertools import combinations_with_replacement

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.kernels.base import positive_root, require_covariance_of
from gp_orff.kernels.spectra import RadialKernel, registered
from gp_orff.kernels.tree import Term


@singledispatch
def radial_derivatives(
    kernel: Kernel, s: Float[Tensor, "*m"]
) -> tuple[Float[Tensor, "*m"], Float[Tensor, "*m"]]:
    """κ′(s) and κ″(s) of a stationary kernel k(x, z) = κ(s), with s = ‖(x − z)/ℓ‖².

    Derivatives are with respect to s. The exact curl-free and divergence-free kernels use them.
    `RBFKernel`, `MaternKernel` with ν = 3/2 or 5/2, `GeneralMaternKernel`, `RQKernel` and
    `BesselKernel` are registered. To use another kernel, register a function with the same
    arguments. κ″ may grow without bound as s → 0, but more slowly than 1/s. The function must
    return some finite number at s = 0.

    Args:
        kernel: the scalar kernel, whose class selects the function. It has no outputscale.
        s: (*m), the squared distances in units of the lengthscale.

    Returns:
        κ′ and κ″ at s, (*m) each.

    Raises:
        NotImplementedError: the class of the kernel is not registered.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> rbf = gpytorch.kernels.RBFKernel()  # κ(s) = exp(−s/2)
        >>> gp_orff.radial_derivatives(rbf, torch.zeros(1))
        (tensor([-0.5000]), tensor([0.2500]))

        A kernel of your own with a `lengthscale`, here κ(s) = (1 + s)⁻¹:

        >>> class Cauchy(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.radial_derivatives.register
        ... def _(kernel: Cauchy, s):
        ...     return -(1 + s).pow(-2), 2 * (1 + s).pow(-3)
        >>> gp_orff.CurlFreeKernel(Cauchy(), num_dims=2)(torch.rand(4, 2)).shape
        torch.Size([8, 8])
    """
    raise NotImplementedError(
        f"no radial derivatives are known for {type(kernel).__name__}; known are "
        f"{registered(radial_derivatives)}. "
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
    r = positive_root(s)
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
    power = torch.exp((-alpha - 1) * base.log())  # has a cheaper derivative than `pow`
    return -0.5 * power, (alpha + 1) / (4 * alpha) * (power / base)


@radial_derivatives.register
def _(kernel: RadialKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    return kernel.correlation(s, 1), kernel.correlation(s, 2)


def derivatives(kernel: Kernel, tau: Float[Tensor, "*b n m k"], order: int) -> Float[Tensor, "..."]:
    """All partial derivatives of one order (0 to 4) of k(τ), with one axis for each derivative.

    τ are lags of the inputs of the kernel. With s = τᵀΛτ and u = Λτ, ∂_i k = 2κ′u_i and
    ∂_ij k = 2κ′Λ_ij + 4κ″u_iu_j. In general, sum over all ways to pair some of the indices: a pair
    gives one Λ, an index without partner one u, and each product has the coefficient
    2^{order − pairs} κ^{(order − pairs)}.

    Raises:
        NotImplementedError: a kernel without radial derivatives.
    """
    if not order:
        return scalar_covariance(kernel, tau)
    if not kernel.has_lengthscale:
        radial_derivatives.dispatch(object)(kernel, None)  # raises, and lists registered kernels
    lengthscale = kernel.lengthscale.unsqueeze(-2).to(tau)
    lengthscale = lengthscale.expand(*lengthscale.shape[:-1], tau.shape[-1])
    scaled = tau / lengthscale
    u, metric = scaled / lengthscale, torch.diag_embed(lengthscale.pow(-2))
    return radial_tensor(_radial(kernel, scaled.square().sum(-1), order), u, metric, order)


def radial_tensor(
    kappas: Sequence[Float[Tensor, "*b"]],
    u: Float[Tensor, "*b k"],
    metric: Float[Tensor, "*b k k"],
    order: int,
) -> Float[Tensor, "..."]:
    """All partial derivatives of one order ≥ 1 of κ(τᵀΛτ), from κ′, κ″, …, u = Λτ and Λ."""
    coefficients = [2**j * kappa[(..., *[None] * order)] for j, kappa in enumerate(kappas, 1)]
    products = [
        math.prod(
            [*(metric[index] for index in pairs), *(u[index] for index in singles)],
            start=coefficients[order - len(pairs) - 1],
        )
        for pairs, singles in _products(order)
    ]
    return sum(products[1:], products[0])


def scalar_covariance(kernel: Kernel, tau: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """k(τ) at lags τ of the inputs of the kernel, by its `forward`."""
    lags = tau.flatten(0, -2)
    return kernel.forward(lags, torch.zeros_like(lags), diag=True).reshape(tau.shape[:-1])


@cache
def _products(order: int) -> list[tuple[list[tuple], list[tuple]]]:
    """For each product, the indices that put every Λ and every u on their axes of the result."""

    def on_axes(*axes: int) -> tuple:
        return (..., *(slice(None) if i in axes else None for i in range(order)))

    return [
        ([on_axes(*pair) for pair in pairs], [on_axes(i) for i in singles])
        for pairs, singles in _pairings(tuple(range(order)))
    ]


def _pairings(indices: tuple[int, ...]) -> list[tuple[tuple, tuple]]:
    """All ways to pair some of the indices: the pairs, and the indices without partner."""
    if not indices:
        return [((), ())]
    first, rest = indices[0], indices[1:]
    pairings = [(pairs, (first, *singles)) for pairs, singles in _pairings(rest)]
    for i, partner in enumerate(rest):
        others = _pairings(rest[:i] + rest[i + 1 :])
        pairings += [(((first, partner), *pairs), singles) for pairs, singles in others]
    return pairings


def _radial(kernel: Kernel, s: Float[Tensor, "*m"], order: int) -> Sequence[Float[Tensor, "*m"]]:
    """κ′, κ″, …, κ^{(order)} at s, at least two; from the third on by differentiation of κ″."""
    if order <= 2:
        return radial_derivatives(kernel, s)
    if isinstance(kernel, RadialKernel) and order <= kernel.highest_order:
        return [kernel.correlation(s, j) for j in range(1, order + 1)]
    differentiable = s.requires_grad
    with torch.enable_grad():
        # At s = 0 derivatives of κ″ may be infinite, where they are multiplied by powers of zero
        # lags.
        s = s.clamp_min(1e-24) if differentiable else s.clamp_min(1e-24).requires_grad_()
        kappas = list(radial_derivatives(kernel, s))
        while len(kappas) < order:
            kappas.append(torch.autograd.grad(kappas[-1].sum(), s, create_graph=True)[0])
    return kappas if differentiable else [kappa.detach() for kappa in kappas]


def polynomial(
    function: Callable[[Float[Tensor, "m k"]], Complex[Tensor, "m q p"]],
    dims: int,
    degree: int,
    device: torch.device | None = None,
) -> dict[tuple[int, ...], Complex[Tensor, "q p"]]:
    """The coefficients of a homogeneous polynomial in ω, for its monomials ω_i ω_j …

    They are found by least squares from values at random ω.

    Raises:
        NotImplementedError: a function that is no such polynomial.
    """
    monomials = list(combinations_with_replacement(range(dims), degree))
    generator = torch.Generator().manual_seed(0)
    # More values than coefficients: the residual shows whether the function is such a polynomial.
    omega = torch.randn(4 * len(monomials) + 8, dims, generator=generator, dtype=torch.float64)
    omega = omega.to(device)
    values = function(omega).to(torch.complex128)
    columns = [omega[:, list(monomial)].prod(-1) for monomial in monomials]
    design = torch.stack(columns, dim=-1).to(torch.complex128)
    coefficients = torch.linalg.lstsq(design, values.flatten(1)).solution
    if (design @ coefficients - values.flatten(1)).abs().max() > 1e-9 * (1 + values.abs().max()):
        raise NotImplementedError("no polynomial in ω")
    return dict(zip(monomials, coefficients.unflatten(-1, values.shape[1:]), strict=True))


def at_zero(term: Term) -> Float[Tensor, "*b p p"]:
    """K(0), the covariance of one term at lag zero."""
    scale, factor = term.outputscale[..., None, None], term.factor
    if factor.is_constant:
        return scale * factor.matrix @ factor.matrix.mT
    return scale * factor.variance(term.leaves[0].spectrum)
