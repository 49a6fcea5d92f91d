"""Ensembles: sample paths of a posterior as Datasets with a realization dimension."""

import numpy as np
import pytest
import torch
import xarray as xr

import gp_orff
from gp_orff.labelled import readings

GRID = {"x": [0.1, 0.5, 0.9], "y": [0.2, 0.6]}
ATTRS = {
    "u": {"units": "m s-1", "standard_name": "eastward_sea_water_velocity"},
    "v": {"units": "m s-1", "standard_name": "northward_sea_water_velocity"},
    "x": {"units": "km"},
    "y": {"units": "km"},
}


def field(**options):
    x = torch.rand(40, 2, generator=torch.Generator().manual_seed(0)).double()
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2), **options)
    return model.condition(x, torch.sin(4 * x.flip(-1))).posterior()


def on_features():
    return field(frequencies=gp_orff.Grid(domain=((0, 1), (0, 1)), tolerance=1e-4))


def places():
    x, y = np.meshgrid(GRID["x"], GRID["y"], indexing="ij")
    return torch.from_numpy(np.stack([x, y], -1).reshape(-1, 2))


def test_values_are_those_of_the_same_sample_paths():
    posterior = on_features()
    ensemble = posterior.to_xarray(GRID, paths=4, seed=3, attrs=ATTRS)
    assert dict(ensemble.sizes) == {"realization": 4, "x": 3, "y": 2}
    assert list(ensemble.data_vars) == ["u", "v", "divergence", "vorticity"]
    paths = posterior.sample_paths(4, seed=3)
    values = paths(places()).reshape(4, 3, 2, 2)
    np.testing.assert_allclose(ensemble["u"], values[..., 0], rtol=1e-9)
    np.testing.assert_allclose(ensemble["v"], values[..., 1], rtol=1e-9)
    curl = paths(places(), gp_orff.Curl()).reshape(4, 3, 2)
    np.testing.assert_allclose(ensemble["vorticity"], 1e-3 * curl, rtol=1e-9)  # of m/s over km


def test_names_of_the_cf_conventions():
    ensemble = on_features().to_xarray(GRID, paths=2, attrs=ATTRS)
    assert ensemble["realization"].attrs["standard_name"] == "realization"
    assert ensemble["realization"].dtype == np.int32
    assert ensemble["u"].dims == ("realization", "x", "y")
    assert ensemble["u"].attrs == {**ATTRS["u"], "long_name": "u drawn from the posterior"}
    assert ensemble["vorticity"].attrs["units"] == "s-1"


def test_their_moments_are_those_of_the_map():
    posterior = field()
    ensemble = posterior.to_xarray(GRID, paths=2000)
    assert list(ensemble.data_vars) == ["u", "v"]  # derivatives of exact paths are not known
    expected = posterior.to_xarray(GRID)
    for name in "uv":
        error = expected[f"{name}_sd"] / 2000**0.5
        assert (abs(ensemble[name].mean("realization") - expected[name]) < 5 * error).all()
        ratio = ensemble[name].std("realization") / expected[f"{name}_sd"]
        assert abs(ratio - 1).max() < 0.15  # of prior paths by random features, and of 2000 draws
    with pytest.raises(NotImplementedError, match="sample paths of an exact model"):
        posterior.to_xarray(GRID, paths=2, symbols={"curl": gp_orff.Curl()})


def test_by_blocks(tmp_path):
    pytest.importorskip("dask")
    posterior = on_features()
    expected = posterior.to_xarray(GRID, paths=3)
    lazy = posterior.to_xarray(GRID, paths=3, chunks={"x": 2})
    assert lazy["u"].chunks == ((3,), (2, 1), (2,))
    xr.testing.assert_allclose(lazy.compute(scheduler="synchronous"), expected)
    expected.to_netcdf(tmp_path / "ensemble.nc")
    with xr.open_dataset(tmp_path / "ensemble.nc") as again:
        xr.testing.assert_allclose(again.load(), expected)


def test_in_degrees():
    """Vectors of each path go back to the east and north, as the mean does."""
    rng = np.random.default_rng(0)
    lon, lat = 10 + rng.random(30), 60 + rng.random(30)
    data = xr.Dataset(
        {"u": ("i", np.sin(lat)), "v": ("i", np.cos(lon))},
        {
            "lon": ("i", lon, {"units": "degrees_east"}),
            "lat": ("i", lat, {"units": "degrees_north"}),
        },
    )
    x, y, plane = readings(data, ["u", "v"], ["lon", "lat"], project="auto")
    model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).condition(x, y)
    for part in model.kernel.modules():
        if getattr(part, "has_lengthscale", False):
            part.lengthscale = 50.0
    posterior = model.posterior()
    grid = {"lon": [10.2, 10.8], "lat": [60.3, 60.7]}
    ensemble = posterior.to_xarray(grid, paths=3, project=plane).transpose(..., "lon", "lat")
    places = np.array([[a, b] for a in grid["lon"] for b in grid["lat"]])
    values = posterior.sample_paths(3)(torch.from_numpy(plane.forward(places)))
    frame = torch.from_numpy(plane.frame(places, 2))
    turned = torch.linalg.solve(frame, values.unsqueeze(-1)).squeeze(-1).reshape(3, 2, 2, 2)
    np.testing.assert_allclose(ensemble["u"], turned[..., 0], rtol=1e-7)
    np.testing.assert_allclose(ensemble["v"], turned[..., 1], rtol=1e-7)
