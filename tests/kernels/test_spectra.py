"""Spectral densities against their kernels, and samples against their distributions."""

import itertools
import math

import gpytorch
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.autograd import gradcheck

import gp_orff
from gp_orff.kernels.derivatives import derivatives
from gp_orff.kernels.scalar import MaternFunction
from gp_orff.kernels.spectra import GammaQuantile
from gp_orff.kernels.tree import terms
from gp_orff.spectra import spectrum
from tests.support import oracles
from tests.support.registry import SMOOTH, SPECTRA, base

ELLIPTICAL = [name for name in SPECTRA if name != "spectral_mixture"]


def density(kernel, omega):
    """Σ outputscale · S(ω) over the terms of a scalar kernel."""
    return sum(
        term.outputscale * spectrum(term.leaves[0].kernel).log_density(omega).exp()
        for term in terms(kernel)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SPECTRA))
@pytest.mark.parametrize("num_dims", [1, 2])
def test_density_is_the_fourier_transform_of_the_kernel(name, num_dims):
    kernel = base(name, num_dims)
    # trapezoid sums over ω with spacing h alias k at lags 2π/h, and miss the tail beyond W
    spacing = 0.05 if name == "rq" else 0.2  # whose kernel decays like |τ|^{−2α} only
    cutoff = {1: 4000.0, 2: 80.0}[num_dims] if name != "rq" else {1: 60.0, 2: 10.0}[num_dims]
    axis = torch.arange(-cutoff, cutoff + spacing / 2, spacing, dtype=torch.float64)
    omega = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    omega = omega[omega.abs().sum(-1) > 0] if name == "rq" else omega
    with torch.no_grad():
        weights = density(kernel, omega) * spacing**num_dims
        tau = torch.tensor([[0.3, -0.2], [1.0, 0.5]], dtype=torch.float64)[:, :num_dims]
        zero = torch.zeros(1, num_dims, dtype=torch.float64)
        exact = kernel(tau, zero).to_dense().squeeze(-1)
        tail = (kernel(zero).to_dense() - weights.sum()).item()
        transform = (omega @ tau.mT).cos().mT @ weights
    expected_tail = {"matern12": 0.02, "matern32": 1e-3, "rq": 2e-3}.get(name, 1e-5)
    assert abs(tail) < expected_tail
    torch.testing.assert_close(transform, exact, atol=max(1e-6, 3 * abs(tail)), rtol=0)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
@pytest.mark.parametrize("alpha", [0.4, 1.0, 5.0])
def test_rational_quadratic_density_is_a_bessel_function(alpha, num_dims):
    """S(z) = 2 α^α/(Γ(α)(2π)^{d/2}) (q/2α)^{(α−d/2)/2} K_{α−d/2}(√(2αq)), q = ‖z‖²."""
    kernel = base("rq", num_dims)
    kernel.lengthscale = torch.ones(1, num_dims)
    kernel.alpha = torch.tensor(alpha, dtype=torch.float64)
    radius = torch.logspace(-2, 1, 40, dtype=torch.float64)
    omega = torch.zeros(40, num_dims, dtype=torch.float64)
    omega[:, 0] = radius
    q, order = radius.numpy() ** 2, alpha - num_dims / 2
    expected = 2 * alpha**alpha / (math.gamma(alpha) * (2 * math.pi) ** (num_dims / 2))
    expected = expected * (q / (2 * alpha)) ** (order / 2)
    expected = expected * scipy.special.kv(order, np.sqrt(2 * alpha * q))
    found = spectrum(kernel).log_density(omega)
    torch.testing.assert_close(found.exp(), torch.from_numpy(expected), rtol=2e-8, atol=0)
    alphas = torch.tensor([alpha], dtype=torch.float64, requires_grad=True)
    law = spectrum(kernel)
    assert gradcheck(lambda a: type(law)(law.lengthscale.detach(), a).log_density(omega), alphas)


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("num_dims", [1, 2, 3, 5])
def test_second_moment_is_minus_the_laplacian_at_lag_zero(name, num_dims):
    law = spectrum(SPECTRA[name]())
    assert law.moment(0, num_dims) == pytest.approx(1)
    assert law.moment(1, num_dims) == pytest.approx(num_dims * oracles.second_moment(name))


def test_moments_that_do_not_exist_are_infinite():
    assert math.isinf(spectrum(SPECTRA["matern12"]()).moment(1, 2))
    assert math.isinf(spectrum(SPECTRA["matern32"]()).moment(2, 2))
    assert spectrum(SPECTRA["matern_general"]()).moment(1, 2) == pytest.approx(2 * 1.8 / 0.8)


def radius_law(name, num_dims, tilt):
    """The law of ‖z‖² tilted by ‖z‖^{2t}, from the mathematics of χ² and beta-prime variables."""
    if name == "rbf":
        return scipy.stats.chi2(num_dims + 2 * tilt)
    nu = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5, "matern_general": 1.8}[name]
    return scipy.stats.betaprime(num_dims / 2 + tilt, nu - tilt, scale=2 * nu)


def rational_quadratic_sample(num_dims, tilt, alpha=1.4):
    """‖z‖² = s χ²_{d+2t}, s ~ Gamma(α + t, rate α), by plain sampling."""
    rng = np.random.default_rng(5)
    s = rng.gamma(alpha + tilt, 1 / alpha, 20_000)
    return s * rng.chisquare(num_dims + 2 * tilt, 20_000)


def base_sample(law, number, num_dims, tilt):
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((number, num_dims))
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    u = rng.random((number, law.num_coordinates(num_dims)))
    return torch.from_numpy(law.base(directions, u, tilt))


@pytest.mark.parametrize("num_dims", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("name", "tilt"), [(n, t) for n in ELLIPTICAL for t in (0, 1) if (n, t) != ("matern12", 1)]
)
def test_samples_follow_the_tilted_law(name, tilt, num_dims):
    kernel = base(name, num_dims, ard=False)
    kernel.lengthscale = 1.0
    law = spectrum(kernel)
    with torch.no_grad():
        z = law.frequencies(base_sample(law, 4000, num_dims, tilt), tilt).numpy()
    squared_radius = (z**2).sum(-1)
    if name == "rq":
        test = scipy.stats.ks_2samp(squared_radius, rational_quadratic_sample(num_dims, tilt))
    else:
        test = scipy.stats.kstest(squared_radius, radius_law(name, num_dims, tilt).cdf)
    assert test.pvalue > 1e-3
    direction = z / np.sqrt(squared_radius)[:, None]
    covariance = direction.T @ direction / len(z)  # I/d, entries with standard error < 1/√n
    assert np.abs(covariance - np.eye(num_dims) / num_dims).max() < 5 / math.sqrt(len(z))


def test_spectral_mixtures_have_every_pattern_of_signs():
    kernel = base("spectral_mixture", 2)
    law = spectrum(kernel)
    with torch.no_grad():
        variables = base_sample(law, 20_000, 2, 0)
        omega, weights = law.frequencies(variables, 0), law.importance(variables, 0)
        share = (law.weights / law.weights.sum()).unsqueeze(-1)
        means, sd = 2 * math.pi * law.means.squeeze(-2), 2 * math.pi * law.scales.squeeze(-2)
    for signs in itertools.product((-1.0, 1.0), repeat=2):
        own = (omega.sign() == torch.tensor(signs, dtype=torch.float64)).all(-1)
        assert (weights * own).mean().item() == pytest.approx(0.25, abs=0.02)
    second = (weights.unsqueeze(-1) * omega.square()).mean(0)
    torch.testing.assert_close(second, (share * (means**2 + sd**2)).sum(0), rtol=0.05, atol=0)


def test_tilted_density_is_the_density_times_the_squared_radius():
    """∫ over radii of ‖z‖² p(z)/E‖z‖² gives the law that the tilted samples follow."""
    kernel = SPECTRA["matern52"]().double()
    kernel.lengthscale = 1.0
    law = spectrum(kernel)
    for low, high in itertools.pairwise([0.5, 1.0, 2.0, 4.0]):
        r = torch.linspace(low, high, 2001, dtype=torch.float64)
        z = torch.stack([r, torch.zeros_like(r)], dim=-1)
        ring = 2 * math.pi * r * r**2 * law.log_density(z).exp() / law.moment(1, 2)
        expected = radius_law("matern52", 2, 1)
        probability = expected.cdf(high**2) - expected.cdf(low**2)
        assert torch.trapezoid(ring, r).item() == pytest.approx(probability, rel=1e-6)


def test_gradients_reach_every_hyperparameter():
    for name in SPECTRA:
        kernel = base(name, 2)
        for term in terms(kernel):
            law = spectrum(term.leaves[0].kernel)
            omega = law.frequencies(base_sample(law, 20, 2, 0), 0)
            (omega.square().sum() * term.outputscale).backward()
        for parameter_name, parameter in kernel.named_parameters():
            assert parameter.grad.abs().min() > 0, (name, parameter_name)


def test_gamma_quantiles_and_their_derivative():
    a = torch.tensor([[0.3], [1.7], [6.0]], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([0.01, 0.2, 0.5, 0.9, 0.999], dtype=torch.float64)
    expected = scipy.stats.gamma(a.detach().numpy()).ppf(u.numpy())
    torch.testing.assert_close(GammaQuantile.apply(a, u), torch.from_numpy(expected))
    assert gradcheck(lambda t: GammaQuantile.apply(t, u), a, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.005, 0.05, 0.3])
def test_gradients_stay_finite_where_the_scale_underflows(alpha):
    kernel = SPECTRA["rq"]()
    kernel.alpha = alpha
    orff = gp_orff.ORFFKernel(kernel, gp_orff.QuasiMonteCarlo(256), num_dims=2)
    orff(torch.rand(5, 2, generator=torch.Generator().manual_seed(0))).to_dense().sum().backward()
    assert kernel.raw_alpha.grad.isfinite().all()
    assert kernel.raw_lengthscale.grad.isfinite().all()


@pytest.mark.parametrize(
    "kernel",
    [
        gpytorch.kernels.PiecewisePolynomialKernel(),
        gpytorch.kernels.SpectralDeltaKernel(num_dims=1),
        gpytorch.kernels.ArcKernel(gpytorch.kernels.RBFKernel()),
    ],
)
def test_unknown_kernels_are_refused_by_name(kernel):
    with pytest.raises(
        NotImplementedError, match=rf"registered.*MaternKernel.*got {type(kernel).__name__}"
    ):
        gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(8), num_dims=1)


@pytest.mark.parametrize(
    "kernel", [gpytorch.kernels.RBFKernelGrad(), gpytorch.kernels.RBFKernelGradGrad()]
)
def test_subclasses_with_another_covariance_are_refused(kernel):
    name = type(kernel).__name__
    with pytest.raises(NotImplementedError, match=f"{name}, which overrides it"):
        gp_orff.spectrum(kernel)
    with pytest.raises(NotImplementedError, match=f"{name}, which overrides it"):
        gp_orff.CurlFreeKernel(kernel, num_dims=2)


def test_the_smoothest_general_matern_kernels_have_features_only():
    with pytest.raises(NotImplementedError, match=r"nu <= 50 .* got nu=51.0"):
        gp_orff.GeneralMaternKernel(51)(torch.zeros(2, 1)).to_dense()
    with pytest.raises(ValueError, match="expects nu > 0, got -1"):
        gp_orff.GeneralMaternKernel(-1)


@pytest.mark.parametrize("order", [0.3, 1.8, 4.3, 30.0, 49.7, 0.0, -0.2, -0.95, -1.2])
def test_functions_of_general_matern_kernels_are_integrals(order):
    """K_μ(z) = ∫ e^{−z cosh t} cosh(μt) dt (Abramowitz & Stegun, 9.6.24), as a trapezoidal sum."""
    z = torch.logspace(-4 if abs(order) < 2 else -1, 2.8, 300, dtype=torch.float64)
    t = torch.arange(0, 24, 1 / 256, dtype=torch.float64)
    log_cosh = torch.logaddexp(order * t, -order * t) - math.log(2)
    log_terms = z[:, None] * (1 - t.cosh()) + log_cosh - math.log(256)
    log_terms[:, 0] -= math.log(2)
    expected = torch.logsumexp(log_terms, dim=-1) - z + order * z.log()
    values = MaternFunction.apply(z.square(), order).log()
    rounding = 1e-12  # of exponents up to 1000, here and there
    torch.testing.assert_close(values, expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("order", [3.6, -0.4])
def test_functions_of_general_matern_kernels_have_derivatives(order):
    q = torch.tensor([1e-16, 1e-8, 0.1, 3.0, 70.0], dtype=torch.float64)  # also below the table
    t = q.log().requires_grad_()
    assert gradcheck(lambda t: MaternFunction.apply(t.exp(), order).log(), t)


@pytest.mark.parametrize("nu", [1.5, 2.5])
@pytest.mark.parametrize("diag", [False, True])
def test_values_of_the_general_matern_kernel_are_gpytorchs(nu, diag):
    ours = gp_orff.GeneralMaternKernel(nu, ard_num_dims=2).double()
    theirs = gpytorch.kernels.MaternKernel(nu=nu, ard_num_dims=2).double()
    ours.lengthscale = theirs.lengthscale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    x = torch.rand(2, 6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.cat([x[:, :2], 30 * x[:, 2:]], dim=1)  # coincident points, and far ones
    k, expected = (kernel(x, z, diag=diag) for kernel in (ours, theirs))
    if not diag:
        k, expected = k.to_dense(), expected.to_dense()
    torch.testing.assert_close(k, expected, rtol=1e-10, atol=1e-12)  # √(1e-30) in gpytorch
    grads = (
        torch.autograd.grad(values.sum(), kernel.raw_lengthscale)[0]
        for values, kernel in ((k, ours), (expected, theirs))
    )
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("nu", [1.5, 2.5, 40.0, 50.0])
def test_general_matern_kernels_in_single_precision(nu):
    """Values and derivatives of fields, also at repeated points, are those in double precision."""
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0))
    x[3] = x[2]
    found = []
    for dtype in (torch.float32, torch.float64):
        base = gp_orff.GeneralMaternKernel(nu).to(dtype)
        k = gp_orff.CurlFreeKernel(base, num_dims=2)(x.to(dtype)).to_dense()
        found.append(
            (k, base(x.to(dtype)).to_dense(), *torch.autograd.grad(k.sum(), base.raw_lengthscale))
        )
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-5)


def test_fields_of_hardly_any_smoothness_have_features_only():
    kernel = gp_orff.CurlFreeKernel(gp_orff.GeneralMaternKernel(1.1), num_dims=2)
    with pytest.raises(NotImplementedError, match=r"nu >= 1.2, got nu=1.1"):
        kernel(torch.rand(3, 2)).to_dense()


@pytest.mark.parametrize("nu", [2.05, 2.2, 3.1, 200.0])
def test_fourth_derivatives_of_general_matern_kernels_at_lag_zero_are_moments(nu):
    """∂₁⁴ k(0) = E[ω₁⁴] = 3 ν²/((ν − 1)(ν − 2)), the fourth moment of a Student t."""
    kernel = gp_orff.GeneralMaternKernel(nu).double()
    kernel.lengthscale = 1.0
    expected = 3 * nu**2 / ((nu - 1) * (nu - 2))
    assert spectrum(kernel).moment(2, 1) == pytest.approx(expected)
    if nu < 50:
        fourth = derivatives(kernel, torch.zeros(1, 1, 1, dtype=torch.float64), 4)
        assert fourth.item() == pytest.approx(expected, rel=1e-9)


def test_the_general_matern_kernel_is_gpytorchs_where_both_exist():
    ours, theirs = gp_orff.GeneralMaternKernel(2.5), gpytorch.kernels.MaternKernel(nu=2.5)
    omega = torch.linspace(-3, 3, 20).unsqueeze(-1)
    assert torch.equal(spectrum(ours).log_density(omega), spectrum(theirs).log_density(omega))


RANDOM_MEMBERS = ("num_coordinates", "base", "frequencies", "importance", "log_density", "moment")
GRID_MEMBERS = ("scaled_radius", "tail", "correlation", "second_moments")


def member_of_student_t(name):
    def member(self, *arguments, **named):
        law = gp_orff.spectra.StudentT(self.lengthscale, nu=2.5)
        return getattr(law, name)(*arguments, **named)

    return member


def kernel_of_others(base, members):
    """A Matérn 5/2 kernel whose law has these members and what it inherits, and no others."""

    class Mine(gpytorch.kernels.Kernel):
        has_lengthscale = True

    law = type("Law", (base,), {name: member_of_student_t(name) for name in members})

    @gp_orff.spectrum.register
    def _(kernel: Mine):
        own = law()
        own.lengthscale = kernel.lengthscale
        return own

    return gpytorch.kernels.MultitaskKernel(Mine(ard_num_dims=2), num_tasks=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*poorly:gp_orff.DataWarning")
@pytest.mark.parametrize(
    ("base", "members"),
    [
        (gp_orff.spectra.Spectrum, RANDOM_MEMBERS),
        (gp_orff.spectra.GridSpectrum, RANDOM_MEMBERS + GRID_MEMBERS),
        (object, RANDOM_MEMBERS),  # which is no subclass
    ],
)
def test_laws_of_others_have_what_random_rules_need(base, members):
    """Of hyperparameters that a law does not name, the ranges are not known."""
    kernel = kernel_of_others(base, members)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(30, 2, generator=generator), torch.randn(30, 2, generator=generator)
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.QuasiMonteCarlo(16))
    assert model.fit(x, y, progress=False).posterior().mean(x).isfinite().all()


def test_laws_of_others_have_what_grids_need():
    kernel = kernel_of_others(gp_orff.spectra.GridSpectrum, RANDOM_MEMBERS + GRID_MEMBERS).double()
    kernel.data_covar_module.lengthscale = 0.5
    x = torch.rand(30, 2, generator=torch.Generator().manual_seed(0))
    grid = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-3)).accuracy()
    assert grid[0].truncated < 1e-3


@pytest.mark.parametrize("base", [gp_orff.spectra.Spectrum, object])
def test_laws_of_others_without_it_are_refused_by_grids(base):
    kernel, x = kernel_of_others(base, RANDOM_MEMBERS), torch.zeros(3, 2)
    with pytest.raises(
        NotImplementedError, match=r"spectra\.GridSpectrum, got Law, which has no scaled"
    ):
        gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))


@pytest.mark.parametrize(
    "cls", [gpytorch.kernels.MaternKernel, gpytorch.kernels.RBFKernel, gpytorch.kernels.RQKernel]
)
def test_neither_density_nor_derivatives_are_inherited_with_another_covariance(cls):
    class Mine(cls):
        def forward(self, x1, x2, **params):
            return super().forward(x1, x2, **params).square()

    for ask in (gp_orff.spectrum, lambda k: gp_orff.radial_derivatives(k, torch.ones(1))):
        with pytest.raises(NotImplementedError, match="got Mine, which overrides it"):
            ask(Mine())
