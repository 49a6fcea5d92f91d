"""Data under a kernel: evidence and posterior at any hyperparameters, by one of two algebras."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff import inference
from gp_orff.expansion import Expansion
from gp_orff.frequencies import Draw
from gp_orff.inference import Evidence, Noise, dense_evidence, prefers_dual, white_blocks
from gp_orff.posterior import FieldLaw, dual_posterior, statistics_posterior
from gp_orff.resolution import check_domain, expand, spectra_of
from gp_orff.statistics import Statistics
from gp_orff.terms import terms
from gp_orff.trig import by_chunks
from gp_orff.truncation import accuracy, truncated_variance
from gp_orff.trust import check


class Observations(ABC):
    """Vectors y observed at x; the mean of y is a constant that the caller chooses."""

    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N p"]

    @abstractmethod
    def evidence(self, kernel: Kernel, noise: Float[Tensor, "p p"]) -> Evidence:
        """Differentiable in the hyperparameters."""

    @abstractmethod
    def posterior(
        self, kernel: Kernel, noise: Float[Tensor, "p p"], mean: Float[Tensor, "p"]
    ) -> tuple[FieldLaw, Float[Tensor, "p p"] | None]:
        """The law of the field without its mean, and the truncated variance it lacks."""

    def covers(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        """Whether predictions at x are right; raises where they cannot be made so."""
        return True

    @abstractmethod
    def describe(self, kernel: Kernel) -> str:
        """How the kernel is represented, in words."""

    @property
    def num_values(self) -> int:
        return self.y.numel()


@dataclass(frozen=True)
class ExactObservations(Observations):
    """By the exact kernel: one Cholesky factorisation of N·p numbers square."""

    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N p"]

    def evidence(self, kernel: Kernel, noise: Float[Tensor, "p p"]) -> Evidence:
        return dense_evidence(self._noisy(kernel, noise), self.y)

    def describe(self, kernel: Kernel) -> str:
        return f"exact kernel, {self.num_values} numbers"

    @torch.no_grad()
    def posterior(self, kernel, noise, mean):
        factor = psd_safe_cholesky(self._noisy(kernel, noise))
        residual = (self.y - mean).reshape(-1, 1)
        return ExactLaw(kernel, self.x, factor, torch.cholesky_solve(residual, factor)), None

    def _noisy(self, kernel: Kernel, noise: Tensor) -> Float[Tensor, "N*p N*p"]:
        eye = torch.eye(len(self.x), dtype=noise.dtype, device=noise.device)
        return to_dense(kernel(self.x)) + white_blocks(eye, noise)


@dataclass(frozen=True)
class ExactLaw(FieldLaw):
    """The exact posterior: K(x, X)α and K(x, x) − VᵀV."""

    kernel: Kernel
    train: Float[Tensor, "N d"]
    factor: Float[Tensor, "N*p N*p"]
    alpha: Float[Tensor, "N*p 1"]

    @property
    def num_outputs(self) -> int:
        return self.factor.shape[-1] // len(self.train)

    def mean(self, x: Tensor) -> Tensor:
        def part(points: Float[Tensor, "m d"]) -> Float[Tensor, "m p"]:
            return (self._cross(points) @ self.alpha).reshape(len(points), -1)

        return by_chunks(part, x.double(), self._width)

    def covariance(self, x: Tensor) -> Tensor:
        x = x.double()
        white = self._whitened(x)
        return to_dense(self.kernel(x)) - white.mT @ white

    def root(self, x: Tensor) -> Tensor:
        return psd_safe_cholesky(self.covariance(x))

    def _variance(self, x: Tensor) -> Tensor:
        prior = to_dense(self.kernel(x, diag=True))
        return (prior - self._whitened(x).square().sum(0)).unflatten(0, (len(x), -1))

    @property
    def _width(self) -> int:
        return self.factor.shape[-1] * self.num_outputs

    def _whitened(self, x: Tensor) -> Float[Tensor, "N*p n*p"]:
        return torch.linalg.solve_triangular(self.factor, self._cross(x).mT, upper=False)

    def _cross(self, x: Tensor) -> Float[Tensor, "n*p N*p"]:
        return to_dense(self.kernel(x, self.train))


@dataclass(frozen=True)
class FeatureObservations(Observations):
    """By features: statistics of the columns, computed once where frequencies do not move."""

    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N p"]
    draws: Sequence[Draw]

    def evidence(self, kernel: Kernel, noise: Float[Tensor, "p p"]) -> Evidence:
        expansion, noise, _ = self._model(kernel, noise)
        if self._constant and not self._prefers_dual(expansion):
            return inference.statistics_evidence(expansion, self.statistics, noise)
        return inference.evidence(expansion, self.x, self.y, noise)

    @torch.no_grad()
    def posterior(self, kernel, noise, mean):
        expansion, noise, white = self._model(kernel, noise)
        dual = self._prefers_dual(expansion)
        statistics = None
        if not dual:
            statistics = self._statistics_of(expansion).centred(mean)

        def law(part: Expansion, columns: Tensor | None = None) -> FieldLaw:
            """Of the expansion, or of a part of it with some of its columns."""
            if dual:
                return dual_posterior(part, self.x, self.y - mean, noise)
            chosen = statistics if columns is None else statistics.select(columns)
            return statistics_posterior(part, chosen, noise)

        whole = law(expansion)
        check(whole, expansion, law, self.x)
        return whole, white

    @torch.no_grad()
    def describe(self, kernel: Kernel) -> str:
        features = expand(kernel, self.draws, self.x.shape[-1]).num_features
        achieved = "; ".join(map(str, accuracy(kernel, self.draws)))
        return f"F = {features} features" + (f" on a grid: {achieved}" if achieved else "")

    def covers(self, kernel: Kernel, x: Float[Tensor, "n d"]) -> bool:
        if self._constant:
            return not self.draws[0].lattice.outside(x).any()
        check_domain(kernel, self.draws, self.x, x)
        return True

    def stale(self, kernel: Kernel) -> bool:
        """Whether a lengthscale has left the range of the frequencies."""
        return any(
            own.left_range(spectra_of(term))
            for own, term in zip(self.draws, terms(kernel), strict=True)
        )

    @cached_property
    def statistics(self) -> Statistics:
        """C, Z, … of the shared columns."""
        return Statistics.of(self.x, self.y, self.draws[0].shared_columns())

    def _statistics_of(self, expansion: Expansion) -> Statistics:
        if self._constant:
            return self.statistics
        return Statistics.of(self.x, self.y, expansion.phi)

    @torch.no_grad()
    def truncated(self, kernel: Kernel) -> Float[Tensor, "p p"] | None:
        """The variance of every point that a grid does not hold."""
        expansion = expand(kernel, self.draws, self.x.shape[-1])
        return truncated_variance(kernel, self.draws, expansion)

    def _prefers_dual(self, expansion: Expansion) -> bool:
        """Constant statistics need no features of the data, which the dual writes out."""
        return prefers_dual(expansion, (2 if self._constant else 1) * len(self.x))

    @property
    def _constant(self) -> bool:
        return self.draws[0].shared_columns() is not None

    def _model(self, kernel: Kernel, noise: Tensor) -> tuple[Expansion, Noise, Tensor | None]:
        if not self._constant:
            check_domain(kernel, self.draws, self.x)
        expansion = expand(kernel, self.draws, self.x.shape[-1]).double()
        white = truncated_variance(kernel, self.draws, expansion)
        return expansion, Noise.of(noise if white is None else noise + white), white
