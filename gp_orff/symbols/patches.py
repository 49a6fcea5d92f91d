"""Means over straight pieces and boxes of functions of a lag, which may have a kink at lag zero.

A patch is a mean over x + corner + tᵀ edges, t in a unit cube: a piece of a path, a box, a point.
The lag of two patches runs over one whose edges are those of both. Two parallel edges are one
*axis*: the lag along it is the sum of two uniform numbers, whose density is a trapezoid, so that
the double integral over a piece and itself is a single one.

Smooth functions are seen by Gauss–Legendre rules on all axes, to rounding. Where there is a kink,
every axis is split next to lag zero, and its nodes gather there. What remains, in units of the
prior standard deviations of both sides, for lengthscales like the patches: 1e-9 in one dimension,
1e-6 of a patch and a point; of two patches in two dimensions 1e-6 for fields of Matérn 5/2
potentials and 1e-4 for those of Matérn 3/2, the worst where pieces meet at sharp angles.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_NODES = 8  # of a Gauss rule, for every half of a lengthscale
_GATHERED = (12, 8)  # of one that gathers its nodes at one end, for every lengthscale; on many axes
_MOST_NODES = 2**18  # for one pair of points
_AT_ONCE = 2**19  # lags


class TooFine(NotImplementedError):
    """A closed form there is, and too many nodes to see it with."""


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
        return ((self.start + a, self.start + b) for a, b in pairwise(corners))


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
        count = math.prod(self._count(own, len(axes)) for own in axes)
        if count > _MOST_NODES:
            raise TooFine(f"an integral over many lengthscales, {count} nodes")

        def part(tau: Float[Tensor, "n d"]) -> Float[Tensor, "n q r"]:
            lags, weights = self._lags(tau, axes, list(space))
            values = function(lags.flatten(0, 1)).unflatten(0, weights.shape)
            return torch.einsum("nk,nkqr->nqr", weights, values)

        return torch.cat([part(own) for own in tau.split(max(1, _AT_ONCE // count))])

    def _lags(
        self, tau: Float[Tensor, "n d"], axes: list[Axis], space: list[int]
    ) -> tuple[Float[Tensor, "n k d"], Float[Tensor, "n k"]]:
        """And their weights: one axis after the other, each with a foot of its own for every node
        of those before it."""
        lags, weights = tau.unsqueeze(-2), torch.ones_like(tau[:, :1])
        for i, own in enumerate(axes):
            if self.kink:
                rest = torch.stack([axis.direction for axis in axes[i:]]).to(tau)
                foot = -lags.detach()[..., space] @ torch.linalg.pinv(rest)[:, 0]
                u, w = self._gathered(own, foot, len(axes))
            else:
                u, w = (part.to(tau) for part in self._plain(own))
            along = torch.zeros_like(tau[0])
            along[space] = own.direction.to(tau)
            lags = (lags.unsqueeze(-2) + u.unsqueeze(-1) * along).flatten(1, 2)
            weights = (weights.unsqueeze(-1) * w).flatten(1, 2)
        return lags, weights

    def _plain(self, axis: Axis) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """Gauss rules one after the other."""
        rules = [_gauss(a, b, self._parts(2 * (b - a)), _NODES) for a, b in axis.segments]
        u, w = (torch.cat(parts) for parts in zip(*rules, strict=True))
        return u, w * axis.density(u)

    def _gathered(
        self, axis: Axis, foot: Float[Tensor, "n k"], num_axes: int
    ) -> tuple[Float[Tensor, "n k l"], Float[Tensor, "n k l"]]:
        """Rules whose nodes gather, as squares, where u is next to the foot."""
        nodes, weights, number = [], [], _GATHERED[num_axes > 2]
        for a, b in axis.segments:
            near = foot.clamp(a, b).unsqueeze(-1)
            v, w = (part.to(foot) for part in _gauss(0.0, 1.0, self._parts(b - a), number))
            for end in (a, b):
                u = near + (end - near) * v.square()
                nodes.append(u)
                weights.append((end - near).abs() * 2 * v * w * axis.density(u))
        return torch.cat(nodes, dim=-1), torch.cat(weights, dim=-1)

    def _parts(self, length: float) -> int:
        return max(1, math.ceil(length / self.scale))

    def _count(self, axis: Axis, num_axes: int) -> int:
        """Nodes along it."""
        lengths = [b - a for a, b in axis.segments]
        if self.kink:
            return sum(2 * _GATHERED[num_axes > 2] * self._parts(own) for own in lengths)
        return sum(_NODES * self._parts(2 * own) for own in lengths)


def _gauss(
    low: float, high: float, parts: int, nodes: int
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Nodes and weights between low and high, in so many parts."""
    t, w = map(torch.from_numpy, np.polynomial.legendre.leggauss(nodes))
    each = (high - low) / parts
    starts = low + each * torch.arange(parts, dtype=torch.float64)
    return (starts[:, None] + each * 0.5 * (1 + t)).flatten(), (0.5 * each * w).repeat(parts)
