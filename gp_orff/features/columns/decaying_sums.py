"""Sums of products of decaying waves over points at scattered heights, by non-uniform transforms.

The products of two waves are waves of k ± l that decay like e^{−Sz} with S = |k| + |l|. On heights
between z̄ − H and z̄ + H the decay is a Chebyshev series, t = (z − z̄)/H,

    e^{−SHt} = Σ_p (2 − δ_p0) (−1)^p I_p(SH) T_p(t) ,

with modified Bessel functions I_p, so that a sum over points is a few transforms of type 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.special
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff import nufft

_PRECISION = 1e-13  # of the series, relative to a wave at the lowest height
_POINTS = 2**20  # of a plan
_DENSE, _SPREAD, _VALUE = 7e-11, 3e-7, 8e-7  # seconds for a product, a point and a target


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
        large = scipy.special.ive(orders[:, None], rates).max(axis=1) > _PRECISION
        return int(np.flatnonzero(large)[-1]) + 1

    def series(
        self, rates: Float[np.ndarray, "*n"], exponents: Float[np.ndarray, "*n"], rank: int
    ) -> Iterator[Float[np.ndarray, "*n"]]:
        """The coefficients of e^{exponent − rate (z − z̄)}, term by term."""
        a = rates * self.half
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
    transforms = (rank + 2) * (_SPREAD * num_points + _VALUE * shape[0] * shape[1])
    return transforms < _DENSE * num_points * 4 * shape[0] * shape[1]
