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
from gp_orff.data.sources import Arrays, InMemory
from gp_orff.inference.conditioning import ExactInference
from gp_orff.inference.left_out import Block, LeftOut
from gp_orff.inference.left_out.conditioning import predicted
from gp_orff.models.state import ModelState

_LEARNED = 1200  # numbers around a block
_OF_ALL, _FEW, _MANY = 20, 5000, 2**20  # readings of chunks: a share, and at least and at most
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


def first_readings(data: Dataset) -> Dataset:
    """Few readings as they are, and the first of chunks or of many: a twentieth or so, with their
    learned weights."""
    if data.is_small and all(isinstance(source, InMemory | Arrays) for source in data.sources):
        return data
    sample, every = data.survey.sample, data.survey.num_points
    if sum(map(len, sample)) == every and data.weights is None:
        return Dataset.in_memory(sample)
    most = min(max(every // _OF_ALL, _FEW), _MANY)
    parts, count = [], 0
    for part in data.unweighted().visit():
        parts.append(part)
        count += len(part)
        if count >= most:
            break
    kept = Dataset.in_memory(parts)
    return kept if data.weights is None else replace(kept, weights=data.weights[: len(parts)])


def left_out_of_surroundings(
    state: ModelState,
    data: Dataset,
    constant: Float[Tensor, "p"],
    blocks: Sequence[Block],
    half: Float[Tensor, "d"],
) -> Iterator[list[LeftOut]]:
    """The tested readings of every block, and the field there given the readings around it.

    Args:
        state: of a kernel with a covariance.
        data: readings at single points, in memory.
        constant: the mean of the field.
        blocks: of the sample of the survey of these data.
        half: half the width of a block, about.
    """
    kernel, noises = state.e_step.kernel, state.e_step.noises
    x = torch.cat([part.x for part in data.survey.sample])
    wanted = _LEARNED * len(x) / data.survey.num_values  # of the sample, around a block
    for block in blocks:
        place = _place(x, block.left_out.to(x.device), half, wanted)
        parts = [part for part in map(place.around, data.visit()) if len(part)]
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
