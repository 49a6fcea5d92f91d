"""The evidence under an exact kernel, tile by tile."""

from gp_orff.inference.exact.evidence import tiled_evidence
from gp_orff.inference.exact.tiles import Tiles

__all__ = ["Tiles", "tiled_evidence"]
