"""Shaded maps without margins, colour bars of their height, and scales that panels share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import Collection
    from matplotlib.colorbar import Colorbar
    from matplotlib.colors import Normalize
    from matplotlib.tri import Triangulation

BESIDE = (1.03, 0, 0.04, 1)  # left, bottom, width, height, in units of the axes


def plot_colorbar(
    ax: Axes, shaded: ScalarMappable, label: str | None = None, *, extend: str | None = None
) -> Colorbar:
    """Draw a colour bar right of some axes, as high as these are at any aspect.

    The layout of the figure, such as "compressed" or "constrained", makes room for it; in a figure
    without one the axes shrink.

    Args:
        ax: matplotlib axes, the last of those that share the bar.
        shaded: what `plot_field` returned, or anything of matplotlib that has colours.
        label: the name of the quantity, with its unit.
        extend: "neither", "min", "max" or "both": the ends that colours are cut off at, which get
            a tip; by default those beyond which `shaded` has values.

    Returns:
        The colour bar.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_colorbar, plot_field
        >>> x, norm = np.random.default_rng(0).uniform(size=(50, 2)), plt.Normalize(0, 0.8)
        >>> fig, axes = plt.subplots(1, 2, layout="compressed")
        >>> style = {"norm": norm, "colorbar": False}
        >>> maps = [plot_field(ax, x, shade=x[:, 0], **style) for ax in axes]
        >>> plot_colorbar(axes[1], maps[1], "speed (m/s)").extend
        'max'
        >>> plt.close(fig)
    """
    extend = _cut_off(shaded) if extend is None else extend
    beside = _shrink(ax) if ax.figure.get_layout_engine() is None else ax.inset_axes(BESIDE)
    return ax.figure.colorbar(shaded, cax=beside, label=label, extend=extend)


def shade_map(
    caller: str, ax: Axes, x: np.ndarray, shade: np.ndarray, norm: Normalize | None, cmap: str
) -> Collection:
    """Colours between the points, up to the edge of the axes; blank at points with NaN."""
    triangles = triangulated(caller, x, shade)
    shaded = ax.tripcolor(
        triangles, shade, shading="gouraud", cmap=cmap, norm=norm, rasterized=True
    )
    shaded.sticky_edges.x[:], shaded.sticky_edges.y[:] = np.stack([x.min(0), x.max(0)], axis=-1)
    ax.autoscale_view()
    return shaded


def triangulated(caller: str, x: np.ndarray, *values: np.ndarray) -> Triangulation:
    """Triangles between the points, but for those at a point where a value is not finite."""
    from matplotlib.tri import Triangulation

    try:
        triangles = Triangulation(*x.T)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"{caller} expects three positions or more to shade, not on one line, got {len(x)} "
            f"points ({error}); draw them without shade"
        ) from error
    gaps = ~np.all([np.isfinite(own) for own in values], axis=0)
    triangles.set_mask(gaps[triangles.triangles].any(-1) if gaps.any() else None)
    return triangles


def norm_from_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    return Normalize(0, max(np.nanmax(np.abs(shade)) for shade in shades) or 1)


def norm_about_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    limit = norm_from_zero(*shades).vmax
    return Normalize(-limit, limit)


def _shrink(ax: Axes) -> Axes:
    """New axes in a part of some, as high as what is left of these."""
    from mpl_toolkits.axes_grid1 import make_axes_locatable

    return make_axes_locatable(ax).append_axes("right", size="4%", pad="3%")


def _cut_off(shaded: ScalarMappable) -> str:
    """The ends of its scale beyond which values lie, by more than rounding."""
    low, high = shaded.get_clim()
    values = np.ma.masked_invalid(shaded.get_array())
    slack = 1e-3 * (high - low)
    below, above = bool(values.min() < low - slack), bool(values.max() > high + slack)
    return ("neither", "min", "max", "both")[below + 2 * above]
