"""Which positions a prior cannot tell apart: the reach of the sites that are merged."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from linear_operator import to_dense
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises, is_regular
from gp_orff.data.noise.groups import group_noise
from gp_orff.data.observations import Observations
from gp_orff.data.repeats.merged import site_labels
from gp_orff.data.repeats.nodes import Nodes, across_sites
from gp_orff.kernels.tree import space_of

_SHARE = 1e-6  # of the variance, that the field may change within a site
_OF_NOISE = 0.01  # likewise, over the noise variance of the site's mean
_SAVING = 0.8  # positions that differ are merged if at most that share of the numbers is left
_MOST_INPUTS = 16  # with more, only equal positions are merged
_BASES, _HALVINGS, _STEPS = 4, 40, 2  # positions at which lags are tried; lags, √2 apart
_NUMBERS = 2**23  # of covariances that are held at a time
_WIDEST, _BISECTIONS = 2.0**20, 2  # of a site, over what the prior cannot tell apart
_RECORDS = 8  # of a site, of which the change of the field within it is told


@torch.no_grad()
def merge_distance(
    kernel: Kernel, noises: Noises, data: Dataset, count: float = 1.0
) -> tuple[float, ...]:
    """The largest lags r along each axis, at which the prior cannot tell positions apart.

    Up to r, every component has

        K(0) − K(r) ≤ max(10⁻⁶ K(0), 10⁻² σ²/count) ,

    with the noise variance σ² of the records of least noise, and `count` of them at a site.

    Args:
        kernel: the prior.
        noises: Σ by the label of the group.
        data: observations, whose box limits the lags.
        count: the records at a site.
    """
    if data.num_inputs > _MOST_INPUTS:
        return (0.0,) * data.num_inputs
    low, high = np.array(data.survey.box).T
    bases = torch.cat([part.x for part in data.survey.sample])
    bases = bases[:: -(-len(bases) // _BASES)]
    change = _OF_NOISE * min(data.local_noises(noises).values()) / count
    factors = 2.0 ** (-torch.arange(_HALVINGS * _STEPS, 0, -1).to(bases) / _STEPS)
    extents = torch.diag(torch.from_numpy(high - low).to(bases))
    lags = factors[:, None] * extents.unsqueeze(-2)  # (d, L, d): along each axis in turn
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
    """Whether the prior tells the positions z from x: K(0) − K(x − z) exceeds what is permitted."""

    together = max(1, _NUMBERS // kernel.num_outputs_per_input(x, x) ** 2)

    def variances(a: Tensor, b: Tensor) -> Float[Tensor, "*s p"]:
        pairs = [points.reshape(-1, 1, points.shape[-1]).split(together) for points in (a, b)]
        blocks = [to_dense(kernel(*some)) for some in zip(*pairs, strict=True)]
        diagonals = torch.cat([block.diagonal(dim1=-1, dim2=-2) for block in blocks])
        return diagonals.unflatten(0, a.shape[:-1])

    at_x, at_z = variances(x, x), variances(z, z)
    change = 0.5 * (at_x + at_z) - variances(x.expand_as(z), z)
    return (change > (_SHARE * at_x).clamp_min(permitted)).any(-1)


def reach_of_sites(kernel: Kernel, noises: Noises, data: Dataset) -> tuple[float, ...] | None:
    """The reach of the sites, by axis, that are merged under a prior; None if none are.

    A distance that the user gives holds in the directions of space; other inputs, such as time,
    are merged where the prior cannot tell them apart. Without it, positions that differ are merged
    where this saves a fifth of the numbers: all others stay exactly as they are; or within the
    `width` that was chosen for these data.
    """
    given = data.repeats.distance
    if given == 0 or not all(is_regular(noises[key.label]) for key in data.keys):
        return None
    equal = (0.0,) * data.num_inputs
    reach = merge_distance(kernel, noises, data)
    if data.repeats.width > 1:
        return tuple(data.repeats.width * length for length in reach)
    count = _records_at_a_site(data, reach)
    reach = merge_distance(kernel, noises, data, count) if count > 1 else reach
    if given is not None:
        space = space_of(kernel, data.num_inputs)
        return tuple(given if axis in space else length for axis, length in enumerate(reach))
    merged = sum(map(len, map(np.unique, _labels(data, reach))))
    return reach if merged <= _SAVING * sum(map(len, data.observations)) else equal


def with_few_sites(kernel: Kernel, noises: Noises, data: Dataset, most: float) -> Dataset:
    """The data with sites just so wide that their means are no more than `most` numbers."""
    reach = merge_distance(kernel, noises, data)

    def size(width: float) -> int:
        labels = _labels(data, [width * length for length in reach])
        pairs = zip(data.observations, labels, strict=True)
        return sum((own.max() + 1) * part.y.shape[-1] for part, own in pairs)

    low, high = 1.0, 2.0
    while size(high) > most and high < _WIDEST:
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if size(middle) > most else (low, middle)
    return replace(data, repeats=replace(data.repeats, width=high))


@torch.no_grad()
def changes_within(
    kernel: Kernel, noises: Noises, reach: Sequence[float], data: Dataset, levels: int = 0
) -> tuple[Float[Tensor, "m"], ...]:
    """The changes c of the field within the sites of every group, over the noise variance.

    The mean f̄ of the field at the records of a site is not its value at their mean position x̄;
    c = Var[f̄ − f(x̄)] / σ² under the prior, of up to eight records across the site. A mean of
    weight W has the noise variance σ² (1/W + c). Where sites are halved, c is that within the
    parts: Var[f̄ − Σ_k s_k f(x_k)] for their shares s_k and mean positions x_k.

    Args:
        kernel: the prior.
        noises: Σ by the label of the group.
        reach: (d), the size of a site along each axis.
        data: the observations.
        levels: how many times the sites are halved, as in `Nodes.of`.
    """
    return tuple(_changes(kernel, noises, part, reach, levels) for part in data.observations)


def _changes(
    kernel: Kernel, noises: Noises, part: Observations, reach: Sequence[float], levels: int
) -> Float[Tensor, "m"]:
    labels = site_labels(part, reach)
    site = torch.from_numpy(labels).to(part.x.device)
    counts = site.bincount()
    changes = torch.zeros_like(counts, dtype=part.x.dtype)
    several = (counts > 1).nonzero().squeeze(-1)
    if not len(several):
        return changes
    first, counts = (counts.cumsum(0) - counts)[several, None], counts[several, None]
    ranks = torch.arange(_RECORDS).to(site)
    spaced = ranks * (counts - 1) // (_RECORDS - 1)  # with those at both ends
    spaced = torch.where(counts > _RECORDS, spaced, ranks.clamp_max(counts - 1))
    rows = across_sites(part.x, site, reach)[first + spaced]
    weight = torch.ones_like(part.y[:, 0]) if part.weight is None else part.weight
    weight = weight[rows] * (ranks < counts)
    weight = weight / weight.sum(-1, keepdim=True)
    nodes = _nodes(part.x[rows], weight, reach, levels)
    x = torch.cat([part.x[rows], nodes[0]], dim=-2)
    signs = torch.cat([weight, -nodes[1]], dim=-1)  # f̄ − Σ_k s_k f(x_k)
    size = x.shape[-2]
    covariance = to_dense(kernel(x, x)).unflatten(-1, (size, -1)).unflatten(-3, (size, -1))
    covariance = torch.einsum("mi,mipjq,mj->mpq", signs, covariance, signs)
    variances = part.take(rows[:, 0]).apply_to_covariance(covariance).diagonal(dim1=-1, dim2=-2)
    noise = group_noise(part.key, noises).diagonal().mean()
    changes[several] = variances.mean(-1).clamp_min(0.0) / noise
    return changes


def _nodes(
    x: Float[Tensor, "m r d"], weight: Float[Tensor, "m r"], reach: Sequence[float], levels: int
) -> tuple[Float[Tensor, "m k d"], Float[Tensor, "m k"]]:
    """The nodes of sites of r records each, and their shares: 0 for those that a site has not."""
    site, record = weight.nonzero(as_tuple=True)
    nodes = Nodes.of(x[site, record], weight[site, record], site, reach, levels)
    counts = nodes.site.bincount()
    rank = torch.arange(len(nodes.site)).to(site) - (counts.cumsum(0) - counts)[nodes.site]
    places = x[:, :1].repeat(1, 2**levels, 1).index_put((nodes.site, rank), nodes.x)
    shares = weight.new_zeros(places.shape[:2]).index_put((nodes.site, rank), nodes.share)
    return places, shares


def exceeds(reach: Sequence[float], permitted: Sequence[float]) -> bool:
    """Whether a reach is more than twice what is permitted, along any axis."""
    return any(length > 2 * most for length, most in zip(reach, permitted, strict=True))


def _labels(data: Dataset, reach: Sequence[float]) -> list[Int[np.ndarray, "n"]]:
    return [site_labels(part, reach) for part in data.observations]


def _records_at_a_site(data: Dataset, reach: Sequence[float]) -> float:
    """Σ r² / Σ r over sites with r records: the records at the site of an average record."""
    counts = np.concatenate([np.bincount(labels) for labels in _labels(data, reach)])
    return float((counts**2).sum() / counts.sum())
