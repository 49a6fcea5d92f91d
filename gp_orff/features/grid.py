"""Frequency grids, and the rule that chooses between a grid and random frequencies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from gpytorch.kernels import Kernel
from jaxtyping import Bool, Float
from torch import Tensor

from gp_orff.features.assemble import term_spectra
from gp_orff.features.chunked import Box, as_box, box_of, union
from gp_orff.features.draws import (
    Draw,
    Lattice,
    LatticeDraw,
    LeafSpectrum,
    Rule,
    TermSpectrum,
    axis_lengthscales,
    directions,
    summable,
)
from gp_orff.features.grid_design import (
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
from gp_orff.features.lines import draw_with_lines
from gp_orff.features.random import QuasiMonteCarlo
from gp_orff.features.rings import draw_with_harmonic, is_harmonic
from gp_orff.kernels.base import check_positive_integer
from gp_orff.kernels.lines import has_lines
from gp_orff.kernels.spectra import GRID_INPUTS
from gp_orff.symbols.base import required

# Frequency grids: quadrature of the spectral density on a lattice.
#
# `Grid.draw` proceeds as follows.
#
# 1. The user passes the domain. Otherwise, the domain is the box of the data with a margin of a
#    lengthscale, and of at least a quarter of the extent. It determines L, the longest lag between
#    an observation and a point of prediction.
# 2. If the kernel has harmonic terms, `features.rings` continues. It calls `draw` again for the
#    other terms.
# 3. `_affordable_design` tries the requested tolerance. If the grid needs more features than the
#    budget, bisection finds the smallest tolerance that the budget allows. In this case, the error
#    by aliasing may be up to 300 times as large as the error by truncation, because aliasing
#    affects only pairs of points at the longest lags.
# 4. All terms share one spacing. They thus share one lattice and one set of sums over the data.
#    Along each axis, the longest r of all terms determines the spacing. A term that barely varies
#    would make the lattice of all others very fine. So if the tolerance is poor, r is limited to L,
#    and the better of the two results is used.
# 5. Every term has its own cut-off, and thus its own points. The union of these points is stored
#    once, and each draw refers to its points by position.
# 6. Inputs that are constant in data and domain add no lattice points. Features are summed over the
#    frequencies along these inputs. Their period is so long that there is no aliasing.


MOST_FEATURES = 40_000  # the F×F matrix of so many features needs 13 GB


@dataclass(frozen=True)
class Grid:
    r"""The rule for a grid of equispaced frequencies ω_k = (h₁k₁, …, h_d k_d).

    It is practical for 1 to 3 directions of space, and time. The weight of the pair ±ω_k is
    2 S(ω_k) h₁⋯h_d, where S is the spectral density and h_i is the spacing along input i. The sum
    over all integer vectors k is a periodic version of the kernel, with the period 2π/h_i. A finite
    grid omits a small fraction of the variance. Hyperparameters change the weights but not the
    frequencies, so that the sufficient statistics of the data are computed only once (Greengard,
    Rachh & Barnett 2022).

    Use `Grid.for_data(x)` to create a grid. The spacing and the cut-off are chosen when the
    `ORFFKernel` is built. They depend on the data, the tolerance, and the lengthscales ℓ of the
    kernel:

    - The spacing is h = 2π/(L + r) along each input. L is the longest lag between an observation
      and a point of the domain. r is the lag beyond which the correlation is below the tolerance,
      for the longest lengthscale of the range. Correlations of rational quadratic kernels fall
      slowly. Their r follows from the second difference of k, and the kernel is accurate up to a
      constant.
    - The grid contains the frequencies with ‖ℓω‖ ≤ W. Frequencies beyond the cut-off W contribute
      the fraction `tolerance` of the variance, for the shortest lengthscale of the range. Each term
      of a sum of kernels has a separate W.

    The truncated variance δ is computed exactly. With `diagonal_correction`, δ is added to the
    noise and to the predictive variance, so that predictive variances are not too small. The
    evidence is computed for the truncated prior, with δ as independent noise. It may be many nats
    too low unless δ is much smaller than the noise variance. `VectorFieldGP` issues a `GridWarning`
    if δ exceeds the noise variance.

    If a lengthscale leaves its range, you get a `GridWarning`. Call `ORFFKernel.redraw()` to build
    a new grid. `VectorFieldGP` and the training of an `ExactGP` build it automatically. One
    evaluation of the evidence costs O(F³) operations for F features, and F grows like
    (extent/lengthscale)^d for d inputs.

    Args:
        domain: ((low, high), …), one pair for each input, the box of all points of prediction.
            Points outside the domain raise an error in an `ORFFKernel` and for sample paths. A
            posterior of `VectorFieldGP` uses a larger grid for such points. It raises an error if
            `spacing` is set or if only statistics are stored. If None, the domain is `data`,
            extended on each side by a lengthscale, and by at least a quarter of the extent.
            Without `data`, there is no limit.
        data: ((low, high), …), one pair for each input, the box of the data.
        tolerance: the largest error by truncation, and the largest error by aliasing, each as a
            fraction of the variance.
        lengthscale_range: the shortest and the longest lengthscale for which the grid is valid,
            divided by the lengthscale of the kernel when the grid is built.
        max_features: the largest number of features. If the tolerance needs more features, the
            tolerance is raised; see `ORFFKernel.accuracy`. If None, a tolerance that needs more
            than 40 000 features raises an error.
        spacing: h, in radians per unit of the inputs, one number for all inputs or one for each
            input. If None, it is chosen as above.
        cutoff: the largest ‖ω‖ of each scalar kernel, in radians per unit of the inputs. If None,
            it is chosen as above.
        diagonal_correction: whether to add δ to the noise and to the predictive variance.
        largest_index: the largest |k_i| for each input, in addition to the cut-off; no limit if
            None.
        sum_constant: whether to combine all frequencies along a constant input. An input is
            constant if low = high in `domain` and in `data`. A field then has two or more features
            for each frequency of the other inputs, and no derivatives along the constant input.
        longest_period: the largest period 2π/h, in units of L, for any tolerance; no limit if None.

    Raises:
        ValueError: `data`, `domain` and `spacing` are all None; a bound is not finite, or
            low > high; `tolerance` is outside (0, 1); `lengthscale_range` does not contain 1;
            `max_features`, `spacing` or `cutoff` is not positive; `longest_period` is not above 1.

    Example:
        A grid for 81 points in the unit square, with its errors:

        >>> import gpytorch, gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     torch.linspace(0, 1, 9), torch.linspace(0, 1, 9)
        ... )
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> kernel.base_kernel.lengthscale = 0.2
        >>> grid = gp_orff.Grid.for_data(x, tolerance=1e-4)
        >>> kernel = gp_orff.ORFFKernel(kernel, grid)
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
                f"to the current lengthscales, got {self.lengthscale_range}"
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
        """Return a grid whose `data` is the bounding box of the points `x`.

        Args:
            x: (N, d), the points of the data.
            tolerance: the largest error by truncation, and by aliasing, as a fraction of the
                variance.
            lengthscale_range: the shortest and the longest lengthscale for which the grid is valid,
                divided by the current lengthscale of the kernel.
            domain: ((low, high), …), one pair for each input, the box of all points of prediction.
                If None, it is the box of `x` with a margin. See `Grid` for points outside.
            max_features: the largest number of features; see `Grid`.
            diagonal_correction: whether to add the truncated variance to the noise and to the
                predictive variance.

        Raises:
            ValueError: `x` has no points or is not finite, or one of the reasons listed at `Grid`.
        """
        return cls(
            domain=domain,
            data=box_of(x),
            tolerance=tolerance,
            lengthscale_range=lengthscale_range,
            max_features=max_features,
            diagonal_correction=diagonal_correction,
        )

    @classmethod
    def for_tides(
        cls,
        x: Float[Tensor, "N d"],
        kernel: Kernel,
        *,
        domain: Box | None = None,
        fastest: float | None = None,
        max_features: int = 10**6,
    ) -> "Grid":
        """Return a grid for tides and other motion, observed at all pairs of positions and times.

        Use this grid if every position is observed at every time. Its frequencies are all points of
        a box. The features are therefore products of functions of space and functions of time.
        `VectorFieldGP.condition` uses these products to factorise small matrices for space, time
        and tides instead of one large matrix.

        The grid depends on the lengthscales ℓ of terms with more than a hundredth of the variance.
        The period of the features along each input is the extent of the domain plus 4.5 times the
        longest ℓ. Wavenumbers along each direction of space are at most 3.5 divided by the shortest
        ℓ. Frequencies in time are at most `fastest`.

        The variance of omitted frequencies is added to the noise. It is small for an `RBFKernel` of
        space. For a `MaternKernel` of space it is large. In this case, increase `largest_index` by
        `dataclasses.replace(grid, largest_index=…)`.

        Args:
            x: (N, d), all pairs of positions and times.
            kernel: the kernel of the model, such as the sum of `gp_orff.tides(…)` and a field
                kernel times a kernel of time. Set its hyperparameters to realistic values first,
                for example by a fit to some of the observations.
            domain: ((low, high), …), one pair for each input, the box of all points of prediction.
                If None, it is the box of `x`.
            fastest: the largest frequency in time, in radians per unit of time. If None, it is 1.8
                times the largest frequency of the spectral lines of the kernel.
            max_features: the largest number of features.

        Raises:
            TypeError: `kernel` is not a kernel, or `x` does not contain numbers.
            ValueError: the kernel has no spectral lines; `x` or `domain` does not have the input
                columns of the kernel; `fastest` is not positive; or one of the reasons listed at
                `Grid`.

        Example:
            A field with the tide M2 and eddies, at 25 positions and 5 times. The largest indices
            belong to the two directions of space and to time:

            >>> import gp_orff, torch
            >>> from gpytorch.kernels import MaternKernel
            >>> space = gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 1))
            >>> tides = gp_orff.tides(space, ["M2"], active_dims=(2,))
            >>> kernel = tides + space * MaternKernel(nu=0.5, active_dims=(2,))
            >>> x = torch.cartesian_prod(*3 * [torch.arange(5.0)])
            >>> gp_orff.Grid.for_tides(x, kernel).largest_index
            (6, 6, 1)
        """
        required(
            kernel, Kernel, "Grid.for_tides expects the kernel of the model", "pass model.kernel"
        )
        data = box_of(x)
        spectra = term_spectra(kernel, len(data))
        least = _least_inputs(spectra)
        region = data if domain is None else as_box(domain, "domain")
        if len(data) < least or len(region) != len(data):
            raise ValueError(
                f"Grid.for_tides expects x and domain with the {least} input columns of the "
                f"kernel, got {len(data)} and {len(region)}"
            )
        box = union(data, region)
        lines = [leaf for term in spectra for leaf in term.leaves if leaf.spectrum.is_line]
        if not lines:
            raise ValueError(
                "Grid.for_tides expects a kernel with lines, such as gp_orff.tides(…) + …, got "
                f"{type(kernel).__name__} without lines; use gp_orff.Grid.for_data(x)"
            )
        in_time = {column for leaf in lines for column in leaf.dims}
        if fastest is None:
            # at least two lines, because the first line of a PeriodicKernel is a constant
            counts = [max(2, leaf.spectrum.num_lines(1e-3)) for leaf in lines]
            pairs = zip(lines, counts, strict=True)
            fastest = 1.8 * max(leaf.spectrum.lines(n)[0].max().item() for leaf, n in pairs)
        if not 0 < (fastest := float(fastest)) < math.inf:
            raise ValueError(f"Grid.for_tides expects a positive fastest, got {fastest}")
        lengths: dict[int, list[float]] = {column: [] for column in range(len(box))}
        for leaf, axis, column in axes_of([term for term in spectra if term.share > 0.01]):
            lengths[column].append(axis_lengthscales(leaf.spectrum, leaf.num_dims)[axis])
        periods, largest = [], []
        for (column, along), (low, high) in zip(lengths.items(), box, strict=True):
            periods.append(high - low + 4.5 * max(along, default=1.0))
            top = fastest if column in in_time else 3.5 / min(along, default=1.0)
            largest.append(max(1, round(top * periods[-1] / (2 * math.pi))))
        return cls(
            domain=box,
            data=data,
            spacing=tuple(2 * math.pi / period for period in periods),
            largest_index=tuple(largest),
            lengthscale_range=(1.0, 1.0),
            max_features=max_features,
            sum_constant=False,  # sums along a constant input are not products of functions
        )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """Return the frequencies of each term of the kernel, on one shared lattice.

        Args:
            terms: the spectra of the terms of the kernel.

        Raises:
            GridBudgetError: `max_features` is None and the grid needs more than 40 000 features, or
                `max_features` features represent almost none of the variance.
            NotImplementedError: a spectrum is not a `GridSpectrum`; two kernels of a product depend
                on the same inputs.
            ValueError: a box or the spacing does not have one entry for each input.
        """
        if any(map(has_lines, terms)):
            return draw_with_lines(self, terms, self.max_features or MOST_FEATURES)
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
        """Return the number of inputs, which the boxes or the spacing determine."""
        least = _least_inputs(terms)
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
        """Return the lowest and the highest point of the domain."""
        if self.domain is not None:
            return np.array(self.domain).T
        if self.data is None:
            return np.array([[-np.inf], [np.inf]]).repeat(num_inputs, axis=1)
        low, high = np.array(self.data).T
        margin = np.maximum(lengthscales(terms, num_inputs), 0.25 * (high - low))
        return np.stack([low - margin, high + margin])

    def _affordable_design(self, terms, num_inputs, domain):
        """Return the smallest tolerance, at least `tolerance`, that the budget allows.

        Also return the spacing and the lattice points for this tolerance.
        """
        budget = self.max_features or MOST_FEATURES
        constant = self._constant(terms, domain)

        def attempt(tolerance: float, aliasing: float, limited: bool = False):
            spacing = self._spacing(terms, num_inputs, domain, tolerance, aliasing, limited)
            return self._design(terms, spacing, tolerance, budget, constant)

        def uneven(tolerance: float, limited: bool = False):
            # Under a budget, aliasing may be 300 times as large as truncation, but at most 0.03.
            # Truncation affects every pair of points, while aliasing affects only the few pairs at
            # the longest lags.
            return attempt(tolerance, min(300 * tolerance, 3e-2), limited)

        design = attempt(self.tolerance, self.tolerance)
        if design is not None:
            return self.tolerance, design
        if self.max_features is None:
            raise GridBudgetError(
                f"Grid expects a kernel for which {MOST_FEATURES} features suffice, got one that "
                f"needs more for tolerance {self.tolerance:g} on this domain with these "
                "lengthscales; pass max_features=, so that the tolerance is raised and the "
                "truncated variance is added to the noise, or use gp_orff.QuasiMonteCarlo"
            )
        tolerance, best = smallest_tolerance(uneven, self.tolerance)
        if best is None or tolerance > 0.1:  # a term that barely varies may be the reason
            limited = partial(uneven, limited=True)
            capped_tolerance, capped = smallest_tolerance(limited, self.tolerance)
            if capped is not None and (best is None or capped_tolerance < tolerance):
                tolerance, best = capped_tolerance, capped
        if best is None or not all(len(part.indices) for part in best[1]):
            raise GridBudgetError(
                "expected a kernel that varies slowly enough over the domain for a frequency grid, "
                f"got lengthscales {_numbers(lengthscales(terms, num_inputs))} and longest lags "
                f"{_numbers(self._lag(domain))}, for which {self.max_features} features represent "
                "almost none of the variance; pass a smaller domain or more max_features"
            )
        return tolerance, best

    def _design(self, terms, spacing, tolerance, budget, constant):
        """Return the spacing and the lattice points of each term, or None beyond the budget."""
        points, features = [], 0
        for term in terms:
            # Under a budget, a term of small variance may truncate a larger fraction of it.
            own = tolerance if tolerance == self.tolerance else term.own(tolerance, MOST_CUT)
            part = self._points(term, spacing, own, (budget - features) / term.rank, constant)
            if part is None:
                return None
            points.append(part)
            features += num_features(term, part, spacing, constant)
        return (spacing, points) if features <= budget else None

    def _spacing(
        self, terms, num_inputs, domain, tolerance, aliasing, limited
    ) -> Float[np.ndarray, "d"]:
        """Return the spacing h of each axis; if `limited`, r is at most the longest lag."""
        if self.spacing is not None:
            return np.broadcast_to(np.asarray(self.spacing, float), (num_inputs,)).copy()
        lag = self._lag(domain)
        radius, shortest = np.zeros(num_inputs), np.full(num_inputs, np.inf)
        longest = self.lengthscale_range[1]
        constant, times = self._constant(terms, domain), self.longest_period or np.inf
        most = np.where(constant | (times == np.inf), np.inf, (min(times, 1e300) - 1) * lag)
        for leaf, axis, dim in axes_of(terms):
            if constant[dim]:  # no aliasing
                scale = axis_lengthscales(leaf.spectrum, leaf.num_dims)[axis]
                radius[dim] = max(radius[dim], 1e6 * scale)
                continue
            bound = most[dim] / longest
            r = longest * correlation_lag(leaf, axis, aliasing, lag, bound)
            if lag[dim] < r:  # aliasing affects every pair of points, not only the farthest
                strict = correlation_lag(leaf, axis, min(tolerance, aliasing), lag, bound) * longest
                r = min(strict, 4 * r)  # correlations that fall like a power need a limit
            radius[dim], shortest[dim] = max(radius[dim], r), min(shortest[dim], r)
        if limited:  # a term that barely varies does not refine the others' grid
            radius = np.minimum(radius, np.maximum(lag, shortest))
        radius = np.minimum(radius, most)
        return 2 * np.pi / np.where(lag + radius > 0, lag + radius, 1.0)

    def _constant(self, terms, domain) -> Bool[np.ndarray, "d"]:
        """Return which inputs are constant, so that features are summed over their frequencies."""
        lag = self._lag(domain)
        return (lag == 0) & summable(terms, len(lag)) & self.sum_constant

    def _lag(self, domain) -> Float[np.ndarray, "d"]:
        """Return the longest lag from an observation to a point of the domain or of the data."""
        data = domain if self.data is None else np.array(self.data).T
        high, low = np.maximum(domain[1], data[1]), np.minimum(domain[0], data[0])
        return np.maximum(high - data[0], data[1] - low)

    def _points(
        self, term: TermSpectrum, spacing, tolerance, most, constant
    ) -> LatticePoints | None:
        """Return the lattice points that a term needs, or None if there are more than `most`."""
        blocks = {}
        for direction, leaves in directions(term, constant).items():
            pairs = [(leaf, self._region(leaf, tolerance, spacing)) for leaf in leaves]
            blocks[direction] = half_space(pairs, spacing, most, self.largest_index)
        if any(points is None for points in blocks.values()):
            return None
        return LatticePoints.of(blocks)

    def _region(self, leaf: LeafSpectrum, tolerance: float, spacing) -> Region:
        """Return the region of frequencies up to the cut-off, at least one along each axis."""
        if self.cutoff is not None:
            return Region(lambda omega: np.linalg.norm(omega, axis=-1), self.cutoff)
        # The shortest lengthscale of the range has the widest spectrum and determines the cut-off.
        # The longest lengthscale has the longest correlations and determines the spacing.
        level = tail_radius(leaf, tolerance) / self.lengthscale_range[0]
        least = leaf.spectrum.scaled_radius(unit_steps(leaf, spacing)).max()
        return Region(leaf.spectrum.scaled_radius, max(level, 1.000001 * least))


def _numbers(values: Float[np.ndarray, "k"]) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in values) + ")"


# The rule that chooses between a grid and random frequencies.


MOST_DENSE = 8192  # the default number of features; one evaluation of the evidence takes 10 s


def _least_inputs(terms: Sequence[TermSpectrum]) -> int:
    """Return the number of input columns up to the last one that a term depends on, at least 1."""
    return 1 + max((dim for term in terms for leaf in term.leaves for dim in leaf.dims), default=0)


@dataclass(frozen=True)
class Auto:
    """The rule that chooses between a frequency grid and quasi-random frequencies.

    An `ORFFKernel` with this rule makes the choice when it is built:

    - It uses a `Grid` if `data` or `domain` is set, the kernel has at most 4 inputs (three
      directions of space, and time), and the kernel supports grids. If the grid needs more than
      `max_features` features (8192 by default), the tolerance is raised.
    - Otherwise it uses `QuasiMonteCarlo` with up to `max_features` features (4096 by default). If
      `data`, `domain` and `max_features` are all None, and the kernel has at most 4 inputs, it
      raises an error instead. The reason is that random features underestimate the predictive
      variance, and a grid would be possible.

    `VectorFieldGP` with this rule chooses the cheapest representation that is accurate enough for
    the M = N·p values of N observations with p outputs. Accurate enough means an expected loss of
    at most max(1, 10⁻⁴ M) nats of the log evidence.

    - It uses the exact kernel if M is at most `exact_values`. It also does so if M is at most
      `max_features` (8192 by default), and a grid needs more than M features or is not accurate
      enough.
    - Otherwise it uses a grid of up to `max_features` features. If `max_features` is None and 8192
      features are not accurate enough, the posterior may use more features, with an iterative
      solver.
    - For data in clusters, it can average observations that are close together, and use the exact
      kernel for at most `max_features` averaged values (8192 by default). It does so if the grid
      needs the iterative solver or is not accurate enough, and if the averages are accurate enough
      or lose less than the grid.

    Args:
        tolerance: the tolerance of the grid, as a fraction of the variance; see `Grid`.
        max_features: the largest number of features. If the tolerance needs more features, the
            tolerance is raised. If None, the limits above apply.
        exact_values: the largest N·p for which `VectorFieldGP` always uses the exact kernel.
        domain: ((low, high), …), one pair for each input, the box of all points of prediction, as
            for `Grid`.
        data: ((low, high), …), one pair for each input, the box of the data. `Auto().for_data(x)`
            and `VectorFieldGP` set it.
        lengthscale_range: the shortest and the longest lengthscale of the grid, as for `Grid`.
        longest_period: the largest period of the grid, in units of its longest lag L, as for
            `Grid`. If None, there is no limit, except that `VectorFieldGP` uses 2 for learned
            spectra.

    Raises:
        ValueError: `tolerance` is outside (0, 1); `max_features` is not a positive integer;
            `exact_values` < 0. An `ORFFKernel` raises this error too if `max_features` does not
            suffice for one frequency of each term, or if `data`, `domain` and `max_features` are
            all None.

    Example:
        The attribute `reason` states what was chosen:

        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> rule = gp_orff.Auto().for_data(torch.rand(50, 2))
        >>> print(gp_orff.ORFFKernel(kernel, rule).frequencies[0].reason)
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
        """Return a copy of this rule whose `data` is the bounding box of the points `x`, (N, d)."""
        return replace(self, data=box_of(x))

    def choose(self, terms: Sequence[TermSpectrum]) -> tuple[Rule, str]:
        """Return the chosen rule, and the reason in words.

        Args:
            terms: the spectra of the terms of the kernel.

        Raises:
            ValueError: `data`, `domain` and `max_features` are all None although a grid is
                possible.
        """
        box = self.domain or self.data
        if box is None:
            dims = [dim for term in terms for leaf in term.leaves for dim in leaf.dims]
            if self.max_features is None and max(dims, default=0) < GRID_INPUTS:
                raise ValueError(
                    "Auto expects data or domain, from which it chooses a grid, got neither data "
                    "nor domain; use gp_orff.Auto().for_data(x), or a budget of random features, "
                    "such as gp_orff.Auto(max_features=1024)"
                )
            return self._random(terms, "no data to choose a domain from, see Auto.for_data(x)")
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
        """Return the frequencies of each term by the chosen rule, with the attribute `reason`.

        Args:
            terms: the spectra of the terms of the kernel.

        Raises:
            ValueError: one of the reasons listed at `choose`.
        """
        rule, reason = self.choose(terms)
        draws = rule.draw(terms)
        for draw in draws:
            draw.reason = reason
        return draws

    def _random(self, terms: Sequence[TermSpectrum], reason: str) -> tuple[QuasiMonteCarlo, str]:
        """Return quasi-random frequencies: the largest power of two that the budget allows."""
        varying = [term for term in terms if term.leaves]
        ranks = sum(term.rank for term in varying) or 1
        if self.max_features is None and len(varying) == 1 and varying[0].leaves[0].is_constant:
            ranks = 1  # a separable kernel, whose cost follows from its columns
        if self.max_features is not None and self.max_features < 2 * ranks:
            raise ValueError(
                f"expected max_features of at least {2 * ranks}, for one frequency of each "
                f"term of the kernel, got Auto(max_features={self.max_features}); increase it"
            )
        number = max(1, (self.max_features or 4096) // (2 * ranks))
        number = 2 ** (number.bit_length() - 1)
        return QuasiMonteCarlo(number), f"quasi-Monte Carlo, {number} frequencies: {reason}"
