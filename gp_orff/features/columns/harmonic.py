"""Decaying waves: the columns of harmonic fields."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.features.columns.base import Columns, exchanged_halves
from gp_orff.features.columns.decaying_sums import (
    Waves,
    prefers_transforms,
    product_sums,
    wave_sums,
)
from gp_orff.features.columns.pointwise import PointwiseColumns
from gp_orff.symbols.base import Composed, Symbol
from gp_orff.symbols.parts import Background
from gp_orff.symbols.potentials import Potential
from gp_orff.symbols.reduction import ReductionToPole

_INDEPENDENT = 1e-14  # a singular value of weights, relative to the largest


@dataclass(frozen=True)
class HarmonicColumns(PointwiseColumns):
    """The real parts of the waves ψ = e^{i⟨k,x⟩ − |k|s(z − z₀)}, and of −iψ.

    The horizontal inputs are relative to x₀, the heights z to z₀: waves are at most 1 on the side
    of z₀ that is away from the sources. They satisfy Laplace's equation; as waves of three inputs
    they have the complex frequency (k₁, k₂, i s|k|).
    """

    omega: Float[Tensor, "D 2"]  # k
    side: int  # s: 1 for sources below the points, −1 for sources above them
    origin: Float[Tensor, "3"]  # (x₀, z₀)
    dims: tuple[int, ...]  # the input columns, height last

    sampled = False
    tensors = ()

    @property
    def num_columns(self) -> int:
        return 2 * len(self.omega)

    @property
    def device(self) -> torch.device:
        return self.omega.device

    def with_tensors(self) -> "HarmonicColumns":
        return self

    def to(self, device: torch.device) -> "HarmonicColumns":
        return replace(self, omega=self.omega.to(device), origin=self.origin.to(device))

    def select(self, columns: Int[Tensor, "2*k"]) -> "HarmonicColumns":
        return replace(self, omega=self.omega[columns[: len(columns) // 2]])

    def halves(self) -> list[tuple[Int[Tensor, "2*D"], Float[Tensor, "2*D"]]]:
        """All columns twice: none of them is sampled."""
        index = torch.arange(self.num_columns, device=self.device)
        return [(index, torch.ones_like(index, dtype=torch.float64))] * 2

    def same(self, other: Columns) -> bool:
        return (
            isinstance(other, HarmonicColumns)
            and (self.side, self.dims) == (other.side, other.dims)
            and torch.equal(self.omega, other.omega)
            and torch.equal(self.origin, other.origin)
        )

    def plain(self) -> dict[str, object]:
        tensors = {"wavevectors": self.omega.cpu(), "origin": self.origin.cpu()}
        return {**tensors, "side": self.side, "dims": self.dims}

    def mean_squares(self) -> Float[Tensor, "2*D 1"]:
        """Raise: waves that decay have no mean over all of space.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel for a mean over all of space, got a HarmonicKernel, "
            "whose variance falls with height; use the variance at points of your own"
        )

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return self._relative(x)[..., :2] @ self.omega.mT

    def _relative(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N 3"]:
        return x[..., list(self.dims)].double() - self.origin

    def decay(self, height: Float[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        """e^{−|k|s(z − z₀)} at heights z."""
        above = self.side * (height - self.origin[2])
        return (-above.unsqueeze(-1) * self.omega.norm(dim=-1)).exp()

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N 2*D"]:
        phase, decay = self.inner_products(x), self.decay(x[..., self.dims[2]].double())
        return torch.cat([phase.cos() * decay, phase.sin() * decay], dim=-1)

    def sums(self, x, y, weights):
        if weights.shape[-1] == 1 or not len(weights):
            return self._sums(x, y, weights)
        base, mixing = independent_columns(weights)
        grams, cross, sums = self._sums(x, y, base)
        grams, sums = (
            [sum(m * part for m, part in zip(row, parts, strict=True)) for row in mixing.mT]
            for parts in (grams, sums)
        )
        return grams, cross, sums

    def _sums(self, x, y, weights):
        if not self._prefers_transforms(self, x):
            return super().sums(x, y, weights)
        relative, count = self._relative(x.detach()), y.shape[-1]
        waves = self._waves
        values = wave_sums(waves, relative, torch.cat([y, weights], dim=-1).double())
        values = torch.cat([values.real, values.imag])
        grams = product_sums(waves, waves, relative, weights.double())
        return grams, values[:, :count], values[:, count:].unbind(-1)

    def cross_gram(self, other, x, weight=None):
        near = isinstance(other, HarmonicColumns) and other.dims == self.dims
        near = near and torch.equal(other.origin[:2], self.origin[:2])
        if not (near and self._prefers_transforms(other, x)):
            return super().cross_gram(other, x, weight)
        relative = self._relative(x.detach())
        weight = torch.ones_like(relative[:, 0]) if weight is None else weight.double()
        shift = (other.origin[2] - self.origin[2]).item()
        right = replace(other._waves, start=shift)
        (gram,) = product_sums(self._waves, right, relative, weight.unsqueeze(-1))
        return gram

    def _prefers_transforms(self, other: "HarmonicColumns", x: Tensor) -> bool:
        if x.dim() != 2 or x.requires_grad:
            return False
        shape = len(self.omega), len(other.omega)
        return prefers_transforms(len(x), shape, self._waves, x[:, self.dims[2]].double())

    @property
    def _waves(self) -> Waves:
        """The waves of inputs relative to (x₀, z₀)."""
        omega = self.omega.cpu().numpy()
        return Waves(omega, self.side * np.hypot(*omega.T), 0.0)

    def frequencies(self) -> Complex[Tensor, "D 3"]:
        """(k₁, k₂, i s|k|)."""
        vertical = 1j * self.side * self.omega.norm(dim=-1, keepdim=True)
        return torch.cat([self.omega.to(vertical.dtype), vertical], dim=-1)

    def directions(self) -> Complex[Tensor, "D 3"]:
        """The field −∇ψ / |k|ψ = (−ik/|k|, s) of each wave as a potential."""
        return -1j * self.frequencies() / self.omega.norm(dim=-1, keepdim=True)

    def multiplier(self, symbol: Symbol, num_outputs: int, space) -> Complex[Tensor, "2*D q p"]:
        """The symbol at the complex frequencies; the potential g of f = ∇g is f₃/(iω₃).

        There is no constant part. A composition is the product of its maps.

        Raises:
            NotImplementedError: other antiderivatives, parts, which a field without sources does
                not determine, or a symbol of other inputs.
        """
        omega = self.frequencies()
        if tuple(space) not in ((), tuple(self.dims)):
            raise NotImplementedError(f"{type(symbol).__name__} of other inputs than {self.dims}")
        if isinstance(symbol, Composed):
            inner = self.multiplier(symbol.inner, num_outputs, space)
            return self.multiplier(symbol.outer, inner.shape[-2], space) @ inner
        if isinstance(symbol, Potential):
            values = torch.zeros_like(omega).unsqueeze(-2)
            values[..., 0, 2] = 1 / (1j * omega[:, 2])
        elif isinstance(symbol, Background):
            values = torch.zeros(len(omega), num_outputs, num_outputs).to(omega)
        elif isinstance(symbol, ReductionToPole):
            values = symbol(omega, num_outputs)
        elif symbol.order < 0 or not self._is_analytic(symbol, num_outputs):
            raise NotImplementedError(
                f"{type(symbol).__name__} of a harmonic field is not known: it is curl-free and "
                "divergence-free at once, and waves that decay have no Fourier transform; use "
                "Potential, Jacobian, Component, ReductionToPole, or line integrals"
            )
        else:
            values = symbol(omega, num_outputs).to(torch.complex128)
        return torch.cat([values, values], dim=-3)

    def _is_analytic(self, symbol: Symbol, num_outputs: int) -> bool:
        """Whether a multiplier takes complex frequencies, and is finite there and smooth at 0."""
        near = 1e-6 * self.frequencies()[:1]
        near, real = torch.cat([near, 0 * near]), near.real
        try:
            first, zero = symbol(near, num_outputs)
            ahead = symbol(torch.stack([real[0], real[0].flip(0)]), num_outputs)
        except (RuntimeError, TypeError):
            return False
        finite = torch.isfinite(torch.view_as_real(first.to(torch.complex128))).all()
        return bool(finite and (first - zero).abs().max() < 1e-4 > (ahead - zero).abs().max())

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "2*D"], Float[Tensor, "2*D"]]:
        """Im ψ is the real part of −iψ, and Im(−iψ) is −Re ψ."""
        return exchanged_halves(len(self.omega), self.omega.double())


def independent_columns(
    weights: Float[Tensor, "n k"],
) -> tuple[Float[Tensor, "n r"], Float[Tensor, "r k"]]:
    """Weights as combinations of fewer, where they are: those along one direction are one."""
    left, values, right = torch.linalg.svd(weights.double(), full_matrices=False)
    rank = max(1, int((values > _INDEPENDENT * values[0]).sum()))
    return left[:, :rank] * values[:rank], right[:rank]
