"""Units of derivatives and integrals: only lengths have to be understood, all else is carried."""

import re
from dataclasses import dataclass

_METRES = {
    **dict.fromkeys(("m", "meter", "meters", "metre", "metres"), 1.0),
    **dict.fromkeys(("km", "kilometer", "kilometers", "kilometre", "kilometres"), 1e3),
    **dict.fromkeys(("cm", "centimeter", "centimeters", "centimetre", "centimetres"), 1e-2),
    **dict.fromkeys(("mm", "millimeter", "millimeters", "millimetre", "millimetres"), 1e-3),
    **dict.fromkeys(("um", "µm", "micrometer", "micrometre", "micron"), 1e-6),
    **dict.fromkeys(("nmile", "nautical_mile", "nautical_miles"), 1852.0),
    **dict.fromkeys(("ft", "foot", "feet", "international_foot"), 0.3048),
}
_KNOTS = ("knot", "knots", "kt", "kts")
_DEGREE = re.compile("degrees?(_?(east|north|E|N|true))?$")
_TOKEN = re.compile(
    r"\s*([*./]?)\s*(?:([^\W\d]+|[%°])(?:\^|\*\*)?([+-]?\d+)?|(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))(?=[\s*./]|$)"
)


@dataclass(frozen=True)
class Unit:
    """A number times a product of powers of symbols.

    Example:
        >>> from gp_orff.labelled.units import Unit
        >>> str(Unit.parse("m/s") * Unit.parse("km") ** -1)
        'm s-1 km-1'
        >>> str((Unit.parse("m/s") * Unit.parse("km") ** -1).in_metres())
        '0.001 s-1'
    """

    scale: float
    powers: dict[str, int]

    @classmethod
    def parse(cls, text: object) -> "Unit | None":
        """The unit of a text as of CF, such as "m s-1", "m/s" or "1"; None if it is no such."""
        unit, position, text = cls(1.0, {}), 0, str(text).strip()
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
    def has_length(self) -> bool:
        """Whether a power of a length is in it."""
        return bool(self.in_metres().powers.get("m"))

    def in_metres(self) -> "Unit":
        """The same unit with metres in the place of all lengths."""
        unit = Unit(self.scale, {})
        for symbol, power in self.powers.items():
            if symbol in _METRES:
                factor = Unit(_METRES[symbol], {"m": 1})
            elif symbol in _KNOTS:
                factor = Unit(1852 / 3600, {"m": 1, "s": -1})
            else:
                factor = Unit(1.0, {symbol: 1})
            unit *= factor**power
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
        powers = sorted(self.powers.items(), key=lambda own: own[1] < 0)
        symbols = [symbol if n == 1 else f"{symbol}{n}" for symbol, n in powers]
        if self.scale != 1:
            symbols.insert(0, f"{self.scale:.12g}")
        return " ".join(symbols) or "1"


def unit_of_map(outputs: str, inputs: str, power: int) -> tuple[float, str] | None:
    """The unit of f times that of x to a power, and the factor of numbers that it stands for.

    Where f is in lengths, such as a velocity, the lengths of both become metres: ∂u/∂x of a
    velocity in m s-1 along x in km is in s-1, after multiplication by 0.001. Otherwise the factor
    is 1 and the unit the product, as in nT km-1. None if one of the units is not understood.
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


def conversion(given: str, wanted: str) -> float | None:
    """The factor of numbers in a unit that brings them to another; None if there is none."""
    units = Unit.parse(given), Unit.parse(wanted)
    if None in units:
        return 1.0 if given == wanted else None
    old, new = (unit.in_metres() for unit in units)
    return old.scale / new.scale if old.powers == new.powers else None
