"""Symbols that are evaluated at a point: derivatives, potentials, parts of a field."""

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
    """The divergence ∇·f = Σ_j ∂_j f_j of a field, one output in units of f per unit of x.

    Its multiplier is Q(ω) = iωᵀ (see `Symbol`). In use: `posterior.mean(x, gp_orff.Divergence())`.

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
    """The Jacobian matrix ∂_j f_k of a field f, in units of f per unit of x.

    The matrix is flattened row by row into p·d outputs. Output k·d + j is ∂_j f_k, with k and j
    counted from 0. Reshape a posterior mean (n, p·d) at n points to (n, p, d) to get matrices. The
    multiplier (p·d, p) (see `Symbol`) is Q(ω) = i (I_p ⊗ ω), with the imaginary unit i.

    Args:
        num_dims: d, the number of inputs in space. If None, d = p, as for a vector field.

    Example:
        >>> import gp_orff
        >>> # f has 3 components and 3 inputs: 3 × 3
        >>> gp_orff.Jacobian().num_outputs(3)
        9
        >>> # 3 components, 2 inputs: 3 × 2
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
    """An antiderivative of a field: rows linear in ω, times i/‖ω‖²; zero at ω = 0.

    With `background`, constant fields have an image that is linear in x, and zero at x = 0: that of
    1⊗I_p is −Σ_j x_j rows(e_j), times `_scale`.
    """

    order = -1
    background: bool | None = None  # None: as the kernel requires
    _scale = 1.0

    @abstractmethod
    def _rows(self, omega: Float[Tensor, "D d"]) -> Float[Tensor, "D q p"]:
        """The rows at frequencies `omega`, (D, d)."""

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
    """A potential with one output, known up to a constant: zero at the reference, if any."""

    reference: Float[Tensor, "d"] | None = None
    background: bool | None = None
    outputs = 1

    def __post_init__(self):
        if self.reference is not None:
            object.__setattr__(self, "reference", copy_of(self.reference))


@dataclass(frozen=True, eq=False)
class Potential(_ScalarPotential):
    """The potential g of the curl-free part of a field, one output in units of f times units of x.

    The field is f = ∇g + (a divergence-free field) + (a constant field, the background). So ∇g has
    the sign of f, while a force is often minus the gradient of its potential. The multiplier (see
    `Symbol`) is Q(ω) = −iωᵀ/‖ω‖².

    The constant mean c of the field has the potential ⟨c, x − x₀⟩, with the reference x₀, or x₀ = 0
    without one. If all terms of the kernel are `CurlFreeKernel`s, this is part of g, so that ∇g is
    the field. With other kernels it is not, unless `background=True` assigns it to g.

    A potential is determined up to a constant. With `reference`, g is zero at this point, and the
    error bars grow with the distance from it. Without `reference`, the prior sets the constant: the
    mean of g over all of space is zero, and g has the variance of its kernel. Observations of g
    determine the constant.

    Args:
        reference: (d,), the point where g is zero; None to leave the constant to the prior.
        background: whether g includes the potential of the constant mean. If None, it does if the
            kernel is curl-free.

    Example:
        The field f = (x₁, x₂) is the gradient of g = ‖x‖²/2, from 0 to about 1/2 at distance 1:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     *[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2
        ... )
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> g = gp_orff.Potential(reference=torch.zeros(2))
        >>> round(
        ...     model.condition(x, x)
        ...     .posterior()
        ...     .mean(torch.tensor([[1.0, 0]]), g)
        ...     .item(),
        ...     1,
        ... )
        0.5
    """

    of_gradients = True

    def _rows(self, omega: Float[Tensor, "D d"]) -> Float[Tensor, "D 1 d"]:
        return -omega.unsqueeze(-2)

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        # A wave that decays has f₃ = ∂₃g = iω₃g.
        values = torch.zeros_like(omega).unsqueeze(-2)
        values[..., 0, 2] = 1 / (1j * omega[:, 2])
        return values


@dataclass(frozen=True, eq=False)
class StreamFunction(_ScalarPotential):
    """The stream function ψ of a field in two dimensions, in units of f times units of x.

    It has one output. The field is f = (∂₂ψ, −∂₁ψ) + (a curl-free field) + (a constant field, the
    background). It flows along the lines of equal ψ, with larger values of ψ on its left: around a
    maximum of ψ it turns counter-clockwise. Oceanographers often use the opposite sign. The
    multiplier (see `Symbol`) is Q(ω) = i(−ω₂, ω₁)/‖ω‖². The constant mean c of the field has the
    stream function c₁y₂ − c₂y₁ with y = x − x₀, for the reference x₀, or x₀ = 0 without one. If all
    terms of the kernel are divergence-free, it is part of ψ.

    Args:
        reference: (2,), the point where ψ is zero; if None, the prior sets the constant, as for
            `Potential`.
        background: whether ψ includes the stream function of the constant mean. If None, it does if
            the kernel is divergence-free.

    Example:
        The field f = (x₂, −x₁) turns clockwise. Its stream function is ‖x‖²/2, a minimum at 0:

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
    ½ c × x. The argument `background` decides whether it is part of A.

    Args:
        background: whether A includes the vector potential of the constant mean. If None, A
            includes it if all terms of the kernel are divergence-free.

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
    """A part of the Helmholtz split, with the constant mean of the field or without it."""

    background: bool = False

    def of_constants(self, num_dims: int, p: int) -> Float[Tensor, "p p"]:
        return float(self.background) * torch.eye(p, dtype=torch.float64)


@dataclass(frozen=True)
class CurlFreePart(_Part):
    """The curl-free part of a field: the gradient of a potential, with the outputs and units of f.

    The background, which is the constant part of the field, belongs to neither the curl-free nor
    the divergence-free part. The multiplier (see `Symbol`) is Q(ω) = ωωᵀ/‖ω‖², and 0 at ω = 0.

    The data cannot distinguish the two parts of a smooth field that has neither curl nor
    divergence. The error bars include this uncertainty, so they are wide near the edge of the data.

    Args:
        background: whether the constant mean of the field is assigned to this part.

    Example:
        At ω = (0, 2), the part of a wave v is its component along ω:

        >>> import gp_orff, torch
        >>> gp_orff.CurlFreePart()(torch.tensor([[0.0, 2.0]]), 2).real.tolist()
        [[[0.0, 0.0], [0.0, 1.0]]]
    """

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        unit = omega / omega.norm(dim=-1, keepdim=True).clamp_min(math.sqrt(TINY))
        return (unit.unsqueeze(-1) * unit.unsqueeze(-2)).to(torch.complex128)


@dataclass(frozen=True)
class DivergenceFreePart(_Part):
    """The divergence-free part of a field, without the background, its constant mean.

    Its Fourier multiplier, see `Symbol`, is Q(ω) = I − ωωᵀ/‖ω‖², and zero at ω = 0.

    It has the number of outputs and the units of the field.

    Args:
        background: whether the constant mean of the field is assigned to this part.

    Example:
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
    """The constant part of a field: its constant mean and the constant terms of its kernel.

    It has the p outputs and the units of the field. The multiplier (p, p) (see `Symbol`) is
    Q(ω) = I at ω = 0, and zero elsewhere.

    The field is the sum of its curl-free part, its divergence-free part and the background. On a
    `Grid`, each separable term of the kernel has a constant feature, at the frequency ω = 0. The
    background includes it.

    Example:
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
    """The component uᵀf of a field along a fixed vector u, one output in units of u times f.

    The multiplier (see `Symbol`) is Q(ω) = uᵀ.

    Args:
        direction: u, (p,), of any length; it is not normalised.

    Raises:
        ValueError: `direction` is not a vector of numbers.

    Example:
        >>> import gp_orff, torch
        >>> line_of_sight = gp_orff.Component([0.6, 0.8])
        >>> # Q is the same at every frequency
        >>> line_of_sight(torch.zeros(1, 2), 2).real
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


_LEAST_INCLINATION = 10  # degrees; below, errors are multiplied by more than 5.8


@dataclass(frozen=True)
class ReductionToPole(Symbol):
    """The total-field anomaly for a vertical main field and a vertical magnetisation, one output.

    Sources below the points that are magnetised along m have a magnetic field b. It is a sum of
    waves e^{i⟨k,x⟩ − |k|z} with complex frequencies ω = (k, i|k|). If magnetisation and main field
    were vertical, the same sources would have the anomaly

        Q(ω) b = b₃ ω₃ / ⟨m, ω⟩ ,

    whose maxima are above the rocks (Baranov 1957). If m is inclined by I, errors grow by a factor
    of at most 1/|sin I|. Constants are omitted. The symbol needs features of a `HarmonicKernel`,
    which have complex frequencies: use `VectorFieldGP(...,
    frequencies=gp_orff.Auto(exact_values=0))`.

    Args:
        magnetisation: m, (3,), east, north and up, of any length. For induced magnetisation, use
            the direction of the main field, for example the mean of the `directions` of
            `labelled.total_field`.

    Raises:
        ValueError: `magnetisation` is not a vector of 3 finite numbers, or is inclined by less than
            10 degrees.

    Example:
        >>> import gp_orff, torch
        >>> # at the pole already
        >>> reduction = gp_orff.ReductionToPole([0.0, 0.0, -1.0])
        >>> wave = torch.tensor([[0.6, 0.8, 1.0j]])  # exp(i(0.6 x + 0.8 y) - z)
        >>> # the anomaly along a field that points down is -b₃
        >>> reduction(wave, 3)[..., 2].real
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
                f"got {abs(inclination):.3g}, where errors would grow more than fivefold; read the "
                "field at other heights, its components, or Jacobian instead"
            )
        object.__setattr__(self, "magnetisation", tuple((m / m.norm()).tolist()))

    def check(self, num_dims: int, p: int) -> None:
        if (num_dims, p) != (3, 3):
            raise ValueError(
                f"ReductionToPole expects a field of 3 components of 3 inputs in space, got {p} "
                f"components of {num_dims}"
            )

    def patches(self, num_dims: int, p: int) -> None:
        return None  # it is no sum of averages

    def of_waves(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        return self(omega, p)

    def __call__(self, omega: Complex[Tensor, "D 3"], p: int) -> Multiplier:
        if not omega.is_complex() and omega.any():
            raise NotImplementedError(
                "ReductionToPole expects waves that decay with height, as those of a "
                "HarmonicKernel, got a field of real frequencies, for which it is not known"
            )
        omega = omega.to(torch.complex128)
        m = torch.as_tensor(self.magnetisation, dtype=torch.complex128, device=omega.device)
        values = torch.zeros(len(omega), 1, 3, dtype=torch.complex128, device=omega.device)
        waves = (omega != 0).any(-1)  # constants are left out
        values[waves, 0, 2] = omega[waves, 2] / (omega[waves] @ m)
        return values
