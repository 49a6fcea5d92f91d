"""`ORFFRidge`: ridge regression of vectors on operator-valued Fourier features."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from gp_orff.features.frequencies.rule import Rule
from gp_orff.regression.feature_map import FeatureMap
from gp_orff.regression.laplacian import check_laplacian, graph_laplacian
from gp_orff.regression.problem import Matrix, Problem, combined
from gp_orff.regression.reading import (
    checked_combination,
    checked_number,
    labelled_rows,
    read_data,
    read_points,
    unchanged_on_failure,
)
from gp_orff.regression.solvers import SOLVERS
from gp_orff.regression.solvers.base import Options, Solution, Solver


@dataclass(frozen=True)
class Fitted:
    """Features and the weights found for them, with the problem that they solve."""

    features: FeatureMap
    problem: Problem
    solution: Solution
    streamed: bool = False  # whether `problem` is that of the last chunk only
    wider: list["Fitted"] = field(default_factory=list)  # for points farther out, if there were any

    @torch.no_grad()
    def values(
        self, x: Float[Tensor, "n d"], combination: Float[Tensor, "q p"] | None
    ) -> Float[np.ndarray, "n q"]:
        """C f(x)."""
        expansion = combined(self.features.expansion, combination)
        return expansion.phi.apply(x, expansion.column_weights(self.solution.theta)).numpy()


class ORFFRidge(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """DOC"""

    def __init__(
        self,
        kernel: Kernel | None = None,
        frequencies: Rule | None = None,
        alpha: float = 1.0,
        solver: str = "auto",
        *,
        laplacian_weight: float = 0.0,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        max_iter: int | None = None,
        tol: float = 1e-10,
        seed: int = 0,
    ):
        self.kernel = kernel
        self.frequencies = frequencies
        self.alpha = alpha
        self.solver = solver
        self.laplacian_weight = laplacian_weight
        self.loss = loss
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed

    @torch.no_grad()
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        laplacian: Matrix | None = None,
        combination: ArrayLike | None = None,
    ) -> "ORFFRidge":
        with unchanged_on_failure(self):
            x, targets = self._read(X, y, reset=True)
            features = FeatureMap.of(self.kernel, self.frequencies, x)
            problem = self._problem(features, x, targets, combination)
            problem = replace(problem, laplacian=self._penalty(laplacian, problem))
            self._assign(Fitted(features, problem, self._method.solve(problem, self._options)))
        return self

    @torch.no_grad()
    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> "ORFFRidge":
        with unchanged_on_failure(self):
            before: Fitted | None = getattr(self, "_fitted", None)
            x, targets = self._read(X, y, reset=before is None)
            if before is None:
                features = FeatureMap.of(self.kernel, self.frequencies, x)
                problem, earlier = self._problem(features, x, targets, None), None
            else:
                features, earlier = before.features, (before.problem, before.solution)
                features.check(x)
                problem = self._problem(features, x, targets, before.problem.combination)
            solution = self._method.partial(problem, self._options, earlier)
            self._assign(Fitted(features, problem, solution, streamed=True))
        return self

    def predict(self, X: ArrayLike) -> Float[np.ndarray, "n q"] | Float[np.ndarray, "n"]:
        check_is_fitted(self)
        values = self._values(X, self._fitted.problem.combination)
        return values[:, 0] if self._is_vector else values

    def predict_views(self, X: ArrayLike) -> Float[np.ndarray, "n p"]:
        check_is_fitted(self)
        return self._values(X, None)

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        rows = labelled_rows(y)
        weights = None if sample_weight is None else np.asarray(sample_weight)[rows]
        return r2_score(np.asarray(y)[rows], self.predict(X)[rows], sample_weight=weights)

    def _values(
        self, X: ArrayLike, combination: Float[Tensor, "q p"] | None
    ) -> Float[np.ndarray, "n q"]:
        """C f(x)."""
        x = read_points(self, X)
        return self._serving(x).values(x, combination)

    def _serving(self, x: Float[Tensor, "n d"]) -> Fitted:
        """What serves the points x: the fit, or one on the frequencies of a larger box."""
        fitted = self._fitted
        for known in (fitted, *fitted.wider):
            if known.features.covers(x):
                return known
        if fitted.streamed:
            fitted.features.check(x)  # raises
        features = fitted.features.widened(x)
        problem = replace(fitted.problem, expansion=features.expansion)
        solution = self._method.solve(problem, self._options)
        fitted.wider[:] = [Fitted(features, problem, solution)]
        return fitted.wider[0]

    def _read(
        self, X: ArrayLike, y: ArrayLike, reset: bool
    ) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N q"]]:
        x, targets, is_vector = read_data(self, X, y, reset)
        if not reset and targets.shape[-1] != self._num_targets:
            raise ValueError(
                f"expected y with {self._num_targets} columns, as before, got {targets.shape[-1]}"
            )
        self._num_targets, self._is_vector = targets.shape[-1], is_vector
        return x, targets

    def _problem(
        self,
        features: FeatureMap,
        x: Float[Tensor, "N d"],
        y: Float[Tensor, "N q"],
        combination: ArrayLike | None,
    ) -> Problem:
        c = checked_combination(combination, features.expansion.num_outputs, y.shape[-1])
        return Problem(features.expansion, x, y, checked_number(self, "alpha"), c)

    def _penalty(self, laplacian: Matrix | None, problem: Problem) -> Matrix | None:
        """w M; None if w = 0."""
        weight = checked_number(self, "laplacian_weight")
        if laplacian is not None:
            num_outputs = problem.expansion.num_outputs
            laplacian = check_laplacian(laplacian, len(problem.x), num_outputs)
        if weight == 0:
            return None
        return weight * (graph_laplacian(problem.x) if laplacian is None else laplacian)

    @property
    def _method(self) -> Solver:
        """The solver, by its name."""
        name = (
            ("cholesky" if self.loss is None else "sgd") if self.solver == "auto" else self.solver
        )
        if name not in SOLVERS:
            raise ValueError(
                f"{type(self).__name__} expects solver 'auto', "
                f"{', '.join(map(repr, SOLVERS))}, got {self.solver!r}"
            )
        return SOLVERS[name]

    @property
    def _options(self) -> Options:
        return Options(self.max_iter, self.tol, self.loss, self.seed)

    def _assign(self, fitted: Fitted) -> None:
        theta = fitted.solution.theta.numpy()
        self._fitted = fitted
        self.kernel_ = fitted.features.kernel
        self.coef_ = theta[:, 0] if theta.shape[1] == 1 else theta
        self.n_iter_ = fitted.solution.num_iterations
