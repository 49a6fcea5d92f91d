"""Seconds of single steps."""

from collections.abc import Mapping

from regions.markdown import decimal, grouped, number, power, table
from regions.registry import sentence, tabulated


@sentence
def derived_maps(found: Mapping) -> str:
    return (
        f"Maps of divergence and vorticity with error bars at {power(found['places'])} points, "
        f"{found['F']} features: {number(found['seconds'], 1)} s."
    )


@sentence
def robot_loop(found: Mapping) -> str:
    own, bare = (
        f"{number(1000 * found[name]['median'])} ms"
        for name in ("update and prediction", "one Cholesky")
    )
    return (
        "A robot's loop, `update` with one observation, then mean and variance at the next place, "
        f"with {found['F']} features: {own} (median; one Cholesky factorisation alone: {bare})."
    )


@sentence
def exact_evaluation(found: Mapping) -> str:
    ratios: dict[int, list[float]] = {}  # by the size without gaps
    for row in found["rows"]:
        if row["observed"] != "gaps":
            ratios.setdefault(round(row["numbers"], -2), []).extend([row["ratio"], row["ARD"]])
    parts = [
        f"{grouped(size)} numbers: {decimal(min(own), 1)} to {decimal(max(own), 1)} times"
        for size, own in ratios.items()
    ]
    radars = found["radars"]
    return (
        "Evidence and gradient under the exact Helmholtz kernel (two and three inputs, vectors and "
        "directions, one lengthscale and one for each input), over one Cholesky factorisation and "
        f"one inverse: {'; '.join(parts)}. A fit to {grouped(radars['radials'])} radial velocities "
        f"of four radars, with a noise each: {number(radars['seconds'])} s."
    )


@tabulated
def exactgp_step(found: Mapping) -> str:
    rows = {row["contestant"]: row for row in found["rows"]}
    own, exact = rows["orff"], rows["exact"]
    names = {
        "orff": "`ORFFKernel`",
        "low_rank": "`LowRankRootLinearOperator`",
        "bare": "bare work",
        "exact": f"exact kernel, N = {grouped(exact['points'])}",
    }
    lines = [
        [
            names[name],
            number(row["seconds"]),
            number(row["ratio"]),
            number(row["MiB"]),
            number(row["MiB"] / own["MiB"]),
        ]
        for name, row in rows.items()
    ]
    setting = (
        "One training step (evidence and gradient), curl-free RBF, "
        f"N = {grouped(own['points'])}, {found['columns']} trigonometric columns, "
        "against the same features as gpytorch's `LowRankRootLinearOperator`, against the bare "
        "work no method avoids (one cosine and sine of every phase, φᵀφ, φ·G), and the exact "
        f"kernel on {grouped(exact['points'])} points."
    )
    head = ["", "seconds", "time / ORFF", "extra MiB", "MiB / ORFF"]
    return f"{setting}\n\n{table(head, lines)}"


@sentence
def kronecker_step(found: Mapping) -> str:
    one, _, written = found["rows"]
    return (
        f"A separable kernel with {written['outputs']} outputs, N = {grouped(found['points'])} and "
        f"{found['columns']} columns: {number(found['ratio of 20 outputs to one'])} times the step "
        f"of one output ({number(one['seconds'])} s), against {number(written['seconds'])} s "
        "without the Kronecker algebra."
    )


@sentence
def many_outputs(found: Mapping) -> str:
    one, many = found["rows"]
    eigen, factor = (row["seconds"] for row in found["algebra"])
    return (
        f"With {many['outputs']} outputs, {found['inputs']} inputs, N = {grouped(found['points'])} "
        f"and {grouped(found['columns'])} random columns, a step takes {number(found['ratio'])} "
        f"times that of one output ({number(many['seconds'])} s against {number(one['seconds'])} "
        f"s): one eigendecomposition ({number(eigen)} s) in place of a factor and an inverse for "
        f"each output ({number(factor)} s each)."
    )
