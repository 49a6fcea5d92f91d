"""Symbols of exact kernels, in closed form: the reference for those of features.

A scalar kernel k of the squared scaled distance has all its derivatives in closed form. Where Q A
and Q A Q* of a symbol Q and a spectral density A are polynomials in ω, covariances are derivatives
of k: ω^α turns e^{i⟨ω,τ⟩} into (−i)^|α| ∂^α e^{i⟨ω,τ⟩}. Matrices, and integrals over paths and
boxes, need nothing but the covariance of what they are taken of: `patches` says how exact they are.
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

from gp_orff.kernels.closed_form import at_lags, derivatives, polynomial
from gp_orff.kernels.factors import embedded
from gp_orff.kernels.spectra.base import spectrum
from gp_orff.kernels.spectra.lengths import shortest_lengths
from gp_orff.kernels.tree import Leaf, Term, spectra_of, terms, varies_in_space
from gp_orff.symbols.base import Identity, Symbol
from gp_orff.symbols.patches import Patch, Rule


@dataclass(frozen=True)
class SymbolCovariance:
    """Cov[Q f(x), R f(z)] under the prior, for symbols Q and R of a field."""

    kernel: Kernel
    left: Symbol
    right: Symbol
    space: tuple[int, ...]

    def __call__(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """Point-major.

        Raises:
            NotImplementedError: no closed form.
        """
        pairs = [own.reshape(-1, x.shape[-1]) for own in torch.broadcast_tensors(x.unsqueeze(1), z)]
        blocks = self._blocks(pairs[0] - pairs[1]).unflatten(0, (len(x), len(z)))
        return blocks.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _blocks(self, tau: Float[Tensor, "l d"]) -> Float[Tensor, "l q r"]:
        """At lags."""
        found = terms(self.kernel)
        p = found[0].num_outputs
        (lefts, left), (rights, right) = (self._peeled(own, p) for own in (self.left, self.right))
        _require_lags(found)
        inner, total = replace(self, left=left, right=right), 0.0
        whole = any(len(own.edges) for own in (*lefts, *rights))  # more than points
        rule = _rule(found, self.space, tau.shape[-1]) if whole else Rule(math.inf, kink=False)
        for a, b in product(lefts, rights):
            shift = embedded((a.corner - b.corner).to(tau), self.space, tau.shape[-1])
            edges = torch.cat([a.edges, -b.edges])
            mean = rule.mean(partial(inner._local, found), tau + shift, edges, self.space)
            total = total + a.matrix.to(tau) @ mean @ b.matrix.to(tau).mT
        return total

    def _peeled(self, symbol: Symbol, p: int) -> tuple[Sequence[Patch], Symbol]:
        """A symbol as sums over patches of a local one."""
        num_dims = len(self.space)
        patches = symbol.patches(num_dims, p)
        if patches is not None:
            return patches, Identity()
        return [Patch.point(num_dims, torch.eye(symbol.num_outputs(p)))], symbol

    def _local(self, found: Sequence[Term], tau: Float[Tensor, "l d"]) -> Float[Tensor, "l q r"]:
        """Of the field, or of derivatives of it."""
        if isinstance(self.left, Identity) and isinstance(self.right, Identity):
            origin = torch.zeros_like(tau[:1])
            return to_dense(self.kernel(tau, origin)).unflatten(0, (len(tau), -1))
        return sum(self._term(term, tau.unsqueeze(1)) for term in found).squeeze(1)

    def less(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"]) -> Float[Tensor, "nq mr"]:
        """The same of values less those at the references of either side."""
        whole = self(x, z)
        left, right = self.left.referred(x, self.space), self.right.referred(z, self.space)
        if left is not None:
            whole = whole - self(left, z)
        if right is not None:
            whole = whole - self(x, right)
        if left is not None and right is not None:
            whole = whole + self(left, right)
        return whole

    def _term(self, term: Term, tau: Float[Tensor, "n m d"]) -> Float[Tensor, "n m q r"]:
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
        total = 2 * degree + self.left.order + self.right.order

        def of_leaf(omega: Float[Tensor, "m k"]) -> Complex[Tensor, "m q r"]:
            factor = term.factor(omega)
            if degree:
                return density(term.factor.embedded(omega), factor)
            return density(embedded(omega, dims, tau.shape[-1])[:, list(self.space)], factor)

        if not degree and others:
            raise NotImplementedError("a product of kernels, each with a part of space")
        if not 0 <= total <= 4:
            raise NotImplementedError(f"derivatives of order {total} of its potential")
        coefficients = polynomial(of_leaf, len(dims), total)
        tensor = derivatives(first.kernel, tau[..., list(dims)], total)
        block = 0.0
        for monomial, coefficient in coefficients.items():
            turned = ((-1j) ** total * coefficient).real
            block = block + tensor[(..., *monomial)][..., None, None] * turned
        scale = term.outputscale
        for leaf in others:
            k = at_lags(leaf.kernel, tau[..., list(leaf.columns(tau.shape[-1]))])
            scale = scale * k[..., None, None]
        return scale * block


def _require_lags(found: Sequence[Term]) -> None:
    if not all(leaf.kernel.is_stationary for term in found for leaf in term.leaves):
        raise NotImplementedError("a kernel that is not stationary")


def _rule(found: Sequence[Term], space: Sequence[int], num_inputs: int) -> Rule:
    """By the shortest length in space, and by whether there is a kernel of it with few derivatives,
    or of which not is known how many."""
    leaves = [leaf for term in found for leaf in term.leaves]
    within = [leaf for leaf in leaves if not set(leaf.columns(num_inputs)).isdisjoint(space)]
    lengths = [own for leaf in within for own in _lengths(leaf, space, num_inputs)]
    return Rule(min(lengths, default=math.inf), any(_has_kink(leaf.kernel) for leaf in within))


def _lengths(leaf: Leaf, space: Sequence[int], num_inputs: int) -> list[float]:
    """The shortest ones, along the inputs of space that it sees."""
    columns = leaf.columns(num_inputs)
    own = shortest_lengths(leaf.kernel).detach()
    own = own.reshape(-1, own.shape[-1]).amin(0).expand(len(columns)).tolist()
    return [length for column, length in zip(columns, own, strict=True) if column in space]


def _has_kink(kernel: Kernel) -> bool:
    try:
        moment = spectrum(kernel).moment(3, 2)
    except NotImplementedError:
        return True
    return not torch.isfinite(torch.as_tensor(moment)).all()


def require(symbol: Symbol, kernel: Kernel, space: Sequence[int]) -> None:
    """Raise ValueError where the symbol of the field does not exist.

    A field whose spectral density falls too slowly has no derivative, one that is not a derivative
    itself has no stationary potential.
    """
    found = terms(kernel)
    symbol.check(len(space), found[0].num_outputs)
    for term in found:
        if not varies_in_space(term, space):
            continue
        order = term.factor.degree + symbol.order
        name = type(symbol).__name__
        own = type(term.leaves[0].kernel).__name__
        if order < 0 and symbol.reference is None:
            raise ValueError(
                f"{name} of a field that is no derivative itself ({own} without a curl-free or "
                "divergence-free kernel) is known up to its value somewhere only: expected a "
                "reference, got none; pass reference=x0"
            )
        others = [dim for leaf in term.leaves[1:] for dim in leaf.active_dims or space]
        if term.factor.degree and symbol.order and set(others) & set(space):
            raise NotImplementedError(
                f"{name} of a field kernel times a kernel of the same inputs is not known: "
                "expected factors of other inputs, such as time"
            )
        if symbol.order < 0 and symbol.reference is None and (not symbol.homogeneous or others):
            raise ValueError(
                f"{name} is known up to its value somewhere only, under this kernel: expected a "
                "reference, got none; pass reference=x0"
            )
        if symbol.order > 0 and any(
            torch.as_tensor(density.moment(order, len(space))).isinf().any()
            for density in spectra_of(term)[:1]
        ):
            nu = getattr(term.leaves[0].kernel, "nu", None)
            raise ValueError(
                f"{name} does not exist for a field with this {own} potential"
                f"{'' if nu is None else f', nu={nu}'}: its variance is infinite; expected "
                f"a kernel with {order} derivatives (Matérn nu > {order}, or RBF)"
            )
