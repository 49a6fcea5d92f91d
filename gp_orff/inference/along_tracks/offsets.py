"""The offsets of tracks, given all their readings.

With the block means ȳ = H f + n̄ of a track, R = Cov[n̄], and the gain g = σ_b² 1ᵀ R⁻¹ of its offset
b, in one component,

    b = g (ȳ − H f) + independent noise of variance σ_b² − σ_b² g 1 ,

so that the posterior of b follows from that of the block means H f of the field.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.along_tracks.signal import (
    block_means_under,
    in_components,
    joint_covariance,
    noise_of_blocks,
    precision_of_track,
    residual_of_blocks,
)
from gp_orff.inference.conditioning import Inference


@dataclass(frozen=True)
class TrackOffsets:
    """What all readings tell of the offset of each track.

    Attributes:
        labels: the labels of the T tracks, as text.
        mean: the posterior means, (T, p), in the unit of y; (T, 1) of readings along directions.
        sd: the posterior standard deviations, likewise. The constant mean of the field is common to
            all tracks, so that the sum of their offsets is known less well than differences.
    """

    labels: tuple[str, ...]
    mean: Float[Tensor, "T v"]
    sd: Float[Tensor, "T v"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, label: object) -> tuple[Float[Tensor, "v"], Float[Tensor, "v"]]:
        """Mean and standard deviation of the offset of one track; KeyError for others."""
        if str(label) not in self.labels:
            some = ", ".join(map(repr, self.labels[:5]))
            raise KeyError(f"expected the label of a track, such as {some}, got {str(label)!r}")
        row = self.labels.index(str(label))
        return self.mean[row], self.sd[row]


@torch.no_grad()
def track_offsets(
    inference: Inference,
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    tracks: TrackObservations,
) -> TrackOffsets:
    """The offsets of the tracks of a group of the data of `inference`; `mean` as for `left_out`."""
    posterior = inference.posterior(kernel, noises, mean)
    constant = posterior.evidence.best_mean() if mean is None else mean
    field = posterior.under(mean)

    def offsets() -> Iterator[tuple[Float[Tensor, "v"], Float[Tensor, "v"]]]:
        for track in tracks.tracks:
            known = replace(tracks, tracks=(track,))
            noise, v = noise_of_blocks(field, known, noises), known.y.shape[-1]
            prior = noise.noise.offset_variance
            gain = prior * precision_of_track(noise).sum(0, keepdim=True)
            wide, seen = in_components(gain, v), block_means_under(field.split()[0], known)
            explained = joint_covariance(
                field.split()[0], known.x[:0], seen, lambda rows, wide=wide: wide @ rows
            )
            variance = prior * (1 - gain.sum()) + explained.diagonal()
            yield gain[0] @ residual_of_blocks(field, constant, known), variance.clamp_min(0).sqrt()

    means, deviations = zip(*offsets(), strict=True)
    labels = tuple(track.label for track in tracks.tracks)
    return TrackOffsets(labels, torch.stack(means), torch.stack(deviations))
