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
from gp_orff.data.observations import Readings, SymbolObservations, fingerprints, join, places
from gp_orff.data.patterns import GroupKey
from gp_orff.data.sources import Kept
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
    bound: float  # what weights that were learned add to the log density of the data
    further: tuple[SymbolObservations, ...]  # observations of symbols of the field, in memory

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

    def stored_weights(self, asked: "HeldData") -> Iterable[Float[Tensor, "n"] | Float[Tensor, ""]]:
        """The weights that other readings have here, part by part; NaN where one is not held."""
        return repeat(torch.tensor(math.nan))

    @property
    def box(self) -> Box:
        """Of all points that are looked at."""
        boxes = [self.survey.box, *(own.box for own in self.further)]
        return tuple(
            (min(low for low, _ in axis), max(high for _, high in axis))
            for axis in zip(*boxes, strict=True)
        )

    @property
    def num_values(self) -> float:
        return self.survey.num_values + self._further_values

    @property
    def _further_values(self) -> int:
        return sum(own.num_values for own in self.further)

    def observing(self, further: SymbolObservations) -> "Data":
        """With these observations too."""
        self.require(further.box)
        return replace(self, further=(*self.further, further))

    def require(self, box: Box) -> None:
        """Raise ValueError for more readings where they cannot be added."""
        return

    def admitted(self, grid: Grid) -> Grid:
        """The grid, on frequencies for which there are statistics."""
        return grid

    def to(self, device: torch.device) -> "Data":
        """On another device."""
        survey = replace(self.survey, sample=[part.to(device) for part in self.survey.sample])
        return replace(self, survey=survey, further=tuple(own.to(device) for own in self.further))

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

    def __call__(self) -> Iterator[Readings]:
        for part in self.source():
            rows = within_box(part.x, self.box)
            if rows.any():
                yield part if rows.all() else part.take(rows)


@dataclass(frozen=True)
class HeldData(Data):
    """Readings that can be visited any number of times."""

    revisitable = True

    sources: tuple[Visit, ...]
    survey: Survey
    weights: tuple[Float[Tensor, "n"], ...] | None = None  # of the visits' parts, multiplied
    bound: float = 0.0
    held: int = 0  # numbers in memory for the sake of this
    further: tuple[SymbolObservations, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether a copy of the readings is worth its memory."""
        return self.size <= MOST_KEPT

    @property
    def overflows(self) -> bool:
        """Whether more is held than is worth its memory."""
        return self.held > MOST_KEPT

    @classmethod
    def of(cls, visit: Visit, seed: int = 0) -> "HeldData":
        """One look at all of them, which raises where they are not valid."""
        return cls((visit,), Survey.of(visit(), seed))

    @classmethod
    def in_memory(cls, parts: Sequence[Readings]) -> "HeldData":
        """Of readings that are there."""
        return cls.of(Kept(parts))

    @property
    def size(self) -> int:
        """Numbers in x and y."""
        return self.survey.num_points * self.num_inputs + self.survey.num_values

    def kept(self) -> "HeldData":
        """A copy in memory, which no one else can change."""
        copies = Kept([part.copied() for part in self.visit()])
        return replace(self, sources=(copies,), held=self.size)

    def counted(self) -> "HeldData":
        """Arrays are in memory as long as they are held here; what iterates over chunks is not."""
        arrays = not hasattr(self.sources[0], "chunks")
        return replace(self, held=self.size if arrays else 0)

    def __add__(self, other: "HeldData") -> "HeldData":
        weights = None
        if self.weights is not None or other.weights is not None:
            weights = (*self.all_weights(), *other.all_weights())
        sources, survey = self.sources + other.sources, self.survey + other.survey
        bound, held = self.bound + other.bound, self.held + other.held
        further = self.further + other.further
        return HeldData(sources, survey, weights, bound, held, further)._in_one_piece()

    def _in_one_piece(self) -> "HeldData":
        """Many small pieces joined."""
        if len(self.sources) <= MOST_PIECES or not all(isinstance(s, Kept) for s in self.sources):
            return self
        parts = [part for source in self.sources for part in source()]
        parts, weights = joined(parts, self.all_weights())
        weights = None if self.weights is None else tuple(weights)
        return replace(self, sources=(Kept(parts),), weights=weights)

    def visit(self) -> Iterator[Readings]:
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
        return bool(self.further) or any((own != own[:1]).any() for own in given)

    def stored_weights(self, asked: "HeldData") -> Iterable[Float[Tensor, "n"] | Float[Tensor, ""]]:
        if self.weights is None:
            return super().stored_weights(asked)
        parts = [fingerprints(part) for part in asked.visit()]
        held = np.concatenate([fingerprints(part) for part in self.visit()])
        weights = torch.cat(self.weights)
        weights = torch.cat([weights, weights.new_full((1,), math.nan)])  # at −1
        found = weights[torch.from_numpy(places(np.concatenate(parts), held))]
        return found.split([len(part) for part in parts])

    def weighted(self, weights: Sequence[Float[Tensor, "n"]], bound: float) -> "HeldData":
        """The same readings, with a weight for each in the order of the visit."""
        return replace(self, weights=tuple(weights), bound=bound)

    def within(self, box: Box) -> "HeldData":
        """The readings inside a box, and the weights they have; one look at all of them."""
        inside = [within_box(part.x, box) for part in self.unweighted().visit()]
        weights = self.weights and tuple(
            own[rows.to(own.device)]
            for own, rows in zip(self.weights, inside, strict=True)
            if rows.any()
        )
        sources = tuple(Within(source, box) for source in self.sources)
        if all(isinstance(source, Kept) for source in self.sources):
            sources = tuple(Kept(list(source())) for source in sources)
        survey = Survey.of(part for source in sources for part in source())
        return replace(self, sources=sources, survey=survey, weights=weights)

    def unweighted(self) -> "HeldData":
        return replace(self, weights=None, bound=0.0)

    def to(self, device: torch.device) -> "HeldData":
        """Readings in memory on another device; others come to it when they are visited."""
        sources = tuple(
            Kept([part.to(device) for part in own.parts]) if isinstance(own, Kept) else own
            for own in self.sources
        )
        weights = None if self.weights is None else tuple(w.to(device) for w in self.weights)
        return replace(super().to(device), sources=sources, weights=weights)

    def describe(self) -> str:
        many = f"{self.survey.num_points} points, {self.survey.num_values} numbers"
        return f"{many}{_described(self.further)}; held: the data"

    def all_weights(self) -> Sequence[Float[Tensor, "n"]]:
        """Those of the visit's parts, one where none were learned."""
        if self.weights is not None:
            return self.weights
        return [torch.ones_like(part.y[:, 0]) for part in self.visit()]

    @cached_property
    def readings(self) -> list[Readings]:
        """All readings in memory, one piece for each group."""
        return join(self.visit())

    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        moving = any(own.requires_grad for own in phi.tensors)
        found = (
            differentiable_statistics(self.visit, phi)
            if moving
            else FieldStatistics.of(self.visit(), phi)
        )
        return replace(found, bound=self.bound)


@dataclass(frozen=True)
class HeldSums(Data):
    """Statistics alone, on a lattice wider and finer than a posterior needs: they serve other
    lengthscales and a larger domain, and new readings, but no readings can be visited again."""

    revisitable = False

    sums: FieldStatistics
    domain: Box | None  # that the lattice serves; None where every point is served
    survey: Survey
    further: tuple[SymbolObservations, ...] = ()

    @property
    def bound(self) -> float:
        return self.sums.bound

    def statistics(self, phi: TrigColumns) -> FieldStatistics:
        if isinstance(phi, LatticeColumns):
            return self.sums.on(phi)
        if any(own.requires_grad for own in phi.tensors) or not self.sums.phi.same(phi):
            raise RuntimeError(
                "these random frequencies move with the hyperparameters, and the data are no "
                "longer held: call fit or condition on the data, or use gp_orff.Grid, whose "
                "statistics serve other hyperparameters"
            )
        return self.sums

    @property
    def num_values(self) -> float:
        return self.sums.num_values + self._further_values

    @property
    def weights_of(self) -> Mapping[GroupKey, Weights]:
        return {key: own.weights for key, own in self.sums.groups.items()}

    def __add__(self, new: HeldData) -> "HeldSums":
        sums = self.sums + new.statistics(self.sums.phi)
        return HeldSums(sums, self.domain, self.survey + new.survey, self.further + new.further)

    def to(self, device: torch.device) -> "HeldSums":
        return replace(super().to(device), sums=self.sums.to(device))

    def require(self, box: Box) -> None:
        if self.domain is not None and not contains(self.domain, box):
            raise ValueError(
                f"expected readings inside the domain {in_words(self.domain)} of the statistics, "
                f"got some in {in_words(box)}; the data themselves are no longer held: condition "
                "on all data, or give the region of interest beforehand, as Auto(domain=...)"
            )

    def admitted(self, grid: Grid) -> Grid:
        lattice = self.sums.phi
        return replace(
            grid,
            spacing=tuple(lattice.spacing.tolist()),
            domain=self.domain,
            data=None,
            largest_index=lattice.modes,
        )

    def describe(self) -> str:
        many = f"{self.sums.num_values:g} numbers{_described(self.further)}"
        return f"{many}; held: their statistics, no data"


def _described(further: Sequence[SymbolObservations]) -> str:
    return "".join(f", {own.num_values} of {type(own.symbol).__name__}" for own in further)
