"""Gaussian distributions of a field, evaluated anywhere."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion
from gp_orff.symbols.base import Symbol


class FieldLaw(ABC):
    """The Gaussian law of a field f, evaluated anywhere."""

    num_outputs: int
    batch_shape = torch.Size()

    @abstractmethod
    def mean(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """E[f(x)]."""

    def variance(self, x: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p"]:
        """Var[f_j(x)], in chunks of points."""
        return by_chunks(self._variance, x.double(), self._width).clamp_min(0)

    def blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n p p"]:
        """Cov[f(x_n)] at every point by itself, in chunks of points."""
        flat = by_chunks(lambda part: self._blocks(part).flatten(-2), x.double(), self._width)
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
