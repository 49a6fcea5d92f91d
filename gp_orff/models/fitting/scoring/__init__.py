"""Searches by the expected curvature of the evidence, for learned spectra."""

from gp_orff.models.fitting.scoring.ascent import score
from gp_orff.models.fitting.scoring.feature_information import FeatureInformation
from gp_orff.models.fitting.scoring.information import MOST_SAMPLED, Information
from gp_orff.models.fitting.scoring.noise_prior import log_prior_of_noise
from gp_orff.models.fitting.scoring.weak_priors import WeakPriors, leave_much_open

__all__ = [
    "MOST_SAMPLED",
    "FeatureInformation",
    "Information",
    "WeakPriors",
    "leave_much_open",
    "log_prior_of_noise",
    "score",
]
