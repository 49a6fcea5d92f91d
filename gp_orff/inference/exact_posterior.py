"""The posterior of a field and of its symbols by the exact kernel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.data.noise import Noises
from gp_orff.data.observations import LinearObservations, block_diagonal
from gp_orff.features.chunked import by_chunks
from gp_orff.inference.posteriors import InChunks
from gp_orff.kernels.base import cholesky
from gp_orff.kernels.symbol_covariance import SymbolCovariance
from gp_orff.kernels.tree import num_outputs
from gp_orff.symbols.base import Identity, Symbol

# The covariance between two kinds of linear observations is H₁ K H₂ᵀ, where K is the prior
# covariance at the points of both. Sites with few nodes and means along tracks thus need no special
# code here.


_INTERMEDIATE = 9  # covariances of symbols need that many times more memory on the way


@dataclass(frozen=True)
class ExactPosterior(InChunks):
    """The posterior of Q f given y = H f + ε.

    Mean Cov[Q f(x), H f] α; covariance Cov[Q f(x)] − VᵀV with V = L⁻¹ Cov[H f, Q f(x)]. If the
    symbol Q has a reference, the value there is subtracted.
    """

    kernel: Kernel
    observed: Sequence[LinearObservations]
    noises: Noises
    factor: Float[Tensor, "M M"]  # L, of Cov[H f] with the noise
    alpha: Float[Tensor, "M 1"]  # (L Lᵀ)⁻¹(y − c)
    response: Float[Tensor, "M p"]  # (L Lᵀ)⁻¹(1⊗I_p), of constants
    symbol: Symbol
    space: tuple[int, ...]  # directions of the symbol

    @property
    def noise_root(self) -> Float[Tensor, "M M"]:
        """A root of the noise covariance."""
        noise = [observations.noise_covariance(self.noises) for observations in self.observed]
        return cholesky(block_diagonal(noise))

    @property
    def num_outputs(self) -> int:
        return self.symbol.num_outputs(num_outputs(self.kernel))

    @property
    def _is_field(self) -> bool:
        return isinstance(self.symbol, Identity)

    @property
    def _width(self) -> int:
        numbers = len(self.factor) * self.num_outputs
        return numbers if self._is_field else numbers * _INTERMEDIATE

    def apply(self, symbol: Symbol, space: Sequence[int]) -> "ExactPosterior":
        """The posterior of the symbol of Q f.

        Raises:
            NotImplementedError: the symbol has no closed form under this kernel.
        """
        composed = symbol if self._is_field else symbol @ self.symbol
        image = replace(self, symbol=composed, space=tuple(space))
        image._blocks(self.observed[0].x[:1])  # raises
        return image

    def of_part(self, expansion, kernel):
        return replace(self, kernel=kernel)

    def cross(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "M n*q"]:
        """Cov[H f, Q f(x)]."""

        rows = []
        for part in self.observed:
            both = self.symbol, x, part.symbol, part.points, self.space or part.space
            rows.append(part.rows(prior_covariance(self.kernel, *both).mT))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def mean(self, x: Tensor) -> Tensor:
        return self._weighted(x, self.alpha).squeeze(-1)

    def absorbed(self, x: Tensor) -> Tensor:
        return self._weighted(x, self.response)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        alpha = torch.cat([self.alpha, self.response], dim=-1)

        def moments(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q*(2+p)"]:
            cross = self.cross(points)
            weighted = (cross.mT @ alpha).unflatten(0, (len(points), -1))
            variance = self._variance_given(points, cross)
            return torch.cat([weighted, variance.unsqueeze(-1)], dim=-1).flatten(1)

        values = self._in_chunks(moments, x, alpha.shape[-1] + 1)
        return values[..., 0], values[..., -1].clamp_min(0), values[..., 1:-1]

    def response_to(self, constants=None):
        return self.response if constants is None else self.response @ constants

    def _weighted(self, x: Float[Tensor, "n d"], alpha: Float[Tensor, "M k"]) -> Tensor:
        """Cov[Q f(x), H f] α, (n, q, k)."""

        def values(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q*k"]:
            return (self.cross(points).mT @ alpha).reshape(len(points), -1)

        return self._in_chunks(values, x, alpha.shape[-1])

    def _in_chunks(
        self, function: Callable[[Tensor], Tensor], x: Float[Tensor, "n d"], count: int
    ) -> Float[Tensor, "n q k"]:
        """`count` numbers for each output at each point."""
        if not len(x):
            return self.alpha.new_empty(0, self.num_outputs, count)
        values = by_chunks(function, x.double(), self._width)
        return values.unflatten(-1, (self.num_outputs, count))

    def covariance(self, x: Tensor) -> Tensor:
        x = x.double()
        whitened = self._whitened(self.cross(x))
        prior = prior_covariance(self.kernel, self.symbol, x, self.symbol, x, self.space)
        return prior - whitened.mT @ whitened

    def root(self, x: Tensor) -> Tensor:
        return cholesky(self.covariance(x))

    def _variance(self, x: Tensor) -> Tensor:
        return self._variance_given(x, self.cross(x))

    def _variance_given(
        self, x: Float[Tensor, "n d"], cross: Float[Tensor, "M n*q"]
    ) -> Float[Tensor, "n q"]:
        explained = self._whitened(cross).square().sum(0).unflatten(0, (len(x), -1))
        return self._prior_blocks(x).diagonal(dim1=-1, dim2=-2) - explained

    def _blocks(self, x: Tensor) -> Tensor:
        whitened = self._whitened(self.cross(x)).mT.unflatten(0, (len(x), -1))  # (n, q, M)
        return self._prior_blocks(x) - whitened @ whitened.mT

    def _whitened(self, cross: Float[Tensor, "M n*q"]) -> Float[Tensor, "M n*q"]:
        return torch.linalg.solve_triangular(self.factor, cross, upper=False)

    def _prior_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q q"]:
        if self._is_field:
            return to_dense(self.kernel(x.unsqueeze(-2)))  # a batch of single points
        covariance = SymbolCovariance(self.kernel, self.symbol, self.symbol, self.space)
        x = x.unsqueeze(1)

        def between(a: Tensor, b: Tensor) -> Float[Tensor, "n q q"]:
            return covariance.blocks(a, b).squeeze(1)

        anywhere = x[:1] if covariance.is_stationary else x
        with _closed_form(self.symbol):
            blocks = between(anywhere, anywhere).expand(len(x), -1, -1)
        reference = self.symbol.reference_points(x, self.space)
        if reference is None:
            return blocks
        cross = between(x, reference)
        return blocks + between(reference, reference) - cross - cross.mT


def prior_covariance(
    kernel: Kernel,
    left: Symbol,
    x: Float[Tensor, "n d"],
    right: Symbol,
    z: Float[Tensor, "m d"],
    space: Sequence[int],
) -> Float[Tensor, "n*q m*r"]:
    """Cov[Q f(x), R f(z)], each less its value at the symbol's reference, if it has one.

    Raises:
        NotImplementedError: a symbol has no closed form under this kernel.
    """
    if isinstance(left, Identity) and isinstance(right, Identity):
        return to_dense(kernel(x, z))
    with _closed_form(right if isinstance(left, Identity) else left):
        return SymbolCovariance(kernel, left, right, tuple(space)).relative(x, z)


def observed_covariance(
    kernel: Kernel, observed: Sequence[LinearObservations]
) -> Float[Tensor, "M M"]:
    """Cov[H f]: blocks H₁ K H₂ᵀ of any two of the observations, of which each is computed once."""

    def block(a: LinearObservations, b: LinearObservations) -> Float[Tensor, "K L"]:
        both = b.symbol, b.points, a.symbol, a.points, b.space or a.space
        return a.rows(b.rows(prior_covariance(kernel, *both)).mT)

    lower = [[block(a, b) for b in observed[: i + 1]] for i, a in enumerate(observed)]
    rows = [
        torch.cat([*blocks, *(below[i].mT for below in lower[i + 1 :])], dim=-1)
        for i, blocks in enumerate(lower)
    ]
    return torch.cat(rows)


@contextmanager
def _closed_form(symbol: Symbol) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise type(error)(
            f"{type(symbol).__name__} has no closed form under this exact kernel ({error}); "
            "it has one under features: use, for instance, "
            "VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))"
        ) from error
