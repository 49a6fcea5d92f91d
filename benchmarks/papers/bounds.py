"""The number of frequencies that the bounds require, and the number that is sufficient.

    python benchmarks bounds [--seeds 200] [--smoke] [--output FOLDER]

The kernels have a Gaussian k of lengthscale one on [−1, 1]^d with d = 2, 3. The decomposable kernel
has A = (I + 11ᵀ)/2. The error of `MonteCarlo` is the largest error over all pairs of the corners
and 30 random points, which are the same for all seeds. It is within a tenth of the largest error
over 200 points. The first table has the 95 % quantile of this error over seeds for each measure and
number of frequencies D, and the bounds of `gp_orff.bounds`. The error is the spectral norm for
`rahimi_recht` and `brault`, and the Frobenius norm for `minh`.

The second table has the D for which a bound guarantees an error below a tenth of ‖K(0)‖ with a
probability of 95 %, and the sufficient D by interpolation. For `QuasiMonteCarlo` it has the same
numbers in trace measure. Grid and Gauss–Hermite quadrature have no seeds. Their column is the
smallest number of frequencies for which the error is below a tenth. The figure is bounds.png in the
folder of the results.
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
from gp_orff import bounds

DIMS, POINTS = (2, 3), 30
NUMBERS = (100, 1000, 10_000)
FEWER = (16, 32, 64, 128, 256, 512, 1024)  # for QuasiMonteCarlo
CONFIDENCE, TARGET = 0.95, 0.1  # of ‖K(0)‖
SPECTRAL, FROBENIUS = "spectral", "Frobenius"
NORMS = {bounds.rahimi_recht: SPECTRAL, bounds.brault: SPECTRAL, bounds.minh: FROBENIUS}
BOUNDS = {
    ("decomposable", "trace"): (bounds.rahimi_recht, bounds.brault, bounds.minh),
    ("curl-free", "base"): (bounds.brault,),
    ("curl-free", "trace"): (bounds.brault, bounds.minh),
    ("divergence-free", "base"): (bounds.brault,),
    ("divergence-free", "trace"): (bounds.brault, bounds.minh),
}
COLOURS = {"base": pictures.ORANGE, "trace": pictures.BLUE}
LINES = {"rahimi_recht": ":", "brault": "--", "minh": "-."}


def quantiles(errors: Errors, rule, numbers, seeds) -> dict[str, list[float]]:
    """Return the 95 % quantile of the error relative to ‖K(0)‖, for each norm and number of
    frequencies."""
    found = [[errors.of(rule(number, seed=seed)) for seed in range(seeds)] for number in numbers]
    spectral, frobenius = np.quantile(found, CONFIDENCE, axis=1).T
    return {
        SPECTRAL: (spectral / errors.norm).tolist(),
        FROBENIUS: (frobenius / errors.frobenius_norm).tolist(),
    }


def taken(numbers: Sequence[int], errors: Sequence[float]) -> float | None:
    """Return the number of frequencies at which errors reach the target, by interpolation of
    logarithms."""
    if not errors[-1] < TARGET < errors[0]:
        return None
    order = np.argsort(errors)
    logs = np.log(errors)[order], np.log(numbers)[order]
    return float(np.exp(np.interp(np.log(TARGET), *logs)))


def compare(num_dims, numbers, seeds) -> Iterator[tuple[list[dict], list[dict]]]:
    """Yield the errors, and the numbers of frequencies, for each kernel and measure."""
    box = ((-1.0, 1.0),) * num_dims
    for name, measure, kernel in cells(num_dims):
        errors = Errors(kernel, points(POINTS, num_dims))
        rule = partial(gp_orff.MonteCarlo, measure=measure)
        found = quantiles(errors, rule, numbers, seeds)
        sizes = {SPECTRAL: errors.norm, FROBENIUS: errors.frobenius_norm}
        what = {"d": num_dims, "kernel": name, "measure": measure}
        rows, asked = [], []
        for make in BOUNDS[name, measure]:
            norm, bound = NORMS[make], make(kernel, box, measure=measure)
            which = {**what, "bound": make.__name__, "norm": norm}
            for number, error in zip(numbers, found[norm], strict=True):
                ceiling = bound.error(number, CONFIDENCE) / sizes[norm]
                rows.append({**which, "D": number, "error": error, "at most": ceiling})
            asks = bound.num_frequencies(TARGET * sizes[norm], CONFIDENCE)
            asked.append({**which, "asks": asks, "takes": taken(numbers, found[norm])})
        yield rows, asked


def other_rules(num_dims, numbers, seeds) -> Iterator[dict]:
    """Yield the numbers of frequencies and features that other rules need."""
    for name, make in KERNELS.items():
        kernel = make(num_dims)
        columns = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(1)).num_features
        errors = Errors(kernel, points(POINTS, num_dims))
        what = {"d": num_dims, "kernel": name}
        D = taken(numbers, quantiles(errors, gp_orff.QuasiMonteCarlo, numbers, seeds)[SPECTRAL])
        yield {**what, "rule": "QuasiMonteCarlo", "D": D, "F": D and round(columns * D)}
        for rules in (map(gp_orff.GaussHermite, range(2, 200)), grids(num_dims, columns)):
            yield what | smallest(errors, rules)


def grids(num_dims: int, columns: int) -> Iterator[gp_orff.Grid]:
    box = ((-1.0, 1.0),) * num_dims
    grid = partial(gp_orff.Grid, box, lengthscale_range=(1, 1), tolerance=1e-8)
    for number in sorted({round(2 * 1.2**k) for k in range(40)}):
        yield grid(max_features=columns * number, diagonal_correction=False)


def smallest(errors: Errors, rules) -> dict[str, object]:
    """Return the first of some rules whose error is below the target."""
    for rule in rules:
        try:
            features = gp_orff.ORFFKernel(errors.kernel, rule)
            error, _ = errors.of_features(features)
        except ValueError:  # too few features, and it says so
            continue
        if error < TARGET * errors.norm:
            D = features.frequencies[0].num_frequencies
            return {"rule": type(rule).__name__, "D": D, "F": features.num_features}
    raise ValueError(f"none of these rules has an error below {TARGET} ‖K(0)‖")


def picture(rows):
    figure, axes = pictures.panels(len(DIMS), len(KERNELS), sharex=True, sharey="row")
    for i, num_dims in enumerate(DIMS):
        for j, name in enumerate(KERNELS):
            ax = axes[i][j]
            for measure, colour in COLOURS.items():
                own = [
                    r
                    for r in rows
                    if (r["d"], r["kernel"], r["measure"]) == (num_dims, name, measure)
                ]
                for bound, line in LINES.items():
                    found = [r for r in own if r["bound"] == bound]
                    D, error, most = ([r[key] for r in found] for key in ("D", "error", "at most"))
                    ax.loglog(D, most, line, color=colour, lw=1.4)
                    if bound != "rahimi_recht":  # the same error as beside `brault`
                        face = colour if NORMS[getattr(bounds, bound)] == SPECTRAL else "white"
                        ax.loglog(D, error, "o-", color=colour, mfc=face, ms=4, lw=1.0)
            ax.axhline(TARGET, color="0.5", lw=0.8, zorder=0)
            ax.set_title(f"{name}, d = {num_dims}", fontsize=10)
    for ax in axes[-1]:
        ax.set_xlabel("frequencies D")
    for ax in axes[:, 0]:
        ax.set_ylabel("largest error / ‖K(0)‖")
    line = partial(pictures.plt.Line2D, [], [])
    handles = [
        line(color=colour, lw=2, label=f"{measure} measure") for measure, colour in COLOURS.items()
    ]
    handles += [
        line(color="0.3", marker="o", mfc=face, ms=5, lw=1.0, label=f"found, 95 %, {norm} norm")
        for face, norm in (("0.3", SPECTRAL), ("white", FROBENIUS))
    ]
    handles += [
        line(color="0.3", linestyle=style, label=f"bound: {name}") for name, style in LINES.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(words: Sequence[str] | None = None) -> None:
    sizes = {"seeds": (200, 2), "most": (10_000, 1000), "dims": (3, 2)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    dims = [num_dims for num_dims in DIMS if num_dims <= arguments.dims]
    numbers = [number for number in NUMBERS if number <= arguments.most]
    fewer = [number for number in FEWER if number <= arguments.most]
    rows, asked, rules, waiting = Rows(), Rows(), Rows(), []
    for num_dims in dims:
        for errors, frequencies in compare(num_dims, numbers, arguments.seeds):
            for row in errors:
                rows.add(**row)
            waiting += frequencies
    for row in waiting:
        asked.add(**row)
    for num_dims in dims:
        for row in other_rules(num_dims, fewer, arguments.seeds):
            rules.add(**row)
    pictures.save_picture(arguments, picture(rows))
    settings = {"seeds": arguments.seeds, "target": TARGET, "confidence": CONFIDENCE}
    save(arguments, {**settings, "errors": rows, "frequencies": asked, "rules": rules})
