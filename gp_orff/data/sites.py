"""Repeated positions: sites, observations merged at them, copies, and thinned observations."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt64
from torch import Tensor

from gp_orff.data.noise import Noise
from gp_orff.data.observations import LinearObservations, Observations, PointObservations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.validation import as_points, as_real, is_single
from gp_orff.kernels.base import is_number

# The treatment of repeated positions.


@dataclass(frozen=True)
class Repeats:
    """The treatment of records at one place, and the number of copies among them.

    Args:
        distance: positions within this distance are merged, in units of x. 0 merges none. None
            merges positions that the prior does not distinguish.
        copies: the number of records that were dropped, because others have their place and values.
        width: the size of a site, divided by the size within which the prior does not distinguish
            positions.
    """

    distance: float | None = None
    copies: int = 0
    width: float = 1.0

    def __post_init__(self):
        number = is_number(self.distance) and 0 <= self.distance < float("inf")
        if not number and self.distance is not None:
            raise ValueError(
                f"expected merge= as a distance in the units of x, or None, got {self.distance!r}; "
                "use 0 to merge no records"
            )

    def __add__(self, other: "Repeats") -> "Repeats":
        distance = self.distance if other.distance is None else other.distance
        return Repeats(distance, self.copies + other.copies, max(self.width, other.width))

    @property
    def changes(self) -> bool:
        """Whether the field may change within a site by an amount that is not negligible."""
        return bool(self.distance) or self.width > 1

    @property
    def note(self) -> str:
        """A note on the copies; empty without copies."""
        if not self.copies:
            return ""
        return (
            f"copies: {self.copies} records have the position and the values of other records, and "
            "are omitted; use merge=0 if they are separate measurements"
        )


BY_THE_PRIOR = Repeats()  # merges positions that the prior does not distinguish


# Sites: groups of positions that lie close together.
#
# 1. Positions are divided by the reach, so that a site is a ball of diameter 1. Along an axis
#    without a reach, different values become multiples of 2, so that they are in different sites.
# 2. Equal positions are reduced to one position first. This is often sufficient.
# 3. One query of a tree for all positions finds positions without a neighbour, and pairs without
#    any other neighbour. In most data, these are most positions.
# 4. The others are visited in order. A position that is still free becomes the leader of a site.
#    The site has all free positions within 1 of the leader if they fit into a ball of diameter 1,
#    otherwise those within ½.
#
# This divides a chain of neighbours. Clustering by connected components would merge a complete
# track.


_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)  # constants of a multiplicative hash
_WORD = 2**64 - 1
_OFFSET = 0.37  # offset of cells, so that rounded numbers are not at their edges


def sites(x: Float[np.ndarray, "n d"], reach: Sequence[float]) -> Int[np.ndarray, "n"]:
    """Return the index of the site of each position.

    Sites are numbered in the order of their first positions. All positions x and z of one site
    satisfy Σ_j ((x_j − z_j) / reach_j)² ≤ 1, so a chain of neighbours is divided into several
    sites.

    One position of each site is its leader. Distances from the leader, in units of `reach`,
    determine which of the remaining positions join the site. All positions within a distance of 1
    join if they fit into a ball of diameter 1. Otherwise, only positions within ½ join.

    Args:
        x: positions (n, d).
        reach: the largest difference (d,) along each axis; 0 if positions must be equal.

    Example:
        >>> import numpy as np
        >>> from gp_orff.data.sites import sites
        >>> x = np.array([[0.0, 0.0], [5.0, 0.0], [0.01, 0.0], [5.0, 0.02]])
        >>> sites(x, (0.1, 0.1)).tolist(), sites(x, (0.1, 0.0)).tolist()
        ([0, 1, 0, 1], [0, 1, 0, 2])
    """
    positions, inverse = np.unique(_scaled(x, reach), axis=0, return_inverse=True)
    labels = np.arange(len(positions)) if not any(reach) else _clusters(positions)
    return numbered(labels[inverse.ravel()])


def least_sites(x: Float[np.ndarray, "n d"], reach: Sequence[float]) -> int:
    """A lower bound of the number of sites, by counts of occupied cells.

    Along each axis, a site is at most as long as the reach. It therefore extends over at most
    1/w + 1 cells of w times the reach.
    """
    if not len(x):
        return 0
    bounds, columns = [], (x - x.mean(0)).T  # as in `sites`, with equal rounding
    for width in (1.0, 0.5):
        cells = cell_keys(columns, [width * length for length in reach])
        bounds.append(len(np.unique(cells)) / (1 / width + 1) ** np.count_nonzero(reach))
    return math.ceil(max(bounds))


def numbered(labels: Shaped[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The index of each label. Labels are in the order of their first positions."""
    _, first, which = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]


def _scaled(x: Float[np.ndarray, "n d"], reach: Sequence[float]) -> Float[np.ndarray, "n d"]:
    """The positions in units of the reach. Along an axis without reach, different values differ by
    at least 2."""
    columns = [
        column / length if length else 2.0 * np.unique(column, return_inverse=True)[1]
        for column, length in zip((x - x.mean(0)).T, reach, strict=True)
    ]
    return np.stack(columns, axis=-1) + 0.0  # −0 becomes 0


def _clusters(positions: Float[np.ndarray, "m d"]) -> Int[np.ndarray, "m"]:
    """The index of the cluster of each distinct position."""
    labels = np.arange(len(positions))
    if len(positions) < 2:
        return labels
    tree = scipy.spatial.cKDTree(positions)
    distances, neighbours = tree.query(positions, k=3)
    free, mate = distances[:, 1] <= 1, neighbours[:, 1]
    single = free & (distances[:, 2] > 1)
    pair = single & single[mate]  # neither has another neighbour
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
    """A hash of the cell of each row in a grid.

    Equal cells have equal hashes. Two different cells have equal hashes with probability 2⁻⁶⁴.

    Args:
        columns: the coordinates, column by column.
        widths: the width of a cell along each column; 0 if values must be equal.
    """
    keys = np.zeros(1, dtype=np.uint64)
    for column, width in zip(columns, widths, strict=True):
        if width:
            cells = column * (1 / width) + _OFFSET
            with np.errstate(invalid="ignore"):  # values that overflow share a cell
                cells = cells.astype(np.int64)
        else:
            cells = column + 0.0  # −0 becomes 0
        mixed = (cells.view(np.uint64) + keys) * _ODD
        keys = mixed ^ (mixed >> _HALF)
    return keys * _ODD


def equal_keys(keys: UInt64[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """For each row, the index of one row with the same key. Rows with equal keys get the same
    index.

    The method is a hash table. Rows with different keys in one bucket are entered in later rounds.
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


# Find equal observations in other data by 64-bit numbers.


def fingerprints(part: Observations) -> Int[np.ndarray, "n"]:
    """A 64-bit number for each observation. Equal observations have equal numbers.

    Two different observations have equal numbers with probability 2⁻⁶⁴. y is used in single
    precision, because a subtracted trend may change its last digits.
    """
    columns = torch.cat([part.x, part.y.float().double()], dim=-1).cpu().numpy()
    return cell_keys(columns.T, np.zeros(columns.shape[1])) ^ np.uint64(hash(part.key) & _WORD)


def lookup(requested: Int[np.ndarray, "m"], stored: Int[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
    """The row of each requested fingerprint among the stored ones; −1 if it is not stored.

    If requested fingerprints are equal, the k-th of them gets the row of the k-th stored
    fingerprint with the same value.
    """
    order = np.argsort(stored, kind="stable")
    rank = np.searchsorted(stored[order], requested) + _repeats(requested)
    row = order[np.minimum(rank, len(stored) - 1)]
    return np.where((rank < len(stored)) & (stored[row] == requested), row, -1)


def _repeats(values: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The count of equal values before each value."""
    order = np.argsort(values, kind="stable")
    ordered, before = values[order], np.empty(len(values), dtype=np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before


# Means of the observations at each site, and their scatter about the means.
#
# Records y_i = f + ε_i at one place, with weights w_i and noise ε_i ~ N(0, Σ/w_i), have the mean
# ȳ = Σ w_i y_i / W with W = Σ w_i, and
#
#     Σ_i w_i (y_i − f)ᵀ Σ⁻¹ (y_i − f) = W (ȳ − f)ᵀ Σ⁻¹ (ȳ − f) + tr(Σ⁻¹ S) ,
#     Σ_i log|Σ/w_i| = log|Σ/W| + (r − 1) log|Σ| − v (Σ_i log w_i − log W) ,
#
# with S = Σ_i w_i (y_i − ȳ)(y_i − ȳ)ᵀ, for r records of v values. The posterior given the means
# equals the posterior given the records. The evidence of the records follows from S in addition.
#
# S does not depend on hyperparameters. It is computed once, before a search.


_TURN = 1e-3  # largest angle between directions at one site, with an error of 1e-6 of the variance


@dataclass(frozen=True)
class Scatter:
    """The scatter of the records of a group about the means of their sites."""

    key: GroupKey
    repeats: int  # the number of records less the number of sites
    squares: Float[Tensor, "v v"]  # S, summed over all sites
    log_weights: float  # Σ log w_i over the records, less Σ log W over the sites

    def terms(self, noise: Noise) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The terms of the scatter in yᵀK⁻¹y and in log|K|, for the noise Σ of weight one."""
        logdet = self.repeats * noise.logdet - len(self.squares) * self.log_weights
        return (noise.precision * self.squares).sum((-1, -2)), logdet


def merged(
    parts: Sequence[Observations], reach: Sequence[float]
) -> tuple[list[Observations], list[Scatter]]:
    """The means at the sites of each group, with the sums of their weights, and the scatter.

    Records along different directions stay separate. At sites with a reach, directions that differ
    by less than 0.001 are merged to a mean direction. A group without repeated positions does not
    change, and has no scatter.

    Args:
        parts: the observations, one piece for each group.
        reach: the size (d,) of a site along each axis, as for `sites`.

    Example:
        >>> import torch
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.sites import merged
        >>> x, y = (
        ...     torch.tensor([[0.0], [1.0], [0.0]]),
        ...     torch.tensor([1.0, 5.0, 3.0]),
        ... )
        >>> (means,), (scatter,) = merged(read(x.double(), y, 1, Options()), (0.0,))
        >>> (
        ...     means.y.flatten().tolist(),
        ...     means.weight.tolist(),
        ...     scatter.squares.item(),
        ... )
        ([2.0, 5.0], [2.0, 1.0], 2.0)
    """
    return merged_at(parts, [site_labels(part, reach) for part in parts])


def merged_at(
    parts: Sequence[Observations], labels: Sequence[Int[np.ndarray, "n"]]
) -> tuple[list[Observations], list[Scatter]]:
    """The result of `merged` for given site labels of all records."""
    pairs = [_merge(part, own) for part, own in zip(parts, labels, strict=True)]
    return [means for means, _ in pairs], [scatter for _, scatter in pairs if scatter is not None]


def site_labels(part: Observations, reach: Sequence[float]) -> Int[np.ndarray, "n"]:
    """The site of each record. Records along different directions have different sites."""
    if part.direction is None:
        return sites(part.x.cpu().numpy(), reach)
    columns = torch.cat([part.x, part.direction], dim=-1).cpu().numpy()
    turns = (_TURN if any(reach) else 0.0,) * part.direction.shape[-1]
    return sites(columns, (*reach, *turns))


def weighted_means(
    values: Float[Tensor, "n k"],
    weight: Float[Tensor, "n"],
    site: Int[Tensor, "n"],
    record: Int[Tensor, "m"],
) -> Float[Tensor, "m k"]:
    """The weighted mean at each site. It is exact if all values are equal. `record` is one record
    of each site."""
    origin = values[record]
    # If all values are equal, the differences from one record are zero, and the mean is exact.
    moved = weight.unsqueeze(-1) * (values - origin[site])
    total = weight.new_zeros(len(record)).index_add(0, site, weight)
    return origin + torch.zeros_like(origin).index_add(0, site, moved) / total.unsqueeze(-1)


def _merge(part: Observations, labels: Int[np.ndarray, "n"]) -> tuple[Observations, Scatter | None]:
    count = int(labels.max()) + 1
    if count == len(part):
        return part, None
    site = torch.from_numpy(labels).to(part.x.device)
    first = torch.from_numpy(np.unique(labels, return_index=True)[1]).to(site)
    weight = torch.ones_like(part.y[:, 0]) if part.weight is None else part.weight
    total = weight.new_zeros(count).index_add(0, site, weight)

    def mean(values: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        return weighted_means(values, weight, site, first)

    y = mean(part.y)
    residual = part.y - y[site]
    squares = (weight.unsqueeze(-1) * residual).mT @ residual
    log_weights = (weight.log().sum() - total.log().sum()).item()
    direction = None if part.direction is None else mean(part.direction)
    means = replace(
        part.take(first), x=mean(part.x), y=y, direction=direction, weight=total, index=None
    )
    return means, Scatter(part.key, len(part) - count, squares, log_weights)


# Means of the field over the records of a site, as sums over a few positions in the site.
#
# If the field changes within a site, the mean of the records observes the mean of the field over
# the records, and not the value of the field at the mean position. A sum over all records would
# cost as much as merging saves. A site is therefore divided into 2^levels parts with about equal
# numbers of records, always along the widest axis of a part. The mean position of a part represents
# its records.


_CHUNK = 256  # sites whose nodes are processed together


@dataclass(frozen=True)
class Nodes:
    """Positions x_k with shares s_k, which sum to one at each site: f̄ ≈ Σ_k s_k f(x_k)."""

    site: Int[Tensor, "K"]  # ascending
    x: Float[Tensor, "K d"]
    share: Float[Tensor, "K"]

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "n d"],
        weight: Float[Tensor, "n"],
        site: Int[Tensor, "n"],
        reach: Sequence[float],
        levels: int,
        divided: Bool[Tensor, "m"] | None = None,
    ) -> "Nodes":
        """Divide the records of each site into parts, and return the mean positions of the parts.

        A site is divided `levels` times into halves, with half of the records in each. It is
        divided across the axis along which it is widest, in units of `reach`. Records with equal
        coordinates along this axis are in the same half. A site has only one part if its element
        of `divided` is False.
        """
        scaled, part = _in_units_of(reach, x), site.clone()
        whole = torch.zeros_like(site, dtype=torch.bool) if divided is None else ~divided[site]
        for _ in range(levels):
            part = _halved(scaled, part, whole)
        labels, part = part.unique(return_inverse=True)
        mass = weight.new_zeros(len(labels)).index_add(0, part, weight)
        first = torch.zeros_like(labels).scatter(0, part, torch.arange(len(x)).to(part))
        mean = weighted_means(x, weight, part, first)
        own, order = site[first].sort(stable=True)
        mean, mass = mean[order], mass[order]
        total = weight.new_zeros(int(site.max()) + 1).index_add(0, own, mass)
        return cls(own, mean, mass / total[own])

    def take(self, sites: slice) -> "Nodes":
        """The nodes of consecutive sites."""
        ends = torch.searchsorted(self.site, torch.tensor([sites.start, sites.stop]).to(self.site))
        rows = slice(*ends.tolist())
        return Nodes(self.site[rows] - sites.start, self.x[rows], self.share[rows])

    def mean(self, values: Float[Tensor, "K q"]) -> Float[Tensor, "m q"]:
        """Σ_k s_k v_k at each site."""
        weighted = self.share.to(values).unsqueeze(-1) * values
        mean = values.new_zeros(int(self.site[-1]) + 1, values.shape[-1])
        return mean.index_add(0, self.site, weighted)


def _halved(
    scaled: Float[Tensor, "n d"], part: Int[Tensor, "n"], whole: Bool[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """The labels of the halves of each part. Parts of records that are `whole` are not halved."""
    _, part = part.unique(return_inverse=True)
    along, extent = _along(scaled, part)
    counts = part.bincount()
    middle = _in_order(along, part)[counts.cumsum(0) - counts + (counts - 1) // 2]
    upper = along > along[middle][part]
    most = torch.zeros_like(counts).index_add(0, part, upper.to(counts)) == 0  # at the upper end
    # If the median is the maximum, no record is above it. The records at the maximum then form the
    # upper half, so that a part with an extent is always divided.
    upper |= most[part] & (along == along[middle][part])
    return 2 * part + (upper & (extent > 0)[part] & ~whole).to(part)


def across_sites(
    x: Float[Tensor, "n d"], site: Int[Tensor, "n"], reach: Sequence[float]
) -> Int[Tensor, "n"]:
    """The order of the records: site by site, and along the widest axis of each site."""
    return _in_order(_along(_in_units_of(reach, x), site)[0], site)


def _in_units_of(reach: Sequence[float], x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x / torch.tensor([length or 1.0 for length in reach]).to(x)


def _along(
    scaled: Float[Tensor, "n d"], part: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "m"]]:
    """The coordinates along the widest axis of each part, and the extents of the parts."""
    index, shape = part.unsqueeze(-1).expand_as(scaled), (int(part.max()) + 1, scaled.shape[-1])
    low = scaled.new_full(shape, torch.inf).scatter_reduce(0, index, scaled, "amin")
    high = scaled.new_full(shape, -torch.inf).scatter_reduce(0, index, scaled, "amax")
    extent, axis = (high - low).max(-1)
    return scaled.gather(-1, axis[part].unsqueeze(-1)).squeeze(-1), extent


def _in_order(along: Float[Tensor, "n"], part: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The order of the records: part by part, by their coordinates."""
    order = np.lexsort((along.cpu().numpy(), part.cpu().numpy()))
    return torch.from_numpy(order).to(part)


@dataclass(frozen=True)
class SiteMeans(LinearObservations):
    """Means of the observations of a group at each of m sites, with H f as a mean over nodes.

    A site is a set of nearby positions. H f is the mean of the field at the site. It is computed as
    a weighted mean over a few positions, the nodes. If the means are components along directions,
    the direction of the mean applies to all nodes of a site.

    Attributes:
        means: the means, with their noise.
        nodes: the nodes of all sites, with their weights.
    """

    means: Observations
    nodes: Nodes

    @classmethod
    def in_pieces(cls, groups: Sequence[Observations], nodes: Sequence[Nodes]) -> list["SiteMeans"]:
        """The means of each group, a few sites at a time, because each site has several nodes."""
        return [
            cls(means.take(sites), parts.take(sites))
            for means, parts in zip(groups, nodes, strict=True)
            for sites in (slice(i, i + _CHUNK) for i in range(0, len(means), _CHUNK))
        ]

    @property
    def x(self) -> Float[Tensor, "m d"]:
        return self.means.x

    @property
    def points(self):
        return self.nodes.x

    @property
    def values(self):
        return self.means.y.flatten()

    def rows(self, values):
        mean = self.nodes.mean(values.reshape(len(self.points), -1))
        return self.means.rows(mean.reshape(-1, values.shape[-1]))

    def noise_covariance(self, noises, truncated=None):
        return PointObservations([self.means]).noise_covariance(noises, truncated)


# Copies: records at one place with equal values are copies of one observation.


# The search for copies in `distinct`:
#
# 1. Positions and values are divided into cells, and the cells are hashed. If no two records share
#    a cell, there are no copies, and the search ends.
# 2. The unit of each column of values is measured: the smallest difference that occurs.
# 3. Pairs of records at one place are counted: n₀ pairs with equal values, n₁ with values that
#    differ by one unit in some columns, and n₂ with values that differ by two to four units. If
#    values are independent and their noise is as large as the unit, all three kinds occur. In one
#    column, 0.27 of the pairs are equal and 0.43 differ by one unit, so that n₁ / n₀ = 2.6ᵛ − 1 in
#    v columns. With more noise, the ratio increases to 3ᵛ − 1. Chance therefore explains
#    n₁ / (2.5ᵛ − 1) equal pairs.
# 4. Values may be equal for other reasons, for example if a rain gauge measures zero. Such values
#    are also equal at different places. The share of equal pairs there estimates the share by
#    chance at one place.
# 5. If both numbers are below 5 % of n₀, equal records are copies. If n₂ / (2.5ᵛ − 1) is also below
#    5 % of n₁, records that differ by one unit are copies that were rounded differently.
# 6. One record of each group of copies remains.

SAME = 1e-5  # smallest difference of positions or values, over the extent of most of them
_CHANCE = 0.05  # largest share of copies that chance may explain
_SPREAD = 2.5  # pairs within one unit over equal pairs, for noise as large as the unit
_EQUAL, _UNIT, _FAR = 0.5, 1.1, 4.5  # largest differences in units: equal, one unit, four units
_SAMPLE = 20_000  # number of values from which the size of the first cells follows


def distinct(part: Observations, reach: Float[np.ndarray, "d"]) -> Int[torch.Tensor, "m"]:
    """The rows without copies, in their order. `reach` is the size of a place along each axis. See
    `Dataset.without_copies`."""
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
    """Whether each row remains. Positions are in units of a place, and values in their units."""
    columns, num_places = np.column_stack([places, values]), places.shape[1]
    # one row represents all rows that are equal in each column
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
    num_values = values.shape[1]
    tolerance = _tolerance(pairs, num_values)
    if tolerance is None:
        return remain
    scale = np.repeat([1.0, tolerance * math.sqrt(num_values)], [num_places, num_values])
    labels = np.arange(len(first))
    if len(near):
        labels[near] = len(first) + sites(columns[first[near]] / scale, np.ones(len(scale)))
    # Rows that are equal in each column already have the same index. `labels` merges indices of
    # rows that are close.
    group = labels[group]
    remain = np.bincount(group)[group] == 1
    rows = np.flatnonzero(~remain)
    # independent of the order of the records
    rows = rows[np.lexsort([*columns[rows].T, -weight[rows]])]
    remain[rows[np.unique(group[rows], return_index=True)[1]]] = True
    return remain


def _tolerance(pairs: Float[np.ndarray, "3"], num_values: int) -> float | None:
    """The largest difference between the values of copies, in their units; None without copies.

    Args:
        pairs: the numbers of pairs at one place whose values are equal, differ by at most one unit,
            and differ by at most four units.
        num_values: the number v of values of a record.
    """
    spread = _SPREAD**num_values - 1
    equal, unit, far = pairs[0], *np.diff(pairs)
    if unit / spread >= _CHANCE * equal:
        return None
    # plus one, because the number may be zero by chance
    return _EQUAL if (far + 1) / spread >= _CHANCE * unit else _UNIT


def _near(columns: Float[np.ndarray, "n c"]) -> Int[np.ndarray, "m"]:
    """The rows that may have another row within 1 along each column.

    There are c + 1 grids with cells of width c + 1, each shifted by one unit. Two values within 1
    are in different cells of at most one grid. Two rows with c values therefore share a cell of at
    least one grid.
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
    """The rows of all places with several records, with their counts. If there are many, the rows
    of about `_SAMPLE` records at random places."""
    several = counts > 1
    several[near] = True
    places = cell_keys(columns[:, :num_places].T, np.full(num_places, 4.0))
    several &= places <= np.uint64(2**64 - 1) * min(1.0, _SAMPLE / max(1, several.sum()))
    return columns[several], counts[several]


def _pairs_by_distance(
    columns: Float[np.ndarray, "m c"], counts: Int[np.ndarray, "m"], num_places: int
) -> Float[np.ndarray, "3"]:
    """The numbers of pairs at one place whose values are equal, differ by at most one unit, and
    differ by at most four units.

    Row i represents `counts[i]` records.
    """
    places, values = np.split(columns, [num_places], axis=1)
    numbers = []
    for distance in (0.5, 1.5, _FAR):
        tree = scipy.spatial.cKDTree(np.column_stack([places, values / distance]))
        both_orders = tree.count_neighbors(tree, 1.0, p=math.inf, weights=(counts, counts))
        numbers.append(0.5 * (both_orders - counts.sum()))
    return np.array(numbers, dtype=float)


def _are_equal_elsewhere(
    places: Float[np.ndarray, "n k"], values: Float[np.ndarray, "n v"]
) -> bool:
    """Whether equal values at different places are so frequent that chance may explain equal values
    at one place.

    The number of pairs at different places is increased by one, because it may be zero by chance.
    """
    cells, units = 0.5 * places, np.rint(values)
    columns = cells, units, np.column_stack([cells, units])
    within, equal, both = (_pairs(cell_keys(each.T, np.ones(each.shape[1]))) for each in columns)
    elsewhere = 0.5 * len(places) * (len(places) - 1) - within
    return within * (equal - both + 1) >= _CHANCE * both * elsewhere


def _pairs(keys: UInt64[np.ndarray, "n"]) -> float:
    """The number of pairs of equal keys."""
    counts = np.bincount(equal_keys(keys)).astype(float)
    return float(0.5 * (counts * (counts - 1)).sum())


def _resolved(y: Float[np.ndarray, "n v"]) -> Float[np.ndarray, "v"]:
    """The smallest differences that are resolved, for each column."""
    low, high = np.quantile(y, [0.05, 0.95], axis=0)
    return SAME * np.where(high > low, high - low, np.ptp(y, axis=0))


def _units(y: Float[np.ndarray, "n v"]) -> Float[np.ndarray, "v"]:
    """The smallest difference between different values, for each column."""
    gaps = [np.diff(np.sort(values)) for values in y.T]
    pairs = zip(gaps, _resolved(y), strict=True)
    return np.array([gap[gap > resolved].min(initial=gap.max()) for gap, resolved in pairs])


# Thin dense observations, so that the remaining ones have independent errors.
#
# The rows are visited in random order. A row that is still free is selected, and all rows within
# the distance are excluded. The result is a maximal set: each excluded row is close to a selected
# one.


def thin(
    x: object, distance: float | Sequence[float], *, group: object = None, seed: int = 0
) -> Int[Tensor, "m"]:
    """Select points that are at least a given distance from each other.

    Use this function if observations that are close together have nearly equal errors. Examples are
    a sensor that drifts along a track, and errors of positions in a cluster. A model that treats
    such observations as independent has error bars that are too small. Observations at a larger
    distance have independent errors, and a fit to them costs less. If you know the tracks of the
    observations, use `fit(..., track=...)` instead: it learns the correlation and uses all
    observations.

    Points are selected in random order until no point can be added. Any two selected points x and z
    have

        Σ_j ((x_j − z_j) / distance_j)² > 1 ,

    with the sum over the columns j. Try several distances. The best one has the smallest `nlpd`,
    and a `coverage` near 0.95, in `cross_validate` by tracks, paths or days.

    Args:
        x: points (N, d).
        distance: the distance in units of x, or one distance for each column, for example for space
            and time.
        group: a label for each point, for example its instrument or path. Points with different
            labels may be closer than the distance. By default, all points are in one group.
        seed: the seed of the random order.

    Returns:
        The indices (m,) of the selected rows, in increasing order. Use them for x, y and labels.

    Raises:
        TypeError: The points are not real numbers.
        ValueError: Distances are not positive and finite, or there is not one for each column, or
            the labels have another length.

    Example:
        Two thousand observations along four parallel tracks:

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
    scaled = points.cpu() / _lengths(distance, points.shape[-1])
    apart = 2.0 * _numbers(group, len(points))  # no site has points with different labels
    kept = _apart(np.column_stack([scaled.numpy(), apart]), seed)
    return torch.from_numpy(np.flatnonzero(kept)).to(points.device)


def _lengths(distance: float | Sequence[float], num_inputs: int) -> Float[Tensor, "d"]:
    values = as_real(distance, "distance").detach().cpu().flatten()
    if len(values) not in (1, num_inputs) or not ((values > 0) & torch.isfinite(values)).all():
        raise ValueError(
            f"expected a positive distance, or one for each of the {num_inputs} columns of x, got "
            f"distance={distance!r}; give it in units of x"
        )
    return values.expand(num_inputs)


def _numbers(group: object, count: int) -> Int[np.ndarray, "N"]:
    """An index for the label of each point."""
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
    """Whether each position is selected: no earlier selected position is within 1."""
    tree = scipy.spatial.cKDTree(positions)
    kept = np.zeros(len(positions), dtype=bool)
    free = ~kept
    for row in np.random.default_rng(seed).permutation(len(positions)):
        if free[row]:
            kept[row] = True
            free[tree.query_ball_point(positions[row], 1.0)] = False
    return kept
