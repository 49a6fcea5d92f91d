"""Sixty kinds of data with 5 to 100 000 points; the seed of a set is its position in the list."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from helpers.anything import layouts
from helpers.anything.truths import Waves, polynomial, waves

LEAST_TEST, MOST_TEST = 150, 400  # points held out
HOURS, _SINCE_1970 = 1000.0, 450_000.0  # the time axis
_FEW = 25  # up to so many points, those held out lie anywhere in the box


@dataclass(frozen=True)
class Kind:
    """The description of a data set, which has n points in addition to the held-out ones.

    Attributes:
        unit, origin: the unit and the origin of the positions.
        size: the standard deviation of the field.
        background: a constant that is added to the field, divided by `size`.
        snr: the standard deviation of the field divided by that of the noise.
        time: "moving" if time increases along the path, "snapshots" for twelve times, or ""
            without time. The unit is hours since 1970.
    """

    n: int
    layout: str
    constraint: str
    d: int = 2
    spectrum: str = "smooth"
    length: float = 0.3
    snr: float = 10.0
    unit: float = 1.0
    origin: float = 0.0
    size: float = 1.0
    background: float = 0.0
    time: str = ""
    outputs: int = 0

    @property
    def p(self) -> int:
        return self.outputs or self.d

    def __str__(self) -> str:
        words = [f"{self.n}", self.layout.replace("_", " "), self.constraint, f"{self.d}-D"]
        words += [f"+ {self.time} time"] if self.time else []
        return " ".join([*words, self.spectrum, f"ℓ {self.length:g}", f"SNR {self.snr:g}"])


@dataclass(frozen=True)
class Problem:
    """Observations, and held-out positions `xs` with the true field and noisy observations `ys`
    there."""

    x: Float[Tensor, "N c"]
    y: Float[Tensor, "N p"]
    xs: Float[Tensor, "n c"]
    truth: Float[Tensor, "n p"]
    ys: Float[Tensor, "n p"]
    noise: float  # standard deviation
    field: Waves | None  # the true field without its background; None for a polynomial


def made(number: int) -> Problem:
    """Generate the data of `KINDS[number]`."""
    kind, rng = KINDS[number], np.random.default_rng(1000 + number)
    field, (x, xs) = _field(rng, kind), _points(rng, kind)
    size = kind.size / field(x).std()
    noise = kind.size / kind.snr
    y, truth = (size * field(own) + kind.size * kind.background for own in (x, xs))
    y, ys = (own + noise * rng.standard_normal(own.shape) for own in (y, truth))
    scale = np.array([kind.unit] * kind.d + [HOURS] * bool(kind.time))
    shift = np.array([kind.origin] * kind.d + [_SINCE_1970] * bool(kind.time))
    found = (shift + scale * x, y, shift + scale * xs, truth, ys)
    known = field.in_units(shift, scale, size) if isinstance(field, Waves) else None
    return Problem(*map(torch.from_numpy, found), noise, known)


def _field(rng: np.random.Generator, kind: Kind) -> Callable:
    if kind.constraint == "polynomial":
        return polynomial(rng, kind.d, kind.p)
    lengths = np.full(kind.d + bool(kind.time), kind.length)
    return waves(rng, kind.spectrum, kind.constraint, lengths, kind.d, kind.p)


def _points(rng: np.random.Generator, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the observations and the held-out positions.

    For small data, held-out positions are random points in the box.
    """
    count = max(LEAST_TEST, min(kind.n // 5, MOST_TEST))
    x = getattr(layouts, kind.layout)(rng, kind.n + count, kind.d)
    x = np.column_stack([x, _times(kind, len(x))]) if kind.time else x
    few = kind.n <= _FEW
    out = rng.permutation(len(x)) >= kind.n if few else layouts.held_out(rng, x, count)
    return x[~out], x[out]


def _times(kind: Kind, n: int) -> Float[np.ndarray, "n"]:
    along = np.arange(n) / n
    return along if kind.time == "moving" else np.floor(12 * along) / 12


C, D, H, N = "curl-free", "divergence-free", "Helmholtz", "none"
KINDS = [
    # a handful
    Kind(5, "uniform", H, length=0.5),
    Kind(5, "oblique", C, length=0.5, snr=30, unit=1e3),
    Kind(5, "uniform", N, d=1, outputs=1, length=0.4),
    Kind(8, "uniform", D, length=0.5, snr=20, size=1e-3),
    Kind(8, "track", C, d=3, length=0.6, size=5e4, background=3.0),
    Kind(8, "grid", H, spectrum="Matérn 3/2", length=0.6, snr=5),
    Kind(20, "uniform", C, d=3, length=0.5, unit=1e-3),
    Kind(20, "stations", H, length=0.5, snr=5, unit=100.0),
    Kind(20, "lines", D, length=0.4, snr=30, origin=4e6, unit=1e4),
    Kind(20, "uniform", N, outputs=3, length=0.4, spectrum="red"),
    Kind(20, "uniform", C, d=1, length=0.2, snr=50),
    # some dozens
    Kind(50, "clusters", H, length=0.4, spectrum="many lengths"),
    Kind(50, "oblique", H, length=0.2, snr=20),
    Kind(50, "track", H, length=0.4, time="moving", snr=10),
    Kind(60, "flat", C, d=3, length=0.3, size=5e4, background=1.0, snr=100),
    Kind(60, "uniform", N, d=1, outputs=1, spectrum="Matérn 1/2", length=0.3),
    Kind(80, "grid", D, length=0.2, spectrum="red", snr=3),
    Kind(80, "uniform", "polynomial", outputs=2, snr=10, background=5.0),
    Kind(100, "uniform", H, length=0.15, snr=1),
    Kind(100, "casts", H, d=3, length=0.5, spectrum="Matérn 5/2"),
    Kind(120, "track", C, length=0.2, spectrum="swell", snr=30),
    # hundreds
    Kind(200, "uniform", C, length=0.2, snr=100, unit=1e5, origin=5e5),
    Kind(200, "stations", H, length=0.3, spectrum="Matérn 3/2", snr=3, unit=111.0),
    Kind(200, "clusters", D, length=0.2, spectrum="red"),
    Kind(200, "lines", H, d=3, length=0.5, snr=20),
    Kind(200, "track", N, outputs=5, length=0.3, spectrum="many lengths"),
    Kind(250, "flat_track", C, d=3, length=0.2, spectrum="many lengths", snr=50, size=40.0),
    Kind(300, "nearly_stations", C, length=0.2, snr=10, unit=1e4),
    Kind(300, "narrow", H, length=0.1, snr=10, unit=1e3),
    Kind(300, "uniform", H, length=0.3, time="snapshots", spectrum="Matérn 5/2"),
    Kind(400, "uniform", D, d=3, length=0.4, spectrum="red", snr=20),
    Kind(400, "uniform", C, d=1, length=0.05, spectrum="Matérn 3/2", snr=5),
    Kind(400, "patch", H, length=0.15, spectrum="red", snr=20, unit=111.0),
    Kind(500, "grid", N, outputs=2, length=0.15, spectrum="swell"),
    Kind(500, "stations", H, length=0.3, time="snapshots", snr=5),
    # thousands
    Kind(1000, "track", C, length=0.15, spectrum="Matérn 5/2", snr=20),
    Kind(1000, "uniform", H, length=0.1, spectrum="many lengths", snr=5, unit=1e5),
    Kind(1000, "flat_track", H, d=3, length=0.3, spectrum="Matérn 5/2", snr=10),
    Kind(1000, "uniform", N, d=3, outputs=2, length=0.4, snr=10),
    Kind(1000, "oblique", D, length=0.1, spectrum="red", snr=10),
    Kind(1500, "lines", D, length=0.2, spectrum="red", snr=30, size=1e-2),
    Kind(1500, "nearly_flat", C, d=3, length=0.25, snr=10),
    Kind(2000, "stations", H, length=0.2, spectrum="many lengths", snr=4, unit=111.0, origin=30.0),
    Kind(2000, "track", H, length=0.2, time="moving", snr=10),
    Kind(2000, "casts", C, d=3, length=0.4, spectrum="Matérn 3/2", snr=20),
    Kind(2000, "clusters", H, length=0.1, spectrum="Matérn 3/2", snr=10),
    Kind(3000, "uniform", D, d=3, length=0.3, spectrum="many lengths", snr=20),
    Kind(3000, "uniform", "polynomial", d=3, outputs=3, snr=3),
    Kind(5000, "uniform", H, length=0.05, snr=3, size=1e3),
    Kind(5000, "nearly_stations", N, outputs=3, length=0.2, spectrum="Matérn 1/2", snr=5),
    Kind(5000, "flat_track", C, d=3, length=0.15, spectrum="red", snr=30, size=5e4),
    # many
    Kind(10_000, "uniform", H, length=0.1, spectrum="Matérn 5/2", snr=10),
    Kind(10_000, "track", C, d=3, length=0.3, spectrum="smooth", snr=20),
    Kind(10_000, "lines", N, outputs=1, length=0.1, spectrum="red", snr=20, background=100.0),
    Kind(10_000, "uniform", C, d=1, length=0.01, spectrum="many lengths", snr=10),
    Kind(20_000, "stations", H, length=0.2, time="snapshots", snr=5, size=0.1),
    Kind(30_000, "grid", D, length=0.07, spectrum="red", snr=10),
    Kind(100_000, "track", H, length=0.05, spectrum="Matérn 3/2", snr=10, unit=1e6),
    Kind(100_000, "uniform", C, d=3, length=0.2, spectrum="Matérn 5/2", snr=10),
    Kind(100_000, "uniform", H, length=0.15, time="snapshots", spectrum="red", snr=3),
]
assert len(KINDS) == 60
