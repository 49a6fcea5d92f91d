"""Sites within which the field changes: the resulting noise, and the choice of such sites."""

import math
import warnings
from functools import partial

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel
from gpytorch.means import ZeroMean

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.data.sites import site_labels
from gp_orff.features.assemble import draw as draws_of
from gp_orff.fitting import strategy
from gp_orff.inference import representation
from gp_orff.inference import representation as few_sites
from gp_orff.inference.exact import ExactInference, changes_within, with_few_sites
from gp_orff.inference.features import FeatureInference, IterativeInference
from gp_orff.inference.price import aim, loss_of_noise
from gp_orff.inference.representation import exact_instead
from tests.support.fields import conditioned, curl_free, directions, draw, uniform

NOISE = 0.01


def track(count, seed=0):
    """Points of a slow random walk."""
    return draw(count, 2, seed=seed).cumsum(0) / 60


def model_of(**options):
    model = gp_orff.VectorFieldGP(curl_free(0.5, partial(MaternKernel, 1.5)), **options).double()
    model.likelihood.noise = NOISE
    return model


def moments(model, points):
    field = model.posterior()
    return field.mean(points), field.variance(points).sqrt()


@pytest.mark.parametrize("weights", [None, uniform(60, seed=3) + 0.5])
def test_scatter_within_sites_is_that_of_noise_and_field(weights):
    """E Σ_i w_i (y_i − ȳ)² over all sites, from the dense covariance of records, is what the
    evidence takes for the mean square of the scatter."""
    x, kernel = track(60), model_of().kernel
    options = Options() if weights is None else Options(variances=NOISE / weights)
    data = Dataset.in_memory(read(x, draw(60, 2, seed=1), 2, options))
    reach, noises = (0.06, 0.06), {"": NOISE * torch.eye(2).double()}
    (part,) = data.observations
    labels = torch.from_numpy(site_labels(part, reach))
    changes = partial(changes_within, kernel, noises, reach)
    (found,) = changes(data, of_records=True)
    covariance = kernel(x).to_dense().unflatten(0, (60, 2)).unflatten(2, (60, 2))
    for site, change in enumerate(found):
        rows = (labels == site).nonzero().squeeze(-1)
        n, w = len(rows), torch.ones(len(rows)).double() if weights is None else part.weight[rows]
        away = torch.eye(n).double() - (w / w.sum()).expand(n, n)  # f_i − f̄
        block = torch.einsum("ai,ipjq,bj->abpq", away, covariance[rows][:, :, rows], away)
        each = block.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).mean(-1)  # of each output
        expected = n / max(n - 1, 1) * (w / w.sum()) @ each / NOISE
        torch.testing.assert_close(change, expected, rtol=1e-9, atol=1e-12)
    exact, plain = ExactInference(data, reach, changes), ExactInference(data, reach)
    repeats = labels.bincount() - 1
    mean = (repeats * found).sum() / repeats.sum()
    more = exact.scatter_logdet(noises) - plain.scatter_logdet(noises)
    torch.testing.assert_close(more, 2 * repeats.sum() * (1 + mean).log())


@pytest.mark.parametrize("options", [{}, {"variances": uniform(60, seed=3) + 0.5}, "directions"])
def test_changes_are_variances_of_mean_less_value_at_the_middle(options):
    """Σ_ij w_i w_j K(x_i, x_j), for w of a site's records and −1 at their mean position; sites of
    few records, of which all count."""
    x, y = track(60), draw(60, 2, seed=1)
    if options == "directions":
        options, y = {"directions": directions(60)[:1].expand(60, 2)}, y[:, 0]
    data, kernel = Dataset.in_memory(read(x, y, 2, Options(**options))), model_of().kernel
    reach, noises = (0.06, 0.06), {"": NOISE * torch.eye(2).double()}
    (changes,) = changes_within(kernel, noises, reach, data)
    (part,) = data.observations
    labels = torch.from_numpy(site_labels(part, reach))
    assert 2 < labels.bincount().max() <= 8
    for site, change in enumerate(changes):
        rows = (labels == site).nonzero().squeeze(-1)
        weight = torch.ones(len(rows)).double() if part.weight is None else part.weight[rows]
        weight = weight / weight.sum()
        points = torch.cat([x[rows], (weight[:, None] * x[rows]).sum(0, keepdim=True)])
        sign = torch.cat([weight, -torch.ones(1).double()])
        row = torch.eye(2).double() if part.direction is None else part.direction[:1]
        form = torch.kron(sign[None], row)  # f̄ − f(x̄), along the direction
        variance = (form @ kernel(points).to_dense() @ form.mT).diagonal().mean()
        torch.testing.assert_close(change, variance / NOISE, rtol=1e-8, atol=1e-8)


def test_changes_count_as_noise_of_the_sites():
    """σ² (1/W + c) for the mean of W readings, within which the field changes by σ² c."""
    data = Dataset.in_memory(read(track(200), draw(200, 2), 2, Options()))
    kernel, noises = model_of().kernel, {"": NOISE * torch.eye(2).double()}
    data = with_few_sites(kernel, noises, data, 60)
    inference = ExactInference.merging(kernel, noises, data)
    labels = site_labels(data.observations[0], inference.reach)
    count = torch.from_numpy(labels).bincount()
    (changes,) = changes_within(kernel, noises, inference.reach, data)
    variances = NOISE * (1 / count + changes)
    covariance = inference.observed[0].noise_covariance(noises)
    torch.testing.assert_close(covariance, torch.diag(variances.repeat_interleave(2)))
    assert (changes[count > 1] > 0.1 / count[count > 1]).any()  # not negligible


def averages_of(part, reach, levels=2):
    """Means of records at sites (m, n), their counts, and the parts of sites with their shares
    (m, K): halves of halves along the longer side, the first of an odd number the larger."""
    site = torch.from_numpy(site_labels(part, reach))
    average = torch.nn.functional.one_hot(site).double().mT
    count = average.sum(-1)
    parts = [(own, (site == own).nonzero().squeeze(-1)) for own in range(len(count))]
    scale = torch.tensor(reach).double()
    for _ in range(levels):
        divided = []
        for own, rows in parts:
            scaled = part.x[rows] / scale
            axis = (scaled.amax(0) - scaled.amin(0)).argmax()
            order, middle = rows[scaled[:, axis].argsort(stable=True)], (len(rows) + 1) // 2
            divided += [(own, half) for half in (order[:middle], order[middle:]) if len(half)]
        parts = divided
    halves = torch.stack([part.x[rows].mean(0) for _, rows in parts])
    share = torch.zeros(len(count), len(parts)).double()
    for column, (own, rows) in enumerate(parts):
        share[own, column] = len(rows) / count[own]
    return average / count[:, None], count, halves, share


@pytest.mark.parametrize("nu", [1.5, 2.5])
def test_means_within_which_a_field_changes_tell_of_it_there(nu):
    """Against dense covariances of the means of all records: sd within 2 %, means within .2 sd;
    changes as noise of their own are 3 % and 20 % too wide, and .7 and 1.4 sd off."""
    x, seen = track(400), track(400)[::9] + 0.002
    kernel = curl_free(0.2, partial(MaternKernel, nu))
    noises = {"": NOISE * torch.eye(2).double()}
    data = Dataset.in_memory(read(x, draw(400, 2), 2, Options()))
    data = with_few_sites(kernel, noises, data, 300)
    inference = ExactInference.merging(kernel, noises, data)
    (part,) = data.observations
    average, count, *_ = averages_of(part, inference.reach)
    average = torch.kron(average.contiguous(), torch.eye(2).double())
    joint = kernel(torch.cat([x, seen])).to_dense()
    noise = torch.diag((NOISE / count).repeat_interleave(2))
    cross = average @ joint[:800, 800:]
    solved = torch.linalg.solve(average @ joint[:800, :800] @ average.mT + noise, cross)
    mean = solved.mT @ (average @ part.y.flatten())
    variance = (joint[800:, 800:] - solved.mT @ cross).diagonal()
    found = []
    for own in (inference, PlainMeans(data, inference.reach, inference.changes)):
        field = own.posterior(kernel, noises, torch.zeros(2).double()).distribution
        error = (field.mean(seen).flatten() - mean) / variance.sqrt()
        wider = (field.variance(seen).flatten() / variance).sqrt().median()
        found.append((wider.item(), error.square().mean().sqrt().item()))
    (divided, off), (plain, far) = found
    assert abs(divided - 1) < 0.02 < plain - 1
    assert off < 0.2 < 0.7 < far


@pytest.mark.parametrize("kernel", [curl_free(0.2), curl_free(0.2, partial(MaternKernel, 2.5))])
def test_means_over_few_places_are_exact(kernel):
    """Against dense covariances of the means of all records, at sites most of which are a single
    place, others a few: means within .05 sd, sd within half a per cent (.01 and .3 % found, where
    changes by less than a hundredth of the noise are noise), whatever the counts of records there.
    Sites were divided together, by their mean change, and by records: .07 sd and 5 %."""
    places = uniform(30, 2, seed=1)
    places[20:] = places[:10] + 0.03 * (uniform(10, 2, seed=2) - 1)
    place = (30 * uniform(250, seed=3).square() / 4).long()  # from many records to few
    x, y, seen = places[place], draw(250, 2), places + 0.01
    model = conditioned(kernel, x, y, None, NOISE, gpytorch.means.MultitaskMean(ZeroMean(), 2))
    field = model.condition(x, y, merge=0.05).posterior()
    labels = torch.from_numpy(site_labels(*model.state.data.observations, (0.05, 0.05)))
    assert 20 <= labels.max() + 1 < len(place.unique())  # some are sites of several places
    average = torch.nn.functional.one_hot(labels).double().mT
    count = average.sum(-1, keepdim=True)
    average = torch.kron((average / count).contiguous(), torch.eye(2).double())
    joint = kernel(torch.cat([x, seen])).to_dense()
    cross = average @ joint[:500, 500:]
    noise = torch.diag((NOISE / count[:, 0]).repeat_interleave(2))
    solved = torch.linalg.solve(average @ joint[:500, :500] @ average.mT + noise, cross)
    variance = (joint[500:, 500:] - solved.mT @ cross).diagonal()
    mean = solved.mT @ (average @ y.flatten())
    off = (field.mean(seen).flatten() - mean) / variance.sqrt()
    wider = (field.variance(seen).flatten() / variance).sqrt()
    assert off.abs().max() < 0.05
    assert (wider - 1).abs().max() < 0.005


class PlainMeans(ExactInference):
    """Changes within sites as noise of their means."""

    @property
    def resolved(self):
        return self.observed


def test_residuals_of_records_are_those_of_their_sites():
    """E[r²] of r = y − f̄ against dense covariances of the means ȳ = f(x̄) + change + ε̄."""
    u = directions(1).expand(200, 2)
    (part,) = read(track(200), draw(200, 2)[:, 0], 2, Options(directions=u))
    kernel, noises = model_of().kernel, {"": NOISE * torch.eye(2).double()}
    data = with_few_sites(kernel, noises, Dataset.in_memory([part]), 60)
    inference = ExactInference.merging(kernel, noises, data)
    posterior = inference.posterior(kernel, noises, torch.zeros(2).double())
    (found,) = inference.residuals(posterior).values()
    site = torch.from_numpy(site_labels(part, inference.reach))
    average, count, halves, share = averages_of(part, inference.reach)
    h = torch.kron(torch.eye(len(count)).double(), u[:1])
    (changes,) = changes_within(kernel, noises, inference.reach, data, levels=2)
    white = torch.diag(NOISE / count)  # Cov[ε̄]
    divided = torch.kron(share, torch.eye(2).double())
    total = divided @ kernel(halves).to_dense() @ divided.mT
    total = h @ total @ h.mT + white + torch.diag(NOISE * changes)
    means = average @ part.y[:, 0]
    noise = white @ torch.linalg.solve(total, means)
    variance = (white - white @ torch.linalg.solve(total, white)).diagonal()
    expected = (part.y[:, 0] - means[site] + noise[site]).square() + variance[site]
    second = found.residual.square()[:, 0] + found.covariance[:, 0, 0]
    torch.testing.assert_close(second, expected, rtol=1e-7, atol=1e-9)


def test_readings_of_sites_are_left_out_one_by_one():
    """Of what the records of a site have in common, ȳ = f̄ + change + ε̄, against dense covariances
    of all records, each with its own white noise."""
    x, y = track(80), draw(80, 2)
    model = model_of(mean=gpytorch.means.MultitaskMean(ZeroMean(), 2))
    model.condition(x, y, merge=0.05)
    state, found = model.state, model.leave_one_out(x, y, merge=0.05)
    (part,) = state.data.observations
    reach = state.inference.reach
    site = torch.from_numpy(site_labels(part, reach))
    assert 20 < site.max() + 1 < 60
    (changes,) = changes_within(model.kernel, state.e_step.noises, reach, state.data, levels=2)
    _, _, halves, share = averages_of(part, reach)
    field = torch.kron(share, torch.eye(2).double())
    latent = field @ model.kernel(halves).to_dense() @ field.mT
    latent = latent + torch.diag(NOISE * changes.repeat_interleave(2))
    of_site = (2 * site[:, None] + torch.arange(2)).flatten()
    inverse = torch.linalg.inv(latent[of_site][:, of_site] + NOISE * torch.eye(160).double())
    for row in (0, 17, 50):
        own = slice(2 * row, 2 * row + 2)
        covariance = torch.linalg.inv(inverse[own, own])
        residual = covariance @ (inverse @ y.flatten())[own]
        torch.testing.assert_close(found.residual[row], residual, rtol=0, atol=1e-8)
        torch.testing.assert_close(found.covariance[row], covariance, rtol=0, atol=1e-8)
    robust = model_of(likelihood=gp_orff.MultitaskStudentTLikelihood(2)).condition(x, y, merge=0.05)
    assert robust.leave_one_out(x, y, merge=0.05).p_value.isfinite().all()


def test_some_readings_of_sites_are_not_left_out_one_by_one():
    """Within a site the field is less certain than a reading; the remedy that is told works."""
    x, y = track(80), draw(80, 2)
    model = model_of().condition(x, y, merge=0.05)
    with pytest.raises(ValueError, match="positions were merged, condition with merge=0"):
        model.leave_one_out(x[:50], y[:50], merge=0.05)
    assert model.condition(x, y, merge=0).leave_one_out(x, y, merge=0).p_value.isfinite().all()


def test_sites_are_as_small_as_their_number_permits():
    data = Dataset.in_memory(read(track(2000), draw(2000, 2), 2, Options()))
    kernel, noises = model_of().kernel, {"": NOISE * torch.eye(2).double()}
    sizes = []
    for most in (4000, 800, 200):
        few = with_few_sites(kernel, noises, data, most)
        sizes.append(ExactInference.merging(kernel, noises, few).size)
        assert 0.6 * most <= sizes[-1] <= most
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")
@pytest.mark.parametrize("budget", [None, 300])
def test_rough_fields_on_tracks_are_merged_rather_than_truncated(monkeypatch, budget):
    """Against the exact kernel on all readings, sites are closer than the grid, and both have error
    bars that contain what they leave out; as many sites as the budget has features."""
    monkeypatch.setattr(representation, "MOST_EXACT", 700 if budget else 300)
    monkeypatch.setattr(representation, "MOST_ITERATIVE", 2000)
    x, seen = track(350), track(350)[::7] + 0.02
    kernel = model_of().kernel
    both = torch.cat([x, seen])
    f = torch.linalg.cholesky(kernel(both).to_dense() + 1e-9 * torch.eye(800).double())
    f = (f @ draw(800, seed=4)).unflatten(0, (-1, 2)).detach()
    y = f[:350] + math.sqrt(NOISE) * draw(350, 2, seed=5)
    exact = model_of(frequencies=gp_orff.Auto(exact_values=1000)).condition(x, y, merge=0)
    auto = gp_orff.Auto(exact_values=100, max_features=budget)
    merged = model_of(frequencies=auto).condition(x, y)
    assert merged.state.inference.size <= 300
    assert "would truncate" in str(merged.report)
    assert "were merged" in str(merged.report)
    grid = model_of(frequencies=gp_orff.Grid.for_data(x, max_features=2000)).condition(x, y)
    mean, sd = moments(exact, seen)
    errors, ratios = [], []
    for model in (merged, grid):
        approximate, wider = moments(model, seen)
        errors.append(((approximate - mean) / sd).square().mean().sqrt().item())
        ratios.append((wider / sd).mean().item())
        inside = ((approximate - f[350:]).abs() < 1.96 * wider).double().mean()
        assert inside > 0.9  # of 100 numbers that are correlated
    assert errors[0] < 0.7 * errors[1]
    assert 1.0 <= ratios[0] < 0.9 * ratios[1]
    assert merged.state.inference is merged.state.inference  # sites that were chosen are not stale
    again = merged.update(x[:5] + 0.001, y[:5])
    assert again.state.inference.size <= 300


@pytest.mark.parametrize("features", [200, 2000])
def test_sites_take_the_place_of_a_grid_that_loses_more(monkeypatch, features):
    """Of a factorised grid only if it loses more than the aim, of iterations that lose less if
    sites do too; never sites that lose more, or more numbers than permitted."""
    monkeypatch.setattr(few_sites, "most_factorised", lambda device: 1)
    data = Dataset.in_memory(read(x := track(400), draw(400, 2, seed=1), 2, Options()))
    kernel, noises = curl_free(0.5, partial(MaternKernel, 2.5)), {"": 0.1 * torch.eye(2).double()}
    grid = draws_of(kernel, gp_orff.Grid.for_data(x, max_features=features))
    for iterative in (True, False):
        inference = (IterativeInference if iterative else FeatureInference)(data, grid)
        (cut,) = inference.truncation_ratios(kernel, noises).values()
        lost = loss_of_noise(cut, 800)
        assert (lost > aim(800)) == (features == 200)
        found = exact_instead(inference, kernel, noises, 700)
        assert (found is not None) == (iterative or features == 200)
        if found is not None:
            sites, reason = found
            assert sites.size <= 700
            assert loss_of_noise(sites.mean_change, 800) <= max(lost, aim(800))
            assert f"truncate {cut:.2g} times the noise" in reason
        assert exact_instead(inference, kernel, noises, 2) is None


@pytest.mark.parametrize(("iterative", "most"), [(True, 600), (True, 599), (False, 600)])
def test_few_numbers_are_factorised_in_the_place_of_iterations(monkeypatch, iterative, most):
    monkeypatch.setattr(few_sites, "most_factorised", lambda device: most)
    x = uniform(300, 2)
    data = Dataset.in_memory(read(x, draw(300, 2, seed=1), 2, Options()))
    kernel, noises = curl_free(0.5), {"": 0.1 * torch.eye(2).double()}
    grid = draws_of(kernel, gp_orff.Grid.for_data(x))
    inference = (IterativeInference if iterative else FeatureInference)(data, grid)
    found = exact_instead(inference, kernel, noises, 1)
    assert (found is not None) == (iterative and most == 600)
    if found is not None:
        exact, reason = found
        assert exact.size == 600
        assert "600 values" in reason


@pytest.mark.parametrize("most", [200, 199])
def test_repeated_positions_count_once_among_numbers_that_are_factorised(monkeypatch, most):
    monkeypatch.setattr(few_sites, "most_factorised", lambda device: most)
    x = uniform(100, 2).repeat(3, 1)
    data = Dataset.in_memory(read(x, draw(300, 2, seed=1), 2, Options()))
    kernel, noises = curl_free(0.5), {"": 0.1 * torch.eye(2).double()}
    inference = IterativeInference(data, draws_of(kernel, gp_orff.Grid.for_data(x)))
    found = exact_instead(inference, kernel, noises, 1)
    assert (found is not None) == (most == 200)
    if found is not None:
        assert found[0].size == 200
        assert "200 values" in found[1]


@pytest.mark.parametrize("width", [0.002, 0.6])
def test_clusters_within_which_the_field_hardly_changes_are_factorised(monkeypatch, width):
    """In the place of iterations; not those within which it does change."""
    monkeypatch.setattr(few_sites, "most_factorised", lambda device: 100)
    x = uniform(20, 2).repeat(20, 1) + width * uniform(400, 2)
    data = Dataset.in_memory(read(x, draw(400, 2, seed=1), 2, Options()))
    kernel, noises = curl_free(0.5), {"": 0.1 * torch.eye(2).double()}
    inference = IterativeInference(data, draws_of(kernel, gp_orff.Grid.for_data(x)))
    (cut,) = inference.truncation_ratios(kernel, noises).values()
    assert loss_of_noise(cut, 800) < aim(800)  # the grid is accurate, and costs more
    found = exact_instead(inference, kernel, noises, 100)
    assert (found is not None) == (width == 0.002)
    if found is not None:
        assert found[0].size <= 100
        assert loss_of_noise(found[0].mean_change, 800) <= aim(800)


@pytest.mark.parametrize("layout", [uniform, track])
@pytest.mark.parametrize("most", [900, 100])
def test_what_loses_less_predicts_better(layout, most):
    """Between a grid and sites, by the Kullback-Leibler divergence of predictions by each from
    those by the exact kernel, of values drawn from it; even observations and those along a track.
    The divergences differ by factors of 1.6 to 170."""
    x = layout(500, 2) if layout is uniform else layout(500)
    seen = x.amin(0) + (x.amax(0) - x.amin(0)) * uniform(50, 2, seed=9)
    kernel, noises = curl_free(0.5, partial(MaternKernel, 2.5)), {"": NOISE * torch.eye(2).double()}
    root = torch.linalg.cholesky(kernel(x).to_dense() + 1e-9 * torch.eye(1000).double()).detach()
    y = (root @ draw(1000, seed=1)).unflatten(0, (-1, 2)) + math.sqrt(NOISE) * draw(500, 2, seed=2)
    data = Dataset.in_memory(read(x, y, 2, Options()))
    grid = FeatureInference(data, draws_of(kernel, gp_orff.Grid.for_data(x, max_features=500)))
    few = with_few_sites(kernel, noises, data, most)
    found = []
    for own in (ExactInference(data), grid, ExactInference.merging(kernel, noises, few)):
        field = own.posterior(kernel, noises, torch.zeros(2).double()).field(fixed=True)
        found.append((field.mean(seen).detach(), field.variance(seen).detach()))
    (mean, variance), *others = found
    of_grid, of_sites = (
        (own.log() - variance.log() + (variance + (m - mean).square()) / own - 1).mean() / 2
        for m, own in others
    )
    assert (exact_instead(grid, kernel, noises, most) is not None) == bool(of_sites < of_grid)


def test_under_student_t_noise_single_readings_take_the_place_of_rough_sites(monkeypatch):
    """The reading nearest to the middle of each site: the model is that of these readings alone, to
    rounding, and says how many are left out."""
    monkeypatch.setattr(representation, "MOST_EXACT", 300)
    monkeypatch.setattr(representation, "MOST_ITERATIVE", 2000)
    x = track(350)
    y = torch.sin(9 * x) + 0.1 * draw(350, 2, seed=5)

    def robust(**options):
        model = model_of(**options)
        model.likelihood = gp_orff.MultitaskStudentTLikelihood(2).double()
        model.likelihood.noise = NOISE / 10
        return model

    model = robust(frequencies=gp_orff.Auto(exact_values=100))
    with pytest.warns(gp_orff.DataWarning, match="of 350 observations are omitted"):
        model.condition(x, y)
    count = model.state.data.survey.num_points
    assert 50 < count <= 150
    assert f"one observation per position is used, {count} of 350" in str(model.report)
    (part,) = model.state.data.unweighted().visit()
    among = (part.x[:, None] == x).all(-1)
    assert (among.sum(-1) == 1).all()
    alone = robust(frequencies=gp_orff.Auto(exact_values=1000)).condition(part.x, part.y)
    for ours, theirs in zip(moments(model, x[::9]), moments(alone, x[::9]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_reading_nearest_to_the_middle_of_a_site():
    x = torch.tensor([[0.0], [0.1], [0.04], [5.0], [0.06]]).double()
    y = torch.arange(5.0).double().unsqueeze(-1)
    data = Dataset.in_memory(read(x, y, 1, Options()))
    (part,) = few_sites.one_of_each(data, (0.2,)).visit()
    assert part.y.flatten().tolist() == [3.0, 4.0]  # the middle of four readings is at 0.05


def lines_over_shallow_sources(lines=12, along=25):
    """Readings of one component on lines, which differ from each other by errors of their own."""
    generator = torch.Generator().manual_seed(0)
    across, step = torch.meshgrid(
        torch.arange(lines) / 4.0, torch.arange(along) / 8.0, indexing="ij"
    )
    x = torch.stack([across, step, torch.ones_like(step)], dim=-1).flatten(0, 1).double()
    prior = gp_orff.HarmonicKernel(1, reference_height=1.0, mean_height=1.0).double()
    prior.depths, prior.variances = [0.25], [1.0]
    along_z = torch.tensor([0.0, 0.0, 1.0]).double().expand(len(x), 3)
    covariance = prior(x, x).to_dense()[2::3, 2::3]
    factor = torch.linalg.cholesky(covariance + 1e-8 * torch.eye(len(x)))
    noise = torch.randn(lines, 1, generator=generator, dtype=torch.float64).expand(-1, along)
    drawn = torch.randn(len(x), generator=generator, dtype=torch.float64)
    return x, factor @ drawn + 0.3 * noise.flatten(), along_z


@pytest.mark.slow
def test_shallow_sources_are_learned_from_every_few_readings(monkeypatch):
    """Where waves cannot hold them, the hyperparameters are those of the kept readings alone."""
    x, y, directions = lines_over_shallow_sources()
    learned = []
    original = strategy.learned_from_kept

    def spied(*parts):
        learned.append(parts[2].data.survey.num_points)
        return original(*parts)

    monkeypatch.setattr(strategy, "learned_from_kept", spied)
    monkeypatch.setattr(representation, "MOST_EXACT", 100)
    monkeypatch.setattr(representation, "MOST_TRAINING", 100)

    def fitted(chosen, values):
        rule = gp_orff.Auto(exact_values=values)
        model = gp_orff.VectorFieldGP(gp_orff.HarmonicKernel(1), frequencies=rule)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of little data for so much
            return model.fit(x[chosen], y[chosen], directions=directions[chosen], progress=False)

    model = fitted(slice(None), 100)
    assert learned == [100]
    alone = fitted(slice(None, None, 3), 1000)
    torch.testing.assert_close(model.kernel.depths, alone.kernel.depths, rtol=0.02, atol=0)
    torch.testing.assert_close(model.likelihood.noise, alone.likelihood.noise, rtol=0.1, atol=0)


def test_every_few_readings_keep_their_weights():
    x = torch.arange(7.0).double().unsqueeze(-1)
    data = Dataset.in_memory(read(x, x, 1, Options()))
    data = data.weighted([torch.arange(1.0, 8.0).double()], 0.0)
    kept = few_sites.every_few(data, 3)
    (part,) = kept.unweighted().visit()
    assert part.y.flatten().tolist() == [0.0, 3.0, 6.0]
    assert torch.cat(list(kept.all_weights())).tolist() == [1.0, 4.0, 7.0]
