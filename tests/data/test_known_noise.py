"""Known noise of observations, compared with dense covariances K + s · blockdiag(R)."""

import copy
import math

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from linear_operator import to_dense

import gp_orff
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import expand
from gp_orff.fitting.starting_values import scale_noise, start_noise
from tests.support.fields import curl_free, directions, draw, uniform

P, COUNT = 2, 24
EXACT = gp_orff.Auto()
RULES = {
    "exact": EXACT,
    "grid": gp_orff.Grid(spacing=1.0, cutoff=4.0, diagonal_correction=False),
    "random": gp_orff.MonteCarlo(30, seed=0),
}
SHAPES = {  # of noise=, from covariances
    "readings": lambda r: r[:, 0, 0],
    "components": lambda r: r.diagonal(dim1=-1, dim2=-2),
    "covariances": lambda r: r,
}
XS = uniform(5, 2, seed=9)

pytestmark = pytest.mark.usefixtures("no_check_of_random_features")


def covariances(count=COUNT, seed=4):
    """(n, 2, 2), over two decades."""
    root = draw(count, P, P, seed=seed)
    size = 10 ** (2 * torch.linspace(0, 1, count).double() - 3)
    return size[:, None, None] * (root @ root.mT + 0.1 * torch.eye(P).double())


def blocks_of(noise):
    """(n, 2, 2) from any of the shapes."""
    if noise.dim() == 1:
        return noise[:, None, None] * torch.eye(P).double()
    return noise if noise.dim() == 3 else torch.diag_embed(noise)


def data(count=COUNT):
    x = uniform(count, 2, seed=1)
    return x, torch.sin(2 * x).flip(-1) + 0.3 * draw(count, P, seed=2)


def model_with(rule, scale=1.0):
    likelihood = gp_orff.KnownNoiseLikelihood(P)
    likelihood.noise_scale = scale
    return gp_orff.VectorFieldGP(curl_free(0.6), likelihood=likelihood, frequencies=rule)


def zero_mean():
    return gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), P)


def prior_of(model, points):
    inference = model.state.inference
    if not hasattr(inference, "draws"):
        return to_dense(model.kernel(points)).detach()
    phi = expand(model.kernel, inference.draws, 2).double().features(points).detach()
    return phi @ phi.mT


class Dense:
    """y = H f + H 1 μ + ε, ε ~ N(0, R), with rows H of numbers and the best constant μ."""

    def __init__(self, model, x, h, y, noise):
        prior = prior_of(model, torch.cat([x, XS]))
        n = P * len(x)
        self.k, self.cross = h @ prior[:n, :n] @ h.mT + noise, prior[n:, :n] @ h.mT
        self.prior, self.y = prior[n:, n:], y
        self.ones = h @ torch.eye(P).double().repeat(len(x), 1)

    def assert_describes(self, model):
        """Evidence, mean and variance, to 1e-8: rounding times the condition of K."""
        inverse = torch.linalg.inv(self.k)
        of_mean = torch.linalg.inv(self.ones.mT @ inverse @ self.ones)
        constant = of_mean @ self.ones.mT @ inverse @ self.y
        residual = self.y - self.ones @ constant
        quadratic = residual @ inverse @ residual
        nats = -0.5 * (quadratic + self.k.logdet() + len(self.y) * math.log(2 * math.pi))
        mean = (self.cross @ inverse @ residual).reshape(-1, P) + constant
        effect = torch.eye(P).double().repeat(len(XS), 1) - self.cross @ inverse @ self.ones
        covariance = self.prior - self.cross @ inverse @ self.cross.mT
        covariance = covariance + effect @ of_mean @ effect.mT
        field = model.posterior()
        assert model.log_marginal_likelihood().item() == pytest.approx(nats.item(), rel=1e-8)
        torch.testing.assert_close(field.mean(XS), mean, rtol=1e-8, atol=1e-8)
        variance = covariance.diagonal().reshape(-1, P)
        torch.testing.assert_close(field.variance(XS), variance, rtol=1e-8, atol=1e-8)


def whole(count=COUNT):
    return torch.eye(P * count).double()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_noise_is_that_of_each_reading(shape, rule):
    (x, y), model = data(), model_with(RULES[rule], scale=1.7)
    noise = SHAPES[shape](covariances())
    model.condition(x, y, noise=noise)
    dense = torch.block_diag(*(1.7 * blocks_of(noise)))
    Dense(model, x, whole(), y.flatten(), dense).assert_describes(model)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_components_that_are_missing_have_no_noise(shape, rule):
    """Whatever stands there, NaN too; what remains is a block of R."""
    (x, y), r, model = data(), covariances(), model_with(RULES[rule])
    missing = torch.zeros(COUNT, P, dtype=torch.bool)
    missing[:5, 0] = missing[5:9, 1] = missing[9] = True
    y[missing] = math.nan
    noise = SHAPES[shape](r).clone()
    if shape == "components":
        noise[missing] = math.nan
    elif shape == "covariances":
        noise[missing[:, :, None] | missing[:, None]] = math.nan
    else:
        noise[9] = -1.0
    model.condition(x, y, noise=noise, missing="mask")
    h = whole()[~missing.flatten()]
    dense = h @ torch.block_diag(*blocks_of(SHAPES[shape](r))) @ h.mT
    Dense(model, x, h, y[~missing], dense).assert_describes(model)


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_a_group_of_known_noise_beside_one_whose_noise_is_learned(rule):
    (x, y), model = data(), gp_orff.VectorFieldGP(curl_free(0.6), frequencies=RULES[rule])
    u, noise = directions(COUNT), covariances()[:, 0, 0]
    radar = {"x": x, "y": (u * y).sum(-1), "noise": noise, "directions": u, "group": "radar"}
    model.likelihood.noise = 0.05
    model.condition([{"x": x, "y": y}, radar])
    along = torch.block_diag(*u.unsqueeze(1))
    h = torch.cat([whole(), along]) @ torch.eye(P * COUNT).double()
    dense = torch.diag(torch.cat([torch.full((P * COUNT,), 0.05).double(), noise]))
    values = torch.cat([y.flatten(), radar["y"]])
    Dense(model, x, h, values, dense).assert_describes(model)
    assert type(model.likelihoods["radar"]) is gp_orff.KnownNoiseLikelihood
    assert type(model.likelihood) is not gp_orff.KnownNoiseLikelihood


@pytest.mark.parametrize("shape", SHAPES)
def test_repeated_places_keep_the_evidence_of_all_records(shape):
    (x, y), model = data(), model_with(EXACT)
    x = x[torch.arange(COUNT) % 8]
    noise = SHAPES[shape](covariances())
    model.condition(x, y, noise=noise, merge=1e-9)
    dense = torch.block_diag(*blocks_of(noise))
    # places are equal: K is singular, and the noise alone makes K + R regular
    Dense(model, x, whole(), y.flatten(), dense).assert_describes(model)


@pytest.mark.parametrize("rule", RULES)
def test_the_factor_has_the_gradient_of_the_evidence(rule):
    """d/ds of log N(y; 0, K + sR) = ½ (αᵀRα − tr K⁻¹R), α = K⁻¹(y − μ)."""
    (x, y), r, s = data(), covariances(), 0.8
    model = model_with(RULES[rule], scale=s)
    model.mean = zero_mean()
    model.condition(x, y, noise=r)
    raw = model.likelihood.raw_noise_scale.requires_grad_()
    model.log_marginal_likelihood().backward()
    noise = torch.block_diag(*r)
    inverse = torch.linalg.inv(prior_of(model, x) + s * noise)
    alpha = inverse @ y.flatten()
    slope = 0.5 * (alpha @ noise @ alpha - (inverse * noise).sum())
    expected = slope * torch.sigmoid(raw.detach())  # s = softplus(raw)
    torch.testing.assert_close(raw.grad, expected, rtol=1e-8, atol=1e-8)


def assert_same(model, other):
    """The same sums, but for their order: rounding times the condition of K."""
    assert type(other.likelihood) is gp_orff.KnownNoiseLikelihood
    assert other.likelihood.noise_scale.item() == pytest.approx(1.3, rel=1e-12)
    nats = [one.log_marginal_likelihood() for one in (model, other)]
    torch.testing.assert_close(*nats, rtol=1e-9, atol=1e-9)
    variances = [one.posterior().variance(XS) for one in (model, other)]
    torch.testing.assert_close(*variances, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_updates_chunks_and_files_are_the_same_model(rule, tmp_path):
    (x, y), r = data(), covariances()
    some, rest = slice(0, 20), slice(20, None)
    model, updated, chunked = (model_with(RULES[rule], scale=1.3) for _ in range(3))
    model.condition(x, y, noise=r)
    updated.condition(x[some], y[some], noise=r[some]).update(x[rest], y[rest], noise=r[rest])
    chunked.condition([{"x": x[s], "y": y[s], "noise": r[s].numpy()} for s in (some, rest)])
    model.save(tmp_path / "model")
    for other in (updated, chunked, gp_orff.VectorFieldGP.load(tmp_path / "model")):
        assert_same(model, other)


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_of_parts_add_up(shape, tmp_path):
    """Also those of a file, which holds nothing else."""
    (x, y), noise = data(), SHAPES[shape](covariances())
    model = model_with(gp_orff.Auto(exact_values=0), scale=1.3).condition(x, y, noise=noise)
    halves = (slice(0, 11), slice(11, None))
    parts = [model.statistics_of(x[rows], y[rows], noise=noise[rows]) for rows in halves]
    whole = model.statistics
    added, once = copy.deepcopy(model).condition(sum(parts)), model.condition(whole)
    assert_same(once, added)
    added.save(tmp_path / "model")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model")
    assert_same(once, loaded)
    with pytest.raises(ValueError, match="for all observations of a group or for none"):
        loaded.update(x, y)
    loaded.update(x[:2], y[:2], noise=noise[:2])


def noisy(factor, count=45, seed=3):
    """Readings of a smooth field with noise of covariance factor · R, and R."""
    x, r = uniform(count, 2, seed=seed), covariances(count)
    errors = torch.linalg.cholesky(factor * r) @ draw(count, P, 1, seed=seed + 1)
    return x, torch.sin(2 * x) + errors.squeeze(-1), r


@pytest.fixture(scope="module")
def scaled():
    x, y, r = noisy(4.0)
    model = gp_orff.VectorFieldGP(curl_free(), mean=zero_mean())
    return model.fit(x, y, noise=r, scale_noise=True, progress=False), x, y, r


def test_a_factor_is_learned(scaled):
    """Four, within three standard errors; of 90 numbers, one is about 4 √(2/90) = 0.6."""
    model, *_ = scaled
    estimate = model.report.hyperparameters["noise_scale"]
    assert abs(estimate.value - 4.0) < 3 * estimate.standard_error < 3.0
    assert "noise: as given with the observations, times noise_scale" in model.report.notes
    assert model.report.noise == {"default": pytest.approx(estimate.value)}


def test_the_factor_starts_at_one_unless_units_are_mistaken():
    """Within a factor of 100 of a share of the variance of the data; kept noise stays."""
    likelihood = gp_orff.KnownNoiseLikelihood(P)
    start_noise(likelihood, 1e6)
    assert likelihood.noise_scale.item() == 1.0
    likelihood.raw_noise_scale.requires_grad_()
    for share, value in ((30.0, 1.0), (1e6, 1e4), (1e-6, 1e-4)):
        start_noise(likelihood, share)
        assert likelihood.noise_scale.item() == pytest.approx(value)
    scale_noise(likelihood, 0.5)
    assert likelihood.noise_scale.item() == pytest.approx(0.5e-4)


@pytest.mark.parametrize("rule", ["exact", "grid"])
@pytest.mark.parametrize("shape", ["readings", "components"])
def test_student_t_noise_has_the_scales_that_are_given(shape, rule):
    """E[w] = (ν + v) / (ν + E[rᵀR⁻¹r]) under the dense posterior with the noise R/w, for v numbers
    that share a weight: a vector, or each component. To 1e-3: weights settle to 1e-9 nats for each
    number, which are quadratic in them."""
    (x, y), nu = data(), 4.0
    noise = SHAPES[shape](covariances())
    y[5] += 3.0
    robust = gp_orff.MultitaskStudentTLikelihood(P, deg_free=nu)
    model = gp_orff.VectorFieldGP(
        curl_free(0.6), likelihood=robust, mean=zero_mean(), frequencies=RULES[rule]
    )
    model.condition(x, y, noise=noise)
    assert model.likelihood.deg_free == nu
    v = P if shape == "readings" else 1
    w = torch.stack(list(model.state.data.all_weights()), dim=-1).expand(-1, P).flatten()
    r = noise.reshape(COUNT, -1).expand(-1, P).flatten()
    k, current = prior_of(model, x), torch.diag(r / w)
    gain = k @ torch.linalg.inv(k + current)
    squares = (y.flatten() - gain @ y.flatten()).square() + (k - gain @ k).diagonal()
    distance = (squares / r).unflatten(0, (-1, v)).sum(-1)
    expected = (nu + v) / (nu + distance)
    torch.testing.assert_close(w[::v], expected, rtol=1e-3, atol=0)
    assert w.reshape(-1, P)[5].max() < 0.2 * w.median()
    field = model.posterior().mean(x).flatten()
    torch.testing.assert_close(field, gain @ y.flatten(), rtol=1e-8, atol=1e-8)


def test_student_t_noise_of_known_scale_is_kept_in_files(tmp_path):
    """Its new readings have the covariance ν/(ν − 2) R, and without noise= it is learned again."""
    (x, y), r = data(), SHAPES["readings"](covariances())
    robust = gp_orff.MultitaskStudentTLikelihood(P, deg_free=5.0)
    model = gp_orff.VectorFieldGP(curl_free(0.6), likelihood=robust).condition(x, y, noise=r)
    model.save(tmp_path / "model.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    assert torch.equal(loaded.posterior().mean(x), model.posterior().mean(x))
    field = loaded.posterior()(x)
    added = loaded.likelihood(field, noise=r).variance - field.variance
    torch.testing.assert_close(added, (5 / 3 * r).unsqueeze(-1).expand(-1, P))
    model.condition(x, y)
    assert type(model.likelihood) is gp_orff.MultitaskStudentTLikelihood


@pytest.mark.slow
def test_noise_is_kept_as_it_is(scaled):
    """At one, also after a fit that learned a factor; a fit without data changes neither."""
    model, x, y, r = scaled
    learned = model.likelihood.noise_scale.item()
    model.condition(x, y, noise=r)
    assert model.likelihood.noise_scale.item() == learned
    model.fit(warm_start=True, progress=False)
    # both are within 0.01 nats of the best; its standard error is 10 %
    assert model.likelihood.noise_scale.item() == pytest.approx(learned, rel=3e-2)
    with gp_orff.settings.check_calibration(False):  # the noise is four times as large
        model.fit(x, y, noise=r, warm_start=True, progress=False)
    assert model.likelihood.noise_scale.item() == 1.0
    assert "noise: as given with the observations, unchanged" in model.report.notes
    assert math.isnan(model.report.hyperparameters["noise_scale"].standard_error)
    model.fit(scale_noise=True, warm_start=True, progress=False)
    assert model.likelihood.noise_scale.item() == pytest.approx(learned, rel=3e-2)
    model.condition(x, y)
    assert type(model.likelihood) is not gp_orff.KnownNoiseLikelihood


def test_left_out_blocks_are_predicted_with_their_noise():
    """The numbers of cross-validation lie along the axes of each covariance."""
    (x, y), r, model = data(), covariances(), model_with(EXACT)
    model.mean = zero_mean()
    result = model.condition(x, y, noise=r).cross_validate(x, y, noise=r, blocks=range(COUNT))
    k, noise = prior_of(model, x), torch.block_diag(*r)
    own = slice(6, 8)  # of reading 3
    rest = [i for i in range(P * COUNT) if not 6 <= i < 8]
    gain = k[own][:, rest] @ torch.linalg.inv((k + noise)[rest][:, rest])
    covariance = k[own, own] - gain @ k[rest][:, own] + r[3]
    error = gain @ y.flatten()[rest] - y[3]
    rows = result.index == 3
    squares = (result.mean - result.observed)[rows].square().sum()
    torch.testing.assert_close(squares, error.square().sum(), rtol=1e-8, atol=0)
    torch.testing.assert_close(
        result.sd[rows].square().sum(), covariance.trace(), rtol=1e-8, atol=0
    )
    with pytest.raises(ValueError, match="one observation for each point"):
        model.leave_one_out(x, y, noise=r)


def test_one_output_and_three():
    for outputs, kernel in ((1, gpytorch.kernels.RBFKernel()), (3, curl_free(num_dims=3))):
        x, y = uniform(12, outputs, seed=1).float(), draw(12, outputs, seed=2).float()
        noise = 0.1 * torch.eye(outputs).repeat(12, 1, 1)
        posteriors = []
        for given in (noise, noise.diagonal(dim1=1, dim2=2), noise[:, 0, 0]):
            model = gp_orff.VectorFieldGP(kernel).condition(x, y, noise=given)
            posteriors.append(model.posterior().variance(x[:2]))
            reading = model.likelihood(model.posterior()(x[:2]), noise=given[:2])
            added = reading.variance - model.posterior()(x[:2]).variance
            torch.testing.assert_close(added, torch.full_like(added, 0.1), rtol=1e-5, atol=1e-6)
        for variance in posteriors[1:]:
            torch.testing.assert_close(variance, posteriors[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_new_readings_have_the_noise_that_is_given(shape, interleaved):
    likelihood, noise = gp_orff.KnownNoiseLikelihood(P), SHAPES[shape](covariances(5))
    likelihood.noise_scale = 2.0
    root = draw(10, 10)
    field = MultitaskMultivariateNormal(draw(5, P), root @ root.mT, interleaved=interleaved)
    reading = likelihood(field, noise=noise)
    expected = 2 * torch.block_diag(*blocks_of(noise))
    if not interleaved:
        expected = expected.reshape(5, P, 5, P).permute(1, 0, 3, 2).reshape(10, 10)
    torch.testing.assert_close(reading.covariance_matrix - root @ root.mT, expected)
    torch.testing.assert_close(reading.mean, field.mean)
    samples = likelihood(field.mean, noise=noise)
    torch.testing.assert_close(samples.covariance_matrix, 2 * blocks_of(noise))
    with pytest.warns(gpytorch.utils.warnings.GPInputWarning, match="expected noise="):
        assert likelihood(field) is field


def replaced(values, index, value):
    values = values.clone()
    values[index] = value
    return values


R = covariances()
BAD = {
    "zero": (replaced(R[:, 0, 0], 7, 0.0), "positive, finite noise variances.*observation 7"),
    "negative": (
        replaced(R.diagonal(dim1=1, dim2=2), (7, 1), -0.1),
        "positive, finite noise variances.*observation 7",
    ),
    "nan": (replaced(R[:, 0, 0], 7, math.nan), "positive, finite.*observation 7"),
    "infinite": (replaced(R, (7, 0, 0), math.inf), "finite noise covariances.*observation 7"),
    "skew": (replaced(R, (7, 0, 1), 3.0), "symmetric noise covariances.*observation 7"),
    "indefinite": (replaced(R, 7, torch.tensor([[1.0, 2], [2, 1]])), "positive def.*observation 7"),
    "singular": (replaced(R, 7, torch.ones(2, 2)), "positive definite.*observation 7"),
    "length": (R[1:], r"shape \(24,\).*\(24, 2\).*\(24, 2, 2\).*got \(23, 2, 2\)"),
    "columns": (R[:, :, :1].squeeze(-1).repeat(1, 2), r"\(24, 2\).*got \(24, 4\)"),
    "one": (0.1, r"shape \(24,\).*got \(\)"),
    "text": (["a"] * COUNT, "real numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_noise_leaves_the_model_as_it_is(name):
    (x, y), (noise, message) = data(), BAD[name]
    model = model_with(EXACT, scale=1.5).condition(x, y, noise=R)
    before = model.log_marginal_likelihood().item()
    for call in (model.fit, model.condition, model.update, model.leave_one_out):
        options = {"progress": False} if call == model.fit else {}
        with pytest.raises((ValueError, TypeError), match=message):
            call(x, y, noise=noise, **options)
    assert model.log_marginal_likelihood().item() == before


def test_arguments_that_contradict_each_other():
    (x, y), u = data(), directions(COUNT)
    model = gp_orff.VectorFieldGP(curl_free(0.6))
    calls = [
        ({"noise": R, "variances": torch.ones(COUNT)}, ValueError, "noise= or variances="),
        ({"noise": covariances(), "track": "a"}, NotImplementedError, r"\(24,\) with track="),
        ({"noise": R, "track": "a", "scale_noise": True}, NotImplementedError, "scale_noise=False"),
        ({"scale_noise": True}, ValueError, "noise= with scale_noise=True"),
    ]
    for options, error, message in calls:
        with pytest.raises(error, match=message):
            model.fit(x, y, progress=False, **options)
    with pytest.raises(ValueError, match=r"shape \(24,\)"):
        model.fit(x, y[:, 0], noise=R, directions=u, progress=False)
    with pytest.raises(
        ValueError, match="noise, directions, groups, tracks and times in the chunks"
    ):
        model.fit([(x, y)], noise=R, progress=False)
    with pytest.raises(ValueError, match="deg_free > 2"):
        gp_orff.KnownNoiseLikelihood(P, deg_free=2.0)
    mixed = [{"x": x, "y": y, "noise": R}, (x, y)]
    with pytest.raises(ValueError, match="for all observations of a group or for none"):
        model.fit(mixed, progress=False)
    assert type(model.likelihood) is not gp_orff.KnownNoiseLikelihood


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_updates_have_the_noise_of_what_is_held(rule):
    (x, y), model = data(), model_with(RULES[rule])
    model.condition(x, y, noise=R)
    before = model.log_marginal_likelihood().item()
    with pytest.raises(ValueError, match="for all observations of a group or for none"):
        model.update(x, y)
    assert model.log_marginal_likelihood().item() == before
    model.update(x[:3], y[:3], group="other")
    assert type(model.likelihoods["other"]) is not gp_orff.KnownNoiseLikelihood


def test_a_fit_that_fails_restores_the_factor(monkeypatch):
    (x, y), model = data(), model_with(EXACT, scale=1.5).condition(*data(), noise=R)
    monkeypatch.setattr("gp_orff.models.vector_field_gp.fit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y, noise=R, scale_noise=True, progress=False)
    assert not model.likelihood.raw_noise_scale.requires_grad
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y, noise=R, progress=False)
    assert model.likelihood.noise_scale.item() == pytest.approx(1.5)


def test_axes_of_noise_do_not_depend_on_rounding():
    """Of equal variances, of ones a thousand times apart, and of copies that were rotated by the
    last digit: so copies are recognised."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(20, 2, 2, generator=generator).double()
    every = torch.cat([0.01 * torch.eye(2).double().expand(5, 2, 2), root @ root.mT])
    every[7] = torch.diag(torch.tensor([1.0, 1e-12]).double())
    angle = 1e-14
    turn = torch.tensor([[1.0, -angle], [angle, 1.0]]).double()
    x, y = torch.rand(25, 2, generator=generator).double(), torch.ones(25, 2).double()
    options = (Options(noise=every), Options(noise=turn @ every @ turn.mT))
    for one, two in zip(*(read(x, y, 2, own) for own in options), strict=True):
        torch.testing.assert_close(one.y, two.y, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(one.direction, two.direction, rtol=0, atol=1e-7)
        assert (one.weight > 0).all()
    assert torch.equal(one.direction[:5].abs().amax(-1), torch.ones(5).double())
