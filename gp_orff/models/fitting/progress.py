"""How far a fit is: a bar where a line can be drawn again, else one line a stage."""

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from tqdm import tqdm

_SECONDS = 30.0  # between the lines of one pass over the data


class Progress(ABC):
    """Who is told."""

    @abstractmethod
    def evaluated(self, stage: str, nats_per_number: float) -> None:
        """The evidence has been evaluated once more."""

    @abstractmethod
    def ended(self, line: str) -> None:
        """A stage has ended; what there is to say of it."""

    @abstractmethod
    def begin_pass(self) -> None:
        """Another pass over chunks of data begins."""

    @abstractmethod
    def read(self, points: int) -> None:
        """So many points of the pass have been read."""


class Silent(Progress):
    """Nobody."""

    def evaluated(self, stage, nats_per_number):
        pass

    def ended(self, line):
        pass

    def begin_pass(self):
        pass

    def read(self, points):
        pass


class Watched(Progress):
    """Somebody; passes are told of by and by."""

    seconds: float  # between two words of one pass

    def __init__(self):
        self.passes, self.told = 0, time.perf_counter()

    def begin_pass(self):
        self.passes, self.told = self.passes + 1, time.perf_counter()

    def read(self, points):
        if time.perf_counter() - self.told >= self.seconds:
            self.told = time.perf_counter()
            self.say(f"pass {self.passes} over the data: {points} points read")

    @abstractmethod
    def say(self, line: str) -> None:
        """Now."""


class Bar(Watched):
    """Who sees a terminal or a notebook."""

    seconds = 0.5

    def __init__(self, bar: tqdm):
        super().__init__()
        self.bar = bar

    def evaluated(self, stage, nats_per_number):
        self.bar.set_description_str(f"{stage} ", refresh=False)
        self.bar.set_postfix({"nats per number": f"{nats_per_number:.4f}"}, refresh=False)
        self.bar.update()

    def ended(self, line):
        pass

    def say(self, line):
        self.bar.set_description_str(f"{line} ")


class Lines(Watched):
    """Who reads a file, in which nothing can be drawn again."""

    seconds = _SECONDS

    def __init__(self, stream: TextIO):
        super().__init__()
        self.stream = stream

    def evaluated(self, stage, nats_per_number):
        pass

    def ended(self, line):
        self.say(line)

    def say(self, line):
        print(line, file=self.stream, flush=True)


class _Now(threading.local):
    progress: Progress = Silent()


_now = _Now()


@contextmanager
def shown(progress: bool) -> Iterator[Progress]:
    """On standard error, as it is now; nowhere if it is not asked for.

    Notebooks draw the text bar of `tqdm` again too; `tqdm.auto` would ask for ipywidgets.
    """
    stream = sys.stderr
    if not progress or stream is None:
        yield Silent()
    elif redraws(stream):
        with tqdm(file=stream, unit=" evaluations", mininterval=0.5) as bar:
            yield from _told(Bar(bar))
    else:
        yield from _told(Lines(stream))


def _told(progress: Progress) -> Iterator[Progress]:
    _now.progress = progress
    try:
        yield progress
    finally:
        _now.progress = Silent()


def announce(title: str, progress: bool) -> None:
    """A line above what a fit shows."""
    if progress and sys.stderr is not None:
        print(title, file=sys.stderr, flush=True)


def redraws(stream: TextIO) -> bool:
    """Whether a carriage return draws a line again: on a terminal, and in a notebook's output."""
    notebook = type(stream).__module__.startswith("ipykernel")
    return notebook or (hasattr(stream, "isatty") and stream.isatty())


@dataclass(frozen=True)
class CountedChunks:
    """Chunks of data that tell how far they have been read, while a fit is shown. They hold on to
    nobody who was told: a model keeps them, and copies them."""

    chunks: Iterable

    def __iter__(self) -> Iterator:
        progress, points = _now.progress, 0
        progress.begin_pass()
        for chunk in self.chunks:
            yield chunk
            points += len(chunk["x"] if isinstance(chunk, Mapping) else chunk[0])
            progress.read(points)
