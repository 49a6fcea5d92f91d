"""The trained hyperparameters as one vector of coordinates, with their search ranges."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy
import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from gp_orff.data.likelihoods import raw_deg_frees
from gp_orff.data.survey import Distances, Survey
from gp_orff.inference.price import FARTHEST, LONGEST, MANY, MOST_TRAINING, NEGLIGIBLE
from gp_orff.kernels.spectra import Range
from gp_orff.kernels.tree import Leaf, Term, leaf_dims, terms

# The search ranges of lengthscales and similar hyperparameters.
#
# 1. `parameter_ranges` visits every leaf of the kernel tree. It asks the spectrum of the leaf for
#    the quantities that set the frequencies, each with a lowest and a highest value.
# 2. `_distance_ranges` gives the spectrum two distances for each input. One is the shortest
#    distance between points, since the data resolve nothing shorter. The other is `LONGEST` times
#    the extent of the points, since the data cannot distinguish a longer lengthscale from a
#    constant.
# 3. `_dependencies` differentiates such a quantity to find the raw parameters that it depends on.
#    Only these parameters get the range.
# 4. A parameter that occurs in several leaves gets the ranges of all of them. The search uses their
#    union (`Coordinate._limits`).


def parameter_ranges(
    kernel: Kernel, distances: Distances | None, whole: Survey | None = None
) -> dict[nn.Parameter, tuple[Range, ...]]:
    """Return the search ranges of the trained parameters of a kernel that change frequencies.

    Ranges follow from the distances between points, and are practically unbounded without
    distances. If all data, `whole`, have so many values that the posterior uses features, depths of
    sources also get a lower limit. Features can then distinguish their fields from noise.
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


def _leaf_ranges(
    term: Term, leaf: Leaf, distances: Distances | None, whole: Survey | None
) -> list[Range]:
    """The ranges that the spectrum of a leaf requests; empty for other than a `Spectrum`."""
    density = leaf.spectrum
    if not hasattr(density, "frequency_parameters"):
        return []
    shortest, longest = _distance_ranges(term, leaf, distances)
    # A lattice of F features over a horizontal extent L reaches wavenumbers of about √(8F)/L. The
    # field of sources at depth h decays like exp(−h|k|). A lower limit of the depth therefore
    # bounds the variance beyond these wavenumbers, ∝ ∫ k² exp(−2h|k|) dk, to a hundredth. `extents`
    # contains the factor `LONGEST`.
    if term.factor.decays and whole and whole.num_points > MANY:
        _, extents = _distance_ranges(term, leaf, whole.distances)
        depths = scipy.special.gammainccinv(3, NEGLIGIBLE**2) / 2  # h|k| at this wavenumber
        resolved = depths * np.hypot(*extents[:2]) / LONGEST / math.sqrt(8 * MOST_TRAINING)
        shortest = np.maximum(shortest, resolved)
    return density.frequency_parameters(shortest, longest)


def _dependencies(value: Tensor, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that a value depends on."""
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
    # With many inputs, typical distances exceed the extent in each of them.
    apart = max(1.0, distances.root_mean_square(dims) / extent)
    longest = apart * np.where(longest > 0, longest, extent)
    # Points that coincide in an input have no shortest distance there. A positive lower limit keeps
    # the logarithm of the range finite.
    shortest = np.array([length if length > 0 else 1e-3 * extent for length in shortest])
    return np.minimum(shortest, longest), LONGEST * longest


# Hyperparameters as one vector of coordinates that do not depend on units.
#
# The coordinate u of a positive parameter is its logarithm. In an interval, u is the logit. Without
# a constraint, u is the value over its initial size. A change of units shifts the coordinates of
# positive parameters, and changes no step.
#
# Three representations of a parameter occur here:
#
#     raw parameter (gpytorch)  ⇄  value (after the constraint)  ⇄  coordinate u (of the search)
#
# gpytorch differentiates by the raw parameter, usually through a softplus. A softplus is linear for
# large values, so a search in raw parameters would depend on the units. `Coordinate.gradient`
# therefore converts the gradient: ∂/∂u = ∂/∂raw · (∂value/∂raw)⁻¹ · ∂value/∂u.


AT_BOUND = math.sqrt(torch.finfo(torch.float32).eps)  # a smaller distance counts as at the bound


Map = Callable[[Float[Tensor, "*b k"]], Float[Tensor, "*b k"]]


def _log(distance: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    return distance.clamp_min(torch.finfo(distance.dtype).tiny).log()


@dataclass(frozen=True)
class Coordinate:
    """One parameter with the coordinates u of its elements, and the map between u and values."""

    name: str
    parameter: nn.Parameter  # the raw parameter
    constraint: Interval | None
    scale: float  # the unit of u, for a parameter without constraint
    ranges: tuple[Range, ...] = ()  # search ranges of a parameter that changes frequencies
    floor: float | None = None  # the smallest value of a search; None for no limit

    @property
    def value(self) -> Float[Tensor, "k"]:
        """The value of the parameter, transformed by its constraint."""
        raw = self.parameter.detach()
        return (raw if self.constraint is None else self.constraint.transform(raw)).flatten()

    @property
    def stretch(self) -> float:
        """The change of u over the change of log frequency; 0 if u changes no frequencies."""
        return min((search_range.stretch for search_range in self.ranges), default=0.0)

    def get(self) -> Float[Tensor, "k"]:
        """The coordinates u of the present value."""
        return self.of_values(self.value.double())

    def bounds(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The lowest and highest u of the search. The present u is always between them."""
        origin = self.get()
        if not self.ranges:
            low = origin - FARTHEST
            if self.floor is not None:
                floor = self._expanded(self.floor)
                low = torch.where(self.allows_each(floor), self.of_values(floor), low)
                low = low.minimum(origin)
            return low, origin + FARTHEST
        low, high = self._limits()
        return low.minimum(origin), high.maximum(origin)

    def clip(self) -> None:
        """Move the value into the search ranges, if there are any."""
        if self.ranges:
            self.set(self.get().clamp(*self._limits()))

    def _limits(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The lowest and highest u of all search ranges."""
        ends = [
            [self.of_values(self._expanded(value)) for value in (limits.low, limits.high)]
            for limits in self.ranges
        ]
        # The union of all ranges: an intersection could be empty if leaves have different inputs.
        low, high = (torch.stack(end) for end in zip(*ends, strict=True))
        return low.amin(0), high.amax(0)

    @property
    def _maps(self) -> tuple[Map, Map, Map]:
        """The functions u → value, value → u, u → log|∂value/∂u|. u increases with the value."""
        low, high = self._bounds
        if low is None and high is None:
            scale = self.scale
            return (
                lambda u: u * scale,
                lambda v: v / scale,
                lambda u: torch.full_like(u, scale).log(),
            )
        if high is None:
            return lambda u: low + u.exp(), lambda v: _log(v - low), lambda u: u
        if low is None:
            return lambda u: high - (-u).exp(), lambda v: -_log(high - v), lambda u: -u
        width = high - low
        return (
            lambda u: low + width * torch.sigmoid(u),
            # The `eps` keeps a value at an end of its interval finite.
            lambda v: torch.logit((v - low) / width, eps=1e-12),
            lambda u: width.log() + logsigmoid(u) + logsigmoid(-u),
        )

    def of_values(self, value: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """The coordinates u of values."""
        return self._maps[1](value)

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
        # `values` computes in float64, and the inverse of the constraint in the parameter's dtype.
        value = self.values(u).reshape(shape).to(self.parameter)
        return value if self.constraint is None else self.constraint.inverse_transform(value)

    def on_device(self, u: Float[np.ndarray, "*b k"]) -> Float[Tensor, "*b k"]:
        """u as a tensor on the device of the parameter."""
        return torch.from_numpy(u).to(self.parameter.device)

    def values(self, u: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """The values at u."""
        return self._maps[0](u)

    def allows_each(self, values: Float[Tensor, "*b k"]) -> Bool[Tensor, "*b k"]:
        """Whether the constraint allows each value."""
        low, high = self._bounds
        allowed = torch.isfinite(values)
        allowed = allowed if low is None else allowed & (values > low)
        return allowed if high is None else allowed & (values < high)

    @property
    def is_logarithm(self) -> bool:
        """Whether u is the logarithm of a positive value."""
        low, high = self._bounds
        return high is None and low is not None and bool((low == 0).all())

    def log_slopes(self, u: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """log|∂value/∂u| at u."""
        return self._maps[2](u)

    def gradient(self) -> Float[Tensor, "k"]:
        """The gradient by u, from the gradient of the raw parameter."""
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
        return self.log_slopes(self.get()).exp()

    @cached_property
    def _bounds(self) -> tuple[Float[Tensor, "k"] | None, Float[Tensor, "k"] | None]:
        """The bounds of the constraint, None if infinite. They do not change during a search."""
        if self.constraint is None:
            return None, None
        bounds = self.constraint.lower_bound, self.constraint.upper_bound
        shape = self.parameter.shape
        low, high = (b.to(self.parameter).double().expand(shape).flatten() for b in bounds)
        return low if _finite(low) else None, high if _finite(high) else None


def _admissible(constraint: Interval | None, value: Tensor) -> Tensor:
    """The nearest value that a constraint allows, at a distance from its bounds."""
    if constraint is None:
        return value
    low, high = constraint.lower_bound.to(value), constraint.upper_bound.to(value)
    if _finite(low) and _finite(high):
        inside = 1e-2 * (high - low)
        return value.clamp(low + inside, high - inside)
    if _finite(high):
        return value.minimum(high - 1e-2 * high.abs())
    return value.maximum(low + 1e-2 * low.abs())


def set_trained(module: Module, name: str, value: float | Tensor) -> bool:
    """Set a trained parameter to the nearest value that its constraint allows.

    The value has a distance from the bounds. Returns whether the parameter is trained: a fixed one
    does not change.
    """
    raw = getattr(module, f"raw_{name}")
    if raw.requires_grad:
        value = torch.as_tensor(value).to(raw).expand_as(raw)
        setattr(module, name, _admissible(getattr(module, f"raw_{name}_constraint"), value))
    return raw.requires_grad


def _finite(bound: Tensor) -> bool:
    return bool(torch.isfinite(bound).all())


class Coordinates:
    """The trained hyperparameters of modules as one vector.

    Degrees of freedom are not included: EM learns them with the weights of observations.

    Args:
        modules: the kernel and the likelihoods.
        ranges: the search ranges of parameters that change frequencies, by raw parameter.
        floors: the smallest values of other parameters, by raw parameter.
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
        """The coordinates u of the present hyperparameters."""
        return np.concatenate([[], *(part.get().cpu().numpy() for part in self.parts)])

    def without_ranges(self) -> "Coordinates":
        """A copy without ranges, whose autograd graphs can be neither copied nor pickled."""
        plain = copy(self)
        plain.parts = [replace(part, ranges=()) for part in self.parts]
        return plain

    def clip(self) -> None:
        """Move the hyperparameters into their search ranges."""
        for part in self.parts:
            part.clip()

    def set(self, u: Float[np.ndarray, "k"]) -> None:
        """Set the hyperparameters to their values at u."""
        for part, piece in zip(self.parts, self.split(u), strict=True):
            part.set(part.on_device(piece))

    def raw(self, u: Float[np.ndarray, "S k"]) -> dict[nn.Parameter, Float[Tensor, "S ..."]]:
        """The raw parameters at S vectors of coordinates."""
        return {
            part.parameter: part.raw(part.on_device(piece))
            for part, piece in zip(self.parts, self.split(u), strict=True)
        }

    def by_parameter(
        self, values: Float[np.ndarray, "k"]
    ) -> dict[nn.Parameter, Float[np.ndarray, "..."]]:
        """Arrange one value for each coordinate by parameter, in the shape of the parameter."""
        return {
            part.parameter: piece.reshape(part.parameter.shape)
            for part, piece in zip(self.parts, self.split(values), strict=True)
        }

    def split(self, values: Shaped[np.ndarray, "*b k"]) -> list[Shaped[np.ndarray, "*b m"]]:
        """Split an array over coordinates into one array for each parameter."""
        ends = np.cumsum([part.parameter.numel() for part in self.parts])
        return np.split(values, ends, axis=-1)[:-1]

    @property
    def stretch(self) -> Float[np.ndarray, "k"]:
        """The change of each coordinate over the change of log frequency; 0 for no change."""
        stretches = [np.full(part.parameter.numel(), part.stretch) for part in self.parts]
        return np.concatenate([np.zeros(0), *stretches])

    def at_bounds(self, u: Float[np.ndarray, "k"]) -> Int[np.ndarray, "k"]:
        """−1 for a coordinate at its lower bound, 1 at its upper bound, otherwise 0."""
        return (u >= self.high - AT_BOUND).astype(int) - (u <= self.low + AT_BOUND).astype(int)

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
        """An objective and its gradient by u, at the present hyperparameters."""
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
    """Return the log density of S values of a parameter.

    It is −∞ outside the support of the prior, for which `log_prob` of torch raises an error.
    """
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
