"""Hermitian spectral matrices: outputs that are shifted against each other."""

import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.means import ZeroMean
from linear_operator import to_dense

import gp_orff
from gp_orff.kernels.spectral_matrix import SpectralMatrixKernel

DELAY = 0.5
RULES = {
    "grid": gp_orff.Grid(domain=((-2.0, 2.0),), tolerance=1e-10),
    "quasi": gp_orff.QuasiMonteCarlo(2**12),
    "shared": gp_orff.Orthogonal(2**10, seed=1),
}


class Delayed(torch.nn.Module):
    """f₁(x) = g(x), f₂(x) = g(x − τ): B = (1, e^{iωτ})ᵀ."""

    def __init__(self, delay=DELAY):
        super().__init__()
        self.delay = torch.nn.Parameter(torch.tensor(delay, dtype=torch.float64))

    def forward(self, omega):
        shift = torch.polar(torch.ones_like(omega), self.delay * omega)
        return torch.stack([torch.ones_like(shift), shift], dim=1)


def made(amplitude=None, base=None):
    base = RBFKernel() if base is None else base
    base.lengthscale = 1.0
    amplitude = Delayed() if amplitude is None else amplitude
    return SpectralMatrixKernel(base, amplitude, num_outputs=2, num_dims=1).double()


def signature(lag, delay=DELAY):
    """Cov[f(x), f(z)] of lags x − z, (m, 1): of the first output with the second, k(x − z + τ)."""
    shifts = torch.tensor([[0.0, delay], [-delay, 0.0]], dtype=lag.dtype)
    return torch.exp(-0.5 * (lag[..., None] + shifts).square())


def dense(x, z, delay=DELAY):
    lags = (x - z.mT).reshape(-1, 1)
    blocks = signature(lags, delay).reshape(len(x), len(z), 2, 2)
    return blocks.movedim(-2, 1).reshape(2 * len(x), 2 * len(z))


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
    with pytest.raises(ValueError, match=r"A\(−ω\) = A\(ω\)\*"):
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
