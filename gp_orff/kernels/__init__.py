"""The prior: exact operator-valued kernels, their factors and terms, and their spectra."""
