"""Repeated positions: sites, exact merging, copies, and points that a prior cannot distinguish."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from torch.distributions import MultivariateNormal

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.noise import Noise
from gp_orff.data.reading import Options, read
from gp_orff.data.sites import Repeats, least_sites, merged, sites
from gp_orff.inference.exact import ExactInference, may_suffice, merge_distance
from tests.support.fields import curl_free, directions, draw, uniform

PLACES, RECORDS = 12, 40
PLACE = np.random.default_rng(5).integers(PLACES, size=RECORDS)
MISSING = draw(RECORDS, 2, seed=4) > 1.2
OBSERVED = {
    "vectors": {},
    "variances": {"variances": uniform(RECORDS, seed=6) + 0.1},
    "a variance for each component": {"variances": uniform(RECORDS, 2, seed=6) + 0.1},
    "gaps": {"missing": "mask"},
    "directions": {"directions": directions(PLACES)[PLACE]},
    "directions that differ": {"directions": directions(RECORDS)},
    "groups": {"group": ["a" if i % 3 else "b" for i in range(RECORDS)]},
}


def records(options):
    x, y = uniform(PLACES, 2)[PLACE], draw(RECORDS, 2, seed=1)
    if "missing" in options:
        y[MISSING] = math.nan
    return x, y[:, 0] if "directions" in options else y


def conditioned(x, y, likelihood=None, **options):
    model = gp_orff.VectorFieldGP(curl_free(0.7), likelihood=likelihood)
    model.likelihood.noise = 0.3
    return model.condition(x, y, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBSERVED)
def test_merged_records_give_what_all_records_give(kind):
    """Up to rounding: merging is exact where positions are equal."""
    options = OBSERVED[kind]
    x, y = records(options)
    results = []
    for merge in (None, 0):
        model = conditioned(x, y, merge=merge, **options)
        evidence = model.log_marginal_likelihood()
        gradient = torch.autograd.grad(
            evidence, [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
        field, points = model.posterior(), uniform(5, 2, seed=9)
        values = [evidence, field.mean(points), field.variance(points)]
        if kind != "a variance for each component":
            left_out = model.leave_one_out(x, y, **options)
            values += [left_out.residual.nan_to_num(), left_out.log_density.nan_to_num()]
        results.append([*values, *(g for g in gradient if g is not None)])
        sizes = model.state.inference.size
        assert (sizes == model.state.data.num_values) == (
            merge == 0 or kind == "directions that differ"
        )
    for ours, all_records in zip(*results, strict=True):
        torch.testing.assert_close(ours, all_records, rtol=1e-8, atol=1e-8)


def test_student_t_weights_are_those_of_all_records():
    x, y = (values[:20] for values in records({}))
    y[::9] += 5
    results = []
    for merge in (None, 0):
        likelihood = gp_orff.MultitaskStudentTLikelihood(2)
        model = conditioned(x, y, likelihood, merge=merge)
        results.append([model.log_marginal_likelihood(), model.leave_one_out(x, y).weight])
    for ours, all_records in zip(*results, strict=True):  # the E-step stops at 1e-6 per number
        torch.testing.assert_close(ours, all_records, rtol=1e-6, atol=1e-6)


def test_directions_that_turn_a_little_share_a_site():
    """By 1e-5; the mean of a site is along their mean, so that the posterior is that of all records
    to a few times that."""
    u = directions(PLACES)[PLACE]
    turned = torch.nn.functional.normalize(u + 1e-5 * draw(RECORDS, 2, seed=8), dim=-1)
    x, y = records({"directions": turned})
    moved = x + 1e-7 * draw(RECORDS, 2, seed=9)
    models = [conditioned(moved, y, merge=merge, directions=turned) for merge in (None, 0)]
    assert models[0].state.inference.size == PLACES
    for value in ("mean", "variance"):
        ours, all_records = (getattr(model.posterior(), value)(x) for model in models)
        torch.testing.assert_close(ours, all_records, rtol=0, atol=1e-4)


def test_scatter_completes_the_density_of_the_records():
    """log p(records | f) = log p(mean | f) + what the scatter adds."""
    y, weight = draw(5, 2), uniform(5, seed=1) + 0.1
    noise, f = torch.tensor([[0.5, 0.2], [0.2, 0.4]]).double(), draw(2, seed=2)
    (part,) = read(torch.zeros(5, 1), y, 2, Options(variances=1 / weight))
    (means,), (scatter,) = merged([part], (0.0,))
    square, logdet = scatter.terms(Noise.of(noise))
    normalisation = 2 * scatter.repeats * math.log(2 * math.pi)
    ours = MultivariateNormal(f, noise / means.weight).log_prob(means.y)
    ours = ours - 0.5 * (square + logdet + normalisation)
    expected = sum(
        MultivariateNormal(f, noise / w).log_prob(row) for w, row in zip(weight, y, strict=True)
    )
    torch.testing.assert_close(ours.squeeze(), expected)


@pytest.mark.parametrize("count", [1, 2, 400])
def test_sites_are_small_and_never_chains(count):
    x = np.random.default_rng(0).random((count, 2)) * [3, 30]
    reach = np.array([0.3, 3.0])
    labels = sites(x, reach)
    firsts = np.unique(labels, return_index=True)[1]
    assert (np.diff(firsts) > 0).all()  # numbered by their first positions
    for site in range(labels.max() + 1):
        inside = x[labels == site] / reach
        assert np.linalg.norm(inside[:, None] - inside, axis=-1).max() <= 1 + 1e-12
    assert len(firsts) < 1 + count / 2 or count < 3


@pytest.mark.parametrize("reach", [(0.3, 3.0), (0.03, 0.3), (0.3, 0.0), (1e-9, 1e-9)])
@pytest.mark.parametrize("count", [1, 2, 400])
def test_a_lower_bound_of_the_number_of_sites(count, reach):
    x = np.random.default_rng(0).random((count, 2)) * [3, 30] - [1, 10]
    number = sites(x, reach).max() + 1
    assert number / 8 < least_sites(x, reach) <= number
    assert least_sites(np.repeat(x, 5, axis=0), reach) == least_sites(x, reach)


@pytest.mark.parametrize("repeats", [{}, {"distance": 0.1}, {"width": 30.0}, {"distance": 0}])
@pytest.mark.parametrize("spread", [1e-9, 1e-3, 1.0])
def test_inference_knows_the_sites_of_its_data(repeats, spread):
    """Six places with ten records within the spread of each."""
    x = uniform(6, 2).repeat(10, 1) + spread * uniform(60, 2, seed=5)
    data = replace(in_memory(x, draw(60, 2)), repeats=Repeats(**repeats))
    noise = {"": 0.1 * torch.eye(2).double()}
    inference = ExactInference.merging(curl_free(0.7), noise, data)
    again = replace(inference, labels=None)
    for known, found in zip(inference.sites, again.sites, strict=True):
        assert np.array_equal(known, found)
    assert inference.of(in_memory(x[:9], draw(9, 2))).labels is None


def test_positions_are_not_merged_if_too_many_would_remain(monkeypatch):
    """The search for sites takes seconds for many points."""
    x, noise = uniform(4000, 2), {"": 0.01 * torch.eye(2).double()}
    data = in_memory(x, draw(4000, 2))
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2).double()
    kernel.base_kernel.lengthscale = 0.01
    size = ExactInference.merging(kernel, noise, data).size
    assert may_suffice(kernel, noise, data, size)
    with monkeypatch.context() as patched:
        patched.setattr("gp_orff.data.sites._clusters", None)
        assert not may_suffice(kernel, noise, data, size / 8)
    kernel.base_kernel.lengthscale = 10.0
    size = ExactInference.merging(kernel, noise, data).size
    assert size < 4000
    assert may_suffice(kernel, noise, data, size)


def test_sites_that_lie_apart_are_found_whole():
    rng = np.random.default_rng(1)
    place = rng.integers(50, size=300)
    x = rng.permutation(50)[place, None] * [10.0, 7.0] + 0.5 * rng.random((300, 2))
    labels = sites(x, (1.0, 1.0))
    assert len(np.unique(np.stack([labels, place]), axis=1).T) == len(np.unique(place))


def in_memory(x, y, distance=None, **options):
    data = Dataset.in_memory(read(x, y, y.shape[-1], Options(**options)))
    return Dataset(data.sources, data.survey, repeats=Repeats(distance)).without_copies()


@pytest.mark.filterwarnings("ignore:copies")
def test_copies_count_once_and_rounded_values_all():
    x = uniform(30, 2)
    x = torch.cat([x, x[:20] + 1e-7, x[:5] + 0.01])
    y = draw(30, 2)
    y = torch.cat([y, y[:20], y[:5]])
    assert in_memory(x, y).survey.num_points == 35  # 1 % of the extent is another place
    assert in_memory(x, y, 0.1).survey.num_points < 31
    assert in_memory(x, y, 0).survey.num_points == 55
    assert in_memory(x[:32], y[[*range(30), 0, 1]]).survey.num_points == 30
    places, values = uniform(5, 1).repeat(20, 1), draw(100, 1)
    assert in_memory(places, values.round()).survey.num_points == 100
    assert in_memory(places, values.round(decimals=4)).survey.num_points == 100
    for decimals in (1, 2, 3):  # a thousand readings of few stations are often equal by rounding
        stations, readings = uniform(3, 1).repeat(1000, 1), draw(3000, 1).round(decimals=decimals)
        assert in_memory(stations, readings).survey.num_points == 3000
    rain = torch.where(uniform(3000, 1) < 0.9, 0.0, draw(3000, 1))
    assert in_memory(stations, rain).survey.num_points == 3000
    twice = torch.cat([values, values]).round(decimals=4)
    assert in_memory(places.repeat(2, 1), twice).survey.num_points == 100


def gps_stations(rng, decimals=2):
    """Velocities of 300 stations, of which a half are listed up to five times. Of the other lines
    a tenth differ by one unit of the last digit, and lie a centimetre apart. 20 stations were
    measured again, with noise of ten units. Positions in km, and the number of measurements."""
    x, unit = rng.uniform(0, 500, (300, 2)), 10.0**-decimals
    field = 20 * np.stack([np.sin(x[:, 1] / 100), np.cos(x[:, 0] / 100)], axis=-1)
    y = field + 10 * unit * rng.standard_normal(field.shape)
    again = x[:20] + 1e-5, (field[:20] + 10 * unit * rng.standard_normal((20, 2))).round(decimals)
    lines = np.concatenate([np.arange(300), np.repeat(np.arange(150), rng.integers(1, 5, 150))])
    copies = y.round(decimals)[lines]
    moved = np.flatnonzero(np.arange(len(lines)) >= 300)
    moved = rng.choice(moved, len(moved) // 10, replace=False)
    column, side = rng.integers(2, size=len(moved)), rng.choice([-unit, unit], (300, 2))
    copies[moved, column] += side[lines[moved], column]
    places = x[lines] + 1e-5 * rng.standard_normal((len(lines), 2))
    pairs = zip((places, copies), again, strict=True)
    return *(np.concatenate(pair) for pair in pairs), 320


def standing_robot(rng, decimals=15):
    """A robot drives past 60 places, and stands still at one for 1500 readings."""
    t = np.linspace(0, 1, 60)
    stop = np.tile([[0.2, 0.3]], (1500, 1)) + 1e-6 * rng.standard_normal((1500, 2))
    x = np.concatenate([np.stack([t, 0.5 + 0.3 * np.sin(8 * t)], axis=-1), stop])
    field = np.stack([np.cos(4 * x[:, 0]), -np.sin(3 * x[:, 1])], axis=-1)
    y = (field + 0.2 * rng.standard_normal(x.shape)).round(decimals)
    return x, y, len(x)


@pytest.mark.filterwarnings("ignore:copies")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("sample", "decimals"),
    [(gps_stations, 2), (gps_stations, 0), *((standing_robot, d) for d in (1, 2, 4, 15))],
)
def test_copies_that_were_rounded_differently_and_a_platform_at_rest(sample, decimals, seed):
    """Of stations that are listed several times every measurement counts once, and of a platform
    at rest every reading, rounded or not, whatever the order of the records."""
    rng = np.random.default_rng(seed)
    x, y, count = sample(rng, decimals)
    data = in_memory(torch.from_numpy(x), torch.from_numpy(y))
    assert data.survey.num_points == count
    order = rng.permutation(len(x))
    other = in_memory(torch.from_numpy(x[order]), torch.from_numpy(y[order]))
    first, second = (
        sorted(torch.cat([torch.cat([p.x, p.y], dim=-1) for p in d.visit()]).tolist())
        for d in (data, other)
    )
    assert first == second


def at_one_place_at_other_times(rng):
    x = np.tile(rng.random((20, 2)), (30, 1))
    return np.column_stack([x, 1.7e9 + 60.0 * np.repeat(np.arange(30), 20)]), np.ones((600, 1)) * 7


def logs_of_a_magnetometer(rng):
    """Three components in steps of 0.15 with noise of 0.3, as single precision has them."""
    x = np.concatenate([rng.uniform(0, 6, (300, 2)), np.full((700, 2), 2.0)])
    y = 40 + np.stack([np.sin(x[:, 0]), np.cos(x[:, 1]), x[:, 0]], axis=-1)
    y = 0.15 * np.rint((y + 0.3 * rng.standard_normal(y.shape)) / 0.15)
    return x, y.astype(np.float32).astype(float)


def drifters_at_rest(rng):
    """Positions to four decimals, velocities of 1 cm/s with a resolution of 1 mm/s."""
    place = rng.uniform(0, 30, (5, 2)).round(4)
    x = np.concatenate([rng.uniform(0, 30, (500, 2)).round(4), np.repeat(place, 100, axis=0)])
    return x, (0.01 * rng.standard_normal((1000, 2))).round(3)


def zeros(rng):
    """Calm winds: at a third of the times at all stations."""
    x, y = np.tile(rng.random((40, 2)), (10, 1)), rng.standard_normal((400, 2))
    y[rng.random(400) < 1 / 3] = 0
    return x, y


def counts(rng):
    return np.repeat(rng.random((50, 1)), 8, axis=0), rng.poisson(5.0, (400, 1)).astype(float)


@pytest.mark.parametrize(
    "sample",
    [at_one_place_at_other_times, logs_of_a_magnetometer, drifters_at_rest, zeros, counts],
)
@pytest.mark.parametrize("seed", range(3))
def test_equal_values_of_independent_records_are_no_copies(sample, seed):
    x, y = sample(np.random.default_rng(seed))
    assert in_memory(torch.from_numpy(x), torch.from_numpy(y)).survey.num_points == len(x)


@pytest.mark.filterwarnings("ignore:copies")
def test_copies_in_single_precision_with_gaps_weights_and_groups():
    """They count once in each group and pattern of gaps; the record of largest weight remains."""
    x, y = uniform(60, 2).repeat(2, 1).float(), draw(60, 2).repeat(2, 1).float()
    assert in_memory(x, y).survey.num_points == 60
    assert in_memory(x, y, group=["a", "b"] * 60).survey.num_points == 60
    assert in_memory(x, y, group=["a"] * 60 + ["b"] * 60).survey.num_points == 120
    variances = torch.cat([torch.ones(60), torch.full((60,), 0.25)])
    data = in_memory(x, y, variances=variances)
    assert data.survey.num_points == 60
    assert all((part.weight == 4).all() for part in data.visit())
    y[::3, 0] = math.nan
    assert in_memory(x, y, missing="mask").survey.num_points == 60
    speed, look = y[:, 1], directions(60).repeat(2, 1)
    turned = torch.nn.functional.normalize(look + 1e-5 * draw(120, 2, seed=8), dim=-1)
    across = torch.cat([look[:60], look[:60].flip(-1) * torch.tensor([-1.0, 1.0])])
    for u, count in ((look, 60), (turned, 60), (across, 120)):
        data = Dataset.in_memory(read(x, speed, 2, Options(directions=u)))
        assert data.without_copies().survey.num_points == count


@pytest.mark.filterwarnings("ignore:copies")
def test_copies_are_known_where_a_projection_turned_them():
    """A plane turns vectors by an angle that changes from place to place, by 10⁻⁷ or so."""
    x, y = uniform(40, 2), draw(40, 2)
    angle = 1e-7 * draw(120)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1)
    turned = torch.einsum("nij,nj->ni", turn.reshape(-1, 2, 2), y.repeat(3, 1))
    assert in_memory(x.repeat(3, 1) + 1e-8 * draw(120, 2), turned).survey.num_points == 40
    noisy = y.repeat(3, 1) + 1e-3 * draw(120, 2)  # a thousandth is noise
    assert in_memory(x.repeat(3, 1), noisy).survey.num_points == 120


def test_the_copies_of_a_model_are_noted():
    """Half of the records are exact copies a little apart: the evidence is that without them."""
    x, y = uniform(60, 2), draw(60, 2)
    with pytest.warns(gp_orff.DataWarning, match="60 records have the position and the values"):
        model = conditioned(torch.cat([x, x + 1e-8]), torch.cat([y, y]))
    alone = conditioned(x, y)
    torch.testing.assert_close(model.log_marginal_likelihood(), alone.log_marginal_likelihood())
    assert model.report.points == 60
    assert any("60 records have the position and the values" in note for note in model.report.notes)


def test_the_lags_that_a_prior_cannot_tell():
    """1 − exp(−r²/2ℓ²) = 10⁻⁶ at r = ℓ √(2·10⁻⁶); lags are tried in steps of √2."""
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(RBFKernel(ard_num_dims=2), num_dims=2)).double()
    plain = ScaleKernel(RBFKernel(ard_num_dims=2)).double()
    plain.base_kernel.lengthscale = kernel.base_kernel.base_kernel.lengthscale = [0.3, 3.0]
    data = in_memory(uniform(50, 2), draw(50, 1))
    none = {"": torch.zeros(1, 1).double()}
    reach = np.array(merge_distance(plain, none, data))
    ratio = reach / (np.array([0.3, 3.0]) * math.sqrt(2e-6))
    assert ((ratio <= 1.0001) & (ratio > 0.7)).all()
    noisy = {"": torch.full((1, 1), 0.1).double()}
    wider = np.array(merge_distance(plain, noisy, data, count=10.0))
    assert (np.abs(wider / reach - 10) < 5).all()  # 10⁻² 0.1 / (10 · 0.69) of the variance
    vectors = in_memory(uniform(50, 2), draw(50, 2))
    reach = merge_distance(kernel, {"": torch.zeros(2, 2).double()}, vectors)
    assert 0 < reach[0] < 0.3 * math.sqrt(2e-6)  # a gradient varies more quickly


def test_records_at_one_place_at_other_times_stay():
    place, time = uniform(4, 2).repeat(5, 1), torch.arange(5.0).repeat_interleave(4).double()
    field = gp_orff.CurlFreeKernel(num_dims=2, active_dims=(0, 1))
    model = gp_orff.VectorFieldGP(field * MaternKernel(active_dims=(2,)))
    x, y = torch.cat([place, time[:, None]], dim=-1), draw(20, 2)
    assert model.condition(x, y, merge=0.01).state.inference.size == 40
    x = torch.cat([x, x])
    assert model.condition(x, draw(40, 2), merge=0.01).state.inference.size == 40


def test_near_positions_are_merged_where_many_are_saved():
    """30 places, 8 records within 10⁻⁵ of each; the evidence moves by less than 10⁻³ nats."""
    x = uniform(30, 2).repeat(8, 1) + 1e-5 * draw(240, 2, seed=3)
    y = draw(240, 2)
    model = conditioned(x, y)
    assert model.state.inference.size == 60
    all_records = conditioned(x, y, merge=0)
    difference = model.log_marginal_likelihood() - all_records.log_marginal_likelihood()
    assert difference.abs() < 1e-3
    assert any(
        "240 observations were merged at 30 positions" in note and "merge=0" in note
        for note in model.report.notes
    )
    model.kernel.base_kernel.base_kernel.lengthscale = 1e-4  # now the prior tells them apart
    assert model.state.inference.size == 480
    given = conditioned(x, y, merge=0.1)
    assert given.state.inference.size < 60


def test_the_distance_is_kept(tmp_path):
    x = uniform(30, 2).repeat(2, 1) + 1e-3 * draw(60, 2, seed=3)
    model = conditioned(x, draw(60, 2), merge=0.05)
    size = model.state.inference.size
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert loaded.state.inference.size == size < 120
    torch.testing.assert_close(loaded.log_marginal_likelihood(), model.log_marginal_likelihood())
    assert loaded.update(x, draw(60, 2, seed=8)).state.inference.size == size
    with pytest.raises(ValueError, match="expected merge= as a distance"):
        model.condition(x, draw(60, 2), merge=-1.0)


def test_singular_noise_merges_nothing():
    """Its inverse, which the scatter needs, does not exist."""
    likelihood = MultitaskGaussianLikelihood(2, rank=1, has_global_noise=False).double()
    likelihood.task_noise_covar_factor.data = torch.tensor([[0.5], [0.3]]).double()
    model = gp_orff.VectorFieldGP(curl_free(0.7), likelihood=likelihood)
    model = model.condition(uniform(9, 2), draw(9, 2))
    assert model.state.inference.reach is None


def test_a_subset_compares_with_the_exact_kernel_at_any_distance():
    x, y = uniform(60, 2), draw(60, 2)
    model = gp_orff.VectorFieldGP(curl_free(0.7), frequencies=gp_orff.MonteCarlo(100, seed=0))
    model.condition(x, y, merge=0.01)
    assert gp_orff.compare_with_exact(model, x, y, subset=20, merge=0.01).num_points == 20
