"""The evidence under an exact kernel, tile by tile."""

from gp_orff.inference.exact.evidence import covariance_of_tiles, tiled_evidence
from gp_orff.inference.exact.tiles import Tiles

__all__ = ["Tiles", "covariance_of_tiles", "tiled_evidence"]
