"""What determines a grid: the radius of its cut-off, and the lag that its spacing follows."""

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int

from gp_orff.features.draws import LeafSpectrum, TermSpectrum, axis_lengthscales, in_plane
from gp_orff.kernels.lattice_sums import first_nonzero, moments_near_zero

# From a tolerance to the points of a lattice. A grid has two errors, each with one parameter:
#
# - Truncation: the variance at frequencies beyond the cut-off. `tail_radius` gives the scaled
#   radius W beyond which the share of the variance is the tolerance.
# - Aliasing: the sum over a lattice of spacing h is the kernel repeated with period 2π/h. Images
#   that are closer than the longest lag L disturb it. `correlation_lag` gives the lag r at which
#   the correlation has fallen to the tolerance, and h = 2π/(L + r).
#
# `half_space` then enumerates the lattice points within the cut-off of all leaves of a term, one of
# each pair ±k. Under a budget, `smallest_tolerance` bisects in the logarithm of the tolerance: a
# larger tolerance has a smaller cut-off and a larger spacing, thus fewer points.


MOST_CUT = 0.9999  # the largest tolerance: so poor a grid is better than none


class GridBudgetError(ValueError):
    """No grid reaches its tolerance with the number of features allowed."""


@dataclass(frozen=True)
class Region:
    """The frequencies with radius(ω) ≤ level."""

    radius: Callable[[Float[np.ndarray, "D d"]], Float[np.ndarray, "D"]]
    level: float


class LatticePoints(NamedTuple):
    """The points of a lattice that a term uses, once for each direction of B(ω)."""

    indices: Int[np.ndarray, "D d"]
    direction: Int[np.ndarray, "D"]  # an axis of the first leaf, or `ALONG_FREQUENCY`

    @classmethod
    def of(cls, blocks: Mapping[int, Int[np.ndarray, "m d"]]) -> "LatticePoints":
        """The points of every direction."""
        direction = [np.full(len(points), axis) for axis, points in blocks.items()]
        return cls(np.concatenate(list(blocks.values())), np.concatenate(direction))

    @property
    def num_columns(self) -> int:
        """The number of cosines and sines."""
        return len(self.indices) + int(self.indices.any(-1).sum())


def half_space(
    regions: Sequence[tuple[LeafSpectrum, Region]],
    spacing: Float[np.ndarray, "d"],
    most: float,
    largest_index: Sequence[int] | None,
) -> Int[np.ndarray, "D d"] | None:
    """One of each pair ±k of lattice points in the regions of all leaves; None if far more than
    `most`."""
    counts = np.zeros(len(spacing), dtype=int)
    for leaf, region in regions:
        with np.errstate(divide="ignore"):  # correlations that barely fall: a spacing of zero
            steps = region.level / region.radius(unit_steps(leaf, spacing))
        counts[list(leaf.dims)] = np.minimum(steps, 1e9).astype(int)  # too many in any case
    if largest_index is not None:
        counts = np.minimum(counts, largest_index)
    # An ellipsoid fills π/6 of its box in three dimensions, and half of it is enumerated:
    # a box much larger than the budget cannot fit, and would take much memory.
    if np.prod(2.0 * counts + 1) > 8 * most + 1000:  # the whole box around the region
        return None
    ranges = [np.arange(-m, m + 1) for m in counts]
    # Half of the box at once; points with a zero first coordinate are sorted out by
    # `first_nonzero`.
    ranges[0] = ranges[0][counts[0] :]  # the first coordinate is never negative
    points = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(counts))
    inside = first_nonzero(points) >= 0
    for leaf, region in regions:
        indices = points[:, leaf.dims]
        inside &= region.radius(indices * spacing[list(leaf.dims)]) <= region.level
        if leaf.degree:  # B(0) = 0
            inside &= indices.any(-1)
    return points[inside]


def unit_steps(leaf: LeafSpectrum, spacing: Float[np.ndarray, "d"]) -> Float[np.ndarray, "k k"]:
    """The first nonzero frequency of the lattice along each input of a leaf."""
    return np.diag(spacing[list(leaf.dims)])


def tail_radius(leaf: LeafSpectrum, share: float) -> float:
    """W, the scaled radius beyond which this share of the variance lies."""
    start = 1e-2
    # Doubling the radius brackets the root for any scale of the spectrum, between 10⁻² and 2³⁹
    # times it.
    steps = bisect.bisect_left(range(40), True, key=lambda i: leaf.tail(start * 2.0**i) <= share)
    if not steps:
        return start
    high = start * 2.0**steps
    if steps == 40:
        return math.inf
    return scipy.optimize.brentq(lambda p: leaf.tail(p) - share, 0.5 * high, high, rtol=1e-6)


def correlation_lag(
    leaf: LeafSpectrum,
    axis: int,
    share: float,
    extent: Float[np.ndarray, "d"] | None = None,
    most: float = math.inf,
) -> float:
    """The lag r along an axis beyond which the correlation stays below this share; `most` if the
    correlation there is larger.

    Where correlations fall like a power of the lag, the frequencies near zero take up the constant
    part of the error (see `weight_at_zero` and `moments_near_zero`). If the extent of the data is
    given, the second difference k(r) − 2k(r + L) + k(r + 2L) then takes the place of the
    correlation, L being the longest extent in lengthscales.
    """
    spectrum = leaf.spectrum
    scales = axis_lengthscales(spectrum, leaf.num_dims)
    scale = scales[axis]

    def correlation(r: float) -> float:
        return leaf.correlation(r * scale, axis)

    bound, heavy = correlation, spectrum.is_mixture and leaf.variance is None
    # The frequencies near zero take up a constant error. What remains is how the image varies over
    # the data, which a second difference measures.
    if extent is not None and heavy:
        longest = (extent[list(leaf.dims)] / scales).max()

        def bound(r: float) -> float:
            return correlation(r) - 2 * correlation(r + longest) + correlation(r + 2 * longest)

    if most < math.inf and bound(most / scale) > share:
        return most
    return scale * _last_crossing(bound, share)


def _last_crossing(decreasing: Callable[[float], float], level: float) -> float:
    """The largest argument at which a function that falls to zero has this value; at least 0.01.

    It is infinite beyond 2³⁹ times that.
    """
    points = 1e-2 * 2.0 ** np.arange(0, 40)
    # The last point above the level, not the first below: a correlation may oscillate.
    low = next((p for p in points[::-1] if decreasing(p) > level), None)
    if low is None:
        return points[0]
    if low == points[-1]:
        return math.inf
    return scipy.optimize.brentq(lambda p: decreasing(p) - level, low, 2 * low, rtol=1e-6)


def cell_points(
    term: TermSpectrum,
    points: Int[np.ndarray, "D d"],
    spacing: Float[np.ndarray, "d"],
    constant: Bool[np.ndarray, "d"],
) -> Int[np.ndarray, "k d"]:
    """The lattice points that represent the cell around ω = 0 of a field, one of each pair ±k.

    They are the `points` of the term with zeros at the inputs of the field; none if frequencies
    near zero have no share of its variance.
    """
    field = in_plane(term.leaves[0], constant) if term.leaves else None
    if field is None or not field.degree:
        return points[:0]
    dims = list(field.dims)
    if moments_near_zero(field.spectrum, torch.from_numpy(spacing[dims])) is None:
        return points[:0]
    cell = points.copy()
    # The spectral density of a field at ω = 0 vanishes, or is not smooth there: the variance of the
    # cell around zero is represented by its moments, at frequencies that are zero in the inputs of
    # the field.
    cell[:, dims] = 0
    return np.unique(cell * (first_nonzero(cell) | 1)[:, None], axis=0)


def num_features(
    term: TermSpectrum,
    points: LatticePoints,
    spacing: Float[np.ndarray, "d"],
    constant: Bool[np.ndarray, "d"],
) -> int:
    """The number of features of a term on some lattice points, those of its cell included."""
    cell = cell_points(term, points.indices, spacing, constant)
    if not len(cell):
        return term.rank * points.num_columns
    axes = np.count_nonzero(~constant[list(term.leaves[0].dims)])
    return term.rank * (points.num_columns + axes * (2 * len(cell) - 1))


def axes_of(terms: Sequence[TermSpectrum]) -> Iterator[tuple[LeafSpectrum, int, int]]:
    """Every axis of every leaf with a density: the leaf, the axis within it, the input column."""
    for term in terms:
        for leaf in term.leaves:
            if leaf.spectrum.is_line:  # which a lattice does not depend on
                continue
            for axis, dim in enumerate(leaf.dims):
                yield leaf, axis, dim


def lengthscales(terms: Sequence[TermSpectrum], num_inputs: int) -> Float[np.ndarray, "d"]:
    """The largest lengthscale of all leaves along each input."""
    largest = np.zeros(num_inputs)
    for leaf, axis, dim in axes_of(terms):
        largest[dim] = max(largest[dim], axis_lengthscales(leaf.spectrum, leaf.num_dims)[axis])
    return largest


def require_separate_inputs(term: TermSpectrum) -> None:
    """Raise a NotImplementedError for a product of kernels that share an input."""
    dims = [dim for leaf in term.leaves for dim in leaf.dims]
    if len(set(dims)) != len(dims):
        raise NotImplementedError(
            "Grid expects the kernels of a product to depend on different inputs, got columns "
            f"{dims}; use a random rule such as gp_orff.QuasiMonteCarlo"
        )


def smallest_tolerance(
    attempt: Callable[[float], tuple | None], tolerance: float
) -> tuple[float, tuple | None]:
    """The smallest tolerance, from the given one on, for which an attempt succeeds, and its result;
    None if none does."""
    low, high = math.log(tolerance), math.log(MOST_CUT)
    best = attempt(MOST_CUT)
    while best is not None and high - low > 0.02:
        middle = 0.5 * (low + high)
        design = attempt(math.exp(middle))
        if design is None:
            low = middle
        else:
            high, best = middle, design
    return math.exp(high), best
