"""Functions of B = R⁻¹AR⁻ᵀ by the Lanczos process, where P = R Rᵀ is a preconditioner of A."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.inference.iterative.conjugate_gradients import ConvergenceError
from gp_orff.inference.iterative.operator import WeightPrecision
from gp_orff.inference.iterative.preconditioner import Preconditioner

_BETWEEN_CHECKS = 5  # iterations
_FIRST = 25  # iterations of a quadrature, before they double
_SMALLEST = 1e-12  # relative norm at which a Krylov space has ended
_MOST_KEPT = 2**27  # numbers of a basis, 1 GiB


def quadrature(
    a: WeightPrecision,
    p: Preconditioner,
    u: Float[Tensor, "k F"],
    function: Callable[[Float[Tensor, "i"]], Float[Tensor, "i"]],
    most: int,
) -> Float[Tensor, "k"]:
    """uᵀ f(B) u / uᵀu for every random row u, by Gauss quadrature (Golub & Meurant 2010, Matrices,
    Moments and Quadrature, section 4.1).

    Iterations double until their mean over all u changes by less than its standard error.
    """
    diagonals, besides, last, count = [], [], None, _FIRST
    for step in _process(a, p, u):
        diagonals.append(step.diagonal)
        besides.append(step.beside)
        ended = len(diagonals) == most or not (step.beside > 0).any()
        if len(diagonals) < count and not ended:
            continue
        values = _gauss(function, torch.stack(diagonals, -1), torch.stack(besides, -1))
        error = values.std() / len(values) ** 0.5
        if ended or (last is not None and (values - last).mean().abs() <= error):
            return values
        last, count = values, 2 * count
    raise AssertionError("the Lanczos process does not end")


def _gauss(
    function: Callable[[Float[Tensor, "i"]], Float[Tensor, "i"]],
    diagonals: Float[Tensor, "k i"],
    besides: Float[Tensor, "k i"],
) -> Float[Tensor, "k"]:
    """e₁ᵀ f(T) e₁ for every row."""
    values = []
    for diagonal, beside in zip(diagonals, besides[:, :-1], strict=True):
        nodes, vectors = _eigen(diagonal, beside)
        values.append((vectors[0].square() * function(nodes)).sum())
    return torch.stack(values)


class _Step(NamedTuple):
    """A step of the Lanczos process."""

    vector: Float[Tensor, "k F"]  # of the basis
    diagonal: Float[Tensor, "k"]
    beside: Float[Tensor, "k"]  # the next element beside the diagonal


def inverse_root(
    a: WeightPrecision,
    p: Preconditioner,
    z: Float[Tensor, "k F"],
    tolerance: float,
    most: int,
    permitted: float,
) -> Float[Tensor, "k F"]:
    """R⁻ᵀB^{−½}z for every row z: draws from N(0, A⁻¹) if z are draws from N(0, I).

    B^{−½}z ≈ ‖z‖ V T^{−½}e₁ (Higham 2008, Functions of Matrices, equation 13.4). A basis V of more
    than 1 GiB is not kept: the process then runs twice, first for T, then for the sum over V.

    Args:
        a, p, z: as above.
        tolerance: the relative residual that ends the iterations.
        most: iterations, at most.
        permitted: the relative residual that has to be reached by then.

    Raises:
        ConvergenceError: it is not.
    """
    diagonals, besides, basis = [], [], []
    for step in _process(a, p, z):
        diagonals.append(step.diagonal)
        besides.append(step.beside)
        if len(basis) == len(diagonals) - 1 and len(diagonals) * z.numel() <= _MOST_KEPT:
            basis.append(step.vector)
        if len(diagonals) % _BETWEEN_CHECKS and (step.beside > 0).any():
            continue
        coefficients = _root_coefficients(torch.stack(diagonals, -1), torch.stack(besides, -1))
        last = (coefficients[:, -1].abs() / coefficients.norm(dim=-1)).max().item()
        if last <= tolerance or not (step.beside > 0).any():
            break
        if len(diagonals) >= most:
            if last <= permitted:
                break
            raise ConvergenceError(
                f"expected the Lanczos process to reach a relative residual of {permitted:.1g}, "
                f"got {last:.1g} after {most} iterations; use fewer features, "
                "Grid(max_features=8192), which are solved directly, or a larger noise"
            )
    coefficients = coefficients * z.norm(dim=-1, keepdim=True)
    total = torch.zeros_like(z)
    if len(basis) < len(diagonals):
        steps = islice(_process(a, p, z), len(diagonals))  # which goes on for ever
        basis = (step.vector for step in steps)
    for vector, factor in zip(basis, coefficients.mT, strict=True):
        total += factor.unsqueeze(-1) * vector
    return p.inverse_root_transposed(total)


def _process(a: WeightPrecision, p: Preconditioner, z: Float[Tensor, "k F"]) -> Iterator[_Step]:
    """The Lanczos process of B from z; it goes on with zeros where a Krylov space has ended."""
    vector = z / z.norm(dim=-1, keepdim=True)
    previous, beside = torch.zeros_like(z), z.new_zeros(len(z))
    while True:
        going = vector.any(-1)
        w = p.inverse_root(a.product(p.inverse_root_transposed(vector)))
        w -= beside.unsqueeze(-1) * previous
        diagonal = torch.where(going, (w * vector).sum(-1), 1.0)
        w -= diagonal.unsqueeze(-1) * vector
        norm = w.norm(dim=-1)
        beside = torch.where(going & (norm > _SMALLEST * diagonal), norm, 0.0)
        yield _Step(vector, diagonal, beside)
        previous, vector = vector, w * torch.where(beside > 0, 1 / norm, 0.0).unsqueeze(-1)


def _root_coefficients(
    diagonals: Float[Tensor, "k i"], besides: Float[Tensor, "k i"]
) -> Float[Tensor, "k i"]:
    """T^{−½}e₁ for every row."""
    rows = []
    for diagonal, beside in zip(diagonals, besides[:, :-1], strict=True):
        nodes, vectors = _eigen(diagonal, beside)
        rows.append(vectors @ (vectors[0] / nodes.sqrt()))
    return torch.stack(rows)


def _eigen(
    diagonal: Float[Tensor, "i"], beside: Float[Tensor, "i-1"]
) -> tuple[Float[Tensor, "i"], Float[Tensor, "i i"]]:
    """Eigenvalues, all positive, and eigenvectors of a tridiagonal matrix."""
    matrix = torch.diag(diagonal) + torch.diag(beside, 1) + torch.diag(beside, -1)
    nodes, vectors = torch.linalg.eigh(matrix)
    return nodes.clamp_min(torch.finfo(nodes.dtype).eps * nodes[-1]), vectors
