"""The trigonometric columns φ(x) = [cos⟨ω_k, x⟩ ; sin⟨ω_k, x⟩] that features are made of."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.features import chunked
from gp_orff.features.chunked import LinearPhases, Phases
from gp_orff.symbols.base import Symbol


@dataclass(frozen=True)
class TrigColumns:
    """Columns of any phases, by products over chunks of points."""

    phases: Phases
    sampled: bool = True  # whether ω is a random sample, which halves of it can check

    @classmethod
    def of(cls, omega: Float[Tensor, "*b D d"], sampled: bool = True) -> "TrigColumns":
        """Of frequencies that are written out."""
        return cls(LinearPhases(omega), sampled)

    @property
    def omega(self) -> Float[Tensor, "*b D d"]:
        return self.phases.omega

    @property
    def num_columns(self) -> int:
        return 2 * self.phases.num_frequencies

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What the columns are differentiable in."""
        return self.phases.tensors

    def with_tensors(self, *tensors: Tensor) -> "TrigColumns":
        """The same columns of tensors on another device, in another type or a batch of them."""
        return replace(self, phases=self.phases.rebuild(*tensors))

    def with_omega(self, omega: Float[Tensor, "*b D d"]) -> "TrigColumns":
        """The same columns of other frequencies, written out."""
        return replace(self, phases=LinearPhases(omega))

    def detached(self) -> "TrigColumns":
        """The same numbers, cut from the graph of the frequencies."""
        return self.with_tensors(*(own.detach() for own in self.tensors))

    def to(self, device: torch.device) -> "TrigColumns":
        return self.with_tensors(*(own.to(device) for own in self.tensors))

    def select(self, columns: Int[Tensor, "2*k"]) -> "TrigColumns":
        """The columns of some frequencies: their cosines, and after them their sines."""
        return TrigColumns(self.phases.select(columns[: len(columns) // 2]), self.sampled)

    def columns_of(
        self, frequencies: Int[Tensor, "k"]
    ) -> tuple[Int[Tensor, "k"], Int[Tensor, "k"]]:
        """Their cosines and their sines."""
        return frequencies, frequencies + self.phases.num_frequencies

    def of_frequencies(self, values: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b 2*D k"]:
        """Values of the frequencies as values of their columns."""
        return torch.cat([values, values], dim=-2)

    def mean_squares(self) -> Float[Tensor, "*b 2*D"]:
        """Of φ over all of space."""
        cosines = torch.where((self.omega == 0).all(-1), 1.0, 0.5).to(self.omega)
        return torch.cat([cosines, 1 - cosines], dim=-1)

    def halves(self) -> list[tuple[Int[Tensor, "2*k"], Float[Tensor, "2*k"]]]:
        """The columns of two halves of the frequencies, and what the variance of each is multiplied
        by, so that either half is an estimate of what all are.

        A constant, ω = 0, is no estimate: both halves keep it as it is.
        """
        omega = self.omega.detach()
        constant = (omega == 0).all(-1).reshape(-1, omega.shape[-2]).all(0)
        index = torch.arange(omega.shape[-2], device=omega.device)
        parity, found = _thue_morse(index), []
        for side in (0, 1):
            own = (parity == side) & ~constant
            kept = index[own | constant]
            scale = (~constant).sum() / own.sum()
            variance = torch.where(constant[kept], 1.0, scale).to(omega)
            found.append((torch.cat(self.columns_of(kept)), variance.repeat(2)))
        return found

    def plain(self) -> dict[str, Tensor | bool]:
        """What a file holds of these columns."""
        return {"omega": self.omega.detach().cpu(), "sampled": self.sampled}

    def same(self, other: "TrigColumns") -> bool:
        """Whether statistics of these and of the other columns may be added."""
        return self.omega.shape == other.omega.shape and torch.allclose(
            self.omega, other.omega, rtol=1e-9, atol=0
        )

    def folds(self, x: Float[Tensor, "*b N d"], num_features: int) -> bool:
        """Whether quadratic forms of φ at so many points cost less than the points one by one."""
        return False

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N 2*D"]:
        """φ(x), for few points."""
        return chunked.trig(x, self.phases)

    def moments(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D k"], Float[Tensor, "*b 2*D"]]:
        """C = φᵀφ, Z = φᵀy and s = φᵀ1."""
        return moments(x, self.phases, y)

    def sums(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n q"], weights: Float[Tensor, "n k"]
    ) -> tuple[Sequence[Tensor], Float[Tensor, "2*D q"], Sequence[Float[Tensor, "2*D"]]]:
        """φᵀ diag(a) φ for every column a of weights, φᵀy, and the φᵀa."""
        gram, cross = chunked.moments(x, self.phases, torch.cat([y, weights], dim=-1), weights)
        cross, sums = cross.split([y.shape[-1], weights.shape[-1]], dim=-1)
        return gram.unbind(0), cross, sums.unbind(-1)

    def gram(self, found: Tensor) -> Float[Tensor, "*b 2*D 2*D"]:
        """φᵀφ from the form in which it was added up: here itself."""
        return found

    def multiplier(
        self, symbol: Symbol, num_outputs: int, space: Sequence[int]
    ) -> Complex[Tensor, "*b 2*D q p"]:
        """Q of every column: with φ_c = Re ψ_c, ψ = e^{i⟨ω,x⟩} of a cosine and −i e^{i⟨ω,x⟩} of a
        sine, Q φ_c m = Re(ψ_c Q_c m)."""
        found = symbol(self.omega[..., list(space)], num_outputs).to(torch.complex128)
        return torch.cat([found, found], dim=-3)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "2*D"], Float[Tensor, "2*D"]]:
        """Columns c′ and signs s with Im ψ_c = s_c φ_c′."""
        index = torch.arange(self.num_columns, device=self.omega.device)
        count = self.phases.num_frequencies
        return index.roll(count), torch.where(index < count, 1.0, -1.0).to(self.omega)

    def waves(self, values: Float[Tensor, "*b 2*D k"]) -> Complex[Tensor, "*b 2*D k"]:
        """ψᵀv from φᵀv."""
        other, sign = self.quarter_turn
        return torch.complex(values, sign.unsqueeze(-1) * values[..., other, :])

    def real_weights(self, weights: Complex[Tensor, "*b 2*D k"]) -> Float[Tensor, "*b 2*D k"]:
        """w with Re(ψ weights) = φ w."""
        other, sign = self.quarter_turn
        return weights.real - (sign.unsqueeze(-1) * weights.imag)[..., other, :]

    def adjoint(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> Float[Tensor, "*b 2*D k"]:
        """φᵀy."""
        return chunked.adjoint(x, self.phases, y)

    def apply(
        self, x: Float[Tensor, "*b N d"], w: Float[Tensor, "*b 2*D k"]
    ) -> Float[Tensor, "*b N k"]:
        """φ w."""
        return chunked.apply(x, self.phases, w)


def moments(
    x: Float[Tensor, "*b N d"], phases: Phases, y: Float[Tensor, "*b N k"]
) -> tuple[Float[Tensor, "*b 2*D 2*D"], Float[Tensor, "*b 2*D k"], Float[Tensor, "*b 2*D"]]:
    """C, Z and s in one pass and one backward pass."""
    gram, cross = chunked.moments(x, phases, torch.cat([y, torch.ones_like(y[..., :1])], dim=-1))
    return gram, cross[..., :-1], cross[..., -1]


def _thue_morse(index: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The parity of the binary digits: halves that are both even, also of a Sobol sequence."""
    for shift in (16, 8, 4, 2, 1):
        index = index ^ (index >> shift)
    return index & 1


def side_by_side(parts: Sequence[TrigColumns]) -> tuple[TrigColumns, list[Int[Tensor, "k"]]]:
    """The columns of all parts as one, and where among them those of each part are."""
    batch = torch.broadcast_shapes(*(part.omega.shape[:-2] for part in parts))
    omegas = [part.omega.expand(*batch, *part.omega.shape[-2:]) for part in parts]
    phi = TrigColumns.of(torch.cat(omegas, dim=-2), all(part.sampled for part in parts))
    index = torch.arange(phi.num_columns // 2, device=phi.omega.device)
    own = index.split([part.num_columns // 2 for part in parts])
    return phi, [torch.cat(phi.columns_of(frequencies)) for frequencies in own]
