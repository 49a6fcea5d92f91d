"""Decaying waves, the columns of harmonic fields, and their sums over many points."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff import nufft
from gp_orff.features.columns import PointwiseColumns, exchanged_halves
from gp_orff.symbols.base import Composed, Symbol

# Sums of products of decaying waves over points at scattered heights, by non-uniform transforms.
#
# The products of two waves are waves of k ± l that decay like e^{−Sz} with S = |k| + |l|. On
# heights between z̄ − H and z̄ + H the decay is a Chebyshev series, t = (z − z̄)/H,
#
#     e^{−SHt} = Σ_p (2 − δ_p0) (−1)^p I_p(SH) T_p(t) ,
#
# with modified Bessel functions I_p, so that a sum over points is a few transforms of type 3.
#
# 1. `Heights.rank` counts the terms for the largest rate. It is small where the heights differ
#    little.
# 2. For each term p the strengths are multiplied by T_p(t) at the points, transformed to the
#    horizontal frequencies, and multiplied by the coefficient of each pair of waves.
# 3. Frequencies k − l and k + l of all pairs are the targets of one plan, which sorts the points
#    once.
# 4. Real and imaginary parts of products of waves give the four blocks of the Gram matrix
#    (`_gram`).
#
# Points are visited in slices, to bound the memory of a plan. Whether all this is quicker than a
# matrix product is estimated from measured times of both (`prefers_transforms`).


_POINTS = 2**20  # of a plan


@dataclass(frozen=True)
class Waves:
    """The waves e^{i⟨k, x⟩ − s|k|(z − z₀)}."""

    k: Float[np.ndarray, "D 2"]
    rates: Float[np.ndarray, "D"]  # s|k|
    start: float  # z₀

    def exponents(self, middle: float) -> Float[np.ndarray, "D"]:
        """The logarithms of the waves at x = 0 and a height."""
        return -self.rates * (middle - self.start)


@dataclass(frozen=True)
class Heights:
    """The middle z̄ and half the extent H of the heights of some points."""

    middle: float
    half: float

    @classmethod
    def of(cls, z: Float[Tensor, "N"]) -> "Heights":
        """Those of all points."""
        low, high = z.min().item(), z.max().item()
        return cls(0.5 * (low + high), 0.5 * (high - low))

    def rank(self, largest: float) -> int:
        """The number of terms of the series for rates up to the largest."""
        if not self.half * largest > 0:
            return 1
        rates = np.linspace(0, self.half * largest, 40)[1:]
        orders = np.arange(int(12 + 3 * rates[-1] + 10 * np.sqrt(rates[-1])) + 20)
        # relative to a wave at the lowest height
        large = scipy.special.ive(orders[:, None], rates).max(axis=1) > 1e-13
        return int(np.flatnonzero(large)[-1]) + 1

    def series(
        self, rates: Float[np.ndarray, "*n"], exponents: Float[np.ndarray, "*n"], rank: int
    ) -> Iterator[Float[np.ndarray, "*n"]]:
        """The coefficients of e^{exponent − rate (z − z̄)}, term by term."""
        a = rates * self.half
        # `ive` is I_p times e^{−|a|}: the exponential is multiplied into the size of the wave, so
        # that a large Bessel function and a small wave do not overflow one by one.
        size = np.exp(exponents + np.abs(a))
        for p in range(rank):
            sign = np.where(a > 0, (-1.0) ** p, 1.0)
            yield (1 if p == 0 else 2) * sign * scipy.special.ive(p, np.abs(a)) * size

    def polynomials(self, z: Float[Tensor, "N"], rank: int) -> Iterator[Float[Tensor, "N"]]:
        """T_p of the heights, term by term."""
        t = (z - self.middle) / (self.half or 1.0)
        before, now = t, torch.ones_like(t)
        for _ in range(rank):
            yield now
            before, now = now, 2 * t * now - before


def wave_sums(
    waves: Waves, x: Float[Tensor, "N 3"], strengths: Float[Tensor, "N k"]
) -> Complex[Tensor, "D k"]:
    """Σ_n c_n ψ(x_n) for each column c of strengths; x is relative to x₀."""
    heights = Heights.of(x[:, 2])
    rank = heights.rank(np.abs(waves.rates).max())
    total = np.zeros((len(waves.k), strengths.shape[1]), dtype=complex)
    targets = np.concatenate([waves.k, -waves.k])
    pairs = torch.nn.functional.pad(strengths, (0, strengths.shape[1] % 2))
    # Two real columns are transformed as one complex one. The transforms at k and −k separate them,
    # since that of a real column at −k is the conjugate of that at k.
    pairs = torch.complex(pairs[:, ::2].contiguous(), pairs[:, 1::2].contiguous())
    for rows in nufft.slices(len(x), _POINTS):
        plan = nufft.Type3(x[rows, :2], targets)
        series = heights.series(waves.rates, waves.exponents(heights.middle), rank)
        for c, t in zip(series, heights.polynomials(x[rows, 2], rank), strict=True):
            for column in range(pairs.shape[1]):
                ahead, back = np.split(plan(t * pairs[rows, column]), 2)
                both = 0.5 * (ahead + back.conj()), -0.5j * (ahead - back.conj())
                for part, sums in enumerate(both[: strengths.shape[1] - 2 * column]):
                    total[:, 2 * column + part] += c * sums
    return torch.from_numpy(total)


def product_sums(
    left: Waves, right: Waves, x: Float[Tensor, "N 3"], weights: Float[Tensor, "N k"]
) -> list[Float[Tensor, "2*D 2*E"]]:
    """φᵀ diag(a) φ′ of the columns [Re ψ ; Im ψ] of two families, for each column a of weights."""
    symmetric = left is right
    if symmetric:
        i, j = np.triu_indices(len(left.k))
    else:
        i, j = (index.ravel() for index in np.indices((len(left.k), len(right.k))))
    heights = Heights.of(x[:, 2])
    rank = heights.rank(np.abs(left.rates).max() + np.abs(right.rates).max())
    (first, of_first), (second, of_second) = (_distinct(waves) for waves in (left, right))
    place = of_first[i], of_second[j]
    rates = first.rates[:, None] + second.rates
    exponents = first.exponents(heights.middle)[:, None] + second.exponents(heights.middle)
    targets = np.concatenate([left.k[i] - right.k[j], left.k[i] + right.k[j]])
    totals = [np.zeros((2, len(i)), dtype=complex) for _ in weights.mT]
    for rows in nufft.slices(len(x), _POINTS):
        plan = nufft.Type3(x[rows, :2], targets)
        series = heights.series(rates, exponents, rank)
        for c, t in zip(series, heights.polynomials(x[rows, 2], rank), strict=True):
            # Waves of one ring share their rate: Bessel functions are computed for pairs of rings
            # only.
            c = c[place]
            for total, a in zip(totals, weights[rows].mT, strict=True):
                total += c * plan((t * a).to(torch.complex128)).reshape(2, -1)
    shape = len(left.k), len(right.k)
    return [_gram(i, j, *total, shape, symmetric) for total in totals]


def _distinct(waves: Waves) -> tuple[Waves, Int[np.ndarray, "D"]]:
    """One wave for each rate: those of a ring share it; and which of them each wave has."""
    scale = np.abs(waves.rates).max()
    _, chosen, place = np.unique(
        np.round(waves.rates / scale, 13), return_index=True, return_inverse=True
    )
    return Waves(waves.k[chosen], waves.rates[chosen], waves.start), place


def _gram(
    i: Int[np.ndarray, "m"],
    j: Int[np.ndarray, "m"],
    difference: Complex[np.ndarray, "m"],
    total: Complex[np.ndarray, "m"],
    shape: tuple[int, int],
    symmetric: bool,
) -> Float[Tensor, "2*D 2*E"]:
    """With P = Σ ψψ′ and Q = Σ ψψ̄′: cos·cos = ½ Re(Q + P), sin·sin = ½ Re(Q − P), cos·sin =
    ½ Im(P − Q) and sin·cos = ½ Im(P + Q)."""
    (d, e), out = shape, np.empty((2 * shape[0], 2 * shape[1]))
    blocks = {
        (0, 0): total.real + difference.real,
        (1, 1): difference.real - total.real,
        (0, 1): total.imag - difference.imag,
        (1, 0): total.imag + difference.imag,
    }
    for (a, b), values in blocks.items():
        out[a * d + i, b * e + j] = 0.5 * values
        if symmetric:
            out[b * d + j, a * d + i] = 0.5 * values
    return torch.from_numpy(out)


def prefers_transforms(num_points: int, shape: tuple[int, int], waves: Waves, z: Tensor) -> bool:
    """Whether transforms are quicker than products of matrices of waves, for a Gram matrix."""
    if z.is_cuda or not num_points:
        return False
    rank = Heights.of(z).rank(2 * np.abs(waves.rates).max())
    # seconds for points and targets of a transform, and for products
    transforms = (rank + 2) * (3e-7 * num_points + 8e-7 * shape[0] * shape[1])
    return transforms < 7e-11 * num_points * 4 * shape[0] * shape[1]


# Decaying waves: the columns of harmonic fields.


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

    @property
    def num_columns(self) -> int:
        return 2 * len(self.omega)

    @property
    def device(self) -> torch.device:
        return self.omega.device

    def to(self, device: torch.device) -> "HarmonicColumns":
        return replace(self, omega=self.omega.to(device), origin=self.origin.to(device))

    def select(self, columns: Int[Tensor, "2*k"]) -> "HarmonicColumns":
        return replace(self, omega=self.omega[columns[: len(columns) // 2]])

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
        """The symbol at the complex frequencies.

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
        values = symbol.of_waves(omega, num_outputs)
        if values is None:
            if symbol.order < 0 or not self._is_analytic(symbol, num_outputs):
                raise NotImplementedError(
                    f"{type(symbol).__name__} of a harmonic field is not known: it is curl-free "
                    "and divergence-free at once, and waves that decay have no Fourier transform; "
                    "use Potential, Jacobian, Component, ReductionToPole, or line integrals"
                )
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
    rank = max(1, int((values > 1e-14 * values[0]).sum()))
    return left[:, :rank] * values[:rank], right[:rank]
