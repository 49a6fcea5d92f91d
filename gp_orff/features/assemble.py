"""The features of a kernel tree with a rule of frequencies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.features.columns import TrigColumns, side_by_side, stack_rows
from gp_orff.features.draws import (
    Draw,
    LatticeDraw,
    LeafSpectrum,
    Rule,
    TermSpectrum,
    sum_of_leaves,
)
from gp_orff.features.expansion import (
    Expansion,
    FeatureExpansion,
    GradientExpansion,
    KroneckerExpansion,
    side_by_side_scaled,
)
from gp_orff.kernels.base import positive_root, reduced_root
from gp_orff.kernels.derivatives import at_zero
from gp_orff.kernels.lattice_sums import moments_near_zero, weight_at_zero
from gp_orff.kernels.tree import (
    Factor,
    Mixing,
    Term,
    embedded,
    leaf_dims,
    share_mixing,
    spectra_of,
    terms,
)

# From a kernel and a rule to features:
#
# 1. `term_spectra` writes the kernel as a sum of terms. Each term has the spectra of its leaves and
#    its fraction of the variance.
# 2. The rule draws frequencies for all terms (`draw`).
# 3. `expand` turns frequencies into features at the current hyperparameters. The directions of a
#    frequency ω are the columns of √(outputscale · w) B(ω). Terms on a lattice share their columns.
#    Terms of a mixture share their frequencies, with weights by the balance heuristic. All other
#    terms have separate columns.
# 4. `merge` joins the features of all terms. The Kronecker form remains if all terms have the same
#    mixing matrix.


def draw(kernel: Kernel, rule: Rule, num_dims: int | None = None) -> list[Draw]:
    """Return the frequencies of every term of a kernel tree, in the order of `terms(kernel)`.

    They are on the device of the kernel's parameters.
    """
    draws = rule.draw(term_spectra(kernel, num_dims))
    device = next((parameter.device for parameter in kernel.parameters()), torch.device("cpu"))
    return [own.to(device) for own in draws]


def term_spectra(kernel: Kernel, num_dims: int | None = None) -> list[TermSpectrum]:
    """Return the spectrum of every term of a kernel tree, at the current hyperparameters."""
    summands, spectra = terms(kernel), []
    for term, share in zip(summands, _shares(summands), strict=True):
        dims = [leaf.columns(leaf_dims(term, leaf, num_dims)) for leaf in term.leaves]
        leaves = tuple(leaf_spectra(term, dims))
        spectra.append(TermSpectrum(leaves, term.factor.rank, term.group, share))
    return spectra


@torch.no_grad()
def _shares(summands: Sequence[Term]) -> list[float]:
    """Return the fraction of the variance that each varying term contributes.

    The fraction is 1 if fewer than two terms vary, and 1 for a constant term.
    """
    varying = [term for term in summands if term.leaves]
    if len(varying) < 2:
        return [1.0] * len(summands)
    variances = [at_zero(t).diagonal(dim1=-1, dim2=-2).mean().item() for t in summands]
    total = sum(v for v, term in zip(variances, summands, strict=True) if term.leaves)
    return [v / total if term.leaves else 1.0 for v, term in zip(variances, summands, strict=True)]


def leaf_spectra(term: Term, dims: Sequence[tuple[int, ...]]) -> list[LeafSpectrum]:
    """Return the spectrum of each leaf of a term.

    B(ω) is a function of the frequencies of the first leaf.

    Args:
        term: a term of a kernel tree.
        dims: the input columns that each leaf depends on, from 0, one tuple for each leaf.
    """
    spectra = [LeafSpectrum(*pair, degree=0) for pair in zip(spectra_of(term), dims, strict=True)]
    if spectra:
        density, factor = spectra[0].spectrum, term.factor
        variance = None if factor.closed_form else factor.variance_spectrum(density)
        spectra[0] = replace(spectra[0], degree=factor.degree, variance=variance)
    return spectra


def mixtures(draws: Sequence[Draw]) -> list[list[int]]:
    """Return the indices of terms in groups, one group for each mixture that terms share.

    A term that shares no mixture is a group by itself.
    """
    members: dict[int | Draw, list[int]] = {}
    for index, frequencies in enumerate(draws):
        label = frequencies if frequencies.mixture is None else frequencies.mixture
        members.setdefault(label, []).append(index)
    return list(members.values())


def num_features(kernel: Kernel, draws: Sequence[Draw]) -> int:
    """Return F, the number of features of a kernel with these frequencies."""
    summands, draws = with_cells(terms(kernel), draws)
    total = 0
    for members in mixtures(draws):
        factors = {summands[index].factor for index in members}
        rank = sum(factor.rank for factor in factors)
        if len(factors) > 1:
            rank = min(rank, summands[members[0]].num_outputs)
        total += rank * sum(draws[index].num_columns for index in members)
    return total


def require_separate(
    summands: Sequence[Term], draws: Sequence[Draw], chosen: Sequence[int]
) -> None:
    """Raise an error if the `chosen` terms of a sum share features with other terms.

    Terms that share random frequencies also share features if they have the same factor B(ω). They
    do so too if their ranks add up to more than the number of outputs.

    Args:
        summands: all terms of the kernel.
        draws: the frequencies of each term.
        chosen: the indices of the chosen terms.

    Raises:
        NotImplementedError: a chosen term and another term share features. Random rules with
            `shared=False` avoid this.
    """
    for members in mixtures(draws):
        factors = [summands[index].factor for index in members]
        rank = sum(factor.rank for factor in factors)
        added = len(set(factors)) < len(factors) or rank > factors[0].num_outputs
        if added and 0 < len(set(members) & set(chosen)) < len(members):
            raise NotImplementedError(
                "expected terms with separate features, got random frequencies with shared=True: "
                f"{len(members)} terms share {factors[0].num_outputs} features for each column; "
                "use shared=False"
            )


def expand(kernel: Kernel, draws: Sequence[Draw], num_inputs: int) -> Expansion:
    """Return the features of a kernel tree at the current hyperparameters.

    `num_inputs` is d, the number of input columns.
    """
    return expand_terms(terms(kernel), draws, num_inputs)


def expand_terms(summands: Sequence[Term], draws: Sequence[Draw], num_inputs: int) -> Expansion:
    """Return the features of a sum of terms with `num_inputs` input columns."""
    if draws[0].shared_columns() is not None:
        return _expand_on_shared_columns(summands, draws)
    pairs = list(zip(summands, draws, strict=True))
    parts = [[pairs[index] for index in members] for members in mixtures(draws)]
    return merge(
        [
            _expand_term(*part[0], num_inputs)
            if len(part) == 1
            else _expand_mixture(part, num_inputs)
            for part in parts
        ]
    )


def _expand_term(term: Term, frequencies: Draw, num_inputs: int) -> Expansion:
    """Return the features of a term, whose directions are the columns of √(s w_k) B(ω_k).

    Here s is the outputscale of the term.
    """
    if not term.leaves:  # a constant: ω = 0, one cosine
        omega = term.factor.matrix.new_zeros(1, num_inputs)
        scale = term.outputscale.sqrt()[..., None, None]
        scales = torch.cat([scale, torch.zeros_like(scale)], dim=-2)
        return KroneckerExpansion(TrigColumns.of(omega), scales, term.factor.matrix)
    factor = term.factor
    if factor.is_constant or frequencies.projected:
        phi, variances = frequencies.columns(term, num_inputs)
        scales = positive_root(term.outputscale[..., None, None] * variances)
        if factor.is_constant:
            return KroneckerExpansion(phi, scales, factor.matrix)
        # The directions of a gradient are the frequencies of its phases; inputs and outputs must
        # have the same order.
        same = [leaf.active_dims for leaf in term.leaves] == [factor.dims]
        if factor.is_gradient and factor.num_outputs == num_inputs and same:
            return GradientExpansion(phi, scales)
    omegas, weights = frequencies.nodes(spectra_of(term))
    if not frequencies.projected:
        phi = TrigColumns.of(sum_of_leaves(omegas, term, num_inputs), frequencies.sampled)
    scales = (term.outputscale.unsqueeze(-1) * weights).sqrt()  # (*b, D)
    return _features(phi, scales[..., None, None] * factor(omegas[0]))


def _expand_on_shared_columns(summands: Sequence[Term], draws: Sequence[Draw]) -> Expansion:
    """Return the features of all terms on one lattice, then those of harmonic terms and lines."""
    families: dict[nn.Module, list[tuple[Term, Draw]]] = {}
    for term, frequencies in sorted(zip(summands, draws, strict=True), key=lambda p: p[1].expands):
        families.setdefault(frequencies.lattice, []).append((term, frequencies))
    return merge(
        [
            members[0][1].expansion(members)
            if members[0][1].expands
            else expand_on_lattice(shared.columns(), *zip(*members, strict=True))
            for shared, members in families.items()
        ]
    )


def expand_on_lattice(
    phi: TrigColumns, summands: Sequence[Term], draws: Sequence[Draw]
) -> Expansion:
    """Return the features of terms that share the columns `phi` of one lattice."""
    summands, draws = with_cells(summands, draws)
    first, scales = summands[0].factor, []
    for term, frequencies in zip(summands, draws, strict=True):
        omegas, weights = frequencies.nodes(spectra_of(term))
        variances = term.outputscale.unsqueeze(-1) * weights
        scales.append((omegas, positive_root(variances)))
    if share_mixing(summands):
        return _kronecker_on_lattice(phi, first, draws, [scale for _, scale in scales])
    halves = [
        (scale[..., None, None] * term.factor(omegas[0] if omegas else scale.unsqueeze(-1)))
        for term, (omegas, scale) in zip(summands, scales, strict=True)
    ]  # (*b, D, p, r) each
    directions, columns, axes = [], [], []
    for sine in (False, True):
        for term, frequencies, half in zip(summands, draws, halves, strict=True):
            used = frequencies.nonzero if sine else slice(None)  # sin⟨0, x⟩ = 0
            factors = half[..., used, :, :]
            directions.append(factors.mT.flatten(-3, -2))
            position = phi.columns_of(frequencies.position[used])[sine]
            columns.append(position.repeat_interleave(half.shape[-1]))
            axis = position.new_tensor(term.factor.axes or [-1] * half.shape[-1])
            axes.append(axis.repeat(len(position)))
    axes = torch.cat(axes)
    tilted = axes if (axes >= 0).any() else None
    return FeatureExpansion(phi, stack_rows(directions), torch.cat(columns), tilted)


def _kronecker_on_lattice(
    phi: TrigColumns, factor: Mixing, draws: Sequence[Draw], scales: Sequence[Tensor]
) -> KroneckerExpansion:
    """Return the features of separable kernels with the same L.

    The variances that the kernels have at one frequency add up.
    """
    batch = torch.broadcast_shapes(*(scale.shape[:-1] for scale in scales))
    total = scales[0].new_zeros(*batch, phi.num_columns)
    for frequencies, scale in zip(draws, scales, strict=True):
        variance = scale.square().expand(*batch, -1)
        cosines, sines = phi.columns_of(frequencies.position)
        total = total.index_add(-1, cosines, variance)
        total = total.index_add(-1, sines[frequencies.nonzero], variance[..., frequencies.nonzero])
    # `where` is applied before and after the root, since 0 · ∞ in its gradient would be NaN.
    used = total > 0  # the square root has no derivative at zero
    root = torch.where(used, total, 1.0).sqrt() * used
    return KroneckerExpansion(phi, root.unsqueeze(-1), factor.matrix)


def _expand_mixture(members: Sequence[tuple[Term, Draw]], num_inputs: int) -> Expansion:
    """Return the features of Σ_q v_q k_q A_q on the frequencies ω_k of all terms q.

    The frequencies are a stratified sample of a mixture (Minh 2016, Example 5): D_q frequencies
    come from the density ρ_q. The balance heuristic gives the weights
    w_qk = v_q S_q(ω_k) / Σ_q′ D_q′ ρ_q′(ω_k). The factor B_k satisfies
    B_k B_kᵀ = Σ_q w_qk A_q(ω_k). Its columns are those of √w_qk B_q(ω_k) for all q. If these are
    more than p, a factor with p columns replaces them.
    """
    sources = [(spectra_of(term)[0], frequencies) for term, frequencies in members]
    omega = stack_rows([frequencies.nodes([density])[0][0] for density, frequencies in sources])
    log_densities = [density.log_density(omega) for density, _ in sources]
    log_mixture = _logsumexp(
        [
            math.log(frequencies.num_frequencies)
            + log_density
            - density.log_importance(omega, *frequencies.orders)
            for (density, frequencies), log_density in zip(sources, log_densities, strict=True)
        ]
    )
    log_weights: dict[Factor, list[Tensor]] = {}  # terms with the same factor share columns
    for (term, _), log_density in zip(members, log_densities, strict=True):
        log_weight = term.outputscale.log().unsqueeze(-1) + log_density - log_mixture
        log_weights.setdefault(term.factor, []).append(log_weight)
    scales = {factor: (0.5 * _logsumexp(logs)).exp() for factor, logs in log_weights.items()}
    term, frequencies = members[0]
    phi = TrigColumns.of(
        embedded(omega, term.leaves[0].active_dims, num_inputs), frequencies.sampled
    )
    if len(scales) == 1 and term.factor.is_constant:
        columns = phi.of_frequencies(scales[term.factor].unsqueeze(-1))
        return KroneckerExpansion(phi, columns, term.factor.matrix)
    rows = [(scale[..., None, None] * factor(omega)).mT for factor, scale in scales.items()]
    root = stack_rows(rows).mT
    return _features(phi, root if len(rows) == 1 else reduced_root(root))


def _logsumexp(logs: Sequence[Float[Tensor, "*b D"]]) -> Float[Tensor, "*b D"]:
    """Return log Σ_i exp(logs_i)."""
    return torch.logsumexp(torch.stack(torch.broadcast_tensors(*logs)), dim=0)


def _features(phi: TrigColumns, factor: Float[Tensor, "*b D p r"]) -> FeatureExpansion:
    """Return a cosine and a sine feature for each column of each factor √w_k B(ω_k)."""
    p, r = factor.shape[-2:]
    directions = phi.of_frequencies(factor.mT.flatten(-2)).unflatten(-1, (r, p)).flatten(-3, -2)
    columns = torch.arange(phi.num_columns, device=factor.device).repeat_interleave(r)
    return FeatureExpansion(phi, directions, columns)


def merge(parts: Sequence[Expansion]) -> Expansion:
    """Return the features of a sum of kernels, sorted by the index of their columns."""
    if len(parts) == 1:
        return parts[0]
    phi, places = side_by_side([part.phi for part in parts])
    if all(p.is_kronecker and p.mixing is parts[0].mixing for p in parts):
        scales = stack_rows([part.scales for part in parts])
        order = torch.cat(places).argsort()
        return KroneckerExpansion(phi, scales.index_select(-2, order), parts[0].mixing)
    if all(part.is_scaled for part in parts):
        return side_by_side_scaled(parts, phi, places)
    full = [part.general() for part in parts]
    directions = stack_rows([part.directions for part in full])
    columns = torch.cat([place[part.columns] for place, part in zip(places, full, strict=True)])
    columns, order = columns.sort(stable=True)
    return FeatureExpansion(phi, directions.index_select(-2, order), columns)


def check_domain(kernel: Kernel, draws: Sequence[Draw], *points: Float[Tensor, "*b n d"]) -> None:
    """Raise an error if the frequencies do not represent the kernel at these points.

    Raises:
        ValueError: a point lies outside the domain of a grid; or two points are too far from each
            other for a quadrature.
    """
    for term, frequencies in zip(terms(kernel), draws, strict=True):
        frequencies.check_domain(spectra_of(term), *points)


# The cell of the lattice around ω = 0. For a field with heavy tails it adds a constant to the
# field.
#
# Correlations of a rational quadratic kernel decay like a power of the lag. The kernel of a lattice
# of period P = 2π/h is smaller than K(τ) by −Σ_{j≠0} K(τ + jP). This sum barely depends on τ,
# because all images jP are far away. It is the variance of the frequencies in the cell around zero.
# The spectral density may be infinite there, but B(0) = 0, so the lattice has no feature in this
# cell.
#
# The cell becomes a separate term with a constant factor. Its frequencies along the inputs of the
# field are zero. Let v_i = Σ_{j≠0} ∂_i² k(jP). The factor has the columns √v_i B(e_i) for each axis
# i, as if the frequencies of the cell were along the axes.
#
# For every kernel, the constant of an absolute potential comes from frequencies near zero as well.
# Its features are zero in the field. Let u_i = S(0) ∏h / d. An antiderivative Q maps these features
# to constants, the columns of √u_i Q(e_i) B(e_i).


@dataclass(frozen=True)
class NearZero(Mixing):
    """The factor of a cell around ω = 0.

    Attributes:
        axes: the input column, from 0, along which the frequency of each column of the factor
            points.
    """

    axes: tuple[int, ...] = ()


def with_cells(summands: Sequence[Term], draws: Sequence[Draw]) -> tuple[list[Term], list[Draw]]:
    """Return the terms and their draws, each followed by those of the cells around ω = 0."""
    pairs = zip(summands, draws, strict=True)
    cells = [pair for pair in pairs if pair[1].on_lattice and pair[1].cell]
    return (
        [*summands, *(_cell(term, draw) for term, draw in cells)],
        [*draws, *(draw.cell for _, draw in cells)],
    )


def with_constants(
    expansion: Expansion, summands: Sequence[Term], draws: Sequence[Draw]
) -> Expansion:
    """Return the features of a grid, followed by the constants of absolute potentials.

    Only terms that are derivatives of one scalar kernel have such constants.
    """
    directions, axes = [], []
    for term, draw in zip(summands, draws, strict=True):
        if draw.on_lattice and term.factor.degree and len(term.leaves) == 1:
            dims = draw.dims[0]
            spacing = draw.lattice.spacing[list(dims)]
            weight = weight_at_zero(spectra_of(term)[0], spacing) / len(dims)
            root = positive_root(term.outputscale * weight)[..., None, None]
            directions.append(root * _along_axes(term, torch.eye(len(dims)).to(spacing)).mT)
            axes += _axes(term, dims)
    full = expansion.general() if directions else expansion
    if not directions or full.num_constants:
        return expansion
    return full.followed_by_constants(stack_rows(directions), axes)


def _along_axes(term: Term, units: Float[Tensor, "k d"]) -> Float[Tensor, "p k*r"]:
    """Return the columns of B(e_i) for the k unit vectors e_i, axis after axis."""
    return term.factor(units).movedim(-3, -2).flatten(-2)


def _axes(term: Term, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the input column of each column of `_along_axes`."""
    return tuple(dim for dim in dims for _ in range(term.factor.rank))


def _cell(term: Term, draw: LatticeDraw) -> Term:
    """Return the term of the cell around ω = 0; inputs that are constant contribute nothing."""
    dims = draw.dims[0]
    varying = [axis for axis, dim in enumerate(dims) if not draw.lattice.constant[dim]]
    spacing, spectrum = draw.lattice.spacing[list(dims)], spectra_of(term)[0]
    if len(varying) < len(dims):
        spectrum = spectrum.marginal(varying)
    moments = moments_near_zero(spectrum, spacing[varying])  # v, (*b, k)
    root = positive_root(moments).repeat_interleave(term.factor.rank, dim=-1)
    matrix = root.unsqueeze(-2) * _along_axes(term, torch.eye(len(dims)).to(spacing)[varying])
    axes = _axes(term, [dims[axis] for axis in varying])
    return Term(term.leaves[1:], NearZero(matrix, axes), term.outputscale)
