"""Antiderivatives of a field: potential, stream function and vector potential."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import (
    TINY,
    Multiplier,
    Symbol,
    VectorFieldSymbol,
    copy_of,
    cross_matrix,
    quarter_turn,
)


class _Antiderivative(VectorFieldSymbol):
    """An antiderivative of a field: rows linear in ω, times i/‖ω‖²; zero at ω = 0.

    With `background`, constant fields have an image that is linear in x, and zero at x = 0.
    """

    order = -1
    background: bool | None = None  # None: as the kernel requires

    def of_affine(self, value, slope):
        image = value.new_zeros(self.num_outputs(len(value)), value.shape[-1])
        if not self.background:
            return image, image.new_zeros(len(slope), *image.shape)
        return image, torch.einsum("jqp,pk->jqk", self._slopes(len(slope)).to(value), value)

    def _slopes(self, num_dims: int) -> Float[Tensor, "d q p"]:
        """S_j, where the image of 1⊗I_p is Σ_j x_j S_j."""
        raise NotImplementedError

    def decided(self, curl_free: bool, divergence_free: bool) -> Symbol:
        includes = curl_free if isinstance(self, Potential) else divergence_free
        return self if self.background is not None else replace(self, background=includes)

    def _multiplier(self, omega: Float[Tensor, "D d"], rows: Float[Tensor, "D q p"]) -> Multiplier:
        """i · rows / ‖ω‖²."""
        square = omega.square().sum(-1)[:, None, None]
        return 1j * rows * torch.where(square > 0, 1 / square.clamp_min(TINY), 0.0)


@dataclass(frozen=True, eq=False)
class _ScalarPotential(_Antiderivative):
    """A potential with one output, known up to a constant: zero at the reference, if any."""

    reference: Float[Tensor, "d"] | None = None
    background: bool | None = None

    def __post_init__(self):
        if self.reference is not None:
            object.__setattr__(self, "reference", copy_of(self.reference))

    def num_outputs(self, p: int) -> int:
        return 1


@dataclass(frozen=True, eq=False)
class Potential(_ScalarPotential):
    """The potential g of the curl-free part of a field, one output in units of f times units of x.

    The field is f = ∇g + (a divergence-free field) + (a constant field, the background). So ∇g has
    the sign of f, while a force is often minus the gradient of its potential. The multiplier (see
    `Symbol`) is Q(ω) = −iωᵀ/‖ω‖².

    The constant mean c of the field has the potential ⟨c, x − x₀⟩, with the reference x₀, or
    x₀ = 0 without one. If all terms of the kernel are `CurlFreeKernel`s, this is part of g, so that
    ∇g is the field. Under other kernels it is not, unless `background=True` assigns it to g.

    A potential is known up to a constant. With `reference`, g is zero there, and the error bars
    grow with the distance from that point. Without it, the prior sets the constant: the mean of g
    over all of space is zero, and its variance that of the kernel of g. Observations of g tell the
    constant.

    Args:
        reference: (d,), the point where g is zero; None to leave the constant to the prior.
        background: whether g includes the potential of the constant mean; None: if the kernel is
            curl-free.

    Example:
        The field f = (x₁, x₂) is the gradient of g = ‖x‖²/2, from 0 to about 1/2 at distance 1:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(*[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2)
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> g = gp_orff.Potential(reference=torch.zeros(2))
        >>> round(model.condition(x, x).posterior().mean(torch.tensor([[1.0, 0]]), g).item(), 1)
        0.5
    """

    def _slopes(self, num_dims: int) -> Float[Tensor, "d 1 d"]:
        return torch.eye(num_dims, dtype=torch.float64).unsqueeze(1)

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._multiplier(omega, -omega.unsqueeze(-2))


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
        background: whether ψ includes the stream function of the constant mean; None: if the
            kernel is divergence-free.

    Example:
        The field f = (x₂, −x₁) turns clockwise. Its stream function is ‖x‖²/2, a minimum at 0:

        >>> import gp_orff, torch
        >>> x = torch.cartesian_prod(*[torch.linspace(-1, 1, 8, dtype=torch.float64)] * 2)
        >>> y = torch.stack([x[:, 1], -x[:, 0]], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> psi = gp_orff.StreamFunction(reference=torch.zeros(2))
        >>> at = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> psi_at = model.condition(x, y).posterior().mean(at, psi)
        >>> (10 * psi_at).round().int().flatten().tolist()
        [0, 5]
    """

    dims = (2,)

    def _slopes(self, num_dims: int) -> Float[Tensor, "2 1 2"]:
        return torch.tensor([[[0.0, -1.0]], [[1.0, 0.0]]], dtype=torch.float64)

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._multiplier(omega, quarter_turn(omega).unsqueeze(-2))


@dataclass(frozen=True)
class VectorPotential(_Antiderivative):
    """The vector potential A of a field in three dimensions, in units of f times units of x.

    The field is f = ∇×A + (a curl-free field) + (a constant field, the background). A has three
    outputs and is fixed by ∇·A = 0 (Coulomb gauge). The multiplier Q(ω) (see `Symbol`) is the
    matrix of v ↦ i (ω × v)/‖ω‖². The constant mean c of the field has the vector potential
    ½ c × x. If all terms of the kernel are divergence-free, it is part of A.

    Args:
        background: whether A includes the vector potential of the constant mean; None: if the
            kernel is divergence-free.

    Example:
        ω = (0, 0, 2) and v = (1, 0, 0): i · 2 · (0, 1, 0) / 4

        >>> import gp_orff, torch
        >>> q = gp_orff.VectorPotential()(torch.tensor([[0.0, 0.0, 2.0]]), 3)
        >>> q[0, :, 0].imag.tolist()
        [0.0, 0.5, 0.0]
    """

    background: bool | None = None
    dims = (3,)

    def num_outputs(self, p: int) -> int:
        return 3

    def _slopes(self, num_dims: int) -> Float[Tensor, "3 3 3"]:
        return -0.5 * cross_matrix(
            torch.eye(3, dtype=torch.float64)
        )  # ½ c × x = −½ Σ_j x_j e_j × c

    def __call__(self, omega: Float[Tensor, "D d"], p: int) -> Multiplier:
        return self._multiplier(omega, cross_matrix(omega))
