"""What is kept of how a model came to its hyperparameters, and what a fit writes down for it."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gp_orff.models.fitting.progress import Progress
from gp_orff.models.threads import Threads


@dataclass(frozen=True)
class Stage:
    """One stage of a fit: a search on one representation of the data, or several short ones.

    Attributes:
        name: the representation.
        evaluations: of the evidence and its gradient.
        seconds: wall time.
        nats_per_number: the log evidence reached, with the log density of priors, per observed
            number of this stage.
    """

    name: str
    evaluations: int
    seconds: float
    nats_per_number: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.evaluations} evaluations, {self.seconds:.1f} s, "
            f"{self.nats_per_number:.5f} nats per number"
        )


@dataclass(frozen=True)
class History:
    """How a model came to what it holds."""

    action: str  # the last one: fitted, conditioned, updated, observed
    stages: tuple[Stage, ...] = ()  # of the last fit
    notes: tuple[str, ...] = ()  # sentences
    seconds: float | None = None  # of the last fit
    threads: int | None = None

    def then(self, action: str) -> "History":
        return replace(self, action=action)

    def took(self, seconds: float, threads: Threads) -> "History":
        """Of a fit that has ended."""
        busy = [f"threads: {threads}"] if threads.busy else []
        return replace(self, seconds=seconds, threads=max(threads.used)).noting(busy)

    def noting(self, notes: Iterable[str]) -> "History":
        """With sentences that are new."""
        every = (text for text in (*self.notes, *notes) if text)
        return replace(self, notes=tuple(dict.fromkeys(every)))


@dataclass
class OpenStage:
    """A stage that goes on."""

    name: str
    progress: Progress
    evaluations: int = 0
    nats_per_number: float = -float("inf")
    began: float = field(default_factory=time.perf_counter)

    def evaluated(self, nats_per_number: float) -> None:
        self.evaluations += 1
        self.progress.evaluated(self.name, nats_per_number)

    def ended(self) -> Stage:
        seconds = time.perf_counter() - self.began
        return Stage(self.name, self.evaluations, seconds, float(self.nats_per_number))


class Journal:
    """The stages and notes of a fit, while it goes on."""

    def __init__(self, progress: Progress, notes: Iterable[str] = ()):
        self.progress = progress
        self.stages: list[Stage] = []
        self.notes = list(notes)
        self._outermost: OpenStage | None = None

    def note(self, text: str) -> None:
        if text and text not in self.notes:
            self.notes.append(text)

    @contextmanager
    def stage(self, name: str) -> Iterator[OpenStage]:
        """Searches in it are counted together; a stage inside another one is part of it."""
        if self._outermost is not None:
            yield self._outermost
            return
        self._outermost = OpenStage(name, self.progress)
        try:
            yield self._outermost
            self.stages.append(self._outermost.ended())
        finally:
            self._outermost = None
        self.progress.ended(str(self.stages[-1]))
