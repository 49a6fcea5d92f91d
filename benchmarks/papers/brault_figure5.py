"""Brault et al. 2016, Figure 5: computation time of curl-free ORFF and OVK against N.

    python benchmarks brault_figure5 [--most 1e6] [--exact 10000] [--smoke] [--output FOLDER]

The table has CPU seconds with one thread of `ORFFRidge(...).fit(x, y)` and of the exact kernel
(Gram matrix, Cholesky factor, weights). `ORFFRidge` has D = 1000 random frequencies, Gauss–Hermite
quadrature or a grid. The data are N noisy vectors of the field of five Gaussians in memory; the
lengthscale is 0.6, and α = 0.01. If a run takes less than 3 s, the time is the least of 3 runs
after a first run. Exponents are slopes of log seconds over log N, from 10⁴ points on (exact: from
1000). MSE is measured at 2000 other points without noise and is relative to the mean square of a
component. The paper states one number: more than 1000 s for the exact kernel if N > 10⁴. The figure
is brault_figure5.png in the folder of the results.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes
from helpers.fields import curl_free
from helpers.measure import seconds
from helpers.papers import five_gaussians, pictures
from helpers.papers.five_gaussians import BOX, Sample
from helpers.papers.ridge import Predict, by_features, exact
from helpers.results import save
from helpers.rows import Rows

import gp_orff

LENGTHSCALE, ALPHA, TEST = 0.6, 0.01, 2000
RUNS, SHORT = 3, 3.0  # how often what takes fewer seconds is measured
NUMBERS = (100, 300, 1000, 2000, 4000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
RULES = {
    "random": gp_orff.MonteCarlo(1000),
    "quadrature": gp_orff.GaussHermite(32),
    "grid": gp_orff.Grid(BOX, lengthscale_range=(1, 1)),
}
STYLES = {
    "exact": ("exact kernel", "0.2", "v"),
    "random": ("MonteCarlo, D = 1000", pictures.ORANGE, "o"),
    "quadrature": ("GaussHermite, 32 × 32", pictures.RED, "D"),
    "grid": ("Grid", pictures.BLUE, "s"),
}


def fit(name: str, sample: Sample) -> Predict:
    kernel = curl_free(LENGTHSCALE)
    if name in RULES:
        return by_features(kernel, RULES[name], ALPHA, sample)
    return exact(kernel, ALPHA, sample)


def measured(name: str, sample: Sample, runs: int) -> tuple[float, Predict]:
    """Return the shortest time in seconds, and the last fit."""
    fits, times = [], []
    while len(times) < (runs if max(times, default=0) < SHORT else 1):
        times.append(seconds(lambda: fits.append(fit(name, sample)), time.process_time))
    return min(times), fits[-1]


def exponent(rows: Sequence[dict], least: int) -> float | None:
    """Return the exponent of the seconds as a power of N, for at least `least` points."""
    own = [row for row in rows if row["N"] >= least]
    if len(own) < 2:
        return None
    N, taken = ([row[key] for row in own] for key in ("N", "seconds"))
    return float(np.polyfit(np.log(N), np.log(taken), 1)[0])


def picture(rows):
    figure, ((left, right),) = pictures.panels(1, 2)
    for name, (label, colour, marker) in STYLES.items():
        own = [row for row in rows if row["method"] == name]
        N = [row["N"] for row in own]
        style = {"color": colour, "marker": marker, "ms": 4, "lw": 1.3, "label": label}
        left.loglog(N, [row["seconds"] for row in own], **style)
        right.loglog(N, [row["MSE"] for row in own], **style)
    for slope, name in ((1, "random"), (3, "exact")):
        last = [row for row in rows if row["method"] == name][-1]
        N = np.array([last["N"] / (100 if slope == 1 else 8), last["N"]])
        line = 1.7 * last["seconds"] * (N / last["N"]) ** slope
        left.loglog(N, line, ":", color="0.4", lw=1)
        left.annotate(f"N{'³' if slope == 3 else ''}", (N[1], line[1]), color="0.4")
    left.set(xlabel="points N", ylabel="CPU seconds, one thread")
    right.set(xlabel="points N", ylabel="MSE / mean square of the field")
    left.legend(frameon=False, fontsize=8)
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"most": (1e6, 1e3), "exact": (10_000, 300)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    torch.set_num_threads(1)
    rows, exponents = Rows(), Rows()
    test = Sample.of(five_gaussians.curl_free, TEST, 2**16)
    for name in STYLES:
        fit(name, Sample.of(five_gaussians.curl_free, NUMBERS[0], 0))
        most = arguments.exact if name == "exact" else arguments.most
        for number in (number for number in NUMBERS if number <= most):
            sample = Sample.of(five_gaussians.curl_free, number, 0)
            taken, predict = measured(name, sample, 1 if arguments.smoke else RUNS)
            error = (predict(test.x) - test.truth).square().mean().item()
            rows.add(method=name, N=number, seconds=taken, MSE=error / five_gaussians.mean_square())
    for name in STYLES:
        own = [row for row in rows if row["method"] == name]
        exponents.add(method=name, exponent=exponent(own, 1000 if name == "exact" else 10_000))
    kernel = curl_free(LENGTHSCALE)
    counts = {name: gp_orff.ORFFKernel(kernel, rule).num_features for name, rule in RULES.items()}
    print("features: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    pictures.save_picture(arguments, picture(rows))
    save(arguments, {"features": counts, "exponents": exponents, "times": rows})
