"""ORFFKernel in an unmodified ExactGP, compared with dense algebra from the definition of K.

The dense covariance is Σ_k w_k cos⟨ω_k, x − z⟩ A(ω_k), with A(ω) as in the papers. It shares only
the drawn frequencies with the code under test.
"""

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from linear_operator import to_dense, to_linear_operator
from linear_operator.utils.warnings import PerformanceWarning

import gp_orff
from gp_orff.exact_gp.operators import (
    FeatureCovariance,
    NoisyFeatureCovariance,
    PosteriorCovariance,
)
from gp_orff.exact_gp.prediction import ORFFPredictionStrategy
from gp_orff.features import chunked
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import (
    NOISES,
    POINTS,
    VectorGP,
    dense_noise,
    evidence,
    gradient,
    model_for,
    orff_of,
    vector_gp,
)
from tests.support.registry import CASES, MEASURES, RULES

# few features keep the dense reference small; that their error bars are off is no matter here
pytestmark = pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning")


OUTPUTS = {name: build().num_outputs for name, build in CASES.items()}


def most_general(name):
    """The noise that has all correlations; a scalar model has one noise."""
    return "full_rank" if OUTPUTS[name] > 1 else "global"


@pytest.mark.slow
@pytest.mark.parametrize("regime", POINTS)
@pytest.mark.parametrize(
    ("name", "noise"),
    [
        (name, noise)
        for name in CASES
        for noise in NOISES
        if noise == most_general(name) or name in ("divergence_free_3d", "separable")
    ],
)
def test_equals_dense_algebra(name, regime, noise):
    case = CASES[name]()
    points = POINTS[regime]
    model = model_for(case, points, NOISES[noise])
    x, xs = model.train_inputs[0], draw(9, case.num_dims, seed=2)
    orff = model.covar_module

    noisy = case.covariance(orff.frequencies, x, x) + dense_noise(model, points)
    assert torch.linalg.cond(noisy) <= 1e5
    residuals = (model.train_targets - model.mean_module(x)).flatten()
    expected = oracles.log_density(noisy, residuals)
    value = evidence(model)
    assert abs(value - expected) <= 1e-9 * abs(expected)
    reference = gradient(expected, model)
    assert (gradient(value, model) - reference).norm() <= 1e-9 * reference.norm()
    assert reference.abs().min() > 0 or case.num_outputs > 1

    model.eval()
    posterior = model(xs)
    mean, covariance = oracles.condition(
        case.covariance(orff.frequencies, xs, xs),
        case.covariance(orff.frequencies, xs, x),
        noisy,
        residuals,
    )
    mean = mean + model.mean_module(xs).flatten()
    scale = covariance.diagonal().max()
    assert (posterior.mean.flatten() - mean).abs().max() <= 1e-9 * mean.abs().max()
    assert (posterior.variance.flatten() - covariance.diagonal()).abs().max() <= 1e-9 * scale
    assert (posterior.covariance_matrix - covariance).abs().max() <= 1e-9 * scale


PRIORS = [  # every kernel by every rule, and in both measures
    (name, MEASURES[(i + j) % 2], rule)
    for i, name in enumerate(CASES)
    for j, rule in enumerate(RULES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measure", "rule"), PRIORS)
def test_prior_covariance_is_the_definition(name, measure, rule):
    case = CASES[name]()
    orff = gp_orff.ORFFKernel(
        case.kernel, RULES[rule](24, measure=measure, seed=1), num_dims=case.num_dims
    ).double()
    x, z = draw(6, case.num_dims), draw(4, case.num_dims, seed=1)
    expected = case.covariance(orff.frequencies, x, z)
    torch.testing.assert_close(orff(x, z).to_dense(), expected)
    torch.testing.assert_close(orff(z, x).to_dense(), expected.mT)
    vectors = draw(expected.shape[1], 3)
    torch.testing.assert_close(orff(x, z) @ vectors, expected @ vectors)
    torch.testing.assert_close(orff(x, z).evaluate_kernel().mT @ expected, expected.mT @ expected)
    diagonal = case.covariance(orff.frequencies, x, x).diagonal()
    torch.testing.assert_close(orff(x, diag=True), diagonal)
    torch.testing.assert_close(orff(x).diagonal(), diagonal)
    pairs = case.covariance(orff.frequencies, x[:4], z).diagonal()
    torch.testing.assert_close(orff(x[:4], z, diag=True), pairs)


SUMS = {
    "scaled": lambda a, b: ScaleKernel(a),
    "sum": lambda a, b: a + b,
    "sum_of_scaled": lambda a, b: ScaleKernel(a) + ScaleKernel(b),
    "scaled_sum": lambda a, b: ScaleKernel(a + ScaleKernel(b)),
}


@pytest.mark.parametrize("regime", POINTS)
@pytest.mark.parametrize("build", SUMS)
def test_structure_survives_scaling_and_sums_of_orff_kernels(build, regime, monkeypatch):
    """The same numbers as dense algebra on the same covariance, with Φ never written out."""
    first, second = (orff_of(CASES[name]()) for name in ("curl_free", "divergence_free_2d"))
    kernel = SUMS[build](first, second).double()
    for module in kernel.modules():
        if isinstance(module, ScaleKernel):
            module.outputscale = 1.7
    points = POINTS[regime]
    model = model_for(CASES["curl_free"](), points, {}, kernel)
    x, xs = model.train_inputs[0], draw(9, 2, seed=2)
    covariance = kernel(torch.cat([x, xs])).to_dense()
    n = 2 * points
    noisy = covariance[:n, :n] + dense_noise(model, points)
    residuals = (model.train_targets - model.mean_module(x)).flatten()
    expected = oracles.log_density(noisy, residuals)
    if regime == "primal":
        monkeypatch.setitem(chunked._CHUNK_BYTES, "cpu", 2**14)
        monkeypatch.setattr(chunked, "trig", refuse_all_but_chunks(points))
    value = evidence(model)
    assert abs(value - expected) <= 1e-9 * abs(expected)
    value.backward()
    model.eval()
    posterior = model(xs)
    assert isinstance(model.prediction_strategy, ORFFPredictionStrategy)
    assert isinstance(posterior.lazy_covariance_matrix, PosteriorCovariance)
    mean, cov = oracles.condition(covariance[n:, n:], covariance[n:, :n], noisy, residuals)
    mean = mean + model.mean_module(xs).flatten()
    torch.testing.assert_close(posterior.mean.flatten(), mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(posterior.covariance_matrix, cov, rtol=1e-9, atol=1e-9)


def refuse_all_but_chunks(points):
    """φ as it is, but never for the whole training set at once."""
    original = chunked.trig

    def checked(x, omega):
        assert x.shape[-2] < points, "features of all points were written out"
        return original(x, omega)

    return checked


def test_other_sums_keep_gpytorchs_strategy():
    case = CASES["curl_free"]()
    exact = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2).double()
    model = model_for(case, 8, {}, orff_of(case) + exact).eval()
    message = r"gpytorch's general algebra.*inside one ORFFKernel"
    with pytest.warns(PerformanceWarning, match=message):
        posterior = model(draw(3, 2, seed=2))
    assert not isinstance(model.prediction_strategy, ORFFPredictionStrategy)
    x, xs = model.train_inputs[0], draw(3, 2, seed=2)
    orff = model.covar_module.kernels[0]

    def k(a, b):
        return case.covariance(orff.frequencies, a, b) + exact(a, b).to_dense()

    residuals = (model.train_targets - model.mean_module(x)).flatten()
    mean, cov = oracles.condition(k(xs, xs), k(xs, x), k(x, x) + dense_noise(model, 8), residuals)
    mean = mean + model.mean_module(xs).flatten()
    torch.testing.assert_close(posterior.mean.flatten(), mean)
    torch.testing.assert_close(posterior.covariance_matrix, cov)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["helmholtz", "separable", "scalar"])
@pytest.mark.parametrize("regime", POINTS)
@pytest.mark.parametrize("test_points", [5, 400], ids=["few", "many"])
def test_samples_have_the_posterior_covariance(name, regime, test_points):
    """With and without base samples, also where test outputs outnumber features."""
    case = CASES[name]()
    model = model_for(case, POINTS[regime], {})
    model.eval()
    xs = draw(test_points, case.num_dims, seed=2)
    posterior = model(xs)
    p, count = case.num_outputs, 1000
    event = (test_points, p) if p > 1 else (test_points,)
    base = draw(count, *event, seed=3)
    torch.manual_seed(0)
    probe = draw(test_points * p, seed=4) / (test_points * p) ** 0.5
    expected = probe @ posterior.covariance_matrix @ probe
    for samples in (
        posterior.rsample(torch.Size([count])),
        posterior.rsample(torch.Size([count]), base_samples=base),
    ):
        assert samples.shape == (count, *event)
        projected = (samples - posterior.mean).reshape(count, -1) @ probe
        # a sample variance of normal variables has relative standard error √(2/n)
        assert abs(projected.var() / expected - 1) < 5 * (2 / count) ** 0.5
        assert abs(projected.mean()) < 5 * (expected / count) ** 0.5
    root = posterior.lazy_covariance_matrix.root_decomposition().root.to_dense()
    torch.testing.assert_close(root @ root.mT, posterior.covariance_matrix, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("regime", POINTS)
def test_state_dict_into_a_fresh_model_and_pickling(regime):
    case = CASES["helmholtz"]()
    model = model_for(case, POINTS[regime], {})
    for parameter in model.parameters():
        parameter.data += 0.1
    model.eval()
    xs = draw(4, 2, seed=2)
    expected = model(xs)
    fresh_kernel = gp_orff.ORFFKernel(
        gp_orff.HelmholtzKernel(CASES["helmholtz"]().parts[0].leaves[0][0], num_dims=2),
        gp_orff.MonteCarlo(24, seed=99),  # other frequencies, to be overwritten
    )
    fresh = model_for(case, POINTS[regime], {}, fresh_kernel)
    fresh.load_state_dict(model.state_dict())
    for other in (fresh, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        other.eval()
        assert torch.equal(other(xs).mean, expected.mean)
        assert torch.equal(other(xs).covariance_matrix, expected.covariance_matrix)


def test_moving_to_float32_and_back():
    case = CASES["divergence_free_3d"]()
    model = model_for(case, 150, {})
    xs = draw(4, 3, seed=2)
    model.eval()
    expected = model(xs)
    model.to(torch.float32)
    assert {t.dtype for t in [*model.parameters(), *model.buffers()]} <= {torch.float32}
    single = model(xs.float())
    assert single.mean.dtype == single.variance.dtype == torch.float32
    # float32 carries x, ω and the results; the algebra between is float64
    torch.testing.assert_close(single.mean.double(), expected.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(single.variance.double(), expected.variance, rtol=1e-3, atol=1e-4)
    loss = -evidence(model)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_float32_with_small_noise_stays_positive_definite():
    """All algebra in float64: noise 1e-4 with 3000 points does not break the factorisation."""
    x, y = draw(3000, 2).float(), draw(3000, 2, seed=1).float()
    kernel = gp_orff.ORFFKernel(
        gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2), gp_orff.MonteCarlo(100)
    )
    model = VectorGP(x, y, gpytorch.likelihoods.MultitaskGaussianLikelihood(2), kernel)
    model.likelihood.noise, model.likelihood.task_noises = 1.1e-4, 1.1e-4
    value = evidence(model)
    double = copy.deepcopy(model).double()
    torch.testing.assert_close(value.double(), evidence(double), rtol=1e-5, atol=0)


def test_priors_and_constraints_are_those_of_the_kernel():
    potential = RBFKernel(
        lengthscale_prior=gpytorch.priors.GammaPrior(3.0, 6.0),
        lengthscale_constraint=gpytorch.constraints.Interval(0.1, 2.0),
    )
    kernel = gp_orff.ORFFKernel(
        gp_orff.CurlFreeKernel(potential, num_dims=2), gp_orff.MonteCarlo(24)
    )
    model = model_for(CASES["curl_free"](), 150, {}, kernel)
    prior = potential.lengthscale_prior.log_prob(potential.lengthscale).sum()
    plain = oracles.log_density(
        kernel(model.train_inputs[0]).to_dense() + dense_noise(model, 150),
        model.train_targets.flatten() - model.mean_module(model.train_inputs[0]).flatten(),
    )
    torch.testing.assert_close(evidence(model), plain + prior)
    with pytest.raises(RuntimeError, match="constraint"):
        potential.initialize(lengthscale=5.0)


@pytest.mark.slow
def test_training_raises_the_evidence_and_predictions_follow():
    """train → eval → train: caches never outlive the hyperparameters they were made with."""
    case = CASES["curl_free"]()
    model = model_for(case, 150, {})
    xs = draw(4, 2, seed=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    values = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = -evidence(model)
        loss.backward()
        optimizer.step()
        values.append(loss.item())
        model.eval()
        mean = model(xs).mean
        fresh = model_for(case, 150, {}, model.covar_module)
        fresh.load_state_dict(model.state_dict())
        fresh.eval()
        assert torch.equal(mean, fresh(xs).mean)
    assert values[-1] < values[0]


def test_new_training_data_replace_the_old():
    case = CASES["helmholtz"]()
    model, xs = model_for(case, 150, {}), draw(4, 2, seed=2)
    model.eval()
    before = model(xs).mean
    x, y = draw(170, 2, seed=7), draw(170, 2, seed=8)
    model.set_train_data(x, y, strict=False)
    expected = vector_gp(x, y, model.covar_module, noise=0.1)
    expected.eval()
    torch.testing.assert_close(model(xs).mean, expected(xs).mean)
    assert not torch.allclose(model(xs).mean, before)


@pytest.mark.parametrize("name", ["helmholtz", "separable"])
@pytest.mark.parametrize("regime", POINTS)
def test_gradients_with_respect_to_test_inputs(name, regime):
    case = CASES[name]()
    model = model_for(case, POINTS[regime], {})
    model.eval()
    xs = draw(3, 2, seed=2).requires_grad_()

    def moments(inputs):
        posterior = model(inputs)
        return posterior.mean, posterior.variance, posterior.covariance_matrix

    assert torch.autograd.gradcheck(moments, xs)


@pytest.mark.parametrize("name", ["helmholtz", "separable"])
@pytest.mark.parametrize("regime", POINTS)
def test_caches_keep_their_graph_when_asked(name, regime):
    """settings.detach_test_caches(False): predictions differentiate in the hyperparameters."""
    case = CASES[name]()
    model = model_for(case, POINTS[regime], {})
    x, xs = model.train_inputs[0], draw(3, 2, seed=2)
    model.eval()
    with gpytorch.settings.detach_test_caches(False):
        posterior = model(xs)
        found = gradient(posterior.mean.sum() + posterior.variance.sum(), model)
    noisy = case.covariance(model.covar_module.frequencies, x, x) + dense_noise(
        model, POINTS[regime]
    )
    mean, cov = oracles.condition(
        case.covariance(model.covar_module.frequencies, xs, xs),
        case.covariance(model.covar_module.frequencies, xs, x),
        noisy,
        (model.train_targets - model.mean_module(x)).flatten(),
    )
    total = mean.sum() + model.mean_module(xs).sum() + cov.diagonal().sum()
    expected = gradient(total, model)
    assert (found - expected).norm() <= 1e-8 * expected.norm()


def test_settings_of_prediction():
    case = CASES["curl_free"]()
    model, xs = model_for(case, 150, {}), draw(4, 2, seed=2)
    model.eval()
    expected = model(xs)
    with gpytorch.settings.skip_posterior_variances():
        skipped = model(xs)
    assert torch.equal(skipped.mean, expected.mean)
    assert skipped.lazy_covariance_matrix.to_dense().abs().max() == 0
    model.train()
    model.eval()
    with gpytorch.settings.fast_pred_var():
        fast = model(xs)
    assert torch.equal(fast.covariance_matrix, expected.covariance_matrix)
    with gpytorch.settings.prior_mode():
        prior = model(xs)
    torch.testing.assert_close(
        prior.covariance_matrix, case.covariance(model.covar_module.frequencies, xs, xs)
    )


def test_predictive_distribution_of_observations():
    case = CASES["helmholtz"]()
    for noise in NOISES.values():
        model, xs = model_for(case, 150, noise), draw(4, 2, seed=2)
        model.eval()
        latent, observed = model(xs), model.likelihood(model(xs))
        expected = latent.covariance_matrix + dense_noise(model, 4)
        torch.testing.assert_close(observed.covariance_matrix, expected)
        torch.testing.assert_close(observed.variance.flatten(), expected.diagonal())
        value = observed.log_prob(draw(4, 2, seed=5))
        reference = oracles.log_density(expected, draw(4, 2, seed=5) - latent.mean)
        torch.testing.assert_close(value, reference)


def test_batches_of_hyperparameters_equal_a_loop():
    shape = torch.Size([3])
    potential = RBFKernel(batch_shape=shape).double()
    potential.lengthscale = torch.tensor([0.6, 1.0, 1.5], dtype=torch.float64).view(3, 1, 1)
    rule = gp_orff.MonteCarlo(24, seed=1)
    batch = gp_orff.ORFFKernel(gp_orff.CurlFreeKernel(potential, num_dims=2), rule)
    x, y = draw(60, 2), draw(60, 2, seed=1)
    noise = torch.tensor([0.2, 0.1, 0.3], dtype=torch.float64)
    covariance = batch(x).evaluate_kernel()
    assert covariance.shape == (3, 120, 120)
    noisy = covariance.add_diagonal(noise.unsqueeze(-1))
    quad, logdet = noisy.inv_quad_logdet(y.reshape(1, -1, 1).expand(3, -1, 1), logdet=True)
    for i in range(3):
        single = gp_orff.ORFFKernel(gp_orff.CurlFreeKernel(RBFKernel().double(), num_dims=2), rule)
        single.base_kernel.base_kernel.lengthscale = potential.lengthscale[i].detach()
        one = single(x).evaluate_kernel()
        torch.testing.assert_close(covariance.to_dense()[i], one.to_dense(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(batch[i](x).to_dense(), one.to_dense())
        expected = one.add_diagonal(noise[i]).inv_quad_logdet(y.reshape(-1, 1), logdet=True)
        torch.testing.assert_close((quad[i], logdet[i]), expected)


def test_operators_between_slices_of_points():
    case = CASES["helmholtz"]()
    orff, x = orff_of(case), draw(10, 2)
    covariance = orff(x).evaluate_kernel()
    noisy = covariance.add_diagonal(torch.tensor(0.3, dtype=torch.float64))
    assert isinstance(covariance, FeatureCovariance)
    assert isinstance(noisy, NoisyFeatureCovariance)
    dense = covariance.to_dense()
    white = dense + 0.3 * torch.eye(20, dtype=torch.float64)
    for rows, cols in [
        (slice(4, 10), slice(0, 20)),
        (slice(2, 8), slice(2, 8)),
        (slice(1, 4),) * 2,
    ]:
        torch.testing.assert_close(to_dense(covariance[rows, cols]), dense[rows, cols])
        torch.testing.assert_close(to_dense(noisy[rows, cols]), white[rows, cols])
    assert isinstance(covariance[2:8, 4:6], FeatureCovariance)
    assert isinstance(noisy[2:8, 2:8], NoisyFeatureCovariance)
    torch.testing.assert_close(covariance[3], dense[3])
    torch.testing.assert_close((covariance * 2.0).to_dense(), 2 * dense)
    torch.testing.assert_close((covariance * -2.0).to_dense(), -2 * dense)
    torch.testing.assert_close((noisy * 2.0).to_dense(), 2 * white)
    vectors = draw(20, 3)
    torch.testing.assert_close(noisy @ vectors, white @ vectors)
    torch.testing.assert_close(noisy.solve(vectors), torch.linalg.solve(white, vectors))
    torch.testing.assert_close(noisy.logdet(), torch.logdet(white))
    quad = (vectors * torch.linalg.solve(white, vectors)).sum(0)
    torch.testing.assert_close(noisy.inv_quad(vectors, reduce_inv_quad=False), quad)


@pytest.mark.parametrize("name", ["helmholtz", "separable", "scalar"])
@pytest.mark.parametrize("regime", POINTS)
def test_solves_by_the_structured_algebra(name, regime):
    case = CASES[name]()
    model = model_for(case, POINTS[regime], {})
    noisy = model.likelihood(model(*model.train_inputs)).lazy_covariance_matrix.evaluate_kernel()
    assert isinstance(noisy, NoisyFeatureCovariance)
    vectors = draw(noisy.shape[-1], 3)
    expected = torch.linalg.solve(noisy.to_dense(), vectors)
    torch.testing.assert_close(noisy.solve(vectors), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(noisy.solve(vectors[:, 0]), expected[:, 0], rtol=1e-9, atol=1e-9)


def test_unrecognised_noise_is_correct_and_says_so():
    """Noise that is correlated between points."""
    case = CASES["scalar"]()
    x, y, root = draw(20, 2), draw(20, seed=1), draw(20, 20, seed=2)
    kernel, noise = orff_of(case), 0.1 * torch.eye(20) + root @ root.mT / 20
    with pytest.warns(
        PerformanceWarning, match=r"not a covariance of features plus noise that is indep.*cubic"
    ):
        noisy = kernel(x).evaluate_kernel() + to_linear_operator(noise)
    wanted = oracles.log_density(case.covariance(kernel.frequencies, x, x) + noise, y)
    law = gpytorch.distributions.MultivariateNormal(torch.zeros(20).double(), noisy)
    torch.testing.assert_close(law.log_prob(y), wanted)
