"""The representation of a kernel for some data: itself, a grid or random frequencies."""

from gp_orff.inference.representation.choice import (
    COARSE_FACTOR,
    FINE_FACTOR,
    MOST_EXACT,
    Representation,
)
from gp_orff.inference.representation.resolution import MOST_TRAINING

__all__ = ["COARSE_FACTOR", "FINE_FACTOR", "MOST_EXACT", "MOST_TRAINING", "Representation"]
