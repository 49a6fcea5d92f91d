"""The waves of harmonic kernels: rings of horizontal frequencies."""

from gp_orff.features.frequencies.harmonic.design import is_harmonic
from gp_orff.features.frequencies.harmonic.draw import HarmonicDraw, HarmonicWaves
from gp_orff.features.frequencies.harmonic.sums import draw_with_harmonic

__all__ = ["HarmonicDraw", "HarmonicWaves", "draw_with_harmonic", "is_harmonic"]
