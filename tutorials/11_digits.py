# %% [markdown]
# # 11. Probabilities of digits
#
# A field with ten outputs classifies images of digits, and draws from its posterior give the
# probabilities of the classes.
#
# An image is a point with as many coordinates as it has pixels. A frequency grid is not possible in
# so many dimensions, but random frequencies are. `Fastfood` computes with random frequencies
# without storing them. How much time and memory does this save? Are the probabilities calibrated?
# These are the lines to copy:
#
# ```python
# scalar = ScaleKernel(RBFKernel())
# kernel = gp_orff.SeparableKernel(scalar, torch.eye(10))
# rule = gp_orff.Fastfood(512)
# model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
# model.fit(images, torch.eye(10)[digits])  # one-hot
# field = model.posterior()
#
# # the digit that each of 500 draws gives: (500, n)
# votes = field.sample_paths(500)(others).argmax(-1)
#
# # the phases ⟨ω, x⟩
# features = gp_orff.ORFFKernel(kernel, rule, num_dims=64)
# phases = features.phases(images)
# ```

# %% tags=["remove-cell"]
import argparse
from pathlib import Path

parser = argparse.ArgumentParser(
    description="Probabilities of digits, by Fastfood features.",
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
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator
from scipy.stats import binomtest
from sklearn.datasets import load_digits

import gp_orff
from gp_orff.plotting import STYLE, title_panels

num_images, learned_with, num_draws = 500, 256, 500
numbers, num_pixels = (64, 128, 256, 512, 1024), (64, 784, 3072)

# %% tags=["remove-cell"]
if arguments.smoke:
    num_images, learned_with, num_draws = 200, 32, 100
    numbers, num_pixels = (16, 64), (64, 784)

# %% [markdown]
# ## Ten outputs
#
# scikit-learn has 1797 images of 8 × 8 pixels. The model is fitted to 500 of them, and the others
# are held out. Output c is one for images of the digit c, and zero for all other images. In the
# prior, the outputs are independent, with a common lengthscale and variance. This is a
# `SeparableKernel` with the root `torch.eye(10)`. To learn the covariance of the outputs too, use
# gpytorch's `MultitaskKernel`.

# %%
images, digits = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(digits))
images = torch.from_numpy(images[order] / 16)
digits = torch.from_numpy(digits[order])
x, xs = images[:num_images], images[num_images:]
y, truth = torch.eye(10).double()[digits[:num_images]], digits[num_images:]

kernel = gp_orff.SeparableKernel(ScaleKernel(RBFKernel()), torch.eye(10))
model = gp_orff.VectorFieldGP(
    kernel, frequencies=gp_orff.Fastfood(learned_with)
)
# too few frequencies for calibrated intervals; see below
warnings.simplefilter("ignore", gp_orff.FeatureWarning)
model.fit(x, y, progress=False)
print(model.report)
lengthscale = kernel.base_kernel.base_kernel.lengthscale.item()
noise = model.likelihood.noise.item()

# %% [markdown]
# The fit learns the lengthscale and the noise by the evidence, without a validation set. Pixels are
# between zero and one, and the lengthscale is about two.
#
# ## Probabilities
#
# A draw from the posterior is a field with ten outputs at each image. The probability of a digit is
# the fraction of draws in which its output is the largest. There are two such probabilities. Draws
# without noise give the probability that an output of the *field* is the largest. A label is an
# observation of the field with noise. Draws with noise therefore give the probability of a *label*.
# We add a thousandth of a draw to each digit, so that logarithms are finite.
#
# If probabilities are calibrated, seven in ten of the images with a probability of 0.7 are
# classified correctly. A reliability diagram shows this fraction against the probability. The
# calibration error is the mean distance from the diagonal, weighted by the numbers of images.


# %%
def probabilities(field, noise):
    """The fraction of draws (n, 10) with the largest output at a digit."""
    draws = field.sample_paths(num_draws)(xs)
    generator = torch.Generator().manual_seed(1)
    errors = torch.randn(draws.shape, generator=generator, dtype=draws.dtype)
    best = (draws + noise**0.5 * errors).argmax(-1)
    votes = torch.nn.functional.one_hot(best, 10).sum(0)
    return (votes + 1e-3) / (num_draws + 1e-2)


def reliability(p, num_bins=10):
    """Of each bin: mean probability, numbers of right and of all images."""
    confidence, best = p.max(-1)
    bins = (confidence * num_bins).long().clamp(max=num_bins - 1)
    images = torch.bincount(bins, minlength=num_bins)
    right = torch.bincount(bins[best == truth], minlength=num_bins)
    return torch.bincount(bins, confidence, num_bins) / images, right, images


def calibration_error(p):
    confidence, right, images = reliability(p)
    return (images * confidence - right).abs().nansum() / images.sum()


def log_loss(p):
    """The mean negative log probability of the digit."""
    return -p[torch.arange(len(truth)), truth].log().mean()


# %% [markdown]
# ## The number of frequencies
#
# The models in this section have the hyperparameters of the first model, and are conditioned on the
# same images. A single frequency has the same distribution with `MonteCarlo` and with `Fastfood`.
# However, the frequencies of `Fastfood` are not independent of each other.

# %%
print(f"\n{'':19}{'':>10}{'field':>24}{'labels':>24}")
print(f"{'':19}{'mistakes':>10}", 2 * f"{'log loss':>12}{'calibration':>12}")
results = {}
for number in numbers:
    for rule in (gp_orff.MonteCarlo(number), gp_orff.Fastfood(number)):
        other = gp_orff.VectorFieldGP(
            kernel, likelihood=model.likelihood, frequencies=rule
        )
        field = other.condition(x, y).posterior()
        wrong = field.mean(xs).argmax(-1) != truth
        mistakes = wrong.double().mean().item()
        both = [probabilities(field, variance) for variance in (0.0, noise)]
        name = type(rule).__name__
        results[name, number] = mistakes, *both
        print(f"{name:13}{number:6}{100 * mistakes:8.1f} % ", end="")
        for p in both:
            print(f"{log_loss(p):12.3f}{calibration_error(p):12.3f}", end="")
        print()
few, many = (
    results["Fastfood", number] for number in (numbers[0], numbers[-1])
)
assert many[0] < 0.15
assert log_loss(many[2]) < log_loss(few[2])

# %% [markdown]
# If there are too few frequencies, the model is overconfident: draws of the field agree with each
# other at images where the field is wrong. A `FeatureWarning` states this; the code silences it.
# Draws with noise give better probabilities, because the model learns the error of the features as
# noise. More frequencies improve the probabilities further. With 1024 frequencies, both calibration
# errors are about 0.01 or less.
#
# With the same number of frequencies, `MonteCarlo` and `Fastfood` make about the same number of
# mistakes.
#
# ## Memory and time
#
# The phases of an image x are the products ⟨ω, x⟩ with all frequencies ω. The method `phases`
# returns them. The independent frequencies of `MonteCarlo` are a matrix of D × d numbers, and the
# phases are a product with this matrix. `Fastfood` stores four vectors of D numbers, and computes
# the phases by Hadamard transforms. The table has the memory, and the CPU time for one image and
# for a hundred images.


# %%
@torch.no_grad()
def cpu_time(function, *inputs, repeats=10):
    """The median CPU time of a call, in seconds."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        function(*inputs)
        times.append(time.process_time() - began)
    return np.median(times)


print(f"\n{'pixels':>6}{'frequencies':>13}{'':>14}{'stored (MiB)':>14}", end="")
print(f"{'one image (ms)':>16}{'100 images (ms)':>17}")
costs = {}
for d in num_pixels:
    number = 4 * d
    some = torch.rand(100, d).double()
    matrix = torch.randn(d, number).double()
    rule = gp_orff.Fastfood(number)
    fastfood = gp_orff.ORFFKernel(RBFKernel().double(), rule, num_dims=d)
    buffers = list(fastfood.frequencies.buffers())
    for name, product, tensors in (
        ("a matrix", partial(torch.matmul, other=matrix), [matrix]),
        ("Fastfood", fastfood.phases, buffers),
    ):
        stored = sum(tensor.nbytes for tensor in tensors) / 2**20
        one, hundred = (
            1e3 * cpu_time(product, points) for points in (some[:1], some)
        )
        costs[name, d] = stored, one
        print(f"{d:6}{number:13}   {name:11}{stored:14.2f}", end="")
        print(f"{one:16.2f}{hundred:17.1f}")
d = num_pixels[-1]
assert costs["Fastfood", d][0] < costs["a matrix", d][0] / 100

# %% [markdown]
# `Fastfood` needs less memory by a factor of about d/3. A matrix is faster for 64 pixels, and
# `Fastfood` is faster for thousands of pixels. The difference is largest for one image, because the
# complete matrix must be read for it.
#
# Use `Fastfood` for predictions, to save memory, and for stochastic training (`ORFFRidge` with
# `solver="sgd"`). It barely reduces the time of a fit in closed form. Such a fit to N images with F
# columns needs N F² operations, or N² F if there are fewer images than columns. The phases are only
# a small part of this time:

# %%
rule = gp_orff.Fastfood(numbers[-1])
features = gp_orff.ORFFKernel(kernel, rule, num_dims=64)
phases = cpu_time(features.phases, x)
model = gp_orff.VectorFieldGP(kernel, frequencies=rule)
whole = cpu_time(model.condition, x, y, repeats=1)
print(f"\nCPU time: phases of {len(x)} images {phases:.3f} s, ", end="")
print(f"conditioning on them {whole:.2f} s")

# %% [markdown]
# ## Reliability, images and times
#
# Panel a shows the reliability of the probabilities of labels with `Fastfood`. The bars are exact
# binomial 95 % intervals of the fraction of correct images. Bins with fewer than five images are
# omitted. Panel b shows the six images with the least certain classification, for which even the
# most probable digit has a low probability. The text above each image gives the true digit, and the
# most probable digit with its probability. It is orange if this digit is wrong. Panel c shows the
# CPU time of the phases of one image, with four frequencies for each pixel.

# %%
plt.style.use(STYLE)
blue, orange = "#0072B2", "#D55E00"
figure, axes = plt.subplots(1, 3, figsize=(7.2, 2.6), layout="compressed")
reliable, uncertain, times = axes

reliable.plot([0, 1], [0, 1], color="0.55", lw=1)
shifted = {numbers[0]: (-0.006, orange), numbers[-1]: (0.006, blue)}
for number, (shift, color) in shifted.items():
    confidence, right, count = reliability(results["Fastfood", number][2], 5)
    kept = count > 4
    confidence, right, count = (
        confidence[kept] + shift,
        right[kept],
        count[kept],
    )
    for place, k, n in zip(confidence, right, count, strict=True):
        interval = binomtest(int(k), int(n)).proportion_ci(0.95)
        reliable.plot([place, place], interval, color=color, lw=1)
    style = {"color": color, "ms": 4, "label": f"{number} frequencies"}
    reliable.plot(confidence, right / count, "o-", **style)
reliable.set(xlim=(0.2, 1.02), ylim=(0, 1.03), box_aspect=1)
reliable.set(xlabel="probability of the best digit")
reliable.set(ylabel="fraction right, 95 %")
reliable.legend(loc="lower right", handlelength=1)

uncertain.axis("off")
uncertain.set_box_aspect(1)
p = results["Fastfood", numbers[-1]][2]
for k, n in enumerate(p.max(-1).values.argsort()[:6]):
    corner = 0.36 * (k % 3), 0.55 * (1 - k // 3)
    inset = uncertain.inset_axes([*corner, 0.28, 0.28])
    inset.imshow(xs[n].reshape(8, 8), cmap="gray_r")
    inset.set(xticks=[], yticks=[])
    best = p[n].argmax()
    color = blue if best == truth[n] else orange
    text = f"digit {truth[n]}\n{best}: {p[n, best]:.2f}"
    inset.set_title(text, color=color, loc="center", fontsize="small")

for name, color, style in (
    ("a matrix", orange, "s-"),
    ("Fastfood", blue, "o-"),
):
    milliseconds = [costs[name, d][1] for d in num_pixels]
    times.loglog(num_pixels, milliseconds, style, ms=4, color=color, label=name)
times.set(xlabel="pixels", ylabel="CPU time (ms)", box_aspect=1)
times.set_xticks(num_pixels, num_pixels)
times.xaxis.set_minor_locator(NullLocator())
times.legend()
titles = "reliability", "least certain images", "phases of one image"
title_panels(axes, titles)

# %% tags=["remove-cell"]
arguments.output.mkdir(parents=True, exist_ok=True)
figure.savefig(arguments.output / "digits.png")
figure.savefig(arguments.output / "digits.pdf")
title = reliable.get_title(loc="left")[4:]  # without the letter
reliable.set_title(title, loc="left")
card = reliable.get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
figure.savefig(
    arguments.output / "digits_card.png",
    dpi=150,
    bbox_inches=card.padded(0.05),
)
print(f"figure: {arguments.output}/digits.png")
