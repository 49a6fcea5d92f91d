"""Weights of readings under noise of heavy tails, and how each reading fits the others."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat

import scipy.special
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.inference.conditioning import Posterior

_LONGEST = 64.0  # steps that are extrapolated at once
_FARTHEST = 2.0  # that a logarithm of a weight moves then


@dataclass(frozen=True)
class StudentTNoise:
    """q(w_n) = Gamma((ν+v)/2, (ν+d_n)/2) for v numbers in a reading with distance d_n."""

    deg_free: float

    def weights(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """E[w]."""
        return (self.deg_free + values) / (self.deg_free + distance)

    def distance(self, weights: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """d_n, of which the weights follow."""
        return (self.deg_free + values) / weights - self.deg_free

    def elbo_correction(self, distance: Float[Tensor, "n"], values: int) -> float:
        """Σ_n ½v (E[log w] − log E[w]) − KL(q(w_n) ‖ Gamma(ν/2, ν/2)): with the evidence under
        weights E[w], a lower bound of the log density of the data."""
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

    def tail(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """P(D ≥ distance) where D/v ~ F(v, ν)."""
        share = self.deg_free / (self.deg_free + distance.numpy())
        return torch.from_numpy(scipy.special.betainc(self.deg_free / 2, values / 2, share))


def residuals(
    part: Observations,
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"], GroupNoise]:
    """y − H E[f], H Cov[f] Hᵀ and the noise of readings."""
    smooth, delta = posterior.distribution.split()  # δ is in the noise of each reading
    vectors = smooth.mean(part.x) + mean
    seen = part.apply_to_covariance(smooth.blocks(part.x))
    noise = posterior.noises.get(part.key)
    if noise is None:  # of a group that is new
        noise = GroupNoise(group_noise(part.key, noises), delta)
    return part.y - part.apply(vectors), seen, noise


def distances(
    part: Observations, posterior: Posterior, noises: Noises, mean: Float[Tensor, "p"]
) -> Float[Tensor, "n"]:
    """E[rᵀ N⁻¹ r] of the residuals r = y − H f under the noise N of each."""
    residual, covariance, noise = residuals(part, posterior, noises, mean)
    second = residual.unsqueeze(-1) * residual.unsqueeze(-2) + covariance  # E[r rᵀ]
    return (torch.linalg.inv(part.noise(noise)) * second).sum((-1, -2))


def expected_weights(
    parts: Iterator[Observations],
    models: dict[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
    known: Iterable[Float[Tensor, "n"] | Float[Tensor, ""]] | None = None,
) -> tuple[list[Float[Tensor, "n"]], float]:
    """E-step: the weights of all readings, and what they add to the log density; those that are
    `known`, not NaN, stay."""
    weights, elbo_correction = [], 0.0
    stored = repeat(torch.tensor(math.nan)) if known is None else known
    for part, own in zip(parts, stored, strict=False):
        model, values = models.get(part.key.label), part.pattern.num_values
        if model is None:
            weights.append(torch.ones_like(part.y[:, 0]))
            continue
        distance = model.distance(own, values)
        if distance.isnan().any():
            new = distances(part, posterior, noises, mean)
            distance = torch.where(distance.isnan(), new, distance)
        weights.append(model.weights(distance, values))
        elbo_correction += model.elbo_correction(distance, values)
    return weights, elbo_correction


def total_elbo_correction(
    keys: Iterable[GroupKey],
    weights: Iterable[Float[Tensor, "n"]],
    models: Mapping[str, StudentTNoise],
) -> float:
    """What weights add to the log density, part by part."""
    total = 0.0
    for key, own in zip(keys, weights, strict=True):
        if key.label in models:
            model, values = models[key.label], key.pattern.num_values
            total += model.elbo_correction(model.distance(own, values), values)
    return total


def climb(
    step: Callable[[Float[Tensor, "n"]], tuple[float, Float[Tensor, "n"]]],
    place: Float[Tensor, "n"],
    near: float,
    settled: float,
    rounds: int,
) -> tuple[Float[Tensor, "n"], bool]:
    """The fixed point of a map that climbs, `step(u)` being the height of u and the u that follows,
    and whether the height has settled. Where steps gain less than `near` they are extrapolated, if
    that is not lower (SQUAREM: Varadhan & Roland 2008, scheme S3)."""
    before, following = step(place)
    for _ in range(rounds):
        height, last = step(following)
        if height - before < settled:
            return last, True
        if height - before > near:
            place, before, following = following, height, last
            continue
        first, second = following - place, last - 2 * following + place
        length = (first.norm() / second.norm()).clamp(1.0, _LONGEST)
        move = 2 * length * first + length**2 * second
        place = place + move.clamp(-_FARTHEST, _FARTHEST)
        before, following = step(place)
        if not before >= height:
            place = last
            before, following = step(place)
    return last, False


@dataclass(frozen=True)
class LeaveOneOut:
    """What all other readings say about each: one row for every point, in the order given.

    NaN stands where nothing was read.

    Attributes:
        residual: the reading less its prediction from the others, (N, v).
        covariance: that of the residual, noise included, (N, v, v); under Student-t noise, with the
            scale of the noise in the place of its covariance.
        distance: rᵀ C⁻¹ r of residual and covariance, (N,).
        p_value: the probability of a distance as large or larger where the model is right, (N,):
            χ² with as many degrees of freedom v as numbers were read, or under Student-t noise,
            where that of the field is small beside it, v·F(v, ν). Bad vectors have small ones.
        log_density: of each reading given all others, as if the residual were Gaussian, (N,); under
            Gaussian noise their sum judges a model too.
        weight: E[w] of each under Student-t noise, (N,), small for outliers; else 1.
    """

    residual: Float[Tensor, "N v"]
    covariance: Float[Tensor, "N v v"]
    distance: Float[Tensor, "N"]
    p_value: Float[Tensor, "N"]
    log_density: Float[Tensor, "N"]
    weight: Float[Tensor, "N"]

    @classmethod
    def of_nothing(cls, count: int, values: int) -> "LeaveOneOut":
        """NaN, to be written over."""
        shapes = [(values,), (values, values), (), (), (), ()]
        nan = torch.tensor(math.nan, dtype=torch.float64)
        return cls(*(nan.repeat(count, *shape) for shape in shapes))


@torch.no_grad()
def leave_one_out(
    pairs: Iterable[tuple[Observations, Observations]],
    count: int,
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> LeaveOneOut:
    """Of pairs (nominal, weighed), from the posterior under the noise N of the weighed readings:
    with e = y − H E[f] and S = H Cov[f] Hᵀ of each,

        r = N (N − S)⁻¹ e ,    Cov[H f | others] = N (N − S)⁻¹ N − N ,

    judged under the noise of the nominal ones.

    Raises:
        ValueError: readings that are none of those the posterior knows; components of one vector as
            readings of their own.
    """
    found = None
    for plain, part in pairs:
        columns = torch.tensor(plain.pattern.columns)
        if found is None:
            found = LeaveOneOut.of_nothing(count, plain.pattern.num_columns)
        place = plain.place.cpu()
        if not found.weight[place].isnan().all():
            raise ValueError(
                "expected one reading for each point, got components of a vector with variances of "
                "their own, which are several: leave_one_out takes variances (N,)"
            )
        residual, latent, noise = residuals(part, posterior, noises, mean)
        own = part.noise(noise)
        if not (torch.linalg.eigvalsh(own - latent)[:, 0] > 0).all():
            raise ValueError(
                "expected readings that the model was conditioned on, got some at which the field "
                "is less certain than they are"
            )
        gain = own @ torch.linalg.inv(own - latent)  # N (N − S)⁻¹
        residual = (gain @ residual.unsqueeze(-1)).squeeze(-1)
        covariance = gain @ own - own + plain.noise(noise)
        distance = (residual * torch.linalg.solve(covariance, residual)).sum(-1)
        size = residual.shape[-1] * math.log(2 * math.pi) + torch.logdet(covariance)
        model = models.get(plain.key.label)
        tail = _chi_squared if model is None else model.tail
        found.residual[place[:, None], columns] = residual.cpu()
        found.covariance[place[:, None, None], columns[:, None], columns] = covariance.cpu()
        found.distance[place] = distance.cpu()
        found.p_value[place] = tail(distance.cpu(), len(columns))
        found.log_density[place] = -0.5 * (distance + size).cpu()
        ratio = torch.ones_like(distance) if part.weight is None else part.weight
        found.weight[place] = (ratio if plain.weight is None else ratio / plain.weight).cpu()
    return found


def _chi_squared(distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
    half = torch.tensor(0.5 * values, dtype=distance.dtype)
    return torch.special.gammaincc(half, 0.5 * distance)
