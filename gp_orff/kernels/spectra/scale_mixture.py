"""Integrals over Gamma-distributed scales, by quadrature that adapts to peak and width.

The integrand is e^{−a φ(t) − b φ(−t)} with φ(t) = e^t − 1 − t. It is one at its peak t = 0. For
large a + b it falls like a Gaussian of variance 1/(a + b), for small a + b first exponentially and
then doubly exponentially. Gauss–Legendre nodes cover the interval on which it exceeds e^{−38}; they
are dense at the ends, where it falls steeply.
"""

import math
from functools import cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_NODES = 72  # relative error 1e-11 for a b > 1e-16
_NATS = 38.0  # integrals end this far below the log of the peak
_SERIES_FROM = 20.0  # the least a for which Stirling's series is used


def log_integral(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log ∫ exp(−a φ(t) − b φ(−t)) dt = log[2(b/a)^{(a−b)/2} K_{a−b}(2√ab) e^{a+b}]."""
    with torch.no_grad():
        low, high = _edge(a, b), _edge(b, a)
    t, weights = _legendre(-low, high, _NODES)
    exponent = a.unsqueeze(-1) * (t.expm1() - t) + b.unsqueeze(-1) * ((-t).expm1() + t)
    return ((-exponent).exp() * weights).sum(-1).log()


def log_gamma_integral(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """`log_integral` for b = 0: log[Γ(a) e^a a^{−a}] = ½ log(2π/a) + R(a) (Stirling)."""
    return 0.5 * (2 * math.pi / a).log() + stirling_remainder(a)


def stirling_remainder(a: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """R(a) = log Γ(a) − (a − ½) log a + a − ½ log 2π, without cancellation for large a."""
    large = a.clamp_min(_SERIES_FROM)
    inverse = large.reciprocal()
    square = inverse.square()
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square / 1680)))
    small = a.clamp_max(_SERIES_FROM)
    direct = torch.lgamma(small) - (small - 0.5) * small.log() + small - 0.5 * math.log(2 * math.pi)
    return torch.where(a < _SERIES_FROM, direct, series)


def gamma_nodes(
    a: Float[Tensor, "*b"], least: float
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n"]]:
    """Nodes s and weights of quadrature for E f(s), s ~ Gamma(a, rate a), f constant below `least`.

    The first node is `least`. Its weight, one minus the sum of the others, covers all smaller s.
    """
    with torch.no_grad():
        high = _edge(torch.zeros_like(a), a)
        low = (-_edge(a, torch.zeros_like(a))).clamp_min(math.log(least)).minimum(high)
    t, weights = _legendre(low, high, 2 * _NODES)
    a = a.unsqueeze(-1)
    mass = weights * (-a * (t.expm1() - t) - log_gamma_integral(a)).exp()
    rest = 1 - mass.sum(-1, keepdim=True)
    return torch.cat([torch.full_like(rest, least), t.exp()], -1), torch.cat([rest, mass], -1)


def gamma_range(a: float, nats: float) -> tuple[float, float]:
    """Bounds of log s, s ~ Gamma(a, rate a), beyond which its density < e^{−nats} of its peak."""
    c = nats / a
    return -(c / 3 + math.sqrt(c * c / 9 + 2 * c)), math.log1p(c + math.sqrt(2 * c))


def _edge(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """T > 0 with a φ(−T) + b φ(T) = 38, by Newton steps from above on a convex function."""
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
    """Nodes and weights of Gauss–Legendre quadrature from low to high."""
    nodes, weights = (torch.as_tensor(v).to(low) for v in unit_legendre(number))
    half = 0.5 * (high - low).unsqueeze(-1)
    return low.unsqueeze(-1) + half * (1 + nodes), half * weights


@cache
def unit_legendre(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of Gauss–Legendre quadrature from −1 to 1."""
    return np.polynomial.legendre.leggauss(number)
