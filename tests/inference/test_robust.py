"""Student-t noise and leave-one-out scores."""

import copy
import itertools
import math
import warnings
from dataclasses import replace

import gpytorch
import linear_operator
import numpy as np
import pytest
import scipy.stats
import torch
from gpytorch.distributions import MultitaskMultivariateNormal

import gp_orff
from gp_orff.data import dataset
from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey, LineOfSight
from gp_orff.data.reading import Options, read
from gp_orff.fitting.robust_em import heavy_tailed_noise
from gp_orff.inference.exact import ExactInference
from gp_orff.inference.posteriors import WeightPosterior
from gp_orff.inference.robust import StudentTNoise, climb
from gp_orff.symbols.base import Identity
from tests.support import oracles
from tests.support.fields import conditioned, curl_free, flow

RULES = {"exact": None, "grid": gp_orff.Auto(exact_values=0, tolerance=1e-8)}


GENERATOR = torch.Generator().manual_seed(3)


def with_outliers(points, share=0.1, noise=0.1, seed=0):
    x, y, field = flow(points, noise=noise, seed=seed)
    generator = torch.Generator().manual_seed(seed + 7)
    bad = torch.rand(points, generator=generator) < share
    y[bad] = 20 * torch.randn(int(bad.sum()), 2, generator=generator).double()
    return x, y, field, bad


def robust_model(deg_free=4.0, rule=None):
    likelihood = gp_orff.MultitaskStudentTLikelihood(2, deg_free=deg_free)
    return gp_orff.VectorFieldGP(curl_free(), likelihood=likelihood, frequencies=rule)


def map_error(model, x, field):
    return (model.posterior().mean(x) - field(x)).square().mean().sqrt().item()


@pytest.fixture(scope="module")
def clean_error():
    """Of a map of 200 vectors without those that are wrong."""
    x, y, field, bad = with_outliers(200)
    clean = gp_orff.VectorFieldGP(curl_free()).fit(x[~bad], y[~bad], progress=False)
    return map_error(clean, x, field)


@pytest.fixture(scope="module")
def fits():
    """Models of 200 vectors with outliers, by rule; tests must not change them."""
    x, y, _, _ = with_outliers(200)
    rules = {"exact": None, "grid": gp_orff.Auto(exact_values=0)}
    return {name: robust_model(rule=own).fit(x, y, progress=False) for name, own in rules.items()}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_outliers_do_not_ruin_a_map(rule, fits, clean_error):
    """One vector in ten is wrong: within 10 % of the error without."""
    (x, y, field, bad), robust = with_outliers(200), fits[rule]
    assert isinstance(robust.state.inference, ExactInference) == (rule == "exact")
    assert map_error(robust, x, field) < 1.1 * clean_error
    field_error = robust.posterior().mean(x) - field(x)
    inside = (field_error.square() < 1.96**2 * robust.posterior().variance(x)).double().mean()
    assert inside > 0.88
    found = robust.leave_one_out(x, y).distance > scipy.stats.chi2.ppf(0.999, 2)
    assert (found & bad).sum() > 0.95 * bad.sum()
    assert (found & ~bad).sum() < 0.01 * (~bad).sum()  # ten times their share


@pytest.mark.slow
def test_outliers_ruin_a_map_under_gaussian_noise(clean_error):
    """So that the test above says something."""
    x, y, field, _ = with_outliers(200)
    gaussian = gp_orff.VectorFieldGP(curl_free()).fit(x, y, progress=False)
    assert map_error(gaussian, x, field) > 4 * clean_error


@pytest.mark.slow
def test_without_outliers_it_is_nearly_gaussian():
    x, y, field = flow(200)
    errors = []
    for model in (gp_orff.VectorFieldGP(curl_free()), robust_model(deg_free=50.0)):
        model.fit(x, y, progress=False)
        errors.append((model.posterior().mean(x) - field(x)).square().mean().sqrt().item())
        noise = model.likelihood.noise.item() ** 0.5
        assert noise == pytest.approx(0.1, rel=0.1)
    assert errors[1] == pytest.approx(errors[0], rel=0.1)


@pytest.mark.parametrize("deg_free", [3.0, 10.0])
@pytest.mark.parametrize("values", [1, 2, 3])
def test_the_bound_by_quadrature(deg_free, values):
    """E[log p(w)/q(w)] + ½v(E log w − log E w) under q(w), a Gamma law, integrated numerically."""
    model, distance = StudentTNoise(deg_free), torch.tensor([0.3, 2.0, 40.0]).double()
    expected = 0.0
    for d in distance.tolist():
        q = scipy.stats.gamma((deg_free + values) / 2, scale=2 / (deg_free + d))
        p = scipy.stats.gamma(deg_free / 2, scale=2 / deg_free)
        own = q.expect(lambda w, p=p, q=q: p.logpdf(w) - q.logpdf(w))
        own += 0.5 * values * (q.expect(math.log) - math.log(q.mean()))
        weight = model.weights(torch.tensor([d]), values).item()
        assert weight == pytest.approx(q.mean())
        expected += own
    assert model.elbo_correction(distance, values) == pytest.approx(expected, rel=1e-6)


def test_the_bound_is_below_the_density_and_not_far():
    """Exact density of the data by importance sampling over the weights of few readings."""
    x, y, _ = flow(6, noise=0.3)
    y[0] += 3.0
    model = robust_model()
    model.kernel.base_kernel.base_kernel.lengthscale = 0.5
    model.likelihood.noise = 0.05
    model.mean = gpytorch.means.ZeroMean()
    model.condition(x, y)
    covariance = model.kernel(x).to_dense().detach()
    bound = model.log_marginal_likelihood().item()
    weights = model.state.data.weights[0]
    total = []
    shape = torch.full((6,), 3.0).double()
    q = torch.distributions.Gamma(shape, shape / weights)  # mean E[w]
    p = torch.distributions.Gamma(torch.tensor(2.0).double(), torch.tensor(2.0).double())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        samples = q.sample((4000,))
    for w in samples:
        noise = torch.diag((0.05 / w).repeat_interleave(2))
        density = oracles.log_density(covariance + noise, y)
        total.append(density + p.log_prob(w).sum() - q.log_prob(w).sum())
    total = torch.stack(total)
    truth = (torch.logsumexp(total, 0) - math.log(len(total))).item()
    spread = (total - total.max()).exp()
    error = (spread.std() / spread.mean() / len(total) ** 0.5).item()
    assert bound < truth + 5 * error
    assert bound > truth - 1.5


@pytest.mark.slow
def test_expectation_maximisation_climbs(fits):
    x, y, _, _ = with_outliers(200)
    model = copy.deepcopy(fits["exact"])
    best = model.log_marginal_likelihood().item()
    again = model.condition(x, y).log_marginal_likelihood().item()
    assert again >= best - 1e-4  # EM ends where it gains 1e-6 nats
    for factor in (0.8, 1.25):
        noise = model.likelihood.noise.item()
        model.likelihood.noise = factor * noise
        assert model.condition(x, y).log_marginal_likelihood().item() < best
        model.likelihood.noise = noise


def test_its_marginal_in_gpytorch_has_the_covariance_of_the_noise():
    likelihood = gp_orff.MultitaskStudentTLikelihood(2, deg_free=4.0)
    likelihood.noise = 0.3
    law = MultitaskMultivariateNormal(torch.zeros(3, 2), torch.eye(6))
    torch.testing.assert_close(likelihood(law).variance, torch.full((3, 2), 1.6))
    with pytest.raises(ValueError, match="deg_free > 2"):
        gp_orff.MultitaskStudentTLikelihood(2, deg_free=2.0)


@pytest.mark.slow
def test_new_readings_are_weighed_by_the_field(fits):
    x, y, field, bad = with_outliers(200)
    model = copy.deepcopy(fits["exact"]).condition(x[:150], y[:150])
    model.update(x[150:], y[150:])
    weights = torch.cat(model.state.data.weights)[150:]
    assert weights[bad[150:]].max() < 0.1 < weights[~bad[150:]].min()
    assert (model.posterior().mean(x) - field(x)).square().mean().sqrt() < 0.08


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_leaving_one_out_is_conditioning_on_the_others(rule, weighted):
    x, y, _ = flow(40)
    variances = torch.linspace(0.5, 2.0, 40).double()
    how = {"variances": variances} if weighted else {}
    model = gp_orff.VectorFieldGP(curl_free(0.5), frequencies=RULES[rule])
    model.likelihood.noise = 0.04
    model.condition(x, y, **how)
    found = model.leave_one_out(x, y, **how)
    constant = torch.stack([m.constant.detach() for m in model.mean.base_means]).flatten()
    noise = 0.04 * (variances if weighted else torch.ones(40).double())
    prior = model.kernel(x).to_dense().detach()
    noisy = prior + torch.diag(noise.repeat_interleave(2))
    for i in (0, 7, 39):
        own = [2 * i, 2 * i + 1]
        rest = [j for j in range(80) if j not in own]
        gain = torch.linalg.solve(noisy[rest][:, rest], noisy[rest][:, own]).mT
        residual = (y - constant).reshape(-1)
        wanted = residual[own] - gain @ residual[rest]
        covariance = noisy[own][:, own] - gain @ noisy[rest][:, own]
        atol = 1e-8 if rule == "exact" else 1e-4
        torch.testing.assert_close(found.residual[i], wanted, rtol=0, atol=atol)
        torch.testing.assert_close(found.covariance[i], covariance, rtol=0, atol=atol)
        distance = wanted @ torch.linalg.solve(covariance, wanted)
        assert found.distance[i] == pytest.approx(distance.item(), rel=100 * atol)
        density = oracles.log_density(covariance, wanted).item()
        assert found.log_density[i] == pytest.approx(density, abs=100 * atol)


@pytest.mark.filterwarnings("ignore:the truncated variance of the given grid")
@pytest.mark.parametrize("count", [6, 90], ids=["dual", "primal"])
def test_what_a_grid_leaves_out_is_noise_of_each_reading(count):
    """On a grid that leaves a tenth of the variance out, against models of the others."""
    x, y, _ = flow(count)
    rule = gp_orff.Grid(spacing=0.8, cutoff=4.0)

    def model_of(x, y):
        model = gp_orff.VectorFieldGP(
            curl_free(0.5), mean=gpytorch.means.ZeroMean(), frequencies=rule
        )
        model.likelihood.noise = 0.04
        return model.condition(x, y)

    found = model_of(x, y).leave_one_out(x, y)
    for i in (0, 5):
        others = torch.arange(count) != i
        field = model_of(x[others], y[others]).posterior()
        residual = y[i] - field.mean(x[i : i + 1])[0]
        covariance = field.pointwise_covariance(x[i : i + 1])[0] + 0.04 * torch.eye(2)
        torch.testing.assert_close(found.residual[i], residual, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.covariance[i], covariance, rtol=0, atol=1e-9)


def dense_em(x, y, prior, noise, deg_free):
    """Weights, mean and variance of the field at their fixed point: plain EM, dense algebra."""
    count, precision = len(x), torch.eye(2).double() / noise
    weights, change = torch.ones(count).double(), 1.0
    while change > 1e-10:
        noisy = prior + torch.diag((noise / weights).repeat_interleave(2))
        gain = torch.linalg.solve(noisy, prior).mT
        mean = (gain @ y.reshape(-1)).reshape(count, 2)
        covariance = prior - gain @ prior
        blocks = covariance.reshape(count, 2, count, 2).diagonal(dim1=0, dim2=2)  # (2, 2, N)
        square = torch.einsum("ni,ij,nj->n", y - mean, precision, y - mean)
        distance = square + torch.einsum("ijn,ij->n", blocks, precision)
        new = (deg_free + 2) / (deg_free + distance)
        weights, change = new, (new - weights).abs().max()
    return weights, mean, covariance.diagonal().reshape(count, 2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("deg_free", "seed"), [(2.5, 1), (4.0, 0)])
def test_weights_settle(rule, deg_free, seed):
    """Where a round of EM closes 3 % and 10 % of the gap, ten of them leave the mean 0.1 sd off."""
    x, y, _, _ = with_outliers(60, share=0.2, noise=0.3, seed=seed)
    model = robust_model(deg_free, RULES[rule])
    model.kernel.base_kernel.base_kernel.lengthscale = 0.7
    model.likelihood.noise = 0.1
    model.mean = gpytorch.means.ZeroMean()
    model.condition(x, y)
    prior = model.kernel(x).to_dense().detach()
    weights, mean, variance = dense_em(x, y, prior, 0.1, deg_free)
    torch.testing.assert_close(torch.cat(model.state.data.weights), weights, rtol=0, atol=1e-3)
    field = model.posterior()
    assert ((field.mean(x) - mean).abs() < 0.01 * variance.sqrt()).all()  # of 1e-6 nats: 0.0015
    torch.testing.assert_close(field.variance(x), variance, rtol=5e-4, atol=0)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", ["other hyperparameters", "observed"])
def test_weights_settle_after_a_change(how, rule):
    """Of hyperparameters, or by values of the field that contradict the data, against plain EM."""
    x, y, _, _ = with_outliers(25, noise=0.3)
    model, o = new_robust(RULES[rule]).condition(x, y), x[:4] + 0.02
    if how == "observed":
        model.observe(o, 3 - y[:4], Identity(), noise=0.01)
    else:
        model.kernel.outputscale, model.likelihood.noise = 3.0, 0.3
    noise, values = model.likelihood.noise.item(), y
    joint = model.kernel(torch.cat([x, o])).to_dense().detach()
    prior, shift = joint[:50, :50], torch.zeros_like(y)
    if how == "observed":  # the prior given the values of the field
        gain = torch.linalg.solve(joint[50:, 50:] + 0.01 * torch.eye(8), joint[50:, :50]).mT
        shift = (gain @ (3 - y[:4]).reshape(-1)).reshape(-1, 2)
        prior, values = prior - gain @ joint[50:, :50], y - shift
    _, mean, variance = dense_em(x, values, prior, noise, 4.0)
    field = model.posterior()
    assert ((field.mean(x) - mean - shift).abs() < 0.01 * variance.sqrt()).all()  # as above
    torch.testing.assert_close(field.variance(x), variance, rtol=5e-3, atol=0)


KINDS = ("gaps", "groups", "variances", "covariances", "radial with noise")
SETTLED = [("exact", kind) for kind in KINDS]
SETTLED += [("grid", kind) for kind in ("groups", "covariances", "radial with noise")]


def readings_of(kind, points=30):
    """Readings of a kind with wrong ones among them, as a mapping; and the rows that see the field,
    the numbers that they see, the noise variance of each, and which of them share a weight."""
    x, y, _, _ = with_outliers(points, share=0.2, noise=0.3)
    content, axes = {"x": x, "y": y}, torch.eye(2).double().expand(points, 2, 2)
    noise = torch.full((points, 2), 0.1).double()
    shared = torch.arange(points)[:, None].expand(points, 2)
    if kind == "gaps":
        y[::4, 0] = float("nan")
    elif kind == "groups":
        content["group"] = np.array(["a", "b", ""] * (points // 3))
    elif kind == "variances":  # a weight for each number
        spread = 0.5 + torch.rand(points, 2, generator=torch.Generator().manual_seed(1)).double()
        content["variances"], noise = spread, 0.1 * spread
        shared = torch.arange(2 * points).reshape(points, 2)
    elif kind == "covariances":
        root = torch.randn(points, 2, 2, generator=torch.Generator().manual_seed(1)).double()
        content["noise"] = 0.1 * (root @ root.mT + 0.2 * torch.eye(2).double())
        noise, axes = torch.linalg.eigh(content["noise"])
        axes, shared = axes.mT, torch.arange(2 * points).reshape(points, 2)
    elif kind == "radial with noise":
        axes = torch.nn.functional.normalize(y.roll(1, 0), dim=1)[:, None]
        content["directions"], noise, shared = axes[:, 0], noise[:, :1], shared[:, :1]
        content["y"] = y = (axes @ y[:, :, None])[:, 0, 0]
        noise = noise * torch.linspace(0.5, 2, points).double()[:, None]
        content["noise"] = noise[:, 0]
    rows = torch.block_diag(*axes)
    values = y.flatten() if kind == "radial with noise" else rows @ y.nan_to_num().flatten()
    seen = ~y.flatten().isnan()
    return content, (rows[seen], values[seen], noise.flatten()[seen], shared.flatten()[seen])


def cut(content, *places):
    """A mapping of readings in pieces."""
    edges = [0, *places, len(content["x"])]
    return [
        {name: values[first:last] for name, values in content.items()}
        for first, last in itertools.pairwise(edges)
    ]


def new_robust(rule=None):
    model = robust_model(4.0, rule)
    model.kernel.base_kernel.base_kernel.lengthscale = 0.7
    model.likelihood.noise = 0.1
    model.mean = gpytorch.means.ZeroMean()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind"), SETTLED)
def test_weights_settle_whatever_the_chunks(rule, kind):
    """A group has several parts in chunks, and with a covariance for each reading: EM ends where
    dense algebra has its fixed point, and where it ends for a single array, to rounding."""
    content, (rows, y, noise, shared) = readings_of(kind)
    chunked = new_robust(RULES[rule]).condition(cut(content, 7, 17), missing="mask")
    options = {name: content[name] for name in content if name not in ("x", "y")}
    whole = new_robust(RULES[rule]).condition(content["x"], content["y"], missing="mask", **options)
    for model in (chunked, whole):
        assert isinstance(model.state.inference, ExactInference) == (rule == "exact")
    xs = content["x"][:20]
    torch.testing.assert_close(
        chunked.log_marginal_likelihood(), whole.log_marginal_likelihood(), rtol=0, atol=1e-6
    )
    prior = whole.kernel(content["x"]).to_dense().detach()
    count, weights, change = torch.bincount(shared), torch.ones(len(y)).double(), 1.0
    observed, start = rows @ prior @ rows.mT, rows @ prior
    while change > 1e-10:
        noisy = observed + torch.diag(noise / weights)
        mean, covariance = oracles.condition(observed, observed, noisy, y)
        distance = torch.bincount(shared, ((y - mean).square() + covariance.diagonal()) / noise)
        new = ((4 + count) / (4 + distance))[shared]
        weights, change = new, (new - weights).abs().max()
    mean, covariance = oracles.condition(prior, start.mT, noisy, y)
    sd = covariance.diagonal().sqrt().reshape(-1, 2)[:20]
    for model in (chunked, whole):
        field = model.posterior()
        assert ((field.mean(xs) - mean.reshape(-1, 2)[:20]).abs() < 0.01 * sd).all()
        torch.testing.assert_close(field.variance(xs).sqrt(), sd, rtol=5e-4, atol=0)
    torch.testing.assert_close(
        chunked.posterior().mean(xs), whole.posterior().mean(xs), rtol=0, atol=1e-7
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaps", "covariances"])
def test_updates_are_learned_from_as_chunks_are(kind, monkeypatch):
    """Of more chunks than are held apart; from the same starting values, of the noise alone."""
    monkeypatch.setattr(dataset, "MOST_PIECES", 4)
    content, _ = readings_of(kind, 45)
    first, *rest = cut(content, *range(9, 45, 3))

    def noise_only():
        model = new_robust()
        model.kernel.requires_grad_(False)
        return model

    model = noise_only().condition([first], missing="mask")
    for start in range(0, 12, 3):
        model.update(rest[start : start + 3], missing="mask")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few numbers and of their calibration
        model.fit(progress=False, warm_start=True)
        fresh = noise_only()
        fresh.fit([first, *rest], missing="mask", progress=False, warm_start=True)
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_weights_that_do_not_settle_are_told():
    x, y, _, _ = with_outliers(60)
    model = robust_model().condition(x, y)
    state = model.state
    own = replace(state.representation, data=state.data.unweighted())
    with pytest.warns(UserWarning, match="not converged after 3 rounds; use a larger deg_free"):
        state.e_step.converged(own, rounds=3)


def test_a_likelihood_says_how_it_is_weighed():
    class Mine(gpytorch.likelihoods.MultitaskGaussianLikelihood):
        """With tails of its own."""

    heavy_tailed_noise.register(Mine, lambda likelihood: StudentTNoise(4.0))
    x, y, _, _ = with_outliers(60)
    model, expected = robust_model(), robust_model().condition(x, y)
    model.likelihood = Mine(2, has_task_noise=False).double()
    model.likelihood.noise = expected.likelihood.noise.item()
    model.condition(x, y)
    for found, own in zip(model.state.data.weights, expected.state.data.weights, strict=True):
        assert torch.equal(found, own)


def left_out(model, x, y, weights, row):
    """Residual of a reading and covariance of its vector given the others, by dense algebra."""
    noise = model.likelihood.noise.item()
    prior = model.kernel(x).to_dense().detach()
    noisy = prior + torch.diag((noise / weights).repeat_interleave(2))
    own, rest = [2 * row, 2 * row + 1], [j for j in range(2 * len(x)) if j // 2 != row]
    gain = torch.linalg.solve(noisy[rest][:, rest], noisy[rest][:, own]).mT
    residual = y[row] - gain @ y.reshape(-1)[rest]
    return residual, prior[own][:, own] + noise * torch.eye(2) - gain @ noisy[rest][:, own]


def with_update(rule, repeated=False):
    """A model of 60 readings and 20 that came later, five of them wrong."""
    x, y, _ = flow(80)
    y[60:65] += torch.tensor([4.0, -3.0]).double()
    if repeated:
        x[70:75], y[70:75] = x[:5], y[:5]
    model = robust_model(rule=RULES[rule])
    model.kernel.base_kernel.base_kernel.lengthscale = 0.5
    model.likelihood.noise = 0.04
    model.mean = gpytorch.means.ZeroMean()
    model.condition(x[:60], y[:60]).update(x[60:], y[60:])
    return model, x, y, torch.cat(model.state.data.weights)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_leave_one_out_after_an_update_uses_the_weights_that_are_held(rule):
    """Against dense conditioning on the others, for all readings and for some in another order."""
    model, x, y, weights = with_update(rule)
    atol = 1e-9 if rule == "exact" else 1e-4
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    for rows in (torch.arange(80), order[:30], torch.arange(60, 80)):
        found = model.leave_one_out(x[rows], y[rows])
        torch.testing.assert_close(found.weight, weights[rows], rtol=1e-12, atol=0)
        for i, row in list(enumerate(rows.tolist()))[::7]:
            wanted, covariance = left_out(model, x, y, weights, row)
            torch.testing.assert_close(found.residual[i], wanted, rtol=0, atol=atol)
            torch.testing.assert_close(found.covariance[i], covariance, rtol=0, atol=atol)
            p = scipy.stats.f(2, 4).sf(wanted @ torch.linalg.solve(covariance, wanted) / 2)
            assert found.p_value[i] == pytest.approx(p, abs=10 * atol)


@pytest.mark.parametrize("repeated", [False, True])
def test_what_is_taken_away_has_the_weights_that_are_held(repeated):
    """Readings that came later, in another order: what is left is the posterior of the others under
    their weights, by dense algebra. Repeated ones count as often as they are there."""
    model, x, y, weights = with_update("grid", repeated)
    later = 60 + torch.randperm(20, generator=torch.Generator().manual_seed(0))
    part = model.statistics_of(x[later], y[later])
    gone = torch.zeros(80, dtype=torch.bool)
    gone[60:] = True
    if repeated:  # of equal readings the first is the first
        gone[70:75], gone[:5] = False, True
    kept = ~gone
    left = model.statistics - part
    model.condition(left)
    xs = 1.6 * torch.rand(20, 2, generator=torch.Generator().manual_seed(5)).double() - 0.8
    noisy = model.kernel(x[kept]).to_dense() + torch.diag(0.04 / weights[kept].repeat_interleave(2))
    gain = torch.linalg.solve(noisy, model.kernel(x[kept], xs).to_dense()).mT.detach()
    mean = (gain @ y[kept].reshape(-1)).reshape(-1, 2)
    prior = model.kernel(xs).to_dense().detach()
    sd = (prior - gain @ model.kernel(x[kept], xs).to_dense()).diagonal().reshape(-1, 2).sqrt()
    assert ((model.posterior().mean(xs) - mean).abs() < 2e-3 * sd).all()  # the grid's tolerance
    torch.testing.assert_close(model.posterior().variance(xs).sqrt(), sd, rtol=1e-4, atol=0)
    heavy_tailed = StudentTNoise(4.0)
    bound = heavy_tailed.elbo_correction(heavy_tailed.distance(weights[kept], 2), 2)
    assert left.elbo_correction == pytest.approx(bound, rel=1e-9)


def test_leave_one_out_asks_for_readings_it_knows():
    x, y, _ = flow(40)
    with pytest.raises(ValueError, match="was conditioned"):
        conditioned(curl_free(0.05), x, y, None, noise=1e-4).leave_one_out(x + 0.7, y)
    variances = torch.ones(40, 2).double()
    model = gp_orff.VectorFieldGP(curl_free(0.5)).condition(x, y, variances=variances)
    with pytest.raises(ValueError, match=r"variances \(N,\)"):
        model.leave_one_out(x, y, variances=variances)


@pytest.mark.parametrize("rule", RULES)
def test_leaving_one_out_of_many_kinds_keeps_their_order(rule):
    """Gaps and instruments, against the same readings asked for by kind."""
    x, y, _ = flow(60)
    y[::5, 0] = y[1::7, 1] = y[3] = float("nan")
    group = np.array(["", "other", ""] * 20)
    model = gp_orff.VectorFieldGP(curl_free(0.5), frequencies=RULES[rule])
    model.condition(x, y, missing="mask", group=group)
    model.likelihoods["other"].noise = 0.2
    found = model.leave_one_out(x, y, missing="mask", group=group)
    seen = ~y.isnan()
    assert torch.equal(found.residual.isnan(), ~seen)
    assert found.distance[3].isnan()
    for columns in ([True, True], [False, True], [True, False]):
        for label in ("", "other"):
            rows = (seen == torch.tensor(columns)).all(-1) & torch.from_numpy(group == label)
            alone = model.leave_one_out(x[rows], y[rows], missing="mask", group=label)
            for name in ("distance", "p_value", "log_density", "weight"):
                torch.testing.assert_close(getattr(found, name)[rows], getattr(alone, name))
            own = found.covariance[rows][:, columns][:, :, columns]
            torch.testing.assert_close(own, alone.covariance[:, columns][:, :, columns])


@pytest.mark.parametrize("noise", ["gaussian", "student"])
def test_p_values_are_uniform_where_the_model_is_right(noise):
    """Kolmogorov–Smirnov, of 600 readings of a field that is known well beside its noise, under the
    lengthscale and the noise that they were drawn with."""
    x, _, field = flow(600)
    rng = np.random.default_rng(0)
    if noise == "gaussian":
        model, drawn = gp_orff.VectorFieldGP(curl_free(0.3)), 0.2 * rng.standard_normal((600, 2))
    else:
        model = gp_orff.VectorFieldGP(curl_free(0.3), likelihood=robust_model().likelihood)
        drawn = scipy.stats.multivariate_t(shape=0.04 * np.eye(2), df=4, seed=rng).rvs(600)
    y = field(x) + torch.from_numpy(drawn)
    model.likelihood.noise = 0.04
    found = model.condition(x, y).leave_one_out(x, y)
    p, distance = found.p_value, found.distance
    assert scipy.stats.kstest(p, "uniform").pvalue > 0.01
    scale = {"gaussian": scipy.stats.chi2(2).sf, "student": lambda d: scipy.stats.f(2, 4).sf(d / 2)}
    torch.testing.assert_close(p, torch.from_numpy(scale[noise](distance.numpy())))


@pytest.mark.slow
def test_leave_one_out_of_what_is_held_uses_the_weights_it_has(fits):
    """Under Student-t noise the readings were weighed without knowing that they would be left out;
    as new readings they would be weighed by a field that knows them."""
    (x, y, _, _), model = with_outliers(200), fits["exact"]
    found = model.leave_one_out(x, y)
    weights = torch.cat(model.state.data.weights)
    constant = torch.stack([own.constant.detach() for own in model.mean.base_means]).flatten()
    for row in range(0, 200, 29):
        residual, covariance = left_out(model, x, y - constant, weights, row)
        torch.testing.assert_close(found.residual[row], residual, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.covariance[row], covariance, rtol=1e-9, atol=1e-9)


def test_leave_one_out_of_an_unknown_instrument():
    x, y, _ = flow(40)
    model = conditioned(curl_free(0.5), x, y, None, noise=0.04)
    with pytest.raises(ValueError, match="known group"):
        model.leave_one_out(x, y, group="radar")


@pytest.mark.parametrize(("distance", "calls"), [(1.5, 4), (5.0, 8)])
def test_a_map_that_climbs_slowly_is_extrapolated(distance, calls):
    """Steps of 5 % of what is left go 20 times as far, to the fixed point itself, but for the two
    units that are the farthest at once: two calls of the map for each round, two at the end."""
    top = torch.tensor([distance, -distance, 0.3]).double()
    asked = []

    def step(u):
        asked.append(u)
        return -(u - top).square().sum().item(), u + 0.05 * (top - u)

    found, settled = climb(step, torch.zeros(3).double(), 100.0, 1e-20, 10)
    assert settled
    torch.testing.assert_close(found, top, rtol=0, atol=1e-12)  # rounding, 20 times
    assert len(asked) == calls


def test_an_extrapolation_that_falls_is_taken_back():
    """Where later steps turn away from the first ones, the fixed point is found all the same."""
    tried = []

    def step(u):
        tried.append(-abs(u.item() - 1))
        return tried[-1], u + 0.05 if u.item() < 1 else u - 0.5 * (u - 1)

    found, _ = climb(step, torch.zeros(1).double(), 100.0, 1e-12, 60)
    assert min(tried[3:]) < max(tried[:3])  # it was tried
    assert abs(found.item() - 1) < 0.05


@pytest.mark.parametrize("rule", RULES)
def test_readings_of_gaussian_noise_beside_those_of_heavy_tails(rule):
    """They keep their weight of one; the others settle where dense algebra has them."""
    x, y, _, _ = with_outliers(60, share=0.2, noise=0.3)
    group = np.array(["", "", "other"] * 20)
    other = torch.from_numpy(group == "other")
    model = robust_model(4.0, RULES[rule])
    model.kernel.base_kernel.base_kernel.lengthscale = 0.7
    model.likelihood.noise = 0.1
    model.likelihoods["other"] = gpytorch.likelihoods.MultitaskGaussianLikelihood(
        2, has_task_noise=False
    ).double()
    model.likelihoods["other"].noise = 0.4
    model.mean = gpytorch.means.ZeroMean()
    model.condition(x, y, group=group)
    prior = model.kernel(x).to_dense().detach()
    weights = torch.ones(60).double()
    for _ in range(400):
        noise = torch.where(other, 0.4, 0.1 / weights).repeat_interleave(2)
        mean, covariance = oracles.condition(prior, prior, prior + noise.diag(), y.flatten())
        second = (y.flatten() - mean).square() + covariance.diagonal()
        new = 6 / (4 + second.reshape(60, 2).sum(-1) / 0.1)
        weights = torch.where(other, 1.0, new)
    kept = torch.cat([weights[~other], weights[other]])
    torch.testing.assert_close(torch.cat(model.state.data.weights), kept, rtol=0, atol=2e-3)
    found, sd = model.posterior().mean(x), covariance.diagonal().sqrt()
    assert ((found.flatten() - mean).abs() < 0.01 * sd).all()
    whole = oracles.log_density(prior + noise.diag(), y)
    square = second.reshape(60, 2).sum(-1)[~other] / 0.1
    whole = whole + StudentTNoise(4.0).elbo_correction(square, 2)
    assert model.log_marginal_likelihood().item() == pytest.approx(whole.item(), abs=1e-2)


def test_leave_one_out_is_refused_where_only_some_vectors_are_several_readings():
    x, y, _ = flow(20)
    y[:10, 0] = y[18:, 1] = float("nan")
    variances = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)).double() + 0.1
    model = gp_orff.VectorFieldGP(curl_free(0.5))
    model.condition(x, y, variances=variances, missing="mask")
    with pytest.raises(ValueError, match=r"variances \(N,\)"):
        model.leave_one_out(x, y, variances=variances, missing="mask")


@pytest.mark.slow
def test_new_groups_along_directions_have_tails_too():
    """One radial number in ten is wrong, and gets a small weight; the scale is in units of y."""
    x, y, _, bad = with_outliers(60)
    u = torch.nn.functional.normalize(torch.randn(60, 2, generator=GENERATOR).double(), dim=1)
    likelihood = gp_orff.MultitaskStudentTLikelihood(2, deg_free=3.5, learn_deg_free=True)
    likelihood.noise = 0.01
    model = gp_orff.VectorFieldGP(curl_free(), likelihood=likelihood)
    radial = {"x": x, "y": (u * y).sum(-1), "directions": u, "group": "radar"}
    clean = {"x": x[~bad], "y": y[~bad]}
    radar = model.condition([clean, radial]).likelihoods["radar"]
    assert radar.deg_free.item() == pytest.approx(3.5)
    assert radar.raw_deg_free.requires_grad
    assert radar.noise.item() == pytest.approx(0.01)
    weights = list(model.state.data.all_weights())[1]
    wrong = bad & (radial["y"].abs() > 3)
    assert weights[wrong].max() < 0.1 < 0.3 < weights[~bad].median()
    model.condition([clean, {**radial, "y": 1e-6 * radial["y"]}])  # of another unit: no floor
    radar.noise = 1e-14
    assert radar.noise.item() == pytest.approx(1e-14, rel=1e-3)


@pytest.mark.parametrize("directed", [False, True])
def test_residuals_from_the_factor_are_those_of_the_posterior(directed):
    """E[r rᵀ] against dense covariances; exact to rounding, with weights and two groups."""
    x, y, *_ = with_outliers(40)
    options = {"group": ["a"] * 15 + ["b"] * 25}
    rows = torch.eye(80).double()
    if directed:
        u = torch.nn.functional.normalize(torch.randn(x.shape, generator=GENERATOR).double(), dim=1)
        rows, y = torch.block_diag(*u.unsqueeze(1)), (u * y).sum(-1)
        options["directions"] = u
    model = robust_model().condition(x, y, **options)
    state, constant = model.state, model.mean(x[:1]).detach()[0]
    posterior = state.inference.posterior(model.kernel, state.e_step.noises, state.mean)
    found = state.inference.residuals(posterior).values()
    found = torch.cat([r[:, :, None] * r[:, None] + covariance for r, covariance in found])
    width = 1 if directed else 2
    weights = torch.cat(list(state.data.all_weights())).repeat_interleave(width)
    noise = torch.cat(
        [
            state.e_step.noises[name].diagonal()[:width].repeat(count)
            for name, count in (("a", 15), ("b", 25))
        ]
    )
    prior = rows @ linear_operator.to_dense(model.kernel(x)) @ rows.mT
    both = prior + torch.diag(noise / weights)
    mean = rows @ constant.repeat(40)
    residual = y.flatten() - mean - prior @ torch.linalg.solve(both, y.flatten() - mean)
    second = residual[:, None] * residual + prior - prior @ torch.linalg.solve(both, prior)
    expected = second.unflatten(0, (40, width)).unflatten(2, (40, width)).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(found, expected.permute(2, 0, 1), rtol=1e-7, atol=1e-9)


def test_weights_that_few_readings_foresee():
    """(ν + p) / (ν + rᵀ(S + N)⁻¹r) from dense covariances, to rounding: larger than those
    of the E-step, which count that little is known against a reading."""
    x, y, _, bad = with_outliers(60)
    model = robust_model()
    model.likelihood.noise = 0.01
    model.condition(x, y)
    inference, e_step = model.state.inference, model.state.e_step
    few, data = (Dataset.in_memory(read(x[:count], y[:count], 2, Options())) for count in (15, 60))
    few = inference.of(few)
    found = torch.cat(e_step.foreseen(data, few).weights)
    noise = e_step.noises[""]
    prior = linear_operator.to_dense(model.kernel(x))
    total = prior[:30, :30] + torch.block_diag(*[noise] * 15)
    ones = torch.eye(2).double().repeat(60, 1)
    solved = torch.linalg.solve(total, ones[:30])
    constant = torch.linalg.solve(ones[:30].mT @ solved, solved.mT @ y[:15].flatten())
    gain = torch.linalg.solve(total, prior[:30]).mT
    residual = (y - constant).flatten() - gain @ (y[:15] - constant).flatten()
    latent = (prior - gain @ prior[:30]).unflatten(0, (60, 2)).unflatten(2, (60, 2))
    latent = latent.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    residual = residual.unflatten(0, (60, 2))
    distance = (residual * torch.linalg.solve(latent + noise, residual)).sum(-1)
    torch.testing.assert_close(found, 6 / (4 + distance), rtol=1e-8, atol=1e-10)
    seen = torch.cat(e_step.weighted(data, few).weights)
    assert (found > seen).all()
    assert found[~bad].median() > 3 * seen[~bad].median()


def test_variances_along_directions_are_those_of_vectors():
    x, y, *_ = with_outliers(30)
    part = Observations(
        GroupKey("", LineOfSight(2)), x, y[:, :1], direction=torch.nn.functional.normalize(y, dim=1)
    )
    state = conditioned(curl_free(), x, y, RULES["grid"]).state
    posterior = state.inference.posterior(state.kernel, state.e_step.noises, state.mean)
    field = posterior.distribution.split()[0]
    assert isinstance(field, WeightPosterior)
    expected = part.apply_to_covariance(field.blocks(x))
    torch.testing.assert_close(field.latent(part), expected, rtol=1e-9, atol=1e-12)
