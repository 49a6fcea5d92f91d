"""`files`: a folder of netCDF or Zarr as chunks for `model.fit`."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gp_orff.labelled.plane import LocalPlane
from gp_orff.labelled.reading import Columns, check_units, plane_of
from gp_orff.labelled.values import optional

if TYPE_CHECKING:
    import xarray

_KINDS = (".nc", ".nc4", ".cdf", ".netcdf", ".zarr")


@dataclass(frozen=True)
class File:
    """A callable that opens a file, reads it and closes it."""

    path: str
    columns: Columns

    def __call__(self) -> dict[str, np.ndarray]:
        with opened(self.path) as dataset:
            self.columns.check(dataset)
            return self.columns.chunk(dataset[self.columns.names].load())

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
    """Return `(chunks,)` for `model.fit(*chunks)`: one for each file, which is loaded where it is
    used.

    Files where all variables are NaN hold no readings. The first file is opened to check the names.

    Args:
        paths: a folder of netCDF files or Zarr stores, or the paths themselves, such as
            `sorted(glob("drifters/*.nc"))`; they come in this order.
        variables, coordinates, track, time, noise, time_unit, epoch: as for `readings`.
        project: a coordinate reference system or a `LocalPlane`, as for `readings`; it is a second
            value then. "auto" needs all positions, which are not read here.

    Raises:
        FileNotFoundError: no files.
        ImportError, KeyError, TypeError, ValueError: as for `readings`.

    Example:
        >>> import gp_orff, os, tempfile, xarray
        >>> folder, chunks = tempfile.mkdtemp(), None
        >>> for day in range(3):
        ...     u = xarray.DataArray([1.0, 2.0 + day, 3.0], dims="x", coords={"x": [0.0, 0.5, 1.0]})
        ...     _ = xarray.Dataset({"u": u}).to_netcdf(os.path.join(folder, f"{day}.nc"))
        >>> (chunks,) = gp_orff.labelled.files(folder, ["u"], ["x"])
        >>> len(chunks), chunks[1]()["y"].ravel().tolist()
        (3, [1.0, 3.0, 3.0])
    """
    optional("xarray", "xarray")
    paths = _paths(paths)
    columns = Columns.of(variables, coordinates, track, time, noise, time_unit, epoch)
    with opened(paths[0]) as dataset:
        columns.check(dataset)
        attributes = columns.attributes(dataset)
        if project is None:
            check_units(attributes)
            return ([File(path, columns) for path in paths],)
        if isinstance(project, str) and project == "auto":
            raise ValueError(
                "expected project= as a coordinate reference system or a LocalPlane, got 'auto', "
                "which needs the positions of all files; give "
                "gp_orff.labelled.LocalPlane.around(corners) of the area"
            )
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
