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

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.symbols.patches import Patch

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
        support = x if referred is None else torch.cat([x, referred])
        return self.points(support, space)

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


class OfVectors(Symbol):
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


TINY = 1e-300


def copied(values: object) -> Float[Tensor, "*n"]:
    """Numbers from anywhere, which no one else can change."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return torch.as_tensor(plain, dtype=torch.float64).detach().cpu().clone()


def turned_left(vectors: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """By a quarter: (v₁, v₂) ↦ (−v₂, v₁)."""
    return torch.stack([-vectors[..., 1], vectors[..., 0]], dim=-1)


def cross_product(omega: Float[Tensor, "D 3"]) -> Float[Tensor, "D 3 3"]:
    """The matrix of ω×."""
    a, b, c = omega.unbind(-1)
    zero = torch.zeros_like(a)
    rows = [zero, -c, b, c, zero, -a, -b, a, zero]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
