"""Searches by the expected curvature of the evidence, for learned spectra."""

from gp_orff.models.fitting.scoring.ascent import score
from gp_orff.models.fitting.scoring.information import Information

__all__ = ["Information", "score"]
