"""Kernel trees as sums of terms, and the factors B(ω) of the terms."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
from torch import Tensor, nn

from gp_orff.kernels.base import check_scalar, cholesky
from gp_orff.kernels.spectra import Spectrum, law_of
from gp_orff.kernels.variance_spectrum import VarianceSpectrum
from gp_orff.symbols.base import required

# Factors B(ω) of operator-valued spectral densities A(ω) = B(ω) B(ω)ᵀ.
#
# By the operator-valued Bochner theorem, a shift-invariant matrix-valued kernel is
# K(x, z) = ∫ e^{−i⟨ω, x−z⟩} A(ω) dμ(ω) with A(ω) ⪰ 0 (Brault et al. 2016, Proposition 2.2;
# Minh 2016, Theorem 3). Here μ is the spectral measure of a scalar kernel k, and each class below
# is one choice of A. A factor with r columns gives r features for each cosine and each sine.


class Factor(ABC):
    """A factor B(ω) of the spectral matrix A(ω) = B(ω) B(ω)ᵀ.

    Attributes:
        num_outputs: p, the number of rows of B.
        rank: r, the number of columns of B.
        num_inputs: the length of ω; None for any length.
        dims: the inputs that the base kernel depends on; None for all inputs.
        axes: for each column of a `NearZero`, the input along which ω tends to zero.
        degree: the degree of B in ω, if `closed_form`.
        closed_form: whether B is homogeneous in ω and covariances have a closed form.
        is_constant: whether B(ω) does not depend on ω.
        decays: whether waves decay with height, so that the field is not stationary.
        is_gradient: whether the field has no curl.
        is_solenoidal: whether the field has no divergence.
    """

    dims = None
    axes = ()
    degree = 0
    closed_form = True
    is_constant = False
    decays = False
    is_gradient = is_solenoidal = False

    @abstractmethod
    def __call__(self, omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b D p r"]:
        """Return B(ω) at every frequency."""


def embedded(
    omega: Float[Tensor, "*b k"], dims: Sequence[int] | None, num_inputs: int
) -> Float[Tensor, "*b d"]:
    """Return frequencies of all inputs from frequencies of the inputs `dims`, or of all if None.

    They are zero along the other inputs.
    """
    if dims is None:
        return omega
    zeros = omega.new_zeros(*omega.shape[:-1], num_inputs)
    return zeros.index_copy(-1, torch.tensor(dims, device=omega.device), omega)


@dataclass(frozen=True)
class Mixing(Factor):
    """The factor B(ω) = L of a separable kernel k(x, z) L Lᵀ."""

    matrix: Float[Tensor, "*b p r"]
    num_inputs = None
    is_constant = True

    @property
    def num_outputs(self) -> int:
        return self.matrix.shape[-2]

    @property
    def rank(self) -> int:
        return self.matrix.shape[-1]

    def __call__(self, omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b D p r"]:
        batch = torch.broadcast_shapes(omega.shape[:-2], self.matrix.shape[:-2])
        return self.matrix.unsqueeze(-3).expand(*batch, omega.shape[-2], *self.matrix.shape[-2:])


@dataclass(frozen=True)
class FieldFactor(Factor):
    """The factor of a field with a potential.

    The field has `num_outputs` components, and the potential depends on the inputs `dims`.
    """

    num_outputs: int
    dims: tuple[int, ...] | None = None
    degree = 1

    @property
    def num_inputs(self) -> int:
        return self.num_outputs

    def variance(self, spectrum: Spectrum) -> Float[Tensor, "*b d d"]:
        """Return K(0) = ∫ B Bᵀ S dω, where S is the spectrum of the potential."""
        num_dims = self.num_outputs if self.dims is None else len(self.dims)
        return self.block(torch.diag_embed(spectrum.second_moments(num_dims)))

    def block(self, outer: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b d d"]:
        """Return E[B Bᵀ] from E[ωωᵀ] of the inputs of the potential, or K(τ) from −∇∇ᵀk(τ)."""
        return self.assemble(self.embedded(self.embedded(outer).mT).mT)

    @abstractmethod
    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """Return E[B Bᵀ g(ω)] from E[ωωᵀ g(ω)], and so the kernel of the field from −∇∇ᵀk."""

    def embedded(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d"]:
        """Return frequencies of the field from frequencies of the potential."""
        return embedded(omega, self.dims, self.num_outputs)


@dataclass(frozen=True)
class Gradient(FieldFactor):
    """The factor B(ω) = ω of the curl-free kernel −∇∇ᵀk, for a potential with the kernel k."""

    rank = 1
    is_gradient = True

    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        return outer

    def __call__(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d 1"]:
        return self.embedded(omega).unsqueeze(-1)  # B(ω) = ω


@dataclass(frozen=True)
class Solenoidal(FieldFactor):
    """The factor of the divergence-free kernel (∇∇ᵀ − ΔI)k.

    B(ω) is ‖ω‖ times an orthonormal basis of the vectors orthogonal to ω. B Bᵀ = ‖ω‖² I − ωωᵀ has
    rank d − 1. A cosine or sine thus needs d − 1 features, one fewer than with the symmetric square
    root. The basis consists of the columns 2…d of the Householder reflector of ω.
    """

    is_solenoidal = True

    @property
    def rank(self) -> int:
        return self.num_outputs - 1

    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        trace = outer.diagonal(dim1=-1, dim2=-2).sum(-1)[..., None, None]
        return trace * torch.eye(outer.shape[-1], dtype=outer.dtype, device=outer.device) - outer

    def __call__(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d r"]:
        omega = self.embedded(omega)
        tiny = torch.finfo(omega.dtype).tiny
        norm = omega.square().sum(-1, keepdim=True).clamp_min(tiny).sqrt()  # (*b, D, 1)
        first, rest = omega[..., :1], omega[..., 1:]
        # There are two reflectors. In this one, ω₁ and ‖ω‖ are added. In the other one, they are
        # subtracted, which loses digits if ω is along the first axis.
        sign = torch.where(first >= 0, 1.0, -1.0).to(omega)
        # reflector I − v vᵀ/β with v = ω + sign(ω₁)‖ω‖e₁, β = ‖ω‖(‖ω‖ + |ω₁|)
        v = torch.cat([first + sign * norm, rest], dim=-1)
        outer = v.unsqueeze(-1) * (rest / (norm + first.abs())).unsqueeze(-2)
        identity = torch.eye(omega.shape[-1], dtype=omega.dtype, device=omega.device)[:, 1:]
        return norm.unsqueeze(-1) * identity - outer  # ‖ω‖ · reflector[:, 1:]


Sampler = Callable[[Float[Tensor, "D d"]], tuple[Float[Tensor, "D d"], Float[Tensor, "D"]]]


@dataclass(frozen=True)
class SpectralMatrix(Factor):
    """The factor conj B(ω) for the kernel ∫ e^{−i⟨ω, x − z⟩} B B* S dω, with B from the user."""

    amplitude: Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p r"]]
    num_outputs: int
    num_inputs: int
    rank: int
    sampler: Sampler | None = None
    closed_form = False

    def variance(self, spectrum: Spectrum) -> Float[Tensor, "*b p p"]:
        """Return K(0) = ∫ B B* S dω."""
        return self.variance_spectrum(spectrum).variance

    def variance_spectrum(self, spectrum: Spectrum) -> VarianceSpectrum:
        """Return the spectrum B B* S of the variance."""
        return VarianceSpectrum(spectrum, self, self.num_inputs)

    def __call__(self, omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b D p r"]:
        # The waves Re(m e^{i⟨ω, x⟩}) have the covariance Re(m m* e^{i⟨ω, x − z⟩}), with m = conj B.
        b = evaluate(self.amplitude, omega.flatten(0, -2))
        return b.conj().resolve_conj().unflatten(0, omega.shape[:-1])


def evaluate(amplitude: Callable, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p r"]:
    """Return the amplitude at ω, computed in the dtype of its parameters and buffers, if any.

    Raises:
        TypeError: the amplitude does not return a tensor.
    """
    tensors = (
        [*amplitude.parameters(), *amplitude.buffers()] if isinstance(amplitude, nn.Module) else []
    )
    floating = [t.dtype for t in tensors if t.is_floating_point()]
    b = amplitude(omega.to(floating[0]) if floating else omega)
    required(
        b,
        Tensor,
        "SpectralMatrixKernel expects amplitude to return a tensor (D, p, r)",
        "use torch operations",
    )
    dtype = omega.dtype.to_complex() if b.is_complex() else omega.dtype
    return b.to(omega.device, dtype)


# A kernel tree as a sum of terms.
#
# Each term is a product of scalar kernels, called its *leaves*, and a factor B(ω). A frequency of a
# product of kernels is the sum of independent frequencies of these kernels, on shared or separate
# inputs. A term without leaves is a constant.
#
# 1. A sum of kernels has the terms of all summands. Products are expanded (`products`).
# 2. A `ScaleKernel` multiplies the outputscale of terms. A kernel with several outputs replaces the
#    factor 1 of scalar terms by its factor. Therefore only one kernel of a product may have several
#    outputs.
# 3. `active_dims` are composed from the leaves upwards. The columns of an inner kernel are numbered
#    among the columns that the outer kernel selects (`Term.restricted`).
# 4. The leaf of the field is the first one in a product, because B depends on its frequency only.


@dataclass(frozen=True)
class Leaf:
    """A scalar kernel and its input columns.

    Attributes:
        kernel: the scalar kernel.
        active_dims: the input columns of the kernel; None for all columns.
    """

    kernel: Kernel
    active_dims: tuple[int, ...] | None = None

    def columns(self, num_dims: int) -> tuple[int, ...]:
        """Return the input columns of the kernel, for inputs with `num_dims` columns."""
        return self.active_dims or tuple(range(num_dims))

    @property
    def spectrum(self) -> Spectrum:
        """The spectrum of the kernel at its current hyperparameters."""
        return law_of(self.kernel)

    @property
    def is_elementary(self) -> bool:
        """Whether the class of the kernel has no registered terms."""
        return inner_terms.dispatch(type(self.kernel)) is inner_terms.dispatch(object)

    def restricted(self, outer: tuple[int, ...]) -> "Leaf":
        """Return the leaf inside a kernel that selects the input columns `outer`."""
        inner = self.active_dims
        return replace(self, active_dims=outer if inner is None else tuple(outer[i] for i in inner))


@dataclass(frozen=True)
class Term:
    """A term K(x, z) = outputscale · E[ B(ω₁) cos⟨Σ_i ω_i, x − z⟩ B(ω₁)ᵀ ] of a kernel tree.

    The frequency ω_i is drawn from the spectral measure of leaf i.

    Attributes:
        leaves: the scalar kernels.
        factor: B.
        outputscale: (*b), the outputscale.
        group: the kernel of a group of terms that share random frequencies; None without a group.
    """

    leaves: tuple[Leaf, ...]
    factor: Factor
    outputscale: Float[Tensor, "*b"]
    group: Kernel | None = None

    @property
    def num_outputs(self) -> int:
        """p, the number of components of the field."""
        return self.factor.num_outputs

    def restricted(self, active_dims: Tensor | None) -> "Term":
        """Return the term inside a kernel that selects `active_dims`, or all columns if None."""
        if active_dims is None:
            return self
        outer = tuple(active_dims.tolist())
        return replace(self, leaves=tuple(leaf.restricted(outer) for leaf in self.leaves))

    def scaled(self, outputscale: Float[Tensor, "*b"]) -> "Term":
        """Return the term times an outputscale."""
        return replace(self, outputscale=self.outputscale * outputscale)

    def with_factor(self, factor: Factor) -> "Term":
        """Return the term of a vector-valued kernel whose base kernel has this scalar term."""
        check_scalar("a kernel of vectors", self.num_outputs)
        return replace(self, factor=factor)

    def __mul__(self, other: "Term") -> "Term":
        """Return the product with another term, of which at most one has several outputs."""
        if self.num_outputs == 1 < other.num_outputs:
            return other * self
        if other.num_outputs != 1:
            raise ValueError(
                f"a product of kernels expects at most one kernel with several outputs, got "
                f"{self.num_outputs} and {other.num_outputs} outputs; use a scalar kernel for one "
                "of them"
            )
        return replace(
            self,
            leaves=self.leaves + other.leaves,
            outputscale=self.outputscale * other.outputscale,
            group=None,
        )


def terms(kernel: Kernel) -> list[Term]:
    """Return the terms whose sum is `kernel`; gradients flow to its hyperparameters."""
    return [term.restricted(kernel.active_dims) for term in inner_terms(kernel)]


def scalar_term(*leaves: Leaf, outputscale: Float[Tensor, "*b"]) -> Term:
    """Return a term with one output."""
    one = torch.ones(1, 1, dtype=outputscale.dtype, device=outputscale.device)
    return Term(leaves, Mixing(one), outputscale)


@singledispatch
def inner_terms(kernel: Kernel) -> list[Term]:
    """Return the terms of `kernel` on the inputs of `kernel.forward`.

    `active_dims` of `kernel` are already applied to these inputs. A kernel whose class is not
    registered is a leaf. It must then be a scalar kernel with a registered spectrum or registered
    radial derivatives. Register a function for a new class of kernels that contain other kernels.
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
    """Return the terms of a product of sums."""
    if len(sums) == 1:
        return sums[0]
    return [first * rest for first in sums[0] for rest in products(*sums[1:])]


@inner_terms.register
def _(kernel: ScaleKernel) -> list[Term]:
    # gpytorch calls base_kernel.forward, so active_dims of the base kernel are not applied again.
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
    # As for ScaleKernel, active_dims of the data kernel are not applied.
    mixing = Mixing(cholesky(kernel.task_covar_module.covar_matrix.to_dense()))
    return [term.with_factor(mixing) for term in inner_terms(kernel.data_covar_module)]


@inner_terms.register
def _(kernel: LCMKernel) -> list[Term]:
    return [
        replace(term, group=kernel)
        for part in kernel.covar_module_list
        for term in inner_terms(part)
    ]


def num_outputs(kernel: Kernel) -> int:
    """Return p, the number of outputs of a kernel, without computing its terms."""
    point = torch.zeros(1, 1)
    return kernel.num_outputs_per_input(point, point)


def checked_terms(kernel: object, owner: str, example: str) -> list[Term]:
    """Return the terms of a kernel, after the check that they have the same number of outputs.

    Args:
        kernel: the kernel.
        owner: the class or function that expects the kernel, for errors.
        example: an example of a correct call, for errors.

    Raises:
        TypeError: `kernel` is not an instance of a kernel.
        ValueError: the terms have different numbers of outputs.
    """
    required(
        kernel,
        Kernel,
        f"{owner} expects an instance of a gpytorch kernel first",
        f"use, for instance, {example}",
    )
    summands = terms(kernel)
    outputs = sorted({term.num_outputs for term in summands})
    if len(outputs) != 1:
        raise ValueError(
            f"{owner} expects terms with the same number of outputs, got {outputs}; wrap scalar "
            "kernels in gpytorch.kernels.MultitaskKernel"
        )
    return summands


def spectra_of(term: Term) -> list[Spectrum]:
    """Return the spectrum of every leaf of a term, at its current hyperparameters."""
    return [leaf.spectrum for leaf in term.leaves]


def infer_num_dims(parts: Sequence[Term], num_dims: int | None) -> int | None:
    """Return the number of input columns from `num_dims` or from the terms; None if unknown."""
    leaves = [(term, leaf) for term in parts for leaf in term.leaves if leaf.active_dims is None]
    numbers = [num_dims, *(_declared_dims(*pair) for pair in leaves)]
    return next((number for number in numbers if number is not None), None)


def _declared_dims(term: Term, leaf: Leaf) -> int | None:
    """Return the number of inputs that the kernel of a leaf or of the field declares."""
    field = term.factor.num_inputs if leaf is term.leaves[0] else None
    return leaf.kernel.ard_num_dims or getattr(leaf.kernel, "num_dims", None) or field


def leaf_dims(term: Term, leaf: Leaf, num_dims: int | None) -> int:
    """Return the number of input columns of a leaf.

    Raises:
        ValueError: the number is unknown.
    """
    if leaf.active_dims is not None:
        return len(leaf.active_dims)
    number = _declared_dims(term, leaf) or num_dims
    if number is None:
        raise ValueError(
            f"expected num_dims=, ard_num_dims= or active_dims= for {type(leaf.kernel).__name__}, "
            "got none of them, so that its number of inputs is unknown; pass num_dims= to "
            "ORFFKernel"
        )
    return number


def input_columns(parts: Sequence[Term], num_dims: int | None) -> tuple[int, bool]:
    """Return the number of input columns of the terms, and whether it is exact or a minimum.

    Raises:
        ValueError: the terms contradict each other or `num_dims`.
    """
    leaves = [(term, leaf) for term in parts for leaf in term.leaves]
    totals = {leaf_dims(term, leaf, num_dims) for term, leaf in leaves if leaf.active_dims is None}
    minimum = max((max(leaf.active_dims) + 1 for _, leaf in leaves if leaf.active_dims), default=1)
    numbers = totals | ({num_dims} if num_dims is not None else set())
    if len(numbers) > 1 or (numbers and minimum > min(numbers)):
        raise ValueError(
            f"expected terms on the same inputs, got {sorted(totals)} columns for kernels without "
            f"active_dims, column {minimum - 1} among active_dims, and num_dims={num_dims}; pass "
            "active_dims to kernels of some of the inputs"
        )
    return (numbers.pop(), True) if numbers else (minimum, False)


def space_of(kernel: Kernel, num_inputs: int) -> tuple[int, ...]:
    """Return the inputs that are directions of space.

    They are the inputs of the field kernels, or all inputs without field kernels.

    Raises:
        ValueError: two field kernels have different inputs.
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
            f"expected field kernels on the same inputs, got {sorted(spaces)}; pass the same "
            "active_dims to all of them"
        )
    return spaces.pop() if spaces else tuple(range(num_inputs))


def share_mixing(parts: Sequence[Term]) -> bool:
    """Return whether all terms belong to one separable kernel, with the same L."""
    first = parts[0].factor
    return all(t.factor.is_constant and t.factor.matrix is first.matrix for t in parts)


def varies_in_space(term: Term, space: Sequence[int]) -> bool:
    """Return whether a term varies in space; otherwise it belongs to the background."""
    dims = {dim for leaf in term.leaves for dim in leaf.active_dims or space}
    return bool(dims & set(space))
