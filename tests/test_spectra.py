"""Spectral densities against the kernels they belong to, and samples against their laws."""

import itertools
import math

import gpytorch
import numpy as np
import pytest
import scipy.stats
import torch

import gp_orff
from tests import oracles
from tests.registry import SMOOTH, SPECTRA, base


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("num_dims", [1, 2])
def test_density_is_the_fourier_transform_of_the_kernel(name, num_dims):
    kernel = base(name, num_dims)
    # trapezoid sums over ω with spacing h alias k at lags 2π/h, and miss the tail beyond W
    cutoff, spacing = {1: (4000.0, 0.2), 2: (80.0, 0.25)}[num_dims]
    axis = torch.arange(-cutoff, cutoff + spacing / 2, spacing, dtype=torch.float64)
    omega = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    weights = gp_orff.spectrum(kernel).log_density(omega).exp() * spacing**num_dims
    tail = 1 - weights.sum().item()
    assert abs(tail) < {"matern12": 0.02, "matern32": 1e-3}.get(name, 1e-5)
    tau = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=torch.float64)[:, :num_dims]
    transform = (omega @ tau.mT).cos().mT @ weights
    expected = oracles.scalar(name)(tau, kernel.lengthscale)
    torch.testing.assert_close(transform, expected, atol=max(1e-6, 2 * abs(tail)), rtol=0)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("num_dims", [1, 2, 3, 5])
def test_second_moment_is_minus_the_laplacian_at_lag_zero(name, num_dims):
    law = gp_orff.spectrum(SPECTRA[name]())
    assert law.moment(0, num_dims) == pytest.approx(1)
    assert law.moment(1, num_dims) == pytest.approx(num_dims * oracles.second_moment(name))


def test_moments_that_do_not_exist_are_infinite():
    assert math.isinf(gp_orff.spectrum(SPECTRA["matern12"]()).moment(1, 2))
    assert math.isinf(gp_orff.spectrum(SPECTRA["matern32"]()).moment(2, 2))


def radius_law(name, num_dims, tilt):
    """The law of ‖z‖² tilted by ‖z‖^{2t}, from the mathematics of χ² and beta-prime variables."""
    if name == "rbf":
        return scipy.stats.chi2(num_dims + 2 * tilt)
    nu = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}[name]
    return scipy.stats.betaprime(num_dims / 2 + tilt, nu - tilt, scale=2 * nu)


@pytest.mark.parametrize("num_dims", [1, 2, 3, 5])
@pytest.mark.parametrize(("name", "tilt"), [(n, 0) for n in SPECTRA] + [(n, 1) for n in SMOOTH])
def test_samples_follow_the_tilted_law(name, tilt, num_dims):
    law = gp_orff.spectrum(SPECTRA[name]())
    z = law.sample(4000, num_dims, tilt, np.random.default_rng(0))
    squared_radius = (z**2).sum(-1)
    test = scipy.stats.kstest(squared_radius, radius_law(name, num_dims, tilt).cdf)
    assert test.pvalue > 1e-3
    direction = z / np.sqrt(squared_radius)[:, None]
    covariance = direction.T @ direction / len(z)  # I/d, entries with standard error < 1/√n
    assert np.abs(covariance - np.eye(num_dims) / num_dims).max() < 5 / math.sqrt(len(z))


def test_tilted_density_is_the_density_times_the_squared_radius():
    """∫ over radii of ‖z‖² p(z)/E‖z‖² gives the law that the tilted samples follow."""
    law = gp_orff.spectrum(SPECTRA["matern52"]())
    with torch.no_grad():
        law = type(law)(torch.ones(1, 1, dtype=torch.float64), 2.5)
    edges = np.array([0.5, 1.0, 2.0, 4.0])
    for low, high in itertools.pairwise(edges):
        r = torch.linspace(low, high, 2001, dtype=torch.float64)
        z = torch.stack([r, torch.zeros_like(r)], dim=-1)
        ring = 2 * math.pi * r * r**2 * law.log_density(z).exp() / law.moment(1, 2)
        expected = radius_law("matern52", 2, 1)
        probability = expected.cdf(high**2) - expected.cdf(low**2)
        assert torch.trapezoid(ring, r).item() == pytest.approx(probability, rel=1e-6)


def test_gradients_reach_the_lengthscales():
    kernel = base("matern52", 2)
    omega = gp_orff.spectrum(kernel).frequencies(torch.ones(1, 2, dtype=torch.float64))
    torch.testing.assert_close(omega, 1 / kernel.lengthscale)
    omega.sum().backward()
    assert kernel.raw_lengthscale.grad.abs().min() > 0


@pytest.mark.parametrize(
    "kernel", [gpytorch.kernels.PeriodicKernel(), gpytorch.kernels.RBFKernelGrad()]
)
def test_unknown_kernels_are_refused_by_name(kernel):
    with pytest.raises(NotImplementedError, match=rf"{type(kernel).__name__}.*MaternKernel.*regis"):
        gp_orff.spectrum(kernel)


def test_a_spectrum_can_be_registered():
    class MyKernel(gpytorch.kernels.RBFKernel):
        pass

    law = gp_orff.spectrum(SPECTRA["matern52"]())
    try:
        gp_orff.spectrum.register(MyKernel, lambda kernel: law)
        assert gp_orff.spectrum(MyKernel()) is law
    finally:
        gp_orff.spectrum.register(MyKernel, gp_orff.spectrum.dispatch(gpytorch.kernels.RBFKernel))
