"""Maps of planar fields: vectors, their uncertainty, scalars, and comparisons with the truth."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from gp_orff.plotting.drawing import (
    DEVIATION,
    MAGNITUDE,
    ROUNDING,
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
    ends,
    frame,
    inside,
    norm_about_zero,
    norm_from_zero,
    norm_of_interior,
    places_on_grid,
    plot_colorbar,
    round_up,
    shade_map,
    shown,
    title_panels,
    triangulated,
)
from gp_orff.plotting.geography import placed, turned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cartopy.crs import CRS
    from matplotlib.axes import Axes
    from matplotlib.collections import Collection, PolyCollection
    from matplotlib.colors import Normalize
    from matplotlib.streamplot import StreamplotSet
    from matplotlib.tri import TriContourSet


def plot_field(
    ax: Axes,
    x: ArrayLike,
    vectors: ArrayLike | None = None,
    *,
    shade: ArrayLike | None = None,
    label: str | None = None,
    norm: Normalize | None = None,
    arrows: int = 24,
    reference: str | None = None,
    color: str | None = None,
    cmap: str = MAGNITUDE,
    colorbar: bool = True,
    transform: CRS | None = None,
) -> Collection | None:
    """Draw arrows of a planar field over a shaded quantity.

    A shaded map fills its axes. If the axes have a map or limits, arrows that would cross their
    edge are omitted. Otherwise, the axes grow to contain all arrows.

    Args:
        ax: matplotlib axes. The function does not set labels and titles.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        vectors: the field (n, 2). The longest arrows are about as long as the distance between
            arrows. Points with NaN have no arrow. By default, no arrows are drawn.
        shade: a quantity (n,) to shade, such as a speed or a standard deviation. Points with NaN
            are blank.
        label: the name of `shade`, with its unit, for the colour bar.
        norm: a matplotlib normalisation of `shade`. Pass the same one to panels with a common
            scale.
        arrows: the approximate number of arrows along the longer side. Points between them have no
            arrow.
        reference: the unit of the vectors. With it, a reference arrow of a round length is drawn
            above the upper right corner. By default, there is no reference arrow.
        color: a matplotlib colour of the arrows. The default is white with dark edges over a shade,
            otherwise black.
        cmap: the name of a matplotlib colour map. The default is safe for colour-blind readers.
        colorbar: whether to add a colour bar for `shade`, as high as the axes.
        transform: the reference system of `x` on cartopy axes, such as `cartopy.crs.PlateCarree()`
            for longitude and latitude. Vectors are rotated to their direction on the map. If the
            system is in degrees, their components are to the east and north. Otherwise, they are
            along the coordinates of the system.

    Returns:
        The shaded collection, which `plot_colorbar` accepts; None without `shade`.

    Raises:
        ValueError: The lengths of arrays differ, points are not planar, points to be shaded are all
            on one line, or `transform` is given for axes that are not from cartopy.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_field
        >>> x = np.random.default_rng(0).uniform(size=(50, 2))
        >>> fig, ax = plt.subplots()
        >>> shaded = plot_field(
        ...     ax, x, x[:, ::-1], shade=x[:, 0], label="speed (m/s)"
        ... )
        >>> plt.close(fig)
    """
    x, vectors, shade = (array(values) for values in (x, vectors, shade))
    check("plot_field", x, vectors=(vectors, (2,)), shade=(shade, ()))
    if vectors is not None:
        vectors = turned(ax, x, vectors, transform)
    x, vectors, shade = shown(placed("plot_field", ax, x, transform), vectors, shade)
    shaded = None
    if shade is not None:
        shaded = shade_map("plot_field", ax, x, shade, norm, cmap, label, colorbar)
    if vectors is not None:
        color = color or ("black" if shade is None else "white")
        drawn = draw_arrows(ax, x, vectors, *arrows_of(x, vectors, arrows), color)
        if reference is not None:
            draw_reference(drawn, reference)
    ax.set_aspect("equal")
    return shaded


def plot_deviation(
    ax: Axes,
    x: ArrayLike,
    sd: ArrayLike,
    *,
    label: str | None,
    norm: Normalize | None = None,
    colorbar: bool = True,
    transform: CRS | None = None,
) -> Collection:
    """Draw a map of a standard deviation, with a colour scale for the interior.

    The scale is from zero to the largest value in the interior, which is the middle 80 % of each
    side. Standard deviations increase at the edge of the data, and a scale up to the values there
    would show the interior in one colour. If values exceed the scale, the colour bar has a tip.

    Args:
        ax: matplotlib axes. The function does not set labels and titles.
        x: positions (n, 2), scattered or on a grid, in the units of the axes or of `transform`.
        sd: the standard deviation (n,), not negative.
        label: the name of the quantity, with its unit, for the colour bar.
        norm: a matplotlib normalisation. Pass the same one to panels with a common scale.
        colorbar: whether to add a colour bar, as high as the axes.
        transform: the reference system of `x` on cartopy axes, as for `plot_field`.

    Returns:
        The shaded collection, which `plot_colorbar` accepts.

    Raises:
        ValueError: The shapes of arrays do not fit, or a standard deviation is negative.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_deviation
        >>> x = np.stack(
        ...     np.meshgrid(np.arange(11.0), np.arange(11.0)), axis=-1
        ... ).reshape(-1, 2)
        >>> fig, ax = plt.subplots()
        >>> shaded = plot_deviation(
        ...     ax, x, 0.1 + (x[:, 0] - 5) ** 2, label="sd (m/s)"
        ... )
        >>> print(shaded.norm.vmin, shaded.norm.vmax, shaded.get_array().max())
        0.0 16.1 25.1
        >>> plt.close(fig)
    """
    x, sd = array(x), column(sd)
    check("plot_deviation", x, sd=(sd, ()))
    check_deviations("plot_deviation", sd)
    norm = norm_of_interior(x, sd) if norm is None else norm
    style = {"norm": norm, "cmap": DEVIATION, "colorbar": colorbar, "transform": transform}
    return plot_field(ax, x, shade=sd, label=label, **style)


def plot_uncertainty(
    ax: Axes,
    x: ArrayLike,
    vectors: ArrayLike,
    covariances: ArrayLike,
    *,
    arrows: int = 24,
    level: float = 0.95,
    reference: str | None = None,
    color: str = "black",
    transform: CRS | None = None,
) -> PolyCollection:
    """Draw uncertainty ellipses at the tips of the arrows of `plot_field`.

    The tip of the true vector is inside an ellipse with the probability `level`, for a Gaussian
    distribution. The semi-axes are r times the standard deviations along the principal axes, with
    r² = −2 log(1 − level). So r = 2.45 for the level 0.95, and r = 1 for the level 0.39. Ellipses
    have the scale of the arrows.

    Args:
        ax: matplotlib axes. The function does not set labels and titles.
        x: positions (n, 2), as for `plot_field`.
        vectors: the field (n, 2), as for `plot_field`.
        covariances: the covariances (n, 2, 2) of the two components, in squared units of `vectors`,
            such as `field.pointwise_covariance(x)`.
        arrows: the number of arrows that was passed to `plot_field`. The points with an arrow then
            have an ellipse.
        level: the probability, between 0 and 1.
        reference: the unit of the vectors. With it, a circle of a round radius is drawn at the tip
            of the reference arrow, with both lengths. By default, there is no circle.
        color: a matplotlib colour of the outlines.
        transform: the reference system that was passed to `plot_field`.

    Returns:
        The collection of ellipses.

    Raises:
        ValueError: The shapes of arrays do not fit, matrices are not covariances, or the level is
            not between 0 and 1. Or `reference` is given, and the axes have no arrows of
            `plot_field`.

    Example:
        >>> import gp_orff, matplotlib, torch
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_field, plot_uncertainty
        >>> x = torch.rand(
        ...     50, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> field = model.condition(x, x.sin()).posterior()
        >>> fig, ax = plt.subplots()
        >>> style = {"arrows": 5, "reference": "m/s"}
        >>> _ = plot_field(ax, x, field.mean(x), **style)
        >>> covariances = field.pointwise_covariance(x)
        >>> ellipses = plot_uncertainty(ax, x, field.mean(x), covariances, **style)
        >>> plt.close(fig)
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.quiver import Quiver

    x, vectors, covariances = (array(values) for values in (x, vectors, covariances))
    if covariances.shape == x.shape:
        raise ValueError(
            f"plot_uncertainty expects covariances of shape {(*x.shape, 2)}, got {x.shape}; for "
            "uncorrelated components, give torch.diag_embed(variance)"
        )
    check("plot_uncertainty", x, vectors=(vectors, (2,)), covariances=(covariances, (2, 2)))
    check_level("plot_uncertainty", level)
    drawn = [drawing for drawing in ax.collections if isinstance(drawing, Quiver)]
    if reference is not None and not drawn:
        raise ValueError(
            "plot_uncertainty expects arrows on the axes for reference=, got none; call "
            "plot_field first"
        )
    on_map = placed("plot_uncertainty", ax, x, transform)
    vectors = turned(ax, x, vectors, transform)
    on_map, vectors, x, covariances = shown(on_map, vectors, x, covariances)
    rows, scale = arrows_of(on_map, vectors, arrows)
    rows = inside(ax, on_map, vectors, rows, scale)
    radii, directions = _principal_axes(covariances[rows])
    radii = radii * np.sqrt(-2 * np.log1p(-level))
    angle = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    _, tips = ends(on_map[rows], vectors[rows], scale)
    around = np.swapaxes(directions * radii[:, None] @ circle, 1, 2)
    outlines = tips[:, None] + turned(ax, x[rows][:, None], around, transform) / scale
    ellipses = PolyCollection(
        outlines, facecolors="none", edgecolors=color, linewidths=0.7, zorder=3
    )
    ax.add_collection(ellipses, autolim=not np.isfinite(frame(ax)).all())
    ax.autoscale_view()
    ax.set_aspect("equal")
    if reference is not None and len(rows):
        draw_reference(drawn[-1], reference, round_up(np.median(radii.max(-1))))
    return ellipses


def plot_streamlines(
    ax: Axes,
    x: ArrayLike,
    vectors: ArrayLike,
    *,
    density: float = 1.0,
    color: str = "white",
    linewidth: float = 0.8,
) -> StreamplotSet:
    """Draw streamlines of a planar field on a regular grid.

    The lines have dark edges, so that they are visible on any shade.

    Args:
        ax: matplotlib axes. The function does not set labels and titles.
        x: positions (n, 2) of a regular grid in any order, in the units of the axes.
        vectors: the field (n, 2).
        density: the density of the lines, as for `streamplot` of matplotlib.
        color: a matplotlib colour of the lines.
        linewidth: the width of the lines, in points.

    Returns:
        The lines and arrow heads, as `streamplot` of matplotlib returns them.

    Raises:
        ValueError: The shapes of arrays do not fit, or positions are not a regular grid.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.stack(
        ...     np.meshgrid(np.arange(9.0), np.arange(5.0)), axis=-1
        ... ).reshape(-1, 2)
        >>> fig, ax = plt.subplots()
        >>> streamlines = plot_streamlines(ax, x, x[:, ::-1] * [-1, 1])
        >>> plt.close(fig)
    """
    from matplotlib.patheffects import withStroke

    x, vectors = array(x), array(vectors)
    check("plot_streamlines", x, vectors=(vectors, (2,)))
    *coordinates, components = _to_grid(x, vectors)
    drawn_before = ax.dataLim.get_points().copy()
    streamlines = ax.streamplot(
        *coordinates, *components, density=density, color=color, linewidth=linewidth, arrowsize=0.8
    )
    ax.dataLim.set_points(drawn_before)  # arrow heads do not contribute to the limits
    ax.update_datalim([x.min(0), x.max(0)])
    ax.autoscale_view()
    streamlines.lines.set_path_effects([withStroke(linewidth=linewidth + 0.8, foreground="black")])
    ax.set_aspect("equal")
    return streamlines


def _principal_axes(covariances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations (n, 2) along the columns of orthogonal matrices (n, 2, 2)."""
    size = np.abs(covariances).max((1, 2), keepdims=True)
    variances, directions = np.linalg.eigh(covariances)
    asymmetric = np.abs(covariances - np.swapaxes(covariances, 1, 2)) > ROUNDING * size
    if asymmetric.any() or (variances < -ROUNDING * size[..., 0]).any():
        raise ValueError(
            "plot_uncertainty expects symmetric matrices without negative eigenvalues, got one "
            f"with eigenvalue {variances.min():.3g}; give covariances, not Cholesky factors"
        )
    return np.sqrt(variances.clip(0)), directions


def _to_grid(x: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The coordinates (a,) and (b,) of a regular grid, and the components (2, b, a) on it."""
    counts, index, regular = places_on_grid(x)
    if not regular or counts.prod() != len(x):
        raise ValueError(
            f"plot_streamlines expects a regular grid, got {len(x)} points with {counts[0]} first "
            f"and {counts[1]} second coordinates; evaluate the field at torch.cartesian_prod of "
            "two torch.linspace, or draw arrows with plot_field"
        )
    components = np.empty((2, counts[1], counts[0]))
    components[:, index[:, 1], index[:, 0]] = vectors.T
    ends = x.min(0).astype(np.float64), x.max(0).astype(np.float64)
    first, second = (np.linspace(*side) for side in zip(*ends, counts, strict=True))
    return first, second, components


def plot_gain(
    ax: Axes,
    design: Any,
    *,
    label: str = "decrease of the mean variance",
    cmap: str = MAGNITUDE,
    colorbar: bool = True,
) -> Collection:
    """Draw the decrease of variance by an observation at each candidate of a design.

    The variance is the posterior variance of the target, averaged over the region. The colour of a
    candidate shows the decrease by one observation there, in percent, without any other new
    observation. Numbered circles are the chosen candidates in the order of their choice. Close to
    an earlier choice, the actual decrease is smaller than the colour shows.

    Args:
        ax: matplotlib axes. The function does not set labels and titles.
        design: the result of `field.design(candidates, count)` for planar candidates (C, 2).
        label: the text at the colour bar, to which " (%)" is added.
        cmap: the name of a matplotlib colour map.
        colorbar: whether to add a colour bar, as high as the axes.

    Returns:
        The shaded collection, which `plot_colorbar` accepts.

    Raises:
        ValueError: Candidates are not planar, or are all on one line.

    Example:
        >>> import gp_orff, matplotlib, torch
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_gain
        >>> x = torch.rand(
        ...     30, 2, generator=torch.Generator().manual_seed(0)
        ... ).double()
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> field = model.condition(x, torch.sin(5 * x.flip(-1))).posterior()
        >>> axis = torch.linspace(0, 1, 15)
        >>> design = field.design(
        ...     torch.cartesian_prod(axis, axis), 3, target=gp_orff.Curl()
        ... )
        >>> fig, ax = plt.subplots()
        >>> shaded = plot_gain(ax, design)
        >>> plt.close(fig)
    """
    x, shares = array(design.candidates), 100 * array(design.first) / design.variance
    check("plot_gain", x, gains=(shares, ()))
    style = norm_from_zero(shares), cmap, f"{label} (%)", colorbar
    shaded = shade_map("plot_gain", ax, x, shares, *style)
    for number, place in enumerate(array(design.points), start=1):
        ax.plot(*place, "o", ms=11, mfc="white", mec="black", mew=1.0, clip_on=False)
        ax.annotate(str(number), place, ha="center", va="center_baseline", fontsize=7)
    ax.set_aspect("equal")
    return shaded


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
    """Draw a scalar with a sign in diverging colours, with hatches where its sign is uncertain.

    The sign is uncertain where |mean| < z sd. Here z is the two-sided quantile of the normal
    distribution, 1.96 for the level 0.95. Each point is tested separately. If the scalar is zero
    everywhere, about 5 % of the map therefore has no hatches at this level.

    Args:
        ax: matplotlib axes. The function does not set labels and titles.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        mean: the scalar (n,) or (n, 1), such as `field.mean(x, gp_orff.Divergence())`.
        sd: the standard deviation (n,) or (n, 1), in the unit of `mean`. By default, no hatches are
            drawn.
        label: the name of the scalar, with its unit, for the colour bar.
        norm: a matplotlib normalisation. The default is symmetric, up to the largest |mean|.
        level: the probability of the interval mean ± z sd, between 0 and 1.
        cmap: the name of a matplotlib colour map. The default is safe for colour-blind readers.
        colorbar: whether to add a colour bar, as high as the axes.
        transform: the reference system of `x` on cartopy axes, as for `plot_field`.

    Returns:
        The shaded collection and the hatched contour set. The latter is None without `sd`.

    Raises:
        ValueError: The shapes of arrays do not fit, the level is not between 0 and 1, an sd is
            negative, or `transform` is given for axes that are not from cartopy.

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
    shaded = shade_map("plot_map", ax, x, mean, norm, cmap, label, colorbar)
    ax.set_aspect("equal")
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

    Truth and mean have a common colour scale. Residual and standard deviation have another one, up
    to their largest value in the interior, as for `plot_deviation`. Each scale has a colour bar.

    For a vector field, colours show the lengths of the vectors under arrows. The fourth panel then
    shows √(Σ sd²), which is the expected root mean square length of the residual. Scalars are shown
    with their signs.

    Args:
        axes: four matplotlib axes, two by two or in a row. The function sets titles, but not
            labels.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        truth: the true field (n, 2), or a scalar (n,) or (n, 1).
        mean: the posterior mean, with the shape and unit of `truth`.
        sd: the posterior standard deviation of each component, with the same shape and unit.
        label: the name of the quantity, with its unit, for the colour bars.
        arrows: the approximate number of arrows along the longer side. Points between them have no
            arrow.
        reference: the unit of the vectors. With it, reference arrows of round lengths are drawn
            above truth and residual. By default, there are none.

    Returns:
        The four shaded collections. Two panels with a common scale have the same `norm`: if you set
        its `vmax`, both change.

    Raises:
        ValueError: There are not four axes, the shapes of arrays do not fit, or an sd is negative.

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
        plot_colorbar(axes[pair][1], shaded[-1], text, extend=cut_off(norm, *shades[pair]))
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
