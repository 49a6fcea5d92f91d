"""The power law that a learned curve follows beyond its shortest knot."""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

BEYOND = 4  # lengths beyond the knots, each half the one before
_SPAN = 1.5  # of u = log λ at the end of the curve, over which its slope is taken, about
_LEAST = 0.3  # q, of the variance of a field: it is finite for q > 0
_ROUNDED = 0.25  # over how much of q the bound is rounded
_RATIO = math.log(2.0)


def end_lengths(shortest: float, step: float) -> Float[np.ndarray, "M"]:
    """The lengths beyond the knots, shortest first: the middles of the intervals that they stand
    for, of which the last one has no end.

    Args:
        shortest: the length at the last knot.
        step: the logarithm of the ratio of lengths from knot to knot.
    """
    middles = 0.5 * step + _RATIO * (np.arange(BEYOND)[::-1] + 0.5)
    return shortest * np.exp(-middles)


def end_of_curve(curve: Float[Tensor, "*b J"], step: float) -> Float[Tensor, "*b M"]:
    """The log weights of the `end_lengths`, from those at the knots, shortest first.

    The variance of a field of each length, π λ⁻², goes on as λ^q from the last knot, in steps from
    knot to knot: all of it is Σ_{i≥1} e^{−q i Δ} = 1 / (e^{qΔ} − 1) times that of the last knot,
    in closed form, and each length has that of an interval of log λ. With p the slope of log π
    over the last knots, q = p − 2, but at least 0.3.

    Args:
        curve: log weights at the knots.
        step: Δ, the logarithm of the ratio of lengths from knot to knot.
    """
    steps = end_steps(step)
    slope = (curve[..., steps] - curve[..., 0]) / (steps * step) - 2
    q = _LEAST + _ROUNDED * softplus((slope - _LEAST) / _ROUNDED)
    fall, total = q * _RATIO, curve[..., 0] - q * step - _log_complement(q * step)
    parts = [total - m * fall + _log_complement(fall) for m in range(BEYOND - 1)]
    parts.append(total - (BEYOND - 1) * fall)
    lengths = torch.from_numpy(end_lengths(1.0, step)).to(curve)
    return torch.stack(parts[::-1], dim=-1) + 2 * lengths.log()


def end_steps(step: float) -> int:
    """The steps between knots over which a slope is taken."""
    return max(1, round(_SPAN / step))


def _log_complement(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log(1 − e^{−x})."""
    return (-torch.expm1(-x)).log()
