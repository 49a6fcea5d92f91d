"""What a frequency grid leaves out of a kernel, and of symbols of its field."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import scipy.stats
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.expansion import Expansion
from gp_orff.features.frequencies.lattice_nodes import LatticeDraw
from gp_orff.features.frequencies.remainder import remainder
from gp_orff.features.frequencies.rule import Draw
from gp_orff.kernels.closed_form import at_zero, derivatives, field_block
from gp_orff.kernels.factors import embedded
from gp_orff.kernels.spectra.base import Spectrum
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture
from gp_orff.kernels.spectra.lattice_sums import nonzero_sum, second_moments
from gp_orff.kernels.tree import Leaf, Term, spectra_of, terms, varies_in_space
from gp_orff.symbols.base import Identity, Symbol


def left_out(
    symbol: Symbol,
    kernel: Kernel,
    draws: Sequence[Draw],
    space: Sequence[int],
    expansion: Expansion | None = None,
) -> tuple[Float[Tensor, "*b q q"], Float[Tensor, "*b q q"]] | None:
    """Var Q f less that on a grid, differentiable: white, and common to all points; None for other
    rules.

    For the field itself, whatever its directions of space, in closed form; its features, where they
    are at hand, tell what the grid holds. For others by quadrature beyond the grid.

    What lies beyond the grid is white. What varies too slowly for it is a constant, such as that of
    a potential; with a reference it drops out, and what is white there is common to all points.
    """
    if not all(isinstance(own, LatticeDraw) for own in draws):
        return None
    pairs = list(zip(terms(kernel), draws, strict=True))
    if any(t.factor.degree + symbol.order < 0 and varies_in_space(t, space) for t, _ in pairs):
        raise NotImplementedError(
            f"{type(symbol).__name__} of a field that is no derivative itself needs frequencies "
            "near zero, which a grid does not have: expected frequencies such as "
            "gp_orff.QuasiMonteCarlo(1024)"
        )
    if not all(own.correct for own in draws):
        return None
    if isinstance(symbol, Identity):
        delta = _of_the_field(pairs, expansion)
        return delta, torch.zeros_like(delta)
    delta, common = zip(*(_left_out(symbol, *pair, space) for pair in pairs), strict=True)
    return sum(delta), sum(common)


def _of_the_field(
    pairs: Sequence[tuple[Term, LatticeDraw]], expansion: Expansion | None
) -> Float[Tensor, "*b p p"]:
    """In closed form: Σ_j K(jP) less what the grid holds."""
    whole = sum(periodised(*pair) for pair in pairs)
    held = sum(kept(*pair) for pair in pairs) if expansion is None else expansion.mean_variance()
    return lifted(whole - held, whole)


def kept(term: Term, own: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """K(0) of one term on its grid: Σ w B Bᵀ."""
    if not term.leaves:  # a constant
        return at_zero(term)
    omegas, weights = own.nodes(spectra_of(term))
    return second_moment(term, term.factor(omegas[0]), weights)


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


def periodised(term: Term, own: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """Σ_j K(jP) of one term: a product over its leaves, which see different inputs."""
    scale, factor = term.outputscale[..., None, None], term.factor
    spacings = [own.lattice.spacing[list(dims)] for dims in own.dims]
    parts = list(zip(term.leaves, spectra_of(term), spacings, strict=True))
    if not factor.degree:
        matrix = factor.matrix @ factor.matrix.mT
    else:
        matrix = field_block(factor, _curvature(*parts.pop(0)))
    for part in parts:
        matrix = matrix * _sum_over_images(*part)[..., None, None]
    return scale * matrix


def _curvature(
    leaf: Leaf, spectrum: Spectrum, spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b d d"]:
    """Minus the Hessian of Σ_j k(τ + jP) at zero."""
    if isinstance(spectrum, GammaMixture):
        return second_moments(spectrum, spacing)
    zero = torch.diag_embed(spectrum.second_moments(len(spacing)))
    try:
        images = derivatives(leaf.kernel, _nearest(spacing).unsqueeze(-2), 2).squeeze(-3)
    except NotImplementedError:  # no closed form
        return zero
    return zero - images.sum(-3)


def _sum_over_images(
    leaf: Leaf, spectrum: Spectrum, spacing: Float[Tensor, "d"]
) -> Float[Tensor, "*b"]:
    """Σ_j k(jP) / k(0)."""
    if isinstance(spectrum, GammaMixture):
        return nonzero_sum(spectrum, spacing).clamp_min(1)  # with the weight of zero
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


def _left_out(
    symbol: Symbol, term: Term, own: LatticeDraw, space: Sequence[int]
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]]:
    """Of one term."""
    if not term.leaves:  # a constant
        q = symbol.num_outputs(term.num_outputs)
        return (term.outputscale.new_zeros(q, q).double(),) * 2
    delta = _second_moment(symbol, term, own, *remainder(own, spectra_of(term)), space)
    if symbol.reference is not None:
        return delta, delta
    fades = term.factor.degree + symbol.order > 0  # Q A Q* is zero at ω = 0
    if fades or not (symbol.homogeneous and len(term.leaves) == 1 and varies_in_space(term, space)):
        return delta, torch.zeros_like(delta)
    return delta, _constant(symbol, term, own, space, delta)


def _constant(
    symbol: Symbol,
    term: Term,
    own: LatticeDraw,
    space: Sequence[int],
    delta: Float[Tensor, "q q"],
) -> Float[Tensor, "q q"]:
    """What the frequencies of a grid, and those beyond, leave of a variance that is known.

    It completes their sum at lag zero, as S(0) h^d does where the density is smooth, and is finite
    where that diverges; the integral of S over the cell around zero is less by O(h²) of itself.
    """
    spectrum, spacing = spectra_of(term)[0], own.lattice.spacing[list(own.dims[0])]
    if spectrum.isotropic_lengthscale is not None:
        whole = _over_directions(symbol, term, own, space, spectrum.isotropic_lengthscale.double())
        kept = _second_moment(symbol, term, own, *own.nodes([spectrum]), space)
        return lifted(whole - kept - delta, whole)
    origin = torch.zeros_like(spacing).unsqueeze(0)
    cell = spectrum.log_density(origin).exp() * spacing.prod()
    kept = _second_moment(symbol, term, own, [origin], torch.ones_like(cell), space)
    around = _over_directions(symbol, term, own, space, torch.ones_like(origin))
    return cell * (around - kept)


def _over_directions(
    symbol: Symbol,
    term: Term,
    own: LatticeDraw,
    space: Sequence[int],
    lengthscale: Float[Tensor, "1 d"],
) -> Float[Tensor, "q q"]:
    """The mean of Q A Q* over directions of ℓω."""
    points, weights = _sphere(len(own.dims[0]), own.lattice.spacing.device)
    return _second_moment(symbol, term, own, [points / lengthscale], weights, space)


def _second_moment(
    symbol: Symbol,
    term: Term,
    own: LatticeDraw,
    omegas: Sequence[Float[Tensor, "m k"]],
    weights: Float[Tensor, "m"],
    space: Sequence[int],
) -> Float[Tensor, "q q"]:
    """Σ w Q A Q* over frequencies of the leaves."""
    inputs = len(own.lattice.spacing)
    wide = sum(embedded(*pair, inputs) for pair in zip(omegas, own.dims, strict=True))
    images = symbol(wide[:, list(space)], term.num_outputs).to(torch.complex128)
    images = images @ term.factor(omegas[0]).to(torch.complex128)
    return second_moment(term, images, weights)


def _sphere(dims: int, device: torch.device) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Directions and weights of a mean over the sphere; spectrally accurate for dims ≤ 3."""
    if dims == 1:
        points = torch.ones(1, 1, dtype=torch.float64)
    elif dims <= 3:
        angle = torch.arange(128, dtype=torch.float64) * (2 * math.pi / 128)
        points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        sequence = scipy.stats.qmc.Sobol(dims, seed=0).random_base2(14)
        normal = torch.from_numpy(scipy.stats.norm.ppf(sequence))
        points = normal / normal.norm(dim=-1, keepdim=True)
    points = points.to(device)
    if dims != 3:
        return points, points.new_full((len(points),), 1 / len(points))
    height, weight = (torch.from_numpy(v).to(device) for v in np.polynomial.legendre.leggauss(64))
    flat = (1 - height.square()).sqrt()[:, None, None] * points  # (64, 128, 2)
    heights = height[:, None, None].expand(*flat.shape[:2], 1)
    weights = (0.5 * weight / len(points)).repeat_interleave(len(points))
    return torch.cat([flat, heights], dim=-1).flatten(0, 1), weights
