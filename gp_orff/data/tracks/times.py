"""Times along tracks, as numbers or as dates, in float64."""

import datetime

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.validation import as_matrix

_EPOCH, _SECOND = np.datetime64(0, "s"), np.timedelta64(1, "s")


def as_times(time: object, count: int) -> Float[np.ndarray, "N"]:
    """Times (N,): numbers as they are, dates as seconds since 1970, durations as seconds.

    Raises:
        TypeError: values that are neither numbers nor dates nor durations.
        ValueError: another length, or values that are not finite.

    Example:
        >>> import numpy
        >>> from gp_orff.data.tracks.times import as_times
        >>> as_times(numpy.array(["1970-01-01", "1970-01-02T00:00:00.5"], "datetime64[ms]"), 2)
        array([    0. , 86400.5])
    """
    seconds = None
    if not isinstance(time, Tensor):
        array = np.asarray(time)
        seconds = _seconds(array)
        if seconds is None and array.dtype.kind in "OSU":
            raise TypeError(
                f"expected times as numbers, dates or durations, got {type(time).__name__} of type "
                f"{array.dtype}; convert them, as pandas.to_datetime or numpy.asarray(time, float) "
                "do"
            )
    if seconds is not None and isinstance(time, np.ma.MaskedArray):
        seconds = np.where(time.mask, np.nan, seconds)
    values = as_matrix(time if seconds is None else seconds, "times (N,)").detach().cpu().numpy()
    if values.shape != (count, 1):
        shape = values.shape[:1] if values.shape[-1] == 1 else values.shape
        raise ValueError(
            f"expected times of shape {(count,)}, got {shape}; give one for each reading"
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"expected finite times, got {int((~np.isfinite(values)).sum())} others; drop these "
            "readings"
        )
    return values[:, 0]


def check_increasing(
    clock: Float[np.ndarray, "N"], of_track: Int[np.ndarray, "N"], names: list[str]
) -> None:
    """Raise ValueError unless times increase along every track; `of_track`: 0, 0, …, 1, …"""
    steps, same = np.diff(clock), np.diff(of_track) == 0
    wrong = np.flatnonzero(same & (steps <= 0))
    if len(wrong):
        track = of_track[wrong[0]]
        of_this = steps[wrong[of_track[wrong] == track]]
        raise ValueError(
            f"expected times that increase along every track, got {(of_this == 0).sum()} that "
            f"repeat and {(of_this < 0).sum()} that run backwards on track {names[track]!r}, first "
            f"after {clock[wrong[0]] + 0.0:.10g}; sort the readings by time, drop copies, give "
            "times in float64, or give each pass its own label"
        )


def _seconds(values: np.ndarray) -> Float[np.ndarray, "N"] | None:
    """Dates or durations in seconds; None for anything else. Times without a zone are UTC."""
    if values.dtype.kind == "O" and values.ndim == 1 and len(values):
        if all(isinstance(value, datetime.datetime) for value in values.tolist()):
            values = np.array([_utc(value) for value in values.tolist()], "datetime64[us]")
        elif all(isinstance(value, datetime.timedelta) for value in values.tolist()):
            values = values.astype("timedelta64[us]")
    if values.dtype.kind == "M":
        return (values - _EPOCH) / _SECOND
    return values / _SECOND if values.dtype.kind == "m" else None


def _utc(value: datetime.datetime) -> datetime.datetime:
    """The time in UTC, without its zone."""
    if value.tzinfo is None:
        return value
    return value.astimezone(datetime.timezone.utc).replace(tzinfo=None)
