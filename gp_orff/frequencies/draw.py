"""What a frequency rule takes and gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.spectra import Spectrum


@dataclass(frozen=True)
class Law:
    """What one leaf of a kernel tree asks of a rule: frequencies for E[B(ω) … B(ω)ᵀ]."""

    spectrum: Spectrum
    num_dims: int
    degree: int  # of B(ω): ‖B(ω)‖² grows like ‖ω‖^{2·degree}


class Draw(nn.Module):
    """Frequencies of one leaf, drawn once in base units: ω = z / ℓ, E[g] ≈ Σ_k weights_k g(ω_k)."""

    def __init__(self, z: Float[Tensor, "D d"], weights: Float[Tensor, "D"]):
        super().__init__()
        self.register_buffer("z", z)
        self.register_buffer("weights", weights)

    def extra_repr(self) -> str:
        return f"num_frequencies={self.z.shape[0]}, num_dims={self.z.shape[1]}"


class Rule(Protocol):
    """A frequency rule; it holds no tensors and never changes."""

    def draw(self, laws: Sequence[Law]) -> list[Draw]:
        """Frequencies for every leaf of a kernel tree, in the order of its terms."""
