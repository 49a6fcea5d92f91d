"""The covariance of observed numbers: a component of a field, or its part along a direction."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.factors import Factor, FieldFactor, Mixing
from gp_orff.kernels.pairs.hessian import Cut, FieldTerm, Pairs
from gp_orff.kernels.tree import Leaf, Term, inner_terms, terms


@dataclass(frozen=True)
class Rows:
    """The numbers v_qnᵀ f(x_n), q of them at every point."""

    x: Float[Tensor, "n d"]
    v: Float[Tensor, "q #n p"]  # one n for directions that are the same at every point

    def __getitem__(self, points: slice) -> "Rows":
        return Rows(self.x[points], self.v if self.v.shape[-2] == 1 else self.v[:, points])

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.v) * len(self.x)


RowCovariance = Callable[[Rows, Rows], Float[Tensor, "n*q m*r"]]


def row_covariance(kernel: Kernel, cut: Cut = lambda tensor: tensor) -> RowCovariance:
    """The covariance of two sets of rows under a kernel, point-major, differentiable in the kernel.

    Field kernels and separable kernels, their sums and their products with scalar kernels are
    contracted with the directions without the covariance of whole vectors.

    Args:
        kernel: with its hyperparameters as they are now.
        cut: applied once to every tensor that is computed from hyperparameters for all rows.
    """
    if kernel.batch_shape or not _in_closed_form(kernel):
        return partial(_of_kernel, kernel)
    return partial(_of_terms, [_prepared(term.factor, term, cut) for term in terms(kernel)])


def _of_kernel(kernel: Kernel, left: Rows, right: Rows) -> Float[Tensor, "n*q m*r"]:
    """By the covariance of whole vectors, as the kernel gives it."""
    n, m = len(left.x), len(right.x)
    blocks = to_dense(kernel(left.x, right.x)).reshape(n, left.v.shape[-1], m, -1)
    v, w = left.v.expand(-1, n, -1), right.v.expand(-1, m, -1)
    half = torch.einsum("qni,nimj->nqmj", v, blocks)
    return torch.einsum("nqmj,rmj->nqmr", half, w).reshape(len(left), len(right))


def _of_terms(
    summands: list["_FieldRows | _MixedRows"], left: Rows, right: Rows
) -> Float[Tensor, "n*q m*r"]:
    known: dict[tuple[int, ...] | None, Pairs] = {}
    blocks = [summand(left, right, known) for summand in summands]
    total = sum(blocks[1:], blocks[0])  # (q, r, n, m)
    return total.permute(2, 0, 3, 1).reshape(len(left), len(right))


@dataclass(frozen=True)
class _FieldRows:
    """A field times scalar kernels."""

    space: Leaf
    others: tuple[Leaf, ...]
    term: FieldTerm

    def __call__(self, left: Rows, right: Rows, known: dict) -> Float[Tensor, "q r n m"]:
        """For every pair of directions; terms of the same inputs share their pairs."""
        if self.space.active_dims not in known:
            x, z = (_inputs(self.space, rows) for rows in (left, right))
            tau = x.mT.unsqueeze(-1) - z.mT.unsqueeze(-2)
            known[self.space.active_dims] = Pairs(tau, left.v, right.v)
        block = self.term(known[self.space.active_dims])
        return math.prod([_scalar(leaf, left, right) for leaf in self.others], start=block)


@dataclass(frozen=True)
class _MixedRows:
    """A product of scalar kernels and a constant matrix L Lᵀ."""

    leaves: tuple[Leaf, ...]
    scale: Float[Tensor, ""]
    root: Float[Tensor, "p r"]

    def __call__(self, left: Rows, right: Rows, known: dict) -> Float[Tensor, "q r n m"]:
        """For every pair of directions."""
        k = math.prod([_scalar(leaf, left, right) for leaf in self.leaves], start=self.scale)
        return k * ((left.v @ self.root).unsqueeze(-3) @ (right.v @ self.root).mT)


@singledispatch
def _prepared(factor: Factor, term: Term, cut: Cut) -> _FieldRows | _MixedRows:
    """A term with all that is computed from its hyperparameters for all rows."""
    raise NotImplementedError(f"no covariances of rows are known for {type(factor).__name__}")


@_prepared.register
def _(factor: FieldFactor, term: Term, cut: Cut) -> _FieldRows:
    space, *others = term.leaves
    return _FieldRows(space, tuple(others), FieldTerm.of(term, cut))


@_prepared.register
def _(factor: Mixing, term: Term, cut: Cut) -> _MixedRows:
    scale, root = term.outputscale.double(), factor.matrix.double()
    return _MixedRows(term.leaves, cut(scale), cut(root))


def _inputs(leaf: Leaf, rows: Rows) -> Float[Tensor, "n k"]:
    return rows.x if leaf.active_dims is None else rows.x[:, list(leaf.active_dims)]


def _scalar(leaf: Leaf, left: Rows, right: Rows) -> Float[Tensor, "n m"]:
    return to_dense(leaf.kernel.forward(_inputs(leaf, left), _inputs(leaf, right)))


def _in_closed_form(kernel: Kernel) -> bool:
    """Whether the terms of a kernel are all that there is to it, and all of them are known."""
    summands = terms(kernel)
    known = all(_prepared.dispatch(type(term.factor)) is not _unknown for term in summands)
    known = known and all(
        _has_radial_derivatives(term.leaves[0].kernel)
        for term in summands
        if isinstance(term.factor, FieldFactor)
    )
    plain = inner_terms.dispatch(object)  # of leaves whose term is the kernel itself, unscaled
    known = known and all(
        inner_terms.dispatch(type(leaf.kernel)) is plain
        for term in summands
        for leaf in term.leaves
    )
    return known and all(
        _has_covariance_of_terms(type(part))
        for part in kernel.modules()
        if isinstance(part, Kernel)
    )


_unknown = _prepared.dispatch(object)


def _has_radial_derivatives(kernel: Kernel) -> bool:
    unknown = radial_derivatives.dispatch(object)
    return kernel.has_lengthscale and radial_derivatives.dispatch(type(kernel)) is not unknown


def _has_covariance_of_terms(cls: type[Kernel]) -> bool:
    """Whether a class has the covariance of the class that its terms are registered for."""
    registered = next(base for base in cls.__mro__ if base in inner_terms.registry)
    return registered is object or cls.forward is registered.forward
