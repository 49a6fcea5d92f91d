# %% [markdown]
# # 12. Currents from ships whose errors are correlated
#
# Neighbouring observations of a ship have similar errors, and intervals have the right coverage
# only if the model includes this correlation.
#
# The instrument of a ship may be mounted at a wrong angle, or drift with its temperature.
# Successive observations then have almost the same error. A model that ignores this treats a
# thousand such observations as independent, and its error bars are too small. These are the lines
# to copy:
#
# ```python
# flow = gp_orff.DivergenceFreeKernel(num_dims=2)
# model = gp_orff.VectorFieldGP(flow)
# # ship: a label for each observation; t: hours
# model.fit(x, y, track=ship, time=t)
# field = model.posterior()  # the current, without errors of ships
# model.likelihood(field(xs))  # observations of a new ship
# # learns the offset of another ship while it sails
# model.update(x2, y2, track=other, time=t2)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A map of currents from observations along tracks.",
    allow_abbrev=False,
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
import time
import warnings

import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import (
    DEVIATION,
    STYLE,
    plot_calibration,
    plot_colorbar,
    plot_field,
    title_panels,
)

ships, observations = 12, 300

# %% tags=["remove-cell"]
if arguments.smoke:
    ships, observations = 4, 40

# %% [markdown]
# ## A simulated sea
#
# To test intervals, the true current must be known. We draw it from the prior. It is an
# incompressible current with a standard deviation of 0.3 m/s in each component and a lengthscale of
# 40 km, in a box of 200 km. Ships cross the box on winding courses at 20 km/h, and observe the
# current every two minutes. An observation is the sum of the current and three errors, each with a
# standard deviation of 0.1 m/s:
#
# - an offset of each ship, for example because its heading is wrong by a degree;
# - a drift with a correlation time of one hour;
# - an independent error.

# %%
width, lengthscale, speed = 200.0, 40.0, 20.0  # km, km, km/h
sizes = {"offset": 0.1, "drift": 0.1, "white": 0.1}  # m/s
memory, step = 1.0, 1 / 30  # hours

potential = RBFKernel()
potential.lengthscale = lengthscale
kernel = ScaleKernel(gp_orff.DivergenceFreeKernel(potential, num_dims=2))
kernel.outputscale = (0.3 * lengthscale) ** 2  # of the stream function
box = [(0.0, width), (0.0, width)]
paths = gp_orff.sample_prior(kernel, 1, seed=0, domain=box)
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def current(x):
    """The true current (n, 2) at x (n, 2)."""
    return paths(x)[0]


def cruise():
    """Positions, observations and times of one ship."""
    turns = 0.4 * math.sqrt(step) * normal(observations)
    heading = 2 * math.pi * normal(1) + turns.cumsum(0)
    course = torch.stack([heading.cos(), heading.sin()], dim=-1)
    start = torch.rand(1, 2, generator=generator, dtype=torch.float64)
    x = width * start + speed * step * course.cumsum(0)
    # ships turn at the edges of the box
    x = width - (x % (2 * width) - width).abs()
    fade, drift = math.exp(-step / memory), [normal(2)]
    for kick in normal(observations - 1, 2):
        drift.append(fade * drift[-1] + math.sqrt(1 - fade**2) * kick)
    errors = {
        "offset": normal(1, 2),
        "drift": torch.stack(drift),
        "white": normal(observations, 2),
    }
    y = current(x) + sum(sizes[name] * errors[name] for name in sizes)
    return x, y, step * torch.arange(observations, dtype=torch.float64)


cruises = [cruise() for _ in range(ships + 1)]  # the last ship joins later
x, y, t = (torch.cat(parts) for parts in zip(*cruises[:ships], strict=True))
ship = [f"ship {i + 1}" for i in range(ships) for _ in range(observations)]
print(f"{len(x)} observations of {ships} ships")

# %% [markdown]
# ## With and without tracks
#
# A model with independent errors interprets the drift and the offsets as small eddies of the
# current. Its fit gives a warning that the intervals cover too few held-out observations. This
# warning names `track=` as a remedy. With `track=`, the model separates the three errors from the
# current.

# %%
models = {}
for name, options in {
    "independent": {},
    "tracks": {"track": ship, "time": t},
}.items():
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
print(f"\n{'error':18}{'true':>8}{'learned':>10}")
for name, sd in learned.items():
    print(f"{name:18}{sizes[name]:8.2f}{sd:10.3f}  m/s")
hours = noise.correlation_time.item()
print(f"{'correlation time':18}{memory:8.2f}{hours:10.3f}  h")

# %% [markdown]
# ## Errors and coverage of both maps
#
# We compare the posterior with the true current on a grid over the box. The table has the root mean
# square error, the root mean posterior variance (sd) and the coverage of the 95 % intervals. If a
# model is calibrated, the error and the sd are equal, and the coverage is 0.95.

# %%
side = torch.linspace(0, width, 41, dtype=torch.float64)
grid = torch.cartesian_prod(side, side)
print(f"\n{'model':14}{'RMSE (m/s)':>11}{'sd (m/s)':>10}{'coverage':>10}")
maps, truth, coverage = {}, current(grid), {}
for name, model in models.items():
    field = model.posterior()
    mean, sd = field.mean(grid), field.variance(grid).sqrt()
    maps[name] = mean, sd
    error, width_of_all = (v.square().mean().sqrt() for v in (mean - truth, sd))
    inside = ((mean - truth).abs() < 1.96 * sd).double().mean().item()
    coverage[name] = inside
    print(f"{name:14}{error:11.3f}{width_of_all:10.3f}{inside:10.3f}")

# %% tags=["remove-cell"]
if not arguments.smoke:
    assert coverage["independent"] < 0.8 < 0.88 < coverage["tracks"]

# %% [markdown]
# With tracks, the error is 0.07 m/s instead of 0.22 m/s. The intervals contain 95 % of the true
# values instead of 63 %.
#
# ## A ship that joins later
#
# `update` adds observations of another ship, or more observations of a ship that is already in the
# data. They improve the map of the current and determine the offset of the new ship. The
# hyperparameters do not change. The table has the error of the map along the course of the new
# ship.

# %%
new, model = cruises[-1], models["tracks"]
print(f"\n{'observations added':20}{'RMSE (m/s)':>12}{'sd (m/s)':>10}")
first = 0
for count in (0, observations // 4, observations):
    if count:
        positions, values, times = (part[first:count] for part in new)
        labels = ["another"] * (count - first)
        model.update(positions, values, track=labels, time=times)
        first = count
    field = model.posterior()
    error = field.mean(new[0]) - current(new[0])
    sd = field.variance(new[0]).mean().sqrt()
    print(f"{count:<20}{error.square().mean().sqrt():12.3f}{sd:10.3f}")

# %% [markdown]
# ## Maps of the error
#
# The maps are for the models without the other ship. Arrows show the posterior mean, and the colour
# shows the length of its error. Panel b shows the coverage of intervals of all levels. The coverage
# of a calibrated model is inside the grey band with a probability of 95 % at each level. For this
# band, we assume 60 independent values, because errors at neighbouring points are correlated. These
# are about two values for each square with a side of one lengthscale.

# %%
errors = {name: (mean - truth).norm(dim=-1) for name, (mean, _) in maps.items()}
norm = plt.Normalize(0, max(error.max() for error in errors.values()).item())
with plt.rc_context(STYLE):
    figure, panels = plt.subplots(2, 2, figsize=(7.2, 6.2), layout="compressed")
    true, covered, *mapped = panels.flat
    for course, *_ in cruises[:ships]:
        true.plot(*course.T, color="#D55E00", lw=1.0)
    plot_field(true, grid, truth, arrows=16, reference="m/s")
    colors = {"independent": "#D55E00", "tracks": "#0072B2"}
    for ax, (name, (mean, sd)) in zip(mapped, maps.items(), strict=True):
        shaded = plot_field(
            ax,
            grid,
            mean,
            shade=errors[name],
            norm=norm,
            cmap=DEVIATION,
            colorbar=False,
            arrows=16,
            reference="m/s",
        )
        pit = torch.special.ndtr((truth - mean) / sd).flatten()
        style = {"label": name, "color": colors[name]}
        plot_calibration(covered, pit, independent=60, **style)
    plot_colorbar(mapped[1], shaded, "error of the mean (m/s)")
    covered.legend(loc="lower right")
    covered.set_ylabel("coverage of the truth")
    for ax in (true, *mapped):
        ax.set(xlabel="east (km)", ylabel="north (km)")
        ax.set(xlim=box[0], ylim=box[1], xticks=range(0, 201, 50))
    title_panels(
        panels,
        [
            "true current and ships",
            "coverage",
            "independent errors",
            "tracks",
        ],
    )

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
with plt.rc_context(STYLE):
    figure.savefig(arguments.output / "tracks.png", dpi=150)
    figure.savefig(arguments.output / "tracks.pdf")
    title = covered.get_title(loc="left")[4:]  # without the letter
    covered.set_title(title, loc="left")
    card = covered.get_tightbbox()
    card = card.transformed(figure.dpi_scale_trans.inverted())
    figure.savefig(
        arguments.output / "tracks_card.png",
        dpi=150,
        bbox_inches=card.padded(0.05),
    )
print(f"\nfigure: {arguments.output}/tracks.png")
