"""The search for the hyperparameters with the largest evidence."""

import warnings
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gp_orff.fitting.coordinates import AT_BOUND, Coordinates
from gp_orff.inference.price import LONGEST_STEP, MOST_EVALUATIONS, MOVED, NATS, NEGLIGIBLE

# `Search.run` takes damped quasi-Newton steps s in the coordinates u. With the gradient g and a
# positive definite estimate B of minus the Hessian, they solve
#
#     (B + λ diag B) s = g      (Levenberg 1944; Marquardt 1963; λ after Nielsen 1999).
#
# 1. B is the information of the data about the hyperparameters, if it is cheap. It is computed
#    again after coordinates have changed much. The information is positive semidefinite at all
#    hyperparameters, and gives the first step the right length.
# 2. After each step, B is updated from the change of g (BFGS). Where the evidence is not concave,
#    the update is damped so that B stays positive definite (Powell 1978). Without an information,
#    B starts as a multiple of the identity, whose size follows from the first step.
# 3. A coordinate at a bound is fixed while the objective rises outwards. A frequency grid serves
#    only frequencies near those that it was made for. On a grid, coordinates that change
#    frequencies therefore have bounds around their start. The run ends near these bounds, and the
#    caller makes a new grid.
# 4. A step that reduces the objective is undone. λ increases, and the next step is shorter. The run
#    ends when the step without damping is expected to gain less than `nats`, or after the last
#    evaluation.
#
# The next run starts from B per observed value, so that B also serves subsets of other sizes.


# A hundredth of a nat changes no posterior visibly: a factor of 1.01 in the marginal likelihood.
_LEAST = NEGLIGIBLE**2 * NATS  # the smallest expected gain of a step, and the least eigenvalue
_MOST_DAMPING = 1 / torch.finfo(torch.float64).eps
Report = Callable[[float], None]
Information = Callable[[], Float[np.ndarray, "k k"] | None]


class SearchWarning(UserWarning):
    """The search of a fit ended before it reached a maximum of the evidence.

    You get this warning if one more step of the search is expected to raise the log evidence by
    more than 1 nat. Call `fit` again with `warm_start=True` to continue the search.

    You also get it if the search used a frequency grid, and ended below the maximum of the log
    evidence under the exact kernel. For M observed values, the tolerance is the larger of 1 nat and
    M/10000 nats. The message then names the call of `fit` that searches under the exact kernel.

    Example:
        A search that ends after two evaluations of its objective:

        >>> import numpy as np, torch, warnings
        >>> from gpytorch.kernels import RBFKernel
        >>> from gp_orff.fitting.coordinates import Coordinates
        >>> from gp_orff.fitting.search import Search, SearchWarning
        >>> kernel = RBFKernel().double()
        >>> search = Search(Coordinates(kernel))
        >>> peak = lambda: -50 * (kernel.lengthscale.log() - 2).square().sum()
        >>> _ = search.run(peak, num_values=1, evaluations=2)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", SearchWarning)
        ...     search.warn()
        >>> caught[0].category.__name__
        'SearchWarning'
    """


class Point(NamedTuple):
    """Coordinates u, with the objective in nats and its gradient with respect to u."""

    u: Float[np.ndarray, "k"]
    value: float
    gradient: Float[np.ndarray, "k"]


@dataclass
class Search:
    """The state of a search for the largest evidence. Each `run` continues from the last one."""

    coordinates: Coordinates
    curvature: Float[np.ndarray, "k k"] | None = None  # B, nats per observed value
    informed: tuple[object, Float[np.ndarray, "k"]] | None = None  # data and u of the information
    evaluations: int = 0
    failures: list[str] = field(default_factory=list)  # errors of evaluations after too long steps
    value: float = -np.inf  # nats per observed value
    expected_gain: float = 0.0  # of one more step, in nats, at the end of the last run
    settled: bool = True  # False if a lengthscale has reached the edge of its trust region
    summit: Float[np.ndarray, "k"] | None = None  # the maximum that the last run predicted

    def run(
        self,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: float,
        *,
        information: Information | None = None,
        of: object = None,
        trust_factor: float | None = None,
        nats: float = _LEAST,
        evaluations: int = MOST_EVALUATIONS,
        is_promising: Callable[["Search"], bool] = lambda search: True,
        report: Report = lambda value: None,
    ) -> "Search":
        """Maximise an objective by damped quasi-Newton steps in the coordinates of hyperparameters.

        The steps use an estimate B of minus the Hessian of the objective. B is stored per observed
        value, so that later runs can start from it.

        Args:
            objective: returns the objective at the present hyperparameters, in nats.
            num_values: M, the number of observed values.
            information: returns an estimate of minus the Hessian, in nats. It may return None.
            of: an identifier of the data that `information` uses. If the last run had an equal
                identifier, B is used again as long as the coordinates have not changed much.
            trust_factor: the largest factor by which frequencies may change in this run. The run
                ends when a coordinate comes close to this limit, if it is not None.
            nats: the run ends when one more step is expected to gain fewer nats.
            evaluations: the largest number of evaluations of the objective with its gradient.
            is_promising: called before every step. The run ends when it returns False.
            report: called after each evaluation, with the objective in nats per observed value.

        Returns:
            This search. The hyperparameters are those with the largest objective in this run.
        """
        start = self.coordinates.get()
        reach = self._reach(trust_factor)
        low = np.maximum(self.coordinates.low, start - reach)
        high = np.minimum(self.coordinates.high, start + reach)
        evaluate = partial(self._evaluate, objective, num_values, report)
        point = evaluate(start, may_fail=False)
        left, damping, rise, longest = evaluations - 1, NEGLIGIBLE**2, 2.0, LONGEST_STEP
        curvature = None if self.curvature is None else self.curvature * num_values
        scaled = curvature is not None  # otherwise its size follows from the first step
        if curvature is None:
            curvature = NEGLIGIBLE * num_values * np.eye(len(start))
        learned = np.eye(len(start))  # curvature from the changes of the gradient only
        self.value = point.value / num_values

        def foresee() -> None:
            self.curvature = curvature / num_values
            known = learned if self.informed is None else curvature
            foreseen = _newton_step(known, point, low, high, floor=NATS)
            self.expected_gain = 0.5 * float(point.gradient @ foreseen)
            self.summit = point.u + _newton_step(curvature, point, low, high)

        while len(start):
            foresee()
            if scaled and not is_promising(self):
                break
            if information is not None and self.has_left(of, point.u):
                if (anew := self._informed_at(point.u, information)) is None:
                    information, self.informed = None, None
                else:
                    curvature, scaled, self.informed = anew, True, (of, point.u)
                foresee()
            at_edge = np.abs(point.u - start) > (1 - NEGLIGIBLE) * reach
            self.settled = not (at_edge & (self.coordinates.at_bounds(point.u) == 0)).any()
            if self.expected_gain < nats or not self.settled or left < 1:
                break
            step = _newton_step(curvature, point, low, high, damping)
            step *= min(1.0, longest / max(np.abs(step).max(), 1e-300))
            u = np.clip(point.u + step, low, high)
            trial, left = evaluate(u), left - 1
            step = u - point.u
            gain = trial.value - point.value
            promised = step @ point.gradient - 0.5 * step @ curvature @ step
            if gain > 0:
                change = point.gradient - trial.gradient
                if not scaled and step @ change > 0:
                    curvature = change @ change / (step @ change) * np.eye(len(start))
                curvature, scaled = _updated(curvature, step, change), True
                learned = _updated(learned, step, change)
                ratio = gain / max(promised, gain) if np.isfinite(gain) else 1.0
                damping *= max(1 / 3, 1 - (2 * ratio - 1) ** 3)
                point, rise, longest = trial, 2.0, min(2 * longest, LONGEST_STEP)
                self.value = point.value / num_values
            else:
                damping, rise = max(damping, 1e-3) * rise, 2 * rise
                longest = _shorter(step @ point.gradient, gain) * np.abs(step).max()
                if damping > _MOST_DAMPING or not longest > 0:
                    break
        self.coordinates.set(point.u)
        return self

    def _reach(self, trust_factor: float | None) -> Float[np.ndarray, "k"]:
        """The largest change of each coordinate, ∞ if it changes no frequencies."""
        stretch = self.coordinates.stretch
        if trust_factor is None:
            return np.full(len(stretch), np.inf)
        return np.where(stretch > 0, stretch * np.log(trust_factor), np.inf)

    def has_left(self, of: object, u: Float[np.ndarray, "k"]) -> bool:
        """Return whether the information has to be computed again for these data near u.

        This is so if it was computed for other data, or at hyperparameters far from u.
        """
        if self.informed is None or self.informed[0] != of:
            return True
        return bool(np.abs(u - self.informed[1]).max() > MOVED)

    def _informed_at(
        self, u: Float[np.ndarray, "k"], information: Information
    ) -> Float[np.ndarray, "k k"] | None:
        """Return the information at u. The result is None if there is no information, or if a
        factorisation fails."""
        self.coordinates.set(u)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NumericalWarning)
                return information()
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            return None
        finally:
            self.coordinates.set(u)

    def _evaluate(
        self,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: float,
        report: Report,
        u: Float[np.ndarray, "k"],
        may_fail: bool = True,
    ) -> Point:
        """The objective and its gradient, or −∞ and a zero gradient after a too long step."""
        self.coordinates.set(u)
        self.evaluations += 1
        try:
            with warnings.catch_warnings():
                # A step that makes the covariance singular is too long. The first evaluation is
                # not after a step.
                warnings.simplefilter("error" if may_fail else "ignore", NumericalWarning)
                value, gradient = self.coordinates.value_and_gradient(objective)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError, NumericalWarning) as error:
            if not may_fail:
                raise
            self.failures.append(str(error))
            value, gradient = -np.inf, np.zeros_like(u)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            value, gradient = -np.inf, np.nan_to_num(gradient)
        report(value / num_values)
        return Point(u, value, gradient)

    def expects_the_maximum_of(self, other: "Search", num_values: float) -> bool:
        """Whether another search on the same data is expected to reach the same maximum.

        The objective at the predicted maximum of the other is then within half a nat of this one.
        """
        if self.summit is None:
            return other.summit is None
        offset = self.summit - other.summit
        return float(offset @ self.curvature @ offset) * num_values <= 1.0

    def warn(self) -> None:
        """Warn if the last run ended more than 1 nat below the predicted maximum."""
        if self.expected_gain > NATS:
            warnings.warn(
                "the search for hyperparameters ended before it reached a maximum; one more step "
                f"is expected to gain {self.expected_gain:.2g} nats of log evidence; call fit "
                "again with warm_start=True to continue the search",
                SearchWarning,
                stacklevel=2,
            )

    @property
    def reached(self) -> dict[str, object]:
        """The state of the search as plain values, without hyperparameter modules."""
        state = {name: value for name, value in vars(self).items() if name != "coordinates"}
        return {"u": self.coordinates.get(), **state}

    def go_to(self, reached: Mapping[str, object]) -> None:
        """Set the search and its hyperparameters to a state that `reached` returned."""
        self.coordinates.set(reached["u"])
        vars(self).update({name: copy(value) for name, value in reached.items() if name != "u"})


def _newton_step(
    curvature: Float[np.ndarray, "k k"],
    point: Point,
    low: Float[np.ndarray, "k"],
    high: Float[np.ndarray, "k"],
    damping: float = 0.0,
    floor: float = _LEAST,
) -> Float[np.ndarray, "k"]:
    """Solve (B + λ diag B) s = g in the coordinates that are not fixed at their bounds.

    Eigenvalues below `floor` are raised to it.
    """
    outwards = np.where(point.gradient > 0, point.u >= high - AT_BOUND, point.u <= low + AT_BOUND)
    free, step = ~outwards, np.zeros_like(point.gradient)
    matrix = curvature + damping * np.diag(np.diag(curvature))
    values, vectors = np.linalg.eigh(matrix[np.ix_(free, free)])
    step[free] = vectors @ (vectors.T @ point.gradient[free] / np.maximum(values, floor))
    return step


def _shorter(slope: float, gain: float) -> float:
    """Return the share of an unsuccessful step at which a parabola has its maximum.

    The parabola has the slope at the start and the (negative, perhaps infinite) gain at the end of
    the step. The share is between a tenth and a half.
    """
    share = 0.5 * slope / (slope - gain) if np.isfinite(gain) else 0.0
    return min(max(share, 0.1), 0.5)


def _updated(
    curvature: Float[np.ndarray, "k k"],
    step: Float[np.ndarray, "k"],
    change: Float[np.ndarray, "k"],
) -> Float[np.ndarray, "k k"]:
    """Return B after a step s, over which g has fallen by y = `change`.

    The update is BFGS, damped such that sᵀy ≥ sᵀBs / 5 (Nocedal & Wright 2006, procedure 18.2).
    """
    along = curvature @ step
    size = step @ along
    if not size > 0:
        return curvature
    if step @ change < 0.2 * size:
        share = 0.8 * size / (size - step @ change)
        change = share * change + (1 - share) * along
    updated = curvature - np.outer(along, along) / size
    return updated + np.outer(change, change) / (step @ change)
