"""Direct solvers: Cholesky factors, and Stein's equation for separable problems."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from torch import Tensor

from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import Expansion, KroneckerExpansion
from gp_orff.regression.base import Matrix, Options, Problem, Solution, Solver, refuse_loss
from gp_orff.regression.laplacian import penalty, scaled_column_penalty

# Regularised least squares on features: min_θ ‖Φθ − y‖² + α‖θ‖² + w fᵀMf.
#
# Where the outputs separate, the problem falls apart into k scalar ones with shared features Ψ,
#
#     t_j = argmin ‖σ_j Ψ t − y_j‖² + α‖t‖² = (σ_j² ΨᵀΨ + α)⁻¹ σ_j Ψᵀy_j
#         = σ_j Ψᵀ (σ_j² ΨΨᵀ + α)⁻¹ y_j .
#
# A separable kernel k·L Lᵀ has Ψ = φS, the features of k; with the singular value decomposition L =
# P diag(σ) Uᵀ, the y_j are the columns of Y P, and Θ = T Uᵀ. A scalar kernel serves every column of
# Y by itself. For all other kernels Ψ = Φ, with one row for each output of each point, and k = 1.


@dataclass(frozen=True)
class Design:
    """Ψ, σ and the rotation U of an expansion, for targets y (N, q).

    Made by `design`.
    """

    expansion: Expansion
    scales: Float[Tensor, "k"]  # σ

    def targets(self, y: Float[Tensor, "N q"]) -> Float[Tensor, "n k"]:
        """The y_j, with a row for each row of Ψ."""
        return y if self.expansion.num_outputs == 1 else y.reshape(-1, 1)

    def rows(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "n m"]:
        """Ψ as a dense matrix, for few points."""
        return self.expansion.features(x)

    def statistics(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> Statistics:
        """The sufficient statistics of points and targets."""
        return Statistics.of(x, y, self.expansion.phi)

    def gram(self, statistics: Statistics) -> Float[Tensor, "m m"]:
        """ΨᵀΨ."""
        full = self.expansion.general()
        (gram,) = statistics.feature_grams(full)
        return gram * (full.directions @ full.directions.mT)

    def right(self, statistics: Statistics) -> Float[Tensor, "m k"]:
        """Ψᵀy_j for every j."""
        full = self.expansion.general()
        products = full.gather(statistics.cross) * full.directions
        return products if full.num_outputs == 1 else products.sum(-1, keepdim=True)

    def theta(self, t: Float[Tensor, "m k"]) -> Float[Tensor, "F _"]:
        """The weights θ of the features from the t_j."""
        return t

    def num_rows(self, num_points: int) -> int:
        """n, the rows of Ψ."""
        return num_points * self.expansion.num_outputs

    @property
    def num_columns(self) -> int:
        """m, the columns of Ψ."""
        return self.expansion.num_features


@dataclass(frozen=True)
class SeparableDesign(Design):
    """The design of a separable kernel with several outputs."""

    expansion: KroneckerExpansion
    left: Float[Tensor, "p k"]  # P
    rotation: Float[Tensor, "r k"]  # U

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

    def num_rows(self, num_points):
        return num_points

    @property
    def num_columns(self):
        return self.expansion.num_columns


def design(expansion: Expansion, num_targets: int) -> Design:
    """The scalar problems of an expansion, for targets with `num_targets` columns."""
    if expansion.is_kronecker and expansion.num_outputs > 1:
        left, scales, right = torch.linalg.svd(expansion.mixing, full_matrices=False)
        return SeparableDesign(expansion, scales, left, right.mT)
    columns = num_targets if expansion.num_outputs == 1 else 1
    return Design(expansion, torch.ones(columns, dtype=torch.float64))


# The equations of the scalar problems of a design, and their solution for one α or for many.
#
# Of the primal form (m features) and the dual one (n rows) the smaller is taken. One Cholesky
# factor per different σ_j serves one α. If α is below the rounding error of the matrix, a factor
# may fail or be meaningless, and eigenvectors with a threshold give the solution of least norm.
# Eigenvectors also serve many α, since they do not depend on it.


_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Equations:
    """(σ_j² A + α) s_j = σ_j r_j with A = ΨᵀΨ and t_j = s_j, or A = ΨΨᵀ and t_j = Ψᵀ s_j."""

    matrix: Float[Tensor, "n n"]  # A
    right: Float[Tensor, "n k"]  # r
    scales: Float[Tensor, "k"]  # σ
    rows: Float[Tensor, "n m"] | None = None  # Ψ of the second form

    @classmethod
    def primal(cls, design: Design, statistics: Statistics) -> "Equations":
        """From sufficient statistics."""
        return cls(design.gram(statistics), design.right(statistics), design.scales)

    @classmethod
    def dual(cls, design: Design, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> "Equations":
        """From points that are fewer than the features."""
        rows = design.rows(x)
        return cls(rows @ rows.mT, design.targets(y), design.scales, rows)

    @classmethod
    def of(cls, design: Design, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> "Equations":
        """The smaller of both forms (Minh 2016, Equation 75)."""
        if design.num_rows(len(x)) < design.num_columns:
            return cls.dual(design, x, y)
        return cls.primal(design, design.statistics(x, y))

    def penalised(self, penalty: Float[Tensor, "n n"]) -> "Equations":
        """With σ_j² tᵀ`penalty`t added to every scalar problem."""
        return replace(self, matrix=self.matrix + penalty)

    def by_cholesky(self, alpha: float) -> Float[Tensor, "m k"]:
        """The t_j, by one Cholesky factor for each different σ_j; by eigenvectors where α is below
        the rounding error of the matrix."""
        solution = torch.zeros_like(self.right)
        for scale in _distinct(self.scales):
            a = scale.square() * self.matrix
            rounding = len(a) * _EPS * a.diagonal().max()
            a.diagonal().add_(alpha)
            factor, failed = torch.linalg.cholesky_ex(a)
            if failed or alpha < rounding:
                return self.by_eigenvectors(alpha)
            equal = (self.scales - scale).abs() <= _same(self.scales)
            solution[:, equal] = torch.cholesky_solve(scale * self.right[:, equal], factor)
        return self._weights(solution)

    def by_eigenvectors(self, alpha: float) -> Float[Tensor, "m k"]:
        """The t_j; of least norm where α = 0 leaves them undetermined."""
        return self._weights(self._vectors @ (self._inverse(alpha) * self._rotated))

    def residual_freedom(self, alpha: float, num_values: int) -> float:
        """tr(I − H) for the matrix H that maps `num_values` values y to their predictions."""
        inverse = self._inverse(alpha)
        # Eigenvalues that are zero to rounding explain nothing: their share of the residual is one.
        share = torch.where(inverse > 0, alpha * inverse, 1.0)
        return num_values - share.numel() + share.sum().item()

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "n k"]:
        """Those of every σ_j² A, without rounding errors below zero."""
        return self._decomposed[0].clamp_min(0).unsqueeze(-1) * self.scales.square()

    def _inverse(self, alpha: float) -> Float[Tensor, "n k"]:
        """1/(λ + α) of every eigenvalue λ; zero where λ + α is below the rounding error of A."""
        rounding = len(self.matrix) * _EPS * self.eigenvalues[-1]
        denominators = self.eigenvalues + alpha
        return torch.where(denominators > rounding, 1 / denominators, 0.0)

    @cached_property
    def _decomposed(self) -> tuple[Float[Tensor, "n"], Float[Tensor, "n n"]]:
        return torch.linalg.eigh(self.matrix)

    @property
    def _vectors(self) -> Float[Tensor, "n n"]:
        return self._decomposed[1]

    @cached_property
    def _rotated(self) -> Float[Tensor, "n k"]:
        return self._vectors.mT @ (self.scales * self.right)

    def _weights(self, s: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
        return s if self.rows is None else self.rows.mT @ s


def _same(scales: Float[Tensor, "k"]) -> Float[Tensor, ""]:
    """The difference below which two σ_j are equal but for rounding."""
    return 4 * _EPS * scales.max()


def _distinct(scales: Float[Tensor, "k"]) -> list[Float[Tensor, ""]]:
    """The different σ_j that are not zero."""
    found: list[Tensor] = []
    for scale in scales:
        if all((scale - other).abs() > _same(scales) for other in [0.0, *found]):
            found.append(scale)
    return found


# Direct solvers: the normal equations of the weights, or of as many numbers as there are values.
#
# They are Equations 74 and 72 of Minh 2016; the smaller one is solved (Equation 75).


class Direct(Solver):
    """θ from the sufficient statistics of the data, which add up over chunks."""

    def check(self, problem: Problem) -> None:
        """Raise ValueError if this solver does not solve the problem."""
        return

    def solve(self, problem: Problem, options: Options) -> Solution:
        self.check(problem)
        refuse_loss(self.name, options)
        if problem.laplacian is None:
            parts = design(problem.observed, problem.y.shape[-1])
            equations = Equations.of(parts, *problem.labels)
            return Solution(parts.theta(self._solve(equations, problem.alpha)))
        num_values = len(problem.x) * problem.expansion.num_outputs
        if num_values < problem.expansion.num_features and problem.alpha > 0:
            return Solution(_dual_solution(problem))
        expansion = problem.observed.general() if _couples(problem) else problem.observed
        parts = design(expansion, problem.y.shape[-1])
        equations = Equations.primal(parts, parts.statistics(*problem.labels))
        equations = equations.penalised(_penalty(parts, problem))
        return Solution(parts.theta(self._solve(equations, problem.alpha)))

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        self.check(problem)
        refuse_loss(self.name, options)
        parts = design(problem.observed, problem.y.shape[-1])
        statistics = parts.statistics(*problem.labels)
        if earlier is not None:
            statistics = statistics + _statistics_of(parts, *earlier)
        theta = parts.theta(self._solve(Equations.primal(parts, statistics), problem.alpha))
        return Solution(theta, state=statistics)

    def _solve(self, equations: Equations, alpha: float) -> Float[Tensor, "m k"]:
        """The weights of the scalar problems."""
        raise NotImplementedError


class Cholesky(Direct):
    """By Cholesky factors."""

    name = "cholesky"

    def _solve(self, equations, alpha):
        return equations.by_cholesky(alpha)


class Stein(Direct):
    """By eigenvectors, for the Stein equation G Θ LᵀL + α Θ = ΨᵀY L of separable kernels.

    Brault et al. 2016, Equation 11.
    """

    name = "stein"

    def check(self, problem: Problem) -> None:
        parts = design(problem.observed, problem.y.shape[-1])
        separable = isinstance(parts, SeparableDesign) or problem.observed.num_outputs == 1
        if not separable or _couples(problem):
            raise ValueError(
                "solver='stein' expects a separable kernel, such as gp_orff.SeparableKernel, a "
                "MultitaskKernel or a scalar kernel, and no laplacian that couples its outputs, "
                "got outputs that do not separate; use solver='cholesky'"
            )

    def _solve(self, equations, alpha):
        return equations.by_eigenvectors(alpha)


def _statistics_of(parts: Design, problem: Problem, solution: Solution) -> Statistics:
    """The sufficient statistics of earlier data."""
    if isinstance(solution.state, Statistics):
        return solution.state
    if solution.state is not None or problem.laplacian is not None:
        raise ValueError(
            "expected a model learned without a Laplacian by the same solver, got another one; "
            "pass all data to fit, or begin with a clone"
        )
    return parts.statistics(*problem.labels)


def _couples(problem: Problem) -> bool:
    """Whether the Laplacian couples the scalar problems of a separable kernel."""
    if problem.laplacian is None:
        return False
    return problem.combination is not None or problem.laplacian.shape[0] != len(problem.x)


def _penalty(parts: Design, problem: Problem) -> Float[Tensor, "m m"]:
    """Ψᵀ w M Ψ."""
    if isinstance(parts, SeparableDesign):
        return scaled_column_penalty(problem.expansion, problem.x, problem.laplacian)
    return penalty(problem.expansion.general(), problem.x, problem.laplacian)


def _dual_solution(problem: Problem) -> Float[Tensor, "F _"]:
    """θ = Φᵀa, with the coefficients a of K = ΦΦᵀ."""
    phi = problem.expansion.features(problem.x)  # (N·p, F)
    return phi.mT @ coefficients(phi @ phi.mT, problem)


def coefficients(gram: Float[Tensor, "n n"], problem: Problem) -> Float[Tensor, "n _"]:
    """a of f = Σ_j K(·, x_j) a_j, from K at all points: (B K + α) a = C*y, B = C*C + w M.

    It is Equation 72 of Minh 2016. The columns of y have a column each if K is scalar and C None.
    """
    p = len(gram) // len(problem.x)
    c = torch.eye(p, dtype=gram.dtype) if problem.combination is None else problem.combination
    seen = problem.labelled.to(gram)
    y = torch.where(problem.labelled.unsqueeze(-1), problem.y, 0.0)
    right = y if problem.combination is None and p == 1 else (y @ c).reshape(-1, 1)
    b = torch.kron(seen.diag(), c.mT @ c)
    if problem.laplacian is not None:
        b += torch.from_numpy(_dense(problem.laplacian, len(gram)))
    # A product of symmetric matrices, not symmetric itself: hence a general solution, no Cholesky
    # factor.
    system = b @ gram
    system.diagonal().add_(problem.alpha)
    return torch.linalg.solve(system, right)


def _dense(laplacian: Matrix, size: int) -> Float[np.ndarray, "n n"]:
    """M, or M ⊗ I_p where M is (N, N), as a dense matrix of `size` N·p."""
    dense = laplacian.toarray() if sparse.issparse(laplacian) else laplacian
    return np.kron(dense, np.eye(size // len(dense)))
