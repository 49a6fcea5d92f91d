"""Evidence and posterior of data under a kernel, by the exact kernel or by features."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.dataset import Data, Dataset
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.noise.covariances import Noise, Noises, noises_of
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.observations import LinearObservations, PointObservations, block_diagonal
from gp_orff.data.patterns import GroupKey
from gp_orff.features.assemble import check_domain, expand, expand_terms, require_separate
from gp_orff.features.expansion import Expansion
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.truncation import truncated_variance
from gp_orff.inference.distributions import (
    FieldDistribution,
    PlusConstant,
    PlusWhite,
    plus_white,
)
from gp_orff.inference.equations import (
    DenseRows,
    Group,
    NormalEquations,
    dense_evidence,
    dense_posterior,
    dual_equations,
    normal_equations,
    prefers_dual,
    whole_vectors,
)
from gp_orff.inference.exact_posterior import ExactPosterior, observed_covariance
from gp_orff.inference.overconfidence import check
from gp_orff.inference.quadratic import Evidence
from gp_orff.inference.weight_posterior import WeightPosterior
from gp_orff.kernels.tree import spectra_of, terms
from gp_orff.symbols.base import Identity, Symbol


@dataclass(frozen=True)
class Posterior:
    """The posterior of a field, with its evidence."""

    distribution: FieldDistribution  # of the field without its mean
    evidence: Evidence
    noises: Mapping[GroupKey, GroupNoise]  # of every group, as used


class Inference(ABC):
    """Data of a field; its mean is a constant that the caller chooses."""

    data: Data

    @abstractmethod
    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        """The evidence, differentiable in the hyperparameters."""

    @abstractmethod
    def posterior(
        self, kernel: Kernel, noises: Noises, mean: Float[Tensor, "p"] | None
    ) -> Posterior:
        """The posterior under a constant mean; if None, under that of largest evidence."""

    @abstractmethod
    def of(self, data: Data) -> "Inference":
        """The same inference with other data."""

    @abstractmethod
    def prepare(self) -> None:
        """Visit the data if one visit serves all hyperparameters; invalid data raise here."""

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        """Whether predictions at x are accurate; raises where the rule cannot make them so."""
        return True

    @property
    def truncated_share(self) -> float:
        """The share of the variance that the representation may truncate."""
        return 0.0

    def left_out(
        self, symbol: Symbol, kernel: Kernel, space: Sequence[int]
    ) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None:
        """The truncated variance of a symbol: white, and common to all points; None if none."""
        return None

    def apply(
        self,
        symbol: Symbol,
        distribution: FieldDistribution,
        kernel: Kernel,
        space: Sequence[int],
    ) -> FieldDistribution:
        """The distribution of a symbol of the field. White noise has no image under a symbol, which
        has a truncated variance of its own."""
        truncated = self.left_out(symbol, kernel, space)
        image = distribution.split()[0].apply(symbol, space)
        if truncated is None:
            return image
        delta, common = truncated
        return PlusWhite(PlusConstant(image, common) if common.any() else image, delta)

    def of_terms(
        self, kernel: Kernel, chosen: Sequence[int]
    ) -> tuple["Inference", Expansion | None]:
        """Inference on the frequencies of the `chosen` terms of a sum of kernels, and the features
        of the sum, in which the directions of all other terms are zero; None without features."""
        return self, None

    @property
    def num_values(self) -> float:
        return self.data.num_values


@dataclass(frozen=True)
class ExactInference(Inference):
    """Inference by the exact kernel: one Cholesky factorisation of an M×M matrix."""

    data: Dataset

    @cached_property
    def observed(self) -> Sequence[LinearObservations]:
        return (PointObservations(self.data.observations), *self.data.symbol_data)

    def of(self, data):
        return ExactInference(data)

    def prepare(self) -> None:
        _ = self.observed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        return dense_evidence(*self._covariance_and_design(kernel, noises))

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        covariance, design = self._covariance_and_design(kernel, noises)
        factor, alpha, evidence = dense_posterior(covariance, design, mean)
        distribution = ExactPosterior(kernel, self.observed, noises, factor, alpha, Identity(), ())
        keys = [part.key for part in self.data.observations]
        group_noises = {key: GroupNoise(group_noise(key, noises)) for key in keys}
        return Posterior(distribution, evidence, group_noises)

    def _covariance_and_design(
        self, kernel: Kernel, noises: Noises
    ) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M 1+p"]]:
        """Cov[H f] plus the covariance of the noise, and V."""
        observed, num_outputs = self.observed, next(iter(noises.values())).shape[-1]
        noise = block_diagonal([part.noise_covariance(noises) for part in observed])
        design = torch.cat([part.design(num_outputs) for part in observed])
        return observed_covariance(kernel, observed) + noise, design


@dataclass(frozen=True)
class FeatureInference(Inference):
    """Inference by features; statistics of columns that do not move are computed once."""

    data: Data
    draws: Sequence[Draw]
    known: FieldStatistics | None = None  # of the shared columns, if computed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        expansion, delta = self._expansion_and_delta(kernel)
        statistics = self._statistics_unless_dual(expansion)
        return self._equations(kernel, noises, expansion, delta, statistics).evidence()

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        expansion, delta = self._expansion_and_delta(kernel)
        statistics = self._statistics_unless_dual(expansion)

        def solve(
            features: Expansion, columns: Tensor | None = None
        ) -> tuple[WeightPosterior, Evidence]:
            """The posterior of the expansion, or of a part of it that has some of its columns."""
            every = statistics is None or columns is None
            sums = statistics if every else statistics.select(columns)
            return self._equations(kernel, noises, features, delta, sums).posterior(mean)

        weights, evidence = solve(expansion)
        points = torch.cat([part.x for part in self.data.survey.sample])
        check(weights, expansion, lambda *half: solve(*half)[0], points)
        group_noises = self._group_noises(noises, delta, statistics)
        return Posterior(plus_white(weights, delta), evidence, group_noises)

    @torch.no_grad()
    def num_features(self, kernel: Kernel) -> int:
        """F at the present hyperparameters."""
        return expand(kernel, self.draws, self.data.num_inputs).num_features

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        if self._has_shared_columns:
            return not self.draws[0].lattice.outside(x).any()
        check_domain(kernel, self.draws, self._corners, x)
        return True

    @torch.no_grad()
    def written_out(self, kernel: Kernel) -> bool:
        """Whether the dual algebra is used: every observation has its own truncated variance."""
        return self._prefers_dual(expand(kernel, self.draws, self.data.num_inputs))

    @property
    def truncated_share(self) -> float:
        return self.draws[0].lattice.tolerance.item() if self._has_shared_columns else 0.0

    def stale(self, kernel: Kernel) -> bool:
        """Whether a lengthscale has left the range that the frequencies serve."""
        return any(
            draw.ratio_outside_range(spectra_of(term))
            for draw, term in zip(self.draws, terms(kernel), strict=True)
        )

    def of(self, data):
        return FeatureInference(data, self.draws)

    def prepare(self) -> None:
        if self._has_shared_columns:
            _ = self.statistics

    @cached_property
    def statistics(self) -> FieldStatistics:
        """The statistics of the shared columns."""
        if self.known is not None:
            return self.known
        return self.data.statistics(self.draws[0].shared_columns())

    @torch.no_grad()
    def statistics_of(self, kernel: Kernel) -> FieldStatistics:
        """The statistics at the present hyperparameters."""
        return self._statistics_of(self._expansion_and_delta(kernel)[0])

    def _statistics_of(self, expansion: Expansion) -> FieldStatistics:
        return self.statistics if self._has_shared_columns else self.data.statistics(expansion.phi)

    def truncated(
        self, kernel: Kernel, expansion: Expansion | None = None
    ) -> Float[Tensor, "p p"] | None:
        """δ: the variance that a grid truncates at every point; None if none."""
        variances = truncated_variance(Identity(), kernel, self.draws, (), expansion)
        return None if variances is None else variances[0]

    @torch.no_grad()
    def truncation_ratios(self, kernel: Kernel, noises: Noises) -> dict[GroupKey, float]:
        """δ over the noise variance, by group, for an observation of mean weight."""
        delta = self.truncated(kernel)
        variance = 0.0 if delta is None else delta.diagonal().mean().item()
        return {key: variance / noise for key, noise in self.data.local_noises(noises).items()}

    def left_out(self, symbol, kernel, space):
        return truncated_variance(symbol, kernel, self.draws, space)

    def of_terms(self, kernel, chosen):
        every = terms(kernel)
        require_separate(every, self.draws, chosen)
        summands = [
            term if i in chosen else term.scaled(torch.zeros_like(term.outputscale))
            for i, term in enumerate(every)
        ]
        expansion = expand_terms(summands, self.draws, self.data.num_inputs).double().general()
        return replace(self, draws=[self.draws[i] for i in chosen]), expansion

    def _prefers_dual(self, expansion: Expansion) -> bool:
        """Whether the dual algebra is cheaper; unlike shared statistics, it evaluates features
        anew."""
        if not self.data.revisitable:
            return False
        points = self.num_values / expansion.num_outputs
        points = (2 if self._has_shared_columns else 1) * points
        if not prefers_dual(expansion, points):  # data that may not fit into memory are not read
            return False
        whole = whole_vectors(self.data.observations) and not self.data.symbol_data
        return prefers_dual(expansion, points, whole)

    def _statistics_unless_dual(self, expansion: Expansion) -> FieldStatistics | None:
        """The statistics; None where the dual algebra is cheaper."""
        return None if self._prefers_dual(expansion) else self._statistics_of(expansion)

    @cached_property
    def _point_observations(self) -> PointObservations:
        return PointObservations(self.data.observations)

    def _equations(
        self,
        kernel: Kernel,
        noises: Noises,
        expansion: Expansion,
        delta: Float[Tensor, "p p"] | None,
        statistics: FieldStatistics | None,
    ) -> NormalEquations:
        """The normal equations, with the truncated variance in the noise of each observation."""
        symbol_data = [
            DenseRows.of(part, expansion, noises, self.left_out(part.symbol, kernel, part.space))
            for part in self.data.symbol_data
        ]
        if statistics is None:
            points = self._point_observations
            return dual_equations(expansion, points, symbol_data, noises, delta)
        noise = self._group_noises(noises, delta, statistics)
        groups = [
            Group(group, Noise.of(noise[key].weighted)) for key, group in statistics.groups.items()
        ]
        return normal_equations(expansion, groups, symbol_data)

    def _group_noises(
        self,
        noises: Noises,
        delta: Float[Tensor, "p p"] | None,
        statistics: FieldStatistics | None,
    ) -> dict[GroupKey, GroupNoise]:
        """The noise of every group; in statistics, δ has weights as Σ has."""
        if statistics is None:
            keys = [part.key for part in self.data.observations]
            return {key: GroupNoise(group_noise(key, noises), delta) for key in keys}
        return {
            key: GroupNoise(group_noise(key, noises, delta, group.masses, group.count))
            for key, group in statistics.groups.items()
        }

    @property
    def _corners(self) -> Float[Tensor, "2 d"]:
        return torch.tensor(self.data.box, dtype=torch.float64).mT

    @property
    def _has_shared_columns(self) -> bool:
        return self.draws[0].shared_columns() is not None

    def _expansion_and_delta(self, kernel: Kernel) -> tuple[Expansion, Tensor | None]:
        if not self._has_shared_columns:
            check_domain(kernel, self.draws, self._corners)
        expansion = expand(kernel, self.draws, self.data.num_inputs).double()
        return expansion, self.truncated(kernel, expansion)


def log_marginal_likelihood(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
) -> Float[Tensor, ""]:
    """log p(y) of all data; without a `mean`, under the constant mean of largest evidence."""
    evidence = inference.evidence(kernel, noises_of(kernel, likelihoods))
    return evidence.log_density(mean, inference.num_values) + inference.data.elbo_correction
