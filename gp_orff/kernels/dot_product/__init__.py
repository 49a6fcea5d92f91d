"""Dot-product kernels: exact, and their expansions in Legendre polynomials."""

from gp_orff.kernels.dot_product.kernel import DotProductKernel
from gp_orff.kernels.dot_product.spectrum import DotProductSpectrum

__all__ = ["DotProductKernel", "DotProductSpectrum"]
