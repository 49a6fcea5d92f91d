"""Noise along tracks: an offset, an Ornstein–Uhlenbeck process and white noise."""

from collections.abc import Mapping
from functools import singledispatch
from typing import NamedTuple

from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor


class TrackNoise(NamedTuple):
    """Variances of the noise of one component of a reading, and a time along the track."""

    noise: Float[Tensor, ""]  # white
    offset_variance: Float[Tensor, ""]  # of the offset that all readings of a track share
    correlated_variance: Float[Tensor, ""]
    correlation_time: Float[Tensor, ""]  # τ: the correlation at a lag t is exp(−t/τ)
    block_variance: Float[Tensor, ""]  # of what readings of one block share, and others do not

    @property
    def total(self) -> Float[Tensor, ""]:
        """The variance of a new reading of a new track."""
        slow = self.offset_variance + self.correlated_variance
        return self.noise + self.block_variance + slow


@singledispatch
def along_tracks(likelihood: Likelihood) -> TrackNoise | None:
    """The noise along tracks of a likelihood; None where readings are independent."""
    return None


class NoisesOfGroups(dict[str, Tensor]):
    """Σ of one reading by the label of the group, and the noise along tracks of some groups."""

    def __init__(self, covariances: Mapping[str, Tensor], tracks: Mapping[str, TrackNoise]):
        super().__init__(covariances)
        self.tracks = tracks
