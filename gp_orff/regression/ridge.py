"""`ORFFRidge`, `ORFFRidgeCV` and `ORFFRidgeClassifier`, and `OVKRidge` by exact kernels."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Shaped
from numpy.typing import ArrayLike
from scipy.linalg import helmert
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d
from torch import Tensor

from gp_orff.features.chunked import by_chunks
from gp_orff.features.draws import Rule
from gp_orff.kernels.base import is_number
from gp_orff.kernels.tree import num_outputs
from gp_orff.regression.base import (
    CombinedRegressor,
    FeatureMap,
    FeatureRegressor,
    Fitted,
    checked_combination,
    checked_number,
    fixed_kernel,
    unchanged_on_failure,
)
from gp_orff.regression.laplacian import Matrix
from gp_orff.regression.solvers import (
    SOLVERS,
    Cholesky,
    Equations,
    Options,
    Problem,
    Solution,
    Solver,
    coefficients,
    design,
)
from gp_orff.threads import chosen_threads

# `ORFFRidge`: ridge regression of vectors on operator-valued Fourier features.


class ORFFRidge(CombinedRegressor):
    r"""Ridge regression of vectors on operator-valued Fourier features, for scikit-learn.

    The field f(x) = Φ(x)θ minimises, over its F weights θ,

        Σ_n ‖C f(x_n) − y_n‖² + α ‖θ‖² + w fᵀM f ,

    where Φ are the features of a kernel (see `ORFFKernel`), the sum is over points with a label
    y_n, and the last f is the field at all points. With w = 0 and C = I, f is the posterior mean of
    a Gaussian process with noise variance α, zero mean, and these features. Use `VectorFieldGP` for
    error bars and learned hyperparameters, which are fixed here. The prior mean is zero: subtract
    the mean of y, or add a `ConstantKernel` term. On a grid `VectorFieldGP` also adds the truncated
    variance to the noise; with `diagonal_correction=False` the two are equal.

    - A kernel with p outputs, such as `CurlFreeKernel`, learns all components of y together.
    - A scalar kernel, such as `RBFKernel`, learns each column of y separately.
    - Points without a label (rows of NaN in y) contribute through the Laplacian M of a graph: f
      varies slowly where points are dense. See `graph_laplacian`.
    - Several views of a point, each with a separate field, are outputs that C combines, as in
      C = [½, ½]. M penalises their differences. See `view_disagreement`.

    Brault et al. 2016, Equations 10 and 20, with α = Nλ for N points. Minh 2016, Equation 67, with
    α = lγ_A and w = lγ_I for l labelled points.

    Args:
        kernel: a kernel that `ORFFKernel` accepts; it is copied, and not trained. If None, an
            `RBFKernel` whose lengthscale is the median distance of the points.
        frequencies: the rule that chooses the frequencies, such as `gp_orff.MonteCarlo(1000)`. If
            None, `gp_orff.Auto` for the data: a grid for up to 4 inputs, else quasi-random ones.
        alpha: α ≥ 0: the ratio of noise variance to field variance, times the variance of the
            kernel. The variance of a curl-free or divergence-free kernel is about 1/ℓ² for a
            lengthscale ℓ: to compare lengthscales, scale the kernels by ℓ², or choose α for each,
            as `ORFFRidgeCV` does.
        solver: the method that computes θ.

            - `"cholesky"`: the normal equations, of size F from one pass over the data, or of size
              N·p if that is smaller (Minh 2016, Equations 72, 74 and 75).
            - `"stein"`: the same by eigenvectors, for scalar and separable kernels (Brault et al.
              2016, Equation 11).
            - `"lsmr"`: iterations that need products with Φ only, for F too large for F×F matrices
              (Fong & Saunders 2011).
            - `"sgd"`: stochastic gradients, for any `loss` (Brault et al. 2016, Appendix D.1.1).
            - `"auto"`: `"cholesky"`, or `"sgd"` if there is a `loss`.
        laplacian_weight: w ≥ 0, for all solvers but `"lsmr"`. `"sgd"` expects α > 0 with it, and
            factorises one matrix of size F, for any `loss`. To choose w by cross-validation, make
            folds of the labelled rows only, and keep the others in every training set:
            `cv=[(np.r_[train, unlabelled], test) for ...]`. A given M cannot be split: set held-out
            labels to NaN instead.
        loss: a function of predictions (n, q) and labels (n, q), as tensors, which returns the mean
            over their entries, such as `torch.nn.HuberLoss()`. Its sum takes the place of the sum
            of squares, with a Laplacian too: V of Minh's Equation 67. For `"sgd"`.
        max_iter: the most iterations of `"lsmr"`, 10·F if None, or passes of `"sgd"`, 256 if None.
            You get a `ConvergenceWarning` if they are not enough.
        tol: the tolerance at which iterations stop, 10⁻¹⁰ and 0.01 if None. It is the relative
            residual of `"lsmr"`, or the relative change of the predictions from pass k to pass 2k
            of `"sgd"`.
        seed: the seed of the order in which `"sgd"` visits the points.

    Attributes:
        kernel_: the `ORFFKernel`: `kernel_.features(x)` is Φ, `kernel_.num_features` F.
        coef_: θ (F,); for a scalar kernel and several columns of y, (F, q).
        n_iter_: the number of iterations.
        n_features_in_: d, the number of input columns.
        feature_names_in_: their names, if X was a DataFrame.

    Raises:
        When `fit` is called, which leaves the estimator as it was before:
        TypeError: `kernel` is not a kernel, or `frequencies` not a rule.
        ValueError: X or y are not finite, or of different length; no row of y has a label; α or w
            is negative; an unknown solver, or one that does not solve this problem; shapes of C or
            M that do not fit; M is not symmetric, or not positive semi-definite.

    Example:
        A flow without divergence, from 100 noisy vectors:

        >>> import gp_orff, gpytorch, numpy as np
        >>> from gp_orff.regression import ORFFRidge
        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(size=(100, 2))
        >>> y = np.sin(6 * X[:, ::-1]) + 0.1 * rng.standard_normal((100, 2))
        >>> k = gpytorch.kernels.RBFKernel()
        >>> k.lengthscale = 0.4
        >>> kernel = gp_orff.DivergenceFreeKernel(k, num_dims=2)
        >>> model = ORFFRidge(kernel, gp_orff.MonteCarlo(100), alpha=0.1).fit(X, y)
        >>> model.predict([[0.5, 0.5]]).shape
        (1, 2)

        Hyperparameters by cross-validation:

        >>> from sklearn.model_selection import GridSearchCV
        >>> search = GridSearchCV(model, {"alpha": [1e-3, 0.1, 10.0]}, cv=3).fit(
        ...     X, y
        ... )
        >>> search.best_params_
        {'alpha': 0.1}

        Thirty labels, three of them wrong, and a graph of all points, under another loss than
        squares:

        >>> import torch
        >>> few = y.copy()
        >>> few[30:], few[:3] = np.nan, [[4.0, -5.0], [-3.0, 6.0], [5.0, 3.5]]
        >>> model.set_params(laplacian_weight=0.01).fit(X, few).score(X, y) < 0
        True
        >>> model.set_params(loss=torch.nn.HuberLoss(delta=0.1)).fit(X, few).score(
        ...     X, y
        ... ) > 0.9
        True
    """

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
        tol: float | None = None,
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

    @chosen_threads(measure=True)
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        laplacian: Matrix | None = None,
        combination: ArrayLike | None = None,
    ) -> "ORFFRidge":
        """Learn the weights, and return self.

        Args:
            X: N points (N, d), with and without a label: an array, a DataFrame or a tensor.
            y: labels (N, q), or (N,); a row of NaN is a point without a label.
            laplacian: M, positive semi-definite, as an array, a tensor or a scipy sparse matrix:
                (N, N), for each output of the kernel by itself, or (N·p, N·p), where row n·p + i is
                output i at point n. If None, `graph_laplacian(X)`. Not used if
                `laplacian_weight=0`.
            combination: C (q, p), for a kernel with p outputs; the identity if None.

        Raises:
            TypeError, ValueError: see the class.
        """
        with unchanged_on_failure(self), torch.no_grad():
            x, targets = self._read(X, y, reset=True)
            features = FeatureMap.of(self, x)
            problem = self._problem(features, x, targets, combination)
            matrix = self._laplacian(laplacian, x, features.expansion.num_outputs)
            problem = replace(problem, laplacian=matrix)
            solver, options = self._chosen_solver()
            solution = solver.solve(problem, options)
            self._assign(Fitted(features, problem, solution, solver, options))
        return self

    @chosen_threads()
    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> "ORFFRidge":
        """Learn from a chunk of data in addition to all data before, and return self.

        The first chunk determines the features from the present kernel and rule, and needs a label.
        If later chunks are elsewhere, pass the domain of a frequency grid with the rule, as
        `gp_orff.Auto(domain=...)`. `"cholesky"` and `"stein"` add sufficient statistics, and give
        the same weights as `fit` with all chunks together. `"sgd"` makes one pass over the chunk,
        and repeated points have twice the weight. Its first chunk should have about a thousand
        points from the complete domain. Each call of the exact solvers costs F³ in addition to the
        pass, so that large chunks cost less.

        Args:
            X: points (N, d).
            y: labels (N, q), or (N,); rows of NaN are ignored.

        Raises:
            ValueError: as `fit`; a solver that needs all data at once (`"lsmr"`); a Laplacian; a
                chunk with other columns; points outside the domain of a grid.
        """
        with unchanged_on_failure(self), torch.no_grad():
            before: Fitted | None = getattr(self, "_fitted", None)
            x, targets = self._read(X, y, reset=before is None, needs_label=before is None)
            if targets.isnan().all():
                return self
            if before is None:
                features = FeatureMap.of(self, x)
                problem, earlier = self._problem(features, x, targets, None), None
            else:
                features, earlier = before.features, (before.problem, before.solution)
                features.check(x)
                problem = self._problem(features, x, targets, before.problem.combination)
            if checked_number(self, "laplacian_weight"):
                raise ValueError(
                    "partial_fit expects laplacian_weight=0, got "
                    f"{self.laplacian_weight}; use fit, on all points"
                )
            solver, options = self._chosen_solver()
            solution = solver.partial(problem, options, earlier)
            self._assign(Fitted(features, problem, solution, solver, options, streamed=True))
        return self

    def _problem(
        self,
        features: FeatureMap,
        x: Float[Tensor, "N d"],
        y: Float[Tensor, "N q"],
        combination: ArrayLike | None,
    ) -> Problem:
        c = checked_combination(combination, features.expansion.num_outputs, y.shape[-1])
        return Problem(features.expansion, x, y, checked_number(self, "alpha"), c)

    def _chosen_solver(self) -> tuple[Solver, Options]:
        """The solver by its name, and the settings of iterative ones."""
        name = self.solver
        if name == "auto":
            name = "cholesky" if self.loss is None else "sgd"
        if name not in SOLVERS:
            raise ValueError(
                f"{type(self).__name__} expects solver 'auto', "
                f"{', '.join(map(repr, SOLVERS))}, got {self.solver!r}"
            )
        return SOLVERS[name], Options(self.max_iter, self.tol, self.loss, self.seed)


# `ORFFRidgeCV`: ridge regression whose α minimises the generalised cross-validation error.


_RATIOS = np.logspace(-6, 2, 17)  # of α and the variance of the kernel, by default


class ORFFRidgeCV(FeatureRegressor):
    r"""`ORFFRidge` whose α minimises the generalised cross-validation error (GCV).

    GCV(α) = n ‖y − H y‖² / tr(I − H)², H = Φ(ΦᵀΦ + α)⁻¹Φᵀ, for the n values in y. It estimates the
    error of prediction at points that are held out one by one. One eigendecomposition is used for
    all α, so that a hundred cost about as much as one. Use `GridSearchCV` with your own folds if
    noise is correlated between neighbours; it fits every α for each fold. Copies of a record
    suggest that there is no noise, and α becomes far too small: average them first, or use
    `GridSearchCV` with groups.

    Golub, Heath & Wahba 1979, Technometrics 21. Brault et al. 2016 (Section 4.2) use 2-fold
    cross-validation: `GridSearchCV(ORFFRidge(kernel), {"alpha": alphas}, cv=2)`.

    Args:
        kernel, frequencies: as for `ORFFRidge`.
        alphas: the values to choose from. If None, 17 values from 10⁻⁶ to 10² times the variance of
            the kernel, in equal ratios.

    Attributes:
        alpha_: the chosen value.
        alphas_: the compared values (A,), in ascending order.
        gcv_errors_: GCV of each (A,), in the square of the unit of y.
        kernel_, coef_, n_iter_, n_features_in_: as for `ORFFRidge`.

    Raises:
        As `ORFFRidge`, when `fit` is called; `alphas` that are not positive. You get a warning if
        the best α is the first or the last.

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

    @chosen_threads(measure=True)
    def fit(self, X: ArrayLike, y: ArrayLike) -> "ORFFRidgeCV":
        """Choose α, learn the weights, and return self.

        Args:
            X: N points (N, d).
            y: vectors (N, q), or (N,); rows of NaN are ignored.
        """
        with unchanged_on_failure(self), torch.no_grad():
            x, targets = self._read(X, y, reset=True)
            features = FeatureMap.of(self, x)
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


# `OVKRidge`: ridge regression by an exact operator-valued kernel, without features.


@dataclass(frozen=True)
class ExactField:
    """f = Σ_j K(·, x_j) a_j."""

    kernel: Kernel
    x: Float[Tensor, "N d"]
    a: Float[Tensor, "N*p k"]
    combination: Float[Tensor, "q p"] | None  # C

    @torch.no_grad()
    def values(
        self, x: Float[Tensor, "n d"], combination: Float[Tensor, "q p"] | None
    ) -> Float[Tensor, "n q"]:
        """C f(x)."""

        def at(points: Float[Tensor, "m d"]) -> Float[Tensor, "m q"]:
            f = (self.kernel(points, self.x).to_dense() @ self.a).reshape(len(points), -1)
            return f if combination is None else f @ combination.mT

        return by_chunks(at, x, num_outputs(self.kernel) * len(self.a))


class OVKRidge(CombinedRegressor):
    r"""Ridge regression of vectors by an exact operator-valued kernel (OVK), for scikit-learn.

    The field f minimises, over the space of functions of the kernel K,

        Σ_n ‖C f(x_n) − y_n‖² + α ‖f‖²_K + w fᵀM f ,

    with the labels y_n, combinations C and Laplacian M of `ORFFRidge`, whose features approximate
    K. By the representer theorem f(x) = Σ_j K(x, x_j) a_j, over all N points, with

        (B K + α I) a = (J ⊗ C)ᵀ y ,    B = J ⊗ CᵀC + w M ,

    where J selects the points with a label. It takes (N·p)³ operations and memory for a few
    matrices (N·p, N·p): use it for few points, or to see what features lose. With w = 0 and C = I,
    f is the posterior mean of a Gaussian process with noise variance α; `VectorFieldGP` has its
    error bars.

    Minh 2016, Theorem 13 and Equation 72, with α = lγ_A and w = lγ_I for l labelled points.

    Args:
        kernel: any gpytorch kernel, of one output or of p; it is copied, and not trained. A scalar
            kernel serves each column of y by itself. If None, an `RBFKernel` whose lengthscale is
            the median distance of the points.
        alpha: α > 0, as for `ORFFRidge`.
        laplacian_weight: w ≥ 0.

    Attributes:
        kernel_: the kernel, in float64.
        dual_coef_: a (N, p), or (N, q) for a scalar kernel; only points with a label if w = 0.
        n_features_in_: d, the number of input columns.
        feature_names_in_: their names, if X was a DataFrame.

    Raises:
        When `fit` is called, which leaves the estimator as it was before:
        TypeError: `kernel` is not a kernel.
        ValueError: α is zero; and as for `ORFFRidge`.

    Example:
        Ten labels and a graph of a hundred points; features come close:

        >>> import gp_orff, gpytorch, numpy as np
        >>> from gp_orff.regression import ORFFRidge, OVKRidge
        >>> X = np.random.default_rng(0).uniform(size=(100, 2))
        >>> y = X.copy()  # the gradient of ‖x‖²/2
        >>> y[10:] = np.nan
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> exact = OVKRidge(kernel, alpha=1e-3, laplacian_weight=1e-3).fit(X, y)
        >>> exact.score(X, X) > 0.9
        True
        >>> rule = gp_orff.MonteCarlo(2000)
        >>> model = ORFFRidge(kernel, rule, alpha=1e-3, laplacian_weight=1e-3).fit(
        ...     X, y
        ... )
        >>> bool(np.abs(model.predict(X) - exact.predict(X)).max() < 0.05)
        True
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        alpha: float = 1.0,
        *,
        laplacian_weight: float = 0.0,
    ):
        self.kernel = kernel
        self.alpha = alpha
        self.laplacian_weight = laplacian_weight

    @chosen_threads(measure=True)
    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        laplacian: Matrix | None = None,
        combination: ArrayLike | None = None,
    ) -> "OVKRidge":
        """Learn the coefficients, and return self.

        Args:
            X, y, laplacian, combination: as for `ORFFRidge.fit`.

        Raises:
            TypeError: `kernel` is not a kernel.
            ValueError: α is zero, and as for `ORFFRidge.fit`.
        """
        with unchanged_on_failure(self), torch.no_grad():
            x, targets = self._read(X, y, reset=True)
            alpha = checked_number(self, "alpha")
            if alpha == 0:
                raise ValueError(
                    "OVKRidge expects alpha > 0, got 0; use a small one, such as 1e-6 times the "
                    "variance of the kernel, or ORFFRidge"
                )
            kernel = fixed_kernel(self, x)
            p = num_outputs(kernel)
            c = checked_combination(combination, p, targets.shape[-1])
            problem = Problem(None, x, targets, alpha, c, self._laplacian(laplacian, x, p))
            if problem.laplacian is None:  # only labels count
                problem = Problem(None, *problem.labels, alpha, c)
            a = coefficients(kernel(problem.x).to_dense(), problem)
            self._fitted = ExactField(kernel, problem.x, a, c)
            self.kernel_, self.dual_coef_ = kernel, a.reshape(len(problem.x), -1).numpy()
        return self


# Codes of classes: the corners of a simplex.


def simplex_codes(num_classes: int) -> Float[np.ndarray, "T T-1"]:
    """The T corners of a regular simplex around the origin: one unit vector for each class.

    They are the T unit vectors with the largest separation: ⟨c_s, c_t⟩ = −1/(T − 1) for s ≠ t, and
    Σ_t c_t = 0. A field f that is regressed on the codes of labels gives the label argmax_t ⟨f(x),
    c_t⟩. As the root of a kernel, the codes give k(x, z) C Cᵀ with T outputs that sum to zero.

    Mroueh, Poggio, Rosasco and Slotine 2012, "Multiclass learning with simplex coding"; Brault et
    al. 2016, Section 4.2.

    Args:
        num_classes: T ≥ 2.

    Returns:
        C (T, T − 1) in float64; row t is c_t.

    Raises:
        ValueError: `num_classes` is not an integer, or is less than two.

    Example:
        >>> from gp_orff.regression import simplex_codes
        >>> codes = simplex_codes(3)
        >>> (codes @ codes.T).round(12)
        array([[ 1. , -0.5, -0.5],
               [-0.5,  1. , -0.5],
               [-0.5, -0.5,  1. ]])
    """
    if not is_number(num_classes, Integral) or num_classes < 2:
        raise ValueError(
            f"simplex_codes expects an integer of at least 2 classes, got {num_classes!r}; for "
            "labels pass len(numpy.unique(labels))"
        )
    # Helmert's rows are orthonormal and sum to zero: CCᵀ = (I − 11ᵀ/T) T/(T − 1)
    return helmert(num_classes).T * np.sqrt(num_classes / (num_classes - 1))


# `ORFFRidgeClassifier`: labels by regression on the codes of classes.


_CODES: dict[str, Callable[[int], Float[np.ndarray, "T q"]]] = {
    "simplex": simplex_codes,
    "one-hot": np.eye,
}


def _is_label(value: object) -> bool:
    """Whether a value is not None, NaN, or the NA of pandas."""
    try:
        return value is not None and bool(value == value)
    except TypeError:  # NA == NA is NA, which is no truth value
        return False


def _labels(y: ArrayLike) -> tuple[Shaped[np.ndarray, "l"], Bool[np.ndarray, "N"]]:
    """The labels of the points that have one, and which these are: no NaN, and not None."""
    if isinstance(y, list | tuple) and not all(map(_is_label, y)):
        y = np.array(y, dtype=object)  # in an array of strings, NaN would be the string "nan"
    values = column_or_1d(y, warn=True)
    labelled = np.array([_is_label(value) for value in values], dtype=bool)
    labels = values[labelled]
    if values.dtype.kind == "O" and not labelled.all():
        labels = np.array(labels.tolist())  # the type of the labels alone
    labels = check_array(labels, ensure_2d=False, dtype=None, input_name="y", ensure_min_samples=0)
    if len(labels):
        check_classification_targets(labels)
    return labels, labelled


class ORFFRidgeClassifier(ClassifierMixin, BaseEstimator):
    r"""Classifier by ridge regression on operator-valued Fourier features and codes of classes.

    Class t of T has a code c_t, a vector (q,). `ORFFRidge` fits a field f to the codes of the
    labels. The label of a point is the class whose code has the largest inner product with the
    field:

        θ = argmin Σ_n ‖f(x_n) − c_{y_n}‖² + α‖θ‖²,   f = Φθ,   label(x) = argmax_t ⟨f(x), c_t⟩.

    - `coding="simplex"`: the q = T − 1 coordinates of the corners of a simplex, `simplex_codes`.
      Two classes are ±1.
    - `coding="one-hot"`: c_t is row t of the identity, q = T. With the codes C (T, T − 1) inside
      the kernel, `SeparableKernel(k, root=C)`, the labels are those of simplex codes, the scalar
      kernel k and the penalty α(T − 1)/T.

    With a scalar kernel, the labels under both codings are those of scikit-learn's
    `RidgeClassifier(alpha=alpha, fit_intercept=False)` on the features Φ.

    Brault et al. 2016, Section 4.2; Mroueh, Poggio, Rosasco and Slotine 2012, "Multiclass learning
    with simplex coding".

    Args:
        kernel: a scalar kernel for each of the q coordinates, or a kernel with q outputs. None and
            the hyperparameters are as for `ORFFRidge`.
        frequencies: the rule that chooses the frequencies; None as for `ORFFRidge`.
        alpha: α ≥ 0, the penalty of the squared weights.
        coding: "simplex" or "one-hot".
        laplacian_weight: w ≥ 0, of the penalty w fᵀMf over all points, with and without a label.
        loss: a function of the field (n, q) and of the codes (n, q), as tensors, which returns the
            mean over their entries, in the place of the squares. With codes ±1 of two classes,
            `lambda f, c: (1 - c * f).clamp_min(0).square().mean()` is that of support vector
            machines with squared slacks; without the square it has kinks, and converges slowly if
            α is small. With `coding="one-hot"`,
            `lambda f, c: torch.nn.functional.cross_entropy(f, c) / q` is that of logistic
            regression with q classes.
        solver, max_iter, tol, seed: as for `ORFFRidge`.

    Attributes:
        classes_: the labels (T,), sorted.
        codes_: their codes (T, q).
        regression_: the fitted `ORFFRidge`.
        kernel_: the kernel with its frequencies; `kernel_.features(X)` is Φ.
        coef_: θ: (F, q) with a scalar kernel, (F,) with a kernel of q outputs, or q = 1.
        n_iter_: the number of iterations of the solver; 1 if it is direct.
        n_features_in_: d, the number of inputs.
        feature_names_in_: the names of the inputs (d,), if `fit` was given a table with names.

    Example:
        >>> import gp_orff, gpytorch
        >>> from gp_orff.regression import ORFFRidgeClassifier
        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits(return_X_y=True)
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> kernel.lengthscale = 30.0
        >>> classifier = ORFFRidgeClassifier(
        ...     kernel, gp_orff.MonteCarlo(200), alpha=0.1
        ... )
        >>> classifier.fit(X[:1000], y[:1000]).score(X[1000:], y[1000:]) > 0.9
        True

        Two arcs, a label on each, and a graph of all points; a support vector machine with the
        Laplacian:

        >>> import numpy as np
        >>> angle = np.linspace(0, np.pi, 100)
        >>> arc = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> X, y = np.concatenate([arc, [1, 0.4] - arc]), np.repeat([0.0, 1.0], 100)
        >>> few = np.full(200, np.nan)
        >>> few[[10, 110]] = 0, 1
        >>> slack = lambda f, c: (1 - c * f).clamp_min(0).square().mean()
        >>> settings = dict(alpha=1e-3, loss=slack)
        >>> kernel.lengthscale = 0.3
        >>> machine = ORFFRidgeClassifier(
        ...     kernel, gp_orff.MonteCarlo(100), **settings
        ... )
        >>> machine.fit(X, few).score(X, y) < 0.9
        True
        >>> machine.set_params(laplacian_weight=0.1).fit(X, few).score(X, y)
        1.0
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        frequencies: Rule | None = None,
        alpha: float = 1.0,
        coding: str = "simplex",
        *,
        laplacian_weight: float = 0.0,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        solver: str = "auto",
        max_iter: int | None = None,
        tol: float | None = None,
        seed: int = 0,
    ):
        self.kernel = kernel
        self.frequencies = frequencies
        self.alpha = alpha
        self.coding = coding
        self.laplacian_weight = laplacian_weight
        self.loss = loss
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed

    def fit(
        self, X: ArrayLike, y: ArrayLike, laplacian: Matrix | None = None
    ) -> "ORFFRidgeClassifier":
        """Fit the field to the codes of the labels.

        Args:
            X: points (N, d), with and without a label.
            y: labels (N,): integers, strings or booleans; NaN or None is a point without a label.
            laplacian: M, as for `ORFFRidge.fit`; `graph_laplacian(X)` if None.

        Returns:
            This classifier.

        Raises:
            ValueError: labels of one class only, an unknown `coding`, a kernel whose number of
                outputs is neither 1 nor q; and as for `ORFFRidge.fit`.
        """
        labels, labelled = _labels(y)
        classes, indices = np.unique(labels, return_inverse=True)
        codes = self._codes(classes)
        self._check_outputs(codes)
        targets = np.full((len(labelled), codes.shape[1]), np.nan)
        targets[labelled] = codes[indices]
        names = ("solver", "laplacian_weight", "loss", "max_iter", "tol", "seed")
        options = {name: getattr(self, name) for name in names}
        regression = ORFFRidge(self.kernel, self.frequencies, self.alpha, **options)
        regression.fit(X, targets, laplacian)
        vars(self).pop("feature_names_in_", None)  # of an earlier fit
        vars(self).update({n: value for n, value in vars(regression).items() if n.endswith("_")})
        self.classes_, self.codes_, self.regression_ = classes, codes, regression
        return self

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The share of right labels among the points `X` (n, d) that have a label in `y` (n,).

        Args:
            X, y: points and labels; NaN or None is a point without a label.
            sample_weight: weights (n,) of the points; equal if None.
        """
        labels, labelled = _labels(y)
        weights = None if sample_weight is None else np.asarray(sample_weight)[labelled]
        return accuracy_score(labels, self.predict(X)[labelled], sample_weight=weights)

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "N T"] | Float[np.ndarray, "N"]:
        """Return the scores of the classes, ⟨f(x), c_t⟩; with two classes, half the difference of
        both.

        Args:
            X: points (N, d).

        Returns:
            (N, T) in the order of `classes_`; the largest score gives the label. For two classes
            (N,), positive if the label is `classes_[1]`.

        Raises:
            NotFittedError: before `fit`.
            ValueError: as for `ORFFRidge.predict`.
        """
        check_is_fitted(self)
        field = self.regression_.predict(X)
        scores = field.reshape(-1, self.codes_.shape[1]) @ self.codes_.T
        return scores if len(self.classes_) > 2 else (scores[:, 1] - scores[:, 0]) / 2

    def predict(self, X: ArrayLike) -> Shaped[np.ndarray, "N"]:
        """Return the labels (N,) of the points `X` (N, d), of the same kind as `y` in `fit`.

        Raises:
            NotFittedError: before `fit`.
            ValueError: as for `ORFFRidge.predict`.
        """
        scores = self.decision_function(X)
        best = scores > 0 if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[np.asarray(best, dtype=int)]

    def _codes(self, classes: Shaped[np.ndarray, "T"]) -> Float[np.ndarray, "T q"]:
        if len(classes) < 2:
            raise ValueError(
                "ORFFRidgeClassifier expects labels of at least two classes, got "
                f"{'one class' if len(classes) else 'no label'}: {classes.tolist()}; there is "
                "nothing to distinguish, add points of another class"
            )
        if self.coding not in tuple(_CODES):
            raise ValueError(
                f"ORFFRidgeClassifier expects a coding of {sorted(_CODES)}, got {self.coding!r}; "
                'use "simplex" unless the kernel itself has the codes of the classes'
            )
        return _CODES[self.coding](len(classes))

    def _check_outputs(self, codes: Float[np.ndarray, "T q"]) -> None:
        if not isinstance(self.kernel, Kernel):  # None, or what `ORFFRidge` refuses
            return
        point = torch.zeros(1, 1)
        outputs, (T, q) = self.kernel.num_outputs_per_input(point, point), codes.shape
        if outputs not in (1, q):
            raise ValueError(
                f"ORFFRidgeClassifier expects a kernel with 1 or {q} outputs for {T} classes and "
                f"coding={self.coding!r}, got {outputs} outputs; pass a scalar kernel, or "
                f"SeparableKernel(kernel, root) with a root of {q} rows"
            )
