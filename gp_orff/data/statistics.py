"""Additive sufficient statistics of vector observations under the columns of features."""

from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.patterns import Components, Pattern
from gp_orff.features.columns import Columns
from gp_orff.features.expansion import FeatureExpansion


class Moments(NamedTuple):
    """Of the columns under the weights a_n of the points."""

    gram: Tensor  # Σ a φφᵀ, in the form its columns keep: see `Columns.gram`
    column_sum: Float[Tensor, "*b M"]  # Σ a φ
    mass: Tensor | float  # Σ a


@dataclass(frozen=True)
class Weights:
    """Sums over the relative precisions w_n of readings; they add."""

    count: float  # N
    total: float  # Σ w_n
    squares: float  # Σ w_n²
    log: float = 0.0  # Σ log w_n

    @classmethod
    def of(cls, weight: Float[Tensor, "n"] | None, count: int) -> "Weights":
        """Of all readings; ones where none are given."""
        if weight is None:
            return cls(count, count, count)
        sums = weight.sum(), weight.square().sum(), weight.log().sum()
        return cls(count, *(own.item() for own in sums))

    @property
    def mean(self) -> float:
        return self.total / self.count

    def nearby(self, observations: float) -> float:
        """The mean weight of so many readings, one of which is chosen with probability w_n/Σw_n:
        of those that determine the field where it is known best."""
        chosen = max(self.squares / self.total, self.mean)
        return self.mean + (chosen - self.mean) / max(observations, 1.0)

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Weights") -> "Weights":
        return Weights(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, factor: float) -> "Weights":
        return Weights(*(factor * own for own in astuple(self)))


@dataclass(frozen=True)
class Statistics:
    """C = Σφφᵀ, Z = Σφyᵀ, s = Σφ, Y₂ = Σyyᵀ, y₁ = Σy and N: all that a posterior and its evidence
    need of the data. They add over points, so that chunks, streams and machines merge exactly.

    With a relative precision w_n of every point, every sum but N is over w_n times that. Readings
    that see a part of the vector have moments and y as `patterns` has them.

    Example:
        >>> import torch
        >>> from gp_orff.features.columns import TrigColumns
        >>> from gp_orff.data.statistics import Statistics
        >>> phi, x, y = TrigColumns.of(torch.randn(3, 2)), torch.randn(10, 2), torch.randn(10, 2)
        >>> parts = Statistics.of(x[:4], y[:4], phi) + Statistics.of(x[4:], y[4:], phi)
        >>> whole = Statistics.of(x, y, phi)
        >>> parts.count, torch.allclose(parts.gram, whole.gram)
        (10, True)
    """

    phi: Columns
    pattern: Pattern
    moments: tuple[Moments, ...]  # of every weight of the pattern
    cross: Float[Tensor, "*b M q"]  # Z
    second_moment: Float[Tensor, "*b q q"]  # Y₂
    total: Float[Tensor, "*b q"]  # y₁
    weights: Weights
    _gathered: list = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], phi: Columns
    ) -> "Statistics":
        """One pass over whole vectors, differentiable in x, y and ω; float64 whatever comes in."""
        y = y.double()
        gram, cross, column_sum = phi.moments(x, y)
        moments = (Moments(gram, column_sum, float(x.shape[-2])),)
        pattern = Components.every(y.shape[-1])
        weights = Weights.of(None, x.shape[-2])
        return cls(phi, pattern, moments, cross, y.mT @ y, y.sum(-2), weights)

    @classmethod
    def of_readings(
        cls,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n v"],
        phi: Columns,
        pattern: Pattern,
        weight: Float[Tensor, "n"] | None = None,
        direction: Float[Tensor, "n p"] | None = None,
    ) -> "Statistics":
        """One pass over readings of one pattern; differentiable in ω."""
        seen = pattern.vectors(y, direction)
        weights = pattern.weights(direction, y)
        weighted = seen
        if weight is not None:
            weights, weighted = weights * weight.unsqueeze(-1), seen * weight.unsqueeze(-1)
        grams, cross, sums = phi.sums(x, weighted, weights)
        masses = weights.sum(0)
        return cls(
            phi,
            pattern,
            tuple(Moments(*parts) for parts in zip(grams, sums, masses, strict=True)),
            cross,
            seen.mT @ weighted,
            weighted.sum(0),
            Weights.of(weight, len(x)),
        )

    @property
    def gram(self) -> Float[Tensor, "*b M M"]:
        """C of readings that have one weight."""
        (moments,) = self.moments
        return self.phi.gram(moments.gram)

    @property
    def column_sum(self) -> Float[Tensor, "*b M"]:
        """s of readings that have one weight."""
        (moments,) = self.moments
        return moments.column_sum

    @property
    def num_values(self) -> float:
        """Numbers that were read."""
        return self.count * self.pattern.num_values

    @property
    def masses(self) -> Float[Tensor, "k"]:
        """Σ a of every weight."""
        return torch.as_tensor([float(own.mass) for own in self.moments], dtype=torch.float64)

    @property
    def count(self) -> float:
        """N."""
        return self.weights.count

    def gathered(self, expansion: FeatureExpansion) -> list[Float[Tensor, "*b F F"]]:
        """C[c,c] of every weight; kept for the next evaluation where C is constant.

        `replace` makes a value that keeps nothing yet: what is kept is of these numbers.
        """
        for columns, grams in self._gathered:
            if torch.equal(columns, expansion.columns):
                return grams
        grams = []
        for own in self.moments:
            gram = self.phi.gram(own.gram)
            if not expansion.one_to_one:
                gram = expansion.gather(expansion.gather(gram).mT)  # symmetric
            grams.append(gram)
        if not any(gram.requires_grad for gram in grams):
            self._gathered[:] = [(expansion.columns, grams)]
        return grams

    def select(self, columns: Int[Tensor, "k"]) -> "Statistics":
        """The statistics of some columns."""
        moments = tuple(
            Moments(
                self.phi.gram(own.gram)[..., columns, :][..., columns],
                own.column_sum[..., columns],
                own.mass,
            )
            for own in self.moments
        )
        phi, cross = self.phi.select(columns), self.cross[..., columns, :]
        return replace(self, phi=phi, moments=moments, cross=cross)

    def to(self, device: torch.device, phi: Columns) -> "Statistics":
        """On another device, where phi is."""
        moments = tuple(
            Moments(own.gram.to(device), own.column_sum.to(device), own.mass)
            for own in self.moments
        )
        return replace(
            self,
            phi=phi,
            moments=moments,
            cross=self.cross.to(device),
            second_moment=self.second_moment.to(device),
            total=self.total.to(device),
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        return self._combined(other, 1.0)

    def __sub__(self, other: "Statistics") -> "Statistics":
        return self._combined(other, -1.0)

    def __mul__(self, factor: float) -> "Statistics":
        """As if every reading counted `factor` times."""
        moments = tuple(Moments(*(factor * part for part in own)) for own in self.moments)
        return replace(
            self,
            moments=moments,
            cross=factor * self.cross,
            second_moment=factor * self.second_moment,
            total=factor * self.total,
            weights=factor * self.weights,
        )

    __rmul__ = __mul__

    def _combined(self, other: "Statistics", sign: float) -> "Statistics":
        moments = tuple(
            Moments(*(a + sign * b for a, b in zip(mine, theirs, strict=True)))
            for mine, theirs in zip(self.moments, other.moments, strict=True)
        )
        return replace(
            self,
            moments=moments,
            cross=self.cross + sign * other.cross,
            second_moment=self.second_moment + sign * other.second_moment,
            total=self.total + sign * other.total,
            weights=self.weights + other.weights if sign > 0 else self.weights - other.weights,
        )
