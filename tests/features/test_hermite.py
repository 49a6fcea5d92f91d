"""Gauss–Hermite features are accurate inside their domain and raise an error outside."""

import pytest
import torch
from gpytorch.kernels import ConstantKernel, MaternKernel, RBFKernel, ScaleKernel

import gp_orff
from gp_orff.features.assemble import expand
from gp_orff.features.zoo import longest_lag
from tests.support.fields import exact_problem
from tests.support.models import errors
from tests.support.registry import base


def field(num_dims=2, lengthscale=1.0):
    potential = RBFKernel().double()
    potential.lengthscale = lengthscale
    return gp_orff.CurlFreeKernel(potential, num_dims=num_dims)


@pytest.mark.parametrize("nodes", [8, 15, 32])
@pytest.mark.parametrize("field_kernel", [False, True])
def test_the_kernel_is_right_up_to_the_lag_it_declares(nodes, field_kernel):
    """To 1e-3 of the variance, along the axes and across; and not much farther."""
    longest = longest_lag(nodes, int(field_kernel))
    exact = field() if field_kernel else base("rbf", 2)
    scale = 1.0 if field_kernel else exact.lengthscale.detach()
    orff = gp_orff.ORFFKernel(exact, gp_orff.GaussHermite(nodes), num_dims=2)
    zero = torch.zeros(1, 2).double()

    def error(lags):
        with torch.no_grad():
            expansion = expand(exact, orff.frequencies, 2)
            found = expansion.features(lags * scale) @ expansion.features(zero).mT
            return (found - exact(lags * scale, zero).to_dense()).abs().max()

    along = torch.linspace(0, longest, 60).double()
    inside = torch.cartesian_prod(along, along)
    assert error(inside) <= 2.1e-3
    beyond = torch.linspace(longest, 1.5 * longest, 50).double()
    assert error(torch.stack([beyond, 0 * beyond], dim=-1)) > 1e-3


def test_the_posterior_is_that_of_the_exact_kernel():
    kernel = field(lengthscale=0.4)  # five lengthscales in the box
    problem = exact_problem(kernel, 2, 300, 33)
    ((mean, sd, evidence, _),) = errors(kernel, [gp_orff.GaussHermite(32)], problem)
    assert max(mean, sd, evidence) < 1e-8


def test_points_too_far_apart_raise():
    kernel = gp_orff.ORFFKernel(field(), gp_orff.GaussHermite(32))
    x = torch.tensor([[0.0, 0.0], [0.0, 7.0]]).double()
    kernel(x).to_dense()
    far = torch.tensor([[0.0, -3.0]]).double()
    with pytest.raises(ValueError, match=r"lags up to 7\.2 lengthscales.*10\.0.*column 1.*Grid"):
        kernel(x, far).to_dense()


def test_only_gaussian_spectra():
    rough = gp_orff.CurlFreeKernel(MaternKernel(nu=2.5), num_dims=2)
    with pytest.raises(NotImplementedError, match=r"RBF kernels, got.*StudentT.*Grid"):
        gp_orff.ORFFKernel(rough, gp_orff.GaussHermite(8))
    with pytest.raises(ValueError, match="4 million nodes"):
        gp_orff.ORFFKernel(field(8), gp_orff.GaussHermite(8))
    for wrong in (1, 2.5, True, 300):
        with pytest.raises(ValueError, match="GaussHermite expects"):
            gp_orff.GaussHermite(wrong)


def test_products_and_sums_share_nothing():
    time = RBFKernel(active_dims=(2,)).double()
    time.lengthscale = 2.0
    space = gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2, active_dims=(0, 1))
    kernel = space * time + ScaleKernel(space).double()
    orff = gp_orff.ORFFKernel(kernel, gp_orff.GaussHermite(13), num_dims=3)
    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(orff(x).to_dense(), kernel(x).to_dense(), rtol=1e-4, atol=1e-4)


def test_a_constant_has_a_feature_of_its_own():
    kernel = ConstantKernel().double()
    kernel.constant = torch.tensor(0.7)
    kernel = RBFKernel().double() + kernel
    x = 0.5 * torch.rand(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    features = gp_orff.ORFFKernel(kernel, gp_orff.GaussHermite(12), num_dims=2)
    assert torch.allclose(features(x).to_dense(), kernel(x).to_dense(), atol=1e-9)
