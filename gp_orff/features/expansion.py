"""Features as values: f(x) = Σ_f θ_f · trig_f(x) · m_f , θ ~ N(0, I_F).

A feature is one trigonometric column times one direction m_f ∈ R^p, a column of √w_k B(ω_k).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.features import chunked
from gp_orff.features.columns import TrigColumns, side_by_side
from gp_orff.symbols.base import Multiplier, Symbol


class Expansion(ABC):
    """F features over the 2D columns φ(x) = [cos⟨ω_k, x⟩ ; sin⟨ω_k, x⟩]; an immutable value."""

    phi: TrigColumns
    num_features: int
    num_outputs: int
    cholesky_cost: int  # of the weight-space factorisation, in units of which F×F costs F³
    tensors: tuple[Tensor, ...]  # the differentiable parts, each ending in a matrix
    rebuild: Callable[..., "Expansion"]  # rebuild(*tensors) is the expansion again

    @property
    def omega(self) -> Float[Tensor, "*b D d"]:
        return self.phi.omega

    @property
    def num_columns(self) -> int:
        return self.phi.num_columns

    @abstractmethod
    def scaled(self, variance: Float[Tensor, "*b"]) -> "Expansion":
        """The features of variance · K."""

    @abstractmethod
    def general(self) -> "FeatureExpansion":
        """The same features with every direction written out."""

    @abstractmethod
    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b 2*D p*k"]:
        """w with Φ(x)θ = φ(x)w."""

    @abstractmethod
    def feature_values(self, z: Float[Tensor, "*b 2*D p*k"]) -> Float[Tensor, "*b F k"]:
        """The adjoint of `column_weights`: Φᵀv from z = φᵀv."""

    @abstractmethod
    def select(self, frequencies: Int[Tensor, "D2"], variance: Float[Tensor, "D2"]) -> "Expansion":
        """The features of some frequencies, each with its variance multiplied."""

    def double(self) -> "Expansion":
        return self.rebuild(*(t.double() for t in self.tensors))

    def features(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N*p F"]:
        """Φ(x) itself, for few points."""
        full = self.general()
        phi = full.gather(self.phi.values(x).mT).mT
        return (phi.unsqueeze(-2) * full.directions.mT.unsqueeze(-3)).flatten(-3, -2)

    def mean_variance(self) -> Float[Tensor, "*b p p"]:
        """K(x, x) where every frequency has a cosine and a sine of the same direction, and features
        of cosines come first."""
        full = self.general()
        count = int((full.columns < full.num_columns // 2).sum())
        cosines = full.directions[..., :count, :]
        return cosines.mT @ cosines

    def variance(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N p"]:
        """diag K(x, x)."""
        full = self.general()
        squares = full.scatter(full.directions.square())
        return chunked.by_chunks(
            lambda part: self.phi.values(part).square() @ squares, x, self.num_columns
        )


@dataclass(frozen=True)
class FeatureExpansion(Expansion):
    """Features given one by one: which column each uses, and its direction."""

    phi: TrigColumns
    directions: Float[Tensor, "*b F p"]
    columns: Int[Tensor, "F"]

    @property
    def num_features(self) -> int:
        return self.directions.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.directions.shape[-1]

    @property
    def cholesky_cost(self) -> int:
        return self.num_features**3

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phi.tensors, self.directions

    @property
    def rebuild(self) -> Callable[..., "FeatureExpansion"]:
        return partial(_with_columns, self.phi, self.columns)

    @cached_property
    def one_to_one(self) -> bool:
        """Whether feature f uses column f, so that nothing needs gathering."""
        return torch.equal(self.columns, torch.arange(self.num_columns, device=self.columns.device))

    def scaled(self, variance: Float[Tensor, "*b"]) -> "FeatureExpansion":
        return replace(self, directions=self.directions * variance[..., None, None].sqrt())

    def general(self) -> "FeatureExpansion":
        return self

    def select(
        self, frequencies: Int[Tensor, "D2"], variance: Float[Tensor, "D2"]
    ) -> "FeatureExpansion":
        total, count = self.omega.shape[-2], len(frequencies)
        position = torch.full((total,), -1, device=frequencies.device)
        position[frequencies] = torch.arange(count, device=frequencies.device)
        new = position[self.columns % total]
        kept = new >= 0
        new = new[kept]
        columns = new + count * (self.columns[kept] >= total)
        directions = self.directions[..., kept, :] * variance[new].sqrt().unsqueeze(-1)
        return FeatureExpansion(self.phi.select(frequencies), directions, columns)

    def gather(self, values: Float[Tensor, "*b 2*D k"]) -> Float[Tensor, "*b F k"]:
        """Values of columns → values of the features that use them."""
        return values if self.one_to_one else values.index_select(-2, self.columns)

    def scatter(self, values: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b 2*D k"]:
        """The adjoint: sums over the features of each column."""
        if self.one_to_one:
            return values
        zeros = values.new_zeros(*values.shape[:-2], self.num_columns, values.shape[-1])
        return zeros.index_add(-2, self.columns, values)

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b 2*D p*k"]:
        return self.scatter((self.directions.unsqueeze(-1) * theta.unsqueeze(-2)).flatten(-2))

    def feature_values(self, z: Float[Tensor, "*b 2*D p*k"]) -> Float[Tensor, "*b F k"]:
        z = self.gather(z).unflatten(-1, (self.num_outputs, -1))
        return (self.directions.unsqueeze(-1) * z).sum(-2)


def _with_columns(
    phi: TrigColumns, columns: Int[Tensor, "F"], *tensors: Tensor
) -> FeatureExpansion:
    *own, directions = tensors
    return FeatureExpansion(phi.with_tensors(*own), directions, columns.to(directions.device))


@dataclass(frozen=True)
class WaveExpansion:
    """Features Re(a_f e^{i⟨ω, x⟩}), for evaluation: what a symbol with real and imaginary parts
    makes of those of an expansion."""

    phi: TrigColumns
    amplitudes: Complex[Tensor, "F q"]
    frequencies: Int[Tensor, "F"]

    @property
    def num_outputs(self) -> int:
        return self.amplitudes.shape[-1]

    def features(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "N*q F"]:
        cosine, sine = self.phi.values(x)[:, None, :].chunk(2, dim=-1)
        a = self.amplitudes.mT
        values = cosine[..., self.frequencies] * a.real - sine[..., self.frequencies] * a.imag
        return values.flatten(0, 1)


def seen_through(
    symbol: Symbol, expansion: Expansion, space: Sequence[int]
) -> FeatureExpansion | WaveExpansion:
    """The features of Q f: cos⟨ω,x⟩ m is Re(m e^{i⟨ω,x⟩}), sin⟨ω,x⟩ m is Re(−i m e^{i⟨ω,x⟩})."""
    full = expansion.general()
    count = full.omega.shape[-2]
    frequencies, sine = full.columns % count, (full.columns >= count).unsqueeze(-1)
    images = (
        _images(symbol, full, space)[frequencies] @ full.directions.to(torch.complex128)[..., None]
    )
    images = images.squeeze(-1)  # Q m
    if not images.imag.any():
        return FeatureExpansion(full.phi, images.real, full.columns)
    if not images.real.any():  # a quarter turn: cos becomes −sin, sin becomes cos
        directions = torch.where(sine, images.imag, -images.imag)
        columns = torch.where(sine.squeeze(-1), frequencies, frequencies + count)
        return FeatureExpansion(full.phi, directions, columns)
    return WaveExpansion(full.phi, torch.where(sine, -1j * images, images), frequencies)


def weights_through(
    symbol: Symbol, expansion: Expansion, weights: Float[Tensor, "2*D p"], space: Sequence[int]
) -> Float[Tensor, "2*D q"]:
    """The same for the weights of the columns."""
    cosine, sine = weights.chunk(2, dim=-2)
    waves = torch.complex(cosine, -sine).unsqueeze(-1)
    image = (_images(symbol, expansion, space) @ waves).squeeze(-1)
    return torch.cat([image.real, -image.imag], dim=-2)


def _images(symbol: Symbol, expansion: Expansion, space: Sequence[int]) -> Multiplier:
    return symbol(expansion.omega[..., list(space)], expansion.num_outputs).to(torch.complex128)


@dataclass(frozen=True)
class KroneckerExpansion(Expansion):
    """Features of a separable kernel: every column c has the same directions, scales_c · L.

    Feature (c, j), at c·r + j, is column c times column j of scales_c L.
    """

    phi: TrigColumns
    scales: Float[Tensor, "*b 2*D 1"]
    mixing: Float[Tensor, "*b p r"]  # L

    @property
    def num_features(self) -> int:
        return self.num_columns * self.mixing.shape[-1]

    @property
    def num_outputs(self) -> int:
        return self.mixing.shape[-2]

    @property
    def cholesky_cost(self) -> int:
        return self.num_columns**3 * self.mixing.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phi.tensors, self.scales, self.mixing

    @property
    def rebuild(self) -> Callable[..., "KroneckerExpansion"]:
        return partial(_with_factors, self.phi)

    def scaled(self, variance: Float[Tensor, "*b"]) -> "KroneckerExpansion":
        scales = self.scales * variance[..., None, None].sqrt()
        return KroneckerExpansion(self.phi, scales, self.mixing)

    def general(self) -> FeatureExpansion:
        rank = self.mixing.shape[-1]
        columns = torch.arange(self.num_columns, device=self.omega.device).repeat_interleave(rank)
        directions = self.scales.unsqueeze(-1) * self.mixing.mT.unsqueeze(-3)  # (*b, 2D, r, p)
        return FeatureExpansion(self.phi, directions.flatten(-3, -2), columns)

    def select(
        self, frequencies: Int[Tensor, "D2"], variance: Float[Tensor, "D2"]
    ) -> "KroneckerExpansion":
        both = torch.cat([frequencies, frequencies + self.omega.shape[-2]])
        scales = self.scales[..., both, :] * variance.sqrt().repeat(2).unsqueeze(-1)
        return KroneckerExpansion(self.phi.select(frequencies), scales, self.mixing)

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b 2*D p*k"]:
        theta = theta.unflatten(-2, (self.num_columns, -1))  # (*b, 2D, r, k)
        return self.scales * (self.mixing.unsqueeze(-3) @ theta).flatten(-2)

    def feature_values(self, z: Float[Tensor, "*b 2*D p*k"]) -> Float[Tensor, "*b F k"]:
        z = (self.scales * z).unflatten(-1, (self.num_outputs, -1))  # (*b, 2D, p, k)
        return (self.mixing.mT.unsqueeze(-3) @ z).flatten(-3, -2)


def _with_factors(phi: TrigColumns, *tensors: Tensor) -> KroneckerExpansion:
    *own, scales, mixing = tensors
    return KroneckerExpansion(phi.with_tensors(*own), scales, mixing)


def merge(parts: Sequence[Expansion]) -> Expansion:
    """The features of a sum of kernels, side by side over the joined frequencies."""
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(p, KroneckerExpansion) and p.mixing is parts[0].mixing for p in parts):
        return _merge_kronecker(parts)
    full = [part.general() for part in parts]
    counts = [part.omega.shape[-2] for part in full]
    total, offsets = sum(counts), [sum(counts[:i]) for i in range(len(counts))]
    directions, columns = [], []
    for sine in (False, True):  # cosine features of all parts first: columns stay in order
        for part, count, offset in zip(full, counts, offsets, strict=True):
            own = (part.columns >= count) == sine
            directions.append(part.directions[..., own, :])
            columns.append(part.columns[own] + (offset + (total - count if sine else 0)))
    phi = side_by_side([part.phi for part in full])
    return FeatureExpansion(phi, stacked(directions), torch.cat(columns))


def _merge_kronecker(parts: Sequence["KroneckerExpansion"]) -> "KroneckerExpansion":
    halves = [part.scales.chunk(2, dim=-2) for part in parts]
    scales = [half[sine] for sine in (0, 1) for half in halves]
    phi = side_by_side([part.phi for part in parts])
    return KroneckerExpansion(phi, stacked(scales), parts[0].mixing)


def stacked(rows: Sequence[Float[Tensor, "*b _ k"]]) -> Float[Tensor, "*b _ k"]:
    """Matrices on top of each other, their batches broadcast."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in rows))
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in rows], dim=-2)
