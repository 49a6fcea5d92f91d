"""Grids of rational quadratic kernels and the exact kernel, for a wide range of α.

    python benchmarks rational_quadratic [--points 400] [--features 20000] [--smoke]

The points are in a box of five lengthscales, and the signal is ten times the noise. The grid has a
tolerance of 1e-6 and at most `--features` features. The columns for each kernel and α are the
number of features; the error that `accuracy()` predicts and the largest error of a block of the
kernel at lags within the box, both relative to the variance; the error of the evidence in nats per
number; and the largest relative error of a standard deviation of the field at 100 points.
"""

import math
from collections.abc import Sequence

import torch
from gpytorch.kernels import MultitaskKernel, RQKernel
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows

import gp_orff

ALPHAS = (0.05, 0.5, 1.0, 2.0, 8.3, 30.0, 1e3, 1e6)
EXTENT, SNR, TOLERANCE = 5.0, 10.0, 1e-6


def separable(scalar, num_dims):
    kernel = MultitaskKernel(scalar, num_tasks=2, rank=1)
    kernel.task_covar_module.covar_factor.data.copy_(torch.tensor([[1.0], [0.7]]))
    kernel.task_covar_module.var = torch.full((2,), 0.2)
    return kernel


KERNELS = {
    "separable": separable,
    "curl-free": lambda scalar, num_dims: gp_orff.CurlFreeKernel(scalar, num_dims=num_dims),
    "divergence-free": lambda scalar, num_dims: gp_orff.DivergenceFreeKernel(
        scalar, num_dims=num_dims
    ),
}


def kernel_of(name, alpha, num_dims):
    scalar = RQKernel().double()
    scalar.alpha, scalar.lengthscale = alpha, 1.0
    return KERNELS[name](scalar, num_dims).double()


def points(number, num_dims, seed):
    generator = torch.Generator().manual_seed(seed)
    return EXTENT * torch.rand(number, num_dims, generator=generator, dtype=torch.float64)


def dense(kernel, *x):
    return kernel(*x).to_dense()


def cholesky(covariance, noise):
    return torch.linalg.cholesky(covariance + noise * torch.eye(len(covariance)).double())


def asked(kernel, x, y, xs, noise):
    """Return the evidence and standard deviations, computed by a Cholesky factor."""
    covariance = dense(kernel, x)
    root = torch.linalg.cholesky(
        covariance + noise * torch.eye(len(covariance), dtype=torch.float64)
    )
    white = torch.linalg.solve_triangular(root, y.unsqueeze(-1), upper=False)
    evidence = -0.5 * white.square().sum() - root.diagonal().log().sum()
    seen = torch.linalg.solve_triangular(root, dense(kernel, x, xs), upper=False)
    variance = dense(kernel, xs[:1]).diagonal().repeat(len(xs)) - seen.square().sum(0)
    return evidence.item() - 0.5 * len(y) * math.log(2 * math.pi), variance.sqrt()


def lags(num_dims):
    """Return lags from almost zero to the diagonal of the box."""
    near = torch.logspace(-6, -1, 6, dtype=torch.float64)
    axis = torch.cat([torch.zeros(1), near, torch.linspace(0.2, EXTENT, 25, dtype=torch.float64)])
    return torch.cartesian_prod(*[axis] * num_dims).reshape(-1, num_dims)[1:]


@torch.no_grad()
def compared(name, alpha, num_dims, count, features):
    """Return the number of features, and the predicted and true errors of the kernel, the
    evidence and the standard deviations."""
    exact = kernel_of(name, alpha, num_dims)
    grid = gp_orff.Grid(
        domain=((0.0, EXTENT),) * num_dims,
        tolerance=TOLERANCE,
        lengthscale_range=(1.0, 1.0),
        max_features=features,
    )
    kernel = gp_orff.ORFFKernel(exact, grid, num_dims=num_dims)
    foretold = sum(own.truncated + own.aliasing for own in kernel.accuracy())
    origin = torch.zeros(1, num_dims).double()
    size = dense(exact, origin).diagonal().max()
    error = dense(kernel, lags(num_dims), origin) - dense(exact, lags(num_dims), origin)
    x, xs = points(count, num_dims, 0), points(100, num_dims, 1)
    covariance, noise = dense(exact, x), size.item() / SNR**2
    root = torch.linalg.cholesky(
        covariance + noise * torch.eye(len(covariance), dtype=torch.float64)
    )
    generator = torch.Generator().manual_seed(2)
    y = root @ torch.randn(len(root), generator=generator, dtype=torch.float64)
    evidence, sd = asked(kernel, x, y, xs, noise)
    exact_evidence, exact_sd = asked(exact, x, y, xs, noise)
    return {
        "F": kernel.num_features,
        "foretold": foretold,
        "kernel": (error.abs().max() / size).item(),
        "nats a number": abs(evidence - exact_evidence) / len(y),
        "sd": ((sd - exact_sd).abs() / exact_sd).max().item(),
    }


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (400, 30), "features": (20_000, 200)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    rows = Rows()
    for num_dims in (1, 2):
        for name in list(KERNELS)[: 1 + num_dims]:
            for alpha in ALPHAS:
                found = compared(name, alpha, num_dims, arguments.points, arguments.features)
                rows.add(field=name, d=num_dims, alpha=alpha, **found)
    save(arguments, {"points": arguments.points, "tolerance": TOLERANCE, "rows": rows})
