"""Statistics of many observations on a wide lattice, from which those of smaller grids follow."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel

from gp_orff.data.dataset import Data, StatisticsOnly
from gp_orff.data.field_statistics import FieldStatistics
from gp_orff.data.noise.covariances import Noises
from gp_orff.features.domain import contains
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.frequencies.rule import Draw
from gp_orff.features.lattice import LatticeColumns
from gp_orff.inference.conditioning import FeatureInference


@dataclass(frozen=True)
class Kept:
    """The statistics of `data` on a lattice that serves a range of lengthscales."""

    data: Data
    grid: Grid
    draws: Sequence[Draw]
    statistics: StatisticsOnly

    @classmethod
    def of(cls, data: Data, draws: Sequence[Draw], grid: Grid) -> "Kept":
        """One pass over the data."""
        sums = data.statistics(draws[0].shared_columns().full_box())
        return cls(
            data, grid, draws, StatisticsOnly(sums, grid.domain, data.survey, data.symbol_data)
        )

    def serves(self, data: Data, kernel: Kernel, noises: Noises, grid: Grid) -> bool:
        """Whether the lattice has the frequencies of a grid for these data."""
        fits = data is self.data and contains(self.grid.domain, grid.domain)
        fits &= grid.sum_constant or not self.draws[0].shared.constant.any()
        return fits and not FeatureInference(data, self.draws).stale(kernel, noises)

    def known(self, data: Data, draws: Sequence[Draw]) -> FieldStatistics | None:
        """The statistics of the data on a part of the lattice; None for other frequencies."""
        phi, wide = draws[0].shared_columns(), self.statistics.field_statistics.phi
        lattices = isinstance(phi, LatticeColumns) and isinstance(wide, LatticeColumns)
        if data is not self.data or not lattices or not torch.equal(phi.spacing, wide.spacing):
            return None
        inside = all(m <= most for m, most in zip(phi.modes, wide.modes, strict=True))
        same = inside and torch.equal(phi.origin, wide.origin)
        return self.statistics.field_statistics.on(phi) if same else None
