"""Covariances of the fields of a scalar kernel k(x, z) = κ(s), s = τᵀΛτ, between pairs of points.

With u = Λτ, −∇∇ᵀk = −2κ′Λ − 4κ″u uᵀ. Numbers of pairs are matrices (n, m); inputs, and directions v
and w, come before them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, singledispatch
from itertools import product

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.factors import FieldFactor, Gradient, Solenoidal
from gp_orff.kernels.tree import Term

Forms = tuple[Float[Tensor, "*b q r #n #m"], Float[Tensor, "*b q r n m"]]
"""What multiplies −2κ′ and −4κ″; vᵀΛw and (vᵀu)(uᵀw) of a curl-free field."""


@dataclass(frozen=True)
class Pairs:
    """Lags τ over the inputs of a potential, and directions v and w of the field at both ends."""

    tau: Float[Tensor, "*b k n m"]
    v: Float[Tensor, "q #n d"]  # one n for directions that are the same at every point
    w: Float[Tensor, "r #m d"]
    unit_forms: dict[tuple[int, ...] | None, Forms] = field(default_factory=dict)

    @cached_property
    def ones(self) -> Float[Tensor, "k"]:
        """The metric of unit lengthscales; what depends on no other is computed once."""
        return self.tau.new_ones(self.tau.shape[-3])

    def squared_lengths(self, metric: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n m"]:
        """τᵀMτ, with M = diag `metric`."""
        if metric is self.ones:
            return self._unit_squares
        squares = self.tau.square().flatten(-2)
        return (metric.unsqueeze(-2) @ squares).squeeze(-2).unflatten(-1, self.tau.shape[-2:])

    @cached_property
    def _unit_squares(self) -> Float[Tensor, "*b n m"]:
        return self.tau.square().sum(-3)

    @cached_property
    def inner(self) -> Float[Tensor, "q r #n #m"]:
        """vᵀw."""
        return self.v.unsqueeze(-3) @ self.w.mT

    def forms(self, metric: Float[Tensor, "*b k"], dims: tuple[int, ...] | None) -> Forms:
        """vᵀMw and (vᵀMτ)(τᵀMw); `dims` are the components of directions that τ has, None: all."""
        if metric is not self.ones:
            return self._forms(metric, dims)
        if dims not in self.unit_forms:
            self.unit_forms[dims] = self._forms(metric, dims)
        return self.unit_forms[dims]

    def _forms(self, metric: Float[Tensor, "*b k"], dims: tuple[int, ...] | None) -> Forms:
        v, w = (side if dims is None else side[..., list(dims)] for side in (self.v, self.w))
        u = metric[..., None, None] * self.tau
        left = _product(v.movedim(-1, -2).unsqueeze(-1), u).unsqueeze(-3)
        right = _product(w.movedim(-1, -2).unsqueeze(-2), u).unsqueeze(-4)
        return (v * metric[..., None, None, :]).unsqueeze(-3) @ w.mT, left * right


def _product(v: Float[Tensor, "q k #n #m"], u: Float[Tensor, "*b k n m"]) -> Tensor:
    """vᵀu, (*b, q, n, m)."""
    terms = (v[:, i] * u[..., None, i, :, :] for i in range(v.shape[1]))
    return sum(terms, next(terms))


@singledispatch
def forms(factor: FieldFactor, pairs: Pairs, metric: Float[Tensor, "*b k"]) -> Forms:
    """What multiplies −2κ′ and −4κ″ in vᵀK(τ)w, for fields with a factor B(ω)."""
    raise NotImplementedError(f"no covariance is known for {type(factor).__name__}")


@forms.register
def _(factor: Gradient, pairs: Pairs, metric: Tensor) -> Forms:
    return pairs.forms(metric, factor.dims)


@forms.register
def _(factor: Solenoidal, pairs: Pairs, metric: Tensor) -> Forms:
    first, second = pairs.forms(metric, factor.dims)
    trace = pairs.squared_lengths(metric.square())[..., None, None, :, :]
    total = metric.sum(-1)[..., None, None, None, None]
    return total * pairs.inner - first, trace * pairs.inner - second


Cut = Callable[[Tensor], Tensor]
"""Replaces a tensor that is computed once, from hyperparameters, by a leaf of another graph."""


@dataclass(frozen=True)
class FieldTerm:
    """A field whose potential has a scaled scalar kernel, with its hyperparameters as tensors."""

    kernel: Kernel
    factor: FieldFactor
    metric: Float[Tensor, "*b #k"]  # ℓ⁻²: one number if all inputs have the same lengthscale
    first: Float[Tensor, "*b"]  # the factor of κ′
    second: Float[Tensor, "*b"]  # the factor of κ″

    @classmethod
    def of(cls, term: Term, cut: Cut = lambda tensor: tensor) -> "FieldTerm":
        """Of a term.

        With one lengthscale, powers of it are in the factors of κ′ and κ″, and the forms do not
        depend on hyperparameters.
        """
        kernel, scale = term.leaves[0].kernel, term.outputscale
        if not kernel.has_lengthscale:
            radial_derivatives.dispatch(object)(kernel, None)  # raises, and lists the known ones
        metric = kernel.lengthscale.squeeze(-2).pow(-2)
        power = metric[..., 0] if metric.shape[-1] == 1 else 1
        first, second = -2 * scale * power, -4 * scale * power**2
        return cls(kernel, term.factor, cut(metric), cut(first), cut(second))

    def __call__(self, pairs: Pairs) -> Float[Tensor, "*b q r n m"]:
        """vᵀK(τ)w."""
        if self.metric.shape[-1] == 1:
            s = self.metric.unsqueeze(-1) * pairs.squared_lengths(pairs.ones)
            inner, outer = forms(self.factor, pairs, pairs.ones)
        else:
            s = pairs.squared_lengths(self.metric)
            inner, outer = forms(self.factor, pairs, self.metric)
        first, second = radial_derivatives(self.kernel, s)
        first = self.first[..., None, None] * first
        return Combination.apply(first, self.second[..., None, None] * second, inner, outer)


class Combination(Function):
    """a F + b S, with numbers a and b of every pair, for every pair of directions.

    The derivatives in a and b sum over directions, without matrices of products for all of them.
    """

    @staticmethod
    def forward(
        ctx,
        a: Float[Tensor, "*b n m"],
        b: Float[Tensor, "*b n m"],
        first: Float[Tensor, "*b q r #n #m"],
        second: Float[Tensor, "*b q r n m"],
    ) -> Float[Tensor, "*b q r n m"]:
        ctx.save_for_backward(a, b, first, second)
        a, b = (kappa[..., None, None, :, :] for kappa in (a, b))
        return torch.addcmul(a * first, b, second)

    @staticmethod
    def backward(ctx, gradient):
        tensors = ctx.saved_tensors
        a, b, first, second = tensors
        found = [
            (lambda: _over_directions(gradient, first)),
            (lambda: _over_directions(gradient, second)),
            (lambda: gradient * a[..., None, None, :, :]),
            (lambda: gradient * b[..., None, None, :, :]),
        ]
        return tuple(
            own().sum_to_size(tensor.shape) if needed else None
            for own, tensor, needed in zip(found, tensors, ctx.needs_input_grad, strict=True)
        )


def _over_directions(
    gradient: Float[Tensor, "*b q r n m"], form: Float[Tensor, "*b q r #n #m"]
) -> Float[Tensor, "*b n m"]:
    """Σ_qr G_qr ∘ F_qr."""
    pairs = product(*map(range, form.shape[-4:-2]))
    parts = (gradient[..., q, r, :, :] * form[..., q, r, :, :] for q, r in pairs)
    return sum(parts, next(parts))
