"""Additive sufficient statistics of vector observations under trigonometric columns."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from gp_orff import trig


@dataclass(frozen=True)
class Statistics:
    """C = Σφφᵀ, Z = Σφyᵀ, Y₂ = Σyyᵀ and N: all a posterior and its evidence need of the data.

    They add over points, so that chunks, streams and machines merge exactly.

    Example:
        >>> import torch
        >>> from gp_orff.statistics import Statistics
        >>> omega, x, y = torch.randn(3, 2), torch.randn(10, 2), torch.randn(10, 2)
        >>> parts = Statistics.of(x[:4], y[:4], omega) + Statistics.of(x[4:], y[4:], omega)
        >>> whole = Statistics.of(x, y, omega)
        >>> parts.count, torch.allclose(parts.gram, whole.gram)
        (10, True)
    """

    gram: Float[Tensor, "*b 2*D 2*D"]  # C
    cross: Float[Tensor, "*b 2*D p"]  # Z
    second_moment: Float[Tensor, "*b p p"]  # Y₂
    count: int  # N

    @classmethod
    def of(
        cls, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N p"], omega: Float[Tensor, "*b D d"]
    ) -> "Statistics":
        """One pass over the data, differentiable in x, y and ω; float64 whatever comes in."""
        y = y.double()
        gram, cross = trig.moments(x, omega, y)
        return cls(gram, cross, y.mT @ y, x.shape[-2])

    def select(self, columns: Int[Tensor, "k"]) -> "Statistics":
        """The statistics of some columns."""
        gram = self.gram[..., columns, :][..., columns]
        return Statistics(gram, self.cross[..., columns, :], self.second_moment, self.count)

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.gram + other.gram,
            self.cross + other.cross,
            self.second_moment + other.second_moment,
            self.count + other.count,
        )
