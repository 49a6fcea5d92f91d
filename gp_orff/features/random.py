"""Random rules, structured ones among them, and the densities that frequencies are drawn from."""

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
class Proposal(KernelSpectrum):
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
class TailedSpectrum(KernelSpectrum):
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
    return TailedSpectrum(spectrum) if spectrum.is_radial else spectrum


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
            and all(t.leaves[0].spectrum.is_stationary for t in (term, other))
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

    In each block, d frequencies at unit lengthscale have the rows of a random orthogonal matrix as
    directions, and independent norms. Each frequency has the same distribution as with
    `MonteCarlo`. The approximate kernel is therefore unbiased, and its error is smaller than with
    `MonteCarlo` (Yu et al. 2016, Theorem 1). As with that rule, frequencies are drawn once, and
    then divided by the present lengthscales.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar or a curl-free term has 2D features.
        measure: "trace" or "base", the density to draw from, as for `MonteCarlo`.
        seed: seed of NumPy's `default_rng`.
        shared: whether the terms of a sum share D frequencies, as for `MonteCarlo`. D is then the
            number of all terms together.

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


# Frequencies that are never written out: radii and fast projections, drawn once.
#
# 1. When the kernel is built, `_StructuredRule` draws radii from the spectral density, and for each
#    leaf a projection, whose rows are the unit vectors. Inputs may be padded with zeros; the radii
#    are then those of the padded dimension, which leaves the distribution of ⟨ω, x⟩ as it is.
# 2. In every evaluation `_phases` scales the inputs by the lengthscales, applies the fast
#    projection, and multiplies by the radii at the present hyperparameters: ⟨ω, x⟩ without ω.
# 3. Leaves of a product depend on different inputs, and their phases add up.
# 4. The factor of a field is a function of ω. In the density weighted by ‖z‖², radii are those of
#    the padded dimension too. With B(ω) = ω of a gradient, features are products with the
#    projection, as phases are (`GradientExpansion`). Other factors write ω out; general ones are
#    refused (`_check`).


class StructuredDraw(Draw):
    """The frequencies r_k u_k / ℓ of one term: for each leaf radii r and unit vectors u.

    `dims` are the input columns of every leaf, `orders` those of the measure.
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
        """ω of each leaf, written out, and the weights."""
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
        """⟨ω, x⟩ for the frequencies of each leaf."""
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
    """Columns of a dot-product kernel whose unit vectors are a fast projection."""

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


# Rules for inputs of high dimension: Fastfood and its siblings.


class _StructuredRule(DrawnRule):
    """Independent radii, and directions from a projection."""

    projection: ClassVar[type[Projection]]

    def __init_subclass__(cls) -> None:
        name_constructor(cls)

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, from independent random streams of the seed."""
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
        """Harmonics, and directions on the sphere of the padded inputs (Le et al. 2013, 4.5)."""
        number, num_dims = self.num_frequencies, self.projection.padded(lifted.num_dims)
        u = uniform(number, 1, rng)[:, 0]
        order = as_measure(self.measure, type(self).__name__).order(lifted)
        harmonics = DrawnHarmonics.of(lifted.spectrum, num_dims, order, u)
        projection = self.projection.draw(lifted.num_dims, number, rng)
        return StructuredDotProductDraw(projection, harmonics, term.leaves[0].dims)

    def _check(self, leaf: LeafSpectrum) -> None:
        """Check that frequencies are a radius times a direction, and B homogeneous in them.

        Raises:
            NotImplementedError: they are not.
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
                f"or RQKernel, got the spectrum {type(leaf.spectrum).__name__}, which has other "
                "directions than a sphere; use gp_orff.QuasiMonteCarlo"
            )


class Fastfood(_StructuredRule):
    r"""Random frequencies for many inputs, in O(n log d) time and O(n) memory (Le et al. 2013).

    Frequencies come in blocks V = S H G Π H B / √d′ of d′ frequencies (eq. 33). H is the
    Walsh–Hadamard matrix and Π a random permutation. The other factors are diagonal: B has random
    signs, G has normal random numbers, and S sets the lengths of the frequencies. The smallest
    power of two that is not below d is d′, and inputs are padded with d′ − d zeros. Only B, Π, G
    and S are stored, as four vectors for each block. Two fast Hadamard transforms then compute
    ⟨ω, x⟩ instead of a product with a D × d matrix.

    Each frequency has exactly the same distribution as with `MonteCarlo`: S is r/‖G‖, where r is a
    radius of the kernel's spectral density in d′ dimensions. The approximate kernel is therefore
    unbiased. Frequencies of a block depend on each other. At lags of 0.5 to 2 lengthscales, they
    raise the variance of the kernel by a factor of up to 2.0, or 3 for dot-product kernels.

    Use it with hundreds to thousands of inputs, to save time in prediction, and memory. Training in
    closed form gains nothing, because the N F² operations of ΦᵀΦ dominate. For few inputs
    `QuasiMonteCarlo` is more accurate.

    A `CurlFreeKernel` of d inputs has the frequencies V as directions: f(x) = Vᵀ(φ(x) ∘ Θ). The
    products of `ORFFKernel.feature_operator` and the predictions of `ORFFRidge` do not compute V
    either. This is faster if d is in the hundreds, and slower if it is below a hundred.
    Divergence-free fields gain nothing: a frequency has d − 1 features, and the sum over them takes
    D·d operations for any V.

    The kernel must be scalar or separable, with a radial spectral density: `RBFKernel`,
    `MaternKernel`, `GeneralMaternKernel` or `RQKernel`, with or without ARD, or `BesselKernel` in
    2^k dimensions. Their sums and products are accepted too, also in `MultitaskKernel`,
    `SeparableKernel` and `LCMKernel`, and curl-free, divergence-free and Helmholtz kernels of them.
    The terms of a sum are drawn separately, and the phases of a product are added. Dot-product
    kernels also work: `LinearKernel`, `PolynomialKernel` and power series for every d, Legendre
    series and projections if d is a power of two.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels. Each
            frequency has a cosine and a sine, so that a scalar term has 2D features. The last block
            may be incomplete.
        seed: seed of NumPy's `default_rng`; the same seed gives the same frequencies.
        measure: "trace" or "base", for fields and dot-product kernels, as for `MonteCarlo`.

    Raises:
        ValueError: `num_frequencies` is not a positive integer, `seed` is not a non-negative
            integer, or `measure` is unknown.
        NotImplementedError: when an `ORFFKernel` is built, for `SpectralMatrixKernel` and
            `SpectralMixtureKernel`.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> exact = gpytorch.kernels.RBFKernel()
        >>> exact.lengthscale = 20.0
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.Fastfood(4096), num_dims=784)
        >>> x = torch.rand(5, 784)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.05)
        True
        >>> kernel.phases(x).shape  # ⟨ω, x⟩, without the frequencies ω (4096, 784)
        torch.Size([5, 4096])

        A field of forces that is the gradient of an energy of 784 inputs:

        >>> kernel = gp_orff.CurlFreeKernel(exact, num_dims=784)
        >>> features = gp_orff.ORFFKernel(
        ...     kernel, gp_orff.Fastfood(4096)
        ... ).feature_operator(x)
        >>> (
        ...     features @ torch.ones(features.shape[-1])
        ... ).shape  # 784 components of 5 vectors
        torch.Size([3920])
    """

    projection = FastfoodProjection


class StructuredOrthogonal(_StructuredRule):
    r"""Random frequencies whose directions are orthogonal in blocks, by fast transforms.

    Directions are the rows of H D₁ H D₂ H D₃ / d′^{3/2}, with the Walsh–Hadamard matrix H and
    random signs D₁, D₂, D₃ (Yu et al. 2016, Section 4). The d inputs are padded to d′ dimensions, a
    power of two that is at least 32. Lengths are independent radii of the kernel's spectral density
    in d′ dimensions. The kernels and the cost are as for `Fastfood`, with three transforms instead
    of two.

    The approximate kernel is slightly biased, because a direction has 2^{3d′} possible values and
    is not exactly uniform. For an RBF kernel the bias is at most 0.003 of the variance, between
    inputs that differ in few coordinates. In return its variance is smaller, as with `Orthogonal`.
    For dot-product kernels of few inputs use `Orthogonal` or `QuasiMonteCarlo`, because vectors on
    a sphere of 32 dimensions do not reduce their variance.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels.
        seed: seed of NumPy's `default_rng`.
        measure: "trace" or "base", as for `Fastfood`.

    Raises:
        ValueError: as for `Fastfood`.
        NotImplementedError: as for `Fastfood`.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=64)
        >>> gp_orff.ORFFKernel(
        ...     kernel, gp_orff.StructuredOrthogonal(128)
        ... ).num_features
        256
    """

    projection = OrthogonalProjection


class FourierFastfood(_StructuredRule):
    r"""Random frequencies from one Fourier transform, for any number of inputs, and biased.

    Directions are the rows of Π F B, with random signs B, the real Fourier (Hartley) matrix F, and
    a permutation Π (Le et al. 2013, Section 6.1, "FFT Fastfood", where F is complex). Lengths are
    independent radii of the kernel's spectral density in d dimensions, without padding.

    Use `Fastfood` or `StructuredOrthogonal` instead, except for comparisons: this rule is a
    heuristic, also in the paper. All frequencies have entries of similar size, so that the kernel
    of two inputs that differ in one coordinate is wrong. For an RBF kernel with many inputs, it is
    about J₀(√2 r) at a distance of r lengthscales instead of exp(−r²/2). This is 0.33 too low at
    r = 2. For a few coordinates, including the first, it is about cos r, which is 0.55 too low.
    Between inputs that differ in many coordinates the error is small.

    Args:
        num_frequencies: D, the number of frequencies of each term of a sum of kernels.
        seed: seed of NumPy's `default_rng`.
        measure: "trace" or "base", as for `Fastfood`.

    Raises:
        ValueError: as for `Fastfood`.
        NotImplementedError: as for `Fastfood`.

    Example:
        >>> import gp_orff, gpytorch
        >>> kernel = gpytorch.kernels.RBFKernel(ard_num_dims=85)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.FourierFastfood(128)).num_features
        256
    """

    projection = FourierProjection
