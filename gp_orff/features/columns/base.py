"""What features are made of: columns φ(x), the real parts of waves."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gp_orff.features import chunked
from gp_orff.symbols.base import Symbol


class Columns(ABC):
    """M functions φ_c(x), each the real part of a wave ψ_c(x); an immutable value."""

    num_columns: int  # M
    device: torch.device
    sampled: bool  # whether they are a random sample, which halves of it can check
    tensors: tuple[Tensor, ...]  # what they are differentiable in, each ending in a matrix

    @abstractmethod
    def with_tensors(self, *tensors: Tensor) -> "Columns":
        """The same columns of tensors on another device, in another type or a batch of them."""

    @abstractmethod
    def to(self, device: torch.device) -> "Columns":
        """On another device."""

    @abstractmethod
    def select(self, columns: Int[Tensor, "k"]) -> "Columns":
        """Some of the columns, in the order of `halves`."""

    @abstractmethod
    def halves(self) -> Sequence[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """The columns of two halves of the sample, and what the variance of each is multiplied by,
        so that either half is an estimate of what all are."""

    @abstractmethod
    def same(self, other: "Columns") -> bool:
        """Whether statistics of these and of the other columns may be added."""

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """What a file holds of these columns."""

    @abstractmethod
    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        """φ(x), for few points."""

    @abstractmethod
    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """Of φ over all of space."""

    @abstractmethod
    def moments(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> tuple[Float[Tensor, "*b M M"], Float[Tensor, "*b M k"], Float[Tensor, "*b M"]]:
        """C = φᵀφ, Z = φᵀy and s = φᵀ1."""

    @abstractmethod
    def sums(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n q"], weights: Float[Tensor, "n k"]
    ) -> tuple[Sequence[Tensor], Float[Tensor, "M q"], Sequence[Float[Tensor, "M"]]]:
        """φᵀ diag(a) φ for every column a of weights, φᵀy, and the φᵀa."""

    @abstractmethod
    def adjoint(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> Float[Tensor, "*b M k"]:
        """φᵀy."""

    @abstractmethod
    def apply(
        self, x: Float[Tensor, "*b N d"], w: Float[Tensor, "*b M k"]
    ) -> Float[Tensor, "*b N k"]:
        """φ w."""

    @abstractmethod
    def multiplier(
        self, symbol: Symbol, num_outputs: int, space: Sequence[int]
    ) -> Complex[Tensor, "*b M q p"]:
        """Q of every column: Q φ_c m = Re(ψ_c Q_c m)."""

    @property
    @abstractmethod
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        """Columns c′ and signs s with Im ψ_c = s_c φ_c′; the turn of c′ leads back to c."""

    def waves(self, values: Float[Tensor, "*b M k"]) -> Complex[Tensor, "*b M k"]:
        """ψᵀv from φᵀv."""
        other, sign = self.quarter_turn
        return torch.complex(values, sign.unsqueeze(-1) * values[..., other, :])

    def turned(self, weights: Float[Tensor, "*b M k"]) -> Float[Tensor, "*b M k"]:
        """w with Im(ψ) weights = φ w."""
        other, sign = self.quarter_turn
        return (sign.unsqueeze(-1) * weights)[..., other, :]

    def detached(self) -> "Columns":
        """The same numbers, cut from the graph of what they are differentiable in."""
        return self.with_tensors(*(own.detach() for own in self.tensors))

    def gram(self, found: Tensor) -> Float[Tensor, "*b M M"]:
        """φᵀφ from the form in which it was added up: here itself."""
        return found

    def cross_gram(
        self, other: "Columns", x: Float[Tensor, "*b N d"], weight: Float[Tensor, "N"] | None = None
    ) -> Float[Tensor, "*b M m"]:
        """φᵀ diag(a) φ′ with other columns φ′; like all products, by chunks that are not kept."""
        pair = [own.with_tensors(*(t.double() for t in own.tensors)) for own in (self, other)]

        def product(rows: slice) -> Tensor:
            left, right = (own.values(x[..., rows, :].double()) for own in pair)
            return left.mT @ (right if weight is None else weight[rows, None] * right)

        total = x.new_zeros(self.num_columns, other.num_columns, dtype=torch.float64)
        for rows in chunked.chunks(x, self.num_columns + other.num_columns):
            found = checkpoint(product, rows, use_reentrant=False, preserve_rng_state=False)
            total = total + found
        return total

    def folds(self, x: Float[Tensor, "*b N d"], num_features: int) -> bool:
        """Whether quadratic forms of φ at so many points cost less than the points one by one."""
        return False


def stacked(rows: Sequence[Float[Tensor, "*b _ k"]]) -> Float[Tensor, "*b _ k"]:
    """Matrices on top of each other, their batches broadcast."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in rows))
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in rows], dim=-2)
