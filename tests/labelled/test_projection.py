"""Degrees to a plane and back: geodesics, finite differences, fields on the ellipsoid."""

import pickle
import sys

import numpy as np
import pyproj
import pytest
import torch
import xarray as xr
from gpytorch.kernels import RBFKernel

import gp_orff
from gp_orff.labelled import LocalPlane, readings
from tests.support.fields import helmholtz

AREAS = {
    "rio": ((-43.0, -22.5), (0.6, 0.5)),
    "tall": ((10.0, 50.0), (2.0, 9.0)),
    "wide": ((-100.0, 35.0), (12.0, 4.0)),
    "date line": ((180.0, -17.0), (5.0, 5.0)),
    "arctic": ((30.0, 84.0), (30.0, 5.0)),
}
"""The centre and the half widths, in degrees."""
SYSTEMS = ("auto", "EPSG:31983", "EPSG:3031", "EPSG:2154")
A, E2 = 6378.137, 0.00669437999014  # WGS84, km


def places_in(area, count=200, seed=0):
    centre, half = map(np.array, AREAS[area])
    return centre + half * np.random.default_rng(seed).uniform(-1, 1, (count, 2))


def dataset(places, **variables):
    coordinates = {"lon": ("i", places[:, 0]), "lat": ("i", places[:, 1])}
    return xr.Dataset({name: ("i", own) for name, own in variables.items()}, coordinates)


def metres(first, second):
    """Between places, by geodesics; a longitude and one that is 360 degrees off are the same."""
    return pyproj.Geod(ellps="WGS84").inv(*first.T, *second.T)[2]


@pytest.mark.parametrize("area", AREAS)
def test_there_and_back(area):
    places = places_in(area)
    plane = LocalPlane.around(places)
    assert metres(plane.inverse(plane.forward(places)), places).max() < 1e-3
    half = plane.forward(places).max(0) - plane.forward(places).min(0)
    assert ("tmerc" in plane.crs) == (half[0] <= half[1])


@pytest.mark.parametrize("area", AREAS)
def test_lengths_are_those_of_geodesics(area):
    """Between neighbours, to the scale of the plane, which is in the bound of the docstring; a
    geodesic of 1 km and its straight line differ by 1e-8 of it."""
    places = places_in(area)
    plane = LocalPlane.around(places)
    points, step = plane.forward(places), np.array([0.3, -0.4])
    scale = 1000 / metres(plane.inverse(points - step), plane.inverse(points + step))
    np.testing.assert_allclose(plane.scale(places), scale, rtol=2e-7)
    diagonal = np.linalg.norm(np.ptp(plane.forward(places), axis=0))
    assert np.abs(scale - 1).max() < 1.1 * diagonal**2 / (32 * 6371**2)  # s of the plane


@pytest.mark.parametrize("area", AREAS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_vectors_turn_with_the_meridian(area, system):
    """Against a step to the north and its image; differences are of order 1e-8 there."""
    if system != "auto":
        area = {"EPSG:31983": "rio", "EPSG:3031": "date line", "EPSG:2154": "tall"}[system]
    places = places_in(area)
    plane = LocalPlane.around(places) if system == "auto" else LocalPlane(system)
    step = np.array([0, 1e-4])
    north = plane.forward(places + step) - plane.forward(places - step)
    north /= np.linalg.norm(north, axis=-1, keepdims=True)
    vectors = np.random.default_rng(1).normal(size=(len(places), 3))
    east = np.stack([north[:, 1], -north[:, 0]], axis=-1)
    expected = vectors[:, :1] * east + vectors[:, 1:2] * north
    turned = plane.rotate(vectors, places)
    np.testing.assert_allclose(turned[:, :2], expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(turned[:, 2], vectors[:, 2])


def test_readings_in_a_plane():
    """Positions, vectors and noise; a height and a time stay as they are."""
    places = places_in("wide", 30)
    u, v, w, height = np.random.default_rng(2).normal(size=(4, 30))
    ds = dataset(places, u=u, v=v, w=w, height=height, a=u**2, b=v**2, c=w**2)
    names = ["lon", "lat", "height"]
    x, y, options, plane = readings(
        ds, ["u", "v", "w"], names, noise=["a", "b", "c"], project="auto"
    )
    np.testing.assert_array_equal(x, np.column_stack([plane.forward(places), height]))
    np.testing.assert_array_equal(y, plane.rotate(np.stack([u, v, w], axis=-1), places))
    outer = np.einsum("ni,nj->nij", np.eye(3)[0] * u[:, None], np.eye(3)[0] * u[:, None])
    outer += np.einsum("ni,nj->nij", np.eye(3)[1] * v[:, None], np.eye(3)[1] * v[:, None])
    for n, place in enumerate(places):  # R diag(u², v², w²) Rᵀ, column by column
        columns = np.diag([u[n], v[n], w[n]])
        columns = plane.rotate(columns.T, np.tile(place, (3, 1))).T
        np.testing.assert_allclose(options["noise"][n], columns @ columns.T, atol=1e-14)
    _, planar, one, _ = readings(ds, ["u", "v"], names, noise="a", project=plane)
    np.testing.assert_allclose(planar, y[:, :2] / plane.scale(places)[:, None], rtol=1e-12)
    np.testing.assert_allclose(one["noise"], u**2 / plane.scale(places) ** 2, rtol=1e-12)
    same = readings(ds, ["u", "v", "w"], names, project=plane)
    assert same[-1] is plane
    np.testing.assert_array_equal(same[0], x)
    scalars = LocalPlane(plane.crs, vectors=False)
    np.testing.assert_array_equal(readings(ds, ["u", "v"], names, project=scalars)[1][:, 0], u)
    np.testing.assert_array_equal(readings(ds, "u", names, project="auto")[1][:, 0], u)
    assert pickle.loads(pickle.dumps(plane)) == plane


def test_longitudes_by_their_attributes():
    ds = dataset(places_in("rio", 9), u=np.ones(9)).rename(lon="x", lat="y")
    ds["x"].attrs["units"], ds["y"].attrs["standard_name"] = "degrees_east", "latitude"
    assert np.abs(readings(ds, "u", ["x", "y"], project="auto")[0]).max() > 10
    with pytest.warns(gp_orff.DataWarning, match=r"\['x', 'y'\] are degrees.*project='auto'"):
        readings(ds, "u", ["x", "y"])


def flow(places):
    """u, v (m s-1), divergence and vorticity (s-1) of a smooth flow on the ellipsoid."""
    step = 1e-4

    def velocity(longitude, latitude):
        lon, lat = np.deg2rad(longitude), np.deg2rad(latitude)
        return 10 * np.cos(lat) + 8 * np.sin(6 * lon), 9 * np.sin(5 * lat) + 6 * np.cos(4 * lon)

    def radii(latitude):
        """Of the meridian and of the parallel, m."""
        sin, cos = np.sin(np.deg2rad(latitude)), np.cos(np.deg2rad(latitude))
        normal = 1000 * A / np.sqrt(1 - E2 * sin**2)
        return normal * (1 - E2) / (1 - E2 * sin**2), normal * cos

    def slope(function, longitude, latitude, east, north):
        ahead = function(longitude + east * step, latitude + north * step)
        behind = function(longitude - east * step, latitude - north * step)
        return (ahead - behind) / (2 * np.deg2rad(step))

    def around_parallel(i):
        return lambda longitude, latitude: velocity(longitude, latitude)[i] * radii(latitude)[1]

    longitude, latitude = places.T
    (u, v), (meridian, parallel) = velocity(longitude, latitude), radii(latitude)
    du = slope(lambda *place: velocity(*place)[0], longitude, latitude, 1, 0)
    dv = slope(lambda *place: velocity(*place)[1], longitude, latitude, 1, 0)
    d_parallel = [slope(around_parallel(i), longitude, latitude, 0, 1) for i in range(2)]
    divergence = du / parallel + d_parallel[1] / (meridian * parallel)
    vorticity = dv / parallel - d_parallel[0] / (meridian * parallel)
    return u, v, divergence, vorticity


@pytest.fixture(scope="module")
def wind():
    """A posterior of a flow in an area of 2000 km, and the plane."""
    lon, lat = np.meshgrid(np.linspace(-108, -92, 17), np.linspace(30, 42, 13), indexing="ij")
    places = np.stack([lon.ravel(), lat.ravel()], axis=-1)
    u, v, *_ = flow(places)
    x, y, plane = readings(dataset(places, u=u, v=v), ["u", "v"], ["lon", "lat"], project="auto")
    kernel = helmholtz(2)
    for part in (kernel.curl_free, kernel.divergence_free):
        part.base_kernel.base_kernel.lengthscale = 900.0
        part.outputscale = 100 * 900.0**2
    model = gp_orff.VectorFieldGP(kernel)
    model.likelihood.noise = 1e-3
    return model.condition(x, y).posterior(), plane


AXES = {"lon": np.linspace(-105, -95, 6), "lat": np.linspace(32, 40, 5)}


def on_axes(axes):
    mesh = np.meshgrid(axes["lon"], axes["lat"], indexing="ij")
    return np.stack([own.ravel() for own in mesh], axis=-1)


def test_derivatives_on_the_ellipsoid(wind):
    """Within 5e-3 of their rms: what the plane distorts is undone. A turn alone is 2 % off, and
    nothing 20 %."""
    field, plane = wind
    attrs = {"u": {"units": "m s-1"}, "v": {"units": "m s-1"}}
    maps = field.to_xarray(AXES, project=plane, attrs=attrs).transpose("lon", "lat")
    u, v, divergence, vorticity = flow(on_axes(AXES))
    for name, own in (("u", u), ("v", v), ("divergence", divergence), ("vorticity", vorticity)):
        found = maps[name].to_numpy().ravel()
        assert np.abs(found - own).max() < 5e-3 * np.sqrt(np.mean(own**2)), name
    assert maps["vorticity"].attrs["units"] == maps["divergence_sd"].attrs["units"] == "s-1"
    assert maps["lon"].attrs["units"] == "degrees_east"
    np.testing.assert_array_equal(maps["lon"], AXES["lon"])


@pytest.mark.parametrize("chunk", [7, 10**6])
def test_vectors_and_their_derivatives_come_back(wind, chunk, monkeypatch):
    """Point by point: k R' m, k² R' C R and k² R' J R; rounding only."""
    monkeypatch.setattr(gp_orff.labelled.maps, "_CHUNK", chunk)
    field, plane = wind
    symbols = {"part": gp_orff.CurlFreePart(), "d": gp_orff.Jacobian(), "zeta": gp_orff.Curl()}
    symbols["psi"] = gp_orff.StreamFunction()
    maps = field.to_xarray(AXES, project=plane, symbols=symbols).transpose("lon", "lat")
    places = on_axes(AXES)
    points, scale = torch.from_numpy(plane.forward(places)), plane.scale(places)
    for names, symbol in (("u v", None), ("part_1 part_2", symbols["part"])):
        mean = field.mean(points, symbol).numpy()
        covariance = field.pointwise_covariance(points, symbol).numpy()
        for n, place in enumerate(places):
            turn = scale[n] * plane.rotate(np.eye(2), np.tile(place, (2, 1)))  # east, north
            sd = np.sqrt(np.diag(turn @ covariance[n] @ turn.T))
            for name, m, s in zip(names.split(), turn @ mean[n], sd, strict=True):
                np.testing.assert_allclose(maps[name].to_numpy().ravel()[n], m, atol=1e-9)
                np.testing.assert_allclose(maps[f"{name}_sd"].to_numpy().ravel()[n], s, rtol=1e-6)
    jacobian = field.mean(points, symbols["d"]).numpy().reshape(-1, 2, 2)
    for n, place in enumerate(places):
        turn = scale[n] * plane.rotate(np.eye(2), np.tile(place, (2, 1)))
        found = [maps[f"d_{i}"].to_numpy().ravel()[n] for i in (1, 2, 3, 4)]
        np.testing.assert_allclose(found, (turn @ jacobian[n] @ turn.T).ravel(), atol=1e-12)
    for name, power in (("zeta", 2), ("psi", 0)):
        mean = scale**power * field.mean(points, symbols[name]).numpy().ravel()
        variance = scale ** (2 * power) * field.variance(points, symbols[name]).numpy().ravel()
        np.testing.assert_allclose(maps[name].to_numpy().ravel(), mean, atol=1e-9)
        np.testing.assert_allclose(maps[f"{name}_sd"].to_numpy().ravel() ** 2, variance, rtol=1e-6)


class Recorder:
    """A field of one output, 0, that keeps the points it is asked for."""

    num_inputs, num_outputs, space = 2, 1, (0, 1)

    def __init__(self):
        self.asked = []

    def mean(self, x, symbol):
        self.asked.append(x)
        return torch.zeros(len(x), 1, dtype=torch.float64)

    variance = mean


@pytest.mark.parametrize("curvilinear", [False, True])
def test_the_first_points_contain_all_others(curvilinear):
    """Parallels are curved in the plane, and so are the rows of a curvilinear grid; so the domain
    of a frequency grid is chosen once."""
    field, plane = Recorder(), LocalPlane.around(places_in("wide"))
    axes = {"lon": np.linspace(-111, -89, 9), "lat": np.array([28.0, 42.0])}
    if curvilinear:
        lon, lat = np.meshgrid(*axes.values())
        axes = {"lon": lon, "lat": lat + np.sin(lon)}
    gp_orff.labelled.on_grid(field, axes, project=plane)
    first, everything = field.asked[0], torch.cat(field.asked)
    assert len(everything) > len(first) >= (4 if curvilinear else 18)
    assert (first.amin(0) == everything.amin(0)).all()
    assert (first.amax(0) == everything.amax(0)).all()


def test_other_coordinates_and_scalars():
    """A height in km and a time beside longitude and latitude; one output is not turned."""
    places = places_in("rio", 12)
    hours = np.datetime64("2020-01-01") + np.arange(12) * np.timedelta64(1, "h")
    ds = dataset(places, t=np.sin(np.arange(12.0))).assign_coords(time=("i", hours))
    how = {"time_unit": "h", "epoch": "2020-01-01"}
    x, y, plane = readings(ds, "t", ["time", "lon", "lat"], project="auto", **how)
    np.testing.assert_array_equal(x[:, 0], np.arange(12))
    model = gp_orff.VectorFieldGP(RBFKernel(ard_num_dims=3)).condition(x, y)
    axes = {"time": hours[:2], "lon": [-43.1, -43.0], "lat": [-22.5]}
    maps = model.posterior().to_xarray(axes, names=["t"], project=plane, **how)
    point = torch.tensor([[1.0, *plane.forward([[-43.0, -22.5]])[0]]], dtype=torch.float64)
    there = maps["t"].isel(time=1, lon=1, lat=0)
    np.testing.assert_allclose(there, model.posterior().mean(point)[0, 0], atol=1e-12)


WRONG = [
    ({"project": "EPSG:4326"}, "projected coordinate reference system, got 'WGS 84'.*'auto'"),
    ({"project": "nowhere"}, "pyproj knows, .* or project='auto', got 'nowhere'"),
    ({"project": "EPSG:2048"}, "axes to the east and to the north.*'auto'"),
    ({"coordinates": ["lat", "lon"]}, r"longitude before a latitude, got.*\['lat', 'lon'\]"),
    ({"coordinates": ["lon", "far"]}, "longitude before a latitude.*degrees_north"),
    ({"coordinates": ["lon", "lat", "depth"]}, "'depth' in km.*got units 'm'"),
    ({"variables": ["u", "half"], "track": "name"}, "both or neither .* in 1 observations.*NaN"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_what_cannot_be_projected(wrong, message):
    places = places_in("rio", 9)
    ds = dataset(places, u=np.ones(9), v=np.ones(9), half=np.r_[np.nan, np.ones(8)])
    ds = ds.assign(far=ds["lat"], name=0 * ds["lat"], depth=ds["lat"].assign_attrs(units="m"))
    given = {"variables": ["u", "v"], "coordinates": ["lon", "lat"], "project": "auto", **wrong}
    with pytest.raises(ValueError, match=message):
        readings(ds, **given)


def test_areas_that_no_plane_holds():
    far = np.array([[-120.0, 40.0], [-70.0, 40.0]])
    ds = dataset(far, u=np.ones(2))
    for project in ("auto", "EPSG:5070"):
        with pytest.raises(ValueError, match=r"up to 3000 km, got 4\d\d\d km: no plane.*smaller"):
            readings(ds, "u", ["lon", "lat"], project=project)
    metres = dataset(np.array([[678000.0, 7.5e6]]), u=np.ones(1))
    with pytest.raises(ValueError, match=r"678000.0, 7500000.0.*; omit project="):
        readings(metres, "u", ["lon", "lat"], project="auto")


def test_maps_that_cannot_be_projected(wind):
    field, plane = wind
    with pytest.raises(ValueError, match="up to 3000 km"):
        field.to_xarray({"lon": [-130.0, -70.0], "lat": [30.0, 40.0]}, project=plane)
    with pytest.raises(TypeError, match=r"LocalPlane that labelled\.readings returned, got 'auto'"):
        field.to_xarray(AXES, project="auto")
    with pytest.raises(ValueError, match="longitude before a latitude"):
        field.to_xarray({"x": [0.0], "y": [0.0]}, project=plane)

    class Doubled(gp_orff.Symbol):
        def num_outputs(self, p):
            return 3

        def __call__(self, omega, p):
            return torch.ones(len(omega), 3, p, dtype=torch.complex128)

    with pytest.raises(
        ValueError, match=r"1 output, the 2 components.*4 derivatives.*got 3 outputs"
    ):
        field.to_xarray(AXES, project=plane, symbols={"triple": Doubled()})


def test_without_pyproj(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyproj", None)
    with pytest.raises(ImportError, match=r"pip install gp_orff\[geo\]"):
        readings(dataset(places_in("rio"), u=np.ones(200)), "u", ["lon", "lat"], project="auto")
