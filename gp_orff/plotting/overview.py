"""A figure of a posterior, for a first look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike

from gp_orff.plotting.arrays import ROUNDING, array
from gp_orff.plotting.colours import norm_about_zero, norm_from_zero
from gp_orff.plotting.fields import plot_field
from gp_orff.plotting.maps import plot_map
from gp_orff.symbols import Curl, Divergence, Symbol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    Panel = Callable[[Axes], object]


class Field(Protocol):
    """What is asked of a `FieldPosterior`."""

    num_inputs: int
    num_outputs: int
    space: tuple[int, ...]
    box: tuple[tuple[float, float], ...]

    def mean(self, x: np.ndarray, symbol: Symbol | None = None) -> ArrayLike: ...
    def variance(self, x: np.ndarray, symbol: Symbol | None = None) -> ArrayLike: ...


def overview(
    field: Field,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    columns: tuple[int, int] = (0, 1),
    at: Mapping[int, float] | None = None,
    points: int = 40,
    unit: str = "",
) -> Figure:
    """A new figure of a posterior over two of its inputs: data, mean, error bars, derivatives.

    A planar field has arrows over the standard deviation √(Σ sd²), and maps of vorticity and
    divergence on one scale, where these exist and are not zero, hatched where their sign is
    uncertain. Other fields have a map of mean and standard deviation for each output.

    Args:
        field: a posterior with two inputs or more.
        x: positions of the data (N, d), drawn as dots.
        y: vectors of the data (N, p), drawn in a panel of their own if the field is planar; gaps
            are left out.
        columns: the two inputs that span the maps; a field of three dimensions shows these two of
            its components.
        at: values of other inputs by column; by default the middle of the data.
        points: how many points along each side of the maps.
        unit: the unit of the field.

    Returns:
        A matplotlib figure. `figure.savefig("overview.pdf")` keeps vectors.

    Raises:
        ValueError: a field with one input, columns that it does not have, or data that do not fit.

    Example:
        >>> import gp_orff, matplotlib, torch
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> x, y = torch.rand(20, 2, dtype=torch.float64), torch.randn(20, 2)
        >>> figure = gp_orff.plotting.overview(model.condition(x, y).posterior(), x, y, points=9)
        >>> [ax.get_title(loc="left") for ax in figure.axes[:4]]
        ['data', 'mean', 'standard deviation', 'vorticity']
        >>> plt.close(figure)
    """
    x, y = array(x), array(y)
    _check_overview(field, x, y, columns)
    shown = list(columns)
    in_space = set(columns) <= set(field.space)
    flow = in_space and len(field.space) == field.num_outputs
    whole, plane = _points(field, columns, at or {}, points)
    panels = dict((_flow_panels if flow else _output_panels)(field, whole, plane, shown, unit))
    if flow and x is not None and y is not None:
        given = np.isfinite(y).all(-1)
        vectors = {"vectors": y[given][:, shown], "arrows": 30, "reference": unit}
        panels = {"data": lambda ax: plot_field(ax, x[given][:, shown], **vectors), **panels}
    limits = _limits(plane)
    figure, axes = _subplots(len(panels), limits, in_space)
    for ax, (title, draw) in zip(axes.flat, panels.items(), strict=False):
        draw(ax)
        if x is not None and title != "data":
            ax.plot(*x[:, shown].T, ".", color="white", markersize=2.5, mec="black", mew=0.3)
        ax.set(xlim=limits[0], ylim=limits[1], aspect="equal" if in_space else "auto")
        ax.set(xlabel=f"x{columns[0] + 1}", ylabel=f"x{columns[1] + 1}")
        ax.set_title(title, loc="left")
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    return figure


def _subplots(count: int, limits: np.ndarray, in_space: bool) -> tuple[Figure, np.ndarray]:
    """Axes for all panels, in two or three columns, of the shape of the map."""
    from matplotlib import pyplot as plt

    across = 3 if count in (3, 5) else min(count, 2)
    down = -(-count // across)
    width, height = np.ptp(limits, axis=1)
    tall = float(np.clip(height / width, 0.3, 2)) if in_space else 0.8
    size = (5 * across, (3.8 * tall + 0.8) * down)
    return plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)


def _limits(plane: np.ndarray) -> np.ndarray:
    """(low, high) of both axes, with a margin for arrows."""
    low, high = plane.min(0), plane.max(0)
    margin = 0.04 * (high - low)
    return np.stack([low - margin, high + margin], axis=-1)


def _output_panels(
    field: Field, x: np.ndarray, plane: np.ndarray, _: list[int], unit: str
) -> Iterator[tuple[str, Panel]]:
    """Titles, and what draws each: mean and standard deviation of each output."""
    mean, sd = _moments(field, x)
    for output in range(field.num_outputs):
        name = f" of output {output + 1}" if field.num_outputs > 1 else ""
        yield f"mean{name}", _signed(plane, mean[:, output], None, unit)
        yield f"standard deviation{name}", _positive(plane, sd[:, output], unit, "cividis")


def _flow_panels(
    field: Field, x: np.ndarray, plane: np.ndarray, columns: list[int], unit: str
) -> Iterator[tuple[str, Panel]]:
    """Titles, and what draws each: vectors, their standard deviation and derivatives."""
    mean, sd = (moment[:, columns] for moment in _moments(field, x))
    speed = f"length ({unit})" if unit else "length"
    arrows = {"vectors": mean, "arrows": 20, "reference": unit}
    yield "mean", _positive(plane, np.linalg.norm(mean, axis=-1), speed, "viridis", **arrows)
    yield "standard deviation", _positive(plane, np.linalg.norm(sd, axis=-1), unit, "cividis")
    if field.num_outputs == 2:
        symbols = {"vorticity": Curl(), "divergence": Divergence()}
        found = {name: _derivative(field, x, symbol) for name, symbol in symbols.items()}
        largest = max([sd.max() for _, sd in filter(None, found.values())], default=0)
        exist = {
            n: m for n, m in found.items() if m is not None and m[1].max() > ROUNDING * largest
        }
        norm = norm_about_zero(*(mean for mean, _ in exist.values())) if exist else None
        for name, moments in exist.items():
            yield name, _signed(plane, *moments, "", norm)


def _derivative(
    field: Field, x: np.ndarray, symbol: Symbol
) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and standard deviation; None for what does not exist."""
    try:
        return tuple(moment[:, 0] for moment in _moments(field, x, symbol))
    except (ValueError, NotImplementedError):
        return None


def _moments(
    field: Field, x: np.ndarray, symbol: Symbol | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the outputs, (n, q) each."""
    mean, variance = field.mean(x, symbol), field.variance(x, symbol)
    return array(mean), np.sqrt(array(variance).clip(0))


def _points(
    field: Field, columns: tuple[int, int], at: Mapping[int, float], points: int
) -> tuple[np.ndarray, np.ndarray]:
    """A grid over the data: points of the field (n, d), and of the picture (n, 2)."""
    sides = [np.linspace(*field.box[column], points) for column in columns]
    plane = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
    middle = [at.get(column, sum(side) / 2) for column, side in enumerate(field.box)]
    whole = np.tile(np.asarray(middle, dtype=np.float64), (len(plane), 1))
    whole[:, columns] = plane
    return whole, plane


def _signed(
    plane: np.ndarray,
    mean: np.ndarray,
    sd: np.ndarray | None,
    label: str,
    norm: Normalize | None = None,
) -> Panel:
    return lambda ax: plot_map(ax, plane, mean, sd, label=label or None, norm=norm)


def _positive(
    plane: np.ndarray, values: np.ndarray, label: str, cmap: str, **arrows: object
) -> Panel:
    colours = {"norm": norm_from_zero(values), "cmap": cmap, "label": label or None}
    return lambda ax: plot_field(ax, plane, shade=values, **colours, **arrows)


def _check_overview(
    field: Field, x: np.ndarray | None, y: np.ndarray | None, columns: tuple[int, int]
) -> None:
    if field.num_inputs < 2:
        raise ValueError(
            "overview expects a field with two inputs or more, got one; draw field.mean(x), and "
            "the band of two field.variance(x).sqrt(), over x"
        )
    if len(set(columns)) != 2 or not all(0 <= column < field.num_inputs for column in columns):
        raise ValueError(
            f"overview expects columns as two different inputs of {field.num_inputs}, got {columns}"
        )
    shapes = {"x": (x, field.num_inputs), "y": (y, field.num_outputs)}
    for name, (values, width) in shapes.items():
        if values is not None and (values.ndim != 2 or values.shape[1] != width):
            raise ValueError(
                f"overview expects {name} of shape (N, {width}), got {values.shape}; give the "
                "readings that the model was fitted to"
            )
    if y is not None and (x is None or len(x) != len(y)):
        raise ValueError("overview expects y with positions x, one row for each")
