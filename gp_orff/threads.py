"""Choose the number of threads of a call by a short measurement, and restore it afterwards.

While another process occupies a core, two threads of one parallel region may share the other core.
Each then spins for the other until the scheduler's next tick: a region of 0.1 ms takes 8 ms, and a
fit has thousands of regions. A single thread never waits. The load of a machine changes, so a
measurement is valid for a hundred times its own duration, and long calls use `update_threads`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gp_orff.settings import num_threads

# 1. The outermost call of this package on a thread chooses a number of threads and restores the old
#    one at its end; calls inside it use the same.
# 2. `_fastest` runs a small workload with 1, 2, 4, … threads and takes the largest number that is
#    at most 1.2 times slower than the best.
# 3. The measurement is remembered for a hundred times its duration.


_SECONDS = 0.03  # duration of a measurement on an idle machine
_VALIDITY = 100.0  # in durations of the measurement: measuring takes 1 % of the time at most
_TOLERANCE = 1.2  # more threads may be slower by this factor: large regions gain more from them


@dataclass
class Threads:
    """The numbers of threads that one call has used."""

    most: int  # the number outside the call; a measurement tries no more
    used: set[int] = field(default_factory=set)

    def choose(self) -> None:
        """Set the number of `gp_orff.settings.num_threads`, or else the fastest one measured."""
        number = num_threads.value() or _fastest(self.most)
        torch.set_num_threads(number)
        self.used.add(number)

    def __str__(self) -> str:
        low, high = min(self.used), max(self.used)
        count = f"{low} to {high}" if low < high else f"{high}"
        words = f"{count} thread{'s' * (high > 1)}"
        return f"{words} (the machine is busy: {self.most} were slower)" if self.busy else words

    @property
    def busy(self) -> bool:
        """Whether fewer were faster."""
        return num_threads.value() is None and min(self.used) < self.most


class _Calls(threading.local):
    outermost: Threads | None = None


@dataclass(frozen=True)
class _Measurement:
    number: int
    expires: float  # on the clock of time.perf_counter


_calls = _Calls()
measurements: dict[int, _Measurement] = {}


@contextmanager
def chosen_threads() -> Iterator[Threads]:
    """Choose the number of threads of a call, and restore it; a context manager and a decorator.

    A call inside another one uses the threads of the outer call.

    Example:
        >>> import torch
        >>> from gp_orff.threads import chosen_threads
        >>> before = torch.get_num_threads()
        >>> with chosen_threads() as threads:
        ...     torch.get_num_threads() == max(threads.used) <= before
        True
        >>> torch.get_num_threads() == before
        True
    """
    if _calls.outermost is not None:
        yield _calls.outermost
        return
    outside = torch.get_num_threads()
    _calls.outermost = threads = Threads(outside)
    try:
        threads.choose()
        yield threads
    finally:
        _calls.outermost = None
        torch.set_num_threads(outside)


def update_threads() -> None:
    """Inside a long call, choose the number again if the last measurement has expired."""
    if _calls.outermost is not None:
        _calls.outermost.choose()


def _fastest(most: int) -> int:
    """The fastest number of threads up to `most`; the last measurement while it is valid."""
    if most == 1:
        return 1
    last = measurements.get(most)
    if last is None or time.perf_counter() > last.expires:
        start = time.perf_counter()
        numbers = _numbers(most)
        mean_seconds(1, 0.0)  # the first run pays for initialisation
        seconds = {number: mean_seconds(number, _SECONDS / len(numbers)) for number in numbers}
        end = time.perf_counter()
        last = _Measurement(_best(seconds), end + _VALIDITY * (end - start))
        measurements[most] = last
    return last.number


def _numbers(most: int) -> list[int]:
    """1, 2, 4, … and `most`."""
    return [*(2**k for k in range((most - 1).bit_length())), most]


def _best(seconds: dict[int, float]) -> int:
    limit = _TOLERANCE * min(seconds.values())
    return max(number for number, duration in seconds.items() if duration <= limit)


def mean_seconds(number: int, budget: float) -> float:
    """Mean seconds of a workload with `number` threads, run for `budget` seconds, at least once."""
    torch.set_num_threads(number)
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < start + budget:
        _workload()
        count += 1
    return (time.perf_counter() - start) / count


def _workload() -> None:
    """Cosines at a few points, and their Gram matrix."""
    columns = torch.linspace(0, 9, 2**16, dtype=torch.float64).view(-1, 128).cos()
    columns.mT @ columns


@contextmanager
def fixed_threads(number: int | None) -> Iterator[None]:
    """Use `number` threads inside the block, and as many as before after it; None: no change."""
    if number is None:
        yield
        return
    outside = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(outside)
