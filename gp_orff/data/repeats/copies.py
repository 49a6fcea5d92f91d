"""Copies: records at one place with equal values, which are one observation."""

import math
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import Observations
from gp_orff.data.repeats.merged import site_labels
from gp_orff.data.repeats.sites import sites
from gp_orff.data.sources import InMemory
from gp_orff.data.survey import Survey

_SAME = 1e-5  # over the extent of most points: as close as the positions of copies
_ROUNDING = 1e-9  # over the range of y: smaller differences are rounding of the machine
_FEW = 0.1  # the share of the records: fewer copies change little, and stay unless asked for
_CHANCE = 0.01  # the share of pairs that have equal values by chance, if they are to be copies


def without_copies(data: Dataset) -> Dataset:
    """Data in memory of which records with equal values at one place count once.

    One place is what lies within `data.repeats.distance`; if that is None, within 10⁻⁵ of the
    extent of most points along each axis, where more than a tenth of the records are copies: fewer
    change little. If it is 0, nothing changes.

    Continuous noise never gives equal values: such records are copies, and would tell that there is
    no noise. Values that are rounded to steps of the size of their scatter may be equal by chance;
    they are kept. Of copies, the first of largest weight remains.

    Args:
        data: observations in memory.

    Example:
        >>> import torch
        >>> from gp_orff.data.dataset import Dataset
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.repeats.copies import without_copies
        >>> x = torch.tensor([[0.0], [1.0], [1e-6], [3.0]]).double()
        >>> data = Dataset.in_memory(read(x, torch.tensor([7.1, 7.4, 7.1, 7.9]), 1, Options()))
        >>> data = without_copies(data)
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
    sources, survey = (InMemory(kept),), Survey.of(iter(kept))
    return replace(data, sources=sources, survey=survey, repeats=repeats)


def _distinct(part: Observations, reach: tuple[float, ...]) -> Int[torch.Tensor, "m"]:
    """The rows that are left without copies, in their order."""
    y, labels = part.y.cpu().numpy(), site_labels(part, reach)
    records = sites(np.column_stack([labels, y]), (0.0,) * (1 + y.shape[-1]))
    order = np.arange(len(part))
    if part.weight is not None:
        order = np.argsort(-part.weight.cpu().numpy(), kind="stable")
    rows = np.sort(order[np.unique(records[order], return_index=True)[1]])
    if len(rows) < len(part) and _equal_by_chance(y[rows], labels[rows]) > _CHANCE:
        rows = np.arange(len(part))
    return torch.from_numpy(rows).to(part.x.device)


def _equal_by_chance(y: Float[np.ndarray, "n v"], labels: Int[np.ndarray, "n"]) -> float:
    """The probability that two records of a site are equal, from the scatter of different ones.

    Numbers of standard deviation s that are rounded to steps q are equal with probability
    q / (2 √π s).
    """
    _, site, counts = np.unique(labels, return_inverse=True, return_counts=True)
    repeats = len(y) - len(counts)
    if not repeats:
        return 0.0
    means = np.stack([np.bincount(site, column) / counts for column in y.T], axis=-1)
    scatter = np.sqrt(np.square(y - means[site]).sum(0) / repeats)
    chances = [
        1.0 if not s else min(1.0, _step(column) / (2 * math.sqrt(math.pi) * s))
        for column, s in zip(y.T, scatter, strict=True)
    ]
    return math.prod(chances)


def _step(values: Float[np.ndarray, "n"]) -> float:
    """The smallest difference of different values."""
    gaps = np.diff(np.unique(values))
    gaps = gaps[gaps > _ROUNDING * np.ptp(values)]
    return float(gaps.min()) if len(gaps) else 0.0
