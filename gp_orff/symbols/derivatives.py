"""First derivatives of a field: divergence, curl and Jacobian."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import Multiplier, Symbol, VectorFieldSymbol, cross_matrix, quarter_turn


@dataclass(frozen=True)
class Divergence(VectorFieldSymbol):
    """The divergence ∇·f = Σ_j ∂_j f_j: Q = iωᵀ; one output, in units of f per unit of x.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Divergence()(torch.tensor([[1.0, 2.0]]), 2)
        tensor([[[0.+1.j, 0.+2.j]]])
    """

    order = 1

    def num_outputs(self, p: int) -> int:
        return 1

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return 1j * omega.unsqueeze(-2)


@dataclass(frozen=True)
class Curl(VectorFieldSymbol):
    """The curl ∇×f, in units of f per unit of x.

    In two dimensions it is the vorticity ∂₁f₂ − ∂₂f₁: Q = i(−ω₂, ω₁), one output, positive where
    the field turns counter-clockwise. In three it is the vector ∇×f: Q = iω×, three outputs.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.Curl()(torch.tensor([[1.0, 2.0]]), 2)
        tensor([[[-0.-2.j, 0.+1.j]]])
    """

    order = 1
    dims = (2, 3)

    def num_outputs(self, p: int) -> int:
        return 1 if p == 2 else 3

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        if p == 2:
            return 1j * quarter_turn(omega).unsqueeze(-2)
        return 1j * cross_matrix(omega)


@dataclass(frozen=True)
class Jacobian(Symbol):
    """The Jacobian J_ij = ∂_j f_i, in units of f per unit of x.

    It has p·d outputs, row by row: output i·d + j is ∂_j f_i. Q = i (I_p ⊗ ω), (p·d, p).

    Args:
        num_dims: d, the number of inputs in space; the number of components p if None.

    Example:
        >>> import gp_orff
        >>> gp_orff.Jacobian().num_outputs(3)  # in three dimensions
        9
    """

    num_dims: int | None = None
    order, homogeneous = 1, True

    def __post_init__(self):
        if self.num_dims is not None:
            object.__setattr__(self, "num_dims", int(self.num_dims))

    def num_outputs(self, p: int) -> int:
        return p * (self.num_dims or p)

    def check(self, num_dims: int, p: int) -> None:
        if num_dims != (self.num_dims or p):
            raise ValueError(
                f"{self} expects a field on {self.num_dims or p} inputs in space, got {num_dims}; "
                f"use Jacobian(num_dims={num_dims})"
            )

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        eye = torch.eye(p, dtype=omega.dtype, device=omega.device)
        rows = eye[:, None, :] * omega[:, None, :, None]  # (D, p, d, p)
        return 1j * rows.flatten(1, 2)
