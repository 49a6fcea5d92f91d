"""Random frequencies in structured blocks, whose phases are fast transforms of the inputs."""

from gp_orff.features.frequencies.structured.rules import (
    Fastfood,
    FourierFastfood,
    StructuredOrthogonal,
)

__all__ = ["Fastfood", "FourierFastfood", "StructuredOrthogonal"]
