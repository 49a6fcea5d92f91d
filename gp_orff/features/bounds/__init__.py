"""How many random frequencies suffice: bounds of the error of a kernel, and their constants."""

from gp_orff.features.bounds.bound import Bound
from gp_orff.features.bounds.constants import Constants, constants
from gp_orff.features.bounds.fastfood import fastfood
from gp_orff.features.bounds.leaf_moments import Moments, moments
from gp_orff.features.bounds.theorems import brault, hoeffding, minh, minh_pointwise, rahimi_recht

__all__ = [
    "Bound",
    "Constants",
    "Moments",
    "brault",
    "constants",
    "fastfood",
    "hoeffding",
    "minh",
    "minh_pointwise",
    "moments",
    "rahimi_recht",
]
