"""Datasets: inputs are equal to arrays, and outputs are equal to values of the field."""

import sys
from datetime import date

import numpy as np
import pytest
import torch
import xarray as xr
from gpytorch.kernels import MaternKernel, MultitaskKernel, RBFKernel

import gp_orff
from gp_orff import labelled
from tests.support.fields import helmholtz, model_of, uniform

AXES = {"y": np.linspace(0.2, 1.8, 5), "x": np.linspace(0.3, 1.7, 4)}


def points(axes):
    return torch.from_numpy(np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2))


def currents():
    """On 3 times, 4 latitudes and 5 longitudes, with land and gaps."""
    numbers = np.random.default_rng(0)
    u, v = numbers.normal(size=(2, 3, 4, 5))
    u[:, 0, 0] = v[:, 0, 0] = np.nan  # land
    u[1, 2, 3] = np.nan  # a gap
    time = np.datetime64("2020-01-01T00") + np.arange(3) * np.timedelta64(6, "h")
    dims = ("time", "lat", "lon")
    coords = {"time": time, "lat": 50 + 0.1 * np.arange(4), "lon": 0.2 * np.arange(5)}
    return xr.Dataset({"u": (dims, u), "v": (dims, v)}, coords)


def test_readings_of_a_grid():
    ds = currents()
    x, y = labelled.readings(
        ds, ["u", "v"], ["time", "lon", "lat"], time_unit="h", epoch="2020-01-01"
    )
    assert x.shape == (57, 3)  # of 60, 3 on land
    assert y.shape == (57, 2)
    assert np.isnan(y).sum() == 1
    for (hours, lon, lat), own in zip(x, y, strict=True):
        time = np.datetime64("2020-01-01") + np.timedelta64(int(hours), "h")
        at = ds.sel(time=time, lon=lon, lat=lat)
        np.testing.assert_array_equal(own, [at["u"], at["v"]])


def test_readings_do_not_depend_on_the_order_of_dimensions():
    ds = currents().isel(time=0)
    ds["v"] = ds["v"].transpose()
    x, y = labelled.readings(ds, ["u", "v"], ["lon", "lat", "time"])
    assert x.shape == (19, 3)
    assert set(x[:, 2]) == {1577836800.0}  # seconds from 1970 to 2020
    np.testing.assert_array_equal(y[0], [ds["u"][0, 1], ds["v"][1, 0]])


def test_tracks_of_trajectories_are_columns_for_fit():
    """Two drifters, the second shorter; labels for each, times for every reading."""
    hours = np.arange("2020-01-01T00", "2020-01-01T04", dtype="datetime64[h]")
    time = np.stack([hours, hours + 1]).astype("datetime64[ns]")
    u = np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, np.nan]])
    ds = xr.Dataset(
        {"u": (("drifter", "i"), u), "v": (("drifter", "i"), -u)},
        {
            "drifter": ["a", "b"],
            "lon": (("drifter", "i"), 0.1 * u),
            "lat": (("drifter", "i"), 0.2 * u),
            "time": (("drifter", "i"), time),
        },
    )
    how = {"track": "drifter", "time": "time", "time_unit": "h", "epoch": "2020-01-01"}
    x, y, along = labelled.readings(ds, ["u", "v"], ["lon", "lat"], **how)
    assert along["track"].tolist() == ["a"] * 4 + ["b"] * 3
    assert along["time"].tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(x, y, **along)
    assert [track.label for track in model.state.data.tracks[0].tracks] == ["a", "b"]
    *_, only = labelled.readings(ds, ["u", "v"], ["lon", "lat"], track="drifter")
    assert list(only) == ["track"]
    with pytest.raises(KeyError, match="got \\['leg'\\]"):
        labelled.readings(ds, ["u", "v"], ["lon", "lat"], track="leg")


def test_noise_is_a_column_for_each_number():
    """One variance, one for each variable, or covariances; at the places that are observed."""
    u = np.array([[1.0, np.nan, 3.0], [4.0, 5.0, 6.0]])
    dims = ("lat", "lon")
    ds = xr.Dataset(
        {
            "u": (dims, u),
            "v": (dims, -u),
            "var": (dims, u / 10),
            "cov": (dims[1:], [0.0, 0.1, 0.2]),
        },
        {"lon": [0.0, 0.1, 0.2], "lat": [50.0, 50.1]},
    )
    own, values = ("u", "v"), np.array([1.0, 3.0, 4.0, 5.0, 6.0]) / 10
    expected = np.array([0.0, 0.2, 0.0, 0.1, 0.2])
    for noise in ("var", ["var", "cov"], [["var", "cov"], ["cov", "var"]]):
        *_, options = labelled.readings(ds, own, ["lon", "lat"], noise=noise)
        found = options["noise"]
        assert found.shape == (5, *np.shape(noise))
        corner = (...,) + (0,) * np.ndim(noise)
        np.testing.assert_allclose(found[corner], values)
        if np.ndim(noise):
            np.testing.assert_allclose(found[(*corner[:-1], 1)], expected)
    with pytest.raises(KeyError, match="got \\['sd'\\]"):
        labelled.readings(ds, own, ["lon", "lat"], noise=["var", "sd"])


def test_readings_of_trajectories():
    """Two drifters of different length, padded with NaN and NaT; places that are variables."""
    dims, lon = ("drifter", "obs"), np.array([[1.0, 2.0, 3.0], [4.0, 5.0, np.nan]])
    age = np.arange(6).reshape(2, 3).astype("timedelta64[D]").astype("timedelta64[ns]")
    age[1, 2] = "NaT"
    ds = xr.Dataset({"u": (dims, 10 * lon), "lon": (dims, lon), "age": (dims, age)})
    x, y = labelled.readings(ds, "u", ["age", "lon"], time_unit="D")
    np.testing.assert_array_equal(x, np.stack([np.arange(5), np.arange(1, 6)], axis=-1))
    np.testing.assert_array_equal(y, 10 * x[:, 1:])


def test_times_far_from_the_epoch():
    """Against Python's own calendar; and a nanosecond is kept next to the epoch."""
    time = np.array(["2020-03-01T06", "1850-01-01"], dtype="M8[ns]")
    ds = xr.Dataset({"u": ("time", [1.0, 2.0])}, {"time": time})
    x, _ = labelled.readings(ds, "u", "time", time_unit="D", epoch="0001-01-01")
    wanted = [date(2020, 3, 1).toordinal() - 0.75, date(1850, 1, 1).toordinal() - 1]
    assert x[:, 0].tolist() == wanted
    epoch = time[0] - np.timedelta64(1, "ns")
    assert labelled.readings(ds, "u", "time", epoch=epoch)[0][0, 0] == pytest.approx(1e-9)


def test_a_model_of_a_dataset_is_that_of_arrays():
    ds = currents().isel(time=0)
    ds["u"][1, 1] = np.nan

    def conditioned(x, y):
        return gp_orff.VectorFieldGP(helmholtz(2)).condition(x, y, missing="mask").posterior()

    field = conditioned(*labelled.readings(ds, ["u", "v"], ["lat", "lon"]))
    x = points([ds["lat"], ds["lon"]])
    y = np.stack([ds["u"].to_numpy().ravel(), ds["v"].to_numpy().ravel()], axis=-1)
    assert np.isnan(y[0]).all()
    wanted = conditioned(x[1:], y[1:])
    torch.testing.assert_close(field.mean(x), wanted.mean(x), rtol=0, atol=0)
    out = field.to_xarray({"lat": ds["lat"], "lon": ds["lon"]})
    assert out["u"].dims == ds["u"].dims
    np.testing.assert_array_equal(out["lat"], ds["lat"])


@pytest.mark.parametrize("rule", [None, gp_orff.Auto(exact_values=0)], ids=["exact", "grid"])
@pytest.mark.parametrize("chunk", [7, 10**6])
def test_a_dataset_holds_what_the_field_says(rule, chunk, monkeypatch):
    """Up to rounding: a sum over a chunk may be done in another order (1e-12), or by another
    transform, of tolerance 1e-9 or so on a grid."""
    monkeypatch.setattr(labelled.maps, "_CHUNK", chunk)
    field, x = model_of(helmholtz(2), rule, 2).posterior(), points(AXES.values())
    symbols = {"psi": gp_orff.StreamFunction(), "solenoidal": gp_orff.DivergenceFreePart()}
    ds = field.to_xarray(AXES, names=["a", "b"], symbols=symbols)
    assert ds.sizes == {"y": 5, "x": 4}
    wanted = {("a", "b"): None, ("psi",): symbols["psi"]}
    wanted[("solenoidal_1", "solenoidal_2")] = symbols["solenoidal"]
    assert len(ds.data_vars) == 10
    for names, symbol in wanted.items():
        mean, sd = field.mean(x, symbol), field.variance(x, symbol).sqrt()
        for i, name in enumerate(names):
            assert ds[name].dtype == ds[f"{name}_sd"].dtype == np.float64
            for found, own in ((ds[name], mean), (ds[f"{name}_sd"], sd)):
                own = own[:, i].reshape(5, 4).numpy()
                np.testing.assert_allclose(found, own, rtol=0, atol=1e-7 if rule else 1e-12)


def test_defaults_are_derivatives_of_planar_fields():
    field = model_of(helmholtz(2), None, 2).posterior()
    ds, x = field.to_xarray(AXES), points(AXES.values())
    assert [n for n in ds.data_vars if not n.endswith("_sd")] == [
        "u",
        "v",
        "divergence",
        "vorticity",
    ]
    for name, own in (("divergence", field.divergence(x)), ("vorticity", field.curl(x))):
        np.testing.assert_allclose(ds[name].to_numpy().ravel(), own.mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(ds[f"{name}_sd"].to_numpy().ravel(), own.stddev, rtol=1e-6)


def test_defaults_leave_out_what_does_not_exist():
    rough = model_of(gp_orff.HelmholtzKernel(MaternKernel(nu=1.5), num_dims=2), None, 2)
    assert list(rough.posterior().to_xarray(AXES).data_vars) == ["u", "u_sd", "v", "v_sd"]
    scalar = gp_orff.VectorFieldGP(RBFKernel()).condition(uniform(9, 1), uniform(9, 1, seed=1))
    assert list(scalar.posterior().to_xarray({"x": [0.1, 0.2]}).data_vars) == ["f1", "f1_sd"]


def test_times_go_out_as_they_came_in():
    ds = currents()
    kernel = MultitaskKernel(RBFKernel(ard_num_dims=3), num_tasks=2)
    how = {"time_unit": "h", "epoch": np.datetime64("2020-01-01")}
    x, y = labelled.readings(ds, ["u", "v"], ["time", "lat", "lon"], **how)
    field = gp_orff.VectorFieldGP(kernel).condition(x, y, missing="mask").posterior()
    out = field.to_xarray({name: ds[name] for name in ("time", "lat", "lon")}, **how)
    np.testing.assert_array_equal(out["time"], ds["time"])
    there = torch.tensor([[6.0, 50.1, 0.4]], dtype=torch.float64)
    found = out["u"].sel(time="2020-01-01T06", lat=50.1, lon=0.4, method="nearest")
    np.testing.assert_allclose(found, field.mean(there)[0, 0], rtol=0, atol=1e-12)


def test_attributes(tmp_path):
    field = model_of(helmholtz(2), None, 2).posterior()
    lat = xr.DataArray(AXES["y"], dims="rows", attrs={"units": "degrees_north"})
    given = {
        "u": {"units": "m s-1", "standard_name": "eastward_wind", "long_name": "wind to the east"},
        "lon": {"units": "degrees_east"},
    }
    ds = field.to_xarray({"lat": lat, "lon": AXES["x"]}, attrs=given, symbols={})
    for name, axis, units in (
        ("latitude", "Y", "degrees_north"),
        ("longitude", "X", "degrees_east"),
    ):
        assert ds[name[:3]].attrs == {"standard_name": name, "axis": axis, "units": units}
    assert ds["u"].attrs == {**given["u"], "ancillary_variables": "u_sd"}
    assert ds["u_sd"].attrs == {
        "long_name": "posterior standard deviation of wind to the east",
        "units": "m s-1",
        "standard_name": "eastward_wind standard_error",
    }
    assert ds["v"].attrs == {"long_name": "posterior mean of v", "ancillary_variables": "v_sd"}
    ds.to_netcdf(tmp_path / "field.nc", engine="scipy")
    with xr.open_dataset(tmp_path / "field.nc", engine="scipy") as back:
        xr.testing.assert_identical(back.load(), ds)


WRONG_READINGS = [
    ({"variables": ["u", "w"]}, KeyError, r"names among \['flat', .*got \['w'\]"),
    ({"variables": []}, KeyError, "got none"),
    ({"coordinates": ["depth"]}, KeyError, "depth"),
    ({"variables": ["u", "flat"]}, ValueError, "same dimensions.*'flat'.*isel"),
    ({"variables": ["flat"], "coordinates": ["time"]}, ValueError, "'time' along.*isel"),
    ({"variables": ["time"], "coordinates": ["time"]}, TypeError, "numbers in 'time'"),
    ({"variables": ["gone"]}, ValueError, "nothing but NaN"),
    ({"coordinates": ["time"], "time_unit": "M"}, ValueError, "time_unit among W, D.*'M'"),
    ({"variables": ["v"], "coordinates": ["word"]}, TypeError, "datetime64 as coordinate 'word'"),
    ({"dataset": np.zeros(3)}, TypeError, "xarray Dataset, got ndarray"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_READINGS)
def test_wrong_readings(wrong, error, message):
    ds = currents().assign(word=("lat", list("abcd")))
    ds = ds.assign(flat=ds["u"].isel(time=0), gone=np.nan * ds["u"])
    given = {"dataset": ds, "variables": ["u", "v"], "coordinates": ["lon", "lat"], **wrong}
    with pytest.raises(error, match=message):
        labelled.readings(**given)


WRONG_GRIDS = [
    ({"coordinates": {"x": [0.0]}}, ValueError, r"each of the model's 2 inputs.*\['x'\]"),
    ({"coordinates": {"x": [0.0], "y": 1.0}}, ValueError, r"'y' as a 1-D array, got shape \(\)"),
    ({"names": ["u"]}, ValueError, "2 names"),
    ({"names": ["u", "u"]}, ValueError, r"different names.*\['u', 'u_sd'\]"),
    ({"names": ["x", "v"]}, ValueError, r"different names.*\['x'\]"),
    ({"symbols": {"divergence": 3}}, TypeError, "symbol as 'divergence'.*got int"),
    ({"attrs": {"w": {}}}, ValueError, r"attrs of .*got those of \['w'\]"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG_GRIDS)
def test_wrong_grids(wrong, error, message):
    field = model_of(helmholtz(2), None, 2, points=5).posterior()
    with pytest.raises(error, match=message):
        field.to_xarray(**{"coordinates": AXES, **wrong})


def test_without_xarray(monkeypatch):
    ds, field = currents(), model_of(helmholtz(2), None, 2, points=5).posterior()
    monkeypatch.setitem(sys.modules, "xarray", None)
    for call in (lambda: labelled.readings(ds, ["u"], ["lat"]), lambda: field.to_xarray(AXES)):
        with pytest.raises(ImportError, match=r"pip install gp_orff\[xarray\]"):
            call()
