"""The cell around ω = 0 of a field with heavy tails: a constant over the domain.

Correlations of a rational quadratic kernel fall like a power of the lag. The kernel of a lattice of
period P = 2π/h then differs from K(τ) by −Σ_{j≠0} K(τ + jP), which hardly depends on τ as all
images are far. This is the variance of the frequencies in the cell around zero. The density may be
infinite there, but B(0) = 0, so that a lattice has no feature in it.

The cell is a term of its own with a constant factor, and its frequencies along the inputs of the
field are zero. With v_i = Σ_{j≠0} ∂_i² k(jP), its factor has the columns √v_i B(e_i) for each axis
i, as if the frequencies of the cell were along the axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gp_orff.features.frequencies.lattice_nodes import LatticeDraw
from gp_orff.features.frequencies.rule import Draw
from gp_orff.kernels.cholesky import positive_root
from gp_orff.kernels.factors import Mixing
from gp_orff.kernels.spectra.lattice_sums import moments_near_zero
from gp_orff.kernels.tree import Term, spectra_of


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


def _cell(term: Term, draw: LatticeDraw) -> Term:
    """The term of the cell around ω = 0 of a term."""
    dims = draw.dims[0]
    spacing = draw.lattice.spacing[list(dims)]
    root = positive_root(moments_near_zero(spectra_of(term)[0], spacing))  # √v, (*b, k)
    along = term.factor(torch.eye(len(dims)).to(spacing))  # B(e_i), (k, p, r)
    matrix = (root[..., None, None] * along).movedim(-3, -2).flatten(-2)
    axes = tuple(dim for dim in dims for _ in range(term.factor.rank))
    return Term(term.leaves[1:], NearZero(matrix, axes), term.outputscale)
