"""How a model is fitted: starting values, then searches on better and better representations."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.survey import warn_of_far_points
from gp_orff.features.frequencies.grid import Grid, GridBudgetError
from gp_orff.features.frequencies.lattice_nodes import GridWarning
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.conditioning import ExactInference
from gp_orff.inference.representation import (
    COARSE_FACTOR,
    FINE_FACTOR,
    Representation,
    num_features,
)
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.robust_em import RobustEM
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import scale_noise, start, starts
from gp_orff.models.fitting.trainer import (
    SCREENED_VALUES,
    SUBSET_VALUES,
    Trainer,
    without_far_points,
)

_FEW_VALUES = 200  # numbers that do not tell a constant from a field that varies slowly
_FINALISTS = 3  # survivors of starts
_SOME_VALUES, _MANY = 1200, 1.3  # numbers of a search before that with many times as many
_CUBIC, _FEWEST, _MOST = 40.0, 2, 60  # iterations with 1000 numbers or 2000 features; bounds
_FEW_ITERATIONS = 6  # on a grid of many features
_LAST_FACTOR, _LAST_ROUNDS, _LAST_ITERATIONS = 1.05, 4, 8
_NATS = 0.1  # in total, that a last grid has to gain
_LITTLE, _MUCH = 0.01, 0.1  # of the noise's variance, that a grid has cut


@dataclass(frozen=True)
class Fitted:
    """What a fit gives back, beside the hyperparameters that it has set."""

    representation: Representation
    mean: Float[Tensor, "p"] | None
    notes: list[str]


def fit(
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
    requested: Rule,
    data: Data,
    warm_start: bool,
    progress: Callable[..., None],
) -> Fitted:
    """Set the hyperparameters to those of largest evidence."""
    data, notes = without_far_points(data, requested)
    trainer = Trainer(kernel, likelihoods, mean, data.survey, progress, notes)
    robust, begin = RobustEM(trainer), Trainer.begin if warm_start else begin_anew
    weighs = isinstance(data, Dataset) and bool(robust.e_step.heavy_tailed)
    if weighs:
        data, begin = robust.start(data, warm_start), Trainer.begin
    search = begin(trainer)
    representation = Representation.of(kernel, likelihoods, requested, data)
    trainer.note(representation.reason)
    rule = representation.rule
    if rule is None:
        trainer = ExactKernel(trainer, data).run(search, begin)
    elif representation.follows:
        Grids(trainer, representation).run(search)
    else:
        name = "grid by hand" if isinstance(rule, Grid) else repr(rule)
        trainer.search(search, representation.inference(rule), name)
    for text in search.coordinates.reached():
        trainer.note(text)
    if weighs:
        representation = RobustEM(trainer).run(representation)
    return Fitted(representation, trainer.mean, notes)


def begin_anew(trainer: Trainer) -> Search:
    """Hyperparameters of the largest evidence of few readings: short searches on very few from
    many places, the best of them again on some more, the best of these to its end."""
    distances, found = trainer.distances, []
    warn_of_far_points(distances)
    few = trainer.represented(trainer.some(SCREENED_VALUES))
    for where in starts(trainer.kernel, distances):
        start(trainer.kernel, trainer.likelihoods, few.data.observations, distances, where)
        found.append(trainer.begun(trainer.begin(), few, f"start {where}"))
    some = trainer.represented(trainer.some(SUBSET_VALUES))
    name = f"start, {some.data.survey.num_points} points"
    options = {"iterations": _MOST} if some.num_values <= 2 * SCREENED_VALUES else {}
    finalists = []
    for search, place in sorted(found, key=lambda pair: -pair[0].value)[:_FINALISTS]:
        search.coordinates.set(place)
        finalists.append(trainer.begun(search, some, name, **options))
    search, place = max(finalists, key=lambda pair: pair[0].value)
    search.coordinates.set(place)
    return trainer.search(search, some, name, nats=0.1)


@dataclass(frozen=True)
class ExactKernel:
    """Searches under the exact kernel."""

    trainer: Trainer
    data: Dataset

    def run(self, search: Search, begin: Callable[[Trainer], Search]) -> Trainer:
        """Few data get a constant mean only if they pay for it (Schwarz 1978)."""
        own, data = self.trainer, self.data
        self._search(search, "exact kernel")
        if own.mean is not None or data.num_values > _FEW_VALUES:
            return own
        place = search.coordinates.get()
        like = next(own.kernel.parameters())
        zero = replace(own, mean=torch.zeros(own.num_outputs).to(like.device, torch.float64))
        without = replace(self, trainer=zero)._search(begin(zero), "exact kernel, mean zero")
        gain = (search.value - without.value) * data.num_values
        pays = gain > 0.5 * own.num_outputs * math.log(data.survey.num_points)
        if pays:
            search.coordinates.set(place)
        own.note(f"mean {'constant' if pays else 'zero'}: by {abs(gain):.2f} nats")
        return own if pays else zero

    def _search(self, search: Search, name: str) -> Search:
        """On some of many readings first: an evaluation costs the third power of their number."""
        own, count = self.trainer, self.data.num_values
        if count > _MANY * _SOME_VALUES:
            some = own.some(_SOME_VALUES)
            label = f"exact kernel, {some.survey.num_points} points"
            own.search(search, ExactInference(some), label, nats=0.1)
        nats = 0.1 if count > SUBSET_VALUES else 0.01
        iterations = int(min(max(_CUBIC * (1000 / count) ** 3, _FEWEST), _MOST))
        every = ExactInference(self.data)
        return own.search(search, every, name, iterations=iterations, nats=nats)


@dataclass(frozen=True)
class Grids:
    """Searches on narrow grids, rebuilt as the lengthscales move."""

    trainer: Trainer
    representation: Representation

    def run(self, search: Search) -> None:
        """Coarse ones first."""
        seen, own = [search.coordinates.get()], self.representation
        self._follow(search, "coarse", COARSE_FACTOR, own.coarse)
        seen.append(search.coordinates.get())
        self._follow(search, "fine", FINE_FACTOR, own.fine)
        seen.append(search.coordinates.get())
        cuts = own.cuts()
        for label, likelihood in self.trainer.likelihoods.items():
            share = min((cut for key, cut in cuts.items() if key.label == label), default=0.0)
            if share > _LITTLE:  # the noise learned has taken it up, and it will be returned
                scale_noise(likelihood, max(1 - share, 0.5))
        if max(cuts.values()) > _MUCH:
            seen.append(search.coordinates.get())
            self._with_what_is_cut(search.coordinates, seen)

    def _follow(
        self,
        search: Search,
        name: str,
        trust_factor: float,
        level: Callable[[], Grid],
        rounds: int = 8,
        iterations: int = 60,
    ) -> None:
        """Search on one grid after another, until no lengthscale comes to the edge of its range."""
        for _ in range(rounds):
            try:
                inference = self.representation.inference(level())
            except GridBudgetError as error:
                self.trainer.note(f"no {name} grid: {error}")
                return
            features = num_features(self.trainer.kernel, inference.draws)
            name_and_size = f"{name} grid, F = {features}"
            affordable = int(max(_CUBIC * (2000 / features) ** 3, _FEW_ITERATIONS))
            options = {"trust_factor": trust_factor, "iterations": min(iterations, affordable)}
            self.trainer.search(search, inference, name_and_size, **options)
            if search.settled:
                return

    def _with_what_is_cut(
        self, coordinates: Coordinates, seen: list[Float[np.ndarray, "k"]]
    ) -> None:
        """Where a budget cuts much, go on with it in its place, from the best of what was seen, as
        long as that gains; the best is kept."""
        score = partial(self._evidence_at, coordinates)
        value, place = max(((score(own), own) for own in seen), key=lambda pair: pair[0])
        level = partial(self.representation.fine, _LAST_FACTOR, returned=True)
        options = {"rounds": 1, "iterations": _LAST_ITERATIONS}
        for _ in range(_LAST_ROUNDS):
            coordinates.set(place)
            last = Search(coordinates)
            self._follow(last, "last", _LAST_FACTOR, level, **options)
            beyond = coordinates.get()
            reached = score(beyond)
            if not reached > value + _NATS:
                break
            value, place = reached, beyond
            if last.settled:
                break
        coordinates.set(place)
        self._warn_of_what_is_cut()

    @torch.no_grad()
    def _evidence_at(self, coordinates: Coordinates, place: Float[np.ndarray, "k"]) -> float:
        """On the grid that predictions would be made from there, what it cuts being returned."""
        coordinates.set(place)
        try:
            return self.trainer.evidence(self.representation.now()).item()
        except (ValueError, torch.linalg.LinAlgError):  # no grid within the budget, no covariance
            return -math.inf

    def _warn_of_what_is_cut(self) -> None:
        share = max(self.representation.cuts().values())
        if share > _MUCH:
            text = (
                f"what the grid cuts is {share:.2g} times the noise variance: the error bars hold "
                "it, and a larger max_features= of the frequencies would narrow them"
            )
            self.trainer.note(text)
            warnings.warn(text, GridWarning, stacklevel=2)
