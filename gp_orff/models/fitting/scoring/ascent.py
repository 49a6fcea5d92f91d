"""Fisher scoring: Newton's steps with the expected curvature, damped."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.models.fitting.search import Report, Run, Search, TrustRegion

_NATS = 0.1  # steps that gain less, in total, end the search: the prior of curves is wider
_SMALL_STEPS = 2  # in a row end the search
_DAMPING, _LESS, _MORE, _LEAST = 1e-2, 1 / 6, 5.0, 1e-3
_FLAT = 1e-3  # curvature of coordinates of which the data tell nothing
_TRIALS = 8  # of a step, each more damped
_LONGEST = 2.0  # step of a coordinate


def score(
    search: Search,
    objective: Callable[[], Float[Tensor, ""]],
    *,
    information: Callable[[], Float[np.ndarray, "k k"]],
    num_values: int,
    nats: float = 0.0,
    iterations: int = 60,
    trust_factor: float | None = None,
    report: Report = lambda value: None,
) -> Search:
    """Maximise an objective, in total nats, by Fisher scoring in the coordinates of a search.

    A step solves (H + λ diag H) s = ∇, with the Fisher information H; λ falls after steps that gain
    and rises after others (Levenberg 1944, Marquardt 1963). A coordinate at a bound is held while
    the objective rises outwards. The search ends with two steps that gain less than `nats`, or a
    tenth of a nat, in total each, or after `iterations`; H is then its curvature, for others.

    Args:
        search: goes on from where it is.
        objective, num_values, report: as for `Search.run`.
        information: H in total nats, at the present hyperparameters.
        nats, iterations: when to end.
        trust_factor: the largest factor by which frequencies may move, as for `Search.run`; the
            search does not end at that edge.
    """
    coordinates = search.coordinates
    region = TrustRegion.of(coordinates, None)
    run, start = Run(search, region, objective, num_values, report), region.center
    reach = np.full(len(start), np.inf)
    if trust_factor is not None:
        reach = np.where(coordinates.stretch > 0, coordinates.stretch * np.log(trust_factor), reach)
    run.evaluations_left = _TRIALS * iterations + 1
    run.value_and_gradient(np.zeros_like(start))
    damping, small, curvature, least = _DAMPING, 0, None, max(nats, _NATS)
    for _ in range(iterations):
        value, u, gradient = run.value, run.u, run.gradient * num_values
        coordinates.set(u)
        curvature = information()
        free = coordinates.at_bounds(u) * gradient <= 0
        for _ in range(_TRIALS):
            step = np.clip(_step(curvature, gradient, damping, free), -_LONGEST, _LONGEST)
            run.value_and_gradient(np.clip(u + step - start, -reach, reach))
            if run.value > value:
                damping *= _LESS
                break
            damping = max(damping, _LEAST) * _MORE
        gain = (run.value - value) * num_values
        small = small + 1 if gain < least else 0
        if not gain > 0 or small == _SMALL_STEPS:
            break
    coordinates.set(run.u)
    search.settled, search.value = True, run.value
    if curvature is not None:
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
