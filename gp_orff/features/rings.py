"""The waves of harmonic kernels: decaying columns, their sums, and rings of frequencies."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from gp_orff import nufft
from gp_orff.features.columns import PointwiseColumns, exchanged_halves
from gp_orff.features.draws import (
    Draw,
    FixedBuffers,
    GridDraw,
    LeafSpectrum,
    Rule,
    TermSpectrum,
    check_domain,
    joined,
    sole_leaf,
)
from gp_orff.features.expansion import ScaledExpansion
from gp_orff.features.grid_design import MOST_CUT, GridBudgetError, smallest_tolerance
from gp_orff.kernels.base import positive_root
from gp_orff.kernels.harmonic import HarmonicSpectrum, Sources
from gp_orff.kernels.spectra import gauss_legendre
from gp_orff.kernels.tree import Term, spectra_of
from gp_orff.symbols.base import Composed, Symbol

# Sums of products of decaying waves over points at scattered heights, by non-uniform transforms.
#
# The product of two waves with the wavevectors k and l is a sum of waves with k ± l. These decay
# like e^{−Sz} with S = |k| + |l|. Let the heights z be between z̄ − H and z̄ + H, and t = (z − z̄)/H.
# The decay is then a Chebyshev series,
#
#     e^{−SHt} = Σ_p (2 − δ_p0) (−1)^p I_p(SH) T_p(t) ,
#
# with modified Bessel functions I_p. A sum over points therefore needs a few transforms of type 3.
#
# 1. `Heights.rank` counts the terms for the largest rate. Few terms suffice if the heights differ
#    little.
# 2. For each term p the strengths are multiplied by T_p(t) at the points, transformed to the
#    horizontal frequencies, and multiplied by the coefficient of each pair of waves.
# 3. The frequencies k − l and k + l of all pairs are the targets of one plan, which sorts the
#    points once.
# 4. The real and imaginary parts of products of waves are the four blocks of the Gram matrix
#    (`_gram`).
#
# The points are processed in slices, which limits the memory of a plan. `prefers_transforms`
# estimates from measured times whether this is faster than a matrix product.


_POINTS = 2**20  # the largest number of points in a plan


@dataclass(frozen=True)
class Waves:
    """The waves e^{i⟨k, x⟩ − s|k|(z − z₀)}.

    Attributes:
        k: the horizontal wavevectors, (D, 2), in radians per unit of the inputs.
        rates: s|k|, (D,).
        start: z₀.
    """

    k: Float[np.ndarray, "D 2"]
    rates: Float[np.ndarray, "D"]
    start: float

    def exponents(self, middle: float) -> Float[np.ndarray, "D"]:
        """Return the logarithms of the waves at x = 0 and the height `middle`."""
        return -self.rates * (middle - self.start)


@dataclass(frozen=True)
class Heights:
    """The middle z̄ and half the extent H of the heights of some points.

    Attributes:
        middle: z̄.
        half: H.
    """

    middle: float
    half: float

    @classmethod
    def of(cls, z: Float[Tensor, "N"]) -> "Heights":
        """Return the middle and half the extent of the heights z."""
        low, high = z.min().item(), z.max().item()
        return cls(0.5 * (low + high), 0.5 * (high - low))

    def rank(self, largest: float) -> int:
        """Return the number of terms of the series for rates up to `largest`."""
        if not self.half * largest > 0:
            return 1
        rates = np.linspace(0, self.half * largest, 40)[1:]
        orders = np.arange(int(12 + 3 * rates[-1] + 10 * np.sqrt(rates[-1])) + 20)
        # Values of `ive` are relative to a wave at the lowest height.
        large = scipy.special.ive(orders[:, None], rates).max(axis=1) > 1e-13
        return int(np.flatnonzero(large)[-1]) + 1

    def series(
        self, rates: Float[np.ndarray, "*n"], exponents: Float[np.ndarray, "*n"], rank: int
    ) -> Iterator[Float[np.ndarray, "*n"]]:
        """Yield the coefficients of e^{exponent − rate (z − z̄)} for each term of the series."""
        a = rates * self.half
        # `ive` is I_p times e^{−|a|}. The factor e^{|a|} multiplies the small size of the wave, so
        # that neither factor overflows.
        size = np.exp(exponents + np.abs(a))
        for p in range(rank):
            sign = np.where(a > 0, (-1.0) ** p, 1.0)
            yield (1 if p == 0 else 2) * sign * scipy.special.ive(p, np.abs(a)) * size

    def polynomials(self, z: Float[Tensor, "N"], rank: int) -> Iterator[Float[Tensor, "N"]]:
        """Yield T_p(t) at the heights z for each term p of the series."""
        t = (z - self.middle) / (self.half or 1.0)
        before, now = t, torch.ones_like(t)
        for _ in range(rank):
            yield now
            before, now = now, 2 * t * now - before


def wave_sums(
    waves: Waves, x: Float[Tensor, "N 3"], strengths: Float[Tensor, "N k"]
) -> Complex[Tensor, "D k"]:
    """Return Σ_n c_n ψ(x_n) for each column c of `strengths`; x is relative to x₀."""
    heights = Heights.of(x[:, 2])
    rank = heights.rank(np.abs(waves.rates).max())
    total = np.zeros((len(waves.k), strengths.shape[1]), dtype=complex)
    targets = np.concatenate([waves.k, -waves.k])
    pairs = torch.nn.functional.pad(strengths, (0, strengths.shape[1] % 2))
    # Two real columns are transformed as one complex column. The transform of a real column at −k
    # is the conjugate of its transform at k, so the transforms at k and −k separate both columns.
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
    """Return φᵀ diag(a) φ′ for each column a of `weights`.

    φ and φ′ are the columns [Re ψ ; Im ψ] of the waves `left` and `right`.
    """
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
            # Waves of one ring have the same rate, so Bessel functions are computed once for each
            # pair of rings.
            c = c[place]
            for total, a in zip(totals, weights[rows].mT, strict=True):
                total += c * plan((t * a).to(torch.complex128)).reshape(2, -1)
    shape = len(left.k), len(right.k)
    return [_gram(i, j, *total, shape, symmetric) for total in totals]


def _distinct(waves: Waves) -> tuple[Waves, Int[np.ndarray, "D"]]:
    """Return one wave for each rate, and for each wave the index of its rate.

    The waves of a ring have the same rate.
    """
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
    """Return the Gram matrix from `total` P = Σ ψψ′ and `difference` Q = Σ ψψ̄′ of pairs (i, j).

    The four blocks are cos·cos = ½ Re(Q + P), sin·sin = ½ Re(Q − P), cos·sin = ½ Im(P − Q) and
    sin·cos = ½ Im(P + Q).
    """
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
    """Return whether transforms compute a Gram matrix faster than matrix products do."""
    if z.is_cuda or not num_points:
        return False
    rank = Heights.of(z).rank(2 * np.abs(waves.rates).max())
    # measured seconds for points and targets of a transform, and for elements of a matrix product
    transforms = (rank + 2) * (3e-7 * num_points + 8e-7 * shape[0] * shape[1])
    return transforms < 7e-11 * num_points * 4 * shape[0] * shape[1]


# Decaying waves are the columns of harmonic fields.


@dataclass(frozen=True)
class HarmonicColumns(PointwiseColumns):
    """The real parts of the waves ψ = e^{i⟨k,x⟩ − |k|s(z − z₀)}, followed by those of −iψ.

    The horizontal inputs x are relative to x₀. The waves satisfy Laplace's equation and are at most
    1 on the side of z₀ that faces away from the sources. In three dimensions their complex
    frequency is (k₁, k₂, i s|k|).

    Attributes:
        omega: the horizontal wavevectors k, (D, 2), in radians per unit of the inputs.
        side: s, which is 1 for sources below the points and −1 for sources above the points.
        origin: (x₀, z₀), (3,), in the unit of the inputs.
        dims: the three input columns, from 0; the last column is the height.
    """

    omega: Float[Tensor, "D 2"]
    side: int
    origin: Float[Tensor, "3"]
    dims: tuple[int, ...]

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
        """Raise an error, because decaying waves have no mean over all of space.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel for a mean over all of space, got a HarmonicKernel, "
            "whose variance decreases with height; compute the variance at points"
        )

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return self._relative(x)[..., :2] @ self.omega.mT

    def _relative(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N 3"]:
        return x[..., list(self.dims)].double() - self.origin

    def decay(self, height: Float[Tensor, "*b"]) -> Float[Tensor, "*b D"]:
        """Return e^{−|k|s(z − z₀)} at heights z."""
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
        right = replace(other._waves, start=(other.origin[2] - self.origin[2]).item())
        (gram,) = product_sums(self._waves, right, relative, weight.unsqueeze(-1))
        return gram

    def _prefers_transforms(self, other: "HarmonicColumns", x: Tensor) -> bool:
        if x.dim() != 2 or x.requires_grad:
            return False
        shape = len(self.omega), len(other.omega)
        return prefers_transforms(len(x), shape, self._waves, x[:, self.dims[2]].double())

    @property
    def _waves(self) -> Waves:
        """The waves as functions of inputs relative to (x₀, z₀)."""
        omega = self.omega.cpu().numpy()
        return Waves(omega, self.side * np.hypot(*omega.T), 0.0)

    def frequencies(self) -> Complex[Tensor, "D 3"]:
        """Return the complex frequencies (k₁, k₂, i s|k|)."""
        vertical = 1j * self.side * self.omega.norm(dim=-1, keepdim=True)
        return torch.cat([self.omega.to(vertical.dtype), vertical], dim=-1)

    def directions(self) -> Complex[Tensor, "D 3"]:
        """Return −∇ψ / (|k| ψ) = (−ik/|k|, s), the direction of the field of each wave ψ."""
        return -1j * self.frequencies() / self.omega.norm(dim=-1, keepdim=True)

    def multiplier(self, symbol: Symbol, num_outputs: int, space) -> Complex[Tensor, "2*D q p"]:
        """Return the symbol at the complex frequencies, (2·D, q, p).

        The symbol of a composition is the product of its symbols.

        Raises:
            NotImplementedError: the symbol is an antiderivative other than `Potential`; or it is a
                part of the field that a field without sources does not determine; or it acts on
                other inputs.
        """
        omega = self.frequencies()
        if tuple(space) not in ((), tuple(self.dims)):
            raise NotImplementedError(
                f"{type(symbol).__name__} of a HarmonicKernel expects space={self.dims}, the "
                f"inputs of the kernel, got {tuple(space)}; pass space={self.dims}"
            )
        if isinstance(symbol, Composed):
            inner = self.multiplier(symbol.inner, num_outputs, space)
            return self.multiplier(symbol.outer, inner.shape[-2], space) @ inner
        values = symbol.of_waves(omega, num_outputs)
        if values is None:
            if symbol.order < 0 or not self._is_analytic(symbol, num_outputs):
                raise NotImplementedError(
                    "expected a symbol that is defined for harmonic fields, got "
                    f"{type(symbol).__name__}; a harmonic field is both curl-free and "
                    "divergence-free, and decaying waves have no Fourier transform; use Potential, "
                    "Jacobian, Component, ReductionToPole, or line integrals"
                )
            values = symbol(omega, num_outputs).to(torch.complex128)
        return torch.cat([values, values], dim=-3)

    def _is_analytic(self, symbol: Symbol, num_outputs: int) -> bool:
        """Return whether a symbol is finite at complex frequencies and continuous at zero."""
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
        """The columns and signs of Im ψ = Re(−iψ) and Im(−iψ) = −Re ψ."""
        return exchanged_halves(len(self.omega), self.omega.double())


def independent_columns(
    weights: Float[Tensor, "n k"],
) -> tuple[Float[Tensor, "n r"], Float[Tensor, "r k"]]:
    """Return a factorisation of `weights` into r independent columns and an r×k matrix."""
    left, values, right = torch.linalg.svd(weights.double(), full_matrices=False)
    rank = max(1, int((values > 1e-14 * values[0]).sum()))
    return left[:, :rank] * values[:rank], right[:rank]


# A quadrature of the plane in rings, for spectra that are not smooth at k = 0.
#
# The spectrum |k| e^{−|k|Z} of a harmonic field has a cusp at k = 0. The sum over a lattice of
# period P then differs from the integral by images of size P⁻³, which decrease slowly with P. In
# polar coordinates the integrand is analytic. The rule has Gauss–Legendre nodes on panels of |k|
# and equidistant angles on every ring. Its error decreases exponentially, so it needs fewer waves.
#
# 1. `Depths.cutoff` returns the largest |k|, which follows from the shortest distance Z between
#    points and images.
# 2. The ends of successive panels of |k| double, because the longest Z needs fine nodes near zero
#    and the shortest Z needs nodes up to the cut-off. On each panel `_panel` increases the number
#    of nodes until the integral agrees with a finer rule, for several Z and lags.
# 3. On the ring of radius |k| the Fourier coefficients of the integrand along the angle are Bessel
#    functions J_n(|k| r) of the lag r. The rule with n angles in half a ring is exact up to order
#    2n. `_angles` counts the orders that exceed the tolerance.
# 4. The weight of each wave in half a ring also includes the opposite wave.


@dataclass(frozen=True)
class Depths:
    """The distances Z between points and the mirror images of points, and their variances.

    Attributes:
        shortest: the smallest Z for each plane of sources, (J,), in the unit of the inputs. It is
            the distance for two points at the height of the largest variance.
        variances: the variance of the field at this height from each plane, (J,).
    """

    shortest: Float[np.ndarray, "J"]
    variances: Float[np.ndarray, "J"]

    def tail(self, k: float) -> float:
        """Return the fraction of the variance beyond |k|."""
        shares = self.variances / self.variances.sum()
        return float(shares @ scipy.special.gammaincc(3, k * self.shortest))

    def cutoff(self, share: float) -> float:
        """Return the |k| beyond which the fraction `share` of the variance lies."""
        high = scipy.special.gammainccinv(3, share) / self.shortest.min()
        return scipy.optimize.brentq(lambda k: self.tail(k) - share, 0.0, 1.01 * high, rtol=1e-6)


@dataclass(frozen=True)
class Rings:
    """A quadrature in half the plane: ∫ g(k) d²k ≈ Σ weights · g(wavevectors) for even g.

    Attributes:
        wavevectors: k, (D, 2), in radians per unit of the inputs.
        weights: the weights, (D,).
    """

    wavevectors: Float[np.ndarray, "D 2"]
    weights: Float[np.ndarray, "D"]

    @classmethod
    def of(
        cls, cutoff: float, depths: Depths, longest: float, lag: float, tolerance: float
    ) -> "Rings":
        """Return rings up to |k| = `cutoff`, for Z up to `longest` and horizontal lags up to `lag`.

        The tolerance is relative to the variance at the shortest Z.
        """
        shortest = float(depths.shortest.min())
        radii, lengths = _radii(cutoff, shortest, longest, lag, tolerance)
        counts = [_angles(k, shortest, lag, tolerance) for k in radii]
        # Every second ring is rotated by half a step, so that waves of adjacent rings do not align.
        angles = [np.pi * (np.arange(n) + 0.5 * (i % 2)) / n for i, n in enumerate(counts)]
        waves = [
            k * np.stack([np.cos(angle), np.sin(angle)], axis=-1)
            for k, angle in zip(radii, angles, strict=True)
        ]
        weights = [
            np.full(n, 2 * np.pi * k * length / n)
            for k, length, n in zip(radii, lengths, counts, strict=True)
        ]
        return cls(np.concatenate(waves), np.concatenate(weights))


def _angles(k: float, shortest: float, lag: float, tolerance: float) -> int:
    """Return the number of angles in half a ring.

    The Fourier coefficients of higher order are proportional to J_n(k·lag) and are at most the
    tolerance. The products of two directions have order two and shift n by two.
    """
    share = max(0.5 * (k * shortest) ** 2 * np.exp(-k * shortest), 1e-300)
    orders = np.arange(2, 2 * int(k * lag) + 60)
    large = np.abs(scipy.special.jv(orders - 2, k * lag)) * share > tolerance
    most = int(orders[large].max()) + 1 if large.any() else 4
    return max(-(-most // 2), 2)


def _radii(
    cutoff: float, shortest: float, longest: float, lag: float, tolerance: float
) -> tuple[Float[np.ndarray, "m"], Float[np.ndarray, "m"]]:
    """Return nodes and weights of ∫ dk from 0 to the cut-off."""
    # The first panel ends at or before |k|Z = 4 for the longest Z.
    panels = max(0, int(np.ceil(np.log2(cutoff * longest / 4))))
    edges = cutoff * 2.0 ** np.arange(-panels, 1)
    edges = np.concatenate([[0.0], edges])
    parts = [_panel(low, high, shortest, longest, lag, tolerance) for low, high in pairwise(edges)]
    return tuple(np.concatenate(values) for values in zip(*parts, strict=True))


def _panel(
    low: float, high: float, shortest: float, longest: float, lag: float, tolerance: float
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Return nodes and weights of the smallest sufficient Gauss–Legendre rule on a panel.

    Its error for k² e^{−kZ + ikr} is below the tolerance relative to ∫ k² e^{−kZ} dk, for five
    distances Z from `shortest` to `longest` and three lags r from 0 to `lag`.
    """
    z = np.geomspace(shortest, longest, 5)[:, None, None]
    r = np.array([0.0, 0.5, 1.0])[:, None] * lag
    exact = None
    for n in range(2, 400):
        # The finer rule is computed only for every 12th n, which saves evaluations.
        value = _integral(low, high, z, r, n)
        if exact is None or n % 12 == 0:
            exact = _integral(low, high, z, r, n + 24)
        if np.abs(value - exact).max() < tolerance:
            break
    return _gauss(low, high, n)


def _integral(
    low: float, high: float, z: Float[np.ndarray, "a 1 1"], r: Float[np.ndarray, "b 1"], n: int
) -> np.ndarray:
    k, w = _gauss(low, high, n)
    return (w * 0.5 * z**3 * k**2 * np.exp(-k * z + 1j * k * r)).sum(-1)


def _gauss(low: float, high: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = gauss_legendre(n)
    return low + 0.5 * (high - low) * (1 + x), 0.5 * (high - low) * w


# The waves of one harmonic term, in rings, with the weights of the quadrature.
#
# As on a lattice, hyperparameters change the variances of the waves but not the waves. The
# hyperparameters are the depths and amplitudes of sources. Waves are 1 at the height of the origin,
# which is the end of the domain nearest to the sources. They decay away from it, so no exponential
# exceeds one.


class HarmonicWaves(FixedBuffers):
    """The waves that represent a harmonic term in a domain, as a lattice does for other kernels.

    Args:
        rings: the wavevectors and weights.
        domain: the lowest and the highest value of every input, (2, d).
        dims: the three inputs of the kernel, from 0; the last input is the height.
        side: 1 for sources below the points, −1 for sources above the points.
        tolerance: the fraction of the variance that the waves may omit.
    """

    def __init__(
        self,
        rings: Rings,
        domain: Float[np.ndarray, "2 d"],
        dims: Sequence[int],
        side: int,
        tolerance: float,
    ):
        super().__init__()
        self.dims, self.side = tuple(dims), side
        self.register_buffer("wavevectors", torch.from_numpy(rings.wavevectors))
        self.register_buffer("weights", torch.from_numpy(rings.weights))
        self.register_buffer("domain", torch.from_numpy(domain))
        self.register_buffer("constant", torch.zeros(domain.shape[1], dtype=torch.bool))
        self.register_buffer("tolerance", torch.tensor(tolerance, dtype=torch.float64))

    def columns(self) -> HarmonicColumns:
        """Return the waves, which decay with the distance from the sources."""
        low, high = self.domain[:, list(self.dims)]
        origin = 0.5 * (low + high)
        origin[2] = low[2] if self.side > 0 else high[2]
        return HarmonicColumns(self.wavevectors, self.side, origin, self.dims)

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Return for each of the points x whether it is outside the domain.

        The domain has no limit in the direction away from the sources.
        """
        low, high = self.domain.clone()
        slack = 1e-6 * (high - low)
        x = x.detach()[..., : len(low)]
        below, above = x < low - slack, x > high + slack
        (above if self.side > 0 else below)[..., self.dims[2]] = False
        return (below | above).any(-1)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Raise an error if a point of x is outside the domain.

        Raises:
            ValueError: a point is outside the domain.
        """
        check_domain(x, self.outside(x), self.domain)


class HarmonicDraw(GridDraw):
    """The waves of one harmonic term and their variances; the waves depend on no hyperparameter.

    Args:
        waves: the wavevectors and their domain.
        cutoff: the |k| beyond which the fraction `share` of the variance lies, at the depths of the
            draw, in radians per unit of the inputs.
        share: the fraction of the variance of this term beyond the last wave.
        lengthscale_range: the smallest and the largest depth for which the waves are accurate,
            divided by the depth of the draw.
        diagonal_correction: whether inference adds the truncated variance to the noise.
    """

    decays, expands = True, True
    length = "a depth"
    without_nodes = (
        "expected a stationary kernel, whose features have real frequencies, got a "
        "HarmonicKernel, whose waves decay with height; use a stationary kernel, such as "
        "gp_orff.CurlFreeKernel"
    )

    def __init__(
        self,
        waves: HarmonicWaves,
        cutoff: float,
        share: float,
        lengthscale_range: tuple[float, float],
        diagonal_correction: bool,
    ):
        super().__init__(waves, lengthscale_range, diagonal_correction)
        self.register_buffer("cutoff", torch.tensor(cutoff, dtype=torch.float64))
        self.register_buffer("share", torch.tensor(share, dtype=torch.float64))

    @property
    def num_frequencies(self) -> int:
        return len(self.lattice.wavevectors)

    def expansion(self, members: Sequence[tuple[Term, "HarmonicDraw"]]) -> ScaledExpansion:
        """Return the features: the negative gradients of decaying waves, with independent weights.

        `members` has one term, because no other term has the same waves.
        """
        ((term, _),) = members
        (spectrum,) = spectra_of(term)
        self.check_range([spectrum])
        phi = self.lattice.columns()
        variances = _density(spectrum.sources, phi) * self.lattice.weights
        root = positive_root(term.outputscale.unsqueeze(-1) * variances)
        units, columns = phi.directions(), torch.arange(phi.num_columns, device=phi.device)
        scales = torch.cat([root, root], dim=-1)
        return ScaledExpansion.of(phi, scales, torch.cat([units, units]), columns)

    def truncated_variance(self, term: Term) -> Float[Tensor, "*b 3 3"]:
        """Return the variance that the waves omit at the mean height."""
        (spectrum,) = spectra_of(term)
        phi = self.lattice.columns()
        decay = phi.decay(spectrum.mean_height.double()).square()
        weights, d = (
            _density(spectrum.sources, phi) * self.lattice.weights * decay,
            phi.directions(),
        )
        parts = (torch.einsum("...k,kp,kq->...pq", weights, v, v) for v in (d.real, d.imag))
        total = term.factor.variance(spectrum).double() - sum(parts)
        share = total.diagonal(dim1=-1, dim2=-2).mean(-1).clamp_min(0.0)
        # In a gradient without divergence, the variance of the vertical component is the sum of the
        # variances of both horizontal components. The mean of the three factors is 1.
        shape = total.new_tensor([0.75, 0.75, 1.5])
        return term.outputscale[..., None, None] * torch.diag_embed(share.unsqueeze(-1) * shape)

    def truncated_image(
        self, symbol: Symbol, term: Term, space: Sequence[int]
    ) -> Float[Tensor, "q q"]:
        """Return the variance of Q f that the waves omit at the mean height.

        It is the variance of Q f from waves beyond the last wave, scaled such that the same scale
        gives `truncated_variance` for the field.
        """
        if symbol.is_identity:
            return self.truncated_variance(term)
        (spectrum,) = spectra_of(term)
        phi, height = self.lattice.columns(), spectrum.mean_height.double()
        nearest = spectrum.sources.distances(height.unsqueeze(-1)).detach().min().item()
        # A symbol multiplies the variances of the omitted waves by |Q(ω)|². The omitted fraction of
        # the variance therefore differs between f and Q f.
        omega, weights = _beyond(phi.omega.norm(dim=-1).amax().item(), nearest)
        phi = replace(phi, omega=omega.to(phi.omega))
        weights = _density(spectrum.sources, phi) * weights.to(phi.omega)
        weights = weights * phi.decay(height).square()
        waves = phi.directions()[: len(omega)]
        image = phi.multiplier(symbol, 3, space)[: len(omega)] @ waves.unsqueeze(-1)
        moment = torch.einsum("k,kp,kq->pq", weights.to(image), image[..., 0], image[..., 0].conj())
        field = (weights.unsqueeze(-1) * waves.abs().square()).sum()
        lacking = self.truncated_variance(term).diagonal().sum()
        return moment.real * (lacking / field if field > 0 else 0.0)

    def ratio_outside_range(self, spectra: Sequence[HarmonicSpectrum]) -> float | None:
        """Return the ratio of the depth that determines the cut-off to its value at the draw.

        Return None if the ratio is in `lengthscale_range`.
        """
        low, high = self.lengthscale_range
        lengths = depths_of(spectra[0], self.lattice.domain[:, self.lattice.dims[2]].cpu().numpy())
        ratio = self.cutoff.item() / lengths.cutoff(self.share.item())
        return ratio if not 0.999 * low <= ratio <= 1.001 * high else None


def _density(sources: Sources, phi: HarmonicColumns) -> Float[Tensor, "*b D"]:
    """Return Σ_j a_j |k| e^{−2|k||z₀ − p_j|} / 2π for the planes p_j with the amplitudes a_j."""
    k = phi.omega.norm(dim=-1)
    distances = sources.distances(phi.origin[2:]).double()  # (*b, J, 1)
    decay = torch.exp(-2 * distances * k)
    return (sources.amplitudes.double().unsqueeze(-1) * decay).sum(-2) * k / (2 * math.pi)


def _beyond(cutoff: float, distance: float) -> tuple[Float[Tensor, "m 2"], Float[Tensor, "m"]]:
    """Return wavevectors and weights of a Gauss–Laguerre quadrature over |k| > `cutoff`.

    The waves decay like e^{−2|k| distance}.
    """
    count = 24  # the number of radii and of angles, sufficient for several derivatives
    t, weights = np.polynomial.laguerre.laggauss(count)
    k = cutoff + t / (2 * distance)
    weights = weights * np.exp(t) / (2 * distance) * k * 2 * math.pi / count
    angle = 2 * math.pi * np.arange(count) / count
    unit = np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    omega = (k[:, None, None] * unit).reshape(-1, 2)
    return torch.from_numpy(omega), torch.from_numpy(np.repeat(weights, count))


@torch.no_grad()
def depths_of(
    spectrum: HarmonicSpectrum, heights: Float[np.ndarray, "2"], shallower: float = 1.0
) -> Depths:
    """Return Z for two points at the end of the range of heights nearest to the sources.

    Args:
        spectrum: the spectrum of a harmonic kernel. The planes of all members of a batch are
            treated as planes of one kernel.
        heights: the lowest and the highest height, (2,).
        shallower: a factor of the depths.
    """
    sources = spectrum.sources
    nearest = heights[0] if sources.side > 0 else heights[1]
    planes, amplitudes = (
        t.double().cpu().numpy().ravel() for t in (sources.planes, sources.amplitudes)
    )
    shortest = 2 * sources.side * (nearest - planes) * shallower
    return Depths(shortest, amplitudes / shortest**3)


# The waves that a harmonic term needs in a domain, for a tolerance and a number of features.
#
# As for a lattice, the tolerance is that of the rule if the number of features suffices. Otherwise
# it is the smallest tolerance for which they suffice. Terms receive waves in order until the number
# of features is used. The cut-off follows from the smallest depth of the range, and the panels near
# zero follow from the largest depth.


def is_harmonic(term: TermSpectrum) -> bool:
    """Return whether a term is a `HarmonicKernel`.

    Raises:
        NotImplementedError: the term is a product of a `HarmonicKernel` and another kernel.
    """
    leaf = sole_leaf(
        term,
        HarmonicSpectrum,
        "features of a HarmonicKernel expect a term without products, got a product with "
        "another kernel; use a sum, or the exact kernel",
    )
    return leaf is not None


def harmonic_draws(
    grid: Rule,
    terms: Sequence[TermSpectrum],
    domains: Sequence[Float[np.ndarray, "2 d"]],
    lag: Float[np.ndarray, "d"],
    most: int,
) -> list[HarmonicDraw] | None:
    """Return the draws of harmonic terms with at most `most` features in total.

    Their tolerance is the smallest possible one that is not below the tolerance of `grid`. The
    result is None if there is no such tolerance.
    """

    def attempt(tolerance: float) -> list[tuple[Rings, float, float]] | None:
        found, left = [], most
        for term, domain in zip(terms, domains, strict=True):
            share = term.own(tolerance, MOST_CUT)
            rings = _rings(term.leaves[0], domain, lag, share, left, grid.lengthscale_range)
            if rings is None:
                return None
            found.append((*rings, share))
            left -= 2 * len(rings[0].weights)
        return found

    found, tolerance = attempt(grid.tolerance), grid.tolerance
    if found is None:
        tolerance, found = smallest_tolerance(attempt, grid.tolerance)
    if found is None:
        return None
    draws = []
    for term, domain, (rings, cutoff, share) in zip(terms, domains, found, strict=True):
        (leaf,) = term.leaves
        waves = HarmonicWaves(rings, domain, leaf.dims, leaf.spectrum.sources.side, tolerance)
        options = grid.lengthscale_range, grid.diagonal_correction
        draws.append(HarmonicDraw(waves, cutoff, share, *options))
    return draws


def _rings(
    leaf: LeafSpectrum,
    domain: Float[np.ndarray, "2 d"],
    lag: Float[np.ndarray, "d"],
    tolerance: float,
    most: int,
    lengthscale_range: tuple[float, float],
) -> tuple[Rings, float] | None:
    """Return the rings for a tolerance, and the cut-off at the current depths.

    The result is None if the rings need more than `most` features.
    """
    shallow, deep = lengthscale_range
    heights = domain[:, leaf.dims[2]]
    present = depths_of(leaf.spectrum, heights)
    shallowest = depths_of(leaf.spectrum, heights, shallow)
    horizontal = float(np.hypot(*lag[list(leaf.dims[:2])]))
    height = float(heights[1] - heights[0])
    longest = deep * present.shortest.max() + 2 * (height + horizontal)
    cutoff = shallowest.cutoff(tolerance)
    # Computing rings for a tolerance that is too small takes long, so a rough count comes first.
    waves = (cutoff * horizontal) ** 2 / 16
    if 2 * waves > 4 * most + 1000:
        return None
    rings = Rings.of(cutoff, shallowest, longest, horizontal, tolerance)
    return (rings, present.cutoff(tolerance)) if 2 * len(rings.weights) <= most else None


def draw_with_harmonic(
    grid: Rule,
    terms: Sequence[TermSpectrum],
    domain: Float[np.ndarray, "2 d"],
    lag: Float[np.ndarray, "d"],
    most: int,
) -> list[Draw]:
    """Return the draws of all terms by a `Grid`, in the order of the terms, with shared columns.

    Args:
        grid: a `Grid`.
        terms: the spectra of all terms. At least one of them is harmonic.
        domain: the lowest and the highest value of every input, (2, d), including the margins that
            the grid adds to the data.
        lag: the longest lag between a datum and a point of the domain along every input, (d,).
        most: the largest number of features. If other terms have features, the harmonic terms have
            at most half of it.

    Raises:
        GridBudgetError: no waves have so few features.
        ValueError: the grid has neither data nor a domain; or the domain contains sources.
    """
    if not np.isfinite(domain).all():
        raise ValueError(
            "Grid expects data or a domain for a HarmonicKernel, got only a spacing; use "
            "Grid.for_data(x)"
        )
    others = [term for term in terms if not is_harmonic(term)]
    harmonic = [term for term in terms if is_harmonic(term)]
    share = most // 2 if any(term.leaves for term in others) else most - 3 * len(others)
    domains = [_above_sources(grid, term, domain) for term in harmonic]
    draws = harmonic_draws(grid, harmonic, domains, lag, share)
    if draws is None:
        raise GridBudgetError(
            f"expected a HarmonicKernel for which {share} features suffice, got sources so close "
            "to the observations that the features represent almost none of the variance; pass a "
            "larger max_features, a smaller domain, or a larger depth"
        )
    return joined(grid, terms, draws, is_harmonic, most)


def _above_sources(
    grid: Rule, term: TermSpectrum, domain: Float[np.ndarray, "2 d"]
) -> Float[np.ndarray, "2 d"]:
    """Return the domain with heights on the same side of the sources as the points.

    Without a domain in `grid`, the heights are those of the data, without a margin. A domain in
    `grid` may extend from the data to half the distance to the sources.
    """
    domain, (leaf,) = domain.copy(), term.leaves
    vertical = leaf.dims[2]
    data = None if grid.data is None else np.array(grid.data).T[:, vertical]
    if grid.domain is None:
        domain[:, vertical] = data
        return domain
    sources = leaf.spectrum.sources
    end, side = (0 if sources.side > 0 else 1), sources.side
    distance = sources.distances(torch.from_numpy(domain[end, vertical, None])).min().item()
    if data is None and distance <= 0:
        raise ValueError(
            "Grid expects a domain on the same side of the sources as the points, got a domain "
            f"that extends {-distance:.6g} beyond the nearest sources; pass a smaller domain"
        )
    if data is not None:
        limit = sources.distances(torch.from_numpy(data[end, None])).min().item()
        domain[end, vertical] += side * max(0.5 * limit - distance, 0.0)
    return domain
