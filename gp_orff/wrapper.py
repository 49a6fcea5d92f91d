"""A kernel made of one other kernel."""

import torch
from gpytorch.kernels import Kernel


class WrapperKernel(Kernel):
    """A kernel without parameters of its own: its batch shape is that of its `base_kernel`.

    gpytorch indexes and expands every buffer of a kernel as if it were batched, `active_dims`
    and drawn frequencies included; here only the base kernel is.
    """

    base_kernel: Kernel

    def __getitem__(self, index) -> "WrapperKernel":
        return self._with_base(self.base_kernel[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "WrapperKernel":
        return self._with_base(self.base_kernel.expand_batch(*sizes))

    def _with_base(self, base_kernel: Kernel) -> "WrapperKernel":
        new = type(self).__new__(type(self))  # copy.copy would share gpytorch kernels' __dict__
        new.__dict__.update(self.__dict__)
        new._modules = dict(self._modules)
        new.base_kernel = base_kernel
        return new
