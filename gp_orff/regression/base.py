"""Base classes of the estimators of ridge regression, with their arguments and features."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import Tensor

from gp_orff.data.checks import warn_of_sentinels
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import DEFAULT, Components, GroupKey
from gp_orff.data.validation import without_tensor
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.assemble import check_domain, expand
from gp_orff.features.chunked import Box, box_of, in_words, union
from gp_orff.features.draws import GridWarning, Lattice, Rule
from gp_orff.features.expansion import Expansion
from gp_orff.features.grid import Auto
from gp_orff.kernels.base import is_number
from gp_orff.regression.laplacian import (
    Matrix,
    check_laplacian,
    graph_laplacian,
)
from gp_orff.regression.solvers import Options, Problem, Solution, Solver, combined
from gp_orff.symbols.base import required
from gp_orff.threads import chosen_threads

# Checks of the arguments of estimators, by scikit-learn's conventions.


@contextmanager
def unchanged_on_failure(estimator: BaseEstimator) -> Iterator[None]:
    """Restore the attributes of an estimator if the block raises an error."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def read_points(estimator: BaseEstimator, X: ArrayLike, reset: bool = False) -> Tensor:
    """Return X as a tensor (N, d).

    Args:
        estimator: the estimator, for its number of columns.
        X: points (N, d).
        reset: whether X sets the number of columns that the estimator expects.

    Raises:
        ValueError: X is not a matrix of finite numbers, or has another number of columns.
    """
    return _tensor(validate_data(estimator, without_tensor(X), dtype=np.float64, reset=reset))


def read_targets(y: ArrayLike) -> Float[np.ndarray, "N *q"]:
    """Return y as an array, which may contain NaN."""
    how = {"ensure_2d": False, "ensure_all_finite": "allow-nan", "input_name": "y"}
    return check_array(without_tensor(y), dtype=np.float64, **how)


def checked_number(estimator: BaseEstimator, name: str) -> float:
    """Return a parameter of the estimator, after the check that it is a finite number ≥ 0.

    Raises:
        ValueError: the parameter is negative, infinite or not a number.
    """
    value = getattr(estimator, name)
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(
            f"{type(estimator).__name__} expects {name}, a finite number >= 0, got {value!r}"
        )
    return float(value)


def checked_combination(
    combination: ArrayLike | None, num_outputs: int, num_targets: int
) -> Float[Tensor, "q p"] | None:
    """Return C as a tensor (q, p), or None for the identity.

    Args:
        combination: C; the identity if None.
        num_outputs: p, the number of outputs of the kernel.
        num_targets: q, the number of columns of y.

    Raises:
        ValueError: C has another shape or entries that are not finite. Or C is None, and the kernel
            has neither one nor q outputs.
    """
    if combination is None:
        if num_outputs not in (1, num_targets):
            raise ValueError(
                f"expected y with {num_outputs} columns, one for each output of the kernel, got "
                f"{num_targets}; use another kernel, or pass combination= if the columns of y are "
                "linear combinations of the outputs of the kernel"
            )
        return None
    matrix = _tensor(
        check_array(without_tensor(combination), dtype=np.float64, input_name="combination")
    )
    if matrix.shape != (num_targets, num_outputs):
        raise ValueError(
            f"expected combination ({num_targets}, {num_outputs}), a row for each column of y and "
            f"a column for each output of the kernel, got {tuple(matrix.shape)}; correct its "
            "shape, or use a kernel with more outputs, such as gp_orff.SeparableKernel"
        )
    return matrix


def _tensor(array: np.ndarray) -> Tensor:
    """Return a tensor that shares the memory of an array, or a copy if this is impossible.

    torch cannot share read-only or reversed arrays.
    """
    viewable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if viewable else array.copy())


# The features of a regression, from its kernel, rule and data.


_MOST_TRUNCATED = 0.1
_SAMPLE = 1000  # the number of points for the median of their distances


@dataclass(frozen=True)
class FeatureMap:
    """The features of a kernel for the points of a box, at fixed hyperparameters.

    `FeatureMap.of` creates it.

    Attributes:
        kernel: the kernel with its frequencies, in float64.
        rule: the requested rule, or None.
        box: the box of the points.
        expansion: the features.
    """

    kernel: ORFFKernel
    rule: Rule | None
    box: Box
    expansion: Expansion

    @classmethod
    @torch.no_grad()
    def of(cls, estimator: BaseEstimator, x: Float[Tensor, "N d"]) -> "FeatureMap":
        """Return the features of the kernel and the rule of an estimator, for the points x.

        The kernel is copied. Without a kernel, an RBF kernel is used, whose lengthscale is the
        median distance of the points. Without a rule, `Auto` is used, for the lengthscales of the
        kernel.

        Raises:
            TypeError: the kernel is not an instance of a kernel, or the rule is not a rule.
            ValueError: the kernel does not fit the inputs, or points are outside the domain of the
                rule.
        """
        if isinstance(estimator.kernel, ORFFKernel):
            raise TypeError(
                "expected a kernel without frequencies, got an ORFFKernel; pass its base_kernel, "
                "and its rule as frequencies="
            )
        kernel = fixed_kernel(estimator, x)
        features = cls._resolving(kernel, estimator.frequencies, box_of(x))
        features.check(x)
        if features.truncated > _MOST_TRUNCATED:
            warnings.warn(
                f"a frequency grid of {features.kernel.num_features} features omits "
                f"{features.truncated:.0%} of the variance of the kernel on these points; use a "
                "longer lengthscale, points closer together, more features by "
                "Auto(max_features=...), or a random rule",
                GridWarning,
                stacklevel=5,
            )
        return features

    @classmethod
    def _resolving(cls, kernel: Kernel, rule: Rule | None, box: Box) -> "FeatureMap":
        """Return the features for the points of a box."""
        orff = ORFFKernel(kernel, resolved(rule, box), num_dims=len(box))
        orff = orff.double().requires_grad_(False)
        return cls(orff, rule, box, expand(kernel, orff.frequencies, len(box)).double())

    @torch.no_grad()
    def check(self, x: Float[Tensor, "n d"]) -> None:
        """Raise an error if the features do not represent the kernel at some points.

        Raises:
            ValueError: a point is outside the domain of the rule.
        """
        corners = torch.tensor(self.box, dtype=torch.float64).mT
        check_domain(self.kernel.base_kernel, self.kernel.frequencies, corners, x)

    def covered(self, x: Float[Tensor, "n d"]) -> Bool[Tensor, "n"]:
        """Return which points these features represent; the others need `widened` features.

        Raises:
            ValueError: a point is outside the domain that the user passed with the rule.
        """
        if self._lattice is None or resolved(self.rule, self.box) is self.rule:
            self.check(x)
            return torch.ones(len(x), dtype=torch.bool)
        return ~self._lattice.outside(x)

    @torch.no_grad()
    def widened(self, box: Box) -> "FeatureMap":
        """Return features of the same kernel for a larger box.

        Raises:
            ValueError: no frequency grid is accurate enough for this box.
        """
        kernel = self.kernel.base_kernel
        wider = FeatureMap._resolving(kernel, self.rule, box)
        if wider._lattice is None or wider.truncated > max(_MOST_TRUNCATED, 2 * self.truncated):
            raise ValueError(
                f"expected points near the data, which are in {in_words(self.box)}, got points in "
                f"{in_words(box)}, and no frequency grid covers both; predict closer to the data, "
                "or use a random rule, such as gp_orff.QuasiMonteCarlo(1024)"
            )
        return wider

    @property
    def truncated(self) -> float:
        """The largest fraction of the variance of a term that a grid truncates."""
        if self._lattice is None:
            return 0.0
        return max(term.truncated for term in self.kernel.accuracy())

    @property
    def _lattice(self) -> Lattice | None:
        """The lattice of the frequencies; None if there is none."""
        draw = self.kernel.frequencies[0]
        return draw.lattice if draw.on_lattice else None


def resolved(rule: Rule | None, box: Box) -> Rule:
    """Return the rule for data in a box; the same object if the rule does not need the box."""
    rule = Auto(lengthscale_range=(1, 1)) if rule is None else rule
    if isinstance(rule, Auto) and rule.domain is None and rule.data is None:
        return replace(rule, data=box)
    return rule


def fixed_kernel(estimator: BaseEstimator, x: Float[Tensor, "N d"]) -> Kernel:
    """Return a copy in float64 of the kernel of an estimator, without trained parameters.

    Without a kernel, return `median_kernel(x)`.

    Raises:
        TypeError: the kernel is not an instance of a kernel.
        ValueError: the kernel is a batch of kernels.
    """
    kernel = median_kernel(x) if estimator.kernel is None else copy.deepcopy(estimator.kernel)
    required(
        kernel,
        Kernel,
        f"{type(estimator).__name__} expects a gpytorch kernel",
        "use, for instance, gp_orff.CurlFreeKernel(num_dims=2)",
    )
    if kernel.batch_shape:
        raise ValueError(
            f"expected one kernel, got a batch of shape {tuple(kernel.batch_shape)}; fit one "
            "estimator for each kernel of the batch"
        )
    return kernel.double().requires_grad_(False)


def median_kernel(x: Float[Tensor, "N d"]) -> RBFKernel:
    """Return an RBF kernel whose lengthscale is the median distance of the points.

    This is Jaakkola's heuristic. The median is over pairs at different places, in a random sample
    of the points. If all points are at one place, the lengthscale is 1.
    """
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    distances = torch.pdist(x[order[:_SAMPLE]])
    distances = distances[distances > 0]
    kernel = RBFKernel().double()
    kernel.lengthscale = distances.median().item() if len(distances) else 1.0
    return kernel


# A fitted field, predictions and scores, for all estimators.


@dataclass(frozen=True)
class Fitted:
    """Features and their weights, with the problem that the weights solve.

    Attributes:
        features: the features.
        problem: the points, the targets and the penalties.
        solution: the weights.
        solver: the solver, for a larger box.
        options: the options of the solver.
        streamed: whether `problem` contains the last chunk only.
        wider: the fit for a larger box, if a prediction needed it.
    """

    features: FeatureMap
    problem: Problem
    solution: Solution
    solver: Solver
    options: Options
    streamed: bool = False
    wider: list["Fitted"] = field(default_factory=list)

    @property
    def combination(self) -> Float[Tensor, "q p"] | None:
        """The matrix C (q, p); None for the identity."""
        return self.problem.combination

    @torch.no_grad()
    def values(
        self, x: Float[Tensor, "n d"], combination: Float[Tensor, "q p"] | None
    ) -> Float[Tensor, "n q"]:
        """Return C f(x). Points outside the box use the frequencies of a larger box."""
        near = self.features.covered(x)
        if near.all():
            expansion = combined(self.features.expansion, combination)
            return expansion.apply(x, self.solution.theta)
        far = self._wider_for(x[~near]).values(x[~near], combination)
        values = far.new_empty(len(x), far.shape[-1])
        values[~near], values[near] = far, self.values(x[near], combination)
        return values

    def _wider_for(self, x: Float[Tensor, "n d"]) -> "Fitted":
        """Return the fit on the frequencies of a larger box, which is cached."""
        if self.streamed:
            raise ValueError(
                f"expected points near the first chunk, which is in {in_words(self.features.box)}, "
                f"got points in {in_words(box_of(x))}, and data from chunks are not stored; start "
                "again with frequencies=gp_orff.Auto(domain=...)"
            )
        box = union(self.features.box, box_of(x))
        if not self.wider or self.wider[0].features.box != box:
            features = self.features.widened(box)
            problem = replace(self.problem, expansion=features.expansion)
            solution = self.solver.solve(problem, self.options)
            self.wider[:] = [Fitted(features, problem, solution, self.solver, self.options)]
        return self.wider[0]


class FeatureRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """The base class of estimators that learn a field by regression."""

    @chosen_threads()
    def predict(self, X: ArrayLike) -> Float[np.ndarray, "n q"] | Float[np.ndarray, "n"]:
        """Return the predictions C f(X), (n, q), or (n,) if y was a vector.

        If points are outside the domain of a frequency grid that `fit` has chosen, a larger grid is
        built, and the weights are computed again.

        Args:
            X: points (n, d).

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: X contains NaN or infinity, or has another number of columns than in `fit`;
                points are so far from the data that no grid covers both; points are outside a
                domain that the user passed, or outside the grid after `partial_fit`.
        """
        check_is_fitted(self)
        values = self._values(X, self._fitted.combination)
        return values[:, 0] if self._is_vector else values

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the coefficient of determination R² of the predictions.

        Args:
            X: points (n, d).
            y: observed vectors (n, q), or (n,) if y was a vector in `fit`. Rows of NaN are ignored.
            sample_weight: weights (n,) of the points; equal weights if None.

        Raises:
            ValueError: all rows of y are NaN, or one of the reasons listed at `predict`.
        """
        y = read_targets(y)
        rows = ~np.isnan(y.reshape(len(y), -1)).any(-1)
        if not rows.any():
            raise ValueError(
                f"expected a row of y with a label, got {len(rows)} rows of NaN; in "
                "cross-validation, make folds of the labelled rows only, and put the unlabelled "
                "rows into every training set"
            )
        weights = None if sample_weight is None else np.asarray(sample_weight)[rows]
        return r2_score(y[rows], self.predict(X)[rows], sample_weight=weights)

    def _values(
        self, X: ArrayLike, combination: Float[Tensor, "q p"] | None
    ) -> Float[np.ndarray, "n q"]:
        """Return C f(x)."""
        x = read_points(self, X)
        return self._fitted.values(x, combination).numpy()

    def _read(
        self, X: ArrayLike, y: ArrayLike, reset: bool, needs_label: bool = True
    ) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N q"]]:
        """Return X as a tensor, and y as a matrix; rows of NaN in y have no label."""
        if y is None:
            validate_data(self, X, y)  # raises the error of scikit-learn
        x = read_points(self, X, reset).clone()  # stored, while the caller may change X
        targets = _tensor(read_targets(y)).clone()
        check_consistent_length(x, targets)
        self._is_vector = targets.dim() == 1
        targets = targets.reshape(len(targets), -1)
        missing = targets.isnan()
        partial = missing.any(-1) & ~missing.all(-1)
        if partial.any():
            raise ValueError(
                "expected rows of y without NaN, or with NaN only if there is no label, got "
                f"{int(partial.sum())} rows with numbers and NaN; drop them, or use "
                "gp_orff.VectorFieldGP with missing='mask'"
            )
        if needs_label and missing.all():
            raise ValueError(
                f"expected a row of y with a label, got {len(x)} rows of NaN; pass labelled points"
            )
        if not reset and targets.shape[-1] != self._num_targets:
            raise ValueError(
                f"expected y with {self._num_targets} columns, as in the first chunk, got "
                f"{targets.shape[-1]}; pass the same columns in every chunk"
            )
        self._num_targets = targets.shape[-1]
        every = GroupKey(DEFAULT, Components.every(self._num_targets))
        warn_of_sentinels([Observations(every, x, targets)])
        return x, targets

    def _assign(self, fitted: Fitted) -> None:
        """Set the attributes of this estimator from a fit."""
        theta = fitted.solution.theta.numpy()
        self._fitted = fitted
        self.kernel_ = fitted.features.kernel
        self.coef_ = theta[:, 0] if theta.shape[1] == 1 else theta
        self.n_iter_ = fitted.solution.num_iterations


class CombinedRegressor(FeatureRegressor):
    """The base class of regressions of linear combinations C f, with a Laplacian penalty."""

    @chosen_threads()
    def predict_views(self, X: ArrayLike) -> Float[np.ndarray, "n p"]:
        """Return the p outputs f(X), (n, p), before the matrix C combines them.

        Args:
            X: points (n, d).

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: one of the reasons listed at `predict`.
        """
        check_is_fitted(self)
        return self._values(X, None)

    def _laplacian(
        self, laplacian: Matrix | None, x: Float[Tensor, "N d"], num_outputs: int
    ) -> Matrix | None:
        """Return w M, or None if w = 0."""
        weight = checked_number(self, "laplacian_weight")
        if laplacian is not None:
            laplacian = check_laplacian(laplacian, len(x), num_outputs)
        if weight == 0:
            return None
        return weight * (graph_laplacian(x) if laplacian is None else laplacian)
