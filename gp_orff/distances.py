"""How far apart the points of some data are: what lengthscales they can tell."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.spatial
from jaxtyping import Float

_FAR = 20.0  # sizes of the bulk: points that far from each other are worth a word
_MIDDLE = 0.9  # of the points, along each axis, are the bulk
_SAME = 1e-9  # of the extent: positions that close are one
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
        low, high = np.quantile(self.points, [0.5 - _MIDDLE / 2, 0.5 + _MIDDLE / 2], axis=0)
        middle = (high - low) / _MIDDLE
        inside = np.minimum(middle, np.ptp(self.points, axis=0))
        return np.where(middle > _SAME * self.extent, inside, self.extent)

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
            self._nearest[key] = _nearest(self.points[:, list(key)])
        return self._nearest[key]


def _nearest(points: Float[np.ndarray, "n k"]) -> tuple[float, float]:
    """Low quantile and median of the distances between neighbouring places."""
    size = np.linalg.norm(np.ptp(points, axis=0))
    if not size > 0:
        return 0.0, 0.0
    places = np.unique(np.round((points - points.min(0)) / (_SAME * size)), axis=0) * _SAME * size
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
