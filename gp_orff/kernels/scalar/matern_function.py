"""The functions z^μ K_μ(z) of Matérn kernels of any smoothness, from tables of scipy's."""

import math
from functools import lru_cache

import numpy as np
import scipy.special
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

_FIRST, _LAST = -30.0, 13.0  # log q of the table: z from 3e-7 to 665
_CELLS = 32 * 43  # of width 1/32
_DEGREE = 6  # of the polynomial in a cell


class MaternFunction(Function):
    """g_μ(q) = z^μ K_μ(z) with z = √q, for q > 0 and any real μ, in float64.

    K_μ is the modified Bessel function of the second kind. The derivative of g_μ by q is −½ g_{μ−1}
    (Abramowitz & Stegun 1964, 9.6.28). The logarithm of e^z g_μ, as a function of log q, is close
    to straight lines at both ends and smooth between them: polynomials in 1376 cells interpolate it
    to 1e-14. Below the table are values of scipy, beyond it z is so large that g_μ is zero.
    """

    @staticmethod
    def forward(ctx, q: Float[Tensor, "*m"], order: float) -> Float[Tensor, "*m"]:
        ctx.save_for_backward(q)
        ctx.order = order
        return _values(q.detach().double(), order).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        return -0.5 * grad * MaternFunction.apply(q, ctx.order - 1), None


def _values(q: Float[Tensor, "*m"], order: float) -> Float[Tensor, "*m"]:
    t = q.log()
    position = (t - _FIRST) * (_CELLS / (_LAST - _FIRST))
    cell = position.clamp(0, _CELLS - 1).long()
    local = position.sub_(cell).mul_(2).sub_(1)  # from −1 to 1
    total = torch.zeros_like(q)
    for coefficient in _table(order, q.device):
        total.mul_(local).add_(coefficient[cell])
    values = total.sub_(q.sqrt()).exp_()
    values[t >= _LAST] = 0.0
    below = t < _FIRST
    if below.any():
        values[below] = torch.from_numpy(_logarithm(q[below].cpu().numpy(), order)).to(q).exp()
    return values


@lru_cache(maxsize=64)
def _table(order: float, device: torch.device) -> Float[Tensor, "k cells"]:
    """The coefficients of log(e^z g_μ) in every cell, of the highest power first."""
    nodes = np.cos((np.arange(_DEGREE + 1) + 0.5) * np.pi / (_DEGREE + 1))
    positions = np.arange(_CELLS)[:, None] + 0.5 * (nodes + 1)
    q = np.exp(_FIRST + positions * ((_LAST - _FIRST) / _CELLS))
    values = _logarithm(q, order) + np.sqrt(q)
    return torch.from_numpy(np.linalg.solve(np.vander(nodes), values.T)).to(device)


def _logarithm(q: Float[np.ndarray, "*m"], order: float) -> Float[np.ndarray, "*m"]:
    """log g_μ(q); where K_μ(z) overflows, from its series 2^{μ−1} Γ(μ) (1 − q/(4(μ − 1)) + …)."""
    z = np.sqrt(q)
    scaled = scipy.special.kve(order, z)
    large = ~np.isfinite(scaled)
    values = np.log(np.where(large, 1.0, scaled)) - z + order * np.log(z)
    if order > 1:
        limit = (order - 1) * math.log(2) + math.lgamma(order) - q / (4 * (order - 1))
        values = np.where(large, limit, values)
    return values
