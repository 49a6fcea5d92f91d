"""The cell around ω = 0 of a field with heavy tails: a constant over the domain.

Correlations of a rational quadratic kernel fall like a power of the lag. The kernel of a lattice of
period P = 2π/h then differs from K(τ) by −Σ_{j≠0} K(τ + jP), which hardly depends on τ as all
images are far. This is the variance of the frequencies in the cell around zero. The density may be
infinite there, but B(0) = 0, so that a lattice has no feature in it.

The cell is a term of its own with a constant factor, and its frequencies along the inputs of the
field are zero. With v_i = Σ_{j≠0} ∂_i² k(jP), its factor has the columns √v_i B(e_i) for each axis
i, as if the frequencies of the cell were along the axes.

The constant of an absolute potential comes from frequencies near zero, too, whatever the kernel.
Its features are zero in the field. With u_i = S(0) ∏h / d, their images under an antiderivative Q
are constants, the columns of √u_i Q(e_i) B(e_i).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import stack_rows
from gp_orff.features.draws import Draw, LatticeDraw
from gp_orff.features.expansion import Expansion
from gp_orff.kernels.base import positive_root
from gp_orff.kernels.lattice_sums import moments_near_zero, weight_at_zero
from gp_orff.kernels.tree import Mixing, Term, spectra_of


@dataclass(frozen=True)
class NearZero(Mixing):
    """The factor of a cell around ω = 0; column c is for a frequency along the input `axes[c]`."""

    axes: tuple[int, ...] = ()


def with_cells(summands: Sequence[Term], draws: Sequence[Draw]) -> tuple[list[Term], list[Draw]]:
    """The terms and their draws, followed by those of the cells around ω = 0."""
    pairs = zip(summands, draws, strict=True)
    cells = [pair for pair in pairs if isinstance(pair[1], LatticeDraw) and pair[1].cell]
    return (
        [*summands, *(_cell(term, draw) for term, draw in cells)],
        [*draws, *(draw.cell for _, draw in cells)],
    )


def with_constants(
    expansion: Expansion, summands: Sequence[Term], draws: Sequence[Draw]
) -> Expansion:
    """The features of a grid, followed by those of the constants of absolute potentials.

    The field has such potentials if all terms that vary are derivatives of scalar kernels.
    """
    directions, axes = [], []
    for term, draw in zip(summands, draws, strict=True):
        if isinstance(draw, LatticeDraw) and term.factor.degree and len(term.leaves) == 1:
            dims = draw.dims[0]
            spacing = draw.lattice.spacing[list(dims)]
            weight = weight_at_zero(spectra_of(term)[0], spacing) / len(dims)
            root = positive_root(term.outputscale * weight)[..., None, None]
            directions.append(root * _along_axes(term, spacing).mT)
            axes += _axes(term, dims)
    full = expansion.general() if directions else expansion
    if not directions or full.num_constants:
        return expansion
    return full.followed_by_constants(stack_rows(directions), axes)


def _along_axes(term: Term, like: Float[Tensor, "k"]) -> Float[Tensor, "p k*r"]:
    """B(e_i) of every axis i, side by side."""
    return term.factor(torch.eye(len(like)).to(like)).movedim(-3, -2).flatten(-2)


def _axes(term: Term, dims: Sequence[int]) -> tuple[int, ...]:
    """The input of each column of `_along_axes`."""
    return tuple(dim for dim in dims for _ in range(term.factor.rank))


def _cell(term: Term, draw: LatticeDraw) -> Term:
    """The term of the cell around ω = 0 of a term; constant inputs have none."""
    dims = draw.dims[0]
    varying = [axis for axis, dim in enumerate(dims) if not draw.lattice.constant[dim]]
    spacing, spectrum = draw.lattice.spacing[list(dims)], spectra_of(term)[0]
    if len(varying) < len(dims):
        spectrum = spectrum.marginal(varying)
    moments = moments_near_zero(spectrum, spacing[varying])  # v, (*b, k)
    root = positive_root(moments).repeat_interleave(term.factor.rank, dim=-1)
    along = term.factor(torch.eye(len(dims)).to(spacing)[varying])
    matrix = root.unsqueeze(-2) * along.movedim(-3, -2).flatten(-2)
    axes = _axes(term, [dims[axis] for axis in varying])
    return Term(term.leaves[1:], NearZero(matrix, axes), term.outputscale)
