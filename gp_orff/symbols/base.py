"""Translation-invariant linear maps of fields, each given by its Fourier multiplier Q(ω).

A symbol Q(ω) ∈ C^{q×p} maps the wave e^{i⟨ω,x⟩} m to e^{i⟨ω,x⟩} Q(ω) m. A derivative multiplies by
iω, an antiderivative divides by it, a mean over a box multiplies by the Fourier transform of the
box. A posterior of the weights of waves gives the posterior of every symbol exactly, with all
covariances and without differentiation.

Frequencies are in radians per unit of the inputs. A divergence is in units of the field per unit of
the inputs, a potential in units of the field times units of the inputs. The constant part of a
field, at ω = 0, is its *background*: its curl and its divergence are zero, and neither part of a
Helmholtz split contains it. A potential contains that of a constant mean under a curl-free kernel
only, or where the user assigns it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.symbols.patches import Patch

Multiplier = Complex[Tensor, "D q p"]
Value = TypeVar("Value")


class Symbol(ABC):
    """A linear map of fields that commutes with translations, such as a derivative or a local mean.

    It is defined by its Fourier multiplier Q(ω), a matrix (q, p) for a field with p components and
    q outputs. The wave v e^{i⟨ω, x⟩} becomes Q(ω) v e^{i⟨ω, x⟩}, for v ∈ C^p. A derivative ∂_j has
    Q = iω_j. Frequencies ω are in radians per unit of x. The constant part of a field, at ω = 0, is
    called its *background*.

    Pass a symbol to a posterior to predict its map of the field, or to `VectorFieldGP.observe` to
    condition on it. Symbols are immutable. For another map, subclass this class and define `order`,
    `outputs` and `__call__`.

    Attributes:
        outputs: q; None if it is p. If q depends on p in another way, define `num_outputs(p)`.
        order: the growth of the multiplier, |Q(ω)| ~ ‖ω‖^order: 1 for a first derivative, −1 for a
            potential. If the kernel is too rough for the symbol, the map has infinite variance, and
            its prediction raises an error.
        homogeneous: whether Q(cω) = c^order Q(ω) for c > 0. If True, the variance that a `Grid`
            truncates is known in closed form.
        reference: (d,), a point whose value is subtracted from all values; None for no point.

    Example:
        A map of this package, the divergence, of a field with a posterior:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     *[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> field = model.condition(x, x).posterior()  # the field f(x) = x
        >>> field.mean(x, gp_orff.Divergence()).shape
        torch.Size([64, 1])

        A map of your own, the derivative of every component along a direction u:

        >>> class AlongDerivative(gp_orff.Symbol):
        ...     order, homogeneous = 1, True
        ...
        ...     def __init__(self, u):
        ...         self.u = torch.as_tensor(u, dtype=torch.float64)
        ...
        ...     def __call__(self, omega, p):  # (D, d) to (D, q, p)
        ...         eye = torch.eye(p, dtype=omega.dtype)
        ...         return 1j * (omega @ self.u)[:, None, None] * eye
        >>> field.mean(x, AlongDerivative([1.0, 0.0])).shape
        torch.Size([64, 2])
    """

    order: int = 0
    outputs: int | None = None  # q, if it does not depend on p
    homogeneous: bool = False
    reference: Float[Tensor, "d"] | None = None
    is_identity = False
    of_gradients = False  # whether it is a potential of the curl-free part

    @property
    def is_absolute(self) -> bool:
        """Whether the map is an antiderivative without a `reference` point.

        The prior then determines its constant of integration, which is random.
        """
        return self.order < 0 and self.reference is None

    @property
    def length_power(self) -> int | None:
        """The power n in the units of the outputs, (units of f)·(units of x)ⁿ; None if unknown.

        A homogeneous map has no intrinsic length, so that n = −order.
        """
        return -self.order if self.homogeneous else None

    def num_outputs(self, p: int) -> int:
        """q, the number of outputs for a field with `p` components."""
        return p if self.outputs is None else self.outputs

    @abstractmethod
    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        """Q(ω), (D, q, p), at frequencies `omega` (D, d), for a field with `p` components.

        At ω = 0: the action of the map on a constant field.
        """

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier | None:
        """Q(ω), (D, q, p), for waves e^{i⟨ω, x⟩} that decay with height, ω = (k, ±i|k|).

        Return None, the default, if the multiplier of the symbol itself accepts complex ω.

        Args:
            omega: (D, 3), nonzero frequencies.
            p: the number of components of the field.
        """
        return None

    def of_affine(
        self, value: Float[Tensor, "p k"], slope: Float[Tensor, "d p k"]
    ) -> tuple[Float[Tensor, "q k"], Float[Tensor, "d q k"]]:
        """Return the symbol applied to k affine fields, value + Σ_j x_j slope_j.

        The result is affine too. Its slopes are Q(0) slope_j, and its value at x = 0 is Q(0) value
        − i Σ_j ∂_jQ(0) slope_j, because x_j = −i ∂e^{i⟨ω, x⟩}/∂ω_j at ω = 0. The value at a
        reference is not subtracted.

        Args:
            value: (p, k), the fields at x = 0.
            slope: (d, p, k), their derivatives along the directions of space.
        """
        d, p = slope.shape[:2]
        at_zero = self.of_constants(d, p).to(value)
        image = at_zero @ value
        if slope.any():

            def multiplier(omega: Float[Tensor, "d"]) -> Float[Tensor, "q p"]:
                # A map of real fields has Q(−ω) = Q(ω)*, so that its derivative at zero is
                # imaginary, and −i ∂Q(0) is the derivative of its imaginary part.
                return self(omega.unsqueeze(0), p)[0].imag

            zero = torch.zeros(d, dtype=torch.float64)
            rates = torch.autograd.functional.jacobian(multiplier, zero).to(value)  # (q, p, d)
            image = image + torch.einsum("qpj,jpk->qk", rates, slope)
        return image, at_zero @ slope

    def decided(self, curl_free: bool, divergence_free: bool) -> "Symbol":
        """A copy of this map that is definite about the image of constant fields.

        Args:
            curl_free, divergence_free: whether all terms of the kernel have this property; see
                `Potential`.
        """
        return self

    def of_constants(self, num_dims: int, p: int) -> Float[Tensor, "q p"]:
        """Q(0), the image of the constant fields 1⊗I_p.

        Args:
            num_dims: d, the number of inputs in space.
            p: the number of components of the field.
        """
        return self(torch.zeros(1, num_dims, dtype=torch.float64), p)[0].real

    def check(self, num_dims: int, p: int) -> None:
        """Raise an error for fields on which the map is not defined.

        Args:
            num_dims: d, the number of inputs in space.
            p: the number of components of the field.

        Raises:
            ValueError: the map is not defined for these numbers.
        """
        if self.reference is not None and tuple(self.reference.shape) != (num_dims,):
            raise ValueError(
                f"{type(self).__name__} expects a reference of {num_dims} coordinates, got shape "
                f"{tuple(self.reference.shape)}"
            )

    def reference_points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Tensor | None:
        """The points (n, d) whose values are subtracted from those at `x`, None without reference.

        They have the coordinates of the reference in the columns `space`, and the coordinates of x
        in the other columns.
        """
        if self.reference is None:
            return None
        points = x.clone()
        # The reference is a place: it is taken at the time, or other input, of each point.
        points[..., list(space)] = self.reference.to(x)
        return points

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        """Return points (m, d) whose box contains all points where the symbol needs the field.

        By default these are x. Integrals return the vertices of their paths or boxes.

        Args:
            x: points (n, d) at which the symbol is evaluated.
            space: the columns of x that are directions of space.
        """
        return x

    def all_points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        """Return `points` for x (n, d) and for the reference, if there is one.

        `space` are the columns of x that are directions of space.
        """
        references = self.reference_points(x, space)
        support = x if references is None else torch.cat([x, references])
        return self.points(support, space)

    def patches(self, num_dims: int, p: int) -> Sequence[Patch] | None:
        """The map as a sum of averages over patches (points, segments, boxes), for exact kernels.

        If Q(ω) does not depend on ω, the only patch is one point. The result is None if the map
        is not such a sum. The field has `num_dims` inputs in space and `p` components.
        """
        if self.order:
            return None
        generator = torch.Generator().manual_seed(0)
        # The multiplier is a function. If it has one real value at zero and at three random
        # frequencies, it is taken as a matrix that acts point by point.
        omega = torch.randn(4, num_dims, generator=generator, dtype=torch.float64)
        omega[0] = 0.0
        first, *others = self(omega, p)
        if first.imag.any() or any((other != first).any() for other in others):
            return None
        return [Patch.point(num_dims, first.real)]

    def __matmul__(self, other: "Symbol") -> "Symbol":
        """The composition that applies `other` first: `Divergence() @ BoxAverage(1.0)`."""
        if not isinstance(other, Symbol):
            return NotImplemented
        return Composed(self, other)


class VectorFieldSymbol(Symbol):
    """A map of fields with one component for each direction of space."""

    homogeneous = True
    dims: tuple[int, ...] | None = None  # the dimensions where it is defined; None for all

    def check(self, num_dims: int, p: int) -> None:
        super().check(num_dims, p)
        name = type(self).__name__
        if num_dims != p:
            raise ValueError(
                f"{name} expects a field with one component for each of its {num_dims} inputs in "
                f"space, got {p} components"
            )
        if self.dims is not None and num_dims not in self.dims:
            expected = " or ".join(map(str, self.dims))
            raise ValueError(f"{name} exists in {expected} dimensions, got {num_dims}")


@dataclass(frozen=True)
class Identity(Symbol):
    """The field itself: Q = I."""

    homogeneous = is_identity = True

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return torch.eye(p, dtype=torch.complex128, device=omega.device).expand(len(omega), p, p)


@dataclass(frozen=True)
class Composed(Symbol):
    """The composition `outer @ inner`: Q = Q_outer Q_inner."""

    outer: Symbol
    inner: Symbol

    @property
    def order(self) -> int:
        return self.outer.order + self.inner.order

    @property
    def homogeneous(self) -> bool:
        return self.outer.homogeneous and self.inner.homogeneous

    @property
    def length_power(self) -> int | None:
        powers = self.outer.length_power, self.inner.length_power
        return None if None in powers else sum(powers)

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
        return [left @ right for left in outer for right in inner]

    def of_affine(
        self, value: Float[Tensor, "p k"], slope: Float[Tensor, "d p k"]
    ) -> tuple[Float[Tensor, "q k"], Float[Tensor, "d q k"]]:
        return self.outer.of_affine(*self.inner.of_affine(value, slope))

    def decided(self, curl_free: bool, divergence_free: bool) -> Symbol:
        parts = self.outer, self.inner
        return Composed(*(part.decided(curl_free, divergence_free) for part in parts))

    def check(self, num_dims: int, p: int) -> None:
        if self.inner.reference is not None:
            raise ValueError(
                f"a composition expects a reference in its outer map only, got one in the inner "
                f"map {self.inner!r}; drop it, or compose in the other order"
            )
        self.inner.check(num_dims, p)
        self.outer.check(num_dims, self.inner.num_outputs(p))

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        inner = self.inner(omega, p).to(torch.complex128)
        return self.outer(omega, inner.shape[-2]).to(torch.complex128) @ inner


TINY = 1e-300


def required(value: Value, kind: type[Value], expected: str, remedy: str) -> Value:
    """The value, if it is of a kind.

    Raises:
        TypeError: it is not; the message states what was expected, what was given, and a remedy.
    """
    if not isinstance(value, kind):
        given = repr(value) if isinstance(value, str | type) else type(value).__name__
        raise TypeError(f"{expected}, got {given}; {remedy}")
    return value


def unit_of(values: object) -> str | None:
    """The unit that values come with: the attribute of an xarray object, or that of a quantity."""
    attributes = getattr(values, "attrs", None)
    if isinstance(attributes, dict):
        unit = attributes.get("units")
    elif hasattr(values, "magnitude"):  # of pint
        unit = f"{values.units:C}"  # such as meter**2/second**2
    else:  # of astropy
        unit = getattr(values, "unit", None) if hasattr(values, "to_value") else None
    return None if unit is None else str(unit)


def refuse_units(values: object, what: str) -> None:
    """Raise TypeError for numbers, or lists of them, with a unit that is not converted here."""
    for value in values if isinstance(values, list | tuple) else ():
        refuse_units(value, what)
    unit = unit_of(values)
    if unit is not None:
        raise TypeError(
            f"expected plain numbers for {what}, got a quantity in {unit!r}, which is not "
            "converted here; give its numbers: quantity.to(unit).magnitude, or array.values"
        )


def copy_of(values: object) -> Float[Tensor, "*n"]:
    """A float64 copy of numbers of any type (list, array, tensor) that nobody else can change."""
    refuse_units(values, "places and directions, in the unit of the points")
    plain = values.tolist() if hasattr(values, "tolist") else values
    return torch.as_tensor(plain, dtype=torch.float64).detach().cpu().clone()


def quarter_turn(vectors: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """The vectors turned counter-clockwise by a right angle: (v₁, v₂) ↦ (−v₂, v₁)."""
    return torch.stack([-vectors[..., 1], vectors[..., 0]], dim=-1)


def cross_matrix(omega: Float[Tensor, "D 3"]) -> Float[Tensor, "D 3 3"]:
    """The matrix of v ↦ ω × v."""
    a, b, c = omega.unbind(-1)
    zero = torch.zeros_like(a)
    rows = [zero, -c, b, c, zero, -a, -b, a, zero]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
