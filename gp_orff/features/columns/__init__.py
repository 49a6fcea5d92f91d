"""The columns φ(x) that features are made of, by families."""

from gp_orff.features.columns.base import Columns, stacked
from gp_orff.features.columns.families import SideBySide, side_by_side
from gp_orff.features.columns.trigonometric import TrigColumns

__all__ = ["Columns", "SideBySide", "TrigColumns", "side_by_side", "stacked"]
