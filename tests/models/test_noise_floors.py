"""Data without noise: intervals are wider than rounding errors and cover the truth."""

import numpy as np
import pytest
import torch

import gp_orff
from tests.support.fields import draw, swirl, unit_cube

X, XS = unit_cube(40), unit_cube(200, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_error_bars_without_noise_hold(unit):
    """A smooth field is met to 1e-4 of its spread; no variance is zero, in any unit."""
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(X, unit * swirl(X), progress=False)
    field = model.posterior()
    error, variance = field.mean(XS) - unit * swirl(XS), field.variance(XS)
    assert (variance > 0).all()
    assert (error.square() <= 1.96**2 * variance).double().mean() > 0.95
    assert variance.mean().sqrt() < 2e-2 * unit


@pytest.mark.slow
def test_refits_do_not_wear_the_floor_down():
    """Each search from where the last one ended; a variance that is set lower is kept possible."""
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(X, swirl(X), progress=False)
    floor = 1e-8 * swirl(X).var(0, correction=0).mean().item()
    least = model.likelihood.noise.item()
    assert 0.999 * floor < least < 1.3 * floor  # the weak prior of the noise draws it upwards
    model.fit(warm_start=True, progress=False)
    assert 0.999 * floor < model.likelihood.noise.item() < 1.01 * least
    model.likelihood.noise = 1e-3 * least
    model.fit(warm_start=True, progress=False)
    assert model.likelihood.noise.item() < 0.1 * least


@pytest.mark.slow
def test_every_group_has_a_floor_of_its_own():
    """Groups whose relative variances differ by 10⁶, none with noise."""
    first, second = torch.arange(40) < 20, torch.arange(40) >= 20
    readings = [
        {"x": X[first], "y": swirl(X[first]), "variances": torch.full((20,), 1e-4)},
        {"x": X[second], "y": swirl(X[second]), "variances": torch.full((20,), 1e2), "group": "b"},
    ]
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(readings, progress=False)
    for likelihood, factor in ((model.likelihood, 1e-4), (model.likelihoods["b"], 1e2)):
        assert factor * likelihood.noise.item() > 0.99e-8 * swirl(X).var(0).mean().item() / 1.1
    assert (model.posterior().variance(XS) > 0).all()


@pytest.mark.slow
def test_noise_that_is_there_is_learned():
    y = swirl(X) + 1e-3 * draw(40, 2)  # a thousandth: the floor is ten times less
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(X, y, progress=False)
    assert model.likelihood.noise.item() == pytest.approx(1e-6, rel=0.7)


@pytest.mark.slow
def test_a_noise_at_its_floor_leaves_standard_errors_to_others():
    x = 3 * unit_cube(130)
    kernel = gp_orff.CurlFreeKernel(num_dims=2).double()
    covariance = kernel(x).to_dense().detach() + 1e-9 * torch.eye(260).double()
    y = (torch.linalg.cholesky(covariance) @ draw(260, 1, seed=2).double()).view(130, 2)
    with gp_orff.settings.check_calibration(False):
        model = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)
    errors = model.report.standard_errors()
    assert 0 < errors["lengthscale"] < 0.2
    assert np.isnan(errors["noise"])
    variance = (y - y.mean(0)).square().mean().item()
    assert model.likelihood.noise.item() == pytest.approx(1e-8 * variance, rel=0.1)
