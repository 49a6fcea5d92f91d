"""Copies: records at one place with equal values, which are one observation."""

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import Observations
from gp_orff.data.repeats.merged import site_labels
from gp_orff.data.repeats.sites import sites
from gp_orff.data.sources import InMemory
from gp_orff.data.survey import DataWarning, Survey

_SAME = 1e-5  # over the extent of most points, or of values: as close as those of copies
_FEW = 0.1  # the share of the records: fewer copies change little, and stay unless asked for
_ROUNDING = 1e-9  # over the range of y: smaller differences are rounding of the machine
_MOST, _EXCESS = 0.5, 30.0  # equal pairs of copies: of all within sites, or over those by rounding
_ELSEWHERE = 0.1  # the largest share of equal pairs across sites, over that within


def without_copies(data: Dataset) -> Dataset:
    """Data in memory of which records with equal values at one place count once.

    One place is what lies within `data.repeats.distance`; if that is None, within 10⁻⁵ of the
    extent of most points along each axis, where more than a tenth of the records are copies: fewer
    change little. If it is 0, nothing changes.

    Continuous noise never gives equal values: such records are copies, and would tell that there is
    no noise. Equal are values within 10⁻⁵ of the range between their 5 % and 95 % quantiles, such
    as vectors that a projection turned, each by the angle at its place. Values may be equal for
    other reasons, as those of a sensor that rounds, or the zeros of a rain gauge. Records are
    copies only if at least half of the pairs within sites are equal, and a hundred times fewer of
    the pairs across sites. Of copies, the first of largest weight remains. A `DataWarning` tells
    how many were left out.

    Args:
        data: observations in memory.

    Example:
        >>> import torch, warnings
        >>> from gp_orff.data.dataset import Dataset
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.repeats.copies import without_copies
        >>> x = torch.tensor([[0.0], [1.0], [1e-6], [3.0]]).double()
        >>> data = Dataset.in_memory(read(x, torch.tensor([7.1, 7.4, 7.1, 7.9]), 1, Options()))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     data = without_copies(data)
        >>> data.survey.num_points, data.repeats.copies
        (3, 1)
    """
    distance = data.repeats.distance
    if distance == 0:
        return data
    bulk = data.survey.distances.bulk
    reach = tuple((_SAME * bulk).tolist()) if distance is None else (distance,) * data.num_inputs
    parts = list(data.visit())
    kept = [part.take(rows) for part in parts if len(rows := _distinct(part, reach))]
    copies = sum(map(len, parts)) - sum(map(len, kept))
    if copies <= (_FEW * data.survey.num_points if distance is None else 0):
        return data
    repeats = replace(data.repeats, copies=copies)
    warnings.warn(repeats.note, DataWarning, stacklevel=2)
    sources, survey = (InMemory(kept),), Survey.of(iter(kept))
    return replace(data, sources=sources, survey=survey, repeats=repeats)


def _distinct(part: Observations, reach: tuple[float, ...]) -> Int[torch.Tensor, "m"]:
    """The rows that are left without copies, in their order."""
    y, labels = part.y.cpu().numpy(), site_labels(part, reach)
    records = sites(np.column_stack([labels, y]), (0.0, *_rounding(y)))
    order = np.arange(len(part))
    if part.weight is not None:
        order = np.argsort(-part.weight.cpu().numpy(), kind="stable")
    rows = np.sort(order[np.unique(records[order], return_index=True)[1]])
    if len(rows) < len(part) and not _are_copies(records, y, labels):
        rows = np.arange(len(part))
    return torch.from_numpy(rows).to(part.x.device)


def _rounding(y: Float[np.ndarray, "n v"]) -> tuple[float, ...]:
    """The differences of values that count as equal."""
    low, high = np.quantile(y, [0.05, 0.95], axis=0)
    return tuple((_SAME * (high - low)).tolist())


def _are_copies(
    records: Int[np.ndarray, "n"], y: Float[np.ndarray, "n v"], labels: Int[np.ndarray, "n"]
) -> bool:
    """Whether equal values at a site are copies; `records` numbers pairs of a site and a value."""
    values = sites(y, _rounding(y))
    equal, within, same = (_pairs(numbers) for numbers in (records, labels, values))
    across = _pairs(np.zeros(len(labels), dtype=int)) - within
    if not across or (same - equal) / across > _ELSEWHERE * equal / within:
        return False
    return equal >= min(_MOST, _EXCESS * _equal_by_rounding(y, labels)) * within


def _pairs(numbers: Int[np.ndarray, "n"]) -> float:
    """The number of pairs of equal numbers."""
    counts = np.bincount(numbers).astype(float)
    return float((counts * (counts - 1) / 2).sum())


def _equal_by_rounding(y: Float[np.ndarray, "n v"], labels: Int[np.ndarray, "n"]) -> float:
    """The probability that two records of a site are equal if their values are rounded.

    Numbers of standard deviation s that are rounded to steps q are equal with probability
    q / (2 √π s).
    """
    _, site, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.stack([np.bincount(site, column) / counts for column in y.T], axis=-1)
    scatter = np.sqrt(np.square(y - means[site]).sum(0) / (len(y) - len(counts)))
    chances = [
        _step(column) / (2 * math.sqrt(math.pi) * s) if s else 1.0
        for column, s in zip(y.T, scatter, strict=True)
    ]
    return math.prod(min(1.0, chance) for chance in chances)


def _step(values: Float[np.ndarray, "n"]) -> float:
    """The smallest difference of different values."""
    gaps = np.diff(np.unique(values))
    gaps = gaps[gaps > _ROUNDING * np.ptp(values)]
    return float(gaps.min()) if len(gaps) else 0.0
