"""Brault et al. 2016, Figure 1: the uniform error against the number of frequencies.

    python benchmarks/papers/brault_figure1.py [--seeds 20] [--smoke] [--output FOLDER]

The largest spectral norm of K̃(x, z) − K(x, z) over all pairs of 66 points of [−1, 1]⁴ (50 random
ones, always the same, and the 16 corners: 2145 lags and lag 0), for the decomposable, curl-free and
divergence-free kernel of a Gaussian k. The paper does not give its settings; here k has lengthscale
one, and the decomposable kernel A = (I + 11ᵀ)/2. `base` is the measure of the paper, in which maps
are unbounded, `trace` that of Minh 2016. Medians over seeds; slope of a line through log error over
log D for each seed, and its mean and standard error over the seeds.

Grid and Gauss–Hermite quadrature take the most frequencies that need no more features F than the
random rules; the domain is known to both. `GaussHermite` refuses lags at which its error exceeds
1e-3, which leaves no row for fewer than 9 nodes along each axis. F = 2Dr, with r = 4, 1, 3 columns
of B(ω) for the three kernels. Draws brault_figure1.png beside the results.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
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
    """For each random rule a row for each number of frequencies, and the slope."""
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
    """Grids of at most as many features as random rules have, and quadratures."""
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
    figure, axes = pictures.panels(1, len(KERNELS), sharey=True)
    for ax, kernel in zip(axes.flat, KERNELS, strict=True):
        own = [row for row in rows if row["kernel"] == kernel]
        for rule, (colour, marker) in STYLES.items():
            for measure, line in (("trace", "-"), ("base", "--"), ("", "-")):
                line = "-" if kernel == "decomposable" else line
                line_rows = [r for r in own if (r["rule"], r["measure"]) == (rule, measure)]
                F, error = ([row[key] for row in line_rows] for key in ("F", "error"))
                ax.loglog(F, error, line, color=colour, marker=marker, ms=4, lw=1.3)
        F = np.array([min(row["F"] for row in own), max(row["F"] for row in own)])
        level = next(row for row in own if row["rule"] == "MonteCarlo")["error"]
        ax.loglog(F, 1.6 * level * (F / F[0]) ** -0.5, ":", color="0.3", lw=1)
        ax.set(title=kernel, xlabel="features F = 2Dr")
    axes[0][0].set_ylabel("largest ‖K̃(x, z) − K(x, z)‖₂ on [−1, 1]⁴")
    line = pictures.plt.Line2D
    handles = [
        line([], [], color=colour, marker=marker, ms=5, lw=1.3, label=rule)
        for rule, (colour, marker) in STYLES.items()
    ]
    handles += [
        line([], [], color="0.3", linestyle=style, label=label)
        for style, label in (("-", "trace measure"), ("--", "base measure"), (":", "slope −1/2"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, seeds=(20, 2), most=(8192, 128)).parse_args(words)
    numbers = [2**k for k in range(LEAST, 20) if 2**k <= arguments.most]
    rows, slopes, fits, x = Rows(), Rows(), [], points(POINTS, DIMS)
    for name, measure, kernel in cells(DIMS):
        errors = Errors(kernel, x)
        for found, slope in random_rows(name, measure, errors, numbers, arguments.seeds):
            for row in found:
                rows.add(**row)
            fits.append(slope)
        if measure == "base":
            for row in fixed_rows(name, errors, numbers):
                rows.add(**row)
    for fit in fits:
        slopes.add(**fit)
    pictures.save_picture(arguments, picture(rows))
    sizes = {"seeds": arguments.seeds, "d": DIMS, "points": len(x)}
    save(arguments, {**sizes, "slopes": slopes, "rows": rows})


if __name__ == "__main__":
    main()
