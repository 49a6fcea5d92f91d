"""Sources of observations (arrays, chunks, memory), and summaries of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, TypeVar

import torch
from gpytorch.kernels import Kernel
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import ColumnUnits
from gp_orff.data.observations import Observations
from gp_orff.data.passes import Show, Work, fold, loaded, naming, num_points, silent
from gp_orff.data.reading import (
    PER_OBSERVATION,
    Options,
    chunks,
    in_units,
    read,
    unpack,
    warn_of_positions,
)
from gp_orff.data.statistics import FieldStatistics
from gp_orff.data.survey import Survey
from gp_orff.data.track_reading import TrackObservations, readings_along, split
from gp_orff.data.validation import is_single
from gp_orff.features.chunked import Box, within_box
from gp_orff.features.columns import Columns
from gp_orff.kernels.tree import infer_num_dims, input_columns, terms

# Sources of observations: arrays, chunks that can be visited again, or memory.


Value = TypeVar("Value")
Parts = Iterator[Observations | TrackObservations]


class Summary(Protocol[Value]):
    """What is made of observations; values of different observations add up."""

    def __call__(self, parts: Parts, number: int) -> Value:
        """The value of observations, those of the chunk `number`."""

    @property
    def name(self) -> object:
        """Plain values that distinguish this summary from others of the same data."""


class Source(ABC):
    """Observations that can be visited any number of times."""

    in_memory = False

    @abstractmethod
    def __call__(self) -> Parts:
        """All observations, part by part."""

    def fold(self, summary: Summary[Value]) -> Value | None:
        """The summary of all observations, in one pass; None if there are no chunks."""
        return summary(self(), 0)

    def mapped(self, change: Callable[[Observations], Observations]) -> "Source":
        """The source with other observations in memory; what is read elsewhere stays."""
        return self

    def within(self, box: Box) -> "Source":
        """The observations that lie inside a box."""
        return WithinBox(self, box)


@dataclass(frozen=True)
class Reader:
    """Reads data for a model: validated observations on its device, less a varying mean."""

    kernel: Kernel
    mean: Mean
    num_outputs: int
    joint: bool = False  # whether y may have any number of columns

    def read(self, x: object, y: object, options: Options) -> Parts:
        """The observations of x and y, group by group."""
        device = next(self.kernel.parameters()).device
        for part in read(x, y, self.num_outputs, options, self.joint):
            self._check_columns(part.x.shape[-1])
            part = part.to(device)
            if not is_constant(self.mean):
                part = part.minus(varying_mean(self.mean, part.x, self.num_outputs))
            if options.track is None:
                yield part
            else:
                yield readings_along(part, options.track, options.time, len(x))

    def _check_columns(self, got: int) -> None:
        summands = terms(self.kernel)
        num_dims = infer_num_dims(summands, None)
        expected, exactly = input_columns(summands, got if num_dims is None else num_dims)
        if got < expected or (exactly and got != expected):
            remedy = (
                "; multiply with a kernel of a further input, such as time, each with its columns: "
                "HelmholtzKernel(num_dims=2, active_dims=[0, 1]) * RBFKernel(active_dims=[2])"
            )
            text = f"the kernel expects points with {expected} columns, got {got}"
            raise ValueError(text + remedy * (got > expected))


@dataclass(frozen=True)
class Arrays(Source):
    """Tensors, arrays or memory maps, held by reference."""

    reader: Reader
    x: object
    y: object
    options: Options
    checked: set[int] = field(default_factory=set, compare=False, repr=False)
    """The first rows of slices whose positions were looked at: a second visit does not warn."""

    def __call__(self) -> Parts:
        offset = 0
        for x, y, options in chunks(self.x, self.y, self.options):
            if offset not in self.checked:
                warn_of_positions(x)
                self.checked.add(offset)
            for part in self.reader.read(x, y, options):
                yield part.shift_index(offset) if offset else part
            offset += len(x)


@dataclass(frozen=True)
class ChunkReader:
    """Reads chunks that are loaded, in this process or another."""

    reader: Reader
    options: Options
    units: ColumnUnits

    def __call__(self, chunk: object) -> Parts:
        x, y, options = in_units(self.units, *unpack(chunk, self.options))
        for part in chunks(x, y, options):
            if len(part[0]):  # a block of land has no observations
                warn_of_positions(part[0])
                yield from self.reader.read(*part)


@dataclass(frozen=True)
class Chunks(Source):
    """An iterable of chunks, held by reference; a chunk may be a callable that loads it."""

    reader: Reader
    chunks: Iterable
    options: Options
    show: Show = silent
    units: ColumnUnits = field(default_factory=ColumnUnits)

    def __post_init__(self):
        if isinstance(self.chunks, Mapping):
            raise TypeError(
                f"expected x and y, or chunks, got one mapping with keys "
                f"{sorted(map(str, self.chunks))}; one chunk is a list of one: fit([chunk])"
            )
        try:
            once = iter(self.chunks) is self.chunks
        except TypeError as error:
            got = type(self.chunks).__name__
            raise TypeError(
                f"expected x and y, or an iterable of chunks (x, y), got {got} alone"
            ) from error
        if once:
            raise TypeError(
                "expected chunks that can be visited again and again, got an iterator, which ends "
                "after one visit; give a list, or an object whose __iter__ starts again"
            )
        if not all(is_single(getattr(self.options, name)) for name in PER_OBSERVATION):
            raise ValueError(
                "expected variances, noise, directions, groups, tracks and times inside the "
                "chunks, got them as arguments; give chunks as mappings with keys x, y, noise, ..."
            )
        if isinstance(self.chunks, Tensor) or hasattr(self.chunks, "__array__"):
            raise TypeError("expected observations y with x, got x alone: fit(x, y)")

    def __call__(self) -> Parts:
        read, points = self._read, 0
        self.show(0, 0, None)
        for number, chunk in enumerate(self.chunks, 1):
            with naming(chunk, number - 1):
                content = loaded(chunk)
                yield from read(content)
            points += num_points(content)
            self.show(number, points, None)

    def fold(self, summary: Summary[Value]) -> Value | None:
        return fold(Work(self._read, summary), lambda: summary.name, self.chunks, self.show)

    @property
    def _read(self) -> ChunkReader:
        return ChunkReader(self.reader, self.options, self.units)


@dataclass(frozen=True)
class InMemory(Source):
    """Observations in memory."""

    parts: Sequence[Observations]

    in_memory = True

    def __call__(self) -> Iterator[Observations]:
        return iter(self.parts)

    def mapped(self, change: Callable[[Observations], Observations]) -> "InMemory":
        return InMemory([change(part) for part in self.parts])

    def within(self, box: Box) -> "InMemory":
        return InMemory(list(_within(self(), box)))


@dataclass(frozen=True)
class WithinBox(Source):
    """The observations of a source that lie inside a box."""

    source: Source
    box: Box

    def __call__(self) -> Iterator[Observations]:
        return _within(self.source(), self.box)

    def fold(self, summary: Summary[Value]) -> Value | None:
        return self.source.fold(SummaryWithin(summary, self.box))


@dataclass(frozen=True)
class SummaryWithin:
    """The summary of the observations that lie inside a box."""

    summary: Summary
    box: Box

    def __call__(self, parts: Parts, number: int) -> object:
        return self.summary(_within(parts, self.box), number)

    @property
    def name(self) -> object:
        return [self.summary.name, list(self.box)]


def _within(parts: Iterator[Observations], box: Box) -> Iterator[Observations]:
    for part in parts:
        rows = within_box(part.x, box)
        if rows.any():
            yield part if rows.all() else part.take(rows)


def is_constant(mean: Mean) -> bool:
    """Whether a mean is a constant for each output."""
    return all(isinstance(base_mean, ConstantMean | ZeroMean) for base_mean in base_means(mean))


def base_means(mean: Mean) -> list[Mean]:
    """The means of the single outputs, or the mean itself."""
    return list(mean.base_means) if isinstance(mean, MultitaskMean) else [mean]


@torch.no_grad()
def varying_mean(mean: Mean, x: Float[Tensor, "n d"], num_outputs: int) -> Float[Tensor, "n p"]:
    """The values of a mean that is not learned here; zero where it is constant."""
    if is_constant(mean):
        return x.new_zeros(*x.shape[:-1], num_outputs)
    values = mean(x).detach()
    if values.numel() != len(x) * num_outputs:
        raise ValueError(
            f"expected a mean with {num_outputs} outputs, got values of shape "
            f"{tuple(values.shape)} at {len(x)} points; wrap it in gpytorch.means.MultitaskMean"
        )
    return values.reshape(len(x), num_outputs)


# Summaries of chunks: the survey and the statistics of observations. A summary of several sources.


@dataclass(frozen=True)
class Seen:
    """The survey of observations at single points, if there are any, and those along tracks."""

    survey: Survey | None
    tracks: list[TrackObservations]
    skipped: int = 0  # chunks without observations

    def __add__(self, other: "Seen") -> "Seen":
        surveys = [seen.survey for seen in (self, other) if seen.survey is not None]
        total = surveys[0] + surveys[1] if len(surveys) == 2 else next(iter(surveys), None)
        return Seen(total, self.tracks + other.tracks, self.skipped + other.skipped)


@dataclass(frozen=True)
class FirstLook:
    """The first look at observations; `seed` selects the sample."""

    seed: int

    def __call__(self, parts: Iterator[Observations | TrackObservations], number: int) -> Seen:
        tracks: list[TrackObservations] = []
        single = split(parts, tracks)
        first = next(single, None)
        if first is None:
            return Seen(None, tracks, skipped=int(not tracks))
        seed = [self.seed, number] if number else self.seed
        return Seen(Survey.of(chain([first], single), seed), tracks)

    @property
    def name(self) -> object:
        return ["first look", self.seed]


@dataclass(frozen=True)
class StatisticsUnder:
    """The statistics of observations at single points, under columns φ."""

    phi: Columns

    def __call__(self, parts: Iterator[Observations], number: int) -> FieldStatistics:
        return FieldStatistics.of(split(parts, []), self.phi)

    @property
    def name(self) -> object:
        return ["statistics", self.phi.plain()]


def fold_sources(sources: Iterable[Source], summary: Summary[Value]) -> Value | None:
    """The summary of the observations of all sources; None if there are none."""
    total = None
    for source in sources:
        value = source.fold(summary)
        if value is not None:
            total = value if total is None else total + value
    return total
