"""`overview`: a figure of a posterior, panel by panel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from gp_orff.plotting.drawing import (
    ROUNDING,
    STYLE,
    array,
    norm_about_zero,
    norm_from_zero,
    title_panels,
)
from gp_orff.plotting.fields import plot_deviation, plot_field, plot_map
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.pointwise import Curl, Divergence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panel = Callable[[Axes], object]


_DEVIATION = "standard deviation"


# The panels of an overview. Each panel has a title and a function that draws it.


@dataclass(frozen=True)
class Units:
    """The unit of a field, the name of its magnitude, and the names of the inputs of a map."""

    field: str
    quantity: str
    names: Sequence[str]

    def label(self, name: str) -> str:
        """A name with the unit of the field."""
        return f"{name} ({self.field})" if self.field else name

    @property
    def derivative(self) -> str:
        """The unit of derivatives, such as "m/s per km"; empty if a part of it is unknown."""
        lengths = {_unit_in(name) for name in self.names}
        length = lengths.pop() if len(lengths) == 1 else ""
        return f"{self.field} per {length}" if self.field and length else ""


def _unit_in(name: str) -> str:
    """The text in parentheses at the end of a name; empty without one."""
    found = re.search(r"[(\[]([^()\[\]]+)[)\]]$", name.strip())
    return found[1] if found else ""


def output_panels(
    field: Any, x: np.ndarray, plane: np.ndarray, _: list[int], units: Units
) -> Iterator[tuple[str, Panel]]:
    """The panels of each output: mean and standard deviation, each as a title and a function."""
    mean, sd = _moments(field, x)
    for output in range(field.num_outputs):
        name = f"output {output + 1}" if field.num_outputs > 1 else "output"
        of = f" of {name}" if field.num_outputs > 1 else ""
        drawn = {"x": plane, "mean": mean[:, output], "label": units.label(name)}
        yield f"mean{of}", partial(plot_map, **drawn)
        drawn = {"x": plane, "sd": sd[:, output], "label": units.label(f"sd{of}")}
        yield f"{_DEVIATION}{of}", partial(plot_deviation, **drawn)


def flow_panels(
    field: Any, x: np.ndarray, plane: np.ndarray, columns: list[int], units: Units
) -> Iterator[tuple[str, Panel]]:
    """The panels of a planar field: vectors, their standard deviation, and derivatives."""
    mean, sd = (moment[:, columns] for moment in _moments(field, x))
    length = np.linalg.norm(mean, axis=-1)
    style = {"label": units.label(units.quantity), "norm": norm_from_zero(length)}
    style |= {"arrows": 20, "reference": units.field}
    yield "mean", partial(plot_field, x=plane, vectors=mean, shade=length, **style)
    drawn = {"sd": np.linalg.norm(sd, axis=-1), "label": units.label("√(sd₁² + sd₂²)")}
    yield _DEVIATION, partial(plot_deviation, x=plane, **drawn)
    if field.num_outputs == 2:
        symbols = {"vorticity": Curl(), "divergence": Divergence()}
        found = {name: _derivative(field, x, symbol) for name, symbol in symbols.items()}
        largest = max([sd.max() for _, sd in filter(None, found.values())], default=0)
        exist = {
            n: m for n, m in found.items() if m is not None and m[1].max() > ROUNDING * largest
        }
        norm = norm_about_zero(*(mean for mean, _ in exist.values())) if exist else None
        for name, (mean, sd) in exist.items():
            label = f"{name} ({units.derivative})" if units.derivative else name
            drawn = partial(plot_map, x=plane, mean=mean, sd=sd, label=label, norm=norm)
            yield f"{name}, hatched: sign unknown", drawn


def line_panels(
    field: Any, x: np.ndarray, data: tuple[np.ndarray, np.ndarray] | None, unit: str
) -> Iterator[tuple[str, Panel]]:
    """The panels of a field of one input: a curve for each output, with data if there are any."""
    mean, sd = _moments(field, x)
    for output in range(field.num_outputs):
        given = None if data is None else (data[0][:, 0], data[1][:, output])
        title = f"output {output + 1}" if field.num_outputs > 1 else "field"
        drawn = {"mean": mean[:, output], "sd": sd[:, output], "data": given, "unit": unit}
        yield title, partial(_curve, x=x[:, 0], **drawn)


def _derivative(field: Any, x: np.ndarray, symbol: Symbol) -> tuple[np.ndarray, np.ndarray] | None:
    """The mean and standard deviation of a derivative; None if it does not exist."""
    try:
        return tuple(moment[:, 0] for moment in _moments(field, x, symbol))
    except (ValueError, NotImplementedError):
        return None


def _moments(
    field: Any, x: np.ndarray, symbol: Symbol | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the outputs, (n, q) each."""
    mean, variance = field.mean(x, symbol), field.variance(x, symbol)
    return array(mean), np.sqrt(array(variance).clip(0))


def _curve(
    ax: Axes,
    x: np.ndarray,
    mean: np.ndarray,
    sd: np.ndarray,
    data: tuple[np.ndarray, np.ndarray] | None,
    unit: str,
) -> None:
    """Draw a mean with its 95 % interval, and data if there are any."""
    margin = NormalDist().inv_cdf(0.975) * sd
    ax.fill_between(x, mean - margin, mean + margin, alpha=0.25, linewidth=0, label="95 % interval")
    ax.plot(x, mean, label="mean")
    if data is not None:
        ax.plot(*data, "k.", markersize=3, label="data")
    ax.set_ylabel(unit)
    ax.legend()


# The figure: maps over two inputs, or curves over one.


def overview(
    field: Any,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    *,
    columns: tuple[int, int] = (0, 1),
    at: Mapping[int, float] | None = None,
    points: int = 40,
    unit: str = "",
    quantity: str = "speed",
    names: Sequence[str] | None = None,
) -> Figure:
    """Make a new figure of a posterior: data, mean, standard deviation and derivatives.

    The panels depend on the field:

    - For a planar field, arrows show the mean, and colours show the lengths of the arrows. A second
      map shows the standard deviation √(Σ sd²). Further maps show vorticity and divergence, with a
      common colour scale, if they exist and are not zero. Hatches mark areas where the 95 %
      interval contains zero.
    - For other fields of two or more inputs, maps show the mean and the standard deviation of each
      output.
    - For a field of one input, a curve shows the mean of each output, with 95 % intervals.

    Maps of standard deviations use the colour scale of `plot_deviation`. Dots on these maps mark
    the positions of the data.

    Args:
        field: a posterior, such as `model.posterior()`, with d inputs and p outputs.
        x: positions of the data (N, d), which are drawn as dots.
        y: vectors of the data (N, p). If the field is planar, they have a separate panel. Rows with
            NaN are omitted.
        columns: the two inputs that span the maps. If the field has three components in space, the
            arrows show the two components along these inputs.
        at: values of the other inputs by column, such as {2: 0.5}. The default is the middle of the
            data.
        points: the number of points along each side of the maps.
        unit: the unit of the field.
        quantity: the name of the length of a vector, such as "speed" or "intensity".
        names: the names of all inputs with their units, such as ("east (km)", "north (km)").
            Derivatives then have a unit such as "m/s per km".

    Returns:
        A matplotlib figure. Save it by `figure.savefig("overview.pdf")`.

    Raises:
        ValueError: The field does not have the columns, `at` contains a column that the maps show,
            or data or names do not fit the field.

    Example:
        >>> import gp_orff, matplotlib, torch
        >>> matplotlib.use("agg")
        >>> from matplotlib import pyplot as plt
        >>> model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        >>> x, y = torch.rand(20, 2, dtype=torch.float64), torch.randn(20, 2)
        >>> figure = gp_orff.plotting.overview(
        ...     model.condition(x, y).posterior(), x, y, points=9
        ... )
        >>> [ax.get_title(loc="left") for ax in figure.axes[:3]]
        ['(a) data', '(b) mean', '(c) standard deviation, dots: data']
        >>> plt.close(figure)
    """
    x, y = _table(x, field.num_inputs), _table(y, field.num_outputs)
    names = [f"x{i + 1}" for i in range(field.num_inputs)] if names is None else names
    _check_overview(field, x, y, columns, names)
    _check_at(field, columns, at or {})
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        if field.num_inputs == 1:
            data = None if y is None else (x, y)
            return _lines(field, data, 10 * points, unit, names[0])
        units = Units(unit, quantity, [names[column] for column in columns])
        return _maps(field, x, y, list(columns), _grid(field, columns, at or {}, points), units)


def _maps(
    field: Any,
    x: np.ndarray | None,
    y: np.ndarray | None,
    columns: list[int],
    grid: tuple[np.ndarray, np.ndarray],
    units: Units,
) -> Figure:
    """The figure with a panel for each map."""
    whole, plane = grid
    in_space = set(columns) <= set(field.space)
    flow = in_space and len(field.space) == field.num_outputs
    panels = dict((flow_panels if flow else output_panels)(field, whole, plane, columns, units))
    given = None if y is None else np.isfinite(y).all(-1)
    if flow and given is not None and given.any():
        vectors = {"vectors": y[given][:, columns], "arrows": 30, "reference": units.field}
        panels = {"data": lambda ax: plot_field(ax, x[given][:, columns], **vectors), **panels}
    limits = np.stack([plane.min(0), plane.max(0)], axis=-1)
    figure, axes = _subplots(len(panels), limits, in_space)
    for ax, (title, draw) in zip(axes.flat[: len(panels)], panels.items(), strict=True):
        ax.set(xlim=limits[0], ylim=limits[1])
        draw(ax)
        if x is not None and title.startswith(_DEVIATION):
            _dots(ax, x[:, columns])
        ax.set(xlabel=units.names[0], ylabel=units.names[1])
        ax.set_aspect("equal" if in_space else "auto")
    dots = "" if x is None else ", dots: data"
    titles = [f"{title}{dots if title.startswith(_DEVIATION) else ''}" for title in panels]
    title_panels(axes.flat[: len(panels)], titles)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    return figure


def _dots(ax: Axes, x: np.ndarray) -> None:
    """Draw positions as dots of 2.5 points, or smaller if they would cover more than a twentieth of
    the axes."""
    box = ax.get_position()
    area = 72**2 * np.prod(ax.figure.get_size_inches()) * box.width * box.height
    size = min(2.5, float(np.sqrt(area / 20 / max(len(x), 1))))
    ax.plot(*x.T, ".", color="white", markersize=size, mec="black", mew=0.1 * size)


def _lines(
    field: Any, data: tuple[np.ndarray, np.ndarray] | None, points: int, unit: str, name: str
) -> Figure:
    """The figure with one panel below the other for each output."""
    from matplotlib import pyplot as plt

    x = np.linspace(*field.box[0], points)[:, None]
    panels = dict(line_panels(field, x, data, unit))
    size = (6, 0.5 + 2.0 * len(panels))
    style = {"sharex": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(len(panels), 1, figsize=size, **style)
    for ax, draw in zip(axes.flat, panels.values(), strict=True):
        draw(ax)
    title_panels(axes.flat, list(panels))
    axes[-1, 0].set_xlabel(name)
    return figure


def _subplots(count: int, limits: np.ndarray, in_space: bool) -> tuple[Figure, np.ndarray]:
    """Axes for all panels, in two or three columns, with the aspect of the map."""
    from matplotlib import pyplot as plt

    across = 3 if count in (3, 5) else min(count, 2)
    down = -(-count // across)
    width, height = np.ptp(limits, axis=1)
    tall = float(np.clip(height / width, 0.3, 2)) if in_space else 0.8
    layout = "compressed" if in_space else "constrained"
    size = (4 * across, (3 * tall + 0.7) * down)
    return plt.subplots(down, across, figsize=size, layout=layout, squeeze=False)


def _grid(
    field: Any, columns: tuple[int, int], at: Mapping[int, float], points: int
) -> tuple[np.ndarray, np.ndarray]:
    """A grid over the data: the points (n, d) of the field, and the points (n, 2) of the map."""
    sides = [np.linspace(*field.box[column], points) for column in columns]
    plane = np.stack(np.meshgrid(*sides), axis=-1).reshape(-1, 2)
    middle = [at.get(column, sum(side) / 2) for column, side in enumerate(field.box)]
    whole = np.tile(np.asarray(middle, dtype=np.float64), (len(plane), 1))
    whole[:, columns] = plane
    return whole, plane


def _table(values: ArrayLike | None, width: int) -> np.ndarray | None:
    """Values as an array (N, width). An array (N,) becomes (N, 1)."""
    values = array(values)
    return values[:, None] if values is not None and values.ndim == width == 1 else values


def _check_overview(
    field: Any,
    x: np.ndarray | None,
    y: np.ndarray | None,
    columns: tuple[int, int],
    names: Sequence[str],
) -> None:
    distinct = len(set(columns)) == 2 and all(0 <= own < field.num_inputs for own in columns)
    if field.num_inputs > 1 and not distinct:
        raise ValueError(
            f"overview expects columns as two different inputs of {field.num_inputs}, got {columns}"
        )
    shapes = {"x": (x, field.num_inputs), "y": (y, field.num_outputs)}
    for name, (values, width) in shapes.items():
        if values is not None and (values.ndim != 2 or values.shape[1] != width):
            raise ValueError(
                f"overview expects {name} of shape (N, {width}), got {values.shape}; give the "
                "observations that the model was fitted to"
            )
    if y is not None and (x is None or len(x) != len(y)):
        raise ValueError("overview expects positions x with y, one row for each, got y alone")
    if len(names) != field.num_inputs:
        raise ValueError(
            f"overview expects a name for each of {field.num_inputs} inputs, got {list(names)}"
        )


def _check_at(field: Any, columns: tuple[int, int], at: Mapping[int, float]) -> None:
    drawn = [0] if field.num_inputs == 1 else list(columns)
    others = [column for column in range(field.num_inputs) if column not in drawn]
    unknown = [column for column in at if column not in others]
    if unknown:
        expected = f"of the columns {others}" if others else "of no columns, as all are drawn"
        raise ValueError(
            f"overview expects at= with values {expected}, got {unknown}; {drawn} are drawn"
        )
