"""The likelihood of readings along tracks: which groups have one, and where its search starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float

from gp_orff.data.dataset import Data
from gp_orff.data.noise.along_tracks import along_tracks
from gp_orff.data.noise.covariances import Noises, noise_of
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.data.noise.track_likelihood import TrackLikelihood
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.data.tracks.patterns import MeansOfBlocks
from gp_orff.inference.along_tracks.offsets import slow_variance
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.models.fitting.coordinates import admissible
from gp_orff.models.fitting.noise.independent import independent
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import scale_noise, start_noise

Vector = Float[np.ndarray, "k"]
_NONE = 1e-300  # a variance that is none


@dataclass(frozen=True)
class Split:
    """Shares of the noise variance at the start of a search, and the first correlation time."""

    noise: float
    block_variance: float
    offset_variance: float
    correlated_variance: float
    time: float  # over the duration of a track


SPLITS = (Split(0.1, 0.1, 0.2, 0.6, 0.05), Split(0.6, 0.1, 0.1, 0.2, 0.2))
"""Noise that is mostly correlated, and mostly white: each has an optimum of the evidence."""


def with_tracks(
    likelihoods: Mapping[str, Likelihood], data: Data, held: Data | None = None
) -> dict[str, Likelihood]:
    """The likelihoods, with a `TrackLikelihood` for every group of tracks, and none for others.

    A new one starts with the variance of the likelihood in its place. Data that are `held` already
    count too.

    Raises:
        ValueError: readings along tracks and others in one group; Student-t noise along tracks.
    """
    groups = dict(likelihoods)
    present_data = [data] if held is None else [held, data]
    along = {part.key.label: part for every in present_data for part in every.tracks}
    for key in chain.from_iterable(every.keys for every in present_data):
        if isinstance(key.pattern, MeansOfBlocks):
            continue
        if key.label in along:
            raise ValueError(
                "expected readings along tracks and others in groups of their own, got both "
                f"{f'in group {key.label!r}' if key.label else 'without a group'}; give one of "
                "them another name, group="
            )
        if isinstance(groups.get(key.label), TrackLikelihood):
            groups[key.label] = independent(groups[key.label])
    for label, part in along.items():
        present = groups.get(label, independent(groups[DEFAULT]))
        if isinstance(present, MultitaskStudentTLikelihood):
            raise ValueError(
                "expected Gaussian noise along tracks, got a MultitaskStudentTLikelihood; leave "
                "out likelihood=, or give TrackLikelihood(num_tasks)"
            )
        if not (label in groups and isinstance(present, TrackLikelihood)):
            groups[label] = _started(part, present)
    return groups


def _started(part: TrackObservations, present: Likelihood) -> TrackLikelihood:
    """A new likelihood for tracks, with the variance of the present one."""
    num_outputs = part.key.pattern.num_outputs
    likelihood = TrackLikelihood(num_outputs).to(part.y)
    remember(likelihood, part)
    with torch.no_grad():
        start_noise(likelihood, noise_of(present, num_outputs).diagonal().mean().item())
    return likelihood


def remember(likelihood: TrackLikelihood, part: TrackObservations) -> None:
    """Keep the time of a block of these tracks, and their duration."""
    durations = [(track.clock[-1] - track.clock[0]).item() for track in part.tracks]
    likelihood.span.fill_(part.span)
    likelihood.raw_block_variance.requires_grad_(part.span > 0)
    if not part.span > 0:
        likelihood.block_variance = _NONE
    likelihood.duration.fill_(float(np.median(durations)))


def remember_all(likelihoods: Mapping[str, Likelihood], data: Data) -> None:
    """`remember` for every group of tracks."""
    for part in data.tracks:
        remember(likelihoods[part.key.label], part)


def learn_new_tracks(
    likelihoods: Mapping[str, Likelihood],
    data: Data,
    field: FieldDistribution,
    constant: Float[torch.Tensor, "p"],
    noises: Noises,
) -> list[str]:
    """What the data tell of the variance of new tracks, for every group of tracks; sentences.

    Args:
        field, constant: the posterior of the field, and its constant mean.
    """
    notes = []
    for part in data.tracks:
        likelihood = likelihoods[part.key.label]
        slow = slow_variance(field, constant, noises, part, likelihood)
        likelihood.slow_variance = slow
        if slow is not None:
            group = f" of group {part.key.label!r}" if part.key.label else ""
            low, high = slow.sd(0.025), slow.sd(0.975)
            notes.append(
                f"from {len(part.tracks)} tracks{group}, the standard deviation of offset and "
                f"correlated noise on a new track is between {low:.3g} and {high:.3g} with 95 % "
                "probability; predictions of its readings integrate over this variance"
            )
    return notes


def spans_of(likelihoods: Mapping[str, Likelihood]) -> dict[str, float]:
    """The time of a block in every group whose likelihood knows it."""
    return {
        label: likelihood.span.item()
        for label, likelihood in likelihoods.items()
        if isinstance(likelihood, TrackLikelihood) and likelihood.duration > 0
    }


@start_noise.register
def _(likelihood: TrackLikelihood, variance: float) -> None:
    start_split(likelihood, variance, SPLITS[0])


def start_split(likelihood: TrackLikelihood, variance: float, split: Split) -> None:
    """Set the noise variances to shares of a total."""
    names = ("noise", "block_variance", "offset_variance", "correlated_variance")
    values = {name: getattr(split, name) * variance for name in names}
    if likelihood.duration > 0:
        values["correlation_time"] = split.time * likelihood.duration.item()
    for name, value in values.items():
        raw = getattr(likelihood, f"raw_{name}")
        if raw.requires_grad:
            constraint = getattr(likelihood, f"raw_{name}_constraint")
            setattr(likelihood, name, admissible(constraint, torch.full_like(raw, value)))


def splits(likelihoods: Mapping[str, Likelihood]) -> tuple[Split, ...]:
    """The splits to start from: one where no group has noise along tracks."""
    return SPLITS if _along_tracks(likelihoods) else SPLITS[:1]


def finalists(
    candidates: Sequence[tuple[Search, Vector, Split]], most: int
) -> list[tuple[Search, Vector]]:
    """The best `most` of the searches and their coordinates, and the best of each split."""
    ranked = sorted(candidates, key=lambda candidate: -candidate[0].value)
    places = {split: place for place, (*_, split) in reversed(list(enumerate(ranked)))}
    chosen = {*range(most), *places.values()}
    return [(search, u) for place, (search, u, _) in enumerate(ranked) if place in chosen]


@torch.no_grad()
def split_noise(likelihoods: Mapping[str, Likelihood], split: Split) -> None:
    """Split the noise variance of every group of tracks."""
    for likelihood in _along_tracks(likelihoods):
        start_split(likelihood, along_tracks(likelihood).total.item(), split)


def _along_tracks(likelihoods: Mapping[str, Likelihood]) -> list[TrackLikelihood]:
    return [noise for noise in likelihoods.values() if isinstance(noise, TrackLikelihood)]


@scale_noise.register
def _(likelihood: TrackLikelihood, factor: float) -> None:
    """The block means of tracks keep their noise: truncated features are no white noise there."""
