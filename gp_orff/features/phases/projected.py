"""Phases by fast projections: ω_k = r_k u_k / ℓ, u_k a unit vector that is not stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.features.phases.base import Phases, equal
from gp_orff.features.phases.projections import Projection


@dataclass(frozen=True)
class ProjectedPhases(Phases):
    """⟨ω_k, x⟩ = r_k ⟨u_k, x/ℓ⟩ of the input columns `dims`."""

    projection: Projection  # u
    radius: Float[Tensor, "*b D 1"]  # r
    inverse_lengthscale: Float[Tensor, "*b 1 k"]  # 1/ℓ
    dims: Sequence[int]  # the k inputs that ω is not zero in; a range, if all
    num_inputs: int  # d
    chosen: Int[Tensor, "D"] | None = None  # which u_k, if not all

    @property
    def num_frequencies(self) -> int:
        return self.radius.shape[-2]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.radius, self.inverse_lengthscale

    @property
    def omega(self) -> Float[Tensor, "*b D d"]:
        return self(torch.eye(self.num_inputs).to(self.radius)).mT

    @property
    def zero(self) -> Bool[Tensor, "*b D"]:
        return (self.radius == 0).squeeze(-1)

    def rebuild(
        self, radius: Float[Tensor, "*b D 1"], inverse_lengthscale: Float[Tensor, "*b 1 k"]
    ) -> "ProjectedPhases":
        device = radius.device
        return replace(
            self,
            projection=self.projection.to(device),
            radius=radius,
            inverse_lengthscale=inverse_lengthscale,
            chosen=None if self.chosen is None else self.chosen.to(device),
        )

    def select(self, frequencies: Int[Tensor, "k"]) -> "ProjectedPhases":
        chosen = frequencies if self.chosen is None else self.chosen[frequencies]
        return replace(self, radius=self.radius[..., frequencies, :], chosen=chosen)

    def plain(self) -> dict[str, object]:
        projection = self.projection
        sizes = {"num_inputs": projection.num_inputs, "num_vectors": projection.num_vectors}
        arrays = {name: array.cpu() for name, array in projection.arrays.items()}
        return {
            "projection": {"class": type(projection).__name__, **sizes, **arrays},
            "radius": self.radius.detach().cpu(),
            "inverse_lengthscale": self.inverse_lengthscale.detach().cpu(),
            "dims": tuple(self.dims),
            "num_inputs": self.num_inputs,
            "chosen": None if self.chosen is None else self.chosen.cpu(),
        }

    def same(self, other: Phases) -> bool:
        return (
            isinstance(other, ProjectedPhases)
            and type(self.projection) is type(other.projection)
            and (self.dims, self.num_inputs) == (other.dims, other.num_inputs)
            and all(map(equal, self._determining, other._determining))
        )

    @property
    def _determining(self) -> list[Tensor]:
        """All that determines the frequencies."""
        every = torch.arange(self.num_frequencies) if self.chosen is None else self.chosen.cpu()
        return [*self.projection.arrays.values(), *self.tensors, every]

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return self._project(x) * self.radius.mT

    def _project(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """⟨u_k, x/ℓ⟩."""
        values = self.projection(self._inputs(x) * self.inverse_lengthscale)
        return values if self.chosen is None else values.index_select(-1, self.chosen)

    def _inputs(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N k"]:
        return x if self._takes_all else x[..., list(self.dims)]

    @property
    def _takes_all(self) -> bool:
        return self.dims == range(self.num_inputs)

    def _adjoint(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N k"]:
        """∂/∂(x/ℓ)."""
        values = grad * self.radius.mT
        if self.chosen is not None:
            every = values.new_zeros(*values.shape[:-1], self.projection.num_vectors)
            values = every.index_add(-1, self.chosen, values)
        return self.projection.adjoint(values)

    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        gradient = self._adjoint(grad) * self.inverse_lengthscale
        if self._takes_all:
            return gradient
        zeros = gradient.new_zeros(*gradient.shape[:-1], self.num_inputs)
        return zeros.index_copy(-1, torch.tensor(self.dims, device=grad.device), gradient)

    def gradients(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        by_radius = (grad * self._project(x)).sum(-2).unsqueeze(-1)
        by_scale = (self._adjoint(grad) * self._inputs(x)).sum(-2, keepdim=True)
        return by_radius, by_scale


def as_range(dims: Sequence[int]) -> Sequence[int]:
    """The same columns; 0, 1, 2, … as a range, which compares without going through them."""
    first = range(len(dims))
    return first if tuple(dims) == tuple(first) else dims


@dataclass(frozen=True)
class SumOfPhases(Phases):
    """Phases of the frequencies Σ_i ω_ki, as of products of kernels."""

    parts: tuple[Phases, ...]

    @property
    def num_frequencies(self) -> int:
        return self.parts[0].num_frequencies

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    @property
    def omega(self) -> Float[Tensor, "*b D d"]:
        return sum(part.omega for part in self.parts)

    @property
    def zero(self) -> Bool[Tensor, "*b D"]:
        return torch.stack(torch.broadcast_tensors(*(part.zero for part in self.parts))).all(0)

    def rebuild(self, *tensors: Tensor) -> "SumOfPhases":
        left = iter(tensors)
        return SumOfPhases(tuple(p.rebuild(*islice(left, len(p.tensors))) for p in self.parts))

    def select(self, frequencies: Int[Tensor, "k"]) -> "SumOfPhases":
        return SumOfPhases(tuple(part.select(frequencies) for part in self.parts))

    def plain(self) -> dict[str, list]:
        return {"parts": [part.plain() for part in self.parts]}

    def same(self, other: Phases) -> bool:
        return (
            isinstance(other, SumOfPhases)
            and len(self.parts) == len(other.parts)
            and all(one.same(two) for one, two in zip(self.parts, other.parts, strict=True))
        )

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return sum(part(x) for part in self.parts)

    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        return sum(part.point_gradient(grad) for part in self.parts)

    def gradients(self, x: Tensor, grad: Tensor) -> Sequence[Tensor]:
        return [g for part in self.parts for g in part.gradients(x, grad)]
