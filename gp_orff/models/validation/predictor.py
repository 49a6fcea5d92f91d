"""Predict left-out readings, block by block, and score the predictions."""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass

import torch
from gpytorch.means import Mean
from torch import Tensor

from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.observations import Observations
from gp_orff.data.sources import varying_mean
from gp_orff.data.workers.passes import fold, shares
from gp_orff.data.workers.work import Work
from gp_orff.inference.conditioning import Inference
from gp_orff.inference.left_out import Block, LeftOut, left_out, left_out_of_tracks
from gp_orff.inference.left_out.readings import TrackReadings
from gp_orff.models.fitting.robust_em import EStep
from gp_orff.models.validation.cross_validation import CrossValidation
from gp_orff.models.validation.scores import Scores


@dataclass(frozen=True)
class Predictor:
    """Predicts readings of the data of an inference from the others."""

    inference: Inference  # of a `Dataset` in memory whose observations have an `index`
    e_step: EStep
    prior_mean: Mean
    along: Sequence[TrackReadings] = ()  # all readings, where they are along tracks

    @torch.no_grad()
    def left_out(self, blocks: Sequence[Block]) -> Iterator[list[LeftOut]]:
        """The tested readings of every block, and the field there given the rest.

        Raises:
            ValueError: a block that leaves nothing to learn from.
        """
        device = next(self.e_step.kernel.parameters()).device
        blocks = [block.to(device) for block in blocks]
        observed = [part.observations for part in self.along] or list(self.inference.data.visit())
        for block in blocks:
            _require_rest(observed, block)
        parts = self.e_step.kernel, self.e_step.noises, self.e_step.mean
        if self.along:
            return left_out_of_tracks(self.inference, self.along, *parts, blocks)
        return left_out(self.inference, *parts, blocks)

    def _name(self) -> list[object]:
        """What tells this work from others of the same call."""
        return ["cross validation", [[part.x, part.y] for part in self.inference.data.visit()]]

    @torch.no_grad()
    def cross_validation(self, blocks: Sequence[Block]) -> CrossValidation:
        """The scores of all blocks with readings.

        Raises:
            ValueError: a block that leaves nothing to learn from, or no numbers to predict.
        """
        work = Work(tuple, ScoresOfBlocks(self), len)
        scored = fold(work, self._name, shares(blocks)) or []
        if not scored:
            raise ValueError(
                "expected blocks with observed numbers, got none in any of them; drop points "
                "without observations"
            )
        names, columns = zip(*scored, strict=True)
        numbers = [torch.full_like(own[0], i, dtype=torch.long) for i, own in enumerate(columns)]
        return CrossValidation(
            names, torch.cat(numbers), *map(torch.cat, zip(*columns, strict=True))
        )

    def scores(self, found: LeftOut) -> list[Tensor]:
        """Row, column, value, mean, sd, log density, CRPS and PIT of each number of a group."""
        part, mean, latent = found.part, found.mean, found.variance.clamp_min(0)
        noise = found.noise
        if noise is None:
            noise = part.noise(GroupNoise(group_noise(part.key, self.e_step.noises)))
            noise = noise.diagonal(dim1=-1, dim2=-2)
        noise = noise.flatten()
        model = self.e_step.heavy_tailed.get(part.key.label)
        nu = math.inf if model is None else model.deg_free
        residual, latent = (part.y - mean).flatten(), latent.flatten()
        heavier = 1.0 if math.isinf(nu) else nu / (nu - 2)
        variance, label = latent + heavier * noise, part.key.label
        noises = self.e_step.noises
        slow = noises.slow.get(label)
        if slow is None:
            scores = Scores.of(residual, latent, noise, nu)
        else:  # `variance` has the present value of that of new tracks, and not those integrated
            new = found.on_new_track.repeat_interleave(part.pattern.num_values)
            rest = variance - new * noises.tracks[label].slow
            scores = Scores.of_mixture(residual, rest, new.to(rest), slow.values, slow.weights)
            variance = torch.where(new, slow.matched(rest), rest)
        trend = part.apply(varying_mean(self.prior_mean, part.x, part.pattern.num_outputs))
        values = part.pattern.num_values
        column = torch.tensor(part.pattern.columns).to(part.index).repeat(len(part))
        return [
            part.index.repeat_interleave(values),
            column,
            (part.y + trend).flatten(),
            (mean + trend).flatten(),
            variance.sqrt(),
            *astuple(scores),
        ]


@dataclass(frozen=True)
class ScoresOfBlocks:
    """The name of every block with readings, and its scores in the order of their rows."""

    predictor: Predictor

    @torch.no_grad()
    def __call__(self, blocks: Sequence[Block], number: int) -> list[tuple[Hashable, list[Tensor]]]:
        found = []
        for block, parts in zip(blocks, self.predictor.left_out(blocks), strict=True):
            scores = [self.predictor.scores(part) for part in parts]
            if scores:
                values = [torch.cat(column).cpu() for column in zip(*scores, strict=True)]
                order = torch.argsort(values[0], stable=True)
                found.append((block.name, [column[order] for column in values]))
        return found


def _require_rest(observed: Iterable[Observations], block: Block) -> None:
    """Raise if a block contains all readings."""
    if all(block.left_out[part.index].all() for part in observed):
        raise ValueError(
            "expected blocks that leave readings to learn from, got block "
            f"{block.name!r} with all of them; give smaller blocks, or blocks='auto'"
        )
