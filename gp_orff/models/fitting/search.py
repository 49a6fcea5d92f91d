"""Evidence maximisation: hyperparameters from the marginal likelihood of observations."""

import warnings
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import scipy.optimize
import torch
from jaxtyping import Bool, Float
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gp_orff.models.fitting.coordinates import Coordinates

_NATS = 0.01  # in total: a step that gains less ends the search, if the next one promises less too
_EDGE = 0.9  # of the trust region, in its logarithm: beyond, the search needs another grid
_PER_ITERATION, _EXTRA = 2, 8  # evaluations; a line search across a bound takes many
_MUCH = 1.0  # nats still promised at the end of a search, of which a warning tells
Report = Callable[[float], None]


class SearchWarning(UserWarning):
    """A search for hyperparameters ended away from a maximum of the evidence.

    Example:
        A search that may take one step alone:

        >>> import numpy as np, torch, warnings
        >>> from gpytorch.kernels import RBFKernel
        >>> from gp_orff.models.fitting.coordinates import Coordinates
        >>> from gp_orff.models.fitting.search import Search, SearchWarning
        >>> kernel = RBFKernel().double()
        >>> search = Search(Coordinates(kernel))
        >>> peak = lambda: -50 * (kernel.lengthscale.log() - 2).square().sum()
        >>> _ = search.run(peak, num_values=1, iterations=1)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", SearchWarning)
        ...     search.warn()
        >>> caught[0].category.__name__
        'SearchWarning'
    """


@dataclass
class Search:
    """The state of a search for the largest evidence; each `run` goes on from the last one."""

    coordinates: Coordinates
    inverse_hessian: Float[np.ndarray, "k k"] | None = None
    evaluations: int = 0
    failures: list[str] = field(default_factory=list)  # errors of evaluations, whose steps were cut
    value: float = -np.inf  # nats per observed number
    gained: float = np.inf  # nats, in the last run if by Fisher scoring
    expected_gain: float = 0.0  # nats that another step promised when the last run ended
    settled: bool = True  # whether no lengthscale has reached the edge of its trust region

    def run(
        self,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        *,
        trust_factor: float | None = None,
        nats: float = _NATS,
        iterations: int = 60,
        evaluations: int | None = None,
        report: Report = lambda value: None,
    ) -> "Search":
        """Maximise an objective, in total nats, by BFGS in the coordinates of `Coordinates`.

        `trust_factor` limits the factor by which frequencies may move from where the run starts;
        the run ends when a coordinate reaches that edge. A coordinate that reaches a bound is held
        there while the others go on, and released when the evidence rises inwards. A run also ends
        with a step that gains less than `nats` in total if the quadratic model of `Curvature`
        promises no more of the next one, or after `iterations` or so many `evaluations`, by default
        two an iteration and a few. `report` is called with the nats per number of each evaluation.
        """
        region = TrustRegion.of(self.coordinates, trust_factor)
        run = Run(self, region, objective, num_values, report)
        t = np.zeros_like(run.u)
        free = np.ones(len(t), dtype=bool)
        if not len(t):
            run.value_and_gradient(t)
        run.evaluations_left = evaluations or _PER_ITERATION * iterations + _EXTRA
        while free.any() and iterations > 0:
            before = run.value
            iterations -= run.ascend(t, free, nats, iterations)
            t = region.inverse(run.u)
            outward = self.coordinates.at_bounds(run.u) * run.gradient
            held, released = free & (outward > 0), ~free & (outward < 0)
            changed = run.clipped or (held | released).any()
            if not changed or (run.value - before) * num_values < nats:
                break
            free = (free & ~held) | released
        self.settled, self.value, self.gained = not region.at_edge(t), run.value, np.inf
        self.expected_gain = run.expected_gain
        self.coordinates.set(run.u)
        return self

    def warn(self) -> None:
        """Warn if the last run ended away from a maximum."""
        if self.expected_gain > _MUCH:
            warnings.warn(
                f"the search for hyperparameters ended where another step promised "
                f"{self.expected_gain:.2g} nats of log evidence; call fit again with "
                "warm_start=True, which goes on from there",
                SearchWarning,
                stacklevel=2,
            )

    @property
    def reached(self) -> dict[str, object]:
        """Where the search is, as plain values."""
        names = ("inverse_hessian", "evaluations", "failures", "value", "settled")
        names += ("gained", "expected_gain")
        return {"u": self.coordinates.get(), **{name: getattr(self, name) for name in names}}

    def go_to(self, reached: Mapping[str, object]) -> None:
        """Go to where another search was, as told by its `reached`."""
        for name, value in reached.items():
            if name == "u":
                self.coordinates.set(value)
            else:
                setattr(self, name, copy(value))


@dataclass(frozen=True)
class TrustRegion:
    """The map from unbounded t to coordinates u, clipped at the bounds of u: u = u₀ + w tanh(t / w)
    for coordinates that move frequencies, where w is the logarithm of the largest factor, and
    u = u₀ + t for others."""

    coordinates: Coordinates
    center: Float[np.ndarray, "k"]  # u₀
    bounded: Bool[np.ndarray, "k"]
    width: Float[np.ndarray, "k"]  # w

    @classmethod
    def of(cls, coordinates: Coordinates, trust_factor: float | None) -> "TrustRegion":
        stretch = coordinates.stretch
        bounded = (stretch > 0) & (trust_factor is not None)
        width = np.where(bounded, stretch * np.log(trust_factor or np.e), 1.0)
        return cls(coordinates, coordinates.get(), bounded, width)

    def u(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """u(t)."""
        return np.clip(self._unclipped(t), self.coordinates.low, self.coordinates.high)

    def slope(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """∂u/∂t."""
        slope = np.where(self.bounded, 1 - np.tanh(t / self.width) ** 2, 1.0)
        return np.where(self.u(t) == self._unclipped(t), slope, 0.0)

    def inverse(self, u: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """A t with u(t) = u, if u is within the region."""
        step = u - self.center
        ratio = np.clip(step / self.width, -1 + 1e-9, 1 - 1e-9)
        return np.where(self.bounded, self.width * np.arctanh(ratio), step)

    def at_edge(self, t: Float[np.ndarray, "k"]) -> bool:
        """Whether a coordinate is at the edge of the trust region, and not at a bound."""
        inside = self.bounded & (self.coordinates.at_bounds(self.u(t)) == 0)
        return bool((np.abs(np.tanh(t / self.width))[inside] > _EDGE).any())

    def _unclipped(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        return self.center + np.where(self.bounded, self.width * np.tanh(t / self.width), t)


class Curvature:
    """The inverse Hessian of an objective in nats, estimated by BFGS from points and gradients.

    It begins at the identity, a curvature of one nat for each coordinate squared: as these are
    logarithms of hyperparameters, few data sets tell less of one. The inverse Hessian of the
    optimiser itself does not serve here. It begins where the first step was, however short.
    """

    def __init__(self, size: int):
        self.inverse = np.eye(size)
        self.last: tuple[np.ndarray, np.ndarray] | None = None

    def expected_gain(self, t: Float[np.ndarray, "m"], gradient: Float[np.ndarray, "m"]) -> float:
        """½ gᵀ H⁻¹ g, the nats that Newton's step from t promises, where the gradient is g."""
        if self.last is not None:
            step, change = t - self.last[0], self.last[1] - gradient
            if (product := step @ change) > 0:
                left = np.eye(len(t)) - np.outer(step, change) / product
                self.inverse = left @ self.inverse @ left.T + np.outer(step, step) / product
        self.last = t.copy(), gradient
        return float(0.5 * gradient @ self.inverse @ gradient)


class _NoEvaluationsLeft(Exception):
    """Ends the iterations of an optimiser."""


class Run:
    """One run of a search, with the best value so far, its coordinates u and its gradient in u."""

    def __init__(
        self,
        search: Search,
        region: TrustRegion,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        report: Report,
    ):
        self.search, self.region = search, region
        self.objective, self.num_values, self.report = objective, num_values, report
        self.value, self.u, self.gradient = -np.inf, region.center, np.zeros_like(region.center)
        self.evaluations_left, self.expected_gain = 0, 0.0
        self.clipped = False  # whether the last ascent ended where a coordinate met a bound

    def value_and_gradient(self, t: Float[np.ndarray, "k"]) -> tuple[float, Float[np.ndarray, "k"]]:
        """Nats per number, and their gradient in t; a failed evaluation gets a low value."""
        if self.evaluations_left <= 0 and self.value > -np.inf:
            raise _NoEvaluationsLeft
        self.evaluations_left -= 1
        u, search = self.region.u(t), self.search
        search.coordinates.set(u)
        search.evaluations += 1
        try:
            with warnings.catch_warnings():
                # a step is too long if it makes the covariance singular; the first one is none
                action = "error" if self.value > -np.inf else "ignore"
                warnings.simplefilter(action, NumericalWarning)
                value, gradient = search.coordinates.value_and_gradient(self.objective)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError, NumericalWarning) as error:
            if self.value == -np.inf:  # the first one: no step was too long
                raise
            search.failures.append(str(error))
            value, gradient = -np.inf, np.zeros_like(t)
        value, gradient = value / self.num_values, np.nan_to_num(gradient) / self.num_values
        if not np.isfinite(value):
            value = min(self.value, 0.0) - 1e3
        if value > self.value:
            self.value, self.u, self.gradient = value, u, gradient
        self.report(value)
        return value, gradient * self.region.slope(t)

    def ascend(
        self,
        t: Float[np.ndarray, "k"],
        free: Bool[np.ndarray, "k"],
        nats: float,
        iterations: int,
    ) -> int:
        """Run BFGS in the free coordinates from t; the number of iterations it took."""
        previous, at_bounds = [np.inf], self._at_bounds(t)
        gradients: dict[bytes, np.ndarray] = {}  # in total nats, of points
        curvature, self.clipped = Curvature(int(free.sum())), False

        def full(free_t: np.ndarray) -> np.ndarray:
            vector = t.copy()
            vector[free] = free_t
            return vector

        def loss(free_t: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self.value_and_gradient(full(free_t))
            gradients[free_t.tobytes()] = self.num_values * gradient[free]
            return -value, -gradient[free]

        def stop(intermediate_result) -> None:
            reached, new = intermediate_result.x, full(intermediate_result.x)
            gain = (previous[0] - intermediate_result.fun) * self.num_values
            previous[0] = intermediate_result.fun
            self.expected_gain = curvature.expected_gain(reached, gradients[reached.tobytes()])
            self.clipped = bool((self._at_bounds(new) & ~at_bounds & free).any())
            small = max(gain, self.expected_gain) < nats
            if small or self.clipped or self.region.at_edge(new):
                raise StopIteration

        options = {
            "maxiter": iterations,
            "gtol": np.sqrt(2 * nats / free.sum()) / self.num_values,  # as of the first curvature
            "hess_inv0": self._inverse_hessian(t, free),
        }
        try:
            result = scipy.optimize.minimize(
                loss, t[free], jac=True, method="BFGS", callback=stop, options=options
            )
        except _NoEvaluationsLeft:
            return iterations
        self._store_inverse_hessian(result, full(result.x), free)
        return max(result.nit, 1)

    def _at_bounds(self, t: Float[np.ndarray, "k"]) -> Bool[np.ndarray, "k"]:
        return self.search.coordinates.at_bounds(self.region.u(t)) != 0

    def _inverse_hessian(
        self, t: Float[np.ndarray, "k"], free: Bool[np.ndarray, "k"]
    ) -> Float[np.ndarray, "m m"] | None:
        """The inverse Hessian of the last run, in the free coordinates of t."""
        if self.search.inverse_hessian is None:
            return None
        slope = self.region.slope(t)
        slope = np.where(slope > 0, slope, 1.0)
        return _positive((self.search.inverse_hessian / np.outer(slope, slope))[np.ix_(free, free)])

    def _store_inverse_hessian(
        self, result, t: Float[np.ndarray, "k"], free: Bool[np.ndarray, "k"]
    ) -> None:
        """Keep the inverse Hessian in u for the next run, if it is positive definite."""
        slope = self.region.slope(t)[free]
        inverse = _positive(result.hess_inv * np.outer(slope, slope))
        if result.nit and inverse is not None:
            last = self.search.inverse_hessian
            full = np.eye(len(free)) if last is None else last.copy()
            full[free, :] = full[:, free] = 0.0
            full[np.ix_(free, free)] = inverse
            self.search.inverse_hessian = full


def _positive(matrix: Float[np.ndarray, "m m"]) -> Float[np.ndarray, "m m"] | None:
    """The symmetric part of a matrix if it is positive definite beyond rounding, else None."""
    matrix = 0.5 * (matrix + matrix.T)
    if not np.isfinite(matrix).all():
        return None
    eigenvalues = np.linalg.eigvalsh(matrix)
    return matrix if eigenvalues[0] > 1e-12 * eigenvalues[-1] else None
