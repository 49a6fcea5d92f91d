"""Which frequencies: posteriors of every rule."""

from collections.abc import Mapping

from regions.markdown import decimal, number, percent, table
from regions.registry import tabulated

NAMES = {
    "MonteCarlo": "`MonteCarlo`",
    "Orthogonal": "`Orthogonal`",
    "QuasiMonteCarlo": "`QuasiMonteCarlo`",
    "GaussHermite": "`GaussHermite`",
    "Grid": "`Grid`, lengthscale and box known",
    "Grid (default)": "`Grid.for_data(x, max_features=F)`",
}
DIMS, FEATURES = 2, (500, 2000)


@tabulated
def rules(found: Mapping) -> str:
    rows = {
        (row["potential"], row["rule"], row["most"]): row
        for row in found["rows"]
        if row["d"] == DIMS
    }
    columns = [(potential, most) for potential in ("RBF", "Matérn 5/2") for most in FEATURES]
    exact = [
        f"1 / {_density(rows[potential, 'exact', None]['NLPD'])}" if most == FEATURES[0] else ""
        for potential, most in columns
    ]
    lines = [["exact", *exact]]
    for rule, name in NAMES.items():
        lines.append([name, *(_cell(rows.get((p, rule, most)), most) for p, most in columns)])
    setting = (
        f"Curl-free, d = {DIMS}, {number(found['lengthscales'][str(DIMS)], 1)} lengthscales, "
        f"{found['points']} vectors, noise {percent(found['noise'])}, {found['seeds']} seeds, "
        "posterior against the exact one: median ratio of the standard deviations / negative log "
        "density of the true field per component."
    )
    head = ["", *(f"{potential}, F = {most}" for potential, most in columns)]
    return f"{setting}\n\n{table(head, lines)}"


def _cell(row: Mapping | None, most: int) -> str:
    if row is None:
        return "refused"
    count = "" if row["F"] > 0.98 * most else f" (F = {row['F']:.0f})"
    return f"{_ratio(row['sd/exact'])} / {_density(row['NLPD'])}{count}"


def _ratio(value: float) -> str:
    return decimal(value, 3 if abs(value - 1) < 0.01 else 2)


def _density(value: float) -> str:
    return number(value, 3) if abs(value) >= 10 else decimal(value, 2)
