"""Antiderivatives of a field: potential, stream function and vector potential."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import (
    TINY,
    Multiplier,
    VectorFieldSymbol,
    copy_of,
    cross_matrix,
    quarter_turn,
)


class _Antiderivative(VectorFieldSymbol):
    """An antiderivative of a field: rows linear in ω, times i/‖ω‖²; zero at ω = 0."""

    order = -1

    def _multiplier(self, omega: Float[Tensor, "D d"], rows: Float[Tensor, "D q p"]) -> Multiplier:
        """i · rows / ‖ω‖²."""
        square = omega.square().sum(-1)[:, None, None]
        return 1j * rows * torch.where(square > 0, 1 / square.clamp_min(TINY), 0.0)


@dataclass(frozen=True, eq=False)
class _ScalarPotential(_Antiderivative):
    """A potential with one output, known up to a constant: zero at the reference, if any."""

    reference: Float[Tensor, "d"] | None = None

    def __post_init__(self):
        if self.reference is not None:
            object.__setattr__(self, "reference", copy_of(self.reference))

    def num_outputs(self, p: int) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class Potential(_ScalarPotential):
    """The potential g with f = ∇g + (a divergence-free field) + background: Q = −iωᵀ/‖ω‖².

    One output, in units of f times units of x. A potential is known up to a constant. Without
    `reference` its mean over space is zero a priori. With it g(reference) = 0, and the error bars
    grow with the distance from there. Mind the sign: a force is often −∇ of its potential. The
    potential of the background is linear in x; it is not included.

    Args:
        reference: (d,), the point where the potential is zero; None for a zero mean over space.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Potential()(torch.tensor([[1.0, 2.0]]), 2).imag
        tensor([[[-0.2000, -0.4000]]])
    """

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._multiplier(omega, -omega.unsqueeze(-2))


@dataclass(frozen=True, eq=False)
class StreamFunction(_ScalarPotential):
    """The stream function ψ with f = (∂₂ψ, −∂₁ψ) + (a curl-free field) + background.

    Q = i(−ω₂, ω₁)/‖ω‖², for two dimensions; one output, in units of f times units of x. The field
    flows along lines of equal ψ, larger values on its left: around a maximum of ψ it turns
    counter-clockwise. Oceanographers often use the opposite sign.

    Args:
        reference: (2,), the point where ψ is zero; None for a zero mean over space a priori.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.StreamFunction()(torch.tensor([[1.0, 2.0]]), 2).imag
        tensor([[[-0.4000,  0.2000]]])
    """

    dims = (2,)

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._multiplier(omega, quarter_turn(omega).unsqueeze(-2))


@dataclass(frozen=True)
class VectorPotential(_Antiderivative):
    """The vector potential A with f = ∇×A + (a curl-free field) + background: Q = iω×/‖ω‖².

    For three dimensions; three outputs, in units of f times units of x. ∇·A = 0 (Coulomb gauge).

    Example:
        >>> import gp_orff
        >>> gp_orff.VectorPotential().num_outputs(3)
        3
    """

    dims = (3,)

    def num_outputs(self, p: int) -> int:
        return 3

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._multiplier(omega, cross_matrix(omega))
