"""Base class of kernels that contain other kernels; checks of inputs."""

from collections.abc import Callable

import torch
from gpytorch.kernels import Kernel
from torch import Tensor


class WrapperKernel(Kernel):
    """A kernel without parameters of its own; its batch shape is that of the kernels inside.

    gpytorch indexes and expands every buffer of a kernel as if it were batched, even `active_dims`
    and frequencies. This class indexes and expands only the kernels inside.
    """

    def __getitem__(self, index) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "WrapperKernel":
        """This kernel with the kernels inside expanded to the batch shape `sizes`."""
        return self._with_children(lambda kernel: kernel.expand_batch(*sizes))

    def _with_children(self, change: Callable[[Kernel], Kernel]) -> "WrapperKernel":
        """A copy of this kernel in which `change` has been applied to each kernel inside."""
        new = type(self).__new__(type(self))  # copy.copy would share gpytorch kernels' __dict__
        new.__dict__.update(self.__dict__)
        new._parameters, new._buffers = dict(self._parameters), dict(self._buffers)
        new._modules = {
            name: change(child) if isinstance(child, Kernel) else child
            for name, child in self._modules.items()
        }
        return new


def check_inputs(kernel: Kernel, x: Tensor) -> None:
    """Refuse inputs that have no covariance; messages name the kernel.

    Raises:
        TypeError: inputs that are not float32 or float64, or not of the hyperparameters' dtype.
        ValueError: no points, or NaN or infinite coordinates.
    """
    name = type(kernel).__name__
    if x.dtype not in (torch.float32, torch.float64):
        remedy = "x.float()" if x.is_floating_point() else "x.double()"
        raise TypeError(f"{name} expects float32 or float64 inputs, got {x.dtype}; pass {remedy}")
    if x.dtype != kernel.dtype:
        raise TypeError(
            f"{name} has {kernel.dtype} hyperparameters and expects inputs of the same type, got "
            f"{x.dtype}; convert the inputs, x.to({kernel.dtype}), or the model, by .float() or "
            ".double()"
        )
    if x.shape[-2] == 0:
        raise ValueError(f"{name} expects at least one point, got an empty set")
    invalid = int((~torch.isfinite(x)).any(-1).sum())
    if invalid:
        raise ValueError(
            f"{name} expects finite inputs, got {invalid} points with NaN or infinite "
            "coordinates; drop them"
        )
