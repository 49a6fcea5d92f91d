"""Scalar kernels that gpytorch does not have."""

from collections.abc import Sequence

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from torch import Tensor


class GeneralMaternKernel(Kernel):
    """Matérn kernel of any smoothness ν > 0, for features only.

    gpytorch's `MaternKernel` knows ν = 1/2, 3/2 and 5/2 in closed form. The spectral density, a
    multivariate Student t with 2ν degrees of freedom, is known for every ν; this kernel has it and
    its lengthscales, and no covariance of its own. ν is not trained.

    Args:
        nu: ν > 0. Fields need ν > 1.
        ard_num_dims, batch_shape, active_dims, lengthscale_prior, lengthscale_constraint: as for
            every gpytorch kernel.

    Raises:
        ValueError: ν ≤ 0.
        NotImplementedError: when it is evaluated without `ORFFKernel`.

    Example:
        >>> import gp_orff
        >>> potential = gp_orff.GeneralMaternKernel(nu=1.8, ard_num_dims=2)
        >>> field = gp_orff.CurlFreeKernel(potential, num_dims=2)
        >>> gp_orff.ORFFKernel(field, gp_orff.MonteCarlo(64)).num_features
        128
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
        raise NotImplementedError(
            f"GeneralMaternKernel(nu={self.nu}) has a spectral density and no closed form; put it "
            "inside ORFFKernel, or use gpytorch's MaternKernel with nu=0.5, 1.5 or 2.5"
        )


def require_covariance_of(cls: type[Kernel], kernel: Kernel) -> None:
    """Refuse subclasses with a covariance of their own, such as gpytorch's derivative kernels.

    Raises:
        NotImplementedError: naming the class to register.
    """
    if type(kernel).forward is not cls.forward:
        raise NotImplementedError(
            f"{type(kernel).__name__} inherits from {cls.__name__} but has a covariance of its "
            f"own, which is not known here; use {cls.__name__}, or register your class with "
            "@gp_orff.spectrum.register and @gp_orff.radial_derivatives.register"
        )
