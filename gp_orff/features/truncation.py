"""The variance that a frequency grid omits, and the accuracy of frequencies for each term."""

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

# The truncated variance δ is the variance of a field f, or of Q f, that a frequency grid omits.
#
# For the field itself:
#
# 1. The total is the variance Σ_j K(jP) of the kernel made periodic, not K(0), because all points
#    of the infinite lattice together represent the periodic kernel. `periodised_variance` computes
#    it in closed form.
# 2. The variance on the grid is Σ w B Bᵀ over the points of the grid.
# 3. δ is the difference of 1 and 2. Because δ is added to a noise covariance, `clamp_eigenvalues`
#    raises its eigenvalues above rounding errors. The gradient is exact for the clamped function.
#
# For Q f the total has no closed form in general. Then δ is a quadrature over the frequencies
# beyond the grid (`remainder`), weighted with |Q(ω)|². If Q A Q* does not vanish at ω = 0,
# frequencies too low for the grid contribute a variance that all points have in common.


def truncated_variance(
    symbol: Symbol,
    kernel: Kernel,
    draws: Sequence[Draw],
    space: Sequence[int],
    expansion: Expansion | None = None,
) -> tuple[Float[Tensor, "*b q q"], Float[Tensor, "*b q q"]] | None:
    """Return the variance of Q f(x) that a frequency grid omits, in two parts.

    Rules without a grid have no such variance; the result is then None. The first part is δ, the
    variance of frequencies beyond the grid. It acts as noise that is independent between points.
    The second part is common to all points. It is the variance of frequencies too low for the grid,
    for example of the constant of a potential. If the symbol subtracts its value at a reference
    point, this constant cancels, and the second part is the δ of the reference value.

    For the field itself, Q = 1, δ has a closed form. For other symbols it is a quadrature over the
    frequencies beyond the grid. Both parts are differentiable.

    Args:
        symbol: the symbol Q, with q outputs.
        kernel: the kernel tree of f.
        draws: the frequencies of each term of the kernel.
        space: the input columns on which Q acts, from 0.
        expansion: the features of f on the grid; None means that they are computed here.

    Raises:
        NotImplementedError: Q needs frequencies near zero, for example a potential of a field
            whose kernel is not a derivative.
    """
    if not all(draw.on_lattice or draw.expands for draw in draws):
        return None
    every = list(zip(terms(kernel), draws, strict=True))
    pairs = [(term, draw) for term, draw in every if draw.on_lattice]
    others = [(term, draw) for term, draw in every if draw.expands]
    on_lattice = [term for term, draw in every if not draw.decays]
    if any(t.factor.degree + symbol.order < 0 and varies_in_space(t, space) for t in on_lattice):
        raise NotImplementedError(
            f"{type(symbol).__name__} needs frequencies near zero because the kernel of the field "
            "is not a derivative: expected random frequencies, such as "
            "gp_orff.QuasiMonteCarlo(1024), got a frequency grid, which omits frequencies near zero"
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
    """Return δ of the field: Σ_j K(jP) minus the variance on the grid.

    Both include the cells around ω = 0.
    """
    total = sum(periodised_variance(*pair) for pair in pairs)
    grid = (
        sum(grid_variance(*pair) for pair in pairs)
        if expansion is None
        else expansion.mean_variance()
    )
    return clamp_eigenvalues(total - grid, total)


def grid_variance(term: Term, draw: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """Return the variance Σ w B Bᵀ of one term on its grid."""
    if not term.leaves:  # a constant
        return at_zero(term)
    omegas, weights = draw.nodes(spectra_of(term))
    return second_moment(term, term.factor(omegas[0]), weights)


def clamp_eigenvalues(
    part: Float[Tensor, "*b p p"], total: Float[Tensor, "*b p p"]
) -> Float[Tensor, "*b p p"]:
    """Return a part of a total variance, with eigenvalues raised to at least 1e-14 of the total.

    Eigenvalues can be slightly negative because of rounding, or because images of the kernel have
    no closed form.
    """
    part = 0.5 * (part + part.mT)
    total = total.diagonal(dim1=-1, dim2=-2)
    sd = total.clamp_min(torch.finfo(total.dtype).tiny ** 0.5).sqrt()  # the units of each output
    units = sd.unsqueeze(-1) * sd.unsqueeze(-2)
    scaled = part / units
    values, vectors = torch.linalg.eigh(scaled.detach())
    floor = 1e-14 * (1 + values.abs().amax(-1, keepdim=True))
    # If no eigenvalue is below the floor, the function and its gradient are the identity.
    lift = (floor - values).clamp_min(0)
    # A function f(S) of a symmetric matrix S = V Λ Vᵀ has the derivative V (F ∘ VᵀdSV) Vᵀ, where
    # F_ij = (f(λ_i) − f(λ_j)) / (λ_i − λ_j). For equal eigenvalues, F_ij is the derivative f′.
    steps = values.unsqueeze(-1) - values.unsqueeze(-2)
    slopes = torch.where(
        steps.abs() > floor.unsqueeze(-1),
        (lift.unsqueeze(-1) - lift.unsqueeze(-2)) / steps,
        -(lift > 0).to(lift).unsqueeze(-1).expand_as(steps),
    )
    change = slopes * (vectors.mT @ (scaled - scaled.detach()) @ vectors)
    return part + vectors @ (torch.diag_embed(lift) + change) @ vectors.mT * units


def periodised_variance(term: Term, draw: LatticeDraw) -> Float[Tensor, "*b p p"]:
    """Return Σ_j K(jP) of one term, the variance of the kernel made periodic with P = 2π/h.

    The value is a product over the leaves of the term, which depend on different inputs. If it has
    no closed form, it is the variance on the grid plus a quadrature over the frequencies beyond.
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
    """Return minus the Hessian of Σ_j k(τ + jP) at τ = 0, with j = 0 along `constant` inputs."""
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
    """Return Σ_k w_k ω_k ω_kᵀ over the infinite lattice, with the weights of the grid."""
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
    """Return Σ_j k(jP) / k(0), with j = 0 along `constant` inputs."""
    if constant.all():
        return spacing.new_ones(())
    if spectrum.is_mixture:
        if constant.any():
            varying = (~constant).nonzero().squeeze(-1).tolist()
            spectrum, spacing = spectrum.marginal(varying), spacing[varying]
        return nonzero_sum(spectrum, spacing).clamp_min(1)  # ω = 0 adds the rest to k(0) = 1
    lags = _nearest(spacing, constant)
    zero, kernel = torch.zeros_like(lags), leaf.kernel
    try:
        images = kernel.forward(lags, zero, diag=True) / kernel.forward(zero, zero, diag=True)
    except NotImplementedError:  # no closed form
        return spacing.new_ones(())
    return 1 + images.sum(-1)


def _nearest(spacing: Float[Tensor, "d"], constant: Bool[Tensor, "d"]) -> Float[Tensor, "n d"]:
    """Return the lags jP of the nearest images, j ∈ {−1, 0, 1}^d except 0.

    Along `constant` inputs j is 0.
    """
    steps = [(0,) if flat else (-1, 0, 1) for flat in constant.tolist()]
    shifts = [shift for shift in product(*steps) if any(shift)]
    return spacing.new_tensor(shifts) * (2 * torch.pi / spacing)


def second_moment(
    term: Term, images: Float[Tensor, "*b m q r"], weights: Float[Tensor, "*b m"]
) -> Float[Tensor, "*b q q"]:
    """Return s Σ w C Cᴴ, where C = Q B are the `images` and s is the outputscale of the term."""
    weighted = weights[..., None, None] * images
    outer = torch.einsum("...mqr,...msr->...qs", weighted, images.conj().to(weighted))
    return term.outputscale[..., None, None] * outer.real


def _truncated_term(
    symbol: Symbol, term: Term, draw: LatticeDraw, space: Sequence[int]
) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]]:
    """Return both parts of `truncated_variance` for one term."""
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
    """Return the variance of Q f, for one term, at frequencies beyond the grid."""
    if symbol.is_identity:
        return _truncated_field(list(zip(*with_cells([term], [draw]), strict=True)), None)
    return _truncated_term(symbol, term, draw, space)[0]


def image_variance(
    symbol: Symbol, term: Term, draw: LatticeDraw, space: Sequence[int]
) -> Float[Tensor, "*b q q"]:
    """Return the variance Σ w Q A Q* of Q f, for one term, on its grid."""
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
    """Return the variance of Q f(x), for one term, from frequencies near zero.

    It is the total minus the variance on the grid and δ. For a smooth density this is S(0) h^d. The
    difference is also finite if S(0) is infinite. The integral of S over the cell around zero is
    smaller by a relative O(h²).
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
    # At a millionth of the spacing, A(ω) equals A(0).
    around = _mean_over_directions(symbol, term, draw, space, 1 / (1e-6 * spacing.amin()))
    return cell * (around - grid)


def _mean_over_directions(
    symbol: Symbol,
    term: Term,
    draw: LatticeDraw,
    space: Sequence[int],
    lengthscale: Float[Tensor, "1 d"] | Float[Tensor, ""],
) -> Float[Tensor, "q q"]:
    """Return the mean of Q A Q* over the sphere ‖ℓω‖ = 1, where ℓ is `lengthscale`."""
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
    """Return s Σ w Q A Q* over the frequencies `omegas` of the leaves; s is the outputscale."""
    num_inputs = len(draw.lattice.spacing)
    omega = sum(embedded(*pair, num_inputs) for pair in zip(omegas, draw.dims, strict=True))
    images = symbol(omega[:, list(space)], term.num_outputs).to(torch.complex128)
    images = images @ term.factor(omegas[0]).to(torch.complex128)
    return second_moment(term, images, weights)


# The accuracy with which frequencies represent each term of a kernel.
#
# The truncated variance is computed as above. Aliasing is the error of the covariance at lags
# between a datum and a point of the domain. For scale mixtures it is computed at a few lags by
# theta functions. For other spectra, correlations at the nearest images bound it. Random
# frequencies have neither error, but their estimate of the kernel varies. The effective sample size
# measures how evenly they divide the variance of the term.


@dataclass(frozen=True)
class GridAccuracy:
    """The errors of a frequency grid for one term of a kernel, at the current hyperparameters.

    All values are fractions without a unit. `ORFFKernel.accuracy()` returns these objects.

    Attributes:
        truncated: the fraction of the variance of the term at frequencies beyond the grid.
        aliasing: an estimate of |Σ_{j≠0} K(τ + jP)| / |K(0)|, the relative error of the covariance
            from the period P of the grid. It is the largest value over lags τ between a datum and
            a point of the domain.
        tolerance: the tolerance of the grid. It exceeds the tolerance of the rule if the number of
            features is limited.

    Example:
        >>> from gpytorch.kernels import RBFKernel
        >>> import gp_orff
        >>> kernel = gp_orff.ORFFKernel(
        ...     RBFKernel(), gp_orff.Grid(((0.0, 1.0),), tolerance=1e-4), num_dims=1
        ... )
        >>> [errors] = kernel.accuracy()
        >>> errors.truncated <= errors.tolerance
        True
    """

    truncated: float
    aliasing: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"{self.truncated:.1e} of the variance truncated, aliasing {self.aliasing:.0e}, "
            f"tolerance {self.tolerance:.0e}"
        )


@dataclass(frozen=True)
class SampleAccuracy:
    """The effective number of random frequencies for one term of a kernel.

    Frequency k of the D frequencies has the variance v_k = w_k tr A(ω_k), where w_k is its weight
    and A(ω_k) the spectral matrix. The effective sample size is (Σ v_k)² / Σ v_k². It is D if all
    v_k are equal, as for the measure `gp_orff.Trace`. It is small if few frequencies have most of
    the variance. `ORFFKernel.accuracy()` returns these objects.

    Attributes:
        num_frequencies: D, the number of frequencies.
        effective_sample_size: (Σ v_k)² / Σ v_k², between 1 and D.

    Example:
        >>> import gp_orff
        >>> kernel = gp_orff.ORFFKernel(
        ...     gp_orff.CurlFreeKernel(num_dims=2),
        ...     gp_orff.QuasiMonteCarlo(64),
        ...     num_dims=2,
        ... )
        >>> [sample] = kernel.accuracy()
        >>> 1 <= sample.effective_sample_size <= sample.num_frequencies
        True
    """

    num_frequencies: int
    effective_sample_size: float

    def __str__(self) -> str:
        return (
            f"{self.num_frequencies} random frequencies, worth {self.effective_sample_size:.0f} "
            "of equal variance"
        )


def accuracy(kernel: Kernel, draws: Sequence[Draw]) -> list[GridAccuracy | SampleAccuracy]:
    """Return the accuracy of each term of a kernel tree, in the order of the terms.

    The list is empty for a quadrature.
    """
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
    """Return the errors of one term on its lattice."""
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
    """Return the sum of the errors of the leaves, a bound of the error of their product."""
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
    """Return the largest error of K(τ) relative to K(0), at a few lags τ up to the longest lag."""
    spacing, lag = draw.lattice.spacing[list(dims)], draw.lattice.lag[list(dims)]
    shares = torch.linspace(0, 1, 4).to(lag)
    lags = torch.cartesian_prod(*[shares] * len(dims)).reshape(-1, len(dims)) * lag
    if factor is None:
        # The weight of ω = 0 is never negative, so the weights may add up to more than k(0) = 1.
        excess = (nonzero_sum(spectrum, spacing) - 1).clamp_min(0)
        return max((aliased(spectrum, spacing, tau) + excess).abs().max().item() for tau in lags)
    variance = factor.variance(spectrum)
    size = variance.diagonal(dim1=-1, dim2=-2).amax(-1)[..., None, None]
    cell = 0.0 if draw.cell is None else torch.diag_embed(moments_near_zero(spectrum, spacing))
    errors = [factor.block(cell + aliased_curvature(spectrum, spacing, tau)) / size for tau in lags]
    return max(error.abs().max().item() for error in errors)


def _sum_of_images(leaf: LeafSpectrum, lattice: Lattice) -> float:
    """Return a bound of the aliasing error from correlations at images of the kernel.

    The bound adds the image at the lag P − L along every axis and 20 shells of images at jP, where
    P is the period and L the longest lag between a datum and a point of the domain.
    """
    period, lag, d = lattice.period.tolist(), lattice.lag.tolist(), leaf.num_dims

    def largest(j: int, share: float) -> float:
        """Return the largest correlation over the axes at the lag j P − share · L."""
        lags = [max(j * period[dim] - share * lag[dim], 0.0) for dim in leaf.dims]
        return max(float(leaf.correlation(r, axis)) for axis, r in enumerate(lags))

    counts = {j: (2 * j + 1) ** d - (2 * j - 1) ** d for j in range(1, 21)}  # images in each shell
    return d * largest(1, 1.0) + sum(n * largest(j, 0.0) for j, n in counts.items())
