"""Spectral densities of stationary kernels, and `Spectrum` and `GridSpectrum` for your own."""

from gp_orff.kernels.spectra import *  # noqa: F403
