# %% [markdown]
# # 14. Larger than memory: lazy data in, workers, a lazy map out
#
# Currents on a grid, hour after hour, with an island: a Zarr store that nobody wants to load. All
# that a model needs of data are sums, and sums add up: workers read the blocks of the store where
# they are, and send back sums. The map goes to another Zarr store, block by block. No step holds
# the data or the map.
#
# The lines to copy:
#
# ```python
# client = distributed.Client()                                    # a cluster, or this machine
# data = gp_orff.labelled.readings(xarray.open_zarr(path), ["u", "v"], ["x", "y", "time"])
# model.fit(*data, executor=client.get_executor(), checkpoint="sums.partial")
# model.posterior().to_xarray(axes, chunks={"time": 10}).to_zarr(path_of_map)
# ```

# %%
import argparse
import math
import resource
import shutil
import time
from pathlib import Path

import dask.array
import distributed
import matplotlib
import numpy as np
import xarray
from gpytorch.kernels import RBFKernel

import gp_orff
from gp_orff.plotting import plot_field

parser = argparse.ArgumentParser(description="A Zarr store of currents, two workers, and a map.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")


def memory():
    """MiB, the most of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# %% [markdown]
# ## A store of 10⁷ points
#
# A region of 150 by 120 km over 50 hours, and an island without data. The current is a sum of waves
# without divergence, with lengthscales of 50 km and 30 h; the noise is 0.1 m/s. The workers write
# the store, a few hours each. (Functions, since workers import this file.)


# %%
def current(x, y, t):
    """The true velocity, in m/s."""
    numbers, (u, v) = np.random.default_rng(1), np.zeros((2, *x.shape))
    for _ in range(30):
        along, across = numbers.normal(size=2) / 50.0
        phase = (
            along * x + across * y + numbers.normal() / 30.0 * t + 2 * math.pi * numbers.random()
        )
        u, v = u - 4.0 * across * np.cos(phase), v + 4.0 * along * np.cos(phase)
    return np.stack([u, v])


def on_island(x, y):
    return (x - 60.0) ** 2 + (y - 70.0) ** 2 < 30.0**2


def observed(grid):
    """Velocities with noise on a block of the grid, NaN on the island."""
    x, y, t = xarray.broadcast(grid.x, grid.y, grid.time)
    numbers = np.random.default_rng(round(float(grid.time[0])))
    values = current(x.values, y.values, t.values) + 0.1 * numbers.normal(size=(2, *x.shape))
    u, v = np.where(on_island(x.values, y.values), np.nan, values)
    return xarray.Dataset({"u": (x.dims, u), "v": (x.dims, v)}, grid.coords)


def write(path, size, shape, hours):
    """The store of a region of this size, in blocks of so many hours."""
    extents = {"x": (1.25 * size, "km"), "y": (size, "km"), "time": (shape[2] - 1.0, "h")}
    coords = {
        name: (name, np.linspace(0, extent, count), {"units": unit})
        for (name, (extent, unit)), count in zip(extents.items(), shape, strict=True)
    }
    empty = dask.array.zeros(shape, chunks=(*shape[:2], hours))
    velocity = (tuple(coords), empty, {"units": "m s-1"})
    template = xarray.Dataset({"u": velocity, "v": velocity}, coords)
    template.map_blocks(observed, template=template).to_zarr(path, mode="w", zarr_format=2)


# %% [markdown]
# ## The fit
#
# Of a lazy Dataset, `readings` loads nothing: it returns chunks that load themselves. `fit` sends
# them to the workers, a few at a time, and adds the sums that come back, in one pass to look at the
# data and one for the statistics. An interrupted fit goes on from the file `checkpoint`.


# %%
def learn(path, executor, known):
    """The model; with `known` hyperparameters, one pass for the statistics of their grid."""
    lazy = xarray.open_zarr(path)
    data = gp_orff.labelled.readings(lazy, ["u", "v"], ["x", "y", "time"])
    print(f"{lazy.u.size} points in {len(data[0])} blocks, {lazy.nbytes / 2**20:.0f} MiB")
    flow = gp_orff.DivergenceFreeKernel(num_dims=2, active_dims=[0, 1])
    kernel = gp_orff.FieldProductKernel(flow, RBFKernel(active_dims=[2]))
    model = gp_orff.VectorFieldGP(kernel, frequencies=gp_orff.Auto(max_features=2400))
    before, began = memory(), time.perf_counter()
    workers = {"executor": executor, "checkpoint": path.with_suffix(".partial")}
    if known:
        flow.base_kernel.lengthscale, kernel.scalar_kernel.lengthscale = 50.0, 30.0
        model.kernel.outputscale, model.likelihood.noise = 200.0, 0.01
        model.condition(*data, **workers)
    else:
        model.fit(*data, progress=False, **workers)
    print(model.report)
    print(
        f"\nfit: {time.perf_counter() - began:.1f} s, {memory() - before:.0f} MiB more than before"
    )
    return model, lazy


# %% [markdown]
# ## The map
#
# With `chunks`, `to_xarray` returns Dask arrays; `to_zarr` computes them on the workers, block by
# block: means, standard deviations, and the vorticity with its own.


# %%
def write_map(path, field, lazy, hours):
    """On the grid of the data, in blocks of so many hours.

    Large blocks are quicker: what a block costs beside its points grows with the square of F.
    """
    axes = {name: lazy[name] for name in ("x", "y", "time")}
    attrs = {name: {"units": "m s-1"} for name in ("u", "v")}
    symbols, before, began = {"vorticity": gp_orff.Curl()}, memory(), time.perf_counter()
    found = field.to_xarray(axes, symbols=symbols, attrs=attrs, chunks={"time": hours})
    found.to_zarr(path, mode="w", zarr_format=2)
    seconds = time.perf_counter() - began
    print(f"map: {found.nbytes / 2**20:.0f} MiB in {seconds:.1f} s, ", end="")
    print(f"{memory() - before:.0f} MiB more than before")
    return xarray.open_zarr(path)


def check(found):
    """The share of the truth inside 95 % intervals, at one time, on sea and under the island."""
    there = found.isel(time=found.sizes["time"] // 2).load()
    x, y = xarray.broadcast(there.x, there.y)
    truth = current(x.values, y.values, np.full(x.shape, float(there.time)))
    mean, sd = (np.stack([there[f"u{end}"], there[f"v{end}"]]) for end in ("", "_sd"))
    island = on_island(x.values, y.values)
    for name, where in (("sea", ~island), ("island", island)):
        error = (mean - truth)[:, where]
        inside = (np.abs(error) < 1.96 * sd[:, where]).mean()
        print(f"{name:7} error {np.sqrt((error**2).mean()):.4f} m/s, inside 95 %: {inside:.3f}")
    return there


# %% [markdown]
# ## The figure
#
# The middle of the time: the readings, the map of their mean, and its vorticity, also under the
# island, which is as large as the eddies. The standard deviation is nearly the same everywhere:
# most of it is the truncated variance, that of waves which 2400 features leave out. A sum of thirty
# waves has none of these, so that the intervals hold more than 95 % of this truth. A larger
# `max_features=` makes them shorter, for more memory.


# %%
def draw(there, readings, path):
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), sharey=True, layout="compressed")
    x, y = np.meshgrid(there.x, there.y, indexing="ij")
    points = np.stack([x.ravel(), y.ravel()], axis=-1)
    vectors = np.stack([there.u.values.ravel(), there.v.values.ravel()], axis=-1)
    speed = np.hypot(*vectors.T)
    vorticity = 1e6 * there.vorticity.values.ravel()
    most = float(np.abs(vorticity).max())
    sd = float(there.u_sd.mean())
    speeds = {"label": "speed (m/s)", "norm": matplotlib.colors.Normalize(0, 1.2 * speed.max())}
    noisy = np.hypot(readings.u, readings.v).values.ravel()
    turning = {"norm": matplotlib.colors.Normalize(-most, most), "cmap": "RdBu_r"}
    panels = {
        "readings, none on the island": {"shade": noisy, **speeds},
        "posterior mean": {"shade": speed, **speeds},
        "its vorticity": {"shade": vorticity, "label": "vorticity (10⁻⁶ / s)", **turning},
    }
    for ax, (title, shaded) in zip(axes, panels.items(), strict=True):
        shown = vectors if title == "posterior mean" else None
        plot_field(ax, points, shown, arrows=15, reference="m/s", **shaded)
        ax.add_patch(plt.Circle((60.0, 70.0), 30.0, fill=False, linestyle="--"))
        ax.set_title(f"{title}, sd {sd:.2f} m/s" if shown is not None else title, loc="left")
        ax.set_xlabel("east (km)")
    axes[0].set_ylabel("north (km)")
    figure.savefig(path, dpi=90, bbox_inches="tight")
    print(f"figure: {path}")


# %% [markdown]
# ## All of it
#
# A `LocalCluster` stands for a cluster of many machines, which needs no other line. At smoke size
# the workers are threads.


# %%
def main(arguments):
    size, shape, hours = 120.0, (500, 400, 50), 2
    if arguments.smoke:
        size, shape, hours = 120.0, (25, 20, 12), 3
    folder = arguments.output / "larger_than_memory"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = {"n_workers": arguments.workers, "threads_per_worker": 1, "dashboard_address": ":0"}
    with (
        distributed.LocalCluster(processes=not arguments.smoke, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        write(folder / "observed.zarr", size, shape, hours)
        executor = client.get_executor()
        model, lazy = learn(folder / "observed.zarr", executor, arguments.smoke)
        found = write_map(folder / "map.zarr", model.posterior(), lazy, 2 * hours)
        there = check(found)
        readings = lazy.sel(time=there.time).load()
    draw(there, readings, arguments.output / "larger_than_memory.png")


if __name__ == "__main__":
    main(parser.parse_args())
