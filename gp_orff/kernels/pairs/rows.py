"""The covariance of observed numbers: a component of a field, or its part along a direction."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from itertools import chain

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.factors import Factor, FieldFactor, Mixing
from gp_orff.kernels.pairs.forms import Plain, Products, collected, total
from gp_orff.kernels.pairs.hessian import Cut, FieldTerm, FormsOfTerm, Pairs
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


Geometry = dict[tuple, Pairs]
"""What of two sets of rows depends on no hyperparameter, for each set of inputs; filled on use."""

RowProducts = Callable[[Rows, Rows, Geometry], Products]
RowCovariance = Callable[..., Float[Tensor, "*b n*q m*r"]]


def row_products(kernel: Kernel, cut: Cut = lambda tensor: tensor) -> RowProducts:
    """The covariance of two sets of rows under a kernel, as numbers of pairs times forms.

    Field kernels and separable kernels, their sums and their products with scalar kernels are
    contracted with the directions without the covariance of whole vectors.

    Args:
        kernel: with its hyperparameters as they are now.
        cut: applied once to every tensor that is computed from hyperparameters for all rows.
    """
    if not in_closed_form(kernel):
        return partial(_of_kernel, kernel)
    return partial(_of_terms, [prepared_rows(term.factor, term, cut) for term in terms(kernel)])


def row_covariance(kernel: Kernel) -> RowCovariance:
    """The covariance of two sets of rows, point-major, differentiable in the kernel; of a batch of
    kernels, if their covariance is in closed form."""
    found = row_products(kernel)

    def covariance(
        left: Rows, right: Rows, geometry: Geometry | None = None
    ) -> Float[Tensor, "*b n*q m*r"]:
        products = found(left, right, {} if geometry is None else geometry)
        sums = total(products)  # (*b, q, r, #n, #m)
        sums = sums.expand(*sums.shape[:-2], len(left.x), len(right.x))
        blocks = sums.movedim((-4, -3), (-3, -1))  # (*b, n, q, m, r)
        return blocks.flatten(-4, -3).flatten(-2, -1)

    return covariance


def by_directions(
    matrix: Float[Tensor, "n*q m*r"], left: Rows, right: Rows
) -> Float[Tensor, "q r n m"]:
    """The entries of a matrix of rows for every pair of directions."""
    q, r = len(left.v), len(right.v)
    return matrix.unflatten(0, (-1, q)).unflatten(2, (-1, r)).permute(1, 3, 0, 2).contiguous()


def _of_kernel(kernel: Kernel, left: Rows, right: Rows, _: Geometry) -> Products:
    """By the covariance of whole vectors, as the kernel gives it."""
    n, m = len(left.x), len(right.x)
    blocks = to_dense(kernel(left.x, right.x)).reshape(n, left.v.shape[-1], m, -1)
    v, w = left.v.expand(-1, n, -1), right.v.expand(-1, m, -1)
    half = torch.einsum("qni,nimj->qnmj", v, blocks)
    return {Plain(torch.einsum("qnmj,rmj->qrnm", half, w)): blocks.new_ones(1, 1)}


def _of_terms(
    summands: list["_FieldRows | _MixedRows"], left: Rows, right: Rows, geometry: Geometry
) -> Products:
    return collected(chain(*(summand(left, right, geometry) for summand in summands)))


@dataclass(frozen=True)
class _FieldRows:
    """A field times scalar kernels."""

    space: Leaf
    others: tuple[Leaf, ...]
    term: FieldTerm

    def __call__(self, left: Rows, right: Rows, geometry: Geometry) -> FormsOfTerm:
        """Terms of the same inputs share their pairs."""
        key = self.space.active_dims, self.term.factor.dims
        if key not in geometry:
            x, z = (inputs_of(self.space, rows).mT.contiguous() for rows in (left, right))
            geometry[key] = Pairs(x, z, left.v, right.v, self.term.factor.dims)
        others = [scalar_rows(leaf, left, right) for leaf in self.others]
        for form, number in self.term(geometry[key]):
            yield form, math.prod(others, start=number)


@dataclass(frozen=True)
class _MixedRows:
    """A product of scalar kernels and a constant matrix L Lᵀ."""

    leaves: tuple[Leaf, ...]
    scale: Float[Tensor, "*b"]
    root: Float[Tensor, "*b p r"]

    def __call__(self, left: Rows, right: Rows, _: Geometry) -> FormsOfTerm:
        """One form, the covariance of the outputs."""
        factors = [scalar_rows(leaf, left, right) for leaf in self.leaves]
        root = self.root.unsqueeze(-3)
        form = Plain((left.v @ root).unsqueeze(-3) @ (right.v @ root).mT.unsqueeze(-4))
        yield form, math.prod(factors, start=self.scale[..., None, None])


@singledispatch
def prepared_rows(factor: Factor, term: Term, cut: Cut) -> Callable:
    """A term with all that is computed from its hyperparameters for all rows."""
    raise NotImplementedError(f"no covariances of rows are known for {type(factor).__name__}")


@prepared_rows.register
def _(factor: FieldFactor, term: Term, cut: Cut) -> _FieldRows:
    space, *others = term.leaves
    return _FieldRows(space, tuple(others), FieldTerm.of(term, cut))


@prepared_rows.register
def _(factor: Mixing, term: Term, cut: Cut) -> _MixedRows:
    scale, root = term.outputscale.double(), factor.matrix.double()
    return _MixedRows(term.leaves, cut(scale), cut(root))


def inputs_of(leaf: Leaf, rows: Rows) -> Float[Tensor, "n k"]:
    """The inputs of a leaf."""
    return rows.x if leaf.active_dims is None else rows.x[:, list(leaf.active_dims)]


def scalar_rows(leaf: Leaf, left: Rows, right: Rows) -> Float[Tensor, "*b n m"]:
    """The covariance of a scalar kernel between the points of rows."""
    return to_dense(leaf.kernel.forward(inputs_of(leaf, left), inputs_of(leaf, right)))


def in_closed_form(kernel: Kernel) -> bool:
    """Whether the terms of a kernel are all that there is to it, and all of them are known."""
    summands = terms(kernel)
    known = all(prepared_rows.dispatch(type(term.factor)) is not _unknown for term in summands)
    known = known and all(
        _has_radial_derivatives(term.leaves[0].kernel)
        for term in summands
        if isinstance(term.factor, FieldFactor)
    )
    known = known and all(leaf.is_elementary for term in summands for leaf in term.leaves)
    return known and all(
        _has_covariance_of_terms(type(part))
        for part in kernel.modules()
        if isinstance(part, Kernel)
    )


_unknown = prepared_rows.dispatch(object)


def _has_radial_derivatives(kernel: Kernel) -> bool:
    unknown = radial_derivatives.dispatch(object)
    return kernel.has_lengthscale and radial_derivatives.dispatch(type(kernel)) is not unknown


def _has_covariance_of_terms(cls: type[Kernel]) -> bool:
    """Whether a class has the covariance of the class that its terms are registered for."""
    registered = next(base for base in cls.__mro__ if base in inner_terms.registry)
    return registered is object or cls.forward is registered.forward
