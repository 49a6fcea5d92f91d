"""Arrangements of points (n, d) in about the unit box, in the order of measurement."""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy.spatial import cKDTree

Rng = np.random.Generator
Layout = Callable[[Rng, int, int], Float[np.ndarray, "n d"]]


def uniform(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    return rng.random((n, d))


def track(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return points along the path of a ship or a robot, whose velocity changes slowly and which is
    reflected at walls."""
    turns = max(4, round(math.sqrt(n)))
    knots = np.cumsum(rng.standard_normal((turns, d)), axis=0) * 0.35
    along = np.linspace(0, turns - 1, n)
    path = np.stack([_smooth(along, knots[:, i]) for i in range(d)], axis=-1)
    return np.abs((path + 0.5) % 2 - 1)


def _smooth(along, knots):
    """Interpolate between the knots by cosines, so that the direction of the path does not jump."""
    start = np.minimum(along.astype(int), len(knots) - 2)
    share = 0.5 - 0.5 * np.cos(math.pi * (along - start))
    return (1 - share) * knots[start] + share * knots[start + 1]


def clusters(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    centres, widths = rng.random((7, d)), np.exp(rng.uniform(-4, -2, 7))
    which = rng.integers(7, size=n)
    return centres[which] + widths[which, None] * rng.standard_normal((n, d))


def patch(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return random points, half of which are in a hundredth of the box."""
    x = rng.random((n, d))
    x[::2] = 0.4 + 0.01 ** (1 / d) * x[::2]
    return x


def stations(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return random points with eight records on average at exactly the same place."""
    return rng.random((max(3, n // 8), d))[rng.integers(max(3, n // 8), size=n)]


def nearly_stations(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return stations whose positions have errors of a hundred-thousandth of the extent."""
    return stations(rng, n, d) + 1e-5 * rng.standard_normal((n, d))


def lines(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return points along parallel survey lines in alternating directions, in the first two inputs.

    The other inputs change from line to line.
    """
    count = max(2, round(n**0.4))
    number, along = np.divmod(np.arange(n) * count / n, 1)
    x = np.empty((n, d))
    x[:, 0] = np.where(number % 2 == 0, along, 1 - along)
    x[:, 1] = number / (count - 1) + 0.002 * rng.standard_normal(n)
    x[:, 2:] = rng.random((count, d - 2))[number.astype(int)]
    return x


def oblique(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return points on one straight line that is not parallel to an axis."""
    return rng.random((n, 1)) * np.linspace(1, 0.4, d)


def flat(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return random points whose last input is constant."""
    x = rng.random((n, d))
    x[:, -1] = 0.3
    return x


def flat_track(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    return np.column_stack([track(rng, n, d - 1), np.full(n, 0.3)])


def nearly_flat(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return random points whose last input varies by a millionth of the extent."""
    x = rng.random((n, d))
    x[:, -1] = 0.3 + 1e-6 * x[:, -1]
    return x


def casts(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return vertical profiles, with few places and many depths."""
    count = max(3, n // 40)
    place = rng.random((count, d - 1))[np.arange(n) * count // n]
    return np.column_stack([place, np.arange(n) * count / n % 1])


def grid(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return the nodes of a regular grid, without some random ones."""
    axis = np.linspace(0, 1, math.ceil(n ** (1 / d)))
    nodes = np.stack(np.meshgrid(*[axis] * d, indexing="ij"), axis=-1).reshape(-1, d)
    return nodes[np.sort(rng.permutation(len(nodes))[:n])]


def narrow(rng: Rng, n: int, d: int) -> Float[np.ndarray, "n d"]:
    """Return random points in a river that is a hundred times as long as wide."""
    return rng.random((n, d)) * np.array([1.0, *[0.01] * (d - 1)])


def held_out(rng: Rng, x: Float[np.ndarray, "n d"], count: int) -> np.ndarray:
    """Return which points are held out: all points in balls around random points, at least `count`.

    The radius of a ball is the median distance from a place to its third nearest neighbour.
    """
    places = np.unique(x, axis=0)
    chosen = places[rng.permutation(len(places))[:2000]]
    radius = np.median(cKDTree(places).query(chosen, k=min(4, len(places)))[0][:, -1])
    tree, out = cKDTree(x), np.zeros(len(x), dtype=bool)
    for centre in x[rng.permutation(len(x))]:
        if out.sum() >= count:
            break
        out[tree.query_ball_point(centre, radius)] = True
    return out
