"""Dense readings thinned, so that those that remain have errors of their own."""

from collections.abc import Hashable, Sequence
from numbers import Real

import numpy as np
import scipy.spatial
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.data.validation import as_matrix, as_points, is_single


def thin(
    x: object, distance: float | Sequence[float], *, group: object = None, seed: int = 0
) -> Int[Tensor, "m"]:
    """Return rows of x at least a distance apart, near which all others lie.

    Errors of readings that follow each other closely, along a track or in a cluster, are often
    nearly the same: of a sensor that drifts, or of positions. A model that takes them as
    independent has error bars that are too small, the smaller the denser the readings. Readings
    further apart have errors of their own, and cost less. Where the readings of a track are known,
    `fit(track=)` learns their correlation and keeps them all.

    The rows are a largest set, in random order, of which no two positions x, z have

        Σ_j ((x_j − z_j) / distance_j)² ≤ 1 .

    Of several distances, take the one at which `cross_validate` by tracks, paths or days has the
    smallest `nlpd`, and a `coverage` near 0.95.

    Args:
        x: points (N, d).
        distance: in units of x; or one for each column of x, as for space and time.
        group: a label for each point, of an instrument or a path: points with different labels
            have errors of their own, and stay, however close they are. None for one group.
        seed: of the random order.

    Returns:
        The rows that remain, increasing, for x, y and labels alike.

    Raises:
        TypeError: points that are no real numbers.
        ValueError: distances that are not positive and finite, or not one for each column; labels
            of another length.

    Example:
        Two thousand readings along four passes, whose errors change slowly:

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
