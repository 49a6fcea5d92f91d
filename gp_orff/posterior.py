"""The Gaussian posterior of the feature weights θ, and of the field Φ(x)θ they give.

Three forms of the same law, one for each algebra of `inference`. All are immutable, in float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gp_orff import trig
from gp_orff.cholesky import cholesky
from gp_orff.expansion import (
    Expansion,
    FeatureExpansion,
    KroneckerExpansion,
    WaveExpansion,
    seen_through,
    weights_through,
)
from gp_orff.inference import (
    DenseRows,
    Evidence,
    Group,
    Noise,
    evidence_of,
    kronecker_equations,
    noisy_covariance,
    normal_equations,
    prefers_dual,
    structured,
    with_ones,
    with_rows,
)
from gp_orff.quadratic import diagonalised, masked, unrotated
from gp_orff.statistics import Statistics
from gp_orff.symbols import Symbol


class FieldLaw(ABC):
    """The Gaussian law of a field f, evaluated anywhere."""

    num_outputs: int
    batch_shape = torch.Size()

    @abstractmethod
    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """E[f(x)]."""

    def variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """Var[f_j(x)], in chunks of points."""
        return trig.by_chunks(self._variance, x.double(), self._width).clamp_min(0)

    def blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Cov[f(x_n)] at every point by itself, in chunks of points."""
        flat = trig.by_chunks(lambda part: self._blocks(part).flatten(-2), x.double(), self._width)
        return flat.unflatten(-1, (self.num_outputs, self.num_outputs))

    @abstractmethod
    def covariance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p n*p"]:
        """Cov[f(x)]."""

    @abstractmethod
    def root(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p q"]:
        """R with R Rᵀ = Cov[f(x)]."""

    def through(self, symbol: Symbol, space: Sequence[int]) -> "FieldLaw":
        """The law of a symbol of the field, whose directions are these columns of x."""
        raise NotImplementedError

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "FieldLaw":
        """The law of one term of a sum: features with directions of their own for the same θ, where
        there are features, and its kernel."""
        raise NotImplementedError

    @property
    @abstractmethod
    def _width(self) -> int:
        """How many numbers the variance at one point takes."""

    @abstractmethod
    def _variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """The variance at few points."""

    @abstractmethod
    def _blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """The blocks at few points."""


@dataclass(frozen=True)
class WeightPosterior(FieldLaw):
    """θ | y ~ N(mean, Cov)."""

    expansion: Expansion
    theta: Float[Tensor, "*b F 1"]  # E[θ]

    @cached_property
    def weights(self) -> Float[Tensor, "*b 2*D p"]:
        """Of the columns: E[f(x)] = φ(x) weights."""
        return self.expansion.column_weights(self.theta)

    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        return self.expansion.phi.apply(x, self.weights)

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
        """Its diagonal."""
        return self.root_of(features).square().sum(-1)

    def blocks_of(self, features: Float[Tensor, "m F"], q: int) -> Float[Tensor, "n q q"]:
        """The blocks of q features on its diagonal."""
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

    def through(self, symbol: Symbol, space: Sequence[int]) -> FieldLaw:
        expansion = seen_through(symbol, self.expansion, space)
        weights = weights_through(symbol, self.expansion, self.weights, space)
        return DerivedLaw(self, expansion, weights, symbol, tuple(space))

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> FieldLaw:
        whole, part = self.expansion, expansion
        if isinstance(self, KroneckerPosterior) or part.num_features != whole.num_features:
            raise NotImplementedError(
                "the parts of a sum of separable kernels, which share their features, are not "
                "known: expected a sum of field kernels, or of one and separable kernels"
            )
        return replace(self, expansion=part)

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


@dataclass(frozen=True)
class PrimalPosterior(WeightPosterior):
    """E[θ] = A⁻¹b, Cov[θ] = A⁻¹."""

    factor: Float[Tensor, "*b F F"]  # Cholesky factor of A

    def variance(self, x: Tensor) -> Tensor:
        full = self.expansion
        if self.batch_shape or not full.phi.folds(x, full.num_features):
            return super().variance(x)
        columns = [self._folded(x, i, i).clamp_min(0) for i in range(self.num_outputs)]
        return torch.stack(columns, dim=-1)

    def blocks(self, x: Tensor) -> Tensor:
        if not self.expansion.phi.folds(x, self.expansion.num_features):
            return super().blocks(x)
        p = self.num_outputs
        out = x.new_empty(len(x), p, p)
        for i in range(p):
            for j in range(i + 1):
                out[:, i, j] = out[:, j, i] = self._folded(x, i, j)
        return out

    def _folded(self, x: Float[Tensor, "n d"], i: int, j: int) -> Float[Tensor, "n"]:
        """Cov[f_i(x), f_j(x)] = φ P φᵀ, P = A⁻¹ ∘ m_i m_jᵀ on the columns of features."""
        full = self.expansion
        outer = full.directions[:, i].unsqueeze(-1) * full.directions[:, j]
        form = self._inverse * (0.5 * (outer + outer.mT) if i != j else outer)
        return full.phi.quadratic(x, full.scatter(full.scatter(form).mT))

    @cached_property
    def _inverse(self) -> Float[Tensor, "F F"]:
        return torch.cholesky_inverse(self.factor)

    def weight_covariance(self, v: Tensor) -> Tensor:
        return torch.cholesky_solve(v, self.factor)

    def weight_root(self, v: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, v, upper=True)

    def root_of(self, features: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, features, upper=True, left=False)

    def through(self, symbol: Symbol, space: Sequence[int]) -> FieldLaw:
        law = super().through(symbol, space)
        plain = isinstance(law.expansion, FeatureExpansion) and symbol.reference is None
        return replace(self, expansion=law.expansion) if plain else law


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

    def weight_root(self, v: Tensor) -> Tensor:
        v = v.unflatten(-2, (self.expansion.num_columns, -1)).transpose(-3, -2)  # (r, 2D, k)
        solved = torch.linalg.solve_triangular(self.factor.mT, v, upper=True)
        return torch.einsum("rj,jck->crk", self.u, solved).flatten(-3, -2)

    def root_of(self, features: Tensor) -> Tensor:
        features = features.unflatten(-1, (self.expansion.num_columns, -1))  # (*b, m, 2D, r)
        rotated = torch.einsum("...mcr,...rj->...jmc", features, self.u)
        root = torch.linalg.solve_triangular(self.factor.mT, rotated, upper=True, left=False)
        return root.transpose(-3, -2).flatten(-2)

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

    def _blocks(self, x: Tensor) -> Tensor:
        each = self._block_roots(x).square().sum(-1)  # (r, n)
        return torch.einsum("pr,qr,rn->npq", self.rotated, self.rotated, each)


@dataclass(frozen=True)
class DualPosterior(WeightPosterior):
    """Fewer observations than features: Cov[θ] = I − VᵀV, V = chol(K + I⊗Σ)⁻¹ Φ."""

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
class DerivedLaw(FieldLaw):
    """The law of Q f under that of the weights of f; less its value at a reference, if any."""

    law: WeightPosterior
    expansion: FeatureExpansion | WaveExpansion
    weights: Float[Tensor, "2*D q"]
    symbol: Symbol
    space: Sequence[int]

    @property
    def num_outputs(self) -> int:
        return self.expansion.num_outputs

    @property
    def _width(self) -> int:
        return self.law.expansion.num_features * self.num_outputs

    def mean(self, x: Tensor) -> Tensor:
        mean, referred = self.expansion.phi.apply(x, self.weights), self._referred(x)
        return mean if referred is None else mean - self.expansion.phi.apply(referred, self.weights)

    def _referred(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"] | None:
        return self.symbol.referred(x, self.space)

    def _features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n*q F"]:
        features, referred = self.expansion.features(x.double()), self._referred(x.double())
        return features if referred is None else features - self.expansion.features(referred)

    def root(self, x: Tensor) -> Tensor:
        return self.law.root_of(self._features(x))

    def covariance(self, x: Tensor) -> Tensor:
        return self.law.covariance_of(self._features(x))

    def _variance(self, x: Tensor) -> Tensor:
        return self.law.variance_of(self._features(x)).unflatten(-1, (-1, self.num_outputs))

    def _blocks(self, x: Tensor) -> Tensor:
        return self.law.blocks_of(self._features(x), self.num_outputs)


@dataclass(frozen=True)
class Offset(FieldLaw):
    """A law with a random constant added, the same at all points."""

    law: FieldLaw
    covariance_of_constant: Float[Tensor, "q q"]

    @property
    def num_outputs(self) -> int:
        return self.law.num_outputs

    @property
    def _width(self) -> int:
        return self.law._width

    def mean(self, x: Tensor) -> Tensor:
        return self.law.mean(x)

    def variance(self, x: Tensor) -> Tensor:
        return self.law.variance(x) + self.covariance_of_constant.diagonal()

    def blocks(self, x: Tensor) -> Tensor:
        return self.law.blocks(x) + self.covariance_of_constant

    def covariance(self, x: Tensor) -> Tensor:
        return self.law.covariance(x) + self.covariance_of_constant.repeat(len(x), len(x))

    def root(self, x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.covariance_of_constant)
        constant = (vectors * values.clamp_min(0).sqrt()).repeat(len(x), 1)
        return torch.cat([self.law.root(x), constant], dim=-1)

    def _variance(self, x: Tensor) -> Tensor:
        return self.variance(x)

    def _blocks(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def weight_posterior(
    expansion: Expansion, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], noise: Noise
) -> WeightPosterior:
    """The posterior given vectors y of mean zero at x, by the cheaper of the two algebras."""
    expansion, y = expansion.double(), y.double()
    zero = torch.zeros_like(y[..., 0, :])
    if prefers_dual(expansion, x.shape[-2]):
        features = expansion.features(x.double())
        noisy = noisy_covariance(features, noise.covariance)
        return dual_posterior(expansion, features, noisy, with_ones(y), zero)[0]
    groups = [Group(Statistics.of(x, y, expansion.phi), noise)]
    return statistics_posterior(expansion, groups, zero)[0]


def dual_posterior(
    expansion: Expansion,
    features: Float[Tensor, "*b M F"],
    noisy: Float[Tensor, "*b M M"],
    columns: Float[Tensor, "*b M 1+p"],
    mean: Float[Tensor, "*b p"] | None,
) -> tuple[DualPosterior, Evidence]:
    """The posterior by way of K and noise of M numbers, V = [y, 1⊗I_p], all in float64; with the
    mean of largest evidence where none is given."""
    factor = cholesky(noisy)
    half = torch.linalg.solve_triangular(factor, columns, upper=False)
    logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
    evidence = Evidence(half.mT @ half, logdet)
    alpha = torch.linalg.solve_triangular(factor.mT, half @ _residual(evidence, mean), upper=True)
    whitened = torch.linalg.solve_triangular(factor, features, upper=False)
    return DualPosterior(expansion, features.mT @ alpha, whitened), evidence


def _residual(evidence: Evidence, mean: Float[Tensor, "*b p"] | None) -> Float[Tensor, "*b 1+p 1"]:
    """[1; −c], with which V becomes y − c."""
    mean = evidence.best_mean() if mean is None else mean
    return torch.cat([torch.ones_like(mean[..., :1]), -mean], dim=-1).unsqueeze(-1)


def statistics_posterior(
    expansion: Expansion,
    groups: Sequence[Group],
    mean: Float[Tensor, "*b p"] | None,
    rows: DenseRows | None = None,
) -> tuple[WeightPosterior, Evidence]:
    """The posterior from the statistics alone, and the evidence from the same factorisation; with
    the mean of largest evidence where none is given; and from further rows, written out."""
    if rows is not None:
        expansion = expansion.general()
        a, b, white, logdet = with_rows(*normal_equations(expansion, groups), rows)
        return _primal(expansion, groups, mean, (a, b), (white, logdet))
    expansion = structured(expansion, groups)
    if isinstance(expansion, KroneckerExpansion):
        c, g, b = kronecker_equations(expansion, *groups[0])
        if not g.requires_grad:  # eigenvectors of equal eigenvalues have no derivative
            return _kronecker_posterior(expansion, groups, mean, (c, g, b))
        expansion = expansion.general()
    b, parts = normal_equations(expansion, groups)
    return _primal(expansion, groups, mean, (masked(parts), b))


def _primal(
    expansion: FeatureExpansion,
    groups: Sequence[Group],
    mean: Float[Tensor, "*b p"] | None,
    equations: tuple[Tensor, Tensor],
    further: tuple[Tensor, Tensor] = (0.0, 0.0),
) -> tuple[PrimalPosterior, Evidence]:
    a, b = equations
    factor = psd_safe_cholesky(a)
    half = torch.linalg.solve_triangular(factor, b, upper=False)
    logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum(-1)
    evidence = evidence_of(groups, half.mT @ half - further[0], logdet + further[1])
    theta = torch.linalg.solve_triangular(factor.mT, half @ _residual(evidence, mean), upper=True)
    return PrimalPosterior(expansion, theta, factor), evidence


def _kronecker_posterior(
    expansion: KroneckerExpansion,
    groups: Sequence[Group],
    mean: Float[Tensor, "*b p"] | None,
    equations: tuple[Tensor, Tensor, Tensor],
) -> tuple[KroneckerPosterior, Evidence]:
    _, u, factor, rotated = diagonalised(*equations)
    solved = torch.cholesky_solve(rotated, factor)  # (*b, r, 2D, 1+p)
    explained = (rotated.mT @ solved).sum(-3)
    logdet = 2 * factor.diagonal(dim1=-1, dim2=-2).log().sum((-1, -2))
    evidence = evidence_of(groups, explained, logdet)
    theta = unrotated(solved @ _residual(evidence, mean).unsqueeze(-3), u).flatten(-2)
    return KroneckerPosterior(expansion, theta.mT, u, factor), evidence
