"""Where searches start, and searches on exact kernels, on features and on grids."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import join
from gp_orff.data.survey import warn_of_far_points
from gp_orff.data.track_reading import sampled
from gp_orff.features.assemble import expand, num_features
from gp_orff.features.draws import GridWarning
from gp_orff.features.expansion import Expansion
from gp_orff.features.grid import Auto, Grid
from gp_orff.features.grid_design import GridBudgetError
from gp_orff.fitting.noise import Split, finalists, split_noise, splits
from gp_orff.fitting.robust_em import RobustEM
from gp_orff.fitting.search import Coordinates, Search
from gp_orff.fitting.starting_values import Start, scale_noise, start, starts
from gp_orff.fitting.trainer import (
    MANY_VALUES,
    MOST_SEARCHED,
    SCREENED_VALUES,
    SUBSET_VALUES,
    SUBSETS,
    Trainer,
)
from gp_orff.inference.exact import has_covariance
from gp_orff.inference.features import FeatureInference
from gp_orff.inference.representation import (
    COARSE_FACTOR,
    FINE_FACTOR,
    MUCH_TRUNCATED,
    Representation,
)
from gp_orff.kernels.learned import (
    LearnedSpectrumKernel,
    continue_curves,
    has_learned_spectrum,
    held_curves,
)
from gp_orff.kernels.tree import spectra_of, terms

# Searches under the exact kernel, of all data or of subsets.


_BEYOND = 1.3  # times as many numbers as of a subset, for a search on that
_NATS_OF_A_STEP = 0.5  # that a step has to gain: the prior of curves is wider
_RAISE, _RAISES = 1.3, 8  # factor of the noise variance that subsets tell, and how often at most


@dataclass(frozen=True)
class ExactKernel:
    """Searches under the exact kernel."""

    trainer: Trainer
    data: Dataset

    def run(self, search: Search) -> Search:
        """Search on all data, on subsets first if they are many: the cost is cubic in N."""
        trainer = self.trainer
        inference = trainer.exact_inference(self.data)
        search_on_subsets(trainer, search, inference.size)
        if inference.size > MOST_SEARCHED:
            self.raise_noise(search)
            return search
        inference = trainer.exact_inference(self.data)  # the sites at the present lengthscales
        nats = 0.01
        if inference.size > SUBSET_VALUES:
            nats = _NATS_OF_A_STEP if has_learned_spectrum(trainer.kernel, trained=True) else 0.1
        return trainer.search(search, inference, "exact kernel", nats=nats)

    def raise_noise(self, search: Search) -> None:
        """Multiply the noise that subsets tell, as long as this makes all data likelier: readings
        of a line differ by less from each other than from those of lines that cross it, which few
        readings hardly show."""
        trainer, coordinates = self.trainer, search.coordinates
        inference = trainer.exact_inference(self.data)

        @torch.no_grad()
        def value() -> float:
            found = trainer.value(inference) + float(coordinates.log_prior())
            stage.count(found / inference.num_values)
            return found

        with trainer.journal.stage("exact kernel, noise") as stage:
            best, u = value(), coordinates.get()
            for _ in range(_RAISES):
                for likelihood in trainer.likelihoods.values():
                    scale_noise(likelihood, _RAISE)
                if not (raised := value()) > best:
                    break
                best, u = raised, coordinates.get()
            coordinates.set(u)
            stage.nats_per_number = best / inference.num_values


def search_on_subsets(
    trainer: Trainer, search: Search, size: float, until: Callable[[], bool] = lambda: False
) -> None:
    """Search under the exact kernel on growing subsets of data with `size` numbers, until what is
    asked after each of them holds."""
    held = has_learned_spectrum(trainer.kernel, trained=True) and trainer.has_many  # curves
    for numbers in (SUBSET_VALUES, *SUBSETS) if held else SUBSETS:
        if size > _BEYOND * numbers:
            inference = trainer.exact_inference(trainer.subset(numbers))
            label = f"exact kernel, {inference.data.survey.num_points} points"
            trainer.search(search, inference, label, nats=0.1)
            if until():
                return


# Searches on the frequencies of a rule.


_OPERATIONS = 5e11  # of a search whose evaluations take seconds: 20 s or so on one core
_FEWEST, _MOST = 2, 60  # evaluations


def search_on_features(
    trainer: Trainer, search: Search, representation: Representation, name: str
) -> None:
    """Search on the frequencies of a rule; where an evaluation takes seconds, under the exact
    kernel on subsets first, and for few evaluations or none. Few features are searched on to the
    end, unless no one asked for them and their sums over many points take too long."""
    inference, data = representation.inference(representation.rule), representation.data
    with torch.no_grad():
        expansion = expand(trainer.kernel, inference.draws, data.num_inputs)
    features = expansion.cholesky_cost ** (1 / 3)  # fewer than there are, of separable kernels
    evaluations = min(int(_OPERATIONS / _operations(inference, expansion)), _MOST)
    given = not isinstance(representation.requested, Auto)
    if min(features, data.num_values) <= MOST_SEARCHED and (given or evaluations >= _FEWEST):
        trainer.search(search, inference, name)
        return
    on_subsets = isinstance(data, Dataset) and has_covariance(trainer.kernel, data)
    if on_subsets:
        search_on_subsets(trainer, search, data.num_values)
    if evaluations >= _FEWEST or not on_subsets:
        trainer.search(search, inference, name, evaluations=max(evaluations, _FEWEST))


def _operations(inference: FeatureInference, expansion: Expansion) -> float:
    """About the floating-point operations of an evaluation with its gradient."""
    moving = inference.draws[0].shared_columns() is None  # sums over the data are made anew
    points = inference.data.survey.num_points if moving else 0
    return 6.0 * points * expansion.num_columns**2 + expansion.cholesky_cost


# Where searches begin: the best of many starting values, on subsets of the data.


_FINALISTS, _FEW = 3, 1  # starting values that are searched from on more data
_JUDGED = 1200  # numbers in two dense parts of the data
_NATS_OF_A_START = 2.0  # for each output: what two parts do not show of long lengthscales


def best_start(trainer: Trainer) -> Search:
    """A search that starts at the hyperparameters of largest evidence of a subset: short searches
    on a small subset, from the best starting values of each lengthscale; the best three again on a
    larger one, and the best of these to the end. Many data are also searched in a dense part."""
    warn_of_far_points(trainer.distances)
    continue_curves(trainer.kernel, False)
    spread = trainer.starting_subset(SUBSET_VALUES)
    many = trainer.has_many
    held = held_curves(trainer.kernel) if many else nullcontext()
    with held, trainer.journal.stage(f"starting values, {spread.survey.num_points} points"):
        search = _screened_search(trainer, spread)
        if not many:
            return search
        search = _over_short_distances(trainer, search)
    if not has_learned_spectrum(trainer.kernel, trained=True):
        return search
    _centre_spectra(trainer.kernel)
    return trainer.new_search()


def _centre_spectra(kernel: Kernel) -> None:
    """Divide the lengths of learned spectra of fields such that those with most of the variance of
    the field are in the middle of the curve, and give it the slope that leaves the kernel as it is:
    variance ∝ π λ^{−2t}, for B(ω) of degree t."""
    for term in terms(kernel):
        for leaf in term.leaves[:1]:
            own = leaf.kernel
            if isinstance(own, LearnedSpectrumKernel) and own.shape.requires_grad:
                own.centre(order=term.factor.degree)


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
    for search, u in finalists(candidates, _FEW if searched_again else _FINALISTS):
        search.coordinates.set(u)
        reached.append(trainer.short_search(search, large, name))
    search, u = max(reached, key=lambda pair: pair[0].value)
    search.coordinates.set(u)
    return trainer.search(search, large, name, nats=0.1)


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
        return other
    search.coordinates.set(u)
    return search


# Searches on the readings that are kept of many, where waves cannot hold shallow sources.


def learned_from_kept(
    trainer: Trainer, kept: Representation, whole: Representation
) -> tuple[Trainer, Representation]:
    """Learn again, from the readings that are kept of many: neighbours along a line tell of the
    noise along it, which is less than what readings of several lines differ by. Under that noise
    the means of all readings may do; the representation that does, with the trainer of the kept."""
    trainer = replace(trainer, survey=kept.data.survey)
    robust = RobustEM(trainer)
    if robust.e_step.heavy_tailed:
        return trainer, replace(kept, data=robust.start(kept.data, warm_start=False))
    ExactKernel(trainer, kept.data).run(best_start(trainer))
    return trainer, again if (again := whole.mended).rule is None else kept


# Curves of learned spectra where a frequency grid does not resolve them.


@torch.no_grad()
def extrapolate_curves(kernel: Kernel, inference: FeatureInference) -> None:
    """Continue the trained curves of learned spectra in a line from where a grid ends.

    Of shorter lengths, most of whose variance is beyond the grid, a search on it tells nothing, and
    their prior next to nothing. Curves that share a lengthscale end where the grid of the widest
    term does.
    """
    found = list(_resolved(kernel, inference))
    for own, _ in found:
        shared = [length for other, length in found if other.raw_lengthscale is own.raw_lengthscale]
        own.extrapolate(min(shared))


def _resolved(
    kernel: Kernel, inference: FeatureInference
) -> Iterator[tuple[LearnedSpectrumKernel, float]]:
    """Each spectrum whose curve is trained, and the length λ whose variance of the field is largest
    at the edge of the grid: ω^{d+2t} e^{−(ωℓλ)²/2} at ωℓλ = √(d + 2t)."""
    for term, draw in zip(terms(kernel), inference.draws, strict=True):
        spectra = spectra_of(term)
        parts = zip(term.leaves, spectra, draw.nodes(spectra)[0], strict=True)
        for number, (leaf, spectrum, omega) in enumerate(parts):
            if isinstance(leaf.kernel, LearnedSpectrumKernel) and leaf.kernel.shape.requires_grad:
                order = 0 if number else term.factor.degree
                edge = spectrum.scaled_radius(omega.cpu().numpy()).max()
                yield leaf.kernel, math.sqrt(omega.shape[-1] + 2 * order) / float(edge)


# Searches on grids, rebuilt as the lengthscales move.


_CUBIC = 40.0  # iterations with 2000 features
_CURVE_ROUNDS = 4  # of curves on few features
_ROUNDS, _FEW_ROUNDS = 8, 2  # few on waves of other wavevectors, which take a pass over the data
_FEW_ITERATIONS, _EACH = 6, 1.5  # the least on grids; evaluations of each iteration, about
_NATS_OF_CURVES, _PART_OF_CURVES = (
    1.0,
    1e-6,
)  # as `_NATS_OF_A_GRID` for learned spectra, and each number's
_ROUND_OF_CURVES = 10.0  # times these: what a grid has to gain for another
_FEW_FEATURES = 1536  # on which spectra are learned, before more are used where these lack some
_LAST_FACTOR, _LAST_ROUNDS, _LAST = 1.05, 4, {"rounds": 1, "iterations": 8}
_NATS_OF_A_GRID = 0.1  # in total, that another last grid has to gain
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
            if not value > best + _NATS_OF_A_GRID:
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
