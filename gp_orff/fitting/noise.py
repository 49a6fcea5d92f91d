"""The noise that a fit learns: the likelihood of each group, its starting values and its limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from itertools import chain

import numpy as np
import scipy
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import GaussianLikelihood, Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.dataset import Data
from gp_orff.data.likelihoods import (
    HeavyTails,
    KnownNoiseLikelihood,
    MultitaskStudentTLikelihood,
    TrackLikelihood,
    default_likelihood,
)
from gp_orff.data.noise import Noises, along_tracks, noise_of, of_kind
from gp_orff.data.observations import join
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.pointwise import Pointwise
from gp_orff.data.survey import Survey
from gp_orff.data.tracks import TrackObservations
from gp_orff.fitting.coordinates import (
    AT_BOUND,
    Coordinate,
    Coordinates,
    parameter_ranges,
    set_trained,
)
from gp_orff.fitting.search import Search
from gp_orff.fitting.starting_values import mean_weight, moments, scale_noise, start_noise
from gp_orff.inference.along_tracks import slow_variance
from gp_orff.inference.posteriors import FieldDistribution
from gp_orff.inference.price import MOST_EVALUATIONS, NATS, NEGLIGIBLE, ROUNDING
from gp_orff.inference.robust import Distances, StudentTNoise

# The smallest noise variance of a search.
#
# For data without noise, the evidence rises as the noise falls, until rounding errors dominate it.
# Rounding errors then dominate posterior variances too, as differences of values as large as the
# prior variance, and the variances are clipped at zero. Noise with a ten-thousandth of the standard
# deviation of the data is far above rounding errors, and below the resolution of observations.


_VARIANCES = ("raw_noise", "raw_task_noises")


def noise_floors(
    likelihoods: Mapping[str, Likelihood], survey: Survey
) -> dict[nn.Parameter, float]:
    """Return the smallest value that a search allows for every learned noise variance.

    The result is a dict. Its keys are the raw parameters of the variances.

    Args:
        likelihoods: the likelihood of every group, by label.
        survey: the survey of the data.
    """
    observations = join(survey.sample)
    variance, _ = moments(observations)
    floors = {}
    for label, likelihood in likelihoods.items():
        groups = [group for group in observations if group.key.label == label]
        for name, parameter in likelihood.named_parameters():
            if name.split(".")[-1] in _VARIANCES:
                floors[parameter] = ROUNDING * variance * mean_weight(groups)
    return floors


def search_coordinates(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    survey: Survey,
    part: Survey | None = None,
) -> Coordinates:
    """Return the coordinates of all trained hyperparameters, in the ranges that data can determine.

    Args:
        kernel: the kernel that is learned.
        likelihoods: the likelihood of every group, by label.
        survey: the survey of all data.
        part: the survey of a subset, for a search on this subset; None for a search on all data.
    """
    searched = survey if part is None else part
    ranges = parameter_ranges(kernel, searched.distances, survey)
    floors = noise_floors(likelihoods, survey)
    return Coordinates(kernel, *likelihoods.values(), ranges=ranges, floors=floors)


# Likelihoods with learned, independent noise, made from the likelihoods of other observations.


@singledispatch
def independent(likelihood: Likelihood) -> Likelihood:
    """Return a likelihood whose noise is learned and independent for each observation.

    Noise along tracks is replaced by Gaussian noise with the same total variance. Known noise is
    replaced by Gaussian noise, or by Student-t noise if the known noise is Student-t. Every other
    likelihood is returned unchanged.
    """
    return likelihood


@independent.register
def _(likelihood: TrackLikelihood) -> Likelihood:
    variance = noise_of(likelihood, likelihood.num_tasks)[0, 0].item()
    plain = default_likelihood(likelihood.num_tasks).to(likelihood.raw_noise)
    start_noise(plain, variance)
    return plain


@independent.register
def _(likelihood: KnownNoiseLikelihood) -> Likelihood:
    plain = _with_tails_of(likelihood) or default_likelihood(likelihood.num_tasks)
    return plain.to(likelihood.raw_noise_scale)


@singledispatch
def along_directions(likelihood: Likelihood, num_outputs: int) -> Likelihood:
    """Return the likelihood of components along directions, from the likelihood of vectors.

    The noise is Gaussian or Student-t, as in the likelihood of vectors. Its variance is the mean of
    the variances of the components.
    """
    plain = _with_tails_of(likelihood) or GaussianLikelihood(noise_constraint=GreaterThan(0.0))
    start_noise(plain, noise_of(likelihood, num_outputs).diagonal().mean().item())
    return plain


@along_directions.register
def _(likelihood: Pointwise, num_outputs: int) -> Likelihood:
    return likelihood


@singledispatch
def _with_tails_of(likelihood: Likelihood) -> Likelihood | None:
    """Return Student-t noise with the `deg_free` of a likelihood and the same variance for all
    components. Return None if the likelihood has no `deg_free`."""
    return None


@_with_tails_of.register
def _(likelihood: HeavyTails) -> Likelihood | None:
    if not likelihood.has_deg_free:
        return None
    plain = MultitaskStudentTLikelihood(likelihood.num_tasks, noise_constraint=GreaterThan(0.0))
    plain.copy_deg_free(likelihood)
    return plain


# The likelihoods of observations with known noise, and the factors of this noise.


def with_known_noise(
    likelihoods: Mapping[str, Likelihood], data: Data, held: Data | None = None
) -> dict[str, Likelihood]:
    """Return the likelihoods, with a `KnownNoiseLikelihood` for every group with known noise.

    Groups without known noise get no such likelihood.

    Args:
        likelihoods: the present likelihood of every group, by label.
        data: the new data.
        held: the data that the model already has.

    Raises:
        ValueError: if a group contains observations with known noise and others.
    """
    groups, known = dict(likelihoods), {}
    device = data.survey.sample[0].x.device
    for key in chain.from_iterable(every.keys for every in (held, data) if every is not None):
        if known.setdefault(key.label, key.known) != key.known:
            raise ValueError(
                "expected noise= for all observations of a group or for none, got both "
                f"{f'in group {key.label!r}' if key.label else 'without a group'}; pass noise= for "
                "all of them, or pass another group= with the observations without noise="
            )
    scaled = of_kind(groups, KnownNoiseLikelihood)
    for label, given in known.items():
        if given and label not in scaled:
            present = groups.get(label, groups[DEFAULT])
            groups[label] = KnownNoiseLikelihood(data.keys[0].pattern.num_outputs)
            groups[label].copy_deg_free(present)
            groups[label].to(device)
        elif not given and label in scaled:
            groups[label] = independent(groups[label])
    return groups


@torch.no_grad()
def learn_scales(likelihoods: Mapping[str, Likelihood], data: Data, learn: bool) -> None:
    """Set whether a fit learns the factor of known noise. Otherwise the factor is one.

    Raises:
        ValueError: if `learn` is True and no observation has known noise.
    """
    known = {key.label for key in data.keys if key.known}
    if learn and not known:
        raise ValueError(
            "expected noise= with scale_noise=True, got observations without it; remove "
            "scale_noise=, since a fit learns the noise of these observations"
        )
    for label in known:
        likelihood = likelihoods[label]
        likelihood.raw_noise_scale.requires_grad_(learn)
        if not learn:
            likelihood.noise_scale = 1.0


def note_of(likelihoods: Mapping[str, Likelihood], data: Data) -> str:
    """A note about known noise, for the report; empty if all noise is learned."""
    if not any(key.known for key in data.keys):
        return ""
    how = "unchanged" if is_kept(likelihoods, data) else "times noise_scale"
    return f"noise: as given with the observations, {how}"


def is_kept(likelihoods: Mapping[str, Likelihood], data: Data) -> bool:
    """Whether there is known noise, and all its factors are fixed at one."""
    known = [likelihoods[label] for label in {key.label for key in data.keys if key.known}]
    plain = (not n.raw_noise_scale.requires_grad and n.noise_scale.item() == 1 for n in known)
    return bool(known) and all(plain)


@start_noise.register
def _(likelihood: KnownNoiseLikelihood, variance: float) -> None:
    """Set the factor to one. If units seem wrong, use the nearest factor between 0.01 and 100 times
    the variance of the data.
    """
    low, high = NEGLIGIBLE**2 * variance, variance / NEGLIGIBLE**2
    set_trained(likelihood, "noise_scale", min(max(1.0, low), high))


@scale_noise.register
def _(likelihood: KnownNoiseLikelihood, factor: float) -> None:
    set_trained(likelihood, "noise_scale", factor * likelihood.noise_scale)


# The degrees of freedom and the scale of Student-t noise, learned with the weights of observations.
#
# Given a posterior of the field, the ELBO depends on the degrees of freedom ν and on the scale s
# through the expected squared distances d_n. With the best weights for each ν and s, it is a
# function of these two variables only:
#
# 1. `best_scale` solves for s at a given ν by Newton's method in log s.
# 2. `Tail.learn` maximises over ν, with the best s for each, by Brent's method in the coordinate of
#    ν. It moves by at most one unit, since the distances change with the next posterior.
#
# Maximising over ν with the weights eliminated converges much faster than EM with the weights fixed
# (ECME: Liu & Rubin 1995).


_FARTHEST = 7.0  # largest coordinate of ν: with the default constraint, ν up to 1e3
_LEAST_DEG_FREE = 2.5  # smallest ν of a search: a smaller ν fits neither bulk nor outliers well
_APART = 0.05  # step of the differences for curvatures, in the coordinate of ν


@dataclass(frozen=True)
class Tail:
    """The Student-t noise of one likelihood with learned ν, and with learned s if `scaled`."""

    likelihood: HeavyTails
    scaled: bool

    @cached_property
    def _coordinate(self) -> Coordinate:
        raw, constraint = self.likelihood.raw_deg_free, self.likelihood.raw_deg_free_constraint
        return Coordinate("raw_deg_free", raw, constraint, 1.0)

    @cached_property
    def lowest(self) -> float:
        """The lower bound of a search over ν, in the coordinate of ν.

        The bound is the coordinate of ν = 2.5. If a search starts from a smaller ν, the bound is
        the starting value.

        With gross outliers, the evidence rises as ν falls towards 2, where the noise has an
        infinite variance. The weights of ordinary observations then vary as much as the weights of
        outliers. As a result, error bars are too small.
        """
        least = torch.full_like(self.likelihood.deg_free, _LEAST_DEG_FREE)
        allowed = self._coordinate.allows_each(least).all()
        lowest = self._coordinate.of_values(least).item() if allowed else -_FARTHEST
        return min(self._coordinate.get().item(), lowest)

    @property
    def at_bound(self) -> bool:
        """Whether ν is at the lower bound of the search."""
        return self._coordinate.get().item() < self.lowest + AT_BOUND

    @property
    def _variance(self) -> float:
        return noise_of(self.likelihood, self.likelihood.num_tasks).diagonal().mean().item()

    def get(self) -> list[float]:
        """The coordinate of ν, and the logarithm of the noise variance."""
        return [self._coordinate.get().item(), math.log(self._variance)]

    def set(self, coordinate: float, log_variance: float) -> None:
        """Set ν and, if it is learned here, the noise variance."""
        coordinate = min(max(coordinate, self.lowest), _FARTHEST)
        self._coordinate.set(torch.full_like(self.likelihood.raw_deg_free, coordinate))
        if self.scaled:
            scale_noise(self.likelihood, math.exp(log_variance) / self._variance)

    @cached_property
    def _log_densities(self) -> list[tuple]:
        return [prior[1:4] for prior in self.likelihood.named_priors()]

    def log_prior(self) -> float:
        """The log density of the priors of the likelihood."""
        return sum(
            float(prior.log_prob(of(owner)).sum()) for owner, prior, of in self._log_densities
        )

    def learn(self, parts: Sequence[Distances]) -> float:
        """Set ν and s to the maximum of Σ_n log t_ν(d_n/s) − ½ V log s + log p(ν), and return s.

        Here d_n is an expected squared distance, and V is the number of observed values. If the
        scale is not learned, s is one. Distances in units of the new noise are d_n/s.
        """
        present, before = self._coordinate.get().item(), self._variance
        low, high = max(present - 1, self.lowest), min(present + 1, _FARTHEST)
        found = scipy.optimize.minimize_scalar(
            lambda u: self._loss(u, parts)[0],
            bounds=(low, high),
            method="bounded",
        )
        _, scale = self._loss(found.x, parts)
        if self.scaled:
            scale_noise(self.likelihood, scale)
        return self._variance / before

    def standard_error(self, parts: Sequence[Distances]) -> float:
        """Return the standard error of ν, from the curvature of the objective of `learn`.

        The result is NaN if the objective is flat, or if ν is not at its maximum. The posterior of
        the field is treated as fixed. The result is therefore too small if the posterior variance
        of the field is nearly as large as the noise variance.
        """
        present = self._coordinate.get().item()
        below, here, above = (self._loss(present + d, parts)[0] for d in (-_APART, 0.0, _APART))
        self._loss(present, parts)
        slope, curvature = (above - below) / (2 * _APART), (above - 2 * here + below) / _APART**2
        # The present value is below the maximum of the parabola by slope²/(2 curvature).
        if not curvature > NEGLIGIBLE**2 * NATS or slope**2 > NATS * curvature:
            return math.nan
        return abs(self._coordinate.slope().item()) / math.sqrt(curvature)

    def _loss(self, u: float, parts: Sequence[Distances]) -> tuple[float, float]:
        """Return the negative objective at a coordinate u of ν, and the best s for this ν."""
        self._coordinate.set(torch.full_like(self.likelihood.raw_deg_free, u))
        model = StudentTNoise(self.likelihood.deg_free.item())
        scale = best_scale(model, parts) if self.scaled else 1.0
        total = self.log_prior()
        for key, distance in parts:
            values = key.pattern.num_values
            density = model.log_density(distance / scale, values).sum().item()
            total += density - 0.5 * len(distance) * values * math.log(scale)
        return -total, scale


def best_scale(model: StudentTNoise, parts: Sequence[Distances]) -> float:
    """Return the best factor s of the noise variance for this ν, with Σ_n E[w_n] d_n/s = V.

    V is the number of observed values. E[w_n] is the expected weight at the distance d_n/s.
    """
    nu, log_scale = model.deg_free, 0.0
    for _ in range(MOST_EVALUATIONS):
        excess = curvature = 0.0
        for key, distance in parts:
            values, scaled = key.pattern.num_values, distance / math.exp(log_scale)
            share = scaled / (nu + scaled)
            excess += ((nu + values) * share - values).sum().item()
            curvature += ((nu + values) * share * (1 - share)).sum().item()
        step = min(max(excess / curvature, -1.0), 1.0) if curvature > 0 else 0.0
        log_scale += step
        if abs(step) < torch.finfo(torch.float32).eps:
            break
    return math.exp(log_scale)


@dataclass(frozen=True)
class Tails:
    """The Student-t noise of all groups. Only likelihoods with a trained ν are used.

    Args:
        likelihoods: the likelihood of every group, by label.
        scaled: whether to learn the scale of the noise together with ν. The scale does not change
            if the likelihood has a parameter that is not trained, or a prior of another parameter
            than ν.
    """

    likelihoods: Mapping[str, Likelihood]
    scaled: bool = False

    @cached_property
    def members(self) -> list[Tail]:
        """Each likelihood once."""
        tails = dict.fromkeys(of_kind(self.likelihoods, HeavyTails).values())
        return [
            Tail(likelihood, self.scaled and _is_free(likelihood))
            for likelihood in tails
            if likelihood.has_deg_free and likelihood.raw_deg_free.requires_grad
        ]

    @torch.no_grad()
    def learn(self, found: Sequence[Distances]) -> list[Distances]:
        """Set every ν, and the scales of noise, to the maximum of the ELBO with the best weights.

        `found` contains the distances d_n under the present posterior (ECME: Liu & Rubin 1995,
        section 3). The result contains the distances in units of the new noise.
        """
        scales: dict[str, float] = {}
        for tail in self.members:
            if parts := self._of(tail, found):
                scale = tail.learn(parts)
                scales.update({part.key.label: scale for part in parts})
        return [Distances(key, distance / scales.get(key.label, 1.0)) for key, distance in found]

    @torch.no_grad()
    def standard_errors(self, found: Sequence[Distances]) -> dict[nn.Parameter, float]:
        """The standard error of every ν, by its raw parameter."""
        return {
            tail.likelihood.raw_deg_free: tail.standard_error(parts)
            for tail in self.members
            if (parts := self._of(tail, found))
        }

    def _of(self, tail: Tail, found: Sequence[Distances]) -> list[Distances]:
        """The distances of the observations with this likelihood."""
        labels = [name for name, own in self.likelihoods.items() if own is tail.likelihood]
        return [part for part in found if part.key.label in labels]

    def get(self) -> Float[Tensor, "2*g"]:
        """The coordinate of ν and the log noise variance of every likelihood."""
        return torch.tensor([value for tail in self.members for value in tail.get()]).double()

    @torch.no_grad()
    def set(self, values: Float[Tensor, "2*g"]) -> None:
        """Set the coordinates and log noise variances to values that `get` returned."""
        for tail, pair in zip(self.members, values.reshape(-1, 2).tolist(), strict=True):
            tail.set(*pair)

    @property
    def notes(self) -> list[str]:
        """A sentence for each ν at the bound of the search."""
        return [
            f"deg_free = {tail.likelihood.deg_free.item():.3g} is at the lower bound of the "
            "search: the outliers suggest a smaller value"
            for tail in self.members
            if tail.at_bound
        ]

    def log_prior(self) -> float:
        """The log density of the priors of all these likelihoods."""
        return sum(tail.log_prior() for tail in self.members)


def _is_free(likelihood: HeavyTails) -> bool:
    """Whether all parameters of the noise are learned, and none but ν has a prior."""
    priors = [name for name, *_ in likelihood.named_priors() if name != "deg_free_prior"]
    return not priors and all(parameter.requires_grad for parameter in likelihood.parameters())


# The likelihoods of observations along tracks, and the starting values of their noise.
#
# The evidence of noise along tracks has two optima, one with mostly correlated and one with mostly
# white noise. A search finds the optimum nearest to its start. Searches therefore start from both
# splits of the variance, and the best search of each split goes to the next stage (`finalists`).


Vector = Float[np.ndarray, "k"]
_NONE = torch.finfo(torch.float64).tiny  # a negligible variance


@dataclass(frozen=True)
class Split:
    """Starting values of the parts of the noise variance, as fractions of their sum, and of the
    correlation time."""

    noise: float
    block_variance: float
    offset_variance: float
    correlated_variance: float
    time: float  # correlation time, relative to the duration of a track


SPLITS = (Split(0.1, 0.1, 0.2, 0.6, 0.05), Split(0.6, 0.1, 0.1, 0.2, 0.2))
"""Mostly correlated noise, and mostly white noise. The evidence has an optimum near each."""


def with_tracks(
    likelihoods: Mapping[str, Likelihood], data: Data, held: Data | None = None
) -> dict[str, Likelihood]:
    """Return the likelihoods, with a `TrackLikelihood` for every group of tracks.

    Other groups get no such likelihood. A new `TrackLikelihood` starts with the variance of the
    likelihood that it replaces.

    Args:
        likelihoods: the present likelihood of every group, by label.
        data: the new data.
        held: the data that the model already has.

    Raises:
        ValueError: if a group contains observations along tracks and others, or if a group of
            tracks has Student-t noise.
    """
    groups = dict(likelihoods)
    present_data = [data] if held is None else [held, data]
    tracks = [part for every in present_data for part in every.tracks]
    along, keys = {part.key.label: part for part in tracks}, {part.key for part in tracks}
    of_tracks = of_kind(groups, TrackLikelihood)
    for key in chain.from_iterable(every.keys for every in present_data):
        if key in keys:
            continue
        if key.label in along:
            raise ValueError(
                "expected observations along tracks and others in separate groups, got both "
                f"{f'in group {key.label!r}' if key.label else 'without a group'}; pass another "
                "group= with one of them"
            )
        if key.label in of_tracks:
            groups[key.label] = independent(of_tracks[key.label])
    for label, part in along.items():
        present = groups.get(label, independent(groups[DEFAULT]))
        if isinstance(present, MultitaskStudentTLikelihood):
            raise ValueError(
                "expected Gaussian noise along tracks, got a MultitaskStudentTLikelihood; create "
                "the model without likelihood=, or with likelihood=TrackLikelihood(num_tasks)"
            )
        if label not in of_tracks:
            groups[label] = TrackLikelihood(part.key.pattern.num_outputs).to(part.y)
            remember(groups[label], part)
            variances = noise_of(present, part.key.pattern.num_outputs).diagonal()
            start_noise(groups[label], variances.mean().item())
    return groups


def remember(likelihood: TrackLikelihood, part: TrackObservations) -> None:
    """Store the duration of a block and the median duration of these tracks in the likelihood."""
    durations = [(track.clock[-1] - track.clock[0]).item() for track in part.tracks]
    likelihood.span.fill_(part.span)
    likelihood.raw_block_variance.requires_grad_(part.span > 0)
    if not part.span > 0:
        likelihood.block_variance = _NONE
    likelihood.duration.fill_(float(np.median(durations)))


def remember_all(likelihoods: Mapping[str, Likelihood], data: Data) -> None:
    """Call `remember` for every group of tracks."""
    for part in data.tracks:
        remember(likelihoods[part.key.label], part)


def learn_new_tracks(
    likelihoods: Mapping[str, Likelihood],
    data: Data,
    field: FieldDistribution,
    noises: Noises,
) -> list[str]:
    """Learn the noise variance of new tracks for every group of tracks, and return notes.

    Args:
        likelihoods: the likelihood of every group, by label.
        data: the data of the fit.
        field: the posterior of the field.
        noises: the noise of every group.
    """
    notes = []
    for part in data.tracks:
        likelihood = likelihoods[part.key.label]
        slow = slow_variance(field, noises, part, likelihood)
        likelihood.slow_variance = slow
        if slow is not None:
            group = f" of group {part.key.label!r}" if part.key.label else ""
            low, high = slow.sd(0.025), slow.sd(0.975)
            notes.append(
                f"from {len(part.tracks)} tracks{group}, the standard deviation of offset and "
                f"correlated noise on a new track is between {low:.3g} and {high:.3g} with 95 % "
                "probability; predictions of its observations integrate over this variance"
            )
    return notes


def spans_of(likelihoods: Mapping[str, Likelihood]) -> dict[str, float]:
    """The duration of a block in every group of tracks, by label."""
    along = of_kind(likelihoods, TrackLikelihood)
    return {label: noise.span.item() for label, noise in along.items() if noise.duration > 0}


@start_noise.register
def _(likelihood: TrackLikelihood, variance: float) -> None:
    start_split(likelihood, variance, SPLITS[0])


def start_split(likelihood: TrackLikelihood, variance: float, split: Split) -> None:
    """Set the parts of the noise variance to the fractions `split` of a total variance."""
    names = ("noise", "block_variance", "offset_variance", "correlated_variance")
    values = {name: getattr(split, name) * variance for name in names}
    if likelihood.duration > 0:
        values["correlation_time"] = split.time * likelihood.duration.item()
    for name, value in values.items():
        set_trained(likelihood, name, value)


def splits(likelihoods: Mapping[str, Likelihood]) -> tuple[Split, ...]:
    """Return the splits from which searches start: two for noise along tracks, otherwise one."""
    return SPLITS if of_kind(likelihoods, TrackLikelihood) else SPLITS[:1]


def finalists(
    candidates: Sequence[tuple[Search, Vector, Split]], most: int
) -> list[tuple[Search, Vector]]:
    """Return the best `most` searches and the best search of each split, with coordinates."""
    ranked = sorted(candidates, key=lambda candidate: -candidate[0].value)
    places = {split: place for place, (*_, split) in reversed(list(enumerate(ranked)))}
    chosen = {*range(most), *places.values()}
    return [(search, u) for place, (search, u, _) in enumerate(ranked) if place in chosen]


@torch.no_grad()
def split_noise(likelihoods: Mapping[str, Likelihood], split: Split) -> None:
    """Set the parts of the noise variance to the fractions `split` of their present total, for
    every group of tracks."""
    for likelihood in of_kind(likelihoods, TrackLikelihood).values():
        start_split(likelihood, along_tracks(likelihood).total.item(), split)


@scale_noise.register
def _(likelihood: TrackLikelihood, factor: float) -> None:
    """Leave the noise unchanged, because truncated features are not white noise in block means."""
