"""The survey of observations at single points and along tracks; a sample of many blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

from gp_orff.data.observations import Observations
from gp_orff.data.statistics import Weights
from gp_orff.data.survey import Survey
from gp_orff.data.tracks.observations import TrackObservations, joined, split

_MORE = 1.5  # times as many blocks as are wanted: fewer stay as they are


class _Surveyed(Protocol):
    survey: Survey
    tracks: tuple[TrackObservations, ...]


Data = TypeVar("Data", bound=_Surveyed)


def surveyed(
    parts: Iterator[Observations | TrackObservations],
    seed: int,
    spans: Mapping[str, float] | None = None,
) -> tuple[Survey, tuple[TrackObservations, ...], bool]:
    """The survey, the tracks by group, and whether there are observations at single points.

    In the survey, the block means of tracks are observations at their mean positions.

    Args:
        spans: the time of a block of the tracks of a group, by its label; chosen from the data
            where there is none. If None, the tracks are in blocks.
    """
    tracks: list[TrackObservations] = []
    single = False

    def observations() -> Iterator[Observations]:
        nonlocal single
        for part in split(parts, tracks):
            single = True
            yield part
        tracks[:] = joined(tracks)
        if spans is not None:
            tracks[:] = [part.in_blocks(spans.get(part.key.label)) for part in tracks]
        yield from (part.means for part in tracks)

    survey = Survey.of(observations(), seed)
    return survey, tuple(tracks), single or not tracks


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
