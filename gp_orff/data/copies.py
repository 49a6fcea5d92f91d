"""Duplicate records, which are used once, and thinning of dense observations."""

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from numbers import Real

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, UInt64
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import Observations
from gp_orff.data.sites import cell_keys, equal_keys, sites
from gp_orff.data.sources import InMemory
from gp_orff.data.survey import DataWarning, Survey
from gp_orff.data.validation import as_matrix, as_points, is_single

# Copies: records at one place with equal values, which are one observation.


# How copies are searched for, in `_distinct`:
# 1. Positions and values are divided into cells, and the cells are hashed. Where no two records
#    share a cell, there are no copies, and the search ends.
# 2. The unit of every column of values is measured: the smallest difference that occurs.
# 3. Pairs of records at one place are counted: those with equal values (n₀), with values that
#    differ by one unit in some columns (n₁), and by two to four units (n₂). Independent values
#    whose noise is as large as the unit are spread over all of these. In one column, 0.27 of the
#    pairs are equal and 0.43 differ by one unit, so that in v columns n₁ / n₀ = 2.6ᵛ − 1; the ratio
#    increases to 3ᵛ − 1 with the noise. Chance therefore explains n₁ / (2.5ᵛ − 1) equal pairs.
# 4. Values may be equal for other reasons, such as a rain gauge that reads zero. These are equal at
#    different places, too: chance explains as large a share of the pairs at one place.
# 5. If both numbers are below 5 % of n₀, equal records are copies. If also n₂ / (2.5ᵛ − 1) is below
#    5 % of n₁, records that differ by one unit are copies that were rounded differently.
# 6. One record of every group of copies remains.

_SAME = 1e-5  # over the extent of most points, or of values: smaller differences are not resolved
_CHANCE = 0.05  # the largest share of pairs that agree by chance among those that count as copies
_SPREAD = 2.5  # pairs that differ by at most a unit, over equal ones, if the noise is of that size
_EQUAL, _UNIT, _FAR = 0.5, 1.1, 4.5  # units: what is equal, one unit apart, or four
_SAMPLE = 20_000  # values from which the first cells are measured, which may have any size
_TURN = 1e-3  # between directions at one place: their numbers differ by 1e-6 of the variance


def without_copies(data: Dataset) -> Dataset:
    """Data in memory of which records with equal values at one place count once.

    One place is what lies within `data.repeats.distance`; if that is None, within 10⁻⁵ of the
    extent of most points along each axis. If it is 0, nothing changes.

    Continuous noise never gives equal values: such records are copies, and would suggest that there
    is no noise. Values are equal that differ by less than their unit, which is the smallest
    difference between values of that column, or 10⁻⁵ of the range between their 5 % and 95 %
    quantiles if that is more; values of a copy that was rounded differently differ by one unit.
    Rounding gives equal values to independent records too, such as the observations of a platform
    at rest. Records are copies only if 95 % of the pairs that agree cannot be explained in this
    way, by the number of pairs that differ by a few units, or that are equal at different places.
    Of copies, the record of largest weight remains. A `DataWarning` gives the number of records
    that were left out.

    Args:
        data: observations in memory.

    Example:
        >>> import torch, warnings
        >>> from gp_orff.data.dataset import Dataset
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.copies import without_copies
        >>> x, y = torch.rand(50, 2).double(), torch.randn(50, 2).double()
        >>> x, y = torch.cat([x, x[:4] + 1e-6]), torch.cat([y, y[:4]])
        >>> data = Dataset.in_memory(read(x, y, 2, Options()))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     data = without_copies(data)
        >>> data.survey.num_points, data.repeats.copies
        (50, 4)
    """
    distance = data.repeats.distance
    if distance == 0:
        return data
    bulk = data.survey.distances.bulk
    reach = _SAME * bulk if distance is None else np.full(data.num_inputs, float(distance))
    parts = list(data.visit())
    rows = [_distinct(part, reach) for part in parts]
    copies = sum(map(len, parts)) - sum(map(len, rows))
    if not copies:
        return data
    parts = [part.take(remaining) for part, remaining in zip(parts, rows, strict=True)]
    repeats = replace(data.repeats, copies=copies)
    warnings.warn(repeats.note, DataWarning, stacklevel=2)
    return replace(data, sources=(InMemory(parts),), survey=Survey.of(iter(parts)), repeats=repeats)


def _distinct(part: Observations, reach: Float[np.ndarray, "d"]) -> Int[torch.Tensor, "m"]:
    """The rows that are left without copies, in their order."""
    x, y = part.x.cpu().numpy(), part.y.cpu().numpy()
    if part.direction is not None:
        x = np.column_stack([x, part.direction.cpu().numpy()])
        reach = np.append(reach, np.full(x.shape[1] - len(reach), _TURN))
    rows = np.arange(len(x))
    resolved = _resolved(y[:: -(-len(y) // _SAMPLE)])
    cells = equal_keys(cell_keys([*x.T, *y.T], 2 * np.append(reach, resolved)))
    if (cells != rows).any():
        weight = np.ones(len(x)) if part.weight is None else part.weight.cpu().numpy()
        varies = np.ptp(y, axis=0) > 0
        places, values = x[:, reach > 0] / reach[reach > 0], y[:, varies] / _units(y[:, varies])
        if places.size and values.size:
            rows = rows[_remain(places, values, weight)]
    return torch.from_numpy(rows).to(part.x.device)


def _remain(
    places: Float[np.ndarray, "n k"],
    values: Float[np.ndarray, "n v"],
    weight: Float[np.ndarray, "n"],
) -> Bool[np.ndarray, "n"]:
    """Whether each row remains; positions are in units of a place, values in their units."""
    columns, num_places = np.column_stack([places, values]), places.shape[1]
    # one row stands for all that are equal in every column
    _, first, group, counts = np.unique(
        equal_keys(cell_keys(columns.T, np.zeros(columns.shape[1]))),
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    near = _near(columns[first, : num_places + 1] / ([1.0] * num_places + [_FAR]))
    remain = np.ones(len(columns), dtype=bool)
    if (len(first) == len(columns) and not len(near)) or _are_equal_elsewhere(places, values):
        return remain
    pairs = _pairs_by_distance(*_sample(columns[first], counts, near, num_places), num_places)
    tolerance = _tolerance(pairs, values.shape[1])
    if tolerance is None:
        return remain
    scale = np.array(
        [1.0] * num_places + [tolerance * math.sqrt(values.shape[1])] * values.shape[1]
    )
    labels = np.arange(len(first))
    if len(near):
        labels[near] = len(first) + sites(columns[first[near]] / scale, np.ones(len(scale)))
    # Rows that are equal in every column have one number already; `labels` merges numbers that are
    # near.
    group = labels[group]
    remain = np.bincount(group)[group] == 1
    rows = np.flatnonzero(~remain)
    rows = rows[np.lexsort([*columns[rows].T, -weight[rows]])]  # whatever the order of the records
    remain[rows[np.unique(group[rows], return_index=True)[1]]] = True
    return remain


def _tolerance(pairs: Float[np.ndarray, "3"], num_values: int) -> float | None:
    """How far the values of copies may differ, in their units; None if there are no copies.

    Args:
        pairs: the numbers of pairs at one place with equal values, with values that differ by one
            unit at most, and by four.
        num_values: v, the number of values of a record.
    """
    spread = _SPREAD**num_values - 1
    equal, unit, far = pairs[0], *np.diff(pairs)
    if unit / spread >= _CHANCE * equal:
        return None
    # one more, since there may be none by chance
    return _EQUAL if (far + 1) / spread >= _CHANCE * unit else _UNIT


def _near(columns: Float[np.ndarray, "n c"]) -> Int[np.ndarray, "m"]:
    """The rows that may have another within 1 along every column.

    Grids whose cells are c + 1 wide are shifted by one unit each. Two numbers within 1 lie in
    different cells of at most one of these c + 1 grids, so that two rows share a cell of one.
    """
    count = columns.shape[1] + 1
    shared = np.zeros(len(columns), dtype=bool)
    for shift in range(count):
        labels = equal_keys(cell_keys((columns + shift).T, np.full(count - 1, float(count))))
        shared |= np.bincount(labels, minlength=len(labels))[labels] > 1
    return np.flatnonzero(shared)


def _sample(
    columns: Float[np.ndarray, "n c"],
    counts: Int[np.ndarray, "n"],
    near: Int[np.ndarray, "m"],
    num_places: int,
) -> tuple[Float[np.ndarray, "s c"], Int[np.ndarray, "s"]]:
    """The rows of all places with several records, or of about `_SAMPLE` records at random places,
    and their counts."""
    several = counts > 1
    several[near] = True
    places = cell_keys(columns[:, :num_places].T, np.full(num_places, 4.0))
    several &= places <= np.uint64(2**64 - 1) * min(1.0, _SAMPLE / max(1, several.sum()))
    return columns[several], counts[several]


def _pairs_by_distance(
    columns: Float[np.ndarray, "m c"], counts: Int[np.ndarray, "m"], num_places: int
) -> Float[np.ndarray, "3"]:
    """The pairs at one place whose values are equal, differ by one unit at most, or by four.

    Row i stands for `counts[i]` records.
    """
    numbers = []
    for distance in (0.5, 1.5, _FAR):
        scaled = columns.copy()
        scaled[:, num_places:] /= distance
        tree = scipy.spatial.cKDTree(scaled)
        both_orders = tree.count_neighbors(tree, 1.0, p=math.inf, weights=(counts, counts))
        numbers.append(0.5 * (both_orders - counts.sum()))
    return np.array(numbers, dtype=float)


def _are_equal_elsewhere(
    places: Float[np.ndarray, "n k"], values: Float[np.ndarray, "n v"]
) -> bool:
    """Whether records at different places are equal so often that those at one place may be.

    Elsewhere, one pair more is counted than there is, since there may be none by chance.
    """
    cells, units = [*places.T], [*np.rint(values).T]
    widths = [2.0] * len(cells), [1.0] * len(units)
    within, equal, both = (
        _pairs(cell_keys(columns, width))
        for columns, width in (
            (cells, widths[0]),
            (units, widths[1]),
            (cells + units, widths[0] + widths[1]),
        )
    )
    elsewhere = 0.5 * len(places) * (len(places) - 1) - within
    return within * (equal - both + 1) >= _CHANCE * both * elsewhere


def _pairs(keys: UInt64[np.ndarray, "n"]) -> float:
    """The number of pairs of equal keys."""
    counts = np.bincount(equal_keys(keys)).astype(float)
    return float(0.5 * (counts * (counts - 1)).sum())


def _resolved(y: Float[np.ndarray, "n v"]) -> Float[np.ndarray, "v"]:
    """The smallest differences that count as such, in every column."""
    low, high = np.quantile(y, [0.05, 0.95], axis=0)
    return _SAME * np.where(high > low, high - low, np.ptp(y, axis=0))


def _units(y: Float[np.ndarray, "n v"]) -> Float[np.ndarray, "v"]:
    """The smallest difference between different values of every column."""
    gaps = [np.diff(np.sort(values)) for values in y.T]
    pairs = zip(gaps, _resolved(y), strict=True)
    return np.array([gap[gap > resolved].min(initial=gap.max()) for gap, resolved in pairs])


# Dense observations thinned, so that those that remain have independent errors.
#
# The rows are visited in random order. One that is still free remains, and all within the distance
# of it are excluded. The result is a maximal set: every excluded row is near one that remains.


def thin(
    x: object, distance: float | Sequence[float], *, group: object = None, seed: int = 0
) -> Int[Tensor, "m"]:
    """Select rows of x that are far from each other, so that every other row is near one of them.

    Use this function if observations are close together, along a track or in a cluster, and their
    errors are nearly equal. They come from a sensor that drifts, or from errors of positions. A
    model that treats them as independent has error bars that are too small. Observations that are
    further from each other have independent errors, and a fit to them costs less. If you know the
    tracks of the observations, use `fit(track=)` instead, which learns the correlation and keeps
    all observations.

    The rows are chosen greedily in random order, until no row can be added. No two positions x, z
    of the result have

        Σ_j ((x_j − z_j) / distance_j)² ≤ 1 .

    Try several distances. Use the distance for which `cross_validate` by tracks, paths or days has
    the smallest `nlpd`, and a `coverage` near 0.95.

    Args:
        x: points (N, d).
        distance: the distance in units of x, or one for each column of x, as for space and time.
        group: a label for each point, for example its instrument or path. Points with different
            labels have independent errors, and are kept even if they are close. None for one group.
        seed: the seed of the random order.

    Returns:
        The indices of the remaining rows, increasing, for x, y and labels.

    Raises:
        TypeError: points that are not real numbers.
        ValueError: distances that are not positive and finite, or not one for each column; labels
            of another length.

    Example:
        Two thousand observations along four passes, whose errors change slowly:

        >>> import gp_orff, torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> s = torch.linspace(0, 3, 500).double()
        >>> x = torch.cat([torch.stack([s, 0 * s + k], dim=-1) for k in range(4)])
        >>> rows = gp_orff.thin(x, 0.1)
        >>> 80 <= len(rows) < 124, bool((torch.pdist(x[rows]) >= 0.1).all())
        (True, True)
        >>> y = torch.stack([torch.sin(x[:, 1]), torch.sin(x[:, 0])], dim=-1)
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> model = model.condition(x[rows], y[rows])
    """
    points = as_points(x).detach()
    scaled = points.cpu() / _distances(distance, points.shape[-1])
    apart = 2.0 * _numbers(group, len(points))  # no site has points with different labels
    kept = _apart(np.column_stack([scaled.numpy(), apart]), seed)
    return torch.from_numpy(np.flatnonzero(kept)).to(points.device)


def _distances(distance: float | Sequence[float], num_inputs: int) -> Float[Tensor, "d"]:
    values = as_matrix([distance] if isinstance(distance, Real) else distance, "distance")
    values = values.detach().cpu().flatten()
    if len(values) not in (1, num_inputs) or not ((values > 0) & torch.isfinite(values)).all():
        raise ValueError(
            f"expected a positive distance, or one for each of the {num_inputs} columns of x, got "
            f"distance={distance!r}"
        )
    return values.expand(num_inputs)


def _numbers(group: object, count: int) -> Int[np.ndarray, "N"]:
    """A number for the label of each point."""
    if is_single(group):
        return np.zeros(count, dtype=int)
    values = group.tolist() if hasattr(group, "tolist") else list(group)
    if len(values) != count:
        raise ValueError(
            f"expected a label for each of the {count} points in group=, got {len(values)}"
        )
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in values])


def _apart(positions: Float[np.ndarray, "n k"], seed: int) -> Bool[np.ndarray, "n"]:
    """Whether each position remains: none that remains and comes earlier is within 1."""
    tree = scipy.spatial.cKDTree(positions)
    kept = np.zeros(len(positions), dtype=bool)
    free = ~kept
    for row in np.random.default_rng(seed).permutation(len(positions)):
        if free[row]:
            kept[row] = True
            free[tree.query_ball_point(positions[row], 1.0)] = False
    return kept
