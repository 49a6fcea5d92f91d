"""Coverage of 95 % intervals for data that are dense along tracks or in clusters.

    python benchmarks uneven [--fields 4] [--points 20000] [--places 600] [--only tracks,RQ]

Every field is the gradient of a draw of a potential on the unit square, with variance one and noise
of standard deviation 0.05. Observations are on 25 straight tracks, in 60 clusters of width 0.01, or
uniform. `VectorFieldGP` has the true hyperparameters, does not use the tracks, and is conditioned
with default settings.

The columns are fractions inside 95 % intervals, with standard errors over fields. They are measured
for the latent components at random places and at the observations, for averages over boxes of 1/32
of the extent, and for potential differences between random pairs of places. There are `--places`
places, a tenth as many averages, and all pairs of a tenth as many places.

Observations are at every fourth node of the lattice on which the fields are drawn. This lattice
does not resolve rough fields completely: it omits a quarter of the variance of their change from
node to node. With `--only` a layout, a kernel or both, the other cells remain those of the last
run.
"""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from functools import partial

import gpytorch
import numpy as np
import scipy.fft
import scipy.special
import torch
from gpytorch.kernels import Kernel, MaternKernel, RQKernel, ScaleKernel
from helpers.command import RESULTS, Sizes
from helpers.fields import mean_and_standard_error
from helpers.results import COMMIT, save
from helpers.rows import Rows
from jaxtyping import Float, Int
from torch import Tensor

import gp_orff

Spectrum = Callable[[Float[np.ndarray, "..."]], Float[np.ndarray, "..."]]
FINE = 4  # nodes of the field for each step of the readings
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
    """Return the gradient (n, n, 2) of a random potential, with variance one, and the potential
    (n, n)."""
    nodes, side = FINE * PERIOD, FINE * SIDE
    k = 2 * np.pi * np.fft.fftfreq(nodes, 1 / side)
    waves = np.stack(np.meshgrid(k, k, indexing="ij"))
    w = np.hypot(*waves)
    density = np.where(w > 0, spectrum(w), 0.0)
    density /= (density * w**2 / 2).sum()
    shape = (nodes, nodes)
    a = np.sqrt(density) * (rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
    parts = (1j * waves[0], 1j * waves[1], 1)
    fields = [scipy.fft.ifft2(part * a).real[:side, :side] * nodes**2 for part in parts]
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
    """Return a model with the true hyperparameters."""
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(base_kernel(name), num_dims=2)).double()
    kernel.base_kernel.base_kernel.lengthscale = LENGTHSCALES[name]
    kernel.outputscale = 1.0
    with torch.no_grad():
        origin = torch.zeros(1, 2, dtype=torch.float64)
        kernel.outputscale = 1 / kernel(origin).to_dense().diagonal().mean()
    model = gp_orff.VectorFieldGP(kernel, mean=gpytorch.means.ZeroMean())
    model.likelihood.noise = NOISE**2
    return model


def conditioned(layout: str, name: str, seed: int, points: int, count: int):
    """Return the posterior of a field, the true field and potential, and the nodes of further
    observations."""
    rng = np.random.default_rng(seed)
    field, potential = draw(spectrum_of(name), rng)
    rows = nodes(layout, points + count, rng)
    values = field[tuple(FINE * rows[:points].T)]
    y = torch.from_numpy(values + NOISE * rng.standard_normal(values.shape))
    x = torch.from_numpy(rows[:points] / SIDE)
    return model_of(name).condition(x, y).posterior(), field, potential, rows[points:]


def share(error: Float[Tensor, "..."], variance: Float[Tensor, "..."]) -> float:
    return (error.square() <= 1.96**2 * variance).double().mean().item()


def measured(layout: str, name: str, seed: int, points: int, count: int) -> dict[str, float]:
    posterior, field, potential, readings = conditioned(layout, name, seed, points, count)
    rng = np.random.default_rng(1000 + seed)

    def inside(at: Int[np.ndarray, "n 2"], truth: np.ndarray, symbol=None, shift=0.0) -> float:
        z = torch.from_numpy(at / SIDE + shift)
        error = posterior.mean(z, symbol) - torch.from_numpy(truth).reshape(len(z), -1)
        return share(error, posterior.variance(z, symbol))

    places, few = rng.integers(0, SIDE, (count, 2)), count // 10
    centres = rng.integers(BOX, SIDE - BOX, (few, 2))
    half = FINE * BOX // 2
    averages = [
        field[i - half : i + half, j - half : j + half].mean((0, 1)) for i, j in FINE * centres
    ]
    box = gp_orff.BoxAverage((BOX / SIDE, BOX / SIDE))
    ends = torch.from_numpy(places[:few] / SIDE)
    joint = posterior(ends, gp_orff.Potential(ends[0]))
    error = joint.mean - torch.from_numpy(potential[tuple(FINE * places[:few].T)])
    i, j = torch.triu_indices(few, few, 1)
    variance, covariance = joint.covariance_matrix.diagonal(), joint.covariance_matrix[i, j]
    return {
        "everywhere": inside(places, field[tuple(FINE * places.T)]),
        "at the readings": inside(readings, field[tuple(FINE * readings.T)]),
        "box averages": inside(centres, np.stack(averages), box, -0.5 / (FINE * SIDE)),
        "potential": share(error[i] - error[j], variance[i] + variance[j] - 2 * covariance),
    }


def last_rows() -> list[dict[str, object]]:
    """Return the rows of the recorded run."""
    file = RESULTS / "uneven.json"
    return json.loads(file.read_text())["results"]["rows"] if file.exists() else []


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"fields": (4, 2), "points": (20_000, 200), "places": (600, 30)}
    parser = Sizes(__file__, __doc__, **sizes)
    parser.add_argument("--only", default="", help="a layout, a kernel, or both with a comma")
    arguments = parser.parse_args(words)
    wanted = set(filter(None, arguments.only.split(",")))
    known = {(row["layout"], row["kernel"]): row for row in last_rows()} if wanted else {}
    rows = Rows()
    for cell in itertools.product(LAYOUTS, LENGTHSCALES):
        if wanted <= set(cell):
            size = arguments.points, arguments.places
            found = [measured(*cell, seed, *size) for seed in range(arguments.fields)]
            shares = {
                key: mean_and_standard_error(np.array([one[key] for one in found]))
                for key in found[0]
            }
            rows.add(layout=cell[0], kernel=cell[1], fields=len(found), commit=COMMIT, **shares)
        elif cell in known:
            rows.add(**known[cell])
    save(arguments, {**{name: getattr(arguments, name) for name in sizes}, "rows": rows})
