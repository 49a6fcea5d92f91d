"""The survey of observations at single points and along tracks."""

from collections.abc import Iterator, Mapping

from gp_orff.data.observations import Observations
from gp_orff.data.survey import Survey
from gp_orff.data.tracks.observations import TrackObservations, joined, split


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
