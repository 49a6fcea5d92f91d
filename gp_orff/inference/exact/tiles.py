"""The covariance of observed numbers in tiles of few points, without the one of whole vectors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Pattern
from gp_orff.kernels.pairs.rows import Geometry, Rows, row_covariance

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
        x, shape = self.pieces[0].rows.x, (*kernel.batch_shape, self.num_rows, self.num_rows)
        matrix = torch.zeros(shape, dtype=x.dtype, device=x.device)
        for left, right, geometry in self.lower():
            matrix[..., left.span, right.span] = between(left.rows, right.rows, geometry)
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
