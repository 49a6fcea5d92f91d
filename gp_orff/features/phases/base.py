"""The protocol of phases θ_k(x) = ⟨ω_k, x⟩, and those of frequencies that are written out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Phases(ABC):
    """θ_k(x) = ⟨ω_k, x⟩ of D frequencies and its derivatives; subclasses choose the algorithm."""

    num_frequencies: int  # D
    omega: Float[Tensor, "*b D d"]  # ω, written out
    zero: Bool[Tensor, "*b D"]  # which frequencies are zero
    tensors: tuple[Tensor, ...]  # the differentiable tensors, (*b, m, n) each

    @abstractmethod
    def rebuild(self, *tensors: Tensor) -> "Phases":
        """The same phases with other tensors."""

    @abstractmethod
    def select(self, frequencies: Int[Tensor, "k"]) -> "Phases":
        """The phases of some frequencies."""

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """Tensors and plain values from which a file can restore these phases."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """θ(x)."""

    @abstractmethod
    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        """∂/∂x from `grad` = ∂/∂θ."""

    @abstractmethod
    def gradients(
        self, x: Float[Tensor, "*b N d"], grad: Float[Tensor, "*b N D"]
    ) -> Sequence[Tensor]:
        """The derivative by each of the tensors from `grad` = ∂/∂θ."""

    @abstractmethod
    def same(self, other: "Phases") -> bool:
        """Whether both have the same frequencies, up to rounding."""


@dataclass(frozen=True)
class LinearPhases(Phases):
    """The phases of frequencies ω that are written out, as a matrix product."""

    omega: Float[Tensor, "*b D d"]

    @property
    def num_frequencies(self) -> int:
        return self.omega.shape[-2]

    @property
    def zero(self) -> Bool[Tensor, "*b D"]:
        return (self.omega == 0).all(-1)

    @property
    def tensors(self) -> tuple[Tensor]:
        return (self.omega,)

    def rebuild(self, omega: Float[Tensor, "*b D d"]) -> "LinearPhases":
        return LinearPhases(omega)

    def select(self, frequencies: Int[Tensor, "k"]) -> "LinearPhases":
        return LinearPhases(self.omega[..., frequencies, :])

    def plain(self) -> dict[str, Tensor]:
        return {"omega": self.omega.detach().cpu()}

    def same(self, other: Phases) -> bool:
        return isinstance(other, LinearPhases) and equal(self.omega, other.omega)

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return x @ self.omega.mT

    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        return grad @ self.omega

    def gradients(self, x: Tensor, grad: Tensor) -> tuple[Float[Tensor, "*b D d"]]:
        return (grad.mT @ x,)


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape and the same entries, up to rounding."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-9, atol=0)
