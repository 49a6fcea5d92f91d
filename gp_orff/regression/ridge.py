"""Ridge regression and classification on features, and ridge regression with exact kernels."""

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

    The field is f(x) = Φ(x)θ with the features Φ of a kernel (see `ORFFKernel`). The F weights θ
    minimise

        Σ_n ‖C f(x_n) − y_n‖² + α ‖θ‖² + w fᵀM f .

    The sum is over points with a label y_n. In the last term, f is the vector of the field at all
    points, with and without a label. With w = 0 and C = I, f is the posterior mean of a Gaussian
    process with these features, noise variance α and mean zero. Subtract the mean of y, or add a
    `ConstantKernel`. Hyperparameters are not trained. Use `VectorFieldGP` for trained
    hyperparameters and error bars. With a grid, the two means are equal only if
    `diagonal_correction=False`, because `VectorFieldGP` adds the truncated variance to the noise.

    - A kernel with p outputs, such as `CurlFreeKernel`, predicts all components of y together.
    - A scalar kernel, such as `RBFKernel`, predicts each column of y separately.
    - Semi-supervised learning uses points without a label, which are rows of NaN in y. The
      Laplacian M of a graph penalises a field that varies quickly between neighbours. See
      `graph_laplacian`.
    - Multi-view learning uses one output of the kernel for each view of a point. C combines them,
      for example C = [½, ½], and M penalises their differences. See `view_disagreement`.

    Source: Brault et al. 2016, Equations 10 and 20, with α = Nλ for N points; Minh 2016, Equation
    67, with α = lγ_A and w = lγ_I for l labelled points.

    Args:
        kernel: a kernel that `ORFFKernel` accepts. It is copied and not trained. If None, an
            `RBFKernel` is used, whose lengthscale is the median distance of the points.
        frequencies: the rule that chooses the frequencies, such as `gp_orff.MonteCarlo(1000)`. If
            None, `gp_orff.Auto` is used: a grid for up to 4 inputs, and quasi-random frequencies
            for more inputs.
        alpha: α ≥ 0, the ratio of noise variance to field variance, times the variance of the
            kernel. A curl-free or divergence-free kernel with the lengthscale ℓ has a variance of
            about 1/ℓ². To compare lengthscales, multiply the kernels by ℓ², or choose α for each of
            them by `ORFFRidgeCV`.
        solver: the method that computes θ.

            - `"cholesky"` solves the normal equations, of size F from one pass over the data, or of
              size N·p if this is smaller (Minh 2016, Equations 72, 74 and 75).
            - `"stein"` solves them by eigenvectors, for scalar and separable kernels (Brault et al.
              2016, Equation 11).
            - `"lsmr"` needs only products with Φ, for F too large for F×F matrices (Fong & Saunders
              2011).
            - `"sgd"` uses stochastic gradients, for any `loss` (Brault et al. 2016, Appendix
              D.1.1).
            - `"auto"`, the default, is `"sgd"` if there is a `loss`, and `"cholesky"` otherwise.
        laplacian_weight: w ≥ 0. `"lsmr"` needs w = 0. With w > 0, `"sgd"` needs α > 0, and
            factorises a matrix of size F. To choose w by cross-validation, split the labelled rows
            only, and put the unlabelled rows into every training set:
            `cv=[(np.r_[train, unlabelled], test) for ...]`. If you pass M to `fit`, do not split
            the rows, but set held-out labels to NaN.
        loss: a function of predictions (n, q) and labels (n, q) that replaces the squares, for
            `"sgd"`. It receives tensors and returns the mean over their elements, such as
            `torch.nn.HuberLoss()`. It is V in Equation 67 of Minh 2016.
        max_iter: the largest number of iterations of `"lsmr"`, 10·F if None, or of passes of
            `"sgd"`, 256 if None. You get a `ConvergenceWarning` if they do not suffice.
        tol: the tolerance of an iterative solver. For `"lsmr"`, it is the relative residual, 10⁻¹⁰
            if None. For `"sgd"`, it is the relative change of the predictions from pass k to pass
            2k, 0.01 if None.
        seed: the seed of the order in which `"sgd"` visits the points.

    Attributes:
        kernel_: the `ORFFKernel`. `kernel_.features(x)` is Φ(x), and `kernel_.num_features` is F.
        coef_: θ, (F,), or (F, q) for a scalar kernel and q > 1 columns of y.
        n_iter_: the number of iterations.
        n_features_in_: d, the number of input columns.
        feature_names_in_: the names of the input columns, if X was a DataFrame.

    Raises:
        TypeError: raised by `fit` if `kernel` is not a kernel, or `frequencies` is not a rule.
        ValueError: raised by `fit` if X is not finite; X and y have different lengths; no row of y
            has a label; α or w is negative; `solver` is unknown, or does not support this problem;
            C or M has a wrong shape; M is not symmetric or not positive semi-definite. After an
            error, the estimator is unchanged.

    Example:
        An incompressible flow from 100 noisy vectors:

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

        Choose α by cross-validation:

        >>> from sklearn.model_selection import GridSearchCV
        >>> search = GridSearchCV(model, {"alpha": [1e-3, 0.1, 10.0]}, cv=3)
        >>> search.fit(X, y).best_params_
        {'alpha': 0.1}

        Semi-supervised learning from thirty labels, three of them outliers. The Huber loss gives
        less weight to outliers than squares do:

        >>> import torch
        >>> few = y.copy()
        >>> few[30:], few[:3] = np.nan, [[4.0, -5.0], [-3.0, 6.0], [5.0, 3.5]]
        >>> model = model.set_params(laplacian_weight=0.01)
        >>> model.fit(X, few).score(X, y) < 0
        True
        >>> model = model.set_params(loss=torch.nn.HuberLoss(delta=0.1))
        >>> model.fit(X, few).score(X, y) > 0.9
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
        """Compute the weights, and return self.

        Args:
            X: points (N, d), with and without a label, an array, a DataFrame or a tensor.
            y: labels (N, q), or (N,) if q = 1. A row of NaN means that a point has no label.
            laplacian: M, a positive semi-definite array, tensor or scipy sparse matrix. A matrix
                (N, N) applies to each output of the kernel separately. A matrix (N·p, N·p) couples
                the p outputs, and its row n·p + i is output i at point n. If None,
                `graph_laplacian(X)` is used. M is ignored if `laplacian_weight=0`.
            combination: C, (q, p), for a kernel with p outputs; the identity if None.

        Raises:
            TypeError: one of the reasons listed at the class.
            ValueError: one of the reasons listed at the class.
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
        """Update the weights for a further chunk of data, and return self.

        The first chunk determines the features, and needs at least one label. If later chunks are
        at other places, pass a domain for the frequency grid, as in `gp_orff.Auto(domain=...)`.

        The solvers `"cholesky"` and `"stein"` add sufficient statistics. They give the same weights
        as `fit` with all chunks together. Each call costs O(F³) operations in addition to the pass
        over the chunk, so use large chunks. The solver `"sgd"` makes one pass over the chunk. If
        you pass a point twice, it has twice the weight. The first chunk should have about a
        thousand points from the whole domain.

        Args:
            X: points (N, d).
            y: labels (N, q), or (N,) if q = 1. Rows of NaN are ignored.

        Raises:
            ValueError: one of the reasons listed at the class; the solver is `"lsmr"`; w > 0; a
                chunk has other columns than the first one; points are outside the domain of a grid.
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
                    f"{self.laplacian_weight}; use fit with all points"
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
        """Return the solver with the chosen name, and the options of iterative solvers."""
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


_RATIOS = np.logspace(-6, 2, 17)  # the default α, divided by the variance of the kernel


class ORFFRidgeCV(FeatureRegressor):
    r"""`ORFFRidge` whose α minimises the generalised cross-validation error (GCV).

        GCV(α) = n ‖y − H y‖² / tr(I − H)² ,    H = Φ(ΦᵀΦ + α)⁻¹Φᵀ ,

    with the features Φ and the n values in y. GCV estimates the mean square error of predictions at
    held-out points. It needs one eigendecomposition for all α, so that a hundred values cost about
    as much as one.

    Use `GridSearchCV` with suitable folds instead if the noise of neighbours is correlated. If the
    data contain copies of a record, α is far too small, because copies look like data without
    noise. In this case, average them first, or use `GridSearchCV` with groups.

    Source: Golub, Heath & Wahba 1979, Technometrics 21. Brault et al. 2016 (Section 4.2) use 2-fold
    cross-validation, `GridSearchCV(ORFFRidge(kernel), {"alpha": alphas}, cv=2)`.

    Args:
        kernel: a kernel, as for `ORFFRidge`.
        frequencies: the rule that chooses the frequencies, as for `ORFFRidge`.
        alphas: the values of α to compare, positive numbers. If None, they are 17 values from 10⁻⁶
            to 10² times the variance of the kernel, in equal ratios.

    Attributes:
        alpha_: the chosen α.
        alphas_: the A compared values (A,), in ascending order.
        gcv_errors_: GCV for each value (A,), in the squared unit of y.
        kernel_: the `ORFFKernel`.
        coef_: θ, as for `ORFFRidge`.
        n_iter_: 1, because the solver is direct.
        n_features_in_: d, the number of input columns.

    `fit` warns if the best α is the smallest or the largest value.

    Raises:
        TypeError: raised by `fit` if `kernel` is not a kernel, or `frequencies` is not a rule.
        ValueError: raised by `fit` if `alphas` are not positive and finite, or for one of the
            reasons listed at `ORFFRidge`.

    Example:
        The noise variance is 0.1², and the GCV of the best α is close to it:

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
        """Choose α, compute the weights, and return self.

        Args:
            X: points (N, d).
            y: observed vectors (N, q), or (N,) if q = 1. Rows of NaN are ignored.

        Raises:
            TypeError: one of the reasons listed at the class.
            ValueError: one of the reasons listed at the class.
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
                "the generalised cross-validation error is smallest at "
                f"alpha={self.alpha_:.3g}, an end of the alphas from {min(alphas):.3g} to "
                f"{max(alphas):.3g}; pass alphas beyond this end",
                stacklevel=3,  # through the choice of threads
            )
        return self


def _checked(alphas: Sequence[float]) -> Float[np.ndarray, "A"]:
    """Return the α in ascending order, after checks."""
    values = np.sort(np.asarray(alphas, dtype=np.float64).ravel())
    if len(values) == 0 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"ORFFRidgeCV expects alphas, positive finite numbers, got {alphas!r}")
    return values


def _path(
    problem: Problem, alphas: Float[np.ndarray, "A"]
) -> tuple[list[Float[Tensor, "F _"]], Float[np.ndarray, "A"]]:
    """Return θ and the generalised cross-validation error for every α, by one decomposition."""
    x, y = problem.labels
    parts = design(problem.expansion, y.shape[-1])
    equations = Equations.of(parts, x, y)
    thetas = [parts.theta(equations.by_eigenvectors(alpha)) for alpha in alphas]
    weights = problem.expansion.column_weights(torch.stack(thetas, dim=-1).flatten(1))
    values = problem.expansion.phi.apply(x, weights).reshape(*y.shape, len(alphas))
    squares = (y.unsqueeze(-1) - values).square().sum((0, 1)).numpy()
    freedom = np.array([equations.residual_freedom(alpha, y.numel()) for alpha in alphas])
    return thetas, y.numel() * squares / freedom**2


# `OVKRidge`: ridge regression with an exact operator-valued kernel, without features.


@dataclass(frozen=True)
class ExactField:
    """The field f = Σ_j K(·, x_j) a_j."""

    kernel: Kernel
    x: Float[Tensor, "N d"]
    a: Float[Tensor, "N*p k"]
    combination: Float[Tensor, "q p"] | None  # C

    @torch.no_grad()
    def values(
        self, x: Float[Tensor, "n d"], combination: Float[Tensor, "q p"] | None
    ) -> Float[Tensor, "n q"]:
        """Return C f(x)."""

        def at(points: Float[Tensor, "m d"]) -> Float[Tensor, "m q"]:
            f = (self.kernel(points, self.x).to_dense() @ self.a).reshape(len(points), -1)
            return f if combination is None else f @ combination.mT

        return by_chunks(at, x, num_outputs(self.kernel) * len(self.a))


class OVKRidge(CombinedRegressor):
    r"""Ridge regression of vectors with an exact operator-valued kernel (OVK), for scikit-learn.

    The field f minimises, over the function space of the kernel K,

        Σ_n ‖C f(x_n) − y_n‖² + α ‖f‖²_K + w fᵀM f .

    `ORFFRidge` approximates K by features, and explains the labels y_n, the matrix C and the
    Laplacian M. By the representer theorem, f(x) = Σ_j K(x, x_j) a_j with a sum over all N points.
    The coefficients a_j satisfy

        (B K + α I) a = (J ⊗ C)ᵀ y ,    B = J ⊗ CᵀC + w M ,

    where the diagonal matrix J selects the points with a label. For p outputs, this needs O((N·p)³)
    operations, and memory for a few (N·p, N·p) matrices. Use it for few points, or to measure the
    error of features. With w = 0 and C = I, f is the posterior mean of a Gaussian process with
    noise variance α. Use `VectorFieldGP` for error bars.

    Source: Minh 2016, Theorem 13 and Equation 72, with α = lγ_A and w = lγ_I for l labelled points.

    Args:
        kernel: a gpytorch kernel with one output or with p outputs. It is copied and not trained. A
            scalar kernel predicts each column of y separately. If None, an `RBFKernel` is used,
            whose lengthscale is the median distance of the points.
        alpha: α > 0, as for `ORFFRidge`.
        laplacian_weight: w ≥ 0, the weight of the Laplacian.

    Attributes:
        kernel_: the kernel, in float64.
        dual_coef_: a, (N, p), or (N, q) for a scalar kernel and q columns of y. If w = 0, only
            points with a label are included.
        n_features_in_: d, the number of input columns.
        feature_names_in_: the names of the input columns, if X was a DataFrame.

    Raises:
        TypeError: raised by `fit` if `kernel` is not a kernel.
        ValueError: raised by `fit` if α is zero, or for one of the reasons listed at `ORFFRidge`.
            After an error, the estimator is unchanged.

    Example:
        Semi-supervised learning from ten labels and a hundred points, exact and with features:

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
        >>> model = ORFFRidge(kernel, rule, alpha=1e-3, laplacian_weight=1e-3)
        >>> difference = model.fit(X, y).predict(X) - exact.predict(X)
        >>> bool(np.abs(difference).max() < 0.05)
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
        """Compute the coefficients, and return self.

        Args:
            X: points (N, d), with and without a label.
            y: labels (N, q), or (N,) if q = 1. A row of NaN means that a point has no label.
            laplacian: M, (N, N) or (N·p, N·p), as for `ORFFRidge.fit`; `graph_laplacian(X)` if
                None.
            combination: C, (q, p), for a kernel with p outputs; the identity if None.

        Raises:
            TypeError: `kernel` is not a kernel.
            ValueError: α is zero, or one of the reasons listed at `ORFFRidge`.
        """
        with unchanged_on_failure(self), torch.no_grad():
            x, targets = self._read(X, y, reset=True)
            alpha = checked_number(self, "alpha")
            if alpha == 0:
                raise ValueError(
                    "OVKRidge expects alpha > 0, got 0; pass a small number, such as 1e-6 times "
                    "the variance of the kernel, or use ORFFRidge"
                )
            kernel = fixed_kernel(self, x)
            p = num_outputs(kernel)
            c = checked_combination(combination, p, targets.shape[-1])
            problem = Problem(None, x, targets, alpha, c, self._laplacian(laplacian, x, p))
            if problem.laplacian is None:  # points without a label have no effect
                problem = Problem(None, *problem.labels, alpha, c)
            a = coefficients(kernel(problem.x).to_dense(), problem)
            self._fitted = ExactField(kernel, problem.x, a, c)
            self.kernel_, self.dual_coef_ = kernel, a.reshape(len(problem.x), -1).numpy()
        return self


# Codes of classes: the corners of a simplex.


def simplex_codes(num_classes: int) -> Float[np.ndarray, "T T-1"]:
    """Return the T corners of a regular simplex around the origin, one unit vector for each class.

    The corners c_t are unit vectors with the largest possible separation. They satisfy Σ_t c_t = 0
    and ⟨c_s, c_t⟩ = −1/(T − 1) for s ≠ t. A classifier can fit a field f to the codes of labels.
    The predicted label is then argmax_t ⟨f(x), c_t⟩. A `SeparableKernel` with the root C has the
    covariance k(x, z) C Cᵀ. Its T outputs add up to zero.

    Source: Mroueh, Poggio, Rosasco and Slotine 2012, "Multiclass learning with simplex coding";
    Brault et al. 2016, Section 4.2.

    Args:
        num_classes: T ≥ 2, the number of classes.

    Returns:
        C, (T, T − 1), in float64, with c_t in row t.

    Raises:
        ValueError: `num_classes` is not an integer, or is less than two.

    Example:
        The inner products of three codes:

        >>> from gp_orff.regression import simplex_codes
        >>> codes = simplex_codes(3)
        >>> (codes @ codes.T).round(12)
        array([[ 1. , -0.5, -0.5],
               [-0.5,  1. , -0.5],
               [-0.5, -0.5,  1. ]])
    """
    if not is_number(num_classes, Integral) or num_classes < 2:
        raise ValueError(
            f"simplex_codes expects an integer of at least 2 classes, got {num_classes!r}; pass "
            "len(numpy.unique(labels))"
        )
    # The rows of Helmert's matrix are orthonormal and sum to zero: CCᵀ = (I − 11ᵀ/T) T/(T − 1).
    return helmert(num_classes).T * np.sqrt(num_classes / (num_classes - 1))


# `ORFFRidgeClassifier`: classification by a regression on the codes of classes.


_CODES: dict[str, Callable[[int], Float[np.ndarray, "T q"]]] = {
    "simplex": simplex_codes,
    "one-hot": np.eye,
}


def _is_label(value: object) -> bool:
    """Return whether a value is not None, NaN, or the NA of pandas."""
    try:
        return value is not None and bool(value == value)
    except TypeError:  # NA == NA is NA, which has no truth value
        return False


def _labels(y: ArrayLike) -> tuple[Shaped[np.ndarray, "l"], Bool[np.ndarray, "N"]]:
    """Return the labels (l,) of the points with a label, and which points these are (N,)."""
    if isinstance(y, list | tuple) and not all(map(_is_label, y)):
        y = np.array(y, dtype=object)  # in an array of strings, NaN would be the string "nan"
    values = column_or_1d(y, warn=True)
    labelled = np.array([_is_label(value) for value in values], dtype=bool)
    labels = values[labelled]
    if values.dtype.kind == "O" and not labelled.all():
        labels = np.array(labels.tolist())  # with the type of the labels, without None or NaN
    labels = check_array(labels, ensure_2d=False, dtype=None, input_name="y", ensure_min_samples=0)
    if len(labels):
        check_classification_targets(labels)
    return labels, labelled


class ORFFRidgeClassifier(ClassifierMixin, BaseEstimator):
    r"""A classifier by ridge regression on operator-valued Fourier features, for scikit-learn.

    Each of T classes has a code c_t, a vector (q,). `ORFFRidge` fits a field f = Φθ to the codes of
    the labels y_n. The predicted label is the class whose code has the largest inner product with
    the field:

        θ = argmin Σ_n ‖f(x_n) − c_{y_n}‖² + α‖θ‖² ,    label(x) = argmax_t ⟨f(x), c_t⟩ .

    - With `coding="simplex"`, the default, the codes are the corners of a simplex, with q = T − 1
      coordinates. See `simplex_codes`. Two classes have the codes ±1.
    - With `coding="one-hot"`, c_t is row t of the identity, with q = T. Use it if the codes C are
      part of the kernel, `SeparableKernel(k, root=C)`. The labels are then the same as with simplex
      codes, the scalar kernel k, and the penalty α(T − 1)/T.

    With a scalar kernel, both codings give the same labels. They are also the labels of
    scikit-learn's `RidgeClassifier(alpha=alpha, fit_intercept=False)` on the features Φ.

    Source: Brault et al. 2016, Section 4.2; Mroueh, Poggio, Rosasco and Slotine 2012, "Multiclass
    learning with simplex coding".

    Args:
        kernel: a scalar kernel, which is used for each of the q coordinates, or a kernel with q
            outputs. It is copied and not trained. If None, an `RBFKernel` is used, as for
            `ORFFRidge`.
        frequencies: the rule that chooses the frequencies; `gp_orff.Auto` if None, as for
            `ORFFRidge`.
        alpha: α ≥ 0, the penalty of the squared weights.
        coding: "simplex" or "one-hot".
        laplacian_weight: w ≥ 0, the weight of a penalty w fᵀMf at all points, with and without a
            label, as for `ORFFRidge`.
        loss: a function of the field (n, q) and of the codes (n, q) that replaces the squares. It
            receives tensors and returns the mean over their elements. For two classes with the
            codes ±1, `lambda f, c: (1 - c * f).clamp_min(0).square().mean()` is the loss of a
            support vector machine with squared slacks. Without the square, the loss has kinks, and
            converges slowly if α is small. With `coding="one-hot"`,
            `lambda f, c: torch.nn.functional.cross_entropy(f, c) / q` is the loss of logistic
            regression with q classes.
        solver: the method that computes θ, as for `ORFFRidge`.
        max_iter: the largest number of iterations, as for `ORFFRidge`.
        tol: the tolerance of an iterative solver, as for `ORFFRidge`.
        seed: the seed of the order in which `"sgd"` visits the points.

    Attributes:
        classes_: the T labels (T,), sorted.
        codes_: the codes of the labels, (T, q).
        regression_: the fitted `ORFFRidge`.
        kernel_: the `ORFFKernel`. `kernel_.features(X)` is Φ.
        coef_: θ, (F, q) for a scalar kernel and q > 1, and (F,) otherwise.
        n_iter_: the number of iterations, which is 1 for a direct solver.
        n_features_in_: d, the number of input columns.
        feature_names_in_: the names of the input columns, if X was a DataFrame.

    Example:
        Handwritten digits, with 1000 images for training:

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

        Two arcs with one label each. A support vector machine needs the Laplacian of a graph of all
        points to separate them:

        >>> import numpy as np
        >>> angle = np.linspace(0, np.pi, 100)
        >>> arc = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> X, y = np.concatenate([arc, [1, 0.4] - arc]), np.repeat([0.0, 1.0], 100)
        >>> few = np.full(200, np.nan)
        >>> few[[10, 110]] = 0, 1
        >>> slack = lambda f, c: (1 - c * f).clamp_min(0).square().mean()
        >>> kernel.lengthscale = 0.3
        >>> machine = ORFFRidgeClassifier(
        ...     kernel, gp_orff.MonteCarlo(100), alpha=1e-3, loss=slack
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
        """Fit the field to the codes of the labels, and return self.

        Args:
            X: points (N, d), with and without a label.
            y: labels (N,), which are integers, strings or booleans. NaN or None means that a point
                has no label.
            laplacian: M, (N, N) or (N·p, N·p), as for `ORFFRidge.fit`; `graph_laplacian(X)` if
                None.

        Raises:
            ValueError: the labels have one class only; `coding` is unknown; the kernel has neither
                one nor q outputs; or one of the reasons listed at `ORFFRidge`.
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
        vars(self).pop("feature_names_in_", None)  # from an earlier fit
        vars(self).update({n: value for n, value in vars(regression).items() if n.endswith("_")})
        self.classes_, self.codes_, self.regression_ = classes, codes, regression
        return self

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the fraction of correct labels, among the points with a label in `y`.

        Args:
            X: points (n, d).
            y: labels (n,). NaN or None means that a point has no label.
            sample_weight: weights (n,) of the points; equal weights if None.

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: one of the reasons listed at `ORFFRidge.predict`.
        """
        labels, labelled = _labels(y)
        weights = None if sample_weight is None else np.asarray(sample_weight)[labelled]
        return accuracy_score(labels, self.predict(X)[labelled], sample_weight=weights)

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "N T"] | Float[np.ndarray, "N"]:
        """Return the scores ⟨f(x), c_t⟩ of the classes.

        Args:
            X: points (N, d).

        Returns:
            The scores (N, T) in the order of `classes_`. The largest score gives the label. For two
            classes, the result is half of the difference of both scores, (N,). It is positive if
            the label is `classes_[1]`.

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: one of the reasons listed at `ORFFRidge.predict`.
        """
        check_is_fitted(self)
        field = self.regression_.predict(X)
        scores = field.reshape(-1, self.codes_.shape[1]) @ self.codes_.T
        return scores if len(self.classes_) > 2 else (scores[:, 1] - scores[:, 0]) / 2

    def predict(self, X: ArrayLike) -> Shaped[np.ndarray, "N"]:
        """Return the predicted labels (N,), elements of `classes_`.

        Args:
            X: points (N, d).

        Raises:
            NotFittedError: `fit` was not called.
            ValueError: one of the reasons listed at `ORFFRidge.predict`.
        """
        scores = self.decision_function(X)
        best = scores > 0 if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[np.asarray(best, dtype=int)]

    def _codes(self, classes: Shaped[np.ndarray, "T"]) -> Float[np.ndarray, "T q"]:
        if len(classes) < 2:
            raise ValueError(
                "ORFFRidgeClassifier expects labels of at least two classes, got "
                f"{'one class' if len(classes) else 'no label'}: {classes.tolist()}; add points of "
                "another class"
            )
        if self.coding not in tuple(_CODES):
            raise ValueError(
                f"ORFFRidgeClassifier expects one of the codings {sorted(_CODES)}, got "
                f'{self.coding!r}; use "simplex", unless the codes are the root of the kernel'
            )
        return _CODES[self.coding](len(classes))

    def _check_outputs(self, codes: Float[np.ndarray, "T q"]) -> None:
        if not isinstance(self.kernel, Kernel):  # None, or an error of `ORFFRidge`
            return
        point = torch.zeros(1, 1)
        outputs, (T, q) = self.kernel.num_outputs_per_input(point, point), codes.shape
        if outputs not in (1, q):
            raise ValueError(
                f"ORFFRidgeClassifier expects a kernel with 1 or {q} outputs for {T} classes and "
                f"coding={self.coding!r}, got {outputs} outputs; pass a scalar kernel, or "
                f"SeparableKernel(kernel, root) with a root of {q} rows"
            )
