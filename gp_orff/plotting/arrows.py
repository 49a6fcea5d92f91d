"""Arrows: which points get one, how long they are, and one to read lengths from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gp_orff.plotting.arrays import TINY, places_on_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.quiver import Quiver


def draw_arrows(
    ax: Axes, x: np.ndarray, vectors: np.ndarray, rows: np.ndarray, scale: float
) -> Quiver:
    """Arrows at some rows; none crosses the frame of the axes, which grow where they have none."""
    rows = inside(ax, x, vectors, rows, scale)
    drawn = ax.quiver(
        *x[rows].T,
        *vectors[rows].T,
        angles="xy",
        scale_units="xy",
        scale=scale,
        pivot="mid",
        units="inches",
        width=0.012,
        color="white",
        edgecolor="black",
        linewidth=0.3,
    )
    if len(rows):
        ax.update_datalim(np.concatenate(ends(x[rows], vectors[rows], scale)))
        ax.autoscale_view()
    return drawn


def draw_reference(drawn: Quiver, longest: float, unit: str) -> None:
    """An arrow of a round length up to `longest`, with its length, above the upper right corner.

    None where no arrow is inside the frame.
    """
    if not len(drawn.U):
        return
    length = round_length(longest)
    drawn.axes.quiverkey(
        drawn,
        0.97,
        1.03,
        length,
        f"{length:g} {unit}".strip(),
        labelpos="W",
        labelsep=0.06,
        coordinates="axes",
        fontproperties={"size": "small"},
    )


def round_length(longest: float) -> float:
    """The largest of 1, 2, 5, 10, 20, ... that is not above `longest`; decimals alike."""
    power = 10.0 ** np.floor(np.log10(max(longest, TINY)))
    return float(max(step for step in (1, 2, 5) if step * power <= longest or step == 1) * power)


def arrows_of(x: np.ndarray, vectors: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The rows of the points that get arrows, and the units of the field per unit of the axes.

    Of points without gaps. All but one in twenty are at most 1.2 times as long as arrows are apart.
    """
    given = np.flatnonzero(np.isfinite(vectors).all(-1))
    chosen, cell = thinned(x[given], arrows)
    rows = given[chosen]
    return rows, max(long_vector(vectors[rows]), TINY) / (1.2 * cell)


def long_vector(vectors: np.ndarray) -> float:
    """The length that one vector in twenty exceeds."""
    return float(np.nanquantile(np.linalg.norm(vectors, axis=-1), 0.95))


def thinned(x: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The rows of about `arrows` points along the longer side, and the distance between them.

    Every so many rows and columns of a regular grid, not at its edges; of other points, the most
    central in each cell of a lattice.
    """
    if arrows < 1:
        raise ValueError(
            f"expected one arrow or more along the longer side, got arrows={arrows}; to draw none, "
            "give no vectors"
        )
    extent = np.ptp(x, axis=0).astype(np.float64)
    longer = extent.max() or 1.0
    counts, index, regular = places_on_grid(x)
    if regular and 2 * len(x) >= counts.prod():
        spacing = extent / (counts - 1)
        stride = np.maximum(np.rint(longer / arrows / spacing), 1).astype(np.int64)
        start = np.where(stride > 1, ((counts - 1) % stride + stride) // 2, 0)
        steps = index - start
        within = (steps >= 0) & (index < counts - start) & (steps % stride == 0)
        return np.flatnonzero(within.all(-1)), min(stride * spacing)
    counts = np.maximum(np.rint(arrows * extent / longer), 1)
    scaled = (x - x.min(0)) * (counts / np.where(extent > 0, extent, 1))
    lattice = np.minimum(np.floor(scaled), counts - 1).astype(np.int64)
    central = np.argsort(np.abs(scaled - lattice - 0.5).max(-1), kind="stable")
    cells = np.unique(lattice[central], axis=0, return_index=True)[1]
    return central[cells], longer / arrows


def ends(x: np.ndarray, vectors: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Tails and tips of arrows, whose middle is at x."""
    half = 0.5 * vectors / scale
    return x - half, x + half


def inside(
    ax: Axes, x: np.ndarray, vectors: np.ndarray, rows: np.ndarray, scale: float
) -> np.ndarray:
    """Those of the rows whose arrows do not cross the frame of the axes."""
    low, high = frame(ax)
    within = [((low <= end) & (end <= high)).all(-1) for end in ends(x[rows], vectors[rows], scale)]
    return rows[np.logical_and(*within)]


def frame(ax: Axes) -> np.ndarray:
    """Lower and upper limits (2, 2) that were set, or the edges of a map, or else infinite."""
    sides = []
    for axis in "xy":
        edges = [edge for own in ax.get_children() for edge in getattr(own.sticky_edges, axis)]
        if not getattr(ax, f"get_autoscale{axis}_on")():
            edges = getattr(ax, f"get_{axis}lim")()
        sides.append((min(edges, default=-np.inf), max(edges, default=np.inf)))
    return np.transpose(sides)
