"""Warnings of random features with a large error, compared with exact posteriors."""

import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gp_orff
from gp_orff.inference.posteriors import halves
from tests.support.fields import draw
from tests.support.models import centred_gp, orff_of
from tests.support.registry import CASES, RULES


def field_problem(potential, extent, noise, points=300):
    """A curl-free field drawn from the prior, noisy at `points`; the exact posterior elsewhere."""
    kernel = gp_orff.CurlFreeKernel(potential.double(), num_dims=2)
    potential.lengthscale = 1.0
    generator = torch.Generator().manual_seed(0)
    x = extent * torch.rand(points + 100, 2, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        covariance = kernel(x).to_dense()
        root = torch.linalg.cholesky(covariance + 1e-9 * torch.eye(len(covariance)).double())
    field = (root @ draw(len(root), seed=1)).reshape(-1, 2)
    sd = noise * covariance.diagonal().mean().sqrt().item()
    y = field[:points] + sd * draw(points, 2, seed=2)
    return kernel, x[:points], y, x[points:], sd**2


def posterior(kernel, x, y, xs, noise):
    model = centred_gp(kernel, x, y, noise).eval()
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10_000):
        return model(xs).mean, model(xs).stddev


PROBLEMS = {  # (potential, extent, noise, frequencies) → overconfident?
    "rough_and_precise": (lambda: MaternKernel(nu=2.5), 5.0, 0.03, 200, True),
    "too_few": (lambda: RBFKernel(), 10.0, 0.1, 50, True),
    "smooth_and_many": (lambda: RBFKernel(), 3.0, 0.3, 400, False),
    "noisy": (lambda: RBFKernel(), 5.0, 1.0, 200, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("rule", RULES)
def test_overconfidence_is_told_and_only_then(name, rule):
    potential, extent, noise, number, expected = PROBLEMS[name]
    kernel, x, y, xs, variance = field_problem(potential(), extent, noise)
    orff = gp_orff.ORFFKernel(kernel, RULES[rule](number))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean, sd = posterior(orff, x, y, xs, variance)
    told = [w for w in caught if issubclass(w.category, gp_orff.FeatureWarning)]
    assert len(told) == (1 if expected else 0)
    exact_mean, exact_sd = posterior(kernel, x, y, xs, variance)
    true_ratio = ((mean - exact_mean).square().mean() / sd.square().mean()).sqrt()
    if expected:
        assert "more frequencies" in str(told[0].message)
        assert true_ratio > 1.5
        assert (sd / exact_sd).median() < 0.9
    else:
        assert true_ratio < 1.1


def test_the_check_can_be_switched_off():
    potential, extent, noise, number, _ = PROBLEMS["too_few"]
    kernel, x, y, xs, variance = field_problem(potential(), extent, noise)
    orff = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(number))
    with gp_orff.settings.check_features(False):
        posterior(orff, x, y, xs, variance)  # warnings are errors here
    assert gp_orff.settings.check_features.on()


@pytest.mark.parametrize("name", CASES)
def test_halves_are_two_estimates_of_the_same_kernel(name):
    """Their mean is the kernel of all features, constants kept in both."""
    case = CASES[name]()
    orff = orff_of(case)
    x = draw(5, case.num_dims)
    expansion = orff(x).evaluate_kernel().expansion
    (first, own), (second, others) = halves(expansion)
    constants = len(set(own.tolist()) & set(others.tolist()))
    share = (len(own) - constants) / (len(own) + len(others) - 2 * constants)
    assert share == pytest.approx(0.5, abs=0.05)

    def covariance(part):
        features = part.features(x)
        return features @ features.mT

    average = share * covariance(first) + (1 - share) * covariance(second)
    torch.testing.assert_close(average, covariance(expansion))
    assert not torch.allclose(covariance(first), covariance(second))
    for half, columns in halves(expansion):
        count = len(columns) // 2
        assert half.phi.omega.shape[-2] == count
        torch.testing.assert_close(half.phi.omega, expansion.phi.omega[..., columns[:count], :])
