"""Posteriors under `torch.func`, `torch.compile` and `torch.export`, and finite differences."""

import pytest
import torch
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import gp_orff
from tests.support.fields import curl_free

RULES = {
    "exact": gp_orff.Auto(),
    "grid": gp_orff.Grid(domain=((-0.2, 1.2), (-0.2, 1.2)), tolerance=1e-6),
    "random": gp_orff.QuasiMonteCarlo(32),
}
SYMBOLS = {"field": None, "divergence": gp_orff.Divergence()}
STEP = 1e-5  # central differences: errors of 1e-10 by curvature, and of 1e-11 by rounding


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def field(rule="exact"):
    x = draw(30, 2)
    model = gp_orff.VectorFieldGP(curl_free(0.4), frequencies=RULES[rule])
    return model.condition(x, torch.sin(6 * x.flip(-1))).posterior()


def differences(function, x):
    """∂ function(x) / ∂x of points, (n, q, d): each row depends on its point alone."""
    steps = STEP * torch.eye(x.shape[-1], dtype=x.dtype)
    return torch.stack([(function(x + h) - function(x - h)) / (2 * STEP) for h in steps], -1)


@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("rule", RULES)
def test_derivatives_of_mean_and_variance(rule, symbol):
    posterior, symbol, xs = field(rule), SYMBOLS[symbol], draw(3, 2, seed=1)
    every = torch.arange(3)
    for moment in (posterior.mean, posterior.variance):

        def values(x, moment=moment):
            return moment(x, symbol)

        expected = differences(values, xs)
        scale = expected.abs().max()
        for transform in (jacrev, jacfwd):
            jacobian = transform(values)(xs)
            torch.testing.assert_close(
                jacobian[every, :, every] / scale, expected / scale, rtol=0, atol=1e-6
            )
            jacobian[every, :, every] = 0
            assert not jacobian.any()  # of a point by another
        at_points = vmap(jacrev(lambda x: values(x[None])[0]))(xs)
        torch.testing.assert_close(at_points / scale, expected / scale, rtol=0, atol=1e-6)
        torch.testing.assert_close(vmap(lambda x: values(x[None])[0])(xs), values(xs))
        value, tangent = jvp(values, (xs,), (torch.ones_like(xs),))
        torch.testing.assert_close(value, values(xs))
        torch.testing.assert_close(tangent / scale, expected.sum(-1) / scale, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_second_derivatives_and_other_functions(rule):
    posterior, xs = field(rule), draw(3, 2, seed=1)
    found = hessian(lambda x: posterior.mean(x).square().sum())(xs)
    gradient = jacrev(lambda x: posterior.mean(x).square().sum())
    expected = differences(gradient, xs)
    every = torch.arange(3)
    torch.testing.assert_close(found[every, :, every], expected, rtol=1e-5, atol=1e-5)
    paths = posterior.sample_paths(2)
    rates = jacrev(paths)(xs)[:, every, :, every]  # (3, S, p, d)
    slopes = differences(paths, xs).movedim(1, 0)
    torch.testing.assert_close(rates, slopes, rtol=1e-5, atol=1e-5)
    places, steps = draw(2, 3, 2, seed=2), draw(2, 3, 2, seed=3)  # of each path
    later = (paths(places + STEP * steps) - paths(places - STEP * steps)) / (2 * STEP)
    torch.testing.assert_close(jvp(paths, (places,), (steps,))[1], later, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        (jacrev(paths)(places) * steps).sum((-1, -2, -3)), later, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        vmap(posterior.pointwise_covariance)(xs[:, None]).squeeze(1),
        posterior.pointwise_covariance(xs),
    )
    with pytest.raises(NotImplementedError, match="pointwise_covariance or sample paths"):
        jacrev(lambda x: posterior.divergence(x).mean)(xs)


def test_checks_hold_under_transforms():
    posterior, bad = field(), torch.full((1, 2), torch.nan, dtype=torch.float64)
    with pytest.raises(ValueError, match="expected finite points"):
        jacrev(posterior.mean)(bad)
    far = torch.full((1, 1, 2), 2.0, dtype=torch.float64)  # for which the grid becomes larger
    posterior = field("grid")
    torch.testing.assert_close(vmap(posterior.mean)(far)[0], posterior.mean(far[0]))


class Mean(torch.nn.Module):
    def __init__(self, posterior, symbol=None):
        super().__init__()
        self.posterior, self.symbol = posterior, symbol

    def forward(self, x):
        return self.posterior.mean(x, self.symbol)


@pytest.mark.slow
@pytest.mark.parametrize("symbol", SYMBOLS)
@pytest.mark.parametrize("rule", ["grid", "random"])
def test_an_exported_mean_is_no_constant(rule, symbol):
    module, points = Mean(field(rule), SYMBOLS[symbol]), draw(20, 2, seed=2)
    number = torch.export.Dim("n", min=2)
    program = torch.export.export(module, (points[:3],), dynamic_shapes=({0: number},))
    torch.testing.assert_close(program.module()(points), module(points))
    far = program.module()(torch.full((2, 2), 5.0, dtype=torch.float64))
    assert far.isnan().all() == (rule == "grid")  # outside of the domain of a grid


def test_what_cannot_be_exported_is_named():
    with pytest.raises(NotImplementedError, match="exact_values=0"):
        torch.export.export(Mean(field()), (draw(3, 2),))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>")
@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_a_compiled_mean(rule):
    """Both warnings come from torch, which traces gpytorch and itself."""
    posterior = field(rule)
    compiled = torch.compile(posterior.mean, backend="eager")
    for n in (3, 5):
        torch.testing.assert_close(compiled(draw(n, 2)), posterior.mean(draw(n, 2)))
