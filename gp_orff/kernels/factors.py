"""Factors B(ω) of operator-valued spectral densities A(ω) = B(ω) B(ω)ᵀ.

By the operator-valued Bochner theorem a shift-invariant matrix-valued kernel is
K(x, z) = ∫ e^{−i⟨ω, x−z⟩} A(ω) dμ(ω) with A(ω) ⪰ 0 (Brault et al. 2016, Proposition 2.2;
Minh 2016, Theorem 3). With μ the spectral measure of a scalar kernel k, each class here is one
choice of A. A factor with r columns gives r features for each trigonometric column.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.kernels.base import as_real_tensor
from gp_orff.kernels.matrix_valued.variance_spectrum import VarianceSpectrum
from gp_orff.kernels.spectra.base import Spectrum


class Factor(Protocol):
    """A factor B(ω), homogeneous of degree `degree` in ω if covariances have a closed form."""

    num_outputs: int
    num_inputs: int | None  # the length of ω; None for any
    dims: tuple[int, ...] | None  # the inputs that the base kernel depends on; None for all
    degree: int
    rank: int  # columns of B
    closed_form: bool

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
class Mixing:
    """B(ω) = L, the same for every frequency: the separable kernel k(x, z) L Lᵀ."""

    matrix: Float[Tensor, "*b p r"]
    num_inputs = dims = None
    degree = 0
    closed_form = True

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
class FieldFactor:
    """B(ω) of a field in `num_outputs` dimensions whose potential depends on the inputs `dims`."""

    num_outputs: int
    dims: tuple[int, ...] | None = None
    degree = 1
    closed_form = True

    @property
    def num_inputs(self) -> int:
        return self.num_outputs

    def variance(self, spectrum: Spectrum) -> Float[Tensor, "*b d d"]:
        """K(0) = ∫ B Bᵀ S dω, S being the spectrum of the potential."""
        num_dims = self.num_outputs if self.dims is None else len(self.dims)
        return self.block(torch.diag_embed(spectrum.second_moments(num_dims)))

    def block(self, outer: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b d d"]:
        """E[B Bᵀ] from E[ωωᵀ] over the inputs of the potential, or K(τ) from its −∇∇ᵀk."""
        return self.assemble(self.embedded_outer(outer))

    def embedded(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d"]:
        """Frequencies of the potential as frequencies of the field."""
        return embedded(omega, self.dims, self.num_outputs)

    def embedded_outer(self, outer: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b d d"]:
        """Matrices over the inputs of the potential as matrices over the inputs of the field."""
        return self.embedded(self.embedded(outer).mT).mT


@dataclass(frozen=True)
class Gradient(FieldFactor):
    """B(ω) = ω: the curl-free kernel −∇∇ᵀk of the gradient of a potential with kernel k."""

    rank = 1

    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """E[B Bᵀ g(ω)] from E[ωωᵀ g(ω)]: the kernel of the field from −∇∇ᵀk."""
        return outer

    def __call__(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d 1"]:
        return self.embedded(omega).unsqueeze(-1)  # B(ω) = ω


@dataclass(frozen=True)
class Solenoidal(FieldFactor):
    """B(ω) = ‖ω‖ · (orthonormal basis of ω^⊥): the divergence-free kernel (∇∇ᵀ − ΔI)k.

    B Bᵀ = ‖ω‖² I − ωωᵀ has rank d − 1: a trigonometric column needs d − 1 features, one fewer than
    with the symmetric square root. The basis is columns 2…d of the Householder reflector of ω.
    """

    @property
    def rank(self) -> int:
        return self.num_outputs - 1

    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """E[B Bᵀ g(ω)] from E[ωωᵀ g(ω)]: the kernel of the field from −∇∇ᵀk."""
        trace = outer.diagonal(dim1=-1, dim2=-2).sum(-1)[..., None, None]
        return trace * torch.eye(outer.shape[-1], dtype=outer.dtype, device=outer.device) - outer

    def __call__(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d r"]:
        omega = self.embedded(omega)
        tiny = torch.finfo(omega.dtype).tiny
        norm = omega.square().sum(-1, keepdim=True).clamp_min(tiny).sqrt()  # (*b, D, 1)
        first, rest = omega[..., :1], omega[..., 1:]
        sign = torch.where(first >= 0, 1.0, -1.0).to(omega)
        # reflector I − v vᵀ/β with v = ω + sign(ω₁)‖ω‖e₁, β = ‖ω‖(‖ω‖ + |ω₁|)
        v = torch.cat([first + sign * norm, rest], dim=-1)
        outer = v.unsqueeze(-1) * (rest / (norm + first.abs())).unsqueeze(-2)
        identity = torch.eye(omega.shape[-1], dtype=omega.dtype, device=omega.device)[:, 1:]
        return norm.unsqueeze(-1) * identity - outer  # ‖ω‖ · reflector[:, 1:]


Sampler = Callable[[Float[Tensor, "D d"]], tuple[Float[Tensor, "D d"], Float[Tensor, "D"]]]


@dataclass(frozen=True)
class SpectralMatrix:
    """B(ω) as a function of the user's: the kernel ∫ cos⟨ω, x − z⟩ B(ω) B(ω)ᵀ S(ω) dω."""

    amplitude: Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p r"]]
    num_outputs: int
    num_inputs: int
    rank: int
    sampler: Sampler | None = None
    dims = None
    degree = 0  # so that a potential of the field is known relative to a reference only
    closed_form = False

    def variance(self, spectrum: Spectrum) -> Float[Tensor, "*b p p"]:
        """K(0) = ∫ B Bᵀ S dω."""
        return self.variance_spectrum(spectrum).variance

    def variance_spectrum(self, spectrum: Spectrum) -> VarianceSpectrum:
        """B Bᵀ S over frequencies."""
        return VarianceSpectrum(spectrum, self, self.num_inputs)

    def __call__(self, omega: Float[Tensor, "*b D d"]) -> Float[Tensor, "*b D p r"]:
        b = evaluate(self.amplitude, omega.flatten(0, -2))
        return b.unflatten(0, omega.shape[:-1])


def evaluate(amplitude: Callable, omega: Float[Tensor, "m d"]) -> Float[Tensor, "m p r"]:
    """The amplitude at ω, computed in the type of its own parameters and buffers, if it has any."""
    tensors = (
        [*amplitude.parameters(), *amplitude.buffers()] if isinstance(amplitude, nn.Module) else []
    )
    floating = [t.dtype for t in tensors if t.is_floating_point()]
    b = amplitude(omega.to(floating[0]) if floating else omega)
    if not isinstance(b, Tensor):
        raise TypeError(
            "SpectralMatrixKernel expects amplitude to return a tensor (D, p, r), got "
            f"{type(b).__name__}; use torch operations"
        )
    remedy = "return b.real if the imaginary part is zero; delays between outputs are not supported"
    return as_real_tensor(b, "the amplitude B(ω) of SpectralMatrixKernel", remedy).to(omega)
