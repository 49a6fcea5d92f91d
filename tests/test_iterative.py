"""The algebra of large frequency grids, by iterations, against factorisations of small ones."""

import pytest
import torch
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel, RQKernel

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import draw
from gp_orff.inference.conditioning import FeatureInference, IterativeInference
from gp_orff.inference.iterative import Accuracy

EXACT = Accuracy(block=10**6)  # the dense block holds all features
TIGHT = Accuracy(block=60, probes=30, tolerance=1e-13, variance_tolerance=1e-10)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_space_and_time():
    field = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2, active_dims=(0, 2))
    return field * MaternKernel(1.5, active_dims=(1,))


KERNELS = {
    "curl_free": (lambda: gp_orff.CurlFreeKernel(MaternKernel(2.5), num_dims=2), 2),
    "divergence_free": (lambda: gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=3), 3),
    "helmholtz": (lambda: gp_orff.HelmholtzKernel(RQKernel(), num_dims=2), 2),
    "separable": (lambda: MultitaskKernel(RBFKernel(ard_num_dims=2), num_tasks=2, rank=1), 2),
    "space_and_time": (in_space_and_time, 3),
    "line": (lambda: MultitaskKernel(MaternKernel(1.5), num_tasks=2, rank=1), 1),
}


def options_of(name, count):
    if name == "weights":
        return Options(variances=0.5 + uniform(count, seed=3))
    if name == "groups":
        return Options(group=["a" if i % 3 else "b" for i in range(count)])
    if name == "directions":
        angle = 6 * uniform(count, seed=4)
        return Options(directions=torch.stack([angle.cos(), angle.sin()], -1))
    return Options(missing="mask")


def problem(kernel, kind="plain", count=100):
    build, d = KERNELS[kernel]
    torch.manual_seed(0)
    k = build().double()
    p = 3 if kernel == "divergence_free" else 2
    count = 2 * count if kind == "directions" else count
    x, y = 2 * uniform(count, d, seed=1), normal(count, p, seed=2)
    if kind == "gaps":
        y[::4, 0] = torch.nan
    options = options_of(kind, count)
    if kind == "directions":
        y = y[:, :1]
    data = Dataset.in_memory(read(x, y, p, options))
    rule = gp_orff.Grid(domain=((0.0, 2.0),) * d, tolerance=1e-2, max_features=200)
    noise = torch.tensor([[0.05, 0.0], [0.0, 0.05]]).double() if p == 2 else 0.05 * torch.eye(3)
    noises = {key.label: noise.double() * (2 if key.label == "b" else 1) for key in data.keys}
    return k, data, draw(k, rule, d), noises


CASES = [
    *((kernel, "plain") for kernel in KERNELS),
    *(("helmholtz", kind) for kind in ("weights", "groups", "directions", "gaps")),
]


def gradients(inference, kernel, noises):
    parameters = [*kernel.parameters()]
    noises = {key: value.clone().requires_grad_() for key, value in noises.items()}
    evidence = inference.evidence(kernel, noises)
    value = evidence.log_density(None, inference.num_values)
    leaves = [*parameters, *noises.values()]
    return evidence, value.item(), torch.autograd.grad(value, leaves)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_block_of_all_features_is_the_dense_algebra(name, kind):
    kernel, data, draws, noises = problem(name, kind)
    dense, iterative = (
        FeatureInference(data, draws),
        IterativeInference(data, draws, accuracy=EXACT),
    )
    _, value, slopes = gradients(dense, kernel, noises)
    evidence, found, found_slopes = gradients(iterative, kernel, noises)
    assert found == pytest.approx(value, rel=1e-9)
    assert evidence.standard_error < 1e-9
    for slope, other in zip(slopes, found_slopes, strict=True):
        torch.testing.assert_close(other, slope, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_iterations_are_the_dense_algebra(name, kind):
    """With a small block, solutions are exact to the tolerance."""
    kernel, data, draws, noises = problem(name, kind)
    dense, iterative = (
        FeatureInference(data, draws),
        IterativeInference(data, draws, accuracy=TIGHT),
    )
    expected, found = (part.posterior(kernel, noises, None) for part in (dense, iterative))
    x = 2 * uniform(7, data.num_inputs, seed=7)
    torch.testing.assert_close(found.evidence.quad, expected.evidence.quad, rtol=1e-9, atol=1e-9)
    for method in ("mean", "variance", "blocks", "covariance"):
        values = [getattr(part.distribution, method)(x) for part in (found, expected)]
        torch.testing.assert_close(*values, rtol=1e-8, atol=1e-9)
    error = abs(found.evidence.logdet - expected.evidence.logdet)
    assert 0 < error < 3 * found.evidence.logdet_error
