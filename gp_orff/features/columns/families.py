"""Families of columns side by side, with the products of one and another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.chunked import LinearPhases
from gp_orff.features.columns.base import Columns, stacked
from gp_orff.features.columns.trigonometric import TrigColumns


@dataclass(frozen=True)
class SideBySide(Columns):
    """Columns of several families, those of one after those of the other."""

    families: tuple[Columns, ...]

    @property
    def counts(self) -> list[int]:
        return [own.num_columns for own in self.families]

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.counts[:-1], initial=0))

    @property
    def num_columns(self) -> int:
        return sum(self.counts)

    @property
    def sampled(self) -> bool:
        return any(own.sampled for own in self.families)

    @property
    def device(self) -> torch.device:
        return self.families[0].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(chain.from_iterable(own.tensors for own in self.families))

    def with_tensors(self, *tensors: Tensor) -> "SideBySide":
        left = iter(tensors)
        parts = [own.with_tensors(*(next(left) for _ in own.tensors)) for own in self.families]
        return SideBySide(tuple(parts))

    def to(self, device: torch.device) -> "SideBySide":
        return SideBySide(tuple(own.to(device) for own in self.families))

    def select(self, columns: Int[Tensor, "k"]) -> "SideBySide":
        """Some of every family, in their order."""
        inside = zip(self.families, self.starts, self.counts, strict=True)
        parts = [(f, columns[(columns >= a) & (columns < a + n)] - a) for f, a, n in inside]
        return SideBySide(tuple(own.select(chosen) for own, chosen in parts))

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        found = []
        for side in zip(*(own.halves() for own in self.families), strict=True):
            columns, variances = zip(*side, strict=True)
            found.append((self._shifted(columns), torch.cat(variances)))
        return found

    def _shifted(self, columns: Sequence[Int[Tensor, "k"]]) -> Int[Tensor, "k"]:
        """Columns of every family as columns of the whole."""
        pairs = zip(self.starts, columns, strict=True)
        return torch.cat([start + own for start, own in pairs])

    def same(self, other: Columns) -> bool:
        return (
            isinstance(other, SideBySide)
            and len(self.families) == len(other.families)
            and all(a.same(b) for a, b in zip(self.families, other.families, strict=True))
        )

    def plain(self) -> dict[str, list]:
        return {"families": [own.plain() for own in self.families]}

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        return stacked([own.values(x).mT for own in self.families]).mT

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        return stacked([own.mean_squares() for own in self.families])

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [own.moments(x, y) for own in self.families]
        grams, crosses, sums = zip(*found, strict=True)
        total = stacked([own.unsqueeze(-1) for own in sums]).squeeze(-1)
        return self._blocks(grams, x), stacked(crosses), total

    def sums(self, x, y, weights):
        found = [own.sums(x, y, weights) for own in self.families]
        kept, crosses, sums = zip(*found, strict=True)
        grams = []
        for weight, *parts in zip(weights.mT, *kept, strict=True):
            own = [phi.gram(part) for phi, part in zip(self.families, parts, strict=True)]
            grams.append(self._blocks(own, x, weight))
        return grams, torch.cat(crosses), [torch.cat(parts) for parts in zip(*sums, strict=True)]

    def _blocks(
        self, grams: Sequence[Tensor], x: Tensor, weight: Tensor | None = None
    ) -> Float[Tensor, "*b M M"]:
        """The products of each family, and between two of them."""
        blocks = {(i, i): gram for i, gram in enumerate(grams)}
        for (i, own), (j, other) in combinations(enumerate(self.families), 2):
            blocks[i, j] = own.cross_gram(other, x, weight)
            blocks[j, i] = blocks[i, j].mT
        index = range(len(grams))
        rows = [stacked([blocks[i, j].mT for j in index]).mT for i in index]
        return stacked(rows)

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        return stacked([own.adjoint(x, y) for own in self.families])

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        parts = zip(self.families, w.split(self.counts, dim=-2), strict=True)
        return sum(own.apply(x, part) for own, part in parts)

    def multiplier(self, symbol, num_outputs, space):
        parts = [own.multiplier(symbol, num_outputs, space) for own in self.families]
        return torch.cat(parts, dim=-3)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        others, signs = zip(*(own.quarter_turn for own in self.families), strict=True)
        return self._shifted(others), torch.cat(signs)


def side_by_side(parts: Sequence[Columns]) -> tuple[Columns, list[Int[Tensor, "k"]]]:
    """The columns of all parts as one, and where among them those of each part are.

    Frequencies that are written out become one family, which comes first.
    """
    families = [own.families if isinstance(own, SideBySide) else (own,) for own in parts]
    every = list(chain.from_iterable(families))
    order = sorted(range(len(every)), key=lambda i: not _written_out(every[i]))
    count = sum(map(_written_out, every))
    whole, places = [every[i] for i in order[count:]], []
    if count:
        joined, places = _joined([every[i] for i in order[:count]])
        whole.insert(0, joined)
    phi = SideBySide(tuple(whole))
    index = torch.arange(phi.num_columns, device=phi.device).split(phi.counts)
    place = dict(zip(order, [*places, *index[bool(count) :]], strict=True))
    each = iter(range(len(every)))
    found = [torch.cat([place[next(each)] for _ in own]) for own in families]
    return (phi if len(whole) > 1 else whole[0]), found


def _written_out(columns: Columns) -> bool:
    return type(columns) is TrigColumns and isinstance(columns.phases, LinearPhases)


def _joined(parts: Sequence[TrigColumns]) -> tuple[TrigColumns, list[Int[Tensor, "k"]]]:
    """The columns of all frequencies, cosines of every part first."""
    omega = stacked([part.omega for part in parts])
    phi = TrigColumns.of(omega, all(part.sampled for part in parts))
    index = torch.arange(phi.phases.num_frequencies, device=omega.device)
    own = index.split([part.phases.num_frequencies for part in parts])
    return phi, [torch.cat(phi.columns_of(frequencies)) for frequencies in own]
