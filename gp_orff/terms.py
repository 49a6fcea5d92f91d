"""A kernel tree, flattened into a sum of terms.

Each term is a product of scalar kernels (its *leaves*) with a factor B(ω). Products of kernels on
any inputs are sums of independent frequencies; a term without leaves is a constant.
"""

from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from gpytorch.kernels import (
    AdditiveKernel,
    ConstantKernel,
    Kernel,
    LCMKernel,
    MultitaskKernel,
    ProductKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)
from jaxtyping import Float
from torch import Tensor

from gp_orff.cholesky import cholesky
from gp_orff.factors import Factor, Mixing


@dataclass(frozen=True)
class Leaf:
    """A scalar kernel and the input columns it sees, all if None."""

    kernel: Kernel
    active_dims: tuple[int, ...] | None = None

    def restricted(self, outer: tuple[int, ...]) -> "Leaf":
        inner = self.active_dims
        return replace(self, active_dims=outer if inner is None else tuple(outer[i] for i in inner))


@dataclass(frozen=True)
class Term:
    """K(x, z) = outputscale · E[ B(ω₁) cos⟨Σ_i ω_i, x − z⟩ B(ω₁)ᵀ ], ω_i from the i-th leaf."""

    leaves: tuple[Leaf, ...]
    factor: Factor
    outputscale: Float[Tensor, "*b"]
    group: Kernel | None = None  # terms of one group may share their frequencies

    @property
    def num_outputs(self) -> int:
        return self.factor.num_outputs

    def restricted(self, active_dims: Tensor | None) -> "Term":
        """The term as seen from outside a kernel that selects these input columns."""
        if active_dims is None:
            return self
        outer = tuple(active_dims.tolist())
        return replace(self, leaves=tuple(leaf.restricted(outer) for leaf in self.leaves))

    def scaled(self, outputscale: Float[Tensor, "*b"]) -> "Term":
        return replace(self, outputscale=self.outputscale * outputscale)

    def with_factor(self, factor: Factor) -> "Term":
        """The term of a vector-valued kernel built on this scalar one."""
        if self.num_outputs != 1:
            raise ValueError(
                f"{type(factor).__name__} needs a scalar base kernel, got one with "
                f"{self.num_outputs} outputs; pass the scalar kernel inside it"
            )
        return replace(self, factor=factor)

    def __mul__(self, other: "Term") -> "Term":
        """The product with a scalar term; the leaves of the vector-valued one come first."""
        if self.num_outputs == 1 < other.num_outputs:
            return other * self
        if other.num_outputs != 1:
            raise ValueError(
                f"a product of kernels expects at most one with several outputs, got "
                f"{self.num_outputs} and {other.num_outputs} outputs"
            )
        return replace(
            self,
            leaves=self.leaves + other.leaves,
            outputscale=self.outputscale * other.outputscale,
            group=None,
        )


def terms(kernel: Kernel) -> list[Term]:
    """The terms whose sum is `kernel`, its hyperparameters as live tensors."""
    return [term.restricted(kernel.active_dims) for term in inner_terms(kernel)]


def scalar_term(*leaves: Leaf, outputscale: Float[Tensor, "*b"]) -> Term:
    """A term with one output."""
    one = torch.ones(1, 1, dtype=outputscale.dtype, device=outputscale.device)
    return Term(leaves, Mixing(one), outputscale)


@singledispatch
def inner_terms(kernel: Kernel) -> list[Term]:
    """`terms` on the inputs that `kernel.forward` sees, its own `active_dims` already selected.

    A kernel that is not named here is a leaf: a scalar kernel, to be looked up in the registries
    of spectra and radial derivatives. Register compositions of your own.
    """
    one = torch.ones((), dtype=kernel.dtype, device=kernel.device)
    return [scalar_term(Leaf(kernel), outputscale=one)]


@inner_terms.register
def _(kernel: AdditiveKernel) -> list[Term]:
    return [term for part in kernel.kernels for term in terms(part)]


@inner_terms.register
def _(kernel: ProductKernel) -> list[Term]:
    return products(*(terms(part) for part in kernel.kernels))


def products(*sums: list[Term]) -> list[Term]:
    """The terms of a product of sums."""
    if len(sums) == 1:
        return sums[0]
    return [first * rest for first in sums[0] for rest in products(*sums[1:])]


@inner_terms.register
def _(kernel: ScaleKernel) -> list[Term]:
    # gpytorch calls base_kernel.forward: the base kernel's own active_dims are not applied again
    return [term.scaled(kernel.outputscale) for term in inner_terms(kernel.base_kernel)]


@inner_terms.register
def _(kernel: ConstantKernel) -> list[Term]:
    return [scalar_term(outputscale=kernel.constant.squeeze(-1))]


@inner_terms.register
def _(kernel: SpectralMixtureKernel) -> list[Term]:
    variance = kernel.mixture_weights.sum(-1) ** kernel.ard_num_dims  # k(0)
    return [scalar_term(Leaf(kernel), outputscale=variance)]


@inner_terms.register
def _(kernel: MultitaskKernel) -> list[Term]:
    # as for ScaleKernel, the data kernel's own active_dims are not applied
    mixing = Mixing(cholesky(kernel.task_covar_module.covar_matrix.to_dense()))
    return [term.with_factor(mixing) for term in inner_terms(kernel.data_covar_module)]


@inner_terms.register
def _(kernel: LCMKernel) -> list[Term]:
    return [
        replace(term, group=kernel)
        for part in kernel.covar_module_list
        for term in inner_terms(part)
    ]
