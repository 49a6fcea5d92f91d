"""The frequencies of sums of kernels of which some are harmonic."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from gp_orff.features.columns import Columns, side_by_side
from gp_orff.features.frequencies.grid_design import GridBudgetError
from gp_orff.features.frequencies.harmonic.design import harmonic_draws, is_harmonic
from gp_orff.features.frequencies.rule import Draw, Rule, TermSpectrum


class SharedFrequencies(nn.Module):
    """The lattice of the stationary terms of a sum and the waves of its harmonic terms."""

    def __init__(self, parts: Sequence[nn.Module]):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def columns(self) -> Columns:
        """The columns of all parts, one part after the other."""
        return side_by_side([part.columns() for part in self.parts])[0]

    def outside(self, x: Float[Tensor, "*b n d"]) -> Bool[Tensor, "*b n"]:
        """Which of the points x are outside the domain of any part."""
        return torch.stack([part.outside(x) for part in self.parts]).any(0)

    def check(self, x: Float[Tensor, "*b n d"]) -> None:
        """Check that all points x are inside the domains; raises a ValueError otherwise."""
        for part in self.parts:
            part.check(x)

    @property
    def tolerance(self) -> Float[Tensor, ""]:
        """The share of the variance for which the frequencies were made."""
        return torch.stack([part.tolerance for part in self.parts]).max()

    @property
    def constant(self) -> Bool[Tensor, "d"]:
        """The inputs that are constant, along which frequencies are summed."""
        return torch.stack([part.constant for part in self.parts]).any(0)


def draw_with_harmonic(
    grid: Rule,
    terms: Sequence[TermSpectrum],
    domain: Float[np.ndarray, "2 d"],
    lag: Float[np.ndarray, "d"],
    most: int,
) -> list[Draw]:
    """The draws of all terms by a `Grid`, in order, with shared columns.

    Args:
        grid: the specification.
        terms: the spectra, of which some are harmonic.
        domain: the lowest and highest value of every input, with margins where it is chosen.
        lag: the longest lag from a datum along every input.
        most: the number of features allowed; harmonic terms get up to half of them in a sum.

    Raises:
        GridBudgetError: no waves within the number of features.
        ValueError: neither data nor a domain, or a domain that contains sources.
    """
    if not np.isfinite(domain).all():
        raise ValueError(
            "Grid expects the extent of the data for a HarmonicKernel, got only a spacing; use "
            "Grid.for_data(x)"
        )
    others = [term for term in terms if not is_harmonic(term)]
    harmonic = [term for term in terms if is_harmonic(term)]
    share = most // 2 if any(term.leaves for term in others) else most - 3 * len(others)
    domains = [_above_sources(grid, term, domain) for term in harmonic]
    draws = harmonic_draws(grid, harmonic, domains, lag, share)
    if draws is None:
        raise GridBudgetError(
            f"expected a HarmonicKernel for which {share} features suffice, got sources so close "
            "to the readings that they hold next to nothing of the variance; give a larger "
            "max_features, a smaller domain, or a larger depth"
        )
    if others:
        left = most - sum(draw.num_columns for draw in draws)
        budget = None if grid.max_features is None else max(left, 1)
        rest = replace(grid, max_features=budget).draw(others)
    else:
        rest = []
    parts = [*(draw.lattice for draw in rest[:1]), *(draw.lattice for draw in draws)]
    for draw in (*rest, *draws):
        draw.joint = SharedFrequencies(parts) if len(parts) > 1 else None
    remaining, waves = iter(rest), iter(draws)
    return [next(waves if is_harmonic(term) else remaining) for term in terms]


def _above_sources(
    grid: Rule, term: TermSpectrum, domain: Float[np.ndarray, "2 d"]
) -> Float[np.ndarray, "2 d"]:
    """The domain with heights on the side of the points: those of the data without a margin, and
    at most half the way to the sources where a wider domain is asked for."""
    domain, (leaf,) = domain.copy(), term.leaves
    vertical = leaf.dims[2]
    data = None if grid.data is None else np.array(grid.data).T[:, vertical]
    if grid.domain is None:
        domain[:, vertical] = data
        return domain
    sources = leaf.spectrum.sources
    end, side = (0 if sources.side > 0 else 1), sources.side
    distance = sources.distances(torch.from_numpy(domain[end, vertical, None])).min().item()
    if data is None and distance <= 0:
        raise ValueError(
            "Grid expects a domain on the side of the sources where the points are, got one "
            f"that reaches {-distance:.6g} beyond the nearest sources; give a smaller domain"
        )
    if data is not None:
        limit = sources.distances(torch.from_numpy(data[end, None])).min().item()
        domain[end, vertical] += side * max(0.5 * limit - distance, 0.0)
    return domain
