"""Dot-product kernels: exact, and their expansions in Legendre polynomials."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel, LinearKernel, PolynomialKernel
from jaxtyping import Float, Int
from torch import Tensor, nn

from gp_orff.kernels.base import (
    as_real_tensor,
    check_num_dims,
    check_points,
    positive_root,
    require_covariance_of,
)
from gp_orff.kernels.spectra import KernelSpectrum, spectrum

# Legendre polynomials L_m of dimension d, and the monomials that they sum to.
#
# They are Gegenbauer polynomials with L_m(1) = 1. A coordinate t of a uniform unit vector of R^d
# has E L_m(t) L_k(t) = δ_mk / N(d, m), where N(d, m) is the number of linearly independent
# spherical harmonics of order m. Everything here exists for d ≥ 2.


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


# Three forms of a dot-product kernel: power series, Legendre series, sums of projections.
#
# Each has coefficients a_n > 0 for some degrees n, and is a sum over homogeneous kernels of degree
# n:
#
#     k(x, x′) = Σ_k λ_k C_k E_z[Q_k(x, z) Q_k(x′, z)] ,
#     Q_k(x, z) = ‖x‖^{n_k − m_k} P_{m_k}(⟨x, z⟩, ‖x‖²) ,
#
# z being uniform on the unit sphere. The eigenvalues λ_k are linear in the coefficients, and
# C_k = 1 / E Q_k² for unit x, so that λ_k is the share of the variance there: k(x, x) = Σ_k λ_k.
#
# A form has `num_dims`, the only dimension in which it exists, or None; `covariance`, κ from
# t = ⟨x, x′⟩ and s = ‖x‖²‖x′‖², with coefficients of shapes that broadcast; and `harmonics`, the
# terms of the sum over Q_k in d ≥ 2 dimensions, with coefficients (*b).


Coefficients = Mapping[int, Tensor]  # a_n by n


@dataclass(frozen=True)
class Harmonics:
    """The terms k of the sum over Q_k, those of the highest order first."""

    polynomials: Polynomials
    degrees: Int[Tensor, "K"]  # n_k
    orders: Int[Tensor, "K"]  # m_k
    eigenvalues: Float[Tensor, "*b K"]  # λ_k, float64
    counts: Float[Tensor, "K"]  # C_k: N(d, m) for Legendre polynomials


@dataclass(frozen=True)
class Taylor:
    """κ = Σ_n a_n ⟨x, x′⟩ⁿ, in any number of dimensions."""

    num_dims: None = None

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        return sum(a * t**n for n, a in coefficients.items())

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        orders = {n: legendre_coefficients(num_dims, n) for n in coefficients}
        return _legendre(coefficients, orders, num_dims)


@dataclass(frozen=True)
class LegendreSeries:
    """κ = Σ_m λ_m ‖x‖^m ‖x′‖^m L_{m,d}(cos ∠(x, x′)), d = `num_dims` (Le et al. 2013, eq. 16)."""

    num_dims: int

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        sequence = enumerate(Legendre(self.num_dims).sequence(t, s, max(coefficients)))
        return sum(coefficients[m] * p for m, p in sequence if m in coefficients)

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        return _legendre(coefficients, {n: {n: 1.0} for n in coefficients}, num_dims)


@dataclass(frozen=True)
class Projections:
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


Series = Taylor | LegendreSeries | Projections


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


# `DotProductKernel`: kernels that are functions of inner products.


class DotProductKernel(Kernel):
    r"""Dot-product kernel k(x, x′) = Σ_n a_n ⟨x, x′⟩ⁿ with coefficients a_n ≥ 0.

    A non-negative power series is positive definite in any number of inputs (Schoenberg 1942). For
    a fixed number d of inputs there are more such kernels: use `from_legendre` for sums over
    degrees, and `from_projections` for sums of powers of projections. The kernel is not stationary:
    it depends on lengths and angles of the inputs. Scale the inputs to about unit length, because
    powers grow fast.

    The positive coefficients are trained, as one parameter of this kernel. Coefficients that are
    zero stay zero.

    **Features.** In an `ORFFKernel` with a random rule, D columns ‖x‖ⁿ L_{m,d}(⟨x, z⟩/‖x‖)
    approximate the dᵐ monomials. Here z is uniform on the sphere, and L_{m,d} is a Legendre
    polynomial of dimension d (Le et al. 2013, Corollary 4 and Section 4.5). gpytorch's
    `LinearKernel` and `PolynomialKernel` have such features too. Each rule has two measures for the
    degree n and the order m:

    - `"base"`: ∝ λ_nm, the fraction of the variance of a unit vector. It has the smaller error with
      many inputs.
    - `"trace"`, the default, which works for few and for many inputs. Half of the columns are drawn
      as with "base". The others are ∝ λ_nm N(d, m), where N(d, m) is the number of spherical
      harmonics, as in Corollary 4. Corollary 4 alone bounds all columns by √(Σ λ N / D) for unit
      vectors; here the bound is √2 times as large. But N grows as dᵐ, and with 20 inputs nearly all
      of its columns have the highest order, which is why it has only half of the columns. The
      variance of the approximate kernel is at most twice the variance with "base" or with Corollary
      4.

    `Fastfood` and the other structured rules compute ⟨x, z⟩ in O(D log d) operations.

    Permutations can be inputs: the inner product of two flattened permutation matrices is the
    number of positions in which they agree (Le et al. 2013, Remark 8). See the example.

    Le et al. 2013, Section 3.3.

    Args:
        coefficients: a_0, a_1, …, (\*b, n + 1), non-negative, at least one of them positive. In a
            batch the same ones are zero.
        active_dims: the input columns of the kernel; all columns if None.

    Raises:
        ValueError: coefficients that are negative, not finite, or all zero, or none at all; in a
            batch, coefficients that are zero in some kernels only.

    Example:
        The first terms of exp⟨x, x′⟩, exact and as features:

        >>> import gp_orff, math, torch
        >>> kernel = gp_orff.DotProductKernel(
        ...     [1 / math.factorial(n) for n in range(8)]
        ... )
        >>> x = torch.nn.functional.normalize(torch.randn(10, 5), dim=-1)
        >>> torch.allclose(kernel(x).to_dense(), (x @ x.mT).exp(), rtol=1e-3)
        True
        >>> rule = gp_orff.QuasiMonteCarlo(512, measure="base")
        >>> features = gp_orff.ORFFKernel(kernel, rule, num_dims=5)
        >>> features.features(x).shape
        torch.Size([10, 512])

        Permutations, by how many of their places agree:

        >>> orders = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2], [3, 2, 1, 0]])
        >>> matrices = torch.nn.functional.one_hot(orders).float()  # (3, 4, 4)
        >>> # agreements squared
        >>> kernel = gp_orff.DotProductKernel.from_taylor([0.0, 0.0, 1.0])
        >>> kernel(matrices.flatten(1)).to_dense()[0].round()
        tensor([16.,  4.,  0.], grad_fn=<RoundBackward0>)
    """

    series: Series = Taylor()  # the form of the kernel that has these coefficients

    def __init__(
        self,
        coefficients: Sequence[float] | Float[Tensor, "*b n"],
        *,
        active_dims: tuple[int, ...] | None = None,
    ):
        values = _checked(coefficients)
        super().__init__(batch_shape=values.shape[:-1], active_dims=active_dims)
        positive = (values > 0).reshape(-1, values.shape[-1]).all(0)
        # Coefficients that are zero are no parameters: a positive constraint could not represent
        # them.
        self.degrees: tuple[int, ...] = tuple(positive.nonzero().flatten().tolist())
        self.register_parameter("raw_coefficients", nn.Parameter(values[..., positive]))
        self.register_constraint("raw_coefficients", Positive())
        self.coefficients = values[..., positive]

    @classmethod
    def from_taylor(
        cls,
        coefficients: Sequence[float] | Float[Tensor, "*b n"],
        *,
        active_dims: tuple[int, ...] | None = None,
    ) -> "DotProductKernel":
        r"""k(x, x′) = Σ_n a_n ⟨x, x′⟩ⁿ, in any number of inputs: the same as the class itself.

        Args:
            coefficients: a_0, a_1, …, (\*b, n + 1), as for the class.
            active_dims: the input columns of the kernel; all columns if None.
        """
        return DotProductKernel(coefficients, active_dims=active_dims)

    @classmethod
    def from_legendre(
        cls,
        eigenvalues: Sequence[float] | Float[Tensor, "*b n"],
        num_dims: int,
        *,
        active_dims: tuple[int, ...] | None = None,
    ) -> "DotProductKernel":
        r"""k(x, x′) = Σ_m λ_m ‖x‖^m ‖x′‖^m L_{m,d}(cos ∠(x, x′)), in d inputs only.

        L_{m,d} is the Legendre polynomial of dimension d with L_{m,d}(1) = 1. On the unit
        sphere, every positive definite dot-product kernel κ(⟨x, x′⟩) has this form. Off the
        sphere, each order has a different degree of ‖x‖, so that k depends on more than ⟨x, x′⟩.

        Le et al. 2013, Theorem 3, eq. 16.

        Args:
            eigenvalues: λ_0, λ_1, …, (\*b, n + 1), non-negative, at least one of them positive.
            num_dims: d ≥ 2, the number of inputs.
            active_dims: the d input columns of the kernel; all columns if None.

        Raises:
            ValueError: d < 2, or eigenvalues that are negative, not finite, or all zero.
            TypeError: `num_dims` is not an integer.

        Example:
            >>> import gp_orff, torch
            >>> kernel = gp_orff.DotProductKernel.from_legendre(
            ...     [0.5, 0.3, 0.2], num_dims=3
            ... )
            >>> x = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
            >>> torch.allclose(kernel(x, diag=True), torch.ones(4))  # Σ λ_m
            True
        """
        return LegendreKernel(eigenvalues, num_dims, active_dims=active_dims)

    @classmethod
    def from_projections(
        cls,
        coefficients: Sequence[float] | Float[Tensor, "*b n"],
        num_dims: int,
        *,
        active_dims: tuple[int, ...] | None = None,
    ) -> "DotProductKernel":
        r"""k(x, x′) = Σ_p c_p E_v[⟨x, v⟩^p ⟨x′, v⟩^p], v uniform on the sphere, in d inputs only.

        Its features have the columns ⟨x, z⟩^p, cheaper than Legendre polynomials. The exact kernel
        is a Legendre series: ⟨x, v⟩^p has the orders p, p − 2, … For p = 1 it is c_1 ⟨x, x′⟩ / d.

        Le et al. 2013, Section 3.4, eq. 28.

        Args:
            coefficients: c_0, c_1, …, (\*b, n + 1), non-negative, at least one of them positive.
            num_dims: d ≥ 2, the number of inputs.
            active_dims: the d input columns of the kernel; all columns if None.

        Raises:
            ValueError: d < 2, or coefficients that are negative, not finite, or all zero.
            TypeError: `num_dims` is not an integer.

        Example:
            >>> import gp_orff, torch
            >>> kernel = gp_orff.DotProductKernel.from_projections(
            ...     [0.0, 3.0], num_dims=3
            ... )
            >>> x = torch.randn(4, 3)
            >>> torch.allclose(kernel(x).to_dense(), x @ x.mT, atol=1e-5)
            True
        """
        return ProjectionKernel(coefficients, num_dims, active_dims=active_dims)

    @property
    def num_dims(self) -> int | None:
        """d, the only number of inputs in which the kernel exists; None if it exists in any."""
        return self.series.num_dims

    @property
    def coefficients(self) -> Float[Tensor, "*b K"]:
        """The positive coefficients (\\*b, K) of the powers `degrees`, which are trained."""
        return self.raw_coefficients_constraint.transform(self.raw_coefficients)

    @coefficients.setter
    def coefficients(self, values: Float[Tensor, "*b K"]) -> None:
        values = as_real_tensor(values, "coefficients of DotProductKernel")
        values = values.to(self.raw_coefficients)
        self.initialize(raw_coefficients=self.raw_coefficients_constraint.inverse_transform(values))

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n m"] | Float[Tensor, "*b n"]:
        """The covariance between the points `x1` (*b, n, d) and `x2` (*b, m, d).

        With `diag`, only the diagonal, (*b, n).

        Raises:
            ValueError: `last_dim_is_batch`, another number of inputs than the series has, no
                points, NaN or infinity.
            TypeError: inputs of another dtype than the hyperparameters.
        """
        check_points(self, self.series.num_dims, x1, x2, last_dim_is_batch)
        square1, square2 = x1.square().sum(-1), x2.square().sum(-1)
        if diag:
            t, s, ones = (x1 * x2).sum(-1), square1 * square2, (1,)
        else:
            t, s, ones = x1 @ x2.mT, square1.unsqueeze(-1) * square2.unsqueeze(-2), (1, 1)
        values = (a.reshape(*a.shape, *ones) for a in self.coefficients.unbind(-1))
        return self.series.covariance(dict(zip(self.degrees, values, strict=True)), t, s)


class LegendreKernel(DotProductKernel):
    """What `DotProductKernel.from_legendre` makes."""

    def __init__(
        self,
        eigenvalues: Sequence[float] | Float[Tensor, "*b n"],
        num_dims: int,
        *,
        active_dims: tuple[int, ...] | None = None,
    ):
        _check_sphere(num_dims, active_dims)
        super().__init__(eigenvalues, active_dims=active_dims)
        self.series = LegendreSeries(num_dims)


class ProjectionKernel(DotProductKernel):
    """What `DotProductKernel.from_projections` makes."""

    def __init__(
        self,
        coefficients: Sequence[float] | Float[Tensor, "*b n"],
        num_dims: int,
        *,
        active_dims: tuple[int, ...] | None = None,
    ):
        _check_sphere(num_dims, active_dims)
        super().__init__(coefficients, active_dims=active_dims)
        self.series = Projections(num_dims)


def _checked(coefficients: Sequence[float] | Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
    """A copy of coefficients that make a kernel."""
    values = as_real_tensor(coefficients, "coefficients of DotProductKernel").detach().clone()
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    if values.dim() == 0 or values.shape[-1] == 0:
        raise ValueError(
            "DotProductKernel expects a sequence of coefficients a_0, a_1, …, got "
            f"{coefficients!r}; pass [0.0, 1.0] for ⟨x, x′⟩"
        )
    if not torch.isfinite(values).all() or (values < 0).any():
        raise ValueError(
            "DotProductKernel expects finite coefficients that are not negative, which make the "
            f"kernel positive definite, got {values.tolist()}; drop the negative ones, or, for a "
            "kernel on the unit sphere only, give its Legendre coefficients to from_legendre"
        )
    positive = (values > 0).reshape(-1, values.shape[-1])
    if not positive[0].any() or (positive != positive[0]).any():
        raise ValueError(
            "DotProductKernel expects at least one positive coefficient, and in a batch the same "
            f"ones positive, got {values.tolist()}; give a small positive number for zero"
        )
    return values


def _check_sphere(num_dims: int, active_dims: tuple[int, ...] | None) -> None:
    """Refuse numbers of inputs in which there are no Legendre polynomials."""
    check_num_dims(
        "a DotProductKernel of Legendre polynomials or projections", num_dims, 2, active_dims
    )


# Eigenvalues of dot-product kernels, which take the place of a spectral density.


@dataclass(frozen=True)
class DotProductSpectrum(KernelSpectrum):
    """The eigenvalues of a dot-product kernel of the lifted inputs x̃ = (scale · x, offset).

    It is no `Spectrum`: the kernel is not stationary and has no spectral density. Features of it
    are polynomials of ⟨x̃, z⟩, z uniform on the sphere (Le et al. 2013, Corollary 4).

    Args:
        series: the form of the kernel.
        coefficients: its coefficients, (*b) each, by their degrees.
        scale: what multiplies the inputs, (*b, 1, d) or (*b, 1, 1).
        offset: further inputs, equal at all points, (*b, 1, q).
    """

    series: Series
    coefficients: Coefficients
    scale: Float[Tensor, "*b 1 d"]
    offset: Float[Tensor, "*b 1 q"]
    is_weighted = False

    @property
    def isotropic_lengthscale(self) -> None:
        """Raise: there is none.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected stationary kernels, which have lengthscales, got a dot-product kernel; "
            "measure the error of its features with gp_orff.compare_with_exact"
        )

    def num_coordinates(self, num_dims: int) -> int:
        """The number of uniform coordinates that draw a harmonic: one, for any `num_dims`."""
        return 1

    def num_lifted(self, num_dims: int) -> int:
        """The number of lifted inputs for `num_dims` inputs."""
        return num_dims + self.offset.shape[-1]

    def harmonics(self, num_dims: int) -> Harmonics:
        """The expansion of the kernel in d = `num_dims` lifted inputs, differentiable, in float64.

        A power series has one in any d, for inputs that are padded by zeros too.

        Raises:
            ValueError: d < 2, or another d than that of the series.
        """
        if num_dims < 2:
            raise ValueError(
                "features of a dot-product kernel expect at least 2 inputs, since there are no "
                f"Legendre polynomials in one dimension, got {num_dims}; append a column of zeros "
                "to the inputs"
            )
        if self.series.num_dims not in (None, num_dims):
            raise ValueError(
                f"a dot-product kernel of Legendre polynomials or projections in "
                f"{self.series.num_dims} inputs expects random vectors of as many dimensions, got "
                f"{num_dims}, to which the rule pads; use gp_orff.QuasiMonteCarlo, which does not, "
                "or DotProductKernel.from_taylor"
            )
        values = {n: a.double() for n, a in self.coefficients.items()}
        return self.series.harmonics(values, num_dims)


@spectrum.register
def _(kernel: DotProductKernel) -> DotProductSpectrum:
    require_covariance_of(DotProductKernel, kernel)
    values = kernel.coefficients
    coefficients = dict(zip(kernel.degrees, values.unbind(-1), strict=True))
    return DotProductSpectrum(
        kernel.series, coefficients, values.new_ones(1, 1), values.new_zeros(1, 0)
    )


@spectrum.register
def _(kernel: LinearKernel) -> DotProductSpectrum:
    require_covariance_of(LinearKernel, kernel)
    variance = kernel.variance
    one = {1: variance.new_ones(())}
    return DotProductSpectrum(Taylor(), one, positive_root(variance), variance.new_zeros(1, 0))


@spectrum.register
def _(kernel: PolynomialKernel) -> DotProductSpectrum:
    """(⟨x, x′⟩ + c)^p = ⟨x̃, x̃′⟩^p with x̃ = (x, √c).

    Raises:
        ValueError: a power that is no positive integer, or a negative offset.
    """
    require_covariance_of(PolynomialKernel, kernel)
    power, offset = kernel.power, kernel.offset
    if power < 1 or int(power) != power:
        raise ValueError(
            f"PolynomialKernel expects a positive integer as power, got {power}; other powers have "
            "no power series with positive coefficients"
        )
    if (offset < 0).any():
        raise ValueError(
            f"PolynomialKernel expects an offset that is not negative, got {offset.tolist()}; "
            "constrain it with gpytorch.constraints.Positive()"
        )
    one, root = {int(power): offset.new_ones(())}, positive_root(offset).unsqueeze(-2)
    return DotProductSpectrum(Taylor(), one, offset.new_ones(1, 1), root)
