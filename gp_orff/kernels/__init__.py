"""Exact operator-valued kernels and their spectra."""
