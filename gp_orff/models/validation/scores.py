"""Scores of predictions whose distribution is a mixture of Gaussians of one mean.

A new reading is y = H f + ε. Gaussian noise gives one Gaussian. Student-t noise is Gaussian of
variance σ²/w with w ~ Gamma(ν/2, ν/2), and y a mixture of Gaussians of variance Var[H f] + σ²/w:
the integral over log w is a sum over equidistant nodes. The noise variance of a reading on a new
track may have several values too, each with its probability.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK = 2**22  # numbers in memory
_STEP = 0.5  # of the nodes, in standard deviations of log w
_SMALLEST = 35.0  # −log of the density of log w, over its maximum, beyond the first and last node
_OUTLIERS = 5.0  # what nodes extend below that: they serve residuals of many standard deviations
_NEGLIGIBLE = 1e-12  # share of a pair of nodes in the CRPS


@dataclass(frozen=True)
class Scores:
    """Scores of single numbers, each (M,)."""

    log_density: Float[Tensor, "M"]
    crps: Float[Tensor, "M"]
    pit: Float[Tensor, "M"]

    @classmethod
    def of(
        cls,
        residual: Float[Tensor, "M"],
        latent: Float[Tensor, "M"],
        noise: Float[Tensor, "M"],
        deg_free: float = math.inf,
    ) -> "Scores":
        """The scores of readings y of residual y − E[y].

        With the mixture Σ_k q_k N(0, s_k²) of the residual r, A(r, s²) = 2 s φ(r/s) + r (2 Φ(r/s) −
        1) and Φ the distribution function of the normal distribution,

            log p = log Σ q_k N(r; 0, s_k²) ,    pit = Σ q_k Φ(r/s_k) ,
            crps = Σ q_k A(r, s_k²) − ½ Σ q_k q_l A(0, s_k² + s_l²)

        (Grimit et al. 2006, *The continuous ranked probability score for circular variables and its
        application to mesoscale forecast ensemble verification*, eq. 5).

        Args:
            residual: y − E[y].
            latent: the variance of H f.
            noise: the variance of ε; under Student-t noise, its squared scale.
            deg_free: ν of the noise; infinite for Gaussian noise.
        """
        return cls.of_mixture(residual, latent, noise, *_scales(deg_free))

    @classmethod
    def of_mixture(
        cls,
        residual: Float[Tensor, "M"],
        latent: Float[Tensor, "M"],
        noise: Float[Tensor, "M"],
        scales: Float[Tensor, "k"],
        q: Float[Tensor, "k"],
    ) -> "Scores":
        """As `of`, if y has the variance `latent` + `noise` · `scales`_k with probability q_k."""
        pairs = _pairs(scales, q)
        rows = max(1, _CHUNK // len(pairs[0]))
        inputs = zip(*(t.split(rows) for t in (residual, latent, noise)), strict=True)
        columns = zip(*(_scores(*chunk, scales, q, *pairs) for chunk in inputs), strict=True)
        return cls(*map(torch.cat, columns))


def _scores(
    r: Float[Tensor, "m"],
    latent: Float[Tensor, "m"],
    noise: Float[Tensor, "m"],
    scales: Float[Tensor, "k"],
    q: Float[Tensor, "k"],
    pair_scales: Float[Tensor, "l"],
    pair_q: Float[Tensor, "l"],
) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"], Float[Tensor, "m"]]:
    """Log density, CRPS and PIT of a chunk."""
    r, latent, noise = r.unsqueeze(-1), latent.unsqueeze(-1), noise.unsqueeze(-1)
    variance = latent + noise * scales
    sd = variance.sqrt()
    z = r / sd
    cdf = torch.special.ndtr(z)
    logs = -0.5 * (z.square() + variance.log() + math.log(2 * math.pi))
    absolute = 2 * sd * _normal_density(z) + r * (2 * cdf - 1)
    spread = (2 * latent + noise * pair_scales).sqrt() @ pair_q * math.sqrt(2 / math.pi)
    return torch.logsumexp(logs + q.log(), -1), absolute @ q - 0.5 * spread, cdf @ q


def _normal_density(z: Tensor) -> Tensor:
    return torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


def _scales(deg_free: float) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
    """1/w and the probability at nodes of w ~ Gamma(ν/2, ν/2), equidistant in log w."""
    one = torch.ones(1, dtype=torch.float64)
    if math.isinf(deg_free):
        return one, one
    a = 0.5 * deg_free  # log w has about the standard deviation 1/√a
    broad = a < 3 * _SMALLEST
    low = _SMALLEST / a + 1 if broad else math.sqrt(3 * _SMALLEST / a)
    low = -low - _OUTLIERS
    u = torch.arange(low, math.sqrt(2 * _SMALLEST / a), _STEP / math.sqrt(a), dtype=torch.float64)
    return torch.exp(-u), torch.softmax(a * (u - u.exp()), 0)


def _pairs(
    scales: Float[Tensor, "k"], q: Float[Tensor, "k"]
) -> tuple[Float[Tensor, "l"], Float[Tensor, "l"]]:
    """The sum of the scales of each pair of nodes, and the probability of the pair."""
    rows, columns = torch.tril_indices(len(q), len(q))
    twice = torch.where(rows == columns, 1.0, 2.0).to(q)
    total, weight = scales[rows] + scales[columns], twice * q[rows] * q[columns]
    kept = weight * total.sqrt() > _NEGLIGIBLE
    return total[kept], weight[kept]
