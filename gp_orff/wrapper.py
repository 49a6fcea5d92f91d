"""Kernels made of other kernels."""

from collections.abc import Callable

import torch
from gpytorch.kernels import Kernel

from gp_orff.strategies import ExactFieldPredictionStrategy


class WrapperKernel(Kernel):
    """A kernel without parameters of its own: its batch shape is that of the kernels inside.

    gpytorch indexes and expands every buffer of a kernel as if it were batched, `active_dims`
    and drawn frequencies included; here only the kernels inside are.
    """

    def __getitem__(self, index) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel[index])

    def expand_batch(self, *sizes: torch.Size | int) -> "WrapperKernel":
        return self._with_children(lambda kernel: kernel.expand_batch(*sizes))

    def prediction_strategy(
        self, train_inputs, train_prior_dist, train_labels, likelihood
    ) -> ExactFieldPredictionStrategy:
        return ExactFieldPredictionStrategy(
            train_inputs, train_prior_dist, train_labels, likelihood
        )

    def _with_children(self, change: Callable[[Kernel], Kernel]) -> "WrapperKernel":
        new = type(self).__new__(type(self))  # copy.copy would share gpytorch kernels' __dict__
        new.__dict__.update(self.__dict__)
        new._modules = {
            name: change(child) if isinstance(child, Kernel) else child
            for name, child in self._modules.items()
        }
        return new
