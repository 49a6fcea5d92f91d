"""Hyperparameters that move frequencies, and the values of them that data can tell."""

import math
from collections.abc import Sequence
from functools import singledispatch
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.survey import Distances
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture
from gp_orff.kernels.spectra.law import Spectrum, spectrum
from gp_orff.kernels.spectra.spectral_mixture import SpectralMixture
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, terms

_LONGEST = 3.0  # extents of the data: the longest lengthscale that is sought
_ALPHA = 0.01, 1e3  # of rational quadratic kernels: correlations of logarithms, and like RBF


class Range(NamedTuple):
    """A hyperparameter and the values that are sought."""

    value: Tensor  # live
    low: float | Float[Tensor, "..."]
    high: float | Float[Tensor, "..."]
    stretch: float = 1.0  # how many times faster than frequencies it moves, in logarithms


@singledispatch
def ranges(
    law: Spectrum, shortest: Float[np.ndarray, "k"], longest: Float[np.ndarray, "k"]
) -> list[Range]:
    """What of a law moves its frequencies, for data with these distances along its k inputs.

    Register spectra of your own; of others, what is an attribute `lengthscale` is known.
    """
    lengthscale = getattr(law, "lengthscale", None)
    if lengthscale is None:
        return []
    if lengthscale.shape[-1] == 1:
        return [Range(lengthscale, float(shortest.min()), float(longest.max()))]
    low, high = (torch.from_numpy(own).to(lengthscale) for own in (shortest, longest))
    return [Range(lengthscale, low, high)]


@ranges.register
def _(law: GammaMixture, shortest, longest):
    alpha = law.alpha.detach().min().item()
    stretch = min(2 * (1 + alpha), 6.0)  # frequencies reach as far as √((α + 1)/α) / ℓ
    return [
        *ranges.dispatch(object)(law, shortest, longest),
        Range(law.alpha, *_ALPHA, stretch),
    ]


@ranges.register
def _(law: SpectralMixture, shortest, longest):
    low, high = (
        torch.from_numpy(1 / (2 * math.pi * own)).to(law.means) for own in (longest, shortest)
    )
    return [Range(law.scales, low, high), Range(law.means, 1e-2 * low, math.pi * high)]


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
                for own in ranges(spectrum(leaf.kernel), *_scales(term, leaf, distances)):
                    for parameter in _behind(own.value, parameters):
                        found[parameter] = (*found.get(parameter, ()), own)
    return found


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
    dims = leaf.active_dims or tuple(range(leaf_dims(term, leaf, num_inputs)))
    longest = distances.extent[list(dims)]
    whole = longest.max() if longest.max() > 0 else 1.0
    apart = [distances.shortest((dim,)) for dim in dims]
    if not leaf.kernel.ard_num_dims:
        apart = [distances.shortest(dims)] * len(dims)
    longest = np.where(longest > 0, longest, whole)
    shortest = np.array([own if own > 0 else 1e-3 * whole for own in apart])
    return np.minimum(shortest, longest), _LONGEST * longest
