"""Boxes: the regions of input space that frequencies are made for."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Box = tuple[tuple[float, float], ...]  # (low, high) of each input column


def box_of(x: Float[Tensor, "N d"]) -> Box:
    """The smallest box that contains the points x, (N, d), or (N,) on a line.

    Raises:
        ValueError: no points, or points that are not finite.
    """
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ValueError(
            f"expected at least one point, in an array (N, d), got shape {tuple(x.shape)}"
        )
    flat = x.detach().reshape(-1, x.shape[-1])
    low, high = flat.amin(0).double(), flat.amax(0).double()
    if not torch.isfinite(low + high).all():
        raise ValueError("expected finite points, got NaN or infinite coordinates; drop them")
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def as_box(box: Box, name: str, owner: str = "Grid") -> Box:
    """`box` with floats as bounds, after a check; errors call it the argument `name` of `owner`."""
    try:
        bounds = tuple((float(low), float(high)) for low, high in box)
    except TypeError:  # numbers in the place of pairs
        bounds = ()
    if not bounds or not all(low <= high and math.isfinite(high - low) for low, high in bounds):
        raise ValueError(
            f"{owner} expects {name}=((low, high), ...), finite numbers low <= high, one pair for "
            f"each input, got {box}"
        )
    return bounds


def within_box(x: Float[Tensor, "n d"], box: Box) -> Bool[Tensor, "n"]:
    """Which of the points x lie in a box."""
    low, high = torch.tensor(box, dtype=x.dtype, device=x.device).mT
    return ((x >= low) & (x <= high)).all(-1)


def contains(domain: Box, box: Box) -> bool:
    """Whether the domain contains the whole box."""
    return all(
        low <= side[0] and side[1] <= high for side, (low, high) in zip(box, domain, strict=True)
    )


def union(first: Box, second: Box) -> Box:
    """The smallest box that contains both."""
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(first, second, strict=True))


def in_words(box: Box) -> str:
    """A box as error messages write it: (0, 1) x (0, 2)."""
    return " x ".join(f"({low:.6g}, {high:.6g})" for low, high in box)


def rounded(box: Box, steps: Sequence[float]) -> Box:
    """A box whose bounds are rounded outward to multiples of a step along each input; those of a
    constant input stay."""
    bounds = []
    for (low, high), step in zip(box, steps, strict=True):
        if high > low and step > 1e-12 * max(abs(low), abs(high)):
            low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        bounds.append((float(low), float(high)))
    return tuple(bounds)


def far_message(data: Box, requested: Box) -> str:
    """The message for points far from the data, with the column in which they are farthest."""
    extent, joint_extent = (
        np.ptp(np.concatenate(boxes, axis=-1), axis=-1) for boxes in ([data], [data, requested])
    )
    smallest = 1e-9 * joint_extent.max() + np.finfo(float).tiny
    column = np.argmax(joint_extent / np.maximum(extent, smallest))
    (low, high), (first, last) = data[column], requested[column]
    return (
        f"expected points near the data, got column {column} from {first:.6g} to {last:.6g} where "
        f"the data are between {low:.6g} and {high:.6g}: no frequency grid serves both; check the "
        "units and the order of the columns, or predict closer to the data"
    )


def corners(box: Box, device: torch.device) -> Float[Tensor, "2 d"]:
    """The lowest and the highest point of a box."""
    return torch.tensor(box, dtype=torch.float64, device=device).mT
