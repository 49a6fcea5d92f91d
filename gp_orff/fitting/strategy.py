"""The strategy of a fit: starting values, then searches on finer and finer representations."""

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

# Where searches begin: the best of many starting values, on subsets of the data.


Candidate = tuple[Search, Float[np.ndarray, "k"], Split]
_CLOSE = NEGLIGIBLE * NATS  # promised at the end of these searches


def best_start(trainer: Trainer) -> Search:
    """A search that starts at the hyperparameters of largest evidence of a subset: short searches
    on a small subset, from the best starting values of each lengthscale; the best three again on a
    larger one, and the best of these to the end. Many data are also searched in a dense part."""
    warn_of_far_points(trainer.distances)
    trainer.curves.end()
    spread = trainer.starting_subset(SUBSET_VALUES)
    # of many, also a dense part, with the curves of learned spectra held
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
    # a small part of the data determines the curvature poorly
    return trainer.new_search() if many or trainer.tracks else search


def _screened_search(trainer: Trainer, spread: Dataset) -> Search:
    small = trainer.inference(trainer.starting_subset(SCREENED_VALUES))
    observations, name = join(small.data.survey.sample), "starting values"
    coordinates = trainer.new_search().coordinates
    first = coordinates.get()  # of what `start` does not set, such as exponents

    def go_to(initial: Start, split: Split) -> None:
        coordinates.set(first)
        start(trainer.kernel, trainer.likelihoods, observations, trainer.distances, initial)
        coordinates.clip()
        split_noise(trainer.likelihoods, split)

    def value(pair: tuple[Start, Split]) -> float:
        go_to(*pair)
        return trainer.value(small)

    best: dict[tuple[float, Split], tuple[Start, Split]] = {}  # of each lengthscale and split
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
    """The search with the largest evidence, to the end. A search is left as soon as it goes to the
    maximum of a better one, or promises less than that has.

    Args:
        chosen: searches and their coordinates, the most promising first.
        inference: of what they go on with.
        evaluated: whether they have ended on the same.
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
    """Whether a search may end above the best one, at another maximum."""
    if best is None:
        return True
    lacks = (best.value - search.value) * num_values
    foreseen = UNSURE * search.expected_gain
    return lacks < foreseen and not search.expects_the_maximum_of(best, num_values)


def _distinct(candidates: Sequence[Candidate], num_values: float) -> list[Candidate]:
    """The best of those that go to the same maximum."""
    distinct: list[Candidate] = []
    for one in sorted(candidates, key=lambda candidate: -candidate[0].value):
        if not any(best[0].expects_the_maximum_of(one[0], num_values) for best in distinct):
            distinct.append(one)
    return distinct


def _over_short_distances(trainer: Trainer, search: Search) -> None:
    """Go to where this search ended, or where one on a dense part of the data did, whichever has
    the larger evidence on other parts.

    Points spread over all data do not show what varies over a few distances of neighbours by less
    than the noise, and the evidence of all data may have a maximum for each. A search of k
    hyperparameters gains about k / 2 nats on the part where it is made, whether or not that differs
    from others: the other parts are asked if it gains more than k.
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


# The order of stages: starting values, plans of rising price, and what the posterior asks for.


@dataclass(frozen=True)
class Fitted:
    """The result of a fit, in addition to the hyperparameters that it has set."""

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
    """Set the hyperparameters to values that maximise the evidence, plus the log priors."""
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
    """A search from good starting values, or from where the hyperparameters are; the data, with
    weights of Student-t noise."""
    if has_weights(trainer, data):
        data = start_with_weights(trainer, data, warm_start)
    elif not warm_start:
        return best_start(trainer), data
    return trainer.new_search(), data


def _with_weights(trainer: Trainer, data: Data, last: Plan | None) -> Data:
    """The data, under Student-t noise with the weights of the last search: those that it has, if
    it was of all observations, or those that the posterior of a part of the data lets expect."""
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
    """What a fit learns with, and the data that it learns from."""
    Curves(kernel).check_extents(data.survey.distances)
    data, notes = without_far_points(data, requested)
    journal = Journal(progress, [*notes, blocks_in_words(data.tracks)])
    priors = _weak_priors(kernel, likelihoods, requested, data)
    parts = {"tracks": data.tracks, "priors": priors}
    return Trainer(kernel, likelihoods, mean, data.survey, journal, **parts), data


def climbed(trainer: Trainer, search: Search, representation: Representation) -> Representation:
    """Search on the plans of the data; the representation, with statistics that were computed."""
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
    """Learn again, from the observations that are kept of many: neighbours along a line determine
    the noise along it, which is less than the difference between observations of several lines.
    Under that noise the means of all observations may do; the representation that does, with the
    trainer of the kept and its search."""
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
    """The weak priors of few observations under the exact kernel, whose posterior integrates the
    hyperparameters; None for others."""
    few = data.revisitable and leave_much_open(data)
    exact = isinstance(requested, Auto) and data.num_values <= requested.exact_values
    if not (few and exact and has_covariance(kernel, data)):
        return None
    return WeakPriors.of(kernel, likelihoods, data.survey)
