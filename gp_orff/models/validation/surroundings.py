"""A few blocks of many readings, predicted by the exact kernel from the readings around them.

A calibrated model is calibrated given any of its readings. Those next to a block decide what it
predicts there, and are as dense as all are, so that errors which they share show.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.observations import Observations
from gp_orff.data.tracks.observations import split
from gp_orff.data.workers.summaries import fold_sources
from gp_orff.inference.conditioning import ExactInference
from gp_orff.inference.left_out import Block, LeftOut
from gp_orff.inference.left_out.conditioning import predicted
from gp_orff.models.state import ModelState

_LEARNED = 1200  # numbers around a block
_FEWEST = 4  # readings of a sample, from whose distance that of more is told


@dataclass(frozen=True)
class Place:
    """A block, and the readings around it, by their distance from its centre in half widths."""

    centre: Float[Tensor, "d"]
    half: Float[Tensor, "d"]
    inner: float
    outer: float

    def distance(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        """The largest difference along any axis."""
        return ((x - self.centre.to(x)).abs() / self.half.to(x)).amax(-1)

    def around(self, part: Observations) -> Observations:
        """The readings around the block."""
        distance = self.distance(part.x)
        return part.take(torch.nonzero((distance > self.inner) & (distance <= self.outer))[:, 0])


@dataclass(frozen=True)
class Found:
    """The readings around every block."""

    parts: tuple[tuple[Observations, ...], ...]

    def __add__(self, other: "Found") -> "Found":
        return Found(tuple(a + b for a, b in zip(self.parts, other.parts, strict=True)))


@dataclass(frozen=True)
class ReadingsAround:
    """A summary of observations: those around some blocks."""

    places: tuple[Place, ...]

    def __call__(self, parts: Iterator[Observations], number: int) -> Found:
        found = [[place.around(part) for place in self.places] for part in split(parts, [])]
        columns = zip(*found, strict=True) if found else [()] * len(self.places)
        return Found(tuple(tuple(part for part in column if len(part)) for column in columns))

    @property
    def name(self) -> object:
        return ["around", [[p.centre, p.half, p.inner, p.outer] for p in self.places]]


def left_out_of_surroundings(
    state: ModelState,
    constant: Float[Tensor, "p"],
    blocks: Sequence[Block],
    half: Float[Tensor, "d"],
) -> Iterator[list[LeftOut]]:
    """The tested readings of every block, and the field there given the readings around it.

    Args:
        state: of a kernel with a covariance, and of data at single points that can be visited.
        constant: the mean of the field.
        blocks: of the sample of the survey of these data.
        half: half the width of a block, about.
    """
    data, kernel, noises = state.data, state.e_step.kernel, state.e_step.noises
    x = torch.cat([part.x for part in data.survey.sample])
    wanted = _LEARNED * len(x) / data.survey.num_values  # of the sample, around a block
    places = tuple(_place(x, block.left_out.to(x.device), half, wanted) for block in blocks)
    around = ReadingsAround(places)
    weighted = data.weights is not None
    found = around(data.visit(), 0) if weighted else fold_sources(data.sources, around)
    for block, place, parts in zip(blocks, places, found.parts, strict=True):
        if parts:
            learned = Dataset.in_memory(_nearest(parts, place))
            inference = ExactInference.merging(kernel, noises, learned)
            posterior = inference.posterior(kernel, noises, constant)
            tested = Dataset.in_memory(_tested(data.survey.sample, block))
            every = block._replace(tested=torch.ones_like(block.tested))
            yield predicted(tested, every, posterior, constant)


def _place(
    x: Float[Tensor, "n d"], inside: Bool[Tensor, "n"], half: Float[Tensor, "d"], wanted: float
) -> Place:
    """The place of a block of a sample, with about twice as many readings around it as wanted."""
    centre = 0.5 * (x[inside].amin(0) + x[inside].amax(0))
    place = Place(centre, half, 0.0, math.inf)
    distance = place.distance(x)
    others, inner = distance[~inside], distance[inside].max().item()
    rank = min(len(others), _FEWEST + round(2 * wanted))
    return replace(place, inner=inner, outer=others.kthvalue(rank).values.item())


def _nearest(parts: Sequence[Observations], place: Place) -> list[Observations]:
    """The readings nearest to a block, of as many numbers as are learned from."""
    distance = [place.distance(part.x) for part in parts]
    of_numbers = torch.cat(
        [own.repeat_interleave(part.y.shape[-1]) for own, part in zip(distance, parts, strict=True)]
    )
    most = of_numbers.kthvalue(min(_LEARNED, len(of_numbers))).values
    near = [
        part.take(torch.nonzero(own <= most)[:, 0])
        for own, part in zip(distance, parts, strict=True)
    ]
    return [part for part in near if len(part)]


def _tested(sample: Sequence[Observations], block: Block) -> list[Observations]:
    """The tested readings of a block, whose rows are those of the sample."""
    chosen = block.tested.split([len(part) for part in sample])
    pairs = zip(sample, chosen, strict=True)
    parts = [part.take(torch.nonzero(rows)[:, 0].to(part.x.device)) for part, rows in pairs]
    return [replace(part, index=torch.arange(len(part))) for part in parts if len(part)]
