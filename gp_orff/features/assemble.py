"""Kernel tree + frequency rule → features; rules are resolved here only."""

from collections.abc import Sequence

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.columns import TrigColumns, stack_rows
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
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, spectra_of, terms


def draw(kernel: Kernel, rule: Rule, num_dims: int | None = None) -> list[Draw]:
    """The frequencies of every term of a kernel tree, in the order of `terms(kernel)`."""
    return rule.draw(term_spectra(kernel, num_dims))


def term_spectra(kernel: Kernel, num_dims: int | None = None) -> list[TermSpectrum]:
    """The spectrum of every term of a kernel tree, at its present hyperparameters."""
    every = terms(kernel)
    return [_term_spectrum(term, every, num_dims) for term in every]


def _term_spectrum(term: Term, every: Sequence[Term], num_dims: int | None) -> TermSpectrum:
    """The spectra of a term's leaves; `every` has all terms of the tree."""
    share = len(_frequency_group(term, every)) or 1
    leaves = [
        _leaf_spectrum(term, leaf, leaf_dims(term, leaf, num_dims), index == 0)
        for index, leaf in enumerate(term.leaves)
    ]
    return TermSpectrum(tuple(leaves), term.factor.rank, share)


def _leaf_spectrum(term: Term, leaf: Leaf, num_dims: int, first: bool) -> LeafSpectrum:
    """The spectrum of a leaf; B is a function of the frequencies of the first leaf."""
    density, dims = spectrum(leaf.kernel), leaf.columns(num_dims)
    if not first or term.factor.closed_form:
        return LeafSpectrum(density, dims, term.factor.degree if first else 0)
    variance = term.factor.variance_spectrum(density)
    return LeafSpectrum(density, dims, term.factor.degree, variance, term.factor.sampler)


def _frequency_group(term: Term, every: Sequence[Term]) -> list[int]:
    """The indices of the terms that share frequencies with this term, itself included.

    The terms of a linear model of coregionalisation do, if each has one kernel, on the same inputs.
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
    """The features of a kernel tree at its present hyperparameters, for `num_inputs` inputs."""
    return expand_terms(terms(kernel), draws, num_inputs)


def expand_terms(summands: Sequence[Term], draws: Sequence[Draw], num_inputs: int) -> Expansion:
    """The features of a sum of terms, for `num_inputs` inputs."""
    parts = []
    phi = draws[0].shared_columns()
    if phi is not None:
        return _expand_on_lattice(phi, summands, draws)
    for index, (term, frequencies) in enumerate(zip(summands, draws, strict=True)):
        group = _frequency_group(term, summands)
        if len(group) < 2:
            parts.append(_expand_term(term, frequencies, num_inputs))
        elif group[0] == index:
            members = [(summands[i], draws[i]) for i in group]
            parts.append(_expand_shared(members, num_inputs))
    return merge(parts)


def _expand_term(term: Term, frequencies: Draw, num_inputs: int) -> Expansion:
    """Directions are the columns of √(outputscale · w_k) B(ω_k)."""
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


def _expand_on_lattice(
    phi: TrigColumns, summands: Sequence[Term], draws: Sequence[Draw]
) -> Expansion:
    """The features of terms that share the columns of one lattice, of which each uses some."""
    first, scales = summands[0].factor, []
    for term, frequencies in zip(summands, draws, strict=True):
        omegas, weights = frequencies.nodes(spectra_of(term))
        variances = term.outputscale.unsqueeze(-1) * weights
        scales.append((omegas, variances.clamp_min(torch.finfo(variances.dtype).tiny).sqrt()))
    if all(isinstance(t.factor, Mixing) and t.factor.matrix is first.matrix for t in summands):
        return _kronecker_on_lattice(phi, first, draws, [scale for _, scale in scales])
    halves = [
        (scale[..., None, None] * term.factor(omegas[0] if omegas else scale.unsqueeze(-1)))
        for term, (omegas, scale) in zip(summands, scales, strict=True)
    ]  # (*b, D, p, r) each
    directions, columns = [], []
    for sine in (False, True):
        for frequencies, half in zip(draws, halves, strict=True):
            used = frequencies.nonzero if sine else slice(None)  # sin⟨0, x⟩ = 0
            factors = half[..., used, :, :]
            directions.append(factors.mT.flatten(-3, -2))
            position = phi.columns_of(frequencies.position[used])[sine]
            columns.append(position.repeat_interleave(half.shape[-1]))
    return FeatureExpansion(phi, stack_rows(directions), torch.cat(columns))


def _kronecker_on_lattice(
    phi: TrigColumns, factor: Mixing, draws: Sequence[Draw], scales: Sequence[Tensor]
) -> KroneckerExpansion:
    """The features of separable kernels with the same L: variances of equal frequencies add up."""
    batch = torch.broadcast_shapes(*(scale.shape[:-1] for scale in scales))
    total = scales[0].new_zeros(*batch, phi.num_columns)
    for frequencies, scale in zip(draws, scales, strict=True):
        variance = scale.square().expand(*batch, -1)
        cosines, sines = phi.columns_of(frequencies.position)
        total = total.index_add(-1, cosines, variance)
        total = total.index_add(-1, sines[frequencies.nonzero], variance[..., frequencies.nonzero])
    used = total > 0  # the square root has no derivative at zero
    root = torch.where(used, total, 1.0).sqrt() * used
    return KroneckerExpansion(phi, root.unsqueeze(-1), factor.matrix)


def _expand_shared(members: Sequence[tuple[Term, Draw]], num_inputs: int) -> FeatureExpansion:
    """Features of Σ_q A_q k_q on the frequencies of all k_q, with B_k = chol(Σ_q w_qk A_q).

    The frequencies are a stratified sample of the mixture of the spectral densities S_q, D_q from
    each, with the weights w_qk = S_q(ω_k) / Σ_q′ D_q′ S_q′(ω_k) of the balance heuristic.
    """
    spectra = [spectrum(term.leaves[0].kernel) for term, _ in members]
    omegas = [
        frequencies.nodes([density])[0][0]
        for density, (_, frequencies) in zip(spectra, members, strict=True)
    ]
    omega = stack_rows(omegas)  # (*b, D, d)
    log_density = torch.stack([density.log_density(omega) for density in spectra])  # (q, *b, D)
    counts = omega.new_tensor([frequencies.num_frequencies for _, frequencies in members])
    mixture = torch.logsumexp(
        log_density + counts.log().reshape(-1, *[1] * (log_density.dim() - 1)), dim=0
    )
    spectral_matrix = sum(
        (term.outputscale.unsqueeze(-1) * (density - mixture).exp())[..., None, None]
        * (term.factor.matrix @ term.factor.matrix.mT).unsqueeze(-3)
        for (term, _), density in zip(members, log_density, strict=True)
    )
    factor = cholesky(spectral_matrix)  # (*b, D, p, p)
    term, frequencies = members[0]
    omega = embedded(omega, term.leaves[0].active_dims, num_inputs)
    return _features(TrigColumns.of(omega, frequencies.sampled), factor)


def _features(phi: TrigColumns, factor: Float[Tensor, "*b D p r"]) -> FeatureExpansion:
    """A cosine and a sine feature for each column of each frequency's factor √w_k B(ω_k)."""
    p, r = factor.shape[-2:]
    directions = phi.of_frequencies(factor.mT.flatten(-2)).unflatten(-1, (r, p)).flatten(-3, -2)
    columns = torch.arange(phi.num_columns, device=factor.device).repeat_interleave(r)
    return FeatureExpansion(phi, directions, columns)


def check_domain(kernel: Kernel, draws: Sequence[Draw], *points: Float[Tensor, "*b n d"]) -> None:
    """Check that the frequencies represent the kernel at these points.

    Raises:
        ValueError: points outside the domain of a grid, or too far apart for a quadrature.
    """
    for term, frequencies in zip(terms(kernel), draws, strict=True):
        frequencies.check_domain(spectra_of(term), *points)
