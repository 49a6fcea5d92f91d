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


def check(caller: str, x: np.ndarray, **arrays: tuple[np.ndarray | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless positions are (n, 2), and every array (n, *its shape at a point)."""
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"{caller} expects positions of shape (n, 2), got {x.shape}")
    for name, (values, shape) in arrays.items():
        expected = (len(x), *shape)
        if values is not None and values.shape != expected:
            raise ValueError(
                f"{caller} expects {name} of shape {expected}, got {values.shape}; give one row "
                "for each position"
            )


def check_deviations(caller: str, sd: np.ndarray | None) -> None:
    if sd is not None and (sd < 0).any():
        raise ValueError(
            f"{caller} expects standard deviations, got {sd.min():.3g}; give square roots "
            "of variances"
        )
