"""Which coordinates are longitude and latitude, by CF attributes or by name."""

from collections.abc import Mapping
from typing import Any

_EAST = ("degrees_east", "degree_east", "degrees_E", "degree_E", "degreesE", "degreeE")
_NORTH = ("degrees_north", "degree_north", "degrees_N", "degree_N", "degreesN", "degreeN")
_NAMES = {
    "longitude": ("longitude", "lon", "long", "lng", "nav_lon"),
    "latitude": ("latitude", "lat", "nav_lat"),
}
_LENGTHS = ("m", "meter", "meters", "metre", "metres", "cm", "mm")


def labelled_in_degrees(attributes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of coordinates whose attributes say that they are longitude and latitude."""
    return [
        name
        for name, own in attributes.items()
        if own.get("standard_name") in _NAMES or own.get("units") in (*_EAST, *_NORTH)
    ]


def degree_columns(attributes: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """The columns of longitude and latitude.

    Args:
        attributes: those of all coordinates, by name and in order.

    Raises:
        ValueError: not one of each, in another order, or other coordinates in metres.
    """
    columns = {
        kind: [i for i, (name, own) in enumerate(attributes.items()) if _is(kind, name, own)]
        for kind in _NAMES
    }
    longitude, latitude = columns.values()
    if len(longitude) != 1 or len(latitude) != 1 or longitude > latitude:
        raise ValueError(
            f"a projection expects a longitude before a latitude, got coordinates "
            f"{list(attributes)}; name them so, or give them units degrees_east and degrees_north"
        )
    for name, own in attributes.items():
        if own.get("units") in _LENGTHS:
            raise ValueError(
                f"expected {name!r} in km, as positions in the plane are, got units "
                f"{own['units']!r}; convert it, and its units"
            )
    return longitude[0], latitude[0]


def _is(kind: str, name: str, attributes: Mapping[str, Any]) -> bool:
    units = attributes.get("units")
    if attributes.get("standard_name") in _NAMES:
        return attributes["standard_name"] == kind
    if units in (*_EAST, *_NORTH):
        return units in (_EAST if kind == "longitude" else _NORTH)
    return str(name).lower() in _NAMES[kind]
