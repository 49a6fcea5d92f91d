"""Do 95 % intervals hold where readings are dense along tracks, or in clusters?

    python benchmarks/uneven.py [--fields 2] [--points 20000] [--places 1000] [--smoke]

Every field is the gradient of a draw of a potential on the unit square, of variance one, with
noise of standard deviation 0.05. Readings are on 25 straight tracks, in 60 clusters of width 0.01,
or even. `VectorFieldGP` knows the true hyperparameters and nothing of tracks, and is conditioned
with default settings. Shares inside the 95 % intervals, of the latent components at places
everywhere and at the readings, of averages over boxes of 1/32 of the extent, and of potential
differences to the middle; of `--places` places, and a third as many averages and differences.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import gpytorch
import numpy as np
import scipy.special
import torch
from gpytorch.kernels import Kernel, MaternKernel, RQKernel, ScaleKernel
from helpers.command import Sizes
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float, Int

import gp_orff

Spectrum = Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]
SIDE, PERIOD = 512, 1024  # steps of the unit square, and of the field, which is periodic
NOISE, BOX = 0.05, 16
LENGTHSCALES = {"Matern 3/2": 0.3, "Matern 5/2": 0.3, "RQ": 0.2}
LAYOUTS = ("tracks", "clusters", "even")
ALPHA = 1.0


def base_kernel(name: str) -> Kernel:
    if name == "RQ":
        kernel = RQKernel()
        kernel.alpha = ALPHA
        return kernel
    return MaternKernel(nu=1.5 if name == "Matern 3/2" else 2.5)


def matern(w: Float[np.ndarray, "..."], length: float, nu: float) -> Float[np.ndarray, "..."]:
    return (2 * nu / length**2 + w**2) ** -(nu + 1)


def rational_quadratic(w: Float[np.ndarray, "..."], length: float) -> Float[np.ndarray, "..."]:
    z = math.sqrt(2 * ALPHA) * length * np.maximum(w, 1e-9)
    return z ** (ALPHA - 1) * scipy.special.kv(ALPHA - 1, z)


def spectrum_of(name: str) -> Spectrum:
    length = LENGTHSCALES[name]
    if name == "RQ":
        return partial(rational_quadratic, length=length)
    return partial(matern, length=length, nu=1.5 if name == "Matern 3/2" else 2.5)


def draw(spectrum: Spectrum, rng: np.random.Generator):
    """The gradient of a potential (n, n, 2), of variance one, and the potential (n, n)."""
    k = 2 * np.pi * np.fft.fftfreq(PERIOD, 1 / SIDE)
    waves = np.stack(np.meshgrid(k, k, indexing="ij"))
    w = np.hypot(*waves)
    density = np.where(w > 0, spectrum(w), 0.0)
    density /= (density * w**2 / 2).sum()
    shape = (PERIOD, PERIOD)
    a = np.sqrt(density) * (rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
    fields = [np.fft.ifft2(part * a).real * PERIOD**2 for part in (1j * waves[0], 1j * waves[1], 1)]
    fields = [part[:SIDE, :SIDE] for part in fields]
    return np.stack(fields[:2], -1), fields[2]


def nodes(layout: str, count: int, rng: np.random.Generator) -> Int[np.ndarray, "N 2"]:
    if layout == "even":
        return rng.integers(0, SIDE, (count, 2))
    if layout == "tracks":
        start, end = rng.random((2, 25, 2))
        track, share = rng.integers(0, 25, count), rng.random((count, 1))
        x = start[track] * (1 - share) + end[track] * share
    else:
        x = rng.uniform(0.05, 0.95, (60, 2))[rng.integers(0, 60, count)]
        x = x + 0.01 * rng.standard_normal((count, 2))
    return np.clip((x * SIDE).astype(int), 0, SIDE - 1)


def model_of(name: str) -> gp_orff.VectorFieldGP:
    """A model with the true hyperparameters."""
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(base_kernel(name), num_dims=2)).double()
    kernel.base_kernel.base_kernel.lengthscale = LENGTHSCALES[name]
    kernel.outputscale = 1.0
    with torch.no_grad():
        origin = torch.zeros(1, 2, dtype=torch.float64)
        kernel.outputscale = 1 / kernel(origin).to_dense().diagonal().mean()
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean())
    model.likelihood.noise = NOISE**2
    return model


def measured(layout: str, name: str, seed: int, points: int, count: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    field, potential = draw(spectrum_of(name), rng)
    rows = nodes(layout, points + count, rng)
    values = field[rows[:, 0], rows[:, 1]]
    y = values + NOISE * rng.standard_normal(values.shape)
    x = torch.from_numpy(rows / SIDE)
    posterior = model_of(name).condition(x[:points], torch.from_numpy(y[:points])).posterior()

    def inside(at: Int[np.ndarray, "n 2"], truth: np.ndarray, symbol=None, shift=0.0) -> float:
        z = torch.from_numpy((at + shift) / SIDE)
        error = posterior.mean(z, symbol) - torch.from_numpy(truth).reshape(len(z), -1)
        return (error.square() <= 1.96**2 * posterior.variance(z, symbol)).double().mean().item()

    places, few = rng.integers(0, SIDE, (count, 2)), count // 3
    centres = rng.integers(BOX, SIDE - BOX, (few, 2))
    half = BOX // 2
    averages = np.stack(
        [field[i - half : i + half, j - half : j + half].mean((0, 1)) for i, j in centres]
    )
    middle = np.array([SIDE // 2, SIDE // 2])
    differences = potential[places[:few, 0], places[:few, 1]] - potential[SIDE // 2, SIDE // 2]
    box = gp_orff.BoxAverage((BOX / SIDE, BOX / SIDE))
    return {
        "everywhere": inside(places, field[places[:, 0], places[:, 1]]),
        "at the readings": inside(rows[points:], values[points:]),
        "box averages": inside(centres, averages, box, -0.5),
        "potential": inside(
            places[:few], differences, gp_orff.Potential(torch.from_numpy(middle / SIDE))
        ),
    }


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"fields": (2, 1), "points": (20_000, 200), "places": (1000, 30)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    rows = Rows()
    for layout, name in itertools.product(LAYOUTS, LENGTHSCALES):
        size = arguments.points, arguments.places
        found = [measured(layout, name, seed, *size) for seed in range(arguments.fields)]
        shares = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
        rows.add(layout=layout, kernel=name, **shares)
    save(arguments, {**{name: getattr(arguments, name) for name in sizes}, "rows": rows})


if __name__ == "__main__":
    main()
