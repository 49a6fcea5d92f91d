"""From track labels and times to block means, and those of several chunks together."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.tracks.blocks import tracks_in_blocks
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.data.tracks.patterns import means_of
from gp_orff.data.tracks.times import as_times, check_increasing
from gp_orff.data.validation import are_missing, is_single


def check_time(track: object, time: object) -> None:
    """Raise ValueError for times without tracks."""
    if time is not None and track is None:
        raise ValueError(
            "expected track= beside time=, got times alone; label the track of every reading, or "
            "make time a column of x if the field changes with it"
        )


def along_tracks(
    part: Observations,
    track: object,
    time: object,
    count: int,
    spans: Mapping[str, float],
) -> TrackObservations:
    """The block means of observations along tracks: whole vectors, or numbers along directions.

    Args:
        part, track, time, count: as for `readings_along`.
        spans: the time of a block, by the label of the group; chosen from the data without.

    Example:
        >>> import torch
        >>> from gp_orff.data.reading import Options, read
        >>> from gp_orff.data.tracks.reading import along_tracks
        >>> x, y = torch.arange(8.0).reshape(4, 2), torch.ones(4, 2)
        >>> (part,) = read(x, y, 2, Options())
        >>> means = along_tracks(part, ["a", "b", "a", "b"], None, 4, {})
        >>> [track.label for track in means.tracks], means.times.clock.tolist()[:2]
        (['a', 'b'], [0.0, 5.656854249492381])
    """
    return readings_along(part, track, time, count).in_blocks(spans.get(part.key.label))


def readings_along(
    part: Observations, track: object, time: object, count: int
) -> TrackObservations:
    """Observations along tracks, each in a block of its own: whole vectors, or numbers along
    directions.

    Args:
        part: observations of one group, with their rows `index` among those that the user gave.
        track: a label for each row, or one for all.
        time: (N,), increasing along every track; None for the length of the path.
        count: N, the number of rows.

    Raises:
        TypeError: times that are neither real numbers nor dates.
        ValueError: labels or times of another length, missing labels, times that repeat or run
            backwards, vectors with gaps, observations with weights.
    """
    if not (part.weight is None or part.key.known):
        raise ValueError(
            "expected one white noise for all readings of tracks, got variances=, which are "
            "relative; leave them out, or give the known variance of each reading as noise="
        )
    if not (part.pattern.complete or part.direction is not None):
        raise ValueError(
            f"expected whole vectors along tracks, got {len(part)} readings with components that "
            "are NaN; drop these readings, or give them as a chunk of their own without track, "
            "under another group"
        )
    names, which = labels_of_tracks(track, count)
    rows = part.index.cpu().numpy()
    order = np.argsort(which[rows], kind="stable")
    present, of_track, sizes = np.unique(
        which[rows][order], return_inverse=True, return_counts=True
    )
    names = [names[number] for number in present]
    index = torch.from_numpy(order).to(part.x.device)
    x, y = part.x[index], part.y[index]
    direction = None if part.direction is None else part.direction[index]
    if time is None:
        clock = _path(x.cpu().numpy(), of_track)
    else:
        clock = as_times(time, count)[rows][order]
        check_increasing(clock, of_track, names)
    clock = torch.from_numpy(clock).to(x)
    given = None if part.weight is None else 1 / part.weight[index]
    tracks = tracks_in_blocks(names, sizes.tolist(), x, y, clock, 0.0, direction, given)
    key = GroupKey(part.key.label, means_of(part.pattern))
    return TrackObservations(key, tracks, time is not None, 0.0)


def labels_of_tracks(track: object, count: int) -> tuple[list[str], Int[np.ndarray, "N"]]:
    """The different labels as text, and the number of that of every row.

    Raises:
        ValueError: labels of another length, or missing ones.
    """
    if is_single(track):
        track = np.full(count, track, dtype=None if isinstance(track, str) else object)
    labels = np.asarray(track.cpu() if isinstance(track, Tensor) else track)
    if labels.shape != (count,):
        raise ValueError(
            f"expected a track label for each of the {count} readings, got shape {labels.shape}; "
            "give one name or number for each, or one for all"
        )
    if labels.dtype.kind not in "biufU":
        labels = np.array([str(label) for label in labels.tolist()])
    names, which = np.unique(labels, return_inverse=True)
    names = [str(name) for name in names.tolist()]
    missing = are_missing(np.array(names)[which], track).sum()
    if missing:
        raise ValueError(
            f"expected a track label for each of the {count} readings, got {missing} missing "
            "ones; put readings without a track into chunks of their own, with another group="
        )
    return names, which


def _path(x: Float[np.ndarray, "N d"], of_track: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """The length of the path of its track up to every position."""
    steps = np.linalg.norm(np.diff(x, axis=0), axis=-1) * (np.diff(of_track) == 0)
    length = np.concatenate([[0.0], np.cumsum(steps)])
    return length - length[np.searchsorted(of_track, of_track)]


def check_repeated(parts: tuple[TrackObservations, ...]) -> None:
    """Raise ValueError where every track of a group has one reading only."""
    for part in parts:
        if all(len(track.x) == 1 for track in part.tracks):
            raise ValueError(
                f"expected tracks of several readings, got {len(part.tracks)} of one reading each, "
                "which tell nothing of noise along tracks; give the readings of one track one "
                "label, or leave out track="
            )


def joined(parts: Iterable[TrackObservations]) -> tuple[TrackObservations, ...]:
    """One piece for each group; readings of a track that come later are appended to it.

    Raises:
        ValueError: times and path lengths in one group, or times that run backwards.
    """
    groups: dict[GroupKey, TrackObservations] = {}
    for part in parts:
        held = groups.get(part.key)
        groups[part.key] = part if held is None else _appended(held, part)
    return tuple(groups.values())


def _appended(held: TrackObservations, new: TrackObservations) -> TrackObservations:
    if held.timed != new.timed:
        raise ValueError(
            "expected times for all tracks of a group or for none, got both; give time=, or put "
            "the others into a group of their own (group=)"
        )
    if (held.given is None) != (new.given is None):
        raise ValueError(
            "expected noise= for all tracks of a group or for none, got both; give noise=, or put "
            "the others into a group of their own (group=)"
        )
    tracks = {track.label: track for track in held.tracks}
    for track in new.tracks:
        before = tracks.get(track.label)
        tracks[track.label] = track if before is None else before.followed_by(track, held.timed)
    return replace(held, tracks=tuple(tracks.values()), span=held.span or new.span)
