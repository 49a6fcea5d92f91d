"""A kernel tree, flattened into a sum of terms.

Each term is a product of scalar kernels (its *leaves*) with a factor B(ω). Products of kernels on
any inputs are sums of independent frequencies; a term without leaves is a constant.
"""

from collections.abc import Sequence
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

from gp_orff.kernels.cholesky import cholesky
from gp_orff.kernels.factors import Factor, Mixing
from gp_orff.kernels.spectra.base import Spectrum, spectrum


@dataclass(frozen=True)
class Leaf:
    """A scalar kernel and the input columns it sees, all if None."""

    kernel: Kernel
    active_dims: tuple[int, ...] | None = None

    def columns(self, num_dims: int) -> tuple[int, ...]:
        """Those it sees of so many."""
        return self.active_dims or tuple(range(num_dims))

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


def spectra_of(term: Term) -> list[Spectrum]:
    """Of every leaf, at its present hyperparameters."""
    return [spectrum(leaf.kernel) for leaf in term.leaves]


def infer_num_dims(found: Sequence[Term], num_dims: int | None) -> int | None:
    """The number of input columns, from the terms that know it where it is not given."""
    leaves = [(term, leaf) for term in found for leaf in term.leaves if leaf.active_dims is None]
    known = [num_dims, *(_own_dims(*pair) for pair in leaves)]
    return next((own for own in known if own is not None), None)


def _own_dims(term: Term, leaf: Leaf) -> int | None:
    field = term.factor.num_outputs if term.factor.degree and leaf is term.leaves[0] else None
    return leaf.kernel.ard_num_dims or field


def leaf_dims(term: Term, leaf: Leaf, num_dims: int | None) -> int:
    """The number of input columns a leaf sees."""
    if leaf.active_dims is not None:
        return len(leaf.active_dims)
    known = _own_dims(term, leaf) or num_dims
    if known is None:
        raise ValueError(
            f"the number of inputs of {type(leaf.kernel).__name__} is not known: expected "
            "num_dims=, ard_num_dims= or active_dims=, got none of them; pass num_dims= to "
            "ORFFKernel"
        )
    return known


def input_columns(parts: Sequence[Term], num_dims: int | None) -> tuple[int, bool]:
    """The number of input columns the terms need, and whether there may be no more.

    Raises:
        ValueError: terms that contradict each other or `num_dims`.
    """
    leaves = [(term, leaf) for term in parts for leaf in term.leaves]
    whole = {leaf_dims(term, leaf, num_dims) for term, leaf in leaves if leaf.active_dims is None}
    least = max((max(leaf.active_dims) + 1 for _, leaf in leaves if leaf.active_dims), default=1)
    known = whole | ({num_dims} if num_dims is not None else set())
    if len(known) > 1 or (known and least > min(known)):
        raise ValueError(
            f"expected terms that see the same inputs, got {sorted(whole)} columns for "
            f"those without active_dims, column {least - 1} among active_dims, and "
            f"num_dims={num_dims}; give active_dims to kernels that see a part of the inputs"
        )
    return (known.pop(), True) if known else (least, False)


def space_of(kernel: Kernel, num_inputs: int) -> tuple[int, ...]:
    """The inputs that are directions of space: those of the field kernels, else all of them."""
    found = set()
    for term in terms(kernel):
        if term.factor.degree:
            dims = term.leaves[0].active_dims
            inner = term.factor.dims
            if dims is None or (inner is not None and dims == inner):
                dims = tuple(range(term.num_outputs))
            found.add(dims)
    if len(found) > 1:
        raise ValueError(f"expected field kernels on the same inputs, got {sorted(found)}")
    return found.pop() if found else tuple(range(num_inputs))


def varies_in_space(term: Term, space: Sequence[int]) -> bool:
    """Whether a term varies in space: what does not is background."""
    seen = {dim for leaf in term.leaves for dim in leaf.active_dims or space}
    return bool(seen & set(space))
