"""Quadrature over the unit sphere."""

import math

import numpy as np
import scipy.stats
import torch
from jaxtyping import Float
from torch import Tensor

_MANY_DIMS = 14  # log₂ of the number of quasi-random points for more than three dimensions


def unit_sphere(
    dims: int, device: torch.device, angles: int = 128
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m"]]:
    """Unit vectors and weights of a mean over the sphere; spectrally accurate for dims ≤ 3.

    `angles` points lie on a circle; a sphere has half as many circles.
    """
    if dims == 1:
        points = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    elif dims <= 3:
        angle = torch.arange(angles, dtype=torch.float64) * (2 * math.pi / angles)
        points = torch.stack([angle.cos(), angle.sin()], dim=-1)
    else:
        sequence = scipy.stats.qmc.Sobol(dims, seed=0).random_base2(_MANY_DIMS)
        normal = torch.from_numpy(scipy.stats.norm.ppf(sequence))
        points = normal / normal.norm(dim=-1, keepdim=True)
    points = points.to(device)
    if dims != 3:
        return points, points.new_full((len(points),), 1 / len(points))
    height, weight = (
        torch.from_numpy(v).to(device) for v in np.polynomial.legendre.leggauss(angles // 2)
    )
    flat = (1 - height.square()).sqrt()[:, None, None] * points  # (circles, angles, 2)
    heights = height[:, None, None].expand(*flat.shape[:2], 1)
    weights = (0.5 * weight / len(points)).repeat_interleave(len(points))
    return torch.cat([flat, heights], dim=-1).flatten(0, 1), weights
