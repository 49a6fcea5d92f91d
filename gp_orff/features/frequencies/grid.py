"""Equispaced frequencies: the quadrature of the spectral density on a lattice."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.features.domain import Box, as_box, box_of
from gp_orff.features.frequencies.grid_design import (
    axes_of,
    correlation_lag,
    first_nonzero,
    lengthscales,
    require_separate_inputs,
    tail_radius,
)
from gp_orff.features.frequencies.lattice_nodes import Lattice, LatticeDraw
from gp_orff.features.frequencies.rule import Draw, LeafSpectrum, TermSpectrum

MOST_FEATURES = 40_000  # A alone would need 13 GB


class GridBudgetError(ValueError):
    """A grid that does not exist within its number of features."""


@dataclass(frozen=True)
class Grid:
    r"""Equispaced frequencies ω_k = h∘k with weights 2 S(ω_k) ∏h: for 1 to 3 inputs, and time.

    The sum over all k is the kernel periodised with period 2π/h; the grid ends where what is left
    of the variance is small. Frequencies do not move with the hyperparameters, only their weights
    do, so that the statistics of the data are computed once (Greengard, Rachh & Barnett 2022).

    `Grid.for_data(x)` chooses spacing and cut-off from the data's extent, a tolerance and the
    kernel's present lengthscales when the kernel is built:

    - along axis i, h = 2π/(L + r): L the longest lag between a datum and a point of the domain, r
      the lag where the correlation has fallen below the tolerance, for the longest lengthscale
      of the range;
    - frequencies with ‖ℓω‖ ≤ W (an ellipsoid, for every term of a sum its own, on one shared
      lattice; for products a product of regions), the share of the variance beyond W, for the
      shortest lengthscale of the range, being the tolerance.

    Rational quadratic kernels fall like a power of the lag: h follows the second difference of k,
    and the weight of ω = 0 is what the others leave of k(0), so that their grids are right up to
    a constant, for every α (see `weight_at_zero`).

    What a grid leaves out is known exactly and, with `diagonal_correction`, returned as white
    variance δ in the noise and in the predictive variance, so that the posterior is not
    overconfident.

    In training, lengthscales move: `GridWarning` says when one has left the range,
    `ORFFKernel.redraw()` builds the grid anew, `ORFFKernel.accuracy()` tells how well it does. An
    evaluation costs F³, F growing like (extent/lengthscale)^d; `VectorFieldGP` does all this alone.

    Args:
        domain: (low, high) of every input column; points outside raise. None: the data's box,
            widened on each side by a lengthscale and at least a quarter of its extent. For a grid
            by hand None means everywhere.
        data: the box of the data, where it is known.
        tolerance: of aliasing and of truncation, as shares of the variance.
        lengthscale_range: shortest and longest lengthscale the grid serves, relative to those the
            kernel has when the grid is built.
        max_features: a budget that wins over the tolerance; `ORFFKernel.accuracy()` tells what
            was achieved.
        spacing: h by hand, one for all axes or one for each.
        cutoff: the largest ‖ω‖ by hand, for the frequencies of each leaf of the kernel tree.
        diagonal_correction: whether to return the truncated variance as white variance.
        largest_index: the largest |k_i| along each axis, whatever the tolerance asks.

    Raises:
        ValueError: neither data, domain nor spacing; a tolerance outside (0, 1); a range that does
            not contain 1; when it is built, more than 40 000 features without a budget.

    Example:
        >>> import gpytorch, gp_orff, torch
        >>> x = torch.cartesian_prod(torch.linspace(0, 1, 9), torch.linspace(0, 1, 9))
        >>> kernel = gp_orff.CurlFreeKernel(gpytorch.kernels.RBFKernel(), num_dims=2)
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
        """A grid for inputs x (N, d); the arguments are those of the class."""
        return cls(
            domain=domain,
            data=box_of(x),
            tolerance=tolerance,
            lengthscale_range=lengthscale_range,
            max_features=max_features,
            diagonal_correction=diagonal_correction,
        )

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        for term in terms:
            require_separate_inputs(term)
        num_inputs = self._num_inputs(terms)
        domain = self._domain(terms, num_inputs)
        tolerance, design = self._affordable(terms, num_inputs, domain)
        spacing, members = design
        every = np.concatenate(members)
        indices, position = np.unique(every, axis=0, return_inverse=True)
        lattice = Lattice(indices, spacing, domain, self._lag(domain), tolerance)
        owns = np.split(position.reshape(-1), np.cumsum([len(m) for m in members])[:-1])
        return [
            LatticeDraw(lattice, own, term, self.lengthscale_range, self.diagonal_correction)
            for own, term in zip(owns, terms, strict=True)
        ]

    def _num_inputs(self, terms: Sequence[TermSpectrum]) -> int:
        least = 1 + max(
            (dim for term in terms for leaf in term.leaves for dim in leaf.dims), default=0
        )
        box = self.domain or self.data
        known = len(box) if box is not None else np.size(self.spacing)
        if box is None and np.ndim(self.spacing) == 0:
            known = least
        if known < least or (self.domain and self.data and len(self.domain) != len(self.data)):
            raise ValueError(
                f"Grid expects the extent of each of the kernel's {least} input columns, got "
                f"{known} (domain {self.domain}, data {self.data}, spacing {self.spacing})"
            )
        return known

    def _domain(self, terms: Sequence[TermSpectrum], num_inputs: int) -> Float[np.ndarray, "2 d"]:
        if self.domain is not None:
            return np.array(self.domain).T
        if self.data is None:
            return np.array([[-np.inf], [np.inf]]).repeat(num_inputs, axis=1)
        low, high = np.array(self.data).T
        margin = np.maximum(lengthscales(terms, num_inputs), 0.25 * (high - low))
        return np.stack([low - margin, high + margin])

    def _affordable(self, terms, num_inputs, domain):
        """The smallest tolerance from `tolerance` on whose grid stays within the budget."""
        budget = self.max_features or MOST_FEATURES

        def attempt(tolerance: float, aliasing: float, most_lags: float | None = _LONGEST):
            spacing = self._spacing(terms, num_inputs, domain, tolerance, aliasing, most_lags)
            return self._design(terms, spacing, tolerance, budget)

        found = attempt(self.tolerance, self.tolerance, None)
        if found is not None:
            return self.tolerance, found
        if self.max_features is None:
            raise GridBudgetError(
                f"Grid needs more than {MOST_FEATURES} features for tolerance {self.tolerance:g} "
                "on this domain with these lengthscales; give max_features= (what it truncates is "
                "returned as white variance), a larger tolerance, or use gp_orff.QuasiMonteCarlo"
            )
        tolerance, best = self._bisect(lambda t, a: attempt(t, a, None))
        if best is None or tolerance > _POOR:  # a term that hardly varies may be to blame
            shorter, capped = self._bisect(attempt)
            if capped is not None and (best is None or shorter < tolerance):
                tolerance, best = shorter, capped
        if best is None or not all(map(len, best[1])):
            raise GridBudgetError(
                "expected a kernel that varies slowly enough over the domain for a frequency grid, "
                f"got one of which {self.max_features} features hold next to nothing "
                f"(lengthscales {_numbers(lengthscales(terms, num_inputs))}, longest lags "
                f"{_numbers(self._lag(domain))}); give a smaller domain or more max_features"
            )
        return tolerance, best

    def _bisect(self, attempt: Callable) -> tuple[float, tuple | None]:
        """The smallest tolerance for which an attempt succeeds, and what it gives."""
        low, high = math.log(self.tolerance), math.log(_MOST_CUT)
        best = attempt(math.exp(high), _ALIASING)
        while best is not None and high - low > 0.02:
            middle = 0.5 * (low + high)
            tolerance = math.exp(middle)
            found = attempt(tolerance, min(_UNEVEN * tolerance, _ALIASING))
            if found is None:
                low = middle
            else:
                high, best = middle, found
        return math.exp(high), best

    def _design(self, terms, spacing, tolerance, budget):
        """Spacing and the lattice points of each term; None if there are too many."""
        members, features = [], 0
        for term in terms:
            own = self._members(term, spacing, tolerance, (budget - features) / term.rank)
            if own is None:
                return None
            members.append(own)
            features += term.rank * (2 * len(own) - (not own.any(-1).all()))
        return (spacing, members) if features <= budget else None

    def _spacing(
        self, terms, num_inputs, domain, tolerance, aliasing, most_lags
    ) -> Float[np.ndarray, "d"]:
        if self.spacing is not None:
            return np.broadcast_to(np.asarray(self.spacing, float), (num_inputs,)).copy()
        lag = self._lag(domain)
        radius, shortest = np.zeros(num_inputs), np.full(num_inputs, np.inf)
        longest = self.lengthscale_range[1]
        for leaf, axis, dim in axes_of(terms):
            own = longest * correlation_lag(leaf, axis, aliasing, lag)
            if lag[dim] < own:  # all pairs of points are at the longest lags
                strict = longest * correlation_lag(leaf, axis, min(tolerance, aliasing), lag)
                own = min(strict, _FARTHER * own)
            radius[dim], shortest[dim] = max(radius[dim], own), min(shortest[dim], own)
        # a term that hardly varies over the domain does not spoil the others
        if most_lags is not None:
            radius = np.minimum(radius, np.maximum(most_lags * lag, shortest))
        return 2 * np.pi / np.where(lag + radius > 0, lag + radius, 1.0)

    def _lag(self, domain) -> Float[np.ndarray, "d"]:
        """The longest lag between a datum and another, or a point of the domain."""
        data = domain if self.data is None else np.array(self.data).T
        high, low = np.maximum(domain[1], data[1]), np.minimum(domain[0], data[0])
        return np.maximum(high - data[0], data[1] - low)

    def _members(
        self, term: TermSpectrum, spacing, tolerance, most
    ) -> Int[np.ndarray, "D d"] | None:
        """The half-space of lattice points that a term needs; None if they are more than `most`."""
        edges = [self._edge(leaf, tolerance, spacing) for leaf in term.leaves]
        counts = np.zeros(len(spacing), dtype=int)
        for leaf, edge in zip(term.leaves, edges, strict=True):
            steps = edge.level / edge.radius(_steps(leaf, spacing))
            counts[list(leaf.dims)] = np.minimum(steps, _MOST_STEPS).astype(int)
        if self.largest_index is not None:
            counts = np.minimum(counts, self.largest_index)
        if np.prod(2.0 * counts + 1) > 8 * most + 1000:  # a box around the region, both halves
            return None
        ranges = [np.arange(-m, m + 1) for m in counts]
        ranges[0] = ranges[0][counts[0] :]  # the first coordinate is never negative
        points = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(counts))
        kept = first_nonzero(points) >= 0
        for leaf, edge in zip(term.leaves, edges, strict=True):
            own = points[:, leaf.dims]
            kept &= edge.radius(own * spacing[list(leaf.dims)]) <= edge.level
            if leaf.degree:  # B(0) = 0
                kept &= own.any(-1)
        return points[kept]

    def _edge(self, leaf: LeafSpectrum, tolerance: float, spacing) -> "_Edge":
        if self.cutoff is not None:
            return _Edge(lambda omega: np.linalg.norm(omega, axis=-1), self.cutoff)
        level = tail_radius(leaf, tolerance) / self.lengthscale_range[0]
        least = leaf.spectrum.scaled_radius(
            _steps(leaf, spacing)
        ).max()  # one frequency along each axis
        return _Edge(leaf.spectrum.scaled_radius, max(level, 1.000001 * least))


# under a budget every pair of points suffers from truncation, but few from aliasing, those at the
# longest lags: it may be this many times as large, and at most a share of this
_UNEVEN, _ALIASING, _LONGEST, _POOR = 300.0, 3e-2, 1.0, 0.1
_MOST_STEPS = 1e9  # along an axis, which are too many
_MOST_CUT = 0.9999  # of the variance; what is left is better than no grid
_FARTHER = 4.0  # correlations that fall like a power leave no budget for more


@dataclass(frozen=True)
class _Edge:
    """The region {reach(ω) ≤ level}."""

    radius: Callable[[Float[np.ndarray, "D d"]], Float[np.ndarray, "D"]]
    level: float


def _steps(leaf: LeafSpectrum, spacing: Float[np.ndarray, "d"]) -> Float[np.ndarray, "k k"]:
    """The first frequency of the lattice along each axis that a kernel sees."""
    return np.diag(spacing[list(leaf.dims)])


def _numbers(values: Float[np.ndarray, "k"]) -> str:
    return "(" + ", ".join(f"{value:.3g}" for value in values) + ")"
