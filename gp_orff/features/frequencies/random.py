"""Random frequencies: independent, orthogonal, and quasi-random; and the measures they have."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.special
import scipy.stats
import torch

from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, TermSpectrum


class Measure(ABC):
    """Frequencies from ‖z‖^{2t} p(z), p the spectral law, with weights E‖z‖^{2t}/(D‖z‖^{2t})."""

    @abstractmethod
    def order(self, leaf: LeafSpectrum) -> int:
        """t."""


@dataclass(frozen=True)
class Trace(Measure):
    """The law of tr A(ω), A = B Bᵀ: features are bounded (Minh 2016, Section 4)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree


@dataclass(frozen=True)
class Base(Measure):
    """p itself: the unbounded map of Brault et al. 2016 (Algorithm 1)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return 0


_MEASURES: dict[str, Measure] = {"trace": Trace(), "base": Base()}
_NAMES = {measure: name for name, measure in _MEASURES.items()}


@dataclass(frozen=True, init=False)
class _RandomRule(ABC):
    """What random rules share: numbers, measure, seeds and the transport of uniform points."""

    num_frequencies: int
    measure: str | Measure  # its name, if it has one
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
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        return [self._draw(term, rng) for term, rng in zip(terms, streams, strict=True)]

    def _draw(self, term: TermSpectrum, rng: np.random.Generator) -> Draw:
        if not term.leaves:  # a constant: one frequency, zero
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

    `measure="trace"` draws ω from the law of tr A(ω): for curl-free and divergence-free kernels
    p₁(z) ∝ ‖z‖² p(z), with weights E‖z‖²/(D‖z‖²). Features are then bounded (Minh 2016,
    Section 4). `measure="base"` draws from p itself with weights 1/D, the unbounded map of
    Brault et al. 2016 (Algorithm 1); with a Matérn kernel its error has a finite variance only
    for ν > 2. For separable and scalar kernels the two are the same (Rahimi & Recht 2007).

    Frequencies are drawn once, in base units, when a kernel is built; hyperparameters act on them
    afterwards, so that gradients reach the lengthscales. The kernel they give is unbiased with
    error O(D^{−1/2}); its *posterior* is overconfident, most of all under heavy-tailed spectra
    and little noise: `benchmarks/random_feature_posterior.py` measures by how much.

    Args:
        num_frequencies: D, for each term of the kernel tree; a term has 2D trigonometric columns.
        measure: "trace" or "base", or what they name: `Trace()` or `Base()` of
            `gp_orff.features.frequencies`.
        seed: of NumPy's `default_rng`; the same seed gives the same frequencies everywhere. No
            global random state is read or changed.

    Raises:
        ValueError: an unknown measure, or a number of frequencies that is no positive integer.

    Example:
        >>> import gp_orff
        >>> gp_orff.MonteCarlo(256, seed=0)
        MonteCarlo(num_frequencies=256, measure='trace', seed=0)
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        return [
            (_normalised(rng.standard_normal((number, leaf.num_dims))), _uniform(number, leaf, rng))
            for leaf in leaves
        ]


class Orthogonal(_RandomRule):
    r"""Random frequencies whose directions are orthogonal in blocks of d.

    Directions come from random rotations, radii are independent; each frequency has the law it has
    under `MonteCarlo`, so that the kernel is unbiased too, with a smaller error (Yu et al. 2016,
    Theorem 1, for radii of their own as here). Arguments and errors as for `MonteCarlo`.

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
    r"""Frequencies from a scrambled Sobol sequence, mapped to the spectral law.

    The points fill the unit cube evenly; quantile functions carry them to directions and radii.
    The kernel is unbiased over seeds, with an error that falls faster than that of `MonteCarlo`
    (Avron et al. 2016; Owen's scrambling). Powers of two are the best numbers of frequencies.
    Arguments and errors as for `MonteCarlo`.

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
        # a whole power of two keeps SciPy quiet; its first points are the same sequence
        cube = sobol.random_base2(int(np.ceil(np.log2(number))))[:number]
        cube = np.clip(cube, 2.0**-33, 1 - 2.0**-33)  # 32-bit points may touch the faces
        parts = np.split(cube, np.cumsum(sizes)[:-1], axis=-1)
        return [
            (_directions(parts[2 * i], leaf.num_dims), parts[2 * i + 1])
            for i, leaf in enumerate(leaves)
        ]


def _uniform(number: int, leaf: LeafSpectrum, rng: np.random.Generator) -> np.ndarray:
    u = rng.random((number, leaf.spectrum.num_coordinates(leaf.num_dims)))
    return np.clip(u, 2.0**-54, 1 - 2.0**-53)


def _normalised(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _rotations(number: int, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of independent rotations, uniform over the orthogonal group."""
    blocks = rng.standard_normal((-(-number // num_dims), num_dims, num_dims))
    q, r = np.linalg.qr(blocks)
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q.reshape(-1, num_dims)[:number]


def _direction_coordinates(num_dims: int) -> int:
    """How many uniform coordinates `_directions` uses.

    On a line, a sign: ω and −ω are one frequency, but in a product the leaves' signs matter.
    """
    return {1: 1, 2: 1, 3: 2}.get(num_dims, num_dims)


def _directions(u: np.ndarray, num_dims: int) -> np.ndarray:
    """Unit vectors, uniform on the sphere where u is uniform in the cube."""
    if num_dims == 1:
        return np.where(u < 0.5, -1.0, 1.0)
    if num_dims == 2:
        angle = 2 * np.pi * u[:, 0]
        return np.stack([np.cos(angle), np.sin(angle)], axis=-1)
    if num_dims == 3:  # Archimedes: the height is uniform
        angle, height = 2 * np.pi * u[:, 0], 2 * u[:, 1] - 1
        rim = np.sqrt(1 - height**2)
        return np.stack([rim * np.cos(angle), rim * np.sin(angle), height], axis=-1)
    return _normalised(scipy.special.ndtri(u))
