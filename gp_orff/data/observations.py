"""Observations of vectors and of symbols of a field: y = H f + noise."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from gp_orff.data.noise.covariances import Noises, independent
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.patterns import GroupKey, Pattern
from gp_orff.data.validation import as_matrix, as_points
from gp_orff.kernels.symbol_covariance import require
from gp_orff.kernels.tree import space_of, terms
from gp_orff.symbols.base import Identity, Symbol

Missing = tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None


@dataclass(frozen=True)
class Observations:
    """Readings of one group: y_n = H_n f(x_n) + ε_n, ε_n ~ N(0, Σ / w_n)."""

    key: GroupKey
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n v"]
    weight: Float[Tensor, "n"] | None = None
    direction: Float[Tensor, "n p"] | None = None
    place: Int[Tensor, "n"] | None = None  # of each among the points that were given with it

    def __len__(self) -> int:
        return len(self.x)

    @property
    def pattern(self) -> Pattern:
        return self.key.pattern

    @property
    def masses(self) -> Float[Tensor, "k"]:
        """Σ_n w_n a_n."""
        weights = self.pattern.weights(self.direction, self.y)
        return (weights if self.weight is None else weights * self.weight.unsqueeze(-1)).sum(0)

    def take(self, index: Int[Tensor, "m"] | slice) -> "Observations":
        """Some of the readings."""
        return self._each(lambda tensor: tensor[index])

    def weighted(self, factor: Float[Tensor, "n"]) -> "Observations":
        """The same with weights multiplied."""
        own = factor if self.weight is None else self.weight * factor
        return replace(self, weight=own)

    def minus(self, trend: Float[Tensor, "n p"]) -> "Observations":
        """The residuals of a trend of whole vectors."""
        return replace(self, y=self.y - self.apply(trend))

    def apply(self, vectors: Float[Tensor, "n p"]) -> Float[Tensor, "n v"]:
        """H_n of vectors."""
        return self.pattern.rows(vectors.unsqueeze(-1), self.direction).squeeze(-1)

    def apply_to_covariance(self, blocks: Float[Tensor, "n p p"]) -> Float[Tensor, "n v v"]:
        """H_n C_n H_nᵀ of covariances of vectors."""
        half = self.pattern.rows(blocks, self.direction)
        return self.pattern.rows(half.mT, self.direction)

    def noise(self, own: GroupNoise) -> Float[Tensor, "n v v"]:
        """The covariance of the noise of every reading: Σ/w_n + H_n δ H_nᵀ."""
        noise = own.weighted.expand(len(self), -1, -1)
        noise = noise if self.weight is None else noise / self.weight[:, None, None]
        if own.delta is None:
            return noise
        return noise + self.apply_to_covariance(own.delta.expand(len(self), -1, -1))

    def to(self, device: torch.device) -> "Observations":
        return self._each(lambda tensor: tensor.to(device))

    def copied(self) -> "Observations":
        return replace(self, place=None)._each(lambda tensor: tensor.clone())

    def moved(self, places: int) -> "Observations":
        """The same, with so many points before what was given with them."""
        return replace(self, place=self.place + places)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Observations":
        tensors = {name: getattr(self, name) for name in ("x", "y", "weight", "direction", "place")}
        return replace(
            self, **{name: None if t is None else change(t) for name, t in tensors.items()}
        )


def join(parts: Iterable[Observations]) -> list[Observations]:
    """Readings of the same group in one piece, groups in the order of their first reading."""
    groups: dict[GroupKey, list[Observations]] = {}
    for part in parts:
        groups.setdefault(part.key, []).append(part)
    return [own[0] if len(own) == 1 else _joined(own) for own in groups.values()]


def _joined(parts: list[Observations]) -> Observations:
    if any(part.weight is not None for part in parts):
        parts = [part.weighted(torch.ones_like(part.y[:, 0])) for part in parts]

    def cat(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    return Observations(parts[0].key, cat("x"), cat("y"), cat("weight"), cat("direction"))


Image = Callable[[Symbol, Sequence[int], Float[Tensor, "n d"]], Float[Tensor, "n*q k"]]
"""Of something linear in a field: what a symbol, whose directions are some columns of x, makes of
it at points x."""


def less_reference(
    values: Callable[[Float[Tensor, "n d"]], Tensor],
    x: Float[Tensor, "n d"],
    symbol: Symbol,
    space: Sequence[int],
) -> Tensor:
    """Values at x, less those at the reference of a symbol if it has one."""
    referred = symbol.referred(x, space)
    return values(x) if referred is None else values(x) - values(referred)


def of_constant(symbol: Symbol, num_dims: int, num_outputs: int) -> Float[Tensor, "q p"]:
    """What a symbol makes of a constant field."""
    image = symbol(torch.zeros(1, num_dims, dtype=torch.float64), num_outputs)[0].real
    return image if symbol.reference is None else 0 * image


class LinearObservations(ABC):
    """M numbers y = H f + ε, few enough to be written out; H is linear."""

    x: Float[Tensor, "n d"]

    @property
    @abstractmethod
    def values(self) -> Float[Tensor, "M"]:
        """y."""

    @abstractmethod
    def apply(self, image: Image) -> Float[Tensor, "M k"]:
        """H of anything linear in the field: of features, of covariances with it, of paths."""

    @abstractmethod
    def noise_covariance(self, noises: Noises, missing: Missing = None) -> Float[Tensor, "M M"]:
        """Of ε, with a variance of what is observed that is not in the features: white, and common
        to all points."""

    def design(self, num_outputs: int) -> Float[Tensor, "M 1+p"]:
        """V = [y, H(1⊗I_p)]: a constant mean is seen as the field is."""

        def ones(symbol: Symbol, space: Sequence[int], x: Float[Tensor, "n d"]) -> Tensor:
            return of_constant(symbol, len(space), num_outputs).to(x).repeat(len(x), 1)

        return torch.cat([self.values.unsqueeze(-1), self.apply(ones)], dim=-1)


@dataclass(frozen=True)
class PointObservations(LinearObservations):
    """Readings of the field at N points."""

    observations: list[Observations]

    @cached_property
    def x(self) -> Float[Tensor, "N d"]:
        return torch.cat([own.x for own in self.observations])

    @property
    def values(self) -> Tensor:
        return torch.cat([own.y.flatten() for own in self.observations])

    def apply(self, image: Image) -> Tensor:
        values = image(Identity(), (), self.x)
        if len(self.observations) == 1 and self.observations[0].pattern.complete:
            return values
        parts = values.unflatten(0, (len(self.x), -1)).split(
            [len(own) for own in self.observations]
        )
        seen = [
            own.pattern.rows(part, own.direction).flatten(0, 1)
            for own, part in zip(self.observations, parts, strict=True)
        ]
        return torch.cat(seen)

    def noise_covariance(self, noises: Noises, missing: Missing = None) -> Tensor:
        delta = None if missing is None else missing[0]
        blocks = [
            _one_by_one(own.noise(GroupNoise(group_noise(own.key, noises), delta)))
            for own in self.observations
        ]
        return block_diagonal(blocks)


def block_diagonal(blocks: Sequence[Float[Tensor, "m m"]]) -> Float[Tensor, "M M"]:
    """Of any sizes; one is itself."""
    return blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)


def _one_by_one(blocks: Float[Tensor, "n v v"]) -> Float[Tensor, "n*v n*v"]:
    """Those of n points on the diagonal."""
    matrix = torch.diag_embed(blocks.permute(1, 2, 0))  # (v, v, n, n)
    return matrix.permute(2, 0, 3, 1).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True)
class SymbolObservations(LinearObservations):
    """m readings y = (Q f)(x) + ε, ε ~ N(0, noise) at each point."""

    symbol: Symbol
    x: Float[Tensor, "m d"]
    y: Float[Tensor, "m q"]
    noise: Float[Tensor, "q q"]
    space: tuple[int, ...]

    @classmethod
    def of(
        cls, kernel: Kernel, num_inputs: int, x: object, y: object, symbol: Symbol, noise: object
    ) -> "SymbolObservations":
        """Copies of what a user gives, on the kernel's device.

        Raises:
            TypeError: what is no symbol.
            ValueError: shapes that do not fit, a symbol that does not exist for the kernel, a
                potential without a reference, a noise that is not positive.
        """
        if not isinstance(symbol, Symbol):
            raise TypeError(
                f"expected a symbol, such as gp_orff.Divergence(), got {type(symbol).__name__}"
            )
        space = space_of(kernel, num_inputs)
        require(symbol, kernel, space)
        if symbol.order < 0 and symbol.reference is None:
            raise ValueError(
                f"expected a reference in an observed {type(symbol).__name__}, which readings tell "
                "up to a constant only, got none; pass reference=x0"
            )
        x, y = as_points(x, num_inputs).detach(), as_matrix(y, "observations y (m, q)").detach()
        q = symbol.num_outputs(terms(kernel)[0].num_outputs)
        if y.shape != (len(x), q) or not torch.isfinite(y).all():
            raise ValueError(
                f"expected finite observations of {type(symbol).__name__} of shape {(len(x), q)}, "
                f"got shape {tuple(y.shape)}{'' if torch.isfinite(y).all() else ' with NaN'}"
            )
        own = cls(symbol, x.clone(), y.clone(), _covariance(noise, q), space)
        return own.to(next(kernel.parameters()).device)

    @property
    def num_values(self) -> int:
        return self.y.numel()

    @property
    def values(self) -> Tensor:
        return self.y.flatten()

    def apply(self, image: Image) -> Tensor:
        return image(self.symbol, self.space, self.x)

    def noise_covariance(self, noises: Noises, missing: Missing = None) -> Tensor:
        count = len(self.x)
        if missing is None:
            return independent(self.noise, count)
        delta, common = missing
        return independent(self.noise + delta, count) + common.repeat(count, count)

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """Of all points the symbol looks at."""
        points = self.symbol.all_points(self.x, self.space)
        return tuple(zip(points.amin(0).tolist(), points.amax(0).tolist(), strict=True))

    def to(self, device: torch.device) -> "SymbolObservations":
        return replace(self, x=self.x.to(device), y=self.y.to(device), noise=self.noise.to(device))


def _covariance(noise: object, q: int) -> Float[Tensor, "q q"]:
    """Of a variance for all outputs or one for each, or itself."""
    covariance = torch.as_tensor(noise, dtype=torch.float64).clone()
    if covariance.dim() < 2 and covariance.numel() in (1, q):
        covariance = torch.diag(covariance.expand(q))
    symmetric = covariance.shape == (q, q) and torch.allclose(covariance, covariance.mT)
    if not symmetric or not (torch.linalg.eigvalsh(covariance) > 0).all():
        raise ValueError(
            f"expected a positive noise variance, {q} of them or a covariance matrix, got {noise!r}"
        )
    return covariance


_WORD = 2**64 - 1


def fingerprints(part: Observations) -> Int[np.ndarray, "n"]:
    """A number for each reading, the same for the same reading; others share it by a chance of
    2⁻⁶⁴. y in single precision: a trend taken from it may differ in its last digits."""
    columns = torch.cat([part.x, part.y.float().double()], dim=-1) + 0.0  # −0 is 0
    found = np.full(len(part), hash(part.key) & _WORD, dtype=np.uint64)
    for column in columns.cpu().numpy().view(np.uint64).T:
        found = _mixed(found ^ column)
    return found


def places(asked: Int[np.ndarray, "m"], held: Int[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
    """Where each one asked for stands among those held, −1 for nowhere; of equal ones the k-th
    asked for is the k-th held."""
    order = np.argsort(held, kind="stable")
    rank = np.searchsorted(held[order], asked) + _repeats(asked)
    place = order[np.minimum(rank, len(held) - 1)]
    return np.where((rank < len(held)) & (held[place] == asked), place, -1)


def _repeats(values: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """How many equal ones stand before each."""
    order = np.argsort(values, kind="stable")
    ordered, before = values[order], np.empty(len(values), dtype=np.int64)
    before[order] = np.arange(len(values)) - np.searchsorted(ordered, ordered)
    return before


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every bit changes half of the others (SplitMix64)."""
    bits = (bits ^ (bits >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> 27)) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> 31)
