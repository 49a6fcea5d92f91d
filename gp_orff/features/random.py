"""Random rules, whose frequencies are written out, and the densities they are drawn from."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.draws import (
    Draw,
    LeafSpectrum,
    TermSpectrum,
    check_seed,
    take_lengths,
    uniform,
)
from gp_orff.features.zoo import DotProductDraw, lifted_leaf
from gp_orff.kernels.base import as_real_tensor, check_positive_integer, name_constructor
from gp_orff.kernels.spectra import Radial, Spectrum
from gp_orff.kernels.spectral_matrix import TraceSampler, check_frozen
from gp_orff.kernels.tree import Sampler

# Random unit vectors: independent, orthogonal, or from points of a cube.


def _normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def rotations(number: int, num_dims: int, rng: np.random.Generator) -> np.ndarray:
    """Rows of independent orthogonal matrices, uniform over the orthogonal group."""
    blocks = rng.standard_normal((-(-number // num_dims), num_dims, num_dims))
    q, r = np.linalg.qr(blocks)
    # QR is unique only up to signs; with a positive diagonal of R, Q is uniform (Mezzadri 2007).
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :]
    return q.reshape(-1, num_dims)[:number]


def directions(u: np.ndarray, num_dims: int) -> np.ndarray:
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


# Frequencies drawn from a density of the user's own, with importance weights.


@dataclass(frozen=True)
class Proposal:
    """The part of a spectrum that random rules use, for frequencies of a density ρ.

    Base variables are ω and log ρ(ω): the frequencies depend on no hyperparameter, their weights
    S(ω)/ρ(ω) do.
    """

    spectrum: Spectrum
    sampler: Sampler | None = None

    @property
    def draw(self) -> type[Draw]:
        """The frequencies of a term whose first leaf has a `Proposal`."""
        return TraceDraw if isinstance(self.sampler, TraceSampler) else ProposedDraw

    def num_coordinates(self, num_dims: int) -> int:
        return num_dims

    def base(self, directions: np.ndarray, u: np.ndarray, order: int) -> np.ndarray:
        pair = self.sampler(torch.from_numpy(u))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "sampler expects to return two tensors, frequencies (D, d) and their log density "
                f"(D,), got {type(pair).__name__}"
            )
        omega, log_density = (
            np.asarray(
                as_real_tensor(part, f"the {what} that sampler returns").detach().cpu(), float
            )
            for part, what in zip(pair, ("frequencies", "log density"), strict=True)
        )
        if omega.shape != u.shape or log_density.shape != u.shape[:1]:
            raise ValueError(
                f"sampler expects to return frequencies {u.shape} and their log density "
                f"{u.shape[:1]}, got {omega.shape} and {log_density.shape}"
            )
        if not (np.isfinite(omega).all() and np.isfinite(log_density).all()):
            raise ValueError(
                "sampler expects to return finite frequencies and log densities, got NaN or "
                "infinity; it has to work for every u in (0, 1)"
            )
        return np.concatenate([omega, log_density[:, None]], axis=-1)

    def frequencies(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "D d"]:
        return base[:, :-1]

    def importance(self, base: Float[Tensor, "D d+1"], order: int) -> Float[Tensor, "*b D"]:
        return (self.spectrum.log_density(base[:, :-1]) - base[:, -1]).exp()


class ProposedDraw(Draw):
    """The frequencies of a term whose first leaf has a `Proposal`."""

    def nodes(self, spectra: Sequence[Spectrum]):
        return super().nodes([Proposal(spectra[0]), *spectra[1:]])


class TraceDraw(ProposedDraw):
    """The frequencies of a kernel that is given by its signature.

    Older files have frequencies of its base kernel, and no mark of their density.
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
    """The density that frequencies are drawn from: ∝ ‖z‖^{2t} p(z), p being the spectral density.

    Frequencies then have the weights E‖z‖^{2t}/(D‖z‖^{2t}).
    """

    @abstractmethod
    def order(self, leaf: LeafSpectrum) -> int:
        """t for the frequencies of this leaf."""

    def source(self, leaf: LeafSpectrum) -> Spectrum | Proposal:
        """What the base variables of this leaf are drawn from; with a class `draw`, if frequencies
        are not those of its spectrum."""
        return leaf.spectrum


@dataclass(frozen=True)
class Trace(Measure):
    """The density ∝ tr A(ω), A = B Bᵀ; features are bounded (Minh 2016, Corollary 10)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree

    def source(self, leaf: LeafSpectrum) -> Spectrum | Proposal:
        return leaf.spectrum if leaf.sampler is None else Proposal(leaf.spectrum, leaf.sampler)


@dataclass(frozen=True)
class Base(Measure):
    """The density p; features are unbounded (Brault et al. 2016, Section 2.3)."""

    def order(self, leaf: LeafSpectrum) -> int:
        return 0


_MEASURES: dict[str, Measure] = {"trace": Trace(), "base": Base()}
NAMES = {measure: name for name, measure in _MEASURES.items()}


def as_measure(measure: str | Measure, owner: str) -> Measure:
    """The measure of this name; errors say that `owner` expects it.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(measure, Measure):
        return measure
    if measure not in tuple(_MEASURES):
        raise ValueError(f'{owner} expects measure "trace" or "base", got {measure!r}')
    return _MEASURES[measure]


# Random frequencies of which many are high, with importance weights.
#
# A posterior between dense observations with little noise consists of frequencies that observations
# do not resolve, which have a small share ε of the prior's variance. Of D frequencies of the
# prior's own density only D ε are among them, and none if ε < 1/D. Here the level u of the quantile
# of ‖ω‖ is
#
#     1 − u = (1 − v)³ ,    v uniform, with the weight du/dv = 3 (1 − u)^{2/3} ,
#
# so that D ε^{1/3} are, and no weight is larger than three times that of the density itself.


_POWER = 3.0


class TailedDraw(Draw):
    """The frequencies of a term whose radial leaves have long tails."""

    def nodes(self, spectra: Sequence[Spectrum]):
        return super().nodes([_tailed(spectrum) for spectrum in spectra])


@dataclass(frozen=True)
class TailedSpectrum:
    """The part of a radial spectrum that random rules use. Base variables are its own, and the
    logarithm of the weight."""

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
    """The density ∝ tr A(ω), or p where only that can be drawn from, with more of the high
    frequencies of radial spectra."""

    def order(self, leaf: LeafSpectrum) -> int:
        return leaf.degree if leaf.spectrum.is_weighted else 0

    def source(self, leaf: LeafSpectrum) -> Spectrum | TailedSpectrum:
        return _tailed(leaf.spectrum)


def _tailed(spectrum: Spectrum) -> Spectrum | TailedSpectrum:
    return TailedSpectrum(spectrum) if isinstance(spectrum, Radial) else spectrum


# Random frequencies, independent, orthogonal or quasi-random.
#
# 1. Every term gets an independent random stream. Terms that share frequencies are assigned to a
#    mixture by the number of their first term.
# 2. The rule gives unit vectors and uniform coordinates for each leaf. For Sobol points both come
#    from one sequence over all leaves, whose points are even in all coordinates jointly.
# 3. The measure replaces the spectrum by what is drawn from, if that is another density.
# 4. The spectrum turns both into base variables, which do not depend on hyperparameters. Quantile
#    functions are used, so that points that are even in the cube remain so.
# 5. `Draw.nodes` computes frequencies and weights from these at the present hyperparameters.


@dataclass(frozen=True)
class DrawnRule(ABC):
    """What rules that draw frequencies have in common: their number, a measure and a seed."""

    num_frequencies: int
    measure: str | Measure = field(default="trace", kw_only=True)  # its name, if it has one
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
    """A random rule: subclasses give directions and uniform coordinates, spectra the radii."""

    shared: bool = field(default=False, kw_only=True)  # whether terms are drawn from one mixture

    def __init_subclass__(cls) -> None:
        name_constructor(cls)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.shared, bool):
            name = type(self).__name__
            raise ValueError(f"{name} expects shared to be True or False, got {self.shared!r}")

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, from independent random streams of the seed."""
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
        """How many frequencies of a mixture of these terms, or of none, are drawn from a term.

        They are as many as its share of the variance (Minh 2016, eq. 58), at least one; the terms
        of an `LCMKernel` give equally many.
        """
        if not members:
            return self.num_frequencies
        if term.group is not None:
            return -(-self.num_frequencies // len(members))
        share = term.share / sum(member.share for member in members)
        return max(1, round(self.num_frequencies * share))

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
        self, term: TermSpectrum, rng: np.random.Generator, mixture: int | None, number: int
    ) -> Draw:
        """So many frequencies of a term, which is drawn by itself or for a mixture."""
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
        """For each leaf, unit vectors (number, d) and coordinates in (0, 1) (number, c)."""


def _members(
    terms: Sequence[TermSpectrum], mixtures: Sequence[int | None], mixture: int | None
) -> list[TermSpectrum]:
    """The terms of a mixture; none if a term is drawn by itself."""
    pairs = zip(terms, mixtures, strict=True)
    return [term for term, other in pairs if mixture is not None and other == mixture]


class MonteCarlo(_RandomRule):
    r"""Independent random frequencies, as in random Fourier features (Rahimi & Recht 2007).

    The matrix-valued kernel has the spectral density A(ω) p(ω). Here p is the spectral density of
    the scalar kernel, and A(ω) is a matrix. It is ωωᵀ for curl-free kernels, ‖ω‖² I − ωωᵀ for
    divergence-free kernels, and constant for separable and scalar kernels. `measure` is the density
    that ω is drawn from; weights correct for the difference:

    - `"trace"`: the density ∝ tr A(ω) p(ω), which is ∝ ‖ω‖² p(ω) for curl-free and divergence-free
      kernels (‖ℓω‖² p(ω) with ARD). Features are bounded (Minh 2016, Section 3.4, Example 4).
    - `"base"`: the density p. Features are unbounded (Brault et al. 2016, Section 2.3, Examples 2.2
      and 2.3; Minh 2016, Section 3.3, Example 2). For curl-free and divergence-free Matérn kernels
      their error has a finite variance only if ν > 2.

    For separable and scalar kernels both are the same (Minh 2016, Section 3.4, Example 3), except
    for dot-product kernels, see `DotProductKernel`. For a `SpectralMatrixKernel`, ω is drawn from S
    with both measures, and from its `sampler` with "trace" if it has one.

    Frequencies are drawn once, at unit lengthscale, when the `ORFFKernel` is built. They are then
    divided by the present lengthscales, so that lengthscales have gradients. The approximate kernel
    is unbiased over seeds, with a standard error of order D^(−1/2). Predictive variances, however,
    are too small, above all for spectra with heavy tails and for little noise. `Grid` avoids this.

    **Sums.** Each term of a sum has D separate frequencies (Minh 2016, eq. 60). With `shared=True`,
    all Q terms use the same D frequencies:

    - ω is drawn from the mixture of the Q densities (Minh 2016, Example 5). The number of
      frequencies from each term is proportional to its fraction tr K_q(0)/tr K(0) of the variance
      (eq. 58), and at least one. The fractions are computed when the `ORFFKernel` is built, in a
      batch from the mean variance. If training changes them much, call `ORFFKernel.redraw()`.
    - Its features are the columns of a root of Σ_q w_q A_q(ω), at most p of them. The w_q are the
      weights of the balance heuristic, which keep K̃ unbiased.
    - Only terms with one scalar kernel each, on the same inputs and without a `sampler`, share
      frequencies. Products have separate frequencies. An `LCMKernel` always shares, with D/Q of
      each term.

    Use `shared=True` for sums of separable or of scalar kernels: for the same number of features
    the error is smaller, or the same. Do not use it for a `HelmholtzKernel`: its terms have
    separate columns of features, so that nothing is saved. The error is then about the same, and
    larger with `QuasiMonteCarlo`. The posterior of one term (`field.part`) exists only if terms
    have separate columns. This is so if all A_q differ, and their ranks sum to at most p.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar or a curl-free term has 2D
            features. With `shared=True`, D is the number of all terms together.
        measure: "trace" or "base", the density to draw from; `Trace()` and `Base()` of
            `gp_orff.features` are equivalent.
        seed: seed of NumPy's `default_rng`; the same seed gives the same frequencies on every
            machine. The global random state is neither read nor changed.
        shared: whether the terms of a sum share D frequencies, drawn from one mixture. It has no
            effect on other kernels.

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
    r"""Random frequencies whose directions are orthogonal in blocks of d, the number of inputs.

    The directions of d frequencies are the rows of one random rotation; their lengths ‖ω‖ are
    independent. Each frequency has the same distribution as with `MonteCarlo`. The approximate
    kernel is therefore unbiased too, and has a smaller error (Yu et al. 2016, Theorem 1).
    Frequencies are drawn, and follow the hyperparameters, as for `MonteCarlo`.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`.
        seed: seed of NumPy's `default_rng`.
        shared: whether the terms of a sum share D frequencies, as for `MonteCarlo`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer, `measure` is unknown, `seed` is
            not a non-negative integer, or `shared` is not a bool.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> gp_orff.ORFFKernel(
        ...     kernel, gp_orff.Orthogonal(256, measure="base")
        ... ).num_features
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
    falls faster with D than with `MonteCarlo` (Avron et al. 2016, with Owen's scrambling). Use a
    power of two for D, for which the sequence is most even. Other numbers work too.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar or a curl-free term has 2D features.
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
            # of directions: one on a line, too, as the signs of ω matter in a product of kernels
            sizes += [{1: 1, 2: 1, 3: 2}.get(leaf.num_dims, leaf.num_dims)]
            sizes += [leaf.spectrum.num_coordinates(leaf.num_dims)]
        from scipy.stats import qmc  # takes a second to import

        sobol = qmc.Sobol(sum(sizes), scramble=True, rng=rng)
        # SciPy warns unless the number is a power of two; its first points are the same sequence
        cube = sobol.random_base2(int(np.ceil(np.log2(number))))[:number]
        cube = np.clip(cube, 2.0**-33, 1 - 2.0**-33)  # 32-bit points may touch the faces
        parts = np.split(cube, np.cumsum(sizes)[:-1], axis=-1)
        return [
            (directions(parts[2 * i], leaf.num_dims), parts[2 * i + 1])
            for i, leaf in enumerate(leaves)
        ]


def _coordinates(number: int, leaf: LeafSpectrum, rng: np.random.Generator) -> np.ndarray:
    """Independent coordinates in (0, 1), as many as the spectrum needs in addition to a
    direction."""
    return uniform(number, leaf.spectrum.num_coordinates(leaf.num_dims), rng)
