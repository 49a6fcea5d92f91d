"""The exact kernel on few sites, in the place of a grid that truncates more than they change."""

import numpy as np
import torch
from gpytorch.kernels import Kernel

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.inference.conditioning.exact import ExactInference, has_covariance
from gp_orff.inference.conditioning.features import FeatureInference
from gp_orff.inference.conditioning.iterative import IterativeInference
from gp_orff.inference.conditioning.merging import with_few_sites

MUCH_TRUNCATED = 0.1  # variance, over that of the noise
_SOME_TRUNCATED = 0.01  # likewise, by a grid whose algebra is iterative, and costs more than sites
_MOST_ON_SITES = 10**6  # numbers, of which sites are made
_LESS = 0.5  # what the field changes by within sites, at most, over what the grid truncates
_FILLED = 0.5  # boxes of sites over that of the data; many even readings in the plane have 3


@torch.no_grad()
def on_few_sites(
    inference: FeatureInference, kernel: Kernel, noises: Noises, most: float
) -> tuple[ExactInference, str] | None:
    """Inference by the exact kernel on sites, and why it is better than that on a grid; else None.

    What a grid truncates is returned as white noise of each reading. It is correlated over its
    wavelengths, so that dense readings do not average it out, and error bars near them are too
    small. Sites are better where they leave much of the box empty, and the field changes by half as
    much within them, or less: their covariance is complete. Even readings average out what is
    truncated, as white noise.

    Args:
        inference: on the grid.
        kernel: the prior.
        noises: Σ by the label of the group.
        most: the largest number of means at sites.
    """
    data = inference.data
    merges = isinstance(data, Dataset) and data.repeats.distance is None and not data.tracks
    if not (merges and data.num_values <= _MOST_ON_SITES):
        return None
    cut = max(inference.truncation_ratios(kernel, noises).values())
    iterative = isinstance(inference, IterativeInference)
    permitted = _SOME_TRUNCATED if iterative else MUCH_TRUNCATED
    if cut <= permitted or not has_covariance(kernel, data):
        return None
    data = with_few_sites(kernel, noises, data, most)
    sites = ExactInference.merging(kernel, noises, data)
    if sites.size > most or sites.mean_change > _LESS * cut or _filled(sites) > _FILLED:
        return None
    return sites, (
        f"exact kernel: the field changes by {sites.mean_change:.2g} of the noise variance "
        f"within the sites that are merged, and a grid would truncate {cut:.2g} of it"
    )


def _filled(sites: ExactInference) -> float:
    """The volume of boxes as large as the sites, over that of the box of the data."""
    low, high = np.array(sites.data.survey.box).T
    varies = high > low
    shares = np.array(sites.reach)[varies] / (high - low)[varies]
    return sites.num_sites * float(np.prod(shares.clip(max=1.0)))
