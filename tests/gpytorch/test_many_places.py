"""Predictions of an `ExactGP` at many places, without the joint covariance of all places."""

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel

import gp_orff

KERNELS = {
    "field": lambda: ScaleKernel(gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2)),
    "separable": lambda: gp_orff.SeparableKernel(RBFKernel(), torch.eye(2) + 0.3),
    "grid": lambda: gp_orff.ORFFKernel(
        gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2),
        gp_orff.Grid(domain=((-0.2, 1.2), (-0.2, 1.2)), tolerance=1e-6),
    ),
}


class Flow(gpytorch.models.ExactGP):
    def __init__(self, kernel, n=40):
        x = torch.rand(n, 2, generator=torch.Generator().manual_seed(0)).double()
        likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, rank=1)
        super().__init__(x, torch.sin(6 * x.flip(-1)), likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), num_tasks=2)
        self.covar_module = kernel
        self.double()

    def forward(self, x):
        return MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))


def places(n):
    return torch.rand(n, 2, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
def test_marginals_and_covariances_are_those_of_few_places(kernel, fast):
    model, xs = Flow(KERNELS[kernel]()).eval(), places(600)
    with torch.no_grad(), gpytorch.settings.fast_pred_var(fast):
        many = model(xs)
        few = [model(xs[:100]), model(xs[100:200])]
        noisy = model.likelihood(many)
        expected = model.likelihood(few[0])
    for part, rows in zip(few, (slice(0, 100), slice(100, 200)), strict=True):
        torch.testing.assert_close(many.mean[rows], part.mean, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(many.variance[rows], part.variance, rtol=1e-5, atol=1e-7)
    joint = many.covariance_matrix[:200, :200]
    torch.testing.assert_close(joint, few[0].covariance_matrix, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(noisy.variance[:100], expected.variance, rtol=1e-5, atol=1e-7)


def test_no_covariance_of_all_places_is_evaluated(monkeypatch):
    model, sizes = Flow(KERNELS["field"]()).eval(), []
    kernel = type(model.covar_module.base_kernel)
    forward = kernel.forward

    def seen(self, x1, x2, diag=False, **kwargs):
        sizes.append(0 if diag else x1.shape[-2] * x2.shape[-2])
        return forward(self, x1, x2, diag=diag, **kwargs)

    monkeypatch.setattr(kernel, "forward", seen)
    with torch.no_grad():
        posterior = model(places(5000))
        _ = posterior.mean, posterior.variance
    assert max(sizes) < 5000 * 5000 / 10


@pytest.mark.parametrize("kernel", KERNELS)
def test_covariances_that_arrive_unevaluated(kernel):
    """As they will from a later gpytorch."""
    model, xs = Flow(KERNELS[kernel]()).eval(), places(7)
    with torch.no_grad(), gpytorch.settings.fast_pred_var():
        expected = model(xs)
        with gpytorch.settings.lazily_evaluate_kernels(True):
            own, cross = model.covar_module(xs), model.covar_module(xs, model.train_inputs[0])
        mean = model.mean_module(xs).flatten()
        mean, covariance = model.prediction_strategy.exact_prediction(mean, own, cross)
    torch.testing.assert_close(mean, expected.mean.flatten(), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(
        covariance.to_dense(), expected.covariance_matrix, rtol=1e-5, atol=1e-8
    )


def test_gradients_at_many_places():
    """They take the covariance of all places, as in gpytorch."""
    model, xs = Flow(KERNELS["field"]()).eval(), places(300).requires_grad_()
    (gradient,) = torch.autograd.grad(model(xs).variance.sum(), xs)
    few = xs.detach()[:5].requires_grad_()
    (expected,) = torch.autograd.grad(model(few).variance.sum(), few)
    torch.testing.assert_close(gradient[:5], expected, rtol=1e-5, atol=1e-7)


def test_kernels_of_gpytorch_are_not_affected():
    kernel = MultitaskKernel(RBFKernel(), num_tasks=2, rank=1)
    model = Flow(kernel).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(places(600)).mean[:50], model(places(600)[:50]).mean, rtol=1e-4, atol=1e-4
        )
