"""Matérn kernels of any smoothness."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.cholesky import positive
from gp_orff.kernels.scalar.matern_function import MaternFunction

_SMOOTHEST = 50.0  # ν up to which values are computed; beyond, K_ν overflows near zero


class GeneralMaternKernel(Kernel):
    r"""Matérn kernel of any smoothness ν > 0.

    k(x, z) = 2^{1−ν}/Γ(ν) · u^ν K_ν(u), with u = √(2ν) ‖(x − z)/ℓ‖ and the modified Bessel
    function K_ν (Rasmussen & Williams 2006, eq. 4.14).

    gpytorch's `MaternKernel` has ν = 1/2, 3/2 or 5/2, where this is a polynomial times an
    exponential. This kernel is the same there, and some ten times slower. It is exact, alone and in
    field kernels, and has features: its spectral density is a multivariate Student t with 2ν
    degrees of freedom and scale 1/ℓ. ν is fixed: it is not trained. Values are accurate to 1e-12,
    and can be differentiated any number of times; for ν > 50, and for fields with ν < 1.2, which
    hardly have a variance, there are features only.

    Args:
        nu: ν > 0, the smoothness. `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel`
            need ν > 1.
        ard_num_dims: the number of lengthscales, one for each input; one for all inputs if None.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        TypeError: ν is not a number.
        ValueError: ν ≤ 0.
        NotImplementedError: the covariance is evaluated without an `ORFFKernel`, for ν > 50,
            or for ν < 1.2 in a field kernel.

    Example:
        >>> import gp_orff, torch
        >>> potential = gp_orff.GeneralMaternKernel(nu=1.8, ard_num_dims=2)
        >>> field = gp_orff.CurlFreeKernel(potential, num_dims=2)
        >>> field(torch.rand(5, 2)).shape
        torch.Size([10, 10])
        >>> kernel = gp_orff.ORFFKernel(field, gp_orff.MonteCarlo(64))
        >>> kernel(torch.rand(5, 2)).shape
        torch.Size([10, 10])
    """

    has_lengthscale = True

    def __init__(
        self,
        nu: float,
        *,
        ard_num_dims: int | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
        lengthscale_prior: Prior | None = None,
        lengthscale_constraint: Interval | None = None,
    ):
        if isinstance(nu, bool) or not isinstance(nu, Real):
            raise TypeError(f"GeneralMaternKernel expects nu as a number, got {nu!r}")
        if not nu > 0:
            raise ValueError(f"GeneralMaternKernel expects nu > 0, got {nu}")
        super().__init__(
            ard_num_dims=ard_num_dims,
            batch_shape=batch_shape,
            active_dims=active_dims,
            lengthscale_prior=lengthscale_prior,
            lengthscale_constraint=lengthscale_constraint,
        )
        self.nu = float(nu)

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        **params,
    ) -> Float[Tensor, "*b n m"]:
        """k(x1, x2), or its diagonal (*b, n) if `diag`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: return the diagonal only.
            params: further arguments of gpytorch's `covar_dist`.

        Raises:
            NotImplementedError: ν > 50.
        """
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            return self.correlation((x1 - x2).square().sum(-1))
        return self.correlation(self.covar_dist(x1, x2, square_dist=True, **params))

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """κ(s), or a derivative: k(x, z) = κ(s) with s = ‖(x − z)/ℓ‖².

        κ^{(j)}(s) = (−ν)^j 2^{1−ν}/Γ(ν) · u^{ν−j} K_{ν−j}(u), with u² = 2νs. For j > ν it is
        infinite at s = 0; there, a very large number is returned.

        Args:
            s: (*m), squared distances in units of the lengthscale.
            order: j, 0 for κ, 1 for κ′ and 2 for κ″.

        Raises:
            NotImplementedError: ν > 50.
        """
        if self.nu > _SMOOTHEST:
            raise NotImplementedError(
                f"GeneralMaternKernel(nu={self.nu}) has features, but values for nu <= "
                f"{_SMOOTHEST:g} only; put it inside ORFFKernel, or use gpytorch's RBFKernel, its "
                "limit for large nu"
            )
        factor = (-self.nu) ** order * 2.0 ** (1 - self.nu) / math.gamma(self.nu)
        values = MaternFunction.apply(positive(2 * self.nu * s.double()), self.nu - order)
        largest = math.sqrt(torch.finfo(s.dtype).max)  # products with a zero are zero
        return (factor * values).clamp(-largest, largest).to(s.dtype)
