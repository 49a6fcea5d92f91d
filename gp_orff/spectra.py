"""Spectral densities of stationary kernels, and `Spectrum` and `GridSpectrum` for your own."""

from gp_orff.kernels.learned_spectrum import FiniteMixture  # noqa: F401
from gp_orff.kernels.spectra import *  # noqa: F403
