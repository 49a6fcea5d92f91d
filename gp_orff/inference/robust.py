"""Student-t noise: weights of observations in the E-step."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise import GroupNoise, Noises, group_noise
from gp_orff.data.observations import Observations, with_rows
from gp_orff.data.patterns import GroupKey
from gp_orff.inference.features import Posterior, Residuals

# Extrapolation to fixed points of maps that increase an objective.


_LONGEST = 64.0  # the longest extrapolation, in steps
_FARTHEST = 2.0  # the largest change of a log weight in one extrapolation


def climb(
    step: Callable[[Float[Tensor, "n"]], tuple[float, Float[Tensor, "n"]]],
    point: Float[Tensor, "n"],
    near: float,
    settled: float,
    rounds: int,
) -> tuple[Float[Tensor, "n"], bool]:
    """Iterate a map that increases an objective, and return its fixed point.

    Steps are extrapolated, unless this lowers the objective (SQUAREM: Varadhan & Roland 2008,
    scheme S3).

    Args:
        step: a function of a point u that returns the objective at u and the next u.
        point: the starting point.
        near: extrapolation starts when a round gains less than this.
        settled: iterations end when a round gains less than this.
        rounds: the largest number of rounds.

    Returns:
        The last point, and whether the iterations have converged.
    """
    value, image = step(point)
    for _ in range(rounds):
        next_value, next_image = step(image)
        if next_value - value < settled:
            return next_image, True
        if next_value - value > near:
            point, value, image = image, next_value, next_image
            continue
        first, second = image - point, next_image - 2 * image + point
        # With length 1, the extrapolation is the second image of the point.
        length = (first.norm() / second.norm()).clamp(1.0, _LONGEST)
        move = 2 * length * first + length**2 * second
        point = point + move.clamp(-_FARTHEST, _FARTHEST)
        value, image = step(point)
        if not value >= next_value:
            point = next_image
            value, image = step(point)
    return next_image, False


# Student-t noise: one weight for each observation, and its contribution to the ELBO.


@dataclass(frozen=True)
class StudentTNoise:
    """Student-t noise with weights q(w_n) = Gamma((ν + v)/2, (ν + d_n)/2).

    v is the number of values of an observation, and d_n its squared distance from the field in
    units of the noise.
    """

    deg_free: float

    def weights(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """E[w_n] = (ν + v) / (ν + d_n)."""
        return (self.deg_free + values) / (self.deg_free + distance)

    def drawn_weights(
        self, distance: Float[Tensor, "n"], values: int, generator: np.random.Generator
    ) -> Float[Tensor, "n"]:
        """Draws of w_n ~ Gamma((ν + v)/2, (ν + d_n)/2) for given distances d_n."""
        gamma = generator.standard_gamma(0.5 * (self.deg_free + values), len(distance))
        return torch.from_numpy(gamma).to(distance) / (0.5 * (self.deg_free + distance))

    def distance(self, weights: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """d_n, from the weights E[w_n]."""
        return (self.deg_free + values) / weights - self.deg_free

    def elbo_correction(self, distance: Float[Tensor, "n"], values: int) -> float:
        """Σ_n ½v (E[log w_n] − log E[w_n]) − KL(q(w_n) ‖ Gamma(ν/2, ν/2)).

        Added to the evidence under the weights E[w_n], it gives the ELBO.
        """
        half = torch.tensor(0.5 * self.deg_free, dtype=distance.dtype, device=distance.device)
        shape, rate = half + 0.5 * values, half + 0.5 * distance
        log_mean = shape.log() - rate.log()
        mean_log = shape.digamma() - rate.log()
        divergence = (
            0.5 * values * shape.digamma()
            - shape.lgamma()
            + half.lgamma()
            + half * (rate.log() - half.log())
            + shape * (half - rate) / rate
        )
        return (0.5 * values * (mean_log - log_mean) - divergence).sum().item()

    def log_density(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """log t_ν(d_n) up to terms without ν: log E[exp(−½ w d_n) w^(v/2)], w ~ Gamma(ν/2, ν/2).

        For d_n = E[d_n] under the posterior of the field, it is the contribution of the observation
        to the ELBO with the best weight.
        """
        half = torch.tensor(0.5 * self.deg_free, dtype=distance.dtype, device=distance.device)
        normaliser = (half + 0.5 * values).lgamma() - half.lgamma() - 0.5 * values * half.log()
        return normaliser - (half + 0.5 * values) * (0.5 * distance / half).log1p()

    def tail(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """P(D ≥ distance) where D/v ~ F(v, ν)."""
        share = self.deg_free / (self.deg_free + distance.cpu().numpy())
        tail = scipy.special.betainc(self.deg_free / 2, values / 2, share)
        return torch.from_numpy(tail).to(distance)


def weighs(likelihoods: Mapping[str, Likelihood]) -> bool:
    """Return whether any group has Student-t noise, so that its observations have weights."""
    return any(
        getattr(likelihood, "deg_free", None) is not None for likelihood in likelihoods.values()
    )


# The E-step of Student-t noise: weights of observations from the posterior of the field.
#
# E[d_n] = rᵀN⁻¹r + tr(N⁻¹ S) with the residual r of the posterior mean, and the covariance S of the
# field at the observation. If a matrix of all observations was factorised, r and S follow from it
# without predictions. A posterior given a subset also predicts the weights of all observations.
# These observations are new to the posterior, so that (S + N)⁻¹ replaces N⁻¹.


class Distances(NamedTuple):
    """The squared distances d_n of the residuals of a part of the data; zero for Gaussian noise."""

    key: GroupKey
    distance: Float[Tensor, "n"]


def residuals(
    part: Observations,
    posterior: Posterior,
    noises: Noises,
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"], GroupNoise]:
    """The residuals y − H E[f], H Cov[f] Hᵀ, and the noise of the observations."""
    smooth, delta = posterior.distribution.split()  # the noise of each observation includes δ
    vectors = smooth.mean(part.x) + posterior.mean
    latent = smooth.latent(part)
    noise = posterior.noises.get(part.key)
    if noise is None:  # a new group
        noise = GroupNoise(group_noise(part.key, noises), delta)
    return part.y - part.apply(vectors), latent, noise


def distances(
    part: Observations,
    posterior: Posterior,
    noises: Noises,
    known: Residuals | None = None,
) -> Float[Tensor, "n"]:
    """E[rᵀ N⁻¹ r] of the residuals r = y − H f, with the noise covariance N of each observation.

    `known` are the residuals, if they follow from a factorised matrix.
    """
    if known is None:
        residual, covariance, noise = residuals(part, posterior, noises)
    else:
        residual, covariance, noise = *known, posterior.noises[part.key]
    second = residual.unsqueeze(-1) * residual.unsqueeze(-2) + covariance
    return (torch.linalg.inv(part.noise(noise)) * second).sum((-1, -2))


def all_distances(
    parts: Iterator[Observations],
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    stored: Sequence[Float[Tensor, "n"]] | None = None,
    known: Mapping[GroupKey, Residuals] | None = None,
) -> Iterator[Distances]:
    """E[d_n] of every part of the data with Student-t noise.

    Args:
        parts: the parts of the data.
        models: the noise models of groups with Student-t noise, by label.
        posterior: the posterior of the field.
        noises: the noise covariances, by label.
        stored: known weights, one entry per part. A weight that is not NaN determines the distance.
        known: the residuals of every group, if they follow from a factorised matrix.
    """
    pairs = ((part, None) for part in parts) if known is None else with_rows(parts, known)
    if stored is None:
        triples = ((*pair, torch.tensor(math.nan)) for pair in pairs)
    else:
        triples = ((*pair, weight) for pair, weight in zip(pairs, stored, strict=True))
    for part, of_part, weight in triples:
        model, values = models.get(part.key.label), part.pattern.num_values
        if model is None:
            yield Distances(part.key, torch.zeros_like(part.y[:, 0]))
            continue
        distance = model.distance(weight, values)
        if distance.isnan().any():
            new = distances(part, posterior, noises, of_part)
            distance = torch.where(distance.isnan(), new, distance)
        yield Distances(part.key, distance)


def weights_at(
    found: Iterable[Distances], models: Mapping[str, StudentTNoise]
) -> tuple[list[Float[Tensor, "n"]], float]:
    """The weights of all observations at their distances, and the ELBO correction.

    Weights are one under Gaussian noise.
    """
    weights, elbo_correction = [], 0.0
    for key, distance in found:
        model, values = models.get(key.label), key.pattern.num_values
        if model is None:
            weights.append(torch.ones_like(distance))
            continue
        weights.append(model.weights(distance, values))
        elbo_correction += model.elbo_correction(distance, values)
    return weights, elbo_correction


def foreseen_weights(
    parts: Iterable[Observations],
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
) -> list[Float[Tensor, "n"]]:
    """Predict the weights (ν + v) / (ν + rᵀ(S + N)⁻¹r) of observations from a posterior given a few
    of them.

    S is the covariance of this posterior. Without S, the E-step would give a small weight to every
    observation at places where S is large.
    """
    weights = []
    for part in parts:
        model, weight = models.get(part.key.label), torch.ones_like(part.y[:, 0])
        if model is not None:
            residual, latent, noise = residuals(part, posterior, noises)
            solved = torch.linalg.solve(latent + part.noise(noise), residual)
            weight = model.weights((residual * solved).sum(-1), part.pattern.num_values)
        weights.append(weight)
    return weights


def total_elbo_correction(
    keys: Iterable[GroupKey],
    weights: Iterable[Float[Tensor, "n"]],
    models: Mapping[str, StudentTNoise],
) -> float:
    """The ELBO correction for weights of all parts of the data."""
    total = 0.0
    for key, weight in zip(keys, weights, strict=True):
        if key.label in models:
            model, values = models[key.label], key.pattern.num_values
            total += model.elbo_correction(model.distance(weight, values), values)
    return total
