"""Random templates: centers of local features, in the place of frequencies."""

from gp_orff.features.frequencies.templates.draw import TemplateDraw
from gp_orff.features.frequencies.templates.rule import Templates

__all__ = ["TemplateDraw", "Templates"]
