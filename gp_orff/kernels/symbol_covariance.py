"""Covariances of symbols of a field under an exact kernel, in closed form.

A scalar kernel k of the squared scaled distance has all its derivatives in closed form. Where Q A
and Q A Q*, for a symbol Q and a spectral density A, are polynomials in ω, covariances of Q f are
derivatives of k, since ω^α e^{i⟨ω,τ⟩} = (−i)^|α| ∂^α e^{i⟨ω,τ⟩}. Matrices, and integrals over paths
and boxes, need only the covariance of their integrand; `gp_orff.symbols.patches` has their errors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Complex, Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.kernels.derivatives import derivatives, polynomial, scalar_covariance
from gp_orff.kernels.lengths import shortest_lengths
from gp_orff.kernels.spectra import Spectrum, spectrum
from gp_orff.kernels.tree import (
    Leaf,
    Term,
    embedded,
    spectra_of,
    terms,
    varies_in_space,
)
from gp_orff.symbols.base import Identity, Symbol
from gp_orff.symbols.patches import Patch, Rule


# How the covariance of two symbols Q and R of a stationary field is computed:
#
# 1. A symbol that averages over pieces of paths or boxes is written as a sum of patches, and the
#    rest is a local symbol (`_split`). The covariance is the sum over pairs of patches.
# 2. For a pair, the lag runs over a set with the edges of both patches; `Rule.mean` integrates over
#    it.
# 3. The integrand is the covariance of the local symbols at a lag (`_term`): Q A R* is a
#    homogeneous polynomial in ω, its coefficients are computed numerically, and every monomial ω^α
#    becomes the derivative (−i∂)^α of the scalar kernel.
# 4. Kernels of other inputs, such as time, multiply the result.
# 5. `relative` subtracts the values at the references on both sides.
@dataclass(frozen=True)
class SymbolCovariance:
    """The prior covariance Cov[Q f(x), R f(z)], for symbols Q (`left`) and R (`right`)."""

    kernel: Kernel
    left: Symbol
    right: Symbol
    space: tuple[int, ...]

    def __call__(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """The covariance matrix between points x and z, point-major.

        Raises:
            NotImplementedError: the covariance has no closed form.
        """
        blocks = self.blocks(x.unsqueeze(1), z.unsqueeze(0))
        return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    @property
    def is_stationary(self) -> bool:
        """Whether the covariance is a function of lags."""
        return not any(term.factor.decays for term in terms(self.kernel))

    def blocks(
        self, x: Float[Tensor, "#n #m d"], z: Float[Tensor, "#n #m d"]
    ) -> Float[Tensor, "n m q r"]:
        """The covariance of pairs of points.

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
        blocks = self._blocks(stationary, tau.flatten(0, 1)).unflatten(0, tau.shape[:2])
        return total + blocks

    def _blocks(
        self, summands: Sequence[Term], tau: Float[Tensor, "l d"]
    ) -> Float[Tensor, "l q r"]:
        """The covariance of stationary terms at every lag."""
        p = summands[0].num_outputs
        (lefts, left), (rights, right) = (self._split(side, p) for side in (self.left, self.right))
        if not all(leaf.kernel.is_stationary for term in summands for leaf in term.leaves):
            raise NotImplementedError("a kernel that is not stationary")
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
        """Patches and a local symbol, whose means over the patches sum to the symbol."""
        num_dims = len(self.space)
        patches = symbol.patches(num_dims, p)
        if patches is not None:
            return patches, Identity()
        return [Patch.point(num_dims, torch.eye(symbol.num_outputs(p)))], symbol

    def _local_covariance(
        self, summands: Sequence[Term], tau: Float[Tensor, "l d"]
    ) -> Float[Tensor, "l q r"]:
        """The covariance of the field, or of derivatives of it, at every lag."""
        values = self.left.is_identity and self.right.is_identity
        if values and len(summands) == len(terms(self.kernel)):
            origin = torch.zeros_like(tau[:1])
            return to_dense(self.kernel(tau, origin)).unflatten(0, (len(tau), -1))
        return sum(self._term(term, tau.unsqueeze(1)) for term in summands).squeeze(1)

    def relative(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """The covariance of the values at x and z less those at the references of Q and R."""
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
        """The covariance of one term: derivatives of its kernel times coefficients of Q A R*."""
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
            raise NotImplementedError("a product of kernels, each with a part of space")
        if not 0 <= order <= 4:
            raise NotImplementedError(f"derivatives of order {order} of its potential")
        coefficients = polynomial(leaf_density, len(dims), order, tau.device)
        tensor = derivatives(first.kernel, tau[..., list(dims)], order)
        block = 0.0
        for monomial, coefficient in coefficients.items():
            matrix = ((-1j) ** order * coefficient).real
            block = block + tensor[(..., *monomial)][..., None, None] * matrix
        scale = term.outputscale
        for leaf in others:
            k = scalar_covariance(leaf.kernel, tau[..., list(leaf.columns(tau.shape[-1]))])
            scale = scale * k[..., None, None]
        return scale * block


def _rule(summands: Sequence[Term], space: Sequence[int], num_inputs: int) -> Rule:
    """A rule for the shortest length in space, with a kink if a kernel there may have one."""
    leaves = [leaf for term in summands for leaf in term.leaves]
    in_space = [leaf for leaf in leaves if not set(leaf.columns(num_inputs)).isdisjoint(space)]
    lengths = [length for leaf in in_space for length in _lengths(leaf, space, num_inputs)]
    return Rule(min(lengths, default=math.inf), any(_has_kink(leaf.kernel) for leaf in in_space))


def _lengths(leaf: Leaf, space: Sequence[int], num_inputs: int) -> list[float]:
    """The shortest lengths over which a leaf varies, one for each of its inputs in space."""
    columns = leaf.columns(num_inputs)
    lengths = shortest_lengths(leaf.kernel).detach()
    lengths = lengths.reshape(-1, lengths.shape[-1]).amin(0).expand(len(columns)).tolist()
    return [length for column, length in zip(columns, lengths, strict=True) if column in space]


def _has_kink(kernel: Kernel) -> bool:
    """Whether the kernel lacks derivatives at lag zero, or is not known to have them."""
    try:
        moment = spectrum(kernel).moment(3, 2)
    except NotImplementedError:
        return True
    return not torch.isfinite(torch.as_tensor(moment)).all()


def decided(symbol: Symbol, kernel: Kernel) -> Symbol:
    """The symbol with its image of constants under this kernel: potentials and stream functions
    include that of the constant mean where all terms are curl-free, or divergence-free."""
    factors = [term.factor for term in terms(kernel)]
    curl_free = all(factor.is_gradient for factor in factors)
    return symbol.decided(curl_free, all(factor.is_solenoidal for factor in factors))


def require(symbol: Symbol, kernel: Kernel, space: Sequence[int]) -> None:
    """Refuse a symbol that does not exist for fields with this kernel.

    A field whose spectral density falls too slowly has no derivative. A field that is not itself a
    derivative has no stationary potential.

    Raises:
        ValueError: the symbol does not exist, or is known only relative to a reference.
        NotImplementedError: a derivative of a field kernel times a kernel of the same inputs.
    """
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
                f"{name} of a field that is no derivative itself ({leaf_name} without a curl-free "
                "or divergence-free kernel) is defined only up to a constant: expected a "
                "reference, got none; pass reference=x0"
            )
        others = [dim for leaf in term.leaves[1:] for dim in leaf.active_dims or space]
        if term.factor.num_inputs and symbol.order and set(others) & set(space):
            raise NotImplementedError(
                f"{name} of a field kernel times a kernel of the same inputs is not known: "
                "expected factors of other inputs, such as time"
            )
        if symbol.order < 0 and symbol.reference is None and (not symbol.homogeneous or others):
            raise ValueError(
                f"{name} is defined only up to a constant under this kernel: expected a "
                "reference, got none; pass reference=x0"
            )
        if symbol.order > 0 and _is_infinite(term, symbol.order, len(space)):
            nu = getattr(term.leaves[0].kernel, "nu", None)
            raise ValueError(
                f"{name} does not exist for a field with this {leaf_name} potential"
                f"{'' if nu is None else f', nu={nu}'}: its variance is infinite; expected "
                f"a kernel with {order} derivatives (Matérn nu > {order}, or RBF)"
            )


def _is_infinite(term: Term, order: int, num_dims: int) -> bool:
    """Whether derivatives of this order have an infinite variance.

    A constant has none, and nor has a polynomial.
    """
    for measure in spectra_of(term)[:1]:
        if not isinstance(measure, Spectrum):
            return False
        if term.factor.closed_form:
            moment = measure.moment(term.factor.degree + order, num_dims)
        else:
            moment = term.factor.variance_spectrum(measure).moment(order)
        return bool(torch.as_tensor(moment).isinf().any())
    return False
