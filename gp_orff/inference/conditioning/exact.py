"""Inference by the exact kernel."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float, Int
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.noise.covariances import Noise, Noises
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.observations import (
    LinearObservations,
    Observations,
    PointObservations,
    block_diagonal,
)
from gp_orff.data.patterns import GroupKey
from gp_orff.data.repeats.merged import Scatter, merged_at, site_labels
from gp_orff.data.repeats.nodes import Nodes, SiteMeans
from gp_orff.data.tracks.observations import TrackObservations
from gp_orff.inference.conditioning.base import Inference, Posterior, Residuals
from gp_orff.inference.conditioning.merging import (
    changes_within,
    exceeds,
    merge_distance,
    reach_of_sites,
)
from gp_orff.inference.equations import (
    dense_evidence,
    dense_posterior,
    mean_and_response,
)
from gp_orff.inference.exact import Tiles, covariance_of_tiles, tiled_evidence
from gp_orff.inference.exact_posterior import ExactPosterior, observed_covariance
from gp_orff.inference.quadratic import Evidence, log_determinant, seen_by
from gp_orff.kernels.cholesky import cholesky
from gp_orff.kernels.pairs.rows import in_closed_form
from gp_orff.kernels.tree import terms
from gp_orff.symbols.base import Identity


class Whitened(NamedTuple):
    """Data under every kernel of a batch: the factors L of their covariances, and L⁻¹V."""

    factor: Float[Tensor, "*b M M"]
    half: Float[Tensor, "*b M 1+p"]
    evidence: Evidence


Changes = Callable[..., Sequence[Float[Tensor, "m"]]]
"""(data, levels) ↦ the changes of the field within the sites of every group, or within the parts
of sites that are halved, over the noise variance."""

_LEVELS = 2  # of sites that are halved
_MUCH_CHANGE = 0.01  # of the field within a site, over the noise variance of its mean


@dataclass(frozen=True)
class ExactInference(Inference):
    """Inference by the exact kernel: one Cholesky factorisation of an M×M matrix.

    Repeated positions are merged: the matrix has a row for each value at a site.
    """

    data: Dataset
    reach: tuple[float, ...] | None = None  # of a site, by axis; None: nothing is merged
    changes: Changes | None = None  # of the field within the sites; None: they are negligible

    @classmethod
    def merging(cls, kernel: Kernel, noises: Noises, data: Dataset) -> "ExactInference":
        """Inference on the sites that the prior cannot divide, or that the user asked for."""
        reach = None if data.tracks else reach_of_sites(kernel, noises, data)
        if not (data.repeats.changes and reach is not None and any(reach)):
            return cls(data, reach)
        detached = {label: noise.detach() for label, noise in noises.items()}
        return cls(data, reach, partial(changes_within, kernel, detached, reach))

    @cached_property
    def _sites(self) -> list[Int[np.ndarray, "n"]]:
        """The site of every record of every group."""
        parts = self.data.observations
        if self.reach is None:
            return [np.arange(len(part)) for part in parts]
        return [site_labels(part, self.reach) for part in parts]

    @cached_property
    def _means(self) -> tuple[list[Observations], list[Scatter]]:
        """The means at the sites of every group, whose noise is that of their records."""
        if self.reach is None:
            return self.data.observations, []
        return merged_at(self.data.observations, self._sites)

    @cached_property
    def _merged(self) -> tuple[list[Observations], list[Scatter]]:
        """The same, where the changes of the field within sites count as noise of the means."""
        means, scatter = self._means
        if self.changes is not None:
            means = _with_changes(means, self._changes_of_sites)
        return means, scatter

    @cached_property
    def _changes_of_sites(self) -> Sequence[Float[Tensor, "m"]]:
        return [torch.zeros(1)] if self.changes is None else self.changes(self.data)

    @cached_property
    def observed(self) -> Sequence[LinearObservations]:
        points = [PointObservations(self._merged[0])] if self._merged[0] else []
        return (*points, *(part.condensed for part in self.data.tracks), *self.data.symbol_data)

    @cached_property
    def resolved(self) -> Sequence[LinearObservations]:
        """The observations for a posterior: where the field changes by much of the noise of a mean
        within its site, the mean is one of four parts, and what changes within these is noise.

        As noise of its own, the change within a site hides what the mean tells of the field there:
        variances near readings would be up to three times too large.
        """
        divided = self._divided
        if not any(own.any() for own in divided):
            return self.observed
        halved = self.changes(self.data, levels=_LEVELS)
        changes = [
            torch.where(own, less, change)
            for own, less, change in zip(divided, halved, self._changes_of_sites, strict=True)
        ]
        means = _with_changes(self._means[0], changes)
        return (SiteMeans(means, self._nodes(divided)), *self.observed[1:])

    @cached_property
    def _divided(self) -> list[Bool[Tensor, "m"]]:
        """Whether the field changes within a site by much of the noise of its mean."""
        if self.changes is None:
            return []
        pairs = zip(self._means[0], self._changes_of_sites, strict=True)
        return [
            (1.0 if part.weight is None else part.weight) * change > _MUCH_CHANGE
            for part, change in pairs
        ]

    def _nodes(self, divided: Sequence[Bool[Tensor, "m"]]) -> list[Nodes]:
        """The parts of all sites, of which some are halved."""
        nodes = []
        for part, labels, own in zip(self.data.observations, self._sites, divided, strict=True):
            weight = torch.ones_like(part.y[:, 0]) if part.weight is None else part.weight
            site = torch.from_numpy(labels).to(part.x.device)
            nodes.append(Nodes.of(part.x, weight, site, self.reach, _LEVELS, own))
        return nodes

    @property
    def size(self) -> int:
        """M, the rows of the matrix: the numbers that decide the cost. Means of numbers along
        directions count as the whole vectors that are averaged."""
        vectors = sum(part.num_averaged for part in self.data.tracks)
        return vectors + sum(
            len(part.values)
            for part in self.observed
            if not (isinstance(part, TrackObservations) and part.num_averaged)
        )

    @property
    def mean_change(self) -> float:
        """The mean change of the field within the sites, over the noise variance."""
        return torch.cat(list(self._changes_of_sites)).mean().item()

    @property
    def note(self) -> str:
        """A sentence on what is merged; empty if nothing is."""
        before = sum(map(len, self.data.observations))
        after = sum(map(len, self._merged[0]))
        if after == before:
            return ""
        places = "one place" if after == 1 else f"{after} places"
        reach = ", ".join(f"{length:.3g}" for length in self.reach)
        within = f", within {reach} along each input," if any(self.reach) else ""
        return f"{before} records at {places}{within} were merged; merge=0 keeps all apart"

    def stale(self, kernel: Kernel, noises: Noises) -> bool:
        """Whether the prior tells apart positions that were merged since it could not."""
        repeats = self.data.repeats
        if repeats.distance is not None or self.reach is None or not any(self.reach):
            return False
        indistinct = merge_distance(kernel, noises, self.data)
        return exceeds(self.reach, [repeats.width * length for length in indistinct])

    @cached_property
    def _tiles(self) -> Tiles:
        return Tiles.of([*self._merged[0], *(part.means for part in self.data.tracks)])

    def of(self, data):
        return replace(self, data=data)

    def prepare(self) -> None:
        _ = self.observed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        if self._in_tiles(kernel):
            parts = self._design(noises), self._noise_by_group(noises)
            evidence = tiled_evidence(kernel, self._tiles, *parts)
        else:
            evidence = dense_evidence(*self._covariance_and_design(kernel, noises))
        return self._with_scatter(evidence, noises)

    def serves_batches(self, kernel: Kernel) -> bool:
        """Whether `in_batches` serves the data: vectors and components of the field, each a number
        of its own, under a kernel in closed form."""
        single = not self.data.tracks and not self.data.symbol_data and not self._merged[1]
        return single and self.resolved is self.observed and in_closed_form(kernel)

    @torch.no_grad()
    def in_batches(self, kernel: Kernel, noises: Noises) -> Whitened:
        """The evidence under every kernel of a batch, each with its noise."""
        covariance = covariance_of_tiles(kernel, self._tiles, self._noise_by_group(noises))
        factor, design = cholesky(covariance), self._design(noises)
        half = torch.linalg.solve_triangular(factor, design, upper=False)
        seen = seen_by(design, covariance.diagonal(dim1=-1, dim2=-2))
        evidence = Evidence(half.mT @ half, log_determinant(factor), seen)
        return Whitened(factor, half, evidence)

    def cross(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> Float[Tensor, "*b M n*p"]:
        """Cov[H f, f(x)] under every kernel of a batch."""
        return self._tiles.cross(kernel, x, terms(kernel)[0].num_outputs)

    def _in_tiles(self, kernel: Kernel) -> bool:
        """Whether every number is one of a single point, and the covariance needs no graph."""
        single = all(part.one_by_one for part in self.data.tracks) and not self.data.symbol_data
        return single and _is_plain(kernel, self._merged[0])

    def _noise_by_group(self, noises: Noises) -> list[Tensor]:
        """The noise of every group, at each point or of all numbers of tracks."""
        groups = [
            group.noise(GroupNoise(group_noise(group.key, noises))) for group in self._merged[0]
        ]
        return groups + [part.noise_covariance(noises) for part in self.data.tracks]

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        covariance, design = self._lower(kernel, noises), self._design(noises)
        with warnings.catch_warnings():  # the evidence of tiles rounds otherwise, and needed none
            warnings.simplefilter("ignore", NumericalWarning)
            factor, solved, evidence = dense_posterior(covariance, design, mean)
        alpha = mean_and_response(solved)
        distribution = ExactPosterior(kernel, self.resolved, noises, factor, *alpha, Identity(), ())
        keys = [part.key for part in self.data.observations]
        group_noises = {key: GroupNoise(group_noise(key, noises)) for key in keys}
        return Posterior(distribution, self._with_scatter(evidence, noises), group_noises)

    def _lower(self, kernel: Kernel, noises: Noises) -> Float[Tensor, "M M"]:
        """Cov[H f] plus the covariance of the noise, on and below the diagonal."""
        if self.resolved is self.observed and self._in_tiles(kernel):
            return covariance_of_tiles(kernel, self._tiles, self._noise_by_group(noises))
        return observed_covariance(kernel, self.resolved) + _noise(self.resolved, noises)

    @torch.no_grad()
    def covariance(self, kernel: Kernel, noises: Noises) -> Float[Tensor, "M M"]:
        """Cov[H f] plus the covariance of the noise."""
        return _symmetric(self._lower(kernel, noises))

    @torch.no_grad()
    def prior_covariance(self, kernel: Kernel) -> Float[Tensor, "M M"]:
        """Cov[H f]."""
        if self.resolved is self.observed and self._in_tiles(kernel):
            return _symmetric(self._tiles.covariance(kernel))
        return _symmetric(observed_covariance(kernel, self.resolved))

    def constants(self, noises: Noises) -> Float[Tensor, "M p"]:
        """H: the constant mean of each output as the rows of `covariance` observe it."""
        num_outputs = next(iter(noises.values())).shape[-1]
        return torch.cat([part.design(num_outputs)[:, 1:] for part in self.resolved])

    @torch.no_grad()
    def residuals(self, posterior):
        if self.data.tracks or self.data.symbol_data:
            return None
        return dict(self._latent(posterior))

    @torch.no_grad()
    def latent_of_sites(self, posterior):
        if self.changes is None or self.data.tracks or self.data.symbol_data:
            return None
        return dict(self._latent(posterior))

    def _latent(self, posterior: Posterior) -> Iterator[tuple[GroupKey, Residuals]]:
        """With S = K + N, the noise of means ȳ with the covariance N₀ = N, or less if the field
        changes within sites, has the mean N₀ S⁻¹(ȳ − c) and the covariance N₀ − N₀ S⁻¹ N₀; the
        residual of a record is larger by y − ȳ."""
        field: ExactPosterior = posterior.distribution
        inverse, start = torch.cholesky_inverse(field.factor), 0
        for part, labels, means in zip(
            self.data.observations, self._sites, self._means[0], strict=True
        ):
            noise = means.noise(posterior.noises[means.key])
            span = slice(start, start + means.y.numel())
            width, start = means.y.shape[-1], span.stop
            alpha = field.alpha[span].unflatten(0, (-1, width))
            blocks = inverse[span, span].unflatten(0, (-1, width)).unflatten(2, (-1, width))
            blocks = blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            site = torch.from_numpy(labels).to(part.x.device)
            residual = part.y - means.y[site] + (noise @ alpha)[site].squeeze(-1)
            yield part.key, Residuals(residual, (noise - noise @ blocks @ noise)[site])

    def _with_scatter(self, evidence: Evidence, noises: Noises) -> Evidence:
        """The evidence of all records from that of the means at the sites."""
        sites = (
            scatter.terms(Noise.of(group_noise(scatter.key, noises))) for scatter in self._merged[1]
        )
        blocks = (part.scatter_terms(noises) for part in self.data.tracks)
        return evidence.with_scatter(chain(sites, blocks))

    def _covariance_and_design(
        self, kernel: Kernel, noises: Noises
    ) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M 1+p"]]:
        """Cov[H f] plus the covariance of the noise, and V."""
        covariance = observed_covariance(kernel, self.observed) + _noise(self.observed, noises)
        return covariance, self._design(noises)

    def _design(self, noises: Noises) -> Float[Tensor, "M 1+p"]:
        num_outputs = next(iter(noises.values())).shape[-1]
        return torch.cat([part.design(num_outputs) for part in self.observed])


def _noise(observed: Sequence[LinearObservations], noises: Noises) -> Float[Tensor, "M M"]:
    """The covariance of the noise."""
    return block_diagonal([part.noise_covariance(noises) for part in observed])


def _with_changes(
    means: Sequence[Observations], changes: Sequence[Float[Tensor, "m"]]
) -> list[Observations]:
    """The means with the noise σ² (1/W + c), for the changes c within their sites."""
    return [
        part if part.weight is None else part.weighted(1 / (1 + part.weight * change))
        for part, change in zip(means, changes, strict=True)
    ]


def has_covariance(kernel: Kernel, data: Data) -> bool:
    """Whether the kernel has a covariance in closed form, not only a spectral density."""
    if not all(term.factor.closed_form for term in terms(kernel)):
        return False
    x = torch.tensor([[low for low, _ in data.box]]).to(next(kernel.parameters()))
    try:
        with torch.no_grad():
            kernel(x, x).to_dense()
    except NotImplementedError:
        return False
    return True


def _symmetric(lower: Float[Tensor, "M M"]) -> Float[Tensor, "M M"]:
    """The symmetric matrix with this lower triangle."""
    return lower.tril() + lower.tril(-1).mT


def _is_plain(kernel: Kernel, observations: Sequence[Observations]) -> bool:
    """Whether only leaves of the graph, the parameters of one kernel, determine Cov[H f]."""
    fixed = [tensor for part in observations for tensor in (part.x, part.direction)]
    return (
        not kernel.batch_shape
        and all(parameter.is_leaf for parameter in kernel.parameters())
        and not any(tensor is not None and tensor.requires_grad for tensor in fixed)
    )
