"""The tables of the papers: their numbers, ours, and what other rules give."""

from collections.abc import Iterator, Mapping, Sequence

from regions.markdown import Results, number, power, table
from regions.registry import region

OTHERS = ("trace", "QuasiMonteCarlo", "Grid")


@region
def tables_of_papers(results: Results) -> str:
    """Every number of Minh 2016, Tables 1 and 2, and of Brault et al. 2016, Table 3."""
    names = ("minh_table1", "minh_table2", "brault_table3")
    measured = [results.one(f"papers/{name}") for name in names]
    grams, fields, points = (own.results for own in measured)
    lines = [*_grams(grams), *_fields(fields), *_points(points)]
    runs = {row["N"]: row["runs"] for row in points["rows"]}
    setting = (
        "The tables of Minh 2016 and Table 3 of Brault et al. 2016, beside our means over "
        f"{grams['runs']} and {max(runs.values())} runs ({runs[max(runs)]} for {power(max(runs))} "
        "points). *Gram*: error relative to the Frobenius norm, at 100 "
        "points of [−1, 1]³. *Field*: RMSE of the vectors of a field in the plane, whose "
        f"components have rms {number(fields['field'])}, from 80 points; its penalty is so small "
        "that few features can do better than the exact kernel. *Table 3*: RMSE of a number, of "
        f"rms {number(points['rms of y'])}, with 20 inputs and outputs, D = 1000, and no grid; the "
        "paper does not define its RMSE, and that of a vector, √20 times ours, is nearer to most "
        "of its numbers. `Grid` has at most as many features as random rules."
    )
    head = ["", "paper", "ours", *(f"`{name}`" for name in OTHERS)]
    sources = "<br>\n".join(own.source for own in measured)
    return f"{setting}\n\n{table(head, lines)}\n\n{sources}"


def _grams(found: Mapping) -> Iterator[list[str]]:
    for kernel in ("curl-free", "divergence-free"):
        rows = [row for row in found["rows"] if row["kernel"] == kernel]
        for name in ("unbounded", "bounded"):
            yield _line(f"Gram, {kernel}, {name}", rows, name)


def _fields(found: Mapping) -> Iterator[list[str]]:
    for name in ("exact", "unbounded", "bounded"):
        yield _line(f"Field, {name}", found["rows"], name)


def _line(what: str, rows: Sequence[Mapping], name: str) -> list[str]:
    """A map of the paper; other rules stand once, beside its best map."""
    own = [row for row in rows if row["map"] == name]
    others = [
        [row for row in rows if row["map"] == other] if name == "bounded" else []
        for other in OTHERS
    ]
    numbers = " / ".join(str(row["D"]) for row in own if row["D"])
    what += f", D = {numbers}" if numbers else ""
    return [what, _values(own, "paper"), *(_values(part, "mean") for part in (own, *others))]


def _points(found: Mapping) -> Iterator[list[str]]:
    for data in ("without noise", "with noise"):
        orff, ovk, quasi = (
            [row for row in found["rows"] if (row["data"], row["method"]) == (data, name)]
            for name in ("ORFF", "OVK", "QuasiMonteCarlo")
        )
        numbers = " / ".join(power(row["N"]) for row in orff)
        what = f"Table 3, {data}, ORFF, N = {numbers}"
        yield [what, _values(orff, "paper"), _values(orff, "mean"), "", _values(quasi, "mean"), ""]
        yield ["… exact", _values(ovk, "paper"), _values(ovk, "mean"), "", "", ""]
        yield [
            "… ORFF : exact",
            *(_ratios(orff, ovk, key) for key in ("paper", "mean")),
            "",
            "",
            "",
        ]


def _values(rows: Sequence[Mapping], key: str) -> str:
    """0.30 / 0.13 / 2.3e−6."""
    return " / ".join(_short(row[key]) for row in rows)


def _ratios(rows: Sequence[Mapping], others: Sequence[Mapping], key: str) -> str:
    """As long as there are others."""
    pairs = zip(rows, others, strict=False)
    return " / ".join(number(row[key] / other[key]) for row, other in pairs)


def _short(value: float) -> str:
    if value >= 1e-4:
        return number(value)
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e−{abs(int(exponent))}"
