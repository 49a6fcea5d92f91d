"""How a model is fitted: starting values, then searches on better and better representations."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, HeldData, HeldSums
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.noise.covariances import noises_of
from gp_orff.data.noise.likelihoods import MultitaskStudentTLikelihood
from gp_orff.data.observations import join
from gp_orff.data.patterns import GroupKey
from gp_orff.data.survey import DataWarning, Distances, warn_of_far_points
from gp_orff.features.assemble import draw, expand, laws
from gp_orff.features.domain import Box
from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.grid import MOST_FEATURES, Grid, GridBudgetError
from gp_orff.features.frequencies.grid_design import lengthscales
from gp_orff.features.frequencies.lattice_nodes import GridWarning
from gp_orff.features.frequencies.random import QuasiMonteCarlo
from gp_orff.features.frequencies.rule import Draw, Rule
from gp_orff.inference.conditioning import (
    ExactInference,
    FeatureInference,
    Inference,
    Posterior,
    log_marginal_likelihood,
)
from gp_orff.inference.robust import StudentT, bound_of, climb, reweigh
from gp_orff.kernels.closed_form import at_zero
from gp_orff.kernels.tree import terms
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.ranges import parameter_ranges
from gp_orff.models.fitting.search import Search
from gp_orff.models.fitting.starting_values import scale_noise, start, starts, subset
from gp_orff.models.threads import again

_FEW_VALUES = 200  # numbers that do not tell a constant from a field that varies slowly
_SCREENED_VALUES, _SHORT, _FINALISTS = 200, 4, 3  # numbers, iterations and survivors of starts
_SUBSET_VALUES = 600  # numbers whose exact evidence gives the starting values
_SOME_VALUES, _MANY = 1200, 1.3  # numbers of a search before that with many times as many
_CUBIC, _FEWEST, _MOST = 40.0, 2, 60  # iterations with 1000 numbers or 2000 features; bounds
_FEW_ITERATIONS = 6  # on a grid of many features
_COARSE_TOLERANCE, _COARSE_FEATURES, _COARSE_REACH = 1e-2, 2000, 1.4
_FINE_REACH, _LAST_REACH, _LAST_ROUNDS, _LAST_ITERATIONS = 1.2, 1.05, 4, 8
_NATS = 0.1  # in total, that a last grid has to gain
_FEW_FEATURES = 1000  # that cost next to nothing
_SIGNAL_TO_NOISE = 1e3  # of variances: where a tolerance is used as it is
_SCARCE = 10.0  # a tolerance that many times what was asked for
_LITTLE, _MUCH = 0.01, 0.1  # of the noise's variance, that a grid has cut
_SERVED, _WIDER = (0.7, 1.4), 4  # lengthscales and budget of statistics that replace the data
_STEP = 4.0  # between tolerances
_ROUND = 1e-5  # nats per number, a round of EM that gains less ends it
_FEW_ROUNDS, _MOST_ROUNDS = 6, 100  # of EM, to choose a start and to the end
_NEARLY, _SETTLED = 1e-3, 1e-9  # nats per number, that weights gain when they have settled
_SHARE_OF_POSTERIOR = 0.01  # of the posterior variance, that a grid may leave out


def silent(**facts) -> None:
    """No progress."""


@dataclass
class Fit:
    """One fit of a kernel and the noise of every instrument to residuals."""

    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None  # a fixed constant mean; None for the best one
    rule: Rule
    data: Data
    progress: Callable[..., None] = silent
    notes: list[str] = field(default_factory=list)
    choice: Rule | None = None
    _chosen: bool = False
    conditioned_by: Rule | None = None
    _informed: tuple | None = None  # for which box and kernel the last number of features was

    def run(self, warm_start: bool) -> None:
        """Set the hyperparameters to those of largest evidence."""
        self.set_far_points_aside()
        robust = isinstance(self.data, HeldData) and bool(self.tails)
        if robust:
            self._start_robustly(warm_start)
            warm_start = True
        self._run(warm_start)
        if robust:
            self._reweigh()

    def _run(self, warm_start: bool) -> None:
        begin = self._continue if warm_start else self._start
        search = begin()
        rule = None if self._small else self._rule()
        if rule is None:
            self._on_exact_kernel(search, begin)
        elif isinstance(rule, Grid):
            self._on_grids(rule, search)
        else:
            observations = FeatureInference(self.data, self._draw(rule))
            self._search(search, observations, repr(rule))
        for text in search.coordinates.reached():
            self._note(text)

    def set_far_points_aside(self) -> None:
        """A few points far from all others would take up all the frequencies of a grid."""
        near = self._distances.near
        if near is None or not isinstance(self.data, HeldData) or not self._spans_the_data:
            return
        before = self.data.survey.num_points
        self.data = self.data.within(near)
        text = (
            f"{before - self.data.survey.num_points} points far from all others are left out: no "
            "frequency grid serves both; drop them if they are errors, or fit them apart"
        )
        self._note(text)
        warnings.warn(text, DataWarning, stacklevel=2)

    @property
    def _spans_the_data(self) -> bool:
        """Whether there will be a grid whose domain follows from the data."""
        rule = self.rule
        if isinstance(rule, Auto):
            return rule.domain is None and self.data.num_values > rule.max_features
        return isinstance(rule, Grid) and rule.domain is None and rule.spacing is None

    def _continue(self) -> Search:
        """From the hyperparameters as they are."""
        return Search(self._sought())

    def observations(self, domain: tuple | None = None) -> Inference:
        """The data under the hyperparameters as they are, for evidence and predictions."""
        rule = self._conditioning_rule(domain)
        if domain is None:
            self.conditioned_by = rule
        if rule is None:
            return ExactInference(self.data)
        return FeatureInference(self.data, self._draw(rule))

    def resumed(
        self, choice: Rule | None, by: Rule | None, known: FieldStatistics | None
    ) -> Inference:
        """The observations of a fit that was saved, with what is known of its frequencies."""
        self.choice, self._chosen, self.conditioned_by = choice, True, by
        if by is None:
            return ExactInference(self.data)
        draws = self._draw(by)
        phi = draws[0].shared_columns()
        if phi is not None and not phi.same(known.phi):  # another machine's rounding
            return self.observations()
        return FeatureInference(self.data, draws, None if phi is None else known)

    def _conditioning_rule(self, domain: Box | None = None) -> Rule | None:
        """For the hyperparameters as they are; by steps, so that few new data do not change it."""
        rule = self._rule()
        if not isinstance(rule, Grid) or rule.spacing is not None:
            return rule
        box = self._rounded_box
        given = rule.domain is not None and _inside(self.data.box, rule.domain)
        steps = math.floor(math.log(self._tolerance(rule), _STEP))
        return self._admitted(
            replace(
                rule,
                data=box,
                domain=domain or (rule.domain if given else box),
                tolerance=_STEP**steps,
                lengthscale_range=(1.0, 1.0),
                max_features=rule.max_features or MOST_FEATURES,
            )
        )

    def grown(self, before: Inference, new: HeldData) -> Inference:
        """The observations, after `new` has been added to the data of `before`."""
        if not isinstance(before, FeatureInference):
            self._chosen = False
            return self.observations()
        phi = before.draws[0].shared_columns()
        if phi is None:
            return FeatureInference(self.data, before.draws)
        held = isinstance(self.data, HeldData)
        corners = torch.tensor(new.box, dtype=torch.float64, device=self._device).mT
        if before.draws[0].lattice.outside(corners).any() or (
            held and self._conditioning_rule() != self.conditioned_by
        ):
            return self.observations()
        known = before.statistics + new.statistics(phi)
        return FeatureInference(self.data, before.draws, known)

    @torch.no_grad()
    def weigh(self, rounds: int = 300) -> None:
        """Weights of the data under noise of heavy tails, at the hyperparameters as they are: from
        those they have, until the bound on the evidence settles."""
        if not self.tails or not isinstance(self.data, HeldData):
            return
        plain, represented = self.data.unweighted(), self.observations()
        keys, sizes = zip(*((part.key, len(part)) for part in plain.visit()), strict=True)
        noises = noises_of(self.kernel, self.likelihoods)

        def weighted(logs: Tensor) -> HeldData:
            weights = logs.exp().split(sizes)
            return plain.weighted(weights, bound_of(keys, weights, self.tails))

        def step(logs: Tensor) -> tuple[float, Tensor]:
            observations = represented.of(weighted(logs))
            found = observations.posterior(self.kernel, noises, self.mean)
            mean = found.evidence.best_mean() if self.mean is None else self.mean
            height = found.evidence.log_density(mean, observations.num_values)
            weights, _ = self._weights(plain, found)
            return (height + observations.data.bound).item(), torch.cat(weights).log()

        start = torch.cat(list(self.data.all_weights())).log()
        near, settled = _NEARLY * plain.num_values, _SETTLED * plain.num_values
        logs, done = climb(step, start, near, settled, rounds)
        self.data = weighted(logs)
        if not done:
            warnings.warn(
                f"the weights of Student-t noise have not settled after {rounds} rounds: a larger "
                "deg_free or noise would make them, or call fit, which learns the noise",
                stacklevel=2,
            )

    def weighed_by(self, observations: Inference, held: Data | None = None) -> HeldData:
        """The data, with the weights they have among those held; others with weights from the field
        that the observations give."""
        if not self.tails:
            return self.data
        noises = noises_of(self.kernel, self.likelihoods)
        conditioning = observations.posterior(self.kernel, noises, self.mean)
        known = None if held is None else held.stored_weights(self.data)
        return self.data.weighted(*self._weights(self.data, conditioning, known))

    def sums(self) -> HeldSums:
        """Statistics that serve other lengthscales and a larger domain; one pass."""
        if isinstance(self.data, HeldSums):
            return self.data
        rule = self._rule()
        if rule is None:  # exact: as if it were not
            auto = self.rule.for_data(self._corners)
            rule, _ = auto.choose(laws(self.kernel, self.data.num_inputs))
        data = self.data
        if not isinstance(rule, Grid):
            phi = expand(self.kernel, self._draw(rule), data.num_inputs).double().phi
            phi = phi.with_omega(phi.omega.detach())
            return HeldSums(data.statistics(phi), None, data.survey, data.further)
        domain = rule.domain
        if rule.spacing is None:
            domain = rule.domain or self._widened()
            budget = rule.max_features or MOST_FEATURES
            rule = replace(
                rule,
                data=domain,  # new readings may come anywhere in it
                domain=domain,
                tolerance=self._tolerance(rule),
                lengthscale_range=_SERVED,
                max_features=_WIDER * budget,
            )
        lattice = self._draw(rule)[0].lattice
        sums = data.statistics(lattice.columns().boxed())
        return HeldSums(sums, domain, data.survey, data.further)

    @property
    def _rounded_box(self) -> Box:
        """The data's box in steps of a quarter of a lengthscale: few data do not change it."""
        box = self.data.box
        steps = 0.25 * lengthscales(laws(self.kernel, len(box)), len(box))
        rounded = []
        for (low, high), step in zip(box, steps, strict=True):
            if high > low and step > 1e-12 * max(abs(low), abs(high)):
                low, high = math.floor(low / step) * step, math.ceil(high / step) * step
            rounded.append((float(low), float(high)))
        return tuple(rounded)

    def _widened(self) -> Box:
        """The data's box, and on each side a lengthscale and at least a quarter of its extent."""
        low, high = np.array(self.data.box).T
        margin = np.maximum(
            lengthscales(laws(self.kernel, self.data.num_inputs), len(low)), 0.25 * (high - low)
        )
        return tuple(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))

    def _admitted(self, rule: Grid) -> Grid:
        return self.data.admitted(rule) if isinstance(self.data, HeldSums) else rule

    @property
    def _small(self) -> bool:
        few = isinstance(self.rule, Auto) and self.data.num_values <= self.rule.exact_values
        return (
            few and isinstance(self.data, HeldData) and has_covariance(self.kernel, self._corners)
        )

    @property
    def _corners(self) -> Float[Tensor, "2 d"]:
        return torch.tensor(self.data.box, dtype=torch.float64, device=self._device).mT

    @property
    def _device(self) -> torch.device:
        return next(self.kernel.parameters()).device

    @property
    def _num_outputs(self) -> int:
        return terms(self.kernel)[0].num_outputs

    @property
    def tails(self) -> dict[str, StudentT]:
        """The instruments whose noise has heavy tails."""
        return {
            label: StudentT(own.deg_free)
            for label, own in self.likelihoods.items()
            if isinstance(own, MultitaskStudentTLikelihood)
        }

    def _rule(self) -> Rule | None:
        """What represents the kernel; None for the exact kernel itself. Chosen once."""
        if not self._chosen:
            self.choice = self._choose(self.rule) if isinstance(self.rule, Auto) else self.rule
            self._chosen = True
        return self.choice

    def _choose(self, auto: Auto) -> Rule | None:
        if isinstance(self.data, HeldSums):
            return Grid(
                domain=self.data.domain, tolerance=auto.tolerance, max_features=auto.max_features
            )
        if self._small:
            return None
        rule, reason = auto.for_data(self._corners).choose(laws(self.kernel, self.data.num_inputs))
        few = self.data.num_values <= auto.max_features
        if few and has_covariance(self.kernel, self._corners) and not self._suffices(rule):
            self._note(f"exact kernel: cheaper than the features it would take; {reason}")
            return None
        self._note(reason)
        return rule

    def _suffices(self, rule: Rule) -> bool:
        """Whether a grid of few features, or fewer than there are numbers, leaves out little, at
        the hyperparameters as they are."""
        if not isinstance(rule, Grid):
            return False
        draws = self._draw(self._fine(rule, _FINE_REACH))
        features = self._num_features(draws)
        enough = max(_SCARCE * rule.tolerance, self._tolerance(rule))
        few = features <= max(self.data.num_values, _FEW_FEATURES)
        return few and draws[0].lattice.tolerance.item() <= enough

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _sought(self) -> Coordinates:
        """All that is trained, within what the data can tell."""
        ranges = parameter_ranges(self.kernel, self._distances)
        return Coordinates(self.kernel, *self.likelihoods.values(), ranges=ranges)

    @property
    def _distances(self) -> Distances:
        return self.data.survey.distances

    def _search(
        self, search: Search, observations: Inference, name: str, note: bool = True, **options
    ) -> Search:
        def objective() -> Float[Tensor, ""]:
            again()  # the machine may have become busy
            value = log_marginal_likelihood(observations, self.kernel, self.likelihoods, self.mean)
            return value + search.coordinates.log_prior()

        before, failed = search.evaluations, len(search.failures)
        search.run(
            objective,
            observations.num_values,
            report=lambda value: self.progress(stage=name, nats=value),
            **options,
        )
        if note:
            evaluations = search.evaluations - before
            self._note(f"{name}: {evaluations} evaluations, {search.value:.5f} nats per number")
        if len(search.failures) > failed:
            failures = len(search.failures) - failed
            self._note(f"{name}: {failures} of them failed ({search.failures[-1]}): shorter steps")
        return search

    def _start(self) -> Search:
        """Hyperparameters of the largest evidence of few readings: short searches on very few from
        many places, the best of them again on some more, the best of these to its end."""
        distances = self._distances
        warn_of_far_points(distances)
        few = self._represented(self._subset(_SCREENED_VALUES))
        found = []
        for where in starts(self.kernel, distances):
            start(self.kernel, self.likelihoods, few.data.readings, distances, where)
            found.append(self._begun(Search(self._sought()), few, f"start {where}"))
        some = self._represented(self._subset(_SUBSET_VALUES))
        name = f"start, {some.data.survey.num_points} points"
        found = sorted(found, key=lambda pair: -pair[0].value)[:_FINALISTS]
        iterations = _MOST if some.num_values <= 2 * _SCREENED_VALUES else _SHORT
        finalists = []
        for search, place in found:
            search.coordinates.set(place)
            finalists.append(self._begun(search, some, name, iterations))
        search, place = max(finalists, key=lambda pair: pair[0].value)
        search.coordinates.set(place)
        return self._search(search, some, name, nats=0.1)

    def _begun(
        self, search: Search, observations: Inference, name: str, iterations: int = _SHORT
    ) -> tuple[Search, Float[np.ndarray, "k"]]:
        """A short search, and where it came to."""
        self._search(search, observations, name, note=False, iterations=iterations)
        return search, search.coordinates.get()

    def _on_exact_kernel(self, search: Search, begin: Callable[[], Search]) -> None:
        """Few data get a constant mean only if they pay for it (Schwarz 1978)."""
        self._search_exactly(search, "exact kernel")
        if self.mean is not None or self.data.num_values > _FEW_VALUES:
            return
        place = search.coordinates.get()
        self.mean = torch.zeros(self._num_outputs, dtype=torch.float64, device=self._device)
        without = self._search_exactly(begin(), "exact kernel, mean zero")
        gain = (search.value - without.value) * self.data.num_values
        if gain > 0.5 * self._num_outputs * math.log(self.data.survey.num_points):
            self.mean = None
            search.coordinates.set(place)
        self._note(f"mean {'constant' if self.mean is None else 'zero'}: by {abs(gain):.2f} nats")

    def _search_exactly(self, search: Search, name: str) -> Search:
        """On some of many readings first: an evaluation costs the third power of their number."""
        if self.data.num_values > _MANY * _SOME_VALUES:
            some = self._subset(_SOME_VALUES)
            label = f"exact kernel, {some.survey.num_points} points"
            self._search(search, ExactInference(some), label, nats=0.1)
        nats = 0.1 if self.data.num_values > _SUBSET_VALUES else 0.01
        iterations = _CUBIC * (1000 / self.data.num_values) ** 3
        iterations = int(min(max(iterations, _FEWEST), _MOST))
        every = ExactInference(self.data)
        return self._search(search, every, name, iterations=iterations, nats=nats)

    def _subset(self, numbers: int = _SUBSET_VALUES) -> HeldData:
        parts = join(self.data.survey.sample)
        x = torch.cat([own.x for own in parts])
        chosen = subset(x, max(2, numbers // self._num_outputs))
        offsets = np.cumsum([0, *map(len, parts)])
        few = []
        for own, low, high in zip(parts, offsets[:-1], offsets[1:], strict=True):
            rows = chosen[(chosen >= low) & (chosen < high)] - low
            if len(rows):
                few.append(own.take(rows))
        return HeldData.in_memory(few)

    def _represented(self, few: HeldData) -> Inference:
        """Few readings, by the exact kernel if there is one."""
        if has_covariance(self.kernel, self._corners):
            return ExactInference(few)
        return FeatureInference(few, self._draw(QuasiMonteCarlo(1024)))

    def _start_robustly(self, warm_start: bool) -> None:
        """EM on few readings, then weights for all of them."""
        few = self._subset(_SUBSET_VALUES // 2)
        if not warm_start:
            self._start_among_outliers(self._subset(_SCREENED_VALUES))
        few = self._expectation_maximisation(few, self._represented, "start, weights")
        observations = self._represented(few)
        noises = noises_of(self.kernel, self.likelihoods)
        conditioning = observations.posterior(self.kernel, noises, self.mean)
        plain = self.data.unweighted()
        self.data = plain.weighted(*self._weights(plain, conditioning))

    def _start_among_outliers(self, few: HeldData) -> None:
        """The best of some rounds of EM from each of several lengthscales: without weights, the
        largest evidence may be that of a field that goes through every outlier."""
        distances, found = self._distances, []
        warn_of_far_points(distances)
        for where in starts(self.kernel, distances):
            start(self.kernel, self.likelihoods, few.readings, distances, where)
            search = self._rounds(few, self._represented, f"start {where}", _FEW_ROUNDS)[1]
            found.append((search, search.coordinates.get()))
        search, place = max(found, key=lambda pair: pair[0].value)
        search.coordinates.set(place)

    def _reweigh(self) -> None:
        rule = self._rule()
        levels: list[Callable[[], Rule | None]] = [lambda: rule]
        if isinstance(rule, Grid) and rule.spacing is None:
            levels = [lambda: self._coarse(rule), lambda: self._fine(rule, _FINE_REACH)]
        for level in levels:

            def represented(data: HeldData, level=level) -> Inference:
                own = level()
                if own is None:
                    return ExactInference(data)
                return FeatureInference(data, self._draw(own))

            self.data = self._expectation_maximisation(self.data, represented, "weights")
        self.weigh()

    def _expectation_maximisation(
        self, data: HeldData, represented: Callable[[HeldData], Inference], name: str
    ) -> HeldData:
        """Weights and hyperparameters in turn, until the bound on the evidence settles."""
        data, search, done = self._rounds(data, represented, name, _MOST_ROUNDS)
        self._note(f"{name}: {done} rounds, {search.value:.5f} nats per number")
        return data

    def _rounds(
        self,
        data: HeldData,
        represented: Callable[[HeldData], Inference],
        name: str,
        rounds: int,
    ) -> tuple[HeldData, Search, int]:
        """At most so many rounds of EM: the weighted data, the last search, and the rounds."""
        previous, done = -np.inf, 0
        while done < rounds:
            done += 1
            noises = noises_of(self.kernel, self.likelihoods)
            conditioning = represented(data).posterior(self.kernel, noises, self.mean)
            plain = data.unweighted()
            data = plain.weighted(*self._weights(plain, conditioning))
            search = self._continue()
            options = {"iterations": 5, "nats": 0.1, "reach": _FINE_REACH, "note": False}
            self._search(search, represented(data), name, **options)
            if search.value - previous < _ROUND:
                break
            previous = search.value
        return data, search, done

    @torch.no_grad()
    def _weights(
        self, data: HeldData, conditioning: Posterior, known: Iterable[Tensor] | None = None
    ) -> tuple[list[Tensor], float]:
        noises = noises_of(self.kernel, self.likelihoods)
        mean = conditioning.evidence.best_mean() if self.mean is None else self.mean
        return reweigh(data.visit(), self.tails, conditioning, noises, mean, known)

    def _on_grids(self, rule: Grid, search: Search) -> None:
        """Narrow grids, rebuilt as the lengthscales move; coarse ones first."""
        if rule.spacing is not None:  # by hand: it is what it is
            observations = FeatureInference(self.data, self._draw(rule))
            self._search(search, observations, "grid by hand")
            return
        seen = [search.coordinates.get()]
        self._follow(search, "coarse", _COARSE_REACH, lambda: self._coarse(rule))
        seen.append(search.coordinates.get())
        self._follow(search, "fine", _FINE_REACH, lambda: self._fine(rule, _FINE_REACH))
        seen.append(search.coordinates.get())
        cuts = self._cuts()
        for label, likelihood in self.likelihoods.items():
            share = min((own for key, own in cuts.items() if key.label == label), default=0.0)
            if share > _LITTLE:  # the noise learned has taken it up, and it will be returned
                scale_noise(likelihood, max(1 - share, 0.5))
        if max(cuts.values()) > _MUCH:
            seen.append(search.coordinates.get())
            self._with_what_is_cut(rule, search, seen)

    def _follow(
        self,
        search: Search,
        name: str,
        reach: float,
        level: Callable[[], Grid],
        rounds: int = 8,
        iterations: int = 60,
    ) -> None:
        """Search on one grid after another, until no lengthscale comes to the edge of its range."""
        for _ in range(rounds):
            try:
                observations = FeatureInference(self.data, self._draw(level()))
            except GridBudgetError as error:
                self._note(f"no {name} grid: {error}")
                return
            features = self._num_features(observations.draws)
            name_and_size = f"{name} grid, F = {features}"
            affordable = int(max(_CUBIC * (2000 / features) ** 3, _FEW_ITERATIONS))
            options = {"reach": reach, "iterations": min(iterations, affordable)}
            self._search(search, observations, name_and_size, **options)
            if search.settled:
                return

    def _coarse(self, rule: Grid) -> Grid:
        budget = rule.max_features
        return replace(
            self._fine(rule, _COARSE_REACH),
            tolerance=_COARSE_TOLERANCE,
            max_features=_COARSE_FEATURES if budget is None else min(budget, _COARSE_FEATURES),
        )

    def _fine(self, rule: Grid, reach: float, returned: bool = False) -> Grid:
        """For the data's own box. What is cut, the noise takes up: sought with the truncated
        variance in the noise, lengthscales would grow for its sake."""
        box = self.data.box
        grid = replace(
            rule,
            domain=box,
            data=box,
            tolerance=self._tolerance(rule),
            lengthscale_range=(1 / reach, reach),
            max_features=rule.max_features or MOST_FEATURES,
            diagonal_correction=returned,
        )
        return self._admitted(grid)

    @torch.no_grad()
    def _cuts(self) -> dict[GroupKey, float]:
        """The truncated variance over that of the noise, for a reading of mean weight."""
        cut = self.observations().truncated(self.kernel)
        variance = 0.0 if cut is None else cut.diagonal().mean().item()
        return {key: variance / noise for key, noise in self._noises().items()}

    def _cut(self) -> float:
        """For the best group of readings."""
        return max(self._cuts().values())

    def _noises(self, readings: float = math.inf) -> dict[GroupKey, float]:
        """The noise variance of a reading, for every group: of the mean weight of so many."""
        found = noises_of(self.kernel, self.likelihoods)
        weights = self.data.weights_of.items()
        return {
            key: found[key.label].diagonal().mean().item() / own.nearby(readings)
            for key, own in weights
        }

    def _with_what_is_cut(
        self, rule: Grid, search: Search, seen: list[Float[np.ndarray, "k"]]
    ) -> None:
        """Where a budget cuts much, go on with it in its place, from the best of what was seen, as
        long as that gains; the best is kept."""
        score = partial(self._evidence_at, search.coordinates)
        value, place = max(((score(own), own) for own in seen), key=lambda pair: pair[0])
        level = partial(self._fine, rule, _LAST_REACH, returned=rule.diagonal_correction)
        options = {"rounds": 1, "iterations": _LAST_ITERATIONS}
        for _ in range(_LAST_ROUNDS):
            search.coordinates.set(place)
            last = Search(search.coordinates)
            self._follow(last, "last", _LAST_REACH, level, **options)
            beyond = search.coordinates.get()
            reached = score(beyond)
            if not reached > value + _NATS:
                break
            value, place = reached, beyond
            if last.settled:
                break
        search.coordinates.set(place)
        self._warn_of_what_is_cut()

    @torch.no_grad()
    def _evidence_at(self, coordinates: Coordinates, place: Float[np.ndarray, "k"]) -> float:
        """On the grid that predictions would be made from there, what it cuts being returned."""
        coordinates.set(place)
        try:
            observations = self.observations()
            return log_marginal_likelihood(
                observations, self.kernel, self.likelihoods, self.mean
            ).item()
        except (ValueError, torch.linalg.LinAlgError):  # no grid within the budget, no covariance
            return -math.inf

    def _warn_of_what_is_cut(self) -> None:
        share = self._cut()
        if share > _MUCH:
            text = (
                f"what the grid cuts is {share:.2g} times the noise variance: the error bars hold "
                "it, and a larger max_features= of the frequencies would narrow them"
            )
            self._note(text)
            warnings.warn(text, GridWarning, stacklevel=2)

    @torch.no_grad()
    def _tolerance(self, rule: Grid) -> float:
        """The rule's tolerance where the noise is a thousandth of the signal's variance, tighter
        where there is less. Also less than what the data could tell of the features left out,
        and than the posterior variance, which is about F/(N·p) of the noise's."""
        signal = sum(
            at_zero(term).diagonal(dim1=-1, dim2=-2).mean()
            for term in terms(self.kernel)
            if term.leaves
        )
        if not signal > 0:
            return rule.tolerance
        coarse = replace(
            rule,
            domain=self._rounded_box,
            data=None,
            tolerance=_COARSE_TOLERANCE,
            lengthscale_range=(1.0, 1.0),
            max_features=_COARSE_FEATURES,
        )
        informed = self._count(coarse) / self.data.num_values
        ratio = min(self._noises(1 / informed).values()) / signal.item()
        wanted = rule.tolerance * min(max(ratio * _SIGNAL_TO_NOISE, 1e-3), 10.0)
        return max(min(wanted, _SHARE_OF_POSTERIOR * ratio * informed), 1e-10)

    def _count(self, rule: Grid) -> int:
        """Features of a grid; known where neither box nor kernel have changed."""
        key = rule, [p.detach().clone() for p in self.kernel.parameters()]
        last = self._informed
        if last is None or last[0] != rule or not all(map(torch.equal, last[1], key[1])):
            try:
                features = self._num_features(self._draw(rule))
            except GridBudgetError:
                features = rule.max_features
            self._informed = (*key, features)
        return self._informed[2]

    def _draw(self, rule: Rule) -> list[Draw]:
        return draw(self.kernel, rule, self.data.num_inputs)

    def _num_features(self, draws: list[Draw]) -> int:
        found = zip(draws, terms(self.kernel), strict=True)
        return sum(2 * own.num_frequencies * term.factor.rank for own, term in found)


def _inside(box: Box, domain: Box) -> bool:
    return all(
        low <= own[0] and own[1] <= high for own, (low, high) in zip(box, domain, strict=True)
    )


def has_covariance(kernel: Kernel, x: Float[Tensor, "N d"]) -> bool:
    """Whether the kernel has a covariance of its own, beside its spectral density."""
    try:
        with torch.no_grad():
            kernel(x[:1], x[:1]).to_dense()
    except NotImplementedError:
        return False
    return True
