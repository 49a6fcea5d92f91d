"""Direct solvers: the normal equations of the weights, or of as many numbers as there are values.

They are Equations 74 and 72 of Minh 2016; the smaller one is solved (Equation 75).
"""

import numpy as np
import torch
from jaxtyping import Float
from scipy import sparse
from torch import Tensor

from gp_orff.data.statistics import Statistics
from gp_orff.regression.laplacian import penalty, scaled_column_penalty
from gp_orff.regression.problem import Matrix, Problem
from gp_orff.regression.solvers.base import Options, Solution, Solver, refuse_loss
from gp_orff.regression.solvers.design import Design, SeparableDesign, design
from gp_orff.regression.solvers.equations import Equations


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
        parts = _penalised_design(problem)
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


def _penalised_design(problem: Problem) -> Design:
    expansion = problem.observed.general() if _couples(problem) else problem.observed
    return design(expansion, problem.y.shape[-1])


def _penalty(parts: Design, problem: Problem) -> Float[Tensor, "m m"]:
    """Ψᵀ w M Ψ."""
    if isinstance(parts, SeparableDesign):
        return scaled_column_penalty(problem.expansion, problem.x, problem.laplacian)
    return penalty(problem.expansion.general(), problem.x, problem.laplacian)


def _dual_solution(problem: Problem) -> Float[Tensor, "F _"]:
    """θ = Φᵀa, (B ΦΦᵀ + α) a = C*y with B = C*C + w M."""
    p = problem.expansion.num_outputs
    phi = problem.expansion.features(problem.x)  # (N·p, F)
    c = torch.eye(p, dtype=phi.dtype) if problem.combination is None else problem.combination
    seen = problem.labelled.to(phi)
    y = torch.where(problem.labelled.unsqueeze(-1), problem.y, 0.0)
    right = y if problem.combination is None and p == 1 else (y @ c).reshape(-1, 1)
    b = torch.kron(seen.diag(), c.mT @ c) + torch.from_numpy(_dense(problem.laplacian, len(phi)))
    system = b @ (phi @ phi.mT)
    system.diagonal().add_(problem.alpha)
    return phi.mT @ torch.linalg.solve(system, right)


def _dense(laplacian: Matrix, size: int) -> Float[np.ndarray, "n n"]:
    """M, or M ⊗ I_p where M is (N, N), as a dense matrix of `size` N·p."""
    dense = laplacian.toarray() if sparse.issparse(laplacian) else laplacian
    return np.kron(dense, np.eye(size // len(dense)))
