"""Legendre polynomials L_m of dimension d, and the monomials that they sum to.

They are Gegenbauer polynomials with L_m(1) = 1. A coordinate t of a uniform unit vector of R^d has
E L_m(t) L_k(t) = δ_mk / N(d, m), where N(d, m) is the number of linearly independent spherical
harmonics of order m. Everything here exists for d ≥ 2.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor


class Polynomials(ABC):
    """Homogeneous polynomials P_m(t, s) by a recurrence, P_0 = 1 and P_1 = t.

    t = ⟨x, z⟩ is of degree one in x, s = ‖x‖² of degree two, and P_m of degree m: no division by
    ‖x‖ takes place, and all derivatives exist at x = 0.
    """

    @abstractmethod
    def step(self, m: int, t: Tensor, s: Tensor, current: Tensor, previous: Tensor) -> Tensor:
        """P_{m+1} from `current` = P_m and `previous` = P_{m−1}, m ≥ 1."""

    def sequence(self, t: Tensor, s: Tensor, degree: int) -> Iterator[Tensor]:
        """P_0(t, s), P_1(t, s), …, up to a degree."""
        previous, current = t.new_ones(()).expand_as(t), t
        yield previous
        for m in range(1, degree + 1):
            yield current
            if m < degree:
                previous, current = current, self.step(m, t, s, current, previous)


@dataclass(frozen=True)
class Legendre(Polynomials):
    """P_m(t, s) = s^{m/2} L_{m,d}(t/√s), d = `num_dims`."""

    num_dims: int

    def step(self, m: int, t: Tensor, s: Tensor, current: Tensor, previous: Tensor) -> Tensor:
        d = self.num_dims
        return ((2 * m + d - 2) * t * current - m * s * previous) / (m + d - 2)


@dataclass(frozen=True)
class Monomials(Polynomials):
    """P_m(t, s) = t^m."""

    def step(self, m: int, t: Tensor, s: Tensor, current: Tensor, previous: Tensor) -> Tensor:
        return t * current


def log_num_harmonics(num_dims: int, order: int) -> float:
    """log N(d, m), N(d, m) = (2m + d − 2)(m + d − 3)! / (m! (d − 2)!); N(d, 0) = 1."""
    d, m = num_dims, order
    if m == 0:
        return 0.0
    return math.log((2 * m + d - 2) / m) + np.log1p((d - 2) / np.arange(1.0, m)).sum()


def log_moment(num_dims: int, power: int, order: int) -> float:
    """log E tⁿ L_m(t), t one coordinate of a uniform unit vector, for n − m = 2k, k ≥ 0.

    By Rodrigues' formula, E tⁿ L_m = n! Γ(d/2) / (2ⁿ k! Γ(d/2 + k + m)).
    """
    n, k = power, (power - order) // 2
    rising = np.log(num_dims / 2 + np.arange(float(k + order))).sum()
    return math.lgamma(n + 1) - n * math.log(2) - math.lgamma(k + 1) - rising


def legendre_coefficients(num_dims: int, power: int) -> dict[int, float]:
    """The coefficients c_m > 0 of tⁿ = Σ_m c_m L_m(t), by the order m = n, n − 2, …

    c_m = N(d, m) E tⁿ L_m(t); they sum to one.
    """
    orders = range(power, -1, -2)
    logs = {m: log_num_harmonics(num_dims, m) + log_moment(num_dims, power, m) for m in orders}
    return {m: math.exp(log) for m, log in logs.items()}
