"""Student-t noise: weights of observations (E-step), and leave-one-out residuals."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat

import scipy.special
import torch
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.data.noise.covariances import Noises
from gp_orff.data.noise.groups import GroupNoise, group_noise
from gp_orff.data.observations import Observations
from gp_orff.data.patterns import GroupKey
from gp_orff.inference.conditioning import Posterior
from gp_orff.inference.distributions import FieldDistribution
from gp_orff.inference.weight_posterior import WeightPosterior

_READINGS = 512  # along directions, at once
_LONGEST = 64.0  # the longest extrapolation, in steps
_FARTHEST = 2.0  # the largest change of a log weight in one extrapolation


@dataclass(frozen=True)
class StudentTNoise:
    """Student-t noise by q(w_n) = Gamma((ν+v)/2, (ν+d_n)/2), v values at distance d_n."""

    deg_free: float

    def weights(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """E[w_n] = (ν + v) / (ν + d_n)."""
        return (self.deg_free + values) / (self.deg_free + distance)

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

    def tail(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """P(D ≥ distance) where D/v ~ F(v, ν)."""
        share = self.deg_free / (self.deg_free + distance.numpy())
        return torch.from_numpy(scipy.special.betainc(self.deg_free / 2, values / 2, share))


def weighs(likelihoods: Mapping[str, Likelihood]) -> bool:
    """Whether Student-t noise weighs the readings of any group."""
    return any(getattr(likelihood, "deg_free", None) for likelihood in likelihoods.values())


def residuals(
    part: Observations,
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"], GroupNoise]:
    """The residuals y − H E[f], H Cov[f] Hᵀ, and the noise of the observations."""
    smooth, delta = posterior.distribution.split()  # δ is in the noise of each observation
    vectors = smooth.mean(part.x) + mean
    latent = latent_covariance(smooth, part)
    noise = posterior.noises.get(part.key)
    if noise is None:  # a new group
        noise = GroupNoise(group_noise(part.key, noises), delta)
    return part.y - part.apply(vectors), latent, noise


def latent_covariance(field: FieldDistribution, part: Observations) -> Float[Tensor, "n v v"]:
    """H Cov[f] Hᵀ of every observation; of numbers along directions without whole vectors."""
    if part.direction is None or not isinstance(field, WeightPosterior):
        return part.apply_to_covariance(field.blocks(part.x))

    def variances(some: Observations) -> Float[Tensor, "n"]:
        vectors = field.expansion.features(some.x.double()).unflatten(0, (len(some), -1))
        return field.variance_of(torch.einsum("npf,np->nf", vectors, some.direction))

    rows = torch.arange(len(part), device=part.x.device).split(_READINGS)
    return torch.cat([variances(part.take(some)) for some in rows])[:, None, None]


def distances(
    part: Observations,
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
    second: Float[Tensor, "n v v"] | None = None,
) -> Float[Tensor, "n"]:
    """E[rᵀ N⁻¹ r] of the residuals r = y − H f, with the noise covariance N of each observation.

    `second` is E[r rᵀ] where it is known.
    """
    if second is None:
        residual, covariance, noise = residuals(part, posterior, noises, mean)
        second = residual.unsqueeze(-1) * residual.unsqueeze(-2) + covariance
    else:
        noise = posterior.noises[part.key]
    return (torch.linalg.inv(part.noise(noise)) * second).sum((-1, -2))


def expected_weights(
    parts: Iterator[Observations],
    models: dict[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
    stored: Iterable[Float[Tensor, "n"] | Float[Tensor, ""]] | None = None,
    seconds: Iterable[Float[Tensor, "n v v"]] | None = None,
) -> tuple[list[Float[Tensor, "n"]], float]:
    """E-step: the weights of all observations, and their ELBO correction.

    Weights in `stored` that are not NaN stay as they are; `seconds` are E[r rᵀ] of the residuals of
    every part, where they are known.
    """
    weights, elbo_correction = [], 0.0
    stored = repeat(torch.tensor(math.nan)) if stored is None else stored
    seconds = repeat(None) if seconds is None else seconds
    for part, weight, second in zip(parts, stored, seconds, strict=False):
        model, values = models.get(part.key.label), part.pattern.num_values
        if model is None:
            weights.append(torch.ones_like(part.y[:, 0]))
            continue
        distance = model.distance(weight, values)
        if distance.isnan().any():
            new = distances(part, posterior, noises, mean, second)
            distance = torch.where(distance.isnan(), new, distance)
        weights.append(model.weights(distance, values))
        elbo_correction += model.elbo_correction(distance, values)
    return weights, elbo_correction


def foreseen_weights(
    parts: Iterable[Observations],
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> list[Float[Tensor, "n"]]:
    """Weights of readings from a posterior given a few of them: (ν + v) / (ν + rᵀ(S + N)⁻¹r).

    Where that posterior is uncertain, by S, the E-step would give a small weight to every reading.
    """
    weights = []
    for part in parts:
        model, weight = models.get(part.key.label), torch.ones_like(part.y[:, 0])
        if model is not None:
            residual, latent, noise = residuals(part, posterior, noises, mean)
            solved = torch.linalg.solve(latent + part.noise(noise), residual)
            weight = model.weights((residual * solved).sum(-1), part.pattern.num_values)
        weights.append(weight)
    return weights


def total_elbo_correction(
    keys: Iterable[GroupKey],
    weights: Iterable[Float[Tensor, "n"]],
    models: Mapping[str, StudentTNoise],
) -> float:
    """The ELBO correction of weights, which are given part by part."""
    total = 0.0
    for key, weight in zip(keys, weights, strict=True):
        if key.label in models:
            model, values = models[key.label], key.pattern.num_values
            total += model.elbo_correction(model.distance(weight, values), values)
    return total


def climb(
    step: Callable[[Float[Tensor, "n"]], tuple[float, Float[Tensor, "n"]]],
    point: Float[Tensor, "n"],
    near: float,
    settled: float,
    rounds: int,
) -> tuple[Float[Tensor, "n"], bool]:
    """The fixed point of a map that increases an objective, and whether the objective has settled.

    `step(u)` returns the objective at u and the next u; at most `rounds` rounds, until one gains
    less than `settled`. Where steps gain less than `near`, they are extrapolated, unless that
    lowers the objective (SQUAREM: Varadhan & Roland 2008, scheme S3).
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
        length = (first.norm() / second.norm()).clamp(1.0, _LONGEST)
        move = 2 * length * first + length**2 * second
        point = point + move.clamp(-_FARTHEST, _FARTHEST)
        value, image = step(point)
        if not value >= next_value:
            point = next_image
            value, image = step(point)
    return next_image, False


@dataclass(frozen=True)
class LeaveOneOut:
    """Each observation against its prediction from all others: one row per point, in given order.

    NaN stands where nothing was observed.

    Attributes:
        residual: the observation less its prediction from the others, (N, v), in the unit of y.
        covariance: the covariance of the residual, noise included, (N, v, v), in squared units;
            under Student-t noise with the scale Σ of the noise in the place of its covariance.
        distance: rᵀ C⁻¹ r of residual r and covariance C, (N,).
        p_value: the probability of a distance at least as large under the model, (N,); small for
            outliers. The distance is χ² with as many degrees of freedom v as values, or v·F(v, ν)
            under Student-t noise if the variance of the field is small beside the noise.
        log_density: the Gaussian log density of each observation given all others, (N,); under
            Gaussian noise their sum is a score of the model.
        weight: E[w] of each observation under Student-t noise, (N,), small for outliers; else 1.
    """

    residual: Float[Tensor, "N v"]
    covariance: Float[Tensor, "N v v"]
    distance: Float[Tensor, "N"]
    p_value: Float[Tensor, "N"]
    log_density: Float[Tensor, "N"]
    weight: Float[Tensor, "N"]

    @classmethod
    def empty(cls, count: int, values: int) -> "LeaveOneOut":
        """NaN in every row, to be overwritten."""
        shapes = [(values,), (values, values), (), (), (), ()]
        nan = torch.tensor(math.nan, dtype=torch.float64)
        return cls(*(nan.repeat(count, *shape) for shape in shapes))

    def record(
        self,
        index: Int[Tensor, "n"],
        columns: Int[Tensor, "v"],
        residual: Float[Tensor, "n v"],
        covariance: Float[Tensor, "n v v"],
        weight: Float[Tensor, "n"],
        tail: Callable[[Float[Tensor, "n"], int], Float[Tensor, "n"]],
    ) -> None:
        """Overwrite some rows; `tail(d, v)` is the probability of a distance of at least d."""
        distance = (residual * torch.linalg.solve(covariance, residual)).sum(-1)
        log_normaliser = residual.shape[-1] * math.log(2 * math.pi) + torch.logdet(covariance)
        self.residual[index[:, None], columns] = residual.cpu()
        self.covariance[index[:, None, None], columns[:, None], columns] = covariance.cpu()
        self.distance[index] = distance.cpu()
        self.p_value[index] = tail(distance.cpu(), len(columns))
        self.log_density[index] = -0.5 * (distance + log_normaliser).cpu()
        self.weight[index] = weight.cpu()


@torch.no_grad()
def leave_one_out(
    pairs: Iterable[tuple[Observations, Observations]],
    count: int,
    models: Mapping[str, StudentTNoise],
    posterior: Posterior,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> LeaveOneOut:
    """Leave-one-out residuals of pairs (nominal, weighted) of observations.

    The posterior is conditioned on the weighted ones, with noise covariance N. With e = y − H E[f]
    and S = H Cov[f] Hᵀ of each observation,

        r = N (N − S)⁻¹ e ,    Cov[H f | others] = N (N − S)⁻¹ N − N .

    Covariance and density use the noise of the nominal ones.

    Raises:
        ValueError: observations that the posterior was not conditioned on, or components of one
            vector as separate observations.
    """
    result = None
    for nominal, weighted in pairs:
        columns = torch.tensor(nominal.pattern.columns)
        if result is None:
            result = LeaveOneOut.empty(count, nominal.pattern.num_columns)
        index = nominal.index.cpu()
        if not result.weight[index].isnan().all():
            raise ValueError(
                "expected one observation for each point, got components of a vector with "
                "noise of their own, which are several; give variances (N,) or noise (N,), or "
                "cross_validate(x, y, blocks=range(len(x)))"
            )
        residual, latent, noise = residuals(weighted, posterior, noises, mean)
        noise_covariance = weighted.noise(noise)
        if not (torch.linalg.eigvalsh(noise_covariance - latent)[:, 0] > 0).all():
            raise ValueError(
                "expected observations that the model was conditioned on, got some at which the "
                "field is less certain than the observation; pass the data of fit or condition"
            )
        gain = noise_covariance @ torch.linalg.inv(noise_covariance - latent)  # N (N − S)⁻¹
        residual = (gain @ residual.unsqueeze(-1)).squeeze(-1)
        covariance = gain @ noise_covariance - noise_covariance + nominal.noise(noise)
        model = models.get(nominal.key.label)
        weight = torch.ones_like(residual[:, 0]) if weighted.weight is None else weighted.weight
        weight = weight if nominal.weight is None else weight / nominal.weight
        tail = chi_squared if model is None else model.tail
        result.record(index, columns, residual, covariance, weight, tail)
    return result


def chi_squared(distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
    """P(D ≥ distance) for D ~ χ² with `values` degrees of freedom."""
    half = torch.tensor(0.5 * values, dtype=distance.dtype)
    return torch.special.gammaincc(half, 0.5 * distance)
