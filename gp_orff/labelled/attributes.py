"""Names, values, units and attributes of variables of a Dataset, by the CF conventions."""

import os
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from gp_orff.data.checks import in_column_units
from gp_orff.data.units import Unit, conversion, optional
from gp_orff.data.validation import as_real
from gp_orff.labelled.plane import LocalPlane
from gp_orff.symbols.base import Symbol, required
from gp_orff.symbols.pointwise import Curl, Divergence

if TYPE_CHECKING:
    import xarray


# Variables of a Dataset by name, and numbers and times as float64.


_UNITS = ("W", "D", "h", "m", "s", "ms", "us", "ns")  # units of time with a fixed length
EPOCH = "1970-01-01"


def as_dataset(dataset: object) -> "xarray.Dataset":
    """The argument, if it is a Dataset. Otherwise a TypeError is raised."""
    xr = optional("xarray", "xarray")
    return required(
        dataset,
        xr.Dataset,
        "expected an xarray Dataset",
        "convert a DataFrame with to_xarray(), or a DataArray with to_dataset()",
    )


def named(dataset: "xarray.Dataset", names: Sequence[str]) -> dict[str, "xarray.Variable"]:
    """The variables with these names."""
    names = list(names)
    missing = [name for name in names if name not in dataset.variables]
    if missing or not names:
        raise KeyError(
            f"expected names among {sorted(map(str, dataset.variables))}, got {missing or 'none'}"
        )
    return {name: dataset.variables[name] for name in names}


def floats(name: str, variable: "xarray.Variable") -> np.ndarray:
    """The values of a variable as float64; missing values of nullable columns become NaN."""
    if variable.dtype.kind == "c":
        raise TypeError(
            f"expected real numbers in {name!r}, got type {variable.dtype}; for u + iv, make two "
            f"variables of {name}.real and {name}.imag"
        )
    try:
        return as_real(variable.to_numpy(), f"numbers in {name!r}").numpy().copy()
    except TypeError as error:
        raise TypeError(
            f"expected numbers in {name!r}, got type {variable.dtype}: {error}"
        ) from None


def numbers(name: str, values: np.ndarray, unit: str, epoch: object) -> np.ndarray:
    """Coordinates as float64. Times are in `unit` since `epoch`, and NaT becomes NaN."""
    if unit not in _UNITS:
        raise ValueError(f"expected a time_unit among {', '.join(_UNITS)}, got {unit!r}")
    if values.dtype.kind == "M":
        seconds = _seconds(values, np.datetime64(EPOCH if epoch is None else epoch))
        return seconds / (np.timedelta64(1, unit) / np.timedelta64(1, "s"))
    if values.dtype.kind == "m":
        return values / np.timedelta64(1, unit)
    dates = [value for value in values.ravel()[:1] if hasattr(value, "calendar")]
    if dates:
        raise TypeError(
            f"expected numbers or datetime64 as coordinate {name!r}, got dates of the calendar "
            f"{dates[0].calendar!r}; give numbers of days instead: dataset.assign_coords({name}=("
            f'dataset["{name}"].dims, cftime.date2num(dataset["{name}"].values, '
            '"days since 2000-01-01")))'
        )
    try:
        return as_real(values, f"coordinate {name!r}").numpy().copy()
    except TypeError as error:
        raise TypeError(
            f"expected numbers or datetime64 as coordinate {name!r}, got type {values.dtype}: "
            f"{error}"
        ) from None


def since_epoch(date: object, unit: str | None) -> float:
    """A date, or its text, as a number in a unit such as "h since 1970-01-01". A number is returned
    unchanged.

    Raises:
        TypeError: `date` is neither a number nor a date.
        ValueError: `date` is a date, and the unit has no epoch.
    """
    if not isinstance(date, str | np.datetime64 | datetime):
        return as_real(in_column_units(date, (unit,), "epoch"), "epoch").item()
    count, _, epoch = (unit or "").partition(" since ")
    if not epoch:
        raise ValueError(
            f"expected a time as a number, because the data have times in {unit or 'no unit'!r}, "
            f"whose epoch is not known, got {date!r}; give the time in the units of the data, or "
            "read the data with gp_orff.labelled.readings"
        )
    return numbers("epoch", np.asarray(np.datetime64(date)), count, epoch).item()


def _seconds(times: np.ndarray, epoch: np.datetime64) -> np.ndarray:
    """Seconds since the epoch. Whole seconds are computed separately, because int64 nanoseconds
    overflow after 292 years."""
    whole_times, whole_epoch = times.astype("M8[s]"), epoch.astype("M8[s]")
    second = np.timedelta64(1, "s")
    fractions = (times - whole_times) / second - (epoch - whole_epoch) / second
    return (whole_times - whole_epoch) / second + fractions


# Identify longitude and latitude by CF attributes or by name.


_EAST = ("degrees_east", "degree_east", "degrees_E", "degree_E", "degreesE", "degreeE")
_NORTH = ("degrees_north", "degree_north", "degrees_N", "degree_N", "degreesN", "degreeN")
_ANGLES = (
    *("grid_longitude", "grid_latitude"),
    *("projection_x_angular_coordinate", "projection_y_angular_coordinate"),
)
_NAMES = {
    "longitude": ("longitude", "lon", "long", "lng", "nav_lon"),
    "latitude": ("latitude", "lat", "nav_lat"),
}


def labelled_as_angles(attributes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of coordinates that are longitude, latitude or other angles on a sphere, according
    to their attributes."""
    return [
        name
        for name, entry in attributes.items()
        if entry.get("standard_name") in (*_NAMES, *_ANGLES)
        or entry.get("units") in (*_EAST, *_NORTH)
        or (_kind(name, {}) and is_angle(entry.get("units")))
    ]


def degree_kind(name: str, attributes: Mapping[str, Any]) -> str | None:
    """ "longitude" or "latitude" if the attributes of a coordinate say so; otherwise None."""
    if attributes.get("standard_name") in _ANGLES or not labelled_as_angles({name: attributes}):
        return None
    return _kind(name, attributes)


def is_angle(units: object) -> bool:
    """Whether a unit is degrees, radians or another unit of angles."""
    unit = None if units is None else Unit.parse(units)
    return unit is not None and unit.is_angle


def degree_columns(attributes: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """The columns of longitude and latitude.

    Args:
        attributes: the attributes of all coordinates, by name and in order.

    Raises:
        ValueError: The coordinates are not one longitude before one latitude, or another coordinate
            is in a unit of length other than km.
    """
    kinds = {i: kind for i, pair in enumerate(attributes.items()) if (kind := _kind(*pair))}
    if list(kinds.values()) != ["longitude", "latitude"]:
        raise ValueError(
            f"a projection expects a longitude before a latitude, got coordinates "
            f"{list(attributes)}; name them longitude and latitude, or give them the units "
            "degrees_east and degrees_north"
        )
    for i, (name, entry) in enumerate(attributes.items()):
        unit = None if entry.get("units") is None else Unit.parse(entry["units"])
        if i in kinds:
            if unit is not None and unit.root is not None and not unit.is_angle:
                raise ValueError(
                    f"expected {name!r} in degrees or radians, got units {entry['units']!r}; "
                    "correct the attribute"
                )
        elif unit is not None and unit.is_length and conversion(entry["units"], "km") != 1:
            raise ValueError(
                f"expected {name!r} in km, the unit of positions in the plane, got units "
                f"{entry['units']!r}; convert it, and correct its attribute `units`"
            )
    longitude, latitude = kinds
    return longitude, latitude


def _kind(name: object, attributes: Mapping[str, Any]) -> str | None:
    """ "longitude" or "latitude" by standard name, unit or name; None if neither."""
    if attributes.get("standard_name") in _NAMES:
        return attributes["standard_name"]
    units = attributes.get("units")
    if units in (*_EAST, *_NORTH):
        return "longitude" if units in _EAST else "latitude"
    return next((kind for kind, names in _NAMES.items() if str(name).lower() in names), None)


# Units of derivatives and integrals. Only lengths need to be parsed; other units are copied.


def unit_of_map(outputs: str, inputs: str, power: int) -> tuple[float, str] | None:
    """The unit of f times a power of the unit of x, and the factor that converts values to it.

    If the unit of f contains lengths, as that of a velocity does, all lengths become metres: ∂u/∂x
    of a velocity in m s-1 along x in km is in s-1, after multiplication by 0.001. Otherwise the
    factor is 1 and the unit is the product, such as nT km-1. If a unit cannot be parsed, the result
    is None.
    """
    if not power:
        return 1.0, outputs
    of_outputs, of_inputs = Unit.parse(outputs), Unit.parse(inputs)
    if of_outputs is None or of_inputs is None:
        return None
    unit = of_outputs * of_inputs**power
    if not (of_outputs.has_length and of_inputs.has_length):
        return 1.0, str(unit)
    unit = unit.in_metres()
    return unit.scale, str(Unit(1.0, unit.powers))


# The CF attributes of outputs, symbols and standard deviations: units and names.


Attributes = Mapping[str, Any]

_WIND = {Divergence: "divergence_of_wind", Curl: "atmosphere_upward_relative_vorticity"}
_SEA_WATER = {Curl: "ocean_relative_vorticity"}
_SEA_ICE = {Divergence: "divergence_of_sea_ice_velocity"}
_STANDARD_NAMES = {
    ("eastward_wind", "northward_wind"): _WIND,
    ("x_wind", "y_wind"): _WIND,
    ("eastward_sea_water_velocity", "northward_sea_water_velocity"): _SEA_WATER,
    ("sea_water_x_velocity", "sea_water_y_velocity"): _SEA_WATER,
    ("eastward_sea_ice_velocity", "northward_sea_ice_velocity"): _SEA_ICE,
    ("sea_ice_x_velocity", "sea_ice_y_velocity"): _SEA_ICE,
}


def of_symbol(
    name: str,
    symbol: Symbol,
    outputs: Sequence[Attributes],
    inputs: Sequence[Attributes],
    given: Attributes,
) -> tuple[float, Attributes]:
    """The factor that converts the values of a symbol to its unit, and the attributes of the
    symbol.

    If the outputs have different units, or the directions of space have, no unit is added. If
    outputs have no units, a comment gives the power of a length in the values.

    Args:
        name: the name of an output of the symbol, for errors.
        symbol: the symbol.
        outputs: the attributes of the outputs of the field.
        inputs: the attributes of the directions of space.
        given: the attributes that a user gave for the symbol.

    Raises:
        ValueError: The values cannot be converted to the given units.
    """
    power = symbol.length_power
    units = (_common(outputs), _common(inputs) if power else "1")
    unit = None if power is None or None in units else unit_of_map(*units, power)
    length = None if units[1] is None else Unit.parse(units[1])
    if power and length and not any("units" in own for own in outputs):
        return 1.0, {"comment": f"in units of the field times {length**power}", **given}
    if unit is None:
        return 1.0, given
    factor, derived = unit
    wanted = given.get("units", derived)
    ratio = conversion(derived, wanted)
    if ratio is None:
        raise ValueError(
            f"expected units of {name!r} that follow from {units[0]!r} of the outputs and "
            f"{units[1]!r} of the coordinates, such as {derived!r}, got {wanted!r}; omit the units"
        )
    names = _STANDARD_NAMES.get(tuple(own.get("standard_name") for own in outputs), {})
    standard = names.get(type(symbol))
    known = {"standard_name": standard} if standard and derived == "s-1" else {}
    return factor * ratio, {"units": wanted, **known, **given}


def _common(attributes: Sequence[Attributes]) -> str | None:
    """The common unit of all; None without one."""
    units = [own.get("units") for own in attributes]
    if None in units or not units:
        return None
    parsed = [Unit.parse(unit) for unit in units]
    same = len(set(units)) == 1 or all(own is not None and own == parsed[0] for own in parsed)
    return str(units[0]) if same else None


def of_moments(name: str, attributes: Attributes) -> tuple[Attributes, Attributes]:
    """The attributes of a mean and of its standard deviation."""
    long_name = attributes.get("long_name", name)
    mean = {
        "long_name": f"posterior mean of {name}",
        **attributes,
        "ancillary_variables": f"{name}_sd",
    }
    sd = {"long_name": f"posterior standard deviation of {long_name}"}
    if "units" in attributes:
        sd["units"] = attributes["units"]
    if "standard_name" in attributes:  # with the modifier of the CF conventions
        sd["standard_name"] = f"{attributes['standard_name']} standard_error"
    return mean, sd


# Datasets of maps by the CF conventions, version 1.11: https://cfconventions.org.
#
# Coordinates get standard names, units and axes. Variables get a grid mapping, and the order (time,
# height, latitude, longitude) of dimensions. The Dataset gets a history. Standard names are added
# only if an attribute, a date or a projection makes them certain.


_VERSION = "CF-1.11"
GRID_MAPPING = "crs"  # the name of the variable
_DEGREES = {"longitude": "degrees_east", "latitude": "degrees_north"}
_PLANE = ("projection_x_coordinate", "projection_y_coordinate")
_AXES = {
    "time": {"axis": "T"},
    "height": {"axis": "Z", "positive": "up"},
    "altitude": {"axis": "Z", "positive": "up"},
    "depth": {"axis": "Z", "positive": "down"},
    "latitude": {"axis": "Y"},
    "grid_latitude": {"axis": "Y"},
    "projection_y_coordinate": {"axis": "Y"},
    "longitude": {"axis": "X"},
    "grid_longitude": {"axis": "X"},
    "projection_x_coordinate": {"axis": "X"},
}


def plane_of_unit(unit: str | None) -> tuple[str | None, str]:
    """The unit and the coordinate reference system of a column, from a text such as
    "km in +proj=tmerc ...". The system is empty for a column that is not in a plane."""
    length, _, crs = (unit or "").partition(" in ")
    return length or None, crs


def with_conventions(
    maps: "xarray.Dataset",
    degrees: Sequence[str],
    plane: Sequence[str],
    crs: str,
    attributes: Attributes,
) -> "xarray.Dataset":
    """The Dataset with the attributes and the order of dimensions that the conventions require.

    Args:
        maps: a Dataset with the variables and coordinates.
        degrees: the names of longitude and latitude, if they were projected; otherwise empty.
        plane: the names of the coordinates x and y, if they are in a plane; otherwise empty.
        crs: the coordinate reference system of the projection; empty without one.
        attributes: the attributes of the Dataset.
    """
    maps = maps.assign_attrs(attributes)
    standard = _DEGREES if degrees else _PLANE if plane else ()
    certain = dict(zip(degrees or plane, standard, strict=True))
    for name, coordinate in maps.coords.items():
        coordinate.attrs = _of_coordinate(name, coordinate.variable, certain.get(name))
        coordinate.encoding["_FillValue"] = None  # coordinates have no missing values
    variables = list(maps.data_vars)
    if crs:
        maps = _georeferenced(maps, plane, crs)
    if GRID_MAPPING in maps:
        for name in variables:
            maps[name].attrs["grid_mapping"] = GRID_MAPPING
    return maps.transpose(*_order(maps))


def global_attributes(
    field: object, names: Sequence[str], kind: str, before: Attributes
) -> Attributes:
    """Return the global attributes of a Dataset of maps.

    The history begins with a line for these maps, with the present time (UTC). To write identical
    files for identical maps, set the environment variable SOURCE_DATE_EPOCH. Its value, in seconds
    since 1970, then replaces the present time.

    Args:
        field: the field that was evaluated. Its `description` and `coverage` are used if it has
            them.
        names: the names of the outputs.
        kind: a text on the values in the maps, such as "posterior means and standard deviations".
        before: the attributes of the Dataset of the observations. Its history follows the new line.
    """
    import gp_orff

    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    software, title = f"gp_orff {gp_orff.__version__}", f"{kind} of {', '.join(names)}"
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {software}: {title}"
    if description := getattr(field, "description", ""):
        line += f"; {description}"
    history = [line, str(before["history"])] if "history" in before else [line]
    attributes = {
        "Conventions": _VERSION,
        "title": title[0].upper() + title[1:],
        "source": f"Gaussian process regression by {software}",
        "history": "\n".join(history),
    }
    coverage = getattr(field, "coverage", None)
    return attributes | ({} if coverage is None else {"coverage_of_95_percent_intervals": coverage})


def _of_coordinate(name: str, variable: "xarray.Variable", certain: str | None) -> Attributes:
    """The attributes of a coordinate. `certain` is its standard name, or None if not known."""
    attributes = dict(variable.attrs)
    dated = variable.dtype.kind == "M" or " since " in str(attributes.get("units", ""))
    standard = attributes.get("standard_name") or certain
    standard = standard or ("time" if dated else degree_kind(name, attributes))
    if standard is None:
        return attributes
    axis = _AXES.get(standard, {}) if variable.ndim == 1 else {}
    length = {"units": "km"} if certain in _PLANE else {}
    attributes = {**axis, **length, **attributes, "standard_name": standard}
    units = attributes.get("units", "degree" if certain in _DEGREES else None)
    if standard in _DEGREES and units is not None and conversion(units, "degree") == 1:
        attributes["units"] = _DEGREES[standard]
    return attributes


def _georeferenced(maps: "xarray.Dataset", plane: Sequence[str], crs: str) -> "xarray.Dataset":
    """Return the Dataset with a variable that describes the projection (a grid mapping).

    If the CF conventions do not define the projection, longitudes and latitudes are added as
    two-dimensional coordinates.
    """
    try:
        pyproj = optional("pyproj", "geo")
    except ImportError:  # a model of positions in a plane does not need it
        return maps
    xr, system = optional("xarray", "xarray"), pyproj.CRS(crs)
    if not plane:
        return maps.assign({GRID_MAPPING: ((), np.int32(0), system.geodetic_crs.to_cf())})
    x, y = (maps[name] for name in plane)
    metric = pyproj.CRS(pyproj.Proj(crs, preserve_units=False).srs).to_cf()  # origin in metres
    if "grid_mapping_name" in metric:
        factor = conversion("m", x.attrs["units"])
        origin = {name: factor * metric[name] for name in ("false_easting", "false_northing")}
        # The text of the projection (crs_wkt) would state that coordinates are in metres.
        mapping = {name: text for name, text in system.to_cf().items() if name != "crs_wkt"}
        return maps.assign({GRID_MAPPING: ((), np.int32(0), mapping | origin)})
    north, east = xr.broadcast(*(conversion(axis.attrs["units"], "km") * axis for axis in (y, x)))
    points = np.stack([east, north], axis=-1)
    places = LocalPlane(crs).inverse(points.reshape(-1, 2)).reshape(points.shape)
    added = {
        name: (east.dims, places[..., column], {"standard_name": name, "units": unit})
        for column, (name, unit) in enumerate(_DEGREES.items())
    }
    return maps.assign_coords(added)


def _order(maps: "xarray.Dataset") -> list[str]:
    """The order of the dimensions: others first, then time, height, latitude or y, longitude or
    x."""
    axes = {str(dim): maps[dim].attrs.get("axis") for dim in maps.dims if dim in maps.coords}
    for coordinate in maps.coords.values():  # of a curvilinear grid
        if coordinate.ndim == 2:
            axes |= {d: axes.get(d) or axis for d, axis in zip(coordinate.dims, "YX", strict=True)}
    return sorted(map(str, maps.dims), key=lambda dim: " TZYX".find(axes.get(dim) or " "))
