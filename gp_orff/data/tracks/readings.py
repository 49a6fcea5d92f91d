"""Readings along tracks one by one, of which some can be left out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.tracks.blocks import Track
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.data.tracks.reading import along_tracks


@dataclass(frozen=True)
class TrackReadings:
    """The readings of a group along tracks, track after track, in the order of their times."""

    single: TrackObservations  # in blocks of one reading
    index: Int[Tensor, "N"]  # of each reading in the x that the user gave
    span: float  # of the blocks that a model makes of them

    @classmethod
    def of(
        cls, part: Observations, track: object, time: object, count: int, span: float
    ) -> "TrackReadings":
        """The readings of `part`, with the arguments of `along_tracks`."""
        values = part.y.shape[-1]
        numbered = replace(part, y=torch.cat([part.y, part.index[:, None].to(part.y)], dim=-1))
        held = along_tracks(numbered, track, time, count, {part.key.label: 0.0})
        index = held.y[:, values].long()
        tracks = tuple(
            replace(track, y=track.y[:, :values], squares=track.squares[:values])
            for track in held.tracks
        )
        return cls(replace(held, tracks=tracks), index, span)

    def take(self, rows: Bool[Tensor, "N"]) -> "TrackReadings":
        """Some readings."""
        kept = torch.nonzero(rows).squeeze(-1)
        return replace(self, single=self.single.take(kept), index=self.index[kept])

    def __len__(self) -> int:
        return len(self.index)

    @property
    def observations(self) -> Observations:
        """The readings as observations at single points."""
        return replace(self.single.means, index=self.index)

    @property
    def in_blocks(self) -> TrackObservations:
        """Block means of the readings, on the clock of all of them."""
        tracks = tuple(
            Track.of(track.label, track.x, track.y, track.clock, self.span)
            for track in self.single.tracks
        )
        return replace(self.single, tracks=tracks, span=self.span)


def rest_of(
    readings: Sequence[TrackReadings], left_out: Bool[Tensor, "M"]
) -> list[TrackObservations]:
    """Block means of the readings that are not left out; `left_out` is by their `index`."""
    rest = [part.take(~left_out[part.index]) for part in readings]
    return [part.in_blocks for part in rest if len(part)]
