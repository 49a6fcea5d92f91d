"""Passes over chunks of data, here or on the workers of an executor.

    chunks  ->  tasks of a few chunks  ->  workers  ->  one sum, in the order of the chunks

`Work` is what is done with a chunk, `passes_on` says where, and `fold` does it.
"""

import ctypes
import hashlib
import inspect
import os
import pickle
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, partial, wraps
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gp_orff.data.statistics import write_whole
from gp_orff.settings import num_threads
from gp_orff.threads import fixed_threads

# Partial sums of passes, and results between them, in a file: interrupted calls go on there.
#
# A call may make several passes over the data, with computations between them. The file keeps both.
#
# 1. `Checkpoint.at` reads the file. Its identity covers the model, the method and the options, so
#    that a sum is never continued under other hyperparameters.
# 2. Every pass has a name, the digest of what it sums up. Under this name the file keeps the sum
#    over the first chunks, their number, and a digest chained over these chunks.
# 3. When the call is repeated, the pass skips so many chunks, but digests them again: the sum
#    counts only if they are the same ones in the same order (`require`).
# 4. `kept` stores the results of computations between passes, since a pass depends on them to the
#    last bit, which another number of threads may change. They are numbered in the order of the
#    call.
# 5. The file is written again so seldom that this takes 5 % of the time, and always at the end of a
#    pass or at an error.


_SHARE = 0.05  # of the time of a pass that writing may take
_FORMAT = "gp_orff.checkpoint 2"


@dataclass(frozen=True)
class Partial:
    """The sum over the first chunks of a pass."""

    value: Any = None
    chunks: int = 0
    points: int = 0
    digest: str = ""  # of these chunks


@dataclass
class Checkpoint:
    """A file with the partial sums of the passes of one call, by what they sum up, and with results
    of computations between passes, by their order.

    It is a pickle: open only what you have written yourself.
    """

    path: Path
    identity: str  # of the model and the options of the call
    partials: dict[str, Partial] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    computations: int = 0  # of this call so far
    due: float = 0.0

    @classmethod
    def at(cls, path: str | os.PathLike, identity: str) -> "Checkpoint":
        """What the file holds; nothing if there is none yet.

        Raises:
            ValueError: a file that is damaged, or of another model.
        """
        path = Path(path)
        if not path.exists():
            return cls(path, identity)
        try:
            kind, known, *content = pickle.loads(path.read_bytes())
        except Exception as error:
            raise ValueError(f"{path} is damaged, or is no checkpoint of gp_orff") from error
        if kind != _FORMAT:
            raise ValueError(f"expected {path} as a {_FORMAT}, got {kind!r}")
        if known != identity:
            raise ValueError(
                f"expected a checkpoint of this model, with these hyperparameters and options, got "
                f"that of another in {path}; delete the file, or give another path"
            )
        return cls(path, identity, *content)

    def add(self, work: str, partial: Partial, soon: bool = False) -> None:
        """Keep a partial sum; in the file if `soon`, or if the last writing is long ago."""
        self.partials[work] = partial
        self._write(soon)

    def kept(self, compute: Callable[[], Any]) -> Any:
        """What `compute` returns, or what the same computation returned before; see `passes`."""
        number, self.computations = self.computations, self.computations + 1
        if not self.partials:
            return compute()
        if number not in self.results:
            self.results[number] = compute()
            self._write()
        return self.results[number]

    def _write(self, soon: bool = False) -> None:
        start = time.perf_counter()
        if not soon and start < self.due:
            return
        # `write_whole` replaces the file at once, so that a process that dies while writing leaves
        # the old one. The time of a writing determines when the next one is due.
        content = pickle.dumps((_FORMAT, self.identity, self.partials, self.results))
        write_whole(self.path, lambda file: file.write(content))
        end = time.perf_counter()
        self.due = end + (end - start) / _SHARE

    def remove(self) -> None:
        """Delete the file: the call has succeeded."""
        self.path.unlink(missing_ok=True)

    def require(self, known: Partial, digest: str, chunks: int) -> None:
        """Raise ValueError unless the chunks of a partial sum come again."""
        if (digest, chunks) != (known.digest, known.chunks):
            raise ValueError(
                f"expected the data of the checkpoint {self.path}, whose first {known.chunks} "
                f"chunks are done, got {'fewer' if chunks < known.chunks else 'other'} chunks; "
                "delete the file, or give another path"
            )


def digest_of(value: object, before: str = "") -> str:
    """A digest of a tree of arrays, plain values and callables, after another one."""
    digest = hashlib.sha256(before.encode())
    for part in _serialize(value):
        digest.update(part)
    return digest.hexdigest()


def _serialize(value: object) -> Iterator[bytes]:
    """Bytes that are the same in another process, which pickles need not be."""
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        # Type and shape are part of the digest: equal bytes may mean different arrays.
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, Mapping):
        yield from _serialize([*map(str, value), *value.values()])
    elif isinstance(value, list | tuple | np.ndarray):
        yield f"{len(value)}".encode()
        for item in value:
            yield from _serialize(item)
    elif hasattr(value, "__dask_tokenize__"):
        yield _token(value)
    elif is_dataclass(value) and not isinstance(value, type):
        own = [getattr(value, part.name) for part in fields(value)]
        yield from _serialize([type(value).__qualname__, *own])
    elif isinstance(value, partial):
        yield from _serialize([value.func, value.args, value.keywords])
    elif isinstance(value, MethodType):
        yield from _serialize([value.__func__, value.__self__])
    elif callable(value) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}".encode()
    else:
        yield pickle.dumps(value) if callable(value) else repr(value).encode()


def _token(value: object) -> bytes:
    """What Dask calls a collection by, which does not change with the process."""
    return import_module("dask.base").tokenize(value).encode()


# `kept_memory`: freed memory stays with a worker for the time of a task.
#
# glibc takes arrays above a threshold directly from the system (`M_MMAP_THRESHOLD`) and returns the
# top of its heap above another one (`M_TRIM_THRESHOLD`). It raises both by itself as a process
# frees larger arrays, but setting either of them, as Dask does for its workers, disables this. The
# thresholds are set here to the values that glibc would reach, and restored afterwards.


_VARIABLE = "MALLOC_TRIM_THRESHOLD_"  # Dask sets it for its workers
_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_DEFAULT = 128 * 2**10  # bytes, of the second
_MOST_MAPPED = 32 * 2**20  # bytes: the largest value of the second


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
    set_option(_MAP, _MOST_MAPPED)
    set_option(_TRIM, 2 * _MOST_MAPPED)
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


# Warnings of tasks in other processes, which reach the caller.
#
# A worker records the warnings of a task with the line that gave them and returns them with the
# sum. The caller repeats each one once per call, under its own filters. Several tasks may run as
# threads of one worker process, where filters are shared: the first one installs `_hear`, the last
# one removes it, and a thread-local dict separates the warnings of the tasks.


@dataclass(frozen=True)
class Told:
    """A warning, and the line that gave it."""

    text: str
    category: type[Warning]
    file: str
    line: int

    def again(self) -> None:
        """Give the warning in this process, whose filters say what becomes of it."""
        warnings.warn_explicit(self.text, self.category, self.file, self.line)


class _Heard(threading.local):
    """The warnings of the task of this thread."""

    told: dict[Told, None] | None = None


_heard = _Heard()
_lock = threading.Lock()
_recorded_tasks, _before = 0, warnings.catch_warnings()


@contextmanager
def heard_warnings() -> Iterator[dict[Told, None]]:
    """Inside the block, warnings of this thread are the keys of a dict, each once.

    Filters are those of a process: the first of several threads sets them, the last restores them.
    """
    global _recorded_tasks, _before
    with _lock:
        if not _recorded_tasks:
            _before = warnings.catch_warnings()
            # The worker must not drop warnings: the filters of the caller decide.
            _before.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = _hear
        _recorded_tasks += 1
    _heard.told = {}
    try:
        yield _heard.told
    finally:
        _heard.told = None
        with _lock:
            _recorded_tasks -= 1
            if not _recorded_tasks:
                _before.__exit__(None, None, None)


def _hear(message, category, filename, lineno, file=None, line=None) -> None:
    """In the place of `warnings.showwarning`; what other threads say is dropped."""
    if _heard.told is not None:
        _heard.told[Told(str(message), _known(category), filename, lineno)] = None


def _known(category: type[Warning]) -> type[Warning]:
    """The category if it can be sent to the caller, else a `UserWarning`."""
    try:
        pickle.dumps(category)
    except Exception:
        return UserWarning
    return category


# What is done with the chunks of a pass, in the process that does it.
#
# `do` never raises an `Exception`: it returns a `Failure` with the number of the chunk and the text
# of the traceback, which survives pickling. `do_packed` is its form for other processes. It
# receives pickles as bytes, since an executor would report an error of unpickling without naming
# the chunk.


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
        with naming(chunk, number):
            content = loaded(chunk)
            return self.summary(self.read(content), number), self.count(content)


@contextmanager
def naming(chunk: object, number: int) -> Iterator[None]:
    """Errors inside the block name the chunk, by what it prints as if it is loaded where it is
    used."""
    try:
        yield
    except Exception as error:
        name = f"in chunk {number}{f', {chunk!r}' if callable(chunk) else ''}"
        if hasattr(error, "add_note"):
            error.add_note(name)
        elif error.args and isinstance(error.args[0], str):  # before Python 3.11
            error.args = (f"{error.args[0]} ({name})", *error.args[1:])
        raise


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
        # An exception of a third-party class may not be picklable; its text always is.
        error = RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}")
        return pickle.dumps(Failure(outcome.number, error, outcome.story))


# Where tasks run: in place, on threads, or in other processes.
#
# `Engine` hides the difference. In place and on threads, work and chunks are passed as they are.
# For other processes both are pickled once: the work for the whole pass, a task when it is first
# submitted, so that a retry sends the same bytes. Unless the user has set the number of threads,
# the cores are divided among the workers.


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


# Fold chunks into one sum, where the call says: `passes_on` and `fold`.
#
# 1. `passes_on` stores executor, retries and checkpoint of a call in a thread-local variable, so
#    that the functions between the method of a model and its passes need no further arguments.
# 2. `_resumed` takes the partial sum of the checkpoint and skips its chunks.
# 3. `_tasks` groups the other chunks. A chunk that is already data is a separate task, because it
#    has to be sent. Chunks that are loaded by the worker are grouped, so that each worker has about
#    eight tasks in a pass: few enough to keep the overhead small, and enough for all to end
#    together.
# 4. At most two tasks per worker are in flight. This bounds the memory of chunks and of sums that
#    wait, and a worker that finishes always has a next task.
# 5. The oldest task is awaited and added first, even if later ones are done. The order of additions
#    is thus that of the chunks, and the sum is the same to the last bit for any executor.
# 6. A task that fails is submitted again while the others run, up to `retries` times. Its sum is
#    added only when all of its chunks have succeeded, hence no chunk counts twice. A broken pool
#    ends the pass, since it accepts no more tasks.
# 7. At any error, also an interrupt, the tasks in flight are cancelled and the partial sum is
#    written.


_TASKS = 8  # of each worker in a pass, if chunks are loaded there: the last ones end together
_MOST_CHUNKS = 32  # chunks of a task
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
                    # The task is queued before it is submitted, so that the handler below sees all
                    # that may run.
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
            # Each digest covers the one before: the digest of n chunks also fixes their order.
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
        size = min(max(1, (of - start) // (_TASKS * engine.workers)), _MOST_CHUNKS)
    for chunk in chunks:
        more: Sequence = list(islice(chunks, size - 1)) if callable(chunk) else []
        yield Task([chunk, *more], start)
        start += 1 + len(more)


# `on_workers`: methods of a model whose passes over chunks run on an executor.


_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ADDED = [
    inspect.Parameter("executor", _KEYWORD, default=None, annotation=object),
    inspect.Parameter("retries", _KEYWORD, default=2, annotation=int),
    inspect.Parameter("checkpoint", _KEYWORD, default=None, annotation=object),
]


def on_workers(method: Callable) -> Callable:
    """A method with further arguments `executor`, `retries` and `checkpoint`, as for `passes_on`.

    They hold for this call; the model keeps none of them.
    """

    @wraps(method)
    def call(
        self: torch.nn.Module,
        *arguments: object,
        executor: object = None,
        retries: int = 2,
        checkpoint: object = None,
        **options: object,
    ) -> object:
        def identity() -> object:
            named = {name: value for name, value in options.items() if name != "progress"}
            return [method.__name__, named, str(self), dict(self.state_dict())]

        with passes_on(executor, retries, checkpoint, identity):
            return method(self, *arguments, **options)

    signature = inspect.signature(method)
    given = list(signature.parameters.values())
    last = [given.pop()] if given[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    call.__signature__ = signature.replace(parameters=[*given, *_ADDED, *last])
    return call
