"""Antiderivatives of a field: potential, stream function and vector potential."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import TINY, Multiplier, OfVectors, copied, cross_product, turned_left


class _Antiderivative(OfVectors):
    """A map that divides by ‖ω‖² what a derivative gives: −iv(ω)ᵀ/‖ω‖², zero at ω = 0."""

    order = -1

    def _divided(self, omega: Float[Tensor, "D d"], rows: Float[Tensor, "D q p"]) -> Multiplier:
        square = omega.square().sum(-1)[:, None, None]
        return 1j * rows * torch.where(square > 0, 1 / square.clamp_min(TINY), 0.0)


@dataclass(frozen=True, eq=False)
class _ScalarPotential(_Antiderivative):
    """One output, known up to a constant: zero at the reference, if there is one."""

    reference: Float[Tensor, "d"] | None = None

    def __post_init__(self):
        if self.reference is not None:
            object.__setattr__(self, "reference", copied(self.reference))

    def num_outputs(self, p: int) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class Potential(_ScalarPotential):
    """g with f = ∇g + (a field without divergence) + background: Q = −iωᵀ/‖ω‖²; one output.

    In units of f times those of x. A potential is known up to a constant: without `reference` its
    mean over space is zero a priori, with it g(reference) = 0 and error bars grow from there. Mind
    the sign: a force is often −∇ of its potential. The potential of the background, linear in x, is
    not included.

    Args:
        reference: (d,), the point where it is zero.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Potential()(torch.tensor([[1.0, 2.0]]), 2).imag
        tensor([[[-0.2000, -0.4000]]])
    """

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._divided(omega, -omega.unsqueeze(-2))


@dataclass(frozen=True, eq=False)
class StreamFunction(_ScalarPotential):
    """ψ with f = (∂₂ψ, −∂₁ψ) + (a field without curl) + background, two dimensions; one output.

    The field flows along lines of equal ψ, larger values on its left: around a maximum of ψ it
    turns counter-clockwise. Oceanographers often use the opposite sign. Units and `reference` as
    for `Potential`.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.StreamFunction()(torch.tensor([[1.0, 2.0]]), 2).imag
        tensor([[[-0.4000,  0.2000]]])
    """

    dims = (2,)

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._divided(omega, turned_left(omega).unsqueeze(-2))


@dataclass(frozen=True)
class VectorPotential(_Antiderivative):
    """A with f = ∇×A + (a field without curl) + background and ∇·A = 0 (Coulomb gauge), three
    dimensions; three outputs, in units of f times those of x: Q = iω×/‖ω‖².

    Example:
        >>> import gp_orff
        >>> gp_orff.VectorPotential().num_outputs(3)
        3
    """

    dims = (3,)

    def num_outputs(self, p: int) -> int:
        return 3

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._divided(omega, cross_product(omega))
