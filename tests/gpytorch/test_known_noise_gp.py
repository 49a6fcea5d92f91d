"""Known noise of each vector in an ExactGP, compared with dense algebra."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, MultitaskGaussianLikelihood
from linear_operator import to_dense

import gp_orff
from gp_orff.data.likelihoods import point_covariances
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import POINTS, ScalarGP, VectorGP, evidence, gradient, orff_of, vector_gp
from tests.support.registry import CASES

pytestmark = pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")

SHAPES = {  # of noise=, from covariances
    "vectors": lambda r: r[:, 0, 0],
    "components": lambda r: r.diagonal(dim1=-1, dim2=-2),
    "covariances": lambda r: r,
}
SCALE = 1.7
XS = draw(6, 2, seed=2)


def covariances(count, p, seed=4):
    """Over a decade."""
    root = draw(count, p, p, seed=seed)
    size = 10 ** (torch.linspace(0, 1, count).double() - 1)
    return size[:, None, None] * (root @ root.mT + 0.1 * torch.eye(p).double())


def dense(noise, p):
    """The covariance of all values."""
    if noise.dim() == 1:
        noise = noise[:, None, None] * torch.eye(p).double()
    return torch.block_diag(*(noise if noise.dim() == 3 else torch.diag_embed(noise)))


def known(noise, p, learned=True):
    likelihood = gp_orff.KnownNoiseLikelihood(num_tasks=p, noise=noise)
    likelihood.noise_scale = SCALE
    likelihood.raw_noise_scale.requires_grad_(learned)
    return likelihood


def model_of(kernel, points, noise, p, seed=0):
    x, y = draw(points, 2, seed=seed), draw(points, p, seed=seed + 1)
    return VectorGP(x, y, known(noise, p), kernel).double()


def conditioned(model, prior, noisy, xs=XS):
    """The posterior of the residuals by dense algebra."""
    x, p = model.train_inputs[0], model.likelihood.num_tasks
    residuals = (model.train_targets - model.mean_module(x)).flatten()
    mean, covariance = oracles.condition(prior(xs, xs), prior(xs, x), noisy, residuals)
    return mean.unflatten(0, (-1, p)) + model.mean_module(xs), covariance


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("regime", POINTS)
@pytest.mark.parametrize("name", ["curl_free", "helmholtz", "separable", "exact"])
def test_equals_dense_algebra(name, regime, shape):
    """Evidence and its gradient, posterior, and new observations, to rounding."""
    if name == "exact":
        kernel = ScaleKernel(gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2))
        p, points = 2, 20

        def prior(a, b):
            return kernel(a, b).to_dense()
    else:
        case = CASES[name]()
        kernel, p, points = orff_of(case), case.num_outputs, POINTS[regime]

        def prior(a, b):
            return case.covariance(kernel.frequencies, a, b)

    noise = SHAPES[shape](covariances(points, p))
    model = model_of(kernel, points, noise, p)
    x = model.train_inputs[0]
    noisy = prior(x, x) + model.likelihood.noise_scale * dense(noise, p)
    residuals = (model.train_targets - model.mean_module(x)).flatten()
    value, expected = evidence(model), oracles.log_density(noisy, residuals)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    reference = gradient(expected, model)
    assert (gradient(value, model) - reference).norm() <= 1e-8 * reference.norm()

    model.eval()
    posterior, (mean, covariance) = model(XS), conditioned(model, prior, noisy)
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(posterior.covariance_matrix, covariance, rtol=1e-8, atol=1e-8)
    new = SHAPES[shape](covariances(6, p, seed=7))
    observed = model.likelihood(posterior, noise=new)
    total = covariance + SCALE * dense(new, p)
    torch.testing.assert_close(observed.covariance_matrix, total, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(observed.variance.flatten(), total.diagonal(), rtol=1e-8, atol=1e-8)
    ys = draw(6, p, seed=8)
    density = oracles.log_density(total, (ys - mean).flatten())
    torch.testing.assert_close(observed.log_prob(ys), density, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("regime", POINTS)
@pytest.mark.parametrize("spelling", ["fixed", "known"])
def test_one_output(regime, spelling):
    """gpytorch's likelihood and ours, on the features, without a warning of dense algebra."""
    case, points = CASES["scalar"](), POINTS[regime]
    x, y, noise = draw(points, 2), draw(points, seed=1), 0.1 + draw(points, seed=2).square()
    kernel = orff_of(case)
    if spelling == "fixed":
        likelihood = FixedNoiseGaussianLikelihood(noise)
    else:
        likelihood = gp_orff.KnownNoiseLikelihood(num_tasks=1, noise=noise)
    model = ScalarGP(x, y, likelihood, kernel).double()
    noisy = case.covariance(kernel.frequencies, x, x) + torch.diag(noise)
    residuals = y - model.mean_module(x)
    torch.testing.assert_close(evidence(model), oracles.log_density(noisy, residuals))
    cross = case.covariance(kernel.frequencies, XS, x)
    wanted = model.mean_module(XS) + cross @ torch.linalg.solve(noisy, residuals)
    torch.testing.assert_close(model.eval()(XS).mean, wanted)
    new = model.likelihood(model(XS), noise=noise[:6])
    torch.testing.assert_close(new.variance - model(XS).variance, noise[:6])


@pytest.mark.parametrize("name", ["curl_free", "separable"])
def test_chunks_of_features(name, monkeypatch):
    """Many chunks give the numbers and gradients of one."""
    case = CASES[name]()
    p = case.num_outputs
    model = model_of(orff_of(case), 150, covariances(150, p), p)
    whole = evidence(model)
    slope = gradient(whole, model)
    monkeypatch.setattr("gp_orff.inference.equations._NUMBERS", 40 * p * 96)
    parts = evidence(model)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient(parts, model), slope, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", ["exact", "features"])
def test_fantasies_have_the_noise_that_is_given(kernel):
    case = CASES["curl_free"]()
    built = orff_of(case) if kernel == "features" else case.kernel.double()
    noise, more = covariances(150, 2), covariances(3, 2, seed=8)
    model = model_of(built, 150, noise, 2).eval()
    x, y = draw(3, 2, seed=5), draw(3, 2, seed=6)
    with torch.no_grad():
        model(XS)
        with pytest.raises(ValueError, match=r"get_fantasy_model\(x, y, noise=noise\)"):
            model.get_fantasy_model(x, y)
        fantasy = model.get_fantasy_model(x, y, noise=more)(XS)
        every = [torch.cat(pair) for pair in ((model.train_inputs[0], x), (model.train_targets, y))]
        refit = VectorGP(*every, known(torch.cat([noise, more]), 2), built).double().eval()(XS)
    torch.testing.assert_close(fantasy.mean, refit.mean, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(fantasy.variance, refit.variance, rtol=1e-8, atol=1e-8)


def test_one_noise_for_all_is_that_of_a_multitask_likelihood():
    case = CASES["curl_free"]()
    kernel, x, y = orff_of(case), draw(150, 2), draw(150, 2, seed=1)
    likelihood = gp_orff.KnownNoiseLikelihood(2, noise=torch.full((150,), 0.1).double())
    model = VectorGP(x, y, likelihood, kernel).double()
    wanted = vector_gp(x, y, kernel, 0.1, has_task_noise=False)
    torch.testing.assert_close(evidence(model), evidence(wanted))
    torch.testing.assert_close(model.eval()(XS).variance, wanted.eval()(XS).variance)


def test_state_dict_and_samples():
    noise = covariances(150, 2)
    model = model_of(orff_of(CASES["curl_free"]()), 150, noise, 2).eval()
    other = model_of(orff_of(CASES["curl_free"]()), 150, torch.ones(150, 2, 2) * noise[:1], 2)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.eval()(XS).variance, model(XS).variance)
    torch.manual_seed(0)
    observed = model.likelihood(model(XS), noise=covariances(6, 2, seed=7))
    samples = observed.rsample(torch.Size([20_000])) - observed.mean
    # the relative standard error of a mean of 20000 squares is 1 %
    ratio = samples.square().mean(0) / observed.variance
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=0.05)


def test_noise_that_does_not_fit():
    kernel, x, y = gp_orff.CurlFreeKernel(num_dims=2), draw(12, 2), draw(12, 2, seed=1)
    for likelihood, match in (
        (gp_orff.KnownNoiseLikelihood(2), r"noise of no observations; use .*num_tasks=2, noise="),
        (gp_orff.KnownNoiseLikelihood(2, noise=torch.ones(9)), "noise of 9 observations"),
        (gp_orff.KnownNoiseLikelihood(3, noise=torch.ones(12)), "got a Known.*num_tasks=3"),
    ):
        with pytest.raises(ValueError, match=match):
            VectorGP(x, y, likelihood, kernel).double().eval()(XS)
    with pytest.raises(ValueError, match="positive, finite noise"):
        gp_orff.KnownNoiseLikelihood(2, noise=-torch.ones(12))
    likelihood = gp_orff.KnownNoiseLikelihood(2, noise=torch.ones(12))
    with pytest.raises(ValueError, match=r"fit\(x, y, noise=noise\)"):
        gp_orff.VectorFieldGP(kernel, likelihood=likelihood)
    for wrong, match in (
        (gp_orff.TrackLikelihood(2), r"got a TrackLikelihood.*fit\(x, y, track=track, time=time\)"),
        (gp_orff.KnownNoiseLikelihood(2, deg_free=4.0), r"got a KnownNoiseLikelihood.*heavy tails"),
        (gp_orff.MultitaskStudentTLikelihood(2), "heavy tails"),
    ):
        model = VectorGP(x, y, MultitaskGaussianLikelihood(2), RBFKernel()).double()
        model.likelihood = wrong
        with pytest.raises(NotImplementedError, match=match):
            model(x)
        with pytest.raises(NotImplementedError, match=match):
            VectorGP(x, y, wrong, RBFKernel())


# Expected log densities of vectors, for variational models.


def field_of(count, p, interleaved=True):
    root = draw(count * p, count * p, seed=3) / 4
    return MultitaskMultivariateNormal(
        draw(count, p, seed=5), root @ root.mT, interleaved=interleaved
    )


def blocks(field):
    n, p = field.event_shape
    full = field.covariance_matrix
    if not field._interleaved:
        full = full.view(p, n, p, n).permute(1, 0, 3, 2).reshape(n * p, n * p)
    return torch.stack([full[i * p : i * p + p, i * p : i * p + p] for i in range(n)])


def expected_under(field, function):
    """∫ function(f) N(f; m, S) df of each point, by a product rule of 60 Gauss–Hermite nodes."""
    import numpy as np

    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(60))
    z = torch.cartesian_prod(nodes, nodes)
    mass = torch.cartesian_prod(weights, weights).prod(-1) / (2 * torch.pi)
    values = field.mean + (torch.linalg.cholesky(blocks(field)) @ z.mT).permute(2, 0, 1)
    return (mass.unsqueeze(-1) * function(values)).sum(0)


def student_t(noise):
    """The likelihood, and log t_ν(y; f, Σ) written out."""
    options = {"rank": 1} if noise == "rank_1" else {"has_task_noise": noise == "each"}
    torch.manual_seed(0)
    likelihood = gp_orff.MultitaskStudentTLikelihood(
        2, deg_free=3.5, **{"has_task_noise": True, **options}
    ).double()
    likelihood.noise = 0.3
    scale = likelihood.noise * torch.eye(2)
    if noise == "rank_1":
        scale = scale + likelihood.task_noise_covar
    if noise == "each":
        likelihood.task_noises = torch.tensor([0.2, 0.9])
        scale = scale + torch.diag(likelihood.task_noises)

    def log_density(y, f, sigma=scale, nu=3.5):
        v = sigma.shape[-1]
        e = y - f
        distance = (e * torch.linalg.solve(sigma, e.unsqueeze(-1)).squeeze(-1)).sum(-1)
        half = torch.tensor([0.5 * nu, 0.5 * (nu + v)], dtype=torch.float64).lgamma()
        constant = half[1] - half[0] - 0.5 * torch.logdet(nu * torch.pi * sigma)
        return constant - 0.5 * (nu + v) * torch.log1p(distance / nu)

    return likelihood, log_density


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("noise", ["one", "each", "rank_1"])
def test_student_t_noise_of_vectors(noise, interleaved):
    """E[log t] and log E[t] by quadrature in two dimensions, with outliers at 10 and 100 sds."""
    likelihood, log_density = student_t(noise)
    field = field_of(6, 2, interleaved)
    y = field.mean + draw(6, 2, seed=6) * torch.tensor([0, 1, 1, 3, 10, 100.0]).unsqueeze(-1)
    wanted = expected_under(field, lambda f: log_density(y, f))
    # 60 nodes a dimension are exact to 1e-6 where the density changes within an sd of the field
    torch.testing.assert_close(likelihood.expected_log_prob(y, field), wanted, rtol=0, atol=1e-5)
    wanted = expected_under(field, lambda f: log_density(y, f).exp()).log()
    torch.testing.assert_close(likelihood.log_marginal(y, field), wanted, rtol=0, atol=1e-4)
    given = likelihood(field.mean)  # of values of a field
    torch.testing.assert_close(given.log_prob(y), log_density(y, field.mean))


@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_components_under_student_t_noise(policy):
    """The distribution of the others: t_ν of one dimension with its block of Σ; 0 without any."""
    likelihood, log_density = student_t("rank_1")
    field, y = field_of(3, 2), draw(3, 2, seed=6)
    y[0, 1] = torch.nan
    y[2] = torch.nan
    sigma = (likelihood.noise * torch.eye(2) + likelihood.task_noise_covar)[:1, :1]
    first = expected_under(field, lambda f: log_density(y[:, :1], f[..., :1], sigma))[0]
    with gpytorch.settings.observation_nan_policy(policy):
        found = likelihood.expected_log_prob(y, field)
        marginal = likelihood.log_marginal(y, field)
    torch.testing.assert_close(found[0], first, rtol=0, atol=1e-6)
    whole = likelihood.expected_log_prob(y[1:2], field[1:2])
    torch.testing.assert_close(found[1:2], whole)
    assert found[2].abs() < 1e-12
    assert marginal[2].abs() < 1e-12
    with pytest.raises(ValueError, match=r'got 3 NaN among 6; .*observation_nan_policy\("mask"\)'):
        likelihood.expected_log_prob(y, field)


@pytest.mark.parametrize(("nu", "variance", "error"), [(2.5, 1e-8, 5), (4, 1e4, 1e3), (300, 2, 0)])
def test_tails_in_one_dimension(nu, variance, error):
    """Against quadrature of fine steps over the field, from tiny to huge uncertainty."""
    likelihood = gp_orff.MultitaskStudentTLikelihood(1, deg_free=nu).double()
    likelihood.noise = 1.0
    field = MultitaskMultivariateNormal(
        torch.zeros(1, 1).double(), variance * torch.eye(1).double()
    )
    y = torch.tensor([[float(error)]]).double()
    z = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    law = torch.distributions.StudentT(torch.tensor(float(nu)).double(), variance**0.5 * z)
    values = law.log_prob(y[0])
    weights = torch.exp(-0.5 * z.square()) * (z[1] - z[0]) / (2 * torch.pi) ** 0.5
    found = likelihood.expected_log_prob(y, field)[0]
    torch.testing.assert_close(found, (weights * values).sum(), rtol=1e-8, atol=0)
    found = likelihood.log_marginal(y, field)[0]
    torch.testing.assert_close(found, (weights * values.exp()).sum().log(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("interleaved", [True, False])
def test_blocks_of_many_points(interleaved):
    """In parts, of a batch; and of the structured covariance of features."""
    root = draw(2, 14, 14, seed=3)
    law = MultitaskMultivariateNormal(draw(2, 7, 2), root @ root.mT, interleaved=interleaved)
    wanted = torch.stack([blocks(one) for one in law])
    with gpytorch.settings.max_cholesky_size(6):
        torch.testing.assert_close(point_covariances(law), wanted)
        model = model_of(orff_of(CASES["curl_free"]()), 150, covariances(150, 2), 2).eval()
        torch.testing.assert_close(point_covariances(model(XS)), blocks(model(XS)))


def test_gradients_of_expected_log_densities():
    """By differences; covariances with equal eigenvalues too."""
    likelihood, _ = student_t("each")
    mean, root = draw(3, 2).requires_grad_(), 0.4 * torch.eye(6).double()
    root.requires_grad_()

    def value(mean, root):
        field = MultitaskMultivariateNormal(mean, root @ root.mT)
        y = torch.ones(3, 2).double()
        return likelihood.expected_log_prob(y, field) + likelihood.log_marginal(y, field)

    assert torch.autograd.gradcheck(value, (mean, root))
    (slope,) = torch.autograd.grad(value(mean, root).sum(), likelihood.raw_noise)
    assert slope.abs() > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_expected_log_densities_under_known_noise(shape):
    noise, field, y = SHAPES[shape](covariances(4, 2)), field_of(4, 2), draw(4, 2, seed=6)
    likelihood = known(noise, 2)
    sigma = SCALE * torch.stack([dense(part.unsqueeze(0), 2) for part in noise])
    wanted = [
        -0.5
        * (torch.logdet(2 * torch.pi * s) + (torch.linalg.inv(s) * (c + torch.outer(e, e))).sum())
        for s, c, e in zip(sigma, blocks(field), y - field.mean, strict=True)
    ]
    torch.testing.assert_close(likelihood.expected_log_prob(y, field), torch.stack(wanted))
    wanted = torch.distributions.MultivariateNormal(field.mean, blocks(field) + sigma).log_prob(y)
    torch.testing.assert_close(likelihood.log_marginal(y, field), wanted)


def test_samples_of_student_t_noise():
    likelihood, _ = student_t("rank_1")
    torch.manual_seed(0)
    law = likelihood(torch.zeros(1, 2).double())
    samples = law.rsample(torch.Size([100_000])).squeeze(1)
    scale = likelihood.noise * torch.eye(2) + likelihood.task_noise_covar
    # medians of |x| have standard errors of .4 %: that of t_3.5 is .753 times the scale
    ratio = samples.abs().median(0).values / scale.diagonal().sqrt()
    torch.testing.assert_close(ratio, torch.full((2,), 0.7527).double(), rtol=0.02, atol=0)
    torch.testing.assert_close(law.covariance_matrix[0], 3.5 / 1.5 * scale)


def test_slices_and_scales_of_the_covariance():
    model = model_of(orff_of(CASES["curl_free"]()), 8, covariances(8, 2), 2)
    noisy = model.likelihood(model(*model.train_inputs)).lazy_covariance_matrix
    full = noisy.to_dense()
    for rows, columns in ((slice(2, 8), slice(6, 12)), (slice(4, 10), slice(4, 10)), (3, slice(5))):
        torch.testing.assert_close(to_dense(noisy[rows, columns]), full[rows, columns])
    torch.testing.assert_close((noisy * 3).logdet(), torch.logdet(3 * full))
    more = (noisy + noisy).add_jitter(0.1)
    torch.testing.assert_close(more.logdet(), torch.logdet(2 * full + 0.1 * torch.eye(16)))
