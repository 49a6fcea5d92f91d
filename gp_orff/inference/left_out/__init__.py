"""The field at readings that are left out, block by block, given the rest, in closed form."""

from gp_orff.inference.left_out.conditioning import Block, LeftOut, left_out
from gp_orff.inference.left_out.one_by_one import leave_one_out_of_tracks
from gp_orff.inference.left_out.tracks import left_out_of_tracks, tracks_left_out

# registered with `left_out`
from gp_orff.inference.left_out import closed_form, statistics  # isort: skip  # noqa: F401

__all__ = [
    "Block",
    "LeftOut",
    "leave_one_out_of_tracks",
    "left_out",
    "left_out_of_tracks",
    "tracks_left_out",
]
