"""`ORFFRidgeClassifier`: classes as vertices of a simplex."""

from collections.abc import Callable
from numbers import Integral

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Shaped
from numpy.typing import ArrayLike
from scipy.linalg import helmert
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, column_or_1d

from gp_orff.exact_gp.orff_kernel import ORFFKernel
from gp_orff.features.draws import Rule
from gp_orff.regression.ridge import ORFFRidge

# Codes of classes: the corners of a simplex.


def simplex_codes(num_classes: int) -> Float[np.ndarray, "T T-1"]:
    """The T corners of a regular simplex around the origin: one unit vector for each class.

    ⟨c_s, c_t⟩ = −1/(T − 1) for s ≠ t, the most separated T unit vectors, and Σ_t c_t = 0. A field f
    that is regressed on the codes of labels gives the label argmax_t ⟨f(x), c_t⟩. As columns of a
    root, the same codes make a kernel of T outputs, k(x, z) C Cᵀ, which sum to zero.

    Mroueh, Poggio, Rosasco and Slotine 2012, "Multiclass learning with simplex coding"; Brault et
    al. 2016, Section 4.2.

    Args:
        num_classes: T ≥ 2.

    Returns:
        C (T, T − 1) in float64; row t is c_t.

    Raises:
        ValueError: `num_classes` is no integer, or less than two.

    Example:
        >>> from gp_orff.regression import simplex_codes
        >>> codes = simplex_codes(3)
        >>> (codes @ codes.T).round(12)
        array([[ 1. , -0.5, -0.5],
               [-0.5,  1. , -0.5],
               [-0.5, -0.5,  1. ]])
    """
    if not isinstance(num_classes, Integral) or num_classes < 2:
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


class ORFFRidgeClassifier(ClassifierMixin, BaseEstimator):
    r"""Classifier by ridge regression on operator-valued Fourier features and codes of classes.

    Class t of T has a code c_t, a vector of q numbers. `ORFFRidge` fits a field f to the codes of
    the labels, and the label of a point is that of the code along which the field is longest:

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
        kernel: a scalar kernel, which serves each of the q coordinates, or a kernel with q outputs;
            None and its hyperparameters are as for `ORFFRidge`.
        frequencies: the rule that chooses the frequencies; None as for `ORFFRidge`.
        alpha: α ≥ 0, the penalty of the squared weights.
        coding: "simplex" or "one-hot".
        solver, max_iter, tol, seed: as for `ORFFRidge`.

    Attributes:
        classes_: the labels (T,), sorted.
        codes_: their codes (T, q).
        regression_: the fitted `ORFFRidge`, with the weights θ in its `coef_`.

    Example:
        >>> import gp_orff, gpytorch
        >>> from gp_orff.regression import ORFFRidgeClassifier
        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits(return_X_y=True)
        >>> kernel = gpytorch.kernels.RBFKernel()
        >>> kernel.lengthscale = 30.0
        >>> classifier = ORFFRidgeClassifier(kernel, gp_orff.MonteCarlo(200), alpha=0.1)
        >>> classifier.fit(X[:1000], y[:1000]).score(X[1000:], y[1000:]) > 0.9
        True
    """

    def __init__(
        self,
        kernel: Kernel | None = None,
        frequencies: Rule | None = None,
        alpha: float = 1.0,
        coding: str = "simplex",
        *,
        solver: str = "auto",
        max_iter: int | None = None,
        tol: float | None = None,
        seed: int = 0,
    ):
        self.kernel = kernel
        self.frequencies = frequencies
        self.alpha = alpha
        self.coding = coding
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed

    def fit(self, X: ArrayLike, y: ArrayLike) -> "ORFFRidgeClassifier":
        """Fit the field to the codes of the labels.

        Args:
            X: points (N, d).
            y: labels (N,): integers, strings or booleans.

        Returns:
            This classifier.

        Raises:
            ValueError: labels of one class only, an unknown `coding`, a kernel whose number of
                outputs is neither 1 nor q; and as for `ORFFRidge.fit`.
        """
        labels = column_or_1d(y, warn=True)
        labels = check_array(labels, ensure_2d=False, dtype=None, input_name="y")
        check_classification_targets(labels)
        classes, indices = np.unique(labels, return_inverse=True)
        codes = self._codes(classes)
        self._check_outputs(codes)
        options = {name: getattr(self, name) for name in ("solver", "max_iter", "tol", "seed")}
        regression = ORFFRidge(self.kernel, self.frequencies, self.alpha, **options)
        regression.fit(X, codes[indices])
        self.classes_, self.codes_, self.regression_ = classes, codes, regression
        return self

    def decision_function(self, X: ArrayLike) -> Float[np.ndarray, "N T"] | Float[np.ndarray, "N"]:
        """The scores of the classes, ⟨f(x), c_t⟩; of two classes, half the difference of both.

        Args:
            X: points (N, d).

        Returns:
            (N, T) in the order of `classes_`, whose largest is the label; for two classes (N,),
            positive where the label is `classes_[1]`.

        Raises:
            NotFittedError: before `fit`.
            ValueError: as for `ORFFRidge.predict`.
        """
        check_is_fitted(self)
        field = self.regression_.predict(X)
        scores = field.reshape(-1, self.codes_.shape[1]) @ self.codes_.T
        return scores if len(self.classes_) > 2 else (scores[:, 1] - scores[:, 0]) / 2

    def predict(self, X: ArrayLike) -> Shaped[np.ndarray, "N"]:
        """The labels (N,) of the points `X` (N, d), as those of `y` in `fit`.

        Raises:
            NotFittedError: before `fit`.
            ValueError: as for `ORFFRidge.predict`.
        """
        scores = self.decision_function(X)
        best = scores > 0 if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[np.asarray(best, dtype=int)]

    @property
    def kernel_(self) -> ORFFKernel:
        """The kernel with its frequencies; `kernel_.features(X)` is Φ."""
        return self.regression_.kernel_

    @property
    def coef_(self) -> Float[np.ndarray, "*F"]:
        """θ: (F, q) with a scalar kernel, (F,) with a kernel of q outputs, or q = 1."""
        return self.regression_.coef_

    @property
    def n_iter_(self) -> int:
        """How many iterations the solver took; 1 if it is direct."""
        return self.regression_.n_iter_

    @property
    def n_features_in_(self) -> int:
        """d, the number of inputs."""
        return self.regression_.n_features_in_

    @property
    def feature_names_in_(self) -> Shaped[np.ndarray, "d"]:
        """The names of the inputs (d,), if `fit` was given a table with names."""
        return self.regression_.feature_names_in_

    def _codes(self, classes: Shaped[np.ndarray, "T"]) -> Float[np.ndarray, "T q"]:
        if len(classes) < 2:
            raise ValueError(
                "ORFFRidgeClassifier expects labels of at least two classes, got one class: "
                f"{classes.tolist()}; there is nothing to distinguish, add points of another class"
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
