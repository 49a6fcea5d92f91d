"""Stochastic gradients: ridge regression with any loss, also of data in chunks."""

import warnings

import torch
from sklearn.exceptions import ConvergenceWarning
from torch.nn.functional import mse_loss

from gp_orff.regression.problem import Problem
from gp_orff.regression.solvers.base import Options, Solution, Solver, refuse_laplacian
from gp_orff.regression.solvers.descent import Descent

_MAX_PASSES = 256
_TOLERANCE = 0.01
_LENGTH_DECAY = 0.25  # power of the pass; that of the step is about 1/2 besides


class Sgd(Solver):
    """θ by stochastic gradient descent on Σ loss + α‖θ‖².

    Brault et al. 2016, Appendix D.1.1 i. `solve` compares the predictions after 1, 2, 4, 8, …
    passes: it stops if they change by less than `tol`, relative to their size. `partial` is one
    pass; the sum then is over all points so far, as often as they were given. The coordinates come
    from the first chunk: a thousand points from everywhere are enough.
    """

    name = "sgd"

    def solve(self, problem: Problem, options: Options) -> Solution:
        refuse_laplacian(self.name, problem)
        (x, y), loss = problem.labels, options.loss or mse_loss
        limit = options.max_iter or _MAX_PASSES
        tol = _TOLERANCE if options.tol is None else options.tol
        penalty = problem.alpha / y.numel()
        descent = Descent.start(problem.observed, x, y, loss, penalty, options.seed)
        before = None
        while descent.passes < limit:
            length = (descent.passes + 1) ** -_LENGTH_DECAY
            descent = descent.pass_over(x, y, loss, penalty, length)
            if descent.passes.bit_count() == 1:  # a power of two
                now = descent.field(x, descent.theta)
                if before is not None and torch.dist(now, before) <= tol * now.norm():
                    break
                before = now
        else:
            warnings.warn(
                f"sgd reached max_iter={limit} before tol={tol:g}: raise either of them, or alpha, "
                "or use solver='cholesky' for squared errors",
                ConvergenceWarning,
                stacklevel=4,  # through `fit` and its choice of threads
            )
        return Solution(descent.theta, descent.passes, descent)

    def partial(
        self, problem: Problem, options: Options, earlier: tuple[Problem, Solution] | None
    ) -> Solution:
        refuse_laplacian(self.name, problem)
        (x, y), loss = problem.labels, options.loss or mse_loss
        if earlier is None:
            penalty = problem.alpha / y.numel()
            descent = Descent.start(problem.observed, x, y, loss, penalty, options.seed)
        else:
            descent = _descent_of(earlier[1]).reaching(x, y, loss)
            penalty = problem.alpha / (y.numel() + descent.num_points * y.shape[-1])
        descent = descent.pass_over(x, y, loss, penalty)
        return Solution(descent.theta, descent.passes, descent)


def _descent_of(solution: Solution) -> Descent:
    """The descent that found a solution."""
    if not isinstance(solution.state, Descent):
        raise ValueError(
            "expected a model learned by solver='sgd' before, got another solver's; pass all data "
            "to fit, or begin with a clone"
        )
    return solution.state
