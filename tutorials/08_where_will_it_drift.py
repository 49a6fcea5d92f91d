# %% [markdown]
# # 8. Where will it drift?
#
# Samples of the posterior current predict a cloud of positions for a floating object, and this
# cloud is half as large if the model includes the shore.
#
# An object floats in a lake, and some drifters have observed the current along short tracks. Where
# will the object be tomorrow? The mean current predicts one point, and samples of the posterior
# predict a cloud of points. How much smaller is the cloud if the model knows that no water crosses
# the shore? Does the cloud contain the true position? These are the lines to copy:
#
# ```python
# kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
# model = gp_orff.VectorFieldGP(kernel).fit(x, y)
#
# # no current across the shore, with a known noise in (cm/s)²
# model.likelihoods["shore"] = GaussianLikelihood()
# model.likelihoods["shore"].noise = 0.1**2
# shore = {"x": points, "y": zeros, "directions": normals}
# shore["group"] = "shore"
# field = model.condition([(x, y), shore]).posterior()
#
# # paths(xs): (200, n, 2)
# paths = field.sample_paths(200)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="Clouds of arrival points in a lake.", allow_abbrev=False
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own

# %%
import math
from functools import partial

import torch
from gpytorch.likelihoods import GaussianLikelihood
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from torch.nn.functional import grid_sample

import gp_orff
from gp_orff.plotting import (
    STYLE,
    plot_deviation,
    plot_field,
    plot_streamlines,
    title_panels,
)

num_lakes, num_paths = 5, 200

# %% tags=["remove-cell"]
if arguments.smoke:
    num_lakes, num_paths = 1, 50

# %% [markdown]
# ## Lakes with a known current
#
# The lakes are squares of 10 × 10 km. The stream function is a sum of sin(iπx/10) sin(jπy/10) with
# random amplitudes. It is zero on the shore, so that no water crosses the shore. The current is
# steady. It has a root mean square (rms) of 10 cm/s and a lengthscale of 2 km.
#
# In each of five lakes, 30 drifters start at random positions. Their velocities are observed at the
# start and every hour for 4 hours, with a noise of 2 cm/s.

# %%
side, noise, hours = 10.0, 2.0, 24  # km, cm/s, h
km_per_hour = 0.036  # 1 cm/s in km/h
drawn = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
wave = math.pi / side * torch.arange(1, 9, dtype=torch.float64)  # rad/km
square = wave[:, None].square() + wave.square()
lakes = torch.randn(num_lakes, 8, 8, **drawn) * torch.exp(
    -0.25 * 2.0**2 * square
)
rms = (0.25 * square * lakes.square()).sum((1, 2), keepdim=True).sqrt()
lakes *= 10.0 / rms  # cm/s km


def current(lake, x):
    """The velocity at x (..., 2), in cm/s, from the stream function."""
    angle = x[..., None] * wave  # (..., 2, 8)
    sin_x, sin_y = angle.sin().unbind(-2)
    cos_x, cos_y = angle.cos().unbind(-2)
    total = "...i,ij,...j->..."
    east = torch.einsum(total, sin_x, lake * wave, cos_y)
    north = torch.einsum(total, cos_x, lake * wave[:, None], sin_y)
    return torch.stack([east, -north], dim=-1)


def advect(velocity, x, hours):
    """Positions (1 + hours, ..., 2) of particles that start at x."""
    trail = [x]
    for _ in range(hours):  # Runge-Kutta of order 4
        k1 = km_per_hour * velocity(x)
        k2 = km_per_hour * velocity(x + 0.5 * k1)
        k3 = km_per_hour * velocity(x + 0.5 * k2)
        k4 = km_per_hour * velocity(x + k3)
        trail.append(x := x + (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(trail)


# %% [markdown]
# ## Observations of the shore
#
# We pass the shore to the model as observations. At 24 points on each side, the velocity along the
# normal is zero. These observations are a group with a separate noise, which we set to 0.1 cm/s.
# The velocity along the shore is not observed.
#
# `fit` learns the hyperparameters from the drifters only. `condition` then adds the shore and does
# not change the hyperparameters. We do not learn them from the shore, because zeros on all sides
# resemble a current that is smoother than the true current. For comparison, a second model learns
# its hyperparameters from the shore too.

# %%
along = side * (torch.arange(24, dtype=torch.float64) + 0.5) / 24
ends = torch.tensor([0, side], dtype=torch.float64)
points = torch.cat(
    [torch.cartesian_prod(along, ends), torch.cartesian_prod(ends, along)]
)
north, east = torch.eye(2, dtype=torch.float64)[[1, 0]]
normals = torch.stack([north, east]).repeat_interleave(48, dim=0)
shore = {"x": points, "y": 0 * points[:, 0], "directions": normals}
shore["group"] = "shore"
kernel, cases = partial(gp_orff.DivergenceFreeKernel, num_dims=2), []
for lake in lakes:
    starts = side * torch.rand(30, 2, **drawn)
    x = advect(partial(current, lake), starts, 4).flatten(0, 1)
    y = current(lake, x) + noise * torch.randn(*x.shape, **drawn)
    model, other = (gp_orff.VectorFieldGP(kernel()) for _ in range(2))
    fields = {"drifters only": model.fit(x, y, progress=False).posterior()}
    for each in (model, other):
        each.likelihoods["shore"] = GaussianLikelihood().requires_grad_(False)
        each.likelihoods["shore"].noise = 0.1**2  # (cm/s)²
    data = [(x, y), shore]
    fields["with the shore"] = model.condition(data).posterior()
    fields["learned from it"] = other.fit(data, progress=False).posterior()
    cases.append((lake, x, y, fields))

# %% [markdown]
# The first columns of the table are the rms error of a component inside the lake and the rms
# posterior standard deviation (sd), both in cm/s. The next column is the coverage of the 95 %
# intervals. The last column is the rms of the posterior mean velocity across the shore (cm/s),
# between the observed points.

# %%
inside = side * torch.rand(2000, 2, **drawn)
border = points + side / 96 * (1 - normals)
table, drift = {}, {}
print(f"{'':18}{'error':>8}{'sd':>8}{'95 %':>8}{'across':>8}")
for name in fields:
    error, variance, across = [], [], []
    for lake, _, _, fields in cases:
        field = fields[name]
        error.append((field.mean(inside) - current(lake, inside)).square())
        variance.append(field.variance(inside))
        across.append((field.mean(border) * normals).sum(-1).square())
    squares = [torch.stack(each) for each in (error, variance, across)]
    covered = (squares[0] < 1.96**2 * squares[1]).double().mean()
    rms = [each.mean().sqrt() for each in squares]
    table[name] = rms[0], rms[1], covered, rms[2]
    print(f"{name:18}" + "".join(f"{value:8.3f}" for value in table[name]))
assert table["with the shore"][0] < 0.8 * table["drifters only"][0]
assert table["with the shore"][3] < 0.1 < 1 < table["drifters only"][3]

# %% [markdown]
# The shore reduces the error by a third. If the hyperparameters are learned from the shore too, the
# intervals are too narrow.
#
# ## Particles in two hundred currents
#
# Each sample path is a current that agrees with the observations. In each of these currents, one
# particle drifts. `paths(x)` evaluates every path at every point, but a particle needs only one
# path. We therefore evaluate the paths once on a lattice with a spacing of 0.2 km, and interpolate.
#
# There are 20 random starts in every lake. From each start, one particle drifts for 24 hours in the
# true current, and one in every sample path. As a check, we evaluate the paths without the lattice
# for the first start in the last lake.

# %%
edge = torch.linspace(-1, side + 1, 61, dtype=torch.float64)
lattice = torch.cartesian_prod(edge, edge)


def on_lattice(paths):
    """The velocity as a function of x (S, n, 2), row s for path s."""
    images = paths(lattice).unflatten(1, (61, 61))
    images = images.permute(0, 3, 2, 1)  # (S, 2, y, x)

    def velocity(x):
        scaled = (2 * x - side) / (side + 2)  # from -1 to 1 on the lattice
        how = {"align_corners": True, "padding_mode": "border"}
        return grid_sample(images, scaled.unsqueeze(2), **how).squeeze(-1).mT

    return velocity


trails = {"drifters only": [], "with the shore": []}
for lake, _, _, fields in cases:
    starts = side * torch.rand(20, 2, **drawn)
    truth = advect(partial(current, lake), starts, hours)
    for name, results in trails.items():
        paths = fields[name].sample_paths(num_paths, seed=0)
        first = starts.expand(num_paths, -1, -1)
        cloud = advect(on_lattice(paths), first, hours)
        single = advect(fields[name].mean, starts, hours)
        results.append((truth, cloud, single))


def one_each(x):
    """The velocity of path s at the particle s of x (S, 2)."""
    return paths(x).diagonal().mT


direct = advect(one_each, first[:, 0], hours)
change = 1000 * (direct - cloud[:, :, 0])[-1].norm(dim=-1).median().item()
print(f"\nthe lattice moves an arrival by {change:.0f} m in the median")
assert change < 100

# %% [markdown]
# An *arrival* is the position of a particle after 24 hours. The first columns of the table are
# medians over the starts, in km. They are the distance between the true arrival and the arrival in
# the mean current, and the size of the cloud. The size is the rms distance of the arrivals in a
# cloud from their centre. The next column is the fraction of particles that were outside the lake
# at some hour.
#
# The last columns are the coverage. This is the fraction of starts for which the true arrival is in
# the inner 50 % or 95 % of its cloud, by Mahalanobis distance.

# %%
print(
    f"\n{'':18}",
    *(f"{w:>7}" for w in ("miss", "cloud", "left", "50 %", "95 %")),
)
for name, results in trails.items():
    truth, cloud, single = (
        torch.cat(parts, dim=-2) for parts in zip(*results, strict=True)
    )
    miss = (single - truth)[-1].norm(dim=-1).median()
    size = cloud[-1].var(0, correction=0).sum(-1).sqrt().median()
    left = ((cloud < 0) | (cloud > side)).any(-1).any(0).double().mean()
    pool = torch.cat([cloud[-1], truth[-1:]])
    pool = (pool - pool.mean(0)).movedim(0, 1)  # (starts, paths and truth, 2)
    distance = (pool @ torch.linalg.inv(pool.mT @ pool) * pool).sum(-1)
    farther = (distance[:, :-1] > distance[:, -1:]).double().mean(1)
    covered = [(farther > share).double().mean() for share in (0.5, 0.05)]
    drift[name] = miss, size, left, *covered
    print(f"{name:18}" + "".join(f"{value:8.3f}" for value in drift[name]))
alone, both = drift.values()
assert both[1] < 0.7 * alone[1]
assert both[2] < 0.2 * alone[2]
assert both[4] > 0.6  # 20 particles in each lake

# %% [markdown]
# - With the shore, the clouds are half as large, and nearly all particles stay in the lake.
# - The clouds are slightly too small. The reason is that the true currents are faster along the
#   shore than inside the lake, but the kernel is stationary.
#
# ## Three drifters in the first lake
#
# Each colour is one start. The orange cloud is divided between two eddies, and the path in the mean
# current ends in the wrong one. The green start is near the shore. Its cloud extends over land
# unless the model includes the shore.

# %%
plt.style.use(STYLE)
figure, axes = plt.subplots(2, 2, figsize=(7.2, 7), layout="compressed")
maps, drifts = axes
lake, x, y, fields = cases[0]
line = torch.linspace(0, side, 61, dtype=torch.float64)
grid, field = torch.cartesian_prod(line, line), fields["with the shore"]
truth = current(lake, grid)
plot_field(maps[0], grid, shade=truth.norm(dim=-1), label="speed (cm/s)")
plot_streamlines(maps[0], grid, truth)
maps[0].plot(*x.T, "o", ms=2.5, mew=0.3, mec="white", color="#D55E00")
sd = field.variance(grid).sum(-1).sqrt()
plot_deviation(maps[1], grid, sd, label="sd of the current (cm/s)")
plot_streamlines(maps[1], grid, field.mean(grid))
low, high = -side / 2, side + 1
for ax, name in zip(drifts, trails, strict=True):
    truth, cloud, single = trails[name][0]
    for k, color in enumerate(("#D55E00", "#0072B2", "#009E73")):
        ax.scatter(*cloud[-1, :, k].T, s=5, fc=color, alpha=0.5, lw=0)
        ax.plot(*truth[:, k].T, color=color, lw=1.2)
        top = {"zorder": 3, "clip_on": False}
        ax.scatter(*truth[0, k], s=20, fc="white", ec=color, lw=1.5, **top)
        ax.scatter(*single[-1, k], s=40, marker="X", fc=color, ec="w", **top)
        ax.scatter(*truth[-1, k], s=70, marker="*", fc=color, ec="k", **top)
    arrivals = cloud[-1, :, :3].flatten(0, 1)
    beyond = ((arrivals < low) | (arrivals > high)).any(-1).sum()
    note = f"{beyond} of {len(arrivals)} arrivals are outside the panel"
    ax.text(low + 0.3, side + 0.3, note, fontsize="small")
    ax.add_patch(plt.Rectangle((0, 0), side, side, fill=False, lw=1.2))
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
gray = {"color": "0.4", "ls": ""}
key = {
    "start": {**gray, "marker": "o", "mfc": "white"},
    "true track": {"color": "0.4"},
    "true arrival": {**gray, "marker": "*", "ms": 8, "mec": "k"},
    "arrival, mean current": {**gray, "marker": "X", "mec": "w"},
    f"arrivals, {num_paths} samples": {**gray, "marker": "o", "ms": 3},
}
handles = [Line2D([], [], label=label, **style) for label, style in key.items()]
below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
below |= {"ncols": 3, "columnspacing": 1, "handletextpad": 0.4}
for ax, own in zip(drifts, (handles[:3], handles[3:]), strict=True):
    ax.legend(handles=own, **below)
plt.setp(axes, xlabel="east (km)", ylabel="north (km)")
titles = [
    "true current, and observations",
    "posterior mean and sd, with the shore",
    f"{hours} h later: drifters only",
    f"{hours} h later: with the shore",
]
title_panels(axes, titles)

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "where_will_it_drift.png")
figure.savefig(arguments.output / "where_will_it_drift.pdf")
title = drifts[1].get_title(loc="left")[4:]  # without the letter
drifts[1].set_title(title, loc="left")
card = drifts[1].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    arguments.output / "where_will_it_drift_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {arguments.output}/where_will_it_drift.png")
