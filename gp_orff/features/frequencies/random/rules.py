"""Random frequencies, independent, orthogonal or quasi-random."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy.stats
import torch

from gp_orff.features.frequencies.dot_product import DotProductDraw, lifted_leaf
from gp_orff.features.frequencies.random.directions import (
    direction_coordinates,
    directions,
    gaussian_directions,
    rotations,
)
from gp_orff.features.frequencies.random.measures import NAMES, Measure, as_measure
from gp_orff.features.frequencies.rule import (
    Draw,
    LeafSpectrum,
    TermSpectrum,
    check_seed,
    uniform,
)
from gp_orff.kernels.base import check_positive_integer
from gp_orff.kernels.spectra.base import Spectrum


@dataclass(frozen=True, init=False)
class _RandomRule(ABC):
    """A random rule: subclasses give directions and uniform coordinates, spectra the radii."""

    num_frequencies: int
    measure: str | Measure  # the name of the measure, if it has one
    seed: int
    shared: bool = False  # whether the terms of a sum are drawn from one mixture

    def __init__(
        self,
        num_frequencies: int,
        *,
        measure: str | Measure = "trace",
        seed: int = 0,
        shared: bool = False,
    ):
        name = type(self).__name__
        num_frequencies = check_positive_integer(num_frequencies, "num_frequencies", name)
        check_seed(seed, name)
        measure = as_measure(measure, name)
        object.__setattr__(self, "num_frequencies", num_frequencies)
        object.__setattr__(self, "measure", NAMES.get(measure, measure))
        if not isinstance(shared, bool):
            raise ValueError(f"{name} expects shared to be True or False, got {shared!r}")
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "shared", shared)

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, from independent random streams of the seed."""
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        mixtures = [
            next((index for index, other in enumerate(terms) if self._shares(term, other)), None)
            for term in terms
        ]
        return [
            self._draw(term, rng, mixture, 1 if mixture is None else mixtures.count(mixture))
            for term, rng, mixture in zip(terms, streams, mixtures, strict=True)
        ]

    def _shares(self, term: TermSpectrum, other: TermSpectrum) -> bool:
        """Whether two terms, of one kernel each, on the same inputs, are drawn from one mixture.

        Terms with a sampler of their own are drawn by themselves.
        """
        in_group = term.group is not None and term.group is other.group
        return (
            (self.shared or in_group)
            and len(term.leaves) == len(other.leaves) == 1
            and term.leaves[0].dims == other.leaves[0].dims
            and term.leaves[0].sampler is None is other.leaves[0].sampler
            and all(isinstance(t.leaves[0].spectrum, Spectrum) for t in (term, other))
        )

    def _draw(
        self, term: TermSpectrum, rng: np.random.Generator, mixture: int | None, num_terms: int
    ) -> Draw:
        """The frequencies of one of the `num_terms` terms of a mixture."""
        if not term.leaves:  # a constant: ω = 0 only
            return Draw([], [])
        number = -(-self.num_frequencies // num_terms)
        measure = as_measure(self.measure, type(self).__name__)
        lifted = lifted_leaf(term)
        if lifted is not None:
            points = self._directions_and_coordinates(number, [lifted], rng)
            return DotProductDraw.of(term, *points[0], measure.order(lifted))
        orders = [measure.order(leaf) for leaf in term.leaves]
        leaves = term.leaves
        if mixture is None:
            leaves = [replace(leaf, spectrum=measure.source(leaf)) for leaf in term.leaves]
        points = self._directions_and_coordinates(number, leaves, rng)
        bases = [
            torch.from_numpy(leaf.spectrum.base(vectors, u, order))
            for leaf, order, (vectors, u) in zip(leaves, orders, points, strict=True)
        ]
        kinds = [getattr(leaf.spectrum, "draw", Draw) for leaf in leaves]
        kind = next((kind for kind in kinds if kind is not Draw), Draw)
        return kind(bases, orders, mixture)

    @abstractmethod
    def _directions_and_coordinates(
        self, number: int, leaves: Sequence[LeafSpectrum], rng: np.random.Generator
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each leaf, unit vectors (number, d) and coordinates in (0, 1) (number, c)."""


class MonteCarlo(_RandomRule):
    r"""Independent random frequencies, as in random Fourier features (Rahimi & Recht 2007).

    The matrix-valued kernel has the spectral density A(ω) p(ω). Here p is the spectral density of
    the scalar kernel, and A(ω) is a matrix: ωωᵀ for curl-free and ‖ω‖² I − ωωᵀ for divergence-free
    kernels, constant for separable and scalar ones. `measure` is the density that ω is drawn from;
    weights correct for the difference:

    - `"trace"`: the density ∝ tr A(ω) p(ω), which is ∝ ‖ω‖² p(ω) for curl-free and divergence-free
      kernels (‖ℓω‖² p(ω) with ARD). Features are bounded (Minh 2016, Section 3.4, Example 4).
    - `"base"`: the density p. Features are unbounded (Brault et al. 2016, Section 2.3, Examples 2.2
      and 2.3; Minh 2016, Section 3.3, Example 2). For curl-free and divergence-free Matérn kernels
      their error has a finite variance only if ν > 2.

    For separable and scalar kernels both are the same (Minh 2016, Section 3.4, Example 3), except
    for dot-product kernels, see `DotProductKernel`. A `SpectralMatrixKernel` is drawn from S in
    both, and with "trace" from its `sampler` if it has one.

    Frequencies are drawn once, at unit lengthscale, when the `ORFFKernel` is built. They are then
    divided by the present lengthscales, so that gradients reach these. The approximate kernel is
    unbiased over seeds, with a standard error of order D^(−1/2). Predictive variances, however, are
    too small, most of all for spectra with heavy tails and for little noise. `Grid` avoids this.

    **Sums.** Each term of a sum has D frequencies of its own (Minh 2016, eq. 60). With
    `shared=True`, the Q terms have D frequencies together, each of which serves all terms:

    - ω is drawn from the mixture of the Q densities (Minh 2016, Example 5): D/Q, rounded up, from
      each term.
    - Its features are the columns of a root of Σ_q w_q A_q(ω), at most p of them. The w_q are the
      weights of the balance heuristic, which keep K̃ unbiased.
    - Only terms with one scalar kernel each, on the same inputs and without a `sampler`, take part.
      Products keep frequencies of their own. An `LCMKernel` always shares.

    Share in sums of separable or of scalar kernels: for the same number of features the error is
    smaller, or the same. Do not share in a `HelmholtzKernel`: its terms have features side by side,
    so that nothing is saved. There the error is about the same if both lengthscales are equal,
    larger if they differ, and larger with `QuasiMonteCarlo`. The posterior of one term
    (`field.part`) exists only where features are side by side: if all A_q differ, and their ranks
    sum to at most p.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. With each
            come a cosine and a sine, so that a scalar or a curl-free term has 2D features. With
            `shared=True`, D is the number of all terms together.
        measure: "trace" or "base", the density to draw from; `Trace()` and `Base()` of
            `gp_orff.features.frequencies` mean the same.
        seed: seed of NumPy's `default_rng`; the same seed gives the same frequencies on every
            machine. The global random state is neither read nor changed.
        shared: whether the terms of a sum share D frequencies, drawn from one mixture. No effect
            on a kernel that is no sum.

    Raises:
        ValueError: `num_frequencies` is not a positive integer, `measure` is unknown, `seed` is
            not a non-negative integer, or `shared` is not a bool.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(256, seed=0)).num_features
        512

        A sum of two separable kernels of two outputs, without and with shared frequencies:

        >>> from gpytorch.kernels import MultitaskKernel, RBFKernel
        >>> one, other = (MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2) for _ in "12")
        >>> kernel = one + other
        >>> for shared in (False, True):
        ...     rule = gp_orff.MonteCarlo(256, shared=shared)
        ...     gp_orff.ORFFKernel(kernel, rule).num_features
        2048
        1024
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        return [
            (
                gaussian_directions(number, leaf.num_dims, rng),
                _coordinates(number, leaf, rng),
            )
            for leaf in leaves
        ]


class Orthogonal(_RandomRule):
    r"""Random frequencies whose directions are orthogonal in blocks of d, the number of inputs.

    The directions of d frequencies are the rows of one random rotation; their lengths ‖ω‖ are
    independent. Each frequency has the same distribution as with `MonteCarlo`. The approximate
    kernel is therefore unbiased too, and has a smaller error (Yu et al. 2016, Theorem 1). When
    frequencies are drawn, and how hyperparameters change them, is as for `MonteCarlo`.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. With each
            come a cosine and a sine, so that a scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`.
        seed: seed of NumPy's `default_rng`.
        shared: whether the terms of a sum share D frequencies, as for `MonteCarlo`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer, `measure` is unknown, `seed` is
            not a non-negative integer, or `shared` is not a bool.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.Orthogonal(256, measure="base")).num_features
        512
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        return [
            (rotations(number, leaf.num_dims, rng), _coordinates(number, leaf, rng))
            for leaf in leaves
        ]


class QuasiMonteCarlo(_RandomRule):
    r"""Frequencies from a scrambled Sobol sequence, distributed as the spectral density.

    The points of the sequence fill the unit cube evenly. Quantile functions map them to the
    directions and the lengths of ω. The approximate kernel is unbiased over seeds, and its error
    falls faster with D than that of `MonteCarlo` (Avron et al. 2016, with Owen's scrambling).
    Choose D as a power of two, since the sequence is most even there; other numbers work too.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. With each
            come a cosine and a sine, so that a scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`.
        seed: seed of NumPy's `default_rng`, which scrambles the sequence.
        shared: whether the terms of a sum share D frequencies, as for `MonteCarlo`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer, `measure` is unknown, `seed` is
            not a non-negative integer, or `shared` is not a bool.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.QuasiMonteCarlo(256)).num_features
        512
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        sizes = []
        for leaf in leaves:
            sizes += [direction_coordinates(leaf.num_dims)]
            sizes += [leaf.spectrum.num_coordinates(leaf.num_dims)]
        sobol = scipy.stats.qmc.Sobol(sum(sizes), scramble=True, rng=rng)
        # SciPy warns unless the number is a power of two; its first points are the same sequence
        cube = sobol.random_base2(int(np.ceil(np.log2(number))))[:number]
        cube = np.clip(cube, 2.0**-33, 1 - 2.0**-33)  # 32-bit points may touch the faces
        parts = np.split(cube, np.cumsum(sizes)[:-1], axis=-1)
        return [
            (directions(parts[2 * i], leaf.num_dims), parts[2 * i + 1])
            for i, leaf in enumerate(leaves)
        ]


def _coordinates(number: int, leaf: LeafSpectrum, rng: np.random.Generator) -> np.ndarray:
    """Independent coordinates in (0, 1), as many as the spectrum needs beside a direction."""
    return uniform(number, leaf.spectrum.num_coordinates(leaf.num_dims), rng)
