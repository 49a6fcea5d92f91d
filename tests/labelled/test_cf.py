"""Maps that follow the CF conventions, version 1.11: https://cfconventions.org."""

import sys

import numpy as np
import pytest
import torch
import xarray as xr
from gpytorch.kernels import MaternKernel, RBFKernel

import gp_orff
from gp_orff.labelled import LocalPlane, readings
from gp_orff.models.report import expression
from tests.support.fields import helmholtz, model_of

HOURS = {"time_unit": "h", "epoch": "2020-01-01"}
UNITS = {"units": "m s-1"}
SEA_WATER = {
    "u": {**UNITS, "standard_name": "eastward_sea_water_velocity"},
    "v": {**UNITS, "standard_name": "northward_sea_water_velocity"},
}
UTM = "EPSG:31983"  # a transverse Mercator projection with a false easting


def drifters(west=-43.0, width=0.5):
    generator = np.random.default_rng(0)
    lon, lat = west + width * generator.random(30), -23 + 0.5 * generator.random(30)
    hours = np.datetime64("2020-01-01", "ns") + np.arange(30) * np.timedelta64(1, "h")
    return xr.Dataset(
        {"u": ("i", np.sin(9 * lat), SEA_WATER["u"]), "v": ("i", np.cos(9 * lon), SEA_WATER["v"])},
        {
            "lon": ("i", lon, {"units": "degrees"}),
            "lat": ("i", lat, {"units": "degrees"}),
            "time": ("i", hours),
        },
        {"history": "2020-02-01T00:00:00Z drifters were recovered"},
    )


def planar(project=UTM, data=None):
    """A field in a plane, with a lengthscale of 40 km."""
    data = drifters() if data is None else data
    x, y, plane = readings(data, ["u", "v"], ["lon", "lat"], project=project)
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(x, y)
    for part in model.kernel.modules():
        if getattr(part, "has_lengthscale", False):
            part.lengthscale = 40.0
    return model.posterior(), plane


GRID = {"lon": np.linspace(-43, -42.5, 4), "lat": np.linspace(-23, -22.5, 3)}


def curvilinear():
    """Cells that are turned and sheared."""
    lon, lat = np.meshgrid(GRID["lon"], GRID["lat"])
    return {"lon": lon + 0.2 * (lat + 23), "lat": lat - 0.1 * (lon + 43)}


def same_after_writing(maps, path):
    maps.to_netcdf(path, engine="scipy")
    with xr.open_dataset(path, engine="scipy") as again:
        if not maps.chunks:
            xr.testing.assert_identical(again.load(), maps)
            return
        xr.testing.assert_allclose(again.load(), maps, rtol=1e-9, atol=1e-12)  # computed again
        assert again.attrs == maps.attrs
        assert all(again[name].attrs == maps[name].attrs for name in maps.variables)


def test_coordinates_and_their_order(tmp_path):
    """Sections 4 and 2.4."""
    data = drifters()
    x, y, plane = readings(data, ["u"], ["lon", "lat", "time"], project="auto", **HOURS)
    model = gp_orff.VectorFieldGP(RBFKernel(ard_num_dims=3)).condition(x, y)
    axes = {**GRID, "time": data.time[3:5]}
    how = {"names": ["u"], "project": plane, "attrs": data, **HOURS}
    maps = model.posterior().to_xarray(axes, **how)
    assert maps["u"].dims == maps["u_sd"].dims == ("time", "lat", "lon")
    degrees = {"lon": ("longitude", "X", "east"), "lat": ("latitude", "Y", "north")}
    for name, (standard, axis, direction) in degrees.items():
        units = f"degrees_{direction}"
        assert maps[name].attrs == {"standard_name": standard, "axis": axis, "units": units}
    assert maps["time"].attrs == {"standard_name": "time", "axis": "T"}
    assert maps["u_sd"].attrs["standard_name"] == "eastward_sea_water_velocity standard_error"
    assert maps["u"].attrs["ancillary_variables"] == "u_sd"
    same_after_writing(maps, tmp_path / "maps.nc")
    with xr.open_dataset(tmp_path / "maps.nc", engine="scipy", decode_cf=False) as written:
        assert not any("_FillValue" in written[name].attrs for name in ("lon", "lat", "time"))


def test_grid_mappings(tmp_path):
    """Section 5.6: pyproj makes the coordinate systems again from the attributes."""
    pyproj = pytest.importorskip("pyproj")
    field, plane = planar()
    maps = field.to_xarray(GRID, project=plane, symbols={})
    assert maps["u"].attrs["grid_mapping"] == maps["v_sd"].attrs["grid_mapping"] == "crs"
    attributes = {name: text for name, text in maps["crs"].attrs.items() if name != "crs_wkt"}
    again = pyproj.CRS.from_cf(attributes)
    assert again.is_geographic
    assert again.ellipsoid == pyproj.CRS(UTM).ellipsoid

    corner = plane.forward([[-43.0, -23.0]])[0]  # km
    axes = {"x": corner[0] + np.array([0.0, 10.0]), "y": corner[1] + np.array([0.0, 5.0, 9.0])}
    maps = field.to_xarray(axes, symbols={}, attrs=SEA_WATER)
    assert maps["u"].dims == ("y", "x")
    for name in "xy":
        standard = f"projection_{name}_coordinate"
        expected = {"standard_name": standard, "axis": name.upper(), "units": "km"}
        assert maps[name].attrs == expected
    origin = {name: 1000 * maps["crs"].attrs[name] for name in ("false_easting", "false_northing")}
    assert origin == {"false_easting": 500000.0, "false_northing": 10000000.0}  # of zone 23 S
    again = pyproj.CRS.from_cf({**maps["crs"].attrs, **origin})
    project = pyproj.Transformer.from_crs(again.geodetic_crs, again, always_xy=True)
    np.testing.assert_allclose(project.transform(-43.0, -23.0), 1000 * corner, atol=1e-6)
    same_after_writing(maps, tmp_path / "maps.nc")
    metres = {
        name: xr.DataArray(1000 * axes[name], dims=name, attrs={"units": "m"}) for name in axes
    }
    in_metres = field.to_xarray(metres, symbols={}, attrs=SEA_WATER)
    assert in_metres["crs"].attrs["false_easting"] == 500000.0
    np.testing.assert_allclose(in_metres["u"], maps["u"], atol=1e-12)


def test_a_projection_that_the_conventions_do_not_know(tmp_path):
    """Oblique stereographic: section 5.2, longitude and latitude are coordinates themselves."""
    field, plane = planar("auto", drifters(width=2.0))
    assert "sterea" in plane.crs
    maps = field.to_xarray({"x": [-20.0, 0.0, 30.0], "y": [-9.0, 8.0]}, symbols={})
    assert "crs" not in maps
    assert maps["longitude"].dims == ("y", "x")
    place = plane.inverse([[30.0, -9.0]])[0]
    found = [maps[name].sel(x=30.0, y=-9.0) for name in ("longitude", "latitude")]
    np.testing.assert_allclose(found, place, atol=1e-12)
    same_after_writing(maps, tmp_path / "maps.nc")


@pytest.mark.parametrize("chunks", [None, {"x": 3}])
def test_curvilinear_grids(chunks, tmp_path, monkeypatch):
    """Section 5.2: dimensions y and x, longitude and latitude listed as coordinates; the values are
    those of a grid that has each point alone."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    field, plane = planar()
    axes, how = curvilinear(), {"project": plane, "attrs": drifters()}
    how["symbols"] = {"vorticity": gp_orff.Curl()}
    maps = field.to_xarray(axes, chunks=chunks, **how)
    assert maps["u"].dims == ("y", "x")
    for j, i in ((0, 0), (1, 3), (2, 2)):
        point = field.to_xarray({name: [axis[j, i]] for name, axis in axes.items()}, **how)
        for name in ("u", "v_sd", "vorticity"):
            there = point[name].to_numpy().item()
            np.testing.assert_allclose(maps[name][j, i], there, rtol=1e-9, atol=1e-12)
    assert maps["lon"].attrs == {"standard_name": "longitude", "units": "degrees_east"}
    same_after_writing(maps, tmp_path / "maps.nc")
    with xr.open_dataset(tmp_path / "maps.nc", engine="scipy", decode_cf=False) as written:
        assert written["u"].attrs["coordinates"].split() == ["lat", "lon"]
    if chunks:
        assert maps["u"].chunks == ((3,), (3, 1))
        whole = field.to_xarray(axes, **how)
        assert maps.attrs == whole.attrs
        assert all(maps[name].attrs == whole[name].attrs for name in whole.variables)


def test_curvilinear_grids_with_times():
    data = drifters()
    x, y, plane = readings(data, ["u"], ["lon", "lat", "time"], project="auto", **HOURS)
    field = gp_orff.VectorFieldGP(RBFKernel(ard_num_dims=3)).condition(x, y).posterior()
    axes = {
        name: xr.DataArray(axis, dims=("row", "cell")) for name, axis in curvilinear().items()
    } | {"time": data.time[3:5].to_numpy()}
    maps = field.to_xarray(axes, names=["u"], project=plane, paths=2, **HOURS)
    assert dict(maps.sizes) == {"realization": 2, "time": 2, "row": 3, "cell": 4}
    assert maps["u"].dims == ("realization", "time", "row", "cell")
    place = plane.forward([[axes["lon"].values[1, 2], axes["lat"].values[1, 2]]])[0]
    point = torch.tensor([[*place, 4.0]], dtype=torch.float64)
    expected = field.sample_paths(2)(point)[:, 0, 0]
    np.testing.assert_allclose(maps["u"][:, 1, 1, 2], expected, atol=1e-9)


def test_history(monkeypatch):
    """Section 2.6.2: a line with the time of day for each program, the last one first."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")  # 2023-11-14T22:13:20Z by date -u
    kernel = gp_orff.CurlFreeKernel(MaternKernel(nu=2.5), num_dims=2)
    kernel.base_kernel.lengthscale = 0.25
    model = gp_orff.VectorFieldGP(kernel).condition(torch.rand(9, 2), torch.randn(9, 2))
    axes = {"x": [0.1, 0.2], "y": [0.3]}
    maps = model.posterior().to_xarray(axes, symbols={}, attrs=drifters(), names=["u", "v"])
    assert maps.attrs["Conventions"] == "CF-1.11"
    line, before = maps.attrs["history"].split("\n")
    start = f"2023-11-14T22:13:20Z gp_orff {gp_orff.__version__}: posterior means and standard "
    assert line.startswith(f"{start}deviations of u, v; kernel ")
    assert "CurlFreeKernel(MaternKernel(nu=2.5))); " in line
    assert "lengthscale = 0.25, noise = 0.69315, mean = [" in line  # gpytorch's first noise, ln 2
    assert before == drifters().attrs["history"]
    assert expression((RBFKernel() + RBFKernel()) * MaternKernel(nu=0.5)) == (
        "(RBFKernel + RBFKernel) * MaternKernel(nu=0.5)"
    )


def test_coverage_where_it_was_computed(tmp_path):
    """After a fit, and in a file; not where observations came later."""
    x = torch.rand(60, 1, generator=torch.Generator().manual_seed(0)).double()
    noise = 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(1))
    model = gp_orff.VectorFieldGP(RBFKernel()).fit(x, torch.cos(6 * x) + noise, progress=False)
    coverage = model.report.coverage
    assert 0.85 < coverage <= 1  # of 60 or fewer numbers, 95 % ± 3 standard errors of 3 %
    model.save(tmp_path / "model.pt")
    again = gp_orff.VectorFieldGP.load(tmp_path / "model.pt")
    for posterior in (model.posterior(False), again.posterior(False)):
        maps = posterior.to_xarray({"x": [0.1]})
        assert maps.attrs["coverage_of_95_percent_intervals"] == coverage
    model.update(x[:1], x[:1])
    assert model.report.coverage is None
    maps = model.posterior(False).to_xarray({"x": [0.1]})
    assert "coverage_of_95_percent_intervals" not in maps.attrs


def test_nothing_is_invented():
    """Coordinates and velocities of which nothing is known have no standard names."""
    field = model_of(helmholtz(2), None, 2).posterior()
    for names in (("x", "y"), ("lon", "lat")):
        maps = field.to_xarray({name: [0.1, 0.2] for name in names}, attrs={"u": UNITS})
        assert all(maps[name].attrs == {} for name in names)
        assert maps["u"].dims == names
        assert "crs" not in maps
        assert not any("standard_name" in entry.attrs for entry in maps.variables.values())


def test_wrong_curvilinear_grids():
    field, plane = planar()
    axes = curvilinear()
    with pytest.raises(
        ValueError, match=r"2-D coordinate 'x' along dimensions with other names.*'j', 'i'"
    ):
        field.to_xarray({"x": axes["lon"], "y": axes["lat"]})
    with pytest.raises(ValueError, match=r"one shape.*'lat'.*\(2, 4\)"):
        field.to_xarray({**axes, "lat": axes["lat"][:2]}, project=plane)
    with pytest.raises(ValueError, match=r"different names.*\['crs'\]"):
        field.to_xarray(GRID, names=["crs", "v"], project=plane)


def test_positions_in_a_plane_without_pyproj(monkeypatch):
    field, _ = planar(LocalPlane.around([[-43.0, -23.0], [-42.5, -22.4]]))
    monkeypatch.setitem(sys.modules, "pyproj", None)
    maps = field.to_xarray({"x": [0.0], "y": [1.0]}, symbols={})
    assert "crs" not in maps
    assert maps["x"].attrs["standard_name"] == "projection_x_coordinate"
