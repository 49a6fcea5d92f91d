"""Checks of values, positions and fits whose mistakes once gave wrong numbers without a warning."""

import warnings
from dataclasses import replace

import gpytorch
import numpy as np
import pytest
import torch

import gp_orff
from gp_orff.data.checks import directions_across, warn_of_sentinels, warn_of_stuck
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import DEFAULT, Components, GroupKey, LineOfSight
from gp_orff.models.calibration import Calibration, correlation_of_residuals
from tests.support.fields import draw

N = 40


def points(seed=0, n=N, d=2):
    return torch.rand(n, d, generator=torch.Generator().manual_seed(seed)).double()


def vectors(seed=1, n=N, p=2):
    return draw(n, p, seed=seed)


def observations(y, label=DEFAULT, known=False, pattern=None):
    y = torch.as_tensor(y, dtype=torch.float64)
    key = GroupKey(label, pattern or Components.every(y.shape[-1]), known)
    return Observations(key, points(n=len(y)), y)


def model(**kwargs):
    return gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2), **kwargs)


def caught(call, category=gp_orff.DataWarning):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(own.message) for own in found if issubclass(own.category, category)]


# Values that mean "missing".


SENTINELS = [(999.0,), (-9999.0,), (1e34,), (9.969209968386869e36,), (-32.768,), (-9999.0, 9999.0)]


@pytest.mark.parametrize("values", SENTINELS)
@pytest.mark.parametrize("count", [1, 3, 15])
def test_repeated_values_far_from_all_others(values, count):
    """In a row, in a few, in many."""
    y = vectors()
    for i, value in enumerate(values):
        y[i * count : (i + 1) * count] = value
    (message,) = caught(lambda: warn_of_sentinels([observations(y)]))
    assert any(f"the value {value:.12g} is in the observations" in message for value in values)
    kept = torch.where(
        torch.isin(y, torch.tensor(values, dtype=y.dtype)), torch.nan, y
    )  # the remedy
    model().condition(points(), kept, missing="mask")


def test_values_along_directions_and_in_later_parts():
    radial = LineOfSight(2)
    parts = [observations(vectors(i)[:, :1], f"radar {i}", pattern=radial) for i in range(3)]
    assert not caught(lambda: warn_of_sentinels(parts))
    parts[2].y[:2] = -999.0
    assert len(caught(lambda: warn_of_sentinels(parts))) == 1


SOUND = {
    "heavy tails": lambda: torch.distributions.StudentT(2.1).sample((500, 2)),
    "rounded": lambda: vectors(n=500).round(decimals=1),
    "two values": lambda: (vectors() > 0).double(),
    "a lonely outlier": lambda: torch.cat(
        [vectors(), torch.full((1, 2), 1e3).double() * draw(1, 2)]
    ),
    "zeros among others": lambda: vectors() * (points() > 0.3),
    "clipped": lambda: vectors(n=500).clamp(-1.5, 1.5),
    "counts": lambda: torch.poisson(torch.full((500, 2), 2.0)),
    "two clusters": lambda: vectors(n=500) + 20.0 * (points(n=500) > 0.5),
}


@pytest.mark.parametrize("kind", SOUND)
def test_sound_values_do_not_warn(kind):
    torch.manual_seed(0)
    parts = [observations(SOUND[kind]())]
    assert not caught(lambda: (warn_of_sentinels(parts), warn_of_stuck(parts)))


def test_every_reader_checks_values():
    x, y = points(), vectors()
    bad = y.clone()
    bad[:3] = -9999.0
    held = model().condition(x, y)
    calls = [
        lambda: model().condition(x, bad),
        lambda: model().condition([(x[:20], bad[:20]), (x[20:], bad[20:])]),
        lambda: model().condition([lambda: (x, bad)]),
        lambda: held.update(points(2), bad),
        lambda: held.observe(x, bad[:, 0], gp_orff.Divergence(), noise=0.1),
        lambda: model().condition(x, bad[:, 0], directions=np.eye(2)[np.arange(N) % 2]),
    ]
    for number, call in enumerate(calls):
        assert any("-9999" in text for text in caught(call)), number


# Instruments whose values never change.


def test_stuck_instruments():
    good = observations(vectors(), "a")
    stuck = observations(torch.tensor([[0.3, 0.1]]).repeat(9, 1), "b")
    (message,) = caught(lambda: warn_of_stuck([good, stuck]))
    assert "all 9 observations of the group 'b' have the value 0.3 as component 0" in message
    half = observations(torch.stack([vectors()[:, 0], torch.full((N,), 0.7)], dim=-1))
    (message,) = caught(lambda: warn_of_stuck([half]))
    assert "have the value 0.7 as component 1" in message


def test_constant_values_that_are_sound():
    """Flow in a plane of space; conditions at a wall; few equal values."""
    flat = torch.cat([vectors(), torch.zeros(N, 1)], dim=-1)
    wall = observations(torch.zeros(9, 2), "wall")
    few = observations(torch.full((3, 2), 0.5), "few")
    parts = [observations(vectors()), wall, few]
    assert not caught(lambda: warn_of_stuck(parts))
    assert not caught(lambda: warn_of_stuck([observations(flat)]))


# Chunks without observations.


def test_chunks_without_observations_are_skipped_and_counted(tmp_path):
    x, y = points(), vectors()
    gone = torch.full_like(y, torch.nan)
    whole = model().condition(x, y)
    chunks = [(x[:0], y[:0]), (x[:20], y[:20]), (x[:9], gone[:9]), (x[20:], y[20:])]
    got = model().condition(chunks, missing="mask")
    torch.testing.assert_close(got.posterior().mean(x), whole.posterior().mean(x))
    assert got.report.skipped == 2
    assert "2 chunks without a valid observation were skipped" in str(got.report)
    got.save(tmp_path / "field.pt")
    assert gp_orff.VectorFieldGP.load(tmp_path / "field.pt").report.skipped == 2
    with pytest.raises(ValueError, match="nothing but NaN"):
        model().condition([(x, gone)], missing="mask")


def test_updates_without_observations_change_nothing():
    x, y = points(), vectors()
    held = model().condition(x, y)
    before = held.posterior().mean(x)
    for more in (x[:5], torch.full_like(y[:5], torch.nan)), (x[:0], y[:0]):
        held.update(*more, missing="mask")
    held.update([(x[:0], y[:0])])
    held.update([], [])
    assert torch.equal(held.posterior().mean(x), before)
    assert held.report.skipped == 4
    assert held.update(x[:5], y[:5]).report.skipped == 4


def test_along_tracks_and_on_a_grid_chunks_are_skipped_too():
    x, y = points(), vectors()
    gone = torch.full_like(y[:5], torch.nan)
    chunks = [{"x": x, "y": y, "track": ["a"] * N}, {"x": x[:0], "y": y[:0], "track": []}]
    assert model().condition(chunks).report.skipped == 1
    rule = gp_orff.Grid.for_data(x)
    held = model(frequencies=rule).condition(x, y).update(x[:5], gone, missing="mask")
    assert held.report.skipped == 1


# Columns of tables, and masks.


def test_nullable_masked_and_object_columns():
    pd = pytest.importorskip("pandas")
    x, y = points().numpy(), vectors().numpy()
    gaps = y.copy()
    gaps[3, 1] = np.nan
    expected = model().condition(x, gaps, missing="mask").posterior().mean(x)
    frame = pd.DataFrame(gaps, columns=["u", "v"])
    forms = [
        frame.convert_dtypes(),
        frame.astype("Float64"),
        frame.astype(object).where(frame.notna(), None),
        np.ma.masked_invalid(gaps),
        [np.ma.masked_invalid(row) for row in gaps],
        np.ma.array(np.where(np.isnan(gaps), 0, gaps).astype(object), mask=np.isnan(gaps)),
    ]
    for form in forms:
        got = model().condition(pd.DataFrame(x).convert_dtypes(), form, missing="mask")
        assert torch.equal(got.posterior().mean(x), expected), type(form)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (["1.5", "2"], "pandas.to_numeric(column, errors='coerce')"),
        (np.array(["1.5", "x"], dtype=object), "pandas.to_numeric(column, errors='coerce')"),
        ([True, False], "values.astype(float)"),
        (np.array([True, None], dtype=object), "values.astype(float)"),
        (np.array(["2020-01-01"], "M8[s]"), "(times - times[0]) / numpy.timedelta64(1, 's')"),
        (np.array([1, 2], "m8[s]"), "durations / numpy.timedelta64(1, 's')"),
    ],
)
def test_columns_that_are_no_numbers_name_the_call_that_converts(values, remedy):
    pd = pytest.importorskip("pandas")
    with pytest.raises(TypeError) as error:
        model().condition(values, values)
    assert remedy in str(error.value)
    column = np.asarray(values)
    names = {"pandas": pd, "numpy": np, "column": pd.Series(column), "values": column}
    result = eval(remedy, {**names, "times": column, "durations": column})
    assert np.asarray(result).dtype.kind == "f"


# Positions that do not determine derivatives.


def rotated(x, seed=0):
    turn, _ = torch.linalg.qr(
        torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).double()
    )
    return x @ turn


PLACES = {
    "line": (lambda: torch.stack([points()[:, 0], torch.full((N,), 3.0)], dim=-1), 1),
    "slope": (lambda: points()[:, :1] * torch.tensor([[1.0, 2.0]]) + 1e3, 1),
    "plane": (lambda: rotated(torch.cat([points(), torch.zeros(N, 1)], dim=-1)), 1),
    "line in space": (lambda: rotated(torch.nn.functional.pad(points()[:, :1], (0, 2))), 2),
    "place": (lambda: torch.full((N, 2), 0.7), 2),
    "anywhere": (points, 0),
    "flat but wide": (lambda: points() * torch.tensor([1.0, 0.05]), 0),
}


@pytest.mark.parametrize("name", PLACES)
def test_directions_across(name):
    make, count = PLACES[name]
    x = make().double()
    across = directions_across(x)
    assert len(across) == count
    torch.testing.assert_close(across @ across.mT, torch.eye(count).double())
    assert ((x - x.mean(0)) @ across.mT).abs().amax() < 1e-6 if count else True


KERNELS = {
    "helmholtz": (gp_orff.HelmholtzKernel, {"divergence", "curl", "jacobian"}),
    "curl_free": (gp_orff.CurlFreeKernel, {"divergence", "jacobian"}),
    "divergence_free": (gp_orff.DivergenceFreeKernel, {"curl", "jacobian"}),
}


@pytest.mark.parametrize("name", KERNELS)
def test_derivatives_across_a_line_warn_once_when_they_are_asked_for(name):
    """But not those that are zero for every field with the kernel."""
    kernel, expected = KERNELS[name]
    x = PLACES["line"][0]()
    held = gp_orff.VectorFieldGP(kernel(num_dims=2)).condition(x, vectors())
    assert "all points lie on one line" in str(held.report)
    field = held.posterior()
    assert not caught(lambda: field.mean(points()))
    for symbol in ("divergence", "curl", "jacobian"):
        messages = caught(lambda symbol=symbol: getattr(field, symbol)(points(3, n=2)))
        assert len(messages) == (symbol in expected)
        assert all("along [0.0, 1.0]" in text for text in messages)
        assert not caught(lambda symbol=symbol: getattr(field, symbol)(points(3, n=2)))


def test_derivatives_along_a_line_and_with_data_across_do_not_warn():
    x = PLACES["line"][0]()
    held = model().condition(x, vectors())
    along = gp_orff.Component([1.0, 0.0, 0.0, 0.0]) @ gp_orff.Jacobian()
    held.posterior().mean(x)  # warnings are errors
    held.observe(points(5), torch.zeros(N), gp_orff.Curl(), noise=0.1)
    held.posterior().curl(points(3, n=2))
    assert along.order == 1
    moored = torch.cat([torch.full((N, 2), 0.5).double(), torch.linspace(0, 1, N)[:, None]], -1)
    kernel = gp_orff.HelmholtzKernel(num_dims=2, active_dims=[0, 1]) * gpytorch.kernels.RBFKernel(
        active_dims=[2]
    )
    field = gp_orff.VectorFieldGP(kernel).condition(moored, vectors()).posterior()
    assert len(caught(lambda: field.divergence(moored[:2]))) == 1


# Observations of very different noise; one lengthscale for unlike axes.


def calibration_of_scores(scores):
    return Calibration.of([[(scores, torch.eye(len(scores)).double())]])


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6])
def test_scores_of_two_kinds_name_outliers_and_groups(share):
    scores = draw(200)
    scores[int(share * 200) :] *= 0.01
    note = calibration_of_scores(scores / scores.square().mean().sqrt()).note_of_outliers
    assert "group=" in note
    assert "outliers" in note


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_scores_of_one_kind_do_not(scale):
    """Whatever the scale of error bars, and with tails of Student-t noise."""
    assert not calibration_of_scores(scale * draw(300)).note_of_outliers
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(4.0).sample((300,)).double()
    assert not calibration_of_scores(scale * heavy).note_of_outliers


@pytest.mark.slow
@pytest.mark.parametrize("robust", [False, True])
def test_fits_among_bad_instruments_warn_and_groups_help(robust):
    """Half of the observations have a hundred times the noise of the others."""
    x, rng = points(n=150), np.random.default_rng(0)
    bad = rng.uniform(size=150) < 0.5
    noise = torch.from_numpy(0.3 * np.where(bad, 100, 1)[:, None])
    y = torch.stack([torch.sin(5 * x[:, 1]), torch.cos(4 * x[:, 0])], -1) + noise * vectors(n=150)
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2) if robust else None
    fit = model(likelihood=likelihood).fit
    messages = caught(lambda: fit(x, y, progress=False), UserWarning)
    assert any("group=" in text and "outliers" in text for text in messages)
    labels = np.where(bad, "bad", "good")
    fitted = caught(lambda: model().fit(x, y, group=labels, progress=False), UserWarning)
    assert not any("outliers" in text for text in fitted)


def thin(kernel):
    """A field that changes along an axis of 40 m, in a box of 1 km."""
    q, scale = points(n=200, d=3), torch.tensor([1000.0, 1000.0, 40.0]).double()
    a, b, c = q.T
    y = torch.stack([(6 * b).cos() * (4 * c).cos(), (5 * a).sin() * (4 * c).cos(), 0 * a], -1)
    held = gp_orff.VectorFieldGP(kernel)
    return held, q * scale, y + 0.05 * vectors(n=200, p=3)


def test_one_lengthscale_for_unlike_axes_names_the_argument():
    held, x, y = thin(gp_orff.DivergenceFreeKernel(num_dims=3))
    held.kernel.base_kernel.base_kernel.lengthscale = 500.0
    held.kernel.outputscale = 500.0**2
    held.likelihood.noise = 0.05
    held.condition(x, y)
    alike = correlation_of_residuals(held.state, held.mean)
    assert alike > 0.3
    note = replace(calibration_of_scores(draw(100)), alike=alike).note_of_axes
    assert "ard_num_dims" in note
    base = gpytorch.kernels.RBFKernel(ard_num_dims=3)  # the remedy
    held, x, y = thin(gp_orff.DivergenceFreeKernel(base, num_dims=3))
    base.lengthscale = torch.tensor([[500.0, 500.0, 20.0]])
    held.kernel.outputscale = 500.0**2
    held.likelihood.noise = 0.05**2
    held.condition(x, y)
    assert correlation_of_residuals(held.state, held.mean) is None


# Grids that are too small.


def test_small_grids_that_are_given_warn():
    x = points()
    y = torch.stack([torch.sin(20 * x[:, 1]), torch.sin(20 * x[:, 0])], -1)
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
    kernel.base_kernel.lengthscale = 0.1

    def condition(rule):
        held = gp_orff.VectorFieldGP(kernel, frequencies=rule)
        held.likelihood.noise = 1e-2
        return held.condition(x, y)

    for rule in (
        gp_orff.Grid(spacing=3.0, cutoff=15.0),
        gp_orff.Grid.for_data(x, max_features=60),
    ):
        (message,) = caught(lambda rule=rule: condition(rule), gp_orff.GridWarning)
        assert "truncated prior" in message
    condition(gp_orff.Grid.for_data(x))
    condition(gp_orff.Auto(exact_values=0))


# Traces.


class Mean(torch.nn.Module):
    """The predictive mean of an `ExactGP`."""

    def __init__(self, model):
        super().__init__()
        self.model = model.eval()

    def forward(self, x):
        with gpytorch.settings.trace_mode(), torch.no_grad():
            return self.model(x).mean


class Flow(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.MultitaskGaussianLikelihood(2))
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), 2)
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultitaskMultivariateNormal(
            self.mean_module(x), self.covar_module(x)
        )


EXACT = {
    "field": lambda: gp_orff.HelmholtzKernel(num_dims=2),
    "scaled": lambda: gpytorch.kernels.ScaleKernel(gp_orff.CurlFreeKernel(num_dims=2)),
    "matern": lambda: gpytorch.kernels.MultitaskKernel(gp_orff.GeneralMaternKernel(nu=1.7), 2),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.filterwarnings("ignore")
def test_exact_kernels_refuse_to_be_traced(name):
    flow = Mean(Flow(points(), vectors(), EXACT[name]()).double())
    flow(points(3))
    with pytest.raises(NotImplementedError, match=r"outside of torch\.jit\.trace.*ORFFKernel"):
        torch.jit.trace(flow, points(3), check_trace=False)


@pytest.mark.filterwarnings("ignore")
def test_features_can_be_traced():
    """The remedy."""
    kernel = gp_orff.ORFFKernel(EXACT["field"](), gp_orff.Grid.for_data(points()))
    flow = Mean(Flow(points(), vectors(), kernel).double())
    flow(points(3))
    traced = torch.jit.trace(flow, points(3), check_trace=False)
    torch.testing.assert_close(traced(points(4)), flow(points(4)))


# Calls that are mistakes.


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: model()(points()), RuntimeError, r"in eval mode.*model\.fit\(x, y\)"),
        (
            lambda: gp_orff.VectorFieldGP(points(), vectors(), None),
            TypeError,
            r"VectorFieldGP\(kernel\)\.fit\(x, y\)",
        ),
        (
            lambda: gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel()),
            TypeError,
            "no num_dims; for instance",
        ),
        (
            lambda: gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), 2),
            TypeError,
            "num_dims.* by name",
        ),
    ],
)
def test_mistaken_calls_name_the_right_one(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_flat_ocean_extends_in_depth():
    """By eight lengthscales, though by a thousandth of its width; under one for all it does not."""
    x = torch.rand(60, 3, generator=torch.Generator().manual_seed(0)).double()
    x = x * torch.tensor([2e6, 2e6, 800.0])
    y = draw(60, 3)
    for lengths, flat in (([3e5, 3e5, 100.0], False), ([3e5, 3e5, 3e5], True)):
        base = gpytorch.kernels.RBFKernel(ard_num_dims=3)
        base.lengthscale = torch.tensor(lengths)
        held = gp_orff.VectorFieldGP(gp_orff.SeparableKernel(base, torch.eye(3))).condition(x, y)
        assert ("all points lie on one plane" in str(held.report)) == flat
        assert bool(caught(lambda held=held: held.posterior().jacobian(x[:2]))) == flat


def test_values_of_other_components_are_no_sentinels():
    """A gust of w that u and v often have."""
    y = (2 * draw(200, 3, seed=3)).mul(10).round().div(10)
    y[:, 2] *= 0.01
    y[:5, 0], y[7, 2] = 3.0, 3.0
    assert not caught(lambda: warn_of_sentinels([observations(y)]))


@pytest.mark.parametrize("along", [False, True])
def test_residuals_of_neighbours_are_about_the_mean(along):
    """A large mean, which observations along directions see by many factors, is no correlation."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(150, 2, generator=generator).double() * torch.tensor([1.0, 100.0])
    y = 1e4 + 0.1 * torch.randn(150, 2, generator=generator).double()
    options, values = {}, y
    if along:
        u = torch.nn.functional.normalize(draw(150, 2, seed=2), dim=-1)
        options, values = {"directions": u}, (u * y).sum(-1)
    held = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
    held.kernel.kernels[0].base_kernel.base_kernel.lengthscale = 10.0
    held.condition(x, values, **options)
    assert correlation_of_residuals(held.state, held.mean) is None
