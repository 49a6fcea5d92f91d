"""Sites: groups of positions that lie close together."""

from collections.abc import Sequence

import numpy as np
import scipy.spatial
from jaxtyping import Float, Int


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
    free = tree.query(positions, k=2)[0][:, 1] <= 1
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
