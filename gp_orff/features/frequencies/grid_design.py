"""What determines a grid: the radius of its cut-off, and the lag that its spacing follows."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.optimize
from jaxtyping import Float, Int

from gp_orff.features.frequencies.lattice_nodes import axis_lengthscales
from gp_orff.features.frequencies.rule import LeafSpectrum, TermSpectrum
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture
from gp_orff.kernels.spectra.lattice_sums import first_nonzero

_MOST_STEPS = 1e9  # along an axis; too many in any case


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
        with np.errstate(divide="ignore"):  # correlations that hardly fall: a spacing of zero
            steps = region.level / region.radius(unit_steps(leaf, spacing))
        counts[list(leaf.dims)] = np.minimum(steps, _MOST_STEPS).astype(int)
    if largest_index is not None:
        counts = np.minimum(counts, largest_index)
    if np.prod(2.0 * counts + 1) > 8 * most + 1000:  # the whole box around the region
        return None
    ranges = [np.arange(-m, m + 1) for m in counts]
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
    return _last_crossing(leaf.tail, share, start=1e-2)


def correlation_lag(
    leaf: LeafSpectrum, axis: int, share: float, extent: Float[np.ndarray, "d"] | None = None
) -> float:
    """The lag r along an axis beyond which the correlation stays below this share.

    Some grids represent k up to a constant only (see `weight_at_zero`). For their spectra, and if
    the extent of the data is given, the second difference k(r) − 2k(r + L) + k(r + 2L) takes the
    place of the correlation, L being the longest extent in lengthscales.
    """
    spectrum = leaf.spectrum
    scales = axis_lengthscales(spectrum, leaf.num_dims)
    scale = scales[axis]

    def correlation(r: float) -> float:
        return leaf.correlation(r * scale, axis)

    if extent is None or not leaf.is_constant or not isinstance(spectrum, GammaMixture):
        return scale * _last_crossing(correlation, share, start=1e-2)
    longest = (extent[list(leaf.dims)] / scales).max()
    return scale * _last_crossing(
        lambda r: correlation(r) - 2 * correlation(r + longest) + correlation(r + 2 * longest),
        share,
        start=1e-2,
    )


def _last_crossing(decreasing: Callable[[float], float], level: float, start: float) -> float:
    """The largest argument at which a function that falls to zero has this value; at least `start`.

    It is infinite beyond 2³⁹ · start.
    """
    points = start * 2.0 ** np.arange(0, 40)
    above = [p for p in points if decreasing(p) > level]
    if not above:
        return start
    low = above[-1]
    if low == points[-1]:
        return math.inf
    return scipy.optimize.brentq(lambda p: decreasing(p) - level, low, 2 * low, rtol=1e-6)


def axes_of(terms: Sequence[TermSpectrum]) -> Iterator[tuple[LeafSpectrum, int, int]]:
    """Every axis of every leaf: the leaf, the axis within it, the input column."""
    for term in terms:
        for leaf in term.leaves:
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
