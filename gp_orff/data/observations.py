"""Observations of vectors and of symbols of a field: y = H f + noise."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise import GroupNoise, Noises, group_noise, independent
from gp_orff.data.patterns import GroupKey, Pattern
from gp_orff.data.validation import as_matrix, as_points
from gp_orff.kernels.base import as_real_tensor, map_tensors, plain_tensor
from gp_orff.kernels.derivatives import decided, require
from gp_orff.kernels.tree import num_outputs, space_of
from gp_orff.symbols.base import Identity, Symbol

TruncatedVariance = tuple[Float[Tensor, "q q"], Float[Tensor, "q q"]] | None
"""The prior variance that the features omit: a white part, and a part common to all points."""


class Represented(NamedTuple):
    """Values that pseudo-observations represent. Their likelihood p(y_n | f), as a function of f,
    is approximately proportional to exp(η_nᵀf − ½ fᵀΛ_n f)."""

    values: Float[Tensor, "n v"]  # the observed values
    linear: Float[Tensor, "n q"]  # η
    precision: Float[Tensor, "n q q"]  # Λ
    axis: Int[Tensor, "n"]  # the axis of Λ_n along which the pseudo-observation is


@dataclass(frozen=True)
class Observations:
    """Observations of one group: y_n = H_n f(x_n) + ε_n, ε_n ~ N(0, Σ / w_n)."""

    key: GroupKey
    x: Float[Tensor, "n d"]
    y: Float[Tensor, "n v"]
    weight: Float[Tensor, "n"] | None = None
    direction: Float[Tensor, "n p"] | None = None
    index: Int[Tensor, "n"] | None = None  # the row of each point in the x that the user gave
    represented: Represented | None = None  # the observed values, if y are pseudo-observations
    on_tracks = False  # whether they are `TrackObservations`

    def __len__(self) -> int:
        return len(self.x)

    @property
    def pattern(self) -> Pattern:
        return self.key.pattern

    @property
    def masses(self) -> Float[Tensor, "k"]:
        """Σ_n w_n a_n, for each weight a of the pattern."""
        weights = self.pattern.weights(self.direction, self.y)
        return (weights if self.weight is None else weights * self.weight.unsqueeze(-1)).sum(0)

    def take(self, rows: Int[Tensor, "m"] | slice) -> "Observations":
        """The observations of some rows."""
        return self._map(lambda tensor: tensor[rows])

    def weighted(self, factor: Float[Tensor, "n"]) -> "Observations":
        """These observations, with weights multiplied by `factor`."""
        weight = factor if self.weight is None else self.weight * factor
        return replace(self, weight=weight)

    def minus(self, trend: Float[Tensor, "n p"]) -> "Observations":
        """The observations less a trend, whose values are complete vectors."""
        return replace(self, y=self.y - self.apply(trend))

    def rows(self, vectors: Float[Tensor, "n*p k"]) -> Float[Tensor, "n*v k"]:
        """H g for k fields g, from their vectors at all points."""
        values = vectors.unflatten(0, (len(self), -1))
        return self.pattern.rows(values, self.direction).flatten(0, 1)

    def apply(self, vectors: Float[Tensor, "n p"]) -> Float[Tensor, "n v"]:
        """H_n v_n for vectors v_n."""
        return self.pattern.rows(vectors.unsqueeze(-1), self.direction).squeeze(-1)

    def apply_to_covariance(self, blocks: Float[Tensor, "n p p"]) -> Float[Tensor, "n v v"]:
        """H_n C_n H_nᵀ for covariances C_n of vectors."""
        half = self.pattern.rows(blocks, self.direction)
        return self.pattern.rows(half.mT, self.direction)

    def apply_to_joint(self, covariance: Float[Tensor, "n*p n*p"]) -> Float[Tensor, "n*v n*v"]:
        """H C Hᵀ for the covariance C of all vectors."""
        return self.rows(self.rows(covariance).mT)

    def noise(self, group: GroupNoise) -> Float[Tensor, "*b n v v"]:
        """The noise covariance of each observation: Σ/w_n + H_n δ H_nᵀ."""
        *batch, v, _ = group.weighted.shape
        noise = group.weighted.unsqueeze(-3).expand(*batch, len(self), v, v)
        noise = noise if self.weight is None else noise / self.weight[:, None, None]
        if group.delta is None:
            return noise
        return noise + self.apply_to_covariance(group.delta.expand(len(self), -1, -1))

    def to(self, device: torch.device) -> "Observations":
        """These observations on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def copied(self) -> "Observations":
        """A copy that shares no memory, without `index`."""
        return replace(self, index=None)._map(lambda tensor: tensor.clone())

    def plain(self) -> dict[str, object]:
        """Return tensors and plain values for files."""
        part = self._map(plain_tensor)
        tensors = {name: getattr(part, name) for name in ("x", "y", "weight", "direction")}
        represented = {} if part.represented is None else {"represented": list(part.represented)}
        return {**self.key.plain(), **tensors, **represented}

    @classmethod
    def from_plain(cls, content: Mapping) -> "Observations":
        """Return the observations from the content that `plain` returned."""
        tensors = (content[name] for name in ("x", "y", "weight", "direction"))
        given = content.get("represented")
        given = None if given is None else Represented(*given)
        return cls(GroupKey.from_plain(content), *tensors, represented=given)

    def _map(self, change: Callable[..., Tensor], *others: "Observations") -> "Observations":
        """Apply a function to each tensor of these observations and of `others`."""
        parts, names = (self, *others), ("x", "y", "weight", "direction", "index")
        columns = {name: [getattr(part, name) for part in parts] for name in names}
        changed = {name: change(*every) for name, every in columns.items() if every[0] is not None}
        if self.represented is not None:
            columns = (part.represented for part in parts)
            changed["represented"] = Represented(*map(change, *columns))
        return replace(self, **changed)


def join(parts: Iterable[Observations]) -> list[Observations]:
    """One piece of observations for each group, in the order of their first observations."""
    groups: dict[GroupKey, list[Observations]] = {}
    for part in parts:
        groups.setdefault(part.key, []).append(part)
    return [pieces[0] if len(pieces) == 1 else _concatenate(pieces) for pieces in groups.values()]


Rows = TypeVar("Rows")  # values of observations, with a method `take` that selects rows


def with_rows(
    parts: Iterable[Observations], groups: Mapping[GroupKey, Rows]
) -> Iterator[tuple[Observations, Rows]]:
    """Yield each part of the observations with its rows of `groups`.

    `groups` has the values of each group, with one row for each observation, in the order of
    `join`. The observations of a group may be divided into several parts, for example in chunks or
    along directions.
    """
    taken = dict.fromkeys(groups, 0)
    for part in parts:
        first = taken[part.key]
        taken[part.key] = first + len(part)
        yield part, groups[part.key].take(slice(first, first + len(part)))


def _concatenate(parts: list[Observations]) -> Observations:
    if any(part.weight is not None for part in parts):
        parts = [part.weighted(torch.ones_like(part.y[:, 0])) for part in parts]
    first, *others = parts
    return replace(first, index=None)._map(lambda *pieces: torch.cat(pieces), *others)


def less_reference(
    values: Callable[[Float[Tensor, "n d"]], Tensor],
    x: Float[Tensor, "n d"],
    symbol: Symbol,
    space: Sequence[int],
) -> Tensor:
    """Values at x, less the values at the reference of a symbol if it has one."""
    reference = symbol.reference_points(x, space)
    return values(x) if reference is None else values(x) - values(reference)


def of_constants(
    symbol: Symbol, x: Float[Tensor, "n d"], space: Sequence[int], constants: Float[Tensor, "p k"]
) -> Float[Tensor, "n q k"]:
    """Return Q (1⊗c)(x), the images of k constant fields c under a symbol Q. For potentials, they
    are linear in x."""
    return of_affine(affine_image(symbol, space, constants), symbol, x, space)


Affine = tuple[Float[Tensor, "q k"], Float[Tensor, "d q k"]]
"""The values of k affine fields at x = 0, and their slopes along the directions of space."""


def affine_image(symbol: Symbol, space: Sequence[int], constants: Float[Tensor, "p k"]) -> Affine:
    """Q (1⊗c), the affine images of constant fields c under a symbol."""
    return symbol.of_affine(constants, constants.new_zeros(len(space), *constants.shape))


def of_affine(
    affine: Affine, symbol: Symbol, x: Float[Tensor, "n d"], space: Sequence[int]
) -> Float[Tensor, "n q k"]:
    """The values of affine images at x, less the values at the reference of the symbol."""
    value, slope = affine

    def image(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q k"]:
        return value + torch.einsum("nj,jqp->nqp", points[:, list(space)], slope)

    return less_reference(image, x, symbol, space)


class LinearObservations(ABC):
    """Observations y = H f + ε with M values, where M is small enough for matrices with M rows.

    H has two factors: the evaluation of a symbol Q of the field at points, and a sparse matrix that
    combines these values (`rows`). For the values Φ of features, H Φ is `rows(Φ)`. For the
    covariance K of the values of two kinds of observations, H₁ K H₂ᵀ is
    `first.rows(second.rows(K.mT).mT)`.
    """

    x: Float[Tensor, "n d"]
    symbol, space = Identity(), ()  # Q, and the columns of x that are its directions of space
    num_averaged = 0  # the size of the vectors that an exact kernel averages

    @property
    def points(self) -> Float[Tensor, "K d"]:
        """The points at which H evaluates Q f."""
        return self.x

    @property
    @abstractmethod
    def values(self) -> Float[Tensor, "M"]:
        """y."""

    @abstractmethod
    def rows(self, values: Float[Tensor, "K*q k"]) -> Float[Tensor, "M k"]:
        """H g for k functions g, from Q g at the points."""

    @abstractmethod
    def noise_covariance(
        self, noises: Noises, truncated: TruncatedVariance = None
    ) -> Float[Tensor, "M M"]:
        """Return the covariance of ε.

        It includes the covariance `truncated` of the part of H f that the features omit.
        """

    def noise_times(self, noises: Noises, a: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
        """The covariance of ε times a vector."""
        return self.noise_covariance(noises) @ a

    def design(self, num_outputs: int) -> Float[Tensor, "M 1+p"]:
        """V = [y, H(1⊗I_p)]: the values, and the effect of the constant mean of each output."""
        eye = torch.eye(num_outputs).to(self.points)
        ones = of_constants(self.symbol, self.points, self.space, eye).flatten(0, 1)
        return torch.cat([self.values.unsqueeze(-1), self.rows(ones)], dim=-1)


@dataclass(frozen=True)
class PointObservations(LinearObservations):
    """Observations of the field at N points."""

    observations: list[Observations]

    @cached_property
    def x(self) -> Float[Tensor, "N d"]:
        return torch.cat([part.x for part in self.observations])

    @property
    def values(self) -> Tensor:
        return torch.cat([part.y.flatten() for part in self.observations])

    def rows(self, values: Tensor) -> Tensor:
        if len(self.observations) == 1 and self.observations[0].pattern.complete:
            return values
        p = len(values) // len(self.x)
        parts = values.split([p * len(group) for group in self.observations])
        pairs = zip(self.observations, parts, strict=True)
        return torch.cat([group.rows(part) for group, part in pairs])

    def noise_covariance(self, noises: Noises, truncated: TruncatedVariance = None) -> Tensor:
        delta = None if truncated is None else truncated[0]
        blocks = [
            _at_each_point(group.noise(GroupNoise(group_noise(group.key, noises), delta)))
            for group in self.observations
        ]
        return block_diagonal(blocks)

    def noise_times(self, noises: Noises, a: Float[Tensor, "M"]) -> Float[Tensor, "M"]:
        products = []
        pieces = a.split([group.y.numel() for group in self.observations])
        for group, piece in zip(self.observations, pieces, strict=True):
            blocks = group.noise(GroupNoise(group_noise(group.key, noises)))  # (n, v, v)
            at_points = piece.unflatten(0, (len(group), -1)).unsqueeze(-1)
            products.append((blocks @ at_points).flatten())
        return torch.cat(products)


def block_diagonal(blocks: Sequence[Float[Tensor, "m m"]]) -> Float[Tensor, "M M"]:
    """The block-diagonal matrix of blocks of any sizes."""
    return blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)


def _at_each_point(blocks: Float[Tensor, "n v v"]) -> Float[Tensor, "n*v n*v"]:
    """The block-diagonal matrix of the blocks of n points."""
    matrix = torch.diag_embed(blocks.permute(1, 2, 0))  # (v, v, n, n)
    return matrix.permute(2, 0, 3, 1).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True)
class SymbolObservations(LinearObservations):
    """Observations y = (Q f)(x) + ε of a symbol Q of the field f at m points.

    The error ε ~ N(0, `noise`) is independent between points. With directions u, the observations
    are y = uᵀ(Q f)(x) + ε.
    """

    symbol: Symbol = field()
    x: Float[Tensor, "m d"]
    y: Float[Tensor, "m q"]
    noise: Float[Tensor, "q q"]
    space: tuple[int, ...] = field()
    direction: Float[Tensor, "m r"] | None = None  # for a symbol with r outputs; then q = 1

    @classmethod
    def of(
        cls,
        kernel: Kernel,
        num_inputs: int,
        x: object,
        y: object,
        symbol: Symbol,
        noise: object,
        directions: object = None,
    ) -> "SymbolObservations":
        """Validated copies of the arguments of `VectorFieldGP.observe`, on the device of the
        kernel.

        Raises:
            TypeError: `symbol` is not a `gp_orff.Symbol`.
            ValueError: Shapes do not fit, the symbol does not exist for the kernel, or a noise
                variance is not positive.
        """
        space = space_of(kernel, num_inputs)
        require(symbol, kernel, space)
        symbol = decided(symbol, kernel)
        x, y = as_points(x, num_inputs).detach(), as_matrix(y, "observations y (m, q)").detach()
        q, direction = symbol.num_outputs(num_outputs(kernel)), None
        if directions is not None:
            direction = as_matrix(directions, "directions (m, q)").detach()
            if direction.shape != (len(x), q) or not torch.isfinite(direction).all():
                raise ValueError(
                    f"expected finite directions of shape {(len(x), q)}, one for each observation "
                    f"of {type(symbol).__name__}, got shape {tuple(direction.shape)}"
                )
            q = 1
        if y.shape != (len(x), q) or not torch.isfinite(y).all():
            raise ValueError(
                f"expected finite observations of {type(symbol).__name__} of shape {(len(x), q)}, "
                f"got shape {tuple(y.shape)}{'' if torch.isfinite(y).all() else ' with NaN'}"
            )
        parts = symbol, x.clone(), y.clone(), _covariance(noise, q), space, direction
        return cls(*parts).to(next(kernel.parameters()).device)

    @property
    def num_values(self) -> int:
        return self.y.numel()

    @property
    def values(self) -> Tensor:
        return self.y.flatten()

    def rows(self, values: Tensor) -> Tensor:
        if self.direction is None:
            return values
        return torch.einsum("mq,mqk->mk", self.direction, values.unflatten(0, (len(self.x), -1)))

    def noise_covariance(self, noises: Noises, truncated: TruncatedVariance = None) -> Tensor:
        count, noise = len(self.x), independent(self.noise, len(self.x))
        if truncated is None:
            return noise
        delta, common = truncated
        missing = independent(delta, count) + common.repeat(count, count)
        return noise + self.rows(self.rows(missing).mT)

    @property
    def box(self) -> tuple[tuple[float, float], ...]:
        """The bounding box of all points at which the symbol evaluates the field."""
        points = self.symbol.all_points(self.x, self.space)
        return tuple(zip(points.amin(0).tolist(), points.amax(0).tolist(), strict=True))

    def to(self, device: torch.device) -> "SymbolObservations":
        return map_tensors(self, lambda tensor: tensor.to(device))


def _covariance(noise: object, q: int) -> Float[Tensor, "q q"]:
    """The q×q covariance from one variance, q variances or a matrix."""
    covariance = as_real_tensor(noise, "noise", dtype=torch.float64).clone()
    if covariance.dim() < 2 and covariance.numel() in (1, q):
        covariance = torch.diag(covariance.expand(q))
    symmetric = covariance.shape == (q, q) and torch.allclose(covariance, covariance.mT)
    if not symmetric or not (torch.linalg.eigvalsh(covariance) > 0).all():
        raise ValueError(
            f"expected a positive noise variance, {q} positive variances or a positive definite "
            f"covariance matrix, got {noise!r}"
        )
    return covariance
