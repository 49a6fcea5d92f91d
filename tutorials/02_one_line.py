# %% [markdown]
# # 2. Your multitask model, one line changed
#
# Change one line of a multitask model of gpytorch to learn a magnetic field without curl. Add one
# line for ten times as many observations.
#
# Suppose that you have a gpytorch model with several outputs, and the observations of a
# magnetometer. Outside its sources, a magnetic field is the gradient of a potential, so its curl is
# zero. These are the lines to copy:
#
# ```python
# # the present kernel
# kernel = MultitaskKernel(RBFKernel(), num_tasks=3, rank=1)
#
# # a field without curl
# field = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=3)
# kernel = ScaleKernel(field)
#
# # for many observations
# rule = gp_orff.QuasiMonteCarlo(512)
# kernel = gp_orff.ORFFKernel(kernel, rule)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="A gpytorch multitask model with one line changed.",
    allow_abbrev=False,
)
parser.add_argument("--output", type=Path, default=Path("tutorials/output"))
parser.add_argument(
    "--smoke",
    action="store_true",
    help="small and quick, to see that it runs",
)
parser.add_argument(
    "--robot",
    type=Path,
    help="folder of the public robot magnetometer data",
)
arguments, _ = parser.parse_known_args()  # Jupyter adds its own

# %%
import time
from pathlib import Path

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MultitaskKernel, RBFKernel, ScaleKernel
from matplotlib import pyplot as plt
from tqdm import tqdm

import gp_orff
from gp_orff.plotting import (
    SIGNED,
    STYLE,
    plot_colorbar,
    plot_map,
    title_panels,
)

few, many, columns, iterations = 300, 3000, 512, 40
torch.manual_seed(0)  # gpytorch initialises task covariances at random

# %% tags=["remove-cell"]
if arguments.smoke:
    few, many, columns, iterations = 60, 300, 32, 5

# %% [markdown]
# ## A simulated magnetic field
#
# Six magnets are below a floor of 2 × 2 m. Each is a dipole with the moment m. At the vector r from
# a dipole, its field is B = (3 r (m·r)/r² − m)/r³. We add a uniform field, like that of the Earth.
# The field is observed in a layer above the floor. The standard deviation of the noise is a
# twentieth of that of the field. The models are fitted to the observations divided by one number,
# which is the same for all components.


# %%
def dipoles(x):
    generator = torch.Generator().manual_seed(3)
    place = torch.rand(6, 3, generator=generator).double() * torch.tensor(
        [2.0, 2.0, 0.2]
    )
    moment = torch.randn(6, 3, generator=generator).double()
    r = x.unsqueeze(-2) - (place - torch.tensor([0.0, 0.0, 0.6]))
    distance = r.norm(dim=-1, keepdim=True)
    along = (moment * r).sum(-1, keepdim=True) / distance**2
    field = ((3 * along * r - moment) / distance**3).sum(-2)
    return field + torch.tensor([2.0, 0.0, -4.0])


generator = torch.Generator().manual_seed(0)
layer = torch.tensor([2.0, 2.0, 0.3]).double()
x = torch.rand(many, 3, generator=generator).double() * layer
noise = 0.05 * dipoles(x).std(dim=0).mean()
y = dipoles(x) + noise * torch.randn(many, 3, generator=generator).double()
axis = torch.linspace(0, 2, 41).double()
grid = torch.cartesian_prod(axis, axis, torch.tensor([0.15]).double())
truth = dipoles(grid)


# %% [markdown]
# ## The gpytorch model
#
# This class, the likelihood, the training loop and the predictions do not change.


# %%
class FieldModel(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.MultitaskMean(
            gpytorch.means.ConstantMean(), num_tasks=3
        )
        self.covar_module = kernel

    def forward(self, x):
        mean, covariance = self.mean_module(x), self.covar_module(x)
        return gpytorch.distributions.MultitaskMultivariateNormal(
            mean, covariance
        )


def learn(name, x, y, kernel):
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(
        3, has_task_noise=False
    )
    model = FieldModel(x, y, likelihood, kernel).double().train()
    likelihood.noise = 0.01
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=iterations, line_search_fn="strong_wolfe"
    )
    start = time.perf_counter()
    with tqdm(desc=f"{name:28}", unit=" evaluations", mininterval=0.5) as bar:

        def closure():
            optimizer.zero_grad()
            loss = -mll(model(x), y)
            loss.backward()
            bar.update()
            return loss

        optimizer.step(closure)
    return model.eval(), time.perf_counter() - start


def separable():
    data = RBFKernel()
    data.lengthscale = 0.5
    return MultitaskKernel(data, num_tasks=3, rank=1)


def curl_free():
    potential = RBFKernel()
    potential.lengthscale = 0.5
    kernel = ScaleKernel(gp_orff.CurlFreeKernel(potential, num_dims=3))
    kernel.outputscale = 0.25  # the field's variance is outputscale / ℓ²
    return kernel


def by_features(kernel):
    return gp_orff.ORFFKernel(
        kernel, gp_orff.QuasiMonteCarlo(columns, seed=0), num_dims=3
    )


def compare(x, y, xs, target, noisy_target):
    """Train four models and append their scores; return the models by name."""
    scale, centre = y.std(), y.mean(0)
    rows = [
        (f"separable, exact ({few})", separable(), few),
        (f"curl-free, exact ({few})", curl_free(), few),
        (f"separable, ORFF ({len(x)})", by_features(separable()), len(x)),
        (f"curl-free, ORFF ({len(x)})", by_features(curl_free()), len(x)),
    ]
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    models = {}
    for name, kernel, number in rows:
        rows_used = chosen[:number]
        with gpytorch.settings.max_cholesky_size(10_000):
            model, seconds = learn(
                name, x[rows_used], (y[rows_used] - centre) / scale, kernel
            )
            with torch.no_grad():
                latent = model(xs)
                prediction = (
                    model.likelihood(latent) if noisy_target else latent
                )
                mean, sd = (
                    prediction.mean * scale + centre,
                    prediction.stddev * scale,
                )
        error = mean - target
        nlpd = -torch.distributions.Normal(mean, sd).log_prob(target).mean()
        inside = (error.abs() < 1.96 * sd).double().mean()
        models[name] = (model, mean, sd)
        scores.append(
            f"{name:28}{error.square().mean().sqrt():8.3f}{nlpd:8.3f}"
            f"{inside:8.3f}{seconds:9.1f}"
        )
    return models


# %% [markdown]
# ## Four models
#
# We compare a separable and a curl-free kernel, each as an exact kernel for 300 observations and by
# features for 3000. The predictions are compared with the true field on a slice of the layer. The
# scores are the root mean square error (RMSE), the negative log predictive density (NLPD) per
# component, and the coverage of the 95 % intervals.

# %%
scores = [
    f"{'model (observations)':28}{'RMSE':>8}{'NLPD':>8}{'95 %':>8}{'seconds':>9}"
]
models = compare(x, y, grid, truth, noisy_target=False)
print("", *scores, sep="\n")

# %% [markdown]
# The curl-free kernel reduces the error, and more observations reduce it further. The 95 %
# intervals of the features contain less than 95 % of the truth. The reason is that many
# observations lead to a shorter lengthscale, for which 512 frequencies are too few.
#
# As a check, we compare features with the exact kernel, for the same 300 observations and the same
# hyperparameters. As the number of frequencies grows, the posterior mean of the features converges
# to the exact mean. The difference of the two is then smaller than the error of the exact mean.

# %%
trained = models[f"curl-free, exact ({few})"][0]
with torch.no_grad():
    exact = trained(grid).mean
    from_truth = (exact * y.std() + y.mean(0) - truth).square().mean().sqrt()
    print(
        f"\nexact posterior mean from the truth: {from_truth:.4f} "
        f"(RMSE, {few} observations)"
    )
    for number in (columns, 8 * columns):
        kernel = gp_orff.ORFFKernel(
            trained.covar_module, gp_orff.QuasiMonteCarlo(number)
        )
        model = FieldModel(
            *trained.train_inputs,
            trained.train_targets,
            trained.likelihood,
            kernel,
        ).double()
        model.mean_module = trained.mean_module
        apart = (
            model.eval()(grid).mean - exact
        ).square().mean().sqrt() * y.std()
        print(f"features from exact, {number:5} frequencies: {apart:.4f}")
assert apart < from_truth

# %% [markdown]
# ## The vertical component
#
# Panel a shows the observations, which are at all heights of the layer. The other panels show the
# result of the features of the curl-free kernel on the slice. Panel c is the error of the mean.
# Panel d has this error along one line, with the 95 % interval.

# %%
_, mean_all, sd_all = models[f"curl-free, ORFF ({many})"]
places, mean, sd = grid[:, :2], mean_all[:, 2], sd_all[:, 2]
error, label = mean - truth[:, 2], "vertical field (a.u.)"

plt.rcParams.update(STYLE)
figure, axes = plt.subplots(2, 2, figsize=(7.2, 5.8), layout="compressed")
(given, mapped), (wrong, section) = axes
largest = truth[:, 2].abs().max().item()
norm = plt.Normalize(-largest, largest)
dots = given.scatter(*x.T[:2], 4, y[:, 2], norm=norm, cmap=SIGNED, lw=0)
given.set(xlim=(0, 2), ylim=(0, 2), aspect="equal", facecolor="0.75")
plot_colorbar(given, dots, label)
plot_map(mapped, places, mean, label=label, norm=norm)
plot_map(wrong, places, error, label="mean − truth (a.u.)")
line = places[:, 1] == axis[20]
half = 1.96 * sd[line]
style = {"color": "#0072B2", "alpha": 0.3, "lw": 0, "label": "95 % interval"}
section.fill_between(axis, -half, half, **style)
section.plot(axis, error[line], color="#0072B2", label="mean − truth")
section.set(xlim=(0, 2), box_aspect=1, xlabel="x (m)")
section.set_ylabel("mean − truth (a.u.)")
section.legend()
for ax in (given, mapped, wrong):
    ax.set(xlabel="x (m)", ylabel="y (m)")
titles = (
    f"{many} observations",
    "posterior mean",
    "error of the mean",
    f"error at y = {axis[20]:.0f} m",
)
title_panels(axes, titles)

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "one_line.pdf")
figure.savefig(arguments.output / "one_line.png", dpi=200)
title = mapped.get_title(loc="left")[4:]  # without the letter
mapped.set_title(title, loc="left")
card = mapped.get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    arguments.output / "one_line_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"figure: {arguments.output}/one_line.png")

# %% [markdown]
# ## A robot's magnetometer
#
# The public data of Solin et al. 2018 are observations of a robot in a hall of 6 × 6 m. If `robot`
# is the folder of these data, the same four models are fitted to every tenth observation of paths 1
# to 3. The positions have no height in these files, so z is set to zero. The scores are for the
# noisy observations of path 4.

# %%
robot = None  # or the folder, as a `Path`

# %% tags=["remove-cell"]
robot = arguments.robot

# %%
if robot is not None:

    def read(paths, kind):
        files = [robot / f"invensense-{path}-{kind}.csv" for path in paths]
        return torch.from_numpy(
            np.concatenate([np.loadtxt(f, delimiter=",") for f in files])
        )

    def places(paths):
        return torch.nn.functional.pad(read(paths, "loc"), (0, 1))

    scores = [
        f"{'robot: model (observations)':28}{'RMSE':>8}{'NLPD':>8}"
        f"{'95 %':>8}{'seconds':>9}"
    ]
    compare(
        places([1, 2, 3])[::10],
        read([1, 2, 3], "mag")[::10],
        places([4]),
        read([4], "mag"),
        True,
    )
    print("", *scores, sep="\n")
