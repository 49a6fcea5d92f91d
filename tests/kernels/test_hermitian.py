"""Hermitian spectral matrices: outputs with a shift between them."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.means import ZeroMean
from linear_operator import to_dense

import gp_orff
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import Components, GroupKey
from gp_orff.fitting.delays import starting_delays
from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel, TraceSampler
from tests.support.delays import DELAY, Delayed, dense, made, signature

RULES = {
    "grid": gp_orff.Grid(domain=((-2.0, 2.0),), tolerance=1e-10),
    "quasi": gp_orff.QuasiMonteCarlo(2**12),
    "shared": gp_orff.Orthogonal(2**10, seed=1),
}


X = torch.linspace(-1.5, 1.5, 12).double().unsqueeze(-1)


def test_the_covariance_is_that_of_a_delayed_signal():
    kernel, z = made(), X[:3] + 0.1
    torch.testing.assert_close(to_dense(kernel(X, z)), dense(X, z), rtol=0, atol=1e-8)
    torch.testing.assert_close(to_dense(kernel(z, X)), dense(X, z).mT, rtol=0, atol=1e-8)
    torch.testing.assert_close(kernel(X, diag=True), torch.ones(24).double(), rtol=0, atol=1e-8)


@pytest.mark.parametrize(("rule", "bound"), [("grid", 1e-8), ("quasi", 0.02), ("shared", 0.08)])
def test_features(rule, bound):
    kernel = gp_orff.ORFFKernel(made(), RULES[rule], num_dims=1)
    features = kernel.features(X)
    assert not features.is_complex()
    torch.testing.assert_close(features @ features.mT, dense(X, X), rtol=0, atol=bound)
    torch.testing.assert_close(to_dense(kernel(X, X)), features @ features.mT, rtol=0, atol=1e-12)


def test_features_are_shifted_waves():
    """cos⟨ω, x − τ⟩ and sin⟨ω, x − τ⟩ in the second output, for every frequency."""
    kernel = gp_orff.ORFFKernel(made(), gp_orff.QuasiMonteCarlo(64), num_dims=1)
    values = kernel.features(X).unflatten(0, (12, 2))
    later = kernel.features(X - DELAY).unflatten(0, (12, 2))
    torch.testing.assert_close(values[:, 1], later[:, 0], rtol=0, atol=1e-12)


def test_from_a_signature_with_a_delay():
    kernel = SpectralMatrixKernel.from_signature(signature, [(-2.0, 2.0)])
    torch.testing.assert_close(to_dense(kernel(X, X)), dense(X, X), rtol=0, atol=1e-6)
    features = gp_orff.ORFFKernel(kernel, RULES["grid"], num_dims=1).features(X)
    torch.testing.assert_close(features @ features.mT, dense(X, X), rtol=0, atol=1e-5)


def two_scales(lag):
    """Two outputs of two lengthscales in the plane, of which one varies on both."""
    square = lag.square().sum(-1)
    near, far = torch.exp(-0.5 * square / 0.15**2), torch.exp(-0.5 * square / 0.8**2)
    rows = [torch.stack([0.2 * near + far, 0.5 * far], -1), torch.stack([0.5 * far, far], -1)]
    return torch.stack(rows, -2)


@pytest.mark.parametrize("units", [1.0, 1e6])
def test_frequencies_of_a_signature_have_the_density_of_its_trace(units):
    """Minh 2016, Theorem 9: tr μ̃ = tr C/ρ is tr K(0) everywhere, with outputs in their units.

    Linear between points h apart, a Gaussian density of scale 1/ℓ is wrong by h²ℓ²/8 at its peak,
    and by more, but the other way, in its tails: h = π/16 for lags up to 8, 0.3 % for ℓ = 0.8.
    """
    unit = torch.tensor([units, 1.0]).double()

    def signature(lag):
        return two_scales(lag) * unit * unit[:, None]

    kernel = SpectralMatrixKernel.from_signature(signature, [(0.0, 2.0)] * 2)
    u = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    omega, log_density = kernel.sampler(u)
    square = omega.square().sum(-1)
    near, far = (
        length**2 / (2 * math.pi) * torch.exp(-0.5 * square * length**2) for length in (0.15, 0.8)
    )
    trace = (0.2 * near + far) / 1.2 + far  # of correlations, whose tr K(0) is 2
    ratio = trace / log_density.exp() / 2
    assert (ratio - 1).abs().max() < 0.03
    assert abs(ratio.mean() - 1) < 5 * ratio.std() / 2000**0.5  # ρ is normed
    moment = (0.2 * 2 / 0.15**2 + 2 / 0.64) / 1.2 + 2 / 0.64  # of ‖ω‖² in tr C
    assert abs(square.mean() - moment / 2) < 5 * square.std() / 2000**0.5


def test_moments_of_a_density_that_is_linear_between_points():
    """A sum of triangles: E ω₁ω₂ = Σ f j k/Σ f, E ω₁² = Σ f (j² + 1/6)/Σ f, by midpoints of u.

    The weights 1/ρ integrate to the area. The quantile has a slope at the ends: 1e-3.
    """
    heights = torch.tensor([[1.0, 4.0, 2.0], [3.0, 5.0, 1.0], [2.0, 2.0, 6.0]]).double()
    index = torch.arange(-1.0, 2.0).double()
    middle = (torch.arange(300).double() + 0.5) / 300
    sampler = TraceSampler(heights, torch.tensor([1.0, 2.0]).double())
    omega, log_density = sampler(torch.cartesian_prod(middle, middle))
    total = heights.sum()
    product = 2 * torch.einsum("jk,j,k->", heights, index, index) / total
    square = (heights.sum(1) @ (index.square() + 1 / 6)) / total
    assert omega.prod(-1).mean() == pytest.approx(product.item(), abs=1e-3)
    assert omega[:, 0].square().mean() == pytest.approx(square.item(), abs=1e-3)
    assert log_density.exp().reciprocal().mean() == pytest.approx(4 * 8, rel=0.05)


def test_features_of_a_signature_are_bounded_and_unbiased():
    """tr μ̃ of a single frequency is tr K(0) = 2, but for the interpolation of its density."""
    kernel = SpectralMatrixKernel.from_signature(signature, [(-2.0, 2.0)])
    features = gp_orff.ORFFKernel(kernel, gp_orff.QuasiMonteCarlo(512), num_dims=1)
    values = features.features(X)
    torch.testing.assert_close(values @ values.mT, dense(X, X), rtol=0, atol=0.02)
    one = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(1, seed=3), num_dims=1)
    trace = one.features(X[:1]).square().sum().item()
    assert trace == pytest.approx(2, rel=0.03)
    sampled = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(512, measure="base"), num_dims=1)
    assert not any("proposed" in name for name in sampled.state_dict())


def test_frequencies_of_older_files_are_those_of_the_base_kernel():
    """Their state has no mark of the density."""
    kernel = SpectralMatrixKernel.from_signature(signature, [(-2.0, 2.0)])
    made = [
        gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64, measure=measure), num_dims=1)
        for measure in ("base", "trace")
    ]
    old, new = made
    assert not torch.equal(old.features(X), new.features(X))
    new.load_state_dict(old.state_dict())
    torch.testing.assert_close(new.features(X), old.features(X), rtol=0, atol=1e-12)
    again = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(64), num_dims=1)
    again.load_state_dict(new.state_dict())
    torch.testing.assert_close(again.features(X), old.features(X), rtol=0, atol=1e-12)


def test_from_the_signature_of_a_function_and_its_derivative():
    """iω times the first output: imaginary everywhere, and zero at ω = 0, but no real kernel is."""

    def with_derivative(lag, a=0.3):
        d = lag[:, 0]
        rows = [torch.ones_like(d), d / a**2, -d / a**2, 1 / a**2 - d.square() / a**4]
        return (torch.exp(-0.5 * (d / a).square()) * torch.stack(rows)).T.reshape(-1, 2, 2)

    kernel = SpectralMatrixKernel.from_signature(with_derivative, [(0.0, 3.0)])
    expected = with_derivative((X - X.mT).reshape(-1, 1)).reshape(12, 12, 2, 2)
    expected = expected.movedim(-2, 1).reshape(24, 24)
    torch.testing.assert_close(to_dense(kernel(X, X)), expected, rtol=0, atol=1e-5)
    features = gp_orff.ORFFKernel(kernel, RULES["grid"], num_dims=1).features(X)
    torch.testing.assert_close(features @ features.mT, expected, rtol=0, atol=1e-4)


def simulated(delay, n, noise, seed):
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(n, 1, generator=generator, dtype=torch.float64)
    covariance = dense(x, x, delay) + 1e-9 * torch.eye(2 * n).double()
    normal = torch.randn(2, 2 * n, generator=generator, dtype=torch.float64)
    field = torch.linalg.cholesky(covariance) @ normal[0]
    return x, (field + noise * normal[1]).reshape(n, 2)


@pytest.mark.parametrize("rule", ["exact", "grid"])
def test_the_posterior_is_that_of_dense_algebra(rule):
    x, y = simulated(DELAY, 20, 0.1, seed=0)
    rule = gp_orff.Grid(domain=((-1.0, 9.0),), tolerance=1e-10) if rule == "grid" else None
    options = {} if rule is None else {"frequencies": rule}
    model = gp_orff.VectorFieldGP(made(), mean=ZeroMean(), **options)
    model.likelihood.noise = 0.01
    model.condition(x, y)
    outputscale = model.kernel.outputscale.item() if hasattr(model.kernel, "outputscale") else 1.0
    k = outputscale * dense(x, x) + 0.01 * torch.eye(40).double()
    xs = torch.tensor([[2.0], [6.5]]).double()
    cross = outputscale * dense(xs, x)
    mean = (cross @ torch.linalg.solve(k, y.flatten())).reshape(2, 2)
    covariance = outputscale * dense(xs, xs) - cross @ torch.linalg.solve(k, cross.mT)
    bound = 1e-6 if options else 1e-3  # of the grid: chosen here, or by the noise
    torch.testing.assert_close(model.posterior().mean(xs), mean, rtol=0, atol=bound)
    torch.testing.assert_close(
        model.posterior().variance(xs), covariance.diag().reshape(2, 2), rtol=0, atol=bound
    )
    density = torch.distributions.MultivariateNormal(torch.zeros(40).double(), k)
    evidence = model.log_marginal_likelihood()
    torch.testing.assert_close(evidence, density.log_prob(y.flatten()), rtol=0, atol=200 * bound)


def test_derivatives_of_a_delayed_signal():
    x, y = simulated(DELAY, 20, 0.1, seed=0)
    posterior = gp_orff.VectorFieldGP(made()).condition(x, y).posterior()
    xs, step = torch.tensor([[3.0], [5.0]]).double(), 1e-5
    slopes = (posterior.mean(xs + step) - posterior.mean(xs - step)) / (2 * step)
    found = posterior.mean(xs, gp_orff.Jacobian(num_dims=1))
    torch.testing.assert_close(found, slopes, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_delay_is_learned():
    """By marginal likelihood, with the gradient of a complex amplitude."""
    x, y = simulated(DELAY, 60, 0.05, seed=1)
    model = gp_orff.VectorFieldGP(made(Delayed(0.3))).fit(x, y, progress=False)
    assert abs(model.kernel.base_kernel.amplitude.delay.item() - DELAY) < 0.05


@pytest.mark.parametrize("first", [-5.0, 5.0])
def test_a_delay_is_learned_from_far_away(first):
    """The evidence has side maxima there; the tolerance is five standard errors."""
    x, y = simulated(DELAY, 40, 0.1, seed=1)
    model = gp_orff.VectorFieldGP(made(Delayed(first))).fit(x, y, progress=False)
    assert abs(model.report.hyperparameters["delay"].value - DELAY) < 0.15


class Delays(torch.nn.Module):
    """Two delays of three outputs, in units of a half, and a gain of each."""

    def __init__(self):
        super().__init__()
        self.halves = torch.nn.Parameter(torch.tensor([4.0, -3.0]).double())
        self.gains = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]).double())

    def forward(self, omega):
        delays = torch.cat([torch.zeros(1), self.halves / 2])
        return (self.gains * torch.exp(1j * omega * delays)).unsqueeze(-1)


def test_starting_delays_of_sensors_that_measure_at_different_times():
    """The signal is known at all times: g(t) = sin t² has one peak of its covariance."""
    generator = torch.Generator().manual_seed(0)
    times = [8 * torch.rand(60, 1, generator=generator).double() for _ in range(3)]
    data = [
        Observations(GroupKey("", Components((i,), 3)), t, (t - shift).square().sin())
        for i, (t, shift) in enumerate(zip(times, (0.0, 0.6, -0.4), strict=True))
    ]
    amplitude = Delays()
    kernel = SpectralMatrixKernel(RBFKernel().double(), amplitude, num_outputs=3, num_dims=1)
    present, likely = starting_delays(kernel, data, np.array([8.0]), 0.3)
    assert [delay.value for delay in present] == [4.0, -3.0]
    # A quarter of the width between lags, and the sampling error of 60 random times.
    assert [delay.value / 2 for delay in likely] == pytest.approx([0.6, -0.4], abs=0.2)
    assert all(delay.parameter is amplitude.halves for delay in likely)
    assert amplitude.halves.tolist() == [4.0, -3.0]


def test_starting_delays_of_two_short_records_far_from_each_other():
    """At most lags there are no pairs of times. g(t) = sin 5t² has one peak of its covariance."""
    x = torch.cat([torch.linspace(0, 2, 50), 1000 + torch.linspace(0, 2, 50)]).double()
    signal = [(5 * (x % 1000 - shift).square()).sin() for shift in (0.0, 0.3)]
    data = [Observations(GroupKey("", Components.every(2)), x[:, None], torch.stack(signal, -1))]
    _, (delay,) = starting_delays(made(Delayed(0.0)), data, np.array([1002.0]), 0.2)
    assert delay.value == pytest.approx(0.3, abs=0.1)


@pytest.mark.parametrize("delay", [0.5, 4.0, 40.0])
def test_a_quadrature_refuses_lags_that_delays_make_too_long(delay):
    kernel = gp_orff.ORFFKernel(made(Delayed(delay)), gp_orff.GaussHermite(32), num_dims=1)
    if delay + 3 > 7.9:  # the longest lag of this rule, and that of the points
        with pytest.raises(ValueError, match="with the delays of its outputs"):
            to_dense(kernel(X))
    else:
        torch.testing.assert_close(to_dense(kernel(X)), dense(X, X, delay), rtol=0, atol=1e-3)


def test_saved_with_a_kernel(tmp_path):
    x, y = simulated(DELAY, 12, 0.1, seed=0)
    model = gp_orff.VectorFieldGP(made()).condition(x, y)
    model.save(tmp_path / "signal.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "signal.pt", kernel=made(Delayed(0.1)))
    torch.testing.assert_close(loaded.posterior().mean(X), model.posterior().mean(X))


def test_two_columns_and_a_rough_base():
    """A = Σ b b* of a delayed and of an independent signal."""

    def amplitude(omega):
        shift = torch.exp(1j * DELAY * omega)
        one, zero = torch.ones_like(shift), torch.zeros_like(shift)
        rows = [torch.cat([one, zero], -1), torch.cat([shift, 0.5 * one], -1)]
        return torch.stack(rows, dim=1)

    kernel = made(amplitude, MaternKernel(nu=2.5))
    matern = MaternKernel(nu=2.5).double()
    matern.lengthscale = 1.0
    found = to_dense(kernel(X, X)).unflatten(0, (12, 2)).unflatten(-1, (12, 2))
    lagged = to_dense(matern(X, X - DELAY))  # Cov[g(x), g(z − τ)]
    torch.testing.assert_close(found[:, 0, :, 1], lagged, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[:, 1, :, 1], 1.25 * to_dense(matern(X, X)), rtol=0, atol=1e-5)


def test_what_is_no_real_kernel():
    with pytest.raises(ValueError, match=r"A\(−ω\) = A\(ω\)ᵀ"):
        made(
            lambda omega: torch.stack([torch.ones_like(omega) + 0j, 1j * torch.ones_like(omega)], 1)
        )
    with pytest.raises(ValueError, match="real amplitude at ω = 0"):
        made(lambda omega: 1j * torch.ones(len(omega), 2, 1).double())
    with pytest.raises(ValueError, match=r"K₀\(−δ\) = K₀\(δ\)ᵀ"):
        SpectralMatrixKernel.from_signature(
            lambda lag: torch.exp(-(lag - 0.3).square())[..., None], [(0.0, 1.0)]
        )
    assert math.isfinite(made().base_kernel.lengthscale.item())
