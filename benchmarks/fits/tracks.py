"""Coverage of 95 % intervals for data with errors along tracks, with and without `track=`.

    python benchmarks tracks [--fields 100] [--tracks 20] [--readings 40] [--smoke]

Every field is a draw of a curl-free prior (RBF potential of lengthscale 0.4) of variance one on the
unit square. Straight tracks cross it at constant speed, with one second between observations. The
error of each component is the sum of white noise, an offset of the track, and an Ornstein–Uhlenbeck
process with a memory of 5 s. Each of the three has a standard deviation of 0.3. `VectorFieldGP`
learns all hyperparameters with default settings, once with `track=` and `time=`, and once without.

The columns are the fraction of the latent components at 64 places inside 95 % intervals, the root
mean square error, and the parameters that were learned with tracks. Two further columns are
fractions of the observations of one more track inside their 95 % intervals. The first intervals
integrate over the variance of new tracks. The second use the learned variance.
"""

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from helpers.command import Sizes
from helpers.fields import curl_free, field_of, mean_and_standard_error, quantiles, scores
from helpers.results import rounded, save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

LENGTHSCALE, SD, MEMORY = 0.4, 0.3, 5.0
TRUTH = {
    "noise": SD**2,
    "offset_variance": SD**2,
    "correlated_variance": SD**2,
    "correlation_time": MEMORY,
}


def straight(rng: np.random.Generator, tracks: int, readings: int) -> Float[Tensor, "N 2"]:
    start, end = rng.random((2, tracks, 1, 2))
    return torch.from_numpy(start + (end - start) * np.linspace(0, 1, readings)[:, None]).flatten(
        0, 1
    )


def errors(rng: np.random.Generator, tracks: int, readings: int) -> Float[Tensor, "N 2"]:
    memory, process = np.exp(-1 / MEMORY), [rng.standard_normal((tracks, 2))]
    for _ in range(readings - 1):
        step = np.sqrt(1 - memory**2) * rng.standard_normal((tracks, 2))
        process.append(memory * process[-1] + step)
    offset, white = (
        rng.standard_normal((tracks, 1, 2)),
        rng.standard_normal((tracks, readings, 2)),
    )
    return torch.from_numpy(SD * (np.stack(process, 1) + offset + white)).flatten(0, 1)


def places(count: int = 8) -> Float[Tensor, "n 2"]:
    line = torch.linspace(0.05, 0.95, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def measured(seed: int, tracks: int, readings: int) -> tuple[dict[str, object], dict[str, object]]:
    rng, xs = np.random.default_rng(seed), places()
    field = field_of(curl_free(LENGTHSCALE), ((0.0, 1.0),) * 2, seed)
    x = straight(rng, tracks, readings)
    y = field(x) + errors(rng, tracks, readings)
    label, time = np.repeat(np.arange(tracks), readings), np.tile(np.arange(readings), tracks)
    further = straight(rng, 1, readings)
    reading = field(further) + errors(rng, 1, readings)
    found = []
    for options in ({"track": label, "time": time}, {}):
        model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = model.fit(x, y, progress=False, **options).posterior()
        own = scores(posterior.mean(xs), posterior.variance(xs), field(xs))
        own["warned"] = any(w.category is gp_orff.CalibrationWarning for w in caught)
        if options:
            own |= {name: getattr(model.likelihood, name).item() for name in TRUTH}
            own |= of_new_track(model, posterior(further), reading)
        found.append(own)
    return tuple(found)


def of_new_track(
    model: gp_orff.VectorFieldGP, field: MultitaskMultivariateNormal, reading: Float[Tensor, "n 2"]
) -> dict[str, float]:
    """Return the coverage of observations on a new track, with the variance of its noise
    integrated out and at its learned value."""
    found, noise = {}, model.likelihood
    for name in ("integrated", "learned"):
        low, high = (noise.quantile(field, level) for level in (0.025, 0.975))
        found[name] = ((low < reading) & (reading < high)).double().mean().item()
        noise.slow_variance = None
    return found


def summary(rows: Rows) -> dict[str, object]:
    inside = np.array([row["inside"] for row in rows])
    return {
        "inside": mean_and_standard_error(inside),
        "inside of a field": quantiles(inside),
        "error": float(np.sqrt(np.mean([row["error"] ** 2 for row in rows]))),
        "warned": float(np.mean([row["warned"] for row in rows])),
    }


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"fields": (100, 2), "tracks": (20, 4), "readings": (40, 20)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    along, alone = Rows(), Rows()
    for seed in range(arguments.fields):
        first, second = measured(seed, arguments.tracks, arguments.readings)
        along.add(field=seed, **first)
        alone.add(field=seed, **second)
    found = {
        **{name: getattr(arguments, name) for name in sizes},
        "with track=": summary(along),
        "alone": summary(alone),
        "new track": {
            name: mean_and_standard_error(np.array([row[name] for row in along]))
            for name in ("integrated", "learned")
        },
        "learned": {
            name: {"truth": TRUTH[name], **quantiles(np.array([row[name] for row in along]))}
            for name in TRUTH
        },
    }
    print(rounded(found))
    save(arguments, found)
