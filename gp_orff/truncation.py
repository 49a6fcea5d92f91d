"""What a frequency grid leaves out of a kernel, and what it returns.

The lattice of spacing h, all its points taken, gives the periodised kernel Σ_j K(τ + jP), P = 2π/h.
A grid that ends misses the share of the points beyond,

    δ = Σ_j K(jP) − Σ_k w_k B(ω_k)B(ω_k)ᵀ ⪰ 0 ,

a p×p block for every point. Aliasing, K − Σ_j K(· + jP), is reported apart. Images of rational
quadratic kernels fall like a power of their distance: theirs are sums over the whole lattice, and
where ω = 0 is a point of it Σ_j k(jP) is k(0), see `gp_orff.cells.weight_at_zero`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.cells import aliased, aliased_curvature, nonzero_sum, second_moments
from gp_orff.expansion import Expansion
from gp_orff.factors import Factor
from gp_orff.frequencies import Draw, LatticeDraw
from gp_orff.frequencies.lattice_draw import Lattice
from gp_orff.kernels import minus_hessian
from gp_orff.resolution import spectra_of
from gp_orff.spectra import GammaMixture, Spectrum, spectrum
from gp_orff.terms import Leaf, Term, terms

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


def truncated_variance(
    kernel: Kernel, draws: Sequence[Draw], expansion: Expansion
) -> Float[Tensor, "*b p p"] | None:
    """δ of a kernel tree on a grid that returns it, differentiable; None for other rules."""
    if not all(isinstance(own, LatticeDraw) and own.correct for own in draws):
        return None
    whole = sum(_periodised(*pair) for pair in zip(terms(kernel), draws, strict=True))
    return lifted(whole - expansion.mean_variance(), whole)


def lifted(
    missing: Float[Tensor, "*b p p"], whole: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b p p"]:
    """A part of a variance, lifted in the directions that need it: rounding, and images that are
    not known in closed form, may leave a little less than zero."""
    missing = 0.5 * (missing + missing.mT)
    whole = whole.diagonal(dim1=-1, dim2=-2)
    sd = whole.clamp_min(torch.finfo(whole.dtype).tiny ** 0.5).sqrt()  # the units of each output
    units = sd.unsqueeze(-1) * sd.unsqueeze(-2)
    scaled = missing / units
    values, vectors = torch.linalg.eigh(scaled.detach())
    floor = 1e-14 * (1 + values.abs().amax(-1, keepdim=True))
    lift = (floor - values).clamp_min(0)
    # f(S) of a symmetric matrix has the derivative V (F ∘ VᵀdSV) Vᵀ, F the differences of f over
    # those of the eigenvalues
    steps = values.unsqueeze(-1) - values.unsqueeze(-2)
    slopes = torch.where(
        steps.abs() > floor.unsqueeze(-1),
        (lift.unsqueeze(-1) - lift.unsqueeze(-2)) / steps,
        -(lift > 0).to(lift).unsqueeze(-1).expand_as(steps),
    )
    moved = slopes * (vectors.mT @ (scaled - scaled.detach()) @ vectors)
    return missing + vectors @ (torch.diag_embed(lift) + moved) @ vectors.mT * units


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
    omegas, weights = own.nodes(found)
    factor = term.factor(omegas[0])
    kept = (weights * factor.square().sum((-1, -2))).sum(-1)
    whole = _periodised(term, own).diagonal(dim1=-1, dim2=-2).sum(-1) / term.outputscale
    share = (1 - kept / whole).abs().max().item()
    return GridAccuracy(share, _aliasing(term, own, found), lattice.tolerance.item())


def _aliasing(term: Term, own: LatticeDraw, found: Sequence[Spectrum]) -> float:
    """The sum over the leaves; a product errs by no more."""
    total = 0.0
    for index, (law, dims) in enumerate(zip(found, own.dims, strict=True)):
        factor = term.factor if index == 0 and term.factor.degree else None
        known = isinstance(law, GammaMixture)
        total += (_added if known else _images)(law, factor, own.lattice, dims)
    return total


def _added(
    law: GammaMixture, factor: Factor | None, lattice: Lattice, dims: tuple[int, ...]
) -> float:
    """The largest error of a block at lags up to the longest from a datum, relative to K(0)."""
    spacing, lag = lattice.spacing[list(dims)], lattice.lag[list(dims)]
    shares = torch.linspace(0, 1, _LAGS).to(lag)
    lags = torch.cartesian_prod(*[shares] * len(dims)).reshape(-1, len(dims)) * lag
    if factor is None:
        more = (nonzero_sum(law, spacing) - 1).clamp_min(0)  # than k(0), where weights end at 0
        return max((aliased(law, spacing, own) + more).abs().max().item() for own in lags)
    whole = _block(factor, torch.diag_embed(law.second_moments(len(dims))))
    size = whole.diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    added = [_block(factor, aliased_curvature(law, spacing, own)) / size for own in lags]
    return max(own.abs().max().item() for own in added)


def _images(law: Spectrum, factor: Factor | None, lattice: Lattice, dims: tuple[int, ...]) -> float:
    """The image at P − L along every axis, and shells of images at jP."""
    period, lag = lattice.period.tolist(), lattice.lag.tolist()
    tilt, d = 0 if factor is None else factor.degree, len(dims)

    def correlation(j: int, share: float) -> float:
        """The largest over the axes at j P − share · L."""
        lags = [max(j * period[dim] - share * lag[dim], 0.0) for dim in dims]
        return max(float(law.correlation(r, axis, tilt)) for axis, r in enumerate(lags))

    shells = range(1, _SHELLS + 1)
    far = sum(((2 * j + 1) ** d - (2 * j - 1) ** d) * correlation(j, 0.0) for j in shells)
    return d * correlation(1, 1.0) + far


def _periodised(term: Term, own: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """Σ_j K(jP) of one term: a product over its leaves, which see different inputs."""
    scale, factor = term.outputscale[..., None, None], term.factor
    spacings = [own.lattice.spacing[list(dims)] for dims in own.dims]
    parts = list(zip(term.leaves, spectra_of(term), spacings, strict=True))
    if not factor.degree:
        matrix = factor.matrix @ factor.matrix.mT
    else:
        matrix = _block(factor, _curvature(*parts.pop(0)))
    for part in parts:
        matrix = matrix * _sum_over_images(*part)[..., None, None]
    return scale * matrix


def _curvature(leaf: Leaf, law: Spectrum, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b d d"]:
    """Minus the Hessian of Σ_j k(τ + jP) at zero."""
    if isinstance(law, GammaMixture):
        return second_moments(law, spacing)
    zero = torch.diag_embed(law.second_moments(len(spacing)))
    try:
        images = minus_hessian(Leaf(leaf.kernel), _nearest(spacing).unsqueeze(-2)).squeeze(-3)
    except NotImplementedError:  # no closed form
        return zero
    return zero + images.sum(-3)


def _sum_over_images(leaf: Leaf, law: Spectrum, spacing: Float[Tensor, "d"]) -> Float[Tensor, "*b"]:
    """Σ_j k(jP) / k(0)."""
    if isinstance(law, GammaMixture):
        return nonzero_sum(law, spacing).clamp_min(1)  # with the weight of zero
    lags = _nearest(spacing)
    zero, kernel = torch.zeros_like(lags), leaf.kernel
    try:
        images = kernel.forward(lags, zero, diag=True) / kernel.forward(zero, zero, diag=True)
    except NotImplementedError:  # no closed form
        return spacing.new_ones(())
    return 1 + images.sum(-1)


def _nearest(spacing: Float[Tensor, "d"]) -> Float[Tensor, "n d"]:
    """jP of the nearest images."""
    shifts = [shift for shift in product((-1, 0, 1), repeat=len(spacing)) if any(shift)]
    return spacing.new_tensor(shifts) * (2 * torch.pi / spacing)


def second_moment(
    term: Term, images: Float[Tensor, "*b m q r"], weights: Float[Tensor, "*b m"]
) -> Float[Tensor, "*b q q"]:
    """Σ w C Cᴴ of what becomes of the factor of a term."""
    weighted = weights[..., None, None] * images
    outer = torch.einsum("...mqr,...msr->...qs", weighted, images.conj())
    return term.outputscale[..., None, None] * outer.real


def at_zero(term: Term) -> Float[Tensor, "*b p p"]:
    """K(0) of one term."""
    scale, factor = term.outputscale[..., None, None], term.factor
    if not factor.degree:
        return scale * factor.matrix @ factor.matrix.mT
    leaf = term.leaves[0]
    dims = len(leaf.active_dims) if leaf.active_dims is not None else factor.num_outputs
    return scale * _block(factor, torch.diag_embed(spectrum(leaf.kernel).second_moments(dims)))


def _block(factor: Factor, outer: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b p p"]:
    """B B* for the mean of ω ωᵀ, or minus a Hessian."""
    return factor.assemble(factor.embedded_outer(outer))
