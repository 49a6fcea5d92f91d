"""Additive sufficient statistics of vector observations under trigonometric columns."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.columns import TrigColumns
from gp_orff.expansion import FeatureExpansion


@dataclass(frozen=True)
class Statistics:
    """C = Σφφᵀ, Z = Σφyᵀ, s = Σφ, Y₂ = Σyyᵀ, y₁ = Σy and N: all that a posterior and its evidence
    need of the data. They add over points, so that chunks, streams and machines merge exactly.

    Example:
        >>> import torch
        >>> from gp_orff.columns import TrigColumns
        >>> from gp_orff.statistics import Statistics
        >>> phi, x, y = TrigColumns(torch.randn(3, 2)), torch.randn(10, 2), torch.randn(10, 2)
        >>> parts = Statistics.of(x[:4], y[:4], phi) + Statistics.of(x[4:], y[4:], phi)
        >>> whole = Statistics.of(x, y, phi)
        >>> parts.count, torch.allclose(parts.gram, whole.gram)
        (10, True)
    """

    gram: Float[Tensor, "*b 2*D 2*D"]  # C
    cross: Float[Tensor, "*b 2*D p"]  # Z
    column_sum: Float[Tensor, "*b 2*D"]  # s
    second_moment: Float[Tensor, "*b p p"]  # Y₂
    total: Float[Tensor, "*b p"]  # y₁
    count: int  # N
    _gathered: list = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(
        cls, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], phi: TrigColumns
    ) -> "Statistics":
        """One pass over the data, differentiable in x, y and ω; float64 whatever comes in."""
        y = y.double()
        gram, cross, column_sum = phi.moments(x, y)
        return cls(gram, cross, column_sum, y.mT @ y, y.sum(-2), x.shape[-2])

    def gathered(self, expansion: FeatureExpansion) -> Float[Tensor, "*b F F"]:
        """C[c,c]; kept for the next evaluation where C is constant."""
        if expansion.one_to_one:
            return self.gram
        for columns, gram in self._gathered:
            if torch.equal(columns, expansion.columns):
                return gram
        gram = expansion.gather(expansion.gather(self.gram).mT)  # symmetric
        if not gram.requires_grad:
            self._gathered[:] = [(expansion.columns, gram)]
        return gram

    def select(self, columns: Int[Tensor, "k"]) -> "Statistics":
        """The statistics of some columns."""
        return Statistics(
            self.gram[..., columns, :][..., columns],
            self.cross[..., columns, :],
            self.column_sum[..., columns],
            self.second_moment,
            self.total,
            self.count,
        )

    def centred(self, mean: Float[Tensor, "*b p"]) -> "Statistics":
        """The statistics of y − mean."""
        outer = mean.unsqueeze(-1) * self.total.unsqueeze(-2)
        square = mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return Statistics(
            self.gram,
            self.cross - self.column_sum.unsqueeze(-1) * mean.unsqueeze(-2),
            self.column_sum,
            self.second_moment - outer - outer.mT + self.count * square,
            self.total - self.count * mean,
            self.count,
            self._gathered,
        )

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.gram + other.gram,
            self.cross + other.cross,
            self.column_sum + other.column_sum,
            self.second_moment + other.second_moment,
            self.total + other.total,
            self.count + other.count,
        )
