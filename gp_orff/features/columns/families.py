"""Columns of several families side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.columns.base import Columns, stack_rows
from gp_orff.features.columns.trigonometric import TrigColumns
from gp_orff.features.phases import LinearPhases


@dataclass(frozen=True)
class SideBySide(Columns):
    """The columns of several families, one family after the other."""

    families: tuple[Columns, ...]

    @property
    def counts(self) -> list[int]:
        """The number of columns of each family."""
        return [phi.num_columns for phi in self.families]

    @property
    def starts(self) -> list[int]:
        """The index of the first column of each family."""
        return list(accumulate(self.counts[:-1], initial=0))

    @property
    def num_columns(self) -> int:
        return sum(self.counts)

    @property
    def sampled(self) -> bool:
        return any(phi.sampled for phi in self.families)

    @property
    def device(self) -> torch.device:
        return self.families[0].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(chain.from_iterable(phi.tensors for phi in self.families))

    def with_tensors(self, *tensors: Tensor) -> "SideBySide":
        remaining = iter(tensors)
        parts = [phi.with_tensors(*(next(remaining) for _ in phi.tensors)) for phi in self.families]
        return SideBySide(tuple(parts))

    def to(self, device: torch.device) -> "SideBySide":
        return SideBySide(tuple(phi.to(device) for phi in self.families))

    def select(self, columns: Int[Tensor, "k"]) -> "SideBySide":
        ranges = zip(self.families, self.starts, self.counts, strict=True)
        parts = [(phi, columns[(columns >= a) & (columns < a + n)] - a) for phi, a, n in ranges]
        return SideBySide(tuple(phi.select(indices) for phi, indices in parts))

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        halves = []
        for half in zip(*(phi.halves() for phi in self.families), strict=True):
            columns, variances = zip(*half, strict=True)
            halves.append((self._shift(columns), torch.cat(variances)))
        return halves

    def _shift(self, columns: Sequence[Int[Tensor, "k"]]) -> Int[Tensor, "k"]:
        """Indices of columns within each family → indices among all columns."""
        pairs = zip(self.starts, columns, strict=True)
        return torch.cat([start + indices for start, indices in pairs])

    def same(self, other: Columns) -> bool:
        return (
            isinstance(other, SideBySide)
            and len(self.families) == len(other.families)
            and all(a.same(b) for a, b in zip(self.families, other.families, strict=True))
        )

    def plain(self) -> dict[str, list]:
        return {"families": [phi.plain() for phi in self.families]}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return stack_rows([phi.inner_products(x).mT for phi in self.families]).mT

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        return stack_rows([phi.values(x).mT for phi in self.families]).mT

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        return stack_rows([phi.mean_squares() for phi in self.families])

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moments = [phi.moments(x, y) for phi in self.families]
        grams, crosses, sums = zip(*moments, strict=True)
        total = stack_rows([s.unsqueeze(-1) for s in sums]).squeeze(-1)
        return self._blocks(grams, x), stack_rows(crosses), total

    def sums(self, x, y, weights):
        sums_of_families = [phi.sums(x, y, weights) for phi in self.families]
        compact, crosses, sums = zip(*sums_of_families, strict=True)
        grams = []
        for weight, *parts in zip(weights.mT, *compact, strict=True):
            diagonal = [phi.gram(part) for phi, part in zip(self.families, parts, strict=True)]
            grams.append(self._blocks(diagonal, x, weight))
        return grams, torch.cat(crosses), [torch.cat(parts) for parts in zip(*sums, strict=True)]

    def _blocks(
        self, grams: Sequence[Tensor], x: Tensor, weight: Tensor | None = None
    ) -> Float[Tensor, "*b M M"]:
        """φᵀ diag(a) φ from its diagonal blocks, one of each family; the others are computed."""
        blocks = {(i, i): gram for i, gram in enumerate(grams)}
        for (i, phi), (j, other) in combinations(enumerate(self.families), 2):
            blocks[i, j] = phi.cross_gram(other, x, weight)
            blocks[j, i] = blocks[i, j].mT
        index = range(len(grams))
        rows = [stack_rows([blocks[i, j].mT for j in index]).mT for i in index]
        return stack_rows(rows)

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        return stack_rows([phi.adjoint(x, y) for phi in self.families])

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        parts = zip(self.families, w.split(self.counts, dim=-2), strict=True)
        return sum(phi.apply(x, part) for phi, part in parts)

    def multiplier(self, symbol, num_outputs, space):
        parts = [phi.multiplier(symbol, num_outputs, space) for phi in self.families]
        return torch.cat(parts, dim=-3)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        partners, signs = zip(*(phi.quarter_turn for phi in self.families), strict=True)
        return self._shift(partners), torch.cat(signs)


def families_of(columns: Columns) -> tuple[Columns, ...]:
    """The families of columns, or the columns themselves."""
    return columns.families if isinstance(columns, SideBySide) else (columns,)


def side_by_side(parts: Sequence[Columns]) -> tuple[Columns, list[Int[Tensor, "k"]]]:
    """The columns of all parts as one value, and the indices that each part has among them.

    All trigonometric columns with explicit frequencies become one family, which comes first.
    """
    families = [families_of(part) for part in parts]
    every = list(chain.from_iterable(families))
    order = sorted(range(len(every)), key=lambda i: not _has_explicit_frequencies(every[i]))
    count = sum(map(_has_explicit_frequencies, every))
    merged, places = [every[i] for i in order[count:]], []
    if count:
        joined, places = _join([every[i] for i in order[:count]])
        merged.insert(0, joined)
    phi = SideBySide(tuple(merged))
    index = torch.arange(phi.num_columns, device=phi.device).split(phi.counts)
    place = dict(zip(order, [*places, *index[bool(count) :]], strict=True))
    numbers = iter(range(len(every)))
    indices = [torch.cat([place[next(numbers)] for _ in part]) for part in families]
    return (phi if len(merged) > 1 else merged[0]), indices


def _has_explicit_frequencies(columns: Columns) -> bool:
    return type(columns) is TrigColumns and isinstance(columns.phases, LinearPhases)


def _join(parts: Sequence[TrigColumns]) -> tuple[TrigColumns, list[Int[Tensor, "k"]]]:
    """One family with the frequencies of all parts, and the indices of each part's columns."""
    omega = stack_rows([part.omega for part in parts])
    phi = TrigColumns.of(omega, all(part.sampled for part in parts))
    index = torch.arange(phi.phases.num_frequencies, device=omega.device)
    groups = index.split([part.phases.num_frequencies for part in parts])
    return phi, [torch.cat(phi.columns_of(frequencies)) for frequencies in groups]
