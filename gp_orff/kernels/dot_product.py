"""Dot-product kernels, their covariances, and their expansions in Legendre polynomials."""

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

# Legendre polynomials L_m of dimension d, and expansions of monomials in them.
#
# They are Gegenbauer polynomials with L_m(1) = 1. A coordinate t of a uniform unit vector of R^d
# has E L_m(t) L_k(t) = δ_mk / N(d, m), where N(d, m) is the number of linearly independent
# spherical harmonics of order m. All functions below need d ≥ 2.


class Polynomials(ABC):
    """Homogeneous polynomials P_m(t, s) with P_0 = 1 and P_1 = t, by a recurrence.

    t = ⟨x, z⟩ has the degree one in x, s = ‖x‖² has the degree two, and P_m has the degree m. The
    recurrence does not divide by ‖x‖, so all derivatives exist at x = 0.
    """

    @abstractmethod
    def step(self, m: int, t: Tensor, s: Tensor, current: Tensor, previous: Tensor) -> Tensor:
        """Return P_{m+1} from `current` = P_m and `previous` = P_{m−1}, for m ≥ 1."""

    def sequence(self, t: Tensor, s: Tensor, degree: int) -> Iterator[Tensor]:
        """Yield P_0(t, s), P_1(t, s), …, up to the `degree`."""
        previous, current = t.new_ones(()).expand_as(t), t
        yield previous
        for m in range(1, degree + 1):
            yield current
            if m < degree:
                previous, current = current, self.step(m, t, s, current, previous)


@dataclass(frozen=True)
class Legendre(Polynomials):
    """The polynomials P_m(t, s) = s^{m/2} L_{m,d}(t/√s) with d = `num_dims`."""

    num_dims: int

    def step(self, m: int, t: Tensor, s: Tensor, current: Tensor, previous: Tensor) -> Tensor:
        d = self.num_dims
        return ((2 * m + d - 2) * t * current - m * s * previous) / (m + d - 2)


@dataclass(frozen=True)
class Monomials(Polynomials):
    """The polynomials P_m(t, s) = t^m."""

    def step(self, m: int, t: Tensor, s: Tensor, current: Tensor, previous: Tensor) -> Tensor:
        return t * current


def log_num_harmonics(num_dims: int, order: int) -> float:
    """Return log N(d, m) for N(d, m) = (2m + d − 2)(m + d − 3)! / (m! (d − 2)!) and N(d, 0) = 1."""
    d, m = num_dims, order
    if m == 0:
        return 0.0
    return math.log((2 * m + d - 2) / m) + np.log1p((d - 2) / np.arange(1.0, m)).sum()


def log_moment(num_dims: int, power: int, order: int) -> float:
    """Return log E tⁿ L_m(t), where t is one coordinate of a uniform unit vector.

    For n − m = 2k with k ≥ 0, Rodrigues' formula gives E tⁿ L_m = n! Γ(d/2) / (2ⁿ k! Γ(d/2 + k +
    m)). Here n is `power`, and m is `order`.
    """
    n, k = power, (power - order) // 2
    rising = np.log(num_dims / 2 + np.arange(float(k + order))).sum()
    return math.lgamma(n + 1) - n * math.log(2) - math.lgamma(k + 1) - rising


def legendre_coefficients(num_dims: int, power: int) -> dict[int, float]:
    """Return the coefficients c_m > 0 of tⁿ = Σ_m c_m L_m(t), by the order m = n, n − 2, …

    They are c_m = N(d, m) E tⁿ L_m(t), and their sum is one.
    """
    orders = range(power, -1, -2)
    logs = {m: log_num_harmonics(num_dims, m) + log_moment(num_dims, power, m) for m in orders}
    return {m: math.exp(log) for m, log in logs.items()}


# Three forms of a dot-product kernel: power series, Legendre series, and sums of projections.
#
# Each form has coefficients a_n > 0 for some degrees n, and is a sum of homogeneous kernels of
# degree n:
#
#     k(x, x′) = Σ_k λ_k C_k E_z[Q_k(x, z) Q_k(x′, z)] ,
#     Q_k(x, z) = ‖x‖^{n_k − m_k} P_{m_k}(⟨x, z⟩, ‖x‖²) ,
#
# where z is uniform on the unit sphere. The eigenvalues λ_k are linear in the coefficients. For
# unit x, C_k = 1 / E Q_k², so that k(x, x) = Σ_k λ_k.
#
# A form has three attributes:
#
# - `num_dims`, the only number of inputs for which it is defined, or None for any number;
# - `covariance`, which computes κ from t = ⟨x, x′⟩ and s = ‖x‖²‖x′‖²; the shapes of the
#   coefficients broadcast with t and s;
# - `harmonics`, which returns the terms of the sum over Q_k in d ≥ 2 dimensions, for coefficients
#   of shape (*b).


Coefficients = Mapping[int, Tensor]  # a_n by n


@dataclass(frozen=True)
class Harmonics:
    """The terms k of the sum over Q_k, with the highest order first.

    Attributes:
        polynomials: the polynomials P_m.
        degrees: n_k, (K,).
        orders: m_k, (K,).
        eigenvalues: λ_k, (*b, K), float64.
        counts: C_k, (K,), which is N(d, m_k) for Legendre polynomials.
    """

    polynomials: Polynomials
    degrees: Int[Tensor, "K"]
    orders: Int[Tensor, "K"]
    eigenvalues: Float[Tensor, "*b K"]
    counts: Float[Tensor, "K"]


@dataclass(frozen=True)
class Taylor:
    """The form κ = Σ_n a_n ⟨x, x′⟩ⁿ, for any number of inputs."""

    num_dims: None = None

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        return sum(a * t**n for n, a in coefficients.items())

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        orders = {n: legendre_coefficients(num_dims, n) for n in coefficients}
        return _legendre(coefficients, orders, num_dims)


@dataclass(frozen=True)
class LegendreSeries:
    """The form κ = Σ_m λ_m ‖x‖^m ‖x′‖^m L_{m,d}(cos ∠(x, x′)) for d = `num_dims` inputs.

    Source: Le et al. 2013, eq. 16.
    """

    num_dims: int

    def covariance(self, coefficients: Coefficients, t: Tensor, s: Tensor) -> Tensor:
        sequence = enumerate(Legendre(self.num_dims).sequence(t, s, max(coefficients)))
        return sum(coefficients[m] * p for m, p in sequence if m in coefficients)

    def harmonics(self, coefficients: Coefficients, num_dims: int) -> Harmonics:
        return _legendre(coefficients, {n: {n: 1.0} for n in coefficients}, num_dims)


@dataclass(frozen=True)
class Projections:
    """The form κ = Σ_p c_p E_v[⟨x, v⟩^p ⟨x′, v⟩^p], where v is uniform on the unit sphere.

    With t^p = Σ_m b_m L_m, the expectation is ‖x‖^p ‖x′‖^p Σ_m b_m²/N(d, m) L_{m,d}(cos ∠(x, x′)).
    Source: Le et al. 2013, eq. 28.
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
    """Return harmonics with the eigenvalues a_n c_nm, for factors c_nm of degree n and order m."""
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
    r"""The dot-product kernel k(x, x′) = Σ_n a_n ⟨x, x′⟩ⁿ with coefficients a_n ≥ 0.

    A power series with non-negative coefficients is positive definite for any number of inputs
    (Schoenberg 1942). For a fixed number d of inputs, more series are positive definite. Use
    `from_legendre` and `from_projections` for such kernels. The kernel is not stationary, because
    it depends on lengths and angles of the inputs. Scale the inputs to about unit length, because
    powers grow fast. The positive coefficients are trained. Coefficients that are zero stay zero.

    To use permutations as inputs, flatten their permutation matrices. The inner product is then the
    number of positions in which two permutations agree (Le et al. 2013, Remark 8). See the example.

    **Features.** In an `ORFFKernel` with a random rule, D columns ‖x‖ⁿ L_{m,d}(⟨x, z⟩/‖x‖)
    approximate the kernel. Here z is uniform on the unit sphere, and L_{m,d} is a Legendre
    polynomial of dimension d (Le et al. 2013, Corollary 4 and Section 4.5). gpytorch's
    `LinearKernel` and `PolynomialKernel` have such features too. The degree n and the order m of
    a column are random, with one of two distributions:

    - With `measure="base"`, their probability is proportional to λ_nm, the fraction of the variance
      k(x, x) of a unit vector x. This measure has the smaller error if there are many inputs.
    - With `measure="trace"`, the default, half of the columns are drawn in this way. For the other
      half, the probability is proportional to λ_nm N(d, m), as in Corollary 4, where N(d, m) is the
      number of spherical harmonics. This measure works for few and for many inputs. The variance of
      the approximate kernel is at most twice the variance with either distribution alone.

    With 20 inputs, nearly all columns of Corollary 4 have the highest order, because N(d, m) grows
    as dᵐ. This is why only half of the columns use it. The structured rules, such as `Fastfood`,
    compute ⟨x, z⟩ in O(D log d) operations.

    Source: Le et al. 2013, Section 3.3.

    Args:
        coefficients: a_0, a_1, …, (\*b, n + 1), non-negative, and at least one of them positive.
            All kernels of a batch must have the same positive coefficients.
        active_dims: the input columns of the kernel; all columns if None.

    Attributes:
        coefficients: the positive coefficients, (\*b, K).
        degrees: the powers n of these coefficients, a tuple of K integers.

    Raises:
        ValueError: a coefficient is negative or not finite; no coefficient is positive; a
            coefficient is zero in some kernels of a batch only.

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

        Three permutations, with the squared number of positions that agree as their covariance:

        >>> orders = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2], [3, 2, 1, 0]])
        >>> matrices = torch.nn.functional.one_hot(orders).float()  # (3, 4, 4)
        >>> kernel = gp_orff.DotProductKernel.from_taylor([0.0, 0.0, 1.0])
        >>> kernel(matrices.flatten(1)).to_dense()[0].round()
        tensor([16.,  4.,  0.], grad_fn=<RoundBackward0>)
    """

    series: Series = Taylor()  # the form of the kernel

    def __init__(
        self,
        coefficients: Sequence[float] | Float[Tensor, "*b n"],
        *,
        active_dims: tuple[int, ...] | None = None,
    ):
        values = _checked(coefficients)
        super().__init__(batch_shape=values.shape[:-1], active_dims=active_dims)
        positive = (values > 0).reshape(-1, values.shape[-1]).all(0)
        # Coefficients that are zero are not parameters, because a positive constraint cannot
        # represent them.
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
        r"""Return the kernel k(x, x′) = Σ_n a_n ⟨x, x′⟩ⁿ, as the class itself does.

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
        r"""Return the kernel k(x, x′) = Σ_m λ_m ‖x‖^m ‖x′‖^m L_{m,d}(cos ∠(x, x′)) of d inputs.

        L_{m,d} is the Legendre polynomial of dimension d with L_{m,d}(1) = 1, and ∠(x, x′) is the
        angle between x and x′. On the unit sphere, every positive definite dot-product kernel
        κ(⟨x, x′⟩) has this form. Off the sphere, k depends not only on ⟨x, x′⟩ but also on ‖x‖ and
        ‖x′‖.

        Source: Le et al. 2013, Theorem 3, eq. 16.

        Args:
            eigenvalues: λ_0, λ_1, …, (\*b, n + 1), non-negative, and at least one of them positive.
            num_dims: d ≥ 2, the number of inputs.
            active_dims: the d input columns of the kernel; all columns if None.

        Raises:
            ValueError: d < 2; an eigenvalue is negative or not finite; no eigenvalue is positive.
            TypeError: `num_dims` is not an integer.

        Example:
            On the unit sphere, the variance is Σ_m λ_m:

            >>> import gp_orff, torch
            >>> kernel = gp_orff.DotProductKernel.from_legendre(
            ...     [0.5, 0.3, 0.2], num_dims=3
            ... )
            >>> x = torch.nn.functional.normalize(torch.randn(4, 3), dim=-1)
            >>> torch.allclose(kernel(x, diag=True), torch.ones(4))
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
        r"""Return the kernel k(x, x′) = Σ_p c_p E_v[⟨x, v⟩^p ⟨x′, v⟩^p] of d inputs.

        The mean is over v, which is uniform on the unit sphere. The features have the columns
        ⟨x, z⟩^p, which are cheaper than Legendre polynomials. The exact covariance is a Legendre
        series, in which ⟨x, v⟩^p contributes to the orders p, p − 2, …

        Source: Le et al. 2013, Section 3.4, eq. 28.

        Args:
            coefficients: c_0, c_1, …, (\*b, n + 1), non-negative, and at least one of them
                positive.
            num_dims: d ≥ 2, the number of inputs.
            active_dims: the d input columns of the kernel; all columns if None.

        Raises:
            ValueError: d < 2; a coefficient is negative or not finite; no coefficient is positive.
            TypeError: `num_dims` is not an integer.

        Example:
            With p = 1, the kernel is c_1 ⟨x, x′⟩ / d:

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
        """The only number of inputs for which the kernel is defined; None for any number."""
        return self.series.num_dims

    @property
    def coefficients(self) -> Float[Tensor, "*b K"]:
        """The positive coefficients (\\*b, K) of the powers `degrees`. They are trained."""
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
        """Return the covariance matrix (*b, n, m) between the points `x1` and `x2`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: whether to return only the diagonal (*b, n); it needs m = n.
            last_dim_is_batch: must be False.

        Raises:
            ValueError: `last_dim_is_batch` is True; the points have another number of columns than
                `num_dims`; there are no points; a point contains NaN or infinity.
            TypeError: the points have another dtype than the hyperparameters.
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
    """The kernel that `DotProductKernel.from_legendre` returns."""

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
    """The kernel that `DotProductKernel.from_projections` returns."""

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
    """Return a copy of the coefficients, after checks that they define a kernel."""
    values = as_real_tensor(coefficients, "coefficients of DotProductKernel").detach().clone()
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    if values.dim() == 0 or values.shape[-1] == 0:
        raise ValueError(
            "DotProductKernel expects a sequence of coefficients a_0, a_1, …, got "
            f"{coefficients!r}; pass [0.0, 1.0] for ⟨x, x′⟩"
        )
    if not torch.isfinite(values).all() or (values < 0).any():
        raise ValueError(
            "DotProductKernel expects finite coefficients that are not negative, got "
            f"{values.tolist()}, for which the kernel is not positive definite; drop the negative "
            "ones, or pass Legendre coefficients of a kernel on the unit sphere to from_legendre"
        )
    positive = (values > 0).reshape(-1, values.shape[-1])
    if not positive[0].any() or (positive != positive[0]).any():
        raise ValueError(
            "DotProductKernel expects at least one positive coefficient, and the same positive "
            f"ones in a batch, got {values.tolist()}; replace zero by a small positive number"
        )
    return values


def _check_sphere(num_dims: int, active_dims: tuple[int, ...] | None) -> None:
    """Raise an error for a number of inputs without Legendre polynomials."""
    check_num_dims(
        "a DotProductKernel of Legendre polynomials or projections", num_dims, 2, active_dims
    )


# Eigenvalues of dot-product kernels, which replace the spectral density of stationary kernels.


@dataclass(frozen=True)
class DotProductSpectrum(KernelSpectrum):
    """The eigenvalues of a dot-product kernel of the lifted inputs x̃ = (scale · x, offset).

    This is not a `Spectrum`, because the kernel is not stationary. The features are polynomials of
    ⟨x̃, z⟩, where z is uniform on the unit sphere (Le et al. 2013, Corollary 4).

    Args:
        series: the form of the kernel.
        coefficients: the coefficients of the form, (*b) each, by their degrees.
        scale: (*b, 1, d) or (*b, 1, 1), a factor of the inputs.
        offset: (*b, 1, q), q further inputs, which are equal at all points.
    """

    series: Series
    coefficients: Coefficients
    scale: Float[Tensor, "*b 1 d"]
    offset: Float[Tensor, "*b 1 q"]
    is_weighted = False

    @property
    def isotropic_lengthscale(self) -> None:
        """Raise an error, because dot-product kernels have no lengthscale.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel, which has lengthscales, got a dot-product kernel; "
            "measure the error of its features with gp_orff.compare_with_exact"
        )

    def num_coordinates(self, num_dims: int) -> int:
        """Return 1, the number of uniform coordinates per harmonic, for any `num_dims`."""
        return 1

    def num_lifted(self, num_dims: int) -> int:
        """Return the number of lifted inputs for `num_dims` inputs."""
        return num_dims + self.offset.shape[-1]

    def harmonics(self, num_dims: int) -> Harmonics:
        """Return the expansion of the kernel in d lifted inputs, differentiable and in float64.

        A power series has an expansion for any d, also for inputs that are padded by zeros.

        Args:
            num_dims: d, the number of lifted inputs.

        Raises:
            ValueError: d < 2, or d is not the `num_dims` of the series.
        """
        if num_dims < 2:
            raise ValueError(
                "features of a dot-product kernel expect at least 2 inputs, for which Legendre "
                f"polynomials are defined, got {num_dims}; append a column of zeros to the inputs"
            )
        if self.series.num_dims not in (None, num_dims):
            raise ValueError(
                f"a dot-product kernel of Legendre polynomials or projections in "
                f"{self.series.num_dims} inputs expects random vectors of as many dimensions, got "
                f"{num_dims} from a rule that pads the inputs; use gp_orff.QuasiMonteCarlo, which "
                "does not pad, or DotProductKernel.from_taylor"
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
    """Use (⟨x, x′⟩ + c)^p = ⟨x̃, x̃′⟩^p with x̃ = (x, √c).

    Raises:
        ValueError: the power is not a positive integer, or the offset is negative.
    """
    require_covariance_of(PolynomialKernel, kernel)
    power, offset = kernel.power, kernel.offset
    if power < 1 or int(power) != power:
        raise ValueError(
            f"PolynomialKernel expects a positive integer as power, got {power}; features of other "
            "powers do not exist, so use the exact kernel or another power"
        )
    if (offset < 0).any():
        raise ValueError(
            f"PolynomialKernel expects an offset that is not negative, got {offset.tolist()}; "
            "constrain it with gpytorch.constraints.Positive()"
        )
    one, root = {int(power): offset.new_ones(())}, positive_root(offset).unsqueeze(-2)
    return DotProductSpectrum(Taylor(), one, offset.new_ones(1, 1), root)
