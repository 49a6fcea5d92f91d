"""Observations from an xarray Dataset, and a posterior as an xarray Dataset.

xarray is optional, `pip install gp_orff[xarray]`, and imported when a function is called.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.symbols.base import Symbol
from gp_orff.symbols.derivatives import Curl, Divergence

if TYPE_CHECKING:
    import xarray

_CHUNK = 2**18  # points that are evaluated together
_UNITS = ("W", "D", "h", "m", "s", "ms", "us", "ns")  # of a fixed length
_UNIX = "1970-01-01"


class _Field(Protocol):
    """The part of `FieldPosterior` that is used here."""

    num_inputs: int
    num_outputs: int

    def mean(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]: ...

    def variance(self, x: Float[Tensor, "n d"], symbol: Symbol | None) -> Float[Tensor, "n q"]: ...


def readings(
    dataset: "xarray.Dataset",
    variables: str | Sequence[str],
    coordinates: str | Sequence[str],
    *,
    track: str | None = None,
    time: str | None = None,
    noise: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
    time_unit: str = "s",
    epoch: object = None,
) -> tuple[Float[np.ndarray, "N ..."] | dict[str, np.ndarray], ...]:
    """Return points x (N, d) and vectors y (N, p) of a Dataset, as arrays for `model.fit`.

    Variables may be on a grid or along trajectories. On a grid, every combination of coordinates is
    a point. Points where all variables are NaN, such as land, are dropped; where only some are NaN,
    they stay NaN in y: use `fit(x, y, missing="mask")`. The variables have to be in the order of
    the coordinates that they point along: u, v with lon, lat.

    Args:
        dataset: an xarray Dataset.
        variables: the names of p variables with the same dimensions.
        coordinates: the names of d coordinates or variables, in the order of the model's inputs.
        track: the name of a coordinate or variable with the track of every reading. If it, `time`
            or `noise` is given, a third value are these columns, (N,) each, as arguments of
            `model.fit`.
        time: likewise, with the times along tracks.
        noise: likewise, with the noise variances: one name, one for each variable, or p×p names of
            covariances. Of standard errors, take the squares: `dataset.assign(var_u=ds.sd_u**2)`.
        time_unit: the unit of the numbers that datetime64 and timedelta64 become: a NumPy unit from
            "W" to "ns".
        epoch: the time that becomes zero, a datetime64 or anything that NumPy converts to one;
            1970-01-01 if None.

    Raises:
        ImportError: xarray is not installed.
        KeyError: a name that the Dataset does not have.
        TypeError: `dataset` is no Dataset, or values are neither numbers nor times.
        ValueError: dimensions that do not fit, an unknown unit, or nothing but NaN.

    Example:
        >>> import gp_orff, xarray
        >>> u = xarray.DataArray([[1.0, 2.0, 3.0], [4.0, float("nan"), 6.0]], dims=("lat", "lon"))
        >>> ds = xarray.Dataset({"u": u, "v": -u}, {"lon": [0.0, 0.1, 0.2], "lat": [50.0, 50.1]})
        >>> x, y = gp_orff.labelled.readings(ds, ["u", "v"], ["lon", "lat"])
        >>> x.shape, y[-1].tolist()
        ((5, 2), [6.0, -6.0])
        >>> ds = ds.assign(var=0.1 + abs(u))
        >>> *_, options = gp_orff.labelled.readings(ds, ["u", "v"], ["lon", "lat"], noise="var")
        >>> options["noise"].tolist()
        [1.1, 2.1, 3.1, 4.1, 6.1]
    """
    xr = _xarray()
    if not isinstance(dataset, xr.Dataset):
        raise TypeError(
            f"expected an xarray Dataset, got {type(dataset).__name__}; convert a DataArray with "
            "to_dataset"
        )
    fields, positions = _named(dataset, variables), _named(dataset, coordinates)
    names = {"track": track, "time": time}
    names = {option: name for option, name in names.items() if name is not None}
    every_noise = np.array([] if noise is None else noise, dtype=object)
    along = [*names.values(), *every_noise.flat]
    along = _named(dataset, along) if along else {}
    sizes = dict(next(iter(fields.values())).sizes)
    for name, variable in fields.items():
        if set(variable.dims) != set(sizes):
            raise ValueError(
                f"expected variables with the same dimensions {tuple(sizes)}, got {name!r} with "
                f"{variable.dims}; select from them with isel, or bring them to one grid with "
                "interp"
            )
    for name, variable in {**positions, **along}.items():
        if not set(variable.dims) <= set(sizes):
            raise ValueError(
                f"expected coordinates along the dimensions {tuple(sizes)} of the variables, got "
                f"{name!r} along {variable.dims}; every observation has one position: select one "
                "with isel"
            )
    y = [_floats(name, values.set_dims(sizes)) for name, values in fields.items()]
    y = np.stack(y, axis=-1)
    observed = ~np.isnan(y).all(-1)
    if not observed.any():
        raise ValueError(f"expected observations of {' or '.join(fields)}, got nothing but NaN")
    columns = [
        _numbers(name, values.set_dims(sizes).to_numpy()[observed], time_unit, epoch)
        for name, values in positions.items()
    ]
    x, y = np.stack(columns, axis=-1), y[observed]
    if not along:
        return x, y
    options = {
        option: along[name].set_dims(sizes).to_numpy()[observed] for option, name in names.items()
    }
    if time is not None:
        options["time"] = _numbers(time, options["time"], time_unit, epoch)
    if noise is not None:
        columns = [
            _floats(name, along[name].set_dims(sizes))[observed] for name in every_noise.flat
        ]
        options["noise"] = np.stack(columns, axis=-1).reshape(-1, *every_noise.shape)
    return x, y, options


def on_grid(
    field: _Field,
    coordinates: Mapping[str, object],
    *,
    names: Sequence[str] | None = None,
    symbols: Mapping[str, Symbol] | None = None,
    attrs: Mapping[str, Mapping[str, Any]] | None = None,
    time_unit: str = "s",
    epoch: object = None,
) -> "xarray.Dataset":
    """A Dataset of means and standard deviations on a grid; see `FieldPosterior.to_xarray`.

    Args:
        field: a `FieldPosterior`.
        coordinates: 1-D arrays or DataArrays by name, in the order of the model's inputs.
        names: names of the outputs.
        symbols: symbols of the field by name.
        attrs: attributes by name.
        time_unit: as for `readings`.
        epoch: as for `readings`.

    Raises:
        ImportError: xarray is not installed.
        TypeError: coordinates that are neither numbers nor times, or a symbol that is none.
        ValueError: coordinates, names or symbols that do not fit the field or each other.

    Example:
        >>> import gp_orff, torch
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> field = model.condition(torch.rand(20, 2), torch.randn(20, 2)).posterior()
        >>> grid = {"x": [0.0, 0.5, 1.0], "y": [0.0, 1.0]}
        >>> ds = gp_orff.labelled.on_grid(field, grid, symbols={})
        >>> list(ds.data_vars), ds["u"].shape
        (['u', 'u_sd', 'v', 'v_sd'], (3, 2))
    """
    xr = _xarray()
    if len(coordinates) != field.num_inputs:
        raise ValueError(
            f"expected a coordinate for each of the model's {field.num_inputs} inputs, in their "
            f"order, got {list(coordinates)}"
        )
    attrs = {} if attrs is None else attrs
    coords = {name: _axis(xr, name, axis, attrs.get(name)) for name, axis in coordinates.items()}
    axes = [_numbers(name, axis.to_numpy(), time_unit, epoch) for name, axis in coords.items()]
    ends = [(axis.min(), axis.max()) for axis in axes]
    corners = torch.tensor(list(product(*ends)), dtype=torch.float64)
    symbols = _derivatives(field, corners) if symbols is None else symbols
    requests = [(None, _names(field, names))]
    requests += [(symbol, _outputs(field, name, symbol)) for name, symbol in symbols.items()]
    means = [name for _, outputs in requests for name in outputs]
    _check_names([*coords, *means, *(f"{name}_sd" for name in means)])
    unknown = sorted(set(attrs) - {*coords, *means})
    if unknown:
        raise ValueError(f"expected attrs of {[*coords, *means]}, got those of {unknown}")
    variables = {}
    for symbol, outputs in requests:
        field.mean(corners, symbol)  # so that all chunks have one domain
        for name, *moments in zip(outputs, *_moments(field, symbol, axes), strict=True):
            notes = _attributes(name, attrs.get(name, {}))
            for key, values, note in zip((name, f"{name}_sd"), moments, notes, strict=True):
                variables[key] = xr.Variable(list(coords), values, note)
    return xr.Dataset(variables, coords)


def _xarray() -> ModuleType:
    try:
        import xarray
    except ImportError as error:
        raise ImportError(
            "labelled data need xarray, which is not installed; pip install gp_orff[xarray]"
        ) from error
    return xarray


def _named(dataset: "xarray.Dataset", names: str | Sequence[str]) -> dict[str, "xarray.Variable"]:
    names = [names] if isinstance(names, str) else list(names)
    missing = [name for name in names if name not in dataset.variables]
    if missing or not names:
        raise KeyError(
            f"expected names among {sorted(map(str, dataset.variables))}, got {missing or 'none'}"
        )
    return {name: dataset.variables[name] for name in names}


def _floats(name: str, variable: "xarray.Variable") -> np.ndarray:
    if variable.dtype.kind not in "fiu":
        raise TypeError(f"expected numbers in {name!r}, got type {variable.dtype}")
    return variable.to_numpy().astype(np.float64)


def _numbers(name: str, values: np.ndarray, unit: str, epoch: object) -> np.ndarray:
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


def _axis(
    xr: ModuleType, name: str, values: object, attrs: Mapping[str, Any] | None
) -> "xarray.Variable":
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(
            f"expected coordinate {name!r} as a 1-D array, got shape {array.shape}; write one "
            "value as [value]"
        )
    return xr.Variable(name, array, {**getattr(values, "attrs", {}), **(attrs or {})})


def _names(field: _Field, names: Sequence[str] | None) -> list[str]:
    p = field.num_outputs
    if names is None:
        return list("uvw"[:p]) if p in (2, 3) else [f"f{i + 1}" for i in range(p)]
    if isinstance(names, str) or len(names) != p:
        raise ValueError(f"expected a list of {p} names, one for each output, got {names!r}")
    return list(names)


def _outputs(field: _Field, name: str, symbol: Symbol) -> list[str]:
    """The names of the outputs of a symbol: its own name, numbered if there are several."""
    if not isinstance(symbol, Symbol):
        raise TypeError(
            f"expected a symbol as {name!r}, such as gp_orff.Divergence(), got "
            f"{type(symbol).__name__}"
        )
    q = symbol.num_outputs(field.num_outputs)
    return [name] if q == 1 else [f"{name}_{i + 1}" for i in range(q)]


def _check_names(names: list[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"expected different names for coordinates, outputs, symbols and their _sd, got "
            f"{repeated} more than once; choose others with names= and symbols="
        )


def _derivatives(field: _Field, x: Float[Tensor, "n d"]) -> dict[str, Symbol]:
    """Divergence and vorticity of a planar field, where they exist."""
    symbols = {"divergence": Divergence(), "vorticity": Curl()} if field.num_outputs == 2 else {}
    return {name: symbol for name, symbol in symbols.items() if _exists(field, symbol, x)}


def _exists(field: _Field, symbol: Symbol, x: Float[Tensor, "n d"]) -> bool:
    try:
        field.mean(x, symbol)
    except (ValueError, NotImplementedError):
        field.mean(x, None)  # raises if the points are to blame
        return False
    return True


def _moments(
    field: _Field, symbol: Symbol | None, axes: list[np.ndarray]
) -> tuple[Float[np.ndarray, "q *grid"], Float[np.ndarray, "q *grid"]]:
    """Means and standard deviations on the product of the axes."""
    q = field.num_outputs if symbol is None else symbol.num_outputs(field.num_outputs)
    shape = tuple(map(len, axes))
    mean, sd = np.empty((2, q, np.prod(shape)))
    for rows, x in _points(axes, shape):
        mean[:, rows] = field.mean(x, symbol).mT
        sd[:, rows] = field.variance(x, symbol).clamp_min(0).sqrt().mT
    return mean.reshape(q, *shape), sd.reshape(q, *shape)


def _points(
    axes: list[np.ndarray], shape: tuple[int, ...]
) -> Iterator[tuple[slice, Float[Tensor, "n d"]]]:
    """Chunks of the product of the axes: row numbers and points."""
    size = int(np.prod(shape))
    for start in range(0, size, _CHUNK):
        rows = slice(start, min(start + _CHUNK, size))
        index = np.unravel_index(np.arange(rows.start, rows.stop), shape)
        x = [axis[i] for axis, i in zip(axes, index, strict=True)]
        yield rows, torch.from_numpy(np.stack(x, axis=-1))


def _attributes(name: str, attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes of a mean, and those of its standard deviation."""
    long_name = attrs.get("long_name", name)
    mean = {"long_name": f"posterior mean of {name}", **attrs, "ancillary_variables": f"{name}_sd"}
    sd = {"long_name": f"posterior standard deviation of {long_name}"}
    if "units" in attrs:
        sd["units"] = attrs["units"]
    if "standard_name" in attrs:  # with the modifier of the CF conventions
        sd["standard_name"] = f"{attrs['standard_name']} standard_error"
    return mean, sd
