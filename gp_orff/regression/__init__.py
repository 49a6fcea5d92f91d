"""Ridge regression of vectors, semi-supervised and multi-view learning, and classification."""

from gp_orff.regression.ridge import ORFFRidge

__all__ = ["ORFFRidge"]
