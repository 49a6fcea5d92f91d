# %% [markdown]
# # 5. Gaps and outliers
#
# With Student-t noise, one wrong vector in ten does not make a map less accurate, and the model
# identifies the wrong vectors.
#
# Components may be missing too. These are the lines to copy:
#
# ```python
# model = gp_orff.VectorFieldGP(
#     gp_orff.DivergenceFreeKernel(num_dims=2),
#     likelihood=gp_orff.MultitaskStudentTLikelihood(num_tasks=2),
# )
#
# # NaN marks components that were not observed
# model.fit(x, y, missing="mask")
#
# # detect outliers
# p_value = model.leave_one_out(x, y, missing="mask").p_value
# bad = p_value < 1e-3
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A map from vectors with gaps and outliers.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own
folder = Path("tutorials") if Path("tutorials").exists() else Path()

# %%
import math
import time
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch.distributions import Normal, StudentT

import gp_orff
from gp_orff.plotting import (
    DEVIATION,
    MAGNITUDE,
    STYLE,
    plot_colorbar,
    plot_field,
    title_panels,
)

share = 1.0  # fraction of the vectors that is used

# %% tags=["remove-cell"]
if arguments.smoke:
    share = 0.03

# %% [markdown]
# ## The data, with artificial gaps and errors
#
# The data are the displacements behind a wing tip from tutorial 01, in pixels. We change them as
# follows:
#
# - A fifth of the vectors is held out.
# - All vectors in a disc are removed, as if a reflection had hidden them.
# - One in ten of the other vectors gets an error of 5 to 15 pixels in a random direction, which is
#   larger than most displacements.
# - One in twenty loses its first component, one in twenty its second, and one in twenty both.
#
# In the core of the vortex, many of the original vectors are wrong, and the truth is not known. The
# scores therefore exclude the core. They also exclude other vectors that fail the normalised median
# test (Westerweel & Scarano 2005). The models do not know the core or the result of the test.

# %%
path = folder / "data" / "wing_tip_vortex.csv"
columns = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
position, displacement = columns[:, :2], columns[:, 2:]


def passes_median_test(field, threshold=2.0, noise=0.1):
    """Whether each vector of a (rows, columns, 2) grid agrees with its neighbours."""
    padded = np.pad(field, ((1, 1), (1, 1), (0, 0)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, (3, 3), axis=(0, 1)
    )
    neighbours = np.delete(windows.reshape(*field.shape, 9), 4, axis=-1)
    median = np.nanmedian(neighbours, axis=-1)
    scale = np.nanmedian(abs(neighbours - median[..., None]), axis=-1)
    difference = (field - median) / (scale + noise)
    return np.linalg.norm(difference, axis=-1) <= threshold


grid = displacement.numpy().reshape(63, 79, 2)
valid = torch.from_numpy(passes_median_test(grid).ravel())
gap_middle, gap_radius = (760.0, 330.0), 80.0
gap = (position - torch.tensor(gap_middle)).norm(dim=-1) < gap_radius
core_middle, core_radius = (575.0, 535.0), 150.0
core = (position - torch.tensor(core_middle)).norm(dim=-1) < core_radius

generator = torch.Generator().manual_seed(0)
uniform = torch.rand(6, len(position), generator=generator, dtype=torch.float64)
held_out = (uniform[0] < 0.2) & ~gap
scored = held_out & valid & ~core
train = ~(held_out | gap) & (uniform[1] < share)
wrong = train & (uniform[2] < 0.1)
size, angle, lost = 5 + 10 * uniform[3], 2 * math.pi * uniform[4], uniform[5]
error = size[:, None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
kept = torch.stack([lost > 0.10, (lost < 0.05) | (lost > 0.15)], dim=-1)
observed = kept & train[:, None]

clean = displacement.where(observed, math.nan)
dirty = clean + error * wrong[:, None]
whole = observed.all(-1)
partly = observed.any(-1) & ~whole
print(f"{whole.sum()} vectors and {partly.sum()} single components ", end="")
print(f"to learn from, {(wrong & observed.any(-1)).sum()} of them wrong")
print(
    f"{held_out.sum()} vectors held out, {scored.sum()} of them scored; ",
    end="",
)
print(f"{gap.sum()} in the gap")

# %% [markdown]
# ## Gaps
#
# NaN raises an error unless you pass `missing="mask"`.

# %%
try:
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(position, clean, progress=False)
except ValueError as refusal:
    print(f"\nrefused: {refusal}")

# %% [markdown]
# ## Outliers
#
# With Student-t noise, vectors far from the field get small weights. By default, it has ν = 4
# degrees of freedom. The data may contain positions at which no component was observed.

# %%
likelihoods = {
    "Gaussian": None,
    "Student-t": gp_orff.MultitaskStudentTLikelihood(num_tasks=2),
}
fits = {}
for noise, likelihood in likelihoods.items():
    for name, y in {"clean": clean, "outliers": dirty}.items():
        kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
        model = gp_orff.VectorFieldGP(kernel, likelihood=deepcopy(likelihood))
        began = time.perf_counter()
        model.fit(position, y, missing="mask", progress=False)
        fits[noise, name] = model, time.perf_counter() - began

# %% [markdown]
# The table has the root mean square error (RMSE) of a component, in pixels, at the scored vectors,
# in the gap, and at all held-out vectors. It also has the negative log predictive density (NLPD) of
# a component and the coverage of 95 % intervals, both at the scored vectors. `nats` is the log
# marginal likelihood per value. With Student-t noise, it is a lower bound (ELBO).

# %%
laws = {  # kinds of noise, with their 97.5 % quantiles
    "Gaussian": (Normal, 1.960),
    "Student-t": (partial(StudentT, 4.0), 2.776),
}


def scores(noise, model):
    field, (law, quantile) = model.posterior(), laws[noise]
    miss = field.mean(position) - displacement
    # add the variance of the field, which is small, to that of the noise
    variance = field.variance(position) + model.likelihood.noise.detach()
    scale = variance.sqrt()
    nlpd = -law(0.0, scale).log_prob(miss)[scored].mean().item()
    inside = (miss.abs() < quantile * scale)[scored].double().mean().item()
    nats = model.log_marginal_likelihood().item() / observed.sum().item()
    parts = scored, gap, held_out
    rmse = [miss[rows].square().mean().sqrt().item() for rows in parts]
    return *rmse, nlpd, inside, nats


table = {key: scores(key[0], model) for key, (model, _) in fits.items()}
titles = "RMSE", "gap", "all", "NLPD", "95 %", "nats", "seconds"
print(f"\n{'noise':12}{'data':10}" + "".join(f"{title:>9}" for title in titles))
for (noise, name), row in table.items():
    print(f"{noise:12}{name:10}", end="")
    print("".join(f"{value:9.3f}" for value in row), end="")
    print(f"{fits[noise, name][1]:9.1f}")
ratios = {}
for noise in laws:
    ratios[noise] = table[noise, "outliers"][0] / table[noise, "clean"][0]
print("\nRMSE with outliers, over that without: ", end="")
print(", ".join(f"{noise} {ratio:.2f}" for noise, ratio in ratios.items()))
assert ratios["Student-t"] < 1.1 < 1.3 < ratios["Gaussian"]
assert table["Student-t", "outliers"][-1] > table["Gaussian", "outliers"][-1]

# %% [markdown]
# - With Gaussian noise, the outliers increase the noise variance of all vectors. The map is too
#   smooth, also in the gap, and the intervals are too wide.
# - With Student-t noise, the map is as accurate as without outliers. The evidence is also higher
#   for this noise, so you can choose the noise without held-out vectors.
# - The column "all" includes the core, where many held-out vectors are wrong. Do not compare models
#   by this error.
#
# ## The wrong vectors
#
# `leave_one_out` compares each vector with its prediction from all other vectors. These predictions
# have a closed form, so the model is not fitted again. The p-value is the probability that a
# correct vector differs from its prediction at least as much. For one correct vector in a thousand,
# the p-value is below 0.001. If only one component was observed, an error perpendicular to it
# cannot be detected.
#
# The first two columns of the table give the fraction of the wrong vectors that is detected.
# "Vectors" are complete, and "components" are vectors with one observed component. The last two
# columns are for the detected vectors outside the core. The column "wrong" is the fraction of them
# that has an artificial error. The column "or wrong before" also counts vectors that failed the
# median test before we added errors.


# %%
def portion(part, total):
    return (part & total).sum().item() / max(total.sum().item(), 1)


found = {}
print(f"\n{'':12}{'detected fraction':^24}{'fraction of the detected':^30}")
print(f"{'noise':12}{'vectors':>12}{'components':>12}", end="")
print(f"{'wrong':>12}{'or wrong before':>18}")
for noise in laws:
    model, _ = fits[noise, "outliers"]
    left_out = model.leave_one_out(position, dirty, missing="mask")
    found[noise] = bad = left_out.p_value < 1e-3
    recall = portion(bad, wrong & whole), portion(bad, wrong & partly)
    outside = bad & ~core
    precision = portion(wrong, outside), portion(wrong | ~valid, outside)
    print(f"{noise:12}{recall[0]:12.3f}{recall[1]:12.3f}", end="")
    print(f"{precision[0]:12.3f}{precision[1]:18.3f}")
assert recall[0] > 0.98  # with Student-t noise
assert precision[1] > 0.95

# %% [markdown]
# ## Maps with both kinds of noise
#
# Panels a and b show the vectors with and without gaps and errors. Grey vectors are incomplete, and
# dots mark vectors with p < 0.001 under Student-t noise. The other panels show posterior means, and
# their distance from the original vectors. The solid circle is the gap. The dashed circle is the
# core, in which many original vectors are wrong.

# %%
plt.rcParams.update(STYLE)
figure, axes = plt.subplots(
    3, 2, figsize=(7.2, 7.6), sharex=True, sharey=True, layout="compressed"
)
speed, label = plt.Normalize(0, 10), "displacement (pixel)"
sides = position[:79, 0], position[::79, 1]
for ax, vectors in zip(axes[0], (dirty, displacement), strict=True):
    raster = vectors.norm(dim=-1).reshape(63, 79)
    shaded = ax.pcolormesh(
        *sides, raster, norm=speed, cmap=MAGNITUDE, rasterized=True
    )
    plot_colorbar(ax, shaded, label, extend="max")
    ax.set(facecolor="0.8", aspect="equal")
dots = position[found["Student-t"]].T
axes[0, 0].plot(*dots, ".", ms=2.5, color="#D00000", mew=0)

arrows = {"arrows": 16, "reference": "pixel"}
away = {"norm": plt.Normalize(0, 1), "cmap": DEVIATION}
for (above, below), noise in zip(axes[1:].T, laws, strict=True):
    mean = fits[noise, "outliers"][0].posterior().mean(position)
    style = {"shade": mean.norm(dim=-1), "norm": speed, "label": label}
    plot_field(above, position, mean, **style, **arrows)
    distance = (mean - displacement).norm(dim=-1)
    style = {"shade": distance, "label": "distance (pixel)"}
    plot_field(below, position, **style, **away)
    for ax in (above, below):
        circle = {"fill": False, "ec": "white", "lw": 1.2}
        ax.add_patch(plt.Circle(gap_middle, gap_radius, **circle))
        ax.add_patch(plt.Circle(core_middle, core_radius, ls="--", **circle))
titles = (
    "vectors as given; dots: p < 0.001",
    "the original vectors",
    "mean, Gaussian noise",
    "mean, Student-t noise",
    "distance of (c) from (b)",
    "distance of (d) from (b)",
)
title_panels(axes, titles)
plt.setp(axes[-1], xlabel="x (pixel)")
plt.setp(axes[:, 0], ylabel="y (pixel)")

# %% tags=["remove-cell"]
output = arguments.output
output.mkdir(parents=True, exist_ok=True)
figure.savefig(output / "gaps_and_outliers.pdf")
figure.savefig(output / "gaps_and_outliers.png", dpi=150)
title = axes[1, 1].get_title(loc="left")[4:]  # without the letter
axes[1, 1].set_title(title, loc="left")
card = axes[1, 1].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    output / "gaps_and_outliers_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {output}/gaps_and_outliers.png")
