"""Brault et al. 2016, Figure 1: the uniform error against the number of frequencies.

    python benchmarks brault_figure1 [--seeds 10] [--smoke] [--output FOLDER]

The error is the largest spectral norm of K̃(x, z) − K(x, z) over all pairs of 66 points of
[−1, 1]⁴: the 16 corners and 50 random points, which are the same for all seeds. There are 2145 lags
and lag 0. The kernels are decomposable, curl-free and divergence-free kernels of a Gaussian k. The
paper does not state its settings. Here k has lengthscale one, and the decomposable kernel has
A = (I + 11ᵀ)/2.

`base` is the measure of the paper, whose feature maps are unbounded. `trace` is the measure of Minh
2016. The table has medians over seeds. The slope of log error over log D is fitted for each seed;
the table has its mean and standard error over seeds.

Grid and Gauss–Hermite quadrature have the most frequencies for which their number of features F
does not exceed that of the random rules. Both know the domain. `GaussHermite` raises an error for
lags at which its error exceeds 1e-3, so there is no row for fewer than 9 nodes along each axis.
F = 2Dr, where r = 4, 1, 3 is the number of columns of B(ω) for the three kernels. The figure is
brault_figure1.png in the folder of the results.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from helpers.command import Sizes
from helpers.papers import pictures
from helpers.papers.kernels import KERNELS, cells
from helpers.papers.lags import Errors, points
from helpers.results import save
from helpers.rows import Rows

import gp_orff

DIMS, POINTS = 4, 50
LEAST, MOST_NODES = 5, 12  # 2⁵ frequencies; nodes of GaussHermite along an axis
RULES = (gp_orff.MonteCarlo, gp_orff.Orthogonal, gp_orff.QuasiMonteCarlo)
STYLES = {  # colour and marker; lines are solid in trace measure, dashed in base measure
    "MonteCarlo": (pictures.ORANGE, "o"),
    "Orthogonal": (pictures.PINK, "v"),
    "QuasiMonteCarlo": (pictures.GREEN, "^"),
    "GaussHermite": (pictures.RED, "D"),
    "Grid": (pictures.BLUE, "s"),
}


def random_rows(name, measure, errors, numbers, seeds) -> Iterator[tuple[list[dict], dict]]:
    """Yield a row for each random rule and number of frequencies, with the slope of the errors."""
    columns = gp_orff.ORFFKernel(errors.kernel, RULES[0](1)).num_features  # 2r
    for rule in RULES:
        found = np.array(
            [
                [errors.of(rule(number, measure=measure, seed=seed))[0] for number in numbers]
                for seed in range(seeds)
            ]
        )
        slopes = np.polyfit(np.log(numbers), np.log(found).T, 1)[0]
        what = {"kernel": name, "measure": measure, "rule": rule.__name__}
        medians = np.median(found, axis=0).tolist()
        yield (
            [
                {**what, "D": D, "F": columns * D, "error": error}
                for D, error in zip(numbers, medians, strict=True)
            ],
            {
                **what,
                "slope": float(slopes.mean()),
                "standard error": float(slopes.std(ddof=1) / seeds**0.5),
            },
        )


def fixed_rules(kernel, numbers) -> Iterator:
    """Yield quadratures, and grids with at most as many features as the random rules."""
    columns = gp_orff.ORFFKernel(kernel, RULES[0](1)).num_features
    box = ((-1.0, 1.0),) * DIMS
    grid = partial(gp_orff.Grid, box, lengthscale_range=(1, 1), tolerance=1e-8)
    for number in numbers:
        yield grid(max_features=columns * number, diagonal_correction=False)
    nodes = [n for n in range(2, MOST_NODES) if n**DIMS <= 2 * numbers[-1]]
    yield from map(gp_orff.GaussHermite, nodes)


def fixed_rows(name, errors, numbers) -> Iterator[dict]:
    for rule in fixed_rules(errors.kernel, numbers):
        what = {"kernel": name, "measure": "", "rule": type(rule).__name__}
        try:
            features = gp_orff.ORFFKernel(errors.kernel, rule)
            error, _ = errors.of_features(features)
        except ValueError as refused:
            if "smaller domain" not in str(refused) and "larger nodes" not in str(refused):
                raise
            continue
        D = features.frequencies[0].num_frequencies
        yield {**what, "D": D, "F": features.num_features, "error": error}


def picture(rows):
    """Draw random rules against D in both measures, and all rules against F in one measure."""
    figure, axes = pictures.panels(2, len(KERNELS), sharey="row")
    for (upper, lower), kernel in zip(axes.T, KERNELS, strict=True):
        own = [row for row in rows if row["kernel"] == kernel]
        for rule, (colour, marker) in STYLES.items():
            for measure, face in {"base": "white", "trace": colour, "": colour}.items():
                line = [row for row in own if (row["rule"], row["measure"]) == (rule, measure)]
                D, F, error = ([row[key] for row in line] for key in ("D", "F", "error"))
                style = {"color": colour, "marker": marker, "ms": 4, "lw": 1.2}
                if measure:
                    kind = "-" if measure == "trace" else "--"
                    upper.loglog(D, error, kind, mfc=face, **style)
                if measure != "base":
                    lower.loglog(F, error, **style)
        D = np.unique([row["D"] for row in own if row["rule"] == "MonteCarlo"])
        level = next(row for row in own if row["rule"] == "MonteCarlo")["error"]
        upper.loglog(D, 1.5 * level * (D / D[0]) ** -0.5, ":", color="0.3", lw=1)
        upper.set(title=kernel, xlabel="frequencies D")
        lower.set(xlabel="features F")
    for ax in axes[:, 0]:
        ax.set_ylabel("largest ‖K̃(x, z) − K(x, z)‖₂")
    line = partial(pictures.plt.Line2D, [], [])
    handles = [
        line(color=colour, marker=marker, ms=5, lw=1.2, label=rule)
        for rule, (colour, marker) in STYLES.items()
    ]
    handles += [
        line(color="0.3", linestyle=kind, marker="o", mfc=face, ms=5, lw=1.2, label=label)
        for kind, face, label in (
            ("-", "0.3", "trace measure"),
            ("--", "white", "base measure"),
        )
    ]
    handles.append(line(color="0.3", linestyle=":", label="slope −1/2"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, seeds=(10, 2), most=(8192, 64)).parse_args(words)
    numbers = [2**k for k in range(LEAST, 20) if 2**k <= arguments.most]
    rows, slopes, fits, x = Rows(), Rows(), [], points(POINTS, DIMS)
    for name, measure, kernel in cells(DIMS):
        errors = Errors(kernel, x)
        for found, slope in random_rows(name, measure, errors, numbers, arguments.seeds):
            for row in found:
                rows.add(**row)
            fits.append(slope)
        if measure == "trace":
            for row in fixed_rows(name, errors, numbers):
                rows.add(**row)
    for fit in fits:
        slopes.add(**fit)
    pictures.save_picture(arguments, picture(rows))
    sizes = {"seeds": arguments.seeds, "d": DIMS, "points": len(x)}
    save(arguments, {**sizes, "slopes": slopes, "rows": rows})
