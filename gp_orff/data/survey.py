"""How far apart the points of some data are: what lengthscales they can tell."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import scipy.spatial
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import Observations, join
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Weights
from gp_orff.features.domain import Box, union

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


_SAMPLE = 20_000  # points that starting values are looked for among
MOST_PIECES = 32  # small pieces, before they are joined


@dataclass(frozen=True)
class Survey:
    """What one look at the readings tells; surveys of parts of the data add."""

    box: Box
    num_points: int
    num_values: int
    weights: Mapping[GroupKey, Weights]
    sample: list[Observations]  # up to 20 000, at random
    ranks: list[Float[Tensor, "n"]]  # the random numbers they were chosen by

    @classmethod
    def of(cls, parts: Iterable[Observations], seed: int = 0) -> "Survey":
        """Of at least one reading."""
        rng, whole = np.random.default_rng(seed), None
        for part in parts:
            low, high = part.x.amin(0).tolist(), part.x.amax(0).tolist()
            own = cls(
                tuple(zip(low, high, strict=True)),
                len(part),
                len(part) * part.pattern.num_values,
                {part.key: Weights.of(part.weight, len(part))},
                [part],
                [torch.from_numpy(rng.random(len(part)))],
            )._thinned()
            whole = own if whole is None else whole + own
        if whole is None:
            raise ValueError("expected observations, got none: an empty iterable of chunks")
        return whole

    def __add__(self, other: "Survey") -> "Survey":
        if len(self.box) != len(other.box):
            raise ValueError(
                f"expected points with {len(self.box)} columns in every chunk, got {len(other.box)}"
            )
        box = union(self.box, other.box)
        sample, ranks = joined(self.sample + other.sample, self.ranks + other.ranks)
        weights = dict(self.weights)
        for key, own in other.weights.items():
            weights[key] = weights[key] + own if key in weights else own
        return Survey(
            box,
            self.num_points + other.num_points,
            self.num_values + other.num_values,
            weights,
            sample,
            ranks,
        )._thinned()

    @cached_property
    def distances(self) -> Distances:
        """How far apart the points are."""
        sample = torch.cat([own.x for own in self.sample]).cpu().numpy()
        return Distances(sample, np.ptp(np.array(self.box), axis=1), self.num_points)

    def _thinned(self) -> "Survey":
        """With the readings of the smallest ranks, should they be too many."""
        if sum(map(len, self.ranks)) <= _SAMPLE:
            return self
        bound = torch.cat(self.ranks).kthvalue(_SAMPLE).values
        kept = [torch.nonzero(own <= bound).squeeze(-1) for own in self.ranks]
        pairs = list(zip(self.sample, self.ranks, kept, strict=True))
        sample = [own.take(rows.to(own.x.device)) for own, _, rows in pairs]
        return replace(self, sample=sample, ranks=[ranks[rows] for _, ranks, rows in pairs])


def joined(
    parts: Sequence[Observations], beside: Sequence[Float[Tensor, "n"]]
) -> tuple[list[Observations], list[Float[Tensor, "n"]]]:
    """Many readings of the same group in one piece, and so what stands beside them."""
    if len(parts) <= MOST_PIECES:
        return list(parts), list(beside)
    order: dict[GroupKey, list[int]] = {}
    for index, part in enumerate(parts):
        order.setdefault(part.key, []).append(index)
    pieces = [join(parts[i] for i in indices)[0] for indices in order.values()]
    return pieces, [torch.cat([beside[i] for i in indices]) for indices in order.values()]
