"""The ranges in which lengthscales and similar hyperparameters are searched."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.survey import Distances, Survey
from gp_orff.inference.conditioning.few_sites import MOST_BESIDE_WAVES
from gp_orff.inference.representation import MOST_TRAINING
from gp_orff.kernels.harmonic import HarmonicSpectrum
from gp_orff.kernels.learned_spectrum import LearnedSpectrumKernel
from gp_orff.kernels.spectra.base import Range, Spectrum
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, terms

_RESOLVED = 4.2  # the depth times |k| beyond which a hundredth of the variance lies
_LONGEST = 3.0  # distances in the data: the longest lengthscale of a search


def parameter_ranges(
    kernel: Kernel, distances: Distances | None, whole: Survey | None = None
) -> dict[nn.Parameter, tuple[Range, ...]]:
    """The search ranges of the trained parameters of a kernel tree that change frequencies.

    They follow from the distances between points, and are practically unbounded without distances.
    Where all data, the `whole`, have so many values that features serve, they are limited to
    sources of harmonic fields so deep that features can tell them from noise.
    """
    parameters = [p for p in kernel.parameters() if p.requires_grad]
    ranges: dict[nn.Parameter, tuple[Range, ...]] = {}
    with torch.enable_grad():
        for term in terms(kernel):
            for leaf in term.leaves:
                for leaf_range in _leaf_ranges(term, leaf, distances, whole):
                    for parameter in _dependencies(leaf_range.value, parameters):
                        ranges[parameter] = (*ranges.get(parameter, ()), leaf_range)
    return ranges


def check_extents(kernel: Kernel, distances: Distances | None) -> None:
    """Refuse positions that tell nothing of a spectrum that is to be learned.

    Raises:
        ValueError: none of the inputs of a `LearnedSpectrumKernel` with trained weights varies.
    """
    if distances is None:
        return
    for term in terms(kernel):
        for leaf in term.leaves:
            if not (
                isinstance(leaf.kernel, LearnedSpectrumKernel) and leaf.kernel.shape.requires_grad
            ):
                continue
            dims = leaf.columns(leaf_dims(term, leaf, distances.points.shape[-1]))
            if not distances.extent[list(dims)].any():
                raise ValueError(
                    "LearnedSpectrumKernel expects positions with an extent in at least one of its "
                    f"inputs, got readings with the same values in all of them (columns "
                    f"{list(dims)}), which tell nothing of a spectrum; give readings at several "
                    "places, or fix its weights by kernel.shape.requires_grad_(False)"
                )


def _leaf_ranges(
    term: Term, leaf: Leaf, distances: Distances | None, whole: Survey | None
) -> list[Range]:
    """The ranges that the spectrum of a leaf names; none for what is no `Spectrum`."""
    density = leaf.spectrum
    if not isinstance(density, Spectrum | HarmonicSpectrum):
        return []
    shortest, longest = _distance_ranges(term, leaf, distances)
    if isinstance(density, HarmonicSpectrum) and whole and whole.num_values > MOST_BESIDE_WAVES:
        _, extents = _distance_ranges(term, leaf, whole.distances)
        resolved = _RESOLVED * np.hypot(*extents[:2]) / _LONGEST / math.sqrt(8 * MOST_TRAINING)
        shortest = np.maximum(shortest, resolved)
    return density.frequency_parameters(shortest, longest)


def _dependencies(value: Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a value is computed from."""
    if not value.requires_grad:
        return []
    gradients = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    return [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]


def _distance_ranges(
    term: Term, leaf: Leaf, distances: Distances | None
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """The shortest and longest distances along each input of a leaf."""
    if distances is None:
        return np.full(1, 1e-300), np.full(1, 1e300)
    num_inputs = distances.points.shape[-1]
    dims = leaf.columns(leaf_dims(term, leaf, num_inputs))
    longest = distances.extent[list(dims)]
    extent = longest.max() if longest.max() > 0 else 1.0
    if leaf.kernel.ard_num_dims:
        shortest = [distances.shortest((dim,)) for dim in dims]
    else:
        shortest = [distances.shortest(dims)] * len(dims)
    apart = max(1.0, distances.root_mean_square(dims) / extent)  # many inputs: more than any extent
    longest = apart * np.where(longest > 0, longest, extent)
    shortest = np.array([length if length > 0 else 1e-3 * extent for length in shortest])
    return np.minimum(shortest, longest), _LONGEST * longest
