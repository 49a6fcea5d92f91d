"""Le, Sarlós & Smola 2013, Figure 2: the test error against the number of features.

    python benchmarks le_figure2 [--seeds 5] [--smoke] [--output FOLDER]

The methods are those of `le_table3` with n = 32 to 4096 features. The data are Friedman's function
of 21 inputs, in place of the CPU set of the paper, which also has 21 inputs. There are 2500 points
for training. As in `le_table3`, the error on validation data chooses the scale and the noise of
every method for each n. RMSE is in standard deviations of the output and includes the noise, which
is 0.2 in this unit. The table has means over random splits, which are also the seeds of the
features. The figure is le_figure2.png in the folder of the results.
"""

from collections.abc import Sequence

import numpy as np
import torch
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.methods import METHODS, errors_of, tuned
from helpers.papers.sets import SETS
from helpers.results import save
from helpers.rows import Rows
from tqdm import tqdm

SET, LEAST = "Friedman, 21 inputs", 32
STYLES = {
    "Nystroem": (pictures.BLACK, "P"),
    "RBFSampler": (pictures.SKY, "h"),
    "MonteCarlo": (pictures.ORANGE, "o"),
    "QuasiMonteCarlo": (pictures.GREEN, "^"),
    "Fastfood": (pictures.BLUE, "s"),
    "StructuredOrthogonal": (pictures.PINK, "v"),
    "FourierFastfood": (pictures.RED, "D"),
    "Fastfood, Bessel": (pictures.BLUE, "x"),
    "PolynomialCountSketch": ("0.5", "h"),
    "Fastfood, polynomial": (pictures.BLUE, "+"),
}
LEVELS = {"exact RBF": "-", "exact Bessel": "--", "exact polynomial": ":"}


def picture(rows):
    """Draw the methods of the RBF kernel, and the methods of the other kernels."""
    figure, ((left, right),) = pictures.panels(1, 2, sharey=True)
    for name, (colour, marker) in STYLES.items():
        ax = left if METHODS[name][0] == "RBF" else right
        line = [row for row in rows if row["method"] == name]
        n, error, sd = ([row[key] for row in line] for key in ("n", "RMSE", "sd"))
        ax.errorbar(n, error, sd, color=colour, marker=marker, ms=5, lw=1.2, label=name)
    for name, kind in LEVELS.items():
        level = next(row for row in rows if row["method"] == name)["RMSE"]
        ax = left if METHODS[name][0] == "RBF" else right
        ax.axhline(level, color="0.2", linestyle=kind, lw=1.2, label=name)
    for ax, title in ((left, "RBF kernel"), (right, "other kernels")):
        ax.set_xscale("log", base=2)
        ax.set(title=title, xlabel="features n", yscale="log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.legend(frameon=False, fontsize=8)
    left.set_ylabel("test RMSE")
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"seeds": (5, 2), "most": (4096, 64)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    share = 0.05 if arguments.smoke else 1.0
    numbers = [LEAST * 2**k for k in range(20) if LEAST * 2**k <= arguments.most]
    splits = [SETS[SET].split(seed, share) for seed in range(arguments.seeds)]
    other, rows, chosen = SETS[SET].split(arguments.seeds, share), Rows(), []
    for method, (_, features) in METHODS.items():
        for n in tqdm([None] if features is None else numbers, method, leave=False):
            own = tuned(method, other, n, arguments.seeds)
            found = errors_of(method, splits, **own, number=n)
            mean, sd = float(np.mean(found)), float(np.std(found, ddof=1))
            rows.add(method=method, n=n, RMSE=mean, sd=sd)
            chosen.append({"method": method, "n": n, **own})
    pictures.save_picture(arguments, picture(rows))
    what = {"set": SET, "N": len(other.x), "seeds": arguments.seeds, "chosen": chosen}
    save(arguments, {**what, "rows": rows})
