"""The degrees of freedom and the scale of Student-t noise, learned with the weights of readings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import scipy.optimize
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.data.noise.covariances import noise_of
from gp_orff.data.noise.heavy_tails import HeavyTails
from gp_orff.inference.robust import Distances, StudentTNoise
from gp_orff.models.fitting.coordinates import Coordinate
from gp_orff.models.fitting.starting_values import scale_noise

_FARTHEST = 7.0  # of the coordinate of ν: with the default constraint, ν up to 1e3
_LEAST = 2.5  # ν of a search: below, bulk and outliers share one law at the cost of both
_ROUND = 1.0  # of the coordinate, in one round of EM
_ACCURATE = 1e-4  # of the coordinate, and of the logarithm of the scale
_APART, _FLAT, _OFF = 0.05, 1e-3, 0.5  # of curvatures: their step; nats; nats below a maximum
_NEWTON = 20  # steps, at most


@dataclass(frozen=True)
class Tail:
    """Student-t noise of one likelihood, whose ν is learned, and its scale s with it or not."""

    likelihood: HeavyTails
    scaled: bool

    @cached_property
    def _coordinate(self) -> Coordinate:
        raw, constraint = self.likelihood.raw_deg_free, self.likelihood.raw_deg_free_constraint
        return Coordinate("raw_deg_free", raw, constraint, 1.0)

    @cached_property
    def lowest(self) -> float:
        """The lowest coordinate of a search: of ν = 2.5, or where it starts, if that is lower.

        Under gross outliers the evidence rises to ν = 2, where the variance of the noise is
        infinite, the weights of usual readings vary as if they were outliers, and error bars are
        too small."""
        likelihood, present = self.likelihood, self.likelihood.raw_deg_free.detach().clone()
        here = self._coordinate.get().item()
        if not likelihood.raw_deg_free_constraint.check(torch.tensor([_LEAST])):
            return min(here, -_FARTHEST)
        likelihood.deg_free = _LEAST
        lowest = self._coordinate.get().item()
        likelihood.raw_deg_free.data.copy_(present)
        return min(here, lowest)

    @property
    def at_bound(self) -> bool:
        """Whether ν is the lowest of the search."""
        return self._coordinate.get().item() < self.lowest + 10 * _ACCURATE

    @property
    def _variance(self) -> float:
        return noise_of(self.likelihood, self.likelihood.num_tasks).diagonal().mean().item()

    def get(self) -> list[float]:
        """The coordinate of ν, and the logarithm of the noise variance."""
        return [self._coordinate.get().item(), math.log(self._variance)]

    def set(self, coordinate: float, log_variance: float) -> None:
        """Set ν and, if it is learned here, the noise variance."""
        coordinate = min(max(coordinate, self.lowest), _FARTHEST)
        self._coordinate.set(torch.full_like(self.likelihood.raw_deg_free, coordinate))
        if self.scaled:
            scale_noise(self.likelihood, math.exp(log_variance) / self._variance)

    @cached_property
    def _log_densities(self) -> list[tuple]:
        return [prior[1:4] for prior in self.likelihood.named_priors()]

    def log_prior(self) -> float:
        """The log density of the priors of the likelihood."""
        return sum(
            float(prior.log_prob(of(owner)).sum()) for owner, prior, of in self._log_densities
        )

    def learn(self, parts: Sequence[Distances]) -> float:
        """Set ν and s to what maximises Σ_n log t_ν(d_n/s) − ½ V log s + log p(ν), with V numbers
        in all; s, in whose unit the distances are now. By Brent's method in the coordinate of ν,
        not too far from where it is, with the best s for each."""
        present, before = self._coordinate.get().item(), self._variance
        low, high = max(present - _ROUND, self.lowest), min(present + _ROUND, _FARTHEST)
        found = scipy.optimize.minimize_scalar(
            lambda u: self._loss(u, parts)[0],
            bounds=(low, high),
            method="bounded",
            options={"xatol": _ACCURATE},
        )
        _, scale = self._loss(found.x, parts)
        if self.scaled:
            scale_noise(self.likelihood, scale)
        return self._variance / before

    def standard_error(self, parts: Sequence[Distances]) -> float:
        """That of ν, from the curvature of this objective in its coordinate, with the best s for
        each; NaN where it is flat or not at a maximum. It takes the posterior of the field as it
        is: where readings do not tell the field much better than their noise, it is too small."""
        present = self._coordinate.get().item()
        below, here, above = (self._loss(present + d, parts)[0] for d in (-_APART, 0.0, _APART))
        self._loss(present, parts)
        slope, curvature = (above - below) / (2 * _APART), (above - 2 * here + below) / _APART**2
        if not curvature > _FLAT or slope**2 > 2 * _OFF * curvature:
            return math.nan
        return abs(self._coordinate.slope().item()) / math.sqrt(curvature)

    def _loss(self, u: float, parts: Sequence[Distances]) -> tuple[float, float]:
        """The negative objective at a coordinate of ν, and the best s."""
        self._coordinate.set(torch.full_like(self.likelihood.raw_deg_free, u))
        model = StudentTNoise(self.likelihood.deg_free.item())
        scale = best_scale(model, parts) if self.scaled else 1.0
        total = self.log_prior()
        for key, distance in parts:
            values = key.pattern.num_values
            density = model.log_density(distance / scale, values).sum().item()
            total += density - 0.5 * len(distance) * values * math.log(scale)
        return -total, scale


def best_scale(model: StudentTNoise, parts: Sequence[Distances]) -> float:
    """s with Σ_n E[w_n] d_n/s = V: what the noise variance is too small by, for this ν; by Newton's
    method in log s."""
    nu, log_scale = model.deg_free, 0.0
    for _ in range(_NEWTON):
        excess = curvature = 0.0
        for key, distance in parts:
            values, scaled = key.pattern.num_values, distance / math.exp(log_scale)
            share = scaled / (nu + scaled)
            excess += ((nu + values) * share - values).sum().item()
            curvature += ((nu + values) * share * (1 - share)).sum().item()
        step = min(max(excess / curvature, -1.0), 1.0) if curvature > 0 else 0.0
        log_scale += step
        if abs(step) < _ACCURATE:
            break
    return math.exp(log_scale)


@dataclass(frozen=True)
class Tails:
    """Student-t noise of all groups, whose ν are learned.

    Args:
        likelihoods: by the label of their group.
        scaled: whether to learn the scales of noise with ν, where all of it is learned and has no
            prior of its own.
    """

    likelihoods: Mapping[str, Likelihood]
    scaled: bool = False

    @cached_property
    def members(self) -> list[Tail]:
        """Each likelihood once."""
        tails = {
            id(likelihood): likelihood
            for likelihood in self.likelihoods.values()
            if isinstance(likelihood, HeavyTails) and likelihood.has_deg_free
        }
        return [
            Tail(likelihood, self.scaled and _is_free(likelihood))
            for likelihood in tails.values()
            if likelihood.raw_deg_free.requires_grad
        ]

    @torch.no_grad()
    def learn(self, found: Sequence[Distances]) -> list[Distances]:
        """Set ν, and the scales of noise, to what maximises the ELBO under the posterior of the
        field that tells the distances d_n, and the best weights (ECME: Liu & Rubin 1995, section
        3); the distances in units of that noise."""
        scales: dict[str, float] = {}
        for tail in self.members:
            if parts := self._of(tail, found):
                scale = tail.learn(parts)
                scales.update({part.key.label: scale for part in parts})
        return [Distances(key, distance / scales.get(key.label, 1.0)) for key, distance in found]

    @torch.no_grad()
    def standard_errors(self, found: Sequence[Distances]) -> dict[nn.Parameter, float]:
        """That of every ν, by its raw parameter."""
        return {
            tail.likelihood.raw_deg_free: tail.standard_error(parts)
            for tail in self.members
            if (parts := self._of(tail, found))
        }

    def _of(self, tail: Tail, found: Sequence[Distances]) -> list[Distances]:
        """The distances of its readings."""
        labels = [name for name, own in self.likelihoods.items() if own is tail.likelihood]
        return [part for part in found if part.key.label in labels]

    def get(self) -> Float[Tensor, "2*g"]:
        """The coordinate of ν and the log noise variance of every group."""
        return torch.tensor([value for tail in self.members for value in tail.get()]).double()

    @torch.no_grad()
    def set(self, values: Float[Tensor, "2*g"]) -> None:
        """Set them to what `get` returned."""
        for tail, pair in zip(self.members, values.reshape(-1, 2).tolist(), strict=True):
            tail.set(*pair)

    @property
    def notes(self) -> list[str]:
        """A sentence for each ν at the bound of the search."""
        return [
            f"deg_free = {tail.likelihood.deg_free.item():.3g} is at the lower bound of the "
            "search: outliers are heavier than that"
            for tail in self.members
            if tail.at_bound
        ]

    def log_prior(self) -> float:
        """The log density of their priors."""
        return sum(tail.log_prior() for tail in self.members)


def _is_free(likelihood: HeavyTails) -> bool:
    """Whether all of the noise is learned, without a prior."""
    priors = [name for name, *_ in likelihood.named_priors() if name != "deg_free_prior"]
    return not priors and all(parameter.requires_grad for parameter in likelihood.parameters())
