"""Where a fit begins: the best of many starting values, by searches on few numbers."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
from jaxtyping import Float

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import join
from gp_orff.data.survey import warn_of_far_points
from gp_orff.fitting.noise import Split, finalists, split_noise, splits
from gp_orff.fitting.search import Search
from gp_orff.fitting.starting_values import Start, start, starts
from gp_orff.fitting.trainer import SCREENED_VALUES, Trainer
from gp_orff.inference.features import Inference
from gp_orff.inference.price import FINALISTS, MOST_TRAINING, NATS, NEGLIGIBLE, SHORT, SUBSET_VALUES

# Where searches begin: the best of many starting values, on subsets of the data.


Candidate = tuple[Search, Float[np.ndarray, "k"], Split]
_CLOSE = NEGLIGIBLE * NATS  # promised at the end of these searches


def best_start(trainer: Trainer) -> None:
    """Set the hyperparameters to those of largest evidence of a subset: short searches on a small
    subset, from the best starting values of each lengthscale; the best three again on a larger one,
    and the best of these to the end. Many data are also searched in a dense part."""
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
    foreseen = 2 * search.expected_gain
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
