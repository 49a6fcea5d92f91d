"""What several benchmarks need: known fields, scores, seconds and bytes."""

import resource
import statistics
import time

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff


def curl_free(lengthscale=None, num_dims=2):
    """With a lengthscale, of a field of variance one."""
    return _of_variance_one(gp_orff.CurlFreeKernel, lengthscale, num_dims)


def divergence_free(lengthscale=None, num_dims=2):
    return _of_variance_one(gp_orff.DivergenceFreeKernel, lengthscale, num_dims)


def _of_variance_one(build, lengthscale, num_dims):
    potential = RBFKernel()
    kernel = ScaleKernel(build(potential, num_dims=num_dims)).double()
    if lengthscale is not None:
        potential.lengthscale = lengthscale
        kernel.outputscale = 1.0
        with torch.no_grad():
            origin = torch.zeros(1, num_dims, dtype=torch.float64)
            variance = kernel(origin).to_dense().diagonal().mean()
        kernel.outputscale = 1.0 / variance
    return kernel


def field_of(kernel, box, seed=0):
    """A draw from the prior as a function of points: weights on a fine grid."""
    grid = gp_orff.Grid(domain=box, tolerance=1e-9, lengthscale_range=(1, 1))
    expansion = gp_orff.ORFFKernel(kernel, grid)._expansion(len(box))
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(expansion.num_features, 1, generator=generator, dtype=torch.float64)
    weights = expansion.column_weights(theta).detach()
    return lambda x: expansion.phi.apply(x, weights)


def median_seconds(functions, repeats):
    """Medians of several functions, called in turn."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            own.append(time.perf_counter() - start)
    return [statistics.median(own) for own in times]


def resident_mib():
    """Memory of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def peak_mib():
    """The most it ever was."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def scores(mean, variance, truth):
    """RMSE per component, root mean posterior variance, share of the truth in 95 % intervals."""
    error = mean - truth
    inside = (error.square() <= 1.96**2 * variance).double().mean().item()
    return error.square().mean().sqrt().item(), variance.mean().sqrt().item(), inside
