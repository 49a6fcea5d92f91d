"""Frequency rules: how a spectral density becomes D weighted frequencies."""

from gp_orff.frequencies.draw import Draw, LeafLaw, Rule, TermLaw
from gp_orff.frequencies.random import MonteCarlo, Orthogonal, QuasiMonteCarlo

__all__ = [
    "Draw",
    "LeafLaw",
    "MonteCarlo",
    "Orthogonal",
    "QuasiMonteCarlo",
    "Rule",
    "TermLaw",
]
