"""Rules for random frequencies, and the densities from which they draw."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import Columns, TrigColumns
from gp_orff.features.draws import (
    Draw,
    LeafSpectrum,
    TermSpectrum,
    check_seed,
    take_lengths,
    uniform,
)
from gp_orff.features.phases import (
    FastfoodProjection,
    FourierProjection,
    OrthogonalProjection,
    Phases,
    ProjectedPhases,
    Projection,
    SumOfPhases,
    as_range,
)
from gp_orff.features.zoo import DotProductDraw, DrawnHarmonics, lifted_leaf
from gp_orff.kernels.base import (
    as_real_tensor,
    check_positive_integer,
    name_constructor,
    tensors_of,
)
from gp_orff.kernels.spectra import KernelSpectrum, Radial, Spectrum
from gp_orff.kernels.spectral_matrix import TraceSampler, check_frozen
from gp_orff.kernels.tree import Sampler, Term, spectra_of

# Random unit vectors: independent, orthogonal, or from points of a cube.


def _normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def rotations(number: int, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Return rows of independent random matrices, uniform over the orthogonal group."""
    blocks = rng.standard_normal((-(-number // num_dims), num_dims, num_dims))
    q, r = np.linalg.qr(blocks)
    # QR is unique only up to signs. If the diagonal of R is positive, Q is uniform (Mezzadri 2007).
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q.reshape(-1, num_dims)[:number]


def directions(u: np.ndarray, num_dims: int) -> np.ndarray:
    """Map points u of the unit cube to unit vectors; uniform points become uniform vectors."""
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


# Frequencies from a density that the user defines, with importance weights.


@dataclass(frozen=True)
class Proposal(KernelSpectrum):
    """A spectrum S whose frequencies random rules draw from another density ρ.

    The base variables of a frequency are ω and log ρ(ω). Hyperparameters do not change ω. They
    change only the weights S(ω)/ρ(ω).
    """

    spectrum: Spectrum
    sampler: Sampler | None = None

    @property
    def draw(self) -> type[Draw]:
        """The class of the frequencies of a term whose first leaf has a `Proposal`."""
        return TraceDraw if isinstance(self.sampler, TraceSampler) else ProposedDraw

    def num_coordinates(self, num_dims: int) -> int:
        return num_dims

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        pair = self.sampler(torch.from_numpy(u))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "expected a sampler that returns two tensors, frequencies (D, d) and their log "
                f"density (D,), got {type(pair).__name__}; return a tuple (omega, log_density)"
            )
        omega, log_density = (
            np.asarray(
                as_real_tensor(part, f"the {what} that sampler returns").detach().cpu(), float
            )
            for part, what in zip(pair, ("frequencies", "log density"), strict=True)
        )
        if omega.shape != u.shape or log_density.shape != u.shape[:1]:
            raise ValueError(
                f"expected a sampler that returns frequencies {u.shape} and their log density "
                f"{u.shape[:1]}, got {omega.shape} and {log_density.shape}; return one row for "
                "each row of u"
            )
        if not (np.isfinite(omega).all() and np.isfinite(log_density).all()):
            raise ValueError(
                "expected a sampler that returns finite frequencies and log densities, got NaN or "
                "infinity; make it finite for every u in (0, 1)"
            )
        return np.concatenate([omega, log_density[:, None]], axis=-1)

    def frequencies(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "D d"]:
        return base[:, :-1]

    def importance(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        return (self.spectrum.log_density(base[:, :-1]) - base[:, -1]).exp()


class ProposedDraw(Draw):
    """The drawn frequencies of a term whose first leaf has a `Proposal`."""

    def nodes(self, spectra: Sequence[Spectrum]):
        return super().nodes([Proposal(spectra[0]), *spectra[1:]])


class TraceDraw(ProposedDraw):
    """The drawn frequencies of a kernel by `SpectralMatrixKernel.from_signature`.

    Files of earlier versions contain frequencies from the density of the base kernel. They have no
    buffer `proposed`, which is then set to False.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("proposed", torch.tensor(True))

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        state_dict.setdefault(prefix + "proposed", torch.tensor(False))
        take_lengths(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def nodes(self, spectra: Sequence[Spectrum]):
        if not self.proposed:
            return Draw.nodes(self, spectra)
        check_frozen(spectra[0].log_density(self.bases[0][:1, :-1]))
        return super().nodes(spectra)


# The densities that random frequencies are drawn from.


class Measure(ABC):
    """The density ∝ ‖z‖^{2t} p(z) from which D frequencies are drawn.

    Here p is the spectral density of z = ℓω. The frequencies have the weights
    E‖z‖^{2t}/(D‖z‖^{2t}). Subclasses are `Trace` and `Base`.
    """

    @abstractmethod
    def order(self, leaf: LeafSpectrum) -> int:
        """Return the exponent t for the frequencies of one scalar kernel.

        Args:
            leaf: the spectrum of the scalar kernel.
        """

    def source(self, leaf: LeafSpectrum) -> Spectrum | Proposal:
        """Return the object that draws the base variables of one scalar kernel.

        It is the spectral density of the kernel, or a `Proposal` if a `sampler` draws the
        frequencies.

        Args:
            leaf: the spectrum of the scalar kernel.
        """
        return leaf.spectrum


@dataclass(frozen=True)
class Trace(Measure):
    """The density ∝ tr A(ω) p(ω) with A = B Bᵀ, for which features are bounded.

    Here p is the spectral density of the scalar kernel, and A(ω) p(ω) is the spectral density of
    the matrix-valued kernel. The random rules use this density by default.

    Source: Minh 2016, Corollary 10.

    Example:
        >>> import gp_orff
        >>> rule = gp_orff.MonteCarlo(64, measure=gp_orff.features.Trace())
        >>> rule == gp_orff.MonteCarlo(64, measure="trace")
        True
    """

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree

    def source(self, leaf: LeafSpectrum) -> Spectrum | Proposal:
        return leaf.spectrum if leaf.sampler is None else Proposal(leaf.spectrum, leaf.sampler)


@dataclass(frozen=True)
class Base(Measure):
    """The spectral density p of the scalar kernel.

    With this density, the features of kernels of derivatives, such as `CurlFreeKernel`, grow with
    ‖ω‖ and are unbounded. Features from `Trace` are bounded.

    Source: Brault et al. 2016, Section 2.3.

    Example:
        >>> import gp_orff
        >>> rule = gp_orff.MonteCarlo(64, measure=gp_orff.features.Base())
        >>> rule == gp_orff.MonteCarlo(64, measure="base")
        True
    """

    def order(self, leaf: LeafSpectrum) -> int:
        return 0


_MEASURES: dict[str, Measure] = {"trace": Trace(), "base": Base()}
NAMES = {measure: name for name, measure in _MEASURES.items()}


def as_measure(measure: str | Measure, owner: str) -> Measure:
    """Return the measure with this name, or the measure itself.

    Args:
        measure: "trace", "base" or a `Measure`.
        owner: the name of the rule, for the error.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(measure, Measure):
        return measure
    if measure not in tuple(_MEASURES):
        raise ValueError(f'{owner} expects measure "trace" or "base", got {measure!r}')
    return _MEASURES[measure]


# Random frequencies with more high ones than the spectral density has, and importance weights.
#
# Between dense observations with little noise, the posterior consists of frequencies that the
# observations do not resolve. These have a small fraction ε of the prior variance. Among D
# frequencies from the spectral density, only D ε are so high, and none if ε < 1/D. Here the
# quantile level u of ‖ω‖ is
#
#     1 − u = (1 − v)³ ,    v uniform, with the weight du/dv = 3 (1 − u)^{2/3} .
#
# So D ε^{1/3} frequencies are so high, and no weight is larger than three times the usual weight.


_POWER = 3.0


class TailedDraw(Draw):
    """The drawn frequencies of a term whose leaves have a `TailedSpectrum`."""

    def nodes(self, spectra: Sequence[Spectrum]):
        return super().nodes([_tailed(spectrum) for spectrum in spectra])


@dataclass(frozen=True)
class TailedSpectrum(KernelSpectrum):
    """A radial spectrum from which random rules draw more high frequencies.

    Base variables are those of the spectrum, followed by the logarithm of the weight.
    """

    spectrum: Radial

    draw = TailedDraw

    def num_coordinates(self, num_dims: int) -> int:
        return self.spectrum.num_coordinates(num_dims)

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        rare = np.clip((1 - u) ** _POWER, 2.0**-48, None)  # 1 − u is rounded to 2⁻⁵³
        log_weight = np.log(_POWER) + (1 - 1 / _POWER) * np.log(rare)
        base = self.spectrum.base(directions, 1 - rare, order)
        return np.concatenate([base, log_weight.sum(-1, keepdims=True)], axis=-1)

    def frequencies(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D d"]:
        return self.spectrum.frequencies(base[:, :-1], order)

    def importance(self, base: Float[Tensor, "D c"], order: int) -> Float[Tensor, "*b D"]:
        return self.spectrum.importance(base[:, :-1], order) * base[:, -1].exp()


@dataclass(frozen=True)
class LongTails(Measure):
    """The density of `Trace`, but with more high frequencies of radial spectra.

    If a spectrum does not support weighted densities, the density of `Base` is used instead.
    """

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree if leaf.spectrum.is_weighted else 0

    def source(self, leaf: LeafSpectrum) -> Spectrum | TailedSpectrum:
        return _tailed(leaf.spectrum)


def _tailed(spectrum: Spectrum) -> Spectrum | TailedSpectrum:
    return TailedSpectrum(spectrum) if spectrum.is_radial else spectrum


# Random frequencies: independent, orthogonal or quasi-random.
#
# 1. Every term gets an independent random stream. Terms that share frequencies form a mixture,
#    which has the number of its first term.
# 2. The rule draws unit vectors and uniform coordinates for each leaf. For Sobol points, one
#    sequence has the coordinates of all leaves, so that its points are jointly even.
# 3. If the measure draws from another density, it replaces the spectrum.
# 4. The spectrum maps vectors and coordinates to base variables, which do not depend on
#    hyperparameters. It uses quantile functions, which preserve the evenness of points in the cube.
# 5. `Draw.nodes` computes frequencies and weights at the current hyperparameters.


@dataclass(frozen=True)
class DrawnRule(ABC):
    """The base class of rules that draw frequencies, with their number, a measure and a seed."""

    num_frequencies: int
    measure: str | Measure = field(default="trace", kw_only=True)  # the name, if there is one
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self):
        name = type(self).__name__
        number = check_positive_integer(self.num_frequencies, "num_frequencies", name)
        check_seed(self.seed, name)
        measure = as_measure(self.measure, name)
        object.__setattr__(self, "num_frequencies", number)
        object.__setattr__(self, "measure", NAMES.get(measure, measure))


@dataclass(frozen=True)
class _RandomRule(DrawnRule):
    """A random rule. Subclasses draw directions and uniform coordinates, and spectra draw radii."""

    shared: bool = field(default=False, kw_only=True)  # whether terms are drawn from one mixture

    def __init_subclass__(cls) -> None:
        name_constructor(cls)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.shared, bool):
            name = type(self).__name__
            raise ValueError(f"{name} expects shared to be True or False, got {self.shared!r}")

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Draw the frequencies of each term, from independent random streams of the seed.

        Args:
            terms: the spectra of the terms of a kernel.
        """
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        mixtures = [
            next((index for index, other in enumerate(terms) if self._shares(term, other)), None)
            for term in terms
        ]
        return [
            self._draw(term, rng, mixture, self._number(term, _members(terms, mixtures, mixture)))
            for term, rng, mixture in zip(terms, streams, mixtures, strict=True)
        ]

    def _number(self, term: TermSpectrum, members: Sequence[TermSpectrum]) -> int:
        """Return the number of frequencies that are drawn from a term.

        In a mixture, it is proportional to the variance of the term (Minh 2016, eq. 58), and at
        least one. The terms of an `LCMKernel` have equal numbers. Without a mixture, `members` is
        empty, and the number is D.
        """
        if not members:
            return self.num_frequencies
        if term.group is not None:
            return -(-self.num_frequencies // len(members))
        share = term.share / sum(member.share for member in members)
        return max(1, round(self.num_frequencies * share))

    def _shares(self, term: TermSpectrum, other: TermSpectrum) -> bool:
        """Return whether two terms share the frequencies of one mixture.

        Each of them must have a single kernel, on the same inputs and without a sampler.
        """
        in_group = term.group is not None and term.group is other.group
        return (
            (self.shared or in_group)
            and len(term.leaves) == len(other.leaves) == 1
            and term.leaves[0].dims == other.leaves[0].dims
            and term.leaves[0].sampler is None is other.leaves[0].sampler
            and all(t.leaves[0].spectrum.is_stationary for t in (term, other))
        )

    def _draw(
        self, term: TermSpectrum, rng: np.random.Generator, mixture: int | None, number: int
    ) -> Draw:
        """Draw `number` frequencies of a term, alone or for a mixture."""
        if not term.leaves:  # a constant: ω = 0 only
            return Draw([], [])
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
        """Return for each leaf unit vectors (number, d) and coordinates (number, c) in (0, 1)."""


def _members(
    terms: Sequence[TermSpectrum], mixtures: Sequence[int | None], mixture: int | None
) -> list[TermSpectrum]:
    """Return the terms of a mixture, or an empty list without a mixture."""
    pairs = zip(terms, mixtures, strict=True)
    return [term for term, other in pairs if mixture is not None and other == mixture]


class MonteCarlo(_RandomRule):
    r"""The rule for independent random frequencies, as in random Fourier features.

    Source: Rahimi & Recht 2007. A matrix-valued kernel has the spectral density A(ω) p(ω), where p
    is the spectral density of the scalar kernel. The matrix A(ω) is ωωᵀ for curl-free kernels,
    ‖ω‖² I − ωωᵀ for divergence-free kernels, and constant for separable and scalar kernels. The
    argument `measure` selects the density from which ω is drawn. Importance weights make the kernel
    unbiased for both densities:

    - With `measure="trace"`, the default, the density is proportional to tr A(ω) p(ω). For
      curl-free and divergence-free kernels, this is ‖ω‖² p(ω), or ‖ℓω‖² p(ω) with ARD. The features
      are bounded (Minh 2016, Section 3.4, Example 4).
    - With `measure="base"`, the density is p. The features are unbounded (Brault et al. 2016,
      Section 2.3, Examples 2.2 and 2.3; Minh 2016, Section 3.3, Example 2). For curl-free and
      divergence-free Matérn kernels, their error has a finite variance only if ν > 2.

    For separable and scalar kernels, both densities are equal (Minh 2016, Section 3.4, Example 3).
    Dot-product kernels are an exception, see `DotProductKernel`. For a `SpectralMatrixKernel`, both
    measures draw from S, but "trace" draws from its `sampler` if there is one.

    Frequencies are drawn once, at unit lengthscale, when the `ORFFKernel` is built. They are
    divided by the current lengthscales in every evaluation, so that lengthscales have gradients.
    The approximate kernel is unbiased over seeds, with a standard error of order D^(−1/2). However,
    predictive variances are too small, especially for spectra with heavy tails and for little
    noise. `Grid` avoids this.

    **Sums.** By default, each term of a sum of kernels has D separate frequencies (Minh 2016,
    eq. 60). With `shared=True`, all Q terms use the same D frequencies:

    - They are drawn from a mixture of the Q densities (Minh 2016, Example 5). The number of
      frequencies from each term is proportional to its fraction tr K_q(0)/tr K(0) of the variance
      (eq. 58), and at least one. For a batch of kernels, the mean variance is used. These numbers
      are chosen when the `ORFFKernel` is built. If training changes the fractions much, call
      `ORFFKernel.redraw()`.
    - The features of a frequency are the columns of a root of Σ_q w_q A_q(ω), at most p for p
      outputs. The w_q are the weights of the balance heuristic, so that the kernel is unbiased.
    - Only terms with one scalar kernel each, on the same inputs and without a `sampler`, share
      frequencies. The terms of an `LCMKernel` always do, with D/Q frequencies from each term.

    Use `shared=True` for sums of separable kernels, or of scalar kernels. For the same number of
    features, the error is then equal or smaller. Do not use it for a `HelmholtzKernel`, for which
    it saves no features and may increase the error. The posterior of one term,
    `FieldPosterior.part`, exists only if all A_q differ and their ranks sum to at most p.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels, or of all
            terms together with `shared=True`. Each frequency has a cosine and a sine, so that a
            scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, or equivalently `Trace()` or `Base()`
            of `gp_orff.features`.
        seed: the seed of NumPy's `default_rng`. The same seed gives the same frequencies on every
            machine. The global random state is neither read nor changed.
        shared: whether the terms of a sum share D frequencies; False by default. It has no effect
            on other kernels.

    Raises:
        ValueError: `num_frequencies` is not a positive integer; `measure` is unknown; `seed` is not
            a non-negative integer; `shared` is not a bool.

    Example:
        A curl-free kernel has two features for each frequency:

        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(256, seed=0)).num_features
        512

        A sum of two separable kernels of two outputs, without and with shared frequencies:

        >>> from gpytorch.kernels import MultitaskKernel, RBFKernel
        >>> one, other = (
        ...     MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2)
        ...     for _ in "12"
        ... )
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
                _normalise(rng.standard_normal((number, leaf.num_dims))),
                _coordinates(number, leaf, rng),
            )
            for leaf in leaves
        ]


class Orthogonal(_RandomRule):
    r"""The rule for random frequencies with orthogonal directions.

    Frequencies come in blocks of d, the number of inputs. At unit lengthscale, the directions of a
    block are the rows of a random orthogonal matrix, and the norms are independent. Each frequency
    has the same distribution as with `MonteCarlo`, so that the approximate kernel is unbiased. Its
    error is smaller than with `MonteCarlo` (Yu et al. 2016, Theorem 1). Frequencies are drawn once,
    and divided by the current lengthscales in every evaluation.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels, or of all
            terms together with `shared=True`. Each frequency has a cosine and a sine, so that a
            scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`.
        seed: the seed of NumPy's `default_rng`.
        shared: whether the terms of a sum share D frequencies, as for `MonteCarlo`; False by
            default.

    Raises:
        ValueError: `num_frequencies` is not a positive integer; `measure` is unknown; `seed` is not
            a non-negative integer; `shared` is not a bool.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> rule = gp_orff.Orthogonal(256, measure="base")
        >>> gp_orff.ORFFKernel(kernel, rule).num_features
        512
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        return [
            (rotations(number, leaf.num_dims, rng), _coordinates(number, leaf, rng))
            for leaf in leaves
        ]


class QuasiMonteCarlo(_RandomRule):
    r"""The rule for quasi-random frequencies from a scrambled Sobol sequence.

    The points of the sequence fill the unit cube evenly. Quantile functions of the spectral density
    map them to the directions and the lengths of ω. The approximate kernel is unbiased over seeds,
    and its error falls faster with D than with `MonteCarlo` (Avron et al. 2016, here with Owen's
    scrambling). Use a power of two for D, for which the sequence is most even. Other numbers work
    too.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels, or of all
            terms together with `shared=True`. Each frequency has a cosine and a sine, so that a
            scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`.
        seed: the seed of NumPy's `default_rng`, which scrambles the sequence.
        shared: whether the terms of a sum share D frequencies, as for `MonteCarlo`; False by
            default.

    Raises:
        ValueError: `num_frequencies` is not a positive integer; `measure` is unknown; `seed` is not
            a non-negative integer; `shared` is not a bool.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.QuasiMonteCarlo(256)).num_features
        512
    """

    def _directions_and_coordinates(self, number, leaves, rng):
        sizes = []
        for leaf in leaves:
            # A direction on a line needs one coordinate, because the sign of ω matters in a product
            # of kernels.
            sizes += [{1: 1, 2: 1, 3: 2}.get(leaf.num_dims, leaf.num_dims)]
            sizes += [leaf.spectrum.num_coordinates(leaf.num_dims)]
        from scipy.stats import qmc  # takes a second to import

        sobol = qmc.Sobol(sum(sizes), scramble=True, rng=rng)
        # SciPy warns unless the number is a power of two. Its first points are the same sequence.
        cube = sobol.random_base2(int(np.ceil(np.log2(number))))[:number]
        cube = np.clip(cube, 2.0**-33, 1 - 2.0**-33)  # 32-bit points may touch the faces
        parts = np.split(cube, np.cumsum(sizes)[:-1], axis=-1)
        return [
            (directions(parts[2 * i], leaf.num_dims), parts[2 * i + 1])
            for i, leaf in enumerate(leaves)
        ]


def _coordinates(number: int, leaf: LeafSpectrum, rng: np.random.Generator) -> np.ndarray:
    """Draw the independent coordinates in (0, 1) that the spectrum needs besides a direction."""
    return uniform(number, leaf.spectrum.num_coordinates(leaf.num_dims), rng)


# Frequencies that are not stored as a matrix: radii and fast projections, drawn once.
#
# 1. When the kernel is built, `_StructuredRule` draws radii from the spectral density. For each
#    leaf, it also draws a projection, whose rows are unit vectors. Inputs may be padded with zeros.
#    The radii then have the distribution for the padded dimension, so that the distribution of
#    ⟨ω, x⟩ is unchanged.
# 2. In every evaluation, `_phases` computes ⟨ω, x⟩ without ω. It scales the inputs by the
#    lengthscales, applies the fast projection, and multiplies by the current radii.
# 3. The leaves of a product depend on different inputs, and their phases are added.
# 4. The factor B of a field is a function of ω. For the gradient, B(ω) = ω, and features are
#    products with the projection, as phases are (`GradientExpansion`). Other homogeneous factors
#    need the matrix of all ω. `_check` raises an error for factors that are not homogeneous.


class StructuredDraw(Draw):
    """The frequencies r_k u_k / ℓ of one term, with radii r and unit vectors u for each leaf.

    Args:
        projections: the unit vectors of each leaf.
        bases: the base variables (D, c) of the radii of each leaf.
        dims: the input columns of each leaf.
        orders: the order t of the measure for each leaf; zero if None.
    """

    projected = True

    def __init__(
        self,
        projections: Sequence[Projection],
        bases: Sequence[Float[Tensor, "D c"]],
        dims: Sequence[tuple[int, ...]],
        orders: Sequence[int] | None = None,
    ):
        super().__init__(bases, [0] * len(bases) if orders is None else orders)
        self.dims = tuple(map(as_range, dims))
        self._sizes = [
            (type(p), p.num_inputs, p.num_vectors, tuple(tensors_of(p))) for p in projections
        ]
        for index, projection in enumerate(projections):
            for name, array in tensors_of(projection).items():
                self.register_buffer(f"{name}_{index}", array)

    @property
    def projections(self) -> list[Projection]:
        """The unit vectors of each leaf."""
        return [
            cls(num_inputs, num_vectors, *(getattr(self, f"{name}_{index}") for name in names))
            for index, (cls, num_inputs, num_vectors, names) in enumerate(self._sizes)
        ]

    def columns(self, term: Term, num_inputs: int) -> tuple[Columns, Float[Tensor, "*b M 1"]]:
        spectra = spectra_of(term)
        parts = self._phases(spectra, self.dims, num_inputs)
        phi = TrigColumns(parts[0] if len(parts) == 1 else SumOfPhases(tuple(parts)))
        return phi, phi.of_frequencies(self.sample_weights(spectra).unsqueeze(-1))

    def nodes(self, spectra: Sequence[Radial]):
        """Return the matrix of frequencies ω of each leaf, and the weights."""
        dims = [range(len(columns)) for columns in self.dims]
        phases = self._phases(spectra, dims, max(map(len, dims)))
        written = [one.omega[..., : len(d)] for one, d in zip(phases, dims, strict=True)]
        return written, self.sample_weights(spectra)

    def sample_weights(self, spectra: Sequence[Radial]) -> Float[Tensor, "*b D"]:
        weights = torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)
        parts = zip(spectra, self.projections, self.bases, self.orders, strict=True)
        for spectrum, projection, base, order in parts:
            if order:
                moment = spectrum.moment(order, projection.padded(projection.num_inputs))
                weights = weights * moment / spectrum.radii(base, order) ** (2 * order)
        return weights

    def _phases(
        self, spectra: Sequence[Radial], dims: Sequence[Sequence[int]], num_inputs: int
    ) -> list[Phases]:
        """Return ⟨ω, x⟩ for the frequencies of each leaf."""
        parts = zip(spectra, self.projections, self.bases, dims, self.orders, strict=True)
        return [
            ProjectedPhases(
                projection,
                spectrum.radii(base, order).unsqueeze(-1),
                spectrum.inverse_lengthscale(len(columns)),
                columns,
                num_inputs,
            )
            for spectrum, projection, base, columns, order in parts
        ]


class StructuredDotProductDraw(DotProductDraw):
    """The columns of a dot-product kernel whose unit vectors are the rows of a fast projection."""

    def __init__(
        self,
        projection: Projection,
        harmonics: DrawnHarmonics,
        dims: Sequence[int],
    ):
        lengths = torch.ones_like(harmonics.expected_numbers).unsqueeze(-1)
        super().__init__(lengths, harmonics, dims)
        self.directions = StructuredDraw([projection], [lengths], [range(projection.num_inputs)])

    def unit_phases(self, num_lifted: int) -> Phases:
        lengths, (projection,) = self.bases[0], self.directions.projections
        scale = torch.ones_like(lengths[:1]).expand(1, num_lifted)
        return ProjectedPhases(projection, lengths, scale, range(num_lifted), num_lifted)


# Rules for inputs of high dimension: Fastfood and similar rules.


class _StructuredRule(DrawnRule):
    """A rule that draws independent radii, and directions from a fast projection."""

    projection: ClassVar[type[Projection]]

    def __init_subclass__(cls) -> None:
        name_constructor(cls)

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Draw the frequencies of each term, from independent random streams of the seed.

        Args:
            terms: the spectra of the terms of a kernel.
        """
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        return [self._draw(term, rng) for term, rng in zip(terms, streams, strict=True)]

    def _draw(self, term: TermSpectrum, rng: np.random.Generator) -> Draw:
        if not term.leaves:  # a constant: ω = 0 only
            return Draw([], [])
        lifted = lifted_leaf(term)
        if lifted is not None:
            return self._draw_dot_product(term, lifted, rng)
        projections, bases, orders = [], [], []
        for leaf in term.leaves:
            self._check(leaf)
            order = as_measure(self.measure, type(self).__name__).order(leaf)
            num_dims, number = self.projection.padded(leaf.num_dims), self.num_frequencies
            u = uniform(number, leaf.spectrum.num_coordinates(num_dims), rng)
            bases.append(torch.from_numpy(leaf.spectrum.radial_base(u, num_dims, order)))
            projections.append(self.projection.draw(leaf.num_dims, number, rng))
            orders.append(order)
        return StructuredDraw(projections, bases, [leaf.dims for leaf in term.leaves], orders)

    def _draw_dot_product(
        self, term: TermSpectrum, lifted: LeafSpectrum, rng: np.random.Generator
    ) -> Draw:
        """Draw harmonics, and directions for the padded inputs (Le et al. 2013, Section 4.5)."""
        number, num_dims = self.num_frequencies, self.projection.padded(lifted.num_dims)
        u = uniform(number, 1, rng)[:, 0]
        order = as_measure(self.measure, type(self).__name__).order(lifted)
        harmonics = DrawnHarmonics.of(lifted.spectrum, num_dims, order, u)
        projection = self.projection.draw(lifted.num_dims, number, rng)
        return StructuredDotProductDraw(projection, harmonics, term.leaves[0].dims)

    def _check(self, leaf: LeafSpectrum) -> None:
        """Raise an error if frequencies are not a radius times a uniform direction.

        Raises:
            NotImplementedError: the spectrum is not radial, or the factor B is not homogeneous.
        """
        name = type(self).__name__
        if leaf.variance is not None:
            raise NotImplementedError(
                f"{name} expects kernels whose spectral matrix is constant or quadratic in the "
                "frequency, got a SpectralMatrixKernel; use gp_orff.QuasiMonteCarlo"
            )
        if not leaf.spectrum.is_radial:
            raise NotImplementedError(
                f"{name} expects kernels of the scaled distance, such as RBFKernel, MaternKernel "
                f"or RQKernel, got the spectrum {type(leaf.spectrum).__name__}, which is not "
                "radial; use gp_orff.QuasiMonteCarlo"
            )


class Fastfood(_StructuredRule):
    r"""The rule for random frequencies of many inputs, with fast transforms (Le et al. 2013).

    For a point x with d inputs, the products ⟨ω, x⟩ with all D frequencies cost O(D log d)
    operations instead of O(D d). The frequencies need O(D) memory. They come in blocks
    V = S H G Π H B / √d′ of d′ frequencies (eq. 33). Here d′ is the smallest power of two with
    d′ ≥ d, and inputs are padded with d′ − d zeros. H is the Walsh–Hadamard matrix, and Π is a
    random permutation. The other factors are diagonal: B has random signs, G has normal random
    numbers, and S sets the lengths of the frequencies. For each block, B, Π, G and S are stored as
    four vectors. Two fast Hadamard transforms compute ⟨ω, x⟩.

    Each frequency has exactly the same distribution as with `MonteCarlo`, because S is r/‖G‖ with
    radii r from the spectral density in d′ dimensions. The approximate kernel is therefore
    unbiased. The frequencies of a block depend on each other. At lags of 0.5 to 2 lengthscales,
    this increases the variance of the approximate kernel by a factor of up to 2, or up to 3 for
    dot-product kernels.

    Use this rule for hundreds to thousands of inputs, to save memory and the time of predictions.
    It does not accelerate training in closed form, which is dominated by the N F² operations of
    ΦᵀΦ. For few inputs, `QuasiMonteCarlo` is more accurate.

    With a `CurlFreeKernel`, the frequencies are also the directions of the features. The products
    of `ORFFKernel.feature_operator` and the predictions of `ORFFRidge` then use the transforms too.
    This is faster for hundreds of inputs, and slower for fewer than a hundred. For divergence-free
    kernels there is no gain, because each frequency has d − 1 features.

    The spectral density must be radial. These kernels work:

    - `RBFKernel`, `MaternKernel`, `GeneralMaternKernel` and `RQKernel`, with or without ARD;
    - `BesselKernel` with 2^k inputs;
    - sums and products of these kernels, also in `MultitaskKernel`, `SeparableKernel` and
      `LCMKernel`;
    - curl-free, divergence-free and Helmholtz kernels of these kernels;
    - `LinearKernel`, `PolynomialKernel` and power series of a `DotProductKernel`, and its Legendre
      series and projections if d is a power of two.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar term has 2D features. D need not be
            a multiple of d′.
        seed: the seed of NumPy's `default_rng`. The same seed gives the same frequencies.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`. It matters for
            fields and for dot-product kernels.

    Raises:
        ValueError: `num_frequencies` is not a positive integer; `seed` is not a non-negative
            integer; `measure` is unknown.
        NotImplementedError: raised when an `ORFFKernel` is built, if the spectral density is not
            radial, as for `SpectralMatrixKernel` and `SpectralMixtureKernel`.

    Example:
        A scalar kernel of 784 inputs:

        >>> import gp_orff, gpytorch, torch
        >>> exact = gpytorch.kernels.RBFKernel()
        >>> exact.lengthscale = 20.0
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.Fastfood(4096), num_dims=784)
        >>> x = torch.rand(5, 784)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.05)
        True
        >>> kernel.phases(x).shape  # ⟨ω, x⟩, without a matrix of frequencies
        torch.Size([5, 4096])

        A force field with 784 components, the gradient of an energy:

        >>> kernel = gp_orff.CurlFreeKernel(exact, num_dims=784)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Fastfood(4096))
        >>> phi = kernel.feature_operator(x)
        >>> (
        ...     phi @ torch.ones(kernel.num_features)
        ... ).shape  # 784 components, 5 points
        torch.Size([3920])
    """

    projection = FastfoodProjection


class StructuredOrthogonal(_StructuredRule):
    r"""The rule for random frequencies with orthogonal directions, by fast transforms.

    The directions of a block are the rows of H D₁ H D₂ H D₃ / d′^{3/2}, with the Walsh–Hadamard
    matrix H and diagonal matrices D₁, D₂, D₃ of random signs (Yu et al. 2016, Section 4). The d
    inputs are padded to d′, the smallest power of two that is at least d and at least 32. Lengths
    are independent radii from the spectral density in d′ dimensions. The rule supports the same
    kernels as `Fastfood`, and needs three transforms instead of two.

    The approximate kernel has a smaller variance than with `Fastfood`, as with `Orthogonal`, but a
    small bias, because the directions are not exactly uniform. For an RBF kernel, the bias is at
    most 0.003 of the variance, for inputs that differ in few coordinates. For dot-product kernels
    of few inputs, use `Orthogonal` or `QuasiMonteCarlo` instead, because orthogonality in 32
    dimensions does not reduce their variance.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar term has 2D features.
        seed: the seed of NumPy's `default_rng`.
        measure: "trace" or "base", the density to draw from, as for `Fastfood`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer; `seed` is not a non-negative
            integer; `measure` is unknown.
        NotImplementedError: raised when an `ORFFKernel` is built, if the spectral density is not
            radial.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=64)
        >>> rule = gp_orff.StructuredOrthogonal(128)
        >>> gp_orff.ORFFKernel(kernel, rule).num_features
        256
    """

    projection = OrthogonalProjection


class FourierFastfood(_StructuredRule):
    r"""The rule for random frequencies by one Fourier transform, which is a biased heuristic.

    Use `Fastfood` or `StructuredOrthogonal` instead, except for comparisons. The directions are the
    rows of Π F B, with a diagonal matrix B of random signs, the real Fourier (Hartley) matrix F,
    and a random permutation Π. This is "FFT Fastfood" of Le et al. (2013, Section 6.1), where F is
    complex. Lengths are independent radii from the spectral density. The number of inputs d can be
    any number, without padding.

    All frequencies have entries of similar size. The kernel is therefore wrong for two inputs that
    differ in one coordinate only. For an RBF kernel with many inputs at a distance of r
    lengthscales, it is about J₀(√2 r) instead of exp(−r²/2), with the Bessel function J₀. This is
    0.33 too low at r = 2. For the first coordinate and a few others, it is about cos r, which is
    0.55 too low. For inputs that differ in many coordinates, the error is small.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar term has 2D features.
        seed: the seed of NumPy's `default_rng`.
        measure: "trace" or "base", the density to draw from, as for `Fastfood`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer; `seed` is not a non-negative
            integer; `measure` is unknown.
        NotImplementedError: raised when an `ORFFKernel` is built, if the spectral density is not
            radial.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=85)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.FourierFastfood(128)).num_features
        256
    """

    projection = FourierProjection
