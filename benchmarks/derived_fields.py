"""Divergence and vorticity: calibration, public simulations, seconds.

    python benchmarks/derived_fields.py [DIR] [--fields 30]

1. Thirty fields drawn from Helmholtz priors (as in calibration.py), 2000 readings each,
   hyperparameters learned: share of the true divergence and vorticity at 1000 held-out points
   inside 95 % intervals, mean and standard error over the fields.
2. With DIR, the public simulations of Berlinghieri et al. 2023, `vortex` and `divmild`: root mean
   square error of both maps against the known grids, beside the posterior sd.
3. Divergence and curl with variances at 10⁵ points, about 1000 features: seconds, and MiB above
   what the process had before.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from helpers import curl_free, divergence_free, field_of, peak_mib, resident_mib, scores
from tqdm import trange

import gp_orff

SYMBOLS = {"divergence": gp_orff.Divergence(), "vorticity": gp_orff.Curl()}


def truth_of(field, x):
    """Divergence and vorticity of a known field, by automatic differentiation."""
    x = x.clone().requires_grad_()
    values = field(x)
    east, north = (
        torch.autograd.grad(values[:, i].sum(), x, retain_graph=True)[0] for i in range(2)
    )
    return {
        "divergence": (east[:, 0] + north[:, 1]).detach().unsqueeze(-1),
        "vorticity": (north[:, 0] - east[:, 1]).detach().unsqueeze(-1),
    }


def calibration(fields):
    found = {name: [] for name in SYMBOLS}
    for seed in trange(fields, unit=" fields"):
        rng = np.random.default_rng(seed)
        lengthscales = np.exp(rng.uniform(math.log(0.1), math.log(0.25), 2))
        amplitudes = np.exp(rng.uniform(math.log(0.3), 0.0, 2))
        noise = float(np.exp(rng.uniform(math.log(0.1), 0.0)))
        parts = curl_free(lengthscales[0]), divergence_free(lengthscales[1])
        for part, amplitude in zip(parts, amplitudes, strict=True):
            part.outputscale = amplitude**2 * part.outputscale
        field = field_of(parts[0] + parts[1], ((0.0, 1.0),) * 2, seed)
        x = torch.from_numpy(rng.random((3000, 2)))
        y = field(x[:2000]) + noise * torch.from_numpy(rng.standard_normal((2000, 2)))
        model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        posterior, xs = model.fit(x[:2000], y, progress=False).posterior(), x[2000:]
        truth = truth_of(field, xs)
        for name, symbol in SYMBOLS.items():
            row = scores(posterior.mean(xs, symbol), posterior.variance(xs, symbol), truth[name])
            found[name].append(row)
    for name, rows in found.items():
        rmse, sd, inside = np.array(rows).T
        error = inside.std(ddof=1) / math.sqrt(len(inside))
        ratio = np.median(rmse / sd)
        print(
            f"{name}: inside 95 % intervals {inside.mean():.3f} ± {error:.3f}; error/sd {ratio:.2f}"
        )


def simulations(folder):
    for name in ("vortex", "divmild"):
        x, y, xs = (
            torch.from_numpy(np.loadtxt(folder / f"{kind}_{name}.csv", delimiter=","))
            for kind in ("XY_train", "UV_train", "XY_test")
        )
        model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        posterior = model.fit(x, y, progress=False).posterior()
        for kind, file, sign in (("divergence", "divgrid", 1), ("vorticity", "vortgrid", -1)):
            known = np.loadtxt(folder / f"{file}_{name}.csv", delimiter=",").reshape(-1, 1)
            known = sign * known  # of the files' vorticity, the opposite of ours
            mean, variance = (f(xs, SYMBOLS[kind]) for f in (posterior.mean, posterior.variance))
            rmse, sd, inside = scores(mean, variance, torch.from_numpy(known))
            size = math.sqrt((known**2).mean())
            print(f"{name:8} {kind:11} rms {size:.3f}, error {rmse:.3f}, sd {sd:.3f}, ", end="")
            print(f"inside {inside:.3f}")


def seconds():
    field = field_of(curl_free(1.0) + divergence_free(1.5), ((0.0, 10.0),) * 2)
    generator = torch.Generator().manual_seed(0)
    x = 10 * torch.rand(20_000, 2, generator=generator, dtype=torch.float64)
    y = field(x) + 0.3 * torch.randn(20_000, 2, generator=generator, dtype=torch.float64)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).fit(x, y, progress=False)
    posterior = model.posterior()
    features = next(line for line in model.report.splitlines() if line.startswith("F = "))
    xs = 10 * torch.rand(100_000, 2, generator=generator, dtype=torch.float64)
    before, start = resident_mib(), time.perf_counter()
    for symbol in SYMBOLS.values():
        posterior.mean(xs, symbol), posterior.variance(xs, symbol)
    taken = time.perf_counter() - start
    print(f"10^5 points, {features.split(' on')[0]}: {taken:.1f} s, {peak_mib() - before:.0f} MiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--fields", type=int, default=30, help="0: no calibration")
    arguments = parser.parse_args()
    seconds()
    if arguments.folder is not None:
        simulations(arguments.folder)
    if arguments.fields:
        calibration(arguments.fields)


if __name__ == "__main__":
    main()
