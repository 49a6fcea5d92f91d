"""Contradictory attributes: units are converted or raise an error, and values are decoded."""

import numpy as np
import pytest
import torch
import xarray as xr

import gp_orff
from gp_orff import labelled
from gp_orff.data.checks import ColumnUnits
from tests.support.fields import helmholtz, model_of

N = 12


def uniform(low=0.0, high=1.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, N)


def table(units=("m s-1", "m s-1"), places=("km", "km"), **more):
    """Vectors at scattered places, with units."""
    variables = {n: ("o", uniform(seed=i), {"units": units[i]}) for i, n in enumerate("uv")}
    coordinates = {
        n: ("o", uniform(0, 10, seed=2 + i), {"units": places[i]}) for i, n in enumerate("xy")
    }
    return xr.Dataset(variables, coordinates).assign(more)


def read(dataset, variables="uv", coordinates="xy", **how):
    return labelled.readings(dataset, list(variables), list(coordinates), **how)


# Units.


UNITS = [  # of u and v, and the factor that brings v to the unit of u
    (("m s-1", "cm s-1"), 1e-2),
    (("km/h", "m s-1"), 3.6),
    (("m s-1", "knots"), 0.5144444444444445),
    (("nT", "uT"), 1e3),
    (("mm yr-1", "m/d"), 365250.0),
]


@pytest.mark.parametrize(("units", "factor"), UNITS)
def test_components_come_in_the_unit_of_the_first(units, factor):
    _, plain = read(table())
    _, y = read(table(units))
    np.testing.assert_allclose(y, plain * [1, factor], rtol=1e-12)


@pytest.mark.parametrize(
    ("places", "factor"), [(("km", "m"), 1e-3), (("m", "nmile"), 1852.0), (("ft", "inch"), 1 / 12)]
)
def test_coordinates_of_one_space_come_in_one_unit(places, factor):
    x, _ = read(table(places=places))
    np.testing.assert_allclose(x, read(table())[0] * [1, factor], rtol=1e-12)


def test_quantities_of_different_kinds_keep_their_units():
    """Temperature and salinity; a place and a time; units that are not understood."""
    for units in (("degC", "psu"), ("m s-1", "nT"), ("?", "m")):
        np.testing.assert_array_equal(read(table(units))[1], read(table())[1])
    np.testing.assert_array_equal(read(table(places=("km", "h")))[0], read(table())[0])


def test_temperatures_have_an_offset():
    y = read(table(("K", "degC")))[1]
    np.testing.assert_allclose(y[:, 1], read(table())[1][:, 1] + 273.15, rtol=1e-12)


def named(dataset, u, v):
    dataset["u"].attrs["standard_name"], dataset["v"].attrs["standard_name"] = u, v
    return dataset


def test_components_of_a_vector_need_units_of_one_kind():
    """A speed with a direction is no vector, and neither is a stress beside a velocity."""
    wind = named(table(("m s-1", "degree")), "eastward_wind", "northward_wind")
    with pytest.raises(ValueError, match=r"'u' in 'm s-1' and 'v' in 'degree'"):
        read(wind)
    places = wind.assign_coords(lon=("o", uniform(7, 8)), lat=("o", uniform(46, 47, 1)))
    for name in "uv":
        del places[name].attrs["standard_name"]
    places["v"].attrs["units"] = "N m-2"
    with pytest.raises(ValueError, match=r"'u' in 'm s-1' and 'v' in 'N m-2'"):
        read(places, coordinates=["lon", "lat"], project="auto")


@pytest.mark.parametrize(("unit", "size"), [("radian", np.pi / 180), ("arcminutes", 60.0)])
def test_angles_become_degrees(unit, size):
    lon, lat = uniform(7, 8), uniform(46, 47, 1)
    plain = table().assign_coords(lon=("o", lon), lat=("o", lat))
    other = table().assign_coords(
        lon=("o", size * lon, {"units": unit}), lat=("o", size * lat, {"units": unit})
    )
    x, y, _ = read(plain, coordinates=["lon", "lat"], project="auto")
    got, vectors, plane = read(other, coordinates=["lon", "lat"], project="auto")
    np.testing.assert_allclose(got, x, atol=1e-9)
    np.testing.assert_allclose(vectors, y, atol=1e-12)
    with pytest.warns(gp_orff.DataWarning, match="degrees, or other angles"):
        read(other, coordinates=["lon", "lat"])
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(got, vectors)
    grid = {"lon": other["lon"][:2], "lat": other["lat"][:1]}
    degrees = {"lon": plain["lon"].values[:2], "lat": plain["lat"].values[:1]}
    maps = [
        model.posterior().to_xarray(axes, project=plane, symbols={}) for axes in (grid, degrees)
    ]
    np.testing.assert_allclose(maps[0]["u"], maps[1]["u"], atol=1e-9)


def test_longitudes_in_metres_are_refused():
    places = table().rename(x="lon", y="lat")
    with pytest.raises(ValueError, match="'lon' in degrees or radians, got units 'km'"):
        read(places, coordinates=["lon", "lat"], project="auto")


def test_standard_errors_are_no_variances_and_the_remedy_runs():
    dataset = table(se=("o", np.full(N, 0.1), {"units": "m s-1"}))
    with pytest.raises(ValueError, match=r"variances of 'u', in 'm2 s-2', got 'se'") as error:
        read(dataset, noise="se")
    remedy = str(error.value).split("take the square, ")[1].split(" with noise=")[0]
    squared = eval(remedy, {"dataset": dataset})
    np.testing.assert_allclose(read(squared, noise="var")[2]["noise"], 0.01)


@pytest.mark.parametrize(
    ("noise", "units", "expected"),
    [
        ("a", {"a": "cm2 s-2"}, 1e-4),
        (["a", "b"], {"a": "m2 s-2", "b": "cm2/s2"}, [1.0, 1e-4]),
        (
            [["a", "b"], ["b", "a"]],
            {"a": "m2 s-2", "b": "m s-1 cm s-1"},
            [[1.0, 0.01], [0.01, 1.0]],
        ),
    ],
)
def test_noise_comes_in_the_square_of_the_unit(noise, units, expected):
    more = {name: ("o", np.ones(N), {"units": unit}) for name, unit in units.items()}
    got = read(table(**more), noise=noise)[2]["noise"]
    np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=1e-12)


def test_arrays_with_units_take_noise_in_their_square():
    """Of xarray and pint."""
    pint = pytest.importorskip("pint")
    quantity = pint.UnitRegistry().Quantity
    x, y = np.stack([uniform(), uniform(seed=1)], -1), np.stack([uniform(), uniform(seed=2)], -1)
    y = xr.DataArray(y, dims=("o", "c"), attrs={"units": "m s-1"})
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
    plain = model.condition(x, y.values, noise=np.full(N, 1e-2)).posterior().mean(x)
    for noise in (
        xr.DataArray(np.full(N, 100.0), dims="o", attrs={"units": "cm2 s-2"}),
        quantity(np.full(N, 1e-2), "m**2/s**2"),
    ):
        torch.testing.assert_close(
            model.condition(x, y, noise=noise).posterior().mean(x),
            plain,
        )
    errors = xr.DataArray(np.full(N, 0.1), dims="o", attrs={"units": "m s-1"})
    with pytest.raises(ValueError, match=r"the square of the unit of y, got 'm s-1'"):
        model.condition(x, y, noise=errors)
    got = model.condition(x, y, noise=np.asarray(errors) ** 2).posterior().mean(x)
    torch.testing.assert_close(got, plain)


def test_noise_of_another_quantity_is_refused():
    dataset = table(a=("o", np.ones(N), {"units": "K2"}))
    with pytest.raises(ValueError, match=r"'m2 s-2', got 'a' in 'K2'; convert it"):
        read(dataset, noise="a")


def test_covariances_name_both_components():
    units = {"a": "m2 s-2", "b": "m2 s-2", "c": "K2"}
    dataset = table(**{name: ("o", np.ones(N), {"units": unit}) for name, unit in units.items()})
    with pytest.raises(ValueError, match=r"covariances of 'u' and 'v', in .*, got 'c' in 'K2'"):
        read(dataset, noise=[["a", "c"], ["c", "b"]])


def test_noise_of_components_of_different_quantities_names_the_product():
    units = ColumnUnits(y=("m s-1", "K"))
    noise = xr.DataArray(np.ones((N, 2)), dims=("o", "c"), attrs={"units": "m2 s-2"})
    with pytest.raises(ValueError, match=r"the product of the units of components 0 and 1 of y"):
        units.variances(noise)


def test_files_and_blocks_come_in_the_unit_of_the_first(tmp_path):
    table().to_netcdf(tmp_path / "a.nc", engine="scipy")
    table(("cm s-1", "cm s-1"), ("m", "m")).to_netcdf(tmp_path / "b.nc", engine="scipy")
    table(("K", "K")).to_netcdf(tmp_path / "c.nc", engine="scipy")
    (chunks,) = labelled.files(tmp_path, ["u", "v"], ["x", "y"])
    first, second = chunks[0](), chunks[1]()
    np.testing.assert_allclose(second["y"], first["y"] * 1e-2, rtol=1e-12)
    np.testing.assert_allclose(second["x"], first["x"] * 1e-3, rtol=1e-12)
    with pytest.raises(ValueError, match="'u' in 'm s-1', as in the first file or block, got 'K'"):
        chunks[2]()
    (blocks,) = read(table(("m s-1", "cm s-1")).chunk({"o": 5}))
    y = np.concatenate([block()["y"] for block in blocks])
    np.testing.assert_allclose(y, read(table())[1] * [1, 1e-2], rtol=1e-12)


def test_maps_take_coordinates_in_other_units_and_say_that_of_the_numbers():
    field = model_of(helmholtz(2), None, 2, points=12).posterior()
    survey = table(("cm s-1", "m s-1"), ("km", "m"))
    plain = field.to_xarray({"x": [0.4, 1.5], "y": [0.7]}, symbols={})
    grid = {
        "x": xr.DataArray([400.0, 1500.0], dims="x", attrs={"units": "m"}),
        "y": xr.DataArray([0.7], dims="y", attrs={"units": "km"}),
    }
    maps = field.to_xarray(grid, symbols={}, attrs=survey)
    np.testing.assert_allclose(maps["u"], plain["u"], rtol=1e-12)
    assert maps["v"].attrs["units"] == "cm s-1"  # the unit of the first, as in `readings`
    assert maps["x"].attrs["units"] == "m"


# Names and order.


ORDERS = [
    (("northward_wind", "eastward_wind"), ["x", "y"], ["v", "u"]),
    (("sea_water_y_velocity", "sea_water_x_velocity"), ["x", "y"], ["v", "u"]),
    (("eastward_wind", "northward_wind"), ["y", "x"], ["v", "u"]),
    (
        ("surface_downward_northward_stress", "surface_downward_eastward_stress"),
        ["x", "y"],
        ["v", "u"],
    ),
]


@pytest.mark.parametrize(("standard", "coordinates", "right"), ORDERS)
def test_components_in_another_order_than_coordinates_are_refused(standard, coordinates, right):
    dataset = named(table(), *standard)
    with pytest.raises(ValueError, match=r"give them in the order \['v', 'u'\]"):
        read(dataset, coordinates=coordinates)
    x, _ = read(dataset, variables=right, coordinates=coordinates)  # the remedy
    assert len(x) == N


def test_names_that_do_not_contradict_the_order():
    """A time before places; scalars; components of which one is not known."""
    wind = named(table(), "eastward_wind", "northward_wind").assign_coords(time=("o", uniform()))
    read(wind, coordinates=["time", "x", "y"])
    read(named(table(), "air_temperature", "relative_humidity"), coordinates=["y", "x"])
    read(named(table(), "northward_wind", "wind_speed"))


def test_noise_of_the_other_component_is_refused():
    noise = {
        f"s{n}": ("o", np.ones(N), {"standard_name": f"{along}_wind standard_error"})
        for n, along in zip("uv", ("eastward", "northward"), strict=True)
    }
    dataset = named(table(**noise), "eastward_wind", "northward_wind")
    with pytest.raises(ValueError, match="noise of 'u', got 'sv'"):
        read(dataset, noise=["sv", "su"])
    read(dataset, noise=["su", "sv"])


# Values that mean "missing".


def packed(values, fill=-32768, **attributes):
    numbers = np.r_[(1000 * values[:-3]).astype("i2"), [fill] * 3].astype("i2")
    return ("o", numbers, {"scale_factor": 0.001, **attributes})


@pytest.mark.parametrize("key", ["_FillValue", "missing_value"])
def test_packed_numbers_are_decoded(key):
    u, v = uniform(), uniform(seed=1)
    dataset = xr.Dataset(
        {n: packed(values, **{key: np.int16(-32768)}) for n, values in (("u", u), ("v", v))},
        {"x": ("o", uniform()), "y": ("o", uniform(seed=3))},
    )
    _, y = read(dataset)
    np.testing.assert_allclose(y, np.stack([u, v], axis=-1)[:-3], atol=1e-3)
    (blocks,) = read(dataset.chunk({"o": 7}))
    np.testing.assert_allclose(np.concatenate([block()["y"] for block in blocks]), y)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("where", ["attrs", "encoding"])
@pytest.mark.parametrize("fill", [1e34, -9999.0])
def test_fill_values_of_attributes_and_encoding_are_missing(dtype, where, fill):
    dataset = table()
    for name in "uv":
        values = dataset[name].values.astype(dtype)
        values[:2] = fill
        dataset[name] = ("o", values)
        getattr(dataset[name].variable, where)["missing_value"] = fill
    assert len(read(dataset)[1]) == N - 2


def test_undecoded_times_are_decoded():
    days = ("o", np.arange(N), {"units": "days since 2000-01-01"})
    dataset = table().assign_coords(time=days)
    x, _ = read(dataset, coordinates=["x", "y", "time"], time_unit="h", epoch="2000-01-01")
    np.testing.assert_array_equal(x[:, 2], 24.0 * np.arange(N))


# Kinds of columns.


def test_nullable_and_object_columns_of_a_table():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({n: uniform(seed=i) for i, n in enumerate("uvxy")})
    plain = read(frame.to_xarray())
    nullable = frame.convert_dtypes()
    nullable.loc[3, ["u", "v"]] = pd.NA
    objects = frame.astype(object)
    objects.loc[3, ["u", "v"]] = None
    for table_of in (nullable, objects):
        for got, all_of in zip(read(table_of.to_xarray()), plain, strict=True):
            np.testing.assert_array_equal(got, np.delete(all_of, 3, axis=0))


def test_columns_of_words_name_the_call_that_converts():
    words = table(w=("o", np.array(["1.5"] * N, dtype=object)))
    with pytest.raises(TypeError, match=r"numbers in 'w'.*pandas\.to_numeric"):
        read(words, variables=["u", "w"])


# Messages, whose remedies run.


def ragged():
    rows = [5, 4, 3]
    dataset = table(rowsize=("traj", rows)).assign_coords(id=("traj", [101, 102, 103]))
    return dataset, np.repeat([101, 102, 103], rows)


@pytest.mark.parametrize("kind", ["rowsize", "index", "sample_dimension"])
def test_ragged_arrays(kind):
    """What each trajectory has once is repeated for its observations."""
    dataset, expected = ragged()
    if kind == "index":
        index = ("o", np.repeat(np.arange(3), [5, 4, 3]), {"instance_dimension": "traj"})
        dataset = dataset.drop_vars("rowsize").assign(of=index)
    if kind == "sample_dimension":  # two variables of integers with the same sum: one says so
        dataset["other"] = ("traj", [3, 4, 5])
        sizes = ("traj", [5, 4, 3], {"sample_dimension": "o"})
        dataset = dataset.drop_vars("rowsize").assign(sizes=sizes)
    dataset = dataset.assign_coords(time=("o", np.arange(N)), depth=("traj", [15.0, 0.0, 30.0]))
    x, y, options = read(dataset, track="id", time="time")
    np.testing.assert_array_equal(options["track"], expected)
    depths = read(dataset, coordinates=["x", "depth"], track="id")[0][:, 1]
    np.testing.assert_array_equal(depths, np.repeat([15.0, 0.0, 30.0], [5, 4, 3]))
    gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(x, y, **options)


def test_trajectories_without_labels():
    dataset, _ = ragged()
    numbers = read(dataset.drop_vars("id"), track="rowsize")[2]["track"]
    np.testing.assert_array_equal(numbers, np.repeat([0, 1, 2], [5, 4, 3]))


@pytest.mark.parametrize("rows", [[5, 0, 7], [5.0, 0.0, 7.0]])
def test_empty_trajectories_and_decoded_sizes(rows):
    """xarray decodes sizes with a fill value to floats."""
    says = {"sample_dimension": "o"} if isinstance(rows[0], float) else {}
    dataset = table(rowsize=("traj", rows, says)).assign(depth=("traj", [4.0, 4.0, 4.0]))
    track = read(dataset, track="rowsize")[2]["track"]
    np.testing.assert_array_equal(track, np.repeat([0, 2], [5, 7]))


@pytest.mark.parametrize("rows", [[5, 4, 2], [13, -1, 0], [5.0, np.nan, 7.0], [5.5, 6.5, 0.0]])
def test_sizes_that_do_not_fit(rows):
    dataset = table(rowsize=("traj", rows, {"sample_dimension": "o"}))
    with pytest.raises(
        ValueError, match="in 'rowsize', with the sum 12, the number of observations"
    ):
        read(dataset, track="rowsize")


def test_files_of_ragged_arrays(tmp_path):
    dataset, expected = ragged()
    dataset.to_netcdf(tmp_path / "drifters.nc")
    (chunks,) = gp_orff.labelled.files(tmp_path, ["u", "v"], ["x", "y"], track="id")
    np.testing.assert_array_equal(chunks[0]()["track"], expected)


def test_what_is_no_ragged_array():
    dataset, _ = ragged()
    with pytest.raises(ValueError, match="coordinates along the dimensions"):
        read(dataset.drop_vars("rowsize"), track="id")


def test_noise_that_is_not_known():
    for bad in (np.nan, np.inf):
        dataset = table(a=("o", np.r_[np.ones(N - 1), bad]))
        with pytest.raises(
            ValueError, match=r"in 'a', got 1 of 12 NaN or infinite.*observation 11"
        ) as error:
            read(dataset, noise="a")
        remedy = str(error.value).split("unknown noise: ")[1]
        x, _, options = read(eval(remedy, {"dataset": dataset, "np": np}), noise="a")
        assert len(x) == len(options["noise"]) == N - 1


def test_longitudes_that_are_none():
    dataset = table().assign_coords(lon=("o", uniform(7, 8)), lat=("o", uniform(46, 47, 1)))
    dataset["lon"][5] = 999.999
    with pytest.raises(ValueError, match=r"999.999.* in place 5, and 1 such") as error:
        read(dataset, coordinates=["lon", "lat"], project="auto")
    remedy = str(error.value).split("drop them: ")[1].split(", with the names")[0]
    x, *_ = read(eval(remedy, {"dataset": dataset}), coordinates=["lon", "lat"], project="auto")
    assert len(x) == N - 1
    with pytest.raises(ValueError, match="omit project="):
        read(
            dataset.assign_coords(lon=("o", uniform(1e4, 1e5))),
            coordinates=["lon", "lat"],
            project="auto",
        )


def test_dates_of_other_calendars():
    cftime = pytest.importorskip("cftime")
    dates = cftime.num2date(np.arange(N), "days since 2001-02-28", calendar="360_day")
    dataset = table().assign_coords(time=("o", dates))
    with pytest.raises(TypeError, match="calendar '360_day'; give numbers of days") as error:
        read(dataset, coordinates=["x", "y", "time"])
    remedy = str(error.value).split("instead: ")[1]
    fixed = eval(remedy, {"dataset": dataset, "cftime": cftime})
    x, _ = read(fixed, coordinates=["x", "y", "time"])
    np.testing.assert_array_equal(np.diff(x[:, 2]), 1)


def test_errors_name_the_file(tmp_path):
    for i in range(3):
        dataset = table() if i != 1 else table().rename(u="ve")
        dataset.to_netcdf(tmp_path / f"drifter_{i}.nc", engine="scipy")
    (chunks,) = labelled.files(tmp_path, ["u", "v"], ["x", "y"])
    with pytest.raises(KeyError) as error:
        gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2)).condition(chunks)
    assert "drifter_1.nc" in str(error.value) + "".join(getattr(error.value, "__notes__", []))


# Single components of a vector in degrees.


def test_single_components_become_observations_along_directions():
    """The directions are east and north in the plane: numbers of a known field come back."""
    lon, lat = uniform(6, 9), uniform(45, 48, 1)
    dataset = table().assign_coords(lon=("o", lon), lat=("o", lat), var=("o", np.full(N, 0.1)))
    whole = read(dataset, coordinates=["lon", "lat"], noise="var", project="auto")
    half = dataset.assign(u=dataset["u"].where(np.arange(N) > 3))
    x, y, options, plane = read(half, coordinates=["lon", "lat"], noise="var", project="auto")
    assert x.shape == (2 * N - 4, 2)
    assert options["directions"].shape == x.shape
    np.testing.assert_allclose(np.linalg.norm(options["directions"], axis=-1), 1.0)
    rows = np.r_[np.arange(4), np.repeat(np.arange(4, N), 2)]
    np.testing.assert_allclose(x, whole[0][rows], atol=1e-9)
    vectors = whole[1][rows]  # in the plane
    np.testing.assert_allclose((options["directions"] * vectors).sum(-1), y, atol=1e-12)
    scale = plane.scale(np.stack([lon, lat], axis=-1))[rows]
    np.testing.assert_allclose(options["noise"], 0.1 / scale**2, rtol=1e-9)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
    assert model.condition(x, y, **options).posterior().mean(torch.zeros(1, 2)).isfinite().all()


@pytest.mark.parametrize("units", [("1", "dB"), ("W", "dBm"), ("1", "Np")])
def test_logarithmic_units_are_not_scaled(units):
    """Decibels are no multiples of a ratio: v keeps its numbers, beside a u of another kind."""
    data = table(units).rename(u="cloud", v="reflectivity")
    _, found = read(data, ["cloud", "reflectivity"])
    _, plain = read(data.drop_attrs(), ["cloud", "reflectivity"])
    np.testing.assert_array_equal(found, plain)


@pytest.mark.parametrize("units", ["months since 1950-01-01", "days since 2000-01-01"])
def test_times_that_xarray_has_no_dates_for_stay_numbers(units):
    """Of a month no length is known, and of a calendar without leap days no datetime."""
    time = xr.Variable("o", np.arange(float(N)), {"units": units, "calendar": "noleap"})
    data = table(places=("km", "km")).assign_coords(t=time, scalar=xr.Variable((), 1, time.attrs))
    found, _ = labelled.readings(data, ["u", "v"], ["x", "y", "t"])
    assert found[:, 2].tolist() == list(range(N))


def test_floats_that_are_scaled_already():
    """Their attributes were copied from the packed integers; missing values are missing still."""
    data = table()
    data["u"].attrs |= {"scale_factor": 0.01, "add_offset": 5.0, "_FillValue": data["u"].values[3]}
    _, found = read(data)
    expected = data["u"].values.copy()
    expected[3] = np.nan
    np.testing.assert_array_equal(found[:, 0], expected)
