"""Feature expansions f(x) = Σ_f θ_f φ_f(x) m_f with weights θ ~ N(0, I_F)."""

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

# An expansion f(x) = Σ_f θ_f φ_f(x) m_f has weights θ ~ N(0, I_F) and is an immutable value.
#
# A feature is one column φ_f(x) times one direction m_f ∈ R^p. The direction is a column of
# √w_k B(ω_k). If m_f is complex, the feature is Re(m_f ψ_f(x)), where φ_f is the real part of the
# wave ψ_f.
#
# Columns and features are separate for two reasons. First, several features may share a column, for
# example in divergence-free fields in three dimensions. Second, a symbol Q multiplies a wave by the
# matrix Q(ω). It therefore changes directions only, and the columns and their sums over the data
# remain valid.
#
# `gather` and `scatter` convert between columns and features. `column_weights` and `feature_values`
# do the same and multiply by directions. Each class of expansions has a structure that makes the
# algebra cheaper: a list of features, Kronecker products of separable kernels, gradients by fast
# projections, or fixed fields times scales.


class Expansion(ABC):
    """F features on the M columns φ(x); an immutable value.

    Attributes:
        phi: the columns.
        num_features: F.
        num_outputs: p, the number of outputs.
        tensors: the differentiable tensors, (*b, m, n) each.
        is_complex: whether the directions are complex.
        is_kronecker: whether column c has the directions scales_c · L for all c.
    """

    phi: Columns
    num_features: int
    num_outputs: int
    tensors: tuple[Tensor, ...]
    is_complex = False
    is_kronecker = False
    is_scaled = False

    @property
    def num_columns(self) -> int:
        return self.phi.num_columns

    @property
    def cholesky_cost(self) -> int:
        """The cost of factorising the precision matrix of the weights: F³ for a full matrix."""
        return self.num_features**3

    @abstractmethod
    def rebuild(self, *tensors: Tensor) -> "Expansion":
        """Return this expansion with these tensors in place of `self.tensors`."""

    @abstractmethod
    def scaled(self, variance: Float[Tensor, "*b"]) -> "Expansion":
        """Return the features of the kernel `variance` · K."""

    @abstractmethod
    def general(self) -> "FeatureExpansion":
        """Return the same features as a list of columns and directions."""

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M p*k"]:
        """Return w such that Φ(x)θ = φ(x)w."""
        return self.general().column_weights(theta)

    def feature_values(self, z: Float[Tensor, "*b M p*k"]) -> Float[Tensor, "*b F k"]:
        """Return Φᵀv from z = φᵀv; this is the adjoint of `column_weights`."""
        return self.general().feature_values(z)

    def apply(self, x: Float[Tensor, "*b N d"], theta: Float[Tensor, "*b F k"]) -> Tensor:
        """Return Φ(x)θ, (*b, N, p·k); column i·k + j is output i of the weights in column j."""
        return self.phi.apply(x, self.column_weights(theta))

    def adjoint(self, x: Float[Tensor, "*b N d"], values: Float[Tensor, "*b N p*k"]) -> Tensor:
        """Return Φ(x)ᵀv, (*b, F, k); the columns of `values` have the order of `apply`."""
        return self.feature_values(self.phi.adjoint(x, values))

    @abstractmethod
    def select(self, columns: Int[Tensor, "k"], variance: Float[Tensor, "k"]) -> "Expansion":
        """Return the features of some columns, each with `variance` times its variance."""

    def double(self) -> "Expansion":
        """Return these features in float64 or complex128."""
        dtypes = (torch.promote_types(t.dtype, torch.float64) for t in self.tensors)
        return self.rebuild(*(t.to(dtype) for t, dtype in zip(self.tensors, dtypes, strict=True)))

    def features(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N*p F"]:
        """Return Φ(x) as a dense matrix; the number of points N must be small."""
        return self.general().features(x)

    def mean_variance(self) -> Float[Tensor, "*b p p"]:
        """Return the mean of K(x, x) over all of space, which is K(0) for a stationary kernel."""
        full = self.general()
        squares = full.gather(full.phi.mean_squares()).to(full.directions)
        return ((squares * full.directions).mT @ full.directions.conj()).real

    def variance(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N p"]:
        """Return the diagonal of K(x, x) at each point."""
        full = self.general()
        if full.is_complex:
            return chunked.by_chunks(full._squares, x, full.num_features * full.num_outputs)
        squares = full.scatter(full.directions.square())
        return chunked.by_chunks(
            lambda part: self.phi.values(part).square() @ squares, x, self.num_columns
        )


@dataclass(frozen=True)
class FeatureExpansion(Expansion):
    """A list of features: feature f is column `columns[f]` times direction `directions[f]`.

    Harmonic kernels have complex directions. All other kernels have real directions, which become
    complex under a symbol with a real and an imaginary part.

    Attributes:
        phi: the columns.
        directions: the direction m_f of each feature, (*b, F, p).
        columns: the index of the column of each feature, (F,).
        axes: the input along which ω tends to zero, (F,), and −1 if ω does not tend to zero; None
            if no frequency does.
        constants: ‖ω‖⁻¹ m for the last C features, (*b, C, p); None if C = 0. See `tilted`.
    """

    phi: Columns
    directions: Float[Tensor, "*b F p"] | Complex[Tensor, "*b F p"]
    columns: Int[Tensor, "F"]
    axes: Int[Tensor, "F"] | None = None
    constants: Float[Tensor, "*b C p"] | None = None

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
        """C, the number of features that are zero in the field and constant in potentials."""
        return 0 if self.constants is None else self.constants.shape[-2]

    def followed_by_constants(
        self, constants: Float[Tensor, "*b C p"], axes: Sequence[int]
    ) -> "FeatureExpansion":
        """Return these features and C more, which are zero in the field and constant in potentials.

        Args:
            constants: ‖ω‖⁻¹ m of the C features, (*b, C, p).
            axes: the input, from 0, along which ω tends to zero, one for each of the C features.
        """
        columns = self.columns.new_zeros(len(axes))  # any column will do
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
        """Whether each feature f uses column f, so that `gather` and `scatter` are the identity."""
        return torch.equal(self.columns, torch.arange(self.num_columns, device=self.columns.device))

    def scaled(self, variance: Float[Tensor, "*b"]) -> "FeatureExpansion":
        scale = variance[..., None, None].sqrt()
        constants = None if self.constants is None else self.constants * scale
        return replace(self, directions=self.directions * scale, constants=constants)

    def general(self) -> "FeatureExpansion":
        return self

    @property
    def layers(self) -> list["FeatureExpansion"]:
        """Expansions with real directions that add up to these features.

        The formula is Re(m ψ) = Re m · φ − Im m · Im ψ, where Im ψ is another column.
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
        """Return for each feature the values of its column."""
        return values if self.one_to_one else values.index_select(-2, self.columns)

    def scatter(self, values: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M k"]:
        """Return for each column the sum of the values of its features; the adjoint of `gather`."""
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
        """Return these features with a tiny ω along the axis instead of ω = 0.

        Symbols act on the features in this form. The potential of a constant field cos⟨ω, x⟩ m is
        linear in x. The potential of the tiny field sin⟨ω, x⟩ m, where m is proportional to ω, is
        constant.
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
        """Return `values` = φᵀv for real directions and ψᵀv for complex directions."""
        return self.phi.waves(values) if self.is_complex else values


def apply_symbol(symbol: Symbol, expansion: Expansion, space: Sequence[int]) -> FeatureExpansion:
    """Return the features of Q f, whose directions are Q m.

    Directions remain real if Q m is real or imaginary, because Re(i a ψ) = −a Im ψ and Im ψ is
    another column.

    Args:
        symbol: the symbol Q.
        expansion: the features of f.
        space: the input columns on which Q acts, from 0.
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
    """Features on columns with one scale for each column."""

    scales: Float[Tensor, "*b M 1"]

    def scaled(self, variance: Float[Tensor, "*b"]) -> "Expansion":
        return replace(self, scales=self.scales * variance[..., None, None].sqrt())

    def select(self, columns: Int[Tensor, "k"], variance: Float[Tensor, "k"]) -> "Expansion":
        scales = self.scales[..., columns, :] * variance.sqrt().unsqueeze(-1)
        return replace(self, phi=self.phi.select(columns), scales=scales)


@dataclass(frozen=True)
class KroneckerExpansion(_ScaledColumns):
    """Features of a separable kernel: column c has the r columns of scales_c · L as directions.

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


# Features of gradients. Their directions are frequencies, which are not stored as a matrix.


@dataclass(frozen=True)
class GradientExpansion(_ScaledColumns):
    """Features of a curl-free kernel: column c has the direction scales_c ω_c, so p = d.

    The columns φ are D cosines, followed by D sines with the same frequencies V (D, d). Let a and b
    (D,) be the first and the second half of φ(x) ∘ scales ∘ θ. Then f(x) = Vᵀ(a + b). For a vector
    v_n at each point x_n, Φᵀv = scales ∘ Σ_n φ(x_n) ∘ [V v_n; V v_n].

    Fast projections multiply by V and by Vᵀ in O(D log d) operations (Brault et al. 2016, Table 1;
    Le et al. 2013, eq. 33).
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


# Features that are fixed fields times scales. Only the scales depend on hyperparameters.


@dataclass(frozen=True)
class ScaledExpansion(FeatureExpansion):
    """Features with the fixed directions `units[f]` on the columns `columns[f]`, times `scales[f]`.

    Sums over the data of products of the fixed fields are valid for all hyperparameters.
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
        """The features without scales."""
        return FeatureExpansion(self.phi, self.units, self.columns)

    def scaled(self, variance: Float[Tensor, "*b"]) -> "ScaledExpansion":
        scales = self.scales * variance.unsqueeze(-1).sqrt()
        return ScaledExpansion.of(self.phi, scales, self.units, self.columns)

    def general(self) -> FeatureExpansion:
        return FeatureExpansion(self.phi, self.directions, self.columns)


def side_by_side_scaled(
    parts: Sequence[ScaledExpansion], phi: Columns, places: Sequence[Int[Tensor, "k"]]
) -> ScaledExpansion:
    """Return the features of a sum of kernels, sorted by column.

    Column c of part i is column `places[i][c]` of `phi`.
    """
    columns = torch.cat([place[part.columns] for place, part in zip(places, parts, strict=True)])
    columns, order = columns.sort(stable=True)
    scales = torch.cat([part.scales for part in parts], dim=-1)
    units = torch.cat([part.units for part in parts])
    return ScaledExpansion.of(phi, scales[..., order], units[order], columns)
