"""Sites: groups of positions that lie close together."""

from collections.abc import Iterable, Sequence

import numpy as np
import scipy.spatial
from jaxtyping import Float, Int, UInt64

_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)  # of a multiplicative hash
_OFFSET = 0.37  # of cells, so that rounded numbers do not lie at their edges


def sites(x: Float[np.ndarray, "n d"], reach: Sequence[float]) -> Int[np.ndarray, "n"]:
    """The number of the site of each position; sites are numbered by their first positions.

    Positions x and z of one site have Σ_j ((x_j − z_j) / reach_j)² ≤ 1. A site never grows along a
    chain of neighbours: it is what lies within 1 of a position if that fits into a ball of diameter
    1, else the part within ½ of it.

    Args:
        x: (n, d), the positions.
        reach: (d), the largest difference along each axis; 0 where positions have to be equal.

    Example:
        >>> import numpy as np
        >>> from gp_orff.data.repeats.sites import sites
        >>> x = np.array([[0.0, 0.0], [5.0, 0.0], [0.01, 0.0], [5.0, 0.02]])
        >>> sites(x, (0.1, 0.1)).tolist(), sites(x, (0.1, 0.0)).tolist()
        ([0, 1, 0, 1], [0, 1, 0, 2])
    """
    positions, inverse = np.unique(_scaled(x, reach), axis=0, return_inverse=True)
    labels = np.arange(len(positions)) if not any(reach) else _clusters(positions)
    _, first, numbers = np.unique(labels[inverse.ravel()], return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[numbers.ravel()]


def _scaled(x: Float[np.ndarray, "n d"], reach: Sequence[float]) -> Float[np.ndarray, "n d"]:
    """The positions in units of the reach; along an axis without one, numbers 2 apart."""
    columns = [
        column / length if length else 2.0 * np.unique(column, return_inverse=True)[1]
        for column, length in zip((x - x.mean(0)).T, reach, strict=True)
    ]
    return np.stack(columns, axis=-1) + 0.0  # −0 becomes 0


def _clusters(positions: Float[np.ndarray, "m d"]) -> Int[np.ndarray, "m"]:
    """The clusters of distinct positions; those without a neighbour are their own."""
    labels = np.arange(len(positions))
    if len(positions) < 2:
        return labels
    tree = scipy.spatial.cKDTree(positions)
    distances, neighbours = tree.query(positions, k=3)
    free, mate = distances[:, 1] <= 1, neighbours[:, 1]
    single = free & (distances[:, 2] > 1)
    pair = single & single[mate]  # both have no other neighbour
    labels[pair] = np.minimum(labels, mate)[pair]
    free &= ~pair
    for leader in np.flatnonzero(free):
        if not free[leader]:
            continue
        near = np.array(tree.query_ball_point(positions[leader], 1.0))
        near = near[free[near]]
        middle = 0.5 * (positions[near].min(0) + positions[near].max(0))
        if not (_distances(positions[near], middle) <= 0.5).all():
            near = near[_distances(positions[near], positions[leader]) <= 0.5]
        labels[near], free[near] = leader, False
    return labels


def _distances(
    positions: Float[np.ndarray, "m d"], centre: Float[np.ndarray, "d"]
) -> Float[np.ndarray, "m"]:
    return np.linalg.norm(positions - centre, axis=-1)


def cell_keys(
    columns: Iterable[Float[np.ndarray, "n"]], widths: Iterable[float]
) -> UInt64[np.ndarray, "n"]:
    """A hash of the cell of every row of a grid.

    Equal cells have equal hashes, and different cells different ones but with probability 2⁻⁶⁴.

    Args:
        columns: the coordinates, column by column.
        widths: of a cell along each column; 0 where numbers have to be equal.
    """
    keys = np.zeros(1, dtype=np.uint64)
    for column, width in zip(columns, widths, strict=True):
        if width:
            cells = column * (1 / width) + _OFFSET
            with np.errstate(invalid="ignore"):  # what lies too far away shares a cell
                cells = cells.astype(np.int64)
        else:
            cells = column + 0.0  # −0 becomes 0
        mixed = (cells.view(np.uint64) + keys) * _ODD
        keys = mixed ^ (mixed >> _HALF)
    return keys * _ODD


def equal_keys(keys: UInt64[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """For every row the number of one row with the same key: its own if no other has it.

    A hash table, in which rows of different keys that share a bucket are entered in later rounds.
    """
    bits = (4 * len(keys)).bit_length()
    table = np.empty(2**bits, dtype=np.int32)
    labels = np.arange(len(keys))
    rows, buckets = labels, (keys >> np.uint64(64 - bits)).view(np.int64)
    while len(rows):
        table[buckets] = rows
        entered = table[buckets]
        others = np.flatnonzero(entered != rows)
        rows, entered, buckets = rows[others], entered[others], buckets[others]
        same = keys[entered] == keys[rows]
        labels[rows[same]] = entered[same]
        rows, buckets = rows[~same], buckets[~same]
    return labels
