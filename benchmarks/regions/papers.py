"""The experiments of the papers."""

from collections.abc import Mapping

from regions.markdown import Results, decimal, grouped, number, percent, power, table
from regions.registry import region

BOUNDS = {
    "`rahimi_recht`": ("rahimi_recht", "trace"),
    "`brault`, base": ("brault", "base"),
    "`brault`": ("brault", "trace"),
    "`minh`": ("minh", "trace"),
}
MONTE_CARLO = {"`MonteCarlo`, base": "base", "`MonteCarlo`": "trace"}
DIGITS = {
    **{f"`{rule}`": rule for rule in ("MonteCarlo", "Orthogonal", "QuasiMonteCarlo")},
    "scikit-learn's `RBFSampler`, as many features": "RBFSampler",
}
RULES = {"`QuasiMonteCarlo`": "QuasiMonteCarlo", "`Grid`": "Grid"}


@region
def bounds(results: Results) -> str:
    measured = results.one("papers/bounds")
    found = measured.results
    kernels = dict.fromkeys((row["kernel"], row["d"]) for row in found["frequencies"])
    lines = [[f"{kernel}, d = {d}", *_line(found, kernel, d)] for kernel, d in kernels]
    setting = (
        "Frequencies that keep the largest error of a kernel (RBF, lengthscale 1) on [−1, 1]^d "
        f"below {percent(found['target'])} of ‖K(0)‖, with a probability of "
        f"{percent(found['confidence'])}: what bounds ask for, and what rules take "
        f"({found['seeds']} seeds). Trace measure where none is named; `minh` in the Frobenius "
        "norm; `Grid` knows the box."
    )
    head = ["", *BOUNDS, *MONTE_CARLO, *RULES]
    return f"{setting}\n\n{table(head, lines)}\n\n{measured.source}"


def _line(found: Mapping, kernel: str, d: int) -> list[str]:
    def own(rows: list[Mapping]) -> list[Mapping]:
        return [row for row in rows if (row["kernel"], row["d"]) == (kernel, d)]

    asked = {(row["bound"], row["measure"]): row for row in own(found["frequencies"])}
    taken = {row["rule"]: row["D"] for row in own(found["rules"])}
    return [
        *(_count(asked, bound, "asks") for bound in BOUNDS.values()),
        *(_count(asked, ("brault", measure), "takes") for measure in MONTE_CARLO.values()),
        *(grouped(taken[rule]) for rule in RULES.values()),
    ]


def _count(rows: Mapping, bound: tuple[str, str], key: str) -> str:
    return grouped(rows[bound][key]) if bound in rows else ""


FIELD_ROWS = {  # label: (kernel, rule and measure of Figure 4, method of Figure 5)
    "`RBFSampler(D)` + `Ridge`": ("independent", "RBFSampler", "", ""),
    "`RBFSampler(2D)` + `Ridge`": ("independent", "RBFSampler, 2D", "", ""),
    "decomposable, `MonteCarlo(D)`": ("decomposable", "MonteCarlo", "trace", ""),
    "curl-free, `MonteCarlo(D)`, base": ("curl-free", "MonteCarlo", "base", ""),
    "curl-free, `MonteCarlo(D)`": ("curl-free", "MonteCarlo", "trace", "random"),
    "curl-free, `GaussHermite`": ("curl-free", "GaussHermite", "", "quadrature"),
    "curl-free, `Grid`": ("curl-free", "Grid", "", "grid"),
    "decomposable, exact": ("decomposable", "exact", "", ""),
    "curl-free, exact": ("curl-free", "exact", "", "exact"),
}
FREQUENCIES, POINTS = (100, 300, 1000), (1000, 4000, 1_000_000)


@region
def learned_fields(results: Results) -> str:
    errors, times = results.one("papers/brault_figure4"), results.one("papers/brault_figure5")
    found = errors.results
    setting = (
        f"A curl-free field of five Gaussians from {found['points']} noisy vectors (noise: 1 % of "
        "the variance of the field): mean squared error at other points against D, in % of the "
        f"variance of the field (means of {found['seeds']} seeds); and seconds of "
        "`ORFFRidge(...).fit` with N vectors, with 1000 random frequencies, 32 × 32 nodes, and a "
        "grid. Lengthscale and penalty by cross-validation, for each method. `Grid` and "
        "`GaussHermite` have at most as many features as curl-free `MonteCarlo(D)`, 2D; "
        "`GaussHermite` refuses short lengthscales if D is small. Exponents from 10⁴ points on "
        "(exact: 10³ to 4·10³), where a grid's fixed costs are still most of its time."
    )
    head = [
        "",
        *(f"D = {D}" for D in FREQUENCIES),
        *(f"N = {power(N)}" for N in POINTS),
        "exponent of N",
    ]
    lines = [
        [label, *_shares(found, what), *_seconds(times.results, method)]
        for label, (*what, method) in FIELD_ROWS.items()
    ]
    return f"{setting}\n\n{table(head, lines)}\n\n{errors.source}\n\n{times.source}"


def _shares(found: Mapping, what: list[str]) -> list[str]:
    """MSE in percent; exact kernels have no D."""
    own = {
        row["D"]: number(100 * row["MSE"])
        for row in found["errors"]
        if [row["kernel"], row["rule"], row["measure"]] == what
    }
    return [own.get(D, own.get(None, "")) for D in FREQUENCIES]


def _seconds(found: Mapping, method: str) -> list[str]:
    own = {row["N"]: number(row["seconds"]) for row in found["times"] if row["method"] == method}
    slopes = {row["method"]: decimal(row["exponent"], 2) for row in found["exponents"]}
    return [*(own.get(N, "") for N in POINTS), slopes.get(method, "")]


@region
def digits(results: Results) -> str:
    measured, timed = (results.one(f"papers/brault_figure{figure}") for figure in (3, 2))
    found = measured.results
    errors = {(row["method"], row["D"]): decimal(row["error"], 1) for row in found["rows"]}
    numbers = sorted({D for _, D in errors if D})[::2]
    lines = [[name, *(errors[method, D] for D in numbers)] for name, method in DIGITS.items()]
    last = [row for row in timed.results["rows"] if row["OVK"]][-1]
    exponents = timed.results["exponents"]
    return (
        f"Test error in percent on handwritten digits (784 inputs, 10 classes, N = {found['N']}; "
        f"means of {found['seeds']} seeds) with D frequencies and simplex codes. The exact kernel: "
        f"{errors['OVK', None]}; a linear classifier on the pixels: {errors['linear', None]}. "
        "Brault et al. 2016 print their Figure 3 without numbers.\n\n"
        f"{table(['D', *map(str, numbers)], lines)}\n\n{measured.source}\n\n"
        f"Fitting {grouped(last['N'])} digits takes {number(last['ORFF'])} s with "
        f"D = {timed.results['D']}, {number(last['OVK'])} s with the exact kernel; time grows as "
        f"N^{decimal(exponents['ORFF'], 1)} and N^{decimal(exponents['OVK'], 1)} (Figure 2). "
        f"{timed.source}"
    )
