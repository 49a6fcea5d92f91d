"""Block means of readings along tracks: linear observations of a field with correlated noise."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.along_tracks import TrackNoise
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import (
    Image,
    LinearObservations,
    Observations,
    TruncatedVariance,
)
from gp_orff.data.patterns import GroupKey
from gp_orff.data.statistics import Moments, Statistics, Weights
from gp_orff.data.tracks.averages import averaged, averaged_along, block_means
from gp_orff.data.tracks.blocks import Track, block_span, tracks_in_blocks
from gp_orff.data.tracks.covariance import BlockNoise, BlockTimes
from gp_orff.data.tracks.patterns import LineMeans
from gp_orff.data.tracks.whitening import WhitenedGram, batches_of
from gp_orff.features.columns import Columns
from gp_orff.symbols.base import Identity

_STRETCH = 16  # blocks of a sample
_TURN = 0.1  # of a unit vector, from the mean direction of its block
_FEW_NUMBERS = 8192  # along directions, which an exact kernel takes one by one
_MOST_NODES = 1000  # numbers at readings, up to which the exact kernel averages over all of them


class Places(NamedTuple):
    """Positions with their blocks, and with directions if readings have them."""

    x: Float[Tensor, "n d"]
    block: Int[Tensor, "n"]
    direction: Float[Tensor, "n p"] | None


@dataclass(frozen=True)
class TrackObservations(LinearObservations):
    """Block means of the readings of a group along tracks: ȳ_b = mean_i f(x_i) + ε̄_b, or with
    uᵢᵀ f(x_i) along a direction u_i for each reading."""

    key: GroupKey
    tracks: tuple[Track, ...]
    timed: bool  # whether the clock is time, or the length of the path
    span: float  # of a block, along the clock
    nodes: Places | None = None  # in the place of the readings

    @cached_property
    def x(self) -> Float[Tensor, "N d"]:
        """The positions of all readings."""
        return torch.cat([track.x for track in self.tracks])

    @cached_property
    def y(self) -> Float[Tensor, "T p"]:
        """The means of all blocks."""
        return torch.cat([track.y for track in self.tracks])

    @cached_property
    def direction(self) -> Float[Tensor, "N p"] | None:
        """The directions of all readings; None for readings of vectors."""
        if not isinstance(self.key.pattern, LineMeans):
            return None
        return torch.cat([track.direction for track in self.tracks])

    @cached_property
    def given(self) -> Float[Tensor, "N"] | None:
        """The known noise variances of all readings; None where all noise is learned."""
        if self.tracks[0].given is None:
            return None
        return torch.cat([track.given for track in self.tracks])

    @property
    def values(self) -> Float[Tensor, "M"]:
        return self.y.flatten()

    @property
    def one_by_one(self) -> bool:
        """Whether every reading is a block of its own."""
        return len(self.x) == len(self.y)

    @property
    def num_averaged(self) -> int:
        """The numbers of vectors that an exact kernel averages, of readings along directions in
        blocks of several; 0 for others."""
        if self.direction is None or self.one_by_one:
            return 0
        places = self.condensed.nodes or self
        return len(places.x) * self.key.pattern.num_outputs

    @cached_property
    def blocks(self) -> tuple[slice, ...]:
        """The blocks of every track."""
        spans, start = [], 0
        for track in self.tracks:
            spans.append(slice(start, start + len(track.y)))
            start += len(track.y)
        return tuple(spans)

    @cached_property
    def times(self) -> BlockTimes:
        """The times of the readings of every block."""
        pairs = zip(self.tracks, self.blocks, strict=True)
        block = torch.cat([track.block + span.start for track, span in pairs])
        return BlockTimes(torch.cat([track.clock for track in self.tracks]), block)

    @cached_property
    def means(self) -> Observations:
        """The block means, as observations at mean positions and along mean directions."""
        x, direction = self._mean(self.x), self.direction
        return Observations(
            self.key, x, self.y, direction=None if direction is None else self._mean(direction)
        )

    def _mean(self, values: Float[Tensor, "N k"]) -> Float[Tensor, "T k"]:
        return block_means(values, self.times.block, len(self.y))

    def in_blocks(self, span: float | None) -> "TrackObservations":
        """Readings, each in a block of its own, in blocks of about `span` along the clock; if None,
        of what `block_span` chooses. Up to 8192 readings along directions stay as they are, and
        more where directions turn within blocks."""
        clock, sizes, chosen = self.times.clock, [len(track.x) for track in self.tracks], span
        if span is None and self.direction is not None and len(self.x) <= _FEW_NUMBERS:
            return self
        if span is None:
            of_track = np.repeat(np.arange(len(sizes)), sizes)
            span = block_span(self.y.cpu().numpy(), clock.cpu().numpy(), of_track)
        if not span > 0:
            return self
        labels = [track.label for track in self.tracks]
        parts = self.x, self.y, clock, span, self.direction, self.given
        tracks = tracks_in_blocks(labels, sizes, *parts)
        blocks = replace(self, tracks=tracks, span=span)
        return self if chosen is None and blocks.turns else blocks

    @property
    def turns(self) -> bool:
        """Whether directions differ much within a block, so that its mean tells little."""
        if self.direction is None:
            return False
        away = self.direction - self.means.direction[self.times.block]
        return bool(away.norm(dim=-1).amax() > _TURN)

    def take(self, rows: Int[Tensor, "m"]) -> "TrackObservations":
        """Some blocks, in increasing order, with the share of the scatter that falls to them."""
        stops = torch.tensor([blocks.stop for blocks in self.blocks]).to(rows.device)
        present, counts = torch.searchsorted(stops, rows, right=True).unique_consecutive(
            return_counts=True
        )
        tracks = tuple(
            self.tracks[number].take(part - self.blocks[number].start)
            for number, part in zip(present.tolist(), rows.split(counts.tolist()), strict=True)
        )
        return replace(self, tracks=tracks)

    def sample(self, number: int) -> "TrackObservations":
        """About `number` blocks, in stretches of consecutive ones spread over all tracks."""
        stretches = [
            piece
            for blocks in self.blocks
            for piece in torch.arange(blocks.start, blocks.stop).split(_STRETCH)
        ]
        share = number / len(self.y)
        kept = [int(share * (i + 1)) > int(share * i) for i in range(len(stretches))]
        rows = [piece for piece, keep in zip(stretches, kept, strict=True) if keep]
        return self.take(torch.cat(rows or stretches[:1]).to(self.y.device))

    def to(self, device: torch.device) -> "TrackObservations":
        """The same observations on another device."""
        return replace(self, tracks=tuple(track.to(device) for track in self.tracks))

    @cached_property
    def condensed(self) -> "TrackObservations":
        """The same for an exact kernel, with two positions in the place of many of a block.

        They are at one standard deviation of its positions on both sides of their mean, along the
        direction in which the positions extend most. Few readings stay as they are.
        """
        count, width = len(self.y), self.key.pattern.num_outputs  # of vectors at the readings
        if len(self.x) * width <= _MOST_NODES or len(self.x) <= 2 * count:
            return self
        block = self.times.block
        centre = self.means.x
        away = self.x - centre[block]
        squares = (away.unsqueeze(-1) * away.unsqueeze(-2)).flatten(1)
        second = self._mean(squares).unflatten(1, (away.shape[-1], -1))
        values, vectors = torch.linalg.eigh(second)
        step = vectors[..., -1] * values[..., -1:].clamp_min(0).sqrt()
        nodes = torch.stack([centre - step, centre + step], dim=1).flatten(0, 1)
        index = torch.arange(count, device=block.device).repeat_interleave(2)
        direction = self.means.direction
        if direction is not None:
            direction = direction.repeat_interleave(2, dim=0)
        return replace(self, nodes=Places(nodes, index, direction))

    def apply(self, image: Image) -> Float[Tensor, "M k"]:
        x, block, direction = self.nodes or Places(self.x, self.times.block, self.direction)
        values = image(Identity(), (), x).unflatten(0, (len(x), -1))
        values = self.key.pattern.rows(values, direction)
        means = block_means(values.flatten(1), block, len(self.y))
        return means.unflatten(1, values.shape[1:]).flatten(0, 1)

    def noise(self, noises: Noises, white: Float[Tensor, ""] | float = 0.0) -> BlockNoise:
        """The noise of the block means; the features lack the variance `white`."""
        known = 0.0 if self.given is None else self._mean(self.given[:, None]).squeeze(-1)
        return BlockNoise.of(self.times, self._parameters(noises), white, known)

    def noise_covariance(self, noises: Noises, truncated: TruncatedVariance = None) -> Tensor:
        matrix = self.y.new_zeros(len(self.y), len(self.y), dtype=torch.float64)
        for rows, covariance in self.covariances(noises, truncated and truncated[0]):
            present = rows >= 0
            both = present.unsqueeze(-1) & present.unsqueeze(-2)
            places = (
                rows.unsqueeze(-1).expand_as(both)[both],
                rows.unsqueeze(-2).expand_as(both)[both],
            )
            matrix = matrix.index_put(places, covariance[both])
        return torch.kron(matrix, torch.eye(self.y.shape[-1]).to(matrix))

    def covariances(
        self, noises: Noises, truncated: Float[Tensor, "p p"] | None
    ) -> Iterator[tuple[Int[Tensor, "b t"], Float[Tensor, "b t t"]]]:
        """The blocks of tracks in batches, −1 in the place of those that a track lacks, and the
        covariances of their noise in one component; the features lack the variance `truncated`."""
        noise = self.noise(noises, _largest(truncated))
        return ((rows, noise.of_tracks(rows)) for rows in self._batches)

    def scatter_terms(self, noises: Noises) -> tuple[Float[Tensor, "p"], Float[Tensor, ""]]:
        """What the scatter within blocks adds to yᵀK⁻¹y, by component, and to log|K|.

        About a line, white noise has the variance σ², known noise that of a mean reading of its
        track, and r, over a block of length u τ, about σ_r² 2u / (15 + 2u).
        """
        noise = TrackNoise(*(value.double() for value in self._parameters(noises)))
        u = 2 * self.span / noise.correlation_time
        variance = noise.noise + noise.correlated_variance * u / (15 + u) + self._given_of_tracks
        squares, degrees = self._about_lines
        numbers = degrees * squares.shape[-1]
        terms = numbers * (variance.log() + math.log(2 * math.pi))
        return (squares / variance.unsqueeze(-1)).sum(0), terms.sum()

    @cached_property
    def _about_lines(self) -> tuple[Float[Tensor, "k p"], Float[Tensor, "k"]]:
        """The sums of squares of all residuals about lines, and their degrees of freedom; of every
        track where noise is known, else of all together."""
        squares = torch.stack([track.squares for track in self.tracks])
        degrees = squares.new_tensor([track.degrees for track in self.tracks])
        if self.given is None:
            return squares.sum(0, keepdim=True), degrees.sum(0, keepdim=True)
        return squares, degrees

    @cached_property
    def _given_of_tracks(self) -> Float[Tensor, "k"]:
        """The mean of the known noise variances of each track; 0 where none are known."""
        if self.given is None:
            return self.y.new_zeros(1)
        return torch.stack([track.given.mean() for track in self.tracks])

    @cached_property
    def _batches(self) -> list[Int[Tensor, "b t"]]:
        batches = batches_of([len(track.y) for track in self.tracks])
        return [rows.to(self.x.device) for rows in batches]

    def averages_along(self, phi: Columns) -> Float[Tensor, "k p*T"]:
        """mean_i φ(x_i) u_i of every block, of readings along directions u."""
        return averaged_along(phi, self.x, self.direction, self.times.block, len(self.y))

    def averages(self, phi: Columns) -> list[Float[Tensor, "b t k"]]:
        """[φ̄, ȳ, 1] of batches of tracks, with zeros in the place of blocks that a track lacks."""
        columns = averaged(phi, self.x, self.times.block, len(self.y))
        columns = torch.cat([columns, self.y, torch.ones_like(self.y[:, :1])], dim=-1)
        present = [(rows >= 0).unsqueeze(-1) for rows in self._batches]
        return [columns[r] * p for r, p in zip(self._batches, present, strict=True)]

    def statistics(
        self,
        phi: Columns,
        averages: Sequence[Float[Tensor, "b t k"]],
        noises: Noises,
        truncated: Float[Tensor, "p p"] | None,
    ) -> Statistics:
        """Σ over tracks of φ̄ᵀR⁻¹φ̄, φ̄ᵀR⁻¹ȳ and so on: statistics of unit noise.

        R is the noise covariance of the blocks of a track, in one component.
        """
        width, gram, logdet = self.y.shape[-1], 0, 0
        covariances = (covariance for _, covariance in self.covariances(noises, truncated))
        for covariance, columns in zip(covariances, averages, strict=True):
            products, change = WhitenedGram.apply(covariance, columns)
            gram, logdet = gram + products, logdet + change
        sizes = (phi.num_columns, width, 1)
        (c, z, s), (_, second, total), (_, _, mass) = (
            rows.split(sizes, dim=1) for rows in gram.split(sizes)
        )
        squares, scatter = self.scatter_terms(noises)
        count = len(self.y)
        weights = Weights(count, count, count, -logdet - scatter / width)
        moments = (Moments(c, s.squeeze(-1), mass.squeeze()),)
        second = second + torch.diag(squares)
        return Statistics(phi, self.key.pattern, moments, z, second, total.squeeze(-1), weights)

    def _parameters(self, noises: Noises) -> TrackNoise:
        tracks = getattr(noises, "tracks", {})
        if self.key.label not in tracks:
            raise ValueError(
                f"expected a TrackLikelihood for the tracks of group {self.key.label!r}, got "
                f"{'other noise' if self.key.label in noises else 'none'}"
            )
        return tracks[self.key.label]


def split(
    parts: Iterator[Observations | TrackObservations], tracks: list[TrackObservations]
) -> Iterator[Observations]:
    """The observations at single points; those along tracks are appended to the list."""
    for part in parts:
        if isinstance(part, TrackObservations):
            tracks.append(part)
        else:
            yield part


def require_none(tracks: Sequence[TrackObservations]) -> None:
    """Raise NotImplementedError for tracks: they have no statistics."""
    if tracks:
        raise NotImplementedError(
            "expected readings without track= for statistics, got tracks, whose noise is "
            "correlated; keep the readings, or save the model"
        )


def _largest(variance: Float[Tensor, "p p"] | None) -> Float[Tensor, ""] | float:
    return 0.0 if variance is None else variance.diagonal().amax()
