"""The protocol of columns: real functions φ_c(x) that features are made of."""

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
    sampled: bool  # whether the frequencies are a random sample, whose halves can be compared
    tensors: tuple[Tensor, ...]  # the differentiable tensors, (*b, m, n) each

    @abstractmethod
    def with_tensors(self, *tensors: Tensor) -> "Columns":
        """The same columns with other tensors: another device or type, or a batch of them."""

    @abstractmethod
    def to(self, device: torch.device) -> "Columns":
        """The same columns on another device."""

    @abstractmethod
    def select(self, columns: Int[Tensor, "k"]) -> "Columns":
        """The columns with these indices, which come in the order that `halves` gives."""

    @abstractmethod
    def halves(self) -> Sequence[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Two halves of the sample: for each, its columns and the factors of their variances.

        With these factors either half estimates the same kernel as all columns do.
        """

    @abstractmethod
    def same(self, other: "Columns") -> bool:
        """Whether the statistics of these columns and of `other` may be added."""

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """Tensors and plain values from which a file can restore these columns."""

    @abstractmethod
    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """⟨ω_k, x⟩ for the D vectors ω_k that the columns are functions of."""

    @abstractmethod
    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        """φ(x) as a dense matrix; for few points."""

    @abstractmethod
    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """The mean of φ_c² over all of space."""

    @abstractmethod
    def moments(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> tuple[Float[Tensor, "*b M M"], Float[Tensor, "*b M k"], Float[Tensor, "*b M"]]:
        """C = φᵀφ, Z = φᵀy and s = φᵀ1."""

    @abstractmethod
    def sums(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n q"], weights: Float[Tensor, "n k"]
    ) -> tuple[Sequence[Tensor], Float[Tensor, "M q"], Sequence[Float[Tensor, "M"]]]:
        """φᵀ diag(a) φ for every column a of `weights`; φᵀy; φᵀa for every column a.

        A family may return φᵀ diag(a) φ in a more compact form; `gram` turns it into the matrix.
        """

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
        """Q_c, the symbol at the frequency of every column: Q(φ_c m) = Re(ψ_c Q_c m).

        `space` are the input columns that the symbol acts on.
        """

    @property
    @abstractmethod
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        """Columns c′ and signs s with Im ψ_c = s_c φ_c′; applied twice, c ↦ c′ leads back to c."""

    def waves(self, values: Float[Tensor, "*b M k"]) -> Complex[Tensor, "*b M k"]:
        """ψᵀv from `values` = φᵀv."""
        partner, sign = self.quarter_turn
        return torch.complex(values, sign.unsqueeze(-1) * values[..., partner, :])

    def turn(self, weights: Float[Tensor, "*b M k"]) -> Float[Tensor, "*b M k"]:
        """w with φ w = Im(ψ) `weights`."""
        partner, sign = self.quarter_turn
        return (sign.unsqueeze(-1) * weights)[..., partner, :]

    def detached(self) -> "Columns":
        """The same columns, detached from the autograd graph."""
        return self.with_tensors(*(tensor.detach() for tensor in self.tensors))

    def gram(self, sums: Tensor) -> Float[Tensor, "*b M M"]:
        """φᵀ diag(a) φ from what `sums` returns for it; here that is the matrix itself."""
        return sums

    def cross_gram(
        self, other: "Columns", x: Float[Tensor, "*b N d"], weight: Float[Tensor, "N"] | None = None
    ) -> Float[Tensor, "*b M m"]:
        """φᵀ diag(a) φ′ with other columns φ′, by chunks of points that are not stored."""
        pair = [phi.with_tensors(*(t.double() for t in phi.tensors)) for phi in (self, other)]

        def product(rows: slice) -> Tensor:
            left, right = (phi.values(x[..., rows, :].double()) for phi in pair)
            return left.mT @ (right if weight is None else weight[rows, None] * right)

        total = x.new_zeros(self.num_columns, other.num_columns, dtype=torch.float64)
        for rows in chunked.chunks(x, self.num_columns + other.num_columns):
            part = checkpoint(product, rows, use_reentrant=False, preserve_rng_state=False)
            total = total + part
        return total

    def prefers_quadratic(self, x: Float[Tensor, "*b N d"], num_features: int) -> bool:
        """Whether `quadratic` gives φ P φᵀ at the points x at less cost than point by point."""
        return False


def stack_rows(matrices: Sequence[Float[Tensor, "*b _ k"]]) -> Float[Tensor, "*b _ k"]:
    """The matrices on top of each other, their batch shapes broadcast."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in matrices))
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in matrices], dim=-2)


def exchanged_halves(count: int, like: Tensor) -> tuple[Int[Tensor, "2*D"], Float[Tensor, "2*D"]]:
    """The quarter turn of the columns [Re ψ ; Re(−iψ)] of `count` waves: Im ψ is Re(−iψ), and
    Im(−iψ) is −Re ψ; the signs on the device and with the dtype of `like`."""
    index = torch.arange(2 * count, device=like.device)
    return index.roll(count), torch.where(index < count, 1.0, -1.0).to(like)
