"""Format numbers: values with standard errors, aligned tables, plain values for logs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Float

_MAX_NUMBERS = 6  # of an array in a row; a longer one shows its first and last two


def with_error(
    value: float | Float[np.ndarray, "..."], error: float | Float[np.ndarray, "..."] | None
) -> str:
    """Format a value with its standard error, as 0.59782 ± 0.21; without one, the value alone."""
    if error is None or not np.isfinite(error).any():
        return brief(value, 5)
    return f"{brief(value, 5)} ± {brief(error, 2)}"


def brief(value: float | Float[np.ndarray, "..."], digits: int) -> str:
    """Format numbers to `digits` significant digits."""
    if np.ndim(value) == 0:
        return f"{float(value):.{digits}g}"
    formatter = {"float_kind": lambda number: f"{number:.{digits}g}"}
    options = {"separator": ", ", "threshold": _MAX_NUMBERS, "edgeitems": 2}
    return np.array2string(np.ravel(value), formatter=formatter, max_line_width=10**6, **options)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines with aligned columns: the first `left` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plain(value: object) -> object:
    """Convert to values that JSON has: dicts, lists, strings, numbers; not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Iterable):
        return [plain(part) for part in value]
    raise TypeError(f"expected numbers, strings, mappings or sequences, got {type(value).__name__}")
