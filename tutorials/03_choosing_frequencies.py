# %% [markdown]
# # 3. Random, quadrature or grid: which frequencies?
#
# For the same number of features, random frequencies give error bars that are too narrow, and a
# grid does not.
#
# Features approximate a kernel by a sum over frequencies ωⱼ with weights wⱼ: k(x − z) ≈ Σ wⱼ cos
# ωⱼ·(x − z). A *rule* chooses the frequencies. `VectorFieldGP` chooses the rule automatically. In
# your own gpytorch model, you pass a rule. These are the lines to copy:
#
# ```python
# kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
# field = gp_orff.VectorFieldGP(kernel).fit(x, y).posterior()
# mean, variance = field.mean(xs), field.variance(xs)
#
# # in your model
# rule = gp_orff.Grid.for_data(x)
# kernel = gp_orff.ORFFKernel(kernel, rule)
#
# # for Matérn kernels
# rule = gp_orff.Grid.for_data(x, max_features=1000)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="Random, quadrature or grid: which frequencies?",
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
import warnings

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel
from matplotlib import pyplot as plt

import gp_orff
from gp_orff.plotting import STYLE, title_panels

few, many, features = 400, 10_000, 1000

# %% tags=["remove-cell"]
if arguments.smoke:
    few, many, features = 100, 1000, 250

# %% [markdown]
# ## Two fields, drawn from their priors
#
# We observe a curl-free field, such as a magnetic field in µT, in a hall of 5 × 5 m. The noise is
# 3 % of the standard deviation of the field. The potential has a lengthscale of one metre and an
# RBF or a Matérn 5/2 kernel. We draw the true field from this prior, at the observations, at 300
# other positions, and on a line across the hall. The exact posterior is therefore correct by
# construction.

# %%
side = 5.0
generator = torch.Generator().manual_seed(0)
line = torch.linspace(0, side, 201).double()
across = torch.stack([line, torch.full_like(line, side / 2)], dim=-1)
x = side * torch.rand(few, 2, generator=generator).double()
xs = torch.cat(
    [side * torch.rand(300, 2, generator=generator).double(), across]
)


def curl_free(potential, lengthscale=1.0, num_dims=2):
    potential.lengthscale = lengthscale
    return gp_orff.CurlFreeKernel(potential.double(), num_dims=num_dims)


def observations(kernel):
    """Noisy vectors at x, the variance of their noise, and the field at xs."""
    with torch.no_grad():
        covariance = kernel(torch.cat([x, xs])).to_dense()
    noise = 0.03**2 * covariance[0, 0].item()
    root = torch.linalg.cholesky(
        covariance + 1e-6 * noise * torch.eye(len(covariance))
    )
    normal = torch.randn(len(root) + 2 * few, generator=generator).double()
    field = (root @ normal[: len(root)]).reshape(-1, 2)
    return (
        field[:few] + noise**0.5 * normal[len(root) :].reshape(-1, 2),
        noise,
        field[few:],
    )


# %% [markdown]
# ## The posterior, by hand and by features
#
# We compute the exact posterior mean K⁎(K + σ²I)⁻¹y and its standard deviation as in a textbook. In
# the gpytorch model, features need only one line.


# %%
@torch.no_grad()
def by_hand(kernel, y, noise):
    blocks = kernel(torch.cat([x, xs])).to_dense()
    known, cross, prior = (
        blocks[: 2 * few, : 2 * few],
        blocks[2 * few :, : 2 * few],
        blocks.diag(),
    )
    factor = torch.linalg.cholesky(known + noise * torch.eye(2 * few))
    mean = cross @ torch.cholesky_solve(y.reshape(-1, 1), factor)
    explained = (
        torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        .square()
        .sum(0)
    )
    return mean.reshape(-1, 2), (prior[2 * few :] - explained).sqrt().reshape(
        -1, 2
    )


class FieldModel(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(
            gpytorch.means.ZeroMean(), num_tasks=2
        )
        self.covar_module = kernel

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultitaskMultivariateNormal(
            mean, covariance
        )


def by_features(kernel, y, noise):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
        2,
        has_task_noise=False,
        noise_constraint=gpytorch.constraints.GreaterThan(1e-8),
    )
    model = FieldModel(x, y, likelihood, kernel).double().eval()
    likelihood.noise = noise
    with (
        torch.no_grad(),
        gp_orff.settings.check_features(False),
    ):  # no FeatureWarning
        posterior = model(xs)
        return posterior.mean, posterior.stddev


# %% [markdown]
# ## Five rules with the same number of features
#
# All rules have the hyperparameters of the prior. The columns of the table are:
#
# - the number of features;
# - the difference of the posterior mean from the exact one, relative to the exact one;
# - the posterior standard deviation divided by the exact one (median over points);
# - the negative log predictive density (NLPD) of the true field, in nats per component.

# %%
nodes = int(features**0.5)
known = {"domain": ((0.0, side),) * 2, "lengthscale_range": (1, 1)}
rules = {
    "Monte Carlo": gp_orff.MonteCarlo(features // 2),
    "Sobol": gp_orff.QuasiMonteCarlo(features // 2),
    "Gauss–Hermite": gp_orff.GaussHermite(nodes),
    "grid": gp_orff.Grid.for_data(x, max_features=features),
    "grid, lengthscale known": gp_orff.Grid.for_data(
        x, max_features=features, **known
    ),
}


def nlpd(truth, mean, sd):
    return -torch.distributions.Normal(mean, sd).log_prob(truth).mean().item()


results = {}
for name, potential in {
    "RBF": RBFKernel(),
    "Matérn 5/2": MaternKernel(nu=2.5),
}.items():
    kernel = curl_free(potential)
    y, noise, truth = observations(kernel)
    exact = by_hand(kernel, y, noise)
    results[name, "exact"] = (exact[0] - truth, exact[1], nlpd(truth, *exact))
    print(
        f"\n{name:24}{'features':>12}{'mean':>10}{'sd ratio':>10}{'NLPD':>10}"
    )
    print(f"{'  exact, by hand':24}{'':32}{results[name, 'exact'][2]:10.3f}")
    for label, rule in rules.items():
        try:
            orff = gp_orff.ORFFKernel(kernel, rule)
            mean, sd = by_features(orff, y, noise)
        except (ValueError, NotImplementedError) as refusal:
            print(f"  {label}: {refusal}")
            continue
        difference = (mean - exact[0]).norm() / exact[0].norm()
        ratio, density = (sd / exact[1]).median().item(), nlpd(truth, mean, sd)
        results[name, label] = (mean - truth, sd, density)
        print(
            f"  {label:24}{orff.num_features:10}{difference:10.1e}"
            f"{ratio:10.3f}{density:10.3f}"
        )

# %% [markdown]
# The table shows:
#
# - Random features are overconfident: their error is many times their standard deviation. This is
#   worst with a Matérn kernel, whose spectral density has heavy tails.
# - With an RBF kernel and enough features, the grid gives the exact posterior. So does
#   Gauss–Hermite, if it has enough nodes for the size of the hall. It raises an error if it has too
#   few nodes, or if the kernel is not RBF.
# - With a Matérn kernel, no rule of this size is exact. A grid adds the variance that it truncates
#   to the diagonal (`diagonal_correction=True`), so its error bars are too wide, and not too
#   narrow. If you know the lengthscale, the grid need not be valid for a range of lengthscales.
#   The same number of features then includes higher frequencies.
# - The tolerance is relative to the variance of the field. If there are many observations with low
#   noise, the posterior variance may be as small as the tolerance. In this case, set a smaller
#   `tolerance=`. The RBF grid for a known lengthscale has reached its tolerance, so it uses fewer
#   features than allowed.
#
# `accuracy()` returns the truncated variance of a grid. It needs no observations:

# %%
print()
for potential in (RBFKernel(), MaternKernel(nu=2.5)):
    orff = gp_orff.ORFFKernel(curl_free(potential), rules["grid"])
    print(
        f"{type(potential).__name__:14}{orff.num_features:5} features: "
        f"{orff.accuracy()[0]}"
    )

# %% [markdown]
# ## The domain and the lengthscales of a grid
#
# A sum over a grid of frequencies is periodic in space, so it is valid only in the domain of the
# grid. A point outside the domain raises an error. To make the domain larger, pass `domain=`.
#
# A grid is also valid only for a range of lengthscales. By default, this is 0.7 to 1.4 times the
# lengthscales for which it was built. If the training of an `ExactGP` leaves this range, it builds
# a new grid. If you set a lengthscale outside the range, you get a `GridWarning`. Call `redraw()`
# to build a new grid.

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
print(
    f"after redraw(),  {orff.redraw().num_features} features: {orff.accuracy()[0]}"
)

# %% [markdown]
# ## The choice of a rule
# | inputs and data | rule |
# |---|---|
# | at most 1000 observed values (N·p) | the exact kernel, without features |
# | 1 to 3 inputs, and time | `Grid`; pass `max_features=` for Matérn kernels |
# | an RBF kernel, a box of few lengthscales | `GaussHermite`, also if lengthscales change |
# | more inputs, or too many features for a grid | `QuasiMonteCarlo`, as many as you can afford |
#
# The number of frequencies of a grid is proportional to (box / lengthscale)ᵈ and does not depend on
# the number of observations. `Auto` uses a grid for up to four inputs, and Sobol points for more.
# The attribute `reason` of the frequencies states why.

# %%
print()
for potential, inputs in (
    (RBFKernel(), 2),
    (MaternKernel(nu=2.5), 2),
    (RBFKernel(), 6),
):
    kernel = curl_free(potential, num_dims=inputs)
    corners = torch.tensor([[0.0], [side]]).expand(2, inputs)
    rule = gp_orff.Auto(max_features=features).for_data(corners)
    reason = gp_orff.ORFFKernel(kernel, rule).frequencies[0].reason
    print(f"{type(potential).__name__:14}{inputs} inputs: {reason}")

# %% [markdown]
# `VectorFieldGP` makes this choice itself. When the lengthscales change during a fit, it builds new
# grids. The cost of an iteration does not depend on the number of observations. To test this with
# many observations, we need a true field that we can evaluate at any point. For this purpose, we
# compute the exact posterior mean for another draw of the RBF field. This mean is the true field,
# and the model is fitted to noisy observations of it.

# %%
kernel = curl_free(RBFKernel())
y, noise, _ = observations(kernel)
exact = by_hand(kernel, y, noise)
with torch.no_grad():
    covariance = kernel(x).to_dense() + noise * torch.eye(2 * few)
    weights = torch.linalg.solve(covariance, y.reshape(-1, 1))
    positions = side * torch.rand(many, 2, generator=generator).double()
    field = (kernel(positions, x).to_dense() @ weights).reshape(-1, 2)
noisy = field + noise**0.5 * torch.randn(many, 2, generator=generator).double()
model = gp_orff.VectorFieldGP(
    gpytorch.kernels.ScaleKernel(curl_free(RBFKernel(), 0.3))
)
learned = model.fit(positions, noisy).posterior()
rmse = (learned.mean(xs) - exact[0]).square().mean().sqrt()
print(
    f"\n{model.report}\nRMSE {rmse:.4f} µT; noise of an observation {noise**0.5:.4f} µT"
)
assert rmse < noise**0.5

# %% [markdown]
# ## Frequencies and error bars
#
# Panels a to d show the frequencies ω and −ω of four rules for the RBF kernel, and their number.
# The background is the spectral density of the field, ‖ω‖² S(ω). The area of a dot is proportional
# to the variance of its frequency. Panels e to g are for the Matérn 5/2 field on the line across
# the hall. They show the posterior mean minus the truth, and 95 % intervals.

# %%
shown = {  # colours of Okabe & Ito, safe for colour-blind readers
    "Monte Carlo": (gp_orff.MonteCarlo(64), "#D55E00"),
    "Sobol": (gp_orff.QuasiMonteCarlo(64), "#009E73"),
    "Gauss–Hermite": (gp_orff.GaussHermite(11), "#CC79A7"),
    "grid": (gp_orff.Grid.for_data(x, max_features=128, **known), "#0072B2"),
}
plt.rcParams.update(STYLE)
figure = plt.figure(figsize=(7.2, 4.6), layout="constrained")
above, below = figure.subfigures(2, 1, height_ratios=(1, 1.15))
upper = above.subplots(1, 4, sharey=True)
lower = below.subplots(1, 3, sharey=True)
potential, reach = RBFKernel(), np.linspace(-5, 5, 201)
kernel, squared = curl_free(potential), reach[:, None] ** 2 + reach**2
density = squared * np.exp(-squared / 2)
titles = []
for ax, (name, (rule, colour)) in zip(upper, shown.items(), strict=True):
    draw = gp_orff.ORFFKernel(kernel, rule).frequencies[0]
    with torch.no_grad():
        [omega], weight = draw.nodes([gp_orff.spectrum(potential)])
        share = weight * omega.square().sum(-1)
    ax.pcolormesh(
        reach, reach, density, cmap="Greys", vmax=1.6, rasterized=True
    )
    sizes, both = 300 * share / share.sum(), torch.cat([omega, -omega])
    ax.scatter(*both.T, s=torch.cat([sizes, sizes]), color=colour, lw=0)
    ax.set(xlabel="ω₁ (1/m)", aspect="equal", xlim=(-5, 5), ylim=(-5, 5))
    ax.set(xticks=range(-4, 5, 2), yticks=range(-4, 5, 2))
    titles.append(f"{name}: {len(omega)}")
upper[0].set_ylabel("ω₂ (1/m)")

_, exact_sd, best = results["Matérn 5/2", "exact"]
for ax, name in zip(lower, ("Monte Carlo", "Sobol", "grid"), strict=True):
    (error, sd, density), colour = results["Matérn 5/2", name], shown[name][1]
    own, exact_limit = (1.96 * values[300:, 0] for values in (sd, exact_sd))
    ax.fill_between(line, -own, own, color=colour, alpha=0.3, lw=0)
    ax.plot(line, error[300:, 0], color=colour, lw=1)
    ax.plot(line, exact_limit, "k--", lw=0.8)
    ax.plot(line, -exact_limit, "k--", lw=0.8)
    ax.set(xlabel="x₁ (m)", xlim=(0, side), ylim=(-1.2, 1.2))
    titles.append(f"{name}: NLPD {density:.2f}".replace("-", "−"))
lower[0].set_ylabel("first component (µT)")
title_panels([*upper, *lower], titles)
grey = {"color": "0.5"}
entries = {
    "mean − truth": plt.Line2D([], [], lw=1, **grey),
    "95 % interval": plt.Rectangle((0, 0), 1, 1, alpha=0.4, lw=0, **grey),
    "exact 95 % interval": plt.Line2D([], [], ls="--", lw=0.8, color="k"),
}
place = {"loc": "outside lower center", "ncols": 3}
below.legend(entries.values(), entries.keys(), **place)
print(f"\nMatérn 5/2: exact NLPD {best:.2f}")

# %% tags=["remove-cell"]
output = arguments.output
output.mkdir(parents=True, exist_ok=True)
figure.savefig(output / "choosing_frequencies.pdf")
figure.savefig(output / "choosing_frequencies.png", dpi=200)
title = lower[0].get_title(loc="left")[4:]  # without the letter
lower[0].set_title(title, loc="left")
card = lower[0].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    output / "choosing_frequencies_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"figure: {output}/choosing_frequencies.png")

# %% [markdown]
# ## The largest difference from the exact posterior
#
# The last lines print the largest relative difference between the posterior of a grid with a small
# tolerance and the exact posterior.

# %%
rule = gp_orff.Grid.for_data(x, tolerance=1e-9, **known)
orff = gp_orff.ORFFKernel(kernel, rule)
mean, sd = by_features(orff, y, noise)
of_mean = (mean - exact[0]).abs().max() / exact[0].abs().max()
of_sd = (sd / exact[1] - 1).abs().max()
print(
    f"\n{orff.num_features} features, {2 * few} values, difference from ",
    end="",
)
print(f"exact: mean {of_mean:.0e}, standard deviation {of_sd:.0e}")
assert max(of_mean, of_sd) < 1e-4
