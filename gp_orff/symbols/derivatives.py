"""First derivatives of a field: divergence, curl and Jacobian."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import Multiplier, Symbol, VectorFieldSymbol, cross_matrix, quarter_turn


@dataclass(frozen=True)
class Divergence(VectorFieldSymbol):
    """The divergence ∇·f = Σ_j ∂_j f_j of a field, one output in units of f per unit of x.

    Its multiplier is Q(ω) = iωᵀ (see `Symbol`). In use: `posterior.mean(x, gp_orff.Divergence())`.

    Example:
        The multiplier at ω = (1, 2), for a field with 2 components:

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
    """The curl ∇×f of a field in two or three dimensions, in units of f per unit of x.

    In two dimensions it is the vorticity ∂₁f₂ − ∂₂f₁, with one output, which is positive where the
    field turns counter-clockwise. In three dimensions it is the vector ∇×f, with three outputs. The
    multiplier (see `Symbol`) is Q(ω) = i(−ω₂, ω₁) or the matrix of v ↦ iω × v. In use:
    `posterior.mean(x, gp_orff.Curl())`. A posterior in other dimensions raises a ValueError.

    Example:
        The multiplier at ω = (1, 2) in two dimensions, −2i for f₁ and i for f₂:

        >>> import gp_orff, torch
        >>> gp_orff.Curl()(torch.tensor([[1.0, 2.0]]), 2).imag
        tensor([[[-2.,  1.]]])
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
    """The Jacobian matrix ∂_j f_i of a field, in units of f per unit of x.

    The matrix is flattened row by row into p·d outputs: output i·d + j is ∂_j f_i. Reshape the mean
    (n, p·d) to (n, p, d) to get matrices. The multiplier is Q(ω) = i (I_p ⊗ ω), (p·d, p), as in
    `Symbol`.

    Args:
        num_dims: d, the number of inputs in space. If None, d = p, as for a vector field.

    Example:
        >>> import gp_orff
        >>> gp_orff.Jacobian().num_outputs(3)  # f has 3 components and 3 inputs: 3 × 3
        9
        >>> gp_orff.Jacobian(num_dims=2).num_outputs(3)  # 3 components, 2 inputs: 3 × 2
        6
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
