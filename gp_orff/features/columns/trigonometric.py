"""Trigonometric columns φ(x) = [cos⟨ω_k, x⟩ ; sin⟨ω_k, x⟩] for any frequencies."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features import chunked
from gp_orff.features.columns.base import Columns, exchanged_halves
from gp_orff.features.phases import LinearPhases, Phases


@dataclass(frozen=True)
class TrigColumns(Columns):
    """The cosines of all phases ⟨ω_k, x⟩, then their sines; products go by chunks of points.

    The columns are the real parts of the waves e^{i⟨ω,x⟩} and −i e^{i⟨ω,x⟩}.
    """

    phases: Phases
    sampled: bool = True

    @classmethod
    def of(cls, omega: Float[Tensor, "*b D d"], sampled: bool = True) -> "TrigColumns":
        """The columns of explicit frequencies ω."""
        return cls(LinearPhases(omega), sampled)

    @property
    def omega(self) -> Float[Tensor, "*b D d"]:
        """The frequencies ω_k, in radians per unit of the inputs."""
        return self.phases.omega

    @property
    def device(self) -> torch.device:
        return self.phases.tensors[0].device

    @property
    def num_columns(self) -> int:
        return 2 * self.phases.num_frequencies

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.phases.tensors

    def with_tensors(self, *tensors: Tensor) -> "TrigColumns":
        return replace(self, phases=self.phases.rebuild(*tensors))

    def to(self, device: torch.device) -> "TrigColumns":
        return self.with_tensors(*(tensor.to(device) for tensor in self.tensors))

    def columns_of(
        self, frequencies: Int[Tensor, "k"]
    ) -> tuple[Int[Tensor, "k"], Int[Tensor, "k"]]:
        """The indices of the cosines and of the sines of some frequencies."""
        return frequencies, frequencies + self.phases.num_frequencies

    def of_frequencies(self, values: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b 2*D k"]:
        """Values for each frequency → values for each column."""
        return torch.cat([values, values], dim=-2)

    def select(self, columns: Int[Tensor, "2*k"]) -> "TrigColumns":
        """The columns of some frequencies: `columns` has their cosines first, then their sines."""
        return TrigColumns(self.phases.select(columns[: len(columns) // 2]), self.sampled)

    def halves(self) -> list[tuple[Int[Tensor, "2*k"], Float[Tensor, "2*k"]]]:
        """Two halves of the sampled frequencies; both contain all that are not sampled.

        Those are the constant, ω = 0, and the nodes of a quadrature.
        """
        count = self.phases.num_frequencies
        fixed = self.phases.zero.reshape(-1, count).all(0) | (not self.sampled)
        index = torch.arange(count, device=self.device)
        parity, halves = _thue_morse(index), []
        for side in (0, 1):
            half = (parity == side) & ~fixed
            frequencies = index[half | fixed]
            scale = (~fixed).sum().double() / half.sum()
            variance = torch.where(fixed[frequencies], 1.0, scale).to(self.phases.tensors[0])
            halves.append((torch.cat(self.columns_of(frequencies)), variance.repeat(2)))
        return halves

    def same(self, other: Columns) -> bool:
        return isinstance(other, TrigColumns) and self.phases.same(other.phases)

    def plain(self) -> dict[str, object]:
        return {**self.phases.plain(), "sampled": self.sampled}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return chunked.by_chunks(self.phases, x, self.phases.num_frequencies)

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N 2*D"]:
        return chunked.trig(x, self.phases)

    def mean_squares(self) -> Float[Tensor, "*b 2*D 1"]:
        cosines = torch.where(self.phases.zero, 1.0, 0.5).unsqueeze(-1).to(self.phases.tensors[0])
        return torch.cat([cosines, 1 - cosines], dim=-2)

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        design = torch.cat([y, torch.ones_like(y[..., :1])], dim=-1)  # [y, 1]
        gram, cross = chunked.moments(x, self.phases, design)
        return gram, cross[..., :-1], cross[..., -1]

    def sums(self, x, y, weights):
        gram, cross = chunked.moments(x, self.phases, torch.cat([y, weights], dim=-1), weights)
        cross, sums = cross.split([y.shape[-1], weights.shape[-1]], dim=-1)
        return gram.unbind(0), cross, sums.unbind(-1)

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        return chunked.adjoint(x, self.phases, y)

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        return chunked.apply(x, self.phases, w)

    def multiplier(self, symbol, num_outputs, space):
        multiplier = symbol(self.omega[..., list(space)], num_outputs).to(torch.complex128)
        return torch.cat([multiplier, multiplier], dim=-3)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "2*D"], Float[Tensor, "2*D"]]:
        """Im e^{iθ} = sin θ and Im(−i e^{iθ}) = −cos θ."""
        return exchanged_halves(self.phases.num_frequencies, self.phases.tensors[0])


def _thue_morse(index: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The parity of the sum of binary digits: it halves a Sobol sequence evenly, too."""
    for shift in (16, 8, 4, 2, 1):
        index = index ^ (index >> shift)
    return index & 1
