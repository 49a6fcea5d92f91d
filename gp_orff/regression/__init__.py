"""Ridge regression of vectors, semi-supervised and multi-view learning, and classification."""

from gp_orff.regression.classifier import ORFFRidgeClassifier
from gp_orff.regression.ridge import ORFFRidge
from gp_orff.regression.simplex import simplex_codes

__all__ = ["ORFFRidge", "ORFFRidgeClassifier", "simplex_codes"]
