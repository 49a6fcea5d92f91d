"""The problem of ridge regression, with direct and iterative solvers."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, lsmr
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import Expansion, KroneckerExpansion
from gp_orff.kernels.base import is_number
from gp_orff.regression.laplacian import Matrix, penalty, scaled_column_penalty

# The learning problem min_θ Σ ‖C f(x_i) − y_i‖² + α‖θ‖² + w fᵀMf.
#
# The sum is over labelled points. In the penalty, f = Φθ is the field at all points. This is
# Equation 67 of Minh 2016 with the square loss, times the number of labelled points.


@dataclass(frozen=True)
class Problem:
    """The points, targets and penalties of ridge regression of a field f with p outputs.

    Attributes:
        expansion: the features of f; None for an exact kernel.
        x: (N, d), the points.
        y: (N, q), the targets, with NaN in rows without a label.
        alpha: α.
        combination: C, (q, p); the identity if None.
        laplacian: w M, (N, N) or (N·p, N·p); zero if None.
    """

    expansion: Expansion | None
    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N q"]
    alpha: float
    combination: Float[Tensor, "q p"] | None = None
    laplacian: Matrix | None = None

    @cached_property
    def labelled(self) -> Bool[Tensor, "N"]:
        """Which points have a label, (N,)."""
        return ~self.y.isnan().any(-1)

    @property
    def labels(self) -> tuple[Float[Tensor, "l d"], Float[Tensor, "l q"]]:
        """The points with a label (l, d), and their labels (l, q)."""
        if self.labelled.all():
            return self.x, self.y
        return self.x[self.labelled], self.y[self.labelled]

    @property
    def observed(self) -> Expansion:
        """The features of C f."""
        return combined(self.expansion, self.combination)


def combined(expansion: Expansion, combination: Float[Tensor, "q p"] | None) -> Expansion:
    """Return the features of C f from the features of f."""
    if combination is None:
        return expansion
    if expansion.is_kronecker:
        return replace(expansion, mixing=combination @ expansion.mixing)
    full = expansion.general()
    return replace(full, directions=full.directions @ combination.mT)


# The protocol of solvers.


@dataclass(frozen=True)
class Options:
    """The options of iterative solvers; see `ORFFRidge`.

    Raises:
        ValueError: an option has an invalid value.
    """

    max_iter: int | None = None
    tol: float | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    seed: int = 0

    def __post_init__(self):
        valid = {
            "max_iter a positive integer or None": self.max_iter is None
            or (is_number(self.max_iter, Integral) and self.max_iter >= 1),
            "tol a number >= 0 or None": self.tol is None
            or (is_number(self.tol) and self.tol >= 0),
            "loss a function such as torch.nn.HuberLoss() or None": self.loss is None
            or callable(self.loss),
            "seed an integer >= 0": is_number(self.seed, Integral) and self.seed >= 0,
        }
        for words, holds in valid.items():
            if not holds:
                value = getattr(self, words.split()[0])
                raise ValueError(f"expected {words}, got {value!r}")


@dataclass(frozen=True)
class Solution:
    """The solution of a `Problem`.

    Attributes:
        theta: the weights of the features, (F, q) for a scalar kernel, and (F, 1) otherwise.
        num_iterations: the number of iterations.
        statistics: the sufficient statistics of all data, from which `partial` continues.
        descent: the state of stochastic gradients, from which `partial` continues.
    """

    theta: Float[Tensor, "F _"]
    num_iterations: int = 1
    statistics: Statistics | None = None
    descent: "Descent | None" = None


class Solver(ABC):
    """A method that solves a `Problem`."""

    name: str

    @abstractmethod
    def solve(self, problem: Problem, options: Options) -> Solution:
        """Return the minimiser."""

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        """Return the solution for the data of `problem` and all earlier data.

        Args:
            problem: the new data, with the features and the penalty.
            options: the options of the solver.
            earlier: the last problem and its solution; None for the first chunk.

        Raises:
            ValueError: this solver needs all data at once, or another solver computed the earlier
                solution.
        """
        raise ValueError(
            "partial_fit expects a solver that supports data in chunks, got "
            f"solver={self.name!r}; use 'cholesky' or 'sgd', or fit"
        )


def _of_another_solver() -> ValueError:
    return ValueError(
        "expected a model that was fitted without a Laplacian by the same solver, got another "
        "one; pass all data to fit, or start from a clone"
    )


def refuse_loss(name: str, options: Options) -> None:
    """Raise a ValueError if the options have a loss."""
    if options.loss is not None:
        raise ValueError(
            f"solver={name!r} minimises squares and expects loss=None, got {options.loss!r}; use "
            "solver='sgd'"
        )


# Regularised least squares on features: min_θ ‖Φθ − y‖² + α‖θ‖² + w fᵀMf.
#
# If the outputs separate, the problem is k scalar problems with shared features Ψ:
#
#     t_j = argmin ‖σ_j Ψ t − y_j‖² + α‖t‖² = (σ_j² ΨᵀΨ + α)⁻¹ σ_j Ψᵀy_j
#         = σ_j Ψᵀ (σ_j² ΨΨᵀ + α)⁻¹ y_j .
#
# For a separable kernel k·L Lᵀ, Ψ = φS are the features of k. With the singular value decomposition
# L = P diag(σ) Uᵀ, the y_j are the columns of Y P, and Θ = T Uᵀ. With a scalar kernel, each column
# of Y is one problem. For all other kernels, Ψ = Φ has one row for each output of each point, and
# k = 1.


@dataclass(frozen=True)
class Design:
    """The k scalar problems of least squares for targets y (N, q).

    Problem j is to fit σ_j Ψ t_j to targets y_j. All problems share the matrix Ψ. The function
    `design` makes a `Design` or a `SeparableDesign`.

    Attributes:
        expansion: the features, from which Ψ follows.
        scales: σ, (k,), the factor of Ψ in each problem.
    """

    expansion: Expansion
    scales: Float[Tensor, "k"]

    def targets(self, y: Float[Tensor, "N q"]) -> Float[Tensor, "n k"]:
        """Return the targets y_j, with a row for each row of Ψ."""
        return y if self.expansion.num_outputs == 1 else y.reshape(-1, 1)

    def rows(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "n m"]:
        """Return Ψ as a dense matrix, for few points."""
        return self.expansion.features(x)

    def statistics(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> Statistics:
        """Return the sufficient statistics of points and targets."""
        return Statistics.of(x, y, self.expansion.phi)

    def gram(self, statistics: Statistics) -> Float[Tensor, "m m"]:
        """Return ΨᵀΨ."""
        full = self.expansion.general()
        (gram,) = statistics.feature_grams(full)
        return gram * (full.directions @ full.directions.mT)

    def right(self, statistics: Statistics) -> Float[Tensor, "m k"]:
        """Return Ψᵀy_j for every j."""
        full = self.expansion.general()
        products = full.gather(statistics.cross) * full.directions
        return products if full.num_outputs == 1 else products.sum(-1, keepdim=True)

    def theta(self, t: Float[Tensor, "m k"]) -> Float[Tensor, "F _"]:
        """Return the weights θ of the features from the t_j."""
        return t

    def penalty(self, problem: Problem) -> Float[Tensor, "m m"]:
        """Return Ψᵀ w M Ψ."""
        return penalty(problem.expansion.general(), problem.x, problem.laplacian)

    @property
    def is_separable(self) -> bool:
        """Whether the outputs separate into scalar problems."""
        return self.expansion.num_outputs == 1

    def num_rows(self, num_points: int) -> int:
        """Return n, the number of rows of Ψ."""
        return num_points * self.expansion.num_outputs

    @property
    def num_columns(self) -> int:
        """m, the number of columns of Ψ."""
        return self.expansion.num_features


@dataclass(frozen=True)
class SeparableDesign(Design):
    """The scalar problems of a separable kernel k·L Lᵀ, with L = P diag(σ) Uᵀ.

    Attributes:
        left: P, (p, k). The targets y_j are the columns of Y P.
        rotation: U, (r, k).
    """

    is_separable = True
    expansion: KroneckerExpansion
    left: Float[Tensor, "p k"]
    rotation: Float[Tensor, "r k"]

    def targets(self, y):
        return y @ self.left

    def rows(self, x):
        return self.expansion.phi.values(x) * self.expansion.scales.mT

    def gram(self, statistics):
        return self.expansion.scales * statistics.gram * self.expansion.scales.mT

    def right(self, statistics):
        return self.expansion.scales * statistics.cross @ self.left

    def theta(self, t):
        return (t @ self.rotation.mT).reshape(-1, 1)

    def penalty(self, problem):
        return scaled_column_penalty(problem.expansion, problem.x, problem.laplacian)

    def num_rows(self, num_points):
        return num_points

    @property
    def num_columns(self):
        return self.expansion.num_columns


def design(expansion: Expansion, num_targets: int) -> Design:
    """Return the scalar problems of an expansion, for targets with `num_targets` columns."""
    if expansion.is_kronecker and expansion.num_outputs > 1:
        left, scales, right = torch.linalg.svd(expansion.mixing, full_matrices=False)
        return SeparableDesign(expansion, scales, left, right.mT)
    columns = num_targets if expansion.num_outputs == 1 else 1
    return Design(expansion, torch.ones(columns, dtype=torch.float64))


# The equations of the scalar problems of a design, and their solution for one α or for many.
#
# The smaller one of the primal form (m features) and the dual form (n rows) is solved. For one α,
# this needs one Cholesky factor for each different σ_j. If α is below the rounding error of the
# matrix, a factor may fail or be meaningless. Eigenvectors with a threshold then give the solution
# of least norm. Eigenvectors are also used for many α, because they do not depend on α.


_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Equations:
    """The equations (σ_j² A + α) s_j = σ_j r_j.

    In the primal form, A = ΨᵀΨ and t_j = s_j. In the dual form, A = ΨΨᵀ and t_j = Ψᵀ s_j.

    Attributes:
        matrix: A, (n, n).
        right: r, (n, k).
        scales: σ, (k,).
        rows: Ψ, (n, m), in the dual form; None in the primal form.
    """

    matrix: Float[Tensor, "n n"]
    right: Float[Tensor, "n k"]
    scales: Float[Tensor, "k"]
    rows: Float[Tensor, "n m"] | None = None

    @classmethod
    def primal(cls, design: Design, statistics: Statistics) -> "Equations":
        """Return the primal form from sufficient statistics."""
        return cls(design.gram(statistics), design.right(statistics), design.scales)

    @classmethod
    def of(cls, design: Design, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> "Equations":
        """Return the smaller one of both forms (Minh 2016, Equation 75)."""
        if design.num_rows(len(x)) < design.num_columns:
            rows = design.rows(x)
            return cls(rows @ rows.mT, design.targets(y), design.scales, rows)
        return cls.primal(design, design.statistics(x, y))

    def by_cholesky(self, alpha: float) -> Float[Tensor, "m k"]:
        """Return the t_j, by one Cholesky factor for each different σ_j.

        If α is below the rounding error of the matrix, eigenvectors are used instead.
        """
        solution = torch.zeros_like(self.right)
        same = 4 * _EPS * self.scales.max()  # smaller differences are rounding
        left = self.scales > same
        while left.any():
            scale = self.scales[left][0]
            a = scale.square() * self.matrix
            rounding = len(a) * _EPS * a.diagonal().max()
            a.diagonal().add_(alpha)
            factor, failed = torch.linalg.cholesky_ex(a)
            if failed or alpha < rounding:
                return self.by_eigenvectors(alpha)
            equal = (self.scales - scale).abs() <= same
            left &= ~equal
            solution[:, equal] = torch.cholesky_solve(scale * self.right[:, equal], factor)
        return self._weights(solution)

    def by_eigenvectors(self, alpha: float) -> Float[Tensor, "m k"]:
        """Return the t_j. If α = 0 does not determine them, they have the least norm."""
        return self._weights(self._decomposed[1] @ (self._inverse(alpha) * self._rotated))

    def residual_freedom(self, alpha: float, num_values: int) -> float:
        """Return tr(I − H) for the matrix H that maps `num_values` values y to predictions."""
        inverse = self._inverse(alpha)
        # If an eigenvalue is zero up to rounding, the prediction is zero, and its share is one.
        share = torch.where(inverse > 0, alpha * inverse, 1.0)
        return num_values - share.numel() + share.sum().item()

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "n k"]:
        """The eigenvalues of every σ_j² A, without rounding errors below zero."""
        return self._decomposed[0].clamp_min(0).unsqueeze(-1) * self.scales.square()

    def _inverse(self, alpha: float) -> Float[Tensor, "n k"]:
        """Return 1/(λ + α) for every eigenvalue λ, or 0 if λ + α is below the rounding of A."""
        rounding = len(self.matrix) * _EPS * self.eigenvalues[-1]
        denominators = self.eigenvalues + alpha
        return torch.where(denominators > rounding, 1 / denominators, 0.0)

    @cached_property
    def _decomposed(self) -> tuple[Float[Tensor, "n"], Float[Tensor, "n n"]]:
        return torch.linalg.eigh(self.matrix)

    @cached_property
    def _rotated(self) -> Float[Tensor, "n k"]:
        return self._decomposed[1].mT @ (self.scales * self.right)

    def _weights(self, s: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        return s if self.rows is None else self.rows.mT @ s


# Direct solvers of the normal equations of the F weights, or of N·p coefficients.
#
# These are Equations 74 and 72 of Minh 2016. The smaller system is solved (Equation 75).


class Direct(Solver):
    """A solver that uses the sufficient statistics of the data, which are sums over chunks."""

    _solve: Callable[[Equations, float], Float[Tensor, "m k"]]

    def check(self, problem: Problem) -> None:
        """Raise a ValueError if this solver does not support the problem."""
        return

    def solve(self, problem: Problem, options: Options) -> Solution:
        self.check(problem)
        refuse_loss(self.name, options)
        num_values = len(problem.x) * problem.expansion.num_outputs
        is_dual = num_values < problem.expansion.num_features and problem.alpha > 0
        if is_dual and problem.laplacian is not None:
            phi = problem.expansion.features(problem.x)  # (N·p, F)
            return Solution(phi.mT @ coefficients(phi @ phi.mT, problem))
        expansion = problem.observed.general() if _couples(problem) else problem.observed
        parts = design(expansion, problem.y.shape[-1])
        if problem.laplacian is None:
            equations = Equations.of(parts, *problem.labels)
        else:
            equations = Equations.primal(parts, parts.statistics(*problem.labels))
            equations = replace(equations, matrix=equations.matrix + parts.penalty(problem))
        return Solution(parts.theta(self._solve(equations, problem.alpha)))

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        self.check(problem)
        refuse_loss(self.name, options)
        parts = design(problem.observed, problem.y.shape[-1])
        statistics = parts.statistics(*problem.labels)
        if earlier is not None:
            before, solution = earlier
            if solution.descent is not None or before.laplacian is not None:
                raise _of_another_solver()
            first = solution.statistics
            statistics += parts.statistics(*before.labels) if first is None else first
        theta = parts.theta(self._solve(Equations.primal(parts, statistics), problem.alpha))
        return Solution(theta, statistics=statistics)


class Cholesky(Direct):
    """The solver by Cholesky factors."""

    name = "cholesky"
    _solve = staticmethod(Equations.by_cholesky)


class Stein(Direct):
    """The solver by eigenvectors, for the Stein equation G Θ LᵀL + α Θ = ΨᵀY L.

    Separable kernels have this equation (Brault et al. 2016, Equation 11).
    """

    name = "stein"
    _solve = staticmethod(Equations.by_eigenvectors)

    def check(self, problem: Problem) -> None:
        parts = design(problem.observed, problem.y.shape[-1])
        if not parts.is_separable or _couples(problem):
            raise ValueError(
                "solver='stein' expects a separable kernel, such as gp_orff.SeparableKernel, "
                "MultitaskKernel or a scalar kernel, and no laplacian that couples its outputs, "
                "got outputs that do not separate; use solver='cholesky'"
            )


def _couples(problem: Problem) -> bool:
    """Return whether the Laplacian couples the scalar problems of a separable kernel."""
    if problem.laplacian is None:
        return False
    return problem.combination is not None or problem.laplacian.shape[0] != len(problem.x)


def coefficients(gram: Float[Tensor, "n n"], problem: Problem) -> Float[Tensor, "n _"]:
    """Return the coefficients a of f = Σ_j K(·, x_j) a_j.

    They satisfy (B K + α) a = C*y with B = C*C + w M (Minh 2016, Equation 72), where C also selects
    the points with a label.

    Args:
        gram: K at all points, (N·p, N·p).
        problem: the points, targets and penalties. If K is scalar and `combination` is None, each
            column of y has a column of coefficients.
    """
    p = len(gram) // len(problem.x)
    c = torch.eye(p, dtype=gram.dtype) if problem.combination is None else problem.combination
    seen = problem.labelled.to(gram)
    y = torch.where(problem.labelled.unsqueeze(-1), problem.y, 0.0)
    right = y if problem.combination is None and p == 1 else (y @ c).reshape(-1, 1)
    b = torch.kron(seen.diag(), c.mT @ c)
    if problem.laplacian is not None:
        b += torch.from_numpy(_dense(problem.laplacian, len(gram)))
    # The product of two symmetric matrices is not symmetric, so there is no Cholesky factor.
    system = b @ gram
    system.diagonal().add_(problem.alpha)
    return torch.linalg.solve(system, right)


def _dense(laplacian: Matrix, size: int) -> Float[np.ndarray, "n n"]:
    """Return M, or M ⊗ I_p if M is (N, N), as a dense matrix with `size` = N·p rows."""
    dense = laplacian.toarray() if sparse.issparse(laplacian) else laplacian
    return np.kron(dense, np.eye(size // len(dense)))


# Stochastic gradient descent on the weights of features, for any loss and without a learning rate.
#
# The step length is distance over gradients (DoG). The coordinates are chosen so that features of a
# sample have similar variances. The iterates are averaged.
#
# 1. `Descent.start` samples rows of Φ. Their principal directions define coordinates u, in which
#    large variances are reduced to one limit (`Whitening`). Otherwise, the largest variance would
#    limit the steps, and iterates would barely move along other directions. Directions that the
#    sample does not determine are unchanged.
# 2. `reaching` chooses the first step so that predictions have the size of y, and halves it while
#    the loss grows. DoG then increases the steps as the iterate moves away from the start.
# 3. `pass_over` visits the points in random order, in batches of at most 64.
# 4. Single iterates fluctuate with the batches. The result is thus an average of the iterates with
#    weights ∝ (t/T)⁸. The power makes the weights of early iterates small.
#
# The penalty of a Laplacian M is not a sum over the points of a batch. It is quadratic in θ, like
# α‖θ‖², and both are one penalty: α‖θ‖² + w fᵀMf = α‖v‖² for v = Lᵀθ, L Lᵀ = I + (w/α) ΦᵀMΦ. In v,
# this is a problem without M, with the features ΦL⁻ᵀ of another kernel (Sindhwani, Niyogi & Belkin
# 2005). The descent minimises over v (`Whitening.factor`), with any loss.


Loss = Callable[[Tensor, Tensor], Tensor]

_BATCH = 64  # the largest number of points in a step
_STEPS = 16  # the smallest number of steps in a pass, if there are enough points
_SAMPLE = 1024  # the largest number of rows of Φ for the principal directions,
_SAMPLE_NUMBERS = 2**25  # and the largest number of their elements: 256 MB
_ROUNDING = 1e-8  # the rounding of variances, relative to the largest one
_HALVINGS = 20  # the largest number of times that the first step is halved
_DECAY = 8  # after t steps, step s has a weight ∝ (s/t)^8 in the average


@dataclass(frozen=True)
class Whitening:
    """Coordinates u of the weights θ, in which no direction of the features has a large variance.

        v = u + V diag(gains) Vᵀu ,    θ = L⁻ᵀv .

    The columns of V are principal directions of a sample of rows of ΦL⁻ᵀ. The factor L includes the
    penalty of a Laplacian; without a Laplacian, L = I and θ = v. If the features have the variance
    λ along a principal direction, they have the variance λδ/(λ + δ) < δ in u. A gradient step
    therefore advances about equally along all directions with λ > δ.

    The limit δ is chosen from the sample. At most a quarter as many directions as rows have λ > δ,
    because the sample does not determine the others.

    Source: Ma & Belkin 2017 (EigenPro), who replace each variance λ > δ by δ.

    Attributes:
        vectors: V, (F, r).
        gains: the factors √(δ/(λ + δ)) − 1 of the r directions, (r, 1).
        row_size: the root mean square length of the rows of Φ in the coordinates u.
        factor: L, (F, F); the identity if None.
    """

    vectors: Float[Tensor, "F r"]
    gains: Float[Tensor, "r 1"]
    row_size: float
    factor: Float[Tensor, "F F"] | None = None

    @classmethod
    def of(
        cls,
        features: Float[Tensor, "n F"],
        least: float,
        factor: Float[Tensor, "F F"] | None = None,
    ) -> "Whitening":
        """Return the coordinates for n rows of Φ, with δ ≥ `least`, and with L = `factor`."""
        if factor is not None:
            features = torch.linalg.solve_triangular(factor, features.mT, upper=False).mT
        _, singular, vectors = torch.linalg.svd(features, full_matrices=False)
        variance = singular.square() / len(features)
        determined = min(len(features) // 4, len(variance) - 1)
        limit = variance[determined].clamp_min(max(least, _ROUNDING * variance[0].item()))
        share = limit / (variance + limit)
        row_size = (share * variance).sum().sqrt().item()
        return cls(vectors.mT, (share.sqrt() - 1).unsqueeze(-1), row_size, factor)

    def penalised(self, u: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """Return v = u + V diag(gains) Vᵀu; the penalty is proportional to ‖v‖²."""
        return u + self.vectors @ (self.gains * (self.vectors.mT @ u))

    def theta(self, v: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """Return θ from v."""
        if self.factor is None:
            return v
        return torch.linalg.solve_triangular(self.factor.mT, v, upper=True)


@dataclass(frozen=True)
class Descent:
    """The state of a stochastic gradient descent after some steps, which is immutable.

    The descent minimises Σ loss + α‖v‖², divided by the number of values in the sum. A step is
    u ← u − η g, with the gradient g for up to 64 points and η = max_t ‖u_t − u_0‖ / (Σ_t ‖g_t‖²)^½.
    This step length is suitable for losses of any scale and smoothness. In the average of u after T
    steps, step t has a weight ∝ (t/T)^8.

    Source: Ivgi, Hinder & Carmon 2023, Equation 1 (DoG); Shamir & Zhang 2013 (polynomial-decay
    averaging).

    Attributes:
        expansion: the features Φ.
        whitening: the map from u to v and to the weights θ.
        seed: the seed of the order of the points.
        u: the last iterate, (F, k).
        average: the average of the iterates, (F, k).
        reach: max_t ‖u_t − u_0‖ with u_0 = 0, but at least the length of the first step.
        squares: Σ_t ‖g_t‖².
        steps: the number of steps.
        passes: the number of passes.
        num_points: the number of points in all passes together.
    """

    expansion: Expansion
    whitening: Whitening
    seed: int
    u: Float[Tensor, "F k"]
    average: Float[Tensor, "F k"]
    reach: float
    squares: float = 0.0
    steps: int = 0
    passes: int = 0
    num_points: int = 0

    @classmethod
    @torch.no_grad()
    def start(
        cls,
        expansion: Expansion,
        x: Float[Tensor, "N d"],
        y: Float[Tensor, "N q"],
        loss: Loss,
        penalty: float,
        seed: int,
        factor: Float[Tensor, "F F"] | None = None,
    ) -> "Descent":
        """Return the state of a descent at θ = 0, before its first step.

        A sample of at most 1024 points determines the map from u to θ (`Whitening`) and the length
        of the first step (`reaching`).

        Args:
            expansion: the features Φ of q outputs, or of one output if the q columns of y have
                separate weights.
            x: points (N, d).
            y: observed values (N, q), all finite.
            loss: the mean loss, as in `pass_over`.
            penalty: α divided by the number of values, as in `pass_over`.
            seed: the seed of the sample, and of the order of the points in all passes.
            factor: L (F, F), the Cholesky factor for the penalty with a Laplacian (see
                `Whitening`); None without a Laplacian.

        Raises:
            ValueError: the loss at zero is not a finite number.
        """
        points, values = _sample(expansion, x, y, seed)
        num_columns = y.shape[-1] if expansion.num_outputs == 1 else 1
        least = penalty * num_columns * _units_of_squares(loss, values)
        whitening = Whitening.of(expansion.features(points), least, factor)
        u = y.new_zeros(expansion.num_features, num_columns)
        return cls(expansion, whitening, seed + 1, u, u, reach=0.0).reaching(x, y, loss)

    @torch.no_grad()
    def reaching(self, x: Float[Tensor, "n d"], y: Float[Tensor, "n q"], loss: Loss) -> "Descent":
        """Return this descent with a `reach` that gives the next step a suitable length.

        After a step of this length from θ = 0, predictions at a sample have about the size of y. If
        y is zero, the length is the loss divided by the norm of the gradient. The length is halved
        until the step does not increase the loss. If `reach` is larger, it does not change.
        """
        x, y = _sample(self.expansion, x, y, self.seed)
        zero = torch.zeros_like(self.u)
        value, gradient = self._value_and_gradient(zero, x, y, loss, 0.0)
        size = gradient.norm().item()
        if size == 0:
            return self
        reach = y.abs().mean().item() / self.whitening.row_size or value.item() / size
        for _ in range(_HALVINGS):
            if self._objective(-reach / size * gradient, x, y, loss, 0.0) <= value:
                break
            reach /= 2
        return replace(self, reach=max(reach, self.reach))

    @property
    def theta(self) -> Float[Tensor, "F k"]:
        """The averaged weights θ, (F, k)."""
        return self.whitening.theta(self.whitening.penalised(self.average))

    @torch.no_grad()
    def pass_over(
        self,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n q"],
        loss: Loss,
        penalty: float,
        length: float = 1.0,
    ) -> "Descent":
        """Return the descent after one pass over these points, in random order.

        Args:
            x: points (n, d).
            y: observed values (n, q), all finite.
            loss: a function of predictions and observed values, which returns the mean loss over
                their elements.
            penalty: α divided by the number of values in the sum of losses.
            length: a factor of all steps of this pass.

        Raises:
            ValueError: the loss or its gradient is not finite.
        """
        u, average, reach = self.u, self.average, self.reach
        squares, steps = self.squares, self.steps
        size = min(_BATCH, max(1, len(x) // _STEPS))
        order = _permutation(len(x), self.seed + self.passes)
        for batch in order.tensor_split(-(-len(x) // size)):
            _, gradient = self._value_and_gradient(u, x[batch], y[batch], loss, penalty)
            squares += gradient.square().sum().item()
            if squares > 0:
                u = u - length * reach / squares**0.5 * gradient
            steps += 1
            reach = max(reach, u.norm().item())
            # This is the recursive form of the weights of Shamir & Zhang (2013). The first step
            # replaces the starting value.
            average = average.lerp(u, (_DECAY + 1) / (_DECAY + steps))
        return replace(
            self,
            u=u,
            average=average,
            reach=reach,
            squares=squares,
            steps=steps,
            passes=self.passes + 1,
            num_points=self.num_points + len(x),
        )

    def _value_and_gradient(
        self, u: Tensor, x: Tensor, y: Tensor, loss: Loss, penalty: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "F k"]]:
        """Return the objective at u for some points, and its gradient."""
        with torch.enable_grad():
            u = u.detach().requires_grad_()
            value = self._objective(u, x, y, loss, penalty)
            (gradient,) = torch.autograd.grad(value, u)
        if not (value.isfinite() and gradient.isfinite().all()):
            raise ValueError(
                f"expected a finite loss and gradient, got a loss of {value.item()} after "
                f"{self.passes} passes; use a loss that is finite for any prediction"
            )
        return value.detach(), gradient

    def _objective(
        self, u: Tensor, x: Tensor, y: Tensor, loss: Loss, penalty: float
    ) -> Float[Tensor, ""]:
        """Return the mean loss plus the penalty."""
        v = self.whitening.penalised(u)
        value = _mean_loss(loss, self.expansion.apply(x, self.whitening.theta(v)), y)
        return value + penalty * v.square().sum()


def _sample(
    expansion: Expansion, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"], seed: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n q"]]:
    """Return a random sample of the points, with their values."""
    rows = min(_SAMPLE, _SAMPLE_NUMBERS // expansion.num_features)
    chosen = _permutation(len(x), seed)[: max(1, rows // expansion.num_outputs)]
    return x[chosen], y[chosen]


def _units_of_squares(loss: Loss, y: Float[Tensor, "n q"]) -> float:
    """Return 2 mean|y| divided by the mean slope of the loss at zero, which is 1 for squares.

    A penalty for this loss, times the ratio, is a penalty for squares. If one of both numbers is
    zero, the result is 1.
    """
    with torch.enable_grad():
        zero = torch.zeros_like(y).requires_grad_()
        (slopes,) = torch.autograd.grad(_mean_loss(loss, zero, y), zero)
    size, slope = 2 * y.abs().mean().item(), slopes.abs().sum().item()
    return size / slope if size * slope > 0 else 1.0


def _mean_loss(loss: Loss, prediction: Float[Tensor, "n q"], y: Float[Tensor, "n q"]) -> Tensor:
    """Return the loss, after checks that it is one number and has a gradient."""
    value = torch.as_tensor(loss(prediction, y))
    if torch.is_grad_enabled() and not value.requires_grad:
        raise ValueError(
            "expected a loss that is a differentiable function of the prediction, got one without "
            "a gradient; compute it with torch functions, without item(), detach() or numpy"
        )
    if value.dim() != 0:
        raise ValueError(
            "expected a loss that returns one number, the mean over all entries, got shape "
            f"{tuple(value.shape)}; use reduction='mean'"
        )
    return value


def _permutation(size: int, seed: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(int(seed)))


# LSMR, which needs only products with Φ.


_LSMR_TOLERANCE = 1e-10
_LIMIT_REACHED = 7  # the code of scipy's lsmr for too many iterations


class Lsmr(Solver):
    """The solver by LSMR (Fong & Saunders 2011), separately for each column of y."""

    name = "lsmr"

    def solve(self, problem: Problem, options: Options) -> Solution:
        refuse_loss(self.name, options)
        if problem.laplacian is not None:
            raise ValueError(
                "solver='lsmr' expects laplacian_weight=0, got a Laplacian; use solver='cholesky'"
            )
        expansion, (x, y) = problem.observed, problem.labels
        columns = y if expansion.num_outputs == 1 else y.reshape(-1, 1)

        def product(theta: np.ndarray) -> np.ndarray:  # Φθ
            return expansion.apply(x, torch.from_numpy(theta).reshape(-1, 1)).flatten().numpy()

        def adjoint(values: np.ndarray) -> np.ndarray:  # Φᵀv
            of_points = torch.from_numpy(values).reshape(len(x), expansion.num_outputs)
            return expansion.adjoint(x, of_points).flatten().numpy()

        shape = len(columns), expansion.num_features
        phi = LinearOperator(shape, matvec=product, rmatvec=adjoint, dtype=np.float64)
        limit = options.max_iter or 10 * expansion.num_features
        tol = _LSMR_TOLERANCE if options.tol is None else options.tol
        stop = {"atol": tol, "btol": tol, "conlim": 0.0, "maxiter": limit}
        found = [lsmr(phi, column, damp=problem.alpha**0.5, **stop) for column in columns.T.numpy()]
        if any(reason == _LIMIT_REACHED for _, reason, *_ in found):
            warnings.warn(
                f"lsmr reached max_iter={limit} before tol={tol:g}; increase max_iter, tol or "
                "alpha, or use solver='cholesky'",
                ConvergenceWarning,
                stacklevel=4,  # through `fit` and its choice of threads
            )
        theta = torch.from_numpy(np.stack([solution for solution, *_ in found], axis=-1))
        return Solution(theta, max(count for _, _, count, *_ in found))


# Stochastic gradients: ridge regression with any loss, also for data in chunks.


_MAX_PASSES = 256
_SGD_TOLERANCE = 0.01
_LENGTH_DECAY = 0.25  # steps decay with this power of the pass, and with about √ of the step


class Sgd(Solver):
    """The solver by stochastic gradient descent on Σ loss + α‖θ‖² + w fᵀMf.

    `solve` compares the predictions after 1, 2, 4, 8, … passes. It stops if they change by less
    than `tol`, relative to their size. `partial` makes one pass. The sum is then over all points so
    far, and includes a point as often as it was passed. The first chunk determines the map from u
    to θ (`Whitening`), and needs about a thousand points from the whole domain.

    Source: Brault et al. 2016, Appendix D.1.1 i.
    """

    name = "sgd"

    def solve(self, problem: Problem, options: Options) -> Solution:
        (x, y), loss = problem.labels, options.loss or torch.nn.functional.mse_loss
        limit = options.max_iter or _MAX_PASSES
        tol = _SGD_TOLERANCE if options.tol is None else options.tol
        share, factor = problem.alpha / y.numel(), None
        if problem.laplacian is not None:
            if problem.alpha == 0:
                raise ValueError(
                    "solver='sgd' with a Laplacian expects alpha > 0, got 0; pass a small number, "
                    "such as 1e-6 times the variance of the kernel"
                )
            # L Lᵀ = I + (w/α) ΦᵀMΦ
            matrix = penalty(problem.expansion, problem.x, problem.laplacian) / problem.alpha
            factor = torch.linalg.cholesky(matrix.add_(torch.eye(len(matrix))))
        descent = Descent.start(problem.observed, x, y, loss, share, options.seed, factor)
        before = None
        while descent.passes < limit:
            length = (descent.passes + 1) ** -_LENGTH_DECAY
            descent = descent.pass_over(x, y, loss, share, length)
            if descent.passes.bit_count() == 1:  # a power of two
                now = descent.expansion.apply(x, descent.theta)
                if before is not None and torch.dist(now, before) <= tol * now.norm():
                    break
                before = now
        else:
            warnings.warn(
                f"sgd reached max_iter={limit} before tol={tol:g}; increase max_iter, tol or "
                "alpha, or use solver='cholesky' for squared errors",
                ConvergenceWarning,
                stacklevel=4,  # through `fit` and its choice of threads
            )
        return Solution(descent.theta, descent.passes, descent=descent)

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        (x, y), loss = problem.labels, options.loss or torch.nn.functional.mse_loss
        if earlier is None:
            share = problem.alpha / y.numel()
            descent = Descent.start(problem.observed, x, y, loss, share, options.seed)
        else:
            before, solution = earlier
            if solution.descent is None or before.laplacian is not None:
                raise _of_another_solver()
            descent = solution.descent.reaching(x, y, loss)
            # The loss is a mean over a batch, so α is divided by the number of all values so far.
            share = problem.alpha / (y.numel() + descent.num_points * y.shape[-1])
        descent = descent.pass_over(x, y, loss, share)
        return Solution(descent.theta, descent.passes, descent=descent)


# The solvers of `ORFFRidge` by their names.


SOLVERS: dict[str, Solver] = {
    solver.name: solver for solver in (Cholesky(), Stein(), Lsmr(), Sgd())
}
