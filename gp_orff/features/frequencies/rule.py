"""What a frequency rule takes and gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.features.columns import Columns
from gp_orff.kernels.spectra.base import Spectrum


@dataclass(frozen=True)
class LeafSpectrum:
    """One scalar kernel of a term: its frequencies enter B(ω) with this degree."""

    spectrum: Spectrum
    dims: tuple[int, ...]  # the input columns it sees
    degree: int  # ‖B(ω)‖² grows like ‖ω‖^{2·degree}

    @property
    def num_dims(self) -> int:
        return len(self.dims)


@dataclass(frozen=True)
class TermSpectrum:
    """What one term of a kernel tree asks of a rule: independent frequencies for each leaf."""

    leaves: tuple[LeafSpectrum, ...]
    rank: int = 1  # features of a trigonometric column
    share: int = 1  # of how many terms that will share their frequencies this is one


class Draw(nn.Module):
    """Frequencies of one term, drawn once as base variables without hyperparameters."""

    sampled = True  # a random sample, which halves of it can check

    def __init__(self, bases: Sequence[Float[Tensor, "D c"]], orders: Sequence[int]):
        super().__init__()
        self.orders = tuple(orders)
        for index, base in enumerate(bases):
            self.register_buffer(f"base_{index}", base)

    @property
    def bases(self) -> list[Float[Tensor, "D c"]]:
        return [getattr(self, f"base_{index}") for index in range(len(self.orders))]

    @property
    def num_frequencies(self) -> int:
        return self.bases[0].shape[0] if self.orders else 1

    def nodes(
        self, spectra: Sequence[Spectrum]
    ) -> tuple[list[Float[Tensor, "*b D d"]], Float[Tensor, "*b D"]]:
        """ω of each leaf and the weights w with E[g(ω₁, …)] ≈ Σ_k w_k g(ω_1k, …)."""
        parts = list(zip(spectra, self.bases, self.orders, strict=True))
        weights = torch.full_like(self.bases[0][:, 0], 1 / self.num_frequencies)
        for spectrum, base, order in parts:
            weights = weights * spectrum.importance(base, order)
        return [spectrum.frequencies(base, order) for spectrum, base, order in parts], weights

    def shared_columns(self) -> Columns | None:
        """The columns of every term of the tree, where frequencies are shared."""
        return None

    def left_range(self, spectra: Sequence[Spectrum]) -> float | None:
        """A lengthscale these frequencies do not serve, relative to that they were made for."""
        return None

    def check_domain(self, spectra: Sequence[Spectrum], *points: Float[Tensor, "*b n d"]) -> None:
        """Raise ValueError for points where these frequencies do not give the kernel."""

    def extra_repr(self) -> str:
        return f"num_frequencies={self.num_frequencies}"


class Rule(Protocol):
    """A frequency rule; it holds no tensors and never changes."""

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Frequencies for every term of a kernel tree, in order."""
