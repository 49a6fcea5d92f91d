"""The strategy of a fit: starting values, then searches on increasingly fine representations."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.observations import join
from gp_orff.data.survey import warn_of_far_points
from gp_orff.data.tracks import blocks_in_words
from gp_orff.features.draws import Rule
from gp_orff.features.grid import Auto
from gp_orff.fitting.curves import Curves
from gp_orff.fitting.journal import History, Journal, Progress
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.noise import Split, finalists, split_noise, splits
from gp_orff.fitting.plans import Plan, climb, plans_of
from gp_orff.fitting.robust_em import e_step_of, has_weights, settled, start_with_weights
from gp_orff.fitting.scoring import WeakPriors, leave_much_open
from gp_orff.fitting.search import Search
from gp_orff.fitting.starting_values import Start, scale_noise, start, starts
from gp_orff.fitting.trainer import SCREENED_VALUES, Trainer
from gp_orff.inference.exact import has_covariance
from gp_orff.inference.features import Inference
from gp_orff.inference.price import (
    FINALISTS,
    MOST_TRAINING,
    NATS,
    NEGLIGIBLE,
    SHORT,
    SUBSET_VALUES,
    UNSURE,
)
from gp_orff.inference.representation import Representation, warn_of_left_out, without_far_points

# Starting points of searches: the best of many starting values, on subsets of the data.


Candidate = tuple[Search, Float[np.ndarray, "k"], Split]
_CLOSE = NEGLIGIBLE * NATS  # these searches end if one more step is expected to gain less


def best_start(trainer: Trainer) -> Search:
    """Return a search that starts at the hyperparameters with the largest evidence of a subset.

    1. Short searches on a small subset start from the best starting values of each lengthscale.
    2. The best three continue on a larger subset, until they end or go to the same maximum.
    3. If there are many data, a further search runs on a dense part of them.
    """
    warn_of_far_points(trainer.distances)
    trainer.curves.end()
    spread = trainer.starting_subset(SUBSET_VALUES)
    # many data: a search on a dense part too, with fixed curves of learned spectra
    many = trainer.survey.num_values > MOST_TRAINING and not trainer.tracks
    held = trainer.curves.held() if many else nullcontext()
    name = f"starting values, {spread.survey.num_points} points"
    with held, trainer.journal.stage(name) as stage:
        search = _screened_search(trainer, spread)
        stage.nats_per_number = search.value
        if many:
            _over_short_distances(trainer, search)
    if many:
        trainer.curves.centre()
    # a small part of many data determines the curvature poorly
    return trainer.new_search() if many or trainer.tracks else search


def _screened_search(trainer: Trainer, spread: Dataset) -> Search:
    small = trainer.inference(trainer.starting_subset(SCREENED_VALUES))
    observations, name = join(small.data.survey.sample), "starting values"
    coordinates = trainer.new_search().coordinates
    first = coordinates.get()  # `start` does not set all, such as exponents

    def go_to(initial: Start, split: Split) -> None:
        coordinates.set(first)
        start(trainer.kernel, trainer.likelihoods, observations, trainer.distances, initial)
        coordinates.clip()
        split_noise(trainer.likelihoods, split)

    def value(pair: tuple[Start, Split]) -> float:
        go_to(*pair)
        return trainer.value(small)

    best: dict[tuple[float, Split], tuple[Start, Split]] = {}  # for each lengthscale and split
    initials = starts(trainer.kernel, trainer.distances, observations)
    pairs = product(initials, splits(trainer.likelihoods))
    for initial, split in sorted(pairs, key=value):
        best.pop((initial.share, split), None)  # the best comes last
        best[initial.share, split] = initial, split
    candidates: list[Candidate] = []
    for pair in reversed(best.values()):
        go_to(*pair)
        leading = max(candidates, key=lambda one: one[0].value, default=(None,))[0]
        promises = partial(_promises, leading, small.num_values)
        search = trainer.new_search()
        trainer.search(search, small, name, evaluations=SHORT, is_promising=promises)
        candidates.append((search, search.coordinates.get(), pair[1]))
    chosen = finalists(_distinct(candidates, small.num_values), FINALISTS)
    if spread.survey.num_points > small.data.survey.num_points:
        return _best_of(trainer, chosen, trainer.inference(spread), name)
    return _best_of(trainer, chosen, small, name, evaluated=True)


def _best_of(
    trainer: Trainer,
    chosen: Sequence[tuple[Search, Float[np.ndarray, "k"]]],
    inference: Inference,
    name: str,
    evaluated: bool = False,
) -> Search:
    """Run several searches, and return the one with the largest evidence.

    A search ends early if it goes to the maximum of a better search, or is not expected to reach
    the evidence of the better search.

    Args:
        chosen: searches and their coordinates, with the best one first.
        inference: the data, and the form of the prior, on which the searches continue.
        evaluated: whether the last runs of these searches used the same inference.
    """
    best, best_u = None, chosen[0][1]
    for search, u in chosen:
        promises = partial(_promises, best, inference.num_values)
        if not evaluated or (search.expected_gain > _CLOSE and promises(search)):
            search.coordinates.set(u)
            trainer.search(search, inference, name, nats=_CLOSE, is_promising=promises)
            u = search.coordinates.get()
        if best is None or search.value > best.value:
            best, best_u = search, u
    best.coordinates.set(best_u)
    return best


def _promises(best: Search | None, num_values: float, search: Search) -> bool:
    """Whether a search may reach another maximum, above that of the best search."""
    if best is None:
        return True
    difference = (best.value - search.value) * num_values
    foreseen = UNSURE * search.expected_gain
    return difference < foreseen and not search.expects_the_maximum_of(best, num_values)


def _distinct(candidates: Sequence[Candidate], num_values: float) -> list[Candidate]:
    """The candidates without those that go to the same maximum as a better one."""
    distinct: list[Candidate] = []
    for one in sorted(candidates, key=lambda candidate: -candidate[0].value):
        if not any(best[0].expects_the_maximum_of(one[0], num_values) for best in distinct):
            distinct.append(one)
    return distinct


def _over_short_distances(trainer: Trainer, search: Search) -> None:
    """Choose between the result of this search and that of a search on a dense part of the data.

    A subset of points with large distances cannot show variations over a few distances between
    neighbours, if they are smaller than the noise. The evidence of all data may have one maximum
    for these variations and another for those over large distances.

    A search over k hyperparameters gains about k/2 nats on the dense part by overfitting alone. If
    it gains more than k, the evidence of other dense parts decides.
    """
    u, part = search.coordinates.get(), trainer.windows(SUBSET_VALUES, 1, seed=0)
    local = replace(trainer, survey=part.survey, whole=trainer.survey)
    other = _screened_search(local, part)
    other_u, dense = other.coordinates.get(), trainer.inference(part)
    gain = trainer.value(dense)
    search.coordinates.set(u)
    gain -= trainer.value(dense)
    if gain <= len(u):
        return
    judge = trainer.inference(trainer.windows(2 * SUBSET_VALUES, 2, seed=1))
    for candidate, at in ((search, u), (other, other_u)):
        candidate.coordinates.set(at)
        trainer.search(candidate, judge, "dense parts", evaluations=SHORT)
    if (other.value - search.value) * judge.num_values <= len(u):
        search.coordinates.set(u)


# The order of stages: starting values, plans of rising price, and searches for the posterior.


@dataclass(frozen=True)
class Fitted:
    """The result of a fit, besides the hyperparameters of kernel and likelihoods."""

    representation: Representation
    mean: Float[Tensor, "p"] | None
    history: History


def fit(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
    warm_start: bool,
    progress: Progress,
) -> Fitted:
    """Set the hyperparameters to values that maximise the log evidence plus the log priors."""
    trainer, data = trainer_of(kernel, likelihoods, mean, requested, data, progress)
    journal = trainer.journal
    search, data = _started(trainer, data, warm_start)
    representation = Representation.of(kernel, likelihoods, requested, data)
    journal.note(representation.reason)
    representation = climbed(trainer, search, representation)
    if representation.follows:
        whole = representation
        representation = whole.mended
        if not whole.on_lattice and representation.data.num_values < data.num_values:
            parts = trainer, search, representation, whole
            trainer, search, representation = learned_from_kept(*parts)
        journal.note("" if representation.follows else representation.reason)
        trainer.warn_of_truncation(representation)
        warn_of_left_out(data, representation.data)
    for text in search.coordinates.reached(parameter_names(kernel, likelihoods)):
        journal.note(text)
    search.warn()
    means = trainer.num_outputs if mean is None else 0
    trainer.warn_of_few_numbers(data, len(search.coordinates.get()) + means)
    if has_weights(trainer, representation.data):
        representation = settled(trainer, representation)
    weak = trainer.priors is not None
    history = History("fitted", tuple(journal.stages), weak_priors=weak)
    return Fitted(representation, trainer.mean, history.with_notes(journal.notes))


def _started(trainer: Trainer, data: Data, warm_start: bool) -> tuple[Search, Data]:
    """Return a search, and the data with weights of Student-t noise.

    The search starts from the present hyperparameters if `warm_start`, otherwise from the best
    starting values.
    """
    if has_weights(trainer, data):
        data = start_with_weights(trainer, data, warm_start)
    elif not warm_start:
        return best_start(trainer), data
    return trainer.new_search(), data


def _with_weights(trainer: Trainer, data: Data, last: Plan | None) -> Data:
    """Return the data with weights of Student-t noise from the last search.

    If the last search was on a subset, its posterior predicts the weights of all observations.
    """
    if last is None or not has_weights(trainer, data):
        return data
    if last.data.sources is data.sources:
        return last.data
    inference = last.inference()
    return data if inference is None else e_step_of(trainer).foreseen(data, inference)


def trainer_of(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
    progress: Progress,
) -> tuple[Trainer, Data]:
    """Return the trainer of a fit, and its data without far points."""
    Curves(kernel).check_extents(data.survey.distances)
    data, notes = without_far_points(data, requested)
    journal = Journal(progress, [*notes, blocks_in_words(data.tracks)])
    priors = _weak_priors(kernel, likelihoods, requested, data)
    parts = {"tracks": data.tracks, "priors": priors}
    return Trainer(kernel, likelihoods, mean, data.survey, journal, **parts), data


def climbed(trainer: Trainer, search: Search, representation: Representation) -> Representation:
    """Search on the plans of the data, and return the representation with stored statistics."""
    plans = plans_of(trainer, representation)
    last = climb(search, plans, representation.data.num_values)
    representation = replace(representation, data=_with_weights(trainer, representation.data, last))
    if not representation.follows:
        return representation
    representation = next((plan.representation for plan in plans if plan.keeps), representation)
    ratios = {} if last is None else last.truncated(representation)
    for label, likelihood in trainer.likelihoods.items():
        ratio = min((r for key, r in ratios.items() if key.label == label), default=0.0)
        if 0 < ratio < math.inf:
            scale_noise(likelihood, max(1 - ratio, 0.5))
    if representation.kept is None and (now := representation.again).rule is None:
        return now
    return representation


def learned_from_kept(
    trainer: Trainer, search: Search, kept: Representation, whole: Representation
) -> tuple[Trainer, Search, Representation]:
    """Learn again from thinned observations; return the trainer, its search and a representation.

    Neighbours along a survey line determine the noise along the line. It may be smaller than the
    differences between observations of several lines. With this noise, means of all observations
    may suffice for the exact kernel. The function then returns their representation, otherwise that
    of the thinned observations.
    """
    trainer = replace(trainer, survey=kept.data.survey)
    search, data = _started(trainer, kept.data, warm_start=False)
    kept = replace(kept, data=data)
    last = climb(search, plans_of(trainer, kept), kept.data.num_values)
    if has_weights(trainer, data):
        return trainer, search, replace(kept, data=_with_weights(trainer, data, last))
    return trainer, search, again if (again := whole.mended).rule is None else kept


def _weak_priors(
    kernel: Kernel, likelihoods: Mapping[str, Likelihood], requested: Rule, data: Data
) -> WeakPriors | None:
    """Return the weak priors if the posterior integrates over hyperparameters, otherwise None.

    This applies to few observations under the exact kernel.
    """
    few = data.revisitable and leave_much_open(data)
    exact = isinstance(requested, Auto) and data.num_values <= requested.exact_values
    if not (few and exact and has_covariance(kernel, data)):
        return None
    return WeakPriors.of(kernel, likelihoods, data.survey)
