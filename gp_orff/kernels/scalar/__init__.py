"""Scalar kernels that gpytorch lacks; a check of subclasses of gpytorch's kernels."""

from gp_orff.kernels.scalar.bessel import BesselKernel
from gp_orff.kernels.scalar.general_matern import GeneralMaternKernel
from gp_orff.kernels.scalar.subclasses import require_covariance_of

__all__ = ["BesselKernel", "GeneralMaternKernel", "require_covariance_of"]
