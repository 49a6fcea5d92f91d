"""Kernel tree + frequency rule → features: the one place where rules are resolved.

    f(x) = Σ_f θ_f · trig_f(x) · m_f ,      θ ~ N(0, I_F)

A feature is one trigonometric column times one direction m_f ∈ R^p, a column of √w_k B(ω_k).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff import trig
from gp_orff.frequencies import Draw, Law, Rule
from gp_orff.spectra import spectrum
from gp_orff.terms import Term, terms


class Expansion(ABC):
    """F features over the 2D columns φ(x) = [cos⟨ω_k, x⟩ ; sin⟨ω_k, x⟩]; an immutable value."""

    omega: Float[Tensor, "*b D d"]
    num_features: int
    num_outputs: int
    cholesky_cost: int  # of the weight-space factorisation, in units of which F×F costs F³
    tensors: tuple[Tensor, ...]  # the differentiable parts, each ending in a matrix
    rebuild: Callable[..., "Expansion"]  # rebuild(*tensors) is the expansion again

    @property
    def num_columns(self) -> int:
        return 2 * self.omega.shape[-2]

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

    def double(self) -> "Expansion":
        return self.rebuild(*(t.double() for t in self.tensors))

    def features(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N*p F"]:
        """Φ(x) itself, for few points."""
        full = self.general()
        phi = full.gather(trig.trig(x, full.omega).mT).mT
        return (phi.unsqueeze(-2) * full.directions.mT.unsqueeze(-3)).flatten(-3, -2)

    def variance(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N p"]:
        """diag K(x, x)."""
        full = self.general()
        squares = full.scatter(full.directions.square())
        parts = [
            trig.trig(x[..., rows, :], full.omega).square() @ squares
            for rows in trig.chunks(x, self.num_columns)
        ]
        return torch.cat(parts, dim=-2)


@dataclass(frozen=True)
class FeatureExpansion(Expansion):
    """Features given one by one: which column each uses, and its direction."""

    omega: Float[Tensor, "*b D d"]
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
        return self.omega, self.directions

    @property
    def rebuild(self) -> Callable[..., "FeatureExpansion"]:
        return partial(FeatureExpansion, columns=self.columns)

    @cached_property
    def one_to_one(self) -> bool:
        """Whether feature f uses column f, so that nothing needs gathering."""
        return torch.equal(self.columns, torch.arange(self.num_columns, device=self.columns.device))

    def scaled(self, variance: Float[Tensor, "*b"]) -> "FeatureExpansion":
        return self.rebuild(self.omega, self.directions * variance[..., None, None].sqrt())

    def general(self) -> "FeatureExpansion":
        return self

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


@dataclass(frozen=True)
class KroneckerExpansion(Expansion):
    """Features of a separable kernel: every column c has the same directions, scales_c · L.

    Feature (c, j), at c·r + j, is column c times column j of scales_c L.
    """

    omega: Float[Tensor, "*b D d"]
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
        return self.omega, self.scales, self.mixing

    @property
    def rebuild(self) -> Callable[..., "KroneckerExpansion"]:
        return KroneckerExpansion

    def scaled(self, variance: Float[Tensor, "*b"]) -> "KroneckerExpansion":
        return KroneckerExpansion(
            self.omega, self.scales * variance[..., None, None].sqrt(), self.mixing
        )

    def general(self) -> FeatureExpansion:
        rank = self.mixing.shape[-1]
        columns = torch.arange(self.num_columns, device=self.omega.device).repeat_interleave(rank)
        directions = self.scales.unsqueeze(-1) * self.mixing.mT.unsqueeze(-3)  # (*b, 2D, r, p)
        return FeatureExpansion(self.omega, directions.flatten(-3, -2), columns)

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b 2*D p*k"]:
        theta = theta.unflatten(-2, (self.num_columns, -1))  # (*b, 2D, r, k)
        return self.scales * (self.mixing.unsqueeze(-3) @ theta).flatten(-2)

    def feature_values(self, z: Float[Tensor, "*b 2*D p*k"]) -> Float[Tensor, "*b F k"]:
        z = (self.scales * z).unflatten(-1, (self.num_outputs, -1))  # (*b, 2D, p, k)
        return (self.mixing.mT.unsqueeze(-3) @ z).flatten(-3, -2)


def merge(parts: Sequence[Expansion]) -> FeatureExpansion:
    """The features of a sum of kernels, side by side over the joined frequencies."""
    full = [part.general() for part in parts]
    batch = torch.broadcast_shapes(*(t.shape[:-2] for part in full for t in part.tensors))
    counts = [part.omega.shape[-2] for part in full]
    total, offsets = sum(counts), [sum(counts[:i]) for i in range(len(counts))]

    def stacked(select: Callable[[FeatureExpansion], Tensor]) -> Tensor:
        return torch.cat([select(p).expand(*batch, *select(p).shape[-2:]) for p in full], dim=-2)

    directions, columns = [], []
    for sine in (False, True):  # cosine features of all parts first: columns stay in order
        for part, count, offset in zip(full, counts, offsets, strict=True):
            own = (part.columns >= count) == sine
            directions.append(part.directions[..., own, :].expand(*batch, -1, -1))
            columns.append(part.columns[own] + (offset + (total - count if sine else 0)))
    return FeatureExpansion(
        stacked(lambda part: part.omega), torch.cat(directions, dim=-2), torch.cat(columns)
    )


def laws(kernel: Kernel, num_dims: int | None) -> list[Law]:
    """What each leaf of a kernel tree asks of a frequency rule."""
    return [
        Law(spectrum(term.kernel), _leaf_dims(term, num_dims), term.factor.degree)
        for term in terms(kernel)
    ]


def draw(kernel: Kernel, rule: Rule, num_dims: int | None = None) -> list[Draw]:
    """Frequencies for every leaf of a kernel tree, in the order of its terms."""
    return rule.draw(laws(kernel, num_dims))


def expand(kernel: Kernel, draws: Sequence[Draw], num_inputs: int) -> Expansion:
    """The features of a kernel tree at its present hyperparameters, on `num_inputs` columns."""
    parts = [
        _expand_term(term, frequencies, num_inputs)
        for term, frequencies in zip(terms(kernel), draws, strict=True)
    ]
    return parts[0] if len(parts) == 1 else merge(parts)


def _expand_term(term: Term, frequencies: Draw, num_inputs: int) -> Expansion:
    omega = spectrum(term.kernel).frequencies(frequencies.z)  # (*b, D, k)
    factor = term.factor(omega)  # (*b, D or 1, p, r)
    scales = (term.outputscale.unsqueeze(-1) * frequencies.weights).sqrt()  # (*b, D)
    if term.active_dims is not None:
        dims = torch.tensor(term.active_dims, device=omega.device)
        full = omega.new_zeros(*omega.shape[:-1], num_inputs)
        omega = full.index_copy(-1, dims, omega)
    if factor.shape[-3] == 1:  # the same directions for every frequency
        both = torch.cat([scales, scales], dim=-1).unsqueeze(-1)
        return KroneckerExpansion(omega, both, factor.squeeze(-3))
    rank, count = factor.shape[-1], omega.shape[-2]
    one_half = (scales[..., None, None] * factor).mT.flatten(-3, -2)  # (*b, D·r, p)
    columns = torch.arange(2 * count, device=omega.device).repeat_interleave(rank)
    return FeatureExpansion(omega, torch.cat([one_half, one_half], dim=-2), columns)


def _leaf_dims(term: Term, num_dims: int | None) -> int:
    """The number of input columns a leaf sees."""
    if term.active_dims is not None:
        return len(term.active_dims)
    for known in (
        term.kernel.ard_num_dims,
        term.factor.num_outputs if term.factor.degree else None,
        num_dims,
    ):
        if known is not None:
            return known
    raise ValueError(
        f"the number of inputs of {type(term.kernel).__name__} is not known: expected num_dims=, "
        "ard_num_dims= or active_dims=, got none of them; pass num_dims= to ORFFKernel"
    )
