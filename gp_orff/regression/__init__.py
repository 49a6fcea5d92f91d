"""Ridge regression of vectors, semi-supervised and multi-view learning, and classification."""

from gp_orff.regression.laplacian import graph_laplacian, view_disagreement
from gp_orff.regression.ridge import (
    ORFFRidge,
    ORFFRidgeClassifier,
    ORFFRidgeCV,
    OVKRidge,
    simplex_codes,
)

__all__ = [
    "ORFFRidge",
    "ORFFRidgeCV",
    "ORFFRidgeClassifier",
    "OVKRidge",
    "graph_laplacian",
    "simplex_codes",
    "view_disagreement",
]
