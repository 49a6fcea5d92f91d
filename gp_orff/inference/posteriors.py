"""Gaussian distributions of a field, the posterior of feature weights, and a check of it.

`check` detects overconfident random features by two halves of their frequencies. Let e(x) be the
error of the posterior mean because of the features. Two disjoint halves of the frequencies give
independent Monte Carlo estimates with errors of √2 e each. Their means thus differ by about 2e. If
e is not small against the posterior standard deviation, error bars do not cover the error of the
features.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise import independent
from gp_orff.data.observations import Affine, Observations, affine_image, less_reference, of_affine
from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion, FeatureExpansion, apply_symbol
from gp_orff.kernels.base import cholesky, cholesky_inverse, map_tensors
from gp_orff.settings import check_features
from gp_orff.symbols.base import Identity, Symbol

# Gaussian distributions of a field, evaluated at any points.
#
# Distributions consist of layers. Each layer adds a term to mean or covariance:
#
#     posterior given the constant mean  →  WithMean  →  PlusConstant  →  PlusWhite
#
# `WithMean` adds the constant mean and its uncertainty. `PlusConstant` adds a variance common to
# all points, such as that of the constant of a potential. `PlusWhite` adds the truncated variance
# of a grid. `split` removes the white layer, since white noise has no image under a symbol and no
# continuous paths.


class FieldDistribution(ABC):
    """The Gaussian distribution of a field f, evaluated at any points."""

    num_outputs: int
    batch_shape = torch.Size()
    members = ()  # the members of a mixture

    @abstractmethod
    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """E[f(x)]."""

    @abstractmethod
    def variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """Var[f_j(x)], without an n×n matrix."""

    @abstractmethod
    def blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Cov[f(x_n)] for every point, without covariances between points."""

    @abstractmethod
    def covariance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p n*p"]:
        """Cov[f(x)]."""

    def root(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p q"]:
        """R with R Rᵀ = Cov[f(x)]."""
        return cholesky(self.covariance(x))

    def latent(self, part: Observations) -> Float[Tensor, "n v v"]:
        """H Cov[f] Hᵀ for every observation."""
        return part.apply_to_covariance(self.blocks(part.x))

    def latent_variance(self, part: Observations) -> Float[Tensor, "n v"]:
        """Var[H f] for every observation."""
        if part.direction is None:  # H selects components
            return part.apply(self.variance(part.x))
        return self.latent(part).diagonal(dim1=-1, dim2=-2)

    def normals(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "S"], Float[Tensor, "S n q"], Float[Tensor, "S n q q"]]:
        """The S normal distributions whose mixture is the distribution of f(x_n) at each point.

        Returns their probabilities, means and covariances.
        """
        mean = self.mean(x)
        return torch.ones(1).to(mean), mean.unsqueeze(0), self.blocks(x).unsqueeze(0)

    def moments(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q"], Float[Tensor, "n q p"]]:
        """E[f(x)], Var[f_j(x)] and `absorbed(x)`, which may share intermediate results."""
        return self.mean(x), self.variance(x), self.absorbed(x)

    def absorbed(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n q p"]:
        """E[f(x)] given unit constants H as data y: Cov[f(x), y] Cov[y]⁻¹H."""
        raise NotImplementedError

    def response_to(self, constants: Float[Tensor, "p k"] | None = None) -> Tensor:
        """The posterior means of the weights given k constants in place of the data.

        None stands for a unit constant in each of the p components.
        """
        return self.response if constants is None else self.response @ constants

    @property
    def given_mean(self) -> "FieldDistribution":
        """The distribution given the constant mean, if this one has an uncertain mean."""
        return self

    def split(self) -> tuple["FieldDistribution", Float[Tensor, "*b p p"] | None]:
        """The distribution without white noise, and the variance δ of the white noise, or None."""
        return self, None

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "FieldDistribution":
        """The distribution of a symbol of the field. `space` are the symbol's directions in x."""
        raise NotImplementedError

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "FieldDistribution":
        """The distribution of the term `kernel` of a sum of kernels.

        With features, `expansion` has the directions of this term for the same weights θ. It is
        None for the whole kernel.
        """
        raise NotImplementedError


class InChunks(FieldDistribution):
    """A distribution whose variances are computed for chunks of points."""

    def variance(self, x: Tensor) -> Tensor:
        return by_chunks(self._variance, x.double(), self._width).clamp_min(0)

    def blocks(self, x: Tensor) -> Tensor:
        flat = by_chunks(lambda part: self._blocks(part).flatten(-2), x.double(), self._width)
        return flat.unflatten(-1, (self.num_outputs, self.num_outputs))

    @property
    @abstractmethod
    def _width(self) -> int:
        """The number of elements in memory for the variance at one point."""

    @abstractmethod
    def _variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """The variance at the points of a chunk."""

    @abstractmethod
    def _blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """The blocks at the points of a chunk."""


@dataclass(frozen=True)
class WithMean(FieldDistribution):
    """A distribution with a constant mean c ~ N(ĉ, V), the weights of p further features 1⊗I_p.

    V is (HᵀCov[y]⁻¹H)⁻¹ under a flat prior, where H are the observed values of unit constants. V is
    zero for a known c. Elimination of c from the equations of all features gives

        E[f(x)] = E[f(x) − h(x) c | c = ĉ] + h(x) ĉ ,

        Cov[f(x), f(z)] = Cov[f(x), f(z) | c] + R(x) V R(z)ᵀ ,

        R(x) = h(x) − Cov[f(x), y] Cov[y]⁻¹H

    with h(x) = I_p (universal kriging; Rasmussen & Williams 2006, eq. 2.42). For a symbol Q of f,
    h = Q (1⊗I_p) is the image of constant fields, and Q f(x) replaces f(x). h is zero for
    derivatives, for terms of a sum of kernels without the mean, and for a potential without the
    constant field. R is not zero then, as f − h c depends on c given the data.
    """

    distribution: FieldDistribution  # of f − h c given c = ĉ
    constant: Float[Tensor, "p"]  # ĉ
    constant_root: Float[Tensor, "p k"]  # a root of V, without columns for a known c
    symbol: Symbol = field(default_factory=Identity)  # Q
    space: Sequence[int] = ()
    includes_mean: bool = True  # false for a term of a sum of kernels

    @property
    def given_mean(self) -> FieldDistribution:
        return self.distribution

    @property
    def num_outputs(self) -> int:
        return self.distribution.num_outputs

    @cached_property
    def _affine(self) -> Affine:
        """The image of unit constants, as values and slopes."""
        eye = torch.eye(len(self.constant)).to(self.constant)
        return affine_image(self.symbol, self.space, eye)

    def _image(
        self, x: Float[Tensor, "n d"], constants: Float[Tensor, "p k"]
    ) -> Float[Tensor, "n q k"]:
        """h(x) times k constants."""
        image = of_affine(self._affine, self.symbol, x.double(), self.space) @ constants
        return image if self.includes_mean else torch.zeros_like(image)

    def effect(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q k"]:
        """R(x) times the root of V."""
        if not self.constant_root.shape[-1]:
            return self._image(x, self.constant_root)
        return self._effect(x, self.distribution.absorbed(x))

    def _effect(self, x: Tensor, absorbed: Float[Tensor, "n q p"]) -> Float[Tensor, "n q k"]:
        return self._image(x, self.constant_root) - absorbed @ self.constant_root

    def mean(self, x: Tensor) -> Tensor:
        image = self._image(x, self.constant.unsqueeze(-1))
        return self.distribution.mean(x) + image.squeeze(-1)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance, absorbed = self.distribution.moments(x)
        mean = mean + self._image(x, self.constant.unsqueeze(-1)).squeeze(-1)
        return mean, variance + self._effect(x, absorbed).square().sum(-1), absorbed

    def variance(self, x: Tensor) -> Tensor:
        def added(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q"]:
            return self.effect(points).square().sum(-1)

        width = self.num_outputs * len(self.constant)
        return self.distribution.variance(x) + by_chunks(added, x, width)

    def blocks(self, x: Tensor) -> Tensor:
        effect = self.effect(x)
        return self.distribution.blocks(x) + effect @ effect.mT

    def covariance(self, x: Tensor) -> Tensor:
        effect = self.effect(x).flatten(0, 1)
        return self.distribution.covariance(x) + effect @ effect.mT

    def root(self, x: Tensor) -> Tensor:
        return torch.cat([self.distribution.root(x), self.effect(x).flatten(0, 1)], dim=-1)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        image = replace(self, distribution=self.distribution.apply(symbol, space))
        symbol = symbol if self.symbol.is_identity else symbol @ self.symbol
        return replace(image, symbol=symbol, space=tuple(space))

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> FieldDistribution:
        part = self.distribution.of_part(expansion, kernel)
        return replace(self, distribution=part, includes_mean=False)


@dataclass(frozen=True)
class Plus(FieldDistribution):
    """A distribution plus an independent Gaussian with the covariance `added` at every point."""

    distribution: FieldDistribution
    added: Float[Tensor, "*b q q"]

    @property
    def num_outputs(self) -> int:
        return self.distribution.num_outputs

    @property
    def batch_shape(self) -> torch.Size:
        return self.distribution.batch_shape

    def mean(self, x: Tensor) -> Tensor:
        return self.distribution.mean(x)

    def variance(self, x: Tensor) -> Tensor:
        return self.distribution.variance(x) + self.added.diagonal(dim1=-1, dim2=-2).unsqueeze(-2)

    def blocks(self, x: Tensor) -> Tensor:
        return self.distribution.blocks(x) + self.added

    def covariance(self, x: Tensor) -> Tensor:
        return self.distribution.covariance(x) + self._added_covariance(x, self.added)

    def root(self, x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.added)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return torch.cat([self.distribution.root(x), self._added_root(x, root)], dim=-1)

    @abstractmethod
    def _added_covariance(self, x: Tensor, added: Tensor) -> Float[Tensor, "*b n*q n*q"]:
        """The covariance of the independent Gaussian between all points."""

    @abstractmethod
    def _added_root(self, x: Tensor, root: Tensor) -> Float[Tensor, "*b n*q k"]:
        """A root of the covariance of the independent Gaussian, from a root of `added`."""


class PlusConstant(Plus):
    """A distribution plus a random constant, the same at all points."""

    def _added_covariance(self, x: Tensor, added: Tensor) -> Tensor:
        return added.repeat(x.shape[-2], x.shape[-2])

    def _added_root(self, x: Tensor, root: Tensor) -> Tensor:
        return root.repeat(x.shape[-2], 1)


class PlusWhite(Plus):
    """A distribution plus white noise of variance δ, which is independent between points."""

    def split(self) -> tuple[FieldDistribution, Tensor]:
        return self.distribution, self.added

    def _added_covariance(self, x: Tensor, added: Tensor) -> Tensor:
        return independent(added, x.shape[-2])

    _added_root = _added_covariance


def plus_white(
    distribution: FieldDistribution, delta: Float[Tensor, "*b p p"] | None
) -> FieldDistribution:
    """The distribution plus white noise of variance δ. Unchanged if δ is None."""
    return distribution if delta is None else PlusWhite(distribution, delta)


# The Gaussian posterior of the feature weights θ, and of the field Φ(x)θ.
#
# Each algebra of `equations` has its own form of this distribution. That of separable kernels is in
# `separable`. All are immutable, in float64.
#
# The variance at each point is Φ(x) Cov[θ] Φ(x)ᵀ. The primal form solves systems with the factor of
# A. The dual form subtracts the variance that the data explain from the prior variance. On a
# lattice with many points, the variance is a quadratic form of the columns. One Fourier transform
# then computes it at all points (`_pair_covariance`).


_READINGS = 512  # observations along directions per chunk


@dataclass(frozen=True)
class WeightPosterior(InChunks):
    """The posterior θ | y ~ N(mean, Cov)."""

    expansion: Expansion
    theta: Float[Tensor, "*b F 1"]  # E[θ]

    @cached_property
    def weights(self) -> Float[Tensor, "*b 2*D p"]:
        """The weights W of the columns, with E[f(x)] = φ(x) W."""
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

    def latent(self, part: Observations) -> Tensor:
        if part.direction is None:
            return super().latent(part)

        def variances(some: Observations) -> Float[Tensor, "n"]:  # without whole vectors
            vectors = self.expansion.features(some.x.double()).unflatten(0, (len(some), -1))
            return self.variance_of(torch.einsum("npf,np->nf", vectors, some.direction))

        rows = torch.arange(len(part), device=part.x.device).split(_READINGS)
        return torch.cat([variances(part.take(some)) for some in rows])[:, None, None]

    def apply(self, symbol: Symbol, space: Sequence[int]) -> FieldDistribution:
        expansion = apply_symbol(symbol, self.expansion, space)
        weights = expansion.column_weights(self.theta)
        return SymbolPosterior(self, expansion, weights, symbol, tuple(space))

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> FieldDistribution:
        if expansion is None:
            return self
        if expansion.num_features != self.expansion.num_features:
            raise no_part()
        return replace(self, expansion=expansion)

    @property
    def requires_grad(self) -> bool:
        """Whether the posterior is differentiable by the hyperparameters."""
        return self.weights.requires_grad

    def detached(self) -> "WeightPosterior":
        """This posterior without the autograd graph of the hyperparameters."""
        expansion = self.expansion.rebuild(*(t.detach() for t in self.expansion.tensors))
        return replace(map_tensors(self, Tensor.detach), expansion=expansion)


def absorbed_by(
    expansion: Expansion, response: Float[Tensor, "*b F p"], x: Float[Tensor, "*b n d"]
) -> Float[Tensor, "*b n q p"]:
    """E[f(x)] given unit constants as data, from the response of the weights."""
    values = expansion.phi.apply(x, expansion.column_weights(response))
    return values.unflatten(-1, (-1, response.shape[-1]))


def no_part() -> NotImplementedError:
    """The error for a sum whose terms share their weights."""
    return NotImplementedError(
        "expected a sum of field kernels, or of field and separable kernels, got a sum of "
        "separable kernels, which share their features: its terms have no posterior"
    )


@dataclass(frozen=True)
class GeneralPosterior(WeightPosterior):
    """A posterior that stores the response of its weights to constants as a matrix."""

    response: Float[Tensor, "*b F p"]


@dataclass(frozen=True)
class PrimalPosterior(GeneralPosterior):
    """The primal form: E[θ] = A⁻¹b and Cov[θ] = A⁻¹."""

    factor: Float[Tensor, "*b F F"]  # Cholesky factor of A

    def variance(self, x: Tensor) -> Tensor:
        if self.batch_shape or not self._prefers_quadratic(x):
            return super().variance(x)
        columns = [self._pair_covariance(x, i, i).clamp_min(0) for i in range(self.num_outputs)]
        return torch.stack(columns, dim=-1)

    def blocks(self, x: Tensor) -> Tensor:
        if not self._prefers_quadratic(x):
            return super().blocks(x)
        p = self.num_outputs
        out = x.new_empty(len(x), p, p)
        for i in range(p):
            for j in range(i + 1):
                out[:, i, j] = out[:, j, i] = self._pair_covariance(x, i, j)
        return out

    def _prefers_quadratic(self, x: Float[Tensor, "n d"]) -> bool:
        """Whether one transform per pair of outputs is cheaper than the features of all points."""
        expansion = self.expansion
        cheaper = expansion.phi.prefers_quadratic(x, expansion.num_features)
        return cheaper and not expansion.is_complex

    def _pair_covariance(self, x: Float[Tensor, "n d"], i: int, j: int) -> Float[Tensor, "n"]:
        """Cov[f_i(x), f_j(x)] = φ P φᵀ with P = A⁻¹ ∘ m_i m_jᵀ on the columns of the features."""
        expansion = self.expansion
        left, right = expansion.directions[:, i].unsqueeze(-1), expansion.directions[:, j]
        form = self._inverse * left * right
        # The quadratic form needs a symmetric matrix. The antisymmetric part contributes nothing.
        form = 0.5 * (form + form.mT) if i != j else form
        return expansion.phi.quadratic(x, expansion.scatter(expansion.scatter(form).mT))

    @cached_property
    def _inverse(self) -> Float[Tensor, "F F"]:
        return cholesky_inverse(self.factor)

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
    """The dual form: Cov[θ] = I − VᵀV with V = chol(K + I⊗Σ)⁻¹ Φ."""

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
        return cholesky(eye - gram, unit=1.0)

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
    """Q f under the posterior of the weights of f. If Q has a reference, it is zero there."""

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

    def features(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n*q F"]:
        """Φ_Q(x), with Q f(x) = Φ_Q(x) θ."""
        return less_reference(self.expansion.features, x.double(), self.symbol, self.space)

    def root(self, x: Tensor) -> Tensor:
        return self.posterior.root_of(self.features(x))

    def covariance(self, x: Tensor) -> Tensor:
        return self.posterior.covariance_of(self.features(x))

    def _variance(self, x: Tensor) -> Tensor:
        return self.posterior.variance_of(self.features(x)).unflatten(-1, (-1, self.num_outputs))

    def _blocks(self, x: Tensor) -> Tensor:
        return self.posterior.blocks_of(self.features(x), self.num_outputs)


class FeatureWarning(UserWarning):
    """The error of random features exceeds the error bars of their posterior.

    Use a grid, such as `gp_orff.Grid.for_data(x)`, or more frequencies by
    `gp_orff.QuasiMonteCarlo`. `gp_orff.settings.check_features(False)` turns the check off.

    Example:
        Many accurate observations with few features:

        >>> import gp_orff, torch, warnings
        >>> x = torch.rand(
        ...     300, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> y = torch.sin(6 * x)  # a gradient
        >>> rule = gp_orff.MonteCarlo(20, seed=0)
        >>> kernel = gp_orff.CurlFreeKernel(num_dims=2)
        >>> model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
        >>> model.likelihood.noise = 1e-4
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", gp_orff.FeatureWarning)
        ...     _ = model.condition(x, y)
        >>> caught[0].category.__name__
        'FeatureWarning'
    """


def halves(expansion: Expansion) -> list[tuple[Expansion, Int[Tensor, "k"]]]:
    """Two expansions with half the frequencies each, at twice the variance, and their columns."""
    return [(expansion.select(*half), half[0]) for half in expansion.phi.halves()]


def disagreement(
    posterior: WeightPosterior,
    parts: tuple[WeightPosterior, WeightPosterior],
    x: Float[Tensor, "*b n d"],
) -> float:
    """Return the estimated error of the mean by the features, over the posterior SD.

    Both are root mean squares over the points x. The estimate was compared with exact posteriors:
    curl-free RBF and Matérn 5/2 in 2 and 3 dimensions, domains of 3 and 10 lengthscales, 100 and
    800 points, noise from 3 % to 100 %, and 100 to 1600 features. For estimates above 1, the true
    ratio was always above 1.5, and the SD below 0.88 of the exact SD. For estimates below 0.5, the
    true ratio was below 1.1.
    """
    first, second = (part.mean(x) for part in parts)
    error = (first - second).square().mean() / 4
    return (error / posterior.variance(x).mean()).sqrt().item()


@torch.no_grad()
def check(
    posterior: WeightPosterior,
    expansion: Expansion,
    posterior_of: Callable[[Expansion, Int[Tensor, "k"]], WeightPosterior],
    x: Float[Tensor, "*b n d"],
) -> None:
    """Warn if a posterior of random features is overconfident at the first 200 points."""
    if check_features.on() and expansion.phi.sampled and expansion.num_columns > 2:
        pair = halves(expansion)
        if not all(family.num_columns for half, _ in pair for family in half.phi.families):
            return  # a single frequency has no halves
        parts = [posterior_of(*half) for half in pair]
        if (ratio := disagreement(posterior, parts, x[..., :200, :])) <= 1:
            return
        # With a rounded number, Python shows the message once, not for every posterior.
        at_least = max(bound for bound in (1, 2, 5, 10) if ratio >= bound)
        warnings.warn(
            f"the posterior of these {expansion.num_features} random features is overconfident: "
            f"the error caused by the features is more than {at_least} times the posterior "
            "standard deviation; use more frequencies, QuasiMonteCarlo or a smoother base kernel, "
            "and compare with the exact kernel on a subset; "
            "gp_orff.settings.check_features(False) turns this check off",
            FeatureWarning,
            stacklevel=2,
        )
