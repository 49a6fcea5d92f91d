"""Pictures of vector fields. matplotlib is imported when a function is called, not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import Collection
    from matplotlib.colors import Normalize


def plot_field(
    ax: Axes,
    x: ArrayLike,
    vectors: ArrayLike | None = None,
    *,
    shade: ArrayLike | None = None,
    label: str | None = None,
    norm: Normalize | None = None,
    arrows: int = 24,
    cmap: str = "viridis",
) -> Collection | None:
    """Arrows of a planar field over a shaded quantity, on the caller's axes.

    Args:
        ax: matplotlib axes; their limits, labels and titles stay the caller's.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        vectors: the field (n, 2); the longest arrows span about a cell. None gives a shaded map.
        shade: a quantity (n,) to shade, such as a speed or a standard deviation.
        label: what `shade` is, with its unit, for the colour bar.
        norm: a matplotlib normalisation of the shade; share one between panels of one unit.
        arrows: about how many arrows along the longer side; points between are left out.
        cmap: a matplotlib colour map; the default is safe for colour-blind readers.

    Returns:
        The shaded collection, for colour bars of your own; None without `shade`.

    Raises:
        ValueError: arrays whose lengths differ or whose points are not planar.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.random.default_rng(0).uniform(size=(50, 2))
        >>> fig, ax = plt.subplots()
        >>> shaded = plot_field(ax, x, x[:, ::-1], shade=x[:, 0], label="speed (m/s)")
        >>> plt.close(fig)
    """
    x, vectors, shade = (_array(values) for values in (x, vectors, shade))
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"plot_field expects positions of shape (n, 2), got {x.shape}")
    for name, values, expected in (
        ("vectors", vectors, x.shape),
        ("shade", shade, x.shape[:1]),
    ):
        if values is not None and values.shape != expected:
            raise ValueError(f"plot_field expects {name} of shape {expected}, got {values.shape}")
    shaded = None
    if shade is not None:
        shaded = ax.tripcolor(*x.T, shade, shading="gouraud", cmap=cmap, norm=norm, rasterized=True)
        ax.figure.colorbar(shaded, ax=ax, label=label, shrink=0.85)
    if vectors is not None:
        kept, cell = _thinned(x, arrows)
        longest = np.quantile(np.linalg.norm(vectors[kept], axis=-1), 0.95)
        ax.quiver(
            *x[kept].T,
            *vectors[kept].T,
            angles="xy",
            scale_units="xy",
            scale=max(longest, np.finfo(float).tiny) / (1.4 * cell),  # neighbours hardly overlap
            pivot="mid",
            width=0.0035,
            color="white",
            edgecolor="black",
            linewidth=0.3,
        )
    ax.set_aspect("equal")
    return shaded


def _thinned(x: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The most central point of each cell of a lattice with `arrows` cells on the longer side."""
    extent = x.max(0) - x.min(0)
    cell = max(extent.max(), np.finfo(float).tiny) / arrows
    scaled = (x - x.min(0)) / cell
    lattice = np.floor(scaled).astype(np.int64)
    central = np.argsort(np.abs(scaled - lattice - 0.5).max(-1), kind="stable")
    return central[np.unique(lattice[central], axis=0, return_index=True)[1]], cell


def _array(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array of an array, a list, or a tensor that may require gradients."""
    if values is None:
        return None
    return np.asarray(values.detach() if hasattr(values, "detach") else values)
