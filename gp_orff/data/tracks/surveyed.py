"""The survey of observations at single points and along tracks."""

from collections.abc import Iterator

from gp_orff.data.observations import Observations
from gp_orff.data.survey import Survey
from gp_orff.data.tracks.observations import TrackObservations, joined, split


def surveyed(
    parts: Iterator[Observations | TrackObservations], seed: int
) -> tuple[Survey, tuple[TrackObservations, ...], bool]:
    """The survey, the tracks by group, and whether there are observations at single points.

    In the survey, the block means of tracks are observations at their mean positions.
    """
    tracks: list[TrackObservations] = []
    single = False

    def observations() -> Iterator[Observations]:
        nonlocal single
        for part in split(parts, tracks):
            single = True
            yield part
        tracks[:] = joined(tracks)
        yield from (part.means for part in tracks)

    survey = Survey.of(observations(), seed)
    return survey, tuple(tracks), single or not tracks
