"""A kernel tree, flattened: every leaf with its scale, its factor B(ω) and the inputs it sees."""

from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, MultitaskKernel, ScaleKernel
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.factors import Factor, Mixing


@dataclass(frozen=True)
class Term:
    """K(x, z) = outputscale · E[ B(ω) cos⟨ω, x − z⟩ B(ω)ᵀ ], ω from the spectrum of `kernel`."""

    kernel: Kernel
    factor: Factor
    outputscale: Float[Tensor, "*b"]
    active_dims: tuple[int, ...] | None = None

    def restricted(self, active_dims: Tensor | None) -> "Term":
        """The term as seen from outside a kernel that selects these input columns."""
        if active_dims is None:
            return self
        outer = tuple(active_dims.tolist())
        inner = self.active_dims
        return replace(self, active_dims=outer if inner is None else tuple(outer[i] for i in inner))

    def with_factor(self, factor: Factor) -> "Term":
        """The term of a vector-valued kernel built on this scalar one."""
        if self.factor.num_outputs != 1:
            raise ValueError(
                f"{type(factor).__name__} needs a scalar base kernel, got one with "
                f"{self.factor.num_outputs} outputs; pass the scalar kernel inside it"
            )
        return replace(self, factor=factor)


def terms(kernel: Kernel) -> list[Term]:
    """The terms whose sum is `kernel`, its hyperparameters as live tensors."""
    return [term.restricted(kernel.active_dims) for term in inner_terms(kernel)]


@singledispatch
def inner_terms(kernel: Kernel) -> list[Term]:
    """`terms` on the inputs that `kernel.forward` sees, its own `active_dims` already selected.

    A kernel that is not named here is a leaf: a scalar kernel, to be looked up in the registries
    of spectra and radial derivatives. Register compositions of your own.
    """
    one = torch.ones(1, 1, dtype=kernel.dtype, device=kernel.device)
    return [Term(kernel, Mixing(one), outputscale=one.squeeze())]


@inner_terms.register
def _(kernel: AdditiveKernel) -> list[Term]:
    return [term for part in kernel.kernels for term in terms(part)]


@inner_terms.register
def _(kernel: ScaleKernel) -> list[Term]:
    # gpytorch calls base_kernel.forward: the base kernel's own active_dims are not applied again
    return [
        replace(term, outputscale=term.outputscale * kernel.outputscale)
        for term in inner_terms(kernel.base_kernel)
    ]


@inner_terms.register
def _(kernel: MultitaskKernel) -> list[Term]:
    # as above, forward of the data kernel: its own active_dims are not applied
    mixing = Mixing(psd_safe_cholesky(kernel.task_covar_module.covar_matrix.to_dense()))
    return [term.with_factor(mixing) for term in inner_terms(kernel.data_covar_module)]
