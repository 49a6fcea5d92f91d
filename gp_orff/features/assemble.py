"""Kernel tree + frequency rule → features: the one place where rules are resolved."""

from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import TrigColumns, stacked
from gp_orff.features.expansion import (
    Expansion,
    FeatureExpansion,
    KroneckerExpansion,
    merge,
)
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, Rule, TermSpectrum
from gp_orff.kernels.cholesky import cholesky
from gp_orff.kernels.factors import Mixing, embedded
from gp_orff.kernels.spectra.base import spectrum
from gp_orff.kernels.tree import Term, leaf_dims, spectra_of, terms


def draw(kernel: Kernel, rule: Rule, num_dims: int | None = None) -> list[Draw]:
    """Frequencies for every term of a kernel tree, in order."""
    return rule.draw(term_spectra(kernel, num_dims))


def term_spectra(kernel: Kernel, num_dims: int | None = None) -> list[TermSpectrum]:
    """What every term of a kernel tree asks of a rule, at its present hyperparameters."""
    found = terms(kernel)
    return [_law(term, found, num_dims) for term in found]


def _law(term: Term, every: Sequence[Term], num_dims: int | None) -> TermSpectrum:
    share = len(_sharing(term, every)) or 1
    leaves = [
        LeafSpectrum(
            spectrum(leaf.kernel),
            leaf.columns(leaf_dims(term, leaf, num_dims)),
            term.factor.degree if index == 0 else 0,
        )
        for index, leaf in enumerate(term.leaves)
    ]
    return TermSpectrum(tuple(leaves), term.factor.rank, share)


def _sharing(term: Term, every: Sequence[Term]) -> list[int]:
    """The indices of the terms that share their frequencies with this one, itself included.

    Terms of a linear model of coregionalisation do, where each is one kernel on the same inputs.
    """
    if term.group is None or len(term.leaves) != 1:
        return []
    return [
        index
        for index, other in enumerate(every)
        if other.group is term.group
        and len(other.leaves) == 1
        and other.leaves[0].active_dims == term.leaves[0].active_dims
    ]


def expand(kernel: Kernel, draws: Sequence[Draw], num_inputs: int) -> Expansion:
    """The features of a kernel tree at its present hyperparameters, on `num_inputs` columns."""
    return expand_terms(terms(kernel), draws, num_inputs)


def expand_terms(found: Sequence[Term], draws: Sequence[Draw], num_inputs: int) -> Expansion:
    """Those of the sum of these terms."""
    parts = []
    shared = draws[0].shared_columns()
    if shared is not None:
        return _expand_on_lattice(shared, found, draws)
    for index, (term, frequencies) in enumerate(zip(found, draws, strict=True)):
        sharing = _sharing(term, found)
        if len(sharing) < 2:
            parts.append(_expand_term(term, frequencies, num_inputs))
        elif sharing[0] == index:
            members = [(found[i], draws[i]) for i in sharing]
            parts.append(_expand_shared(members, num_inputs))
    return merge(parts)


def _expand_term(term: Term, frequencies: Draw, num_inputs: int) -> Expansion:
    if not term.leaves:  # a constant: ω = 0, one cosine
        omega = term.factor.matrix.new_zeros(1, num_inputs)
        scale = term.outputscale.sqrt()[..., None, None]
        scales = torch.cat([scale, torch.zeros_like(scale)], dim=-2)
        return KroneckerExpansion(TrigColumns.of(omega), scales, term.factor.matrix)
    omegas, weights = frequencies.nodes(spectra_of(term))
    scales = (term.outputscale.unsqueeze(-1) * weights).sqrt()  # (*b, D)
    omega = sum(
        embedded(omega, leaf.active_dims, num_inputs)
        for omega, leaf in zip(omegas, term.leaves, strict=True)
    )
    phi = TrigColumns.of(omega, frequencies.sampled)
    if isinstance(term.factor, Mixing):  # the same directions for every frequency
        return KroneckerExpansion(phi, phi.of_frequencies(scales.unsqueeze(-1)), term.factor.matrix)
    return _features(phi, scales[..., None, None] * term.factor(omegas[0]))


def _expand_on_lattice(phi: TrigColumns, found: Sequence[Term], draws: Sequence[Draw]) -> Expansion:
    """The features of every term on one lattice, each with the columns it needs."""
    first, scales = found[0].factor, []
    for term, own in zip(found, draws, strict=True):
        omegas, weights = own.nodes(spectra_of(term))
        variances = term.outputscale.unsqueeze(-1) * weights
        scales.append((omegas, variances.clamp_min(torch.finfo(variances.dtype).tiny).sqrt()))
    if all(isinstance(t.factor, Mixing) and t.factor.matrix is first.matrix for t in found):
        return _kronecker_on_lattice(phi, first, draws, [scale for _, scale in scales])
    halves = [
        (scale[..., None, None] * term.factor(omegas[0] if omegas else scale.unsqueeze(-1)))
        for term, (omegas, scale) in zip(found, scales, strict=True)
    ]  # (*b, D, p, r) each
    directions, columns = [], []
    for sine in (False, True):
        for own, half in zip(draws, halves, strict=True):
            kept = own.nonzero if sine else slice(None)
            rows = half[..., kept, :, :]
            directions.append(rows.mT.flatten(-3, -2))
            position = phi.columns_of(own.position[kept])[sine]
            columns.append(position.repeat_interleave(half.shape[-1]))
    return FeatureExpansion(phi, stacked(directions), torch.cat(columns))


def _kronecker_on_lattice(
    phi: TrigColumns, factor: Mixing, draws: Sequence[Draw], scales: Sequence[Tensor]
) -> KroneckerExpansion:
    """Separable kernels with one task matrix: their variances add on shared frequencies."""
    batch = torch.broadcast_shapes(*(scale.shape[:-1] for scale in scales))
    total = scales[0].new_zeros(*batch, phi.num_columns)
    for own, scale in zip(draws, scales, strict=True):
        variance = scale.square().expand(*batch, -1)
        cosines, sines = phi.columns_of(own.position)
        total = total.index_add(-1, cosines, variance)
        total = total.index_add(-1, sines[own.nonzero], variance[..., own.nonzero])
    used = total > 0  # the square root has no slope at zero
    root = torch.where(used, total, 1.0).sqrt() * used
    return KroneckerExpansion(phi, root.unsqueeze(-1), factor.matrix)


def _expand_shared(members: Sequence[tuple[Term, Draw]], num_inputs: int) -> FeatureExpansion:
    """Σ_q A_q k_q on the frequencies of all its kernels: B_k = chol(Σ_q w_qk A_q).

    Stratified sampling of the mixture of the spectral densities S_q, D_q frequencies from each:
    w_qk = S_q(ω_k) / Σ_q′ D_q′ S_q′(ω_k), the balance heuristic.
    """
    term_spectra = [spectrum(term.leaves[0].kernel) for term, _ in members]
    own = [
        drawn.nodes([density])[0][0]
        for density, (_, drawn) in zip(term_spectra, members, strict=True)
    ]
    omega = stacked(own)  # (*b, D, d)
    log_density = torch.stack(
        [density.log_density(omega) for density in term_spectra]
    )  # (q, *b, D)
    counts = omega.new_tensor([drawn.num_frequencies for _, drawn in members])
    mixture = torch.logsumexp(
        log_density + counts.log().reshape(-1, *[1] * (log_density.dim() - 1)), dim=0
    )
    spectral_matrix = sum(
        (term.outputscale.unsqueeze(-1) * (density - mixture).exp())[..., None, None]
        * (term.factor.matrix @ term.factor.matrix.mT).unsqueeze(-3)
        for (term, _), density in zip(members, log_density, strict=True)
    )
    factor = cholesky(spectral_matrix)  # (*b, D, p, p)
    term, drawn = members[0]
    omega = embedded(omega, term.leaves[0].active_dims, num_inputs)
    return _features(TrigColumns.of(omega, drawn.sampled), factor)


def _features(phi: TrigColumns, factor: Float[Tensor, "*b D p r"]) -> FeatureExpansion:
    """A cosine and a sine feature for each column of each frequency's factor."""
    p, r = factor.shape[-2:]
    directions = phi.of_frequencies(factor.mT.flatten(-2)).unflatten(-1, (r, p)).flatten(-3, -2)
    columns = torch.arange(phi.num_columns, device=factor.device).repeat_interleave(r)
    return FeatureExpansion(phi, directions, columns)


def check_domain(kernel: Kernel, draws: Sequence[Draw], *points: Float[Tensor, "*b n d"]) -> None:
    """Raise ValueError for points where the frequencies do not give the kernel."""
    for term, drawn in zip(terms(kernel), draws, strict=True):
        drawn.check_domain(spectra_of(term), *points)
