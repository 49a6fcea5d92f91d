"""The phases ⟨ω_k, x⟩ of D frequencies, with one class for each algorithm."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import numpy as np
import torch
import torch.nn.functional
from jaxtyping import Bool, Float, Int, Int8
from torch import Tensor

from gp_orff.kernels.base import map_tensors, tensors_of

# The protocol of phases θ_k(x) = ⟨ω_k, x⟩, and phases of frequencies that are stored as a matrix.


class Phases(ABC):
    """The phases θ_k(x) = ⟨ω_k, x⟩ of D frequencies, and their derivatives.

    Attributes:
        num_frequencies: D, the number of frequencies.
        omega: the matrix of the frequencies ω, (*b, D, d), in radians per unit of the inputs.
        zero: whether each frequency is zero, (*b, D).
        tensors: the differentiable tensors, (*b, m, n) each.
        num_arrays: the number of temporary arrays (*b, N, D) in one call.
        written_out: whether the phases are `LinearPhases`.
    """

    num_frequencies: int
    omega: Float[Tensor, "*b D d"]
    zero: Bool[Tensor, "*b D"]
    tensors: tuple[Tensor, ...]
    num_arrays = 1
    written_out = False

    @abstractmethod
    def rebuild(self, *tensors: Tensor) -> "Phases":
        """Return these phases with these tensors in place of `self.tensors`."""

    @abstractmethod
    def select(self, frequencies: Int[Tensor, "k"]) -> "Phases":
        """Return the phases of the frequencies with these indices."""

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """Return the tensors and plain values that determine these phases."""

    @abstractmethod
    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """Return θ(x) in radians."""

    @abstractmethod
    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        """Return the derivative by x from `grad`, the derivative by θ."""

    @abstractmethod
    def gradients(
        self, x: Float[Tensor, "*b N d"], grad: Float[Tensor, "*b N D"]
    ) -> Sequence[Tensor]:
        """Return the derivative by each of the tensors from `grad`, the derivative by θ."""


@dataclass(frozen=True)
class LinearPhases(Phases):
    """The phases x ωᵀ of frequencies that are stored as a matrix ω."""

    omega: Float[Tensor, "*b D d"]
    written_out = True

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

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return x @ self.omega.mT

    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        return grad @ self.omega

    def gradients(self, x: Tensor, grad: Tensor) -> tuple[Float[Tensor, "*b D d"]]:
        return (grad.mT @ x,)


# The fast Walsh–Hadamard transform, as products with small dense Hadamard matrices.


def hadamard(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    r"""Return H x for every vector x, where H is the Walsh–Hadamard matrix.

    The matrix satisfies H_2d = [[H_d, H_d], [H_d, −H_d]] and H_1 = 1. With d = d₁ ⋯ d_m it is the
    Kronecker product of the matrices H_{d_i}. Each factor multiplies x along one axis, so the m
    products need d (d₁ + … + d_m) multiplications. H is symmetric, and H H = d I. The result can be
    a transposed view, which saves a copy. Source: Le et al. 2013, Section 4.2.

    Raises:
        ValueError: d is not a power of two.
    """
    num_dims = x.shape[-1]
    if num_dims < 1 or num_dims & (num_dims - 1):
        raise ValueError(
            f"hadamard expects vectors whose length is a power of two, got {num_dims}; pad the "
            "vectors with zeros"
        )
    shape = x.shape
    for size in _sizes(num_dims.bit_length() - 1):  # each product moves the last axis to the front
        x = _matrix(size, x.dtype, x.device) @ x.reshape(-1, size).mT
    return x.reshape(num_dims, -1).mT.reshape(shape)


@cache
def _sizes(log_dims: int) -> tuple[int, ...]:
    """Return nearly equal sizes of at most 16 whose product is 2^log_dims.

    Larger sizes need more multiplications, and smaller sizes need more copies.
    """
    number = -(-log_dims // 4)
    return tuple(2 ** ((log_dims + i) // number) for i in range(number))


@cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d d"]:
    """Return the dense matrix H.

    Element (i, j) is (−1)^n, where n is the number of binary digits that are 1 in both i and j.
    """
    with torch.inference_mode(False):  # the cache may use the matrix in training later
        index = torch.arange(size, device=device)
        common = index.unsqueeze(-1) & index
        parity = sum((common >> shift) & 1 for shift in range(size.bit_length())) & 1
        return (1 - 2 * parity).to(dtype)


# Products with D random unit vectors by fast transforms. The vectors are not stored.
#
# A block has d′ vectors, as many as there are padded inputs. Blocks are independent of each other.


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class Projection(ABC):
    """D unit vectors u_k with d′ ≥ d components; inputs are padded with zeros from d to d′.

    Attributes:
        num_inputs: d, the number of inputs.
        num_vectors: D, the number of vectors.
    """

    num_inputs: int
    num_vectors: int

    @classmethod
    @abstractmethod
    def draw(cls, num_inputs: int, num_vectors: int, rng: np.random.Generator) -> "Projection":
        """Return D = `num_vectors` random vectors for d = `num_inputs` inputs."""

    @staticmethod
    @abstractmethod
    def padded(num_inputs: int) -> int:
        """Return d′ for d inputs."""

    @abstractmethod
    def _blocks(self, x: Float[Tensor, "*b N 1 d2"]) -> Float[Tensor, "*b N m d2"]:
        """Return ⟨u, x⟩ for all vectors u of the m blocks."""

    @abstractmethod
    def _transposed(self, values: Float[Tensor, "*b N m d2"]) -> Float[Tensor, "*b N d2"]:
        """Return Σ_k v_k u_k over all vectors of the m blocks."""

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """Return ⟨u_k, x⟩ for all k."""
        if self._dims != self.num_inputs:
            x = torch.nn.functional.pad(x, (0, self._dims - self.num_inputs))
        return self._blocks(x.unsqueeze(-2)).flatten(-2)[..., : self.num_vectors]

    def adjoint(self, values: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        """Return Σ_k v_k u_k."""
        dims = self._dims
        # The last block may be incomplete. The values of its missing vectors are zero.
        values = torch.nn.functional.pad(values, (0, -self.num_vectors % dims))
        return self._transposed(values.unflatten(-1, (-1, dims)))[..., : self.num_inputs]

    @property
    def _dims(self) -> int:
        """d′."""
        return self.padded(self.num_inputs)

    def to(self, device: torch.device) -> "Projection":
        """Return these vectors on another device."""
        if all(array.device == device for array in tensors_of(self).values()):
            return self
        return map_tensors(self, lambda array: array.to(device))


@dataclass(frozen=True)
class FastfoodProjection(Projection):
    """The rows of H G Π H B / (‖G‖ √d′), where d′ is a power of two.

    B is a diagonal matrix of random signs, Π a random permutation, and G a diagonal matrix of
    normal random numbers. Each row is uniform on the sphere. Rows of a block depend on each other.
    Source: Le et al. 2013, eq. 33.

    Attributes:
        signs: the diagonal of B for each of m blocks, (m, d′).
        order: the permutation Π for each block, (m, d′).
        gaussians: the diagonal of G/(‖G‖ √d′) for each block, (m, d′).
    """

    signs: Int8[Tensor, "m d2"]
    order: Int[Tensor, "m d2"]
    gaussians: Float[Tensor, "m d2"]

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
        # H is symmetric, so the transpose has the same factors in reverse order.
        mixed = _permuted_back(hadamard(values) * self.gaussians, self.order)
        return (hadamard(mixed) * self.signs).sum(-2)


@dataclass(frozen=True)
class OrthogonalProjection(Projection):
    """The rows of H D₁ H D₂ H D₃ / d′^{3/2}, where each D_i is a diagonal matrix of random signs.

    H is a Hadamard matrix of size d′, so the d′ rows of one block are orthogonal. The size d′ is a
    power of two and at least 32. With a smaller d′, the few different directions are far from
    uniformly distributed. The error of a kernel can then reach half of its variance.

    Source: Yu et al. 2016, Section 4.

    Attributes:
        signs: the diagonals of D₁, D₂ and D₃ for each of m blocks, (3, m, d′).
    """

    signs: Int8[Tensor, "3 m d2"]

    @staticmethod
    def padded(num_inputs):
        return max(32, next_power_of_two(num_inputs))

    @classmethod
    def draw(cls, num_inputs, num_vectors, rng):
        dims = cls.padded(num_inputs)
        return cls(num_inputs, num_vectors, _signs((3, -(-num_vectors // dims), dims), rng))

    def _blocks(self, x):
        # D₃ is the first factor to multiply the inputs.
        for signs in reversed(self.signs):
            x = hadamard(x * signs) * self._dims**-0.5
        return x

    def _transposed(self, values):
        for signs in self.signs:
            values = hadamard(values) * signs * self._dims**-0.5
        return values.sum(-2)


@dataclass(frozen=True)
class FourierProjection(Projection):
    """The rows of Π F B, where F is the real Fourier matrix of Hartley, for any number of inputs.

    F is orthonormal. Its element (j, k) is (cos t + sin t)/√d with t = 2πjk/d. B is a diagonal
    matrix of random signs, and Π a random permutation. Source: Le et al. 2013, Section 6.1, where F
    is complex.

    Attributes:
        signs: the diagonal of B for each of m blocks, (m, d).
        order: the permutation Π for each block, (m, d).
    """

    signs: Int8[Tensor, "m d"]
    order: Int[Tensor, "m d"]

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
    """Return a random permutation for each block."""
    order = np.broadcast_to(np.arange(shape[-1], dtype=np.int64), shape)
    return torch.from_numpy(rng.permuted(order, axis=-1))


def _permuted(x: Float[Tensor, "*b m d"], order: Int[Tensor, "m d"]) -> Float[Tensor, "*b m d"]:
    """Return Π x as a new tensor; `gather` needs half the time of `index_select`."""
    return x.gather(-1, order.expand_as(x))


def _permuted_back(
    x: Float[Tensor, "*b m d"], order: Int[Tensor, "m d"]
) -> Float[Tensor, "*b m d"]:
    """Return Πᵀ x."""
    return torch.zeros_like(x).scatter(-1, order.expand_as(x), x)


def _hartley(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Return F x, where F is symmetric and its own inverse."""
    # The transform uses e^{−it}, so its imaginary part is −Σ x sin t.
    waves = torch.fft.fft(x, norm="ortho")
    return waves.real - waves.imag


# Phases by fast projections, with ω_k = r_k u_k / ℓ. The unit vector u_k is not stored.


# Fast transforms compute the phases of a structured rule and their derivatives.
#
# 1. `_inputs` selects the input columns and divides them by the lengthscales.
# 2. The projection multiplies the inputs by signs, permutations and transforms. It computes whole
#    blocks of d′ products and discards the products beyond D in the last block.
# 3. `chosen` selects some of the vectors. The radii r_k multiply the results.
# 4. Derivatives use the transposed transforms in reverse order. `_adjoint` returns the derivative
#    by x/ℓ. The derivatives by points and by lengthscales follow from it.
@dataclass(frozen=True)
class ProjectedPhases(Phases):
    """The phases ⟨ω_k, x⟩ = r_k ⟨u_k, x/ℓ⟩, where x/ℓ has the input columns `dims`.

    Attributes:
        projection: the unit vectors u_k.
        radius: the radii r_k, (*b, D, 1).
        inverse_lengthscale: 1/ℓ of each input column in `dims`, (*b, 1, k).
        dims: the k input columns in which ω is not zero; a range if these are all columns.
        num_inputs: d, the number of inputs.
        chosen: the indices of the vectors u_k, (D,); None means all vectors.
    """

    projection: Projection
    radius: Float[Tensor, "*b D 1"]
    inverse_lengthscale: Float[Tensor, "*b 1 k"]
    dims: Sequence[int]
    num_inputs: int
    chosen: Int[Tensor, "D"] | None = None
    num_arrays = 8  # longer arrays need new pages of memory, which take longer than the products

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
        arrays = {name: array.cpu() for name, array in tensors_of(projection).items()}
        return {
            "projection": {"class": type(projection).__name__, **sizes, **arrays},
            "radius": self.radius.detach().cpu(),
            "inverse_lengthscale": self.inverse_lengthscale.detach().cpu(),
            "dims": tuple(self.dims),
            "num_inputs": self.num_inputs,
            "chosen": None if self.chosen is None else self.chosen.cpu(),
        }

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return self._project(x) * self.radius.mT

    def _project(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """Return ⟨u_k, x/ℓ⟩."""
        values = self.projection(self._inputs(x) * self.inverse_lengthscale)
        return values if self.chosen is None else values.index_select(-1, self.chosen)

    def _inputs(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N k"]:
        return x if self._takes_all else x[..., list(self.dims)]

    @property
    def _takes_all(self) -> bool:
        return self.dims == range(self.num_inputs)

    def _adjoint(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N k"]:
        """Return the derivative by x/ℓ."""
        values = grad * self.radius.mT
        if self.chosen is not None:
            every = values.new_zeros(*values.shape[:-1], self.projection.num_vectors)
            # A vector may be chosen several times. The derivatives of its copies add up.
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
    """Return `dims`; the columns 0, 1, 2, … become a range, which is faster to compare."""
    first = range(len(dims))
    return first if tuple(dims) == tuple(first) else dims


@dataclass(frozen=True)
class SumOfPhases(Phases):
    """The phases of the frequencies Σ_i ω_ki, as in products of kernels."""

    parts: tuple[Phases, ...]

    @property
    def num_arrays(self) -> int:
        return max(part.num_arrays for part in self.parts)

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

    def __call__(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return sum(part(x) for part in self.parts)

    def point_gradient(self, grad: Float[Tensor, "*b N D"]) -> Float[Tensor, "*b N d"]:
        return sum(part.point_gradient(grad) for part in self.parts)

    def gradients(self, x: Tensor, grad: Tensor) -> Sequence[Tensor]:
        return [g for part in self.parts for g in part.gradients(x, grad)]
