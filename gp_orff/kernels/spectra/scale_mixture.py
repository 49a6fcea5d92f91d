"""Integrals over Gamma-distributed scales, whose quadrature follows peak and width.

All are of e^{−a φ(t) − b φ(−t)} with φ(t) = e^t − 1 − t: one at its peak t = 0, it falls like a
Gaussian of variance 1/(a + b) where a + b is large, and like exponentials and doubly exponentially
where it is small. Gauss-Legendre nodes between the two points where it is e^{−38} crowd where the
fall is steep.
"""

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_NODES = 72  # 1e-11 where a b is above 1e-16
_NATS = 38.0  # below the peak, where integrals end
_SETTLED = 20.0  # from where on Stirling's series is used


def log_integral(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log ∫ exp(−a φ(t) − b φ(−t)) dt = log 2(b/a)^{(a−b)/2} K_{a−b}(2√ab) e^{a+b}."""
    with torch.no_grad():
        low, high = _edge(a, b), _edge(b, a)
    t, weights = _legendre(-low, high, _NODES)
    fall = a.unsqueeze(-1) * (t.expm1() - t) + b.unsqueeze(-1) * ((-t).expm1() + t)
    return ((-fall).exp() * weights).sum(-1).log()


def log_integral_alone(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """The same for b = 0: log Γ(a) e^a a^{−a}, by Stirling's formula ½ log(2π/a) + R(a)."""
    return 0.5 * (2 * math.pi / a).log() + stirling_remainder(a)


def stirling_remainder(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """R(a) = log Γ(a) − (a − ½) log a + a − ½ log 2π, without loss where a is large."""
    large = a.clamp_min(_SETTLED)
    inverse = large.reciprocal()
    square = inverse.square()
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    small = a.clamp_max(_SETTLED)
    rest = torch.lgamma(small) - (small - 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(a < _SETTLED, rest, series)


def gamma_nodes(
    a: Float[Tensor, "*b"], least: float
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Nodes s and weights of E f(s), s ~ Gamma(a, rate a), for f constant below `least`.

    The first node is at `least`; its weight, what the others leave of one, stands for all below.
    """
    with torch.no_grad():
        high = _edge(torch.zeros_like(a), a)
        low = (-_edge(a, torch.zeros_like(a))).clamp_min(math.log(least)).minimum(high)
    t, weights = _legendre(low, high, 2 * _NODES)
    a = a.unsqueeze(-1)
    share = weights * (-a * (t.expm1() - t) - log_integral_alone(a)).exp()
    rest = 1 - share.sum(-1, keepdim=True)
    return torch.cat([torch.full_like(rest, least), t.exp()], -1), torch.cat([rest, share], -1)


def gamma_range(a: float, nats: float) -> tuple[float, float]:
    """Beyond which the density of log s, s ~ Gamma(a, rate a), is e^{−nats} of its peak."""
    c = nats / a
    return -(c / 3 + math.sqrt(c * c / 9 + 2 * c)), math.log1p(c + math.sqrt(2 * c))


def _edge(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """T > 0 with a φ(−T) + b φ(T) = 38, from above: Newton's steps for a convex function."""
    tiny = 1e-100
    c, d = _NATS / a.clamp_min(tiny), _NATS / b.clamp_min(tiny)
    edge = torch.minimum(c / 3 + (c.square() / 9 + 2 * c).sqrt(), torch.log1p(d + (2 * d).sqrt()))
    for _ in range(3):
        rise, fall = edge.clamp_max(700.0).expm1(), -(-edge).expm1()
        edge = edge - (a * (edge - fall) + b * (rise - edge) - _NATS) / (a * fall + b * rise)
    return edge


def _legendre(
    low: Float[Tensor, "*b"], high: Float[Tensor, "*b"], number: int
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Nodes and weights of Gauss-Legendre quadrature from low to high."""
    nodes, weights = (torch.as_tensor(v).to(low) for v in unit_legendre(number))
    half = 0.5 * (high - low).unsqueeze(-1)
    return low.unsqueeze(-1) + half * (1 + nodes), half * weights


@cache
def unit_legendre(number: int) -> tuple[np.ndarray, np.ndarray]:
    """From −1 to 1."""
    return np.polynomial.legendre.leggauss(number)
