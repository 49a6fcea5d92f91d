"""Repeated positions: sites, exact merging, copies, and what the prior cannot tell apart."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from torch.distributions import MultivariateNormal

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noise
from gp_orff.data.reading import Options, read
from gp_orff.data.repeats.copies import without_copies
from gp_orff.data.repeats.merged import merged
from gp_orff.data.repeats.request import Repeats
from gp_orff.data.repeats.sites import sites
from gp_orff.inference.conditioning.merging import merge_distance
from tests.fields import curl_free, directions, draw, uniform

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


def test_sites_that_lie_apart_are_found_whole():
    rng = np.random.default_rng(1)
    place = rng.integers(50, size=300)
    x = rng.permutation(50)[place, None] * [10.0, 7.0] + 0.5 * rng.random((300, 2))
    labels = sites(x, (1.0, 1.0))
    assert len(np.unique(np.stack([labels, place]), axis=1).T) == len(np.unique(place))


def in_memory(x, y, distance=None):
    data = Dataset.in_memory(read(x, y, y.shape[-1], Options()))
    return without_copies(Dataset(data.sources, data.survey, repeats=Repeats(distance)))


@pytest.mark.filterwarnings("ignore:copies")
def test_copies_count_once_and_rounded_values_all():
    x = uniform(30, 2)
    x = torch.cat([x, x[:20] + 1e-7, x[:5] + 0.01])
    y = draw(30, 2)
    y = torch.cat([y, y[:20], y[:5]])
    assert in_memory(x, y).survey.num_points == 35  # 1 % of the extent is another place
    assert in_memory(x, y, 0.1).survey.num_points < 31
    assert in_memory(x, y, 0).survey.num_points == 55
    assert in_memory(x[:32], y[[*range(30), 0, 1]]).survey.num_points == 32  # few
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
    with pytest.warns(gp_orff.DataWarning, match="60 records have the place and the values"):
        model = conditioned(torch.cat([x, x + 1e-8]), torch.cat([y, y]))
    alone = conditioned(x, y)
    torch.testing.assert_close(model.log_marginal_likelihood(), alone.log_marginal_likelihood())
    assert model.report.points == 60
    assert any("60 records have the place and the values" in note for note in model.report.notes)


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
        "240 records at 30 places" in note and "merge=0" in note for note in model.report.notes
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
