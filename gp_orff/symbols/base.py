"""Translation-invariant linear maps of fields, each given by its Fourier multiplier Q(ω).

A symbol Q(ω) ∈ C^{q×p} maps the wave m e^{i⟨ω, x⟩}, with m ∈ C^p, to Q(ω) m e^{i⟨ω, x⟩}. The
derivative ∂_j multiplies a wave by iω_j. A mean over a box multiplies a wave by the Fourier
transform of the box. A field of features is a weighted sum of waves. The posterior of the weights
therefore gives the posterior of every symbol, with all covariances and without differentiation.

Frequencies are in radians per unit of the inputs. A divergence has units of the field per unit of
the inputs, and a potential has units of the field times units of the inputs.

The constant part of a field, at ω = 0, is called its *background*. Its curl and its divergence are
zero. By default, neither the curl-free nor the divergence-free part of a field contains it. A
`Potential` includes the potential of the background if all terms of the kernel are curl-free, or if
the user sets `background=True`.
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
    """A translation-invariant linear map of a field, such as a derivative or a local mean.

    The map turns a field with p components into q outputs. Its Fourier multiplier Q(ω), a complex
    matrix (q, p), defines it: the wave v e^{i⟨ω, x⟩} with v ∈ C^p becomes Q(ω) v e^{i⟨ω, x⟩}. For
    example, the derivative ∂_j has Q(ω) = iω_j I. Frequencies ω are in radians per unit of x. The
    constant part of a field, at ω = 0, is called its *background*.

    Pass a symbol to a method of a posterior, such as `FieldPosterior.mean`, to predict the map of
    the field. Pass it to `VectorFieldGP.observe` to add observations of the map. Symbols are
    immutable.

    To define another map, subclass `Symbol` and define `__call__`. Set the attributes below if the
    map needs other values than the defaults.

    Attributes:
        outputs: q, the number of outputs. With None, the default, q = p. If q depends on p in
            another way, override `num_outputs`.
        order: the exponent of growth, |Q(ω)| ~ ‖ω‖^order; 0 by default. A first derivative has
            order 1, and a potential has order −1. If the derivatives of this order have infinite
            variance under the kernel, a prediction of the map raises a ValueError.
        homogeneous: whether Q(cω) = c^order Q(ω) for every c > 0; False by default. A symbol with
            order < 0 must be homogeneous or have a `reference`.
        reference: (d,), a point in units of x; None by default. With a reference, the value of the
            map at this point is subtracted, so that the map is zero there.

    Example:
        The divergence of a field with a posterior:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     *[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> field = model.condition(x, x).posterior()  # the field f(x) = x
        >>> field.mean(x, gp_orff.Divergence()).shape
        torch.Size([64, 1])

        A new symbol, the derivative of every component along a direction u:

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
    outputs: int | None = None  # None: q = p
    homogeneous: bool = False
    reference: Float[Tensor, "d"] | None = None
    is_identity = False
    of_gradients = False  # whether the map is a potential of the curl-free part

    @property
    def is_absolute(self) -> bool:
        """Whether the map is an antiderivative without a `reference` point.

        Its constant of integration is then random, with a distribution that follows from the prior.
        """
        return self.order < 0 and self.reference is None

    @property
    def length_power(self) -> int | None:
        """The power n of the units of x: outputs have (units of f)·(units of x)ⁿ; None if unknown.

        A homogeneous map has n = −order, because it has no intrinsic length.
        """
        return -self.order if self.homogeneous else None

    def num_outputs(self, p: int) -> int:
        """Return q, the number of outputs for a field with `p` components."""
        return p if self.outputs is None else self.outputs

    @abstractmethod
    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        """Return the multiplier Q(ω), complex (D, q, p).

        Q(0) is the matrix that the map applies to constant fields.

        Args:
            omega: (D, d), D frequencies in radians per unit of x.
            p: the number of components of the field.
        """

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier | None:
        """Return Q(ω), (D, q, p), for harmonic waves e^{i⟨ω, x⟩} with complex ω = (k, ±i|k|).

        These waves grow or decay exponentially with height. The default result, None, means that
        `__call__` also accepts complex frequencies.

        Args:
            omega: (D, 3), complex frequencies, all of them nonzero.
            p: the number of components of the field.
        """
        return None

    def of_affine(
        self, value: Float[Tensor, "p k"], slope: Float[Tensor, "d p k"]
    ) -> tuple[Float[Tensor, "q k"], Float[Tensor, "d q k"]]:
        """Apply the symbol to the k affine fields value + Σ_j x_j slope_j.

        Each result is an affine field. Return its value (q, k) at x = 0 and its slopes (d, q, k).
        The slopes are Q(0) slope_j. The value is Q(0) value − i Σ_j ∂_jQ(0) slope_j, because
        x_j = −i ∂e^{i⟨ω, x⟩}/∂ω_j at ω = 0. The value at a `reference` is not subtracted.

        Args:
            value: (p, k), the k fields at x = 0.
            slope: (d, p, k), the derivatives of the k fields along the d directions of space.
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
        """Return this map after replacing a `background` of None by True or False.

        Antiderivatives, such as `Potential`, have this argument. Other maps return themselves.

        Args:
            curl_free: whether all terms of the kernel are curl-free.
            divergence_free: whether all terms of the kernel are divergence-free.
        """
        return self

    def of_constants(self, num_dims: int, p: int) -> Float[Tensor, "q p"]:
        """Return the real matrix Q(0), (q, p), which the map applies to constant fields.

        Args:
            num_dims: d, the number of inputs in space.
            p: the number of components of the field.
        """
        return self(torch.zeros(1, num_dims, dtype=torch.float64), p)[0].real

    def check(self, num_dims: int, p: int) -> None:
        """Raise an error if the map is not defined for fields with d inputs and p components.

        Args:
            num_dims: d, the number of inputs in space.
            p: the number of components of the field.

        Raises:
            ValueError: the map is not defined for d and p, or the attribute `reference` of the
                symbol does not have d coordinates.
        """
        if self.reference is not None and tuple(self.reference.shape) != (num_dims,):
            raise ValueError(
                f"{type(self).__name__} expects a reference of {num_dims} coordinates, got shape "
                f"{tuple(self.reference.shape)}"
            )

    def reference_points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Tensor | None:
        """Return the reference points (n, d) of the points `x`, or None without a `reference`.

        The value of the map at a reference point is subtracted from its value at the point.

        Args:
            x: points (n, d).
            space: the columns of x that are directions of space. In these columns, a reference
                point has the coordinates of `reference`; in the other columns, it is equal to x.
        """
        if self.reference is None:
            return None
        points = x.clone()
        # The reference is a place. Each point keeps its time and its other inputs.
        points[..., list(space)] = self.reference.to(x)
        return points

    def points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        """Return points (m, d) whose bounding box contains every place that the map depends on.

        By default, the map at x depends on the field at x only. Integrals return the corners of
        their paths or boxes.

        Args:
            x: points (n, d) at which the symbol is evaluated.
            space: the columns of x that are directions of space.
        """
        return x

    def all_points(self, x: Float[Tensor, "n d"], space: Sequence[int]) -> Float[Tensor, "m d"]:
        """Return the `points` (m, d) of `x` together with the points of the reference, if any.

        Args:
            x: points (n, d) at which the symbol is evaluated.
            space: the columns of x that are directions of space.
        """
        references = self.reference_points(x, space)
        support = x if references is None else torch.cat([x, references])
        return self.points(support, space)

    def patches(self, num_dims: int, p: int) -> Sequence[Patch] | None:
        """Return the map as a sum of averages over patches, or None if it is not such a sum.

        A patch is a point, a segment or a box. Exact kernels integrate their covariance over the
        patches. If Q(ω) is a constant real matrix, the only patch is one point.

        Args:
            num_dims: d, the number of inputs in space.
            p: the number of components of the field.
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
        """Return the composition of two maps; the right one is applied first.

        For example, `Divergence() @ BoxAverage(1.0)` is the divergence of a local mean.
        """
        if not isinstance(other, Symbol):
            return NotImplemented
        return Composed(self, other)


class VectorFieldSymbol(Symbol):
    """A symbol of vector fields, which have one component for each direction of space (p = d)."""

    homogeneous = True
    dims: tuple[int, ...] | None = None  # the values of d for which it is defined; None for all

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
    """The field itself, with the multiplier (p, p) (see `Symbol`) Q(ω) = I.

    Example:
        >>> import gp_orff, torch
        >>> gp_orff.symbols.Identity()(torch.ones(1, 2), 2).real
        tensor([[[1., 0.],
                 [0., 1.]]], dtype=torch.float64)
    """

    homogeneous = is_identity = True

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return torch.eye(p, dtype=torch.complex128, device=omega.device).expand(len(omega), p, p)


@dataclass(frozen=True)
class Composed(Symbol):
    """The composition `outer @ inner` of two maps: first `inner`, then `outer`.

    The multiplier (see `Symbol`) is Q(ω) = Q_outer(ω) Q_inner(ω).

    Args:
        outer: the symbol that is applied second.
        inner: the symbol that is applied first.

    Example:
        The curl of a gradient is zero:

        >>> import gp_orff, torch
        >>> zero = gp_orff.Curl() @ gp_orff.CurlFreePart()
        >>> type(zero).__name__
        'Composed'
        >>> zero(torch.tensor([[1.0, 2.0]]), 2).abs().max().item()
        0.0
    """

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
    """Return `value` if it is an instance of `kind`.

    Args:
        value: any object.
        kind: the class.
        expected: the start of the error message, for example "expected a kernel".
        remedy: the end of the error message.

    Raises:
        TypeError: `value` is not an instance of `kind`.
    """
    if not isinstance(value, kind):
        given = repr(value) if isinstance(value, str | type) else type(value).__name__
        raise TypeError(f"{expected}, got {given}; {remedy}")
    return value


def unit_of(values: object) -> str | None:
    """Return the unit of an xarray object, or of a quantity of pint or astropy; None if unknown."""
    attributes = getattr(values, "attrs", None)
    if isinstance(attributes, dict):
        unit = attributes.get("units")
    elif hasattr(values, "magnitude"):  # of pint
        unit = f"{values.units:C}"  # such as meter**2/second**2
    else:  # of astropy
        unit = getattr(values, "unit", None) if hasattr(values, "to_value") else None
    return None if unit is None else str(unit)


def refuse_units(values: object, what: str) -> None:
    """Raise TypeError if `values`, or one of a list of values, has a unit."""
    for value in values if isinstance(values, list | tuple) else ():
        refuse_units(value, what)
    unit = unit_of(values)
    if unit is not None:
        raise TypeError(
            f"expected plain numbers for {what}, got a quantity in {unit!r}, which is not "
            "converted here; pass its numbers: quantity.to(unit).magnitude, or array.values"
        )


def copy_of(values: object) -> Float[Tensor, "*n"]:
    """Return an independent float64 copy of a list, an array or a tensor of numbers.

    Raises:
        TypeError: the numbers have a unit.
    """
    refuse_units(values, "places and directions, in the unit of the points")
    plain = values.tolist() if hasattr(values, "tolist") else values
    return torch.as_tensor(plain, dtype=torch.float64).detach().cpu().clone()


def quarter_turn(vectors: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 2"]:
    """Rotate vectors counter-clockwise by a right angle: (v₁, v₂) ↦ (−v₂, v₁)."""
    return torch.stack([-vectors[..., 1], vectors[..., 0]], dim=-1)


def cross_matrix(omega: Float[Tensor, "D 3"]) -> Float[Tensor, "D 3 3"]:
    """Return the matrices of the maps v ↦ ω × v."""
    a, b, c = omega.unbind(-1)
    zero = torch.zeros_like(a)
    rows = [zero, -c, b, c, zero, -a, -b, a, zero]
    return torch.stack(rows, dim=-1).unflatten(-1, (3, 3))
