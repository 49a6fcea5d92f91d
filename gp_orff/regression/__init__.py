"""Ridge regression of vectors, semi-supervised and multi-view learning, and classification."""

from gp_orff.regression.cross_validation import ORFFRidgeCV
from gp_orff.regression.laplacian import graph_laplacian, view_disagreement
from gp_orff.regression.ridge import ORFFRidge

__all__ = ["ORFFRidge", "ORFFRidgeCV", "graph_laplacian", "view_disagreement"]
