"""The two-dimensional spectrum of a `HarmonicKernel`, and its term of a kernel tree."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.harmonic.kernel import HarmonicKernel
from gp_orff.kernels.harmonic.sources import Sources
from gp_orff.kernels.spectra.base import Range
from gp_orff.kernels.tree import Leaf, Term, inner_terms


@dataclass(frozen=True)
class HarmonicSpectrum:
    """The planes of sources on one side of a harmonic kernel, with horizontal frequencies k.

    It is no `Spectrum`: the kernel is stationary in the horizontal inputs only.

    Args:
        sources: the planes.
        depths: h, of the planes of all sides: the parameter of the kernel.
        mean_height: z̄.
    """

    sources: Sources
    depths: Float[Tensor, "*b S*J"]
    mean_height: Float[Tensor, "*b"]

    def variance(self) -> Float[Tensor, "*b 3 3"]:
        """K(x, x) at the mean height."""
        return self.sources.variance(self.mean_height)

    def lengths(self) -> Float[np.ndarray, "3"]:
        """The length over which the field varies along every input, for margins: the smallest
        depth, and zero for the height."""
        depth = self.depths.detach().double().min().item()
        return np.array([depth, depth, 0.0])

    def num_coordinates(self, num_dims: int) -> int:
        """Raise: random frequencies are not known for fields that decay with height.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel for random frequencies, got a HarmonicKernel; use "
            "gp_orff.Grid.for_data(x) or gp_orff.Auto().for_data(x), or the exact kernel"
        )

    def frequency_parameters(
        self, shortest: Float[np.ndarray, "k"], longest: Float[np.ndarray, "k"]
    ) -> list[Range]:
        """The depths, and the interval to search; see `Spectrum.frequency_parameters`."""
        return [Range(self.depths, float(shortest.min()), float(longest.max()))]


@dataclass(frozen=True)
class HarmonicFactor:
    """The directions (ik, −|k|) of the waves e^{i⟨k,x⟩ − |k|z} of a harmonic field."""

    num_outputs = num_inputs = 3
    dims = None
    degree = 1
    rank = 1
    closed_form = True

    def variance(self, density: HarmonicSpectrum) -> Float[Tensor, "*b 3 3"]:
        """K(x, x) at the mean height of the readings."""
        return density.variance()

    def __call__(self, omega: Tensor) -> Tensor:
        """Raise: the directions are complex, and belong to columns that decay.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected a stationary kernel, whose features are waves, got a HarmonicKernel, whose "
            "waves decay with height; use gp_orff.Grid or gp_orff.Auto"
        )


@dataclass(frozen=True)
class SideOfHarmonic(Leaf):
    """The sources of a harmonic kernel on one side of the points."""

    side: int = 0  # its index among the sides of the kernel
    is_elementary = True

    @property
    def spectrum(self) -> HarmonicSpectrum:
        kernel = self.kernel
        sources = kernel.planes_of_sources()[self.side]
        return HarmonicSpectrum(sources, kernel.depths, kernel.heights[..., 1])


@inner_terms.register
def _(kernel: HarmonicKernel) -> list[Term]:
    one = torch.ones((), dtype=kernel.dtype, device=kernel.device)
    return [
        Term((SideOfHarmonic(kernel, side=side),), HarmonicFactor(), one)
        for side in range(kernel.num_sides)
    ]
