"""Arrays of any kind as NumPy's, and what is checked of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

TINY = np.finfo(float).tiny
ROUNDING = 1e-3  # relative; smaller deviations come from single precision


def array(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array from an array, a list, or a tensor, with gradients and on a GPU too."""
    if values is None:
        return None
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def column(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array, (n,) if the values are (n, 1)."""
    values = array(values)
    return values[:, 0] if values is not None and values.shape[1:] == (1,) else values


def places_on_grid(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """The lengths (2,) of a grid of positions, the indices (n, 2) of these, and if it is regular.

    A regular grid has equal steps along each axis, no position twice, and some may be missing.
    """
    x = x.astype(np.float64)
    start, extent = x.min(0), np.ptp(x, axis=0)
    counts = 1 + (np.diff(np.sort(x, axis=0), axis=0) > 1e-6 * extent).sum(0)
    spacing = extent / np.maximum(counts - 1, 1)
    position = (x - start) / np.where(spacing > 0, spacing, 1)
    index = np.rint(position).astype(np.int64)
    even = (counts > 1).all() and np.abs(position - index).max() <= ROUNDING
    return counts, index, bool(even and len(np.unique(index, axis=0)) == len(x))


def check(caller: str, x: np.ndarray, **arrays: tuple[np.ndarray | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless positions are (n, 2), and every array (n, *its shape at a point)."""
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"{caller} expects positions of shape (n, 2), got {x.shape}")
    if not len(x) or not np.isfinite(x).all():
        raise ValueError(
            f"{caller} expects finite positions, one or more, got {len(x)} with "
            f"{(~np.isfinite(x)).sum()} values that are not; leave these rows out"
        )
    for name, (values, shape) in arrays.items():
        expected = (len(x), *shape)
        if values is not None and values.shape != expected:
            raise ValueError(
                f"{caller} expects {name} of shape {expected}, got {values.shape}; give one row "
                "for each position"
            )
        if values is not None and not np.isfinite(values).any():
            raise ValueError(f"{caller} expects numbers in {name}, got none but NaN; leave it out")


def check_deviations(caller: str, sd: np.ndarray | None) -> None:
    if sd is not None and (sd < 0).any():
        raise ValueError(
            f"{caller} expects standard deviations, got {sd.min():.3g}; give square roots "
            "of variances"
        )
