"""Block means of tracks as plain values, and back."""

from collections.abc import Mapping

from gp_orff.data.packing.keys import pack_key, unpack_key
from gp_orff.data.patterns import GroupKey
from gp_orff.data.tracks.blocks import Track
from gp_orff.data.tracks.observations import BlockMeans, TrackObservations

_TENSORS = ("x", "clock", "block", "y", "squares")


def pack_tracks(part: TrackObservations) -> dict:
    """Pack the block means of a group."""
    tracks = [
        {
            "label": track.label,
            "degrees": track.degrees,
            **{name: getattr(track, name).detach().cpu().clone() for name in _TENSORS},
        }
        for track in part.tracks
    ]
    return {**pack_key(part.key), "tracks": tracks, "timed": part.timed, "span": part.span}


def unpack_tracks(content: Mapping) -> TrackObservations:
    """The block means of a group from what `pack_tracks` wrote."""
    key = unpack_key(content)
    means = BlockMeans(key.pattern.columns, key.pattern.num_outputs)
    tracks = tuple(Track(**track) for track in content["tracks"])
    return TrackObservations(GroupKey(key.label, means), tracks, content["timed"], content["span"])
