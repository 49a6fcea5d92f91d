"""Spectral matrices whose kernels are correlated at long lags, compared with closed forms."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel

import gp_orff

LAGS = torch.linspace(0, 30, 31, dtype=torch.float64).unsqueeze(-1)


def rational_quadratic(alpha):
    kernel = RQKernel().double()
    kernel.alpha = alpha
    return kernel


BASES = {
    "rbf": (RBFKernel, lambda r: np.exp(-(r**2) / 2)),
    "matern52": (
        lambda: MaternKernel(nu=2.5),
        lambda r: (1 + 5**0.5 * abs(r) + 5 * r**2 / 3) * np.exp(-(5**0.5) * abs(r)),
    ),
    "rational_quadratic": (lambda: rational_quadratic(3.0), lambda r: (1 + r**2 / 6) ** -3.0),
}


def unit(kernel):
    kernel = kernel.double()
    kernel.lengthscale = 1.0
    return kernel


def echo(kernel, delay):
    """A = cos²(½ aω) for a delay a: K(r) = ½ k(r) + ¼ (k(r + a) + k(r − a))."""
    return gp_orff.SpectralMatrixKernel(
        unit(kernel), lambda w: torch.cos(0.5 * delay * w).unsqueeze(-1), num_outputs=1, num_dims=1
    )


def with_echo(k, r, delay):
    return 0.5 * k(r) + 0.25 * (k(r + delay) + k(r - delay))


@pytest.mark.slow
@pytest.mark.parametrize("delay", [6.0, 24.0, 40.0, 80.0, 200.0])
@pytest.mark.parametrize("name", BASES)
def test_echoes_at_long_lags(name, delay):
    make, k = BASES[name]
    kernel = echo(make(), delay)
    lags = (LAGS - LAGS.mT).numpy()
    expected = with_echo(k, lags, delay)
    got = kernel(LAGS).to_dense().detach().numpy()
    np.testing.assert_allclose(got, expected, atol=1e-8)  # of the quadrature
    features = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(LAGS))
    got = features(LAGS).to_dense().detach().numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)  # the tolerance of the grid


@pytest.mark.parametrize("stretch", [3.0, 30.0, 100.0, 300.0])
def test_correlations_that_are_long_between_the_axes(stretch):
    """A Gaussian density, narrow along (1, 1): A = exp(−½ m ⟨v, ω⟩²), v = (1, 1)/√2."""
    matrix = 0.5 * stretch * torch.ones(2, 2, dtype=torch.float64)
    kernel = gp_orff.SpectralMatrixKernel(
        unit(RBFKernel()),
        lambda w: torch.exp(-0.25 * ((w @ matrix) * w).sum(-1))[:, None, None],
        num_outputs=1,
        num_dims=2,
    )
    x = torch.rand(12, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    covariance = np.linalg.inv(np.eye(2) + matrix.numpy())  # of the frequencies
    lags = (x.unsqueeze(1) - x).numpy()
    size = math.sqrt(np.linalg.det(covariance))
    expected = np.exp(-0.5 * np.einsum("nmi,ij,nmj->nm", lags, covariance, lags))
    got = kernel(x).to_dense().detach().numpy() / size
    np.testing.assert_allclose(got, expected, atol=1e-9)
    features = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-3))
    got = features(x).to_dense().detach().numpy() / size
    np.testing.assert_allclose(got, expected, atol=1e-3)
    assert features.accuracy()[0].aliasing < 1e-3


def test_accuracy_tells_the_aliasing_of_an_echo():
    """With a period of 8 the image of an echo at the lag 6 is at the lag 2."""
    grid = gp_orff.Grid(domain=((0, 3),), data=((0, 3),), spacing=2 * math.pi / 8, cutoff=8.0)
    x = torch.linspace(0, 3, 4, dtype=torch.float64).unsqueeze(-1)
    for make, k in BASES.values():
        features = gp_orff.ORFFKernel(echo(make(), 6.0), grid, num_dims=1)
        got = features(x).to_dense().detach().numpy()
        error = abs(got - with_echo(k, (x - x.mT).numpy(), 6.0)).max()
        told = features.accuracy()[0].aliasing
        assert error > 0.2
        assert error < told < 40 * error


def test_slow_correlations_are_not_taken_for_none():
    """α = 0.3: S(0) = ∞, correlations fall like r^−0.6, and no affordable grid is fine enough."""
    kernel = echo(rational_quadratic(0.3), 3.0)
    with pytest.warns(RuntimeWarning, match="error of about"):
        got = kernel(LAGS[:4]).to_dense().detach().numpy()
    k = lambda r: (1 + r**2 / 0.6) ** -0.3  # noqa: E731
    expected = with_echo(k, (LAGS[:4] - LAGS[:4].mT).numpy(), 3.0)
    np.testing.assert_allclose(got, expected, atol=1e-2)  # the warning says how poor it is
    with pytest.raises(ValueError, match="40000 features"):
        gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(LAGS))
