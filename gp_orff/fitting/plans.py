"""Plans of a search, each with a price in operations and a loss in nats.

A plan states how a search computes the evidence. Its rows are the observed values that the search
uses. Its columns are the form of the prior: the exact kernel, or the features of a rule.

1. The price of a plan is the number of floating-point operations of one evaluation of the evidence
   with its gradient.
2. The loss of a plan is a difference in the log evidence of all data under the exact kernel: its
   maximum, less its value at the optimum of the plan. Losses are computed at the present
   hyperparameters.

   a. A plan with m of M values and k hyperparameters is expected to lose 10 k/2 (M/m − 1) nats.
      The factor 10 is a margin: k/2 (M/m − 1) is the loss if data are alike at all positions. The
      optimum of the plan then has M/m − 1 times the covariance of the posterior from all data.
   b. A lattice that truncates the variance δ loses about M/4 (δ/(σ² + δ))² nats for noise of the
      variance σ², since the search treats the truncated part of the field as noise.
   c. If the search on a lattice would be the last, and if its loss is between a tenth of `aim` and
      `aim`, the loss is computed again as ½ gᵀH⁻¹g. Here g is the gradient of the evidence of all
      data under the exact kernel, at the optimum of the lattice, and H is the average information.
      This takes two evaluations under the exact kernel, and is done if they are in the budget.

3. `climb` runs searches on plans of rising price, each from the best earlier result. It ends with
   the first plan of all data whose loss is at most `aim`, or with the plan of the smallest loss in
   the budget.
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

# Observed values of subsets before all data. Each search costs `RATIO` times as much as the
# previous.
SUBSETS = 2 * SUBSET_VALUES, 4 * SUBSET_VALUES, 8 * SUBSET_VALUES


@dataclass(eq=False)
class Plan(ABC):
    """The observed values (rows) and the features (columns) of a search.

    The loss and the price are for the present hyperparameters.
    """

    trainer: Trainer
    name: str

    of_all = True  # whether the rows are all data, or represent them
    given = False  # whether the columns are searched once, whatever their price and loss
    reference = None  # the plan of the same data under the exact kernel, for other columns
    keeps = False  # whether one pass over the data serves all lattices, and the posterior
    loss = 0.0  # nats

    @property
    def refreshes(self) -> bool:
        """Whether the rows have weights or pseudo-observations, which the search refreshes."""
        return has_weights(self.trainer, self.data)

    @property
    @abstractmethod
    def shape(self) -> tuple[float, int | None]:
        """The number of observed values, and of features. None features for the exact kernel."""

    @property
    @abstractmethod
    def operations(self) -> float:
        """The floating-point operations of the evidence with its gradient, ∞ without inference."""

    @abstractmethod
    def inference(self) -> Inference | None:
        """The inference that computes the evidence; None if it cannot be built."""

    def search(self, search: Search, budget: float) -> float:
        """Continue a search on this plan, for about `budget` operations.

        Returns the operations that remain.
        """
        return self._paid(search, budget, self.operations, partial(self._search, search))

    def _paid(
        self, search: Search, budget: float, operations: float, run: Callable[[int], None]
    ) -> float:
        """Run a search with the evaluations that a budget affords; return the budget that remains.

        `operations` is the price of an evaluation. The journal gets it for the stages of the run.
        """
        before, first = search.evaluations, self.trainer.journal.count
        run(min(max(2, int(max(budget, 0.0) / operations)), MOST_EVALUATIONS))
        self.trainer.journal.price(first, operations=operations)
        return budget - (search.evaluations - before) * operations

    def _search(self, search: Search, evaluations: int) -> None:
        """Continue a search for at most `evaluations`, for plans with one price."""
        raise NotImplementedError

    def truncated(self, representation: Representation) -> dict[GroupKey, float]:
        """Return the fraction of the learned noise variance that is truncated variance of the
        field, for each group.

        A search on a lattice learns the variance that the lattice truncates as noise. The posterior
        counts this variance as part of the field.
        """
        return {}


class ByKernel(Plan):
    """A plan under the exact kernel."""

    @property
    def operations(self) -> float:
        return cubic(self.shape[0])

    def inference(self) -> Inference:
        return self.trainer.exact_inference(self.data)


@dataclass(eq=False)
class OfSubset(ByKernel):
    """A search on a subset of the observed values under the exact kernel.

    The subset is chosen so that distances of all lengths occur between its points.
    """

    numbers: int  # values of the subset
    of: float  # values of all data
    of_all = False

    @property
    def shape(self) -> tuple[float, int | None]:
        return self.numbers, None

    @property
    def loss(self) -> float:
        return loss_of_rows(self.trainer, self.numbers, self.of)

    @cached_property
    def data(self) -> Data:
        """The subset. It has weights after a search with Student-t noise."""
        return self.trainer.subset(self.numbers)

    def _search(self, search: Search, evaluations: int) -> None:
        self.trainer.curves.end()
        label = f"{self.name}, {self.data.survey.num_points} points"
        parts = self.trainer, search, self.data, self.trainer.exact_inference, label
        # At the optimum of a subset, k hyperparameters have a sampling error of k/2 nats.
        nats = NEGLIGIBLE * 0.5 * self.trainer.num_learned
        self.data = maximise(*parts, nats=nats, evaluations=evaluations)


@dataclass(eq=False)
class OfAll(ByKernel):
    """All observed values under the exact kernel."""

    data: Dataset

    @cached_property
    def size(self) -> int:
        """The number of rows. Observations at equal positions are merged into one row."""
        return self.trainer.exact_inference(self.data).size

    @property
    def shape(self) -> tuple[float, int | None]:
        return self.size, None

    def _search(self, search: Search, evaluations: int) -> None:
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
    """All observed values on the features of a rule without hyperparameters, with loss 0."""

    features: FeatureInference
    given: bool

    @property
    def data(self) -> Data:
        return self.features.data

    def inference(self) -> Inference:
        return self.features

    def _search(self, search: Search, evaluations: int) -> None:
        parts = self.trainer, search, self.features.data, self.features.of, self.name
        self.features = self.features.of(maximise(*parts, evaluations=evaluations))


@dataclass(eq=False)
class OnLattice(ByFeatures):
    """Observed values on a sequence of lattices, each made for the present hyperparameters."""

    representation: Representation
    level: Callable[[Representation], Grid]  # the lattice for a representation
    factor: float  # the largest factor by which frequencies may move on one lattice
    of: float  # values of all data
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
        mergeable = every and data.survey.num_points <= MANY
        exact = mergeable and has_covariance(self.trainer.kernel, data)
        return OfAll(self.trainer, "exact kernel", data) if exact else None

    def inference(self) -> FeatureInference | None:
        """The inference on the present lattice; None if it would need too many features."""
        try:
            return self.representation.inference(self.level(self.representation))
        except GridBudgetError:
            return None

    @property
    def loss(self) -> float:
        """The loss by the columns plus the loss by the rows, in nats."""
        numbers = self.representation.data.num_values
        columns = loss_of_share(self.representation.misread_share(self.level), self.of)
        return columns + loss_of_rows(self.trainer, numbers, self.of)

    def search(self, search: Search, budget: float) -> float:
        self._keep()
        budget = self._follow(search, budget, self.level)
        # A lattice that serves fewer lengthscales truncates less with the same number of features.
        lossy = self.loss > aim(self.of) and not (self.given or self._fits())
        if lossy and 2 * self.operations <= budget:
            self.factor = math.sqrt(self.factor)
            self.level = partial(self.level, trust_factor=self.factor)
            budget = self._follow(search, budget, self.level)
        return budget

    def _fits(self) -> bool:
        """Whether the lattice reaches its tolerance with the permitted number of features."""
        representation = self.representation
        return not representation.on_lattice or representation.fits(self.level(representation))

    def truncated(self, representation: Representation) -> dict[GroupKey, float]:
        if self.given or not representation.on_lattice:
            return {}
        return representation.training_cuts(self.level)

    def _keep(self) -> None:
        """Compute the statistics of one pass over the data, if they serve all lattices."""
        if not self.keeps:
            return
        with self.trainer.journal.stage(f"statistics of {self.trainer.survey.num_points} points"):
            try:
                self.representation = self.representation.keeping()
            except GridBudgetError as error:
                self.trainer.journal.note(f"no grid for all statistics was built: {error}")

    def _follow(
        self,
        search: Search,
        budget: float,
        level: Callable[[Representation], Grid],
        rounds: int = MOST_EVALUATIONS,
    ) -> float:
        """Search on one lattice after another until all lengthscales stay in the range of one.

        Returns the operations that remain.
        """
        trainer, start = self.trainer, search.evaluations
        lossy, origin = self.loss > aim(self.of), search.coordinates.get()
        for _ in range(rounds):
            try:
                inference = self.representation.inference(level(self.representation))
            except GridBudgetError as error:
                trainer.journal.note(f"no {self.name} was built: {error}")
                return budget
            operations = operations_on(inference, trainer)
            if search.evaluations > start and 2 * operations > budget:
                return budget
            budget = self._paid(search, budget, operations, partial(self._on, inference, search))
            if search.settled or (lossy and self.misleads(search, origin)):
                break
        return budget

    def misleads(self, search: Search, origin: Float[np.ndarray, "k"]) -> bool:
        """Return whether the search should not have left its origin, and go back there if so.

        If a lattice truncates much at the origin, the evidence on it may grow towards
        hyperparameters that need fewer features, even if the evidence under the exact kernel falls.
        The latter is compared for a subset, in which k hyperparameters gain about k/2 nats by
        chance.
        """
        trainer, end = self.trainer, search.coordinates.get()
        if self.given or self.refreshes or trainer.tracks:
            return False
        gain = trainer.value(self._subset)
        search.coordinates.set(origin)
        gain -= trainer.value(self._subset)
        if gain >= -len(end):
            search.coordinates.set(end)
            return False
        trainer.journal.note(
            f"the search on a {self.name} is not used: the lattice truncates much, and a subset "
            f"lost {-gain:.2g} nats of log evidence"
        )
        return True

    @cached_property
    def _subset(self) -> Inference:
        """The subset that `misleads` compares, under the exact kernel if it is available."""
        return self.trainer.inference(self.trainer.subset(SUBSETS[1]))

    def _on(self, inference: FeatureInference, search: Search, evaluations: int) -> None:
        """Search on one lattice."""
        trainer = self.trainer
        label = f"{self.name}, {inference.num_features(trainer.kernel)} features"
        options = {"trust_factor": self.factor, "evaluations": evaluations}
        with warnings.catch_warnings():  # the next round makes a new grid
            warnings.filterwarnings("ignore", ".*call redraw", GridWarning)
            data = maximise(trainer, search, inference.data, inference.of, label, **options)
        self.representation = replace(self.representation, data=data)


@dataclass(eq=False)
class OfCurves(OnLattice):
    """Learned spectra on a lattice with few features, then on one with more.

    Each search ends with an extrapolation of the curves: data on a small lattice say little about
    the short waves of a larger one. Only the last search continues curves beyond their knots.
    Before, such a continuation could replace a shift of the curve, since a power law has no scale.
    """

    def search(self, search: Search, budget: float) -> float:
        self._keep()
        few = partial(Representation.fine, most=COARSE_FEATURES)
        budget = self._follow(search, budget, few)
        self._extrapolate(few)
        self.trainer.curves.end(continued=True)
        budget = self._follow(search, budget, self.level, rounds=2)
        self._extrapolate(self.level)
        return budget

    def _extrapolate(self, level: Callable[[Representation], Grid]) -> None:
        """Continue the curves in a straight line beyond the edge of the lattice."""
        try:
            inference = self.representation.inference(level(self.representation))
            self.trainer.curves.extrapolate(inference)
        except GridBudgetError as error:
            self.trainer.journal.note(f"the learned spectra were not extrapolated: {error}")


def operations_on(inference: FeatureInference, trainer: Trainer) -> float:
    """The approximate operations of an evaluation on features, with its gradient."""
    with torch.no_grad():
        expansion = expand(trainer.kernel, inference.draws, inference.data.num_inputs)
    if inference.prefers_dual_algebra(expansion):
        blocks = expansion.num_outputs if inference.has_dual_blocks(expansion) else 1
        size = inference.num_values / blocks
        return blocks * cubic(size) + 6.0 * size**2 * expansion.num_features
    moving = inference.draws[0].shared_columns() is None  # each evaluation sums over the data
    points = inference.data.survey.num_points if moving else 0
    blocks = sum(len(part.y) for part in inference.data.tracks)
    columns = expansion.num_columns
    return 6.0 * (points + blocks) * columns**2 + 2.0 * expansion.cholesky_cost


def loss_of_rows(trainer: Trainer, numbers: float, of: float) -> float:
    """Return the expected loss of log evidence of a search on m = `numbers` of M = `of` observed
    values.

    The loss is 10 k/2 (M/m − 1) nats for k learned hyperparameters.
    """
    return 0.5 / NEGLIGIBLE * trainer.num_learned * max(of / numbers - 1.0, 0.0)


price = attrgetter("operations")


class Priced(NamedTuple):
    """A plan with its price and its loss at the present hyperparameters."""

    plan: Plan
    operations: float
    loss: float


def next_plan(
    plans: Sequence[Plan], lost: float, num_values: float, budget: float, of_all: bool
) -> Priced | None:
    """Return the plan of the next search; None if no plan in the budget improves on the result.

    The target is the cheapest plan of all data that loses at most `aim`. If there is none, it is
    the plan of all data with the smallest loss. If the present result already loses less, the next
    plan is a subset under the exact kernel, also after a search on all data with a lattice that
    truncates much. Plans that cost far less precede the target.

    Args:
        plans: the plans without a search so far.
        lost: the loss of the present result, in nats.
        num_values: the number of observed values.
        budget: the remaining operations.
        of_all: whether a search on all data has been made.
    """
    priced = [Priced(plan, plan.operations, plan.loss) for plan in plans]
    # columns that the user has chosen, or that have no alternative, are searched once
    chosen = [each for each in priced if each.plan.given and not of_all]
    priced = [each for each in priced if 2 * each.operations <= budget or each in chosen]
    better = [each for each in priced if 2 * each.loss < lost]
    most = 0.5 * lost if of_all else max(lost, aim(num_values))
    targets = [each for each in priced if each.plan.of_all]
    targets = [each for each in targets if each.loss <= most or each in chosen]
    if not targets:
        subsets = [each for each in better if not each.plan.of_all]
        return min(subsets, key=price, default=None)
    good = [each for each in targets if each.loss <= aim(num_values)]
    target = min(good, key=price, default=min(targets, key=lambda each: each.loss))
    if of_all:
        return target
    on_the_way = [each for each in better if RATIO * each.operations <= target.operations]
    return min(on_the_way, key=price, default=target)


def lost_at_first(plan: Plan, num_values: float) -> float:
    """Return the expected loss of the starting values, in nats.

    They come from a search on a subset of `SUBSET_VALUES` values, whose loss is returned. It is ∞
    for a kernel without a covariance, whose starting values are from random features.
    """
    if not has_covariance(plan.trainer.kernel, plan.data):
        return math.inf
    return loss_of_rows(plan.trainer, min(SUBSET_VALUES, num_values), num_values)


def climb(search: Search, plans: Sequence[Plan], num_values: float) -> Plan | None:
    """Search on plans of rising price, until a plan of all data loses at most `aim`.

    Each plan begins at the start or at the end of the last search, whichever has more evidence on
    this plan: a search on few values or coarse columns may have moved in a wrong direction.

    Args:
        search: the search on a subset for starting values, which continues.
        plans: the plans that data and kernel permit.
        num_values: the number of observed values.

    Returns:
        The plan of the last search; None without a search.

    Warns:
        SearchWarning: if the loss of the last plan, by the gradient, exceeds `aim`.
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
        start = search.coordinates.get()
        first = trainer.journal.count
        budget = plan.search(search, budget)
        left.remove(plan)
        if search.evaluations == before:  # no lattice could be built
            continue
        visited = [start, search.coordinates.get()]
        last, measured, lost = measured_loss(plan, num_values, budget)
        budget -= measured
        of_all = of_all or plan.of_all
        trainer.journal.price(first, loss=lost)
    if not of_all and lost > aim(num_values):
        trainer.journal.note(
            "the hyperparameters are those of a subset: within the budget of operations, no search "
            "on all data is expected to improve on them"
        )
    if measured and lost > aim(num_values):
        warnings.warn(
            f"the search for hyperparameters on a {last.name} ended about {lost:.2g} nats below "
            "the maximum of the log evidence under the exact kernel; to search under the exact "
            "kernel, call fit again with warm_start=True and "
            f"frequencies=gp_orff.Auto(exact_values={num_values:.0f})",
            SearchWarning,
            stacklevel=2,
        )
    return last


def loss_by_gradient(plan: Plan) -> float:
    """Return the loss of a plan from the gradient g of the log evidence under its reference, in
    nats.

    The loss is ½ gᵀH⁻¹g, the gain that a search on the reference would predict.
    """
    search, reference = plan.trainer.new_search(), plan.reference
    label = f"gradient under the {reference.name}"
    plan.trainer.search(search, reference.inference(), label, evaluations=1)
    return search.expected_gain


def measured_loss(plan: Plan, num_values: float, budget: float) -> Priced:
    """Return a plan after its search, with its loss and the operations to compute the loss.

    By default, the loss follows from a formula, without any operations. If this loss is only
    slightly below `aim`, the loss is instead computed from the gradient under the reference, if the
    budget allows. If the loss is above `aim`, other plans follow anyway.
    """
    lost, most, reference = plan.loss, aim(num_values), plan.reference
    unsure = NEGLIGIBLE * most < lost <= most and not plan.given
    price = 2 * reference.operations if unsure and reference is not None else math.inf
    return Priced(plan, price, loss_by_gradient(plan)) if price <= budget else Priced(plan, 0, lost)


def route(plans: Sequence[Plan], num_values: float) -> list[Priced]:
    """The plans that `climb` would take if the hyperparameters did not change."""
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
    """Set the hyperparameters to those of `visited` with the largest evidence on the plan.

    The function also tries each minor term at the lengthscale of the other terms.
    """

    @torch.no_grad()
    def value(u: Float[np.ndarray, "k"]) -> float:
        search.coordinates.set(u)
        inference = plan.inference()
        if inference is None:
            return -math.inf
        return plan.trainer.value(inference) + float(plan.trainer.log_prior(search))

    # weights belong to the last hyperparameters; on many data, each evaluation is expensive
    if plan.refreshes or plan.keeps:
        return
    moved = with_common_lengths(plan.trainer.kernel, search.coordinates)
    if len(moved) + len(visited) == 1:
        return
    # the last result precedes equal ones; a minor term moves if this gains a nat
    rated = [(value(u), u) for u in reversed(visited)] + [(value(u) - NATS, u) for u in moved]
    search.coordinates.set(max(rated, key=itemgetter(0))[1])


def plans_of(trainer: Trainer, representation: Representation) -> list[Plan]:
    """The plans that data, kernel and the limits of the user permit."""
    data, rule = representation.data, representation.rule
    numbers, exact = data.num_values, data.revisitable and has_covariance(trainer.kernel, data)
    enough = exact and 2 * SUBSETS[0] <= numbers
    sizes = sorted({min(size, numbers // 2) for size in SUBSETS}) if enough else []
    plans = [OfSubset(trainer, "exact kernel", size, numbers) for size in sizes]
    if rule is None:
        return [*plans, OfAll(trainer, "exact kernel", data)]
    if not representation.follows:
        name = "given grid" if representation.grid else repr(rule)
        given = representation.auto is None or not exact  # without another plan, any price is paid
        return [*plans, OnFeatures(trainer, name, representation.inference(rule), given)]
    if exact and representation.auto and not data.tracks:
        most = max(representation.auto.exact_values, rule.max_features or MOST_EXACT)
        under_kernel = OfAll(trainer, "exact kernel", data)
        if representation.may_be_exact(most) and under_kernel.size <= most:
            plans.append(under_kernel)
    return plans + lattices_of(trainer, representation)


def lattices_of(trainer: Trainer, representation: Representation) -> list[Plan]:
    """Plans on lattices: few features for a sample of the points, then more for all."""
    data, plans, numbers = representation.data, [], representation.data.num_values

    def of(rows: Data) -> Representation:
        return replace(representation, data=rows)

    if not representation.on_lattice:
        level = partial(Representation.fine, returned=True)
        return [OnLattice(trainer, "waves", representation, level, FINE_FACTOR, numbers)]
    many = data.revisitable and not data.tracks and data.survey.num_points > MANY
    many = many and not has_weights(trainer, data)
    sample = Dataset.in_memory(trainer.survey.sample) if many else data.sampled(COARSE_FEATURES)
    coarse, fine = Representation.coarse, Representation.fine
    if representation.rule.max_features is not None:
        # the model truncates the same variance as its posterior, so its evidence needs this grid
        fine = partial(Representation.fine, returned=True)
    plans.append(OnLattice(trainer, "coarse grid", of(sample), coarse, COARSE_FACTOR, numbers))
    kind = OfCurves if trainer.curves else OnLattice
    few = data.sampled(MOST_TRAINING)
    parts = fine, FINE_FACTOR, numbers
    plans.append(kind(trainer, "fine grid", of(few), *parts, keeps=many))
    if few is not data:
        plans.append(OnLattice(trainer, "fine grid, all blocks", representation, *parts))
    return plans
