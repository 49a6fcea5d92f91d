"""Searches by the expected curvature of the evidence, for learned spectra."""

from gp_orff.models.fitting.scoring.ascent import score
from gp_orff.models.fitting.scoring.information import Information
from gp_orff.models.fitting.scoring.noise_prior import log_prior_of_noise

__all__ = ["Information", "log_prior_of_noise", "score"]
