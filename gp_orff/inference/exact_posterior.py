"""The posterior by the exact kernel, of the field and of its symbols."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from linear_operator import to_dense
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.noise.groups import Rows
from gp_orff.data.observations import Further
from gp_orff.features.chunked import by_chunks
from gp_orff.inference.distributions import InChunks
from gp_orff.kernels.cholesky import cholesky
from gp_orff.kernels.symbol_covariance import SymbolCovariance
from gp_orff.kernels.tree import terms
from gp_orff.symbols.base import Identity, Symbol


@dataclass(frozen=True)
class ExactSymbolLaw(InChunks):
    """The exact posterior of Q f; less its value at a reference, if any."""

    kernel: Kernel
    symbol: Symbol
    space: tuple[int, ...]
    cross: Callable[[Float[Tensor, "n d"]], Float[Tensor, "n*q M"]]  # with the readings
    factor: Float[Tensor, "M M"]
    alpha: Float[Tensor, "M 1"]

    @property
    def num_outputs(self) -> int:
        return self.symbol.num_outputs(terms(self.kernel)[0].num_outputs)

    @property
    def _width(self) -> int:
        return len(self.factor) * self.num_outputs * 9

    def check(self, x: Float[Tensor, "1 d"]) -> "ExactSymbolLaw":
        """Itself, if it has a closed form.

        Raises:
            NotImplementedError: it has none.
        """
        try:
            self._blocks(x)
        except NotImplementedError as error:
            raise type(error)(
                f"{type(self.symbol).__name__} has no closed form under this exact kernel "
                f"({error}); features have one: expected, for instance, "
                "VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))"
            ) from error
        return self

    def mean(self, x: Tensor) -> Tensor:
        def part(points: Float[Tensor, "n d"]) -> Float[Tensor, "n q"]:
            return (self.cross(points) @ self.alpha).unflatten(0, (len(points), -1)).squeeze(-1)

        return by_chunks(part, x.double(), self._width)

    def covariance(self, x: Tensor) -> Tensor:
        x = x.double()
        white = torch.linalg.solve_triangular(self.factor, self.cross(x).mT, upper=False)
        return self._prior(x) - white.mT @ white

    def root(self, x: Tensor) -> Tensor:
        return cholesky(self.covariance(x))

    def _variance(self, x: Tensor) -> Tensor:
        return self._blocks(x).diagonal(dim1=-1, dim2=-2)

    def _blocks(self, x: Tensor) -> Tensor:
        white = torch.linalg.solve_triangular(self.factor, self.cross(x).mT, upper=False)
        white = white.mT.unflatten(0, (len(x), -1))
        return self._prior_blocks(x) - white @ white.mT

    @property
    def _covariance(self) -> SymbolCovariance:
        return SymbolCovariance(self.kernel, self.symbol, self.symbol, self.space)

    def _prior_blocks(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n q q"]:
        block = self._covariance(x[:1], x[:1])
        if self.symbol.reference is None:
            return block.expand(len(x), -1, -1)
        lags = x - self.symbol.referred(x, self.space)
        cross = self._covariance(lags, torch.zeros_like(x[:1])).unflatten(0, (len(x), -1))
        return 2 * block - cross - cross.mT

    def _prior(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n*q n*q"]:
        return self._covariance.less(x, x)


@dataclass(frozen=True)
class ExactLaw(InChunks):
    """The exact posterior: K(x, X)α and K(x, x) − VᵀV."""

    kernel: Kernel
    rows: Rows
    further: tuple[Further, ...]
    factor: Float[Tensor, "M M"]
    alpha: Float[Tensor, "M 1"]
    noises: Noises

    @property
    def noise_root(self) -> Float[Tensor, "M M"]:
        """Of the covariance of the noise."""
        further = [own.covariance(None) for own in self.further]
        return cholesky(torch.block_diag(self.rows.noise(self.noises), *further))

    @property
    def num_outputs(self) -> int:
        point = self.rows.x[:1]
        return self.kernel.num_outputs_per_input(point, point)

    def mean(self, x: Tensor) -> Tensor:
        def part(points: Float[Tensor, "m d"]) -> Float[Tensor, "m p"]:
            return (self.cross(points) @ self.alpha).reshape(len(points), -1)

        return by_chunks(part, x.double(), self._width)

    def apply(self, symbol: Symbol, space: Sequence[int]) -> ExactSymbolLaw:
        def cross(x: Float[Tensor, "n d"]) -> Float[Tensor, "n*q M"]:
            covariance = SymbolCovariance(self.kernel, symbol, Identity(), tuple(space))
            seen = self.rows.see(covariance.less(x, self.rows.x).mT).mT
            return self._with_further(seen, symbol, x)

        law = ExactSymbolLaw(self.kernel, symbol, tuple(space), cross, self.factor, self.alpha)
        return law.check(self.rows.x[:1])

    def of_part(self, expansion, kernel):
        return replace(self, kernel=kernel)

    def covariance(self, x: Tensor) -> Tensor:
        x = x.double()
        white = self._whitened(x)
        return to_dense(self.kernel(x)) - white.mT @ white

    def root(self, x: Tensor) -> Tensor:
        return cholesky(self.covariance(x))

    def _variance(self, x: Tensor) -> Tensor:
        prior = to_dense(self.kernel(x, diag=True))
        return (prior - self._whitened(x).square().sum(0)).unflatten(0, (len(x), -1))

    def _blocks(self, x: Tensor) -> Tensor:
        white = self._whitened(x).mT.unflatten(0, (len(x), -1))  # (n, p, M)
        prior = to_dense(self.kernel(x.unsqueeze(-2)))  # a batch of single points
        return prior - white @ white.mT

    def cross(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m*p M"]:
        """Of the field at x with the readings."""
        seen = self.rows.see(to_dense(self.kernel(x, self.rows.x)).mT).mT
        return self._with_further(seen, Identity(), x)

    def _with_further(
        self, seen: Float[Tensor, "m*q K"], symbol: Symbol, x: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m*q M"]:
        """And the covariance of the symbol at x with the symbols that are observed."""
        if not self.further:
            return seen
        return torch.cat([seen, prior_covariance(self.kernel, symbol, x, self.further)], dim=-1)

    def _whitened(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "M m*p"]:
        return torch.linalg.solve_triangular(self.factor, self.cross(x).mT, upper=False)

    @property
    def _width(self) -> int:
        return len(self.factor) * self.num_outputs


def prior_covariance(
    kernel: Kernel, symbol: Symbol, x: Float[Tensor, "n d"], observed: Sequence[Further]
) -> Float[Tensor, "n*q m*r"]:
    """Of a symbol of the field at x with all observed symbols."""
    blocks = []
    for own in observed:
        try:
            covariance = SymbolCovariance(kernel, symbol, own.symbol, own.space)
            blocks.append(covariance.less(x, own.x))
        except NotImplementedError as error:
            raise type(error)(
                f"an observed {type(own.symbol).__name__} has no closed form under this exact "
                f"kernel ({error}); features have one: expected, for instance, "
                "VectorFieldGP(kernel, frequencies=gp_orff.Auto(exact_values=0))"
            ) from error
    return torch.cat(blocks, dim=-1)
