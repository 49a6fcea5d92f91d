# %% [markdown]
# # 14. Data and maps that are larger than memory
#
# Workers fit a model to a Zarr store that is larger than memory, and write a map of the result to
# another store.
#
# On a frequency grid, a model needs only sums over the observations. Workers compute these sums
# from blocks of the data, and later compute the map in blocks. No process loads all data or the
# complete map. These are the lines to copy:
#
# ```python
# client = distributed.Client()  # of a cluster, or of this machine
# data = gp_orff.labelled.readings(
#     xarray.open_zarr(path), ["u", "v"], ["x", "y", "time"]
# )
# executor = client.get_executor()
# model.fit(*data, executor=executor, checkpoint="sums.partial")
# found = model.posterior().to_xarray(axes, chunks={"time": 10})
# found.to_zarr(path_of_map)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A Zarr store of currents, two workers, and a map.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--workers", type=int, default=2)
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own

# %%
import math
import resource
import shutil
import time
from pathlib import Path

import dask.array
import distributed
import numpy as np
import xarray
from gpytorch.kernels import RBFKernel
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import STYLE, plot_field, plot_map, title_panels

folder = Path("tutorials/output/larger_than_memory")
shape, hours = (500, 400, 50), 2  # points in x, y and time; hours of a block
features = gp_orff.Auto(max_features=2400)
cluster_options = {"n_workers": 2, "threads_per_worker": 1}

# %% tags=["remove-cell"]
folder = arguments.output / "larger_than_memory"
cluster_options |= {
    "n_workers": arguments.workers,
    "processes": not arguments.smoke,
    "dashboard_address": ":0",
}
if arguments.smoke:
    shape, hours = (25, 20, 12), 3
    features = gp_orff.Auto(max_features=200)

# %% [markdown]
# ## A store of 10⁷ points
#
# A region of 150 × 120 km is observed for 50 hours. It contains an island without data. The current
# is a sum of 30 waves without divergence, with lengthscales of 50 km and 30 h. The noise has a
# standard deviation of 0.1 m/s. The workers write the store, in blocks of two hours.


# %%
def current(x, y, t):
    """The true velocity, in m/s."""
    rng, (u, v) = np.random.default_rng(1), np.zeros((2, *x.shape))
    for _ in range(30):
        along, across = rng.normal(size=2) / 50.0
        phase = along * x + across * y + rng.normal() / 30.0 * t
        phase += 2 * math.pi * rng.random()
        u -= 4.0 * across * np.cos(phase)
        v += 4.0 * along * np.cos(phase)
    return np.stack([u, v])


def on_island(x, y):
    return (x - 60.0) ** 2 + (y - 70.0) ** 2 < 30.0**2


def observed(block):
    """Velocities with noise on a block of the grid, NaN on the island."""
    x, y, t = xarray.broadcast(block.x, block.y, block.time)
    values = current(x.values, y.values, t.values)
    rng = np.random.default_rng(round(float(block.time[0])))
    values += 0.1 * rng.normal(size=values.shape)
    u, v = np.where(on_island(x.values, y.values), np.nan, values)
    return xarray.Dataset({"u": (x.dims, u), "v": (x.dims, v)}, block.coords)


def write(path):
    """The store, in blocks of so many hours."""
    ends = {"x": (150, "km"), "y": (120, "km"), "time": (shape[2] - 1, "h")}
    coords = {
        name: (name, np.linspace(0.0, end, count), {"units": unit})
        for (name, (end, unit)), count in zip(ends.items(), shape, strict=True)
    }
    empty = dask.array.zeros(shape, chunks=(*shape[:2], hours))
    velocity = (tuple(coords), empty, {"units": "m s-1"})
    template = xarray.Dataset({"u": velocity, "v": velocity}, coords)
    filled = template.map_blocks(observed, template=template)
    filled.to_zarr(path, mode="w", zarr_format=2)


# %% [markdown]
# ## The fit
#
# If a Dataset consists of Dask arrays, `readings` does not load it. It returns chunks that are
# loaded later. `fit` sends these chunks to the workers, a few at a time, and adds the sums that the
# workers return. The first pass computes the extent of the data and a sample, and the second pass
# computes the statistics. If the fit is interrupted, call it again: it continues from the file
# `checkpoint`.


# %%
def memory():
    """The most memory that this process has used so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def learn(path, executor):
    lazy = xarray.open_zarr(path)
    data = gp_orff.labelled.readings(lazy, ["u", "v"], ["x", "y", "time"])
    mebibytes = lazy.nbytes / 2**20
    print(f"{lazy.u.size} points, {len(data[0])} blocks, {mebibytes:.0f} MiB")
    flow = gp_orff.DivergenceFreeKernel(num_dims=2, active_dims=[0, 1])
    kernel = gp_orff.FieldProductKernel(flow, RBFKernel(active_dims=[2]))
    model = gp_orff.VectorFieldGP(kernel, frequencies=features)
    before, began = memory(), time.perf_counter()
    model.fit(
        *data,
        executor=executor,
        checkpoint=path.with_suffix(".partial"),
        progress=False,
    )
    print(model.report)
    seconds, more = time.perf_counter() - began, memory() - before
    print(f"\nfit: {seconds:.1f} s, {more:.0f} MiB more than before")
    return model, lazy


# %% [markdown]
# ## The map
#
# With `chunks=`, `to_xarray` returns Dask arrays. `to_zarr` computes them on the workers, block by
# block: the mean, the vorticity, and the standard deviations of both. Use large blocks, because
# each block has a fixed cost that grows with the square of the number of features.


# %%
def write_map(path, field, lazy):
    """Write the map on the grid of the data, and open it."""
    axes = {name: lazy[name] for name in ("x", "y", "time")}
    attrs = {name: {"units": "m s-1"} for name in ("u", "v")}
    before, began = memory(), time.perf_counter()
    found = field.to_xarray(
        axes,
        symbols={"vorticity": gp_orff.Curl()},
        attrs=attrs,
        chunks={"time": 2 * hours},
    )
    found.to_zarr(path, mode="w", zarr_format=2)
    seconds, more = time.perf_counter() - began, memory() - before
    print(f"map: {found.nbytes / 2**20:.0f} MiB in {seconds:.1f} s,", end=" ")
    print(f"{more:.0f} MiB more than before")
    return xarray.open_zarr(path)


def check(found):
    """Error and coverage of a map of one time."""
    x, y = xarray.broadcast(found.x, found.y)
    truth = current(x.values, y.values, np.full(x.shape, float(found.time)))
    mean, sd = (
        np.stack([found[f"u{end}"], found[f"v{end}"]]) for end in ("", "_sd")
    )
    island = on_island(x.values, y.values)
    print(f"{'':8}{'RMSE (m/s)':>12}{'sd (m/s)':>12}{'coverage':>10}")
    for name, rows in (("sea", ~island), ("island", island)):
        error, width = (mean - truth)[:, rows], sd[:, rows]
        coverage = (np.abs(error) < 1.96 * width).mean()
        rmse, width = (np.sqrt((v**2).mean()) for v in (error, width))
        print(f"{name:8}{rmse:12.4f}{width:12.4f}{coverage:10.3f}")


# %% [markdown]
# ## A map of one time
#
# The figure shows the observed speed, the posterior mean and its vorticity at the middle of the
# record. The maps include the island, which is as large as the eddies. Hatches mark places where
# the 95 % interval of the vorticity contains zero.


# %%
def draw(observed, found):
    """Three maps of one time."""
    x = np.stack(np.meshgrid(found.x, found.y, indexing="ij"), axis=-1)
    x, vectors = x.reshape(-1, 2), np.stack([found.u, found.v], axis=-1)
    vectors = vectors.reshape(-1, 2)
    noisy = np.hypot(observed.u, observed.v).values.ravel()
    vorticity, sd = (
        1e6 * found[name].values.ravel()
        for name in ("vorticity", "vorticity_sd")
    )
    speed = {"norm": plt.Normalize(0, 1), "label": "speed (m/s)"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 3, figsize=(7.2, 2.4), layout="compressed"
        )
        plot_field(axes[0], x, shade=noisy, colorbar=False, **speed)
        axes[0].text(60, 70, "island:\nno data", ha="center", va="center")
        length = np.hypot(*vectors.T)
        arrows = {"arrows": 12, "reference": "m/s"}
        plot_field(axes[1], x, vectors, shade=length, **speed, **arrows)
        plot_map(axes[2], x, vorticity, sd, label="vorticity (10⁻⁶ s⁻¹)")
        for ax in axes:
            island = plt.Circle((60, 70), 30, fill=False, linestyle="--")
            ax.add_patch(island)
            ax.set_xlabel("east (km)")
            ax.set(xticks=[0, 50, 100, 150], yticks=[0, 40, 80, 120])
        axes[0].set_ylabel("north (km)")
        title_panels(
            axes,
            [
                "observed speed\nin one of 50 hours",
                "posterior mean\nof velocity",
                "posterior mean\nof vorticity",
            ],
        )
    return figure, axes


# %% [markdown]
# ## All steps
#
# We use a `LocalCluster` instead of a cluster of many machines. With a real cluster, no other line
# changes. In a script, the processes of a `LocalCluster` import the file, so start the cluster
# under `if __name__ == "__main__"`.


# %%
if __name__ == "__main__":
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with (
        distributed.LocalCluster(**cluster_options) as cluster,
        distributed.Client(cluster) as client,
    ):
        write(folder / "observed.zarr")
        model, lazy = learn(folder / "observed.zarr", client.get_executor())
        found = write_map(folder / "map.zarr", model.posterior(), lazy)
        found = found.isel(time=shape[2] // 2).load()
        sea = lazy.sel(time=found.time).load()
    check(found)
    figure, axes = draw(sea, found)

# %% [markdown]
# The intervals contain more than 95 % of the true field. Most of the posterior variance is
# truncated variance, from the short waves that 2400 features omit. The true field is a sum of
# thirty waves and does not contain such waves. With a larger `max_features=`, the intervals are
# narrower, but the fit needs more memory.

# %% tags=["remove-cell"]
if __name__ == "__main__":
    with plt.rc_context(STYLE):
        figure.savefig(arguments.output / "larger_than_memory.png", dpi=200)
        figure.savefig(arguments.output / "larger_than_memory.pdf")
        title = axes[1].get_title(loc="left")[4:]  # without the letter
        axes[1].set_title(title, loc="left")
        card = axes[1].get_tightbbox()
        card = card.transformed(figure.dpi_scale_trans.inverted())
        figure.savefig(
            arguments.output / "larger_than_memory_card.png",
            dpi=150,
            bbox_inches=card.padded(0.05),
        )
    print(f"figure: {arguments.output}/larger_than_memory.png")
