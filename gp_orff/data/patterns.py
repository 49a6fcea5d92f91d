"""Patterns H_n: the components of the vector f(x_n) that an observation has, or its direction.

An observation is y_n = H_n f(x_n) + ε_n. Let q be the number of components that H_n involves, and
H_nᵀH_n = Σ_k a_nk E_k with weights a_nk and fixed matrices E_k (q, q). For any noise, the posterior
then depends on the data through the moments Σ_n a_nk φφᵀ for each k and Σ_n φ (H_nᵀy_n)ᵀ only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Components:
    """A pattern of observations that have the same components of the vector at each point. The
    noise covariance is the one of these components."""

    columns: tuple[int, ...]
    num_outputs: int  # p

    along = False  # whether observations are along directions

    @classmethod
    def every(cls, num_outputs: int) -> "Components":
        """All p components."""
        return cls(tuple(range(num_outputs)), num_outputs)

    @property
    def complete(self) -> bool:
        """Whether all components are observed."""
        return len(self.columns) == self.num_outputs

    @property
    def num_values(self) -> int:
        """The number v of values of an observation."""
        return len(self.columns)

    @property
    def num_columns(self) -> int:
        """The number of columns of the y that the user gave."""
        return self.num_outputs

    def weights(self, direction: None, like: Float[Tensor, "n _"]) -> Float[Tensor, "n 1"]:
        """a_n = 1."""
        return torch.ones_like(like[:, :1])

    def vectors(self, y: Float[Tensor, "n v"], direction: None) -> Float[Tensor, "n v"]:
        """H_nᵀ y_n, restricted to the q components."""
        return y

    def basis(self, like: Tensor) -> Sequence[Float[Tensor, "q q"]]:
        """The matrices E_k, with the dtype and device of `like`."""
        return [torch.eye(self.num_values, dtype=like.dtype, device=like.device)]

    def select(self, m: Float[Tensor, "*b F p"]) -> Float[Tensor, "*b F q"]:
        """The q components of directions m."""
        return m if self.complete else m[..., list(self.columns)]

    def embed(self, values: Float[Tensor, "*b F q"]) -> Float[Tensor, "*b F p"]:
        """The adjoint of `select`, with zeros in all other components."""
        if self.complete:
            return values
        out = values.new_zeros(*values.shape[:-1], self.num_outputs)
        return out.index_copy(-1, torch.tensor(self.columns, device=values.device), values)

    def noise(self, covariance: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b v v"]:
        """H Σ Hᵀ: the noise covariance of an observation, from the noise covariance of a vector."""
        return self.select(self.select(covariance).mT)

    def unweighted_noise(
        self, covariance: Float[Tensor, "*b p p"], masses: Float[Tensor, "k"], count: float
    ) -> Float[Tensor, "*b v v"]:
        """Return H δ Hᵀ Σ_n w_n a_n / N, which approximates noise of variance δ that is not divided
        by weights w_n.

        The noise of a group is divided by the weights, but the truncated variance δ is not. The
        result is exact if all weights are one. Otherwise δ is multiplied by the mean weight, so
        that the noise of all observations increases by one factor. If tolerance and budget allow,
        `VectorFieldGP` uses grids for which this factor is below 1.01.
        """
        return self.noise(covariance) * (masses[0] / count)

    def precision(self, inverse: Float[Tensor, "*b v v"]) -> Float[Tensor, "*b q q"]:
        """Return P, for which H_nᵀ Σ⁻¹ H_n = Σ_k a_nk P E_k."""
        return inverse

    def rows(self, values: Float[Tensor, "n p k"], direction: None) -> Float[Tensor, "n v k"]:
        """H_n of k vectors."""
        return values if self.complete else values[:, list(self.columns)]


@dataclass(frozen=True)
class LineOfSight:
    """The component along a unit vector u_n, which may differ between points: H_n = u_nᵀ.

    Radars, for example, observe such components. The noise covariance of a vector must be Σ = σ² I,
    so that every observation has the noise variance σ².
    """

    num_outputs: int

    columns = (0,)
    num_values = num_columns = 1
    complete, along = False, True

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(self.num_outputs) for j in range(i + 1)]

    def weights(self, direction: Float[Tensor, "n p"], like: Tensor) -> Float[Tensor, "n k"]:
        """a_n,ij = u_i u_j for i ≥ j."""
        columns = [direction[:, i] * direction[:, j] for i, j in self._pairs]
        return torch.stack(columns, dim=-1)

    def vectors(self, y: Float[Tensor, "n 1"], direction: Float[Tensor, "n p"]) -> Tensor:
        """H_nᵀ y_n = u_n y_n."""
        return direction * y

    def basis(self, like: Tensor) -> Sequence[Float[Tensor, "p p"]]:
        """E_ij: ones at (i, j) and (j, i)."""
        matrices = []
        for i, j in self._pairs:
            e = torch.zeros(self.num_outputs, self.num_outputs, dtype=like.dtype)
            e[i, j] = e[j, i] = 1.0
            matrices.append(e.to(like.device))
        return matrices

    def select(self, m: Float[Tensor, "*b F p"]) -> Float[Tensor, "*b F p"]:
        """All components of directions m."""
        return m

    def embed(self, values: Float[Tensor, "*b F p"]) -> Float[Tensor, "*b F p"]:
        """The adjoint of `select`."""
        return values

    def noise(self, covariance: Float[Tensor, "*b p p"]) -> Float[Tensor, "*b 1 1"]:
        """The variance σ² of an observation, for Σ = σ² I."""
        variance = covariance[..., :1, :1]
        eye = torch.eye(self.num_outputs, dtype=covariance.dtype, device=covariance.device)
        if not torch.allclose(covariance, variance * eye, rtol=1e-6, atol=0):
            raise ValueError(
                "expected noise that does not depend on direction for line-of-sight observations, "
                f"got {covariance.detach().tolist()}; give them a separate group (group=) or "
                "use MultitaskGaussianLikelihood(..., has_task_noise=False)"
            )
        return variance

    def unweighted_noise(
        self, covariance: Float[Tensor, "*b p p"], masses: Float[Tensor, "k"], count: float
    ) -> Float[Tensor, "*b 1 1"]:
        """Σ_n w_n u_nᵀ δ u_n / N."""
        pairs = zip(masses, self.basis(covariance), strict=True)
        second = sum(mass * e for mass, e in pairs)
        return ((covariance * second).sum((-1, -2)) / count)[..., None, None]

    def precision(self, inverse: Float[Tensor, "*b 1 1"]) -> Float[Tensor, "*b p p"]:
        """Return P, for which H_nᵀ Σ⁻¹ H_n = Σ_k a_nk P E_k."""
        return inverse * torch.eye(self.num_outputs, dtype=inverse.dtype, device=inverse.device)

    def rows(self, values: Float[Tensor, "n p k"], direction: Float[Tensor, "n p"]) -> Tensor:
        """H_n of k vectors."""
        return (values * direction.unsqueeze(-1)).sum(1, keepdim=True)


Pattern = Components | LineOfSight


DEFAULT = ""  # the label of observations without a group


class GroupKey(NamedTuple):
    """The common properties of the observations of a group, whose statistics can be added."""

    label: str  # the name of the group's likelihood
    pattern: Pattern
    known: bool = False  # whether 1/w_n are noise variances that were given with the observations

    def plain(self) -> dict[str, object]:
        """Return plain values for files."""
        columns = None if self.pattern.along else list(self.pattern.columns)
        outputs = self.pattern.num_outputs
        return {
            "label": self.label,
            "columns": columns,
            "num_outputs": outputs,
            "known": self.known,
        }

    @classmethod
    def from_plain(cls, content: Mapping) -> "GroupKey":
        """Return the key from the values that `plain` returned."""
        columns, outputs = content["columns"], content["num_outputs"]
        pattern = LineOfSight(outputs) if columns is None else Components(tuple(columns), outputs)
        return cls(content["label"], pattern, content.get("known", False))
