"""`FieldGP` in BoTorch: posteriors compared with dense algebra, and acquisition functions.

`test_botorch.py` runs this file.
"""

import math
from copy import deepcopy

import gpytorch
import pytest
import torch
from botorch.acquisition import (
    LogExpectedImprovement,
    qKnowledgeGradient,
    qLogExpectedImprovement,
    qLogNoisyExpectedImprovement,
    qNegIntegratedPosteriorVariance,
)
from botorch.acquisition.objective import GenericMCObjective, ScalarizedPosteriorTransform
from botorch.exceptions import InputDataError
from botorch.fit import fit_gpytorch_mll
from botorch.models import ModelListGP
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator import to_dense

import gp_orff
from gp_orff.botorch import FieldGP, Standardize

SPEED = GenericMCObjective(lambda flow, X=None: flow.norm(dim=-1))
GRID = gp_orff.Grid(domain=((-0.2, 1.2), (-0.2, 1.2)), tolerance=1e-9)


def data(n=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    noise = 0.05 * torch.randn(n, 2, generator=generator, dtype=torch.float64)
    return x, 3.0 + 20 * torch.sin(6 * x.flip(-1)) + noise


def kernel(scale=1.0):
    field = gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)
    field.base_kernel.lengthscale = 0.4
    kernel = ScaleKernel(field)
    kernel.outputscale = scale
    return kernel


def model(n=12, scale=1.0, noise=0.01, **options):
    made = FieldGP(*data(n), kernel(scale), **options)
    made.likelihood.noise = noise
    return made.eval()


def places(n=4, seed=1):
    return torch.rand(n, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("rule", "bound"), [(None, 1e-9), (GRID, 1e-5)])
def test_the_posterior_is_that_of_dense_algebra(rule, bound):
    (x, y), xs = data(), places()
    found = model(outcome_transform=None, frequencies=rule).posterior(xs)
    prior = kernel().double()
    k, ks, kss = (to_dense(prior(*pair)).detach() for pair in ((x, x), (xs, x), (xs, xs)))
    gain = ks @ torch.linalg.inv(k + 0.01 * torch.eye(len(k), dtype=k.dtype))
    mean = (gain @ y.flatten()).reshape(-1, 2)  # of a constant mean that starts at zero
    torch.testing.assert_close(found.mean, mean, rtol=bound, atol=bound * 20)
    covariance = kss - gain @ ks.mT
    torch.testing.assert_close(
        found.distribution.covariance_matrix, covariance, rtol=bound, atol=10 * bound
    )
    noisy = model(outcome_transform=None, frequencies=rule).posterior(xs, observation_noise=True)
    torch.testing.assert_close(noisy.variance, found.variance + 0.01, rtol=bound, atol=10 * bound)


def test_all_components_are_divided_by_one_number():
    x, y = data()
    scaled = model().posterior(places())
    s = y.var(0).mean().sqrt()
    plain = FieldGP(x, y - y.mean(0), kernel(s.item() ** 2), outcome_transform=None).eval()
    plain.likelihood.noise = 0.01 * s.item() ** 2
    expected = plain.posterior(places())
    torch.testing.assert_close(scaled.mean, expected.mean + y.mean(0), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(scaled.variance, expected.variance, rtol=1e-7, atol=1e-7)


def test_standardize():
    y = torch.tensor([[1.0, 30.0], [3.0, torch.nan], [5.0, 10.0]], dtype=torch.float64)
    transform = Standardize(2)
    transformed, variances = transform(y, torch.ones_like(y))
    s = math.sqrt((4.0 + 200.0) / 2)  # the mean of the variances of both, without NaN
    torch.testing.assert_close(transformed[0], torch.tensor([-2.0, 10.0]).double() / s)
    torch.testing.assert_close(variances, torch.full_like(y, s**-2))
    torch.testing.assert_close(transform.eval().untransform(transformed)[0], y, equal_nan=True)
    assert Standardize(2)(torch.ones(3, 2))[0].abs().max() == 0
    with pytest.raises(ValueError, match="divided by one number"):
        Standardize(2, outputs=[0])


@pytest.mark.parametrize("rule", [None, GRID])
def test_further_observations(rule):
    """The model of all data, with the same hyperparameters."""
    x, y = data()
    part = FieldGP(x[:8], y[:8], kernel(), outcome_transform=None, frequencies=rule).eval()
    part.likelihood.noise = 0.01
    more = part.condition_on_observations(x[8:], y[8:])
    expected = model(outcome_transform=None, frequencies=rule).posterior(places())
    torch.testing.assert_close(more.posterior(places()).mean, expected.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        more.posterior(places()).variance, expected.variance, rtol=1e-4, atol=1e-5
    )


def test_some_of_the_components():
    whole = model()
    expected = whole.posterior(places())
    second = whole.subset_output([1])
    assert second.num_outputs == 1
    found = second.posterior(places())
    torch.testing.assert_close(found.mean, expected.mean[:, 1:])
    torch.testing.assert_close(found.variance, expected.variance[:, 1:])
    swapped = whole.subset_output([1, -2]).posterior(places())
    torch.testing.assert_close(swapped.mean, expected.mean.flip(-1))
    torch.testing.assert_close(
        swapped.distribution.covariance_matrix,
        expected.distribution.covariance_matrix.unflatten(0, (4, 2))
        .flip(1)
        .flatten(0, 1)
        .unflatten(1, (4, 2))
        .flip(2)
        .flatten(1, 2),
    )
    assert whole.subset_output([1, 0]).subset_output([0]).posterior(places()).mean.equal(found.mean)
    with pytest.raises(ValueError, match="indices of the 2 components"):
        whole.subset_output([2])
    with pytest.raises(NotImplementedError, match="condition the complete model first"):
        second.condition_on_observations(*data(3))


def test_expected_improvement_of_a_component():
    """In closed form, from mean and variance."""
    fitted, best = model(), 15.0
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    transform = ScalarizedPosteriorTransform(weights)
    found = LogExpectedImprovement(fitted, best, posterior_transform=transform)(places()[:, None])
    moments = fitted.posterior(places())
    mean, sd = moments.mean[:, 0], moments.variance[:, 0].sqrt()
    normal, u = torch.distributions.Normal(0.0, 1.0), (mean - best) / sd
    expected = sd * (normal.log_prob(u).exp() + u * normal.cdf(u))
    torch.testing.assert_close(found.exp(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", [None, GRID])
def test_acquisition_functions(rule):
    """All that the page names are finite and have gradients; one against draws of a posterior."""
    x, y = data()
    fitted, sampler = model(frequencies=rule), SobolQMCNormalSampler(torch.Size([32]), seed=0)
    candidates = places(2)[None].requires_grad_()
    best = y.norm(dim=-1).max()
    parts = {"objective": SPEED, "sampler": sampler}
    functions = [
        qLogExpectedImprovement(fitted, best, **parts),
        qLogNoisyExpectedImprovement(fitted, x, **parts),
        qNegIntegratedPosteriorVariance(
            fitted, places(8), posterior_transform=ScalarizedPosteriorTransform(torch.ones(2).to(x))
        ),
    ]
    for function in functions:
        value = function(candidates)
        (gradient,) = torch.autograd.grad(value.sum(), candidates)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0
    samples = fitted.posterior(candidates).rsample(torch.Size([4096]))
    improvement = (samples.norm(dim=-1).amax(-1) - best).clamp_min(0).mean().log()
    many = SobolQMCNormalSampler(torch.Size([4096]), seed=0)
    found = qLogExpectedImprovement(fitted, best, objective=SPEED, sampler=many)(candidates)
    assert abs(found.item() - improvement.item()) < 0.1  # of 4096 draws
    knowledge = qKnowledgeGradient(fitted, num_fantasies=4, objective=SPEED)
    assert knowledge(places(5)[None]).isfinite().all()


def test_in_a_list_of_models():
    both = ModelListGP(model(), model(n=6))
    assert both.num_outputs == 4
    torch.testing.assert_close(
        both.posterior(places()).mean,
        torch.cat([one.posterior(places()).mean for one in both.models], dim=-1),
    )


def test_training_and_files():
    fitted = model()
    before = ExactMarginalLogLikelihood(fitted.likelihood, fitted)
    fitted.train()
    start = before(fitted(*fitted.train_inputs), fitted.train_targets).item()
    fit_gpytorch_mll(before)
    fitted.train()
    assert before(fitted(*fitted.train_inputs), fitted.train_targets).item() > start
    fresh = FieldGP(*data(), kernel())
    fresh.load_state_dict(fitted.state_dict())
    expected = deepcopy(fitted).posterior(places()).mean
    torch.testing.assert_close(fresh.posterior(places()).mean, expected)


def test_a_fit_on_a_grid_reaches_the_optimum_of_the_exact_kernel():
    """From an eighth of the best lengthscale: the grid follows."""
    values = []
    for rule in (None, gp_orff.Grid(domain=((-0.2, 1.2), (-0.2, 1.2)), tolerance=1e-6)):
        field = kernel()
        field.base_kernel.base_kernel.lengthscale = 0.05
        made = FieldGP(*data(), field, frequencies=rule)
        mll = ExactMarginalLogLikelihood(made.likelihood, made)
        with gpytorch.settings.fast_computations(True, True, True):
            fit_gpytorch_mll(mll)
            made.train()
            values.append(mll(made(*made.train_inputs), made.train_targets).item())
    assert abs(values[1] - values[0]) < 1e-3  # nats a number


def test_shapes_that_do_not_fit():
    x, y = data()
    with pytest.raises(ValueError, match=r"train_Y of shape \(12, 2\)"):
        FieldGP(x, y[:, :1], kernel())
    with pytest.raises(ValueError, match="SingleTaskGP"):
        FieldGP(x, y[:, :1], RBFKernel())


def test_known_variances():
    """Of each number of the data, against dense algebra in the units of the data."""
    x, y = data()
    s = y.var(0).mean().sqrt()
    variances = torch.linspace(0.5, 9.0, 24, dtype=torch.float64).reshape(12, 2)
    known = FieldGP(x[:8], y[:8], kernel(), train_Yvar=variances[:8], outcome_transform=None).eval()
    more = known.condition_on_observations(x[8:], y[8:], noise=variances[8:])
    whole = FieldGP(x, y, kernel(), train_Yvar=variances, outcome_transform=None).eval()
    scaled = FieldGP(x, y - y.mean(0), kernel(), train_Yvar=variances).eval()
    xs = places()
    k, ks = (to_dense(kernel().double()(at, x)).detach() for at in (x, xs))
    for found, factor, targets in ((whole, 1.0, y), (more, 1.0, y), (scaled, s, y - y.mean(0))):
        sigma = factor**2 * k + torch.diag(variances.flatten())
        mean = factor**2 * ks @ torch.linalg.solve(sigma, targets.flatten())
        torch.testing.assert_close(found.posterior(xs).mean.flatten(), mean, rtol=1e-5, atol=1e-5)
    noisy = scaled.posterior(xs, observation_noise=True).variance
    added = noisy - scaled.posterior(xs).variance
    torch.testing.assert_close(added, variances.mean(0).expand(4, 2), rtol=1e-6, atol=1e-6)
    fantasies = scaled.fantasize(xs, SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasies.posterior(xs).mean.shape == (3, 4, 2)
    batch = scaled.fantasize(xs.expand(5, 4, 2), SobolQMCNormalSampler(torch.Size([3]), seed=0))
    one, all_five = fantasies.posterior(xs).variance, batch.posterior(xs).variance
    torch.testing.assert_close(all_five, one.unsqueeze(1).expand_as(all_five), rtol=1e-6, atol=1e-6)
    other = FieldGP(x, 2 * y, kernel(), train_Yvar=4 * variances)
    other.load_state_dict(scaled.state_dict())  # keeps its data, in the scale of the other model
    torch.testing.assert_close(other.likelihood.noise, 4 * scaled.likelihood.noise)
    with pytest.raises(ValueError, match="omit one of them"):
        FieldGP(x, y, kernel(), train_Yvar=variances, likelihood=whole.likelihood)
    with pytest.raises(ValueError, match="expected train_Yvar="):
        FieldGP(x, y, kernel(), likelihood=whole.likelihood)


def test_the_noise_of_new_observations():
    """Variances that are passed are added, in the scale of the transform."""
    x, y = data()
    fitted, noise = model(), torch.rand(4, 2, dtype=torch.float64)
    added = fitted.posterior(places(), observation_noise=noise).variance
    s = y.var(0).mean()
    torch.testing.assert_close(added - fitted.posterior(places()).variance, noise * s)
    with pytest.raises(ValueError, match='"standardize", None, or'):
        FieldGP(x, y, kernel(), outcome_transform="Standardise")
    with pytest.raises(InputDataError, match="NaN"):
        FieldGP(x, y * torch.nan, kernel())
