"""Regularised least squares on features: min_θ ‖Φθ − y‖² + α‖θ‖² + w fᵀMf.

Where the outputs separate, the problem falls apart into k scalar ones with shared features Ψ,

    t_j = argmin ‖σ_j Ψ t − y_j‖² + α‖t‖² = (σ_j² ΨᵀΨ + α)⁻¹ σ_j Ψᵀy_j
        = σ_j Ψᵀ (σ_j² ΨΨᵀ + α)⁻¹ y_j .

A separable kernel k·L Lᵀ has Ψ = φS, the features of k; with the singular value decomposition
L = P diag(σ) Uᵀ, the y_j are the columns of Y P, and Θ = T Uᵀ. A scalar kernel serves every column
of Y by itself. For all other kernels Ψ = Φ, with one row for each output of each point, and k = 1.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.statistics import Statistics
from gp_orff.features.expansion import Expansion, KroneckerExpansion
from gp_orff.threads import update_threads

_SLAB = 2**37  # products, in one slab of a sum over points


@dataclass(frozen=True)
class Design:
    """Ψ, σ and the rotation U of an expansion, for targets y (N, q).

    Made by `design`.
    """

    expansion: Expansion
    scales: Float[Tensor, "k"]  # σ

    def targets(self, y: Float[Tensor, "N q"]) -> Float[Tensor, "n k"]:
        """The y_j, with a row for each row of Ψ."""
        return y if self.expansion.num_outputs == 1 else y.reshape(-1, 1)

    def rows(self, x: Float[Tensor, "N d"]) -> Float[Tensor, "n m"]:
        """Ψ as a dense matrix, for few points."""
        return self.expansion.features(x)

    def statistics(self, x: Float[Tensor, "N d"], y: Float[Tensor, "N q"]) -> Statistics:
        """The sufficient statistics of points and targets.

        They are sums over slabs of about a second; between these the number of threads may change.
        """
        phi, total = self.expansion.phi, None
        size = max(1, _SLAB // phi.num_columns**2)
        for points, values in zip(x.split(size), y.split(size), strict=True):
            update_threads()
            part = Statistics.of(points, values, phi)
            total = part if total is None else total + part
        return total

    def gram(self, statistics: Statistics) -> Float[Tensor, "m m"]:
        """ΨᵀΨ."""
        full = self.expansion.general()
        (gram,) = statistics.feature_grams(full)
        return gram * (full.directions @ full.directions.mT)

    def right(self, statistics: Statistics) -> Float[Tensor, "m k"]:
        """Ψᵀy_j for every j."""
        full = self.expansion.general()
        products = full.gather(statistics.cross) * full.directions
        return products if full.num_outputs == 1 else products.sum(-1, keepdim=True)

    def theta(self, t: Float[Tensor, "m k"]) -> Float[Tensor, "F _"]:
        """The weights θ of the features from the t_j."""
        return t

    def num_rows(self, num_points: int) -> int:
        """n, the rows of Ψ."""
        return num_points * self.expansion.num_outputs

    @property
    def num_columns(self) -> int:
        """m, the columns of Ψ."""
        return self.expansion.num_features


@dataclass(frozen=True)
class SeparableDesign(Design):
    """The same for a separable kernel with several outputs."""

    expansion: KroneckerExpansion
    left: Float[Tensor, "p k"]  # P
    rotation: Float[Tensor, "r k"]  # U

    def targets(self, y):
        return y @ self.left

    def rows(self, x):
        return self.expansion.phi.values(x) * self.expansion.scales.mT

    def gram(self, statistics):
        return self.expansion.scales * statistics.gram * self.expansion.scales.mT

    def right(self, statistics):
        return self.expansion.scales * statistics.cross @ self.left

    def theta(self, t):
        return (t @ self.rotation.mT).reshape(-1, 1)

    def num_rows(self, num_points):
        return num_points

    @property
    def num_columns(self):
        return self.expansion.num_columns


def design(expansion: Expansion, num_targets: int) -> Design:
    """The scalar problems of an expansion, for targets with `num_targets` columns."""
    if isinstance(expansion, KroneckerExpansion) and expansion.num_outputs > 1:
        left, scales, right = torch.linalg.svd(expansion.mixing, full_matrices=False)
        return SeparableDesign(expansion, scales, left, right.mT)
    columns = num_targets if expansion.num_outputs == 1 else 1
    return Design(expansion, torch.ones(columns, dtype=torch.float64))
