"""Posteriors of few readings under learned spectra, which these leave uncertain."""

from gp_orff.models.few_readings.mixture import Member, Mixture
from gp_orff.models.few_readings.sample import sample_of_spectra

__all__ = ["Member", "Mixture", "sample_of_spectra"]
