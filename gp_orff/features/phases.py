"""The phases ⟨ω_k, x⟩ of D frequencies: one class for each way to compute them."""

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

# The protocol of phases θ_k(x) = ⟨ω_k, x⟩, and those of frequencies that are written out.


class Phases(ABC):
    """θ_k(x) = ⟨ω_k, x⟩ of D frequencies and its derivatives; subclasses choose the algorithm."""

    num_frequencies: int  # D
    omega: Float[Tensor, "*b D d"]  # ω, written out
    zero: Bool[Tensor, "*b D"]  # which frequencies are zero
    tensors: tuple[Tensor, ...]  # the differentiable tensors, (*b, m, n) each
    num_arrays = 1  # temporary arrays (*b, N, D) of one call
    written_out = False  # whether they are `LinearPhases`

    @abstractmethod
    def rebuild(self, *tensors: Tensor) -> "Phases":
        """These phases with other tensors."""

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


@dataclass(frozen=True)
class LinearPhases(Phases):
    """The phases of frequencies ω that are written out, as a matrix product."""

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


# The fast Walsh–Hadamard transform, by products with small dense Hadamard matrices.


def hadamard(x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    r"""H x for every vector x, H being the Walsh–Hadamard matrix (Le et al. 2013, Section 4.2).

    H_2d = [[H_d, H_d], [H_d, −H_d]], H_1 = 1. With d = d₁ ⋯ d_m, H is the Kronecker product of the
    matrices H_{d_i}. Each is applied along one axis of x, which costs d (d₁ + … + d_m)
    multiplications in m matrix products. H is symmetric, and H H = d I: the transform is its own
    transpose. The result is a transposed view where that saves a copy.

    Raises:
        ValueError: d is no power of two.
    """
    num_dims = x.shape[-1]
    if num_dims < 1 or num_dims & (num_dims - 1):
        raise ValueError(
            f"hadamard expects vectors whose length is a power of two, got {num_dims}; pad them "
            "with zeros"
        )
    shape = x.shape
    for size in _sizes(num_dims.bit_length() - 1):  # each product moves the last axis to the front
        x = _matrix(size, x.dtype, x.device) @ x.reshape(-1, size).mT
    return x.reshape(num_dims, -1).mT.reshape(shape)


@cache
def _sizes(log_dims: int) -> tuple[int, ...]:
    """The sizes of blocks, nearly equal and at most 16, whose product is 2^log_dims: larger ones
    compute more, smaller ones copy more."""
    number = -(-log_dims // 4)
    return tuple(2 ** ((log_dims + i) // number) for i in range(number))


@cache
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "d d"]:
    """H, dense: its entries are −1 to the number of binary digits that row and column share."""
    with torch.inference_mode(False):  # it is kept, and used in training later
        index = torch.arange(size, device=device)
        common = index.unsqueeze(-1) & index
        parity = sum((common >> shift) & 1 for shift in range(size.bit_length())) & 1
        return (1 - 2 * parity).to(dtype)


# Products with D random unit vectors by fast transforms, without storing the vectors.
#
# A block has as many vectors as inputs; blocks are independent of each other.


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
        # The last block may be incomplete: its missing vectors get zeros.
        values = torch.nn.functional.pad(values, (0, -self.num_vectors % dims))
        return self._transposed(values.unflatten(-1, (-1, dims)))[..., : self.num_inputs]

    @property
    def _dims(self) -> int:
        """d′."""
        return self.padded(self.num_inputs)

    def to(self, device: torch.device) -> "Projection":
        """These vectors on another device."""
        if all(array.device == device for array in tensors_of(self).values()):
            return self
        return map_tensors(self, lambda array: array.to(device))


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
        # H is symmetric: the transpose has the same factors in reversed order.
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
        # D₃ acts on the inputs first.
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
    # The transform has e^{−it}, so that its imaginary part is −Σ x sin t.
    waves = torch.fft.fft(x, norm="ortho")
    return waves.real - waves.imag


# Phases by fast projections: ω_k = r_k u_k / ℓ, u_k a unit vector that is not stored.


# The phases of a structured rule and their derivatives, all by fast transforms.
#
# 1. `_inputs` selects the input columns, and the lengthscales divide them.
# 2. The projection multiplies blocks of d′ vectors by signs, permutations and transforms. The
#    products with vectors beyond D in the last block are dropped.
# 3. `chosen` selects vectors, since blocks are always complete; the radii r_k scale the results.
# 4. Derivatives take the same steps backwards, by the transposed transforms. `_adjoint` is the
#    derivative by x/ℓ, from which those by points and by lengthscales follow.
@dataclass(frozen=True)
class ProjectedPhases(Phases):
    """⟨ω_k, x⟩ = r_k ⟨u_k, x/ℓ⟩ of the input columns `dims`."""

    projection: Projection  # u
    radius: Float[Tensor, "*b D 1"]  # r
    inverse_lengthscale: Float[Tensor, "*b 1 k"]  # 1/ℓ
    dims: Sequence[int]  # the k inputs that ω is not zero in; a range, if all
    num_inputs: int  # d
    chosen: Int[Tensor, "D"] | None = None  # which u_k, if not all
    num_arrays = 8  # longer ones take new pages of memory, which costs more than the products

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
            # A vector may be chosen more than once, and the derivatives of its copies add up.
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
    """These columns; 0, 1, 2, … as a range, which compares without going through them."""
    first = range(len(dims))
    return first if tuple(dims) == tuple(first) else dims


@dataclass(frozen=True)
class SumOfPhases(Phases):
    """Phases of the frequencies Σ_i ω_ki, as of products of kernels."""

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
