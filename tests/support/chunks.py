"""Chunks that load themselves, in this process or another one, and fail in many ways."""

import os
import pickle
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as distributed


@dataclass(frozen=True)
class Load:
    """A chunk with the rows `start` to `stop` of fixed observations.

    If a folder `log` is given, each call adds a character to a file there.
    """

    start: int
    stop: int
    log: Path | None = None

    def __call__(self):
        if self.log is not None:
            with (self.log / f"{self.start:06d}").open("a") as file:
                file.write(".")
        x, y = readings()
        return x[self.start : self.stop], y[self.start : self.stop]


def readings(count=3000):
    rng = np.random.default_rng(3)
    x = rng.uniform(-1, 1, (count, 2))
    y = np.stack([np.sin(3 * x[:, 1]), np.cos(2 * x[:, 0])], axis=-1)
    return x, y + 0.1 * rng.standard_normal((count, 2))


def chunks(size, log=None, count=3000):
    return [Load(start, min(start + size, count), log) for start in range(0, count, size)]


def times_read(log):
    """Return how often each chunk was read, in the order of the chunks."""
    return [len(path.read_text()) for path in sorted(log.iterdir())]


@dataclass(frozen=True)
class Fails:
    """A chunk that raises an error, or kills its process, `times` times after `after` successful
    reads.

    The number of calls is recorded in the file `marks`.
    """

    load: Load
    marks: Path
    times: int
    error: type | None = OSError  # None: kills its process
    after: int = 0

    def __call__(self):
        self.marks.touch()
        marks = len(self.marks.read_text())
        if marks < self.after + self.times:
            with self.marks.open("a") as file:
                file.write(".")
        if self.after <= marks < self.after + self.times:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            raise self.error("the disk is away")
        return self.load()


@dataclass(frozen=True)
class Warns:
    """A chunk that warns with its position, rounded down to hundreds."""

    load: Load
    category: type[Warning] = UserWarning

    def __call__(self):
        warnings.warn(f"clouds at {self.load.start // 100}", self.category, stacklevel=1)
        return self.load()


@dataclass(frozen=True)
class Slow:
    """A chunk that takes some seconds to load."""

    load: Load
    seconds: float

    def __call__(self):
        time.sleep(self.seconds)
        return self.load()


def call(method, arguments, options):
    """Call a pickled method in another process."""
    torch.set_num_threads(1)
    pickle.loads(method)(*arguments, **options)


def nothing():
    return None


def reduced(rank, store, content):
    """Return the bytes of statistics that are summed over two processes. This process has the
    number `rank`."""
    from gp_orff.data.statistics import FieldStatistics

    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        return FieldStatistics.from_bytes(content).all_reduce().to_bytes()
    finally:
        distributed.destroy_process_group()


def num_threads():
    return torch.get_num_threads()
