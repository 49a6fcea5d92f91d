"""Timed tasks, each in a separate process together with work that does not use the package."""

import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import finufft
import numpy as np
import torch
from jaxtyping import Float
from speed.exactgp_step import step_of
from torch import Tensor

import gp_orff
from helpers.fields import curl_free, field_of
from helpers.known_data import EXTENT
from helpers.measure import PeakMemory, seconds
from helpers.unavoidable import factorisation

ROUNDS, PATIENCE = 9, 10.0  # runs of one row at most; seconds after which no other begins
FEW, SIDE = 1000, 3.0  # vectors that lie in so many lengthscales
NOISE = 0.3


def reference() -> float:
    """Return the time of reference work, in seconds.

    The work has two parts: a Cholesky factor and inverse of size 2000, and a transform of type 1 of
    10⁶ points to 128² modes. Each of the two parts runs three times, and the shortest times are
    added.
    """
    rng = np.random.default_rng(0)
    points, values = 2 * np.pi * rng.random((2, 10**6)), np.ones(10**6, dtype=complex)

    def transform() -> None:
        finufft.nufft2d1(*points, values, (128, 128), eps=1e-9)

    work = factorisation(2000), transform
    for own in work:
        own()
    return sum(min(seconds(own) for _ in range(3)) for own in work)


def drawn(points: int, dims: int) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N d"]]:
    """Return observations of a curl-free field with variance one and lengthscale one."""
    side = SIDE if points <= FEW else EXTENT[dims]
    generator = torch.Generator().manual_seed(0)
    x = side * torch.rand(points, dims, generator=generator, dtype=torch.float64)
    noise = NOISE * torch.randn(points, dims, generator=generator, dtype=torch.float64)
    return x, field_of(curl_free(1.0, dims), ((0.0, side),) * dims)(x) + noise


def model_of(dims: int) -> gp_orff.VectorFieldGP:
    return gp_orff.VectorFieldGP(curl_free(num_dims=dims))


def fit(points: int, dims: int = 2) -> Callable[[], object]:
    x, y = drawn(points, dims)
    return lambda: model_of(dims).fit(x, y, progress=False)


def updates(steps: int = 30) -> Callable[[], object]:
    """Return a function that updates a model with one vector at a time. After each update, it
    computes the mean and the variance at the next position."""
    x, y = drawn(1000 + steps + 1, 2)
    held = x[:1000], y[:1000]
    model = model_of(2).fit(*held, progress=False)

    def loop() -> None:
        model.condition(*held)
        for i in range(1000, 1000 + steps):
            model.update(x[i : i + 1], y[i : i + 1])
            posterior = model.posterior()
            posterior.mean(x[i + 1 : i + 2]), posterior.variance(x[i + 1 : i + 2])

    return loop


def mapping(places: int) -> Callable[[], object]:
    posterior = fit(10**4)().posterior()
    generator = torch.Generator().manual_seed(1)
    xs = EXTENT[2] * torch.rand(places, 2, generator=generator, dtype=torch.float64)
    return lambda: (posterior.mean(xs), posterior.variance(xs))


def importing() -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", "import gp_orff"], check=True)


TIMED: dict[str, Callable[[], Callable[[], object]]] = {
    "import": importing,
    "fit 20 vectors": lambda: fit(20),
    "fit 200 vectors": lambda: fit(200),
    "fit 1000 vectors": lambda: fit(1000),
    "fit 10⁴ vectors": lambda: fit(10**4),
    "fit 10⁶ vectors": lambda: fit(10**6),
    "fit 10⁵ vectors, 3-D": lambda: fit(10**5, 3),
    "ExactGP step": lambda: step_of("orff", 20_000, 400),
    "30 updates": updates,
    "map 10⁶ places": lambda: mapping(10**6),
}


def timed(name: str, smoke: bool = False) -> dict[str, float]:
    """Return the shortest times of a task after one run to warm up.

    The wall time is divided by the time of the reference work. The memory is the one of the first
    run. Other work on the machine only increases times, so the shortest ones vary less than
    medians.
    """
    warnings.simplefilter("ignore")  # of few numbers
    before = reference()
    fit(20)()
    work, clock, processors = TIMED[name](), [], []
    patience = 0.0 if smoke else PATIENCE
    with PeakMemory() as memory:
        work()
    began = time.perf_counter()
    while len(clock) < ROUNDS and (not clock or time.perf_counter() < began + patience):
        start = sum(os.times()[:4])  # with those of processes that have ended
        clock.append(seconds(work))
        processors.append(sum(os.times()[:4]) - start)
    steady = min(before, reference())
    return {
        "time": min(clock) / steady,
        "seconds": min(clock),
        "CPU s": min(processors),
        "MiB": max(memory.mib, 0.0),
        "reference s": steady,
    }
