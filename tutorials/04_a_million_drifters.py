# %% [markdown]
# # 4. A million drifters: which part of the current spreads?
#
# A million noisy velocities separate the weak part of a current that spreads or converges from its
# strong eddies, and give its error bars.
#
# Drifting buoys observe the velocity of the sea surface along their tracks. Eddies are free of
# divergence. Where water wells up or sinks, the flow at the surface spreads or converges. The lines
# to copy:
#
# ```python
# kernel = gp_orff.HelmholtzKernel(num_dims=2)
# model = gp_orff.VectorFieldGP(kernel).fit(x, y)
# field = model.posterior()
# mean, sd = field.mean(xs), field.variance(xs).sqrt()
#
# # the part without curl
# spreading = field.mean(xs, gp_orff.CurlFreePart())
#
# # every day
# model.update(x_new, y_new).save("current.pt")
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A million observations of a current, and its two parts.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own
arguments.output.mkdir(parents=True, exist_ok=True)

# %%
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import STYLE, plot_comparison, plot_field, title_panels

number, few = 1_000_000, 2000

# %% tags=["remove-cell"]
if arguments.smoke:
    number, few = 20_000, 200

# %% [markdown]
# ## A current of which both parts are known
#
# The region is a square of 500 by 500 km. The current is drawn from a Helmholtz kernel, the sum of
# a curl-free and a divergence-free kernel. The eddies have a lengthscale of 60 km and a root mean
# square speed s of 30 cm/s. The spreading part has 40 km and 8 cm/s. If a potential has variance
# σ² and lengthscale ℓ, the field has s² = 2 σ²/ℓ². The noise of a component is 15 cm/s.

# %%
side, noise = 500.0, 15.0  # km, cm/s
kernel = gp_orff.HelmholtzKernel(num_dims=2)
kernel.curl_free.base_kernel.base_kernel.lengthscale = 40.0
kernel.curl_free.outputscale = 8.0**2 * 40.0**2 / 2
kernel.divergence_free.base_kernel.base_kernel.lengthscale = 60.0
kernel.divergence_free.outputscale = 30.0**2 * 60.0**2 / 2
current = gp_orff.sample_prior(kernel, 1, seed=0, domain=2 * [(0, side)])

generator = torch.Generator().manual_seed(0)


def positions(number):
    return side * torch.rand(number, 2, generator=generator).double()


x, xs = positions(number), positions(5000)  # to learn from, to test
normal = torch.randn(number, 2, generator=generator).double()
y = current(x)[0] + noise * normal

# %% [markdown]
# ## Fit
#
# Units stay km and cm/s. One pass over the data gives the sufficient statistics of a grid of
# frequencies. The search for the hyperparameters uses only these, so its cost does not depend on
# the number of observations.

# %%
model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
began = time.perf_counter()
model.fit(x, y, progress=False)
seconds = time.perf_counter() - began
print(model.report)
print(f"\n{number} observations, fit {seconds:.1f} s")

# %% [markdown]
# ## The two parts
#
# The posterior is a sum of waves with random weights. The component of a wave along its frequency
# is the gradient of a potential, and the component across it is divergence-free. The curl-free part
# is therefore a linear map of the same weights, with its own error bars. The constant mean of the
# model belongs to neither part, since it has neither curl nor divergence.
#
# The table has root mean squares per component: of the truth, of the error (posterior mean minus
# truth) and of the posterior standard deviation. The last column is the coverage of 95 % intervals.

# %%
field, spreading = model.posterior(), gp_orff.CurlFreePart()


def score(name, symbol=None):
    """Print the scores of the current or a part; return the coverage."""
    truth, mean = current(xs, symbol)[0], field.mean(xs, symbol)
    sd, error = field.variance(xs, symbol).sqrt(), mean - truth
    coverage = (error.abs() < 1.96 * sd).double().mean().item()
    sizes = [part.square().mean().sqrt() for part in (truth, error, sd)]
    print(f"{name:12}" + "".join(f"{size:10.3f}" for size in sizes), end="")
    print(f"{coverage:10.3f}")
    return coverage


print(f"\n{'cm/s':12}{'truth':>10}{'error':>10}{'sd':>10}{'95 %':>10}")
coverage = score("current"), score("spreading", spreading)
assert 0.9 < coverage[0] < 0.99

# %% [markdown]
# Observations determine the sum better than its parts. Near the edge, a smooth current without curl
# and divergence inside the square may belong to either part. The error bars of the part show this.
#
# ## Ten files, one after the other
#
# The saved model consists of statistics, whose size does not depend on the number of observations.
# Condition the model on the first of ten files and update it with the others: its posterior is that
# of all files. The grid of frequencies then follows from the learned hyperparameters, while that of
# a fit also serves those that the search may visit. Both grids have one tolerance, so their
# posteriors differ by a few hundredths of a standard deviation at most.

# %%
path = Path("current.pt")

# %% tags=["remove-cell"]
path = arguments.output / "current.pt"


# %%
def difference(other):
    """Largest difference from `field`, in its standard deviations."""
    sd, other_sd = (own.variance(xs).sqrt() for own in (field, other))
    means = (other.mean(xs) - field.mean(xs)) / sd
    return max(means.abs().max(), (other_sd / sd - 1).abs().max()).item()


model.save(path)
loaded = gp_orff.VectorFieldGP.load(path)
reloaded = difference(loaded.posterior())
print(f"\nsaved in {path.stat().st_size / 1e6:.2f} MB, ", end="")
print(f"difference after loading {reloaded:.0e} sd")
(x_first, y_first), *files = zip(x.chunk(10), y.chunk(10), strict=True)
began = time.perf_counter()
loaded.condition(x_first, y_first)
for x_new, y_new in files:
    loaded.update(x_new, y_new)
streamed = difference(loaded.posterior())
print(f"ten files in {time.perf_counter() - began:.1f} s, ", end="")
print(f"difference {streamed:.0e} sd")
assert reloaded < 1e-9
assert streamed < 0.05  # of a standard deviation: two grids of this tolerance

# %% [markdown]
# ## Which kernel do the data support?
#
# We compare the evidence of four kernels on a few of the observations: divergence-free, curl-free,
# both (Helmholtz), and independent components.

# %%
print(f"\n{few} observations")
comparison = gp_orff.compare_kernels(x[:few], y[:few], progress=False)
print(comparison)

# %% [markdown]
# ## The spreading part, found under eddies and noise
#
# Panels a and d show what is observed and the current that is estimated from it. The other panels
# show the spreading part: truth, posterior mean, residual and standard deviation, √(sd₁² + sd₂²).

# %%
axis = torch.linspace(0, side, 61).double()
grid = torch.cartesian_prod(axis, axis)
truth, mean = current(grid, spreading)[0], field.mean(grid, spreading)
sd, speed = field.variance(grid, spreading).sqrt(), field.mean(grid).norm(dim=1)

plt.rcParams.update(STYLE)
figure, axes = plt.subplots(
    2, 3, figsize=(7.2, 5.2), sharex=True, sharey=True, layout="compressed"
)
arrows = {"arrows": 13, "reference": "cm/s"}
plot_field(axes[0, 0], x[:1000], y[:1000], **arrows)
style = {"shade": speed, "label": "speed (cm/s)", "norm": plt.Normalize(0)}
plot_field(axes[1, 0], grid, field.mean(grid), **style, **arrows)
plot_comparison(
    axes[:, 1:], grid, truth, mean, sd, label="speed (cm/s)", **arrows
)
titles = (
    "observations,\nsome of 10⁶",
    "spreading part,\ntruth",
    "spreading part,\nposterior mean",
    "current,\nposterior mean",
    "spreading part,\nresidual",
    "spreading part,\nstandard deviation",
)
title_panels(axes, titles)
axes[0, 0].set(xlim=(0, side), ylim=(0, side))
plt.setp(axes[1], xlabel="east (km)")
plt.setp(axes[:, 0], ylabel="north (km)")

# %% tags=["remove-cell"]
output = arguments.output
figure.savefig(output / "a_million_drifters.pdf")
figure.savefig(output / "a_million_drifters.png", dpi=170)
card = axes[0, 2].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    output / "a_million_drifters_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {output}/a_million_drifters.png")

# %% [markdown]
# ## The variance that was found
#
# How much of the variance of the spreading part was recovered, in the square and in its middle?

# %%
middle = ((grid - side / 2).abs() < side / 4).all(-1)
found = []
for rows in (middle | True, middle):
    residual = (mean - truth)[rows].square().sum()
    found.append(1 - (residual / truth[rows].square().sum()).item())
print("\nvariance of the spreading part that was found: ", end="")
print(f"{found[0]:.1%} in the square, {found[1]:.1%} in its middle")
assert found[1] > 0.5
