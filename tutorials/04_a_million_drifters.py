# %% [markdown]
# # 4. A million drifters: the divergent part of a current
#
# From a million noisy velocities, we estimate the weak divergent part of a current, which is hidden
# under strong eddies.
#
# Drifting buoys observe the velocity of the sea surface along their tracks. Eddies have no
# divergence. Where water wells up or sinks, the flow at the surface diverges or converges. These
# are the lines to copy:
#
# ```python
# kernel = gp_orff.HelmholtzKernel(num_dims=2)
# model = gp_orff.VectorFieldGP(kernel).fit(x, y)
# field = model.posterior()
# mean, sd = field.mean(xs), field.variance(xs).sqrt()
#
# # the divergent part, which has no curl
# divergent = field.mean(xs, gp_orff.CurlFreePart())
#
# # add the observations of a day
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
# ## A simulated current
#
# The region is a square of 500 × 500 km. The current is drawn from a Helmholtz kernel, which is the
# sum of a curl-free and a divergence-free kernel. The eddies have a lengthscale of 60 km and a root
# mean square speed of 30 cm/s. The divergent part has a lengthscale of 40 km and a root mean square
# speed of 8 cm/s. If a potential has the variance σ² and the lengthscale ℓ, the field has the mean
# square speed 2 σ²/ℓ². The noise of a component has a standard deviation of 15 cm/s.

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


x, xs = positions(number), positions(5000)  # for the fit, for the test
normal = torch.randn(number, 2, generator=generator).double()
y = current(x)[0] + noise * normal

# %% [markdown]
# ## Fit
#
# The units are km and cm/s. One pass over the data computes the sufficient statistics for a grid of
# frequencies. The search for the hyperparameters uses only these statistics, so its cost does not
# depend on the number of observations.

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
# is the gradient of a potential. The component across its frequency has no divergence. The
# curl-free part is therefore a linear map of the weights, so its error bars follow from their
# posterior. The constant mean of the model belongs to neither part, because it has neither curl nor
# divergence.
#
# The table has the root mean square, per component, of the truth, of the error (posterior mean
# minus truth) and of the posterior standard deviation. The last column is the coverage of the 95 %
# intervals.

# %%
field, divergent = model.posterior(), gp_orff.CurlFreePart()


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
coverage = score("current"), score("divergent", divergent)
assert 0.9 < coverage[0] < 0.99

# %% [markdown]
# The observations determine the current better than its parts. A smooth current may have neither
# curl nor divergence inside the square, and can then belong to either part. This uncertainty is
# largest near the edge. The error bars of the part include it.
#
# ## Data in ten files
#
# The saved model consists of statistics, whose size does not depend on the number of observations.
# If you condition the model on the first of ten files and update it with the others, its posterior
# is nearly that of a fit to all files.
#
# The small difference is due to the grids. The grid of a fit must be valid for all hyperparameters
# that the search may try. The grid of `condition` is built for the learned hyperparameters only.
# Both grids have the same tolerance. Their posteriors therefore differ by at most a few hundredths
# of a standard deviation.

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
assert streamed < 0.05  # standard deviations

# %% [markdown]
# ## The evidence of four kernels
#
# We compare the evidence of four kernels on some of the observations. The kernels are
# divergence-free, curl-free, their sum (Helmholtz), and independent components.

# %%
print(f"\n{few} observations")
comparison = gp_orff.compare_kernels(x[:few], y[:few], progress=False)
print(comparison)

# %% [markdown]
# ## The estimated divergent part
#
# Panel a shows some of the observations, and panel d the current that is estimated from all
# observations. The other panels show the divergent part: truth, posterior mean, residual and
# standard deviation, √(sd₁² + sd₂²).

# %%
axis = torch.linspace(0, side, 61).double()
grid = torch.cartesian_prod(axis, axis)
truth, mean = current(grid, divergent)[0], field.mean(grid, divergent)
sd, speed = field.variance(grid, divergent).sqrt(), field.mean(grid).norm(dim=1)

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
    "divergent part,\ntruth",
    "divergent part,\nposterior mean",
    "current,\nposterior mean",
    "divergent part,\nresidual",
    "divergent part,\nstandard deviation",
)
title_panels(axes, titles)
axes[0, 0].set(xlim=(0, side), ylim=(0, side))
plt.setp(axes[1], xlabel="east (km)")
plt.setp(axes[:, 0], ylabel="north (km)")

# %% tags=["remove-cell"]
output = arguments.output
figure.savefig(output / "a_million_drifters.pdf")
figure.savefig(output / "a_million_drifters.png", dpi=170)
title = axes[0, 2].get_title(loc="left")[4:]  # without the letter
axes[0, 2].set_title(title, loc="left")
card = axes[0, 2].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    output / "a_million_drifters_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {output}/a_million_drifters.png")

# %% [markdown]
# ## The explained variance
#
# How much of the variance of the divergent part does the posterior mean explain, in the square and
# in its middle?

# %%
middle = ((grid - side / 2).abs() < side / 4).all(-1)
found = []
for rows in (middle | True, middle):
    residual = (mean - truth)[rows].square().sum()
    found.append(1 - (residual / truth[rows].square().sum()).item())
print("\nvariance of the divergent part that is explained: ", end="")
print(f"{found[0]:.1%} in the square, {found[1]:.1%} in its middle")
assert found[1] > 0.5
