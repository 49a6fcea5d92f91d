"""A model stores the units of its data."""

import pickle

import numpy as np
import pint
import pytest
import torch
import xarray as xr

import gp_orff
from gp_orff.data.units import UnitArray
from gp_orff.labelled import files, readings

N = 30
NAMES = ["u", "v"], ["x", "y"]
PLACES = np.array([[0.2, 0.4], [0.7, 0.3]])


FACTORS = {"cm/s": 100.0, "m": 1000.0, "cm2 s-2": 1e4}  # of numbers in m s-1, km and m2 s-2
OTHER = {"m s-1": "cm/s", "km": "m", "m2 s-2": "cm2 s-2"}


def dataset(seed=0, units=None):
    """Velocities at places, in other units than m s-1 and km if `units` has some."""
    x, y = np.random.default_rng(seed).random((2, N))
    numbers = {"x": (x, "km"), "y": (y, "km")}
    numbers |= {"u": (np.sin(4 * y), "m s-1"), "v": (np.cos(4 * x), "m s-1")}
    numbers |= {"var_u": (0.01 + 0.01 * x, "m2 s-2"), "var_v": (0.02 + 0.01 * y, "m2 s-2")}
    numbers |= {"cov": (0.005 * x, "m2 s-2")}
    variables = {}
    for name, (values, unit) in numbers.items():
        unit = (units or {}).get(unit, unit)
        variables[name] = ("i", FACTORS.get(unit, 1.0) * values, {"units": unit})
    return xr.Dataset(variables).set_coords(NAMES[1])


NOISES = {
    "learned": None,
    "one": "var_u",
    "components": ["var_u", "var_v"],
    "covariances": [["var_u", "cov"], ["cov", "var_v"]],
}


def held(noise=None):
    x, y, *options = readings(dataset(), *NAMES, noise=noise)
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    return model.condition(x, y, **(options[0] if options else {}))


def same(model, other):
    torch.testing.assert_close(
        model.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-9, atol=1e-9
    )
    a, b = (m.posterior().mean(PLACES) for m in (model, other))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["update", "condition"])
@pytest.mark.parametrize("noise", NOISES)
def test_data_in_other_units_are_converted(noise, call):
    noise, models = NOISES[noise], []
    for units in (None, OTHER):
        x, y, *options = readings(dataset(1, units), *NAMES, noise=noise)
        options = options[0] if options else {}
        models.append(getattr(held(noise), call)(x, y, **options))
    same(*models)


def test_a_saved_model_keeps_them(tmp_path):
    model = held()
    model.save(tmp_path / "field.pt")
    loaded = gp_orff.VectorFieldGP.load(tmp_path / "field.pt")
    same(
        loaded.update(*readings(dataset(1, OTHER), *NAMES)),
        model.update(*readings(dataset(1), *NAMES)),
    )


def chunks_of(kind, folder, units):
    data = dataset(1, units)
    parts = [data.isel(i=slice(0, 12)), data.isel(i=slice(12, N))]
    if kind == "pairs":
        return ([readings(part, *NAMES) for part in parts],)
    if kind == "pickled":
        return (pickle.loads(pickle.dumps([readings(part, *NAMES) for part in parts])),)
    if kind == "mappings":
        pairs = [readings(part, *NAMES) for part in parts]
        return ([{"x": x, "y": y} for x, y in pairs],)
    if kind == "blocks":
        return readings(data.chunk(i=12), *NAMES)
    for number, part in enumerate(parts):
        part.to_netcdf(folder / f"{units is None}{number}.nc")
    return files(sorted(folder.glob(f"{units is None}*.nc")), *NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "pickled", "mappings", "blocks", "files"])
def test_chunks_in_other_units_are_converted(kind, tmp_path):
    same(*(held().update(*chunks_of(kind, tmp_path, units)) for units in (None, OTHER)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pairs", "blocks", "files"])
def test_models_that_began_with_chunks(kind, tmp_path):
    models = []
    for units in (None, OTHER):
        model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        model.condition(*chunks_of(kind, tmp_path, None))
        models.append(model.update(*readings(dataset(2, units), *NAMES)))
    same(*models)


def test_chunks_of_different_units():
    chunks = [readings(dataset(i, units), *NAMES) for i, units in enumerate((None, OTHER))]
    mixed = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(chunks)
    same(mixed, held().update(*readings(dataset(1), *NAMES)))


def test_quantities_and_labelled_arrays():
    x, y = readings(dataset(1), *NAMES)
    given = [
        (pint.Quantity(1000 * np.asarray(x), "m"), pint.Quantity(100 * np.asarray(y), "cm/s")),
        (
            xr.DataArray(1000 * x, attrs={"units": "m"}),
            xr.DataArray(100 * y, attrs={"units": "cm/s"}),
        ),
    ]
    for pair in given:
        same(held().update(*pair), held().update(x, y))


def test_components_along_directions():
    """Radial velocities, after vectors and before."""
    x, y = readings(dataset(1), *NAMES)
    components, directions = y[np.arange(N), np.arange(N) % 2], np.eye(2)[np.arange(N) % 2]
    along = UnitArray.of(components, ["m s-1"])
    other = UnitArray.of(100 * components, ["cm/s"])
    same(*(held().update(x, values, directions=directions) for values in (along, other)))
    models = []
    for units in (None, OTHER):
        model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        model.condition(x, along, directions=directions)
        models.append(model.update(*readings(dataset(2, units), *NAMES)))
    same(*models)


def test_offsets_of_temperatures():
    celsius = xr.Dataset({"t": ("i", np.linspace(5.0, 9.0, N), {"units": "degC"})})
    kelvin = xr.Dataset({"t": ("i", np.linspace(278.15, 282.15, N), {"units": "K"})})
    axis = {"x": ("i", np.linspace(0.0, 1.0, N), {"units": "km"})}
    a, b = (readings(own.assign_coords(axis), "t", "x") for own in (celsius, kelvin))
    kernel = gp_orff.CurlFreeKernel(num_dims=1)
    models = [gp_orff.VectorFieldGP(kernel).condition(*a).update(*pair) for pair in (a, b)]
    torch.testing.assert_close(*(model.log_marginal_likelihood() for model in models))


# Units that cannot be converted.


def test_other_kinds_of_units_are_refused():
    model = held()
    before = model.posterior().mean(PLACES)
    currents = dataset(1)
    for name in "uv":
        currents[name].attrs["units"] = "nT"
    for call in (model.update, model.condition):
        with pytest.raises(ValueError, match=r"column 0 of y in 'm s-1', as in .*, got 'nT'"):
            call(*readings(currents, *NAMES))
    torch.testing.assert_close(model.posterior().mean(PLACES), before)
    x, y = readings(currents, *NAMES)
    model.fit(x, y, progress=False)  # anew, in the units of these
    with pytest.raises(ValueError, match=r"in 'nT', as in .*, got 'm s-1'"):
        model.update(*readings(dataset(2), *NAMES))


def test_one_variance_of_components_in_different_units():
    """Temperature and salinity, say, each in its unit."""
    mixed = dataset(1)
    mixed["v"] = (100 * mixed["v"]).assign_attrs(units="cm/s")
    x, y = readings(dataset(1), *NAMES)
    y = UnitArray.of(y * [1.0, 100.0], ["m s-1", "cm/s"])
    with pytest.raises(ValueError, match=r"expected noise of shape \(30, 2\).*for each component"):
        held().update(x, y, noise=np.full(N, 0.01))
    kept = held("var_u").update(x, y, noise=np.full((N, 2), 0.01) * [1.0, 1e4])
    same(kept, held("var_u").update(*readings(dataset(1), *NAMES), noise=np.full(N, 0.01)))


def on_a_globe(seed, longitude):
    rng = np.random.default_rng(seed)
    lon = ("i", longitude + rng.random(N), {"units": "degrees_east"})
    lat = ("i", 40 + rng.random(N), {"units": "degrees_north"})
    return dataset(seed).assign_coords(lon=lon, lat=lat)


def test_positions_in_another_plane():
    names = NAMES[0], ["lon", "lat"]
    x, y, plane = readings(on_a_globe(0, 10.0), *names, project="auto")
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(x, y)
    x, y, _ = readings(on_a_globe(1, 12.0), *names, project="auto")
    with pytest.raises(ValueError, match=r"column 0 of x in 'km in \+proj.*with the same project="):
        model.update(x, y)
    x, y, _ = readings(on_a_globe(1, 12.0), *names, project=plane)
    model.update(x, y)


def dated(seed, epoch=None, time_unit="h"):
    times = np.datetime64("2024-05-01", "ns") + np.arange(N) * np.timedelta64(30, "m")
    data = dataset(seed).assign_coords(time=("i", times))
    return readings(data, NAMES[0], ["x", "y", "time"], time_unit=time_unit, epoch=epoch)


def test_times_since_another_epoch():
    space = gp_orff.DivergenceFreeKernel(num_dims=2, active_dims=(0, 1))
    kernel = space * gp_orff.GeneralMaternKernel(nu=1.5, active_dims=(2,))
    model = gp_orff.VectorFieldGP(kernel).condition(*dated(0, "2024-05-01"))
    for other in ({}, {"epoch": "2024-05-01", "time_unit": "s"}):
        with pytest.raises(ValueError, match=r"column 2 of x in 'h since 2024-05-01.*epoch="):
            model.update(*dated(1, **other))
    model.update(*dated(1, np.datetime64("2024-05-01T00:00")))


def test_times_along_tracks():
    """Hours become seconds, in an update and in scores."""

    def along(seed, unit):
        hours = np.arange(N) / 60.0
        data = dataset(seed)
        data["t"] = ("i", hours * {"h": 1.0, "s": 3600.0}[unit], {"units": unit})
        data["id"] = ("i", np.repeat([seed, seed + 10], N // 2))
        return readings(data, *NAMES, track="id", time="t")

    first, models, scores = along(0, "s"), [], []
    for unit in ("s", "h"):
        model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
        model.condition(*first[:2], **first[2])
        x, y, options = along(1, unit)
        models.append(model.update(x, y, **options))
        x, y, options = along(0, unit)
        scores.append(model.leave_one_out(x, y, **options).log_density)
    same(*models)
    torch.testing.assert_close(*scores)


# Fits, and data without units.


@pytest.mark.slow
def test_fits_take_the_units_of_their_data_unless_they_start_warm():
    model = held().fit(*readings(dataset(1, OTHER), *NAMES), progress=False)
    anew = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    anew.fit(*readings(dataset(1, OTHER), *NAMES), progress=False)
    a, b = (m.posterior().mean(1000 * PLACES) for m in (model, anew))
    torch.testing.assert_close(a, b)
    start = held()
    warm = held().fit(*readings(dataset(1, OTHER), *NAMES), warm_start=True, progress=False)
    start.fit(*readings(dataset(1), *NAMES), warm_start=True, progress=False)
    torch.testing.assert_close(
        warm.posterior().mean(PLACES), start.posterior().mean(PLACES), rtol=1e-4, atol=1e-6
    )


def test_data_without_units_are_taken_as_they_are():
    x, y = readings(dataset(1, OTHER), *NAMES)
    plain = np.asarray(x), np.asarray(y)
    bare = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(*plain)
    same(bare, gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(x, y))
    a = held().update(*plain).posterior().mean(PLACES)
    b = held().update(x / 1.0, y / 1.0).posterior().mean(PLACES)  # arithmetic drops units
    assert torch.equal(a, b)


def test_arrays_with_units():
    x = UnitArray.of(np.arange(6.0).reshape(3, 2), ["km", "m"])
    assert x.units == x[1:].units == x[[0, 2]].units == x[x[:, 0] > 1].units == ("km", "m")
    dropped = [x[:, 0], x[:, ::-1], x[0], x * 2, -x, np.concatenate([x, x]), x.sum(0), x.copy()]
    assert all(getattr(values, "units", None) is None for values in dropped)
    assert type(x * 2) is np.ndarray
    x[0, 0] = np.nan  # a value that is missing
    assert x.units == ("km", "m")
    assert pickle.loads(pickle.dumps(x)).units == ("km", "m")
    x *= 1000
    assert x.units is None
    y = UnitArray.of(np.arange(3.0), ["m"])
    y[0] = 5.0
    assert y.units is None
    assert y.tolist() == [5.0, 1.0, 2.0]


# Places of predictions, and observations of symbols.


def test_places_of_predictions_in_other_units():
    model = held()
    field, metres = model.posterior(), UnitArray.of(1000 * PLACES, ["m", "m"])
    expected = field.divergence(PLACES)
    for places in (metres, pint.Quantity(1000 * PLACES, "m")):
        moments = field.mean(places), field.variance(places)
        torch.testing.assert_close(moments, (field.mean(PLACES), field.variance(PLACES)))
        torch.testing.assert_close(field.curl(places).mean, field.curl(PLACES).mean)
    paths = field.sample_paths(2)
    torch.testing.assert_close(paths(metres), paths(PLACES))
    torch.testing.assert_close(field.divergence(metres).stddev, expected.stddev)


@pytest.mark.parametrize(
    "metres",
    [lambda km: UnitArray.of(1000 * km, ["m", "m"]), lambda km: pint.Quantity(1e3 * km, "m")],
)
def test_regions_in_other_units(metres):
    field = held().posterior()
    torch.testing.assert_close(
        field.design(metres(PLACES), region=metres(PLACES)).first,
        field.design(PLACES, region=PLACES).first,
    )
    losses = [field.redundancy(region=places).losses for places in (metres(PLACES), PLACES)]
    torch.testing.assert_close(*losses)


def test_references_in_other_units():
    """A symbol alone knows no units, and refuses a quantity."""
    field, place = held().posterior(), pint.Quantity(np.array([0.5, 0.5]), "km")
    expected = field.stream_function(PLACES, reference=[0.5, 0.5])
    for reference in (place, place.to("m"), UnitArray.of([500.0, 500.0], ["m"])):
        one = field.stream_function(PLACES, reference=reference)
        torch.testing.assert_close(one.mean, expected.mean)
        torch.testing.assert_close(one.stddev, expected.stddev)
    torch.testing.assert_close(
        field.potential(PLACES, reference=place.to("m"), background=True).mean,
        field.potential(PLACES, reference=[0.5, 0.5], background=True).mean,
    )
    with pytest.raises(ValueError, match="column 0 of reference in 'km'"):
        field.stream_function(PLACES, reference=pint.Quantity(np.array([0.5, 0.5]), "s"))
    with pytest.raises(TypeError, match="a quantity in 'kilometer'"):
        gp_orff.StreamFunction(reference=place)


def test_axes_of_a_map_in_other_units():
    field = held().posterior()
    km = {name: xr.DataArray([0.2, 0.5], attrs={"units": "km"}) for name in "xy"}
    metres = {name: xr.DataArray([200.0, 500.0], attrs={"units": "m"}) for name in "xy"}
    attrs = {"u": {"units": "m s-1"}, "v": {"units": "m s-1"}}
    maps = [field.to_xarray(axes, attrs=attrs) for axes in (km, metres)]
    for name in ("u", "v_sd", "vorticity"):
        np.testing.assert_allclose(maps[0][name], maps[1][name], rtol=1e-9)
        assert maps[0][name].attrs["units"] == maps[1][name].attrs["units"]
    assert maps[1]["x"].attrs["units"] == "m"
    assert maps[1]["x"].values.tolist() == [200.0, 500.0]
    with pytest.raises(ValueError, match="expected coordinate 'x' in 'km', the unit of the data"):
        field.to_xarray({**km, "x": xr.DataArray([0.2], attrs={"units": "s"})})


def test_places_in_another_plane():
    names = NAMES[0], ["lon", "lat"]
    x, y, _ = readings(on_a_globe(0, 10.0), *names, project="auto")
    field = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2)).condition(x, y)
    field = field.posterior()
    other, _, _ = readings(on_a_globe(1, 12.0), *names, project="auto")
    with pytest.raises(ValueError, match=r"column 0 of x in 'km in \+proj.*with the same project="):
        field.mean(other)
    km = pint.Quantity(np.asarray(x), "km")  # which do not say their plane
    torch.testing.assert_close(field.mean(km), field.mean(x))


@pytest.mark.parametrize("symbol", [gp_orff.Divergence(), gp_orff.Component([1.0, 0.0])])
def test_observations_of_symbols_in_other_units(symbol):
    """Per second where the model has m/s over km, and cm/s where it has m/s."""
    unit, factor = ("1/s", 1e-3) if symbol.length_power else ("cm/s", 100.0)
    values = np.array([0.1, -0.2])
    plain = held().observe(PLACES, values, symbol, noise=0.01)
    places, given = pint.Quantity(1000 * PLACES, "m"), pint.Quantity(factor * values, unit)
    same(held().observe(places, given, symbol, noise=0.01 * factor**2), plain)
    with pytest.raises(ValueError, match=r"column 0 of y in .*, got 'nanotesla'"):
        held().observe(PLACES, pint.Quantity(values, "nT"), symbol, noise=0.01)
