"""Bounds of a SpectralMatrixKernel: closed forms, an equal kernel of another class, 200 draws."""

import math
from dataclasses import astuple

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gp_orff
from gp_orff.bounds.constants import Problem
from tests.support.delays import DELAY, Delayed, made, signature
from tests.support.registry import CASES

NUMBER, DRAWS = 64, 200
QUADRATURE = 2e-6  # in one dimension 8e-7 of the frequencies lie below the first node


def gradient(omega):
    return omega.unsqueeze(-1)


def trace_sampler(u):
    """ρ ∝ ‖ω‖² N(ω; 0, I) in two dimensions: ‖ω‖² ~ χ²₄."""
    from scipy.stats import chi2

    square = torch.from_numpy(chi2.ppf(u[:, 0].numpy(), 4))
    angle = 2 * math.pi * u[:, 1]
    omega = square.sqrt()[:, None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
    return omega, (square / 2).log() - square / 2 - math.log(2 * math.pi)


def curl_free(base, sampler=None):
    base.lengthscale = 1.0
    return gp_orff.SpectralMatrixKernel(
        base.double(), gradient, num_outputs=2, num_dims=2, sampler=sampler
    ).double()


def constants_of(kernel, measure="trace", num_dims=None):
    return Problem.of("", kernel, None, measure, num_dims).constants


def closed_form(base, measure):
    base.lengthscale = 1.0
    kernel = gp_orff.CurlFreeKernel(base, num_dims=2).double()
    return constants_of(kernel, measure)


BASES = {
    "rbf": RBFKernel,
    "matern32": lambda: MaternKernel(nu=1.5),
    "matern52": lambda: MaternKernel(nu=2.5),
    "matern92": lambda: gp_orff.GeneralMaternKernel(nu=4.5),
}


@pytest.mark.parametrize("name", BASES)
def test_constants_are_those_of_the_curl_free_kernel(name):
    """Moments, and infinities, of B = ω with the density S; b is bounded by ‖E W²‖₂.

    Of E‖ω‖⁴ of the Matérn 5/2 kernel 4e-6 lie beyond the last node.
    """
    found = constants_of(curl_free(BASES[name]()))
    expected = closed_form(BASES[name](), "base")
    assert found.variance >= expected.variance * (1 - 1e-5)
    for each in set(vars(expected)) - {"variance"}:
        assert getattr(found, each) == pytest.approx(getattr(expected, each), rel=1e-5), each


def test_a_sampler_of_theorem_9_has_the_constants_of_the_measure_trace():
    """W is bounded by tr K(0) = 2; means over a Sobol sequence of 2¹⁴."""
    found = constants_of(curl_free(RBFKernel(), trace_sampler))
    expected = closed_form(RBFKernel(), "trace")
    assert found.largest == pytest.approx(2, rel=1e-6)  # lengthscales in single precision
    for name in set(vars(expected)) - {"variance"}:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-3), name
    unbounded = constants_of(curl_free(RBFKernel(), trace_sampler), "base")
    assert math.isinf(unbounded.largest)


def test_constants_of_a_delay():
    """A = (1, e^{−iωτ}; e^{iωτ}, 1) has the norm 2, and E A² = 2 K(0)."""
    largest = 1 + math.exp(-(DELAY**2) / 2)
    found = constants_of(made())
    expected = (largest, 2, 2 / math.log(2), 2 * largest, 2, 2, 4, 2 * math.sqrt(2 / math.pi))
    assert astuple(found) == pytest.approx(expected, rel=QUADRATURE)


def test_theorem_11_of_a_delay():
    for error in (0.05, 0.3):
        bound = gp_orff.bounds.minh_pointwise(made())
        expected = 2 * math.exp(-1000 * error / (4 * 2) * math.log(1 + 2 * 2 * error / 4))
        assert bound.probability(1000, error) == pytest.approx(min(1, expected), rel=1e-5)


def test_a_factor_of_time_and_a_scale():
    """Largest values multiply; E‖ω‖²‖W‖² = E ω²·4 + 4 E ω²; a scale of 3."""
    time = RBFKernel(active_dims=(1,)).double()
    time.lengthscale = 0.5
    space = gp_orff.SpectralMatrixKernel(
        RBFKernel().double(), Delayed(), num_outputs=2, num_dims=1, active_dims=(0,)
    ).double()
    space.base_kernel.lengthscale = 1.0
    scaled = ScaleKernel(space * time).double()
    scaled.outputscale = 3.0
    found = constants_of(scaled, num_dims=2)
    assert found.largest == pytest.approx(6, rel=1e-9)
    assert found.lipschitz == pytest.approx(3 * 2 * math.sqrt(1 + 4), rel=QUADRATURE)
    assert found.variance_frobenius == pytest.approx(9 * 4, rel=QUADRATURE)


KERNELS = {
    "delay": lambda: (made(), 1),
    "rough_delay": lambda: (made(None, MaternKernel(nu=1.5)), 1),
    "signature": lambda: (gp_orff.SpectralMatrixKernel.from_signature(signature, [(-1.0, 1.0)]), 1),
    "real": lambda: (CASES["spectral_matrix"]().kernel, 2),
    "curl_free": lambda: (curl_free(RBFKernel()), 2),
    "curl_free_sampler": lambda: (curl_free(RBFKernel(), trace_sampler), 2),
}


@torch.no_grad()
def quantiles(kernel, num_dims):
    """The 95 % quantiles over draws of the errors that theorems bound, over lags in [−2, 2]^d."""
    axis = torch.linspace(-2, 2, 25 if num_dims == 1 else 9, dtype=torch.float64)
    lags = torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)
    zero = torch.zeros_like(lags[:1])
    exact = kernel(lags, zero).to_dense()
    errors = []
    for seed in range(DRAWS):
        rule = gp_orff.MonteCarlo(NUMBER, seed=seed)
        features = gp_orff.ORFFKernel(kernel, rule, num_dims=num_dims).features
        errors.append(features(lags) @ features(zero).mT - exact)
    error = torch.stack(errors).unflatten(1, (len(lags), 2))
    spectral, frobenius = torch.linalg.matrix_norm(error, 2), error.flatten(-2).norm(dim=-1)
    return {
        "brault": spectral.amax(-1).quantile(0.95).item(),
        "minh": frobenius.amax(-1).quantile(0.95).item(),
        "minh_pointwise": frobenius.quantile(0.95, dim=0).max().item(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_200_draws_stay_below_every_bound(name):
    kernel, num_dims = KERNELS[name]()
    found, box = quantiles(kernel, num_dims), ((-1.0, 1.0),) * num_dims
    for theorem, error in found.items():
        if name == "curl_free" and "minh" in theorem:
            continue  # A = ω ωᵀ is not bounded
        bound = getattr(gp_orff.bounds, theorem)(kernel, box)
        assert error <= bound.error(NUMBER) <= (60 if name == "curl_free" else 20) * error, theorem


def test_what_has_no_bound():
    box = ((-1.0, 1.0),) * 2
    with pytest.raises(ValueError, match=r"a sampler ∝ S tr A"):
        gp_orff.bounds.minh(curl_free(RBFKernel()), box)
    with pytest.raises(ValueError, match=r"Orlicz norm .* a sampler"):
        gp_orff.bounds.brault(curl_free(MaternKernel(nu=2.5)), box)
    with pytest.raises(ValueError, match=r"use minh, .*pointwise"):  # E‖ω‖² = ∞
        gp_orff.bounds.brault(made(None, MaternKernel(nu=0.5)), box[:1])
    many = gp_orff.SpectralMatrixKernel(
        RBFKernel(ard_num_dims=4).double(), gradient, num_outputs=4, num_dims=4
    )
    with pytest.raises(NotImplementedError, match=r"at most 3 inputs.* got 4"):
        gp_orff.bounds.brault(many, box * 2)


def test_an_amplitude_that_overflows_is_unbounded():
    kernel = made(lambda omega: torch.cosh(omega).unsqueeze(-1).expand(-1, 2, 1), RBFKernel())
    assert math.isinf(constants_of(kernel).largest_frobenius)
    assert math.isinf(constants_of(kernel).orlicz)
    e2, e4 = math.exp(2.0), math.exp(8.0)  # E cosh² ω = (1 + e²)/2, E cosh⁴ ω = (3 + 4 e² + e⁸)/8
    assert constants_of(kernel).size == pytest.approx(1 + e2, rel=QUADRATURE)
    assert constants_of(kernel).variance_frobenius == pytest.approx(
        4 * (3 + 4 * e2 + e4) / 8, rel=QUADRATURE
    )
