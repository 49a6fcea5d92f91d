"""The Gaussian posterior of the feature weights θ, and of the field Φ(x)θ they give.

Three forms of the same law, one for each algebra of `inference`. All are immutable, in float64.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from functools import cached_property, singledispatch

import torch
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff import trig
from gp_orff.expansion import Expansion, FeatureExpansion, KroneckerExpansion
from gp_orff.inference import (
    Noise,
    kronecker_equations,
    noisy_covariance,
    normal_equations,
    prefers_dual,
)
from gp_orff.quadratic import diagonalised, masked, unrotated
from gp_orff.statistics import Statistics


class FieldLaw(ABC):
    """The Gaussian law of a field f, evaluated anywhere."""

    num_outputs: int
    batch_shape = torch.Size()

    @abstractmethod
    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """E[f(x)]."""

    def variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """Var[f_j(x)], in chunks of points."""
        return trig.by_chunks(self._variance, x.double(), self._width)

    @abstractmethod
    def covariance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p n*p"]:
        """Cov[f(x)]."""

    @abstractmethod
    def root(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p q"]:
        """R with R Rᵀ = Cov[f(x)]."""

    @property
    @abstractmethod
    def _width(self) -> int:
        """How many numbers the variance at one point takes."""

    @abstractmethod
    def _variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """The variance at few points."""


@dataclass(frozen=True)
class WeightPosterior(FieldLaw):
    """θ | y ~ N(mean, Cov)."""

    expansion: Expansion
    weights: Float[Tensor, "*b 2*D p"]  # of the columns: E[f(x)] = φ(x) weights

    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        return self.expansion.phi.apply(x, self.weights)

    @property
    def num_outputs(self) -> int:
        return self.expansion.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        return self.weights.shape[:-2]

    @property
    def _width(self) -> int:
        return self.expansion.num_features * self.expansion.num_outputs

    @abstractmethod
    def weight_covariance(self, v: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b F k"]:
        """Cov[θ] v."""

    @property
    def requires_grad(self) -> bool:
        """Whether the posterior is still tied to the hyperparameters' graph."""
        return self.weights.requires_grad

    def detached(self) -> "WeightPosterior":
        """The same numbers, cut from the hyperparameters' graph."""
        expansion = self.expansion.rebuild(*(t.detach() for t in self.expansion.tensors))
        tensors = {
            f.name: getattr(self, f.name).detach()
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, expansion=expansion, **tensors)

    def _per_point(self, values: Float[Tensor, "*b n*p"]) -> Float[Tensor, "*b n p"]:
        return values.unflatten(-1, (-1, self.expansion.num_outputs))


@dataclass(frozen=True)
class PrimalPosterior(WeightPosterior):
    """E[θ] = A⁻¹b, Cov[θ] = A⁻¹."""

    factor: Float[Tensor, "*b F F"]  # Cholesky factor of A

    def variance(self, x: Tensor) -> Tensor:
        full = self.expansion
        if self.batch_shape or not full.phi.folds(x, full.num_features):
            return super().variance(x)
        columns = []  # Var[f_j(x)] = φ P_j φᵀ, P_j = A⁻¹ ∘ m_j m_jᵀ on the columns of features
        for m in full.directions.mT:
            form = self._inverse * (m.unsqueeze(-1) * m)
            form = full.scatter(full.scatter(form).mT)
            columns.append(full.phi.quadratic(x, form).clamp_min(0))
        return torch.stack(columns, dim=-1)

    @cached_property
    def _inverse(self) -> Float[Tensor, "F F"]:
        return torch.cholesky_inverse(self.factor)

    def weight_covariance(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v, self.factor)

    def root(self, x: Tensor) -> Tensor:
        features = self.expansion.features(x.double())
        return torch.linalg.solve_triangular(self.factor.mT, features, upper=True, left=False)

    def covariance(self, x: Tensor) -> Tensor:
        root = self.root(x)
        return root @ root.mT

    def _variance(self, x: Tensor) -> Tensor:
        return self._per_point(self.root(x).square().sum(-1))


@dataclass(frozen=True)
class KroneckerPosterior(WeightPosterior):
    """Separable kernels: in the basis U that diagonalises G, r independent blocks (I + λ_j C)⁻¹."""

    u: Float[Tensor, "*b r r"]
    factor: Float[Tensor, "*b r 2*D 2*D"]  # Cholesky factors of I + λ_j C

    @property
    def rotated(self) -> Float[Tensor, "*b p r"]:
        return self.expansion.mixing @ self.u

    def weight_covariance(self, v: Tensor) -> Tensor:
        v = v.unflatten(-2, (self.expansion.num_columns, -1)).transpose(-3, -2)  # (*b, r, 2D, k)
        rotated = torch.einsum("...rj,...rck->...jck", self.u, v)
        solved = torch.cholesky_solve(rotated, self.factor)
        return torch.einsum("...rj,...jck->...crk", self.u, solved).flatten(-3, -2)

    def _block_roots(self, x: Tensor) -> Float[Tensor, "*b r n 2*D"]:
        phi = self.expansion.phi.values(x.double()) * self.expansion.scales.mT
        phi = phi.unsqueeze(-3).expand(*self.factor.shape[:-2], *phi.shape[-2:])
        return torch.linalg.solve_triangular(self.factor.mT, phi, upper=True, left=False)

    def root(self, x: Tensor) -> Tensor:
        root = torch.einsum("...pr,...rnc->...nprc", self.rotated, self._block_roots(x))
        return root.flatten(-4, -3).flatten(-2)

    def covariance(self, x: Tensor) -> Tensor:
        root = self._block_roots(x)
        blocks = root @ root.mT  # (*b, r, n, n)
        outer = torch.einsum("...pr,...qr,...rnm->...npmq", self.rotated, self.rotated, blocks)
        return outer.flatten(-4, -3).flatten(-2)

    def _variance(self, x: Tensor) -> Tensor:
        return self._block_roots(x).square().sum(-1).mT @ self.rotated.square().mT


@dataclass(frozen=True)
class DualPosterior(WeightPosterior):
    """Fewer observations than features: Cov[θ] = I − VᵀV, V = chol(K + I⊗Σ)⁻¹ Φ."""

    whitened: Float[Tensor, "*b N*p F"]  # V

    def weight_covariance(self, v: Tensor) -> Tensor:
        return v - self.whitened.mT @ (self.whitened @ v)

    def covariance(self, x: Tensor) -> Tensor:
        features = self.expansion.features(x.double())
        explained = features @ self.whitened.mT
        return features @ features.mT - explained @ explained.mT

    def root(self, x: Tensor) -> Tensor:
        features = self.expansion.features(x.double())
        if features.shape[-2] <= features.shape[-1]:
            return psd_safe_cholesky(self.covariance(x))
        eye = torch.eye(features.shape[-1], dtype=features.dtype, device=features.device)
        return features @ psd_safe_cholesky(eye - self.whitened.mT @ self.whitened)

    def _variance(self, x: Tensor) -> Tensor:
        features = self.expansion.features(x.double())
        explained = features @ self.whitened.mT
        return self._per_point(features.square().sum(-1) - explained.square().sum(-1))


def weight_posterior(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> WeightPosterior:
    """The posterior given observations y at x, by the cheaper of the two algebras."""
    expansion = expansion.double()
    if prefers_dual(expansion, x.shape[-2]):
        return dual_posterior(expansion, x.double(), y.double(), noise)
    return statistics_posterior(expansion, Statistics.of(x, y, expansion.phi), noise)


def dual_posterior(expansion: Expansion, x: Tensor, y: Tensor, noise: Noise) -> DualPosterior:
    """The posterior by way of K + I⊗Σ, all in float64."""
    features = expansion.features(x)
    factor = psd_safe_cholesky(noisy_covariance(features, noise.covariance))
    alpha = torch.cholesky_solve(y.flatten(-2).unsqueeze(-1), factor)
    weights = expansion.column_weights(features.mT @ alpha)
    whitened = torch.linalg.solve_triangular(factor, features, upper=False)
    return DualPosterior(expansion, weights, whitened)


@singledispatch
def statistics_posterior(
    expansion: Expansion, statistics: Statistics, noise: Noise
) -> WeightPosterior:
    """The posterior from the statistics alone."""
    raise NotImplementedError(type(expansion).__name__)


@statistics_posterior.register
def _(expansion: FeatureExpansion, statistics: Statistics, noise: Noise) -> PrimalPosterior:
    c, m, precision, b = normal_equations(expansion, statistics, noise)
    factor = psd_safe_cholesky(masked(c, m, precision))
    theta = torch.cholesky_solve(b[..., :1], factor)
    return PrimalPosterior(expansion, expansion.column_weights(theta), factor)


@statistics_posterior.register
def _(expansion: KroneckerExpansion, statistics: Statistics, noise: Noise) -> WeightPosterior:
    c, g, b = kronecker_equations(expansion, statistics, noise)
    if g.requires_grad:  # eigenvectors of equal eigenvalues have no derivative
        return statistics_posterior(expansion.general(), statistics, noise)
    _, u, factor, rotated = diagonalised(c, g, b[..., :1, :, :])
    theta = unrotated(torch.cholesky_solve(rotated, factor), u).flatten(-2)  # (*b, 1, 2D·r)
    weights = expansion.column_weights(theta.mT)
    return KroneckerPosterior(expansion, weights, u, factor)
