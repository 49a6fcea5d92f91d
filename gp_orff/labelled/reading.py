"""Observations from an xarray Dataset, in memory, in blocks of Dask arrays, or in files."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from gp_orff.data.checks import (
    ColumnUnits,
    check_noise,
    check_noise_order,
    check_order,
    common_units,
    decoded,
    variance_unit,
    vectors_of,
)
from gp_orff.data.passes import naming
from gp_orff.data.survey import DataWarning
from gp_orff.data.units import UnitArray, change
from gp_orff.data.validation import is_single
from gp_orff.labelled.attributes import (
    EPOCH,
    as_dataset,
    degree_columns,
    floats,
    is_angle,
    labelled_as_angles,
    named,
    numbers,
    optional,
)
from gp_orff.labelled.plane import LocalPlane

if TYPE_CHECKING:
    import pyproj
    import xarray


# Blocks of a Dataset of Dask arrays, as chunks. The process that uses a chunk loads it.


@dataclass(frozen=True)
class Block:
    """A callable that loads one block of a Dataset and reads it."""

    dataset: "xarray.Dataset"
    read: Callable[["xarray.Dataset"], dict[str, np.ndarray]]
    where: str

    def __call__(self) -> dict[str, np.ndarray]:
        # One thread, because several workers load blocks at a time.
        return self.read(self.dataset.compute(scheduler="synchronous"))

    def __repr__(self) -> str:
        return f"the block {self.where}"


@dataclass(frozen=True)
class Blocks:
    """The blocks of a Dataset of Dask arrays, which can be iterated repeatedly. No data are
    loaded."""

    dataset: "xarray.Dataset"
    read: Callable[["xarray.Dataset"], dict[str, np.ndarray]]
    units: ColumnUnits  # the units to which every block is converted

    def __len__(self) -> int:
        return prod(len(sizes) for sizes in self.dataset.chunksizes.values())

    def __iter__(self) -> Iterator[Block]:
        dask = optional("dask", "dask")
        slices = {
            name: [slice(end - size, end) for size, end in zip(own, accumulate(own), strict=True)]
            for name, own in self.dataset.chunksizes.items()
        }
        for rows in product(*slices.values()):
            block = dict(zip(slices, rows, strict=True))
            where = ", ".join(f"{name} {own.start}:{own.stop}" for name, own in block.items())
            (part,) = dask.optimize(self.dataset.isel(block))  # the graph of this block alone
            yield Block(part, self.read, where)


# `readings`: the observations in a Dataset as arrays for `model.fit`.


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
    """Return points x (N, d) and vectors y (N, p) from a Dataset, as arrays for `model.fit`.

    Variables are on a grid or along trajectories. On a grid, every combination of coordinates is a
    point. Points at which all variables are NaN, for example land, are dropped. If only some
    variables are NaN at a point, they stay NaN in y: use `fit(x, y, missing="mask")`. The variables
    must be in the order of the coordinates along which they point, for example u, v with lon, lat.
    Standard names are checked.

    Variables are converted to the unit of the first variable with an attribute `units`. Coordinates
    are converted to the unit of the first coordinate in the same way. Noise variances are in the
    squared unit of the variables. The arrays x and y have units, which a model stores. The model
    converts later data to them, or raises an error. Packed and missing values are decoded if
    attributes show that they are not yet decoded.

    A Dataset of Dask arrays is not loaded. The first value is then a list of chunks for
    `model.fit`, one for each block. The chunks contain the options, so you can also call
    `fit(*readings(...))`. For a folder of files, use `files`.

    Args:
        dataset: an xarray Dataset.
        variables: the names of p variables with the same dimensions.
        coordinates: the names of d coordinates or variables, in the order of the inputs of the
            model.
        track: the name of a coordinate or variable with the track of each observation. In a ragged
            array of trajectories, a variable with one value per trajectory, such as `id`, is
            repeated for its observations. The name of the variable with the lengths of the
            trajectories, such as "rowsize", gives a number to each trajectory.
        time: the name of a coordinate or variable with the times along tracks.
        noise: the names of noise variances: one name, one name for each variable, or p×p names of
            covariances. If the Dataset has standard errors, square them, and set the unit:
            `dataset.assign(var_u=(dataset.sd_u**2).assign_attrs(units="m2 s-2"))`.
        time_unit: the unit to which datetime64 and timedelta64 are converted, a NumPy unit from "W"
            to "ns".
        epoch: the date at which time is zero: a datetime64, or a value that NumPy converts to one.
            The default is 1970-01-01.
        project: a projection of longitude and latitude in degrees to a plane in km. It is "auto", a
            coordinate reference system such as "EPSG:31983", or a `LocalPlane`. With Dask arrays,
            "auto" uses the box of all positions. Longitude and latitude are identified by units,
            standard_name or name, and longitude comes first. Heights must be in km. If there are
            two or more variables, the first two must be the components to the east and north. They
            and their noise are converted to components in the plane (see `LocalPlane`). For several
            scalars, pass a `LocalPlane` with `vectors=False`. If one of the two components is NaN
            at some points, all observed components become observations along `directions`, with y
            of shape (M,).

    Returns:
        A tuple (x, y), followed by a dictionary of options and by the projection, if there are any.
        The options are arguments of `model.fit`: `track`, `time` and `noise` if they are given, and
        `directions`. The projection is a `LocalPlane`: pass it to `to_xarray`, which transforms
        predictions back.

    Raises:
        ImportError: xarray is not installed, or pyproj for `project`. Run
            `pip install gp_orff[xarray,geo]`.
        KeyError: The Dataset does not have a variable with one of the names.
        TypeError: `dataset` is not a Dataset, or values are neither numbers nor times.
        ValueError: Dimensions do not fit, a unit is unknown, all values are NaN, or units or
            standard names contradict each other. With `project`, the area exceeds 3000 km, there is
            no longitude and latitude, or vectors with one component have a `track` or covariances.

    Warns:
        DataWarning: Attributes show that coordinates are degrees, and `project` is not given.

    Example:
        >>> import gp_orff, xarray
        >>> u = xarray.DataArray(
        ...     [[1.0, 2.0, 3.0], [4.0, float("nan"), 6.0]], dims=("lat", "lon")
        ... )
        >>> ds = xarray.Dataset(
        ...     {"u": u, "v": -u}, {"lon": [0.0, 0.1, 0.2], "lat": [50.0, 50.1]}
        ... )
        >>> x, y = gp_orff.labelled.readings(ds, ["u", "v"], ["lon", "lat"])
        >>> x.shape, y[-1].tolist()
        ((5, 2), [6.0, -6.0])
        >>> ds = ds.assign(var=0.1 + abs(u))
        >>> *_, options = gp_orff.labelled.readings(
        ...     ds, ["u", "v"], ["lon", "lat"], noise="var"
        ... )
        >>> options["noise"].tolist()
        [1.1, 2.1, 3.1, 4.1, 6.1]

        Positions in km, and the projection, whose `inverse` returns degrees:

        >>> x, y, plane = gp_orff.labelled.readings(
        ...     ds.dropna("lon"), ["u", "v"], ["lon", "lat"], project="auto"
        ... )
        >>> x.round(2).tolist()
        [[-7.17, -5.56], [7.17, -5.56], [-7.15, 5.57], [7.15, 5.57]]
        >>> plane.inverse(x).round(9).tolist()
        [[0.0, 50.0], [0.2, 50.0], [0.0, 50.1], [0.2, 50.1]]
    """
    columns = Columns.of(variables, coordinates, track, time, noise, time_unit, epoch)
    columns, dataset = columns.of_dataset(as_dataset(dataset), project)
    if any(dataset.variables[name].chunks is not None for name in columns.names):
        columns = columns.in_plane_of(dataset, project)
        plain = dataset[columns.names].drop_attrs().unify_chunks()
        return Blocks(plain, columns.chunk, columns.column_units), *columns.projection
    x, y, options = columns.read(dataset)
    if not len(x):
        names = " or ".join(columns.variables)
        raise ValueError(
            f"expected observations of {names}, got nothing but NaN; check the names and the "
            "selected region"
        )
    columns = columns.in_plane_of(dataset, project, x)
    x, y, options = columns.finished(x, y, options)
    return x, y, *([options] if options else []), *columns.projection


@dataclass(frozen=True)
class Columns:
    """The roles of the variables of a Dataset, and the units to which they are converted."""

    variables: tuple[str, ...]
    coordinates: tuple[str, ...]
    along: Mapping[str, str]  # names of variables for the options "track" and "time"
    noise: np.ndarray  # names of variables; empty without noise
    time_unit: str
    epoch: object
    plane: LocalPlane | None = None
    positions: tuple[int, int] = ()  # columns of longitude and latitude among the coordinates
    units: Mapping[str, str] = field(default_factory=dict)  # units to which values are converted
    dates: tuple[str, ...] = ()  # names of coordinates that are dates

    @classmethod
    def of(
        cls,
        variables: str | Sequence[str],
        coordinates: str | Sequence[str],
        track: str | None,
        time: str | None,
        noise: object,
        time_unit: str,
        epoch: object,
    ) -> "Columns":
        """The columns for the arguments of `readings`."""
        variables, coordinates = (
            (names,) if is_single(names) else tuple(names) for names in (variables, coordinates)
        )
        along = {"track": track, "time": time}
        along = {option: name for option, name in along.items() if name is not None}
        every_noise = np.array([] if noise is None else noise, dtype=object)
        return cls(variables, coordinates, along, every_noise, time_unit, epoch)

    @property
    def names(self) -> list[str]:
        """All names, each once."""
        names = [*self.variables, *self.coordinates, *self.along.values(), *self.noise.flat]
        return list(dict.fromkeys(names))

    def of_dataset(
        self, dataset: "xarray.Dataset", project: object
    ) -> tuple["Columns", "xarray.Dataset"]:
        """These columns with the units of a Dataset, and its variables prepared to be read."""
        dataset = self.along_one_dimension(dataset)
        columns = self.with_units_of(dataset, project)
        return columns, columns.prepared(dataset)

    def along_one_dimension(self, dataset: "xarray.Dataset") -> "xarray.Dataset":
        """A Dataset in which values of trajectories are repeated for each of their observations.

        Raises:
            KeyError: The Dataset does not have a variable with one of the names.
            ValueError: Dimensions do not fit.
        """
        (first, *_) = named(dataset, self.variables).values()
        if len(first.dims) == 1:
            dataset = of_each_observation(dataset, self.names, first.dims[0])
        fields = named(dataset, self.variables)
        named(dataset, self.coordinates)  # raises if there are none
        sizes = next(iter(fields.values())).sizes
        for name, variable in fields.items():
            if set(variable.dims) != set(sizes):
                raise ValueError(
                    f"expected variables with the same dimensions {tuple(sizes)}, got {name!r} "
                    f"with {variable.dims}; select from them with isel, or bring them to one grid "
                    "with interp"
                )
        for name, variable in named(dataset, self.names).items():
            if not set(variable.dims) <= set(sizes):
                raise ValueError(
                    f"expected coordinates along the dimensions {tuple(sizes)} of the variables, "
                    f"got {name!r} along {variable.dims}; every observation has one position: "
                    "select one with isel"
                )
        return dataset

    def with_units_of(self, dataset: "xarray.Dataset", project: object) -> "Columns":
        """These columns, with the unit of each column. Columns that need the same unit have the
        same one. Raises if attributes contradict each other or the order of the names."""
        of = {name: entry.attrs for name, entry in named(dataset, self.names).items()}
        variables = {name: of[name] for name in self.variables}
        coordinates = {name: of[name] for name in self.coordinates}
        noise = {name: of[name] for name in self.noise.flat} if self.noise.ndim < 2 else {}
        check_order(variables, coordinates)
        check_noise_order(variables, noise)
        vectors = vectors_of(variables)
        if project is not None and getattr(project, "vectors", True):
            vectors.append(list(variables)[:2])
        units = common_units(variables, vectors)
        if project is not None:
            angles = [self.coordinates[column] for column in degree_columns(coordinates)]
            units |= {n: "degree" for n in angles if is_angle(of[n].get("units"))}
            coordinates = {n: entry for n, entry in coordinates.items() if n not in angles}
        # A time that xarray decodes becomes a number in `time_unit`.
        positions = named(dataset, [*self.coordinates, *self.along.values()])
        dated = [  # columns that are dates, or are decoded to dates
            name
            for name, variable in positions.items()
            if variable.dtype.kind == "M" or " since " in str(variable.attrs.get("units", ""))
        ]
        units |= common_units({n: entry for n, entry in coordinates.items() if n not in dated})
        units |= {
            name: str(of[name]["units"])
            for option, name in self.along.items()
            if option == "time" and of[name].get("units") and name not in dated
        }
        for place, name in np.ndenumerate(self.noise):
            pair = [self.variables[i] for i in (*place, *place, 0, 0)[:2]]
            alike = self.noise.ndim or len({units.get(entry) for entry in self.variables}) == 1
            both = [units.get(entry) for entry in pair]
            unit = of[name].get("units")
            wanted = variance_unit(name, unit, pair, both) if alike and None not in both else None
            if wanted is not None:
                units[name] = wanted
        return replace(self, units=units, dates=tuple(dated))

    def prepared(self, dataset: "xarray.Dataset") -> "xarray.Dataset":
        """These columns of a Dataset, decoded if necessary, and converted to `units`."""
        dataset = decoded(dataset[self.names], self.names)
        changed = {}
        for name, wanted in self.units.items():
            variable = dataset.variables[name]
            given = variable.attrs.get("units")
            if not given or variable.dtype.kind not in "fiu" or str(given) == wanted:
                continue
            factors = change(given, wanted)
            if factors is None:
                raise ValueError(
                    f"expected {name!r} in {wanted!r}, as in the first file or block, got "
                    f"{str(given)!r}, which cannot be converted; convert the numbers, and correct "
                    "the attribute `units`"
                )
            if factors != (1.0, 0.0):
                changed[name] = factors[0] * variable.astype(np.float64) + factors[1]
                changed[name].attrs = {**variable.attrs, "units": wanted}
        return dataset.assign(changed)

    def in_plane_of(
        self,
        dataset: "xarray.Dataset",
        project: object,
        x: Float[np.ndarray, "N d"] | None = None,
    ) -> "Columns":
        """These columns with the plane of a projection, or a warning if positions are degrees.

        Args:
            dataset: a Dataset with the coordinates.
            project: the projection, as for `readings`.
            x: all positions (N, d). If None, the plane is for the box of the coordinates.
        """
        attributes = {name: dataset.variables[name].attrs for name in self.coordinates}
        if project is None:
            _warn_of_degrees(attributes)
            return self
        positions = degree_columns(attributes)
        if x is None:
            columns = [dataset.variables[self.coordinates[position]] for position in positions]
            ends = [[float(values.min()), float(values.max())] for values in columns]
            places = np.stack(np.meshgrid(*ends), axis=-1).reshape(-1, 2)
        else:
            places = x[:, positions]
        if project == "auto":
            return replace(self, plane=LocalPlane.around(places), positions=positions)
        plane = project if isinstance(project, LocalPlane) else LocalPlane(project)
        plane.check_extent(places)
        return replace(self, plane=plane, positions=positions)

    @property
    def projection(self) -> tuple[LocalPlane, ...]:
        """The plane, if there is one."""
        return () if self.plane is None else (self.plane,)

    def read(
        self, dataset: "xarray.Dataset"
    ) -> tuple[Float[np.ndarray, "N d"], Float[np.ndarray, "N p"], dict[str, np.ndarray]]:
        """x, y and options of `model.fit`, without points at which all variables are NaN."""
        fields, positions = named(dataset, self.variables), named(dataset, self.coordinates)
        sizes = dict(next(iter(fields.values())).sizes)
        y = [floats(name, values.set_dims(sizes)) for name, values in fields.items()]
        y = np.stack(y, axis=-1)
        observed = ~np.isnan(y).all(-1)
        columns = [
            self._numbers(name, values.set_dims(sizes).to_numpy()[observed])
            for name, values in positions.items()
        ]
        options = {
            option: dataset.variables[name].set_dims(sizes).to_numpy()[observed]
            for option, name in self.along.items()
        }
        if "time" in options:
            options["time"] = self._numbers(self.along["time"], options["time"])
        if self.noise.size:
            noise = [
                floats(name, dataset.variables[name].set_dims(sizes))[observed]
                for name in self.noise.flat
            ]
            seen = np.isfinite(y[observed])
            for place, values in zip(np.ndindex(self.noise.shape), noise, strict=True):
                rows = seen[:, list(place)].all(-1) if place else seen.any(-1)
                check_noise(str(self.noise[place]), values[rows])
            options["noise"] = np.stack(noise, axis=-1).reshape(-1, *self.noise.shape)
        return np.stack(columns, axis=-1), y[observed], options

    def _numbers(self, name: str, values: np.ndarray) -> np.ndarray:
        return numbers(name, values, self.time_unit, self.epoch)

    def finished(
        self,
        x: Float[np.ndarray, "N d"],
        y: Float[np.ndarray, "N p"],
        options: dict[str, np.ndarray],
    ) -> tuple[UnitArray, UnitArray, dict[str, np.ndarray]]:
        """These observations with positions and vectors in the plane, if there is one. The arrays
        have their units, which a model stores."""
        if self.plane is not None and len(x):
            x, y, options = self._in_the_plane(x, y, options)
        units = self.column_units
        if "time" in options:
            options = {**options, "time": UnitArray.of(options["time"], units.time)}
        of_y = units.y if y.ndim > 1 else units.y[:1]
        return UnitArray.of(x, units.x), UnitArray.of(y, of_y), options

    def _in_the_plane(
        self,
        x: Float[np.ndarray, "N d"],
        y: Float[np.ndarray, "N p"],
        options: dict[str, np.ndarray],
    ) -> tuple[Float[np.ndarray, "N d"], Float[np.ndarray, "N p"], dict[str, np.ndarray]]:
        places = x[:, self.positions]
        x[:, self.positions] = self.plane.forward(places)
        if self.plane.vectors and len(self.variables) > 1:
            if (np.isnan(y[:, 0]) != np.isnan(y[:, 1])).any():
                return _along_directions(self.plane, places, x, y, options)
            y, options = _in_the_plane(self.plane, places, y, options)
        return x, y, options

    def chunk(self, dataset: "xarray.Dataset") -> dict[str, np.ndarray]:
        """A chunk for `model.fit`. It has no observations if all values are NaN."""
        x, y, options = self.finished(*self.read(dataset))
        return {"x": x, "y": y, **options}

    @property
    def column_units(self) -> ColumnUnits:
        """The units of x, y and times, if attributes state them. The unit of positions in a plane
        contains the plane, and the unit of dates contains the epoch."""
        x = [self._unit_of(name) for name in self.coordinates]
        for position in self.positions:
            x[position] = f"km in {self.plane.crs}"
        y = [self.units.get(name) for name in self.variables]
        time = [self._unit_of(self.along["time"])] if "time" in self.along else []
        return ColumnUnits(tuple(x), tuple(y), tuple(time))

    def _unit_of(self, name: str) -> str | None:
        if name not in self.dates:
            return self.units.get(name)
        epoch = np.datetime64(EPOCH if self.epoch is None else self.epoch, "s")
        return f"{self.time_unit} since {epoch}"


def of_each_observation(
    dataset: "xarray.Dataset", names: Sequence[str], along: str
) -> "xarray.Dataset":
    """Return a Dataset in which values of a trajectory are repeated for each of its observations.

    In a ragged array, the observations of all trajectories follow each other along one dimension.
    The CF conventions define two kinds of ragged arrays:

    - Contiguous: an integer variable, such as `rowsize`, contains the number of observations of
      each trajectory.
    - Indexed: an integer variable contains the index of the trajectory of each observation. Its
      attribute `instance_dimension` is the name of the dimension of the trajectories.

    Args:
        dataset: a Dataset with the variables `names`.
        names: the names of the variables that are read.
        along: the dimension of the observations.

    Raises:
        ValueError: a variable with the attribute `sample_dimension` does not contain whole numbers
            whose sum is the number of observations.
    """
    variables, repeated = named(dataset, names), {}
    for name, variable in variables.items():
        if variable.dims != (along,) and len(variable.dims) == 1:
            numbers = _trajectories(dataset, variable.dims[0], along)
            if numbers is not None:
                counts = name == numbers[0]  # the variable of sizes itself: number trajectories
                values = numbers[1] if counts else variable.to_numpy()[numbers[1]]
                repeated[name] = (along, values, variable.attrs)
    if not repeated:
        return dataset
    return optional("xarray", "xarray").Dataset({**variables, **repeated}, attrs=dataset.attrs)


def _trajectories(
    dataset: "xarray.Dataset", dimension: str, along: str
) -> tuple[str, Int[np.ndarray, "N"]] | None:
    """Return the name of the variable that defines the trajectories, and the index of the
    trajectory of each observation.

    The result is None if there is no such variable. `dimension` is the dimension of the
    trajectories, and `along` is the dimension of the observations.
    """
    for name, variable in dataset.variables.items():
        index = variable.dims == (along,) and variable.attrs.get("instance_dimension") == dimension
        if index and variable.dtype.kind in "iu":
            return name, variable.to_numpy()
    counts = []
    for name, variable in dataset.variables.items():
        says = variable.attrs.get("sample_dimension") == along
        kinds = "iuf" if says else "iu"  # floats, if xarray decoded a fill value
        if variable.dims != (dimension,) or variable.dtype.kind not in kinds:
            continue
        sizes = variable.to_numpy()
        if (sizes >= 0).all() and (sizes % 1 == 0).all() and sizes.sum() == dataset.sizes[along]:
            counts.append((not says, name, sizes.astype(int)))
        elif says:
            raise ValueError(
                f"expected whole numbers of at least 0 in {name!r}, with the sum "
                f"{dataset.sizes[along]}, the number of observations along {along!r}, got the sum "
                f"{sizes.sum():g}; select trajectories together with their observations"
            )
    if not counts:
        return None
    _, name, sizes = min(counts, key=lambda count: count[:2])  # with `sample_dimension` first
    return name, np.repeat(np.arange(len(sizes)), sizes)


def _warn_of_degrees(attributes: Mapping[str, Mapping[str, Any]]) -> None:
    degrees = labelled_as_angles(attributes)
    if degrees:
        warnings.warn(
            f"coordinates {degrees} are degrees, or other angles, which have different lengths "
            "to the east and to the north: lengthscales, derivatives and fields without divergence "
            "or curl need lengths. Use project='auto', or drop the attributes to fit in degrees",
            DataWarning,
            stacklevel=4,
        )


def _in_the_plane(
    plane: LocalPlane,
    places: Float[np.ndarray, "N 2"],
    y: Float[np.ndarray, "N p"],
    options: dict[str, np.ndarray],
) -> tuple[Float[np.ndarray, "N p"], dict[str, np.ndarray]]:
    """Return vectors and the options of `fit`, rotated from east and north to the axes of a plane.

    The first two components of y (N, p) are rotated in place. The noise in `options` is
    transformed too.
    """
    p, noise = y.shape[-1], options.get("noise")
    turn = plane.frame(places, p)[:, :2, :2]
    if noise is not None:
        options = {**options, "noise": _noise_of_components(noise, turn, p)}
    y[:, :2] = np.einsum("nij,nj->ni", turn, y[:, :2])
    return y, options


def _along_directions(
    plane: LocalPlane,
    places: Float[np.ndarray, "N 2"],
    x: Float[np.ndarray, "N d"],
    y: Float[np.ndarray, "N p"],
    options: dict[str, np.ndarray],
) -> tuple[Float[np.ndarray, "M d"], Float[np.ndarray, "M"], dict[str, np.ndarray]]:
    """Every observed component as an observation along its direction in the plane, because a single
    component to the east or to the north is not a component in the plane.

    If m is a vector in the plane and T is the frame, v = T⁻¹ m has the components to the east and
    north, v_j = ⟨row j of T⁻¹, m⟩. Both sides are divided by the length of the row.
    """
    noise = options.get("noise")
    if "track" in options or (noise is not None and noise.ndim == 3):
        given = "track=" if "track" in options else "covariances"
        single = np.isnan(y[:, 0]) != np.isnan(y[:, 1])
        raise ValueError(
            f"expected both or neither of the components to the east and to the north with {given},"
            f" got only one of them in {single.sum()} observations: the rotation to the plane needs"
            " both; drop these observations, or set both components to NaN"
        )
    rows = np.linalg.inv(plane.frame(places, y.shape[-1]))
    length = np.linalg.norm(rows, axis=-1)
    point, component = np.nonzero(~np.isnan(y))
    every = point, component
    options = {name: values[point] for name, values in options.items() if name != "noise"}
    if noise is not None:
        noise = np.broadcast_to(noise.reshape(len(y), -1), y.shape)
        options["noise"] = noise[every] / length[every] ** 2
    options["directions"] = rows[every] / length[every][:, None]
    return x[point], y[every] / length[every], options


def _noise_of_components(
    noise: Float[np.ndarray, "N *b"], turn: Float[np.ndarray, "N 2 2"], p: int
) -> Float[np.ndarray, "N *b"]:
    """The noise in the plane. One variance stays one variance; variances of components become
    covariances."""
    if noise.ndim == 1:
        return noise * np.linalg.det(turn)  # 1/k², or 1
    noise = noise if noise.ndim == 3 else np.where(np.eye(p) > 0, noise[:, :, None], 0.0)
    noise[:, :2] = turn @ noise[:, :2]
    noise[:, :, :2] = noise[:, :, :2] @ turn.transpose(0, 2, 1)
    return noise


# `files`: a folder of netCDF files or Zarr stores as chunks for `model.fit`.


_KINDS = (".nc", ".nc4", ".cdf", ".netcdf", ".zarr")


@dataclass(frozen=True)
class File:
    """A callable that opens a file, reads it and closes it."""

    path: str
    columns: Columns

    def __call__(self) -> dict[str, np.ndarray]:
        with opened(self.path) as dataset:
            dataset = self.columns.along_one_dimension(dataset)
            # This raises for units that contradict each other. Values get the units of the first
            # file.
            self.columns.with_units_of(dataset, self.columns.plane)
            return self.columns.chunk(self.columns.prepared(dataset).load())

    @property
    def units(self) -> ColumnUnits:
        """The units of x, y and times after reading, which may differ from those of the file."""
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
    """Return chunks for `model.fit`, one for each netCDF file or Zarr store.

    A file is loaded when a pass over the data uses its chunk, by the process that uses it. A file
    with only NaN has no observations. The first file is opened to check the names. All files are
    converted to its units.

    Args:
        paths: a folder of netCDF files or Zarr stores, or a list of paths, such as
            `sorted(glob("drifters/*.nc"))`. Files of a folder are sorted by name.
        variables: the names of p variables, as for `readings`.
        coordinates: the names of d coordinates, as for `readings`.
        track: the name of the track labels, as for `readings`.
        time: the name of the times along tracks, as for `readings`.
        noise: the names of noise variances, as for `readings`.
        time_unit: the unit to which times are converted, as for `readings`.
        epoch: the date at which time is zero, as for `readings`.
        project: a coordinate reference system or a `LocalPlane`, as for `readings`. "auto" is not
            available, because it needs all positions.

    Returns:
        A tuple `(chunks,)`, or `(chunks, plane)` with `project`. Call `model.fit(chunks)`.

    Raises:
        FileNotFoundError: There are no files.
        ImportError: xarray is not installed, or pyproj for `project`.
        KeyError: The first file does not have a variable with one of the names.
        TypeError: Values are neither numbers nor times.
        ValueError: `project` is "auto", or the first file is not valid, as for `readings`.

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
    if project == "auto":
        raise ValueError(
            "expected project= as a coordinate reference system or a LocalPlane, got 'auto', "
            "which needs the positions of all files; give "
            "gp_orff.labelled.LocalPlane.around(corners) of the area"
        )
    with naming(File(paths[0], columns), 0), opened(paths[0]) as dataset:
        columns, dataset = columns.of_dataset(dataset, project)
        columns = columns.in_plane_of(dataset, project)
    return [File(path, columns) for path in paths], *columns.projection


def opened(path: str) -> "xarray.Dataset":
    """An open netCDF file or Zarr store. No data are loaded."""
    xr = optional("xarray", "xarray")
    if Path(path).is_dir() or path.endswith(".zarr"):
        return xr.open_zarr(path, chunks=None)
    return xr.open_dataset(path)


def _paths(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[str]:
    """The paths, or the paths in a folder, sorted by name."""
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
