"""Data under a kernel: evidence and posterior at any hyperparameters, by one of two algebras."""

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
from gp_orff.features.accuracy import accuracy
from gp_orff.features.assemble import check_domain, expand, expand_terms
from gp_orff.features.expansion import Expansion
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.truncation import left_out
from gp_orff.inference.distributions import (
    FieldDistribution,
    PlusConstant,
    PlusWhite,
    plus_white,
)
from gp_orff.inference.equations import (
    DenseRows,
    Dual,
    Group,
    NormalEquations,
    dense_evidence,
    dense_posterior,
    normal_equations,
    prefers_dual,
)
from gp_orff.inference.exact_posterior import ExactPosterior, observed_covariance
from gp_orff.inference.overconfidence import check
from gp_orff.inference.quadratic import Evidence
from gp_orff.inference.weight_posterior import WeightPosterior
from gp_orff.kernels.tree import spectra_of, terms
from gp_orff.symbols.base import Identity, Symbol


@dataclass(frozen=True)
class Posterior:
    """What conditioning leaves."""

    distribution: FieldDistribution  # of the field without its mean
    evidence: Evidence
    noises: Mapping[GroupKey, GroupNoise]  # as conditioned on


class Inference(ABC):
    """Readings of a field; its mean is a constant that the caller chooses."""

    data: Data

    @abstractmethod
    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        """Differentiable in the hyperparameters."""

    @abstractmethod
    def posterior(
        self, kernel: Kernel, noises: Noises, mean: Float[Tensor, "p"] | None
    ) -> Posterior:
        """Under a constant mean; that of largest evidence where none is given."""

    @abstractmethod
    def of(self, data: Data) -> "Inference":
        """Other data, represented in the same way."""

    @abstractmethod
    def prepare(self) -> None:
        """Visit the data where that is done once: what fails, fails here."""

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        """Whether predictions at x are right; raises where they cannot be made so."""
        return True

    @property
    def missing(self) -> float:
        """The share of the variance that the representation was allowed to leave out."""
        return 0.0

    def left_out(
        self, symbol: Symbol, kernel: Kernel, space: Sequence[int]
    ) -> tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None:
        """Variance of a symbol that its image lacks: white, and common to all points."""
        return None

    def apply(
        self,
        symbol: Symbol,
        distribution: FieldDistribution,
        kernel: Kernel,
        space: Sequence[int],
    ) -> FieldDistribution:
        """The distribution of a symbol of the field: what is white in the field is not in its
        image, which has a truncated variance of its own."""
        missing = self.left_out(symbol, kernel, space)
        image = distribution.split()[0].apply(symbol, space)
        if missing is None:
            return image
        delta, common = missing
        return PlusWhite(PlusConstant(image, common) if common.any() else image, delta)

    def of_terms(
        self, kernel: Kernel, chosen: Sequence[int]
    ) -> tuple["Inference", Expansion | None]:
        """The frequencies of some terms of a sum; and the features of the whole kernel with the
        directions of the other terms zero."""
        return self, None

    @abstractmethod
    def describe(self, kernel: Kernel) -> str:
        """How the kernel is represented, in words."""

    @property
    def num_values(self) -> float:
        return self.data.num_values


@dataclass(frozen=True)
class ExactInference(Inference):
    """By the exact kernel: one Cholesky factorisation of all numbers square."""

    data: Dataset

    @cached_property
    def observed(self) -> Sequence[LinearObservations]:
        return (PointObservations(self.data.observations), *self.data.symbol_data)

    def of(self, data):
        return ExactInference(data)

    def prepare(self) -> None:
        _ = self.observed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        return dense_evidence(*self._model(kernel, noises))

    def describe(self, kernel: Kernel) -> str:
        return f"exact kernel, {self.num_values} numbers"

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        factor, alpha, evidence = dense_posterior(*self._model(kernel, noises), mean)
        distribution = ExactPosterior(kernel, self.observed, noises, factor, alpha, Identity(), ())
        own = {p.key: GroupNoise(group_noise(p.key, noises)) for p in self.data.observations}
        return Posterior(distribution, evidence, own)

    def _model(
        self, kernel: Kernel, noises: Noises
    ) -> tuple[Float[Tensor, "M M"], Float[Tensor, "M 1+p"]]:
        """Cov[H f] with the noise, and V."""
        observed, num_outputs = self.observed, next(iter(noises.values())).shape[-1]
        noise = block_diagonal([own.noise_covariance(noises) for own in observed])
        design = torch.cat([own.design(num_outputs) for own in observed])
        return observed_covariance(kernel, observed) + noise, design


@dataclass(frozen=True)
class FeatureInference(Inference):
    """By features: statistics of the columns, computed once where frequencies do not move."""

    data: Data
    draws: Sequence[Draw]
    known: FieldStatistics | None = None  # of the shared columns, where they have been computed

    def evidence(self, kernel: Kernel, noises: Noises) -> Evidence:
        expansion, delta = self._model(kernel)
        statistics = self._summed(expansion)
        return self._equations(kernel, noises, expansion, delta, statistics).evidence()

    @torch.no_grad()
    def posterior(self, kernel, noises, mean):
        expansion, delta = self._model(kernel)
        statistics = self._summed(expansion)

        def conditioned(
            part: Expansion, columns: Tensor | None = None
        ) -> tuple[WeightPosterior, Evidence]:
            """Of the expansion, or of a part of it with some of its columns."""
            all_of_them = statistics is None or columns is None
            own = statistics if all_of_them else statistics.select(columns)
            return self._equations(kernel, noises, part, delta, own).posterior(mean)

        whole, evidence = conditioned(expansion)
        points = torch.cat([own.x for own in self.data.survey.sample])
        check(whole, expansion, lambda *part: conditioned(*part)[0], points)
        own = self._group_noises(noises, delta, statistics)
        return Posterior(plus_white(whole, delta), evidence, own)

    @torch.no_grad()
    def num_features(self, kernel: Kernel) -> int:
        """F."""
        return expand(kernel, self.draws, self.data.num_inputs).num_features

    def describe(self, kernel: Kernel) -> str:
        features = self.num_features(kernel)
        achieved = "; ".join(map(str, accuracy(kernel, self.draws)))
        return f"F = {features} features" + (f" on a grid: {achieved}" if achieved else "")

    def in_domain(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        if self._constant:
            return not self.draws[0].lattice.outside(x).any()
        check_domain(kernel, self.draws, self._corners, x)
        return True

    @torch.no_grad()
    def written_out(self, kernel: Kernel) -> bool:
        """Whether the readings are few: each has a truncated variance of its own."""
        return self._prefers_dual(expand(kernel, self.draws, self.data.num_inputs))

    @property
    def missing(self) -> float:
        return self.draws[0].lattice.tolerance.item() if self._constant else 0.0

    def stale(self, kernel: Kernel) -> bool:
        """Whether a lengthscale has left the range of the frequencies."""
        return any(
            own.left_range(spectra_of(term))
            for own, term in zip(self.draws, terms(kernel), strict=True)
        )

    def of(self, data):
        return FeatureInference(data, self.draws)

    def prepare(self) -> None:
        if self._constant:
            _ = self.statistics

    @cached_property
    def statistics(self) -> FieldStatistics:
        """C, Z, … of the shared columns."""
        if self.known is not None:
            return self.known
        return self.data.statistics(self.draws[0].shared_columns())

    @torch.no_grad()
    def statistics_of(self, kernel: Kernel) -> FieldStatistics:
        """At the hyperparameters as they are."""
        return self._statistics_of(self._model(kernel)[0])

    def _statistics_of(self, expansion: Expansion) -> FieldStatistics:
        return self.statistics if self._constant else self.data.statistics(expansion.phi)

    def truncated(
        self, kernel: Kernel, expansion: Expansion | None = None
    ) -> Float[Tensor, "p p"] | None:
        """The variance of every point that a grid does not hold."""
        missing = left_out(Identity(), kernel, self.draws, (), expansion)
        return None if missing is None else missing[0]

    def left_out(self, symbol, kernel, space):
        return left_out(symbol, kernel, self.draws, space)

    def of_terms(self, kernel, chosen):
        found = [
            term if i in chosen else term.scaled(torch.zeros_like(term.outputscale))
            for i, term in enumerate(terms(kernel))
        ]
        whole = expand_terms(found, self.draws, self.data.num_inputs).double().general()
        return replace(self, draws=[self.draws[i] for i in chosen]), whole

    def _prefers_dual(self, expansion: Expansion) -> bool:
        """Constant statistics need no features of the data, which the dual writes out."""
        if not self.data.revisitable:
            return False
        points = self.num_values / expansion.num_outputs
        return prefers_dual(expansion, (2 if self._constant else 1) * points)

    def _summed(self, expansion: Expansion) -> FieldStatistics | None:
        """The statistics; None where the readings are better written out."""
        return None if self._prefers_dual(expansion) else self._statistics_of(expansion)

    @cached_property
    def _points(self) -> PointObservations:
        return PointObservations(self.data.observations)

    def _equations(
        self,
        kernel: Kernel,
        noises: Noises,
        expansion: Expansion,
        delta: Float[Tensor, "p p"] | None,
        statistics: FieldStatistics | None,
    ) -> NormalEquations:
        """With the truncated variance in the noise of each observation."""
        symbol_data = [
            DenseRows.of(own, expansion, noises, self.left_out(own.symbol, kernel, own.space))
            for own in self.data.symbol_data
        ]
        if statistics is None:
            missing = None if delta is None else (delta, torch.zeros_like(delta))
            points = DenseRows.of(self._points, expansion, noises, missing)
            return Dual(expansion, DenseRows.joined([points, *symbol_data]))
        noise = self._group_noises(noises, delta, statistics)
        groups = [
            Group(own, Noise.of(noise[key].weighted)) for key, own in statistics.groups.items()
        ]
        return normal_equations(expansion, groups, symbol_data)

    def _group_noises(
        self,
        noises: Noises,
        delta: Float[Tensor, "p p"] | None,
        statistics: FieldStatistics | None,
    ) -> dict[GroupKey, GroupNoise]:
        """In statistics the truncated variance has weights, as Σ has."""
        if statistics is None:
            keys = [part.key for part in self.data.observations]
            return {key: GroupNoise(group_noise(key, noises), delta) for key in keys}
        return {
            key: GroupNoise(group_noise(key, noises, delta, own.masses, own.count))
            for key, own in statistics.groups.items()
        }

    @property
    def _corners(self) -> Float[Tensor, "2 d"]:
        return torch.tensor(self.data.box, dtype=torch.float64).mT

    @property
    def _constant(self) -> bool:
        return self.draws[0].shared_columns() is not None

    def _model(self, kernel: Kernel) -> tuple[Expansion, Tensor | None]:
        if not self._constant:
            check_domain(kernel, self.draws, self._corners)
        expansion = expand(kernel, self.draws, self.data.num_inputs).double()
        return expansion, self.truncated(kernel, expansion)


def log_marginal_likelihood(
    inference: Inference,
    kernel: Kernel,
    likelihoods: Mapping[str, Likelihood],
    mean: Float[Tensor, "p"] | None,
) -> Float[Tensor, ""]:
    """log p(y), total; the constant mean of largest evidence where none is given."""
    evidence = inference.evidence(kernel, noises_of(kernel, likelihoods))
    return evidence.log_density(mean, inference.num_values) + inference.data.elbo_correction
