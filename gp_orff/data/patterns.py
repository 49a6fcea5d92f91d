"""What a reading sees of the vector at its point: some components, or one along a direction.

A pattern turns the algebra of whole vectors into that of its readings. With H_n the p columns a
reading sees, weights a_nk and matrices E_k such that H_nᵀH_n = Σ_k a_nk E_k, the posterior needs
the moments Σ_n a_nk φφᵀ of every k and Σ_n φ (H_nᵀy_n)ᵀ, whatever the noise is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Components:
    """Some components, the same ones at every point; noise Σ restricted to them."""

    columns: tuple[int, ...]
    num_outputs: int  # p

    @classmethod
    def every(cls, num_outputs: int) -> "Components":
        return cls(tuple(range(num_outputs)), num_outputs)

    @property
    def complete(self) -> bool:
        """Whether whole vectors are seen."""
        return len(self.columns) == self.num_outputs

    @property
    def num_values(self) -> int:
        """Numbers in a reading."""
        return len(self.columns)

    @property
    def num_columns(self) -> int:
        """Columns of the y it is read from."""
        return self.num_outputs

    def weights(self, direction: None, like: Float[Tensor, "n _"]) -> Float[Tensor, "n 1"]:
        """a_n = 1."""
        return torch.ones_like(like[:, :1])

    def vectors(self, y: Float[Tensor, "n v"], direction: None) -> Float[Tensor, "n v"]:
        """H_nᵀ y_n, in the components seen."""
        return y

    def basis(self, like: Tensor) -> Sequence[Float[Tensor, "q q"]]:
        """The E_k."""
        return [torch.eye(self.num_values, dtype=like.dtype, device=like.device)]

    def select(self, m: Float[Tensor, "*b F p"]) -> Float[Tensor, "*b F q"]:
        """The components of directions that are seen."""
        return m if self.complete else m[..., list(self.columns)]

    def embed(self, values: Float[Tensor, "*b F q"]) -> Float[Tensor, "*b F p"]:
        """The adjoint of `select`."""
        if self.complete:
            return values
        out = values.new_zeros(*values.shape[:-1], self.num_outputs)
        return out.index_copy(-1, torch.tensor(self.columns, device=values.device), values)

    def noise(self, covariance: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b v v"]:
        """The covariance of a reading's noise from that of a vector's."""
        return self.select(self.select(covariance).mT)

    def unweighted_noise(
        self, covariance: Float[Tensor, "*b p p"], masses: Float[Tensor, "k"], count: float
    ) -> Float[Tensor, "*b v v"]:
        """The same for a variance that has no weights, given Σ_n w_n a_n and N: exact where all
        weights are one, else multiplied with their mean, so that all noise grows by one factor;
        `VectorFieldGP` takes grids for which that is below 1.01, if tolerance and budget allow."""
        return self.noise(covariance) * (masses[0] / count)

    def precision(self, inverse: Float[Tensor, "*b v v"]) -> Float[Tensor, "*b q q"]:
        """P with H_nᵀ Σ⁻¹ H_n = Σ_k a_nk P E_k."""
        return inverse

    def rows(self, values: Float[Tensor, "n p k"], direction: None) -> Float[Tensor, "n v k"]:
        """H_n of vectors."""
        return values if self.complete else values[:, list(self.columns)]


@dataclass(frozen=True)
class LineOfSight:
    """The component along a unit vector u_n of its own at every point, as radars see it.

    H_n = u_nᵀ, with noise of one variance: that of a vector, which must not depend on direction.
    """

    num_outputs: int

    columns = (0,)
    num_values = num_columns = 1
    complete = False

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.num_outputs) for j in range(i + 1)]

    def weights(self, direction: Float[Tensor, "n p"], like: Tensor) -> Float[Tensor, "n k"]:
        """a_n,ij = u_i u_j for i ≥ j."""
        columns = [direction[:, i] * direction[:, j] for i, j in self._pairs]
        return torch.stack(columns, dim=-1)

    def vectors(self, y: Float[Tensor, "n 1"], direction: Float[Tensor, "n p"]) -> Tensor:
        return direction * y

    def basis(self, like: Tensor) -> Sequence[Float[Tensor, "p p"]]:
        found = []
        for i, j in self._pairs:
            e = torch.zeros(self.num_outputs, self.num_outputs, dtype=like.dtype)
            e[i, j] = e[j, i] = 1.0
            found.append(e.to(like.device))
        return found

    def select(self, m: Float[Tensor, "*b F p"]) -> Float[Tensor, "*b F p"]:
        return m

    def embed(self, values: Float[Tensor, "*b F p"]) -> Float[Tensor, "*b F p"]:
        return values

    def noise(self, covariance: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b 1 1"]:
        variance = covariance[..., :1, :1]
        eye = torch.eye(self.num_outputs, dtype=covariance.dtype, device=covariance.device)
        if not torch.allclose(covariance, variance * eye, rtol=1e-6, atol=0):
            raise ValueError(
                "expected a noise that does not depend on direction for readings along directions, "
                f"got {covariance.detach().tolist()}; give them a group of their own (group=), or "
                "use MultitaskGaussianLikelihood(..., has_task_noise=False)"
            )
        return variance

    def unweighted_noise(
        self, covariance: Float[Tensor, "*b p p"], masses: Float[Tensor, "k"], count: float
    ) -> Float[Tensor, "*b 1 1"]:
        """The mean of uᵀ Σ u."""
        parts = zip(masses, self.basis(covariance), strict=True)
        second = sum(mass * e for mass, e in parts)
        return ((covariance * second).sum((-1, -2)) / count)[..., None, None]

    def precision(self, inverse: Float[Tensor, "*b 1 1"]) -> Float[Tensor, "*b p p"]:
        return inverse * torch.eye(self.num_outputs, dtype=inverse.dtype, device=inverse.device)

    def rows(self, values: Float[Tensor, "n p k"], direction: Float[Tensor, "n p"]) -> Tensor:
        return (values * direction.unsqueeze(-1)).sum(1, keepdim=True)


Pattern = Components | LineOfSight


DEFAULT = ""  # the instrument of readings that name none


class GroupKey(NamedTuple):
    """Readings whose statistics add up."""

    label: str  # of the instrument, which has a noise of its own
    pattern: Pattern
