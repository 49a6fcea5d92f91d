"""Covariances of pairs of observed values vᵀf(x) in closed form."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, singledispatch
from itertools import chain

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.base import about_their_middle, is_traced
from gp_orff.kernels.derivatives import radial_derivatives
from gp_orff.kernels.tree import (
    Factor,
    FieldFactor,
    Gradient,
    Leaf,
    Mixing,
    Solenoidal,
    Term,
    inner_terms,
    terms,
)

# Covariances as sums Σ c Φ of coefficients c of pairs of points times forms Φ of directions v, w.
#
# If terms of a kernel have the same form, their coefficients are added first. The coefficients of
# pairs are matrices (n, m). Axes of directions precede these two axes.
#
# If only some components or directions are observed, this representation avoids the covariance of
# whole vectors, which has p² numbers for each pair of points. If all inputs have one lengthscale,
# hyperparameters change c only. The forms of a tile are then computed once, and an evaluation of
# the evidence only computes κ′ and κ″ of squared distances, and sums.
#
# The gradient of Σ c Φ is computed form by form (`cotangents`), so that the graph has no products
# for all pairs of directions. A form has three methods. `factors` returns its tensors. `added` adds
# c Φ to a total (*b, q, r, n, m). `cotangents` returns the derivatives of Σ G ∘ c Φ with respect to
# c and to every factor, or None if a factor needs none. Sums over broadcast axes follow later.


@dataclass(frozen=True, eq=False)
class Plain:
    """A form Φ that is stored, with one value for all pairs of points or one for each pair."""

    value: Float[Tensor, "*b q r #n #m"]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return (self.value,)

    def added(self, total: Tensor, number: Tensor) -> Tensor:
        return torch.addcmul(total, _of_pairs(number), self.value)

    def cotangents(self, number: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # `_gradients` sums over broadcast axes, for all forms.
        of_value = _of_pairs(number) * gradient if self.value.requires_grad else None
        return _sum(_sum(gradient * self.value, -4), -3), of_value


@dataclass(frozen=True, eq=False)
class Outer:
    """A form Φ = l rᵀ, where l belongs to the left directions and r to the right ones."""

    left: Float[Tensor, "*b q n m"]
    right: Float[Tensor, "*b r n m"]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def added(self, total: Tensor, number: Tensor) -> Tensor:
        left = number.unsqueeze(-3) * self.left
        return torch.addcmul(total, left.unsqueeze(-3), self.right.unsqueeze(-4))

    def cotangents(self, number: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_left = _sum(gradient * self.right.unsqueeze(-4), -3)
        of_number = _sum(to_left * self.left, -3)
        if not self.left.requires_grad:
            return of_number, None, None
        to_right = _sum(gradient * self.left.unsqueeze(-3), -4)
        return of_number, number.unsqueeze(-3) * to_left, number.unsqueeze(-3) * to_right


Form = Plain | Outer
Products = Mapping[Form, Float[Tensor, "*b #n #m"]]  # the number c of every form Φ in Σ c Φ


def _of_pairs(number: Float[Tensor, "*b #n #m"]) -> Float[Tensor, "*b 1 1 #n #m"]:
    return number[..., None, None, :, :]


def _sum(values: Tensor, axis: int) -> Tensor:
    """Sum over an axis of directions, without a copy if there is one direction."""
    return values.squeeze(axis) if values.shape[axis] == 1 else values.sum(axis)


def collected(products: Iterable[tuple[Form, Float[Tensor, "*b #n #m"]]]) -> Products:
    """Return the sum of the coefficients for every form."""
    numbers: dict[Form, Tensor] = {}
    for form, number in products:
        numbers[form] = numbers[form] + number if form in numbers else number
    return numbers


def total(products: Products) -> Float[Tensor, "*b q r n m"]:
    """Return Σ c Φ, which can be differentiated any number of times."""
    if is_traced():
        return _added(products)
    return _Total.apply(products, *_tensors(products))


def cotangents(
    products: Products, gradient: Float[Tensor, "*b q r n m"]
) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of Σ c Φ that require gradients, and the derivatives of Σ G ∘ c Φ."""
    pairs = zip(_tensors(products), _gradients(products, gradient), strict=True)
    return [(tensor, own) for tensor, own in pairs if tensor.requires_grad]


class _Total(Function):
    """The sum Σ c Φ, whose derivatives store no products for all pairs of directions."""

    @staticmethod
    def forward(ctx, products: Products, *tensors: Tensor) -> Tensor:
        ctx.products = products
        return _added(products)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return None, *_gradients(ctx.products, gradient)


def _added(products: Products) -> Float[Tensor, "*b q r n m"]:
    value = next(iter(products.values())).new_zeros(())
    for form, number in products.items():
        value = form.added(value, number)
    return value


def _tensors(products: Products) -> list[Tensor]:
    return [t for form, number in products.items() for t in (number, *form.factors)]


def _gradients(products: Products, gradient: Tensor) -> list[Tensor | None]:
    found = [own for form, number in products.items() for own in form.cotangents(number, gradient)]
    return [
        None if own is None else own.sum_to_size(tensor.shape)
        for tensor, own in zip(_tensors(products), found, strict=True)
    ]


# Covariances of fields of a scalar kernel k(x, z) = κ(s), s = τᵀΛτ, between pairs of points.
#
# With u = Λτ, −∇∇ᵀk = −2κ′Λ − 4κ″u uᵀ. Coefficients of pairs are matrices (n, m). The axes of
# inputs, and of the directions v and w, precede these two axes.
#
# 1. `Pairs` has the lags τ, and the products vᵀw and vᵀτ of directions. They depend on positions
#    only and are cached.
# 2. `field_forms` computes κ′ and κ″ at s, times the outputscale and powers of the lengthscale.
# 3. `products` combines both. A curl-free field has two forms, vᵀΛw and (vᵀΛτ)(τᵀΛw). A
#    divergence-free field subtracts them from a multiple of vᵀw.
#
# The sum of a curl-free and a divergence-free field on the same inputs has the same three forms.


@dataclass(frozen=True)
class Pairs:
    """Two sets of inputs of a potential, and directions v and w of the field at these inputs.

    Attributes:
        x: (*b, k, n), the inputs at n points.
        z: (*b, k, m), the inputs at m points.
        v: (q, #n, d), directions at x; #n is 1 if they are equal at all points.
        w: (r, #m, d), directions at z.
        dims: the k components of the field that belong to these inputs; None for all.
    """

    x: Float[Tensor, "*b k n"]
    z: Float[Tensor, "*b k m"]
    v: Float[Tensor, "q #n d"]
    w: Float[Tensor, "r #m d"]
    dims: tuple[int, ...] | None

    @cached_property
    def ones(self) -> Float[Tensor, "k"]:
        """The metric of unit lengthscales, for which forms are cached."""
        return self.x.new_ones(self.x.shape[-2])

    @cached_property
    def inner(self) -> Plain:
        """The form vᵀw."""
        return Plain(self.v.unsqueeze(-3) @ self.w.mT)

    def squared_lengths(self, metric: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n m"]:
        """Return τᵀMτ with M = diag `metric`."""
        if metric is self.ones:
            return self._unit_squares
        return _weighted(metric.unsqueeze(-2), self._squares).squeeze(-3)

    def forms(self, metric: Float[Tensor, "*b k"]) -> tuple[Form, Form]:
        """Return vᵀMw and (vᵀMτ)(τᵀMw), the forms of −2κ′ and −4κ″ in a curl-free field."""
        return self._unit_forms if metric is self.ones else self._forms(metric)

    @cached_property
    def _tau(self) -> Float[Tensor, "*b k n m"]:
        return self.x.unsqueeze(-1) - self.z.unsqueeze(-2)

    @cached_property
    def _squares(self) -> Float[Tensor, "*b k n m"]:
        """The squares τ∘τ, at least as large as the rounding of vᵀτ, so that κ″ is finite."""
        # κ″ of a kernel such as Matérn 3/2 is infinite at s = 0, where it multiplies (vᵀτ)² = 0.
        extent = torch.maximum(*(x.detach().abs().amax((-2, -1)) for x in self._centred))
        return self._tau.square().clamp_min((1e-14 * extent).square()[..., None, None, None])

    @cached_property
    def _unit_squares(self) -> Float[Tensor, "*b n m"]:
        return self._squares.sum(-3)

    @cached_property
    def _unit_forms(self) -> tuple[Form, Form]:
        first, second = self._forms(self.ones)
        return (self.inner if self.dims is None else first), second

    def _forms(self, metric: Float[Tensor, "*b k"]) -> tuple[Form, Form]:
        v, w = self.v, self.w
        if self.dims is not None:
            v, w = v[..., list(self.dims)], w[..., list(self.dims)]
        scaled, other = (side * metric[..., None, None, :] for side in (v, w))
        outer = Outer(self._along_left(scaled), self._along_right(other))
        return Plain(scaled.unsqueeze(-3) @ w.mT), outer

    def _along_left(self, v: Float[Tensor, "*b q #n k"]) -> Float[Tensor, "*b q n m"]:
        """Return vᵀτ, by exact lags if all points have the same v."""
        if v.shape[-2] == 1:
            return _weighted(v.squeeze(-2), self._tau)
        # This is a product of matrices, without lags. The points are centred, so that its rounding
        # is relative to their extent instead of their distance from the origin.
        x, z = self._centred
        return v @ -z.unsqueeze(-3) + (v * x.mT.unsqueeze(-3)).sum(-1, keepdim=True)

    def _along_right(self, w: Float[Tensor, "*b r #m k"]) -> Float[Tensor, "*b r n m"]:
        """Return τᵀw."""
        if w.shape[-2] == 1:
            return _weighted(w.squeeze(-2), self._tau)
        x, z = self._centred
        return x.mT.unsqueeze(-3) @ w.mT - (w * z.mT.unsqueeze(-3)).sum(-1).unsqueeze(-2)

    @cached_property
    def _centred(self) -> tuple[Float[Tensor, "*b k n"], Float[Tensor, "*b k m"]]:
        centre = self.x.mean(-1, keepdim=True)
        return self.x - centre, self.z - centre


def _weighted(
    weights: Float[Tensor, "*b q k"], values: Float[Tensor, "*b k n m"]
) -> Float[Tensor, "*b q n m"]:
    """Return Σ_k w_qk a_k for weights w and values a."""
    return (weights @ values.flatten(-2)).unflatten(-1, values.shape[-2:])


FormsOfTerm = Iterator[tuple[Form, Float[Tensor, "*b n m"]]]


@singledispatch
def products(
    factor: FieldFactor, pairs: Pairs, metric: Float[Tensor, "*b k"], a: Tensor, b: Tensor
) -> FormsOfTerm:
    """Yield the forms of vᵀK(τ)w and their coefficients, for fields with a factor B(ω).

    Args:
        factor: B(ω).
        pairs: the lags and directions.
        metric: the diagonal of Λ.
        a: −2κ′, (*b, n, m).
        b: −4κ″, (*b, n, m).
    """
    raise NotImplementedError(f"no covariance is known for {type(factor).__name__}")


@products.register
def _(factor: Gradient, pairs: Pairs, metric: Tensor, a: Tensor, b: Tensor) -> FormsOfTerm:
    first, second = pairs.forms(metric)
    yield first, a
    yield second, b


@products.register
def _(factor: Solenoidal, pairs: Pairs, metric: Tensor, a: Tensor, b: Tensor) -> FormsOfTerm:
    first, second = pairs.forms(metric)
    trace = metric.sum(-1)[..., None, None]
    lengths = pairs.squared_lengths(metric if metric is pairs.ones else metric.square())
    yield pairs.inner, torch.addcmul(trace * a, lengths, b)
    yield first, -a
    yield second, -b


# A `Cut` replaces a tensor that is computed once from hyperparameters by a leaf of another graph.
Cut = Callable[[Tensor], Tensor]


def field_forms(term: Term, cut: Cut = lambda tensor: tensor) -> Callable[[Pairs], FormsOfTerm]:
    """Return the forms of vᵀK(τ)w and their coefficients as a function of pairs.

    `cut` is applied once to the tensors that are computed from the hyperparameters of the term. If
    there is one lengthscale, its powers are factors of κ′ and κ″, and the forms do not depend on
    hyperparameters.
    """
    kernel, scale = term.leaves[0].kernel, term.outputscale
    if not kernel.has_lengthscale:
        radial_derivatives.dispatch(object)(kernel, None)  # raises an error
    rates = kernel.lengthscale.squeeze(-2).pow(-2)  # ℓ⁻², one for all inputs or one for each
    one = rates.shape[-1] == 1
    power = rates[..., 0] if one else 1
    numbers = rates, -2 * scale * power, -4 * scale * power**2
    rates, of_first, of_second = (cut(number) for number in numbers)

    def forms(pairs: Pairs) -> FormsOfTerm:
        metric = pairs.ones if one else rates
        s = pairs.squared_lengths(metric)
        first, second = radial_derivatives(kernel, rates.unsqueeze(-1) * s if one else s)
        a, b = of_first[..., None, None] * first, of_second[..., None, None] * second
        return products(term.factor, pairs, metric, a, b)

    return forms


# The covariance of observed values, which are components of a field along directions.


@dataclass(frozen=True)
class Rows:
    """The values v_qnᵀ f(x_n), with q values at each of n points.

    Attributes:
        x: (n, d), the points.
        v: (q, #n, p), the directions; #n is 1 if they are equal at all points.
    """

    x: Float[Tensor, "n d"]
    v: Float[Tensor, "q #n p"]

    def __getitem__(self, points: slice) -> "Rows":
        return Rows(self.x[points], self.v if self.v.shape[-2] == 1 else self.v[:, points])

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.v) * len(self.x)


# A cache of everything that depends on two sets of rows, but not on hyperparameters.
Geometry = dict[tuple, Pairs]
RowProducts = Callable[[Rows, Rows, Geometry], Products]
RowForms = Callable[[Rows, Rows, Geometry], FormsOfTerm]


def row_products(kernel: Kernel, cut: Cut = lambda tensor: tensor) -> RowProducts:
    """Return a function that computes the covariance of two sets of rows, as a sum Σ c Φ.

    For field kernels and separable kernels, their sums, and their products with scalar kernels, it
    does not compute the covariance of whole vectors.

    Args:
        kernel: the kernel, at its current hyperparameters.
        cut: a function that is applied once to every tensor computed from hyperparameters.
    """
    summands = terms(kernel)
    if not _have_closed_forms(kernel, summands):
        return partial(_of_kernel, kernel)
    prepared = [prepared_rows(term.factor, term, cut) for term in summands]
    return lambda *rows: collected(chain(*(forms(*rows) for forms in prepared)))


def row_covariance(kernel: Kernel) -> Callable[..., Float[Tensor, "*b n*q m*r"]]:
    """Return a function that computes the covariance matrix of two sets of rows.

    The matrix is ordered point by point, and differentiable in the hyperparameters. A batch of
    kernels is possible if the covariance has a closed form.
    """
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
    """Return the elements of a matrix of rows for every pair of directions."""
    q, r = len(left.v), len(right.v)
    return matrix.unflatten(0, (-1, q)).unflatten(2, (-1, r)).permute(1, 3, 0, 2).contiguous()


def _of_kernel(kernel: Kernel, left: Rows, right: Rows, _: Geometry) -> Products:
    """Compute the covariance of rows from the covariance of whole vectors."""
    n, m = len(left.x), len(right.x)
    blocks = to_dense(kernel(left.x, right.x)).reshape(n, left.v.shape[-1], m, -1)
    v, w = left.v.expand(-1, n, -1), right.v.expand(-1, m, -1)
    half = torch.einsum("qni,nimj->qnmj", v, blocks)
    return {Plain(torch.einsum("qnmj,rmj->qrnm", half, w)): blocks.new_ones(1, 1)}


@singledispatch
def prepared_rows(factor: Factor, term: Term, cut: Cut) -> RowForms:
    """Return a function that computes the forms of a term, after preparing its hyperparameters."""
    raise NotImplementedError(f"no covariances of rows are known for {type(factor).__name__}")


@prepared_rows.register
def _(factor: FieldFactor, term: Term, cut: Cut) -> RowForms:
    """Prepare a field times scalar kernels; terms with the same inputs share their pairs."""
    (space, *others), of_pairs = term.leaves, field_forms(term, cut)
    key = space.active_dims, factor.dims

    def forms(left: Rows, right: Rows, geometry: Geometry) -> FormsOfTerm:
        if key not in geometry:
            x, z = (inputs_of(space, rows).mT.contiguous() for rows in (left, right))
            geometry[key] = Pairs(x, z, left.v, right.v, factor.dims)
        return multiplied(of_pairs(geometry[key]), others, left, right)

    return forms


@prepared_rows.register
def _(factor: Mixing, term: Term, cut: Cut) -> RowForms:
    """Prepare a product of scalar kernels and a constant matrix L Lᵀ, which has one form."""
    scale, root = cut(term.outputscale.double()), cut(factor.matrix.double())

    def forms(left: Rows, right: Rows, _: Geometry) -> FormsOfTerm:
        v, w = (rows.v @ root.unsqueeze(-3) for rows in (left, right))
        form = Plain(v.unsqueeze(-3) @ w.mT.unsqueeze(-4))
        return multiplied([(form, scale[..., None, None])], term.leaves, left, right)

    return forms


def multiplied(
    forms: Iterable[tuple[Form, Tensor]], leaves: Sequence[Leaf], left: Rows, right: Rows
) -> FormsOfTerm:
    """Yield forms and their coefficients, multiplied by scalar kernels of the points of rows."""
    inputs = [(leaf.kernel, inputs_of(leaf, left), inputs_of(leaf, right)) for leaf in leaves]
    factors = [to_dense(of[0].forward(*about_their_middle(*of))) for of in inputs]
    for form, number in forms:
        yield form, math.prod(factors, start=number)


def inputs_of(leaf: Leaf, rows: Rows) -> Float[Tensor, "n k"]:
    """Return the inputs of a leaf."""
    return rows.x if leaf.active_dims is None else rows.x[:, list(leaf.active_dims)]


def in_closed_form(kernel: Kernel) -> bool:
    """Return whether the covariance of a kernel is the sum of its terms, all in closed form."""
    return _have_closed_forms(kernel, terms(kernel))


def _have_closed_forms(kernel: Kernel, summands: Sequence[Term]) -> bool:
    known = all(_is_known(term) for term in summands)
    known = known and all(leaf.is_elementary for term in summands for leaf in term.leaves)
    parts = (kernel, *kernel.sub_kernels())
    return known and all(_has_covariance_of_terms(type(part)) for part in parts)


def _is_known(term: Term) -> bool:
    """Return whether a term has a covariance of rows in closed form."""
    if not (term.factor.is_gradient or term.factor.is_solenoidal):
        return prepared_rows.dispatch(type(term.factor)) is not prepared_rows.dispatch(object)
    kernel, unknown = term.leaves[0].kernel, radial_derivatives.dispatch(object)
    return kernel.has_lengthscale and radial_derivatives.dispatch(type(kernel)) is not unknown


def _has_covariance_of_terms(cls: type[Kernel]) -> bool:
    """Return whether a class has the covariance of the class for which its terms are registered."""
    registered = next(base for base in cls.__mro__ if base in inner_terms.registry)
    return registered is object or cls.forward is registered.forward
