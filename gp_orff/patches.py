"""Means over straight pieces and boxes of functions of a lag, which may have a kink at lag zero.

A patch is a mean over x + corner + tᵀ edges, t in a unit cube: a piece of a path, a box, a point.
The lag of two patches runs over one whose edges are those of both. Two parallel edges are one
*axis*: the lag along it is the sum of two uniform numbers, which has the density of a trapezoid, so
that the double integral over a piece and itself is a single one. Gauss–Legendre rules on all axes
see smooth functions; where there is a kink, each is split at the point next to lag zero, and its
nodes gather there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_NODES = 8  # of a Gauss rule, for every half of a lengthscale
_GATHERED = 10  # of one that gathers its nodes at one end, for every lengthscale
_POWER = 3
_MOST_NODES = 2**16  # for one pair of points
_AT_ONCE = 2**19  # lags


@dataclass(frozen=True)
class Patch:
    """f ↦ M ∫ f(x + corner + tᵀ edges) dt, t ∈ (0, 1)^k."""

    corner: Float[Tensor, "d"]
    edges: Float[Tensor, "k d"]
    matrix: Float[Tensor, "q p"]

    @classmethod
    def point(cls, num_dims: int, matrix: Float[Tensor, "q p"]) -> "Patch":
        """M f(x)."""
        matrix = matrix.to(torch.float64)
        zeros = torch.zeros(1, num_dims, dtype=torch.float64, device=matrix.device)
        return cls(zeros[0], zeros[:0], matrix)

    def __matmul__(self, other: "Patch") -> "Patch":
        """The other one first."""
        edges = torch.cat([self.edges, other.edges])
        return Patch(self.corner + other.corner, edges, self.matrix @ other.matrix)


@dataclass(frozen=True, eq=False)
class Axis:
    """A direction of unit length, and a random number u to go along it: from `start`, the sum of
    one or two numbers that are uniform between 0 and a width."""

    direction: Float[Tensor, "d"]
    start: float
    widths: tuple[float, ...]

    def joined(self, length: float) -> "Axis":
        """With a second edge along it, backwards where the length is negative."""
        return replace(
            self, start=self.start + min(length, 0.0), widths=(*self.widths, abs(length))
        )

    def density(self, u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Of u."""
        total, narrow = sum(self.widths), min(self.widths)
        if len(self.widths) == 1:
            return torch.full_like(u, 1 / total)
        height = torch.minimum(u - self.start, self.start + total - u).clamp(max=narrow)
        return height / math.prod(self.widths)

    @property
    def segments(self) -> Iterator[tuple[float, float]]:
        """Where the density is smooth."""
        corners = sorted({0.0, *self.widths, sum(self.widths)})
        return ((self.start + a, self.start + b) for a, b in zip(corners, corners[1:], strict=False))


def axes_of(edges: Float[Tensor, "k d"]) -> list[Axis]:
    """Parallel edges, two at most, are one axis; those without length are none."""
    found: list[Axis] = []
    for edge in edges:
        length = edge.norm().item()
        for i, own in enumerate(found):
            along = (edge @ own.direction).item()
            if len(own.widths) == 1 and abs(along) > (1 - 1e-12) * length:
                found[i] = own.joined(along) if length else own
                break
        else:
            found += [Axis(edge / length, 0.0, (length,))] if length else []
    return found


@dataclass(frozen=True)
class Rule:
    """How fine: for functions of a lag that vary over lengths of `scale`, with a kink at lag zero
    or without."""

    scale: float
    kink: bool

    def mean(
        self,
        function: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n q r"]],
        tau: Float[Tensor, "n d"],
        edges: Float[Tensor, "k s"],
        space: Sequence[int],
    ) -> Float[Tensor, "n q r"]:
        """Of the function over the lags tau + tᵀ edges."""
        axes = axes_of(edges)
        if not axes:
            return function(tau)
        split = _independent(axes) if self.kink else []
        plain = [own for own in axes if own not in split]
        count = math.prod(len(self._plain(own)[0]) for own in plain)
        count *= math.prod(self._number_split(own) for own in split)
        if count > _MOST_NODES:
            raise NotImplementedError(f"an integral over many lengthscales, {count} nodes")

        def part(tau: Float[Tensor, "n d"]) -> Float[Tensor, "n q r"]:
            lags, weights = self._lags(tau, plain, split, list(space))
            values = function(lags.flatten(0, 1)).unflatten(0, weights.shape)
            return torch.einsum("nk,nkqr->nqr", weights, values)

        return torch.cat([part(own) for own in tau.split(max(1, _AT_ONCE // count))])

    def _lags(
        self, tau: Float[Tensor, "n d"], plain: list[Axis], split: list[Axis], space: list[int]
    ) -> tuple[Float[Tensor, "n k d"], Float[Tensor, "n k"]]:
        """And their weights."""
        lags, weights = tau.unsqueeze(-2), torch.ones_like(tau[:, :1])
        for own in plain:
            nodes = (part.expand(*weights.shape, -1) for part in self._plain(own))
            lags, weights = _extended(lags, weights, own, *nodes, space)
        if not split:
            return lags, weights
        across = torch.stack([own.direction for own in split], dim=-1).to(tau)  # (s, k)
        feet = -lags.detach()[..., space] @ torch.linalg.pinv(across).mT
        for i, own in enumerate(split):
            more = weights.shape[-1] // feet.shape[-2]
            foot = feet[..., i].repeat_interleave(more, dim=-1)
            lags, weights = _extended(lags, weights, own, *self._split(own, foot), space)
        return lags, weights

    def _plain(self, axis: Axis) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """Gauss rules one after the other."""
        rules = [_gauss(a, b, math.ceil(2 * (b - a) / self.scale), _NODES) for a, b in axis.segments]
        u, w = (torch.cat(parts) for parts in zip(*rules, strict=True))
        return u, w * axis.density(u)

    def _split(
        self, axis: Axis, foot: Float[Tensor, "n k"]
    ) -> tuple[Float[Tensor, "n k l"], Float[Tensor, "n k l"]]:
        """Rules whose nodes gather, as a cube, where u is next to the foot."""
        nodes, weights = [], []
        for a, b in axis.segments:
            near = foot.clamp(a, b).unsqueeze(-1)
            v, w = _gauss(0.0, 1.0, self._parts(b - a), _GATHERED)
            for end in (a, b):
                u = near + (end - near) * v.pow(_POWER)
                nodes.append(u)
                weights.append((end - near).abs() * _POWER * v.pow(_POWER - 1) * w * axis.density(u))
        return torch.cat(nodes, dim=-1), torch.cat(weights, dim=-1)

    def _parts(self, length: float) -> int:
        return math.ceil(length / self.scale)

    def _number_split(self, axis: Axis) -> int:
        return sum(2 * _GATHERED * self._parts(b - a) for a, b in axis.segments)


def _extended(
    lags: Float[Tensor, "n k d"],
    weights: Float[Tensor, "n k"],
    axis: Axis,
    u: Float[Tensor, "n k l"],
    w: Float[Tensor, "n k l"],
    space: list[int],
) -> tuple[Float[Tensor, "n k*l d"], Float[Tensor, "n k*l"]]:
    """By the nodes of one more axis."""
    along = lags.new_zeros(lags.shape[-1])
    along[space] = axis.direction.to(lags)
    lags = lags.unsqueeze(-2) + u.to(lags).unsqueeze(-1) * along
    return lags.flatten(1, 2), (weights.unsqueeze(-1) * w.to(weights)).flatten(1, 2)


def _independent(axes: list[Axis]) -> list[Axis]:
    """As many as there can be."""
    found: list[Axis] = []
    for own in axes:
        directions = torch.stack([axis.direction for axis in [*found, own]])
        if torch.linalg.matrix_rank(directions, atol=1e-6) > len(found):
            found.append(own)
    return found


def _gauss(
    low: float, high: float, parts: int, nodes: int
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Nodes and weights between low and high, in so many parts."""
    t, w = map(torch.from_numpy, np.polynomial.legendre.leggauss(nodes))
    each = (high - low) / parts
    starts = low + each * torch.arange(parts, dtype=torch.float64)
    return (starts[:, None] + each * 0.5 * (1 + t)).flatten(), (0.5 * each * w).repeat(parts)
