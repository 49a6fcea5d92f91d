"""Kernels with matrix values that are given by a matrix: separable and general spectral ones."""
