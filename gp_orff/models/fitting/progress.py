"""Show the progress of a fit: a bar on a terminal or in a notebook, elsewhere a line per stage."""

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

_SECONDS = 30.0  # between the lines about one pass over the data


class Progress:
    """Where a fit shows its progress: nowhere."""

    def show_evaluation(self, stage: str, nats_per_number: float) -> None:
        """Show one more evaluation of the evidence."""

    def show_stage(self, line: str) -> None:
        """Show the summary of a finished stage."""

    def begin_pass(self) -> None:
        """Begin another pass over the chunks of data."""

    def show_points(self, points: int, chunks: str) -> None:
        """Show how many points of the pass have been read, and of how many chunks, in words."""


class Visible(Progress, ABC):
    """Shows the progress of a pass at intervals."""

    seconds: float  # between two lines about one pass

    def __init__(self):
        self.passes, self.last = 0, time.perf_counter()

    def begin_pass(self):
        self.passes, self.last = self.passes + 1, time.perf_counter()

    def show_points(self, points, chunks):
        if time.perf_counter() - self.last >= self.seconds:
            self.last = time.perf_counter()
            self.show_line(f"pass {self.passes} over the data: {points} points read{chunks}")

    @abstractmethod
    def show_line(self, line: str) -> None:
        """Show a line of text now."""


class Bar(Visible):
    """A bar, on a terminal or in a notebook."""

    seconds = 0.5

    def __init__(self, bar: tqdm):
        super().__init__()
        self.bar = bar

    def show_evaluation(self, stage, nats_per_number):
        self.bar.set_description_str(f"{stage} ", refresh=False)
        self.bar.set_postfix({"nats per number": f"{nats_per_number:.4f}"}, refresh=False)
        self.bar.update()

    def show_line(self, line):
        self.bar.set_description_str(f"{line} ")


class Lines(Visible):
    """Lines, in a file, where nothing can be redrawn."""

    seconds = _SECONDS

    def __init__(self, stream: TextIO):
        super().__init__()
        self.stream = stream

    def show_stage(self, line):
        self.show_line(line)

    def show_line(self, line):
        print(line, file=self.stream, flush=True)


class _Thread(threading.local):
    progress: Progress = Progress()


_thread = _Thread()


@contextmanager
def shown(progress: bool) -> Iterator[Progress]:
    """Show progress on the present standard error inside the block; nothing if not `progress`.

    Notebooks redraw the text bar of `tqdm` too; `tqdm.auto` would need ipywidgets.
    """
    stream = sys.stderr
    if not progress or stream is None:
        yield Progress()
    elif redraws(stream):
        with tqdm(file=stream, unit=" evaluations", mininterval=0.5) as bar:
            yield from _current(Bar(bar))
    else:
        yield from _current(Lines(stream))


def _current(progress: Progress) -> Iterator[Progress]:
    _thread.progress = progress
    try:
        yield progress
    finally:
        _thread.progress = Progress()


def announce(title: str, progress: bool) -> None:
    """Print a line above the progress of a fit."""
    if progress and sys.stderr is not None:
        print(title, file=sys.stderr, flush=True)


def redraws(stream: TextIO) -> bool:
    """Whether a carriage return redraws a line: on a terminal, and in the output of a notebook."""
    notebook = type(stream).__module__.startswith("ipykernel")
    return notebook or (hasattr(stream, "isatty") and stream.isatty())


def show_pass(chunks: int, points: int, of: int | None) -> None:
    """Show how far the chunks of data have been read, while a fit shows progress.

    A function, with no reference to the `Progress`, because a model keeps and copies it.
    """
    progress = _thread.progress
    if chunks == 0:
        progress.begin_pass()
    else:
        progress.show_points(points, "" if of is None else f", {chunks} of {of} chunks")
