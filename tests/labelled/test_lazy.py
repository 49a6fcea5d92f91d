"""Datasets larger than memory: chunks that load themselves, and maps in blocks."""

import pickle

import numpy as np
import pytest
import torch
import xarray as xr

import gp_orff
from gp_orff import labelled
from tests.support.fields import curl_free

cloudpickle, dask = pytest.importorskip("cloudpickle"), pytest.importorskip("dask")

RULE = gp_orff.Grid(spacing=1.2, cutoff=9.0)
NAMES = ["u", "v"], ["x", "y"]


@pytest.fixture(autouse=True)
def in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def currents():
    """On 4 times, 6 latitudes and 8 longitudes, with land that fills a block, and a gap."""
    numbers = np.random.default_rng(0)
    u, v = numbers.normal(size=(2, 4, 6, 8))
    u[:, :3, :4] = v[:, :3, :4] = np.nan
    u[1, 4, 5] = v[1, 4, 5] = np.nan
    coords = {"t": np.arange(4.0), "y": np.linspace(0.1, 1.1, 6), "x": np.linspace(0.2, 1.6, 8)}
    dims = ("t", "y", "x")
    return xr.Dataset({"u": (dims, u), "v": (dims, v), "variance": (dims, 0.1 + u**2)}, coords)


def model():
    return gp_orff.VectorFieldGP(curl_free(0.5), frequencies=RULE)


def rows(parts):
    """x, y and noise of chunks, sorted."""
    values = [np.column_stack([part["x"], part["y"], part["noise"]]) for part in parts]
    values = np.concatenate(values)
    return values[np.lexsort(values.T)]


def assert_same_posterior(one, other):
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0)).double()
    one, other = one.posterior(), other.posterior()
    torch.testing.assert_close(one.mean(x), other.mean(x), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(one.variance(x), other.variance(x), rtol=1e-9, atol=1e-12)


def test_blocks_are_read_one_by_one():
    """All readings, once each; a block of land has none; nothing is loaded before."""
    ds, loads = currents(), []

    def counted(block):
        loads.append(block.shape)
        return block

    lazy = ds.chunk({"t": 2, "y": 3, "x": 4})
    u = lazy["u"].data.map_blocks(counted, meta=np.empty((0, 0, 0)))
    (chunks,) = labelled.readings(lazy.assign(u=(ds["u"].dims, u)), *NAMES, noise="variance")
    assert (len(chunks), loads) == (8, [])
    parts = [chunk() for chunk in chunks]
    assert loads == 8 * [(2, 3, 4)]
    x, y, options = labelled.readings(ds, *NAMES, noise="variance")
    np.testing.assert_array_equal(rows(parts), rows([{"x": x, "y": y, **options}]))
    assert [len(part["x"]) for part in parts[:2]] == [0, 24]
    assert repr(list(chunks)[1]) == "the block t 0:2, y 0:3, x 4:8"


@pytest.mark.slow
def test_a_block_travels_without_the_others(tmp_path):
    ds = currents().chunk({"t": 1, "y": 2, "x": 2})
    ds.to_zarr(tmp_path / "data.zarr", zarr_format=2)
    with xr.open_zarr(tmp_path / "data.zarr") as lazy:
        (chunks,) = labelled.readings(lazy, *NAMES, noise="variance")
        packed = [pickle.dumps(chunk) for chunk in chunks]
        parts = [pickle.loads(own)() for own in packed]
    x, y, options = labelled.readings(ds.load(), *NAMES, noise="variance")
    np.testing.assert_array_equal(rows(parts), rows([{"x": x, "y": y, **options}]))
    assert len(packed) == 48
    assert max(map(len, packed)) < 12_000  # whatever the number of blocks


def test_blocks_are_the_data_of_a_model():
    ds = currents()
    (chunks,) = labelled.readings(ds.chunk({"t": 2, "y": 3, "x": 4}), *NAMES)
    x, y = labelled.readings(ds, *NAMES)
    assert_same_posterior(model().condition(chunks), model().condition(x, y))


def test_blocks_in_degrees_are_projected():
    ds = currents().rename(x="lon", y="lat")
    names = ["u", "v"], ["lon", "lat"]
    chunks, plane = labelled.readings(ds.chunk({"lat": 3}), *names, project="auto")
    assert "+lat_0=0.6" in plane.crs
    x, y, _ = labelled.readings(ds, *names, project=plane)
    parts = [chunk() for chunk in chunks]
    found = np.concatenate([np.column_stack([part["x"], part["y"]]) for part in parts])
    expected = np.column_stack([x, y])
    order, wanted = np.lexsort(found.T), np.lexsort(expected.T)
    np.testing.assert_allclose(found[order], expected[wanted], rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["nc", "zarr"])
def test_a_folder_of_files(kind, tmp_path):
    ds = currents()
    for day in range(4):
        part = ds.isel(t=slice(day, day + 1))
        if kind == "nc":
            part.to_netcdf(tmp_path / f"{day}.nc")
        else:
            part.to_zarr(tmp_path / f"{day}.zarr", zarr_format=2)
    (chunks,) = labelled.files(tmp_path, *NAMES, noise="variance")
    x, y, options = labelled.readings(ds, *NAMES, noise="variance")
    parts = [pickle.loads(pickle.dumps(chunk))() for chunk in chunks]
    np.testing.assert_array_equal(rows(parts), rows([{"x": x, "y": y, **options}]))
    (single,) = labelled.files([tmp_path / f"2.{kind}"], *NAMES)
    np.testing.assert_array_equal(single[0]()["y"], labelled.readings(ds.isel(t=[2]), *NAMES)[1])
    assert repr(single[0]).endswith(f"2.{kind}")
    for folder in (tmp_path / "none", []):
        with pytest.raises(FileNotFoundError, match="expected"):
            labelled.files(folder, *NAMES)
    with pytest.raises(KeyError, match=r"got \['w'\]"):
        labelled.files(tmp_path, ["u", "w"], ["x", "y"])
    with pytest.raises(ValueError, match=r"LocalPlane\.around"):
        labelled.files(tmp_path, *NAMES, project="auto")


def test_a_map_by_blocks_is_the_map():
    x = torch.rand(60, 2, generator=torch.Generator().manual_seed(1)).double()
    y = torch.stack([torch.sin(3 * x[:, 1]), torch.cos(2 * x[:, 0])], dim=-1)
    field = model().condition(x, y).posterior()
    north = xr.DataArray(np.linspace(0, 2, 13), dims="y", attrs={"units": "km"})  # beyond the data
    axes = {"x": np.linspace(0, 1, 21), "y": north}
    attrs = {"x": {"units": "km"}, "u": {"units": "m s-1"}, "v": {"units": "m s-1"}}
    lazy = field.to_xarray(axes, attrs=attrs, chunks={"x": 8})
    assert lazy["vorticity_sd"].chunks == ((8, 8, 5), (13,))
    lazy = pickle.loads(cloudpickle.dumps(lazy))  # as it travels to workers
    whole = field.to_xarray(axes, attrs=attrs)
    assert lazy["u_sd"].attrs == whole["u_sd"].attrs
    xr.testing.assert_allclose(lazy.compute(), whole, rtol=1e-9, atol=1e-12)
    assert all(lazy[name].attrs == whole[name].attrs for name in whole.variables)
    with pytest.raises(ValueError, match="sizes by dimension"):
        field.to_xarray(axes, chunks={"time": 3})


@pytest.mark.slow
def test_a_map_by_blocks_of_times_and_degrees(tmp_path):
    """Written to Zarr, block by block."""
    ds = currents().rename(x="lon", y="lat").isel(t=0, drop=True)
    x, y, plane = labelled.readings(ds, ["u", "v"], ["lon", "lat"], project="auto")
    field = gp_orff.VectorFieldGP(curl_free(60.0)).condition(x, y).posterior()
    axes = {"lon": np.linspace(0.2, 1.6, 9), "lat": np.linspace(0.1, 1.1, 7)}
    whole = field.to_xarray(axes, project=plane)
    lazy = field.to_xarray(axes, project=plane, chunks={"lon": 4, "lat": 4})
    lazy.to_zarr(tmp_path / "map.zarr", zarr_format=2)
    with xr.open_zarr(tmp_path / "map.zarr") as found:
        xr.testing.assert_allclose(found.load(), whole, rtol=1e-9, atol=1e-12)
