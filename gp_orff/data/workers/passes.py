"""Fold chunks into one sum, where the call says: `passes_on` and `fold`."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from gp_orff.data.workers.checkpoint import Checkpoint, Partial, digest_of
from gp_orff.data.workers.engines import Engine, Here, Task, checked, num_workers
from gp_orff.data.workers.told import Told
from gp_orff.data.workers.work import Failure, Outcome, Work

_TASKS = 8  # of each worker in a pass, if chunks are loaded there: the last ones end together
_MOST = 32  # chunks of a task
_SHARES = 2  # of each worker, of what is not in chunks

Kept = TypeVar("Kept")
Show = Callable[[int, int, int | None], None]
"""Shows how many chunks and points of a pass are done, and of how many chunks, if known."""


@dataclass(frozen=True)
class Passes:
    """How the passes of a call run: on which executor, and what becomes of failures."""

    executor: Any = Here()  # noqa: RUF009
    retries: int = 0
    checkpoint: Checkpoint | None = None
    told: set[Told] = field(default_factory=set)  # warnings of workers that were given here


class _Call(threading.local):
    passes: Passes = Passes()


_call = _Call()


@contextmanager
def passes_on(
    executor: object = None,
    retries: int = 2,
    checkpoint: object = None,
    identity: Callable[[], object] = str,
) -> Iterator[None]:
    """Inside the block, passes over chunks run on an executor; None: here.

    Args:
        executor: a `concurrent.futures.Executor`.
        retries: how often a task that fails is tried again.
        checkpoint: the path of a file for partial sums, deleted at the end of the block.
        identity: what the partial sums depend on beside the columns and the chunks.

    Raises:
        TypeError: something else as an executor.
        ValueError: negative `retries`, or a checkpoint of another model.
    """
    if executor is None and checkpoint is None:
        yield
        return
    if retries < 0:
        raise ValueError(f"expected retries >= 0, got {retries}")
    executor = Here() if executor is None else checked(executor)
    kept = None if checkpoint is None else Checkpoint.at(checkpoint, digest_of(identity()))
    before, _call.passes = _call.passes, Passes(executor, retries, kept)
    try:
        yield
    finally:
        _call.passes = before
    if kept is not None:
        kept.remove()


def silent(chunks: int, points: int, of: int | None) -> None:
    """Show no progress."""


def kept(compute: Callable[[], Kept]) -> Kept:
    """What `compute` returns, or what it returned in the interrupted call that is resumed.

    What passes of the checkpoint were made for is then the same to the last bit, also with another
    number of threads. Calls are told apart by their order. Without passes nothing is kept, since
    only their chunks tell whether the data are the same.
    """
    checkpoint = _call.passes.checkpoint
    return compute() if checkpoint is None else checkpoint.kept(compute)


def shares(values: Sequence) -> list[Sequence]:
    """Values in shares for the workers of this call; one share if it runs here."""
    executor = _call.passes.executor
    count = 1 if isinstance(executor, Here) else _SHARES * num_workers(executor)
    size = max(1, -(-len(values) // count))
    return [values[start : start + size] for start in range(0, len(values), size)]


def fold(work: Work, name: Callable[[], object], chunks: Iterable, show: Show = silent) -> Any:
    """The sum of what `work` makes of each chunk; None if there are no chunks.

    `name` gives what tells the work from others of the same call; only a checkpoint asks for it.
    """
    known = "" if _call.passes.checkpoint is None else digest_of(name())
    return Fold(_call.passes, work, known, chunks, show)()


@dataclass(frozen=True)
class Fold:
    """One pass over chunks. Sums are added in the order of the chunks, each counted once."""

    passes: Passes
    work: Work
    name: str
    chunks: Iterable
    show: Show

    def __call__(self) -> Any:
        engine = Engine(self.passes.executor, self.work)
        chunks, of = iter(self.chunks), len(self.chunks) if isinstance(self.chunks, Sized) else None
        done = self._resumed(chunks)
        self.show(done.chunks, done.points, of)
        tasks, pending = _tasks(chunks, done.chunks, of, engine), deque()
        try:
            while True:
                for task in islice(tasks, engine.window - len(pending)):
                    pending.append(task)
                    engine.submit(task)
                if not pending:
                    break
                outcome = self._outcome(engine, pending[0])
                done = self._with(done, pending.popleft(), outcome)
                self.show(done.chunks, done.points, of)
        except BaseException:
            for task in pending:
                if task.future is not None:
                    task.future.cancel()
            self._keep(done, soon=True)
            raise
        self._keep(done, soon=True)
        return done.value

    def _outcome(self, engine: Engine, task: Task) -> Outcome:
        """The sum of a task, which is tried again if it fails."""
        while isinstance(outcome := engine.outcome(task), Failure):
            task.failures += 1
            if task.failures > self.passes.retries:
                raise self._error(outcome, task)
            engine.submit(task)
        for told in outcome.told:
            if told not in self.passes.told:
                self.passes.told.add(told)
                told.again()
        return outcome

    def _error(self, failure: Failure, task: Task) -> Exception:
        """The error of a chunk, which names it unless the pass is here and not repeated."""
        error = failure.error
        if self.passes.retries == 0 and isinstance(self.passes.executor, Here):
            return error
        kinds = (ValueError, TypeError, NotImplementedError)
        kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        chunk = task.chunks[failure.number - task.start]
        name = f"chunk {failure.number}{f', {chunk!r},' if callable(chunk) else ''}"
        times = f"{task.failures} times, at last" if task.failures > 1 else "once,"
        found = kind(f"{name} failed {times} with {type(error).__name__}: {error}")
        found.__cause__ = RuntimeError(failure.story)
        return found

    def _with(self, done: Partial, task: Task, outcome: Outcome) -> Partial:
        """The partial sum with one more task."""
        value = outcome.value if done.value is None else done.value + outcome.value
        count, points = done.chunks + len(task.chunks), done.points + outcome.points
        new = replace(done, value=value, chunks=count, points=points)
        if self.passes.checkpoint is not None:
            for chunk in task.chunks:
                new = replace(new, digest=digest_of(chunk, new.digest))
        self._keep(new)
        return new

    def _keep(self, done: Partial, soon: bool = False) -> None:
        if self.passes.checkpoint is not None:
            self.passes.checkpoint.add(self.name, done, soon)

    def _resumed(self, chunks: Iterator) -> Partial:
        """The partial sum of the checkpoint, whose chunks are passed over."""
        checkpoint = self.passes.checkpoint
        known = Partial() if checkpoint is None else checkpoint.partials.get(self.name, Partial())
        digest, count = "", 0
        for chunk in islice(chunks, known.chunks):
            digest, count = digest_of(chunk, digest), count + 1
        if known.chunks:
            checkpoint.require(known, digest, count)
        return known


def _tasks(chunks: Iterator, start: int, of: int | None, engine: Engine) -> Iterator[Task]:
    """Consecutive chunks: one by one if they are data, more if they are loaded on the worker."""
    size = 1
    if of is not None and not engine.here:
        size = min(max(1, (of - start) // (_TASKS * engine.workers)), _MOST)
    for chunk in chunks:
        more: Sequence = list(islice(chunks, size - 1)) if callable(chunk) else []
        yield Task([chunk, *more], start)
        start += 1 + len(more)
