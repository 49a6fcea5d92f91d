"""Spectral densities of stationary kernels: base classes, and one module for each family."""

from gp_orff.kernels.spectra.base import GridSpectrum, Spectrum, spectrum
from gp_orff.kernels.spectra.bessel import BesselSpectrum
from gp_orff.kernels.spectra.elliptical import Gaussian, ScaleMixture, StudentT
from gp_orff.kernels.spectra.gamma_mixture import GammaMixture
from gp_orff.kernels.spectra.spectral_mixture import SpectralMixture

__all__ = [
    "BesselSpectrum",
    "GammaMixture",
    "Gaussian",
    "GridSpectrum",
    "ScaleMixture",
    "SpectralMixture",
    "Spectrum",
    "StudentT",
    "spectrum",
]
