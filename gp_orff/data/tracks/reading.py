"""From track labels and times to block means."""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.data.tracks.blocks import Track, block_span
from gp_orff.data.tracks.observations import BlockMeans, TrackObservations
from gp_orff.data.validation import as_matrix, is_single


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
    """The block means of observations of whole vectors along tracks.

    Args:
        part: observations of one group, with their rows `index` among those that the user gave.
        track: a label for each row, or one for all.
        time: (N,), increasing along every track; None for the length of the path.
        count: N, the number of rows.
        spans: the time of a block, by the label of the group; chosen from the data without.

    Raises:
        TypeError: times that are not real numbers.
        ValueError: labels or times of another length, missing labels, times that repeat or run
            backwards, observations that are no whole vectors with one noise.

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
    if not part.pattern.complete or part.direction is not None or part.weight is not None:
        raise ValueError(
            "expected whole vectors with one noise along tracks, got missing components, "
            "directions= or variances=; drop readings with NaN, and leave out the arguments"
        )
    rows = part.index.cpu().numpy()
    names, which = np.unique(_labels(track, count)[rows], return_inverse=True)
    clock = None if time is None else _times(time, count)[rows]
    x, members = part.x.cpu().numpy(), [np.flatnonzero(which == i) for i in range(len(names))]
    clocks = [_path(x[m]) if clock is None else clock[m] for m in members]
    if clock is not None:
        for name, times in zip(names, clocks, strict=True):
            _check_increasing(str(name), times)
    values, label = part.y.cpu().numpy(), part.key.label
    span = spans.get(label)
    if span is None:
        pairs = zip(members, clocks, strict=True)
        span = block_span([(values[m], times) for m, times in pairs])
    tracks = []
    for name, member, times in zip(names, members, clocks, strict=True):
        index = torch.from_numpy(member).to(part.x.device)
        clock_of = torch.from_numpy(times).to(part.x)
        tracks.append(Track.of(str(name), part.x[index], part.y[index], clock_of, span))
    key = GroupKey(label, BlockMeans(part.pattern.columns, part.pattern.num_outputs))
    return TrackObservations(key, tuple(tracks), time is not None, span)


def _labels(track: object, count: int) -> np.ndarray:
    """The label of every row, as text."""
    if is_single(track):
        track = [track] * count
    labels = np.asarray(track.cpu() if isinstance(track, Tensor) else track)
    if labels.shape != (count,):
        raise ValueError(
            f"expected a track label for each of the {count} readings, got shape {labels.shape}"
        )
    missing = [label is None or label != label for label in labels.tolist()]  # NaN too
    if any(missing):
        raise ValueError(
            f"expected a track label for each of the {count} readings, got {sum(missing)} missing "
            "ones; put readings without a track into chunks of their own, with another group="
        )
    return np.array([str(label) for label in labels.tolist()])


def _times(time: object, count: int) -> Float[np.ndarray, "N"]:
    values = as_matrix(time, "times (N,)").detach().cpu().numpy()
    if values.shape != (count, 1):
        shape = values.shape[:1] if values.shape[-1] == 1 else values.shape
        raise ValueError(f"expected times of shape {(count,)}, got {shape}")
    if not np.isfinite(values).all():
        raise ValueError(
            f"expected finite times, got {int((~np.isfinite(values)).sum())} others; drop these "
            "readings"
        )
    return values[:, 0]


def _check_increasing(label: str, times: Float[np.ndarray, "n"]) -> None:
    steps = np.diff(times)
    if (steps <= 0).any():
        backward, equal = int((steps < 0).sum()), int((steps == 0).sum())
        place = int(np.flatnonzero(steps <= 0)[0])
        raise ValueError(
            f"expected times that increase along every track, got {equal} that repeat and "
            f"{backward} that run backwards on track {label!r}, first after {times[place]:.10g}; "
            "sort the readings by time, drop copies, or give each pass its own label"
        )


def _path(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n"]:
    """The length of the path up to every position."""
    steps = np.linalg.norm(np.diff(x, axis=0), axis=-1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def check_repeated(parts: tuple[TrackObservations, ...]) -> None:
    """Raise ValueError where every track of a group has one reading only."""
    for part in parts:
        if all(len(track.x) == 1 for track in part.tracks):
            raise ValueError(
                f"expected tracks of several readings, got {len(part.tracks)} of one reading each, "
                "which tell nothing of noise along tracks; give the readings of one track one "
                "label, or leave out track="
            )
