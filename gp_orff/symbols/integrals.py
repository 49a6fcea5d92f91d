"""Line integrals of a field, fluxes across paths, and means over boxes."""

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
    """The line integral ∫ f·ds of a field along a path of straight segments.

    It has one output, in units of f times units of x. For a closed path, it is the circulation. The
    multiplier (1, d) (see `Symbol`) is a sum over the segments. The segment from corner a to corner
    b contributes e^{i⟨ω, (a+b)/2⟩} sinc(⟨ω, b−a⟩/2) (b−a)ᵀ, with sinc t = sin(t)/t.

    Args:
        path: (k, d), the k ≥ 2 corners in order, in units of x and relative to the point x of
            evaluation. The path at x begins at x + path[0]. If you evaluate the integral at x = 0,
            the corners are absolute positions.

    Raises:
        TypeError: `path` has a unit; pass plain numbers in units of x.
        ValueError: `path` is not a matrix with at least two rows.

    Example:
        The circulation of f = (−x₂, x₁), whose curl is 2, around a square of area 1/4:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     *[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
        ... )
        >>> y = torch.stack([-x[:, 1], x[:, 0]], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> square = torch.tensor(
        ...     [[0.0, 0], [0.5, 0], [0.5, 0.5], [0, 0.5], [0, 0]]
        ... )
        >>> circulation = gp_orff.LineIntegral(square)
        >>> field = model.condition(x, y).posterior()
        >>> round(field.mean(torch.zeros(1, 2), circulation).item(), 1)
        0.5
    """

    path: Float[Tensor, "k d"]
    homogeneous = False
    length_power = outputs = 1

    def __post_init__(self):
        path = copy_of(self.path)
        if path.dim() != 2 or len(path) < 2:
            raise ValueError(
                f"{type(self).__name__} expects a path of at least two corners (k, d), got shape "
                f"{tuple(path.shape)}"
            )
        object.__setattr__(self, "path", path)

    def check(self, num_dims: int, p: int) -> None:
        super().check(num_dims, p)
        if self.path.shape[-1] != num_dims:
            raise ValueError(
                f"{type(self).__name__} expects corners with {num_dims} coordinates, got "
                f"{self.path.shape[-1]}"
            )

    def _vectors(self, pieces: Float[Tensor, "s d"]) -> Float[Tensor, "s p"]:
        """Return one vector per segment; its inner product with the field is integrated."""
        return pieces

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        path = self.path.to(omega)
        pieces, middle = path.diff(dim=0), 0.5 * (path[1:] + path[:-1])
        phase = torch.exp(1j * (omega @ middle.mT))
        waves = phase * torch.sinc(omega @ pieces.mT / (2 * math.pi))  # (D, s)
        return (waves @ self._vectors(pieces).to(waves)).unsqueeze(-2)

    def of_constants(self, num_dims: int, p: int) -> Float[Tensor, "1 p"]:
        return self._vectors(self.path[-1:] - self.path[:1])  # exactly zero for a closed path

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "n*k d"]:
        return _shifted(x, space, self.path)

    def patches(self, num_dims: int, p: int) -> Sequence[Patch]:
        pieces = self.path.diff(dim=0)
        rows = zip(self.path[:-1], pieces.split(1), self._vectors(pieces).split(1), strict=True)
        return [Patch(*row) for row in rows]


@dataclass(frozen=True, eq=False)
class Flux(LineIntegral):
    """The flux ∫ f·n ds of a two-dimensional field across a path of straight segments.

    The unit normal n points to the right of the path. For a closed counter-clockwise path, n points
    outward. The flux has one output, in units of f times units of x. In its multiplier (1, 2),
    the vector (b₂ − a₂, a₁ − b₁) replaces the factor (b − a)ᵀ of `LineIntegral`.

    Args:
        path: (k, 2), the k ≥ 2 corners in order, in units of x and relative to the point x of
            evaluation, as for `LineIntegral`.

    Raises:
        TypeError: `path` has a unit; pass plain numbers in units of x.
        ValueError: `path` is not a matrix with at least two rows. A prediction raises this error
            too if the field is not two-dimensional.

    Example:
        An eastward flow of speed 1 crosses a northward path of length 3. A constant field has the
        frequency ω = 0:

        >>> import gp_orff, torch
        >>> flux = gp_orff.Flux(torch.tensor([[0.0, 0.0], [0.0, 3.0]]))
        >>> multiplier = flux(torch.zeros(1, 2), 2)[0].real
        >>> (multiplier @ torch.tensor([1.0, 0.0])).item()
        3.0
    """

    dims = (2,)

    def _vectors(self, pieces: Float[Tensor, "s d"]) -> Float[Tensor, "s p"]:
        return -quarter_turn(pieces)


@dataclass(frozen=True)
class BoxAverage(Symbol):
    """The mean of a field over a box centred at x, for example over the footprint of an instrument.

    The mean has p outputs and the units of the field. The multiplier (p, p) (see `Symbol`) is
    Q(ω) = I Π_j sinc(ω_j w_j / 2), with sinc t = sin(t)/t and the widths w_j.

    Args:
        widths: w ≥ 0, the full widths of the box in units of x. Pass one number for all d inputs in
            space, or (d,) with one width for each input.

    Raises:
        TypeError: `widths` has a unit; pass plain numbers in units of x.
        ValueError: raised by a prediction if a width is negative, or if `widths` has neither one
            nor d numbers.

    Example:
        A box of one wavelength averages a wave to zero. A small box barely changes the wave:

        >>> import gp_orff, torch
        >>> # wavelength 2 along x₁
        >>> omega = torch.tensor([[torch.pi, 0.0]], dtype=torch.float64)
        >>> wide, small = gp_orff.BoxAverage(2.0), gp_orff.BoxAverage(0.2)
        >>> [round(box(omega, 1).real.item(), 2) for box in (wide, small)]
        [0.0, 0.98]
    """

    widths: float | Sequence[float] | Float[Tensor, "d"]
    length_power = 0

    def __post_init__(self):
        widths = copy_of(self.widths)
        widths = tuple(widths.tolist()) if widths.dim() else widths.item()
        object.__setattr__(self, "widths", widths)

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
    """Return all points x + shift; the shifts apply to the columns `space`."""
    points = x.repeat(len(shifts), 1)
    points[:, list(space)] += shifts.to(x).repeat_interleave(len(x), dim=0)
    return points
