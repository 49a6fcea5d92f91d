# %% [markdown]
# # 10. Few labels, many points
#
# Points without a label improve a regression if the function changes little between neighbours, and
# cross-validation shows whether they do.
#
# A label, which is a measured value, costs money. A point, such as a position, a spectrum or an
# image, is often free. When do points without a label improve the estimate of a field? Does
# cross-validation choose hyperparameters as well as the evidence of `VectorFieldGP`? To answer both
# questions, we use the class `ORFFRidge`, which is ridge regression on operator-valued Fourier
# features. It follows the conventions of scikit-learn. These are the lines to copy:
#
# ```python
# from gp_orff.regression import ORFFRidge, ORFFRidgeClassifier
#
# y[unlabelled] = np.nan  # rows without a label
# kernel = gp_orff.CurlFreeKernel(RBFKernel(), num_dims=2)
# field = ORFFRidge(kernel, alpha=0.01, laplacian_weight=0.1)
# field.fit(X, y)
#
# choices = {"alpha": [1e-3, 1e-2, 0.1], "kernel": kernels}
# search = GridSearchCV(field, choices).fit(X, y)
#
# classifier = ORFFRidgeClassifier(RBFKernel()).fit(images, digits)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="Regression and classification from few labels.",
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
import time
import warnings

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, KFold

import gp_orff
from gp_orff.plotting import STYLE, plot_colorbar, title_panels
from gp_orff.regression import (
    ORFFRidge,
    ORFFRidgeClassifier,
    ORFFRidgeCV,
    simplex_codes,
    view_disagreement,
)

num_seeds, num_unlabelled, num_images = 5, 1000, 1297
weights = [0, 0.001, 0.01, 0.03, 0.1, 0.3, 1, 3]
agreement = [0, 0.1, 0.3, 1, 3, 10, 30]
numbers, counts = (32, 128, 512), (20, 50, 100, 200, 500)
steps, sizes = 5, (200, 40)

# %% tags=["remove-cell"]
if arguments.smoke:
    num_seeds, num_unlabelled, num_images = 1, 300, 400
    weights, agreement = [0, 0.01, 0.1, 1], [0, 3]
    numbers, counts = (32, 128), (50, 100)
    steps, sizes = 3, (40,)


# %%
def rmse(found, truth):
    """The root mean square error of a component."""
    return np.sqrt(np.mean((np.asarray(found) - truth) ** 2))


def scalar(lengthscale, columns=None):
    kernel = RBFKernel(active_dims=columns).double()
    kernel.lengthscale = lengthscale
    return kernel


def curl_free(lengthscale):
    """A curl-free kernel whose components have a variance of 1."""
    kernel = ScaleKernel(
        gp_orff.CurlFreeKernel(scalar(lengthscale), num_dims=2)
    ).double()
    kernel.outputscale = lengthscale**2
    return kernel


# %% [markdown]
# ## A fold with twenty outcrops
#
# Geologists describe folds by the gradient of a function that increases from layer to layer. Such a
# field has no curl (Lajaunie, Courrioux & Manuel 1997, Math. Geol. 29). Our vertical section has
# one layer. Its position is known at 1000 points, and the gradient is observed at 20 outcrops. The
# gradient is normal to the layer. Its length, which has no unit, describes how much the layer is
# compacted. On the next limb of the fold, at a distance of 40 m, the gradient points in the other
# direction.
#
# A kernel depends on distances in the section. For a kernel, the next limb is close, although it is
# far away along the layer. The points without a label provide the distances along the layer.
# `ORFFRidge` connects each point with its neighbours in a graph, and penalises changes of the field
# along the edges of this graph:
#
#     minimise  Σ |f(x_n) − y_n|²  +  alpha |θ|²  +  w fᵀ M f
#
# The sum is over outcrops, and θ are the weights of the features. In the last term, f is the vector
# of the values at all points, and M is the Laplacian of the graph (Minh 2016, Equations 67 and 74).
# M is scaled so that fᵀ M f is the mean squared slope of f between neighbours, times r². Here r is
# the root mean square distance of the points from their centre. A weight w therefore has the same
# meaning for 100 and for 10 000 points, and in any unit of length.

# %%
wave, height = 80.0, 100.0  # m
fine = np.linspace(0, 2 * wave, 20_001)
shape = height * np.sin(2 * np.pi * fine / wave)
length = np.hypot(np.diff(fine), np.diff(shape)).cumsum()


def along_the_curve(num_points, rng):
    """Positions (n, 2) on the curve, uniform along it, in m."""
    first = np.interp(rng.random(num_points) * length[-1], length, fine[1:])
    return np.stack([first, np.interp(first, fine, shape)], axis=1)


def fold(x, rng):
    """The gradient at points of the layer: normal to it."""
    phase = 2 * np.pi * rng.random()
    slope = height * 2 * np.pi / wave * np.cos(2 * np.pi * x[:, 0] / wave)
    normal = np.stack([-slope, np.ones(len(x))], axis=1)
    normal /= np.sqrt(1 + slope**2)[:, None]
    return (1 + 0.4 * np.sin(2 * np.pi * x[:, :1] / 110 + phase)) * normal


def hills(x, rng):
    """The slope of a landscape, a sample of a curl-free kernel."""
    seed, box = int(rng.integers(1000)), ((0, 2 * wave), (-height, height))
    paths = gp_orff.sample_prior(curl_free(20.0), 1, seed=seed, domain=box)
    return paths(torch.from_numpy(x))[0].numpy()


# %% [markdown]
# ## A road over hills
#
# A second case has the same points, but now they are on a winding road. The slope of the land is
# observed at 20 of them. The land is as smooth across the road as along it. In this case, the
# points without a label contain no information, and the penalty is wrong.
#
# The error is the root mean square error (RMSE) of a component at 500 other points. For each weight
# w, the table has the ratio of two errors: with this weight, and without the penalty. The ratio is
# the geometric mean over five data sets.

# %%
num_labelled, noise = 20, 0.05
cases = {"fold": (fold, 30.0), "road": (hills, 20.0)}  # lengthscales in m


def curve_data(field, seed):
    """Points, labels or NaN, held-out points, and the truth there."""
    rng = np.random.default_rng(seed)
    x = along_the_curve(num_labelled + num_unlabelled + 500, rng)
    truth = field(x, rng)
    y = truth + noise * rng.standard_normal(x.shape)
    y[num_labelled:] = np.nan
    return x[:-500], y[:-500], x[-500:], truth[-500:]


errors = {}
for name, (field, lengthscale) in cases.items():
    rows = []
    for seed in range(num_seeds):
        x, y, xs, truth = curve_data(field, seed)
        models = [
            ORFFRidge(
                curl_free(lengthscale), alpha=noise**2, laplacian_weight=weight
            ).fit(x, y)
            for weight in weights
        ]
        rows.append([rmse(model.predict(xs), truth) for model in models])
        if (name, seed) == ("fold", 0):
            chosen = [weights.index(weight) for weight in (0, 0.1)]
            shown = x, y, xs, truth, *(models[k].predict(xs) for k in chosen)
    errors[name] = np.array(rows)


def ratio(name):
    """The error with each weight over that without."""
    return np.exp(np.log(errors[name] / errors[name][:, :1]).mean(0))


def print_row(name, values, form):
    print(f"{name:14}" + "".join(f"{value:8{form}}" for value in values))


print("ratio of errors, with and without unlabelled points")
print_row("weight", weights, "g")
for name in cases:
    print_row(name, ratio(name), ".2f")
assert ratio("fold").min() < 0.95 < 1 < ratio("road")[1:].min()

# %% [markdown]
# On the fold, the points without a label reduce the error by a fifth, for all weights from 0.03 to
# 0.3. On the road, every weight increases the error. To find out which case you have, use
# cross-validation. Hold out a part of the labels in turn, and use all points without a label in
# each training set.

# %%
print("\ncross-validation over 20 labels: weight and ratio of errors")
for name, (field, lengthscale) in cases.items():
    gains = []
    for seed in range(num_seeds):
        x, y, xs, truth = curve_data(field, seed)
        others = np.arange(num_labelled, len(x))
        splits = KFold(5, shuffle=True, random_state=0).split(y[:num_labelled])
        search = GridSearchCV(
            ORFFRidge(curl_free(lengthscale), alpha=noise**2),
            {"laplacian_weight": [0, 0.01, 0.1]},
            cv=[(np.append(train, others), test) for train, test in splits],
            scoring="neg_mean_squared_error",
        ).fit(x, y)
        chosen = search.best_params_["laplacian_weight"]
        gains.append(rmse(search.predict(xs), truth) / errors[name][seed, 0])
        print(f"{name:8}{chosen:6} {gains[-1]:6.2f}")
    print(f"{name:8}  mean {np.exp(np.log(gains).mean()):6.2f}")

# %% [markdown]
# Twenty labels are too few to find the best weight, but enough to distinguish the fold from the
# road. On average over five data sets, cross-validation reduces the error of the fold by 14 %. It
# does not increase the error of any data set, and it chooses a weight of zero for every road.
#
# ## Two instruments
#
# Two spectrometers with four channels each measure the same samples. In each instrument, one
# combination of the channels depends on the concentration, and the other combinations are
# disturbances. The label of a sample is a function of its concentration. We estimate it from the
# channels. Let f_1 be a function of the channels of the first instrument, and f_2 a function of the
# channels of the second. The label is modelled by their mean, so the argument `combination` is
# [1/2, 1/2]. The kernel of (f_1, f_2) has two outputs.
#
# Some samples have no label, but both instruments measured them. The penalty is the mean square of
# f_1 − f_2 at these samples. The disturbances of the two instruments are independent. The functions
# therefore agree only if they depend on the concentration alone.

# %%
first, second = torch.eye(2).double().split(1, dim=1)
view_1 = gp_orff.SeparableKernel(scalar(2.0, (0, 1, 2, 3)), root=first)
view_2 = gp_orff.SeparableKernel(scalar(2.0, (4, 5, 6, 7)), root=second)
views = view_1 + view_2


def instruments(num_samples, rng):
    """Channels (n, 8) of both instruments, and the response (n,)."""
    concentration = rng.uniform(-1.7, 1.7, num_samples)
    channels = []
    for _ in range(2):
        signals = rng.standard_normal((num_samples, 4))
        signals[:, 0] = concentration + 0.15 * signals[:, 0]
        mixture = np.linalg.qr(rng.standard_normal((4, 4)))[0]
        channels.append(signals @ mixture)
    return np.concatenate(channels, axis=1), np.sin(1.5 * concentration)


num_samples = 20 + num_unlabelled // 2
rows = []
for seed in range(num_seeds):
    rng = np.random.default_rng(seed)
    x, truth = instruments(num_samples + 500, rng)
    y = truth[:num_samples] + 0.1 * rng.standard_normal(num_samples)
    y[20:] = np.nan
    # the mean of (f_1 - f_2)^2
    penalty = view_disagreement(num_samples, num_views=2) / num_samples
    rule, row = gp_orff.QuasiMonteCarlo(128, seed=0), []
    for weight in agreement:
        model = ORFFRidge(views, rule, alpha=0.01, laplacian_weight=weight)
        model.fit(
            x[:num_samples], y, laplacian=penalty, combination=[[0.5, 0.5]]
        )
        row.append(rmse(model.predict(x[num_samples:]), truth[num_samples:]))
    rows.append(row)
errors["instruments"] = np.array(rows)
print()
print_row("weight", agreement, "g")
print_row("instruments", ratio("instruments"), ".2f")
assert ratio("instruments").min() < 0.9

# %% [markdown]
# ## Digits
#
# scikit-learn has 1797 images of digits with 8 × 8 pixels. `ORFFRidgeClassifier` gives each class a
# code, which is a corner of a simplex in nine dimensions (Mroueh et al. 2012). It predicts the code
# by ridge regression, and returns the class of the nearest code. An image is a point in 64
# dimensions. A frequency grid is not possible in so many dimensions, so the frequencies are random.
# 500 images are held out.

# %%
images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images, digits = images[order] / 16, digits[order]
judged, pool = slice(0, 500), slice(500, 500 + num_images)

print(
    f"\n{len(digits[pool])} labels\n{'frequencies':14}{'mistakes':>10}{'seconds':>10}"
)
for number in numbers:
    began = time.perf_counter()
    classifier = ORFFRidgeClassifier(
        scalar(2.0), gp_orff.QuasiMonteCarlo(number), alpha=0.01
    )
    classifier.fit(images[pool], digits[pool])
    full = 1 - classifier.score(images[judged], digits[judged])
    seconds = time.perf_counter() - began
    print(f"{number:<14}{100 * full:8.1f} %{seconds:10.2f}")

# %% [markdown]
# Now only some of the images have a label. The codes of the others are NaN, and a graph connects
# similar images. The weight of the penalty is 30 for every number of labels. The images of a digit
# form a cluster, and the graph reduces the number of mistakes for every number of labels.

# %%
codes = simplex_codes(10)
rows = []
for seed in range(num_seeds)[:3]:
    chosen = np.random.default_rng(seed).permutation(len(digits[pool]))
    x, labels = images[pool][chosen], digits[pool][chosen]
    for count in counts:
        y = np.where(np.arange(len(x))[:, None] < count, codes[labels], np.nan)
        for weight in (0.0, 30.0):
            rule = gp_orff.QuasiMonteCarlo(numbers[-1] // 2, seed=0)
            model = ORFFRidge(
                scalar(2.0), rule, alpha=0.01, laplacian_weight=weight
            ).fit(x, y)
            found = (model.predict(images[judged]) @ codes.T).argmax(axis=1)
            rows.append(np.mean(found != digits[judged]))
mistakes = np.reshape(rows, (-1, len(counts), 2)).mean(0)
print(f"\n{'labels':10}{'labels only':>14}{'with unlabelled':>18}")
for count, (alone, together) in zip(counts, 100 * mistakes, strict=True):
    print(f"{count:<10}{alone:12.1f} %{together:16.1f} %")
assert (mistakes[:, 1] < mistakes[:, 0]).all()

# %% [markdown]
# ## Cross-validation and the evidence
#
# `ORFFRidge` uses the lengthscale and the alpha that you pass. `GridSearchCV` chooses both by the
# error of held-out vectors. `ORFFRidgeCV` chooses alpha by generalised cross-validation (GCV), with
# one decomposition of a matrix for all values of alpha. `VectorFieldGP` maximises the evidence by
# its gradient.
#
# We apply all three methods to samples of a curl-free kernel, with 200 or 40 noisy vectors. The
# lengthscale is 0.3. The standard deviation is 3 for the components of the field, and 0.5 for the
# noise. The true `alpha` is the variance of the noise divided by that of a component, 0.028.

# %%
lengthscales = np.geomspace(0.15, 0.6, steps)
alphas = np.geomspace(1e-3, 1e-1, steps)
many_alphas = np.geomspace(1e-5, 10, 61)


def noisy_field(num_points, seed):
    """Points, noisy vectors, held-out points, and the truth there."""
    rng, box = np.random.default_rng(seed), ((-1, 1), (-1, 1))
    x = rng.uniform(-1, 1, (num_points + 1000, 2))
    paths = gp_orff.sample_prior(curl_free(0.3), 1, seed=seed, domain=box)
    truth = 3 * paths(torch.from_numpy(x))[0].numpy()
    y = truth + 0.5 * rng.standard_normal(truth.shape)
    return x[:num_points], y[:num_points], x[num_points:], truth[num_points:]


def by_grid_search(x, y):
    kernels = [curl_free(value) for value in lengthscales]
    search = GridSearchCV(
        ORFFRidge(),
        {"kernel": kernels, "alpha": alphas},
        cv=5,
        scoring="neg_root_mean_squared_error",
    ).fit(x, y)
    found = search.best_params_["kernel"].base_kernel.base_kernel.lengthscale
    return search, found.item(), search.best_params_["alpha"], search.predict


def by_gcv(x, y):
    models = [
        ORFFRidgeCV(curl_free(value), alphas=many_alphas)
        for value in lengthscales
    ]
    # with a wrong lengthscale, the best alpha is at an end of the range
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="the generalised cross-validation error"
        )
        models = [model.fit(x, y) for model in models]
    best = int(np.argmin([model.gcv_errors_.min() for model in models]))
    return (
        models[best],
        lengthscales[best],
        models[best].alpha_,
        models[best].predict,
    )


def by_evidence(x, y):
    model = gp_orff.VectorFieldGP(gp_orff.CurlFreeKernel(num_dims=2))
    model.fit(x, y, progress=False)
    variance = model.kernel(torch.zeros(1, 2).double()).to_dense()[0, 0].item()
    lengthscale = model.kernel.base_kernel.base_kernel.lengthscale.item()
    alpha = model.likelihood.noise.mean().item() / variance
    return model, lengthscale, alpha, model.posterior().mean


choices = {
    "grid search": by_grid_search,
    "GCV": by_gcv,
    "evidence": by_evidence,
}
table, inside = {}, []
for size in sizes:
    for seed in range(num_seeds):
        x, y, xs, truth = noisy_field(size, seed)
        chosen = {}
        for name, choose in choices.items():
            began = time.perf_counter()
            chosen[name] = choose(x, y)
            seconds = time.perf_counter() - began
            _, lengthscale, alpha, predict = chosen[name]
            row = lengthscale, alpha, rmse(predict(xs), truth), seconds
            table.setdefault((size, name), []).append(row)
        field = chosen["evidence"][0].posterior()
        miss, sd = field.mean(xs).numpy() - truth, field.variance(xs).sqrt()
        inside.append(np.mean(abs(miss) < 1.96 * sd.numpy()))
table = {key: np.mean(rows, axis=0) for key, rows in table.items()}
print(f"\n{'vectors':9}{'chosen by':13}{'lengthscale':>12}", end="")
print(f"{'alpha':>8}{'RMSE':>8}{'seconds':>9}")
for (size, name), (lengthscale, alpha, error, seconds) in table.items():
    print(f"{size:<9}{name:13}{lengthscale:12.2f}", end="")
    print(f"{alpha:8.3f}{error:8.3f}{seconds:9.2f}")
print(f"evidence: coverage of the 95 % intervals {np.mean(inside):.3f}")
for size in sizes:
    assert table[size, "evidence"][2] < 1.1 * table[size, "grid search"][2]
assert 0.85 < np.mean(inside) <= 1

# %% [markdown]
# With 200 and with 40 vectors, the grid search and the evidence have nearly the same error. The
# grid search has an advantage here: its grid contains the true lengthscale. The error of GCV is
# larger. Only `VectorFieldGP` gives a posterior. Its 95 % intervals have a coverage of 0.94.
#
# In this example, the prior is right. If the prior is wrong, cross-validation still estimates the
# error of predictions, but the evidence does not. The grid of 5 × 5 values and 5 folds needs 125
# fits. A third hyperparameter multiplies this number by five, but adds only a small number of steps
# to a search by the gradient of the evidence. GCV has the lowest cost.
#
# The ridge estimators do not return standard deviations. Use them in pipelines of scikit-learn,
# with other losses, with classes, with points without a label, or with several views. Use
# `VectorFieldGP` if you need intervals.
#
# ## Points with and without a label
#
# The error of the gradient is a vector. Panels a and b show its length at 500 held-out points of
# the fold. The arrows are the observations of the first data set. In panel c, thick lines are
# geometric means over the five data sets, and each thin line is one data set.

# %%
plt.style.use(STYLE)
figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.9), layout="compressed")
x, y, xs, truth, *means = shown
scale = plt.Normalize(0, 1)
for ax, mean in zip(axes[:2], means, strict=True):
    error = np.linalg.norm(mean - truth, axis=1)
    points = ax.scatter(*xs.T, c=error, s=5, lw=0, norm=scale)
    outcrops, gradients = x[:num_labelled], y[:num_labelled]
    style = {"scale": 9, "width": 0.01, "color": "#D55E00"}
    arrows = ax.quiver(*outcrops.T, *gradients.T, **style)
    if ax is axes[0]:
        ax.quiverkey(arrows, 0.87, 1.06, 1, "1", labelpos="W")
    ax.text(80, -133, f"RMSE {rmse(mean, truth):.2f}", ha="center")
    ax.set(xlim=(-35, 195), ylim=(-140, 120), aspect="equal")
    ax.set(xlabel="distance (m)", xticks=[0, 80, 160])
axes[0].set_ylabel("height (m)")
plot_colorbar(axes[1], points, "|estimate − truth|", extend="max")
curves = {
    "road": (weights, "#D55E00", (4.5, 1.45)),
    "fold": (weights, "#0072B2", (1.1e-3, 0.73)),
    "instruments": (agreement, "#009E73", (0.03, 0.55)),
}
for name, (weight, color, place) in curves.items():
    single = (errors[name] / errors[name][:, :1])[:, 1:]
    axes[2].plot(weight[1:], single.T, color=color, lw=0.5, alpha=0.6)
    axes[2].plot(weight[1:], ratio(name)[1:], "o-", ms=3, color=color)
    axes[2].text(*place, name, color=color)
axes[2].axhline(1, color="black", lw=0.8)
axes[2].set(xscale="log", xticks=[1e-3, 1e-1, 10], ylim=(0.52, None))
axes[2].set_box_aspect(260 / 230)
axes[2].set(xlabel="weight w of the penalty", ylabel="RMSE / RMSE at w = 0")
titles = "labels only", "with unlabelled points", "five sets of data"
title_panels(axes, titles)

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "few_labels.png")
figure.savefig(arguments.output / "few_labels.pdf")
title = axes[1].get_title(loc="left")[4:]  # without the letter
axes[1].set_title(title, loc="left")
card = axes[1].get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    arguments.output / "few_labels_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"\nfigure: {arguments.output}/few_labels.png")
