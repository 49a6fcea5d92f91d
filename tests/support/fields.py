"""Random numbers, known fields and models of these fields for tests of models."""

import math

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

import gp_orff
from gp_orff.features.assemble import expand

ALGEBRAS = {  # of a model of 60 vectors in the plane
    "exact": None,
    "grid": gp_orff.Auto(exact_values=0),
    "primal": gp_orff.MonteCarlo(20),
    "dual": gp_orff.MonteCarlo(300),
}


def draw(*shape, seed=0):
    """Return standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(*shape, seed=0):
    """Return uniform numbers between 0 and 2."""
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64)


def unit_cube(number, seed=0, num_dims=2):
    """Return uniformly distributed points in the unit cube."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(number, num_dims, generator=generator).double()


def swirl(x):
    """Return a divergence-free field that varies over a few tenths of the unit of x."""
    return torch.stack([torch.sin(7 * x[:, 1]), torch.cos(6 * x[:, 0])], dim=-1)


def directions(count, seed=3):
    """Return random unit vectors in the plane."""
    angle = 6.3 * torch.rand(count, generator=torch.Generator().manual_seed(seed)).double()
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def flow(points, noise=0.1, seed=0, extent=1.0):
    """Return points, noisy observations and the function of a curl-free field.

    The field is a sum of waves with lengths of about 0.3, plus a constant background.
    """
    generator = torch.Generator().manual_seed(seed)
    wave = torch.randn(40, 2, generator=generator).double() / 0.3
    phase = 2 * math.pi * torch.rand(40, generator=generator).double()
    size = 0.3 * torch.randn(40, generator=generator).double() * math.sqrt(2 / 40)
    background = torch.tensor([1.0, -2.0]).double()

    def field(x):
        return torch.cos(x @ wave.mT + phase) * size @ wave + background

    generator = torch.Generator().manual_seed(seed + 1)
    x = extent * (2 * torch.rand(points, 2, generator=generator).double() - 1)
    return x, field(x) + noise * torch.randn(points, 2, generator=generator).double(), field


def curl_free(lengthscale=None, kernel=RBFKernel, num_dims=2):
    """Return a kernel for `flow`. If a lengthscale is given, its amplitude is that of `flow`."""
    potential = kernel().double()
    field = ScaleKernel(gp_orff.CurlFreeKernel(potential, num_dims=num_dims)).double()
    if lengthscale is not None:
        potential.lengthscale = lengthscale
        field.outputscale = lengthscale**2
    return field


def conditioned(kernel, x, y, rule, noise=0.3, mean=None):
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule, mean=mean)
    model.likelihood.noise = torch.full_like(model.likelihood.noise, noise)
    return model.condition(x, y)


def helmholtz(d, base=RBFKernel):
    kernel = gp_orff.HelmholtzKernel(base(), num_dims=d)
    for part, lengthscale in ((kernel.curl_free, 0.8), (kernel.divergence_free, 0.9)):
        part.base_kernel.base_kernel.lengthscale = lengthscale
    return kernel


def model_of(kernel, rule, d, points=60, mean=None):
    """Return a model of random vectors with mean 3 in every component, in a box of side 2."""
    model = gp_orff.VectorFieldGP(kernel, frequencies=rule, mean=mean)
    model.likelihood.noise = 0.1
    return model.condition(uniform(points, d), draw(points, d, seed=1) + 3.0)


def features_of(model):
    """Return the features that a model in the plane uses, as a function of points."""
    draws = model.state.inference.draws
    return lambda x: expand(model.kernel, draws, 2).double().features(x).detach()


def symbols(d):
    """Return one symbol of each kind that has a closed form in d dimensions."""
    path = uniform(4, d, seed=3) - 1
    found = [
        gp_orff.Divergence(),
        gp_orff.Curl(),
        gp_orff.Jacobian(),
        gp_orff.Potential(),
        gp_orff.Potential(torch.ones(d).double()),
        gp_orff.CurlFreePart(),
        gp_orff.DivergenceFreePart(),
        gp_orff.Component([1.0, 2.0, 3.0][:d]),
        gp_orff.LineIntegral(path),
        gp_orff.BoxAverage(0.3),
    ]
    return [*found, gp_orff.StreamFunction(), gp_orff.Flux(path)] if d == 2 else found


def exact_problem(kernel, num_dims, points, snr, extent=2.0):
    """Return data for a field that is drawn from the prior in a box of side `extent`.

    The values are noisy observations at `points` points, the true field at 200 further points, and
    the noise variance.
    """
    generator = torch.Generator().manual_seed(1)
    x = extent * (torch.rand(points + 200, num_dims, generator=generator).double() - 0.5)
    with torch.no_grad():
        covariance = kernel(x).to_dense()
    size = covariance.diagonal().mean()
    root = torch.linalg.cholesky(covariance + 1e-8 * size * torch.eye(len(covariance)))
    field = root @ torch.randn(len(root), generator=generator).double()
    field = field.reshape(len(x), -1)
    noise = (size.sqrt() / snr).item()
    y = field[:points] + noise * torch.randn(points, field.shape[1], generator=generator).double()
    return x[:points], y, x[points:], field[points:], noise**2
