"""The evidence under an exact kernel, tile by tile."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Pattern
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    gradients_with_graph,
    log_determinant,
    seen_by,
    solve,
)
from gp_orff.kernels.base import cholesky
from gp_orff.kernels.pairs import (
    Geometry,
    Rows,
    by_directions,
    cotangents,
    row_covariance,
    row_products,
)

# The covariance of observed numbers in tiles of few points, without the one of whole vectors.
#
# 1. `Tiles.of` divides every group into pieces of consecutive points. A tile is the block of the
#    matrix between two pieces; it is so small that its lags and their forms stay in the cache.
# 2. `_joined` merges neighbouring small pieces, because the overhead of a tile does not depend on
#    its size. Numbers of such a piece become separate points, as groups differ in their
#    directions.
# 3. `lower` visits the tiles on and below the diagonal; the others follow by symmetry.
# 4. For few rows, what depends on positions alone is kept from one evaluation of a search to the
#    next.
#
# Each number has its direction v, so a tile is vᵀk(x, z)w for the components observed: the p×p
# blocks of whole vectors are never formed.


_FEW = 48  # rows of a piece, which costs more to handle than to compute
_KEPT = 1536  # rows of all tiles, up to which lags and their forms are kept, some 100 MiB
_TILE = 256  # √ of the numbers of pairs that a tile holds for a direction, to stay in the cache


@dataclass(frozen=True)
class Member:
    """Consecutive points of one group."""

    group: int
    points: slice  # of the group
    span: slice  # of the matrix
    width: int  # numbers at a point


@dataclass(frozen=True)
class Piece:
    """Consecutive rows: points of one group, or of several small ones."""

    members: tuple[Member, ...]
    rows: Rows

    @property
    def span(self) -> slice:
        """Of the matrix."""
        return slice(self.members[0].span.start, self.members[-1].span.stop)


@dataclass(frozen=True)
class Tiles:
    """The covariance of all observed numbers, ordered by group, point and number."""

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
        """M."""
        return self.pieces[-1].span.stop

    @property
    def spans(self) -> list[slice]:
        """The rows of every group."""
        members = [member for piece in self.pieces for member in piece.members]
        groups = {member.group: member.span.start for member in reversed(members)}
        starts = [groups[number] for number in sorted(groups)]
        return [slice(*ends) for ends in zip(starts, [*starts[1:], self.num_rows], strict=True)]

    def lower(self) -> Iterator[tuple[Piece, Piece, Geometry]]:
        """The pieces of every tile on or below the diagonal, and what is known of their lags.

        Of few rows it is kept from one evaluation to the next.
        """
        kept = self._geometry if self.num_rows <= _KEPT else {}
        for i, piece in enumerate(self.pieces):
            for j, other in enumerate(self.pieces[: i + 1]):
                yield piece, other, kept.get((i, j), {})

    def __getstate__(self) -> dict[str, object]:
        """Pickles and copies do not have what is kept of lags."""
        return {"pieces": self.pieces}

    @cached_property
    def _geometry(self) -> dict[tuple[int, int], Geometry]:
        return {(i, j): {} for i in range(len(self.pieces)) for j in range(i + 1)}

    @torch.no_grad()
    def covariance(self, kernel: Kernel) -> Float[Tensor, "*b M M"]:
        """The lower triangle of the covariance; tiles above the diagonal are zero."""
        between = row_covariance(kernel)
        matrix = None
        for left, right, geometry in self.lower():
            tile = between(left.rows, right.rows, geometry)
            if matrix is None:
                matrix = tile.new_zeros(*tile.shape[:-2], self.num_rows, self.num_rows)
            matrix[..., left.span, right.span] = tile
        return matrix

    @torch.no_grad()
    def cross(self, kernel: Kernel, x: Float[Tensor, "n d"], p: int) -> Float[Tensor, "*b M n*p"]:
        """The covariance with vectors of p components at points x."""
        between = row_covariance(kernel)
        vectors = Rows(x, torch.eye(p, dtype=x.dtype, device=x.device).unsqueeze(1))
        return torch.cat([between(piece.rows, vectors) for piece in self.pieces], dim=-2)


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, with neighbours of few rows as one piece in which each number is a point."""
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
    """The vectors v of the numbers at a point, (q, n, p) or (q, 1, p)."""
    if direction is not None:
        return direction.unsqueeze(0)
    eye = torch.eye(pattern.num_outputs, dtype=like.dtype, device=like.device)
    return eye[list(pattern.columns)].unsqueeze(1)


# The evidence under an exact kernel: a Cholesky factor, an inverse, and two sweeps over tiles.
#
# With E = VᵀK⁻¹V and log|K|, the gradient in K is G = ∂/∂log|K| K⁻¹ − U (∂/∂E) Uᵀ, U = K⁻¹V. The
# first sweep writes K. The second computes every tile again, with derivatives, and contracts it
# with its tile of G, so that no graph of N² nodes is held.
#
# Only tiles on and below the diagonal are visited, hence the factor 2 for those below. What all
# tiles have in common, such as weights of the kernel's terms computed from raw parameters, is cut
# off from the graph (`_Derivatives._cut`): its derivatives are summed over the tiles and passed
# back once, at the end. A second derivative takes the graph of the whole matrix.


GroupNoises = Float[Tensor, "n v v"] | Float[Tensor, "n*v n*v"]
"""The noise covariance of a group at every point, or that of all its numbers."""


def tiled_evidence(
    kernel: Kernel,
    tiles: Tiles,
    design: Float[Tensor, "M 1+p"],
    noises: Sequence[GroupNoises],
) -> Evidence:
    """The evidence of V, once differentiable in the kernel, the design and the noise.

    Args:
        kernel: without batch dimensions; its parameters are leaves of the graph.
        tiles: of the observations.
        design: V, with a row for each observed number.
        noises: of each group, the noise covariance at every point, or that of all its numbers.
    """
    parameters = [parameter for parameter in kernel.parameters() if parameter.requires_grad]
    terms = TiledInvQuadLogdet.apply(kernel, tiles, len(noises), design, *noises, *parameters)
    variances = [noise.diagonal(dim1=-1, dim2=-2).flatten() for noise in noises]
    return Evidence(*terms, seen_by(design, torch.cat(variances)))


class TiledInvQuadLogdet(Function):
    """VᵀK⁻¹V and log|K|, of K = Cov[H f] + noise.

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
        inverse = torch.cholesky_inverse(factor)
        noise_gradients = [torch.zeros_like(noise) for noise in noises]
        derivatives = _Derivatives(ctx.kernel, parameters)
        for left, right, geometry in ctx.tiles.lower():
            # The gradient of the noise of a group with one matrix for all numbers is taken below
            # the loop, as its blocks reach over several tiles.
            times = 1 if left is right else 2  # and the tile above the diagonal
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
    """Σ G ∂K over tiles; tensors computed for all tiles are differentiated once, at the end."""

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
        """Of every parameter."""
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
    """The lower triangle of K = Cov[H f] + noise; of a batch of kernels, each with its noise."""
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
