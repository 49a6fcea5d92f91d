"""Parts and components of a field."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import TINY, Identity, Multiplier, OfVectors, Symbol, copied


@dataclass(frozen=True)
class CurlFreePart(OfVectors):
    """The part of the field that is a gradient: Q = ωωᵀ/‖ω‖², zero for the background.

    What is smooth and has neither curl nor divergence where the data are belongs to either part;
    its error bars say so, and are wide near the edge of the data.

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
class DivergenceFreePart(OfVectors):
    """The part of the field without divergence: Q = I − ωωᵀ/‖ω‖², zero for the background.

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
    """What does not vary: constant means and terms. Neither part of a Helmholtz split has it, and
    the two parts and the background are the field. Q = I at ω = 0 and zero elsewhere; on a grid,
    the cell around ω = 0 of a separable kernel counts as background too.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Background()(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), 1).real.flatten().tolist()
        [1.0, 0.0]
    """

    def num_outputs(self, p: int) -> int:
        return p

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        fixed = (omega == 0).all(-1)[:, None, None]
        return fixed * Identity()(omega, p)


@dataclass(frozen=True)
class Component(Symbol):
    """The component uᵀf along a vector of p numbers, of any length; one output.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Component([0.6, 0.8])(torch.zeros(1, 2), 2).real
        tensor([[[0.6000, 0.8000]]], dtype=torch.float64)
    """

    direction: Sequence[float] | Float[Tensor, "p"]
    homogeneous = True

    def __post_init__(self):
        direction = copied(self.direction)
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
