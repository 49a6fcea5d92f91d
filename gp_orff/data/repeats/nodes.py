"""Means of the field over the records of sites, as sums over a few positions within each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.data.observations import (
    Image,
    LinearObservations,
    Observations,
    PointObservations,
)
from gp_orff.data.repeats.merged import weighted_means
from gp_orff.symbols.base import Identity

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

    def rows(self, sites: slice) -> slice:
        """The nodes of consecutive sites."""
        ends = torch.searchsorted(self.site, torch.tensor([sites.start, sites.stop]).to(self.site))
        return slice(*ends.tolist())

    def mean(self, values: Float[Tensor, "k q"], rows: slice) -> Float[Tensor, "m q"]:
        """Σ_k s_k v_k at every site, of values at some of the nodes."""
        own = self.site[rows] - self.site[rows.start]
        weighted = self.share[rows].to(values).unsqueeze(-1) * values
        return values.new_zeros(int(own[-1]) + 1, values.shape[-1]).index_add(0, own, weighted)


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
    """Means of the observations at sites, where H f is a mean over the nodes of each.

    The nodes of a site share the direction of its mean. The noise is that of the means.
    """

    means: list[Observations]  # one piece for each group
    nodes: list[Nodes]

    @cached_property
    def _points(self) -> PointObservations:
        return PointObservations(self.means)

    @property
    def x(self) -> Float[Tensor, "M d"]:
        return self._points.x

    @property
    def values(self):
        return self._points.values

    def noise_covariance(self, noises, truncated=None):
        return self._points.noise_covariance(noises, truncated)

    def chunks(self) -> list[tuple[slice, Callable[[Image], Tensor]]]:
        """The rows of a few sites each, and H there."""
        pieces, first = [], 0
        for part, nodes in zip(self.means, self.nodes, strict=True):
            width = part.y.shape[-1]
            for start in range(0, len(part), _CHUNK):
                sites = slice(start, min(start + _CHUNK, len(part)))
                span = slice(first + width * sites.start, first + width * sites.stop)
                pieces.append((span, partial(_of_sites, part=part, nodes=nodes, sites=sites)))
            first += part.y.numel()
        return pieces

    def apply(self, image):
        return torch.cat([rows(image) for _, rows in self.chunks()])


def _of_sites(image: Image, part: Observations, nodes: Nodes, sites: slice) -> Float[Tensor, "k q"]:
    """H g at the nodes of some sites, averaged."""
    rows = nodes.rows(sites)
    values = image(Identity(), (), nodes.x[rows])
    count, width = rows.stop - rows.start, values.shape[-1]
    mean = nodes.mean(values.reshape(count, -1), rows).reshape(sites.stop - sites.start, -1, width)
    direction = None if part.direction is None else part.direction[sites]
    return part.pattern.rows(mean, direction).flatten(0, 1)
