"""Minh 2016, Table 2: a curl-free field from 5 % of a grid, by exact and approximate kernels.

    python benchmarks minh_table2 [--runs 50] [--smoke] [--output FOLDER]

The field is F(x, y) = sin(4πx) sin²(2πy) i + sin²(2πx) sin(4πy) j on 40 × 40 points of
[−1, −0.4765]². A run has 80 of these points as data, and new frequencies. As in the paper, the
curl-free kernel has σ = 0.2 (lengthscale 0.2/√2), and the penalty is α = lγ_A = 80·10⁻⁹. `exact` is
Equation 72 with the kernel. The others are `ORFFRidge`, Equation 74, with the maps of
`minh_table1`. The table has means and standard deviations over the runs, and those of the paper,
over 10 runs. It also has medians, because a few bad draws of frequencies dominate the means. The
errors are those of the field, not of the kernel. With so small a penalty, few features can have a
smaller error than the exact kernel.

RMSE is the root mean square of ‖f(x) − F(x)‖ over the 1520 other points. The paper does not define
its RMSE. This definition is the largest of the usual ones: the RMSE of a component is 1/√2 of it,
and the RMSE over all 1600 points is smaller by 2 to 3 %. `field` is the root mean square of a
component of F.

`Grid` has at most as many features as D random frequencies. `GaussHermite` has the fewest nodes
that it accepts, which are more. The figure is minh_table2.png in the folder of the results.
"""

from collections.abc import Sequence
from math import pi

import numpy as np
import torch
from gpytorch.kernels import Kernel
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.minh import STYLES, Field
from helpers.results import save
from helpers.rows import Rows
from jaxtyping import Float, Int
from torch import Tensor

from gp_orff.regression import ORFFRidge

FIELD = Field("curl-free", 2, 0.2, (-1.0, -0.4765))
SIDE, LABELLED, GAMMA, NUMBERS = 40, 80, 1e-9, (50, 100)
ALPHA = LABELLED * GAMMA
PAPER = {  # mean and standard deviation for each of NUMBERS
    "exact": ((0.0020, None), (0.0024, None)),
    "bounded": ((0.0079, 0.0076), (0.0032, 0.0024)),
    "unbounded": ((0.0254, 0.0118), (0.0118, 0.0098)),
}


def grid() -> Float[Tensor, "N 2"]:
    axis = torch.linspace(*FIELD.interval, SIDE, dtype=torch.float64)
    return torch.cartesian_prod(axis, axis)


def split(seed: int) -> tuple[Int[Tensor, "l"], Int[Tensor, "N-l"]]:
    """Return the indices of the labelled points, and those of all other points."""
    order = torch.randperm(SIDE**2, generator=torch.Generator().manual_seed(seed))
    return order[:LABELLED], order[LABELLED:]


def truth(x: Float[Tensor, "N 2"]) -> Float[Tensor, "N 2"]:
    """Return F, the gradient of sin²(2πx) sin²(2πy)/(2π)."""
    double, square = torch.sin(4 * pi * x), torch.sin(2 * pi * x).square()
    return double * square.flip(-1)


def exact(
    x: Float[Tensor, "l 2"], y: Float[Tensor, "l 2"], points: Float[Tensor, "N 2"]
) -> Float[Tensor, "N 2"]:
    """Return K(·, x) (K(x, x) + α)⁻¹ y at the points."""
    kernel = FIELD.kernel
    gram = kernel(x).to_dense()
    factor = torch.linalg.cholesky(gram + ALPHA * torch.eye(len(gram)).to(gram))
    weights = torch.cholesky_solve(y.reshape(-1, 1), factor)
    return (kernel(points, x).to_dense() @ weights).reshape(-1, 2)


def ridge(
    kernel: Kernel,
    rule: object,
    x: Float[Tensor, "l 2"],
    y: Float[Tensor, "l 2"],
    points: Float[Tensor, "N 2"],
) -> tuple[int, Float[Tensor, "N 2"]]:
    """Return the number F of features, and the predicted field."""
    model = ORFFRidge(kernel, rule, alpha=ALPHA).fit(x, y)
    return len(model.coef_), torch.from_numpy(model.predict(points))


def run(seed: int, numbers: Sequence[int]) -> dict[tuple, tuple[int | None, float]]:
    """Return F and the error, for each (D, map)."""
    x = grid()
    y, (seen, others) = truth(x), split(seed)

    def error(f: Float[Tensor, "N 2"]) -> float:
        return (f - y)[others].square().sum(-1).mean().sqrt().item()

    found = {(None, "exact"): (None, error(exact(x[seen], y[seen], x)))}
    maps = {(None, "GaussHermite"): FIELD.hermite()}
    for number in numbers:
        maps |= {(number, name): own for name, own in FIELD.random(number, seed)}
        maps[number, "Grid"] = FIELD.grid(number)
    for key, (kernel, rule) in maps.items():
        features, f = ridge(kernel, rule, x[seen], y[seen], x)
        found[key] = (features, error(f))
    return found


def row(number: int | None, name: str, found: Sequence[tuple[int | None, float]]) -> dict:
    values = PAPER.get(name, ())
    printed = dict(zip(NUMBERS[: len(values)], values, strict=True))
    mean, sd = printed.get(number or NUMBERS[0], (None, None))
    features, errors = zip(*found, strict=True)
    return {
        "map": name,
        "D": number,
        "F": features[0],
        "mean": float(np.mean(errors)),
        "sd": float(np.std(errors, ddof=1)),
        "median": float(np.median(errors)),
        "paper": mean,
        "paper's sd": sd,
    }


def picture(rows, errors):
    """Draw the field with the data of the first run, and the errors of all runs with those of
    the paper."""
    figure, [(left, right)] = pictures.panels(1, 2, width_ratios=(1, 1.7))
    figure.set_figheight(4.6)
    x, seen = grid(), split(0)[0]
    left.quiver(*x.T, *truth(x).T, color="0.6", scale=25, width=0.003)
    left.plot(*x[seen].T, "o", color=pictures.BLUE, ms=3.5)
    left.set(title=f"F and {LABELLED} labelled points", xlabel="x", ylabel="y", aspect="equal")
    named = {"exact": ("0.3", "X"), **STYLES}
    keys = sorted(errors, key=lambda key: (key[0] or 0, list(named).index(key[1])))
    jitter = np.random.default_rng(0).uniform(-0.22, 0.22, len(errors[keys[0]]))
    for place, key in enumerate(keys):
        colour, marker = named[key[1]]
        found = next(row for row in rows if (row["D"], row["map"]) == key)
        values = [error for _, error in errors[key]]
        right.plot(place + jitter, values, ".", color=colour, ms=3)
        right.plot(place, found["mean"], marker, color=colour, ms=9, mec="white")
        if found["paper"] is not None:
            right.plot(place + 0.35, found["paper"], marker, color=colour, ms=9, mfc="white")
    labels = [name + (f"\nD = {number}" if number else "") for number, name in keys]
    right.set_xticks(range(len(keys)), labels, rotation=60, ha="right", rotation_mode="anchor")
    right.set(title="filled: means of ours; hollow: of the paper", yscale="log", ylabel="RMSE")
    right.grid(visible=False, axis="x")
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, runs=(50, 3), most=(100, 50)).parse_args(words)
    numbers = [number for number in NUMBERS if number <= arguments.most]
    runs = [run(seed, numbers) for seed in range(arguments.runs)]
    errors = {key: [found[key] for found in runs] for key in runs[0]}
    rows = Rows()
    for key, found in errors.items():
        rows.add(**row(*key, found))
    pictures.save_picture(arguments, picture(rows, errors))
    sizes = {"runs": arguments.runs, "labelled": LABELLED, "points": SIDE**2, "alpha": ALPHA}
    rms = truth(grid()).square().mean().sqrt().item()
    save(arguments, {**sizes, "field": rms, "rows": rows})
