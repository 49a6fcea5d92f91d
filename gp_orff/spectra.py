"""Spectral densities of stationary kernels, and `Spectrum` and `GridSpectrum` for your own."""

from gp_orff.kernels.learned import FiniteMixture
from gp_orff.kernels.scalar import BesselSpectrum
from gp_orff.kernels.spectra import (
    GammaMixture,
    Gaussian,
    GridSpectrum,
    ScaleMixture,
    Spectrum,
    StudentT,
    spectrum,
)
from gp_orff.kernels.spectral_mixture import SpectralMixture

__all__ = [
    "BesselSpectrum",
    "FiniteMixture",
    "GammaMixture",
    "Gaussian",
    "GridSpectrum",
    "ScaleMixture",
    "SpectralMixture",
    "Spectrum",
    "StudentT",
    "spectrum",
]
