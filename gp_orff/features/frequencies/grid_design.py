"""Where the density ends and where images begin: cut-off and spacing of a grid."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.optimize
from jaxtyping import Float, Int

from gp_orff.features.frequencies.lattice_nodes import unit_radii
from gp_orff.features.frequencies.rule import LeafSpectrum, TermSpectrum
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture


def tail_radius(leaf: LeafSpectrum, share: float) -> float:
    """W beyond which that share of the variance lies."""
    return _last_crossing(
        lambda w: leaf.spectrum.tail(w, leaf.degree, leaf.num_dims), share, start=1e-2
    )


def correlation_lag(
    leaf: LeafSpectrum, axis: int, share: float, extent: Float[np.ndarray, "d"] | None = None
) -> float:
    """The lag along an axis from which on the correlation stays below that share.

    Given the extent of the data, where the kernel is known up to a constant (see
    `weight_at_zero`), from which on two images do: k(r) − 2k(r + L) + k(r + 2L), L the longest
    extent in lengthscales.
    """
    spectrum = leaf.spectrum
    scales = unit_radii(spectrum, leaf.num_dims)
    scale = scales[axis]

    def correlation(r: float) -> float:
        return spectrum.correlation(r * scale, axis, leaf.degree)

    if extent is None or leaf.degree or not isinstance(spectrum, GammaMixture):
        return scale * _last_crossing(correlation, share, start=1e-2)
    longest = (extent[list(leaf.dims)] / scales).max()
    return scale * _last_crossing(
        lambda r: correlation(r) - 2 * correlation(r + longest) + correlation(r + 2 * longest),
        share,
        start=1e-2,
    )


def _last_crossing(decreasing: Callable[[float], float], level: float, start: float) -> float:
    """Where a function that falls to zero passes a level for the last time."""
    points = start * 2.0 ** np.arange(0, 40)
    above = [p for p in points if decreasing(p) > level]
    if not above:
        return start
    low = above[-1]
    if low == points[-1]:
        return math.inf
    return scipy.optimize.brentq(lambda p: decreasing(p) - level, low, 2 * low, rtol=1e-6)


def axes_of(terms: Sequence[TermSpectrum]):
    for term in terms:
        for leaf in term.leaves:
            for axis, dim in enumerate(leaf.dims):
                yield leaf, axis, dim


def lengthscales(terms: Sequence[TermSpectrum], num_inputs: int) -> Float[np.ndarray, "d"]:
    """The largest along each input column."""
    found = np.zeros(num_inputs)
    for leaf, axis, dim in axes_of(terms):
        found[dim] = max(found[dim], unit_radii(leaf.spectrum, leaf.num_dims)[axis])
    return found


def first_nonzero(points: Int[np.ndarray, "D d"]) -> Int[np.ndarray, "D"]:
    """The sign of the first coordinate that is not zero."""
    sign = np.zeros(len(points), dtype=int)
    for column in points.T:
        sign = np.where(sign == 0, np.sign(column), sign)
    return sign


def require_separate_inputs(term: TermSpectrum) -> None:
    seen = [dim for leaf in term.leaves for dim in leaf.dims]
    if len(set(seen)) != len(seen):
        raise NotImplementedError(
            "Grid expects the kernels of a product to see different inputs, got columns "
            f"{seen}; use a random rule such as gp_orff.QuasiMonteCarlo"
        )
