"""Numbers in words: values with their standard errors, tables, plain values for logs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import numpy as np
from jaxtyping import Float

_MOST = 6  # numbers of a row; of more, the first and the last


def with_error(
    value: float | Float[np.ndarray, "..."], error: float | Float[np.ndarray, "..."] | None
) -> str:
    """0.59782 ± 0.21; the value alone where its error is not known."""
    if error is None or not np.isfinite(error).any():
        return brief(value, 5)
    return f"{brief(value, 5)} ± {brief(error, 2)}"


def brief(value: float | Float[np.ndarray, "..."], digits: int) -> str:
    """To so many digits."""
    if np.ndim(value) == 0:
        return f"{float(value):.{digits}g}"
    formatter = {"float_kind": lambda own: f"{own:.{digits}g}"}
    options = {"separator": ", ", "threshold": _MOST, "edgeitems": 2}
    return np.array2string(np.ravel(value), formatter=formatter, max_line_width=10**6, **options)


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines with the columns aligned: the first ones to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            own.ljust(width) if place < left else own.rjust(width)
            for place, (own, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def plain(value: object) -> object:
    """What JSON knows: dicts, lists, strings, numbers; None for what is not finite."""
    if isinstance(value, Mapping):
        return {str(name): plain(own) for name, own in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Iterable):
        return [plain(own) for own in value]
    raise TypeError(f"expected numbers and words, got {type(value).__name__}")
