"""Do 95 % intervals hold 95 % of the truth? Fields of known priors, learned hyperparameters.

    python benchmarks/calibration.py [--fields 50] [--points 10000]

Every field is a draw of a Helmholtz prior (two inputs, RBF potentials) with lengthscales between a
tenth and a quarter of the extent, amplitudes between 0.3 and 1, and noise between 0.1 and 1,
log-uniform; `VectorFieldGP` learns all of them from `--points` readings with default settings.
Share of the latent components at 1000 held-out points inside the 95 % intervals, by field. A field
has few independent values, so that single shares scatter; their mean has to be near 0.95.
"""

import argparse
import math

import numpy as np
import torch
from helpers import curl_free, divergence_free, field_of, scores
from tqdm import trange

import gp_orff


def problem(seed, points):
    rng = np.random.default_rng(seed)
    first, second = np.exp(rng.uniform(math.log(0.1), math.log(0.25), 2))
    weak, strong = np.exp(rng.uniform(math.log(0.3), 0.0, 2))
    noise = float(np.exp(rng.uniform(math.log(0.1), 0.0)))
    parts = curl_free(first), divergence_free(second)
    for part, amplitude in zip(parts, (weak, strong), strict=True):
        part.outputscale = amplitude**2 * part.outputscale
    field = field_of(parts[0] + parts[1], ((0.0, 1.0),) * 2, seed)
    x = torch.from_numpy(rng.random((points + 1000, 2)))
    truth = field(x)
    y = truth[:points] + noise * torch.from_numpy(rng.standard_normal((points, 2)))
    return x[:points], y, x[points:], truth[points:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fields", type=int, default=50)
    parser.add_argument("--points", type=int, default=10_000)
    arguments = parser.parse_args()
    found = []
    for seed in trange(arguments.fields, unit=" fields"):
        x, y, xs, truth = problem(seed, arguments.points)
        kernel = gp_orff.HelmholtzKernel(num_dims=2)
        posterior = gp_orff.VectorFieldGP(kernel).fit(x, y, progress=False).posterior()
        found.append(scores(posterior.mean(xs), posterior.variance(xs), truth))
    rmse, sd, inside = np.array(found).T
    print(f"{arguments.fields} fields, {arguments.points} readings each")
    error = inside.std(ddof=1) / math.sqrt(len(inside))
    print(f"inside 95 % intervals: {inside.mean():.4f} ± {error:.4f} (mean, standard error);")
    low, middle, high = np.quantile(inside, [0.1, 0.5, 0.9])
    print(f"    of single fields: median {middle:.3f}, 10 to 90 %: {low:.3f} to {high:.3f}")
    ratio = math.sqrt((rmse**2).sum() / (sd**2).sum())
    print(f"root mean square error over root mean variance, all fields: {ratio:.3f}")


if __name__ == "__main__":
    main()
