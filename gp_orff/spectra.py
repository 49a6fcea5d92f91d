"""Spectral densities of stationary kernels.

Subclass `Spectrum` or `GridSpectrum` to define the spectral density of a new kernel.
"""

from gp_orff.kernels.learned import FiniteMixture
from gp_orff.kernels.lines import CosineLine, LineSpectrum, PeriodicLines
from gp_orff.kernels.scalar import BesselSpectrum
from gp_orff.kernels.spectra import (
    GammaMixture,
    Gaussian,
    GridSpectrum,
    ScaleMixture,
    SpectralMixture,
    Spectrum,
    StudentT,
    spectrum,
)

__all__ = [
    "BesselSpectrum",
    "CosineLine",
    "FiniteMixture",
    "GammaMixture",
    "Gaussian",
    "GridSpectrum",
    "LineSpectrum",
    "PeriodicLines",
    "ScaleMixture",
    "SpectralMixture",
    "Spectrum",
    "StudentT",
    "spectrum",
]
