"""Learning a field from N vectors: one pass over the data, then training that costs nothing in N.

    python benchmarks/one_pass.py [--points 1000 10000 100000 1000000 10000000]

A curl-free RBF field in a square of `--extent` lengthscales with noise of 0.3 of its standard
deviation, learned by `VectorFieldGP.fit` with default settings; float64. Every N runs in a process
of its own. Columns:

fit          seconds of the whole `fit`: starting values, passes, every evaluation
memory       largest resident size above that with the data, MiB
pass         seconds of one pass: the statistics of F features
nufft        seconds of the transforms that no pass can avoid, bare calls of FINUFFT
F, step      features of one grid, the same for every N, and seconds of one evaluation of evidence
             and gradient in all hyperparameters on it, median
bare         seconds of one Cholesky factorisation and one inverse of an F×F matrix, interleaved
map          seconds of the posterior mean and variance at 10⁶ points, the first time
error, sd    root mean square of the error of the mean, and of the posterior sd, at 2000 held-out
             points; inside: share of the true field within 95 % intervals
"""

import argparse
import json
import subprocess
import sys
import time

import finufft
import gpytorch
import numpy as np
import torch
from helpers import curl_free, field_of, median_seconds, peak_mib, resident_mib, scores

import gp_orff
from gp_orff.data.dataset import Dataset
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.reading import Options, read
from gp_orff.features.assemble import draw
from gp_orff.inference.conditioning import FeatureInference, log_marginal_likelihood
from gp_orff.models.fitting.coordinates import Coordinates

NOISE = 0.3


def bare_transforms(x, y, lattice):
    """T of all points and φᵀy, as FINUFFT is called without this package."""
    modes = lattice.indices.abs().amax(0).tolist()
    phases = ((x - lattice.origin) * lattice.spacing).numpy()
    first, second = (np.ascontiguousarray(phases[:, i]) for i in range(2))
    ones = np.ones(len(x), dtype=complex)
    vectors = np.ascontiguousarray(y[:, 0].numpy() + 1j * y[:, 1].numpy())

    def transforms():
        sizes = tuple(4 * m + 1 for m in modes)
        finufft.nufft2d1(first, second, ones, sizes, eps=1e-12, isign=1)
        sizes = tuple(2 * m + 1 for m in modes)
        finufft.nufft2d1(first, second, vectors, sizes, eps=1e-12, isign=1)

    return transforms


def measure(points, extent):
    box = ((0.0, extent),) * 2
    field = field_of(curl_free(1.0), box)
    generator = torch.Generator().manual_seed(1)
    x = extent * torch.rand(points + 2000, 2, generator=generator, dtype=torch.float64)
    truth = field(x)
    y = truth[:points] + NOISE * torch.randn(points, 2, generator=generator, dtype=torch.float64)
    x, xs, truth = x[:points].clone(), x[points:].clone(), truth[points:].clone()
    before = resident_mib()
    start = time.perf_counter()
    model = gp_orff.VectorFieldGP(curl_free()).fit(x, y, progress=False)
    seconds = time.perf_counter() - start
    peak = peak_mib()

    posterior = model.posterior()
    many = extent * torch.rand(10**6, 2, generator=generator, dtype=torch.float64)
    start = time.perf_counter()
    posterior.mean(many), posterior.variance(many)
    mapped = time.perf_counter() - start
    error, sd, inside = scores(posterior.mean(xs), posterior.variance(xs), truth)

    grid = gp_orff.Grid(domain=box, tolerance=1e-7, lengthscale_range=(0.9, 1.1))
    kernel, likelihood = curl_free(1.0), model.likelihood
    readings = read(x, y, 2, Options())
    observations = FeatureInference(Dataset.in_memory(readings), draw(kernel, grid, 2))
    lattice = observations.draws[0].lattice
    phi = lattice.columns()
    passes = lambda: FieldStatistics.of(readings, phi), bare_transforms(x, y, lattice)
    whole, nufft = median_seconds(passes, 3)
    coordinates = Coordinates(kernel, likelihood)
    features = 2 * observations.draws[0].num_frequencies
    matrix = torch.eye(features, dtype=torch.float64) * 2 + 1e-3

    def step():
        coordinates.value_and_gradient(
            lambda: log_marginal_likelihood(observations, kernel, {DEFAULT: likelihood}, None)
        )

    def bare():
        torch.cholesky_inverse(torch.linalg.cholesky(matrix))

    step(), bare()
    per_step, per_bare = median_seconds([step, bare], 21)
    return {
        "N": points,
        "fit": seconds,
        "evaluations": sum(
            int(line.split(": ")[1].split()[0])
            for line in model.report.splitlines()
            if " evaluations" in line and "start" not in line
        ),
        "memory": peak - before,
        "pass": whole,
        "nufft": nufft,
        "F": features,
        "step": per_step,
        "bare": per_bare,
        "map": mapped,
        "error": error,
        "sd": sd,
        "inside": inside,
        "report": model.report,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=float, nargs="+", default=[1e3, 1e4, 1e5, 1e6, 1e7])
    parser.add_argument("--extent", type=float, default=9.0)
    parser.add_argument("--one", action="store_true", help="one N, here; prints JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(int(arguments.points[0]), arguments.extent)))
        return
    print(f"{torch.get_num_threads()} threads, gpytorch {gpytorch.__version__}")
    print(
        f"{'N':>10}{'fit':>8}{'evals':>7}{'memory':>8}{'pass':>8}{'nufft':>8}"
        f"{'F':>6}{'step':>9}{'bare':>9}{'ratio':>7}{'map':>7}{'error':>9}{'sd':>9}{'inside':>8}"
    )
    found = {}
    for points in arguments.points:
        command = [sys.executable, __file__, "--one", "--points", str(points)]
        command += ["--extent", str(arguments.extent)]
        row = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        found[row["N"]] = row
        print(
            f"{row['N']:>10}{row['fit']:>8.2f}{row['evaluations']:>7}{row['memory']:>8.0f}"
            f"{row['pass']:>8.3f}{row['nufft']:>8.3f}{row['F']:>6}{row['step']:>9.4f}"
            f"{row['bare']:>9.4f}{row['step'] / row['bare']:>7.2f}{row['map']:>7.2f}"
            f"{row['error']:>9.4f}{row['sd']:>9.4f}{row['inside']:>8.3f}",
            flush=True,
        )
    if 10**6 in found and 10**4 in found:
        ratio = found[10**6]["step"] / found[10**4]["step"]
        print(f"one evaluation at N = 10^6 over N = 10^4: {ratio:.2f}")
        print(found[10**6]["report"])


if __name__ == "__main__":
    main()
