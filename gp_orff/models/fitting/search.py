"""Evidence maximisation: hyperparameters from the marginal likelihood of observations."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import scipy.optimize
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.models.fitting.coordinates import Coordinates

_NATS = 0.01  # a step that gains less, in total, ends the search
_FLAT = 1e-2  # of the slope over which a step could gain that much
_EDGE = 0.9  # of the range of lengthscales, in its logarithm: time for another grid
_LINE, _FIRST = 2, 8  # evaluations of an iteration, and some more: a kink at a bound takes many
Report = Callable[[float], None]


@dataclass
class Search:
    """Where a search for the largest evidence stands; the next one goes on from here."""

    coordinates: Coordinates
    inverse_hessian: Float[np.ndarray, "k k"] | None = None
    evaluations: int = 0
    failures: list[str] = field(default_factory=list)  # of evaluations, taken as too long steps
    value: float = -np.inf  # nats per observed number
    settled: bool = True  # whether no lengthscale has reached the edge of its range

    def run(
        self,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        *,
        trust_factor: float | None = None,
        nats: float = _NATS,
        iterations: int = 60,
        report: Report = lambda value: None,
    ) -> "Search":
        """Maximise an objective, in total nats, by BFGS in the coordinates of `Coordinates`.

        With `trust_factor`, a coordinate that moves frequencies stays within a factor of it, where it
        moves them as fast as it moves itself. The search ends when one comes to the edge. A
        coordinate that comes to a bound is held there, while the others go on and until the
        evidence rises inwards.
        """
        climb = _Climb(
            self, _Path.of(self.coordinates, trust_factor), objective, num_values, report
        )
        t = np.zeros_like(climb.u)
        free = np.ones(len(t), dtype=bool)
        if not len(t):
            climb.value_and_slope(t)
        while free.any() and iterations > 0:
            iterations -= climb.ascend(t, free, nats, iterations)
            t = climb.path.inverse(climb.u)
            outward = self.coordinates.at_bounds(climb.u) * climb.gradient
            stuck, released = free & (outward > 0), ~free & (outward < 0)
            if not (stuck | released).any():
                break
            free = (free & ~stuck) | released
        self.settled, self.value = not climb.path.at_edge(t), climb.value
        self.coordinates.set(climb.u)
        return self


@dataclass(frozen=True)
class _Path:
    """Coordinates u from free ones t: u = u₀ + w tanh(t / w) where a grid is built for a range of
    u, w the logarithm of that, else u = u₀ + t; both cut at the bounds of u."""

    coordinates: Coordinates
    center: Float[np.ndarray, "k"]  # u₀
    bounded: Bool[np.ndarray, "k"]
    width: Float[np.ndarray, "k"]  # w

    @classmethod
    def of(cls, coordinates: Coordinates, trust_factor: float | None) -> "_Path":
        stretch = coordinates.stretch
        bounded = (stretch > 0) & (trust_factor is not None)
        width = np.where(bounded, stretch * np.log(trust_factor or np.e), 1.0)
        return cls(coordinates, coordinates.get(), bounded, width)

    def place(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """u."""
        return np.clip(self._uncut(t), self.coordinates.low, self.coordinates.high)

    def slope(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """∂u/∂t."""
        own = np.where(self.bounded, 1 - np.tanh(t / self.width) ** 2, 1.0)
        return np.where(self.place(t) == self._uncut(t), own, 0.0)

    def inverse(self, u: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """A t of u."""
        step = u - self.center
        share = np.clip(step / self.width, -1 + 1e-9, 1 - 1e-9)
        return np.where(self.bounded, self.width * np.arctanh(share), step)

    def at_edge(self, t: Float[np.ndarray, "k"]) -> bool:
        """Whether a range, not a bound, is in the way."""
        inside = self.bounded & (self.coordinates.at_bounds(self.place(t)) == 0)
        return bool((np.abs(np.tanh(t / self.width))[inside] > _EDGE).any())

    def _uncut(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        return self.center + np.where(self.bounded, self.width * np.tanh(t / self.width), t)


class _Spent(Exception):
    """No evaluations are left."""


class _Climb:
    """One search: the best place that was seen."""

    def __init__(
        self,
        search: Search,
        path: _Path,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        report: Report,
    ):
        self.search, self.path = search, path
        self.objective, self.num_values, self.report = objective, num_values, report
        self.value, self.u, self.gradient = -np.inf, path.center, np.zeros_like(path.center)
        self.left = 0  # evaluations

    def value_and_slope(self, t: Float[np.ndarray, "k"]) -> tuple[float, Float[np.ndarray, "k"]]:
        """Nats per number, and their derivative in t."""
        if self.left <= 0 and self.value > -np.inf:
            raise _Spent
        self.left -= 1
        u, search = self.path.place(t), self.search
        search.coordinates.set(u)
        search.evaluations += 1
        try:
            value, gradient = search.coordinates.value_and_gradient(self.objective)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError) as error:
            if self.value == -np.inf:  # not the fault of a long step
                raise
            search.failures.append(str(error))
            value, gradient = -np.inf, np.zeros_like(t)
        value, gradient = value / self.num_values, np.nan_to_num(gradient) / self.num_values
        if not np.isfinite(value):
            value = min(self.value, 0.0) - 1e3
        if value > self.value:
            self.value, self.u, self.gradient = value, u, gradient
        self.report(value)
        return value, gradient * self.path.slope(t)

    def ascend(
        self,
        t: Float[np.ndarray, "k"],
        free: Bool[np.ndarray, "k"],
        nats: float,
        iterations: int,
    ) -> int:
        """BFGS in the free coordinates: how many iterations it took."""
        previous, begin = [np.inf], self._at_bounds(t)

        def whole(part: np.ndarray) -> np.ndarray:
            full = t.copy()
            full[free] = part
            return full

        def loss(part: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = self.value_and_slope(whole(part))
            return -value, -slope[free]

        def stop(intermediate_result) -> None:
            gain, now = previous[0] - intermediate_result.fun, whole(intermediate_result.x)
            previous[0] = intermediate_result.fun
            clipped = (self._at_bounds(now) & ~begin & free).any()
            if gain * self.num_values < nats or clipped or self.path.at_edge(now):
                raise StopIteration

        options = {
            "maxiter": iterations,
            "gtol": _FLAT * np.sqrt(nats / self.num_values),
            "hess_inv0": self._curvature(t, free),
        }
        self.left = _LINE * iterations + _FIRST
        try:
            result = scipy.optimize.minimize(
                loss, t[free], jac=True, method="BFGS", callback=stop, options=options
            )
        except _Spent:
            return iterations
        self._carry(result, whole(result.x), free)
        return max(result.nit, 1)

    def _at_bounds(self, t: Float[np.ndarray, "k"]) -> Bool[np.ndarray, "k"]:
        return self.search.coordinates.at_bounds(self.path.place(t)) != 0

    def _curvature(
        self, t: Float[np.ndarray, "k"], free: Bool[np.ndarray, "k"]
    ) -> Float[np.ndarray, "m m"] | None:
        """The inverse Hessian that is known, in the free coordinates."""
        if self.search.inverse_hessian is None:
            return None
        slope = self.path.slope(t)
        slope = np.where(slope > 0, slope, 1.0)
        return _positive((self.search.inverse_hessian / np.outer(slope, slope))[np.ix_(free, free)])

    def _carry(self, result, t: Float[np.ndarray, "k"], free: Bool[np.ndarray, "k"]) -> None:
        """The curvature in u, where it can be of use for the next search."""
        slope = self.path.slope(t)[free]
        inverse = _positive(result.hess_inv * np.outer(slope, slope))
        if result.nit and inverse is not None:
            known = self.search.inverse_hessian
            whole = np.eye(len(free)) if known is None else known.copy()
            whole[free, :] = whole[:, free] = 0.0
            whole[np.ix_(free, free)] = inverse
            self.search.inverse_hessian = whole


def _positive(matrix: Float[np.ndarray, "m m"]) -> Float[np.ndarray, "m m"] | None:
    """A symmetric matrix, where it is positive definite beyond rounding."""
    matrix = 0.5 * (matrix + matrix.T)
    if not np.isfinite(matrix).all():
        return None
    eigenvalues = np.linalg.eigvalsh(matrix)
    return matrix if eigenvalues[0] > 1e-12 * eigenvalues[-1] else None
