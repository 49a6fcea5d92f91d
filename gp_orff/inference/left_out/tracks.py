"""Readings along tracks left out by blocks: what the rest tells of the field, and of their noise.

A reading of a track that is left out whole is one of a new track. Where other readings of its track
stay, they tell its offset, and something of its correlated noise.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.tracks.readings import TrackReadings, rest_of
from gp_orff.inference.conditioning import Inference
from gp_orff.inference.left_out.conditioning import Block, LeftOut
from gp_orff.inference.left_out.signal import Signal


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
                signal = Signal(posterior.distribution, constant, noises, known)
                results.append(of_signal(signal, tested))
        yield results


def of_signal(signal: Signal, readings: TrackReadings) -> LeftOut:
    """The readings, with mean and variance of their signal, and the variance of its noise."""
    single = readings.single
    parameters = single.noise(signal.noises).noise
    white = (parameters.noise + parameters.block_variance).expand_as(single.y)
    joint = partial(signal.covariance, single)
    mean, variance = signal.mean(single), signal.variance(single)
    return LeftOut(readings.observations, mean, variance, joint, white)
