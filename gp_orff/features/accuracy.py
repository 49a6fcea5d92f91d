"""How well a frequency grid represents the terms of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel

from gp_orff.features.frequencies.lattice_nodes import Lattice, LatticeDraw
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.truncation import kept, periodised
from gp_orff.kernels.closed_form import field_block
from gp_orff.kernels.factors import Factor
from gp_orff.kernels.spectra.base import Spectrum
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture
from gp_orff.kernels.spectra.lattice_sums import aliased, aliased_curvature, nonzero_sum
from gp_orff.kernels.tree import Term, spectra_of, terms

_SHELLS = 20  # of images, whose aliasing is added up
_LAGS = 4  # along an axis, where aliasing is looked at


@dataclass(frozen=True)
class GridAccuracy:
    """How well one term of a kernel tree is represented, at its present hyperparameters."""

    truncated: float  # the share of the variance beyond the grid
    aliasing: float  # about |Σ_j K(τ + jP)| / |K(0)|, j ≠ 0, at lags τ from a datum
    tolerance: float  # the one the grid was built for, after its budget

    def __str__(self) -> str:
        return (
            f"{self.truncated:.1e} of the variance truncated, aliasing {self.aliasing:.0e}, "
            f"tolerance {self.tolerance:.0e}"
        )


def accuracy(kernel: Kernel, draws: Sequence[Draw]) -> list[GridAccuracy]:
    """For each term of a kernel tree on a grid, in order; none for other rules."""
    return [
        _accuracy(term, own)
        for term, own in zip(terms(kernel), draws, strict=True)
        if isinstance(own, LatticeDraw)
    ]


@torch.no_grad()
def _accuracy(term: Term, own: LatticeDraw) -> GridAccuracy:
    lattice, found = own.lattice, spectra_of(term)
    if not term.leaves:
        return GridAccuracy(0.0, 0.0, lattice.tolerance.item())
    held, whole = (
        block.diagonal(dim1=-1, dim2=-2).sum(-1)
        for block in (kept(term, own), periodised(term, own))
    )
    share = (1 - held / whole).abs().max().item()
    return GridAccuracy(share, _aliasing(term, own, found), lattice.tolerance.item())


def _aliasing(term: Term, own: LatticeDraw, found: Sequence[Spectrum]) -> float:
    """The sum over the leaves; a product errs by no more."""
    factors = [term.factor if term.factor.degree else None, *[None] * len(found[1:])]
    return sum(
        (_added if isinstance(spectrum, GammaMixture) else _images)(
            spectrum, factor, own.lattice, dims
        )
        for spectrum, factor, dims in zip(found, factors, own.dims, strict=True)
    )


def _added(
    spectrum: GammaMixture, factor: Factor | None, lattice: Lattice, dims: tuple[int, ...]
) -> float:
    """The largest error of a block at lags up to the longest from a datum, relative to K(0)."""
    spacing, lag = lattice.spacing[list(dims)], lattice.lag[list(dims)]
    shares = torch.linspace(0, 1, _LAGS).to(lag)
    lags = torch.cartesian_prod(*[shares] * len(dims)).reshape(-1, len(dims)) * lag
    if factor is None:
        more = (nonzero_sum(spectrum, spacing) - 1).clamp_min(
            0
        )  # than k(0), where weights end at 0
        return max((aliased(spectrum, spacing, own) + more).abs().max().item() for own in lags)
    whole = field_block(factor, torch.diag_embed(spectrum.second_moments(len(dims))))
    size = whole.diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    added = [field_block(factor, aliased_curvature(spectrum, spacing, own)) / size for own in lags]
    return max(own.abs().max().item() for own in added)


def _images(
    spectrum: Spectrum, factor: Factor | None, lattice: Lattice, dims: tuple[int, ...]
) -> float:
    """The image at P − L along every axis, and shells of images at jP."""
    period, lag = lattice.period.tolist(), lattice.lag.tolist()
    order, d = 0 if factor is None else factor.degree, len(dims)

    def correlation(j: int, share: float) -> float:
        """The largest over the axes at j P − share · L."""
        lags = [max(j * period[dim] - share * lag[dim], 0.0) for dim in dims]
        return max(float(spectrum.correlation(r, axis, order)) for axis, r in enumerate(lags))

    shells = range(1, _SHELLS + 1)
    far = sum(((2 * j + 1) ** d - (2 * j - 1) ** d) * correlation(j, 0.0) for j in shells)
    return d * correlation(1, 1.0) + far
