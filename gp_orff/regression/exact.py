"""`OVKRidge`: ridge regression by an exact operator-valued kernel, without features."""

from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from gp_orff.features.chunked import by_chunks
from gp_orff.kernels.tree import num_outputs
from gp_orff.regression.base import (
    CombinedRegressor,
    Matrix,
    Problem,
    checked_combination,
    checked_number,
    fixed_kernel,
    unchanged_on_failure,
)
from gp_orff.regression.direct import coefficients
from gp_orff.threads import chosen_threads


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
            kernel = fixed_kernel(self.kernel, x)
            if not isinstance(kernel, Kernel):
                raise TypeError(
                    "OVKRidge expects a gpytorch kernel, such as gp_orff.CurlFreeKernel(), got "
                    f"{kernel!r}; pass an instance"
                )
            p = num_outputs(kernel)
            c = checked_combination(combination, p, targets.shape[-1])
            problem = Problem(None, x, targets, alpha, c, self._laplacian(laplacian, x, p))
            if problem.laplacian is None:  # only labels count
                problem = Problem(None, *problem.labels, alpha, c)
            a = coefficients(kernel(problem.x).to_dense(), problem)
            self._fitted = ExactField(kernel, problem.x, a, c)
            self.kernel_, self.dual_coef_ = kernel, a.reshape(len(problem.x), -1).numpy()
        return self
