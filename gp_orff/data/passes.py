"""Passes over chunks of data, here or on the workers of an executor.

    chunks  ->  tasks of a few chunks  ->  workers  ->  one sum, in the order of the chunks

`Work` reads and summarises a chunk, `passes_on` sets the executor of a call, and `fold` runs a
pass.
"""

import hashlib
import inspect
import os
import pickle
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, singledispatch, wraps
from importlib import import_module
from itertools import islice
from operator import length_hint
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gp_orff.data.statistics import write_whole
from gp_orff.data.validation import entries_of
from gp_orff.settings import num_threads
from gp_orff.symbols.base import required
from gp_orff.threads import fixed_threads

# Partial sums of passes, and results between passes, in a file from which an interrupted call
# continues.
#
# A call may make several passes over the data, with computations between them. The file contains
# both.
#
# 1. `Checkpoint.at` reads the file. Its identity covers the model, the method and the options, so
#    that a sum is never continued with other hyperparameters.
# 2. Each pass has a name: the digest of its work. Under this name, the file has the sum over the
#    first chunks, their number, and a digest over these chunks.
# 3. If the call is repeated, the pass skips these chunks, but computes their digest again. The sum
#    is used only if they are the same chunks in the same order (`resumed`).
# 4. `kept` stores the results of computations between passes, in the order of the call. A pass
#    depends on them to the last bit, which another number of threads may change.
# 5. The file is written so rarely that this takes 5 % of the time, and always at the end of a pass
#    and at an error.


_SHARE = 0.05  # largest share of the time of a pass for writing the file
_FORMAT = "gp_orff.checkpoint 2"


@dataclass(frozen=True)
class Partial:
    """The sum over the first chunks of a pass."""

    value: Any = None
    chunks: int = 0
    points: int = 0
    digest: str = ""  # the digest of these chunks


@dataclass
class Checkpoint:
    """A file with the partial sums of the passes of one call, and with the results of computations
    between passes.

    It is a pickle, so open only files that you have written.
    """

    path: Path
    identity: str  # a digest of the model and the options of the call
    partials: dict[str, Partial] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    computations: int = 0  # the number of computations of this call so far
    due: float = 0.0

    @classmethod
    def at(cls, path: str | os.PathLike, identity: str) -> "Checkpoint":
        """The checkpoint in the file; an empty one if the file does not exist.

        Raises:
            ValueError: The file is damaged, or belongs to another model.
        """
        path = Path(path)
        if not path.exists():
            return cls(path, identity)
        try:
            kind, known, *content = pickle.loads(path.read_bytes())
        except Exception as error:
            raise ValueError(
                f"{path} is damaged, or is not a checkpoint of gp_orff; delete it, or give another "
                "path"
            ) from error
        if kind != _FORMAT:
            raise ValueError(f"expected {path} as a {_FORMAT}, got {kind!r}")
        if known != identity:
            raise ValueError(
                f"expected a checkpoint of this model, with these hyperparameters and options, got "
                f"one of another model or call in {path}; delete the file, or give another path"
            )
        return cls(path, identity, *content)

    def resumed(self, work: str, chunks: Iterator) -> Partial:
        """The partial sum of a pass. The chunks of the sum are skipped.

        Raises:
            ValueError: The sum was made from other chunks.
        """
        known, digest, count = self.partials.get(work, Partial()), "", 0
        for chunk in islice(chunks, known.chunks):
            digest, count = digest_of(chunk, digest), count + 1
        if (digest, count) != (known.digest, known.chunks):
            raise ValueError(
                f"expected the data of the checkpoint {self.path}, whose first {known.chunks} "
                f"chunks are done, got {'fewer' if count < known.chunks else 'other'} chunks; "
                "delete the file, or give another path"
            )
        return known

    def add(self, work: str, partial: Partial, chunks: Sequence) -> None:
        """Store a partial sum, to which `chunks` were added."""
        digest = self.partials.get(work, Partial()).digest
        for chunk in chunks:  # each digest includes the one before, so the order matters
            digest = digest_of(chunk, digest)
        self.partials[work] = replace(partial, digest=digest)
        self.write()

    def kept(self, compute: Callable[[], Any]) -> Any:
        """The result of `compute`, or of the same computation in the interrupted call."""
        number, self.computations = self.computations, self.computations + 1
        if not self.partials:
            return compute()
        if number not in self.results:
            self.results[number] = compute()
            self.write()
        return self.results[number]

    def write(self, soon: bool = False) -> None:
        """Write the file if `soon`, or if enough time has passed since it was written."""
        start = time.perf_counter()
        if not soon and start < self.due:
            return
        # `write_whole` replaces the file at once, so that the old file remains if the process dies.
        # The time for writing determines when the file is written next.
        content = pickle.dumps((_FORMAT, self.identity, self.partials, self.results))
        write_whole(self.path, lambda file: file.write(content))
        end = time.perf_counter()
        self.due = end + (end - start) / _SHARE

    def remove(self) -> None:
        """Delete the file, after the call has succeeded."""
        self.path.unlink(missing_ok=True)


def digest_of(value: object, before: str = "") -> str:
    """A digest of a tree of arrays, plain values and callables, which includes the digest
    `before`."""
    digest = hashlib.sha256(before.encode())
    for part in _serialize(value):
        digest.update(part)
    return digest.hexdigest()


@singledispatch
def _serialize(value: object) -> Iterator[bytes]:
    """Bytes of a value that are equal in all processes, in contrast to pickles."""
    if hasattr(value, "__dask_tokenize__"):
        # The name of a Dask collection does not depend on the process.
        yield import_module("dask.base").tokenize(value).encode()
    elif is_dataclass(value) and not isinstance(value, type):
        own = [getattr(value, part.name) for part in fields(value)]
        yield from _serialize([type(value).__qualname__, *own])
    elif callable(value) and hasattr(value, "__qualname__"):
        yield f"{value.__module__}.{value.__qualname__}".encode()
    else:
        yield pickle.dumps(value) if callable(value) else repr(value).encode()


@_serialize.register
def _(value: Tensor) -> Iterator[bytes]:
    yield from _serialize(value.detach().cpu().numpy())


@_serialize.register
def _(value: np.ndarray) -> Iterator[bytes]:
    if value.dtype == object:
        yield from _serialize(list(value))
    else:
        # Type and shape are part of the digest, because equal bytes may be different arrays.
        yield f"{value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()


@_serialize.register
def _(value: Mapping) -> Iterator[bytes]:
    yield from _serialize([*map(str, value), *value.values()])


@_serialize.register(list)
@_serialize.register(tuple)
def _(value: Sequence) -> Iterator[bytes]:
    yield f"{len(value)}".encode()
    for item in value:
        yield from _serialize(item)


@_serialize.register
def _(value: partial) -> Iterator[bytes]:
    yield from _serialize([value.func, value.args, value.keywords])


@_serialize.register
def _(value: MethodType) -> Iterator[bytes]:
    yield from _serialize([value.__func__, value.__self__])


# Warnings of tasks in other processes, which reach the caller.
#
# A worker records the warnings of a task, each once, as the arguments of `warnings.warn_explicit`,
# and returns them with the sum. The caller gives each warning once per call, with its filters.
# Several tasks may run as threads of one worker process with common filters. The first thread
# installs `_record`, and the last one removes it. A context variable separates their warnings.


_recorded = ContextVar("recorded", default=None)  # the warnings of the task of this thread
_lock = threading.Lock()
_recorded_tasks, _before = 0, warnings.catch_warnings()


@contextmanager
def recorded_warnings() -> Iterator[dict[tuple, None]]:
    """Record the warnings of this thread in the `with` block, as the keys of a dict.

    A key contains the text, the category, the file and the line. Filters of warnings belong to the
    process. The first of several threads therefore sets them, and the last one restores them.
    """
    global _recorded_tasks, _before
    with _lock:
        if not _recorded_tasks:
            _before = warnings.catch_warnings()
            # The worker must not drop warnings: the filters of the caller decide.
            _before.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = _record
        _recorded_tasks += 1
    before = _recorded.set({})
    try:
        yield _recorded.get()
    finally:
        _recorded.reset(before)
        with _lock:
            _recorded_tasks -= 1
            if not _recorded_tasks:
                _before.__exit__(None, None, None)


def _record(message, category, filename, lineno, file=None, line=None) -> None:
    """Replace `warnings.showwarning` in a `with` block. Warnings of other threads are dropped."""
    recorded = _recorded.get()
    if recorded is not None:
        try:
            pickle.dumps(category)
        except Exception:  # a class that cannot be sent to the caller
            category = UserWarning
        recorded[str(message), category, filename, lineno] = None


# The work on the chunks of a task, in the process that does it.
#
# `Job` computes the sum over the chunks of a task, and tries a chunk again if it fails. The last
# error is raised with the index of the chunk. Its class can be pickled, and its cause has the text
# of the traceback. `_packed_job` is the job for other processes.


def num_points(chunk: object) -> int:
    """The number of points of a loaded chunk."""
    return len(entries_of(chunk)["x"])


@dataclass(frozen=True)
class Work:
    """An object that summarises a chunk. The summaries of different chunks are added."""

    read: Callable[[object], Iterable]  # returns the observations of a loaded chunk
    summary: Callable[[Iterable, int], Any]  # maps observations and the index of their chunk
    count: Callable[[object], int] = num_points  # returns the number of points of a chunk

    def __call__(self, chunk: object, number: int) -> tuple[Any, int]:
        """The value of a chunk, and the number of its points."""
        with naming(chunk, number):
            content = loaded(chunk)
            return self.summary(self.read(content), number), self.count(content)


@contextmanager
def naming(chunk: object, number: int) -> Iterator[None]:
    """Add the index of the chunk to the message of an error in the `with` block.

    If the chunk is a callable, its text is added too.
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"in chunk {number}{f', {chunk!r}' if callable(chunk) else ''}")
        raise


def loaded(chunk: object) -> object:
    """A chunk, which may be a callable without arguments that loads it."""
    if not callable(chunk):
        return chunk
    content = chunk()
    if content is None:
        raise TypeError(
            f"expected a chunk that returns (x, y) or a mapping when it is called, got None from "
            f"{chunk!r}; check that the function has a return statement"
        )
    return content


@dataclass(frozen=True)
class Task:
    """Some consecutive chunks. The first one has the index `start`."""

    chunks: Sequence
    start: int


@dataclass(frozen=True)
class Outcome:
    """The sum over the chunks of a task, and the number of their points."""

    value: Any
    points: int
    warned: tuple[tuple, ...] = ()  # arguments of `warnings.warn_explicit` from another process


@dataclass(frozen=True)
class Job:
    """The work on each task of a pass."""

    work: Work
    retries: int = 0  # number of further attempts for each chunk
    threads: int | None = None  # None does not change the number of threads
    names_chunks: bool = True  # if False, errors are raised unchanged, without retries

    def __call__(self, task: Task) -> Outcome:
        total, points = None, 0
        with fixed_threads(self.threads):
            for number, chunk in enumerate(task.chunks, task.start):
                value, count = self._tried(chunk, number)
                total, points = value if total is None else total + value, points + count
        return Outcome(total, points)

    def _tried(self, chunk: object, number: int) -> tuple[Any, int]:
        """Return the value of a chunk and the number of its points. The chunk may be a pickle.
        Failed attempts are repeated."""
        for _ in range(self.retries + 1):
            try:
                chunk = pickle.loads(chunk) if isinstance(chunk, bytes) else chunk
                return self.work(chunk, number)
            except Exception as error:
                if not self.names_chunks:
                    raise
                failure, story = error, traceback.format_exc()
        kinds = (ValueError, TypeError, NotImplementedError)
        kind = next((kind for kind in kinds if isinstance(failure, kind)), RuntimeError)
        name = f"chunk {number}{f', {chunk!r},' if callable(chunk) else ''}"
        times = f"{self.retries + 1} times, at last" if self.retries else "once,"
        text = f"{name} failed {times} with {type(failure).__name__}: {failure}"
        raise kind(text) from RuntimeError(story)


# A job is pickled once for a pass. Chunks and outcomes are pickled too. An executor would pickle
# tensors as files that are shared between processes, and a chunk that cannot be unpickled would
# break its pool.


def _packed(value: object, what: str, got: str, remedy: str) -> bytes:
    """A pickle for other processes.

    Raises:
        TypeError: The value cannot be pickled.
    """
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"expected {what} that can be pickled for the workers, got {got}{error}; {remedy}"
        ) from error


def _packed_job(job: Job) -> Callable[[Task], bytes]:
    remedy = "define the classes and functions of its kernel and mean in a module"
    return partial(_unpacked, _packed(job, "a model", "", remedy))


def _unpacked(job: bytes, task: Task) -> bytes:
    """The outcome of a packed job, as a pickle."""
    with recorded_warnings() as recorded:
        outcome = pickle.loads(job)(task)
    return pickle.dumps(replace(outcome, warned=tuple(recorded)), pickle.HIGHEST_PROTOCOL)


def _packed_task(task: Task) -> Task:
    remedy = (
        "give functools.partial(load, path) with a function `load` of a module, not a lambda, an "
        "open file or a local function"
    )
    chunks = [
        _packed(chunk, "chunks", f"chunk {number}, {chunk!r}: ", remedy)
        for number, chunk in enumerate(task.chunks, task.start)
    ]
    return replace(task, chunks=chunks)


# Any executor: an ordered map over it, and the number of its workers.


def ordered_map(
    submit: Callable[[Any], Future], items: Iterable, most: int
) -> Iterator[tuple[Any, Any]]:
    """Yield each item with the result of `submit(item)`, in the order of the items.

    At most `most` calls run at the same time. They are cancelled if the generator is closed, or
    after an error or interrupt.
    """
    items, pending = iter(items), deque()
    try:
        while True:
            for item in islice(items, most - len(pending)):
                pending.append((item, submit(item)))
            if not pending:
                return
            item, future = pending[0]
            yield item, future.result()
            pending.popleft()
    finally:
        for _, future in pending:
            future.cancel()


def num_workers(executor: Executor | None) -> int:
    """The number of workers of an executor: the size of its pool, or of the cluster of a Dask
    client."""
    client = getattr(executor, "_client", None)
    if hasattr(client, "nthreads"):
        return max(1, sum(client.nthreads().values()))
    count = getattr(executor, "_max_workers", None) or getattr(executor, "num_workers", None)
    return max(1, count if isinstance(count, int) else os.cpu_count() or 1)


def checked(executor: object) -> Executor | None:
    """The executor, or None. A TypeError is raised for anything else."""
    of_dask = hasattr(executor, "get_executor")
    remedy = "client.get_executor()" if of_dask else "concurrent.futures.ProcessPoolExecutor()"
    return required(
        executor,
        Executor | None,
        "expected executor= as a concurrent.futures.Executor",
        f"give {remedy}",
    )


# The sum over all chunks, on the executor of a call: `passes_on` and `fold`.
#
# 1. `passes_on` stores executor, retries and checkpoint of a call in a context variable. The
#    functions between the method of a model and its passes therefore need no further arguments.
# 2. `Checkpoint.resumed` returns the partial sum of the checkpoint and skips its chunks.
# 3. `_tasks` groups the other chunks. A chunk that is already data is a separate task, because it
#    has to be sent. Chunks that a worker loads are grouped, so that each worker has about eight
#    tasks in a pass. This keeps the overhead small, and all workers end at about the same time.
# 4. At most two tasks per worker are in flight. This limits the memory for chunks and for sums that
#    wait. A worker that finishes a task always has a next one.
# 5. The oldest task is awaited and added first, even if later ones are done. Sums are thus added in
#    the order of the chunks, and the result is equal to the last bit for any executor.
# 6. At any error or interrupt, the tasks in flight are cancelled and the partial sum is written.


_TASKS = 8  # tasks of each worker in a pass, if the workers load the chunks
_MOST_CHUNKS = 32  # most chunks of a task
_IN_FLIGHT = 2  # tasks in flight for each worker, so that none waits
_SHARES = 2  # shares for each worker, of work that is not in chunks

Kept = TypeVar("Kept")
Show = Callable[[int, int, int | None], None]
"""A function that shows the numbers of chunks and points that are done, and the total number of
chunks if it is known."""


@dataclass(frozen=True)
class Passes:
    """The settings of the passes of a call: the executor and the treatment of failures."""

    executor: Executor | None = None  # None runs passes in this process
    retries: int = 0
    checkpoint: Checkpoint | None = None
    warned: set[tuple] = field(default_factory=set)  # warnings of workers that were given here

    def outcomes(self, work: Work, tasks: Iterator[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Yield the tasks, each with its outcome, in the order of the tasks.

        Raises:
            TypeError: The work or a chunk cannot be pickled.
            RuntimeError: The executor has been shut down, or has lost a process.
        """
        if self.executor is None:
            job = Job(work, self.retries, names_chunks=self.retries > 0)
            yield from ((task, job(task)) for task in tasks)
            return
        # Unless the user has set the number of threads, the workers share the cores.
        workers = num_workers(self.executor)
        threads = num_threads.value() or max(1, (os.cpu_count() or 1) // workers)
        job = Job(work, self.retries, threads)
        shares_memory = isinstance(self.executor, ThreadPoolExecutor)
        run = job if shares_memory else _packed_job(job)

        def submit(task: Task) -> Future:
            return self._submit(run, task if shares_memory else _packed_task(task))

        try:
            with closing(ordered_map(submit, tasks, _IN_FLIGHT * workers)) as pairs:
                for task, result in pairs:
                    outcome = result if shares_memory else pickle.loads(result)
                    for warned in outcome.warned:
                        if warned not in self.warned:
                            self.warned.add(warned)
                            warnings.warn_explicit(*warned)
                    yield task, outcome
        except BrokenExecutor as error:
            raise RuntimeError(
                f"expected workers that run until the end of the pass, got a broken pool ({error}):"
                " a process was killed, perhaps because of its memory. Call again with a new pool; "
                "with checkpoint=path, the chunks that are done need not be read again"
            ) from error

    def _submit(self, job: Callable[[Task], Outcome | bytes], task: Task) -> Future:
        try:
            return self.executor.submit(job, task)
        except BrokenExecutor:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"expected a running executor, got one that has been shut down ({error}); make a "
                "new one, and call inside its `with` block"
            ) from error


_IN_PLACE = Passes()
_call = ContextVar("passes", default=_IN_PLACE)  # of this thread


@contextmanager
def passes_on(
    executor: object = None,
    retries: int = 2,
    checkpoint: object = None,
    identity: Callable[[], object] = str,
) -> Iterator[None]:
    """Inside the block, passes over chunks run on an executor.

    Args:
        executor: a `concurrent.futures.Executor`, or None to run passes in this process.
        retries: the number of further attempts for a chunk that fails.
        checkpoint: the path of a file for partial sums. It is deleted at the end of the block.
        identity: a function whose result identifies the model and the call. Partial sums also
            depend on the columns and the chunks.

    Raises:
        TypeError: `executor` is something else.
        ValueError: `retries` is negative, or the checkpoint belongs to another model.
    """
    if executor is None and checkpoint is None:
        yield
        return
    if retries < 0:
        raise ValueError(f"expected retries >= 0, got {retries}; use 0 for no further attempts")
    executor = checked(executor)
    kept = None if checkpoint is None else Checkpoint.at(checkpoint, digest_of(identity()))
    before = _call.set(Passes(executor, retries, kept))
    try:
        yield
    finally:
        _call.reset(before)
    if kept is not None:
        kept.remove()


def silent(chunks: int, points: int, of: int | None) -> None:
    """Show no progress."""


def kept(compute: Callable[[], Kept]) -> Kept:
    """Return the result of `compute`. If an interrupted call is resumed, return its stored result
    instead.

    A checkpoint belongs to certain arguments of each pass, and these arguments may depend on the
    result. With another number of threads, a new result could differ in its last bits. The stored
    result makes the arguments of a resumed pass equal to those in the checkpoint.

    Results are identified by the order of the calls. A result is stored only if the checkpoint
    already has the sums of a pass. The chunks of this pass show whether the data are the same.
    """
    checkpoint = _call.get().checkpoint
    return compute() if checkpoint is None else checkpoint.kept(compute)


def shares(values: Sequence) -> list[Sequence]:
    """Divide values into parts for the workers of this call. Without an executor, there is one
    part."""
    executor = _call.get().executor
    count = 1 if executor is None else _SHARES * num_workers(executor)
    size = max(1, -(-len(values) // count))
    return [values[start : start + size] for start in range(0, len(values), size)]


def fold(work: Work, name: Callable[[], object], chunks: Iterable, show: Show = silent) -> Any:
    """The sum of the results of `work` for all chunks, in their order; None without chunks.

    `name` returns a value that distinguishes the work from other work of the same call. Only a
    checkpoint needs it.
    """
    passes, of = _call.get(), length_hint(chunks) or None
    checkpoint, chunks = passes.checkpoint, iter(chunks)
    known = "" if checkpoint is None else digest_of(name())
    done = Partial() if checkpoint is None else checkpoint.resumed(known, chunks)
    show(done.chunks, done.points, of)
    size = 1  # the number of chunks in a task, for chunks that are callables
    if of is not None and passes.executor is not None:
        each = (of - done.chunks) // (_TASKS * num_workers(passes.executor))
        size = min(max(1, each), _MOST_CHUNKS)
    tasks = _tasks(chunks, done.chunks, size)
    try:
        with closing(passes.outcomes(work, tasks)) as outcomes:
            for task, outcome in outcomes:
                value = outcome.value if done.value is None else done.value + outcome.value
                count, points = done.chunks + len(task.chunks), done.points + outcome.points
                done = Partial(value, count, points)
                if checkpoint is not None:
                    checkpoint.add(known, done, task.chunks)
                show(done.chunks, done.points, of)
    finally:
        if checkpoint is not None:
            checkpoint.write(soon=True)
    return done.value


def _tasks(chunks: Iterator, start: int, size: int) -> Iterator[Task]:
    """Divide chunks into tasks of consecutive chunks.

    A task has one chunk if the chunk contains the data, and `size` chunks if the worker loads them.
    """
    for chunk in chunks:
        more = list(islice(chunks, size - 1)) if callable(chunk) else []
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

    They apply to one call. The model does not store them.
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
