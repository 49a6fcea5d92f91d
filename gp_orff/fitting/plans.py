"""Plans of a search, each with a price in operations and a loss in nats.

A plan says which observed numbers the evidence of a search is computed from, its rows, and by which
form of the prior, its columns: the kernel itself, or the features of a rule.

1. The price of a plan is the number of floating-point operations of one evaluation of the evidence
   with its gradient.
2. The loss of a plan is what its optimum is expected to lack, in nats of the evidence of all data
   under the kernel itself. With m of M numbers, k hyperparameters lose k/2 (M/m − 1) where data are
   the same everywhere: they vary about those of all data with M/m − 1 times the covariance that all
   data leave. Ten times as much is foreseen, as they rarely are. A lattice that truncates the
   variance δ at noise of the variance σ² loses about M/4 (δ/(σ² + δ))², since the search takes δ
   for noise. Both depend on the hyperparameters, and are computed where the search is. If a search
   would end with it, at a tenth of `aim` or more, and two evaluations under the kernel itself are
   within the budget, the loss of a lattice is ½ gᵀH⁻¹g. Here g is the gradient of the evidence of
   all data under the kernel itself, at the optimum of the lattice, and H the average information.
3. `climb` runs searches on plans of rising price, each from the best of where others have ended. It
   ends with the first plan of all data whose loss is at most `aim`, or with that of the smallest
   loss within the budget.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.patterns import GroupKey
from gp_orff.features.assemble import expand
from gp_orff.features.draws import GridWarning
from gp_orff.features.grid import Grid
from gp_orff.features.grid_design import GridBudgetError
from gp_orff.fitting.robust_em import has_weights, maximise
from gp_orff.fitting.search import Search, SearchWarning
from gp_orff.fitting.starting_values import with_common_lengths
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.exact import has_covariance
from gp_orff.inference.features import FeatureInference, Inference
from gp_orff.inference.price import (
    BUDGET,
    FINE_FACTOR,
    MANY,
    MANY_POINTS,
    MOST_EVALUATIONS,
    MOST_TRAINING,
    NATS,
    NEGLIGIBLE,
    RATIO,
    SHORT,
    SUBSET_VALUES,
    aim,
    cubic,
    loss_of_share,
)
from gp_orff.inference.representation import (
    COARSE_FACTOR,
    COARSE_FEATURES,
    MOST_EXACT,
    Representation,
)

# numbers, of subsets on the way: each search costs `RATIO` times as much as the one before
SUBSETS = 2 * SUBSET_VALUES, 4 * SUBSET_VALUES, 8 * SUBSET_VALUES


@dataclass(eq=False)
class Plan(ABC):
    """Rows and columns of a search; `loss` and `operations` at the present hyperparameters."""

    trainer: Trainer
    name: str

    of_all = True  # whether its rows are all data, or stand for them
    given = False  # whether the user has chosen the columns: their loss is no reason for others
    reference = None  # the plan of these data under the kernel itself, if it is another
    keeps = False  # whether one pass over the data serves all lattices, and the posterior
    loss = 0.0  # the nats of evidence that its optimum is expected to lack

    @property
    def refreshes(self) -> bool:
        """Whether its rows have weights that follow with the hyperparameters."""
        return has_weights(self.trainer, self.data)

    @property
    @abstractmethod
    def shape(self) -> tuple[float, int | None]:
        """The observed numbers, and the features; None for those of the kernel itself."""

    @property
    @abstractmethod
    def operations(self) -> float:
        """Of an evaluation of the evidence with its gradient; infinite if it cannot be built."""

    @abstractmethod
    def inference(self) -> Inference | None:
        """With which its evidence is computed; None if it cannot be built."""

    @abstractmethod
    def search(self, search: Search, evaluations: int) -> None:
        """Go on with a search, for at most so many evaluations."""

    def truncated(self, representation: Representation) -> dict[GroupKey, float]:
        """What the learned noise contains, over the noise, that the posterior adds to the field."""
        return {}


class ByKernel(Plan):
    """A plan whose columns are those of the exact kernel."""

    @property
    def operations(self) -> float:
        return cubic(self.shape[0])

    def inference(self) -> Inference:
        return self.trainer.exact_inference(self.data)


@dataclass(eq=False)
class OfSubset(ByKernel):
    """Some of the numbers, of points at all distances from each other, under the exact kernel."""

    numbers: int
    of: float  # all numbers
    of_all = False

    @property
    def shape(self) -> tuple[float, int | None]:
        return self.numbers, None

    @property
    def loss(self) -> float:
        return loss_of_rows(self.trainer, self.numbers, self.of)

    @cached_property
    def data(self) -> Data:
        """The subset; with weights after a search under Student-t noise."""
        return self.trainer.subset(self.numbers)

    def search(self, search: Search, evaluations: int) -> None:
        self.trainer.curves.end()
        label = f"{self.name}, {self.data.survey.num_points} points"
        parts = self.trainer, search, self.data, self.trainer.exact_inference, label
        self.data = maximise(*parts, nats=NEGLIGIBLE * NATS, evaluations=evaluations)


@dataclass(eq=False)
class OfAll(ByKernel):
    """All numbers under the exact kernel."""

    data: Dataset

    @cached_property
    def size(self) -> int:
        """Rows: records at one place, which are equal to the prior, are one."""
        return self.trainer.exact_inference(self.data).size

    @property
    def shape(self) -> tuple[float, int | None]:
        return self.size, None

    def search(self, search: Search, evaluations: int) -> None:
        self.trainer.curves.end()
        parts = self.trainer, search, self.data, self.trainer.exact_inference, self.name
        self.data = maximise(*parts, evaluations=evaluations)


class ByFeatures(Plan):
    """A plan whose columns are features."""

    @property
    def shape(self) -> tuple[float, int | None]:
        inference = self.inference()
        features = None if inference is None else inference.num_features(self.trainer.kernel)
        return self.data.num_values, features

    @property
    def operations(self) -> float:
        inference = self.inference()
        return math.inf if inference is None else operations_on(inference, self.trainer)


@dataclass(eq=False)
class OnFeatures(ByFeatures):
    """All numbers, on the features of a rule that the user has chosen: it loses nothing that he
    could have."""

    features: FeatureInference
    given = True

    @property
    def data(self) -> Data:
        return self.features.data

    def inference(self) -> Inference:
        return self.features

    def search(self, search: Search, evaluations: int) -> None:
        parts = self.trainer, search, self.features.data, self.features.of, self.name
        self.features = self.features.of(maximise(*parts, evaluations=evaluations))


@dataclass(eq=False)
class OnLattice(ByFeatures):
    """Numbers on lattices, each made for where the search has gone."""

    representation: Representation
    level: Callable[[Representation], Grid]
    factor: float  # by which frequencies may move on one lattice
    of: float  # all numbers
    keeps: bool = False

    @property
    def data(self) -> Data:
        return self.representation.data

    @property
    def given(self) -> bool:
        return self.representation.rule.max_features is not None

    @property
    def reference(self) -> "OfAll | None":
        data = self.data
        every = data.revisitable and data.num_values == self.of
        exact = every and self.of <= MANY and has_covariance(self.trainer.kernel, data)
        return OfAll(self.trainer, "exact kernel", data) if exact else None

    def inference(self) -> FeatureInference | None:
        """On the present lattice; None where none serves within its limit of features."""
        try:
            return self.representation.inference(self.level(self.representation))
        except GridBudgetError:
            return None

    @property
    def loss(self) -> float:
        """That of its columns, and of its rows."""
        numbers = self.representation.data.num_values
        columns = loss_of_share(self.representation.misread_share(self.level), self.of)
        return columns + loss_of_rows(self.trainer, numbers, self.of)

    def search(self, search: Search, evaluations: int) -> None:
        self._keep()
        self._follow(search, evaluations, self.level)

    def truncated(self, representation: Representation) -> dict[GroupKey, float]:
        if self.given or not representation.on_lattice:
            return {}
        return representation.training_cuts(self.level)

    def _keep(self) -> None:
        """The statistics of one pass, if they serve all lattices."""
        if not self.keeps:
            return
        with self.trainer.journal.stage(f"statistics of {self.trainer.survey.num_points} points"):
            try:
                self.representation = self.representation.keeping()
            except GridBudgetError as error:
                self.trainer.journal.note(f"no wide grid was built: {error}")

    def _follow(
        self,
        search: Search,
        evaluations: int,
        level: Callable[[Representation], Grid],
        rounds: int = MOST_EVALUATIONS,
    ) -> int:
        """Search on one lattice after another until no lengthscale reaches the edge of its range;
        the evaluations that are left."""
        trainer = self.trainer
        for _ in range(rounds):
            try:
                inference = self.representation.inference(level(self.representation))
            except GridBudgetError as error:
                trainer.journal.note(f"no {self.name} was built: {error}")
                return 0
            label = f"{self.name}, {inference.num_features(trainer.kernel)} features"
            options = {"trust_factor": self.factor, "evaluations": evaluations}
            before = search.evaluations
            with warnings.catch_warnings():  # the next grid is made for where the search has gone
                warnings.filterwarnings("ignore", ".*call redraw", GridWarning)
                data = maximise(trainer, search, inference.data, inference.of, label, **options)
            self.representation = replace(self.representation, data=data)
            evaluations -= search.evaluations - before
            if search.settled or evaluations < 1:
                break
        return evaluations


@dataclass(eq=False)
class OfCurves(OnLattice):
    """Learned spectra on lattices: few features first, because coarse lattices have little
    information on the short waves of large ones. At last with curves that go on beyond their knots,
    which a search for where the curves are would take for them: a power law has no scale."""

    def search(self, search: Search, evaluations: int) -> None:
        self._keep()
        few = partial(Representation.fine, most=COARSE_FEATURES)
        evaluations = self._follow(search, evaluations, few)
        self._extrapolate(few)
        self.trainer.curves.end(continued=True)
        self._follow(search, max(evaluations, 2), self.level, rounds=2)
        self._extrapolate(self.level)

    def _extrapolate(self, level: Callable[[Representation], Grid]) -> None:
        """Curves in a line beyond the edge of the lattice that they were learned on."""
        try:
            inference = self.representation.inference(level(self.representation))
            self.trainer.curves.extrapolate(inference)
        except GridBudgetError as error:
            self.trainer.journal.note(f"curves are not extrapolated: {error}")


def operations_on(inference: FeatureInference, trainer: Trainer) -> float:
    """About the operations of an evaluation on features, with its gradient."""
    with torch.no_grad():
        expansion = expand(trainer.kernel, inference.draws, inference.data.num_inputs)
    if inference.prefers_dual_algebra(expansion):
        blocks = expansion.num_outputs if inference.has_dual_blocks(expansion) else 1
        size = inference.num_values / blocks
        return blocks * cubic(size) + 6.0 * size**2 * expansion.num_features
    moving = inference.draws[0].shared_columns() is None  # sums over the data are made again
    points = inference.data.survey.num_points if moving else 0
    blocks = sum(len(part.y) for part in inference.data.tracks)
    columns = expansion.num_columns
    return 6.0 * (points + blocks) * columns**2 + 2.0 * expansion.cholesky_cost


def loss_of_rows(trainer: Trainer, numbers: float, of: float) -> float:
    """k/2 (M/m − 1), and more for data that differ from place to place."""
    return 0.5 / NEGLIGIBLE * trainer.num_learned * max(of / numbers - 1.0, 0.0)


price = attrgetter("operations")


class Priced(NamedTuple):
    """A plan, with its price and its loss at the present hyperparameters."""

    plan: Plan
    operations: float
    loss: float


def next_plan(
    plans: Sequence[Plan], lost: float, num_values: float, budget: float, of_all: bool
) -> Priced | None:
    """The plan to search on next; None if none within the budget is better than what was reached.

    The target is the cheapest plan of all data that loses at most `aim`, or that of the smallest
    loss if there is none, unless less was lost before: then more numbers serve under the exact
    kernel. On the way to the target are plans that cost far less.

    Args:
        plans: those that were not searched on.
        lost: the loss of what was reached.
        num_values: all numbers.
        budget: operations that are left.
        of_all: whether what was reached is of all data.
    """
    priced = [Priced(plan, plan.operations, plan.loss) for plan in plans]
    # where the user has chosen the columns, there is one search on them whatever it costs or loses
    chosen = [each for each in priced if each.plan.given and not of_all]
    priced = [each for each in priced if 2 * each.operations <= budget or each in chosen]
    better = [each for each in priced if 2 * each.loss < lost and not of_all]
    most = 0.5 * lost if of_all else max(lost, aim(num_values))
    targets = [each for each in priced if each.plan.of_all]
    targets = [each for each in targets if each.loss <= most or each in chosen]
    if not targets:
        subsets = [each for each in better if not each.plan.of_all]
        return min(subsets, key=price, default=None)
    good = [each for each in targets if each.loss <= aim(num_values)]
    target = min(good, key=price, default=min(targets, key=lambda each: each.loss))
    on_the_way = [each for each in better if RATIO * each.operations <= target.operations]
    return min(on_the_way, key=price, default=target)


def lost_at_first(plan: Plan, num_values: float) -> float:
    """The loss of starting values, which are those of few numbers; unknown if they are those of
    random features, for want of a covariance."""
    if not has_covariance(plan.trainer.kernel, plan.data):
        return math.inf
    return loss_of_rows(plan.trainer, min(SUBSET_VALUES, num_values), num_values)


def climb(search: Search, plans: Sequence[Plan], num_values: float) -> Plan | None:
    """Search on plans of rising price, until one of all data loses at most `aim`; the last plan, if
    any.

    Every plan begins at the best of all hyperparameters where others have ended, as the evidence of
    the plan shows: that of few numbers, or of coarse columns, may have led astray.

    Args:
        search: goes on from where it is, after searches on few numbers.
        plans: those that the data permit.
        num_values: all numbers.
    """
    if not plans:
        return None
    trainer, budget, left = plans[0].trainer, BUDGET, list(plans)
    last, of_all, measured = None, False, 0.0
    lost, visited = lost_at_first(plans[0], num_values), [search.coordinates.get()]
    while not of_all or lost > aim(num_values):
        chosen = next_plan(left, lost, num_values, budget, of_all)
        if chosen is None:
            break
        plan, before = chosen.plan, search.evaluations
        _go_to_best(search, plan, visited)
        stages = len(trainer.journal.stages)
        affordable = max(2, int(max(budget, 0.0) / chosen.operations))
        plan.search(search, min(affordable, MOST_EVALUATIONS))
        left.remove(plan)
        if search.evaluations == before:  # no lattice could be built
            continue
        visited.append(search.coordinates.get())
        budget -= (search.evaluations - before) * chosen.operations
        last, measured, lost = measured_loss(plan, num_values, budget)
        budget -= measured
        of_all = of_all or plan.of_all
        trainer.journal.price(stages, chosen.operations, lost)
    if not of_all and lost > aim(num_values):
        trainer.journal.note(
            "no search on all data is expected to improve on that of fewer within its budget of "
            "operations: the hyperparameters are those of a subset"
        )
    if measured and lost > aim(num_values):
        warnings.warn(
            f"the search for hyperparameters on a {last.name} ended where the kernel itself lets "
            f"expect {lost:.2g} nats of log evidence more; call fit again with warm_start=True and "
            f"frequencies=gp_orff.Auto(exact_values={num_values:.0f}), which searches there",
            SearchWarning,
            stacklevel=2,
        )
    return last


def loss_by_gradient(plan: Plan) -> float:
    """½ gᵀH⁻¹g of the reference of a plan, as a search on it would foresee its gain."""
    search, reference = plan.trainer.new_search(), plan.reference
    label = f"gradient under the {reference.name}"
    plan.trainer.search(search, reference.inference(), label, evaluations=1)
    return search.expected_gain


def measured_loss(plan: Plan, num_values: float, budget: float) -> Priced:
    """A plan whose search has ended, with its loss and the operations that it takes to know it.

    The loss is that of its formula, which costs nothing, if this is far below the aim, or above it,
    so that others follow. In between it is that by the gradient, if the budget allows for it and
    for the information.
    """
    lost, most, reference = plan.loss, aim(num_values), plan.reference
    unsure = NEGLIGIBLE * most < lost <= most and not plan.given
    price = 2 * reference.operations if unsure and reference is not None else math.inf
    return Priced(plan, price, loss_by_gradient(plan)) if price <= budget else Priced(plan, 0, lost)


def route(plans: Sequence[Plan], num_values: float) -> list[Priced]:
    """The plans that `climb` would take if the hyperparameters stayed as they are."""
    if not plans:
        return []
    left, chosen, budget = list(plans), [], BUDGET
    lost, of_all = lost_at_first(plans[0], num_values), False
    while not of_all or lost > aim(num_values):
        planned = next_plan(left, lost, num_values, budget, of_all)
        if planned is None:
            break
        chosen.append(planned)
        left.remove(planned.plan)
        lost, budget = planned.loss, budget - SHORT * planned.operations
        of_all = planned.plan.of_all
    return chosen


def _go_to_best(search: Search, plan: Plan, visited: Sequence[Float[np.ndarray, "k"]]) -> None:
    """Go to those hyperparameters whose evidence on the plan is the largest; minor terms are also
    tried at the lengthscale of the others."""

    @torch.no_grad()
    def value(u: Float[np.ndarray, "k"]) -> float:
        search.coordinates.set(u)
        inference = plan.inference()
        if inference is None:
            return -math.inf
        return plan.trainer.value(inference) + float(plan.trainer.log_prior(search))

    # of weights, that others have found; of all of many data, for each of them
    if plan.refreshes or plan.keeps:
        return
    moved = with_common_lengths(plan.trainer.kernel, search.coordinates)
    if len(moved) + len(visited) == 1:
        return
    # the last of equals; a minor term moves if that gains a nat
    rated = [(value(u), u) for u in reversed(visited)] + [(value(u) - NATS, u) for u in moved]
    search.coordinates.set(max(rated, key=itemgetter(0))[1])


def plans_of(trainer: Trainer, representation: Representation) -> list[Plan]:
    """The plans that data and kernel permit, within the limits that the user has set."""
    data, rule = representation.data, representation.rule
    numbers, exact = data.num_values, data.revisitable and has_covariance(trainer.kernel, data)
    enough = exact and 2 * SUBSETS[0] <= numbers
    sizes = sorted({min(size, numbers // 2) for size in SUBSETS}) if enough else []
    plans = [OfSubset(trainer, "exact kernel", size, numbers) for size in sizes]
    if rule is None:
        return [*plans, OfAll(trainer, "exact kernel", data)]
    if not representation.follows:
        name = "given grid" if representation.grid else repr(rule)
        return [*plans, OnFeatures(trainer, name, representation.inference(rule))]
    if exact and representation.auto and not data.tracks:
        most = max(representation.auto.exact_values, rule.max_features or MOST_EXACT)
        under_kernel = OfAll(trainer, "exact kernel", data)
        if numbers <= MANY and under_kernel.size <= most:
            plans.append(under_kernel)
    return plans + lattices_of(trainer, representation)


def lattices_of(trainer: Trainer, representation: Representation) -> list[Plan]:
    """Plans on lattices: few features, on a sample of many points; then more on all."""
    data, plans, numbers = representation.data, [], representation.data.num_values

    def of(rows: Data) -> Representation:
        return replace(representation, data=rows)

    if not representation.on_lattice:
        level = partial(Representation.fine, returned=True)
        return [OnLattice(trainer, "waves", representation, level, FINE_FACTOR, numbers)]
    many = data.revisitable and not data.tracks and data.survey.num_points > MANY_POINTS
    many = many and not has_weights(trainer, data)
    sample = Dataset.in_memory(trainer.survey.sample) if many else data.sampled(COARSE_FEATURES)
    coarse, fine = Representation.coarse, Representation.fine
    if representation.rule.max_features is not None:
        # what the posterior truncates is noise of the model too: the evidence is that of the model
        fine = partial(Representation.fine, returned=True)
    plans.append(OnLattice(trainer, "coarse grid", of(sample), coarse, COARSE_FACTOR, numbers))
    kind = OfCurves if trainer.curves else OnLattice
    few = data.sampled(MOST_TRAINING)
    parts = fine, FINE_FACTOR, numbers
    plans.append(kind(trainer, "fine grid", of(few), *parts, keeps=many))
    if few is not data:
        plans.append(OnLattice(trainer, "fine grid, all blocks", representation, *parts))
    return plans
