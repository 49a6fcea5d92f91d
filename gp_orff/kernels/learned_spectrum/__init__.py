"""A scalar kernel whose spectral density is learned: the kernel and its spectrum."""

from gp_orff.kernels.learned_spectrum.kernel import LearnedSpectrumKernel
from gp_orff.kernels.learned_spectrum.related import (
    RelatedSpectrumKernel,
    continue_curves,
    has_learned_spectrum,
    held_curves,
    learned_spectra,
    related_copy,
)
from gp_orff.kernels.learned_spectrum.spectrum import FiniteMixture

__all__ = [
    "FiniteMixture",
    "LearnedSpectrumKernel",
    "RelatedSpectrumKernel",
    "continue_curves",
    "has_learned_spectrum",
    "held_curves",
    "learned_spectra",
    "related_copy",
]
