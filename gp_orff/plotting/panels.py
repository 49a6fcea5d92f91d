"""What an overview shows: each panel has a title and a function that draws it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

    Panel = Callable[[Axes], object]


class Field(Protocol):
    """What is asked of a `FieldPosterior`."""

    num_inputs: int
    num_outputs: int
    space: tuple[int, ...]
    box: tuple[tuple[float, float], ...]

    def mean(self, x: np.ndarray, symbol: Symbol | None = None) -> ArrayLike: ...
    def variance(self, x: np.ndarray, symbol: Symbol | None = None) -> ArrayLike: ...


@dataclass(frozen=True)
class Units:
    """The unit of a field, and the names of the inputs of a map, such as "east (km)"."""

    field: str
    names: Sequence[str]

    @property
    def derivative(self) -> str:
        """That of derivatives, "m/s per km"; empty where a part of it is not known."""
        lengths = {_unit_in(name) for name in self.names}
        length = lengths.pop() if len(lengths) == 1 else ""
        return f"{self.field} per {length}" if self.field and length else ""


def _unit_in(name: str) -> str:
    """What stands in brackets at the end of a name."""
    found = re.search(r"[(\[]([^()\[\]]+)[)\]]$", name.strip())
    return found[1] if found else ""


def output_panels(
    field: Field, x: np.ndarray, plane: np.ndarray, _: list[int], units: Units
) -> Iterator[tuple[str, Panel]]:
    """Titles, and what draws each: mean and standard deviation of each output."""
    mean, sd = _moments(field, x)
    for output in range(field.num_outputs):
        name = f" of output {output + 1}" if field.num_outputs > 1 else ""
        yield f"mean{name}", _signed(plane, mean[:, output], None, units.field)
        yield f"standard deviation{name}", _positive(plane, sd[:, output], units.field, "cividis")


def flow_panels(
    field: Field, x: np.ndarray, plane: np.ndarray, columns: list[int], units: Units
) -> Iterator[tuple[str, Panel]]:
    """Titles, and what draws each: vectors, their standard deviation and derivatives."""
    mean, sd = (moment[:, columns] for moment in _moments(field, x))
    unit = units.field
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
        hatched = "hatched: sign uncertain"
        label = f"{units.derivative}; {hatched}" if units.derivative else hatched
        for name, moments in exist.items():
            yield name, _signed(plane, *moments, label, norm)


def line_panels(
    field: Field, x: np.ndarray, data: tuple[np.ndarray, np.ndarray] | None, unit: str
) -> Iterator[tuple[str, Panel]]:
    """Titles, and what draws each output of a field of one input, with its data if there are."""
    mean, sd = _moments(field, x)
    for output in range(field.num_outputs):
        given = None if data is None else (data[0][:, 0], data[1][:, output])
        title = f"output {output + 1}" if field.num_outputs > 1 else "field"
        yield title, _curve(x[:, 0], mean[:, output], sd[:, output], given, unit)


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


def _curve(
    x: np.ndarray,
    mean: np.ndarray,
    sd: np.ndarray,
    data: tuple[np.ndarray, np.ndarray] | None,
    unit: str,
) -> Panel:
    def draw(ax: Axes) -> None:
        ax.fill_between(x, mean - 2 * sd, mean + 2 * sd, alpha=0.25, linewidth=0, label="± 2 sd")
        ax.plot(x, mean, label="mean")
        if data is not None:
            ax.plot(*data, "k.", markersize=3, label="data")
        ax.set_ylabel(unit)
        ax.legend(fontsize="small")

    return draw
