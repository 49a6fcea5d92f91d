"""How a model is fitted: starting values, then searches on better and better representations."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.coordinates import Coordinates
from gp_orff.frequencies import Auto, Draw, Grid, QuasiMonteCarlo, Rule
from gp_orff.frequencies.grid import MOST_FEATURES, box_of
from gp_orff.noise import noise_of, scale_noise
from gp_orff.observations import ExactObservations, FeatureObservations, Observations
from gp_orff.resolution import draw, laws
from gp_orff.starting import LENGTHSCALES, start, subset
from gp_orff.terms import terms
from gp_orff.training import Search, log_marginal_likelihood
from gp_orff.truncation import at_zero

_SUBSET_VALUES = 600  # numbers whose exact evidence gives the starting values
_LONGEST = 3.0  # extents of the data: the longest lengthscale that is sought
_COARSE_TOLERANCE, _COARSE_FEATURES, _COARSE_REACH = 1e-2, 2000, 1.4
_FINE_REACH, _LAST_REACH = 1.2, 1.05
_SIGNAL_TO_NOISE = 1e3  # of variances: where a tolerance is used as it is
_SCARCE = 10.0  # a tolerance that many times what was asked for
_LITTLE, _MUCH = 0.01, 0.1  # of the noise's variance, that a grid has cut
_SHARE_OF_POSTERIOR = 0.02  # of the posterior variance, that a grid may leave out


def silent(**facts) -> None:
    """No progress."""


@dataclass
class Fit:
    """One fit of a kernel and a likelihood to residuals y at x."""

    kernel: Kernel
    likelihood: Likelihood
    mean: Float[Tensor, "p"] | None  # a fixed constant mean; None for the best one
    rule: Rule
    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N p"]
    progress: Callable[..., None] = silent
    notes: list[str] = field(default_factory=list)
    _coordinates: Coordinates | None = None
    _choice: Rule | None = None
    _chosen: bool = False

    def run(self, warm_start: bool) -> None:
        """Set the hyperparameters to those of largest evidence."""
        if self._small:
            self._multistart(ExactObservations(self.x, self.y), "exact kernel", warm_start)
            return
        if not warm_start:
            self._start_on_a_subset()
        rule = self._rule()
        if rule is None:
            self._search(self._new_search(), ExactObservations(self.x, self.y), "exact kernel")
            return
        if isinstance(rule, Grid):
            self._on_grids(rule)
        else:
            observations = FeatureObservations(self.x, self.y, self._draw(rule))
            self._search(self._new_search(), observations, repr(rule))

    def observations(self, domain: tuple | None = None) -> Observations:
        """The data under the hyperparameters as they are, for evidence and predictions."""
        rule = self._rule()
        if rule is None:
            return ExactObservations(self.x, self.y)
        if isinstance(rule, Grid) and rule.spacing is None:
            rule = replace(
                rule,
                data=box_of(self.x),
                domain=domain or rule.domain or box_of(self.x),
                tolerance=self._tolerance(rule),
                lengthscale_range=(1.0, 1.0),
                max_features=rule.max_features or MOST_FEATURES,
            )
        return FeatureObservations(self.x, self.y, self._draw(rule))

    @property
    def _small(self) -> bool:
        few = isinstance(self.rule, Auto) and self.y.numel() <= self.rule.exact_values
        return few and has_covariance(self.kernel, self.x)

    def _rule(self) -> Rule | None:
        """What represents the kernel; None for the exact kernel itself. Chosen once."""
        if isinstance(self.rule, Auto) and not self._chosen:
            self._choice, self._chosen = self._choose(self.rule), True
        return self._choice if self._chosen else self.rule

    def _choose(self, auto: Auto) -> Rule | None:
        if self._small:
            return None
        rule, reason = auto.for_data(self.x).choose(laws(self.kernel, self.x.shape[-1]))
        scarce = not isinstance(rule, Grid)
        if not scarce:
            achieved = self._draw(rule)[0].lattice.tolerance.item()
            scarce = achieved > _SCARCE * auto.tolerance
        if scarce and self.y.numel() <= auto.max_features and has_covariance(self.kernel, self.x):
            self._note(f"exact kernel: no more numbers than features; {reason}")
            return None
        self._note(reason)
        return rule

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _new_search(self) -> Search:
        """In the coordinates of the starting values, if there were any."""
        if self._coordinates is None:
            self._coordinates = Coordinates(self.kernel, self.likelihood)
        return Search(self._coordinates)

    def _search(self, search: Search, observations: Observations, name: str, **options) -> Search:
        def objective() -> Float[Tensor, ""]:
            value = log_marginal_likelihood(observations, self.kernel, self.likelihood, self.mean)
            return value + search.coordinates.log_prior()

        before = search.evaluations
        search.run(
            objective,
            observations.num_values,
            report=lambda value: self.progress(stage=name, nats=value),
            **options,
        )
        evaluations = search.evaluations - before
        self._note(f"{name}: {evaluations} evaluations, {search.value:.5f} nats per number")
        return search

    def _multistart(
        self, observations: Observations, name: str, warm_start: bool, **options
    ) -> None:
        """The best of searches from several lengthscales."""
        found = []
        for share in (None,) if warm_start else LENGTHSCALES:
            label = name
            if share is not None:
                start(self.kernel, self.likelihood, observations.x, observations.y, share)
                label = f"{name} from {share:g} of the extent"
            longest = {} if share is None else {"longest": math.log(_LONGEST / share)}
            self._coordinates = Coordinates(self.kernel, self.likelihood, **longest)
            search = self._search(self._new_search(), observations, label, **options)
            found.append((search, search.coordinates.get()))
        search, place = max(found, key=lambda pair: pair[0].value)
        self._coordinates = search.coordinates
        self._coordinates.set(place)

    def _start_on_a_subset(self) -> None:
        chosen = subset(self.x, max(2, _SUBSET_VALUES // self.y.shape[-1]))
        x, y = self.x[chosen], self.y[chosen]
        if has_covariance(self.kernel, x):
            observations: Observations = ExactObservations(x, y)
        else:
            draws = draw(self.kernel, QuasiMonteCarlo(1024), x.shape[-1])
            observations = FeatureObservations(x, y, draws)
        self._multistart(observations, f"start, {len(x)} points", warm_start=False, nats=0.1)

    def _on_grids(self, rule: Grid) -> None:
        """Narrow grids, rebuilt as the lengthscales move; coarse ones first."""
        search = self._new_search()
        if rule.spacing is not None:  # by hand: it is what it is
            observations = FeatureObservations(self.x, self.y, self._draw(rule))
            self._search(search, observations, "grid by hand")
            return
        beginning = search.coordinates.get()
        self._follow(search, "coarse", _COARSE_REACH, lambda: self._coarse(rule))
        self._follow(search, "fine", _FINE_REACH, lambda: self._fine(rule, _FINE_REACH))
        share = self._cut()
        if share > _LITTLE:  # the noise learned has taken it up, and it will be returned
            scale_noise(self.likelihood, max(1 - share, 0.5))
        if share > _MUCH:
            self._with_what_is_cut(rule, search, beginning)

    def _follow(
        self, search: Search, name: str, reach: float, level: Callable[[], Grid], rounds: int = 8
    ) -> None:
        """Search on one grid after another, until no lengthscale comes to the edge of its range."""
        for _ in range(rounds):
            try:
                observations = FeatureObservations(self.x, self.y, self._draw(level()))
            except ValueError:  # no grid of this kind within its budget
                return
            features = self._num_features(observations.draws)
            self._search(search, observations, f"{name} grid, F = {features}", reach=reach)
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
        box = box_of(self.x)
        return replace(
            rule,
            domain=box,
            data=box,
            tolerance=self._tolerance(rule),
            lengthscale_range=(1 / reach, reach),
            max_features=rule.max_features or MOST_FEATURES,
            diagonal_correction=returned,
        )

    @torch.no_grad()
    def _cut(self) -> float:
        """The truncated variance over that of the noise."""
        cut = self.observations().truncated(self.kernel)
        noise = noise_of(self.likelihood, self.y.shape[-1]).diagonal(dim1=-1, dim2=-2).sum()
        return 0.0 if cut is None else (cut.trace() / noise).item()

    def _with_what_is_cut(self, rule: Grid, search: Search, beginning: np.ndarray) -> None:
        """Where a budget cuts much, go on with it in its place, from the better of two starts."""

        @torch.no_grad()
        def evidence(place: np.ndarray) -> float:
            search.coordinates.set(place)
            return log_marginal_likelihood(
                self.observations(), self.kernel, self.likelihood, self.mean
            ).item()

        search.coordinates.set(max(search.coordinates.get(), beginning, key=evidence))
        search = Search(search.coordinates)
        level = partial(self._fine, rule, _LAST_REACH, returned=rule.diagonal_correction)
        self._follow(search, "last", _LAST_REACH, level, rounds=4)
        self._note(
            f"what the grid cuts is {self._cut():.2g} of the noise: a larger max_features would "
            "narrow the error bars"
        )

    @torch.no_grad()
    def _tolerance(self, rule: Grid) -> float:
        """The rule's tolerance where the noise is a thousandth of the signal's variance, tighter
        where there is less. Also less than what the data could tell of the features left out,
        and than the posterior variance, which is about F/(N·p) of the noise's."""
        noise = noise_of(self.likelihood, self.y.shape[-1]).diagonal(dim1=-1, dim2=-2).mean()
        signal = sum(
            at_zero(term).diagonal(dim1=-1, dim2=-2).mean()
            for term in terms(self.kernel)
            if term.leaves
        )
        if not signal > 0:
            return rule.tolerance
        ratio = (noise / signal).item()
        coarse = replace(
            rule,
            domain=box_of(self.x),
            data=None,
            tolerance=_COARSE_TOLERANCE,
            lengthscale_range=(1.0, 1.0),
            max_features=_COARSE_FEATURES,
        )
        informed = self._num_features(self._draw(coarse)) / self.y.numel()
        wanted = rule.tolerance * min(max(ratio * _SIGNAL_TO_NOISE, 1e-3), 10.0)
        return max(min(wanted, _SHARE_OF_POSTERIOR * ratio * informed), 1e-10)

    def _draw(self, rule: Rule) -> list[Draw]:
        return draw(self.kernel, rule, self.x.shape[-1])

    def _num_features(self, draws: list[Draw]) -> int:
        found = zip(draws, terms(self.kernel), strict=True)
        return sum(2 * own.num_frequencies * term.factor.rank for own, term in found)


def has_covariance(kernel: Kernel, x: Float[Tensor, "N d"]) -> bool:
    """Whether the kernel has a covariance of its own, beside its spectral density."""
    try:
        with torch.no_grad():
            kernel(x[:1], x[:1]).to_dense()
    except NotImplementedError:
        return False
    return True
