"""The statistics of observations as a summary of chunks; a summary of several sources."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.observations import Observations
from gp_orff.data.sources import Source, Summary, Value
from gp_orff.data.tracks.observations import split
from gp_orff.features.columns import Columns


@dataclass(frozen=True)
class StatisticsUnder:
    """The statistics of observations at single points, under columns φ."""

    phi: Columns

    def __call__(self, parts: Iterator[Observations], number: int) -> FieldStatistics:
        return FieldStatistics.of(split(parts, []), self.phi)

    @property
    def name(self) -> object:
        return ["statistics", self.phi.plain()]


def fold_sources(sources: Iterable[Source], summary: Summary[Value]) -> Value | None:
    """The summary of the observations of all sources; None if there are none."""
    total = None
    for source in sources:
        value = source.fold(summary)
        if value is not None:
            total = value if total is None else total + value
    return total


def statistics_under(phi: Columns, sources: Iterable[Source]) -> FieldStatistics:
    """The statistics of the observations of all sources; without groups if there are none."""
    total = fold_sources(sources, StatisticsUnder(phi))
    return FieldStatistics(phi, {}) if total is None else total
