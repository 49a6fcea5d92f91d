"""What determines a grid: the radius of its cut-off, and the lag that its spacing follows."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy.optimize
import torch
from jaxtyping import Float, Int

from gp_orff.features.frequencies.lattice_nodes import axis_lengthscales
from gp_orff.features.frequencies.rule import LeafSpectrum, TermSpectrum
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture
from gp_orff.kernels.spectra.lattice_sums import first_nonzero, moments_near_zero


def tail_radius(leaf: LeafSpectrum, share: float) -> float:
    """W, the scaled radius beyond which this share of the variance lies."""
    return _last_crossing(leaf.tail, share, start=1e-2)


def correlation_lag(
    leaf: LeafSpectrum, axis: int, share: float, extent: Float[np.ndarray, "d"] | None = None
) -> float:
    """The lag r along an axis beyond which the correlation stays below this share.

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

    heavy = isinstance(spectrum, GammaMixture) and leaf.variance is None
    if extent is None or not heavy:
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


def cell_points(
    term: TermSpectrum, points: Int[np.ndarray, "D d"], spacing: Float[np.ndarray, "d"]
) -> Int[np.ndarray, "k d"]:
    """The lattice points that represent the cell around ω = 0 of a field, one of each pair ±k.

    They are the `points` of the term with zeros at the inputs of the field; none if frequencies
    near zero have no share of its variance.
    """
    field = term.leaves[0] if term.leaves else None
    if field is None or not field.degree:
        return points[:0]
    dims = list(field.dims)
    if moments_near_zero(field.spectrum, torch.from_numpy(spacing[dims])) is None:
        return points[:0]
    cell = points.copy()
    cell[:, dims] = 0
    return np.unique(cell * (first_nonzero(cell) | 1)[:, None], axis=0)


def num_features(
    term: TermSpectrum, points: Int[np.ndarray, "D d"], spacing: Float[np.ndarray, "d"]
) -> int:
    """The number of features of a term on some lattice points, those of its cell included."""
    cell = cell_points(term, points, spacing)
    in_cell = len(term.leaves[0].dims) * (2 * len(cell) - 1) if len(cell) else 0
    return term.rank * (2 * len(points) - (not points.any(-1).all()) + in_cell)


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
