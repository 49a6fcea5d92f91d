"""Mixtures of the posteriors under several hyperparameters, by their first two moments."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import of_constants
from gp_orff.features.chunked import by_chunks
from gp_orff.features.expansion import Expansion
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.kernels.fields import counterpart
from gp_orff.symbols.base import Identity, Symbol


@dataclass(frozen=True)
class Member:
    """The posterior of a field under one value of the hyperparameters.

    Attributes:
        weight: its probability.
        kernel: with these hyperparameters.
        distribution: of the field less its constant mean.
        mean: that constant, (p,).
    """

    weight: float
    kernel: Kernel
    distribution: FieldDistribution
    mean: Float[Tensor, "p"]


@dataclass(frozen=True)
class Mixture(FieldDistribution):
    """A mixture of Gaussian distributions, taken for a Gaussian one:

        E f = Σ_s w_s m_s ,    Cov f = Σ_s w_s (C_s + (m_s − E f)(m_s − E f)ᵀ) .

    Args:
        members: with weights that add up to one; m_s includes the mean of a member.
        mean_of_all: the constant whose image is subtracted of them, (p,).
        kernel: whose terms name the parts.
        symbol, space: a map of the field that all this is of, and its directions.
    """

    members: Sequence[Member]
    mean_of_all: Float[Tensor, "p"]
    kernel: Kernel
    symbol: Symbol = field(default_factory=Identity)
    space: Sequence[int] = ()

    @property
    def num_outputs(self) -> int:
        return self.members[0].distribution.num_outputs

    @property
    def _weights(self) -> Float[Tensor, "S"]:
        weights = [member.weight for member in self.members]
        return torch.tensor(weights, dtype=torch.float64).to(self.mean_of_all.device)

    def _shifts(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        """The images of the means of all members, less that of `mean_of_all`."""
        image = of_constants(self.symbol, x.double(), self.space, len(self.mean_of_all))
        return torch.stack([image @ (own.mean - self.mean_of_all) for own in self.members])

    def _means(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        return torch.stack([own.distribution.mean(x) for own in self.members]) + self._shifts(x)

    def _average(self, values: Float[Tensor, "S n q"]) -> Float[Tensor, "n q"]:
        return torch.tensordot(self._weights, values, 1)

    def _spread(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "S n q"]:
        """√w_s (m_s − E f)."""
        means = self._means(x)
        return self._weights.sqrt()[:, None, None] * (means - self._average(means))

    def mean(self, x: Tensor) -> Tensor:
        return self._mean_and_variance(x)[..., 0]

    def variance(self, x: Tensor) -> Tensor:
        return self._mean_and_variance(x)[..., 1]

    def _mean_and_variance(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q 2"]:
        """E f and Var f together, kept for the last points: a map asks for one after the other."""
        if self._last and torch.equal(self._last[0], x) and not x.requires_grad:
            return self._last[1]
        width = 2 * len(self.members) * self.num_outputs
        pair = by_chunks(self._moments_of_chunk, x, width).unflatten(-1, (self.num_outputs, 2))
        self._last[:] = [x.detach().clone(), pair.detach()]
        return pair

    @cached_property
    def _last(self) -> list[Tensor]:
        return []

    def __getstate__(self) -> dict:
        return {name: own for name, own in self.__dict__.items() if name != "_last"}

    def _moments_of_chunk(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q*2"]:
        means, variances, _ = zip(
            *(own.distribution.moments(x) for own in self.members), strict=True
        )
        means = torch.stack(means) + self._shifts(x)
        mean = self._average(means)
        variance = self._average(torch.stack(variances) + (means - mean).square())
        return torch.stack([mean, variance], dim=-1).flatten(1)

    def blocks(self, x: Tensor) -> Tensor:
        within = sum(own.weight * own.distribution.blocks(x) for own in self.members)
        spread = self._spread(x).movedim(0, -1)  # (n, q, S)
        return within + spread @ spread.mT

    def normals(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        blocks = torch.stack([own.distribution.blocks(x) for own in self.members])
        return self._weights, self._means(x), blocks

    def covariance(self, x: Tensor) -> Tensor:
        within = sum(own.weight * own.distribution.covariance(x) for own in self.members)
        spread = self._spread(x).flatten(1)
        return within + spread.mT @ spread

    def root(self, x: Tensor) -> Tensor:
        roots = [own.weight**0.5 * own.distribution.root(x) for own in self.members]
        return torch.cat([*roots, self._spread(x).flatten(1).mT], dim=-1)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "Mixture":
        members = [
            replace(own, distribution=own.distribution.apply(symbol, space)) for own in self.members
        ]
        symbol = symbol if isinstance(self.symbol, Identity) else symbol @ self.symbol
        return replace(self, members=members, symbol=symbol, space=tuple(space))

    def of_part(self, expansion: Expansion | None, kernel: Kernel) -> "Mixture":
        """That of one term of a sum of kernels, by the terms of the members; its mean is zero."""
        zero = torch.zeros_like(self.mean_of_all)
        members = []
        for own in self.members:
            part = counterpart(kernel, self.kernel, own.kernel)
            distribution = own.distribution.split()[0].of_part(expansion, part)
            members.append(replace(own, kernel=part, distribution=distribution, mean=zero))
        return Mixture(members, zero, kernel)
