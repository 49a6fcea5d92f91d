"""The data of a model: observations that can be visited again, or sufficient statistics alone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise import Noises
from gp_orff.data.observations import Observations, SymbolObservations, join
from gp_orff.data.patterns import GroupKey
from gp_orff.data.sites import BY_THE_PRIOR, Repeats, fingerprints, lookup
from gp_orff.data.sources import FirstLook, InMemory, Seen, Source, StatisticsUnder, fold_sources
from gp_orff.data.statistics import FieldStatistics, Weights, differentiable_statistics
from gp_orff.data.survey import MOST_PIECES, NoObservations, Survey, merge_pieces
from gp_orff.data.track_reading import TrackObservations, joined, require_none, split
from gp_orff.features.chunked import Box, contains, in_words, within_box
from gp_orff.features.columns import TrigColumns
from gp_orff.features.grid import Grid

# Two kinds of data have one interface. A `Dataset` can visit its observations again: it refers to
# arrays or chunks and stores only a survey of them, small data also as a copy. `StatisticsOnly` has
# the sums over observations that are gone; on a lattice they serve any hyperparameters,
# but no exact kernel. Learned weights of Student-t noise belong to the data, in the order of a
# visit, since sums and posteriors depend on them.


MOST_KEPT = 4 * 2**20  # numbers: data up to this size are copied and held in memory
_MORE = 1.5  # times as many blocks as are wanted: fewer stay as they are


class Data(ABC):
    """The interface of data, however they are held."""

    revisitable: bool  # whether the observations can be visited again
    survey: "Survey"
    elbo_correction: float  # the term of the ELBO that comes from learned weights
    symbol_data: tuple[SymbolObservations, ...]  # observations of symbols of the field, in memory
    repeats = BY_THE_PRIOR  # what is done about repeated positions
    tracks: tuple[TrackObservations, ...] = ()  # block means along tracks, in memory

    @abstractmethod
    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        """The statistics of all observations under the columns `phi`, differentiable in their ω."""

    @property
    def varies(self) -> bool:
        """Whether the observed values differ from each other, or may do so."""
        return True

    def stored_weights(self, data: "Dataset") -> Sequence[Float[Tensor, "n"]] | None:
        """The stored weights of the observations in `data`, an entry for each part of a visit, NaN
        where not stored; None without any."""
        return None

    @property
    def box(self) -> Box:
        """The bounding box of all points at which the field is evaluated."""
        boxes = [self.survey.box, *(observations.box for observations in self.symbol_data)]
        return tuple(
            (min(low for low, _ in axis), max(high for _, high in axis))
            for axis in zip(*boxes, strict=True)
        )

    @property
    def num_values(self) -> float:
        """M, the number of observed values."""
        return self.survey.num_values + self._num_symbol_values

    @property
    def _num_symbol_values(self) -> int:
        return sum(observations.num_values for observations in self.symbol_data)

    def observing(self, symbol_data: SymbolObservations) -> "Data":
        """These data and the observations `symbol_data`."""
        self.require(symbol_data.box)
        return replace(self, symbol_data=(*self.symbol_data, symbol_data))

    def require(self, box: Box) -> None:
        """Raise ValueError if observations inside `box` cannot be added."""
        return

    def restrict(self, grid: Grid) -> Grid:
        """The grid, restricted to frequencies for which statistics exist."""
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
        """Sums over the weights of every group."""
        return self.survey.weights

    def local_noises(
        self, noises: Noises, num_observations: float = math.inf
    ) -> dict[GroupKey, float]:
        """The noise variance by group, at the `Weights.local_mean` of so many observations."""
        return {
            key: noises[key.label].diagonal().mean().item() / weights.local_mean(num_observations)
            for key, weights in self.weights_of.items()
        }

    @property
    def num_inputs(self) -> int:
        """d, the number of input columns."""
        return len(self.survey.box)

    def sampled(self, most: int) -> "Data":
        """The data with about `most` blocks of the tracks of each group that has many more."""
        if all(len(part.y) <= _MORE * most for part in self.tracks):
            return self
        tracks, weights = [], dict(self.survey.weights)
        num_points, num_values = self.survey.num_points, self.survey.num_values
        for part in self.tracks:
            chosen = part.sample(most) if len(part.y) > _MORE * most else part
            fewer, count = len(part.y) - len(chosen.y), len(chosen.y)
            num_points, num_values = num_points - fewer, num_values - fewer * part.y.shape[-1]
            # The survey has to describe the sample: mean weights and counts of values enter
            # starting values.
            weights[part.key] = Weights.of(None, count)
            tracks.append(chosen)
        survey = replace(self.survey, num_points=num_points, num_values=num_values, weights=weights)
        return replace(self, tracks=tuple(tracks), survey=survey)


@dataclass(frozen=True)
class Dataset(Data):
    """Observations that can be visited any number of times."""

    revisitable = True

    sources: tuple[Source, ...]
    survey: Survey
    weights: tuple[Float[Tensor, "n"], ...] | None = None  # learned weights of each part of a visit
    elbo_correction: float = 0.0
    numbers_in_memory: int = 0  # that this dataset holds
    symbol_data: tuple[SymbolObservations, ...] = ()
    repeats: Repeats = BY_THE_PRIOR
    tracks: tuple[TrackObservations, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether the data are small enough to be copied and held in memory."""
        return self.size <= MOST_KEPT

    @property
    def overflows(self) -> bool:
        """Whether the data store more numbers in memory than `MOST_KEPT`."""
        return self.numbers_in_memory > MOST_KEPT

    @classmethod
    def of(
        cls, source: Source, seed: int = 0, spans: Mapping[str, float] | None = None
    ) -> "Dataset":
        """The data of a source, visited once; raises where they are not valid.

        In the survey, the block means of tracks are observations at their mean positions.

        Args:
            spans: the time of a block of the tracks of a group, by its label; chosen from the data
                where there is none. If None, the tracks are in blocks.
        """
        seen = source.fold(FirstLook(seed)) or Seen(None, [])
        if seen.survey is None and not seen.tracks and seen.skipped:
            raise NoObservations("expected observations, got nothing but NaN, or no rows")
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
        """The count of numbers in x and y."""
        return self.survey.num_points * self.num_inputs + self.survey.num_values

    def copied(self) -> "Dataset":
        """A copy in memory that no one else can change."""
        copies = InMemory([part.copied() for part in self.visit()])
        return replace(self, sources=(copies,), numbers_in_memory=self.size)

    def counting_memory(self) -> "Dataset":
        """These data, with `numbers_in_memory` set: all numbers of arrays, none of iterables of
        chunks."""
        arrays = not any(hasattr(source, "chunks") for source in self.sources)
        return replace(self, numbers_in_memory=self.size if arrays else 0)

    def __add__(self, other: "Dataset") -> "Dataset":
        weights = None
        if self.weights is not None or other.weights is not None:
            weights = (*self.all_weights(), *other.all_weights())
        return Dataset(
            self.sources + other.sources,
            self.survey + other.survey,
            weights,
            self.elbo_correction + other.elbo_correction,
            self.numbers_in_memory + other.numbers_in_memory,
            self.symbol_data + other.symbol_data,
            self.repeats + other.repeats,
            joined(self.tracks + other.tracks),
        )._merge_pieces()

    def _merge_pieces(self) -> "Dataset":
        """These data; many small pieces in memory are concatenated."""
        many = len(self.sources) > MOST_PIECES and all(own.in_memory for own in self.sources)
        return self.in_one_piece() if many else self

    def in_one_piece(self) -> "Dataset":
        """These data in memory, with one piece for each group, in the order of `observations`."""
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
        """These observations with learned weights, one tensor for each part of a visit, and the
        ELBO correction of these weights."""
        return replace(self, weights=tuple(weights), elbo_correction=elbo_correction)

    def with_parts(self, parts: Sequence[Observations], elbo_correction: float) -> "Dataset":
        """These data with other observations at their points, in memory, and the ELBO correction of
        these."""
        return self._from((InMemory(parts),), elbo_correction=elbo_correction)

    def _from(self, sources: tuple[Source, ...], **changes: object) -> "Dataset":
        """These data with other sources, which are visited once, and other changes."""
        survey = replace(fold_sources(sources, FirstLook(0)).survey, skipped=self.survey.skipped)
        return replace(self, sources=sources, survey=survey, **changes)

    def less(self, trend: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n p"]]) -> "Dataset":
        """These data, those in memory less a trend; arrays and chunks are read with the present
        mean of their reader."""

        def minus(part: Observations) -> Observations:
            return part.minus(trend(part.x))

        return self._from(tuple(source.mapped(minus) for source in self.sources))

    def within(self, box: Box) -> "Dataset":
        """The observations inside a box with their weights; visits the data once."""
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
        """These data on another device; chunks move to it when they are visited."""
        sources = tuple(source.mapped(lambda part: part.to(device)) for source in self.sources)
        weights = self.weights and tuple(weight.to(device) for weight in self.weights)
        tracks = tuple(part.to(device) for part in self.tracks)
        return replace(super().to(device), sources=sources, weights=weights, tracks=tracks)

    def all_weights(self) -> Sequence[Float[Tensor, "n"]]:
        """The weights of each part of a visit; ones where none were learned."""
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

    The lattice is wider and finer than a posterior needs, so that the statistics serve other
    lengthscales and a larger domain. Observations can be added, but none can be visited again.
    """

    revisitable = False

    field_statistics: FieldStatistics
    domain: Box | None  # that the lattice serves; None if it serves every point
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
                "expected the data, since these random frequencies move with the hyperparameters, "
                "got statistics: the data are no longer stored. Call fit or condition on the data, "
                "or use gp_orff.Grid, whose statistics are valid for others"
            )
        return self.field_statistics

    @property
    def num_values(self) -> float:
        return self.field_statistics.num_values + self._num_symbol_values

    @property
    def weights_of(self) -> Mapping[GroupKey, Weights]:
        return {key: statistics.weights for key, statistics in self.field_statistics.groups.items()}

    def __add__(self, new: Dataset) -> "StatisticsOnly":
        require_none(new.tracks)
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
                "data, or give the region of interest beforehand, as Auto(domain=...)"
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
