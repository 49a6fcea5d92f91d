"""The logarithms of learned spectral densities, called curves, during a fit."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel

from gp_orff.data.survey import Distances
from gp_orff.inference.features import FeatureInference
from gp_orff.kernels.learned import LearnedSpectrumKernel
from gp_orff.kernels.spectra import learned_spectra
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, spectra_of, terms


@dataclass(frozen=True)
class Curves:
    """The trained curves of all `LearnedSpectrumKernel`s of a kernel; false if there are none."""

    kernel: Kernel

    def __bool__(self) -> bool:
        return bool(self._spectra)

    @property
    def _spectra(self) -> list[LearnedSpectrumKernel]:
        return learned_spectra(self.kernel, trained=True)

    @property
    def _leaves(self) -> Iterator[tuple[Term, Leaf]]:
        for term in terms(self.kernel):
            for leaf in term.leaves:
                if leaf.kernel in self._spectra:
                    yield term, leaf

    def check_extents(self, distances: Distances) -> None:
        """Raise an error for positions that do not determine a learned spectrum.

        Raises:
            ValueError: none of the inputs of a `LearnedSpectrumKernel` with trained weights varies.
        """
        for term, leaf in self._leaves:
            dims = leaf.columns(leaf_dims(term, leaf, distances.points.shape[-1]))
            if not distances.extent[list(dims)].any():
                raise ValueError(
                    "LearnedSpectrumKernel expects positions with an extent in at least one of its "
                    "inputs, got observations with the same values in all of them (columns "
                    f"{list(dims)}), which do not determine a spectrum; give observations at "
                    "several places, or fix its weights by kernel.shape.requires_grad_(False)"
                )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Fix the curves at zero, their starting value, inside the block."""
        shapes = [part.shape for part in self._spectra]
        for shape in shapes:
            shape.requires_grad_(False).zero_()
        try:
            yield
        finally:
            for shape in shapes:
                shape.requires_grad_(True)

    def end(self, continued: bool = False) -> None:
        """End the curves at their last knots, or continue them beyond if `continued`."""
        for part in self._spectra:
            part.continued = continued

    def centre(self) -> None:
        """Put the lengths that carry most of the variance of the field in the middle of each curve.

        For B(ω) of degree t, the variance at length λ is ∝ π λ^{−2t}, where π is the weight of λ.
        The curve gets a slope that leaves the kernel unchanged.
        """
        for term, leaf in self._leaves:
            if leaf is term.leaves[0]:
                leaf.kernel.centre(order=term.factor.degree)

    @torch.no_grad()
    def extrapolate(self, inference: FeatureInference) -> None:
        """Continue each curve in a straight line, from the shortest length that a grid resolves.

        Shorter lengths have most of their variance at frequencies beyond the grid. A search on the
        grid cannot determine their weights, and the prior hardly restricts them. Curves that share
        a lengthscale continue from the shortest length that any of their terms resolves.
        """
        ends = list(self._resolved(inference))
        for own, _ in ends:
            shared = [
                length for other, length in ends if other.raw_lengthscale is own.raw_lengthscale
            ]
            own.extrapolate(min(shared))

    def _resolved(
        self, inference: FeatureInference
    ) -> Iterator[tuple[LearnedSpectrumKernel, float]]:
        """Each spectrum, with the shortest length λ that the grid resolves.

        The variance of the field per log ω is ∝ ω^{d+2t} e^{−(ωℓλ)²/2}, with its maximum at
        ωℓλ = √(d + 2t). For the returned λ, this maximum is at the edge of the grid.
        """
        for term, draw in zip(terms(self.kernel), inference.draws, strict=True):
            spectra = spectra_of(term)
            parts = zip(term.leaves, spectra, draw.nodes(spectra)[0], strict=True)
            for number, (leaf, spectrum, omega) in enumerate(parts):
                if leaf.kernel in self._spectra:
                    order = 0 if number else term.factor.degree
                    edge = spectrum.scaled_radius(omega.cpu().numpy()).max()
                    yield leaf.kernel, math.sqrt(omega.shape[-1] + 2 * order) / float(edge)
