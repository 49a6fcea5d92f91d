"""`kept_memory`: freed memory stays with a worker for the time of a task."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "MALLOC_TRIM_THRESHOLD_"  # Dask sets it for its workers
_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_DEFAULT = 128 * 2**10  # bytes, of the second
_MOST = 32 * 2**20  # bytes: the largest value of the second


@contextmanager
def kept_memory() -> Iterator[None]:
    """Inside the block, glibc keeps freed arrays of up to 32 MiB for the next ones.

    With `MALLOC_TRIM_THRESHOLD_` in the environment, glibc gives every freed array back to the
    system, and new ones come page by page: passes over data then take 15 to 40 % more CPU. Nothing
    changes without this variable, or without glibc.
    """
    set_option, before = _mallopt(), os.environ.get(_VARIABLE, "")
    if set_option is None or not before.isdigit():
        yield
        return
    set_option(_MAP, _MOST)
    set_option(_TRIM, 2 * _MOST)
    try:
        yield
    finally:
        set_option(_MAP, _DEFAULT)
        set_option(_TRIM, int(before))


def _mallopt() -> object:
    """The function of glibc; None if there is none."""
    try:
        return ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return None
