"""The survey of observations at single points and along tracks; a sample of many blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeVar

from gp_orff.data.observations import Observations
from gp_orff.data.statistics import Weights
from gp_orff.data.survey import Survey
from gp_orff.data.tracks.observations import TrackObservations, split
from gp_orff.data.tracks.reading import joined

_MORE = 1.5  # times as many blocks as are wanted: fewer stay as they are


class _Surveyed(Protocol):
    survey: Survey
    tracks: tuple[TrackObservations, ...]


Data = TypeVar("Data", bound=_Surveyed)


class Folded(Protocol):
    """A source of observations, in the order of chunks."""

    def fold(self, summary: "FirstLook") -> "Seen | None":
        """The summary of all observations, in one pass."""


@dataclass(frozen=True)
class Seen:
    """The survey of observations at single points, if there are any, and those along tracks."""

    survey: Survey | None
    tracks: list[TrackObservations]

    def __add__(self, other: "Seen") -> "Seen":
        surveys = [seen.survey for seen in (self, other) if seen.survey is not None]
        total = surveys[0] + surveys[1] if len(surveys) == 2 else next(iter(surveys), None)
        return Seen(total, self.tracks + other.tracks)


@dataclass(frozen=True)
class FirstLook:
    """The first look at observations; `seed` selects the sample."""

    seed: int

    def __call__(self, parts: Iterator[Observations | TrackObservations], number: int) -> Seen:
        tracks: list[TrackObservations] = []
        single = split(parts, tracks)
        first = next(single, None)
        if first is None:
            return Seen(None, tracks)
        seed = [self.seed, number] if number else self.seed
        return Seen(Survey.of(chain([first], single), seed), tracks)

    @property
    def name(self) -> object:
        return ["first look", self.seed]


def surveyed(
    source: Folded, seed: int, spans: Mapping[str, float] | None = None
) -> tuple[Survey, tuple[TrackObservations, ...], bool]:
    """The survey, the tracks by group, and whether there are observations at single points.

    In the survey, the block means of tracks are observations at their mean positions.

    Args:
        spans: the time of a block of the tracks of a group, by its label; chosen from the data
            where there is none. If None, the tracks are in blocks.
    """
    seen = source.fold(FirstLook(seed)) or Seen(None, [])
    tracks = joined(seen.tracks)
    if spans is not None:
        tracks = tuple(part.in_blocks(spans.get(part.key.label)) for part in tracks)
    survey = seen.survey
    if tracks or survey is None:
        means = Survey.of((part.means for part in tracks), seed)
        survey = means if survey is None else survey + means
    return survey, tracks, seen.survey is not None or not tracks


def sampled(data: Data, most: int) -> Data:
    """The data with about `most` blocks of the tracks of each group that has many more."""
    if all(len(part.y) <= _MORE * most for part in data.tracks):
        return data
    tracks, weights = [], dict(data.survey.weights)
    num_points, num_values = data.survey.num_points, data.survey.num_values
    for part in data.tracks:
        chosen = part.sample(most) if len(part.y) > _MORE * most else part
        fewer, count = len(part.y) - len(chosen.y), len(chosen.y)
        num_points, num_values = num_points - fewer, num_values - fewer * part.y.shape[-1]
        weights[part.key] = Weights(count, count, count)
        tracks.append(chosen)
    survey = replace(data.survey, num_points=num_points, num_values=num_values, weights=weights)
    return replace(data, tracks=tuple(tracks), survey=survey)


def blocks_in_words(tracks: Sequence[TrackObservations]) -> str:
    """A sentence on readings along tracks whose means are taken; empty if there are none."""
    readings, means = (sum(map(len, own)) for own in ([t.x for t in tracks], [t.y for t in tracks]))
    if readings == means:
        return ""
    along = sum(len(own.tracks) for own in tracks)
    return f"{readings} readings along {along} track{'s' * (along > 1)}, as {means} means of blocks"
