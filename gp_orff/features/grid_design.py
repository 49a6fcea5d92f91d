"""The design of a frequency grid: its cut-off, its spacing and its points."""

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

# The points of a lattice follow from a tolerance. A grid has two errors, each with one parameter:
#
# - Truncation is the variance at frequencies beyond the cut-off. `tail_radius` returns the scaled
#   radius W. The fraction of the variance beyond W equals the tolerance.
# - Aliasing is the error from periodic images, because a sum over a lattice of spacing h repeats
#   the kernel with period 2π/h. Images closer than the longest lag L change the kernel within the
#   domain. `correlation_lag` returns the lag r at which the correlation equals the tolerance, and
#   h = 2π/(L + r).
#
# `half_space` lists the lattice points within the cut-off of all leaves of a term, one of each pair
# ±k. If the number of features is limited, `smallest_tolerance` bisects in the logarithm of the
# tolerance. A larger tolerance has a smaller cut-off and a larger spacing, and thus fewer points.


MOST_CUT = 0.9999  # the largest tolerance; even such a coarse grid is better than none


class GridBudgetError(ValueError):
    """Raised if no grid reaches its tolerance with the allowed number of features."""


@dataclass(frozen=True)
class Region:
    """The frequencies with radius(ω) ≤ level."""

    radius: Callable[[Float[np.ndarray, "D d"]], Float[np.ndarray, "D"]]
    level: float


class LatticePoints(NamedTuple):
    """The lattice points of a term, listed once for each direction of B(ω).

    Attributes:
        indices: the integer vectors k of the points, (D, d).
        direction: the direction of each point, (D,): an axis of the first leaf, from 0, or
            `ALONG_FREQUENCY`.
    """

    indices: Int[np.ndarray, "D d"]
    direction: Int[np.ndarray, "D"]

    @classmethod
    def of(cls, blocks: Mapping[int, Int[np.ndarray, "m d"]]) -> "LatticePoints":
        """Return the points of all directions; `blocks` maps each direction to its points."""
        direction = [np.full(len(points), axis) for axis, points in blocks.items()]
        return cls(np.concatenate(list(blocks.values())), np.concatenate(direction))

    @property
    def num_columns(self) -> int:
        """The number of cosines and sines; ω = 0 has no sine."""
        return len(self.indices) + int(self.indices.any(-1).sum())


def half_space(
    regions: Sequence[tuple[LeafSpectrum, Region]],
    spacing: Float[np.ndarray, "d"],
    most: float,
    largest_index: Sequence[int] | None,
) -> Int[np.ndarray, "D d"] | None:
    """Return one of each pair ±k of lattice points in the regions of all leaves, (D, d).

    Args:
        regions: the leaves of a term, each with the region of its frequencies.
        spacing: h, (d,), in radians per unit of each input.
        most: the approximate largest number of points. The result is None if a box around the
            region has far more.
        largest_index: the largest |k_i| along each input; None means no limit.
    """
    counts = np.zeros(len(spacing), dtype=int)
    for leaf, region in regions:
        with np.errstate(divide="ignore"):  # the spacing is zero if correlations barely decay
            steps = region.level / region.radius(unit_steps(leaf, spacing))
        counts[list(leaf.dims)] = np.minimum(steps, 1e9).astype(int)  # 1e9 exceeds every limit
    if largest_index is not None:
        counts = np.minimum(counts, largest_index)
    # An ellipsoid fills π/6 of its box in three dimensions, and the result contains half of it. A
    # box far larger than `most` therefore has too many points, and listing them would need much
    # memory.
    if np.prod(2.0 * counts + 1) > 8 * most + 1000:  # the whole box around the region
        return None
    ranges = [np.arange(-m, m + 1) for m in counts]
    # The first coordinate is never negative. If it is zero, `first_nonzero` selects one of ±k.
    ranges[0] = ranges[0][counts[0] :]
    points = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(counts))
    inside = first_nonzero(points) >= 0
    for leaf, region in regions:
        indices = points[:, leaf.dims]
        inside &= region.radius(indices * spacing[list(leaf.dims)]) <= region.level
        if leaf.degree:  # B(0) = 0
            inside &= indices.any(-1)
    return points[inside]


def unit_steps(leaf: LeafSpectrum, spacing: Float[np.ndarray, "d"]) -> Float[np.ndarray, "k k"]:
    """Return the first nonzero frequency of the lattice along each input of a leaf, one per row."""
    return np.diag(spacing[list(leaf.dims)])


def tail_radius(leaf: LeafSpectrum, share: float) -> float:
    """Return the scaled radius W beyond which the fraction `share` of the variance lies.

    The result is infinite if W exceeds 2³⁹ · 0.01.
    """
    start = 1e-2
    # The radius is doubled until it brackets the root, from 0.01 to at most 2³⁹ · 0.01.
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
    """Return the lag r along an axis beyond which the correlation remains below `share`.

    For scale mixtures, the frequencies near zero absorb the constant part of the aliasing error
    (see `weight_at_zero` and `moments_near_zero`). If `extent` is an array, the second difference
    k(r) − 2k(r + L) + k(r + 2L) therefore replaces the correlation, where L is the longest extent
    in lengthscales.

    Args:
        leaf: the spectrum of a leaf.
        axis: the axis of the leaf, from 0.
        share: the correlation, as a fraction of k(0).
        extent: the extent of the data along each input, (d,), in the unit of that input.
        most: the largest result, which is returned if the correlation at this lag exceeds `share`.
    """
    spectrum = leaf.spectrum
    scales = axis_lengthscales(spectrum, leaf.num_dims)
    scale = scales[axis]

    def correlation(r: float) -> float:
        return leaf.correlation(r * scale, axis)

    bound, heavy = correlation, spectrum.is_mixture and leaf.variance is None
    # The frequencies near zero absorb a constant error. The remaining error is the variation of the
    # image over the data, which a second difference measures.
    if extent is not None and heavy:
        longest = (extent[list(leaf.dims)] / scales).max()

        def bound(r: float) -> float:
            return correlation(r) - 2 * correlation(r + longest) + correlation(r + 2 * longest)

    if most < math.inf and bound(most / scale) > share:
        return most
    return scale * _last_crossing(bound, share)


def _last_crossing(decreasing: Callable[[float], float], level: float) -> float:
    """Return the largest argument ≥ 0.01 at which a function that decays to zero equals `level`.

    The result is infinite if the argument exceeds 2³⁹ · 0.01.
    """
    points = 1e-2 * 2.0 ** np.arange(0, 40)
    # A correlation may oscillate. The search therefore starts at the last point above the level.
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
    """Return the lattice points of the cell around ω = 0 of a field, one of each pair ±k.

    They are the `points` of the term with k = 0 along the inputs of the field. There are none if
    frequencies near zero contribute nothing to the variance of the field.
    """
    field = in_plane(term.leaves[0], constant) if term.leaves else None
    if field is None or not field.degree:
        return points[:0]
    dims = list(field.dims)
    if moments_near_zero(field.spectrum, torch.from_numpy(spacing[dims])) is None:
        return points[:0]
    cell = points.copy()
    # The spectral density of a field is zero or not smooth at ω = 0. Moments therefore represent
    # the variance of the cell around zero, with frequencies that are zero along the inputs of the
    # field.
    cell[:, dims] = 0
    return np.unique(cell * (first_nonzero(cell) | 1)[:, None], axis=0)


def num_features(
    term: TermSpectrum,
    points: LatticePoints,
    spacing: Float[np.ndarray, "d"],
    constant: Bool[np.ndarray, "d"],
) -> int:
    """Return the number of features of a term on `points` and on its cell around ω = 0."""
    cell = cell_points(term, points.indices, spacing, constant)
    if not len(cell):
        return term.rank * points.num_columns
    axes = np.count_nonzero(~constant[list(term.leaves[0].dims)])
    return term.rank * (points.num_columns + axes * (2 * len(cell) - 1))


def axes_of(terms: Sequence[TermSpectrum]) -> Iterator[tuple[LeafSpectrum, int, int]]:
    """Yield the leaf, the axis in the leaf and the input column of every axis with a density."""
    for term in terms:
        for leaf in term.leaves:
            if leaf.spectrum.is_line:  # a lattice does not depend on lines
                continue
            for axis, dim in enumerate(leaf.dims):
                yield leaf, axis, dim


def lengthscales(terms: Sequence[TermSpectrum], num_inputs: int) -> Float[np.ndarray, "d"]:
    """Return the largest lengthscale of all leaves along each input, (d,)."""
    largest = np.zeros(num_inputs)
    for leaf, axis, dim in axes_of(terms):
        largest[dim] = max(largest[dim], axis_lengthscales(leaf.spectrum, leaf.num_dims)[axis])
    return largest


def require_separate_inputs(term: TermSpectrum) -> None:
    """Raise an error if two kernels of a product depend on the same input.

    Raises:
        NotImplementedError: two kernels of a product depend on the same input.
    """
    dims = [dim for leaf in term.leaves for dim in leaf.dims]
    if len(set(dims)) != len(dims):
        raise NotImplementedError(
            "Grid expects the kernels of a product to depend on different input columns, got "
            f"{dims}; use a random rule such as gp_orff.QuasiMonteCarlo"
        )


def smallest_tolerance(
    attempt: Callable[[float], tuple | None], tolerance: float
) -> tuple[float, tuple | None]:
    """Return the smallest tolerance for which an attempt succeeds, and the result of the attempt.

    The result is None if no attempt succeeds.

    Args:
        attempt: a function of the tolerance. It returns None if the tolerance is too small.
        tolerance: the lower limit of the search.
    """
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
