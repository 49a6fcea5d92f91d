"""The journal of a fit: its stages, notes and progress."""

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TextIO

from tqdm import tqdm

from gp_orff.threads import Threads

# The progress of a fit: a bar in a terminal or notebook, otherwise one line per stage.


_SECONDS = 30.0  # seconds between lines about one pass over the data


class Progress:
    """The display of the progress of a fit. This class shows nothing."""

    def show_evaluation(self, stage: str, nats_per_number: float) -> None:
        """Show one more evaluation of the evidence."""

    def show_stage(self, line: str) -> None:
        """Show the summary of a finished stage."""

    def begin_pass(self) -> None:
        """Begin another pass over the chunks of data."""

    def show_points(self, points: int, chunks: str) -> None:
        """Show the number of points that the pass has read. `chunks` is a text about the chunks."""


class Visible(Progress, ABC):
    """Shows the progress of a pass at intervals of at least `seconds`."""

    seconds: float

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
    """A bar, in a terminal or notebook."""

    seconds = 0.5

    def __init__(self, bar: tqdm):
        super().__init__()
        self.bar = bar

    def show_evaluation(self, stage, nats_per_number):
        self.bar.set_description_str(f"{stage} ", refresh=False)
        evidence = {"log evidence per value": f"{nats_per_number:.4f} nats"}
        self.bar.set_postfix(evidence, refresh=False)
        self.bar.update()

    def show_line(self, line):
        self.bar.set_description_str(f"{line} ")


class Lines(Visible):
    """Lines, for a file or another stream that cannot redraw text."""

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
    """Show progress on standard error inside the block, unless `progress` is False.

    Notebooks redraw the text bar of `tqdm` too. `tqdm.auto` would need ipywidgets.
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
    """Whether a carriage return redraws a line, as in a terminal or the output of a notebook."""
    notebook = type(stream).__module__.startswith("ipykernel")
    return notebook or (hasattr(stream, "isatty") and stream.isatty())


def show_pass(chunks: int, points: int, of: int | None) -> None:
    """Show how many chunks have been read, if a fit is showing progress.

    This is a function without a reference to a `Progress`, because models store and copy it.
    """
    progress = _thread.progress
    if chunks == 0:
        progress.begin_pass()
    else:
        progress.show_points(points, "" if of is None else f", {chunks} of {of} chunks")


# The history of a model: stages and notes of its last fit, and the journal of a running fit.


@dataclass(frozen=True)
class Stage:
    """One stage of a fit: one search on one representation of the data, or several short searches.

    Attributes:
        name: the representation of the data, such as "exact kernel" or "fine grid, 3292 features".
        evaluations: the number of evaluations of the evidence and its gradient.
        seconds: the wall time.
        nats_per_number: the log evidence plus the log priors at the end of the stage, in nats per
            observed value of the stage. −∞ for a pass over the data, which evaluates no evidence.
        operations: the predicted floating-point operations of an evaluation; None if unknown.
        loss: the log evidence that this stage is predicted to lose, in nats; None if unknown. It is
            a difference of log evidences of all data under the exact kernel. From the largest value
            it subtracts the value at the hyperparameters that this stage finds.
    """

    name: str
    evaluations: int
    seconds: float
    nats_per_number: float
    operations: float | None = None
    loss: float | None = None

    def __str__(self) -> str:
        if not self.evaluations:
            return f"{self.name}: {self.seconds:.1f} s"
        return (
            f"{self.name}: {self.evaluations} evaluations, {self.seconds:.1f} s, "
            f"log evidence {self.nats_per_number:.5f} nats per value"
        )


@dataclass(frozen=True)
class History:
    """The actions on a model. The fields are attributes of `FitReport`, which explains them."""

    action: str
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    threads: int | None = None
    weak_priors: bool = False
    coverage: float | None = None

    def then(self, action: str) -> "History":
        """The history with a new last action. The coverage for its data is not known."""
        return replace(self, action=action, coverage=None)

    def with_duration(self, seconds: float, threads: Threads) -> "History":
        """The history of a finished fit, with its wall time and number of threads."""
        busy = [f"used {threads}"] if threads.busy else []
        return replace(self, seconds=seconds, threads=threads.number).with_notes(busy)

    def with_notes(self, notes: Iterable[str]) -> "History":
        """The history with more notes. Repetitions and empty texts are dropped."""
        texts = (text for text in (*self.notes, *notes) if text)
        return replace(self, notes=tuple(dict.fromkeys(texts)))


@dataclass
class OpenStage:
    """A stage that is still running."""

    name: str
    progress: Progress
    evaluations: int = 0
    nats_per_number: float = -float("inf")
    start: float = field(default_factory=time.perf_counter)

    def count(self, nats_per_number: float) -> None:
        """Count and show one evaluation."""
        self.evaluations += 1
        self.progress.show_evaluation(self.name, nats_per_number)

    def finish(self) -> Stage:
        seconds = time.perf_counter() - self.start
        return Stage(self.name, self.evaluations, seconds, float(self.nats_per_number))


class Journal:
    """The stages and notes of a running fit."""

    def __init__(self, progress: Progress, notes: Iterable[str] = ()):
        self.progress = progress
        self.stages: list[Stage] = []
        self.notes = list(notes)
        self._outermost: OpenStage | None = None

    def note(self, text: str) -> None:
        """Add a sentence; `History.with_notes` drops empty ones and repetitions."""
        self.notes.append(text)

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def price(self, first: int, **predicted: float) -> None:
        """Add predicted `operations` or `loss` to the searches from stage number `first` on."""
        for number in range(first, self.count):
            if self.stages[number].evaluations:
                self.stages[number] = replace(self.stages[number], **predicted)

    @contextmanager
    def stage(self, name: str) -> Iterator[OpenStage]:
        """Record all searches in this `with` block as one stage.

        A nested call adds its searches to the outer stage.
        """
        if self._outermost is not None:
            yield self._outermost
            return
        self._outermost = OpenStage(name, self.progress)
        try:
            yield self._outermost
            self.stages.append(self._outermost.finish())
        finally:
            self._outermost = None
        self.progress.show_stage(str(self.stages[-1]))
