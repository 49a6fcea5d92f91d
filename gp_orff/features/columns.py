"""The columns φ(x) of features: their protocol, trigonometric columns, and several families."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import accumulate, chain, combinations

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gp_orff.features import chunked
from gp_orff.features.phases import LinearPhases, Phases
from gp_orff.symbols.base import Symbol

# Columns are the real functions φ_c(x) of which features consist.


class Columns(ABC):
    """M functions φ_c(x), each the real part of a wave ψ_c(x); an immutable value.

    Attributes:
        num_columns: M, the number of columns.
        device: the device of the tensors.
        sampled: whether the frequencies are a random sample, so that its halves can be compared.
        tensors: the differentiable tensors, (*b, m, n) each.
        on_lattice: whether the columns are `LatticeColumns`.
    """

    num_columns: int
    device: torch.device
    sampled: bool
    tensors: tuple[Tensor, ...]
    on_lattice = False

    @property
    def families(self) -> "tuple[Columns, ...]":
        """The families of a `SideBySide`; other columns are one family."""
        return (self,)

    @abstractmethod
    def with_tensors(self, *tensors: Tensor) -> "Columns":
        """Return these columns with `tensors` in place of `self.tensors`.

        The new tensors may have another device, another dtype or another batch shape.
        """

    @abstractmethod
    def to(self, device: torch.device) -> "Columns":
        """Return these columns on another device."""

    @abstractmethod
    def select(self, columns: Int[Tensor, "k"]) -> "Columns":
        """Return the columns with these indices, which must have the order that `halves` uses."""

    @abstractmethod
    def halves(self) -> Sequence[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        """Return two halves of the sample, each as indices of columns and factors of variances.

        With these factors each half estimates the kernel that all columns estimate.
        """

    def same(self, other: "Columns") -> bool:
        """Return whether statistics of these columns and of `other` may be added."""
        return self is other or _alike(self.plain(), other.plain())

    @abstractmethod
    def plain(self) -> dict[str, object]:
        """Return the tensors and plain values that determine these columns."""

    @abstractmethod
    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        """Return ⟨ω_k, x⟩ for the D vectors ω_k on which the columns depend."""

    @abstractmethod
    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        """Return φ(x) as a dense matrix; the number of points N must be small."""

    @abstractmethod
    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        """Return the mean of each φ_c² over all of space."""

    @abstractmethod
    def moments(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> tuple[Float[Tensor, "*b M M"], Float[Tensor, "*b M k"], Float[Tensor, "*b M"]]:
        """Return C = φᵀφ, Z = φᵀy and s = φᵀ1."""

    @abstractmethod
    def sums(
        self, x: Float[Tensor, "n d"], y: Float[Tensor, "n q"], weights: Float[Tensor, "n k"]
    ) -> tuple[Sequence[Tensor], Float[Tensor, "M q"], Sequence[Float[Tensor, "M"]]]:
        """Return φᵀ diag(a) φ for every column a of `weights`; φᵀy; φᵀa for every column a.

        A family may return φᵀ diag(a) φ in a more compact form, which `gram` converts to a matrix.
        """

    @abstractmethod
    def adjoint(
        self, x: Float[Tensor, "*b N d"], y: Float[Tensor, "*b N k"]
    ) -> Float[Tensor, "*b M k"]:
        """Return φᵀy."""

    @abstractmethod
    def apply(
        self, x: Float[Tensor, "*b N d"], w: Float[Tensor, "*b M k"]
    ) -> Float[Tensor, "*b N k"]:
        """Return φ w."""

    @abstractmethod
    def multiplier(
        self, symbol: Symbol, num_outputs: int, space: Sequence[int]
    ) -> Complex[Tensor, "*b M q p"]:
        """Return Q_c, the symbol at the frequency of every column: Q(φ_c m) = Re(ψ_c Q_c m).

        Args:
            symbol: the symbol Q, a map from p to q outputs.
            num_outputs: the number p of outputs of the field.
            space: the input columns on which the symbol acts, from 0.
        """

    @property
    @abstractmethod
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        """The columns c′ and the signs s with Im ψ_c = s_c φ_c′; c″ = c."""

    def waves(self, values: Float[Tensor, "*b M k"]) -> Complex[Tensor, "*b M k"]:
        """Return ψᵀv, where `values` = φᵀv."""
        partner, sign = self.quarter_turn
        return torch.complex(values, sign.unsqueeze(-1) * values[..., partner, :])

    def turn(self, weights: Float[Tensor, "*b M k"]) -> Float[Tensor, "*b M k"]:
        """Return w such that φ w = Im(ψ) `weights`."""
        partner, sign = self.quarter_turn
        return (sign.unsqueeze(-1) * weights)[..., partner, :]

    def detached(self) -> "Columns":
        """Return these columns, detached from the autograd graph."""
        return self.with_tensors(*(tensor.detach() for tensor in self.tensors))

    def gram(self, sums: Tensor) -> Float[Tensor, "*b M M"]:
        """Return the matrix φᵀ diag(a) φ from the form in which `self.sums` returns it."""
        return sums

    def cross_gram(
        self, other: "Columns", x: Float[Tensor, "*b N d"], weight: Float[Tensor, "N"] | None = None
    ) -> Float[Tensor, "*b M m"]:
        """Return φᵀ diag(a) φ′ for the columns φ′ of `other`, computed in chunks of points.

        Args:
            other: the m columns φ′.
            x: points, (*b, N, d).
            weight: the weights a, (N,); None means ones.
        """
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
        """Return whether `quadratic` computes φ P φᵀ at the points x faster than `values` does."""
        return False


@singledispatch
def _alike(one: object, other: object) -> bool:
    """Return whether two trees of tensors and plain values agree up to rounding of the tensors."""
    return one == other


@_alike.register
def _(one: Tensor, other: object) -> bool:
    alike = isinstance(other, Tensor) and one.shape == other.shape
    return alike and torch.allclose(one, other, rtol=1e-9, atol=0)


@_alike.register
def _(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)


@_alike.register
def _(one: list, other: list) -> bool:
    return len(one) == len(other) and all(map(_alike, one, other))


def stack_rows(matrices: Sequence[Float[Tensor, "*b _ k"]]) -> Float[Tensor, "*b _ k"]:
    """Return the matrices stacked along their rows, with their batch shapes broadcast."""
    batch = torch.broadcast_shapes(*(t.shape[:-2] for t in matrices))
    return torch.cat([t.expand(*batch, *t.shape[-2:]) for t in matrices], dim=-2)


def exchanged_halves(count: int, like: Tensor) -> tuple[Int[Tensor, "2*D"], Float[Tensor, "2*D"]]:
    """Return the `quarter_turn` of the columns [Re ψ ; Re(−iψ)] of `count` waves ψ.

    Im ψ is Re(−iψ), and Im(−iψ) is −Re ψ. The tensors have the device of `like`; the signs have
    its dtype.
    """
    index = torch.arange(2 * count, device=like.device)
    return index.roll(count), torch.where(index < count, 1.0, -1.0).to(like)


# Trigonometric columns φ(x) = [cos⟨ω_k, x⟩ ; sin⟨ω_k, x⟩] for any frequencies.


@dataclass(frozen=True)
class TrigColumns(Columns):
    """The cosines of all phases ⟨ω_k, x⟩, followed by their sines.

    The columns are the real parts of the waves e^{i⟨ω,x⟩} and −i e^{i⟨ω,x⟩}. Products are computed
    in chunks of points.
    """

    phases: Phases
    sampled: bool = True

    @classmethod
    def of(cls, omega: Float[Tensor, "*b D d"], sampled: bool = True) -> "TrigColumns":
        """Return the columns of explicit frequencies ω (*b, D, d), in radians per unit of x."""
        return cls(LinearPhases(omega), sampled)

    @property
    def omega(self) -> Float[Tensor, "*b D d"]:
        """The frequencies ω_k, (*b, D, d), in radians per unit of the inputs."""
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
        """Return the indices of the cosines and of the sines of some frequencies."""
        return frequencies, frequencies + self.phases.num_frequencies

    def of_frequencies(self, values: Float[Tensor, "*b D k"]) -> Float[Tensor, "*b 2*D k"]:
        """Return for each column the values of its frequency."""
        return torch.cat([values, values], dim=-2)

    def select(self, columns: Int[Tensor, "2*k"]) -> "TrigColumns":
        """Return the columns of some frequencies; `columns` lists all cosines, then all sines."""
        return TrigColumns(self.phases.select(columns[: len(columns) // 2]), self.sampled)

    def halves(self) -> list[tuple[Int[Tensor, "2*k"], Float[Tensor, "2*k"]]]:
        """Return two halves of the sampled frequencies; each half contains all other frequencies.

        The other frequencies are ω = 0, which is the constant, and the nodes of a quadrature.
        """
        count = self.phases.num_frequencies
        # The factor scales the variance of a half of the sampled frequencies to that of all of
        # them. Frequencies that are not sampled are in both halves, with the factor one.
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

    def plain(self) -> dict[str, object]:
        return {**self.phases.plain(), "sampled": self.sampled}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        width = self.phases.num_arrays * self.phases.num_frequencies
        return chunked.by_chunks(self.phases, x, width)

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N 2*D"]:
        return chunked.trig(x, self.phases)

    def mean_squares(self) -> Float[Tensor, "*b 2*D 1"]:
        # cos² and sin² have the mean ½, except at ω = 0, where the cosine is one and the sine is
        # zero.
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
        """The columns and signs of Im e^{iθ} = sin θ and Im(−i e^{iθ}) = −cos θ."""
        return exchanged_halves(self.phases.num_frequencies, self.phases.tensors[0])


def _thue_morse(index: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Return the parity of the sum of the binary digits; it also halves a Sobol sequence evenly."""
    for shift in (16, 8, 4, 2, 1):
        index = index ^ (index >> shift)
    return index & 1


# Columns of which only the values are available.


class PointwiseColumns(Columns):
    """Columns φ_c(x) whose products are computed from `values`, in chunks of points.

    All operations use float64. Backward passes use `torch.utils.checkpoint` and compute the values
    of a chunk again. Memory therefore does not grow with N·M, and second derivatives exist.

    These columns are not waves: ψ_c = φ_c is real. `multiplier` therefore accepts only symbols that
    are one constant matrix. The columns depend on no hyperparameter unless a subclass overrides
    `tensors`.
    """

    sampled = False
    tensors = ()

    def with_tensors(self, *tensors: Tensor) -> Columns:
        return self

    def halves(self) -> list[tuple[Int[Tensor, "M"], Float[Tensor, "M"]]]:
        """Return all columns as both halves, because they are not a sample."""
        index = torch.arange(self.num_columns, device=self.device)
        return [(index, torch.ones_like(index, dtype=torch.float64))] * 2

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        x = x.expand(*batch, *x.shape[-2:])
        design = torch.cat([y, torch.ones_like(y[..., :1])], dim=-1).double()  # [y, 1]
        gram, cross = self._totals(
            lambda phi, rows: (phi.mT @ phi, phi.mT @ design[..., rows, :]), x
        )
        return gram, cross[..., :-1], cross[..., -1]

    def sums(self, x, y, weights):
        design, weights = torch.cat([y, weights], dim=-1).double(), weights.double()

        def products(phi: Float[Tensor, "n M"], rows: slice) -> tuple[Tensor, ...]:
            grams = [phi.mT @ (a.unsqueeze(-1) * phi) for a in weights[rows].unbind(-1)]
            return phi.mT @ design[rows], *grams

        cross, *grams = self._totals(products, x)
        cross, sums = cross.split([y.shape[-1], weights.shape[-1]], dim=-1)
        return grams, cross, sums.unbind(-1)

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        y = y.double()
        return self._totals(lambda phi, rows: (phi.mT @ y[..., rows, :],), x)[0]

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        w = w.double()
        return torch.cat(list(self._products(lambda phi, rows: phi @ w, x)), dim=-2)

    def _totals(self, products: Callable, x: Float[Tensor, "*b N d"]) -> list[Tensor]:
        """Return the sums over all chunks of the tensors that `products(φ, rows)` returns."""
        chunks = self._products(products, x)
        totals = list(next(chunks))
        for parts in chunks:
            for total, part in zip(totals, parts, strict=True):
                total += part
        return totals

    def _products(self, product: Callable, x: Float[Tensor, "*b N d"]) -> Iterator:
        """Yield `product(φ, rows)` for every chunk of points; there is at least one chunk."""
        columns = self.with_tensors(*(tensor.double() for tensor in self.tensors))

        def of_chunk(rows: slice):
            return product(columns.values(x[..., rows, :].double()), rows)

        # Without points there is one empty chunk, so that the sums have the right shapes.
        for rows in list(chunked.chunks(x, self.num_columns)) or [slice(0, 0)]:
            yield checkpoint(of_chunk, rows, use_reentrant=False, preserve_rng_state=False)

    def multiplier(
        self, symbol: Symbol, num_outputs: int, space: Sequence[int]
    ) -> Complex[Tensor, "M q p"]:
        """Return the matrix of a symbol that does not depend on frequency, for every column.

        Raises:
            NotImplementedError: the symbol depends on frequency, for example a derivative.
        """
        generator = torch.Generator().manual_seed(0)
        # A symbol is a function and does not say whether it is constant. It is therefore evaluated
        # at zero and at three random frequencies.
        omega = torch.randn(4, len(space), generator=generator, dtype=torch.float64)
        omega[0] = 0.0
        first, *others = symbol(omega.to(self.device), num_outputs).to(torch.complex128)
        if symbol.order or any((other != first).any() for other in others):
            raise NotImplementedError(
                "expected a symbol with the same matrix at all frequencies, for example "
                f"Component, because the columns of {type(self).__name__} are not waves, got "
                f"{type(symbol).__name__}; differentiate predictions by torch.autograd, or use a "
                "stationary kernel with a rule such as gp_orff.QuasiMonteCarlo"
            )
        return first.expand(self.num_columns, *first.shape)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        """The columns and signs of Im φ_c = 0 · φ_c."""
        index = torch.arange(self.num_columns, device=self.device)
        return index, torch.zeros_like(index, dtype=torch.float64)


# Columns of several families.


@dataclass(frozen=True)
class SideBySide(Columns):
    """The columns of several families, one family after the other."""

    parts: tuple[Columns, ...]

    @property
    def families(self) -> tuple[Columns, ...]:
        return self.parts

    @property
    def counts(self) -> list[int]:
        """Return the number of columns of each family."""
        return [phi.num_columns for phi in self.families]

    @property
    def starts(self) -> list[int]:
        """Return the index of the first column of each family."""
        return list(accumulate(self.counts[:-1], initial=0))

    @property
    def num_columns(self) -> int:
        return sum(self.counts)

    @property
    def sampled(self) -> bool:
        return any(phi.sampled for phi in self.families)

    @property
    def device(self) -> torch.device:
        return self.families[0].device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(chain.from_iterable(phi.tensors for phi in self.families))

    def with_tensors(self, *tensors: Tensor) -> "SideBySide":
        remaining = iter(tensors)
        parts = [phi.with_tensors(*(next(remaining) for _ in phi.tensors)) for phi in self.families]
        return SideBySide(tuple(parts))

    def to(self, device: torch.device) -> "SideBySide":
        return SideBySide(tuple(phi.to(device) for phi in self.families))

    def select(self, columns: Int[Tensor, "k"]) -> "SideBySide":
        ranges = zip(self.families, self.starts, self.counts, strict=True)
        parts = [(phi, columns[(columns >= a) & (columns < a + n)] - a) for phi, a, n in ranges]
        return SideBySide(tuple(phi.select(indices) for phi, indices in parts))

    def halves(self) -> list[tuple[Int[Tensor, "k"], Float[Tensor, "k"]]]:
        halves = []
        for half in zip(*(phi.halves() for phi in self.families), strict=True):
            columns, variances = zip(*half, strict=True)
            halves.append((self._shift(columns), torch.cat(variances)))
        return halves

    def _shift(self, columns: Sequence[Int[Tensor, "k"]]) -> Int[Tensor, "k"]:
        """Return indices among all columns from the indices within each family."""
        pairs = zip(self.starts, columns, strict=True)
        return torch.cat([start + indices for start, indices in pairs])

    def plain(self) -> dict[str, list]:
        return {"families": [phi.plain() for phi in self.families]}

    def inner_products(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N D"]:
        return stack_rows([phi.inner_products(x).mT for phi in self.families]).mT

    def values(self, x: Float[Tensor, "*b N d"]) -> Float[Tensor, "*b N M"]:
        return stack_rows([phi.values(x).mT for phi in self.families]).mT

    def mean_squares(self) -> Float[Tensor, "*b M 1"]:
        return stack_rows([phi.mean_squares() for phi in self.families])

    def moments(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grams, crosses, sums = zip(*(phi.moments(x, y) for phi in self.families), strict=True)
        total = stack_rows([s.unsqueeze(-1) for s in sums]).squeeze(-1)
        return self._blocks(grams, x), stack_rows(crosses), total

    def sums(self, x, y, weights):
        parts = (phi.sums(x, y, weights) for phi in self.families)
        compact, crosses, sums = zip(*parts, strict=True)
        grams = []
        for weight, *parts in zip(weights.mT, *compact, strict=True):
            # Compact sums, such as those of a lattice, exist only within a family. The block of two
            # families does not have this form, so the whole matrix is computed.
            diagonal = [phi.gram(part) for phi, part in zip(self.families, parts, strict=True)]
            grams.append(self._blocks(diagonal, x, weight))
        return grams, torch.cat(crosses), [torch.cat(parts) for parts in zip(*sums, strict=True)]

    def _blocks(
        self, grams: Sequence[Tensor], x: Tensor, weight: Tensor | None = None
    ) -> Float[Tensor, "*b M M"]:
        """Return φᵀ diag(a) φ from the diagonal block of each family; compute the other blocks."""
        blocks = {(i, i): gram for i, gram in enumerate(grams)}
        for (i, phi), (j, other) in combinations(enumerate(self.families), 2):
            blocks[i, j] = phi.cross_gram(other, x, weight)
            blocks[j, i] = blocks[i, j].mT
        index = range(len(grams))
        return stack_rows([stack_rows([blocks[i, j].mT for j in index]).mT for i in index])

    def adjoint(self, x: Tensor, y: Tensor) -> Tensor:
        return stack_rows([phi.adjoint(x, y) for phi in self.families])

    def apply(self, x: Tensor, w: Tensor) -> Tensor:
        parts = zip(self.families, w.split(self.counts, dim=-2), strict=True)
        return sum(phi.apply(x, part) for phi, part in parts)

    def multiplier(self, symbol, num_outputs, space):
        parts = [phi.multiplier(symbol, num_outputs, space) for phi in self.families]
        return torch.cat(parts, dim=-3)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        partners, signs = zip(*(phi.quarter_turn for phi in self.families), strict=True)
        return self._shift(partners), torch.cat(signs)


def side_by_side(parts: Sequence[Columns]) -> tuple[Columns, list[Int[Tensor, "k"]]]:
    """Return the columns of all parts as one value, and the indices of each part's columns in it.

    All trigonometric columns with explicit frequencies become one family, which comes first.
    """
    families = [part.families for part in parts]
    every = list(chain.from_iterable(families))
    # Explicit frequencies come first. The sort is stable, so the order of the parts does not change
    # within either kind. `place` maps the index of a family in `every` to its columns.
    order = sorted(range(len(every)), key=lambda i: not _has_explicit_frequencies(every[i]))
    count = sum(map(_has_explicit_frequencies, every))
    merged, places = [every[i] for i in order[count:]], []
    if count:
        joined, places = _join([every[i] for i in order[:count]])
        merged.insert(0, joined)
    phi = SideBySide(tuple(merged))
    index = torch.arange(phi.num_columns, device=phi.device).split(phi.counts)
    place = dict(zip(order, [*places, *index[bool(count) :]], strict=True))
    numbers = iter(range(len(every)))
    indices = [torch.cat([place[next(numbers)] for _ in part]) for part in families]
    return (phi if len(merged) > 1 else merged[0]), indices


def _has_explicit_frequencies(columns: Columns) -> bool:
    return type(columns) is TrigColumns and columns.phases.written_out


def _join(parts: Sequence[TrigColumns]) -> tuple[TrigColumns, list[Int[Tensor, "k"]]]:
    """Return one family with the frequencies of all parts, and the columns of each part in it."""
    omega = stack_rows([part.omega for part in parts])
    phi = TrigColumns.of(omega, all(part.sampled for part in parts))
    index = torch.arange(phi.phases.num_frequencies, device=omega.device)
    groups = index.split([part.phases.num_frequencies for part in parts])
    return phi, [torch.cat(phi.columns_of(frequencies)) for frequencies in groups]
