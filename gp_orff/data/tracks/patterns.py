"""Patterns of block means of readings along tracks."""

from dataclasses import dataclass

from gp_orff.data.patterns import Components, LineOfSight, Pattern


@dataclass(frozen=True)
class BlockMeans(Components):
    """All components of a mean over a block of readings of one track."""


@dataclass(frozen=True)
class LineMeans(LineOfSight):
    """The mean over a block of readings of one track, each along a direction of its own."""


MeansOfBlocks = BlockMeans | LineMeans


def means_of(pattern: Pattern) -> MeansOfBlocks:
    """The pattern of block means of readings with this pattern."""
    if isinstance(pattern, LineOfSight):
        return LineMeans(pattern.num_outputs)
    return BlockMeans(pattern.columns, pattern.num_outputs)
