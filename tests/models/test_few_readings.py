"""Posteriors from few observations: mixtures over uncertain hyperparameters."""

import copy
import math
import pickle
import warnings

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean, ZeroMean
from gpytorch.priors import GammaPrior, LogNormalPrior, NormalPrior, UniformPrior

import gp_orff
from gp_orff.data.noise import mixture_quantile, noises_of
from gp_orff.inference.quadratic import Evidence
from gp_orff.models import few_readings
from gp_orff.models.few_readings import (
    Member,
    Mixture,
    adaptive_draws,
    drawn_errors,
    leaves_spectra_open,
    pareto,
    sample_of_hyperparameters,
    smoothed_logs,
    truncated_weights,
    with_drawn_weights,
)
from gp_orff.models.sample_paths import JoinedPaths, Paths
from tests.support.fields import draw, uniform


def conditioned(length, x, y):
    kernel = gp_orff.HelmholtzKernel(num_dims=2)
    for part in kernel.kernels:
        part.base_kernel.base_kernel.lengthscale = length
    model = gp_orff.VectorFieldGP(kernel)
    model.likelihood.noise = 0.1
    return model.condition(x, y)


@pytest.fixture(scope="module")
def mixture():
    """Of two models of one set, with their weights and posteriors."""
    x, y = uniform(8, 2), 3.0 + draw(8, 2)
    models = [conditioned(length, x, y) for length in (0.5, 1.5)]
    snapshots = [model.state.snapshot(model.mean) for model in models]
    members = [
        Member(weight, own.kernel, own.field().distribution)
        for weight, own in zip((0.3, 0.7), snapshots, strict=True)
    ]
    whole = Mixture(members, snapshots[0].kernel)
    return whole, [model.posterior() for model in models]


def moments(fields, x, symbol=None):
    """Mean and covariance, by definition."""
    weights = np.array([0.3, 0.7])
    joint = [field(x, symbol) for field in fields]
    means = np.stack([own.mean.detach().numpy().ravel() for own in joint])
    mean = weights @ means
    covariance = sum(
        w * (own.covariance_matrix.detach().numpy() + np.outer(m - mean, m - mean))
        for w, m, own in zip(weights, means, joint, strict=True)
    )
    return mean, covariance


@pytest.mark.parametrize("symbol", [None, gp_orff.Divergence(), gp_orff.StreamFunction()])
def test_moments_are_those_of_a_mixture(mixture, symbol):
    """1e-5: gpytorch's joint distributions have a jitter."""
    whole, fields = mixture
    x = uniform(4, 2, seed=2)
    distribution = whole if symbol is None else whole.apply(symbol, (0, 1))
    q = distribution.num_outputs
    mean, covariance = moments(fields, x, symbol)
    assert np.allclose(distribution.mean(x).flatten(), mean, atol=1e-9)
    close = {"atol": 1e-5 * np.abs(covariance).max()}
    assert np.allclose(distribution.covariance(x), covariance, **close)
    assert np.allclose(distribution.variance(x).flatten(), covariance.diagonal(), **close)
    root = distribution.root(x)
    assert np.allclose(root @ root.mT, covariance, **close)
    for number, block in enumerate(distribution.blocks(x)):
        span = slice(q * number, q * number + q)
        assert np.allclose(block, covariance[span, span], **close)
    x.neg_()  # the moments that are kept for the last points are not those of other points
    mean, covariance = moments(fields, x, symbol)
    assert np.allclose(distribution.mean(x).flatten(), mean, atol=1e-9)
    assert np.allclose(distribution.variance(x).flatten(), covariance.diagonal(), **close)
    loaded = pickle.loads(pickle.dumps(distribution))
    assert np.allclose(loaded.mean(x), distribution.mean(x), atol=1e-12)


def test_parts_are_those_of_the_members(mixture):
    whole, fields = mixture
    x = uniform(4, 2, seed=2)
    part = whole.of_part(None, whole.kernel.kernels[1])
    own = [field.part("divergence_free") for field in fields]
    expected = sum(w * f.mean(x) for w, f in zip((0.3, 0.7), own, strict=True))
    assert torch.allclose(part.mean(x), expected, atol=1e-9)
    spread = sum(
        w * (f.variance(x) + (f.mean(x) - expected) ** 2)
        for w, f in zip((0.3, 0.7), own, strict=True)
    )
    assert torch.allclose(part.variance(x), spread, atol=1e-9)


def problem(points=20):
    x = uniform(points, 2)
    wave = torch.cos(4 * x[:, :1]) * torch.tensor([1.0, 0.3]).double()
    return x, 9.0 + wave + 0.2 * draw(points, 2)


@pytest.fixture(scope="module")
def fitted():
    x, y = problem()
    kernel = gp_orff.CurlFreeKernel(gp_orff.LearnedSpectrumKernel(5), num_dims=2)
    return gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)


def sample_of(state):
    parts = state.inference, state.kernel, state.likelihoods, state.mean
    return sample_of_hyperparameters(*parts)


def test_posteriors_of_fits_are_mixtures(fitted):
    """Of the sample, its means included; those of conditioned models are not."""
    x, state, field = uniform(50, 2, seed=7), fitted.state, fitted.posterior()
    members = sample_of(state).members
    means = torch.stack([own.distribution.mean(x) for own in members])
    weights = torch.tensor([own.weight for own in members]).double()[:, None, None]
    assert torch.allclose(field.mean(x), (weights * means).sum(0))
    assert means.std(0).mean() > 0.01
    twin = gp_orff.VectorFieldGP(fitted.kernel).condition(*problem())
    assert not twin.state.snapshot(twin.mean).sample.members


def test_weights_are_truncated():
    """At the mean weight times √S: of 1, 1, 1, 13 at 4 · 2 (Ionides 2008)."""
    weights = truncated_weights(np.log([1.0, 1.0, 1.0, 13.0]) - 500)
    assert weights == pytest.approx(np.array([1, 1, 1, 8]) / 11)
    assert truncated_weights(np.zeros(3)) == pytest.approx([1 / 3] * 3)


def test_a_sample_leaves_the_model_alone(fitted):
    state, before = fitted.state, [p.clone() for p in fitted.kernel.parameters()]
    members = sample_of(state).members
    assert 5 < len(members) <= 32
    assert min(own.weight for own in members) >= 1e-3
    assert sum(own.weight for own in members) == pytest.approx(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, fitted.kernel.parameters(), strict=True))


def test_paths_are_those_of_the_mixture(fitted):
    field, x = fitted.posterior(), uniform(5, 2, seed=3)
    values = field.sample_paths(1500)(x)
    sd = field.variance(x).sqrt()
    assert ((values.mean(0) - field.mean(x)).abs() < 0.15 * sd).all()
    assert torch.allclose(values.var(0).sqrt(), sd, rtol=0.2)
    paths = field.sample_paths(40)
    apart = x.expand(40, 5, 2)
    assert torch.allclose(paths(apart), paths(x))


class Still(Paths):
    """Paths that are zero."""

    def __init__(self, *values):
        self.values = torch.tensor(values).double()

    def __call__(self, x):
        return self.values.unsqueeze(1).expand(-1, x.shape[-2], 2)

    def __len__(self):
        return len(self.values)


def test_joined_paths_are_those_of_their_members():
    values = [[1.0, 2.0], [1.0, 2.0], [3.0, -4.0]]
    paths = JoinedPaths([Still(*values[:2]), Still(values[2])])
    assert len(paths) == 3
    for x in (uniform(5, 2), uniform(3, 5, 2)):
        assert torch.equal(paths(x), Still(*values)(x))


def test_saved_and_updated_models_count_it_too(fitted, tmp_path):
    x = uniform(5, 2, seed=3)
    fitted.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert torch.allclose(again.posterior().variance(x), fitted.posterior().variance(x))
    again.update(uniform(2, 2, seed=9), draw(2, 2))
    assert again.state.snapshot(again.mean).sample.members


@pytest.mark.parametrize("name", ["many", "fixed", "no curve"])
def test_others_are_not_sampled(name):
    points = 110 if name == "many" else 15
    base = RBFKernel() if name == "no curve" else gp_orff.LearnedSpectrumKernel(4)
    if name == "fixed":
        base.shape.requires_grad_(False)
    kernel = gp_orff.CurlFreeKernel(base, num_dims=2)
    model = gp_orff.VectorFieldGP(kernel).condition(*problem(points))
    assert not leaves_spectra_open(model.state.inference, kernel)


# -- at most 120 vectors -------------------------------------------------------------------


def scalar_problem(seed, count=8):
    """Readings of a line, with an offset."""
    rng = np.random.default_rng(seed)
    x = np.sort(rng.random((count, 1)), 0) * 3
    prior = np.exp(-0.5 * ((x - x.T) / 0.5) ** 2) + 1e-9 * np.eye(count)
    y = np.linalg.cholesky(prior) @ rng.normal(size=(count, 1))
    return x, 5.0 + y + 0.2 * rng.normal(size=(count, 1))


def scalar_model(x, y, **how):
    kernel = gp_orff.SeparableKernel(RBFKernel(), torch.eye(1))
    model = gp_orff.VectorFieldGP(kernel, **how)
    with gp_orff.settings.check_calibration(False):
        return model.fit(x, y, progress=False)


def bulk(x):
    """The extent of evenly spread points with the same middle 90 %."""
    low, high = np.quantile(x, [0.05, 0.95])
    return min((high - low) / 0.9, np.ptp(x))


def scalar_posteriors(x, y, xs, priors, steps=25, factor=None):
    """Mixture of the posteriors on a grid of logarithms of lengthscale, variance and noise, with
    numpy alone: probabilities, means and variances at xs. `priors`: their medians and widths;
    `factor`: multiplies the density."""
    axes = [np.log(m) + w * np.linspace(-4, 4, steps) for m, w in priors]
    u = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
    length, variance, noise = np.exp(u).T[:, :, None, None]
    k = variance * np.exp(-0.5 * ((x - x.T) / length) ** 2)
    cross = variance * np.exp(-0.5 * ((x - xs.T) / length) ** 2)
    root = np.linalg.cholesky(k + (noise + 1e-12 * variance) * np.eye(len(x)))
    sides = np.broadcast_to(np.hstack([y, np.ones_like(y)]), (len(u), len(x), 2))
    solved = np.linalg.solve(root, np.concatenate([sides, cross], axis=-1))
    a, b, c = solved[..., :1], solved[..., 1:2], solved[..., 2:]
    information = (b * b).sum((1, 2))
    mean = (b * a).sum((1, 2)) / information
    rest, absorbed = a - b * mean[:, None, None], 1 - (c * b).sum(1)
    logs = -0.5 * (rest * rest).sum((1, 2)) - 0.5 * np.log(information)
    logs -= np.log(np.diagonal(root, axis1=1, axis2=2)).sum(-1)
    medians, widths = np.array(priors).T
    logs -= 0.5 * np.square((u - np.log(medians)) / widths).sum(-1)
    logs += 0.0 if factor is None else factor(*u.T)
    means = (c * rest).sum(1) + mean[:, None]
    variances = variance[..., 0] - (c * c).sum(1) + absorbed**2 / information[:, None]
    weights = np.exp(logs - logs.max())
    return weights / weights.sum(), means, variances


def scalar_priors(x, y):
    s = y.std()
    return [(0.4 * bulk(x), 0.8), (s**2, 1.6), (0.01 * s**2, 2.4)]


XS = np.linspace(-0.5, 3.5, 9)[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_hyperparameters_are_integrated_out(seed):
    """Against quadrature. Draws err by their number: the effective one is 100 at least, which makes
    10 % of a standard deviation in means, and 7 % in standard deviations, at one standard error."""
    x, y = scalar_problem(seed)
    weights, means, variances = scalar_posteriors(x, y, XS, scalar_priors(x, y))
    mean = weights @ means
    sd = np.sqrt(weights @ (variances + (means - mean) ** 2))
    model = scalar_model(x, y)
    field, plain = model.posterior(), model.posterior(marginalize=False)
    assert model.report.effective_draws >= 100
    assert np.abs((field.mean(XS)[:, 0].numpy() - mean) / sd).max() < 0.2
    found = field.variance(XS)[:, 0].sqrt().numpy()
    assert np.abs(np.log(found / sd)).max() < 0.2
    assert (found > plain.variance(XS)[:, 0].sqrt().numpy()).mean() > 0.6
    for share in (0.025, 0.3, 0.975):  # of the mixture on the grid, by its distribution function
        quantile = field.quantile(XS, share)[:, 0].numpy()
        below = weights @ scipy.stats.norm.cdf((quantile - means) / np.sqrt(variances))
        assert np.abs(below - share).max() < 4 * np.sqrt(share * (1 - share) / 100)


def test_the_learned_values_maximise_the_posterior_density():
    """Of the logarithms, with the mean integrated out, by quadrature's density around them."""
    x, y = scalar_problem(1)
    model = scalar_model(x, y)
    u = np.log(
        [
            model.kernel.base_kernel.base_kernel.lengthscale.item(),
            model.kernel.outputscale.item(),
            model.likelihood.noise.item(),
        ]
    )

    def density(u):
        length, variance, noise = np.exp(u)
        k = variance * np.exp(-0.5 * ((x - x.T) / length) ** 2) + noise * np.eye(len(x))
        h = np.ones_like(y)
        inverse = np.linalg.inv(k)
        p = inverse - inverse @ h @ h.T @ inverse / (h.T @ inverse @ h)
        log = -0.5 * (np.linalg.slogdet(k)[1] + np.log(h.T @ inverse @ h) + y.T @ p @ y).item()
        medians, widths = np.array(scalar_priors(x, y)).T
        return log - 0.5 * np.square((u - np.log(medians)) / widths).sum()

    best = scipy.optimize.minimize(lambda v: -density(v), u, method="Nelder-Mead").x
    assert density(best) - density(u) < 0.02
    evidence = model.log_marginal_likelihood().item()  # the plain one
    length, variance, noise = np.exp(u)
    k = variance * np.exp(-0.5 * ((x - x.T) / length) ** 2) + noise * np.eye(len(x))
    inverse = np.linalg.inv(k)
    mean = inverse.sum(0) @ y / inverse.sum()
    rest = y - mean
    plain = -0.5 * ((rest.T @ inverse @ rest).item() + np.linalg.slogdet(2 * np.pi * k)[1])
    assert evidence == pytest.approx(plain, abs=1e-6)


@pytest.mark.slow
def test_priors_of_the_user_replace_weak_ones():
    """A gamma prior of the lengthscale, and a normal one of the noise, by quadrature of their
    densities of values, which are those of logarithms times the values."""
    x, y = scalar_problem(2)
    gamma, normal = GammaPrior(40.0, 40.0 / 1.5), NormalPrior(0.3, 0.03)
    kernel = gp_orff.SeparableKernel(RBFKernel(lengthscale_prior=gamma), torch.eye(1))
    noise = GaussianLikelihood(noise_prior=normal, noise_constraint=GreaterThan(0.0))
    model = gp_orff.VectorFieldGP(kernel, likelihood=noise)
    with gp_orff.settings.check_calibration(False):
        model.fit(x, y, progress=False)

    def factor(length, variance, noise):
        logs = scipy.stats.gamma.logpdf(np.exp(length), 40.0, scale=1.5 / 40.0) + length
        return logs + scipy.stats.norm.logpdf(np.exp(noise), 0.3, 0.03) + noise

    flat = [(1.5, 0.3), scalar_priors(x, y)[1], (0.3, 0.1)]

    def whole(*u):  # without the priors of the grid
        scores = [(v - np.log(m)) / w for v, (m, w) in zip(u, flat, strict=True)]
        return factor(*u) + 0.5 * (scores[0] ** 2 + scores[2] ** 2)

    weights, means, variances = scalar_posteriors(x, y, XS, flat, factor=whole)
    mean = weights @ means
    sd = np.sqrt(weights @ (variances + (means - mean) ** 2))
    field = model.posterior()
    assert np.abs((field.mean(XS)[:, 0].numpy() - mean) / sd).max() < 0.2
    assert np.abs(np.log(field.variance(XS)[:, 0].sqrt().numpy() / sd)).max() < 0.2


def test_frozen_hyperparameters_stay():
    x, y = scalar_problem(0)
    kernel = ScaleKernel(gp_orff.SeparableKernel(RBFKernel(), torch.eye(1)))
    kernel.base_kernel.base_kernel.lengthscale = 0.7
    kernel.base_kernel.base_kernel.raw_lengthscale.requires_grad_(False)
    model = gp_orff.VectorFieldGP(kernel)
    with gp_orff.settings.check_calibration(False):
        model.fit(x, y, progress=False)
    members = model.state.snapshot(model.mean).sample.members
    for own in members:
        assert own.kernel.base_kernel.base_kernel.lengthscale.item() == pytest.approx(0.7)
    assert len({own.kernel.outputscale.item() for own in members}) > 30
    for part in (model.kernel, model.likelihood):
        part.requires_grad_(False)
    plain = model.posterior(marginalize=False)
    assert torch.equal(model.posterior(marginalize=True).variance(XS), plain.variance(XS))
    assert not model.state.snapshot(model.mean).sample.members


@pytest.mark.slow
def test_conditioned_and_large_models_do_not_integrate():
    x, y = scalar_problem(0)
    model = scalar_model(x, y)
    assert model.report.weak_priors
    twin = gp_orff.VectorFieldGP(model.kernel, likelihood=model.likelihood).condition(x, y)
    assert twin.report.effective_draws is None
    plain = model.posterior(marginalize=False)
    assert torch.allclose(twin.posterior().variance(XS), plain.variance(XS))
    assert scalar_model(*scalar_problem(0, 120)).report.weak_priors
    many = scalar_model(*scalar_problem(0, 121)).report
    assert not many.weak_priors
    assert many.effective_draws is None
    assert "effective draws, Pareto k" in str(model.report)
    assert "integrated" not in str(many)


@pytest.mark.slow
def test_the_constant_mean_is_kept(tmp_path):
    """Of data with one and without; zero in the place of a constant is no choice any more."""
    x, y = scalar_problem(0)
    for offset in (0.0, 290.0):
        model = scalar_model(x, y - 5.0 + offset)
        mean = model.posterior(marginalize=False)
        far = mean.mean(np.array([[1e6]])).item()
        assert far == pytest.approx(model.report.hyperparameters["mean"].value, abs=1e-6)
        assert abs(far - offset) < 2
    model.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert torch.equal(again.posterior().mean(XS), model.posterior().mean(XS))
    assert torch.equal(again.posterior().variance(XS), model.posterior().variance(XS))


def test_a_mean_that_is_set_is_kept_after_loading(tmp_path):
    """By `condition`, as by a model that was given it."""
    x, y = scalar_problem(0)
    model = scalar_model(x, y)
    model.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    again.mean = ConstantMean().double()
    again.mean.initialize(constant=3.0).requires_grad_(False)
    again.condition(x, y)
    assert again.mean(torch.from_numpy(XS)).eq(3.0).all()
    known = gp_orff.VectorFieldGP(again.kernel, likelihood=again.likelihood, mean=again.mean)
    expected = known.condition(x, y).posterior().mean(XS)
    torch.testing.assert_close(again.posterior().mean(XS), expected)


@pytest.mark.slow
def test_updates_integrate_over_the_new_data_too():
    """As a model that holds all of them, from where the hyperparameters are: within the error of
    the draws."""
    x, y = scalar_problem(0, 12)
    model = scalar_model(x[:8], y[:8])
    model.update(x[8:], y[8:])
    weights, means, variances = scalar_posteriors(x, y, XS, scalar_priors(x, y))
    mean = weights @ means
    sd = np.sqrt(weights @ (variances + (means - mean) ** 2))
    field = model.posterior()
    assert np.abs((field.mean(XS)[:, 0].numpy() - mean) / sd).max() < 0.2
    assert np.abs(np.log(field.variance(XS)[:, 0].sqrt().numpy() / sd)).max() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("points", [10, 20])
def test_matrices_of_outputs_keep_draws_about_the_fit(points):
    """They have no weak prior: the fit is as before, and integration takes 32 draws if asked."""
    x, y = problem(points)
    kernel = MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
    model = gp_orff.VectorFieldGP(kernel)
    with pytest.warns(gp_orff.DataWarning, match="poorly"):
        model.fit(x, y, progress=False)
    assert not model.report.weak_priors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gp_orff.DataWarning)
        field = model.posterior(marginalize=True)
        draws = model.state.snapshot(model.mean, marginalize=True).sample.draws
    assert len(draws.u) <= 32
    assert (field.variance(x) > model.posterior().variance(x)).double().mean() > 0.8


def test_many_readings_are_refused(monkeypatch, fitted):
    monkeypatch.setattr(few_readings, "_LARGEST", 20)
    with pytest.raises(ValueError, match=r"expected at most 20 values .* got 40; .*gp_orff\.thin"):
        sample_of(fitted.state)
    x, y = problem()
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
    grid = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))
    with pytest.raises(ValueError, match=r"under the exact kernel.* got 40"):
        grid.condition(x, y).posterior(marginalize=True)


# -- the parts of the sampler -----------------------------------------------------------------


def test_restricted_evidence_is_the_integral_over_the_mean():
    """∫ N(y; Hc, K) dc, by dense algebra; a mean of which nothing is known is left out."""
    rng = np.random.default_rng(0)
    y, root = rng.normal(size=(7, 1)), rng.normal(size=(7, 7))
    k = root @ root.T + np.eye(7)
    h = np.stack([np.ones(7), 1e-4 * rng.normal(size=7), np.zeros(7)], 1)
    v = np.hstack([y, h])
    quad = torch.from_numpy(v.T @ np.linalg.solve(k, v))
    logdet = torch.tensor(np.linalg.slogdet(k)[1])
    inverse = np.linalg.inv(k)
    h = h[:, :2]
    information = h.T @ inverse @ h
    p = inverse - inverse @ h @ np.linalg.solve(information, h.T @ inverse)
    dets = np.linalg.slogdet(k)[1] + np.linalg.slogdet(information)[1]
    expected = -0.5 * ((y.T @ p @ y).item() + dets + 5 * np.log(2 * np.pi))
    seen = torch.from_numpy(v[:, 1:].T @ v[:, 1:])
    found = Evidence(quad, logdet, seen).restricted_log_density(7)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_draws_have_the_moments_of_a_target():
    """Of a skew posterior in two dimensions, log-gamma and its shifted twin, in closed form: the
    error is a few times 1/√ESS of a standard deviation."""

    def log_posterior(u):
        a, b = u[:, 0], u[:, 1] - 0.5 * u[:, 0]
        return 3 * a - np.exp(a) + 0.7 * b - np.exp(b)

    prior = scipy.stats.norm(0, 4)
    draws = adaptive_draws(
        log_posterior,
        lambda n, rng: 4 * rng.standard_normal((n, 2)),
        lambda u: prior.logpdf(u).sum(-1),
        np.zeros(2),
        np.eye(2),
        400.0,
        np.random.default_rng(1),
    )
    assert draws.effective >= 400
    assert draws.pareto_k < 0.5
    means = np.array([scipy.special.digamma(3), scipy.special.digamma(0.7)])
    sds = np.sqrt([scipy.special.polygamma(1, 3), scipy.special.polygamma(1, 0.7)])
    values = np.stack([draws.u[:, 0], draws.u[:, 1] - 0.5 * draws.u[:, 0]])
    found = values @ draws.weights
    assert np.abs((found - means) / sds).max() < 4 / 20
    spread = np.sqrt(np.square(values - found[:, None]) @ draws.weights)
    assert np.abs(np.log(spread / sds)).max() < 4 / 20
    kept = draws.resampled(300, np.random.default_rng(0))
    assert kept.weights.sum() == pytest.approx(1)
    assert len(kept.u) <= 300
    again = np.stack([kept.u[:, 0], kept.u[:, 1] - 0.5 * kept.u[:, 0]]) @ kept.weights
    assert np.abs((again - found) / sds).max() < 0.1


@pytest.mark.parametrize("shape", [0.1, 0.5, 0.9])
def test_tails_have_the_shape_of_a_pareto_distribution(shape):
    """Of 4000 draws: a standard error of (1 + k)/√M of the fit."""
    x = np.sort(scipy.stats.genpareto.rvs(shape, scale=3.0, size=4000, random_state=0))
    k, scale = pareto(x)
    assert abs(k - shape) < 4 * (1 + shape) / np.sqrt(4000)
    assert scale == pytest.approx(3.0, rel=0.15)


def test_smoothing_changes_the_tail_only():
    logs = np.random.default_rng(0).normal(scale=2.0, size=400)
    smoothed, k = smoothed_logs(logs)
    order = np.argsort(logs)
    size = int(min(80, 3 * 20))
    assert np.array_equal(smoothed[order[:-size]], logs[order[:-size]] - logs.max())
    assert (np.diff(smoothed[order]) >= 0).all()
    assert smoothed.max() <= 0
    assert 0 < k < 1
    assert smoothed_logs(np.zeros(400))[1] == -np.inf


def test_quantiles_of_mixtures():
    """Against the distribution function of scipy; of one normal distribution, its own."""
    weights = torch.tensor([0.2, 0.5, 0.3]).double()
    means, sds = draw(3, 4).reshape(3, 2, 2), draw(3, 4, seed=1).abs().reshape(3, 2, 2) + 0.1
    for share in (0.01, 0.5, 0.9):
        found = mixture_quantile(weights, means, sds, share).numpy()
        cdf = scipy.stats.norm.cdf((found - means.numpy()) / sds.numpy())
        assert np.allclose(np.tensordot(weights.numpy(), cdf, 1), share, atol=1e-12)
    one = mixture_quantile(torch.ones(1).double(), means[:1], sds[:1], 0.9)
    assert np.allclose(one, scipy.stats.norm.ppf(0.9, means[0], sds[0]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lengthscale is less:gp_orff.DataWarning")
def test_densities_and_intervals_of_a_posterior():
    """The density of the mixture of its members' joint distributions at each point."""
    x, y = problem(8)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
    with gp_orff.settings.check_calibration(False):
        field = model.fit(x, y, progress=False).posterior()
    xs, values = uniform(3, 2, seed=4), 9 + draw(3, 2, seed=5)
    members = [
        (own.weight, own.distribution.mean(xs), own.distribution.blocks(xs))
        for own in model.state.snapshot(model.mean).sample.members
    ]
    for n in range(3):
        density = sum(
            weight * scipy.stats.multivariate_normal.pdf(values[n], mean[n], blocks[n])
            for weight, mean, blocks in members
        )
        assert field.log_density(xs, values)[n].item() == pytest.approx(np.log(density), abs=1e-8)
    low, high = field.confidence_region(xs, 0.8)
    assert torch.allclose(low, field.quantile(xs, 0.1), rtol=1e-12)  # (1 − 0.8)/2 is rounded
    assert torch.allclose(high, field.quantile(xs, 0.9), rtol=1e-12)
    with pytest.raises(ValueError, match="between 0 and 1"):
        field.quantile(xs, 1.0)
    with pytest.raises(ValueError, match=r"shape \(3, 2\), .* got \(3,\)"):
        field.log_density(xs, values[:, 0])
    plain = model.posterior(marginalize=False)
    z = scipy.stats.norm.ppf(0.9)
    expected = plain.mean(xs) + z * plain.variance(xs).sqrt()
    assert torch.allclose(plain.quantile(xs, 0.9), expected)


# -- what no scheme covers ---------------------------------------------------------------------


def test_lengthscales_below_the_spacing_are_told_of():
    """Of a checkerboard with little noise, whose neighbours have nothing in common."""
    axis = torch.arange(5).double()
    x = torch.cartesian_prod(axis, axis)
    model = gp_orff.VectorFieldGP(gp_orff.SeparableKernel(RBFKernel(), torch.eye(2)))
    model.likelihood.noise = 1e-4
    model.likelihood.requires_grad_(False)
    told = r"lengthscale is less than 1, the median distance of neighbours, with a probability of"
    model.fit(x, draw(25, 2), progress=False)
    with pytest.warns(gp_orff.DataWarning, match=told):
        model.posterior()


@pytest.mark.slow
def test_potentials_of_long_waves_are_told_of():
    """Of a field that changes linearly over the data; other symbols are told without a warning."""
    x = uniform(20, 2)
    y = torch.stack([x[:, 0], -x[:, 1]], -1) + 0.001 * draw(20, 2)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
    with gp_orff.settings.check_calibration(False):
        field = model.fit(x, y, progress=False).posterior()
    field.divergence(x[:2])
    told = "a lengthscale exceeds the extent of the data with a probability of .*Potential"
    with pytest.warns(gp_orff.DataWarning, match=told):
        field.potential(x[:2], reference=x[0])
    model.posterior(marginalize=False).potential(x[:2], reference=x[0])


@pytest.mark.slow
def test_a_state_dict_tells_that_hyperparameters_were_learned_from_few_data():
    """Conditioned on the same data, it gives the posterior of the fit; at hyperparameters that are
    set by hand, these are taken as known."""
    x, y = problem(12)

    def new() -> gp_orff.VectorFieldGP:
        return gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))

    with gp_orff.settings.check_calibration(False):
        model = new().fit(x, y, progress=False)
    field, other, xs = model.posterior(), new(), uniform(5, 2, seed=3)
    plain = model.posterior(marginalize=False)
    assert not torch.allclose(field.variance(xs), plain.variance(xs), rtol=1e-3)
    state = model.state_dict()
    other.load_state_dict(state)
    other.condition(x, y)
    torch.testing.assert_close(other.posterior().variance(xs), field.variance(xs))
    torch.testing.assert_close(model.condition(x, y).posterior().mean(xs), field.mean(xs))
    older = new()
    with pytest.warns(UserWarning, match="older than this version"):
        older.load_state_dict({key: value for key, value in state.items() if key != "_extra_state"})
    torch.testing.assert_close(older.condition(x, y).posterior().variance(xs), plain.variance(xs))
    model.likelihood.noise = 2 * model.likelihood.noise.detach()
    by_hand = model.condition(x, y)
    known = by_hand.posterior(marginalize=False).variance(xs)
    torch.testing.assert_close(by_hand.posterior().variance(xs), known)


@pytest.mark.slow
def test_updates_beyond_few_data_warn():
    """Hyperparameters that few readings leave open are then taken as known."""
    x, y = problem(119)
    with gp_orff.settings.check_calibration(False):
        model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).fit(x, y, progress=False)
    model.update(x[:1] + 0.01, y[:1])
    assert model.report.effective_draws > 0
    with pytest.warns(gp_orff.DataWarning, match="240 values or fewer are treated as known"):
        model.update(x[1:2] + 0.01, y[1:2])
    assert model.report.effective_draws is None


def test_a_symbol_in_the_place_of_a_level_is_refused():
    x, y = problem(8)
    field = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).condition(x, y).posterior()
    with pytest.raises(TypeError, match=r"expected a level.*symbol="):
        field.confidence_region(x, gp_orff.Divergence())


# -- weights of Student-t noise ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_errors_are_drawn_from_their_posterior(known):
    """Rasmussen & Williams 2006, eq. 2.42: with P = S⁻¹, or less what an unknown mean takes, the
    errors have the mean NPy and the covariance N − NPN; five standard errors of 5000 draws."""
    root, noise = torch.randn(6, 6).double().tril(), torch.diag(torch.rand(6).double() + 0.1)
    y, constants = torch.randn(6).double(), torch.eye(2).double().repeat(3, 1)
    generator, mean = np.random.default_rng(0), torch.zeros(2).double() if known else None
    prior, draws = root @ root.mT, []
    for _ in range(5_000):
        normal = torch.from_numpy(generator.standard_normal((2, 6)))
        priors = prior, noise, root @ normal[0], noise.sqrt() @ normal[1]
        draws.append(drawn_errors(y, *priors, constants, mean))
    draws = torch.stack(draws)
    inverse = torch.linalg.inv(root @ root.mT + noise)
    if not known:
        taken = inverse @ constants
        inverse = inverse - taken @ torch.linalg.solve(constants.mT @ taken, taken.mT)
    covariance = noise - noise @ inverse @ noise
    error = covariance.diagonal().sqrt() / math.sqrt(5_000)
    assert ((draws.mean(0) - noise @ inverse @ y).abs() < 5 * error).all()
    spread = error[:, None] * covariance.diagonal().sqrt()
    assert ((draws.mT.cov() - covariance).abs() < 10 * spread).all()


@pytest.mark.slow
def test_weights_are_drawn_from_their_posterior():
    """Against importance sampling from the prior of the field, with the density of Student's t;
    4.5 standard errors of 200 draws."""
    torch.manual_seed(0)
    x, y = torch.rand(4, 2).double(), torch.randn(4, 2).double()
    y[0] += 4.0
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2, deg_free=3.0)
    kernel = gp_orff.CurlFreeKernel(num_dims=2).double()
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood.double(), mean=ZeroMean())
    likelihood.noise = 0.3
    model.condition(x, y)
    state, mean, generator = model.state, torch.zeros(2).double(), np.random.default_rng(0)
    parts = state.inference, state.kernel, state.likelihoods, mean, generator
    noises = noises_of(state.kernel, state.likelihoods)
    means = []
    for _ in range(200):
        drawn = with_drawn_weights(*parts)
        posterior = drawn.posterior(kernel, noises, mean)
        means.append(posterior.distribution.mean(x))
    found, error = torch.stack(means).mean(0), torch.stack(means).std(0) / math.sqrt(200)
    root = torch.linalg.cholesky(kernel(x, x).to_dense() + 1e-9 * torch.eye(8).double()).detach()
    fields = (root @ torch.randn(8, 400_000).double()).mT.unflatten(-1, (4, 2))
    distance = (fields - y).square().sum(-1) / 0.3
    weights = (-0.5 * (3 + 2) * (distance / 3).log1p()).sum(-1).softmax(0)
    expected = torch.einsum("s,snp->np", weights, fields)
    assert ((found - expected).abs() < 4.5 * error).all()
    assert ((model.posterior().mean(x) - expected).abs() > 4.5 * error).any()


def test_drawn_weights_do_not_depend_on_an_unknown_mean():
    """A constant added to all observations changes no weight, to rounding."""
    x, y = problem(6)
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2).double()
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2), likelihood=likelihood)
    drawn = []
    for shift in (0.0, torch.tensor([40.0, -70.0]).double()):
        state = model.condition(x, y + shift, merge=0).state
        parts = state.kernel, state.likelihoods, None, np.random.default_rng(0)
        inference = with_drawn_weights(state.inference, *parts)
        drawn.append(torch.cat(list(inference.data.all_weights())))
    assert drawn[0].std() > 0.1
    torch.testing.assert_close(drawn[0], drawn[1], rtol=1e-8, atol=0)


@pytest.mark.slow
def test_weights_of_chunks_are_those_of_arrays():
    """Of two groups, whose observations come in another order than that of the covariance."""
    x, y = problem(24)
    y[::6] += 2.0
    names = np.array(["a", "b", "a", "a"] * 6)
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
    posteriors = []
    for parts in ([slice(0, 24)], [slice(0, 7), slice(7, 11), slice(11, 24)]):
        chunks = [{"x": x[rows], "y": y[rows], "group": names[rows]} for rows in parts]
        model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2), likelihood=likelihood)
        posteriors.append(model.condition(chunks).posterior(marginalize=True))
    xs = uniform(5, 2, seed=3)
    one, other = (posterior.variance(xs) for posterior in posteriors)
    torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
    one, other = (posterior.mean(xs) for posterior in posteriors)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_an_output_that_is_not_observed_is_integrated_under_heavy_tails_too():
    x, y = problem(20)
    y[3] += 2.0
    y[:, 1] = math.nan
    likelihood = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2), likelihood=likelihood)
    with pytest.warns(gp_orff.DataWarning, match="no observation depends on the constant mean"):
        model.condition(x, y, missing="mask")
    xs = uniform(4, 2, seed=8)
    integrated, known = (model.posterior(marginalize=m).variance(xs) for m in (True, False))
    assert (integrated - known).abs().min() > 1e-3 * known.min()


@pytest.mark.parametrize("frozen", [True, False])
def test_priors_of_all_hyperparameters_leave_no_weak_ones(frozen):
    x, y = problem(12)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
    leaf = model.kernel.base_kernel.base_kernel
    leaf.register_prior("length_prior", UniformPrior(0.1, 4.0), "lengthscale")
    model.kernel.register_prior("size_prior", LogNormalPrior(0.0, 1.0), "outputscale")
    model.likelihood.noise = 0.01
    if frozen:
        model.likelihood.requires_grad_(False)
    else:
        model.likelihood.register_prior("noise_prior", LogNormalPrior(-4.0, 1.0), "noise")
    model.fit(x, y, progress=False)
    assert model.report.effective_draws >= 100
    lengths = [
        m.kernel.base_kernel.base_kernel.lengthscale.item() for m in sample_of(model.state).members
    ]
    assert 0.1 < min(lengths) < max(lengths) < 4.0


def test_moments_can_be_changed_in_place(fitted):
    field, xs = fitted.posterior(), uniform(4, 2, seed=8)
    variance = field.variance(xs)
    before = variance.clone()
    variance *= 0
    assert field.variance(xs).equal(before)


@pytest.mark.slow
def test_models_are_copied_after_a_posterior():
    """What a posterior keeps to compute its members later is plain, too."""
    x = uniform(30, 2)
    y = torch.stack([x[:, 0], -x[:, 1]], -1) + 0.1 * draw(30, 2)
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).fit(x, y, progress=False)
    posterior = model.posterior()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    torch.testing.assert_close(twin.posterior().mean(x), posterior.mean(x))
