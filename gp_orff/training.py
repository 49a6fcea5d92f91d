"""Evidence maximisation: hyperparameters from the marginal likelihood of observations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.coordinates import Coordinates
from gp_orff.noise import noise_of
from gp_orff.observations import Noises, Observations
from gp_orff.terms import terms

_NATS = 0.01  # a step that gains less, in total, ends the search
_EDGE = 0.9  # of the range of lengthscales, in its logarithm: time for another grid
Report = Callable[[float], None]


@dataclass
class Search:
    """Where a search for the largest evidence stands; the next one goes on from here."""

    coordinates: Coordinates
    inverse_hessian: Float[np.ndarray, "k k"] | None = None
    evaluations: int = 0
    value: float = -np.inf  # nats per observed number
    settled: bool = True  # whether no lengthscale has reached the edge of its range

    def run(
        self,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        *,
        reach: float | None = None,
        nats: float = _NATS,
        iterations: int = 60,
        report: Report = lambda value: None,
    ) -> "Search":
        """Maximise an objective, in total nats, by BFGS in the coordinates of `Coordinates`.

        With `reach`, a coordinate that moves frequencies stays within a factor of it:
        u = u₀ + log(reach) tanh(t / log(reach)), t free. The search ends when one comes to the
        edge.
        """
        center, moves = self.coordinates.get(), self.coordinates.moves_frequencies
        width = np.log(reach) if reach else 1.0
        bounded = moves if reach else np.zeros_like(moves)
        best = [-np.inf, center]

        def place(t: np.ndarray) -> np.ndarray:
            u = center + np.where(bounded, width * np.tanh(t / width), t)
            return np.clip(u, self.coordinates.low, self.coordinates.high)

        def slope(t: np.ndarray) -> np.ndarray:  # ∂u/∂t
            return np.where(bounded, 1 - np.tanh(t / width) ** 2, 1.0)

        def at_edge(t: np.ndarray) -> bool:
            return bool((np.abs(np.tanh(t / width))[bounded] > _EDGE).any())

        def loss(t: np.ndarray) -> tuple[float, np.ndarray]:
            u = place(t)
            self.coordinates.set(u)
            self.evaluations += 1
            try:
                value, gradient = self.coordinates.value_and_gradient(objective)
            except (torch.linalg.LinAlgError, ValueError, RuntimeError):
                if best[0] == -np.inf:  # not the fault of a long step
                    raise
                value, gradient = -np.inf, np.zeros_like(t)
            value /= num_values
            if not np.isfinite(value):
                value = min(best[0], 0.0) - 1e3
            if value > best[0]:
                best[:] = [value, u]
            report(value)
            return -value, -np.nan_to_num(gradient) * slope(t) / num_values

        previous = [np.inf]

        def stop(intermediate_result) -> None:
            gain = previous[0] - intermediate_result.fun
            previous[0] = intermediate_result.fun
            if gain * num_values < nats or at_edge(intermediate_result.x):
                raise StopIteration

        if len(center):
            result = scipy.optimize.minimize(
                loss,
                np.zeros_like(center),
                jac=True,
                method="BFGS",
                callback=stop,
                options={"maxiter": iterations, "gtol": 1e-9, "hess_inv0": self.inverse_hessian},
            )
            self._carry(result, slope(result.x))
            self.settled = not at_edge(result.x)
        else:
            loss(center)
        self.value, u = best
        self.coordinates.set(u)
        return self

    def _carry(self, result, slope: Float[np.ndarray, "k"]) -> None:
        """The curvature in the coordinates u, where it can be of use for the next search."""
        inverse = result.hess_inv * np.outer(slope, slope)
        inverse = 0.5 * (inverse + inverse.T)
        if result.nit and np.isfinite(inverse).all() and np.linalg.eigvalsh(inverse)[0] > 0:
            self.inverse_hessian = inverse


def log_marginal_likelihood(
    observations: Observations,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
) -> Float[Tensor, ""]:
    """log p(y), total; the constant mean of largest evidence where none is given."""
    evidence = observations.evidence(kernel, noises_of(kernel, likelihoods))
    best = evidence.best_mean() if mean is None else mean
    return evidence.log_density(best, observations.num_values) + observations.data.bound


def noises_of(kernel: Kernel, likelihoods: Mapping[str, Likelihood]) -> Noises:
    """Σ of every instrument."""
    num_outputs = terms(kernel)[0].num_outputs
    return {label: noise_of(own, num_outputs) for label, own in likelihoods.items()}
