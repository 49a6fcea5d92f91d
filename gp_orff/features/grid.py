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
# 1. The domain is that of the user, or the box of the data with a margin of a lengthscale, at least
#    a quarter of the extent. The longest lag L between a datum and a point follows from it.
# 2. A kernel with harmonic terms continues in `features.rings`, which calls `draw` again for the
#    others.
# 3. `_affordable_design` tries the tolerance that was asked for. If it needs more features than the
#    budget allows, bisection gives the smallest tolerance for which it suffices. Then aliasing may
#    be up to 300 times as large as truncation, because it concerns only pairs at the longest lags.
# 4. All terms share one spacing, hence one lattice and one set of sums over the data. Along each
#    axis the longest r of all terms determines it. A term that barely varies would make the lattice
#    of all others very fine; if the tolerance is poor, r is limited to L, and the better result is
#    taken.
# 5. Every term has a separate cut-off, thus separate points. Their union is stored once, and every
#    draw refers to its points by position.
# 6. Inputs that are constant in data and domain add no lattice points: features are summed over the
#    frequencies along them, whose period is so long that there are no images.


MOST_FEATURES = 40_000  # their F×F matrix alone needs 13 GB


@dataclass(frozen=True)
class Grid:
    r"""Equispaced frequencies ω_k = (h₁k₁, …, h_d k_d), for 1 to 3 inputs and time.

    The weight of the pair ±ω_k is 2 S(ω_k) h₁⋯h_d, where S is the spectral density. The sum over
    all integers k is the kernel made periodic, with period 2π/h. The sum over a finite grid omits
    a small share of the variance. Hyperparameters change the weights, not the frequencies, so that
    the sufficient statistics of the data are computed once (Greengard, Rachh & Barnett 2022).

    Use `Grid.for_data(x)` to make one. The spacing and the cut-off are chosen when the `ORFFKernel`
    is built, from the data, the tolerance and the kernel's lengthscales:

    - Spacing: h = 2π/(L + r) along each axis. L is the longest lag between an observation and a
      point of the domain. r is the lag beyond which the correlation is below the tolerance, at the
      longest lengthscale of the range. (Rational quadratic kernels have heavy tails; their r
      follows from the second difference of k, and they are accurate up to a constant.)
    - Cut-off: the frequencies in an ellipsoid ‖ℓω‖ ≤ W. The share of the variance beyond W is the
      tolerance, at the shortest lengthscale of the range. Each term of a sum has a separate
      ellipsoid.

    The truncated variance δ is known exactly. With `diagonal_correction` it is added to the noise
    and to the predictive variance, so that predictive variances are not too small. The evidence is
    computed for the truncated prior, with δ as independent noise. It may be many nats too low
    unless δ is small compared with the noise variance. If δ exceeds the noise variance,
    `VectorFieldGP` gives a `GridWarning`.

    You get a `GridWarning` if a lengthscale leaves the range: call `ORFFKernel.redraw()` to build a
    new grid. The training of an `ExactGP` and `VectorFieldGP` do this automatically. An evaluation
    of the evidence costs F³ for F features, and F grows like (extent/lengthscale)^d.

    Args:
        domain: (low, high) of every input, for all points of prediction; points outside raise an
            error. If None: `data`, widened on each side by a lengthscale, and by at least a quarter
            of the extent; without `data`, all of space.
        data: (low, high) of every input, for the data.
        tolerance: the largest error by truncation and by aliasing, each as a share of the variance.
        lengthscale_range: shortest and longest lengthscale for which the grid is valid, as
            multiples of the kernel's lengthscales when the grid is built.
        max_features: the largest number of features. If it does not suffice, the tolerance is
            raised: see `ORFFKernel.accuracy()`. If None: 40 000, and an error beyond.
        spacing: h in radians per unit of the inputs, for all axes or for each; chosen if None.
        cutoff: the largest ‖ω‖ of each scalar kernel, in the same units; chosen if None.
        diagonal_correction: whether to add δ to the noise and to the predictive variance.
        largest_index: the largest |k_i| along each axis, a further limit.
        sum_constant: whether to replace all frequencies along a constant input by their sum. A
            constant input has low = high in `domain` and in `data`. A field then has two or more
            features for each frequency in the other inputs, and no derivatives along this one.
        longest_period: the longest period 2π/h, in units of L, for any tolerance.

    Raises:
        ValueError: `data`, `domain` and `spacing` are all None; a bound is not finite, or
            low > high; `tolerance` is outside (0, 1); `lengthscale_range` does not contain 1;
            `max_features`, `spacing` or `cutoff` is not positive; `longest_period` is not above 1.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> x = torch.cartesian_prod(
        ...     torch.linspace(0, 1, 9), torch.linspace(0, 1, 9)
        ... )
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> kernel.base_kernel.lengthscale = 0.2
        >>> kernel = gp_orff.ORFFKernel(
        ...     kernel, gp_orff.Grid.for_data(x, tolerance=1e-4)
        ... )
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
            lengthscale_range: shortest and longest lengthscale, as multiples of the kernel's
                lengthscales.
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
        """Return a grid for tides and other motions, observed at all pairs of positions and times.

        Use it if every position is observed at every time. The frequencies are all points of a box,
        so that features are products of functions of space and of time.
        `VectorFieldGP.condition` then factorises small matrices of space, of time and of tides,
        instead of one large matrix.

        Let ℓ be the lengthscales of terms with more than a hundredth of the variance. The period of
        the features along each input is the extent of the domain plus 4.5 times the longest ℓ.
        Wavenumbers along each input in space are at most 3.5 divided by the shortest ℓ. Frequencies
        in time are at most `fastest`. The variance of omitted frequencies is added to the noise.
        This variance is small for an `RBFKernel` in space. It is large for a `MaternKernel`, which
        needs a larger `largest_index`: use `dataclasses.replace(grid, largest_index=…)`.

        Args:
            x: (N, d) inputs, all pairs of positions and times.
            kernel: the kernel of the model, such as gp_orff.tides(…) + field · kernel of time. Its
                hyperparameters must be known, or learned from some of the observations.
            domain: (low, high) of every input, for predictions; if None, the box of `x`.
            fastest: the largest frequency in time, in radians per unit of time. If None, 1.8 times
                the largest frequency of the spectral lines of the kernel.
            max_features: the largest number of features.

        Raises:
            TypeError: `kernel` is no kernel, or `x` are no numbers.
            ValueError: a kernel without lines; `x` or `domain` with other columns; `fastest` is not
                positive; or as for `Grid`.

        Example:
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
            kernel, Kernel, "Grid.for_tides expects the kernel of the model", "give model.kernel"
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
                f"{type(kernel).__name__} without any; use gp_orff.Grid.for_data(x)"
            )
        in_time = {column for leaf in lines for column in leaf.dims}
        if fastest is None:
            # at least two lines, of which the first one of a PeriodicKernel is constant
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
            sum_constant=False,  # sums along a constant input are no products of functions
        )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The frequencies of each of `terms`, on one shared lattice.

        Raises:
            GridBudgetError: the grid needs more than `max_features` features, or more than 40 000
                if `max_features` is None.
            NotImplementedError: a spectrum that does not define `tail` and `correlation`; a product
                of kernels on the same inputs.
            ValueError: a box or a spacing that does not have one entry for each input.
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
        """The number of inputs that the boxes or the spacing give; at least those of the kernel."""
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

        def attempt(tolerance: float, aliasing: float, limited: bool = False):
            spacing = self._spacing(terms, num_inputs, domain, tolerance, aliasing, limited)
            return self._design(terms, spacing, tolerance, budget, constant)

        def uneven(tolerance: float, limited: bool = False):
            # Under a budget, aliasing may be 300 times as large as truncation, and at most 0.03:
            # truncation affects every pair of points, aliasing only the few pairs at the longest
            # lags.
            return attempt(tolerance, min(300 * tolerance, 3e-2), limited)

        design = attempt(self.tolerance, self.tolerance)
        if design is not None:
            return self.tolerance, design
        if self.max_features is None:
            raise GridBudgetError(
                f"Grid expects a kernel for which {MOST_FEATURES} features suffice, got one that "
                f"needs more for tolerance {self.tolerance:g} on this domain with these "
                "lengthscales; give max_features= (the truncated variance is added to the noise), "
                "a larger tolerance, or use gp_orff.QuasiMonteCarlo"
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
                f"got one of whose variance {self.max_features} features represent almost nothing "
                f"(lengthscales {_numbers(lengthscales(terms, num_inputs))}, longest lags "
                f"{_numbers(self._lag(domain))}); give a smaller domain or more max_features"
            )
        return tolerance, best

    def _design(self, terms, spacing, tolerance, budget, constant):
        """The spacing and the lattice points of each term; None if they exceed the budget."""
        points, features = [], 0
        for term in terms:
            # Under a budget a term of small variance may truncate a larger share of its variance.
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
        """h of each axis; if `limited`, r is at most the longest lag."""
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
                radius[dim] = max(radius[dim], 1e6 * scale)
                continue
            bound = most[dim] / longest
            r = longest * correlation_lag(leaf, axis, aliasing, lag, bound)
            if lag[dim] < r:  # every pair of points is affected by aliasing, not only the farthest
                strict = correlation_lag(leaf, axis, min(tolerance, aliasing), lag, bound) * longest
                r = min(strict, 4 * r)  # correlations that fall like a power need a limit
            radius[dim], shortest[dim] = max(radius[dim], r), min(shortest[dim], r)
        if limited:  # a term that barely varies does not refine the others' grid
            radius = np.minimum(radius, np.maximum(lag, shortest))
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
        # The cut-off serves the shortest lengthscale of the range, at which the spectrum is widest;
        # the spacing serves the longest, at which correlations reach farthest.
        level = tail_radius(leaf, tolerance) / self.lengthscale_range[0]
        least = leaf.spectrum.scaled_radius(unit_steps(leaf, spacing)).max()
        return Region(leaf.spectrum.scaled_radius, max(level, 1.000001 * least))


def _numbers(values: Float[np.ndarray, "k"]) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in values) + ")"


# The rule that chooses between a grid and random frequencies.


MOST_DENSE = 8192  # features, by default: one evaluation of the evidence takes about 10 s


def _least_inputs(terms: Sequence[TermSpectrum]) -> int:
    """The number of input columns up to the last that the terms depend on, at least 1."""
    return 1 + max((dim for term in terms for leaf in term.leaves for dim in leaf.dims), default=0)


@dataclass(frozen=True)
class Auto:
    """Choose the frequencies automatically: a grid if the budget allows, else quasi-random points.

    The choice is made when the `ORFFKernel` is built. The first case that applies decides:

    - Neither `data` nor `domain` is given: `QuasiMonteCarlo` with up to `max_features` features. If
      `max_features` is None and the kernel has at most 4 inputs, an error is raised instead. A grid
      is then possible, and the predictive variance of random features is too small.
    - There are more than 4 inputs (three of space, and time), or the kernel has no grid:
      `QuasiMonteCarlo` with up to `max_features` features, or 4096 if `max_features` is None.
    - Otherwise: `Grid` with the given tolerance. If this grid needs more than `max_features`
      features (8192 by default), the tolerance is raised until `max_features` suffice.

    `VectorFieldGP` with this rule chooses the cheapest representation that is accurate enough for
    the M = N·p values of the data. Accurate enough means an expected loss of at most
    max(1, 10⁻⁴ M) nats of the log evidence.

    - The exact kernel, without features, if M is at most `exact_values`. If M is larger but at most
      `max_features` (8192 by default), the exact kernel is also used in two cases: a grid needs
      more than M features, or it is not accurate enough.
    - Otherwise, a grid of up to `max_features` features. If `max_features` is None and 8192
      features are not accurate enough, the posterior may have more, by an iterative solver.
    - For data in clusters, the exact kernel on averages of observations that are close together.
      There are at most `max_features` averaged values (8192 by default). The posterior uses them
      if two conditions apply. First, the grid needs the iterative solver or is not accurate enough.
      Second, the averages are accurate enough, or lose less than the grid.

    Args:
        tolerance: the tolerance of the grid, as a fraction of the variance; see `Grid`.
        max_features: the largest number of features. If it does not suffice for `tolerance`, the
            tolerance is raised. If None, the limits above apply.
        exact_values: the largest N·p for which `VectorFieldGP` always uses the exact kernel.
        domain: (low, high) of every input, for all points of prediction, as for `Grid`.
        data: (low, high) of every input, for the data. `Auto().for_data(x)` and `VectorFieldGP` set
            it.
        lengthscale_range: shortest and longest lengthscale of the grid, as for `Grid`.
        longest_period: the longest period of the grid, in units of its longest lag L, as for
            `Grid`. If None, `VectorFieldGP` uses 2 for learned spectra.

    Raises:
        ValueError: `tolerance` is outside (0, 1), `max_features` < 1 or `exact_values` < 0. When
            frequencies are drawn: `max_features` does not suffice for one frequency of each term,
            or `data`, `domain` and `max_features` are all None.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> kernel = gp_orff.CurlFreeKernel(
        ...     gpytorch.kernels.RBFKernel(), num_dims=2
        ... )
        >>> kernel = gp_orff.ORFFKernel(
        ...     kernel, gp_orff.Auto().for_data(torch.rand(50, 2))
        ... )
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
        """The rule for the spectra of `terms`, and the reason in words.

        Raises:
            ValueError: data, domain and budget are all missing although a grid is possible.
        """
        box = self.domain or self.data
        if box is None:
            dims = [dim for term in terms for leaf in term.leaves for dim in leaf.dims]
            if self.max_features is None and max(dims, default=0) < GRID_INPUTS:
                raise ValueError(
                    "Auto expects the inputs, to choose a grid for their extent, got neither data "
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
        """The frequencies of each of `terms` by the chosen rule, each with its `reason`; ValueError
        as for `choose`."""
        rule, reason = self.choose(terms)
        draws = rule.draw(terms)
        for draw in draws:
            draw.reason = reason
        return draws

    def _random(self, terms: Sequence[TermSpectrum], reason: str) -> tuple[QuasiMonteCarlo, str]:
        """Quasi-random frequencies, a power of two, as many as the budget allows."""
        varying = [term for term in terms if term.leaves]
        ranks = sum(term.rank for term in varying) or 1
        if self.max_features is None and len(varying) == 1 and varying[0].leaves[0].is_constant:
            ranks = 1  # a separable kernel, whose cost follows from its columns
        if self.max_features is not None and self.max_features < 2 * ranks:
            raise ValueError(
                f"expected max_features of at least {2 * ranks}, for one frequency of each "
                f"term of the kernel, got Auto(max_features={self.max_features}); give more"
            )
        number = max(1, (self.max_features or 4096) // (2 * ranks))
        number = 2 ** (number.bit_length() - 1)
        return QuasiMonteCarlo(number), f"quasi-Monte Carlo, {number} frequencies: {reason}"
