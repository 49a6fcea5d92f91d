"""The history of a model: stages and notes of its last fit, and the journal of a running fit."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gp_orff.models.fitting.progress import Progress
from gp_orff.threads import Threads


@dataclass(frozen=True)
class Stage:
    """One stage of a fit: one search on one representation of the data, or several short searches.

    Attributes:
        name: the representation of the data, such as "exact kernel" or "fine grid, 3292 features".
        evaluations: how often the evidence and its gradient were evaluated.
        seconds: wall time.
        nats_per_number: the log evidence reached, plus the log priors, per observed number of the
            data of this stage; −∞ for a pass over the data, without evaluations.
    """

    name: str
    evaluations: int
    seconds: float
    nats_per_number: float

    def __str__(self) -> str:
        if not self.evaluations:
            return f"{self.name}: {self.seconds:.1f} s"
        return (
            f"{self.name}: {self.evaluations} evaluations, {self.seconds:.1f} s, "
            f"{self.nats_per_number:.5f} nats per number"
        )


@dataclass(frozen=True)
class History:
    """What was done to a model; the fields are attributes of `FitReport`."""

    action: str  # the last one: fitted, conditioned, updated, observed
    stages: tuple[Stage, ...] = ()  # of the last fit
    notes: tuple[str, ...] = ()  # sentences
    seconds: float | None = None  # of the last fit
    threads: int | None = None  # of the last fit
    weak_priors: bool = False  # whether the last fit learned with weak priors

    def then(self, action: str) -> "History":
        """The history with another last action."""
        return replace(self, action=action)

    @property
    def conditioned(self) -> "History":
        """The history of a model that is conditioned anew."""
        return History("conditioned")

    def with_duration(self, seconds: float, threads: Threads) -> "History":
        """The history of a fit that has ended, with its wall time and threads."""
        busy = [f"used {threads}"] if threads.busy else []
        return replace(self, seconds=seconds, threads=max(threads.used)).with_notes(busy)

    def with_notes(self, notes: Iterable[str]) -> "History":
        """The history with more notes, each once."""
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
        """Count one evaluation, and show it."""
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

    @contextmanager
    def stage(self, name: str) -> Iterator[OpenStage]:
        """Count the searches of the block as one stage; a stage inside another is part of that."""
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
