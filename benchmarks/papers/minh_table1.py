"""Minh 2016, Table 1: the error of the Gram matrix of curl-free and divergence-free fields.

    python benchmarks minh_table1 [--runs 50] [--smoke] [--output FOLDER]

The error is ‖K̃ − K‖_F / ‖K‖_F, where K is the Gram matrix of 100 standard normal points in three
dimensions. Each coordinate is scaled to fill [−1, 1]. Every run has new points and new frequencies,
and σ = 1. The table has mean and standard deviation over the runs, and those of the paper, over 10
runs.

`unbounded` is the map of Equations 37 and 41, with frequencies of N(0, 2/σ²), the base measure.
`bounded` is the map of Equations 40 and 42, with frequencies of N(0, 4/σ²). `trace` is the measure
of Theorem 9, the default of this package. `Grid` has at most as many features, and `GaussHermite`
the fewest nodes that it accepts for these lags. The figure is minh_table1.png in the folder of the
results.
"""

from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.minh import FACTORS, STYLES, Field
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float
from torch import Tensor

import gp_orff

POINTS, NUMBERS = 100, (100, 500, 1000)
PAPER = {  # mean and standard deviation for each of NUMBERS
    ("curl-free", "bounded"): ((0.2811, 0.0606), (0.1011, 0.0216), (0.0906, 0.0172)),
    ("curl-free", "unbounded"): ((0.3315, 0.0638), (0.1363, 0.0227), (0.0984, 0.0207)),
    ("divergence-free", "bounded"): ((0.2223, 0.0605), (0.1006, 0.0221), (0.0680, 0.0114)),
    ("divergence-free", "unbounded"): ((0.2826, 0.0567), (0.1386, 0.0388), (0.0842, 0.0167)),
}


def points(seed: int) -> Float[Tensor, "N 3"]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(POINTS, 3, generator=generator, dtype=torch.float64)
    low, high = x.amin(0), x.amax(0)
    return 2 * (x - low) / (high - low) - 1


def relative_error(
    kernel: Kernel, rule: object, x: Float[Tensor, "N 3"], gram: Float[Tensor, "n n"]
) -> tuple[int, float]:
    """Return F, and ‖K̃ − K‖_F / ‖K‖_F."""
    phi = gp_orff.ORFFKernel(kernel, rule).features(x)
    return phi.shape[-1], (torch.linalg.norm(phi @ phi.mT - gram) / torch.linalg.norm(gram)).item()


def errors(field: Field, runs: int, numbers: Sequence[int]) -> dict[tuple, list[tuple[int, float]]]:
    """Return F and the errors of all runs, for each (D, map)."""
    found = {}
    for seed in range(runs):
        x = points(seed)
        gram = field.kernel(x).to_dense()
        for number in numbers:
            for name, (kernel, rule) in [*field.random(number, seed), ("Grid", field.grid(number))]:
                error = relative_error(kernel, rule, x, gram)
                found.setdefault((number, name), []).append(error)
        error = relative_error(*field.hermite(), x, gram)
        found.setdefault((None, "GaussHermite"), []).append(error)
    return found


def row(kernel: str, name: str, number: int | None, found: Sequence[tuple[int, float]]) -> dict:
    values = PAPER.get((kernel, name), ())
    printed = dict(zip(NUMBERS[: len(values)], values, strict=True))
    mean, sd = printed.get(number, (None, None))
    features, values = zip(*found, strict=True)
    return {
        "kernel": kernel,
        "map": name,
        "D": number,
        "F": features[0],
        "mean": float(np.mean(values)),
        "sd": float(np.std(values, ddof=1)),
        "paper": mean,
        "paper's sd": sd,
    }


def picture(rows):
    """Draw the maps of the paper with its values, and all maps against the number of features."""
    figure, axes = pictures.panels(2, len(FACTORS), sharey="row")
    for (upper, lower), kernel in zip(axes.T, FACTORS, strict=True):
        own = [row for row in rows if row["kernel"] == kernel]
        for name, (colour, marker) in STYLES.items():
            line = [row for row in own if row["map"] == name]
            style = {"color": colour, "marker": marker, "ms": 5, "lw": 1.2}
            lower.errorbar(*columns(line, "F", "mean", "sd"), label=name, **style)
            shift = -0.24 if name == "unbounded" else 0.08
            if (kernel, name) in PAPER:
                apart = style | {"linestyle": "", "capsize": 3}
                at = np.arange(len(line)) + shift
                upper.errorbar(at, *columns(line, "mean", "sd"), **apart)
                hollow = {"mfc": "white", "label": f"{name}, in the paper"}
                at = at + 0.16
                upper.errorbar(at, *columns(line, "paper", "paper's sd"), **apart | hollow)
        numbers = [row["D"] for row in own if row["map"] == "unbounded"]
        upper.set(title=kernel, ylim=(0, None))
        upper.set_xticks(range(len(numbers)), [f"D = {number}" for number in numbers])
        lower.set(xlabel="features F", xscale="log", yscale="log")
        lower.set_xticks([200, 500, 1000, 2000, 4000], ["200", "500", "1000", "2000", "4000"])
        lower.minorticks_off()
    for ax in axes[:, 0]:
        ax.set_ylabel("‖K̃ − K‖ / ‖K‖, Frobenius")
    handles = [h for row in (1, 0) for h in axes[row][0].get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def columns(rows: Sequence[dict], *keys: str) -> list[list]:
    return [[row[key] for row in rows] for key in keys]


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, runs=(50, 3), most=(1000, 100)).parse_args(words)
    numbers = [number for number in NUMBERS if number <= arguments.most]
    rows = Rows()
    for kernel in FACTORS:
        field = Field(kernel, 3, 1.0, (-1.0, 1.0))
        for (number, name), found in errors(field, arguments.runs, numbers).items():
            rows.add(**row(kernel, name, number, found))
    pictures.save_picture(arguments, picture(rows))
    save(arguments, {"runs": arguments.runs, "points": POINTS, "sigma": 1.0, "rows": rows})
