"""The prior: exact operator-valued kernels, what they are made of, and their spectra."""
