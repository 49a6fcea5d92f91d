# %% [markdown]
# # 16. A flow from signs
#
# Suppose that an instrument tells of each component of a vector only whether it is positive: the
# quadrant that a vane points to. How much of the flow is in the signs, and do probabilities of new
# signs hold?
#
# The lines to copy:
#
# ```python
# signs = (vectors > 0).double()                                        # (N, p), 0 or 1
# kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
# probit = gpytorch.likelihoods.BernoulliLikelihood()                   # any gpytorch likelihood
# model = gp_orff.VectorFieldGP(kernel, likelihood=probit).fit(x, signs)
# probability = model.likelihood(model.posterior()(x)).probs            # of a positive sign
# ```

# %%
import argparse
import time
from pathlib import Path

import gpytorch
import matplotlib
import numpy as np
import torch

import gp_orff
from gp_orff.plotting import plot_field

parser = argparse.ArgumentParser(description="A flow from the signs of its components.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()

# %% [markdown]
# ## The data
#
# Of the displacements behind a wing tip (tutorial 01) every component gets an error as large as the
# displacements are, 3 pixels, and only its sign is kept: where the flow is fast few signs are
# wrong, and where it is slow nearly every second one. A third of the vectors is held out. In the
# core many of the vectors that were measured are wrong, and scores leave it out.

# %%
path = Path(__file__).parent / "data" / "wing_tip_vortex.csv"
columns = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
position, displacement = columns[:, :2], columns[:, 2:]
generator = torch.Generator().manual_seed(0)
noise = 3.0  # pixel
error = noise * torch.randn(displacement.shape, generator=generator, dtype=torch.float64)
signs = (displacement + error > 0).double()
uniform = torch.rand(len(position), generator=generator, dtype=torch.float64)
core = (position - torch.tensor([575.0, 535.0])).norm(dim=-1) < 150
held_out, train = (uniform < 1 / 3) & ~core, uniform > 1 / 3
if arguments.smoke:
    train &= uniform < 0.37
print(f"{train.sum()} vectors to learn from, {held_out.sum()} held out")
print(f"standard deviation of a component: {displacement.std(dim=0).mean():.2f} pixels")

# %% [markdown]
# ## Signs, and numbers
#
# Under the probit likelihood the probability of a positive sign is Φ(f), so that f is the flow in
# units of the noise. Signs do not tell that unit: here it is known, and turns f into pixels.
# Another model sees the numbers with the same errors.

# %%
fits = {}
for name, likelihood, y, unit in (
    ("signs", gpytorch.likelihoods.BernoulliLikelihood(), signs, noise),
    ("numbers", None, displacement + error, 1.0),
):
    began = time.perf_counter()
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood)
    model.fit(position[train], y[train], progress=False)
    fits[name] = model, unit, time.perf_counter() - began

# %% [markdown]
# At the held-out vectors: the root mean square error of a component, in pixels; the median angle
# between the mean and the vector, in degrees; and the share of components inside the 95 % interval.


# %%
def scores(model, unit):
    field = model.posterior()
    mean, sd = unit * field.mean(position), unit * field.variance(position).sqrt()
    miss = (mean - displacement)[held_out]
    cosine = torch.nn.functional.cosine_similarity(mean, displacement, dim=-1)[held_out]
    angle = torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))
    inside = (miss.abs() < 1.96 * sd[held_out]).double().mean()
    return miss.square().mean().sqrt().item(), angle.median().item(), inside.item()


table = {name: scores(model, unit) for name, (model, unit, _) in fits.items()}
print(f"\n{'':10}{'RMSE':>8}{'angle':>8}{'95 %':>8}{'seconds':>9}")
for name, row in table.items():
    print(f"{name:10}{row[0]:8.2f}{row[1]:8.1f}{row[2]:8.2f}{fits[name][2]:9.1f}")
assert table["signs"][0] < 2 * table["numbers"][0]

# %% [markdown]
# - Signs alone tell direction and magnitude: a vector is the longer, the more rarely neighbouring
#   signs are wrong. Without noise they would tell nothing of the length.
# - Numbers with an error as large as themselves leave three quarters of the error of their signs.
# - Intervals of both cover too little, from one cause: a section of a flow in space has some
#   divergence. A `HelmholtzKernel` covers 0.86 and 0.93, with the same errors, and takes longer.
#
# ## Do the probabilities hold?
#
# Of the held-out signs with a predicted probability of about q, a share q should be positive.
# `model.likelihood(field(x))` integrates over what is uncertain of the flow.

# %%
model, unit, _ = fits["signs"]
field = model.posterior()
with torch.no_grad():
    probability = model.likelihood(field(position[held_out])).probs.flatten()
outcome = signs[held_out].flatten()
edges = torch.linspace(0, 1, 11, dtype=torch.float64)
bins = torch.bucketize(probability, edges[1:-1])
counts = torch.bincount(bins, minlength=10)
predicted = torch.bincount(bins, probability, minlength=10) / counts
happened = torch.bincount(bins, outcome, minlength=10) / counts
print("\nprobability of a positive sign, and how many were positive")
for low, p, share, count in zip(edges[:-1].tolist(), predicted, happened, counts, strict=True):
    print(f"  {low:.1f} to {low + 0.1:.1f}: {p:.3f}  {share:.3f}  of {count}")
density = torch.where(outcome > 0, probability, 1 - probability).log().mean().item()
known = torch.special.ndtr(displacement[held_out].flatten() / noise)
best = torch.where(outcome > 0, known, 1 - known).clamp_min(1e-12).log().mean().item()
print(f"log density of a held-out sign: {density:.3f}; of one who knows the flow: {best:.3f}")

# %% [markdown]
# ## The figure

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

plt.rcParams["axes.titlesize"] = "medium"
figure, ((given, truth), (learned, reliable)) = plt.subplots(
    2, 2, figsize=(10, 8), layout="compressed"
)
quadrant = 2 * signs[:, 1] + signs[:, 0]
names = {0: "− −", 1: "+ −", 2: "− +", 3: "+ +"}
for number, colour in enumerate(("#0072B2", "#E69F00", "#009E73", "#D55E00")):
    rows = train & (quadrant == number)
    given.scatter(*position[rows].T, s=5, color=colour, label=names[number], rasterized=True)
below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.15), "ncols": 4, "frameon": False}
given.legend(**below, markerscale=2, title="signs of both components")
given.set_title("what is observed: quadrants", loc="left")
shared = {"norm": matplotlib.colors.Normalize(0, 10), "cmap": "viridis"}
arrows = {"arrows": 20, "reference": "pixel"}
label = "displacement (pixel)"
for ax, vectors, title in (
    (truth, displacement, "the vectors, as they were measured"),
    (learned, unit * field.mean(position), "the mean, from signs alone"),
):
    plot_field(ax, position, vectors, shade=vectors.norm(dim=-1), label=label, **arrows, **shared)
    ax.set_title(title, loc="left")
for ax in (given, truth, learned):
    ax.set(xlabel="x (pixel)", ylabel="y (pixel)", aspect="equal")
spread = 1.96 * (predicted * (1 - predicted) / counts).sqrt()
reliable.plot([0, 1], [0, 1], color="0.6", lw=1)
reliable.errorbar(predicted, happened, yerr=spread, fmt="o", color="#0072B2", capsize=2)
reliable.set(xlabel="predicted probability", ylabel="share of held-out signs", box_aspect=0.8)
reliable.set_title("of a positive sign, with 95 % intervals", loc="left")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "signs.png", dpi=100, bbox_inches="tight")
print(f"\nfigure: {arguments.output}/signs.png")
