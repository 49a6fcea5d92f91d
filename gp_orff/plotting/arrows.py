"""Arrows: which points get one, how long they are, and one to read lengths from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gp_orff.plotting.arrays import TINY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.quiver import Quiver


def draw_arrows(
    ax: Axes, x: np.ndarray, vectors: np.ndarray, rows: np.ndarray, scale: float
) -> Quiver:
    """Arrows at some rows, all inside the axes where the caller set no limits."""
    drawn = ax.quiver(
        *x[rows].T,
        *vectors[rows].T,
        angles="xy",
        scale_units="xy",
        scale=scale,
        pivot="mid",
        width=0.0035,
        color="white",
        edgecolor="black",
        linewidth=0.3,
    )
    half = 0.5 * vectors[rows] / scale
    ax.update_datalim(np.concatenate([x[rows] - half, x[rows] + half]))
    ax.autoscale_view()
    return drawn


def draw_reference(drawn: Quiver, vectors: np.ndarray, unit: str) -> None:
    """An arrow of a round length, with its length, above the upper right corner."""
    length = round_length(np.quantile(np.linalg.norm(vectors, axis=-1), 0.95))
    drawn.axes.quiverkey(
        drawn,
        0.97,
        1.03,
        length,
        f"{length:g} {unit}".strip(),
        labelpos="W",
        coordinates="axes",
        fontproperties={"size": "small"},
    )


def round_length(longest: float) -> float:
    """The largest of 1, 2, 5, 10, 20, ... that is not above `longest`; decimals alike."""
    power = 10.0 ** np.floor(np.log10(max(longest, TINY)))
    return float(max(step for step in (1, 2, 5) if step * power <= longest or step == 1) * power)


def arrows_of(x: np.ndarray, vectors: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The rows of the points that get arrows, and the units of the field per unit of the axes."""
    rows, cell = thinned(x, arrows)
    longest = np.quantile(np.linalg.norm(vectors[rows], axis=-1), 0.95)
    return rows, max(longest, TINY) / (1.4 * cell)  # neighbours hardly overlap


def thinned(x: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The row of the most central point in each cell of a lattice, and the size of a cell.

    The lattice has `arrows` cells on the longer side.
    """
    extent = x.max(0) - x.min(0)
    cell = max(extent.max(), TINY) / arrows
    scaled = (x - x.min(0)) / cell
    lattice = np.floor(scaled).astype(np.int64)
    central = np.argsort(np.abs(scaled - lattice - 0.5).max(-1), kind="stable")
    return central[np.unique(lattice[central], axis=0, return_index=True)[1]], cell
