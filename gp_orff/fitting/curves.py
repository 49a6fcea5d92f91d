"""Curves of learned spectra where a frequency grid does not resolve them."""

import math
from collections.abc import Iterator

import torch
from gpytorch.kernels import Kernel

from gp_orff.inference.features import FeatureInference
from gp_orff.kernels.learned import LearnedSpectrumKernel
from gp_orff.kernels.tree import spectra_of, terms


@torch.no_grad()
def extrapolate_curves(kernel: Kernel, inference: FeatureInference) -> None:
    """Continue the trained curves of learned spectra in a line from where a grid ends.

    Of shorter lengths, most of whose variance is beyond the grid, a search on it tells nothing, and
    their prior next to nothing. Curves that share a lengthscale end where the grid of the widest
    term does.
    """
    found = list(_resolved(kernel, inference))
    for own, _ in found:
        shared = [length for other, length in found if other.raw_lengthscale is own.raw_lengthscale]
        own.extrapolate(min(shared))


def _resolved(
    kernel: Kernel, inference: FeatureInference
) -> Iterator[tuple[LearnedSpectrumKernel, float]]:
    """Each spectrum whose curve is trained, and the length λ whose variance of the field is largest
    at the edge of the grid: ω^{d+2t} e^{−(ωℓλ)²/2} at ωℓλ = √(d + 2t)."""
    for term, draw in zip(terms(kernel), inference.draws, strict=True):
        spectra = spectra_of(term)
        parts = zip(term.leaves, spectra, draw.nodes(spectra)[0], strict=True)
        for number, (leaf, spectrum, omega) in enumerate(parts):
            if isinstance(leaf.kernel, LearnedSpectrumKernel) and leaf.kernel.shape.requires_grad:
                order = 0 if number else term.factor.degree
                edge = spectrum.scaled_radius(omega.cpu().numpy()).max()
                yield leaf.kernel, math.sqrt(omega.shape[-1] + 2 * order) / float(edge)
