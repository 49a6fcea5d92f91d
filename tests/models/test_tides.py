"""Models of tides: ellipses against closed forms, coverage, files, and short records."""

import math
import warnings
from datetime import datetime

import numpy as np
import pandas
import pytest
import torch
import xarray
from gpytorch.kernels import MaternKernel, MultitaskKernel, PeriodicKernel, RBFKernel

import gp_orff
from gp_orff.data.units import UnitArray
from gp_orff.kernels.lines import TidalKernel
from gp_orff.models.calibration import Calibration, correlation_between_lines
from gp_orff.models.ellipses import TidalEllipses

NAMES = ("M2", "K1")
PERIODS = {name: TidalKernel(name).period for name in NAMES}


def in_space(lengthscale=0.5):
    base = RBFKernel().double()
    base.lengthscale = lengthscale
    kernel = gp_orff.HelmholtzKernel(base, num_dims=2, active_dims=(0, 1)).double()
    kernel.curl_free.outputscale, kernel.divergence_free.outputscale = 0.02, 0.05
    return kernel


def tides(names=NAMES, **options):
    return gp_orff.tides(in_space(), names, active_dims=(2,), **options).double()


def record(count=300, hours=400.0, noise=0.1, seed=0):
    """Points in the unit square and time, tides at them, and the parts a and b of each."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.rand(20, 2, generator=generator, dtype=torch.float64)
    at = torch.randint(20, (count,), generator=generator)
    time = hours * torch.rand(count, generator=generator, dtype=torch.float64)
    root = torch.linalg.cholesky(in_space()(places).to_dense() + 1e-9 * torch.eye(40))
    normal = torch.randn(len(NAMES), 40, 2, generator=generator, dtype=torch.float64)
    parts = (root @ normal).unflatten(1, (20, 2))  # (constituents, places, outputs, a and b)
    y = noise * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    for name, part in zip(NAMES, parts, strict=True):
        phase = 2 * math.pi * time[:, None] / PERIODS[name]
        y = y + phase.cos() * part[at, :, 0] + phase.sin() * part[at, :, 1]
    return (
        places,
        torch.cat([places[at], time[:, None]], dim=-1),
        y,
        dict(zip(NAMES, parts, strict=True)),
    )


def conditioned(kernel, x, y, noise=0.1, **options):
    model = gp_orff.VectorFieldGP(kernel, **options)
    model.likelihood.noise = noise**2
    return model.condition(x, y)


@pytest.mark.parametrize("inclination", [0.0, 30.0, 100.0, 179.0])
@pytest.mark.parametrize("phase", [1.0, 90.0, 250.0])
@pytest.mark.parametrize("minor", [0.4, -0.4])
def test_ellipses_of_given_amplitudes(inclination, phase, minor):
    """w = e^{iθ} (M cos(νt − g) + i m sin(νt − g)), the ellipse by definition."""
    turn, lag = np.exp(1j * np.deg2rad(inclination)), np.deg2rad(phase)
    a = turn * (2 * np.cos(lag) - 1j * minor * np.sin(lag))
    b = turn * (2 * np.sin(lag) + 1j * minor * np.cos(lag))
    noise = 1e-3 * torch.randn(2, 400, 1, 2, generator=torch.Generator().manual_seed(0)).double()
    cosine, sine = (torch.tensor([[own.real, own.imag]]).double() for own in (a, b))
    found = TidalEllipses.of(cosine + noise[0], sine + noise[1])
    assert found.semi_major.mean.item() == pytest.approx(2, abs=5e-4)
    assert found.semi_minor.mean.item() == pytest.approx(minor, abs=5e-4)
    assert found.semi_major.sd.item() == pytest.approx(1e-3, rel=0.2)
    turns = (found.inclination.mean.item() - inclination) / 180  # 0 and 180 are one axis
    assert turns == pytest.approx(round(turns), abs=1e-3)
    halves = (found.phase.mean.item() - phase) / 180 + round(turns)
    assert halves / 2 == pytest.approx(round(halves / 2), abs=1e-3)
    for angle in (found.inclination, found.phase):
        assert angle.sd.item() < 0.1
        assert angle.low.item() < angle.mean.item() < angle.high.item()


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_ellipses_are_those_of_dense_algebra(rule):
    """With little noise they are those of the truth; their spread is that of the posterior of a
    and b, here from the covariance between data and a or b, that is written out."""
    places, x, y, _ = record(60)
    kernel = tides()
    choice = {} if rule == "exact" else {"frequencies": gp_orff.Grid.for_data(x, tolerance=1e-7)}
    found = conditioned(kernel, x, y, **choice).posterior().ellipses("K1", places[:3], seed=1)
    space = in_space()(torch.cat([places, places])[:3], x[:, :2]).to_dense()
    whole = kernel(x).to_dense() + 0.01 * torch.eye(120)
    phase = 2 * math.pi * x[:, 2].repeat_interleave(2) / PERIODS["K1"]
    cross = torch.cat([space * phase.cos(), space * phase.sin()])
    prior = in_space()(places[:3]).to_dense()
    mean = cross @ torch.linalg.solve(whole, y.flatten())
    covariance = torch.block_diag(prior, prior) - cross @ torch.linalg.solve(whole, cross.mT)
    root = torch.linalg.cholesky(covariance)
    normal = torch.randn(20000, 12, generator=torch.Generator().manual_seed(2)).double()
    cosine, sine = (mean + normal @ root.mT).unflatten(-1, (2, 3, 2)).unbind(1)
    expected = TidalEllipses.of(cosine, sine)
    for name in ("semi_major", "semi_minor", "inclination"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        error = 5 * theirs.sd / 1000**0.5  # five standard errors of a mean of 1000 samples
        assert ((mine.mean - theirs.mean).abs() < error).all()
        torch.testing.assert_close(mine.sd, theirs.sd, rtol=0.15, atol=0)


def several(*lengthscales):
    """A kernel of the field in space for every lengthscale."""
    return [in_space(lengthscale) for lengthscale in lengthscales]


def separable():
    kernel = MultitaskKernel(RBFKernel(), num_tasks=2, active_dims=(0, 1)).double()
    kernel.data_covar_module.lengthscale = 0.5
    kernel.task_covar_module.var = torch.tensor([0.05, 0.02]).double()
    return kernel


@pytest.mark.parametrize(
    ("spaces", "others", "rule"),
    [
        (several(0.5), [], "exact"),
        (several(0.5), [], "grid"),
        ([separable()], [], "grid"),
        (several(0.5, 2.0), [], "exact"),
        (several(0.5, 2.0), ["S2"], "exact"),
        (several(0.5, 2.0), ["S2"], "grid"),
    ],
)
@pytest.mark.filterwarnings("ignore:the record is too short to separate M2 and S2")
def test_summands_of_one_constituent_without_the_mean(spaces, others, rule):
    """On a third of a period, where the constant mean is hardly known: universal kriging by dense
    algebra (Rasmussen & Williams 2006, eq. 2.41), as the law of the sum of the summands."""
    places, x, y, _ = record(40, hours=PERIODS["M2"] / 3)
    pairs = [*((space, "M2") for space in spaces), *((spaces[0], name) for name in others)]
    kernels = [
        gp_orff.FieldProductKernel(space, TidalKernel(name, active_dims=(2,))).double()
        for space, name in pairs
    ]
    kernel = sum(kernels[1:], kernels[0])
    choice = {} if rule == "exact" else {"frequencies": gp_orff.Grid.for_data(x, tolerance=1e-7)}
    mine = conditioned(kernel, x, y + 5, **choice).posterior()
    mine = mine.ellipses("M2", places[:3], seed=1)

    def in_space_of(a, b):
        return sum(space(a, b).to_dense() for space in spaces)

    whole = kernel(x).to_dense() + 0.01 * torch.eye(80)
    phase = 2 * math.pi * x[:, 2].repeat_interleave(2) / PERIODS["M2"]
    across = in_space_of(places[:3], x[:, :2])
    cross = torch.cat([across * phase.cos(), across * phase.sin()])
    prior = in_space_of(places[:3], places[:3])
    ones = torch.eye(2).double().repeat(40, 1)
    weights = torch.linalg.solve(whole, cross.mT).mT
    unknown = torch.linalg.inv(ones.mT @ torch.linalg.solve(whole, ones))
    constant = unknown @ ones.mT @ torch.linalg.solve(whole, (y + 5).flatten())
    mean = weights @ ((y + 5).flatten() - ones @ constant)
    covariance = torch.block_diag(prior, prior) - weights @ cross.mT
    covariance += weights @ ones @ unknown @ (weights @ ones).mT
    root = torch.linalg.cholesky(covariance + 1e-12 * torch.eye(12))
    normal = torch.randn(20000, 12, generator=torch.Generator().manual_seed(2)).double()
    cosine, sine = (mean + normal @ root.mT).unflatten(-1, (2, 3, 2)).unbind(1)
    expected = TidalEllipses.of(cosine, sine)
    for name in ("semi_major", "semi_minor"):
        one, other = getattr(mine, name), getattr(expected, name)
        error = 5 * other.sd / 1000**0.5  # five standard errors of a mean of 1000 samples
        assert ((one.mean - other.mean).abs() < error).all()
        torch.testing.assert_close(one.sd, other.sd, rtol=0.15, atol=0)


@pytest.mark.slow
def test_ellipses_of_a_record_cover_the_truth():
    """Learned hyperparameters, and 20 positions of each of four records, which depend on one
    another: .95 within a tenth."""
    inside = {name: [] for name in ("semi_major", "semi_minor", "inclination", "phase")}
    for seed in range(4):
        places, x, y, parts = record(seed=seed)
        kernel = gp_orff.tides(in_space(1.0), NAMES, active_dims=(2,))
        field = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False).posterior()
        for name in NAMES:
            true = TidalEllipses.of(*parts[name].expand(3, -1, -1, -1).unbind(-1))
            found = field.ellipses(name, places)
            for quantity, hits in inside.items():
                own, truth = getattr(found, quantity), getattr(true, quantity).mean
                if quantity in ("inclination", "phase"):  # the same axis, from its other end
                    truth = truth + 180 * ((own.mean - truth) / 180).round()
                hits.append(((own.low <= truth) & (truth <= own.high)).double().mean())
    for quantity, hits in inside.items():
        assert sum(hits) / len(hits) > 0.85, quantity


def test_phases_count_from_the_epoch():
    places, x, y, _ = record(60)
    field = conditioned(tides(), x, y).posterior()
    later = PERIODS["M2"] * 0.2
    first, second = (field.ellipses("M2", places, epoch=epoch) for epoch in (0.0, later))
    change = (first.phase.mean - second.phase.mean - 72) / 360
    torch.testing.assert_close(change, change.round(), rtol=0, atol=0.02)
    torch.testing.assert_close(first.semi_major.mean, second.semi_major.mean, rtol=0.02, atol=0)


def test_one_constituent_and_a_mean():
    """A constant mean is no tide."""
    places, x, y, _ = record(80)
    ellipses = []
    for constant in (0.0, 3.0):
        field = conditioned(tides(["M2"]), x, y + constant).posterior()
        ellipses.append(field.ellipses("M2", places).semi_major.mean)
    torch.testing.assert_close(*ellipses, rtol=0, atol=1e-3)


def test_samples_of_the_prior_repeat():
    """After a period; without a domain, too, where the number of inputs is that of the columns."""
    _, x, _, _ = record(5)
    for domain in (None, ((0, 1), (0, 1), (0, 400))):
        paths = gp_orff.sample_prior(tides(["M2"]), 4, domain=domain)
        later = x + torch.tensor([0.0, 0.0, PERIODS["M2"]]).double()
        torch.testing.assert_close(paths(later), paths(x), rtol=0, atol=1e-6)


def test_tides_beside_eddies():
    places, x, y, parts = record(200, noise=0.05)
    eddies = in_space() * MaternKernel(nu=0.5, active_dims=(2,)).double()
    field = conditioned(tides() + eddies, x, y).posterior()
    found = field.ellipses("M2", places)
    true = TidalEllipses.of(*parts["M2"].expand(3, -1, -1, -1).unbind(-1))
    errors = (found.semi_major.mean - true.semi_major.mean) / found.semi_major.sd
    assert errors.square().mean() < 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"constituent": "S2"}, "constituent of the kernel, M2, K1"),
        ({"level": 1.5}, "level between 0 and 1"),
        ({"x": torch.zeros(2, 3)}, "2"),
        ({"num_samples": 1}, "at least two samples, got 1"),
        ({"num_samples": 0}, "positive integer, got 0"),
        ({"epoch": np.datetime64("2020-01-01")}, "a time as a number.*got .*2020-01-01"),
    ],
)
def test_wrong_ellipses(arguments, message):
    places, x, y, _ = record(30)
    field = conditioned(tides(), x, y).posterior()
    with pytest.raises(ValueError, match=message):
        field.ellipses(**{"constituent": "M2", "x": places, **arguments})


def test_one_constituent_of_several_periods():
    """As of two that were trained."""
    places, x, y, _ = record(30)
    field = conditioned(tides(["M2"]) + tides(["M2"], unit="min"), x, y).posterior()
    with pytest.raises(ValueError, match=r"one period of M2 along one column.*got 12.42.*, 745.2"):
        field.ellipses("M2", places)


def test_a_constituent_that_is_no_summand():
    places, x, y, _ = record(30)
    product = tides() * MaternKernel(active_dims=(2,)).double()
    field = conditioned(product, x, y).posterior()
    with pytest.raises(ValueError, match="as one summand"):
        field.ellipses("M2", places)


def test_places_in_other_units():
    places, x, y, _ = record(60)
    field = conditioned(tides(), UnitArray.of(x.numpy(), ["km", "km", "h"]), y).posterior()
    one = field.ellipses("M2", places)
    other = field.ellipses("M2", UnitArray.of(1000 * places.numpy(), ["m", "m"]))
    torch.testing.assert_close(one.semi_major.mean, other.semi_major.mean)


def dated(unit):
    """The observations of an M2 tide of amplitude 2 along x, with dates that `readings` counts in
    a unit."""
    hours = np.linspace(0.0, 60.0, 61)
    phase = 2 * np.pi * hours / PERIODS["M2"]
    dates = np.datetime64("2020-01-01") + (3600 * hours).astype("timedelta64[s]")
    where = np.random.default_rng(0).uniform(size=(2, 61))
    data = xarray.Dataset(
        {"u": ("n", 2 * np.cos(phase)), "v": ("n", np.sin(phase))},
        {"x": ("n", where[0], {"units": "km"}), "y": ("n", where[1]), "time": ("n", dates)},
    )
    return gp_orff.labelled.readings(data, ["u", "v"], ["x", "y", "time"], time_unit=unit)[:2]


def test_tides_of_dates():
    """An epoch is a date, or a number of the hours since 1970 that `readings` counts."""
    field = gp_orff.VectorFieldGP(tides(["M2", "K1"])).condition(*dated("h")).posterior()
    start = np.datetime64("2020-01-01")
    hours = (start - np.datetime64(0, "h")).astype(float)
    for epoch in (start, datetime(2020, 1, 1), "2020-01-01", hours):
        ellipse = field.ellipses("M2", [[0.5, 0.5]], epoch=epoch)
        assert ellipse.semi_major.mean.item() == pytest.approx(2, abs=0.1)
        assert (ellipse.phase.mean.item() + 90) % 180 == pytest.approx(90, abs=3)


def test_the_unit_of_time_is_that_of_the_data():
    """Hours are the default of `tides`, and seconds that of `readings`."""
    (x, y), model = dated("s"), gp_orff.VectorFieldGP(tides(["M2", "K1"]))
    with pytest.raises(ValueError, match=r"'h'.*got 's since 1970.*time_unit='h'"):
        model.condition(x, y)
    same = UnitArray.of(np.asarray(x), ["km", None, "seconds"])
    with pytest.raises(ValueError, match="unit="):
        model.fit([(same, y)])  # chunks, too
    gp_orff.VectorFieldGP(tides(["M2", "K1"], unit="s")).condition(same, y)
    gp_orff.VectorFieldGP(tides(["M2", "K1"], unit="min")).condition(*dated("m"))


def test_a_short_record_warns():
    """Of a day, which separates M2 and K1, but not M2 and S2."""
    _, x, y, _ = record(30, hours=30.0)
    with pytest.warns(gp_orff.DataWarning, match=r"M2 and S2 \(354.4\)"):
        conditioned(tides(["M2", "S2", "K1"]), x, y)
    conditioned(tides(), x, y)


@pytest.mark.parametrize("rule", ["exact", "grid"])
@pytest.mark.parametrize("bound", [None, 0.01])
def test_files(tmp_path, bound, rule):
    places, x, y, _ = record(40)
    choice = {} if rule == "exact" else {"frequencies": gp_orff.Grid.for_data(x, max_features=1000)}
    model = conditioned(tides(period_bound=bound), x, y, **choice)
    model.save(tmp_path / "tides.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "tides.pt")
    one, other = (own.posterior().ellipses("M2", places).phase for own in (model, again))
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-9)
    trained = [
        [p.requires_grad for name, p in own.named_parameters() if "period" in name]
        for own in (model.kernel, again.kernel)
    ]
    assert trained == [[bound is not None] * 2] * 2


@pytest.mark.slow
def test_a_season_is_fitted_on_a_grid():
    """Its period is learned on few observations, within a tenth of a period over the record."""
    _, x, _, _ = record(300, hours=200.0)
    noise = 0.05 * torch.randn(300, 2, generator=torch.Generator().manual_seed(3)).double()
    phase = 2 * math.pi * x[:, 2:] / PERIODS["M2"]
    truth = phase.cos() * (1 + x[:, :2]) + phase.sin() * x[:, :2].flip(-1)
    season = PeriodicKernel(active_dims=(2,))
    season.period_length = 12.3
    rule = gp_orff.Grid.for_data(x, max_features=600)
    model = gp_orff.VectorFieldGP(in_space(1.0) * season, frequencies=rule)
    field = model.fit(x, truth + noise, progress=False).posterior()
    (time,) = (own for own in model.kernel.modules() if isinstance(own, PeriodicKernel))
    assert time.period_length.item() == pytest.approx(PERIODS["M2"], abs=0.1 * 12.4**2 / 200)
    assert (field.mean(x) - truth).square().mean().sqrt() < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("frequencies", [None, gp_orff.QuasiMonteCarlo(256)])
def test_a_period_is_learned(frequencies):
    """Of a tide in which M2 is 0.3 % too long, within a bound of 1 %."""
    _, x, y, _ = record(200, hours=800.0, noise=0.02)
    x[:, 2] = 1.003 * x[:, 2]
    kernel = tides(period_bound=0.01)
    options = {} if frequencies is None else {"frequencies": frequencies}
    with gp_orff.settings.check_features(False):
        model = gp_orff.VectorFieldGP(kernel, **options).fit(x, y, progress=False)
    for own in model.kernel.modules():
        if isinstance(own, TidalKernel):
            assert 2 * own.period_length.item() / own.period == pytest.approx(1.003, abs=3e-4)


def with_eddies(count=800):
    """Points, tides with noise, eddies of 36 hours at the points, and their kernel."""
    _, x, y, _ = record(count, noise=0.05)
    time = MaternKernel(nu=0.5, active_dims=(2,)).double()
    time.lengthscale = 36.0
    kernel = in_space(0.3) * time
    root = torch.linalg.cholesky(kernel(x).to_dense().detach() + 1e-9 * torch.eye(2 * count))
    normal = torch.randn(2 * count, generator=torch.Generator().manual_seed(5)).double()
    return x, y, (root @ normal).unflatten(0, (count, 2)), kernel


def test_eddies_that_the_kernel_has_not_are_named():
    """Residuals of tides with eddies: with the kernel of tides alone, whose noise has the eddies,
    and with both. Of tides and noise, those of tides alone are not correlated."""
    x, y, values, eddies = with_eddies()
    alone = conditioned(tides(), x, y + values, noise=(0.05**2 + values.var().item()) ** 0.5)
    found = correlation_between_lines(alone.state, alone.mean)
    assert found > 0.3
    note = Calibration(1, 1, 1, 1.0, between_lines=found).note_of_lines
    assert "all kernels of time are periodic" in note
    assert "MaternKernel" in note  # the remedy
    for kernel, own in ((tides() + eddies, y + values), (tides(), y)):
        model = conditioned(kernel, x, own, noise=0.05)
        assert correlation_between_lines(model.state, model.mean) is None


@pytest.mark.slow
def test_a_fit_of_tides_alone_warns_of_eddies():
    x, y, values, _ = with_eddies()
    model = gp_orff.VectorFieldGP(gp_orff.tides(in_space(1.0), NAMES, active_dims=(2,)))
    with pytest.warns(gp_orff.CalibrationWarning, match="all kernels of time are periodic"):
        model.fit(x, y + values, progress=False)


def test_grid_for_tides_converges_to_the_exact_kernel():
    """With more frequencies in time, at every station and hour. Omitted ones widen the intervals;
    they are a share of about 1/(ν ℓ) of a Matérn-1/2 kernel, whose square root is below 0.1 here.
    """
    decay = MaternKernel(nu=0.5, active_dims=(2,)).double()
    decay.lengthscale = 20.0
    kernel = tides() + in_space() * decay
    box = ((0.0, 1.0), (0.0, 1.0), (0.0, 48.0))
    generator = torch.Generator().manual_seed(0)
    stations = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    hours = torch.arange(0.0, 48.0, 2.0, dtype=torch.float64)
    x = torch.cat([stations.repeat(24, 1), hours.repeat_interleave(6)[:, None]], dim=-1)
    y = gp_orff.sample_prior(kernel, 1, seed=1, domain=box)(x)[0]
    places = torch.rand(20, 3, generator=generator, dtype=torch.float64) * hours.new_tensor(
        [1.0, 1.0, 48.0]
    )

    def moments(**rule):
        model = gp_orff.VectorFieldGP(kernel, **rule)
        model.likelihood.noise = 0.01
        part = model.condition(x, y).posterior().part(0)
        return part.mean(places), part.variance(places).sqrt()

    mean, deviation = moments()
    differences = []
    for fastest in (None, 30.0):
        rule = gp_orff.Grid.for_tides(x, kernel, domain=box, fastest=fastest)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", gp_orff.GridWarning)
            found, wider = moments(frequencies=rule)
        assert (wider > 0.98 * deviation).all()
        differences.append(((found - mean).abs() / deviation).max().item())
    assert differences[1] < 0.3 * differences[0]
    assert differences[1] < 0.3


def test_grid_for_tides_needs_lines():
    with pytest.raises(ValueError, match=r"expects a kernel with lines, such as gp_orff\.tides"):
        gp_orff.Grid.for_tides(torch.rand(4, 3), in_space())


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"x": torch.rand(4, 2)}, ValueError, "3 input columns of the kernel, got 2 and 2"),
        ({"domain": ((0, 1), (0, 1))}, ValueError, "3 input columns of the kernel, got 3 and 2"),
        ({"domain": "box"}, ValueError, "Grid expects domain="),
        ({"fastest": 0.0}, ValueError, "expects a positive fastest, got 0"),
        ({"fastest": math.nan}, ValueError, "expects a positive fastest, got nan"),
        ({"x": np.array(["2024-01-01"], dtype="M8[s]")}, TypeError, "as numbers, got type date"),
        ({"kernel": gp_orff.VectorFieldGP(tides())}, TypeError, r"pass model\.kernel"),
    ],
)
def test_mistakes_in_a_grid_for_tides(changed, error, match):
    arguments = {"x": torch.rand(4, 3), "kernel": tides()} | changed
    with pytest.raises(error, match=match):
        gp_orff.Grid.for_tides(**arguments)


def test_a_grid_for_tides_of_a_table():
    x = torch.rand(9, 3, dtype=torch.float64)
    rule = gp_orff.Grid.for_tides(pandas.DataFrame(x.numpy(), columns=["x", "y", "t"]), tides())
    assert rule == gp_orff.Grid.for_tides(x, tides())


def test_a_season_that_is_almost_constant_has_a_fastest_frequency():
    """Its lines are a constant and the year, in days."""
    season = PeriodicKernel(active_dims=(2,)).double()
    season.period_length, season.lengthscale = 365.25, 1e3
    x = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 3652.5]], dtype=torch.float64)
    rule = gp_orff.Grid.for_tides(x, in_space() * season)
    assert rule.largest_index[2] * rule.spacing[2] == pytest.approx(1.8 * 2 * math.pi / 365.25, 0.1)


def test_a_grid_for_tides_of_stations_on_a_line():
    """Their features are products, too: of 40 hours at 7 stations along a coast."""
    decay = MaternKernel(nu=0.5, active_dims=(2,)).double()
    decay.lengthscale = 20.0
    kernel = tides() + in_space() * decay
    places = torch.stack([torch.linspace(0, 1, 7), torch.full((7,), 0.3)], dim=-1).double()
    hours = torch.arange(40.0).double()
    x = torch.cat([places.repeat(40, 1), hours.repeat_interleave(7)[:, None]], dim=-1)
    model = gp_orff.VectorFieldGP(
        kernel, frequencies=gp_orff.Grid.for_tides(x, kernel, fastest=15.0)
    )
    model.likelihood.noise = 0.01
    y = gp_orff.sample_prior(kernel, 1, domain=((0, 1), (0, 1), (0, 40)))(x)[0]
    found = model.condition(x, y).posterior().mean(x)
    exact = gp_orff.VectorFieldGP(kernel)
    exact.likelihood.noise = 0.01
    expected = exact.condition(x, y).posterior()
    error = (found - expected.mean(x)).abs() / expected.variance(x).sqrt()
    assert type(model.state.inference).__name__ == "ProductInference"
    assert error.max() < 0.3


def test_grid_for_tides_ignores_lengthscales_of_negligible_terms():
    """The shortest lengthscale is that of terms with a hundredth of the variance or more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 3, generator=generator, dtype=torch.float64)

    def largest(share):
        kernel = tides()
        minor = kernel.kernels[-1].field_kernel.curl_free
        minor.base_kernel.base_kernel.lengthscale = 0.01
        single, every = (k(x[:1, :2]).to_dense().trace().item() for k in (minor, in_space()))
        minor.outputscale = minor.outputscale * share * 2 * every / single  # two constituents
        return gp_orff.Grid.for_tides(x, kernel).largest_index[0]

    assert largest(0.001) < 5
    assert largest(0.1) > 50
