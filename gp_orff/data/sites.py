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

# What is asked of repeated positions.


@dataclass(frozen=True)
class Repeats:
    """How records at one place are treated, and how many of them are copies.

    Args:
        distance: positions that close are merged, in the units of x. None: those that the prior
            does not distinguish; 0: none.
        copies: the records that were left out, since others have their place and their values.
        width: the size of a site, over that of positions which the prior does not distinguish.
    """

    distance: float | None = None
    copies: int = 0
    width: float = 1.0

    def __post_init__(self):
        number = is_number(self.distance) and 0 <= self.distance < float("inf")
        if not number and self.distance is not None:
            raise ValueError(
                f"expected merge= as a distance in the units of x, or None, got {self.distance!r}; "
                "0 keeps all records as they are"
            )

    def __add__(self, other: "Repeats") -> "Repeats":
        distance = self.distance if other.distance is None else other.distance
        return Repeats(distance, self.copies + other.copies, max(self.width, other.width))

    @property
    def changes(self) -> bool:
        """Whether the field may change within a site by more than is negligible."""
        return bool(self.distance) or self.width > 1

    @property
    def note(self) -> str:
        """A sentence on the copies; empty without any."""
        if not self.copies:
            return ""
        return (
            f"copies: {self.copies} records have the position and the values of others, and are "
            "used once; merge=0 uses all"
        )


BY_THE_PRIOR = Repeats()  # merges positions that the prior cannot tell apart


# Sites: groups of positions that lie close together.
#
# 1. Positions are scaled by the reach, so that a site is a ball of diameter 1. Along an axis
#    without a reach, different numbers become multiples of 2, farther from one another than any
#    site extends.
# 2. Equal positions are reduced to one first, which often is all that is needed.
# 3. Positions without a neighbour, and pairs without any other neighbour, are settled by one query
#    of a tree for all positions. These are most positions in most data.
# 4. The others are visited in order. A position that is still free becomes the leader of all free
#    ones within 1 of it, if they fit into a ball of diameter 1, else of those within ½.
#
# A chain of neighbours is cut this way: clustering by connected components would merge a whole
# track.


_ODD, _HALF = np.uint64(0x9E3779B97F4A7C15), np.uint64(29)  # of a multiplicative hash
_WORD = 2**64 - 1
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
        >>> from gp_orff.data.sites import sites
        >>> x = np.array([[0.0, 0.0], [5.0, 0.0], [0.01, 0.0], [5.0, 0.02]])
        >>> sites(x, (0.1, 0.1)).tolist(), sites(x, (0.1, 0.0)).tolist()
        ([0, 1, 0, 1], [0, 1, 0, 2])
    """
    positions, inverse = np.unique(_scaled(x, reach), axis=0, return_inverse=True)
    labels = np.arange(len(positions)) if not any(reach) else _clusters(positions)
    return numbered(labels[inverse.ravel()])


def numbered(labels: Shaped[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The number of each label, from 0, in the order of their first positions."""
    _, first, which = np.unique(labels, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[which]


def _scaled(x: Float[np.ndarray, "n d"], reach: Sequence[float]) -> Float[np.ndarray, "n d"]:
    """The positions in units of the reach; along an axis without one, numbers that differ by 2."""
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


# Equal observations in other data, by 64-bit numbers.


def fingerprints(part: Observations) -> Int[np.ndarray, "n"]:
    """A 64-bit number for each observation, equal for equal observations.

    Two different ones collide with probability 2⁻⁶⁴. y enters in single precision, because a trend
    that was subtracted may change its last digits.
    """
    columns = torch.cat([part.x, part.y.float().double()], dim=-1).cpu().numpy()
    return cell_keys(columns.T, np.zeros(columns.shape[1])) ^ np.uint64(hash(part.key) & _WORD)


def lookup(requested: Int[np.ndarray, "m"], stored: Int[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
    """The row of each requested fingerprint among the stored ones, −1 where there is none.

    The k-th of equal requested fingerprints takes the k-th of equal stored ones.
    """
    order = np.argsort(stored, kind="stable")
    rank = np.searchsorted(stored[order], requested) + _repeats(requested)
    row = order[np.minimum(rank, len(stored) - 1)]
    return np.where((rank < len(stored)) & (stored[row] == requested), row, -1)


def _repeats(values: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """The number of equal values before each value."""
    order = np.argsort(values, kind="stable")
    ordered, before = values[order], np.empty(len(values), dtype=np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before


# Observations merged at each site, and the scatter that their means leave.
#
# Records y_i = f + ε_i at one place, with weights w_i and noise ε_i ~ N(0, Σ/w_i), have the mean
# ȳ = Σ w_i y_i / W, W = Σ w_i, and
#
#     Σ_i w_i (y_i − f)ᵀ Σ⁻¹ (y_i − f) = W (ȳ − f)ᵀ Σ⁻¹ (ȳ − f) + tr(Σ⁻¹ S) ,
#     Σ_i log|Σ/w_i| = log|Σ/W| + (r − 1) log|Σ| − v (Σ_i log w_i − log W) ,
#
# S = Σ_i w_i (y_i − ȳ)(y_i − ȳ)ᵀ, for r records of v values. The posterior given the means is that
# given the records, and the scatter S completes the evidence.
#
# S does not depend on hyperparameters: it is computed once, and costs nothing in a search.


_TURN = 1e-3  # between directions at one site: their numbers differ by 1e-6 of the variance


@dataclass(frozen=True)
class Scatter:
    """The scatter of the records of a group about the means of their sites."""

    key: GroupKey
    repeats: int  # records less sites
    squares: Float[Tensor, "v v"]  # S, summed over all sites
    log_weights: float  # Σ log w_i of the records less Σ log W of the sites

    def terms(self, noise: Noise) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """What the scatter adds to yᵀK⁻¹y and to log|K| under the noise Σ of weight one."""
        logdet = self.repeats * noise.logdet - len(self.squares) * self.log_weights
        return (noise.precision * self.squares).sum((-1, -2)), logdet


def merged(
    parts: Sequence[Observations], reach: Sequence[float]
) -> tuple[list[Observations], list[Scatter]]:
    """The means at the sites of every group, with the sums of their weights, and the scatter.

    Records along different directions stay separate; those of sites with a reach may turn by a
    thousandth, and have a mean direction. A group without repeated positions stays as it is, and
    has no scatter.

    Args:
        parts: the observations, a piece for each group.
        reach: (d), the size of a site along each axis, as in `sites`.

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
    """As `merged`, where the site of every record is known."""
    pairs = [_merge(part, own) for part, own in zip(parts, labels, strict=True)]
    return [means for means, _ in pairs], [scatter for _, scatter in pairs if scatter is not None]


def site_labels(part: Observations, reach: Sequence[float]) -> Int[np.ndarray, "n"]:
    """The site of every record; records along different directions have different sites."""
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
    """The weighted mean at every site, exact where all values are equal; any `record` of each."""
    origin = values[record]
    # Differences to one of the records are zero where all are equal, and the mean is then exact.
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


# Means of the field over the records of sites, as sums over a few positions within each.
#
# Where the field changes within a site, the mean of the records is an observation of the mean of
# the field over them, not of its value at the mean position. A sum over all records would cost what
# merging saves. A site is therefore divided into 2^levels parts of about equal numbers of records,
# always along the axis on which a part is widest, and the mean position of a part stands for its
# records.


_CHUNK = 256  # sites whose nodes are visited together


@dataclass(frozen=True)
class Nodes:
    """Positions x_k with shares s_k, which sum to one at every site: f̄ ≈ Σ_k s_k f(x_k)."""

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
        """The mean positions of the parts of every site, halved `levels` times.

        Each half has half of the records, on one side along the axis on which they are widest in
        units of the `reach`, but records that are equal along it stay together. Sites that are not
        `divided` stay whole.
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
        """Σ_k s_k v_k at every site."""
        weighted = self.share.to(values).unsqueeze(-1) * values
        mean = values.new_zeros(int(self.site[-1]) + 1, values.shape[-1])
        return mean.index_add(0, self.site, weighted)


def _halved(
    scaled: Float[Tensor, "n d"], part: Int[Tensor, "n"], whole: Bool[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """The labels of both halves of every part, but for records whose part stays `whole`."""
    _, part = part.unique(return_inverse=True)
    along, extent = _along(scaled, part)
    counts = part.bincount()
    middle = _in_order(along, part)[counts.cumsum(0) - counts + (counts - 1) // 2]
    upper = along > along[middle][part]
    most = torch.zeros_like(counts).index_add(0, part, upper.to(counts)) == 0  # at the upper end
    # If the median is the maximum, no record lies above it; the records at the maximum then form
    # the upper half, so that a part with an extent is always divided.
    upper |= most[part] & (along == along[middle][part])
    return 2 * part + (upper & (extent > 0)[part] & ~whole).to(part)


def across_sites(
    x: Float[Tensor, "n d"], site: Int[Tensor, "n"], reach: Sequence[float]
) -> Int[Tensor, "n"]:
    """The records site by site, those of a site along the axis on which it is widest."""
    return _in_order(_along(_in_units_of(reach, x), site)[0], site)


def _in_units_of(reach: Sequence[float], x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return x / torch.tensor([length or 1.0 for length in reach]).to(x)


def _along(
    scaled: Float[Tensor, "n d"], part: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Float[Tensor, "m"]]:
    """Coordinates along the widest axis of their parts, and the extents of these."""
    index, shape = part.unsqueeze(-1).expand_as(scaled), (int(part.max()) + 1, scaled.shape[-1])
    low = scaled.new_full(shape, torch.inf).scatter_reduce(0, index, scaled, "amin")
    high = scaled.new_full(shape, -torch.inf).scatter_reduce(0, index, scaled, "amax")
    extent, axis = (high - low).max(-1)
    return scaled.gather(-1, axis[part].unsqueeze(-1)).squeeze(-1), extent


def _in_order(along: Float[Tensor, "n"], part: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The records part by part, in the order of their coordinates."""
    order = np.lexsort((along.cpu().numpy(), part.cpu().numpy()))
    return torch.from_numpy(order).to(part)


@dataclass(frozen=True)
class SiteMeans(LinearObservations):
    """Means of observations of a group at some sites, where H f is a mean over the nodes of each.

    The nodes of a site share the direction of its mean. The noise is that of the means.
    """

    means: Observations
    nodes: Nodes

    @classmethod
    def in_pieces(cls, groups: Sequence[Observations], nodes: Sequence[Nodes]) -> list["SiteMeans"]:
        """The means of every group, a few sites at a time: there are several times more nodes."""
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


# Copies: records at one place with equal values, which are one observation.


# How copies are searched for, in `distinct`:
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

SAME = 1e-5  # over the extent of most points, or of values: smaller differences are not resolved
_CHANCE = 0.05  # the largest share of pairs that agree by chance among those that count as copies
_SPREAD = 2.5  # pairs that differ by at most a unit, over equal ones, if the noise is of that size
_EQUAL, _UNIT, _FAR = 0.5, 1.1, 4.5  # units: what is equal, one unit apart, or four
_SAMPLE = 20_000  # values from which the first cells are measured, which may have any size


def distinct(part: Observations, reach: Float[np.ndarray, "d"]) -> Int[torch.Tensor, "m"]:
    """The rows that are left without copies, in their order; `reach` is the size of a place along
    each axis. See `Dataset.without_copies`."""
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
    num_values = values.shape[1]
    tolerance = _tolerance(pairs, num_values)
    if tolerance is None:
        return remain
    scale = np.repeat([1.0, tolerance * math.sqrt(num_values)], [num_places, num_values])
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
    """Whether records at different places are equal so often that those at one place may be.

    Elsewhere, one pair more is counted than there is, since there may be none by chance.
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
    """The smallest differences that count as such, in every column."""
    low, high = np.quantile(y, [0.05, 0.95], axis=0)
    return SAME * np.where(high > low, high - low, np.ptp(y, axis=0))


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
    scaled = points.cpu() / _lengths(distance, points.shape[-1])
    apart = 2.0 * _numbers(group, len(points))  # no site has points with different labels
    kept = _apart(np.column_stack([scaled.numpy(), apart]), seed)
    return torch.from_numpy(np.flatnonzero(kept)).to(points.device)


def _lengths(distance: float | Sequence[float], num_inputs: int) -> Float[Tensor, "d"]:
    values = as_real(distance, "distance").detach().cpu().flatten()
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
