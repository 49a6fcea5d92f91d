"""The rule that chooses the rule."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from gp_orff.features.domain import Box, box_of
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.frequencies.random import QuasiMonteCarlo
from gp_orff.features.frequencies.rule import Draw, Rule, TermSpectrum

_GRID_INPUTS = 4  # three of space, and time
_BUDGET, _BLIND = 4096, 512  # features; without data, where no other budget is given


@dataclass(frozen=True)
class Auto:
    """A grid where one is affordable, quasi-random frequencies elsewhere; the reason can be read.

    - up to 4 inputs (three of space, and time): `Grid`, to the tolerance if the budget allows;
    - more inputs, or kernels a grid cannot hold: `QuasiMonteCarlo` with as many frequencies as the
      budget allows;
    - no data to choose a domain from: the same, and of the default budget an eighth, with a
      warning: random features are slower than a grid, and their error bars too small;
    - in `VectorFieldGP` the exact kernel, no features, where N·p is at most `exact_values`; and up
      to `max_features` where a grid would have more features than there are numbers, or leave out
      more than they allow.

    Args:
        tolerance: of the grid, as a share of the variance.
        max_features: a budget that wins over the tolerance.
        exact_values: the largest N·p for which `VectorFieldGP` always uses the exact kernel.
        domain, data: boxes, as for `Grid`; `Auto.for_data(x)` sets `data`.
        lengthscale_range: as for `Grid`.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Auto().for_data(torch.rand(50, 2)))
        >>> print(kernel.frequencies[0].reason)
        grid: 2 inputs, tolerance 1e-05 within 4096 features
    """

    tolerance: float = 1e-5
    max_features: int = _BUDGET
    exact_values: int = 1000
    domain: Box | None = None
    data: Box | None = None
    lengthscale_range: tuple[float, float] = (0.7, 1.4)

    def __post_init__(self):
        if not 0 < self.tolerance < 1 or self.max_features < 1 or self.exact_values < 0:
            raise ValueError(
                "Auto expects a tolerance in (0, 1), a positive max_features and exact_values >= "
                f"0, got {self.tolerance}, {self.max_features}, {self.exact_values}"
            )

    def for_data(self, x: Float[Tensor, "N d"]) -> "Auto":
        """The same, for inputs x."""
        return replace(self, data=box_of(x))

    def choose(self, terms: Sequence[TermSpectrum]) -> tuple[Rule, str]:
        """The rule for these laws, and why."""
        box = self.domain or self.data
        if box is None:
            known = replace(self, max_features=_BLIND) if self._blind(terms) else self
            return known._random(terms, "no data to choose a domain from, see Auto.for_data(x)")
        if len(box) > _GRID_INPUTS:
            return self._random(terms, f"{len(box)} inputs are more than {_GRID_INPUTS}")
        grid = Grid(
            domain=self.domain,
            data=self.data,
            tolerance=self.tolerance,
            lengthscale_range=self.lengthscale_range,
            max_features=self.max_features,
        )
        try:
            tolerance = grid.draw(terms)[0].lattice.tolerance.item()
        except (ValueError, NotImplementedError) as refused:
            return self._random(terms, f"no grid: {refused}")
        achieved = f"tolerance {tolerance:.0e} within {self.max_features} features"
        if tolerance > 1.01 * self.tolerance:
            achieved += f", which do not suffice for {self.tolerance:.0e}"
        return grid, f"grid: {len(box)} inputs, {achieved}"

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        rule, reason = self.choose(terms)
        if self._blind(terms):
            warnings.warn(
                f"Auto() without data takes {_BLIND} random features, whose error bars are too "
                "small: give it the inputs, Auto().for_data(x), for a grid, or a budget, "
                "Auto(max_features=...)",
                stacklevel=2,
            )
        draws = rule.draw(terms)
        for own in draws:
            own.reason = reason
        return draws

    def _blind(self, terms: Sequence[TermSpectrum]) -> bool:
        """Whether a grid would do, and neither data nor a budget are given."""
        dims = [dim for term in terms for leaf in term.leaves for dim in leaf.dims]
        told = self.domain or self.data or self.max_features != _BUDGET
        return not told and max(dims, default=0) < _GRID_INPUTS

    def _random(self, terms: Sequence[TermSpectrum], why: str) -> tuple[QuasiMonteCarlo, str]:
        ranks = sum(term.rank for term in terms if term.leaves) or 1
        number = max(1, self.max_features // (2 * ranks))
        number = 2 ** (number.bit_length() - 1)
        return QuasiMonteCarlo(number), f"quasi-Monte Carlo, {number} frequencies: {why}"
