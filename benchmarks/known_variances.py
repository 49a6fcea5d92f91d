"""Known variances in any units: `fit(x, y, variances=v)` where y and v are multiplied by powers.

A curl-free RBF field in two dimensions with noise of a tenth of its standard deviation, in every
unit of y and of the variances: hyperparameters in scaled units, means and standard deviations
against those of the first unit, RMSE and coverage of 95 % intervals of the field against a fit
without variances. Run `python benchmarks/known_variances.py [N ...]`.
"""

import math
import sys
import time
import warnings

import torch

import gp_orff

UNITS = (1.0, 1e-8, 1e8)  # of y
VARIANCES = (1.0, 1e-18, 1e6)  # their geometric mean
SPREADS = (0.0, 1.0, 2.3)  # standard deviations of log v


def problem(count: int, spread: float, seed: int = 0):
    """Points, values, relative variances; points and values of the field to be found."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.rand(count + 300, 2, generator=generator).double()
    frequencies = torch.randn(400, 2, generator=generator).double() / 0.7
    phases = 2 * math.pi * torch.rand(400, generator=generator).double()
    field = (x @ frequencies.mT + phases).sin() @ frequencies
    field = field / field.std()
    v = (spread * torch.randn(count, generator=generator).double()).exp()
    noise = 0.1 * v.sqrt().unsqueeze(-1) * torch.randn(count, 2, generator=generator).double()
    return x[:count], field[:count] + noise, v, x[count:], field[count:]


def fitted(x, y, variances=None):
    kernel = gp_orff.CurlFreeKernel(num_dims=2)
    return gp_orff.VectorFieldGP(kernel).fit(x, y, variances=variances, progress=False)


def numbers(model, xs, unit, variance):
    """Hyperparameters, evidence, means and standard deviations in units of one."""
    posterior = model.posterior()
    values = model.state.inference.num_values
    found = [
        model.kernel.base_kernel.base_kernel.lengthscale,
        model.kernel.outputscale / unit**2,
        model.likelihood.noise * variance / unit**2,
    ]
    return (
        torch.stack([own.detach().reshape(()) for own in found]),
        model.log_marginal_likelihood().detach() + values * math.log(unit),
        posterior.mean(xs) / unit,
        posterior.variance(xs).sqrt() / unit,
    )


def judged(mean, sd, field) -> str:
    error = mean - field
    inside = (error.abs() < 1.96 * sd).double().mean().item()
    return f"RMSE {error.square().mean().sqrt():.4f}, coverage {inside:.3f}"


def report(count: int) -> None:
    for spread in SPREADS:
        x, y, v, xs, field = problem(count, spread)
        plain = numbers(fitted(x, y), xs, 1.0, 1.0)
        print(f"N {count}, sd of log v {spread}: without variances {judged(*plain[2:], field)}")
        first = None
        for unit in UNITS:
            for variance in VARIANCES:
                began = time.perf_counter()
                found = numbers(fitted(x, unit * y, variance * v), xs, unit, variance)
                seconds = time.perf_counter() - began
                first = found if first is None else first
                hyper = (found[0] / first[0] - 1).abs().max().item()
                mean = ((found[2] - first[2]) / first[3]).abs().max().item()
                sd = (found[3] / first[3] - 1).abs().max().item()
                print(
                    f"  y x {unit:.0e}, variances x {variance:.0e}: {judged(*found[2:], field)}, "
                    f"noise {found[0][2].sqrt():.4f}, {found[1]:.2f} nats, against the first: "
                    f"hyperparameters {hyper:.0e}, mean {mean:.0e}, sd {sd:.0e}; {seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    warnings.simplefilter("error")
    for count in map(int, sys.argv[1:] or ("120", "700", "5000")):
        report(count)
