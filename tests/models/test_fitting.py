"""The search for hyperparameters: starting values, ranges, representations, saved values."""

import warnings
from functools import partial

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.constraints import Interval, LessThan
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RQKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.noise import noise_of
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Components, GroupKey
from gp_orff.data.reading import Options, read
from gp_orff.data.survey import DataWarning, Distances, Survey, windows
from gp_orff.fitting import coordinates as ranges
from gp_orff.fitting import plans
from gp_orff.fitting.coordinates import Coordinates, parameter_ranges
from gp_orff.fitting.journal import Journal
from gp_orff.fitting.names import parameter_names
from gp_orff.fitting.search import Search
from gp_orff.fitting.starting_values import Start, start_noise, starts
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import FeatureInference
from tests.support.fields import draw, swirl
from tests.support.fields import unit_cube as points

WITHOUT_EXACT = gp_orff.Auto(exact_values=0)


def distances_of(x):
    return Distances(x.numpy(), np.ptp(x.numpy(), axis=0), len(x))


def rational():
    return ScaleKernel(gp_orff.CurlFreeKernel(RQKernel(), num_dims=2)).double()


# -- distances and starting values ------------------------------------------------------------


def test_distances_of_a_lattice():
    """Neighbours are a step apart, whatever repeats and however far one point lies."""
    step = torch.arange(10).double()
    x = torch.cartesian_prod(step, 3 * step)
    found = distances_of(torch.cat([x, x[:7]]))
    assert found.shortest((0, 1)) == pytest.approx(1)
    assert found.typical((1,)) == pytest.approx(3)
    assert found.bulk == pytest.approx([9, 27])
    far = distances_of(torch.cat([x, torch.tensor([[1e5, 1e5]]).double()]))
    assert far.extent == pytest.approx([1e5, 1e5])
    assert far.bulk == pytest.approx([9, 27], rel=0.15)


@pytest.mark.parametrize("num_dims", [3, 400])
def test_lengthscales_reach_beyond_the_distances_of_points(num_dims):
    """With many inputs, points are further apart than along any of them."""
    x = points(300, num_dims=num_dims)
    found, dims = distances_of(x), range(num_dims)
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    assert found.root_mean_square(dims) == pytest.approx(apart.square().mean().sqrt().item())
    nearest = apart.fill_diagonal_(torch.inf).amin(-1)
    assert found.typical(dims) == pytest.approx(nearest.quantile(0.5).item())
    ((length,),) = parameter_ranges(RBFKernel().double(), found).values()
    longest = max(found.extent.max(), found.root_mean_square(dims))
    assert length.high == pytest.approx(3 * longest)


def test_one_place_has_no_distances():
    found = distances_of(torch.ones(5, 2).double())
    assert found.shortest((0, 1)) == found.typical((0, 1)) == 0
    ranges = parameter_ranges(rational(), found)
    for own in ranges.values():
        assert own[0].low < own[0].high


def test_starts_reach_down_to_neighbours():
    """Four clusters a thousandth of their distances wide."""
    centres = torch.tensor([[0.0, 0], [1, 0], [0.3, 1], [0.5, 0.5]]).double()
    x = torch.cat([1e-3 * points(80, seed) + centre for seed, centre in enumerate(centres)])
    shares = sorted({own.share for own in starts(rational(), distances_of(x))})
    assert shares[0] < 1e-3
    even = sorted({own.share for own in starts(rational(), distances_of(points(200)))})
    assert even == pytest.approx([0.05, 0.15, 0.4])


def test_starts_reach_down_to_neighbours_in_time_at_one_place():
    x = torch.zeros(500, 3).double()
    x[:, 2] = torch.linspace(0, 1, 500)
    space = gp_orff.CurlFreeKernel(num_dims=2, active_dims=(0, 1))
    kernel = gp_orff.FieldProductKernel(space, RBFKernel(active_dims=(2,)))
    assert min(own.share for own in starts(kernel, distances_of(x))) < 0.01


@pytest.mark.parametrize("robust", [False, True])
def test_searches_begin_where_no_other_has_been(monkeypatch, robust):
    """With the exponent of the model: what searches set, starting values need not."""
    model = gp_orff.VectorFieldGP(rational())
    if robust:
        model.likelihood = gp_orff.MultitaskStudentTLikelihood(2)
    (base,) = (part for part in model.kernel.modules() if isinstance(part, RQKernel))
    base.alpha, began = 0.6, []
    original = Trainer.search

    def spied(self, search, *parts, **options):
        if search.evaluations == 0:
            began.append(base.alpha.item())
        return original(self, search, *parts, **options)

    monkeypatch.setattr(Trainer, "search", spied)
    x = points(40)
    with gp_orff.settings.check_calibration(False):
        model.fit(x, swirl(x) + 0.1 * draw(40, 2), progress=False)
    assert began[:3] == pytest.approx([0.6] * 3)


def test_windows_hold_all_neighbours():
    """On a line, those of a centre are one run."""
    x = torch.arange(1000).double().unsqueeze(-1)
    assert windows(x, 100, 1).diff().tolist() == [1] * 99
    two = windows(x, 100, 2)
    assert len(two) == 100
    assert sorted(two.diff().tolist())[:98] == [1] * 98
    assert windows(x, 2000, 3).tolist() == list(range(1000))


@pytest.mark.slow
def test_what_varies_over_few_distances_of_neighbours_is_learned():
    """A long wave, and a short one below the noise, which shows only in dense parts of the data.

    Without it the noise variance is 0.36 + 0.5²/2 = 0.485; the evidence is 470 nats less.
    """
    t = torch.linspace(0, 365, 6100).double()
    y = torch.sin(t / 10) + 0.5 * torch.cos(2 * t) + 0.6 * draw(6100, 1).squeeze(-1)
    model = gp_orff.VectorFieldGP(RBFKernel()).fit(t[:, None], y, progress=False)
    assert model.likelihood.noise.item() == pytest.approx(0.36, abs=0.03)
    assert model.kernel.base_kernel.lengthscale.item() < 2


def test_terms_of_a_sum_also_start_alone():
    kernel = gp_orff.HelmholtzKernel(num_dims=2)
    assert {own.dominant for own in starts(kernel, distances_of(points(50)))} == {None, 0, 1}


@pytest.mark.parametrize("rule", [gp_orff.Auto(), WITHOUT_EXACT])
def test_a_far_point_does_not_turn_the_field_into_noise(rule):
    """It is told of, and the map of the others stays what it is without it."""
    x, far = points(120), torch.tensor([[1e4, 1e4]]).double()
    y = swirl(x) + 0.1 * draw(120, 2)
    kernel = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    with pytest.warns(DataWarning, match=r"90 % of the points are within 0\.\d+ in column 0"):
        model.fit(torch.cat([x, far]), torch.cat([y, y[:1]]), progress=False)
    xs = points(60, seed=5)
    field = model.posterior()
    error = field.mean(xs) - swirl(xs)
    assert error.square().mean().sqrt() < 0.08
    assert field.variance(xs).sqrt().max() < 0.3


def of_small_grid():
    rule = gp_orff.Auto(exact_values=0, max_features=500)
    return gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2), frequencies=rule)


@pytest.fixture(scope="module")
def near():
    """Points, vectors, and the field that is learned from them."""
    x = points(400)
    y = swirl(x) + 0.1 * draw(400, 2)
    return x, y, of_small_grid().fit(x, y, progress=False).posterior()


def assert_same(field, expected, xs):
    torch.testing.assert_close(field.mean(xs), expected.mean(xs), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(field.variance(xs), expected.variance(xs), rtol=1e-7, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("far", [1e4, 9.97e36])  # a slip, and a fill value
def test_a_far_point_is_left_out_where_no_grid_serves_it(far, near):
    """The map is that of the others, to the last digit; so under `condition`."""
    x, y, expected = near
    more = torch.cat([x, torch.tensor([[far, far]]).double()]), torch.cat([y, y[:1]])
    model = of_small_grid()
    with pytest.warns(DataWarning) as told:
        model.fit(*more, progress=False)
    assert any("points far from all others are omitted: 1" in str(own.message) for own in told)
    text = "points far from all others are omitted: 1"
    assert any(text in note for note in model.report.notes)
    xs = points(60, seed=5)
    assert_same(model.posterior(), expected, xs)
    with pytest.warns(DataWarning, match="omitted"):
        model.condition(*more)
    assert_same(model.posterior(), expected, xs)


def test_a_model_with_nothing_to_learn_is_fitted():
    x = points(30)
    model = gp_orff.VectorFieldGP(rational()).requires_grad_(False)
    before = [own.clone() for own in model.parameters()]
    model.fit(x, swirl(x), progress=False)
    assert all(map(torch.equal, before[:-2], list(model.parameters())[:-2]))


# -- what moves frequencies ------------------------------------------------------------------


def test_the_ranges_of_a_tree():
    """Every parameter that moves frequencies, within what the points can tell."""
    x = points(100)
    kernel = rational() + MultitaskKernel(
        gpytorch.kernels.SpectralMixtureKernel(num_mixtures=2, ard_num_dims=2), num_tasks=2
    )
    found = parameter_ranges(kernel.double(), distances_of(x))
    names = {name for name, p in kernel.named_parameters() if p in found}
    assert {name.rpartition(".")[2] for name in names} == {
        "raw_lengthscale",
        "raw_alpha",
        "raw_mixture_means",
        "raw_mixture_scales",
    }
    (lengthscale,) = found[kernel.kernels[0].base_kernel.base_kernel.raw_lengthscale]
    assert 0.001 < lengthscale.low < 0.1
    assert lengthscale.high == pytest.approx(3, rel=0.05)


def test_coordinates_stay_where_the_data_can_tell():
    kernel = rational()
    coordinates = Coordinates(kernel, ranges=parameter_ranges(kernel, distances_of(points(100))))
    coordinates.set(coordinates.low)
    assert kernel.base_kernel.base_kernel.alpha.item() == pytest.approx(0.01)
    names = parameter_names(kernel, {})
    assert len(coordinates.reached(names)) == 3
    assert "alpha = 0.01 is at the lower bound of the search" in "".join(coordinates.reached(names))
    coordinates.set(coordinates.high)
    assert kernel.base_kernel.base_kernel.alpha.item() == pytest.approx(1e3)
    coordinates.set(0.5 * (coordinates.low + coordinates.high))
    assert coordinates.reached(names) == []


def test_a_grid_sees_alpha_leave():
    """As far as lengthscales may move, and no farther."""
    x = points(60)
    kernel = gp_orff.CurlFreeKernel(RQKernel(), num_dims=2).double()
    kernel.base_kernel.lengthscale = 0.5
    kernel.base_kernel.alpha = 2.0
    orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, max_features=500))
    orff(x).to_dense()
    kernel.base_kernel.alpha = 0.1  # ℓ √(α / (α + 1)) falls to 0.37 of what it was
    with pytest.warns(gp_orff.GridWarning, match="outside its range"):
        orff(x).to_dense()


@pytest.mark.slow
def test_bounds_that_were_reached_are_reported():
    """Gaussian data: no rational quadratic kernel is as smooth as they are."""
    x = points(60)
    model = gp_orff.VectorFieldGP(rational()).fit(x, 0.2 * x + 1e-3 * draw(60, 2), progress=False)
    text = "is at the upper bound of the search: the data do not determine it"
    assert any(text in note for note in model.report.notes)


# -- searches ----------------------------------------------------------------------------------


def test_errors_in_a_search_are_told():
    """A step that fails is taken back; the search goes on to the optimum."""
    kernel = RBFKernel().double()
    calls = []

    def objective():
        calls.append(kernel.lengthscale.item())
        if len(calls) == 2:
            raise torch.linalg.LinAlgError("no Cholesky factor")
        return -100 * (kernel.lengthscale.log() - 0.5).square().sum()

    search = Search(Coordinates(kernel))
    search.run(objective, 10)
    assert search.failures == ["no Cholesky factor"]
    assert kernel.lengthscale.log().item() == pytest.approx(0.5, abs=1e-2)


def rough(number, seed=0):
    """A field with structure from the extent down to the distances between points."""
    x, generator = points(number, seed), torch.Generator().manual_seed(seed + 1)
    waves = 40 * torch.rand(60, 2, generator=generator).double() ** 2 * 3
    phases = 6.3 * torch.rand(60, 1, generator=generator).double().mT
    sizes = draw(60, 2, seed=seed + 2) / (1 + waves.norm(dim=-1, keepdim=True) / 10)
    return x, torch.sin(x @ waves.mT + phases) @ sizes / 3 + 0.1 * draw(number, 2, seed=seed + 3)


@pytest.mark.slow
def test_a_small_budget_of_features_is_told():
    """The fit is no worse than its starting values, and the width of error bars is warned of."""
    x, y = rough(170)
    kernel = gp_orff.HelmholtzKernel(MaternKernel(nu=1.5), num_dims=2)
    rule = gp_orff.Auto(exact_values=0, max_features=200)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    with pytest.warns(gp_orff.GridWarning, match="times the noise variance"):
        model.fit(x, y, progress=False)
    assert any("times the noise variance" in note for note in model.report.notes)
    reached = model.log_marginal_likelihood().item()
    at_starts = [own for own in model.report.stages if own.name.startswith("starting values")]
    assert reached / y.numel() > at_starts[0].nats_per_number - 0.5


# -- exact or grid -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("potential", "kind"),
    [(RBFKernel(), FeatureInference), (MaternKernel(nu=1.5), ExactInference)],
)
def test_the_cheaper_of_exact_kernel_and_grid(potential, kind):
    """Few features hold an RBF field of 1020 numbers; a rough one would take more."""
    x = points(510)
    y = swirl(x) + 0.1 * draw(510, 2)
    kernel = gp_orff.DivergenceFreeKernel(potential, num_dims=2).double()
    kernel.base_kernel.lengthscale = 0.3
    model = gp_orff.VectorFieldGP(kernel)
    model.likelihood.noise = 0.01
    model.condition(x, y)
    assert isinstance(model.state.inference, kind)


def with_open_matrix(base=None):
    """A kernel that learns a matrix of outputs, which has no weak prior, and nothing else."""
    kernel = MultitaskKernel(RBFKernel() if base is None else base, num_tasks=2, rank=1)
    kernel.data_covar_module.lengthscale = 0.5
    kernel.data_covar_module.requires_grad_(False)
    kernel.task_covar_module.raw_var.requires_grad_(False)
    return kernel


@pytest.mark.slow
def test_few_numbers_for_many_hyperparameters_are_warned_of():
    """Fixed hyperparameters do not count, and nor do those that the posterior integrates."""
    x = torch.linspace(0, 1, 20).double().reshape(10, 2)
    y = torch.stack([torch.sin(5 * x[:, 0]), torch.cos(4 * x[:, 1])], dim=-1)
    zero = gpytorch.means.ZeroMean()
    model = gp_orff.VectorFieldGP(with_open_matrix(), mean=zero)
    with pytest.warns(gp_orff.DataWarning, match="20 values determine 3 hyperparameters poorly"):
        model.fit(x, y, progress=False)
    model.likelihood.requires_grad_(False)
    model.fit(x, y, progress=False)
    kernel = gp_orff.CurlFreeKernel(num_dims=2)
    gp_orff.VectorFieldGP(kernel, mean=zero).fit(x, y, progress=False)


@pytest.mark.slow
def test_constant_means_count_as_learned():
    """Of 44 numbers: 15 for each of three hyperparameters, but 9 with two constants."""
    x = points(24)[:22]
    y = swirl(x) + 0.3 * draw(22, 2)
    model = gp_orff.VectorFieldGP(with_open_matrix())
    with pytest.warns(gp_orff.DataWarning, match="44 values determine 5 hyperparameters poorly"):
        model.fit(x, y, progress=False)
    zero = gpytorch.means.ZeroMean()
    gp_orff.VectorFieldGP(with_open_matrix(), mean=zero).fit(x, y, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("base", [RBFKernel, partial(gp_orff.GeneralMaternKernel, nu=4.2)])
def test_repeated_readings_of_few_places_are_few_numbers(base):
    """At six places, 120 numbers determine lengthscales no better than twelve, also where the
    covariance has no closed form."""
    places = torch.arange(60) % 6
    x, y = points(6)[places], (draw(6, 2)[places] + 0.3 * draw(60, 2, seed=1))
    model = gp_orff.VectorFieldGP(with_open_matrix(base()))
    calibration = gp_orff.settings.check_calibration(False)  # gpytorch starts matrices at random
    match = "120 values, equivalent to 12 because .* determine"
    with calibration, pytest.warns(gp_orff.DataWarning, match=match):
        model.fit(x, y, progress=False)


class CountedChunks:
    """Chunks that count how many of them were read."""

    def __init__(self, x, y, size):
        self.parts, self.read = list(zip(x.split(size), y.split(size), strict=True)), 0

    def __iter__(self):
        for part in self.parts:
            self.read += 1
            yield part


@pytest.mark.slow
def test_many_points_are_visited_at_most_three_times(monkeypatch):
    """The first look at a chunk is no visit. The evidence is that of a grid of its own."""
    monkeypatch.setattr(plans, "MANY", 1000)
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.rand(4000, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    chunks = CountedChunks(x, torch.cos(2 * x) + noise, 500)
    model = gp_orff.VectorFieldGP(
        gp_orff.CurlFreeKernel(num_dims=2), frequencies=gp_orff.Auto(max_features=600)
    )
    model.fit(chunks, progress=False)
    assert chunks.read <= 3 * len(chunks.parts) + 1
    kept = model.log_marginal_likelihood().item()
    model.condition(chunks)
    assert model.log_marginal_likelihood().item() == pytest.approx(kept, abs=0.05)


def noisy_swirl(frequencies=None):
    """A fit's report, of 150 points."""
    x = points(150)
    noise = 0.1 * torch.randn(150, 2, generator=torch.Generator().manual_seed(1)).double()
    kernel = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, frequencies=frequencies)
    with gp_orff.settings.check_features(False):
        return model.fit(x, swirl(x) + noise, progress=False).report


@pytest.mark.slow
def test_slow_searches_begin_under_the_exact_kernel_of_a_subset(monkeypatch):
    """As if 200 numbers were few: the search on all data takes fewer evaluations, and ends where
    the whole search does."""
    rule = gp_orff.QuasiMonteCarlo(64)
    whole = noisy_swirl(rule)
    monkeypatch.setattr(plans, "SUBSETS", (150,))
    monkeypatch.setattr(plans, "SUBSET_VALUES", 60)
    monkeypatch.setattr(plans, "operations_on", lambda *parts: 1e9)
    found = noisy_swirl(rule)
    names = [stage.name for stage in found.stages]
    assert names[1:] == ["exact kernel, 75 points", repr(rule)]
    assert found.evidence == pytest.approx(whole.evidence, abs=0.1)


@pytest.mark.slow
def test_a_budget_ends_searches(monkeypatch):
    """Within it a plan gets two evaluations at least, and a warning says what another step
    promised; below, no search on all data is made."""
    monkeypatch.setattr("gp_orff.fitting.strategy.SUBSET_VALUES", 60)  # starting values are poor
    monkeypatch.setattr("gp_orff.fitting.strategy.SCREENED_VALUES", 60)
    monkeypatch.setattr(plans, "BUDGET", 2.1 * plans.cubic(300))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.SearchWarning)
        found = noisy_swirl()
    assert found.stages[-1].name == "exact kernel"
    assert found.stages[-1].evaluations == 2
    monkeypatch.setattr(plans, "BUDGET", 0.0)
    (only,) = noisy_swirl().stages
    assert only.name.startswith("starting values")


def lines_that_differ(readings=15):
    """Readings along lines, of one component, which share an error with their line."""
    x = torch.stack(torch.meshgrid(*2 * [torch.linspace(0, 1, readings)], indexing="ij"), dim=-1)
    x = torch.cat([x.flatten(0, 1), x.flip(-1).flatten(0, 1)]).double()
    along = torch.tensor([[1.0, 0.0]]).double().expand(len(x), 2)
    shared = 0.3 * draw(2 * readings, 1).expand(-1, readings).flatten()
    return x, swirl(x)[:, 0] + shared + 0.01 * draw(len(x), seed=1), along


def test_subsets_count_numbers():
    """Of readings along directions, as many points."""
    x, y, along = lines_that_differ()
    (observed,) = Dataset.in_memory(read(x, y, 2, Options(directions=along))).visit()
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    parts = model.kernel, {"": model.likelihood}, None, Survey.of([observed]), Journal(None)
    assert Trainer(*parts).subset(60).num_values == 60


def test_a_search_that_was_cut_warns(monkeypatch):
    """With what it expected of another step."""
    run = Search.run
    monkeypatch.setattr(
        Search, "run", lambda self, *a, **k: run(self, *a, **k | {"evaluations": 1})
    )
    with pytest.warns(
        gp_orff.SearchWarning, match="one more step is expected to gain .* nats.*warm_start=True"
    ):
        noisy_swirl()


def test_a_search_that_meets_a_bound_goes_on():
    """Where the first step is clipped at a bound, and the evidence then rises inwards."""
    kernel = RBFKernel().double()
    coordinates = Coordinates(kernel)
    coordinates.high = coordinates.get() + 0.5
    u = coordinates.get().item() + 0.4  # of the maximum; the first step has length 1
    search = Search(coordinates)
    search.run(lambda: -5 * (kernel.lengthscale.log() - u).square().sum(), num_values=1)
    assert coordinates.get() == pytest.approx(u, abs=0.05)


@pytest.mark.slow
def test_searches_on_separable_features_are_not_slow(monkeypatch):
    """A hundred columns for each of four outputs cost what 159 features do. Under the exact kernel
    of a subset, noise that the features need is not seen: the evidence would be worse."""
    monkeypatch.setattr(plans, "SUBSETS", (200,))
    x = points(100)
    y = torch.stack([torch.sin(6 * x[:, i % 2] + i) for i in range(4)], dim=-1)
    kernel = gp_orff.SeparableKernel(ScaleKernel(RBFKernel()), torch.eye(4))
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.MonteCarlo(50))
    with gp_orff.settings.check_features(False), gp_orff.settings.check_calibration(False):
        report = model.fit(x, y, progress=False).report
    assert report.features == 400
    assert not any("exact kernel" in stage.name for stage in report.stages)


@pytest.mark.parametrize("rank", [1, 2])
def test_noise_that_outputs_share_starts_without_the_global_random_state(rank):
    def start(seed):
        torch.manual_seed(seed)
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, rank=rank).double()
        start_noise(likelihood, 0.5)
        return likelihood

    first, second = start(0), start(1)
    assert torch.equal(first.task_noise_covar_factor, second.task_noise_covar_factor)
    covariance = noise_of(first, 2)
    assert covariance.trace().item() == pytest.approx(2 * 0.5)  # of shared and own noise


# -- ranges of many data ----------------------------------------------------------------------


def test_starts_outside_the_ranges_are_moved_inside(monkeypatch):
    """A start of 100 extents becomes one of 3, the longest of a search."""
    seen = []

    class SeenError(Exception):
        pass

    def value(trainer, inference):
        seen.append(trainer.kernel.base_kernel.base_kernel.lengthscale.item())
        raise SeenError

    monkeypatch.setattr("gp_orff.fitting.strategy.starts", lambda *given: [Start(100.0)])
    monkeypatch.setattr(Trainer, "value", value)
    x = points(60)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2))
    with pytest.raises(SeenError):
        model.fit(x, swirl(x), progress=False)
    longest = 3 * np.ptp(x.numpy(), axis=0).max()
    assert seen[0] == pytest.approx(longest, rel=1e-6)


def test_sources_are_as_deep_as_waves_in_all_of_the_data_can_hold(monkeypatch):
    """A part of many readings has the least depth of all of them, by their extent: waves up to
    4096 features resolve a depth of 4.2/k, about 2 % of the diagonal here. Waves beyond have a
    hundredth of the variance, ∝ k² exp(−2hk)."""
    monkeypatch.setattr(ranges, "MANY", 2048)  # fewer may take the exact kernel
    x = points(3000, num_dims=3) * torch.tensor([20.0, 10.0, 1.0])
    part = x[(x[:, :2] < 1.0).all(-1)]
    key = GroupKey("", Components.every(3))
    whole = Survey.of([Observations(key, x, x)])
    kernel = gp_orff.HarmonicKernel(1, reference_height=0.0).double()
    ((depths,),) = parameter_ranges(kernel, distances_of(part), whole).values()
    extent = np.ptp(x.numpy(), axis=0)[:2]
    expected = 4.2 * np.hypot(*extent) / np.sqrt(8 * 4096)
    assert depths.low == pytest.approx(expected, rel=2e-3)
    hk = depths.low * np.sqrt(8 * 4096) / np.hypot(*extent)
    assert (1 + 2 * hk + 2 * hk**2) * np.exp(-2 * hk) == pytest.approx(0.01, rel=0.01)  # two digits


@pytest.fixture(scope="module")
def waves_across():
    """Points, vectors, and the evidence that a fit without constraints reaches."""
    x = 4 * points(125)
    y = torch.stack([torch.sin(3 * x[:, 1]), torch.sin(3 * x[:, 0])], dim=-1) + 0.1 * draw(125, 2)
    plain = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    with gp_orff.settings.check_calibration(False):
        return x, y, plain.fit(x, y, progress=False).log_marginal_likelihood().item()


@pytest.mark.slow
@pytest.mark.parametrize("constraint", [LessThan(9.0), Interval(1e-3, 9.0)])
@pytest.mark.parametrize("where", ["lengthscale", "noise"])
def test_constraints_that_a_fit_does_not_meet_change_nothing(constraint, where, waves_across):
    """One with an upper bound alone had its search ranges exchanged: 445 nats were lost."""
    x, y, nats = waves_across
    options = {"num_tasks": 2, "has_task_noise": False}
    base, likelihood = RBFKernel(), MultitaskGaussianLikelihood(**options)
    if where == "lengthscale":
        base = RBFKernel(lengthscale_constraint=constraint)
    else:
        likelihood = MultitaskGaussianLikelihood(noise_constraint=constraint, **options)
    bounded = gp_orff.DivergenceFreeKernel(base, num_dims=2)
    with gp_orff.settings.check_calibration(False):
        model = gp_orff.VectorFieldGP(bounded, likelihood=likelihood).fit(x, y, progress=False)
    assert model.log_marginal_likelihood().item() == pytest.approx(nats, abs=0.1)


@pytest.mark.slow
def test_searches_on_grids_start_from_the_information_of_the_data():
    """From the curvature on a part of the data they took about 15 evaluations."""
    x = 6 * points(3000)
    y = swirl(x) + 0.1 * draw(3000, 2)
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    stages = model.fit(x, y, progress=False).report.stages
    on_grids = [stage for stage in stages if "grid" in stage.name]
    assert len(on_grids) >= 2
    assert all(stage.evaluations <= 10 for stage in on_grids)


@pytest.mark.parametrize("rule", [None, gp_orff.QuasiMonteCarlo(50)])
def test_nothing_to_learn_on_features_is_no_error(rule):
    x = 6 * points(3000)
    y = swirl(x) + 0.1 * draw(3000, 2)
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2), frequencies=rule)
    model.kernel.requires_grad_(False)
    model.likelihood.requires_grad_(False)
    before = [parameter.clone() for parameter in model.kernel.parameters()]
    with gp_orff.settings.check_calibration(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few random features
        model.fit(x, y, progress=False)
    assert all(map(torch.equal, model.kernel.parameters(), before))
