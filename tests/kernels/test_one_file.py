"""A scalar kernel and its spectrum in one file, as a subclass of `RadialKernel`.

The spectral density is proportional to ‖ℓω‖^{2m} e^{−‖ℓω‖²/2}. It has a peak at one wavelength, as
for waves and eddies of one size.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.special
import torch

import gp_orff
from gp_orff.kernels.derivatives import derivatives
from gp_orff.kernels.spectra import Elliptical, RadialKernel, chi2_moment, chi2_quantile, chi2_tail
from tests.support.fields import draw
from tests.support.registry import FIELDS

DIMS, POWER = 2, 2  # d and m
LENGTHSCALES = torch.tensor([0.7, 1.1], dtype=torch.float64)


def kummer(s, order=0):
    """κ(s) = ₁F₁(m + d/2; d/2; −s/2), or a derivative: e^{−y} times a polynomial in y = s/2."""
    first, b, y = POWER + DIMS / 2, DIMS / 2 + order, s / 2
    series = [
        scipy.special.poch(-POWER, n) / scipy.special.poch(b, n) / math.factorial(n)
        for n in range(POWER + 1)
    ]
    polynomial = sum(coefficient * y**n for n, coefficient in enumerate(series))
    ratio = scipy.special.poch(first, order) / scipy.special.poch(DIMS / 2, order)
    return (-0.5) ** order * ratio * polynomial * (-y).exp()


@dataclass(frozen=True)
class WaveSpectrum(Elliptical):
    """‖z‖² ~ χ²_{d+2m}."""

    def log_density(self, omega):
        square, log_det = self._scaled(omega)
        norm = math.log(chi2_moment(POWER, DIMS)) + 0.5 * DIMS * math.log(2 * math.pi)
        return log_det + POWER * square.clamp_min(1e-300).log() - 0.5 * square - norm

    def moment(self, order, num_dims):
        return chi2_moment(POWER + order, num_dims) / chi2_moment(POWER, num_dims)

    def tail(self, scaled_radius, order, num_dims):
        return chi2_tail(scaled_radius**2, num_dims + 2 * (POWER + order))

    def _squared_radius(self, u, num_dims, order):
        return chi2_quantile(u, num_dims + 2 * (POWER + order))

    def _radial_correlation(self, r, order):
        s = torch.linspace(r, r + 8, 400, dtype=torch.float64).square()
        if not order:
            return kummer(s).abs().max().item()
        across, along = kummer(s, 1), kummer(s, 1) + 2 * s * kummer(s, 2)
        return (torch.maximum(across.abs(), along.abs()).max() / kummer(0 * s[0], 1).abs()).item()


class WaveKernel(RadialKernel):
    """A kernel whose spectral density has a peak."""

    highest_order = 4

    @property
    def spectrum(self):
        return WaveSpectrum(self.lengthscale)

    def correlation(self, s, order=0):
        return kummer(s, order)


def wave_kernel():
    kernel = WaveKernel(ard_num_dims=DIMS).double()
    kernel.lengthscale = LENGTHSCALES
    return kernel


@pytest.mark.parametrize("name", ["curl_free", "divergence_free"])
def test_field_kernels_are_exact(name):
    """Against the Hessian of k by automatic differentiation."""
    build, _ = FIELDS[name][1:]
    x, z = draw(6, DIMS), draw(5, DIMS, seed=1)
    tau = (x[:, None] - z[None]).flatten(0, 1)
    hessians = torch.func.vmap(torch.func.hessian(covariance))(tau)
    blocks = build(hessians).unflatten(0, (6, 5)).transpose(1, 2).reshape(12, 10)
    found = FIELDS[name][0](wave_kernel(), num_dims=DIMS)(x, z).to_dense()
    torch.testing.assert_close(found, blocks, rtol=1e-9, atol=1e-12)


def covariance(tau):
    """k(τ), by Kummer's formula."""
    return kummer((tau / LENGTHSCALES).square().sum())


def test_kummer_is_the_confluent_hypergeometric_function():
    s = torch.linspace(0, 30, 20, dtype=torch.float64)
    expected = scipy.special.hyp1f1(POWER + DIMS / 2, DIMS / 2, -s.numpy() / 2)
    torch.testing.assert_close(kummer(s), torch.from_numpy(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [3, 4])
def test_derivatives_are_those_of_the_covariance(order):
    """With the closed forms up to `highest_order`, against automatic differentiation."""
    tau, function = torch.tensor([0.3, -0.4], dtype=torch.float64), covariance
    for _ in range(order):
        function = torch.func.jacfwd(function)
    found = derivatives(wave_kernel(), tau[None, None], order)[0, 0]
    torch.testing.assert_close(found, function(tau), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [gp_orff.QuasiMonteCarlo(4096), gp_orff.Orthogonal(4096)])
@pytest.mark.parametrize("field", [False, True])
def test_random_rules_serve_it(rule, field):
    kernel = wave_kernel()
    kernel = gp_orff.CurlFreeKernel(kernel, num_dims=DIMS) if field else kernel
    x = draw(20, DIMS)
    exact = kernel(x).to_dense()
    error = gp_orff.ORFFKernel(kernel, rule)(x).to_dense() - exact
    assert error.abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("field", [False, True])
def test_grids_reach_their_tolerance(field):
    kernel = wave_kernel()
    kernel = gp_orff.DivergenceFreeKernel(kernel, num_dims=DIMS) if field else kernel
    x = draw(20, DIMS)
    low, high = x.min(0).values, x.max(0).values
    rule = gp_orff.Grid(domain=tuple(zip(low.tolist(), high.tolist(), strict=True)), tolerance=1e-6)
    exact = kernel(x).to_dense()
    error = gp_orff.ORFFKernel(kernel, rule)(x).to_dense() - exact
    assert error.abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.slow
def test_models_fit_and_are_saved(tmp_path):
    """The lengthscale of data drawn from the kernel, and a file whose reader is given the class."""
    x = draw(60, DIMS)
    truth = gp_orff.CurlFreeKernel(wave_kernel(), num_dims=DIMS)
    generator = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(truth(x).to_dense() + 1e-6 * torch.eye(120))
    y = (root @ torch.randn(120, generator=generator, dtype=torch.float64)).reshape(60, 2)
    kernel = gp_orff.CurlFreeKernel(WaveKernel(ard_num_dims=DIMS), num_dims=DIMS)
    model = gp_orff.VectorFieldGP(kernel).fit(x, y)
    lengthscales = next(own for own in model.modules() if isinstance(own, WaveKernel)).lengthscale
    assert ((lengthscales.detach() / LENGTHSCALES).log().abs() < 0.3).all()
    model.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt", kernel=model.kernel)
    assert np.allclose(again.posterior().mean(x[:3]), model.posterior().mean(x[:3]))
