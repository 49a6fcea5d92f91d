"""What is done with the chunks of a pass, in the process that does it."""

import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gp_orff.data.workers.memory import kept_memory
from gp_orff.data.workers.told import Told, heard_warnings
from gp_orff.threads import fixed_threads


def num_points(chunk: object) -> int:
    """The number of points of a chunk that is loaded."""
    return len(chunk["x"] if isinstance(chunk, Mapping) else chunk[0])


@dataclass(frozen=True)
class Work:
    """Reads chunks and summarises what they hold; values of different chunks add up."""

    read: Callable[[object], Iterable]  # a chunk, loaded, to its observations
    summary: Callable[[Iterable, int], Any]  # observations and the number of their chunk
    count: Callable[[object], int] = num_points  # of what a chunk holds

    def __call__(self, chunk: object, number: int) -> tuple[Any, int]:
        """The value of a chunk, and the number of its points."""
        chunk = loaded(chunk)
        value = self.summary(self.read(chunk), number)
        return value, self.count(chunk)


def loaded(chunk: object) -> object:
    """A chunk, which may be a callable without arguments that loads it."""
    if not callable(chunk):
        return chunk
    content = chunk()
    if content is None:
        raise TypeError(
            f"expected a chunk that returns (x, y) or a mapping when it is called, got nothing "
            f"from {chunk!r}: does it lack a return?"
        )
    return content


@dataclass(frozen=True)
class Outcome:
    """The sum over some chunks, and the number of their points."""

    value: Any
    points: int
    told: tuple[Told, ...] = ()  # the warnings, if they were given in another process


@dataclass(frozen=True)
class Failure:
    """The chunk that failed, and why."""

    number: int
    error: Exception
    story: str  # the traceback in the process where it happened


def do(work: Work, chunks: Sequence, start: int, threads: int | None) -> Outcome | Failure:
    """The sum over chunks, of which the first has the number `start`."""
    total, points, number = None, 0, start
    with fixed_threads(threads):
        try:
            for number, chunk in enumerate(chunks, start):
                value, count = work(chunk, number)
                total, points = value if total is None else total + value, points + count
        except Exception as error:
            return Failure(number, error, traceback.format_exc())
    return Outcome(total, points)


def do_packed(work: bytes, chunks: bytes, start: int, threads: int | None) -> bytes:
    """As `do`, in another process: pickles come and go, with warnings."""
    try:
        work, chunks = pickle.loads(work), pickle.loads(chunks)
        with kept_memory(), heard_warnings() as told:
            outcome = do(work, chunks, start, threads)
        if isinstance(outcome, Outcome):
            outcome = replace(outcome, told=tuple(told))
    except Exception as error:  # a module or a function that this process does not have
        outcome = Failure(start, error, traceback.format_exc())
    try:
        return pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        if not isinstance(outcome, Failure):
            raise
        error = RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")
        return pickle.dumps(Failure(outcome.number, error, outcome.story))
