"""Hyperparameters that move frequencies, and the values of them that data can tell."""

from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.survey import Distances
from gp_orff.kernels.spectra.base import Range, Spectrum, spectrum
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, terms

_LONGEST = 3.0  # extents of the data: the longest lengthscale that is sought


def parameter_ranges(
    kernel: Kernel, distances: Distances | None
) -> dict[nn.Parameter, tuple[Range, ...]]:
    """The ranges of every trained parameter of a kernel tree that moves frequencies; wide ones
    where no distances are known."""
    parameters = [p for p in kernel.parameters() if p.requires_grad]
    found: dict[nn.Parameter, tuple[Range, ...]] = {}
    with torch.enable_grad():
        for term in terms(kernel):
            for leaf in term.leaves:
                for own in _ranges(term, leaf, distances):
                    for parameter in _behind(own.value, parameters):
                        found[parameter] = (*found.get(parameter, ()), own)
    return found


def _ranges(term: Term, leaf: Leaf, distances: Distances | None) -> list[Range]:
    """Those of its law; of what is no `Spectrum` none are known."""
    density = spectrum(leaf.kernel)
    if not isinstance(density, Spectrum):
        return []
    return density.frequency_parameters(*_scales(term, leaf, distances))


def _behind(value: Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a value is computed from."""
    if not value.requires_grad:
        return []
    slopes = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    return [p for p, slope in zip(parameters, slopes, strict=True) if slope is not None]


def _scales(
    term: Term, leaf: Leaf, distances: Distances | None
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Shortest and longest distances along each input of a leaf."""
    if distances is None:
        return np.full(1, 1e-300), np.full(1, 1e300)
    num_inputs = distances.points.shape[-1]
    dims = leaf.columns(leaf_dims(term, leaf, num_inputs))
    longest = distances.extent[list(dims)]
    whole = longest.max() if longest.max() > 0 else 1.0
    apart = [distances.shortest((dim,)) for dim in dims]
    if not leaf.kernel.ard_num_dims:
        apart = [distances.shortest(dims)] * len(dims)
    longest = np.where(longest > 0, longest, whole)
    shortest = np.array([own if own > 0 else 1e-3 * whole for own in apart])
    return np.minimum(shortest, longest), _LONGEST * longest
