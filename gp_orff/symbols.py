"""Linear maps of fields that commute with translations, by what they do to a wave.

A symbol Q(ω) ∈ C^{q×p} says that the map turns the wave e^{i⟨ω,x⟩} m into e^{i⟨ω,x⟩} Q(ω) m: a
derivative multiplies by iω, an antiderivative divides by it, a mean over a box multiplies by the
box's Fourier transform. The divergence of a field is one symbol, its potential another; on the
posterior of the weights of waves each of them is exact, with all covariances, and nothing has to be
differentiated.

Frequencies are in radians per unit of the inputs, so that the divergence is in units of the field
over units of the inputs, and the potential in units of the field times units of the inputs. The
part of a field that does not vary, at ω = 0, is a *background*: neither its curl nor its divergence
is other than zero, and it belongs to neither part and to no potential.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.patches import Patch

Multiplier = Complex[Tensor, "D q p"]


class Symbol(ABC):
    """A translation-invariant linear map of fields with p components; an immutable value.

    Subclass it for a map of your own: `order`, `num_outputs` and `__call__` suffice.

    Attributes:
        order: of the derivative: |Q(ω)| grows as ‖ω‖^order. Where the prior's spectral density has
            no such moment, the quantity does not exist, and asking for it raises.
        homogeneous: whether Q(cω) = c^order Q(ω) for c > 0; what a grid leaves out is then known in
            closed form.
        reference: a point whose value is subtracted, or None.

    Example:
        A first derivative along the direction u, of every component:

        >>> import gp_orff, torch
        >>> class AlongDerivative(gp_orff.Symbol):
        ...     order, homogeneous = 1, True
        ...     def __init__(self, u):
        ...         self.u = torch.as_tensor(u, dtype=torch.float64)
        ...     def num_outputs(self, p):
        ...         return p
        ...     def __call__(self, omega, p):
        ...         eye = torch.eye(p, dtype=omega.dtype)
        ...         return 1j * (omega @ self.u)[:, None, None] * eye
    """

    order: int = 0
    homogeneous: bool = False
    reference: Float[Tensor, "d"] | None = None

    @abstractmethod
    def num_outputs(self, p: int) -> int:
        """q, for fields with p components."""

    @abstractmethod
    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        """Q(ω); at ω = 0 what the map does to a constant field."""

    def check(self, num_dims: int, p: int) -> None:
        """Raise ValueError for fields the map is not defined for."""
        if self.reference is not None and tuple(self.reference.shape) != (num_dims,):
            raise ValueError(
                f"{type(self).__name__} expects a reference of {num_dims} coordinates, got shape "
                f"{tuple(self.reference.shape)}"
            )

    def referred(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Tensor | None:
        """The points whose values are subtracted from those at x: the reference in space, with the
        other inputs of x; None where nothing is."""
        if self.reference is None:
            return None
        points = x.clone()
        points[..., list(space)] = self.reference.to(x)
        return points

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        """Where it looks at a field from x, the outermost points at least; x if not said."""
        return x

    def all_points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        """The same, from the reference too."""
        referred = self.referred(x, space)
        looked = x if referred is None else torch.cat([x, referred])
        return self.points(looked, space)

    def patches(self, num_dims: int, p: int) -> Sequence[Patch] | None:
        """The pieces, boxes and points it sums the field over, for exact kernels; None where it
        does more. A matrix, the same for all waves, is a point."""
        if self.order:
            return None
        generator = torch.Generator().manual_seed(0)
        omega = torch.randn(4, num_dims, generator=generator, dtype=torch.float64)
        omega[0] = 0.0
        first, *others = self(omega, p)
        if first.imag.any() or any((own != first).any() for own in others):
            return None
        return [Patch.point(num_dims, first.real)]

    def __matmul__(self, other: "Symbol") -> "Symbol":
        """The map that applies the other one first: `Divergence() @ BoxAverage(1.0)`."""
        if not isinstance(other, Symbol):
            return NotImplemented
        return Composed(self, other)


class _OfVectors(Symbol):
    """A map of fields with one component for each direction of space."""

    homogeneous = True
    dims: tuple[int, ...] | None = None  # where it is defined, if not in any number

    def check(self, num_dims: int, p: int) -> None:
        super().check(num_dims, p)
        name = type(self).__name__
        if num_dims != p:
            raise ValueError(
                f"{name} expects a field with one component for each of its {num_dims} inputs in "
                f"space, got {p} components"
            )
        if self.dims is not None and num_dims not in self.dims:
            wanted = " or ".join(map(str, self.dims))
            raise ValueError(f"{name} exists in {wanted} dimensions, got {num_dims}")


@dataclass(frozen=True)
class Identity(Symbol):
    """The field itself."""

    homogeneous = True

    def num_outputs(self, p: int) -> int:
        return p

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return torch.eye(p, dtype=torch.complex128, device=omega.device).expand(len(omega), p, p)


@dataclass(frozen=True)
class Divergence(_OfVectors):
    """∇·f = Σ_j ∂_j f_j: Q = iωᵀ; one output, in units of f per unit of x.

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
class Curl(_OfVectors):
    """∇×f: in two dimensions the vorticity ∂₁f₂ − ∂₂f₁, one output, positive where the field turns
    counter-clockwise; in three the vector of the right-hand rule. Units of f per unit of x.

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
            return 1j * _turned_left(omega).unsqueeze(-2)
        return 1j * _cross(omega)


@dataclass(frozen=True)
class Jacobian(Symbol):
    """J_ij = ∂_j f_i, p·d outputs, row by row: output i·d + j. Q = m ωᵀ i; units of f per x.

    Example:
        >>> import gp_orff
        >>> gp_orff.Jacobian().num_outputs(3)  # in three dimensions
        9
    """

    num_dims: int | None = None  # d, if not p
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
                f"say Jacobian(num_dims={num_dims})"
            )

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        eye = torch.eye(p, dtype=omega.dtype, device=omega.device)
        rows = eye[:, None, :] * omega[:, None, :, None]  # (D, p, d, p)
        return 1j * rows.flatten(1, 2)


class _Antiderivative(_OfVectors):
    """A map that divides by ‖ω‖² what a derivative gives: −iv(ω)ᵀ/‖ω‖², zero at ω = 0."""

    order = -1

    def _divided(self, omega: Float[Tensor, "D d"], rows: Float[Tensor, "D q p"]) -> Multiplier:
        square = omega.square().sum(-1)[:, None, None]
        return 1j * rows * torch.where(square > 0, 1 / square.clamp_min(_TINY), 0.0)


@dataclass(frozen=True, eq=False)
class Potential(_Antiderivative):
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

    reference: Float[Tensor, "d"] | None = None

    def __post_init__(self):
        object.__setattr__(self, "reference", _point(self.reference))

    def num_outputs(self, p: int) -> int:
        return 1

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._divided(omega, -omega.unsqueeze(-2))


@dataclass(frozen=True, eq=False)
class StreamFunction(_Antiderivative):
    """ψ with f = (∂₂ψ, −∂₁ψ) + (a field without curl) + background, two dimensions; one output.

    The field flows along lines of equal ψ, larger values on its left: around a maximum of ψ it
    turns counter-clockwise. Oceanographers often use the opposite sign. Units and `reference` as
    for `Potential`.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.StreamFunction()(torch.tensor([[1.0, 2.0]]), 2).imag
        tensor([[[-0.4000,  0.2000]]])
    """

    reference: Float[Tensor, "d"] | None = None
    dims = (2,)

    def __post_init__(self):
        object.__setattr__(self, "reference", _point(self.reference))

    def num_outputs(self, p: int) -> int:
        return 1

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._divided(omega, _turned_left(omega).unsqueeze(-2))


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
        return self._divided(omega, _cross(omega))


@dataclass(frozen=True)
class CurlFreePart(_OfVectors):
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
        unit = omega / omega.norm(dim=-1, keepdim=True).clamp_min(math.sqrt(_TINY))
        return (unit.unsqueeze(-1) * unit.unsqueeze(-2)).to(torch.complex128)


@dataclass(frozen=True)
class DivergenceFreePart(_OfVectors):
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
        direction = _copied(self.direction)
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


@dataclass(frozen=True, eq=False)
class LineIntegral(_OfVectors):
    """∫ f·ds along straight pieces between the corners of a path that starts at x + path[0]; one
    output, in units of f times those of x: the circulation, if the path is closed.

    Each piece from a to b gives e^{i⟨ω, (a+b)/2⟩} sinc(⟨ω, b−a⟩/2) (b−a)ᵀ, with sinc t = sin(t)/t.

    Args:
        path: (k, d), the corners relative to the points where the integral is asked for; at x = 0
            they are places.

    Example:
        >>> import gp_orff, torch
        >>> square = torch.tensor([[0.0, 0], [1, 0], [1, 1], [0, 1], [0, 0]])
        >>> gp_orff.LineIntegral(square).num_outputs(2)
        1
    """

    path: Float[Tensor, "k d"]
    homogeneous = False

    def __post_init__(self):
        path = _copied(self.path)
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
        """What the field is multiplied with along each piece."""
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
    """∫ f·n ds across the path of a `LineIntegral`, n to the right of it: out of a closed path that
    turns counter-clockwise; two dimensions, one output.

    Example:
        >>> import gp_orff, torch
        >>> east = torch.zeros(1, 2)  # a constant field, across a path that goes north
        >>> gp_orff.Flux(torch.tensor([[0.0, 0], [0, 3]]))(east, 2).real[0, 0, 0].item()
        3.0
    """

    dims = (2,)

    def _vectors(self, pieces: Float[Tensor, "s d"]) -> Float[Tensor, "s p"]:
        return -_turned_left(pieces)


@dataclass(frozen=True)
class BoxAverage(Symbol):
    """The mean over a box around x: Q = Π_j sinc(ω_j w_j / 2) I.

    Args:
        widths: of the box, one for all inputs in space or one for each.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.BoxAverage(2.0)(torch.tensor([[torch.pi, 0.0]]), 1).real.abs() < 1e-7
        tensor([[[True]]])
    """

    widths: float | Sequence[float] | Float[Tensor, "d"]

    def __post_init__(self):
        widths = _copied(self.widths).tolist()
        own = tuple(widths) if isinstance(widths, list) else widths
        object.__setattr__(self, "widths", own)

    def num_outputs(self, p: int) -> int:
        return p

    def check(self, num_dims: int, p: int) -> None:
        widths = torch.as_tensor(self.widths)
        if widths.numel() not in (1, num_dims) or not (widths >= 0).all():
            raise ValueError(
                f"BoxAverage expects one width or {num_dims}, not negative, got {self.widths}"
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


@dataclass(frozen=True)
class Composed(Symbol):
    """`outer @ inner`: Q = Q_outer Q_inner."""

    outer: Symbol
    inner: Symbol

    @property
    def order(self) -> int:
        return self.outer.order + self.inner.order

    @property
    def homogeneous(self) -> bool:
        return self.outer.homogeneous and self.inner.homogeneous

    @property
    def reference(self) -> Float[Tensor, "d"] | None:
        return self.outer.reference

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        return self.inner.points(self.outer.points(x, space), space)

    def num_outputs(self, p: int) -> int:
        return self.outer.num_outputs(self.inner.num_outputs(p))

    def patches(self, num_dims: int, p: int) -> Sequence[Patch] | None:
        outer = self.outer.patches(num_dims, self.inner.num_outputs(p))
        inner = self.inner.patches(num_dims, p)
        if outer is None or inner is None:
            return None
        return [one @ other for one in outer for other in inner]

    def check(self, num_dims: int, p: int) -> None:
        if self.inner.reference is not None:
            raise ValueError(
                f"expected a reference in the outer map only, got one in {self.inner!r}"
            )
        self.inner.check(num_dims, p)
        self.outer.check(num_dims, self.inner.num_outputs(p))

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        inner = self.inner(omega, p).to(torch.complex128)
        return self.outer(omega, inner.shape[-2]).to(torch.complex128) @ inner


_TINY = 1e-300


def _copied(values: object) -> Float[Tensor, "*n"]:
    """Numbers from anywhere, which no one else can change."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return torch.as_tensor(plain, dtype=torch.float64).detach().cpu().clone()


def _point(reference: object) -> Float[Tensor, "d"] | None:
    return None if reference is None else _copied(reference)


def _turned_left(vectors: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """By a quarter: (v₁, v₂) ↦ (−v₂, v₁)."""
    return torch.stack([-vectors[..., 1], vectors[..., 0]], dim=-1)


def _shifted(
    x: Float[Tensor, "n d"], space: Sequence[int], shifts: Float[Tensor, "k s"]
) -> Float[Tensor, "k*n d"]:
    moved = x.repeat(len(shifts), 1)
    moved[:, list(space)] += shifts.to(x).repeat_interleave(len(x), dim=0)
    return moved


def _cross(omega: Float[Tensor, "D 3"]) -> Float[Tensor, "D 3 3"]:
    """The matrix of ω×."""
    a, b, c = omega.unbind(-1)
    zero = torch.zeros_like(a)
    rows = [zero, -c, b, c, zero, -a, -b, a, zero]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
