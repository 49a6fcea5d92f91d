"""Plans of a fit: predicted and true losses of evidence, and the order of plans."""

import copy
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel

import gp_orff
from gp_orff.data.reading import Options
from gp_orff.fitting import plans, trainer
from gp_orff.fitting.coordinates import Coordinates
from gp_orff.fitting.journal import Journal, Progress
from gp_orff.fitting.robust_em import start_with_weights
from gp_orff.fitting.search import SearchWarning
from gp_orff.fitting.starting_values import with_common_lengths
from gp_orff.fitting.strategy import trainer_of
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.representation import Representation
from tests.support.fields import draw, swirl
from tests.support.fields import unit_cube as points


def readings(number, noise=0.1, seed=0):
    x = points(number, seed)
    return x, swirl(x) + noise * draw(number, 2, seed=seed + 1)


def model_of(base=None, **options):
    kernel = gp_orff.DivergenceFreeKernel(base or RBFKernel(), num_dims=2)
    return gp_orff.VectorFieldGP(kernel, **options)


class Fixed(plans.Plan):
    """A plan that costs and loses what it is told, and whose search does nothing."""

    def __init__(self, name, operations, loss):
        self.trainer, self.name = None, name
        self._operations, self._loss = operations, loss

    operations = property(lambda self: self._operations)
    loss = property(lambda self: self._loss)
    shape = property(lambda self: (1, None))

    def inference(self):
        return None

    def search(self, search, budget):
        return budget


class Subset(Fixed, plans.OfSubset):
    pass


def chosen(*given, lost=50.0, budget=1e12, whole=False):
    found = plans.next_plan(given, lost, 1000.0, budget, whole)
    return found and found.plan.name


def test_the_cheapest_plan_that_loses_little_is_the_target():
    rough, fine = Fixed("rough", 1e6, 30.0), Fixed("fine", 1e7, 0.5)
    finest = Fixed("finest", 1e9, 0.0)
    assert chosen(fine, finest) == "fine"
    assert chosen(rough, finest) == "finest"  # rough does not halve what was lost
    assert chosen(rough, fine, finest, budget=1.5e9) == "fine"
    assert chosen(rough, finest, budget=1e7) == "rough"  # the best that is affordable
    assert chosen(finest, budget=1e7) is None


def test_cheap_plans_are_on_the_way_to_dear_ones():
    some, exact = Subset("some", 1e6, 10.0), Fixed("exact", 1e9, 0.0)
    assert chosen(some, exact) == "some"
    assert chosen(some, exact, whole=True) == "exact"
    assert chosen(Subset("some", 1e6, 30.0), exact) == "exact"
    assert chosen(Subset("some", 5e8, 10.0), exact) == "exact"  # a half of the price saves nothing
    assert chosen(some, Fixed("poor", 1e7, 90.0)) == "some"  # worse than what was reached


def test_what_all_data_have_reached_is_halved_or_kept():
    assert chosen(Fixed("next", 1e6, 30.0), whole=True) is None
    assert chosen(Fixed("next", 1e6, 20.0), whole=True) == "next"
    assert chosen(Fixed("next", 1e6, 30.0), Subset("some", 1e9, 20.0), whole=True) == "some"


@pytest.mark.parametrize("numbers", [100, 300])
def test_the_loss_of_a_subset_is_that_of_fewer_numbers(numbers):
    """k/2 (M/m − 1) with k = 3, ten times."""
    learner = SimpleNamespace(num_learned=3)
    plan = plans.OfSubset(learner, "some", numbers, 600.0)
    assert plan.loss == pytest.approx(15 * (600 / numbers - 1))


def test_a_search_on_a_subset_ends_at_a_tenth_of_its_sampling_error(monkeypatch):
    """k/2 nats for k hyperparameters, so that a search for many of them ends earlier."""
    x, y = readings(300)
    model = model_of().condition(x, y)
    parts = model.kernel, model.state.likelihoods, None, model.state.data.survey
    (rbf,) = (part for part in model.kernel.modules() if isinstance(part, RBFKernel))
    evaluations = []
    for learned in (2e-5, 3, 2e5):
        rbf.lengthscale = 1.0
        own = Trainer(*parts, Journal(Progress()))
        monkeypatch.setitem(vars(own), "num_learned", learned)
        search = own.new_search()
        plans.OfSubset(own, "some", 150, 600).search(search, 1e12)
        assert search.expected_gain <= 0.05 * learned
        evaluations.append(search.evaluations)
    assert evaluations[0] > evaluations[1] > evaluations[2] == 1


def test_each_plan_begins_at_the_better_end_of_the_last_search(monkeypatch):
    """Not at a result of earlier searches."""
    rated = []

    def rate(search, plan, visited):
        rated.append([float(u[0]) for u in visited])

    class Moving(Fixed):
        def search(self, search, budget):
            search.evaluations += 1
            search.coordinates.set(search.coordinates.get() + 0.01)
            return budget

    x, y = readings(60)
    model = model_of().condition(x, y)
    parts = model.kernel, model.state.likelihoods, None, model.state.data.survey
    own = Trainer(*parts, Journal(Progress()))
    steps = [Moving("a", 1.0, 500.0), Moving("b", 10.0, 100.0), Moving("c", 100.0, 5.0)]
    for step in steps:
        step.trainer, step.of_all, step.data = own, step is steps[-1], model.state.data
    monkeypatch.setattr(plans, "_go_to_best", rate)
    search = own.new_search()
    start = float(search.coordinates.get()[0])
    plans.climb(search, steps, 1e5)
    assert len(rated) == 3
    for number, each in enumerate(rated[1:]):
        assert each == pytest.approx([start + 0.01 * number, start + 0.01 * (number + 1)], abs=1e-6)


@pytest.fixture(scope="module")
def exact_fit():
    """Tests must not change it."""
    model = model_of(MaternKernel(nu=2.5), frequencies=gp_orff.Auto(exact_values=10**6))
    return model.fit(*readings(400, noise=0.05), progress=False)


def lattice_of(model, features, **options):
    """A search of all data of a model on lattices with at most so many features."""
    kernel, likelihoods, data = model.kernel, model.state.likelihoods, model.state.data
    rule = gp_orff.Grid(domain=data.box, **options)
    grid = Representation(kernel, likelihoods, rule, data, rule)
    own = Trainer(kernel, likelihoods, None, data.survey, Journal(Progress()))
    level = partial(Representation.fine, most=features)
    return plans.OnLattice(own, "grid", grid, level, 1.2, data.num_values)


@pytest.mark.slow
@pytest.mark.parametrize("features", [120, 180, 240])
def test_the_loss_of_a_grid_is_that_of_its_optimum(features, exact_fit):
    """By formula within a factor of ten of the evidence that is missing, where that is more than a
    nat; of less it says at most three. By gradient within a factor of three."""
    model = copy.deepcopy(exact_fit)
    best = model.log_marginal_likelihood().item()
    # no other plan replaces a lattice with a given number of features
    plan = lattice_of(model, features, max_features=features)
    plan.search(plan.trainer.new_search(), 1e12)
    missing = best - model.log_marginal_likelihood().item()
    assert plan.loss > 0.1 * missing if missing > 1 else plan.loss < 3
    assert missing / 3 < plans.loss_by_gradient(plan) < 3 * missing


def test_each_lattice_of_a_search_is_paid_for():
    """From a lengthscale far above the best one: lattices with more and more features."""
    x, y = readings(300)
    model = model_of().condition(x, y)
    (rbf,) = (part for part in model.kernel.modules() if isinstance(part, RBFKernel))
    rbf.lengthscale = 5.0
    plan = lattice_of(model, 2000)
    left, stages = plan.search(plan.trainer.new_search(), 1e12), plan.trainer.journal.stages
    prices = [stage.operations for stage in stages]
    assert len(set(prices)) > 2
    assert sorted(prices)[-1] > 2 * sorted(prices)[0]
    paid = sum(stage.evaluations * stage.operations for stage in stages)
    assert left == pytest.approx(1e12 - paid, rel=1e-12)


def test_a_lattice_that_truncates_much_may_not_lead_away_from_better_evidence(exact_fit):
    """A subset judges under the exact kernel, and changes of few nats are chance."""
    plan = lattice_of(copy.deepcopy(exact_fit), 60)
    own = plan.trainer
    search = own.new_search()
    origin = search.coordinates.get()
    search.coordinates.set(origin + 0.01)
    assert not plan.misleads(search, origin)
    assert search.coordinates.get() == pytest.approx(origin + 0.01)
    search.coordinates.set(origin + 1.0)
    assert plan.misleads(search, origin)
    assert search.coordinates.get() == pytest.approx(origin)
    assert "subset lost" in own.journal.notes[-1]
    plan.search(search, 1e12)  # 60 features: the lattice prefers longer lengthscales
    exact = own.inference(plan.data)
    after = own.value(exact)
    search.coordinates.set(origin)
    assert after > own.value(exact) - 2 * len(origin)


@pytest.mark.slow
def test_a_grid_with_too_few_features_is_made_again_for_fewer_lengthscales(monkeypatch, exact_fit):
    def evidence(most_lost):
        monkeypatch.setattr(plans, "aim", lambda number: most_lost)
        model = copy.deepcopy(exact_fit)
        state = model.state
        parts = model.kernel, state.likelihoods, None, state.data.survey, Journal(Progress())
        rule = gp_orff.Grid(domain=state.data.box)
        grid = Representation(model.kernel, state.likelihoods, rule, state.data, rule)
        own, level = Trainer(*parts), partial(Representation.fine, most=120)
        plan = plans.OnLattice(own, "grid", grid, level, 1.2, state.data.num_values)
        plan.search(own.new_search(), 1e12)
        return model.log_marginal_likelihood().item(), plan.factor

    (once, wide), (again, narrow) = evidence(1e9), evidence(1.0)
    assert (wide, narrow) == (1.2, pytest.approx(1.2**0.5))
    assert again > once + 1


class OnGrid(Fixed):
    """A plan whose loss under the kernel itself can be measured, and which a search can visit."""

    reference, refreshes = Fixed("exact", 1e9, 0.0), False

    def search(self, search, budget):
        search.evaluations += 1
        return budget - self.operations


@pytest.mark.parametrize(
    ("foreseen", "budget", "found"),
    [(0.05, 1e12, 0.05), (0.5, 1e12, 0.3), (1.5, 1e12, 1.5), (0.5, 1e9, 0.5)],
)
def test_a_loss_is_measured_where_its_formula_does_not_decide(monkeypatch, foreseen, budget, found):
    """Between a tenth of a nat and one, and where two evaluations are within the budget."""
    monkeypatch.setattr(plans, "loss_by_gradient", lambda plan: 0.3)
    measured = plans.measured_loss(OnGrid("grid", 1e6, foreseen), 1000.0, budget)
    assert measured.loss == found
    assert measured.operations == (2e9 if found == 0.3 else 0)
    assert plans.measured_loss(Fixed("grid", 1e6, foreseen), 1000.0, budget).loss == foreseen


@pytest.mark.parametrize("lost", [0.3, 1.7])
def test_a_measured_loss_above_the_aim_is_told(monkeypatch, lost):
    """In a warning, if nothing better is affordable."""
    monkeypatch.setattr(plans, "has_covariance", lambda *parts: True)
    monkeypatch.setattr(plans, "loss_by_gradient", lambda plan: lost)
    journal = SimpleNamespace(count=0, price=lambda first, loss: None)
    plan, u = OnGrid("grid", 1e6, 0.5), SimpleNamespace(get=lambda: None)
    plan.data = None
    plan.trainer = SimpleNamespace(
        num_learned=3, journal=journal, likelihoods={}, kernel=RBFKernel()
    )
    search = SimpleNamespace(evaluations=0, coordinates=u)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert plans.climb(search, [plan], 1000.0) is plan
    assert [w.category for w in caught] == [SearchWarning] * (lost > 1)
    assert all("1.7 nats" in str(w.message) for w in caught)


@pytest.mark.slow
def test_a_plan_is_what_the_fit_does():
    """On the exact kernel, and on a grid; the model is left as it was."""
    x, y = readings(600)
    model = model_of()
    before = {name: value.clone() for name, value in model.named_parameters()}
    plan = model.plan(x, y)
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name])
    report = model.fit(x, y, progress=False).report
    assert (plan.features is None) == (report.method == "exact")
    last = report.stages[-1]
    assert last.name.split(",")[0] == plan.searches[-1].name
    assert last.loss == pytest.approx(plan.loss, abs=0.5)
    assert 0 < plan.seconds < 60
    assert plan.mebibytes > 0
    assert "expected loss" in str(plan)
    assert plan.to_dict()["numbers"] == 1200
    assert "loss, nats" in str(report)


def test_independent_outputs_cost_what_each_costs():
    """Under a separable kernel, the dual algebra has a block of N points for each output."""

    def price(outputs):
        kernel = gp_orff.SeparableKernel(ScaleKernel(RBFKernel()), torch.eye(outputs))
        model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.MonteCarlo(128))
        last = model.plan(points(200, 0), draw(200, outputs, seed=1)).searches[-1]
        return last.operations

    assert price(10) == pytest.approx(10 * price(1), rel=0.01)


def test_a_plan_of_poor_data_is_a_clear_error():
    x, y = readings(20)
    y[3] = float("nan")
    with pytest.raises(ValueError, match="missing"):
        model_of().plan(x, y)


@pytest.mark.slow
def test_rounds_with_weights_leave_a_lattice_that_no_longer_serves():
    """From a lengthscale three times too long, rounds of EM go on to lattices for where they are;
    on the first one they would end at half of the lengthscale, and 3900 nats below."""
    x, y = readings(500)
    y[::20] += 4.0
    ended = []
    for factor in (1.0, 3.0):
        likelihood = gp_orff.MultitaskStudentTLikelihood(2)
        model = model_of(likelihood=likelihood).double()
        parts = model.kernel, {"": model.likelihood}, None, gp_orff.Auto(exact_values=100)
        data = model.copied(x, y, Options())
        learner, data = trainer_of(*parts, data, Progress())
        data = start_with_weights(learner, data, warm_start=False)
        (base,) = (part for part in model.kernel.modules() if isinstance(part, RBFKernel))
        base.lengthscale = factor * base.lengthscale
        representation = Representation.of(*parts[:2], parts[3], data)
        every = {own.name: own for own in plans.plans_of(learner, representation)}
        plan = every["fine grid"]
        plan.search(learner.new_search(), 1e12)
        ended.append((base.lengthscale.item(), learner.value(plan.inference())))
    assert ended[1][0] == pytest.approx(ended[0][0], rel=0.05)
    assert ended[1][1] == pytest.approx(ended[0][1], abs=1.0)


def test_minor_terms_are_tried_at_the_length_of_the_others():
    """With the variance that they have; a term that matters, or one alone, is not tried."""
    kernel = gp_orff.HelmholtzKernel(num_dims=2).double()
    turning, straining = kernel.divergence_free, kernel.curl_free
    lengths = [part.base_kernel.base_kernel for part in (turning, straining)]
    lengths[0].lengthscale, lengths[1].lengthscale = 0.5, 0.03
    turning.outputscale = 1.0
    coordinates = Coordinates(kernel)

    def variance():
        return straining(torch.zeros(1, 2).double()).to_dense().trace().item()

    straining.outputscale = 1e-5  # 1e-5 / 0.03² against 1 / 0.5²: a three-hundredth
    before, present = variance(), coordinates.get()
    (moved,) = with_common_lengths(kernel, coordinates)
    assert np.array_equal(coordinates.get(), present)
    coordinates.set(moved)
    assert lengths[1].lengthscale.item() == pytest.approx(0.5)
    assert lengths[0].lengthscale.item() == pytest.approx(0.5)
    assert variance() == pytest.approx(before)
    straining.outputscale = 1.0
    assert with_common_lengths(kernel, coordinates) == []
    alone = gp_orff.CurlFreeKernel(num_dims=2).double()
    assert with_common_lengths(alone, Coordinates(alone)) == []


def test_subsets_on_the_way_cost_about_a_ratio_more_each():
    """Of 4000 numbers, up to a half; from a fifth at once, the budget would end the last search."""
    model = model_of(frequencies=gp_orff.Auto(exact_values=10**6))
    searches = model.plan(*readings(2000)).searches
    assert [search.rows for search in searches] == [1200, 2000, 4000]


def test_random_features_of_many_data_are_left_if_they_are_not_affordable():
    """A fit that chooses them has subsets of the exact kernel; a rule of the user is searched."""
    x, y = readings(5000)  # more than the exact kernel serves
    for rule in (None, gp_orff.QuasiMonteCarlo(2048)):
        kernel = MultitaskKernel(gp_orff.BesselKernel(2, num_dims=2), num_tasks=2)
        options = {} if rule is None else {"frequencies": rule}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(plans, "BUDGET", 1e11)
            searches = gp_orff.VectorFieldGP(kernel, **options).plan(x, y).searches
        assert searches[0].features is None
        assert (searches[-1].features is None) == (rule is None)


def test_starting_values_on_random_features_have_an_unknown_loss():
    """Without a covariance a fit goes on to a lattice, however much this loses."""
    field = gp_orff.SpectralMatrixKernel(
        MaternKernel(nu=0.5),
        lambda omega: torch.eye(2).to(omega).expand(len(omega), 2, 2),
        num_outputs=2,
        num_dims=2,
    )
    searches = gp_orff.VectorFieldGP(ScaleKernel(field)).plan(*readings(60)).searches
    assert [search.features is None for search in searches] == [False]
    assert searches[-1].loss > 1


def test_the_curvature_of_a_search_serves_lattices_that_are_made_again(monkeypatch):
    """The information of the data is computed on the first one, and not on the second."""
    taken, average = [], trainer.average
    monkeypatch.setattr(trainer, "average", lambda *parts: taken.append(1) or average(*parts))
    model = model_of(frequencies=gp_orff.Auto(exact_values=100))
    parts = model.kernel, {"": model.likelihood}, None, gp_orff.Auto(exact_values=100)
    learner, data = trainer_of(*parts, model.copied(*readings(300), Options()), Progress())
    representation = Representation.of(*parts[:2], parts[3], data)
    search, features = learner.new_search(), []
    for most in (70, 200):
        inference = representation.inference(representation.fine(most=most))
        features.append(inference.num_features(learner.kernel))
        learner.search(search, inference, "grid", evaluations=1)
    assert features[0] < features[1]
    assert len(taken) == 1
