"""`ORFFRidgeCV`: ridge regression whose α minimises the generalised cross-validation error."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from gp_orff.features.frequencies.rule import Rule
from gp_orff.regression.base import FeatureRegressor, Fitted
from gp_orff.regression.feature_map import FeatureMap
from gp_orff.regression.problem import Problem
from gp_orff.regression.reading import checked_combination, unchanged_on_failure
from gp_orff.regression.solvers.base import Options, Solution
from gp_orff.regression.solvers.design import design
from gp_orff.regression.solvers.direct import Cholesky
from gp_orff.regression.solvers.equations import Equations
from gp_orff.threads import chosen_threads

_RATIOS = np.logspace(-6, 2, 17)  # of α and the variance of the kernel, by default


class ORFFRidgeCV(FeatureRegressor):
    r"""`ORFFRidge` whose α minimises the generalised cross-validation error (GCV).

    GCV(α) = n ‖y − H y‖² / tr(I − H)², H = Φ(ΦᵀΦ + α)⁻¹Φᵀ, for the n numbers in y. It estimates the
    error of prediction at points left out one by one. All α share one eigendecomposition, so that a
    hundred cost about as much as one; `GridSearchCV` fits every α anew for each fold, but takes
    folds of your own, which you need where noise is correlated between neighbours. Copies of a
    record look as if there were no noise, and lead to α far too small: average them first, or use
    `GridSearchCV` with groups.

    Golub, Heath & Wahba 1979, Technometrics 21. Brault et al. 2016 (Section 4.2) use 2-fold
    cross-validation: `GridSearchCV(ORFFRidge(kernel), {"alpha": alphas}, cv=2)`.

    Args:
        kernel, frequencies: as for `ORFFRidge`.
        alphas: the values to choose from. If None, 17 from 10⁻⁶ to 10² times the variance of the
            kernel, in equal ratios.

    Attributes:
        alpha_: the value chosen.
        alphas_: the values compared (A,), in ascending order.
        gcv_errors_: GCV of each (A,), in the square of the unit of y.
        kernel_, coef_, n_iter_, n_features_in_: as for `ORFFRidge`.

    Raises:
        As `ORFFRidge`, when `fit` is called; `alphas` that are not positive. It warns if the best α
        is the first or the last.

    Example:
        >>> import gp_orff, numpy as np
        >>> from gp_orff.regression import ORFFRidgeCV
        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(size=(200, 2))
        >>> y = np.sin(6 * X[:, ::-1]) + 0.1 * rng.standard_normal((200, 2))
        >>> kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
        >>> model = ORFFRidgeCV(kernel, gp_orff.MonteCarlo(100)).fit(X, y)
        >>> model.gcv_errors_.min() < 0.1**2 * 1.3
        np.True_
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        frequencies: Rule | None = None,
        alphas: Sequence[float] | None = None,
    ):
        self.kernel = kernel
        self.frequencies = frequencies
        self.alphas = alphas

    @chosen_threads()
    def fit(self, X: ArrayLike, y: ArrayLike) -> "ORFFRidgeCV":
        """Choose α, learn the weights, and return self.

        Args:
            X: N points (N, d).
            y: vectors (N, q), or (N,); rows of NaN are left out.
        """
        with unchanged_on_failure(self), torch.no_grad():
            x, targets = self._read(X, y, reset=True)
            features = FeatureMap.of(self.kernel, self.frequencies, x)
            expansion = features.expansion
            checked_combination(None, expansion.num_outputs, targets.shape[-1])
            variance = expansion.variance(x).mean().item()
            alphas = _RATIOS * variance if self.alphas is None else _checked(self.alphas)
            problem = Problem(expansion, x, targets, alpha=alphas[0])
            thetas, errors = _path(problem, alphas)
            best = int(np.argmin(errors))
            self.alphas_, self.gcv_errors_, self.alpha_ = alphas, errors, float(alphas[best])
            problem = replace(problem, alpha=self.alpha_)
            solution = Solution(thetas[best])
            self._assign(Fitted(features, problem, solution, Cholesky(), Options()))
        if len(alphas) > 1 and best in (0, len(alphas) - 1):
            warnings.warn(
                "the smallest error of generalised cross-validation is at "
                f"alpha={self.alpha_:.3g}, an end of alphas, {min(alphas):.3g} to "
                f"{max(alphas):.3g}: extend them beyond it",
                stacklevel=3,  # through the choice of threads
            )
        return self


def _checked(alphas: Sequence[float]) -> Float[np.ndarray, "A"]:
    """The α, in ascending order."""
    values = np.sort(np.asarray(alphas, dtype=np.float64).ravel())
    if len(values) == 0 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"ORFFRidgeCV expects alphas, positive finite numbers, got {alphas!r}")
    return values


def _path(
    problem: Problem, alphas: Float[np.ndarray, "A"]
) -> tuple[list[Float[Tensor, "F _"]], Float[np.ndarray, "A"]]:
    """θ and the generalised cross-validation error of every α, from one decomposition."""
    x, y = problem.labels
    parts = design(problem.expansion, y.shape[-1])
    equations = Equations.of(parts, x, y)
    thetas = [parts.theta(equations.by_eigenvectors(alpha)) for alpha in alphas]
    weights = problem.expansion.column_weights(torch.stack(thetas, dim=-1).flatten(1))
    values = problem.expansion.phi.apply(x, weights).reshape(*y.shape, len(alphas))
    squares = (y.unsqueeze(-1) - values).square().sum((0, 1)).numpy()
    freedom = np.array([equations.residual_freedom(alpha, y.numel()) for alpha in alphas])
    return thetas, y.numel() * squares / freedom**2
