"""The experiments of the papers."""

from collections.abc import Mapping

from regions.markdown import Results, grouped, percent, table
from regions.registry import region

BOUNDS = {
    "`rahimi_recht`": ("rahimi_recht", "trace"),
    "`brault`, base": ("brault", "base"),
    "`brault`": ("brault", "trace"),
    "`minh`": ("minh", "trace"),
}
MONTE_CARLO = {"`MonteCarlo`, base": "base", "`MonteCarlo`": "trace"}
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
