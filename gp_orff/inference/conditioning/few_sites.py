"""The exact kernel in the place of a grid: where it has few numbers, or few sites."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Int
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Observations
from gp_orff.data.repeats.merged import site_labels
from gp_orff.features.assemble import num_features
from gp_orff.features.frequencies.harmonic import HarmonicDraw
from gp_orff.inference.conditioning.exact import ExactInference, has_covariance
from gp_orff.inference.conditioning.features import FeatureInference
from gp_orff.inference.conditioning.iterative import IterativeInference, most_factorised
from gp_orff.inference.conditioning.merging import with_few_sites

MUCH_TRUNCATED = 0.1  # variance, over that of the noise
_SOME_TRUNCATED = 0.01  # likewise, by a grid whose algebra is iterative, and costs more than sites
_MOST_ONCE = 16_384  # numbers whose covariance is factorised once, in the place of iterations
MOST_REPEATED = 8  # repetitions of a position, up to which merging is tried
_MOST_ON_SITES = 10**6  # numbers, of which sites are made
MOST_BESIDE_WAVES = 2**16  # likewise, of readings that decaying waves cannot hold
_LESS = 0.5  # what the field changes by within sites, at most, over what the grid truncates
_LESS_THAN_WAVES = 1.0  # likewise, over what decaying waves truncate
_MUCH_CHANGE = 1.0  # of the field within sites, over the noise variance of a reading
_EVEN, _READINGS_OF_CELL = 0.75, 8  # share of cells with readings; even ones leave none empty


@torch.no_grad()
def exact_instead(
    inference: FeatureInference, kernel: Kernel, noises: Noises, most: float, weighs: bool = False
) -> tuple[ExactInference, str] | None:
    """Inference by the exact kernel, and why it is better than that on a grid; else None.

    Iterations make every variance anew, and take thousands of products where the noise is small;
    one factorisation of the covariance of some thousand numbers serves all of them, and truncates
    nothing. Where these are not few enough, means over sites are, if the field hardly changes
    within them. The arguments are those of `on_few_sites`.
    """
    data = inference.data
    iterative = isinstance(inference, IterativeInference)
    once = min(_MOST_ONCE, most_factorised(next(kernel.parameters()).device))
    tried = iterative and data.num_values <= MOST_REPEATED * once
    if not (tried and has_covariance(kernel, data)):
        return on_few_sites(inference, kernel, noises, most, weighs)
    exact = ExactInference.merging(kernel, noises, data)
    if exact.size > once:
        exact = _on_sites_of_one_value(kernel, noises, data, most)
    if exact is None:
        return on_few_sites(inference, kernel, noises, most, weighs)
    features = num_features(kernel, inference.draws)
    return exact, (
        f"exact kernel: the covariance of {exact.size:.0f} numbers takes one factorisation, "
        f"{features} features would take iterations"
    )


def _on_sites_of_one_value(
    kernel: Kernel, noises: Noises, data: Data, most: float
) -> ExactInference | None:
    """Inference on at most so many numbers at sites within which the field hardly changes; None
    where these are more."""
    if not _merges(data):
        return None
    sites = ExactInference.merging(kernel, noises, with_few_sites(kernel, noises, data, most))
    unchanged = sites.mean_change <= _LESS * _SOME_TRUNCATED
    return sites if unchanged and sites.size <= most else None


@torch.no_grad()
def on_few_sites(
    inference: FeatureInference, kernel: Kernel, noises: Noises, most: float, weighs: bool = False
) -> tuple[ExactInference, str] | None:
    """Inference by the exact kernel on sites, and why it is better than that on a grid; else None.

    What a grid truncates is returned as white noise of each reading. It is correlated over its
    wavelengths, so that dense readings do not average it out, and error bars near them are too
    small. Sites are better where readings leave much of the box empty, and the field changes by
    half as much within them, or less: their covariance is complete. Even readings average out what
    is truncated, as white noise.

    Under Student-t noise, readings of a site among which the field changes by more than the noise
    would pass for outliers: then one reading of each site is kept, and the others are left out.
    Decaying waves that would truncate more than the noise give way to every few readings, in given
    order, of even ones too: shallow sources, which waves cannot hold, would pass for noise, and the
    field be smoother than from fewer readings.

    Args:
        inference: on the grid.
        kernel: the prior.
        noises: Σ by the label of the group.
        most: the largest number of means at sites.
        weighs: whether Student-t noise weighs the readings.
    """
    data = inference.data
    waves = any(isinstance(draw, HarmonicDraw) for draw in inference.draws)
    if not (_merges(data) and data.num_values <= (MOST_BESIDE_WAVES if waves else _MOST_ON_SITES)):
        return None
    cut = max(inference.truncation_ratios(kernel, noises).values())
    iterative = isinstance(inference, IterativeInference)
    permitted = _SOME_TRUNCATED if iterative else MUCH_TRUNCATED
    shallow = waves and cut > _MUCH_CHANGE
    even = not shallow and _share_of_box(data) > _EVEN
    if cut <= permitted or even or not has_covariance(kernel, data):
        return None
    data = with_few_sites(kernel, noises, data, most)
    sites = ExactInference.merging(kernel, noises, data)
    if sites.size > most:
        return None
    if sites.mean_change > _MUCH_CHANGE and (weighs or shallow):
        kept = every_few(data, most) if waves else one_of_each(data, sites.reach)
        which = "every few readings one" if waves else "one reading of each"
        return ExactInference.merging(kernel, noises, kept), (
            f"exact kernel: a grid would truncate {cut:.2g} of the noise variance, and the field "
            f"changes by {sites.mean_change:.2g} of it within sites that are few enough; {which} "
            f"is kept, {kept.survey.num_points} of {data.survey.num_points}"
        )
    if sites.mean_change > (_LESS_THAN_WAVES if waves else _LESS) * cut:
        return None
    return sites, (
        f"exact kernel: the field changes by {sites.mean_change:.2g} of the noise variance "
        f"within the sites that are merged, and a grid would truncate {cut:.2g} of it"
    )


def _merges(data: Data) -> bool:
    """Whether positions that differ may be merged: no distance is given, and no tracks."""
    return isinstance(data, Dataset) and data.repeats.distance is None and not data.tracks


def every_few(data: Dataset, most: float) -> Dataset:
    """Every so many readings one, in given order, with their weights: no more than `most` numbers.

    Unlike the readings of sites they are as close to each other, here and there, as all are, and
    tell what lines differ by where they cross.
    """
    step = math.ceil(data.num_values / most)
    return _kept(data, lambda part: torch.arange(0, len(part), step))


def one_of_each(data: Dataset, reach: Sequence[float]) -> Dataset:
    """The reading of each site that is nearest to the middle of its readings, with its weight."""
    return _kept(data, lambda part: torch.from_numpy(_nearest_to_middle(part, reach)))


def _kept(data: Dataset, rows_of: Callable[[Observations], Int[Tensor, "m"]]) -> Dataset:
    """Those rows of every part, with their weights."""
    parts, weights = [], []
    for part, weight in zip(data.unweighted().visit(), data.all_weights(), strict=True):
        rows = rows_of(part).to(part.x.device)
        parts.append(part.take(rows))
        weights.append(weight[rows])
    kept = replace(Dataset.in_memory(parts).counting_memory(), symbol_data=data.symbol_data)
    return kept if data.weights is None else replace(kept, weights=tuple(weights))


def _nearest_to_middle(part: Observations, reach: Sequence[float]) -> Int[np.ndarray, "m"]:
    site, x = site_labels(part, reach), part.x.cpu().numpy()
    x = x / np.array([length or 1.0 for length in reach])
    middle = np.zeros((site.max() + 1, x.shape[1]))
    np.add.at(middle, site, x)
    middle /= np.bincount(site)[:, None]
    order = np.lexsort((np.square(x - middle[site]).sum(-1), site))
    return np.sort(order[np.unique(site[order], return_index=True)[1]])


def _share_of_box(data: Dataset) -> float:
    """The share of cells with readings, where there are eight even readings for each cell."""
    x = torch.cat([part.x for part in data.observations]).cpu().numpy()
    x = x[:, np.ptp(x, axis=0) > 0]
    count = max(1, int((len(x) / _READINGS_OF_CELL) ** (1 / max(x.shape[-1], 1))))
    lattice = np.floor((x - x.min(0)) / np.ptp(x, axis=0) * count).clip(max=count - 1)
    return len(np.unique(lattice, axis=0)) / count ** x.shape[-1]
