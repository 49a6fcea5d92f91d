"""A robot's loop: add one reading, ask for mean and variance at the next place.

    python benchmarks/robot_loop.py [--points 3000] [--readings 200]

A curl-free RBF field over 17 × 17 lengthscales, read with noise of 0.3 of its standard deviation;
`VectorFieldGP` learns it from `--points` readings, then `--readings` more come one at a time along
a track. Seconds of `update` with the posterior's mean and variance at the next place, median and
95th percentile; beside it, interleaved, one bare Cholesky factorisation of an F × F matrix, which
no exact update of the posterior of all weights by one factorisation avoids. In the end, mean and
variance against one pass over all readings.
"""

import argparse
import time

import numpy as np
import torch
from helpers import curl_free, field_of

import gp_orff


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=3000)
    parser.add_argument("--readings", type=int, default=200)
    parser.add_argument("--extent", type=float, default=17.0)
    arguments = parser.parse_args()
    field = field_of(curl_free(1.0), ((0.0, arguments.extent),) * 2)
    generator = torch.Generator().manual_seed(0)
    shape = arguments.points, 2
    x = arguments.extent * torch.rand(*shape, generator=generator, dtype=torch.float64)
    y = field(x) + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    model = gp_orff.VectorFieldGP(curl_free()).fit(x, y, progress=False)
    model.posterior()
    features = next(line for line in model.report.splitlines() if line.startswith("F = "))
    count = int(features.split()[2])
    print(f"{torch.get_num_threads()} threads; {features}")

    t = torch.linspace(0, 1, arguments.readings + 1, dtype=torch.float64)
    track = arguments.extent * torch.stack([0.1 + 0.8 * t, 0.5 + 0.3 * torch.sin(9 * t)], dim=-1)
    noise = 0.3 * torch.randn(len(track), 2, generator=generator, dtype=torch.float64)
    readings = field(track) + noise
    matrix = torch.eye(count, dtype=torch.float64) * 2 + 1e-3
    loop, bare = [], []
    for i in range(arguments.readings):
        start = time.perf_counter()
        model.update(track[i : i + 1], readings[i : i + 1])
        posterior = model.posterior()
        posterior.mean(track[i + 1 : i + 2]), posterior.variance(track[i + 1 : i + 2])
        middle = time.perf_counter()
        torch.linalg.cholesky(matrix)
        loop.append(middle - start), bare.append(time.perf_counter() - middle)
    for name, seconds in {"update and prediction": loop, "one Cholesky": bare}.items():
        median, high = np.quantile(seconds, [0.5, 0.95])
        print(f"{name:24}{1e3 * median:8.1f} ms median{1e3 * high:8.1f} ms (95 % of them)")
    print(f"ratio {np.median(np.array(loop) / np.array(bare)):.1f}")

    expected = gp_orff.VectorFieldGP(model.kernel, likelihood=model.likelihood)
    expected.condition(torch.cat([x, track[:-1]]), torch.cat([y, readings[:-1]]))
    one, other = model.posterior(), expected.posterior()
    mean = (one.mean(track) - other.mean(track)).abs().max()
    variance = (one.variance(track) - other.variance(track)).abs().max()
    print(f"against one pass over all readings: mean {mean:.1e}, variance {variance:.1e}")


if __name__ == "__main__":
    main()
