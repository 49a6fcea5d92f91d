"""Kernels whose spectral matrix A(ω) is given as a matrix or as a function."""
