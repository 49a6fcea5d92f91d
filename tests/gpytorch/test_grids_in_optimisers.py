"""Grids under large changes of lengthscales: training reaches the optimum of the exact kernel."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff
from tests.support.fields import draw, uniform
from tests.support.models import evidence, vector_gp

X = uniform(40, 2, seed=1)
XS = uniform(5, 2, seed=3)
MOST = 0.02  # nats: a grid of tolerance 1e-5 changes the evidence of 80 numbers by less


def data(frequency):
    return torch.sin(frequency * X.flip(-1)) + 0.1 * draw(40, 2, seed=2)


def model_at(lengthscale, y, rule=None):
    """A divergence-free model whose variance is about one."""
    field = ScaleKernel(gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2))
    field.base_kernel.lengthscale, field.outputscale = lengthscale, lengthscale**2
    kernel = field if rule is None else gp_orff.ORFFKernel(field, rule)
    model = vector_gp(X, y, kernel, 0.3, has_task_noise=False)
    return model, field


def trained(model):
    """By L-BFGS with line searches."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=25, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = -mll(model(X), model.train_targets)
        loss.backward()
        return loss

    model.train()
    optimizer.step(closure)
    return evidence(model).item()


@pytest.mark.parametrize(("frequency", "start"), [(6.0, 0.15), (6.0, 1.0)])
def test_the_optimum_is_that_of_the_exact_kernel(frequency, start):
    """From a third and from twice the best lengthscale, without a warning."""
    y = data(frequency)
    (exact, field), (grid, inner) = model_at(start, y), model_at(start, y, gp_orff.Grid.for_data(X))
    best, reached = trained(exact), trained(grid)
    assert not 0.7 * start < field.base_kernel.lengthscale < 1.4 * start
    assert abs(reached - best) < MOST
    ratio = inner.base_kernel.lengthscale / field.base_kernel.lengthscale
    assert abs(ratio.item() - 1) < 0.01
    exact.load_state_dict(
        {
            name.replace("covar_module.base_kernel.", "covar_module.", 1): value
            for name, value in grid.state_dict().items()
            if "frequencies" not in name
        }
    )
    for part in ("mean", "variance"):
        torch.testing.assert_close(
            getattr(grid.eval()(XS), part), getattr(exact.eval()(XS), part), rtol=0, atol=1e-3
        )
    fresh, _ = model_at(start, y, gp_orff.Grid.for_data(X))
    fresh.load_state_dict(grid.state_dict())
    torch.testing.assert_close(fresh.eval()(XS).variance, grid(XS).variance)


def test_only_training_changes_the_grid():
    """Predictions of a model and covariances of a kernel keep it, with a warning."""
    model, field = model_at(0.5, data(3.0), gp_orff.Grid.for_data(X))
    before = [buffer.clone() for buffer in model.covar_module.frequencies.buffers()]

    def changed():
        after = list(model.covar_module.frequencies.buffers())
        return not all(map(torch.equal, before, after))

    evidence(model)
    assert not changed()
    field.base_kernel.lengthscale = 0.2
    with pytest.warns(gp_orff.GridWarning, match="outside its range"):
        model.eval()(XS)
    assert not changed()
    evidence(model)
    assert changed()
    field.base_kernel.lengthscale = 1.0
    with pytest.warns(gp_orff.GridWarning, match=r"call redraw\(\)"):
        model.covar_module(X).to_dense()


def test_lengthscales_that_no_grid_serves():
    """A line search goes there: the grid has a large tolerance, or stays; it comes back."""
    y = data(3.0)
    model, field = model_at(0.5, y, gp_orff.Grid.for_data(X))
    whole = evidence(model).item()
    field.base_kernel.lengthscale = 0.02
    with pytest.warns(gp_orff.GridWarning, match="8192 features do not suffice.*max_features="):
        assert torch.isfinite(evidence(model))
    field.base_kernel.lengthscale = 0.5
    assert evidence(model).item() == pytest.approx(whole, abs=1e-5)  # another domain
    model, field = model_at(0.5, y, gp_orff.Grid.for_data(X, max_features=300))
    whole = evidence(model).item()
    field.base_kernel.lengthscale, field.outputscale = 1e-5, 1e-10
    assert torch.isfinite(evidence(model))
    field.base_kernel.lengthscale, field.outputscale = 0.5, 0.25
    assert evidence(model).item() == pytest.approx(whole, abs=1e-5)


def test_random_frequencies_stay():
    model, field = model_at(0.5, data(3.0), gp_orff.MonteCarlo(64, seed=0))
    before = copy.deepcopy(model.covar_module.frequencies.state_dict())
    field.base_kernel.lengthscale = 5.0
    evidence(model)
    after = model.covar_module.frequencies.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
