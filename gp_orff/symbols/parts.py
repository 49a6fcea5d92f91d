"""Parts and components of a field."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import TINY, Identity, Multiplier, Symbol, VectorFieldSymbol, copy_of


@dataclass(frozen=True)
class CurlFreePart(VectorFieldSymbol):
    """The curl-free part of the field, a gradient: Q = ωωᵀ/‖ω‖², zero for the background.

    A smooth field whose curl and divergence are both zero over the data may belong to either part.
    The error bars include this ambiguity: they are wide near the edge of the data. The number of
    outputs and the units are those of the field.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.CurlFreePart()(torch.tensor([[0.0, 2.0]]), 2).real.tolist()
        [[[0.0, 0.0], [0.0, 1.0]]]
    """

    def num_outputs(self, p: int) -> int:
        return p

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        unit = omega / omega.norm(dim=-1, keepdim=True).clamp_min(math.sqrt(TINY))
        return (unit.unsqueeze(-1) * unit.unsqueeze(-2)).to(torch.complex128)


@dataclass(frozen=True)
class DivergenceFreePart(VectorFieldSymbol):
    """The divergence-free part of the field: Q = I − ωωᵀ/‖ω‖², zero for the background.

    The number of outputs and the units are those of the field.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.DivergenceFreePart()(torch.tensor([[0.0, 2.0]]), 2).real.tolist()
        [[[1.0, 0.0], [0.0, 0.0]]]
    """

    def num_outputs(self, p: int) -> int:
        return p

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        eye = torch.eye(p, dtype=omega.dtype, device=omega.device)
        varies = (omega != 0).any(-1)[:, None, None]
        return torch.where(varies, eye - CurlFreePart()(omega, p).real, 0.0).to(torch.complex128)


@dataclass(frozen=True)
class Background(Symbol):
    """The constant part of the field, of constant means and constant terms: Q = I at ω = 0, else 0.

    The field is the sum of its curl-free part, its divergence-free part and the background. On a
    grid, the cell around ω = 0 of a separable kernel counts as background too.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Background()(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), 1).real.flatten().tolist()
        [1.0, 0.0]
    """

    def num_outputs(self, p: int) -> int:
        return p

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        constant = (omega == 0).all(-1)[:, None, None]
        return constant * Identity()(omega, p)


@dataclass(frozen=True)
class Component(Symbol):
    """The component uᵀf of the field along a vector u: Q = uᵀ; one output.

    Args:
        direction: u, (p,), of any length; it is not normalised.

    Raises:
        ValueError: a direction that is no vector of numbers.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Component([0.6, 0.8])(torch.zeros(1, 2), 2).real
        tensor([[[0.6000, 0.8000]]], dtype=torch.float64)
    """

    direction: Sequence[float] | Float[Tensor, "p"]
    homogeneous = True

    def __post_init__(self):
        direction = copy_of(self.direction)
        if direction.dim() != 1:
            raise ValueError(
                f"Component expects a direction (p,), got shape {tuple(direction.shape)}"
            )
        object.__setattr__(self, "direction", tuple(direction.tolist()))

    def num_outputs(self, p: int) -> int:
        return 1

    def check(self, num_dims: int, p: int) -> None:
        if len(self.direction) != p:
            raise ValueError(
                f"Component expects a direction of {p} numbers, got {len(self.direction)}"
            )

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        row = torch.as_tensor(self.direction, dtype=torch.complex128, device=omega.device)
        return row.expand(len(omega), 1, p)
