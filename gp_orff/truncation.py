"""What a frequency grid leaves out of a kernel, and what it returns.

The lattice of spacing h, all its points taken, gives the periodised kernel Σ_j K(τ + jP), P = 2π/h.
A grid that ends misses the share of the points beyond,

    δ = Σ_j K(jP) − Σ_k w_k B(ω_k)B(ω_k)ᵀ ⪰ 0 ,

a p×p block for every point. Aliasing, K − Σ_j K(· + jP), is reported apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.expansion import Expansion
from gp_orff.frequencies import Draw, LatticeDraw, remainder
from gp_orff.frequencies.lattice_draw import unit_reaches
from gp_orff.kernels import minus_hessian
from gp_orff.resolution import spectra_of
from gp_orff.spectra import Spectrum, spectrum
from gp_orff.terms import Leaf, Term, terms

_SHELLS = 20  # of images, whose aliasing is added up
_FAR = 1e3  # lengthscales, where correlations that fall exponentially are zero in floating point


@dataclass(frozen=True)
class GridAccuracy:
    """How well one term of a kernel tree is represented, at its present hyperparameters."""

    truncated: float  # the share of the variance beyond the grid
    aliasing: float  # about |Σ_j K(τ + jP)| / |K(0)|, j ≠ 0, at the longest lag τ from a datum
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
    missing = whole - expansion.mean_variance()
    return lifted(missing, whole)


def lifted(
    missing: Float[Tensor, "*b p p"], whole: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b p p"]:
    """A part of a variance without what rounding, and images that are not known in closed form,
    may leave below zero."""
    missing = 0.5 * (missing + missing.mT)
    whole = whole.diagonal(dim1=-1, dim2=-2)  # in the units of each output
    sd = whole.clamp_min(torch.finfo(whole.dtype).tiny ** 0.5).sqrt()
    scaled = missing / (sd.unsqueeze(-1) * sd.unsqueeze(-2))
    eigenvalues, vectors = torch.linalg.eigh(scaled.detach())
    lowest = vectors[..., :1]  # the eigenvalue's slope is that of the form at a fixed vector
    size = 1 + eigenvalues.abs().amax(-1)
    least = (lowest.mT @ scaled @ lowest)[..., 0, 0]
    lift = (1e-14 * size - least).clamp_min(0).unsqueeze(-1)
    return missing + torch.diag_embed(lift * sd.square())


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
    kept = _sum(term, *own.nodes(found)).diagonal(dim1=-1, dim2=-2).sum(-1)
    whole = _periodised(term, own).diagonal(dim1=-1, dim2=-2).sum(-1)
    share = (1 - kept / whole).clamp_min(0).max().item()
    return GridAccuracy(share, _aliasing(term, own, found), lattice.tolerance.item())


def _aliasing(term: Term, own: LatticeDraw, found: Sequence[Spectrum]) -> float:
    """The image at P − L along every axis, and shells of images at jP."""
    period, lag = own.lattice.period.tolist(), own.lattice.lag.tolist()
    total = 0.0
    for index, (law, dims) in enumerate(zip(found, own.dims, strict=True)):
        tilt, d = term.factor.degree if index == 0 else 0, len(dims)

        def correlation(j: int, share: float, law=law, dims=dims, tilt=tilt) -> float:
            """The largest over the axes at j P − share · L."""
            lags = [max(j * period[dim] - share * lag[dim], 0.0) for dim in dims]
            return max(float(law.correlation(r, axis, tilt)) for axis, r in enumerate(lags))

        total += d * correlation(1, 1.0)
        for j in range(1, _SHELLS + 1):
            total += ((2 * j + 1) ** d - (2 * j - 1) ** d) * correlation(j, 0.0)
    return total


def _periodised(term: Term, own: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """Σ_j K(jP) of one term: over the nearest images, or where they fall slowly over frequencies,
    those that the grid lacks included."""
    found = spectra_of(term)
    if any(map(_long_ranged, found, own.dims)):
        return _sum(term, *own.nodes(found)) + _sum(term, *remainder(own, found))
    zero = at_zero(term)
    seen = sorted({dim for dims in own.dims for dim in dims})
    shifts = [shift for shift in product((-1, 0, 1), repeat=len(seen)) if any(shift)]
    if not shifts:
        return zero
    period = own.lattice.period
    lags = period.new_zeros(len(shifts), len(period))
    lags[:, seen] = period.new_tensor(shifts) * period[seen]
    try:
        return zero + _at(term, own.dims, lags).sum(-3)
    except NotImplementedError:  # no closed form
        return zero


def _long_ranged(law: Spectrum, dims: Sequence[int]) -> bool:
    """Whether correlations fall as a power of the lag."""
    far = _FAR * unit_reaches(law, len(dims))
    return any(law.correlation(lag, axis, 0) > 0 for axis, lag in enumerate(far))


def _sum(
    term: Term, omegas: Sequence[Float[Tensor, "m k"]], weights: Float[Tensor, "*b m"]
) -> Float[Tensor, "*b p p"]:
    return second_moment(term, term.factor(omegas[0]).to(weights), weights)


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
    outer = torch.diag_embed(spectrum(leaf.kernel).second_moments(dims))
    return scale * factor.assemble(factor.embedded_outer(outer))


def _at(
    term: Term, dims: Sequence[tuple[int, ...]], lags: Float[Tensor, "n d"]
) -> Float[Tensor, "*b n p p"]:
    """K at some lags, from the closed forms of the exact kernels."""
    own = [lags[:, list(columns)] for columns in dims]
    scale, factor, rest = term.outputscale[..., None, None, None], term.factor, 0
    if factor.degree:
        hessian = minus_hessian(Leaf(term.leaves[0].kernel), own[0].unsqueeze(-2)).squeeze(-3)
        matrix, rest = factor.assemble(factor.embedded_outer(hessian)), 1
    else:
        matrix = (factor.matrix @ factor.matrix.mT).unsqueeze(-3)
    for leaf, lag in list(zip(term.leaves, own, strict=True))[rest:]:
        zero = torch.zeros_like(lag)
        k = leaf.kernel.forward(lag, zero, diag=True) / leaf.kernel.forward(zero, zero, diag=True)
        matrix = matrix * k[..., None, None]
    return scale * matrix
