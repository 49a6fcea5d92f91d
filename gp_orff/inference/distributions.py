"""Gaussian distributions of a field, evaluated at any points."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import independent
from gp_orff.data.observations import of_constants
from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion
from gp_orff.symbols.base import Identity, Symbol


class FieldDistribution(ABC):
    """The Gaussian distribution of a field f, evaluated at any points."""

    num_outputs: int
    batch_shape = torch.Size()

    @abstractmethod
    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """E[f(x)]."""

    @abstractmethod
    def variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """Var[f_j(x)], without an n×n matrix."""

    @abstractmethod
    def blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Cov[f(x_n)] of every point alone."""

    @abstractmethod
    def covariance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p n*p"]:
        """Cov[f(x)]."""

    @abstractmethod
    def root(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p q"]:
        """R with R Rᵀ = Cov[f(x)]."""

    def normals(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "S"], Float[Tensor, "S n q"], Float[Tensor, "S n q q"]]:
        """The normal distributions that f(x_n) of every point alone is a mixture of: their
        probabilities, means and covariances."""
        mean = self.mean(x)
        return torch.ones(1).to(mean), mean.unsqueeze(0), self.blocks(x).unsqueeze(0)

    def moments(
        self, x: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n q"], Float[Tensor, "n q p"]]:
        """E[f(x)], Var[f_j(x)] and `absorbed(x)`, which may share much of their work."""
        return self.mean(x), self.variance(x), self.absorbed(x)

    def absorbed(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n q p"]:
        """What E[f(x)] takes of constants H = 1⊗I_p in the data y: Cov[f(x), y] Cov[y]⁻¹H."""
        raise NotImplementedError

    def response_to(self, constants: Float[Tensor, "p k"] | None = None) -> Tensor:
        """The weights that E[f] has given k constants in the place of the data; by default, given
        1⊗I_p."""
        raise NotImplementedError

    @property
    def given_mean(self) -> "FieldDistribution":
        """The distribution given the constant mean, which may be unknown here."""
        return self

    def split(self) -> tuple["FieldDistribution", Float[Tensor, "*b p p"] | None]:
        """The distribution without its white noise, and the variance δ of that noise, if any."""
        return self, None

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "FieldDistribution":
        """The distribution of a symbol of the field; `space` names its directions in x."""
        raise NotImplementedError

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "FieldDistribution":
        """The distribution of one term of a sum of kernels: that of the given `kernel`.

        With features, `expansion` has the directions of this term for the same weights θ.
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
        """How many numbers the variance at one point needs in memory."""

    @abstractmethod
    def _variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """The variance at the points of a chunk."""

    @abstractmethod
    def _blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """The blocks at the points of a chunk."""


@dataclass(frozen=True)
class UnknownMean(FieldDistribution):
    """A distribution less its best constant mean ĉ, where the mean c has a flat prior.

    With H = 1⊗I_p, c ~ N(ĉ, V), V = (HᵀCov[y]⁻¹H)⁻¹, and f − ĉ has the covariance

        Cov[f(x), f(z) | c] + R(x) V R(z)ᵀ ,    R(x) = I_p − Cov[f(x), y] Cov[y]⁻¹H

    (universal kriging; Rasmussen & Williams 2006, eq. 2.42). A symbol Q of f has Q I_p, the image
    of constant fields, in the place of I_p, and Q f in that of the first f(x) of the covariance
    with y. Q I_p is zero for parts of the field, for derivatives, and for a potential to which the
    constant does not belong; R is not, as f − c depends on c given the data.
    """

    distribution: FieldDistribution  # given c = ĉ
    mean_root: Float[Tensor, "p p"]  # a root of V
    symbol: Symbol = field(default_factory=Identity)  # Q
    space: Sequence[int] = ()
    includes_mean: bool = True  # false for a term of a sum of kernels

    @property
    def given_mean(self) -> FieldDistribution:
        return self.distribution

    @property
    def num_outputs(self) -> int:
        return self.distribution.num_outputs

    def effect(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q p"]:
        """R(x) times the root of V."""
        return self._effect(x, self.distribution.absorbed(x))

    def _effect(self, x: Tensor, absorbed: Float[Tensor, "n q p"]) -> Float[Tensor, "n q p"]:
        if not self.includes_mean:
            return -absorbed @ self.mean_root
        image = of_constants(self.symbol, x.double(), self.space, len(self.mean_root))
        return (image - absorbed) @ self.mean_root

    def mean(self, x: Tensor) -> Tensor:
        return self.distribution.mean(x)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance, absorbed = self.distribution.moments(x)
        return mean, variance + self._effect(x, absorbed).square().sum(-1), absorbed

    def variance(self, x: Tensor) -> Tensor:
        def added(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q"]:
            return self.effect(points).square().sum(-1)

        width = self.num_outputs * len(self.mean_root)
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
        symbol = symbol if isinstance(self.symbol, Identity) else symbol @ self.symbol
        return replace(image, symbol=symbol, space=tuple(space))

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> FieldDistribution:
        part = self.distribution.of_part(expansion, kernel)
        return replace(self, distribution=part, includes_mean=False)


@dataclass(frozen=True)
class Plus(FieldDistribution):
    """A distribution plus an independent Gaussian, whose covariance at every point is `added`."""

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
        """A root of that covariance, from a root of `added`."""


class PlusConstant(Plus):
    """A distribution plus a random constant, the same at all points."""

    def _added_covariance(self, x: Tensor, added: Tensor) -> Tensor:
        return added.repeat(x.shape[-2], x.shape[-2])

    def _added_root(self, x: Tensor, root: Tensor) -> Tensor:
        return root.repeat(x.shape[-2], 1)


class PlusWhite(Plus):
    """A distribution plus white noise of variance δ, independent from point to point."""

    def split(self) -> tuple[FieldDistribution, Tensor]:
        return self.distribution, self.added

    def _added_covariance(self, x: Tensor, added: Tensor) -> Tensor:
        return independent(added, x.shape[-2])

    _added_root = _added_covariance


def plus_white(
    distribution: FieldDistribution, delta: Float[Tensor, "*b p p"] | None
) -> FieldDistribution:
    """The distribution plus white noise of variance δ, if there is any."""
    return distribution if delta is None else PlusWhite(distribution, delta)
