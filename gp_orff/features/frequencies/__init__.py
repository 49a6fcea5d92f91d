"""Frequency rules: how a spectral density becomes D frequencies with weights."""

from gp_orff.features.frequencies.auto import Auto
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.frequencies.hermite import GaussHermite
from gp_orff.features.frequencies.lattice_nodes import GridWarning, Lattice, LatticeDraw
from gp_orff.features.frequencies.random import (
    Base,
    Measure,
    MonteCarlo,
    Orthogonal,
    QuasiMonteCarlo,
    Trace,
    as_measure,
)
from gp_orff.features.frequencies.remainder import remainder
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, Rule, TermSpectrum
from gp_orff.features.frequencies.structured import (
    Fastfood,
    FourierFastfood,
    StructuredOrthogonal,
)
from gp_orff.features.frequencies.templates import Templates

__all__ = [
    "Auto",
    "Base",
    "Draw",
    "Fastfood",
    "FourierFastfood",
    "GaussHermite",
    "Grid",
    "GridWarning",
    "Lattice",
    "LatticeDraw",
    "LeafSpectrum",
    "Measure",
    "MonteCarlo",
    "Orthogonal",
    "QuasiMonteCarlo",
    "Rule",
    "StructuredOrthogonal",
    "Templates",
    "TermSpectrum",
    "Trace",
    "as_measure",
    "remainder",
]
