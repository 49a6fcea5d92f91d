"""The Gaussian posterior of the feature weights θ, and of the field Φ(x)θ.

A form of the same distribution for each algebra of `equations`; that of separable kernels is in
`separable`. All are immutable, in float64.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff.data.observations import less_reference
from gp_orff.features.expansion import Expansion, FeatureExpansion, apply_symbol
from gp_orff.inference.distributions import FieldDistribution, InChunks
from gp_orff.kernels.cholesky import cholesky
from gp_orff.symbols.base import Symbol


@dataclass(frozen=True)
class WeightPosterior(InChunks):
    """The posterior θ | y ~ N(mean, Cov)."""

    expansion: Expansion
    theta: Float[Tensor, "*b F 1"]  # E[θ]

    @cached_property
    def weights(self) -> Float[Tensor, "*b 2*D p"]:
        """W (2D, p) of the columns: E[f(x)] = φ(x) W."""
        return self.expansion.column_weights(self.theta)

    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        return self.expansion.phi.apply(x, self.weights)

    def absorbed(self, x: Tensor) -> Tensor:
        return absorbed_by(self.expansion, self.response_to(), x)

    @property
    def num_outputs(self) -> int:
        return self.expansion.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        return self.theta.shape[:-2]

    @property
    def _width(self) -> int:
        return self.expansion.num_features * self.expansion.num_outputs

    @abstractmethod
    def weight_covariance(self, v: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b F k"]:
        """Cov[θ] v."""

    @abstractmethod
    def weight_root(self, v: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        """R v with R Rᵀ = Cov[θ]."""

    @abstractmethod
    def root_of(self, features: Float[Tensor, "*b m F"]) -> Float[Tensor, "*b m q"]:
        """R with R Rᵀ = Φ Cov[θ] Φᵀ for any features Φ of these weights."""

    def covariance_of(self, features: Float[Tensor, "*b m F"]) -> Float[Tensor, "*b m m"]:
        """Φ Cov[θ] Φᵀ."""
        root = self.root_of(features)
        return root @ root.mT

    def variance_of(self, features: Float[Tensor, "*b m F"]) -> Float[Tensor, "*b m"]:
        """The diagonal of Φ Cov[θ] Φᵀ."""
        return self.root_of(features).square().sum(-1)

    def blocks_of(self, features: Float[Tensor, "m F"], q: int) -> Float[Tensor, "n q q"]:
        """The q×q blocks on the diagonal of Φ Cov[θ] Φᵀ."""
        root = self.root_of(features).unflatten(-2, (-1, q))
        return root @ root.mT

    def root(self, x: Tensor) -> Tensor:
        return self.root_of(self.expansion.features(x.double()))

    def covariance(self, x: Tensor) -> Tensor:
        return self.covariance_of(self.expansion.features(x.double()))

    def _variance(self, x: Tensor) -> Tensor:
        variance = self.variance_of(self.expansion.features(x.double()))
        return variance.unflatten(-1, (-1, self.num_outputs))

    def _blocks(self, x: Tensor) -> Tensor:
        return self.blocks_of(self.expansion.features(x.double()), self.num_outputs)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        expansion = apply_symbol(symbol, self.expansion, space)
        weights = expansion.column_weights(self.theta)
        return SymbolPosterior(self, expansion, weights, symbol, tuple(space))

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> FieldDistribution:
        if expansion.num_features != self.expansion.num_features:
            raise no_part()
        return replace(self, expansion=expansion)

    @property
    def requires_grad(self) -> bool:
        """Whether the posterior is differentiable in the hyperparameters."""
        return self.weights.requires_grad

    def detached(self) -> "WeightPosterior":
        """The same posterior without the graph of the hyperparameters."""
        expansion = self.expansion.rebuild(*(t.detach() for t in self.expansion.tensors))
        tensors = {
            f.name: getattr(self, f.name).detach()
            for f in fields(self)
            if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, expansion=expansion, **tensors)


def absorbed_by(
    expansion: Expansion, response: Float[Tensor, "*b F p"], x: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n q p"]:
    """What the features of an expansion take of constants in the data."""
    values = expansion.phi.apply(x, expansion.column_weights(response))
    return values.unflatten(-1, (-1, response.shape[-1]))


def no_part() -> NotImplementedError:
    """The error where the terms of a sum have no weights of their own."""
    return NotImplementedError(
        "expected a sum of field kernels, or of field and separable kernels, got a sum of "
        "separable kernels, which share their features: its terms have no posterior"
    )


@dataclass(frozen=True)
class GeneralPosterior(WeightPosterior):
    """A posterior that has the response of its weights to constants, written out."""

    response: Float[Tensor, "*b F p"]

    def response_to(self, constants=None):
        return self.response if constants is None else self.response @ constants


@dataclass(frozen=True)
class PrimalPosterior(GeneralPosterior):
    """E[θ] = A⁻¹b, Cov[θ] = A⁻¹."""

    factor: Float[Tensor, "*b F F"]  # Cholesky factor of A

    def variance(self, x: Tensor) -> Tensor:
        expansion = self.expansion
        if self.batch_shape or not expansion.phi.prefers_quadratic(x, expansion.num_features):
            return super().variance(x)
        columns = [self._pair_covariance(x, i, i).clamp_min(0) for i in range(self.num_outputs)]
        return torch.stack(columns, dim=-1)

    def blocks(self, x: Tensor) -> Tensor:
        if not self.expansion.phi.prefers_quadratic(x, self.expansion.num_features):
            return super().blocks(x)
        p = self.num_outputs
        out = x.new_empty(len(x), p, p)
        for i in range(p):
            for j in range(i + 1):
                out[:, i, j] = out[:, j, i] = self._pair_covariance(x, i, j)
        return out

    def _pair_covariance(self, x: Float[Tensor, "n d"], i: int, j: int) -> Float[Tensor, "n"]:
        """Cov[f_i(x), f_j(x)] = φ P φᵀ, P = A⁻¹ ∘ m_i m_jᵀ on the columns of the features."""
        expansion = self.expansion
        left, right = expansion.directions[:, i].unsqueeze(-1), expansion.directions[:, j]
        form = self._inverse * left * right
        form = 0.5 * (form + form.mT) if i != j else form
        return expansion.phi.quadratic(x, expansion.scatter(expansion.scatter(form).mT))

    @cached_property
    def _inverse(self) -> Float[Tensor, "F F"]:
        return torch.cholesky_inverse(self.factor)

    def weight_covariance(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v, self.factor)

    def weight_root(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, v, upper=True)

    def root_of(self, features: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, features, upper=True, left=False)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        image = super().apply(symbol, space)
        plain = symbol.reference is None and not image.expansion.directions.is_complex()
        return replace(self, expansion=image.expansion) if plain else image


@dataclass(frozen=True)
class DualPosterior(GeneralPosterior):
    """The dual form: Cov[θ] = I − VᵀV, V = chol(K + I⊗Σ)⁻¹ Φ."""

    whitened: Float[Tensor, "*b N*p F"]  # V

    def weight_covariance(self, v: Tensor) -> Tensor:
        return v - self.whitened.mT @ (self.whitened @ v)

    def covariance_of(self, features: Tensor) -> Tensor:
        explained = features @ self.whitened.mT
        return features @ features.mT - explained @ explained.mT

    def weight_root(self, v: Tensor) -> Tensor:
        return self._root @ v

    @property
    def _root(self) -> Float[Tensor, "*b F F"]:
        """The Cholesky factor of Cov[θ]."""
        gram = self.whitened.mT @ self.whitened
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return psd_safe_cholesky(eye - gram)

    def root_of(self, features: Tensor) -> Tensor:
        if features.shape[-2] <= features.shape[-1]:
            return cholesky(self.covariance_of(features))
        return features @ self._root

    def variance_of(self, features: Tensor) -> Tensor:
        explained = features @ self.whitened.mT
        return features.square().sum(-1) - explained.square().sum(-1)

    def blocks_of(self, features: Tensor, q: int) -> Tensor:
        explained = (features @ self.whitened.mT).unflatten(-2, (-1, q))
        features = features.unflatten(-2, (-1, q))
        return features @ features.mT - explained @ explained.mT


@dataclass(frozen=True)
class SymbolPosterior(InChunks):
    """Q f under the posterior of the weights of f, less its value at a reference, if Q has one."""

    posterior: WeightPosterior
    expansion: FeatureExpansion
    weights: Float[Tensor, "2*D q"]
    symbol: Symbol
    space: Sequence[int]

    @property
    def num_outputs(self) -> int:
        return self.expansion.num_outputs

    @property
    def _width(self) -> int:
        return self.posterior.expansion.num_features * self.num_outputs

    def mean(self, x: Tensor) -> Tensor:
        values = partial(self.expansion.phi.apply, w=self.weights)
        return less_reference(values, x, self.symbol, self.space)

    def absorbed(self, x: Tensor) -> Tensor:
        values = partial(absorbed_by, self.expansion, self.posterior.response_to())
        return less_reference(values, x, self.symbol, self.space)

    def _features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n*q F"]:
        return less_reference(self.expansion.features, x.double(), self.symbol, self.space)

    def root(self, x: Tensor) -> Tensor:
        return self.posterior.root_of(self._features(x))

    def covariance(self, x: Tensor) -> Tensor:
        return self.posterior.covariance_of(self._features(x))

    def _variance(self, x: Tensor) -> Tensor:
        return self.posterior.variance_of(self._features(x)).unflatten(-1, (-1, self.num_outputs))

    def _blocks(self, x: Tensor) -> Tensor:
        return self.posterior.blocks_of(self._features(x), self.num_outputs)
