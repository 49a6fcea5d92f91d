"""A kernel as a sum of terms, and their factors B(ω)."""

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
# By the operator-valued Bochner theorem a shift-invariant matrix-valued kernel is
# K(x, z) = ∫ e^{−i⟨ω, x−z⟩} A(ω) dμ(ω) with A(ω) ⪰ 0 (Brault et al. 2016, Proposition 2.2;
# Minh 2016, Theorem 3). With μ the spectral measure of a scalar kernel k, each class here is one
# choice of A. A factor with r columns gives r features for each trigonometric column.


class Factor(ABC):
    """A factor B(ω), homogeneous of degree `degree` in ω if covariances have a closed form.

    It has `num_outputs`, p, `rank`, the number of columns of B, and `num_inputs`, the length of ω,
    None for any.
    """

    dims = None  # the inputs that the base kernel depends on; None for all
    axes = ()  # the input along which ω tends to zero, for each column of a `NearZero`
    degree = 0
    closed_form = True
    is_constant = False  # whether B(ω) is the same for every ω, a `Mixing`
    decays = False  # whether waves decay with height: those of a field that is not stationary
    is_gradient = is_solenoidal = False  # whether its fields have no curl, or no divergence

    @abstractmethod
    def __call__(self, omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b D p r"]:
        """B(ω) at every frequency."""


def embedded(
    omega: Float[Tensor, "*b k"], dims: Sequence[int] | None, num_inputs: int
) -> Float[Tensor, "*b d"]:
    """Frequencies of the inputs `dims` (None: all) as frequencies of all inputs, zero elsewhere."""
    if dims is None:
        return omega
    zeros = omega.new_zeros(*omega.shape[:-1], num_inputs)
    return zeros.index_copy(-1, torch.tensor(dims, device=omega.device), omega)


@dataclass(frozen=True)
class Mixing(Factor):
    """B(ω) = L, the same for every frequency: the separable kernel k(x, z) L Lᵀ."""

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
    """B(ω) of a field in `num_outputs` dimensions whose potential depends on the inputs `dims`."""

    num_outputs: int
    dims: tuple[int, ...] | None = None
    degree = 1

    @property
    def num_inputs(self) -> int:
        return self.num_outputs

    def variance(self, spectrum: Spectrum) -> Float[Tensor, "*b d d"]:
        """K(0) = ∫ B Bᵀ S dω, S being the spectrum of the potential."""
        num_dims = self.num_outputs if self.dims is None else len(self.dims)
        return self.block(torch.diag_embed(spectrum.second_moments(num_dims)))

    def block(self, outer: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b d d"]:
        """E[B Bᵀ] from E[ωωᵀ] over the inputs of the potential, or K(τ) from its −∇∇ᵀk."""
        return self.assemble(self.embedded(self.embedded(outer).mT).mT)

    @abstractmethod
    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """E[B Bᵀ g(ω)] from E[ωωᵀ g(ω)]: the kernel of the field from −∇∇ᵀk."""

    def embedded(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d"]:
        """Frequencies of the potential as frequencies of the field."""
        return embedded(omega, self.dims, self.num_outputs)


@dataclass(frozen=True)
class Gradient(FieldFactor):
    """B(ω) = ω: the curl-free kernel −∇∇ᵀk of the gradient of a potential with kernel k."""

    rank = 1
    is_gradient = True

    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        return outer

    def __call__(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d 1"]:
        return self.embedded(omega).unsqueeze(-1)  # B(ω) = ω


@dataclass(frozen=True)
class Solenoidal(FieldFactor):
    """B(ω) = ‖ω‖ · (orthonormal basis of ω^⊥): the divergence-free kernel (∇∇ᵀ − ΔI)k.

    B Bᵀ = ‖ω‖² I − ωωᵀ has rank d − 1: a trigonometric column needs d − 1 features, one fewer than
    with the symmetric square root. The basis is columns 2…d of the Householder reflector of ω.
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
        # Of the two reflectors, the one in which ω₁ and ‖ω‖ add up: the other has a difference of
        # nearly equal numbers where ω is along the first axis.
        sign = torch.where(first >= 0, 1.0, -1.0).to(omega)
        # reflector I − v vᵀ/β with v = ω + sign(ω₁)‖ω‖e₁, β = ‖ω‖(‖ω‖ + |ω₁|)
        v = torch.cat([first + sign * norm, rest], dim=-1)
        outer = v.unsqueeze(-1) * (rest / (norm + first.abs())).unsqueeze(-2)
        identity = torch.eye(omega.shape[-1], dtype=omega.dtype, device=omega.device)[:, 1:]
        return norm.unsqueeze(-1) * identity - outer  # ‖ω‖ · reflector[:, 1:]


Sampler = Callable[[Float[Tensor, "D d"]], tuple[Float[Tensor, "D d"], Float[Tensor, "D"]]]


@dataclass(frozen=True)
class SpectralMatrix(Factor):
    """The conjugate of B(ω), a function of the user's: the kernel ∫ e^{−i⟨ω, x − z⟩} B B* S dω."""

    amplitude: Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p r"]]
    num_outputs: int
    num_inputs: int
    rank: int
    sampler: Sampler | None = None
    closed_form = False

    def variance(self, spectrum: Spectrum) -> Float[Tensor, "*b p p"]:
        """K(0) = ∫ B B* S dω."""
        return self.variance_spectrum(spectrum).variance

    def variance_spectrum(self, spectrum: Spectrum) -> VarianceSpectrum:
        """B B* S over frequencies."""
        return VarianceSpectrum(spectrum, self, self.num_inputs)

    def __call__(self, omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b D p r"]:
        # The waves Re(m e^{i⟨ω, x⟩}) have the covariance Re(m m* e^{i⟨ω, x − z⟩}), with m = conj B.
        b = evaluate(self.amplitude, omega.flatten(0, -2))
        return b.conj().resolve_conj().unflatten(0, omega.shape[:-1])


def evaluate(amplitude: Callable, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p r"]:
    """The amplitude at ω, computed in the type of its own parameters and buffers, if it has any."""
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


# A kernel tree, flattened into a sum of terms.
#
# Each term is a product of scalar kernels (its *leaves*) and a factor B(ω). A frequency of a
# product of kernels is the sum of independent frequencies of its factors, on shared or separate
# inputs. A term without leaves is a constant.
#
# 1. Sums concatenate the terms of their parts, and products multiply out (`products`).
# 2. Scales multiply the outputscale, and kernels of several outputs replace the factor 1 of scalar
#    terms by theirs; hence only one kernel of a product may have several outputs.
# 3. `active_dims` are composed on the way up: columns of an inner kernel count among those that the
#    outer one selects (`Term.restricted`).
# 4. The leaf of the field comes first in a product, because B is a function of its frequency alone.


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
        return law_of(self.kernel)

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
        check_scalar("a kernel of vectors", self.num_outputs)
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


def num_outputs(kernel: Kernel) -> int:
    """p, the number of outputs, for which no term has to be computed."""
    point = torch.zeros(1, 1)
    return kernel.num_outputs_per_input(point, point)


def checked_terms(kernel: object, owner: str, example: str) -> list[Term]:
    """The terms of the kernel that `owner` was given, which have one number of outputs.

    Raises:
        TypeError: it is not a kernel; the message has the example.
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
            f"{owner} expects terms with one number of outputs, got {outputs}; wrap scalar kernels "
            "in gpytorch.kernels.MultitaskKernel"
        )
    return summands


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
    return all(t.factor.is_constant and t.factor.matrix is first.matrix for t in parts)


def varies_in_space(term: Term, space: Sequence[int]) -> bool:
    """Whether a term varies in space; a term that does not belongs to the background."""
    dims = {dim for leaf in term.leaves for dim in leaf.active_dims or space}
    return bool(dims & set(space))
