"""Kernels made of other kernels."""

from collections.abc import Callable

import torch
from gpytorch.kernels import Kernel
from torch import Tensor


class WrapperKernel(Kernel):
    """A kernel without parameters of its own: its batch shape is that of the kernels inside.

    gpytorch indexes and expands every buffer of a kernel as if it were batched, `active_dims`
    and drawn frequencies included; here only the kernels inside are.
    """

    def __getitem__(self, index) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel.expand_batch(*sizes))

    def _with_children(self, change: Callable[[Kernel], Kernel]) -> "WrapperKernel":
        new = type(self).__new__(type(self))  # copy.copy would share gpytorch kernels' __dict__
        new.__dict__.update(self.__dict__)
        new._modules = {
            name: change(child) if isinstance(child, Kernel) else child
            for name, child in self._modules.items()
        }
        return new


def check_inputs(kernel: Kernel, x: Tensor) -> None:
    """Refuse what has no covariance, by the name of the kernel that was given it.

    Raises:
        TypeError: inputs that are not float32 or float64, or not like the hyperparameters.
        ValueError: an empty set, NaN or infinite coordinates.
    """
    name = type(kernel).__name__
    if x.dtype not in (torch.float32, torch.float64):
        remedy = "x.float()" if x.is_floating_point() else "x.double()"
        raise TypeError(f"{name} expects float32 or float64 inputs, got {x.dtype}; pass {remedy}")
    if x.dtype != kernel.dtype:
        raise TypeError(
            f"{name} has {kernel.dtype} hyperparameters and expects inputs like them, got "
            f"{x.dtype}; convert the model (model.double()) or the inputs (x.float())"
        )
    if x.shape[-2] == 0:
        raise ValueError(f"{name} expects at least one point, got an empty set")
    invalid = int((~torch.isfinite(x)).any(-1).sum())
    if invalid:
        raise ValueError(
            f"{name} expects finite inputs, got {invalid} points with NaN or infinite "
            "coordinates; drop them"
        )
