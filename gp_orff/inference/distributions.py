"""Gaussian distributions of a field, evaluated anywhere."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import independent
from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion
from gp_orff.symbols.base import Symbol


class FieldDistribution(ABC):
    """The Gaussian distribution of a field f, evaluated anywhere."""

    num_outputs: int
    batch_shape = torch.Size()

    @abstractmethod
    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """E[f(x)]."""

    @abstractmethod
    def variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """Var[f_j(x)]; nothing n×n."""

    @abstractmethod
    def blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Cov[f(x_n)] at every point by itself."""

    @abstractmethod
    def covariance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p n*p"]:
        """Cov[f(x)]."""

    @abstractmethod
    def root(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n*p q"]:
        """R with R Rᵀ = Cov[f(x)]."""

    def split(self) -> tuple["FieldDistribution", Float[Tensor, "*b p p"] | None]:
        """What is continuous, and the variance δ of the white noise beside it, if there is any."""
        return self, None

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "FieldDistribution":
        """The distribution of a symbol of the field, whose directions are these columns of x."""
        raise NotImplementedError

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "FieldDistribution":
        """The distribution of one term of a sum: features with directions of their own for the
        same θ, where there are features, and its kernel."""
        raise NotImplementedError


class InChunks(FieldDistribution):
    """One whose variances are found for some points at a time."""

    def variance(self, x: Tensor) -> Tensor:
        return by_chunks(self._variance, x.double(), self._width).clamp_min(0)

    def blocks(self, x: Tensor) -> Tensor:
        flat = by_chunks(lambda part: self._blocks(part).flatten(-2), x.double(), self._width)
        return flat.unflatten(-1, (self.num_outputs, self.num_outputs))

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
class Plus(FieldDistribution):
    """A distribution with something independent added, of the same variance at every point."""

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
        return self.distribution.covariance(x) + self._between(x, self.added)

    def root(self, x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.added)
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return torch.cat([self.distribution.root(x), self._root_between(x, root)], dim=-1)

    @abstractmethod
    def _between(self, x: Tensor, added: Tensor) -> Float[Tensor, "*b n*q n*q"]:
        """What is added to the covariance of the points."""

    @abstractmethod
    def _root_between(self, x: Tensor, root: Tensor) -> Float[Tensor, "*b n*q k"]:
        """A root of that, from one of what is added."""


class PlusConstant(Plus):
    """With a random constant, the same at all points."""

    def _between(self, x: Tensor, added: Tensor) -> Tensor:
        return added.repeat(x.shape[-2], x.shape[-2])

    def _root_between(self, x: Tensor, root: Tensor) -> Tensor:
        return root.repeat(x.shape[-2], 1)


class PlusWhite(Plus):
    """With white noise of variance δ, independent from point to point."""

    def split(self) -> tuple[FieldDistribution, Tensor]:
        return self.distribution, self.added

    def _between(self, x: Tensor, added: Tensor) -> Tensor:
        return independent(added, x.shape[-2])

    _root_between = _between


def plus_white(
    distribution: FieldDistribution, delta: Float[Tensor, "*b p p"] | None
) -> FieldDistribution:
    """With white noise, where there is any."""
    return distribution if delta is None else PlusWhite(distribution, delta)
