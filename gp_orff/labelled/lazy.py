"""Datasets larger than memory: files as chunks of observations, maps by blocks."""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gp_orff.data.checks import ColumnUnits
from gp_orff.data.passes import naming
from gp_orff.labelled.attributes import optional
from gp_orff.labelled.plane import LocalPlane
from gp_orff.labelled.reading import Columns, check_units, plane_of

if TYPE_CHECKING:
    import xarray


# `files`: a folder of netCDF or Zarr as chunks for `model.fit`.


_KINDS = (".nc", ".nc4", ".cdf", ".netcdf", ".zarr")


@dataclass(frozen=True)
class File:
    """A callable that opens a file, reads it and closes it."""

    path: str
    columns: Columns

    def __call__(self) -> dict[str, np.ndarray]:
        with opened(self.path) as dataset:
            dataset = self.columns.along_one_dimension(dataset)
            self.columns.check(dataset)
            self.columns.with_units_of(
                dataset, self.columns.plane
            )  # raises where it cannot be read
            return self.columns.chunk(self.columns.prepared(dataset).load())

    @property
    def units(self) -> ColumnUnits:
        """The units of what is read, whatever those of the file are."""
        return self.columns.column_units

    def __repr__(self) -> str:
        return f"the file {self.path}"


def files(
    paths: str | os.PathLike | Iterable[str | os.PathLike],
    variables: str | Iterable[str],
    coordinates: str | Iterable[str],
    *,
    track: str | None = None,
    time: str | None = None,
    noise: object = None,
    time_unit: str = "s",
    epoch: object = None,
    project: object = None,
) -> tuple[list[File]] | tuple[list[File], LocalPlane]:
    """Return `(chunks,)` for `model.fit(*chunks)`, with one chunk for each file.

    The process that uses a chunk loads its file. Files with only NaN have no observations. The
    first file is opened to check the names.

    Args:
        paths: a folder of netCDF files or Zarr stores, or a list of paths, such as
            `sorted(glob("drifters/*.nc"))`. Their order is kept.
        variables, coordinates, track, time, noise, time_unit, epoch: as for `readings`.
        project: a coordinate reference system or a `LocalPlane`, as for `readings`. The projection
            is then the second value. "auto" is not available, because it needs all positions.

    Raises:
        FileNotFoundError: no files.
        ImportError, KeyError, TypeError, ValueError: as for `readings`.

    Example:
        >>> import gp_orff, os, tempfile, xarray
        >>> folder, chunks = tempfile.mkdtemp(), None
        >>> for day in range(3):
        ...     u = xarray.DataArray(
        ...         [1.0, 2.0 + day, 3.0], dims="x", coords={"x": [0.0, 0.5, 1.0]}
        ...     )
        ...     _ = xarray.Dataset({"u": u}).to_netcdf(
        ...         os.path.join(folder, f"{day}.nc")
        ...     )
        >>> (chunks,) = gp_orff.labelled.files(folder, ["u"], ["x"])
        >>> len(chunks), chunks[1]()["y"].ravel().tolist()
        (3, [1.0, 3.0, 3.0])
    """
    optional("xarray", "xarray")
    paths = _paths(paths)
    columns = Columns.of(variables, coordinates, track, time, noise, time_unit, epoch)
    if isinstance(project, str) and project == "auto":
        raise ValueError(
            "expected project= as a coordinate reference system or a LocalPlane, got 'auto', "
            "which needs the positions of all files; give "
            "gp_orff.labelled.LocalPlane.around(corners) of the area"
        )
    with naming(File(paths[0], columns), 0), opened(paths[0]) as opened_one:
        dataset = columns.along_one_dimension(opened_one)
        columns.check(dataset)
        columns = columns.with_units_of(dataset, project)
        dataset = columns.prepared(dataset)
        attributes = columns.attributes(dataset)
        if project is None:
            check_units(attributes)
            return ([File(path, columns) for path in paths],)
        positions = columns.degrees(dataset)
        plane = plane_of(project, columns.corners(dataset, positions))
    columns = replace(columns, plane=plane, positions=positions)
    return [File(path, columns) for path in paths], plane


def opened(path: str) -> "xarray.Dataset":
    """A netCDF file or a Zarr store, of which nothing is loaded."""
    xr = optional("xarray", "xarray")
    if Path(path).is_dir() or path.endswith(".zarr"):
        return xr.open_zarr(path, chunks=None)
    return xr.open_dataset(path)


def _paths(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[str]:
    """The paths, or those of a folder by name."""
    if isinstance(paths, str | os.PathLike):
        folder = Path(paths)
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        found = [own for own in inside if own.suffix in _KINDS]
        single = folder.exists() and folder.suffix in _KINDS
        paths = [folder] if single else found
        if not paths:
            raise FileNotFoundError(
                f"expected a folder with files {', '.join(_KINDS)}, or their paths, got {folder}"
            )
    paths = [os.fspath(path) for path in paths]
    if not paths:
        raise FileNotFoundError("expected paths of netCDF files or Zarr stores, got none")
    return paths


# Maps as Dask arrays, of which each block is computed where it is used.
#
# 1. A template Dataset of zeros with the sizes of the blocks describes the result without computing
#    it.
# 2. `xarray.map_blocks` calls `_block` with each block of a grid. The grid has the numbers of its
#    coordinates as additional coordinates, since the coordinates themselves may be dates.
# 3. The field travels once to every worker, as an array without dimensions (`_on_every_worker`): an
#    argument in the graph would be sent with every block, and large graphs slow a scheduler down.


_NUMBER = ":number"  # of a coordinate along its axis, beside its values


class OnAxes(Protocol):
    """Variables on a grid: the broadcast of axes."""

    @property
    def leading(self) -> "Mapping[str, xarray.Variable]":
        """Coordinates of dimensions before those of the axes, which blocks do not divide."""

    @property
    def attributes(self) -> Mapping[str, Mapping[str, Any]]:
        """Those of each variable, by name and in order."""

    def __call__(self, axes: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Their values."""


def by_blocks(
    on_axes: OnAxes,
    coords: Mapping[str, "xarray.Variable"],
    axes: Sequence[np.ndarray],
    chunks: Mapping[str, object],
) -> "xarray.Dataset":
    """A Dataset of Dask arrays; `axes` are the numbers of the coordinates `coords`, along the
    dimensions of these.

    Raises:
        ImportError: dask is not installed.
        ValueError: chunks of something else than these coordinates.
    """
    xr, arrays = optional("xarray", "xarray"), optional("dask.array", "dask")
    numbered = [
        xr.Variable(coords[name].dims, axis) for name, axis in zip(coords, axes, strict=True)
    ]
    dims, shape = dims_of(numbered), np.broadcast_shapes(*(a.shape for a in open_mesh(numbered)))
    if not isinstance(chunks, Mapping) or not set(chunks) <= set(dims):
        raise ValueError(
            f"expected chunks as sizes by coordinate, such as {{{dims[0]!r}: 100}}, of {dims}, got "
            f"{chunks!r}"
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
    columns = {f"{name}{_NUMBER}": axis for name, axis in zip(coords, numbered, strict=True)}
    grid = xr.DataArray(arrays.zeros(shape, bool, chunks=sizes), {**indexed, **columns}, dims)
    given = [list(columns), _on_every_worker(on_axes)]
    return xr.map_blocks(_block, grid, given, template=template).assign_coords(coords)


def dims_of(variables: "Iterable[xarray.Variable]") -> list[str]:
    """The dimensions of all variables, in their order."""
    return list(dict.fromkeys(dim for variable in variables for dim in variable.dims))


def open_mesh(variables: "Sequence[xarray.Variable]") -> list[np.ndarray]:
    """Arrays along all dimensions, of length one where a variable does not vary."""
    dims = dims_of(variables)
    return [variable.set_dims(dims).to_numpy() for variable in variables]


def _on_every_worker(value: Callable) -> "xarray.DataArray":
    """A value as an array without dimensions, which each worker stores once for all blocks."""
    xr, dask = optional("xarray", "xarray"), optional("dask", "dask")
    held = np.empty((), dtype=object)
    held[()] = value
    client = getattr(dask.base.get_scheduler(), "__self__", None)
    if hasattr(client, "scatter"):  # of a cluster, whose scheduler should not carry it
        one = dask.delayed(client.scatter(held, broadcast=True))
    else:
        one = dask.delayed(held, name=f"field-{uuid.uuid4().hex}")
    return xr.DataArray(optional("dask.array", "dask").from_delayed(one, (), object))


def _block(
    grid: "xarray.DataArray", columns: Sequence[str], held: "xarray.DataArray"
) -> "xarray.Dataset":
    """The variables on one block of the grid, whose inputs are the numbers in `columns`."""
    on_axes = held.to_numpy()[()]
    dims = list(grid.dims)
    values = on_axes(open_mesh([grid.coords[name].variable for name in columns]))
    pairs = zip(on_axes.attributes.items(), values, strict=True)
    every, coords = [*on_axes.leading, *dims], dict(on_axes.leading)
    variables = {name: (every, own, dict(note)) for (name, note), own in pairs}
    coords |= {name: grid.coords[name].variable for name in dims if name in grid.coords}
    return optional("xarray", "xarray").Dataset(variables, coords)
