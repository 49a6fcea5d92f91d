"""What the regressions share: a fitted field, prediction and score."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from gp_orff.features.domain import box_of, in_words
from gp_orff.regression.feature_map import FeatureMap
from gp_orff.regression.problem import Problem, combined
from gp_orff.regression.reading import labelled_rows, read_data, read_points
from gp_orff.regression.solvers.base import Options, Solution, Solver
from gp_orff.threads import chosen_threads


@dataclass(frozen=True)
class Fitted:
    """Features and the weights found for them, with the problem that they solve."""

    features: FeatureMap
    problem: Problem
    solution: Solution
    solver: Solver  # with its options: for points farther out
    options: Options
    streamed: bool = False  # whether `problem` is that of the last chunk only
    wider: list["Fitted"] = field(default_factory=list)  # for points farther out, if there were any

    @torch.no_grad()
    def values(
        self, x: Float[Tensor, "n d"], combination: Float[Tensor, "q p"] | None
    ) -> Float[Tensor, "n q"]:
        """C f(x): of points farther out, on the frequencies of a larger box."""
        near = self.features.covered(x)
        if near.all():
            expansion = combined(self.features.expansion, combination)
            return expansion.phi.apply(x, expansion.column_weights(self.solution.theta))
        far = self._wider_for(x[~near]).values(x[~near], combination)
        values = far.new_empty(len(x), far.shape[-1])
        values[~near], values[near] = far, self.values(x[near], combination)
        return values

    def _wider_for(self, x: Float[Tensor, "n d"]) -> "Fitted":
        """The fit on the frequencies of a larger box; the last one is kept."""
        if self.streamed:
            raise ValueError(
                f"expected points near those of the first chunk, {in_words(self.features.box)}, "
                f"got some in {in_words(box_of(x))}: data that came in chunks are not held; begin "
                "anew with frequencies=gp_orff.Auto(domain=...)"
            )
        box = self.features.box_with(x)
        if not self.wider or self.wider[0].features.box != box:
            features = self.features.widened(box)
            problem = replace(self.problem, expansion=features.expansion)
            solution = self.solver.solve(problem, self.options)
            self.wider[:] = [Fitted(features, problem, solution, self.solver, self.options)]
        return self.wider[0]


class FeatureRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """A field learned by regression; subclasses fit it."""

    @chosen_threads()
    def predict(self, X: ArrayLike) -> Float[np.ndarray, "n q"] | Float[np.ndarray, "n"]:
        """The learned values at points X (n, d): C f(X), (n, q), or (n,) if y was a vector.

        On a frequency grid that follows the data, points farther out are served by a larger grid,
        for which the weights are computed again.

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: not finite, or another number of columns than in `fit`; points so far from
                the data that no grid serves both, or outside the domain of a grid that has one of
                its own or that data came to in chunks.
        """
        check_is_fitted(self)
        values = self._values(X, self._fitted.problem.combination)
        return values[:, 0] if self._is_vector else values

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """R² of the predictions at points X (n, d), for the rows of y (n, q) that are not NaN.

        Args:
            X, y: points and vectors.
            sample_weight: weights (n,) of the points; equal if None.
        """
        rows = labelled_rows(y)
        if not rows.any():
            raise ValueError(
                f"expected a row of y with a label, got {len(rows)} rows of NaN; in "
                "cross-validation, make folds of the labelled rows, and keep the others in every "
                "training set"
            )
        weights = None if sample_weight is None else np.asarray(sample_weight)[rows]
        return r2_score(np.asarray(y)[rows], self.predict(X)[rows], sample_weight=weights)

    def _values(
        self, X: ArrayLike, combination: Float[Tensor, "q p"] | None
    ) -> Float[np.ndarray, "n q"]:
        """C f(x)."""
        x = read_points(self, X)
        return self._fitted.values(x, combination).numpy()

    def _read(
        self, X: ArrayLike, y: ArrayLike, reset: bool, needs_label: bool = True
    ) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N q"]]:
        """X and y as tensors."""
        x, targets, is_vector = read_data(self, X, y, reset, needs_label)
        if not reset and targets.shape[-1] != self._num_targets:
            raise ValueError(
                f"expected y with {self._num_targets} columns, as before, got {targets.shape[-1]}"
            )
        self._num_targets, self._is_vector = targets.shape[-1], is_vector
        return x, targets

    def _assign(self, fitted: Fitted) -> None:
        """Make `fitted` what this estimator predicts from."""
        theta = fitted.solution.theta.numpy()
        self._fitted = fitted
        self.kernel_ = fitted.features.kernel
        self.coef_ = theta[:, 0] if theta.shape[1] == 1 else theta
        self.n_iter_ = fitted.solution.num_iterations
