"""Where a fit begins: the best of many starting values, by searches on few numbers."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
from jaxtyping import Float

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import join
from gp_orff.data.survey import warn_of_far_points
from gp_orff.fitting.noise import Split, finalists, split_noise, splits
from gp_orff.fitting.search import Search
from gp_orff.fitting.starting_values import Start, start, starts
from gp_orff.fitting.trainer import MANY_VALUES, SCREENED_VALUES, SUBSET_VALUES, Trainer

# Where searches begin: the best of many starting values, on subsets of the data.


Candidate = tuple[Search, Float[np.ndarray, "k"], Split]
_FINALISTS, _FEW = 3, 1  # starting values that are searched from on more data
_JUDGED = 1200  # numbers in two dense parts of the data
_NATS_OF_A_START = 2.0  # for each output: what two parts do not show of long lengthscales


def best_start(trainer: Trainer) -> Search:
    """A search that starts at the hyperparameters of largest evidence of a subset: short searches
    on a small subset, from the best starting values of each lengthscale; the best three again on a
    larger one, and the best of these to the end. Many data are also searched in a dense part."""
    warn_of_far_points(trainer.distances)
    trainer.curves.end()
    spread = trainer.starting_subset(SUBSET_VALUES)
    many = trainer.has_many
    held = trainer.curves.held() if many else nullcontext()
    with held, trainer.journal.stage(f"starting values, {spread.survey.num_points} points"):
        search = _screened_search(trainer, spread)
        if not many:
            return search
        search = _over_short_distances(trainer, search)
    if not trainer.curves:
        return search
    trainer.curves.centre()
    return trainer.new_search()


def _screened_search(trainer: Trainer, spread: Dataset) -> Search:
    small = trainer.inference(trainer.starting_subset(SCREENED_VALUES))
    observations, name = join(small.data.survey.sample), "starting values"

    def go_to(initial: Start, split: Split) -> None:
        start(trainer.kernel, trainer.likelihoods, observations, trainer.distances, initial)
        trainer.new_search().coordinates.clip()
        split_noise(trainer.likelihoods, split)

    def value(pair: tuple[Start, Split]) -> float:
        go_to(*pair)
        return trainer.value(small)

    best: dict[tuple[float, Split], tuple[Start, Split]] = {}  # of each lengthscale and split
    pairs = product(starts(trainer.kernel, trainer.distances), splits(trainer.likelihoods))
    for initial, split in sorted(pairs, key=value):
        best[initial.share, split] = initial, split
    candidates = []
    for pair in best.values():
        go_to(*pair)
        candidates.append((*trainer.short_search(trainer.new_search(), small, name), pair[1]))
    large, reached = trainer.inference(spread), []
    searched_again = trainer.tracks and trainer.survey.num_values > MANY_VALUES  # on more blocks
    candidates = _distinct(candidates, small.num_values)
    for search, u in finalists(candidates, _FEW if searched_again else _FINALISTS):
        search.coordinates.set(u)
        reached.append(trainer.short_search(search, large, name))
    search, u = max(reached, key=lambda pair: pair[0].value)
    search.coordinates.set(u)
    return trainer.search(search, large, name, nats=0.1)


def _distinct(candidates: Sequence[Candidate], num_values: float) -> list[Candidate]:
    """The best of those that go to the same maximum."""
    distinct: list[Candidate] = []
    for one in sorted(candidates, key=lambda candidate: -candidate[0].value):
        if not any(best[0].expects_the_maximum_of(one[0], num_values) for best in distinct):
            distinct.append(one)
    return distinct


def _over_short_distances(trainer: Trainer, search: Search) -> Search:
    """A search on from where this one ended, or from a start on a dense part of the data, whichever
    has the larger evidence on other parts.

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
        return search
    judge = trainer.inference(trainer.windows(_JUDGED, 2, seed=1))
    for candidate, at in ((search, u), (other, other_u)):
        candidate.coordinates.set(at)
        trainer.short_search(candidate, judge, "dense parts")
    if (other.value - search.value) * judge.num_values > _NATS_OF_A_START * trainer.num_outputs:
        return trainer.new_search()  # from there, in the ranges of all data
    search.coordinates.set(u)
    return search
