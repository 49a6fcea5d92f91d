"""The experiments of Le, Sarlós & Smola 2013."""

from collections.abc import Iterator, Mapping

from regions.markdown import Results, decimal, grouped, number, table
from regions.registry import region

METHODS = {  # label: method of ours, column of the paper
    "exact RBF": ("exact RBF", "exact RBF"),
    "`Nystroem`": ("Nystroem", "Nystroem"),
    "`RBFSampler`": ("RBFSampler", ""),
    "`MonteCarlo`": ("MonteCarlo", "MonteCarlo"),
    "`QuasiMonteCarlo`": ("QuasiMonteCarlo", ""),
    "`Fastfood`": ("Fastfood", "Fastfood"),
    "`StructuredOrthogonal`": ("StructuredOrthogonal", ""),
    "`FourierFastfood`": ("FourierFastfood", "FourierFastfood"),
    "exact Bessel": ("exact Bessel", "exact Bessel"),
    "`Fastfood`, Bessel": ("Fastfood, Bessel", "Fastfood, Bessel"),
    "exact polynomial": ("exact polynomial", "exact polynomial"),
    "`PolynomialCountSketch`": ("PolynomialCountSketch", ""),
    "`Fastfood`, polynomial": ("Fastfood, polynomial", "Fastfood, polynomial"),
}
PAPERS = ("Insurance", "CPU", "CT slices")  # of 85, 21 and 384 inputs


@region
def fast_projections(results: Results) -> str:
    """Le et al. 2013, Table 2 and Figure 1."""
    measured, errors = (results.one(f"papers/le_{name}") for name in ("table2", "figure1"))
    found = measured.results
    ratios = [row["Fastfood"] for row in errors.results["over MonteCarlo"]]
    setting = (
        "n inner products with d inputs, float64, one vector: `Fastfood` against the product with "
        "a dense matrix in torch, one thread. *Prediction*: with cosines, sines and ten outputs. "
        "*1000 vectors*: the projections of a matrix, all threads. *Memory*: what is stored for "
        "the frequencies. The error of an RBF kernel of 10 inputs (Figure 1) is "
        f"{number(min(ratios))} to {number(max(ratios))} times that of `MonteCarlo`."
    )
    head = [
        "d",
        "n",
        "dense, ms",
        "`Fastfood`, ms",
        "faster",
        "paper",
        "prediction, faster",
        "1000 vectors, faster",
        "memory",
    ]
    sources = f"{measured.source}<br>\n{errors.source}"
    return f"{setting}\n\n{table(head, _speeds(found))}\n\n{sources}"


def _speeds(found: Mapping) -> Iterator[list[str]]:
    one, predictions = (
        [row for row in found[name] if row["threads"] == 1] for name in ("projection", "prediction")
    )
    rows = zip(one, predictions, found["thousand"], found["memory"], strict=True)
    for own, prediction, thousand, memory in rows:
        yield [
            grouped(own["d"]),
            grouped(own["n"]),
            number(1e3 * own["dense"]),
            number(1e3 * own["Fastfood"]),
            f"{number(own['speedup'])}×",
            f"{own['paper']}×",
            f"{number(prediction['speedup'])}×",
            f"{number(thousand['speedup'])}×",
            f"{number(memory['ratio'])}× less",
        ]


@region
def errors_with_many_inputs(results: Results) -> str:
    """Le et al. 2013, Table 3, on other sets."""
    measured = results.one("papers/le_table3")
    found = measured.results
    sets = {row["set"]: row["d"] for row in found["rows"]}
    paper = {row["set"]: row for row in found["paper"]}
    errors = {(row["set"], row["method"]): row["RMSE"] for row in found["rows"]}
    runs = max(row["runs"] for row in found["rows"])
    setting = (
        f"Test RMSE with n = {found['features']} features, means over {runs} random splits, on "
        "sets that install offline; **the paper has others**, of which the last columns have "
        "three. Outputs have variance one (digits: classes as zeros and ones). Scale and noise "
        "are chosen by the evidence of the exact kernel, for all of its features. The paper's "
        "`MonteCarlo` is Random Kitchen Sinks, its Matérn kernel the Bessel kernel here; the "
        "polynomials have degree 10."
    )
    head = [
        "",
        *(name if "inputs" in name else f"{name} (d = {d})" for name, d in sets.items()),
        *(f"*{name}* (d = {paper[name]['d']})" for name in PAPERS),
    ]
    lines = [
        [
            label,
            *(decimal(errors.get((name, method)), 3) for name in sets),
            *(decimal(paper[name].get(column), 3) for name in PAPERS),
        ]
        for label, (method, column) in METHODS.items()
    ]
    return f"{setting}\n\n{table(head, lines)}\n\n{measured.source}"
