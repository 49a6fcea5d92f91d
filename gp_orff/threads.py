"""Choose the number of threads of a fit by a short measurement. Later calls use the same number.

If another process occupies a core, two threads of one parallel region may share the other core.
Each of them then waits for the other until the next tick of the scheduler. A region of 0.1 ms takes
8 ms, and a fit has thousands of regions. A single thread never waits.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch
from threadpoolctl import ThreadpoolController

from gp_orff.settings import num_threads

# 1. A fit runs a small workload with 1, 2, 4, … threads. It chooses the largest number that is at
#    most 1.2 times slower than the best one. The old number is restored at the end of the fit.
# 2. The load of a machine changes. A later fit therefore measures again if the measurement is older
#    than a hundred times its duration.
# 3. Other calls do not measure, and use the number of the last fit.


_SECONDS = 0.03  # duration of a measurement on an idle machine
_VALIDITY = 100.0  # durations after which a measurement expires, so that it takes 1 % of the time
_TOLERANCE = 1.2  # largest ratio to the best time: large regions gain more from threads


@dataclass(frozen=True)
class Threads:
    """The number of threads of a call."""

    number: int
    most: int  # the number outside the call, and the largest one that is measured

    def __str__(self) -> str:
        words = f"{self.number} thread{'s' * (self.number > 1)}"
        return f"{words} (the machine is busy: {self.most} were slower)" if self.busy else words

    @property
    def busy(self) -> bool:
        """Whether fewer threads than `most` were faster."""
        return num_threads.value() is None and self.number < self.most


@dataclass(frozen=True)
class Measurement:
    """The fastest number of threads up to `most`. It expires at a time of `time.perf_counter`."""

    most: int
    number: int
    expires: float


last = Measurement(1, 1, 0.0)


@contextmanager
def chosen_threads(measure: bool = False) -> Iterator[Threads]:
    """Set the number of threads of a call, and restore it. Use it as a context manager or
    decorator.

    The number is the value of `gp_orff.settings.num_threads`. If this is None, it is the fastest
    number of the last fit, or the number outside the call if there was no fit.

    Args:
        measure: whether to measure the fastest number, as a fit does.

    Example:
        >>> import torch
        >>> from gp_orff.threads import chosen_threads
        >>> before = torch.get_num_threads()
        >>> with chosen_threads(measure=True) as threads:
        ...     torch.get_num_threads() == threads.number <= threads.most == before
        True
        >>> torch.get_num_threads() == before
        True
    """
    most = torch.get_num_threads()
    try:
        number = num_threads.value() or _fastest(most, measure)
    finally:
        torch.set_num_threads(most)
    with fixed_threads(number):
        yield Threads(number, most)


def _fastest(most: int, measure: bool) -> int:
    """The fastest number of threads up to `most`. Without `measure`, it is that of the last
    measurement."""
    global last
    current = last.most == most and time.perf_counter() < last.expires
    if measure and most > 1 and not current:
        start = time.perf_counter()
        numbers = _numbers(most)
        mean_seconds(1, 0.0)  # the first run includes initialisation
        seconds = {number: mean_seconds(number, _SECONDS / len(numbers)) for number in numbers}
        end = time.perf_counter()
        last = Measurement(most, _best(seconds), end + _VALIDITY * (end - start))
    return last.number if last.most == most else most


def _numbers(most: int) -> list[int]:
    """The numbers 1, 2, 4, … below `most`, and `most`."""
    return [*(2**k for k in range((most - 1).bit_length())), most]


def _best(seconds: dict[int, float]) -> int:
    limit = _TOLERANCE * min(seconds.values())
    return max(number for number, duration in seconds.items() if duration <= limit)


def mean_seconds(number: int, budget: float) -> float:
    """The mean time in seconds of a workload with `number` threads. It runs for `budget` seconds,
    at least once."""
    torch.set_num_threads(number)
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < start + budget:
        _workload()
        count += 1
    return (time.perf_counter() - start) / count


def _workload() -> None:
    """Compute cosines at a few points, and their Gram matrix."""
    columns = torch.linspace(0, 9, 2**16, dtype=torch.float64).view(-1, 128).cos()
    columns.mT @ columns


@contextmanager
def fixed_threads(number: int | None) -> Iterator[None]:
    """Use `number` threads of PyTorch inside the block, and at most as many of NumPy and SciPy.
    Restore the old numbers after it. None changes nothing."""
    if number is None:
        yield
        return
    outside = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        with blas.limited(number):
            yield
    finally:
        torch.set_num_threads(outside)


class Blas:
    """The libraries of linear algebra of NumPy and SciPy.

    Their numbers of threads are those of the process, while that of PyTorch belongs to a thread of
    Python. Of several calls at the same time, the first one sets the limit, and the last one
    restores the numbers.
    """

    def __init__(self):
        self._lock, self._calls, self._limit = Lock(), 0, None

    @contextmanager
    def limited(self, number: int) -> Iterator[None]:
        """Use at most `number` threads inside the block."""
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                libraries = _libraries()
                present = [library.num_threads for library in libraries.lib_controllers]
                self._limit = libraries.limit(limits=min([number, *present]))
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if self._calls == 0:
                    self._limit.restore_original_limits()


blas = Blas()


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController().select(user_api="blas")
