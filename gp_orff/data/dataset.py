"""The data a model holds: readings that can be visited again, or statistics alone."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.field_statistics import FieldStatistics, Visit, differentiable_statistics
from gp_orff.data.observations import Observations, SymbolObservations, fingerprints, join, places
from gp_orff.data.patterns import GroupKey
from gp_orff.data.sources import InMemory
from gp_orff.data.statistics import Weights
from gp_orff.data.survey import MOST_PIECES, Survey, joined
from gp_orff.features.columns import TrigColumns
from gp_orff.features.domain import Box, contains, in_words, within_box
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.lattice import LatticeColumns

MOST_KEPT = 4 * 2**20  # numbers that are copied and kept


class Data(ABC):
    """What is asked of data, however they are held."""

    revisitable: bool  # whether the readings can be gone through again
    survey: "Survey"
    elbo_correction: float  # what weights that were learned add to the log density of the data
    symbol_data: tuple[SymbolObservations, ...]  # observations of symbols of the field, in memory

    @abstractmethod
    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        """The statistics of all readings under these columns, differentiable in their ω."""

    @abstractmethod
    def describe(self) -> str:
        """What is held, in words."""

    @property
    def varies(self) -> bool:
        """Whether what was read differs from reading to reading, or may do so."""
        return True

    def stored_weights(self, asked: "Dataset") -> Iterable[Float[Tensor, "n"] | Float[Tensor, ""]]:
        """The weights that other readings have here, part by part; NaN where one is not held."""
        return repeat(torch.tensor(math.nan))

    @property
    def box(self) -> Box:
        """Of all points that are looked at."""
        boxes = [self.survey.box, *(own.box for own in self.symbol_data)]
        return tuple(
            (min(low for low, _ in axis), max(high for _, high in axis))
            for axis in zip(*boxes, strict=True)
        )

    @property
    def num_values(self) -> float:
        return self.survey.num_values + self._num_symbol_values

    @property
    def _num_symbol_values(self) -> int:
        return sum(own.num_values for own in self.symbol_data)

    def observing(self, symbol_data: SymbolObservations) -> "Data":
        """With these observations too."""
        self.require(symbol_data.box)
        return replace(self, symbol_data=(*self.symbol_data, symbol_data))

    def require(self, box: Box) -> None:
        """Raise ValueError for more readings where they cannot be added."""
        return

    def restrict(self, grid: Grid) -> Grid:
        """The grid, on frequencies for which there are statistics."""
        return grid

    def to(self, device: torch.device) -> "Data":
        """On another device."""
        survey = replace(self.survey, sample=[part.to(device) for part in self.survey.sample])
        return replace(
            self, survey=survey, symbol_data=tuple(own.to(device) for own in self.symbol_data)
        )

    @property
    def keys(self) -> Sequence[GroupKey]:
        """The groups of readings there are."""
        return list(self.weights_of)

    @property
    def weights_of(self) -> Mapping[GroupKey, Weights]:
        """The weights of the readings of every group."""
        return self.survey.weights

    @property
    def num_inputs(self) -> int:
        return len(self.survey.box)


@dataclass(frozen=True)
class Within:
    """Those of a source's readings that are inside a box."""

    source: Visit
    box: Box

    def __call__(self) -> Iterator[Observations]:
        for part in self.source():
            rows = within_box(part.x, self.box)
            if rows.any():
                yield part if rows.all() else part.take(rows)


@dataclass(frozen=True)
class Dataset(Data):
    """Readings that can be visited any number of times."""

    revisitable = True

    sources: tuple[Visit, ...]
    survey: Survey
    weights: tuple[Float[Tensor, "n"], ...] | None = None  # of the visits' parts, multiplied
    elbo_correction: float = 0.0
    numbers_in_memory: int = 0  # numbers in memory for the sake of this
    symbol_data: tuple[SymbolObservations, ...] = ()

    @classmethod
    def of(cls, visit: Visit, seed: int = 0) -> "Dataset":
        """One look at all of them, which raises where they are not valid."""
        return cls((visit,), Survey.of(visit(), seed))

    @classmethod
    def in_memory(cls, parts: Sequence[Observations]) -> "Dataset":
        """Of readings that are there."""
        return cls.of(InMemory(parts))

    @property
    def size(self) -> int:
        """Numbers in x and y."""
        return self.survey.num_points * self.num_inputs + self.survey.num_values

    def copied(self) -> "Dataset":
        """A copy in memory, which no one else can change."""
        copies = InMemory([part.copied() for part in self.visit()])
        return replace(self, sources=(copies,), numbers_in_memory=self.size)

    def counting_memory(self) -> "Dataset":
        """Arrays are in memory as long as they are held here; what iterates over chunks is not."""
        arrays = not hasattr(self.sources[0], "chunks")
        return replace(self, numbers_in_memory=self.size if arrays else 0)

    def __add__(self, other: "Dataset") -> "Dataset":
        weights = None
        if self.weights is not None or other.weights is not None:
            weights = (*self.all_weights(), *other.all_weights())
        sources, survey = self.sources + other.sources, self.survey + other.survey
        elbo_correction, held = (
            self.elbo_correction + other.elbo_correction,
            self.numbers_in_memory + other.numbers_in_memory,
        )
        symbol_data = self.symbol_data + other.symbol_data
        return Dataset(sources, survey, weights, elbo_correction, held, symbol_data)._in_one_piece()

    def _in_one_piece(self) -> "Dataset":
        """Many small pieces joined."""
        if len(self.sources) <= MOST_PIECES or not all(
            isinstance(s, InMemory) for s in self.sources
        ):
            return self
        parts = [part for source in self.sources for part in source()]
        parts, weights = joined(parts, self.all_weights())
        weights = None if self.weights is None else tuple(weights)
        return replace(self, sources=(InMemory(parts),), weights=weights)

    def visit(self) -> Iterator[Observations]:
        """All readings, part by part, always in the same order."""
        parts = (part for source in self.sources for part in source())
        if self.weights is None:
            yield from parts
            return
        for part, weight in zip(parts, self.weights, strict=True):
            yield part.weighted(weight)

    @property
    def varies(self) -> bool:
        seen = [(p.y, p.direction) for p in join(self.survey.sample)]
        given = [t for pair in seen for t in pair if t is not None]
        return bool(self.symbol_data) or any((own != own[:1]).any() for own in given)

    def stored_weights(self, asked: "Dataset") -> Iterable[Float[Tensor, "n"] | Float[Tensor, ""]]:
        if self.weights is None:
            return super().stored_weights(asked)
        parts = [fingerprints(part) for part in asked.visit()]
        held = np.concatenate([fingerprints(part) for part in self.visit()])
        weights = torch.cat(self.weights)
        weights = torch.cat([weights, weights.new_full((1,), math.nan)])  # at −1
        found = weights[torch.from_numpy(places(np.concatenate(parts), held))]
        return found.split([len(part) for part in parts])

    def weighted(self, weights: Sequence[Float[Tensor, "n"]], elbo_correction: float) -> "Dataset":
        """The same readings, with a weight for each in the order of the visit."""
        return replace(self, weights=tuple(weights), elbo_correction=elbo_correction)

    def within(self, box: Box) -> "Dataset":
        """The readings inside a box, and the weights they have; one look at all of them."""
        inside = [within_box(part.x, box) for part in self.unweighted().visit()]
        weights = self.weights and tuple(
            own[rows.to(own.device)]
            for own, rows in zip(self.weights, inside, strict=True)
            if rows.any()
        )
        sources = tuple(Within(source, box) for source in self.sources)
        if all(isinstance(source, InMemory) for source in self.sources):
            sources = tuple(InMemory(list(source())) for source in sources)
        survey = Survey.of(part for source in sources for part in source())
        return replace(self, sources=sources, survey=survey, weights=weights)

    def unweighted(self) -> "Dataset":
        return replace(self, weights=None, elbo_correction=0.0)

    def to(self, device: torch.device) -> "Dataset":
        """Readings in memory on another device; others come to it when they are visited."""
        sources = tuple(
            InMemory([part.to(device) for part in own.parts]) if isinstance(own, InMemory) else own
            for own in self.sources
        )
        weights = None if self.weights is None else tuple(w.to(device) for w in self.weights)
        return replace(super().to(device), sources=sources, weights=weights)

    def describe(self) -> str:
        many = f"{self.survey.num_points} points, {self.survey.num_values} numbers"
        return f"{many}{_described(self.symbol_data)}; held: the data"

    def all_weights(self) -> Sequence[Float[Tensor, "n"]]:
        """Those of the visit's parts, one where none were learned."""
        if self.weights is not None:
            return self.weights
        return [torch.ones_like(part.y[:, 0]) for part in self.visit()]

    @cached_property
    def observations(self) -> list[Observations]:
        """All readings in memory, one piece for each group."""
        return join(self.visit())

    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        moving = any(own.requires_grad for own in phi.tensors)
        found = (
            differentiable_statistics(self.visit, phi)
            if moving
            else FieldStatistics.of(self.visit(), phi)
        )
        return replace(found, elbo_correction=self.elbo_correction)


@dataclass(frozen=True)
class StatisticsOnly(Data):
    """Statistics alone, on a lattice wider and finer than a posterior needs: they serve other
    lengthscales and a larger domain, and new readings, but no readings can be visited again."""

    revisitable = False

    field_statistics: FieldStatistics
    domain: Box | None  # that the lattice serves; None where every point is served
    survey: Survey
    symbol_data: tuple[SymbolObservations, ...] = ()

    @property
    def elbo_correction(self) -> float:
        return self.field_statistics.elbo_correction

    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        if isinstance(phi, LatticeColumns):
            return self.field_statistics.on(phi)
        if any(own.requires_grad for own in phi.tensors) or not self.field_statistics.phi.same(phi):
            raise RuntimeError(
                "these random frequencies move with the hyperparameters, and the data are no "
                "longer held: call fit or condition on the data, or use gp_orff.Grid, whose "
                "statistics serve other hyperparameters"
            )
        return self.field_statistics

    @property
    def num_values(self) -> float:
        return self.field_statistics.num_values + self._num_symbol_values

    @property
    def weights_of(self) -> Mapping[GroupKey, Weights]:
        return {key: own.weights for key, own in self.field_statistics.groups.items()}

    def __add__(self, new: Dataset) -> "StatisticsOnly":
        sums = self.field_statistics + new.statistics(self.field_statistics.phi)
        return StatisticsOnly(
            sums, self.domain, self.survey + new.survey, self.symbol_data + new.symbol_data
        )

    def to(self, device: torch.device) -> "StatisticsOnly":
        return replace(super().to(device), field_statistics=self.field_statistics.to(device))

    def require(self, box: Box) -> None:
        if self.domain is not None and not contains(self.domain, box):
            raise ValueError(
                f"expected readings inside the domain {in_words(self.domain)} of the statistics, "
                f"got some in {in_words(box)}; the data themselves are no longer held: condition "
                "on all data, or give the region of interest beforehand, as Auto(domain=...)"
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

    def describe(self) -> str:
        many = f"{self.field_statistics.num_values:g} numbers{_described(self.symbol_data)}"
        return f"{many}; held: their statistics, no data"


def _described(symbol_data: Sequence[SymbolObservations]) -> str:
    return "".join(f", {own.num_values} of {type(own.symbol).__name__}" for own in symbol_data)
