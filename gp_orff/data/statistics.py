"""Sufficient statistics of vector observations under the columns φ; they add up over points."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.patterns import Components, Pattern
from gp_orff.features.columns import Columns
from gp_orff.features.expansion import FeatureExpansion
from gp_orff.features.lattice import LatticeColumns

_MOST_KEPT = 2**26  # numbers of a set of matrices, of which further sets are kept
_LAYERS = 3  # sets of matrices of features with complex directions


class Moments(NamedTuple):
    """Moments of the columns φ under the weights a_n of the points."""

    gram: Tensor  # Σ a φφᵀ in the form of its columns: see `Columns.gram`
    column_sum: Float[Tensor, "*b M"]  # Σ a φ
    mass: Tensor | float  # Σ a


@dataclass(frozen=True)
class Weights:
    """Sums over the relative precisions w_n of observations; they add up."""

    count: float  # N
    total: float  # Σ w_n
    squares: float  # Σ w_n²
    log: float = 0.0  # Σ log w_n

    @classmethod
    def of(cls, weight: Float[Tensor, "n"] | None, count: int) -> "Weights":
        """The sums over all observations; w_n = 1 where no weights are given."""
        if weight is None:
            return cls(count, count, count)
        sums = weight.sum(), weight.square().sum(), weight.log().sum()
        return cls(count, *(value.item() for value in sums))

    @property
    def mean(self) -> float:
        """Σ w_n / N."""
        return self.total / self.count

    def local_mean(self, num_observations: float) -> float:
        """The mean weight of `num_observations` near one of large weight.

        One of them is drawn with probability w_n/Σw_n, the others uniformly. They determine the
        field where its posterior variance is smallest.
        """
        weighted_mean = max(self.squares / self.total, self.mean)
        return self.mean + (weighted_mean - self.mean) / max(num_observations, 1.0)

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Weights") -> "Weights":
        return Weights(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, factor: float) -> "Weights":
        return Weights(*(factor * value for value in astuple(self)))


@dataclass(frozen=True)
class Statistics:
    """The sufficient statistics C = Σφφᵀ, Z = Σφyᵀ, s = Σφ, Y₂ = Σyyᵀ, y₁ = Σy and N.

    Posterior and evidence need nothing else of the data. They add up over points, so that chunks,
    streams and machines merge exactly. If each point has a relative precision w_n, every sum but N
    is weighted by w_n. Observations of a part of the vector have the moments and the y of
    `patterns`.

    Example:
        >>> import torch
        >>> from gp_orff.features.columns import TrigColumns
        >>> from gp_orff.data.statistics import Statistics
        >>> phi, x, y = TrigColumns.of(torch.randn(3, 2)), torch.randn(10, 2), torch.randn(10, 2)
        >>> parts = Statistics.of(x[:4], y[:4], phi) + Statistics.of(x[4:], y[4:], phi)
        >>> total = Statistics.of(x, y, phi)
        >>> parts.count, torch.allclose(parts.gram, total.gram)
        (10, True)
    """

    phi: Columns
    pattern: Pattern
    moments: tuple[Moments, ...]  # one for each weight a_k of the pattern
    cross: Float[Tensor, "*b M q"]  # Z
    second_moment: Float[Tensor, "*b q q"]  # Y₂
    total: Float[Tensor, "*b q"]  # y₁
    weights: Weights
    _grams: list = field(default_factory=list, init=False, repr=False, compare=False)
    _kept: list = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], phi: Columns
    ) -> "Statistics":
        """Statistics of whole vectors in one pass, in float64, differentiable in x, y and ω."""
        y = y.double()
        gram, cross, column_sum = phi.moments(x, y)
        moments = (Moments(gram, column_sum, float(x.shape[-2])),)
        pattern = Components.every(y.shape[-1])
        weights = Weights.of(None, x.shape[-2])
        return cls(phi, pattern, moments, cross, y.mT @ y, y.sum(-2), weights)

    @classmethod
    def of_observations(
        cls,
        x: Float[Tensor, "n d"],
        y: Float[Tensor, "n v"],
        phi: Columns,
        pattern: Pattern,
        weight: Float[Tensor, "n"] | None = None,
        direction: Float[Tensor, "n p"] | None = None,
    ) -> "Statistics":
        """Statistics of observations of one pattern in one pass, differentiable in ω."""
        vectors = pattern.vectors(y, direction)
        weights = pattern.weights(direction, y)
        weighted_vectors = vectors
        if weight is not None:
            weights, weighted_vectors = (
                weights * weight.unsqueeze(-1),
                vectors * weight.unsqueeze(-1),
            )
        grams, cross, sums = phi.sums(x, weighted_vectors, weights)
        masses = weights.sum(0)
        return cls(
            phi,
            pattern,
            tuple(Moments(*moments) for moments in zip(grams, sums, masses, strict=True)),
            cross,
            vectors.mT @ weighted_vectors,
            weighted_vectors.sum(0),
            Weights.of(weight, len(x)),
        )

    @property
    def gram(self) -> Float[Tensor, "*b M M"]:
        """C, for a pattern with one weight."""
        (moments,) = self.moments
        return self.phi.gram(moments.gram)

    @property
    def column_sum(self) -> Float[Tensor, "*b M"]:
        """s, for a pattern with one weight."""
        (moments,) = self.moments
        return moments.column_sum

    @property
    def num_values(self) -> float:
        """The number of observed values."""
        return self.count * self.pattern.num_values

    @property
    def masses(self) -> Float[Tensor, "k"]:
        """Σ_n w_n a_nk for every weight a_k."""
        return torch.as_tensor(
            [float(moments.mass) for moments in self.moments], dtype=torch.float64
        )

    @property
    def count(self) -> float:
        """N."""
        return self.weights.count

    def feature_grams(
        self, expansion: FeatureExpansion, other: FeatureExpansion | None = None
    ) -> list[Float[Tensor, "*b F F"]]:
        """C[c,c′] of every weight a_k, for the columns c of `expansion` and c′ of `other`, or c of
        the former; cached where C is constant.

        The cache belongs to these numbers: a value made by `replace` starts with an empty one.
        """
        right = expansion if other is None else other
        for columns, others, grams in self._grams:
            if torch.equal(columns, expansion.columns) and torch.equal(others, right.columns):
                return grams
        grams = []
        for moments in self.moments:
            gram = self.phi.gram(moments.gram)
            if not (expansion.one_to_one and right.one_to_one):
                gram = right.gather(expansion.gather(gram).mT)
                gram = gram if other is None else gram.mT  # symmetric, or not
            grams.append(gram)
        if not any(gram.requires_grad for gram in grams):
            few = sum(gram.numel() for gram in grams) <= _MOST_KEPT
            self._grams[:] = [
                (expansion.columns, right.columns, grams),
                *(self._grams[: _LAYERS - 1] if few else []),
            ]
        return grams

    def kept(
        self, compute: Callable[["Statistics"], list[Tensor]], keys: Sequence[Tensor]
    ) -> list[Tensor]:
        """What `compute` makes of these statistics, kept for the same keys."""
        if not (self._kept and all(map(torch.equal, self._kept[0], keys))):
            self._kept[:] = [keys, compute(self)]
            self._grams.clear()  # which it used
        return self._kept[1]

    def select(self, columns: Int[Tensor, "k"]) -> "Statistics":
        """The statistics of some columns."""
        moments = tuple(
            Moments(
                self.phi.gram(part.gram)[..., columns, :][..., columns],
                part.column_sum[..., columns],
                part.mass,
            )
            for part in self.moments
        )
        phi, cross = self.phi.select(columns), self.cross[..., columns, :]
        return replace(self, phi=phi, moments=moments, cross=cross)

    def on(self, phi: LatticeColumns) -> "Statistics":
        """The statistics on `phi`, whose frequencies are some of this lattice."""
        moments = []
        for part in self.moments:
            gram = self.phi.crop(part.gram, phi)
            moments.append(Moments(gram, phi.column_sum(gram), part.mass))
        cross = self.phi.pick(self.cross, phi)
        return replace(self, phi=phi, moments=tuple(moments), cross=cross)

    def to(self, device: torch.device, phi: Columns) -> "Statistics":
        """The same statistics on another device, where `phi` is."""
        moments = tuple(
            Moments(part.gram.to(device), part.column_sum.to(device), part.mass)
            for part in self.moments
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
        return self._combine(other, 1.0)

    def __sub__(self, other: "Statistics") -> "Statistics":
        return self._combine(other, -1.0)

    def __mul__(self, factor: float) -> "Statistics":
        """The statistics of data in which every observation occurs `factor` times."""
        moments = tuple(Moments(*(factor * value for value in part)) for part in self.moments)
        return replace(
            self,
            moments=moments,
            cross=factor * self.cross,
            second_moment=factor * self.second_moment,
            total=factor * self.total,
            weights=factor * self.weights,
        )

    __rmul__ = __mul__

    def _combine(self, other: "Statistics", sign: float) -> "Statistics":
        moments = tuple(
            Moments(*(a + sign * b for a, b in zip(left, right, strict=True)))
            for left, right in zip(self.moments, other.moments, strict=True)
        )
        return replace(
            self,
            moments=moments,
            cross=self.cross + sign * other.cross,
            second_moment=self.second_moment + sign * other.second_moment,
            total=self.total + sign * other.total,
            weights=self.weights + other.weights if sign > 0 else self.weights - other.weights,
        )
