"""Features that are fixed fields times scales, of which only the scales have hyperparameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.features.columns import Columns
from gp_orff.features.expansion import Expansion, FeatureExpansion


@dataclass(frozen=True)
class ScaledExpansion(Expansion):
    """Features f with the fixed directions `units[f]` on the columns `columns[f]`, times a scale.

    Sums over data of products of the fixed fields serve all hyperparameters.
    """

    phi: Columns
    scales: Float[Tensor, "*b F"]
    units: Complex[Tensor, "F p"]
    columns: Int[Tensor, "F"]

    @property
    def num_features(self) -> int:
        return len(self.units)

    @property
    def num_outputs(self) -> int:
        return self.units.shape[-1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.phi.tensors, self.scales

    @property
    def rebuild(self) -> Callable[..., "ScaledExpansion"]:
        return partial(_with_tensors, self)

    @property
    def fixed(self) -> FeatureExpansion:
        """The features without their scales."""
        return FeatureExpansion(self.phi, self.units, self.columns)

    def scaled(self, variance: Float[Tensor, "*b"]) -> "ScaledExpansion":
        scales = self.scales * variance.unsqueeze(-1).sqrt()
        return ScaledExpansion(self.phi, scales, self.units, self.columns)

    def general(self) -> FeatureExpansion:
        directions = self.scales.unsqueeze(-1) * self.units
        return FeatureExpansion(self.phi, directions, self.columns)

    def column_weights(self, theta: Float[Tensor, "*b F k"]) -> Float[Tensor, "*b M p*k"]:
        return self.general().column_weights(theta)

    def feature_values(self, z: Float[Tensor, "*b M p*k"]) -> Float[Tensor, "*b F k"]:
        return self.general().feature_values(z)

    def select(self, columns: Int[Tensor, "k"], variance: Float[Tensor, "k"]) -> FeatureExpansion:
        return self.general().select(columns, variance)


def _with_tensors(expansion: ScaledExpansion, *tensors: Tensor) -> ScaledExpansion:
    *others, scales = tensors
    phi = expansion.phi.with_tensors(*others)
    return ScaledExpansion(phi, scales, expansion.units, expansion.columns)


def side_by_side_scaled(
    parts: Sequence[ScaledExpansion], phi: Columns, places: Sequence[Int[Tensor, "k"]]
) -> ScaledExpansion:
    """The features of a sum, sorted by their columns, which are at `places` among those of phi."""
    columns = torch.cat([place[part.columns] for place, part in zip(places, parts, strict=True)])
    columns, order = columns.sort(stable=True)
    scales = torch.cat([part.scales for part in parts], dim=-1)
    units = torch.cat([part.units for part in parts])
    return ScaledExpansion(phi, scales[..., order], units[order], columns)
