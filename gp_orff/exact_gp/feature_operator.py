"""The matrix of features Φ(x) as a LinearOperator that is not stored."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from gp_orff.exact_gp.operators import with_one_batch
from gp_orff.features.expansion import Expansion


class FeatureOperator(LinearOperator):
    """Φ(x), with a row for each output of each point; made by `FeatureOperator.of`."""

    def __init__(
        self, x: Float[Tensor, "*b N d"], *tensors: Tensor, rebuild: Callable[..., Expansion]
    ):
        super().__init__(x, *tensors, rebuild=rebuild)
        self.x = x
        self.expansion = rebuild(*tensors)

    @classmethod
    def of(cls, x: Float[Tensor, "*b N d"], expansion: Expansion) -> "FeatureOperator":
        return cls(*with_one_batch(x, *expansion.tensors), rebuild=expansion.rebuild)

    def _size(self) -> torch.Size:
        rows = self.x.shape[-2] * self.expansion.num_outputs
        return torch.Size((*self.x.shape[:-2], rows, self.expansion.num_features))

    def _transpose_nonbatch(self) -> "Transposed":
        return Transposed(self)

    def _matmul(self, rhs: Tensor) -> Tensor:
        """Φθ = φ(x)w, with the weights w of the columns."""
        if rhs.dim() == 1:
            return self._matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion = self.expansion.double()
        values = expansion.phi.apply(self.x, expansion.column_weights(rhs.double()))
        return values.unflatten(-1, (expansion.num_outputs, -1)).flatten(-3, -2).to(self.dtype)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        """Φᵀv, from φ(x)ᵀv of the columns."""
        if rhs.dim() == 1:
            return self._t_matmul(rhs.unsqueeze(-1)).squeeze(-1)
        expansion = self.expansion.double()
        values = rhs.double().unflatten(-2, (-1, expansion.num_outputs)).flatten(-2)  # (*b, N, p·k)
        return expansion.feature_values(expansion.phi.adjoint(self.x, values)).to(self.dtype)

    def to_dense(self) -> Float[Tensor, "*b N*p F"]:
        return self.expansion.double().features(self.x.double()).to(self.dtype)


class Transposed(LinearOperator):
    """Mᵀ of an operator M that knows the product with its transpose."""

    def __init__(self, operator: LinearOperator):
        super().__init__(operator)
        self.operator = operator

    def _size(self) -> torch.Size:
        *batch, rows, columns = self.operator.shape
        return torch.Size((*batch, columns, rows))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self.operator

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.operator._t_matmul(rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.operator._matmul(rhs)

    def to_dense(self) -> Tensor:
        return self.operator.to_dense().mT
