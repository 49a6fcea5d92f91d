"""Hyperparameters as one vector, in coordinates in which units do not matter.

A positive parameter is optimised as its logarithm, one in an interval as its logit, an
unconstrained one in units of its starting size. A change of units then shifts the coordinates and
leaves every step the same.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from jaxtyping import Float
from torch import Tensor, nn

_FARTHEST, _SHORTEST = 16.0, math.log(100.0)
_FREQUENCY_SCALES = ("raw_lengthscale", "raw_mixture_means", "raw_mixture_scales")


@dataclass(frozen=True)
class Coordinate:
    """One parameter: its value from a coordinate u, and u from its value."""

    parameter: nn.Parameter  # the raw one
    constraint: Interval | None
    scale: float  # of a parameter without constraint
    moves_frequencies: bool  # a grid is built for a range of it

    def get(self) -> Float[Tensor, "k"]:
        raw = self.parameter.detach().double().flatten()
        if self.constraint is None:
            return raw / self.scale
        value = self.constraint.transform(self.parameter.detach()).double().flatten()
        low, high = self._bounds()
        if _finite(low) and _finite(high):
            return torch.logit((value - low) / (high - low), eps=1e-12)
        distance = value - low if _finite(low) else high - value
        return distance.clamp_min(torch.finfo(distance.dtype).tiny).log()

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
            u = self.get().requires_grad_()
            (other,) = torch.autograd.grad(self._value(u).sum(), u)  # ∂value/∂u
        return grad / slope.flatten() * other

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

    `longest` is the logarithm of how much longer than at the start a lengthscale may become.
    """

    def __init__(self, *modules: Module, longest: float = _SHORTEST):
        self.modules = modules
        self.parts = list(_coordinates(modules))
        origin = self.get()
        # a parameter that the data do not need ends this far from where it started
        self.low, self.high = origin - _FARTHEST, origin + _FARTHEST
        self.low[self.moves_frequencies] = (origin - _SHORTEST)[self.moves_frequencies]
        self.high[self.moves_frequencies] = (origin + longest)[self.moves_frequencies]

    def get(self) -> Float[np.ndarray, "k"]:
        return np.concatenate([[], *(part.get().cpu().numpy() for part in self.parts)])

    def set(self, u: Float[np.ndarray, "k"]) -> None:
        sizes = [part.parameter.numel() for part in self.parts]
        pieces = np.split(u, np.cumsum(sizes)[:-1])
        for part, own in zip(self.parts, pieces, strict=True):
            part.set(torch.from_numpy(own).to(part.parameter.device))

    @property
    def moves_frequencies(self) -> np.ndarray:
        """Which coordinates a grid is built for a range of."""
        flags = [np.full(p.parameter.numel(), p.moves_frequencies) for p in self.parts]
        return np.concatenate([np.zeros(0, bool), *flags])

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


def _coordinates(modules: tuple[Module, ...]) -> Iterator[Coordinate]:
    seen = set()
    for module in modules:
        for name, parameter, constraint in module.named_parameters_and_constraints():
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            size = parameter.detach().double().square().mean().sqrt().item()
            moves = name.rpartition(".")[2] in _FREQUENCY_SCALES
            yield Coordinate(parameter, constraint, size or 1.0, moves)
