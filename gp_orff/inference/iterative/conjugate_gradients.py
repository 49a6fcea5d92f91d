"""Preconditioned conjugate gradients for many right-hand sides, which are rows."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.inference.iterative.operator import WeightPrecision
from gp_orff.inference.iterative.preconditioner import Preconditioner


class ConvergenceError(RuntimeError):
    """Conjugate gradients did not reach their tolerance."""


class Solution(NamedTuple):
    """A⁻¹b, and the iterations it took."""

    x: Float[Tensor, "k F"]
    iterations: Int[Tensor, "k"]


def solve(
    a: WeightPrecision,
    p: Preconditioner,
    b: Float[Tensor, "k F"],
    tolerance: float,
    most: int,
    permitted: float | None = None,
    guess: Float[Tensor, "k F"] | None = None,
    enough: int | None = None,
) -> Solution:
    """A⁻¹b for every row b, until ‖r‖ ≤ tolerance ‖b‖ in the norm rᵀP⁻¹r.

    The preconditioned method of Saad (2003, algorithm 9.1), in which a system that has converged
    takes no further part.

    Args:
        a, p: A and P.
        b: the right-hand sides.
        tolerance: the relative residual that ends the iterations.
        most: iterations, at most.
        permitted: the relative residual that has to be reached by then; the tolerance if None. It
            may have been before: residuals go up and down, the error in the norm eᵀAe only down.
        enough: iterations after which what is permitted ends them; `most` if None.
        guess: of the solution, from which iterations start; zero if None.

    Raises:
        ConvergenceError: a system has not reached what is permitted after `most` iterations.
    """
    permitted = tolerance if permitted is None else permitted
    enough = most if enough is None else min(enough, most)
    x, r = (torch.zeros_like(b), b) if guess is None else (guess.clone(), b - a.product(guess))
    z = p.solve(r)
    d, size = z, (r * z).sum(-1)
    start = size if guess is None else (b * p.solve(b)).sum(-1)
    active, least = torch.arange(len(b), device=b.device), size
    count, done = torch.zeros_like(active), 0
    going = size > 0 if guess is None else size > tolerance**2 * start
    while True:
        if not going.all():
            r, z, d = r[going], z[going], d[going]
            size, start, active = size[going], start[going], active[going]
        if not len(active):
            return Solution(x, count)
        if done >= enough and (least[active] <= permitted**2 * start).all():
            return Solution(x, count)
        if done >= most:
            raise _error(most, (least[active] / start).sqrt().max().item(), permitted)
        product = a.product(d)
        step = size / (d * product).sum(-1)
        x[active] += step.unsqueeze(-1) * d
        r = r - step.unsqueeze(-1) * product
        z = p.solve(r)
        previous, size = size, (r * z).sum(-1)
        least = least.index_copy(0, active, torch.minimum(least[active], size))
        d = z + (size / previous).unsqueeze(-1) * d
        count[active] += 1
        done += 1
        going = size > tolerance**2 * start


def _error(iterations: int, residual: float, tolerance: float) -> ConvergenceError:
    return ConvergenceError(
        f"expected conjugate gradients to reach a relative residual of {tolerance:.1g}, got "
        f"{residual:.1g} after {iterations} iterations: the noise is very small against the signal "
        "that these features describe; use fewer features, Grid(max_features=8192), which are "
        "solved directly, or a larger noise"
    )
