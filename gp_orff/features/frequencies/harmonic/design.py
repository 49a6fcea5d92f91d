"""The waves that a harmonic term needs in a domain, for a tolerance and a number of features."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from gp_orff.features.frequencies.grid_design import MOST_CUT, smallest_tolerance
from gp_orff.features.frequencies.harmonic.draw import HarmonicDraw, HarmonicWaves, depths_of
from gp_orff.features.frequencies.harmonic.rings import Rings
from gp_orff.features.frequencies.rule import LeafSpectrum, Rule, TermSpectrum
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


def harmonic_draws(
    grid: Rule,
    terms: Sequence[TermSpectrum],
    domains: Sequence[Float[np.ndarray, "2 d"]],
    lag: Float[np.ndarray, "d"],
    most: int,
) -> list[HarmonicDraw] | None:
    """The draws with the smallest tolerance, from that of the grid on, that `most` features allow
    for all terms; None if there are none."""

    def attempt(tolerance: float) -> list[tuple[Rings, float, float]] | None:
        found, left = [], most
        for term, domain in zip(terms, domains, strict=True):
            share = term.own(tolerance, MOST_CUT)
            rings = _rings(term.leaves[0], domain, lag, share, left, grid.lengthscale_range)
            if rings is None:
                return None
            found.append((*rings, share))
            left -= 2 * len(rings[0].weights)
        return found

    found, tolerance = attempt(grid.tolerance), grid.tolerance
    if found is None:
        tolerance, found = smallest_tolerance(attempt, grid.tolerance)
    if found is None:
        return None
    draws = []
    for term, domain, (rings, cutoff, share) in zip(terms, domains, found, strict=True):
        (leaf,) = term.leaves
        waves = HarmonicWaves(rings, domain, leaf.dims, leaf.spectrum.sources.side, tolerance)
        options = grid.lengthscale_range, grid.diagonal_correction
        draws.append(HarmonicDraw(waves, cutoff, share, *options))
    return draws


def _rings(
    leaf: LeafSpectrum,
    domain: Float[np.ndarray, "2 d"],
    lag: Float[np.ndarray, "d"],
    tolerance: float,
    most: int,
    lengthscale_range: tuple[float, float],
) -> tuple[Rings, float] | None:
    """The rings for a tolerance, and the cut-off at the present depths; None if too many."""
    shallow, deep = lengthscale_range
    heights = domain[:, leaf.dims[2]]
    present = depths_of(leaf.spectrum, heights)
    shallowest = depths_of(leaf.spectrum, heights, shallow)
    horizontal = float(np.hypot(*lag[list(leaf.dims[:2])]))
    height = float(heights[1] - heights[0])
    longest = deep * present.shortest.max() + 2 * (height + horizontal)
    cutoff = shallowest.cutoff(tolerance)
    waves = (cutoff * horizontal) ** 2 / 16  # about
    if 2 * waves > 4 * most + 1000:
        return None
    rings = Rings.of(cutoff, shallowest, longest, horizontal, tolerance)
    return (rings, present.cutoff(tolerance)) if 2 * len(rings.weights) <= most else None
