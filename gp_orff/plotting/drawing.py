"""Common parts of all plots: arrays, arrows, colours, sizes and titles."""

from __future__ import annotations

from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import Collection
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize
    from matplotlib.quiver import Quiver
    from matplotlib.tri import Triangulation

# Colour maps, all safe for colour-blind readers.

MAGNITUDE = "viridis"
"""The colour map of quantities that are never negative, such as a speed."""
DEVIATION = "cividis"
"""The colour map of standard deviations."""
SIGNED = "PuOr_r"
"""The colour map of quantities with a sign, on a scale that is symmetric about zero."""

STYLE = {
    "axes.formatter.use_mathtext": True,
    "axes.labelsize": "medium",
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 9,
    "hatch.linewidth": 0.5,
    "image.cmap": MAGNITUDE,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "savefig.bbox": "tight",
    "savefig.dpi": 300,
    "xtick.labelsize": "small",
    "ytick.labelsize": "small",
}
"""Settings of matplotlib for print: 300 dots per inch, small text, and fonts that a PDF embeds."""


def title_panels(axes: Axes | Sequence[Axes] | np.ndarray, titles: Sequence[str]) -> None:
    """Set the titles of panels, with the letters (a), (b), ... if there are several panels.

    Titles are at the left edge.

    Args:
        axes: matplotlib axes, in the order of their letters.
        titles: one title for each axes.

    Raises:
        ValueError: The numbers of titles and axes differ, or there are more than 26.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import STYLE, title_panels
        >>> with plt.rc_context(STYLE):
        ...     fig, axes = plt.subplots(1, 2, layout="compressed")
        ...     title_panels(axes, ["mean", "standard deviation"])
        >>> [ax.get_title(loc="left") for ax in axes]
        ['(a) mean', '(b) standard deviation']
        >>> plt.close(fig)
    """
    axes = np.ravel(axes)
    if not len(axes) == len(titles) <= len(ascii_lowercase):
        raise ValueError(
            f"title_panels expects one title for each of {len(axes)} axes, at most 26, got "
            f"{len(titles)} titles; pass as many titles as axes"
        )
    letters = ascii_lowercase[: len(axes)]
    for ax, letter, title in zip(axes, letters, titles, strict=True):
        ax.set_title(f"({letter}) {title}" if len(axes) > 1 else title, loc="left")


# Conversion of arrays of any kind to NumPy, and checks.


TINY = np.finfo(float).tiny
ROUNDING = 1e-3  # relative; smaller deviations come from single precision


def array(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array from an array, a list, or a tensor, which may be on a GPU and have
    gradients."""
    if values is None:
        return None
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def column(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array. Values of shape (n, 1) get the shape (n,)."""
    values = array(values)
    return values[:, 0] if values is not None and values.shape[1:] == (1,) else values


def places_on_grid(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """The sizes (2,) of a grid of positions, the indices (n, 2) of the positions, and whether it is
    regular.

    A regular grid has equal steps along each axis and no position twice. Positions may be missing.
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
    """Raise a ValueError unless positions have the shape (n, 2), and each array the shape
    (n, *shape). Each argument in `arrays` is a pair of an array and its shape at one point."""
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"{caller} expects positions of shape (n, 2), got {x.shape}")
    if not len(x) or not np.isfinite(x).all():
        raise ValueError(
            f"{caller} expects one or more finite positions, got {len(x)} with "
            f"{(~np.isfinite(x)).sum()} values that are not finite; drop these rows"
        )
    for name, (values, shape) in arrays.items():
        expected = (len(x), *shape)
        if values is not None and values.shape != expected:
            raise ValueError(
                f"{caller} expects {name} of shape {expected}, got {values.shape}; give one row "
                "for each position"
            )
        if values is not None and not np.isfinite(values).any():
            raise ValueError(f"{caller} expects numbers in {name}, got only NaN; omit {name}")


def check_deviations(caller: str, sd: np.ndarray | None) -> None:
    if sd is not None and (sd < 0).any():
        raise ValueError(
            f"{caller} expects standard deviations, which are not negative, got {sd.min():.3g}; "
            "give square roots of variances"
        )


def check_level(caller: str, level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"{caller} expects a level between 0 and 1, got {level}; use 0.95")


def shown(x: np.ndarray, *arrays: np.ndarray | None) -> tuple[np.ndarray | None, ...]:
    """Return the positions that are finite, and the same rows of arrays. Projected positions that
    are not on the map are not finite."""
    rows = np.isfinite(x).all(-1)
    return tuple(values if values is None else values[rows] for values in (x, *arrays))


# Arrows: their points, their lengths, and a reference arrow.


def draw_arrows(
    ax: Axes,
    x: np.ndarray,
    vectors: np.ndarray,
    rows: np.ndarray,
    scale: float,
    color: str = "white",
) -> Quiver:
    """Draw arrows at some rows. Arrows that would cross the frame of the axes are omitted. Axes
    without a frame grow."""
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
        color=color,
        edgecolor="black",
        linewidth=0.3,
    )
    if len(rows):
        ax.update_datalim(np.concatenate(ends(x[rows], vectors[rows], scale)))
        ax.autoscale_view()
    return drawn


def draw_reference(drawn: Quiver, unit: str, radius: float = 0.0) -> None:
    """Draw a reference arrow of a round length, with its length, above the upper right corner.

    It is at least a tenth as long as the longer side of the positions. If `radius` is positive, a
    circle of this radius is at its tip, as a key to ellipses. If no arrow is inside the frame, no
    reference arrow is drawn.
    """
    if not len(drawn.U):
        return
    from matplotlib.patches import Circle
    from matplotlib.quiver import QuiverKey
    from matplotlib.transforms import Affine2D, Bbox

    class Reference(QuiverKey):
        """An arrow that ends at the right edge, with its length. In contrast to `QuiverKey`, it has
        a box, which layouts use."""

        def get_window_extent(self, renderer=None) -> Bbox:
            """The box of the text to the left of the arrow, and of the arrow and its circle."""
            self._move(renderer)
            start = drawn.axes.transAxes.transform((self.X, self.Y))
            text = self.text.get_window_extent(renderer)
            left, half = start[0] - self.labelsep - text.width, self._half(renderer)
            right = drawn.axes.bbox.x1
            return Bbox.from_extents(left, start[1] - half, right, start[1] + half)

        def get_tightbbox(self, renderer=None) -> Bbox:
            """The box of `get_window_extent`, because nothing clips it."""
            return self.get_window_extent(renderer)

        def draw(self, renderer) -> None:
            """Draw text, arrow and circle at the present position of the axes."""
            self._move(renderer)
            super().draw(renderer)
            if radius:
                tip = drawn.axes.bbox.x1 - self._length(radius)
                middle = drawn.axes.transAxes.transform((self.X, self.Y))[1]
                circle = Circle((0, 0), 1, fill=False, edgecolor="black", linewidth=0.7)
                place = Affine2D().scale(self._length(radius)).translate(tip, middle)
                circle.set_transform(place)
                circle.set_figure(drawn.axes.figure)
                circle.draw(renderer)

        def _length(self, value: float) -> float:
            """A length of the field along the first axis, in pixels."""
            ends = drawn.axes.transData.transform([(0.0, 0.0), (value / drawn.scale, 0.0)])
            return abs(ends[1, 0] - ends[0, 0])

        def _half(self, renderer) -> float:
            """Half the height in pixels."""
            text = self.text.get_window_extent(renderer)
            return max(0.8 * text.height, self._length(radius) + 1)

        def _move(self, renderer) -> None:
            """Move the arrow so that its tip, or the circle, ends at the right edge of the axes."""
            box = drawn.axes.bbox
            self.X = 1 - (self._length(self.U) + self._length(radius)) / box.width
            self.Y = 1 + (self._half(renderer) + 2) / box.height

    side = np.ptp(drawn.get_offsets(), axis=0).max()
    longest = np.hypot(drawn.U, drawn.V).max()
    length = round_up(0.1 * side * drawn.scale or longest)
    size = f" ± {radius:g}" if radius else ""
    key = Reference(
        drawn,
        1.0,
        1.03,
        length,
        f"{length:g}{size} {unit}".strip(),
        labelpos="W",
        labelsep=0.06,
        coordinates="axes",
        color="black",
        fontproperties={"size": "small"},
    )
    for other in drawn.axes.findobj(QuiverKey):
        other.remove()
    drawn.axes.add_artist(key)
    key.set_clip_on(False)  # it is outside the axes, and layouts ignore clipped artists there


def round_up(value: float) -> float:
    """The smallest number 1, 2 or 5 times a power of ten that is not below `value`."""
    power = 10.0 ** np.floor(np.log10(max(value, TINY)))
    steps = (1, 2, 5, 10)
    return float(f"{min(step * power for step in steps if step * power >= value * (1 - 1e-9)):.3g}")


def arrows_of(x: np.ndarray, vectors: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """Return the rows of the points that get an arrow, and the scale of the arrows.

    The scale is in units of the field per unit of the axes. It makes 95 % of the arrows at most 1.2
    times as long as the distance between arrows. Vectors that contain NaN get no arrow. The points
    must not contain NaN.
    """
    given = np.flatnonzero(np.isfinite(vectors).all(-1))
    chosen, cell = thinned(x[given], arrows)
    rows = given[chosen]
    long = float(np.nanquantile(np.linalg.norm(vectors[rows], axis=-1), 0.95))
    return rows, max(long, TINY) / (1.2 * cell)


def thinned(x: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The rows of about `arrows` points along the longer side, and the distance between them.

    From a regular grid, the function chooses equidistant rows and columns away from its edges.
    Otherwise, it chooses the most central point in each cell of a lattice.
    """
    if arrows < 1:
        raise ValueError(
            f"expected one arrow or more along the longer side, got arrows={arrows}; to draw no "
            "arrows, omit the vectors"
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
    """Tails and tips of arrows whose middle is at x."""
    half = 0.5 * vectors / scale
    return x - half, x + half


def inside(
    ax: Axes, x: np.ndarray, vectors: np.ndarray, rows: np.ndarray, scale: float
) -> np.ndarray:
    """The rows whose arrows do not cross the frame of the axes."""
    low, high = frame(ax)
    within = [((low <= end) & (end <= high)).all(-1) for end in ends(x[rows], vectors[rows], scale)]
    return rows[np.logical_and(*within)]


def frame(ax: Axes) -> np.ndarray:
    """The lower and upper limits (2, 2) that were set, or the edges of a map; otherwise
    infinite."""
    sides = []
    for axis in "xy":
        edges = [edge for own in ax.get_children() for edge in getattr(own.sticky_edges, axis)]
        if not getattr(ax, f"get_autoscale{axis}_on")():
            edges = getattr(ax, f"get_{axis}lim")()
        sides.append((min(edges, default=-np.inf), max(edges, default=np.inf)))
    return np.transpose(sides)


# Shaded maps without margins, colour bars as high as maps, and common scales of panels.


def plot_colorbar(
    ax: Axes, shaded: ScalarMappable, label: str | None = None, *, extend: str | None = None
) -> Colorbar:
    """Draw a colour bar at the right of axes, as high as the axes at any aspect.

    The layout of the figure, such as "compressed" or "constrained", makes room for it. In a figure
    without a layout, the axes shrink.

    Args:
        ax: matplotlib axes. If several axes share the bar, pass the last one.
        shaded: the result of `plot_field` or a similar function, or any object of matplotlib with a
            colour scale.
        label: the name of the quantity, with its unit.
        extend: the ends of the bar with a tip, which shows that values exceed the scale: "neither",
            "min", "max" or "both". The default follows from the values of `shaded`.

    Returns:
        The matplotlib colour bar.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_colorbar, plot_field
        >>> x, norm = (
        ...     np.random.default_rng(0).uniform(size=(50, 2)),
        ...     plt.Normalize(0, 0.8),
        ... )
        >>> fig, axes = plt.subplots(1, 2, layout="compressed")
        >>> style = {"norm": norm, "colorbar": False}
        >>> maps = [plot_field(ax, x, shade=x[:, 0], **style) for ax in axes]
        >>> plot_colorbar(axes[1], maps[1], "speed (m/s)").extend
        'max'
        >>> plt.close(fig)
    """
    extend = cut_off(shaded.norm, shaded.get_array()) if extend is None else extend
    place = (1.03, 0, 0.04, 1)  # left, bottom, width, height, in units of the axes
    beside = _shrink(ax) if ax.figure.get_layout_engine() is None else ax.inset_axes(place)
    return ax.figure.colorbar(shaded, cax=beside, label=label, extend=extend)


def shade_map(
    caller: str,
    ax: Axes,
    x: np.ndarray,
    shade: np.ndarray,
    norm: Normalize | None,
    cmap: str,
    label: str | None = None,
    colorbar: bool = False,
) -> Collection:
    """Draw colours between the points, up to the edge of the axes. Points with NaN are blank."""
    triangles = triangulated(caller, x, shade)
    shaded = ax.tripcolor(
        triangles, shade, shading="gouraud", cmap=cmap, norm=norm, rasterized=True
    )
    shaded.sticky_edges.x[:], shaded.sticky_edges.y[:] = np.stack([x.min(0), x.max(0)], axis=-1)
    ax.autoscale_view()
    if colorbar:
        plot_colorbar(ax, shaded, label)
    return shaded


def triangulated(caller: str, x: np.ndarray, *values: np.ndarray) -> Triangulation:
    """Triangles between the points. Triangles with a value that is not finite are omitted."""
    from matplotlib.tri import Triangulation

    try:
        triangles = Triangulation(*x.T)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{caller} expects three or more positions to shade, not all on one line, got {len(x)} "
            f"points ({error}); draw them without shade"
        ) from error
    gaps = ~np.all([np.isfinite(own) for own in values], axis=0)
    triangles.set_mask(gaps[triangles.triangles].any(-1) if gaps.any() else None)
    return triangles


def norm_from_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    return Normalize(0, max(np.nanmax(np.abs(shade)) for shade in shades) or 1)


def norm_of_interior(x: np.ndarray, *shades: np.ndarray) -> Normalize:
    """A scale from zero to the largest value in the interior, the middle 80 % of each side.

    Standard deviations increase at the edge of the data. If no position is in the interior, all
    positions are used.
    """
    middle, extent = (x.min(0) + x.max(0)) / 2, np.ptp(x, axis=0)
    inner = (np.abs(x - middle) <= 0.4 * extent).all(-1)
    inner &= np.isfinite(shades).all(0)
    return norm_from_zero(*(shade[inner] if inner.any() else shade for shade in shades))


def norm_about_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    limit = norm_from_zero(*shades).vmax
    return Normalize(-limit, limit)


def _shrink(ax: Axes) -> Axes:
    """New axes for a colour bar in a part of `ax`, as high as the rest of `ax`."""
    from matplotlib.axes import Axes
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    return make_axes_locatable(ax).append_axes("right", size="4%", pad="3%", axes_class=Axes)


def cut_off(norm: Normalize, *shades: np.ndarray) -> str:
    """The ends of a scale that values exceed by more than rounding: "neither", "min", "max" or
    "both"."""
    values = np.ma.masked_invalid(np.concatenate([np.ravel(shade) for shade in shades]))
    slack = 1e-3 * (norm.vmax - norm.vmin)
    below, above = (
        bool(values.min() < norm.vmin - slack),
        bool(values.max() > norm.vmax + slack),
    )
    return ("neither", "min", "max", "both")[below + 2 * above]
