"""The rational quadratic kernel for a wide range of α: spectral density, tail, grids."""

import math

import gpytorch
import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.special
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, RQKernel
from torch.autograd import gradcheck

import gp_orff
from gp_orff.features.assemble import expand
from gp_orff.features.truncation import clamp_eigenvalues, truncated_variance
from gp_orff.kernels.derivatives import derivatives
from gp_orff.kernels.lattice_sums import (
    aliased,
    aliased_curvature,
    nonzero_sum,
    second_moments,
    weight_at_zero,
)
from gp_orff.kernels.spectra import GammaQuantile
from gp_orff.spectra import GammaMixture, Gaussian
from gp_orff.symbols.base import Identity
from tests.support import oracles
from tests.support.fields import exact_problem
from tests.support.models import asked

ALPHAS = (0.01, 0.05, 0.5, 0.69, 1.0, 1.0001, 1.5, 2.0, 8.3, 19.9, 20.1, 1e3, 1e6, 1e9)
RADII = (1e-6, 1e-3, 0.1, 1.0, 4.0, 12.0, 40.0)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def law_of(alpha, *lengthscale):
    return GammaMixture(float64(*(lengthscale or (1.0,))).unsqueeze(0), float64(alpha))


def along_first(radii, num_dims):
    omega = torch.zeros(len(radii), num_dims).double()
    omega[:, 0] = float64(*radii)
    return omega


def log_density(alpha, radius, num_dims):
    """2 α^α (r²/2α)^{ν/2} K_ν(r √2α) / (Γ(α) (2π)^{d/2}), ν = α − d/2, to 40 digits.

    For large α K_ν is ½ ∫ exp(νt − x cosh t) dt around its peak.
    """
    with mpmath.workdps(40):
        alpha, radius = mpmath.mpf(alpha), mpmath.mpf(radius)
        half = mpmath.mpf(num_dims) / 2
        nu, x = alpha - half, radius * mpmath.sqrt(2 * alpha)
        start = alpha * mpmath.log(alpha) - mpmath.loggamma(alpha)
        start -= half * mpmath.log(2 * mpmath.pi)
        start += nu * mpmath.log(radius / mpmath.sqrt(2 * alpha)) + mpmath.log(2)
        if alpha < 50:
            return start + mpmath.log(mpmath.besselk(nu, x))
        peak = mpmath.asinh(nu / x)
        width = 1 / mpmath.sqrt(x * mpmath.cosh(peak))
        top = nu * peak - x * mpmath.cosh(peak)

        def integrand(step):
            t = peak + step * width / 3  # the trapezoid rule is exact to e^{−2π² 9}
            return mpmath.exp(nu * t - x * mpmath.cosh(t) - top)

        total = sum(integrand(step) for step in range(-45, 46)) * width / 3
        return start + top + mpmath.log(total / 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_density_is_a_bessel_function(alpha, num_dims):
    """Errors of log S are relative errors of S; rounding of r itself is 1e-16 r² at most."""
    found = law_of(alpha).log_density(along_first(RADII, num_dims)).tolist()
    for radius, own in zip(RADII, found, strict=True):
        expected = log_density(alpha, radius, num_dims)
        assert abs(float(own - expected)) < 1e-11


@pytest.mark.parametrize(("alpha", "num_dims"), [(0.05, 1), (0.5, 1), (1.0, 2), (8.3, 3), (1e3, 2)])
def test_its_slope_in_alpha(alpha, num_dims):
    """Against differences of the closed form at 40 digits."""
    law = law_of(alpha)
    law.alpha.requires_grad_()
    for radius in (1e-3, 1.0, 8.0):
        (found,) = torch.autograd.grad(
            law.log_density(along_first([radius], num_dims)).sum(), law.alpha
        )
        with mpmath.workdps(40):
            step = mpmath.mpf(alpha) * mpmath.mpf(10) ** -8
            ends = [log_density(alpha + sign * step, radius, num_dims) for sign in (1, -1)]
            expected = float((ends[0] - ends[1]) / (2 * step))
        assert found.item() == pytest.approx(expected, rel=1e-8)


EVERYWHERE = [(alpha, num_dims) for alpha in ALPHAS for num_dims in (1, 2, 3)]


@pytest.mark.parametrize(("alpha", "num_dims"), [(a, d) for a, d in EVERYWHERE if a <= d / 2])
def test_the_density_at_zero_may_be_infinite(alpha, num_dims):
    assert law_of(alpha).log_density(torch.zeros(1, num_dims).double()).item() == math.inf


@pytest.mark.parametrize(("alpha", "num_dims"), [(a, d) for a, d in EVERYWHERE if a > d / 2])
def test_the_density_at_zero(alpha, num_dims):
    """(α/2π)^{d/2} Γ(α − d/2)/Γ(α)."""
    found = law_of(alpha).log_density(torch.zeros(1, num_dims).double()).item()
    with mpmath.workdps(40):
        exact, half = mpmath.mpf(alpha), mpmath.mpf(num_dims) / 2
        ratio = mpmath.loggamma(exact - half) - mpmath.loggamma(exact)
        expected = half * mpmath.log(exact / (2 * mpmath.pi)) + ratio
    assert abs(float(found - expected)) < 1e-11


@pytest.mark.parametrize("alpha", [0.3, 1.5, 1e4])
def test_the_density_has_derivatives(alpha):
    omega = torch.cat([float64(0.4, -0.3, 0.9, 2.0).reshape(2, 2), torch.zeros(int(alpha > 1), 2)])
    arguments = float64(0.7, 1.2).unsqueeze(0), float64(alpha), omega.double()
    arguments = [value.requires_grad_() for value in arguments]
    assert gradcheck(
        lambda lengthscale, a, w: GammaMixture(lengthscale, a).log_density(w),
        arguments,
        eps=1e-5 * min(alpha, 1.0),
        atol=1e-7,
    )


def test_a_batch_of_densities_is_each_of_them():
    alphas = float64(0.05, 2.0, 1e6).unsqueeze(-1)
    lengthscales = float64(0.5, 1.0, 2.0).reshape(3, 1, 1)
    omega = torch.cat([torch.zeros(1, 2).double(), along_first(RADII, 2)])
    found = GammaMixture(lengthscales, alphas).log_density(omega)
    for index in range(3):
        alone = GammaMixture(lengthscales[index], alphas[index]).log_density(omega)
        torch.testing.assert_close(found[index], alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize("alpha", [1e6, 1e9, 1e12])
def test_the_limit_is_rbf(alpha):
    """log S differs by terms of r⁴/α, and by the rounding of exponents √α large."""
    omega = along_first([0.0, 0.3, 1.0, 3.0], 2)
    gap = law_of(alpha).log_density(omega) - Gaussian(float64(1.0).unsqueeze(0)).log_density(omega)
    assert gap.abs().max() < 20 / alpha + 1e-16 * math.sqrt(alpha)


@pytest.mark.parametrize("tilt", [0, 1])
@pytest.mark.parametrize("alpha", [0.01, 0.5, 2.0, 30.0])
def test_the_tail_is_a_bessel_function(alpha, tilt):
    """In two dimensions P(s χ² > W²) = E e^{−W²/2s}, and for tilt 1 E (1 + W²/2s) e^{−W²/2s}."""
    law, a = law_of(alpha), alpha + tilt
    for reach in (1e-2, 1.0, 4.0, 9.0):
        with mpmath.workdps(40):
            x = mpmath.mpf(reach) * mpmath.sqrt(2 * mpmath.mpf(alpha))
            half = mpmath.mpf(reach) ** 2 / 2

            def expectation(power, a=a, x=x):  # of s^{−power} e^{−W²/2s}
                mass = 2 * mpmath.mpf(alpha) ** power / mpmath.gamma(a)
                return mass * (x / 2) ** (a - power) * mpmath.besselk(a - power, x)

            expected = expectation(0) + tilt * half * expectation(1)
        assert law.tail(reach, tilt, 2) == pytest.approx(float(expected), rel=1e-8)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("tilt", [0, 1])
def test_tail_and_correlation_of_a_large_alpha_are_those_of_rbf(num_dims, tilt):
    law, rbf = law_of(1e9), Gaussian(float64(1.0).unsqueeze(0))
    for reach in (0.5, 3.0, 7.0):
        expected = rbf.tail(reach, tilt, num_dims)
        assert law.tail(reach, tilt, num_dims) == pytest.approx(expected, rel=1e-6)
        expected = math.exp(-(reach**2) / 2) * max(1.0, reach**2 - 1) ** tilt
        assert law.correlation(reach, 0, tilt) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("a", [0.5, 30.0, 1e6])
def test_the_slope_of_a_gamma_quantile(a):
    """Against differences of the quantile itself."""
    u, shape = float64(0.01, 0.3, 0.9), torch.full((1,), a).double().requires_grad_()
    GammaQuantile.apply(shape, u).sum().backward()
    h = 1e-4 * a
    ends = [scipy.special.gammaincinv(a + sign * h, u.numpy()).sum() for sign in (1, -1)]
    assert shape.grad.item() == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-6)


CELLS = [(0.05, 1), (0.5, 1), (1.0, 1), (8.3, 1), (1e6, 1), (1.0, 2), (2.0, 2), (30.0, 2)]


def problem(alpha, num_dims):
    """A law, a spacing, and the other points of a lattice that leaves less than 1e-12."""
    law, spacing = law_of(alpha, *(0.7, 1.1)[:num_dims]), float64(0.5, 0.6)[:num_dims]
    index = torch.arange(-1500, 1501) if num_dims == 1 else torch.arange(-60, 61)
    points = torch.cartesian_prod(*[index.double()] * num_dims).reshape(-1, num_dims)
    return law, spacing, points[points.any(-1)]


@pytest.mark.parametrize(("alpha", "num_dims"), CELLS)
def test_sums_over_a_lattice(alpha, num_dims):
    law, spacing, others = problem(alpha, num_dims)
    omega = others * spacing
    weights = spacing.prod() * law.log_density(omega).exp()
    torch.testing.assert_close(nonzero_sum(law, spacing), weights.sum(), rtol=1e-10, atol=0)
    expected = 1 - weights.sum()
    torch.testing.assert_close(weight_at_zero(law, spacing), expected, rtol=0, atol=1e-11)
    expected = (weights.unsqueeze(-1) * omega).mT @ omega
    torch.testing.assert_close(second_moments(law, spacing), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("alpha", "num_dims"), [(0.5, 1), (2.0, 1), (2.0, 2), (8.3, 2)])
def test_aliasing_is_a_sum_of_images(alpha, num_dims):
    """Up to a constant; sums of images beyond the 1500th (60th) are below the tolerance."""
    law, spacing, others = problem(alpha, num_dims)
    kernel = RQKernel(ard_num_dims=num_dims).double()
    kernel.lengthscale, kernel.alpha = law.lengthscale, law.alpha
    images, lag = others * (2 * math.pi / spacing), float64(2.0, 3.0)[:num_dims]
    origin = torch.zeros(1, num_dims).double()
    with torch.no_grad():
        expected = (kernel(images + lag, origin) - kernel(images, origin)).to_dense().sum()
        found = aliased(law, spacing, lag)
    assert found.item() == pytest.approx(expected.item(), rel=2e-3, abs=1e-13)
    with torch.no_grad():
        expected = -derivatives(kernel, (images + lag).unsqueeze(-2), 2).sum((0, 1))
        found = aliased_curvature(law, spacing, lag)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-10)


@pytest.mark.parametrize("num_dims", [1, 2])
def test_the_weight_of_zero_is_smooth_in_alpha(num_dims):
    """Also where S(0) becomes finite; far above, it is the midpoint's."""
    spacing, half = float64(0.5, 0.6)[:num_dims], num_dims / 2
    alphas = [half + step for step in (-1e-4, -1e-9, 1e-9, 1e-4)]
    found = [weight_at_zero(law_of(alpha, 0.7), spacing).item() for alpha in alphas]
    assert np.diff(found, 2) == pytest.approx([0, 0], abs=1e-4)
    assert max(found) - min(found) < 1e-3
    smooth = law_of(60.0, 0.7)
    midpoint = spacing.prod() * smooth.log_density(torch.zeros(1, num_dims).double()).exp()
    torch.testing.assert_close(weight_at_zero(smooth, spacing), midpoint[0], rtol=1e-11, atol=0)


@pytest.mark.parametrize("alpha", [0.05, 1.0, 30.0])
def test_sums_over_a_lattice_have_derivatives(alpha):
    spacing = float64(0.5, 0.6)
    arguments = [float64(0.7, 1.1).unsqueeze(0), float64(alpha)]

    def sums(lengthscale, a):
        law = GammaMixture(lengthscale, a)
        return weight_at_zero(law, spacing), second_moments(law, spacing)

    assert gradcheck(sums, [v.requires_grad_() for v in arguments], eps=1e-6 * min(alpha, 1))


def separable(scalar, num_dims):
    kernel = MultitaskKernel(scalar, num_tasks=2, rank=1).double()
    kernel.task_covar_module.covar_factor.data.copy_(float64(1.0, 0.7).unsqueeze(-1))
    kernel.task_covar_module.var = float64(0.2, 0.2)
    return kernel


KINDS = {
    "separable": separable,
    "curl-free": lambda scalar, d: gp_orff.CurlFreeKernel(scalar, num_dims=d),
    "divergence-free": lambda scalar, d: gp_orff.DivergenceFreeKernel(scalar, num_dims=d),
}
EXTENT = 5.0  # lengthscales
TABLE = [("separable", 1, a) for a in (0.05, 0.5, 1.0, 2.0, 8.3, 30.0, 1e3, 1e6)]
TABLE += [("curl-free", 1, a) for a in (0.05, 0.5, 2.0, 8.3, 1e6)]
TABLE += [("separable", 2, a) for a in (8.3, 30.0, 1e6)]
TABLE += [(kind, 2, a) for kind in ("curl-free", "divergence-free") for a in (8.3, 30.0, 1e6)]


def on_a_grid(kind, num_dims, alpha, **options):
    scalar = RQKernel().double()
    scalar.alpha, scalar.lengthscale = alpha, 1.0
    kernel = KINDS[kind](scalar, num_dims)
    box = ((-EXTENT / 2, EXTENT / 2),) * num_dims
    grid = gp_orff.Grid(domain=box, lengthscale_range=(1.0, 1.0), **options)
    return kernel, gp_orff.ORFFKernel(kernel, grid, num_dims=num_dims)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_dims", "alpha"), TABLE)
def test_a_grid_is_the_exact_kernel(kind, num_dims, alpha):
    """Evidence to 1e-3 nats a number, standard deviations to 1e-2: what `benchmarks/` has for 400
    points and for grids of up to 20 000 features."""
    kernel, grid = on_a_grid(kind, num_dims, alpha, tolerance=1e-6, max_features=1200)
    x, y, xs, _, noise = exact_problem(kernel, num_dims, 100, 10.0, EXTENT)
    evidence, _, sd = asked(kernel, x, y, xs[:50], noise)
    found, _, own = asked(grid, x, y, xs[:50], noise)
    assert abs(found - evidence) / y.shape[-1] < 1e-3
    assert ((own - sd).abs() / sd).max() < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [0.05, 0.5, 2.0, 1e6])
def test_accuracy_foretells_the_error_of_the_kernel(kind, alpha):
    """Within a factor of 2, at lags from next to zero to the corner, on a budget."""
    kernel, grid = on_a_grid(kind, 2, alpha, tolerance=1e-4, max_features=800)
    (accuracy,) = grid.accuracy()
    axis = torch.cat([float64(0.0, 1e-4, 1e-2, 0.1), torch.linspace(0.5, EXTENT, 10).double()])
    low = torch.full((1, 2), -EXTENT / 2).double()
    lags = torch.cartesian_prod(axis, axis)[1:] + low
    with torch.no_grad():
        error = (grid(lags, low).to_dense() - kernel(lags, low).to_dense()).abs().max()
        size = kernel(low).to_dense().diagonal().max()
    foretold = accuracy.truncated + accuracy.aliasing
    assert 0.5 < foretold / (error / size) < 2


def test_a_period_within_the_range_of_the_kernel():
    """Other points weigh more than k(0): zero weighs nothing, and the excess is told."""
    kernel, grid = on_a_grid("separable", 2, 0.5, spacing=(0.05, 1.2), cutoff=8.0)
    assert weight_at_zero(gp_orff.spectrum(kernel.data_covar_module), float64(0.05, 1.2)) == 0
    (accuracy,) = grid.accuracy()
    axis = torch.linspace(-EXTENT / 2, EXTENT / 2, 13).double()
    x = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        exact = kernel(x, x[:1]).to_dense()
        size, error = exact.max(), (grid(x, x[:1]).to_dense() - exact).abs().max()
        expansion = expand(kernel, grid.frequencies, 2)
        white = truncated_variance(Identity(), kernel, grid.frequencies, (), expansion)[0]
    assert error > 0.1 * size
    assert accuracy.aliasing == pytest.approx((error / size).item(), rel=0.1)
    assert torch.linalg.eigvalsh(white).min() >= 0


def test_a_share_below_zero_is_told():
    """A kernel whose images are not known, on a period within its range."""
    scalar = gp_orff.GeneralMaternKernel(nu=60.0).double()
    scalar.lengthscale = 1.0
    kernel = gp_orff.ORFFKernel(scalar, gp_orff.Grid(spacing=2.5, cutoff=200.0), num_dims=1)
    expansion = expand(scalar, kernel.frequencies, 1)
    kept = expansion.mean_variance().item()
    assert kept > 1.01
    assert kernel.accuracy()[0].truncated == pytest.approx(kept - 1, rel=1e-9)
    assert (
        truncated_variance(Identity(), scalar, kernel.frequencies, (), expansion)[0].abs().max()
        < 1e-12
    )


def test_what_is_below_zero_makes_no_noise_elsewhere():
    """A negative eigenvalue is raised, and no other."""
    whole = torch.eye(2).double()
    missing = float64(-0.1, -0.07, -0.07, -0.049).reshape(2, 2)
    assert clamp_eigenvalues(missing, whole).abs().max() < 1e-12
    missing = missing + float64(0.3, 0.0, 0.0, 0.3).reshape(2, 2)
    torch.testing.assert_close(clamp_eigenvalues(missing, whole), missing)


def test_time_may_have_any_alpha():
    """A field kernel times a rational quadratic one of time: each leaf has its weight of zero."""
    time = RQKernel(active_dims=(2,)).double()
    time.alpha, time.lengthscale = 0.3, 1.0
    field = gp_orff.CurlFreeKernel(RBFKernel().double(), num_dims=2, active_dims=(0, 1))
    field.base_kernel.lengthscale = 1.0
    kernel = (field * time).double()
    box = ((0.0, 1.0), (0.0, 1.0), (0.0, 3.0))
    grid = gp_orff.ORFFKernel(
        kernel, gp_orff.Grid(domain=box, tolerance=3e-3, lengthscale_range=(1.0, 1.0))
    )
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).double()
    x = x * float64(1.0, 1.0, 3.0)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(10**4):
        error = (grid(x).to_dense() - kernel(x).to_dense()).abs().max().item()
    (accuracy,) = grid.accuracy()
    assert error < accuracy.truncated + accuracy.aliasing < 0.05


@pytest.mark.parametrize("tilt", [0, 1])
def test_a_batch_reaches_as_far_as_its_widest(tilt):
    """The smallest α has the longest tail, the longest range and the shortest lengths."""
    alone, batch = [law_of(alpha) for alpha in (0.4, 3.0)], law_of(3.0)
    batch = GammaMixture(batch.lengthscale.expand(2, 1, 1), float64(0.4, 3.0).unsqueeze(-1))
    for own in (3.0, 7.0):
        assert batch.tail(own, tilt, 2) == max(law.tail(own, tilt, 2) for law in alone)
    far = [law.correlation(20.0, 0, tilt) for law in (batch, *alone)]  # lags such as periods
    assert far[0] == max(far[1:])
    expected = min(law.other_lengths(1).item() for law in alone)
    assert batch.other_lengths(1).item() == expected


@pytest.mark.parametrize("alpha", [0.7, 2.5])
def test_the_fourth_moment_is_the_fourth_derivative(alpha):
    """E ω⁴ = k⁗(0) in one dimension; rounding."""
    tau = float64(0.0)[0].requires_grad_()
    slope = oracles.rational_quadratic(tau.unsqueeze(0), 1.0, alpha)
    for _ in range(4):
        (slope,) = torch.autograd.grad(slope, tau, create_graph=True)
    torch.testing.assert_close(law_of(alpha).moment(2, 1), slope.detach().unsqueeze(0))


def test_the_slope_of_a_gamma_quantile_within_a_graph():
    """Where more derivatives may follow it is good to 1e-3; the next one is not known."""
    u = torch.linspace(0.05, 0.95, 7).double()
    for alpha in (0.3, 1.7, 12.0):
        a = float64(alpha).requires_grad_()
        (expected,) = torch.autograd.grad(GammaQuantile.apply(a, u).sum(), a)
        (found,) = torch.autograd.grad(GammaQuantile.apply(a, u).sum(), a, create_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)
        with pytest.raises(RuntimeError, match="not implemented"):
            torch.autograd.grad(found.sum(), a)


def test_a_lift_has_the_derivative_of_its_eigenvalues():
    """Of one direction that is below zero and two that are not; finite differences."""
    rotation, _ = torch.linalg.qr(float64(*range(9)).reshape(3, 3).sin())
    missing = rotation @ torch.diag(float64(-0.3, 0.2, 0.9)) @ rotation.mT
    whole = torch.diag(float64(1.0, 4.0, 0.5))
    units = whole.sqrt()
    values, vectors = torch.linalg.eigh(units.inverse() @ missing @ units.inverse())
    expected = units @ vectors @ values.clamp_min(0).diag() @ vectors.mT @ units
    torch.testing.assert_close(clamp_eigenvalues(missing, whole), expected)
    assert gradcheck(clamp_eigenvalues, [missing.requires_grad_(), whole])


@pytest.mark.parametrize("alpha", [0.3, 2.0])
def test_the_correlation_of_a_slope_is_its_second_derivative(alpha):
    """The larger of the two along and across the lag, over that at zero."""

    def k(tau):
        return oracles.rational_quadratic(tau, 1.0, alpha)

    for lag in (0.5, 2.0, 9.0):
        curvature = torch.func.hessian(k)(float64(lag, 0.0)).diagonal().abs().max().item()
        assert law_of(alpha).correlation(lag, 0, 1) == pytest.approx(curvature)
        assert law_of(alpha).correlation(lag, 0, 0) == pytest.approx(k(float64(lag)).item())
