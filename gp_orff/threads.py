"""Choose the number of threads of a fit by a short measurement, which later calls use as well.

While another process occupies a core, two threads of one parallel region may share the other core.
Each then spins for the other until the scheduler's next tick: a region of 0.1 ms takes 8 ms, and a
fit has thousands of regions. A single thread never waits.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gp_orff.settings import num_threads

# 1. A fit runs a small workload with 1, 2, 4, … threads and takes the largest number that is at
#    most 1.2 times slower than the best. The old number is restored at its end.
# 2. The load of a machine changes: a later fit measures again if the measurement is older than a
#    hundred times its duration.
# 3. Other calls measure nothing and use the number of the last fit.


_SECONDS = 0.03  # duration of a measurement on an idle machine
_VALIDITY = 100.0  # in durations of the measurement: measuring takes 1 % of the time at most
_TOLERANCE = 1.2  # more threads may be slower by this factor: large regions gain more from them


@dataclass(frozen=True)
class Threads:
    """The number of threads of a call."""

    number: int
    most: int  # the number outside the call; a measurement tries no more

    def __str__(self) -> str:
        words = f"{self.number} thread{'s' * (self.number > 1)}"
        return f"{words} (the machine is busy: {self.most} were slower)" if self.busy else words

    @property
    def busy(self) -> bool:
        """Whether fewer were faster."""
        return num_threads.value() is None and self.number < self.most


@dataclass(frozen=True)
class Measurement:
    """The fastest number of threads of `most`, until the clock `time.perf_counter` expires it."""

    most: int
    number: int
    expires: float


last = Measurement(1, 1, 0.0)


@contextmanager
def chosen_threads(measure: bool = False) -> Iterator[Threads]:
    """Set the number of threads of a call, and restore it; a context manager and a decorator.

    It is the value of `gp_orff.settings.num_threads`, or else what was fastest in the last fit, or
    as many as outside if there was none.

    Args:
        measure: whether to measure which number is the fastest, as fits do.

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
    with fixed_threads(most):
        number = num_threads.value() or _fastest(most, measure)
        torch.set_num_threads(number)
        yield Threads(number, most)


def _fastest(most: int, measure: bool) -> int:
    """The fastest number of threads up to `most`; the last one unless it is to be measured."""
    global last
    current = last.most == most and time.perf_counter() < last.expires
    if measure and most > 1 and not current:
        start = time.perf_counter()
        numbers = _numbers(most)
        mean_seconds(1, 0.0)  # the first run pays for initialisation
        seconds = {number: mean_seconds(number, _SECONDS / len(numbers)) for number in numbers}
        end = time.perf_counter()
        last = Measurement(most, _best(seconds), end + _VALIDITY * (end - start))
    return last.number if last.most == most else most


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
