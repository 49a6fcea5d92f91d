"""Quantiles of mixtures of normal distributions."""

import torch
from jaxtyping import Float
from torch import Tensor

_STEPS = 60  # halvings of an interval, whose end is known to rounding then


def mixture_quantile(
    weights: Float[Tensor, "S"],
    means: Float[Tensor, "S *n"],
    sds: Float[Tensor, "S *n"],
    probability: float,
) -> Float[Tensor, "*n"]:
    """The z with Σ_s w_s Φ((z − m_s) / σ_s) equal to a probability, by bisection between the
    smallest and the largest quantile of the normal distributions."""
    score = torch.special.ndtri(torch.tensor(probability, dtype=means.dtype))
    quantiles = means + score.to(means) * sds
    low, high = quantiles.amin(0), quantiles.amax(0)
    shape = (-1, *[1] * (means.dim() - 1))
    for _ in range(_STEPS if len(weights) > 1 else 0):
        middle = 0.5 * (low + high)
        scores = (middle - means) / sds.clamp_min(torch.finfo(sds.dtype).tiny)
        below = (weights.reshape(shape) * torch.special.ndtr(scores)).sum(0) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return 0.5 * (low + high)
