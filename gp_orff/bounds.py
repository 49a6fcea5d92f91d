"""How many random frequencies suffice, by the theorems of four papers."""

from gp_orff.features.bounds import (
    Bound,
    brault,
    hoeffding,
    minh,
    minh_pointwise,
    rahimi_recht,
)

__all__ = ["Bound", "brault", "hoeffding", "minh", "minh_pointwise", "rahimi_recht"]
