"""Covariances of the fields of a scalar kernel k(x, z) = κ(s), s = τᵀΛτ, between pairs of points.

With u = Λτ, −∇∇ᵀk = −2κ′Λ − 4κ″u uᵀ. Numbers of pairs are matrices (n, m); inputs, and directions v
and w, come before them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, singledispatch

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.factors import FieldFactor, Gradient, Solenoidal
from gp_orff.kernels.pairs.forms import Form, Outer, Plain
from gp_orff.kernels.tree import Term

_COINCIDENT = 1e-14  # lag over extent: rounding of vᵀτ does not count at it, however large κ″ is


@dataclass(frozen=True)
class Pairs:
    """Inputs of a potential at both ends, and directions v and w of the field there."""

    x: Float[Tensor, "*b k n"]
    z: Float[Tensor, "*b k m"]
    v: Float[Tensor, "q #n d"]  # one n for directions that are the same at every point
    w: Float[Tensor, "r #m d"]
    dims: tuple[int, ...] | None  # the components of directions that x and z have; None: all

    @cached_property
    def ones(self) -> Float[Tensor, "k"]:
        """The metric of unit lengthscales; what depends on no other is computed once."""
        return self.x.new_ones(self.x.shape[-2])

    @cached_property
    def inner(self) -> Plain:
        """vᵀw."""
        return Plain(self.v.unsqueeze(-3) @ self.w.mT)

    def squared_lengths(self, metric: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n m"]:
        """τᵀMτ, with M = diag `metric`."""
        if metric is self.ones:
            return self._unit_squares
        return _weighted(metric.unsqueeze(-2), self._squares).squeeze(-3)

    def forms(self, metric: Float[Tensor, "*b k"]) -> tuple[Form, Form]:
        """vᵀMw and (vᵀMτ)(τᵀMw), which multiply −2κ′ and −4κ″ in a curl-free field."""
        return self._unit_forms if metric is self.ones else self._forms(metric)

    @cached_property
    def _tau(self) -> Float[Tensor, "*b k n m"]:
        return self.x.unsqueeze(-1) - self.z.unsqueeze(-2)

    @cached_property
    def _squares(self) -> Float[Tensor, "*b k n m"]:
        """τ∘τ; no smaller than what rounding of vᵀτ may be, so that κ″ stays finite beside it."""
        extent = torch.maximum(*(x.detach().abs().amax((-2, -1)) for x in self._centred))
        return self._tau.square().clamp_min((_COINCIDENT * extent).square()[..., None, None, None])

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
        """vᵀτ, as a product of matrices; with one v, of exact lags."""
        if v.shape[-2] == 1:
            return _weighted(v.squeeze(-2), self._tau)
        x, z = self._centred
        return v @ -z.unsqueeze(-3) + (v * x.mT.unsqueeze(-3)).sum(-1, keepdim=True)

    def _along_right(self, w: Float[Tensor, "*b r #m k"]) -> Float[Tensor, "*b r n m"]:
        """τᵀw."""
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
    """Σ_k w_qk a_k."""
    return (weights @ values.flatten(-2)).unflatten(-1, values.shape[-2:])


FormsOfTerm = Iterator[tuple[Form, Float[Tensor, "*b n m"]]]


@singledispatch
def products(
    factor: FieldFactor, pairs: Pairs, metric: Float[Tensor, "*b k"], a: Tensor, b: Tensor
) -> FormsOfTerm:
    """The forms of vᵀK(τ)w and their numbers, for fields with a factor B(ω).

    Args:
        factor: B(ω).
        pairs: lags and directions.
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

    def __call__(self, pairs: Pairs) -> FormsOfTerm:
        """The forms of vᵀK(τ)w and their numbers."""
        if self.metric.shape[-1] == 1:
            metric = pairs.ones
            s = self.metric.unsqueeze(-1) * pairs.squared_lengths(metric)
        else:
            metric = self.metric
            s = pairs.squared_lengths(metric)
        first, second = radial_derivatives(self.kernel, s)
        a, b = self.first[..., None, None] * first, self.second[..., None, None] * second
        return products(self.factor, pairs, metric, a, b)
