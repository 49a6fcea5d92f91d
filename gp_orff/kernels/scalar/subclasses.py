"""A check of subclasses of gpytorch's kernels."""

from gpytorch.kernels import Kernel


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
