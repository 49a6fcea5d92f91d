"""Maps: a scalar with its significance, and truth beside posterior."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from gp_orff.plotting.drawing import (
    DEVIATION,
    MAGNITUDE,
    SIGNED,
    array,
    arrows_of,
    check,
    check_deviations,
    check_level,
    column,
    cut_off,
    draw_arrows,
    draw_reference,
    norm_about_zero,
    norm_from_zero,
    norm_of_interior,
    plot_colorbar,
    shade_map,
    shown,
    title_panels,
    triangulated,
)
from gp_orff.plotting.geography import placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cartopy.crs import CRS
    from matplotlib.axes import Axes
    from matplotlib.collections import Collection
    from matplotlib.colors import Normalize
    from matplotlib.tri import TriContourSet


def plot_map(
    ax: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    sd: ArrayLike | None = None,
    *,
    label: str | None,
    norm: Normalize | None = None,
    level: float = 0.95,
    cmap: str = SIGNED,
    colorbar: bool = True,
    transform: CRS | None = None,
) -> tuple[Collection, TriContourSet | None]:
    """Draw a scalar with a sign in diverging colours, hatched where its sign is uncertain.

    The sign is uncertain where |mean| < z sd; z is the two-sided Gaussian quantile, 1.96 at level
    0.95. Each point is tested on its own: if the scalar is zero everywhere, about one twentieth of
    the map is still unhatched at level 0.95.

    Args:
        ax: matplotlib axes; their limits, labels and titles are left to the caller.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        mean: the scalar (n,) or (n, 1), such as `field.mean(x, gp_orff.Divergence())`.
        sd: its standard deviation (n,) or (n, 1), in the same unit; None draws no hatches.
        label: the name of the scalar, with its unit, for the colour bar.
        norm: a matplotlib normalisation; by default symmetric, up to the largest |mean|.
        level: the probability in the interval mean ± z sd, in (0, 1).
        cmap: a matplotlib colour map; the default is safe for colour-blind readers.
        colorbar: whether to add a colour bar.
        transform: for axes of cartopy, the reference system of `x`, such as
            `cartopy.crs.PlateCarree()` for longitude and latitude.

    Returns:
        The shaded collection and the hatched contour set, or None for the latter without `sd`.

    Raises:
        ValueError: arrays whose shapes do not fit, a level outside (0, 1), a negative sd, or
            `transform` on axes that are not cartopy's.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_map
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(50, 2))
        >>> fig, ax = plt.subplots()
        >>> shaded, hatched = plot_map(
        ...     ax, x, x[:, 0], 0 * x[:, 0] + 0.2, label="divergence (1/s)"
        ... )
        >>> plt.close(fig)
    """
    x, mean, sd = array(x), column(mean), column(sd)
    check("plot_map", x, mean=(mean, ()), sd=(sd, ()))
    check_level("plot_map", level)
    check_deviations("plot_map", sd)
    x, mean, sd = shown(placed("plot_map", ax, x, transform), mean, sd)
    norm = norm_about_zero(mean) if norm is None else norm
    shaded = shade_map("plot_map", ax, x, mean, norm, cmap)
    ax.set_aspect("equal")
    if colorbar:
        plot_colorbar(ax, shaded, label)
    if sd is None:
        return shaded, None
    z = NormalDist().inv_cdf(0.5 + 0.5 * level)
    margin = z * sd - np.abs(mean)  # positive where the sign is uncertain
    top = 1 + z * np.nanmax(sd)  # above every margin
    triangles = triangulated("plot_map", x, margin)
    hatched = ax.tricontourf(triangles, margin, [0, top], colors="none", hatches=["////"])
    hatched.set(edgecolor="0.35", linewidth=0)  # this colours the hatches
    return shaded, hatched


def plot_comparison(
    axes: Sequence[Axes] | np.ndarray,
    x: ArrayLike,
    truth: ArrayLike,
    mean: ArrayLike,
    sd: ArrayLike,
    *,
    label: str,
    arrows: int = 24,
    reference: str | None = None,
) -> tuple[Collection, Collection, Collection, Collection]:
    """Draw truth, posterior mean, residual and standard deviation in four panels.

    Truth and mean share one colour scale; residual and sd share another, up to their largest value
    in the interior, as in `plot_deviation`. Each has a colour bar, next to the second of the two.
    For a vector field, the panels show lengths under arrows, and as sd the square root of the
    summed variances, the root mean square length of the residual. Scalars are shown with their
    signs.

    Args:
        axes: four matplotlib axes, two by two or in a row; titles are set, limits and labels are
            left to the caller.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        truth: the field (n, 2), or a scalar (n,) or (n, 1).
        mean: the posterior mean, in the shape and unit of `truth`.
        sd: the posterior standard deviation of each component, in the same shape and unit.
        label: the name of the quantity, with its unit, for the colour bars.
        arrows: about how many arrows along the longer side; points between them get none.
        reference: the unit of the vectors, for arrows of round lengths above truth and residual;
            None draws none.

    Returns:
        The four shaded collections. Two that share a scale share their `norm`: setting its `vmax`
        changes both.

    Raises:
        ValueError: not four axes, arrays whose shapes do not fit, or a negative sd.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.random.default_rng(0).uniform(size=(50, 2))
        >>> fig, axes = plt.subplots(2, 2, layout="constrained")
        >>> four = plot_comparison(
        ...     axes, x, x, 0.9 * x, 0 * x + 0.1, label="current (m/s)"
        ... )
        >>> four[0].norm is four[1].norm
        True
        >>> plt.close(fig)
    """
    axes, x = np.ravel(axes), array(x)
    if len(axes) != 4:
        raise ValueError(
            f"plot_comparison expects four axes, got {len(axes)}; make them with plt.subplots(2, 2)"
        )
    truth, mean, sd = (column(values) for values in (truth, mean, sd))
    outputs = (2,) if truth.ndim == 2 else ()
    check("plot_comparison", x, truth=(truth, outputs), mean=(mean, outputs), sd=(sd, outputs))
    check_deviations("plot_comparison", sd)

    panels = {
        "truth": truth,
        "posterior mean": mean,
        "residual (mean − truth)": mean - truth,
        "posterior standard deviation": sd,
    }
    signed = not outputs
    shades = list(panels.values())
    if outputs:
        shades = [np.linalg.norm(values, axis=-1) for values in shades]
    first = (norm_about_zero if signed else norm_from_zero)(*shades[:2])
    second = norm_of_interior(x, *shades[2:])
    if signed:
        second.vmin = -second.vmax
    pairs = (
        (slice(0, 2), first, MAGNITUDE, label),
        (slice(2, 4), second, DEVIATION, f"residual and sd of {label}"),
    )
    shaded = []
    for pair, norm, cmap, text in pairs:
        for ax, shade in zip(axes[pair], shades[pair], strict=True):
            cmap = SIGNED if signed else cmap
            shaded.append(shade_map("plot_comparison", ax, x, shade, norm, cmap))
        extend = cut_off(norm, *shades[pair])
        plot_colorbar(axes[pair][1], shaded[-1], text, extend=extend)
    if outputs:
        shared, own = arrows_of(x, truth, arrows), arrows_of(x, mean - truth, arrows)
        draw_arrows(axes[1], x, mean, *shared)
        for ax, vectors, chosen in ((axes[0], truth, shared), (axes[2], mean - truth, own)):
            drawn = draw_arrows(ax, x, vectors, *chosen)
            if reference is not None:
                draw_reference(drawn, reference)
    for ax in axes:
        ax.set_aspect("equal")
    title_panels(axes, list(panels))
    return tuple(shaded)
