"""Every reading along tracks against its prediction from all others, from one posterior.

A reading y of a block of n has y | ȳ ~ N(m, V), where m depends on the mean ȳ_b of its block by A,
and the block means have the density of N(μ, K). With ȳ_b = ((n − 1) z + y)/n, both together are the
density of y given all others, z among them:

    Λ = (I − A/n)ᵀ V⁻¹ (I − A/n) + [K⁻¹]_bb/n² ,
    y − E[y | others] = Λ⁻¹ ((I − A/n)ᵀ V⁻¹ (y − m) + [K⁻¹(ȳ − μ)]_b/n) ,   Cov = Λ⁻¹ ,

and n = 1 leaves the last terms. With R = Cov[n̄] of a track and C = Cov[H f | ȳ],
K⁻¹ = R⁻¹ − R⁻¹ C R⁻¹ there. The truncated variance of a grid is shared by the readings of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Observations
from gp_orff.data.tracks.blocks import Track
from gp_orff.data.tracks.covariance import BlockNoise
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.along_tracks.signal import (
    Seen,
    block_means_under,
    covariance_with_block_means,
    in_components,
    joint_covariance,
    less_explained,
    noise_of_blocks,
    precision_of_track,
    residual_of_blocks,
)
from gp_orff.inference.conditioning import Inference
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.inference.left_out.readings import TrackReadings
from gp_orff.inference.robust import LeaveOneOut, chi_squared

_READINGS = 256  # at once


@torch.no_grad()
def leave_one_out_of_tracks(
    inference: Inference,
    readings: Sequence[TrackReadings],
    kernel: Kernel,
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    count: int,
) -> LeaveOneOut:
    """Every one of `count` readings given all others; a trained mean is that of all of them."""
    posterior = inference.posterior(kernel, noises, mean)
    constant = posterior.evidence.best_mean() if mean is None else mean
    pattern = readings[0].single.key.pattern
    columns = torch.tensor(pattern.columns)
    result = LeaveOneOut.empty(count, pattern.num_columns)
    for part in readings:
        blocks, first = part.in_blocks, 0
        for single, track in zip(part.single.tracks, blocks.tracks, strict=True):
            known = replace(blocks, tracks=(track,))
            others = Others(posterior.distribution, constant, noises, known)
            each = replace(part.single, tracks=(single,)).means
            rows = torch.arange(len(single.y), device=single.y.device)
            for some in rows.split(_READINGS):
                residual, covariance = others.residuals(each.take(some), some)
                index = part.index[first + some].cpu()
                one = torch.ones_like(residual[:, 0])
                result.record(index, columns, residual, covariance, one, chi_squared)
            first += len(rows)
    return result


@dataclass(frozen=True)
class Others:
    """What all other readings tell of those of one track."""

    distribution: FieldDistribution  # of the field without its mean, given all block means
    constant: Float[Tensor, "p"]
    noises: Noises
    known: TrackObservations  # the blocks of the track

    @property
    def _track(self) -> Track:
        return self.known.tracks[0]

    @cached_property
    def _noise(self) -> BlockNoise:
        return noise_of_blocks(self.distribution, self.known, self.noises)

    @cached_property
    def _precision(self) -> Float[Tensor, "t t"]:
        """R⁻¹."""
        return precision_of_track(self._noise)

    @cached_property
    def _seen(self) -> Seen:
        return block_means_under(self.distribution, self.known)

    @cached_property
    def _residual(self) -> Float[Tensor, "t v"]:
        """ȳ − E[H f]."""
        return residual_of_blocks(self.distribution, self.constant, self.known)

    def residuals(
        self, part: Observations, rows: Int[Tensor, "n"]
    ) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"]]:
        """Some readings, `rows` of the track, less their predictions from all others, and the
        covariances of these."""
        block, v = self._track.block[rows], part.pattern.num_values
        eye, precision = torch.eye(v).to(part.y), in_components(self._precision, v)
        shared = self._shared(rows)
        gain = shared @ self._precision  # G = k R⁻¹
        wide = in_components(gain, v)

        numbers, field = len(wide), self.distribution.split()[0]
        unexplained, vectors = less_explained(wide, part), part.pattern.num_outputs * len(part)

        def rows_of(both: Float[Tensor, "n*p+m j"]) -> Float[Tensor, "n*v+m j"]:
            return torch.cat([unexplained(both), both[vectors:]])

        latent = joint_covariance(field, part.x, self._seen, rows_of)  # of h(x) − G H f, and of H f
        explained = wide + latent[:numbers, numbers:] @ precision
        solved = precision - precision @ latent[numbers:, numbers:] @ precision  # K⁻¹
        variance = latent[:numbers, :numbers]

        each, n = torch.arange(len(rows)).to(rows), self._noise.times.count[block, None, None]
        own = self._noise.noise.total + self._noise.white + self._given(rows)
        own = own - (gain * shared).sum(-1)
        variance = _pick(variance, v, each, each) + own[:, None, None] * eye  # V
        less_own = eye - _pick(explained, v, each, block) / n  # I − A/n
        expected = part.apply(self.distribution.mean(part.x) + self.constant)
        residual = part.y - expected - gain @ self._residual
        of_block = (self._precision @ self._residual)[block].unsqueeze(-1) / n

        several = n.flatten() > 1
        information = _pick(solved, v, block, block) / n**2  # Λ
        weighted = torch.zeros_like(information)
        weighted[several] = torch.linalg.solve(variance[several], less_own[several]).mT
        information = information + weighted @ less_own
        covariance = torch.linalg.inv(information)
        return (covariance @ (weighted @ residual.unsqueeze(-1) + of_block)).squeeze(-1), covariance

    def _given(self, rows: Int[Tensor, "n"]) -> Float[Tensor, "n"] | float:
        """The known noise variances of readings; 0 where there are none."""
        return 0.0 if self._track.given is None else self._track.given[rows]

    def _shared(self, rows: Int[Tensor, "n"]) -> Float[Tensor, "n t"]:
        """k, the covariance of the noise of readings with that of the block means."""
        noise, block = self._noise.noise, self._track.block[rows]
        slow = self._track.clock[rows], self._track.clock, self._track.block
        shared = covariance_with_block_means(noise, *slow)
        white = (noise.noise + self._given(rows)) / self._noise.times.count[block]
        own = noise.block_variance + self._noise.white + white
        shared[torch.arange(len(rows)).to(rows), block] += own
        return shared


def _pick(
    matrix: Float[Tensor, "m*v k*v"], v: int, rows: Int[Tensor, "n"], columns: Int[Tensor, "n"]
) -> Float[Tensor, "n v v"]:
    """Some blocks of a matrix."""
    return matrix.unflatten(0, (-1, v)).unflatten(2, (-1, v))[rows, :, columns]
