# %% [markdown]
# # 4. A million drifters: which part of the current spreads?
#
# Drifting buoys observe the velocity of the sea surface along their tracks. Eddies are free of
# divergence; where water wells up or sinks, the flow at the surface spreads or converges. Can a
# million noisy observations separate the weak spreading part from the strong eddies, and with what
# error bars?
#
# The lines to copy:
#
# ```python
# model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2)).fit(x, y)    # once
# field = model.posterior()
# mean, sd = field.mean(xs), field.variance(xs).sqrt()
# spreading = field.mean(xs, gp_orff.CurlFreePart())
# model.update(x_new, y_new).save("current.pt")                                   # every day
# ```

# %%
import argparse
import math
import time
from pathlib import Path

import matplotlib
import torch

import gp_orff
from gp_orff.plotting import plot_field

parser = argparse.ArgumentParser(description="A million readings of a current, and its two parts.")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
number, few = (20_000, 200) if arguments.smoke else (1_000_000, 2000)

# %% [markdown]
# ## A current of which both parts are known
#
# The region is a square of 500 by 500 km. A sum of waves with random phases, and random amplitudes
# that follow the spectral density of an RBF kernel, is a potential drawn from that kernel (periodic
# in 1000 km). Its gradient is a curl-free field; a gradient turned by a right angle is
# divergence-free. Eddies have a lengthscale of 60 km and 0.3 m/s, the spreading part 40 km and
# 0.08 m/s. The noise is 0.15 m/s.

# %%
side, noise = 500.0, 0.15  # km, m/s
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(*shape):
    return torch.rand(*shape, generator=generator, dtype=torch.float64)


def random_gradient(lengthscale, speed):
    """Frequencies, phases and vectors v of a field Σ v cos(ω·x + b) that is a gradient."""
    k = torch.arange(-25.0, 26.0, dtype=torch.float64)
    omega = 2 * math.pi / (2 * side) * torch.cartesian_prod(k, k)[51**2 // 2 + 1 :]  # one of ±ω
    omega = omega[omega.norm(dim=-1) * lengthscale < 5]
    density = torch.exp(-0.5 * (lengthscale * omega).square().sum(-1))
    amplitude = (density / density.sum()).sqrt() * normal(len(omega), 2).norm(dim=-1)
    amplitude = speed * lengthscale / math.sqrt(2) * amplitude
    return omega, 2 * math.pi * uniform(len(omega)), amplitude[:, None] * omega


def velocity(x, omega, phase, vectors):
    return torch.cat([torch.cos(part @ omega.T + phase) @ vectors for part in x.split(10_000)])


def current(x):
    return velocity(x, *eddies) + velocity(x, *spreading)


spreading = random_gradient(lengthscale=40.0, speed=0.08)
omega, phase, vectors = random_gradient(lengthscale=60.0, speed=0.3)
eddies = omega, phase, vectors.flip(-1) * torch.tensor([1.0, -1.0])  # turned by a right angle

x = side * uniform(number, 2)
y = current(x) + noise * normal(number, 2)
xs = side * uniform(5000, 2)  # test points
grid = torch.cartesian_prod(*2 * [torch.linspace(0, side, 61, dtype=torch.float64)])

# %% [markdown]
# ## Fit
#
# Units stay km and m/s. One pass over the data gives the sufficient statistics of a frequency grid.
# Learning uses only these, so its cost does not depend on the number of observations.

# %%
model = gp_orff.VectorFieldGP(gp_orff.HelmholtzKernel(num_dims=2))
began = time.perf_counter()
model.fit(x, y, progress=False)
seconds = time.perf_counter() - began
print(model.report)
print(f"\n{number} readings, fit {seconds:.1f} s")

# %% [markdown]
# ## The split
#
# The posterior is a sum of waves with random weights. The component of a wave along its frequency
# is the gradient of a potential; the component across it is divergence-free. So the curl-free part
# is a linear map of the same weights, with its own error bars. The constant mean of the model is in
# neither part, since it has neither curl nor divergence.

# %%
field, spread = model.posterior(), gp_orff.CurlFreePart()


def score(name, mean, sd, truth):
    """Print the scores of a posterior; return the share of truth inside its 95 % intervals."""
    error, inside = mean - truth, ((mean - truth).abs() < 1.96 * sd).double().mean().item()
    numbers = truth.square().mean().sqrt(), error.square().mean().sqrt(), sd.square().mean().sqrt()
    print(f"{name:10}" + "".join(f"{100 * value:10.3f}" for value in numbers) + f"{inside:10.3f}")
    return inside


print(f"\n{'cm/s':10}{'truth':>10}{'error':>10}{'sd':>10}{'95 %':>10}   (rms per component)")
mean, sd = field.mean(xs), field.variance(xs).sqrt()
inside = score("current", mean, sd, current(xs))
part = field.mean(xs, spread), field.variance(xs, spread).sqrt()
score("spreading", *part, velocity(xs, *spreading))
assert 0.9 < inside < 0.99

# %% [markdown]
# Observations determine the sum better than its parts: near the edge, a smooth current without curl
# and divergence inside the square may belong to either part. The error bars of the part show this.
#
# ## Ten files, one after the other
#
# The saved model consists of statistics, whose size does not depend on the number of observations.
# Conditioned on the first of ten files and updated with the others, the model has the posterior of
# all files. Its grid is chosen for the hyperparameters that it has, that of the fit for those which
# the search might visit: two grids of one tolerance, whose means are a few hundredths of a standard
# deviation apart at most.


# %%
def apart(other):
    """Largest difference of the posterior from `field`, in its standard deviations."""
    other_sd = other.variance(xs).sqrt()
    return max(((other.mean(xs) - mean) / sd).abs().max(), (other_sd / sd - 1).abs().max()).item()


arguments.output.mkdir(parents=True, exist_ok=True)
path = arguments.output / "current.pt"
model.save(path)
loaded = gp_orff.VectorFieldGP.load(path)
reloaded = apart(loaded.posterior())
print(f"\nsaved in {path.stat().st_size / 1e6:.2f} MB, loaded {reloaded:.0e} sd apart; ", end="")
(x_first, y_first), *files = zip(x.chunk(10), y.chunk(10), strict=True)
began = time.perf_counter()
loaded.condition(x_first, y_first)
for x_new, y_new in files:
    loaded.update(x_new, y_new)
streamed = apart(loaded.posterior())
print(f"ten files in {time.perf_counter() - began:.1f} s, {streamed:.0e} sd apart")
assert reloaded < 1e-9
assert streamed < 0.05  # of a standard deviation, as two grids of this tolerance

# %% [markdown]
# ## Which kernel do the data support?
#
# We compare the evidence of four kernels on a few of the observations: divergence-free, curl-free,
# both (Helmholtz), and independent components.

# %%
print(f"\n{few} readings")
comparison = gp_orff.compare_kernels(x[:few], y[:few], progress=False)
print(comparison)

# %% [markdown]
# ## The figure

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

rows = {
    "current": (current(grid), field.mean(grid), field.variance(grid)),
    "curl-free part": (
        velocity(grid, *spreading),
        field.mean(grid, spread),
        field.variance(grid, spread),
    ),
}
plt.rcParams["axes.titlesize"] = "medium"
figure, axes = plt.subplots(2, 3, figsize=(10.5, 6.2), layout="compressed")
for (name, (truth, estimate, variance)), row in zip(rows.items(), axes, strict=True):
    shared = matplotlib.colors.Normalize(0, 100 * truth.norm(dim=-1).max().item())
    panels = {"truth": truth, "mean": estimate}
    for ax, (title, vectors) in zip(row[:2], panels.items(), strict=True):
        speed = {"shade": 100 * vectors.norm(dim=-1), "norm": shared, "label": "speed (cm/s)"}
        plot_field(ax, grid, 100 * vectors, arrows=15, reference="cm/s", **speed)
        ax.set_title(f"{name}, {title}", loc="left")
    total_sd = 100 * variance.sum(-1).sqrt()
    bulk = matplotlib.colors.Normalize(0, total_sd.quantile(0.99).item())
    label = "standard deviation (cm/s)"
    plot_field(row[2], grid, shade=total_sd, norm=bulk, cmap="cividis", label=label)
    row[2].set_title(f"{name}, sd", loc="left")
plt.setp(axes[1], xlabel="east (km)")
plt.setp(axes[:, 0], ylabel="north (km)")
figure.savefig(arguments.output / "a_million_drifters.png", dpi=88, bbox_inches="tight")
print(f"\nfigure: {arguments.output}/a_million_drifters.png")

# %% [markdown]
# ## The number
#
# How much of the variance of the spreading part was recovered, in the square and in its middle?

# %%
middle = ((grid - side / 2).abs() < side / 4).all(-1)
truth, estimate, _ = rows["curl-free part"]
left = (estimate - truth).square()
found = [(1 - left[m].sum() / truth[m].square().sum()).item() for m in (middle | True, middle)]
print(f"\nof the variance of the spreading part, {found[0]:.1%} was found in the square", end="")
print(f" and {found[1]:.1%} in its middle, under eddies and noise several times as strong")
assert found[1] > 0.5
