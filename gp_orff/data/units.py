"""Units of data in the notation of the CF conventions, converted by pint."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float

from gp_orff.symbols.base import unit_of

_DEGREE = re.compile("degrees?(_?(east|north|E|N|true))?$")
_TOKEN = re.compile(
    r"\s*([*./]?)\s*(?:([^\W\d]+|[%°])(?:\^|\*\*)?([+-]?\d+)?|(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))(?=[\s*./]|$)"
)
_PER = re.compile(r"\s+per\s+")


def optional(name: str, extra: str) -> ModuleType:
    """Return a module that an extra of this package installs.

    Raises:
        ImportError: the module is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this function needs {name}, which is not installed; pip install gp_orff[{extra}]"
        ) from error


@cache
def _registry() -> Any:
    """The unit registry of pint, with names of UDUNITS that pint does not have or interprets
    differently."""
    registry = optional("pint", "xarray").UnitRegistry()
    registry.define("@alias nautical_mile = nmile = nautical_miles")
    registry.define("@alias degree_Celsius = Celsius = degree_C = degrees_C = degrees_Celsius")
    return registry


@cache
def _root(symbol: str) -> tuple[float, float, frozenset[tuple[str, float]]] | None:
    """The factor and offset that convert values to base units, and the powers of the base units;

    None for unknown units and for logarithmic units such as dB.
    """
    registry = _registry()
    try:
        unit = registry.parse_units(symbol)
        zero, one, two = (registry.Quantity(n, unit).to_root_units() for n in (0.0, 1.0, 2.0))
    except Exception:  # pint raises errors of many classes for texts that are not units
        return None
    if not math.isclose(two.magnitude - one.magnitude, one.magnitude - zero.magnitude):
        return None
    powers = frozenset((name, float(power)) for name, power in one.unit_items())
    return one.magnitude - zero.magnitude, zero.magnitude, powers


@dataclass(frozen=True)
class Unit:
    """A number times a product of powers of symbols.

    Example:
        >>> from gp_orff.data.units import Unit
        >>> str(Unit.parse("m/s") * Unit.parse("km") ** -1)
        'm s-1 km-1'
        >>> str((Unit.parse("m/s") * Unit.parse("km") ** -1).in_metres())
        '0.001 s-1'
    """

    scale: float
    powers: dict[str, int]

    @classmethod
    def parse(cls, text: object) -> "Unit | None":
        """The unit from a text such as "m s-1", "m/s" or "1"; None if the text is not a unit."""
        unit, position, text = cls(1.0, {}), 0, _PER.sub("/", str(text).strip())
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                return None
            sign, symbol, power, number = token.groups()
            if symbol is None:
                factor = cls(float(number), {})
            else:
                symbol = "degree" if _DEGREE.match(symbol) else symbol
                factor = cls(1.0, {symbol: int(power or 1)})
            unit *= factor**-1 if sign == "/" else factor
            position = token.end()
        return unit if text else None

    @property
    def root(self) -> tuple[float, float, dict[str, float]] | None:
        """The factor and offset that convert values in this unit to base units, and the powers of
        these; None if a symbol is unknown. Radians are a base unit, in contrast to "1"."""
        factor, offset, powers = self.scale, 0.0, {}
        for symbol, power in self.powers.items():
            base = _root(symbol)
            if base is None:
                return None
            factor *= base[0] ** power
            for name, n in base[2]:
                powers[name] = powers.get(name, 0.0) + n * power
            alone = len(self.powers) == 1 and power == 1
            offset = base[1] if alone else 0.0
        return factor, offset, {name: n for name, n in powers.items() if n}

    @property
    def has_length(self) -> bool:
        """Whether the unit contains a power of a length."""
        return bool(self.in_metres().powers.get("m"))

    @property
    def is_angle(self) -> bool:
        """Whether it is degrees, radians or another unit of angles."""
        return self.root is not None and self.root[2] == {"radian": 1.0}

    @property
    def is_length(self) -> bool:
        return self.root is not None and self.root[2] == {"meter": 1.0}

    def in_metres(self) -> "Unit":
        """This unit with metres for all lengths, and m s-1 for knots."""
        unit = Unit(self.scale, {})
        for symbol, power in self.powers.items():
            factor, _, root = _root(symbol) or (1.0, 0.0, frozenset())
            parts = {name: int(n) for name, n in root}
            if "meter" in parts and set(parts) <= {"meter", "second"}:
                short = {"meter": "m", "second": "s"}
                unit *= Unit(factor, {short[name]: n for name, n in parts.items()}) ** power
            else:
                unit *= Unit(1.0, {symbol: power})
        return unit

    def __mul__(self, other: "Unit") -> "Unit":
        powers = dict(self.powers)
        for symbol, power in other.powers.items():
            powers[symbol] = powers.get(symbol, 0) + power
        return Unit(self.scale * other.scale, {s: n for s, n in powers.items() if n})

    def __pow__(self, power: int) -> "Unit":
        powers = {symbol: n * power for symbol, n in self.powers.items() if power}
        return Unit(self.scale**power, powers)

    def __str__(self) -> str:
        powers = sorted(self.powers.items(), key=lambda pair: pair[1] < 0)
        symbols = [symbol if n == 1 else f"{symbol}{n}" for symbol, n in powers]
        if self.scale != 1:
            symbols.insert(0, f"{self.scale:.12g}")
        return " ".join(symbols) or "1"


def change(given: object, wanted: object) -> tuple[float, float] | None:
    """The factor and offset that convert values from one unit to another; None if impossible."""
    if given == wanted:
        return 1.0, 0.0
    units = Unit.parse(given), Unit.parse(wanted)
    if None in units:
        return None
    if units[0] == units[1]:
        return 1.0, 0.0
    old, new = (unit.root for unit in units)
    if old is None or new is None or old[2] != new[2]:
        return None
    return old[0] / new[0], (old[1] - new[1]) / new[0]


def conversion(given: str, wanted: str) -> float | None:
    """The factor that converts values from one unit to another; None if impossible."""
    factors = change(given, wanted)
    return None if factors is None or factors[1] else factors[0]


# Arrays with the units of their columns.


class UnitArray(np.ndarray):
    """An array with the units of its columns. Selected rows have the same units.

    The results of arithmetic, and selected columns, are arrays without units. If values other than
    NaN are assigned to entries, the array loses its units.

    Example:
        >>> from gp_orff.data.units import UnitArray
        >>> x = UnitArray.of([[1.0, 2.0], [3.0, 4.0]], ["km", "m"])
        >>> x[:1].units, x[:, 0].units, isinstance(1000 * x, UnitArray)
        (('km', 'm'), None, False)
    """

    units: tuple[str | None, ...] | None = None

    @classmethod
    def of(cls, values: Float[np.ndarray, "N ..."], units: Iterable[str | None]) -> "UnitArray":
        """An array (N, k) with k units, or (N,) with one unit."""
        result = np.asarray(values).view(cls)
        result.units = tuple(units)
        return result

    def __getitem__(self, key):
        result = super().__getitem__(key)
        if np.ndim(result) == self.ndim and not isinstance(key, tuple):
            result.units = self.units
        return result

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if not np.isnan(value).all():
            self.units = None

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        def plain(values):
            return np.asarray(values) if isinstance(values, UnitArray) else values

        if out:
            kwargs["out"] = tuple(map(plain, out))
        result = getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        for values in out:
            if values is not plain(values):
                values.units = None
        return out[0] if len(out) == 1 else result

    def __reduce__(self):
        return UnitArray.of, (np.asarray(self), self.units or ())


def units_of_columns(values: object) -> tuple[str | None, ...]:
    """The unit of each column, or None if unknown. Values of xarray, pint or astropy have one unit
    for all columns."""
    if isinstance(values, UnitArray):
        return values.units or ()
    unit = unit_of(values)
    shape = getattr(values, "shape", ())
    return () if unit is None else (unit,) * (shape[-1] if len(shape) > 1 else 1)
