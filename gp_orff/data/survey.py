"""A survey of the data: their box, weights, a sample, and the distances between points.

It also defines `DataWarning`.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import scipy
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.observations import Observations, join
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Weights, added
from gp_orff.features.chunked import Box, union

_FAR = 20.0  # extent of all points over that of the bulk, above which a warning is given
_MIDDLE = 0.9  # share of the points along each axis that are the bulk
_SAME = 1e-9  # positions within this distance, over the size of the bulk, count as equal
_FLAT = 1e-12  # extent of the bulk over the coordinates, below which it is zero
_FEW = 0.01  # largest share of the points that may be omitted as far
_TREE, _QUERIES = 16, 1000  # most inputs for a k-d tree; positions that are compared without one
_CLOSE = 0.1  # quantile of the distances between neighbours that is the shortest distance


class DataWarning(UserWarning):
    """The data may not determine the result, or may contain mistakes.

    The page *Trust* of the documentation lists the texts of this warning, with remedies.

    Example:
        Observations with equal values do not determine any hyperparameter:

        >>> import gp_orff, torch, warnings
        >>> x, y = torch.rand(20, 2, dtype=torch.float64), torch.zeros(20, 2)
        >>> model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", gp_orff.DataWarning)
        ...     _ = model.fit(x, y, progress=False)
        >>> [warning.category.__name__ for warning in caught]
        ['DataWarning']
    """


class NoObservations(ValueError):
    """Data have no valid observation."""


@dataclass(frozen=True)
class Distances:
    """Distances between the points of a sample."""

    points: Float[np.ndarray, "n d"]
    extent: Float[np.ndarray, "d"]  # of the box of all points
    num_points: int  # of all points
    _nearest: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def bulk(self) -> Float[np.ndarray, "d"]:
        """The extent (d,) of most points along each axis.

        It is the extent of the middle 90 % of the sample divided by 0.9, which is the whole extent
        of uniformly distributed points. A single distant point does not change it.
        """
        low, high = self._middle
        middle = np.minimum((high - low) / _MIDDLE, self.extent)
        return np.where(high - low > _FLAT * np.abs(self._middle).max(0), middle, self.extent)

    @property
    def near(self) -> tuple[tuple[float, float], ...] | None:
        """A box of all points except a few distant ones; None if no point is distant, or too many
        are."""
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
        """The approximate smallest distance between two positions of all points, in columns
        `dims`."""
        return self._neighbour_distances(dims)[0] * len(self.points) / self.num_points

    def typical(self, dims: Sequence[int]) -> float:
        """The median distance of positions from their nearest neighbours; 0 for one position."""
        return self._neighbour_distances(dims)[1]

    def root_mean_square(self, dims: Sequence[int]) -> float:
        """The root mean square distance between two points, in columns `dims`."""
        return float(np.sqrt(2 * self.points[:, list(dims)].var(axis=0).sum()))

    def _neighbour_distances(self, dims: Sequence[int]) -> tuple[float, float]:
        key = tuple(dims)
        if key not in self._nearest:
            size = np.linalg.norm(self.bulk[list(key)])
            self._nearest[key] = _nearest_distances(self.points[:, list(key)], size)
        return self._nearest[key]


def _nearest_distances(points: Float[np.ndarray, "n k"], size: float) -> tuple[float, float]:
    """A low quantile and the median of the distances between neighbouring positions."""
    if not np.ptp(points, axis=0).any():
        return 0.0, 0.0
    step = _SAME * size
    positions = np.unique(np.round((points - np.median(points, axis=0)) / step), axis=0) * step
    if len(positions) < 2:
        return 0.0, 0.0
    low, middle = np.quantile(_to_neighbours(positions), [_CLOSE, 0.5])
    return float(low), float(middle)


def _to_neighbours(positions: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "m"]:
    """The distances of positions from their nearest neighbours. With many inputs, they are for some
    positions only."""
    if positions.shape[1] <= _TREE:
        return scipy.spatial.cKDTree(positions).query(positions, k=2)[0][:, 1]
    some, every = positions[:: -(-len(positions) // _QUERIES)], torch.from_numpy(positions)
    distances = torch.cdist(torch.from_numpy(some), every)
    return distances.topk(2, largest=False).values[:, 1].numpy()


def warn_of_far_points(distances: Distances) -> None:
    """Warn if a few points make the extent of the data much larger than that of most."""
    extent, bulk = distances.extent, distances.bulk
    far = np.flatnonzero(extent > _FAR * bulk)
    if len(far):
        column = far[0]
        warnings.warn(
            f"a few points lie far from most: 90 % of the points are within "
            f"{_MIDDLE * bulk[column]:.3g} in column {column}, and all are within "
            f"{extent[column]:.3g}. The search for lengthscales starts from the extent of most "
            "points; drop the distant points if they are errors, or fit parts of the data "
            "separately",
            DataWarning,
            stacklevel=2,
        )


# A sample that can be merged: each observation gets a random rank, and the sample of a set has the
# observations with the smallest ranks. The sample of the union of two sets follows from their
# samples. Its distribution does not depend on the order of chunks and the number of workers.
_SAMPLE = 20_000  # points of the sample, from which starting values follow
MOST_PIECES = 32  # largest number of pieces that are not concatenated


@dataclass(frozen=True)
class Survey:
    """A summary of observations after one visit. Surveys of parts of the data can be added."""

    box: Box
    num_points: int
    num_values: int
    weights: Mapping[GroupKey, Weights]
    sample: list[Observations]  # up to 20 000 random observations
    ranks: list[Float[Tensor, "n"]]  # the random numbers that selected the sample
    skipped: int = 0  # the number of chunks without a valid observation

    @classmethod
    def of(cls, parts: Iterable[Observations], seed: int | Sequence[int] = 0) -> "Survey":
        """The survey of at least one observation."""
        rng, total = np.random.default_rng(seed), None
        for part in parts:
            low, high = part.x.amin(0).tolist(), part.x.amax(0).tolist()
            survey = cls(
                tuple(zip(low, high, strict=True)),
                len(part),
                len(part) * part.pattern.num_values,
                {part.key: Weights.of(part.weight, len(part))},
                [part],
                [torch.from_numpy(rng.random(len(part)))],
            )._subsample()
            total = survey if total is None else total + survey
        if total is None:
            raise ValueError(
                "expected observations, got an empty iterable of chunks; check the folder or list"
            )
        return total

    def __add__(self, other: "Survey") -> "Survey":
        if len(self.box) != len(other.box):
            raise ValueError(
                f"expected points with {len(self.box)} columns in each chunk, got "
                f"{len(other.box)}; give the same columns in all chunks"
            )
        box = union(self.box, other.box)
        sample, ranks = merge_pieces(self.sample + other.sample, self.ranks + other.ranks)
        return Survey(
            box,
            self.num_points + other.num_points,
            self.num_values + other.num_values,
            added(self.weights, other.weights),
            sample,
            ranks,
            self.skipped + other.skipped,
        )._subsample()

    @cached_property
    def distances(self) -> Distances:
        """The distances between the points of the sample."""
        sample = torch.cat([part.x for part in self.sample]).cpu().numpy()
        return Distances(sample, np.ptp(np.array(self.box), axis=1), self.num_points)

    def _subsample(self) -> "Survey":
        """Return the survey with a sample of at most 20 000 observations, which are those with
        the smallest random ranks."""
        if sum(map(len, self.ranks)) <= _SAMPLE:
            return self
        bound = torch.cat(self.ranks).kthvalue(_SAMPLE).values
        selected = [torch.nonzero(ranks <= bound).squeeze(-1) for ranks in self.ranks]
        triples = list(zip(self.sample, self.ranks, selected, strict=True))
        sample = [part.take(rows.to(part.x.device)) for part, _, rows in triples]
        return replace(self, sample=sample, ranks=[ranks[rows] for _, ranks, rows in triples])


def merge_pieces(
    parts: Sequence[Observations],
    values: Sequence[Float[Tensor, "n"]],
    most: int = MOST_PIECES,
) -> tuple[list[Observations], list[Float[Tensor, "n"]]]:
    """If there are more than `most` pieces, join the pieces of each group.

    Also join the `values` of their observations. Otherwise return both unchanged.
    """
    if len(parts) <= most:
        return list(parts), list(values)
    members: dict[GroupKey, list[int]] = {}
    for index, part in enumerate(parts):
        members.setdefault(part.key, []).append(index)
    pieces = [join(parts[i] for i in indices)[0] for indices in members.values()]
    return pieces, [torch.cat([values[i] for i in indices]) for indices in members.values()]


def subset(x: Float[Tensor, "N d"], size: int, seed: int = 0) -> Int[Tensor, "n"]:
    """Return the row indices of about `size` points, such that distances of all lengths occur
    between them.

    The points are random centres, and neighbours of each centre. If neighbours are sorted by
    distance, the ranks of those that are selected are a geometric sequence.
    """
    if len(x) <= size:
        return torch.arange(len(x), device=x.device)
    rng = np.random.default_rng(seed)
    ranks = np.unique(np.geomspace(1, len(x), 25).astype(int)) - 1
    order, rows = rng.permutation(len(x)), {}  # a dict has each row once, in order
    for centre in order[: 4 * size // len(ranks)]:
        neighbours = _by_distance(x, centre)[torch.from_numpy(ranks)]
        rows.update(dict.fromkeys(neighbours.tolist()))
    rows.update(dict.fromkeys(order.tolist()))  # more rows, if places are repeated
    return torch.tensor(sorted(list(rows)[:size]), device=x.device)


def windows(x: Float[Tensor, "N d"], size: int, count: int, seed: int = 0) -> Int[Tensor, "n"]:
    """Row indices of about `size` points: `count` random centres and all their neighbours.

    Some fields vary over a few distances between neighbours, by less than the noise. A subset shows
    this variation only if its points are as dense as the data.
    """
    if len(x) <= size:
        return torch.arange(len(x), device=x.device)
    centres = np.random.default_rng(seed).permutation(len(x))[:count]
    return torch.cat([_by_distance(x, centre)[: size // count] for centre in centres]).unique()


def _by_distance(x: Float[Tensor, "N d"], centre: int) -> Int[Tensor, "N"]:
    """Row indices in the order of the distance from the point `centre`."""
    extent = (x.amax(0) - x.amin(0)).max().clamp_min(torch.finfo(x.dtype).tiny)
    return torch.argsort(((x - x[centre]) / extent).square().sum(-1))
