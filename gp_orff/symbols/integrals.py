"""Integrals of a field along paths and across them; means over boxes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import (
    Identity,
    Multiplier,
    Symbol,
    VectorFieldSymbol,
    copy_of,
    quarter_turn,
)
from gp_orff.symbols.patches import Patch


@dataclass(frozen=True, eq=False)
class LineIntegral(VectorFieldSymbol):
    """The line integral ∫ f·ds along straight pieces between the corners of a path.

    One output, in units of f times units of x; for a closed path it is the circulation. Each piece
    from a to b adds e^{i⟨ω, (a+b)/2⟩} sinc(⟨ω, b−a⟩/2) (b−a)ᵀ to Q, with sinc t = sin(t)/t.

    Args:
        path: (k, d), the corners relative to the points x of evaluation: the path at x begins at
            x + path[0]. At x = 0 the corners are absolute positions.

    Raises:
        ValueError: a path that is no matrix of at least two corners.

    Example:
        >>> import gp_orff, torch
        >>> square = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
        >>> gp_orff.LineIntegral(square).num_outputs(2)
        1
    """

    path: Float[Tensor, "k d"]
    homogeneous = False

    def __post_init__(self):
        path = copy_of(self.path)
        if path.dim() != 2 or len(path) < 2:
            raise ValueError(
                f"{type(self).__name__} expects a path of at least two corners (k, d), got shape "
                f"{tuple(path.shape)}"
            )
        object.__setattr__(self, "path", path)

    def num_outputs(self, p: int) -> int:
        return 1

    def check(self, num_dims: int, p: int) -> None:
        super().check(num_dims, p)
        if self.path.shape[-1] != num_dims:
            raise ValueError(
                f"{type(self).__name__} expects corners with {num_dims} coordinates, got "
                f"{self.path.shape[-1]}"
            )

    def _vectors(self, pieces: Float[Tensor, "s d"]) -> Float[Tensor, "s p"]:
        """The vector of each piece whose inner product with the field is integrated."""
        return pieces

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        path = self.path.to(omega)
        pieces, middle = path.diff(dim=0), 0.5 * (path[1:] + path[:-1])
        phase = torch.exp(1j * (omega @ middle.mT))
        waves = phase * torch.sinc(omega @ pieces.mT / (2 * math.pi))  # (D, s)
        return (waves @ self._vectors(pieces).to(waves)).unsqueeze(-2)

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "n*k d"]:
        return _shifted(x, space, self.path)

    def patches(self, num_dims: int, p: int) -> Sequence[Patch]:
        pieces = self.path.diff(dim=0)
        rows = zip(self.path, pieces.split(1), self._vectors(pieces).split(1), strict=False)
        return [Patch(*row) for row in rows]


@dataclass(frozen=True, eq=False)
class Flux(LineIntegral):
    """The flux ∫ f·n ds across a path in two dimensions, with n to the right of the path.

    One output, in units of f times units of x. For a closed path that turns counter-clockwise, n
    points outward.

    Args:
        path: (k, 2), the corners relative to the points x of evaluation, as for `LineIntegral`.

    Raises:
        ValueError: a path that is no matrix of at least two corners.

    Example:
        >>> import gp_orff, torch
        >>> east = torch.zeros(1, 2)  # a constant field, across a path that goes north
        >>> gp_orff.Flux(torch.tensor([[0.0, 0], [0, 3]]))(east, 2).real[0, 0, 0].item()
        3.0
    """

    dims = (2,)

    def _vectors(self, pieces: Float[Tensor, "s d"]) -> Float[Tensor, "s p"]:
        return -quarter_turn(pieces)


@dataclass(frozen=True)
class BoxAverage(Symbol):
    """The mean of the field over a box centred at x: Q = Π_j sinc(ω_j w_j / 2) I.

    Here sinc t = sin(t)/t. The number of outputs and the units are those of the field.

    Args:
        widths: w, in units of x, one number for all inputs in space or (d,), one for each.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.BoxAverage(2.0)(torch.tensor([[torch.pi, 0.0]]), 1).real.abs() < 1e-7
        tensor([[[True]]])
    """

    widths: float | Sequence[float] | Float[Tensor, "d"]

    def __post_init__(self):
        widths = copy_of(self.widths).tolist()
        widths = tuple(widths) if isinstance(widths, list) else widths
        object.__setattr__(self, "widths", widths)

    def num_outputs(self, p: int) -> int:
        return p

    def check(self, num_dims: int, p: int) -> None:
        widths = torch.as_tensor(self.widths)
        if widths.numel() not in (1, num_dims) or not (widths >= 0).all():
            raise ValueError(
                f"BoxAverage expects one width or {num_dims} widths, none negative, got "
                f"{self.widths}"
            )

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        widths = torch.as_tensor(self.widths, dtype=omega.dtype, device=omega.device)
        mean = torch.sinc(omega * widths / (2 * math.pi)).prod(-1)
        return mean[:, None, None] * Identity()(omega, p)

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "2*n d"]:
        half = 0.5 * torch.as_tensor(self.widths, dtype=torch.float64).expand(len(space))
        return _shifted(x, space, torch.stack([-half, half]))

    def patches(self, num_dims: int, p: int) -> Sequence[Patch]:
        widths = torch.as_tensor(self.widths, dtype=torch.float64).expand(num_dims)
        return [Patch(-0.5 * widths, torch.diag(widths), torch.eye(p, dtype=torch.float64))]


def _shifted(
    x: Float[Tensor, "n d"], space: Sequence[int], shifts: Float[Tensor, "k s"]
) -> Float[Tensor, "k*n d"]:
    """All points x + shift, with the shifts along the columns `space`."""
    points = x.repeat(len(shifts), 1)
    points[:, list(space)] += shifts.to(x).repeat_interleave(len(x), dim=0)
    return points
