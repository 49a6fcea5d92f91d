"""Random rules, whose frequencies are written out, and the densities they are drawn from."""

from gp_orff.features.frequencies.random.long_tails import LongTails
from gp_orff.features.frequencies.random.measures import Base, Measure, Trace, as_measure
from gp_orff.features.frequencies.random.rules import MonteCarlo, Orthogonal, QuasiMonteCarlo

__all__ = [
    "Base",
    "LongTails",
    "Measure",
    "MonteCarlo",
    "Orthogonal",
    "QuasiMonteCarlo",
    "Trace",
    "as_measure",
]
