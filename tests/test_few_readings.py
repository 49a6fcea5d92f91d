"""Posteriors of few readings: mixtures over what these leave open of the hyperparameters."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.means import MultitaskMean, ZeroMean

import gp_orff
from gp_orff.models.few_readings import (
    Member,
    Mixture,
    leaves_spectra_open,
    sample,
    sample_of_hyperparameters,
)
from gp_orff.models.few_readings.sample import truncated_weights
from gp_orff.models.sample_paths import JoinedPaths, Paths
from tests.fields import draw, uniform


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
        Member(weight, own.kernel, own.field().distribution, own.constant)
        for weight, own in zip((0.3, 0.7), snapshots, strict=True)
    ]
    constant = torch.tensor([1.0, -2.0]).double()
    whole = Mixture(members, constant, snapshots[0].kernel)
    return whole, [model.posterior() for model in models], constant


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
    whole, fields, constant = mixture
    x = uniform(4, 2, seed=2)
    distribution = whole if symbol is None else whole.apply(symbol, (0, 1))
    q = distribution.num_outputs
    shift = constant if symbol is None else torch.zeros(1).double()
    mean, covariance = moments(fields, x, symbol)
    assert np.allclose((distribution.mean(x) + shift).flatten(), mean, atol=1e-9)
    close = {"atol": 1e-5 * np.abs(covariance).max()}
    assert np.allclose(distribution.covariance(x), covariance, **close)
    assert np.allclose(distribution.variance(x).flatten(), covariance.diagonal(), **close)
    root = distribution.root(x)
    assert np.allclose(root @ root.mT, covariance, **close)
    for number, block in enumerate(distribution.blocks(x)):
        span = slice(q * number, q * number + q)
        assert np.allclose(block, covariance[span, span], **close)


def test_parts_are_those_of_the_members(mixture):
    whole, fields, _ = mixture
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
    members = sample_of_hyperparameters(
        state.inference, state.kernel, state.likelihoods, state.mean
    )
    means = torch.stack([own.distribution.mean(x) + own.mean for own in members])
    weights = torch.tensor([own.weight for own in members]).double()[:, None, None]
    assert torch.allclose(field.mean(x), (weights * means).sum(0))
    assert means.std(0).mean() > 0.01
    twin = gp_orff.VectorFieldGP(fitted.kernel).condition(*problem())
    assert not twin.state.snapshot(twin.mean).members


def test_weights_are_truncated():
    """At the mean weight times √S: of 1, 1, 1, 13 at 4 · 2 (Ionides 2008)."""
    weights = truncated_weights(np.log([1.0, 1.0, 1.0, 13.0]) - 500)
    assert weights == pytest.approx(np.array([1, 1, 1, 8]) / 11)
    assert truncated_weights(np.zeros(3)) == pytest.approx([1 / 3] * 3)


def test_a_sample_leaves_the_model_alone(fitted):
    state, before = fitted.state, [p.clone() for p in fitted.kernel.parameters()]
    members = sample_of_hyperparameters(
        state.inference, state.kernel, state.likelihoods, state.mean
    )
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

    def __init__(self, count):
        self.count = count

    def __call__(self, x):
        return torch.zeros(self.count, x.shape[-2], 2).double()

    def __len__(self):
        return self.count


def test_joined_paths_have_the_means_of_their_members():
    shifts = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, -4.0]]).double()
    paths = JoinedPaths([Still(2), Still(1)], shifts)
    assert len(paths) == 3
    for x in (uniform(5, 2), uniform(3, 5, 2)):
        assert torch.equal(paths(x), shifts.unsqueeze(1).expand(3, 5, 2))


def test_saved_and_updated_models_count_it_too(fitted, tmp_path):
    x = uniform(5, 2, seed=3)
    fitted.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert torch.allclose(again.posterior().variance(x), fitted.posterior().variance(x))
    again.update(uniform(2, 2, seed=9), draw(2, 2))
    assert again.state.snapshot(again.mean).members


@pytest.mark.parametrize("name", ["many", "fixed", "no curve"])
def test_others_are_not_sampled(name):
    points = 110 if name == "many" else 15
    base = RBFKernel() if name == "no curve" else gp_orff.LearnedSpectrumKernel(4)
    if name == "fixed":
        base.shape.requires_grad_(False)
    kernel = gp_orff.CurlFreeKernel(base, num_dims=2)
    model = gp_orff.VectorFieldGP(kernel).condition(*problem(points))
    assert not leaves_spectra_open(model.state.inference, kernel)


# -- posterior(marginalize=) ------------------------------------------------------------------


def with_open_lengthscale(points=12):
    """A model that has learned a lengthscale and nothing else, with its data."""
    x, y = problem(points)
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, mean=MultitaskMean(ZeroMean(), 2))
    model.likelihood.noise = 0.04
    model.likelihood.requires_grad_(False)
    model.kernel.outputscale = 0.1
    model.kernel.raw_outputscale.requires_grad_(False)
    with gp_orff.settings.check_calibration(False):
        return model.fit(x, y - 9, progress=False), x, y - 9


def by_quadrature(x, y, xs):
    """Moments of a curl-free field given y, integrated over log ℓ with numpy alone."""

    def covariance(a, b, length):
        lag = a[:, None, :] - b[None, :, :]
        decay = np.exp(-0.5 * (lag**2).sum(-1) / length**2)[..., None, None]
        outer = lag[..., :, None] * lag[..., None, :]
        blocks = 0.1 * decay * (np.eye(2) / length**2 - outer / length**4)
        return blocks.transpose(0, 2, 1, 3).reshape(2 * len(a), 2 * len(b))

    logs, means, variances = [], [], []
    for length in np.exp(np.linspace(np.log(0.03), np.log(6.0), 300)):
        noisy = covariance(x, x, length) + 0.04 * np.eye(y.size)
        solved = np.linalg.solve(noisy, np.column_stack([y.ravel(), covariance(x, xs, length)]))
        logs.append(-0.5 * y.ravel() @ solved[:, 0] - 0.5 * np.linalg.slogdet(noisy)[1])
        means.append(covariance(xs, x, length) @ solved[:, 0])
        reduction = covariance(xs, x, length) @ solved[:, 1:]
        variances.append((covariance(xs, xs, length) - reduction).diagonal())
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = weights @ means
    return mean, weights @ (np.array(variances) + (np.array(means) - mean) ** 2)


@pytest.mark.parametrize(("size", "least", "error"), [(32, 1e-3, 0.2), (200, 0.0, 0.07)])
def test_hyperparameters_are_integrated_out(size, least, error, monkeypatch):
    """Draws err by their number: 1/√S, of the sd for the mean, and of the variance."""
    monkeypatch.setattr(sample, "_SIZE", size)
    monkeypatch.setattr(sample, "_LEAST", least)
    model, x, y = with_open_lengthscale()
    xs = uniform(30, 2, seed=5)
    mean, variance = by_quadrature(x.numpy(), y.numpy(), xs.numpy())
    field, plain = model.posterior(marginalize=True), model.posterior()
    assert np.abs(field.mean(xs).flatten().numpy() - mean).max() < error * variance.max() ** 0.5
    ratio = field.variance(xs).flatten() / torch.from_numpy(variance)
    assert ratio.log().abs().max() < error
    assert (plain.variance(xs).flatten() / torch.from_numpy(variance)).mean() < ratio.mean() - 0.1
    again = model.posterior(marginalize=False)
    assert torch.equal(again.variance(xs), plain.variance(xs))


def test_spectra_are_taken_as_they_are_if_asked(fitted):
    x = uniform(5, 2, seed=3)
    known = gp_orff.VectorFieldGP(fitted.kernel, likelihood=fitted.likelihood)
    known.condition(*problem())
    plain = fitted.posterior(marginalize=False)
    assert torch.allclose(plain.variance(x), known.posterior().variance(x))


def test_nothing_open_is_nothing_integrated():
    model, _, _ = with_open_lengthscale()
    x = uniform(5, 2, seed=3)
    assert not torch.equal(model.posterior(True).variance(x), model.posterior().variance(x))
    model.kernel.requires_grad_(False)
    field = model.posterior(marginalize=True)
    assert torch.equal(field.variance(x), model.posterior().variance(x))


def test_few_draws_that_count_are_told_of(monkeypatch):
    model, _, _ = with_open_lengthscale()
    monkeypatch.setattr(sample, "_SIZE", 3)
    with pytest.warns(gp_orff.DataWarning, match="3 draws of hyperparameters tell as much as"):
        model.posterior(marginalize=True)


def test_many_readings_are_refused(monkeypatch):
    model, _, _ = with_open_lengthscale()
    monkeypatch.setattr(sample, "_LARGEST", 20)
    with pytest.raises(ValueError, match=r"expected at most 20 numbers .* got 24; .*gp_orff\.thin"):
        model.posterior(marginalize=True)
    x, y = problem()
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
    grid = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))
    with pytest.raises(ValueError, match=r"under the exact kernel.* got 40"):
        grid.condition(x, y).posterior(marginalize=True)
