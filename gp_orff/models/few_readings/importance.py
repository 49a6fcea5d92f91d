"""Adaptive importance sampling, a share of whose draws always comes from the prior.

1. A batch of 64 is drawn: a quarter from the prior, the rest from a Student-t distribution of five
   degrees of freedom, at first about the maximum of the posterior density, with 1.5 times the
   inverse of the information as its scale matrix.
2. All draws so far get the weights w ∝ p(y|u) p(u) / q(u), where q is the mixture of all
   proposals so far, each as often as it was drawn from (Veach & Guibas 1995; Cornuet et al. 2012).
   They are bounded, since the prior is part of q. The largest are replaced by quantiles of a
   generalised Pareto distribution that is fitted to them (Vehtari et al. 2024).
3. The next Student-t distribution has the weighted mean, and 1.5 times a covariance between the
   weighted one and the first one, the nearer to the weighted one the more draws count.
4. Batches are drawn until the effective number of draws, 1/Σw², is as large as asked, or there are
   1024 draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln, logsumexp

Points = Float[np.ndarray, "S k"]
Logs = Float[np.ndarray, "S"]

MOST = 1024  # draws
_BATCH, _OF_PRIOR = 64, 16
_TAILS, _WIDER = 5.0, 1.5
_TAIL, _ROOTS = 0.2, 3.0  # the tail that is smoothed: a share of the draws, or so many times √S
_LEAST_TAIL = 5
_SHAPES = 10.0, 0.5  # the prior of the shape of a Pareto distribution: as many draws, with this k


@dataclass(frozen=True)
class Draws:
    """Draws with weights that add up to one."""

    u: Points
    weights: Float[np.ndarray, "S"]
    pareto_k: float  # the shape of the tail of the weights; above 0.7 they are not reliable

    @property
    def effective(self) -> float:
        """The effective number 1/Σw² of draws."""
        return float(1 / np.square(self.weights).sum())

    def resampled(self, count: int, rng: np.random.Generator) -> "Draws":
        """About `count` draws of equal weights by systematic resampling, each once with its share,
        in the order along the direction in which they vary most; the same draws if they are
        fewer."""
        if len(self.u) <= count:
            return self
        offsets = self.u - self.weights @ self.u
        _, _, directions = np.linalg.svd(
            np.sqrt(self.weights)[:, None] * offsets, full_matrices=False
        )
        order = np.argsort(offsets @ directions[0])
        places = (rng.random() + np.arange(count)) / count
        rows = np.searchsorted(np.cumsum(self.weights[order]), places).clip(0, len(self.u) - 1)
        rows, times = np.unique(order[rows], return_counts=True)
        return Draws(self.u[rows], times / count, self.pareto_k)


def adaptive_draws(
    log_posterior: Callable[[Points], Logs],
    draw_prior: Callable[[int, np.random.Generator], Points],
    log_prior: Callable[[Points], Logs],
    mode: Float[np.ndarray, "k"],
    covariance: Float[np.ndarray, "k k"],
    effective: float,
    rng: np.random.Generator,
) -> Draws:
    """Draws from a posterior distribution.

    Args:
        log_posterior: log p(y|u) p(u), up to a constant; −∞ where it is not known.
        draw_prior, log_prior: of a proposal with tails as wide as those of the prior.
        mode, covariance: of the posterior, about.
        effective: the effective number of draws that is asked for.
        rng: the source of random numbers.

    Raises:
        ValueError: the posterior density is known at none of the draws.
    """
    k = len(mode)
    proposals: list[Callable[[Points], Logs]] = []
    u, logs = np.empty((0, k)), np.empty(0)
    student = StudentT(mode, _WIDER * covariance)
    while len(u) < MOST:
        batch = np.concatenate([draw_prior(_OF_PRIOR, rng), student.draw(_BATCH - _OF_PRIOR, rng)])
        u, logs = np.concatenate([u, batch]), np.concatenate([logs, log_posterior(batch)])
        proposals.append(student.log_density)
        parts = [math.log(_OF_PRIOR / _BATCH) + log_prior(u)]
        share = math.log((1 - _OF_PRIOR / _BATCH) / len(proposals))
        parts += [share + proposal(u) for proposal in proposals]
        ratios = logs - logsumexp(parts, axis=0)
        known = np.isfinite(ratios)
        if not known.any():
            raise ValueError(
                "expected an evidence that can be computed near the hyperparameters of the model, "
                "got none; use posterior(marginalize=False)"
            )
        smoothed, pareto_k = smoothed_logs(np.where(known, ratios, -np.inf))
        weights = np.exp(smoothed - logsumexp(smoothed))
        draws = Draws(u, weights, pareto_k)
        if draws.effective >= effective:
            break
        share = draws.effective / (draws.effective + 2 * k)
        mean = weights @ u
        weighted = ((u - mean).T * weights) @ (u - mean)
        student = StudentT(mean, _WIDER * (share * weighted + (1 - share) * covariance))
    return draws


class StudentT:
    """A Student-t distribution with five degrees of freedom."""

    def __init__(self, mean: Float[np.ndarray, "k"], scale: Float[np.ndarray, "k k"]):
        self.mean, self.root = mean, np.linalg.cholesky(scale)

    def draw(self, count: int, rng: np.random.Generator) -> Points:
        """Draws."""
        normal = rng.standard_normal((count, len(self.mean)))
        size = np.sqrt(rng.chisquare(_TAILS, count) / _TAILS)
        return self.mean + normal / size[:, None] @ self.root.T

    def log_density(self, u: Points) -> Logs:
        """The log density."""
        k = len(self.mean)
        scores = np.linalg.solve(self.root, (u - self.mean).T)
        constant = gammaln(0.5 * (_TAILS + k)) - gammaln(0.5 * _TAILS)
        constant -= 0.5 * k * math.log(_TAILS * math.pi) + np.log(self.root.diagonal()).sum()
        return constant - 0.5 * (_TAILS + k) * np.log1p(np.square(scores).sum(0) / _TAILS)


def smoothed_logs(logs: Logs) -> tuple[Logs, float]:
    """The logarithms of Pareto-smoothed importance weights, the largest of which is at most one,
    and the shape k of their tail (Vehtari, Simpson, Gelman, Yao & Gabry 2024).

    −∞ for k where the tail has no spread, NaN where draws are too few for one.
    """
    logs = logs - logs.max()
    size = int(min(_TAIL * len(logs), _ROOTS * math.sqrt(len(logs))))
    if size < _LEAST_TAIL:
        return logs, math.nan
    order = np.argsort(logs)
    tail, cut = order[-size:], np.exp(logs[order[-size - 1]])
    excess = np.exp(logs[tail]) - cut
    if not excess[0] < excess[-1]:
        return logs, -math.inf
    k, scale = pareto(excess)
    places = (np.arange(size) + 0.5) / size
    steps = -np.log1p(-places)
    quantiles = scale * (steps if abs(k) < 1e-9 else np.expm1(k * steps) / k)
    smoothed = logs.copy()
    smoothed[tail] = np.minimum(np.log(cut + quantiles), 0.0)
    return smoothed, k


def pareto(excess: Float[np.ndarray, "m"]) -> tuple[float, float]:
    """The shape k and the scale σ of a generalised Pareto distribution with the density
    (1 + k x/σ)^(−1/k − 1) / σ, from sorted draws (Zhang & Stephens 2009), k with a weak prior."""
    x = np.maximum(excess, np.finfo(float).tiny)
    m, count = len(x), 30 + int(math.sqrt(len(x)))
    quartile = x[max(int(m / 4 + 0.5) - 1, 0)]
    b = (1 - np.sqrt(count / (np.arange(count) + 0.5))) / (3 * quartile) + 1 / x[-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shapes = np.log1p(-b[:, None] * x).mean(-1)
        profile = m * (np.log(-b / shapes) - shapes - 1)
    profile = np.where(np.isfinite(profile), profile, -np.inf)
    b = np.exp(profile - logsumexp(profile)) @ b
    k = float(np.log1p(-b * x).mean())
    scale = -k / b
    weight, centre = _SHAPES
    return (m * k + weight * centre) / (m + weight), scale
