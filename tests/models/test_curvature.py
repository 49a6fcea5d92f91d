"""The information of data about hyperparameters, and steps of searches that use it."""

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff
from gp_orff.data.noise import noises_of
from gp_orff.fitting.coordinates import Coordinates
from gp_orff.fitting.curvature import average, observed
from gp_orff.fitting.scoring import log_prior_of_noise
from gp_orff.fitting.search import Search
from gp_orff.inference import exact
from tests.support.fields import draw, uniform


def learned(num_knots=5, seed=0):
    kernel = gp_orff.LearnedSpectrumKernel(num_knots).double()
    kernel.shape.data = 0.5 * draw(*kernel.shape.shape, seed=seed)
    kernel.lengthscale = 0.4
    return kernel


def helmholtz():
    kernel = gp_orff.HelmholtzKernel(learned(), num_dims=2).double()
    kernel.divergence_free.base_kernel.base_kernel.shape.data = 0.5 * draw(4, seed=3)
    kernel.divergence_free.outputscale = 0.3
    return kernel


def in_time():
    """A learned spectrum in space, times an RBF kernel of time, plus an RBF kernel."""
    time = RBFKernel(active_dims=(2,)).double()
    space = gp_orff.CurlFreeKernel(learned(), num_dims=2, active_dims=(0, 1))
    smooth = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 1))
    return (ScaleKernel(space) * time + ScaleKernel(smooth)).double()


def continued():
    """Curves that go on beyond their knots."""
    kernel = helmholtz()
    for part in (kernel.curl_free, kernel.divergence_free):
        part.base_kernel.base_kernel.continued = True
    return kernel


KERNELS = {"helmholtz": (helmholtz, 2), "time": (in_time, 3), "continued": (continued, 2)}


def conditioned(name, points=12):
    make, dims = KERNELS[name]
    x, y = uniform(points, dims), draw(points, 2)
    y[0, 1] = float("nan")
    model = gp_orff.VectorFieldGP(make())
    model.likelihood.noise = 0.2
    return model.condition(x, y, missing="mask", merge=0)


def parts(model):
    kernel, likelihoods = model.kernel, model.state.likelihoods
    coordinates = Coordinates(kernel, *likelihoods.values())
    return model.state.inference, kernel, likelihoods, coordinates


def _by_element(coordinates):
    return [part for part in coordinates.parts for _ in range(part.parameter.numel())]


def symmetric(lower):
    return lower.tril() + lower.tril(-1).mT


@pytest.mark.parametrize("name", KERNELS)
def test_the_covariance_is_that_of_the_numbers(name):
    make, dims = KERNELS[name]
    x, kernel = uniform(7, dims), make()
    model = gp_orff.VectorFieldGP(kernel)
    model.likelihood.noise = 0.2
    model.condition(x, draw(7, 2), merge=0)
    inference, _, likelihoods, _ = parts(model)
    prior = kernel(x).to_dense()
    assert torch.allclose(symmetric(inference.prior(kernel)), prior, atol=1e-12)
    noise = inference.noise(noises_of(kernel, likelihoods))
    assert torch.allclose(noise, 0.2 * torch.eye(14).double(), atol=1e-12)


def two_groups():
    x, y = uniform(15, 2), draw(15, 2)
    y[0, 1] = float("nan")
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2))
    groups = [{"x": x, "y": y}, {"x": x + 0.1, "y": -y, "group": "two"}]
    return model.condition(groups, missing="mask")


@pytest.mark.parametrize("mean", [None, "fixed"])
@pytest.mark.parametrize("name", ["two groups", *KERNELS])
def test_the_average_information_is_that_of_dense_algebra(name, mean):
    """½ wᵀPw with central differences of the dense covariance, plus the prior of curves."""
    model = conditioned(name) if name in KERNELS else two_groups()
    inference, kernel, likelihoods, coordinates = parts(model)
    u, fixed = coordinates.get(), torch.zeros(2).double() if mean else None

    def covariance(at):
        coordinates.set(at)
        noise = inference.noise(noises_of(kernel, likelihoods))
        return (symmetric(inference.prior(kernel)) + noise).detach().numpy()

    inverse, steps = np.linalg.inv(covariance(u)), 1e-5 * np.eye(len(u))
    slopes = [(covariance(u + s) - covariance(u - s)) / 2e-5 for s in steps]
    design = inference.design(noises_of(kernel, likelihoods)).numpy()
    coordinates.set(u)
    projection = inverse
    if mean is None:
        solved = inverse @ design[:, 1:]
        projection = inverse - solved @ np.linalg.solve(design[:, 1:].T @ solved, solved.T)
    w = np.stack([slope @ projection @ design[:, 0] for slope in slopes], -1)
    expected = 0.5 * w.T @ projection @ w
    for i, part in zip(range(len(u)), _by_element(coordinates), strict=True):
        expected[i, i] += part.scale**2 if part.name.endswith("shape") else 0.0
    actual = average(inference, kernel, likelihoods, coordinates, fixed)
    assert np.allclose(actual, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
    assert np.array_equal(coordinates.get(), u)


def test_the_change_of_a_covariance_of_several_tiles(monkeypatch):
    """Its product with a vector, compared with that of whole matrices."""
    monkeypatch.setattr(exact, "_TILE", 8)
    monkeypatch.setattr(exact, "_FEW", 1)
    inference, kernel, _, coordinates = parts(conditioned("helmholtz", points=40))
    before, a = inference.prior(kernel), draw(79, seed=1)
    assert not before.triu(40).any()  # several tiles, of which those above the diagonal are zero
    coordinates.set(coordinates.get() + 0.1)
    expected = (symmetric(inference.prior(kernel)) - symmetric(before)) @ a
    torch.testing.assert_close(inference.change_of_prior(kernel, before, a), expected)


def test_the_observed_curvature_is_that_of_a_polynomial():
    """−∂²/∂u² of u₀³u₁ − u₁⁴ + 2u₂, in closed form; the third coordinate is held."""
    module = gp_orff.LearnedSpectrumKernel(4).double()
    module.raw_lengthscale.requires_grad_(False)
    module.shape.data[:] = torch.tensor([1.5, 0.5, 2.0])
    coordinates, u = Coordinates(module), module.shape

    def objective():
        return u[0] ** 3 * u[1] - u[1] ** 4 + 2 * u[2]

    scale, before = coordinates.parts[0].scale, coordinates.get()
    free = np.array([True, True, False])
    gradient, curvature = observed(coordinates, objective, free, np.array([1e-4, 2e-4, 1.0]))
    assert np.allclose(gradient, scale * np.array([3.375, 2.875]), rtol=1e-6)
    expected = -np.array([[6 * 1.5 * 0.5, 3 * 1.5**2], [3 * 1.5**2, -12 * 0.5**2]])
    assert np.allclose(curvature, scale**2 * expected, rtol=1e-6)
    assert np.array_equal(coordinates.get(), before)


class Hill:
    """−½ uᵀ A u + bᵀ u in a parameter, to be climbed from zero."""

    def __init__(self, coupling=0.0):
        self.module = gp_orff.LearnedSpectrumKernel(5).double()
        self.module.raw_lengthscale.requires_grad_(False)
        self.matrix = torch.diag(torch.tensor([1.0, 10.0, 100.0, 0.0]).double())
        self.matrix[0, 2] = self.matrix[2, 0] = coupling
        self.slope = torch.tensor([1.0, 5.0, 20.0, 0.0]).double()

    def __call__(self):
        u = self.module.shape
        return -0.5 * u @ self.matrix @ u + self.slope @ u


def test_steps_reach_a_maximum():
    """Of a parabola with a flat direction; and its curvature is kept."""
    hill = Hill()
    search = Search(Coordinates(hill.module))
    search.run(hill, 10, information=hill.matrix.numpy)
    assert hill.module.shape.tolist() == pytest.approx([1.0, 0.5, 0.2, 0.0], abs=0.1)
    assert search.value * 10 == pytest.approx(0.5 + 1.25 + 2.0, abs=0.01)
    assert search.evaluations < 10
    assert np.allclose(search.curvature, hill.matrix.numpy() / 10, atol=1e-3)


def test_without_an_information_steps_find_the_curvature():
    """From a multiple of the identity, whose size follows from the first step."""
    hill = Hill()
    search = Search(Coordinates(hill.module)).run(hill, 10)
    assert search.value * 10 == pytest.approx(3.75, abs=0.02)
    assert search.expected_gain < 0.01
    assert search.evaluations < 40


def test_a_coordinate_stays_at_its_bound():
    """And the others go where the objective is largest with it."""
    hill = Hill(coupling=5.0)
    search = Search(Coordinates(hill.module))
    search.coordinates.high[2] = 0.1
    search.run(hill, 10, information=hill.matrix.numpy)
    assert hill.module.shape.tolist() == pytest.approx([0.5, 0.5, 0.1, 0.0], abs=0.02)


def test_steps_that_fail_are_shortened():
    """With an information that is far too small."""
    hill = Hill()
    search = Search(Coordinates(hill.module))
    search.run(hill, 10, information=lambda: 0.3 * np.eye(4))
    assert search.value * 10 > 3.7  # of 3.75


def test_one_evaluation_is_no_step():
    """The last that a grid may take; the search stays where it is."""
    hill = Hill()
    search = Search(Coordinates(hill.module))
    search.run(hill, 10, information=hill.matrix.numpy, evaluations=1)
    assert search.evaluations == 1
    assert not hill.module.shape.any()


@pytest.mark.slow
def test_fits_take_few_evaluations():
    x = uniform(25, 2)
    y = torch.cos(6 * x[:, :1]) * torch.tensor([1.0, 0.3]).double() + 0.2 * draw(25, 2)
    kernel = gp_orff.HelmholtzKernel(gp_orff.LearnedSpectrumKernel(6), num_dims=2)
    model = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False)
    assert sum(stage.evaluations for stage in model.report.stages) <= 80
    model.zero_grad()
    prior = sum(p.log_prob(of(own)).sum() for _, own, p, of, _ in kernel.named_priors())
    (model.log_marginal_likelihood() + prior).backward()
    for name, parameter in kernel.named_parameters():
        if name.endswith("shape"):
            assert parameter.grad.abs().max() < 0.5  # nats a standard deviation of the prior


def test_noise_has_a_prior_beside_learned_spectra():
    """log σ² ~ N(log 0.1 v, 3²), up to a constant; without a learned spectrum none."""
    model = conditioned("helmholtz")
    survey = model.state.data.survey
    found = {}
    for value in (0.2, 2.0):
        model.likelihood.noise = value
        found[value] = log_prior_of_noise(model.kernel, model.state.likelihoods, survey).item()

    def density(value):
        return -0.5 * (np.log(value / (0.1 * spread)) / 3) ** 2

    spread = np.average(
        [group.y.numpy().var(axis=0).mean() for group in survey.sample],
        weights=[group.y.numel() for group in survey.sample],
    )
    assert found == pytest.approx({value: density(value) for value in found})
    plain = gp_orff.HelmholtzKernel(num_dims=2)
    assert log_prior_of_noise(plain, model.state.likelihoods, survey) == 0.0
