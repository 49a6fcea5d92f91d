"""Gaussian processes with vector-valued outputs for GPyTorch.

Curl-free, divergence-free, Helmholtz and separable kernels, exact and as operator-valued random
Fourier features.
"""

from gp_orff.frequencies import MonteCarlo
from gp_orff.kernels import (
    CurlFreeKernel,
    DivergenceFreeKernel,
    HelmholtzKernel,
    radial_derivatives,
)
from gp_orff.orff_kernel import ORFFKernel
from gp_orff.spectra import spectrum

__all__ = [
    "CurlFreeKernel",
    "DivergenceFreeKernel",
    "HelmholtzKernel",
    "MonteCarlo",
    "ORFFKernel",
    "radial_derivatives",
    "spectrum",
]

__version__ = "0.1.0"
