"""Learned spectra of many observations: information on grids, starting values, and their grids."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel

import gp_orff
from gp_orff.data.noise import noises_of
from gp_orff.features.assemble import draw as drawn
from gp_orff.features.assemble import expand
from gp_orff.fitting.coordinates import Coordinates
from gp_orff.fitting.curvature import average
from gp_orff.fitting.curves import Curves
from gp_orff.inference.features import FeatureInference
from tests.support.fields import draw, flow, uniform

GRID = gp_orff.Grid(domain=((0, 2), (0, 2)), data=((0, 2), (0, 2)), tolerance=1e-2)


def helmholtz(cls=gp_orff.LearnedSpectrumKernel, **options):
    kernel = gp_orff.HelmholtzKernel(cls(5), num_dims=2, **options).double()
    kernel.curl_free.base_kernel.base_kernel.lengthscale = 1.0
    for part, seed in ((kernel.curl_free, 1), (kernel.divergence_free, 2)):
        part.base_kernel.base_kernel.shape.data = 0.3 * draw(4, seed=seed)
    return kernel


def on_grid():
    """Readings, some with one component only, on few features of two learned spectra."""
    kernel, rule = helmholtz(), replace(GRID, tolerance=0.1, diagonal_correction=False)
    kernel.curl_free.base_kernel.base_kernel.lengthscale = 4.0
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule).double()
    model.likelihood.noise = 0.3
    x, y = uniform(250, 2), draw(250, 2)
    y[:60, 1] = float("nan")
    model.condition(x, y, missing="mask")
    likelihoods = model.state.likelihoods
    coordinates = Coordinates(kernel, *likelihoods.values())
    inference = FeatureInference(model.state.data, drawn(kernel, rule, 2))
    return (inference, kernel, likelihoods, coordinates), x, y


def test_the_information_is_that_of_the_dense_covariance():
    """Means of ½ tr(K⁻¹ ∂_iK K⁻¹ ∂_jK) and ½ αᵀ ∂_iK K⁻¹ ∂_jK α, α = K⁻¹y, for coordinates of
    the kernel, and the first alone beside the noise; K is that of the features, written out."""
    parts, x, y = on_grid()
    inference, kernel, likelihoods, coordinates = parts
    u, known = coordinates.get(), ~y.isnan().flatten()

    def covariance(at):
        coordinates.set(at)
        with torch.no_grad():
            features = expand(kernel, inference.draws, 2).double().general().features(x)[known]
            noise = noises_of(kernel, likelihoods)[""][0, 0]
            return (features @ features.mT + noise * torch.eye(len(features)).double()).numpy()

    inverse, steps = np.linalg.inv(covariance(u)), 1e-5 * np.eye(len(u))
    slopes = [(covariance(u + s) - covariance(u - s)) / 2e-5 for s in steps]
    products = [inverse @ slope for slope in slopes]
    alphas = [slope @ inverse @ y.flatten()[known].numpy() for slope in slopes]
    expected = 0.5 * np.array([[np.sum(a * b.T) for b in products] for a in products])
    observed = 0.5 * np.array([[a @ inverse @ b for b in alphas] for a in alphas])
    elements = [part for part in coordinates.parts for _ in range(part.parameter.numel())]
    of_kernel = ["noise" not in part.name for part in elements]
    expected = np.where(np.outer(of_kernel, of_kernel), 0.5 * (expected + observed), expected)
    curves = [part.scale if part.name.endswith("shape") else 0.0 for part in elements]
    expected += np.diag(np.square(curves))
    coordinates.set(u)
    actual = average(*parts, mean=torch.zeros(2).double())
    assert np.allclose(actual, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert np.array_equal(coordinates.get(), u)


def test_no_information_where_hyperparameters_turn_features():
    """The covariance of outputs of a separable kernel is trained too."""
    base = gp_orff.LearnedSpectrumKernel(4)
    outputs = gp_orff.SeparableKernel(RBFKernel(), torch.nn.Parameter(torch.eye(2).double()))
    kernel = (gp_orff.HelmholtzKernel(base, num_dims=2) + outputs).double()
    model = gp_orff.VectorFieldGP(kernel, frequencies=replace(GRID, tolerance=0.1)).double()
    model.condition(uniform(250, 2), draw(250, 2))
    likelihoods = model.state.likelihoods
    coordinates = Coordinates(model.kernel, *likelihoods.values())
    parts = model.state.inference, model.kernel, likelihoods, coordinates
    assert average(*parts) is None


def test_curves_are_held_and_released():
    kernel = helmholtz()
    curves = [p for name, p in kernel.named_parameters() if name.endswith("shape")]
    curves[0].requires_grad_(False)
    before = curves[0].clone()
    with Curves(kernel).held():
        assert not any(curve.requires_grad for curve in curves)
        assert not curves[1].any()
    assert [curve.requires_grad for curve in curves] == [False, True]
    assert torch.equal(curves[0], before)


def test_fixed_curves_are_fitted_around():
    """Few readings, which had no information of what is held."""
    kernel = gp_orff.HelmholtzKernel(gp_orff.LearnedSpectrumKernel(5), num_dims=2)
    for name, parameter in kernel.named_parameters():
        parameter.requires_grad_(not name.endswith("shape"))
    x, y, _ = flow(20)
    with pytest.warns(gp_orff.DataWarning):
        model = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)
    assert math.isfinite(model.log_marginal_likelihood().item())
    assert not any(p.any() for name, p in kernel.named_parameters() if name.endswith("shape"))


@pytest.mark.parametrize("order", [0, 1])
def test_the_curve_is_centred_where_the_variance_is(order):
    """π λ^{−2t} is symmetric about λ = 1, and the curve is the same over the lengths ℓ λ."""
    kernel = gp_orff.LearnedSpectrumKernel(41).double()
    kernel.lengthscale = 0.7

    def curve():
        lengths = (kernel.lengthscale.squeeze() * kernel.lengths).detach().numpy()
        return np.log(lengths), kernel.log_weights.detach().numpy()

    u, before = curve()
    kernel.centre(order)
    moved, after = curve()
    shares = kernel.weights.detach() * kernel.lengths ** (-2.0 * order)
    assert torch.allclose(shares, shares.flip(0), rtol=1e-10)
    inside = (moved > u[0]) & (moved < u[-1])
    differences = after[inside] - np.interp(moved[inside], u, before)
    assert np.ptp(differences) < 0.01  # of ten and more; what is linear between the knots


def test_a_period_is_limited():
    """To twice the longest lag, where the tolerance asks for more; never made longer."""
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2).double()
    for lengthscale, limited in ((1.5, True), (0.1, False)):
        kernel.base_kernel.lengthscale = lengthscale
        periods = []
        for most in (None, 2.0):
            rule = gp_orff.Grid(domain=GRID.domain, data=GRID.data, longest_period=most)
            periods.append(drawn(kernel, rule, 2)[0].lattice.period)
        free, capped = periods
        assert torch.allclose(capped, torch.full_like(capped, 4.0)) == limited
        assert (free > 4.0 + 1e-9).all() == limited
        if not limited:
            assert torch.equal(free, capped)
    with pytest.raises(ValueError, match="longest_period above 1, got 1"):
        gp_orff.Grid(domain=GRID.domain, longest_period=1.0)


@pytest.mark.slow
def test_many_readings_are_fitted_on_small_grids():
    """As likely as under the RBF kernel that made them, within .01 nats a number, on grids that are
    not larger; 95 % intervals of 400 numbers hold, within four standard errors of a share of
    correlated numbers."""
    x, y, field = flow(800)
    models = []
    for base in (gp_orff.LearnedSpectrumKernel(6), RBFKernel()):
        model = gp_orff.VectorFieldGP(
            gp_orff.CurlFreeKernel(base, num_dims=2), frequencies=gp_orff.Auto(exact_values=0)
        )
        models.append(model.fit(x, y, progress=False))
    numbers = [model.log_marginal_likelihood().item() / 1600 for model in models]
    assert numbers[0] > numbers[1] - 0.01
    places = 0.9 * (uniform(200, 2, seed=9) - 1)
    posterior = models[0].posterior()
    error = (posterior.mean(places) - field(places)).abs()
    inside = (error < 1.96 * posterior.variance(places).sqrt()).double().mean()
    assert 0.88 < inside <= 1
    assert models[0].kernel.base_kernel.base_kernel.continued  # a scale, the field, the curve
    assert sum(stage.evaluations for stage in models[0].report.stages) < 250
