"""The columns φ(x) of features, one module for each family."""

from gp_orff.features.columns.base import Columns, stack_rows
from gp_orff.features.columns.dot_product import DotProductColumns
from gp_orff.features.columns.families import SideBySide, families_of, side_by_side
from gp_orff.features.columns.harmonic import HarmonicColumns
from gp_orff.features.columns.pointwise import PointwiseColumns
from gp_orff.features.columns.templates import TemplateColumns
from gp_orff.features.columns.trigonometric import TrigColumns

__all__ = [
    "Columns",
    "DotProductColumns",
    "HarmonicColumns",
    "PointwiseColumns",
    "SideBySide",
    "TemplateColumns",
    "TrigColumns",
    "families_of",
    "side_by_side",
    "stack_rows",
]
