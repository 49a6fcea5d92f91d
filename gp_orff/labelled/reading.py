"""`readings`: observations of a Dataset as arrays for `model.fit`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from gp_orff.data.survey import DataWarning
from gp_orff.labelled.degrees import degree_columns, labelled_in_degrees
from gp_orff.labelled.plane import LocalPlane
from gp_orff.labelled.values import as_dataset, floats, named, numbers

if TYPE_CHECKING:
    import pyproj
    import xarray


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
    project: "str | pyproj.CRS | LocalPlane | None" = None,
) -> tuple[Float[np.ndarray, "N ..."] | dict[str, np.ndarray] | LocalPlane, ...]:
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
        project: "auto", a coordinate reference system such as "EPSG:31983" or a `LocalPlane`, to
            bring longitude and latitude, in degrees, to a plane in km. It becomes the last value:
            give it to `to_xarray`, which brings predictions back. Coordinates are known by units
            or standard_name, or by their names; longitude comes first. Of two or more variables,
            the first two are those to the east and to the north, which become components in the
            plane (see `LocalPlane`), and so do their noise variances; take a `LocalPlane` with
            `vectors=False` for several scalars. Any heights have to be in km.

    Raises:
        ImportError: xarray is not installed, or pyproj (`pip install gp_orff[geo]`) to project.
        KeyError: a name that the Dataset does not have.
        TypeError: `dataset` is no Dataset, or values are neither numbers nor times.
        ValueError: dimensions that do not fit, an unknown unit, or nothing but NaN; with `project`,
            an area of more than 3000 km, no longitude and latitude, or half of a vector.

    Warns:
        DataWarning: attributes say that coordinates are degrees, and there is no `project`.

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

        In km, with the projection that goes back:

        >>> x, y, plane = gp_orff.labelled.readings(
        ...     ds.dropna("lon"), ["u", "v"], ["lon", "lat"], project="auto"
        ... )
        >>> x.round(2).tolist()
        [[-7.17, -5.56], [7.17, -5.56], [-7.15, 5.57], [7.15, 5.57]]
        >>> plane.inverse(x).round(9).tolist()
        [[0.0, 50.0], [0.2, 50.0], [0.0, 50.1], [0.2, 50.1]]
    """
    dataset = as_dataset(dataset)
    fields, positions = named(dataset, variables), named(dataset, coordinates)
    names = {"track": track, "time": time}
    names = {option: name for option, name in names.items() if name is not None}
    every_noise = np.array([] if noise is None else noise, dtype=object)
    along = [*names.values(), *every_noise.flat]
    along = named(dataset, along) if along else {}
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
    y = [floats(name, values.set_dims(sizes)) for name, values in fields.items()]
    y = np.stack(y, axis=-1)
    observed = ~np.isnan(y).all(-1)
    if not observed.any():
        raise ValueError(f"expected observations of {' or '.join(fields)}, got nothing but NaN")
    columns = [
        numbers(name, values.set_dims(sizes).to_numpy()[observed], time_unit, epoch)
        for name, values in positions.items()
    ]
    x, y = np.stack(columns, axis=-1), y[observed]
    options = {
        option: along[name].set_dims(sizes).to_numpy()[observed] for option, name in names.items()
    }
    if time is not None:
        options["time"] = numbers(time, options["time"], time_unit, epoch)
    if noise is not None:
        columns = [floats(name, along[name].set_dims(sizes))[observed] for name in every_noise.flat]
        options["noise"] = np.stack(columns, axis=-1).reshape(-1, *every_noise.shape)
    attributes = {name: variable.attrs for name, variable in positions.items()}
    if project is None:
        _check_units(attributes)
        return (x, y, options) if along else (x, y)
    columns = list(degree_columns(attributes))
    places = x[:, columns]
    plane = _plane(project, places)
    x[:, columns] = plane.forward(places)
    if plane.vectors and len(fields) > 1:
        y, options = _in_the_plane(plane, places, y, options)
    return (x, y, options, plane) if along else (x, y, plane)


def _check_units(attributes: Mapping[str, Mapping[str, Any]]) -> None:
    degrees = labelled_in_degrees(attributes)
    if degrees:
        warnings.warn(
            f"coordinates {degrees} are degrees, which are of different lengths to the east and to "
            "the north: lengthscales, derivatives and fields without divergence or curl need "
            "lengths. Take project='auto', or drop the attributes if degrees are meant",
            DataWarning,
            stacklevel=3,
        )


def _plane(project: object, places: Float[np.ndarray, "N 2"]) -> LocalPlane:
    if isinstance(project, str) and project == "auto":
        return LocalPlane.around(places)
    plane = project if isinstance(project, LocalPlane) else LocalPlane(project)
    plane.check_extent(places)
    return plane


def _in_the_plane(
    plane: LocalPlane,
    places: Float[np.ndarray, "N 2"],
    y: Float[np.ndarray, "N p"],
    options: dict[str, np.ndarray],
) -> tuple[Float[np.ndarray, "N p"], dict[str, np.ndarray]]:
    """Components in the plane of vectors and their noise."""
    half = np.isnan(y[:, 0]) != np.isnan(y[:, 1])
    if half.any():
        raise ValueError(
            f"expected both or neither of the components to the east and to the north, got one of "
            f"them in {half.sum()} readings: in the plane they mix; drop these readings, or set "
            "both to NaN"
        )
    p, noise = y.shape[-1], options.get("noise")
    turn = plane.frame(places, p)[:, :2, :2]
    if noise is not None:
        options = {**options, "noise": _noise_of_components(noise, turn, p)}
    y[:, :2] = np.einsum("nij,nj->ni", turn, y[:, :2])
    return y, options


def _noise_of_components(
    noise: Float[np.ndarray, "N *b"], turn: Float[np.ndarray, "N 2 2"], p: int
) -> Float[np.ndarray, "N *b"]:
    """One variance stays one; those of components become covariances."""
    if noise.ndim == 1:
        return noise * np.linalg.det(turn)  # 1/k², or 1
    noise = noise if noise.ndim == 3 else np.where(np.eye(p) > 0, noise[:, :, None], 0.0)
    noise[:, :2] = turn @ noise[:, :2]
    noise[:, :, :2] = noise[:, :, :2] @ turn.transpose(0, 2, 1)
    return noise
