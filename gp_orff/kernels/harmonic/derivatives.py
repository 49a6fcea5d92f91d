"""Covariances of derivatives and potentials of harmonic fields: derivatives of 1/R."""

from itertools import product
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.closed_form import polynomial, radial_tensor, scalar_covariance
from gp_orff.kernels.harmonic.spectrum import HarmonicFactor
from gp_orff.kernels.tree import Term
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.potentials import Potential

_MOST = 4  # derivatives of 1/R
_ROUNDING = 1e-9  # of the coefficients of derivatives

Derivatives = dict[tuple[int, ...], Float[Tensor, "q"]]
"""For each derivative of −V, by its axes, the coefficients of the outputs."""


def harmonic_covariance(
    term: Term,
    left: Symbol,
    right: Symbol,
    x: Float[Tensor, "#n #m d"],
    z: Float[Tensor, "#n #m d"],
) -> Float[Tensor, "n m q r"]:
    """Cov[Q f(x), R f(z)] of a harmonic field f, times other kernels of other inputs.

    Raises:
        NotImplementedError: a symbol that is neither a polynomial in derivatives nor a potential,
            or more than two derivatives of the field altogether.
    """
    space, *others = term.leaves
    dims = list(space.columns(x.shape[-1]))
    symbols = [_derivatives(symbol) for symbol in (left, right)]
    outputs = [symbol.num_outputs(HarmonicFactor.num_outputs) for symbol in (left, right)]
    total = x.new_zeros(*torch.broadcast_shapes(x.shape[:-1], z.shape[:-1]), *outputs)
    sources = space.spectrum.sources
    lags = sources.lags(x[..., dims], z[..., dims])
    signs = sources.signs(lags)
    tensors = {}
    for (axes, a), (others_axes, b) in product(*(found.items() for found in symbols)):
        order = len(axes) + len(others_axes)
        if order not in tensors:
            tensors[order] = _of_inverse_distance(lags, order, sources.amplitudes)
        sign = prod(
            [*(signs[0][i] for i in axes), *(signs[1][i] for i in others_axes)],
            start=lags.new_ones(()),
        )
        values = tensors[order][(..., *axes, *others_axes)][..., None, None]
        total = total + sign * values * torch.outer(a.to(lags), b.to(lags))
    scale = term.outputscale
    for leaf in others:
        columns = list(leaf.columns(x.shape[-1]))
        scale = scale * scalar_covariance(leaf.kernel, (x - z)[..., columns])[..., None, None]
    return scale * total


def _derivatives(symbol: Symbol) -> Derivatives:
    """A symbol of f = −∇V as derivatives of −V: ω^α stands for (−i∂)^α."""
    if isinstance(symbol, Potential):
        return {(): torch.ones(1)}
    if symbol.order < 0:
        raise NotImplementedError(f"{type(symbol).__name__} of a harmonic field")
    p = HarmonicFactor.num_outputs
    coefficients = polynomial(lambda omega: symbol(omega, p), p, symbol.order)
    found = {
        (*monomial, i): ((-1j) ** symbol.order * coefficient[:, i]).real
        for monomial, coefficient in coefficients.items()
        for i in range(p)
        if coefficient[:, i].abs().max() > _ROUNDING
    }
    return {} if _vanishes(found) else found


def _vanishes(derivatives: Derivatives) -> bool:
    """Whether derivatives of all waves e^{i⟨k,x⟩ − |k|z} are zero, as the curl of the gradient and
    the divergence are."""
    angle = torch.linspace(0.1, 3.0, 7, dtype=torch.float64)
    wave = torch.stack([1j * angle.cos(), 1j * angle.sin(), -torch.ones_like(angle)], dim=-1)
    images = [
        torch.outer(wave[:, list(axes)].prod(-1), coefficient.to(wave))
        for axes, coefficient in derivatives.items()
    ]
    return not images or bool(sum(images).abs().max() < _ROUNDING)


def _of_inverse_distance(
    lags: Float[Tensor, "J n m 3"], order: int, amplitudes: Float[Tensor, "J"]
) -> Float[Tensor, "n m ..."]:
    """The derivatives of Σ_j a_j / R_j of one order, with one axis for each derivative.

    With s = R², κ(s) = s^{−1/2} has the derivatives κ^{(i)} = −½ · −3/2 ⋯ s^{−1/2 − i}.
    """
    if order > _MOST:
        raise NotImplementedError(f"derivatives of order {order} of its potential")
    s = lags.square().sum(-1)
    amplitudes = amplitudes[..., None, None]
    if not order:
        return (amplitudes * s.rsqrt()).sum(0)
    factors = (prod(-0.5 - j for j in range(i)) for i in range(1, order + 1))
    kappas = [amplitudes * factor * s ** (-0.5 - i) for i, factor in enumerate(factors, start=1)]
    metric = torch.eye(3).to(lags).expand(*lags.shape, 3)
    return radial_tensor(kappas, lags, metric, order).sum(0)
