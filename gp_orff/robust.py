"""Weights of readings under noise of heavy tails, and how each reading fits the others."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.observations import Conditioning, Noises, group_noise
from gp_orff.readings import Readings


@dataclass(frozen=True)
class StudentT:
    """q(w_n) = Gamma((ν+v)/2, (ν+d_n)/2) for v numbers in a reading with distance d_n."""

    deg_free: float

    def weights(self, distance: Float[Tensor, "n"], values: int) -> Float[Tensor, "n"]:
        """E[w]."""
        return (self.deg_free + values) / (self.deg_free + distance)

    def bound(self, distance: Float[Tensor, "n"], values: int) -> float:
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


def residuals(
    part: Readings,
    conditioning: Conditioning,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v v"], Float[Tensor, "v v"]]:
    """y − H E[f], H Cov[f] Hᵀ and the noise covariance of readings of weight one."""
    vectors = conditioning.law.mean(part.x) + mean
    blocks = conditioning.law.blocks(part.x)
    seen = part.pattern.rows(blocks, part.direction).mT  # Cov Hᵀ: (n, p, v)
    seen = part.pattern.rows(seen, part.direction)
    noise = conditioning.noises.get(part.key)
    if noise is None:  # of a group that is new
        noise = group_noise(part.key, noises, conditioning.white, part.masses, len(part))
    return part.y - part.see(vectors), seen, noise


def distances(
    part: Readings, conditioning: Conditioning, noises: Noises, mean: Float[Tensor, "p"]
) -> Float[Tensor, "n"]:
    """E[rᵀ Σ⁻¹ r] of the residuals r = y − H f."""
    residual, covariance, noise = residuals(part, conditioning, noises, mean)
    precision = torch.linalg.inv(noise)
    square = ((residual @ precision) * residual).sum(-1)
    distance = square + (covariance * precision).sum((-1, -2))
    return distance if part.weight is None else distance * part.weight


def reweigh(
    parts: Iterator[Readings],
    models: dict[str, StudentT],
    conditioning: Conditioning,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> tuple[list[Float[Tensor, "n"]], float]:
    """E-step: the weights of all readings, and what they add to the log density."""
    weights, bound = [], 0.0
    for part in parts:
        model = models.get(part.key.label)
        if model is None:
            weights.append(torch.ones_like(part.y[:, 0]))
            continue
        distance = distances(part, conditioning, noises, mean)
        weights.append(model.weights(distance, part.pattern.num_values))
        bound += model.bound(distance, part.pattern.num_values)
    return weights, bound


@dataclass(frozen=True)
class LeaveOneOut:
    """What all other readings say about each: one row for every reading, in their order.

    Attributes:
        residual: the reading less its prediction from the others, (N, v).
        covariance: that of the residual, noise included, (N, v, v).
        distance: rᵀ C⁻¹ r, (N,): χ² with as many degrees of freedom as numbers were read, where the
            model is right and noise is Gaussian. Bad vectors stand out.
        log_density: of each reading given all others, (N,); their sum judges a model too.
    """

    residual: Float[Tensor, "N v"]
    covariance: Float[Tensor, "N v v"]
    distance: Float[Tensor, "N"]
    log_density: Float[Tensor, "N"]


@torch.no_grad()
def leave_one_out(
    nominal: Iterable[Readings],
    weighed: Iterable[Readings],
    conditioning: Conditioning,
    noises: Noises,
    mean: Float[Tensor, "p"],
) -> LeaveOneOut:
    """From the posterior under the noise N of the weighed readings: with e = y − H E[f] and
    S = H Cov[f] Hᵀ of each,

        r = N (N − S)⁻¹ e ,    Cov[H f | others] = N (N − S)⁻¹ N − N ,

    judged under the noise of the nominal ones.

    Raises:
        ValueError: readings of more than one instrument or pattern; or that are none of those the
            posterior knows.
    """
    found, keys = [], set()
    for plain, part in zip(nominal, weighed, strict=True):
        keys.add(plain.key)
        if len(keys) > 1:
            raise ValueError(
                "expected readings of one instrument that see the same components, got "
                f"{sorted(map(str, keys))}; ask for each by itself"
            )
        residual, latent, noise = residuals(part, conditioning, noises, mean)
        own = _scaled(noise, part.weight, len(part))
        gain = own @ torch.linalg.inv(own - latent)  # N (N − S)⁻¹
        left_out = gain @ own - own
        if not (torch.linalg.eigvalsh(own - latent)[:, 0] > 0).all():
            raise ValueError(
                "expected readings that the model was conditioned on, got some at which the field "
                "is less certain than they are"
            )
        residual = (gain @ residual.unsqueeze(-1)).squeeze(-1)
        covariance = left_out + _scaled(noise, plain.weight, len(part))
        solved = torch.linalg.solve(covariance, residual)
        distance = (residual * solved).sum(-1)
        size = residual.shape[-1] * math.log(2 * math.pi) + torch.logdet(covariance)
        found.append((residual, covariance, distance, -0.5 * (distance + size)))
    return LeaveOneOut(*map(torch.cat, zip(*found, strict=True)))


def _scaled(
    noise: Float[Tensor, "v v"], weight: Float[Tensor, "n"] | None, count: int
) -> Float[Tensor, "n v v"]:
    """Σ / w_n."""
    if weight is None:
        return noise.expand(count, -1, -1)
    return noise / weight[:, None, None]
