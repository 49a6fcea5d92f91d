"""Known variances in any unit: `fit(x, y, variances=v)` with y and v multiplied by powers of ten.

    python benchmarks known_variances [--smoke]

The data are a curl-free RBF field in two dimensions with noise of a tenth of its standard
deviation, in every unit of y and of the variances. The columns are hyperparameters in scaled units,
means and standard deviations compared with those of the first unit, and RMSE and coverage of 95 %
intervals of the field. The row `variances` 0 is a fit without variances.
"""

import math
import time
from collections.abc import Sequence

import torch
from helpers.command import Sizes
from helpers.fields import scores
from helpers.results import save
from helpers.rows import Rows

import gp_orff

UNITS = (1.0, 1e-8, 1e8)  # of y
VARIANCES = (1.0, 1e-18, 1e6)  # their geometric mean
SPREADS = (0.0, 1.0, 2.3)  # standard deviations of log v


def problem(count: int, spread: float, seed: int = 0):
    """Return points, values and relative variances, followed by further points with the true
    field."""
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
    """Return hyperparameters, evidence, means and standard deviations, converted to the unit
    one."""
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


def compared(count: int, spread: float, rows: Rows) -> None:
    x, y, v, xs, field = problem(count, spread)
    own = {"points": count, "spread": spread}

    def add(unit: float, variance: float, seconds: float, found, first) -> None:
        rows.add(
            **own,
            unit=unit,
            variances=variance,
            **scores(found[2], found[3].square(), field),
            nats=found[1].item(),
            hyperparameters=(found[0] / first[0] - 1).abs().max().item(),
            mean=((found[2] - first[2]) / first[3]).abs().max().item(),
            deviation=(found[3] / first[3] - 1).abs().max().item(),
            seconds=seconds,
        )

    start = time.perf_counter()
    plain = numbers(fitted(x, y), xs, 1.0, 1.0)
    add(1.0, 0.0, time.perf_counter() - start, plain, plain)
    first = None
    for unit in UNITS:
        for variance in VARIANCES:
            start = time.perf_counter()
            found = numbers(fitted(x, unit * y, variance * v), xs, unit, variance)
            first = found if first is None else first
            add(unit, variance, time.perf_counter() - start, found, first)


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, most=(5000, 120), spreads=(3, 1)).parse_args(words)
    rows = Rows()
    for count in (120, 700, 5000):
        if count <= arguments.most:
            for spread in SPREADS[-arguments.spreads :]:
                compared(count, spread, rows)
    save(arguments, {"rows": rows})
