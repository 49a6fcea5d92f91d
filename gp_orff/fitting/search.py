"""Maximise the evidence: coordinates of hyperparameters, their ranges, and the search."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import numpy as np
import scipy.optimize
import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from jaxtyping import Bool, Float, Int, Shaped
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from gp_orff.data.likelihoods import raw_deg_frees
from gp_orff.data.survey import Distances, Survey
from gp_orff.inference.representation import MOST_BESIDE_WAVES, MOST_TRAINING
from gp_orff.kernels.harmonic import HarmonicSpectrum
from gp_orff.kernels.learned import LearnedSpectrumKernel
from gp_orff.kernels.spectra import Range, Spectrum
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, terms

# The ranges in which lengthscales and similar hyperparameters are searched.
#
# 1. `parameter_ranges` visits every leaf of the kernel tree and asks its spectrum for the
#    quantities that set the frequencies, each with a lowest and a highest value.
# 2. `_distance_ranges` gives the spectrum two distances for each input: the shortest one between
#    points, since the data resolve nothing shorter, and `_LONGEST` times the extent of the points,
#    since the data cannot distinguish a much longer lengthscale from a constant.
# 3. `_dependencies` differentiates such a quantity to see which raw parameters it is computed from.
#    Only these parameters get the range, so the spectrum need not know how they are stored.
# 4. A parameter that occurs in several leaves gets the ranges of all of them, and the search uses
#    their union (`Coordinate._limits`).


_RESOLVED = 4.2  # the depth times |k| beyond which a hundredth of the variance lies
_LONGEST = 3.0  # distances in the data: the longest lengthscale of a search


def parameter_ranges(
    kernel: Kernel, distances: Distances | None, whole: Survey | None = None
) -> dict[nn.Parameter, tuple[Range, ...]]:
    """The search ranges of the trained parameters of a kernel tree that change frequencies.

    They follow from the distances between points, and are practically unbounded without distances.
    Where all data, the `whole`, have so many values that features serve, they are limited to
    sources of harmonic fields so deep that features can tell them from noise.
    """
    parameters = [p for p in kernel.parameters() if p.requires_grad]
    ranges: dict[nn.Parameter, tuple[Range, ...]] = {}
    with torch.enable_grad():
        for term in terms(kernel):
            for leaf in term.leaves:
                for leaf_range in _leaf_ranges(term, leaf, distances, whole):
                    for parameter in _dependencies(leaf_range.value, parameters):
                        ranges[parameter] = (*ranges.get(parameter, ()), leaf_range)
    return ranges


def check_extents(kernel: Kernel, distances: Distances | None) -> None:
    """Refuse positions that tell nothing of a spectrum that is to be learned.

    Raises:
        ValueError: none of the inputs of a `LearnedSpectrumKernel` with trained weights varies.
    """
    if distances is None:
        return
    for term in terms(kernel):
        for leaf in term.leaves:
            if not (
                isinstance(leaf.kernel, LearnedSpectrumKernel) and leaf.kernel.shape.requires_grad
            ):
                continue
            dims = leaf.columns(leaf_dims(term, leaf, distances.points.shape[-1]))
            if not distances.extent[list(dims)].any():
                raise ValueError(
                    "LearnedSpectrumKernel expects positions with an extent in at least one of its "
                    f"inputs, got readings with the same values in all of them (columns "
                    f"{list(dims)}), which tell nothing of a spectrum; give readings at several "
                    "places, or fix its weights by kernel.shape.requires_grad_(False)"
                )


def _leaf_ranges(
    term: Term, leaf: Leaf, distances: Distances | None, whole: Survey | None
) -> list[Range]:
    """The ranges that the spectrum of a leaf names; none for what is no `Spectrum`."""
    density = leaf.spectrum
    if not isinstance(density, Spectrum | HarmonicSpectrum):
        return []
    shortest, longest = _distance_ranges(term, leaf, distances)
    # A lattice of F features over a horizontal extent L reaches wavenumbers of about √(8F)/L. The
    # field of sources at depth h decays like exp(−h|k|), so a lower limit of the depth bounds the
    # variance at the wavenumbers that the lattice lacks. `extents` contains the factor `_LONGEST`.
    if isinstance(density, HarmonicSpectrum) and whole and whole.num_values > MOST_BESIDE_WAVES:
        _, extents = _distance_ranges(term, leaf, whole.distances)
        resolved = _RESOLVED * np.hypot(*extents[:2]) / _LONGEST / math.sqrt(8 * MOST_TRAINING)
        shortest = np.maximum(shortest, resolved)
    return density.frequency_parameters(shortest, longest)


def _dependencies(value: Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a value is computed from."""
    if not value.requires_grad:
        return []
    gradients = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    return [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]


def _distance_ranges(
    term: Term, leaf: Leaf, distances: Distances | None
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """The shortest and longest distances along each input of a leaf."""
    if distances is None:
        return np.full(1, 1e-300), np.full(1, 1e300)
    num_inputs = distances.points.shape[-1]
    dims = leaf.columns(leaf_dims(term, leaf, num_inputs))
    longest = distances.extent[list(dims)]
    extent = longest.max() if longest.max() > 0 else 1.0
    if leaf.kernel.ard_num_dims:
        shortest = [distances.shortest((dim,)) for dim in dims]
    else:
        shortest = [distances.shortest(dims)] * len(dims)
    apart = max(1.0, distances.root_mean_square(dims) / extent)  # many inputs: more than any extent
    longest = apart * np.where(longest > 0, longest, extent)
    # Points that coincide in an input have no shortest distance in it; the logarithm of the range
    # still has to be finite.
    shortest = np.array([length if length > 0 else 1e-3 * extent for length in shortest])
    return np.minimum(shortest, longest), _LONGEST * longest


# Hyperparameters as one vector of coordinates that do not depend on units.
#
# The coordinate u of a positive parameter is its logarithm, of one in an interval its logit, and of
# an unconstrained one its value over its initial size. A change of units shifts the coordinates of
# positive parameters and leaves every step the same.
#
# Three representations of a parameter occur here:
#
#     raw parameter (gpytorch)  ⇄  value (after the constraint)  ⇄  coordinate u (of the search)
#
# gpytorch differentiates in the raw parameter, usually through a softplus. The search does not use
# this scale, since a softplus is linear for large values and the result would depend on the units.
# `Coordinate.gradient` therefore converts: ∂/∂u = ∂/∂raw · (∂value/∂raw)⁻¹ · ∂value/∂u.


_FARTHEST = 16.0  # from its initial value, for a parameter without ranges
_AT_BOUND = 1e-3  # a coordinate closer to its bound counts as at the bound


@dataclass(frozen=True)
class Coordinate:
    """One parameter: its value from the coordinates u of its elements, and u from its value."""

    name: str
    parameter: nn.Parameter  # the raw one
    constraint: Interval | None
    scale: float  # the unit of u, for a parameter without constraint
    ranges: tuple[Range, ...] = ()  # search ranges of a parameter that moves frequencies
    floor: float | None = None  # the least value of a search, if there is one

    @property
    def value(self) -> Float[Tensor, "k"]:
        """The value of the parameter, transformed by its constraint."""
        raw = self.parameter.detach()
        return (raw if self.constraint is None else self.constraint.transform(raw)).flatten()

    @property
    def stretch(self) -> float:
        """How much faster than frequencies u may move; 0 if it does not move frequencies."""
        return min((search_range.stretch for search_range in self.ranges), default=0.0)

    def get(self) -> Float[Tensor, "k"]:
        """u of the present value."""
        return self._coordinate(self.value.double())

    def bounds(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The lowest and highest u of the search; the present u is always between them."""
        origin = self.get()
        if not self.ranges:
            low = origin - _FARTHEST
            if self.floor is not None:
                floor = self._expanded(self.floor)
                low = torch.where(self.allows_each(floor), self._coordinate(floor), low)
                low = low.minimum(origin)
            return low, origin + _FARTHEST
        low, high = self._limits()
        return low.minimum(origin), high.maximum(origin)

    def clip(self) -> None:
        """Move the value into the search ranges, if there are any."""
        if self.ranges:
            self.set(self.get().clamp(*self._limits()))

    def _limits(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The lowest and highest u of all search ranges."""
        ends = [
            [self._coordinate(self._expanded(value)) for value in (limits.low, limits.high)]
            for limits in self.ranges
        ]
        # The union of all ranges: an intersection could be empty where leaves differ in their
        # distances.
        low, high = (torch.stack(end) for end in zip(*ends, strict=True))
        return low.amin(0), high.amax(0)

    def _coordinate(self, value: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        """u of a value."""
        if self.constraint is None:
            return value / self.scale
        low, high = self._bounds()
        if _finite(low) and _finite(high):
            # The `eps` keeps a value at an end of its interval finite.
            return torch.logit((value - low) / (high - low), eps=1e-12)
        distance = value - low if _finite(low) else high - value
        log = distance.clamp_min(torch.finfo(distance.dtype).tiny).log()
        return log if _finite(low) else -log  # u increases with the value in every case

    def _expanded(self, value: float | Tensor) -> Float[Tensor, "k"]:
        """A value expanded to every element of the parameter."""
        value = torch.as_tensor(value).to(self.parameter).double()
        return value.expand_as(self.parameter).flatten()

    def set(self, u: Float[Tensor, "k"]) -> None:
        """Set the parameter to the value at u."""
        self.parameter.data.copy_(self.raw(u))

    def raw(self, u: Float[Tensor, "*b k"]) -> Float[Tensor, "..."]:
        """The raw parameter at u, in its shape."""
        shape = (*u.shape[:-1], *self.parameter.shape)
        # The inverse of the constraint runs in the dtype of the parameter, after the step in
        # float64.
        value = self.values(u).reshape(shape).to(self.parameter)
        return value if self.constraint is None else self.constraint.inverse_transform(value)

    def values(self, u: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """The values at u."""
        return u * self.scale if self.constraint is None else self._value(u)

    def of_values(self, values: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """u of values."""
        return self._coordinate(values)

    def allows(self, values: Float[Tensor, "*b k"]) -> Bool[Tensor, "*b"]:
        """Whether the constraint allows values."""
        return self.allows_each(values).all(-1)

    def allows_each(self, values: Float[Tensor, "*b k"]) -> Bool[Tensor, "*b k"]:
        """Whether the constraint allows each value."""
        if self.constraint is None:
            return torch.isfinite(values)
        low, high = self._bounds()
        return (values > low) & (values < high)

    @property
    def is_logarithm(self) -> bool:
        """Whether u is the logarithm of a positive value."""
        if self.constraint is None:
            return False
        low, high = self._bounds()
        return not _finite(high) and bool((low == 0).all())

    def log_slopes(self, u: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """log|∂value/∂u| at u."""
        if self.constraint is None:
            return torch.full_like(u, self.scale).log()
        low, high = self._bounds()
        if _finite(low) and _finite(high):
            return (high - low).log() + logsigmoid(u) + logsigmoid(-u)
        return u if _finite(low) else -u

    def gradient(self) -> Float[Tensor, "k"]:
        """The gradient in u, from the gradient of the raw parameter."""
        grad = self.parameter.grad
        if grad is None:
            return torch.zeros(self.parameter.numel(), dtype=torch.float64)
        grad = grad.double().flatten()
        if self.constraint is None:
            return grad * self.scale
        with torch.enable_grad():
            raw = self.parameter.detach().double().requires_grad_()
            value = self.constraint.transform(raw)
            (slope,) = torch.autograd.grad(value.sum(), raw)  # ∂value/∂raw
        return grad / slope.flatten() * self.slope()

    def slope(self) -> Float[Tensor, "k"]:
        """∂value/∂u."""
        u = self.get()
        if self.constraint is None:
            return torch.full_like(u, self.scale)
        with torch.enable_grad():
            u = u.requires_grad_()
            return torch.autograd.grad(self._value(u).sum(), u)[0]

    def _value(self, u: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        low, high = self._bounds()
        if _finite(low) and _finite(high):
            return low + (high - low) * torch.sigmoid(u)
        return low + u.exp() if _finite(low) else high - (-u).exp()

    def _bounds(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        bounds = self.constraint.lower_bound, self.constraint.upper_bound
        shape = self.parameter.shape
        return tuple(b.to(self.parameter).double().expand(shape).flatten() for b in bounds)


def admissible(constraint: Interval | None, value: Tensor) -> Tensor:
    """The nearest value that a constraint allows, away from its bounds."""
    if constraint is None:
        return value
    low, high = constraint.lower_bound.to(value), constraint.upper_bound.to(value)
    if _finite(low) and _finite(high):
        inside = 1e-2 * (high - low)
        return value.clamp(low + inside, high - inside)
    if _finite(high):
        return value.minimum(high - 1e-2 * high.abs())
    return value.maximum(low + 1e-2 * low.abs())


def _finite(bound: Tensor) -> bool:
    return bool(torch.isfinite(bound).all())


class Coordinates:
    """The trainable hyperparameters of `modules` as one vector, but for degrees of freedom, which
    follow with the weights of readings.

    `ranges` gives the search ranges of those that move frequencies, `floors` the least values of
    others.
    """

    def __init__(
        self,
        *modules: Module,
        ranges: Mapping[nn.Parameter, tuple[Range, ...]] | None = None,
        floors: Mapping[nn.Parameter, float] | None = None,
    ):
        self.modules = modules
        self.parts = list(_coordinates(modules, ranges or {}, floors or {}))
        bounds = [part.bounds() for part in self.parts]
        self.low, self.high = (
            np.concatenate([[], *(pair[end].cpu().numpy() for pair in bounds)]) for end in (0, 1)
        )

    def get(self) -> Float[np.ndarray, "k"]:
        """u of the present hyperparameters."""
        return np.concatenate([[], *(part.get().cpu().numpy() for part in self.parts)])

    def clip(self) -> None:
        """Move the hyperparameters into their search ranges."""
        for part in self.parts:
            part.clip()

    def set(self, u: Float[np.ndarray, "k"]) -> None:
        """Set the hyperparameters to their values at u."""
        for part, piece in zip(self.parts, self.split(u), strict=True):
            part.set(torch.from_numpy(piece).to(part.parameter.device))

    def raw(self, u: Float[np.ndarray, "S k"]) -> dict[nn.Parameter, Float[Tensor, "S ..."]]:
        """The raw parameters at a batch of coordinates."""
        return {
            part.parameter: part.raw(torch.from_numpy(piece).to(part.parameter.device))
            for part, piece in zip(self.parts, self.split(u), strict=True)
        }

    def by_parameter(
        self, values: Float[np.ndarray, "k"]
    ) -> dict[nn.Parameter, Float[np.ndarray, "..."]]:
        """One number for each coordinate, by parameter and in its shape."""
        return {
            part.parameter: piece.reshape(part.parameter.shape)
            for part, piece in zip(self.parts, self.split(values), strict=True)
        }

    def split(self, values: Shaped[np.ndarray, "*b k"]) -> list[Shaped[np.ndarray, "*b m"]]:
        """Split into one array for each parameter."""
        ends = np.cumsum([part.parameter.numel() for part in self.parts])
        return np.split(values, ends, axis=-1)[:-1]

    @property
    def stretch(self) -> Float[np.ndarray, "k"]:
        """How much faster than frequencies each coordinate may move, in logarithms; 0 for those
        that do not move frequencies."""
        stretches = [np.full(part.parameter.numel(), part.stretch) for part in self.parts]
        return np.concatenate([np.zeros(0), *stretches])

    def at_bounds(self, u: Float[np.ndarray, "k"]) -> Int[np.ndarray, "k"]:
        """−1 where a coordinate is at its lower bound, 1 at its upper bound, else 0."""
        return (u >= self.high - _AT_BOUND).astype(int) - (u <= self.low + _AT_BOUND).astype(int)

    def reached(self, names: Mapping[str, nn.Parameter]) -> list[str]:
        """A sentence for each hyperparameter that is at a bound of the search."""
        labels = {parameter: name for name, parameter in names.items()}
        bounds, sentences = self.split(self.at_bounds(self.get())), []
        for part, signs in zip(self.parts, bounds, strict=True):
            for value, sign in zip(part.value.tolist(), signs, strict=True):
                if sign:
                    bound = "upper" if sign > 0 else "lower"
                    sentences.append(
                        f"{labels[part.parameter]} = {value:.4g} is at the {bound} bound of the "
                        "search: the data do not determine it"
                    )
        return sentences

    def slopes(self) -> Float[np.ndarray, "k"]:
        """∂value/∂u of each coordinate."""
        return np.concatenate([[], *(part.slope().cpu().numpy() for part in self.parts)])

    def value_and_gradient(
        self, objective: Callable[[], Float[Tensor, ""]]
    ) -> tuple[float, Float[np.ndarray, "k"]]:
        """An objective and its gradient in u, at the present hyperparameters."""
        for part in self.parts:
            part.parameter.grad = None
        value = objective()
        if value.requires_grad:
            value.backward()
        gradient = np.concatenate([[], *(part.gradient().cpu().numpy() for part in self.parts)])
        for part in self.parts:
            part.parameter.grad = None
        return value.item(), gradient

    def log_prior(self) -> Float[Tensor, ""] | float:
        """The log density of all priors registered on the modules."""
        terms = [
            log_density(prior, closure(owner).unsqueeze(0)).squeeze(0)
            for module in self.modules
            for _, owner, prior, closure, _ in module.named_priors()
        ]
        return sum(terms, 0.0)


def log_density(prior: Prior, values: Float[Tensor, "S ..."]) -> Float[Tensor, "S"]:
    """log p of each of S values; −∞ outside the support of the prior, where torch raises."""
    try:
        inside = prior.support.check(prior.transform(values)).reshape(len(values), -1).all(-1)
    except NotImplementedError:  # a prior that does not define its support
        inside = torch.ones(len(values), dtype=torch.bool, device=values.device)
    logs = values.new_full((len(values),), -math.inf)
    if inside.any():
        inner = prior.log_prob(values[inside]).reshape(int(inside.sum()), -1).sum(-1)
        logs = logs.masked_scatter(inside, inner.to(logs))
    return logs


def _coordinates(
    modules: tuple[Module, ...],
    ranges: Mapping[nn.Parameter, tuple[Range, ...]],
    floors: Mapping[nn.Parameter, float],
) -> Iterator[Coordinate]:
    seen = set().union(*map(raw_deg_frees, modules))
    for module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            size = parameter.detach().double().square().mean().sqrt().item() or 1.0
            limits = ranges.get(parameter, ()), floors.get(parameter)
            yield Coordinate(name, parameter, constraint, size, *limits)


# Evidence maximisation: hyperparameters from the marginal likelihood of observations.
#
# One call of `Search.run` proceeds as follows.
#
# 1. `TrustRegion` fixes the centre u₀, where the run starts, and limits how far the frequencies may
#    move from it. A frequency grid is chosen for the hyperparameters at u₀; far away its truncation
#    error is not under control, so the caller needs a new grid there. The search variable is t,
#    which is unbounded: u = u₀ + w tanh(t/w) cannot leave the region, whatever step BFGS takes.
# 2. `Run.ascend` runs BFGS in the coordinates that are free. BFGS knows no bounds: u is clipped at
#    its bounds, and the slope ∂u/∂t is zero there.
# 3. The ascent ends, after an iteration, when the gain and the expected gain of the next step are
#    both below `nats`, when a coordinate has just met a bound, or at the edge of the trust region.
#    `Run.value_and_gradient` remembers the best point of all evaluations, not the last one.
# 4. The active set is updated as in projected-gradient methods: a coordinate at a bound whose
#    gradient points outwards is fixed, and one whose gradient points inwards is released. The
#    ascent is repeated from the best point while this set changes or a bound interrupted it,
#    provided that the last ascent gained `nats` or more.
# 5. The inverse Hessian is stored in u, not in t, because the next run has another centre. It
#    starts there with the curvature that this run has learned.
#
# Values are in nats per observed number, so that runs on subsets of different sizes can be compared
# and the stored Hessian serves all of them. Thresholds such as `nats` are totals; hence the factors
# `num_values` below.


# A hundredth of a nat changes no posterior visibly: a factor of 1.01 in the marginal likelihood.
_NATS = 0.01  # in total: a step that gains less ends the search, if the next one promises less too
_EDGE = 0.9  # of the trust region, in its logarithm: beyond, the search needs another grid
_PER_ITERATION, _EXTRA = 2, 8  # evaluations; a line search across a bound takes many
_MUCH = 1.0  # nats still promised at the end of a search, of which a warning tells
Report = Callable[[float], None]


class SearchWarning(UserWarning):
    """A search for hyperparameters ended away from a maximum of the evidence.

    Example:
        A search that may take one step alone:

        >>> import numpy as np, torch, warnings
        >>> from gpytorch.kernels import RBFKernel
        >>> from gp_orff.fitting.search import Coordinates
        >>> from gp_orff.fitting.search import Search, SearchWarning
        >>> kernel = RBFKernel().double()
        >>> search = Search(Coordinates(kernel))
        >>> peak = lambda: -50 * (kernel.lengthscale.log() - 2).square().sum()
        >>> _ = search.run(peak, num_values=1, iterations=1)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always", SearchWarning)
        ...     search.warn()
        >>> caught[0].category.__name__
        'SearchWarning'
    """


@dataclass
class Search:
    """The state of a search for the largest evidence; each `run` goes on from the last one."""

    coordinates: Coordinates
    inverse_hessian: Float[np.ndarray, "k k"] | None = None
    informed_by: tuple[float, int] | None = None  # numbers and features of the grid it is from
    evaluations: int = 0
    failures: list[str] = field(default_factory=list)  # errors of evaluations, whose steps were cut
    value: float = -np.inf  # nats per observed number
    gained: float = np.inf  # nats, in the last run if by Fisher scoring
    expected_gain: float = 0.0  # nats that another step promised when the last run ended
    settled: bool = True  # whether no lengthscale has reached the edge of its trust region

    def run(
        self,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        *,
        trust_factor: float | None = None,
        nats: float = _NATS,
        iterations: int = 60,
        evaluations: int | None = None,
        report: Report = lambda value: None,
    ) -> "Search":
        """Maximise an objective, in total nats, by BFGS in the coordinates of `Coordinates`.

        `trust_factor` limits the factor by which frequencies may move from where the run starts;
        the run ends when a coordinate reaches that edge. A coordinate that reaches a bound is held
        there while the others go on, and released when the evidence rises inwards. A run also ends
        with a step that gains less than `nats` in total if the quadratic model of `Curvature`
        promises no more of the next one, or after `iterations` or so many `evaluations`, by default
        two an iteration and a few. `report` is called with the nats per number of each evaluation.
        """
        region = TrustRegion.of(self.coordinates, trust_factor)
        run = Run(self, region, objective, num_values, report)
        # t = 0 is u₀, and `run.u` is u₀ until an evaluation succeeds.
        t = np.zeros_like(run.u)
        free = np.ones(len(t), dtype=bool)
        if not len(t):
            run.value_and_gradient(t)
        run.evaluations_left = evaluations or _PER_ITERATION * iterations + _EXTRA
        while free.any() and iterations > 0:
            before = run.value
            iterations -= run.ascend(t, free, nats, iterations)
            t = region.inverse(run.u)
            # The sign of a bound (−1 or 1) times the gradient: positive if the evidence rises
            # outwards.
            outward = self.coordinates.at_bounds(run.u) * run.gradient
            held, released = free & (outward > 0), ~free & (outward < 0)
            changed = run.clipped or (held | released).any()
            if not changed or (run.value - before) * num_values < nats:
                break
            free = (free & ~held) | released
        self.settled, self.value, self.gained = not region.at_edge(t), run.value, np.inf
        self.expected_gain = run.expected_gain
        self.coordinates.set(run.u)
        return self

    def warn(self) -> None:
        """Warn if the last run ended away from a maximum."""
        if self.expected_gain > _MUCH:
            warnings.warn(
                f"the search for hyperparameters ended where another step promised "
                f"{self.expected_gain:.2g} nats of log evidence; call fit again with "
                "warm_start=True, which goes on from there",
                SearchWarning,
                stacklevel=2,
            )

    @property
    def reached(self) -> dict[str, object]:
        """Where the search is, as plain values."""
        names = ("inverse_hessian", "evaluations", "failures", "value", "settled")
        names += ("gained", "expected_gain", "informed_by")
        return {"u": self.coordinates.get(), **{name: getattr(self, name) for name in names}}

    def go_to(self, reached: Mapping[str, object]) -> None:
        """Go to where another search was, as told by its `reached`."""
        for name, value in reached.items():
            if name == "u":
                self.coordinates.set(value)
            else:
                setattr(self, name, copy(value))


@dataclass(frozen=True)
class TrustRegion:
    """The map from unbounded t to coordinates u, clipped at the bounds of u: u = u₀ + w tanh(t / w)
    for coordinates that move frequencies, where w is the logarithm of the largest factor, and
    u = u₀ + t for others."""

    coordinates: Coordinates
    center: Float[np.ndarray, "k"]  # u₀
    bounded: Bool[np.ndarray, "k"]
    width: Float[np.ndarray, "k"]  # w

    @classmethod
    def of(cls, coordinates: Coordinates, trust_factor: float | None) -> "TrustRegion":
        stretch = coordinates.stretch
        bounded = (stretch > 0) & (trust_factor is not None)
        width = np.where(bounded, stretch * np.log(trust_factor or np.e), 1.0)
        return cls(coordinates, coordinates.get(), bounded, width)

    def u(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """u(t)."""
        return np.clip(self._unclipped(t), self.coordinates.low, self.coordinates.high)

    def slope(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """∂u/∂t."""
        # A clipped coordinate does not move with t, so its slope is zero. Without this the gradient
        # would promise BFGS an increase that no step can deliver.
        slope = np.where(self.bounded, 1 - np.tanh(t / self.width) ** 2, 1.0)
        return np.where(self.u(t) == self._unclipped(t), slope, 0.0)

    def inverse(self, u: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        """A t with u(t) = u, if u is within the region."""
        step = u - self.center
        # At the edge of the region itself arctanh would be infinite.
        ratio = np.clip(step / self.width, -1 + 1e-9, 1 - 1e-9)
        return np.where(self.bounded, self.width * np.arctanh(ratio), step)

    def at_edge(self, t: Float[np.ndarray, "k"]) -> bool:
        """Whether a coordinate is at the edge of the trust region, and not at a bound."""
        inside = self.bounded & (self.coordinates.at_bounds(self.u(t)) == 0)
        return bool((np.abs(np.tanh(t / self.width))[inside] > _EDGE).any())

    def _unclipped(self, t: Float[np.ndarray, "k"]) -> Float[np.ndarray, "k"]:
        return self.center + np.where(self.bounded, self.width * np.tanh(t / self.width), t)


class Curvature:
    """The inverse Hessian of an objective in nats, estimated by BFGS from points and gradients.

    It begins at the identity, a curvature of one nat for each coordinate squared: as these are
    logarithms of hyperparameters, few data sets tell less of one. The inverse Hessian of the
    optimiser itself does not serve here. It begins where the first step was, however short.
    """

    def __init__(self, size: int):
        self.inverse = np.eye(size)
        self.last: tuple[np.ndarray, np.ndarray] | None = None

    def expected_gain(self, t: Float[np.ndarray, "m"], gradient: Float[np.ndarray, "m"]) -> float:
        """½ gᵀ H⁻¹ g, the nats that Newton's step from t promises, where the gradient is g."""
        # The update of Nocedal & Wright (2006, equation 6.17) with the objective −f: the change of
        # its gradient is g_last − g. It needs sᵀy > 0, and a line search that was cut short need
        # not give it.
        if self.last is not None:
            step, change = t - self.last[0], self.last[1] - gradient
            if (product := step @ change) > 0:
                left = np.eye(len(t)) - np.outer(step, change) / product
                self.inverse = left @ self.inverse @ left.T + np.outer(step, step) / product
        self.last = t.copy(), gradient
        return float(0.5 * gradient @ self.inverse @ gradient)


class _NoEvaluationsLeft(Exception):
    """Ends the iterations of an optimiser."""


class Run:
    """One run of a search, with the best value so far, its coordinates u and its gradient in u."""

    def __init__(
        self,
        search: Search,
        region: TrustRegion,
        objective: Callable[[], Float[Tensor, ""]],
        num_values: int,
        report: Report,
    ):
        self.search, self.region = search, region
        self.objective, self.num_values, self.report = objective, num_values, report
        self.value, self.u, self.gradient = -np.inf, region.center, np.zeros_like(region.center)
        self.evaluations_left, self.expected_gain = 0, 0.0
        self.clipped = False  # whether the last ascent ended where a coordinate met a bound

    def value_and_gradient(self, t: Float[np.ndarray, "k"]) -> tuple[float, Float[np.ndarray, "k"]]:
        """Nats per number, and their gradient in t; a failed evaluation gets a low value."""
        # The first evaluation is always permitted: without it there would be no result.
        if self.evaluations_left <= 0 and self.value > -np.inf:
            raise _NoEvaluationsLeft
        self.evaluations_left -= 1
        u, search = self.region.u(t), self.search
        search.coordinates.set(u)
        search.evaluations += 1
        try:
            with warnings.catch_warnings():
                # a step is too long if it makes the covariance singular; the first one is none
                action = "error" if self.value > -np.inf else "ignore"
                warnings.simplefilter(action, NumericalWarning)
                value, gradient = search.coordinates.value_and_gradient(self.objective)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError, NumericalWarning) as error:
            if self.value == -np.inf:  # the first one: no step was too long
                raise
            search.failures.append(str(error))
            value, gradient = -np.inf, np.zeros_like(t)
        # A point that fails gets a value far below the best one, and no gradient: a line search
        # then interpolates towards the last point. An infinite loss would give it NaN.
        value, gradient = value / self.num_values, np.nan_to_num(gradient) / self.num_values
        if not np.isfinite(value):
            value = min(self.value, 0.0) - 1e3
        if value > self.value:
            self.value, self.u, self.gradient = value, u, gradient
        self.report(value)
        return value, gradient * self.region.slope(t)

    def ascend(
        self,
        t: Float[np.ndarray, "k"],
        free: Bool[np.ndarray, "k"],
        nats: float,
        iterations: int,
    ) -> int:
        """Run BFGS in the free coordinates from t; the number of iterations it took."""
        previous, at_bounds = [np.inf], self._at_bounds(t)
        gradients: dict[bytes, np.ndarray] = {}  # in total nats, of points
        curvature, self.clipped = Curvature(int(free.sum())), False

        def full(free_t: np.ndarray) -> np.ndarray:
            vector = t.copy()
            vector[free] = free_t
            return vector

        def loss(free_t: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = self.value_and_gradient(full(free_t))
            gradients[free_t.tobytes()] = self.num_values * gradient[free]
            return -value, -gradient[free]

        def stop(intermediate_result) -> None:
            reached, new = intermediate_result.x, full(intermediate_result.x)
            gain = (previous[0] - intermediate_result.fun) * self.num_values
            previous[0] = intermediate_result.fun
            # The optimiser does not pass its gradient to the callback; it has evaluated it at this
            # point.
            self.expected_gain = curvature.expected_gain(reached, gradients[reached.tobytes()])
            self.clipped = bool((self._at_bounds(new) & ~at_bounds & free).any())
            small = max(gain, self.expected_gain) < nats
            if small or self.clipped or self.region.at_edge(new):
                raise StopIteration

        options = {
            "maxiter": iterations,
            # ½ gᵀg = nats under the identity that `Curvature` begins with, spread evenly over all
            # coordinates: `gtol` limits the largest element.
            "gtol": np.sqrt(2 * nats / free.sum()) / self.num_values,  # as of the first curvature
            "hess_inv0": self._inverse_hessian(t, free),
        }
        try:
            result = scipy.optimize.minimize(
                loss, t[free], jac=True, method="BFGS", callback=stop, options=options
            )
        except _NoEvaluationsLeft:
            return iterations
        self._store_inverse_hessian(result, full(result.x), free)
        return max(result.nit, 1)

    def _at_bounds(self, t: Float[np.ndarray, "k"]) -> Bool[np.ndarray, "k"]:
        return self.search.coordinates.at_bounds(self.region.u(t)) != 0

    def _inverse_hessian(
        self, t: Float[np.ndarray, "k"], free: Bool[np.ndarray, "k"]
    ) -> Float[np.ndarray, "m m"] | None:
        """The inverse Hessian of the last run, in the free coordinates of t."""
        if self.search.inverse_hessian is None:
            return None
        slope = self.region.slope(t)
        # The inverse Hessian transforms like a covariance: H_t⁻¹ = H_u⁻¹ / (s sᵀ) with s = ∂u/∂t.
        slope = np.where(slope > 0, slope, 1.0)
        return _positive((self.search.inverse_hessian / np.outer(slope, slope))[np.ix_(free, free)])

    def _store_inverse_hessian(
        self, result, t: Float[np.ndarray, "k"], free: Bool[np.ndarray, "k"]
    ) -> None:
        """Keep the inverse Hessian in u for the next run, if it is positive definite."""
        slope = self.region.slope(t)[free]
        inverse = _positive(result.hess_inv * np.outer(slope, slope))
        if result.nit and inverse is not None:
            last = self.search.inverse_hessian
            # Coordinates that were fixed keep their curvature of before, but lose their
            # correlations with those that moved: a mixture of old and new rows need not be positive
            # definite.
            full = np.eye(len(free)) if last is None else last.copy()
            full[free, :] = full[:, free] = 0.0
            full[np.ix_(free, free)] = inverse
            self.search.inverse_hessian = full


def _positive(matrix: Float[np.ndarray, "m m"]) -> Float[np.ndarray, "m m"] | None:
    """The symmetric part of a matrix if it is positive definite beyond rounding, else None."""
    matrix = 0.5 * (matrix + matrix.T)
    if not np.isfinite(matrix).all():
        return None
    eigenvalues = np.linalg.eigvalsh(matrix)
    return matrix if eigenvalues[0] > 1e-12 * eigenvalues[-1] else None
