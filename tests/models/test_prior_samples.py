"""Functions drawn from a prior: their covariance, symbols and domain."""

import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel
from linear_operator import to_dense

import gp_orff
from tests.support import registry

PATHS = 1000
DEVIATIONS = 5.0  # standard errors of a covariance; every kernel has about a hundred of them

CASES = {name: (lambda make=make: made(make())) for name, make in registry.CASES.items()}
CASES |= {
    "harmonic": lambda: (registry.HARMONIC["harmonic"](), 3),
    "learned": lambda: (gp_orff.CurlFreeKernel(gp_orff.LearnedSpectrumKernel(7), num_dims=2), 2),
    **{
        f"{name} of products": lambda make=make: (make(2), 2)
        for name, make in registry.DOT_PRODUCTS.items()
    },
}
ANYWHERE = ("helmholtz", "separable", "scalar_product")


def made(case):
    return case.kernel, case.num_dims


def points(d, n=5):
    return 0.9 * torch.rand(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def check_covariance(paths, kernel, x):
    with torch.no_grad():
        exact = to_dense(kernel.double()(x, x))
    values = paths(x).flatten(1)
    found = values.mT @ values / len(values)
    sd = exact.diagonal().sqrt()
    error = ((exact.square() + sd[:, None].square() * sd.square()) / len(values)).sqrt()
    assert ((found - exact).abs() / error.clamp_min(1e-12)).max() < DEVIATIONS


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_covariance_is_the_kernel(name):
    kernel, d = CASES[name]()
    paths = gp_orff.sample_prior(kernel, PATHS, domain=((0.0, 1.0),) * d)
    check_covariance(paths, kernel, points(d))


@pytest.mark.parametrize("name", ANYWHERE)
def test_without_a_domain(name):
    kernel, d = CASES[name]()
    paths = gp_orff.sample_prior(kernel, PATHS)
    check_covariance(paths, kernel, points(d) + 30.0)


def helmholtz():
    kernel = gp_orff.HelmholtzKernel(MaternKernel(nu=2.5), num_dims=2)
    return kernel, gp_orff.sample_prior(kernel, 3, seed=2, domain=((0.0, 2.0), (0.0, 2.0)))


def test_symbols_are_derivatives_of_the_same_functions():
    _, paths = helmholtz()
    x, step = points(2), 1e-5
    rates = [(paths(x + h) - paths(x - h)) / (2 * step) for h in step * torch.eye(2).double()]
    divergence = rates[0][..., 0] + rates[1][..., 1]
    curl = rates[0][..., 1] - rates[1][..., 0]
    torch.testing.assert_close(
        paths(x, gp_orff.Divergence()).squeeze(-1), divergence, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(paths(x, gp_orff.Curl()).squeeze(-1), curl, rtol=0, atol=1e-6)
    parts = paths(x, gp_orff.CurlFreePart()) + paths(x, gp_orff.DivergenceFreePart())
    torch.testing.assert_close(parts, paths(x), rtol=0, atol=1e-7)  # of a Hessian over |ω|²


def test_the_same_functions_in_every_call():
    kernel, paths = helmholtz()
    x = points(2)
    torch.testing.assert_close(paths(x)[:, :2], paths(x[:2]))
    again = gp_orff.sample_prior(kernel, 3, seed=2, domain=((0.0, 2.0), (0.0, 2.0)))
    assert torch.equal(again(x), paths(x))
    other = gp_orff.sample_prior(kernel, 3, seed=3, domain=((0.0, 2.0), (0.0, 2.0)))
    assert not torch.allclose(other(x), paths(x))
    before = paths(x)
    for leaf in (part for part in kernel.modules() if isinstance(part, MaternKernel)):
        leaf.lengthscale = 9.0  # later changes of the kernel do not reach them
    assert torch.equal(paths(x), before)
    assert len(paths) == 3
    each = x.expand(3, -1, -1)
    torch.testing.assert_close(paths(each), paths(x))


def test_the_constants_of_potentials():
    """Their variance is that of −∂²k at zero: of a potential without a reference, all of k."""
    kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
    potentials = gp_orff.sample_prior(kernel, PATHS, domain=((0, 1), (0, 1)))
    values = potentials(points(2), gp_orff.Potential()).squeeze(-1)
    error = math.sqrt(2 / PATHS)
    assert (values.square().mean(0) - 1).abs().max() < DEVIATIONS * error


def test_mistakes():
    kernel, paths = helmholtz()
    for other in (gp_orff.VectorFieldGP(kernel), gp_orff.HelmholtzKernel):
        with pytest.raises(TypeError, match=r"give model\.kernel"):
            gp_orff.sample_prior(other, 2)
    with pytest.raises(TypeError, match=r"expected a symbol, such as gp_orff\.Curl\(\), got"):
        paths(points(2), gp_orff.Curl)
    with pytest.raises(ValueError, match="inside the grid's domain"):
        paths(points(2) + 5)
    with pytest.raises(ValueError, match="num_paths"):
        gp_orff.sample_prior(kernel, 0)
    with pytest.raises(ValueError, match="domain= for a kernel whose waves decay"):
        gp_orff.sample_prior(registry.HARMONIC["harmonic"](), 2)
    with pytest.raises(ValueError, match="ard_num_dims="):
        gp_orff.sample_prior(MultitaskKernel(RBFKernel(), num_tasks=2), 2)
    with pytest.raises(ValueError, match="2 inputs, or more, got 1"):
        gp_orff.sample_prior(kernel, 2, domain=((0, 1),))
    rough = gp_orff.sample_prior(MaternKernel(nu=0.5, ard_num_dims=1), 2, domain=((0, 1),))
    with pytest.raises(ValueError, match="Divergence"):
        rough(points(1), gp_orff.Divergence())
