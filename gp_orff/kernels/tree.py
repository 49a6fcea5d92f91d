"""A kernel tree, flattened into a sum of terms.

Each term is a product of scalar kernels (its *leaves*) and a factor B(ω). A frequency of a product
of kernels is the sum of independent frequencies of its factors, on shared or separate inputs. A
term without leaves is a constant.
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
    """A scalar kernel and its input columns, all if None."""

    kernel: Kernel
    active_dims: tuple[int, ...] | None = None

    def columns(self, num_dims: int) -> tuple[int, ...]:
        """The input columns of the kernel, of `num_dims` columns."""
        return self.active_dims or tuple(range(num_dims))

    @property
    def spectrum(self) -> Spectrum:
        """The spectrum of the kernel at its present hyperparameters."""
        return spectrum(self.kernel)

    @property
    def is_elementary(self) -> bool:
        """Whether the term of the kernel is the kernel itself, unscaled."""
        return inner_terms.dispatch(type(self.kernel)) is inner_terms.dispatch(object)

    def restricted(self, outer: tuple[int, ...]) -> "Leaf":
        """The leaf inside a kernel that selects these input columns."""
        inner = self.active_dims
        return replace(self, active_dims=outer if inner is None else tuple(outer[i] for i in inner))


@dataclass(frozen=True)
class Term:
    """K(x, z) = outputscale · E[ B(ω₁) cos⟨Σ_i ω_i, x − z⟩ B(ω₁)ᵀ ].

    ω_i is drawn from the spectral measure of the i-th leaf.
    """

    leaves: tuple[Leaf, ...]
    factor: Factor
    outputscale: Float[Tensor, "*b"]
    group: Kernel | None = None  # terms of one group share random frequencies

    @property
    def num_outputs(self) -> int:
        """p, the number of components of the field."""
        return self.factor.num_outputs

    def restricted(self, active_dims: Tensor | None) -> "Term":
        """The term inside a kernel that selects these input columns; all columns if None."""
        if active_dims is None:
            return self
        outer = tuple(active_dims.tolist())
        return replace(self, leaves=tuple(leaf.restricted(outer) for leaf in self.leaves))

    def scaled(self, outputscale: Float[Tensor, "*b"]) -> "Term":
        """The term times an outputscale."""
        return replace(self, outputscale=self.outputscale * outputscale)

    def with_factor(self, factor: Factor) -> "Term":
        """The term of a vector-valued kernel with this scalar term as its base kernel."""
        if self.num_outputs != 1:
            raise ValueError(
                f"{type(factor).__name__} needs a scalar base kernel, got one with "
                f"{self.num_outputs} outputs; pass the scalar kernel inside it"
            )
        return replace(self, factor=factor)

    def __mul__(self, other: "Term") -> "Term":
        """The product with a scalar term; the leaves of the vector-valued term come first."""
        if self.num_outputs == 1 < other.num_outputs:
            return other * self
        if other.num_outputs != 1:
            raise ValueError(
                f"a product of kernels expects at most one kernel with several outputs, got "
                f"{self.num_outputs} and {other.num_outputs} outputs; make one of them scalar"
            )
        return replace(
            self,
            leaves=self.leaves + other.leaves,
            outputscale=self.outputscale * other.outputscale,
            group=None,
        )


def terms(kernel: Kernel) -> list[Term]:
    """The terms whose sum is `kernel`; gradients flow to its hyperparameters."""
    return [term.restricted(kernel.active_dims) for term in inner_terms(kernel)]


def scalar_term(*leaves: Leaf, outputscale: Float[Tensor, "*b"]) -> Term:
    """A term with one output."""
    one = torch.ones(1, 1, dtype=outputscale.dtype, device=outputscale.device)
    return Term(leaves, Mixing(one), outputscale)


@singledispatch
def inner_terms(kernel: Kernel) -> list[Term]:
    """The terms of `kernel` on the inputs of `kernel.forward`, after its `active_dims` are applied.

    A kernel whose class is not registered is a leaf: a scalar kernel, which the registries of
    spectra and radial derivatives have to know. Register compositions of your own.
    """
    one = torch.ones((), dtype=kernel.dtype, device=kernel.device)
    return [scalar_term(Leaf(kernel), outputscale=one)]


@inner_terms.register
def _(kernel: AdditiveKernel) -> list[Term]:
    return [term for summand in kernel.kernels for term in terms(summand)]


@inner_terms.register
def _(kernel: ProductKernel) -> list[Term]:
    return products(*(terms(multiplicand) for multiplicand in kernel.kernels))


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
    """The spectrum of every leaf of a term, at its present hyperparameters."""
    return [leaf.spectrum for leaf in term.leaves]


def infer_num_dims(parts: Sequence[Term], num_dims: int | None) -> int | None:
    """The number of input columns: `num_dims`, or else what the terms declare; None if unknown."""
    leaves = [(term, leaf) for term in parts for leaf in term.leaves if leaf.active_dims is None]
    numbers = [num_dims, *(_declared_dims(*pair) for pair in leaves)]
    return next((number for number in numbers if number is not None), None)


def _declared_dims(term: Term, leaf: Leaf) -> int | None:
    """The number of inputs by the kernel of the leaf, or else by the kernel of the field."""
    field = term.factor.num_inputs if leaf is term.leaves[0] else None
    return leaf.kernel.ard_num_dims or getattr(leaf.kernel, "num_dims", None) or field


def leaf_dims(term: Term, leaf: Leaf, num_dims: int | None) -> int:
    """The number of input columns of a leaf.

    Raises:
        ValueError: the number is not known.
    """
    if leaf.active_dims is not None:
        return len(leaf.active_dims)
    number = _declared_dims(term, leaf) or num_dims
    if number is None:
        raise ValueError(
            f"the number of inputs of {type(leaf.kernel).__name__} is not known: expected "
            "num_dims=, ard_num_dims= or active_dims=, got none of them; pass num_dims= to "
            "ORFFKernel"
        )
    return number


def input_columns(parts: Sequence[Term], num_dims: int | None) -> tuple[int, bool]:
    """The number of input columns that the terms need, and whether it is exact (else a minimum).

    Raises:
        ValueError: terms that contradict each other or `num_dims`.
    """
    leaves = [(term, leaf) for term in parts for leaf in term.leaves]
    totals = {leaf_dims(term, leaf, num_dims) for term, leaf in leaves if leaf.active_dims is None}
    minimum = max((max(leaf.active_dims) + 1 for _, leaf in leaves if leaf.active_dims), default=1)
    numbers = totals | ({num_dims} if num_dims is not None else set())
    if len(numbers) > 1 or (numbers and minimum > min(numbers)):
        raise ValueError(
            f"expected terms on the same inputs, got {sorted(totals)} columns for "
            f"those without active_dims, column {minimum - 1} among active_dims, and "
            f"num_dims={num_dims}; give active_dims to kernels on a part of the inputs"
        )
    return (numbers.pop(), True) if numbers else (minimum, False)


def space_of(kernel: Kernel, num_inputs: int) -> tuple[int, ...]:
    """The inputs that are directions of space: those of the field kernels, else all.

    Raises:
        ValueError: field kernels on different inputs.
    """
    spaces = set()
    for term in terms(kernel):
        if term.factor.num_inputs is not None:
            dims = term.leaves[0].active_dims
            inner = term.factor.dims
            if dims is None or (inner is not None and dims == inner):
                dims = tuple(range(term.factor.num_inputs))
            spaces.add(dims)
    if len(spaces) > 1:
        raise ValueError(
            f"expected field kernels on the same inputs, got {sorted(spaces)}; give them the same "
            "active_dims"
        )
    return spaces.pop() if spaces else tuple(range(num_inputs))


def share_mixing(parts: Sequence[Term]) -> bool:
    """Whether all terms are those of one separable kernel, with the same L."""
    first = parts[0].factor
    return all(isinstance(t.factor, Mixing) and t.factor.matrix is first.matrix for t in parts)


def varies_in_space(term: Term, space: Sequence[int]) -> bool:
    """Whether a term varies in space; a term that does not belongs to the background."""
    dims = {dim for leaf in term.leaves for dim in leaf.active_dims or space}
    return bool(dims & set(space))
