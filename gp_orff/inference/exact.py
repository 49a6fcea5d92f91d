"""Inference by the exact kernel, in tiles, with indistinguishable positions merged."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from linear_operator import to_dense
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor
from torch.autograd import Function

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise import GroupNoise, Noise, Noises, group_noise, is_regular
from gp_orff.data.observations import (
    LinearObservations,
    Observations,
    PointObservations,
    block_diagonal,
)
from gp_orff.data.patterns import GroupKey, Pattern
from gp_orff.data.sites import (
    Nodes,
    Scatter,
    SiteMeans,
    across_sites,
    least_sites,
    merged_at,
    site_labels,
)
from gp_orff.features.chunked import by_chunks
from gp_orff.inference.equations import Whitened, dense_evidence, mean_and_response
from gp_orff.inference.features import Inference, Posterior, Residuals
from gp_orff.inference.posteriors import InChunks
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    gradients_with_graph,
    log_determinant,
    seen_by,
    solve,
)
from gp_orff.kernels.base import cholesky, cholesky_inverse
from gp_orff.kernels.derivatives import SymbolCovariance
from gp_orff.kernels.pairs import (
    Geometry,
    Rows,
    by_directions,
    cotangents,
    in_closed_form,
    row_covariance,
    row_products,
)
from gp_orff.kernels.tree import num_outputs, space_of, terms
from gp_orff.symbols.base import Identity, Symbol

# The covariance of observed values, in tiles of few points.
#
# 1. `Tiles.of` divides every group into pieces of consecutive points. A tile is the block of the
#    matrix between two pieces. It is so small that its lags, and functions of them, stay in the
#    processor cache.
# 2. `_joined` joins neighbouring small pieces, because a tile has an overhead that does not depend
#    on its size. Each value of a joined piece becomes a separate point, as groups may have
#    different directions.
# 3. `lower` visits the tiles on and below the diagonal. The others follow by symmetry.
# 4. For few rows, the quantities that depend only on positions are stored for all evaluations of a
#    search.
#
# Each value has a direction: a tile is vᵀk(x, z)w for values in the directions v and w. The p×p
# blocks of whole vectors are never formed.


_FEW = 48  # rows up to which the overhead of a tile exceeds its computation
_KEPT = 1536  # rows of all tiles up to which functions of lags are stored, some 100 MiB
_TILE = 256  # root of the number of pairs of points in a tile: the tile then stays in the cache


@dataclass(frozen=True)
class Member:
    """Consecutive points of one group."""

    group: int
    points: slice  # the points of the group
    span: slice  # the rows of the matrix
    width: int  # the values at each point


@dataclass(frozen=True)
class Piece:
    """Consecutive rows: points of one group, or of several small ones."""

    members: tuple[Member, ...]
    rows: Rows

    @property
    def span(self) -> slice:
        """The rows of the matrix."""
        return slice(self.members[0].span.start, self.members[-1].span.stop)


@dataclass(frozen=True)
class Tiles:
    """The covariance of all observed values, in the order of group, point and value."""

    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, groups: Sequence[Observations]) -> "Tiles":
        """The tiles of all groups."""
        pieces, first = [], 0
        for number, group in enumerate(groups):
            rows = Rows(group.x, _directions(group.pattern, group.direction, group.x))
            width = len(rows.v)
            step = max(1, int(_TILE / math.sqrt(width)))
            for start in range(0, len(group), step):
                points = slice(start, min(start + step, len(group)))
                size = (points.stop - start) * width
                member = Member(number, points, slice(first, first + size), width)
                pieces.append(Piece((member,), rows[points]))
                first += size
        return cls(tuple(_joined(pieces)))

    @property
    def num_rows(self) -> int:
        """M, the number of rows of the matrix."""
        return self.pieces[-1].span.stop

    @property
    def spans(self) -> list[slice]:
        """The rows of every group."""
        members = [member for piece in self.pieces for member in piece.members]
        groups = {member.group: member.span.start for member in reversed(members)}
        starts = [groups[number] for number in sorted(groups)]
        return [slice(*ends) for ends in zip(starts, [*starts[1:], self.num_rows], strict=True)]

    def lower(self) -> Iterator[tuple[Piece, Piece, Geometry]]:
        """The two pieces of every tile on or below the diagonal, and stored functions of lags."""
        kept = self._geometry if self.num_rows <= _KEPT else {}
        for i, piece in enumerate(self.pieces):
            for j, other in enumerate(self.pieces[: i + 1]):
                yield piece, other, kept.get((i, j), {})

    def __getstate__(self) -> dict[str, object]:
        """Exclude the stored functions of lags from pickles and copies."""
        return {"pieces": self.pieces}

    @cached_property
    def _geometry(self) -> dict[tuple[int, int], Geometry]:
        return {(i, j): {} for i in range(len(self.pieces)) for j in range(i + 1)}

    @torch.no_grad()
    def covariance(self, kernel: Kernel) -> Float[Tensor, "*b M M"]:
        """The lower triangle of the covariance. Tiles above the diagonal are zero."""
        between = row_covariance(kernel)
        matrix = None
        for left, right, geometry in self.lower():
            tile = between(left.rows, right.rows, geometry)
            if matrix is None:
                matrix = tile.new_zeros(*tile.shape[:-2], self.num_rows, self.num_rows)
            matrix[..., left.span, right.span] = tile
        return matrix

    @torch.no_grad()
    def change(
        self, kernel: Kernel, before: Float[Tensor, "M M"], a: Float[Tensor, "M"]
    ) -> Float[Tensor, "M"]:
        """(K − K₀) a for the covariance K, without storing it, and an earlier one K₀ = `before`.

        The tiles of K₀ on and below the diagonal are read.
        """
        between, result = row_covariance(kernel), torch.zeros_like(a)
        for left, right, geometry in self.lower():
            tile = between(left.rows, right.rows, geometry) - before[left.span, right.span]
            result[left.span] += tile @ a[right.span]
            if left is not right:
                result[right.span] += tile.mT @ a[left.span]
        return result

    @torch.no_grad()
    def cross(self, kernel: Kernel, x: Float[Tensor, "n d"], p: int) -> Float[Tensor, "*b M n*p"]:
        """The covariance with vectors of p components at points x."""
        between = row_covariance(kernel)
        vectors = Rows(x, torch.eye(p, dtype=x.dtype, device=x.device).unsqueeze(1))
        return torch.cat([between(piece.rows, vectors) for piece in self.pieces], dim=-2)


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join neighbouring small pieces to pieces in which each value is a point."""
    few: list[Piece] = []
    for piece in pieces:
        small = len(piece.rows) <= _FEW
        if few and not (small and sum(len(own.rows) for own in (*few, piece)) <= _TILE):
            yield _one(few)
            few = []
        if small:
            few.append(piece)
        else:
            yield piece
    if few:
        yield _one(few)


def _one(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    every = [piece.rows for piece in pieces]
    x = torch.cat([rows.x.repeat_interleave(len(rows.v), dim=0) for rows in every])
    v = [rows.v.expand(-1, len(rows.x), -1).transpose(0, 1).flatten(0, 1) for rows in every]
    members = tuple(member for piece in pieces for member in piece.members)
    return Piece(members, Rows(x, torch.cat(v).unsqueeze(0)))


def _directions(pattern: Pattern, direction: Tensor | None, like: Tensor) -> Tensor:
    """The directions v of the q values at each point, of shape (q, n, p) or (q, 1, p)."""
    if direction is not None:
        return direction.unsqueeze(0)
    eye = torch.eye(pattern.num_outputs, dtype=like.dtype, device=like.device)
    return eye[list(pattern.columns)].unsqueeze(1)


# The evidence under an exact kernel: a Cholesky factor, an inverse, and two sweeps over tiles.
#
# With E = VᵀK⁻¹V and log|K|, the gradient by K is G = ∂/∂log|K| K⁻¹ − U (∂/∂E) Uᵀ, U = K⁻¹V. The
# first sweep writes K. The second computes every tile again, with derivatives, and contracts it
# with its tile of G. No graph of N² nodes is stored.
#
# Sweeps visit only tiles on and below the diagonal, hence the factor 2 for tiles below. Quantities
# that all tiles share, such as weights of the kernel's terms, are cut off from the graph
# (`_Derivatives._cut`). Their derivatives are summed over the tiles, and passed back once at the
# end. A second derivative takes the graph of the whole matrix.


GroupNoises = Float[Tensor, "n v v"] | Float[Tensor, "n*v n*v"]
"""The noise covariance of a group: one matrix for every point, or one for all values."""


def tiled_evidence(
    kernel: Kernel,
    tiles: Tiles,
    design: Float[Tensor, "M 1+p"],
    noises: Sequence[GroupNoises],
) -> Evidence:
    """Return the evidence of the observed values and of every constant mean, by tiles.

    The result has derivatives with respect to the kernel, the design and the noise. Only second
    derivatives need the autograd graph of the whole covariance matrix.

    Args:
        kernel: a kernel without batch dimensions, whose parameters are leaves of the graph.
        tiles: the tiles of the observations.
        design: V (M, 1+p), the observed values and the effects of a constant mean.
        noises: the noise covariance of each group.
    """
    parameters = [parameter for parameter in kernel.parameters() if parameter.requires_grad]
    terms = TiledInvQuadLogdet.apply(kernel, tiles, len(noises), design, *noises, *parameters)
    variances = [noise.diagonal(dim1=-1, dim2=-2).flatten() for noise in noises]
    return Evidence(*terms, seen_by(design, torch.cat(variances)))


class TiledInvQuadLogdet(Function):
    """VᵀK⁻¹V and log|K|, for K = Cov[H f] + noise.

    Arguments: the kernel, the tiles, the number of groups, V, the noise of every group, and the
    trained parameters of the kernel.
    """

    @staticmethod
    def forward(ctx, kernel: Kernel, tiles: Tiles, num_groups: int, design: Tensor, *tensors):
        factor = cholesky(covariance_of_tiles(kernel, tiles, tensors[:num_groups]))
        half, u = solve(factor, design)
        ctx.kernel, ctx.tiles, ctx.num_groups = kernel, tiles, num_groups
        ctx.save_for_backward(factor, u, design, *tensors)
        return half.mT @ half, log_determinant(factor)

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        factor, u, design, *tensors = ctx.saved_tensors
        noises, parameters = tensors[: ctx.num_groups], tensors[ctx.num_groups :]
        if torch.is_grad_enabled():  # with the graph of all of K
            values = InvQuadLogdet.apply(_with_graph(ctx.kernel, ctx.tiles, noises), design)
            gradients = grad_quad, grad_logdet
            return None, None, None, *gradients_with_graph(values, (design, *tensors), gradients)
        weights = u @ (0.5 * (grad_quad + grad_quad.mT))
        inverse = cholesky_inverse(factor)
        noise_gradients = [torch.zeros_like(noise) for noise in noises]
        derivatives = _Derivatives(ctx.kernel, parameters)
        for left, right, geometry in ctx.tiles.lower():
            # If the noise of a group is one matrix for all values, its blocks extend over several
            # tiles. Its gradient follows after the loop.
            times = 1 if left is right else 2  # 2 to include the tile above the diagonal
            gradient = times * grad_logdet * inverse[left.span, right.span]
            gradient.addmm_(weights[left.span], u[right.span].mT, alpha=-times)
            for member in left.members if left is right else ():
                if noises[member.group].dim() == 2:
                    continue
                own = slice(member.span.start - left.span.start, member.span.stop - left.span.start)
                blocks = _diagonal_blocks(gradient[own, own], member)
                noise_gradients[member.group][member.points] = blocks.permute(2, 0, 1)
            if parameters:
                derivatives.add(left.rows, right.rows, geometry, gradient)
        for noise, total, span in zip(noises, noise_gradients, ctx.tiles.spans, strict=True):
            if noise.dim() == 2:
                total += grad_logdet * inverse[span, span] - weights[span] @ u[span].mT
        return None, None, None, 2 * weights, *noise_gradients, *derivatives.totals()


class _Derivatives:
    """Σ G ∂K over tiles. Tensors that all tiles share are differentiated once, at the end."""

    def __init__(self, kernel: Kernel, parameters: Sequence[Tensor]):
        self.parameters, self.heads, self.leaves = parameters, [], []
        with torch.enable_grad():
            self.products = row_products(kernel, self._cut)
        self.sums = [torch.zeros_like(t) for t in (*parameters, *self.leaves)]

    def _cut(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self.heads.append(tensor)
        self.leaves.append(tensor.detach().requires_grad_())
        return self.leaves[-1]

    def add(
        self, left: Rows, right: Rows, geometry: Geometry, gradient: Float[Tensor, "k l"]
    ) -> None:
        """Add one tile."""
        with torch.enable_grad():
            products = self.products(left, right, geometry)
        heads, gradients = zip(
            *cotangents(products, by_directions(gradient, left, right)), strict=True
        )
        inputs = (*self.parameters, *self.leaves)
        gradients = torch.autograd.grad(heads, inputs, gradients, allow_unused=True)
        self._accumulate(self.sums, gradients)

    def totals(self) -> list[Tensor]:
        """The total derivative by every parameter."""
        count = len(self.parameters)
        if self.heads:
            inner = torch.autograd.grad(
                self.heads, self.parameters, self.sums[count:], allow_unused=True
            )
            self._accumulate(self.sums[:count], inner)
        return self.sums[:count]

    def _accumulate(self, sums: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient


@torch.no_grad()
def covariance_of_tiles(
    kernel: Kernel, tiles: Tiles, noises: Sequence[GroupNoises]
) -> Float[Tensor, "*b M M"]:
    """The lower triangle of K = Cov[H f] + noise, for one kernel or a batch with its noises."""
    covariance = tiles.covariance(kernel)
    for noise, span in zip(noises, tiles.spans, strict=True):
        if noise.dim() == 2:
            covariance[span, span] += noise.tril()
    for member in chain(*(piece.members for piece in tiles.pieces)):
        if noises[member.group].dim() > 2:
            blocks = _diagonal_blocks(covariance[..., member.span, member.span], member)
            blocks += noises[member.group][..., member.points, :, :].movedim(-3, -1)
    return covariance


def _diagonal_blocks(
    part: Float[Tensor, "*b n*v n*v"], member: Member
) -> Float[Tensor, "*b v v n"]:
    """A view of the blocks of single points."""
    width = member.width
    return part.unflatten(-2, (-1, width)).unflatten(-1, (-1, width)).diagonal(dim1=-4, dim2=-2)


def _with_graph(
    kernel: Kernel, tiles: Tiles, noises: Sequence[GroupNoises]
) -> Float[Tensor, "M M"]:
    """K, differentiable any number of times."""
    between, pieces = row_covariance(kernel), tiles.pieces
    rows = [torch.cat([between(a.rows, b.rows) for b in pieces], dim=-1) for a in pieces]
    blocks = (noise if noise.dim() == 3 else noise.unsqueeze(0) for noise in noises)
    return torch.cat(rows) + torch.block_diag(*chain(*blocks))


# Sites: positions that are merged because the prior cannot distinguish them. Their reach is the
# largest distance between positions of one site, along each axis.
#
# 1. `merge_distance` tries lags along each axis, from the extent of the data downwards by factors
#    of √2. It does so at a few positions, since a kernel need not be stationary. The reach is the
#    longest lag up to which the covariance changes by less than 10⁻⁶ of the variance, or by less
#    than a hundredth of the noise variance of a site mean.
# 2. The noise variance of a mean depends on the number of records at a site, and this number
#    depends on the reach. `sites_of` computes the reach for one record per site, counts the
#    records, and computes the reach again.
# 3. Different positions are merged only if this saves at least a fifth of the rows of the matrix.
# 4. If there are too many data for the exact kernel, `with_few_sites` widens the sites until their
#    means are few enough. The field then changes within sites, and `changes_within` computes these
#    changes.


Sites = Sequence[Int[np.ndarray, "n"]]
"""The site of every record of every group."""

_SHARE = 1e-6  # largest change of the field within a site, over its variance
_OF_NOISE = 0.01  # the same over the noise variance of the site's mean
_SAVING = 0.8  # largest share of values after a merge of different positions
_MOST_INPUTS = 16  # with more, only equal positions are merged
_BASES, _HALVINGS, _STEPS = 4, 40, 2  # positions, octaves of lags, and lags per octave
_NUMBERS = 2**23  # elements of covariances in memory at a time
_WIDEST, _BISECTIONS = 2.0**20, 2  # largest factor of the reach; bisections of its logarithm
_RECORDS = 8  # records of a site from which the change of the field follows


@torch.no_grad()
def merge_distance(
    kernel: Kernel, noises: Noises, data: Dataset, count: float = 1.0
) -> tuple[float, ...]:
    """Return the largest lag r along each axis at which the prior cannot distinguish positions.

    Two positions cannot be distinguished if, for all lags up to r, every component satisfies

        K(0) − K(r) ≤ max(10⁻⁶ K(0), 10⁻² σ²/count) ,

    where σ² is the smallest noise variance of a record.

    Args:
        kernel: the prior.
        noises: the noise covariances Σ, by the label of the group.
        data: the observations. Their bounding box limits the lags.
        count: the number of records at a site.
    """
    if data.num_inputs > _MOST_INPUTS:
        return (0.0,) * data.num_inputs
    low, high = np.array(data.survey.box).T
    bases = torch.cat([part.x for part in data.survey.sample])
    bases = bases[:: -(-len(bases) // _BASES)]
    change = _OF_NOISE * min(data.local_noises(noises).values()) / count
    # In ascending order: the first lag that the prior distinguishes ends the reach.
    factors = 2.0 ** (-torch.arange(_HALVINGS * _STEPS, 0, -1).to(bases) / _STEPS)
    extents = torch.diag(torch.from_numpy(high - low).to(bases))
    lags = factors[:, None] * extents.unsqueeze(-2)  # (d, L, d): along each axis in turn
    # Lags point to the inside of the box: a kernel may be undefined outside, such as below sources.
    inward = 1 - 2 * (bases > torch.from_numpy(0.5 * (low + high)).to(bases)).to(bases)
    bases, moved = bases[:, None, None, :], lags * inward[:, None, None, :]
    told = _told_apart(kernel, bases, bases + moved, change)
    lengths = []
    for axis, apart in enumerate(told.any(0)):
        indistinct = int(apart.int().argmax()) if apart.any() else len(factors)
        lengths.append(lags[axis, indistinct - 1, axis].item() if indistinct else 0.0)
    return tuple(lengths)


def _told_apart(
    kernel: Kernel, x: Float[Tensor, "B 1 1 d"], z: Float[Tensor, "B d L d"], permitted: float
) -> Bool[Tensor, "B d L"]:
    """Return whether the prior distinguishes positions z from x, which is if K(0) − K(x − z) >
    `permitted`."""
    pairs = [(x, x), (z, z), (x.expand_as(z), z)]
    left, right = (
        torch.cat([p.reshape(-1, 1, p.shape[-1]) for p in side])
        for side in zip(*pairs, strict=True)
    )
    # One call of the kernel for all pairs, unless there are very many: a call has much overhead.
    together = max(1, _NUMBERS // kernel.num_outputs_per_input(x, x) ** 2)
    parts = zip(left.split(together), right.split(together), strict=True)
    blocks = torch.cat([to_dense(kernel(*some)) for some in parts]).diagonal(dim1=-1, dim2=-2)
    counts = [a.shape[:-1].numel() for a, _ in pairs]
    at_x, at_z, between = (
        block.unflatten(0, a.shape[:-1])
        for block, (a, _) in zip(blocks.split(counts), pairs, strict=True)
    )
    # Half the variance of the difference, which is K(0) − K(r) for a stationary kernel.
    change = 0.5 * (at_x + at_z) - between
    return (change > (_SHARE * at_x).clamp_min(permitted)).any(-1)


def sites_of(
    kernel: Kernel, noises: Noises, data: Dataset
) -> tuple[tuple[float, ...] | None, Sites | None]:
    """Return the reach of the sites along each axis, and the site of every record; None if nothing
    is merged.

    A distance `merge=` of the user applies to the directions of space. Along other inputs, such as
    time, positions are merged if the prior does not distinguish them. Without `merge=`, different
    positions are merged only if this saves a fifth of the values. For data with a `width` above 1,
    the reach is this multiple of the distance that the prior does not distinguish.
    """
    given = data.repeats.distance
    if given == 0 or not all(is_regular(noises[key.label]) for key in data.keys):
        return None, None
    reach = merge_distance(kernel, noises, data)
    if data.repeats.width > 1:
        reach = tuple(data.repeats.width * length for length in reach)
        return reach, _labels(data, reach)
    # The mean of many records has less noise, and permits only smaller changes within a site. The
    # number of records depends on the reach in turn: it is counted once, at the reach for single
    # records. It is Σ r² / Σ r over sites with r records, the number at the site of an average
    # record: many single records must not hide a few crowded sites.
    sites = _labels(data, reach)
    counts = np.concatenate([np.bincount(labels) for labels in sites])
    count, before = float((counts**2).sum() / counts.sum()), reach
    if count > 1:
        reach = merge_distance(kernel, noises, data, count)
    if given is not None:
        space = space_of(kernel, data.num_inputs)
        reach = tuple(given if axis in space else length for axis, length in enumerate(reach))
    if reach != before:
        sites = _labels(data, reach)
    if given is None and sum(labels.max() + 1 for labels in sites) > _SAVING * sum(map(len, sites)):
        reach = (0.0,) * data.num_inputs
        sites = _labels(data, reach)
    return reach, sites


def with_few_sites(kernel: Kernel, noises: Noises, data: Dataset, most: float) -> Dataset:
    """Return the data with larger sites, so that the means at the sites have at most `most` values.

    The sites are about as small as this limit allows.
    """
    reach = merge_distance(kernel, noises, data)

    def fits(width: float) -> bool:
        wide = [width * length for length in reach]
        if least_size(data, wide) > most:
            return False
        pairs = zip(data.observations, _labels(data, wide), strict=True)
        return sum((labels.max() + 1) * part.y.shape[-1] for part, labels in pairs) <= most

    # The width doubles until the means are few enough. Two bisections of its logarithm then reduce
    # it to at most 2^¼ times the smallest width. `high` always satisfies the limit, unless the
    # doubling ended at `_WIDEST`.
    low, high = 1.0, 2.0
    while not fits(high) and high < _WIDEST:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return replace(data, repeats=replace(data.repeats, width=high))


def least_size(data: Dataset, reach: Sequence[float]) -> int:
    """A lower bound of the number of values after a merge at sites, in one pass over the data."""
    every = ((part.x.cpu().numpy(), part.y.shape[-1]) for part in data.observations)
    return sum(least_sites(x, reach) * width for x, width in every)


def may_suffice(kernel: Kernel, noises: Noises, data: Dataset, most: float) -> bool:
    """Whether a merge at sites may leave at most `most` values, according to a lower bound."""
    if data.num_values <= most or data.repeats.distance is not None or data.tracks:
        return True
    longest = [data.repeats.width * length for length in merge_distance(kernel, noises, data)]
    return least_size(data, longest) <= most


@torch.no_grad()
def changes_within(
    kernel: Kernel,
    noises: Noises,
    reach: Sequence[float],
    data: Dataset,
    sites: Sites | None = None,
    levels: int = 0,
    of_records: bool = False,
) -> tuple[Float[Tensor, "m"], ...]:
    """Return the changes c of the field within the sites of every group.

    The mean f̄ of the field at the records of a site differs from its value at their mean position
    x̄. Relative to the noise variance σ², the prior variance of the difference is
    c = Var[f̄ − f(x̄)] / σ². It is computed from up to eight records across the site. A mean of
    weight W then has the noise variance σ² (1/W + c). If sites are halved `levels` times, their
    parts have the shares s_k and the mean positions x_k, and c = Var[f̄ − Σ_k s_k f(x_k)] / σ².

    The deviation of each of n records from their mean has the variance σ² (1 + v) (n − 1)/n. The
    noise contributes the 1. The field contributes v = Σ_i Var[f_i − f̄] / ((n − 1) σ²).

    Args:
        kernel: the prior.
        noises: the noise covariances Σ, by the label of the group.
        reach: the size of a site along each of d axes.
        data: the observations.
        sites: the site of every record, if known.
        levels: how many times the sites are halved, as in `Nodes.of`.
        of_records: whether to return v instead of c.
    """
    sites = sites or _labels(data, reach)
    return tuple(
        _changes(kernel, noises, part, reach, labels, levels, of_records)
        for part, labels in zip(data.observations, sites, strict=True)
    )


def _changes(
    kernel: Kernel,
    noises: Noises,
    part: Observations,
    reach: Sequence[float],
    labels: Int[np.ndarray, "n"],
    levels: int,
    of_records: bool,
) -> Float[Tensor, "m"]:
    site = torch.from_numpy(labels).to(part.x.device)
    counts = site.bincount()
    changes = torch.zeros_like(counts, dtype=part.x.dtype)
    several = (counts > 1).nonzero().squeeze(-1)
    if not len(several):
        return changes
    # Records are sorted by site below. `first` is the first row of a site.
    first, counts = (counts.cumsum(0) - counts)[several, None], counts[several, None]
    ranks = torch.arange(_RECORDS).to(site)
    # Eight records across a large site represent all, to bound the cost for crowded sites.
    spaced = ranks * (counts - 1) // (_RECORDS - 1)  # includes the records at both ends
    spaced = torch.where(counts > _RECORDS, spaced, ranks.clamp_max(counts - 1))
    rows = across_sites(part.x, site, reach)[first + spaced]
    weight = torch.ones_like(part.y[:, 0]) if part.weight is None else part.weight
    weight = weight[rows] * (ranks < counts)
    weight = weight / weight.sum(-1, keepdim=True)
    if of_records:
        x, forms = part.x[rows], torch.diag_embed(weight) - weight.unsqueeze(-1) * weight[:, None]
        taken = counts.clamp_max(_RECORDS).unsqueeze(-1)
        forms = forms * taken / (taken - 1)  # Σ_i Var[f_i − f̄] / (n − 1)
    else:
        nodes = _nodes(part.x[rows], weight, reach, levels)
        x = torch.cat([part.x[rows], nodes[0]], dim=-2)
        signs = torch.cat([weight, -nodes[1]], dim=-1)  # f̄ − Σ_k s_k f(x_k)
        forms = signs.unsqueeze(-1) * signs[:, None]
    size = x.shape[-2]
    covariance = to_dense(kernel(x, x)).unflatten(-1, (size, -1)).unflatten(-3, (size, -1))
    covariance = torch.einsum("mij,mipjq->mpq", forms, covariance)
    variances = part.take(rows[:, 0]).apply_to_covariance(covariance).diagonal(dim1=-1, dim2=-2)
    noise = group_noise(part.key, noises).diagonal().mean()
    changes[several] = variances.mean(-1).clamp_min(0.0) / noise
    return changes


def _nodes(
    x: Float[Tensor, "m r d"], weight: Float[Tensor, "m r"], reach: Sequence[float], levels: int
) -> tuple[Float[Tensor, "m k d"], Float[Tensor, "m k"]]:
    """The nodes of sites with r records each, and their shares. Missing nodes have the share 0."""
    site, record = weight.nonzero(as_tuple=True)
    nodes = Nodes.of(x[site, record], weight[site, record], site, reach, levels)
    counts = nodes.site.bincount()
    rank = torch.arange(len(nodes.site)).to(site) - (counts.cumsum(0) - counts)[nodes.site]
    # A site with fewer nodes than 2^levels is padded by one of its records, with the share zero:
    # the kernel has to be defined at padded positions too.
    places = x[:, :1].repeat(1, 2**levels, 1).index_put((nodes.site, rank), nodes.x)
    shares = weight.new_zeros(places.shape[:2]).index_put((nodes.site, rank), nodes.share)
    return places, shares


def exceeds(reach: Sequence[float], permitted: Sequence[float]) -> bool:
    """Return whether a reach is more than twice as long as the permitted one along any axis."""
    return any(length > 2 * most for length, most in zip(reach, permitted, strict=True))


def _labels(data: Dataset, reach: Sequence[float]) -> Sites:
    return [site_labels(part, reach) for part in data.observations]


# The posterior of a field and of its symbols by the exact kernel.
#
# The covariance between two kinds of linear observations is H₁ K H₂ᵀ, where K is the prior
# covariance at the points of both. Sites with nodes and means along tracks are special cases.


_INTERMEDIATE = 9  # factor of memory for intermediate results in covariances of symbols


@dataclass(frozen=True)
class ExactPosterior(InChunks):
    """The posterior of Q f given y = H f + ε.

    The mean is Cov[Q f(x), H f] α. The covariance is Cov[Q f(x)] − VᵀV with
    V = L⁻¹ Cov[H f, Q f(x)]. If the symbol Q has a reference, the value there is subtracted.
    """

    kernel: Kernel
    observed: Sequence[LinearObservations]
    noises: Noises
    factor: Float[Tensor, "M M"]  # L, with L Lᵀ = Cov[H f] + noise
    alpha: Float[Tensor, "M 1"]  # (L Lᵀ)⁻¹(y − c)
    response: Float[Tensor, "M p"]  # (L Lᵀ)⁻¹(1⊗I_p), the response to constants
    symbol: Symbol  # Q
    space: tuple[int, ...]  # directions of the symbol

    @property
    def noise_root(self) -> Float[Tensor, "M M"]:
        """A root of the noise covariance."""
        noise = [observations.noise_covariance(self.noises) for observations in self.observed]
        return cholesky(block_diagonal(noise))

    @property
    def num_outputs(self) -> int:
        return self.symbol.num_outputs(num_outputs(self.kernel))

    @property
    def _is_field(self) -> bool:
        return self.symbol.is_identity

    @property
    def _width(self) -> int:
        numbers = len(self.factor) * self.num_outputs
        return numbers if self._is_field else numbers * _INTERMEDIATE

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "ExactPosterior":
        """The posterior of the symbol of Q f.

        Raises:
            NotImplementedError: if the symbol has no closed form under this kernel.
        """
        composed = symbol if self._is_field else symbol @ self.symbol
        image = replace(self, symbol=composed, space=tuple(space))
        image._blocks(self.observed[0].x[:1])  # raises
        return image

    def of_part(self, expansion, kernel):
        return replace(self, kernel=kernel)

    def cross(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "M n*q"]:
        """Cov[H f, Q f(x)]."""

        rows = []
        for part in self.observed:
            both = self.symbol, x, part.symbol, part.points, self.space or part.space
            rows.append(part.rows(prior_covariance(self.kernel, *both).mT))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def mean(self, x: Tensor) -> Tensor:
        return self._weighted(x, self.alpha).squeeze(-1)

    def absorbed(self, x: Tensor) -> Tensor:
        return self._weighted(x, self.response)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha = torch.cat([self.alpha, self.response], dim=-1)

        def moments(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q*(2+p)"]:
            cross = self.cross(points)
            weighted = (cross.mT @ alpha).unflatten(0, (len(points), -1))
            variance = self._variance_given(points, cross)
            return torch.cat([weighted, variance.unsqueeze(-1)], dim=-1).flatten(1)

        values = self._in_chunks(moments, x, alpha.shape[-1] + 1)
        return values[..., 0], values[..., -1].clamp_min(0), values[..., 1:-1]

    def _weighted(self, x: Float[Tensor, "n d"], alpha: Float[Tensor, "M k"]) -> Tensor:
        """Cov[Q f(x), H f] α, (n, q, k)."""

        def values(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q*k"]:
            return (self.cross(points).mT @ alpha).reshape(len(points), -1)

        return self._in_chunks(values, x, alpha.shape[-1])

    def _in_chunks(
        self, function: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"], count: int
    ) -> Float[Tensor, "n q k"]:
        """Evaluate a function with `count` values for each output at each point, in chunks."""
        if not len(x):
            return self.alpha.new_empty(0, self.num_outputs, count)
        values = by_chunks(function, x.double(), self._width)
        return values.unflatten(-1, (self.num_outputs, count))

    def covariance(self, x: Tensor) -> Tensor:
        x = x.double()
        whitened = self._whitened(self.cross(x))
        prior = prior_covariance(self.kernel, self.symbol, x, self.symbol, x, self.space)
        return prior - whitened.mT @ whitened

    def _variance(self, x: Tensor) -> Tensor:
        return self._variance_given(x, self.cross(x))

    def _variance_given(
        self, x: Float[Tensor, "n d"], cross: Float[Tensor, "M n*q"]
    ) -> Float[Tensor, "n q"]:
        explained = self._whitened(cross).square().sum(0).unflatten(0, (len(x), -1))
        return self._prior_blocks(x).diagonal(dim1=-1, dim2=-2) - explained

    def _blocks(self, x: Tensor) -> Tensor:
        whitened = self._whitened(self.cross(x)).mT.unflatten(0, (len(x), -1))  # (n, q, M)
        return self._prior_blocks(x) - whitened @ whitened.mT

    def _whitened(self, cross: Float[Tensor, "M n*q"]) -> Float[Tensor, "M n*q"]:
        return torch.linalg.solve_triangular(self.factor, cross, upper=False)

    def _prior_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q q"]:
        if self._is_field:
            return to_dense(self.kernel(x.unsqueeze(-2)))  # a batch of single points
        covariance = SymbolCovariance(self.kernel, self.symbol, self.symbol, self.space)
        x = x.unsqueeze(1)

        def between(a: Tensor, b: Tensor) -> Float[Tensor, "n q q"]:
            return covariance.blocks(a, b).squeeze(1)

        anywhere = x[:1] if covariance.is_stationary else x
        with _closed_form(self.symbol):
            blocks = between(anywhere, anywhere).expand(len(x), -1, -1)
        reference = self.symbol.reference_points(x, self.space)
        if reference is None:
            return blocks
        cross = between(x, reference)
        return blocks + between(reference, reference) - cross - cross.mT


def prior_covariance(
    kernel: Kernel,
    left: Symbol,
    x: Float[Tensor, "n d"],
    right: Symbol,
    z: Float[Tensor, "m d"],
    space: Sequence[int],
) -> Float[Tensor, "n*q m*r"]:
    """Return Cov[Q f(x), R f(z)] for two symbols Q and R of the field f.

    If a symbol has a reference, its value there is subtracted.

    Raises:
        NotImplementedError: a symbol has no closed form under this kernel.
    """
    if left.is_identity and right.is_identity:
        return to_dense(kernel(x, z))
    with _closed_form(right if left.is_identity else left):
        return SymbolCovariance(kernel, left, right, tuple(space)).relative(x, z)


def observed_covariance(
    kernel: Kernel, observed: Sequence[LinearObservations]
) -> Float[Tensor, "M M"]:
    """Return Cov[H f] with a block H₁ K H₂ᵀ for any two kinds of observations."""

    def block(a: LinearObservations, b: LinearObservations) -> Float[Tensor, "K L"]:
        both = b.symbol, b.points, a.symbol, a.points, b.space or a.space
        return a.rows(b.rows(prior_covariance(kernel, *both)).mT)

    lower = [[block(a, b) for b in observed[: i + 1]] for i, a in enumerate(observed)]
    rows = [
        torch.cat([*blocks, *(below[i].mT for below in lower[i + 1 :])], dim=-1)
        for i, blocks in enumerate(lower)
    ]
    return torch.cat(rows)


@contextmanager
def _closed_form(symbol: Symbol) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise type(error)(
            f"{type(symbol).__name__} has no closed form under this exact kernel ({error}); use "
            "features instead, for instance by "
            "VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))"
        ) from error


# Inference by the exact kernel.
#
# 1. Records are merged at their sites. The scatter about the means completes the evidence.
# 2. The covariance of all values is computed in tiles, with the gradient of `tiled_evidence`, if
#    each value is observed at a single point. Symbols and means along tracks need the general
#    `observed_covariance`.
# 3. If sites are wide, the field changes within them. For the evidence, this change counts as
#    additional noise of the means (`_merged`). For the posterior, such noise would hide information
#    on the field near the records. Sites with large changes are therefore divided into four parts
#    (`resolved`).
# 4. `posterior` factorises the covariance once. Mean, variance and leave-one-out residuals use the
#    factor and the solution.


Changes = Callable[..., Sequence[Float[Tensor, "m"]]]
"""A function like `changes_within` of data, sites, `levels` and `of_records`."""

_LEVELS = 2  # a site is halved so many times
_MUCH_CHANGE = 0.01  # large changes of the field exceed this share of the noise of the mean


@dataclass(frozen=True)
class ExactInference(Inference):
    """Inference by the exact kernel: one Cholesky factorisation of an M×M matrix.

    Repeated positions are merged, so that the matrix has a row for each value at a site.
    """

    data: Dataset
    reach: tuple[float, ...] | None = None  # of a site along each axis; None if nothing is merged
    changes: Changes | None = None  # of the field within sites; None if they are negligible
    labels: Sites | None = None  # the site of every record of `data`, if known
    is_exact = True

    @classmethod
    def merging(cls, kernel: Kernel, noises: Noises, data: Dataset) -> "ExactInference":
        """Return inference in which positions are merged that the prior cannot distinguish. An
        argument `merge=` of the user replaces this rule."""
        reach, sites = (None, None) if data.tracks else sites_of(kernel, noises, data)
        if not (data.repeats.changes and reach is not None and any(reach)):
            return cls(data, reach, labels=sites)
        detached = {label: noise.detach() for label, noise in noises.items()}
        return cls(data, reach, partial(changes_within, kernel, detached, reach), sites)

    @cached_property
    def sites(self) -> Sites:
        """The site of every record of every group."""
        if self.labels is not None:
            return self.labels
        if self.reach is None:
            return [np.arange(len(part)) for part in self.data.observations]
        return _labels(self.data, self.reach)

    @cached_property
    def _means(self) -> tuple[list[Observations], list[Scatter]]:
        """The means at the sites of every group, with the noise of the records only."""
        if self.reach is None:
            return self.data.observations, []
        return merged_at(self.data.observations, self.sites)

    @cached_property
    def _merged(self) -> tuple[list[Observations], list[Scatter]]:
        """The means at all sites, with changes of the field within sites as additional noise."""
        means, scatter = self._means
        if self.changes is not None:
            means = _with_changes(means, self._changes_of_sites)
        return means, scatter

    @cached_property
    def _changes_of_sites(self) -> Sequence[Float[Tensor, "m"]]:
        return [torch.zeros(1)] if self.changes is None else self.changes(self.data, self.sites)

    @cached_property
    def _scatter_factors(self) -> Mapping[GroupKey, Float[Tensor, ""]]:
        """The factors 1 + v of every group, with v of `changes_within`.

        The evidence treats changes of the field between the records of a site as noise.
        """
        if self.changes is None:
            return {}
        factors = {}
        changes = self.changes(self.data, self.sites, of_records=True)
        for part, labels, change in zip(self.data.observations, self.sites, changes, strict=True):
            repeats = torch.from_numpy(np.bincount(labels)).to(change) - 1
            factors[part.key] = 1 + repeats @ change / repeats.sum().clamp_min(1)
        return factors

    @cached_property
    def observed(self) -> Sequence[LinearObservations]:
        points = [PointObservations(self._merged[0])] if self._merged[0] else []
        return (*points, *(part.condensed for part in self.data.tracks), *self.data.symbol_data)

    @cached_property
    def resolved(self) -> Sequence[LinearObservations]:
        """The observations for a posterior.

        If the field changes much within a site, the site is divided into four parts. The mean of
        the field is then computed from its values at these parts, and only changes within the parts
        are treated as noise. If all changes were treated as noise, posterior variances at the
        records would be up to three times too large.
        """
        divided = self._divided
        if not any(own.any() for own in divided):
            return self.observed
        halved = self.changes(self.data, self.sites, levels=_LEVELS)
        changes = [
            torch.where(own, less, change)
            for own, less, change in zip(divided, halved, self._changes_of_sites, strict=True)
        ]
        means = _with_changes(self._means[0], changes)
        return (*SiteMeans.in_pieces(means, self._nodes(divided)), *self.observed[1:])

    @cached_property
    def _divided(self) -> list[Bool[Tensor, "m"]]:
        """Whether, for each site, the field changes within the site by much compared with the
        noise."""
        if self.changes is None:
            return []
        pairs = zip(self._means[0], self._changes_of_sites, strict=True)
        return [
            (1.0 if part.weight is None else part.weight) * change > _MUCH_CHANGE
            for part, change in pairs
        ]

    def _nodes(self, divided: Sequence[Bool[Tensor, "m"]]) -> list[Nodes]:
        """The parts of all sites. Only the sites in `divided` have several parts."""
        nodes = []
        for part, labels, own in zip(self.data.observations, self.sites, divided, strict=True):
            weight = torch.ones_like(part.y[:, 0]) if part.weight is None else part.weight
            site = torch.from_numpy(labels).to(part.x.device)
            nodes.append(Nodes.of(part.x, weight, site, self.reach, _LEVELS, own))
        return nodes

    @property
    def size(self) -> int:
        """M, the number of rows of the matrix, which determines the cost.

        A mean of components along directions counts as a whole vector.
        """
        return sum(part.num_averaged or len(part.values) for part in self.observed)

    @property
    def mean_change(self) -> float:
        """The mean of the changes of the field within sites, over the noise variance."""
        return torch.cat(list(self._changes_of_sites)).mean().item()

    @property
    def note(self) -> str:
        """A note on merged observations, for the report; empty if nothing is merged."""
        before = sum(map(len, self.data.observations))
        after = sum(map(len, self._merged[0]))
        if after == before:
            return ""
        places = "one position" if after == 1 else f"{after} positions"
        reach = ", ".join(f"{length:.3g}" for length in self.reach)
        within = f" (differences up to {reach} along each input)" if any(self.reach) else ""
        return f"{before} observations were merged at {places}{within}; merge=0 prevents this"

    def stale(self, kernel: Kernel, noises: Noises) -> bool:
        """Whether the prior now distinguishes positions that were merged under earlier values."""
        repeats = self.data.repeats
        if repeats.distance is not None or self.reach is None or not any(self.reach):
            return False
        indistinct = merge_distance(kernel, noises, self.data)
        return exceeds(self.reach, [repeats.width * length for length in indistinct])

    @cached_property
    def _tiles(self) -> Tiles:
        return Tiles.of([*self._merged[0], *(part.means for part in self.data.tracks)])

    def of(self, data):
        return self if data is self.data else replace(self, data=data, labels=None)

    def prepare(self) -> None:
        _ = self.observed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        if self._in_tiles(kernel):
            parts = self.design(noises), self._noise_by_group(noises)
            evidence = tiled_evidence(kernel, self._tiles, *parts)
        else:
            covariance = observed_covariance(kernel, self.observed) + _noise(self.observed, noises)
            evidence = dense_evidence(covariance, self.design(noises))
        return self._with_scatter(evidence, noises)

    def serves_batches(self, kernel: Kernel) -> bool:
        """Return whether `in_batches` is possible for the data and the kernel.

        The kernel must have a closed form, and each observed value must be that of a single point.
        """
        single = not self.data.tracks and not self.data.symbol_data and not self._merged[1]
        return single and self.resolved is self.observed and in_closed_form(kernel)

    @torch.no_grad()
    def in_batches(self, kernel: Kernel, noises: Noises) -> Whitened:
        """The evidence under every kernel of a batch, each with its noise."""
        covariance = covariance_of_tiles(kernel, self._tiles, self._noise_by_group(noises))
        return Whitened.of_covariance(covariance, self.design(noises))

    def posteriors(
        self,
        whitened: Whitened,
        each: Sequence[tuple[Kernel, Noises]],
        mean: Float[Tensor, "p"] | None,
    ) -> list[Posterior]:
        """The posteriors of a batch, with the kernel and the noise of each."""
        factor, _, evidence = whitened
        solved, posteriors = whitened.solved(mean), []
        for number, (kernel, noises) in enumerate(each):
            alpha = mean_and_response(solved[number])
            parts = kernel, self.resolved, noises, factor[number], *alpha, Identity(), ()
            terms_of_one = (None if part is None else part[number] for part in evidence)
            one = ExactPosterior(*parts), Evidence(*terms_of_one), noises
            posteriors.append(self._posterior(*one, mean))
        return posteriors

    def cross(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> Float[Tensor, "*b M n*p"]:
        """Cov[H f, f(x)] under every kernel of a batch."""
        return self._tiles.cross(kernel, x, num_outputs(kernel))

    def _in_tiles(self, kernel: Kernel) -> bool:
        """Whether the covariance can be computed in tiles.

        Each value must be observed at a single point. The covariance may depend only on leaves of
        the graph, which are the parameters of one kernel.
        """
        single = all(part.one_by_one for part in self.data.tracks) and not self.data.symbol_data
        fixed = [tensor for part in self._merged[0] for tensor in (part.x, part.direction)]
        return (
            single
            and not kernel.batch_shape
            and all(parameter.is_leaf for parameter in kernel.parameters())
            and not any(tensor is not None and tensor.requires_grad for tensor in fixed)
        )

    def _noise_by_group(self, noises: Noises) -> list[Tensor]:
        """The noise of every group, at each point or, for tracks, of all values."""
        groups = [
            group.noise(GroupNoise(group_noise(group.key, noises))) for group in self._merged[0]
        ]
        return groups + [part.noise_covariance(noises) for part in self.data.tracks]

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        covariance, design = self._lower(kernel, noises), self.design(noises)
        with warnings.catch_warnings():  # rounding differs from that of the evidence in tiles
            warnings.simplefilter("ignore", NumericalWarning)
            factor, _, evidence = whitened = Whitened.of_covariance(covariance, design)
        alpha = mean_and_response(whitened.solved(mean))
        distribution = ExactPosterior(kernel, self.resolved, noises, factor, *alpha, Identity(), ())
        return self._posterior(distribution, evidence, noises, mean)

    def _posterior(
        self,
        distribution: ExactPosterior,
        evidence: Evidence,
        noises: Noises,
        mean: Float[Tensor, "p"] | None,
    ) -> Posterior:
        keys = [part.key for part in self.data.observations]
        group_noises = {key: GroupNoise(group_noise(key, noises)) for key in keys}
        mean = evidence.best_mean() if mean is None else mean
        return Posterior(distribution, self._with_scatter(evidence, noises), group_noises, mean)

    def _lower(self, kernel: Kernel, noises: Noises) -> Float[Tensor, "M M"]:
        """Cov[H f] plus the covariance of the noise, on and below the diagonal."""
        if self.resolved is self.observed and self._in_tiles(kernel):
            return covariance_of_tiles(kernel, self._tiles, self._noise_by_group(noises))
        return observed_covariance(kernel, self.resolved) + _noise(self.resolved, noises)

    @torch.no_grad()
    def residuals(self, posterior):
        if self.data.tracks or self.data.symbol_data:
            return None
        return dict(self._latent(posterior))

    @torch.no_grad()
    def latent_of_sites(self, posterior):
        if self.changes is None or self.data.tracks or self.data.symbol_data:
            return None
        return dict(self._latent(posterior))

    def _latent(self, posterior: Posterior) -> Iterator[tuple[GroupKey, Residuals]]:
        """The residuals of all records, from the posterior noise of the means ȳ at sites.

        N is the noise covariance of the means with changes of the field within sites, N₀ without
        them, and S = K + N. The noise of the means has the posterior mean N₀ S⁻¹(ȳ − c) and the
        covariance N₀ − N₀ S⁻¹ N₀. The residual of a record y is larger than this mean by y − ȳ.
        """
        field: ExactPosterior = posterior.distribution
        inverse, start = cholesky_inverse(field.factor), 0
        for part, labels, means in zip(
            self.data.observations, self.sites, self._means[0], strict=True
        ):
            # N₀ is without the changes within sites, as they belong to the field.
            noise = means.noise(posterior.noises[means.key])
            span = slice(start, start + means.y.numel())
            width, start = means.y.shape[-1], span.stop
            alpha = field.alpha[span].unflatten(0, (-1, width))
            blocks = inverse[span, span].unflatten(0, (-1, width)).unflatten(2, (-1, width))
            blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            site = torch.from_numpy(labels).to(part.x.device)
            residual = part.y - means.y[site] + (noise @ alpha)[site].squeeze(-1)
            yield part.key, Residuals(residual, (noise - noise @ blocks @ noise)[site])

    def _with_scatter(self, evidence: Evidence, noises: Noises) -> Evidence:
        """The evidence of all records, from the evidence of the means at the sites."""
        sites = (
            scatter.terms(
                Noise.of(
                    self._scatter_factors.get(scatter.key, 1.0) * group_noise(scatter.key, noises)
                )
            )
            for scatter in self._merged[1]
        )
        blocks = (part.scatter_terms(noises) for part in self.data.tracks)
        return evidence.with_scatter(chain(sites, blocks))

    @torch.no_grad()
    def prior(self, kernel: Kernel) -> Float[Tensor, "M M"]:
        """Cov[H f] of the evidence. Tiles above the diagonal may be zero."""
        if self._in_tiles(kernel):
            return self._tiles.covariance(kernel)
        return observed_covariance(kernel, self.observed)

    @torch.no_grad()
    def noise(self, noises: Noises) -> Float[Tensor, "M M"]:
        """The covariance of the noise of the evidence."""
        return _noise(self.observed, noises)

    @torch.no_grad()
    def change_of_prior(
        self, kernel: Kernel, before: Float[Tensor, "M M"], a: Float[Tensor, "M"]
    ) -> Float[Tensor, "M"]:
        """(K − K₀) a for K = Cov[H f], and an earlier K₀ = `before`, the result of `prior`."""
        if self._in_tiles(kernel):
            return self._tiles.change(kernel, before, a)
        return (self.prior(kernel) - before) @ a

    @torch.no_grad()
    def noise_times(self, noises: Noises, a: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
        """The covariance of the noise times a vector."""
        pieces = a.split([len(part.values) for part in self.observed])
        pairs = zip(self.observed, pieces, strict=True)
        return torch.cat([part.noise_times(noises, piece) for part, piece in pairs])

    @torch.no_grad()
    def scatter_logdet(self, noises: Noises) -> Float[Tensor, ""]:
        """The contribution to log|K| of the scatter of records about the means at their sites."""
        nothing = Evidence(torch.zeros(1, 1).double(), torch.zeros(()).double())
        return self._with_scatter(nothing, noises).logdet

    def design(self, noises: Noises) -> Float[Tensor, "M 1+p"]:
        """V = [y, H(1⊗I_p)]: the observed values y, and H applied to a unit mean of each output."""
        num_outputs = next(iter(noises.values())).shape[-1]
        return torch.cat([part.design(num_outputs) for part in self.observed])


def _noise(observed: Sequence[LinearObservations], noises: Noises) -> Float[Tensor, "M M"]:
    """The covariance of the noise."""
    return block_diagonal([part.noise_covariance(noises) for part in observed])


def _with_changes(
    means: Sequence[Observations], changes: Sequence[Float[Tensor, "m"]]
) -> list[Observations]:
    """The means with the noise variances σ² (1/W + c), for the changes c within their sites."""
    return [
        part if part.weight is None else part.weighted(1 / (1 + part.weight * change))
        for part, change in zip(means, changes, strict=True)
    ]


def has_covariance(kernel: Kernel, data: Data) -> bool:
    """Whether the kernel has a covariance in closed form, not only a spectral density."""
    if not all(term.factor.closed_form for term in terms(kernel)):
        return False
    x = torch.tensor([[low for low, _ in data.box]]).to(next(kernel.parameters()))
    try:
        with torch.no_grad():
            kernel(x, x).to_dense()
    except NotImplementedError:
        return False
    return True
