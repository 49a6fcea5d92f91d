"""Frequency rules: how a spectral density becomes D weighted frequencies."""

from gp_orff.frequencies.auto import Auto
from gp_orff.frequencies.draw import Draw, LeafLaw, Rule, TermLaw
from gp_orff.frequencies.grid import Grid
from gp_orff.frequencies.hermite import GaussHermite
from gp_orff.frequencies.lattice_draw import GridWarning, Lattice, LatticeDraw
from gp_orff.frequencies.random import MonteCarlo, Orthogonal, QuasiMonteCarlo
from gp_orff.frequencies.remainder import remainder

__all__ = [
    "Auto",
    "Draw",
    "GaussHermite",
    "Grid",
    "GridWarning",
    "Lattice",
    "LatticeDraw",
    "LeafLaw",
    "MonteCarlo",
    "Orthogonal",
    "QuasiMonteCarlo",
    "Rule",
    "TermLaw",
    "remainder",
]
