"""Measurements of seconds and bytes."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

Clock = Callable[[], float]  # of the wall, or `time.process_time`: of all threads together


def seconds(function: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    start = clock()
    function()
    return clock() - start


def interleaved(
    functions: Sequence[Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> list[list[float]]:
    """Return the seconds of several functions, which are called in turn after one call of each to
    warm up."""
    for function in functions:
        function()
    times = [[seconds(function, clock) for function in functions] for _ in range(rounds)]
    return [list(own) for own in zip(*times, strict=True)]


def median_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


class PeakMemory:
    """Measure the largest growth of the memory of the process in a `with` block, in MiB (Linux
    only).

    Example:
        >>> with PeakMemory() as memory:
        ...     work()
        >>> memory.mib
    """

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        with suppress(OSError, AttributeError):  # other C libraries
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what freed blocks still occupy
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.mib = _status("VmHWM") - self._before


def _status(key: str) -> float:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key)) / 1024
