"""Maps as Dask arrays, of which each block is computed where it is used."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gp_orff.labelled.values import optional

if TYPE_CHECKING:
    import xarray

_NUMBER = ":number"  # of a coordinate along its axis, beside its values


class OnAxes(Protocol):
    """Variables on the product of axes."""

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
    """A Dataset of Dask arrays; `axes` are the numbers of the coordinates `coords`.

    Raises:
        ImportError: dask is not installed.
        ValueError: chunks of something else than these coordinates.
    """
    xr, arrays = optional("xarray", "xarray"), optional("dask.array", "dask")
    if not isinstance(chunks, Mapping) or not set(chunks) <= set(coords):
        raise ValueError(
            f"expected chunks as sizes by coordinate, such as {{{next(iter(coords))!r}: 100}}, of "
            f"{list(coords)}, got {chunks!r}"
        )
    dims, shape = list(coords), tuple(len(axis) for axis in axes)
    sizes = arrays.core.normalize_chunks(
        tuple(chunks.get(name, -1) for name in dims), shape, dtype=np.float64
    )
    empty = arrays.zeros(shape, chunks=sizes)
    variables = {name: (dims, empty, dict(own)) for name, own in on_axes.attributes.items()}
    template = xr.Dataset(variables, coords)
    columns = {f"{name}{_NUMBER}": (name, axis) for name, axis in zip(dims, axes, strict=True)}
    grid = xr.DataArray(arrays.zeros(shape, bool, chunks=sizes), {**coords, **columns}, dims)
    return xr.map_blocks(_block, grid, [_on_every_worker(on_axes)], template=template)


def _on_every_worker(value: Callable) -> "xarray.DataArray":
    """A value as an array without dimensions, that each worker holds once for all blocks."""
    xr, dask = optional("xarray", "xarray"), optional("dask", "dask")
    held = np.empty((), dtype=object)
    held[()] = value
    client = getattr(dask.base.get_scheduler(), "__self__", None)
    if hasattr(client, "scatter"):  # of a cluster, whose scheduler should not carry it
        one = dask.delayed(client.scatter(held, broadcast=True))
    else:
        one = dask.delayed(held, name=f"field-{uuid.uuid4().hex}")
    return xr.DataArray(optional("dask.array", "dask").from_delayed(one, (), object))


def _block(grid: "xarray.DataArray", held: "xarray.DataArray") -> "xarray.Dataset":
    """The variables on one block of the grid."""
    on_axes = held.to_numpy()[()]
    dims = list(grid.dims)
    values = on_axes([grid.coords[f"{name}{_NUMBER}"].to_numpy() for name in dims])
    pairs = zip(on_axes.attributes.items(), values, strict=True)
    variables = {name: (dims, own, dict(note)) for (name, note), own in pairs}
    coords = {name: grid.coords[name].variable for name in dims}
    return optional("xarray", "xarray").Dataset(variables, coords)
