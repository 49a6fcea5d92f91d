"""Feature expansions f(x) = Σ_f θ_f φ_f(x) m_f with weights θ ~ N(0, I_F), as values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.features import chunked
from gp_orff.features.columns import Columns, TrigColumns, side_by_side, stack_rows
from gp_orff.symbols.base import Symbol

# The feature expansion f(x) = Σ_f θ_f φ_f(x) m_f with weights θ ~ N(0, I_F), as a value.
#
# A feature is one column φ_f(x) times one direction m_f ∈ R^p, which is a column of √w_k B(ω_k).
# With a complex direction the feature is Re(m_f ψ_f(x)), where φ_f is the real part of the wave
# ψ_f.
#
# Columns and features are separate because several features may share a column, as the directions
# of a divergence-free field in three dimensions do, and because symbols change directions only: Q
# acts on a wave by the matrix Q(ω), and columns and the sums over the data remain. `gather` and
# `scatter` convert between the two, `column_weights` and `feature_values` do so with directions.
# The classes differ in structure that makes algebra cheaper: features listed one by one, Kronecker
# products of separable kernels, gradients by fast projections, and fixed fields times scales.


class Expansion(ABC):
    """F features on the M columns φ(x); an immutable value."""

    phi: Columns
    num_features: int
    num_outputs: int
    tensors: tuple[Tensor, ...]  # the differentiable tensors, (*b, m, n) each
    is_complex = False  # whether directions are
    is_kronecker = False  # whether each column has the directions scales_c · L
    is_scaled = False  # whether it is a `ScaledExpansion`

    @property
    def num_columns(self) -> int:
        return self.phi.num_columns

    @property
    def cholesky_cost(self) -> int:
        """Of the Cholesky factor of the weights' precision: F³ for a full matrix."""
        return self.num_features**3

    @abstractmethod
    def rebuild(self, *tensors: Tensor) -> "Expansion":
        """F features with these in place of `tensors`."""

    @abstractmethod
    def scaled(self, variance: Float[Tensor, "*b"]) -> "Expansion":
        """The features of the kernel `variance` · K."""

    @abstractmethod
    def general(self) -> "FeatureExpansion":
        """These features, listed one by one."""

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M p*k"]:
        """w with Φ(x)θ = φ(x)w."""
        return self.general().column_weights(theta)

    def feature_values(self, z: Float[Tensor, "*b M p*k"]) -> Float[Tensor, "*b F k"]:
        """Φᵀv from z = φᵀv: the adjoint of `column_weights`."""
        return self.general().feature_values(z)

    def apply(self, x: Float[Tensor, "*b N d"], theta: Float[Tensor, "*b F k"]) -> Tensor:
        """Φ(x)θ, (*b, N, p·k): the k values of an output are next to each other."""
        return self.phi.apply(x, self.column_weights(theta))

    def adjoint(self, x: Float[Tensor, "*b N d"], values: Float[Tensor, "*b N p*k"]) -> Tensor:
        """Φ(x)ᵀv, (*b, F, k), of values in the order of `apply`."""
        return self.feature_values(self.phi.adjoint(x, values))

    @abstractmethod
    def select(self, columns: Int[Tensor, "k"], variance: Float[Tensor, "k"]) -> "Expansion":
        """The features of some columns, with their variances multiplied by `variance`."""

    def double(self) -> "Expansion":
        """These features in float64, or complex128."""
        dtypes = (torch.promote_types(t.dtype, torch.float64) for t in self.tensors)
        return self.rebuild(*(t.to(dtype) for t, dtype in zip(self.tensors, dtypes, strict=True)))

    def features(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N*p F"]:
        """Φ(x) as a dense matrix; for few points."""
        return self.general().features(x)

    def mean_variance(self) -> Float[Tensor, "*b p p"]:
        """The mean of K(x, x) over all of space; K(0) for a stationary kernel."""
        full = self.general()
        squares = full.gather(full.phi.mean_squares()).to(full.directions)
        return ((squares * full.directions).mT @ full.directions.conj()).real

    def variance(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N p"]:
        """diag K(x, x)."""
        full = self.general()
        if full.is_complex:
            return chunked.by_chunks(full._squares, x, full.num_features * full.num_outputs)
        squares = full.scatter(full.directions.square())
        return chunked.by_chunks(
            lambda part: self.phi.values(part).square() @ squares, x, self.num_columns
        )


@dataclass(frozen=True)
class FeatureExpansion(Expansion):
    """Features listed one by one: feature f is column `columns[f]` times direction `directions[f]`.

    Harmonic kernels have complex directions, others real ones, which a symbol with a real and an
    imaginary part turns into complex ones.
    """

    phi: Columns
    directions: Float[Tensor, "*b F p"] | Complex[Tensor, "*b F p"]
    columns: Int[Tensor, "F"]
    axes: Int[Tensor, "F"] | None = None  # input along which ω tends to zero; −1 where it does not
    constants: Float[Tensor, "*b C p"] | None = None  # ‖ω‖⁻¹ m of the last features, see `tilted`

    @property
    def num_features(self) -> int:
        return self.directions.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.directions.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        constants = () if self.constants is None else (self.constants,)
        return *constants, *self.phi.tensors, self.directions

    def rebuild(self, *tensors: Tensor) -> "FeatureExpansion":
        constants = None
        if self.constants is not None:
            constants, *tensors = tensors
        *others, directions = tensors
        axes = None if self.axes is None else self.axes.to(directions.device)
        columns = self.columns.to(directions.device)
        phi = self.phi.with_tensors(*others)
        return FeatureExpansion(phi, directions, columns, axes, constants)

    @property
    def num_constants(self) -> int:
        """C, the number of features that only potentials have."""
        return 0 if self.constants is None else self.constants.shape[-2]

    def followed_by_constants(
        self, constants: Float[Tensor, "*b C p"], axes: Sequence[int]
    ) -> "FeatureExpansion":
        """The features, followed by some that are zero in the field and constant in potentials."""
        columns = self.columns.new_zeros(len(axes))  # any
        known = torch.full_like(self.columns, -1) if self.axes is None else self.axes
        return FeatureExpansion(
            self.phi,
            stack_rows([self.directions, torch.zeros_like(constants)]),
            torch.cat([self.columns, columns]),
            torch.cat([known, known.new_tensor(axes)]),
            constants,
        )

    @cached_property
    def one_to_one(self) -> bool:
        """Whether every feature f uses column f; `gather` and `scatter` then change nothing."""
        return torch.equal(self.columns, torch.arange(self.num_columns, device=self.columns.device))

    def scaled(self, variance: Float[Tensor, "*b"]) -> "FeatureExpansion":
        scale = variance[..., None, None].sqrt()
        constants = None if self.constants is None else self.constants * scale
        return replace(self, directions=self.directions * scale, constants=constants)

    def general(self) -> "FeatureExpansion":
        return self

    @property
    def layers(self) -> list["FeatureExpansion"]:
        """Expansions with real directions, whose sum these features are.

        Re(m ψ) = Re m · φ − Im m · Im ψ, where Im ψ is another column.
        """
        if not self.is_complex:
            return [self]
        partner, sign = (values[self.columns] for values in self.phi.quarter_turn)
        imaginary = -sign.unsqueeze(-1) * self.directions.imag
        return [
            replace(self, directions=self.directions.real),
            replace(self, directions=imaginary, columns=partner),
        ]

    def select(self, columns: Int[Tensor, "k"], variance: Float[Tensor, "k"]) -> "FeatureExpansion":
        place = torch.full((self.num_columns,), -1, device=columns.device)
        place[columns] = torch.arange(len(columns), device=columns.device)
        new = place[self.columns]  # the new index of each feature's column; −1 if not selected
        selected = new >= 0
        directions = self.directions[..., selected, :] * variance[new[selected]].sqrt().unsqueeze(
            -1
        )
        axes = None if self.axes is None else self.axes[selected]
        return FeatureExpansion(self.phi.select(columns), directions, new[selected], axes)

    def gather(self, values: Float[Tensor, "*b M k"]) -> Float[Tensor, "*b F k"]:
        """A value for each column → for each feature the value of its column."""
        return values if self.one_to_one else values.index_select(-2, self.columns)

    def scatter(self, values: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M k"]:
        """A value for each feature → for each column the sum over its features.

        It is the adjoint of `gather`.
        """
        if self.one_to_one:
            return values
        zeros = values.new_zeros(*values.shape[:-2], self.num_columns, values.shape[-1])
        return zeros.index_add(-2, self.columns, values)

    def features(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N*p F"]:
        phi = self.gather(self._waves(self.phi.values(x).mT)).mT
        return (phi.unsqueeze(-2) * self.directions.mT.unsqueeze(-3)).real.flatten(-3, -2)

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M p*k"]:
        w = self.scatter((self.directions.unsqueeze(-1) * theta.unsqueeze(-2)).flatten(-2))
        return w.real - self.phi.turn(w.imag) if self.is_complex else w

    def feature_values(self, z: Float[Tensor, "*b M p*k"]) -> Float[Tensor, "*b F k"]:
        z = self.gather(self._waves(z)).unflatten(-1, (self.num_outputs, -1))
        return (self.directions.unsqueeze(-1) * z).sum(-2).real

    @property
    def is_complex(self) -> bool:
        return self.directions.is_complex()

    def tilted(self) -> "FeatureExpansion":
        """These features, with a tiny ω along its axis instead of zero.

        Symbols act on these. The potential of a constant cos⟨ω, x⟩ m is linear in x. That of the
        tiny field sin⟨ω, x⟩ m, with m in proportion to ω, is constant.
        """
        if self.axes is None:
            return self
        near_zero = (self.axes >= 0).nonzero().squeeze(-1)
        count = len(near_zero) - self.num_constants  # of cosines that are not zero in the field
        waves, columns, steps = self.phi.tilted(
            self.columns[near_zero], self.axes[near_zero], count
        )
        phi, (old, new) = side_by_side([self.phi, waves])
        places = old[self.columns].index_copy(0, near_zero, new[columns])
        directions = self.directions
        if self.constants is not None:
            kept = directions[..., : -self.num_constants, :]
            directions = stack_rows([kept, steps[count:, None] * self.constants])
        return FeatureExpansion(phi, directions, places)

    def _squares(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N p"]:
        return self.features(x).square().sum(-1).unflatten(-1, (-1, self.num_outputs))

    def _waves(self, values: Float[Tensor, "*b M k"]) -> Tensor:
        """What the directions multiply: φᵀv = `values`, or ψᵀv for complex directions."""
        return self.phi.waves(values) if self.is_complex else values


def apply_symbol(symbol: Symbol, expansion: Expansion, space: Sequence[int]) -> FeatureExpansion:
    """The features of Q f, whose directions are Q m; `space` are the input columns Q acts on.

    Directions stay real where Q m is real or imaginary: Re(i a ψ) = −a Im ψ, another column.
    """
    full = expansion.general().tilted()
    multiplier = full.phi.multiplier(symbol, full.num_outputs, space)[full.columns]
    images = (multiplier @ full.directions.to(multiplier).unsqueeze(-1)).squeeze(-1)
    if not images.imag.any():
        return replace(full, directions=images.real)
    if images.real.any():
        return replace(full, directions=images)
    partner, sign = (values[full.columns] for values in full.phi.quarter_turn)
    return FeatureExpansion(full.phi, -sign.unsqueeze(-1) * images.imag, partner)


class _ScaledColumns(Expansion):
    """Features on columns that have a scale each."""

    scales: Float[Tensor, "*b M 1"]

    def scaled(self, variance: Float[Tensor, "*b"]) -> "Expansion":
        return replace(self, scales=self.scales * variance[..., None, None].sqrt())

    def select(self, columns: Int[Tensor, "k"], variance: Float[Tensor, "k"]) -> "Expansion":
        scales = self.scales[..., columns, :] * variance.sqrt().unsqueeze(-1)
        return replace(self, phi=self.phi.select(columns), scales=scales)


@dataclass(frozen=True)
class KroneckerExpansion(_ScaledColumns):
    """Features of a separable kernel: column c has the r directions scales_c · L.

    Feature c·r + j is column c of φ times column j of scales_c · L.
    """

    phi: Columns
    scales: Float[Tensor, "*b M 1"]
    mixing: Float[Tensor, "*b p r"]  # L
    is_kronecker = True

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

    def rebuild(self, *tensors: Tensor) -> "KroneckerExpansion":
        *others, scales, mixing = tensors
        return KroneckerExpansion(self.phi.with_tensors(*others), scales, mixing)

    def general(self) -> FeatureExpansion:
        rank = self.mixing.shape[-1]
        columns = torch.arange(self.num_columns, device=self.scales.device).repeat_interleave(rank)
        directions = self.scales.unsqueeze(-1) * self.mixing.mT.unsqueeze(-3)  # (*b, M, r, p)
        return FeatureExpansion(self.phi, directions.flatten(-3, -2), columns)

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M p*k"]:
        theta = theta.unflatten(-2, (self.num_columns, -1))  # (*b, M, r, k)
        return self.scales * (self.mixing.unsqueeze(-3) @ theta).flatten(-2)

    def feature_values(self, z: Float[Tensor, "*b M p*k"]) -> Float[Tensor, "*b F k"]:
        z = (self.scales * z).unflatten(-1, (self.num_outputs, -1))  # (*b, M, p, k)
        return (self.mixing.mT.unsqueeze(-3) @ z).flatten(-3, -2)


# Features of gradients, whose directions are frequencies that are not written out.


@dataclass(frozen=True)
class GradientExpansion(_ScaledColumns):
    """Features of a curl-free kernel: column c has the direction scales_c ω_c, p = d.

    With the frequencies V (D, d) of the phases, f(x) = Vᵀ(φ(x) ∘ Θ), Θ = scales ∘ θ, and
    Φᵀv = scales ∘ Σ_n φ(x_n) ∘ V v_n, of cosines and of sines. Fast projections multiply by V and
    by Vᵀ in O(D log d) (Brault et al. 2016, Table 1; Le et al. 2013, eq. 33).
    """

    phi: TrigColumns
    scales: Float[Tensor, "*b M 1"]

    @property
    def num_features(self) -> int:
        return self.num_columns

    @property
    def num_outputs(self) -> int:
        return self.phi.phases.num_inputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phi.tensors, self.scales

    def rebuild(self, *tensors: Tensor) -> "GradientExpansion":
        *others, scales = tensors
        return GradientExpansion(self.phi.with_tensors(*others), scales)

    def general(self) -> FeatureExpansion:
        directions = self.scales * self.phi.of_frequencies(self.phi.omega)
        return FeatureExpansion(
            self.phi, directions, torch.arange(self.num_columns, device=self.scales.device)
        )

    def apply(self, x: Float[Tensor, "*b N d"], theta: Float[Tensor, "*b F k"]) -> Tensor:
        weights = (self.scales * theta).unsqueeze(-3).unbind(-1)  # k of (*b, 1, M)

        def fields(points: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n p*k"]:
            phi = self.phi.values(points)
            pairs = [(phi * w).chunk(2, dim=-1) for w in weights]
            values = [self.phi.phases.point_gradient(cosines + sines) for cosines, sines in pairs]
            return torch.stack(values, dim=-1).flatten(-2)

        return chunked.by_chunks(fields, x, self.num_columns)

    def adjoint(self, x: Float[Tensor, "*b N d"], values: Float[Tensor, "*b N p*k"]) -> Tensor:
        vectors = values.unflatten(-1, (self.num_outputs, -1))
        total = self.scales.new_zeros(*self.scales.shape[:-1], vectors.shape[-1])
        for rows in chunked.chunks(x, self.num_columns):
            phi = self.phi.values(x[..., rows, :])
            along = [self.phi.phases(v) for v in vectors[..., rows, :, :].unbind(-1)]  # V v
            parts = [(phi * torch.cat([a, a], dim=-1)).sum(-2) for a in along]
            total = total + torch.stack(parts, dim=-1)
        return self.scales * total


# Features that are fixed fields times scales, of which only the scales have hyperparameters.


@dataclass(frozen=True)
class ScaledExpansion(FeatureExpansion):
    """Features f with the fixed directions `units[f]` on the columns `columns[f]`, times a scale.

    Sums over data of products of the fixed fields serve all hyperparameters.
    """

    scales: Float[Tensor, "*b F"] = None
    units: Complex[Tensor, "F p"] = None
    is_scaled = True

    @classmethod
    def of(
        cls,
        phi: Columns,
        scales: Float[Tensor, "*b F"],
        units: Complex[Tensor, "F p"],
        columns: Int[Tensor, "F"],
    ) -> "ScaledExpansion":
        return cls(phi, scales.unsqueeze(-1) * units, columns, scales=scales, units=units)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phi.tensors, self.scales

    def rebuild(self, *tensors: Tensor) -> "ScaledExpansion":
        *others, scales = tensors
        return ScaledExpansion.of(self.phi.with_tensors(*others), scales, self.units, self.columns)

    @property
    def fixed(self) -> FeatureExpansion:
        """The features without their scales."""
        return FeatureExpansion(self.phi, self.units, self.columns)

    def scaled(self, variance: Float[Tensor, "*b"]) -> "ScaledExpansion":
        scales = self.scales * variance.unsqueeze(-1).sqrt()
        return ScaledExpansion.of(self.phi, scales, self.units, self.columns)

    def general(self) -> FeatureExpansion:
        return FeatureExpansion(self.phi, self.directions, self.columns)


def side_by_side_scaled(
    parts: Sequence[ScaledExpansion], phi: Columns, places: Sequence[Int[Tensor, "k"]]
) -> ScaledExpansion:
    """The features of a sum, sorted by their columns, which are at `places` among those of phi."""
    columns = torch.cat([place[part.columns] for place, part in zip(places, parts, strict=True)])
    columns, order = columns.sort(stable=True)
    scales = torch.cat([part.scales for part in parts], dim=-1)
    units = torch.cat([part.units for part in parts])
    return ScaledExpansion.of(phi, scales[..., order], units[order], columns)
