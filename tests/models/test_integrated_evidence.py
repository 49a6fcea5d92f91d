"""Evidences of learned spectra, compared with sums over their curves."""

import math

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel
from gpytorch.means import ZeroMean
from numpy.polynomial.hermite_e import hermegauss

import gp_orff
from gp_orff.models.report import integration_over_spectra
from tests.support.fields import draw

NOISE, LENGTH = 0.05, 0.4
LENGTHS = np.geomspace(1 / 8, 8, 4)


def problem(points=30):
    x = torch.linspace(0, 3, points).double().unsqueeze(-1)
    return x, torch.sin(4 * x) + 0.3 * torch.sin(13 * x) + NOISE**0.5 * draw(points, 1)


def at_maximum(x, y):
    """A model with four lengths, of which only the curve is trained."""
    kernel = gp_orff.LearnedSpectrumKernel(4).double()
    kernel.lengthscale = LENGTH
    model = gp_orff.VectorFieldGP(kernel, mean=ZeroMean()).double()
    model.likelihood.noise = NOISE
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is kernel.shape)
    return kernel, model.fit(x, y, progress=False, warm_start=True, merge=0)


def log_integral(x, y, nodes=24):
    """log ∫ N(y; 0, K(z) + σ²) N(z; 0, I) dz over three coordinates, by Gauss and Hermite."""
    z, w = hermegauss(nodes)
    grid = np.stack(np.meshgrid(z, z, z, indexing="ij"), -1).reshape(-1, 3)
    masses = (w[:, None, None] * w[:, None] * w).ravel() / (2 * math.pi) ** 1.5
    u = np.log(LENGTHS)
    bends = np.linalg.pinv([[1, -2, 1, 0], [0, 1, -2, 1]])
    curves = -0.5 * (u / 0.7) ** 2 + 3 * grid[:, :1] * u + 4 * grid[:, 1:] @ bends.T
    weights = np.exp(curves - curves.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    square = (x.numpy() - x.numpy().T) ** 2 / LENGTH**2
    kernels = np.exp(-0.5 * square / LENGTHS[:, None, None] ** 2)
    logs = []
    for weight in weights:
        factor = np.linalg.cholesky(np.tensordot(weight, kernels, 1) + NOISE * np.eye(len(x)))
        whitened = np.linalg.solve(factor, y.numpy())
        log_det = 2 * np.log(factor.diagonal()).sum()
        logs.append(-0.5 * ((whitened**2).sum() + log_det + len(x) * math.log(2 * math.pi)))
    logs = np.array(logs)
    return logs.max() + math.log(masses @ np.exp(logs - logs.max()))


def test_the_evidence_is_the_integral_over_curves():
    """Within .25 nats, of more than one: the posterior is no Gaussian."""
    x, y = problem()
    kernel, model = at_maximum(x, y)
    best = model.log_marginal_likelihood().item()
    change = integration_over_spectra(model.state.snapshot(model.mean), kernel)
    assert change < -1
    assert best + change == pytest.approx(log_integral(x, y), abs=0.25)


def test_the_change_is_that_of_laplace():
    """−½ ‖z‖² − ½ log|I − ∂² log p|, with derivatives of the dense evidence by torch."""
    x, y = problem()
    kernel, model = at_maximum(x, y)
    kernel.shape.data += torch.tensor([0.3, -0.2, 0.4]).double()
    u = torch.from_numpy(np.log(LENGTHS))
    bends = torch.from_numpy(np.linalg.pinv([[1, -2, 1, 0], [0, 1, -2, 1]])).T
    square = (x - x.mT).square() / LENGTH**2
    kernels = torch.exp(-0.5 * square / torch.from_numpy(LENGTHS)[:, None, None] ** 2)

    def log_evidence(z):
        weights = torch.softmax(-0.5 * (u / 0.7) ** 2 + 3 * z[:1] * u + 4 * z[1:] @ bends, 0)
        covariance = torch.tensordot(weights, kernels, 1) + NOISE * torch.eye(len(x)).double()
        return -0.5 * (y[:, 0] @ torch.linalg.solve(covariance, y[:, 0]) + covariance.logdet())

    z = kernel.shape.detach().clone()
    hessian = torch.autograd.functional.hessian(log_evidence, z)
    expected = -0.5 * (z @ z + (torch.eye(3).double() - hessian).logdet())
    change = integration_over_spectra(model.state.snapshot(model.mean), kernel)
    assert change == pytest.approx(expected.item(), abs=1e-4)  # differences of step 1e-3


@pytest.mark.slow
def test_comparisons_rank_by_it():
    """Kernels without a learned spectrum have the evidence that they had; models do not change."""
    x, y = problem(90)
    kernels = {"learned": gp_orff.LearnedSpectrumKernel(5), "RBF": RBFKernel()}
    found = gp_orff.compare_kernels(x, y, kernels, progress=False)
    best = {name: model.log_marginal_likelihood().item() for name, model in found.models.items()}
    assert found.evidence["RBF"] == best["RBF"]
    model = found.models["learned"]
    change = integration_over_spectra(model.state.snapshot(model.mean), model.kernel)
    assert found.evidence["learned"] == pytest.approx(best["learned"] + change, abs=1e-9)
    assert change < 0


def test_curves_that_are_fixed_cost_nothing():
    x, y = problem()
    kernel, model = at_maximum(x, y)
    kernel.shape.requires_grad_(False)
    assert integration_over_spectra(model.state.snapshot(model.mean), kernel) == 0.0
