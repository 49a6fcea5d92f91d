"""Posteriors of few readings, which leave hyperparameters uncertain."""

from gp_orff.models.few_readings.importance import Draws
from gp_orff.models.few_readings.mixture import Member, Mixture
from gp_orff.models.few_readings.sample import (
    Sample,
    leaves_spectra_open,
    sample_of_hyperparameters,
)

__all__ = [
    "Draws",
    "Member",
    "Mixture",
    "Sample",
    "leaves_spectra_open",
    "sample_of_hyperparameters",
]
