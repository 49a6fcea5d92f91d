"""The covariance of observed numbers in tiles of few points, without the one of whole vectors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Pattern
from gp_orff.kernels.pairs.rows import Rows, row_covariance

_TILE = 192  # √ of the numbers of pairs that a tile holds for a direction, to stay in the cache


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one group."""

    group: int
    points: slice  # of the group
    span: slice  # of the matrix
    rows: Rows


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
                pieces.append(Piece(number, points, slice(first, first + size), rows[points]))
                first += size
        return cls(tuple(pieces))

    @property
    def num_rows(self) -> int:
        """M."""
        return self.pieces[-1].span.stop

    def lower(self) -> Iterator[tuple[Piece, Piece]]:
        """The pieces of every tile on or below the diagonal."""
        for i, piece in enumerate(self.pieces):
            for other in self.pieces[: i + 1]:
                yield piece, other

    @torch.no_grad()
    def covariance(self, kernel: Kernel) -> Float[Tensor, "M M"]:
        """The lower triangle of the covariance; tiles above the diagonal are zero."""
        between = row_covariance(kernel)
        x = self.pieces[0].rows.x
        matrix = torch.zeros(self.num_rows, self.num_rows, dtype=x.dtype, device=x.device)
        for left, right in self.lower():
            matrix[left.span, right.span] = between(left.rows, right.rows)
        return matrix


def _directions(pattern: Pattern, direction: Tensor | None, like: Tensor) -> Tensor:
    """The vectors v of the numbers at a point, (q, n, p) or (q, 1, p)."""
    if direction is not None:
        return direction.unsqueeze(0)
    eye = torch.eye(pattern.num_outputs, dtype=like.dtype, device=like.device)
    return eye[list(pattern.columns)].unsqueeze(1)
