"""VectorFieldGP, compared with ExactGP, the exact kernel, and itself in other units."""

import copy
import math

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood, MultitaskGaussianLikelihood

import gp_orff
from gp_orff.data.noise import noise_of
from gp_orff.data.survey import subset
from gp_orff.fitting.coordinates import Coordinates
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.features import FeatureInference
from tests.support import oracles
from tests.support.fields import conditioned, curl_free, directions, draw, features_of, flow
from tests.support.models import evidence, scalar_gp, vector_gp

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

WITHOUT_EXACT = gp_orff.Auto(exact_values=0)


RULES = {
    "grid": lambda x: gp_orff.Grid.for_data(x, tolerance=1e-3),
    "grid_budget": lambda x: gp_orff.Grid.for_data(x, max_features=80),
    "monte_carlo": lambda x: gp_orff.MonteCarlo(40),
    "exact": lambda x: gp_orff.Auto(),
}


KINDS = ["field", "helmholtz", "separable", "sum", "scalar"]
IN_EXACT_GP = [  # every kind by every rule, with fewer points than features or with more
    (kind, rule, 20 if rule == "exact" or (i + j) % 2 else 200)
    for i, kind in enumerate(KINDS)
    for j, rule in enumerate(RULES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "points"), IN_EXACT_GP)
def test_it_is_orff_kernel_in_an_exact_gp(kind, rule, points):
    """Same expansion: evidence, its gradient, mean, variance and covariance to 1e-9."""
    x, y, _ = flow(points)
    xs = 1.6 * torch.rand(7, 2, generator=torch.Generator().manual_seed(5)).double() - 0.8
    kernel = {
        "field": lambda: curl_free(0.5),
        "helmholtz": lambda: gp_orff.HelmholtzKernel(num_dims=2).double(),
        "separable": lambda: MultitaskKernel(RBFKernel(), num_tasks=2, rank=1).double(),
        "sum": lambda: curl_free(0.5) + MultitaskKernel(ConstantKernel(), num_tasks=2).double(),
        "scalar": lambda: ScaleKernel(RBFKernel()).double(),
    }[kind]()
    if kind == "scalar":
        y = y[:, 0]
    mean = gpytorch.means.ZeroMean()
    model = conditioned(kernel, x, y, RULES[rule](x), mean=mean)
    inner = model.kernel
    if rule != "exact":
        inner = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(2), num_dims=2)
        inner.frequencies = torch.nn.ModuleList(model.state.inference.draws)
    reference = scalar_gp(x, y, inner, 0.3) if kind == "scalar" else None
    if reference is None:
        reference = vector_gp(x, y, inner, 0.3, has_task_noise=False)
    reference.mean_module = mean if kind == "scalar" else gpytorch.means.MultitaskMean(mean, 2)
    reference.likelihood.noise = model.likelihood.noise.detach()
    parameters = list(kernel.parameters())
    with gpytorch.settings.max_cholesky_size(10_000):
        expected, found = evidence(reference), model.log_marginal_likelihood()
        gradients = [
            torch.autograd.grad(value, parameters, allow_unused=True) for value in (expected, found)
        ]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        norm = torch.cat([g.flatten() for g in gradients[0] if g is not None]).norm()
        for theirs, mine in zip(*gradients, strict=True):
            if theirs is not None:
                assert (mine - theirs).abs().max() <= 1e-9 * norm
        with torch.no_grad(), gp_orff.settings.check_features(False):
            posterior = reference.eval()(xs)
            expected = posterior.mean, posterior.variance, posterior.covariance_matrix
    field = model.posterior()
    joint = field(xs)
    assert isinstance(joint, type(posterior))
    assert len(joint.event_shape) == len(posterior.event_shape)  # (n,) or (n, p)
    torch.testing.assert_close(joint.mean, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(joint.variance, expected[1], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(joint.covariance_matrix, expected[2], rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(field.mean(xs).reshape(expected[0].shape), expected[0])
    torch.testing.assert_close(field.variance(xs).reshape(expected[1].shape), expected[1])
    assert joint.rsample(torch.Size([3])).shape == (3, *expected[0].shape)


@pytest.mark.parametrize("rule", RULES)
def test_the_constant_mean_is_the_best_one(rule):
    """Generalised least squares by dense algebra; no other constant has a larger evidence."""
    x, y, _ = flow(100)
    model = conditioned(curl_free(0.5), x, y, RULES[rule](x))
    found = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
    if rule == "exact":
        covariance = model.kernel(x).to_dense()
    else:
        reference = gp_orff.ORFFKernel(model.kernel, gp_orff.MonteCarlo(2), num_dims=2)
        reference.frequencies = torch.nn.ModuleList(model.state.inference.draws)
        covariance = reference(x).to_dense()
    noisy = covariance.detach() + 0.3 * torch.eye(200).double()
    ones = torch.eye(2).double().repeat(100, 1)
    white = torch.linalg.solve(noisy, torch.cat([ones, y.reshape(-1, 1)], dim=-1))
    expected = torch.linalg.solve(ones.mT @ white[:, :2], ones.mT @ white[:, 2])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(
        model.log_marginal_likelihood(), oracles.log_density(noisy, y - expected)
    )
    xs = 0.9 * directions(7, seed=5)
    if rule == "exact":
        cross = model.kernel(xs, x).to_dense().detach()
    else:
        phi = features_of(model)
        cross = phi(xs) @ phi(x).mT
    wanted = cross @ torch.linalg.solve(noisy, (y - expected).reshape(-1))
    wanted = wanted.reshape(7, 2) + expected
    torch.testing.assert_close(model.posterior().mean(xs), wanted, rtol=1e-8, atol=1e-8)


def fitted(x, y, rule, kernel=None):
    model = gp_orff.VectorFieldGP(curl_free() if kernel is None else kernel, frequencies=rule)
    return model.fit(x, y, progress=False)


def numbers(model):
    potential = model.kernel.base_kernel.base_kernel
    return [
        value.item()
        for value in (potential.lengthscale, model.kernel.outputscale, model.likelihood.noise)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rule", [gp_orff.Auto(), WITHOUT_EXACT, gp_orff.QuasiMonteCarlo(128)])
def test_a_fit_finds_the_field(rule):
    """Against the truth: error bars that cover it, and the noise that was added."""
    x, y, field = flow(400)
    model = fitted(x, y, rule)
    xs, _, _ = flow(300, seed=7)
    posterior = model.posterior()
    error = posterior.mean(xs) - field(xs)
    sd = posterior.variance(xs).sqrt()
    z = (error / sd).square().mean().sqrt().item()
    assert z == pytest.approx(1, abs=0.25)  # 3 standard errors, of some 80 independent numbers
    assert error.square().mean().sqrt() < 0.07
    sampled = isinstance(rule, gp_orff.QuasiMonteCarlo)  # whose noise takes up what they miss
    assert numbers(model)[2] == pytest.approx(0.01, rel=0.3 if sampled else 0.15)  # √(2/800) = 0.05
    assert model.report.action == "fitted"
    assert all(stage.evaluations > 0 for stage in model.report.stages)
    assert "lengthscale" in model.report.hyperparameters


@pytest.mark.slow
def test_a_grid_finds_what_the_exact_kernel_finds():
    x, y, _ = flow(250)
    exact, grid = fitted(x, y, gp_orff.Auto(exact_values=1000)), fitted(x, y, WITHOUT_EXACT)
    assert isinstance(exact.state.inference, ExactInference)
    assert isinstance(grid.state.inference, FeatureInference)
    assert numbers(grid) == pytest.approx(numbers(exact), rel=0.05)  # where a nat hardly changes
    nats = [model.log_marginal_likelihood().item() for model in (exact, grid)]
    assert nats[0] == pytest.approx(nats[1], abs=0.1)  # where searches end


@pytest.mark.slow
@pytest.mark.parametrize("rule", [gp_orff.Auto(), WITHOUT_EXACT, gp_orff.MonteCarlo(64)])
def test_units_do_not_matter(rule):
    """x·10⁵ and y·10⁻⁶: the same fit to 1e-6 (the same steps, but for rounding). Random features
    whose frequencies move have steps that rounding changes: the ends are within 0.01 nats."""
    x, y, _ = flow(125, extent=0.5)
    here, there = fitted(x, y, rule), fitted(1e5 * x, 1e-6 * y, rule)
    ell, scale, noise = numbers(here)
    expected = [1e5 * ell, 1e-12 * 1e10 * scale, 1e-12 * noise]
    moving = isinstance(rule, gp_orff.MonteCarlo)
    assert numbers(there) == pytest.approx(expected, rel=0.03 if moving else 1e-6)
    xs = x[:20] * 0.9
    one, two = here.posterior(), there.posterior()
    near = 0.01 if moving else 1e-6
    torch.testing.assert_close(1e6 * two.mean(1e5 * xs), one.mean(xs), rtol=near, atol=near)
    near = 0.1 if moving else 1e-5
    torch.testing.assert_close(1e12 * two.variance(1e5 * xs), one.variance(xs), rtol=near, atol=0)


@pytest.mark.slow
def test_far_from_zero_is_as_good_as_near():
    """Map coordinates."""
    x, y, _ = flow(100, extent=0.5)
    away = torch.tensor([5e5, 6e6]).double()
    here, there = fitted(x, y, WITHOUT_EXACT), fitted(1e3 * x + away, y, WITHOUT_EXACT)
    expected = [1e3 * numbers(here)[0], 1e6 * numbers(here)[1], numbers(here)[2]]
    assert numbers(there) == pytest.approx(expected, rel=1e-4)


def test_predictions_outside_the_data_are_those_of_the_exact_kernel():
    """The grid is made for the data; a wider one comes where it is asked for."""
    x, y, _ = flow(300)
    kernel = curl_free(0.3)
    exact = conditioned(kernel, x, y, gp_orff.Auto(), noise=0.01).posterior()
    field = conditioned(kernel, x, y, WITHOUT_EXACT, noise=0.01).posterior()
    for far in (0.5, 1.2, 2.5):
        xs = far * torch.tensor([[1.0, 0.3], [-0.7, 1.0]]).double()
        sd = exact.variance(xs).sqrt()
        assert ((field.mean(xs) - exact.mean(xs)) / sd).abs().max() < 3e-2
        torch.testing.assert_close(field.variance(xs).sqrt(), sd, rtol=1e-2, atol=0)


def test_a_posterior_is_a_snapshot():
    x, y, _ = flow(200)
    model = conditioned(curl_free(0.3), x, y, WITHOUT_EXACT)
    field, xs = model.posterior(), x[:10]
    before = field.mean(xs), field.variance(xs)
    model.kernel.base_kernel.base_kernel.lengthscale = 0.6
    model.likelihood.noise = torch.tensor([1.0])
    assert torch.equal(field.mean(xs), before[0])
    outside = 3 * xs  # a wider grid, still of the old hyperparameters
    assert torch.isfinite(field.mean(outside)).all()
    assert not torch.allclose(model.posterior().mean(xs), before[0])
    assert model.report.action == "conditioned"


def test_new_hyperparameters_get_a_new_grid():
    x, y, _ = flow(200)
    kernel = curl_free(0.3)
    model = conditioned(kernel, x, y, WITHOUT_EXACT, mean=gpytorch.means.ZeroMean())
    kernel.base_kernel.base_kernel.lengthscale = 0.6
    exact = conditioned(copy.deepcopy(kernel), x, y, gp_orff.Auto(), mean=gpytorch.means.ZeroMean())
    torch.testing.assert_close(
        model.log_marginal_likelihood(), exact.log_marginal_likelihood(), rtol=0, atol=0.4
    )


@pytest.mark.parametrize("rule", [gp_orff.Auto(), gp_orff.MonteCarlo(40)], ids=["exact", "random"])
def test_new_noise_gives_a_new_posterior(rule):
    x, y, _ = flow(60)
    model = conditioned(curl_free(0.3), x, y, rule, noise=0.1)
    model.posterior()
    model.likelihood.noise = torch.full_like(model.likelihood.noise, 0.4)
    found, expected = model.posterior(), conditioned(curl_free(0.3), x, y, rule, noise=0.4)
    torch.testing.assert_close(found.mean(x), expected.posterior().mean(x))
    torch.testing.assert_close(found.variance(x), expected.posterior().variance(x))


def test_reading_registers_no_group():
    x, y, _ = flow(60)
    model = conditioned(curl_free(0.3), x, y, WITHOUT_EXACT)
    model.statistics_of(x, y, group="new")
    with pytest.raises(ValueError, match="a known group, one of"):
        model.leave_one_out(x, y, group="new")
    with pytest.raises(ValueError, match="a known group, one of"):
        gp_orff.compare_with_exact(model, x, y, subset=20, group="new")
    assert not model.likelihoods
    assert list(model.update(x, y, group="new").likelihoods) == ["new"]


@pytest.mark.slow
def test_what_a_budget_cuts_is_returned():
    """A Matérn field under a small budget: the error bars still cover the truth."""
    generator = torch.Generator().manual_seed(3)
    x = 1.4 * torch.rand(600, 2, generator=generator).double()
    kernel = curl_free(0.2, lambda: MaternKernel(nu=2.5))
    with torch.no_grad():
        root = torch.linalg.cholesky(kernel(x).to_dense() + 1e-8 * torch.eye(1200).double())
    field = (root @ draw(1200, seed=4)).reshape(-1, 2)
    y = field + 0.05 * draw(600, 2, seed=5)
    rule = gp_orff.Auto(exact_values=0, max_features=400)
    trained = curl_free(kernel=lambda: MaternKernel(nu=2.5))
    with pytest.warns(gp_orff.GridWarning, match="times the noise"):
        model = fitted(x[:400], y[:400], rule, trained)
    assert model.report.share_cut > 0
    posterior = model.posterior()
    error = posterior.mean(x[400:]) - field[400:]
    z = error / posterior.variance(x[400:]).sqrt()
    assert 0.8 < z.square().mean().sqrt() < 1.25


@pytest.mark.slow
def test_frozen_parameters_priors_and_warm_starts():
    x, y, _ = flow(125)
    kernel = curl_free(0.37)
    kernel.base_kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    model = fitted(x, y, gp_orff.Auto(), kernel)
    assert numbers(model)[0] == pytest.approx(0.37)
    free = fitted(x, y, gp_orff.Auto())
    with_prior = curl_free()
    strict = gpytorch.priors.LogNormalPrior(math.log(0.8), 0.01)
    with_prior.base_kernel.base_kernel.register_prior(
        "lengthscale_prior", strict, lambda m: m.lengthscale, lambda m, v: m._set_lengthscale(v)
    )
    drawn = fitted(x, y, gp_orff.Auto(), with_prior)
    assert abs(numbers(drawn)[0] - 0.8) < abs(numbers(free)[0] - 0.8) / 3
    again = copy.deepcopy(free).fit(x, y, progress=False, warm_start=True)
    assert numbers(again) == pytest.approx(numbers(free), rel=5e-2)  # searches end at 0.01 nats
    evaluations = [
        sum(stage.evaluations for stage in model.report.stages) for model in (again, free)
    ]
    assert evaluations[0] < evaluations[1]


@pytest.mark.slow
def test_constraints_hold_during_a_fit():
    x, y, _ = flow(200)
    kernel = curl_free()
    bounded = gpytorch.constraints.Interval(0.5, 0.9)
    kernel.base_kernel.base_kernel.register_constraint("raw_lengthscale", bounded)
    model = fitted(x, y, WITHOUT_EXACT, kernel)
    assert 0.5 <= numbers(model)[0] <= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_likelihoods_of_tasks(rank):
    options = {"has_task_noise": rank is not None, "rank": rank or 0}
    x, y, _ = flow(300)
    y = y + torch.tensor([0.5, 0.0]) * draw(300, 2, seed=9)
    likelihood = MultitaskGaussianLikelihood(2, **options)
    model = gp_orff.VectorFieldGP(curl_free(), likelihood=likelihood, frequencies=WITHOUT_EXACT)
    model.fit(x, y, progress=False)
    noise = noise_of(likelihood, model.num_outputs).detach()
    low, high = (0.01, 0.26) if rank is not None else (0.135, 0.135)
    assert noise[0, 0] == pytest.approx(high, rel=0.25)  # 3 √(2/300)
    assert noise[1, 1] == pytest.approx(low, rel=0.25)


def test_other_means_are_taken_as_they_are():
    x, y, _ = flow(150)
    slope = torch.tensor([2.0, -1.0]).double()

    class Trend(gpytorch.means.Mean):
        def forward(self, x):
            return (x @ slope).unsqueeze(-1).expand(-1, 2)

    plain = conditioned(curl_free(0.4), x, y, gp_orff.Auto(), mean=gpytorch.means.ZeroMean())
    trend = conditioned(curl_free(0.4), x, y + Trend()(x), gp_orff.Auto(), mean=Trend())
    xs = x[:9] + 0.1
    torch.testing.assert_close(
        trend.posterior().mean(xs) - Trend()(xs), plain.posterior().mean(xs), rtol=1e-9, atol=1e-9
    )


@pytest.mark.slow
def test_one_output_and_arrays():
    x, y, _ = flow(120)
    model = gp_orff.VectorFieldGP(ScaleKernel(RBFKernel(ard_num_dims=2)))
    assert isinstance(model.likelihood, GaussianLikelihood)
    model.fit(x.numpy(), y[:, 0].numpy().astype(np.float32), progress=False)
    field = model.posterior()
    assert isinstance(field(x[:4]), gpytorch.distributions.MultivariateNormal)
    assert field.mean(x[:4].float()).dtype == torch.float32
    assert field.mean(x[:4].numpy()).dtype == torch.float64
    assert field(x[:4].float()).mean.dtype == torch.float32


BAD = {
    "nan in x": (lambda x, y: (torch.where(x > 0.9, math.nan, x), y), r"finite points, got \d+ of"),
    "nan in y": (lambda x, y: (x, torch.where(y > 0, math.inf, y)), "finite observations, got"),
    "lengths": (lambda x, y: (x, y[:-1]), "equal length, got 60 and 59"),
    "outputs": (lambda x, y: (x, y[:, :1]), "2 columns, one for each output"),
    "inputs": (lambda x, y: (torch.cat([x, x], -1), y), "points with 2 columns, got 4"),
    "empty": (lambda x, y: (x[:0], y[:0]), "at least one row"),
    "shape": (lambda x, y: (x[:, None], y), "shape"),
}


@pytest.fixture(scope="module")
def of_sixty():
    x, y, _ = flow(60)
    return x, y, fitted(x, y, gp_orff.Auto())


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_and_nothing_is_lost(name, of_sixty):
    x, y, model = of_sixty
    before, report = numbers(model), model.report
    change, message = BAD[name]
    for method in (model.fit, model.condition):
        with pytest.raises(ValueError, match=message):
            method(*change(x, y))
    assert numbers(model) == before
    assert model.report is report
    assert torch.isfinite(model.posterior().mean(x)).all()


def test_a_fit_that_fails_leaves_the_model_as_it_was(monkeypatch, of_sixty):
    x, y, model = of_sixty
    before = numbers(model)
    monkeypatch.setattr(
        ExactInference, "evidence", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        model.fit(2 * x, y, progress=False)
    assert numbers(model) == before


def test_what_is_no_model(of_sixty):
    with pytest.raises(TypeError, match="instance of a gpytorch kernel"):
        gp_orff.VectorFieldGP(RBFKernel)
    with pytest.raises(TypeError, match="frequency rule"):
        gp_orff.VectorFieldGP(curl_free(), frequencies=gp_orff.MonteCarlo)
    with pytest.raises(ValueError, match="same number of outputs"):
        gp_orff.VectorFieldGP(curl_free() + RBFKernel())
    with pytest.raises(NotImplementedError, match=r"no noise covariance is known.* as noise="):
        gp_orff.VectorFieldGP(
            curl_free(),
            likelihood=gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(60)),
        )
    with pytest.raises(ValueError, match="num_tasks=3"):
        gp_orff.VectorFieldGP(curl_free(), likelihood=MultitaskGaussianLikelihood(3))
    fresh = gp_orff.VectorFieldGP(curl_free())
    assert "not fitted" in str(fresh.report)
    for ask in (fresh.posterior, fresh.log_marginal_likelihood):
        with pytest.raises(RuntimeError, match=r"no data yet: call fit"):
            ask()
    field = of_sixty[2].posterior()
    with pytest.raises(ValueError, match="points with 2 columns, got 3"):
        field.mean(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="real numbers"):
        field.mean(torch.zeros(2, 2, dtype=torch.complex64))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:expected data that vary", r"ignore:\d+ values", r"ignore:the \d+ draws"
)
@pytest.mark.parametrize(
    "data",
    [
        (torch.zeros(1, 2), torch.ones(1, 2)),
        (torch.zeros(5, 2), torch.arange(10.0).reshape(5, 2)),
        (torch.rand(20, 2), torch.zeros(20, 2)),
        (torch.rand(20, 2), torch.full((20, 2), 3.0)),
        (torch.arange(40).reshape(20, 2), torch.arange(40).reshape(20, 2)),
    ],
    ids=["one point", "one place", "zeros", "constant", "integers"],
)
@pytest.mark.parametrize("rule", [gp_orff.Auto(), WITHOUT_EXACT], ids=["exact", "grid"])
def test_poor_data_give_a_field_all_the_same(data, rule):
    x, y = data
    field = fitted(x, y, rule).posterior()
    assert torch.isfinite(field.mean(x.double())).all()
    assert (field.variance(x.double()) >= 0).all()


@pytest.mark.parametrize(
    "constraint",
    [
        gpytorch.constraints.Positive(),
        gpytorch.constraints.GreaterThan(0.2),
        gpytorch.constraints.Interval(0.1, 3.0),
        gpytorch.constraints.LessThan(3.0),
    ],
)
def test_coordinates_give_the_gradient_of_the_chain(constraint):
    kernel = RBFKernel(lengthscale_constraint=constraint).double()
    kernel.lengthscale = 0.7
    task = MultitaskKernel(kernel, num_tasks=2, rank=1).double()
    coordinates = Coordinates(task)

    def objective():
        tasks = task.task_covar_module.covar_matrix.to_dense()
        return kernel.lengthscale.log().sum() ** 2 + (tasks * tasks).sum()

    u = coordinates.get()
    coordinates.set(u)
    assert coordinates.get() == pytest.approx(u)
    _, gradient = coordinates.value_and_gradient(objective)
    for i in range(len(u)):
        ends = []
        for sign in (1, -1):
            coordinates.set(u + sign * 1e-6 * np.eye(len(u))[i])
            ends.append(objective().item())
        assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_a_subset_shows_every_scale():
    x = torch.rand(5000, 2, generator=torch.Generator().manual_seed(0)).double()
    chosen = subset(x, 200)
    assert len(chosen) == len(set(chosen.tolist())) == 200
    distance = torch.cdist(x[chosen], x[chosen]).fill_diagonal_(math.inf).amin(-1)
    assert distance.quantile(0.2) < 0.02  # near neighbours
    assert torch.cdist(x[chosen], x[chosen]).max() > 1.0  # and far ones


@pytest.mark.parametrize("place", [1, 10])
def test_a_subset_of_repeated_places(place):
    """Stations report again and again."""
    sites = torch.rand(place, 2, generator=torch.Generator().manual_seed(0)).double()
    chosen = subset(sites[torch.arange(2000) % place], 300)
    assert len(set(chosen.tolist())) == 300


@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")
def test_random_features_that_are_overconfident_say_so():
    x, y, _ = flow(300)
    kernel = curl_free(0.3, lambda: MaternKernel(nu=2.5))
    with gp_orff.settings.check_features(True), pytest.warns(gp_orff.FeatureWarning):
        conditioned(kernel, x, y, gp_orff.MonteCarlo(100), noise=1e-3)
    with gp_orff.settings.check_features(True):  # no sample, no warning
        conditioned(kernel, x, y, gp_orff.Grid.for_data(x, max_features=200), noise=1e-3)


def test_what_is_far_away_does_not_change_what_is_near():
    """Under a budget a wider grid is a coarser one; it serves the points that need it only."""
    x, y, _ = flow(300)
    rule = gp_orff.Auto(exact_values=0, max_features=300)
    kernel = curl_free(0.3, lambda: MaternKernel(nu=2.5))
    field = conditioned(kernel, x, y, rule, noise=0.01).posterior()
    before = field.variance(x[:5])
    assert torch.isfinite(field.variance(3 * x[:5])).all()
    assert torch.equal(field.variance(x[:5]), before)


def test_a_grid_by_hand_refuses_what_it_cannot_serve():
    x, y, _ = flow(200)
    rule = gp_orff.Grid(domain=((-1.5, 1.5),) * 2, spacing=1.0, cutoff=15.0)
    field = conditioned(curl_free(0.4), x, y, rule).posterior()
    field.mean(1.4 * torch.ones(1, 2))
    with pytest.raises(ValueError, match="inside the grid's domain"):
        field.mean(3.0 * torch.ones(1, 2))
    hermite = conditioned(curl_free(0.5), x, y, gp_orff.GaussHermite(24)).posterior()
    hermite.mean(x)
    with pytest.raises(ValueError, match="expects lags up to"):
        hermite.mean(9.0 * torch.ones(1, 2))


@pytest.mark.slow
def test_models_and_posteriors_pickle(of_sixty):
    import pickle

    x, y, fit = of_sixty
    for model in (fit, conditioned(curl_free(0.3), x, y, WITHOUT_EXACT)):
        field, again = model.posterior(), pickle.loads(pickle.dumps(model))
        assert torch.equal(again.posterior().mean(x), field.mean(x))
        stored = pickle.loads(pickle.dumps(field))
        assert torch.equal(stored.variance(2 * x), field.variance(2 * x))


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_everything_comes_in_the_type_of_the_points(rule, of_sixty):
    x, y, fit = of_sixty
    model = fit if rule == "exact" else conditioned(curl_free(0.3), x, y, WITHOUT_EXACT)
    field = model.posterior()
    joint = field(x[:3].float())
    values = [joint.mean, joint.variance, joint.covariance_matrix, joint.rsample()]
    values += [field.mean(x[:3].float()), field.variance(x[:3].float())]
    assert {value.dtype for value in values} == {torch.float32}
    assert not any(value.requires_grad for value in values)


def test_constant_means_that_cannot_be_found_in_closed_form():
    from gpytorch.means import ConstantMean, LinearMean, MultitaskMean

    positive = ConstantMean(constant_constraint=gpytorch.constraints.Positive())
    half = MultitaskMean(ConstantMean(), num_tasks=2)
    half.base_means[0].raw_constant.requires_grad_(False)
    bad = {
        "each of the kernel's 2 outputs": ConstantMean(),
        "without priors and constraints": MultitaskMean(positive, num_tasks=2),
        "all trained or none": half,
    }
    for message, mean in bad.items():
        with pytest.raises(ValueError, match=message):
            gp_orff.VectorFieldGP(curl_free(), mean=mean)
    frozen = MultitaskMean(ConstantMean(), num_tasks=2)
    frozen.base_means[0].constant = 3.0
    frozen.requires_grad_(False)
    x, y, _ = flow(60)
    model = gp_orff.VectorFieldGP(curl_free(0.3), mean=frozen).condition(x, y)
    far = torch.full((1, 2), 90.0)
    assert model.posterior().mean(far)[0].tolist() == pytest.approx([3.0, 0.0], abs=1e-6)
    linear = gp_orff.VectorFieldGP(curl_free(), mean=LinearMean(2))
    with pytest.raises(ValueError, match=r"mean with 2 outputs.*MultitaskMean"):
        linear.condition(x, y)


def linear_mean():
    from gpytorch.means import LinearMean, MultitaskMean

    mean = MultitaskMean(LinearMean(2), num_tasks=2).double()
    for number, own in enumerate(mean.base_means):
        own.weights.data.fill_(0.3 + number)
        own.bias.data.fill_(-0.2)
    return mean


@pytest.mark.parametrize("exact_values", [1000, 0], ids=["exact", "features"])
@pytest.mark.parametrize("student", [False, True], ids=["Gaussian", "Student-t"])
def test_answers_follow_a_mean_that_varies(exact_values, student):
    """As a model that is conditioned afterwards; `update` and another mean, too. Student-t weights
    converge to 1e-9 nats a value, hence means to its root."""
    likelihood = gp_orff.MultitaskStudentTLikelihood(2).double() if student else None
    rule, tolerance = gp_orff.Auto(exact_values=exact_values), 5e-4 if student else 1e-9
    x, y, _ = flow(60)
    before, after = linear_mean(), linear_mean()
    after.base_means[1].weights.data.mul_(-2.0)

    def conditioned(mean):
        parts = {"likelihood": copy.deepcopy(likelihood), "mean": mean, "frequencies": rule}
        return gp_orff.VectorFieldGP(curl_free(0.3), **parts).condition(x[:50], y[:50])

    def close(model, other):
        mean, variance = model.posterior().mean(x), model.posterior().variance(x)
        wanted = other.posterior().mean(x), other.posterior().variance(x)
        for found, own in zip((mean, variance), wanted, strict=True):
            torch.testing.assert_close(found, own, rtol=0, atol=tolerance)
        found, own = model.log_marginal_likelihood(), other.log_marginal_likelihood()
        torch.testing.assert_close(found, own, rtol=0, atol=10 * tolerance)

    model, wanted = conditioned(before), conditioned(after)
    assert (model.posterior().mean(x) - wanted.posterior().mean(x)).abs().max() > 0.01
    before.load_state_dict(after.state_dict())
    close(model, wanted)
    model.mean = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
    wanted = conditioned(model.mean)
    close(model, wanted)
    close(model.update(x[50:], y[50:]), wanted.update(x[50:], y[50:]))


def test_chunks_follow_a_mean_that_varies_and_statistics_say_that_they_do_not():
    rule = gp_orff.Auto(exact_values=0)
    x, y, _ = flow(60)
    chunks, mean = [(x[:30], y[:30]), (x[30:], y[30:])], linear_mean()
    model = gp_orff.VectorFieldGP(curl_free(0.3), mean=mean, frequencies=rule).condition(chunks)
    mean.base_means[0].bias.data.fill_(2.0)
    again = gp_orff.VectorFieldGP(curl_free(0.3), mean=copy.deepcopy(mean), frequencies=rule)
    wanted = again.condition(x, y).posterior().mean(x)
    torch.testing.assert_close(model.posterior().mean(x), wanted, rtol=1e-9, atol=1e-9)
    tracks = gp_orff.VectorFieldGP(curl_free(0.3), mean=mean, frequencies=rule)
    tracks.condition(x, y, track=torch.arange(60) // 20)
    mean.base_means[0].bias.data.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"MultitaskMean.*call condition\(x, y\) again"):
        tracks.posterior()


@pytest.mark.slow
def test_a_component_that_is_not_there_does_no_harm():
    """Incompressible data under a Helmholtz kernel: the other part may go where it likes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 2, generator=generator).double()
    truth = torch.stack([torch.sin(6 * x[:, 1]), torch.sin(6 * x[:, 0])], dim=-1)
    y = truth + 0.1 * torch.randn(300, 2, generator=generator).double()
    rule = gp_orff.Auto(exact_values=0, max_features=600)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2), frequencies=rule)
    field = model.fit(x, y, progress=False).posterior()
    z = (field.mean(x) - truth) / field.variance(x).sqrt()
    assert z.square().mean().sqrt().item() == pytest.approx(1, abs=0.2)
    assert model.likelihood.noise.item() == pytest.approx(0.01, rel=0.2)


@pytest.mark.slow
def test_heavy_tails_under_a_small_budget_are_no_worse_than_the_start():
    """The truth is smooth, the kernel is not: what is cut is trained with, not added at the end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(520, 2, generator=generator).double()
    truth = torch.stack([torch.sin(6 * x[:, 1]), torch.sin(5 * x[:, 0])], dim=-1)
    y = truth + 0.1 * torch.randn(520, 2, generator=generator).double()
    kernel = gp_orff.HelmholtzKernel(MaternKernel(nu=1.5), num_dims=2)
    rule = gp_orff.Auto(exact_values=0, max_features=600)
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
    with pytest.warns(gp_orff.GridWarning, match="times the noise"):
        model.fit(x, y, progress=False)
    assert model.log_marginal_likelihood() > 400  # 683 by the exact kernel, 495 here; −1626 once
    field = model.posterior()
    assert (field.mean(x) - truth).square().mean().sqrt() < 0.06
    assert field.variance(x).mean().sqrt() < 0.2


@pytest.mark.slow
def test_a_kernel_without_an_amplitude_gets_one():
    """Otherwise the lengthscale would fix the variance, and the noise take up the field."""
    x, y, _ = flow(60, extent=0.5)
    bare = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).fit(x, y, progress=False)
    scaled = gp_orff.VectorFieldGP(ScaleKernel(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)))
    scaled.fit(x, y, progress=False)
    assert numbers(bare) == pytest.approx(numbers(scaled), rel=1e-6)
    fixed = gp_orff.CurlFreeKernel(num_dims=2)
    model = gp_orff.VectorFieldGP(fixed).condition(x, y)
    torch.testing.assert_close(model.kernel(x).to_dense(), fixed(x).to_dense())
    frozen = curl_free(0.4)
    frozen.raw_outputscale.requires_grad_(False)
    for kernel in (frozen, gp_orff.HelmholtzKernel(num_dims=2)):
        assert gp_orff.VectorFieldGP(kernel).kernel is kernel
    part = gp_orff.CurlFreeKernel(num_dims=2) + curl_free(0.4)
    kinds = [type(k).__name__ for k in gp_orff.VectorFieldGP(part).kernel.kernels]
    assert kinds == ["ScaleKernel", "ScaleKernel"]


@pytest.mark.slow
def test_the_report_has_the_evidence():
    x, y, _ = flow(200)
    for rule in (gp_orff.Auto(), WITHOUT_EXACT):
        model = fitted(x, y, rule)
        assert model.report.evidence == pytest.approx(model.log_marginal_likelihood().item())
        assert model.report.noise["default"] == pytest.approx(model.likelihood.noise.item())


@pytest.mark.parametrize("rule", [gp_orff.Auto(), WITHOUT_EXACT])
def test_another_kernel_takes_the_place_of_the_first(rule):
    x, y, _ = flow(120)
    model = conditioned(gp_orff.HelmholtzKernel(num_dims=2), x, y, rule)
    model.posterior()
    model.kernel = curl_free(0.4)
    expected = conditioned(curl_free(0.4), x, y, rule)
    torch.testing.assert_close(model.posterior().mean(x), expected.posterior().mean(x))
    torch.testing.assert_close(model.log_marginal_likelihood(), expected.log_marginal_likelihood())
    assert model.report.to_dict() == expected.report.to_dict()
