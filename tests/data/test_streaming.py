"""Updates, statistics and streams: the posterior does not depend on how the data arrive."""

import copy
import dataclasses
import pickle
from functools import partial

import gpytorch
import numpy as np
import pytest
import torch

import gp_orff
from gp_orff.data import dataset as held
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Components, GroupKey
from gp_orff.data.sites import fingerprints, lookup
from gp_orff.inference import iterative
from gp_orff.inference.features import IterativeInference
from tests.support.fields import conditioned, curl_free, flow

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")

RULES = {
    "auto": lambda x: gp_orff.Auto(exact_values=500),
    "grid": lambda x: gp_orff.Grid.for_data(x, tolerance=1e-4),
    "grid_by_hand": lambda x: gp_orff.Grid(spacing=0.8, cutoff=15.0),
    "monte_carlo": lambda x: gp_orff.MonteCarlo(40),
    "exact": lambda x: gp_orff.Auto(exact_values=10_000),
}


def compare(model, expected, atol=1e-9, xs=None):
    xs = 1.8 * torch.rand(40, 2, generator=torch.Generator().manual_seed(9)).double() - 0.9
    one, other = model.posterior(), expected.posterior()
    torch.testing.assert_close(one.mean(xs), other.mean(xs), rtol=0, atol=atol)
    torch.testing.assert_close(one.variance(xs), other.variance(xs), rtol=0, atol=atol)
    size = expected.state.data.num_values
    difference = model.log_marginal_likelihood() - expected.log_marginal_likelihood()
    assert abs(difference) < atol * size


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_updates_are_one_pass(rule):
    """In ten chunks, from the exact kernel to a grid where the rule says so."""
    x, y, _ = flow(400 if rule == "exact" else 1000)
    expected = conditioned(curl_free(0.4), x, y, RULES[rule](x), noise=0.01)
    pieces = list(zip(x.chunk(10), y.chunk(10), strict=True))
    model = conditioned(curl_free(0.4), *pieces[0], RULES[rule](x), noise=0.01)
    for piece in pieces[1:]:
        assert model.update(*piece) is model
    compare(model, expected)
    constants = [m.constant for m in model.mean.base_means]
    torch.testing.assert_close(constants, [m.constant for m in expected.mean.base_means])


def test_statistics_of_few_readings():
    """Fewer numbers than features, of which nothing but statistics is held."""
    x, y, _ = flow(300)
    rule = gp_orff.Grid(spacing=0.8, cutoff=15.0)
    model = conditioned(curl_free(0.4), x, y, rule, noise=0.01)
    model.condition(model.statistics_of(x[:9], y[:9]))
    compare(model, conditioned(curl_free(0.4), x[:9], y[:9], rule, noise=0.01))


@pytest.mark.slow
def test_statistics_of_few_readings_of_a_rough_field(monkeypatch):
    """Iterations serve them: there are no readings for the covariance that would be cheaper. The
    mean is that of the exact kernel, to what the grid truncates. 60 numbers need no large block of
    the preconditioner."""
    small = partial(iterative.precondition, size=500)
    monkeypatch.setattr(iterative, "precondition", lambda *given: small(*given[:3]))
    x, y, _ = flow(30)
    kernel = curl_free(0.5, lambda: gpytorch.kernels.MaternKernel(nu=1.5))
    model = conditioned(kernel, x, y, None, noise=0.02)
    field, xs = model.posterior(), 0.8 * flow(20, seed=4)[0]
    mean, sd = field.mean(xs), field.variance(xs).sqrt()
    model.condition(model.statistics)
    assert isinstance(model.state.inference, IterativeInference)
    assert ((model.posterior().mean(xs) - mean).abs() < 0.01 * sd).all()


@pytest.mark.slow
def test_reading_by_reading():
    """A robot's loop, beyond the number of pieces that are joined, and out of the first box."""
    x, y, _ = flow(100)
    x, order = x.sort(dim=0)[0], x[:, 0].argsort()
    y = y[order]
    expected = conditioned(curl_free(0.4), x, y, None, noise=0.01)
    model = conditioned(curl_free(0.4), x[:60], y[:60], None, noise=0.01)
    for i in range(60, 100):
        model.update(x[i : i + 1], y[i : i + 1])
        if i % 20 == 0:
            model.posterior().mean(x[i : i + 1])
    compare(model, expected)
    assert len(model.state.data.sources) <= 33


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["auto", "monte_carlo"])
def test_chunks_and_memory_maps_are_arrays(rule, tmp_path):
    x, y, _ = flow(2500)
    expected = conditioned(curl_free(0.4), x, y, RULES[rule](x), noise=0.01)
    both = torch.cat([x, y], dim=-1).numpy()
    both.tofile(tmp_path / "data.bin")
    mapped = np.memmap(tmp_path / "data.bin", dtype=np.float64, mode="r", shape=both.shape)
    chunks = [(x[i : i + 300], y[i : i + 300]) for i in range(0, 2500, 300)]

    class Files:
        def __iter__(self):
            for own in chunks:
                yield {"x": own[0].numpy(), "y": own[1]}

    ways = {
        "list": (chunks,),
        "object": (Files(),),
        "map": (mapped[:, :2], mapped[:, 2:]),
        "float32": (x.float(), y.float()),
    }
    for name, way in ways.items():
        model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=RULES[rule](x))
        model.likelihood.noise = 0.01
        compare(model.condition(*way), expected, 1e-4 if name == "float32" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["auto", "monte_carlo"])
def test_a_fit_to_chunks_is_a_fit_to_arrays(rule):
    x, y, _ = flow(130)
    results = []
    for data in ((x, y), ([(x[:50], y[:50]), (x[50:], y[50:])],)):
        model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=RULES[rule](x))
        with gp_orff.settings.check_calibration(False):  # few random features are overconfident
            model.fit(*data, progress=False)
        results.append(model.kernel.base_kernel.base_kernel.lengthscale.item())
    # frequencies that move with the lengthscale have steps that rounding changes
    assert results[0] == pytest.approx(results[1], rel=1e-6 if rule == "auto" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["trace", "base"])
def test_gradients_through_a_stream_are_those_of_arrays(measure):
    """Random frequencies: the derivative is a second visit."""
    x, y, _ = flow(250)
    gradients = []
    for data in ((x, y), ([(x[:100], y[:100]), (x[100:], y[100:])],)):
        kernel = curl_free(0.4)
        model = gp_orff.VectorFieldGP(
            kernel, frequencies=gp_orff.MonteCarlo(30, measure=measure)
        ).condition(*data)
        found = torch.autograd.grad(model.log_marginal_likelihood(), list(kernel.parameters()))
        gradients.append(torch.cat([g.flatten() for g in found]))
    features = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(30, measure=measure))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=0)
    covariance = features(x).to_dense() + model.likelihood.noise * torch.eye(500).double()
    ones = torch.eye(2).double().repeat(250, 1)
    white = torch.linalg.solve(covariance, torch.cat([ones, y.reshape(-1, 1)], dim=-1))
    best = torch.linalg.solve(ones.mT @ white[:, :2], ones.mT @ white[:, 2])
    residual = y.reshape(-1) - ones @ best
    value = -0.5 * (residual @ torch.linalg.solve(covariance, residual) + covariance.logdet())
    expected = torch.autograd.grad(value, list(kernel.parameters()))
    expected = torch.cat([g.flatten() for g in expected])
    torch.testing.assert_close(gradients[1], expected, rtol=1e-7, atol=1e-7 * expected.norm())


def statistics_of(values):
    """All numbers of FieldStatistics."""
    for own in values.groups.values():
        yield from (own.cross, own.second_moment, own.total)
        for part in own.moments:
            yield from (torch.view_as_real(part.gram), part.column_sum, torch.as_tensor(part.mass))


def test_statistics_add_up_in_any_order():
    """Shuffled, split, merged and removed: to 1e-10 of their size."""
    x, y, _ = flow(2000)
    y[::7, 0] = float("nan")
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=gp_orff.Auto(exact_values=0))
    model.condition(x, y, missing="mask")
    whole = model.statistics
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    parts = [model.statistics_of(x[i], y[i], missing="mask") for i in order.split(333)]
    extra = model.statistics_of(x[:50], y[:50], missing="mask")
    for found in (sum(parts), sum(parts[::-1]), whole + extra - extra, 0.5 * (whole + whole)):
        assert found.num_values == whole.num_values
        for mine, theirs in zip(
            statistics_of(_sorted(found)), statistics_of(_sorted(whole)), strict=True
        ):
            assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max()
    with pytest.raises(ValueError, match="no more observations than there are"):
        extra - whole
    with pytest.raises(ValueError, match="positive factor"):
        -1.0 * whole
    other = gp_orff.VectorFieldGP(curl_free(0.3), frequencies=gp_orff.Auto(exact_values=0))
    with pytest.raises(ValueError, match="same frequencies"):
        whole + other.condition(x, y, missing="mask").statistics


@pytest.mark.parametrize("trend", [False, True])
def test_statistics_of_parts_add_up_under_noise_of_heavy_tails(trend):
    """Every part has the weights its readings were given, those of an update too, in any order and
    whatever stands beside it; also where a trend was taken from them."""
    x, y, _ = flow(400)
    y[::7, 0], y[::9] = float("nan"), 3 * y[::9]
    group = np.where(np.arange(400) % 3, "", "buoy")
    x[10:20], y[10:20], group[10:20] = x[30:40], y[30:40], group[30:40]
    mean = gpytorch.means.LinearMean(2).double() if trend else None
    mean = gpytorch.means.MultitaskMean(mean, 2) if trend else None
    model = gp_orff.VectorFieldGP(
        curl_free(0.4), likelihood=gp_orff.MultitaskStudentTLikelihood(2), mean=mean
    )
    how = {"missing": "mask", "merge": 0}
    model.condition(x[:300], y[:300], group=group[:300], **how)
    model.update(x[300:], y[300:], group=group[300:], **how)
    whole = model.statistics
    pieces = np.array_split(np.random.default_rng(0).permutation(400), 4)
    found = sum(model.statistics_of(x[i], y[i], group=group[i], **how) for i in pieces)
    assert found.elbo_correction == pytest.approx(whole.elbo_correction, rel=1e-9)
    assert found.groups.keys() == whole.groups.keys()
    for key, own in whole.groups.items():
        theirs = dataclasses.astuple(found.groups[key].weights)
        assert theirs == pytest.approx(dataclasses.astuple(own.weights), rel=1e-9)
        other = gp_orff.FieldStatistics(found.phi, {key: found.groups[key]})
        own = gp_orff.FieldStatistics(whole.phi, {key: own})
        for mine, theirs in zip(statistics_of(other), statistics_of(own), strict=True):
            assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max()


def test_fingerprints_are_equal_for_equal_observations_alone():
    """On a lattice of few numbers, each pair of which differs in one; −0 is 0, and digits beyond
    those of single precision do not count."""
    lattice = np.stack(np.meshgrid(*[np.arange(-3.0, 4.0)] * 3), -1).reshape(-1, 3)
    x, y = torch.from_numpy(lattice).split([2, 1], dim=-1)

    def of(x, y, label=""):
        return fingerprints(Observations(GroupKey(label, Components.every(1)), x, y))

    both = np.concatenate([of(x, y), of(x, y, "other"), of(x + 1e-9, y), of(x, y + 1e-3)])
    assert len(np.unique(both)) == len(both)
    assert np.array_equal(of(x, y), of(torch.where(x == 0, -0.0, x), y * (1 + 1e-12)))


def test_readings_are_found_again():
    """Against a search one by one, numbers that stand there again and again among them."""
    rng = np.random.default_rng(0)
    for sizes in ((50, 30), (1, 5), (20, 200)):
        there, asked = (rng.integers(0, 25, size) for size in sizes)
        left = list(there)
        for own, place in zip(asked, lookup(asked, there), strict=True):
            expected = left.index(own) if own in left else -1
            assert place == expected
            if place >= 0:
                left[place] = -1


def _sorted(statistics):
    keys = sorted(statistics.groups, key=lambda key: key.pattern.columns)
    return gp_orff.FieldStatistics(statistics.phi, {key: statistics.groups[key] for key in keys})


def test_removed_readings_are_gone_and_old_ones_fade():
    x, y, field = flow(2000)
    bad = y.clone()
    bad[:200] += 5.0
    model = conditioned(curl_free(0.4), x, bad, None, noise=0.01)
    wrong = (model.posterior().mean(x) - field(x)).square().mean().sqrt()
    kept = conditioned(curl_free(0.4), x[200:], y[200:], None, noise=0.01)
    model.condition(model.statistics - model.statistics_of(x[:200], bad[:200]))
    compare(model, kept, atol=2e-3)
    assert (model.posterior().mean(x) - field(x)).square().mean().sqrt() < 0.2 * wrong
    before = model.posterior().variance(x).mean()
    model.condition(0.25 * model.statistics)  # every reading counts a quarter: error bars double
    assert 3 < model.posterior().variance(x).mean() / before <= 4


def test_workers_merge_exactly():
    x, y, _ = flow(2400)
    model = conditioned(curl_free(0.4), x[:800], y[:800], gp_orff.Auto(exact_values=0), noise=0.01)
    worker = pickle.loads(pickle.dumps(model))
    part = pickle.loads(pickle.dumps(worker.statistics_of(x[800:1600], y[800:1600])))
    inside = (x[1600:].abs() < 1).all(-1)
    other = copy.deepcopy(model).statistics_of(x[1600:][inside], y[1600:][inside])
    whole = torch.cat([torch.ones(1600, dtype=torch.bool), inside])
    expected = conditioned(curl_free(0.4), x[whole], y[whole], None, noise=0.01)
    compare(model.update(part + other), expected, atol=2e-3)


@pytest.fixture
def _hardly_anything_is_kept(monkeypatch):
    monkeypatch.setattr(held, "MOST_KEPT", 3000)


@pytest.mark.slow
@pytest.mark.usefixtures("_hardly_anything_is_kept")
def test_memory_stays_flat_and_the_model_says_so():
    """Data are dropped, not the posterior; training goes on from statistics alone."""
    x, y, field = flow(3000)
    inner = x.abs().amax(-1) < 0.9
    x, y = torch.cat([x[~inner][:200], x[inner]]), torch.cat([y[~inner][:200], y[inner]])
    pieces = list(zip(x.split(200), y.split(200), strict=True))
    model = conditioned(curl_free(0.35), *pieces[0], None, noise=0.02)
    assert model.report.held == "data"
    for piece in pieces[1:]:
        model.update(*piece)
    assert model.report.held == "statistics"
    assert isinstance(model.state.data, held.StatisticsOnly)
    expected = conditioned(curl_free(0.35), x, y, None, noise=0.02)
    compare(model, expected, atol=1e-3)
    wide = 1.4 * x[:200]  # beyond the data's box, within the domain of the statistics
    one, other = model.posterior(), expected.posterior()
    torch.testing.assert_close(one.mean(wide), other.mean(wide), rtol=0, atol=2e-2)
    with pytest.raises(ValueError, match=r"inside the grid's domain"):
        one.mean(9 * x[:3])
    before = one.mean(x)
    with pytest.raises(ValueError, match="no longer stored"):
        model.update(9 * x[:3], y[:3])
    assert torch.equal(model.posterior().mean(x), before)

    model.fit(progress=False)  # without data
    expected.fit(progress=False, warm_start=True)
    for a, b in zip(model.kernel.parameters(), expected.kernel.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)
    error = (model.posterior().mean(x) - field(x)).square().mean().sqrt()
    assert error < 0.03
    model.update(*pieces[3])


@pytest.mark.usefixtures("_hardly_anything_is_kept")
def test_random_features_without_data_keep_their_hyperparameters():
    x, y, _ = flow(2000)
    rule = gp_orff.MonteCarlo(40)
    model = conditioned(curl_free(0.35), x[:500], y[:500], rule, noise=0.02)
    for rows in torch.arange(500, 2000).split(500):
        model.update(x[rows], y[rows])
    compare(model, conditioned(curl_free(0.35), x, y, rule, noise=0.02))
    with pytest.raises(RuntimeError, match=r"depend on the hyperparameters.*Grid"):
        model.fit(progress=False)


@pytest.mark.slow
def test_learning_again_from_what_is_held():
    x, y, _ = flow(130)
    model, expected = (
        gp_orff.VectorFieldGP(curl_free(), frequencies=gp_orff.Auto(exact_values=0))
        for _ in range(2)
    )
    model.fit(x[:90], y[:90], progress=False)
    model.update(x[90:], y[90:]).fit(progress=False)
    expected.fit(x, y, progress=False)
    for a, b in zip(model.kernel.parameters(), expected.kernel.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # the same steps, but for rounding


def test_arrays_may_change_after_they_were_given():
    x, y, _ = flow(300)
    model = conditioned(curl_free(0.4), x.clone(), y, None, noise=0.01)
    buffer_x, buffer_y = x[:1].clone(), y[:1].clone()
    model.update(buffer_x, buffer_y)
    before = model.posterior().mean(x)
    buffer_x += 1e6
    y[:] = 0.0
    model.likelihood.noise = 0.0100001
    torch.testing.assert_close(model.posterior().mean(x), before, rtol=0, atol=1e-4)


BAD = {
    "iterator": (lambda x, y: (iter([(x, y)]),), TypeError, "iterated repeatedly"),
    "nothing": (lambda x, y: ([],), ValueError, "empty iterable"),
    "x_alone": (lambda x, y: (x,), TypeError, "x alone"),
    "one_chunk": (lambda x, y: ({"x": x, "y": y},), TypeError, r"fit\(\[chunk\]\)"),
    "number": (lambda x, y: (3,), TypeError, "iterable of chunks"),
    "triples": (lambda x, y: ([(x, y, y)],), TypeError, "got 3 parts"),
    "keys": (lambda x, y: ([{"x": x, "z": y}],), ValueError, r"\['x', 'z'\]"),
    "columns": (lambda x, y: ([(x, y), (x[:, :1], y)],), ValueError, "2 columns"),
    "late": (lambda x, y: ([(x, y), (x, y * float("nan"))],), ValueError, "NaN"),
    "length": (lambda x, y: ([(x, y[1:])],), ValueError, "equal length"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["auto", "exact"])
@pytest.mark.parametrize("name", BAD)
def test_bad_streams_are_refused_and_nothing_is_lost(name, rule):
    x, y, _ = flow(60 if rule == "exact" else 300)
    model = conditioned(curl_free(0.4), x, y, RULES[rule](x), noise=0.01)
    before, evidence = model.posterior().mean(x), model.log_marginal_likelihood().item()
    change, error, message = BAD[name]
    for method in (model.condition, model.update, model.statistics_of, model.fit):
        with pytest.raises(error, match=message):
            method(*change(x, y))
        assert torch.equal(model.posterior().mean(x), before)
        assert model.log_marginal_likelihood().item() == evidence


def test_a_model_without_data_says_so():
    x, y, _ = flow(10)
    model = gp_orff.VectorFieldGP(curl_free())
    for ask in (
        lambda: model.update(x, y),
        lambda: model.statistics,
        lambda: model.fit(progress=False),
        lambda: model.leave_one_out(x, y),
    ):
        with pytest.raises(RuntimeError, match=r"no data yet: call fit\(x, y\)"):
            ask()


def test_statistics_of_a_mean_that_is_taken_as_it_is():
    """A trend is subtracted from everything that comes."""
    x, y, _ = flow(1500)

    class Trend(gpytorch.means.Mean):
        def forward(self, points):
            return torch.stack([points.sum(-1), 2 * points[..., 0]], dim=-1)

    trend = Trend()
    expected = conditioned(curl_free(0.4), x, y, None, noise=0.01, mean=trend)
    model = conditioned(curl_free(0.4), x[:700], y[:700], None, noise=0.01, mean=trend)
    compare(model.update(x[700:], y[700:]), expected)
    plain = conditioned(
        curl_free(0.4), x, y - trend(x), None, noise=0.01, mean=gpytorch.means.ZeroMean()
    )
    torch.testing.assert_close(
        model.posterior().mean(x), plain.posterior().mean(x) + trend(x), rtol=0, atol=1e-9
    )


def test_statistics_follow_the_hyperparameters(tmp_path):
    """Set by hand or learned: what is asked of the model, or saved, is never of the old ones."""
    x, y, _ = flow(800)
    model = conditioned(curl_free(0.4), x, y, gp_orff.Auto(exact_values=0), noise=0.01)
    old = model.statistics
    lengthscale_of(model).lengthscale = 1.2
    assert not model.statistics.phi.same(old.phi)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert loaded.log_marginal_likelihood() == model.log_marginal_likelihood()
    with pytest.raises(ValueError, match="got other frequencies"):
        model.condition(old)


def lengthscale_of(model):
    return model.kernel.base_kernel.base_kernel


def test_new_readings_at_the_edge_of_the_domain(tmp_path, monkeypatch):
    """Where only statistics are held, a quarter of the extent beyond the data is as good as
    within it."""
    x, y, field = flow(1500)
    model = conditioned(curl_free(0.3), x, y, gp_orff.Auto(exact_values=0), noise=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(held, "MOST_KEPT", 0)  # a file of as many readings would have them
        model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    (low, high), _ = loaded.state.data.domain
    assert high - low > 2.9  # the data have an extent of 2
    near = torch.tensor([[low, 0], [high, 0], [high - 0.1, 0.1]], dtype=torch.float64)
    loaded.update(near, field(near))
    expected = conditioned(
        curl_free(0.3), torch.cat([x, near]), torch.cat([y, field(near)]), None, noise=0.01
    )
    for points in (near, x[:200]):
        one, other = loaded.posterior(), expected.posterior()
        sd = other.variance(points).sqrt()
        assert ((one.mean(points) - other.mean(points)) / sd).abs().max() < 0.05
        assert (one.variance(points).sqrt() / sd - 1).abs().max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["condition", "update", "fit"])
@pytest.mark.parametrize("rule", ["auto", "exact"])
def test_a_stream_that_breaks_halfway_changes_nothing(rule, method):
    """It was fine when it was looked at, and fails while it is read."""
    x, y, _ = flow(360)
    model = conditioned(curl_free(0.4), x, y, RULES[rule](x), noise=0.01)
    before = [model.posterior().mean(x), model.log_marginal_likelihood(), model.report]

    class Unplugged:
        looks = 0

        def __iter__(self):
            self.looks += 1
            for part in (x[:160], x[160:]):
                if self.looks > 1 and part is not x and len(part) == 200:
                    raise OSError("the disk is gone")
                yield {"x": part, "y": y[: len(part)], "group": "new"}

    with pytest.raises(OSError, match="the disk is gone"):
        getattr(model, method)(Unplugged())
    assert torch.equal(model.posterior().mean(x), before[0])
    assert model.log_marginal_likelihood() == before[1]
    assert model.report is before[2]
    assert list(model.likelihoods) == []


@pytest.mark.parametrize("how", ["readings", "statistics"])
def test_an_instrument_joins(how):
    """A group that the model has not met, added to a grid, or merged."""
    x, y, _ = flow(900)
    chunks = [{"x": x[:500], "y": y[:500]}, {"x": x[500:], "y": y[500:], "group": "keys"}]
    rule = gp_orff.Auto(exact_values=0)
    expected = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=rule)
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=rule)
    for own in (model, expected):
        own.likelihood.noise = 0.01
    expected.condition(chunks)
    model.condition(x[:500], y[:500])
    new = x[500:].clamp(-0.99, 0.99)
    if how == "readings":
        model.update(x[500:], y[500:], group="keys")
        compare(model, expected, atol=1e-6)
    else:
        part = copy.deepcopy(model).statistics_of(new, y[500:], group="keys")
        model.update(part)
    assert list(model.likelihoods) == ["keys"]
    assert model.report.noise["keys"] == model.likelihoods["keys"].noise.item()
    model.likelihoods["keys"].noise = 100.0  # of no weight
    alone = conditioned(curl_free(0.4), x[:500], y[:500], rule, noise=0.01)
    change = (model.posterior().mean(x) - alone.posterior().mean(x)).square().mean()
    assert change < 0.01 * alone.posterior().variance(x).mean()


def test_merged_statistics_keep_a_mean_that_is_fixed():
    x, y, _ = flow(900)
    zero = gpytorch.means.ZeroMean()
    rule = gp_orff.Auto(exact_values=0)
    model = conditioned(curl_free(0.4), x[:600], y[:600] + 5, rule, noise=0.01, mean=zero)
    inside = x[600:].clamp(-0.99, 0.99)
    part = copy.deepcopy(model).statistics_of(inside, y[600:] + 5)
    expected = conditioned(
        curl_free(0.4), torch.cat([x[:600], inside]), y + 5, rule, noise=0.01, mean=zero
    )
    compare(model.update(part), expected, atol=2e-3)


def test_statistics_carry_the_elbo_correction_of_their_weights():
    """Of readings under Student-t noise: what is added can be taken away again."""
    x, y, _ = flow(700)
    model = gp_orff.VectorFieldGP(
        curl_free(0.4), likelihood=gp_orff.MultitaskStudentTLikelihood(2).double()
    )
    model.likelihood.noise = 0.01
    model.condition(x, y)
    part = model.statistics_of(x[:50], y[:50])
    assert part.elbo_correction != 0.0
    both = model.statistics + part
    assert both.elbo_correction == pytest.approx(
        model.statistics.elbo_correction + part.elbo_correction
    )
    assert (both - part).elbo_correction == pytest.approx(model.statistics.elbo_correction)
    assert (0.5 * both).elbo_correction == pytest.approx(0.5 * both.elbo_correction)
    expected = copy.deepcopy(model).condition(model.statistics).log_marginal_likelihood().item()
    model.condition(both - part)
    assert model.log_marginal_likelihood().item() == pytest.approx(expected, rel=1e-9)


def test_statistics_of_nothing_are_refused():
    x, y, _ = flow(700)
    model = conditioned(curl_free(0.4), x, y, gp_orff.Auto(exact_values=0), noise=0.01)
    with pytest.raises(ValueError, match="at least one observation"):
        model.condition(model.statistics - model.statistics)


def test_arrays_beside_chunks_are_refused():
    x, y, _ = flow(30)
    with pytest.raises(ValueError, match="in the chunks, got them"):
        gp_orff.VectorFieldGP(curl_free(0.4)).condition([(x, y)], variances=torch.ones(30))


def test_arrays_as_files_give_them():
    """Big-endian numbers, masked arrays, lists, tables: read as what they mean."""
    x, y, _ = flow(40)
    expected = conditioned(curl_free(0.4), x, y, None, noise=0.01).posterior().mean(x)
    masked = np.ma.masked_array(y.numpy(), mask=np.zeros_like(y, dtype=bool))
    for given in (y.numpy().astype(">f8"), y.tolist(), masked):
        model = conditioned(curl_free(0.4), x.numpy().astype(">f8"), given, None, noise=0.01)
        assert torch.equal(model.posterior().mean(x), expected)
    masked.mask[3] = True
    with pytest.raises(ValueError, match=r"got 2 NaN.*missing='mask'"):
        conditioned(curl_free(0.4), x, masked, None)
