"""Means of functions of a lag over straight pieces and boxes, with or without a kink at zero.

A patch is the set x + corner + tᵀ edges, t in a unit cube: a piece of a path, a box or a point. The
lag between two patches runs over a patch whose edges are those of both. Two parallel edges are one
*axis*: the lag along it is the sum of two uniform numbers, whose density is a trapezoid. The double
integral over a piece and itself is thus a single integral.

Gauss–Legendre rules on all axes integrate smooth functions to rounding. For functions with a kink,
every axis is split at its point nearest to lag zero, and the nodes cluster there. The remaining
errors, in units of the prior standard deviations of both sides, for lengthscales like the size of
the patches: 1e-9 in one dimension; 1e-6 for a patch and a point; for two patches in two dimensions
1e-6 under Matérn 5/2 potentials and 1e-4 under Matérn 3/2, worst where pieces meet at sharp angles.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_NODES = 8  # of a Gauss rule, for every half of a lengthscale
_CLUSTERED_NODES = (12, 8)  # of a rule with nodes near one end, per lengthscale; on > 2 axes


class TooFine(NotImplementedError):
    """An integral of a known covariance that needs too many quadrature nodes."""


@dataclass(frozen=True)
class Patch:
    """The map f ↦ M ∫ f(x + corner + tᵀ edges) dt, t ∈ (0, 1)^k, with a matrix M."""

    corner: Float[Tensor, "d"]
    edges: Float[Tensor, "k d"]
    matrix: Float[Tensor, "q p"]

    @classmethod
    def point(cls, num_dims: int, matrix: Float[Tensor, "q p"]) -> "Patch":
        """The map f ↦ M f(x)."""
        matrix = matrix.to(torch.float64)
        zeros = torch.zeros(1, num_dims, dtype=torch.float64, device=matrix.device)
        return cls(zeros[0], zeros[:0], matrix)

    def __matmul__(self, other: "Patch") -> "Patch":
        """The composition that applies the other patch first."""
        edges = torch.cat([self.edges, other.edges])
        return Patch(self.corner + other.corner, edges, self.matrix @ other.matrix)


@dataclass(frozen=True, eq=False)
class Axis:
    """A unit vector and the distribution of the coordinate u along it.

    u is `start` plus one or two independent numbers, each uniform between 0 and its width.
    """

    direction: Float[Tensor, "d"]
    start: float
    widths: tuple[float, ...]

    def density(self, u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """The probability density at u."""
        total, narrowest = sum(self.widths), min(self.widths)
        if len(self.widths) == 1:
            return torch.full_like(u, 1 / total)
        height = torch.minimum(u - self.start, self.start + total - u).clamp(max=narrowest)
        return height / math.prod(self.widths)

    @property
    def segments(self) -> Iterator[tuple[float, float]]:
        """The intervals on which the density is smooth."""
        corners = sorted({0.0, *self.widths, sum(self.widths)})
        return ((self.start + a, self.start + b) for a, b in pairwise(corners))


def axes_of(edges: Float[Tensor, "k d"]) -> list[Axis]:
    """The axes of these edges: two parallel edges share one, an edge of length zero has none."""
    axes: list[Axis] = []
    for edge in edges:
        length = edge.norm().item()
        for i, axis in enumerate(axes):
            projection = (edge @ axis.direction).item()
            if len(axis.widths) == 1 and abs(projection) > (1 - 1e-12) * length:
                if length:  # the second edge goes backwards where its projection is negative
                    widths = (*axis.widths, abs(projection))
                    axes[i] = Axis(axis.direction, min(projection, 0.0), widths)
                break
        else:
            axes += [Axis(edge / length, 0.0, (length,))] if length else []
    return axes


# Quadrature over the lags of two patches.
#
# 1. `axes_of` combines parallel edges, so that each remaining axis has one coordinate u with a
#    density that is constant or a trapezoid. Its corners divide the axis into segments.
# 2. `mean` counts the nodes of all axes first, and refuses an integral that needs too many. The
#    count does not depend on tau, so that tau is split into chunks of bounded memory.
# 3. `_lags` builds a product of one-dimensional rules, axis by axis. Without a kink the rule of an
#    axis is the same everywhere. With a kink it depends on the nodes of the axes before, since the
#    point nearest to lag zero moves with them.
@dataclass(frozen=True)
class Rule:
    """Quadrature for functions of a lag that vary over lengths of `scale`.

    `kink` says whether they may have a kink at lag zero.
    """

    scale: float
    kink: bool

    def mean(
        self,
        function: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n q r"]],
        tau: Float[Tensor, "n d"],
        edges: Float[Tensor, "k s"],
        space: Sequence[int],
    ) -> Float[Tensor, "n q r"]:
        """The mean of the function over the lags tau + tᵀ edges, t ∈ (0, 1)^k, for every tau."""
        axes = axes_of(edges)
        if not axes:
            return function(tau)
        count = math.prod(self._count(axis, len(axes)) for axis in axes)
        if count > 2**18:  # for one pair of points
            raise TooFine(f"an integral over many lengthscales, {count} nodes")

        def chunk_mean(tau: Float[Tensor, "n d"]) -> Float[Tensor, "n q r"]:
            lags, weights = self._lags(tau, axes, list(space))
            values = function(lags.flatten(0, 1)).unflatten(0, weights.shape)
            return torch.einsum("nk,nkqr->nqr", weights, values)

        size = max(1, 2**19 // count)  # of a chunk whose lags fit into memory
        return torch.cat([chunk_mean(chunk) for chunk in tau.split(size)])

    def _lags(
        self, tau: Float[Tensor, "n d"], axes: list[Axis], space: list[int]
    ) -> tuple[Float[Tensor, "n k d"], Float[Tensor, "n k"]]:
        """The lags at the nodes, and their weights, axis by axis.

        With a kink, every node of the axes before has a foot on the next axis: the coordinate u
        that brings the lag closest to zero.
        """
        lags, weights = tau.unsqueeze(-2), torch.ones_like(tau[:, :1])
        for i, axis in enumerate(axes):
            if self.kink:
                remaining = torch.stack([later.direction for later in axes[i:]]).to(tau)
                # The foot minimises ‖lag + Σ_j t_j e_j‖ over this axis and all later ones, a
                # least-squares problem; the first coordinate of its solution is the u of this axis.
                # Nodes count as constants in derivatives, which is correct: a rule may place its
                # nodes anywhere.
                foot = -lags.detach()[..., space] @ torch.linalg.pinv(remaining)[:, 0]
                u, w = self._clustered_rule(axis, foot, len(axes))
            else:
                u, w = (part.to(tau) for part in self._gauss_rule(axis))
            direction = torch.zeros_like(tau[0])
            direction[space] = axis.direction.to(tau)
            lags = (lags.unsqueeze(-2) + u.unsqueeze(-1) * direction).flatten(1, 2)
            weights = (weights.unsqueeze(-1) * w).flatten(1, 2)
        return lags, weights

    def _gauss_rule(self, axis: Axis) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """Nodes and weights of composite Gauss rules on the segments of an axis."""
        rules = [_gauss(a, b, self._parts(2 * (b - a)), _NODES) for a, b in axis.segments]
        u, w = (torch.cat(parts) for parts in zip(*rules, strict=True))
        return u, w * axis.density(u)

    def _clustered_rule(
        self, axis: Axis, foot: Float[Tensor, "n k"], num_axes: int
    ) -> tuple[Float[Tensor, "n k l"], Float[Tensor, "n k l"]]:
        """Nodes and weights of rules that cluster at the foot: u = foot + (end − foot) v²."""
        nodes, weights, order = [], [], _CLUSTERED_NODES[num_axes > 2]
        for a, b in axis.segments:
            # A foot outside the segment moves to its end, where one of the two halves has length
            # and weights zero.
            nearest = foot.clamp(a, b).unsqueeze(-1)
            v, w = (part.to(foot) for part in _gauss(0.0, 1.0, self._parts(b - a), order))
            for end in (a, b):
                # The substitution v² clusters the nodes at the foot, and its derivative 2v is part
                # of the weights.
                u = nearest + (end - nearest) * v.square()
                nodes.append(u)
                weights.append((end - nearest).abs() * 2 * v * w * axis.density(u))
        return torch.cat(nodes, dim=-1), torch.cat(weights, dim=-1)

    def _parts(self, length: float) -> int:
        """The number of lengths of `scale` that cover this length."""
        return max(1, math.ceil(length / self.scale))

    def _count(self, axis: Axis, num_axes: int) -> int:
        """The number of nodes along an axis."""
        nodes, halves = (2 * _CLUSTERED_NODES[num_axes > 2], 1) if self.kink else (_NODES, 2)
        return sum(nodes * self._parts(halves * (b - a)) for a, b in axis.segments)


def _gauss(
    low: float, high: float, parts: int, nodes: int
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Nodes and weights of a composite Gauss–Legendre rule of `parts` parts from low to high."""
    t, w = map(torch.from_numpy, np.polynomial.legendre.leggauss(nodes))
    width = (high - low) / parts
    starts = low + width * torch.arange(parts, dtype=torch.float64)
    return (starts[:, None] + width * 0.5 * (1 + t)).flatten(), (0.5 * width * w).repeat(parts)
