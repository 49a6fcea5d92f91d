"""Fields in free space: gradients of potentials that satisfy Laplace's equation."""

from gp_orff.kernels.harmonic.kernel import HarmonicKernel
from gp_orff.kernels.harmonic.rows import HarmonicRows
from gp_orff.kernels.harmonic.sources import Sources
from gp_orff.kernels.harmonic.spectrum import HarmonicFactor, HarmonicSpectrum

__all__ = ["HarmonicFactor", "HarmonicKernel", "HarmonicRows", "HarmonicSpectrum", "Sources"]
