"""Fisher scoring: Newton's steps with the expected curvature, damped."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.models.fitting.search import Report, Run, Search, TrustRegion

_NATS = 0.1  # steps that gain less, in total, end the search: the prior of curves is wider
_SMALL_STEPS = 2  # in a row end the search
_DAMPING, _LESS, _RISE, _LEAST = 1e-2, 1 / 6, 2.0, 1e-3
_FLAT = 1e-3  # curvature of coordinates of which the data tell nothing
_TRIALS = 8  # of a step, each more damped
_LONGEST = 2.0  # step of a coordinate
_MOVED = 0.3  # of a coordinate, which changes the curvature
_EDGE = 0.9  # of how far a coordinate may move: beyond, the search needs another grid


def score(
    search: Search,
    objective: Callable[[], Float[Tensor, ""]],
    *,
    information: Callable[[], Float[np.ndarray, "k k"]],
    num_values: int,
    nats: float = 0.0,
    iterations: int = 60,
    evaluations: int | None = None,
    trust_factor: float | None = None,
    report: Report = lambda value: None,
) -> Search:
    """Maximise an objective, in total nats, by Fisher scoring in the coordinates of a search.

    A step solves (H + λ diag H) s = ∇, with the Fisher information H; λ falls after steps that gain
    what H foretells and rises after others (Marquardt 1963; Nielsen 1999, *Damping parameter in
    Marquardt's method*). A coordinate at a bound is held while
    the objective rises outwards. The search ends with two steps that gain less than `nats`, or a
    tenth of a nat, in total each, or after `iterations`; H is then its curvature, for others. H is
    computed again where coordinates have moved.

    Args:
        search: goes on from where it is.
        objective, num_values, report: as for `Search.run`.
        information: H in total nats, at the present hyperparameters.
        nats, iterations, evaluations: when to end.
        trust_factor: the largest factor by which frequencies may move, as for `Search.run`.
    """
    coordinates = search.coordinates
    region = TrustRegion.of(coordinates, None)
    run, start = Run(search, region, objective, num_values, report), region.center
    reach = np.full(len(start), np.inf)
    if trust_factor is not None:
        reach = np.where(coordinates.stretch > 0, coordinates.stretch * np.log(trust_factor), reach)
    run.evaluations_left = evaluations or _TRIALS * iterations + 1
    first, _ = run.value_and_gradient(np.zeros_like(start))
    damping, rise, small, least = _DAMPING, _RISE, 0, max(nats, _NATS)
    curvature, known = None, start  # and where it is
    for _ in range(iterations if run.evaluations_left > 0 else 0):
        value, u, gradient = run.value, run.u, run.gradient * num_values
        if curvature is None or small or np.abs(u - known).max() > _MOVED:
            coordinates.set(u)
            curvature, known = information(), u
        free = coordinates.at_bounds(u) * gradient <= 0
        for _ in range(_TRIALS):
            step = np.clip(_step(curvature, gradient, damping, free), -_LONGEST, _LONGEST)
            step = np.clip(u + step - start, -reach, reach) + start - u
            run.value_and_gradient(u + step - start)
            gain = (run.value - value) * num_values
            if gain > 0:
                expected = step @ gradient - 0.5 * step @ curvature @ step
                damping *= max(_LESS, 1 - (2 * min(gain / max(expected, gain), 1) - 1) ** 3)
                rise = _RISE
                break
            damping, rise = max(damping, _LEAST) * rise, _RISE * rise
            if run.evaluations_left < 1:
                break
        small = small + 1 if gain < least else 0
        if not gain > 0 or small == _SMALL_STEPS or run.evaluations_left < 1:
            break
    coordinates.set(run.u)
    inside = coordinates.at_bounds(run.u) == 0
    at_edge = inside & (np.abs(run.u - start) > _EDGE * reach)
    search.settled, search.value = not at_edge.any(), run.value
    search.gained = (run.value - first) * num_values
    if curvature is not None:
        gradient = run.gradient * num_values
        free = coordinates.at_bounds(run.u) * gradient <= 0
        promised = 0.5 * float(gradient @ _step(curvature, gradient, 0.0, free))
        was_cut = run.evaluations_left < 1 or (gain > 0 and small < _SMALL_STEPS)
        search.expected_gain = promised if was_cut else 0.0
        flattest = _FLAT * np.eye(len(curvature))
        search.inverse_hessian = np.linalg.inv((curvature + flattest) / num_values)
    return search


def _step(
    curvature: Float[np.ndarray, "k k"],
    gradient: Float[np.ndarray, "k"],
    damping: float,
    free: Bool[np.ndarray, "k"],
) -> Float[np.ndarray, "k"]:
    """The damped step of the free coordinates."""
    matrix = curvature + damping * np.diag(np.diag(curvature)) + _FLAT * np.eye(len(curvature))
    step = np.zeros_like(gradient)
    step[free] = np.linalg.solve(matrix[np.ix_(free, free)], gradient[free])
    return step
