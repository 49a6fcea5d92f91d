"""Symbols that are evaluated at one point: derivatives, potentials, and parts of a field."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from gp_orff.symbols.base import (
    TINY,
    Identity,
    Multiplier,
    Symbol,
    VectorFieldSymbol,
    copy_of,
    cross_matrix,
    quarter_turn,
)

# First derivatives of a field: divergence, curl and Jacobian.


@dataclass(frozen=True)
class Divergence(VectorFieldSymbol):
    """The divergence ∇·f = Σ_j ∂_j f_j of a vector field.

    It has one output, in units of f per unit of x. Its multiplier (1, d) (see `Symbol`) is Q(ω) =
    iωᵀ. Use it as in `posterior.mean(x, gp_orff.Divergence())`, which raises a ValueError if the
    field has another number of components than inputs in space.

    Example:
        The multiplier at ω = (1, 2), for a field with 2 components:

        >>> import gp_orff, torch
        >>> gp_orff.Divergence()(torch.tensor([[1.0, 2.0]]), 2)
        tensor([[[0.+1.j, 0.+2.j]]])
    """

    order, outputs = 1, 1

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return 1j * omega.unsqueeze(-2)


@dataclass(frozen=True)
class Curl(VectorFieldSymbol):
    """The curl ∇×f of a field in two or three dimensions, in units of f per unit of x.

    In two dimensions, the curl is the vorticity ∂₁f₂ − ∂₂f₁. It has one output, which is positive
    where the field turns counter-clockwise. Its multiplier (1, 2) (see `Symbol`) is Q(ω) = i(−ω₂,
    ω₁).

    In three dimensions, the curl is the vector ∇×f, with three outputs. Its multiplier (3, 3) is
    the matrix of v ↦ iω × v.

    Use it as in `posterior.mean(x, gp_orff.Curl())`, which raises a ValueError in other dimensions.

    Example:
        The multiplier at ω = (1, 2) in two dimensions is −2i for f₁ and i for f₂:

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
    """The Jacobian matrix ∂_j f_k of a field f, in units of f per unit of x.

    For a field with p components and d inputs in space, the matrix is flattened row by row into p·d
    outputs. Output k·d + j is ∂_j f_k, with k and j counted from 0. Reshape a posterior mean
    (n, p·d) at n points to (n, p, d) to get matrices. The multiplier (p·d, p) (see `Symbol`) is
    Q(ω) = i (I_p ⊗ ω), with the imaginary unit i.

    Args:
        num_dims: d, the number of inputs in space. With None, the default, d = p. A prediction
            raises a ValueError if d is not the number of inputs of the field.

    Example:
        The Jacobian of 3 components is 3 × 3 with 3 inputs, and 3 × 2 with 2 inputs:

        >>> import gp_orff
        >>> gp_orff.Jacobian().num_outputs(3)
        9
        >>> gp_orff.Jacobian(num_dims=2).num_outputs(3)
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


# Antiderivatives of a field: potential, stream function and vector potential.


class _Antiderivative(VectorFieldSymbol):
    """An antiderivative of a field, with the multiplier i rows(ω)/‖ω‖², which is zero at ω = 0.

    The rows are linear in ω. If `background` is True, the image of the constant fields 1⊗I_p is
    −`_scale` Σ_j x_j rows(e_j), with the unit vectors e_j. Otherwise their image is zero.
    """

    order = -1
    background: bool | None = None  # None: `decided` sets it according to the kernel
    _scale = 1.0

    @abstractmethod
    def _rows(self, omega: Float[Tensor, "D d"]) -> Float[Tensor, "D q p"]:
        """Return the rows (D, q, p) at the frequencies `omega` (D, d)."""

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        square = omega.square().sum(-1)[:, None, None]
        return 1j * self._rows(omega) * torch.where(square > 0, 1 / square.clamp_min(TINY), 0.0)

    def of_affine(self, value, slope):
        image = value.new_zeros(self.num_outputs(len(value)), value.shape[-1])
        if not self.background:
            return image, image.new_zeros(len(slope), *image.shape)
        slopes = -self._scale * self._rows(torch.eye(len(slope)).to(value))
        return image, torch.einsum("jqp,pk->jqk", slopes, value)

    def decided(self, curl_free: bool, divergence_free: bool) -> Symbol:
        includes = curl_free if self.of_gradients else divergence_free
        return self if self.background is not None else replace(self, background=includes)


@dataclass(frozen=True, eq=False)
class _ScalarPotential(_Antiderivative):
    """An antiderivative with one output, which is zero at the `reference`, if there is one."""

    reference: Float[Tensor, "d"] | None = None
    background: bool | None = None
    outputs = 1

    def __post_init__(self):
        if self.reference is not None:
            object.__setattr__(self, "reference", copy_of(self.reference))


@dataclass(frozen=True, eq=False)
class Potential(_ScalarPotential):
    """The potential g of the curl-free part of a field.

    It has one output, in units of f times units of x. The field is f = ∇g + (a divergence-free
    field) + (a constant field, the background). Note the sign: a force is often defined as minus
    the gradient of its potential, while here ∇g has the sign of f. The multiplier (1, d) (see
    `Symbol`) is Q(ω) = −iωᵀ/‖ω‖².

    The constant mean c of the field has the potential ⟨c, x − x₀⟩. Here x₀ is the reference, or 0
    without a reference. By default, g includes this potential if all terms of the kernel are
    curl-free; then ∇g is the whole field.

    The field determines g only up to a constant. With a `reference`, g is zero at the reference,
    and the error bars grow with the distance from it. Without a `reference`, g has the prior of its
    kernel, with mean zero. Observations of g then determine the constant.

    Args:
        reference: x₀, (d,), the point where g is zero, in units of x; None by default.
        background: whether g includes the potential of the constant mean c. None, the default,
            means True if all terms of the kernel are curl-free, and False otherwise.

    Raises:
        TypeError: `reference` has a unit; pass plain numbers in units of x.
        ValueError: raised by a prediction if `reference` does not have d coordinates. It is also
            raised without a `reference` if the kernel does not define the constant, for example
            for a `SeparableKernel`.

    Example:
        The field f = (x₁, x₂) is the gradient of g = ‖x‖²/2. At distance 1, g is about 1/2:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     *[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> field = model.condition(x, x).posterior()
        >>> g = gp_orff.Potential(reference=torch.zeros(2))
        >>> round(field.mean(torch.tensor([[1.0, 0.0]]), g).item(), 1)
        0.5
    """

    of_gradients = True

    def _rows(self, omega: Float[Tensor, "D d"]) -> Float[Tensor, "D 1 d"]:
        return -omega.unsqueeze(-2)

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        # For a wave that decays with height, f₃ = ∂₃g = iω₃g.
        values = torch.zeros_like(omega).unsqueeze(-2)
        values[..., 0, 2] = 1 / (1j * omega[:, 2])
        return values


@dataclass(frozen=True, eq=False)
class StreamFunction(_ScalarPotential):
    """The stream function ψ of a field in two dimensions.

    It has one output, in units of f times units of x. The field is f = (∂₂ψ, −∂₁ψ) + (a curl-free
    field) + (a constant field, the background). The divergence-free part flows along the contours
    of ψ, with larger values of ψ on its left. Around a maximum of ψ, it turns counter-clockwise.
    Oceanographers often use the opposite sign. The multiplier (1, 2) (see `Symbol`) is Q(ω) =
    i(−ω₂, ω₁)/‖ω‖².

    The constant mean c of the field has the stream function c₁y₂ − c₂y₁, with y = x − x₀. Here x₀
    is the reference, or 0 without a reference. By default, ψ includes this function if all terms of
    the kernel are divergence-free.

    The field determines ψ only up to a constant. See `Potential` for the constant with and without
    a `reference`.

    Args:
        reference: x₀, (2,), the point where ψ is zero, in units of x; None by default.
        background: whether ψ includes the stream function of the constant mean c. None, the
            default, means True if all terms of the kernel are divergence-free, and False otherwise.

    Raises:
        TypeError: `reference` has a unit; pass plain numbers in units of x.
        ValueError: raised by a prediction if the field is not two-dimensional, or for one of the
            reasons listed at `Potential`.

    Example:
        The field f = (x₂, −x₁) turns clockwise. Its stream function ‖x‖²/2 has a minimum at 0:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     *[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
        ... )
        >>> y = torch.stack([x[:, 1], -x[:, 0]], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> psi = gp_orff.StreamFunction(reference=torch.zeros(2))
        >>> at = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> psi_at = model.condition(x, y).posterior().mean(at, psi)
        >>> (10 * psi_at).round().int().flatten().tolist()
        [0, 5]
    """

    dims = (2,)

    def _rows(self, omega: Float[Tensor, "D 2"]) -> Float[Tensor, "D 1 2"]:
        return quarter_turn(omega).unsqueeze(-2)


@dataclass(frozen=True)
class VectorPotential(_Antiderivative):
    """The vector potential A of a field in three dimensions, in units of f times units of x.

    The field is f = ∇×A + (a curl-free field) + (a constant field, the background). A has three
    outputs and satisfies ∇·A = 0 (Coulomb gauge). The multiplier Q(ω), (3, 3) (see `Symbol`), is
    the matrix of v ↦ i (ω × v)/‖ω‖². The constant mean c of the field has the vector potential
    ½ c × x. A prediction in other dimensions raises a ValueError.

    Args:
        background: whether A includes the vector potential of the constant mean c. None, the
            default, means True if all terms of the kernel are divergence-free, and False otherwise.

    Example:
        The column of Q for ω = (0, 0, 2) and v = (1, 0, 0) is i (0, 2, 0)/4:

        >>> import gp_orff, torch
        >>> q = gp_orff.VectorPotential()(torch.tensor([[0.0, 0.0, 2.0]]), 3)
        >>> q[0, :, 0].imag.tolist()
        [0.0, 0.5, 0.0]
    """

    background: bool | None = None
    dims, outputs = (3,), 3

    _scale = 0.5  # ½ c × x = −½ Σ_j x_j e_j × c

    def _rows(self, omega: Float[Tensor, "D 3"]) -> Float[Tensor, "D 3 3"]:
        return cross_matrix(omega)


# Parts and components of a field.


@dataclass(frozen=True)
class _Part(VectorFieldSymbol):
    """The curl-free or divergence-free part of a field, with or without the constant mean."""

    background: bool = False

    def of_constants(self, num_dims: int, p: int) -> Float[Tensor, "p p"]:
        return float(self.background) * torch.eye(p, dtype=torch.float64)


@dataclass(frozen=True)
class CurlFreePart(_Part):
    """The curl-free part of a vector field, which is the gradient of a potential.

    It has p = d outputs, in the units of f. The multiplier (d, d) (see `Symbol`) is Q(ω) =
    ωωᵀ/‖ω‖², and 0 at ω = 0. The constant part of the field, its background, is excluded unless
    `background` is True.

    A field that has neither curl nor divergence in the region of the data can belong to either
    part, and the data cannot decide. The error bars include this uncertainty, so they are wide near
    the edge of the data. A prediction raises a ValueError if the field has another number of
    components than inputs in space.

    Args:
        background: whether this part includes the constant mean of the field; False by default.

    Example:
        At ω = (0, 2), the curl-free part of a wave with amplitude v is the component of v along ω:

        >>> import gp_orff, torch
        >>> gp_orff.CurlFreePart()(torch.tensor([[0.0, 2.0]]), 2).real.tolist()
        [[[0.0, 0.0], [0.0, 1.0]]]
    """

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        unit = omega / omega.norm(dim=-1, keepdim=True).clamp_min(math.sqrt(TINY))
        return (unit.unsqueeze(-1) * unit.unsqueeze(-2)).to(torch.complex128)


@dataclass(frozen=True)
class DivergenceFreePart(_Part):
    """The divergence-free part of a vector field.

    It has p = d outputs, in the units of f. The multiplier (d, d) (see `Symbol`) is Q(ω) = I −
    ωωᵀ/‖ω‖², and 0 at ω = 0. The constant part of the field, its background, is excluded unless
    `background` is True. See `CurlFreePart` for the error bars near the edge of the data. A
    prediction raises a ValueError if the field has another number of components than inputs in
    space.

    Args:
        background: whether this part includes the constant mean of the field; False by default.

    Example:
        At ω = (0, 2), this part of a wave with amplitude v is the component of v normal to ω:

        >>> import gp_orff, torch
        >>> gp_orff.DivergenceFreePart()(
        ...     torch.tensor([[0.0, 2.0]]), 2
        ... ).real.tolist()
        [[[1.0, 0.0], [0.0, 0.0]]]
    """

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        eye = torch.eye(p, dtype=omega.dtype, device=omega.device)
        varies = (omega != 0).any(-1)[:, None, None]
        return torch.where(varies, eye - CurlFreePart()(omega, p).real, 0.0).to(torch.complex128)


@dataclass(frozen=True)
class Background(Symbol):
    """The background of a field: its constant mean and the constant terms of its kernel.

    It has p outputs, in the units of f. The multiplier (p, p) (see `Symbol`) is Q(ω) = I at ω = 0,
    and 0 at all other frequencies. A vector field is the sum of its curl-free part, its
    divergence-free part and the background.

    On a `Grid`, each separable term of the kernel has a constant feature, with frequency ω = 0. The
    background includes these features.

    Example:
        The multiplier of a scalar field at ω = (0, 0) and at ω = (0, 2):

        >>> import gp_orff, torch
        >>> gp_orff.Background()(
        ...     torch.tensor([[0.0, 0.0], [0.0, 2.0]]), 1
        ... ).real.flatten().tolist()
        [1.0, 0.0]
    """

    length_power = 0

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        constant = (omega == 0).all(-1)[:, None, None]
        return constant * Identity()(omega, p)

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        return omega.new_zeros(len(omega), p, p)


@dataclass(frozen=True)
class Component(Symbol):
    """The component uᵀf of a field along a fixed vector u.

    It has one output. For a unit vector u, it has the units of f. The multiplier (1, p) (see
    `Symbol`) is Q(ω) = uᵀ at every frequency.

    Args:
        direction: u, (p,), p numbers of any length ‖u‖. The vector is not normalised.

    Raises:
        TypeError: `direction` has a unit; pass plain numbers.
        ValueError: `direction` is not a vector. A prediction raises this error too if u does not
            have p numbers.

    Example:
        >>> import gp_orff, torch
        >>> line_of_sight = gp_orff.Component([0.6, 0.8])
        >>> line_of_sight(torch.zeros(1, 2), 2).real  # Q(0)
        tensor([[[0.6000, 0.8000]]], dtype=torch.float64)
    """

    direction: Sequence[float] | Float[Tensor, "p"]
    homogeneous, outputs = True, 1

    def __post_init__(self):
        direction = copy_of(self.direction)
        if direction.dim() != 1:
            raise ValueError(
                f"Component expects a direction (p,), got shape {tuple(direction.shape)}"
            )
        object.__setattr__(self, "direction", tuple(direction.tolist()))

    def check(self, num_dims: int, p: int) -> None:
        if len(self.direction) != p:
            raise ValueError(
                f"Component expects a direction of {p} numbers, got {len(self.direction)}"
            )

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        row = torch.as_tensor(self.direction, dtype=torch.complex128, device=omega.device)
        return row.expand(len(omega), 1, p)


# Reduction to the pole: the anomaly that rocks would cause under a vertical main field.


_LEAST_INCLINATION = 10  # degrees; a smaller inclination multiplies errors by more than 5.8


@dataclass(frozen=True)
class ReductionToPole(Symbol):
    """The total-field anomaly that magnetic sources would have at the magnetic pole.

    Sources with magnetisation m lie below the points and have the magnetic field b. At the pole,
    both the magnetisation and the main field are vertical, and the maxima of the anomaly are above
    the sources. The field b is a sum of waves e^{i⟨k, x⟩ − |k|z}, at the position x and the height
    z, with the complex frequencies ω = (k, i|k|). The anomaly of a wave at the pole is

        Q(ω) b = b₃ ω₃ / ⟨m, ω⟩ ,

    with m scaled to length 1 (Baranov 1957). It has one output, in the units of b. If the
    inclination of m is I, the errors grow by a factor of at most 1/|sin I|. The constant part of b
    is omitted.

    The kernel of the field must be a `HarmonicKernel`, whose features have complex frequencies. A
    posterior under the exact kernel uses features for this symbol.

    Args:
        magnetisation: m, (3,), with the components east, north and up, of any length. For induced
            magnetisation, pass the direction of the main field, for example the mean of the
            `directions` that `labelled.total_field` returns.

    Raises:
        TypeError: `magnetisation` has a unit; pass plain numbers.
        ValueError: `magnetisation` is not a nonzero vector of 3 finite numbers, or its inclination
            is less than 10 degrees. A prediction raises this error too if the field does not have 3
            components and 3 inputs in space.
        NotImplementedError: raised by a prediction if the kernel is not a `HarmonicKernel`.

    Example:
        With a magnetisation that points down, the anomaly of a wave is −b₃:

        >>> import gp_orff, torch
        >>> reduction = gp_orff.ReductionToPole([0.0, 0.0, -1.0])
        >>> omega = torch.tensor([[0.6, 0.8, 1.0j]])  # exp(i(0.6 x₁ + 0.8 x₂) − z)
        >>> reduction(omega, 3)[..., 2].real
        tensor([[-1.]], dtype=torch.float64)
    """

    magnetisation: Sequence[float] | Float[Tensor, "3"]
    homogeneous, outputs = True, 1

    def __post_init__(self):
        m = copy_of(self.magnetisation).double()
        if m.shape != (3,) or not torch.isfinite(m).all() or not m.norm() > 0:
            raise ValueError(
                "ReductionToPole expects a magnetisation (3,) of finite numbers that are not all "
                f"zero, got {m.tolist()}; give the direction of the main field"
            )
        inclination = torch.rad2deg(torch.asin(m[2] / m.norm())).item()
        if abs(inclination) < _LEAST_INCLINATION:
            raise ValueError(
                f"ReductionToPole expects an inclination of at least {_LEAST_INCLINATION} degrees, "
                f"got {abs(inclination):.3g}, where errors would grow more than fivefold; predict "
                "the field at other heights, its components, or gp_orff.Jacobian() instead"
            )
        object.__setattr__(self, "magnetisation", tuple((m / m.norm()).tolist()))

    def check(self, num_dims: int, p: int) -> None:
        if (num_dims, p) != (3, 3):
            raise ValueError(
                "ReductionToPole expects a field with 3 components and 3 inputs in space, got "
                f"{p} components and {num_dims} inputs"
            )

    def patches(self, num_dims: int, p: int) -> None:
        return None  # the map is not a sum of averages

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        return self(omega, p)

    def __call__(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        if not omega.is_complex() and omega.any():
            raise NotImplementedError(
                "ReductionToPole expects a field with a HarmonicKernel, whose waves decay with "
                "height, got a field with real frequencies; use gp_orff.HarmonicKernel"
            )
        omega = omega.to(torch.complex128)
        m = torch.as_tensor(self.magnetisation, dtype=torch.complex128, device=omega.device)
        values = torch.zeros(len(omega), 1, 3, dtype=torch.complex128, device=omega.device)
        waves = (omega != 0).any(-1)  # the image of constants is zero
        values[waves, 0, 2] = omega[waves, 2] / (omega[waves] @ m)
        return values
