"""Where tasks run: in place, on threads, or in other processes."""

import os
import pickle
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from gp_orff.data.workers.work import Failure, Outcome, Work, do, do_packed
from gp_orff.settings import num_threads

_IN_FLIGHT = 2  # tasks for each worker, so that none waits for the next


class Here(Executor):
    """Runs what is submitted at once, in this thread."""

    def submit(self, function, /, *args, **kwargs) -> Future:
        future = Future()
        future.set_result(function(*args, **kwargs))
        return future


@dataclass
class Task:
    """Some consecutive chunks, and what becomes of them."""

    chunks: Sequence
    start: int  # the number of the first
    packed: bytes | None = None
    future: Future | None = None
    failures: int = 0


@dataclass(frozen=True)
class Engine:
    """An executor, and how it takes a piece of work."""

    executor: Executor
    work: Work

    @cached_property
    def workers(self) -> int:
        """The number of workers, as far as the executor tells."""
        return num_workers(self.executor)

    @property
    def here(self) -> bool:
        return isinstance(self.executor, Here)

    @property
    def window(self) -> int:
        """The most tasks in flight."""
        return 1 if self.here else _IN_FLIGHT * self.workers

    def submit(self, task: Task) -> None:
        """Start a task, or start it again.

        Raises:
            TypeError: work or chunks that cannot be pickled.
            RuntimeError: the executor runs no more.
        """
        arguments = task.chunks, task.start, self._threads
        if not self._shares_memory:
            if task.packed is None:
                task.packed = _pickled_chunks(task)
            arguments = task.packed, task.start, self._threads
        function, work = (do, self.work) if self._shares_memory else (do_packed, self._packed)
        try:
            task.future = self.executor.submit(function, work, *arguments)
        except BrokenExecutor as error:
            raise broken(error) from error
        except RuntimeError as error:
            raise RuntimeError(
                f"expected an executor that runs, got one that does not ({error}); make a new one, "
                "and call inside its `with` block"
            ) from error

    def outcome(self, task: Task) -> Outcome | Failure:
        """What became of a task; waits for it."""
        try:
            outcome = task.future.result()
        except BrokenExecutor as error:
            raise broken(error) from error
        except (Exception, CancelledError) as error:  # of the engine: a lost worker, for instance
            return Failure(task.start, error, repr(error))
        return pickle.loads(outcome) if isinstance(outcome, bytes) else outcome

    @property
    def _shares_memory(self) -> bool:
        return isinstance(self.executor, Here | ThreadPoolExecutor)

    @property
    def _threads(self) -> int | None:
        """Of each worker; None leaves them as they are."""
        if self.here:
            return None
        return num_threads.value() or max(1, (os.cpu_count() or 1) // self.workers)

    @cached_property
    def _packed(self) -> bytes:
        try:
            return pickle.dumps(self.work, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(
                f"expected a model that can be pickled for the workers, got {error}; define the "
                "classes and functions of its kernel and mean in a module"
            ) from error


def num_workers(executor: Executor) -> int:
    """The number of workers of an executor: of its pool, or of the cluster of a Dask client."""
    client = getattr(executor, "_client", None)
    if hasattr(client, "nthreads"):
        return max(1, sum(client.nthreads().values()))
    count = getattr(executor, "_max_workers", None) or getattr(executor, "num_workers", None)
    return max(1, count if isinstance(count, int) else os.cpu_count() or 1)


def checked(executor: object) -> Executor:
    """The executor; TypeError if it is none."""
    if isinstance(executor, Executor):
        return executor
    remedy = "concurrent.futures.ProcessPoolExecutor()"
    if hasattr(executor, "get_executor"):
        remedy = "client.get_executor()"
    raise TypeError(
        f"expected executor= as a concurrent.futures.Executor, got {type(executor).__name__}; "
        f"give {remedy}"
    )


def broken(error: Exception) -> RuntimeError:
    """What to say of a pool that has lost a process."""
    return RuntimeError(
        f"expected workers that live through the pass, got a broken pool ({error}): a process was "
        "killed, perhaps for its memory. Call again with a new pool; with checkpoint=path the "
        "chunks that are done need not be read again"
    )


def _pickled_chunks(task: Task) -> bytes:
    try:
        return pickle.dumps(list(task.chunks), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        for number, chunk in enumerate(task.chunks, task.start):
            try:
                pickle.dumps(chunk)
            except Exception as error:
                raise TypeError(
                    f"expected chunks that can be pickled for the workers, got chunk {number}, "
                    f"{chunk!r}: {error}; give functools.partial(load, path) with a function "
                    "`load` of a module, not a lambda, an open file or a local function"
                ) from error
        raise
