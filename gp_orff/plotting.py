"""Plots of vector fields with matplotlib, which is imported when a function is called.

The functions draw on the caller's axes: `plot_field` or `plot_map`, then `plot_uncertainty` or
`plot_streamlines` over it; `plot_comparison` draws four panels, `plot_calibration` how many
readings error bars hold, and `plot_energy_spectrum` energy per wavenumber. Arrays are NumPy's or
torch's.
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
    from matplotlib.lines import Line2D
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
    """Draw arrows of a planar field over a shaded quantity, on the caller's axes.

    Args:
        ax: matplotlib axes; their limits, labels and titles are left to the caller.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        vectors: the field (n, 2); the longest arrows are about as long as the distance between
            arrows. None draws no arrows.
        shade: a quantity (n,) to shade, such as a speed or a standard deviation.
        label: the name of `shade`, with its unit, for the colour bar.
        norm: a matplotlib normalisation of `shade`; panels of one unit can share one.
        arrows: about how many arrows along the longer side; points between them get none.
        cmap: a matplotlib colour map; the default is safe for colour-blind readers.
        colorbar: whether to add a colour bar for `shade`.

    Returns:
        The shaded collection, from which to make other colour bars; None without `shade`.

    Raises:
        ValueError: arrays whose lengths differ, or points that are not planar.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_field
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
    """Draw ellipses of one standard deviation at the tips of the arrows of `plot_field`.

    Ellipses have the scale of the arrows: a semi-axis as long as the arrow is a standard deviation
    as large as the vector. An ellipse holds 39 % of a Gaussian; multiply covariances by 5.99 for
    95 %.

    Args:
        ax: matplotlib axes; their limits, labels and titles are left to the caller.
        x: positions (n, 2), in the units of the axes.
        vectors: the field (n, 2), as given to `plot_field`.
        covariances: of the two components at each position (n, 2, 2), in the square of their unit;
            such as `field.pointwise_covariance(x)`.
        arrows: as given to `plot_field`, so that the same points get them.
        color: a matplotlib colour of the outlines.

    Returns:
        The ellipses.

    Raises:
        ValueError: arrays whose shapes do not fit, or matrices that are no covariances.

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
            f"plot_uncertainty expects covariances of shape {(*x.shape, 2)}, got {x.shape}; for "
            "uncorrelated components, give torch.diag_embed(variance)"
        )
    _check("plot_uncertainty", x, vectors=(vectors, (2,)), covariances=(covariances, (2, 2)))
    rows, scale = _arrows(x, vectors, arrows)
    radii, directions = _principal_axes(covariances[rows])
    angle = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    tips = x[rows] + 0.5 * vectors[rows] / scale  # the middle of an arrow is at its position
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
    """Draw streamlines of a planar field on a regular grid, with dark edges, visible on any shade.

    Args:
        ax: matplotlib axes; their limits, labels and titles are left to the caller.
        x: positions (n, 2) of a regular grid in any order, in the units of the axes.
        vectors: the field (n, 2).
        density: of the lines, as in matplotlib's `streamplot`.
        color: a matplotlib colour of the lines.
        linewidth: of the lines, in points.

    Returns:
        The lines and arrow heads.

    Raises:
        ValueError: arrays whose shapes do not fit, or positions that are not a regular grid.

    Example:
        >>> import matplotlib
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> x = np.stack(np.meshgrid(np.arange(9.0), np.arange(5.0)), axis=-1).reshape(-1, 2)
        >>> fig, ax = plt.subplots()
        >>> streamlines = plot_streamlines(ax, x, x[:, ::-1] * [-1, 1])
        >>> plt.close(fig)
    """
    from matplotlib.patheffects import withStroke

    x, vectors = _array(x), _array(vectors)
    _check("plot_streamlines", x, vectors=(vectors, (2,)))
    *coordinates, components = _to_grid(x, vectors)
    streamlines = ax.streamplot(
        *coordinates, *components, density=density, color=color, linewidth=linewidth, arrowsize=0.8
    )
    streamlines.lines.set_path_effects([withStroke(linewidth=linewidth + 0.8, foreground="black")])
    ax.set_aspect("equal")
    return streamlines


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

    Returns:
        The shaded collection and the hatched contour set, or None for the latter without `sd`.

    Raises:
        ValueError: arrays whose shapes do not fit, a level outside (0, 1), or a negative sd.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_map
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
    norm = _norm_about_zero(mean) if norm is None else norm
    shaded = plot_field(ax, x, shade=mean, label=label, norm=norm, cmap=cmap, colorbar=colorbar)
    if sd is None:
        return shaded, None
    z = NormalDist().inv_cdf(0.5 + 0.5 * level)
    margin = z * sd - np.abs(mean)  # positive where the sign is uncertain
    top = 1 + z * sd.max()  # above every margin
    hatched = ax.tricontourf(*x.T, margin, [0, top], colors="none", hatches=["////"])
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
) -> tuple[Collection, Collection, Collection, Collection]:
    """Draw truth, posterior mean, residual and standard deviation in four panels.

    Truth and mean share one colour scale, residual and sd another; each scale has a colour bar. For
    a vector field, the panels show lengths under arrows, and as sd the square root of the summed
    variances, the root mean square length of the residual. Scalars are shown with their signs.

    Args:
        axes: four matplotlib axes in any arrangement where the first two are neighbours, and the
            last two; titles are set, limits and labels are left to the caller.
        x: positions (n, 2), scattered or on a grid, in the units of the axes.
        truth: the field (n, 2), or a scalar (n,) or (n, 1).
        mean: the posterior mean, in the shape and unit of `truth`.
        sd: the posterior standard deviation of each component, in the same shape and unit.
        label: the name of the quantity, with its unit, for the colour bars.
        arrows: about how many arrows along the longer side; points between them get none.

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
        >>> four = plot_comparison(axes, x, x, 0.9 * x, 0 * x + 0.1, label="current (m/s)")
        >>> four[0].norm is four[1].norm
        True
        >>> plt.close(fig)
    """
    axes, x = np.ravel(axes), _array(x)
    if len(axes) != 4:
        raise ValueError(
            f"plot_comparison expects four axes, got {len(axes)}; make them with plt.subplots(2, 2)"
        )
    truth, mean, sd = (_column(values) for values in (truth, mean, sd))
    outputs = (2,) if truth.ndim == 2 else ()
    _check("plot_comparison", x, truth=(truth, outputs), mean=(mean, outputs), sd=(sd, outputs))
    _check_deviations("plot_comparison", sd)

    panels = {
        "truth": truth,
        "posterior mean": mean,
        "residual (mean − truth)": mean - truth,
        "posterior standard deviation": sd,
    }
    shades, make_norm, cmaps = list(panels.values()), _norm_about_zero, ("PuOr_r", "BrBG_r")
    if outputs:
        shades = [np.linalg.norm(values, axis=-1) for values in shades]
        make_norm, cmaps = _norm_from_zero, ("viridis", "cividis")

    shaded, labels = [], (label, f"residual and sd of {label}")
    for pair, cmap, text in zip((slice(0, 2), slice(2, 4)), cmaps, labels, strict=True):
        colours = {"norm": make_norm(*shades[pair]), "cmap": cmap, "colorbar": False}
        for ax, shade in zip(axes[pair], shades[pair], strict=True):
            shaded.append(plot_field(ax, x, shade=shade, **colours))
        axes[0].figure.colorbar(shaded[-1], ax=list(axes[pair]), label=text, shrink=0.85)
    if outputs:
        shared = _arrows(x, truth, arrows)
        _draw_arrows(axes[0], x, truth, *shared)
        _draw_arrows(axes[1], x, mean, *shared)
        _draw_arrows(axes[2], x, mean - truth, *_arrows(x, mean - truth, arrows))
    for ax, title in zip(axes, panels, strict=True):
        ax.set_title(title)
    return tuple(shaded)


def plot_energy_spectrum(
    ax: Axes,
    wavenumbers: ArrayLike,
    mean: ArrayLike,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    *,
    slopes: Sequence[float] = (),
    label: str | None = None,
    color: str = "C0",
) -> Line2D:
    """Draw energy per wavenumber with its interval, and slopes to compare, on logarithmic axes.

    Args:
        ax: matplotlib axes; scales are set, labels and titles are left to the caller.
        wavenumbers: k (m,), positive.
        mean: E(k) (m,), positive, such as `field.energy_spectrum().total.mean`.
        low, high: the ends of its interval (m,), drawn as a band; no band without them.
        slopes: exponents, such as (-3, -5 / 3): thin lines above the middle of the curve.
        label: the name of the curve, for a legend.
        color: a matplotlib colour of curve and band.

    Returns:
        The curve.

    Raises:
        ValueError: arrays whose shapes do not fit, or values that are not positive.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_energy_spectrum
        >>> fig, ax = plt.subplots()
        >>> k = np.geomspace(1, 10, 20)
        >>> curve = plot_energy_spectrum(ax, k, k**-3, 0.8 * k**-3, 1.3 * k**-3, slopes=[-3])
        >>> plt.close(fig)
    """
    k, mean, low, high = map(_array, (wavenumbers, mean, low, high))
    for values in (k, mean, low, high):
        if values is not None and (values.shape != (k.size,) or not (values > 0).all()):
            raise ValueError(
                f"plot_energy_spectrum expects positive values of shape ({k.size},) like the "
                f"wavenumbers, got shape {values.shape} from {values.min(initial=np.inf):.3g}"
            )
    ax.set(xscale="log", yscale="log")
    (curve,) = ax.plot(k, mean, color=color, linewidth=2, label=label)
    if low is not None and high is not None:
        ax.fill_between(k, low, high, color=color, alpha=0.25, linewidth=0)
    middle = len(k) // 2
    for slope in slopes:
        line = 5 * mean[middle] * (k / k[middle]) ** slope
        ax.plot(k, line, color="0.4", linewidth=0.8, linestyle="--")
        above = {"xytext": (4, 4), "textcoords": "offset points", "color": "0.4"}
        ax.annotate(f"{slope:.3g}", (k[middle], line[middle]), fontsize="small", **above)
    return curve


def plot_calibration(
    ax: Axes,
    pit: ArrayLike,
    *,
    block: ArrayLike | None = None,
    independent: float | None = None,
    label: str | None = "all",
    color: str = "C0",
) -> tuple[Line2D, PolyCollection]:
    """Draw the share of readings that central intervals hold, over the share they should hold.

    A curve below the diagonal tells of error bars that are too small. The band holds the curve of a
    calibrated model at each level with a probability of 95 %, if `independent` readings count:
    binomial quantiles. Errors of readings in one block are alike, so that single blocks leave the
    band, and the curve of all may if blocks are few.

    Args:
        ax: matplotlib axes; labels and limits are set, the title is left to the caller.
        pit: (M,), the probability of a smaller number under each prediction, between 0 and 1, such
            as `model.cross_validate(x, y).pit`.
        block: (M,), the number of the block of each, such as `.block`; each gets a thin line.
        independent: how many of the numbers count as independent; all of them if None.
        label: the name of the curve, for a legend.
        color: a matplotlib colour of the curve.

    Returns:
        The curve and the band.

    Raises:
        ValueError: arrays whose shapes do not fit, or values that are no probabilities.

    Example:
        >>> import matplotlib, numpy as np
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> from gp_orff.plotting import plot_calibration
        >>> fig, ax = plt.subplots()
        >>> curve, band = plot_calibration(ax, np.random.default_rng(0).uniform(size=300))
        >>> plt.close(fig)
    """
    pit, block = _array(pit), _array(block)
    if pit.ndim != 1 or not len(pit) or not ((pit >= 0) & (pit <= 1)).all():
        raise ValueError(
            "plot_calibration expects pit as probabilities (M,) between 0 and 1, got shape "
            f"{pit.shape}; give CrossValidation.pit"
        )
    if block is not None and block.shape != pit.shape:
        raise ValueError(
            f"plot_calibration expects block of shape {pit.shape}, got {block.shape}; give "
            "CrossValidation.block"
        )
    levels = np.linspace(0, 1, 101)

    def held(values: np.ndarray) -> np.ndarray:
        """The share of numbers in the central interval of each level."""
        return np.searchsorted(np.sort(2 * np.abs(values - 0.5)), levels, "right") / len(values)

    count = len(pit) if independent is None else independent
    band = ax.fill_between(levels, *_binomial_interval(levels, count), color="0.85", linewidth=0)
    ax.plot([0, 1], [0, 1], color="0.4", linewidth=0.8, linestyle="--")
    for name in () if block is None else np.unique(block):
        ax.plot(levels, held(pit[block == name]), color=color, linewidth=0.5, alpha=0.4)
    (curve,) = ax.plot(levels, held(pit), color=color, linewidth=2, label=label)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set(xlabel="probability of the interval", ylabel="share of readings inside")
    return curve, band


def _binomial_interval(p: np.ndarray, count: float) -> tuple[np.ndarray, np.ndarray]:
    """The 2.5 % and 97.5 % quantiles of the share of successes in `count` trials."""
    from scipy.stats import binom

    trials = max(round(count), 1)
    return tuple(binom.ppf(q, trials, p).clip(0) / trials for q in (0.025, 0.975))


def _draw_arrows(
    ax: Axes, x: np.ndarray, vectors: np.ndarray, rows: np.ndarray, scale: float
) -> None:
    ax.quiver(
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


def _arrows(x: np.ndarray, vectors: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The rows of the points that get arrows, and the units of the field per unit of the axes."""
    rows, cell = _thin(x, arrows)
    longest = np.quantile(np.linalg.norm(vectors[rows], axis=-1), 0.95)
    return rows, max(longest, _TINY) / (1.4 * cell)  # neighbours hardly overlap


def _thin(x: np.ndarray, arrows: int) -> tuple[np.ndarray, float]:
    """The row of the most central point in each cell of a lattice, and the size of a cell.

    The lattice has `arrows` cells on the longer side.
    """
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
    asymmetric = np.abs(covariances - np.swapaxes(covariances, 1, 2)) > _ROUNDING * size
    if asymmetric.any() or (variances < -_ROUNDING * size[..., 0]).any():
        raise ValueError(
            "plot_uncertainty expects symmetric matrices without negative eigenvalues, got one "
            f"with eigenvalue {variances.min():.3g}; give covariances, not their factors"
        )
    return np.sqrt(variances.clip(0)), directions


def _to_grid(x: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The coordinates (a,) and (b,) of a regular grid, and the components (2, b, a) on it."""
    x = x.astype(np.float64)
    start, extent = x.min(0), np.ptp(x, axis=0)
    counts = 1 + (np.diff(np.sort(x, axis=0), axis=0) > 1e-6 * extent).sum(0)
    spacing = extent / np.maximum(counts - 1, 1)
    position = (x - start) / np.where(spacing > 0, spacing, 1)
    index = np.rint(position).astype(np.int64)
    complete = (counts > 1).all() and counts.prod() == len(x) == len(np.unique(index, axis=0))
    if not complete or np.abs(position - index).max() > _ROUNDING:
        raise ValueError(
            f"plot_streamlines expects a regular grid, got {len(x)} points with {counts[0]} first "
            f"and {counts[1]} second coordinates; evaluate the field at torch.cartesian_prod of "
            "two linspaces, or draw arrows with plot_field"
        )
    components = np.empty((2, counts[1], counts[0]))
    components[:, index[:, 1], index[:, 0]] = vectors.T
    first, second = (
        np.linspace(low, low + size, count)
        for low, size, count in zip(start, extent, counts, strict=True)
    )
    return first, second, components


def _norm_from_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    return Normalize(0, max(np.abs(shade).max() for shade in shades) or 1)


def _norm_about_zero(*shades: np.ndarray) -> Normalize:
    from matplotlib.colors import Normalize

    limit = _norm_from_zero(*shades).vmax
    return Normalize(-limit, limit)


def _check(caller: str, x: np.ndarray, **arrays: tuple[np.ndarray | None, tuple[int, ...]]) -> None:
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


def _check_deviations(caller: str, sd: np.ndarray | None) -> None:
    if sd is not None and (sd < 0).any():
        raise ValueError(
            f"{caller} expects standard deviations, got {sd.min():.3g}; give square roots "
            "of variances"
        )


def _array(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array from an array, a list, or a tensor, with gradients and on a GPU too."""
    if values is None:
        return None
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _column(values: ArrayLike | None) -> np.ndarray | None:
    """A NumPy array, (n,) if the values are (n, 1)."""
    values = _array(values)
    return values[:, 0] if values is not None and values.shape[1:] == (1,) else values


_TINY = np.finfo(float).tiny
_ROUNDING = 1e-3  # relative; smaller deviations come from single precision
