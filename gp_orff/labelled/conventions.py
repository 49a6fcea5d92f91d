"""Datasets of maps by the CF conventions, version 1.11: https://cfconventions.org.

Coordinates get their standard names, units and axes, variables the order (time, height, latitude,
longitude) of dimensions and a grid mapping, and the Dataset its history. A standard name is given
only where an attribute, a date or a projection makes it certain.
"""

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gp_orff.data.units import conversion, optional
from gp_orff.labelled.attributes import Attributes, degree_kind
from gp_orff.labelled.plane import LocalPlane

if TYPE_CHECKING:
    import xarray

VERSION = "CF-1.11"
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
    """The unit and the coordinate reference system of a column in "km in +proj=tmerc ..."; the
    system is empty for a column that is in no plane."""
    length, _, crs = (unit or "").partition(" in ")
    return length or None, crs


def with_conventions(
    maps: "xarray.Dataset",
    degrees: Sequence[str],
    plane: Sequence[str],
    crs: str,
    attributes: Attributes,
) -> "xarray.Dataset":
    """The Dataset with the attributes and the order of dimensions that the conventions ask for.

    Args:
        maps: variables and coordinates, with the attributes that are given.
        degrees: the names of longitude and latitude, if they were projected.
        plane: or those of the coordinates x, y of a plane.
        crs: of the projection; empty without one.
        attributes: of the Dataset.
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
    """The attributes of a Dataset of maps.

    The time of the history is that of the environment variable SOURCE_DATE_EPOCH, in seconds since
    1970, if it is set, so that equal maps can be equal files.

    Args:
        field: what was evaluated; its `description` and `coverage` are used if it has them.
        names: of the outputs.
        kind: what the maps show of these.
        before: the attributes of the Dataset of the observations, whose history goes on.
    """
    import gp_orff

    moment = time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time())))
    software, title = f"gp_orff {gp_orff.__version__}", f"{kind} of {', '.join(names)}"
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', moment)} {software}: {title}"
    if description := getattr(field, "description", ""):
        line += f"; {description}"
    history = [line, str(before["history"])] if "history" in before else [line]
    attributes = {
        "Conventions": VERSION,
        "title": title[0].upper() + title[1:],
        "source": f"Gaussian process regression by {software}",
        "history": "\n".join(history),
    }
    coverage = getattr(field, "coverage", None)
    return attributes | ({} if coverage is None else {"coverage_of_95_percent_intervals": coverage})


def _of_coordinate(name: str, variable: "xarray.Variable", certain: str | None) -> Attributes:
    """The attributes of a coordinate; `certain` is its standard name where one is known."""
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
    """The Dataset with a grid mapping; with longitudes and latitudes as two-dimensional coordinates
    where the conventions do not know the projection."""
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
        # The text of the projection would say that coordinates are in metres.
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
    """The dimensions: others first, then time, height, latitude or y, longitude or x."""
    axes = {str(dim): maps[dim].attrs.get("axis") for dim in maps.dims if dim in maps.coords}
    for coordinate in maps.coords.values():  # of a curvilinear grid
        if coordinate.ndim == 2:
            axes |= {d: axes.get(d) or axis for d, axis in zip(coordinate.dims, "YX", strict=True)}
    return sorted(map(str, maps.dims), key=lambda dim: " TZYX".find(axes.get(dim) or " "))
