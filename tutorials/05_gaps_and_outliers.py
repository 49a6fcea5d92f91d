# %% [markdown]
# # 5. Gaps and outliers
#
# Measured vectors have gaps, and some of them are wrong. How does a map change if one vector in ten
# is wrong and many components are missing, and can the model identify the wrong vectors?
#
# The lines to copy:
#
# ```python
# robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)
# model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2), likelihood=robust)
# model.fit(x, y, missing="mask")                                      # NaN: not observed
# bad = model.leave_one_out(x, y, missing="mask").p_value < 1e-3
# ```

# %%
import argparse
import math
import time
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch.distributions import Normal, StudentT

import gp_orff
from gp_orff.plotting import plot_colorbar, plot_field

parser = argparse.ArgumentParser(description="A map from vectors with gaps and outliers.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
share = 0.03 if arguments.smoke else 1.0  # of the vectors to learn from

# %% [markdown]
# ## The data, with artificial gaps and outliers
#
# The data are the displacements behind a wing tip of tutorial 01, in pixels. A fifth of the vectors
# is held out. All vectors in a disc are erased, as by a reflection. One in ten of the others gets
# an error of 5 to 15 pixels in a random direction, larger than most displacements. One in twenty
# loses its first component, one in twenty its second, and one in twenty both.
#
# In the core of the vortex, many of the original vectors are wrong, and the truth is unknown. The
# scores therefore exclude the core, and other vectors that fail the normalised median test
# (Westerweel & Scarano 2005). The models use neither the core nor the test.

# %%
path = Path(__file__).parent / "data" / "wing_tip_vortex.csv"
columns = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
position, displacement = columns[:, :2], columns[:, 2:]


def passes_median_test(field, threshold=2.0, noise=0.1):
    """Whether each vector of a (rows, columns, 2) grid agrees with its eight neighbours."""
    padded = np.pad(field, ((1, 1), (1, 1), (0, 0)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(0, 1))
    neighbours = np.delete(windows.reshape(*field.shape, 9), 4, axis=-1)
    median = np.nanmedian(neighbours, axis=-1)
    spread = np.nanmedian(abs(neighbours - median[..., None]), axis=-1)
    return np.linalg.norm((field - median) / (spread + noise), axis=-1) <= threshold


valid = torch.from_numpy(passes_median_test(displacement.numpy().reshape(63, 79, 2)).ravel())
gap = (position - torch.tensor([760.0, 330.0])).norm(dim=-1) < 80
core = (position - torch.tensor([575.0, 535.0])).norm(dim=-1) < 150

generator = torch.Generator().manual_seed(0)
uniform = torch.rand(6, len(position), generator=generator, dtype=torch.float64)
held_out = (uniform[0] < 0.2) & ~gap
judged = held_out & valid & ~core
train = ~(held_out | gap) & (uniform[1] < share)
spoiled = train & (uniform[2] < 0.1)
size, angle, lost = 5 + 10 * uniform[3], 2 * math.pi * uniform[4], uniform[5]
error = size[:, None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
observed = torch.stack([lost > 0.10, (lost < 0.05) | (lost > 0.15)], dim=-1) & train[:, None]

clean = displacement.where(observed, math.nan)
dirty = clean + error * spoiled[:, None]
whole, partly = observed.all(-1), observed.any(-1) & ~observed.all(-1)
print(f"{whole.sum()} vectors and {partly.sum()} single components to learn from, ", end="")
print(f"{(spoiled & observed.any(-1)).sum()} of them spoiled")
print(f"{held_out.sum()} vectors held out, {judged.sum()} of them judged; {gap.sum()} in the gap")

# %% [markdown]
# ## Gaps
#
# NaN raises an error unless `missing="mask"` declares it as missing.

# %%
try:
    model = gp_orff.VectorFieldGP(gp_orff.DivergenceFreeKernel(num_dims=2))
    model.fit(position, clean, progress=False)
except ValueError as refusal:
    print(f"\nrefused: {refusal}")

# %% [markdown]
# ## Outliers
#
# Student-t noise, by default with ν = 4 degrees of freedom, gives a vector less weight the farther
# it is from the field. Positions without any observed component may stay in the data.

# %%
fits = {}
for noise in ("Gaussian", "Student-t"):
    for name, y in {"clean": clean, "outliers": dirty}.items():
        robust = gp_orff.MultitaskStudentTLikelihood(num_tasks=2) if noise == "Student-t" else None
        kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
        model = gp_orff.VectorFieldGP(kernel, likelihood=robust)
        began = time.perf_counter()
        model.fit(position, y, missing="mask", progress=False)
        fits[noise, name] = model, time.perf_counter() - began

# %% [markdown]
# The table has the root mean square error (RMSE) of a component, in pixels: at the held-out vectors
# that are scored, in the gap, and at all held-out vectors. At the scored vectors it has the
# negative log predictive density (NLPD) of a component, and the share of components inside the 95 %
# interval. `nats` is the log marginal likelihood per number; under Student-t noise, a lower bound
# (ELBO).

# %%
laws = {"Gaussian": (Normal, 1.960), "Student-t": (partial(StudentT, 4.0), 2.776)}  # 95 %


def scores(noise, model):
    field, (law, quantile) = model.posterior(), laws[noise]
    miss = field.mean(position) - displacement
    # the variance of the field is small against that of the noise, and is added to it
    scale = (field.variance(position) + model.likelihood.noise.detach()).sqrt()
    nlpd = -law(0.0, scale).log_prob(miss)[judged].mean().item()
    inside = (miss.abs() < quantile * scale)[judged].double().mean().item()
    nats = model.log_marginal_likelihood().item() / observed.sum().item()
    rmse = [miss[rows].square().mean().sqrt().item() for rows in (judged, gap, held_out)]
    return *rmse, nlpd, inside, nats


table = {key: scores(key[0], model) for key, (model, _) in fits.items()}
titles = "RMSE", "gap", "all", "NLPD", "95 %", "nats", "seconds"
print(f"\n{'noise':12}{'data':10}" + "".join(f"{title:>9}" for title in titles))
for (noise, name), row in table.items():
    print(f"{noise:12}{name:10}" + "".join(f"{value:9.3f}" for value in row), end="")
    print(f"{fits[noise, name][1]:9.1f}")
worse = {noise: table[noise, "outliers"][0] / table[noise, "clean"][0] for noise in laws}
print("\nRMSE with outliers, over that without: ", end="")
print(", ".join(f"{noise} {ratio:.2f}" for noise, ratio in worse.items()))
assert worse["Student-t"] < 1.1 < 1.3 < worse["Gaussian"]
assert table["Student-t", "outliers"][-1] > table["Gaussian", "outliers"][-1]  # nats

# %% [markdown]
# - Under Gaussian noise, the outliers increase the noise variance of all vectors. The map is too
#   smooth, in the gap too, and the intervals are too wide.
# - Under Student-t noise, the map is as good as without outliers. The evidence prefers this noise,
#   without use of the held-out vectors.
# - "all" includes the core, where many held-out vectors are wrong: this error says little.
#
# ## Which vectors are wrong?
#
# `leave_one_out` compares each vector with its prediction from all others, in closed form. Its
# p-value is the probability of a difference at least as large if the vector is correct: one correct
# vector in a thousand is below 0.001. An error across the only observed component is not
# detectable.


# %%
def portion(part, total):
    return (part & total).sum().item() / max(total.sum().item(), 1)


found = {}
print(f"\n{'':12}{'share found of spoiled':^26}{'of those found outside the core':^36}")
print(f"{'noise':12}{'vectors':>12}{'components':>12}{'spoiled':>16}{'or wrong before':>18}")
for noise in laws:
    model, _ = fits[noise, "outliers"]
    bad = model.leave_one_out(position, dirty, missing="mask").p_value < 1e-3
    found[noise] = bad
    recall = portion(bad, spoiled & whole), portion(bad, spoiled & partly)
    precision = portion(spoiled, bad & ~core), portion(spoiled | ~valid, bad & ~core)
    print(f"{noise:12}{recall[0]:12.3f}{recall[1]:12.3f}{precision[0]:16.3f}{precision[1]:18.3f}")
assert recall[0] > 0.98  # of Student-t noise
assert precision[1] > 0.95

# %% [markdown]
# ## The figure

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

plt.rcParams["axes.titlesize"] = "medium"
figure, ((given, curves), maps) = plt.subplots(2, 2, figsize=(10, 8), layout="compressed")
shared = {"norm": matplotlib.colors.Normalize(0, 10), "cmap": "viridis"}
label, speed = "displacement (pixel)", dirty.norm(dim=-1).reshape(63, 79)
raster = given.pcolormesh(position[:79, 0], position[::79, 1], speed, rasterized=True, **shared)
plot_colorbar(given, raster, label)
bad, seen = found["Student-t"], observed.any(-1)
marks = {
    "spoiled, found": (spoiled & bad, "o", "none", "#D00000"),
    "spoiled, not found": (spoiled & ~bad & seen, "X", "white", "black"),
    "found, not spoiled": (bad & ~spoiled, "s", "none", "black"),
}
for name, (rows, marker, face, edge) in marks.items():
    given.scatter(
        *position[rows].T, s=26, marker=marker, fc=face, ec=edge, label=name, clip_on=False
    )
below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15), "ncols": 3, "frameon": False}
given.legend(**below, fontsize="small", columnspacing=0.8, handletextpad=0.1)
given.set(title="the vectors as given (grey: incomplete)", facecolor="0.8")

for ax, noise in zip(maps, laws, strict=True):
    mean = fits[noise, "outliers"][0].posterior().mean(position)
    arrows = {"arrows": 20, "reference": "pixel"}
    plot_field(ax, position, mean, shade=mean.norm(dim=-1), label=label, **arrows, **shared)
    ax.add_patch(plt.Circle((760, 330), 80, fill=False, color="white", lw=2))
    ax.set_title(f"mean, {noise} noise (circle: the gap)", loc="left")
for ax in (given, *maps):
    ax.set(xlabel="x (pixel)", ylabel="y (pixel)", aspect="equal")

for (noise, name), (model, _) in fits.items():
    miss = (model.posterior().mean(position) - displacement)[judged].norm(dim=-1)
    colour, line = "#D55E00" if noise == "Gaussian" else "#0072B2", "--" if name == "clean" else "-"
    curves.ecdf(miss, color=colour, linestyle=line, lw=2, label=f"{noise}, {name}")
curves.set(xscale="log", xlim=(0.02, 2), title="errors at held-out vectors outside the core")
curves.set(xlabel="|vector − mean| (pixel)", ylabel="share of vectors below", box_aspect=0.8)
curves.legend(loc="upper left", fontsize="small")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "gaps_and_outliers.png", dpi=100, bbox_inches="tight")
print(f"\nfigure: {arguments.output}/gaps_and_outliers.png")
