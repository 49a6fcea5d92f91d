"""Observations that can be visited repeatedly (arrays, chunks, memory), or their statistics."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from itertools import chain

import numpy as np
import torch
from gpytorch.kernels import Kernel
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import ColumnUnits
from gp_orff.data.noise import Noises
from gp_orff.data.observations import Observations, SymbolObservations, join
from gp_orff.data.passes import Show, Work, fold, loaded, naming, num_points, silent
from gp_orff.data.patterns import GroupKey
from gp_orff.data.reading import (
    PER_OBSERVATION,
    Options,
    chunks,
    in_units,
    read,
    unpack,
    warn_of_positions,
)
from gp_orff.data.sites import BY_THE_PRIOR, SAME, Repeats, distinct, fingerprints, lookup
from gp_orff.data.statistics import FieldStatistics, Weights, differentiable_statistics
from gp_orff.data.survey import MOST_PIECES, DataWarning, NoObservations, Survey, merge_pieces
from gp_orff.data.tracks import TrackObservations, joined, observations_along, split
from gp_orff.data.validation import is_single
from gp_orff.features.chunked import Box, contains, in_words, union, within_box
from gp_orff.features.columns import Columns, TrigColumns
from gp_orff.features.grid import Grid
from gp_orff.kernels.tree import infer_num_dims, input_columns, terms

# Sources of observations: arrays, chunks that can be visited again, or memory.


Parts = Iterator[Observations | TrackObservations]
Summary = "FirstLook | StatisticsUnder | SummaryWithin"
"""A function of observations and the index of their chunk, whose values for different observations
can be added. It has a unique `name` of plain values."""


class Source(ABC):
    """Observations that can be visited repeatedly."""

    in_memory = False
    at_hand = False  # in memory, or in arrays

    @abstractmethod
    def __call__(self) -> Parts:
        """All observations, part by part."""

    def fold(self, summary: Summary) -> "Seen | FieldStatistics | None":
        """The summary of all observations, in one pass; None if there are no chunks."""
        return summary(self(), 0)

    def mapped(self, change: Callable[[Observations], Observations]) -> "Source":
        """The source with changed observations in memory. A source that is not in memory does not
        change."""
        return self

    def within(self, box: Box) -> "Source":
        """The observations that lie inside a box."""
        return WithinBox(self, box)


@dataclass(frozen=True)
class Reader:
    """A reader of data for a model.

    It validates the observations, copies them to the device of the model, and subtracts a mean
    function unless it is constant.
    """

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
                yield observations_along(part, options.track, options.time, len(x))

    def read_chunk(self, options: Options, units: ColumnUnits, chunk: object) -> Parts:
        """The observations of a loaded chunk. It may be called in another process."""
        for part in chunks(*in_units(units, *unpack(chunk, options))):
            if len(part[0]):  # a block of land, for example, has no observations
                warn_of_positions(part[0])
                yield from self.read(*part)

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
    """Tensors, arrays or memory maps, stored by reference."""

    reader: Reader
    x: object
    y: object
    options: Options
    at_hand = True
    checked: set[int] = field(default_factory=set, compare=False, repr=False)
    """The first rows of slices whose positions were checked, so that a second visit does not
    warn."""

    def __call__(self) -> Parts:
        offset = 0
        for x, y, options in chunks(self.x, self.y, self.options):
            if offset not in self.checked:
                warn_of_positions(x)
                self.checked.add(offset)
            for part in self.reader.read(x, y, options):
                yield replace(part, index=part.index + offset) if offset else part
            offset += len(x)


@dataclass(frozen=True)
class Chunks(Source):
    """An iterable of chunks, stored by reference. A chunk may be a callable that loads it."""

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
                "expected chunks that can be iterated repeatedly, got an iterator, which ends "
                "after one visit; give a list, or an object whose __iter__ starts again"
            )
        if not all(is_single(getattr(self.options, name)) for name in PER_OBSERVATION):
            raise ValueError(
                "expected variances, noise, directions, groups, tracks and times in the chunks, "
                "got them as arguments; give chunks as mappings with keys x, y, noise, ..."
            )
        if hasattr(self.chunks, "__array__"):
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

    def fold(self, summary: Summary) -> "Seen | FieldStatistics | None":
        return fold(Work(self._read, summary), lambda: summary.name, self.chunks, self.show)

    @property
    def _read(self) -> Callable[[object], Parts]:
        return partial(self.reader.read_chunk, self.options, self.units)


@dataclass(frozen=True)
class InMemory(Source):
    """Observations in memory."""

    parts: Sequence[Observations]

    in_memory = at_hand = True

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

    def fold(self, summary: Summary) -> "Seen | FieldStatistics | None":
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
    """Whether a mean is constant for each output."""
    return all(isinstance(base_mean, ConstantMean | ZeroMean) for base_mean in base_means(mean))


def base_means(mean: Mean) -> list[Mean]:
    """The means of the single outputs, or the mean itself."""
    return list(mean.base_means) if isinstance(mean, MultitaskMean) else [mean]


@torch.no_grad()
def varying_mean(mean: Mean, x: Float[Tensor, "n d"], num_outputs: int) -> Float[Tensor, "n p"]:
    """The values of a mean that is not constant; zero for constant means."""
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
    """The survey of observations at single points, if there are any, and the observations along
    tracks."""

    survey: Survey | None
    tracks: list[TrackObservations]
    skipped: int = 0  # the number of chunks without observations

    def __add__(self, other: "Seen") -> "Seen":
        surveys = [seen.survey for seen in (self, other) if seen.survey is not None]
        total = surveys[0] + surveys[1] if len(surveys) == 2 else next(iter(surveys), None)
        return Seen(total, self.tracks + other.tracks, self.skipped + other.skipped)


@dataclass(frozen=True)
class FirstLook:
    """The summary of a first pass over observations. `seed` determines the sample."""

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
    """The statistics of observations at single points, for the columns φ."""

    phi: Columns

    def __call__(self, parts: Iterator[Observations], number: int) -> FieldStatistics:
        return FieldStatistics.of(split(parts, []), self.phi)

    @property
    def name(self) -> object:
        return ["statistics", self.phi.plain()]


def fold_sources(sources: Iterable[Source], summary: Summary) -> "Seen | FieldStatistics | None":
    """The summary of the observations of all sources; None if there are none."""
    total = None
    for source in sources:
        value = source.fold(summary)
        if value is not None:
            total = value if total is None else total + value
    return total


# Two kinds of data have a common interface. A `Dataset` can visit its observations repeatedly: it
# refers to arrays or chunks, and stores a survey of them and a copy of small data. `StatisticsOnly`
# has sums over observations that are no longer stored. On a lattice, the sums are valid for any
# hyperparameters, but not for the exact kernel. Learned weights of Student-t noise belong to the
# data, in the order of a visit, because sums and posteriors depend on them.


MOST_KEPT = 4 * 2**20  # numbers of data that are copied to memory, at most
_MORE = 1.5  # ratio of the number of blocks to the wanted number, above which they are sampled


class Data(ABC):
    """The interface of all data."""

    revisitable: bool  # whether the observations can be visited again
    survey: "Survey"
    elbo_correction: float  # the term of the ELBO from learned weights
    symbol_data: tuple[SymbolObservations, ...]  # observations of symbols of the field, in memory
    repeats = BY_THE_PRIOR  # the treatment of repeated positions
    tracks: tuple[TrackObservations, ...] = ()  # block means along tracks, in memory

    @abstractmethod
    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        """Return the statistics of all observations for the columns `phi`.

        They are differentiable with respect to the frequencies ω.
        """

    @property
    def varies(self) -> bool:
        """Whether the observed values differ from each other, or may differ."""
        return True

    def stored_weights(self, data: "Dataset") -> Sequence[Float[Tensor, "n"]] | None:
        """Return the stored weights of the observations in `data`, one tensor for each part of a
        visit.

        An observation without a stored weight has NaN. The result is None if there are no stored
        weights.
        """
        return None

    @property
    def box(self) -> Box:
        """The box of all points at which the field is evaluated."""
        boxes = (observations.box for observations in self.symbol_data)
        return reduce(union, boxes, self.survey.box)

    @property
    def num_values(self) -> float:
        """The number M of observed values."""
        return self.survey.num_values + self._num_symbol_values

    @property
    def _num_symbol_values(self) -> int:
        return sum(observations.num_values for observations in self.symbol_data)

    def observing(self, symbol_data: SymbolObservations) -> "Data":
        """These data with the additional observations `symbol_data`."""
        self.require(symbol_data.box)
        return replace(self, symbol_data=(*self.symbol_data, symbol_data))

    def require(self, box: Box) -> None:
        """Raise a ValueError if observations inside `box` cannot be added."""
        return

    def require_no_tracks(self) -> None:
        """Raise a NotImplementedError for tracks, because they have no statistics."""
        if self.tracks:
            raise NotImplementedError(
                "expected observations without track= for statistics, got tracks, whose noise is "
                "correlated; use the observations themselves, or save the model"
            )

    def restrict(self, grid: Grid) -> Grid:
        """Return the grid, restricted to frequencies for which statistics exist."""
        return grid

    def to(self, device: torch.device) -> "Data":
        """These data on another device."""
        survey = replace(self.survey, sample=[part.to(device) for part in self.survey.sample])
        return replace(
            self, survey=survey, symbol_data=tuple(part.to(device) for part in self.symbol_data)
        )

    @property
    def keys(self) -> Sequence[GroupKey]:
        """The keys of the observation groups."""
        return list(self.weights_of)

    @property
    def weights_of(self) -> Mapping[GroupKey, Weights]:
        """Sums over the weights of each group."""
        return self.survey.weights

    def local_noises(
        self, noises: Noises, num_observations: float = math.inf
    ) -> dict[GroupKey, float]:
        """Return the mean noise variance of each group, divided by `Weights.local_mean` for the
        given number of observations."""
        return {
            key: noises[key.label].diagonal().mean().item() / weights.local_mean(num_observations)
            for key, weights in self.weights_of.items()
        }

    @property
    def num_inputs(self) -> int:
        """The number d of inputs."""
        return len(self.survey.box)

    def sampled(self, most: int) -> "Data":
        """Return the data with a sample of about `most` block means in each group along tracks.

        Groups with only slightly more block means do not change.
        """
        if all(len(part.y) <= _MORE * most for part in self.tracks):
            return self
        tracks, weights = [], dict(self.survey.weights)
        num_points, num_values = self.survey.num_points, self.survey.num_values
        for part in self.tracks:
            chosen = part.sample(most) if len(part.y) > _MORE * most else part
            fewer, count = len(part.y) - len(chosen.y), len(chosen.y)
            num_points, num_values = num_points - fewer, num_values - fewer * part.y.shape[-1]
            # The survey must describe the sample, because starting values depend on its mean
            # weights and counts.
            weights[part.key] = Weights.of(None, count)
            tracks.append(chosen)
        survey = replace(self.survey, num_points=num_points, num_values=num_values, weights=weights)
        return replace(self, tracks=tuple(tracks), survey=survey)


@dataclass(frozen=True)
class Dataset(Data):
    """Observations that can be visited repeatedly."""

    revisitable = True

    sources: tuple[Source, ...]
    survey: Survey
    weights: tuple[Float[Tensor, "n"], ...] | None = None  # learned weights for parts of a visit
    elbo_correction: float = 0.0
    numbers_in_memory: int = 0  # the size of the arrays that this dataset stores
    symbol_data: tuple[SymbolObservations, ...] = ()
    repeats: Repeats = BY_THE_PRIOR
    tracks: tuple[TrackObservations, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether the data are small enough to be copied to memory."""
        return self.size <= MOST_KEPT

    @property
    def overflows(self) -> bool:
        """Whether the data store more numbers in memory than `MOST_KEPT`."""
        return self.numbers_in_memory > MOST_KEPT

    @classmethod
    def of(
        cls, source: Source, seed: int = 0, spans: Mapping[str, float] | None = None
    ) -> "Dataset":
        """The data of a source, which is visited once. An error is raised for data that are not
        valid.

        In the survey, the block means of tracks are observations at their mean positions.

        Args:
            source: the source.
            seed: the seed of the sample.
            spans: the duration of the blocks of tracks, by the label of the group. For groups
                without an entry, it is chosen from the data. If None, the tracks already are in
                blocks.
        """
        seen = source.fold(FirstLook(seed)) or Seen(None, [])
        if seen.survey is None and not seen.tracks and seen.skipped:
            raise NoObservations(
                "expected observations, got nothing but NaN, or no rows; check the data"
            )
        tracks = joined(seen.tracks)
        if spans is not None:
            tracks = tuple(part.in_blocks(spans.get(part.key.label)) for part in tracks)
        survey, single = seen.survey, seen.survey is not None or not tracks
        if tracks or survey is None:
            means = Survey.of((part.means for part in tracks), seed)
            survey = means if survey is None else survey + means
        survey = replace(survey, skipped=seen.skipped)
        return cls((source,) if single else (), survey, tracks=tracks)

    @classmethod
    def in_memory(cls, parts: Sequence[Observations]) -> "Dataset":
        """The data of observations in memory."""
        return cls.of(InMemory(parts))

    @property
    def size(self) -> int:
        """The number of entries of x and y."""
        return self.survey.num_points * self.num_inputs + self.survey.num_values

    def copied(self) -> "Dataset":
        """A copy in memory, which later changes of the user's arrays do not affect."""
        copies = InMemory([part.copied() for part in self.visit()])
        return replace(self, sources=(copies,), numbers_in_memory=self.size)

    def without_copies(self) -> "Dataset":
        """These data in memory, without copies of records.

        Copies are records with equal values at one place. Continuous noise never gives equal
        values, so copies would suggest that there is no noise. Of each group of copies, the record
        with the largest weight remains. A `DataWarning` gives the number of dropped records.

        Positions are at one place if they are within `repeats.distance` of each other. If this is
        None, they must be within 10⁻⁵ of the extent of most points along each axis. If it is 0,
        nothing changes.

        Values are equal if they differ by less than their unit. The unit of a column is the
        smallest difference between its values, but at least 10⁻⁵ of the range between their 5 % and
        95 % quantiles. Values of a copy that was rounded differently differ by one unit.

        Rounding can also give equal values to independent records, for example of a platform at
        rest. Records are copies only if this explains at most 5 % of the pairs with equal values.
        Its effect is estimated from pairs that differ by a few units, and from equal values at
        different places.

        Example:
            >>> import torch, warnings
            >>> from gp_orff.data.dataset import Dataset
            >>> from gp_orff.data.reading import Options, read
            >>> x, y = torch.rand(50, 2).double(), torch.randn(50, 2).double()
            >>> x, y = torch.cat([x, x[:4] + 1e-6]), torch.cat([y, y[:4]])
            >>> data = Dataset.in_memory(read(x, y, 2, Options()))
            >>> with warnings.catch_warnings():
            ...     warnings.simplefilter("ignore")
            ...     data = data.without_copies()
            >>> data.survey.num_points, data.repeats.copies
            (50, 4)
        """
        distance = self.repeats.distance
        if distance == 0:
            return self
        bulk = self.survey.distances.bulk
        reach = SAME * bulk if distance is None else np.full(self.num_inputs, float(distance))
        parts = list(self.visit())
        remaining = [part.take(distinct(part, reach)) for part in parts]
        copies = sum(map(len, parts)) - sum(map(len, remaining))
        if not copies:
            return self
        repeats = replace(self.repeats, copies=copies)
        warnings.warn(repeats.note, DataWarning, stacklevel=2)
        return self._from((InMemory(remaining),), repeats=repeats)

    def counting_memory(self) -> "Dataset":
        """These data with `numbers_in_memory` set. Iterables of chunks count as zero."""
        arrays = not any(hasattr(source, "chunks") for source in self.sources)
        return replace(self, numbers_in_memory=self.size if arrays else 0)

    def __add__(self, other: "Dataset") -> "Dataset":
        weights = None
        if self.weights is not None or other.weights is not None:
            weights = (*self.all_weights(), *other.all_weights())
        total = Dataset(
            self.sources + other.sources,
            self.survey + other.survey,
            weights,
            self.elbo_correction + other.elbo_correction,
            self.numbers_in_memory + other.numbers_in_memory,
            self.symbol_data + other.symbol_data,
            self.repeats + other.repeats,
            joined(self.tracks + other.tracks),
        )
        in_memory = all(source.in_memory for source in total.sources)
        return total.in_one_piece() if in_memory and len(total.sources) > MOST_PIECES else total

    def in_one_piece(self) -> "Dataset":
        """These data in memory, one piece for each group, in the order of `observations`."""
        pieces = [part for source in self.sources for part in source()]
        parts, weights = merge_pieces(pieces, self.all_weights(), most=0)
        weights = None if self.weights is None else tuple(weights)
        return replace(self, sources=(InMemory(parts),), weights=weights)

    def visit(self) -> Iterator[Observations]:
        """All observations, part by part, always in the same order."""
        parts = split((part for source in self.sources for part in source()), [])
        if self.weights is None:
            yield from parts
            return
        for part, weight in zip(parts, self.weights, strict=True):
            yield part.weighted(weight)

    @property
    def varies(self) -> bool:
        pairs = [(part.y, part.direction) for part in join(self.survey.sample)]
        tensors = [tensor for pair in pairs for tensor in pair if tensor is not None]
        return bool(self.symbol_data) or any((values != values[:1]).any() for values in tensors)

    def stored_weights(self, data: "Dataset") -> Sequence[Float[Tensor, "n"]] | None:
        if self.weights is None:
            return None
        wanted = [fingerprints(part) for part in data.visit()]
        stored = np.concatenate([fingerprints(part) for part in self.visit()])
        weights = torch.cat(self.weights)
        weights = torch.cat([weights, weights.new_full((1,), math.nan)])  # at index −1
        selected = weights[torch.from_numpy(lookup(np.concatenate(wanted), stored))]
        return selected.split([len(part) for part in wanted])

    def weighted(self, weights: Sequence[Float[Tensor, "n"]], elbo_correction: float) -> "Dataset":
        """Return the data with learned weights and the ELBO correction. `weights` has one tensor
        for each part."""
        return replace(self, weights=tuple(weights), elbo_correction=elbo_correction)

    def with_parts(self, parts: Sequence[Observations], elbo_correction: float) -> "Dataset":
        """These data with other observations in memory at the same points, and with their ELBO
        correction."""
        return self._from((InMemory(parts),), elbo_correction=elbo_correction)

    def _from(self, sources: tuple[Source, ...], **changes: object) -> "Dataset":
        """Return these data with other sources, which are visited once, and other `changes`."""
        survey = replace(fold_sources(sources, FirstLook(0)).survey, skipped=self.survey.skipped)
        return replace(self, sources=sources, survey=survey, **changes)

    def less(self, trend: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n p"]]) -> "Dataset":
        """Return these data with a trend subtracted.

        The trend is subtracted from observations in memory. Arrays and chunks are read again, with
        the present mean of their reader.
        """

        def minus(part: Observations) -> Observations:
            return part.minus(trend(part.x))

        return self._from(tuple(source.mapped(minus) for source in self.sources))

    def within(self, box: Box) -> "Dataset":
        """Return the observations inside a box, with their weights. The data are visited once."""
        weights = None
        if self.weights is not None:
            inside = [within_box(part.x, box) for part in self.unweighted().visit()]
            pairs = zip(self.weights, inside, strict=True)
            weights = tuple(weight[rows.to(weight.device)] for weight, rows in pairs if rows.any())
        return self._from(tuple(source.within(box) for source in self.sources), weights=weights)

    def unweighted(self) -> "Dataset":
        """These observations without learned weights."""
        return replace(self, weights=None, elbo_correction=0.0)

    def to(self, device: torch.device) -> "Dataset":
        """These data on another device. Chunks are moved to it in each visit."""
        sources = tuple(source.mapped(lambda part: part.to(device)) for source in self.sources)
        weights = self.weights and tuple(weight.to(device) for weight in self.weights)
        tracks = tuple(part.to(device) for part in self.tracks)
        return replace(super().to(device), sources=sources, weights=weights, tracks=tracks)

    def all_weights(self) -> Sequence[Float[Tensor, "n"]]:
        """The weights of each part of a visit. They are ones if none were learned."""
        if self.weights is not None:
            return self.weights
        return [torch.ones_like(part.y[:, 0]) for part in self.visit()]

    @cached_property
    def observations(self) -> list[Observations]:
        """All observations in memory, one piece for each group."""
        return join(self.visit())

    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        differentiable = bool(self.sources) and any(t.requires_grad for t in phi.tensors)
        if differentiable:
            statistics = differentiable_statistics(self.visit, phi)
        elif self.weights is None:
            statistics = fold_sources(self.sources, StatisticsUnder(phi))
            statistics = FieldStatistics(phi, {}) if statistics is None else statistics
        else:
            statistics = FieldStatistics.of(self.visit(), phi)
        return replace(statistics, elbo_correction=self.elbo_correction)


@dataclass(frozen=True)
class StatisticsOnly(Data):
    """Sufficient statistics without the data.

    The lattice is wider and finer than a posterior needs, so that the statistics are also valid for
    other lengthscales and a larger domain. Observations can be added, but not visited again.
    """

    revisitable = False

    field_statistics: FieldStatistics
    domain: Box | None  # where the lattice is valid; None if it is valid everywhere
    survey: Survey
    symbol_data: tuple[SymbolObservations, ...] = ()

    @property
    def elbo_correction(self) -> float:
        return self.field_statistics.elbo_correction

    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        if phi.on_lattice:
            return self.field_statistics.on(phi)
        differentiable = any(tensor.requires_grad for tensor in phi.tensors)
        if differentiable or not self.field_statistics.phi.same(phi):
            raise RuntimeError(
                "expected the data, because these random frequencies depend on the hyperparameters,"
                " got statistics: the data are no longer stored. Call fit or condition with the "
                "data, or use gp_orff.Grid, whose statistics are valid for other hyperparameters"
            )
        return self.field_statistics

    @property
    def num_values(self) -> float:
        return self.field_statistics.num_values + self._num_symbol_values

    @property
    def weights_of(self) -> Mapping[GroupKey, Weights]:
        return {key: statistics.weights for key, statistics in self.field_statistics.groups.items()}

    def __add__(self, new: Dataset) -> "StatisticsOnly":
        new.require_no_tracks()
        statistics = self.field_statistics + new.statistics(self.field_statistics.phi)
        return StatisticsOnly(
            statistics, self.domain, self.survey + new.survey, self.symbol_data + new.symbol_data
        )

    def to(self, device: torch.device) -> "StatisticsOnly":
        return replace(super().to(device), field_statistics=self.field_statistics.to(device))

    def require(self, box: Box) -> None:
        if self.domain is not None and not contains(self.domain, box):
            raise ValueError(
                f"expected observations in the domain {in_words(self.domain)} of the statistics, "
                f"got some in {in_words(box)}, and the data are no longer stored; condition on all "
                "data, or give the region of interest before the fit by Auto(domain=...)"
            )

    def restrict(self, grid: Grid) -> Grid:
        lattice = self.field_statistics.phi
        return replace(
            grid,
            spacing=tuple(lattice.spacing.tolist()),
            domain=self.domain,
            data=None,
            largest_index=lattice.modes,
        )
