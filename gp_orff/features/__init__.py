"""Rules that choose frequencies, and the features Σ_f θ_f φ_f(x) m_f that frequencies define."""

from gp_orff.features.draws import (
    Draw,
    GridWarning,
    Lattice,
    LatticeDraw,
    LeafSpectrum,
    Rule,
    TermSpectrum,
    remainder,
)
from gp_orff.features.grid import Auto, Grid
from gp_orff.features.random import (
    Base,
    Fastfood,
    FourierFastfood,
    Measure,
    MonteCarlo,
    Orthogonal,
    QuasiMonteCarlo,
    StructuredOrthogonal,
    Trace,
    as_measure,
)
from gp_orff.features.zoo import GaussHermite, Templates

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
