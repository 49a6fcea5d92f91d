# %% [markdown]
# # 12. Tracks: when the errors of neighbouring readings are alike
#
# Ships, gliders and robots read a field along tracks. Their errors are not independent: an
# instrument is mounted a little askew, drifts with its temperature, and carries the same error to
# the next reading. A model that does not know takes a thousand such readings for a thousand pieces
# of evidence. How wrong are its error bars, and what changes if it is told which readings are of
# one track?
#
# The lines to copy:
#
# ```python
# model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
# model.fit(x, y, track=ship, time=t)     # ship: a label for each reading; t: hours
# field = model.posterior()               # the current, without the errors of any ship
# model.likelihood(field(xs))             # readings of a ship that has not been there yet
# model.update(x2, y2, track=other, time=t2)   # learns the offset of the other ship as it goes
# ```

# %%
import argparse
import math
import time
import warnings
from pathlib import Path

import matplotlib
import torch

import gp_orff
from gp_orff.plotting import plot_calibration, plot_colorbar, plot_field

parser = argparse.ArgumentParser(description="A map of currents from readings along tracks.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
ships, readings = (4, 40) if arguments.smoke else (12, 300)

# %% [markdown]
# ## A sea whose currents we know
#
# To see whether error bars hold we need the truth: an incompressible current of 0.3 m/s in each
# component, whose eddies are some 40 km wide, in a box of 200 km. Ships cross it on winding courses
# at 20 km/h, with a reading every two minutes. A reading is the current and three errors:
#
# - an offset of each ship, 0.1 m/s in each component, such as a heading that is off by a degree,
# - a drift that is forgotten within an hour, 0.1 m/s,
# - independent errors, 0.1 m/s.

# %%
generator = torch.Generator().manual_seed(0)
width, lengthscale, speed = 200.0, 40.0, 20.0  # km, km, km/h
sizes = {"offset": 0.1, "drift": 0.1, "white": 0.1}  # m/s
memory, step = 1.0, 1 / 30  # hours


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


waves, phases = normal(500, 2) / lengthscale, 2 * math.pi * normal(500)
across = torch.stack([-waves[:, 1], waves[:, 0]], dim=-1)  # no divergence


def current(x):
    """A Gaussian field, (n, 2): the rotated gradient of a sum of many waves."""
    return 0.3 * lengthscale * math.sqrt(2 / len(waves)) * torch.sin(x @ waves.T + phases) @ across


def cruise():
    """Positions, readings and times of one ship."""
    heading = 2 * math.pi * normal(1) + 0.4 * math.sqrt(step) * normal(readings).cumsum(0)
    course = torch.stack([heading.cos(), heading.sin()], dim=-1)
    start = torch.rand(1, 2, generator=generator, dtype=torch.float64)
    x = width * start + speed * step * course.cumsum(0)
    x = width - (x % (2 * width) - width).abs()  # ships turn at the edges of the box
    fade, drift = math.exp(-step / memory), [normal(2)]
    for kick in normal(readings - 1, 2):
        drift.append(fade * drift[-1] + math.sqrt(1 - fade**2) * kick)
    errors = {"offset": normal(1, 2), "drift": torch.stack(drift), "white": normal(readings, 2)}
    y = current(x) + sum(sizes[name] * error for name, error in errors.items())
    return x, y, step * torch.arange(readings, dtype=torch.float64)


cruises = [cruise() for _ in range(ships + 1)]
x, y, t = (torch.cat(parts) for parts in zip(*cruises[:ships], strict=True))
ship = [f"ship {i + 1}" for i in range(ships) for _ in range(readings)]
print(f"{len(x)} readings of {ships} ships")

# %% [markdown]
# ## With and without tracks
#
# To a model of independent errors, drift and offsets are small eddies of the current: it follows
# them. A model that knows the tracks learns the three errors apart from the current.

# %%
models = {}
for name, options in {"independent": {}, "tracks": {"track": ship, "time": t}}.items():
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, progress=False, **options)
    models[name] = model
    print(f"\n{name}: {time.perf_counter() - began:.1f} s")
    for warning in caught:
        print(f"{warning.category.__name__}: {warning.message}")

noise = models["tracks"].likelihood
learned = {
    "offset": noise.offset_variance.sqrt().item(),
    "drift": noise.correlated_variance.sqrt().item(),
    "white": noise.noise.sqrt().item(),
}
print(f"\n{'error':12}{'true':>8}{'learned':>10}")
for name, sd in learned.items():
    print(f"{name:12}{sizes[name]:8.2f}{sd:10.3f}  m/s")
print(f"{'memory':12}{memory:8.2f}{noise.correlation_time.item():10.3f}  h")

# %% [markdown]
# ## Do the error bars hold?
#
# On a grid over the box, against the true current: the root mean square error, the root mean
# posterior variance, and the share of the truth inside 95 % intervals. A calibrated model has equal
# error and sd, and 0.95 inside.

# %%
side = torch.linspace(0, width, 41, dtype=torch.float64)
grid = torch.cartesian_prod(side, side)
print(f"\n{'model':14}{'error':>8}{'sd':>8}{'inside':>8}")
maps, truth, inside = {}, current(grid), {}
for name, model in models.items():
    field = model.posterior()
    mean, sd = maps[name] = field.mean(grid), field.variance(grid).sqrt()
    inside[name] = ((mean - truth).abs() < 1.96 * sd).double().mean().item()
    error, spread = (mean - truth).square().mean().sqrt(), sd.square().mean().sqrt()
    print(f"{name:14}{error:8.3f}{spread:8.3f}{inside[name]:8.3f}")
if not arguments.smoke:
    assert inside["independent"] < 0.8 < 0.88 < inside["tracks"]

# %% [markdown]
# ## A ship that joins later
#
# `update` takes readings of another ship, and continues its track where it knows it already. They
# tell of the current and of the ship's own offset; nothing is fitted again.

# %%
new, others = cruises[-1], models["tracks"]
print(f"\n{'readings of the new ship':28}{'error of the map':>18}{'sd':>8}")
for count in (0, readings // 4, readings):
    if count:
        first = 0 if count == readings // 4 else readings // 4
        part = slice(first, count)
        labels = ["another"] * (count - first)
        others.update(new[0][part], new[1][part], track=labels, time=new[2][part])
    field = others.posterior()
    miss, variance = field.mean(new[0]) - current(new[0]), field.variance(new[0])
    print(f"{count:<28}{miss.square().mean().sqrt():18.3f}{variance.mean().sqrt():8.3f}")

# %% [markdown]
# ## The figure: the maps of the table, before the other ship

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

plt.rcParams["axes.titlesize"] = "medium"
figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.2), layout="compressed")
shared = {"norm": matplotlib.colors.Normalize(0, 0.3), "cmap": "cividis", "colorbar": False}
titles, colors = ("independent errors", "tracks"), ("#D55E00", "#0072B2")
for ax, title, color, (name, (mean, sd)) in zip(
    axes[:2], titles, colors, maps.items(), strict=True
):
    miss = (mean - truth).norm(dim=-1)
    shaded = plot_field(ax, grid, mean, shade=miss, arrows=18, reference="m/s", **shared)
    for course, *_ in cruises[:ships]:
        (track,) = ax.plot(*course.T, color="#F5A3C7", lw=0.9)
    ax.set_title(f"mean, {title}", loc="left")
    ax.set(xlabel="x (km)", ylabel="y (km)", xlim=grid[[0, -1], 0], ylim=grid[[0, -1], 1])
    pit = torch.special.ndtr((truth - mean) / sd).flatten()
    plot_calibration(axes[2], pit, independent=60, label=name, color=color)
plot_colorbar(axes[1], shaded, "error of the mean (m/s)", extend="max")
below = {"loc": "upper right", "bbox_to_anchor": (1.02, -0.1), "frameon": False}
axes[0].legend([track], [f"the {ships} ships"], **below)
axes[2].legend(loc="lower right", frameon=False)
axes[2].set(title="does the map hold the truth?", ylabel="share of the truth inside")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "tracks.png", dpi=110, bbox_inches="tight")
print(f"\nfigure: {arguments.output}/tracks.png")
