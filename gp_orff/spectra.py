"""Spectral densities of stationary kernels, and `Spectrum` and `GridSpectrum` for your own."""

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
