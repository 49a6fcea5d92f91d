"""What the estimators of ridge regression share: data, features, the problem, solvers."""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real

import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike
from scipy import sparse
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
from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.assemble import check_domain, expand
from gp_orff.features.chunked import Box, box_of, in_words, union
from gp_orff.features.draws import GridWarning, Lattice, Rule
from gp_orff.features.expansion import Expansion
from gp_orff.features.grid import Auto
from gp_orff.regression.laplacian import check_laplacian, graph_laplacian
from gp_orff.threads import chosen_threads

# The learning problem min_θ Σ ‖C f(x_i) − y_i‖² + α‖θ‖² + w fᵀMf.
#
# The sum is over labelled points; f = Φθ stands for the field at all of them. It is Equation 67 of
# Minh 2016 with the square loss, times the number of labelled points.


Matrix = sparse.csr_array | np.ndarray


@dataclass(frozen=True)
class Problem:
    """Points, targets and penalties, under an expansion of the field f with p outputs."""

    expansion: Expansion | None  # None for an exact kernel
    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N q"]  # NaN in the rows without a label
    alpha: float
    combination: Float[Tensor, "q p"] | None = None  # C; None: the identity
    laplacian: Matrix | None = None  # w M, (N, N) or (N·p, N·p); None: zero

    @cached_property
    def labelled(self) -> Bool[Tensor, "N"]:
        """The points with a label."""
        return ~self.y.isnan().any(-1)

    @property
    def labels(self) -> tuple[Float[Tensor, "l d"], Float[Tensor, "l q"]]:
        """The points with a label, and the labels."""
        if self.labelled.all():
            return self.x, self.y
        return self.x[self.labelled], self.y[self.labelled]

    @property
    def observed(self) -> Expansion:
        """The features of C f."""
        return combined(self.expansion, self.combination)


def combined(expansion: Expansion, combination: Float[Tensor, "q p"] | None) -> Expansion:
    """The features of C f from those of f."""
    if combination is None:
        return expansion
    if expansion.is_kronecker:
        return replace(expansion, mixing=combination @ expansion.mixing)
    full = expansion.general()
    return replace(full, directions=full.directions @ combination.mT)


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
    return _tensor(validate_data(estimator, _array(X), dtype=np.float64, reset=reset))


def read_data(
    estimator: BaseEstimator, X: ArrayLike, y: ArrayLike, reset: bool, needs_label: bool
) -> tuple[Float[Tensor, "N d"], Float[Tensor, "N q"], bool]:
    """X, y as a matrix, and whether y was a vector. Rows of NaN in y are unlabelled.

    Raises:
        ValueError: as `read_points`; no y, or one of another length; infinite numbers; rows that
            are NaN in part; no row that has a label, if it `needs_label`.
    """
    if y is None:
        validate_data(estimator, X, y)  # raises, in the words of scikit-learn
    x = read_points(estimator, X, reset).clone()  # kept, while the caller may change X
    y = check_array(
        _array(y), dtype=np.float64, ensure_2d=False, ensure_all_finite="allow-nan", input_name="y"
    )
    check_consistent_length(x, y)
    targets = _tensor(y).clone()
    is_vector = targets.dim() == 1
    targets = targets.unsqueeze(-1) if is_vector else targets
    missing = targets.isnan()
    partial = missing.any(-1) & ~missing.all(-1)
    if partial.any():
        raise ValueError(
            "expected rows of y that are numbers, or all NaN where there is no label, got "
            f"{int(partial.sum())} rows that are NaN in part; drop them, or use "
            "gp_orff.VectorFieldGP with missing='mask'"
        )
    if needs_label and missing.all():
        raise ValueError(f"expected a row of y with a label, got {len(y)} rows of NaN")
    return x, targets, is_vector


def labelled_rows(y: ArrayLike) -> Bool[np.ndarray, "N"]:
    """Which rows of y are not NaN."""
    y = check_array(_array(y), dtype=np.float64, ensure_2d=False, ensure_all_finite="allow-nan")
    return ~np.isnan(y.reshape(len(y), -1)).any(-1)


def checked_number(estimator: BaseEstimator, name: str) -> float:
    """A parameter of the estimator that is a finite number ≥ 0.

    Raises:
        ValueError: it is not.
    """
    value = getattr(estimator, name)
    if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= value < float("inf"):
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
    matrix = _tensor(check_array(_array(combination), dtype=np.float64, input_name="combination"))
    if matrix.shape != (num_targets, num_outputs):
        raise ValueError(
            f"expected combination ({num_targets}, {num_outputs}), a row for each column of y and "
            f"a column for each output of the kernel, got {tuple(matrix.shape)}; for a kernel with "
            "several outputs see gp_orff.SeparableKernel"
        )
    return matrix


def _array(values: ArrayLike) -> ArrayLike:
    """The values, as an array if they are a tensor."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


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
    def of(cls, kernel: Kernel | None, rule: Rule | None, x: Float[Tensor, "N d"]) -> "FeatureMap":
        """The features for the points x.

        Without a kernel: an RBF kernel whose lengthscale is the median distance of the points. The
        kernel is copied. Without a rule: `Auto`, for the lengthscales that the kernel has.

        Raises:
            TypeError: not an instance of a kernel, or not a rule.
            ValueError: a kernel that does not fit the inputs; points outside the domain of a rule.
        """
        if isinstance(kernel, ORFFKernel):
            raise TypeError(
                "expected a kernel without frequencies, got an ORFFKernel; use its base_kernel, "
                "and its rule as frequencies="
            )
        kernel = fixed_kernel(kernel, x)
        features = cls._resolving(kernel, rule, box_of(x))
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

    @property
    def adaptive(self) -> bool:
        """Whether the rule takes its domain from the data."""
        return resolved(self.rule, self.box) is not self.rule

    @torch.no_grad()
    def check(self, x: Float[Tensor, "n d"]) -> None:
        """Check that the features represent the kernel at these points.

        Raises:
            ValueError: they are outside the domain of the rule.
        """
        check_domain(self.kernel.base_kernel, self.kernel.frequencies, self._ends, x)

    @cached_property
    def _ends(self) -> Float[Tensor, "2 d"]:
        """The lowest and the highest corner of the box."""
        return torch.tensor(self.box, dtype=torch.float64).mT

    def covered(self, x: Float[Tensor, "n d"]) -> Bool[Tensor, "n"]:
        """Which of the points these features serve; `widened` ones serve the others.

        Raises:
            ValueError: some are outside the domain that the rule was given.
        """
        if self._lattice is None or not self.adaptive:
            self.check(x)
            return torch.ones(len(x), dtype=torch.bool)
        return ~self._lattice.outside(x)

    def box_with(self, x: Float[Tensor, "n d"]) -> Box:
        """The smallest box that contains the points served and these."""
        return union(self.box, box_of(x))

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


def fixed_kernel(kernel: Kernel | None, x: Float[Tensor, "N d"]) -> Kernel:
    """A copy of the kernel in float64 that is not trained; `median_kernel` without one.

    Raises:
        ValueError: a batch of kernels.
    """
    kernel = median_kernel(x) if kernel is None else copy.deepcopy(kernel)
    if not isinstance(kernel, Kernel):  # refused where it is used
        return kernel
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


# The protocol of solvers.


@dataclass(frozen=True)
class Options:
    """The settings of iterative solvers.

    Raises:
        ValueError: one of them has no meaning.
    """

    max_iter: int | None = None
    tol: float | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    seed: int = 0

    def __post_init__(self):
        valid = {
            "max_iter a positive integer or None": self.max_iter is None
            or (isinstance(self.max_iter, Integral) and self.max_iter >= 1),
            "tol a number >= 0 or None": self.tol is None
            or (isinstance(self.tol, Real) and self.tol >= 0),
            "loss a function such as torch.nn.HuberLoss() or None": self.loss is None
            or callable(self.loss),
            "seed an integer >= 0": isinstance(self.seed, Integral) and self.seed >= 0,
        }
        for words, holds in valid.items():
            if not holds:
                value = getattr(self, words.split()[0])
                raise ValueError(f"expected {words}, got {value!r}")


@dataclass(frozen=True)
class Solution:
    """The weights of the features, (F, q) for a scalar kernel, else (F, 1)."""

    theta: Float[Tensor, "F _"]
    num_iterations: int = 1
    state: object = None  # what `partial` goes on from


class Solver(ABC):
    """A way to solve a `Problem`."""

    name: str

    @abstractmethod
    def solve(self, problem: Problem, options: Options) -> Solution:
        """The minimiser."""

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        """The solution for the data of `problem` and all earlier data.

        Raises:
            ValueError: this solver needs all data at once; the earlier solution is of another one.
        """
        raise ValueError(
            "partial_fit expects a solver that takes data in chunks, got "
            f"solver={self.name!r}; use 'cholesky' or 'sgd', or fit"
        )


def refuse_laplacian(name: str, problem: Problem) -> None:
    """Raise ValueError if the problem has a Laplacian, which this solver does not take."""
    if problem.laplacian is not None:
        raise ValueError(
            f"solver={name!r} expects laplacian_weight=0, got a Laplacian; use solver='cholesky'"
        )


def refuse_loss(name: str, options: Options) -> None:
    """Raise ValueError if there is a loss other than the square."""
    if options.loss is not None:
        raise ValueError(
            f"solver={name!r} minimises squares and expects loss=None, got {options.loss!r}; use "
            "solver='sgd'"
        )


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
