"""Random frequencies, independent, orthogonal or quasi-random, and their distributions."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.special
import scipy.stats
import torch

from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, TermSpectrum


class Measure(ABC):
    """The density that frequencies are drawn from: ∝ ‖z‖^{2t} p(z), p being the spectral density.

    Frequencies then have the weights E‖z‖^{2t}/(D‖z‖^{2t}).
    """

    @abstractmethod
    def order(self, leaf: LeafSpectrum) -> int:
        """t for the frequencies of this leaf."""


@dataclass(frozen=True)
class Trace(Measure):
    """The density ∝ tr A(ω), A = B Bᵀ; features are bounded (Minh 2016, Section 4)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree


@dataclass(frozen=True)
class Base(Measure):
    """The density p; features are unbounded (Brault et al. 2016, Algorithm 1)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return 0


_MEASURES: dict[str, Measure] = {"trace": Trace(), "base": Base()}
_NAMES = {measure: name for name, measure in _MEASURES.items()}


@dataclass(frozen=True, init=False)
class _RandomRule(ABC):
    """A random rule: subclasses give directions and uniform coordinates, spectra the radii."""

    num_frequencies: int
    measure: str | Measure  # the name of the measure, if it has one
    seed: int

    def __init__(self, num_frequencies: int, *, measure: str | Measure = "trace", seed: int = 0):
        name = type(self).__name__
        valid = isinstance(num_frequencies, int | np.integer) and num_frequencies >= 1
        if not valid or isinstance(num_frequencies, bool):
            raise ValueError(
                f"{name} expects num_frequencies to be a positive integer, got {num_frequencies!r}"
            )
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
            raise ValueError(f"{name} expects seed to be a non-negative integer, got {seed!r}")
        if not isinstance(measure, Measure) and measure not in tuple(_MEASURES):
            raise ValueError(f'{name} expects measure "trace" or "base", got {measure!r}')
        object.__setattr__(self, "num_frequencies", int(num_frequencies))
        object.__setattr__(self, "measure", _NAMES.get(measure, measure))
        object.__setattr__(self, "seed", seed)

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, from independent random streams of the seed."""
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        return [self._draw(term, rng) for term, rng in zip(terms, streams, strict=True)]

    def _draw(self, term: TermSpectrum, rng: np.random.Generator) -> Draw:
        if not term.leaves:  # a constant: ω = 0 only
            return Draw([], [])
        number = -(-self.num_frequencies // term.share)
        measure = _MEASURES.get(self.measure, self.measure)
        orders = [measure.order(leaf) for leaf in term.leaves]
        points = self._directions_and_coordinates(number, term.leaves, rng)
        bases = [
            leaf.spectrum.base(directions, u, order)
            for leaf, order, (directions, u) in zip(term.leaves, orders, points, strict=True)
        ]
        return Draw([torch.from_numpy(base) for base in bases], orders)

    @abstractmethod
    def _directions_and_coordinates(
        self, number: int, leaves: Sequence[LeafSpectrum], rng: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each leaf, unit vectors (number, d) and coordinates in (0, 1) (number, c)."""


class MonteCarlo(_RandomRule):
    r"""Independent random frequencies: operator-valued random Fourier features.

    Let p be the spectral density of the scalar kernel, and A(ω) = B(ω) B(ω)ᵀ.

    - `measure="trace"` draws ω from the density ∝ tr A(ω) p(ω): for curl-free and divergence-free
      kernels p₁(z) ∝ ‖z‖² p(z), with weights E‖z‖²/(D‖z‖²). Features are bounded (Minh 2016,
      Section 4).
    - `measure="base"` draws ω from p, with weights 1/D. Features are unbounded (Brault et al. 2016,
      Algorithm 1); with a Matérn kernel their error has a finite variance only for ν > 2.

    For separable and scalar kernels both are the same (Rahimi & Recht 2007).

    Frequencies are drawn once, in base units, when a kernel is built. Hyperparameters scale them
    afterwards, so that gradients reach the lengthscales. The kernel is unbiased, with an error
    O(D^{−1/2}). The *posterior* is overconfident, most of all with heavy-tailed spectra and little
    noise; `benchmarks/rules.py` measures by how much.

    Args:
        num_frequencies: D, for each term of the kernel tree; a term has 2D trigonometric columns.
        measure: "trace" or "base"; `Trace()` and `Base()` of `gp_orff.features.frequencies` mean
            the same.
        seed: seed of NumPy's `default_rng`; the same seed gives the same frequencies everywhere.
            The global random state is neither read nor changed.

    Raises:
        ValueError: `num_frequencies` is no positive integer, `measure` is unknown, or `seed` is no
            non-negative integer.

    Example:
        >>> import gp_orff
        >>> gp_orff.MonteCarlo(256, seed=0)
        MonteCarlo(num_frequencies=256, measure='trace', seed=0)
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        return [
            (_normalise(rng.standard_normal((number, leaf.num_dims))), _uniform(number, leaf, rng))
            for leaf in leaves
        ]


class Orthogonal(_RandomRule):
    r"""Random frequencies whose directions are orthogonal in blocks of d.

    Directions are the rows of random rotations; radii are independent. Each frequency has the same
    distribution as with `MonteCarlo`, so that the kernel is unbiased as well, with a smaller error
    (Yu et al. 2016, Theorem 1, with independent radii).

    Args:
        num_frequencies: D, for each term of the kernel tree; a term has 2D trigonometric columns.
        measure: "trace" or "base", as for `MonteCarlo`.
        seed: seed of NumPy's `default_rng`.

    Raises:
        ValueError: `num_frequencies` is no positive integer, `measure` is unknown, or `seed` is no
            non-negative integer.

    Example:
        >>> import gp_orff
        >>> gp_orff.Orthogonal(256, measure="base")
        Orthogonal(num_frequencies=256, measure='base', seed=0)
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        return [
            (_rotations(number, leaf.num_dims, rng), _uniform(number, leaf, rng)) for leaf in leaves
        ]


class QuasiMonteCarlo(_RandomRule):
    r"""Frequencies from a scrambled Sobol sequence, mapped to the spectral density.

    The points of the sequence fill the unit cube evenly; quantile functions map them to directions
    and radii. The kernel is unbiased over seeds, and its error falls faster with D than that of
    `MonteCarlo` (Avron et al. 2016, with Owen's scrambling). D is best a power of two.

    Args:
        num_frequencies: D, for each term of the kernel tree; a term has 2D trigonometric columns.
        measure: "trace" or "base", as for `MonteCarlo`.
        seed: seed of NumPy's `default_rng`, which scrambles the sequence.

    Raises:
        ValueError: `num_frequencies` is no positive integer, `measure` is unknown, or `seed` is no
            non-negative integer.

    Example:
        >>> import gp_orff
        >>> gp_orff.QuasiMonteCarlo(256)
        QuasiMonteCarlo(num_frequencies=256, measure='trace', seed=0)
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        sizes = []
        for leaf in leaves:
            sizes += [_direction_coordinates(leaf.num_dims)]
            sizes += [leaf.spectrum.num_coordinates(leaf.num_dims)]
        sobol = scipy.stats.qmc.Sobol(sum(sizes), scramble=True, rng=rng)
        # SciPy warns unless the number is a power of two; its first points are the same sequence
        cube = sobol.random_base2(int(np.ceil(np.log2(number))))[:number]
        cube = np.clip(cube, 2.0**-33, 1 - 2.0**-33)  # 32-bit points may touch the faces
        parts = np.split(cube, np.cumsum(sizes)[:-1], axis=-1)
        return [
            (_directions(parts[2 * i], leaf.num_dims), parts[2 * i + 1])
            for i, leaf in enumerate(leaves)
        ]


def _uniform(number: int, leaf: LeafSpectrum, rng: np.random.Generator) -> np.ndarray:
    """Independent coordinates in (0, 1), as many as the spectrum needs beside a direction."""
    u = rng.random((number, leaf.spectrum.num_coordinates(leaf.num_dims)))
    return np.clip(u, 2.0**-54, 1 - 2.0**-53)


def _normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _rotations(number: int, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of independent orthogonal matrices, uniform over the orthogonal group."""
    blocks = rng.standard_normal((-(-number // num_dims), num_dims, num_dims))
    q, r = np.linalg.qr(blocks)
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q.reshape(-1, num_dims)[:number]


def _direction_coordinates(num_dims: int) -> int:
    """The number of uniform coordinates that `_directions` needs.

    One on a line, too: the signs of ω matter in a product of kernels.
    """
    return {1: 1, 2: 1, 3: 2}.get(num_dims, num_dims)


def _directions(u: np.ndarray, num_dims: int) -> np.ndarray:
    """Unit vectors, uniform on the sphere if u is uniform in the cube."""
    if num_dims == 1:
        return np.where(u < 0.5, -1.0, 1.0)
    if num_dims == 2:
        angle = 2 * np.pi * u[:, 0]
        return np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    if num_dims == 3:  # Archimedes: the height is uniform
        angle, height = 2 * np.pi * u[:, 0], 2 * u[:, 1] - 1
        rim = np.sqrt(1 - height**2)
        return np.stack([rim * np.cos(angle), rim * np.sin(angle), height], axis=-1)
    return _normalise(scipy.special.ndtri(u))
