# %% [markdown]
# # 16. A flow from the signs of its components
#
# From the signs of noisy vectors, we estimate the direction and speed of a flow, and the
# probabilities of new signs.
#
# Suppose that an instrument reports only the signs of the two components, like a vane of which you
# know only the quadrant. These are the lines to copy:
#
# ```python
# signs = (vectors > 0).double()  # (N, p), 0 or 1
# kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
# probit = gpytorch.likelihoods.BernoulliLikelihood()
# model = gp_orff.VectorFieldGP(kernel, likelihood=probit)
# field = model.fit(x, signs).posterior()
# probability = model.likelihood(field(x)).probs  # of a positive sign
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A flow from the signs of its components.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own
folder = Path("tutorials" if Path("tutorials").exists() else ".") / "data"

# %%
import time

import gpytorch
import numpy as np
import torch
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import STYLE, plot_field, title_panels

# %% [markdown]
# ## The data
#
# The data are the displacements behind a wing tip from
# [tutorial 01](../tutorials/01_wing_tip_vortex.py). We add an error to every component, with a
# standard deviation of 3 pixels, which is as large as the displacements. Only the sign of the
# result is used. Where the flow is fast, few signs are wrong. Where it is slow, almost half of the
# signs are wrong. A third of the vectors is held out. In the core of the vortex, many of the
# original vectors are wrong, so the scores exclude the core.

# %%
path = folder / "wing_tip_vortex.csv"
columns = torch.from_numpy(np.loadtxt(path, delimiter=",", skiprows=1))
position, displacement = columns[:, :2], columns[:, 2:]
generator = torch.Generator().manual_seed(0)
noise = 3.0  # pixel
error = noise * torch.randn(
    displacement.shape, generator=generator, dtype=torch.float64
)
signs = (displacement + error > 0).double()
uniform = torch.rand(len(position), generator=generator, dtype=torch.float64)
centre, radius = (575.0, 535.0), 150.0  # pixel
core = (position - torch.tensor(centre)).norm(dim=-1) < radius
held_out, train = (uniform < 1 / 3) & ~core, uniform > 1 / 3

# %% tags=["remove-cell"]
if arguments.smoke:
    train &= uniform < 0.37

# %%
print(f"{train.sum()} vectors for the fit, {held_out.sum()} held out")
deviation = displacement.std(dim=0).mean()
print(f"standard deviation of a component: {deviation:.2f} pixels")

# %% [markdown]
# ## A model of signs and a model of values
#
# With the probit likelihood, the probability of a positive sign is Φ(f), where Φ is the normal
# distribution function and f is the flow in units of the noise. Signs do not determine the noise in
# pixels. In this example it is known, and converts f to pixels. For comparison, a second model is
# fitted to the values with the same errors, instead of their signs.

# %%
fits = {}
for name, likelihood, y, unit in (
    ("signs", gpytorch.likelihoods.BernoulliLikelihood(), signs, noise),
    ("values", None, displacement + error, 1.0),
):
    began = time.perf_counter()
    kernel = gp_orff.DivergenceFreeKernel(num_dims=2)
    model = gp_orff.VectorFieldGP(kernel, likelihood=likelihood)
    model.fit(position[train], y[train], progress=False)
    fits[name] = model, unit, time.perf_counter() - began

# %% [markdown]
# The table is for the held-out vectors. It has the root mean square error (RMSE) of a component,
# the median angle between the posterior mean and the vector, and the coverage of the 95 % intervals
# of the components.


# %%
def scores(model, unit):
    field = model.posterior()
    mean = unit * field.mean(position)
    sd = unit * field.variance(position).sqrt()
    miss = (mean - displacement)[held_out]
    cosine = torch.cosine_similarity(mean, displacement, dim=-1)[held_out]
    angle = torch.rad2deg(torch.acos(cosine.clamp(-1, 1)))
    coverage = (miss.abs() < 1.96 * sd[held_out]).double().mean()
    return miss.square().mean().sqrt(), angle.median(), coverage


print(f"\n{'':8}{'RMSE (pixel)':>13}{'angle (°)':>11}{'coverage':>10}", end="")
print(f"{'seconds':>9}")
rmse = {}
for name, (model, unit, seconds) in fits.items():
    rmse[name], angle, coverage = scores(model, unit)
    print(f"{name:8}{rmse[name]:13.2f}{angle:11.1f}{coverage:10.2f}", end="")
    print(f"{seconds:9.1f}")

# %% tags=["remove-cell"]
assert rmse["signs"] < 2 * rmse["values"]

# %% [markdown]
# Signs determine the direction and also the length of a vector. If a vector is long, the signs of
# its neighbours are rarely wrong. Without noise, signs would not determine the length. Values are
# only slightly better than signs: the RMSE with values is three quarters of that with signs. The
# reason is that the values have errors as large as the flow.
#
# The coverage of both models is too low, because the flow in a plane section has some divergence,
# which this kernel excludes. A `HelmholtzKernel` includes it, but its fit takes longer.
#
# ## Probabilities of held-out signs
#
# Consider the held-out signs that are predicted to be positive with a probability of about 0.7. If
# the probabilities are right, 70 % of these signs are positive. `model.likelihood(field(x))`
# integrates over the uncertainty of the flow.

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
observed = torch.bincount(bins, outcome, minlength=10) / counts
print("\nprobability of a positive sign: mean, share observed, number")
for i in range(10):
    print(f"{edges[i]:.1f} to {edges[i + 1]:.1f}: {predicted[i]:6.3f}", end="")
    print(f"{observed[i]:7.3f}{counts[i]:6}")


def density(probability):
    """Mean log density of a held-out sign."""
    chosen = torch.where(outcome > 0, probability, 1 - probability)
    return chosen.clamp_min(1e-12).log().mean()


known = torch.special.ndtr(displacement[held_out].flatten() / noise)
print(f"\nlog density of a held-out sign: {density(probability):.3f}")
print(f"from the measured displacements: {density(known):.3f}")

# %% [markdown]
# ## The flow
#
# The dashed circle is the core, in which many of the original vectors are wrong. Near the core, the
# posterior mean is too slow. There, the signs are rarely wrong, so they contain little information
# on the speed. Panel c shows the fraction of positive signs among the held-out signs. Its bars are
# binomial 95 % intervals, whose widths follow from the predicted probabilities.

# %%
mean = unit * field.mean(position)
with plt.rc_context(STYLE):
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 5.8), layout="compressed")
    given, learned, reliable, truth = axes.flat
    quadrant = 2 * signs[:, 1] + signs[:, 0]
    names = {0: "− −", 1: "+ −", 2: "− +", 3: "+ +"}
    colors = ("#0072B2", "#E69F00", "#009E73", "#D55E00")
    for number, color in enumerate(colors):
        rows = train & (quadrant == number)
        style = {"color": color, "label": names[number], "rasterized": True}
        given.scatter(*position[rows].T, s=2, linewidths=0, **style)
    given.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=4,
        markerscale=3,
        handletextpad=0,
        title="signs of x and y components",
        title_fontsize="small",
    )
    given.set(xlim=position[:, 0].aminmax(), ylim=position[:, 1].aminmax())
    norm = plt.Normalize(0, 10)
    for ax, vectors in ((learned, mean), (truth, displacement)):
        plot_field(
            ax,
            position,
            vectors,
            shade=vectors.norm(dim=-1),
            norm=norm,
            label="displacement (pixel)",
            arrows=14,
            reference="pixel",
        )
        circle = plt.Circle(
            centre, radius, fill=False, color="white", linestyle="--"
        )
        ax.add_patch(circle)
    for ax in (given, learned, truth):
        ax.set(xlabel="x (pixel)", ylabel="y (pixel)", aspect="equal")
    binomial = 1.96 * (predicted * (1 - predicted) / counts).sqrt()
    style = {"fmt": "o", "color": "#0072B2", "ms": 4, "capsize": 2}
    reliable.plot([0, 1], [0, 1], color="0.6", lw=1)
    reliable.errorbar(predicted, observed, yerr=binomial, **style)
    reliable.set(
        xlabel="predicted probability",
        ylabel="share of positive signs",
        box_aspect=0.8,
    )
    title_panels(
        axes,
        [
            "observed signs",
            "posterior mean",
            "held-out signs, 95 % intervals",
            "measured",
        ],
    )

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
with plt.rc_context(STYLE):
    figure.savefig(arguments.output / "signs.png", dpi=200)
    figure.savefig(arguments.output / "signs.pdf")
    title = learned.get_title(loc="left")[4:]  # without the letter
    learned.set_title(title, loc="left")
    card = learned.get_tightbbox()
    card = card.transformed(figure.dpi_scale_trans.inverted())
    figure.savefig(
        arguments.output / "signs_card.png",
        dpi=150,
        bbox_inches=card.padded(0.05),
    )
print(f"\nfigure: {arguments.output}/signs.png")
