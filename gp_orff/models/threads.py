"""The number of threads of a call: chosen by a short measurement inside it, put back after it.

While another process holds a core, two threads of one parallel region may share the other: each
spins for the other one until the scheduler's next tick. A region of 0.1 ms takes 8 ms then, and a
fit has thousands. One thread waits for nobody. How busy a machine is changes, so a measurement
holds for a hundred times as long as it took, and long calls ask for it `again`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from gp_orff.settings import num_threads

_SECONDS = 0.03  # of a measurement, where nothing stalls
_HOLDS = 100.0  # times its own duration: 1 % of the time is spent on measurements at most
_WORTH = 1.2  # more threads may be that much slower: large regions gain more of them than small


@dataclass
class Threads:
    """Those of one call."""

    most: int  # outside the call
    used: set[int] = field(default_factory=set)

    def choose(self) -> None:
        """The number that was asked for, or else the one measured fastest."""
        number = num_threads.value() or _fastest(self.most)
        torch.set_num_threads(number)
        self.used.add(number)

    def __str__(self) -> str:
        low, high = min(self.used), max(self.used)
        count = f"{low} to {high}" if low < high else f"{high}"
        words = f"{count} thread{'s' * (high > 1)}"
        busy = num_threads.value() is None and low < self.most
        return f"{words} (the machine is busy: {self.most} were slower)" if busy else words


class _Calls(threading.local):
    outermost: Threads | None = None


@dataclass(frozen=True)
class _Measurement:
    number: int
    until: float


_calls = _Calls()
measurements: dict[int, _Measurement] = {}


@contextmanager
def chosen_threads() -> Iterator[Threads]:
    """The threads of a call, also as a decorator; one inside another uses those of the outer.

    Example:
        >>> import torch
        >>> from gp_orff.models.threads import chosen_threads
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
    _calls.outermost = own = Threads(outside)
    try:
        own.choose()
        yield own
    finally:
        _calls.outermost = None
        torch.set_num_threads(outside)


def again() -> None:
    """Inside a long call: choose anew, if the last measurement holds no longer."""
    if _calls.outermost is not None:
        _calls.outermost.choose()


def _fastest(most: int) -> int:
    if most == 1:
        return 1
    known = measurements.get(most)
    if known is None or time.perf_counter() > known.until:
        began = time.perf_counter()
        numbers = _numbers(most)
        measured(1, 0.0)  # what is made once
        seconds = {number: measured(number, _SECONDS / len(numbers)) for number in numbers}
        ended = time.perf_counter()
        known = _Measurement(_best(seconds), ended + _HOLDS * (ended - began))
        measurements[most] = known
    return known.number


def _numbers(most: int) -> list[int]:
    """1, 2, 4, … and all."""
    return [*(2**k for k in range((most - 1).bit_length())), most]


def _best(seconds: dict[int, float]) -> int:
    limit = _WORTH * min(seconds.values())
    return max(number for number, own in seconds.items() if own <= limit)


def measured(number: int, budget: float) -> float:
    """Mean seconds of a piece of work, stalls included; at least of one."""
    torch.set_num_threads(number)
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < began + budget:
        _work()
        count += 1
    return (time.perf_counter() - began) / count


def _work() -> None:
    """The waves of a few points, and their products."""
    waves = torch.linspace(0, 9, 2**16, dtype=torch.float64).view(-1, 128).cos()
    waves.mT @ waves
