"""Block means of tracks as plain values, and back."""

from collections.abc import Mapping

from torch import Tensor

from gp_orff.data.packing.keys import pack_key, unpack_key
from gp_orff.data.patterns import GroupKey
from gp_orff.data.tracks.blocks import Track
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.data.tracks.patterns import means_of

_TENSORS = ("x", "clock", "block", "y", "squares", "direction", "given")


def pack_tracks(part: TrackObservations) -> dict:
    """Pack the block means of a group."""
    tracks = [
        {
            "label": track.label,
            "degrees": track.degrees,
            **{name: _plain(getattr(track, name)) for name in _TENSORS},
        }
        for track in part.tracks
    ]
    return {**pack_key(part.key), "tracks": tracks, "timed": part.timed, "span": part.span}


def unpack_tracks(content: Mapping) -> TrackObservations:
    """The block means of a group from what `pack_tracks` wrote."""
    key = unpack_key(content)
    tracks = tuple(Track(**track) for track in content["tracks"])
    return TrackObservations(
        GroupKey(key.label, means_of(key.pattern)), tracks, content["timed"], content["span"]
    )


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu().clone()
