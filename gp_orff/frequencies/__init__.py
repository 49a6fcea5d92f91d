"""Frequency rules: how a spectral density becomes D weighted frequencies."""

from gp_orff.frequencies.draw import Draw, Law, Rule
from gp_orff.frequencies.monte_carlo import MonteCarlo

__all__ = ["Draw", "Law", "MonteCarlo", "Rule"]
