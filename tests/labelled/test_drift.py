"""A reader of a particle-tracking package opens an ensemble and moves particles along paths."""

import numpy as np
import pytest
import torch
import xarray as xr
from gpytorch.kernels import RBFKernel

import gp_orff
from gp_orff.labelled import readings

parcels = pytest.importorskip("parcels", minversion="4.0")

START, DAY = np.datetime64("2024-05-01", "ns"), np.timedelta64(1, "D")
RADIUS = 1852 * 60  # metres of a degree of latitude, as parcels has it


def sea():
    """Currents of some tenths of m/s at places and times of a day."""
    rng = np.random.default_rng(0)
    lon, lat = 10 + rng.random(60), 60 + 0.5 * rng.random(60)
    times = START + (rng.random(60) * 86400).astype("timedelta64[s]")
    kind = {"units": "m s-1", "standard_name": "{}_sea_water_velocity"}
    east, north = ({k: v.format(way) for k, v in kind.items()} for way in ("eastward", "northward"))
    return xr.Dataset(
        {"u": ("i", 0.3 * np.sin(6 * lat), east), "v": ("i", 0.3 * np.cos(5 * lon), north)},
        {
            "lon": ("i", lon, {"units": "degrees_east"}),
            "lat": ("i", lat, {"units": "degrees_north"}),
            "time": ("i", times),
        },
    )


def test_particles_drift_along_the_paths_of_the_posterior():
    """The grid of 1.4 km and an hour interpolates a field of 30 km and a day to some 1e-4."""
    data = sea()
    x, y, plane = readings(data, ["u", "v"], ["lon", "lat", "time"], project="auto")
    flow = gp_orff.HelmholtzKernel(num_dims=2, active_dims=(0, 1))
    time = RBFKernel(active_dims=(2,))
    for kernel, length in (
        (flow.curl_free.base_kernel, 30.0),
        (flow.divergence_free.base_kernel, 30.0),
        (time, 86400.0),
    ):
        kernel.lengthscale = length
    model = gp_orff.VectorFieldGP(flow * time)
    model.likelihood.noise = 1e-4
    field = model.condition(x, y).posterior()
    axes = {
        "lon": np.linspace(10, 11, 41),
        "lat": np.linspace(60, 60.5, 41),
        "time": START + np.arange(25) * np.timedelta64(3600, "s"),
    }
    ensemble = field.to_xarray(axes, paths=2, project=plane, attrs=data)
    paths = field.sample_paths(2)

    def velocity(member, place, seconds):
        """Degrees per second, from the path itself instead of the grid."""
        at = np.concatenate([plane.forward(place[None])[0], [seconds]])
        at[2] += (START - np.datetime64("1970-01-01")) / np.timedelta64(1, "s")
        in_plane = paths(torch.from_numpy(at[None]))[member, 0].numpy()
        east, north = np.linalg.solve(plane.frame(place[None], 2)[0], in_plane)
        return np.array([east / np.cos(np.radians(place[1])), north]) / RADIUS

    step, ends = 1800.0, []
    for member in range(2):
        place, seconds = np.array([10.5, 60.25]), 0.0
        for _ in range(40):
            a = velocity(member, place, seconds)
            b = velocity(member, place + 0.5 * step * a, seconds + 0.5 * step)
            c = velocity(member, place + 0.5 * step * b, seconds + 0.5 * step)
            d = velocity(member, place + step * c, seconds + step)
            place, seconds = place + step / 6 * (a + 2 * b + 2 * c + d), seconds + step
        ends.append(place)
        one = ensemble.isel(realization=member)
        sgrid = parcels.convert.copernicusmarine_to_sgrid(fields={"U": one["u"], "V": one["v"]})
        particles = parcels.ParticleSet(
            parcels.FieldSet.from_sgrid_conventions(sgrid), x=[10.5], y=[60.25], z=[0.0], t=[START]
        )
        particles.execute(
            parcels.kernels.AdvectionRK4,
            dt=np.timedelta64(1800, "s"),
            runtime=np.timedelta64(40 * 1800, "s"),
            verbose_progress=False,
        )
        found = np.array([particles.x[0], particles.y[0]])
        scale = RADIUS * np.array([np.cos(np.radians(60.25)), 1.0])
        drift = np.linalg.norm((place - [10.5, 60.25]) * scale)
        assert drift > 3000
        assert np.linalg.norm((found - place) * scale) < 0.01 * drift
    assert np.linalg.norm((ends[0] - ends[1]) * scale) > 100  # each member its own
