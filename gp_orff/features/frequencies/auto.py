"""The rule that chooses between a grid and random frequencies."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from gp_orff.features.domain import Box, box_of
from gp_orff.features.frequencies.grid import Grid
from gp_orff.features.frequencies.random import QuasiMonteCarlo
from gp_orff.features.frequencies.rule import Draw, Rule, TermSpectrum
from gp_orff.kernels.base import check_positive_integer
from gp_orff.kernels.spectra.base import GRID_INPUTS

MOST_DENSE = 8192  # features, by default: one evaluation of the evidence takes about 10 s
_RANDOM, _SMALL = 4096, 512  # random features, by default, and by default without data


@dataclass(frozen=True)
class Auto:
    """Choose the frequencies automatically: a grid if it is affordable, else quasi-random ones.

    The choice is made when the `ORFFKernel` is built, by the first line that applies:

    - Neither `data` nor `domain`: `QuasiMonteCarlo`, with as many frequencies as `max_features`
      allow, 4096 by default. If a grid was possible, it has 512 features by default, and a warning
      says so: the predictive variance of random features is too small.
    - More than 4 inputs (three of space, and time), or a kernel for which no grid can be built:
      `QuasiMonteCarlo` as well.
    - Otherwise: `Grid` with the given tolerance. If that needs more than `max_features` features,
      8192 by default, the smallest tolerance is used for which they suffice.

    `VectorFieldGP` with this rule chooses the cheapest representation that is accurate enough:

    - The exact kernel, without features, if the data have at most `exact_values` numbers, N·p for N
      points and p outputs. Up to `max_features` numbers it uses the exact kernel too if a grid
      needs more features than there are numbers, or truncates more variance than the noise of the
      data allows.
    - A grid of up to `max_features` features otherwise. By default the posterior may have more of
      them, where 8192 truncate too much; its algebra is then iterative.
    - After all, for the posterior, the exact kernel on the means at up to `max_features` numbers of
      sites, 8192 by default, where the grid truncates more than a tenth of the noise variance (a
      hundredth if iterative), and the field changes by half as much within sites: for readings
      along tracks or in clusters, not for even ones.

    Args:
        tolerance: of the grid, as a share of the variance; see `Grid`.
        max_features: the largest number of features. If it does not suffice for `tolerance`, the
            tolerance is raised. If None, the limits above.
        exact_values: the largest N·p for which `VectorFieldGP` always uses the exact kernel.
        domain: (low, high) of every input, as for `Grid`.
        data: (low, high) of every input, for the data; `Auto().for_data(x)` sets it.
            `VectorFieldGP` sets it itself.
        lengthscale_range: shortest and longest lengthscale of the grid, as for `Grid`.
        longest_period: of the grid, as for `Grid`; `VectorFieldGP` takes 2 for learned spectra.

    Raises:
        ValueError: `tolerance` is outside (0, 1), `max_features` < 1 or `exact_values` < 0; when
            frequencies are drawn, `max_features` cannot hold one of each term.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Auto().for_data(torch.rand(50, 2)))
        >>> print(kernel.frequencies[0].reason)  # what was chosen, and why
        grid: 2 inputs, tolerance 1e-05 within 8192 features
    """

    tolerance: float = 1e-5
    max_features: int | None = None
    exact_values: int = 1000
    domain: Box | None = None
    data: Box | None = None
    lengthscale_range: tuple[float, float] = (0.7, 1.4)
    longest_period: float | None = None

    def __post_init__(self):
        if self.max_features is not None:
            check_positive_integer(self.max_features, "max_features", "Auto")
        if not 0 < self.tolerance < 1 or self.exact_values < 0:
            raise ValueError(
                "Auto expects a tolerance in (0, 1) and exact_values >= 0, got "
                f"{self.tolerance}, {self.exact_values}"
            )

    def for_data(self, x: Float[Tensor, "N d"]) -> "Auto":
        """A copy of this rule whose `data` is the bounding box of the points `x`, (N, d)."""
        return replace(self, data=box_of(x))

    def choose(self, terms: Sequence[TermSpectrum]) -> tuple[Rule, str]:
        """The rule for the spectra of `terms`, and the reason in words."""
        box = self.domain or self.data
        if box is None:
            rule = replace(self, max_features=_SMALL) if self._lacks_data(terms) else self
            return rule._random(terms, "no data to choose a domain from, see Auto.for_data(x)")
        if len(box) > GRID_INPUTS:
            return self._random(terms, f"{len(box)} inputs are more than {GRID_INPUTS}")
        grid = Grid(
            domain=self.domain,
            data=self.data,
            tolerance=self.tolerance,
            lengthscale_range=self.lengthscale_range,
            max_features=self.max_features or MOST_DENSE,
            longest_period=self.longest_period,
        )
        try:
            tolerance = grid.draw(terms)[0].shared.tolerance.item()
        except (ValueError, NotImplementedError) as error:
            return self._random(terms, f"no grid: {error}")
        achieved = f"tolerance {tolerance:.0e} within {grid.max_features} features"
        if tolerance > 1.01 * self.tolerance:
            achieved += f", which do not suffice for {self.tolerance:.0e}"
        return grid, f"grid: {len(box)} inputs, {achieved}"

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms` by the chosen rule, each with its `reason`.

        It warns if neither data, nor a domain, nor a budget are given.
        """
        rule, reason = self.choose(terms)
        if self._lacks_data(terms):
            warnings.warn(
                f"Auto() without data uses {_SMALL} random features, whose "
                "predictive variance is too small: give it the inputs, Auto().for_data(x), for a "
                "grid, or a budget, Auto(max_features=...)",
                stacklevel=2,
            )
        draws = rule.draw(terms)
        for draw in draws:
            draw.reason = reason
        return draws

    def _lacks_data(self, terms: Sequence[TermSpectrum]) -> bool:
        """Whether a grid is possible, but neither data, nor a domain, nor a budget are given."""
        dims = [dim for term in terms for leaf in term.leaves for dim in leaf.dims]
        specified = self.domain or self.data or self.max_features
        return not specified and max(dims, default=0) < GRID_INPUTS

    def _random(self, terms: Sequence[TermSpectrum], reason: str) -> tuple[QuasiMonteCarlo, str]:
        """Quasi-random frequencies, a power of two, as many as the budget allows."""
        varying = [term for term in terms if term.leaves]
        ranks = sum(term.rank for term in varying) or 1
        if self.max_features is None and len(varying) == 1 and varying[0].leaves[0].is_constant:
            ranks = 1  # a separable kernel, whose cost follows from its columns
        if self.max_features is not None and self.max_features < 2 * ranks:
            raise ValueError(
                f"expected max_features of at least {2 * ranks}, which hold one frequency of each "
                f"term of the kernel, got Auto(max_features={self.max_features}); give more"
            )
        number = max(1, (self.max_features or _RANDOM) // (2 * ranks))
        number = 2 ** (number.bit_length() - 1)
        return QuasiMonteCarlo(number), f"quasi-Monte Carlo, {number} frequencies: {reason}"
