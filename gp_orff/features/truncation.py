"""The variance that frequencies omit, and how accurately they represent each term."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.features.assemble import leaf_spectra, with_cells
from gp_orff.features.draws import Draw, Lattice, LatticeDraw, LeafSpectrum, remainder
from gp_orff.features.expansion import Expansion
from gp_orff.kernels.derivatives import at_zero, derivatives
from gp_orff.kernels.lattice_sums import (
    aliased,
    aliased_curvature,
    moments_near_zero,
    nonzero_sum,
    second_moments,
    weight_at_zero,
)
from gp_orff.kernels.spectra import ScaleMixture, Spectrum, unit_sphere
from gp_orff.kernels.tree import (
    Factor,
    Leaf,
    Term,
    embedded,
    spectra_of,
    terms,
    varies_in_space,
)
from gp_orff.symbols.base import Symbol

# The truncated variance δ: the variance of a field, or of Q f, that a frequency grid omits.
#
# For the field itself:
#
# 1. The total is not K(0) but the variance Σ_j K(jP) of the kernel made periodic, since this is
#    what all points of the lattice represent together. `periodised_variance` computes it in closed
#    form.
# 2. The variance on the grid is Σ w B Bᵀ over its points.
# 3. δ is the difference. Its eigenvalues are raised above rounding (`clamp_eigenvalues`), because δ
#    is added to a noise covariance, and with a gradient that is exact for the clamped function.
#
# For Q f the total has no closed form in general: δ is a quadrature over the frequencies beyond the
# grid (`remainder`), weighted with |Q(ω)|². Where Q A Q* does not vanish at ω = 0, frequencies too
# low for the grid contribute a variance that all points have in common.


def truncated_variance(
    symbol: Symbol,
    kernel: Kernel,
    draws: Sequence[Draw],
    space: Sequence[int],
    expansion: Expansion | None = None,
) -> tuple[Float[Tensor, "*b q q"], Float[Tensor, "*b q q"]] | None:
    """Var Q f(x) minus its value on a frequency grid, differentiable; None for other rules.

    It has two parts. Frequencies beyond the grid give δ, which acts as noise that is independent
    between points. Frequencies too low for the grid give a variance common to all points, such as
    that of the constant of a potential. If the symbol subtracts its value at a reference point,
    the constant cancels, and the δ of the reference value is common to all points.

    For the field itself, Q = 1, δ has a closed form. For other symbols it is a quadrature over the
    frequencies beyond the grid.

    Args:
        symbol: Q, with q outputs.
        kernel: the kernel tree of f.
        draws: the frequencies of its terms.
        space: the input columns that Q acts on.
        expansion: the features of f on the grid, if they are already computed.

    Raises:
        NotImplementedError: Q needs frequencies near zero, as a potential of a field does whose
            kernel is no derivative.
    """
    if not all(draw.on_lattice or draw.expands for draw in draws):
        return None
    every = list(zip(terms(kernel), draws, strict=True))
    pairs = [(term, draw) for term, draw in every if draw.on_lattice]
    others = [(term, draw) for term, draw in every if draw.expands]
    on_lattice = [term for term, draw in every if not draw.decays]
    if any(t.factor.degree + symbol.order < 0 and varies_in_space(t, space) for t in on_lattice):
        raise NotImplementedError(
            f"{type(symbol).__name__} of a field that is not itself a derivative needs frequencies "
            "near zero: expected random frequencies, such as gp_orff.QuasiMonteCarlo(1024), got a "
            "frequency grid, which has none near zero"
        )
    if not all(draw.diagonal_correction for draw in draws):
        return None
    if symbol.is_identity:
        delta = sum(draw.truncated_image(symbol, term, space) for term, draw in others)
        if pairs:
            cells = zip(*with_cells(*zip(*pairs, strict=True)), strict=True)
            delta = delta + _truncated_field(list(cells), None if others else expansion)
        return delta, torch.zeros_like(delta)
    parts = [_truncated_term(symbol, *pair, space) for pair in pairs]
    for term, draw in others:
        delta = draw.truncated_image(symbol, term, space)
        parts.append((delta, torch.zeros_like(delta) if symbol.reference is None else delta))
    delta, common = zip(*parts, strict=True)
    return sum(delta), sum(common)


def _truncated_field(
    pairs: Sequence[tuple[Term, LatticeDraw]], expansion: Expansion | None
) -> Float[Tensor, "*b p p"]:
    """δ of the field itself: Σ_j K(jP) minus the variance on the grid; both contain the cells."""
    total = sum(periodised_variance(*pair) for pair in pairs)
    grid = (
        sum(grid_variance(*pair) for pair in pairs)
        if expansion is None
        else expansion.mean_variance()
    )
    return clamp_eigenvalues(total - grid, total)


def grid_variance(term: Term, draw: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """K(0) of one term on its grid: Σ w B Bᵀ."""
    if not term.leaves:  # a constant
        return at_zero(term)
    omegas, weights = draw.nodes(spectra_of(term))
    return second_moment(term, term.factor(omegas[0]), weights)


def clamp_eigenvalues(
    part: Float[Tensor, "*b p p"], total: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b p p"]:
    """A part of a total variance, with its eigenvalues raised to at least 1e-14 of the total.

    Rounding, or images of the kernel that have no closed form, can make them slightly negative.
    """
    part = 0.5 * (part + part.mT)
    total = total.diagonal(dim1=-1, dim2=-2)
    sd = total.clamp_min(torch.finfo(total.dtype).tiny ** 0.5).sqrt()  # the units of each output
    units = sd.unsqueeze(-1) * sd.unsqueeze(-2)
    scaled = part / units
    values, vectors = torch.linalg.eigh(scaled.detach())
    floor = 1e-14 * (1 + values.abs().amax(-1, keepdim=True))
    # Where no eigenvalue is below the floor, the function is the identity, and so is its gradient.
    lift = (floor - values).clamp_min(0)
    # a function f(S) of a symmetric matrix S = V Λ Vᵀ has the derivative V (F ∘ VᵀdSV) Vᵀ, where
    # F_ij = (f(λ_i) − f(λ_j)) / (λ_i − λ_j)
    # Equal eigenvalues take the derivative f′ instead of the divided difference.
    steps = values.unsqueeze(-1) - values.unsqueeze(-2)
    slopes = torch.where(
        steps.abs() > floor.unsqueeze(-1),
        (lift.unsqueeze(-1) - lift.unsqueeze(-2)) / steps,
        -(lift > 0).to(lift).unsqueeze(-1).expand_as(steps),
    )
    change = slopes * (vectors.mT @ (scaled - scaled.detach()) @ vectors)
    return part + vectors @ (torch.diag_embed(lift) + change) @ vectors.mT * units


def periodised_variance(term: Term, draw: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """Σ_j K(jP) of one term, the variance of the kernel made periodic with period P = 2π/h.

    It is a product over the leaves of the term, which depend on different inputs. Without a closed
    form, a quadrature over the frequencies beyond the grid takes its place.
    """
    scale, factor = term.outputscale[..., None, None], term.factor
    if not factor.closed_form:
        omegas, weights = remainder(draw, spectra_of(term))
        return grid_variance(term, draw) + second_moment(term, factor(omegas[0]), weights)
    lattice, columns = draw.lattice, [list(dims) for dims in draw.dims]
    boxes = [(lattice.spacing[dims], lattice.constant[dims]) for dims in columns]
    pairs = zip(term.leaves, spectra_of(term), strict=True)
    parts = [(*pair, *box) for pair, box in zip(pairs, boxes, strict=True)]
    if not factor.degree:
        matrix = factor.matrix @ factor.matrix.mT
    else:
        matrix = factor.block(_curvature(*parts.pop(0)))
    for part in parts:
        matrix = matrix * _sum_over_images(*part)[..., None, None]
    return scale * matrix


def _curvature(
    leaf: Leaf, spectrum: Spectrum, spacing: Float[Tensor, "d"], constant: Bool[Tensor, "d"]
) -> Float[Tensor, "*b d d"]:
    """Minus the Hessian of Σ_j k(τ + jP) at τ = 0, without images along `constant` inputs."""
    zero = torch.diag_embed(spectrum.second_moments(len(spacing)))
    if constant.all():
        return zero
    if spectrum.is_mixture:
        return _lattice_moments(spectrum, spacing, constant)
    lags = _nearest(spacing, constant).unsqueeze(-2)
    try:
        images = derivatives(leaf.kernel, lags, 2).squeeze(-3)
    except NotImplementedError:  # no closed form
        return zero
    return zero - images.sum(-3)


def _lattice_moments(
    spectrum: ScaleMixture, spacing: Float[Tensor, "d"], constant: Bool[Tensor, "d"]
) -> Float[Tensor, "*b d d"]:
    """Σ_k w_k ω_k ω_kᵀ over the whole lattice, with the weights of the grid."""
    if not constant.any():
        return second_moments(spectrum, spacing)
    d, varying = len(spacing), (~constant).nonzero().squeeze(-1).tolist()
    plane = second_moments(spectrum.marginal(varying), spacing[varying])
    plane = embedded(embedded(plane, varying, d).mT, varying, d)
    across = nonzero_sum(spectrum.marginal(varying, 1), spacing[varying]).clamp_min(1)
    return plane + torch.diag_embed(constant * spectrum.second_moments(d) * across.unsqueeze(-1))


def _sum_over_images(
    leaf: Leaf, spectrum: Spectrum, spacing: Float[Tensor, "d"], constant: Bool[Tensor, "d"]
) -> Float[Tensor, "*b"]:
    """Σ_j k(jP) / k(0), without images along `constant` inputs."""
    if constant.all():
        return spacing.new_ones(())
    if spectrum.is_mixture:
        if constant.any():
            varying = (~constant).nonzero().squeeze(-1).tolist()
            spectrum, spacing = spectrum.marginal(varying), spacing[varying]
        return nonzero_sum(spectrum, spacing).clamp_min(1)  # ω = 0 makes up the rest of k(0) = 1
    lags = _nearest(spacing, constant)
    zero, kernel = torch.zeros_like(lags), leaf.kernel
    try:
        images = kernel.forward(lags, zero, diag=True) / kernel.forward(zero, zero, diag=True)
    except NotImplementedError:  # no closed form
        return spacing.new_ones(())
    return 1 + images.sum(-1)


def _nearest(spacing: Float[Tensor, "d"], constant: Bool[Tensor, "d"]) -> Float[Tensor, "n d"]:
    """The lags jP of the nearest images, j ∈ {−1, 0, 1}^d without 0; j = 0 where `constant`."""
    steps = [(0,) if flat else (-1, 0, 1) for flat in constant.tolist()]
    shifts = [shift for shift in product(*steps) if any(shift)]
    return spacing.new_tensor(shifts) * (2 * torch.pi / spacing)


def second_moment(
    term: Term, images: Float[Tensor, "*b m q r"], weights: Float[Tensor, "*b m"]
) -> Float[Tensor, "*b q q"]:
    """The outputscale of a term times Σ w C Cᴴ, where the C are `images` Q B of its factor B."""
    weighted = weights[..., None, None] * images
    outer = torch.einsum("...mqr,...msr->...qs", weighted, images.conj())
    return term.outputscale[..., None, None] * outer.real


def _truncated_term(
    symbol: Symbol, term: Term, draw: LatticeDraw, space: Sequence[int]
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]]:
    """`truncated_variance` of one term."""
    if not term.leaves:  # a constant
        q = symbol.num_outputs(term.num_outputs)
        return (term.outputscale.new_zeros(q, q).double(),) * 2
    delta = _second_moment(symbol, term, draw, *remainder(draw, spectra_of(term)), space)
    if symbol.reference is not None:
        return delta, delta
    fades = term.factor.degree + symbol.order > 0  # Q A Q* is zero at ω = 0
    if fades or not (symbol.homogeneous and len(term.leaves) == 1 and varies_in_space(term, space)):
        return delta, torch.zeros_like(delta)
    return delta, _low_frequency_variance(symbol, term, draw, space, delta)


def truncated_variance_of(
    symbol: Symbol, term: Term, draw: LatticeDraw, space: Sequence[int]
) -> Float[Tensor, "*b q q"]:
    """The variance of Q f, for one term, that a grid omits beyond its largest frequency."""
    if symbol.is_identity:
        return _truncated_field(list(zip(*with_cells([term], [draw]), strict=True)), None)
    return _truncated_term(symbol, term, draw, space)[0]


def image_variance(
    symbol: Symbol, term: Term, draw: LatticeDraw, space: Sequence[int]
) -> Float[Tensor, "*b q q"]:
    """Var Q f of one term on its grid: Σ w Q A Q*."""
    if symbol.is_identity:
        return sum(grid_variance(*pair) for pair in zip(*with_cells([term], [draw]), strict=True))
    if term.leaves:
        return _second_moment(symbol, term, draw, *draw.nodes(spectra_of(term)), space)
    origin = draw.lattice.spacing.new_zeros(1, len(space))  # a constant
    image = symbol(origin, term.num_outputs).to(torch.complex128)
    image = image @ term.factor(origin).to(torch.complex128)
    return second_moment(term, image, origin.new_ones(1))


def _low_frequency_variance(
    symbol: Symbol,
    term: Term,
    draw: LatticeDraw,
    space: Sequence[int],
    delta: Float[Tensor, "q q"],
) -> Float[Tensor, "q q"]:
    """Var Q f(x) of one term from frequencies near zero: the total minus the grid's share and δ.

    For a smooth density it is S(0) h^d; the difference is finite where S(0) is infinite, too. The
    integral of S over the cell around zero would be smaller, by a relative O(h²).
    """
    spectrum, spacing = spectra_of(term)[0], draw.lattice.spacing[list(draw.dims[0])]
    if term.factor.closed_form and spectrum.isotropic_lengthscale is not None:
        total = _mean_over_directions(
            symbol, term, draw, space, spectrum.isotropic_lengthscale.double()
        )
        grid = _second_moment(symbol, term, draw, *draw.nodes([spectrum]), space)
        return clamp_eigenvalues(total - grid - delta, total)
    origin = torch.zeros_like(spacing).unsqueeze(0)
    cell = weight_at_zero(spectrum, spacing)
    grid = _second_moment(symbol, term, draw, [origin], spacing.new_ones(1), space)
    # A(ω) is A(0) at a millionth of the spacing.
    around = _mean_over_directions(symbol, term, draw, space, 1 / (1e-6 * spacing.amin()))
    return cell * (around - grid)


def _mean_over_directions(
    symbol: Symbol,
    term: Term,
    draw: LatticeDraw,
    space: Sequence[int],
    lengthscale: Float[Tensor, "1 d"] | Float[Tensor, ""],
) -> Float[Tensor, "q q"]:
    """The mean of Q A Q* over the sphere ‖ℓω‖ = 1, ℓ being `lengthscale`."""
    points, weights = unit_sphere(len(draw.dims[0]), draw.lattice.spacing.device)
    return _second_moment(symbol, term, draw, [points / lengthscale], weights, space)


def _second_moment(
    symbol: Symbol,
    term: Term,
    draw: LatticeDraw,
    omegas: Sequence[Float[Tensor, "m k"]],
    weights: Float[Tensor, "m"],
    space: Sequence[int],
) -> Float[Tensor, "q q"]:
    """Σ w Q A Q* over the frequencies `omegas` of the leaves, times the outputscale."""
    num_inputs = len(draw.lattice.spacing)
    omega = sum(embedded(*pair, num_inputs) for pair in zip(omegas, draw.dims, strict=True))
    images = symbol(omega[:, list(space)], term.num_outputs).to(torch.complex128)
    images = images @ term.factor(omegas[0]).to(torch.complex128)
    return second_moment(term, images, weights)


# How accurately the frequencies represent each term of a kernel.
#
# Truncation is computed exactly, as above. Aliasing is the error of the covariance at lags between
# a datum and a point of the domain. For scale mixtures it is computed at a few lags by theta
# functions; for other spectra it is bounded by correlations at the nearest images. Random
# frequencies have no such errors, but a variance: the effective sample size says how evenly they
# share the variance.


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
    of_grids = [(term, draw) for term, draw in pairs if not draw.decays]
    return [
        grid_accuracy(term, draw) if draw.on_lattice else draw.accuracy(term)
        for term, draw in of_grids
        if draw.on_lattice or draw.expands
    ]


@torch.no_grad()
def _sample_accuracy(term: Term, draw: Draw) -> SampleAccuracy:
    if not term.leaves:
        return SampleAccuracy(1, 1.0)
    if term.factor.is_constant:
        variances = draw.sample_weights(spectra_of(term))  # times a constant, |L|²
    else:
        omegas, weights = draw.nodes(spectra_of(term))
        variances = weights * term.factor(omegas[0]).abs().square().sum((-1, -2))
    size = variances.sum(-1).square() / variances.square().sum(-1)
    return SampleAccuracy(draw.num_frequencies, size.min().item())


@torch.no_grad()
def grid_accuracy(term: Term, draw: LatticeDraw) -> GridAccuracy:
    """The errors of one term on its lattice."""
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
        if leaf.spectrum.is_mixture and leaf.variance is None:
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
    shares = torch.linspace(0, 1, 4).to(lag)
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

    counts = {j: (2 * j + 1) ** d - (2 * j - 1) ** d for j in range(1, 21)}  # of 20 shells
    return d * largest(1, 1.0) + sum(n * largest(j, 0.0) for j, n in counts.items())
