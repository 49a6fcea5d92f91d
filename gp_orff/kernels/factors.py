"""Factors B(ω) of operator-valued spectral densities A(ω) = B(ω) B(ω)ᵀ.

By the operator-valued Bochner theorem a shift-invariant matrix-valued kernel is
K(x, z) = ∫ e^{−i⟨ω, x−z⟩} A(ω) dμ(ω) with A(ω) ⪰ 0 (Brault et al. 2016, Proposition 2.2;
Minh 2016, Theorem 3). With μ the spectral measure of a scalar kernel k, each class here is one
choice of A. A factor with r columns gives r features for each trigonometric column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor


class Factor(Protocol):
    """A factor B(ω), homogeneous of degree `degree` in ω."""

    num_outputs: int
    degree: int
    rank: int  # columns of B

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
    degree = 0

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
class _FieldFactor:
    """B(ω) of a field in `num_outputs` dimensions whose potential depends on the inputs `dims`."""

    num_outputs: int
    dims: tuple[int, ...] | None = None
    degree = 1

    def embedded(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d"]:
        """Frequencies of the potential as frequencies of the field."""
        return embedded(omega, self.dims, self.num_outputs)

    def embedded_outer(self, outer: Float[Tensor, "*b k k"]) -> Float[Tensor, "*b d d"]:
        """Matrices over the inputs of the potential as matrices over the inputs of the field."""
        return self.embedded(self.embedded(outer).mT).mT


@dataclass(frozen=True)
class Gradient(_FieldFactor):
    """B(ω) = ω: the curl-free kernel −∇∇ᵀk of the gradient of a potential with kernel k."""

    rank = 1

    def assemble(self, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """E[B Bᵀ g(ω)] from E[ωωᵀ g(ω)]: the kernel of the field from −∇∇ᵀk."""
        return outer

    def __call__(self, omega: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b D d 1"]:
        return self.embedded(omega).unsqueeze(-1)  # B(ω) = ω


@dataclass(frozen=True)
class Solenoidal(_FieldFactor):
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
