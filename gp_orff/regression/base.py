"""What the estimators of ridge regression share: arguments, features, a fitted field."""

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

# Arguments of estimators as checked tensors, by scikit-learn's conventions.


@contextmanager
def unchanged_on_failure(estimator: BaseEstimator) -> Iterator[None]:
    """Restore the attributes of an estimator if the block raises."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def read_points(estimator: BaseEstimator, X: ArrayLike, reset: bool = False) -> Tensor:
    """X as a tensor (N, d); `reset` sets the number of columns that the estimator expects.

    Raises:
        ValueError: not a matrix of finite numbers, or with another number of columns.
    """
    return _tensor(validate_data(estimator, without_tensor(X), dtype=np.float64, reset=reset))


def read_targets(y: ArrayLike) -> Float[np.ndarray, "N *q"]:
    """y as an array, whose rows may be NaN."""
    how = {"ensure_2d": False, "ensure_all_finite": "allow-nan", "input_name": "y"}
    return check_array(without_tensor(y), dtype=np.float64, **how)


def checked_number(estimator: BaseEstimator, name: str) -> float:
    """A parameter of the estimator that is a finite number ≥ 0.

    Raises:
        ValueError: it is not.
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
    """C as a tensor, for a kernel with `num_outputs` outputs and `num_targets` columns of y.

    Raises:
        ValueError: C has another shape or entries that are not finite; without C, the columns of y
            are not the outputs of the kernel.
    """
    if combination is None:
        if num_outputs not in (1, num_targets):
            raise ValueError(
                f"expected y with {num_outputs} columns, one for each output of the kernel, got "
                f"{num_targets}; use another kernel, or combination= for outputs that are "
                "combinations of those of the kernel"
            )
        return None
    matrix = _tensor(
        check_array(without_tensor(combination), dtype=np.float64, input_name="combination")
    )
    if matrix.shape != (num_targets, num_outputs):
        raise ValueError(
            f"expected combination ({num_targets}, {num_outputs}), a row for each column of y and "
            f"a column for each output of the kernel, got {tuple(matrix.shape)}; for a kernel with "
            "several outputs see gp_orff.SeparableKernel"
        )
    return matrix


def _tensor(array: np.ndarray) -> Tensor:
    """A view of the array where torch can have one: not of one that is read-only or reversed."""
    viewable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if viewable else array.copy())


# Kernel, rule and data → the features of a regression.


_MOST_TRUNCATED = 0.1
_SAMPLE = 1000  # points, for the median of their distances


@dataclass(frozen=True)
class FeatureMap:
    """The features of a kernel on the points of a box, at fixed hyperparameters.

    Made by `FeatureMap.of`.
    """

    kernel: ORFFKernel  # in float64
    rule: Rule | None  # as requested
    box: Box  # of the points that it serves
    expansion: Expansion

    @classmethod
    @torch.no_grad()
    def of(cls, estimator: BaseEstimator, x: Float[Tensor, "N d"]) -> "FeatureMap":
        """The features of the kernel and the rule of an estimator, for the points x.

        Without a kernel: an RBF kernel whose lengthscale is the median distance of the points. The
        kernel is copied. Without a rule: `Auto`, for the lengthscales that the kernel has.

        Raises:
            TypeError: not an instance of a kernel, or not a rule.
            ValueError: a kernel that does not fit the inputs; points outside the domain of a rule.
        """
        if isinstance(estimator.kernel, ORFFKernel):
            raise TypeError(
                "expected a kernel without frequencies, got an ORFFKernel; use its base_kernel, "
                "and its rule as frequencies="
            )
        kernel = fixed_kernel(estimator, x)
        features = cls._resolving(kernel, estimator.frequencies, box_of(x))
        features.check(x)
        if features.truncated > _MOST_TRUNCATED:
            warnings.warn(
                f"a frequency grid of {features.kernel.num_features} features lacks "
                f"{features.truncated:.0%} of the variance of the kernel on these points: use a "
                "longer lengthscale, points closer together, more features, as "
                "Auto(max_features=...), or a random rule",
                GridWarning,
                stacklevel=5,
            )
        return features

    @classmethod
    def _resolving(cls, kernel: Kernel, rule: Rule | None, box: Box) -> "FeatureMap":
        """The features for the points of a box."""
        orff = ORFFKernel(kernel, resolved(rule, box), num_dims=len(box))
        orff = orff.double().requires_grad_(False)
        return cls(orff, rule, box, expand(kernel, orff.frequencies, len(box)).double())

    @torch.no_grad()
    def check(self, x: Float[Tensor, "n d"]) -> None:
        """Check that the features represent the kernel at these points.

        Raises:
            ValueError: they are outside the domain of the rule.
        """
        corners = torch.tensor(self.box, dtype=torch.float64).mT
        check_domain(self.kernel.base_kernel, self.kernel.frequencies, corners, x)

    def covered(self, x: Float[Tensor, "n d"]) -> Bool[Tensor, "n"]:
        """Which of the points these features serve; `widened` ones serve the others.

        Raises:
            ValueError: some are outside the domain that the rule was given.
        """
        if self._lattice is None or resolved(self.rule, self.box) is self.rule:
            self.check(x)
            return torch.ones(len(x), dtype=torch.bool)
        return ~self._lattice.outside(x)

    @torch.no_grad()
    def widened(self, box: Box) -> "FeatureMap":
        """The features of the same kernel for a larger box.

        Raises:
            ValueError: no frequency grid serves it as well as the data.
        """
        kernel = self.kernel.base_kernel
        wider = FeatureMap._resolving(kernel, self.rule, box)
        if wider._lattice is None or wider.truncated > max(_MOST_TRUNCATED, 2 * self.truncated):
            raise ValueError(
                f"expected points near the data, which are in {in_words(self.box)}, got some in "
                f"{in_words(box)}: no frequency grid covers both; predict closer to the data, or "
                "use a random rule, such as gp_orff.QuasiMonteCarlo(1024)"
            )
        return wider

    @property
    def truncated(self) -> float:
        """The largest share of the variance of a term that a grid lacks."""
        if self._lattice is None:
            return 0.0
        return max(term.truncated for term in self.kernel.accuracy())

    @property
    def _lattice(self) -> Lattice | None:
        """The lattice of the frequencies; None if they are on none."""
        draw = self.kernel.frequencies[0]
        return draw.lattice if draw.on_lattice else None


def resolved(rule: Rule | None, box: Box) -> Rule:
    """The rule for data in a box; the same object where it needs no box."""
    rule = Auto(lengthscale_range=(1, 1)) if rule is None else rule
    if isinstance(rule, Auto) and rule.domain is None and rule.data is None:
        return replace(rule, data=box)
    return rule


def fixed_kernel(estimator: BaseEstimator, x: Float[Tensor, "N d"]) -> Kernel:
    """A copy of its kernel in float64 that is not trained; `median_kernel` without one.

    Raises:
        TypeError: not an instance of a kernel.
        ValueError: a batch of kernels.
    """
    kernel = median_kernel(x) if estimator.kernel is None else copy.deepcopy(estimator.kernel)
    required(
        kernel,
        Kernel,
        f"{type(estimator).__name__} expects a gpytorch kernel",
        "for instance gp_orff.CurlFreeKernel(num_dims=2)",
    )
    if kernel.batch_shape:
        raise ValueError(
            f"expected one kernel, got a batch of shape {tuple(kernel.batch_shape)}; use an "
            "estimator for each kernel of the batch"
        )
    return kernel.double().requires_grad_(False)


def median_kernel(x: Float[Tensor, "N d"]) -> RBFKernel:
    """An RBF kernel whose lengthscale is the median distance of points at different places
    (Jaakkola's heuristic), in a random sample; 1 if all are at one place."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    distances = torch.pdist(x[order[:_SAMPLE]])
    distances = distances[distances > 0]
    kernel = RBFKernel().double()
    kernel.lengthscale = distances.median().item() if len(distances) else 1.0
    return kernel


# What the regressions share: a fitted field, prediction and score.


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

    @property
    def combination(self) -> Float[Tensor, "q p"] | None:
        """C."""
        return self.problem.combination

    @torch.no_grad()
    def values(
        self, x: Float[Tensor, "n d"], combination: Float[Tensor, "q p"] | None
    ) -> Float[Tensor, "n q"]:
        """C f(x): of points farther out, on the frequencies of a larger box."""
        near = self.features.covered(x)
        if near.all():
            expansion = combined(self.features.expansion, combination)
            return expansion.apply(x, self.solution.theta)
        far = self._wider_for(x[~near]).values(x[~near], combination)
        values = far.new_empty(len(x), far.shape[-1])
        values[~near], values[near] = far, self.values(x[near], combination)
        return values

    def _wider_for(self, x: Float[Tensor, "n d"]) -> "Fitted":
        """The fit on the frequencies of a larger box; the last one is kept."""
        if self.streamed:
            raise ValueError(
                f"expected points near those of the first chunk, {in_words(self.features.box)}, "
                f"got some in {in_words(box_of(x))}: data that came in chunks are not held; start "
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
    """A field learned by regression; subclasses fit it."""

    @chosen_threads()
    def predict(self, X: ArrayLike) -> Float[np.ndarray, "n q"] | Float[np.ndarray, "n"]:
        """The learned values at points X (n, d): C f(X), (n, q), or (n,) if y was a vector.

        With features on a frequency grid that follows the data, points farther out are served by a
        larger grid, for which the weights are computed again.

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: not finite, or another number of columns than in `fit`; points so far from
                the data that no grid serves both, or outside the domain of a grid that has one of
                its own or that data came to in chunks.
        """
        check_is_fitted(self)
        values = self._values(X, self._fitted.combination)
        return values[:, 0] if self._is_vector else values

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """R² of the predictions at points X (n, d), for the rows of y (n, q) that are not NaN.

        Args:
            X, y: points and vectors.
            sample_weight: weights (n,) of the points; equal if None.
        """
        y = read_targets(y)
        rows = ~np.isnan(y.reshape(len(y), -1)).any(-1)
        if not rows.any():
            raise ValueError(
                f"expected a row of y with a label, got {len(rows)} rows of NaN; in "
                "cross-validation, make folds of the labelled rows, and keep the others in every "
                "training set"
            )
        weights = None if sample_weight is None else np.asarray(sample_weight)[rows]
        return r2_score(y[rows], self.predict(X)[rows], sample_weight=weights)

    def _values(
        self, X: ArrayLike, combination: Float[Tensor, "q p"] | None
    ) -> Float[np.ndarray, "n q"]:
        """C f(x)."""
        x = read_points(self, X)
        return self._fitted.values(x, combination).numpy()

    def _read(
        self, X: ArrayLike, y: ArrayLike, reset: bool, needs_label: bool = True
    ) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N q"]]:
        """X as a tensor, and y as a matrix; rows of NaN in y are unlabelled."""
        if y is None:
            validate_data(self, X, y)  # raises, in the words of scikit-learn
        x = read_points(self, X, reset).clone()  # kept, while the caller may change X
        targets = _tensor(read_targets(y)).clone()
        check_consistent_length(x, targets)
        self._is_vector = targets.dim() == 1
        targets = targets.reshape(len(targets), -1)
        missing = targets.isnan()
        partial = missing.any(-1) & ~missing.all(-1)
        if partial.any():
            raise ValueError(
                "expected rows of y that are numbers, or all NaN where there is no label, got "
                f"{int(partial.sum())} rows that are NaN in part; drop them, or use "
                "gp_orff.VectorFieldGP with missing='mask'"
            )
        if needs_label and missing.all():
            raise ValueError(f"expected a row of y with a label, got {len(x)} rows of NaN")
        if not reset and targets.shape[-1] != self._num_targets:
            raise ValueError(
                f"expected y with {self._num_targets} columns, as before, got {targets.shape[-1]}"
            )
        self._num_targets = targets.shape[-1]
        every = GroupKey(DEFAULT, Components.every(self._num_targets))
        warn_of_sentinels([Observations(every, x, targets)])
        return x, targets

    def _assign(self, fitted: Fitted) -> None:
        """Make `fitted` what this estimator predicts from."""
        theta = fitted.solution.theta.numpy()
        self._fitted = fitted
        self.kernel_ = fitted.features.kernel
        self.coef_ = theta[:, 0] if theta.shape[1] == 1 else theta
        self.n_iter_ = fitted.solution.num_iterations


class CombinedRegressor(FeatureRegressor):
    """A regression of combinations C f, with a Laplacian of weight `laplacian_weight`."""

    @chosen_threads()
    def predict_views(self, X: ArrayLike) -> Float[np.ndarray, "n p"]:
        """f(X) (n, p): the outputs of the kernel, before C combines them.

        Args:
            X: points (n, d).

        Raises:
            NotFittedError, ValueError: as `predict`.
        """
        check_is_fitted(self)
        return self._values(X, None)

    def _laplacian(
        self, laplacian: Matrix | None, x: Float[Tensor, "N d"], num_outputs: int
    ) -> Matrix | None:
        """w M; None if w = 0."""
        weight = checked_number(self, "laplacian_weight")
        if laplacian is not None:
            laplacian = check_laplacian(laplacian, len(x), num_outputs)
        if weight == 0:
            return None
        return weight * (graph_laplacian(x) if laplacian is None else laplacian)
