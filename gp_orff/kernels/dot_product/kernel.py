"""`DotProductKernel`: kernels that are functions of inner products."""

from collections.abc import Sequence

import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.kernels.base import as_real_tensor, check_num_dims, check_points
from gp_orff.kernels.dot_product.series import LegendreSeries, Projections, Series, Taylor


class DotProductKernel(Kernel):
    r"""Dot-product kernel k(x, x′) = Σ_n a_n ⟨x, x′⟩ⁿ with coefficients a_n ≥ 0.

    A non-negative power series is positive definite in any number of inputs (Schoenberg 1942). In d
    inputs there are more such kernels: `from_legendre` makes each that is a sum over degrees, and
    `from_projections` sums of powers of projections. The kernel is not stationary: it depends on
    lengths and angles of the inputs. Scale these to about unit length, since powers grow fast.

    The positive coefficients are trained, as one parameter of this kernel; those that are zero
    stay zero.

    **Features.** In an `ORFFKernel` with a random rule, D columns ‖x‖ⁿ L_{m,d}(⟨x, z⟩/‖x‖) stand
    for the dᵐ monomials. z is uniform on the sphere, and L_{m,d} a Legendre polynomial of dimension
    d (Le et al. 2013, Corollary 4 and Section 4.5). The same holds for gpytorch's `LinearKernel`
    and `PolynomialKernel`. Each rule has two measures for the degree n and the order m:

    - `"base"`: ∝ λ_nm, the share of the variance of a unit vector. It has the smaller error with
      many inputs.
    - `"trace"`, the default, which is good for few and for many inputs: half of the columns as with
      "base", the others ∝ λ_nm N(d, m), where N(d, m) is the number of spherical harmonics, as in
      Corollary 4. That law alone bounds all
      columns by √(Σ λ N / D) for unit vectors, here by √2 times that. But N grows like dᵐ, and with
      20 inputs nearly all columns have the highest order: hence the first half. The variance of the
      approximate kernel is at most twice that with "base", or with Corollary 4.

    ⟨x, z⟩ comes from `Fastfood` and its siblings in O(D log d) operations.

    Permutations as inputs: flattened permutation matrices have the inner product "number of places
    in which both agree" (Le et al. 2013, Remark 8); see the example.

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
        >>> kernel = gp_orff.DotProductKernel([1 / math.factorial(n) for n in range(8)])
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
        >>> kernel = gp_orff.DotProductKernel.from_taylor([0.0, 0.0, 1.0])  # agreements squared
        >>> kernel(matrices.flatten(1)).to_dense()[0].round()
        tensor([16.,  4.,  0.], grad_fn=<RoundBackward0>)
    """

    def __init__(
        self,
        coefficients: Sequence[float] | Float[Tensor, "*b n"],
        *,
        active_dims: tuple[int, ...] | None = None,
    ):
        values = _checked(coefficients)
        super().__init__(batch_shape=values.shape[:-1], active_dims=active_dims)
        positive = (values > 0).reshape(-1, values.shape[-1]).all(0)
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

        L_{m,d} is the Legendre polynomial of dimension d with L_{m,d}(1) = 1. On the unit sphere
        these are all dot-product kernels κ(⟨x, x′⟩) that are positive definite there. Off the
        sphere, each order has its own degree of ‖x‖, so that k is no function of ⟨x, x′⟩ alone.

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
            >>> kernel = gp_orff.DotProductKernel.from_legendre([0.5, 0.3, 0.2], num_dims=3)
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

        Le et al. 2013, Section 3.4, eq. 28; of the sum that follows eq. 32, only even i count.

        Args:
            coefficients: c_0, c_1, …, (\*b, n + 1), non-negative, at least one of them positive.
            num_dims: d ≥ 2, the number of inputs.
            active_dims: the d input columns of the kernel; all columns if None.

        Raises:
            ValueError: d < 2, or coefficients that are negative, not finite, or all zero.
            TypeError: `num_dims` is not an integer.

        Example:
            >>> import gp_orff, torch
            >>> kernel = gp_orff.DotProductKernel.from_projections([0.0, 3.0], num_dims=3)
            >>> x = torch.randn(4, 3)
            >>> torch.allclose(kernel(x).to_dense(), x @ x.mT, atol=1e-5)
            True
        """
        return ProjectionKernel(coefficients, num_dims, active_dims=active_dims)

    @property
    def series(self) -> Series:
        """The form of the kernel that has these coefficients: a power series."""
        return Taylor()

    @property
    def num_dims(self) -> int | None:
        """d, the only number of inputs in which the kernel exists; None if it exists in any."""
        return self.series.num_dims

    @property
    def coefficients(self) -> Float[Tensor, "*b K"]:
        """The positive coefficients (\\*b, K), those of the powers `degrees`; they are trained."""
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
        self._series = LegendreSeries(num_dims)

    @property
    def series(self) -> LegendreSeries:
        return self._series


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
        self._series = Projections(num_dims)

    @property
    def series(self) -> Projections:
        return self._series


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
