"""Frequency grids: quadrature of the spectral density on a lattice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.features.domain import Box, as_box, box_of
from gp_orff.features.frequencies.constant_axes import directions, summable
from gp_orff.features.frequencies.grid_design import (
    MOST_CUT,
    GridBudgetError,
    LatticePoints,
    Region,
    axes_of,
    cell_points,
    correlation_lag,
    half_space,
    lengthscales,
    num_features,
    require_separate_inputs,
    smallest_tolerance,
    tail_radius,
    unit_steps,
)
from gp_orff.features.frequencies.harmonic import draw_with_harmonic, is_harmonic
from gp_orff.features.frequencies.lattice_nodes import Lattice, LatticeDraw, axis_lengthscales
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, TermSpectrum

MOST_FEATURES = 40_000  # their F×F matrix alone needs 13 GB


@dataclass(frozen=True)
class Grid:
    r"""Equispaced frequencies ω_k = (h₁k₁, …, h_d k_d), for 1 to 3 inputs and time.

    The weight of the pair ±ω_k is 2 S(ω_k) h₁⋯h_d, where S is the spectral density. The sum over
    all integers k is the kernel made periodic, with period 2π/h. The sum over a finite grid lacks
    a small share of the variance. Hyperparameters change the weights, not the frequencies, so that
    the sufficient statistics of the data are computed once (Greengard, Rachh & Barnett 2022).

    `Grid.for_data(x)` is the usual way to make one. The spacing and the cut-off are chosen later,
    when the `ORFFKernel` is built, from the data, the tolerance and the kernel's lengthscales:

    - Spacing: h = 2π/(L + r) along each axis. L is the longest lag between an observation and a
      point of the domain. r is the lag beyond which the correlation is below the tolerance, at the
      longest lengthscale of the range. (Rational quadratic kernels have heavy tails; their r
      follows from the second difference of k, and they are accurate up to a constant.)
    - Cut-off: the frequencies in an ellipsoid ‖ℓω‖ ≤ W. The share of the variance beyond W is the
      tolerance, at the shortest lengthscale of the range. Each term of a sum has its own ellipsoid.

    The truncated variance δ is known exactly. With `diagonal_correction` it is added to the noise
    and to the predictive variance, so that predictive variances are not too small.

    In training, `GridWarning` warns when a lengthscale leaves the range; `ORFFKernel.redraw()`
    builds a new grid. `VectorFieldGP` does so itself. An evaluation of the evidence costs F³ for F
    features, and F grows like (extent/lengthscale)^d.

    Args:
        domain: (low, high) of every input, for all points of prediction; points outside raise an
            error. If None: `data`, widened on each side by a lengthscale, and by at least a quarter
            of the extent; without `data`, all of space.
        data: (low, high) of every input, for the data.
        tolerance: the largest error by truncation and by aliasing, each as a share of the variance.
        lengthscale_range: shortest and longest lengthscale for which the grid is valid, as
            multiples of the kernel's lengthscales when the grid is built.
        max_features: the largest number of features. If it does not suffice, the tolerance is
            raised; `ORFFKernel.accuracy()` tells to what. If None: 40 000, beyond which it raises.
        spacing: h in radians per unit of the inputs, for all axes or for each; chosen if None.
        cutoff: the largest ‖ω‖ of each scalar kernel, in the same units; chosen if None.
        diagonal_correction: whether to add δ to the noise and to the predictive variance.
        largest_index: the largest |k_i| along each axis, a further limit.
        sum_constant: whether to sum over the frequencies along inputs that are constant. Such an
            input has low = high in `domain` and in `data`. A field then has two features, or more,
            for each frequency in the plane that remains, and no derivatives across that plane.
        longest_period: the longest period 2π/h, in units of L, whatever the tolerance asks for.

    Raises:
        ValueError: none of `data`, `domain` and `spacing` is given; a bound is not finite, or low >
            high; `tolerance` is outside (0, 1); `lengthscale_range` does not contain 1; a
            `max_features`, `spacing` or `cutoff` is not positive; `longest_period` is not above 1.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> x = torch.cartesian_prod(torch.linspace(0, 1, 9), torch.linspace(0, 1, 9))
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
        >>> kernel.base_kernel.lengthscale = 0.2
        >>> kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-4))
        >>> kernel.num_features < 700
        True
        >>> print(kernel.accuracy()[0])
        2.7e-08 of the variance truncated, aliasing 3e-09, tolerance 1e-04
    """

    domain: Box | None = None
    data: Box | None = None
    tolerance: float = 1e-5
    lengthscale_range: tuple[float, float] = (0.7, 1.4)
    max_features: int | None = None
    spacing: float | tuple[float, ...] | None = None
    cutoff: float | None = None
    diagonal_correction: bool = True
    largest_index: tuple[int, ...] | None = None
    sum_constant: bool = True
    longest_period: float | None = None

    def __post_init__(self):
        if self.domain is None and self.data is None and self.spacing is None:
            raise ValueError(
                "Grid expects the extent of the data, got neither data, domain nor spacing; use "
                "Grid.for_data(x), Grid(domain=((0, 1), (0, 1))) or Grid(spacing=0.5, cutoff=20)"
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"Grid expects a tolerance in (0, 1), got {self.tolerance}")
        low, high = self.lengthscale_range
        if not 0 < low <= 1 <= high < math.inf:
            raise ValueError(
                "Grid expects a lengthscale_range (low, high) with 0 < low <= 1 <= high, relative "
                f"to the present lengthscales, got {self.lengthscale_range}"
            )
        for name in ("domain", "data"):
            box = getattr(self, name)
            if box is not None:
                object.__setattr__(self, name, as_box(box, name))
        if self.max_features is not None and self.max_features < 1:
            raise ValueError(f"Grid expects a positive max_features, got {self.max_features}")
        if not (self.longest_period is None or self.longest_period > 1):
            raise ValueError(f"Grid expects a longest_period above 1, got {self.longest_period}")
        for name in ("spacing", "cutoff"):
            value = getattr(self, name)
            if value is not None and not np.all(np.isfinite(value) & (np.asarray(value) > 0)):
                raise ValueError(f"Grid expects a positive {name}, got {value}")

    @classmethod
    def for_data(
        cls,
        x: Float[Tensor, "N d"],
        *,
        tolerance: float = 1e-5,
        lengthscale_range: tuple[float, float] = (0.7, 1.4),
        domain: Box | None = None,
        max_features: int | None = None,
        diagonal_correction: bool = True,
    ) -> "Grid":
        """A grid for data at the points `x`: their bounding box becomes `data`.

        Args:
            x: (N, d) inputs.
            tolerance: as for `Grid`, like all further arguments.
            lengthscale_range: shortest and longest lengthscale, relative to those of the kernel.
            domain: (low, high) of every input; if None, the box of `x` with a margin.
            max_features: the largest number of features.
            diagonal_correction: whether to add the truncated variance to the noise.

        Raises:
            ValueError: `x` has no points or is not finite, or as for `Grid`.
        """
        return cls(
            domain=domain,
            data=box_of(x),
            tolerance=tolerance,
            lengthscale_range=lengthscale_range,
            max_features=max_features,
            diagonal_correction=diagonal_correction,
        )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, on one shared lattice.

        Raises:
            GridBudgetError: no grid within `max_features`, or within 40 000 without a budget.
            NotImplementedError: a spectrum without tail and correlation; a product of kernels on
                the same inputs.
            ValueError: a box or a spacing that does not have one entry for each input.
        """
        for term in terms:
            require_separate_inputs(term)
        num_inputs = self._num_inputs(terms)
        domain = self._domain(terms, num_inputs)
        if any(map(is_harmonic, terms)):
            most = self.max_features or MOST_FEATURES
            return draw_with_harmonic(self, terms, domain, self._lag(domain), most)
        tolerance, design = self._affordable_design(terms, num_inputs, domain)
        spacing, points = design
        constant = self._constant(terms, domain)
        cells = [
            cell_points(term, part.indices, spacing, constant)
            for term, part in zip(terms, points, strict=True)
        ]
        every = [*(part.indices for part in points), *cells]
        indices, position = np.unique(np.concatenate(every), axis=0, return_inverse=True)
        lattice = Lattice(indices, spacing, domain, self._lag(domain), tolerance, constant)
        positions = np.split(position.reshape(-1), np.cumsum([len(k) for k in every])[:-1])
        options, count = (self.lengthscale_range, self.diagonal_correction), len(terms)
        parts = zip(positions[:count], points, terms, positions[count:], strict=True)
        return [
            LatticeDraw(lattice, position, part.direction, term, *options, cell)
            for position, part, term, cell in parts
        ]

    def _num_inputs(self, terms: Sequence[TermSpectrum]) -> int:
        """The number of inputs that the boxes or the spacing give; at least those of the kernel."""
        least = 1 + max(
            (dim for term in terms for leaf in term.leaves for dim in leaf.dims), default=0
        )
        box = self.domain or self.data
        count = len(box) if box is not None else np.size(self.spacing)
        if box is None and np.ndim(self.spacing) == 0:
            count = least
        if count < least or (self.domain and self.data and len(self.domain) != len(self.data)):
            raise ValueError(
                f"Grid expects the extent of each of the kernel's {least} input columns, got "
                f"{count} (domain {self.domain}, data {self.data}, spacing {self.spacing})"
            )
        return count

    def _domain(self, terms: Sequence[TermSpectrum], num_inputs: int) -> Float[np.ndarray, "2 d"]:
        """The lowest and the highest point of the domain."""
        if self.domain is not None:
            return np.array(self.domain).T
        if self.data is None:
            return np.array([[-np.inf], [np.inf]]).repeat(num_inputs, axis=1)
        low, high = np.array(self.data).T
        margin = np.maximum(lengthscales(terms, num_inputs), 0.25 * (high - low))
        return np.stack([low - margin, high + margin])

    def _affordable_design(self, terms, num_inputs, domain):
        """The smallest tolerance, from `tolerance` on, that the budget allows, and its design."""
        budget = self.max_features or MOST_FEATURES
        constant = self._constant(terms, domain)

        def attempt(tolerance: float, aliasing: float, most_lags: float | None = _LONGEST):
            spacing = self._spacing(terms, num_inputs, domain, tolerance, aliasing, most_lags)
            return self._design(terms, spacing, tolerance, budget, constant)

        def uneven(tolerance: float) -> float:
            return min(_UNEVEN * tolerance, _ALIASING)

        design = attempt(self.tolerance, self.tolerance, None)
        if design is not None:
            return self.tolerance, design
        if self.max_features is None:
            raise GridBudgetError(
                f"Grid expects a kernel for which {MOST_FEATURES} features suffice, got one that "
                f"needs more for tolerance {self.tolerance:g} on this domain with these "
                "lengthscales; give max_features= (the truncated variance is added to the noise), "
                "a larger tolerance, or use gp_orff.QuasiMonteCarlo"
            )
        tolerance, best = smallest_tolerance(lambda t: attempt(t, uneven(t), None), self.tolerance)
        if best is None or tolerance > _POOR:  # a term that hardly varies may be the reason
            capped_tolerance, capped = smallest_tolerance(
                lambda t: attempt(t, uneven(t)), self.tolerance
            )
            if capped is not None and (best is None or capped_tolerance < tolerance):
                tolerance, best = capped_tolerance, capped
        if best is None or not all(len(part.indices) for part in best[1]):
            raise GridBudgetError(
                "expected a kernel that varies slowly enough over the domain for a frequency grid, "
                f"got one of whose variance {self.max_features} features hold next to nothing "
                f"(lengthscales {_numbers(lengthscales(terms, num_inputs))}, longest lags "
                f"{_numbers(self._lag(domain))}); give a smaller domain or more max_features"
            )
        return tolerance, best

    def _design(self, terms, spacing, tolerance, budget, constant):
        """The spacing and the lattice points of each term; None if they exceed the budget."""
        points, features = [], 0
        for term in terms:
            own = tolerance if tolerance == self.tolerance else term.own(tolerance, MOST_CUT)
            part = self._points(term, spacing, own, (budget - features) / term.rank, constant)
            if part is None:
                return None
            points.append(part)
            features += num_features(term, part, spacing, constant)
        return (spacing, points) if features <= budget else None

    def _spacing(
        self, terms, num_inputs, domain, tolerance, aliasing, most_lags
    ) -> Float[np.ndarray, "d"]:
        """h of each axis; with `most_lags`, r is at most so many times the longest lag."""
        if self.spacing is not None:
            return np.broadcast_to(np.asarray(self.spacing, float), (num_inputs,)).copy()
        lag = self._lag(domain)
        radius, shortest = np.zeros(num_inputs), np.full(num_inputs, np.inf)
        longest = self.lengthscale_range[1]
        constant, times = self._constant(terms, domain), self.longest_period or np.inf
        most = np.where(constant | (times == np.inf), np.inf, (min(times, 1e300) - 1) * lag)
        for leaf, axis, dim in axes_of(terms):
            if constant[dim]:  # no images
                scale = axis_lengthscales(leaf.spectrum, leaf.num_dims)[axis]
                radius[dim] = max(radius[dim], _NO_IMAGES * scale)
                continue
            bound = most[dim] / longest
            r = longest * correlation_lag(leaf, axis, aliasing, lag, bound)
            if lag[dim] < r:  # every pair of points is affected by aliasing, not only the farthest
                strict = correlation_lag(leaf, axis, min(tolerance, aliasing), lag, bound) * longest
                r = min(strict, _FARTHER * r)
            radius[dim], shortest[dim] = max(radius[dim], r), min(shortest[dim], r)
        if most_lags is not None:  # a term that hardly varies does not refine the others' grid
            radius = np.minimum(radius, np.maximum(most_lags * lag, shortest))
        radius = np.minimum(radius, most)
        return 2 * np.pi / np.where(lag + radius > 0, lag + radius, 1.0)

    def _constant(self, terms, domain) -> Bool[np.ndarray, "d"]:
        """The inputs that are constant, and along which frequencies are summed."""
        lag = self._lag(domain)
        return (lag == 0) & summable(terms, len(lag)) & self.sum_constant

    def _lag(self, domain) -> Float[np.ndarray, "d"]:
        """The longest lag between a datum and a point of the domain or another datum."""
        data = domain if self.data is None else np.array(self.data).T
        high, low = np.maximum(domain[1], data[1]), np.minimum(domain[0], data[0])
        return np.maximum(high - data[0], data[1] - low)

    def _points(
        self, term: TermSpectrum, spacing, tolerance, most, constant
    ) -> LatticePoints | None:
        """The lattice points that a term needs; None if they are more than `most`."""
        blocks = {}
        for direction, leaves in directions(term, constant).items():
            pairs = [(leaf, self._region(leaf, tolerance, spacing)) for leaf in leaves]
            blocks[direction] = half_space(pairs, spacing, most, self.largest_index)
        if any(points is None for points in blocks.values()):
            return None
        return LatticePoints.of(blocks)

    def _region(self, leaf: LeafSpectrum, tolerance: float, spacing) -> Region:
        """The frequencies up to the cut-off; at least one along each axis."""
        if self.cutoff is not None:
            return Region(lambda omega: np.linalg.norm(omega, axis=-1), self.cutoff)
        level = tail_radius(leaf, tolerance) / self.lengthscale_range[0]
        least = leaf.spectrum.scaled_radius(unit_steps(leaf, spacing)).max()
        return Region(leaf.spectrum.scaled_radius, max(level, 1.000001 * least))


# Under a budget, aliasing may be _UNEVEN times as large as truncation, and at most _ALIASING:
# truncation affects every pair of points, aliasing only the few pairs at the longest lags. Above a
# tolerance of _POOR a term that hardly varies may be the reason: r is limited to _LONGEST of L.
_UNEVEN, _ALIASING, _LONGEST, _POOR = 300.0, 3e-2, 1.0, 0.1
_NO_IMAGES = 1e6  # the period along a constant input, in lengthscales
_FARTHER = 4.0  # the most by which r may grow; kernels with power-law correlations need a limit


def _numbers(values: Float[np.ndarray, "k"]) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in values) + ")"
