"""How far apart the points of some data are: what lengthscales they can tell."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.spatial
from jaxtyping import Float

_FAR = 20.0  # sizes of the bulk: points that far from each other are worth a word
_MIDDLE = 0.9  # of the points, along each axis, are the bulk
_SAME = 1e-9  # of the size of the bulk: positions that close are one
_FLAT = 1e-12  # of the coordinates: an axis along which the bulk does not extend
_FEW = 0.01  # of the points, that may be set aside
_CLOSE = 0.1  # the quantile of distances to neighbours that is the shortest one


class DataWarning(UserWarning):
    """Data that do not tell what is asked of them, or that may not be what was meant."""


@dataclass(frozen=True)
class Distances:
    """Of a sample of points."""

    points: Float[np.ndarray, "n d"]
    extent: Float[np.ndarray, "d"]  # of the box of all points
    num_points: int  # of all of them
    _nearest: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)

    @property
    def bulk(self) -> Float[np.ndarray, "d"]:
        """The extent of evenly spread points that have the middle 90 % of these: one point far
        away does not change it."""
        low, high = self._middle
        middle = np.minimum((high - low) / _MIDDLE, self.extent)
        return np.where(high - low > _FLAT * np.abs(self._middle).max(0), middle, self.extent)

    @property
    def near(self) -> tuple[tuple[float, float], ...] | None:
        """A box of all points but a few far ones; None where there are none, or more than a few."""
        low, high = self._middle
        middle, margin = 0.5 * (low + high), (0.5 + _FAR) * self.bulk
        inside = (np.abs(self.points - middle) <= margin).all(-1).mean()
        far = (self.extent > _FAR * self.bulk).any() and 1 - inside <= _FEW
        pairs = zip((middle - margin).tolist(), (middle + margin).tolist(), strict=True)
        return tuple(pairs) if far else None

    @property
    def _middle(self) -> Float[np.ndarray, "2 d"]:
        return np.quantile(self.points, [0.5 - _MIDDLE / 2, 0.5 + _MIDDLE / 2], axis=0)

    def shortest(self, dims: Sequence[int]) -> float:
        """About the smallest distance between two places, in the space of some columns, were all
        points there."""
        return self._neighbours(dims)[0] * len(self.points) / self.num_points

    def typical(self, dims: Sequence[int]) -> float:
        """The median distance of a place to its nearest neighbour; zero where all are one place."""
        return self._neighbours(dims)[1]

    def _neighbours(self, dims: Sequence[int]) -> tuple[float, float]:
        key = tuple(dims)
        if key not in self._nearest:
            size = np.linalg.norm(self.bulk[list(key)])
            self._nearest[key] = _nearest(self.points[:, list(key)], size)
        return self._nearest[key]


def _nearest(points: Float[np.ndarray, "n k"], size: float) -> tuple[float, float]:
    """Low quantile and median of the distances between neighbouring places."""
    if not np.ptp(points, axis=0).any():
        return 0.0, 0.0
    step = _SAME * size
    places = np.unique(np.round((points - np.median(points, axis=0)) / step), axis=0) * step
    if len(places) < 2:
        return 0.0, 0.0
    distance = scipy.spatial.cKDTree(places).query(places, k=2)[0][:, 1]
    low, middle = np.quantile(distance, [_CLOSE, 0.5])
    return float(low), float(middle)


def warn_of_far_points(distances: Distances) -> None:
    """Say so where few points make the extent of the data much larger than that of most."""
    extent, bulk = distances.extent, distances.bulk
    far = np.flatnonzero(extent > _FAR * bulk)
    if len(far):
        column = far[0]
        warnings.warn(
            f"a few points lie far from most: 90 % of them are within {_MIDDLE * bulk[column]:.3g} "
            f"in column {column}, all within {extent[column]:.3g}. Lengthscales are sought at the "
            "scale of most; drop the far points if they are errors, or fit parts of the data apart",
            DataWarning,
            stacklevel=2,
        )
