"""Readings along tracks left out by blocks: what the rest tells of the field, and of their noise.

A reading of a track that is left out whole is one of a new track. Where other readings of its track
stay, they tell its offset, and something of its correlated noise.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.along_tracks.signal import (
    Signal,
    block_means_under,
    joint_covariance,
    parameters_of,
    residual_of_blocks,
)
from gp_orff.inference.conditioning import Inference
from gp_orff.inference.left_out.conditioning import Block, LeftOut
from gp_orff.inference.left_out.readings import TrackReadings, rest_of


@torch.no_grad()
def left_out_of_tracks(
    inference: Inference,
    readings: Sequence[TrackReadings],
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Block],
) -> Iterator[list[LeftOut]]:
    """As `left_out`, for readings along tracks: conditioning on the rest anew for every block.

    Mean and variance are those of the field and of the noise that readings of a track share.
    """
    for block in blocks:
        rest = rest_of(readings, block.left_out)
        posterior = inference.of(Dataset.in_memory(rest)).posterior(kernel, noises, mean)
        constant = posterior.evidence.best_mean() if mean is None else mean
        given = {part.key: {track.label: track for track in part.tracks} for part in rest}
        results = []
        for part in readings:
            tested = part.take(block.tested[part.index])
            if len(tested):
                known = given.get(part.single.key, {})
                signal = Signal(posterior.under(mean), constant, noises, known)
                results.append(of_signal(signal, tested))
        yield results


@torch.no_grad()
def tracks_left_out(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    tested: Iterable[TrackObservations],
) -> Iterator[tuple[Float[Tensor, "m"], Float[Tensor, "m m"]]]:
    """Block means less their predictions from all other tracks, and the covariances of these.

    Args:
        inference: of a `Dataset` with tracks.
        kernel, noises, mean: as for `left_out`.
        tested: blocks of some tracks of these data; their tracks are left out whole, at once.
    """
    for part in tested:
        names = {track.label for track in part.tracks}
        rest = [
            _without(held, names) if held.key == part.key else held
            for held in inference.data.tracks
        ]
        data = replace(inference.data, tracks=tuple(held for held in rest if held.tracks))
        posterior = inference.of(data).posterior(kernel, noises, mean)
        constant = posterior.evidence.best_mean() if mean is None else mean
        field, white = posterior.under(mean).split()
        seen = block_means_under(field, part)
        latent = joint_covariance(field, part.x[:0], seen, lambda rows: rows)
        truncated = None if white is None else (white, white)
        yield (
            residual_of_blocks(field, constant, part).flatten(),
            latent + part.noise_covariance(noises, truncated),
        )


def _without(held: TrackObservations, names: Collection[str]) -> TrackObservations:
    return replace(held, tracks=tuple(t for t in held.tracks if t.label not in names))


def of_signal(signal: Signal, readings: TrackReadings) -> LeftOut:
    """The readings, with mean and variance of their signal, and the variance of its noise."""
    single = readings.single
    parameters = parameters_of(single, signal.noises)
    white = (parameters.noise + parameters.block_variance).expand_as(single.y)
    white = white if single.given is None else white + single.given.unsqueeze(-1)
    joint = partial(signal.covariance, single)
    mean, variance = signal.mean(single), signal.variance(single)
    new = [single.y.new_full((len(t.y),), t.label not in signal.given) for t in single.tracks]
    return LeftOut(readings.observations, mean, variance, joint, white, torch.cat(new).bool())
