"""Tails of spectra and of kernels: tails by integration, correlations by the exact kernel."""

import math

import numpy as np
import pytest
import scipy.integrate
import torch

import gp_orff
from gp_orff.features.assemble import draw
from tests.support.registry import SPECTRA, base

SHARES = (0.3, 1e-2, 1e-4)
ELLIPTICAL = [name for name in SPECTRA if name != "spectral_mixture"]


def law_of(name, num_dims, ard=True):
    return gp_orff.spectrum(base(name, num_dims, ard))


def tilts(name):
    return (0, 1) if math.isfinite(law_of(name, 2).moment(1, 2)) else (0,)


def reach_of(law, share, tilt, num_dims):
    """By bisection."""
    low, high = 1e-3, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if law.tail(middle, tilt, num_dims) > share else (low, middle)
    return high


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("name", ELLIPTICAL)
def test_tails_are_integrals_of_the_density(name, num_dims):
    """∫ ‖z‖^{2t} S beyond the reach over the whole, radially, for an isotropic kernel."""
    kernel = base(name, num_dims, ard=False)
    law = gp_orff.spectrum(kernel)
    ell = kernel.lengthscale.item()

    def integral(low, high, tilt):
        """By Simpson's rule in log r."""
        log_r = torch.linspace(low, high, 4001).double()
        omega = torch.zeros(len(log_r), num_dims).double()
        omega[:, 0] = log_r.exp() / ell
        with torch.no_grad():
            density = law.log_density(omega).exp() * log_r.exp() ** (2 * tilt + num_dims)
        return scipy.integrate.simpson(density.numpy(), x=log_r.numpy())

    for tilt in tilts(name):
        for share in SHARES:
            cut = math.log(reach_of(law, share, tilt, num_dims))
            outside, inside = integral(cut, cut + 30, tilt), integral(-10, cut, tilt)
            assert outside / (outside + inside) == pytest.approx(share, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("tilt", [0, 1])
def test_the_tail_of_a_spectral_mixture(tilt):
    """By the density on a fine lattice."""
    law = law_of("spectral_mixture", 2)
    axis = torch.linspace(-12, 12, 601).double()
    omega = torch.cartesian_prod(axis, axis)
    weight = law.log_density(omega).exp() * omega.square().sum(-1) ** tilt
    for share in (0.3, 1e-2):
        level = reach_of(law, share, tilt, 2)
        inside = torch.from_numpy(law.scaled_radius(omega.numpy()) <= level)
        lost = 1 - (weight[inside].sum() / weight.sum()).item()
        assert lost == pytest.approx(share, rel=0.05)  # the cells the edge cuts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rbf", "matern32", "matern52", "rq", "spectral_mixture"])
def test_correlations_bound_the_kernel(name):
    """Beyond the lag of a share, no block of the kernel is larger; the bound is sharp."""
    num_dims = 2
    scalar = base(name, num_dims)
    law = gp_orff.spectrum(scalar)
    fields = {0: scalar}
    if name in ("rbf", "matern32", "matern52", "rq"):
        fields[1] = gp_orff.CurlFreeKernel(scalar, num_dims=num_dims)
    for tilt, kernel in fields.items():
        for axis in range(num_dims):
            lags = torch.linspace(0, 40, 2001).double()
            x = torch.zeros(len(lags), num_dims).double()
            x[:, axis] = lags
            with torch.no_grad():
                blocks = kernel(x, torch.zeros(1, num_dims).double()).to_dense()
            blocks = blocks.reshape(len(lags), -1)
            size = (blocks.abs() / blocks[0].abs().clamp_min(1e-300)).clamp_max(1e3)
            size = torch.where(blocks[0].abs() > 1e-12, size, 0.0).amax(-1)
            bound = np.array([law.correlation(r, axis, tilt) for r in lags.tolist()])
            for share in (1e-2, 1e-3):
                beyond = np.nonzero(bound > share)[0].max() + 1
                assert size[beyond:].max() <= share * (1 + 1e-9)
                assert size[: beyond + 1].max() > 0.3 * share or name == "spectral_mixture"


def test_correlations_of_any_smoothness_equal_matern():
    for nu, name in ((1.5, "matern32"), (2.5, "matern52")):
        general = gp_orff.GeneralMaternKernel(nu=nu).double()
        law, known = gp_orff.spectrum(general), gp_orff.spectrum(SPECTRA[name]().double())
        for tilt in (0, 1):
            assert law.correlation(2.0, 0, tilt) == pytest.approx(known.correlation(2.0, 0, tilt))


@pytest.mark.parametrize("name", [n for n in SPECTRA if n not in ("matern12", "matern_general")])
def test_second_moments_are_curvatures(name):
    """E ω_i² = −∂²k/∂r_i² at zero, by differences."""
    kernel = base(name, 2)
    moments = gp_orff.spectrum(kernel).second_moments(2).detach()
    h = {"matern32": 1e-5}.get(name, 1e-3)
    steps = h * torch.eye(2).double()
    zero = torch.zeros(1, 2).double()
    with torch.no_grad():
        at = kernel(steps, zero).to_dense().squeeze(-1)
        start = kernel(zero, zero).to_dense().squeeze()
    found = 2 * (start - at) / h**2 / start
    torch.testing.assert_close(moments, found, rtol=1e-3, atol=0)


def test_second_moments_without_curvatures():
    """Infinite under a kink; by the closed form where the kernel has none."""
    assert torch.isinf(law_of("matern12", 2).second_moments(2)).all()
    kernel = base("matern_general", 2)
    expected = kernel.nu / (kernel.nu - 1) / kernel.lengthscale.squeeze(0).square()
    torch.testing.assert_close(gp_orff.spectrum(kernel).second_moments(2), expected)


def test_batches_take_the_widest_of_both():
    kernel = gpytorch_batch()
    law = gp_orff.spectrum(kernel)
    assert law.scaled_radius(np.eye(2)) == pytest.approx([0.5, 0.5])
    assert law.correlation(3.0, 0, 0) == pytest.approx(math.exp(-0.5 * (3.0 / 2.0) ** 2))


def gpytorch_batch():
    from gpytorch.kernels import RBFKernel

    kernel = RBFKernel(batch_shape=torch.Size([2])).double()
    kernel.lengthscale = torch.tensor([0.5, 2.0]).reshape(2, 1, 1)
    return kernel


def test_other_lengths_leave_the_range_of_a_grid_too():
    """The shortest correlations of a small α, the longest of a narrow component."""
    rational, mixture = base("rq", 2), base("spectral_mixture", 2)
    rational.alpha = 8.0
    for kernel, others in (
        (rational, rational.lengthscale.detach().squeeze(0) * math.sqrt(8 / 9)),
        (mixture, 1 / (2 * math.pi * mixture.mixture_scales.detach().amin((0, 1)))),
    ):
        law = gp_orff.spectrum(kernel)
        assert law.other_lengths(2) == pytest.approx(others.numpy())
        (own,) = draw(kernel, gp_orff.Grid(spacing=0.3, cutoff=6.0), 2)
        assert own.ratio_outside_range([law]) is None
        if kernel is rational:
            kernel.alpha = 0.05
        else:  # the narrower of two
            kernel.mixture_scales = kernel.mixture_scales * torch.tensor([0.1, 1.0])[:, None, None]
        assert own.ratio_outside_range([gp_orff.spectrum(kernel)]) is not None
