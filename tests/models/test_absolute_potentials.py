"""Potentials without a reference: observed, predicted and sampled, including their constant."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, RQKernel
from torch.func import grad, hessian, vmap

import gp_orff
from gp_orff.features.assemble import draw, expand, with_constants
from gp_orff.features.expansion import apply_symbol
from gp_orff.features.truncation import truncated_variance
from gp_orff.kernels.tree import terms

LENGTHSCALE, NOISE = 0.8, 0.01
RULES = {
    "exact": lambda d: gp_orff.Auto(exact_values=10**6),
    "grid": lambda d: gp_orff.Grid(domain=((0.0, 1.0),) * d, spacing=1.1, cutoff=16.0),
}


def uniform(count, num_dims, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, num_dims, generator=generator).double()


def observing(kernel, num_dims, rule, *observations):
    """A model with vectors at 8 points, and then the observations (symbol, x, y)."""
    x = uniform(8, num_dims, 0)
    y = torch.sin(5 * x) + 0.5
    model = gp_orff.VectorFieldGP(
        kernel.double(), mean=gpytorch.means.ZeroMean(), frequencies=RULES[rule](num_dims)
    )
    model.likelihood.noise = NOISE
    model.condition(x, y)
    for symbol, at, values in observations:
        model.observe(at, values, symbol, noise=NOISE)
    return model, x, y


def base(kind=RBFKernel):
    kernel = kind().double()
    kernel.lengthscale = LENGTHSCALE
    return kernel


def k(lag):
    return torch.exp(-0.5 * lag.square().sum() / LENGTHSCALE**2)


def joint(x, z):
    """The covariance of f = ∇g at x and g at z, g ~ GP(0, k), all vectors first."""

    def at_lags(function, a, b):
        return vmap(vmap(function))(a[:, None] - b)

    ff = -at_lags(hessian(k), x, x).transpose(1, 2).flatten(2).flatten(0, 1)
    fg = at_lags(grad(k), x, z).transpose(1, 2).flatten(0, 1)
    return torch.cat([torch.cat([ff, fg], 1), torch.cat([fg.mT, at_lags(k, z, z)], 1)])


@pytest.mark.parametrize("rule", RULES)
def test_a_potential_with_its_constant(rule):
    """Two calls observe it; evidence and posterior are those of the joint covariance. A grid is
    good to 2e-3 of a standard deviation."""
    z, zs = uniform(6, 2, 1), uniform(4, 2, 2)
    values = 3.0 + torch.cos(4 * z[:, :1])
    parts = [(gp_orff.Potential(), z[half], values[half]) for half in (slice(3), slice(3, 6))]
    model, x, y = observing(gp_orff.CurlFreeKernel(base(), num_dims=2), 2, rule, *parts)
    covariance, count = joint(x, torch.cat([z, zs])), 2 * len(x) + len(z)
    seen = covariance[:count, :count] + NOISE * torch.eye(count)
    cross = covariance[count:, :count]
    data = torch.cat([y.flatten(), values.flatten()])
    mean = cross @ torch.linalg.solve(seen, data)
    rest = covariance[count:, count:] - cross @ torch.linalg.solve(seen, cross.mT)
    sd = rest.diagonal().sqrt()
    found = model.posterior()(zs, gp_orff.Potential())
    assert ((found.mean - mean) / sd).abs().max() < 2e-3
    torch.testing.assert_close(found.covariance_matrix, rest, rtol=0, atol=2e-3 * rest.max().item())
    law = torch.distributions.MultivariateNormal(torch.zeros(count).double(), seen)
    evidence = model.log_marginal_likelihood().item()
    assert evidence == pytest.approx(law.log_prob(data).item(), abs=1e-2)


CASES = {
    "curl-free": (lambda k: gp_orff.CurlFreeKernel(k, num_dims=2), 2, gp_orff.Potential()),
    "stream function": (
        lambda k: gp_orff.DivergenceFreeKernel(k, num_dims=2),
        2,
        gp_orff.StreamFunction(),
    ),
    "of a sum": (
        lambda k: gp_orff.HelmholtzKernel(k, num_dims=2) + gp_orff.CurlFreeKernel(k, num_dims=2),
        2,
        gp_orff.Potential(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_antiderivatives_on_a_grid_are_those_of_the_exact_kernel(name):
    """Of the field, too."""
    build, d, symbol = CASES[name]
    z, zs = uniform(4, d, 1), uniform(3, d, 2)
    values = 2.0 + torch.cos(4 * z[:, : symbol.num_outputs(d)])
    exact, grid = (
        observing(build(base()), d, rule, (symbol, z, values))[0].posterior() for rule in RULES
    )
    for own in (symbol, None):
        (a, b), spread = ((p.mean(zs, own) for p in (exact, grid)), exact.variance(zs, own).sqrt())
        assert ((a - b).abs() / spread).max() < 0.01
        torch.testing.assert_close(grid.variance(zs, own).sqrt(), spread, rtol=0.01, atol=0)


def test_a_constant_under_heavy_tails():
    """With the cell around zero and a constant, under a rational quadratic kernel. That potentials
    in the cell are linear leaves an error in their constant."""
    z, zs, heavy = uniform(4, 2, 1), uniform(3, 2, 2), base(RQKernel)
    heavy.alpha = 2.0
    kernel = gp_orff.CurlFreeKernel(heavy, num_dims=2)
    observation = (gp_orff.Potential(), z, 2 + z[:, :1])
    exact, grid = (observing(kernel, 2, rule, observation)[0].posterior() for rule in RULES)
    for own in (gp_orff.Potential(), gp_orff.Potential(torch.zeros(2)), None):
        spread = exact.variance(zs, own).sqrt()
        assert ((exact.mean(zs, own) - grid.mean(zs, own)).abs() / spread).max() < 0.1
        torch.testing.assert_close(grid.variance(zs, own).sqrt(), spread, rtol=0.05, atol=0)


@pytest.mark.parametrize("observed", [False, True])
def test_every_path_has_a_constant(observed):
    """Means and standard deviations of 2000 paths, to five and seven standard errors; the same
    constant in every call and at every point."""
    symbol, zs = gp_orff.Potential(), uniform(3, 2, 2)
    observations = [(symbol, uniform(2, 2, 1), torch.full((2, 1), 3.0))] if observed else []
    kernel = gp_orff.CurlFreeKernel(base(), num_dims=2)
    model, *_ = observing(kernel, 2, "grid", *observations)
    field = model.posterior()
    paths, wanted = field.sample_paths(2000, seed=0), field(zs, symbol)
    values = paths(zs, symbol).squeeze(-1)
    z = (values.mean(0) - wanted.mean) / wanted.stddev * 2000**0.5
    assert z.abs().max() < 5
    torch.testing.assert_close(values.std(0), wanted.stddev, rtol=7 / 4000**0.5, atol=0)
    torch.testing.assert_close(paths(zs[1:2], symbol)[:, 0, 0], values[:, 1])
    differences = paths(zs, gp_orff.Potential(zs[0])).squeeze(-1)
    torch.testing.assert_close(values - values[:, :1], differences, rtol=1e-6, atol=1e-6)


def test_constants_change_no_field():
    """Features of constants are zero in the field; rounding."""
    z, kernel = uniform(4, 2, 1), gp_orff.CurlFreeKernel(base(), num_dims=2)
    draws = draw(kernel, RULES["grid"](2), 2)
    plain = expand(kernel, draws, 2).double()
    whole = with_constants(plain, terms(kernel), draws)
    assert whole.num_features == plain.num_features + 2
    torch.testing.assert_close(whole.features(z)[:, :-2], plain.features(z))
    assert not whole.features(z)[:, -2:].any()


def test_vector_potentials_have_a_constant():
    """The prior variance is 2/3 in every component, as is that of i (ω × B)/‖ω‖² over all
    directions; that of the constants is the same at all points."""
    kernel = gp_orff.DivergenceFreeKernel(base(), num_dims=3)
    draws = draw(kernel, gp_orff.Grid(spacing=1.2, cutoff=6.0), 3)
    features = with_constants(expand(kernel, draws, 3).double(), terms(kernel), draws)
    image = apply_symbol(gp_orff.VectorPotential(), features, (0, 1, 2))
    white, common = truncated_variance(gp_orff.VectorPotential(), kernel, draws, (0, 1, 2))
    phi = image.features(torch.zeros(1, 3).double())
    total, eye = phi @ phi.mT + white, torch.eye(3).double()
    torch.testing.assert_close(total, 2 / 3 * eye, rtol=0, atol=2e-3)
    constants = image.features(uniform(2, 3, 0))[:, -6:]
    expected = common.diagonal().mean() * eye.repeat(2, 2)
    torch.testing.assert_close(constants @ constants.mT, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("rule", RULES)
def test_potentials_without_a_variance_are_refused(rule):
    kernel = MultitaskKernel(base(), num_tasks=2, rank=1)
    with pytest.raises(
        ValueError, match=r"expected a reference for .*, got none; pass reference=x0"
    ):
        observing(kernel, 2, rule, (gp_orff.Potential(), torch.zeros(1, 2), torch.zeros(1, 1)))


def test_parts_of_a_sum_have_their_constants():
    """The potential of the whole is that of its curl-free term, the constant included."""
    kernel, z, zs = gp_orff.HelmholtzKernel(base(), num_dims=2), uniform(4, 2, 1), uniform(3, 2, 2)
    model, *_ = observing(kernel, 2, "grid", (gp_orff.Potential(), z, 2 + z[:, :1]))
    field = model.posterior()
    whole, part = (own(zs, gp_orff.Potential()) for own in (field, field.part("curl_free")))
    torch.testing.assert_close(part.mean, whole.mean)
    torch.testing.assert_close(part.covariance_matrix, whole.covariance_matrix)
