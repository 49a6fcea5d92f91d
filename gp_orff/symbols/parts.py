"""Parts and components of a field."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import TINY, Identity, Multiplier, Symbol, VectorFieldSymbol, copy_of


class _Part(VectorFieldSymbol):
    """A part of the Helmholtz split, with the constant mean of the field or without it."""

    background: bool = False

    def num_outputs(self, p: int) -> int:
        return p

    def of_constants(self, num_dims: int, p: int) -> Float[Tensor, "p p"]:
        return float(self.background) * torch.eye(p, dtype=torch.float64)


@dataclass(frozen=True)
class CurlFreePart(_Part):
    """The curl-free part of a field: the gradient of a potential, with the outputs and units of f.

    The background, which is the constant part of the field, belongs to neither the curl-free nor
    the divergence-free part. The multiplier (see `Symbol`) is Q(ω) = ωωᵀ/‖ω‖², and 0 at ω = 0.

    The data cannot tell the two parts apart where a smooth field has neither curl nor divergence.
    The error bars include this uncertainty, so they are wide near the edge of the data.

    Args:
        background: whether the constant mean of the field is assigned to this part.

    Example:
        At ω = (0, 2), the part of a wave v is its component along ω:

        >>> import gp_orff, torch
        >>> gp_orff.CurlFreePart()(torch.tensor([[0.0, 2.0]]), 2).real.tolist()
        [[[0.0, 0.0], [0.0, 1.0]]]
    """

    background: bool = False

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        unit = omega / omega.norm(dim=-1, keepdim=True).clamp_min(math.sqrt(TINY))
        return (unit.unsqueeze(-1) * unit.unsqueeze(-2)).to(torch.complex128)


@dataclass(frozen=True)
class DivergenceFreePart(_Part):
    """The divergence-free part of a field, without its background.

    Its Fourier multiplier, see `Symbol`, is Q(ω) = I − ωωᵀ/‖ω‖², and zero at ω = 0.

    The number of outputs and the units are those of the field.

    Args:
        background: whether the constant mean of the field is assigned to this part.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.DivergenceFreePart()(torch.tensor([[0.0, 2.0]]), 2).real.tolist()
        [[[1.0, 0.0], [0.0, 0.0]]]
    """

    background: bool = False

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        eye = torch.eye(p, dtype=omega.dtype, device=omega.device)
        varies = (omega != 0).any(-1)[:, None, None]
        return torch.where(varies, eye - CurlFreePart()(omega, p).real, 0.0).to(torch.complex128)


@dataclass(frozen=True)
class Background(Symbol):
    """The constant part of a field: constant means and constant terms of the kernel.

    Its Fourier multiplier, see `Symbol`, is Q(ω) = I at ω = 0 and zero elsewhere.

    The field is the sum of its curl-free part, its divergence-free part and the background. On a
    grid, the cell around ω = 0 of a separable kernel counts as background too.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Background()(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), 1).real.flatten().tolist()
        [1.0, 0.0]
    """

    length_power = 0

    def num_outputs(self, p: int) -> int:
        return p

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        constant = (omega == 0).all(-1)[:, None, None]
        return constant * Identity()(omega, p)


@dataclass(frozen=True)
class Component(Symbol):
    """The component uᵀf of a field along a fixed vector u, one output in units of u times f.

    The multiplier (see `Symbol`) is Q(ω) = uᵀ.

    Args:
        direction: u, (p,), of any length; it is not normalised.

    Raises:
        ValueError: `direction` is not a vector of numbers.

    Example:
        >>> import gp_orff, torch
        >>> line_of_sight = gp_orff.Component([0.6, 0.8])
        >>> line_of_sight(torch.zeros(1, 2), 2).real  # Q is the same at every frequency
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
