"""Which positions a prior cannot tell apart: the reach of the sites that are merged."""

from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from linear_operator import to_dense
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises, is_regular
from gp_orff.data.repeats.merged import site_labels
from gp_orff.kernels.tree import space_of

_SHARE = 1e-6  # of the variance, that the field may change within a site
_OF_NOISE = 0.01  # likewise, over the noise variance of the site's mean
_SAVING = 0.8  # positions that differ are merged if at most that share of the numbers is left
_MOST_INPUTS = 16  # with more, only equal positions are merged
_BASES, _HALVINGS, _STEPS = 4, 40, 2  # positions at which lags are tried; lags, √2 apart


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
    noise = min(data.local_noises(noises).values()) / count
    factors = 2.0 ** (-torch.arange(_HALVINGS * _STEPS, 0, -1).to(bases) / _STEPS)
    lengths = []
    for axis, extent in enumerate(high - low):
        lags = torch.zeros(len(factors), data.num_inputs).to(bases)
        lags[:, axis] = extent * factors
        told = torch.stack([_told_apart(kernel, x, x + lags, noise) for x in bases]).any(0)
        indistinct = len(factors) if not told.any() else int(told.int().argmax())
        lengths.append(lags[indistinct - 1, axis].item() if indistinct else 0.0)
    return tuple(lengths)


def _told_apart(
    kernel: Kernel, x: Float[Tensor, "d"], z: Float[Tensor, "n d"], noise: float
) -> Bool[Tensor, "n"]:
    """Whether the prior tells the positions z from x."""
    x = x.expand_as(z)

    def variances(a: Tensor, b: Tensor) -> Float[Tensor, "n p"]:
        pairs = to_dense(kernel(a.unsqueeze(-2), b.unsqueeze(-2)))
        return pairs.diagonal(dim1=-1, dim2=-2)

    at_x, at_z = variances(x, x), variances(z, z)
    change = 0.5 * (at_x + at_z) - variances(x, z)
    return (change > (_SHARE * at_x).clamp_min(_OF_NOISE * noise)).any(-1)


def reach_of_sites(kernel: Kernel, noises: Noises, data: Dataset) -> tuple[float, ...] | None:
    """The reach of the sites, by axis, that are merged under a prior; None if none are.

    A distance that the user gives holds in the directions of space; other inputs, such as time,
    are merged where the prior cannot tell them apart. Without it, positions that differ are merged
    where this saves a fifth of the numbers: all others stay exactly as they are.
    """
    given = data.repeats.distance
    if given == 0 or not all(is_regular(noises[key.label]) for key in data.keys):
        return None
    equal = (0.0,) * data.num_inputs
    reach = merge_distance(kernel, noises, data)
    count = _records_at_a_site(data, reach)
    reach = merge_distance(kernel, noises, data, count) if count > 1 else reach
    if given is not None:
        space = space_of(kernel, data.num_inputs)
        return tuple(given if axis in space else length for axis, length in enumerate(reach))
    merged = sum(map(len, map(np.unique, _labels(data, reach))))
    return reach if merged <= _SAVING * sum(map(len, data.observations)) else equal


def exceeds(reach: Sequence[float], permitted: Sequence[float]) -> bool:
    """Whether a reach is more than twice what is permitted, along any axis."""
    return any(length > 2 * most for length, most in zip(reach, permitted, strict=True))


def _labels(data: Dataset, reach: Sequence[float]) -> list[Int[np.ndarray, "n"]]:
    return [site_labels(part, reach) for part in data.observations]


def _records_at_a_site(data: Dataset, reach: Sequence[float]) -> float:
    """Σ r² / Σ r over sites with r records: the records at the site of an average record."""
    counts = np.concatenate([np.bincount(labels) for labels in _labels(data, reach)])
    return float((counts**2).sum() / counts.sum())
