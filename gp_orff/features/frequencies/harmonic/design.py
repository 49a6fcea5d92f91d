"""The waves that a harmonic term needs in a domain, for a tolerance and a number of features."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from gp_orff.features.frequencies.grid_design import smallest_tolerance
from gp_orff.features.frequencies.harmonic.draw import HarmonicDraw, HarmonicWaves, depths_of
from gp_orff.features.frequencies.harmonic.rings import Rings
from gp_orff.features.frequencies.rule import TermSpectrum
from gp_orff.kernels.harmonic import HarmonicSpectrum


def is_harmonic(term: TermSpectrum) -> bool:
    """Whether a term is that of a `HarmonicKernel`.

    Raises:
        NotImplementedError: a product with another kernel.
    """
    kinds = [isinstance(leaf.spectrum, HarmonicSpectrum) for leaf in term.leaves]
    if any(kinds) and len(kinds) > 1:
        raise NotImplementedError(
            "features of a HarmonicKernel expect a term without products, got a product with "
            "another kernel; use a sum, or the exact kernel"
        )
    return any(kinds)


def harmonic_draw(
    term: TermSpectrum,
    domain: Float[np.ndarray, "2 d"],
    lag: Float[np.ndarray, "d"],
    tolerance: float,
    most: int,
    lengthscale_range: tuple[float, float],
    diagonal_correction: bool,
) -> HarmonicDraw | None:
    """The draw with the smallest tolerance from `tolerance` on that `most` features allow; None
    if there is none."""
    (leaf,) = term.leaves
    sides = [sources.side for sources in leaf.spectrum.sources]
    heights = domain[:, leaf.dims[2]]

    def attempt(share: float) -> tuple[Rings, float] | None:
        return _rings(leaf.spectrum, heights, leaf.dims, lag, share, most, lengthscale_range)

    found, share = attempt(tolerance), tolerance
    if found is None:
        share, found = smallest_tolerance(attempt, tolerance)
    if found is None:
        return None
    rings, cutoff = found
    waves = HarmonicWaves(rings, domain, leaf.dims, sides, share)
    return HarmonicDraw(waves, cutoff, lengthscale_range, diagonal_correction)


def _rings(
    spectrum: HarmonicSpectrum,
    heights: Float[np.ndarray, "2"],
    dims: Sequence[int],
    lag: Float[np.ndarray, "d"],
    tolerance: float,
    most: int,
    lengthscale_range: tuple[float, float],
) -> tuple[Rings, float] | None:
    """The rings for a tolerance, and the cut-off at the present depths; None if too many."""
    shallow, deep = lengthscale_range
    present = depths_of(spectrum, heights)
    shallowest = depths_of(spectrum, heights, shallow)
    horizontal = float(np.hypot(*lag[list(dims[:2])]))
    height = float(heights[1] - heights[0])
    longest = deep * present.shortest.max() + 2 * (height + horizontal)
    cutoff = shallowest.cutoff(tolerance)
    waves = (cutoff * horizontal) ** 2 / 16  # about
    if 2 * len(spectrum.sources) * waves > 4 * most + 1000:
        return None
    rings = Rings.of(cutoff, shallowest, longest, horizontal, tolerance)
    count = 2 * len(rings.weights) * len(spectrum.sources)
    return (rings, present.cutoff(tolerance)) if count <= most else None
