"""Boxes of points: the domain that frequencies serve."""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Box = tuple[tuple[float, float], ...]


def box_of(x: Float[Tensor, "N d"]) -> Box:
    """The box of a set of points; (N,) are points on a line.

    Raises:
        ValueError: an empty set, or points that are not finite.
    """
    x = torch.as_tensor(x)
    x = x.unsqueeze(-1) if x.dim() == 1 else x
    if x.dim() < 2 or x.shape[-2] == 0:
        raise ValueError(f"expected points (N, d), at least one, got shape {tuple(x.shape)}")
    flat = x.detach().reshape(-1, x.shape[-1])
    low, high = flat.amin(0).double(), flat.amax(0).double()
    if not torch.isfinite(low + high).all():
        raise ValueError("expected finite points, got NaN or infinite coordinates; drop them")
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


def as_box(box: Box, name: str) -> Box:
    pairs = tuple((float(low), float(high)) for low, high in box)
    if not all(low <= high and math.isfinite(high - low) for low, high in pairs):
        raise ValueError(f"Grid expects {name}=((low, high), ...) for each input, got {box}")
    return pairs


def within_box(x: Float[Tensor, "n d"], box: Box) -> Bool[Tensor, "n"]:
    low, high = torch.tensor(box, dtype=x.dtype, device=x.device).mT
    return ((x >= low) & (x <= high)).all(-1)


def contains(domain: Box, box: Box) -> bool:
    return all(
        low <= own[0] and own[1] <= high for own, (low, high) in zip(box, domain, strict=True)
    )


def union(first: Box, second: Box) -> Box:
    """The smallest box that holds both."""
    return tuple((min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(first, second, strict=True))


def in_words(box: Box) -> str:
    return " x ".join(f"({low:.6g}, {high:.6g})" for low, high in box)
