"""Hyperparameters as one vector of coordinates that do not depend on units.

The coordinate u of a positive parameter is its logarithm, of one in an interval its logit, and of
an unconstrained one its value over its initial size. A change of units shifts the coordinates of
positive parameters and leaves every step the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from gp_orff.data.noise.heavy_tails import raw_deg_frees
from gp_orff.models.fitting.ranges import Range

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
                low = low.maximum(self._coordinate(self._expanded(self.floor))).minimum(origin)
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
        low, high = (torch.stack(end) for end in zip(*ends, strict=True))
        return low.amin(0), high.amax(0)

    def _coordinate(self, value: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        """u of a value."""
        if self.constraint is None:
            return value / self.scale
        low, high = self._bounds()
        if _finite(low) and _finite(high):
            return torch.logit((value - low) / (high - low), eps=1e-12)
        distance = value - low if _finite(low) else high - value
        return distance.clamp_min(torch.finfo(distance.dtype).tiny).log()

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
        if self.constraint is None:
            return torch.isfinite(values).all(-1)
        low, high = self._bounds()
        return ((values > low) & (values < high)).all(-1)

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
        return u

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
        return low + u.exp() if _finite(low) else high - u.exp()

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
            prior.log_prob(closure(owner)).sum()
            for module in self.modules
            for _, owner, prior, closure, _ in module.named_priors()
        ]
        return sum(terms, 0.0)


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
