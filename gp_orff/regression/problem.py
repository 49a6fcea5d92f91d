"""The learning problem min_θ Σ ‖C f(x_i) − y_i‖² + α‖θ‖² + w fᵀMf.

The sum is over labelled points; f = Φθ stands for the field at all of them. It is Equation 67 of
Minh 2016 with the square loss, times the number of labelled points.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float
from scipy import sparse
from torch import Tensor

from gp_orff.features.expansion import Expansion, KroneckerExpansion

Matrix = sparse.csr_array | np.ndarray


@dataclass(frozen=True)
class Problem:
    """Points, targets and penalties, under an expansion of the field f with p outputs."""

    expansion: Expansion
    x: Float[Tensor, "N d"]
    y: Float[Tensor, "N q"]  # NaN in the rows without a label
    alpha: float
    combination: Float[Tensor, "q p"] | None = None  # C; None: the identity
    laplacian: Matrix | None = None  # w M, (N, N) or (N·p, N·p); None: zero

    @cached_property
    def labelled(self) -> Bool[Tensor, "N"]:
        """The points with a label."""
        return ~self.y.isnan().any(-1)

    @property
    def labels(self) -> tuple[Float[Tensor, "l d"], Float[Tensor, "l q"]]:
        """The points with a label, and the labels."""
        if self.labelled.all():
            return self.x, self.y
        return self.x[self.labelled], self.y[self.labelled]

    @property
    def observed(self) -> Expansion:
        """The features of C f."""
        return combined(self.expansion, self.combination)


def combined(expansion: Expansion, combination: Float[Tensor, "q p"] | None) -> Expansion:
    """The features of C f from those of f."""
    if combination is None:
        return expansion
    if isinstance(expansion, KroneckerExpansion):
        return replace(expansion, mixing=combination @ expansion.mixing)
    return replace(expansion, directions=expansion.directions @ combination.mT)
