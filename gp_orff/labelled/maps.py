"""`on_grid`: a posterior on a grid, as a Dataset of means and standard deviations."""

import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from gp_orff.data.checks import common_units, vectors_of
from gp_orff.data.survey import DataWarning
from gp_orff.data.units import Unit, change
from gp_orff.data.validation import is_single
from gp_orff.labelled.attributes import (
    GRID_MAPPING,
    Attributes,
    degree_columns,
    global_attributes,
    is_angle,
    numbers,
    of_moments,
    of_symbol,
    optional,
    plane_of_unit,
    with_conventions,
)
from gp_orff.labelled.plane import Field, LocalPlane, Paths, ProjectedField, Values
from gp_orff.symbols.base import Symbol, required
from gp_orff.symbols.pointwise import Curl, Divergence

if TYPE_CHECKING:
    import xarray

_CHUNK = 2**18  # points that are evaluated together
_KEPT = ("units", "standard_name", "long_name")  # attributes that are valid for predictions too


def on_grid(
    field: Field,
    coordinates: Mapping[str, object],
    *,
    names: Sequence[str] | None = None,
    symbols: Mapping[str, Symbol] | None = None,
    attrs: "Mapping[str, Attributes] | xarray.Dataset | None" = None,
    time_unit: str = "s",
    epoch: object = None,
    project: LocalPlane | None = None,
    chunks: Mapping[str, object] | None = None,
    paths: int | None = None,
    seed: int = 0,
) -> "xarray.Dataset":
    """Return a Dataset of means and standard deviations of a field on a grid.

    `FieldPosterior.to_xarray` calls it. For each output or symbol, the variables `<name>` and
    `<name>_sd` are the mean and the standard deviation.

    The Dataset follows the CF conventions 1.11. Coordinates get `standard_name`, `axis` and `units`
    if an attribute, a date or a projection determines them. Dimensions whose axis is known come
    last, in the order time, height, latitude or y, longitude or x. If the projection is known,
    variables have the attribute `grid_mapping`, which refers to the variable `crs`.

    The attribute `history` has the time, the version, the kernel and the hyperparameters, followed
    by the history of the Dataset `attrs`. If the environment variable SOURCE_DATE_EPOCH is set, it
    replaces the present time. If the fit checked the coverage, the attribute
    `coverage_of_95_percent_intervals` has the result.

    Args:
        field: a `FieldPosterior` with d inputs and p outputs.
        coordinates: d arrays or DataArrays by name, in the order of the inputs of the model. They
            are 1-D, or 2-D for a curvilinear grid. Plain 2-D arrays get the dimensions y and x.
        names: the names of the p outputs. The default is u, v, w for 2 or 3 outputs, otherwise f1,
            f2, ...
        symbols: symbols of the field by name. If a symbol has several outputs, they are numbered.
            The default is the divergence and the vorticity of a planar field, if they exist.
        attrs: attributes by name, or a Dataset whose variables have them. From a Dataset, only
            units, standard_name and long_name are used. Standard deviations get the same units and
            standard_name as means. Symbols get units if all outputs have one unit, and if all
            coordinates in space have one unit. If the unit of the outputs contains a length, all
            lengths become metres. For example, with "m s-1" and "km", a vorticity is in "s-1". If
            you give units for a symbol, its values are converted to them.
        time_unit: the unit of time of the model, for datetime64 coordinates, as for `readings`.
        epoch: the date at which the time of the model is zero, as for `readings`.
        project: the `LocalPlane` that `readings` returned, if the coordinates contain a longitude
            and a latitude in degrees. Vectors and their derivatives are rotated back to east and
            north. Positions and directions inside symbols are in the plane, in km.
        chunks: the sizes of blocks by dimension, such as {"time": 10}. Blocks have the full size
            along other dimensions. Variables are then Dask arrays, which `compute` or `to_zarr`
            computes block by block. `to_zarr` never has the complete map in memory. Each worker
            gets the field once.
        paths: the number of functions drawn from the posterior, along the dimension `realization`.
            They replace means and standard deviations. Particle-tracking and forecast software
            reads such ensembles.
        seed: the seed of these functions.

    Returns:
        A Dataset with the coordinates and variables.

    Raises:
        ImportError: xarray is not installed; or pyproj for `project`, or dask for `chunks`.
        TypeError: Coordinates are neither numbers nor times, a value of `symbols` is not a
            `Symbol`, or `project` is not a `LocalPlane`.
        ValueError: Coordinates, names or symbols do not fit the field or each other.

    Example:
        >>> import gp_orff, torch
        >>> model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
        >>> field = model.condition(
        ...     torch.rand(20, 2), torch.randn(20, 2)
        ... ).posterior()
        >>> grid = {"x": [0.0, 0.5, 1.0], "y": [0.0, 1.0]}
        >>> ds = gp_orff.labelled.on_grid(field, grid, symbols={})
        >>> list(ds.data_vars), ds["u"].shape
        (['u', 'u_sd', 'v', 'v_sd'], (3, 2))
    """
    xr = optional("xarray", "xarray")
    if len(coordinates) != field.num_inputs:
        raise ValueError(
            f"expected a coordinate for each of the model's {field.num_inputs} inputs, in their "
            f"order, got {list(coordinates)}"
        )
    described, before = field, getattr(attrs, "attrs", {})
    everything = isinstance(attrs, xr.Dataset)  # which may have other variables too
    attrs = _kept(attrs) if everything else attrs or {}
    coords = {name: _axis(xr, name, axis, attrs.get(name)) for name, axis in coordinates.items()}
    _check_shapes(coords)
    axes = [numbers(name, axis.to_numpy(), time_unit, epoch) for name, axis in coords.items()]
    inputs = [axis.attrs for axis in coords.values()]
    units = {name: getattr(axis, "attrs", {}) for name, axis in coordinates.items()}
    wanted = {
        name: attrs.get(name, entry) if everything else entry for name, entry in units.items()
    }
    plane, crs = [], ""
    if project is None and getattr(field, "units", ()):
        of_inputs = {n: plane_of_unit(u) for n, u in zip(coords, field.units, strict=True)}
        wanted |= {n: {"units": u} for n, (u, _) in of_inputs.items() if u and Unit.parse(u)}
        plane = [name for name, (_, system) in of_inputs.items() if system]
        crs = of_inputs[plane[0]][1] if plane else ""
    for name, unit in common_units(wanted).items():
        column = list(coords).index(name)
        axes[column] = _converted(name, axes[column], units[name], {"units": unit})
        if everything or name not in attrs:
            inputs[column] = {**inputs[column], "units": unit}
            coords[name].attrs.update({"units": units[name].get("units", unit)})
    columns = ()
    if project is not None:
        _check_plane(project)
        columns = degree_columns(dict(zip(coords, inputs, strict=True)))
        for column in columns:
            if is_angle(inputs[column].get("units")):
                degrees = {"units": "degree"}
                name = list(coords)[column]
                axes[column] = _converted(name, axes[column], inputs[column], degrees)
        field = ProjectedField(field, project, columns)
        inputs, crs = field.in_km(inputs), project.crs
    outline = _outline(xr, coords, axes, columns, project)
    if project is not None:
        project.check_extent(outline[:, columns])
    values = field.mean if paths is None else field.sample_paths(paths, seed=seed)
    symbols = _derivatives(values, outline, field.num_outputs) if symbols is None else symbols
    requests = [(None, _names(field, names))]
    requests += [(symbol, _outputs(field, name, symbol)) for name, symbol in symbols.items()]
    means = [name for _, outputs in requests for name in outputs]
    others = ["realization"] if paths is not None else [f"{name}_sd" for name in means]
    _check_names([*coords, *means, *others, *([GRID_MAPPING] if crs else [])])
    if everything:
        _warn_of_other_names(attrs, list(coords), requests[0][1])
    unknown = sorted(set(attrs) - {*coords, *means})
    if unknown and not everything:
        raise ValueError(f"expected attrs of {[*coords, *means]}, got those of {unknown}")
    of_field = {name: attrs.get(name, {}) for name in requests[0][1]}
    if everything:  # values have the units to which `readings` converts
        units = common_units(of_field, vectors_of(of_field))
        attrs = {**attrs, **{n: {**of_field[n], "units": unit} for n, unit in units.items()}}
    of_field = [attrs.get(name, {}) for name in of_field]
    in_space = [inputs[column] for column in field.space]
    layers = []
    for symbol, outputs in requests:
        values(outline, symbol)  # extends the domain of a grid, the same for all chunks
        found = []
        for name in outputs:
            factor, own = 1.0, attrs.get(name, {})
            if symbol is not None:
                factor, own = of_symbol(name, symbol, of_field, in_space, own)
            found.append(Output(name, factor, of_moments(name, own)))
        layers.append((symbol, found))
    on_axes = _map_of(field, layers) if paths is None else _ensemble_of(values, layers)
    grid = [xr.Variable(c.dims, axis) for c, axis in zip(coords.values(), axes, strict=True)]
    if chunks is not None:
        maps = _by_blocks(on_axes, coords, grid, chunks)
    else:
        maps = _computed(on_axes, grid, coords)
    degrees = [list(coords)[column] for column in columns]
    kind = "posterior means and standard deviations" if paths is None else "draws of the posterior"
    attributes = global_attributes(described, means, kind, before)
    return with_conventions(maps, degrees, plane, crs, attributes)


@dataclass(frozen=True)
class Output:
    """One output of the field or of a symbol. The values of the model are multiplied by `factor`
    to get the unit of the variable."""

    name: str
    factor: float
    attributes: tuple[Attributes, Attributes]  # for the mean and for the standard deviation


Layers = Sequence[tuple[Symbol | None, Sequence[Output]]]


@dataclass(frozen=True)
class OnAxes:
    """Variables on a grid, which is the broadcast of axes."""

    leading: "dict[str, xarray.Variable]"  # coordinates of the dimensions before the axes
    attributes: Mapping[str, Attributes]  # by the names of the variables, in order
    values: Callable[[Sequence[np.ndarray]], list[Float[np.ndarray, "..."]]]  # maps axes to values


def _map_of(field: Field, layers: Layers) -> OnAxes:
    """The means and standard deviations of outputs and symbols of a field."""
    attributes = {
        name: note
        for _, outputs in layers
        for output in outputs
        for name, note in zip((output.name, f"{output.name}_sd"), output.attributes, strict=True)
    }
    return OnAxes({}, attributes, partial(_moments_of, field, layers))


def _moments_of(
    field: Field, layers: Layers, axes: Sequence[np.ndarray]
) -> list[Float[np.ndarray, "*grid"]]:
    variables = []
    for symbol, outputs in layers:
        for output, *moments in zip(outputs, *_moments(field, symbol, axes), strict=True):
            variables += [output.factor * values for values in moments]
    return variables


def _ensemble_of(paths: Paths, layers: Layers) -> OnAxes:
    """The values of outputs and symbols of S functions drawn from a field."""
    number = np.arange(len(paths), dtype=np.int32)
    note = {"standard_name": "realization", "units": "1"}  # by the CF conventions
    variable = optional("xarray", "xarray").Variable("realization", number, note)
    attributes = {output.name: _of_draws(output) for _, outputs in layers for output in outputs}
    return OnAxes({"realization": variable}, attributes, partial(_draws_of, paths, layers))


def _of_draws(output: Output) -> Attributes:
    """The attributes of a mean, without those that refer to standard deviations."""
    mean, _ = output.attributes
    note = {key: text for key, text in mean.items() if key != "ancillary_variables"}
    if note["long_name"] == f"posterior mean of {output.name}":
        note["long_name"] = f"{output.name} drawn from the posterior"
    return note


def _draws_of(
    paths: Paths, layers: Layers, axes: Sequence[np.ndarray]
) -> list[Float[np.ndarray, "S *grid"]]:
    shape, variables = np.broadcast_shapes(*map(np.shape, axes)), []
    for symbol, outputs in layers:
        parts = [paths(x, symbol) for _, x in _points(axes, shape)]
        joined = torch.cat(parts, dim=1).numpy().reshape(len(paths), *shape, -1)
        variables += [output.factor * joined[..., i] for i, output in enumerate(outputs)]
    return variables


def _converted(
    name: str, values: np.ndarray, given: Attributes, wanted: Attributes
) -> Float[np.ndarray, "n"]:
    """Coordinates, converted to the unit of the inputs of the model."""
    units = given.get("units"), wanted.get("units")
    if None in units or units[0] == units[1]:
        return values
    factors = change(*units)
    if factors is None:
        raise ValueError(
            f"expected coordinate {name!r} in {units[1]!r}, the unit of the data, got "
            f"{units[0]!r}, which cannot be converted; convert the coordinate, and correct its "
            "attribute `units`"
        )
    return factors[0] * values + factors[1]


def _warn_of_other_names(
    attrs: Mapping[str, Attributes], coords: Sequence[str], outputs: Sequence[str]
) -> None:
    """Warn if a Dataset has units of variables, and none of them has the name of an output."""
    variables = [name for name, own in attrs.items() if "units" in own and name not in coords]
    if variables and not {*attrs} & {*outputs}:
        warnings.warn(
            f"maps will have no units: the Dataset attrs= has units of {variables}, but the "
            f"outputs are named {list(outputs)}; give names= of the variables, such as "
            f"names={variables[: len(outputs)]}",
            DataWarning,
            stacklevel=4,
        )


def _check_plane(project: object) -> None:
    required(
        project,
        LocalPlane,
        "expected project= as the LocalPlane that labelled.readings returned",
        "predictions must be in the plane of the data",
    )


def _kept(dataset: "xarray.Dataset") -> dict[str, Attributes]:
    return {
        name: {key: value for key, value in variable.attrs.items() if key in _KEPT}
        for name, variable in dataset.variables.items()
    }


def _outline(
    xr: ModuleType,
    coords: "Mapping[str, xarray.Variable]",
    axes: Sequence[np.ndarray],
    columns: Sequence[int],
    project: LocalPlane | None,
) -> Float[Tensor, "n d"]:
    """Points (n, d) whose box contains the grid: its corners, and all points on its edges along
    `columns`. For a curvilinear grid, they are the outermost points."""
    dims = [c.dims for c in coords.values()]
    ends = [np.array([axis.min(), axis.max()]) for axis in axes]
    curved = [i for i, axis in enumerate(axes) if axis.ndim == 2]
    if curved:
        places = np.stack(np.broadcast_arrays(*(axes[i] for i in curved)), -1).reshape(
            -1, len(curved)
        )
        seen = places if project is None else project.forward(places)
        rows = [*seen.argmin(0), *seen.argmax(0)]
        for i, values in zip(curved, places[rows].T, strict=True):
            dims[i], ends[i] = (":outermost",), values
        columns = ()
    edges = [ends, *([*ends[:i], axes[i], *ends[i + 1 :]] for i in columns)]
    meshes = [
        _open_mesh([xr.Variable(d, values) for d, values in zip(dims, edge, strict=True)])
        for edge in edges
    ]
    points = [np.stack(np.broadcast_arrays(*mesh), axis=-1) for mesh in meshes]
    return torch.from_numpy(np.concatenate([block.reshape(-1, len(axes)) for block in points]))


def _axis(
    xr: ModuleType, name: str, values: object, attrs: Mapping[str, Any] | None
) -> "xarray.Variable":
    array = np.asarray(values)
    if array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(
            f"expected coordinate {name!r} as a 1-D array, got shape {array.shape}; write "
            "one value as [value], and the coordinates of a curvilinear grid as 2-D arrays"
        )
    dims = getattr(values, "dims", ("y", "x")) if array.ndim == 2 else (name,)
    if array.ndim == 2 and name in dims:
        raise ValueError(
            f"expected the 2-D coordinate {name!r} along dimensions with other names than its "
            f"name, got {dims}; give it as xarray.DataArray(values, dims=('j', 'i'))"
        )
    return xr.Variable(dims, array, {**getattr(values, "attrs", {}), **(attrs or {})})


def _check_shapes(coords: "Mapping[str, xarray.Variable]") -> None:
    """Raise an error if 2-D coordinates have different shapes or dimensions."""
    curved = {name: dict(c.sizes) for name, c in coords.items() if c.ndim == 2}
    first = next(iter(curved.values()), None)
    for name, sizes in curved.items():
        if sizes != first:
            raise ValueError(
                f"expected 2-D coordinates {list(curved)} of one shape and along the same "
                f"dimensions, {first}, got {name!r} of shape {tuple(sizes.values())} along "
                f"{tuple(sizes)}; give the longitude and latitude of every point"
            )


def _names(field: Field, names: Sequence[str] | None) -> list[str]:
    p = field.num_outputs
    if names is None:
        return list("uvw"[:p]) if p in (2, 3) else [f"f{i + 1}" for i in range(p)]
    if is_single(names) or len(names) != p:
        raise ValueError(f"expected a list of {p} names, one for each output, got {names!r}")
    return list(names)


def _outputs(field: Field, name: str, symbol: Symbol) -> list[str]:
    """The names of the outputs of a symbol: the name of the symbol, numbered if there are
    several."""
    required(
        symbol,
        Symbol,
        f"expected a symbol as {name!r}, such as gp_orff.Divergence()",
        "give an instance",
    )
    q = symbol.num_outputs(field.num_outputs)
    return [name] if q == 1 else [f"{name}_{i + 1}" for i in range(q)]


def _check_names(names: list[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(
            f"expected different names for coordinates, outputs, symbols and their _sd, got "
            f"{repeated} more than once; choose other names by names= and symbols="
        )


def _derivatives(values: Values, x: Float[Tensor, "n d"], num_outputs: int) -> dict[str, Symbol]:
    """Divergence and vorticity of a planar field, if they exist."""
    symbols = {"divergence": Divergence(), "vorticity": Curl()} if num_outputs == 2 else {}
    return {name: symbol for name, symbol in symbols.items() if _exists(values, symbol, x)}


def _exists(values: Values, symbol: Symbol, x: Float[Tensor, "n d"]) -> bool:
    try:
        values(x, symbol)
    except (ValueError, NotImplementedError):
        values(x, None)  # raises if the points are not valid
        return False
    return True


def _moments(
    field: Field, symbol: Symbol | None, axes: Sequence[np.ndarray]
) -> tuple[Float[np.ndarray, "q *grid"], Float[np.ndarray, "q *grid"]]:
    """Means and standard deviations (q, *grid) on the broadcast of the axes."""
    q = field.num_outputs if symbol is None else symbol.num_outputs(field.num_outputs)
    shape = np.broadcast_shapes(*map(np.shape, axes))
    mean, sd = np.empty((2, q, np.prod(shape)))
    for rows, x in _points(axes, shape):
        mean[:, rows] = field.mean(x, symbol).mT
        sd[:, rows] = field.variance(x, symbol).clamp_min(0).sqrt().mT
    return mean.reshape(q, *shape), sd.reshape(q, *shape)


def _points(
    axes: Sequence[np.ndarray], shape: tuple[int, ...]
) -> Iterator[tuple[slice, Float[Tensor, "n d"]]]:
    """Chunks of the broadcast of the axes, each with its row numbers and points."""
    size, axes = int(np.prod(shape)), [np.broadcast_to(axis, shape) for axis in axes]
    for start in range(0, size, _CHUNK):
        rows = slice(start, min(start + _CHUNK, size))
        index = np.unravel_index(np.arange(rows.start, rows.stop), shape)
        x = [axis[index] for axis in axes]
        yield rows, torch.from_numpy(np.stack(x, axis=-1))


# Maps as Dask arrays: each block is computed where it is used.
#
# 1. A template Dataset of zeros with the sizes of the blocks describes the result without computing
#    it.
# 2. `xarray.map_blocks` calls `_block` with each block of a grid. The grid has the coordinates as
#    floats in additional coordinates, because the coordinates themselves may be dates.
# 3. The field is sent to every worker once, as an array without dimensions (`_on_every_worker`). An
#    argument in the graph would be sent with every block, and large graphs make a scheduler slow.


_NUMBER = ":number"  # suffix of the coordinate that has the values of another one as floats


def _by_blocks(
    on_axes: OnAxes,
    coords: Mapping[str, "xarray.Variable"],
    axes: Sequence["xarray.Variable"],
    chunks: Mapping[str, object],
) -> "xarray.Dataset":
    """A Dataset of Dask arrays. `axes` are the coordinates `coords` as floats, along the same
    dimensions.

    Raises:
        ImportError: dask is not installed.
        ValueError: `chunks` has names that are not dimensions of the coordinates.
    """
    xr, arrays = optional("xarray", "xarray"), optional("dask.array", "dask")
    dims, shape = _dims_of(axes), np.broadcast_shapes(*(axis.shape for axis in _open_mesh(axes)))
    if not isinstance(chunks, Mapping) or not set(chunks) <= set(dims):
        raise ValueError(
            f"expected chunks as sizes by dimension, such as {{{dims[0]!r}: 100}}, with dimensions "
            f"among {dims}, got {chunks!r}"
        )
    sizes = arrays.core.normalize_chunks(
        tuple(chunks.get(name, -1) for name in dims), shape, dtype=np.float64
    )
    empty = arrays.zeros(shape, chunks=sizes)
    leading = on_axes.leading
    lengths = tuple(variable.size for variable in leading.values())
    joined = arrays.broadcast_to(
        empty, (*lengths, *shape), chunks=(*((n,) for n in lengths), *sizes)
    )
    every = [*leading, *dims]
    variables = {name: (every, joined, dict(own)) for name, own in on_axes.attributes.items()}
    indexed = {name: variable for name, variable in coords.items() if name in dims}
    template = xr.Dataset(variables, {**leading, **indexed})
    columns = {f"{name}{_NUMBER}": axis for name, axis in zip(coords, axes, strict=True)}
    grid = xr.DataArray(arrays.zeros(shape, bool, chunks=sizes), {**indexed, **columns}, dims)
    given = [list(columns), _on_every_worker(on_axes)]
    return xr.map_blocks(_block, grid, given, template=template).assign_coords(coords)


def _dims_of(variables: "Iterable[xarray.Variable]") -> list[str]:
    """The dimensions of all variables, in the order in which they first occur."""
    return list(dict.fromkeys(dim for variable in variables for dim in variable.dims))


def _open_mesh(variables: "Sequence[xarray.Variable]") -> list[np.ndarray]:
    """Arrays along all dimensions. The length is one along dimensions that a variable does not
    have."""
    dims = _dims_of(variables)
    return [variable.set_dims(dims).to_numpy() for variable in variables]


def _on_every_worker(value: Callable) -> "xarray.DataArray":
    """A value as an array without dimensions, which each worker stores once for all blocks."""
    xr, dask = optional("xarray", "xarray"), optional("dask", "dask")
    held = np.empty((), dtype=object)
    held[()] = value
    client = getattr(dask.base.get_scheduler(), "__self__", None)
    if hasattr(client, "scatter"):  # a cluster: the field does not pass through its scheduler
        one = dask.delayed(client.scatter(held, broadcast=True))
    else:
        one = dask.delayed(held, name=f"field-{uuid.uuid4().hex}")
    return xr.DataArray(optional("dask.array", "dask").from_delayed(one, (), object))


def _block(
    grid: "xarray.DataArray", columns: Sequence[str], held: "xarray.DataArray"
) -> "xarray.Dataset":
    """The variables on one block of the grid. Its inputs are the coordinates named `columns`."""
    coords = {name: variable.variable for name, variable in grid.coords.items()}
    indexed = {name: coords[name] for name in grid.dims if name in coords}
    return _computed(held.to_numpy()[()], [coords[name] for name in columns], indexed)


def _computed(
    on_axes: OnAxes,
    axes: "Sequence[xarray.Variable]",
    coords: "Mapping[str, xarray.Variable]",
) -> "xarray.Dataset":
    """The variables on the broadcast of `axes`, which are the coordinates as floats."""
    dims = [*on_axes.leading, *_dims_of(axes)]
    pairs = zip(on_axes.attributes.items(), on_axes.values(_open_mesh(axes)), strict=True)
    variables = {name: (dims, values, dict(note)) for (name, note), values in pairs}
    return optional("xarray", "xarray").Dataset(variables, {**on_axes.leading, **coords})
