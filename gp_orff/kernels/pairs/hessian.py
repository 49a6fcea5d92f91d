"""Covariances of the fields of a scalar kernel k(x, z) = κ(s), s = τᵀΛτ, between pairs of points.

With u = Λτ, −∇∇ᵀk = −2κ′Λ − 4κ″u uᵀ. Numbers of pairs are matrices (n, m); inputs, and directions v
and w, come before them.
"""

from dataclasses import dataclass
from functools import singledispatch

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.closed_form import radial_derivatives
from gp_orff.kernels.factors import FieldFactor, Gradient, Solenoidal

Forms = tuple[Float[Tensor, "*b q r #n #m"], Float[Tensor, "*b q r n m"]]
"""What multiplies −2κ′ and −4κ″; vᵀΛw and (vᵀu)(uᵀw) of a curl-free field."""


@dataclass(frozen=True)
class Pairs:
    """Lags τ over the inputs of a potential, and directions v and w of the field at both ends."""

    tau: Float[Tensor, "*b k n m"]
    v: Float[Tensor, "q #n d"]  # one n for directions that are the same at every point
    w: Float[Tensor, "r #m d"]

    def squared_lengths(self, metric: Float[Tensor, "*b k"]) -> Float[Tensor, "*b n m"]:
        """τᵀMτ, with M = diag `metric`."""
        squares = self.tau.square().flatten(-2)
        return (metric.unsqueeze(-2) @ squares).squeeze(-2).unflatten(-1, self.tau.shape[-2:])

    @property
    def inner(self) -> Float[Tensor, "q r #n #m"]:
        """vᵀw."""
        return self.v.unsqueeze(-3) @ self.w.mT

    def forms(self, metric: Float[Tensor, "*b k"], dims: tuple[int, ...] | None) -> Forms:
        """vᵀMw and (vᵀMτ)(τᵀMw); `dims` are the components of directions that τ has, None: all."""
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


def field_covariance(
    kernel: Kernel,
    factor: FieldFactor,
    scale: Float[Tensor, "*b"],
    pairs: Pairs,
) -> Float[Tensor, "*b q r n m"]:
    """vᵀK(τ)w of a field whose potential has the covariance `scale` times a scalar kernel.

    With one lengthscale for all inputs, only κ′ and κ″ of each pair depend on hyperparameters.
    """
    metric = kernel.lengthscale.squeeze(-2).to(pairs.tau).pow(-2)
    inputs = pairs.tau.shape[-3]
    if metric.shape[-1] == 1:
        ones = pairs.tau.new_ones(inputs)
        s = metric.unsqueeze(-1) * pairs.squared_lengths(ones)
        first, second = forms(factor, pairs, ones)
        factors = -2 * scale * metric[..., 0], -4 * scale * metric[..., 0].square()
    else:
        s = pairs.squared_lengths(metric)
        first, second = forms(factor, pairs, metric)
        factors = -2 * scale, -4 * scale
    kappas = (
        (c[..., None, None] * kappa)[..., None, None, :, :]
        for c, kappa in zip(factors, radial_derivatives(kernel, s), strict=True)
    )
    return torch.addcmul(next(kappas) * first, next(kappas), second)
