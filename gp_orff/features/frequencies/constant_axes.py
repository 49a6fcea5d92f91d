"""Inputs that are constant: on a lattice, the frequencies along them are summed.

Where the input a is the same at all points, columns do not depend on ω_a. The kernel of a field has
A(ω) = B Bᵀ, quadratic in ω, and a density even in ω_a, so that with ω = (ω_t, ω_a)

    Σ_{ω_a} w(ω) A(ω) = m₀(ω_t) A(ω_t, 0) + m₂(ω_t) A(0, 1),   m₀ = Σ w,  m₂ = Σ w ω_a²,

and likewise with one more summand for each further input of this kind. m₀ and m₂ are the weights of
spectra in the plane: of the marginal one, and of the marginal one weighted by ω_a². For scale
mixtures of Gaussians both are in the same family, so that the sums are complete.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.features.frequencies.rule import LeafSpectrum, TermSpectrum
from gp_orff.kernels.spectra.base import GridSpectrum, Spectrum
from gp_orff.kernels.spectra.lattice_sums import lattice_weights

ALONG_FREQUENCY = -1  # the direction of the summand A(ω_t, 0)


def summable(terms: Sequence[TermSpectrum], num_inputs: int) -> Bool[np.ndarray, "d"]:
    """The inputs along which the frequencies of all kernels that depend on them can be summed."""
    used, known = np.zeros(num_inputs, dtype=bool), np.ones(num_inputs, dtype=bool)
    for term in terms:
        for leaf in term.leaves:
            used[list(leaf.dims)] = True
            known[list(leaf.dims)] &= leaf.variance is None and _has_marginal(leaf.spectrum)
    return used & known


def _has_marginal(spectrum: Spectrum) -> bool:
    return isinstance(spectrum, GridSpectrum) and spectrum.marginal((0,)) is not None


def in_plane(
    leaf: LeafSpectrum, constant: Bool[np.ndarray, "d"], across: bool = False
) -> LeafSpectrum | None:
    """The spectrum of a leaf over its inputs that are not constant; None if all are.

    `across` a constant input, it is that of the weights m₂ of a field.
    """
    varying = [axis for axis, dim in enumerate(leaf.dims) if not constant[dim]]
    if len(varying) == leaf.num_dims:
        return leaf
    if not varying:
        return None
    dims, order = tuple(leaf.dims[axis] for axis in varying), int(across)
    degree = 0 if across else leaf.degree
    return replace(leaf, spectrum=leaf.spectrum.marginal(varying, order), dims=dims, degree=degree)


def directions(
    term: TermSpectrum, constant: Bool[np.ndarray, "d"]
) -> dict[int, list[LeafSpectrum]]:
    """The spectra in the plane that belong to m₀, and to m₂ of every constant input of a field.

    The keys are the axes of the first leaf, or `ALONG_FREQUENCY`. Leaves whose inputs are all
    constant are left out.
    """
    first, others = term.leaves[:1], [in_plane(leaf, constant) for leaf in term.leaves[1:]]
    blocks = {ALONG_FREQUENCY: [in_plane(leaf, constant) for leaf in first]}
    if first and first[0].degree:
        for axis, dim in enumerate(first[0].dims):
            if constant[dim]:
                blocks[axis] = [in_plane(first[0], constant, across=True)]
        if blocks[ALONG_FREQUENCY] == [None]:  # B(0) = 0
            del blocks[ALONG_FREQUENCY]
    return {
        axis: [leaf for leaf in (*leaves, *others) if leaf is not None]
        for axis, leaves in blocks.items()
    }


def plane_weights(
    spectrum: Spectrum,
    omega: Float[Tensor, "D k"],
    spacing: Float[Tensor, "k"],
    constant: Sequence[bool],
    axis: int = ALONG_FREQUENCY,
) -> Float[Tensor, "*b D"]:
    """m₀ of a leaf on the lattice of its inputs that are not constant, or m₂ of a constant `axis`.

    Args:
        spectrum: of the leaf.
        omega: the frequencies; their coordinates along constant inputs do not matter.
        spacing: of the lattice.
        constant: which of the inputs are constant.
        axis: the one that m₂ belongs to, or `ALONG_FREQUENCY` for m₀.
    """
    varying, order = [i for i, flat in enumerate(constant) if not flat], 0
    weights = omega.new_ones(len(omega))
    if axis != ALONG_FREQUENCY:
        order, weights = 1, weights * spectrum.second_moments(len(constant))[..., axis, None]
    if not varying:
        return weights
    if len(varying) < len(constant):
        spectrum = spectrum.marginal(varying, order)
    return weights * lattice_weights(spectrum, omega[:, varying], spacing[varying])
