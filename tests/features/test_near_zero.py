"""The cell around ω = 0 of fields with heavy tails, compared with exact kernels."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel

import gp_orff
from gp_orff.features.assemble import draw, expand, num_features
from gp_orff.kernels.derivatives import derivatives
from gp_orff.kernels.lattice_sums import moments_near_zero
from gp_orff.kernels.tree import terms
from tests.support.models import asked

PERIOD = 3.0
PLANE = ((0.0, 2.0),) * 2


def rational_quadratic(alpha, lengthscale, **options):
    kernel = RQKernel(**options).double()
    kernel.alpha, kernel.lengthscale = alpha, lengthscale
    return kernel


def uniform(count, *extent, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, len(extent), generator=generator).double() * torch.tensor(extent)


def coarse(domain=PLANE):
    """A grid of a short period that cuts next to nothing of smooth kernels."""
    spacing = 2 * torch.pi / PERIOD
    return gp_orff.Grid(
        domain=domain, spacing=spacing, cutoff=10 * spacing, lengthscale_range=(1.0, 1.0)
    )


FIELDS = {
    "curl-free": lambda k: gp_orff.CurlFreeKernel(k, num_dims=2),
    "divergence-free": lambda k: gp_orff.DivergenceFreeKernel(k, num_dims=2),
    "both": lambda k: FIELDS["curl-free"](k) + FIELDS["divergence-free"](k),
}


@pytest.mark.parametrize("num_dims", [1, 2])
def test_what_a_lattice_lacks_is_a_sum_of_images(num_dims):
    """Images fall as the power −6 of their distance: those beyond the 30th are below 1e-4."""
    kernel = rational_quadratic(2.0, torch.tensor([0.7, 1.1])[:num_dims], ard_num_dims=num_dims)
    index = torch.arange(-30, 31).double()
    images = PERIOD * torch.cartesian_prod(*[index] * num_dims).reshape(-1, num_dims)
    images = images[images.any(-1)]
    spacing = torch.full((num_dims,), 2 * torch.pi / PERIOD).double()
    with torch.no_grad():
        expected = derivatives(kernel, images.unsqueeze(-2), 2).sum((0, 1)).diagonal().clamp_min(0)
        found = moments_near_zero(gp_orff.spectrum(kernel), spacing)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5])
def test_evidence_and_posterior_are_those_of_the_exact_kernel(alpha):
    """Curl-free and divergence-free, 5 to 20 % of the variance in the cell: 0.1 to 0.3 nats of 200
    numbers, as images are no exact constant. Without the cell it is 15 to 190 nats."""
    exact = FIELDS["both"](rational_quadratic(alpha, {0.5: 1.0}.get(alpha, 2.0)))
    grid = gp_orff.ORFFKernel(exact, coarse())
    x, xs = uniform(100, 2.0, 2.0), uniform(20, 2.0, 2.0, seed=1)
    generator = torch.Generator().manual_seed(2)
    covariance = exact(x).to_dense().detach() + 1e-3 * torch.eye(200)
    y = torch.linalg.cholesky(covariance) @ torch.randn(200, generator=generator).double()
    y = y.reshape(100, 2)
    evidence, mean, sd = asked(exact, x, y, xs, 1e-3)
    found, own_mean, own = asked(grid, x, y, xs, 1e-3)
    assert 100 * abs(found - evidence) < 0.5
    assert ((own_mean - mean) / sd).square().mean().sqrt() < 0.15
    assert ((own - sd).abs() / sd).max() < 0.1


@pytest.mark.parametrize("field", FIELDS)
def test_symbols_see_the_cell(field):
    """A curl-free field is its own curl-free part and the gradient of its potential, and so on."""
    kernel = FIELDS[field](rational_quadratic(0.1, 2.0))
    x = uniform(40, 2.0, 2.0)
    y = torch.ones(40, 2).double() + 0.1 * torch.cos(3 * x)
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean(), frequencies=coarse())
    model.likelihood.noise = 1e-3
    posterior = model.condition(x, y).posterior()
    xs = uniform(5, 2.0, 2.0, seed=1).requires_grad_()
    curl_free = posterior.mean(xs, gp_orff.CurlFreePart())
    divergence_free = posterior.mean(xs, gp_orff.DivergenceFreePart())
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(curl_free + divergence_free, posterior.mean(xs), **tolerance)
    paths, origin = posterior.sample_paths(2, seed=3), torch.zeros(2)
    potential = paths(xs, gp_orff.Potential(origin))[1].sum()
    stream = paths(xs, gp_orff.StreamFunction(origin))[1].sum()
    (slope,) = torch.autograd.grad(potential, xs)
    (turned,) = torch.autograd.grad(stream, xs)
    turned = torch.stack([turned[:, 1], -turned[:, 0]], dim=-1)
    torch.testing.assert_close(slope + turned, paths(xs)[1].detach(), **tolerance)


def test_a_cell_varies_in_time():
    """Curl-free in the plane and rational quadratic in time, against the exact kernel; without
    the cell the error is 0.06."""
    field = gp_orff.CurlFreeKernel(rational_quadratic(0.1, 1.0), num_dims=2, active_dims=(0, 1))
    time = rational_quadratic(1.0, 1.0, active_dims=(2,))
    kernel = field * time
    grid = gp_orff.Grid(
        domain=(*PLANE, (0.0, 1.0)),
        spacing=(2.1, 2.1, 0.7),
        cutoff=16.0,
        lengthscale_range=(1.0, 1.0),
    )
    x = uniform(20, 1.0, 1.0, 1.0)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**4):
        exact = kernel(x).to_dense()
        found = gp_orff.ORFFKernel(kernel, grid)(x).to_dense()
    assert (found - exact).abs().max() < 0.02 * exact.max()


@pytest.mark.parametrize("base", [RBFKernel(), MaternKernel(nu=2.5)], ids=["rbf", "matern"])
def test_light_tails_have_no_cell(base):
    for field in FIELDS.values():
        kernel = field(base.double())
        assert all(own.cell is None for own in draw(kernel, coarse(), 2))
        assert expand(kernel, draw(kernel, coarse(), 2), 2).axes is None


@pytest.mark.parametrize(
    ("field", "added"), [("curl-free", 2), ("divergence-free", 2), ("both", 4)]
)
def test_a_cell_costs_a_feature_for_each_axis(field, added):
    """As many more than under a kernel with light tails; budgets include them."""
    kernels = [FIELDS[field](own) for own in (rational_quadratic(0.5, 1.0), RBFKernel().double())]
    heavy, light = (expand(own, draw(own, coarse(), 2), 2).num_features for own in kernels)
    assert heavy - light == added
    budget = gp_orff.Grid(domain=PLANE, max_features=200)
    draws = draw(kernels[0], budget, 2)
    assert 150 < expand(kernels[0], draws, 2).num_features <= 200
    assert num_features(kernels[0], draws) - 200 <= 2 * len(terms(kernels[0]))  # sines of zero
