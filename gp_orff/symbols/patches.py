"""Averages of covariances over segments and boxes, by Gauss–Legendre quadrature.

A patch is the set of points x + corner + tᵀ edges, with t in a unit cube. It is a segment, a box or
a point. The lags between two patches also form a patch, which has the edges of both. Two parallel
edges share one *axis*. The lag along this axis is the sum of two uniform random numbers, and its
density is a trapezoid. The double integral over one segment and itself is thus a single integral.

Gauss–Legendre rules on all axes integrate smooth functions to rounding. A covariance may also have
a kink at lag zero. In this case, every axis is split at its point nearest to lag zero, and the
nodes cluster there. The table lists the remaining errors, relative to the product of the two prior
standard deviations, if the lengthscale is about the size of the patches.

| patches | error |
|---|---|
| in one dimension | 1e-9 |
| a patch and a point | 1e-6 |
| two patches in two dimensions, Matérn 5/2 potential | 1e-6 |
| two patches in two dimensions, Matérn 3/2 potential | 1e-4 |

The errors are largest for segments that meet at a sharp angle.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_NODES = 8  # number of nodes of a Gauss rule for each half of a lengthscale
_CLUSTERED_NODES = (12, 8)  # number of clustered nodes per lengthscale, on ≤ 2 axes and on > 2 axes


class TooFine(NotImplementedError):
    """The covariance is known, but its integral needs too many quadrature nodes."""


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
        """Return the composition of two maps; the right one is applied first."""
        edges = torch.cat([self.edges, other.edges])
        return Patch(self.corner + other.corner, edges, self.matrix @ other.matrix)


@dataclass(frozen=True, eq=False)
class Axis:
    """A unit vector and the distribution of the coordinate u along this vector.

    The coordinate u is `start` plus one or two independent random numbers. Each number is uniform
    between 0 and its width.
    """

    direction: Float[Tensor, "d"]
    start: float
    widths: tuple[float, ...]

    def density(self, u: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """Return the probability density at u."""
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
    """Return the axes of edges. Two parallel edges share one; an edge of length zero has none."""
    axes: list[Axis] = []
    for edge in edges:
        length = edge.norm().item()
        for i, axis in enumerate(axes):
            projection = (edge @ axis.direction).item()
            if len(axis.widths) == 1 and abs(projection) > (1 - 1e-12) * length:
                if length:  # if the projection is negative, the second edge goes backwards
                    widths = (*axis.widths, abs(projection))
                    axes[i] = Axis(axis.direction, min(projection, 0.0), widths)
                break
        else:
            axes += [Axis(edge / length, 0.0, (length,))] if length else []
    return axes


# Quadrature over the lags of two patches.
#
# 1. `axes_of` combines parallel edges. Each remaining axis has one coordinate u. The density of u
#    is constant or a trapezoid, and the corners of the density divide the axis into segments.
# 2. `mean` first counts the nodes of all axes, and raises an error if there are too many. The
#    count does not depend on tau, so tau can be split into chunks of bounded memory.
# 3. `_lags` builds a product of one-dimensional rules, axis by axis. Without a kink, the rule of an
#    axis is the same everywhere. With a kink, the rule depends on the nodes of the previous axes,
#    because they move the point nearest to lag zero.
@dataclass(frozen=True)
class Rule:
    """Quadrature for functions of a lag that vary over lengths of `scale`.

    Attributes:
        scale: the length over which the functions vary, in units of x.
        kink: whether the functions may have a kink at lag zero.
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
        """Return the mean of the function over the lags tau + tᵀ edges, t ∈ (0, 1)^k.

        Args:
            function: a matrix-valued function (n, q, r) of lags (n, d).
            tau: (n, d), the lags; the result has one mean (q, r) for each of them.
            edges: (k, s), the edges of the patch of lags in the columns `space`.
            space: the s columns of the lags that are directions of space.

        Raises:
            TooFine: the integral needs more than 2¹⁸ nodes.
        """
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
        """Return the lags at the nodes, and the weights of the nodes.

        The rule is built axis by axis. With a kink, every node of the previous axes has a foot on
        the next axis. The foot is the coordinate u that brings the lag closest to zero.
        """
        lags, weights = tau.unsqueeze(-2), torch.ones_like(tau[:, :1])
        for i, axis in enumerate(axes):
            if self.kink:
                remaining = torch.stack([later.direction for later in axes[i:]]).to(tau)
                # The foot minimises ‖lag + Σ_j t_j e_j‖ over the directions e_j of this axis and of
                # all later ones. The first coordinate of the solution of this least-squares problem
                # is the u of this axis. Derivatives treat the nodes as constants. This is correct,
                # because a rule may place its nodes anywhere.
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
        """Return nodes and weights of composite Gauss rules on the segments of an axis."""
        rules = [_gauss(a, b, self._parts(2 * (b - a)), _NODES) for a, b in axis.segments]
        u, w = (torch.cat(parts) for parts in zip(*rules, strict=True))
        return u, w * axis.density(u)

    def _clustered_rule(
        self, axis: Axis, foot: Float[Tensor, "n k"], num_axes: int
    ) -> tuple[Float[Tensor, "n k l"], Float[Tensor, "n k l"]]:
        """Return nodes u = foot + (end − foot) v², which cluster at the foot, and their weights."""
        nodes, weights, order = [], [], _CLUSTERED_NODES[num_axes > 2]
        for a, b in axis.segments:
            # A foot outside the segment moves to the nearest end. One of the two halves then has
            # length zero and weights zero.
            nearest = foot.clamp(a, b).unsqueeze(-1)
            v, w = (part.to(foot) for part in _gauss(0.0, 1.0, self._parts(b - a), order))
            for end in (a, b):
                # The substitution v² clusters the nodes at the foot. Its derivative, 2v, is a
                # factor of the weights.
                u = nearest + (end - nearest) * v.square()
                nodes.append(u)
                weights.append((end - nearest).abs() * 2 * v * w * axis.density(u))
        return torch.cat(nodes, dim=-1), torch.cat(weights, dim=-1)

    def _parts(self, length: float) -> int:
        """Return the number of intervals of length `scale` that cover `length`."""
        return max(1, math.ceil(length / self.scale))

    def _count(self, axis: Axis, num_axes: int) -> int:
        """Return the number of nodes along an axis."""
        nodes, halves = (2 * _CLUSTERED_NODES[num_axes > 2], 1) if self.kink else (_NODES, 2)
        return sum(nodes * self._parts(halves * (b - a)) for a, b in axis.segments)


def _gauss(
    low: float, high: float, parts: int, nodes: int
) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """Return nodes and weights of a composite Gauss–Legendre rule with `parts` equal intervals."""
    t, w = map(torch.from_numpy, np.polynomial.legendre.leggauss(nodes))
    width = (high - low) / parts
    starts = low + width * torch.arange(parts, dtype=torch.float64)
    return (starts[:, None] + width * 0.5 * (1 + t)).flatten(), (0.5 * width * w).repeat(parts)
