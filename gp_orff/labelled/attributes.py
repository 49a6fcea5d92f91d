"""The CF attributes of outputs and symbols: units, names, and those of standard deviations."""

from collections.abc import Mapping, Sequence
from typing import Any

from gp_orff.labelled.units import Unit, conversion, unit_of_map
from gp_orff.symbols.base import Symbol
from gp_orff.symbols.derivatives import Curl, Divergence

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
    """The factor of the numbers of a symbol, and its attributes.

    Nothing is added where outputs differ in their units, or directions of space in theirs. Where
    outputs have no units, a comment tells the power of a length in the numbers.

    Args:
        name: of an output of the symbol, for errors.
        symbol: the symbol.
        outputs: the attributes of the outputs of the field.
        inputs: those of the directions of space.
        given: those that a user gave for the symbol.

    Raises:
        ValueError: units are given that the numbers cannot have.
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
            f"{units[1]!r} of the coordinates, such as {derived!r}, got {wanted!r}; leave them out"
        )
    names = _STANDARD_NAMES.get(tuple(own.get("standard_name") for own in outputs), {})
    standard = names.get(type(symbol))
    known = {"standard_name": standard} if standard and derived == "s-1" else {}
    return factor * ratio, {"units": wanted, **known, **given}


def _common(attributes: Sequence[Attributes]) -> str | None:
    """The one unit of all, None if there is none."""
    units = [own.get("units") for own in attributes]
    if None in units or not units:
        return None
    parsed = [Unit.parse(unit) for unit in units]
    same = len(set(units)) == 1 or all(own is not None and own == parsed[0] for own in parsed)
    return str(units[0]) if same else None


def of_moments(name: str, attributes: Attributes) -> tuple[Attributes, Attributes]:
    """The attributes of a mean, and those of its standard deviation."""
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
