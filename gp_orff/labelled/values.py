"""Variables of a Dataset by name, and numbers and times as float64."""

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import xarray

_UNITS = ("W", "D", "h", "m", "s", "ms", "us", "ns")  # of a fixed length
_UNIX = "1970-01-01"


def optional(name: str, extra: str) -> ModuleType:
    """A module that an extra of this package installs."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"this function needs {name}, which is not installed; pip install gp_orff[{extra}]"
        ) from error


def as_dataset(dataset: object) -> "xarray.Dataset":
    """Raises TypeError if it is none."""
    xr = optional("xarray", "xarray")
    if not isinstance(dataset, xr.Dataset):
        raise TypeError(
            f"expected an xarray Dataset, got {type(dataset).__name__}; convert a DataFrame with "
            "to_xarray(), a DataArray with to_dataset()"
        )
    return dataset


def named(dataset: "xarray.Dataset", names: str | Sequence[str]) -> dict[str, "xarray.Variable"]:
    """The variables of these names."""
    names = [names] if isinstance(names, str) else list(names)
    missing = [name for name in names if name not in dataset.variables]
    if missing or not names:
        raise KeyError(
            f"expected names among {sorted(map(str, dataset.variables))}, got {missing or 'none'}"
        )
    return {name: dataset.variables[name] for name in names}


def floats(name: str, variable: "xarray.Variable") -> np.ndarray:
    """The values of a variable as float64."""
    if variable.dtype.kind not in "fiu":
        parts = f"; for u + iv, make two variables of {name}.real and {name}.imag"
        parts = parts if variable.dtype.kind == "c" else ""
        raise TypeError(f"expected numbers in {name!r}, got type {variable.dtype}{parts}")
    return variable.to_numpy().astype(np.float64)


def numbers(name: str, values: np.ndarray, unit: str, epoch: object) -> np.ndarray:
    """Coordinates as float64; times in units since an epoch, NaT as NaN."""
    if unit not in _UNITS:
        raise ValueError(f"expected a time_unit among {', '.join(_UNITS)}, got {unit!r}")
    if values.dtype.kind == "M":
        seconds = _seconds(values, np.datetime64(_UNIX if epoch is None else epoch))
        return seconds / (np.timedelta64(1, unit) / np.timedelta64(1, "s"))
    if values.dtype.kind == "m":
        return values / np.timedelta64(1, unit)
    if values.dtype.kind not in "fiu":
        raise TypeError(
            f"expected numbers or datetime64 as coordinate {name!r}, got type {values.dtype}; "
            "convert them first, for instance with convert_calendar"
        )
    return values.astype(np.float64)


def _seconds(times: np.ndarray, epoch: np.datetime64) -> np.ndarray:
    """Seconds since the epoch; whole seconds separately, since int64 ns overflow in 292 years."""
    whole_times, whole_epoch = times.astype("M8[s]"), epoch.astype("M8[s]")
    second = np.timedelta64(1, "s")
    fractions = (times - whole_times) / second - (epoch - whole_epoch) / second
    return (whole_times - whole_epoch) / second + fractions
