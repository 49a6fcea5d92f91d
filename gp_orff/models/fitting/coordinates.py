"""Hyperparameters as one vector, in coordinates in which units do not matter.

A positive parameter is optimised as its logarithm, one in an interval as its logit, an
unconstrained one in units of its starting size. A change of units then shifts the coordinates and
leaves every step the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from gp_orff.models.fitting.ranges import Range

_FARTHEST = 16.0  # from where it started, for a parameter whose size the data may not tell
_AT_BOUND = 1e-3  # of a coordinate: closer to its bound it is there


@dataclass(frozen=True)
class Coordinate:
    """One parameter: its value from a coordinate u, and u from its value."""

    name: str
    parameter: nn.Parameter  # the raw one
    constraint: Interval | None
    scale: float  # of a parameter without constraint
    ranges: tuple[Range, ...] = ()  # of a parameter that moves frequencies

    @property
    def value(self) -> Float[Tensor, "k"]:
        """As the user sees it."""
        raw = self.parameter.detach()
        return (raw if self.constraint is None else self.constraint.transform(raw)).flatten()

    @property
    def stretch(self) -> float:
        """How much faster than frequencies it may move; 0 where it does not move them."""
        return min((own.stretch for own in self.ranges), default=0.0)

    def get(self) -> Float[Tensor, "k"]:
        return self._place(self.value.double())

    def bounds(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The values of u that are sought; where it stands is always among them."""
        origin = self.get()
        if not self.ranges:
            return origin - _FARTHEST, origin + _FARTHEST
        places = [
            [self._place(self._like(value)) for value in (own.low, own.high)] for own in self.ranges
        ]
        low, high = (torch.stack(side) for side in zip(*places, strict=True))
        return low.amin(0).minimum(origin), high.amax(0).maximum(origin)

    def _place(self, value: Float[Tensor, "k"]) -> Float[Tensor, "k"]:
        """u of a value."""
        if self.constraint is None:
            return value / self.scale
        low, high = self._bounds()
        if _finite(low) and _finite(high):
            return torch.logit((value - low) / (high - low), eps=1e-12)
        distance = value - low if _finite(low) else high - value
        return distance.clamp_min(torch.finfo(distance.dtype).tiny).log()

    def _like(self, value: float | Tensor) -> Float[Tensor, "k"]:
        """A value for every element."""
        value = torch.as_tensor(value).to(self.parameter).double()
        return value.expand_as(self.parameter).flatten()

    def set(self, u: Float[Tensor, "k"]) -> None:
        if self.constraint is None:
            raw = u * self.scale
        else:
            value = self._value(u).reshape(self.parameter.shape).to(self.parameter)
            raw = self.constraint.inverse_transform(value)
        self.parameter.data.copy_(raw.reshape(self.parameter.shape))

    def gradient(self) -> Float[Tensor, "k"]:
        """∂/∂u from the raw parameter's gradient."""
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
    """The nearest value that a constraint allows, not on its edge."""
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
    """The trainable hyperparameters of some modules as one vector.

    `ranges` has those that move frequencies, and the values of them that are sought.
    """

    def __init__(
        self,
        *modules: Module,
        ranges: Mapping[nn.Parameter, tuple[Range, ...]] | None = None,
    ):
        self.modules = modules
        self.parts = list(_coordinates(modules, ranges or {}))
        bounds = [part.bounds() for part in self.parts]
        self.low, self.high = (
            np.concatenate([[], *(own[side].cpu().numpy() for own in bounds)]) for side in (0, 1)
        )

    def get(self) -> Float[np.ndarray, "k"]:
        return np.concatenate([[], *(part.get().cpu().numpy() for part in self.parts)])

    def set(self, u: Float[np.ndarray, "k"]) -> None:
        for part, own in zip(self.parts, self._pieces(u), strict=True):
            part.set(torch.from_numpy(own).to(part.parameter.device))

    def by_parameter(
        self, values: Float[np.ndarray, "k"]
    ) -> dict[nn.Parameter, Float[np.ndarray, "..."]]:
        """Numbers of all coordinates, in the shapes of the parameters."""
        return {
            part.parameter: own.reshape(part.parameter.shape)
            for part, own in zip(self.parts, self._pieces(values), strict=True)
        }

    def _pieces(self, values: Shaped[np.ndarray, "k"]) -> list[Shaped[np.ndarray, "..."]]:
        """What belongs to each parameter."""
        ends = np.cumsum([part.parameter.numel() for part in self.parts])
        return np.split(values, ends)[:-1]

    @property
    def stretch(self) -> Float[np.ndarray, "k"]:
        """How much faster than frequencies each moves, in logarithms; 0 for what does not move
        them."""
        flags = [np.full(part.parameter.numel(), part.stretch) for part in self.parts]
        return np.concatenate([np.zeros(0), *flags])

    def at_bounds(self, u: Float[np.ndarray, "k"]) -> Int[np.ndarray, "k"]:
        """−1 or 1 where a coordinate is as low or as high as it is sought."""
        return (u >= self.high - _AT_BOUND).astype(int) - (u <= self.low + _AT_BOUND).astype(int)

    def reached(self, names: Mapping[str, nn.Parameter]) -> list[str]:
        """What ended at a bound, in words."""
        called = {parameter: name for name, parameter in names.items()}
        sides, found = self._pieces(self.at_bounds(self.get())), []
        for part, side in zip(self.parts, sides, strict=True):
            for value, at in zip(part.value.tolist(), side, strict=True):
                if at:
                    edge = "largest" if at > 0 else "smallest"
                    found.append(
                        f"{called[part.parameter]} = {value:.4g} is the {edge} that was sought: "
                        "the data do not tell it"
                    )
        return found

    def slopes(self) -> Float[np.ndarray, "k"]:
        """∂value/∂u of each."""
        return np.concatenate([[], *(part.slope().cpu().numpy() for part in self.parts)])

    def value_and_gradient(
        self, objective: Callable[[], Float[Tensor, ""]]
    ) -> tuple[float, Float[np.ndarray, "k"]]:
        """An objective and its gradient at the present hyperparameters."""
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
    modules: tuple[Module, ...], ranges: Mapping[nn.Parameter, tuple[Range, ...]]
) -> Iterator[Coordinate]:
    seen = set()
    for module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            size = parameter.detach().double().square().mean().sqrt().item() or 1.0
            yield Coordinate(name, parameter, constraint, size, ranges.get(parameter, ()))
