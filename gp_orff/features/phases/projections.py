"""Products with D random unit vectors by fast transforms, without storing the vectors.

A block has as many vectors as inputs; blocks are independent of each other.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.nn.functional
from jaxtyping import Float, Int, Int8
from torch import Tensor

from gp_orff.features.phases.hadamard import hadamard


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Projection(ABC):
    """D unit vectors u_k in the space of d inputs, or of d′ ≥ d, where inputs end with zeros."""

    num_inputs: int  # d
    num_vectors: int  # D

    @classmethod
    @abstractmethod
    def draw(cls, num_inputs: int, num_vectors: int, rng: np.random.Generator) -> "Projection":
        """Random vectors."""

    @staticmethod
    @abstractmethod
    def padded(num_inputs: int) -> int:
        """d′ for d inputs."""

    @abstractmethod
    def _blocks(self, x: Float[Tensor, "*b N 1 d2"]) -> Float[Tensor, "*b N m d2"]:
        """⟨u, x⟩ for all vectors u of the m blocks."""

    @abstractmethod
    def _transposed(self, values: Float[Tensor, "*b N m d2"]) -> Float[Tensor, "*b N d2"]:
        """Σ_k v_k u_k over all vectors of the m blocks."""

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """⟨u_k, x⟩."""
        if self._dims != self.num_inputs:
            x = torch.nn.functional.pad(x, (0, self._dims - self.num_inputs))
        return self._blocks(x.unsqueeze(-2)).flatten(-2)[..., : self.num_vectors]

    def adjoint(self, values: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        """Σ_k v_k u_k."""
        dims = self._dims
        values = torch.nn.functional.pad(values, (0, -self.num_vectors % dims))
        return self._transposed(values.unflatten(-1, (-1, dims)))[..., : self.num_inputs]

    @property
    def _dims(self) -> int:
        """d′."""
        return self.padded(self.num_inputs)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """The tensors that determine the vectors; none is differentiable."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> "Projection":
        """The same vectors on another device."""
        arrays = self.arrays
        if all(array.device == device for array in arrays.values()):
            return self
        return replace(self, **{name: array.to(device) for name, array in arrays.items()})


@dataclass(frozen=True)
class FastfoodProjection(Projection):
    """The rows of H G Π H B / (‖G‖ √d′), d′ a power of two (Le et al. 2013, eq. 33).

    Each row is uniform on the sphere; rows of a block depend on each other.
    """

    signs: Int8[Tensor, "m d2"]  # B
    order: Int[Tensor, "m d2"]  # Π
    gaussians: Float[Tensor, "m d2"]  # G/(‖G‖ √d′)

    padded = staticmethod(next_power_of_two)

    @classmethod
    def draw(cls, num_inputs, num_vectors, rng):
        dims = cls.padded(num_inputs)
        shape = (-(-num_vectors // dims), dims)
        gaussians = rng.standard_normal(shape)
        gaussians /= np.linalg.norm(gaussians, axis=-1, keepdims=True) * math.sqrt(dims)
        arrays = (_orders(shape, rng), torch.from_numpy(gaussians))
        return cls(num_inputs, num_vectors, _signs(shape, rng), *arrays)

    def _blocks(self, x):
        mixed = _permuted(hadamard(x * self.signs), self.order)
        return hadamard(mixed.mul_(self.gaussians))

    def _transposed(self, values):
        mixed = _permuted_back(hadamard(values) * self.gaussians, self.order)
        return (hadamard(mixed) * self.signs).sum(-2)


@dataclass(frozen=True)
class OrthogonalProjection(Projection):
    """The rows of H D₁ H D₂ H D₃ / d′^{3/2}, D_i random signs (Yu et al. 2016, Section 4).

    Rows of a block are orthogonal. d′ is a power of two, and at least 32: with fewer, directions
    have too few values to be uniform, and kernels are wrong by up to half of the variance.
    """

    signs: Int8[Tensor, "3 m d2"]  # D₁, D₂, D₃

    @staticmethod
    def padded(num_inputs):
        return max(32, next_power_of_two(num_inputs))

    @classmethod
    def draw(cls, num_inputs, num_vectors, rng):
        dims = cls.padded(num_inputs)
        return cls(num_inputs, num_vectors, _signs((3, -(-num_vectors // dims), dims), rng))

    def _blocks(self, x):
        for signs in reversed(self.signs):
            x = hadamard(x * signs) * self._dims**-0.5
        return x

    def _transposed(self, values):
        for signs in self.signs:
            values = hadamard(values) * signs * self._dims**-0.5
        return values.sum(-2)


@dataclass(frozen=True)
class FourierProjection(Projection):
    """The rows of Π F B, F the real Fourier matrix of Hartley, for any number of inputs.

    F is orthonormal, with the entries (cos t + sin t)/√d, t = 2πjk/d (Le et al. 2013, Section 6.1,
    where F is complex).
    """

    signs: Int8[Tensor, "m d"]  # B
    order: Int[Tensor, "m d"]  # Π

    @staticmethod
    def padded(num_inputs):
        return num_inputs

    @classmethod
    def draw(cls, num_inputs, num_vectors, rng):
        shape = (-(-num_vectors // num_inputs), num_inputs)
        return cls(num_inputs, num_vectors, _signs(shape, rng), _orders(shape, rng))

    def _blocks(self, x):
        return _permuted(_hartley(x * self.signs), self.order)

    def _transposed(self, values):
        return (_hartley(_permuted_back(values, self.order)) * self.signs).sum(-2)


def _signs(shape: tuple[int, ...], rng: np.random.Generator) -> Int8[Tensor, "..."]:
    return torch.from_numpy(rng.integers(0, 2, shape, dtype=np.int8) * np.int8(2) - np.int8(1))


def _orders(shape: tuple[int, int], rng: np.random.Generator) -> Int[Tensor, "m d"]:
    """A random permutation for each block."""
    order = np.broadcast_to(np.arange(shape[-1], dtype=np.int64), shape)
    return torch.from_numpy(rng.permuted(order, axis=-1))


def _permuted(x: Float[Tensor, "*b m d"], order: Int[Tensor, "m d"]) -> Float[Tensor, "*b m d"]:
    """Π x, as a new tensor; `gather` takes half the time of `index_select`."""
    return x.gather(-1, order.expand_as(x))


def _permuted_back(
    x: Float[Tensor, "*b m d"], order: Int[Tensor, "m d"]
) -> Float[Tensor, "*b m d"]:
    """Πᵀ x."""
    return torch.zeros_like(x).scatter(-1, order.expand_as(x), x)


def _hartley(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """F x; F is symmetric and its own inverse."""
    waves = torch.fft.fft(x, norm="ortho")
    return waves.real - waves.imag
