"""A scalar kernel that gpytorch lacks; a check of subclasses of gpytorch's kernels."""

from collections.abc import Sequence

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from torch import Tensor


class GeneralMaternKernel(Kernel):
    """Matérn kernel of any smoothness ν > 0, for Fourier features only.

    gpytorch's `MaternKernel` has ν = 1/2, 3/2 or 5/2, where the covariance has a simple closed
    form. This kernel has its spectral density instead, which is simple for every ν: a multivariate
    Student t with 2ν degrees of freedom and scale 1/ℓ. It therefore works where features are
    used, in an `ORFFKernel` and in `VectorFieldGP`, but its covariance cannot be evaluated
    directly. ν is fixed: it is not trained.

    Args:
        nu: ν > 0, the smoothness. `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel`
            need ν > 1.
        ard_num_dims: the number of lengthscales, one for each input; one for all inputs if None.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        ValueError: ν ≤ 0.
        NotImplementedError: the covariance is evaluated without an `ORFFKernel`.

    Example:
        >>> import gp_orff, torch
        >>> potential = gp_orff.GeneralMaternKernel(nu=1.8, ard_num_dims=2)
        >>> field = gp_orff.CurlFreeKernel(potential, num_dims=2)
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

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params) -> Tensor:
        """Raise, for all `x1` (n, d), `x2` (m, d) and `diag`: there is no closed form.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"GeneralMaternKernel(nu={self.nu}) has a spectral density but no closed form; put it "
            "inside ORFFKernel, or use gpytorch's MaternKernel with nu=0.5, 1.5 or 2.5"
        )


def require_covariance_of(cls: type[Kernel], kernel: Kernel) -> None:
    """Refuse subclasses of `cls` that override its covariance, such as gpytorch's `RBFKernelGrad`.

    Raises:
        NotImplementedError: a kernel with another `forward` than `cls`.
    """
    if type(kernel).forward is not cls.forward:
        raise NotImplementedError(
            f"{type(kernel).__name__} inherits from {cls.__name__} but has a covariance of its "
            f"own, which is not known here; use {cls.__name__}, or register your class with "
            "@gp_orff.spectrum.register and @gp_orff.radial_derivatives.register"
        )
