"""What follows from a posterior: symbols by name, energy spectra."""
