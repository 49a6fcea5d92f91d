"""Pictures of vector fields. matplotlib is imported when a function is called, not before.

The functions compose on the caller's axes: `plot_field` or `plot_map`, then `plot_uncertainty` or
`plot_streamlines` over it; `plot_comparison` draws four panels. Arrays are NumPy's or torch's.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    cmap: str = "viridis",
    colorbar: bool = True,
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
        colorbar: whether to add one for `shade`; False where panels share one of your own.

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
    _check("plot_field", x, vectors=(vectors, (2,)), shade=(shade, ()))
    shaded = None
    if shade is not None:
        shaded = ax.tripcolor(*x.T, shade, shading="gouraud", cmap=cmap, norm=norm, rasterized=True)
        if colorbar:
            ax.figure.colorbar(shaded, ax=ax, label=label, shrink=0.85)
    if vectors is not None:
        _draw_arrows(ax, x, vectors, *_arrows(x, vectors, arrows))
    ax.set_aspect("equal")
    return shaded


def plot_uncertainty(
    ax: Axes,
    x: ArrayLike,
    vectors: ArrayLike,
    covariances: ArrayLike,
    *,
    arrows: int = 24,
    color: str = "black",
) -> PolyCollection:
    """Ellipses of one standard deviation at the tips of the arrows that `plot_field` draws.

    They are to the scale of the arrows: an ellipse as large as its arrow is a standard deviation as
    large as the vector. One holds 39 % of a Gaussian; multiply covariances by 5.99 for 95 %.

    Args:
        ax: matplotlib axes; their limits, labels and titles stay the caller's.
        x: positions (n, 2), in the units of the axes.
        vectors: the field (n, 2), as given to `plot_field`.
        covariances: of the two components at each position (n, 2, 2), in the square of their unit.
        arrows: as given to `plot_field`, so that the same points are kept.
        color: a matplotlib colour of the outlines.

    Returns:
        The ellipses.

    Raises:
        ValueError: arrays whose shapes differ, or matrices that are no covariances.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.random.default_rng(0).uniform(size=(50, 2))
        >>> fig, ax = plt.subplots()
        >>> _ = plot_field(ax, x, x, arrows=5)
        >>> ellipses = plot_uncertainty(ax, x, x, 0.01 * np.ones((50, 1, 1)) * np.eye(2), arrows=5)
        >>> plt.close(fig)
    """
    from matplotlib.collections import PolyCollection

    x, vectors, covariances = (_array(values) for values in (x, vectors, covariances))
    if covariances.shape == x.shape:
        raise ValueError(
            f"plot_uncertainty expects covariances of shape {(*x.shape, 2)}, got {x.shape}; of "
            "variances without correlation, give torch.diag_embed(variance)"
        )
    _check("plot_uncertainty", x, vectors=(vectors, (2,)), covariances=(covariances, (2, 2)))
    kept, scale = _arrows(x, vectors, arrows)
    radii, directions = _principal_axes(covariances[kept])
    angle = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    tips = x[kept] + 0.5 * vectors[kept] / scale  # arrows are drawn about their middle
    outlines = tips[:, None] + np.swapaxes(directions * radii[:, None] @ circle, 1, 2) / scale
    ellipses = PolyCollection(
        outlines, facecolors="none", edgecolors=color, linewidths=0.7, zorder=3
    )
    ax.add_collection(ellipses)
    ax.autoscale_view()
    ax.set_aspect("equal")
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
    """Streamlines of a planar field on a regular grid, with dark edges that show on any shade.

    Args:
        ax: matplotlib axes; their limits, labels and titles stay the caller's.
        x: positions (n, 2) of a regular grid in any order, in the units of the axes.
        vectors: the field (n, 2).
        density: of the lines; 1 is matplotlib's.
        color: a matplotlib colour of the lines.
        linewidth: in points.

    Returns:
        The lines and arrow heads.

    Raises:
        ValueError: arrays whose shapes differ, or positions that are no regular grid.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.stack(np.meshgrid(np.arange(9.0), np.arange(5.0)), axis=-1).reshape(-1, 2)
        >>> fig, ax = plt.subplots()
        >>> drawn = plot_streamlines(ax, x, x[:, ::-1] * [-1, 1])
        >>> plt.close(fig)
    """
    from matplotlib.patheffects import withStroke

    x, vectors = _array(x), _array(vectors)
    _check("plot_streamlines", x, vectors=(vectors, (2,)))
    *lines, components = _gridded(x, vectors)
    drawn = ax.streamplot(
        *lines, *components, density=density, color=color, linewidth=linewidth, arrowsize=0.8
    )
    drawn.lines.set_path_effects([withStroke(linewidth=linewidth + 0.8, foreground="black")])
    ax.set_aspect("equal")
    return drawn


def plot_map(
    ax: Axes,
    x: ArrayLike,
    mean: ArrayLike,
    sd: ArrayLike | None = None,
    *,
    label: str | None,
    norm: Normalize | None = None,
    level: float = 0.95,
    cmap: str = "PuOr_r",
    colorbar: bool = True,
) -> tuple[Collection, TriContourSet | None]:
    """A scalar with a sign, such as a divergence or a vorticity, in colours that part at zero;
    hatched where the sign is not known: |mean| < z sd.

    z is the two-sided quantile of a Gaussian, 1.96 at the level 0.95. The sign is judged point by
    point: at the level 0.95, a twentieth of a map of nothing is left without hatches.

    Args:
        ax: matplotlib axes; their limits, labels and titles stay the caller's.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        mean: the scalar (n,) or (n, 1), such as `field.mean(x, gp_orff.Divergence())`.
        sd: its standard deviation, in the same unit; None hatches nothing.
        label: what the scalar is, with its unit, for the colour bar.
        norm: a matplotlib normalisation; by default to the largest |mean| on either side of zero.
        level: of the interval that leaves zero out where the sign is known, in (0, 1).
        cmap: a matplotlib colour map; the default is safe for colour-blind readers.
        colorbar: whether to add one; False where panels share one of your own.

    Returns:
        The shaded collection and the hatched contour set; None in its place without `sd`.

    Raises:
        ValueError: arrays whose shapes differ, a level outside (0, 1), negative sd.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(50, 2))
        >>> fig, ax = plt.subplots()
        >>> shaded, hatched = plot_map(ax, x, x[:, 0], 0 * x[:, 0] + 0.2, label="divergence (1/s)")
        >>> plt.close(fig)
    """
    x, mean, sd = _array(x), _column(mean), _column(sd)
    _check("plot_map", x, mean=(mean, ()), sd=(sd, ()))
    if not 0 < level < 1:
        raise ValueError(f"plot_map expects a level between 0 and 1, got {level}; say 0.95")
    _check_deviations("plot_map", sd)
    norm = _centred(mean) if norm is None else norm
    shaded = plot_field(ax, x, shade=mean, label=label, norm=norm, cmap=cmap, colorbar=colorbar)
    if sd is None:
        return shaded, None
    z = NormalDist().inv_cdf(0.5 + 0.5 * level)
    doubt = z * sd - np.abs(mean)
    highest = 1 + z * sd.max()  # above all of it
    hatched = ax.tricontourf(*x.T, doubt, [0, highest], colors="none", hatches=["////"])
    hatched.set(edgecolor="0.35", linewidth=0)  # the hatches are of this colour
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
) -> tuple[Collection, Collection, Collection, Collection]:
    """Truth, posterior mean, residual and standard deviation, side by side on two scales.

    Truth and mean share one, residual and sd the other; each has a colour bar. Of a vector field
    the panels show lengths under arrows, and as sd the root of the summed variances, which is the
    root mean square of the residual's length; scalars are shown with their signs.

    Args:
        axes: four matplotlib axes, in any arrangement of which the first two are neighbours, and
            the last two; titles are set, limits and labels stay the caller's.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        truth: the field (n, 2), or a scalar (n,) or (n, 1).
        mean: the posterior mean, in the shape and unit of `truth`.
        sd: the posterior standard deviation of each component, likewise.
        label: what is compared, with its unit, for the colour bars.
        arrows: about how many arrows along the longer side; points between are left out.

    Returns:
        The four shaded collections. Two that share a scale share their `norm`: setting its `vmax`
        changes both.

    Raises:
        ValueError: other than four axes, arrays whose shapes differ, negative sd.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.random.default_rng(0).uniform(size=(50, 2))
        >>> fig, axes = plt.subplots(2, 2, layout="constrained")
        >>> four = plot_comparison(axes, x, x, 0.9 * x, 0 * x + 0.1, label="current (m/s)")
        >>> four[0].norm is four[1].norm
        True
        >>> plt.close(fig)
    """
    axes, x = np.ravel(axes), _array(x)
    if len(axes) != 4:
        raise ValueError(
            f"plot_comparison expects four axes, got {len(axes)}; make them by plt.subplots(2, 2)"
        )
    truth, mean, sd = (_column(values) for values in (truth, mean, sd))
    own = (2,) if truth.ndim == 2 else ()
    _check("plot_comparison", x, truth=(truth, own), mean=(mean, own), sd=(sd, own))
    _check_deviations("plot_comparison", sd)

    panels = {
        "truth": truth,
        "posterior mean": mean,
        "residual (mean − truth)": mean - truth,
        "posterior standard deviation": sd,
    }
    shades, scale, cmaps = list(panels.values()), _centred, ("PuOr_r", "BrBG_r")
    if own:
        shades = [np.linalg.norm(values, axis=-1) for values in shades]
        scale, cmaps = _from_zero, ("viridis", "cividis")

    shaded, labels = [], (label, f"residual and sd of {label}")
    for pair, cmap, text in zip((slice(0, 2), slice(2, 4)), cmaps, labels, strict=True):
        how = {"norm": scale(*shades[pair]), "cmap": cmap, "colorbar": False}
        for ax, shade in zip(axes[pair], shades[pair], strict=True):
            shaded.append(plot_field(ax, x, shade=shade, **how))
        axes[0].figure.colorbar(shaded[-1], ax=list(axes[pair]), label=text, shrink=0.85)
    if own:
        shared = _arrows(x, truth, arrows)
        _draw_arrows(axes[0], x, truth, *shared)
        _draw_arrows(axes[1], x, mean, *shared)
        _draw_arrows(axes[2], x, mean - truth, *_arrows(x, mean - truth, arrows))
    for ax, title in zip(axes, panels, strict=True):
        ax.set_title(title)
    return tuple(shaded)


def _draw_arrows(
    ax: Axes, x: np.ndarray, vectors: np.ndarray, kept: np.ndarray, scale: float
) -> None:
    ax.quiver(
        *x[kept].T,
        *vectors[kept].T,
        angles="xy",
        scale_units="xy",
        scale=scale,
        pivot="mid",
        width=0.0035,
        color="white",
        edgecolor="black",
        linewidth=0.3,
    )


def _arrows(x: np.ndarray, vectors: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """Which points have arrows, and the units of the field that one unit of the axes stands for."""
    kept, cell = _thinned(x, arrows)
    longest = np.quantile(np.linalg.norm(vectors[kept], axis=-1), 0.95)
    return kept, max(longest, _TINY) / (1.4 * cell)  # neighbours hardly overlap


def _thinned(x: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The most central point of each cell of a lattice with `arrows` cells on the longer side."""
    extent = x.max(0) - x.min(0)
    cell = max(extent.max(), _TINY) / arrows
    scaled = (x - x.min(0)) / cell
    lattice = np.floor(scaled).astype(np.int64)
    central = np.argsort(np.abs(scaled - lattice - 0.5).max(-1), kind="stable")
    return central[np.unique(lattice[central], axis=0, return_index=True)[1]], cell


def _principal_axes(covariances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Standard deviations (n, 2) along the columns of orthogonal matrices (n, 2, 2)."""
    size = np.abs(covariances).max((1, 2), keepdims=True)
    variances, directions = np.linalg.eigh(covariances)
    lopsided = np.abs(covariances - np.swapaxes(covariances, 1, 2)) > _ROUNDING * size
    if lopsided.any() or (variances < -_ROUNDING * size[..., 0]).any():
        raise ValueError(
            "plot_uncertainty expects symmetric matrices without negative eigenvalues, got one of "
            f"eigenvalue {variances.min():.3g}; give covariances, neither factors nor correlations"
        )
    return np.sqrt(variances.clip(0)), directions


def _gridded(x: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The coordinates (a,) and (b,) of a regular grid, and the components (2, b, a) on it."""
    x = x.astype(np.float64)
    start, extent = x.min(0), np.ptp(x, axis=0)
    numbers = 1 + (np.diff(np.sort(x, axis=0), axis=0) > 1e-6 * extent).sum(0)
    spacing = extent / np.maximum(numbers - 1, 1)
    place = (x - start) / np.where(spacing > 0, spacing, 1)
    index = np.rint(place).astype(np.int64)
    whole = (numbers > 1).all() and numbers.prod() == len(x) == len(np.unique(index, axis=0))
    if not whole or np.abs(place - index).max() > _ROUNDING:
        raise ValueError(
            f"plot_streamlines expects a regular grid, got {len(x)} points with {numbers[0]} first "
            f"and {numbers[1]} second coordinates; evaluate the field at torch.cartesian_prod of "
            "two linspaces, or draw arrows with plot_field"
        )
    components = np.empty((2, numbers[1], numbers[0]))
    components[:, index[:, 1], index[:, 0]] = vectors.T
    first, second = (
        np.linspace(low, low + size, number)
        for low, size, number in zip(start, extent, numbers, strict=True)
    )
    return first, second, components


def _from_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    return Normalize(0, max(np.abs(shade).max() for shade in shades) or 1)


def _centred(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    limit = _from_zero(*shades).vmax
    return Normalize(-limit, limit)


def _check(caller: str, x: np.ndarray, **given: tuple[np.ndarray | None, tuple[int, ...]]) -> None:
    """Raise ValueError for positions that are not planar, and for arrays, each given with its shape
    at a position, that do not have a row for each of them."""
    if x.ndim != 2 or x.shape[1] != 2:
        raise ValueError(f"{caller} expects positions of shape (n, 2), got {x.shape}")
    for name, (values, own) in given.items():
        expected = (len(x), *own)
        if values is not None and values.shape != expected:
            raise ValueError(
                f"{caller} expects {name} of shape {expected}, got {values.shape}; give one row "
                "for each position"
            )


def _check_deviations(caller: str, sd: np.ndarray | None) -> None:
    if sd is not None and (sd < 0).any():
        raise ValueError(
            f"{caller} expects standard deviations, got {sd.min():.3g}; give square roots of "
            "variances, which are not negative"
        )


def _array(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array of an array, a list, or a tensor that may require gradients or be on a GPU."""
    if values is None:
        return None
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _column(values: ArrayLike | None) -> np.ndarray | None:
    """The same, (n,) where there is one output (n, 1)."""
    values = _array(values)
    return values[:, 0] if values is not None and values.shape[1:] == (1,) else values


_TINY = np.finfo(float).tiny
_ROUNDING = 1e-3  # what is less, in parts of the whole, comes of single precision
