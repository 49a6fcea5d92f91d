"""The LinearOperators of this package in the test suites of linear_operator, and further tests."""

import math
import unittest

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from linear_operator import to_dense
from linear_operator.test.linear_operator_test_case import (
    LinearOperatorTestCase,
    RectangularLinearOperatorTestCase,
)

import gp_orff
from gp_orff.exact_gp.operators import (
    FeatureCovariance,
    NoisyFeatureCovariance,
    PaddedRoot,
    PosteriorCovariance,
)
from tests.support import oracles
from tests.support.fields import draw
from tests.support.models import NOISES, POINTS, dense_noise, gradient, model_for, orff_of
from tests.support.registry import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore::gp_orff.FeatureWarning"),
    # linear_operator's own fall-backs
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.PerformanceWarning"),
]


def noisy_operator(x, frequencies=6):
    potential = RBFKernel(batch_shape=x.shape[:-2]).to(x.dtype)
    rule = gp_orff.MonteCarlo(frequencies)
    orff = gp_orff.ORFFKernel(gp_orff.CurlFreeKernel(potential, num_dims=2), rule).to(x.dtype)
    expansion = orff(x).evaluate_kernel().expansion
    noise = torch.tensor([[0.5, 0.1], [0.1, 0.4]], dtype=x.dtype).expand(*x.shape[:-2], 2, 2)
    tensors = [t.expand(*x.shape[:-2], *t.shape[-2:]) for t in expansion.tensors]
    parts = [t.detach().clone().requires_grad_() for t in (x, noise, *tensors)]
    return NoisyFeatureCovariance(*parts, rebuild=expansion.rebuild)


def dense_of(operator):
    """Σ_k of cosines and sines, from the operator's own tensors, with a graph."""
    if isinstance(operator, NoisyFeatureCovariance):
        p = operator.num_outputs
        eye = torch.eye(operator.latent.x1.shape[-2], dtype=operator.dtype)
        white = torch.einsum("nm,...ij->...nimj", eye, operator.noise)  # symmetrised
        return dense_of(operator.latent) + white.reshape(*operator.shape[:-2], p * len(eye), -1)
    full = operator.expansion.general()
    left, right = (
        torch.cat([(x @ full.phi.omega.mT).cos(), (x @ full.phi.omega.mT).sin()], dim=-1)
        for x in (operator.x1, operator.x2)
    )
    blocks = torch.einsum(
        "...nf,...mf,...fi,...fj->...nimj",
        left[..., full.columns],
        right[..., full.columns],
        full.directions,
        full.directions,
    )
    return blocks.reshape(operator.shape)


class NoisyFeatures(LinearOperatorTestCase, unittest.TestCase):
    """K + I⊗Σ of 4 points and 2 outputs: the weight-space algebra."""

    seed = 0
    should_call_cg = should_call_lanczos = False  # solves and roots are the weight-space algebra
    should_call_lanczos_diagonalization = True

    def create_linear_op(self):
        return noisy_operator(draw(4, 2).float())

    def evaluate_linear_op(self, linear_op):
        return dense_of(linear_op)


class NoisyFeaturesBatch(NoisyFeatures):
    def create_linear_op(self):
        return noisy_operator(draw(2, 4, 2).float())


class NoisyFeaturesPrimal(NoisyFeatures):
    """More numbers than features.

    Three tests do not apply: K has rank F < N·p, so that the smallest eigenvalues are equal, their
    eigenvectors, which `test_eigh` and `test_svd` compare, are any basis (which one depends on the
    processor), and Lanczos stops early.
    """

    def test_eigh(self):
        self.skipTest("equal eigenvalues")

    def test_svd(self):
        self.skipTest("equal eigenvalues")

    def test_diagonalization(self, symeig=False):
        self.skipTest("equal eigenvalues")

    def create_linear_op(self):
        return noisy_operator(draw(8, 2).float(), frequencies=2)


class CrossFeatures(RectangularLinearOperatorTestCase, unittest.TestCase):
    """K(x₁, x₂) between different points."""

    seed = 0

    def create_linear_op(self):
        latent = noisy_operator(draw(4, 2).float()).latent
        tensors = latent.expansion.tensors
        other = draw(3, 2, seed=1).float().requires_grad_()
        return FeatureCovariance(latent.x1, other, *tensors, rebuild=latent.expansion.rebuild)

    def evaluate_linear_op(self, linear_op):
        return dense_of(linear_op)


NOISY = [(name, noise) for name in ("helmholtz", "separable") for noise in NOISES]


@pytest.mark.parametrize(("name", "noise"), [*NOISY, ("scalar", "global")])
@pytest.mark.parametrize("regime", POINTS)
def test_products_and_solves_with_every_noise(name, regime, noise):
    case = CASES[name]()
    model = model_for(case, POINTS[regime], NOISES[noise])
    noisy = model.likelihood(model(*model.train_inputs)).lazy_covariance_matrix.evaluate_kernel()
    assert isinstance(noisy, NoisyFeatureCovariance)
    x = model.train_inputs[0]
    dense = case.covariance(model.covar_module.frequencies, x, x) + dense_noise(model, len(x))
    vectors = draw(noisy.shape[-1], 3)
    torch.testing.assert_close(noisy @ vectors, dense @ vectors, rtol=1e-10, atol=1e-10)
    expected = torch.linalg.solve(dense, vectors)
    torch.testing.assert_close(noisy.solve(vectors), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(noisy.solve(vectors[:, 0]), expected[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(noisy.logdet(), torch.logdet(dense), rtol=1e-10, atol=1e-10)
    doubled = noisy.add_diagonal(torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(doubled.to_dense(), dense + 0.3 * torch.eye(len(dense)).double())


@pytest.mark.parametrize("regime", POINTS)
def test_slices_of_a_posterior(regime):
    model = model_for(CASES["helmholtz"](), POINTS[regime], {}).eval()
    covariance = model(draw(6, 2, seed=2)).lazy_covariance_matrix
    dense = covariance.to_dense()
    for rows, cols in [
        (slice(0, 4), slice(6, 12)),
        (slice(2, 8), slice(2, 8)),
        (slice(1, 4), slice(3, 12)),
    ]:
        torch.testing.assert_close(to_dense(covariance[rows, cols]), dense[rows, cols])
    assert isinstance(covariance[2:8, 2:8], PosteriorCovariance)


def test_padded_roots():
    root = draw(7, 3)
    operator = PaddedRoot(root)
    padded = torch.cat([root, torch.zeros(7, 4, dtype=torch.float64)], dim=-1)
    vectors = draw(7, 2, seed=1)
    torch.testing.assert_close(operator.to_dense(), padded)
    torch.testing.assert_close(operator @ vectors, padded @ vectors)
    torch.testing.assert_close(operator.mT @ vectors, padded.mT @ vectors)
    columns = draw(7, 2, seed=2).requires_grad_()
    (slope,) = torch.autograd.grad(operator @ columns, columns, vectors)
    torch.testing.assert_close(slope, padded.mT @ vectors)


def test_scaling_features_of_a_separable_kernel():
    """ScaleKernel over ORFFKernel(MultitaskKernel): the variance, not the amplitude, is scaled."""
    case = CASES["separable"]()
    kernel = ScaleKernel(orff_of(case)).double()
    kernel.outputscale = 1.7
    x = draw(5, 2)
    expected = 1.7 * case.covariance(kernel.base_kernel.frequencies, x, x)
    torch.testing.assert_close(kernel(x).to_dense(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("regime", POINTS)
@pytest.mark.parametrize("noise", ["global", "rank_1_and_global"])
def test_samples_of_observations_have_their_full_variance(regime, noise):
    """Also where n·p > 800 and gpytorch alone would use a rank-limited root."""
    model = model_for(CASES["helmholtz"](), POINTS[regime], NOISES[noise]).eval()
    count = 2000
    observed = model.likelihood(model(draw(450, 2, seed=2)))
    torch.manual_seed(0)
    plain = observed.rsample(torch.Size([count]))
    with_base = observed.rsample(torch.Size([count]), base_samples=draw(count, 450, 2, seed=3))
    probe = draw(900, seed=4) / 30
    expected = probe @ observed.covariance_matrix @ probe
    for samples in (plain, with_base):
        ratio = (samples - observed.mean).square().mean(0) / observed.variance
        # a mean of n squares of normal variables has relative standard error √(2/n)
        assert (ratio.mean() - 1).abs() < 0.01
        assert (ratio - 1).abs().max() < 6 * math.sqrt(2 / count)
        projected = (samples - observed.mean).reshape(count, -1) @ probe
        assert abs(projected.var() / expected - 1) < 5 * math.sqrt(2 / count)


def test_densities_of_many_observations_are_exact():
    model = model_for(CASES["curl_free"](), 150, {}).eval()
    xs, ys = draw(450, 2, seed=2), draw(450, 2, seed=3)
    observed = model.likelihood(model(xs))
    expected = oracles.log_density(observed.covariance_matrix, ys - observed.mean)
    torch.testing.assert_close(observed.log_prob(ys), expected)


@pytest.mark.parametrize("name", ["helmholtz", "separable"])
@pytest.mark.parametrize("regime", POINTS)
def test_caches_with_a_graph_reach_every_use_of_the_covariance(name, regime):
    """settings.detach_test_caches(False), through gpytorch's own functions of the covariance."""
    case = CASES[name]()
    model = model_for(case, POINTS[regime], {}).eval()
    x, xs, ys = model.train_inputs[0], draw(40, 2, seed=2), draw(40, case.num_outputs, seed=3)
    with gpytorch.settings.detach_test_caches(False), gpytorch.settings.max_cholesky_size(10_000):
        found = gradient(model.likelihood(model(xs)).log_prob(ys), model)
    frequencies = model.covar_module.frequencies
    mean, cov = oracles.condition(
        case.covariance(frequencies, xs, xs),
        case.covariance(frequencies, xs, x),
        case.covariance(frequencies, x, x) + dense_noise(model, len(x)),
        (model.train_targets - model.mean_module(x)).flatten(),
    )
    residuals = ys.flatten() - mean - model.mean_module(xs).flatten()
    expected = gradient(oracles.log_density(cov + dense_noise(model, 40), residuals), model)
    assert (found - expected).norm() <= 1e-7 * expected.norm()


def test_posteriors_are_detached_by_default():
    model = model_for(CASES["helmholtz"](), 150, {}).eval()
    posterior = model(draw(4, 2, seed=2))
    assert not model.prediction_strategy.weight_posterior.requires_grad
    assert not posterior.variance.requires_grad


def test_equal_but_different_leaves_each_get_their_gradient():
    orff = orff_of(CASES["curl_free"]())
    x = draw(5, 2)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    covariance = orff(left, right).evaluate_kernel()
    assert not covariance.symmetric
    vectors = draw(10, 1)
    found = torch.autograd.grad((vectors.mT @ (covariance @ vectors)).sum(), [left, right])
    torch.testing.assert_close(found[0], found[1])
    assert found[0].norm() > 0


def test_expansion_of_the_noisy_operator_to_a_batch():
    noisy = noisy_operator(draw(4, 2))
    for batch in (noisy.expand(3, 8, 8), noisy.repeat(3, 1, 1)):
        torch.testing.assert_close(batch.logdet(), torch.logdet(dense_of(noisy)).expand(3))
