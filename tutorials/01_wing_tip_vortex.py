# %% [markdown]
# # 1. A velocity field with error bars
#
# Particle image velocimetry gives the displacement of particles behind the tip of a wing: 4977
# vectors, some of them wrong, none with an error bar. Which prior describes such a flow? Do its
# error bars hold, also in the core of the vortex, where the measurement lost its particles? And
# what is a physical prior worth where vectors are few?
#
# The lines that answer the first two:
#
# ```python
# kernels = {"Helmholtz": gp_orff.HelmholtzKernel(num_dims=2), ...}
# noise = gp_orff.MultitaskStudentTLikelihood(num_tasks=2)                       # heavy tails
# comparison = gp_orff.compare_kernels(x, y, kernels, likelihood=noise, group=part, blocks=squares)
# field = comparison.best.posterior()
# ```

# %%
import argparse
import csv
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel
from gpytorch.means import ZeroMean
from joblib import Parallel, cpu_count, delayed
from tqdm import tqdm

import gp_orff
from gp_orff.plotting import plot_field, plot_map

parser = argparse.ArgumentParser(description="Learn a velocity field with uncertainty.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
learned_from = 40 if arguments.smoke else 829
draws = {50: 1} if arguments.smoke else {50: 5, 100: 20, 200: 2}
print("A velocity field from 4977 vectors: three kernels are compared by blocks that they have not")
print(
    "seen, error bars are checked, and two kernels learn from 50 to 200 vectors. About a minute.\n"
)
began = time.perf_counter()

# %% [markdown]
# ## The data
#
# Positions and displacements are in pixels; the models need no other units.
#
# In the core of the vortex, seeding particles are missing, and more than half of the vectors are
# wrong. Readings of another quality are a *group* of their own: the same field, with a noise that
# is learned for each group. Here the groups are the disc of 150 pixels around the middle of the
# vortex, and the wake around it.
#
# The normalised median test of PIV (Westerweel & Scarano 2005) tells about 160 wrong vectors by
# their neighbours. We use it for scoring only: the models see all vectors.

# %%
columns = np.loadtxt(
    Path(__file__).parent / "data" / "wing_tip_vortex.csv", delimiter=",", skiprows=1
)
position, displacement = torch.from_numpy(columns[:, :2]), torch.from_numpy(columns[:, 2:])


def passes_median_test(field, threshold=2.0, noise=0.1):
    """Whether each vector of a (rows, columns, 2) grid agrees with its eight neighbours."""
    padded = np.pad(field, ((1, 1), (1, 1), (0, 0)), constant_values=np.nan)
    rows, cols = field.shape[:2]
    shifts = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    neighbours = np.stack([padded[i : i + rows, j : j + cols] for i, j in shifts])
    median = np.nanmedian(neighbours, axis=0)
    spread = np.nanmedian(abs(neighbours - median), axis=0)
    return np.linalg.norm((field - median) / (spread + noise), axis=-1) <= threshold


valid = torch.from_numpy(passes_median_test(columns[:, 2:].reshape(63, 79, 2)).ravel())
middle, radius = (575.0, 535.0), 150.0
core = (position - torch.tensor(middle)).norm(dim=-1) < radius
part = np.where(core, "core", "wake")
square = (position // 128).long() @ torch.tensor([100, 1])  # squares of 128 pixels

# %% [markdown]
# ## Few vectors, in the background
#
# What does a divergence-free kernel gain over independent outputs, if only 50, 100 or 200 vectors
# are known? Other processes learn from random draws of so many, while we go on; the error is that
# at all valid vectors not drawn. Their noise is Gaussian, of each group.


# %%
def kernels():
    return {
        "divergence-free": gp_orff.DivergenceFreeKernel(RBFKernel(), num_dims=2),
        "Helmholtz": gp_orff.HelmholtzKernel(RBFKernel(), num_dims=2),
        "independent": MultitaskKernel(RBFKernel(), num_tasks=2, rank=0),
    }


def few(number, seed):
    """The errors, in pixels, of two kernels that learn from a few random vectors."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(position), generator=generator)[:number]
    rest, errors = valid.clone(), []
    rest[rows] = False
    for name in ("divergence-free", "independent"):
        with gp_orff.settings.check_calibration(False), gp_orff.settings.num_threads(1):
            model = gp_orff.VectorFieldGP(kernels()[name], mean=ZeroMean())
            model.fit(position[rows], displacement[rows], group=part[rows], progress=False)
            error = (model.posterior().mean(position) - displacement)[rest]
        errors.append(error.square().mean().sqrt().item())
    return errors


jobs = [(number, seed) for number, count in draws.items() for seed in range(count)]
workers = Parallel(
    n_jobs=1 if arguments.smoke else min(max(2, cpu_count()), 8), return_as="generator"
)
results = workers(delayed(few)(number, seed) for number, seed in jobs)

# %% [markdown]
# ## Which kernel?
#
# The flow is almost incompressible, but it crosses the light sheet, so the field in the plane is
# not quite free of divergence. Three kernels: `DivergenceFreeKernel`; `HelmholtzKernel`, which
# adds a curl-free part of its own size; and outputs that share nothing but a lengthscale.
#
# The models learn from a sixth of the vectors, since neighbours are computed from overlapping
# windows of the images and have errors in common, and with Student-t noise: a single outlier
# changes little. Then each predicts the vectors in every square of 128 pixels (eight vectors wide)
# from the vectors in all others.

# %%
generator = torch.Generator().manual_seed(0)
some = torch.randperm(len(position), generator=generator)[:learned_from]
comparison = gp_orff.compare_kernels(
    position[some],
    displacement[some],
    kernels(),
    likelihood=gp_orff.MultitaskStudentTLikelihood(num_tasks=2),
    group=part[some],
    blocks=square[some],
)
print(f"\n{comparison}\n")

# %% [markdown]
# ## All vectors, and whether error bars hold
#
# `condition` keeps the hyperparameters of the best kernel and takes all vectors. The table has
# predictions of squares from all others, in the wake and in the core: root mean square error (RMSE)
# in pixels, of all vectors and of those that pass the median test; the negative log predictive
# density (NLPD) of each component; and the share inside 95 % intervals.

# %%
arguments.output.mkdir(parents=True, exist_ok=True)
best = next(iter(comparison.models))
every = some if arguments.smoke else torch.arange(len(position))
x, y, where = position[every], displacement[every], part[every]
model = comparison.best.condition(x, y, group=where)
found = model.cross_validate(x, y, group=where, blocks=square[every])
miss, names = found.mean - found.observed, ["rmse_px", "rmse_valid_px", "nlpd", "inside_95"]
with open(arguments.output / "wing_tip_vortex_scores.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["model", "part", "vectors", *names])
    print(f"{best + ', all vectors':28}{'vectors':>8}{'RMSE':>8}{'valid':>8}{'NLPD':>8}{'95 %':>8}")
    for name, chosen in {"wake": ~core, "core": core, "both": torch.ones_like(core)}.items():
        rows, good = (those[every][found.index] for those in (chosen, chosen & valid))
        rmses = [miss[own].square().mean().sqrt().item() for own in (rows, good)]
        inside = found.inside[rows].double().mean().item()
        scores = *rmses, -found.log_density[rows].mean().item(), inside
        number = chosen[every].sum().item()
        writer.writerow([best, name, number, *scores])
        print(f"{name:28}{number:8}" + "".join(f"{score:8.3f}" for score in scores))
        assert arguments.smoke or 0.87 < inside < 0.98

# %% [markdown]
# The divergence-free kernel is refuted, by little: what the light sheet does not see flows in or
# out of it. Error bars hold, in the core as well. Without `group=`, with one noise for all of them,
# intervals hold fewer than half of the vectors there. These are intervals of *vectors*: they show
# that the noise is right. The field itself has a smaller sd in the core, since the kernel takes it
# to be as smooth there as around it, which no vector in the core can confirm.
#
# ## What is physics worth?
#
# With all these vectors, tying the components together adds little. Where vectors are few, it adds
# much: the mean errors of the two kernels over draws.

# %%
errors = np.array(list(tqdm(results, total=len(jobs), desc="few vectors", unit=" draws")))
curve = {number: errors[[job[0] == number for job in jobs]] for number in draws}
print(f"\n{'vectors':>8}{'draws':>8}{'divergence-free':>18}{'independent':>14}{'gain':>8}")
for number, own in curve.items():
    both = own.mean(0)
    gain = 1 - both[0] / both[1]
    print(f"{number:8}{len(own):8}{both[0]:15.3f} px{both[1]:11.3f} px{gain:8.1%}")
    assert number != 100 or gain > 0.05
with open(arguments.output / "wing_tip_vortex_few.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["vectors", "seed", "divergence_free_rmse_px", "independent_rmse_px"])
    writer.writerows([*job, *own] for job, own in zip(jobs, errors.tolist(), strict=True))

# %% [markdown]
# ## The map
#
# Mean and standard deviation of the flow, without noise, and its vorticity, at the positions of the
# vectors: as a CSV file and as a figure. Crosses are vectors of a weight below 0.3 under the noise;
# circles are the core; panels a and b have one scale of colours.

# %%
field, doubted = model.posterior(), model.leave_one_out(x, y, group=where)
mean, sd = field.mean(position), field.variance(position).sqrt()
curl = field.mean(position, gp_orff.Curl())
curl_sd = field.variance(position, gp_orff.Curl()).sqrt()

with open(arguments.output / "wing_tip_vortex_map.csv", "w", newline="") as file:
    writer = csv.writer(file)
    names = ["x_px", "y_px", "u_px", "v_px", "u_sd_px", "v_sd_px", "vorticity", "vorticity_sd"]
    writer.writerow(names)
    rows = torch.cat([position, mean, sd, curl, curl_sd], dim=-1).tolist()
    writer.writerows([f"{value:.6g}" for value in row] for row in rows)

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.patheffects import withStroke

plt.rcParams.update({"axes.titlesize": 10.5, "axes.titlelocation": "left"})
figure, axes = plt.subplots(2, 2, figsize=(10, 7.4), layout="compressed")
length, total = displacement.norm(dim=-1), sd.norm(dim=-1)
speed = matplotlib.colors.Normalize(0, length[valid].quantile(0.999).item())
shared = {"norm": speed, "label": "displacement (pixel)", "reference": "pixel"}
plot_field(axes[0, 0], position, displacement, shade=length, **shared)
low = doubted.weight < 0.3
axes[0, 0].plot(*x[low].T, "x", color="#FF6A00", ms=4, mew=1.2)
axes[0, 0].set_title(f"a   {len(position)} vectors; crosses: doubted")
plot_field(axes[0, 1], position, mean, shade=mean.norm(dim=-1), **shared)
levels = total.quantile(torch.tensor([0.88, 0.96]).double()).tolist()
lines = axes[0, 1].tricontour(*position.T, total, levels, colors="white", linewidths=1.2)
places = [(middle[0], middle[1] + own * radius) for own in (0.65, -1)]
labels = axes[0, 1].clabel(lines, fmt="%.2g", fontsize=9, manual=places)
plt.setp(labels, path_effects=[withStroke(linewidth=2, foreground="0.2")])
axes[0, 1].set_title("b   mean, and contours of its sd")
plot_map(axes[1, 0], position, curl, curl_sd, label="vorticity (pixel per pixel)")
axes[1, 0].set_title("c   vorticity (hatched: sign unknown)")
axes[1, 0].text(middle[0], middle[1] + radius + 15, "core", color="#D55E00", ha="center")
corners = position.min(0).values, position.max(0).values
for ax in axes.flat[:3]:
    if ax is not axes[0, 1]:
        ax.add_patch(plt.Circle(middle, radius, fill=False, color="#D55E00", lw=1.2))
    ax.set(xlim=[corner[0] for corner in corners], ylim=[corner[1] for corner in corners])
    ax.set(xlabel="x (pixel)", ylabel="y (pixel)")
for index, (name, color, marker) in enumerate(
    [("divergence-free", "#0072B2", "o"), ("independent", "#D55E00", "s")]
):
    numbers = np.array(list(curve))
    mean_error = [own[:, index].mean() for own in curve.values()]
    scatter = [own[:, index].std() for own in curve.values()]
    axes[1, 1].errorbar(
        numbers * (0.98 + 0.04 * index), mean_error, scatter, color=color, marker=marker,
        capsize=3, label=name,
    )  # fmt: skip
axes[1, 1].set(xlabel="vectors learned from", ylabel="error at the others (pixel)", xscale="log")
axes[1, 1].set_xticks(list(curve), list(map(str, curve)))
axes[1, 1].minorticks_off()
axes[1, 1].set_title("d   few vectors: mean and scatter over draws")
axes[1, 1].set_box_aspect(((corners[1] - corners[0])[1] / (corners[1] - corners[0])[0]).item())
axes[1, 1].legend(frameon=False)
figure.savefig(arguments.output / "wing_tip_vortex.png", dpi=110, bbox_inches="tight")
print(f"\n{time.perf_counter() - began:.0f} s. {arguments.output}: wing_tip_vortex.png,", end=" ")
print("wing_tip_vortex_{scores,few,map}.csv")
print("Next: your own positions x (N, 2) and vectors y (N, 2): README.md, From arrays to a map.")
