"""Three forms of a dot-product kernel: power series, Legendre series, sums of projections.

Each has coefficients a_n > 0 for some degrees n, and is a sum over homogeneous kernels of degree n:

    k(x, x′) = Σ_k λ_k C_k E_z[Q_k(x, z) Q_k(x′, z)] ,
    Q_k(x, z) = ‖x‖^{n_k − m_k} P_{m_k}(⟨x, z⟩, ‖x‖²) ,

z being uniform on the unit sphere. The eigenvalues λ_k are linear in the coefficients, and
C_k = 1 / E Q_k² for unit x, so that λ_k is the share of the variance there: k(x, x) = Σ_k λ_k.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.kernels.dot_product.legendre import (
    Legendre,
    Monomials,
    Polynomials,
    legendre_coefficients,
    log_moment,
    log_num_harmonics,
)

Coefficients = Mapping[int, Tensor]  # a_n by n


@dataclass(frozen=True)
class Harmonics:
    """The terms k of the sum over Q_k, those of the highest order first."""

    polynomials: Polynomials
    degrees: Int[Tensor, "K"]  # n_k
    orders: Int[Tensor, "K"]  # m_k
    eigenvalues: Float[Tensor, "*b K"]  # λ_k, float64
    counts: Float[Tensor, "K"]  # C_k: N(d, m) for Legendre polynomials


class Series(ABC):
    """A form of a dot-product kernel; the coefficients a_n are given by their degrees n."""

    num_dims: int | None  # d of the only dimension in which it exists; None: in any

    @abstractmethod
    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        """κ from t = ⟨x, x′⟩ and s = ‖x‖²‖x′‖²; the coefficients have shapes that broadcast."""

    @abstractmethod
    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        """The terms of the sum over Q_k in d = `num_dims` ≥ 2 dimensions; coefficients are (*b)."""


@dataclass(frozen=True)
class Taylor(Series):
    """κ = Σ_n a_n ⟨x, x′⟩ⁿ, in any number of dimensions."""

    num_dims: None = None

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        return sum(a * t**n for n, a in coefficients.items())

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        orders = {n: legendre_coefficients(num_dims, n) for n in coefficients}
        return _legendre(coefficients, orders, num_dims)


@dataclass(frozen=True)
class LegendreSeries(Series):
    """κ = Σ_m λ_m ‖x‖^m ‖x′‖^m L_{m,d}(cos ∠(x, x′)), d = `num_dims` (Le et al. 2013, eq. 16)."""

    num_dims: int

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        sequence = enumerate(Legendre(self.num_dims).sequence(t, s, max(coefficients)))
        return sum(coefficients[m] * p for m, p in sequence if m in coefficients)

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        return _legendre(coefficients, {n: {n: 1.0} for n in coefficients}, num_dims)


@dataclass(frozen=True)
class Projections(Series):
    """κ = Σ_p c_p E_v[⟨x, v⟩^p ⟨x′, v⟩^p], v uniform on the sphere (Le et al. 2013, eq. 28).

    With t^p = Σ_m b_m L_m, the expectation is ‖x‖^p ‖x′‖^p Σ_m b_m²/N(d, m) L_{m,d}(cos ∠(x, x′)).
    """

    num_dims: int

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        d, total = self.num_dims, 0.0
        polynomials = list(Legendre(d).sequence(t, s, max(coefficients)))
        for p, c in coefficients.items():
            for m, b in legendre_coefficients(d, p).items():
                weight = b**2 * np.exp(-log_num_harmonics(d, m))
                total = total + c * weight * s ** ((p - m) // 2) * polynomials[m]
        return total

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        powers = sorted(coefficients, reverse=True)
        values = torch.stack([coefficients[p] for p in powers], dim=-1)
        degrees = torch.tensor(powers, device=values.device)
        squares = values.new_tensor([np.exp(log_moment(num_dims, 2 * p, 0)) for p in powers])
        return Harmonics(Monomials(), degrees, degrees, values * squares, 1 / squares)


def _legendre(
    coefficients: Coefficients, orders: Mapping[int, Mapping[int, float]], num_dims: int
) -> Harmonics:
    """Harmonics with the eigenvalues a_n c_nm, from the factors c_nm by degrees n and orders m."""
    pairs = sorted(((m, n) for n in coefficients for m in orders[n]), reverse=True)
    values = torch.stack([coefficients[n] for _, n in pairs], dim=-1)
    factors = [orders[n][m] for m, n in pairs]
    counts = [np.exp(log_num_harmonics(num_dims, m)) for m, _ in pairs]
    return Harmonics(
        Legendre(num_dims),
        torch.tensor([n for _, n in pairs], device=values.device),
        torch.tensor([m for m, _ in pairs], device=values.device),
        values * values.new_tensor(factors),
        values.new_tensor(counts),
    )
