"""Derivatives of scalar kernels in closed form, and covariances of symbols of a field."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from itertools import combinations_with_replacement, product

import torch
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, RQKernel
from jaxtyping import Complex, Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.kernels.base import positive_root, require_covariance_of
from gp_orff.kernels.lengths import shortest_lengths
from gp_orff.kernels.spectra import RadialKernel, registered, spectrum
from gp_orff.kernels.tree import Leaf, Term, embedded, spectra_of, terms, varies_in_space
from gp_orff.symbols.base import Identity, Symbol, required
from gp_orff.symbols.patches import Patch, Rule


@singledispatch
def radial_derivatives(
    kernel: Kernel, s: Float[Tensor, "*m"]
) -> tuple[Float[Tensor, "*m"], Float[Tensor, "*m"]]:
    """Return κ′(s) and κ″(s) of a stationary kernel k(x, z) = κ(s), with s = ‖(x − z)/ℓ‖².

    The derivatives are with respect to s. Exact curl-free and divergence-free kernels need them.
    `RBFKernel`, `MaternKernel` with ν = 3/2 or 5/2, `GeneralMaternKernel`, `RQKernel`,
    `BesselKernel` and `LearnedSpectrumKernel` are registered.

    To use another kernel, register a function with the same arguments. κ″ may be infinite at s = 0
    if it grows more slowly than 1/s for s → 0. In this case, the function must return any finite
    number at s = 0.

    Args:
        kernel: the scalar kernel k with κ(0) = 1, whose class selects the registered function.
        s: (*m), squared distances divided by ℓ².

    Returns:
        κ′ and κ″ at s, (*m) each.

    Raises:
        NotImplementedError: the class of the kernel is not registered.

    Example:
        The RBF kernel has κ(s) = exp(−s/2):

        >>> import gpytorch, gp_orff, torch
        >>> rbf = gpytorch.kernels.RBFKernel()
        >>> gp_orff.radial_derivatives(rbf, torch.zeros(1))
        (tensor([-0.5000]), tensor([0.2500]))

        Register a new kernel with a `lengthscale`, here κ(s) = (1 + s)⁻¹:

        >>> class Cauchy(gpytorch.kernels.Kernel):
        ...     has_lengthscale = True
        >>> @gp_orff.radial_derivatives.register
        ... def _(kernel: Cauchy, s):
        ...     return -(1 + s).pow(-2), 2 * (1 + s).pow(-3)
        >>> gp_orff.CurlFreeKernel(Cauchy(), num_dims=2)(torch.rand(4, 2)).shape
        torch.Size([8, 8])
    """
    raise NotImplementedError(
        "expected a kernel with registered radial derivatives, which is one of "
        f"{registered(radial_derivatives)}, got {type(kernel).__name__}; use one of them, or "
        "register the derivatives with @gp_orff.radial_derivatives.register (see its docstring)"
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
        f"expected a MaternKernel with nu=1.5 or 2.5, got nu={kernel.nu}; use one of these values, "
        "or gp_orff.GeneralMaternKernel"
    )


@radial_derivatives.register
def _(kernel: RQKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    require_covariance_of(RQKernel, kernel)
    alpha = kernel.alpha.unsqueeze(-1)
    base = 1 + s / (2 * alpha)  # κ = base^{−α}
    power = torch.exp((-alpha - 1) * base.log())  # its derivative is cheaper than that of `pow`
    return -0.5 * power, (alpha + 1) / (4 * alpha) * (power / base)


@radial_derivatives.register
def _(kernel: RadialKernel, s: Tensor) -> tuple[Tensor, Tensor]:
    return kernel.correlation(s, 1), kernel.correlation(s, 2)


# The highest order of partial derivatives: two for a curl-free covariance, one for each symbol.
HIGHEST_ORDER = 4
Axes = Sequence[int]  # the axes of a partial derivative: (0, 0, 1) is ∂₀∂₀∂₁


def derivatives(kernel: Kernel, tau: Float[Tensor, "*b n m k"], order: int) -> Float[Tensor, "..."]:
    """Return all partial derivatives of k(τ) of one order.

    Args:
        kernel: the scalar kernel k.
        tau: (*b, n, m, k), lags of the k inputs of the kernel.
        order: the number of derivatives, from 0 to 4. The result has one more axis of size k for
            each derivative.

    Raises:
        NotImplementedError: the kernel has no radial derivatives.
    """
    inputs = range(tau.shape[-1])
    different = list(combinations_with_replacement(inputs, order))
    values = torch.stack(partial_derivatives(kernel, tau, order, different), dim=-1)
    columns = [different.index(tuple(sorted(axes))) for axes in product(inputs, repeat=order)]
    return values[..., columns].unflatten(-1, (len(inputs),) * order) if order else values[..., 0]


def partial_derivatives(
    kernel: Kernel, tau: Float[Tensor, "*b n m k"], order: int, chosen: Iterable[Axes]
) -> list[Float[Tensor, "*b n m"]]:
    """Return the `chosen` partial derivatives of k(τ), all of one order from 0 to 4.

    Raises:
        NotImplementedError: the kernel has no radial derivatives.
    """
    if not order:
        return [scalar_covariance(kernel, tau) for _ in chosen]
    if not kernel.has_lengthscale:
        radial_derivatives.dispatch(object)(kernel, None)  # raises, and lists registered kernels
    lengthscale = kernel.lengthscale.unsqueeze(-2).to(tau)
    lengthscale = lengthscale.expand(*lengthscale.shape[:-1], tau.shape[-1])
    scaled = tau / lengthscale
    kappas = _radial(kernel, scaled.square().sum(-1), order)
    u, rates = (scaled / lengthscale).unbind(-1), lengthscale.pow(-2).unbind(-1)
    return [radial_partial(kappas, u, rates, axes) for axes in chosen]


def radial_partial(
    kappas: Sequence[Float[Tensor, "*b"]],
    u: Sequence[Float[Tensor, "*b"]],
    rates: Sequence[Float[Tensor, "*b"] | float],
    axes: Axes,
) -> Float[Tensor, "*b"]:
    """Return a partial derivative, of order 1 or more, of κ(τᵀΛτ) with a diagonal Λ.

    Examples are ∂_i κ = 2κ′u_i and ∂_ij κ = 2κ′Λ_ij + 4κ″u_iu_j, with u = Λτ. In general, the
    derivative is a sum over all ways to form pairs of derivatives by the same input. A pair for
    input i gives the factor Λ_ii, and a single derivative gives the factor u_i. Each product has
    the coefficient 2^j κ^{(j)}, where j = order − pairs. For n derivatives by one input, there are
    n! / (p! (n − 2p)! 2^p) ways to form p pairs.

    Args:
        kappas: κ′, κ″, …, at least as many as the order.
        u: u_i for each input.
        rates: Λ_ii for each input.
        axes: the input of each derivative.
    """
    counts = {i: axes.count(i) for i in axes}
    total = 0.0
    for pairs in product(*(range(n // 2 + 1) for n in counts.values())):
        j = len(axes) - sum(pairs)
        summand = 2**j * kappas[j - 1]
        for (i, n), p in zip(counts.items(), pairs, strict=True):
            ways = math.comb(n, 2 * p) * math.prod(range(1, 2 * p, 2))
            summand = summand * (ways * rates[i] ** p)
            if n > 2 * p:
                summand = summand * u[i] ** (n - 2 * p)
        total = total + summand
    return total


def scalar_covariance(kernel: Kernel, tau: Float[Tensor, "*n k"]) -> Float[Tensor, "*n"]:
    """Return k(τ) at lags τ of the inputs of the kernel, by its method `forward`."""
    lags = tau.flatten(0, -2)
    return kernel.forward(lags, torch.zeros_like(lags), diag=True).reshape(tau.shape[:-1])


def _radial(kernel: Kernel, s: Float[Tensor, "*m"], order: int) -> Sequence[Float[Tensor, "*m"]]:
    """Return κ′, κ″, …, κ^{(order)} at s, but at least κ′ and κ″.

    Automatic differentiation of κ″ gives the third and higher derivatives of most kernels.
    """
    if order <= 2:
        return radial_derivatives(kernel, s)
    if isinstance(kernel, RadialKernel) and order <= kernel.highest_order:
        return [kernel.correlation(s, j) for j in range(1, order + 1)]
    differentiable = s.requires_grad
    with torch.enable_grad():
        # At s = 0, derivatives of κ″ may be infinite. There they are multiplied by zero lags, so
        # any finite number is correct.
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
    """Return the coefficients of a homogeneous polynomial in ω, by its monomials (i, j, …).

    They follow from values at random ω, by least squares.

    Args:
        function: a function of frequencies (m, k) that returns matrices (m, q, p).
        dims: k, the number of inputs.
        degree: the degree of the polynomial.
        device: the device of the frequencies.

    Raises:
        NotImplementedError: the function is not a homogeneous polynomial of this degree.
    """
    monomials = list(combinations_with_replacement(range(dims), degree))
    generator = torch.Generator().manual_seed(0)
    # With more values than coefficients, the residual shows whether the function is a polynomial.
    omega = torch.randn(4 * len(monomials) + 8, dims, generator=generator, dtype=torch.float64)
    omega = omega.to(device)
    values = function(omega).to(torch.complex128)
    columns = [omega[:, list(monomial)].prod(-1) for monomial in monomials]
    design = torch.stack(columns, dim=-1).to(torch.complex128)
    coefficients = torch.linalg.lstsq(design, values.flatten(1)).solution
    if (design @ coefficients - values.flatten(1)).abs().max() > 1e-9 * (1 + values.abs().max()):
        raise NotImplementedError(
            "expected a symbol whose multiplier is a polynomial in ω, got another one; use "
            "features, such as gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))"
        )
    return dict(zip(monomials, coefficients.unflatten(-1, values.shape[1:]), strict=True))


def at_zero(term: Term) -> Float[Tensor, "*b p p"]:
    """Return K(0), the covariance of one term at lag zero."""
    scale, factor = term.outputscale[..., None, None], term.factor
    if factor.is_constant:
        return scale * factor.matrix @ factor.matrix.mT
    return scale * factor.variance(term.leaves[0].spectrum)


# A scalar kernel k of the squared scaled distance has all its derivatives in closed form. Let Q and
# R be symbols, and let A(ω) = B B* be the matrix of the factor of a term. If Q A R* is a polynomial
# in ω, the covariance of Q f and R f is a sum of derivatives of k, because ω^α e^{i⟨ω,τ⟩} =
# (−i)^|α| ∂^α e^{i⟨ω,τ⟩}. For integrals over paths and boxes, this is the covariance of the
# integrands. `gp_orff.symbols.patches` lists the errors of their quadrature.
#
# The covariance of two symbols Q and R of a stationary field is computed as follows:
#
# 1. `_split` writes a symbol as means of a local symbol over patches, which are points, pieces of
#    paths or boxes. The covariance is the sum over pairs of patches.
# 2. For a pair of patches, the lags form a set with the edges of both. `Rule.mean` computes the
#    mean over this set.
# 3. `_term` is the covariance of the local symbols at a lag. Q A R* is a homogeneous polynomial in
#    ω, whose coefficients are computed numerically. Every monomial ω^α becomes the derivative
#    (−i∂)^α of the scalar kernel.
# 4. Kernels of other inputs, such as time, multiply the result.
# 5. `relative` subtracts the values at the references on both sides.
@dataclass(frozen=True)
class SymbolCovariance:
    """The prior covariance Cov[Q f(x), R f(z)] of two symbols Q and R of a field f.

    Attributes:
        kernel: the kernel of f.
        left: Q, with q outputs.
        right: R, with r outputs.
        space: the columns of the points that are directions of space.
    """

    kernel: Kernel
    left: Symbol
    right: Symbol
    space: tuple[int, ...]

    def __call__(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """Return the covariance matrix (n·q, m·r) between the points x and z.

        Rows and columns are ordered point by point.

        Raises:
            NotImplementedError: the covariance has no closed form.
        """
        blocks = self.blocks(x.unsqueeze(1), z.unsqueeze(0))
        return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    @property
    def is_stationary(self) -> bool:
        """Whether the covariance is a function of the lag x − z."""
        return not any(term.factor.decays for term in terms(self.kernel))

    def blocks(
        self, x: Float[Tensor, "#n #m d"], z: Float[Tensor, "#n #m d"]
    ) -> Float[Tensor, "n m q r"]:
        """Return the covariances (n, m, q, r) of pairs of points that broadcast to (n, m).

        Raises:
            NotImplementedError: the covariance has no closed form.
        """
        summands = terms(self.kernel)
        stationary = [term for term in summands if not term.factor.decays]
        pairs = (self.left, self.right, x, z)
        total = sum(t.factor.covariance(t, *pairs) for t in summands if t.factor.decays)
        if not stationary:
            return total
        tau = x - z
        return total + self._blocks(stationary, tau.flatten(0, 1)).unflatten(0, tau.shape[:2])

    def _blocks(
        self, summands: Sequence[Term], tau: Float[Tensor, "l d"]
    ) -> Float[Tensor, "l q r"]:
        """Return the covariance of stationary terms at every lag."""
        p = summands[0].num_outputs
        (lefts, left), (rights, right) = (self._split(side, p) for side in (self.left, self.right))
        if not all(leaf.kernel.is_stationary for term in summands for leaf in term.leaves):
            raise NotImplementedError(
                f"expected a stationary kernel for {type(self.left).__name__}, got one that is "
                "not; use a grid, gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))"
            )
        local, total = replace(self, left=left, right=right), 0.0
        integrates = any(len(patch.edges) for patch in (*lefts, *rights))  # more than points
        rule = Rule(math.inf, kink=False)
        if integrates:
            rule = _rule(summands, self.space, tau.shape[-1])
        for a, b in product(lefts, rights):
            shift = embedded((a.corner - b.corner).to(tau), self.space, tau.shape[-1])
            edges = torch.cat([a.edges, -b.edges])
            integrand = partial(local._local_covariance, summands)
            mean = rule.mean(integrand, tau + shift, edges, self.space)
            total = total + a.matrix.to(tau) @ mean @ b.matrix.to(tau).mT
        return total

    def _split(self, symbol: Symbol, p: int) -> tuple[Sequence[Patch], Symbol]:
        """Return patches and a local symbol, whose means over the patches add up to `symbol`."""
        num_dims = len(self.space)
        patches = symbol.patches(num_dims, p)
        if patches is not None:
            return patches, Identity()
        return [Patch.point(num_dims, torch.eye(symbol.num_outputs(p)))], symbol

    def _local_covariance(
        self, summands: Sequence[Term], tau: Float[Tensor, "l d"]
    ) -> Float[Tensor, "l q r"]:
        """Return the covariance of the local symbols of the field at every lag."""
        values = self.left.is_identity and self.right.is_identity
        if values and len(summands) == len(terms(self.kernel)):
            origin = torch.zeros_like(tau[:1])
            return to_dense(self.kernel(tau, origin)).unflatten(0, (len(tau), -1))
        return sum(self._term(term, tau.unsqueeze(1)) for term in summands).squeeze(1)

    def relative(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """Return the covariance matrix (n·q, m·r) of values minus the values at the references."""
        covariance = self(x, z)
        left = self.left.reference_points(x, self.space)
        right = self.right.reference_points(z, self.space)
        if left is not None:
            covariance = covariance - self(left, z)
        if right is not None:
            covariance = covariance - self(x, right)
        if left is not None and right is not None:
            covariance = covariance + self(left, right)
        return covariance

    def _term(self, term: Term, tau: Float[Tensor, "n m d"]) -> Float[Tensor, "n m q r"]:
        """Return the covariance of one term, as derivatives of its scalar kernel.

        Their coefficients are those of the polynomial Q A R*.
        """
        p, degree = term.num_outputs, term.factor.degree

        def density(omega: Float[Tensor, "m d"], factor: Tensor) -> Complex[Tensor, "m q r"]:
            left, right = (s(omega, p).to(torch.complex128) for s in (self.left, self.right))
            outer = (factor @ factor.mT).to(torch.complex128)
            return left @ outer @ right.mH

        if not term.leaves:  # a constant
            origin = tau.new_zeros(1, len(self.space))
            block = density(origin, term.factor(origin)).real
            return (term.outputscale * block).expand(*tau.shape[:2], -1, -1)
        first, *others = term.leaves
        dims = first.columns(tau.shape[-1])
        order = 2 * degree + self.left.order + self.right.order

        def leaf_density(omega: Float[Tensor, "m k"]) -> Complex[Tensor, "m q r"]:
            factor = term.factor(omega)
            if degree:
                return density(term.factor.embedded(omega), factor)
            return density(embedded(omega, dims, tau.shape[-1])[:, list(self.space)], factor)

        if not degree and others:
            raise NotImplementedError(
                f"expected one kernel of all directions of space for {type(self.left).__name__}, "
                "got a product of kernels of single inputs; use a grid, "
                "gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))"
            )
        if not 0 <= order <= HIGHEST_ORDER:
            raise NotImplementedError(
                f"expected derivatives of the potential of orders 0 to {HIGHEST_ORDER} for "
                f"{type(self.left).__name__}, got {order}; use a grid, "
                "gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))"
            )
        coefficients = polynomial(leaf_density, len(dims), order, tau.device)
        values = partial_derivatives(first.kernel, tau[..., list(dims)], order, coefficients)
        block = 0.0
        for value, coefficient in zip(values, coefficients.values(), strict=True):
            block = block + value[..., None, None] * ((-1j) ** order * coefficient).real
        scale = term.outputscale
        for leaf in others:
            k = scalar_covariance(leaf.kernel, tau[..., list(leaf.columns(tau.shape[-1]))])
            scale = scale * k[..., None, None]
        return scale * block


def _rule(summands: Sequence[Term], space: Sequence[int], num_inputs: int) -> Rule:
    """Return a quadrature rule for the shortest length over which kernels of space vary.

    The rule expects a kink at lag zero if one of these kernels may have one.
    """
    leaves = [leaf for term in summands for leaf in term.leaves]
    in_space = [leaf for leaf in leaves if not set(leaf.columns(num_inputs)).isdisjoint(space)]
    lengths = [length for leaf in in_space for length in _lengths(leaf, space, num_inputs)]
    return Rule(min(lengths, default=math.inf), any(_has_kink(leaf.kernel) for leaf in in_space))


def _lengths(leaf: Leaf, space: Sequence[int], num_inputs: int) -> list[float]:
    """Return the shortest lengths over which a leaf varies, one for each input in space."""
    columns = leaf.columns(num_inputs)
    lengths = shortest_lengths(leaf.kernel).detach()
    lengths = lengths.reshape(-1, lengths.shape[-1]).amin(0).expand(len(columns)).tolist()
    return [length for column, length in zip(columns, lengths, strict=True) if column in space]


def _has_kink(kernel: Kernel) -> bool:
    """Return whether a kernel may have a kink at lag zero.

    The result is False only if the spectral density has a finite sixth moment.
    """
    try:
        moment = spectrum(kernel).moment(3, 2)
    except NotImplementedError:
        return True
    return not torch.isfinite(torch.as_tensor(moment)).all()


def decided(symbol: Symbol, kernel: Kernel) -> Symbol:
    """Return the symbol after replacing a `background` of None by True or False.

    A potential includes the potential of the constant mean if all terms of the kernel are
    curl-free. Stream functions and vector potentials do so if all terms are divergence-free.
    """
    factors = [term.factor for term in terms(kernel)]
    curl_free = all(factor.is_gradient for factor in factors)
    return symbol.decided(curl_free, all(factor.is_solenoidal for factor in factors))


def require(symbol: Symbol, kernel: Kernel, space: Sequence[int]) -> None:
    """Raise an error if a symbol does not exist for fields with this kernel.

    If the spectral density falls too slowly, the field has no derivative. If the field is not a
    derivative of a potential, its potential is defined only relative to a reference.

    Args:
        symbol: the symbol.
        kernel: the kernel of the field.
        space: the columns of the points that are directions of space.

    Raises:
        TypeError: `symbol` is not a `Symbol`.
        ValueError: the symbol does not exist, or needs a reference.
        NotImplementedError: the kernel is a field kernel times a kernel of the same inputs.
    """
    required(symbol, Symbol, "expected a symbol, such as gp_orff.Curl()", "pass an instance")
    summands = terms(kernel)
    symbol.check(len(space), summands[0].num_outputs)
    for term in summands:
        if not varies_in_space(term, space):
            continue
        order = term.factor.degree + symbol.order
        name = type(symbol).__name__
        leaf_name = type(term.leaves[0].kernel).__name__
        if order < 0 and symbol.reference is None:
            raise ValueError(
                f"expected a reference for {name}, which is defined only up to a constant for "
                f"{leaf_name} without a curl-free or divergence-free kernel, got none; pass "
                "reference=x0"
            )
        others = [dim for leaf in term.leaves[1:] for dim in leaf.active_dims or space]
        if term.factor.num_inputs and symbol.order and set(others) & set(space):
            raise NotImplementedError(
                f"expected a field kernel, or its product with kernels of other inputs such as "
                f"time, for {name}, got a product with a kernel of the same inputs; pass it "
                "active_dims of other inputs"
            )
        if symbol.order < 0 and symbol.reference is None and (not symbol.homogeneous or others):
            raise ValueError(
                f"expected a reference for {name}, which is defined only up to a constant under "
                "this kernel, got none; pass reference=x0"
            )
        if symbol.order > 0 and _is_infinite(term, symbol.order, len(space)):
            nu = getattr(term.leaves[0].kernel, "nu", None)
            raise ValueError(
                f"expected a base kernel with {order} derivatives for {name}, got {leaf_name}"
                f"{'' if nu is None else f' with nu={nu}'}, for which its variance is infinite; "
                f"use MaternKernel with nu > {order}, or RBFKernel"
            )


def _is_infinite(term: Term, order: int, num_dims: int) -> bool:
    """Return whether derivatives of this order have an infinite variance under one term.

    For constants and polynomials, the result is False.
    """
    for measure in spectra_of(term)[:1]:
        if not measure.is_stationary:
            return False
        if term.factor.closed_form:
            moment = measure.moment(term.factor.degree + order, num_dims)
        else:
            moment = term.factor.variance_spectrum(measure).moment(order)
        return bool(torch.as_tensor(moment).isinf().any())
    return False
