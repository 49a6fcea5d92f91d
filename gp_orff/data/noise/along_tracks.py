"""Noise along tracks: an offset, an Ornstein–Uhlenbeck process and white noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import NamedTuple

import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.mixtures import mixture_quantile

_LEVEL = 0.95
_CHUNK = 2**16  # quantiles that are computed at once


class TrackNoise(NamedTuple):
    """Variances of the noise of one component of a reading, and a time along the track."""

    noise: Float[Tensor, ""]  # white
    offset_variance: Float[Tensor, ""]  # of the offset that all readings of a track share
    correlated_variance: Float[Tensor, ""]
    correlation_time: Float[Tensor, ""]  # τ: the correlation at a lag t is exp(−t/τ)
    block_variance: Float[Tensor, ""]  # of what readings of one block share, and others do not

    @property
    def slow(self) -> Float[Tensor, ""]:
        """The variance of the offset and of the correlated noise of a new track."""
        return self.offset_variance + self.correlated_variance

    @property
    def total(self) -> Float[Tensor, ""]:
        """The variance of a new reading of a new track."""
        return self.noise + self.block_variance + self.slow


@singledispatch
def along_tracks(likelihood: Likelihood) -> TrackNoise | None:
    """The noise along tracks of a likelihood; None where readings are independent."""
    return None


@dataclass(frozen=True)
class SlowVariance:
    """The variance v of the offset and the correlated noise of a new track, integrated over.

    It has the value v_j with the probability w_j, so that a reading of a new track has the
    distribution Σ_j w_j N(m, s + v_j) about its mean m, with the variance s of all the rest.
    """

    values: Float[Tensor, "J"]
    weights: Float[Tensor, "J"]

    def sd(self, level: float) -> float:
        """The quantile of √v."""
        below = self.weights.cumsum(0) - 0.5 * self.weights
        place = int(torch.searchsorted(below, level).clamp_max(len(below) - 1))
        return self.values[place].sqrt().item()

    def quantile(self, level: float, variance: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """The z with Σ_j w_j Φ(z / √(s + v_j)) = level, for every s in `variance`."""
        values, weights = self.values.to(variance), self.weights.to(variance)
        quantiles = []
        for part in variance.flatten().split(_CHUNK):
            sds = (part + values.unsqueeze(-1)).sqrt()
            quantiles.append(mixture_quantile(weights, torch.zeros_like(sds), sds, level))
        return torch.cat(quantiles).view_as(variance)

    def matched(self, variance: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """The variance of the Gaussian that has the central 95 % interval of this distribution. Its
        variance may not exist, as that of Student's t distribution of two degrees of freedom."""
        if len(self.values) == 1:
            return variance + self.values.to(variance)
        upper = 0.5 + 0.5 * _LEVEL
        z = torch.special.ndtri(torch.tensor(upper, dtype=variance.dtype)).to(variance)
        return (self.quantile(upper, variance) / z).square()


@singledispatch
def slow_variance_of(likelihood: Likelihood) -> SlowVariance | None:
    """What a fit learned of the variance of new tracks; None where that is one value."""
    return None


class NoisesOfGroups(dict[str, Tensor]):
    """Σ of one reading by the label of the group; the noise along tracks of some groups, and what
    is known of its variance on new tracks."""

    def __init__(
        self,
        covariances: Mapping[str, Tensor],
        tracks: Mapping[str, TrackNoise],
        slow: Mapping[str, SlowVariance],
    ):
        super().__init__(covariances)
        self.tracks, self.slow = tracks, slow
