"""Missing components and known noise in an ExactGP, compared with dense algebra."""

import warnings

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood

import gp_orff
from tests.support.fields import curl_free, helmholtz
from tests.support.models import ScalarGP, VectorGP, vector_gp

XS = torch.rand(7, 2, generator=torch.Generator().manual_seed(5)).double()


def observations(count=40):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 2, generator=generator).double()
    return x, torch.sin(6 * x.flip(-1)) + 0.1 * torch.randn(count, 2, generator=generator)


def of_observed(kernel, x, y, noise):
    """Mean and covariance (14,), (14, 14) given the components that are not NaN."""
    seen = ~y.flatten().isnan()
    cross = kernel(XS, x).to_dense()[:, seen]
    noisy = kernel(x).to_dense()[seen][:, seen] + noise * torch.eye(int(seen.sum()))
    mean = cross @ torch.linalg.solve(noisy, y.flatten()[seen])
    return mean, kernel(XS).to_dense() - cross @ torch.linalg.solve(noisy, cross.mT)


PATTERNS = {
    "a component at every other point": lambda y: y[::2, 1].fill_(torch.nan),
    "whole vectors": lambda y: y[:10].fill_(torch.nan),
    "one value": lambda y: y[3, 0].fill_(torch.nan),
}
KERNELS = {
    "helmholtz": lambda x: helmholtz(2).double(),
    "curl-free": lambda x: curl_free(0.5),
    "grid": lambda x: gp_orff.ORFFKernel(curl_free(0.5), gp_orff.Grid.for_data(x)),
    "random": lambda x: gp_orff.ORFFKernel(curl_free(0.5), gp_orff.MonteCarlo(30)),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.usefixtures("no_check_of_random_features")
def test_masked_components(name, pattern):
    """gpytorch's own variance is that of complete data: .24 of the right one at the worst place."""
    x, y = observations()
    PATTERNS[pattern](y)
    kernel = KERNELS[name](x)
    model = vector_gp(x, y, kernel, 0.01, has_task_noise=False).eval()
    with gpytorch.settings.observation_nan_policy("mask"), torch.no_grad():
        field = model(XS)
        mean, covariance = of_observed(kernel, x, y, 0.01)
        torch.testing.assert_close(field.mean.flatten(), mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(field.covariance_matrix, covariance, rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_missing_components_of_batches(policy):
    """With "fill" each batch has its own gaps; "mask" leaves out what is missing in any of them."""
    x, y = observations()
    both = torch.stack([y, y.flip(-1)])
    both[0, :5, 0] = both[1, 7:9, 1] = torch.nan
    kernel = helmholtz(2).double()
    model = vector_gp(x.expand(2, 40, 2), both, kernel, 0.01, has_task_noise=False).eval()
    gaps = both.isnan() if policy == "fill" else both.isnan().any(0).expand(2, 40, 2)
    with gpytorch.settings.observation_nan_policy(policy), torch.no_grad():
        with warnings.catch_warnings():  # that "fill" makes matrices dense
            warnings.simplefilter("ignore", RuntimeWarning)
            variance = model(XS.expand(2, 7, 2)).variance
        for one, values, missing in zip(variance, both, gaps, strict=True):
            values = values.masked_fill(missing, torch.nan)
            wanted = of_observed(kernel, x, values, 0.01)[1].diagonal().reshape(7, 2)
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", ["vector", "flat"])
@pytest.mark.parametrize("name", ["helmholtz", "grid"])
@pytest.mark.filterwarnings("ignore:You have passed data through a FixedNoise")
def test_noise_of_each_vector_in_a_likelihood_of_one_output(name, shape):
    """gpytorch ignores it if there are several outputs; the remedy works."""
    x, y = observations()
    noise = 0.001 + 0.05 * torch.rand(40, 2, generator=torch.Generator().manual_seed(1)).double()
    given = noise if shape == "vector" else noise.flatten()
    kernel = KERNELS[name](x)
    model = VectorGP(x, y, FixedNoiseGaussianLikelihood(given), kernel).double().eval()
    with pytest.raises(NotImplementedError, match=r"KnownNoiseLikelihood\(num_tasks=2, noise=nois"):
        model(XS)
    likelihood = gp_orff.KnownNoiseLikelihood(num_tasks=2, noise=noise)
    model = VectorGP(x, y, likelihood, kernel).double().eval()
    noisy = kernel(x).to_dense() + torch.diag(noise.flatten())
    cross = kernel(XS, x).to_dense()
    wanted = cross @ torch.linalg.solve(noisy, (y - model.mean_module(x)).flatten())
    wanted = wanted.reshape(7, 2) + model.mean_module(XS)
    torch.testing.assert_close(model(XS).mean, wanted, rtol=0, atol=1e-6)


def test_noise_of_each_value_of_one_output_is_used():
    x, y = observations()
    noise = 0.001 + 0.05 * torch.rand(40, generator=torch.Generator().manual_seed(1)).double()
    base = gpytorch.kernels.RBFKernel().double()
    kernel = gp_orff.ORFFKernel(base, gp_orff.Grid.for_data(x, tolerance=1e-8), num_dims=2)
    model = ScalarGP(x, y[:, 0], FixedNoiseGaussianLikelihood(noise), kernel).double().eval()
    noisy = base(x).to_dense() + torch.diag(noise)
    constant = model.mean_module.constant
    wanted = base(XS, x).to_dense() @ torch.linalg.solve(noisy, y[:, 0] - constant) + constant
    torch.testing.assert_close(model(XS).mean, wanted, rtol=0, atol=1e-4)
