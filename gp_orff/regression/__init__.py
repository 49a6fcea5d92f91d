"""Ridge regression and classification on operator-valued Fourier features, for scikit-learn.

The estimators also support semi-supervised learning, by the Laplacian of a graph, and multi-view
learning.
"""

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
