"""A whole fit with the exact kernel, compared with the best of ten searches from random starts.

    python benchmarks exact_fit [--starts 10] [--most 4000] [--smoke]

The data are draws of a Helmholtz kernel (Matérn 5/2) at points in 4 × 4 lengthscales. The
lengthscale of the curl-free part is half as long. The noise has 0.2 standard deviations. There are
200, 1000 and 4000 numbers.

ours     `VectorFieldGP(HelmholtzKernel(MaternKernel(2.5), num_dims=2)).fit(x, y)`, and the number
         of its evaluations of the evidence for each number of points
starts   L-BFGS of SciPy until convergence, on the same evidence of all data and its gradient. It
         starts from random lengthscales between 0.1 and 1 of the extent, random fractions of the
         variance, and random noises. The columns are the seconds of all starts, the largest
         evidence, and the number of starts that reach it within 0.01 nats per number
"""

import math
import time
from collections.abc import Sequence

import gpytorch
import numpy as np
import scipy.optimize
import torch
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows

import gp_orff

NUMBERS = (200, 1000, 4000)
SIDE, NOISE = 4.0, 0.2


def kernel_of() -> gp_orff.HelmholtzKernel:
    return gp_orff.HelmholtzKernel(gpytorch.kernels.MaternKernel(nu=2.5), num_dims=2)


def drawn(numbers: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    kernel = kernel_of().double()
    kernel.curl_free.base_kernel.base_kernel.lengthscale = 0.5
    kernel.divergence_free.base_kernel.base_kernel.lengthscale = 1.0
    kernel.curl_free.outputscale = 0.25
    x = SIDE * torch.rand(numbers // 2, 2, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        covariance = kernel(x).to_dense()
    variance = covariance.diagonal().mean()
    covariance.diagonal().add_(NOISE**2 * variance)
    normal = torch.randn(len(covariance), generator=generator, dtype=torch.float64)
    return x, (torch.linalg.cholesky(covariance) @ normal).unflatten(0, (-1, 2))


def model_of() -> gp_orff.VectorFieldGP:
    everything = gp_orff.Auto(exact_values=10**6)
    return gp_orff.VectorFieldGP(kernel_of(), frequencies=everything).double()


def ours(x, y) -> dict[str, object]:
    begin, model = time.perf_counter(), model_of()
    model.fit(x, y, progress=False)
    return {
        "seconds": time.perf_counter() - begin,
        "nats": model.log_marginal_likelihood().item(),
        "stages": [f"{stage.name}: {stage.evaluations}" for stage in model.report.stages],
    }


def random_start(model: gp_orff.VectorFieldGP, y, seed: int) -> None:
    rng, variance = np.random.default_rng(seed), y.var().item()
    for part in (model.kernel.curl_free, model.kernel.divergence_free):
        lengthscale = SIDE * math.exp(rng.uniform(math.log(0.1), 0.0))
        part.base_kernel.base_kernel.lengthscale = lengthscale
        part.outputscale = variance * lengthscale**2 * float(rng.uniform(0.1, 1.0))
    model.likelihood.noise = variance * math.exp(rng.uniform(math.log(1e-3), math.log(0.3)))


def searched(model: gp_orff.VectorFieldGP, y, seed: int) -> float:
    random_start(model, y, seed)
    parameters = [*model.kernel.parameters(), *model.likelihood.parameters()]

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        values = torch.from_numpy(values)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data.fill_(value)
            parameter.grad = None
        nats = model.log_marginal_likelihood()
        nats.backward()
        return -nats.item() / y.numel(), np.array([-p.grad.item() / y.numel() for p in parameters])

    first = np.array([p.item() for p in parameters])
    try:
        found = scipy.optimize.minimize(loss, first, jac=True, method="L-BFGS-B")
    except (RuntimeError, ValueError):  # a step to where the covariance cannot be factorised
        return -math.inf
    return -found.fun * y.numel()


def starts(x, y, number: int) -> dict[str, object]:
    begin, model = time.perf_counter(), model_of().condition(x, y)
    nats = [searched(model, y, seed) for seed in range(number)]
    best = max(nats)
    return {
        "seconds": time.perf_counter() - begin,
        "nats": best,
        "agree": sum(value > best - 0.01 * y.numel() for value in nats),
    }


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, starts=(10, 2), most=(4000, 200)).parse_args(words)
    rows = Rows()
    for numbers in NUMBERS:
        if numbers <= arguments.most:
            x, y = drawn(numbers)
            own, others = ours(x, y), starts(x, y, arguments.starts)
            rows.add(
                numbers=numbers,
                **{f"ours {name}": value for name, value in own.items()},
                **{f"starts {name}": value for name, value in others.items()},
                behind=(others["nats"] - own["nats"]) / numbers,
                time=own["seconds"] / others["seconds"],
            )
    save(arguments, {"rows": list(rows), "starts": arguments.starts})
