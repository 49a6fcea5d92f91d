"""Columns that are known by their values alone."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gp_orff.features import chunked
from gp_orff.features.columns.base import Columns
from gp_orff.symbols.base import Symbol


class PointwiseColumns(Columns):
    """Columns φ_c(x) with products that go through `values`, by chunks of points.

    Everything is computed in float64. Backward passes compute the values of a chunk again, by
    `torch.utils.checkpoint`, so that memory does not grow with N·M; second derivatives exist.

    These columns are no waves: ψ_c = φ_c is real. Only symbols that multiply all of them by one
    matrix are known.
    """

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
        """The sums over all chunks of what `products(φ, rows)` returns for each."""
        chunks = self._products(products, x)
        totals = list(next(chunks))
        for parts in chunks:
            for total, part in zip(totals, parts, strict=True):
                total += part
        return totals

    def _products(self, product: Callable, x: Float[Tensor, "*b N d"]) -> Iterator:
        """product(φ, rows) for every chunk of points, at least one."""
        columns = self.with_tensors(*(tensor.double() for tensor in self.tensors))

        def of_chunk(rows: slice):
            return product(columns.values(x[..., rows, :].double()), rows)

        for rows in list(chunked.chunks(x, self.num_columns)) or [slice(0, 0)]:
            yield checkpoint(of_chunk, rows, use_reentrant=False, preserve_rng_state=False)

    def multiplier(
        self, symbol: Symbol, num_outputs: int, space: Sequence[int]
    ) -> Complex[Tensor, "M q p"]:
        """The matrix of a symbol that is the same at all frequencies, for every column.

        Raises:
            NotImplementedError: a symbol that is not, such as a derivative.
        """
        generator = torch.Generator().manual_seed(0)
        omega = torch.randn(4, len(space), generator=generator, dtype=torch.float64)
        omega[0] = 0.0
        first, *others = symbol(omega.to(self.device), num_outputs).to(torch.complex128)
        if symbol.order or any((other != first).any() for other in others):
            raise NotImplementedError(
                f"expected a symbol that is one matrix at all frequencies, such as Component, for "
                f"{type(self).__name__}, whose columns are no waves, got {type(symbol).__name__}; "
                "differentiate predictions by torch.autograd, or use a stationary kernel with a "
                "rule such as gp_orff.QuasiMonteCarlo"
            )
        return first.expand(self.num_columns, *first.shape)

    @property
    def quarter_turn(self) -> tuple[Int[Tensor, "M"], Float[Tensor, "M"]]:
        """Im φ_c = 0 · φ_c."""
        index = torch.arange(self.num_columns, device=self.device)
        return index, torch.zeros_like(index, dtype=torch.float64)
