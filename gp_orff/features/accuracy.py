"""How accurately the frequencies represent each term of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel

from gp_orff.features.assemble import leaf_spectra
from gp_orff.features.frequencies.lattice_nodes import Lattice, LatticeDraw
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum
from gp_orff.features.truncation import grid_variance, periodised_variance
from gp_orff.kernels.factors import Factor, Mixing
from gp_orff.kernels.spectra.elliptical import ScaleMixture
from gp_orff.kernels.spectra.lattice_sums import (
    aliased,
    aliased_curvature,
    moments_near_zero,
    nonzero_sum,
)
from gp_orff.kernels.tree import Term, spectra_of, terms

_SHELLS = 20  # shells of images whose aliasing is added up
_LAGS = 4  # lags along each axis at which aliasing is computed


@dataclass(frozen=True)
class GridAccuracy:
    """The errors of one term of a kernel tree on a grid, at its present hyperparameters."""

    truncated: float  # the share of the variance beyond the grid
    aliasing: float  # about |Σ_{j≠0} K(τ + jP)| / |K(0)|, at lags τ between a point and a datum
    tolerance: float  # the tolerance of the grid, which a budget of features may have raised

    def __str__(self) -> str:
        return (
            f"{self.truncated:.1e} of the variance truncated, aliasing {self.aliasing:.0e}, "
            f"tolerance {self.tolerance:.0e}"
        )


@dataclass(frozen=True)
class SampleAccuracy:
    """How evenly the variance of one term is distributed over its random frequencies.

    With D frequencies of variances v_k = w_k tr A(ω_k), the effective sample size is
    (Σ v_k)² / Σ v_k². It is D if all are equal, as with the trace measure, and small if few of them
    carry most of the variance.
    """

    num_frequencies: int  # D
    effective_sample_size: float

    def __str__(self) -> str:
        return (
            f"{self.num_frequencies} random frequencies, worth {self.effective_sample_size:.0f} "
            "of equal variance"
        )


def accuracy(kernel: Kernel, draws: Sequence[Draw]) -> list[GridAccuracy | SampleAccuracy]:
    """The accuracy of each term of a kernel tree, in order; an empty list for a quadrature."""
    pairs = list(zip(terms(kernel), draws, strict=True))
    if all(draw.sampled for draw in draws):
        return [_sample_accuracy(term, draw) for term, draw in pairs]
    return [_accuracy(term, draw) for term, draw in pairs if isinstance(draw, LatticeDraw)]


@torch.no_grad()
def _sample_accuracy(term: Term, draw: Draw) -> SampleAccuracy:
    if not term.leaves:
        return SampleAccuracy(1, 1.0)
    if isinstance(term.factor, Mixing):
        variances = draw.sample_weights(spectra_of(term))  # times a constant, |L|²
    else:
        omegas, weights = draw.nodes(spectra_of(term))
        variances = weights * term.factor(omegas[0]).square().sum((-1, -2))
    size = variances.sum(-1).square() / variances.square().sum(-1)
    return SampleAccuracy(draw.num_frequencies, size.min().item())


@torch.no_grad()
def _accuracy(term: Term, draw: LatticeDraw) -> GridAccuracy:
    lattice = draw.lattice
    if not term.leaves:
        return GridAccuracy(0.0, 0.0, lattice.tolerance.item())
    grid, total = (
        block.diagonal(dim1=-1, dim2=-2).sum(-1)
        for block in (grid_variance(term, draw), periodised_variance(term, draw))
    )
    share = (1 - grid / total).abs().max().item()
    return GridAccuracy(share, _aliasing(term, draw), lattice.tolerance.item())


def _aliasing(term: Term, draw: LatticeDraw) -> float:
    """The sum of the errors of the leaves, which bounds the error of their product."""
    total = 0.0
    for leaf in leaf_spectra(term, draw.dims):
        if isinstance(leaf.spectrum, ScaleMixture) and leaf.variance is None:
            factor = term.factor if leaf.degree else None
            total += _largest_error(leaf.spectrum, factor, draw, leaf.dims)
        else:
            total += _sum_of_images(leaf, draw.lattice)
    return total


def _largest_error(
    spectrum: ScaleMixture, factor: Factor | None, draw: LatticeDraw, dims: tuple[int, ...]
) -> float:
    """The largest error of K(τ) relative to K(0), at lags τ up to the longest from a datum."""
    spacing, lag = draw.lattice.spacing[list(dims)], draw.lattice.lag[list(dims)]
    shares = torch.linspace(0, 1, _LAGS).to(lag)
    lags = torch.cartesian_prod(*[shares] * len(dims)).reshape(-1, len(dims)) * lag
    if factor is None:
        # weights may add up to more than k(0) = 1, since the weight of ω = 0 is never negative
        excess = (nonzero_sum(spectrum, spacing) - 1).clamp_min(0)
        return max((aliased(spectrum, spacing, tau) + excess).abs().max().item() for tau in lags)
    variance = factor.variance(spectrum)
    size = variance.diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    cell = 0.0 if draw.cell is None else torch.diag_embed(moments_near_zero(spectrum, spacing))
    errors = [factor.block(cell + aliased_curvature(spectrum, spacing, tau)) / size for tau in lags]
    return max(error.abs().max().item() for error in errors)


def _sum_of_images(leaf: LeafSpectrum, lattice: Lattice) -> float:
    """A bound from correlations: the image at P − L along every axis, and shells of images at jP.

    P is the period and L the longest lag from a datum.
    """
    period, lag, d = lattice.period.tolist(), lattice.lag.tolist(), leaf.num_dims

    def largest(j: int, share: float) -> float:
        """The largest correlation over the axes at the lag j P − share · L."""
        lags = [max(j * period[dim] - share * lag[dim], 0.0) for dim in leaf.dims]
        return max(float(leaf.correlation(r, axis)) for axis, r in enumerate(lags))

    shells = range(1, _SHELLS + 1)
    shell_sum = sum(((2 * j + 1) ** d - (2 * j - 1) ** d) * largest(j, 0.0) for j in shells)
    return d * largest(1, 1.0) + shell_sum
