"""The spectral densities, under their public path."""

from gp_orff.kernels.spectra import *  # noqa: F403
