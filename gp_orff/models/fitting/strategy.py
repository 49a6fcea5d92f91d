"""The strategy of a fit: starting values, then searches on finer and finer representations."""

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
from gp_orff.data.tracks.surveyed import blocks_in_words, sampled
from gp_orff.features.assemble import expand, num_features
from gp_orff.features.frequencies.grid import Grid, GridBudgetError
from gp_orff.features.frequencies.lattice_nodes import GridWarning
from gp_orff.features.frequencies.rule import Rule
from gp_orff.inference.conditioning import FeatureInference, has_covariance
from gp_orff.inference.conditioning.few_sites import MUCH_TRUNCATED
from gp_orff.inference.conditioning.left_out_points import warn_of_left_out, without_far_points
from gp_orff.inference.representation import COARSE_FACTOR, FINE_FACTOR, Representation
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.history import History, Journal
from gp_orff.models.fitting.progress import Progress
from gp_orff.models.fitting.ranges import check_extents
from gp_orff.models.fitting.robust_em import RobustEM
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import scale_noise
from gp_orff.models.fitting.trainer import (
    MOST_SEARCHED,
    SUBSET_VALUES,
    SUBSETS,
    Trainer,
    best_start,
)
from gp_orff.models.report.names import parameter_names

_FEW_VALUES = 200  # numbers: with fewer, a constant mean is hard to tell from a smooth field
_MANY = 1.3  # times as many numbers as of a subset, for a first search on that
_CUBIC, _FEWEST, _MOST = 40.0, 2, 60  # iterations with 1000 numbers or 2000 features, and limits
_FEW_ROUNDS = 2  # on waves of other wavevectors, each of which takes a pass over the data
_FEW_ITERATIONS = 6  # the least on a grid
_LAST_FACTOR, _LAST_ROUNDS, _LAST_ITERATIONS = 1.05, 4, 8
_NATS = 0.1  # in total, that another last grid has to gain
MANY_POINTS = 100_000  # a visit of more takes longer than an evaluation
_COARSE_BLOCKS, _FINE_BLOCKS = 2000, 5000  # of the tracks of a group in searches, about
_MOST_BLOCKS = 20_000  # in last iterations on all
_ROUGH, _TOO_ROUGH = 0.3, 1.0  # truncated variance at first and after searches on grids, as below
_LITTLE = 0.01  # truncated variance of a grid, over the noise variance


@dataclass(frozen=True)
class Fitted:
    """The result of a fit, beside the hyperparameters that it has set."""

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
    check_extents(kernel, data.survey.distances)
    data, notes = without_far_points(data, requested)
    journal = Journal(progress, [*notes, blocks_in_words(data.tracks)])
    trainer = Trainer(kernel, likelihoods, mean, data.survey, journal, data.tracks)
    robust, start_search = RobustEM(trainer), Trainer.new_search if warm_start else best_start
    has_weights = isinstance(data, Dataset) and bool(robust.e_step.heavy_tailed)
    if has_weights:
        data, start_search = robust.start(data, warm_start), Trainer.new_search
    search = trainer.restarted(start_search(trainer))
    representation = Representation.of(kernel, likelihoods, requested, data)
    journal.note(representation.reason)
    rule = representation.rule
    if rule is None:
        trainer = ExactKernel(trainer, data).run(search)
    elif representation.follows:
        representation = Grids(trainer, representation).run(search).mended
        journal.note("" if representation.follows else representation.reason)
        trainer.warn_of_truncation(representation)
        warn_of_left_out(data, representation.data)
    else:
        name = "given grid" if isinstance(rule, Grid) else repr(rule)
        search_on_features(trainer, search, representation, name)
    for text in search.coordinates.reached(parameter_names(kernel, likelihoods)):
        journal.note(text)
    trainer.warn_of_few_numbers(data, len(search.coordinates.get()))
    if has_weights:
        representation = RobustEM(trainer).run(representation)
    history = History("fitted", tuple(journal.stages)).with_notes(journal.notes)
    return Fitted(representation, trainer.mean, history)


@dataclass(frozen=True)
class ExactKernel:
    """Searches under the exact kernel."""

    trainer: Trainer
    data: Dataset

    def run(self, search: Search) -> Trainer:
        """Search, and with few data choose between a constant mean and zero by the BIC
        (Schwarz 1978); the trainer with that mean."""
        trainer, data = self.trainer, self.data
        self._search(search, "exact kernel")
        if trainer.mean is not None or data.num_values > _FEW_VALUES:
            return trainer
        u, device = search.coordinates.get(), next(trainer.kernel.parameters()).device
        mean = torch.zeros(trainer.num_outputs).to(device, torch.float64)
        zero = replace(trainer, mean=mean)
        name = "exact kernel, zero mean"
        zero_search = replace(self, trainer=zero)._search(zero.new_search(), name)
        gain = (search.value - zero_search.value) * data.num_values
        penalty = 0.5 * trainer.num_outputs * math.log(data.survey.num_points)
        better = gain > penalty
        if better:
            search.coordinates.set(u)
        trainer.journal.note(
            f"mean: {'constant' if better else 'zero'}; a constant mean changes the log evidence "
            f"by {gain:+.2f} nats, its BIC penalty is {penalty:.2f} nats"
        )
        return trainer if better else zero

    def _search(self, search: Search, name: str) -> Search:
        """Search on all data, on subsets first if they are many: the cost is cubic in N."""
        trainer = self.trainer
        inference = trainer.exact_inference(self.data)
        search_on_subsets(trainer, search, inference.size)
        if inference.size > MOST_SEARCHED:
            return search
        inference = trainer.exact_inference(self.data)  # the sites at the present lengthscales
        nats = 0.1 if inference.size > SUBSET_VALUES else 0.01
        iterations = int(min(max(_CUBIC * (1000 / inference.size) ** 3, _FEWEST), _MOST))
        return trainer.search(search, inference, name, iterations=iterations, nats=nats)


def search_on_subsets(trainer: Trainer, search: Search, size: float) -> None:
    """Search under the exact kernel on growing subsets of data with `size` numbers."""
    for numbers in SUBSETS:
        if size > _MANY * numbers:
            inference = trainer.exact_inference(trainer.subset(numbers))
            label = f"exact kernel, {inference.data.survey.num_points} points"
            iterations = int(min(_CUBIC * (1000 / numbers) ** 3 + _FEW_ITERATIONS, _MOST))
            trainer.search(search, inference, label, nats=0.1, iterations=iterations)


@torch.no_grad()
def _dense_features(trainer: Trainer, inference: FeatureInference, data: Data) -> float:
    """The features of a full matrix that costs as much: fewer than there are for separable kernels,
    whose matrix has a factor for each output."""
    return expand(trainer.kernel, inference.draws, len(data.survey.box)).cholesky_cost ** (1 / 3)


def search_on_features(
    trainer: Trainer, search: Search, representation: Representation, name: str
) -> None:
    """Search on the frequencies of a rule; where an evaluation takes seconds, under the exact
    kernel on subsets first, and for few iterations."""
    inference, data = representation.inference(representation.rule), representation.data
    features, iterations = _dense_features(trainer, inference, data), _MOST
    slow = min(features, data.num_values) > MOST_SEARCHED
    if slow and isinstance(data, Dataset) and has_covariance(trainer.kernel, data):
        search_on_subsets(trainer, search, data.num_values)
        iterations = int(max(_CUBIC * (2000 / features) ** 3, _FEWEST))
    trainer.search(search, inference, name, iterations=iterations)


@dataclass(frozen=True)
class Grids:
    """Searches on narrow grids, rebuilt as the lengthscales move."""

    trainer: Trainer
    representation: Representation

    def run(self, search: Search) -> Representation:
        """Search, on a sample of the blocks of tracks if they are many; the representation of all.

        With n of M numbers and k hyperparameters a sample loses about k M / 2n nats, which two
        iterations on all blocks regain.
        """
        whole = self.representation
        few = replace(whole, data=sampled(whole.data, _FINE_BLOCKS))
        representation = replace(replace(self, representation=few)._run(search), data=whole.data)
        if few.data is whole.data or representation.rule is None:
            return representation
        count, every = (sum(len(p.y) for p in d.tracks) for d in (few.data, whole.data))
        self.trainer.journal.note(f"searched on {count} of {every} blocks of tracks")
        if every <= _MOST_BLOCKS:
            options = {"rounds": 1, "iterations": 2}
            self._follow(search, "all blocks, fine", FINE_FACTOR, whole, whole.fine, **options)
        return representation

    def _run(self, search: Search) -> Representation:
        """Search on coarse grids, then on fine ones, then on last ones if much is truncated; the
        representation, with statistics that were computed.

        Many data are visited once: the coarse grids are those of a sample, and the statistics of
        one pass serve the fine ones. Where no grid of a search is accurate, a subset of the data
        under the exact kernel takes its place; so it does where sources are near the readings,
        whose grids of few features tell nothing.
        """
        representation, many = self.representation, self._has_many_points
        if not representation.on_lattice and has_covariance(
            self.trainer.kernel, representation.data
        ):
            search_on_subsets(self.trainer, search, representation.data.num_values)
            if representation.mended.rule is None:
                return representation
            level = partial(representation.fine, returned=True)
            options = {"rounds": 1, "iterations": _LAST_ITERATIONS}
            self._follow(search, "fine", FINE_FACTOR, representation, level, **options)
            return representation
        if self._exceeds(_ROUGH):
            search_on_subsets(self.trainer, search, representation.data.num_values)
            return representation
        few = self._of_sample if many else representation
        few = replace(few, data=sampled(few.data, _COARSE_BLOCKS))
        visited = [search.coordinates.get()]
        rounds = 8 if representation.on_lattice else _FEW_ROUNDS
        self._follow(search, "coarse", COARSE_FACTOR, few, few.coarse, rounds=rounds)
        visited.append(search.coordinates.get())
        if not many and (exact := representation.again).rule is None:
            ExactKernel(self.trainer, representation.data).run(search)
            return exact
        if many:
            label = f"statistics of {self.trainer.survey.num_points} points"
            with self.trainer.journal.stage(label):
                representation = self._keeping()
        level = representation.fine
        self._follow(search, "fine", FINE_FACTOR, representation, level, rounds=rounds)
        visited.append(search.coordinates.get())
        if self._exceeds(_TOO_ROUGH):
            search_on_subsets(self.trainer, search, representation.data.num_values)
            return representation
        ratios = representation.training_cuts()  # truncated variance over noise variance
        for label, likelihood in self.trainer.likelihoods.items():
            ratio = min((r for key, r in ratios.items() if key.label == label), default=0.0)
            if ratio > _LITTLE:  # the learned noise contains it; the posterior adds it to the field
                scale_noise(likelihood, max(1 - ratio, 0.5))
        if max(ratios.values()) > MUCH_TRUNCATED and representation.rule.max_features:
            visited.append(search.coordinates.get())
            last = replace(self, representation=representation)
            last._search_with_truncated_variance(search.coordinates, visited)
        return representation

    def _exceeds(self, most: float) -> bool:
        """Whether the grids of searches truncate more than so much of the noise variance, and the
        exact kernel is an alternative."""
        representation = self.representation
        if representation.rule.max_features or not isinstance(representation.data, Dataset):
            return False  # the grid that the user asked for, or that of the statistics
        if not representation.on_lattice:  # sources that features cannot hold act as noise
            return False
        if not has_covariance(representation.kernel, representation.data):
            return False
        return max(representation.training_cuts().values()) > most

    @property
    def _has_many_points(self) -> bool:
        data = self.representation.data
        several = isinstance(data, Dataset) and not data.tracks
        return several and data.survey.num_points > MANY_POINTS

    @property
    def _of_sample(self) -> Representation:
        """The representation of a sample of the data."""
        return replace(self.representation, data=Dataset.in_memory(self.trainer.survey.sample))

    def _keeping(self) -> Representation:
        """The representation with statistics that serve further grids, where a lattice does."""
        if not self.representation.on_lattice:
            return self.representation
        try:
            return self.representation.keeping()
        except GridBudgetError as error:
            self.trainer.journal.note(f"no wide grid was built: {error}")
            return self.representation

    def _follow(
        self,
        search: Search,
        name: str,
        trust_factor: float,
        representation: Representation,
        level: Callable[[], Grid],
        rounds: int = 8,
        iterations: int = 60,
    ) -> None:
        """Search on one grid after another, until no lengthscale reaches the edge of its range."""
        for _ in range(rounds):
            try:
                inference = representation.inference(level())
            except GridBudgetError as error:
                self.trainer.journal.note(f"no {name} grid was built: {error}")
                return
            features = num_features(self.trainer.kernel, inference.draws)
            label = f"{name} grid, {features} features"
            affordable = int(max(_CUBIC * (2000 / features) ** 3, _FEW_ITERATIONS))
            options = {"trust_factor": trust_factor, "iterations": min(iterations, affordable)}
            with warnings.catch_warnings():  # the next grid is made for where the search has gone
                warnings.filterwarnings("ignore", ".*call redraw", GridWarning)
                self.trainer.search(search, inference, label, **options)
            if search.settled:
                return

    def _search_with_truncated_variance(
        self, coordinates: Coordinates, visited: list[Float[np.ndarray, "k"]]
    ) -> None:
        """Where `max_features` truncates much, search on with the truncated variance in the model,
        from the best of `visited` as long as the evidence grows, and keep the best coordinates."""
        score = partial(self._evidence_at, coordinates)
        best, best_u = max(((score(u), u) for u in visited), key=lambda pair: pair[0])
        level = partial(self.representation.fine, _LAST_FACTOR, returned=True)
        options = {"rounds": 1, "iterations": _LAST_ITERATIONS}
        for _ in range(_LAST_ROUNDS):
            coordinates.set(best_u)
            search = Search(coordinates)
            self._follow(search, "last", _LAST_FACTOR, self.representation, level, **options)
            u = coordinates.get()
            value = score(u)
            if not value > best + _NATS:
                break
            best, best_u = value, u
            if search.settled:
                break
        coordinates.set(best_u)

    @torch.no_grad()
    def _evidence_at(self, coordinates: Coordinates, u: Float[np.ndarray, "k"]) -> float:
        """log p(y) at u on the grid that predictions use, with its truncated variance in the model;
        −∞ where that fails."""
        coordinates.set(u)
        try:
            return self.trainer.evidence(self.representation.now()).item()
        except (ValueError, torch.linalg.LinAlgError):  # no grid within max_features, no covariance
            return -math.inf
