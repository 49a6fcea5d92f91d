# %% [markdown]
# # 3. Random, quadrature or grid: which frequencies?
#
# Features approximate a kernel by a sum over frequencies, k(x − z) ≈ Σ wⱼ cos ωⱼ·(x − z). A rule
# chooses the frequencies. Random frequencies do not depend on the data. But are their error bars
# right?
#
# The lines to copy, with all choices made for you, or as one line of your own gpytorch model:
#
# ```python
# kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
# field = gp_orff.VectorFieldGP(kernel).fit(x, y).posterior()
# mean, variance = field.mean(xs), field.variance(xs)
#
# kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x))
# kernel = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, max_features=1000))    # Matérn
# ```

# %%
import argparse
import warnings
from pathlib import Path

import gpytorch
import matplotlib
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gp_orff

parser = argparse.ArgumentParser(description="Random, quadrature or grid: which frequencies?")
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument("--smoke", action="store_true", help="small and quick, to see that it runs")
arguments = parser.parse_args()
few, many, features = (100, 1000, 250) if arguments.smoke else (400, 10_000, 1000)

# %% [markdown]
# ## Two fields, drawn from their priors
#
# We observe a curl-free field, such as a magnetic one, in a hall of five by five metres, with noise
# of 3 % of the field's standard deviation. Its potential has a lengthscale of one metre and an RBF
# or a Matérn 5/2 kernel. The truth is drawn jointly with the observations, at 300 other positions
# and on a line across the hall, so that the exact posterior is correct by construction.

# %%
side = 5.0
generator = torch.Generator().manual_seed(0)
line = torch.linspace(0, side, 201).double()
across = torch.stack([line, torch.full_like(line, side / 2)], dim=-1)
x = side * torch.rand(few, 2, generator=generator).double()
xs = torch.cat([side * torch.rand(300, 2, generator=generator).double(), across])


def curl_free(potential, lengthscale=1.0, num_dims=2):
    potential.lengthscale = lengthscale
    return gp_orff.CurlFreeKernel(potential.double(), num_dims=num_dims)


def readings(kernel):
    """Noisy vectors at x, the variance of their noise, and the field at xs."""
    with torch.no_grad():
        covariance = kernel(torch.cat([x, xs])).to_dense()
    noise = 0.03**2 * covariance[0, 0].item()
    root = torch.linalg.cholesky(covariance + 1e-6 * noise * torch.eye(len(covariance)))
    normal = torch.randn(len(root) + 2 * few, generator=generator).double()
    field = (root @ normal[: len(root)]).reshape(-1, 2)
    return field[:few] + noise**0.5 * normal[len(root) :].reshape(-1, 2), noise, field[few:]


# %% [markdown]
# ## The posterior, by hand and by features
#
# We compute the exact posterior mean K⁎(K + σ²I)⁻¹y and its standard deviation as in a textbook. In
# the gpytorch model, features are one line.


# %%
@torch.no_grad()
def by_hand(kernel, y, noise):
    blocks = kernel(torch.cat([x, xs])).to_dense()
    known, cross, prior = blocks[: 2 * few, : 2 * few], blocks[2 * few :, : 2 * few], blocks.diag()
    factor = torch.linalg.cholesky(known + noise * torch.eye(2 * few))
    mean = cross @ torch.cholesky_solve(y.reshape(-1, 1), factor)
    explained = torch.linalg.solve_triangular(factor, cross.mT, upper=False).square().sum(0)
    return mean.reshape(-1, 2), (prior[2 * few :] - explained).sqrt().reshape(-1, 2)


class FieldModel(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), num_tasks=2)
        self.covar_module = kernel

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)


def by_features(kernel, y, noise):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
        2, has_task_noise=False, noise_constraint=gpytorch.constraints.GreaterThan(1e-8)
    )
    model = FieldModel(x, y, likelihood, kernel).double().eval()
    likelihood.noise = noise
    with torch.no_grad(), gp_orff.settings.check_features(False):  # it would warn, rightly
        posterior = model(xs)
        return posterior.mean, posterior.stddev


# %% [markdown]
# ## The same number of features, five rules
#
# All rules have the hyperparameters of the prior. The columns are the number of features; the
# relative distance of the posterior mean from the exact one; the median ratio of the standard
# deviations to the exact ones; and the negative log density of the truth (NLPD), in nats per
# component.

# %%
nodes = int(features**0.5)
known = {"domain": ((0.0, side),) * 2, "lengthscale_range": (1, 1)}
rules = {
    "Monte Carlo": gp_orff.MonteCarlo(features // 2),
    "Sobol": gp_orff.QuasiMonteCarlo(features // 2),
    "Gauss–Hermite": gp_orff.GaussHermite(nodes),
    "grid": gp_orff.Grid.for_data(x, max_features=features),
    "grid, lengthscale known": gp_orff.Grid.for_data(x, max_features=features, **known),
}


def nlpd(truth, mean, sd):
    return -torch.distributions.Normal(mean, sd).log_prob(truth).mean().item()


results = {}
for name, potential in {"RBF": RBFKernel(), "Matérn 5/2": MaternKernel(nu=2.5)}.items():
    kernel = curl_free(potential)
    y, noise, truth = readings(kernel)
    exact = by_hand(kernel, y, noise)
    results[name, "exact"] = (exact[0] - truth, exact[1], nlpd(truth, *exact))
    print(f"\n{name:24}{'features':>12}{'mean':>10}{'sd ratio':>10}{'NLPD':>10}")
    print(f"{'  exact, by hand':24}{'':32}{results[name, 'exact'][2]:10.3f}")
    for label, rule in rules.items():
        try:
            orff = gp_orff.ORFFKernel(kernel, rule)
            mean, sd = by_features(orff, y, noise)
        except (ValueError, NotImplementedError) as refusal:
            print(f"  {label}: {refusal}")
            continue
        apart = (mean - exact[0]).norm() / exact[0].norm()
        ratio, density = (sd / exact[1]).median().item(), nlpd(truth, mean, sd)
        results[name, label] = (mean - truth, sd, density)
        print(f"  {label:24}{orff.num_features:10}{apart:10.1e}{ratio:10.3f}{density:10.3f}")

# %% [markdown]
# The table shows:
#
# - Random features are overconfident, most of all with a Matérn kernel, whose spectral density has
#   heavy tails: their error is many times their standard deviation.
# - With an RBF kernel and enough features, the grid gives the exact posterior. Gauss–Hermite does
#   too if it has enough nodes for the size of the hall. It raises an error if it has too few, and
#   for other kernels.
# - With a Matérn kernel, no rule of this size is exact. But a grid knows its truncated variance and
#   adds it to the diagonal (`diagonal_correction=True`): its error bars are too wide, not too
#   narrow. A grid for a single lengthscale includes higher frequencies.
# - The tolerance is a share of the field's variance. With little noise and many observations, the
#   posterior variance is a small share too. The RBF grid for a single lengthscale stops at its
#   tolerance, below the number of features allowed. Then set a smaller `tolerance=`.
#
# `accuracy()` gives the truncated variance of a grid before there are any observations:

# %%
print()
for potential in (RBFKernel(), MaternKernel(nu=2.5)):
    orff = gp_orff.ORFFKernel(curl_free(potential), rules["grid"])
    print(f"{type(potential).__name__:14}{orff.num_features:5} features: {orff.accuracy()[0]}")

# %% [markdown]
# ## The domain and the lengthscales of a grid
#
# A sum over a grid of frequencies is periodic in space, and valid in the domain that the grid was
# made for. A point outside raises an error; `domain=` makes the domain larger. A grid also has a
# range of lengthscales, by default 0.7 to 1.4 times those it was built with. The training of an
# `ExactGP` builds a new grid when they leave the range. Elsewhere a `GridWarning` tells you, and
# `redraw()` builds a new grid.

# %%
potential = RBFKernel()
orff = gp_orff.ORFFKernel(curl_free(potential), gp_orff.Grid.for_data(x))
try:
    orff(xs + 10.0).to_dense()
except ValueError as refusal:
    print(f"\n{refusal}\n")
potential.lengthscale = 0.4
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    stale = orff.accuracy()[0]
print(f"{caught[0].category.__name__}: {caught[0].message}\n")
print(f"before redraw(), {orff.num_features} features: {stale}")
print(f"after redraw(),  {orff.redraw().num_features} features: {orff.accuracy()[0]}")

# %% [markdown]
# ## Which rule should you use?
#
# | inputs, data | rule |
# |---|---|
# | N·p of a thousand numbers or less | the exact kernel, no features |
# | 1 to 3 inputs, and time | `Grid`; for Matérn kernels with `max_features=` |
# | RBF, a box of few lengthscales | `GaussHermite` is as good, and follows the lengthscales |
# | more inputs, or a product too large for a grid | `QuasiMonteCarlo`, as many as affordable |
#
# The number of frequencies of a grid is proportional to (box / lengthscale)ᵈ and does not depend on
# the number of observations. `Auto` uses a grid for up to four inputs and Sobol points for more;
# the frequencies have its reason as an attribute.

# %%
print()
for potential, inputs in ((RBFKernel(), 2), (MaternKernel(nu=2.5), 2), (RBFKernel(), 6)):
    kernel = curl_free(potential, num_dims=inputs)
    corners = torch.tensor([[0.0], [side]]).expand(2, inputs)
    rule = gp_orff.Auto(max_features=features).for_data(corners)
    reason = gp_orff.ORFFKernel(kernel, rule).frequencies[0].reason
    print(f"{type(potential).__name__:14}{inputs} inputs: {reason}")

# %% [markdown]
# `VectorFieldGP` makes this choice itself. It learns the hyperparameters on grids that follow the
# lengthscales, and the cost of an iteration does not depend on the number of observations. As the
# true field we now take the exact posterior mean of the RBF data, which can be evaluated anywhere.

# %%
kernel = curl_free(RBFKernel())
y, noise, _ = readings(kernel)
exact = by_hand(kernel, y, noise)
with torch.no_grad():
    covariance = kernel(x).to_dense() + noise * torch.eye(2 * few)
    weights = torch.linalg.solve(covariance, y.reshape(-1, 1))
    positions = side * torch.rand(many, 2, generator=generator).double()
    field = (kernel(positions, x).to_dense() @ weights).reshape(-1, 2)
noisy = field + noise**0.5 * torch.randn(many, 2, generator=generator).double()
model = gp_orff.VectorFieldGP(gpytorch.kernels.ScaleKernel(curl_free(RBFKernel(), 0.3)))
learned = model.fit(positions, noisy).posterior()
rmse = (learned.mean(xs) - exact[0]).square().mean().sqrt()
print(f"\n{model.report}\nRMSE {rmse:.4f}; one reading has noise {noise**0.5:.4f}")
assert rmse < noise**0.5

# %% [markdown]
# ## The figure
#
# The upper row has the frequencies ω and −ω of each rule for the RBF kernel, over the spectral
# density of the field, ‖ω‖² S(ω); the area of a dot is its share of the variance. The lower row has
# the Matérn 5/2 field on the line across the hall: posterior mean minus truth, and the error bars.

# %%
matplotlib.use("agg")
from matplotlib import pyplot as plt

shown = {  # colours of Okabe & Ito, safe for colour-blind readers
    "Monte Carlo": (gp_orff.MonteCarlo(64), "#D55E00"),
    "Sobol": (gp_orff.QuasiMonteCarlo(64), "#009E73"),
    "Gauss–Hermite": (gp_orff.GaussHermite(11), "#CC79A7"),
    "grid": (gp_orff.Grid.for_data(x, max_features=128, **known), "#0072B2"),
}
figure = plt.figure(figsize=(12, 7.2), layout="constrained")
above, below = figure.subfigures(2, 1, height_ratios=(1.13, 1))
above.suptitle("RBF: frequencies, and the spectral density of the field")
below.suptitle(f"Matérn 5/2: errors and error bars on a line, at most {features} features")
potential, reach = RBFKernel(), np.linspace(-5, 5, 201)
kernel, squared = curl_free(potential), reach[:, None] ** 2 + reach**2
axes = above.subplots(1, 4, sharey=True)
for ax, (name, (rule, colour)) in zip(axes, shown.items(), strict=True):
    draw = gp_orff.ORFFKernel(kernel, rule).frequencies[0]
    with torch.no_grad():
        [omega], weight = draw.nodes([gp_orff.spectrum(potential)])
        share = weight * omega.square().sum(-1)
    density = squared * np.exp(-squared / 2)
    ax.pcolormesh(reach, reach, density, cmap="Greys", vmax=1.6, rasterized=True)
    sizes = 1200 * share / share.sum()
    ax.scatter(*torch.cat([omega, -omega]).T, s=torch.cat([sizes, sizes]), color=colour, lw=0)
    ax.set(title=f"{name}, {len(omega)} frequencies", xlabel="ω₁ (1/m)", aspect="equal")
    ax.set(xlim=(-5, 5), ylim=(-5, 5), xticks=range(-4, 5, 2), yticks=range(-4, 5, 2))
axes[0].set_ylabel("ω₂ (1/m)")
axes = below.subplots(1, 3, sharey=True)
_, exact_sd, best = results["Matérn 5/2", "exact"]
for ax, name in zip(axes, ("Monte Carlo", "Sobol", "grid"), strict=True):
    (error, sd, density), colour = results["Matérn 5/2", name], shown[name][1]
    own, limit = (2 * values[300:, 0] for values in (sd, exact_sd))
    ax.fill_between(line, -own, own, color=colour, alpha=0.3, lw=0, label="± 2 sd")
    ax.plot(line, error[300:, 0], color=colour, lw=1.3, label="mean − truth")
    ax.plot(line, limit, "k--", lw=0.9, label="± 2 exact sd")
    ax.plot(line, -limit, "k--", lw=0.9)
    ax.set(title=f"{name}, NLPD {density:.2f} (exact {best:.2f})", xlabel="x₁ (m)")
    ax.set(xlim=(0, side), ylim=(-1.35, 1.35))
    ax.legend(loc="upper center", ncols=3, frameon=False, fontsize=8, columnspacing=1.2)
axes[0].set_ylabel("first component (a.u.)")
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "choosing_frequencies.png", dpi=150)
print(f"\nfigure: {arguments.output}/choosing_frequencies.png")

# %% [markdown]
# ## The number
#
# The largest relative difference between a grid of small tolerance and the exact posterior:

# %%
orff = gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-9, **known))
mean, sd = by_features(orff, y, noise)
apart = (mean - exact[0]).abs().max() / exact[0].abs().max(), (sd / exact[1] - 1).abs().max()
print(f"\ngrid of {orff.num_features} features and exact posterior, {2 * few} numbers: ", end="")
print(f"mean {apart[0]:.0e}, standard deviation {apart[1]:.0e} apart")
assert max(apart) < 1e-4
