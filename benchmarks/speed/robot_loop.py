"""The loop of a robot: add one observation, then predict mean and variance at the next place.

    python benchmarks robot_loop [--points 3000] [--steps 200] [--smoke]

The field is a curl-free RBF field over 17 × 17 lengthscales, observed with noise of 0.3 of its
standard deviation. `VectorFieldGP` learns it from `--points` vectors. Then `--steps` further
vectors come one at a time along a track. The columns are the median and the 95th percentile of the
seconds of `update` with the mean and variance at the next place. Interleaved with these steps is
one Cholesky factorisation of an F × F matrix. Every exact update of the posterior of all weights
that factorises once needs this time. At the end, mean and variance are compared with those of one
pass over all vectors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes
from helpers.fields import curl_free, field_of
from helpers.measure import median_ratio, seconds
from helpers.results import rounded, save

import gp_orff


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"points": (3000, 1500), "steps": (200, 5), "extent": (17.0, 5.0)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    field = field_of(curl_free(1.0), ((0.0, arguments.extent),) * 2)
    generator = torch.Generator().manual_seed(0)
    shape = arguments.points, 2
    x = arguments.extent * torch.rand(*shape, generator=generator, dtype=torch.float64)
    y = field(x) + 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    model = gp_orff.VectorFieldGP(curl_free()).fit(x, y, progress=False)
    count = model.report.features

    t = torch.linspace(0, 1, arguments.steps + 1, dtype=torch.float64)
    track = arguments.extent * torch.stack([0.1 + 0.8 * t, 0.5 + 0.3 * torch.sin(9 * t)], dim=-1)
    noise = 0.3 * torch.randn(len(track), 2, generator=generator, dtype=torch.float64)
    seen = field(track) + noise
    matrix = torch.eye(count, dtype=torch.float64) * 2 + 1e-3

    def step(i: int) -> None:
        model.update(track[i : i + 1], seen[i : i + 1])
        posterior = model.posterior()
        posterior.mean(track[i + 1 : i + 2]), posterior.variance(track[i + 1 : i + 2])

    times = {"update and prediction": [], "one Cholesky": []}
    for i in range(arguments.steps):
        times["update and prediction"].append(seconds(lambda i=i: step(i)))
        times["one Cholesky"].append(seconds(lambda: torch.linalg.cholesky(matrix)))
    found = {"F": count, "points": arguments.points, "steps": arguments.steps}
    for name, own in times.items():
        median, high = np.quantile(own, [0.5, 0.95]).tolist()
        found[name] = {"median": median, "95 %": high}
    found["ratio"] = median_ratio(*times.values())

    expected = gp_orff.VectorFieldGP(model.kernel, likelihood=model.likelihood)
    expected.condition(torch.cat([x, track[:-1]]), torch.cat([y, seen[:-1]]))
    one, other = model.posterior(), expected.posterior()
    found["against one pass"] = {
        "mean": (one.mean(track) - other.mean(track)).abs().max().item(),
        "variance": (one.variance(track) - other.variance(track)).abs().max().item(),
    }
    for name, value in rounded(found).items():
        print(f"{name}: {value}")
    save(arguments, found)
