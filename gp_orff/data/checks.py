"""Checks of data. Each check is one function, which all functions that read data call.

A check raises an error if results would be wrong, and gives a `DataWarning` if they may be wrong.
CONTRIBUTING.md has the list.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.observations import Observations
from gp_orff.data.patterns import DEFAULT
from gp_orff.data.survey import DataWarning
from gp_orff.data.units import Unit, UnitArray, change, optional, units_of_columns
from gp_orff.data.validation import as_real
from gp_orff.kernels.lines import inseparable, tidal_leaves

if TYPE_CHECKING:
    import xarray

Attributes = Mapping[str, Any]

# Units, by the attributes of variables and coordinates.


def common_units(
    attributes: Mapping[str, Attributes], vectors: Sequence[Sequence[str]] = ()
) -> dict[str, str]:
    """The unit to which the values of each name are converted: the unit of the first name with a
    unit of the same kind, such as a length. Names without a unit are omitted.

    Args:
        attributes: the attributes of variables or coordinates, by name and in order.
        vectors: the names of the components of each vector, which need one unit.

    Raises:
        ValueError: The units of the components of one vector are not of one kind.
    """
    given = {name: str(entry["units"]) for name, entry in attributes.items() if entry.get("units")}
    wanted: dict[str, str] = {}
    for name, unit in given.items():
        alike = [first for first in wanted.values() if change(unit, first) is not None]
        same = not alike or change(unit, alike[0]) == (1.0, 0.0)  # such as degrees east and north
        wanted[name] = unit if same else alike[0]
    for names in vectors:
        for name in names:
            if {name, names[0]} <= set(wanted) and not change(wanted[name], wanted[names[0]]):
                raise ValueError(
                    f"expected the components {list(names)} of a vector in one unit, got "
                    f"{names[0]!r} in {given[names[0]]!r} and {name!r} in {given[name]!r}: these "
                    "units measure different quantities, or one of them is unknown; convert the "
                    f"values of {name!r}, and correct its attribute: "
                    f"dataset[{name!r}].attrs['units'] = {given[names[0]]!r}"
                )
    return wanted


def variance_unit(
    name: str, unit: object, pair: tuple[str, str], units: tuple[str, str]
) -> str | None:
    """The unit of a noise variance or covariance: the product of the units of two variables. None
    if one of the units is unknown.

    Args:
        name, unit: the name and the unit of the variance.
        pair, units: the names and the units of the two variables.

    Raises:
        ValueError: The unit is another one, for example that of a standard error.
    """
    parsed = [Unit.parse(entry) for entry in units]
    if not unit or None in parsed:
        return None
    wanted = str(parsed[0] * parsed[1])
    if change(unit, wanted) is not None:
        return wanted
    remedy = "convert it, or correct its attribute `units`"
    if change(unit, units[0]) is not None:
        remedy = (
            f"{name!r} seems to be a standard error: take the square, dataset.assign(var=(dataset"
            f'["{name}"]**2).assign_attrs(units="{wanted}")) with noise="var"; if {name!r} is a '
            "variance, correct its attribute `units`"
        )
    kind = "covariances" if pair[0] != pair[1] else "variances"
    of = " and ".join(map(repr, dict.fromkeys(pair)))
    raise ValueError(
        f"expected noise= as {kind} of {of}, in {wanted!r}, got {name!r} in {str(unit)!r}; {remedy}"
    )


@dataclass(frozen=True)
class ColumnUnits:
    """The units of points, observations and times of tracks in a model, column by column. They are
    empty if they are unknown."""

    x: tuple[str | None, ...] = ()
    y: tuple[str | None, ...] = ()
    time: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, x: object, y: object, time: object = None) -> "ColumnUnits":
        """The units of arrays. If x are chunks and y is None, the units of the first chunk."""
        if y is not None:
            return cls(*map(units_of_columns, (x, y, time)))
        first = x[0] if isinstance(x, list | tuple) and len(x) else x
        if isinstance(first, tuple | list):
            return cls.of(*first[:2]) if len(first) > 1 else cls()
        if isinstance(first, Mapping):
            return cls.of(first.get("x"), first.get("y", ()), first.get("time"))
        units = getattr(first, "units", None)
        return units if isinstance(units, cls) else cls()

    @property
    def stated(self) -> bool:
        """Whether one of the units is known."""
        return any(unit is not None for unit in (*self.x, *self.y, *self.time))

    def convert(
        self, x: object, y: object, noise: object, time: object
    ) -> tuple[object, object, object, object]:
        """Arrays, converted to these units if they have other ones. Noise is converted as by
        `variances`.

        Raises:
            ValueError: A unit cannot be converted, or there is one noise variance for components
                with different factors.
        """
        return (
            in_column_units(x, self.x, "x"),
            in_column_units(y, self.y, "y"),
            self.variances(noise, y, leading=1),
            in_column_units(time, self.time, "time"),
        )

    def variances(self, noise: object, y: object = None, leading: int = 0) -> object:
        """Noise variances or covariances, converted to products of the units of y. Noise without a
        unit is in products of the units of the array `y`.

        Args:
            noise: variances or covariances, with `leading` axes of observations before.
            y: the observations with this noise.

        Raises:
            ValueError: The unit is another one, for example that of a standard error, or there is
                one variance for components with different factors.
        """
        given = None if noise is None else next(iter(units_of_columns(noise)), None)
        if given is None:
            factor = np.outer(_factors(y, self.y, "y")[0], _factors(y, self.y, "y")[0])
        else:
            factor = _factors_of_products(given, self.y)
        if noise is None or (given is None and (factor == 1.0).all()):
            return noise
        values, factors = as_real(noise, "noise"), torch.from_numpy(factor)
        if (factor == factor.flat[0]).all():
            return values * factors.flatten()[0]
        axes = values.dim() - leading
        if axes < 1 or values.shape[-1] != len(factors):
            count = (*values.shape[:leading], len(factors))
            raise ValueError(
                f"expected noise of shape {count}, got {tuple(values.shape)}: the components are "
                "converted to the units of the fit by different factors; give a variance for each "
                "component"
            )
        return values * (factors if axes == 2 else factors.diagonal())

    def of_symbol(self, power: int | None, space: Sequence[int]) -> "ColumnUnits":
        """Return the units of x and of the values of a symbol.

        The values have the unit of y times a power of the unit of x. Their unit is unknown if the
        components of y have different units, or if the coordinates in space have different units.

        Args:
            power: the exponent of the unit of x; None if the symbol has none.
            space: the indices of the columns of x that are coordinates in space.
        """
        lengths = {plain_unit(self.x[column]) for column in space} if self.x else set()
        if power is None or len(set(self.y)) != 1 or len(lengths) != 1:
            return ColumnUnits(self.x)
        of_y, of_x = Unit.parse(self.y[0]), Unit.parse(lengths.pop())
        if of_y is None or of_x is None:
            return ColumnUnits(self.x)
        return ColumnUnits(self.x, (str(of_y * of_x**power),))


def plain_unit(unit: str | None) -> str | None:
    """A unit without the plane of its positions."""
    return None if unit is None else unit.split(" in ")[0]


def _factors(
    values: object, wanted: tuple[str | None, ...], name: str
) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Factors and offsets that convert columns to the wanted units. Components along directions are
    converted to the common unit of all components. Columns without a unit do not change."""
    given, pairs = units_of_columns(values), []
    if not any(given):
        return np.ones(1), np.zeros(1)
    if len(given) != len(wanted) and len(set(wanted)) == 1:
        wanted = wanted[:1] * len(given)
    if len(given) != len(wanted):
        stated = f"with the units {list(wanted)}" if wanted else "of data without units"
        raise ValueError(
            f"expected {name} as numbers {stated}, got {len(given)} columns in {list(given)}, "
            "which cannot be converted; give plain numbers in the units of the data"
        )
    for column, (old, new) in enumerate(zip(given, wanted, strict=True)):
        if None not in (old, new) and " in " not in old:  # not positions in a known plane
            new = plain_unit(new)
        pairs.append((1.0, 0.0) if old is None else change(old, new))
        if pairs[-1] is None:
            raise ValueError(
                f"expected column {column} of {name} in {repr(new) if new else 'no unit'}, as in "
                f"the data of the fit, got {old!r}, which cannot be converted; read {name} with "
                "the same project=, time_unit= and epoch= as the data of the fit, or correct the "
                "attribute `units`"
            )
    factor, offset = np.array(pairs).T
    return factor, offset


def _factors_of_products(given: str, units: tuple[str | None, ...]) -> Float[np.ndarray, "p p"]:
    """Factors that convert covariances in a unit to products of the units of components."""
    parsed = [None if unit is None else Unit.parse(unit) for unit in units]
    if not parsed or None in parsed:
        raise ValueError(
            f"expected noise= without a unit, because the unit of y is unknown, got variances in "
            f"{given!r}; give y with its unit, or noise= as plain numbers in squared units of y"
        )
    factors = np.empty((len(parsed), len(parsed)))
    for (i, first), (j, second) in product(enumerate(parsed), repeat=2):
        pair = change(given, str(first * second))
        if pair is None:
            product_of = "the square of the unit of y"
            if i != j:
                product_of = f"the product of the units of components {i} and {j} of y"
            raise ValueError(
                f"expected noise= as variances in {str(first * second)!r}, {product_of}, got "
                f"{given!r}; instead of standard errors s, pass numpy.asarray(s)**2; if noise= has "
                "variances, correct their attribute `units`, or pass numpy.asarray(noise)"
            )
        factors[i, j] = pair[0]
    return factors


def in_column_units(values: object, wanted: tuple[str | None, ...], name: str) -> object:
    """Values with their columns converted to the wanted units. They are returned unchanged if they
    have these units."""
    factor, offset = _factors(values, wanted, name)
    if (factor == 1.0).all() and (offset == 0.0).all():
        return values
    factor, offset = torch.from_numpy(factor).squeeze(), torch.from_numpy(offset).squeeze()
    return as_real(values, name) * factor + offset


def entries_in_units(
    values: object, wanted: tuple[str | None, ...], name: str
) -> list[Float[np.ndarray, "*k"]]:
    """The entries of a place, or the sides of a box, each converted to the unit of its column."""
    shared = units_of_columns(values)
    if len(set(shared)) > 1:
        raise ValueError(f"expected {name} in one unit, got {list(shared)}; give a list of entries")
    entries = list(as_real(values, name).numpy() if shared else values)
    if shared:
        entries = [UnitArray.of(entry, shared[:1]) for entry in entries]
    units = wanted if len(wanted) == len(entries) else (None,) * len(entries)
    return [
        as_real(in_column_units(entry, (unit,), name), name).numpy()
        for entry, unit in zip(entries, units, strict=True)
    ]


# The component of a vector that a variable is, and the direction of a coordinate.


_COMPONENTS = (
    ("X", re.compile(r"(?<![a-z])(eastward|x)(?![a-z])")),
    ("Y", re.compile(r"(?<![a-z])(northward|y)(?![a-z])")),
    ("Z", re.compile(r"(?<![a-z])(upward|downward|vertical|z)(?![a-z])")),
)
_DIRECTIONS = {
    "X": ("longitude", "grid_longitude", "projection_x_coordinate"),
    "Y": ("latitude", "grid_latitude", "projection_y_coordinate"),
    "Z": ("height", "altitude", "depth"),
}
_BY_NAME = {
    **dict.fromkeys(("x", "lon", "long", "longitude", "nav_lon", "east", "easting"), "X"),
    **dict.fromkeys(("y", "lat", "latitude", "nav_lat", "north", "northing"), "Y"),
    **dict.fromkeys(("z", "height", "altitude", "depth"), "Z"),
}


def component_of(attributes: Attributes) -> tuple[str, str] | None:
    """The direction X, Y or Z of a component according to its standard name, and the rest of the
    name, which is common to the components of one vector; None if the name has no direction."""
    name = str(attributes.get("standard_name", ""))
    for direction, pattern in _COMPONENTS:
        if pattern.search(name):
            return direction, pattern.sub("*", name, count=1)
    return None


def _direction_of(name: str, attributes: Attributes) -> str | None:
    """The direction, X, Y or Z, of a coordinate."""
    axis = str(attributes.get("axis", "")).upper()
    if axis in _DIRECTIONS:
        return axis
    standard = attributes.get("standard_name")
    component = [letter for letter, names in _DIRECTIONS.items() if standard in names]
    return component[0] if component else _BY_NAME.get(str(name).lower())


def vectors_of(variables: Mapping[str, Attributes]) -> list[list[str]]:
    """The names of the components of each vector, by their standard names."""
    vectors: dict[str, list[str]] = {}
    for name, entry in variables.items():
        component = component_of(entry)
        if component is not None:
            vectors.setdefault(component[1], []).append(name)
    return [names for names in vectors.values() if len(names) > 1]


def check_order(variables: Mapping[str, Attributes], coordinates: Mapping[str, Attributes]) -> None:
    """Raise a ValueError if, by their standard names, the components of a vector are in another
    order than the coordinates."""
    along = [_direction_of(name, entry) for name, entry in coordinates.items()]
    for names in vectors_of(variables):
        letters = [component_of(variables[name])[0] for name in names]
        expected = [letter for letter in along if letter in letters]
        if len(set(letters)) < len(letters) or sorted(expected) != sorted(letters):
            continue
        if letters != expected:
            standard = [str(variables[name]["standard_name"]) for name in names]
            right = [names[letters.index(letter)] for letter in expected]
            raise ValueError(
                f"expected the components of a vector in the order of the coordinates "
                f"{list(coordinates)} along which they point, got {names} with the standard names "
                f"{standard}; give them in the order {right}"
            )


def check_noise_order(variables: Mapping[str, Attributes], noise: Mapping[str, Attributes]) -> None:
    """Raise a ValueError if, by its standard name, noise belongs to another component."""
    if len(noise) != len(variables):
        return
    for (name, entry), (of, field) in zip(noise.items(), variables.items(), strict=True):
        component, wanted = component_of(entry), component_of(field)
        if component is not None and wanted is not None and component[0] != wanted[0]:
            raise ValueError(
                f"expected the noise of {of!r}, got {name!r}, whose standard name is "
                f"{entry['standard_name']!r}; give noise= in the order of the variables"
            )


def check_noise(name: str, values: Float[np.ndarray, "n"]) -> None:
    """Raise a ValueError if noise of observed values is not finite."""
    wrong = ~np.isfinite(values)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"expected finite noise in {name!r}, got {int(wrong.sum())} of {len(values)} NaN or "
            f"infinite, such as {values[first]:.6g} of observation {first}; drop observations with "
            f'unknown noise: dataset.where(np.isfinite(dataset["{name}"]))'
        )


# Values that mark missing observations.


_FILLS = ("_FillValue", "missing_value")
_PACKED = (*_FILLS, "scale_factor", "add_offset")


def decoded(dataset: "xarray.Dataset", names: Sequence[str]) -> "xarray.Dataset":
    """The Dataset with packed numbers, missing values and times of some variables decoded, if
    attributes show that they are not yet decoded. Missing values of the encoding become NaN too.

    Floats with a `scale_factor` do not change, because they usually have been scaled already. Times
    do not change if xarray cannot decode their unit or calendar.
    """
    changed = {}
    for name in names:
        variable = dataset.variables[name]
        if variable.dtype.kind in "iuf" and " since " in str(variable.attrs.get("units", "")):
            changed[name] = _as_times(name, variable)
        elif variable.dtype.kind in "iu" and any(key in variable.attrs for key in _PACKED):
            changed[name] = _decoded_variable(name, variable)
        elif variable.dtype.kind == "f":
            encoding = variable.encoding
            packed = "scale_factor" in encoding or "add_offset" in encoding
            places = [variable.attrs] if packed else [variable.attrs, encoding]
            if fills := _finite([place.get(key) for place in places for key in _FILLS]):
                changed[name] = _without(variable, fills)
    return dataset.assign(changed) if changed else dataset


def _as_times(name: str, variable: "xarray.Variable") -> "xarray.Variable":
    """Numbers since a date as datetimes, if xarray can decode their unit and calendar."""
    try:
        result = _decoded_variable(name, variable)
    except (ValueError, OverflowError):  # months, or another unit
        return variable
    return result if result.dtype.kind == "M" else variable


def _decoded_variable(name: str, variable: "xarray.Variable") -> "xarray.Variable":
    """A variable decoded by xarray. Fill values are compared in the type of the numbers."""
    xr = optional("xarray", "xarray")
    variable = variable.copy(deep=False)
    for key in _FILLS:
        if key in variable.attrs:
            fills = np.asarray(variable.attrs[key])
            if fills.dtype.kind in "fiu":
                variable.attrs[key] = fills.astype(variable.dtype)[()]
    encoding, variable.encoding = variable.encoding, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xr.SerializationWarning)
        result = xr.conventions.decode_cf_variable(name, variable, decode_timedelta=False)
    result.encoding = {**encoding, **result.encoding}
    return result


def _finite(values: Sequence[object]) -> list[float]:
    numbers = [np.asarray(value).ravel() for value in values if value is not None]
    return [
        float(n) for entry in numbers if entry.dtype.kind in "fiu" for n in entry if np.isfinite(n)
    ]


def _without(variable: "xarray.Variable", fills: Sequence[float]) -> "xarray.Variable":
    """A variable of floats in which fill values are NaN."""
    valid = np.ones((), dtype=bool)
    for fill in fills:
        valid = valid & (variable != np.asarray(fill).astype(variable.dtype))
    result = variable.where(valid)
    result.attrs, result.encoding = variable.attrs, variable.encoding
    return result


_CORE = 0.9  # share of the other values, in the middle, whose extent is used
_LEAST_VALUES = 10  # least number of different values for this check


def warn_of_sentinels(parts: Sequence[Observations]) -> None:
    """Warn of a value that repeats, and whose distance from all others exceeds their extent, such
    as 999 among velocities. It may mark missing observations.

    The extent is that of the middle 90 % of the other values, so that a single value does not
    change it.
    """
    columns: dict[object, list[np.ndarray]] = {}
    for (_, name), values in _by_component(parts).items():
        columns.setdefault(name, []).append(values)
    counts: Counter[float] = Counter()
    for values in map(np.concatenate, columns.values()):
        for value in _isolated(values):  # other components may have it as a usual value
            counts[value] += int((values == value).sum())
    for value, count in counts.items():
        if count > 1:
            warnings.warn(
                f"the value {value:.12g} is in the observations {count} times, far from all "
                "others: it may mark missing values. If so, replace it by NaN with "
                f"y[y == {value:.12g}] = nan and pass missing='mask', or drop these "
                "observations. In a Dataset, set the attribute _FillValue",
                DataWarning,
                stacklevel=3,
            )
            return


def _isolated(values: Float[np.ndarray, "n"]) -> Iterator[float]:
    """The smallest and largest values whose distance from all others exceeds the extent of the
    middle of the others."""
    distinct = np.unique(values[np.isfinite(values)])
    if len(distinct) <= _LEAST_VALUES:
        return
    # There may be several such values. Those that were found do not count among the others.
    low, high = 0, len(distinct)
    while high - low > _LEAST_VALUES:
        inner = distinct[low:high]
        ends = np.quantile(inner[1:-1], [0.5 - _CORE / 2, 0.5 + _CORE / 2])
        extent = (ends[1] - ends[0]) / _CORE
        if inner[1] - inner[0] > extent and inner[1] - inner[0] >= inner[-1] - inner[-2]:
            yield float(inner[0])
            low += 1
        elif inner[-1] - inner[-2] > extent:
            yield float(inner[-1])
            high -= 1
        else:
            return


def warn_of_values(parts: Sequence[Observations]) -> None:
    """Warn of values that may not be observations: repeated extremes, and values that never
    change."""
    warn_of_sentinels(parts)
    warn_of_stuck(parts)


_REPEATED = 5  # equal observations that chance does not explain


def warn_of_stuck(parts: Sequence[Observations]) -> None:
    """Warn of an instrument whose values never change: a component that has the same value in at
    least 5 observations of a group, if other values vary. Zeros are allowed, because they may be
    conditions at a wall or coast, or a constant height."""
    columns = _by_component(parts)
    same = {key: bool((values == values[0]).all()) for key, values in columns.items()}
    if all(same.values()):
        return  # if all observations are equal, there is another warning
    for (label, name), values in columns.items():
        if len(values) < _REPEATED or not same[label, name] or values[0] == 0:
            continue
        of = "" if label == DEFAULT else f" of the group {label!r}"
        component = "" if name == "along" else f" as component {name}"
        warnings.warn(
            f"all {len(values)} observations{of} have the value {values[0]:.6g}{component}: an "
            "instrument whose values never change may have failed; drop these observations, or set "
            "the values to NaN and pass missing='mask'",
            DataWarning,
            stacklevel=3,
        )
        return


def _by_component(
    parts: Sequence[Observations],
) -> dict[tuple[str, object], Float[np.ndarray, "n"]]:
    """The values of observations by group and component. Values along directions are one
    component."""
    columns: dict[tuple[str, object], list[Tensor]] = {}
    for part in parts:
        names = ("along",) if part.pattern.along else part.pattern.columns
        for name, values in zip(names, part.y.T, strict=True):
            columns.setdefault((part.key.label, name), []).append(values.detach().cpu().double())
    return {key: torch.cat(pieces).numpy() for key, pieces in columns.items()}


def warn_of_close_tides(kernel: Kernel, box: Sequence[tuple[float, float]]) -> None:
    """Warn of tidal constituents that a record with this box is too short to separate."""
    close = inseparable(kernel, [high - low for low, high in box])
    if close:
        names = ", ".join(f"{one} and {other} ({t:.4g})" for one, other, t in close)
        warnings.warn(
            f"the record is too short to separate {names}. By Rayleigh's criterion, it must be at "
            "least as long as the duration in parentheses, in the unit of time. Error bars include "
            "this uncertainty, for the prior variances of the kernel. Omit one of the "
            "constituents, or add data",
            DataWarning,
            stacklevel=3,
        )


def check_units_of_tides(kernel: Kernel, units: ColumnUnits) -> None:
    """Check that tidal constituents have the unit of the column of time, if this is known.

    Raises:
        ValueError: The unit is another one.
    """
    for leaf in tidal_leaves(kernel):
        (column,) = leaf.columns(len(units.x)) if units.x else (0,)
        given, wanted = dict(enumerate(units.x)).get(column), leaf.kernel.unit
        numpys = {"min": "m", "d": "D"}.get(wanted, wanted)
        if given is None or given.startswith(f"{numpys} since "):
            continue
        if " since " in given or change(given, wanted) != (1.0, 0.0):
            raise ValueError(
                f"expected time, column {column} of x, in {wanted!r}, the unit of gp_orff.tides, "
                f"got {given!r}; pass the unit of the data to gp_orff.tides as unit=, or convert "
                f"the times, such as by time_unit={numpys!r} of gp_orff.labelled.readings"
            )


# Positions that do not determine derivatives.


_FLAT = 1e-3  # extent along a direction over the largest extent, below which it is zero


def directions_across(x: Float[Tensor, "n k"]) -> Float[Tensor, "m k"]:
    """Orthonormal directions in which points do not extend: across a line or plane on which all
    points lie, or all directions for a single place."""
    centred = (x - x.mean(0)).double().cpu()
    _, sizes, axes = torch.linalg.svd(centred, full_matrices=len(centred) < centred.shape[-1])
    sizes = torch.nn.functional.pad(sizes, (0, len(axes) - len(sizes)))
    scale = x.abs().max().clamp_min(torch.finfo(torch.float64).tiny).cpu() * len(x) ** 0.5
    flat = sizes <= torch.maximum(_FLAT * sizes.max(), 1e-12 * scale)
    return axes[flat]


def place_in_words(across: int, dims: int) -> str:
    """A text on the place where all points lie, if they do not extend in some directions."""
    return {0: "at one place", 1: "on one line", 2: "on one plane"}.get(
        dims - across, f"on a set of {dims - across} dimensions"
    )
