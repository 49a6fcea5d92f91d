"""Searches on grids, rebuilt as the lengthscales move."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float

from gp_orff.data.dataset import Dataset
from gp_orff.data.tracks.surveyed import sampled
from gp_orff.features.assemble import num_features
from gp_orff.features.frequencies.grid import Grid, GridBudgetError
from gp_orff.features.frequencies.lattice_nodes import GridWarning
from gp_orff.inference.conditioning import has_covariance
from gp_orff.inference.conditioning.few_sites import MUCH_TRUNCATED
from gp_orff.inference.representation import COARSE_FACTOR, FINE_FACTOR, Representation
from gp_orff.kernels.learned_spectrum import continue_curves, has_learned_spectrum
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.searches.exact import ExactKernel, search_on_subsets
from gp_orff.models.fitting.searches.unresolved import extrapolate_curves
from gp_orff.models.fitting.starting_values import scale_noise
from gp_orff.models.fitting.trainer import Trainer

_CUBIC = 40.0  # iterations with 2000 features
_CURVE_ROUNDS = 4  # of curves on few features
_ROUNDS, _FEW_ROUNDS = 8, 2  # few on waves of other wavevectors, which take a pass over the data
_FEW_ITERATIONS, _EACH = 6, 1.5  # the least on grids; evaluations of each iteration, about
_NATS_OF_CURVES, _PART_OF_CURVES = 1.0, 1e-6  # as `_NATS` for learned spectra, and each number's
_ROUND_OF_CURVES = 10.0  # times these: what a grid has to gain for another
_FEW_FEATURES = 1536  # on which spectra are learned, before more are used where these lack some
_LAST_FACTOR, _LAST_ROUNDS, _LAST = 1.05, 4, {"rounds": 1, "iterations": 8}
_NATS = 0.1  # in total, that another last grid has to gain
MANY_POINTS = 100_000  # a visit of more takes longer than an evaluation
_COARSE_BLOCKS, _FINE_BLOCKS = 2000, 5000  # of the tracks of a group in searches, about
_MOST_BLOCKS = 20_000  # in last iterations on all
_ROUGH, _TOO_ROUGH = 0.3, 1.0  # truncated variance at first and after searches on grids, as below
_LITTLE = 0.01  # truncated variance of a grid, over the noise variance


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
        one pass serve the fine ones. Where no grid of a search is accurate, or few features tell
        nothing of sources near the readings, subsets under the exact kernel take its place.
        """
        representation, data = self.representation, self.representation.data
        many = self._has_many_points
        if not representation.on_lattice and has_covariance(self.trainer.kernel, data):
            search_on_subsets(self.trainer, search, data.num_values)
            if representation.mended.rule is None:
                return representation
            level = partial(representation.fine, returned=True)
            self._follow(search, "fine", FINE_FACTOR, representation, level, **_LAST)
            return representation
        if self._exceeds(_ROUGH):  # where the search begins; lengthscales grow on more data
            search_on_subsets(self.trainer, search, data.num_values, self._serve)
            if not self._serve():
                return representation
        few = self._of_sample if many else representation
        few = replace(few, data=sampled(few.data, _COARSE_BLOCKS))
        visited = [search.coordinates.get()]
        many_rounds = representation.on_lattice and not self._learns_spectrum
        rounds = _ROUNDS if many_rounds else _FEW_ROUNDS
        options = {"rounds": rounds, "lost": partial(self._exceeds, _TOO_ROUGH)}
        self._follow(search, "coarse", COARSE_FACTOR, few, few.coarse, **options)
        visited.append(search.coordinates.get())
        if not many and (exact := representation.again).rule is None:
            ExactKernel(self.trainer, representation.data).run(search)
            return exact
        if self._exceeds(_TOO_ROUGH):  # the noise took up the field, which coarse grids do not hold
            search.coordinates.set(visited[0])
            search_on_subsets(self.trainer, search, data.num_values)
            return representation
        if many:
            label = f"statistics of {self.trainer.survey.num_points} points"
            with self.trainer.journal.stage(label):
                representation = self._keeping()
        if self._learns_spectrum:
            self._learn_curves(search, representation)
        else:
            parts = representation, representation.fine
            self._follow(search, "fine", FINE_FACTOR, *parts, rounds=rounds)
        visited.append(search.coordinates.get())
        if self._exceeds(_TOO_ROUGH):
            continue_curves(self.trainer.kernel, False)
            search_on_subsets(self.trainer, search, data.num_values)
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

    @property
    def _learns_spectrum(self) -> bool:
        return has_learned_spectrum(self.trainer.kernel, trained=True)

    def _learn_curves(self, search: Search, representation: Representation) -> None:
        """Search for learned spectra on fine grids of few features first: what coarse grids tell of
        short waves, which large grids hold, is little. At last with curves that go on beyond their
        knots, which a search for where the curves are would take for them: a power law has no
        scale."""
        few = partial(representation.fine, most=_FEW_FEATURES)
        self._follow(search, "fine", FINE_FACTOR, representation, few, rounds=_CURVE_ROUNDS)
        self._extrapolate(representation, few())
        continue_curves(self.trainer.kernel)
        parts = representation, representation.fine
        self._follow(search, "fine", FINE_FACTOR, *parts, rounds=_FEW_ROUNDS)
        self._extrapolate(representation, representation.fine())

    def _extrapolate(self, representation: Representation, grid: Grid) -> None:
        """Curves in a line beyond the edge of the grid that they were learned on."""
        try:
            extrapolate_curves(self.trainer.kernel, representation.inference(grid))
        except GridBudgetError as error:
            self.trainer.journal.note(f"curves are not extrapolated: {error}")

    def _serve(self) -> bool:
        """Whether grids are accurate enough to search on, at the present lengthscales."""
        return not self._exceeds(_ROUGH)

    def _exceeds(self, most: float) -> bool:
        """Whether the grids of searches truncate more than so much of the noise variance, and the
        exact kernel is an alternative."""
        representation, data = self.representation, self.representation.data
        if representation.rule.max_features or not isinstance(data, Dataset):
            return False  # the grid that the user asked for, or that of the statistics
        if not (representation.on_lattice and has_covariance(representation.kernel, data)):
            return False  # sources that features cannot hold act as noise
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
        rounds: int = _ROUNDS,
        iterations: int = 60,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Search on one grid after another, until no lengthscale reaches the edge of its range,
        flat curves gain nothing, the evaluations that grids of so many features may take are used,
        or the search is `lost`."""
        used, least = 0.0, 0.0  # of the evaluations; gain of a round
        for _ in range(rounds):
            if used >= 1:
                return
            try:
                inference = representation.inference(level())
            except GridBudgetError as error:
                self.trainer.journal.note(f"no {name} grid was built: {error}")
                return
            features = num_features(self.trainer.kernel, inference.draws)
            label = f"{name} grid, {features} features"
            affordable = _EACH * max(_CUBIC * (2000 / features) ** 3, _FEW_ITERATIONS)
            options = {"trust_factor": trust_factor, "iterations": iterations}
            if self._learns_spectrum:
                options["nats"] = max(_NATS_OF_CURVES, _PART_OF_CURVES * inference.num_values)
                least = _ROUND_OF_CURVES * options["nats"]
            options["evaluations"], before = math.ceil((1 - used) * affordable), search.evaluations
            with warnings.catch_warnings():  # the next grid is made for where the search has gone
                warnings.filterwarnings("ignore", ".*call redraw", GridWarning)
                self.trainer.search(search, inference, label, **options)
            used += (search.evaluations - before) / affordable
            if search.settled or lost() or search.gained < least:
                return

    def _search_with_truncated_variance(
        self, coordinates: Coordinates, visited: list[Float[np.ndarray, "k"]]
    ) -> None:
        """Where `max_features` truncates much, search on with the truncated variance in the model,
        from the best of `visited` as long as the evidence grows, and keep the best coordinates."""
        score = partial(self._evidence_at, coordinates)
        best, best_u = max(((score(u), u) for u in visited), key=lambda pair: pair[0])
        level = partial(self.representation.fine, _LAST_FACTOR, returned=True)
        for _ in range(_LAST_ROUNDS):
            coordinates.set(best_u)
            search = Search(coordinates)
            self._follow(search, "last", _LAST_FACTOR, self.representation, level, **_LAST)
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
