"""Spectral densities of stationary kernels: the public path of `gp_orff.kernels.spectra`."""

from gp_orff.kernels.spectra import *  # noqa: F403
